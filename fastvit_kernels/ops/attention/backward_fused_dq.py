"""Flash attention for Hopper, backward in five products, in Gluon: dq is summed in memory.

The split backward computes the scores twice, for dq and again for dk and dv: seven products. Here a
program walks a head's blocks of 128 keys one after the other, and each block with all queries:

                 queries, tiles of 64 ->
              +------+------+------+------+--
    keys  0   |  0   |  1   |  2   |  3   |     group 0:  64 keys, dq of even tiles
    block 0   |      |      |      |      |     group 1:  64 keys, dq of odd tiles
              +------+------+------+------+--
    block 1   | dq += ds k, by TMA's reduce-add into the program's fp32 workspace
              +------+------+------+------+--
    last      | dq = workspace + ds k, written in the tensors' dtype

    s^T = k q^T    dp^T = v dout^T    dv += p^T dout    dk += ds^T q    dq = ds k

Two groups of four warps, `_grads`, own 64 keys each. p and ds go from registers into dv and dk; ds
goes through shared memory too, where the group whose turn it is multiplies it by all 128 keys. At
D > 64 both groups do so for each tile, by half of k's columns each: beside dk and dv of 128 columns
a whole tile of dq has no registers (`Rings.WIDE`).

One warp, `_load`, fetches by TMA; two, `_deltas`, make delta = rowsum(out * dout) a head ahead. It
goes through memory, so that tiles of it come by TMA as those of lse do.

    full, empty[slot]         a query tile's q, dout, lse, delta are here; both groups are done
    kv_full, kv_empty[slot]   the same of a block of keys and values
    made[i]                   both groups' ds of a pair's i-th query tile are there
    summed[group]             what the blocks before have added to the group's tile of dq is back
    ready[pair], seen         delta of two query tiles is made; the loader has seen all of a head

No barrier says that ds has been multiplied: before a group stores the next ds in the same place, it
has waited for `made` of the pair's other tile, where the other group arrives after that product.

Deterministic: one thread adds to an address, in the order of the key blocks, since it waits for all
its adds to be done (`_wait_written`; of .read alone a later add could overtake) between two blocks.

Heads are dealt whole, round by round, to as many programs as SMs. What the last round leaves over
is dealt by key blocks: a program's share of a head is summed in a workspace of its own, and
`_sum_parts_kernel` adds the shares in order (`Plan`).

Of q, k, v in any strides that TMA takes, without mask and dropout. Bias sums: backward_pingpong.py.
Gluon has no interpreter: tests/machine/device runs the PTX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.gluon import (
    add,
    fence,
    fetch,
    gl,
    gluon,
    mbarrier,
    multiply,
    multiply_wait,
    put,
    store_wait,
    sync_warps,
    tensor_map,
)
from ...runtime.triton import ANY_BATCH, bind_launch, constant, tl, triton
from ..common.barriers import make_barriers, parity
from .backward_pingpong import NAN
from .forward_pingpong import TILE, _matrix, _tiles
from .tiles import LOG2_E, ROW_PAD, HeadStrides

MOST_PAIRS = constant(32)  # of query tiles: T <= 4096
SUM_ROWS = constant(8)  # of bias sums a sample: of each warp, or of each eighth of the queries
REGISTERS = constant((232, 40, 40))  # of the second group, of `_deltas`, of `_load`
REGISTERS_NARROW = constant((208, 88, 88))  # D <= 32, where `_deltas` has more rows at once


class Tiles(NamedTuple):
    """Shared memory, in tiles of 64 rows."""

    q: Any
    do: Any
    k: Any  # two a block
    v: Any
    lse: Any
    delta: Any
    ds: Any  # (64 keys, 64 queries), by turn and group
    dq: Any  # fp32, one a group, two at WIDE; dk and dv leave through it too


class Barriers(NamedTuple):
    full: Any
    empty: Any
    kv_full: Any
    kv_empty: Any
    made: Any
    summed: Any
    ready: Any
    seen: Any


class Grads(NamedTuple):
    """Maps of what is written, (B, T, H, D); of `space`, the workspaces, (spaces, T, 1, D) fp32."""

    dq: Any
    dk: Any
    dv: Any
    space: Any


class RowPtrs(NamedTuple):
    delta_ptr: Any
    partial_ptr: Any  # None: no bias sums, as at D > 64


class Rings(NamedTuple):
    """Slots of the ring of queries and of that of keys; the form for D > 64."""

    QUERIES: Any
    KEYS: Any
    WIDE: Any  # k, v stay in shared memory; a group makes half the columns of each tile of dq


class Own(NamedTuple):
    """What a group makes of dq: of a query tile all columns, or half of them (`Rings.WIDE`)."""

    tile: Any
    column: Any
    is_first: Any  # of a block of keys
    buffer: Any


class Item(NamedTuple):
    """One head of a program, the n-th, or a part of it."""

    n: Any
    head: Any
    first: Any  # key block
    end: Any
    space: Any
    is_whole: Any  # dq is written here


class Work(NamedTuple):
    """Sizes. Given, not computed: what all roles would compute alike would be kept, and spill."""

    programs: Any
    num_whole: Any  # heads that are dealt whole
    blocks_in_parts: Any  # key blocks of the others
    blocks: Any  # of 128 keys a head, pairs of query tiles
    H: Any
    T: Any
    C: Any  # H D
    row: Any  # of lse and delta: T, padded


@gluon.jit
def _share(work):
    """Of the key blocks of heads dealt in parts those of this program: first, end."""
    first = gl.program_id(0) * work.blocks_in_parts // work.programs
    return first, (gl.program_id(0) + 1) * work.blocks_in_parts // work.programs


@gluon.jit
def _own_whole(work):
    return gl.cdiv(work.num_whole - gl.program_id(0), work.programs)


@gluon.jit
def _num_items(work):
    """Heads of this program: whole ones, then parts."""
    first, end = _share(work)
    parts = gl.where(first < end, (end - 1) // work.blocks + 1 - first // work.blocks, 0)
    return _own_whole(work) + parts


@gluon.jit
def _item(n, work):
    """The program's n-th head, its first and end key block there, and its workspace for dq."""
    blocks = work.blocks
    first, end = _share(work)
    part = n - _own_whole(work)
    if part < 0:
        head = gl.program_id(0) + n * work.programs
        space = gl.program_id(0) + first // blocks
        first = first * 0
        end = blocks
    else:
        head = first // blocks + part  # of those in parts
        space = gl.program_id(0) + head  # another for each part of a head
        end = gl.minimum(end - head * blocks, blocks)
        first = gl.maximum(first - head * blocks, 0)
        head += work.num_whole
    return head, first, end, space


