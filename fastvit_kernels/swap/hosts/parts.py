"""The parts that several hosts share: patch embedding, attention and the kinds of MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...ops.gated_mlp.functions import gated_mlp
from ...ops.linear.functions import linear
from ...ops.mlp.functions import mlp
from ...ops.patch_embed.functions import patch_embed
from ...runtime.plain import is_hooked, is_plain
from ..activations import activation_name
from .attend import together
from .fused import (
    NOTHING,
    Child,
    Epilogue,
    Fused,
    LayerNorm,
    bypassed,
    example,
    inert,
    left_dropouts,
    left_linears,
    norm_in_pytorch,
    part,
    project,
    project_out,
)


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


class SelfAttention(Fused):
    """Linears to q, k and v -> attention -> a Linear -> a dropout, by a host's names."""

    fused_level = "attention"
    fused_linears: ClassVar[tuple[str, ...]] = ("qkv",)  # to q, k and v: one each, or one of all
    fused_out, fused_after = "proj", "proj_drop"  # "" for no dropout

    def fused_projections(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.fused_linears)

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_linears(self, *self.fused_linears, self.fused_out)
        yield from left_dropouts(self, self.fused_after)

    def fused_packed(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of one projection to q, k and v; None where they must stay apart."""
        return together(self.fused_projections())

    def fused_reads_low(self) -> bool:
        return all(map(is_plain, self.fused_projections()))

    def fused_draws(self) -> bool:
        return not inert(part(self, self.fused_after))

    def fused_heads(self, x: Tensor, **extras: Any) -> Tensor:
        """(B, T, C) -> (B, T, H, D)"""
        raise NotImplementedError

    def fused_project_out(self, out: Tensor, epilogue: Epilogue) -> Tensor:
        after = part(self, self.fused_after)
        return project_out(part(self, self.fused_out), after, out, epilogue)

    def fused_branch(self, x: Tensor, epilogue: Epilogue = NOTHING, **extras: Any) -> Tensor:
        return self.fused_project_out(self.fused_heads(x, **extras).flatten(-2), epilogue)

    def fused_forward(self, x: Tensor, **extras: Any) -> Any:
        return self.fused_branch(x, **extras)


class Mlp(Fused):
    """fc1 -> act -> drop1 -> norm -> fc2 -> drop2: timm's Mlp; subclasses have other names."""

    fused_level = "mlp"
    fused_axes = (2, 3, 4)
    fused_fc1, fused_act, fused_fc2 = "fc1", "act", "fc2"
    fused_between = ("drop1", "norm")  # children between the activation and fc2
    fused_after = "drop2"

    def fused_get(self: Any, name: str) -> Any:
        return getattr(self, name, None)

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        is_conv = type(getattr(module, cls.fused_fc1)) is nn.Conv2d
        return "its layers are convolutions" if is_conv else None

    def fused_reads_low(self) -> bool:
        return is_plain(self.fused_get(self.fused_fc1))

    def fused_draws(self) -> bool:
        return not (inert(self.fused_get("drop1")) and inert(self.fused_get("drop2")))

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_linears(self, self.fused_fc1, self.fused_fc2)
        act = self.fused_get(self.fused_act)
        if activation_name(act) is None:
            hooked = isinstance(act, nn.Module) and is_hooked(act)
            yield self.fused_act, act, "it is hooked" if hooked else "no kernel for this activation"
        yield from left_dropouts(self, "drop1", self.fused_after)

    def fused_branch(self: Any, x: Tensor, epilogue: Epilogue = NOTHING) -> Tensor:
        get = self.fused_get
        fc1, act, fc2 = get(self.fused_fc1), get(self.fused_act), get(self.fused_fc2)
        between, after = [get(n) for n in self.fused_between], get(self.fused_after)
        name = activation_name(act)
        if is_plain(fc1) and name is not None:
            if is_plain(fc2) and inert(after) and all(inert(m) for m in between):
                weights = fc1.weight, fc1.bias, fc2.weight, fc2.bias
                return mlp(x, *weights, activation=name, **epilogue)
            hidden = linear(x, fc1.weight, fc1.bias, activation=name)
        else:
            hidden = act(project(fc1, x))
        for m in between:
            hidden = hidden if m is None else m(hidden)
        return project_out(fc2, after, hidden, epilogue)

    def fused_forward(self, x: Tensor) -> Tensor:
        return self.fused_branch(x)


def norm_inside(norm: Any) -> tuple[Tensor | None, Tensor | None, float] | None:
    """weight, bias and eps of a LayerNorm inside a gated MLP, weight None where there is none; None
    where the norm must be called."""
    if norm is None or inert(norm):
        return None, None, 1e-6
    if not (isinstance(norm, LayerNorm) and bypassed(norm)):
        return None
    parameters = norm.fused_parameters()
    return None if parameters[0] is None else parameters


def gated_branch(
    x: Tensor, fc1: Any, gate: Any, fc2: Any,
    norm: tuple[Tensor | None, Tensor | None, float], gate_last: bool, activation: str,
    epilogue: Epilogue,
) -> Tensor:  # fmt: skip
    """fc2(norm(act(gate(x)) * fc1(x))) and its epilogue in one op; gate None: fc1 has both."""
    norm_weight, norm_bias, norm_eps = norm
    return gated_mlp(
        x, fc1.weight, fc1.bias, fc2.weight, fc2.bias,
        gate_weight=None if gate is None else gate.weight,
        gate_bias=None if gate is None else gate.bias, norm_weight=norm_weight,
        norm_bias=norm_bias, norm_eps=norm_eps, gate_last=gate_last, activation=activation,
        **epilogue,
    )  # fmt: skip


def gated_hidden(x: Tensor, fc1: Any, gate: Any, gate_last: bool, act: Any) -> Tensor:
    """act(gate(x)) * fc1(x), by PyTorch."""
    if gate is None:
        first, second = project(fc1, x).chunk(2, dim=-1)
        return act(second) * first if gate_last else act(first) * second
    return act(project(gate, x)) * project(fc1, x)


class Gated(Mlp):
    """act(gate(x)) * fc1(x) -> drop1 -> norm -> fc2 -> drop2."""

    fused_gate = ""  # the Linear of the gate; "" where fc1 has both

    def fused_gate_last(self) -> bool:
        """Whether the gate is the second half of fc1's output."""
        return False

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        return None if cls.fused_gate else super().fused_reject(module)

    def fused_first(self) -> list[Any]:
        """fc1 and the Linear of the gate, None where fc1 has both."""
        return [self.fused_get(self.fused_fc1), self.fused_get(self.fused_gate)]

    def fused_reads_low(self) -> bool:
        return all(is_plain(m) for m in self.fused_first() if m is not None)

    def fused_together(self) -> bool:
        """Whether all around a known activation is one op as things are."""
        drops = [self.fused_get(name) for name in ("drop1", "drop2")]
        return (
            all(map(inert, drops)) and is_plain(self.fused_get(self.fused_fc2))
            and self.fused_reads_low() and norm_inside(self.fused_get("norm")) is not None
        )  # fmt: skip

    def fused_pytorch(self: Any) -> Iterator[tuple[str, float]]:
        drops = [getattr(self.fused_get(name), "p", 0) for name in ("drop1", "drop2")]
        known = activation_name(self.fused_get(self.fused_act)) is not None
        if any(drops) or not (known and self.fused_together()):  # a dropout at rest may wake
            yield "gate of the MLP", 5 * self.fused_get(self.fused_fc2).in_features
            yield from norm_in_pytorch("norm of the MLP", self.fused_get("norm"))

    def fused_left(self: Any) -> Iterator[Child]:
        yield from left_linears(self, self.fused_fc1, self.fused_gate, self.fused_fc2)
        yield from left_dropouts(self, "drop2")

    def fused_branch(self: Any, x: Tensor, epilogue: Epilogue = NOTHING) -> Tensor:
        fc1, gate = self.fused_first()
        fc2, act, norm = (self.fused_get(n) for n in (self.fused_fc2, self.fused_act, "norm"))
        name, last, inside = activation_name(act), self.fused_gate_last(), norm_inside(norm)
        if name is not None and inside is not None and self.fused_together():
            return gated_branch(x, fc1, gate, fc2, inside, last, name, epilogue)
        hidden = gated_hidden(x, fc1, gate, last, act)
        for m in (self.fused_get("drop1"), norm):
            hidden = hidden if m is None else m(hidden)
        return project_out(fc2, self.fused_get("drop2"), hidden, epilogue)


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
