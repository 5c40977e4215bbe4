"""Rotary embeddings in a rewritten graph: what turns by our op, and look-alikes that do not."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch import nn

from fastvit_kernels.fuse.backend import fastvit_kernels
from fastvit_kernels.fuse.report import reports_of

B, H, T, D, C = 2, 4, 6, 16, 64
ONE_OP = "rope_attention"  # with the projection


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    dynamo.reset()
    yield
    dynamo.reset()


def halves(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def halves_by_slices(x):
    return torch.cat([x[..., x.shape[-1] // 2 :].neg(), x[..., : x.shape[-1] // 2]], dim=-1)


def halves_stacked(x):
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.stack((-b, a), -2).flatten(-2)


def pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def pairs_unbound(x):
    a, b = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([b * -1, a], dim=-1).reshape(x.shape)


def turn(x, cos, sin, partner=halves):
    return x * cos + partner(x) * sin


class Host(nn.Module):
    """Attention whose queries and keys a function turns."""

    def __init__(self, turned, packed=True, tables=(T, D), dtype=torch.float64, norm=None):
        super().__init__()
        torch.manual_seed(0)
        self.turned = turned
        self.qkv = nn.Linear(C, 3 * H * D) if packed else None
        self.parts = nn.ModuleList([] if packed else [nn.Linear(C, H * D) for _ in range(3)])
        self.proj = nn.Linear(H * D, C)
        self.q_norm, self.k_norm = (norm or nn.Identity)(), (norm or nn.Identity)()
        self.to(torch.float64)
        for m in (self.q_norm, self.k_norm):
            for p in m.parameters():
                nn.init.normal_(p)
        for name in ("cos", "sin", "cos2", "sin2"):
            self.register_buffer(name, torch.randn(tables, dtype=torch.float64))
        self.to(dtype)

    def heads(self, x):
        """(3, B, T, H, D), unbound."""
        if self.qkv is not None:
            return self.qkv(x).unflatten(-1, (3, H, D)).unbind(2)
        return (part(x).view(B, T, H, D) for part in self.parts)

    def forward(self, x):
        q, k, v = (t.transpose(1, 2) for t in self.heads(x))
        q, k = self.turned(self, self.q_norm(q), self.k_norm(k))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def rules_of(model, dtype=torch.float64, x=None, tolerance=1e-12, backward=True):
    """Which rules fired; outputs and all gradients are the host's."""
    host, results = copy.deepcopy(model), []
    compiled = torch.compile(model, backend=fastvit_kernels, options={"compiler": "eager"})
    for run, owner in ((compiled, model), (host, host)):
        torch.manual_seed(1)
        given = torch.randn(B, T, C, dtype=dtype, requires_grad=True) if x is None else x
        y = run(given)
        if backward:
            y.to(torch.promote_types(y.dtype, torch.float32)).square().sum().backward()
        grads = [p.grad for p in owner.parameters()]
        results.append([y.detach(), *([given.grad] if x is None else []), *grads])
    for actual, wanted in zip(*results, strict=True):
        if wanted is None:
            assert actual is None
            continue
        scale = wanted.double().abs().max().clamp_min(1)
        assert ((actual.double() - wanted.double()).abs().max() / scale).item() <= tolerance
    (report,) = reports_of(model)
    assert report.declined is None
    return report.rules


def both(s, q, k, partner=halves):
    return turn(q, s.cos, s.sin, partner), turn(k, s.cos, s.sin, partner)


def after_prefix(s, q, k, n=2, cat=torch.cat):
    def one(x):
        return cat((x[:, :, :n], turn(x[:, :, n:], s.cos, s.sin)), 2).type_as(x)

    return one(q), one(k)


def by_split(s, q, k):
    def one(x):
        prefix, rest = x.split((2, T - 2), dim=2)
        return torch.cat([prefix, s.cos * rest + s.sin * pairs(rest)], dim=-2)

    return one(q), one(k)