@gluon.jit
def _load(q, k, v, dout, lse, delta, tiles, barriers, work, RINGS: gl.constexpr):
    """Fetch what each key block reads, as slots of the rings are free."""
    step = 0
    passed = 0
    for n in range(_num_items(work)):
        head, first, end, _ = _item(n, work)
        b, h = head // work.H, head % work.H
        for block in range(first, end):
            slot = passed % RINGS.KEYS
            mbarrier.wait(barriers.kv_empty.index(slot), parity(passed // RINGS.KEYS + 1))
            ready = barriers.kv_full.index(slot)
            mbarrier.expect(ready, 4 * q.block_type.nbytes)
            for i in gl.static_range(2):
                at = [b, (2 * block + i) * TILE, h, 0]
                fetch(k, at, ready, tiles.k.index(2 * slot + i))
                fetch(v, at, ready, tiles.v.index(2 * slot + i))
            passed += 1
            for tile in range(2 * work.blocks):
                if (block == first) & (tile % 2 == 0):
                    mbarrier.wait(barriers.ready.index(tile // 2), parity(n))
                slot = step % RINGS.QUERIES
                mbarrier.wait(barriers.empty.index(slot), parity(step // RINGS.QUERIES + 1))
                ready = barriers.full.index(slot)
                mbarrier.expect(ready, 2 * (q.block_type.nbytes + lse.block_type.nbytes))
                fetch(q, [b, tile * TILE, h, 0], ready, tiles.q.index(slot))
                fetch(dout, [b, tile * TILE, h, 0], ready, tiles.do.index(slot))
                fetch(lse, [head, tile * TILE], ready, tiles.lse.index(slot))
                fetch(delta, [head, tile * TILE], ready, tiles.delta.index(slot))
                step += 1
            if block == first:
                mbarrier.arrive(barriers.seen.index(0), count=1)


@gluon.jit
def _store_do_sums(sums, ptr, none, stride, D: gl.constexpr):
    """v's part of a head's bias sums: in the first of its rows, 0 or NaN in the others."""
    BLOCK_D: gl.constexpr = sums.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, BLOCK_D // 32], [1, 32], [2, 1], [1, 0])
    row = none + gl.arange(0, SUM_ROWS, gl.SliceLayout(1, layout))[:, None]
    offs_d = none + gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))[None, :]
    sums = gl.convert_layout(sums, gl.SliceLayout(0, layout))[None, :]
    sums = gl.where(row == 0, sums, sums * 0.0)
    gl.store(ptr + row * stride + offs_d, sums, mask=(offs_d < D) & (row >= 0))


@gluon.jit
def _deltas(rows, do, out_ptr, barriers, work, D: gl.constexpr, BLOCK_D: gl.constexpr):
    """delta of each head, tile by tile, and v's part of the bias sums."""
    stride = do[1]
    LANES: gl.constexpr = BLOCK_D // 8  # of a row
    PASS: gl.constexpr = 64 // LANES  # rows at once
    ROWS: gl.constexpr = 2 * PASS if rows.partial_ptr is None else PASS  # sums take registers
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [2, 1], [1, 0])
    for n in range(_num_items(work)):
        head, _, _, _ = _item(n, work)
        b, h = (head // work.H).to(gl.int64), head % work.H
        delta_ptr = rows.delta_ptr + head.to(gl.int64) * work.row
        do_ptr = do[0] + b * stride.b + h.to(gl.int64) * stride.h
        out_row = out_ptr + (b * work.T * work.H + h) * D
        sums = gl.zeros((PASS, BLOCK_D), gl.float32, layout)
        mbarrier.wait(barriers.seen.index(0), parity(n + 1))
        for start in range(0, work.T, ROWS):
            none = start >> 30  # as in `_key_block`
            at = start.to(gl.int64)  # pyright: ignore[reportAttributeAccessIssue]
            offs = none + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            offs_d = none * 8 + gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))[None, :]
            inside = (offs < work.T - start)[:, None] & (offs_d < D)
            x_ptrs = do_ptr + at * stride.t + (offs[:, None] * stride.t + offs_d)
            y_ptrs = out_row + at * work.C + (offs[:, None] * work.C + offs_d)
            x_ptrs = gl.multiple_of(gl.max_contiguous(x_ptrs, [1, 8]), [1, 16])
            y_ptrs = gl.multiple_of(gl.max_contiguous(y_ptrs, [1, 8]), [1, 16])
            x = gl.load(x_ptrs, mask=inside, other=0.0).to(gl.float32)
            y = gl.load(y_ptrs, mask=inside, other=0.0)
            delta = gl.sum(x * y.to(gl.float32), axis=1)
            gl.store(delta_ptr + start + offs, delta, mask=offs < work.row - start)
            if rows.partial_ptr is not None:  # NaN or 0: where out is not finite, nor is lse
                x += (delta * 0.0)[:, None]
                sums += x
            end = start + ROWS
            if (end % (2 * TILE) == 0) | (end >= work.T):
                _each_thread("fence.proxy.async;", 2)  # TMA reads delta
                sync_warps()
                mbarrier.arrive(barriers.ready.index(start // (2 * TILE)), count=1)
        if rows.partial_ptr is not None:
            partial_ptr = rows.partial_ptr + b * SUM_ROWS * 3 * work.C + (2 * work.H + h) * D
            _store_do_sums(gl.sum(sums, axis=0), partial_ptr, n >> 30, 3 * work.C, D)


@gluon.jit
def _each_thread(assembly: gl.constexpr, WARPS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lanes = gl.arange(0, WARPS * 32, layout)
    text: gl.constexpr = assembly + " mov.b32 $0, $1;"
    gl.inline_asm_elementwise(text, "=r,r", [lanes], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _wait_written():
    """Until the group's stores and adds by TMA are in memory, where TMA may read them."""
    _each_thread("cp.async.bulk.wait_group 0; fence.proxy.async;", 4)
    sync_warps()


@gluon.jit
def _pass_on(x, out, at, buffer):
    """A tile to global memory, through the buffer, of which nothing is read any more."""
    _matrix(buffer).store(x.to(out.dtype))
    fence()
    put(out, at, buffer)


@gluon.jit
def _dq_product(tiles, ds, pair, COLUMN: gl.constexpr, COLUMNS: gl.constexpr):
    """Columns of dq of a query tile, of all keys of a block, pending.

    ds, pair: where both tiles of ds and of k begin.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    dq = gl.zeros((TILE, COLUMNS), gl.float32, layout)
    for half in gl.static_range(2):
        by_query = tiles.ds.index(ds + half).permute((1, 0))
        k = _matrix(tiles.k.index(pair + half)).slice(COLUMN, COLUMNS, dim=1)
        dq = multiply(by_query, k, dq, use_acc=half > 0, is_async=True)
    return dq


@gluon.jit
def _own(
    tiles,
    pair,
    i: gl.constexpr,
    none,
    COLUMNS: gl.constexpr,
    WIDE: gl.constexpr,
    G: gl.constexpr,
):
    """What the group makes of the i-th query tile of a pair."""
    if WIDE:
        buffer = tiles.dq.index(2 * G + i + none)
        own = Own(2 * pair + i, G * COLUMNS, (pair == 0) & (i == 0), buffer)
    else:
        own = Own(2 * pair + i, 0, pair == 0, tiles.dq.index(G))
    return own


@gluon.jit
def _as_tiles(buffer, out):
    """A tile of fp32 as tiles of what `out` has."""
    shape: gl.constexpr = out.block_type.shape
    COUNT: gl.constexpr = 2 * buffer.shape[3] // shape[3]
    return buffer._reinterpret(out.dtype, [COUNT, 1, TILE, 1, shape[3]], out.layout)


@gluon.jit
def _wait_for_buffer(own, WIDE: gl.constexpr):
    """Until the tile of fp32 is free, one of two at WIDE, and before a block's first query tile
    until the block before has written all that it adds to dq."""
    if own.is_first:
        _wait_written()
    else:
        store_wait(1 if WIDE else 0)


@gluon.jit
def _ask_for_sum(grads, barriers, item, own, G: gl.constexpr, WIDE: gl.constexpr):
    """Fetch what the key blocks before the last have added to a query tile's dq."""
    if item.is_whole:
        _wait_for_buffer(own, WIDE)
        ready = barriers.summed.index(G)
        mbarrier.expect(ready, grads.space.block_type.nbytes)
        fetch(grads.space, [item.space, own.tile * TILE, 0, own.column], ready, own.buffer)


@gluon.jit
def _column_sums(x):
    """(4, D): each warp's."""
    return gl.sum(gl.reshape(x, (4, TILE // 4, x.shape[1])), axis=1)


@gluon.jit
def _add_sums(dq, partial_ptr, work, item, own, G: gl.constexpr, D: gl.constexpr):
    """q's part of a head's bias sums, a row for each warp, tile by tile; k's is 0 or NaN."""
    COLUMNS: gl.constexpr = dq.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 32], [1, 32], [4, 1], [1, 0])
    none = own.tile >> 30  # as in `_key_block`
    warp = none + G * 4 + gl.arange(0, 4, gl.SliceLayout(1, layout))
    row = (item.head // work.H * SUM_ROWS + warp).to(gl.int64)[:, None] * 3 * work.C
    offs_d = none + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))[None, :]
    ptrs = partial_ptr + row + (item.head % work.H) * D + offs_d
    inside = (offs_d < D) & (warp >= 0)[:, None]
    sums = gl.convert_layout(_column_sums(dq), layout)
    sums += gl.load(ptrs, mask=inside & (own.tile > 1), other=0.0)  # what this thread has stored
    gl.store(ptrs, sums, mask=inside)
    gl.store(ptrs + work.C, sums * 0.0, mask=inside)


@gluon.jit
def _write_dq(
    dq,
    grads,
    rows,
    barriers,
    work,
    item,
    own,
    uses,
    scale,
    G: gl.constexpr,
    D: gl.constexpr,
):
    """The sum of all key blocks, in the tensors' dtype."""
    mbarrier.wait(barriers.summed.index(G), parity(uses))
    dq = (dq + _matrix(own.buffer).load(dq.type.layout)) * scale
    if rows.partial_ptr is not None:
        _add_sums(dq, rows.partial_ptr, work, item, own, G, D)
    at = [item.head // work.H, own.tile * TILE, item.head % work.H, own.column]
    _pass_on(dq, grads.dq, at, _as_tiles(own.buffer, grads.dq).index(0))


@gluon.jit
def _add_dq(dq, grads, item, own, block, WIDE: gl.constexpr):
    """The first key block of an item stores its part of dq, the others add theirs."""
    _wait_for_buffer(own, WIDE)
    _matrix(own.buffer).store(dq)
    fence()
    at = [item.space, own.tile * TILE, 0, own.column]
    if block == item.first:
        put(grads.space, at, own.buffer)
    else:
        add(grads.space, at, own.buffer)


@gluon.jit
def _key_block(
    grads,
    rows,
    tiles,
    barriers,
    work,
    item,
    block,
    passed,
    uses,
    scale_log2,
    D: gl.constexpr,
    RINGS: gl.constexpr,
    LAST: gl.constexpr,
    G: gl.constexpr,
):
    """dk and dv of 64 keys; what a block adds to dq, of every other query tile.

    Args:
        passed: key blocks of this program before this one. uses: dq tiles that came back.
        LAST: of a head, whose keys past T are zeros; with them p need only be finite.
    """
    BLOCK_D: gl.constexpr = grads.dk.block_type.shape[3]
    COLUMNS: gl.constexpr = grads.space.block_type.shape[3]
    dtype: gl.constexpr = grads.dk.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    pairs = work.blocks
    slot_kv = passed % RINGS.KEYS
    mbarrier.wait(barriers.kv_full.index(slot_kv), parity(passed // RINGS.KEYS))
    if not RINGS.WIDE:
        k = _matrix(tiles.k.index(2 * slot_kv + G)).load(operand)
        v = _matrix(tiles.v.index(2 * slot_kv + G)).load(operand)
    dk = gl.zeros((TILE, BLOCK_D), gl.float32, wide)
    dv = gl.zeros((TILE, BLOCK_D), gl.float32, wide)
    for pair in range(pairs):
        turn = passed * pairs + pair
        for i in gl.static_range(2):
            # 0, but the compiler cannot take what depends on it out of the loop, nor, at WIDE,
            # keep it for the pair's other tile
            none = (turn + RINGS.WIDE * i) >> 30
            slot, phase = turn * 2 % RINGS.QUERIES + i + none, parity(turn * 2 // RINGS.QUERIES)
            mbarrier.wait(barriers.full.index(slot), phase)
            q, do = _matrix(tiles.q.index(slot)), _matrix(tiles.do.index(slot))
            if RINGS.WIDE:
                k = _matrix(tiles.k.index(2 * slot_kv + G + none))
                v = _matrix(tiles.v.index(2 * slot_kv + G + none))
            zeros = gl.zeros((TILE, TILE), gl.float32, layout)
            s = multiply(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp = multiply(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = multiply_wait(1, deps=[s])
            x = s * scale_log2 - tiles.lse.index(slot).load(layout)
            if LAST:
                x = gl.minimum(x, 0.0, propagate_nan=NAN)
            p = gl.exp2(x)
            own = _own(tiles, pair, i, none, COLUMNS, RINGS.WIDE, G)
            if LAST and (RINGS.WIDE or i == G):
                _ask_for_sum(grads, barriers, item, own, G, RINGS.WIDE)
            if RINGS.WIDE:  # p and dp become 16 bits at once, for want of registers
                dp = multiply_wait(0, deps=[dp])
                ds = (p * (dp - tiles.delta.index(slot).load(layout))).to(dtype)
            else:
                delta = tiles.delta.index(slot).load(layout)
            p_operand = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
            dv = multiply(p_operand, do, dv, is_async=True)
            if not RINGS.WIDE:
                dp = multiply_wait(1, deps=[dp])
                ds = (p * (dp - delta)).to(dtype)
            tiles.ds.index(2 * i + G + none).store(ds)
            fence()
            mbarrier.arrive(barriers.made.index(i), count=1)
            ds_operand = gl.convert_layout(ds, operand, assert_trivial=True)
            dk = multiply(ds_operand, q, dk, is_async=True)
            if RINGS.WIDE or i == G:
                mbarrier.wait(barriers.made.index(i), parity(turn))
                dq = _dq_product(
                    tiles, 2 * i + none, 2 * slot_kv + none, RINGS.WIDE * G * COLUMNS, COLUMNS
                )
                dk, dv, dq, _, _ = multiply_wait(0, deps=[dk, dv, dq, p_operand, ds_operand])
                mbarrier.arrive(barriers.empty.index(slot), count=1)
                if LAST:
                    if item.is_whole:
                        scale = scale_log2 / LOG2_E
                        _write_dq(dq, grads, rows, barriers, work, item, own, uses, scale, G, D)
                        uses += 1
                    else:
                        _add_dq(dq, grads, item, own, block, RINGS.WIDE)
                else:
                    _add_dq(dq, grads, item, own, block, RINGS.WIDE)
            else:
                dk, dv, _, _ = multiply_wait(0, deps=[dk, dv, p_operand, ds_operand])
                mbarrier.arrive(barriers.empty.index(slot), count=1)
    mbarrier.arrive(barriers.kv_empty.index(slot_kv), count=1)
    at = [item.head // work.H, (2 * block + G) * TILE, item.head % work.H, 0]
    store_wait(0)
    if RINGS.WIDE:
        dv_out = _as_tiles(tiles.dq.index(2 * G), grads.dv).index(0)
        dk_out = _as_tiles(tiles.dq.index(2 * G + 1), grads.dk).index(0)
    else:
        dv_out = _as_tiles(tiles.dq.index(G), grads.dv).index(0)
        dk_out = _as_tiles(tiles.dq.index(G), grads.dk).index(1)
    _pass_on(dv, grads.dv, at, dv_out)
    _pass_on(dk * (scale_log2 / LOG2_E), grads.dk, at, dk_out)
    return passed + 1, uses


@gluon.jit
def _grads(
    grads,
    rows,
    tiles,
    barriers,
    work,
    scale_log2,
    D: gl.constexpr,
    RINGS: gl.constexpr,
    G: gl.constexpr,
):
    """The group's part of each head of the program."""
    passed = 0
    uses = 0
    for n in range(_num_items(work)):
        head, first, end, space = _item(n, work)
        is_whole = (first == 0) & (end == work.blocks)
        item = Item(n, head, first, end, space, is_whole)
        for block in range(first, end - (end == work.blocks).to(gl.int32)):
            passed, uses = _key_block(
                grads,
                rows,
                tiles,
                barriers,
                work,
                item,
                block,
                passed,
                uses,
                scale_log2,
                D,
                RINGS,
                False,
                G,
            )
        if end == work.blocks:
            passed, uses = _key_block(
                grads,
                rows,
                tiles,
                barriers,
                work,
                item,
                end - 1,
                passed,
                uses,
                scale_log2,
                D,
                RINGS,
                True,
                G,
            )
    store_wait(0)


@gluon.jit(**ANY_BATCH)
def _attention_bwd_fused_dq_kernel(
    dq,
    dk,
    dv,
    space,
    partial_ptr,
    lse,
    delta,
    q,
    k,
    v,
    dout,
    delta_ptr,
    do_ptr,
    out_ptr,
    programs,
    num_whole,
    blocks_in_parts,
    blocks,
    C,
    scale,
    D: gl.constexpr,
):
    WIDE: gl.constexpr = D > 64
    QUERIES: gl.constexpr = 2 if WIDE else 4
    KEYS: gl.constexpr = 1 if WIDE else 2
    RINGS: gl.constexpr = Rings(QUERIES, KEYS, WIDE)
    BLOCK_D: gl.constexpr = q.block_type.shape[3]
    scores: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, TILE], q.dtype)
    tiles = Tiles(
        _tiles(q, QUERIES),
        _tiles(q, QUERIES),
        _tiles(q, 2 * KEYS),
        _tiles(q, 2 * KEYS),
        gl.allocate_shared_memory(gl.float32, [QUERIES, 1, TILE], lse.layout),
        gl.allocate_shared_memory(gl.float32, [QUERIES, 1, TILE], lse.layout),
        gl.allocate_shared_memory(q.dtype, [4, TILE, TILE], scores),
        _tiles(space, 4 if WIDE else 2),
    )
    barriers = Barriers(
        make_barriers(QUERIES, 1),
        make_barriers(QUERIES, 2),
        make_barriers(KEYS, 1),
        make_barriers(KEYS, 2),
        make_barriers(2, 2),
        make_barriers(2, 1),
        make_barriers(MOST_PAIRS, 1),
        make_barriers(1, 1),
    )
    grads, rows = Grads(dq, dk, dv, space), RowPtrs(delta_ptr, partial_ptr)
    stride_b, stride_t, stride_h = dout.strides[0], dout.strides[1], dout.strides[2]
    do = do_ptr, HeadStrides(stride_b, stride_t.to(gl.int32), stride_h)
    work = Work(
        programs, num_whole, blocks_in_parts, blocks, q.shape[2], q.shape[1], C, lse.shape[1]
    )
    scale_log2 = scale * LOG2_E
    fence()  # TMA counts bytes at the barriers
    gl.warp_specialize(
        [
            (_grads, (grads, rows, tiles, barriers, work, scale_log2, D, RINGS, 0)),
            (_grads, (grads, rows, tiles, barriers, work, scale_log2, D, RINGS, 1)),
            (_deltas, (rows, do, out_ptr, barriers, work, D, BLOCK_D)),
            (_load, (q, k, v, dout, lse, delta, tiles, barriers, work, RINGS)),
        ],
        [4, 2, 1],
        REGISTERS_NARROW if BLOCK_D <= 32 else REGISTERS,
    )


@triton.jit(**ANY_BATCH)
def _attention_bwd_sum_parts_kernel(
    dq_ptr,
    partial_ptr,
    space_ptr,
    num_heads,
    num_whole,
    H,
    T,
    programs,
    blocks,
    stride_dq_t,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PARTS: tl.constexpr,
):
    """dq of the heads dealt by key blocks: an eighth of the queries of one, the parts in order."""
    part, eighth = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    total = (num_heads - num_whole) * blocks
    first = ((part * blocks + 1) * programs - 1) // total  # the program with its first block
    last = ((part + 1) * blocks * programs - 1) // total
    if first == last:  # which has written it
        return
    head = num_whole + part
    b, h = (head // H).to(tl.int64), head % H
    length = tl.cdiv(T, PARTS)
    offs_d = tl.arange(0, BLOCK_D)
    sums = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(eighth * length, min((eighth + 1) * length, T), BLOCK_T):
        offs_t = start + tl.arange(0, BLOCK_T)
        inside = (offs_t < min((eighth + 1) * length, T))[:, None] & (offs_d < D)[None, :]
        dq = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for space in range(first + part, last + part + 1):
            wide = space.to(tl.int64)  # pyright: ignore[reportAttributeAccessIssue]
            rows = (wide * T + offs_t)[:, None] * D
            dq += tl.load(space_ptr + rows + offs_d[None, :], mask=inside, other=0.0)
        dq *= scale
        sums += dq
        ptrs = dq_ptr + (b * T + offs_t)[:, None] * stride_dq_t + h * D + offs_d[None, :]
        tl.store(ptrs, dq.to(dq_ptr.dtype.element_ty), mask=inside)
    if partial_ptr is not None:
        x = tl.sum(sums, axis=0)
        row = (b * PARTS + eighth) * 3 * (H * D) + h * D
        tl.store(partial_ptr + row + offs_d, x, mask=offs_d < D)
        tl.store(partial_ptr + row + H * D + offs_d, x * 0.0, mask=offs_d < D)


class Plan(NamedTuple):
    """How heads are dealt: programs, heads dealt whole, workspaces."""

    programs: int
    num_whole: int
    spaces: int


def _num_blocks(T: int) -> int:
    return -(-T // (2 * TILE.value))


def plan(num_heads: int, T: int, num_sms: int) -> Plan:
    """Whole heads to each SM; the rest by key blocks where that saves a twentieth of the time.

    300 heads of 9 blocks on 132 SMs: 264 whole, 36 in 132 parts: 18 + 3 blocks one after the other
    instead of 27.
    """
    blocks = _num_blocks(T)
    rounds, rest = divmod(num_heads, num_sms)
    whole, dealt = rounds * blocks, -(-rest * blocks // num_sms)
    if rest and 20 * (whole + dealt) <= 19 * (whole + blocks):
        programs = num_sms if rounds else min(num_sms, rest * blocks)
        return Plan(programs, rounds * num_sms, programs + rest)
    programs = min(num_heads, num_sms)
    return Plan(programs, num_heads, programs)


def _map(x: Tensor, strides: Sequence[int], shape: Sequence[int], most: int = 128) -> Any:
    """Of x (B, T, H, D) in these strides: tiles of one head, as wide as a power of two, at `most`
    so many columns."""
    return tensor_map(x, shape, strides, (1, TILE.value, 1, min(most, _block_d(shape[3]))))


def _block_d(D: int) -> int:
    return max(32, triton.next_power_of_2(D))


def _launches(
    shape: tuple[int, ...], dq_stride: int, scale: float, dealt: Plan
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Of the kernel, and of the one that sums the parts of dq."""
    B, T, H, D = shape
    num_heads, blocks = B * H, _num_blocks(T)
    launch = bind_launch(
        _attention_bwd_fused_dq_kernel,
        (dealt.programs,),
        dealt.programs,
        dealt.num_whole,
        (num_heads - dealt.num_whole) * blocks,
        blocks,
        H * D,
        scale,
        D=D,
        num_warps=4,
    )
    sum_parts = bind_launch(
        _attention_bwd_sum_parts_kernel,
        ((num_heads - dealt.num_whole) * SUM_ROWS.value,),
        num_heads,
        dealt.num_whole,
        H,
        T,
        dealt.programs,
        blocks,
        dq_stride,
        scale,
        D=D,
        BLOCK_D=_block_d(D),
        BLOCK_T=2048 // _block_d(D),
        PARTS=SUM_ROWS.value,
        num_warps=4,
    )
    return launch, sum_parts


def bwd_fused_dq(
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    dq_stride: int,
    dk_stride: int,
    scale: float,
    num_sms: int,
) -> Callable[..., None]:
    """The launch of the backward, called with dq, dk, dv, dbias (8 B, 3 H D) fp32 or None, dout, q,
    k, v, out, lse and delta, both in padded rows; delta is filled.

    Args:
        shape: of out, (B, T, H, D), contiguous. strides: of dout, q, k, v, all above 0.
        dq_stride, dk_stride: between tokens of dq, of dk and dv, whose heads are D apart.
    """
    B, T, H, D = shape
    num_heads = B * H
    dealt = plan(num_heads, T, num_sms)
    launch, sum_parts = _launches(shape, dq_stride, scale, dealt)

    def run(
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dbias: Tensor | None,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        delta: Tensor,
    ) -> None:
        space = torch.empty((dealt.spaces, T, D), dtype=torch.float32, device=q.device)
        rows = num_heads, -(-T // ROW_PAD.value) * ROW_PAD.value
        lse, delta = (x.as_strided(rows, (rows[1], 1)) for x in (lse, delta))  # the padding too
        outputs = ((dq, dq_stride, 64), (dk, dk_stride, 128), (dv, dk_stride, 128))
        inputs = zip((q, k, v, dout), (*strides[1:], strides[0]), strict=True)
        launch(
            *(_map(x, (T * stride, stride, D, 1), shape, most) for x, stride, most in outputs),
            _map(space, (T * D, D, D, 1), (dealt.spaces, T, 1, D), 64),
            dbias,
            *(tensor_map(x, rows, (rows[1], 1), (1, TILE.value)) for x in (lse, delta)),
            *(_map(x, each, shape) for x, each in inputs),
            delta,
            dout,
            out,
        )
        if dealt.num_whole < num_heads:
            sum_parts(dq, dbias, space)

    return run
