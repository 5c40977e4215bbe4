"""What the ops share about their arguments: checks, the dtype to compute in, the view as rows."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from typing import Any

import torch
from torch import Tensor

from .compat import FakeTensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # what torch computes in
_BELOW_ONE = math.nextafter(1.0, 0.0)


def check_dense(op: str, name: str, x: object) -> None:
    """Raise TypeError unless x is a dense tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{op}: {name} must be a dense strided tensor, got {kind}")


def check_tensor(op: str, name: str, x: object, *, ndim: int | None = None) -> None:
    """Raise TypeError unless x is a dense tensor of FLOATS, ValueError unless of rank ndim."""
    check_dense(op, name, x)
    assert isinstance(x, Tensor)
    if not x.is_floating_point():
        raise TypeError(f"{op}: {name} must be floating point, got {x.dtype}")
    if x.dtype not in FLOATS:
        raise TypeError(f"{op}: {name} must be floating point of 16, 32 or 64 bits, got {x.dtype}")
    if ndim is not None and x.ndim != ndim:
        raise ValueError(f"{op}: {name} must have {ndim} axes, got shape {tuple(x.shape)}")


def check_shape(op: str, name: str, x: Tensor | None, shape: tuple[int, ...], like: Tensor) -> None:
    """Check an optional tensor: dense, floating point, of this shape, on the device of `like`."""
    if x is None:
        return
    check_tensor(op, name, x)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    check_device(op, name, x, like)


def check_device(op: str, name: str, x: Tensor, like: Tensor) -> None:
    """Raise ValueError unless x and `like` are on one device."""
    if x.device != like.device:
        raise ValueError(f"{op}: {name} must be on {like.device}, got {x.device}")


def check_epilogue(
    op: str,
    x: Tensor,
    N: int,
    residual: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
) -> str | None:
    """Raise on bad epilogue arguments; return what the kernels cannot do, if anything."""
    check_shape(op, "layer_scale", layer_scale, (N,), like=x)
    kept = isinstance(row_scale, Tensor) and row_scale.dtype is torch.int64
    if row_scale is not None and kept and row_scale.shape != x.shape[:1]:
        _check_kept(op, x, N, residual, row_scale)
        return None
    if row_scale is not None:
        check_tensor(op, "row_scale", row_scale)
    check_shape(op, "residual", residual, (*x.shape[:-1], N), like=x)
    if row_scale is None:
        return None
    if x.ndim < 2:
        raise ValueError(f"{op}: row_scale needs x of shape (B, ..., K), got {tuple(x.shape)}")
    check_shape(op, "row_scale", row_scale, (x.shape[0],), like=x)
    return "row_scale requires a gradient" if row_scale.requires_grad else None


def _check_kept(op: str, x: Tensor, N: int, residual: Tensor | None, samples: Tensor) -> None:
    """Raise unless x has as many samples as `samples` keeps of the residual's."""
    if x.ndim < 2 or residual is None or residual.ndim == 0:
        raise TypeError(
            f"{op}: row_scale must be floating point, got torch.int64: what keep_samples gave "
            "needs x of shape (S, ..., K) and a residual of shape (B, ..., N)"
        )
    B = residual.shape[0]
    S = _check_samples(op, "row_scale", samples, B, x)
    if x.shape[0] != S:
        raise ValueError(
            f"{op}: row_scale keeps {S} samples of {B}, so x must have as many, got {x.shape[0]}"
        )
    check_shape(op, "residual", residual, (B, *x.shape[1:-1], N), like=x)


def check_samples(op: str, x: Tensor, samples: Any) -> None:
    """Raise unless `samples` can be what keep_samples gave for x (B, ..., C)."""
    if x.ndim < 2:
        raise ValueError(f"{op}: samples needs x of shape (B, ..., C), got {tuple(x.shape)}")
    _check_samples(op, "samples", samples, x.shape[0], x)


def _check_samples(op: str, name: str, samples: Any, B: int, like: Tensor) -> int:
    """How many of B samples it keeps; raise unless keep_samples(B, ...) can have given it."""
    check_dense(op, name, samples)
    if samples.dtype is not torch.int64:
        raise TypeError(
            f"{op}: {name} must be int64, as keep_samples gives it, got {samples.dtype}"
        )
    if samples.ndim != 1 or not B < samples.shape[0] <= 2 * B:
        raise ValueError(
            f"{op}: {name} must be what keep_samples gave for {B} samples, at least {B + 1} and "
            f"at most {2 * B} numbers, got shape {tuple(samples.shape)}"
        )
    check_device(op, name, samples, like)
    return samples.shape[0] - B


def check_input(op: str, x: Tensor) -> None:
    """Raise unless x is a dense floating-point tensor with at least one axis."""
    check_tensor(op, "x", x)
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have at least one axis, got a scalar")


def check_weight(
    op: str, name: str, weight: Tensor, bias: Tensor | None, K: int, like: Tensor
) -> str | None:
    """Raise unless weight is (N, K) and bias (N,) or None; return what the kernels cannot do."""
    check_tensor(op, name, weight, ndim=2)
    N = weight.shape[0]
    check_shape(op, name, weight, (N, K), like)
    check_shape(op, name.replace("weight", "bias"), bias, (N,), like)
    return None if N > 0 and K > 0 else f"{name} is empty"