def by_columns(s, q, k):
    def one(x):
        parts = [
            turn(x[..., i : i + 4], s.cos[..., i : i + 4], s.sin[..., i : i + 4], pairs)
            for i in (0, 4)
        ]
        return torch.cat([*parts, x[..., 8:]], -1)

    return one(q), one(k)


def some_columns(s, q, k):
    def one(x):
        return torch.cat((turn(x[..., :8], s.cos, s.sin), x[..., 8:]), -1)

    return one(q), one(k)


def joined_tables(s, q, k):
    def one(x):
        sin, cos = s.cos.chunk(2, -1)
        return x * cos + pairs(x) * sin

    return one(q), one(k)


def made_anew(s, q, k):
    """Tables that queries and keys compute each, as V-JEPA 2 does."""

    def one(x):
        omega = torch.arange(D // 2, dtype=x.dtype)
        omega /= D / 2.0
        angles = torch.arange(T).unsqueeze(-1) * (1.0 / 100**omega)
        cos, sin = (f().repeat(1, 1, 1, 2) for f in (angles.cos, angles.sin))
        return x * cos + pairs(x) * sin

    return one(q), one(k)


def in_fp32(s, q, k):
    def one(x):
        return turn(x.float(), s.cos.float(), s.sin.float()).to(x.dtype)

    return one(q), one(k)


def in_fp32_apart(s, q, k):
    def one(x):
        return (x.float() * s.cos.float() + pairs(x).float() * s.sin.float()).type_as(x)

    return one(q), one(k)


def scaled(s, q, k):
    q, k = both(s, q * 0.5, k)
    return q * 0.25, k


def by_tokens(s, q, k):
    q, k = (turn(t.transpose(1, 2), s.cos, s.sin).transpose(1, 2) for t in (q, k))
    return q, k


def prefix_by_tokens(dim):
    """After two tokens, or where dim is that of heads after two heads."""

    def one(s, x):
        x = x.transpose(1, 2)
        prefix, rest = x.tensor_split((2,), dim)
        return torch.cat((prefix, turn(rest, s.cos, s.sin)), dim).transpose(1, 2)

    return lambda s, q, k: (one(s, q), one(s, k))


def split_pairs(x, interleaved):
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)


def by_parts(interleaved, sign=1):
    def one(s, x):
        a, b = split_pairs(x, interleaved)
        parts = (a * s.cos - b * s.sin, a * s.sin + s.cos * b)
        if sign < 0:
            parts = (a * s.cos + b * s.sin, b * s.cos - a * s.sin)
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

    return lambda s, q, k: (one(s, q), one(s, k))


def by_complex(x, z):
    y = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(y * z).flatten(3).type_as(x)


def complex_table(s, q, k):
    z = torch.polar(s.cos.abs(), s.sin)
    return by_complex(q, z), by_complex(k, z)


def complex_table_of_their_own(s, q, k):
    return by_complex(q, torch.polar(s.cos, s.sin)), by_complex(k, torch.polar(s.cos, -s.sin))


