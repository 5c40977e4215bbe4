"""What the attention kernels share: tiles of a head in and out, products, scores, dropout.

Kernels take q, k, v by the strides of (B, T, H, D) views with a contiguous last axis. A tile of one
head comes as two column parts, a power of two and a rest (D = 72 -> 64 + 16), so that every product
over D is the sum of two.
"""

from __future__ import annotations

from ...runtime.triton import tl, triton


@triton.jit
def full_tiles(T, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """How many tiles are of size BLOCK: the last too, masked, where its tail tile is as large."""
    return tl.cdiv(T, BLOCK) if TAIL == BLOCK else T // BLOCK


@triton.jit
def tile_ptrs(ptr, stride_t, start, BLOCK_T: tl.constexpr, FIRST_D: tl.constexpr, BLOCK_D):
    """Pointers of a tile: the scalar part in 64 bits, offsets within the tile in 32.

    Offsets of 64 bits for every row would take the registers that accumulators need; the launcher
    bounds stride_t (MAX_TOKEN_STRIDE) and sees to it that it is a multiple of 8.
    """
    first = ptr + tl.multiple_of(tl.cast(start, tl.int64) * stride_t, 8)
    rows = tl.multiple_of(tl.arange(0, BLOCK_T)[:, None] * stride_t, (8, 8))
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)
    return first + (rows + offs_d[None, :])


