"""Flash attention, forward.

    s = scale * q k^T (+ mask),  p = softmax(s),  out = dropout(p) v,  lse = log2 sum exp(s)

A program owns one tile of queries of a head, or of HEADS heads one after the other, and walks the
keys with the online softmax. Source: arXiv:2205.14135, arXiv:2307.08691.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...runtime.triton import ANY_BATCH, tl, triton
from .samples import (
    head_rows,
    lse_ptr_of,
    next_tile,
    packed_rows,
    packing_of,
    sample_of,
    shown_tiles,
)
from .tiles import (
    accumulate,
    dropout_keep,
    fence_async,
    full_tiles,
    keeps_invariants,
    load_head,
    log2_scale,
    mask_scores,
    product_over_d,
    scaled_head,
    scores_of,
    store_head,
    store_lse,
    zeros_head,
)


class Tiles(NamedTuple):
    """The tiles of a program."""

    BLOCK_Q: Any
    RAGGED_Q: Any  # the last tile of queries is not full
    BLOCK_KV: Any
    TAIL_KV: Any
    ONE_KV: Any  # one tile holds all keys


@triton.jit
def _attend(
    state,
    q,
    keys,
    start_kv,
    start_q,
    scores,
    FORM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    CHECK_KV: tl.constexpr,
    FIRST: tl.constexpr,
):
    """One step of the online softmax: the tile of keys and values at start_kv."""
    acc, row_max, row_sum = state
    k_rows, v_rows = keys
    k = load_head(k_rows, start_kv, scores.T_kv, FORM, BLOCK_KV, CHECK_KV)
    fence_async(scores, FORM)
    s = product_over_d(q, k, FORM)
    BLOCK_Q: tl.constexpr = s.shape[0]
    q_index = (start_q + tl.arange(0, BLOCK_Q))[:, None]
    kv_index = (start_kv + tl.arange(0, BLOCK_KV))[None, :]
    s = mask_scores(s, q_index, kv_index, scores, FORM, CHECK_KV)
    scale_log2 = log2_scale(scores, FORM)
    new_max = tl.maximum(row_max, tl.max(s, axis=1) * scale_log2)
    shift = new_max
    if FORM.MASK != "none":  # a row may have seen no key yet, and -inf - -inf is NaN
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * scale_log2 - shift[:, None])
    new_sum = tl.sum(p, axis=1)
    if not FIRST:  # there is a former sum and accumulator, relative to the former maximum
        rescale = tl.exp2(row_max - shift)
        new_sum += row_sum * rescale
        acc = scaled_head(acc, rescale[:, None], FORM)
    if FORM.HAS_DROPOUT:
        keep = dropout_keep(scores, start_q, start_kv, BLOCK_Q, BLOCK_KV, True)
        p = tl.where(keep, p, 0.0)
    v = load_head(v_rows, start_kv, scores.T_kv, FORM, BLOCK_KV, CHECK_KV)
    acc = accumulate(acc, p.to(v[0].dtype), v, FORM)
    return acc, new_max, new_sum


@triton.jit
def _over_keys(state, q, keys, start_q, scores, FORM: tl.constexpr, TILES: tl.constexpr):
    """The online softmax of a tile of queries over all keys."""
    BLOCK_Q: tl.constexpr = TILES.BLOCK_Q
    BLOCK: tl.constexpr = TILES.BLOCK_KV
    TAIL: tl.constexpr = TILES.TAIL_KV
    CHECK: tl.constexpr = TAIL == BLOCK
    T_kv = scores.T_kv
    if TILES.ONE_KV:
        state = _attend(state, q, keys, 0, start_q, scores, FORM, BLOCK, CHECK, True)
    elif FORM.MASK == "keys":
        shown, steps = shown_tiles(scores, T_kv, BLOCK)
        tl.assume(steps > 0)
        for _ in tl.range(0, steps, disable_licm=keeps_invariants()):
            start_kv, shown = next_tile(shown, BLOCK)
            state = _attend(state, q, keys, start_kv, start_q, scores, FORM, BLOCK, CHECK, False)
    else:
        full_kv = full_tiles(T_kv, BLOCK, TAIL) * BLOCK
        end_kv = full_kv
        if FORM.IS_CAUSAL:
            end_kv = tl.minimum(full_kv, tl.cdiv(start_q + BLOCK_Q, BLOCK) * BLOCK)
        tl.assume(end_kv > 0)  # with a way around the loop ptxas would wait for each wgmma
        for start_kv in tl.range(0, end_kv, BLOCK, disable_licm=keeps_invariants()):
            state = _attend(state, q, keys, start_kv, start_q, scores, FORM, BLOCK, CHECK, False)
        if TAIL > 0 and TAIL < BLOCK:
            state = _attend(state, q, keys, full_kv, start_q, scores, FORM, TAIL, True, False)
    return state


@triton.jit
def _fwd_head(
    ptrs, strides, packing, pid_q, head, H, scores, FORM: tl.constexpr, TILES: tl.constexpr
):
    """Query tile pid_q of one head, head = b * H + h."""
    sample, scores = sample_of(packing, scores, head, H, FORM)
    if not FORM.VARLEN or pid_q * TILES.BLOCK_Q < scores.T_q:
        _fwd_tile(ptrs, strides, pid_q, sample, H, scores, FORM, TILES)


@triton.jit
def _fwd_tile(ptrs, strides, pid_q, sample, H, scores, FORM: tl.constexpr, TILES: tl.constexpr):
    T_q = scores.T_q
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr = ptrs
    stride_q, stride_k, stride_v = strides
    out_rows = packed_rows(out_ptr, H * FORM.D, sample.first_q, sample, FORM.D)
    lse_ptr = lse_ptr_of(lse_ptr, sample, FORM)
    q_rows = head_rows(q_ptr, stride_q, sample)
    keys = head_rows(k_ptr, stride_k, sample), head_rows(v_ptr, stride_v, sample)
    BLOCK_Q: tl.constexpr = TILES.BLOCK_Q
    start_q = pid_q * BLOCK_Q
    q = load_head(q_rows, start_q, T_q, FORM, BLOCK_Q, TILES.RAGGED_Q)
    acc = zeros_head(FORM, BLOCK_Q)
    row_max = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_Q,), dtype=tl.float32)
    state = acc, row_max, row_sum
    acc, row_max, row_sum = _over_keys(state, q, keys, start_q, scores, FORM, TILES)
    store_lse(lse_ptr, row_max, row_sum, start_q, T_q, FORM, BLOCK_Q)
    factor = 1.0 / row_sum
    if FORM.MASK != "none":  # a row that sees no key
        factor = tl.where(row_sum == 0.0, 0.0, factor)
    if FORM.HAS_DROPOUT:
        factor *= scores.dropout.keep.scale
    acc = scaled_head(acc, factor[:, None], FORM)
    store_head(out_rows, acc, start_q, T_q, FORM, BLOCK_Q)


@triton.jit(**ANY_BATCH)
def _attention_fwd_kernel(
    out_ptr,
    lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    mask_ptr,
    seed_ptr,
    cu_seqlens_ptr,
    num_heads,
    H,
    T_q,
    T_kv,
    total,
    stride_rows_h,
    strides,
    mask_strides,
    scale,
    keep,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
):
    packing = packing_of(cu_seqlens_ptr, total, stride_rows_h, FORM)
    scores = scores_of(mask_ptr, mask_strides, seed_ptr, keep, T_q, T_kv, scale, FORM)
    ptrs = out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr
    # Query tiles of a head are neighbours: its keys and values stay in L2.
    num_tiles = tl.cdiv(T_q, TILES.BLOCK_Q)
    pid_q = tl.program_id(0) % num_tiles
    first = tl.program_id(0) // num_tiles * HEADS
    if HEADS == 1:
        _fwd_head(ptrs, strides, packing, pid_q, first, H, scores, FORM, TILES)
    else:
        tl.assume(first < num_heads)
        last = tl.minimum(first + HEADS, num_heads)
        for i in tl.range(first, last, disable_licm=keeps_invariants()):
            head = tl.cast(i, tl.int32)  # the interpreter's is a Python int
            _fwd_head(ptrs, strides, packing, pid_q, head, H, scores, FORM, TILES)
