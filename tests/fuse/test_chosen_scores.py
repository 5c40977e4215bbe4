"""Scores that a model chooses by a condition: -inf elsewhere is a mask, all else is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fuse.hosts import Host, check, table
from tests.fuse.kit import D, Kit, join, packed

INF = float("inf")


def of_scores(change: Any) -> Any:
    """Attention written out, its scores changed by (kit, scores, x)."""

    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = packed(kit, x)
        scores = q @ k.transpose(-2, -1) * D**-0.5
        return kit.o(join(change(kit, scores, x).softmax(-1) @ v))

    return forward


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
NOT_CHOSEN = {
    "a finite number": of_scores(lambda kit, s, x: torch.where(lower(s), s, -1e4)),
    "inf": of_scores(lambda kit, s, x: torch.where(lower(s), s, INF)),
    "another tensor": of_scores(lambda kit, s, x: torch.where(lower(s), s, s.mT)),
    "a tensor of zeros": of_scores(lambda kit, s, x: torch.where(lower(s), s, torch.zeros_like(s))),
    "the tensor read elsewhere": of_scores(
        lambda kit, s, x: (lambda f: torch.where(lower(s), s, f) + f)(torch.full_like(s, 1.0))
    ),
    "scores that broadcast": of_scores(
        lambda kit, s, x: torch.where(lower(s)[None, None], s[:, :, :1], -INF)
    ),
}


@pytest.mark.parametrize("host", table("where", CHOSEN), ids=lambda host: host.id)
def test_scores_chosen_by_where(host):
    result = check(Host(host.id, host.forward, needs_grad=False))
    assert result.share == 1.0, result.left


@pytest.mark.parametrize("host", table("where", NOT_CHOSEN), ids=lambda host: host.id)
def test_what_where_also_gives(host):
    result = check(host)
    assert not any("attention" in rule for rule in result.rules), result.rules
