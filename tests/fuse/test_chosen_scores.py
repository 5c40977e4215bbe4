"""Scores that a model chooses by a condition, with -inf elsewhere; masks that are written to."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fastvit_kernels as fk
from tests.fuse.hosts import Host, check, table
from tests.fuse.kit import D, Kit, join, packed, seeded
from tests.fuse.looks_attention import scores_of

INF = float("inf")


def of_scores(change: Any) -> Any:
    """Attention written out, its scores changed by (kit, scores, x)."""
    return scores_of(lambda kit, s, x: change(kit, s * D**-0.5, x).softmax(-1))


def lower(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril()


def some(x: Tensor) -> Tensor:
    return (x[:, :, 0] > 0)[:, None, None]


CHOSEN = {
    "the scores, else -inf": of_scores(lambda kit, s, x: torch.where(lower(s), s, -INF)),
    "-inf, else the scores": of_scores(lambda kit, s, x: torch.where(~lower(s), -INF, s)),
    "by inputs": of_scores(lambda kit, s, x: torch.where(some(x), s, -INF)),
    "by a tensor of -inf": of_scores(
        lambda kit, s, x: torch.where(some(x), s, torch.full_like(s, -INF))
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


@pytest.mark.parametrize("host", table("mask", WRITTEN), ids=lambda host: host.id)
def test_a_mask_may_be_written_to_behind_attention(host):
    assert check(host).share == 1.0


@pytest.mark.parametrize("name", WRITTEN)
def test_kernels_keep_a_mask_of_their_own(name):
    """They read it in the backward, where the host reads its weights."""
    torch._dynamo.reset()
    host = Host(name, WRITTEN[name], dtype=torch.float32).build()
    model, x = copy.deepcopy(host), seeded(2, 9, 32)
    with fk.backend("triton"):
        fk.swap_in(model)
        model(x).square().sum().backward()
    host(x).square().sum().backward()
    assert fk.status(model).share == 1.0
    for a, b in zip(model.parameters(), host.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-4)
