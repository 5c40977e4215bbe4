"""MLPs, with a gate or without: fc1 -> activation -> dropout -> norm -> fc2 -> dropout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from ...ops.common.activation import ACTIVATIONS
from ...ops.gated_mlp.functions import gated_mlp
from ...ops.linear.functions import linear
from ...ops.mlp.functions import mlp
from ...runtime.plain import is_plain
from ..activations import activation_name
from . import fused
from .fused import Epilogue, LayerNorm, can_inline, in_role, is_noop, norm_in_pytorch
from .roles import Body, planned_entry


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


def gate_of(mlp: Any) -> Any:
    """The Linear of the gate; or whether it is the second half of fc1's output."""
    gate = mlp.fused_roles.gate
    return gate == "second" if gate in ("first", "second") else in_role(mlp, "gate")


def linears_of(mlp: Any) -> list[Any]:
    """fc1, fc2, and the gate's"""
    every = in_role(mlp, "fc1"), in_role(mlp, "fc2"), gate_of(mlp)
    return [m for m in every if isinstance(m, nn.Module)]


def activation_of(mlp: Any) -> tuple[Any, str | None]:
    """It, and the name that our ops give it."""
    name, act = mlp.fused_roles.activation, in_role(mlp, "act")
    return (ACTIVATIONS[name], name) if name else (act, activation_name(act))


def is_one_op(mlp: Any) -> bool:
    """Whether all of it is one op as things are."""
    plain = all(map(is_plain, linears_of(mlp))) and activation_of(mlp)[1] is not None
    if not plain or type(mlp).fused_draws(mlp):
        return False
    norm = in_role(mlp, "inner_norm")
    if is_noop(norm) or not mlp.fused_roles.gate:
        return is_noop(norm)
    is_ours = isinstance(norm, LayerNorm) and can_inline(norm)
    return is_ours and norm.fused_parameters()[0] is not None


class Mlp(Body):
    """norm -> fc1 -> activation -> dropout -> inner_norm -> fc2 -> dropout; with a gate,
    act(gate(x)) * fc1(x) -> dropout."""

    fused_level = "mlp"
    fused_axes = (2, 3, 4)
    fused_roles: ClassVar[MlpRoles]

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        is_conv = type(fused.part(module, cls.fused_roles.fc1)) is nn.Conv2d
        return "its layers are convolutions" if is_conv else None

    def fused_by_parts(self: Any, x: Tensor, epilogue: Epilogue) -> Tensor:
        """All of it and the epilogue, part by part."""
        fc1, gate, (act, name) = in_role(self, "fc1"), gate_of(self), activation_of(self)
        gated = bool(self.fused_roles.gate)
        if not gated and name is not None and is_plain(fc1):
            hidden = linear(x, fc1.weight, fc1.bias, activation=name)
        elif not gated:
            hidden = act(fused.project(fc1, x))
        elif isinstance(gate, nn.Module):
            hidden = act(fused.project(gate, x)) * fused.project(fc1, x)
        else:
            first, value = fused.project(fc1, x).chunk(2, dim=-1)[:: -1 if gate else 1]
            hidden = act(first) * value
        for m in (in_role(self, "drop"), in_role(self, "inner_norm")):
            hidden = hidden if m is None else m(hidden)
        last, after = in_role(self, "fc2"), in_role(self, "after")
        return fused.project_out(last, after, hidden, epilogue)

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        drops = any(getattr(in_role(self, drop), "p", 0) for drop in ("drop", "after"))
        if self.fused_roles.gate and (drops or not is_one_op(self)):  # one at rest may wake
            width = in_role(self, "fc2").in_features
            yield "gate of the MLP", 5 * width
            yield from norm_in_pytorch("norm of the MLP", in_role(self, "inner_norm"), width)

    def fused_accepts_autocast_input(self) -> bool:
        fc1, _, *gate = linears_of(self)
        return not self.fused_roles.norm and all(map(is_plain, (fc1, *gate)))

    def fused_draws(self) -> bool:
        return not (is_noop(in_role(self, "drop")) and is_noop(in_role(self, "after")))

    def fused_planned(self: Any, place: fused.Place) -> fused.Planned:
        linears, gate, found = linears_of(self), gate_of(self), type(self).fused_found(self, place)
        enter = planned_entry(place, in_role(self, "norm"), linears[0])
        name: Any = activation_of(self)[1]
        gated, gate_last = bool(self.fused_roles.gate), gate is True
        reads = [*map(place, linears)] if is_one_op(self) else []
        norm = in_role(self, "inner_norm")
        inner = None if is_noop(norm) else place(norm)

        def run(modules: list[Any], x: Tensor, epilogue: Epilogue, more: Any) -> Tensor:
            if enter is not None:
                x, epilogue = enter(modules, x, epilogue)
            if not reads:
                return found(modules).fused_by_parts(x, epilogue)
            weights = *fused.weights_of(modules[reads[0]]), *fused.weights_of(modules[reads[1]])
            if not gated:
                return mlp(x, *weights, activation=name, **epilogue)
            gate = fused.weights_of(modules[reads[2]]) if len(reads) == 3 else (None, None)
            norm = (None, None, 1e-6) if inner is None else modules[inner].fused_parameters()
            return gated_mlp(
                x,
                *weights,
                gate_weight=gate[0],
                gate_bias=gate[1],
                norm_weight=norm[0],
                norm_bias=norm[1],
                norm_eps=norm[2],
                gate_last=gate_last,
                activation=name,
                **epilogue,
            )

        return run


def plain_mlp(fc1: str, act: str, fc2: str, **more: str) -> Any:
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
