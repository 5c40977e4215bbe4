"""MLPs, with a gate or without: fc1 -> activation -> dropout -> norm -> fc2 -> dropout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ...ops.common.activation import ACTIVATIONS
from ...ops.gated_mlp.functions import gated_mlp
from ...ops.linear.functions import linear
from ...ops.mlp.functions import mlp
from ...runtime.plain import is_hooked, is_plain
from ..activations import activation_name
from . import fused
from .fused import Epilogue, LayerNorm, can_inline, is_noop, norm_in_pytorch, project, weights_of
from .roles import Body, planned_entry, unread_products


class MlpRoles(NamedTuple):
    """The parts of an MLP by name; "" for none."""

    fc1: str
    fc2: str
    activation: str = ""  # by the name that our ops give it; "": that of `act`
    norm: str = ""  # before fc1
    drop: str = ""  # before inner_norm
    inner_norm: str = ""
    after: str = ""
    gate: str = ""  # gated: the Linear of the gate, beside fc1; "first" or "second" half of fc1's
    # output; or the setting that says whether it is the second
    result: tuple[int, int] | None = None
    act: str = ""


class MlpParts(NamedTuple):
    """fc1 -> act -> drop -> norm -> fc2 -> after; with a gate, act(gate(x)) * fc1(x) -> drop."""

    fc1: Any
    act: Any
    activation: str | None  # by the name that our ops give it
    fc2: Any
    drop: Any
    norm: Any
    after: Any
    gated: bool = False
    gate: Any = None  # the Linear of the gate, None where fc1 has both
    gate_last: bool = False  # the gate is the second half of fc1's output

    def linears(self) -> list[Any]:
        return [m for m in (self.fc1, self.fc2, self.gate) if m is not None]

    def is_one_op(self) -> bool:
        """Whether all of it is one op as things are."""
        plain = self.activation is not None and all(map(is_plain, self.linears()))
        if not (plain and is_noop(self.drop) and is_noop(self.after)):
            return False
        if is_noop(self.norm) or not self.gated:
            return is_noop(self.norm)
        is_ours = isinstance(self.norm, LayerNorm) and can_inline(self.norm)
        return is_ours and self.norm.fused_parameters()[0] is not None

    def branch(self, x: Tensor, epilogue: Epilogue) -> Tensor:
        """All of it and the epilogue, part by part."""
        fc1, act = self.fc1, self.act
        if not self.gated and self.activation is not None and is_plain(fc1):
            hidden = linear(x, fc1.weight, fc1.bias, activation=self.activation)
        elif not self.gated:
            hidden = act(project(fc1, x))
        elif self.gate is not None:
            hidden = act(project(self.gate, x)) * project(fc1, x)
        else:
            gate, value = project(fc1, x).chunk(2, dim=-1)[:: -1 if self.gate_last else 1]
            hidden = act(gate) * value
        for m in (self.drop, self.norm):
            hidden = hidden if m is None else m(hidden)
        return fused.project_out(self.fc2, self.after, hidden, epilogue)


class Mlp(Body):
    """norm -> fc1 -> activation -> dropout -> inner_norm -> fc2 -> dropout, or with a gate."""

    fused_level = "mlp"
    fused_axes = (2, 3, 4)
    fused_roles: ClassVar[MlpRoles]

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        is_conv = type(fused.part(module, cls.fused_roles.fc1)) is nn.Conv2d
        return "its layers are convolutions" if is_conv else None

    def fused_products(self: Any) -> Iterator[nn.Module]:
        yield from self.fused_parts().linears()

    def fused_parts(self) -> MlpParts:
        roles, get = self.fused_roles, self.fused_part
        halves = roles.gate in ("first", "second")
        gate = None if halves else get("gate")
        last = gate if isinstance(gate, bool) else roles.gate == "second"
        act, name = get("act"), roles.activation
        return MlpParts(
            get("fc1"), ACTIVATIONS[name] if name else act, name or activation_name(act),
            get("fc2"), get("drop"), get("inner_norm"), get("after"), gated=bool(roles.gate),
            gate=None if isinstance(gate, bool) else gate, gate_last=last,
        )  # fmt: skip

    def fused_unfused_children(self: Any) -> Iterator[fused.Child]:
        yield from unread_products(self)
        if self.fused_searched:
            return
        roles, parts = self.fused_roles, self.fused_parts()
        if not parts.gated and parts.activation is None:
            hooked = isinstance(parts.act, nn.Module) and is_hooked(parts.act)
            why = "it is hooked" if hooked else "no kernel for this activation"
            yield roles.act, parts.act, why
        yield from fused.left_dropouts(self, roles.drop, roles.after)

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        parts = self.fused_parts()
        drops = any(getattr(drop, "p", 0) for drop in (parts.drop, parts.after))
        if parts.gated and (drops or not parts.is_one_op()):  # one at rest may wake
            width = parts.fc2.in_features
            yield "gate of the MLP", 5 * width
            yield from norm_in_pytorch("norm of the MLP", parts.norm, width)

    def fused_accepts_autocast_input(self) -> bool:
        fc1, _, *gate = self.fused_parts().linears()
        return not self.fused_roles.norm and all(map(is_plain, (fc1, *gate)))

    def fused_draws(self) -> bool:
        return not (is_noop(self.fused_part("drop")) and is_noop(self.fused_part("after")))

    def fused_planned(self: Any, place: fused.Place) -> fused.Planned:
        parts, found = self.fused_parts(), self.fused_found(place)
        enter = planned_entry(place, self.fused_part("norm"), parts.fc1)
        name: Any = parts.activation
        gate_last, gated = parts.gate_last, parts.gated
        reads = [*map(place, parts.linears())] if parts.is_one_op() else []
        inner = None if is_noop(parts.norm) else place(parts.norm)

        def run(modules: list[Any], x: Tensor, epilogue: Epilogue, more: Any) -> Tensor:
            if enter is not None:
                x, epilogue = enter(modules, x, epilogue)
            if not reads:
                return found(modules).fused_parts().branch(x, epilogue)
            weights = *weights_of(modules[reads[0]]), *weights_of(modules[reads[1]])
            if not gated:
                return mlp(x, *weights, activation=name, **epilogue)
            gate = weights_of(modules[reads[2]]) if len(reads) == 3 else (None, None)
            norm = (None, None, 1e-6) if inner is None else modules[inner].fused_parameters()
            return gated_mlp(
                x, *weights, gate_weight=gate[0], gate_bias=gate[1], norm_weight=norm[0],
                norm_bias=norm[1], norm_eps=norm[2], gate_last=gate_last, activation=name,
                **epilogue,
            )  # fmt: skip

        return run


def plain_mlp(fc1: str, act: str, fc2: str, **more: str) -> fused.Row:
    """The row of fc1 -> act -> fc2; `more` are other roles."""
    return fused.row(Mlp, roles=MlpRoles(fc1, fc2, act=act, **more))  # type: ignore[arg-type]


class SequentialMlp(Mlp):
    """nn.Sequential(Linear, activation, [Dropout,] Linear[, Dropout]); torchvision's MLPBlock."""

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        kinds = [type(m) for m in module]
        linears = [i for i, kind in enumerate(kinds) if kind is nn.Linear]
        rest = [kind for i, kind in enumerate(kinds) if i not in linears and i != 1]
        if linears not in ([0, 2], [0, 3]) or any(kind is not nn.Dropout for kind in rest):
            return ""  # some other Sequential
        if activation_name(module[1]) is None:
            return f"no kernel for {kinds[1].__name__}"
        return None

    def fused_blocked(self) -> str | None:
        return self.fused_reject(self)  # it may be edited like a list

    @property
    def fused_roles(self: Any) -> MlpRoles:  # type: ignore[override]
        """The children's names are their places."""
        fc1, act, *drop, fc2 = list(self._modules)[: len(self) - isinstance(self[-1], nn.Dropout)]
        after = list(self._modules)[-1] if isinstance(self[-1], nn.Dropout) else ""
        return MlpRoles(fc1, fc2, drop=drop[0] if drop else "", after=after, act=act)
