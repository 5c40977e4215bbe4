"""Faults are drawn, planted in a copy, noticed or shown."""

import json

import drawn
import pytest
from mutate import check


def _fault(file: str, old: str, new: str, *tests: str) -> drawn.Fault:
    source = (drawn.ROOT / drawn.path_of(file)).read_text()
    begin = len(source.partition(old)[0].encode())
    assert old in source
    return drawn.Fault("name", file, new, begin, begin + len(old.encode()), (0, 0), tests)


def test_planted_fault_is_noticed():
    path = drawn.ROOT / "fastvit_kernels/ops/common/reduction.py"
    before, empty = path.read_bytes(), "num_rows == 0 or N == 0"
    tests = "ops/test_reduction.py::test_column_sum_of_no_rows"
    wrong = _fault("ops/common/reduction.py", empty, "N == 0", tests)
    assert check(wrong, timeout=3600).outcome == "noticed"
    right = _fault("ops/common/reduction.py", empty, "N == 0 or num_rows == 0", tests)
    assert check(right, timeout=3600).outcome == "not noticed"
    assert path.read_bytes() == before


def test_a_test_that_is_not_there_notices_nothing():
    """A renamed test, as those of kernels in Gluon, whose names are written down, would."""
    none = _fault("runtime/plain.py", "Tensor", "Tensor", "test_docs.py::test_of_nobody")
    with pytest.raises(LookupError, match="test_of_nobody"):
        check(none, timeout=3600)
    listed = {name.partition("[")[0] for names in drawn.IN_GLUON.values() for name in names}
    for file, _, function in (name.partition("::") for name in listed):
        assert f"def {function}(" in (drawn.ROOT / "tests" / file).read_text()


SOURCE = '''"""Text, 1 and 2."""
def f(a: int = 3, *, b: bool = True) -> "1":
    """Text 4."""
    if not a < 1 and b:
        raise ValueError(f"{a + 1}", 7)
    return g(a[: a + 2], key=é) if a else print("5")
'''


def test_fault_ids_are_stable():
    before = [fault.id for fault in drawn._mutants("x.py", SOURCE)]
    after = [
        fault.id for fault in drawn._mutants("x.py", f"{SOURCE}\n\n\ndef g():\n    return 1\n")
    ]
    assert after[: len(before)] == before and len(set(after)) == len(after)
    moved = [fault.id for fault in drawn._mutants("x.py", SOURCE.replace("def", "\n# 1\n\ndef"))]
    assert moved == before


def test_tests_of_a_fault(tmp_path):
    file = "fastvit_kernels/ops/norm/kernels.py"
    tests = ["tests/a.py::wide[1]", "tests/a.py::wide[2]", "tests/b.py::small", "tests/c.py::not"]
    own = {"tests": ["tests/ops/test_norm.py::own"], "lines": {file: {"1": "1", "2": "1"}}}
    more = {"tests": tests, "lines": {file: {"1": "7", "2": "3", "3": "8"}}}
    own["seconds"], more["seconds"] = [1], [1, 1, 1, 1]
    for worker, found in (("gw0", more), ("gw1", own)):
        (tmp_path / f"ran.{worker}").write_text(json.dumps(found))
    ran = drawn.Ran(tmp_path / "ran")
    wanted = ("ops/test_norm.py::own", "b.py::small", "a.py::wide[1]", "a.py::wide[2]")
    assert ran.tests("ops/norm/kernels.py", 1, 2) == wanted
    assert ran.tests("ops/norm/kernels.py", 3, 3) == ("c.py::not",)
    assert set(ran.tests("ops/norm/kernels.py", 4, 9)) == {*wanted, "c.py::not"}
    with pytest.raises(FileNotFoundError):
        drawn.Ran(tmp_path / "other")
