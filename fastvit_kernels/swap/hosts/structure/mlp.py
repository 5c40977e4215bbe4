"""MLPs of hosts that no table knows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ....ops.common.activation import ACTIVATIONS
from ....ops.linear.functions import linear
from ....ops.mlp.functions import mlp
from ....runtime.plain import is_plain
from ..fused import NOTHING, Epilogue, inert, norm_in_pytorch, part, project_out
from ..parts import gated_branch, gated_hidden, norm_inside
from .roles import Roles, as_result, entered


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
        if self.fused_roles.gate and not self.fused_together():
            width = self.fused_part("fc2").in_features
            yield "gate of the MLP", 5 * width
            yield from norm_in_pytorch("norm of the MLP", self.fused_part("inner_norm"), width)

    def fused_together(self: Any) -> bool:
        """Whether all around the gate is one op as things are."""
        inside = norm_inside(self.fused_part("inner_norm"))
        rest = all(inert(self.fused_part(r)) for r in ("drop", "after"))
        return inside is not None and rest and all(map(is_plain, self.fused_products()))

    def fused_reads_low(self) -> bool:
        return not self.fused_roles.norm and all(map(is_plain, self.fused_products()))

    def fused_draws(self) -> bool:
        return not (inert(self.fused_part("drop")) and inert(self.fused_part("after")))

    def fused_branch(self: Any, x: Tensor, epilogue: Epilogue = NOTHING) -> Tensor:
        roles = self.fused_roles
        fc1, fc2 = self.fused_part("fc1"), self.fused_part("fc2")
        drop, norm, after = (self.fused_part(r) for r in ("drop", "inner_norm", "after"))
        y, epilogue = entered(self.fused_part("norm"), x, epilogue, fc1)
        if roles.gate:
            gate = None if roles.gate in ("first", "second") else part(self, roles.gate)
            last, inside = roles.gate == "second", norm_inside(norm)
            if inside is not None and self.fused_together():
                return gated_branch(y, fc1, gate, fc2, inside, last, roles.activation, epilogue)
            hidden = gated_hidden(y, fc1, gate, last, ACTIVATIONS[roles.activation])
        elif is_plain(fc1):
            if is_plain(fc2) and inert(drop) and norm is None and inert(after):
                weights = fc1.weight, fc1.bias, fc2.weight, fc2.bias
                return mlp(y, *weights, activation=roles.activation, **epilogue)
            hidden = linear(y, fc1.weight, fc1.bias, activation=roles.activation)
        else:
            hidden = ACTIVATIONS[roles.activation](fc1(y))
        for m in (drop, norm):
            hidden = hidden if m is None else m(hidden)
        return project_out(fc2, after, hidden, epilogue)

    def fused_forward(self, x: Tensor) -> Any:
        return as_result(self.fused_branch(x), self.fused_roles.result)
