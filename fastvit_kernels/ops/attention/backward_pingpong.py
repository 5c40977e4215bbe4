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

Sums are in order: nothing is atomic. Of packed (B, T, 3, H, D), without mask and dropout; D up to
64. lse is the forward's. Gluon has no interpreter: tests/machine/device runs the PTX.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...runtime.gluon import (
    fence,
    fetch,
    gl,
    gluon,
    mbarrier,
    multiply,
    multiply_wait,
    put,
    store_wait,
    tensor_map,
)
from ...runtime.triton import ANY_BATCH, bind_launch, triton
from .pingpong import REGISTERS, TILE, _barriers, _matrix, _tiles
from .tiles import LOG2_E, padded


@gluon.jit
def _fetch_keys(qkv, b, h, H, tile: gl.constexpr, k_tiles, v_tiles, kv_full, kv_empty, phase):
    mbarrier.wait(kv_empty.index(tile), phase ^ 1)
    ready = kv_full.index(tile)
    mbarrier.expect(ready, 2 * qkv.block_type.nbytes)
    fetch(qkv, [b, tile * TILE, H + h, 0], ready, k_tiles.index(tile))
    fetch(qkv, [b, tile * TILE, 2 * H + h, 0], ready, v_tiles.index(tile))


@gluon.jit
def _load(qkv, dout, tiles, barriers, sizes, TILES: gl.constexpr):
    """Fetch what each head reads as soon as the head before has read its own."""
    q_tiles, do_tiles, k_tiles, v_tiles, _, _, _ = tiles
    q_full, q_empty, kv_full, kv_empty, _, _ = barriers
    num_heads, H, T = sizes
    phase = 0
    for head in range(gl.program_id(0), num_heads, gl.num_programs(0)):
        b, h = head // H, head % H
        for tile in gl.static_range(TILES - 1):
            _fetch_keys(qkv, b, h, H, tile, k_tiles, v_tiles, kv_full, kv_empty, phase)
        mbarrier.wait(q_empty.index(0), phase ^ 1)
        ready = q_full.index(0)
        mbarrier.expect(ready, 8 * qkv.block_type.nbytes)
        for i in gl.static_range(4):
            fetch(qkv, [b, i * TILE, h, 0], ready, q_tiles.index(i))
            fetch(dout, [b, i * TILE, h, 0], ready, do_tiles.index(i))
        _fetch_keys(qkv, b, h, H, TILES - 1, k_tiles, v_tiles, kv_full, kv_empty, phase)
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
def _weights(s, dp, lse, delta, left, scale_log2, dtype: gl.constexpr, CHECK: gl.constexpr):
    """p and ds = p (dp - delta) of scores."""
    p = gl.exp2(s * scale_log2 - lse[:, None])
    if CHECK:  # keys past T have zeros for k, and p may be infinite
        seen = gl.arange(0, TILE, gl.SliceLayout(0, s.type.layout)) < left
        p = gl.where(seen[None, :], p, 0.0)
    return p.to(dtype), (p * (dp - delta[:, None])).to(dtype)


@gluon.jit
def _pass_out(x, out, at, buffer):
    store_wait(0)  # the buffer's last tile has been read
    _matrix(buffer).store(x.to(out.dtype))
    fence()
    put(out, at, buffer)


