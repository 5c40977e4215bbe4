"""Faults are drawn, planted in a copy, noticed or shown."""

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
