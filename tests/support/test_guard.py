"""The guards see what they are there for: kernels with a broken mask fail."""

import pytest
import torch
from guard import GUARD_BYTES, GuardPages, guard_pages, unwatched
from numerics import DEVICE, DTYPES, dtype_id, rand

from fastvit_kernels import layer_norm, mlp
from fastvit_kernels.runtime.triton import tl, triton

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@triton.jit
def _copy_kernel(y_ptr, x_ptr, size, first, load_size, store_size, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) + first
    x = tl.load(x_ptr + offs, mask=offs < load_size, other=0.0)
    y = (x.to(tl.float32) * 2).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs, y, mask=offs < store_size)


def _double(x, *, first=0, load_extra=0, store_extra=0):
    """2 x by a kernel that reads load_extra and writes store_extra elements too many."""
    y, size = torch.empty_like(x), x.numel()
    _copy_kernel[(triton.cdiv(size + 1, 64),)](
        y, x, size, first, size + load_extra, size + store_extra, BLOCK=64
    )
    return y


def test_a_right_kernel_passes():
    with guard_pages() as guard:
        x = guard.place(rand(7, 11))
        y = _double(x)
    assert y.equal(2 * x)
    assert guard.guarded == 4  # the normal numbers, their multiple, x, y


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_guard_store_past_end(dtype):
    message = r"after .*aten::empty_like in torch: bytes"
    with pytest.raises(AssertionError, match=message), guard_pages() as guard:
        _double(guard.place(rand(77, dtype=dtype)), store_extra=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_guard_store_before_start(dtype):
    with pytest.raises(AssertionError, match=r"before .*bytes"), guard_pages() as guard:
        _double(guard.place(rand(77, dtype=dtype)), first=-1)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="only the interpreter shows each address")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_guard_load_that_nobody_uses(dtype):
    message = r"was read:\n .*of the user: byte"
    with pytest.raises(AssertionError, match=message), guard_pages() as guard:
        _double(guard.place(rand(77, dtype=dtype), "of the user"), load_extra=1)


@triton.jit
def _sum_kernel(y_ptr, x_ptr, size, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < size, other=0.0).to(tl.float32)
    tl.store(y_ptr, tl.sum(x, axis=0))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_guard_load_past_end_is_nan(dtype):
    with GuardPages() as guard:  # and no look at each address
        x = guard.place(rand(77, dtype=dtype))
        right, wrong = torch.empty(2, device=DEVICE).unbind()
        _sum_kernel[(1,)](right, x, 77, BLOCK=128)
        _sum_kernel[(1,)](wrong, x, 78, BLOCK=128)
    guard.check()
    assert right.isfinite() and wrong.isnan()


def test_guard_sees_changed_input():
    x, ones = rand(3, 5), torch.ones(8, device=DEVICE)
    message = r"inside .*of the user: bytes 0 to 3"
    with pytest.raises(AssertionError, match=message), guard_pages() as guard:
        _sum_kernel[(1,)](guard.place(x, "of the user"), ones, 8, BLOCK=8)


@pytest.mark.parametrize(
    "view",
    [
        lambda: rand(6, 8).t(),
        lambda: rand(1, 8).expand(5, 8),
        lambda: rand(8).expand(3, 8)[:, ::2],
        lambda: rand(40).as_strided((6, 8), (3, 1)),
        lambda: rand(9, 9)[1:, 1:],
        lambda: torch.ones(3, 5, dtype=torch.bool, device=DEVICE)[:, 1:],
        lambda: rand(0, 4),
        lambda: torch.tensor(3.0, device=DEVICE),
    ],
    ids=["t", "expand", "expand_step", "windows", "sliced", "bool", "empty", "scalar"],
)
def test_place_keeps_values_strides_and_gradients(view):
    x = view().detach()
    x.requires_grad_(x.is_floating_point())
    with guard_pages() as guard:
        placed = guard.place(x)
    assert placed.stride() == x.stride() and placed.requires_grad == x.requires_grad
    assert placed.dtype == x.dtype and placed.is_leaf and placed.equal(x)
    assert x.numel() == 0 or placed.untyped_storage().nbytes() >= 2 * GUARD_BYTES


def test_guard_covers_ops():
    """Every launcher's outputs and scratch, forward and backward, in autocast too."""
    inputs = rand(3, 9, 40), rand(48, 40, seed=1), None, rand(24, 48, seed=2), rand(24, seed=3)
    with guard_pages() as guard, torch.autocast(DEVICE.type, dtype=bf16):
        x, *parameters = (None if t is None else guard.place(t) for t in inputs)
        y = mlp(layer_norm(x), *parameters)
        before = guard.guarded
        torch.autograd.grad(y, x, torch.ones_like(y))
    where = {b.description.split(" in ")[-1] for b in guard._buffers}
    assert {f"fastvit_kernels::{op}" for op in ("layer_norm_fwd", "mlp_bwd")} <= where
    assert guard.guarded > before > 10


def test_guard_covers_eager_calls():
    x, weight = rand(3, 9, 40), rand(40, seed=1)
    with guard_pages() as guard, unwatched():
        y = layer_norm(guard.place(x), guard.place(weight))
        torch.autograd.grad(y, y.grad_fn.next_functions[0][0].variable, torch.ones_like(y))
    where = [b.description.split(" in ")[-1] for b in guard._buffers]
    assert set(where[2:]) == {"torch"} and len(where) >= 2 + 2 + 1 + 2
