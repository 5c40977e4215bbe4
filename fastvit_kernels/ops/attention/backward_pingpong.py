"""Flash attention for Hopper, backward in one pass, in Gluon: products stay in flight.

A program takes heads of 129 to 256 tokens one after the other. Two groups of four warps, `_grads`,
own two tiles of 64 queries each and walk the keys in tiles:

    s = q k^T    dp = dout v^T    p, ds to shared memory    dq += ds k

and with the p and ds of all queries, the first group dv = p^T dout and the second dk = ds^T q. Both
are on the tensor cores while the next tile's p and ds are made, so are dq's. dq stays in registers
and is written once. One warp, `_load`, fetches all by TMA.

    q_full, kv_full[tile]     a head's q and dout have landed, a tile of keys and values
    q_empty, kv_empty[tile]   both groups have multiplied by them
    made, used                p and ds of a tile of keys: both groups' are there, have been read

Sums are in order: nothing is atomic. Of packed (B, T, 3, H, 64), without mask and dropout. What the
bias gradient of the projection sums (tiles.store_do_sum, store_dq_sum) is a row for each warp.

`turn >> 30` is 0, but depends on the loop: without it the compiler would keep the descriptors of
all tiles in registers, and spill. Gluon has no interpreter: tests/machine/device runs the PTX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ...runtime.gluon import fence, fetch, gl, gluon, mbarrier, multiply, multiply_wait, store_wait
from ...runtime.triton import ANY_BATCH, bind_launch, constant, tl
from ..common.barriers import make_barriers, parity
from .forward_pingpong import TILE, _matrix, _pass_out, _tiles, heads_map
from .tiles import LOG2_E, padded

NAN = constant(tl.PropagateNan.ALL)


class Form(NamedTuple):
    """Constants of a launch: tiles of keys, and whether the last may not be full."""

    TILES: Any
    CHECK: Any


class Tiles(NamedTuple):
    """Shared memory, in tiles of 64 rows."""

    q: Any
    do: Any
    k: Any
    v: Any
    p: Any
    ds: Any  # before that, out
    out: Any  # one a group


class Barriers(NamedTuple):
    q_full: Any
    q_empty: Any
    kv_full: Any
    kv_empty: Any
    made: Any
    used: Any


@gluon.jit
def _fetch_keys(qkv, b, h, H, tile: gl.constexpr, tiles, barriers, phase):
    mbarrier.wait(barriers.kv_empty.index(tile), phase ^ 1)
    ready = barriers.kv_full.index(tile)
    mbarrier.expect(ready, 2 * qkv.block_type.nbytes)
    fetch(qkv, [b, tile * TILE, H + h, 0], ready, tiles.k.index(tile))
    fetch(qkv, [b, tile * TILE, 2 * H + h, 0], ready, tiles.v.index(tile))


@gluon.jit
def _load(qkv, out, dout, tiles, barriers, sizes, TILES: gl.constexpr):
    """Fetch what each head reads as soon as the head before has read its own."""
    num_heads, H, _ = sizes
    phase = 0
    for head in range(gl.program_id(0), num_heads, gl.num_programs(0)):
        b, h = head // H, head % H
        for tile in gl.static_range(TILES - 1):
            _fetch_keys(qkv, b, h, H, tile, tiles, barriers, phase)
        mbarrier.wait(barriers.q_empty.index(0), phase ^ 1)
        ready = barriers.q_full.index(0)
        mbarrier.expect(ready, 12 * qkv.block_type.nbytes)
        for i in gl.static_range(4):
            fetch(qkv, [b, i * TILE, h, 0], ready, tiles.q.index(i))
            fetch(dout, [b, i * TILE, h, 0], ready, tiles.do.index(i))
            fetch(out, [b, i * TILE, h, 0], ready, tiles.ds.index(i))  # until ds is made
        _fetch_keys(qkv, b, h, H, TILES - 1, tiles, barriers, phase)
        phase ^= 1


@gluon.jit
def _scores(q, do, k, v):
    """s and dp of a tile of queries and one of keys, pending."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zeros = gl.zeros((TILE, TILE), gl.float32, layout)
    s = multiply(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    dp = multiply(do, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _weights(s, dp, lse, delta, scale_log2, dtype: gl.constexpr, CHECK: gl.constexpr):
    """p and ds = p (dp - delta) of scores."""
    x = s * scale_log2 - lse[:, None]
    if CHECK:  # of keys past T, whose k and v are zeros, p need only be finite
        x = gl.minimum(x, 0.0, propagate_nan=NAN)
    p = gl.exp2(x)
    return p.to(dtype), (p * (dp - delta[:, None])).to(dtype)


@gluon.jit
def _load_lse(lse_ptr, head, T, start, rows: gl.constexpr):
    """Of a tile of queries: +inf past T, so that p is 0."""
    offs_q = start + gl.arange(0, TILE, rows)
    row = lse_ptr + head.to(gl.int64) * padded(T)
    return gl.load(row + offs_q, mask=offs_q < padded(T), other=float("inf"))


@gluon.jit
def _delta(do_tile, out_tile, layout: gl.constexpr):
    """rowsum(out * dout), and dout."""
    do = _matrix(do_tile).load(layout).to(gl.float32)
    out = _matrix(out_tile).load(layout).to(gl.float32)
    return gl.sum(out * do, axis=1), do


@gluon.jit
def _by_key(tiles, none, GROUP_OF: gl.constexpr, layout: gl.constexpr):
    """dv of a tile of keys, or dk, pending: of all queries."""
    weights = tiles.p if GROUP_OF == 0 else tiles.ds
    factors = tiles.do if GROUP_OF == 0 else tiles.q
    BLOCK_D: gl.constexpr = tiles.q.shape[4]
    acc = gl.zeros((TILE, BLOCK_D), gl.float32, layout)
    for i in gl.static_range(4):
        by_key = _matrix(weights.index(i + none)).permute((1, 0))
        acc = multiply(by_key, _matrix(factors.index(i + none)), acc, use_acc=i > 0, is_async=True)
    return acc


@gluon.jit
def _store_grad(acc, dqkv, head, H, tile, scale_log2, buffer, GROUP_OF: gl.constexpr):
    if GROUP_OF == 1:
        acc *= scale_log2 / LOG2_E
    at = [head // H, tile * TILE, (2 - GROUP_OF) * H + head % H, 0]
    _pass_out(acc, dqkv, at, buffer)


@gluon.jit
def _key_tile(
    dq,
    rows,
    dqkv,
    tiles,
    barriers,
    tile,
    head,
    H,
    turn,
    scale_log2,
    TILES: gl.constexpr,
    CHECK: gl.constexpr,
    FIRST_KEYS: gl.constexpr,
    GROUP_OF: gl.constexpr,
):
    """What a tile of keys adds to dq, and dv or dk of the tile before."""
    dq0, dq1 = dq
    made, used = barriers.made.index(0), barriers.used.index(0)
    lse0, lse1, delta0, delta1 = rows
    dtype: gl.constexpr = dqkv.dtype
    layout: gl.constexpr = dq0.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    FIRST: gl.constexpr = 2 * GROUP_OF
    none = turn >> 30  # 0, but the compiler cannot take what depends on it out of the loop
    k, v = _matrix(tiles.k.index(tile + none)), _matrix(tiles.v.index(tile + none))
    mbarrier.wait(barriers.kv_full.index(tile), parity(turn // TILES))
    q = _matrix(tiles.q.index(FIRST + none))
    s0, dp0 = _scores(q, _matrix(tiles.do.index(FIRST + none)), k, v)
    if FIRST_KEYS:
        s0, dp0 = multiply_wait(0, deps=[s0, dp0])
    else:
        mbarrier.wait(made, parity(turn) ^ 1)
        acc = _by_key(tiles, none, GROUP_OF, layout)
        s0, dp0 = multiply_wait(4, deps=[s0, dp0])
    p, ds = _weights(s0, dp0, lse0, delta0, scale_log2, dtype, CHECK)
    if not FIRST_KEYS:
        acc = multiply_wait(0, deps=[acc])
        mbarrier.arrive(used, count=1)
    mbarrier.wait(used, parity(turn) ^ 1)
    _matrix(tiles.p.index(FIRST + none)).store(p)
    _matrix(tiles.ds.index(FIRST + none)).store(ds)
    ds0 = gl.convert_layout(ds, operand, assert_trivial=True)
    if not FIRST_KEYS:
        _store_grad(acc, dqkv, head, H, tile - 1, scale_log2, tiles.out.index(GROUP_OF), GROUP_OF)
    q = _matrix(tiles.q.index(FIRST + 1 + none))
    s1, dp1 = _scores(q, _matrix(tiles.do.index(FIRST + 1 + none)), k, v)
    dq0 = multiply(ds0, k, dq0, use_acc=not FIRST_KEYS, is_async=True)
    s1, dp1 = multiply_wait(1, deps=[s1, dp1])
    p, ds = _weights(s1, dp1, lse1, delta1, scale_log2, dtype, CHECK)
    _matrix(tiles.p.index(FIRST + 1 + none)).store(p)
    _matrix(tiles.ds.index(FIRST + 1 + none)).store(ds)
    fence()
    mbarrier.arrive(made, count=1)
    ds1 = gl.convert_layout(ds, operand, assert_trivial=True)
    dq1 = multiply(ds1, k, dq1, use_acc=not FIRST_KEYS, is_async=True)
    dq0, dq1, _, _ = multiply_wait(0, deps=[dq0, dq1, ds0, ds1])
    mbarrier.arrive(barriers.kv_empty.index(tile), count=1)
    return dq0, dq1


@gluon.jit
def _column_sums(x):
    """(4, D): each warp's."""
    return gl.sum(gl.reshape(x, (4, TILE // 4, x.shape[1])), axis=1)


@gluon.jit
def _store_sums(sums, partial_ptr, head, H, none, axis: gl.constexpr, GROUP_OF: gl.constexpr):
    """A part of the bias gradient of q, k or v, one row for each warp of a sample."""
    D: gl.constexpr = sums.shape[1]
    layout: gl.constexpr = sums.type.layout
    warp = head // H * 8 + GROUP_OF * 4 + gl.arange(0, 4, gl.SliceLayout(1, layout))
    offs = (warp * 3 + axis).to(gl.int64) * (H * D) + head % H * D
    offs_d = none + gl.arange(0, D, gl.SliceLayout(0, layout))
    gl.store(partial_ptr + (offs[:, None] + offs_d[None, :]), sums)


@gluon.jit
def _grads(
    dqkv,
    partial_ptr,
    lse_ptr,
    tiles,
    barriers,
    sizes,
    scale_log2,
    FORM: gl.constexpr,
    GROUP_OF: gl.constexpr,
):
    """The group's part of each head of the program."""
    TILES: gl.constexpr = FORM.TILES
    num_heads, H, T = sizes
    made, used = barriers.made.index(0), barriers.used.index(0)
    BLOCK_D: gl.constexpr = dqkv.block_type.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    FIRST: gl.constexpr = 2 * GROUP_OF  # of the group's tiles of queries
    buffer = tiles.out.index(GROUP_OF)
    turn = 0  # tiles of keys that have passed
    for head in range(gl.program_id(0), num_heads, gl.num_programs(0)):
        start = FIRST * TILE + (turn >> 30)
        lse0 = _load_lse(lse_ptr, head, T, start, gl.SliceLayout(1, layout))
        lse1 = _load_lse(lse_ptr, head, T, start + TILE, gl.SliceLayout(1, layout))
        mbarrier.wait(barriers.q_full.index(0), parity(turn // TILES))
        first = start // TILE
        delta0, do0 = _delta(tiles.do.index(first), tiles.ds.index(first), layout)
        delta1, do1 = _delta(tiles.do.index(first + 1), tiles.ds.index(first + 1), layout)
        if partial_ptr is not None:  # of v's bias the gradient is dout's sum: tiles.store_do_sum
            nan = (delta0 + delta1) * 0.0  # or 0: where out is not finite, nor is lse
            sums = _column_sums(do0 + do1 + nan[:, None])
            _store_sums(sums, partial_ptr, head, H, turn >> 30, 2, GROUP_OF)
        rows = lse0, lse1, delta0, delta1
        dq0 = gl.zeros((TILE, BLOCK_D), gl.float32, layout)
        dq1 = gl.zeros((TILE, BLOCK_D), gl.float32, layout)
        dq = _key_tile(
            (dq0, dq1),
            rows,
            dqkv,
            tiles,
            barriers,
            0,
            head,
            H,
            turn,
            scale_log2,
            TILES,
            False,
            True,
            GROUP_OF,
        )
        turn += 1
        for tile in range(1, TILES):
            dq = _key_tile(
                dq,
                rows,
                dqkv,
                tiles,
                barriers,
                tile,
                head,
                H,
                turn,
                scale_log2,
                TILES,
                FORM.CHECK,
                False,
                GROUP_OF,
            )
            turn += 1
        dq0, dq1 = dq
        mbarrier.wait(made, parity(turn) ^ 1)
        acc = multiply_wait(0, deps=[_by_key(tiles, turn >> 30, GROUP_OF, layout)])
        mbarrier.arrive(used, count=1)
        mbarrier.arrive(barriers.q_empty.index(0), count=1)
        _store_grad(acc, dqkv, head, H, TILES - 1, scale_log2, buffer, GROUP_OF)
        scale = scale_log2 / LOG2_E
        if partial_ptr is not None:
            sums = _column_sums(dq0 + dq1) * scale
            _store_sums(sums, partial_ptr, head, H, turn >> 30, 0, GROUP_OF)
            _store_sums(sums * 0.0, partial_ptr, head, H, turn >> 30, 1, GROUP_OF)
        _pass_out(dq0 * scale, dqkv, [head // H, start, head % H, 0], buffer)
        _pass_out(dq1 * scale, dqkv, [head // H, start + TILE, head % H, 0], buffer)
    store_wait(0)


@gluon.jit(**ANY_BATCH)
def _attention_bwd_pingpong_kernel(
    dqkv,
    partial_ptr,
    lse_ptr,
    qkv,
    out,
    dout,
    num_heads,
    H,
    T,
    scale,
    FORM: gl.constexpr,
):
    sizes = num_heads, H, T
    TILES: gl.constexpr = FORM.TILES
    tiles = Tiles(
        _tiles(qkv, 4),
        _tiles(qkv, 4),
        _tiles(qkv, TILES),
        _tiles(qkv, TILES),
        _tiles(qkv, 4),
        _tiles(qkv, 4),
        _tiles(qkv, 2),
    )
    barriers = Barriers(
        make_barriers(1, 1),
        make_barriers(1, 2),
        make_barriers(TILES, 1),
        make_barriers(TILES, 2),
        make_barriers(1, 2),
        make_barriers(1, 2),
    )
    scale_log2 = scale * LOG2_E
    fence()  # TMA counts bytes at them
    gl.warp_specialize(
        [
            (_grads, (dqkv, partial_ptr, lse_ptr, tiles, barriers, sizes, scale_log2, FORM, 0)),
            (_grads, (dqkv, partial_ptr, lse_ptr, tiles, barriers, sizes, scale_log2, FORM, 1)),
            (_load, (qkv, out, dout, tiles, barriers, sizes, TILES)),
        ],
        [4, 1],
        [232, 40],  # registers, as REGISTERS: by that triton 3.9 spills here
    )


def bwd_pingpong(shape: tuple[int, ...], scale: float, num_sms: int) -> Callable[..., None]:
    """The launch of the backward, called with dqkv, dbias (8 B, 3 H D) fp32 or None, dout, packed
    qkv, out, all contiguous, and lse in padded rows.

    Args:
        shape: of out, (B, T, H, D).
    """
    B, T, H, D = shape
    launch = bind_launch(
        _attention_bwd_pingpong_kernel,
        (min(B * H, num_sms),),
        B * H,
        H,
        T,
        scale,
        FORM=Form(-(-T // TILE.value), T % TILE.value > 0),
        num_warps=4,
    )

    def run(
        dqkv: Tensor, dbias: Tensor | None, dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        launch(
            heads_map(dqkv, B, T, 3 * H, D),
            dbias,
            lse,
            heads_map(qkv, B, T, 3 * H, D),
            heads_map(out, B, T, H, D),
            heads_map(dout, B, T, H, D),
        )

    return run
