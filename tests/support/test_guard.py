"""The guards see what they are there for: kernels with a broken mask fail."""

import pytest
import torch
from guard import GUARD_BYTES, GuardPages, guard_pages, unwatched
from numerics import DEVICE, rand

from fastvit_kernels import layer_norm, mlp
from fastvit_kernels.runtime.triton import tl, triton


@triton.jit
def _copy_kernel(y_ptr, x_ptr, first, load_size, store_size, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK) + first
    x = tl.load(x_ptr + offs, mask=offs < load_size, other=0.0)
    y = (x.to(tl.float32) * 2).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + offs, y, mask=offs < store_size)


def _double(x, *, first=0, load_extra=0, store_extra=0):
    """2 x by a kernel that reads load_extra and writes store_extra elements too many."""
    y, size = torch.empty_like(x), x.numel()
    _copy_kernel[(1,)](y, x, first, size + load_extra, size + store_extra, BLOCK=128)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(store_extra=1), r"after .*aten::empty_like in torch: bytes"),
        (dict(first=-1), r"before .*bytes"),
        pytest.param(
            dict(load_extra=1),
            r"was read:\n .*of the user: byte",
            marks=pytest.mark.skipif(
                DEVICE.type == "cuda", reason="only the interpreter shows each address"
            ),
        ),
    ],
)
def test_stray_access(dtype, wrong, message):
    with pytest.raises(AssertionError, match=message), guard_pages() as guard:
        _double(guard.place(rand(77, dtype=dtype), "of the user"), **wrong)


def test_load_past_the_end_is_nan():
    with GuardPages() as guard:  # and no look at each address
        y = torch.empty(78, device=DEVICE)
        _copy_kernel[(1,)](y, guard.place(rand(77)), 0, 78, 78, BLOCK=128)
    guard.check()
    assert y[:77].isfinite().all() and y[77].isnan()


def test_changed_input():
    message = r"inside .*of the user: bytes 0 to 3"
    with pytest.raises(AssertionError, match=message), guard_pages() as guard:
        guard.place(rand(3, 5, grad=False), "of the user")[0, 0] += 1


@pytest.mark.parametrize(
    "view",
    [
        lambda: rand(6, 8).t(),
        lambda: rand(8).expand(3, 8)[:, ::2],
        lambda: rand(40).as_strided((6, 8), (3, 1)),
        lambda: torch.ones(3, 5, dtype=torch.bool, device=DEVICE)[:, 1:],
        lambda: torch.tensor(3.0, device=DEVICE),
    ],
    ids=["t", "expand_step", "windows", "bool", "scalar"],
)
def test_place_keeps_values_strides_and_gradients(view):
    x = view().detach()
    x.requires_grad_(x.is_floating_point())
    with guard_pages() as guard:
        placed = guard.place(x)
    assert placed.stride() == x.stride() and placed.requires_grad == x.requires_grad
    assert placed.dtype == x.dtype and placed.is_leaf and placed.equal(x)
    assert placed.untyped_storage().nbytes() >= 2 * GUARD_BYTES


@pytest.mark.parametrize("direct", [False, True])
def test_outputs_and_scratch_of_ops_are_guarded(direct):
    """Forward and backward, past torch's dispatcher too."""
    with guard_pages() as guard, unwatched(direct):
        x, w = guard.place(rand(3, 9, 40)), guard.place(rand(48, 40, seed=1))
        y = mlp(layer_norm(x), w, None, guard.place(rand(24, 48, seed=2)), None)
        before = guard.guarded
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert guard.guarded > before > 6
