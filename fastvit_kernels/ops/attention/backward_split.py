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
    Packing,
    head_rows,
    kept_rows,
    lse_ptr_of,
    next_tile,
    packed_rows,
    row_ptr,
    sample_of,
    shown_keys,
    shown_tiles,
)
from .tiles import (
    Dropout,
    Heads,
    KernelConstants,
    Mask,
    Scores,
    accumulate,
    fence_async,
    full_tiles,
    keeps_invariants,
    load_head,
    load_lse,
    padded,
    product_over_d,
    scaled_head,
    softmax_grad,
    store_head,
    zeros_head,
)


class Walk(NamedTuple):
    """Tile sizes of the tokens that a program loops over: full tiles, then one tail."""

    BLOCK: Any
    TAIL: Any


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
    q,
    do,
    lse,
    delta,
    k_rows,
    v_rows,
    start_kv,
    start_q,
    scores,
    FORM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CHECK_KV: tl.constexpr,
):
    """dq / scale += ds k for the keys at start_kv."""
    k = load_head(k_rows, start_kv, scores.T_kv, FORM, BLOCK_KV, CHECK_KV)
    v = load_head(v_rows, start_kv, scores.T_kv, FORM, BLOCK_KV, CHECK_KV)
    fence_async(scores, FORM)
    s = product_over_d(q, k, FORM)
    dp = product_over_d(do, v, FORM)
    _, ds = softmax_grad(s, dp, lse, delta, start_q, start_kv, scores, FORM, CHECK_KV, True)
    return accumulate(dq, ds.to(k[0].dtype), k, FORM)


@triton.jit
def _dq_query_tile(
    dq_rows,
    delta_ptr,
    do_rows,
    q_rows,
    k_rows,
    v_rows,
    out_rows,
    lse_ptr,
    start_q,
    scores,
    FORM: tl.constexpr,
    WALK: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    CHECK_Q: tl.constexpr,
):
    T_q, T_kv = scores.T_q, scores.T_kv
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    q = load_head(q_rows, start_q, T_q, FORM, BLOCK_Q, CHECK_Q)
    do = load_head(do_rows, start_q, T_q, FORM, BLOCK_Q, CHECK_Q)
    out = load_head(out_rows, start_q, T_q, FORM, BLOCK_Q, CHECK_Q)
    delta = _row_dot(out, do, FORM)
    tl.store(delta_ptr + offs_q, delta, mask=offs_q < padded(T_q))
    lse = load_lse(lse_ptr, start_q, T_q, FORM, BLOCK_Q, True)
    dq = zeros_head(FORM, BLOCK_Q)

    if FORM.MASK == "keys":
        shown, steps = shown_tiles(scores, T_kv, WALK.BLOCK)
        tl.assume(steps > 0)
        for _ in tl.range(0, steps, disable_licm=keeps_invariants()):
            start_kv, shown = next_tile(shown, WALK.BLOCK)
            dq = _dq_step(
                dq,
                q,
                do,
                lse,
                delta,
                k_rows,
                v_rows,
                start_kv,
                start_q,
                scores,
                FORM,
                WALK.BLOCK,
                True,
            )
    else:
        full_kv = full_tiles(T_kv, WALK.BLOCK, WALK.TAIL) * WALK.BLOCK
        end_kv = full_kv
        if FORM.IS_CAUSAL:
            end_kv = tl.minimum(full_kv, tl.cdiv(start_q + BLOCK_Q, WALK.BLOCK) * WALK.BLOCK)
        tl.assume(end_kv > 0)  # with a way around the loop ptxas would wait for each wgmma
        for start_kv in tl.range(0, end_kv, WALK.BLOCK, disable_licm=keeps_invariants()):
            dq = _dq_step(
                dq,
                q,
                do,
                lse,
                delta,
                k_rows,
                v_rows,
                start_kv,
                start_q,
                scores,
                FORM,
                WALK.BLOCK,
                WALK.TAIL == WALK.BLOCK,
            )
        if WALK.TAIL > 0 and WALK.TAIL < WALK.BLOCK:
            dq = _dq_step(
                dq,
                q,
                do,
                lse,
                delta,
                k_rows,
                v_rows,
                full_kv,
                start_q,
                scores,
                FORM,
                WALK.TAIL,
                True,
            )
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
    mask_batch,
    stride_mask_b,
    stride_mask_h,
    stride_mask_q,
    stride_mask_kv,
    scale,
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D0: tl.constexpr,
    BLOCK_D1: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    RAGGED_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    TAIL_KV: tl.constexpr,
    PRECISION: tl.constexpr,
    MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    FENCE: tl.constexpr,
    VARLEN: tl.constexpr,
):
    tiles = tl.cdiv(T_q, BLOCK_Q)
    pid_q = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles  # b * H + h
    FORM: tl.constexpr = KernelConstants(
        D, BLOCK_D0, BLOCK_D1, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT, FENCE, VARLEN
    )
    mask, dropout, packing = (), (), ()
    if MASK != "none":
        mask = Mask(
            mask_ptr, mask_batch, stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_kv
        )
    if HAS_DROPOUT:
        dropout = Dropout(seed_ptr, threshold, keep_scale)
    if VARLEN:
        packing = Packing(cu_seqlens_ptr, total, stride_rows_h)
    scores = Scores(T_q, T_kv, scale, mask, dropout, 0)
    sample, scores = sample_of(packing, scores, head, H, FORM)
    dq_rows = packed_rows(dq_ptr, stride_dq_t, sample.first_q, sample, D)
    out_rows = packed_rows(out_ptr, H * D, sample.first_q, sample, D)
    do_rows = head_rows(Heads(do_ptr, stride_do_b, stride_do_t, stride_do_h), sample)
    q_rows = head_rows(Heads(q_ptr, stride_q_b, stride_q_t, stride_q_h), sample)
    k_rows = head_rows(Heads(k_ptr, stride_k_b, stride_k_t, stride_k_h), sample)
    v_rows = head_rows(Heads(v_ptr, stride_v_b, stride_v_t, stride_v_h), sample)
    delta_ptr = row_ptr(delta_ptr, sample)
    lse_ptr = lse_ptr_of(lse_ptr, sample, FORM)
    WALK: tl.constexpr = Walk(BLOCK_KV, TAIL_KV)
    start_q = pid_q * BLOCK_Q
    if not VARLEN or start_q < scores.T_q:
        _dq_query_tile(
            dq_rows,
            delta_ptr,
            do_rows,
            q_rows,
            k_rows,
            v_rows,
            out_rows,
            lse_ptr,
            start_q,
            scores,
            FORM,
            WALK,
            BLOCK_Q,
            RAGGED_Q,
        )


