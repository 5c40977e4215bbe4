"""Hosts that no table knows: the fused forwards of attentions, MLPs and residual blocks whose parts
are found by structure.

`fused_roles` says which part of the host is what. The swapped class is made for one host class and
one set of roles, and its name spells both out, so that a pickle is read without a search.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import hosts
from ..prove import TOLERANCE
from .attention import Attention, AttentionRoles, attention_facts, ways_of_rope
from .block import Block, BlockRoles, Step
from .fused import DropPath, Fused, LayerNorm, LayerScale, RmsNorm, example, part
from .masks import example_of_mask
from .mlp import Mlp, MlpRoles
from .roles import LinearRoles, MaskedLinear, Roles

__all__ = [
    "Attention", "AttentionRoles", "Block", "BlockRoles", "LinearRoles", "MaskedLinear", "Mlp",
    "MlpRoles", "Norm", "NormRoles", "Path", "PathRoles", "Rms", "RmsRoles", "Scale", "ScaleRoles",
    "Step", "example_of_mask", "extras", "part", "recognised_class", "ways_of_rope",
]  # fmt: skip


class NormRoles(NamedTuple):
    """A LayerNorm by its own settings; fp32: it computes in fp32 and gives x.dtype."""

    fp32: bool
    rounded: bool


class Norm(LayerNorm, Roles):
    """A subclass of nn.LayerNorm."""

    fused_roles: ClassVar[NormRoles]

    def fused_blocked(self) -> str | None:
        return None

    def fused_dtype(self: Any, x: Tensor) -> torch.dtype | None:
        return x.dtype if self.fused_roles.fp32 else None


class RmsRoles(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * weight; kept: the result has x.dtype, whatever the weight's."""

    weight: str
    eps: str
    kept: bool
    rounded: bool


class Rms(RmsNorm, Roles):
    """A host's own RMSNorm."""

    fused_roles: ClassVar[RmsRoles]

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        return None

    def fused_blocked(self) -> str | None:
        return None

    def fused_parameters(self: Any) -> tuple[Tensor | None, Tensor | None, float]:
        return self.fused_part("weight"), None, self.fused_part("eps")

    def fused_takes(self: Any, x: Tensor) -> bool:
        return x.ndim in self.fused_axes and x.shape[-1:] == self.fused_part("weight").shape

    def fused_dtype(self: Any, x: Tensor) -> torch.dtype | None:
        weight = self.fused_part("weight")
        return x.dtype if self.fused_roles.kept else torch.promote_types(x.dtype, weight.dtype)


class ScaleRoles(NamedTuple):
    """x * gamma"""

    gamma: str


class Scale(LayerScale, Roles):
    """A host's LayerScale. Its forward stays the host's."""

    fused_roles: ClassVar[ScaleRoles]
    fused_axes = (2, 3, 4)
    fused_verdict = Fused.fused_verdict

    def fused_scale(self) -> Tensor:
        return self.fused_part("gamma")

    def fused_forward(self, x: Tensor) -> Tensor:
        return x * self.fused_scale()


class PathRoles(NamedTuple):
    """Stochastic depth: the setting with its probability, and how its numbers are drawn."""

    rate: str
    drawn: str  # "bernoulli", or "rand" for floor(keep + uniform)
    scaled: bool = True


class Path(DropPath, Roles):
    """A host's DropPath. Its forward stays the host's."""

    fused_roles: ClassVar[PathRoles]
    fused_axes = (2, 3, 4)
    fused_verdict = Fused.fused_verdict

    def fused_drop_path_params(self: Any) -> tuple[float, str, bool]:
        return self.fused_part("rate"), self.fused_roles.drawn, self.fused_roles.scaled

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        rows = self.fused_row_scale(x, x.dtype)
        return x if rows is None else x * rows.view(-1, *[1] * (x.ndim - 1))

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        for shape in ((7, 3, 2), (5, 2, 2), (3, 2, 4), (2, 2, 2)):
            yield (example(generator, *shape),), {}


KINDS = (Attention, MaskedLinear, Mlp, Norm, Rms, Scale, Path, Block)
ROUNDED = 1e-5  # of a proof beside a host that rounds to fp32


def _dropouts(roles: Any) -> frozenset[str]:
    """Dropouts of attention, which draw numbers of their own."""
    if isinstance(roles, BlockRoles):
        return frozenset().union(*(_dropouts(s.inline) for s in roles.steps))
    return frozenset((roles.dropout,)) if getattr(roles, "dropout", "") else frozenset()


def extras(roles: Any) -> tuple[str, ...]:
    """The arguments besides the first that the fused forward takes."""
    if isinstance(roles, BlockRoles):
        return tuple(dict.fromkeys(given for s in roles.steps for _, given in s.context))
    return tuple(n for n in (getattr(roles, "rope", ""), getattr(roles, "mask", "")) if n)


def recognised_class(mixin: type[Roles], host: type, roles: Any) -> Any:
    """The swapped class of a host class whose parts have these roles."""
    spelled = json.dumps([hosts.host_path(host), _spelled(roles)]).encode().hex()
    more = {
        "fused_searched": True,
        "fused_roles": roles,
        "fused_extra_kwargs": extras(roles),
        "fused_unread": frozenset(getattr(roles, "unread", ())),
        "fused_attention_dropout": _dropouts(roles),
        "fused_tolerance": ROUNDED if getattr(roles, "rounded", False) else TOLERANCE,
    }
    if mixin in (Attention, Block):
        more["fused_facts"] = attention_facts
    if mixin is Block:
        more["fused_axes"] = (3, 4)
    name = f"{mixin.__name__}_{spelled}"
    return hosts.make(sys.modules[__name__], mixin, host, name, more)


def _spelled(value: Any) -> Any:
    """Roles as JSON has them: a NamedTuple with its name before its values."""
    if isinstance(value, tuple):
        named = [type(value).__name__] if hasattr(value, "_fields") else [""]
        return named + [_spelled(v) for v in value]
    return value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        values = tuple(map(_read, value[1:]))
        return globals()[value[0]](*values) if value[0] else values
    return value


def __getattr__(name: str) -> type:
    """A class by the name that recognised_class gave it, for a pickle in another process."""
    mixin = {c.__name__: c for c in KINDS}.get(name.partition("_")[0])
    if mixin is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, roles = json.loads(bytes.fromhex(name.partition("_")[2]))
    module, _, host = path.rpartition(".")
    return recognised_class(mixin, getattr(importlib.import_module(module), host), _read(roles))
