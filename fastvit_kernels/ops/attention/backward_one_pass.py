"""Flash attention, backward in one pass, where the dq of a whole head fits in registers.

One program keeps q, dout and dq of a head, walks its keys once and writes each tile's dk and dv as
it leaves it: five products a tile instead of seven, and everything is read once. Products that need
p^T or ds^T are computed transposed (dv^T = dout^T p): only loaded tiles are transposed, never a
computed one (a miscompile reported on Hopper).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...runtime.triton import ANY_BATCH, tl, triton
from .samples import Packing, head_rows, packed_rows, row_ptr, sample_of
from .tiles import (
    Dropout,
    Heads,
    KernelConstants,
    Scores,
    fence_async,
    keeps_invariants,
    load_part,
    padded,
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


@triton.jit
def _load_part_of_queries(
    q_rows,
    do_rows,
    out_rows,
    lse_ptr,
    start_q,
    T_q,
    FORM: tl.constexpr,
    PART: tl.constexpr,
    CHECK_Q: tl.constexpr,
):
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
    p, ds = softmax_grad(
        s,
        dp,
        part.lse,
        part.delta,
        part.start_q,
        start_kv,
        scores,
        FORM,
        CHECK_KV,
        True,
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
    dk_rows,
    dv_rows,
    k_rows,
    v_rows,
    start_kv,
    scores,
    FORM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CHECK_KV: tl.constexpr,
):
    """dk and dv of one key tile, written; dq of all parts, with what the tile adds."""
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
        store_do_sum(
            dbias_ptr + i * 3 * H * FORM.D,
            part.do,
            part.lse,
            T_q - part.start_q,
            H,
            FORM.D,
            0,
            FORM.BLOCK_D0,
        )


@triton.jit
def _one_pass_head(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
    do,
    q,
    k,
    v,
    out_ptr,
    lse_ptr,
    packing,
    head,
    H,
    stride_dq_t,
    stride_dk_t,
    scores,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
):
    """dq, dk, dv of one head, head = b * H + h, and row b of the partials of the bias gradient."""
    sample, scores = sample_of(packing, scores, head, H, FORM)
    if not FORM.VARLEN or scores.T_q > 0:
        _one_pass_sample(
            dq_ptr,
            dk_ptr,
            dv_ptr,
            dbias_ptr,
            do,
            q,
            k,
            v,
            out_ptr,
            lse_ptr,
            sample,
            H,
            stride_dq_t,
            stride_dk_t,
            scores,
            FORM,
            TILES,
            HAS_DBIAS,
        )


@triton.jit
def _one_pass_sample(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dbias_ptr,
    do,
    q,
    k,
    v,
    out_ptr,
    lse_ptr,
    sample,
    H,
    stride_dq_t,
    stride_dk_t,
    scores,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
):
    T_q, T_kv = scores.T_q, scores.T_kv
    b, h = sample.b, sample.h
    dq_rows = packed_rows(dq_ptr, stride_dq_t, sample.first_q, sample, FORM.D)
    dk_rows = packed_rows(dk_ptr, stride_dk_t, sample.first_kv, sample, FORM.D)
    dv_rows = packed_rows(dv_ptr, stride_dk_t, sample.first_kv, sample, FORM.D)
    out_rows = packed_rows(out_ptr, H * FORM.D, sample.first_q, sample, FORM.D)
    do_rows, q_rows = head_rows(do, sample), head_rows(q, sample)
    k_rows, v_rows = head_rows(k, sample), head_rows(v, sample)
    lse_ptr = row_ptr(lse_ptr, sample)
    PART0: tl.constexpr = TILES.PART0
    PART1: tl.constexpr = TILES.PART1
    PART2: tl.constexpr = TILES.PART2
    RAGGED: tl.constexpr = TILES.RAGGED_Q
    ALL: tl.constexpr = FORM.VARLEN  # any part may be ragged
    part0 = _load_part_of_queries(
        q_rows, do_rows, out_rows, lse_ptr, 0, T_q, FORM, PART0, ALL or (RAGGED and PART1 == 0)
    )
    dq = (tl.zeros((PART0, FORM.BLOCK_D0), dtype=tl.float32),)
    if PART1 == 0:
        parts = (part0,)
    else:
        part1 = _load_part_of_queries(
            q_rows,
            do_rows,
            out_rows,
            lse_ptr,
            PART0,
            T_q,
            FORM,
            PART1,
            ALL or (RAGGED and PART2 == 0),
        )
        dq += (tl.zeros((PART1, FORM.BLOCK_D0), dtype=tl.float32),)
        if PART2 == 0:
            parts = (part0, part1)
        else:
            part2 = _load_part_of_queries(
                q_rows, do_rows, out_rows, lse_ptr, PART0 + PART1, T_q, FORM, PART2, RAGGED
            )
            dq += (tl.zeros((PART2, FORM.BLOCK_D0), dtype=tl.float32),)
            parts = (part0, part1, part2)

    # By mma.sync dout's sums come after the one tile of keys: before, they cost its products
    # registers. After a loop they would keep dout alive, and so they do with wgmma.
    SUMS_LAST: tl.constexpr = TILES.ONE_KV and not keeps_invariants()
    if HAS_DBIAS:  # one pointer for both sums: b and h would take a register more in the loop
        dbias_ptr += (b * (len(parts) * 3) * H + h) * FORM.D
        if not SUMS_LAST:
            _store_do_sums(dbias_ptr, parts, T_q, H, FORM)
    BLOCK_KV: tl.constexpr = TILES.BLOCK_KV
    TAIL_KV: tl.constexpr = TILES.TAIL_KV
    if TILES.ONE_KV:
        dq = _one_pass_key_tile(
            dq, parts, dk_rows, dv_rows, k_rows, v_rows, 0, scores, FORM, BLOCK_KV, TAIL_KV > 0
        )
        if HAS_DBIAS and SUMS_LAST:
            _store_do_sums(dbias_ptr, parts, T_q, H, FORM)
    else:
        full_kv = T_kv  # not rounded up where all tiles are in the loop: that would spill on sm_80
        if TAIL_KV > 0 and TAIL_KV < BLOCK_KV:
            full_kv = T_kv // BLOCK_KV * BLOCK_KV
        tl.assume(full_kv > 0)  # with a way around the loop ptxas would wait for each wgmma
        for start_kv in tl.range(0, full_kv, BLOCK_KV, disable_licm=keeps_invariants()):
            dq = _one_pass_key_tile(
                dq,
                parts,
                dk_rows,
                dv_rows,
                k_rows,
                v_rows,
                start_kv,
                scores,
                FORM,
                BLOCK_KV,
                TAIL_KV == BLOCK_KV,
            )
        if TAIL_KV > 0 and TAIL_KV < BLOCK_KV:
            dq = _one_pass_key_tile(
                dq, parts, dk_rows, dv_rows, k_rows, v_rows, full_kv, scores, FORM, TAIL_KV, True
            )
    for i in tl.static_range(len(parts)):
        part = parts[i]
        store_part(
            dq_rows,
            dq[i] * scores.scale,
            part.start_q,
            T_q,
            FORM.D,
            part.q.shape[0],
            0,
            FORM.BLOCK_D0,
        )
        if HAS_DBIAS:
            sum_ptr = dbias_ptr + i * 3 * H * FORM.D
            store_dq_sum(sum_ptr, dq[i], scores.scale, H, FORM.D, 0, FORM.BLOCK_D0)


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
    stride_do_b,
    stride_do_t,
    stride_do_h,
    stride_q_b,
    stride_q_t,
    stride_q_h,
    stride_k_b,
    stride_k_t,
    stride_k_h,
    stride_v_b,
    stride_v_t,
    stride_v_h,
    scale,
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TAIL_KV: tl.constexpr,
    ONE_KV: tl.constexpr,
    PART0: tl.constexpr,
    PART1: tl.constexpr,
    PART2: tl.constexpr,
    RAGGED_Q: tl.constexpr,
    HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    FENCE: tl.constexpr,
    VARLEN: tl.constexpr,
    HAS_DBIAS: tl.constexpr,
):
    do = Heads(do_ptr, stride_do_b, stride_do_t, stride_do_h)
    q = Heads(q_ptr, stride_q_b, stride_q_t, stride_q_h)
    k = Heads(k_ptr, stride_k_b, stride_k_t, stride_k_h)
    v = Heads(v_ptr, stride_v_b, stride_v_t, stride_v_h)
    dropout, packing = (), ()
    if HAS_DROPOUT:
        dropout = Dropout(seed_ptr, threshold, keep_scale)
    if VARLEN:
        packing = Packing(cu_seqlens_ptr, total, stride_rows_h)
    FORM: tl.constexpr = KernelConstants(
        D, BLOCK_D, 0, PRECISION, "none", IS_CAUSAL, HAS_DROPOUT, FENCE, VARLEN
    )
    TILES: tl.constexpr = Tiles(BLOCK_KV, TAIL_KV, ONE_KV, PART0, PART1, PART2, RAGGED_Q)
    scores = Scores(T_q, T_kv, scale, (), dropout, 0)
    first = tl.program_id(0) * HEADS
    if HEADS == 1:
        _one_pass_head(
            dq_ptr,
            dk_ptr,
            dv_ptr,
            dbias_ptr,
            do,
            q,
            k,
            v,
            out_ptr,
            lse_ptr,
            packing,
            first,
            H,
            stride_dq_t,
            stride_dk_t,
            scores,
            FORM,
            TILES,
            HAS_DBIAS,
        )
    else:
        tl.assume(first < num_heads)
        last = tl.minimum(first + HEADS, num_heads)
        for head in tl.range(first, last, disable_licm=keeps_invariants()):
            _one_pass_head(
                dq_ptr,
                dk_ptr,
                dv_ptr,
                dbias_ptr,
                do,
                q,
                k,
                v,
                out_ptr,
                lse_ptr,
                packing,
                tl.cast(head, tl.int32),
                H,
                stride_dq_t,
                stride_dk_t,
                scores,
                FORM,
                TILES,
                HAS_DBIAS,
            )