@triton.jit
def _dkdv_step(
    dk,
    dv,
    k,
    v,
    do_rows,
    q_rows,
    lse_ptr,
    delta_ptr,
    start_q,
    start_kv,
    scores,
    FORM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    CHECK_Q: tl.constexpr,
    GRADS: tl.constexpr,
):
    """dv += p^T dout and dk / scale += ds^T q for the queries at start_q, all of it (kv, q)."""
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
    # Keys that are not there fill rows of s_t that nobody stores, those that a "keys" mask hides
    # such as end as zeros: no check of theirs is needed.
    p_t, ds_t = softmax_grad(s_t, dp_t, lse, delta, start_q, start_kv, scores, FORM, False, False)
    if GRADS != "dk":
        dv = accumulate(dv, p_t.to(do[0].dtype), do, FORM)
    if GRADS != "dv":
        dk = accumulate(dk, ds_t.to(q[0].dtype), q, FORM)
    return dk, dv


@triton.jit
def _dkdv_key_tile(
    dk_rows,
    dv_rows,
    do_rows,
    q_rows,
    k_rows,
    v_rows,
    lse_ptr,
    delta_ptr,
    start_kv,
    scores,
    FORM: tl.constexpr,
    WALK: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CHECK_KV: tl.constexpr,
    GRADS: tl.constexpr,
):
    T_kv = scores.T_kv
    k = load_head(k_rows, start_kv, T_kv, FORM, BLOCK_KV, CHECK_KV)
    v = load_head(v_rows, start_kv, T_kv, FORM, BLOCK_KV, CHECK_KV)
    dk, dv = zeros_head(FORM, BLOCK_KV), zeros_head(FORM, BLOCK_KV)

    BLOCK_Q: tl.constexpr = WALK.BLOCK
    TAIL_Q: tl.constexpr = WALK.TAIL
    full_q = full_tiles(scores.T_q, BLOCK_Q, TAIL_Q) * BLOCK_Q
    first_q = 0
    if FORM.IS_CAUSAL:
        # where all full tiles lie before the key, the last one: it adds zeros
        first_q = tl.minimum(full_q - BLOCK_Q, start_kv // BLOCK_Q * BLOCK_Q)
    end_q = full_q
    if FORM.MASK == "keys":  # no key of the tile: one step, of which nothing is kept
        shown = shown_keys(start_kv, scores, BLOCK_KV)
        end_q = tl.where(tl.max(shown.to(tl.int32), axis=0) > 0, full_q, BLOCK_Q)
    tl.assume(end_q > first_q)
    for start_q in tl.range(first_q, end_q, BLOCK_Q, disable_licm=keeps_invariants()):
        dk, dv = _dkdv_step(
            dk,
            dv,
            k,
            v,
            do_rows,
            q_rows,
            lse_ptr,
            delta_ptr,
            start_q,
            start_kv,
            scores,
            FORM,
            BLOCK_Q,
            TAIL_Q == BLOCK_Q,
            GRADS,
        )
    if TAIL_Q > 0 and TAIL_Q < BLOCK_Q:
        dk, dv = _dkdv_step(
            dk,
            dv,
            k,
            v,
            do_rows,
            q_rows,
            lse_ptr,
            delta_ptr,
            full_q,
            start_kv,
            scores,
            FORM,
            TAIL_Q,
            True,
            GRADS,
        )
    if FORM.MASK == "keys":
        dk, dv = kept_rows(dk, shown, FORM), kept_rows(dv, shown, FORM)
    if GRADS != "dv":
        dk = scaled_head(dk, scores.scale, FORM)
        store_head(dk_rows, dk, start_kv, T_kv, FORM, BLOCK_KV)
    if GRADS != "dk":
        store_head(dv_rows, dv, start_kv, T_kv, FORM, BLOCK_KV)


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
    mask_batch,
    stride_mask_b,
    stride_mask_h,
    stride_mask_q,
    stride_mask_kv,
    scale,
    threshold,
    keep_scale,
    D: tl.constexpr,
    BLOCK_D0: tl.constexpr,
    BLOCK_D1: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    RAGGED_KV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    TAIL_Q: tl.constexpr,
    PRECISION: tl.constexpr,
    MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    FENCE: tl.constexpr,
    VARLEN: tl.constexpr,
    GRADS: tl.constexpr,
):
    tiles = tl.cdiv(T_kv, BLOCK_KV)
    pid_kv = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles  # b * H + h
    FORM: tl.constexpr = KernelConstants(
        D, BLOCK_D0, BLOCK_D1, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT, FENCE, VARLEN
    )
    mask, dropout, packing = (), (), ()
    if MASK != "none":
        mask = Mask(
            mask_ptr, mask_batch, stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_kv
        )
    if HAS_DROPOUT:
        dropout = Dropout(seed_ptr, threshold, keep_scale)
    if VARLEN:
        packing = Packing(cu_seqlens_ptr, total, stride_rows_h)
    scores = Scores(T_q, T_kv, scale, mask, dropout, 0)
    sample, scores = sample_of(packing, scores, head, H, FORM)
    dk_rows = packed_rows(dk_ptr, stride_dk_t, sample.first_kv, sample, D)
    dv_rows = packed_rows(dv_ptr, stride_dk_t, sample.first_kv, sample, D)
    do_rows = head_rows(Heads(do_ptr, stride_do_b, stride_do_t, stride_do_h), sample)
    q_rows = head_rows(Heads(q_ptr, stride_q_b, stride_q_t, stride_q_h), sample)
    k_rows = head_rows(Heads(k_ptr, stride_k_b, stride_k_t, stride_k_h), sample)
    v_rows = head_rows(Heads(v_ptr, stride_v_b, stride_v_t, stride_v_h), sample)
    lse_ptr = lse_ptr_of(lse_ptr, sample, FORM)
    delta_ptr = row_ptr(delta_ptr, sample)
    WALK: tl.constexpr = Walk(BLOCK_Q, TAIL_Q)
    start_kv = pid_kv * BLOCK_KV
    if not VARLEN or start_kv < scores.T_kv:
        _dkdv_key_tile(
            dk_rows,
            dv_rows,
            do_rows,
            q_rows,
            k_rows,
            v_rows,
            lse_ptr,
            delta_ptr,
            start_kv,
            scores,
            FORM,
            WALK,
            BLOCK_KV,
            RAGGED_KV,
            GRADS,
        )