SPELLINGS = {
    "halves": (both, {}),
    "halves by slices": (lambda s, q, k: both(s, q, k, halves_by_slices), {}),
    "halves stacked": (lambda s, q, k: both(s, q, k, halves_stacked), {}),
    "pairs": (lambda s, q, k: both(s, q, k, pairs), {}),
    "pairs unbound": (lambda s, q, k: both(s, q, k, pairs_unbound), {}),
    "by parts in halves": (by_parts(False), dict(tables=(T, D // 2))),
    "by parts in pairs": (by_parts(True), dict(tables=(T, D // 2))),
    "complex": (complex_table, dict(tables=(T, D // 2))),
    "three linears": (both, dict(packed=False)),
    "prefix": (after_prefix, dict(tables=(T - 2, D))),
    "prefix by split": (by_split, dict(tables=(T - 2, D))),
    "columns": (by_columns, dict(tables=(T, 8))),
    "some columns": (some_columns, dict(tables=(T, 8))),
    "sin and cos joined": (joined_tables, dict(tables=(T, 2 * D))),
    "tables made anew": (made_anew, {}),
    "table (1, T, D)": (both, dict(tables=(1, T, D))),
    "table (H, T, D)": (both, dict(tables=(H, T, D))),
    "table (B, 1, T, D)": (both, dict(tables=(B, 1, T, D))),
    "table (1, 1, T, D)": (both, dict(tables=(1, 1, T, D))),
    "table (B, H, T, D)": (both, dict(tables=(B, H, T, D))),
    "by tokens, table (T, 1, D)": (by_tokens, dict(tables=(T, 1, D))),
    "by tokens, table (B, T, 1, D)": (by_tokens, dict(tables=(B, T, 1, D))),
    "by tokens, table (T, H, D)": (by_tokens, dict(tables=(T, H, D))),
    "by tokens, prefix": (prefix_by_tokens(1), dict(tables=(T - 2, 1, D))),
    "scaled": (scaled, {}),
    "layer_norm": (both, dict(norm=lambda: nn.LayerNorm(D))),
    "rms_norm": (both, dict(norm=lambda: nn.RMSNorm(D, eps=1e-6))),
    "norm and prefix": (after_prefix, dict(tables=(T - 2, D), norm=lambda: nn.LayerNorm(D))),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_rotation_goes_into_the_attention(name):
    turned, settings = SPELLINGS[name]
    rules = rules_of(Host(turned, **settings))
    assert rules[ONE_OP] == 1 and "attention" not in rules


@pytest.mark.parametrize("turned", [both, in_fp32, in_fp32_apart])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotation_goes_into_the_attention_in_fp32_and_bf16(turned, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    assert rules_of(Host(turned, dtype=dtype), dtype, tolerance=tolerance)[ONE_OP] == 1


def test_tables_that_learn_get_their_gradients():
    def learned(s, q, k):
        cos, sin = s.angles.cos(), s.angles.sin()
        return turn(q, cos, sin, pairs), turn(k, cos, sin, pairs)

    host = Host(learned)
    host.angles = nn.Parameter(torch.randn(H, T, D, dtype=torch.float64))
    assert rules_of(host)[ONE_OP] == 1


def test_heads_of_no_one_projection_turn_by_an_op_of_their_own():
    class Apart(Host):
        def heads(self, x):
            q, k, v = super().heads(x)
            return q + 1, k, v

    rules = rules_of(Apart(both))
    assert rules["rope"] == 1 and ONE_OP not in rules


def test_a_mask_stays_beside_the_rotation():
    class Masked(Host):
        def forward(self, x):
            q, k, v = (t.transpose(1, 2) for t in self.heads(x))
            q, k = self.turned(self, q, k)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.cos2)
            return self.proj(y.transpose(1, 2).flatten(2))

    host = Masked(both)
    host.cos2 = torch.randn(T, T, dtype=torch.float64)
    rules = rules_of(host)
    assert rules["rope"] == 1 and ONE_OP not in rules


# Look-alikes: attention by itself, the rotation as the host wrote it.


def other_partner(partner):
    return lambda s, q, k: both(s, q, k, partner)


def of_one_table(pair):
    """Queries and keys by tables of a host."""
    return lambda s, q, k: (turn(q, *pair(s)[0]), turn(k, *pair(s)[1]))


def other_prefix(s, q, k):
    def one(x, y):
        return torch.cat((y[:, :, :2], turn(x[:, :, 2:], s.cos, s.sin)), 2)

    return one(q, k), one(k, q)


def prefix_elsewhere(s, q, k):
    def one(x):
        return torch.cat((x[:, :, 1:3], turn(x[:, :, 2:], s.cos, s.sin)), 2)

    return one(q), one(k)


def prefix_of_heads(s, q, k):
    def one(x):
        return torch.cat((x[:, :2], turn(x[:, 2:], s.cos, s.sin)), 1)

    return one(q), one(k)


def prefix_at_the_end(s, q, k):
    def one(x):
        return torch.cat((turn(x[:, :, 2:], s.cos, s.sin), x[:, :, :2]), 2)

    return one(q), one(k)


def columns_in_halves(s, q, k):
    def one(x):
        parts = [turn(t, s.cos, s.sin) for t in x.chunk(2, -1)]
        return torch.cat(parts, -1)

    return one(q), one(k)


def columns_exchanged(s, q, k):
    def one(x):
        parts = [turn(t, s.cos, s.sin, pairs) for t in x.chunk(2, -1)]
        return torch.cat(parts[::-1], -1)

    return one(q), one(k)


def written_between(s, q, k):
    shown = q.view(q.shape)
    first = shown * s.cos
    q.mul_(2)
    return first + halves(shown) * s.sin, turn(k, s.cos, s.sin)


def made_of_a_written_table(s, q, k):
    base = s.cos.clone()
    shown = base.view(T, D)
    q = turn(q, shown.cos(), s.sin)
    base.add_(1)
    return q, turn(k, shown.cos(), s.sin)


def drawn_tables(s, q, k):
    return turn(q, torch.rand_like(s.cos), s.sin), turn(k, torch.rand_like(s.cos), s.sin)


def without_gradient(s, q, k):
    with torch.no_grad():
        q = turn(q, s.cos, s.sin)
    return q, turn(k, s.cos, s.sin)


def detached_partner(s, q, k):
    q, k = (t * s.cos + halves(t.detach()) * s.sin for t in (q, k))
    return q, k


def read_twice(s, q, k):
    q, k = both(s, q, k)
    s.seen = q.detach().sum()
    return q + 0 * s.seen, k


def parts_by_several(s, q, k):
    def one(x):
        a, b = x.chunk(2, -1)
        return torch.cat((a * s.cos - b * s.sin, b * s.cos2 + a * s.sin), -1)

    return one(q), one(k)


LOOK_ALIKES = {
    "other sign": (other_partner(lambda x: -halves(x)), {}),
    "no sign": (other_partner(lambda x: torch.cat(x.chunk(2, -1)[::-1], -1)), {}),
    "both signs": (other_partner(lambda x: torch.cat([-t for t in x.chunk(2, -1)[::-1]], -1)), {}),
    "not exchanged": (other_partner(lambda x: torch.cat((-x[..., :8], x[..., 8:]), -1)), {}),
    "sign in pairs": (
        other_partner(lambda x: torch.stack((x[..., 1::2], -x[..., ::2]), -1).flatten(-2)),
        {},
    ),
    "pairs into halves": (other_partner(lambda x: torch.cat((-x[..., 1::2], x[..., ::2]), -1)), {}),
    "halves into pairs": (
        other_partner(lambda x: torch.stack((-x[..., 8:], x[..., :8]), -1).flatten(-2)),
        {},
    ),
    "flipped": (other_partner(lambda x: x.flip(-1)), {}),
    "partner of another tensor": (
        lambda s, q, k: (q * s.cos + halves(k) * s.sin, turn(k, s.cos, s.sin)),
        {},
    ),
    "partner of another head": (other_partner(lambda x: halves(x.roll(1, 1))), {}),
    "a difference": (lambda s, q, k: tuple(t * s.cos - halves(t) * s.sin for t in (q, k)), {}),
    "other tables": (of_one_table(lambda s: ((s.cos, s.sin), (s.cos2, s.sin2))), {}),
    "other sines": (of_one_table(lambda s: ((s.cos, s.sin), (s.cos, s.sin2))), {}),
    "swapped for keys": (of_one_table(lambda s: ((s.cos, s.sin), (s.sin, s.cos))), {}),
    "shifted for keys": (
        of_one_table(lambda s: ((s.cos[1:], s.sin[1:]), (s.cos[:-1], s.sin[:-1]))),
        dict(tables=(T + 1, D)),
    ),
    "reversed for keys": (
        of_one_table(lambda s: ((s.cos, s.sin), (s.cos.flip(0), s.sin.flip(0)))),
        {},
    ),
    "drawn": (drawn_tables, {}),
    "one column": (both, dict(tables=(T, 1))),
    "one row": (both, dict(tables=(1, D))),
    "by tokens, table by head (H, D)": (by_tokens, dict(tables=(H, D))),
    "parts of another sign": (by_parts(False, -1), dict(tables=(T, D // 2))),
    "complex tables of their own": (complex_table_of_their_own, dict(tables=(T, D // 2))),
    "parts by several tables": (parts_by_several, dict(tables=(T, D // 2))),
    "queries alone": (lambda s, q, k: (turn(q, s.cos, s.sin), k), {}),
    "pairs for keys": (lambda s, q, k: (turn(q, s.cos, s.sin), turn(k, s.cos, s.sin, pairs)), {}),
    "prefix of keys": (other_prefix, dict(tables=(T - 2, D))),
    "prefix elsewhere": (prefix_elsewhere, dict(tables=(T - 2, D))),
    "prefix of heads": (prefix_of_heads, {}),
    "prefix of heads by tokens": (prefix_by_tokens(2), dict(tables=(T, 1, D))),
    "prefix at the end": (prefix_at_the_end, dict(tables=(T - 2, D))),
    "columns in halves": (columns_in_halves, dict(tables=(T, D // 2))),
    "columns exchanged": (columns_exchanged, dict(tables=(T, D // 2))),
    "written between": (written_between, dict(packed=False)),
    "made of a written table": (made_of_a_written_table, {}),
    "without gradient": (without_gradient, {}),
    "detached partner": (detached_partner, {}),
    "read twice": (read_twice, {}),
    "norm after it": (lambda s, q, k: tuple(F.layer_norm(t, (D,)) for t in both(s, q, k)), {}),
    "product for sum": (lambda s, q, k: tuple(t * s.cos * (halves(t) * s.sin) for t in (q, k)), {}),
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_does_not_go_into_the_attention(name):
    turned, settings = LOOK_ALIKES[name]
    rules = rules_of(Host(lambda *a: turned(*a), **settings))
    assert ONE_OP not in rules
    assert "rope" not in rules


NORMS = {
    "norm of queries alone": (lambda s, q, k: both(s, F.layer_norm(q, (D,)), k), {}),
    "norms of two kinds": (
        lambda s, q, k: both(s, F.layer_norm(q, (D,)), F.rms_norm(k, (D,), eps=1e-5)),
        {},
    ),
    "another eps": (
        lambda s, q, k: both(s, F.layer_norm(q, (D,)), F.layer_norm(k, (D,), eps=1e-2)),
        {},
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_that_differ_stay_before_the_rotation(name):
    rules = rules_of(Host(NORMS[name][0]))
    assert rules["rope"] == 1 and ONE_OP not in rules


def test_a_table_that_changes_between_queries_and_keys_declines():
    def written_between(s, q, k):
        cos = s.cos.clone()
        shown = cos.view(T, D)
        q = turn(q, shown, s.sin)
        cos.add_(1)
        return q, turn(k, shown, s.sin)

    host = Host(written_between).requires_grad_(False)
    x = torch.randn(B, T, C, dtype=torch.float64)
    rules = rules_of(host, x=x, backward=False)
    assert ONE_OP not in rules and "rope" not in rules


def test_tables_in_float64_turn_fp32_heads_as_the_host_does():
    def wide(s, q, k):
        return tuple(turn(t, s.cos.double(), s.sin.double()).to(t.dtype) for t in (q, k))

    rules = rules_of(Host(wide, dtype=torch.float32), torch.float32, tolerance=1e-5)
    assert ONE_OP not in rules and "rope" not in rules


def test_autocast_regions_of_their_own_decline():
    def apart(s, q, k):
        with torch.autocast("cpu", enabled=False):
            q = turn(q.float(), s.cos, s.sin)
        return q, turn(k, s.cos, s.sin)

    host = Host(apart, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rules = rules_of(host, torch.float32, tolerance=5e-2)
    assert ONE_OP not in rules and "rope" not in rules


def test_autocast_around_the_rotation():
    host = Host(both, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rules_of(host, torch.float32, tolerance=5e-2)[ONE_OP] == 1
