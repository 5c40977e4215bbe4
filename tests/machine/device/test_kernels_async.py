"""sm_90's kernels, run: by the 2x rule, and what of their order is noticed when it is left out."""

import pytest

from tests.machine.device.left_out import kind_of, read, table_of

from .test_kernels import device


@pytest.mark.parametrize("number", range(2))
def test_every_case_of_check(number):
    """wgmma, TMA, mbarriers as they ship, operands read late."""
    said = device("--arch", "sm_90", "--precision", "bf16", "--kind", "check", "--share",
                  str(number), "2")  # fmt: skip
    assert "23 passed, 0 failed" in said


def test_operands_read_early():
    said = device(
        "--arch", "sm_90", "--precision", "bf16", "--kind", "early", "--only", "attention"
    )
    assert "10 passed, 0 failed" in said


@pytest.mark.parametrize("precision", ["fp16", "fp32", "tf32"])
def test_other_precisions(precision):
    for case in ("linear, gelu", "attention, D=32"):
        said = device("--arch", "sm_90", "--precision", precision, "--kind", "check",
                      "--only", case)  # fmt: skip
        assert " 0 failed" in said and not said.startswith("0 passed")


def test_warps_with_roles():
    said = device("--arch", "sm_90", "--precision", "bf16", "--kind", "configs", "--only",
                  "warp_specialize=True")  # fmt: skip
    assert "1 passed, 0 failed" in said


def test_each_row_of_the_table_is_explained():
    rows = read(table_of("sm_90"))
    assert rows and all(bool(row.noticed) != bool(row.why) for row in rows)
    assert all(row.why.startswith(("needless", "beyond", "not reached")) for row in rows if row.why)


@pytest.mark.parametrize("kind", [
    "wgmma.fence, left out", "wgmma.wait_group, left out", "wgmma.wait_group, another number",
    "wgmma.commit_group, left out", "fence.proxy, left out", "bar.sync, left out",
    "mbarrier.init, left out", "mbarrier.arrive, left out", "mbarrier.try_wait, left out",
])  # fmt: skip
def test_of_each_kind_some_are_noticed(kind):
    assert any(row.noticed for row in read(table_of("sm_90")) if kind_of(row) == kind)
