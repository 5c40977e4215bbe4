"""Hosts that look like attention: layouts, operands, scales, masks, rotations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.fuse.changes import Reversed
from tests.fuse.hosts import Host, table
from tests.fuse.kit import (
    D,
    H,
    Kit,
    join,
    of_packed,
    packed,
    rotate_half,
    rotate_pairs,
    sdpa,
    seeded,
    separate,
    softmax_attention,
    split,
    square,
    tokens,
)

INF = math.inf


def layouts() -> Iterator[Host]:
    """Every way to take q, k and v out of one product where B = T = H = D."""
    for axes in ((3, 8, 8), (8, 3, 8), (8, 8, 3)):
        three = 2 + axes.index(3)
        for order in itertools.permutations(i for i in range(5) if i != three):
            yield layout(axes, three, order)


def layout(axes: tuple[int, ...], three: int, order: tuple[int, ...]) -> Host:
    def forward(kit: Kit, x: Tensor) -> Tensor:
        w = torch.cat((kit.qkv.weight, kit.both.weight[:96] * 0.5), 0)
        y = F.linear(x, torch.cat((w, w.flip(1)), 1)).view(8, 8, *axes)
        q, k, v = y.permute(three, *order).unbind(0)
        return kit_join(sdpa(q, k, v))

    def kit_join(o: Tensor) -> Tensor:
        return o.transpose(1, 2).reshape(8, 8, 64)

    return Host(f"layout - {axes} by {(three, *order)}", forward, lambda: (seeded(8, 8, 64),))


ORDERS = {
    f"packed as {''.join('qkv'[i] for i in order)}": (
        lambda kit, x, order=order: join(sdpa(*[packed(kit, x)[i] for i in order]))
    )
    for order in itertools.product(range(3), repeat=3)
}


def by(q: Callable[..., Any], k: Callable[..., Any], v: Callable[..., Any], **how: Any) -> Any:
    """Attention after something is done to each operand."""

    def forward(kit: Kit, x: Tensor) -> Tensor:
        operands = zip((q, k, v), packed(kit, x), strict=True)
        return kit.o(join(sdpa(*[change(kit, t) for change, t in operands], **how)))

    return forward


def same(kit: Kit, t: Tensor) -> Tensor:
    return t


def times(s: Any) -> Callable[..., Tensor]:
    return lambda kit, t: t * s


OPERANDS = {
    "as it is": by(same, same, same),
    "q scaled": by(times(0.3), same, same),
    "q and k scaled": by(times(0.3), times(2.0), same, scale=0.7),
    "v scaled": by(same, same, times(2.0)),
    "q scaled by 0": by(times(0.0), same, same),
    "q scaled by inf": by(times(INF), same, same),
    "q scaled by a tensor": by(lambda kit, t: t * kit.per_head, same, same),
    "q plus a bias": by(lambda kit, t: t + kit.ls[:D], same, same),
    "q, k, v shifted": by(*[lambda kit, t: t.roll(1, 2)] * 3),
    "q over sqrt": by(lambda kit, t: t / math.sqrt(D), same, same, scale=1.0),
    "one head for all": by(same, lambda kit, t: t[:, :1].expand_as(t), same),
    "first keys alone": by(same, lambda kit, t: t[:, :, :2], lambda kit, t: t[:, :, :2]),
    "first queries alone": by(lambda kit, t: t[:, :, :1], same, same),
    "narrow values": by(same, same, lambda kit, t: torch.cat((t[..., :4], t[..., :4]), -1)),
    "half of the head": by(*[lambda kit, t: t[..., :4]] * 2, same),
    "normed v": by(same, same, lambda kit, t: kit.qn(t)),
    "l2 normed": by(*[lambda kit, t: F.normalize(t, dim=-1)] * 2, same),
    "negative scale": by(same, same, same, scale=-0.3),
    "scale of 0": by(same, same, same, scale=0.0),
    "scale of nan": by(same, same, same, scale=math.nan),
    "tiny scale": by(same, same, same, scale=1e-300),
    "dropout": by(same, same, same, dropout_p=0.3),
    "dropout of more": by(same, same, same, dropout_p=1.5),
    "gqa": by(same, lambda kit, t: t[:, :2], lambda kit, t: t[:, :2], enable_gqa=True),
    "gqa uneven": by(same, lambda kit, t: t[:, :3], lambda kit, t: t[:, :3], enable_gqa=True),
    "broadcast heads": by(same, lambda kit, t: t[:, :1], lambda kit, t: t[:, :1]),
}


def baddbmm(beta: float, alpha: float) -> Callable[..., Tensor]:
    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = (t.flatten(0, 1) for t in separate(kit, x))
        bias = kit.table[:, : x.shape[1], : x.shape[1]].repeat(x.shape[0], 1, 1)
        w = torch.baddbmm(bias, q, k.transpose(1, 2), beta=beta, alpha=alpha).softmax(-1)
        return torch.bmm(w, v)

    return forward


def kinds_of(kit: Kit, x: Tensor, other: Tensor) -> Tensor:
    return join(sdpa(split(kit.q(x)), split(kit.k(other)), split(kit.v(x))))


def seen_without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.view_as(x)


def copy_with_view_written(x: Tensor) -> Tensor:
    copy = x.clone()
    copy.view(-1).mul_(2)
    return copy


def written_between(
    kit: Kit, h: Tensor, part: Callable[[Tensor], Tensor] = lambda t: t.flatten()
) -> Tensor:
    """Under no_grad, since autograd would see it."""
    with torch.no_grad():
        seen = part(h)
        q = split(kit.q(h))
        seen.mul_(2)
        return join(sdpa(q, split(kit.k(h)), split(kit.v(h))))


def two_uses(kit: Kit, x: Tensor) -> Tensor:
    q, k, v = separate(kit, x)
    return join(sdpa(q, k, v)) + join(q) + kit.o(x)


def heads_in_batch_written(kit: Kit, x: Tensor) -> Tensor:
    """(B H, T, D), whose result is written to."""
    q, k, v = (t.flatten(0, 1) for t in packed(kit, x))
    y = torch.bmm(torch.bmm(q, k.mT).softmax(-1), v)
    y[:, 0] = 0.0
    return y * 2


STRUCTURES = {
    "heads in the batch, written": heads_in_batch_written,
    "k of x turned": lambda kit, x: kinds_of(kit, x, x.transpose(0, 1)),
    "over heads": lambda kit, x: sdpa(
        *[layer(x).view(*x.shape[:2], H, D) for layer in (kit.q, kit.k, kit.v)]
    ),
    "view without transpose": lambda kit, x: sdpa(
        *[layer(x).view(-1, H, x.shape[1], D) for layer in (kit.q, kit.k, kit.v)]
    ),
    "over the batch": lambda kit, x: join(
        sdpa(*kit.qkv(x).view(*x.shape[:2], 3, H, D).permute(2, 1, 3, 0, 4).unbind(0))
    ),
    "D before H": lambda kit, x: join(
        sdpa(*kit.qkv(x).view(*x.shape[:2], 3, D, H).permute(2, 0, 4, 1, 3).unbind(0))
    ),
    "H 3 D": lambda kit, x: join(
        sdpa(*kit.qkv(x).view(*x.shape[:2], H, 3, D).permute(3, 0, 2, 1, 4).unbind(0))
    ),
    "chunks of four": lambda kit, x: join(sdpa(*map(split, kit.both(x).split(32, -1)[:3]))),
    "extra columns first": lambda kit, x: join(
        sdpa(*map(split, kit.both(x)[..., 32:].chunk(3, -1)))
    ),
    "rows of other order": lambda kit, x: join(
        sdpa(*map(split, F.linear(x, kit.qkv.weight.flip(0), kit.qkv.bias).chunk(3, -1)))
    ),
    "a computed weight": lambda kit, x: join(
        sdpa(*map(split, F.linear(x, kit.qkv.weight * 2, kit.qkv.bias + 1).chunk(3, -1)))
    ),
    "k is v": lambda kit, x: join(sdpa(split(kit.q(x)), split(kit.k(x)), split(kit.k(x)))),
    "v before k in one product": lambda kit, x: join(
        sdpa(split(kit.q(x)), *map(split, kit.fc1(x).chunk(2, -1)[::-1]))
    ),
    "one product for q and k": lambda kit, x: join(
        sdpa(*map(split, kit.fc1(x).chunk(2, -1)), split(kit.v(x)))
    ),
    "q of a constant": lambda kit, x: join(
        sdpa(split(kit.q(kit.cls.expand_as(x))), *separate(kit, x)[1:])
    ),
    "k of x detached": lambda kit, x: kinds_of(kit, x, x.detach()),
    "k of x, reversed": lambda kit, x: kinds_of(kit, x, Reversed.apply(x)),
    "k of x seen under no_grad": lambda kit, x: kinds_of(kit, x, seen_without_grad(x)),
    "k of x by as_strided": lambda kit, x: kinds_of(kit, x, x.as_strided(x.shape, x.stride())),
    "k of x in bits": lambda kit, x: kinds_of(kit, x, x.view(torch.int64).view(x.dtype)),
    "k of a clone": lambda kit, x: kinds_of(kit, x, x.clone()),
    "k of a copy whose view is written to": lambda kit, x: kinds_of(
        kit, x, copy_with_view_written(x)
    ),
    "k of a view": lambda kit, x: kinds_of(kit, x, x.flatten(0, 1).view(x.shape)),
    "x written before k": lambda kit, x: (
        lambda q: join(sdpa(q, split(kit.k(x.mul_(2))), split(kit.v(x))))
    )(split(kit.q(x))),
    "a norm written between by a view": lambda kit, x: written_between(kit, kit.n(x)),
    "a sum written between by a view": lambda kit, x: written_between(kit, x + kit.o(x)),
    "a norm written between": lambda kit, x: written_between(kit, kit.rms(x), lambda t: t),
    "heads of a product, written to": lambda kit, x: softmax_attention(*packed(kit, x)).mul_(2),
    "q read twice": two_uses,
    "three axes, sdpa": lambda kit, x: sdpa(*[t.flatten(0, 1) for t in separate(kit, x)]),
    "two axes, sdpa": lambda kit, x: sdpa(kit.q(x)[0], kit.k(x)[0], kit.v(x)[0]),
    "one head": lambda kit, x: sdpa(kit.q(x), kit.k(x), kit.v(x)),
    "five axes": lambda kit, x: sdpa(*[t.unsqueeze(1) for t in separate(kit, x)]),
    "baddbmm": baddbmm(1, D**-0.5),
    "baddbmm of beta 0": baddbmm(0, D**-0.5),
    "baddbmm of beta 2": baddbmm(2, 1),
    "joined by head": lambda kit, x: sdpa(*separate(kit, x)).reshape(x.shape),
    "joined the other way": lambda kit, x: (
        sdpa(*separate(kit, x)).permute(0, 2, 3, 1).reshape(x.shape)
    ),
    "not joined": lambda kit, x: sdpa(*separate(kit, x)),
    "joined and not": lambda kit, x: (lambda o: (o, join(o)))(sdpa(*separate(kit, x))),
    "transposed alone": lambda kit, x: sdpa(*separate(kit, x)).transpose(1, 2),
    "written to after": lambda kit, x: sdpa(*separate(kit, x)).transpose(1, 2).flatten(2).mul_(2),
    "gate of heads": lambda kit, x: join(sdpa(*separate(kit, x)) * kit.per_head),
    "unbatched": lambda kit, x: F.linear(
        sdpa(*kit.qkv(x[0]).view(-1, 3, H, D).permute(1, 2, 0, 3).unbind(0))
        .transpose(0, 1)
        .flatten(1),
        kit.o.weight,
    ),
}


# Written out ----------------------------------------------------------------------------------


def scores_of(how: Callable[..., Tensor]) -> Any:
    """softmax and product with the values of what `how` makes of (kit, scores, x)."""

    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = packed(kit, x)
        return kit.o(join(how(kit, q @ k.transpose(-2, -1), x) @ v))

    return forward


def softmax_of(change: Callable[..., Tensor]) -> Any:
    """The softmax of scores that `change` makes of (kit, scores, x)."""
    return scores_of(lambda kit, s, x: change(kit, s, x).softmax(-1))


def of_scores(change: Callable[..., Tensor]) -> Any:
    """As `softmax_of`, of scores that are scaled before."""
    return softmax_of(lambda kit, s, x: change(kit, s * D**-0.5, x))


def weights_of(how: Callable[..., Tensor]) -> Any:
    return scores_of(lambda kit, s, x: how(kit, (s * D**-0.5).softmax(-1)))


def masked_by(make: Callable[..., Any]) -> Any:
    return of_scores(lambda kit, s, x: s + make(kit, s))


def written_behind(kit: Kit, x: Tensor) -> Tensor:
    """A product of matrices keeps copies of strided values, so that autograd allows this."""
    q, k, v = separate(kit, x)
    o = join((q @ k.transpose(-2, -1)).softmax(-1) @ v)
    v.detach().mul_(2.0)
    return kit.o(o)


def einsums(scores: str, joined: str) -> Callable[..., Tensor]:
    """Of operands whose axes are of one size."""

    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = kit.qkv(x).view(4, 4, 3, H, D).unbind(2)
        return torch.einsum(joined, torch.einsum(scores, q, k).softmax(-1), v)

    return forward


EINSUMS = [
    ("bqhd,bkhd->bhkq", "bhqk,bkhd->bqhd"),  # a softmax over queries
    ("bqhd,bkhd->bhqk", "bhkq,bkhd->bqhd"),  # weights turned
    ("bqhd,bkhd->bqk", "bqk,bkhd->bqhd"),  # scores summed over heads
    ("bqhd,bkgd->bhqk", "bhqk,bkhd->bqhd"),  # keys summed over heads
    ("bqhd,bkhd->bhqk", "bhqk,bkgd->bqhd"),  # values summed over heads
    ("qbhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),  # the batch taken for tokens
    ("bhid,ahjd->bhij", "bhij,bhjd->bhid"),  # keys summed over the batch
    ("bqhd,bkhd->bhqk", "bhqk,bqhd->bkhd"),
]
WRITTEN = {
    "floor divided": softmax_of(lambda kit, s, x: torch.div(s, 2, rounding_mode="floor")),
    "values written to behind": written_behind,
    "no scale": softmax_of(lambda kit, s, x: s),
    "two scales": softmax_of(lambda kit, s, x: s * 0.5 / 3 * 2),
    "over a negative": softmax_of(lambda kit, s, x: s / -2),
    "queries' softmax": scores_of(lambda kit, s, x: (s * D**-0.5).softmax(-2)),
    "log_softmax": scores_of(lambda kit, s, x: (s * D**-0.5).log_softmax(-1)),
    "softmax by hand": scores_of(
        lambda kit, s, x: (lambda e: e / e.sum(-1, keepdim=True))(
            (s - s.amax(-1, keepdim=True)).exp()
        )
    ),
    "temperature below": softmax_of(lambda kit, s, x: s / kit.per_head),
    "temperature by query": softmax_of(lambda kit, s, x: s * kit.table[:, : s.shape[2], :1]),
    "temperature by key": softmax_of(lambda kit, s, x: s * kit.table[:, :1, : s.shape[2]]),
    "temperature by batch": softmax_of(lambda kit, s, x: s * x.detach()[:, :1, :1, None].abs()),
    "talking heads": softmax_of(
        lambda kit, s, x: torch.einsum("bhts,hg->bgts", s, kit.table[0, :4, :4])
    ),
    "talking after": weights_of(
        lambda kit, w: torch.einsum("bhts,hg->bgts", w, kit.table[0, :4, :4])
    ),
    "scaled before a mask": softmax_of(lambda kit, s, x: (s + learnt(kit, s)) * D**-0.5),
    "weights noted": weights_of(lambda kit, w: (setattr(kit, "map", w), w)[1]),
    "weights masked": weights_of(lambda kit, w: w * (w > 0.1)),
    "weights renormalised": weights_of(lambda kit, w: w / (w.sum(-2, keepdim=True) + 1e-6)),
    "weights detached": weights_of(lambda kit, w: w.detach()),
    "weights dropped": weights_of(lambda kit, w: F.dropout(w, 0.3, kit.training)),
    "weights dropped twice": weights_of(lambda kit, w: F.dropout(F.dropout(w, 0.3), 0.3)),
    "weights dropped in place": weights_of(lambda kit, w: F.dropout(w, 0.3, True, True)),
    "heads dropped": weights_of(lambda kit, w: F.dropout2d(w, 0.5)),
    "scores dropped": softmax_of(lambda kit, s, x: F.dropout(s, 0.3)),
    "draw between": weights_of(lambda kit, w: (torch.rand(2), F.dropout(w, 0.3), torch.rand(2))[1]),
    "weights clamped": weights_of(lambda kit, w: w.clamp(0.05, 0.5)),
    "keys of a view": of_packed(
        lambda kit, q, k, v: (q @ k.reshape(*k.shape[:2], D, -1)).softmax(-1) @ v
    ),
    "keys not turned": of_packed(
        lambda kit, q, k, v: (q.transpose(-2, -1) @ k).softmax(-1) @ v.transpose(-2, -1)
    ),
    "values turned": of_packed(lambda kit, q, k, v: (v.mT @ (q @ k.mT).softmax(-1)).mT),
    "softmax in float32": scores_of(
        lambda kit, s, x: s.softmax(-1, dtype=torch.float32).to(s.dtype)
    ),
    "softmax in half": scores_of(lambda kit, s, x: s.softmax(-1, dtype=torch.float16).to(s.dtype)),
    **{f"einsums {scores} {joined}": einsums(scores, joined) for scores, joined in EINSUMS},
}


# Masks ----------------------------------------------------------------------------------------


# made here: in a forward, a generator would end the graph between the scores and their mask
HIDES = torch.rand((16, 16), generator=torch.Generator().manual_seed(2)) < 0.4


def by_tokens(x: Tensor) -> Tensor:
    """A mask of keys, by their first column."""
    return (x[:, :, 0] > 0)[:, None, None]


def some_hidden(kit: Kit, s: Tensor) -> Tensor:
    """Every row sees itself."""
    T = s.shape[-1]
    return HIDES[:T, :T] & ~torch.eye(T, dtype=torch.bool)


def all_of_a_row(kit: Kit, s: Tensor) -> Tensor:
    hidden = some_hidden(kit, s).clone()
    hidden[1] = True
    return hidden


def learnt(kit: Kit, s: Tensor) -> Tensor:
    return kit.table[:, : s.shape[2], : s.shape[3]]


def filled(value: float, hidden: Callable[..., Tensor] = some_hidden) -> Any:
    return softmax_of(lambda kit, s, x: s.masked_fill(hidden(kit, s), value))


def hide(kit: Kit, s: Tensor) -> Tensor:
    return s.masked_fill(some_hidden(kit, s), -INF)


def infinite_where_hidden(kit: Kit, s: Tensor) -> Tensor:
    return torch.where(some_hidden(kit, s), INF, learnt(kit, s))


def infinite(hidden: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda kit, s: torch.zeros(s.shape[-2:], dtype=s.dtype).masked_fill(hidden(kit, s), -INF)


# Without gradients: by a row that is hidden whole the host's values get NaN, and with a kernel the
# queries and keys get it, too.
HIDDEN_ROWS = {
    "filled, a whole row": filled(-INF, all_of_a_row),
    "where not": softmax_of(lambda kit, s, x: torch.where(some_hidden(kit, s), s, -INF)),
    "where, whole row": softmax_of(lambda kit, s, x: torch.where(all_of_a_row(kit, s), -INF, s)),
    "filled, then +inf": softmax_of(lambda kit, s, x: hide(kit, s) + infinite_where_hidden(kit, s)),
}
MASKS = {
    "filled, then negated": softmax_of(lambda kit, s, x: hide(kit, s) * -0.3),
    "learnt, one query": masked_by(lambda kit, s: learnt(kit, s)[:, :1]),
    "learnt, one head": masked_by(lambda kit, s: learnt(kit, s)[0]),
    "learnt, a vector": masked_by(lambda kit, s: learnt(kit, s)[0, 0]),
    "a scalar": masked_by(lambda kit, s: kit.ls[0]),
    "by batch": masked_by(lambda kit, s: learnt(kit, s)[:, None, None, 0]),
    "float32 added": masked_by(lambda kit, s: learnt(kit, s).float()),
    "bool added": masked_by(some_hidden),
    "subtracted": softmax_of(lambda kit, s, x: s - learnt(kit, s)),
    "subtracted from": softmax_of(lambda kit, s, x: learnt(kit, s) - s),
    "alpha": softmax_of(lambda kit, s, x: torch.add(s, learnt(kit, s), alpha=2)),
    "multiplied": softmax_of(lambda kit, s, x: s * learnt(kit, s)),
    "-inf": masked_by(infinite(some_hidden)),
    "-inf in a whole row": masked_by(infinite(all_of_a_row)),
    "-inf everywhere": masked_by(lambda kit, s: torch.full(s.shape[-2:], -INF, dtype=s.dtype)),
    "+inf": masked_by(lambda kit, s: -infinite(some_hidden)(kit, s)),
    "nan": masked_by(lambda kit, s: infinite(some_hidden)(kit, s) * 0),
    "-1e9": masked_by(lambda kit, s: some_hidden(kit, s) * -1e9),
    "of inputs": softmax_of(lambda kit, s, x: s.masked_fill(by_tokens(x), -INF)),
    "of inputs, row": softmax_of(
        lambda kit, s, x: s.masked_fill((x[:, :, 0] > 0)[:, None, :, None], -INF)
    ),
    "of inputs, all": softmax_of(
        lambda kit, s, x: s.masked_fill((x[:, :, 0] > -99)[:, None, None], -INF)
    ),
    "of a buffer": softmax_of(lambda kit, s, x: s.masked_fill(kit.cos[:4, :4] > 0, -INF)),
    "filled": filled(-INF),
    "filled, inf": filled(INF),
    "filled, nan": filled(math.nan),
    "filled, finite": filled(-1e4),
    "filled twice": softmax_of(
        lambda kit, s, x: hide(kit, s).masked_fill(some_hidden(kit, s).T, -INF)
    ),
    "filled after": weights_of(lambda kit, w: w.masked_fill(some_hidden(kit, w), 0.0)),
    "filled and nan_to_num": scores_of(
        lambda kit, s, x: s.masked_fill(all_of_a_row(kit, s), -INF).softmax(-1).nan_to_num(0.0)
    ),
    "filled, then learnt": softmax_of(lambda kit, s, x: hide(kit, s) + learnt(kit, s)),
    "learnt, then filled": softmax_of(lambda kit, s, x: hide(kit, s + learnt(kit, s))),
    "filled, then scaled": softmax_of(lambda kit, s, x: hide(kit, s) * 0.3),
    "filled, then negated by head": softmax_of(lambda kit, s, x: hide(kit, s) * -kit.per_head),
    "where, then nought by head": softmax_of(
        lambda kit, s, x: torch.where(some_hidden(kit, s), -INF, s) * (kit.per_head * 0.0)
    ),
    "where": softmax_of(lambda kit, s, x: torch.where(some_hidden(kit, s), -INF, s)),
    "where, finite": softmax_of(lambda kit, s, x: torch.where(some_hidden(kit, s), s, -1e4)),
    "where, inf": softmax_of(lambda kit, s, x: torch.where(some_hidden(kit, s), s, INF)),
    "where, zeros": softmax_of(
        lambda kit, s, x: torch.where(some_hidden(kit, s), s, torch.zeros_like(s))
    ),
    "where, read elsewhere": softmax_of(
        lambda kit, s, x: (lambda f: torch.where(some_hidden(kit, s), s, f) + f)(torch.ones_like(s))
    ),
    "where, broadcast scores": softmax_of(
        lambda kit, s, x: torch.where(~some_hidden(kit, s)[None, None], s[:, :, :1], -INF)
    ),
    "tril": softmax_of(
        lambda kit, s, x: s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -INF)
    ),
    "of 5 axes": softmax_of(lambda kit, s, x: (s + learnt(kit, s)[None, None])[0]),
    "windows": softmax_of(
        lambda kit, s, x: (
            s.view(-1, 2, *s.shape[1:])
            + torch.stack((learnt(kit, s)[0], learnt(kit, s)[1]))[None, :, None]
        ).view(s.shape)
    ),
    "windows and samples": softmax_of(
        lambda kit, s, x: (
            (s.view(-1, 2, *s.shape[1:]) + kit.table[None, :2, None, : s.shape[-1], : s.shape[-1]])
            .view(s.shape)
            .add(x.detach()[:, None, :, : s.shape[-1]].sin())
        )
    ),
}


def under_mask(make: Callable[..., Any], **how: Any) -> Any:
    """sdpa with a mask of (kit, q)."""

    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = packed(kit, x)
        return join(sdpa(q, k, v, attn_mask=make(kit, q @ k.transpose(-2, -1)), **how))

    return forward


SDPA_MASKS = {
    "learnt, dropped": under_mask(learnt, dropout_p=0.3),
    "learnt, one query": under_mask(lambda kit, s: learnt(kit, s)[:, :1]),
    "learnt, a vector": under_mask(lambda kit, s: learnt(kit, s)[0, :1]),
    "learnt, by batch": under_mask(lambda kit, s: learnt(kit, s)[: s.shape[0], None]),
    "learnt, of windows": under_mask(lambda kit, s: learnt(kit, s)[:2, None]),
    "computed": under_mask(lambda kit, s: s * 0.1),
    "float32": under_mask(lambda kit, s: learnt(kit, s).float()),
    "bool": under_mask(lambda kit, s: ~some_hidden(kit, s)),
    "bool, a whole row": under_mask(lambda kit, s: ~all_of_a_row(kit, s)),
    "bool, all hidden": under_mask(lambda kit, s: torch.zeros(s.shape[-2:], dtype=torch.bool)),
    "-inf, a whole row": under_mask(infinite(all_of_a_row)),
    "int": under_mask(lambda kit, s: some_hidden(kit, s).int()),
    "causal too": under_mask(learnt, is_causal=True),
    "turned": under_mask(lambda kit, s: learnt(kit, s).transpose(-2, -1)),
    "of another shape": under_mask(lambda kit, s: learnt(kit, s)[:3]),
    "written after": lambda kit, x: (lambda q, k, v, m: (join(sdpa(q, k, v, m)), m.zero_()))(
        *packed(kit, x), torch.ones(x.shape[1], x.shape[1], dtype=x.dtype)
    ),
}


# Rotations ------------------------------------------------------------------------------------


def tables(kit: Kit, t: Tensor) -> tuple[Tensor, Tensor]:
    return kit.cos[: t.shape[2]], kit.sin[: t.shape[2]]


def plain(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return t * cos + rotate_half(t) * sin


def by_parts(interleaved: bool, sign: int = 1) -> Callable[..., Tensor]:
    """By tables of half the columns."""

    def turn(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = t.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else t.chunk(2, -1)
        parts = (a * cos - b * sin, a * sin + cos * b)
        if sign < 0:
            parts = (a * cos + b * sin, b * cos - a * sin)
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

    return turn


def by_complex(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    z = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2)) * torch.complex(cos, sin)
    return torch.view_as_real(z).flatten(3).type_as(t)


def of_part(turn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """By the tables' first half of columns."""
    return lambda t, cos, sin: turn(t, cos[:, : D // 2], sin[:, : D // 2])


def written_while_turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    shown = t.view(t.shape)
    first = shown * cos
    t.mul_(2)
    return first + rotate_half(shown) * sin


def without_gradient(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    with torch.no_grad():
        return plain(t, cos, sin)


def of_a_table_that_is_written(kit: Kit, x: Tensor) -> Tensor:
    q, k, v = packed(kit, x)
    cos, sin = tables(kit, q)
    base = cos.clone()
    shown = base.view(cos.shape)
    q = plain(q, shown.cos(), sin)
    base.add_(1)
    return sdpa(q, plain(k, shown.cos(), sin), v)


def of_all(how: Callable[..., Any]) -> Any:
    """Attention of what `how` makes of (kit, q, k, v, cos, sin)."""

    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = packed(kit, x)
        return join(sdpa(*how(kit, q, k, v, *tables(kit, q))))

    return forward


def each(q: Callable[..., Tensor], k: Callable[..., Tensor]) -> Any:
    return of_all(lambda kit, a, b, v, cos, sin: (q(a, cos, sin), k(b, cos, sin), v))


def both(turn: Callable[..., Tensor]) -> Any:
    return each(turn, turn)


def partner(half: Callable[[Tensor], Tensor]) -> Any:
    return both(lambda t, cos, sin: t * cos + half(t) * sin)


def by_tables(make: Callable[..., Any]) -> Any:
    """Halves by other tables, made of (cos, sin)."""
    return both(lambda t, cos, sin: plain(t, *make(cos, sin)))


def before_transpose(kit: Kit, x: Tensor) -> Tensor:
    """By tables of heads, while tokens stand before heads."""
    q, k, v = kit.qkv(x).view(*x.shape[:2], 3, H, D).unbind(2)
    q, k = (plain(t, kit.cos[:H], kit.sin[:H]) for t in (q, k))
    return sdpa(*(t.transpose(1, 2) for t in (q, k, v)))


def table_written_between(kit: Kit, x: Tensor) -> Tensor:
    q, k, v = packed(kit, x)
    q = plain(q, *tables(kit, q))
    kit.cos.mul_(0.5)
    return sdpa(q, plain(k, *tables(kit, k)), v)


def turned_seen(kit: Kit, x: Tensor) -> Any:
    q, k, v = packed(kit, x)
    q = plain(q, *tables(kit, q))
    return sdpa(q, plain(k, *tables(kit, k)), v), q


ROTATIONS = {
    "other sign": partner(lambda t: -rotate_half(t)),
    "no sign": partner(lambda t: torch.cat(t.chunk(2, -1)[::-1], -1)),
    "both signs": partner(lambda t: torch.cat([-u for u in t.chunk(2, -1)[::-1]], -1)),
    "sign of the other half": partner(lambda t: torch.cat((-t[..., :4], t[..., 4:]), -1)),
    "flip": partner(lambda t: t.flip(-1)),
    "thirds": partner(lambda t: torch.cat((-t[..., 2:], t[..., :2]), -1)),
    "halves into pairs": partner(lambda t: torch.stack((-t[..., 4:], t[..., :4]), -1).flatten(-2)),
    "pairs into halves": partner(lambda t: torch.cat((-t[..., 1::2], t[..., ::2]), -1)),
    "odd pairs": partner(lambda t: torch.stack((-t[..., ::2], t[..., 1::2]), -1).flatten(-2)),
    "sign in pairs": partner(lambda t: torch.stack((t[..., 1::2], -t[..., ::2]), -1).flatten(-2)),
    "of tokens": partner(lambda t: t.roll(1, 2)),
    "of heads": partner(lambda t: t.roll(1, 1)),
    "partner detached": partner(lambda t: rotate_half(t.detach())),
    "partner in bits": partner(lambda t: rotate_pairs(t).view(torch.int64).view(t.dtype)),
    "parts of another sign": both(of_part(by_parts(False, -1))),
    "complex, k the other way": each(
        of_part(by_complex), of_part(lambda t, cos, sin: by_complex(t, cos, -sin))
    ),
    "parts by several tables": both(
        lambda t, cos, sin: (
            lambda a, b: torch.cat(
                (a * cos[:, :4] - b * sin[:, :4], b * cos[:, 4:] + a * sin[:, :4]), -1
            )
        )(*t.chunk(2, -1))
    ),
    "k by shifted tables": of_all(
        lambda kit, q, k, v, cos, sin: (plain(q, cos, sin), plain(k, kit.cos[1:5], kit.sin[1:5]), v)
    ),
    "sin for cos": by_tables(lambda cos, sin: (sin, cos)),
    "tables of heads": of_all(
        lambda kit, q, k, v, *_: (
            *(plain(t, *(m.view(-1, 4, D)[:4] for m in (kit.cos, kit.sin))) for t in (q, k)),
            v,
        )
    ),
    "tables of a batch": of_all(
        lambda kit, q, k, v, *_: (
            *(plain(t, *(m.view(-1, 1, 4, D)[:4] for m in (kit.cos, kit.sin))) for t in (q, k)),
            v,
        )
    ),
    "tables of one column": by_tables(lambda cos, sin: (cos[:, :1], sin[:, :1])),
    "tables of one token": by_tables(lambda cos, sin: (cos[:1], sin[:1])),
    "tables in float32": by_tables(lambda cos, sin: (cos.float(), sin.float())),
    "tables with nan": by_tables(lambda cos, sin: (cos / 0 * 0, sin)),
    "tables of numbers": by_tables(lambda cos, sin: (0.6, 0.8)),
    "tables computed": by_tables(lambda cos, sin: (cos * 2, -sin)),
    "tables drawn": by_tables(lambda cos, sin: (torch.rand_like(cos), torch.rand_like(sin))),
    "of q alone": each(plain, lambda t, cos, sin: t),
    "of k alone": each(lambda t, cos, sin: t, plain),
    "k by other tables": each(plain, lambda t, cos, sin: plain(t, sin, cos)),
    "k by other sines": each(plain, lambda t, cos, sin: plain(t, cos, cos)),
    "k the other way": each(plain, lambda t, cos, sin: plain(t, cos, -sin)),
    "k by pairs": each(plain, lambda t, cos, sin: t * cos + rotate_pairs(t) * sin),
    "k by later tables": each(plain, lambda t, cos, sin: plain(t, cos.roll(1, 0), sin.roll(1, 0))),
    "minus": both(lambda t, cos, sin: t * cos - rotate_half(t) * sin),
    "product for sum": both(lambda t, cos, sin: t * cos * (rotate_half(t) * sin)),
    "no cos": both(lambda t, cos, sin: t + rotate_half(t) * sin),
    "turned twice": both(lambda t, cos, sin: plain(plain(t, cos, sin), cos, sin)),
    "turned, then scaled": both(lambda t, cos, sin: plain(t, cos, sin) * 0.5),
    "turned, then cast": both(lambda t, cos, sin: plain(t, cos, sin).float().to(t.dtype)),
    "turned in float32": both(lambda t, cos, sin: plain(t.float(), cos, sin).to(t.dtype)),
    "turned in place": both(lambda t, cos, sin: (t * cos).add_(rotate_half(t) * sin)),
    "written while turned": both(written_while_turned),
    "under no_grad": each(without_gradient, plain),
    "addcmul": both(lambda t, cos, sin: torch.addcmul(t * cos, rotate_half(t), sin)),
    "partner of the other": of_all(
        lambda kit, q, k, v, cos, sin: (q * cos + rotate_half(k) * sin, k, v)
    ),
    "columns in halves": both(
        lambda t, cos, sin: torch.cat([of_part(plain)(u, cos, sin) for u in t.chunk(2, -1)], -1)
    ),
    "columns exchanged": both(
        lambda t, cos, sin: torch.cat(
            [of_part(plain)(u, cos, sin) for u in t.chunk(2, -1)[::-1]], -1
        )
    ),
    "prefix of heads": both(
        lambda t, cos, sin: torch.cat((t[:, :1], plain(t[:, 1:], cos, sin)), 1)
    ),
    "prefix of columns": both(
        lambda t, cos, sin: torch.cat((t[..., :4], plain(t, cos, sin)[..., 4:]), -1)
    ),
    "suffix": both(
        lambda t, cos, sin: torch.cat((plain(t[:, :, :-1], cos[1:], sin[1:]), t[:, :, -1:]), 2)
    ),
    "prefix of another": of_all(
        lambda kit, q, k, v, cos, sin: (
            torch.cat((k[:, :, :1], plain(q[:, :, 1:], cos[:3], sin[:3])), 2),
            k,
            v,
        )
    ),
    "prefix scaled": both(
        lambda t, cos, sin: torch.cat((t[:, :, :1] * 2, plain(t[:, :, 1:], cos[1:], sin[1:])), 2)
    ),
    "prefix twice": both(
        lambda t, cos, sin: torch.cat((t[:, :, :1], plain(t, cos, sin)[:, :, :3]), 2)
    ),
    "values too": of_all(lambda kit, q, k, v, cos, sin: [plain(t, cos, sin) for t in (q, k, v)]),
    "before the norm": of_all(
        lambda kit, q, k, v, cos, sin: (kit.qn(plain(q, cos, sin)), kit.kn(plain(k, cos, sin)), v)
    ),
    "before transpose, by head": before_transpose,
    "seen": turned_seen,
    "table written between": table_written_between,
    "of a table that is written": of_a_table_that_is_written,
}


def attention_hosts() -> list[Host]:
    return [
        *table("order", ORDERS, inputs=square),
        *table("operand", OPERANDS, inputs=square),
        *table("structure", STRUCTURES, inputs=square),
        *table("written", WRITTEN, inputs=square),
        *table("mask", MASKS, inputs=square),
        *table("hidden row", HIDDEN_ROWS, inputs=square, context=torch.no_grad),
        *table("sdpa mask", SDPA_MASKS, inputs=square),
        *table("rotation", ROTATIONS, inputs=square),
        *table("structure of tokens", STRUCTURES, inputs=tokens),
    ]
