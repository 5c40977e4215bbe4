"""The norms of a block: nn.LayerNorm and nn.RMSNorm over one axis, on the fused ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from ..ops.common.samples import kept_rows
from ..ops.norm.functions import layer_norm, layer_norm_and_input, rms_norm, rms_norm_and_input
from ..ops.recomputed_norm import recomputed_norm
from ..runtime.arguments import autocast_dtype, check_int, check_tensor
from ..runtime.plain import is_hooked
from .checks import Eps, Flag, checked

NormLayer = Callable[[int], nn.Module]  # width -> norm


def _only_axis(op: str, normalized_shape: Any) -> int:
    width = normalized_shape
    if isinstance(normalized_shape, Sequence) and len(normalized_shape) == 1:
        width = normalized_shape[0]
    check_int(op, "normalized_shape, one axis,", width)
    return width


def _check_last_axis(op: str, x: Tensor, width: tuple[int, ...]) -> None:
    """What an op compares with a weight itself, where there is one."""
    check_tensor(op, "x", x)
    if tuple(x.shape[-1:]) != width:
        raise ValueError(f"{op}: the last axis of x must be {width[0]}, got shape {tuple(x.shape)}")


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm over the last axis: (..., C) -> (..., C).

    `and_input` returns (y, x), to start a pre-norm branch; with `samples`, y has only the samples
    that they keep.
    """

    @checked
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: Eps = 1e-5,
        elementwise_affine: Flag = True,
        bias: Flag = True,
        device: Any = None,
        dtype: Any = None,
    ):
        width = _only_axis("LayerNorm", normalized_shape)
        super().__init__(width, eps, elementwise_affine, bias, device, dtype)

    def forward(self, x: Tensor, and_input: bool = False, samples: Tensor | None = None):
        if self.weight is None:
            _check_last_axis("LayerNorm", x, self.normalized_shape)
        if not and_input:
            return layer_norm(x, self.weight, self.bias, self.eps)
        # A branch begins with a matmul, which under autocast reads the low-precision dtype.
        out_dtype = autocast_dtype(x) if isinstance(x, Tensor) else None
        return layer_norm_and_input(
            x, self.weight, self.bias, self.eps, out_dtype=out_dtype, samples=samples
        )


class RmsNorm(nn.RMSNorm):
    """nn.RMSNorm over the last axis, timm's RmsNorm: (..., C) -> (..., C).

    `and_input` as in LayerNorm.
    """

    eps: Any  # a float, where torch also takes None

    @checked
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: Eps = 1e-6,
        elementwise_affine: Flag = True,
        device: Any = None,
        dtype: Any = None,
    ):
        width = _only_axis("RmsNorm", normalized_shape)
        super().__init__(width, eps, elementwise_affine, device, dtype)

    def forward(self, x: Tensor, and_input: bool = False, samples: Tensor | None = None):
        if self.weight is None:
            _check_last_axis("RmsNorm", x, self.normalized_shape)
        if not and_input:
            return rms_norm(x, self.weight, self.eps)
        out_dtype = autocast_dtype(x) if isinstance(x, Tensor) else None
        return rms_norm_and_input(x, self.weight, self.eps, out_dtype=out_dtype, samples=samples)


def norm_and_input(norm: nn.Module, x: Tensor, samples: Tensor | None) -> tuple[Tensor, Tensor]:
    """norm(x) of the samples that are kept, and x, which a norm of ours hands on itself."""
    if not isinstance(norm, (LayerNorm, RmsNorm)):
        return norm(x if samples is None else kept_rows(x, samples)), x
    return norm(x, and_input=True, **({} if samples is None else {"samples": samples}))


def can_rebuild(norm: nn.Module) -> bool:
    """Whether a backward may run the norm again: ours, without a hook."""
    return type(norm) in (LayerNorm, RmsNorm) and not is_hooked(norm)


def rebuilt_output(
    norm: Any,
    y: Tensor,
    x: Tensor,
    recompute_fn: Callable[[], Tensor] | None,
    samples: Tensor | None,
) -> AbstractContextManager[None]:
    """Inside, what would save y = norm(x) saves nothing: the backward rebuilds it."""
    kind = "rms_norm" if isinstance(norm, RmsNorm) else "layer_norm"
    bias = getattr(norm, "bias", None)
    return recomputed_norm(y, x, norm.weight, bias, norm.eps, recompute_fn, kind, samples)
