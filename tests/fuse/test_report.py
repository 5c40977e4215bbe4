"""What a person reads about a model's graphs, and that nothing is held alive by it."""

from __future__ import annotations

import functools
import gc
import pickle
import warnings
import weakref
from collections import OrderedDict

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from swapped import images, no_warning, swapped_and_host, vit
from torch import nn
from torch._subclasses import FakeTensorMode

from fastvit_kernels import backend, status, swap_in, swap_out
from fastvit_kernels.fuse.backend import fastvit_kernels
from fastvit_kernels.fuse.graph import Decline

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Half(nn.Module):
    """An MLP that fuses, and a product that does not."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def forward(self, x):
        x = self.mlp(x)
        return x @ torch.cumsum(x, 1).transpose(1, 2)


def test_a_report_fills_at_the_first_call():
    model = vit()
    report = swap_in(model)
    assert report.share == 0 and report.graphs == [] and "no graph yet" in str(report)
    model(images())
    assert report.share == status(model).share == 1 and len(report.graphs) == 1
    (line,) = [line for line in str(report).splitlines() if line.startswith("fused: ")]
    counts = dict(reversed(part.split(" ", 1)) for part in line[len("fused: ") :].split(", "))
    wanted = {"qkv_attention": "2", "mlp": "2", "layer_norm": "5", "linear": "1"}
    assert counts.items() >= wanted.items() and "norm_and_input" not in counts
    with backend("torch"):
        assert "would be fused by kernels on a GPU; here PyTorch runs them" in str(report)
        assert report.pytorch == "the backend is 'torch'"


def test_the_share_is_that_of_the_flops():
    report = swap_in(Half(), example=torch.randn(2, 32, 64))
    mlp, product = 2 * 2 * 32 * 64 * 128 * 2, 2 * 2 * 32 * 32 * 64
    assert (report.flops, report.fused_flops) == (mlp + product, mlp)
    assert report.share == pytest.approx(mlp / (mlp + product))
    (left,) = report.left
    assert (left.name, left.flops) == ("", product) and left.reason
    assert f"{100 * report.share:.1f} % of the matmul and attention FLOPs" in str(report)


def mlps(**settings):
    """Two MLPs of timm's."""
    from timm.layers import Mlp

    blocks = nn.Sequential(*(Mlp(64, 128, **settings) for _ in range(2)))
    return nn.Sequential(OrderedDict(blocks=blocks))


def hooked(hook):
    model = mlps()
    for mlp in model.blocks:
        mlp.fc1.register_forward_hook(hook)
    return model


class Adapted(nn.Linear):
    """As LoRA: a second linear's result is added to the first one's."""

    def forward(self, x):
        return super().forward(x) + F.linear(x, torch.ones_like(self.weight))


def adapted():
    model = mlps()
    for mlp in model.blocks:
        mlp.fc1 = Adapted(64, 128)
    return model


KEPT: list[torch.Tensor] = []
APART = {
    "another activation": (
        lambda: mlps(act_layer=nn.ReLU6),
        "act's hardtanh is none of gelu, gelu_tanh, quick_gelu, silu",
    ),
    "a hook keeps": (
        lambda: hooked(lambda m, args, out: KEPT.append(out)),
        "fc1's linear is read elsewhere too",
    ),
    "a hook writes": (
        lambda: hooked(lambda m, args, out: out.clamp_(max=3.0)),
        "fc1's clamp_ between the first linear and its activation",
    ),
    "an adapter": (adapted, "fc1's add between the first linear and its activation"),
}


@pytest.mark.parametrize("case", APART)
def test_an_mlp_that_runs_as_two_linears_has_a_row(case):
    make, reason = APART[case]
    report = swap_in(make(), example=torch.randn(2, 9, 64))
    KEPT.clear()
    rows = [row for row in report.left if row.op == "mlp"]
    assert report.share == 1 and [row.name for row in rows] == ["blocks.0", "blocks.1"]
    assert all(row.reason.endswith(f" linears: {reason}") and row.flops == 0 for row in rows)
    assert "  2 x blocks.* mlp: runs as " in str(report)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(64, 128), nn.Linear(64, 128)
        self.out = nn.Linear(128, 64)

    def forward(self, x):
        return self.out(self.gate(x).tanh() * self.value(x))


