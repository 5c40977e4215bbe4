"""Flash attention, backward in two kernels: dq by query tiles, then dk and dv by key TILES.

    delta = rowsum(out * dout)                       one number a query, written by the dq kernel
    dp = dout v^T,  ds = p * (dp - delta)            p rebuilt as exp2(s - lse), never stored
    dv = p^T dout,  dk = scale * ds^T q,  dq = scale * ds k

The key kernel computes the scores transposed, s^T = k q^T: only loaded tiles are transposed, never
a computed one (a miscompile reported on Hopper). Source: arXiv:2307.08691.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...runtime.triton import ANY_BATCH, tl, triton
from .samples import (
    head_rows,
    kept_rows,
    lse_ptr_of,
    next_tile,
    packed_rows,
    packing_of,
    row_ptr,
    sample_of,
    shown_keys,
    shown_tiles,
)
from .tiles import (
    accumulate,
    fence_async,
    full_tiles,
    keeps_invariants,
    load_head,
    load_lse,
    padded,
    product_over_d,
    scaled_head,
    scores_of,
    softmax_grad,
    store_head,
    zeros_head,
)


class QueryTiles(NamedTuple):
    """Of the dq kernel: the queries that a program owns, the keys that it walks, the last of them
    in a tail."""

    BLOCK_Q: Any
    RAGGED_Q: Any
    BLOCK_KV: Any
    TAIL_KV: Any


class KeyTiles(NamedTuple):
    """Of the kernel of dk and dv: the keys that a program owns, the queries that it walks."""

    BLOCK_KV: Any
    RAGGED_KV: Any
    BLOCK_Q: Any
    TAIL_Q: Any


@triton.jit
def _row_dot(a, b, FORM: tl.constexpr):
    """sum_d a b of two tiles of a head, fp32."""
    x = tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), axis=1)
    if FORM.BLOCK_D1 > 0:
        x += tl.sum(a[1].to(tl.float32) * b[1].to(tl.float32), axis=1)
    return x


@triton.jit
def _dq_step(
    dq,
    queries,
    keys,
    start_kv,
    start_q,
    scores,
    FORM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CHECK_KV: tl.constexpr,
):
    """dq / scale += ds k for the keys at start_kv."""
    q, do, lse, delta = queries
    k_rows, v_rows = keys
    k = load_head(k_rows, start_kv, scores.T_kv, FORM, BLOCK_KV, CHECK_KV)
    v = load_head(v_rows, start_kv, scores.T_kv, FORM, BLOCK_KV, CHECK_KV)
    fence_async(scores, FORM)
    s = product_over_d(q, k, FORM)
    dp = product_over_d(do, v, FORM)
    _, ds = softmax_grad(s, dp, lse, delta, start_q, start_kv, scores, FORM, CHECK_KV, True)
    return accumulate(dq, ds.to(k[0].dtype), k, FORM)


@triton.jit
def _dq_query_tile(
    outputs, rows, lse_ptr, start_q, scores, FORM: tl.constexpr, TILES: tl.constexpr
):
    """dq and delta of the queries at start_q."""
    dq_rows, delta_ptr = outputs
    do_rows, q_rows, k_rows, v_rows, out_rows = rows
    BLOCK_Q: tl.constexpr = TILES.BLOCK_Q
    CHECK_Q: tl.constexpr = TILES.RAGGED_Q
    BLOCK: tl.constexpr = TILES.BLOCK_KV
    TAIL: tl.constexpr = TILES.TAIL_KV
    T_q, T_kv = scores.T_q, scores.T_kv
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    q = load_head(q_rows, start_q, T_q, FORM, BLOCK_Q, CHECK_Q)
    do = load_head(do_rows, start_q, T_q, FORM, BLOCK_Q, CHECK_Q)
    out = load_head(out_rows, start_q, T_q, FORM, BLOCK_Q, CHECK_Q)
    delta = _row_dot(out, do, FORM)
    tl.store(delta_ptr + offs_q, delta, mask=offs_q < padded(T_q))
    lse = load_lse(lse_ptr, start_q, T_q, FORM, BLOCK_Q, True)
    dq = zeros_head(FORM, BLOCK_Q)
    queries, keys = (q, do, lse, delta), (k_rows, v_rows)
    if FORM.MASK == "keys":
        shown, steps = shown_tiles(scores, T_kv, BLOCK)
        tl.assume(steps > 0)
        for _ in tl.range(0, steps, disable_licm=keeps_invariants()):
            start_kv, shown = next_tile(shown, BLOCK)
            dq = _dq_step(dq, queries, keys, start_kv, start_q, scores, FORM, BLOCK, True)
    else:
        full_kv = full_tiles(T_kv, BLOCK, TAIL) * BLOCK
        end_kv = full_kv
        if FORM.IS_CAUSAL:
            end_kv = tl.minimum(full_kv, tl.cdiv(start_q + BLOCK_Q, BLOCK) * BLOCK)
        tl.assume(end_kv > 0)  # with a way around the loop ptxas would wait for each wgmma
        for start_kv in tl.range(0, end_kv, BLOCK, disable_licm=keeps_invariants()):
            dq = _dq_step(dq, queries, keys, start_kv, start_q, scores, FORM, BLOCK, TAIL == BLOCK)
        if TAIL > 0 and TAIL < BLOCK:
            dq = _dq_step(dq, queries, keys, full_kv, start_q, scores, FORM, TAIL, True)
    dq = scaled_head(dq, scores.scale, FORM)
    store_head(dq_rows, dq, start_q, T_q, FORM, BLOCK_Q)


@triton.jit(**ANY_BATCH)
def _attention_bwd_dq_kernel(
    dq_ptr,
    delta_ptr,
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    mask_ptr,
    seed_ptr,
    cu_seqlens_ptr,
    H,
    T_q,
    T_kv,
    total,
    stride_rows_h,
    stride_dq_t,
    strides,
    mask_strides,
    scale,
    keep,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
):
    tiles = tl.cdiv(T_q, TILES.BLOCK_Q)
    pid_q = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles  # b * H + h
    packing = packing_of(cu_seqlens_ptr, total, stride_rows_h, FORM)
    scores = scores_of(mask_ptr, mask_strides, seed_ptr, keep, T_q, T_kv, scale, FORM)
    sample, scores = sample_of(packing, scores, head, H, FORM)
    stride_do, stride_q, stride_k, stride_v = strides
    dq_rows = packed_rows(dq_ptr, stride_dq_t, sample.first_q, sample, FORM.D)
    out_rows = packed_rows(out_ptr, H * FORM.D, sample.first_q, sample, FORM.D)
    do_rows, q_rows = head_rows(do_ptr, stride_do, sample), head_rows(q_ptr, stride_q, sample)
    k_rows, v_rows = head_rows(k_ptr, stride_k, sample), head_rows(v_ptr, stride_v, sample)
    outputs = dq_rows, row_ptr(delta_ptr, sample)
    lse_ptr = lse_ptr_of(lse_ptr, sample, FORM)
    start_q = pid_q * TILES.BLOCK_Q
    if not FORM.VARLEN or start_q < scores.T_q:
        rows = do_rows, q_rows, k_rows, v_rows, out_rows
        _dq_query_tile(outputs, rows, lse_ptr, start_q, scores, FORM, TILES)


@triton.jit
def _dkdv_step(
    grads,
    keys,
    queries,
    start_q,
    start_kv,
    scores,
    FORM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    CHECK_Q: tl.constexpr,
    GRADS: tl.constexpr,
):
    """dv += p^T dout and dk / scale += ds^T q for the queries at start_q, all of it (kv, q)."""
    dk, dv = grads
    k, v = keys
    do_rows, q_rows, lse_ptr, delta_ptr = queries
    T_q = scores.T_q
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    q = load_head(q_rows, start_q, T_q, FORM, BLOCK_Q, CHECK_Q)
    do = load_head(do_rows, start_q, T_q, FORM, BLOCK_Q, CHECK_Q)
    lse = load_lse(lse_ptr, start_q, T_q, FORM, BLOCK_Q, CHECK_Q)
    if CHECK_Q:
        delta = tl.load(delta_ptr + offs_q, mask=offs_q < padded(T_q), other=0.0)
    else:
        delta = tl.load(delta_ptr + offs_q)
    fence_async(scores, FORM)
    s_t = product_over_d(k, q, FORM)
    dp_t = product_over_d(v, do, FORM)
    # Keys that are not there fill rows of s_t that are not stored, those that a "keys" mask hides
    # such as end as zeros: no check of theirs is needed.
    p_t, ds_t = softmax_grad(s_t, dp_t, lse, delta, start_q, start_kv, scores, FORM, False, False)
    if GRADS != "dk":
        dv = accumulate(dv, p_t.to(do[0].dtype), do, FORM)
    if GRADS != "dv":
        dk = accumulate(dk, ds_t.to(q[0].dtype), q, FORM)
    return dk, dv


@triton.jit
def _dkdv_key_tile(
    outputs,
    key_rows,
    queries,
    start_kv,
    scores,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    GRADS: tl.constexpr,
):
    """dk and dv of the keys at start_kv."""
    BLOCK_KV: tl.constexpr = TILES.BLOCK_KV
    BLOCK: tl.constexpr = TILES.BLOCK_Q
    TAIL: tl.constexpr = TILES.TAIL_Q
    T_kv = scores.T_kv
    k = load_head(key_rows[0], start_kv, T_kv, FORM, BLOCK_KV, TILES.RAGGED_KV)
    v = load_head(key_rows[1], start_kv, T_kv, FORM, BLOCK_KV, TILES.RAGGED_KV)
    keys = k, v
    dk, dv = zeros_head(FORM, BLOCK_KV), zeros_head(FORM, BLOCK_KV)
    grads = dk, dv
    full_q = full_tiles(scores.T_q, BLOCK, TAIL) * BLOCK
    first_q = 0
    if FORM.IS_CAUSAL:
        # where all full tiles lie before the key, the last one: it adds zeros
        first_q = tl.minimum(full_q - BLOCK, start_kv // BLOCK * BLOCK)
    end_q = full_q
    if FORM.MASK == "keys":  # no key of the tile: one step, of which nothing is kept
        shown = shown_keys(start_kv, scores, BLOCK_KV)
        end_q = tl.where(tl.max(shown.to(tl.int32), axis=0) > 0, full_q, BLOCK)
    tl.assume(end_q > first_q)
    for start_q in tl.range(first_q, end_q, BLOCK, disable_licm=keeps_invariants()):
        grads = _dkdv_step(
            grads, keys, queries, start_q, start_kv, scores, FORM, BLOCK, TAIL == BLOCK, GRADS
        )
    if TAIL > 0 and TAIL < BLOCK:
        grads = _dkdv_step(grads, keys, queries, full_q, start_kv, scores, FORM, TAIL, True, GRADS)
    dk, dv = grads
    if FORM.MASK == "keys":
        dk, dv = kept_rows(dk, shown, FORM), kept_rows(dv, shown, FORM)
    if GRADS != "dv":
        dk = scaled_head(dk, scores.scale, FORM)
        store_head(outputs[0], dk, start_kv, T_kv, FORM, BLOCK_KV)
    if GRADS != "dk":
        store_head(outputs[1], dv, start_kv, T_kv, FORM, BLOCK_KV)


@triton.jit(**ANY_BATCH)
def _attention_bwd_dkdv_kernel(
    dk_ptr,
    dv_ptr,
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    mask_ptr,
    seed_ptr,
    cu_seqlens_ptr,
    H,
    T_q,
    T_kv,
    total,
    stride_rows_h,
    stride_dk_t,
    strides,
    mask_strides,
    scale,
    keep,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    GRADS: tl.constexpr,
):
    tiles = tl.cdiv(T_kv, TILES.BLOCK_KV)
    pid_kv = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles  # b * H + h
    packing = packing_of(cu_seqlens_ptr, total, stride_rows_h, FORM)
    scores = scores_of(mask_ptr, mask_strides, seed_ptr, keep, T_q, T_kv, scale, FORM)
    sample, scores = sample_of(packing, scores, head, H, FORM)
    stride_do, stride_q, stride_k, stride_v = strides
    dk_rows = packed_rows(dk_ptr, stride_dk_t, sample.first_kv, sample, FORM.D)
    dv_rows = packed_rows(dv_ptr, stride_dk_t, sample.first_kv, sample, FORM.D)
    do_rows, q_rows = head_rows(do_ptr, stride_do, sample), head_rows(q_ptr, stride_q, sample)
    k_rows, v_rows = head_rows(k_ptr, stride_k, sample), head_rows(v_ptr, stride_v, sample)
    lse_ptr = lse_ptr_of(lse_ptr, sample, FORM)
    queries = do_rows, q_rows, lse_ptr, row_ptr(delta_ptr, sample)
    start_kv = pid_kv * TILES.BLOCK_KV
    if not FORM.VARLEN or start_kv < scores.T_kv:
        outputs, keys = (dk_rows, dv_rows), (k_rows, v_rows)
        _dkdv_key_tile(outputs, keys, queries, start_kv, scores, FORM, TILES, GRADS)
