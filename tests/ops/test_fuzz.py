"""Random calls of every op against its specification, every memory access checked.

200 cases by default, the same at every run; `--fuzz-cases 5000` for more, `--fuzz-seed` for others.
A case that fails is shrunk and printed: mend the code and append the case to fuzz_cases.KEPT.
"""

import pytest
from fuzz import Case, check
from fuzz_cases import KEPT, STRATEGIES
from hypothesis import HealthCheck, Phase, given, seed, settings
from op_facts import FACTS

PARTS = 4  # of one op, so that parallel runs can share them
# Of the cases, in proportion to how much there is to draw.
SHARES = {name: facts.share for name, facts in FACTS.items()}


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("op", STRATEGIES)
def test_fuzz(op, part, request):
    cases = request.config.getoption("--fuzz-cases") * SHARES[op] / (PARTS * sum(SHARES.values()))
    base = request.config.getoption("--fuzz-seed") * 1000

    @seed(base + list(STRATEGIES).index(op) * PARTS + part)
    @settings(
        max_examples=max(1, round(cases)),
        database=None,
        deadline=None,
        print_blob=True,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=STRATEGIES[op]())
    def run(case: Case) -> None:
        check(case)

    run()


@pytest.mark.parametrize("case", KEPT, ids=lambda case: f"{case.op}-{KEPT.index(case)}")
def test_kept_cases(case):
    check(case)
