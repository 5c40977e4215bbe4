"""Flash attention, forward.

    s = scale * q k^T (+ mask),  p = softmax(s),  out = dropout(p) v,  lse = log2 sum exp(s)

A program owns one tile of queries of a head, or of HEADS heads one after the other, and walks the
keys with the online softmax. Source: arXiv:2205.14135, arXiv:2307.08691.
"""

from __future__ import annotations

from ...runtime.triton import tl, triton
from .tiles import (
    accumulate,
    dropout_keep,
    full_tiles,
    head_ptr,
    load_head,
    mask_scores,
    product_over_d,
    store_head,
    zeros_head,
)


@triton.jit
def _attend(
    acc0, acc1, row_max, row_sum, q0, q1, k_ptr, v_ptr, stride_k_t, stride_v_t, start_kv, q_index,
    T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head, scale, threshold,
    BLOCK_KV: tl.constexpr, CHECK_KV: tl.constexpr, FIRST: tl.constexpr,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the tile of keys and values at start_kv."""
    k0, k1 = load_head(k_ptr, stride_k_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV)
    s = product_over_d(q0, q1, k0, k1, BLOCK_D1, PRECISION)
    kv_index = (start_kv + tl.arange(0, BLOCK_KV))[None, :]
    s = mask_scores(
        s, q_index, kv_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, scale,
        CHECK_KV, MASK, IS_CAUSAL,
    )  # fmt: skip
    scale_log2 = scale * 1.4426950408889634
    new_max = tl.maximum(row_max, tl.max(s, axis=1) * scale_log2)
    shift = new_max
    if MASK != "none":  # a row may have seen no key yet, and -inf - -inf is NaN
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * scale_log2 - shift[:, None])
    new_sum = tl.sum(p, axis=1)
    if not FIRST:  # there is a former sum and accumulator, relative to the former maximum
        rescale = tl.exp2(row_max - shift)
        new_sum += row_sum * rescale
        acc0 *= rescale[:, None]
        if BLOCK_D1 > 0:
            acc1 *= rescale[:, None]
    if HAS_DROPOUT:
        p = tl.where(dropout_keep(seed_ptr, head, q_index, kv_index, threshold), p, 0.0)
    v0, v1 = load_head(v_ptr, stride_v_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV)
    acc0, acc1 = accumulate(acc0, acc1, p.to(v0.dtype), v0, v1, BLOCK_D1, PRECISION)
    return acc0, acc1, new_max, new_sum


@triton.jit
def _fwd_query_tile(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, start_q, head, H, T_q, T_kv,
    stride_q_t, stride_k_t, stride_v_t, stride_mask_q, stride_mask_kv,
    scale, threshold, keep_scale,
    BLOCK_Q: tl.constexpr, CHECK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL_KV: tl.constexpr,
    ONE_KV: tl.constexpr,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    q_index = offs_q[:, None]
    q0, q1 = load_head(q_ptr, stride_q_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q)
    acc0, acc1 = zeros_head(BLOCK_Q, BLOCK_D0, BLOCK_D1)
    row_max = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_Q,), dtype=tl.float32)

    CHECK_KV: tl.constexpr = TAIL_KV == BLOCK_KV
    if ONE_KV:
        acc0, acc1, row_max, row_sum = _attend(
            acc0, acc1, row_max, row_sum, q0, q1, k_ptr, v_ptr, stride_k_t, stride_v_t, 0,
            q_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head,
            scale, threshold, BLOCK_KV, CHECK_KV, True, D, BLOCK_D0, BLOCK_D1, PRECISION,
            MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    else:
        full_kv = full_tiles(T_kv, BLOCK_KV, TAIL_KV) * BLOCK_KV
        end_kv = full_kv
        if IS_CAUSAL:
            end_kv = tl.minimum(full_kv, tl.cdiv(start_q + BLOCK_Q, BLOCK_KV) * BLOCK_KV)
        # disable_licm: hoisted out, the descriptors of tiles in shared memory spill.
        for start_kv in tl.range(0, end_kv, BLOCK_KV, disable_licm=True):
            acc0, acc1, row_max, row_sum = _attend(
                acc0, acc1, row_max, row_sum, q0, q1, k_ptr, v_ptr, stride_k_t, stride_v_t,
                start_kv, q_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr,
                head, scale, threshold, BLOCK_KV, CHECK_KV, False, D, BLOCK_D0, BLOCK_D1, PRECISION,
                MASK, IS_CAUSAL, HAS_DROPOUT,
            )  # fmt: skip
        if TAIL_KV > 0 and TAIL_KV < BLOCK_KV:
            acc0, acc1, row_max, row_sum = _attend(
                acc0, acc1, row_max, row_sum, q0, q1, k_ptr, v_ptr, stride_k_t, stride_v_t,
                full_kv, q_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr,
                head, scale, threshold, TAIL_KV, True, False, D, BLOCK_D0, BLOCK_D1, PRECISION,
                MASK, IS_CAUSAL, HAS_DROPOUT,
            )  # fmt: skip

    lse = row_max + tl.log2(row_sum)
    factor = 1.0 / row_sum
    if MASK != "none":  # a row that sees no key: out 0, and lse +inf makes its p 0 in backward
        lse = tl.where(row_sum == 0.0, float("inf"), lse)
        factor = tl.where(row_sum == 0.0, 0.0, factor)
    if HAS_DROPOUT:
        factor *= keep_scale
    acc0 *= factor[:, None]
    if BLOCK_D1 > 0:
        acc1 *= factor[:, None]
    store_head(out_ptr, acc0, acc1, H * D, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1)
    tl.store(lse_ptr + offs_q, lse, mask=offs_q < T_q)


@triton.jit
def _fwd_head(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, pid_q, head, H, T_q, T_kv,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_kv,
    scale, threshold, keep_scale,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, TAIL_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL_KV: tl.constexpr,
    ONE_KV: tl.constexpr, PRECISION: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Query tile pid_q of one head, head = b * H + h."""
    b, h = head // H, head % H
    out_ptr += (b * T_q * H + h) * D
    lse_ptr += head * T_q
    q_ptr = head_ptr(q_ptr, b, h, stride_q_b, stride_q_h)
    k_ptr = head_ptr(k_ptr, b, h, stride_k_b, stride_k_h)
    v_ptr = head_ptr(v_ptr, b, h, stride_v_b, stride_v_h)
    if MASK != "none":
        mask_ptr += b * stride_mask_b + h * stride_mask_h
    start_q = pid_q * BLOCK_Q
    if TAIL_Q == 0 or TAIL_Q == BLOCK_Q:
        _fwd_query_tile(
            out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, start_q, head, H, T_q, T_kv,
            stride_q_t, stride_k_t, stride_v_t, stride_mask_q, stride_mask_kv,
            scale, threshold, keep_scale, BLOCK_Q, TAIL_Q == BLOCK_Q, BLOCK_KV, TAIL_KV, ONE_KV,
            D, BLOCK_D0, BLOCK_D1, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    elif pid_q < T_q // BLOCK_Q:
        _fwd_query_tile(
            out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, start_q, head, H, T_q, T_kv,
            stride_q_t, stride_k_t, stride_v_t, stride_mask_q, stride_mask_kv,
            scale, threshold, keep_scale, BLOCK_Q, False, BLOCK_KV, TAIL_KV, ONE_KV,
            D, BLOCK_D0, BLOCK_D1, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    else:
        _fwd_query_tile(
            out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, start_q, head, H, T_q, T_kv,
            stride_q_t, stride_k_t, stride_v_t, stride_mask_q, stride_mask_kv,
            scale, threshold, keep_scale, TAIL_Q, True, BLOCK_KV, TAIL_KV, ONE_KV,
            D, BLOCK_D0, BLOCK_D1, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip


@triton.jit
def _attention_fwd_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, num_heads, H, T_q, T_kv,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_kv,
    scale, threshold, keep_scale,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, TAIL_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL_KV: tl.constexpr,
    ONE_KV: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr, MASK: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    # Query tiles of a head are neighbours: its keys and values stay in L2.
    tiles = tl.cdiv(T_q, BLOCK_Q)
    pid_q = tl.program_id(0) % tiles
    first = tl.program_id(0) // tiles * HEADS
    if HEADS == 1:
        _fwd_head(
            out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, pid_q, first.to(tl.int64),
            H, T_q, T_kv, stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
            stride_v_b, stride_v_t, stride_v_h,
            stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_kv,
            scale, threshold, keep_scale, D, BLOCK_D0, BLOCK_D1, BLOCK_Q, TAIL_Q, BLOCK_KV, TAIL_KV,
            ONE_KV, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    else:
        for head in tl.range(first, tl.minimum(first + HEADS, num_heads), disable_licm=True):
            _fwd_head(
                out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, pid_q,
                tl.cast(head, tl.int64), H, T_q, T_kv, stride_q_b, stride_q_t, stride_q_h,
                stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t, stride_v_h,
                stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_kv,
                scale, threshold, keep_scale, D, BLOCK_D0, BLOCK_D1, BLOCK_Q, TAIL_Q, BLOCK_KV,
                TAIL_KV, ONE_KV, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT,
            )  # fmt: skip
