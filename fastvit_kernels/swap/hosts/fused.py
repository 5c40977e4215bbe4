"""What every swapped class shares: when a block may jump over a child, and what a branch becomes.

A block computes x + tail(body(norm(x))) twice. Where the children let it, the norm hands its input
on and the body's last matmul ends in an epilogue that applies the tail (LayerScale, DropPath) and
the residual. A child may be jumped over when it was swapped itself, nobody watches it, and its
settings are those that the fused path computes; all of it is looked at again at every call. Any
other child is called like the host calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...ops.layer_norm import layer_norm, layer_norm_and_input
from ...ops.linear import linear
from ...runtime.arguments import autocast_dtype
from ...runtime.plain import add_branch, is_hooked, is_plain

Left = tuple[str, nn.Module, str]  # child name, the child, why it keeps its own forward


class Fused:
    """Mixin of every swapped class; stands before the host's class, so super() is the host."""

    level: ClassVar[str]
    host: ClassVar[type]  # the host's class
    children_known: ClassVar[frozenset[str]] = frozenset()  # children and parameters; empty: any
    pieces: Any = ()  # of a block: the children that it jumps over
    bodies: Any = ()  # of a block: the pieces that are its branches
    caveat: ClassVar[str] = ""  # when the forward is fused, where that depends on the caller

    def _get_name(self) -> str:
        return f"Fused{type(self).__name__}"  # for repr

    @classmethod
    def reject(cls, module: Any) -> str | None:
        """Why this module of the host's class must not be swapped, looked at once."""
        return None

    def blocked(self) -> str | None:
        """Why the fused forward must not run as things are now, looked at at every call."""
        return None

    def left(self) -> Iterator[Left]:
        """The children that keep their own forward inside the fused one, for the report."""
        yield from ()

    def draws(self) -> bool:
        """Whether a dropout inside draws numbers: the host draws those before DropPath's."""
        return False

    def host_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The host's forward, on the same children."""
        return super().forward(*args, **kwargs)  # type: ignore[misc]


def is_dense(x: object) -> bool:
    """Whether our ops take x: a Tensor, dense; not a NestedTensor, not a tracer's Proxy."""
    return isinstance(x, Tensor) and not x.is_nested


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def jumpable(child: object) -> bool:
    """Whether a block may use the child's fused parts without calling it."""
    return isinstance(child, Fused) and not is_hooked(child) and child.blocked() is None  # type: ignore[arg-type]


def inert(child: object) -> bool:
    """Whether calling the child would give back its input: None, Identity, a dropout at rest."""
    if child is None:
        return True
    if type(child) is nn.Identity:
        return not is_hooked(child)
    if type(child) is nn.Dropout:
        return (child.p == 0 or not child.training) and not is_hooked(child)
    return False


def why_not_plain(child: nn.Module) -> str:
    """The reason that the report gives for a Linear that is not plain."""
    if is_hooked(child):
        return "it is hooked"
    if type(child) is nn.Linear:
        return f"its weight is a {type(child.weight).__name__}"
    return f"it is a {type(child).__name__}, not an nn.Linear"


def left_linears(module: nn.Module, *children: str) -> Iterator[Left]:
    for name in children:
        child = getattr(module, name, None)
        if child is not None and not is_plain(child):
            yield name, child, why_not_plain(child)


def left_dropouts(module: nn.Module, *children: str) -> Iterator[Left]:
    for name in children:
        child = getattr(module, name, None)
        if type(child) is nn.Dropout and child.p > 0:
            yield name, child, f"dropout p={child.p} is a kernel of its own in training"


def project(module: nn.Module, x: Tensor) -> Tensor:
    """module(x) for a Linear, by our op where the module is plain."""
    if is_plain(module):
        return linear(x, module.weight, module.bias)
    return module(x)


def project_out(
    module: nn.Module, drop: nn.Module | None, x: Tensor, residual: Tensor | None,
    layer_scale: Tensor | None, row_scale: Tensor | None,
) -> Tensor:  # fmt: skip
    """residual + row_scale * layer_scale * drop(module(x)), in one epilogue where that is right."""
    if is_plain(module) and inert(drop):
        return linear(
            x, module.weight, module.bias,
            residual=residual, layer_scale=layer_scale, row_scale=row_scale,
        )  # fmt: skip
    y = project(module, x)
    return add_branch(y if drop is None else drop(y), residual, layer_scale, row_scale)


