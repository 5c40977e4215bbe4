"""The parts that several hosts share: patch embedding, attention and the kinds of MLP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ...ops.gated_mlp.functions import gated_mlp
from ...ops.linear.functions import linear
from ...ops.mlp.functions import mlp
from ...ops.patch_embed.functions import patch_embed
from ...runtime.plain import is_hooked, is_plain
from ..activations import activation_name
from .attend import as_one, attend, attend_weights, packable, together
from .fused import (
    NOTHING,
    Child,
    Epilogue,
    Fused,
    Inline,
    LayerNorm,
    Place,
    Resolved,
    bypassed,
    example,
    inert,
    inputs,
    left_dropouts,
    left_linears,
    norm_in_pytorch,
    owned,
    part,
    project,
    project_out,
)
from .rotary import NO_NORMS, HeadNorms, Turn, attend_qkv, attend_turned, turned


class PatchConv(Fused):
    """A Conv2d whose kernel is its stride, on images: (B, in, height, width) -> (B, C, h, w)."""

    fused_level = "patch_embed"
    fused_axes = (4,)

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        if tuple(module.kernel_size) != tuple(module.stride) or module.in_channels > 4:
            return ""  # some other convolution
        if (module.padding != "valid" and any(module.padding)) or module.groups != 1:
            return "a patch embedding with padding or groups"
        return None if set(module.dilation) == {1} else "a dilated patch embedding"

    def fused_blocked(self) -> str | None:
        return self.fused_reject(self)  # read while tracing, so that compilers guard on it

    def fused_takes(self: Any, x: Tensor) -> bool:
        fits = x.ndim in self.fused_axes and x.shape[1] == self.in_channels
        return fits and all(n % p == 0 for n, p in zip(x.shape[2:], self.kernel_size, strict=True))

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        *frames, p, q = self.kernel_size
        yield (example(generator, 2, self.in_channels, *(2 * t for t in frames), 2 * p, 3 * q),), {}
        yield (example(generator, 1, self.in_channels, *frames, p, q),), {}

    def fused_grid(self: Any, images: Tensor) -> Tensor:
        """The op writes (B, h*w, C): the result is a view of that."""
        tokens = patch_embed(images, self.weight, self.bias)
        grid = (n // p for n, p in zip(images.shape[2:], self.kernel_size, strict=True))
        return tokens.transpose(1, 2).unflatten(2, tuple(grid))

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        return self.fused_grid(x).contiguous()  # as the host's, for view()


class PatchConvOfTokens(PatchConv):
    """PatchConv in a class that takes flatten(2).transpose(1, 2) of it: that costs nothing."""

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        grid = self.fused_grid(x)
        return grid.contiguous() if is_hooked(self) else grid


class PatchConv3d(PatchConv):
    """The same of a Conv3d: videos (B, in, frames, height, width) -> (B, C, t, h, w).

    Samples of one patch each, as Qwen-VL's processor makes them, are the rows of a Linear.
    """

    fused_axes = (5,)

    def fused_grid(self: Any, images: Tensor) -> Tensor:
        if tuple(images.shape[2:]) != tuple(self.kernel_size):
            return super().fused_grid(images)
        rows = linear(images.flatten(1), self.weight.flatten(1), self.bias)
        return rows[:, :, None, None, None]


class PatchConv3dOfTokens(PatchConv3d, PatchConvOfTokens):
    pass


def resolved_attention(
    module: Any, place: Place, projections: Sequence[Any], out: Any, drops: bool, D: int,
    heads: int = 0,
) -> Resolved:  # fmt: skip
    """Attention by plain Linears with all decided, for calls that give x alone.

    Args:
        drops: its dropout has a rate.
        D: of a head.
        heads: by default as many as the weights have rows for, whatever the Linears say.
    """
    every = [*projections, out]
    plain = all(map(is_plain, every)) and all(owned(m, "weight", "bias") for m in every)
    undecided = module.fused_undecided(place)
    if not plain or not packable(D, 0.0) or isinstance(module, Inline):
        return undecided
    at, *reads, writes = map(place, (module, *every))
    drops, scale = drops and module.training, module.fused_scale()

    def run(modules: list[Any], x: Tensor, epilogue: Epilogue, context: Any) -> Tensor:
        if context:  # a mask or angles
            return undecided(modules, x, epilogue, context)
        dropout_p = modules[at].fused_dropout_p() if drops else 0.0
        if len(reads) == 1:
            own = modules[reads[0]]._parameters
            packed = own["weight"], own["bias"]
        else:
            apart = [modules[i]._parameters for i in reads]
            packed = as_one([p["weight"] for p in apart], [p["bias"] for p in apart])  # type: ignore
            if packed is None:  # frozen apart, or of several dtypes
                return undecided(modules, x, epilogue, {})
        weight: Any = packed[0]
        H = heads or weight.shape[0] // (3 * D)
        y = attend_weights(x, weight, packed[1], H, dropout_p=dropout_p, scale=scale)
        own = modules[writes]._parameters
        return linear(y.flatten(-2), own["weight"], own["bias"], **epilogue)

    return run


class SelfAttention(Fused):
    """Linears to q, k and v -> attention -> a Linear -> a dropout, by a host's names."""

    fused_level = "attention"
    fused_linears: ClassVar[tuple[str, ...]] = ("qkv",)  # to q, k and v: one each, or one of all
    fused_out, fused_after = "proj", "proj_drop"  # "" for no dropout
    fused_dropout = "attn_drop"  # of the probabilities: a setting or an nn.Dropout

    def fused_projections(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.fused_linears)

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_linears(self, *self.fused_linears, self.fused_out)
        yield from left_dropouts(self, self.fused_after)

    def fused_packed(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of one projection to q, k and v; None where they must stay apart, or be
        called."""
        return together(self.fused_projections())

    def fused_reads_low(self) -> bool:
        return all(map(is_plain, self.fused_projections()))

    def fused_draws(self) -> bool:
        return not inert(part(self, self.fused_after))

    def fused_dropout_p(self: Any) -> float:
        drop = part(self, self.fused_dropout)
        return getattr(drop, "p", drop) if self.training else 0.0

    def fused_scale(self) -> float | None:
        return None

    def fused_head_dim(self: Any) -> int:
        return self.qkv.out_features // (3 * self.num_heads)

    def fused_projected(self, x: Tensor) -> Sequence[Tensor]:
        """q, k, v, each (B, T, HD)"""
        packed = self.fused_packed()
        if packed is not None:
            return linear(x, *packed).chunk(3, dim=-1)
        projected = [project(m, x) for m in self.fused_projections()]
        return projected[0].chunk(3, dim=-1) if len(projected) == 1 else projected

    def fused_qkv(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v, each (B, H, T, D)"""
        D = self.fused_head_dim()
        return tuple(t.unflatten(-1, (-1, D)).transpose(1, 2) for t in self.fused_projected(x))

    def fused_attend(
        self: Any, x: Tensor, mask: Tensor | None = None, turn: Turn | None = None,
        norms: HeadNorms = NO_NORMS,
    ) -> Tensor:  # fmt: skip
        """(B, T, C) -> (B, T, H, D)"""
        given: Any = dict(mask=mask, dropout_p=self.fused_dropout_p(), scale=self.fused_scale())
        packed, projections = self.fused_packed(), self.fused_projections()
        if packed is not None:
            H = packed[0].shape[0] // (3 * self.fused_head_dim())
            return attend_turned(x, packed, H, turn, norms, **given)
        if len(projections) == 1:
            return attend_qkv(project(projections[0], x), self.num_heads, turn, norms, **given)
        q, k, v = self.fused_qkv(x)
        q, k = turned(q, k, turn, norms)
        return attend(q, k, v, **given)

    def fused_heads(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, H, D)"""
        return self.fused_attend(x)

    def fused_project_out(self, out: Tensor, epilogue: Epilogue) -> Tensor:
        after = part(self, self.fused_after)
        return project_out(part(self, self.fused_out), after, out, epilogue)

    def fused_branch(self, x: Tensor, epilogue: Epilogue = NOTHING, **extras: Any) -> Tensor:
        return self.fused_project_out(self.fused_heads(x, **extras).flatten(-2), epilogue)

    def fused_branch_resolved(self: Any, place: Place) -> Resolved:
        drop = part(self, self.fused_dropout)
        if not self.fused_is_simple() or not inert(part(self, self.fused_after)):
            return self.fused_undecided(place)
        return resolved_attention(
            self, place, self.fused_projections(), part(self, self.fused_out),
            bool(getattr(drop, "p", drop)), self.fused_head_dim(),
        )  # fmt: skip

    def fused_is_simple(self) -> bool:
        """Whether nothing but attention stands between its Linears, where a call gives x alone."""
        own = type(self)
        same = ("fused_branch", "fused_heads", "fused_attend", "fused_packed", "fused_project_out")
        return all(getattr(own, n) is getattr(SelfAttention, n) for n in same)

    def fused_forward(self, x: Tensor, **extras: Any) -> Any:
        return self.fused_branch(x, **extras)


LONG = 256  # tokens


def examples_with_bias(
    module: Any, generator: torch.Generator, name: str, heads: int, own: Tensor | None = None
) -> Iterator[tuple[tuple, dict]]:
    """Calls with a bias of the scores and without; the module's own bias says the length."""
    for x in inputs(module, generator, *(() if own is None else own.shape[-2:])):
        B, T, _ = x.shape
        if B == 3 and T > LONG:
            continue  # one batch says it: in float64 1,025 tokens take seconds
        yield (x,), {}
        yield (x,), {name: example(generator, 1, heads, T, T)}


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

    def norm_inside(self) -> tuple[Tensor | None, Tensor | None, float] | None:
        """weight, bias and eps of the LayerNorm inside a gated MLP, weight None where there is
        none; None where the norm must be called."""
        if inert(self.norm):
            return None, None, 1e-6
        if not (isinstance(self.norm, LayerNorm) and bypassed(self.norm)):
            return None
        parameters = self.norm.fused_parameters()
        return None if parameters[0] is None else parameters

    def is_one_op(self) -> bool:
        """Whether all around a known activation is one op as things are."""
        linears = [m for m in (self.fc1, self.gate, self.fc2) if m is not None]
        if not (all(map(is_plain, linears)) and inert(self.drop) and inert(self.after)):
            return False
        return self.norm_inside() is not None if self.gated else inert(self.norm)

    def in_pytorch(self) -> Iterator[tuple[str, float]]:
        """What PyTorch computes of a gated MLP that is not one op."""
        width = self.fc2.in_features
        yield "gate of the MLP", 5 * width
        yield from norm_in_pytorch("norm of the MLP", self.norm, width)

    def hidden(self, x: Tensor) -> Tensor:
        """What drop reads."""
        fc1, act, name = self.fc1, self.act, self.activation
        if not self.gated:
            if is_plain(fc1) and name is not None:
                return linear(x, fc1.weight, fc1.bias, activation=name)
            return act(project(fc1, x))
        if self.gate is not None:
            return act(project(self.gate, x)) * project(fc1, x)
        first, second = project(fc1, x).chunk(2, dim=-1)
        return act(second) * first if self.gate_last else act(first) * second

    def branch(self, x: Tensor, epilogue: Epilogue) -> Tensor:
        """All of it and the epilogue."""
        fc1, fc2, gate, name = self.fc1, self.fc2, self.gate, self.activation
        if name is None or not self.is_one_op():
            hidden = self.hidden(x)
            for m in (self.drop, self.norm):
                hidden = hidden if m is None else m(hidden)
            return project_out(fc2, self.after, hidden, epilogue)
        weights = fc1.weight, fc1.bias, fc2.weight, fc2.bias
        if not self.gated:
            return mlp(x, *weights, activation=name, **epilogue)
        norm_weight, norm_bias, norm_eps = self.norm_inside()  # type: ignore[misc]
        return gated_mlp(
            x, *weights, gate_weight=None if gate is None else gate.weight,
            gate_bias=None if gate is None else gate.bias, norm_weight=norm_weight,
            norm_bias=norm_bias, norm_eps=norm_eps, gate_last=self.gate_last, activation=name,
            **epilogue,
        )  # fmt: skip


def resolved_mlp(parts: MlpParts, place: Place) -> Resolved | None:
    """`MlpParts.branch` with all decided; None where it is no single op without a gate."""
    name, linears = parts.activation, (parts.fc1, parts.fc2)
    if parts.gated or name is None or not parts.is_one_op():
        return None
    if not all(owned(m, "weight", "bias") for m in linears):
        return None
    at1, at2 = map(place, linears)

    def run(modules: list[Any], x: Tensor, epilogue: Epilogue, context: Any) -> Tensor:
        fc1, fc2 = modules[at1]._parameters, modules[at2]._parameters
        weights = fc1["weight"], fc1["bias"], fc2["weight"], fc2["bias"]
        return mlp(x, *weights, activation=name, **epilogue)

    return run


class Mlp(Fused):
    """fc1 -> act -> drop1 -> norm -> fc2 -> drop2: timm's Mlp; subclasses have other names."""

    fused_level = "mlp"
    fused_axes = (2, 3, 4)
    fused_fc1, fused_act, fused_fc2 = "fc1", "act", "fc2"
    fused_between = ("drop1", "norm")  # children between the activation and fc2; "" for none
    fused_after = "drop2"

    def fused_get(self: Any, name: str) -> Any:
        return getattr(self, name, None)

    def fused_parts(self) -> MlpParts:
        get = self.fused_get
        act, (drop, norm) = get(self.fused_act), map(get, self.fused_between)
        return MlpParts(
            get(self.fused_fc1), act, activation_name(act), get(self.fused_fc2), drop, norm,
            get(self.fused_after),
        )  # fmt: skip

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        is_conv = type(getattr(module, cls.fused_fc1)) is nn.Conv2d
        return "its layers are convolutions" if is_conv else None

    def fused_reads_low(self) -> bool:
        return is_plain(self.fused_get(self.fused_fc1))

    def fused_draws(self) -> bool:
        return not all(inert(self.fused_get(n)) for n in (self.fused_between[0], self.fused_after))

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_linears(self, self.fused_fc1, self.fused_fc2)
        act = self.fused_get(self.fused_act)
        if activation_name(act) is None:
            hooked = isinstance(act, nn.Module) and is_hooked(act)
            yield self.fused_act, act, "it is hooked" if hooked else "no kernel for this activation"
        yield from left_dropouts(self, "drop1", self.fused_after)

    def fused_branch(self, x: Tensor, epilogue: Epilogue = NOTHING) -> Tensor:
        return self.fused_parts().branch(x, epilogue)

    def fused_branch_resolved(self, place: Place) -> Resolved:
        return resolved_mlp(self.fused_parts(), place) or self.fused_undecided(place)

    def fused_forward(self, x: Tensor) -> Tensor:
        return self.fused_branch(x)


class Gated(Mlp):
    """act(gate(x)) * fc1(x) -> drop1 -> norm -> fc2 -> drop2."""

    fused_gate = ""  # the Linear of the gate; "" where fc1 has both

    def fused_gate_last(self) -> bool:
        """Whether the gate is the second half of fc1's output."""
        return False

    def fused_parts(self) -> MlpParts:
        gate, last = self.fused_get(self.fused_gate), self.fused_gate_last()
        return super().fused_parts()._replace(gated=True, gate=gate, gate_last=last)

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        return None if cls.fused_gate else super().fused_reject(module)

    def fused_reads_low(self) -> bool:
        gate = self.fused_get(self.fused_gate)
        return super().fused_reads_low() and (gate is None or is_plain(gate))

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        parts = self.fused_parts()
        drops = any(getattr(drop, "p", 0) for drop in (parts.drop, parts.after))
        if drops or parts.activation is None or not parts.is_one_op():  # one at rest may wake
            yield from parts.in_pytorch()

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_linears(self, self.fused_fc1, self.fused_gate, self.fused_fc2)
        yield from left_dropouts(self, "drop2")


class GluMlp(Gated):
    """timm's GluMlp: gate and value in halves of fc1's output, in either order."""

    def fused_gate_last(self: Any) -> bool:
        return self.gate_last


class SwiGLU(Gated):
    """timm's SwiGLU; transformers' in a subclass."""

    fused_gate, fused_fc1 = "fc1_g", "fc1_x"


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

    def fused_roles(self: Any) -> dict[str, str]:
        """Role -> child name; the children's names are their places."""
        names = list(self._modules)
        second = len(names) - 1 - isinstance(self[-1], nn.Dropout)
        roles = {"fc1": names[0], "act": names[1], "fc2": names[second]}
        if second == 3:
            roles["drop1"] = names[2]
        if second + 1 < len(names):
            roles["drop2"] = names[second + 1]
        return roles

    def fused_get(self: Any, name: str) -> Any:
        return self._modules.get(self.fused_roles().get(name, ""))

    def fused_left(self: Any) -> Iterator[Child]:
        names = self.fused_roles()
        yield from left_linears(self, names["fc1"], names["fc2"])
        yield from left_dropouts(self, *(names[n] for n in ("drop1", "drop2") if n in names))