@gluon.jit
def _load_rows(out_ptr, lse_ptr, head, H, T, D, start, BLOCK_D: gl.constexpr):
    """A tile of out, in whose layout delta is summed, and of lse: +inf past T, so that p is 0."""
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    offs_t = start + gl.arange(0, TILE, gl.SliceLayout(1, wide))
    offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, wide))
    first = out_ptr + (head // H).to(gl.int64) * T * H * D + head % H * D
    mask = (offs_t < T)[:, None] & (offs_d < D)[None, :]
    out = gl.load(first + offs_t[:, None] * (H * D) + offs_d[None, :], mask=mask, other=0.0)
    offs_q = start + gl.arange(0, TILE, gl.SliceLayout(1, layout))
    row = lse_ptr + head.to(gl.int64) * padded(T)
    return out, gl.load(row + offs_q, mask=offs_q < padded(T), other=float("inf"))


@gluon.jit
def _delta(out, do_tile):
    """rowsum(out * dout)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    do = _matrix(do_tile).load(out.type.layout)
    delta = gl.sum(out.to(gl.float32) * do.to(gl.float32), axis=1)
    return gl.convert_layout(delta, gl.SliceLayout(1, layout))


@gluon.jit
def _grads(
    dqkv, out_ptr, lse_ptr, tiles, barriers, sizes, D, scale, TILES: gl.constexpr,
    CHECK: gl.constexpr, GROUP_OF: gl.constexpr,
):  # fmt: skip
    q_tiles, do_tiles, k_tiles, v_tiles, p_tiles, ds_tiles, buffers = tiles
    q_full, q_empty, kv_full, kv_empty, made, used = barriers
    num_heads, H, T = sizes
    BLOCK_D: gl.constexpr = dqkv.block_type.shape[3]
    dtype: gl.constexpr = dqkv.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    FIRST: gl.constexpr = 2 * GROUP_OF  # of the group's tiles of queries
    q0, q1 = _matrix(q_tiles.index(FIRST)), _matrix(q_tiles.index(FIRST + 1))
    do0, do1 = _matrix(do_tiles.index(FIRST)), _matrix(do_tiles.index(FIRST + 1))
    buffer = buffers.index(GROUP_OF)
    zeros = gl.zeros((TILE, BLOCK_D), gl.float32, layout)
    scale_log2 = scale * LOG2_E
    phase = 0
    turn = 0  # tiles of keys that have passed
    for head in range(gl.program_id(0), num_heads, gl.num_programs(0)):
        b, h = head // H, head % H
        start = FIRST * TILE
        out0, lse0 = _load_rows(out_ptr, lse_ptr, head, H, T, D, start, BLOCK_D)
        out1, lse1 = _load_rows(out_ptr, lse_ptr, head, H, T, D, start + TILE, BLOCK_D)
        mbarrier.wait(q_full.index(0), phase)
        mbarrier.wait(kv_full.index(0), phase)
        k, v = _matrix(k_tiles.index(0)), _matrix(v_tiles.index(0))
        s0, dp0 = _scores(q0, do0, k, v)
        delta0, delta1 = _delta(out0, do_tiles.index(FIRST)), _delta(out1, do_tiles.index(FIRST + 1))
        dq0 = zeros
        dq1 = zeros
        acc = zeros
        for tile in gl.static_range(TILES):
            left = T - tile * TILE
            s0, dp0 = multiply_wait(4 if tile > 0 else 0, deps=[s0, dp0])
            p, ds = _weights(s0, dp0, lse0, delta0, left, scale_log2, dtype, CHECK and tile + 1 == TILES)
            s1, dp1 = _scores(q1, do1, k, v)
            if tile > 0:
                acc = multiply_wait(2, deps=[acc])
                mbarrier.arrive(used.index(0), count=1)
            mbarrier.wait(used.index(0), turn & 1 ^ 1)
            p_tiles.index(FIRST).store(p)
            ds_tiles.index(FIRST).store(ds)
            ds0 = gl.convert_layout(ds, operand, assert_trivial=True)
            dq0 = multiply(ds0, k, dq0, is_async=True)
            if tile > 0:
                grad = acc if GROUP_OF == 0 else acc * scale
                axis = 2 - GROUP_OF
                _pass_out(grad, dqkv, [b, (tile - 1) * TILE, axis * H + h, 0], buffer)
            s1, dp1 = multiply_wait(1, deps=[s1, dp1])
            p, ds = _weights(s1, dp1, lse1, delta1, left, scale_log2, dtype, CHECK and tile + 1 == TILES)
            p_tiles.index(FIRST + 1).store(p)
            ds_tiles.index(FIRST + 1).store(ds)
            fence()
            mbarrier.arrive(made.index(0), count=1)
            ds1 = gl.convert_layout(ds, operand, assert_trivial=True)
            dq1 = multiply(ds1, k, dq1, is_async=True)
            if tile + 1 < TILES:
                mbarrier.wait(kv_full.index(tile + 1), phase)
                k, v = _matrix(k_tiles.index(tile + 1)), _matrix(v_tiles.index(tile + 1))
                s0, dp0 = _scores(q0, do0, k, v)
            mbarrier.wait(made.index(0), turn & 1)
            turn += 1
            for i in gl.static_range(4):
                weights = p_tiles if GROUP_OF == 0 else ds_tiles
                rows = do_tiles if GROUP_OF == 0 else q_tiles
                acc = multiply(
                    weights.index(i).permute((1, 0)), _matrix(rows.index(i)), acc, use_acc=i > 0,
                    is_async=True,
                )  # fmt: skip
            dq0, dq1, _, _ = multiply_wait(6 if tile + 1 < TILES else 4, deps=[dq0, dq1, ds0, ds1])
            mbarrier.arrive(kv_empty.index(tile), count=1)
        acc = multiply_wait(0, deps=[acc])
        mbarrier.arrive(used.index(0), count=1)
        mbarrier.arrive(q_empty.index(0), count=1)
        grad = acc if GROUP_OF == 0 else acc * scale
        axis = 2 - GROUP_OF
        _pass_out(grad, dqkv, [b, (TILES - 1) * TILE, axis * H + h, 0], buffer)
        _pass_out(dq0 * scale, dqkv, [b, start, h, 0], buffer)
        _pass_out(dq1 * scale, dqkv, [b, start + TILE, h, 0], buffer)
        phase ^= 1
    store_wait(0)


@gluon.jit
def _squares(dtype: gl.constexpr):
    """Shared memory for a tile of keys beside all queries."""
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, TILE], dtype)
    return gl.allocate_shared_memory(dtype, [4, TILE, TILE], shared)


@gluon.jit(**ANY_BATCH)
def _attention_bwd_pingpong_kernel(
    dqkv, out_ptr, lse_ptr, qkv, dout, num_heads, H, T, D, scale, TILES: gl.constexpr,
    CHECK: gl.constexpr,
):  # fmt: skip
    sizes = num_heads, H, T
    tiles = (
        _tiles(qkv, 4), _tiles(qkv, 4), _tiles(qkv, TILES), _tiles(qkv, TILES),
        _squares(qkv.dtype), _squares(qkv.dtype), _tiles(qkv, 2),
    )  # fmt: skip
    barriers = (
        _barriers(1, 1), _barriers(1, 2), _barriers(TILES, 1), _barriers(TILES, 2),
        _barriers(1, 2), _barriers(1, 2),
    )  # fmt: skip
    fence()  # TMA counts bytes at them
    gl.warp_specialize(
        [
            (_grads, (
                dqkv, out_ptr, lse_ptr, tiles, barriers, sizes, D, scale, TILES, CHECK, 0,
            )),
            (_grads, (
                dqkv, out_ptr, lse_ptr, tiles, barriers, sizes, D, scale, TILES, CHECK, 1,
            )),
            (_load, (qkv, dout, tiles, barriers, sizes, TILES)),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip


def bwd_pingpong(
    shape: tuple[int, ...], strides: tuple[int, ...], strides_dout: tuple[int, ...], scale: float,
    num_sms: int,
) -> Callable[..., None]:  # fmt: skip
    """The launch of the backward, called with dqkv, dout, qkv, out and lse, lse padded.

    Args:
        shape, strides: of q, (B, T, H, D); dqkv is contiguous.
    """
    B, T, H, D = shape
    launch = bind_launch(
        _attention_bwd_pingpong_kernel, (min(B * H, num_sms),), B * H, H, T, D, scale,
        TILES=-(-T // TILE.value), CHECK=T % TILE.value > 0, num_warps=4,
    )  # fmt: skip
    block = (1, TILE.value, 1, triton.next_power_of_2(D))
    packed = B, T, 3 * H, D

    def run(dqkv: Tensor, dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor) -> None:
        launch(
            tensor_map(dqkv, packed, (T * 3 * H * D, 3 * H * D, D, 1), block), out, lse,
            tensor_map(qkv, packed, strides, block), tensor_map(dout, shape, strides_dout, block),
        )  # fmt: skip

    return run
