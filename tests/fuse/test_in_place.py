"""A write to a tensor that nobody else sees is read as a new tensor; every other stays a write.

Masks that are written to behind attention, and scores that a model chooses by a condition.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuse.hosts import BY_KERNELS, Host, check, table
from tests.fuse.kit import C, D, H, Kit, join, packed, seeded
from tests.fuse.looks_attention import INF, by_tokens, of_scores


def of_columns(change: Any) -> Any:
    """q, k and v of one product, changed by (kit, product, q, k, v)."""

    def forward(kit: Kit, x: Tensor) -> Tensor:
        y = kit.qkv(x).view(*x.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4)
        q, k, v, *more = change(kit, y, *(y[i] for i in range(3)))
        return kit.o(join((q @ k.mT).softmax(-1) @ v)) + sum(more)

    return forward


def lower(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril()


FUSED = {
    "scores += bias": of_scores(lambda kit, s, x: operator.iadd(s, kit.table)),
    "scores += bias, twice": of_scores(lambda kit, s, x: s.add_(kit.table).add_(2 * kit.table)),
    "scores *= scale": of_scores(lambda kit, s, x: s.mul_(0.5)),
    "scores /= scale": of_scores(lambda kit, s, x: s.div_(3.0)),
    "scores *= heads": of_scores(lambda kit, s, x: s.mul_(kit.per_head)),
    "scores filled": of_scores(lambda kit, s, x: s.masked_fill_(~lower(s), -INF)),
    "scores filled, then +=": of_scores(
        lambda kit, s, x: s.masked_fill(by_tokens(x), -INF).add_(kit.table)
    ),
    "of a view": of_scores(lambda kit, s, x: s.view(-1, *s.shape[1:]).add_(kit.table)),
    "q *= scale": of_columns(lambda kit, y, q, k, v: (operator.imul(q, 0.3), k, v)),
    "q *= scale, k *= scale": of_columns(lambda kit, y, q, k, v: (q.mul_(0.3), k.mul_(0.7), v)),
    "x += branch": lambda kit, x: kit.o(x).add_(kit.fc2(F.gelu(kit.fc1(kit.n(x))))),
}
# What shows the same elements, and is read behind the write; a result; an input; another dtype.
LEFT = {
    "a view of scores, kept": of_scores(
        lambda kit, s, x: (lambda kept: s.add_(kit.table) + kept)(s[:, :, :1])
    ),
    "scores, noted": of_scores(
        lambda kit, s, x: (setattr(kit, "seen", s.detach()), s.add_(kit.table))[1]
    ),
    "a part of scores": of_scores(lambda kit, s, x: (s[..., 1:].add_(1.0), s + kit.table)[1]),
    "the product, read later": of_columns(
        lambda kit, y, q, k, v: (q.mul_(0.3), k, v, y.sum((0, 2, 4)).mean())
    ),
    "q, read under another name": of_columns(
        lambda kit, y, q, k, v: (q.mul_(0.3), k, v, y[0].mean())
    ),
    "q and the first column of k": of_columns(
        lambda kit, y, q, k, v: (y.as_strided(q.shape, q.stride(), 1).mul_(0.3), k, v)
    ),
    "the whole product": of_columns(lambda kit, y, q, k, v: (y.mul_(0.3)[0], k, v)),
    "scores of a transposed self": of_scores(lambda kit, s, x: s.add_(s.mT.detach())),
    "under no_grad": of_scores(lambda kit, s, x: quietly(s)),
    "through data": of_scores(lambda kit, s, x: (s.data.mul_(0.5), s)[1]),
    "an input": lambda kit, x: kit.o(x.mul_(0.5)),
    "a view of an input": lambda kit, x: (x[:, 1:].mul_(0.5), kit.o(x))[1],
    "to the narrower dtype": lambda kit, x: kit.o(kit.o(x).float().add_(kit.cls).to(x.dtype)),
}


def quietly(s: Tensor) -> Tensor:
    with torch.no_grad():
        s.mul_(0.5)
    return s


@pytest.mark.parametrize("host", table("in place", FUSED), ids=lambda host: host.id)
@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad])
def test_a_write_that_nobody_sees_is_fused(host, context):
    result = check(Host(host.id, host.forward, context=context))
    assert result.rules["in place"] >= 1 and result.share == 1.0, (result.rules, result.left)


@pytest.mark.parametrize("host", table("in place", LEFT), ids=lambda host: host.id)
def test_a_write_that_is_seen_stays(host):
    result = check(host)
    assert not result.rules["in place"], result.rules


def test_columns_of_a_dynamic_batch():
    host = Host("q *= scale", FUSED["q *= scale"], calls=2, again=lambda: (seeded(3, 9, C),))
    result = check(host)
    assert all(r.rules["in place"] and r.rules["qkv_attention"] for r in result.reports)


CHOSEN = {
    "the scores, else -inf": of_scores(lambda kit, s, x: torch.where(lower(s), s, -INF)),
    "-inf, else the scores": of_scores(lambda kit, s, x: torch.where(~lower(s), -INF, s)),
    "by inputs": of_scores(lambda kit, s, x: torch.where(by_tokens(x), s, -INF)),
    "by a tensor of -inf": of_scores(
        lambda kit, s, x: torch.where(by_tokens(x), s, torch.full_like(s, -INF))
    ),
    "then a bias": of_scores(lambda kit, s, x: torch.where(lower(s), s + kit.table, -INF)),
    "twice": of_scores(
        lambda kit, s, x: torch.where(
            ~lower(s), -INF, torch.where(lower(s).flip(0, 1) | lower(s), s, -INF)
        )
    ),
}


@pytest.mark.parametrize("host", table("where", CHOSEN), ids=lambda host: host.id)
def test_scores_chosen_by_where(host):
    result = check(Host(host.id, host.forward, needs_grad=False))
    assert result.share == 1.0, result.left


def written_behind(make: Any) -> Any:
    """A mask that is written to once attention has read it, which the host's backward allows."""

    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = packed(kit, x)
        mask = make(kit, x)
        o = join((q @ k.mT + mask).softmax(-1) @ v)
        mask.zero_()
        return kit.o(o)

    return forward


WRITTEN = {
    "of inputs": written_behind(lambda kit, x: x.detach()[:, None, :, :9].sin()),
    "of a parameter": written_behind(lambda kit, x: kit.table * 0.5),
    "a buffer": written_behind(lambda kit, x: kit.cos.view(-1)[:81].view(9, 9)),
    "in bounds": written_behind(lambda kit, x: kit.cos.view(-1)[:81].view(9, 9).sigmoid()),
}


@pytest.mark.parametrize("how", [{}, BY_KERNELS], ids=["torch", "kernels"])
@pytest.mark.parametrize("name", WRITTEN)
def test_a_mask_may_be_written_to_behind_attention(name, how):
    """Kernels read it in the backward, where the host reads its weights."""
    assert check(Host(name, WRITTEN[name], **how)).share == 1.0
