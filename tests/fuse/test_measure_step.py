"""swap_in(measure=batch): one A/B of the whole step, kept only if it is faster."""

from __future__ import annotations

import re
import time

import pytest
import torch
from torch import nn

from fastvit_kernels import swap_in

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Sleeper(nn.Module):
    """Sleeps where Dynamo does not trace it (the host), or where it does (the graph)."""

    def __init__(self, host, graph):
        super().__init__()
        self.linear, self.host, self.graph = nn.Linear(8, 8), host, graph
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if not torch.compiler.is_dynamo_compiling():
            time.sleep(self.host)
        elif self.graph:
            for _ in range(self.graph):
                x = x + torch.linalg.svd(torch.eye(80))[1].sum() * 0
        return self.linear(x)


@pytest.mark.filterwarnings("ignore:swap_in")
@pytest.mark.parametrize(
    ("model", "kept", "text"),
    [
        (Sleeper(0.02, 0), True, r" a step: \d+\.\d\dx$"),
        (Sleeper(0.0, 30), False, r" a step, slower here$"),
    ],
    ids=["faster", "slower"],
)
def test_a_swap_stays_only_where_it_is_faster(model, kept, text):
    p = model.linear.weight
    p.grad = grad = torch.ones_like(p)
    state = torch.get_rng_state()
    report = swap_in(model, measure=torch.ones(2, 8))
    start = "" if kept else "NOT swapped: "
    assert re.match(start + r"original \d+\.\d ms, swapped \d+\.\d ms a step", report.measured)
    assert re.search(text, report.measured)
    assert str(report).startswith(report.measured + "\n")
    assert ("forward" in vars(model)) is kept
    assert p.grad is grad and model.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