class LayerNorm(Fused):
    """nn.LayerNorm over the last axis."""

    level = "layer_norm"

    @classmethod
    def reject(cls, module: Any) -> str | None:
        axes = len(module.normalized_shape)
        return None if axes == 1 else f"it normalizes {axes} axes"

    def blocked(self) -> str | None:
        # timm.layers.set_fast_norm: the norm then stays in autocast's dtype
        return "timm's fast_norm is on" if getattr(self, "_fast_norm", False) else None

    def and_input(self: Any, x: Tensor, out_dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        return layer_norm_and_input(x, self.weight, self.bias, self.eps, out_dtype=out_dtype)

    def forward(self: Any, x: Tensor) -> Tensor:
        if self.blocked() or not is_dense(x):
            return self.host_forward(x)
        return layer_norm(x, self.weight, self.bias, self.eps)


class LayerScale(Fused):
    """x * gamma. Its forward stays the host's; a branch's epilogue takes gamma instead."""

    level = "epilogue"
    parameter = "gamma"

    def scale(self) -> Tensor:
        return getattr(self, self.parameter)


class DropPath(Fused):
    """Stochastic depth. Its forward stays the host's; an epilogue takes the row factors instead."""

    level = "epilogue"

    def row_scale(self: Any, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        """(B,) of 0 or 1 / keep, drawn as timm draws it, None where nothing is dropped."""
        if self.drop_prob == 0 or not self.training:
            return None
        keep = 1 - self.drop_prob
        scale = x.new_empty(x.shape[0], dtype=dtype).bernoulli_(keep)
        return scale.div_(keep) if keep > 0 and self.scale_by_keep else scale


Tail = nn.Module | Tensor | None


def _foldable(item: Tail) -> bool:
    if isinstance(item, Tensor):
        return item.ndim == 1
    return inert(item) or (jumpable(item) and isinstance(item, (LayerScale, DropPath)))


def fold(tail: tuple[Tail, ...], x: Tensor) -> tuple[Tensor | None, Tensor | None] | None:
    """(layer_scale, row_scale) that stand for the tail, or None where it must be called."""
    if not all(_foldable(item) for item in tail):
        return None
    dtype = autocast_dtype(x) or x.dtype  # what the tail reads in the host: the body's output
    gamma = rows = None
    for item in tail:
        if isinstance(item, LayerScale):
            item = item.scale()
        if isinstance(item, Tensor):
            gamma = item
            dtype = torch.promote_types(dtype, gamma.dtype)
        elif isinstance(item, DropPath):
            rows = item.row_scale(x, dtype)
    return gamma, rows


def _apply(item: Tail, y: Tensor) -> Tensor:
    if item is None:
        return y
    return y * item if isinstance(item, Tensor) else item(y)


def add_body(
    x: Tensor, y: Tensor, body: Any, tail: tuple[Tail, ...],
    call: Callable[[Tensor], Tensor], jump: bool, context: dict[str, Any],
) -> Tensor:  # fmt: skip
    """x + tail(body(y))."""
    epilogue = fold(tail, x) if jump and not body.draws() else None
    if epilogue is None:
        y = call(y)
        for item in tail:
            y = _apply(item, y)
        return x + y
    gamma, rows = epilogue
    if gamma is not None:  # the host's product with an fp32 LayerScale is fp32
        x = x.to(torch.promote_types(x.dtype, gamma.dtype))
    return body.branch(y, x, gamma, rows, **context)


def normed(norm: Any, x: Tensor, reader: Any) -> Tensor:
    """norm(x), in the dtype that autocast asks for where `reader` begins with a matmul of ours."""
    if not (jumpable(norm) and isinstance(norm, LayerNorm)):
        return norm(x)
    return norm.and_input(x, _low(x, reader))[0]


def _low(x: Tensor, reader: Any) -> torch.dtype | None:
    return autocast_dtype(x) if reader is not None and reader.reads_low() else None


def pre_norm_branch(
    x: Tensor, norm: Any, body: Any, *tail: Tail,
    call: Callable[[Tensor], Tensor] | None = None, jump: bool = True, **context: Any,
) -> Tensor:  # fmt: skip
    """x + tail(body(norm(x))).

    Args:
        x: (B, ..., C).
        norm, body: children of the block.
        tail: LayerScale, DropPath and dropout children in the host's order; a Tensor is a gamma.
        call: how the host calls the body; `body` by default.
        jump: False where the body must be called.
        context: what the body's `branch` needs besides.
    """
    jump = jump and jumpable(body)
    if jumpable(norm) and isinstance(norm, LayerNorm):
        y, x = norm.and_input(x, _low(x, body if jump else None))
    else:
        y = norm(x)
    return add_body(x, y, body, tail, call or body, jump, context)
