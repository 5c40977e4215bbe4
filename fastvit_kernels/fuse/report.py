"""What fused, what is left and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Left:
    """A product or attention that stays with the model."""

    name: str  # the module's path, "blocks.0.attn"
    op: str
    flops: int
    reason: str


@dataclass
class GraphReport:
    """One graph that Dynamo captured."""

    flops: int = 0
    fused_flops: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    left: list[Left] = field(default_factory=list)
    declined: str | None = None
    seconds: float = 0.0

    @property
    def share(self) -> float:
        return self.fused_flops / self.flops if self.flops else 1.0


REPORTS: list[GraphReport] = []


def record(report: GraphReport, tensors: Iterable[Tensor]) -> None:
    REPORTS.append(report)
