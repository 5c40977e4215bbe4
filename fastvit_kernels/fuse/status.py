"""fk.status: what runs fused in a model, whoever compiled it."""

from __future__ import annotations

from torch import nn

from .report import ModelStatus, reason_for_pytorch, reports_of, unique
from .swapped import swapped_methods


def status(model: nn.Module) -> ModelStatus:
    """The graphs of a model as things are now: by swap_in, or by torch.compile with our backend.

    Args:
        model: any nn.Module, a wrapper such as DDP or a compiled module too.
    Returns: a ModelStatus: .share, .left, .graphs, .graph_breaks, .recompiles, .limits; text by
        print.
    Raises: TypeError for another model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"status: model must be an nn.Module, got {type(model).__name__}")
    calls = [s.calls for s in swapped_methods(model)]
    graphs = unique([g for c in calls for g in c.graphs] + reports_of(model))
    return ModelStatus(graphs, calls, reason_for_pytorch(model))