def test_a_gated_mlp_of_another_activation_has_a_row():
    (row,) = swap_in(Gated(), example=torch.randn(2, 9, 64)).left
    assert row.op == "gated_mlp" and row.reason.startswith("runs as three linears: a gate whose")


def test_a_residual_that_is_added_by_itself_has_a_row():
    model = vit(proj_drop_rate=0.1)
    residuals = [row for row in swap_in(model, example=images()).left if row.op == "residual"]
    why = "added by itself, not by the product before it: {}'s dropout draws random numbers"
    assert [(row.name, row.reason) for row in residuals] == [
        (f"blocks.{i}", why.format(drop)) for i in range(2) for drop in ("proj_drop", "drop2")
    ]
    assert swap_in(model.eval(), example=images()).left == []


def test_a_norm_that_is_left_has_a_row():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm((9, 64)))
    (row,) = swap_in(model, example=torch.randn(2, 9, 64)).left
    assert (row.name, row.op) == ("1", "layer_norm") and row.reason


class Gram(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return torch.einsum("bid,bjd->bij", x, x)


def test_a_product_of_a_tensor_with_itself_is_counted():
    (left,) = swap_in(Gram(64, 64), example=torch.randn(2, 9, 64)).left
    assert left.op == "einsum" and left.flops >= 2 * 2 * 9 * 9 * 64  # an estimate


class OfAnother(torch.autograd.Function):
    """As a quantised linear of another package: nothing tells that it only reads."""

    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, d):
        return d


class Foreign(nn.Linear):
    def forward(self, x):
        q = super().forward(x)
        return OfAnother.apply(F.scaled_dot_product_attention(q, q, q))


def test_a_reason_names_what_may_write():
    (left,) = swap_in(Foreign(32, 32), example=torch.randn(2, 2, 9, 32)).left
    assert left.reason == "autograd_function_apply may write to what attention keeps"


class Added(nn.Linear):
    def forward(self, x):
        return torch.addmm(x[0, 0], x, self.weight)


@pytest.mark.parametrize(
    ("error", "said"),
    [(Decline("not now"), "not now"), (ValueError(" \n"), "rewriting failed: ValueError")],
)
def test_a_graph_that_is_left_whole_names_its_products(monkeypatch, error, said):
    def normalised(gm, inputs):
        raise error

    monkeypatch.setattr("fastvit_kernels.fuse.backend.normalised", normalised)
    model = nn.Sequential(nn.Linear(32, 40), nn.GELU(), Added(5, 40))
    with pytest.warns(RuntimeWarning, match=f"nothing of its matmul .* is fused: {said}"):
        report = swap_in(model, example=torch.randn(3, 32))
    assert report.share == 0
    products = [("linear", 2 * 3 * 32 * 40), ("addmm", 2 * 3 * 40 * 5)]
    assert [(left.op, left.flops) for left in report.left] == products


def test_a_graph_of_fake_tensors_is_fused():
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        run = torch.compile(model, backend="fastvit_kernels", options={"compiler": "eager"})
        assert run(torch.randn(3, 32)).shape == (3, 32)
    assert status(model).share == 1


class Loads(nn.Linear):
    def forward(self, x):
        self.weight.data = torch.ones_like(self.weight)
        return super().forward(x)


def test_a_forward_that_sets_data_keeps_its_numbers_and_says_so():
    x = torch.randn(2, 9, 64)
    model, host = swapped_and_host(Loads(64, 64))
    assert torch.equal(model(x), host(x))
    found = status(model)  # Dynamo of torch 2.14 has another graph for it
    assert found.share == 1 or found.left[0].reason == "the forward sets a tensor's .data"


@pytest.mark.parametrize("only", [None, "blocks.*"])
def test_rows_that_differ_by_a_number_are_one_line(only):
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Half() for _ in range(3)])

        def forward(self, x):
            return sum(block(x) for block in self.blocks)

    report = swap_in(Blocks(), only=only, example=torch.randn(2, 32, 64))
    assert [row.name for row in report.left] == ["blocks.0", "blocks.1", "blocks.2"]
    assert str(report).count("blocks") == 1 and "  3 x blocks.*" in str(report)


