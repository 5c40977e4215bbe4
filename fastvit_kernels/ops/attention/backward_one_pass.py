"""Flash attention, backward in one pass, where the dq of a whole head fits in registers.

One program keeps q, dout and dq of a head, walks its keys once and writes each tile's dk and dv as
it leaves it: five products a tile instead of seven, and everything is read once. Products that need
p^T or ds^T are computed transposed (dv^T = dout^T p): only loaded tiles are transposed, never a
computed one (a miscompile reported on Hopper).
"""

from __future__ import annotations

from ...runtime.triton import tl, triton
from .tiles import (
    head_ptr,
    load_part,
    softmax_grad,
    store_part,
    transposed_tile_ptrs,
)


@triton.jit
def _one_pass_part(
    dk_t, dv_t, dq, q, do, lse, delta, k, v, start_q, kv_index, T_q, T_kv,
    seed_ptr, head, scale, threshold, keep_scale,
    PART: tl.constexpr, CHECK_KV: tl.constexpr, PRECISION: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """The five products of one key tile with one part of the queries, scores as (q, kv)."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    q_index = (start_q + tl.arange(0, PART))[:, None]
    p, ds = softmax_grad(
        s, dp, lse[:, None], delta[:, None], q_index, kv_index, T_q, T_kv,
        None, 0, 0, seed_ptr, head, scale, threshold, keep_scale,
        CHECK_KV, "none", IS_CAUSAL, HAS_DROPOUT,
    )  # fmt: skip
    ds = ds.to(k.dtype)
    dv_t = tl.dot(tl.trans(do), p.to(do.dtype), dv_t, input_precision=PRECISION)
    dk_t = tl.dot(tl.trans(q), ds, dk_t, input_precision=PRECISION)
    dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dk_t, dv_t, dq


@triton.jit
def _one_pass_key_tile(
    dq0, dq1, dq2, q0, q1, q2, do0, do1, do2, lse0, lse1, lse2, delta0, delta1, delta2,
    dk_ptr, dv_ptr, k_ptr, v_ptr, seed_ptr, start_kv, head, T_q, T_kv,
    stride_dk_t, stride_k_t, stride_v_t,
    scale, threshold, keep_scale,
    BLOCK_KV: tl.constexpr, CHECK_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PART0: tl.constexpr, PART1: tl.constexpr, PART2: tl.constexpr, PRECISION: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    k = load_part(k_ptr, stride_k_t, start_kv, T_kv, BLOCK_KV, 0, BLOCK_D, D, CHECK_KV)
    v = load_part(v_ptr, stride_v_t, start_kv, T_kv, BLOCK_KV, 0, BLOCK_D, D, CHECK_KV)
    offs_kv = start_kv + tl.arange(0, BLOCK_KV)
    kv_index = offs_kv[None, :]
    dk_t = tl.zeros((BLOCK_D, BLOCK_KV), dtype=tl.float32)
    dv_t = tl.zeros((BLOCK_D, BLOCK_KV), dtype=tl.float32)
    dk_t, dv_t, dq0 = _one_pass_part(
        dk_t, dv_t, dq0, q0, do0, lse0, delta0, k, v, 0, kv_index, T_q, T_kv,
        seed_ptr, head, scale, threshold, keep_scale,
        PART0, CHECK_KV, PRECISION, IS_CAUSAL, HAS_DROPOUT,
    )  # fmt: skip
    if PART1 > 0:
        dk_t, dv_t, dq1 = _one_pass_part(
            dk_t, dv_t, dq1, q1, do1, lse1, delta1, k, v, PART0, kv_index, T_q, T_kv,
            seed_ptr, head, scale, threshold, keep_scale,
            PART1, CHECK_KV, PRECISION, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    if PART2 > 0:
        dk_t, dv_t, dq2 = _one_pass_part(
            dk_t, dv_t, dq2, q2, do2, lse2, delta2, k, v, PART0 + PART1, kv_index, T_q, T_kv,
            seed_ptr, head, scale, threshold, keep_scale,
            PART2, CHECK_KV, PRECISION, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    mask = (tl.arange(0, BLOCK_D)[:, None] < D) & (kv_index < T_kv)
    dk_t_ptrs = transposed_tile_ptrs(dk_ptr, stride_dk_t, start_kv, BLOCK_KV, BLOCK_D)
    dv_t_ptrs = transposed_tile_ptrs(dv_ptr, stride_dk_t, start_kv, BLOCK_KV, BLOCK_D)
    tl.store(dk_t_ptrs, (dk_t * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_t_ptrs, dv_t.to(dv_ptr.dtype.element_ty), mask=mask)
    return dq0, dq1, dq2


@triton.jit
def _load_query_part(
    q_ptr, do_ptr, out_ptr, lse_ptr, stride_q_t, stride_do_t, stride_out_t, start_q, T_q,
    PART: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_Q: tl.constexpr,
):  # fmt: skip
    """q, dout, lse, delta and a zero dq of one part of the queries; one element each for none."""
    if PART > 0:
        q = load_part(q_ptr, stride_q_t, start_q, T_q, PART, 0, BLOCK_D, D, CHECK_Q)
        do = load_part(do_ptr, stride_do_t, start_q, T_q, PART, 0, BLOCK_D, D, CHECK_Q)
        out = load_part(out_ptr, stride_out_t, start_q, T_q, PART, 0, BLOCK_D, D, CHECK_Q)
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), axis=1)
        offs_q = start_q + tl.arange(0, PART)
        # lse +inf makes p of a query that is not there exactly 0
        lse = tl.load(lse_ptr + offs_q, mask=offs_q < T_q, other=float("inf"))
        return q, do, lse, delta, tl.zeros((PART, BLOCK_D), dtype=tl.float32)
    else:
        none = tl.zeros((1,), dtype=tl.float32)
        return none, none, none, none, none


@triton.jit
def _one_pass_head(
    dq_ptr, dk_ptr, dv_ptr, do_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seed_ptr,
    head, H, T_q, T_kv, stride_dq_t, stride_dk_t, stride_do_b, stride_do_t, stride_do_h,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    scale, threshold, keep_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL_KV: tl.constexpr,
    ONE_KV: tl.constexpr, PART0: tl.constexpr, PART1: tl.constexpr, PART2: tl.constexpr,
    RAGGED_Q: tl.constexpr, PRECISION: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """dq, dk, dv of one head, head = b * H + h."""
    b, h = head // H, head % H
    dq_ptr += b * T_q * stride_dq_t + h * D
    dk_ptr += b * T_kv * stride_dk_t + h * D
    dv_ptr += b * T_kv * stride_dk_t + h * D
    lse_ptr += head * T_q
    out_ptr += (b * T_q * H + h) * D
    do_ptr = head_ptr(do_ptr, b, h, stride_do_b, stride_do_h)
    q_ptr = head_ptr(q_ptr, b, h, stride_q_b, stride_q_h)
    k_ptr = head_ptr(k_ptr, b, h, stride_k_b, stride_k_h)
    v_ptr = head_ptr(v_ptr, b, h, stride_v_b, stride_v_h)

    q0, do0, lse0, delta0, dq0 = _load_query_part(
        q_ptr, do_ptr, out_ptr, lse_ptr, stride_q_t, stride_do_t, H * D, 0, T_q,
        PART0, D, BLOCK_D, RAGGED_Q and PART1 == 0,
    )  # fmt: skip
    q1, do1, lse1, delta1, dq1 = _load_query_part(
        q_ptr, do_ptr, out_ptr, lse_ptr, stride_q_t, stride_do_t, H * D, PART0, T_q,
        PART1, D, BLOCK_D, RAGGED_Q and PART2 == 0,
    )  # fmt: skip
    q2, do2, lse2, delta2, dq2 = _load_query_part(
        q_ptr, do_ptr, out_ptr, lse_ptr, stride_q_t, stride_do_t, H * D, PART0 + PART1, T_q,
        PART2, D, BLOCK_D, RAGGED_Q,
    )  # fmt: skip
    if ONE_KV:
        dq0, dq1, dq2 = _one_pass_key_tile(
            dq0, dq1, dq2, q0, q1, q2, do0, do1, do2, lse0, lse1, lse2, delta0, delta1, delta2,
            dk_ptr, dv_ptr, k_ptr, v_ptr, seed_ptr, 0, head, T_q, T_kv,
            stride_dk_t, stride_k_t, stride_v_t,
            scale, threshold, keep_scale, BLOCK_KV, TAIL_KV > 0, D, BLOCK_D, PART0, PART1, PART2,
            PRECISION, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    else:
        full_kv = T_kv  # not rounded up where all tiles are in the loop: that would spill on sm_80
        if TAIL_KV > 0 and TAIL_KV < BLOCK_KV:
            full_kv = T_kv // BLOCK_KV * BLOCK_KV
        for start_kv in tl.range(0, full_kv, BLOCK_KV, disable_licm=True):
            dq0, dq1, dq2 = _one_pass_key_tile(
                dq0, dq1, dq2, q0, q1, q2, do0, do1, do2, lse0, lse1, lse2, delta0, delta1, delta2,
                dk_ptr, dv_ptr, k_ptr, v_ptr, seed_ptr, start_kv, head, T_q, T_kv,
                stride_dk_t, stride_k_t, stride_v_t,
                scale, threshold, keep_scale, BLOCK_KV, TAIL_KV == BLOCK_KV, D, BLOCK_D,
                PART0, PART1, PART2, PRECISION, IS_CAUSAL, HAS_DROPOUT,
            )  # fmt: skip
        if TAIL_KV > 0 and TAIL_KV < BLOCK_KV:
            dq0, dq1, dq2 = _one_pass_key_tile(
                dq0, dq1, dq2, q0, q1, q2, do0, do1, do2, lse0, lse1, lse2, delta0, delta1, delta2,
                dk_ptr, dv_ptr, k_ptr, v_ptr, seed_ptr, full_kv, head, T_q, T_kv,
                stride_dk_t, stride_k_t, stride_v_t,
                scale, threshold, keep_scale, TAIL_KV, True, D, BLOCK_D, PART0, PART1, PART2,
                PRECISION, IS_CAUSAL, HAS_DROPOUT,
            )  # fmt: skip
    store_part(dq_ptr, dq0 * scale, stride_dq_t, 0, T_q, PART0, 0, BLOCK_D, D)
    if PART1 > 0:
        store_part(dq_ptr, dq1 * scale, stride_dq_t, PART0, T_q, PART1, 0, BLOCK_D, D)
    if PART2 > 0:
        store_part(dq_ptr, dq2 * scale, stride_dq_t, PART0 + PART1, T_q, PART2, 0, BLOCK_D, D)


@triton.jit
def _attention_bwd_one_pass_kernel(
    dq_ptr, dk_ptr, dv_ptr, do_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seed_ptr,
    num_heads, H, T_q, T_kv, stride_dq_t, stride_dk_t, stride_do_b, stride_do_t, stride_do_h,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    scale, threshold, keep_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL_KV: tl.constexpr,
    ONE_KV: tl.constexpr, PART0: tl.constexpr, PART1: tl.constexpr, PART2: tl.constexpr,
    RAGGED_Q: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * HEADS
    if HEADS == 1:
        _one_pass_head(
            dq_ptr, dk_ptr, dv_ptr, do_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seed_ptr,
            first.to(tl.int64), H, T_q, T_kv, stride_dq_t, stride_dk_t,
            stride_do_b, stride_do_t, stride_do_h, stride_q_b, stride_q_t, stride_q_h,
            stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t, stride_v_h,
            scale, threshold, keep_scale, D, BLOCK_D, BLOCK_KV, TAIL_KV, ONE_KV, PART0,
            PART1, PART2, RAGGED_Q,
            PRECISION, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    else:
        for head in tl.range(first, tl.minimum(first + HEADS, num_heads), disable_licm=True):
            _one_pass_head(
                dq_ptr, dk_ptr, dv_ptr, do_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seed_ptr,
                tl.cast(head, tl.int64), H, T_q, T_kv, stride_dq_t, stride_dk_t,
                stride_do_b, stride_do_t, stride_do_h, stride_q_b, stride_q_t, stride_q_h,
                stride_k_b, stride_k_t, stride_k_h, stride_v_b, stride_v_t, stride_v_h,
                scale, threshold, keep_scale, D, BLOCK_D, BLOCK_KV, TAIL_KV, ONE_KV, PART0, PART1,
                PART2, RAGGED_Q, PRECISION, IS_CAUSAL, HAS_DROPOUT,
            )  # fmt: skip
