"""fk.verify: host and rewritten graph on one batch in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from swapped import images, vit
from torch import nn

import fastvit_kernels as fk
from fastvit_kernels import swap_in
from fastvit_kernels.fuse import backend
from fastvit_kernels.fuse.verify import verify

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("swapped", [None, dict(regional=True)], ids=str)
def test_verify_says_that_all_is_the_same(swapped):
    model = vit(drop_path_rate=0.5, proj_drop_rate=0.1)
    if swapped is not None:
        swap_in(model, **swapped)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attributes = [set(vars(m)) for m in model.modules()]
    with fk.backend("triton"):  # which has no kernel for float64
        found = verify(model, images())
    assert found.ok and found.different == []
    names = {d.name for d in found.differences}
    grads = {f"grad of {n}" for n, _ in model.named_parameters()}
    assert names == {"out", "grad of input[0]"} | grads
    assert max(d.error for d in found.differences) < 1e-12
    assert str(found).startswith("same: ") and sum(sum(g.rules.values()) for g in found.graphs) > 5
    assert "the rewrite only: in float64 PyTorch runs our ops, no kernel" in str(found)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert all(p.grad is None and p.dtype == torch.float32 for p in model.parameters())
    assert [set(vars(m)) for m in model.modules()] == attributes


def test_verify_says_what_differs(monkeypatch):
    """Planted: one weight of the rewritten graph is read twice as large."""
    original = backend.rewrite

    def wrong(gm, inputs, options):
        made = original(gm, inputs, options)
        out = next(n for n in made.graph.nodes if n.op == "output")
        (y,) = out.args[0]
        with made.graph.inserting_before(out):
            out.args = ((made.graph.call_function(torch.mul, (y, 2)),),)
        made.recompile()
        return made

    monkeypatch.setattr(backend, "rewrite", wrong)
    found = verify(vit(), images())
    assert not found.ok and str(found).startswith("different: ")
    assert {d.name for d in found.different} >= {"out", "grad of head.weight"}
    assert dict(found.differences)["out"] == pytest.approx(1.0)


def test_verify_takes_keywords_and_compares_buffers_and_dicts():
    class Host(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x, scale=1):
            return {"y": [self.linear(self.norm(x)) * scale], "seen": x > 0}

    found = verify(Host(), dict(x=torch.randn(4, 8), scale=2))
    names = {d.name for d in found.differences}
    assert found.ok and names >= {"out.y[0]", "out.seen", "grad of input.x"}
    assert "buffer norm.running_mean" in names


def test_verify_of_our_own_modules():
    with fk.backend("triton"):
        assert verify(fk.create_vit("vit_mnist", depth=1), torch.randn(2, 1, 28, 28)).ok