def test_status_finds_the_graphs_of_torch_compile():
    model, x = mlps(), torch.randn(2, 9, 64)
    assert status(model).graphs == []
    assert "the model is not swapped" in str(status(model))
    compiled = torch.compile(model, backend=fastvit_kernels, options={"compiler": "eager"})
    compiled(x)
    for m in (model, compiled):
        assert len(status(m).graphs) == 1 and status(m).share > 0
    assert status(mlps()).graphs == []


def test_nothing_is_fused_behind_swap_out():
    model, x = mlps(), torch.randn(2, 9, 64)
    report = swap_in(model, example=x)
    swap_out(model)
    assert status(model).graphs == [] and "the model is not swapped" in str(status(model))
    assert report.share == 1 and "undone; it was" in str(report)
    swap_in(model, example=x)
    assert len(status(model).graphs) == 1 and "undone; it was" not in str(status(model))


class Disabled(nn.Linear):
    @torch._dynamo.disable
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("example", [None, torch.randn(2, 5, 8)], ids=["later", "example"])
@pytest.mark.parametrize("make", [nn.LSTM, Disabled])
def test_a_model_without_a_graph_gets_one_warning(make, example):
    model = make(8, 8)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        report = swap_in(model, example=example)
        for _ in range(2):
            model(torch.randn(2, 5, 8))
    (only,) = [str(w.message) for w in warned if "swap_in" in str(w.message)]
    for text in (only, str(report), str(status(model))):
        assert "nothing is fused: it was called, but torch.compile captured no graph" in text


class Outer(nn.Linear):
    def forward_features(self, x):
        return super().forward(x)

    @torch._dynamo.disable
    def forward(self, x):
        return self.forward_features(x)


@pytest.mark.parametrize("make", [Outer, nn.Linear], ids=["a method inside", "wrapped later"])
def test_a_graph_behind_another_call_is_no_warning(make):
    model, _ = swapped_and_host(make(8, 8))
    model.forward = functools.partial(model.forward)
    with no_warning():
        model(torch.randn(2, 8))
    assert status(model).share == 1


class Breaks(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        torch._dynamo.graph_break()
        return super().forward(x)


def test_graph_breaks_and_recompiles_are_rows():
    model, _ = swapped_and_host(Breaks(8, 8))
    model(torch.randn(2, 8))
    found = status(model)
    assert len(found.graphs) == 2 and len(found.graph_breaks) == 1 and found.recompiles == 0
    assert "1 graph break: " in str(found) and f"{__file__}:" in found.graph_breaks[0]
    model(torch.randn(2, 8).double().float().requires_grad_())
    assert status(model).recompiles >= 1
    assert "recompile" in str(status(model))


class Product(nn.Module):
    """A product that no rule knows, in a block by its parts."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b = nn.GroupNorm(1, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x @ torch.cumsum(x, 1).transpose(1, 2) @ x


@pytest.mark.parametrize("regional", [False, True])
def test_a_model_that_fuses_nothing_gets_one_warning(regional):
    model = nn.Sequential(Product(), Product(), Product())
    swap_in(model, regional=regional)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        for batch in (2, 3, 4):
            model(torch.randn(batch, 4, 8))
    (only,) = [str(w.message) for w in warned if "swap_in" in str(w.message)]
    assert "nothing of its matmul and attention FLOPs is fused: matmul: " in only


def test_reports_are_plain_data_and_hold_no_model_alive():
    model = mlps()
    report = swap_in(model, example=torch.randn(2, 9, 64))
    graphs = weakref.ref(report.graphs[0])
    gone = weakref.ref(model)
    del model
    dynamo.reset()
    gc.collect()
    assert gone() is None and report.share > 0
    assert "of the matmul and attention FLOPs" in str(report)
    copied = pickle.loads(pickle.dumps(report))
    assert copied.share == report.share and copied.left == report.left
    del report, copied
    gc.collect()
    assert graphs() is None
