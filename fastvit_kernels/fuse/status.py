"""fk.status: what runs fused in a model, whoever compiled it."""

from __future__ import annotations

from torch import nn

from .report import ModelStatus, reason_for_pytorch, reports_of, unique
from .select import check_model
from .swapped import swapped_methods


def status(model: nn.Module) -> ModelStatus:
    """Report what is fused in a model now, by swap_in or by torch.compile with our backend.

    Args:
        model: any nn.Module, including a wrapper such as DDP or a compiled module.
    Returns: a ModelStatus: .share, .left, .graphs, .graph_breaks, .recompiles, .limits; print it
        to read it.
    Raises: TypeError if model is not an nn.Module.
    """
    check_model("status", model)
    methods = swapped_methods(model)
    for swapped in methods:
        if swapped.entry is not None:
            swapped.entry.graphs.tell(swapped)
    calls = [s.calls for s in methods]
    graphs = unique([g for c in calls for g in c.graphs] + reports_of(model))
    return ModelStatus(graphs, calls, reason_for_pytorch(model))
