"""Small parts of hosts that no table knows: norms, LayerScale, DropPath."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .fused import DropPath, Fused, LayerNorm, LayerScale, RmsNorm, example
from .roles import Roles


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
