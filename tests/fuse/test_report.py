"""What a person reads about a model's graphs, and that nothing is held alive by it."""

from __future__ import annotations

import functools
import gc
import pickle
import warnings
import weakref

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from swapped import images, no_warning, swapped_and_host, vit
from torch import nn

from fastvit_kernels import backend, status, swap_in, swap_out
from fastvit_kernels.fuse.backend import fastvit_kernels
from fastvit_kernels.fuse.graph import Decline
from fastvit_kernels.fuse.report import reports_of


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    dynamo.reset()
    yield
    dynamo.reset()


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
    assert 0 < report.share <= 1 and len(report.graphs) == 1
    assert report.share == status(model).share
    assert report.modules == [""]


def test_the_share_is_that_of_the_flops():
    model = Half()
    report = swap_in(model, example=torch.randn(2, 32, 64))
    mlp, product = 2 * 2 * 32 * 64 * 128 * 2, 2 * 2 * 32 * 32 * 64
    assert (report.flops, report.fused_flops) == (mlp + product, mlp)
    assert report.share == pytest.approx(mlp / (mlp + product))
    (left,) = report.left
    assert (left.name, left.flops) == ("", product) and left.reason
    assert f"{100 * report.share:.1f} % of the matmul and attention FLOPs" in str(report)


class Written(nn.Module):
    """An MLP with something between its products."""

    def __init__(self, between):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 128), nn.Linear(128, 64)
        self.between = between

    def forward(self, x):
        return self.fc2(self.between(self.fc1(x)))


def hooked(hook):
    model = vit()
    for block in model.blocks:
        block.mlp.fc1.register_forward_hook(hook)
    return model


def written(between):
    model = vit()
    for block in model.blocks:
        block.mlp = Written(between)
    return model


KEPT: list[torch.Tensor] = []
KERNELS = "none of gelu, gelu_tanh, quick_gelu, silu"
APART = {
    "another activation": (lambda: vit(act_layer=nn.ReLU6), f"act's hardtanh is {KERNELS}"),
    "a hook keeps": (
        lambda: hooked(lambda m, args, out: KEPT.append(out)),
        "fc1's linear is read elsewhere too",
    ),
    "a hook writes": (
        lambda: hooked(lambda m, args, out: out.clamp_(max=3.0)),
        "fc1's clamp_ between the first linear and its activation",
    ),
    "a write between": (
        lambda: written(lambda h: F.gelu(h).clamp_(-1, 1)),
        f"mlp's clamp_ is {KERNELS}",
    ),
    "dropout": (
        lambda: written(lambda h: F.dropout(F.gelu(h), 0.1)),
        "mlp's dropout draws random numbers",
    ),
    "an adapter": (
        lambda: written(lambda h: F.gelu(h + F.linear(h, torch.ones(128, 128)))),
        "mlp's add between the first linear and its activation",
    ),
}


@pytest.mark.parametrize("case", APART)
def test_an_mlp_that_runs_as_two_linears_has_a_row(case):
    make, reason = APART[case]
    report = swap_in(make(), example=images())
    KEPT.clear()
    mlps = [row for row in report.left if row.op == "mlp"]
    assert report.share == 1 and [row.name for row in mlps] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert all(row.reason.endswith(f" linears: {reason}") and row.flops == 0 for row in mlps)
    assert "  2 x blocks.*.mlp mlp: runs as " in str(report)


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
    drawn = [("blocks.0", "proj_drop's"), ("blocks.0", "drop2's")]
    drawn += [("blocks.1", name) for _, name in drawn]
    end = "dropout draws random numbers"
    found = [(row.name, *row.reason.split(": ")) for row in residuals]
    alone = "added by itself, not by the product before it"
    assert found == [(block, alone, f"{name} {end}") for block, name in drawn]
    assert swap_in(model.eval(), example=images()).left == []


class Plain(nn.Module):
    """Linears that are no MLP: a projection down and up, a norm, a pooled head, rotations."""

    def __init__(self):
        super().__init__()
        self.down, self.up, self.norm = nn.Linear(64, 16), nn.Linear(16, 64), nn.LayerNorm(64)
        self.head, self.turn = nn.Linear(64, 10), nn.Linear(64, 64)

    def forward(self, x):
        q = self.turn(x)
        q = q * q.new_ones(64).cos() + torch.cat((-q[..., 32:], q[..., :32]), -1)
        x = self.norm(self.up(self.down(x))) + q
        return self.head(F.dropout(x[:, 0], 0.1))


