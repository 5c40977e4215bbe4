"""What all mixins with roles share: parts by role, and when the host's forward runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ...ops.linear.functions import linear
from ...runtime.arguments import autocast_dtype
from ...runtime.plain import is_hooked, is_plain
from .fused import (
    Child,
    Epilogue,
    Fused,
    Place,
    Resolved,
    bypassed,
    is_fused_norm,
    normed,
    part,
    why_not_plain,
)


class Roles(Fused):
    """A module whose parts are named by `fused_roles`. One that was found by structure runs its
    host's forward while anybody watches what is inside: nobody has read how that calls its parts.
    """

    fused_roles: ClassVar[Any]

    @classmethod
    def fused_named(cls) -> Iterator[str]:
        """The parts that the roles name."""
        yield from (n for n in cls.fused_roles if isinstance(n, str))

    @classmethod
    def fused_known(cls) -> frozenset[str]:
        """A host that a table's row describes has no other child."""
        if cls.fused_searched:
            return frozenset()
        return cls.fused_children | {n.partition(".")[0] for n in cls.fused_named() if n}

    def fused_part(self, role: str) -> Any:
        return part(self, getattr(self.fused_roles, role), None)

    def fused_blocked(self: Any) -> str | None:
        if not self.fused_searched:
            return None
        for name, module in self.named_modules():
            if name and is_hooked(module):
                return f"{name} is hooked"
        return None

    def fused_left(self: Any) -> Iterator[Child]:
        for name, module in self.named_modules():
            product = any(module is m for m in self.fused_products())
            if product and weight_and_bias(module) is None:
                yield name, module, why_not_plain(module)


def entered(norm: Any, x: Tensor, epilogue: Epilogue, reader: Any) -> tuple[Tensor, Epilogue]:
    """norm(x) for a norm at a branch's entry, and the epilogue."""
    y, same = normed(norm, x, is_ours(reader))
    return y, {**epilogue, "residual": same} if epilogue.get("residual") is x else epilogue


def resolved_entry(module: Any, place: Place, norm: Any, reader: Any, inner: Resolved) -> Resolved:
    """`inner` behind a norm of its own at the branch's entry, for calls that give x alone."""
    if norm is None:
        return inner
    undecided = module.fused_undecided(place)
    if not is_fused_norm(norm):
        return undecided
    at, low = place(norm), is_ours(reader)

    def run(modules: list[Any], x: Tensor, epilogue: Epilogue, context: Any) -> Tensor:
        if context:
            return undecided(modules, x, epilogue, context)
        y, same = modules[at].fused_and_input(x, autocast_dtype(x) if low else None)
        if epilogue.get("residual") is x:
            epilogue = {**epilogue, "residual": same}
        return inner(modules, y, epilogue, context)

    return run


def as_result(y: Tensor, form: tuple[int, int] | None) -> Any:
    """y, or a tuple of this length with y at its place and None elsewhere."""
    if form is None:
        return y
    return tuple(y if place == form[1] else None for place in range(form[0]))


class LinearRoles(NamedTuple):
    """x weight^T + mask * bias: the buffer that masks the bias."""

    mask: str


class MaskedLinear(Roles):
    """An nn.Linear of which a buffer switches parts of the bias off, as DINOv3 does with k's."""

    fused_level = "linear"
    fused_axes = (2, 3, 4)
    fused_roles: ClassVar[LinearRoles]

    def fused_weights(self: Any) -> tuple[Tensor, Tensor]:
        return self.weight, self.bias * self.fused_part("mask").to(self.bias.dtype)

    def fused_forward(self, x: Tensor) -> Tensor:
        return linear(x, *self.fused_weights())


def is_ours(module: Any) -> bool:
    """Whether an op of ours reads the weight and bias of a Linear."""
    return is_plain(module) or (isinstance(module, MaskedLinear) and bypassed(module))


def weight_and_bias(module: Any) -> tuple[Tensor, Tensor | None] | None:
    """What a Linear multiplies by and adds; None where it has to be called."""
    if is_plain(module):
        return module.weight, module.bias
    return module.fused_weights() if isinstance(module, MaskedLinear) and bypassed(module) else None
