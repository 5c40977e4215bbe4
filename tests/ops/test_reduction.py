import pytest
import torch
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand

from fastvit_kernels.ops.common.reduction import column_sum


def _column_sum(x):
    return column_sum(x, torch.empty(x.shape[1], dtype=x.dtype, device=x.device))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (257, 64), (1031, 129), (2701, 66)], ids=str)
def test_column_sum(shape, dtype):
    x = rand(*shape, dtype=dtype, grad=False)
    assert_accurate(_column_sum, lambda x: x.sum(0), {"x": x})


def test_column_sum_accumulates_in_fp32():
    """4096 ones: a bf16 accumulator would stop at 256."""
    x = torch.ones(4096, 3, dtype=torch.bfloat16, device=DEVICE)
    assert _column_sum(x).tolist() == [4096.0] * 3


def test_column_sum_layouts():
    wide = rand(40, 200, grad=False)
    for x in (wide[:, 50:150], wide[::3], wide[5:6].expand(40, 200)):
        torch.testing.assert_close(_column_sum(x), x.sum(0))


def test_column_sum_of_no_rows():
    assert _column_sum(torch.empty(0, 5, device=DEVICE)).tolist() == [0.0] * 5