def test_linears_that_are_no_mlp_have_no_row():
    report = swap_in(Plain(), example=torch.randn(2, 9, 64))
    assert report.share == 1 and report.left == []


def test_a_norm_that_is_left_has_a_row():
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm((9, 64)))
    (row,) = swap_in(model, example=torch.randn(2, 9, 64)).left
    assert (row.name, row.op) == ("1", "layer_norm") and row.reason


def test_what_is_fused_is_counted():
    report = swap_in(vit(), example=images())
    (line,) = [line for line in str(report).splitlines() if line.startswith("fused: ")]
    counts = dict(reversed(part.split(" ", 1)) for part in line[len("fused: ") :].split(", "))
    wanted = {"qkv_attention": "2", "mlp": "2", "layer_norm": "5", "linear": "1"}
    assert counts.items() >= wanted.items() and "norm_and_input" not in counts


def test_talking_heads_are_told_in_words():
    from timm.models.cait import Cait

    small = dict(img_size=32, patch_size=16, embed_dim=64, num_heads=2, depth_token_only=1)
    report = swap_in(Cait(depth=2, **small), example=images())
    assert {(row.name, row.reason) for row in report.left} == {
        (f"blocks.{i}.attn", f"attention not fused: {why}")
        for i in range(2)
        for why in (
            "q k^T passes linear before the softmax",
            "the softmax passes linear before the product with v",
        )
    }


def test_a_product_of_a_tensor_with_itself_is_counted():
    class Gram(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            return torch.einsum("bid,bjd->bij", x, x)

    report = swap_in(Gram(64, 64), example=torch.randn(2, 9, 64))
    (left,) = report.left
    assert left.op == "einsum" and left.flops >= 2 * 2 * 9 * 9 * 64  # an estimate


class OfAnother(torch.autograd.Function):
    """As a quantised linear of another package: nothing tells that it only reads."""

    @staticmethod
    def forward(ctx, x):
        return x + 1

    @staticmethod
    def backward(ctx, d):
        return d


def test_a_reason_names_what_may_write():
    class Foreign(nn.Linear):
        def forward(self, x):
            q = super().forward(x)
            return OfAnother.apply(F.scaled_dot_product_attention(q, q, q))

    report = swap_in(Foreign(32, 32), example=torch.randn(2, 2, 9, 32))
    (left,) = report.left
    assert left.reason == "autograd_function_apply may write to what attention keeps"


def test_a_graph_that_is_left_whole_names_its_products(monkeypatch):
    def normalised(gm, inputs):
        raise Decline("for this test")

    monkeypatch.setattr("fastvit_kernels.fuse.backend.normalised", normalised)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    with pytest.warns(RuntimeWarning, match="nothing of its matmul .* is fused: for this test"):
        report = swap_in(model, example=torch.randn(9, 32))
    assert report.share == 0
    assert [(left.op, left.flops) for left in report.left] == [("linear", 2 * 9 * 32 * 64)] * 2


def test_a_forward_that_sets_data_keeps_its_numbers_and_says_so():
    class Loads(nn.Linear):
        def forward(self, x):
            self.weight.data = torch.ones_like(self.weight)
            return super().forward(x)

    x = torch.randn(2, 9, 64)
    model, host = swapped_and_host(Loads(64, 64))
    assert torch.equal(model(x), host(x))
    found = status(model)  # Dynamo of torch 2.14 has another graph for it
    assert found.share == 1 or found.left[0].reason == "the forward sets a tensor's .data"


def test_rows_name_modules_of_the_model_by_block_too():
    model = nn.ModuleDict(dict(a=Half()))
    swap_in(model, only="a")
    model["a"](torch.randn(2, 32, 64))
    assert [row.name for row in status(model).left] == ["a"]


def test_rows_that_differ_by_a_number_are_one_line():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Half() for _ in range(3)])

        def forward(self, x):
            return sum(block(x) for block in self.blocks)

    report = swap_in(Blocks(), example=torch.randn(2, 32, 64))
    assert [row.name for row in report.left] == ["blocks.0", "blocks.1", "blocks.2"]
    assert str(report).count("blocks") == 1 and "  3 x blocks.*" in str(report)


