"""MLPs of hosts that no table knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ....ops.common.activation import ACTIVATIONS
from ....runtime.plain import is_plain
from ..fused import NOTHING, Epilogue, Place, Resolved, inert, part
from ..parts import MlpParts, resolved_mlp
from .roles import Roles, as_result, entered, resolved_entry


class MlpRoles(NamedTuple):
    """The parts of an MLP by name; "" for none."""

    fc1: str
    fc2: str
    activation: str  # by the name that our ops give it
    norm: str = ""  # before fc1
    drop: str = ""  # before inner_norm
    inner_norm: str = ""
    after: str = ""
    gate: str = ""  # gated: the Linear of the gate, beside fc1; or "first", "second" half of fc1's
    result: tuple[int, int] | None = None


class Mlp(Roles):
    """norm -> fc1 -> activation -> dropout -> inner_norm -> fc2 -> dropout, or with a gate."""

    fused_level = "mlp"
    fused_axes = (2, 3, 4)
    fused_roles: ClassVar[MlpRoles]

    def fused_products(self: Any) -> Iterator[nn.Module]:
        roles = self.fused_roles
        for name in (roles.fc1, roles.fc2, roles.gate):
            if name and name not in ("first", "second"):
                yield part(self, name)

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        parts = self.fused_parts()
        if parts.gated and not parts.is_one_op():
            yield from parts.in_pytorch()

    def fused_parts(self) -> MlpParts:
        roles, get = self.fused_roles, self.fused_part
        halves = roles.gate in ("first", "second")
        return MlpParts(
            get("fc1"), ACTIVATIONS[roles.activation], roles.activation, get("fc2"), get("drop"),
            get("inner_norm"), get("after"), gated=bool(roles.gate),
            gate=None if halves else get("gate"), gate_last=roles.gate == "second",
        )  # fmt: skip

    def fused_reads_low(self) -> bool:
        return not self.fused_roles.norm and all(map(is_plain, self.fused_products()))

    def fused_draws(self) -> bool:
        return not (inert(self.fused_part("drop")) and inert(self.fused_part("after")))

    def fused_branch(self: Any, x: Tensor, epilogue: Epilogue = NOTHING) -> Tensor:
        parts = self.fused_parts()
        y, epilogue = entered(self.fused_part("norm"), x, epilogue, parts.fc1)
        return parts.branch(y, epilogue)

    def fused_branch_resolved(self: Any, place: Place) -> Resolved:
        parts = self.fused_parts()
        inner = resolved_mlp(parts, place)
        if inner is None:
            return self.fused_undecided(place)
        return resolved_entry(self, place, self.fused_part("norm"), parts.fc1, inner)

    def fused_forward(self, x: Tensor) -> Any:
        return as_result(self.fused_branch(x), self.fused_roles.result)
