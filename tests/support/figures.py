"""How much is tested, counted from the tables of the tests: the figures of docs/numerics.md.

python tests/support/figures.py [FILE]    prints the table, or writes it between FILE's markers
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).resolve().parent.parent
sys.path += [str(TESTS), str(TESTS / "ops"), str(TESTS / "models")]

import conftest  # noqa: E402 : chooses Triton's interpreter where there is no GPU

BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


class Figure(NamedTuple):
    number: int
    what: str
    command: str


def _fuzz_cases() -> int:
    """Of one run of the suite: as many as test_fuzz draws by default."""
    from test_fuzz import PARTS, SHARES

    source = Path(conftest.__file__).read_text()
    found = re.search(r'"--fuzz-cases", type=int, default=(\d+)', source)
    assert found is not None
    total = PARTS * sum(SHARES.values())
    return sum(PARTS * max(1, round(int(found[1]) * share / total)) for share in SHARES.values())


def figures() -> list[Figure]:
    from faults import FAULTS
    from fuzz_cases import KEPT
    from test_all_configs import SHIPPED
    from test_bad_calls import BAD_CALLS
    from test_bad_models import BAD_MODEL_CALLS
    from test_hostile_weights import BAD_WEIGHTS

    return [
        Figure(
            _fuzz_cases() + len(KEPT),
            f"random calls, {len(KEPT)} of them kept because they failed once",
            "pytest tests/ops/test_fuzz.py",
        ),
        Figure(len(SHIPPED), "launch configs, each forced", "pytest tests/ops/test_all_configs.py"),
        Figure(
            BAD_CALLS,
            "bad calls of the ops, on both backends",
            "pytest tests/ops/test_bad_calls.py",
        ),
        Figure(
            BAD_MODEL_CALLS,
            "bad calls of modules, models and switches",
            "pytest tests/models/test_bad_models.py",
        ),
        Figure(
            BAD_WEIGHTS,
            "hostile weight files and state dicts",
            "pytest tests/models/test_hostile_weights.py",
        ),
        Figure(len(FAULTS), "faults to plant", "python tests/support/mutate.py"),
    ]


def table() -> str:
    rows = [f"| {f.number} | {f.what} | `{f.command}` |" for f in figures()]
    return "\n".join([BEGIN, "| number | of | command |", "| --- | --- | --- |", *rows, END])


def claimed(text: str) -> dict[str, int]:
    """Command -> number, as the table between the markers has them."""
    part = re.search(f"{re.escape(BEGIN)}(.*){re.escape(END)}", text, re.DOTALL)
    found = re.findall(r"^\| (\d+) \| .* \| `(.*)` \|$", part[1] if part else "", re.MULTILINE)
    return {command: int(number) for number, command in found}


def main(arguments: list[str]) -> None:
    if not arguments:
        print(table())
        return
    path = Path(arguments[0])
    pattern = f"{re.escape(BEGIN)}.*{re.escape(END)}"
    path.write_text(re.sub(pattern, lambda _: table(), path.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main(sys.argv[1:])