def test_the_report_says_whether_kernels_run():
    report = swap_in(vit(), example=images())
    with backend("torch"):
        assert "would be fused by kernels on a GPU; here PyTorch runs them" in str(report)
        assert report.pytorch == "the backend is 'torch'"
    if torch.cuda.is_available():
        assert report.pytorch != ""  # the model is on the CPU


def test_status_finds_the_graphs_of_torch_compile():
    model = vit()
    assert status(model).graphs == []
    assert "the model is not swapped" in str(status(model))
    compiled = torch.compile(model, backend=fastvit_kernels, options={"compiler": "eager"})
    compiled(images())
    for m in (model, compiled):
        assert len(status(m).graphs) == 1 and status(m).share > 0
    assert reports_of(vit()) == []


def test_nothing_is_fused_behind_swap_out():
    model = vit()
    report = swap_in(model, example=images())
    swap_out(model)
    assert status(model).graphs == [] and "the model is not swapped" in str(status(model))
    assert report.share == 1 and "undone; it was" in str(report)
    swap_in(model, example=images())
    assert len(status(model).graphs) == 1 and "undone; it was" not in str(status(model))


class Disabled(nn.Linear):
    @torch._dynamo.disable
    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("is_example", [True, False])
@pytest.mark.parametrize("make", [lambda: nn.LSTM(8, 8), lambda: Disabled(8, 8)])
def test_a_model_without_a_graph_gets_one_warning(make, is_example):
    x, model = torch.randn(2, 5, 8), make()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        report = swap_in(model, example=x if is_example else None)
        for _ in range(2):
            model(x)
    (only,) = [str(w.message) for w in warned if "swap_in" in str(w.message)]
    for text in (only, str(report), str(status(model))):
        assert "nothing is fused: it was called, but torch.compile captured no graph" in text


def test_a_method_inside_that_has_a_graph_is_no_warning():
    class Outer(nn.Linear):
        def forward_features(self, x):
            return super().forward(x)

        @torch._dynamo.disable
        def forward(self, x):
            return self.forward_features(x)

    model, _ = swapped_and_host(Outer(8, 8))
    with no_warning():
        model(torch.randn(2, 8))
    assert status(model).share == 1


def test_a_forward_that_is_wrapped_later_is_no_warning():
    model, _ = swapped_and_host(nn.Linear(8, 8))
    model.forward = functools.partial(model.forward)
    with no_warning():
        model(torch.randn(2, 8))
    assert status(model).share == 1


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.a(x)
        torch._dynamo.graph_break()
        return self.b(x)


def test_graph_breaks_and_recompiles_are_rows():
    model, _ = swapped_and_host(Breaks())
    model(torch.randn(2, 8))
    found = status(model)
    assert len(found.graphs) == 2 and len(found.graph_breaks) == 1 and found.recompiles == 0
    assert "1 graph break: " in str(found) and f"{__file__}:" in found.graph_breaks[0]
    model(torch.randn(2, 8).double().float().requires_grad_())
    assert status(model).recompiles >= 1
    assert "recompile" in str(status(model))


class Products(nn.Module):
    """Products that no rule knows, in blocks that repeat."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a, self.b = nn.Identity(), nn.Linear(8, 8), nn.Linear(8, 8)
            self.norm = nn.GroupNorm(1, 8)

        def forward(self, x):
            return x @ torch.cumsum(x, 1).transpose(1, 2) @ x

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("regional", [False, True])
def test_a_model_that_fuses_nothing_gets_one_warning(regional):
    model = Products()
    swap_in(model, regional=regional)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        for batch in (2, 3, 4):
            model(torch.randn(batch, 4, 8))
    (only,) = [str(w.message) for w in warned if "swap_in" in str(w.message)]
    assert "nothing of its matmul and attention FLOPs is fused: matmul: " in only


def test_reports_hold_no_model_alive():
    model = vit()
    report = swap_in(model, example=images())
    graphs = weakref.ref(report.graphs[0])
    gone = weakref.ref(model)
    del model
    dynamo.reset()
    gc.collect()
    assert gone() is None and report.share > 0
    assert "of the matmul and attention FLOPs" in str(report)
    del report
    gc.collect()
    assert graphs() is None


def test_reports_are_plain_data():
    report = swap_in(vit(), example=images())
    copied = pickle.loads(pickle.dumps(report))
    assert copied.share == report.share and copied.left == report.left
