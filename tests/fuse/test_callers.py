"""Callers may write to what a forward returned: it is theirs where it is theirs in the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from swapped import swapped_and_host
from torch import Tensor, nn

from fastvit_kernels import status
from tests.fuse.kit import Kit, join, packed, seeded

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def written(kit: Kit, x: Tensor) -> Tensor:
    """Attention whose backward does not read its result."""
    q, k, v = packed(kit, x)
    return join((q @ k.mT).softmax(-1) @ v)


def heads_in_batch(kit: Kit, x: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in packed(kit, x))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)


def by_heads(kit: Kit, x: Tensor) -> Tensor:
    q, k, v = packed(kit, x)
    return (q @ k.mT + kit.table).softmax(-1) @ v


class Module(Kit):
    """torch's attention, whose rows are (T, B): a result of (B, T) is a copy of them."""

    def __init__(self, forward: Callable[..., Any]):
        super().__init__(forward)
        self.attn = nn.MultiheadAttention(32, 4, batch_first=True)


def normed_and_flat(kit: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y, _ = kit.attn(x, x, x, need_weights=False)
    return kit.n(y), y.flatten(1)


def flat_and_contiguous(kit: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y, _ = kit.attn(x, x, x, need_weights=False)
    return y.flatten(1), y.contiguous()


def step(model: nn.Module, write: Callable[[Tensor], Any]) -> list[Tensor]:
    """The results after the caller wrote to the last, and the gradients of a loss of them all."""
    out = model(seeded(2, 9, 32).double())
    results = list(out) if isinstance(out, tuple) else [out]
    write(results[-1])
    sum(y.square().sum() for y in results).backward()
    return [*results, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("write", [lambda y: y.add_(1.0), lambda y: y[:, 0].zero_()])
@pytest.mark.parametrize("forward", [written, heads_in_batch, by_heads, normed_and_flat])
def test_a_caller_writes_to_a_result(forward, write):
    torch.manual_seed(0)
    model, host = swapped_and_host(Module(forward).double())
    torch.testing.assert_close(step(model, write), step(host, write))
    assert status(model).share == 1.0


def test_copies_of_one_result_stay_apart():
    model, _ = swapped_and_host(Module(flat_and_contiguous).double())
    with torch.no_grad():
        first, second = model(seeded(2, 9, 32).double())
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
