"""Flash attention, backward in two kernels: dq by query tiles, then dk and dv by key tiles.

    delta = rowsum(out * dout)                       one number a query, written by the dq kernel
    dp = dout v^T,  ds = p * (dp - delta)            p rebuilt as exp2(s - lse), never stored
    dv = p^T dout,  dk = scale * ds^T q,  dq = scale * ds k

The key kernel computes the scores transposed, s^T = k q^T: only loaded tiles are transposed, never
a computed one (a miscompile reported on Hopper). Source: arXiv:2307.08691.
"""

from __future__ import annotations

from ...runtime.triton import tl, triton
from .tiles import (
    accumulate,
    full_tiles,
    head_ptr,
    load_head,
    product_over_d,
    softmax_grad,
    store_head,
    zeros_head,
)


@triton.jit
def _row_dot(a0, a1, b0, b1, BLOCK_D1: tl.constexpr):
    """sum_d a b of two tiles of a head, fp32."""
    x = tl.sum(a0.to(tl.float32) * b0.to(tl.float32), axis=1)
    if BLOCK_D1 > 0:
        x += tl.sum(a1.to(tl.float32) * b1.to(tl.float32), axis=1)
    return x


@triton.jit
def _dq_step(
    dq0, dq1, q0, q1, do0, do1, lse, delta, k_ptr, v_ptr, stride_k_t, stride_v_t, start_kv,
    q_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head,
    scale, threshold, keep_scale,
    BLOCK_KV: tl.constexpr, CHECK_KV: tl.constexpr,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """dq / scale += ds k for the keys at start_kv."""
    k0, k1 = load_head(k_ptr, stride_k_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV)
    v0, v1 = load_head(v_ptr, stride_v_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV)
    s = product_over_d(q0, q1, k0, k1, BLOCK_D1, PRECISION)
    dp = product_over_d(do0, do1, v0, v1, BLOCK_D1, PRECISION)
    kv_index = (start_kv + tl.arange(0, BLOCK_KV))[None, :]
    _, ds = softmax_grad(
        s, dp, lse[:, None], delta[:, None], q_index, kv_index, T_q, T_kv,
        mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head, scale, threshold, keep_scale,
        CHECK_KV, MASK, IS_CAUSAL, HAS_DROPOUT,
    )  # fmt: skip
    return accumulate(dq0, dq1, ds.to(k0.dtype), k0, k1, BLOCK_D1, PRECISION)


@triton.jit
def _dq_query_tile(
    dq_ptr, delta_ptr, do_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, seed_ptr,
    start_q, head, H, T_q, T_kv, stride_dq_t, stride_do_t, stride_q_t, stride_k_t, stride_v_t,
    stride_mask_q, stride_mask_kv, scale, threshold, keep_scale,
    BLOCK_Q: tl.constexpr, CHECK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL_KV: tl.constexpr,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    q_index = offs_q[:, None]
    q0, q1 = load_head(q_ptr, stride_q_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q)
    do0, do1 = load_head(do_ptr, stride_do_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q)
    out0, out1 = load_head(out_ptr, H * D, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q)
    delta = _row_dot(out0, out1, do0, do1, BLOCK_D1)
    tl.store(delta_ptr + offs_q, delta, mask=offs_q < T_q)
    lse = tl.load(lse_ptr + offs_q, mask=offs_q < T_q, other=float("inf"))
    dq0, dq1 = zeros_head(BLOCK_Q, BLOCK_D0, BLOCK_D1)

    CHECK_KV: tl.constexpr = TAIL_KV == BLOCK_KV
    full_kv = full_tiles(T_kv, BLOCK_KV, TAIL_KV) * BLOCK_KV
    end_kv = full_kv
    if IS_CAUSAL:
        end_kv = tl.minimum(full_kv, tl.cdiv(start_q + BLOCK_Q, BLOCK_KV) * BLOCK_KV)
    for start_kv in tl.range(0, end_kv, BLOCK_KV, disable_licm=True):
        dq0, dq1 = _dq_step(
            dq0, dq1, q0, q1, do0, do1, lse, delta, k_ptr, v_ptr, stride_k_t, stride_v_t, start_kv,
            q_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head,
            scale, threshold, keep_scale, BLOCK_KV, CHECK_KV,
            D, BLOCK_D0, BLOCK_D1, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    if TAIL_KV > 0 and TAIL_KV < BLOCK_KV:
        dq0, dq1 = _dq_step(
            dq0, dq1, q0, q1, do0, do1, lse, delta, k_ptr, v_ptr, stride_k_t, stride_v_t, full_kv,
            q_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head,
            scale, threshold, keep_scale, TAIL_KV, True,
            D, BLOCK_D0, BLOCK_D1, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    dq0 *= scale
    if BLOCK_D1 > 0:
        dq1 *= scale
    store_head(dq_ptr, dq0, dq1, stride_dq_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1)


@triton.jit
def _attention_bwd_dq_kernel(
    dq_ptr, delta_ptr, do_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, seed_ptr,
    H, T_q, T_kv, stride_dq_t, stride_do_b, stride_do_t, stride_do_h,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_kv,
    scale, threshold, keep_scale,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, TAIL_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL_KV: tl.constexpr,
    PRECISION: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T_q, BLOCK_Q)
    pid_q = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles).to(tl.int64)  # b * H + h
    b, h = head // H, head % H
    dq_ptr += b * T_q * stride_dq_t + h * D
    delta_ptr += head * T_q
    lse_ptr += head * T_q
    out_ptr += (b * T_q * H + h) * D
    do_ptr = head_ptr(do_ptr, b, h, stride_do_b, stride_do_h)
    q_ptr = head_ptr(q_ptr, b, h, stride_q_b, stride_q_h)
    k_ptr = head_ptr(k_ptr, b, h, stride_k_b, stride_k_h)
    v_ptr = head_ptr(v_ptr, b, h, stride_v_b, stride_v_h)
    if MASK != "none":
        mask_ptr += b * stride_mask_b + h * stride_mask_h
    start_q = pid_q * BLOCK_Q
    if pid_q < full_tiles(T_q, BLOCK_Q, TAIL_Q):
        _dq_query_tile(
            dq_ptr, delta_ptr, do_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr, seed_ptr,
            start_q, head, H, T_q, T_kv, stride_dq_t, stride_do_t, stride_q_t, stride_k_t,
            stride_v_t, stride_mask_q, stride_mask_kv, scale, threshold, keep_scale,
            BLOCK_Q, TAIL_Q == BLOCK_Q, BLOCK_KV, TAIL_KV, D, BLOCK_D0, BLOCK_D1, PRECISION,
            MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    else:
        if TAIL_Q > 0 and TAIL_Q < BLOCK_Q:
            _dq_query_tile(
                dq_ptr, delta_ptr, do_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, mask_ptr,
                seed_ptr, start_q, head, H, T_q, T_kv, stride_dq_t, stride_do_t, stride_q_t,
                stride_k_t, stride_v_t, stride_mask_q, stride_mask_kv, scale, threshold, keep_scale,
                TAIL_Q, True, BLOCK_KV, TAIL_KV, D, BLOCK_D0, BLOCK_D1, PRECISION,
                MASK, IS_CAUSAL, HAS_DROPOUT,
            )  # fmt: skip


@triton.jit
def _dkdv_step(
    dk0, dk1, dv0, dv1, k0, k1, v0, v1, do_ptr, q_ptr, lse_ptr, delta_ptr, stride_do_t, stride_q_t,
    start_q, kv_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head,
    scale, threshold, keep_scale,
    BLOCK_Q: tl.constexpr, CHECK_Q: tl.constexpr,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """dv += p^T dout and dk / scale += ds^T q for the queries at start_q, all of it (kv, q)."""
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    q0, q1 = load_head(q_ptr, stride_q_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q)
    do0, do1 = load_head(do_ptr, stride_do_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q)
    if CHECK_Q:  # lse +inf makes p of a query that is not there exactly 0
        lse = tl.load(lse_ptr + offs_q, mask=offs_q < T_q, other=float("inf"))
        delta = tl.load(delta_ptr + offs_q, mask=offs_q < T_q, other=0.0)
    else:
        lse = tl.load(lse_ptr + offs_q)
        delta = tl.load(delta_ptr + offs_q)
    s_t = product_over_d(k0, k1, q0, q1, BLOCK_D1, PRECISION)
    dp_t = product_over_d(v0, v1, do0, do1, BLOCK_D1, PRECISION)
    # Keys that are not there fill rows of s_t that nobody stores: no check of kv_index is needed.
    p_t, ds_t = softmax_grad(
        s_t, dp_t, lse[None, :], delta[None, :], offs_q[None, :], kv_index, T_q, T_kv,
        mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head, scale, threshold, keep_scale,
        False, MASK, IS_CAUSAL, HAS_DROPOUT,
    )  # fmt: skip
    dv0, dv1 = accumulate(dv0, dv1, p_t.to(do0.dtype), do0, do1, BLOCK_D1, PRECISION)
    dk0, dk1 = accumulate(dk0, dk1, ds_t.to(q0.dtype), q0, q1, BLOCK_D1, PRECISION)
    return dk0, dk1, dv0, dv1


@triton.jit
def _dkdv_key_tile(
    dk_ptr, dv_ptr, do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, mask_ptr, seed_ptr,
    start_kv, head, T_q, T_kv, stride_dk_t, stride_do_t, stride_q_t, stride_k_t, stride_v_t,
    stride_mask_q, stride_mask_kv, scale, threshold, keep_scale,
    BLOCK_KV: tl.constexpr, CHECK_KV: tl.constexpr, BLOCK_Q: tl.constexpr, TAIL_Q: tl.constexpr,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    kv_index = (start_kv + tl.arange(0, BLOCK_KV))[:, None]
    k0, k1 = load_head(k_ptr, stride_k_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV)
    v0, v1 = load_head(v_ptr, stride_v_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV)
    dk0, dk1 = zeros_head(BLOCK_KV, BLOCK_D0, BLOCK_D1)
    dv0, dv1 = zeros_head(BLOCK_KV, BLOCK_D0, BLOCK_D1)

    CHECK_Q: tl.constexpr = TAIL_Q == BLOCK_Q
    full_q = full_tiles(T_q, BLOCK_Q, TAIL_Q) * BLOCK_Q
    first_q = 0
    if IS_CAUSAL:
        first_q = tl.minimum(full_q, start_kv // BLOCK_Q * BLOCK_Q)
    for start_q in tl.range(first_q, full_q, BLOCK_Q, disable_licm=True):
        dk0, dk1, dv0, dv1 = _dkdv_step(
            dk0, dk1, dv0, dv1, k0, k1, v0, v1, do_ptr, q_ptr, lse_ptr, delta_ptr,
            stride_do_t, stride_q_t, start_q, kv_index, T_q, T_kv,
            mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head, scale, threshold, keep_scale,
            BLOCK_Q, CHECK_Q, D, BLOCK_D0, BLOCK_D1, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    if TAIL_Q > 0 and TAIL_Q < BLOCK_Q:
        dk0, dk1, dv0, dv1 = _dkdv_step(
            dk0, dk1, dv0, dv1, k0, k1, v0, v1, do_ptr, q_ptr, lse_ptr, delta_ptr,
            stride_do_t, stride_q_t, full_q, kv_index, T_q, T_kv,
            mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head, scale, threshold, keep_scale,
            TAIL_Q, True, D, BLOCK_D0, BLOCK_D1, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    dk0 *= scale
    if BLOCK_D1 > 0:
        dk1 *= scale
    store_head(dk_ptr, dk0, dk1, stride_dk_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1)
    store_head(dv_ptr, dv0, dv1, stride_dk_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1)


@triton.jit
def _attention_bwd_dkdv_kernel(
    dk_ptr, dv_ptr, do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, mask_ptr, seed_ptr,
    H, T_q, T_kv, stride_dk_t, stride_do_b, stride_do_t, stride_do_h,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_kv,
    scale, threshold, keep_scale,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr,
    BLOCK_KV: tl.constexpr, TAIL_KV: tl.constexpr, BLOCK_Q: tl.constexpr, TAIL_Q: tl.constexpr,
    PRECISION: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T_kv, BLOCK_KV)
    pid_kv = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles).to(tl.int64)  # b * H + h
    b, h = head // H, head % H
    dk_ptr += b * T_kv * stride_dk_t + h * D
    dv_ptr += b * T_kv * stride_dk_t + h * D
    lse_ptr += head * T_q
    delta_ptr += head * T_q
    do_ptr = head_ptr(do_ptr, b, h, stride_do_b, stride_do_h)
    q_ptr = head_ptr(q_ptr, b, h, stride_q_b, stride_q_h)
    k_ptr = head_ptr(k_ptr, b, h, stride_k_b, stride_k_h)
    v_ptr = head_ptr(v_ptr, b, h, stride_v_b, stride_v_h)
    if MASK != "none":
        mask_ptr += b * stride_mask_b + h * stride_mask_h
    start_kv = pid_kv * BLOCK_KV
    if pid_kv < full_tiles(T_kv, BLOCK_KV, TAIL_KV):
        _dkdv_key_tile(
            dk_ptr, dv_ptr, do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, mask_ptr, seed_ptr,
            start_kv, head, T_q, T_kv, stride_dk_t, stride_do_t, stride_q_t, stride_k_t, stride_v_t,
            stride_mask_q, stride_mask_kv, scale, threshold, keep_scale,
            BLOCK_KV, TAIL_KV == BLOCK_KV, BLOCK_Q, TAIL_Q, D, BLOCK_D0, BLOCK_D1, PRECISION,
            MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    else:
        if TAIL_KV > 0 and TAIL_KV < BLOCK_KV:
            _dkdv_key_tile(
                dk_ptr, dv_ptr, do_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, mask_ptr,
                seed_ptr, start_kv, head, T_q, T_kv, stride_dk_t, stride_do_t, stride_q_t,
                stride_k_t, stride_v_t, stride_mask_q, stride_mask_kv, scale, threshold, keep_scale,
                TAIL_KV, True, BLOCK_Q, TAIL_Q, D, BLOCK_D0, BLOCK_D1, PRECISION,
                MASK, IS_CAUSAL, HAS_DROPOUT,
            )  # fmt: skip