def check_number(
    op: str,
    name: str,
    x: object,
    least: float = -sys.float_info.max,
    most: float = sys.float_info.max,
    *,
    wanted: str = "finite",
) -> None:
    """Raise TypeError unless x is an int or float, ValueError unless least <= x <= most."""
    if isinstance(x, bool) or not isinstance(x, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{op}: {name} must be a number, got {_described(x)}")
    if not least <= x <= most:  # NaN fails too
        raise ValueError(f"{op}: {name} must be {wanted}, got {x}")


def check_probability(op: str, name: str, x: object) -> None:
    """Raise unless x is a number from 0 to 1."""
    check_number(op, name, x, 0.0, 1.0, wanted="in [0, 1]")


def check_dropout(op: str, dropout_p: float, name: str = "dropout_p") -> None:
    """Raise unless 0 <= dropout_p < 1: the kernels divide by 1 - dropout_p."""
    check_number(op, name, dropout_p, 0.0, _BELOW_ONE, wanted="in [0, 1)")


def check_eps(op: str, eps: float, name: str = "eps") -> None:
    """Raise unless eps is a finite number, at least 0."""
    check_number(op, name, eps, 0.0, wanted="finite and at least 0")


def check_int(op: str, name: str, x: object, least: int = 1) -> None:
    """Raise TypeError unless x is an int, ValueError unless it is at least `least`."""
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int, got {_described(x)}")
    if x < least:
        raise ValueError(f"{op}: {name} must be at least {least}, got {x}")


def check_flags(op: str, **flags: object) -> None:
    """Raise TypeError unless every flag is True or False."""
    for name, x in flags.items():
        if not isinstance(x, (bool, torch.SymBool)):
            raise TypeError(f"{op}: {name} must be True or False, got {_described(x)}")


def check_dtype(op: str, name: str, dtype: Any) -> None:
    """Raise TypeError unless dtype is None or one of FLOATS."""
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in FLOATS):
        raise TypeError(f"{op}: {name} must be None or one of {list(FLOATS)}, got {dtype!r}")


def _described(x: object) -> str:
    shown = isinstance(x, (bool, int, float, str)) or x is None
    return f"{type(x).__name__} {x!r}" if shown else type(x).__name__


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for on x's device; None outside autocast and for float64."""
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or x.dtype is torch.float64:
        return None  # torch knows no autocast on the meta device and would raise
    return torch.get_autocast_dtype(device)


def compute_dtype(op: str, **tensors: Tensor | None) -> torch.dtype:
    """The dtype a matmul op computes in: autocast's, else the one its operands share.

    Args:
        op: for the message.
        tensors: the matmul operands by argument name, the first of them not None.
    Raises: TypeError if the operands differ outside autocast, as torch's own linear does.
    """
    (first_name, first), *rest = ((k, v) for k, v in tensors.items() if v is not None)
    dtype = autocast_dtype(first)
    if dtype is not None:
        return dtype
    for name, x in rest:
        if x.dtype != first.dtype:
            raise TypeError(
                f"{op}: {name} must have the dtype of {first_name}, {first.dtype}, got {x.dtype}; "
                "mixed dtypes need torch.autocast"
            )
    return first.dtype


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of any of them."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.to(dtype), without the call if there is nothing to cast."""
    return x if x.dtype == dtype else x.to(dtype)


def contiguous(x: Tensor | None) -> Tensor | None:
    """x.contiguous(); None stays None."""
    return x if x is None or x.is_contiguous() else x.contiguous()


def is_aligned(x: Tensor) -> bool:
    """Whether x begins at a multiple of 16 bytes; else its rows load element by element."""
    address = x.storage_offset() * x.itemsize if isinstance(x, FakeTensor) else x.data_ptr()
    return address % 16 == 0


def aligned(x: Tensor) -> Tensor:
    """x, or a copy, contiguous from a multiple of 16 bytes on: what TMA and 16-byte copies read."""
    x = x.contiguous()
    return x if is_aligned(x) else x.clone()


@functools.lru_cache(maxsize=1024)
def row_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """The row stride of x.reshape(-1, C) if that is a view of whole rows, else None."""
    if strides[-1] != 1 and shape[-1] != 1:
        return None
    axes = [(n, stride) for n, stride in zip(shape[:-1], strides[:-1], strict=True) if n != 1]
    for (_, outer), (n, inner) in itertools.pairwise(axes):
        if outer != n * inner:
            return None
    return axes[-1][1] if axes else shape[-1]


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape, strides
empty_strided = torch.empty_strided  # the quickest of torch's ways to allocate


@functools.lru_cache(maxsize=1024)
def layout(shape: tuple[int, ...]) -> Layout:
    """Shape and contiguous strides, for `empty_strided`."""
    strides = [1] if shape else []
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * max(n, 1))
    return tuple(shape), tuple(reversed(strides))


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, by way of the quicker torch.empty_strided where no size is a SymInt."""
    try:
        size, strides = layout(shape)
    except TypeError:  # a SymInt has no hash
        return torch.empty(shape, dtype=dtype, device=device)
    return empty_strided(size, strides, dtype=dtype, device=device)


def as_rows(x: Tensor) -> Tensor:
    """x as (rows, C), last axis contiguous: a view if the strides allow it, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def empty_gradients(
    device: torch.device, *wanted: tuple[tuple[int, ...], torch.dtype | None]
) -> Any:
    """An uninitialised tensor for each (shape, dtype), without elements where dtype is None."""
    return tuple(
        empty(shape if dtype else (0,), dtype or torch.float32, device) for shape, dtype in wanted
    )