@triton.jit
def transposed_tile_ptrs(ptr, stride_t, start, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers (BLOCK_D, BLOCK_T) of a tile. Not by tl.trans: AMD's backend transposes none."""
    first = ptr + tl.multiple_of(tl.cast(start, tl.int64) * stride_t, 8)
    columns = tl.multiple_of(tl.arange(0, BLOCK_T)[None, :] * stride_t, (8, 8))
    return first + (columns + tl.arange(0, BLOCK_D)[:, None])


@triton.jit
def load_part(
    ptr, stride_t, start, T,
    BLOCK_T: tl.constexpr, FIRST_D: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr,
    CHECK_T: tl.constexpr,
):  # fmt: skip
    """(BLOCK_T, BLOCK_D) at token `start`, column FIRST_D; zeros past T and D."""
    offs_t = start + tl.arange(0, BLOCK_T)
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)
    ptrs = tile_ptrs(ptr, stride_t, start, BLOCK_T, FIRST_D, BLOCK_D)
    if CHECK_T and FIRST_D + BLOCK_D > D:
        return tl.load(ptrs, mask=(offs_t[:, None] < T) & (offs_d[None, :] < D), other=0.0)
    elif CHECK_T:
        return tl.load(ptrs, mask=offs_t[:, None] < T, other=0.0)
    elif FIRST_D + BLOCK_D > D:
        return tl.load(ptrs, mask=offs_d[None, :] < D, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def load_head(
    ptr, stride_t, start, T,
    BLOCK_T: tl.constexpr, D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr,
    CHECK_T: tl.constexpr,
):  # fmt: skip
    """A tile of one head as its two column parts; the second repeats the first where unused."""
    x0 = load_part(ptr, stride_t, start, T, BLOCK_T, 0, BLOCK_D0, D, CHECK_T)
    x1 = x0
    if BLOCK_D1 > 0:
        x1 = load_part(ptr, stride_t, start, T, BLOCK_T, BLOCK_D0, BLOCK_D1, D, CHECK_T)
    return x0, x1


@triton.jit
def store_part(
    ptr, x, stride_t, start, T,
    BLOCK_T: tl.constexpr, FIRST_D: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    offs_t = start + tl.arange(0, BLOCK_T)
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)
    ptrs = tile_ptrs(ptr, stride_t, start, BLOCK_T, FIRST_D, BLOCK_D)
    mask = (offs_t[:, None] < T) & (offs_d[None, :] < D)
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_head(
    ptr, x0, x1, stride_t, start, T,
    BLOCK_T: tl.constexpr, D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr,
):  # fmt: skip
    store_part(ptr, x0, stride_t, start, T, BLOCK_T, 0, BLOCK_D0, D)
    if BLOCK_D1 > 0:
        store_part(ptr, x1, stride_t, start, T, BLOCK_T, BLOCK_D0, BLOCK_D1, D)


@triton.jit
def zeros_head(BLOCK_T: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr):
    """Accumulator of a head's tile; an unused second part is one element, to cost no registers."""
    x0 = tl.zeros((BLOCK_T, BLOCK_D0), dtype=tl.float32)
    if BLOCK_D1 > 0:
        return x0, tl.zeros((BLOCK_T, BLOCK_D1), dtype=tl.float32)
    else:
        return x0, tl.zeros((1, 1), dtype=tl.float32)


@triton.jit
def product_over_d(a0, a1, b0, b1, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T (rows of a, rows of b), both tiles loaded."""
    x = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if BLOCK_D1 > 0:
        x = tl.dot(a1, tl.trans(b1), x, input_precision=PRECISION)
    return x


@triton.jit
def accumulate(acc0, acc1, p, x0, x1, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr):
    """acc + p x over the rows of x."""
    acc0 = tl.dot(p, x0, acc0, input_precision=PRECISION)
    if BLOCK_D1 > 0:
        acc1 = tl.dot(p, x1, acc1, input_precision=PRECISION)
    return acc0, acc1


@triton.jit
def mask_scores(
    s, q_index, kv_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, scale,
    CHECK_KV: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
):  # fmt: skip
    """Unscaled scores with -inf where a key may not be seen, and the additive mask / scale.

    q_index and kv_index are shaped to broadcast over s in either orientation.
    """
    if MASK != "none":
        ptrs = mask_ptr + q_index.to(tl.int64) * stride_mask_q + kv_index * stride_mask_kv
        seen = (q_index < T_q) & (kv_index < T_kv)
        if MASK == "bool":
            s = tl.where(tl.load(ptrs, mask=seen, other=0) != 0, s, float("-inf"))
        else:
            s += tl.load(ptrs, mask=seen, other=0.0).to(tl.float32) / scale
    if CHECK_KV:
        s = tl.where(kv_index < T_kv, s, float("-inf"))
    if IS_CAUSAL:
        s = tl.where(kv_index <= q_index, s, float("-inf"))
    return s


@triton.jit
def dropout_keep(seed_ptr, head, q_index, kv_index, threshold):
    """Which probabilities are kept: Philox bits of (head, query, key), redrawn in backward."""
    seed = tl.load(seed_ptr)
    zero = q_index * 0 + kv_index * 0
    c0, c1, c2 = kv_index + zero, q_index + zero, head.to(tl.int32) + zero
    bits, _, _, _ = tl.philox(
        seed, c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), zero.to(tl.uint32)
    )
    return (bits >> 1).to(tl.int32) >= threshold


@triton.jit
def head_ptr(ptr, b, h, stride_b, stride_h):
    """The head's first element. The launcher sees to strides that are multiples of 8."""
    return ptr + tl.multiple_of(b * stride_b + h * stride_h, 8)


@triton.jit
def softmax_grad(
    s, dp, lse, delta, q_index, kv_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv,
    seed_ptr, head, scale, threshold, keep_scale,
    CHECK_KV: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """p (as it met v, so after dropout) and ds = p (dp - delta), in the orientation of s."""
    s = mask_scores(
        s, q_index, kv_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, scale,
        CHECK_KV, MASK, IS_CAUSAL,
    )  # fmt: skip
    p = tl.exp2(s * (scale * 1.4426950408889634) - lse)
    if HAS_DROPOUT:
        keep = dropout_keep(seed_ptr, head, q_index, kv_index, threshold)
        dp = tl.where(keep, dp * keep_scale, 0.0)
        return tl.where(keep, p * keep_scale, 0.0), p * (dp - delta)
    else:
        return p, p * (dp - delta)
