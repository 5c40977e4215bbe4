"""What a block's branch computes, in common; and Linears, whether an op of ours reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ...ops.linear.functions import linear
from ...runtime.arguments import autocast_dtype
from ...runtime.plain import is_plain, is_raw
from ..plans import Run
from . import fused
from .fused import NOTHING, Epilogue, Fused, Place, can_inline, in_role

# (the plan's modules, x, epilogue) -> what the body reads, and its epilogue
Entry = Callable[[list[Any], Tensor, Epilogue], tuple[Tensor, Epilogue]]


class Body(Fused):
    """What a block's branch computes between its norm and its tail; a module of its own, too."""

    def fused_found(self, place: Place) -> Callable[[list[Any]], Any]:
        """What finds this part among the modules of a plan."""
        at = place(self)
        return lambda modules: modules[at]

    def fused_resolved(self: Any, place: Place) -> Run:
        compute, result = type(self).fused_planned(self, place), self.fused_roles.result
        if getattr(self.fused_roles, "weights", False):
            result = None
        return lambda modules, x, extras: as_result(compute(modules, x, NOTHING, extras), result)


def planned_entry(place: Place, norm: Any, reader: Any) -> Entry | None:
    """norm(x) and the epilogue, of a norm at a body's entry; None for no norm."""
    if norm is None:
        return None
    at, ours, low = place(norm), fused.is_fused_norm(norm), is_ours(reader)

    def enter(modules: list[Any], x: Tensor, epilogue: Epilogue) -> tuple[Tensor, Epilogue]:
        if not ours:
            return modules[at](x), epilogue
        y, same = modules[at].fused_and_input(x, autocast_dtype(x) if low else None)
        return y, {**epilogue, "residual": same} if epilogue.get("residual") is x else epilogue

    return enter


def as_result(y: Tensor, form: tuple[int, int] | None) -> Any:
    """y, or a tuple of this length with y at its place and None elsewhere."""
    if form is None:
        return y
    return tuple(y if place == form[1] else None for place in range(form[0]))


class LinearRoles(NamedTuple):
    """x weight^T + mask * bias: the buffer that masks the bias."""

    mask: str


class MaskedLinear(Fused):
    """An nn.Linear of which a buffer switches parts of the bias off, as DINOv3 does with k's."""

    fused_level = "linear"
    fused_axes = (2, 3, 4)
    fused_roles: ClassVar[LinearRoles]

    def fused_weights(self: Any) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias * in_role(self, "mask").to(self.bias.dtype)

    def fused_forward(self, x: Tensor) -> Tensor:
        return linear(x, *self.fused_weights())


def is_ours(module: Any) -> bool:
    """Whether an op of ours reads the weight and bias of a Linear, or a weight without one."""
    if isinstance(module, Tensor):
        return is_raw(module)
    return is_plain(module) or (isinstance(module, MaskedLinear) and can_inline(module))


def weight_and_bias(module: Any) -> tuple[Tensor, Tensor | None] | None:
    """What a Linear multiplies by and adds; None where it has to be called."""
    if is_plain(module):
        return module.weight, module.bias
    return module.fused_weights() if is_ours(module) else None
