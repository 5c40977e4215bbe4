"""What the ops share about their arguments: checks, the dtype to compute in, the view as rows."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensor(op: str, name: str, x: object, *, ndim: int | None = None) -> None:
    """Raise TypeError unless x is a dense floating-point tensor, ValueError unless of rank ndim."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{op}: {name} must be a dense strided tensor, got {kind}")
    if not x.is_floating_point():
        raise TypeError(f"{op}: {name} must be floating point, got {x.dtype}")
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


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for on x's device; None outside autocast and for float64."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def compute_dtype(op: str, **tensors: Tensor | None) -> torch.dtype:
    """The dtype a matmul op computes in: autocast's, else the one its operands share.

    Args:
        op: for the message.
        tensors: the matmul operands by argument name, the first of them not None.
    Raises: TypeError where the operands differ outside autocast, as torch's own linear does.
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


def as_rows(x: Tensor) -> Tensor:
    """x as (rows, C), last axis contiguous: a view where the strides allow it, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()
