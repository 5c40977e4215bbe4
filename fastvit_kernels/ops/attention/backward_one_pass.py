"""Flash attention, backward in one pass, where the dq of a whole head fits in registers.

One program keeps q, dout and dq of a head, walks its keys once and writes each tile's dk and dv as
it leaves it: five products a tile instead of seven, and everything is read once. Products that need
p^T or ds^T are computed transposed (dv^T = dout^T p): only loaded tiles are transposed, never a
computed one (a miscompile reported on Hopper).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...runtime.triton import ANY_BATCH, tl, triton
from .samples import head_rows, packed_rows, packing_of, row_ptr, sample_of
from .tiles import (
    fence_async,
    keeps_invariants,
    load_part,
    padded,
    scores_of,
    softmax_grad,
    store_do_sum,
    store_dq_sum,
    store_part,
    transposed_tile_ptrs,
)


class Part(NamedTuple):
    """What a head keeps of the queries from start_q on, whose scores are alive together."""

    q: Any
    do: Any
    lse: Any
    delta: Any
    start_q: Any


class Tiles(NamedTuple):
    """Sizes: keys go by in tiles and a tail, queries stay in up to three parts."""

    BLOCK_KV: Any
    TAIL_KV: Any
    ONE_KV: Any  # one tile holds all keys
    PART0: Any
    PART1: Any
    PART2: Any
    RAGGED_Q: Any  # the last part is not full
    HEADS: Any  # of a program, one after the other
    HAS_DBIAS: Any


@triton.jit
def _load_part_of_queries(
    queries, start_q, T_q, FORM: tl.constexpr, PART: tl.constexpr, CHECK_Q: tl.constexpr
):
    q_rows, do_rows, out_rows, lse_ptr = queries
    q = load_part(q_rows, start_q, T_q, FORM.D, PART, 0, FORM.BLOCK_D0, CHECK_Q)
    do = load_part(do_rows, start_q, T_q, FORM.D, PART, 0, FORM.BLOCK_D0, CHECK_Q)
    out = load_part(out_rows, start_q, T_q, FORM.D, PART, 0, FORM.BLOCK_D0, CHECK_Q)
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), axis=1)
    offs_q = start_q + tl.arange(0, PART)
    # lse +inf makes p of a query that is not there exactly 0
    lse = tl.load(lse_ptr + offs_q, mask=offs_q < padded(T_q), other=float("inf"))
    return Part(q, do, lse, delta, start_q)


@triton.jit
def _one_pass_part(dq, part, k, v, start_kv, scores, FORM: tl.constexpr, CHECK_KV: tl.constexpr):
    """The five products of one key tile with one part of the queries, scores as (q, kv)."""
    s = tl.dot(part.q, tl.trans(k), input_precision=FORM.PRECISION)
    dp = tl.dot(part.do, tl.trans(v), input_precision=FORM.PRECISION)
    start_q = part.start_q
    p, ds = softmax_grad(
        s, dp, part.lse, part.delta, start_q, start_kv, scores, FORM, CHECK_KV, True
    )
    ds = ds.to(k.dtype)
    dv_t = tl.dot(tl.trans(part.do), p.to(v.dtype), input_precision=FORM.PRECISION)
    dk_t = tl.dot(tl.trans(part.q), ds, input_precision=FORM.PRECISION)
    dq = tl.dot(ds, k, dq, input_precision=FORM.PRECISION)
    return dk_t, dv_t, dq


@triton.jit
def _one_pass_key_tile(
    dq,
    parts,
    keys,
    start_kv,
    scores,
    FORM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CHECK_KV: tl.constexpr,
):
    """dk and dv of one key tile, written; dq of all parts, with what the tile adds."""
    dk_rows, dv_rows, k_rows, v_rows = keys
    T_kv = scores.T_kv
    BLOCK_D: tl.constexpr = FORM.BLOCK_D0
    k = load_part(k_rows, start_kv, T_kv, FORM.D, BLOCK_KV, 0, BLOCK_D, CHECK_KV)
    v = load_part(v_rows, start_kv, T_kv, FORM.D, BLOCK_KV, 0, BLOCK_D, CHECK_KV)
    kv_index = (start_kv + tl.arange(0, BLOCK_KV))[None, :]
    fence_async(scores, FORM)
    dk_t, dv_t, dq_0 = _one_pass_part(dq[0], parts[0], k, v, start_kv, scores, FORM, CHECK_KV)
    new_dq = (dq_0,)
    for i in tl.static_range(1, len(parts)):
        dk_i, dv_i, dq_i = _one_pass_part(dq[i], parts[i], k, v, start_kv, scores, FORM, CHECK_KV)
        # By fma: Triton makes of a plain sum the accumulator of the product. The products of the
        # parts are then a chain, which every warp computes and which goes through shared memory.
        dk_t, dv_t = tl.fma(dk_t, 1.0, dk_i), tl.fma(dv_t, 1.0, dv_i)
        new_dq += (dq_i,)
    mask = (tl.arange(0, BLOCK_D)[:, None] < FORM.D) & (kv_index < T_kv)
    dk_t_ptrs = transposed_tile_ptrs(dk_rows, start_kv, BLOCK_KV, BLOCK_D)
    dv_t_ptrs = transposed_tile_ptrs(dv_rows, start_kv, BLOCK_KV, BLOCK_D)
    tl.store(dk_t_ptrs, (dk_t * scores.scale).to(dk_rows.ptr.dtype.element_ty), mask=mask)
    tl.store(dv_t_ptrs, dv_t.to(dv_rows.ptr.dtype.element_ty), mask=mask)
    return new_dq


@triton.jit
def _store_do_sums(dbias_ptr, parts, T_q, H, FORM: tl.constexpr):
    for i in tl.static_range(len(parts)):
        part = parts[i]
        ptr, left = dbias_ptr + i * 3 * H * FORM.D, T_q - part.start_q
        store_do_sum(ptr, part.do, part.lse, left, H, FORM.D, 0, FORM.BLOCK_D0)


@triton.jit
def _parts(queries, T_q, FORM: tl.constexpr, TILES: tl.constexpr):
    """All queries of a head, and a dq of zeros for each part."""
    PART0: tl.constexpr = TILES.PART0
    PART1: tl.constexpr = TILES.PART1
    PART2: tl.constexpr = TILES.PART2
    RAGGED: tl.constexpr = TILES.RAGGED_Q
    BLOCK_D: tl.constexpr = FORM.BLOCK_D0
    ALL: tl.constexpr = FORM.VARLEN  # any part may be ragged
    CHECK0: tl.constexpr = ALL or (RAGGED and PART1 == 0)
    CHECK1: tl.constexpr = ALL or (RAGGED and PART2 == 0)
    part0 = _load_part_of_queries(queries, 0, T_q, FORM, PART0, CHECK0)
    dq0 = tl.zeros((PART0, BLOCK_D), dtype=tl.float32)
    if PART1 == 0:
        return (part0,), (dq0,)
    else:
        part1 = _load_part_of_queries(queries, PART0, T_q, FORM, PART1, CHECK1)
        dq1 = tl.zeros((PART1, BLOCK_D), dtype=tl.float32)
        if PART2 == 0:
            return (part0, part1), (dq0, dq1)
        else:
            part2 = _load_part_of_queries(queries, PART0 + PART1, T_q, FORM, PART2, RAGGED)
            dq2 = tl.zeros((PART2, BLOCK_D), dtype=tl.float32)
            return (part0, part1, part2), (dq0, dq1, dq2)


@triton.jit
def _one_pass_head(
    grads, inputs, strides, packing, head, H, scores, FORM: tl.constexpr, TILES: tl.constexpr
):
    """dq, dk, dv of one head, head = b * H + h, and row b of the partials of the bias gradient."""
    sample, scores = sample_of(packing, scores, head, H, FORM)
    if not FORM.VARLEN or scores.T_q > 0:
        _one_pass_sample(grads, inputs, strides, sample, H, scores, FORM, TILES)


@triton.jit
def _one_pass_sample(
    grads, inputs, strides, sample, H, scores, FORM: tl.constexpr, TILES: tl.constexpr
):
    T_q, T_kv = scores.T_q, scores.T_kv
    b, h = sample.b, sample.h
    dq_ptr, dk_ptr, dv_ptr, dbias_ptr = grads
    do_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr = inputs
    stride_dq_t, stride_dk_t, strides_in = strides
    stride_do, stride_q, stride_k, stride_v = strides_in
    dq_rows = packed_rows(dq_ptr, stride_dq_t, sample.first_q, sample, FORM.D)
    dk_rows = packed_rows(dk_ptr, stride_dk_t, sample.first_kv, sample, FORM.D)
    dv_rows = packed_rows(dv_ptr, stride_dk_t, sample.first_kv, sample, FORM.D)
    out_rows = packed_rows(out_ptr, H * FORM.D, sample.first_q, sample, FORM.D)
    do_rows, q_rows = head_rows(do_ptr, stride_do, sample), head_rows(q_ptr, stride_q, sample)
    k_rows, v_rows = head_rows(k_ptr, stride_k, sample), head_rows(v_ptr, stride_v, sample)
    queries = q_rows, do_rows, out_rows, row_ptr(lse_ptr, sample)
    keys = dk_rows, dv_rows, k_rows, v_rows
    parts, dq = _parts(queries, T_q, FORM, TILES)

    # By mma.sync dout's sums come after the one tile of keys: before, they cost its products
    # registers. After a loop they would keep dout alive, and so they do with wgmma.
    SUMS_LAST: tl.constexpr = TILES.ONE_KV and not keeps_invariants()
    if TILES.HAS_DBIAS:  # one pointer for both sums: b and h would take a register more in the loop
        dbias_ptr += (b * (len(parts) * 3) * H + h) * FORM.D
        if not SUMS_LAST:
            _store_do_sums(dbias_ptr, parts, T_q, H, FORM)
    BLOCK: tl.constexpr = TILES.BLOCK_KV
    TAIL: tl.constexpr = TILES.TAIL_KV
    if TILES.ONE_KV:
        dq = _one_pass_key_tile(dq, parts, keys, 0, scores, FORM, BLOCK, TAIL > 0)
        if TILES.HAS_DBIAS and SUMS_LAST:
            _store_do_sums(dbias_ptr, parts, T_q, H, FORM)
    else:
        full_kv = T_kv  # not rounded up where all tiles are in the loop: that would spill on sm_80
        if TAIL > 0 and TAIL < BLOCK:
            full_kv = T_kv // BLOCK * BLOCK
        tl.assume(full_kv > 0)  # with a way around the loop ptxas would wait for each wgmma
        for start_kv in tl.range(0, full_kv, BLOCK, disable_licm=keeps_invariants()):
            dq = _one_pass_key_tile(dq, parts, keys, start_kv, scores, FORM, BLOCK, TAIL == BLOCK)
        if TAIL > 0 and TAIL < BLOCK:
            dq = _one_pass_key_tile(dq, parts, keys, full_kv, scores, FORM, TAIL, True)
    D: tl.constexpr = FORM.D
    for i in tl.static_range(len(parts)):
        q, start_q, x = parts[i].q, parts[i].start_q, dq[i] * scores.scale
        store_part(dq_rows, x, start_q, T_q, D, q.shape[0], 0, FORM.BLOCK_D0)
        if TILES.HAS_DBIAS:
            sum_ptr = dbias_ptr + i * 3 * H * D
            store_dq_sum(sum_ptr, dq[i], scores.scale, H, D, 0, FORM.BLOCK_D0)


@triton.jit(**ANY_BATCH)
def _attention_bwd_one_pass_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    seed_ptr,
    cu_seqlens_ptr,
    num_heads,
    H,
    T_q,
    T_kv,
    total,
    stride_rows_h,
    stride_dq_t,
    stride_dk_t,
    strides,
    scale,
    keep,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
):
    packing = packing_of(cu_seqlens_ptr, total, stride_rows_h, FORM)
    scores = scores_of(None, None, seed_ptr, keep, T_q, T_kv, scale, FORM)
    grads = dq_ptr, dk_ptr, dv_ptr, dbias_ptr
    inputs = do_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr
    strides = stride_dq_t, stride_dk_t, strides
    first = tl.program_id(0) * TILES.HEADS
    if TILES.HEADS == 1:
        _one_pass_head(grads, inputs, strides, packing, first, H, scores, FORM, TILES)
    else:
        tl.assume(first < num_heads)
        last = tl.minimum(first + TILES.HEADS, num_heads)
        for i in tl.range(first, last, disable_licm=keeps_invariants()):
            head = tl.cast(i, tl.int32)
            _one_pass_head(grads, inputs, strides, packing, head, H, scores, FORM, TILES)
