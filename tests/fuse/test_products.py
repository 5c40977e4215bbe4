"""Linear layers that a model writes as other products, and products that are none."""

from __future__ import annotations

import pytest
import torch
from rewritten import fired
from torch import nn

K, N, BATCH, T = 8, 16, 3, 5
RULE = "product as linear"


class Product(nn.Module):
    def __init__(self, spell):
        super().__init__()
        self.w, self.wt = nn.Parameter(torch.randn(N, K)), nn.Parameter(torch.randn(K, N))
        self.square = nn.Parameter(torch.randn(K, K))
        self.b, self.rows = nn.Parameter(torch.randn(N)), nn.Parameter(torch.randn(T, N))
        self.each = nn.Parameter(torch.randn(BATCH, K, N))
        self.spell = spell
        self.double()

    def forward(self, x):
        return self.spell(self, x)


def rules(spell, dtype=torch.double, **more):
    return fired(Product(spell).to(dtype), torch.randn(BATCH, T, K, dtype=dtype), **more)


LINEAR = [
    lambda m, x: x @ m.w.t() + m.b,
    lambda m, x: m.b + torch.matmul(x, m.w.T),
    lambda m, x: x @ m.w.transpose(0, 1),
    lambda m, x: x @ m.wt + m.b,
    lambda m, x: torch.addmm(m.b, x.view(-1, K), m.wt),  # transformers' Conv1D
    lambda m, x: torch.addmm(m.b, x.view(-1, K), m.w.t()),
    lambda m, x: x[0].mm(m.wt),
    lambda m, x: x @ m.square,
    lambda m, x: torch.einsum("btk,nk->btn", x, m.w) + m.b,
    lambda m, x: torch.einsum("...k,kn->...n", x, m.wt),
    lambda m, x: torch.einsum("b t k, n k -> b t n", x, m.w),
]


@pytest.mark.parametrize("spell", LINEAR)
def test_products_of_a_parameter_are_linear_layers(spell):
    found = rules(spell)
    assert found[RULE] == found["linear"] == 1


def test_an_mlp_of_written_products_is_one_op():
    found = rules(lambda m, x: nn.functional.gelu(x @ m.w.t() + m.b) @ m.wt.t())
    assert found["mlp"] == 1


NONE = [
    lambda m, x: x @ m.each,
    lambda m, x: x @ x.transpose(1, 2),
    lambda m, x: x[0] @ x[1].t(),
    lambda m, x: torch.addmm(m.b, x.view(-1, K), m.wt, alpha=2),
    lambda m, x: torch.addmm(m.rows, x[0], m.wt),
    lambda m, x: torch.einsum("btk,nk->bnt", x, m.w),
    lambda m, x: torch.einsum("btk,nk->bt", x, m.w),
    lambda m, x: torch.einsum("btk,kk->btk", x, m.square),
    lambda m, x: torch.einsum("btk,tn->bkn", x, m.rows),
]


@pytest.mark.parametrize("spell", NONE)
def test_other_products_stay(spell):
    assert rules(spell)[RULE] == 0


def test_a_bias_by_rows_is_added_behind():
    found = rules(lambda m, x: x[0] @ m.wt + m.rows)
    assert found[RULE] == 1


def written(m, x):
    w = m.w.t()
    y = x @ w
    m.b.mul_(2)
    return y + m.b


def weight_written(m, x):
    y = x @ m.w.t()
    m.w.mul_(2)
    return y + m.b


@pytest.mark.parametrize("spell", [written, weight_written])
def test_writes_in_between(spell):
    rules(spell, grad=False)  # `fired` compares values


def frozen_view(m, x):
    with torch.no_grad():
        w = m.w.t()
    return x @ w + m.b


def test_a_weight_that_takes_no_gradient_takes_none():
    rules(frozen_view)


def test_under_autocast_a_bias_in_fp32_widens():
    spell = LINEAR[0]
    rules(spell, torch.float32, autocast=True, rtol=5e-2, atol=5e-2)  # and compares dtypes


B, H, D = 2, 3, 8
SCORES = ("bqhd,bkhd->bhqk", "b q h d, b k h d -> b h q k", "...qhd,...khd->...hqk")
JOINED = ("bhqk,bkhd->bqhd", "bhqk,bhkd->bqhd", "b h q k, b k h d -> b h q d")


class Heads(nn.Module):
    def __init__(self, scores, joined, turned=False):
        super().__init__()
        self.qkv, self.o = nn.Linear(K, 3 * H * D), nn.Linear(H * D, K)
        self.scores, self.joined, self.turned = scores, joined, turned
        self.double()

    def forward(self, x):
        q, k, v = (t.reshape(B, T, H, D) for t in self.qkv(x).chunk(3, -1))
        q, k = (t.transpose(1, 2) if self.scores[:2] == "bh" else t for t in (q, k))
        first, last = ((k, q), -1) if self.turned else ((q, k), -1)
        weights = (torch.einsum(self.scores, *first) * D**-0.5).softmax(last)
        v = v.transpose(1, 2) if "hk" in self.joined.replace(" ", "").split(",")[1] else v
        o = torch.einsum(self.joined, *((v, weights) if self.turned else (weights, v)))
        return self.o((o if o.shape[1] == T else o.transpose(1, 2)).reshape(B, T, H * D))


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("joined", JOINED)
def test_attention_by_einsums_is_one_op_with_its_projection(scores, joined):
    found = fired(Heads(scores, joined), torch.randn(B, T, K).double())
    assert found["qkv_attention"] == 1, found


def test_attention_by_einsums_of_operands_in_turn():
    found = fired(Heads("bkhd,bqhd->bhqk", "bkhd,bhqk->bqhd", True), torch.randn(B, T, K).double())
    assert found["qkv_attention"] == 1, found


ODD = [
    ("bqhd,bkhd->bhkq", "bhqk,bkhd->bqhd"),  # a softmax over queries
    ("bqhd,bkhd->bhqk", "bhkq,bkhd->bqhd"),  # weights turned
    ("bqhd,bkhd->bqk", "bqk,bkhd->bqhd"),  # scores summed over heads
    ("bqhd,bkgd->bhqk", "bhqk,bkhd->bqhd"),  # keys summed over heads
    ("bqhd,bkhd->bhqk", "bhqk,bkgd->bqhd"),  # values summed over heads
    ("qbhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),  # B taken for T
    ("bqhd,bkhd->bhqk", "bhqk,bqhd->bkhd"),
]


@pytest.mark.parametrize(("scores", "joined"), ODD)
def test_einsums_that_look_like_attention(scores, joined):
    class Square(Heads):
        def forward(self, x):
            q, k, v = (t.reshape(4, 4, 4, 8) for t in self.qkv(x).chunk(3, -1))
            o = torch.einsum(self.joined, torch.einsum(self.scores, q, k).softmax(-1), v)
            return self.o(o.reshape(4, 4, 32)[..., : H * D])

    m = Square(scores, joined)
    m.qkv, m.o = nn.Linear(K, 96).double(), nn.Linear(H * D, K).double()
    assert "qkv_attention" not in fired(m, torch.randn(4, 4, K).double())
