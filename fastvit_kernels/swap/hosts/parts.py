"""The parts that several hosts share: patch embedding and attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...ops.linear.functions import linear
from ...ops.patch_embed.functions import patch_embed
from ...runtime.plain import is_hooked, is_plain
from .attend import as_one, attend, attend_weights, packable, together
from .fused import (
    NOTHING,
    Child,
    Epilogue,
    Fused,
    Inline,
    Place,
    Resolved,
    example,
    inert,
    inputs,
    left_dropouts,
    left_linears,
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
        if not self.fused_is_simple() or not inert(part(self, self.fused_after)):
            return self.fused_undecided(place)
        drop = part(self, self.fused_dropout)
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
