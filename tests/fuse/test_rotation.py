"""Rotary embeddings as models write them: turned in the op of attention, or by an op of their own.

What only looks like one is in `looks_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuse.hosts import Host, check
from tests.fuse.kit import D, H, Kit, join, packed, rotate_half, rotate_pairs, sdpa, separate
from tests.fuse.looks_attention import by_complex, by_parts
from tests.fuse.looks_effects import AUTOCAST

B, T = 2, 9
FULL = (T, D)
Turn = Callable[..., Any]


def halves_by_slices(x: Tensor) -> Tensor:
    return torch.cat([x[..., x.shape[-1] // 2 :].neg(), x[..., : x.shape[-1] // 2]], dim=-1)


def halves_stacked(x: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.stack((-b, a), -2).flatten(-2)


def pairs_unbound(x: Tensor) -> Tensor:
    a, b = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([b * -1, a], dim=-1).reshape(x.shape)


def by(partner: Turn) -> Turn:
    return lambda x, cos, sin: x * cos + partner(x) * sin


halves, pairs = by(rotate_half), by(rotate_pairs)


def after_prefix(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((x[:, :, :2], halves(x[:, :, 2:], cos, sin)), 2).type_as(x)


def after_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    prefix, rest = x.split((2, T - 2), dim=2)
    return torch.cat([prefix, cos * rest + sin * rotate_pairs(rest)], dim=-2)


def by_columns(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    parts = [pairs(x[..., c], cos[..., c], sin[..., c]) for c in (slice(0, 2), slice(2, 4))]
    return torch.cat([*parts, x[..., 4:]], -1)


def by_tokens(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return halves(x.transpose(1, 2), cos, sin).transpose(1, 2)


def by_tokens_after_prefix(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    prefix, rest = x.transpose(1, 2).tensor_split((2,), 1)
    return torch.cat((prefix, halves(rest, cos, sin)), 1).transpose(1, 2)


def made_anew(x: Tensor, *tables: Tensor) -> Tensor:
    """Tables that queries and keys compute each, as V-JEPA 2 does."""
    omega = torch.arange(D // 2, dtype=x.dtype)
    omega /= D / 2.0
    angles = torch.arange(T).unsqueeze(-1) * (1.0 / 100**omega)
    cos, sin = (f().repeat(1, 1, 1, 2) for f in (angles.cos, angles.sin))
    return pairs(x, cos, sin)


def in_fp32(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return halves(x.float(), cos.float(), sin.float()).to(x.dtype)


def in_fp32_apart(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (x.float() * cos.float() + rotate_pairs(x).float() * sin.float()).type_as(x)


def turning(turn: Turn, heads: Turn = packed, norm: Turn = lambda kit, q, k: (q, k)) -> Turn:
    """Attention whose queries and keys `turn` turns by the tables of a module."""

    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = heads(kit, x)
        q, k = (turn(t, kit.tables[0], kit.tables[1]) for t in norm(kit, q, k))
        return kit.o(join(sdpa(q, k, v)))

    return forward


def with_tables(*size: int) -> Callable[[Kit], None]:
    def prepare(kit: Kit) -> None:
        kit.register_buffer("tables", torch.randn(2, *size, dtype=kit.ls.dtype))

    return prepare


def host(forward: Turn, *size: int, **how: Any) -> Host:
    return Host("turned", forward, prepare=with_tables(*(size or FULL)), **how)


NORMS = {
    "layer_norm": lambda kit, q, k: (kit.qn(q), kit.kn(k)),
    "rms_norm": lambda kit, q, k: tuple(
        F.rms_norm(t, (D,), w, 1e-6) for t, w in ((q, kit.qn.weight), (k, kit.kn.weight))
    ),
    "scaled": lambda kit, q, k: (q * 0.5, k),
}
SPELLINGS: dict[str, tuple[Turn, tuple[int, ...]]] = {
    "halves": (turning(halves), FULL),
    "halves by slices": (turning(by(halves_by_slices)), FULL),
    "halves stacked": (turning(by(halves_stacked)), FULL),
    "pairs": (turning(pairs), FULL),
    "pairs unbound": (turning(by(pairs_unbound)), FULL),
    "by parts in halves": (turning(by_parts(False)), (T, D // 2)),
    "by parts in pairs": (turning(by_parts(True)), (T, D // 2)),
    "complex": (turning(by_complex), (T, D // 2)),
    "three linears": (turning(halves, separate), FULL),
    "prefix": (turning(after_prefix), (T - 2, D)),
    "prefix by split": (turning(after_split), (T - 2, D)),
    "columns": (turning(by_columns), (T, 4)),
    "tables made anew": (turning(made_anew), FULL),
    "table (1, T, D)": (turning(halves), (1, T, D)),
    "table (H, T, D)": (turning(halves), (H, T, D)),
    "table (B, 1, T, D)": (turning(halves), (B, 1, T, D)),
    "table (B, H, T, D)": (turning(halves), (B, H, T, D)),
    "by tokens, table (T, 1, D)": (turning(by_tokens), (T, 1, D)),
    "by tokens, table (B, T, 1, D)": (turning(by_tokens), (B, T, 1, D)),
    "by tokens, table (T, H, D)": (turning(by_tokens), (T, H, D)),
    "by tokens, prefix": (turning(by_tokens_after_prefix), (T - 2, 1, D)),
    **{name: (turning(halves, norm=norm), FULL) for name, norm in NORMS.items()},
    "norm and prefix": (turning(after_prefix, norm=NORMS["layer_norm"]), (T - 2, D)),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_rotation_goes_into_the_attention(name):
    forward, size = SPELLINGS[name]
    result = check(host(forward, *size))
    assert result.rules["rope_attention"] == 1 and result.share == 1.0, result.left


@pytest.mark.parametrize("turn", [halves, in_fp32, in_fp32_apart])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_goes_into_the_attention_in_fp32_and_bf16(turn, dtype):
    assert check(host(turning(turn), dtype=dtype)).rules["rope_attention"] == 1


def test_tables_that_learn_get_their_gradients():
    def learned(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = packed(kit, x)
        q, k = (pairs(t, kit.angles.cos(), kit.angles.sin()) for t in (q, k))
        return kit.o(join(sdpa(q, k, v)))

    def prepare(kit: Kit) -> None:
        kit.angles = nn.Parameter(torch.randn(H, T, D, dtype=kit.ls.dtype))

    assert check(Host("learned", learned, prepare=prepare)).rules["rope_attention"] == 1


def shifted(kit: Kit, x: Tensor) -> tuple[Tensor, ...]:
    q, k, v = packed(kit, x)
    return q + 1, k, v


def masked(kit: Kit, x: Tensor) -> Tensor:
    q, k, v = packed(kit, x)
    q, k = (halves(t, kit.tables[0], kit.tables[1]) for t in (q, k))
    return kit.o(join(sdpa(q, k, v, attn_mask=kit.table)))


def norms(how: Turn) -> Turn:
    return turning(halves, norm=how)


BY_ITSELF = {
    "heads of no one projection": turning(halves, shifted),
    "a mask": masked,
    "a norm of queries alone": norms(lambda kit, q, k: (kit.qn(q), k)),
    "norms of two kinds": norms(lambda kit, q, k: (kit.qn(q), F.rms_norm(k, (D,), eps=1e-5))),
    "another eps": norms(lambda kit, q, k: (kit.qn(q), F.layer_norm(k, (D,), eps=1e-2))),
}


@pytest.mark.parametrize("name", BY_ITSELF)
def test_a_rotation_turns_by_an_op_of_its_own(name):
    rules = check(host(BY_ITSELF[name])).rules
    assert rules["rope"] == 1 and "rope_attention" not in rules


def wide(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return halves(x, cos.double(), sin.double()).to(x.dtype)


def test_tables_in_float64_turn_fp32_heads_as_the_host_does():
    rules = check(host(turning(wide), dtype=torch.float32)).rules
    assert "rope_attention" not in rules and "rope" not in rules


def regions_of_their_own(kit: Kit, x: Tensor) -> Tensor:
    q, k, v = packed(kit, x)
    with torch.autocast("cpu", enabled=False):
        q = halves(q.float(), kit.tables[0], kit.tables[1])
    k = halves(k, kit.tables[0], kit.tables[1])
    return kit.o(join(sdpa(q, k.to(q.dtype), v.to(q.dtype))))


@pytest.mark.parametrize(
    ("forward", "count"), [(turning(halves), 1), (regions_of_their_own, 0)], ids=["around", "apart"]
)
def test_autocast(forward, count):
    assert check(host(forward, **AUTOCAST)).rules["rope_attention"] == count
