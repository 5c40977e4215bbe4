"""resources.csv: what a row is, and what counts as more than it says."""

from dataclasses import replace

import pytest

from tests.machine.aot import TARGETS
from tests.machine.examine import Examined
from tests.machine.table import COLUMNS, compare, read_table, worst, write_table

KERNEL = Examined(
    kernel="linear_fwd",
    config="BLOCK_M=128 w8 s3",
    dtypes="bf16",
    arch="sm_90",
    registers=128,
    spills=0,
    shared=98304,
    shared_limit=TARGETS["sm_90"].shared_limit,
    warps_per_sm=16,
    tensor_cores="wgmma",
    needs_tensor_cores=True,
    copies="cp.async",
    seconds=0.5,
    key="k",
)
SMALL = replace(KERNEL, config="BLOCK_M=64 w4 s3", registers=64, spills=4, shared=1025)


@pytest.fixture
def table(tmp_path):
    """Writes the rows of these kernels and reads them."""

    def rows(*kernels):
        write_table(kernels, tmp_path / "table.csv")
        return read_table(tmp_path / "table.csv")

    return rows


def test_a_row_is_the_worst_of_its_specialisations():
    first, last = replace(KERNEL, useful=0.25), replace(KERNEL, seconds=2.0, useful=0.75)
    other = replace(KERNEL, registers=160, spills=8, shared=64, warps_per_sm=8, key="other")
    for kernels in ([first, other, last], [last, other, first]):
        (row,) = worst(kernels).values()
        found = (row.registers, row.spills, row.shared, row.warps_per_sm, row.useful)
        assert found == (160, 8, 98304, 8, 0.25)


def test_a_row_shows_the_longest_loop_in_whatever_order_cases_were_compiled():
    quick, slow = (replace(KERNEL, hot_loop=loop, key=loop) for loop in ("shared 268", "ALU 1532"))
    for kernels in ([quick, slow, KERNEL], [KERNEL, slow, quick]):
        (row,) = worst(kernels).values()
        assert row.hot_loop == "ALU 1532"


def test_every_config_of_some_targets_has_a_row_and_every_kernel_of_the_others(table):
    rows = table(
        replace(SMALL, arch="sm_100"),
        replace(KERNEL, arch="sm_100", tensor_cores="tcgen05"),
        SMALL,
        replace(KERNEL, hot_loop="ALU 15", products="2/8", useful=0.256),
    )
    wanted = [
        "sm_90,linear_fwd,BLOCK_M=128 w8 s3,bf16,128,0,98304,16,wgmma,cp.async,ALU 15,2/8,0.26",
        "sm_90,linear_fwd,BLOCK_M=64 w4 s3,bf16,64,4,1025,16,wgmma,cp.async,,,",
        "sm_100,linear_fwd,,,128,4,98304,16,wgmma,cp.async,,,",
    ]
    assert [",".join(row.values()) for row in rows.values()] == wanted
    assert list(rows) == [tuple(line.split(",")[:4]) for line in wanted]


def test_what_is_more_than_the_table_says(table):
    rows = table(KERNEL, SMALL, replace(KERNEL, arch="sm_100"))
    assert compare([KERNEL, SMALL], rows) == ([], [])
    name = "sm_90 linear_fwd [BLOCK_M=128 w8 s3; bf16]"
    more = replace(KERNEL, registers=130)
    assert compare([more, SMALL], rows) == ([f"{name}: registers 128 -> 130"], [])
    mixed = replace(KERNEL, registers=96, shared=98305)
    assert compare([mixed, SMALL], rows)[0] == [
        f"{name}: registers 128 -> 96, shared 98304 -> 98305"
    ]
    regressions, (better, gone) = compare([replace(KERNEL, registers=96)], rows)
    assert regressions == [] and better == f"better than the table: {name}: registers 128 -> 96"
    assert gone == "no longer compiled: sm_90 linear_fwd BLOCK_M=64 w4 s3 bf16"
    new = replace(KERNEL, config="BLOCK_M=32 w4 s3")
    told = "not in the table: sm_90 linear_fwd [BLOCK_M=32 w4 s3; bf16]"
    assert compare([new, KERNEL, SMALL], rows) == compare([new], rows, whole=False) == ([], [told])


def test_another_table_is_refused(tmp_path):
    (tmp_path / "table.csv").write_text(",".join(COLUMNS[:-1]))
    with pytest.raises(ValueError, match="it has the columns arch, kernel, "):
        read_table(tmp_path / "table.csv")
