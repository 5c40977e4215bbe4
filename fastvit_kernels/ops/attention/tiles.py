"""What the attention kernels share: tiles of a head in and out, products, scores, dropout.

What travels together is one argument, a tuple by name: from the host strides (`HeadStrides`,
`MaskStrides`) and as constexprs `KernelConstants` and a kernel's tiles; in a kernel pointers with
their strides and scalars. Constants stand apart, because Triton makes a tensor of what is assigned
as part of another tuple. A tile of one head is a tuple of its
column parts, (x0,) or (x0, x1): a power of two and a rest (D = 72 -> 64 + 16), so that every
product over D is the sum of two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...runtime.triton import constant, tl, triton
from . import tiling

LOG2_E = constant(1.4426950408889634)
# Seven rounds of Philox 4x32 pass BigCrush: Salmon et al., SC 2011, table 2.
PHILOX_ROUNDS = constant(7)
# Rows of lse and delta are padded to 16 bytes, one copy; lse +inf there makes p exactly 0.
ROW_PAD = constant(tiling.ROW_PAD)
FARTHEST = constant(2e38)  # additive masks reach from minus this to this, which is finite in log2


class KernelConstants(NamedTuple):
    """Constants of a launch that device functions share."""

    D: Any
    BLOCK_D0: Any
    BLOCK_D1: Any  # 0 where one part holds all columns
    PRECISION: Any
    MASK: Any  # "none", "keys" (B, T_kv), "bool" or "add"
    IS_CAUSAL: Any
    HAS_DROPOUT: Any
    FENCE: Any  # `fence_async` is needed
    VARLEN: Any  # samples are sequences of their own lengths: `Packing`


class HeadStrides(NamedTuple):
    """Of (B, T, H, D), the last axis contiguous; multiples of 8."""

    b: Any
    t: Any
    h: Any


class Rows(NamedTuple):
    """One head of (B, T, H, D): its first element and the stride between tokens."""

    ptr: Any
    stride_t: Any


class MaskStrides(NamedTuple):
    """Of a mask (batch, H, T_q, T_kv), 0 along axes of 1.

    Sample b has entry b % batch: 1 for all samples alike, or the windows of an image, one by one.
    """

    batch: Any
    b: Any
    h: Any
    q: Any
    kv: Any


class Mask(NamedTuple):
    """The mask of one head, or with its strides from one head to another that of all."""

    ptr: Any
    strides: Any


class Keep(NamedTuple):
    """What dropout keeps: where 31 random bits are at least the threshold, times the scale."""

    threshold: Any
    scale: Any


class Dropout(NamedTuple):
    seed_ptr: Any
    keep: Any


class Scores(NamedTuple):
    """What makes probabilities of the products q k^T; () where there is no mask, no dropout."""

    T_q: Any
    T_kv: Any
    scale: Any
    mask: Any
    dropout: Any
    head: Any  # its number, b * H + h


@triton.jit
def scores_of(mask_ptr, mask_strides, seed_ptr, keep, T_q, T_kv, scale, FORM: tl.constexpr):
    """The `Scores` of a launch, without a head."""
    mask, dropout = (), ()
    if FORM.MASK != "none":
        mask = Mask(mask_ptr, mask_strides)
    if FORM.HAS_DROPOUT:
        dropout = Dropout(seed_ptr, keep)
    return Scores(T_q, T_kv, scale, mask, dropout, 0)


@triton.constexpr_function
def keeps_invariants() -> bool:
    """Whether loops recompute what does not change in them (`disable_licm`): where there is wgmma.

    There, hoisting spills the descriptors of tiles in shared memory. Elsewhere it takes the copy of
    q or k into shared memory out of the loop, which Triton 3.9 would otherwise repeat each time,
    from registers: 200 to 3,000 bytes of spills a thread on sm_80.
    """
    target = tl.target_info.current_target()
    return target is not None and target.backend == "cuda" and target.arch // 10 in (9, 10, 11)


@triton.jit
def full_tiles(T, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """How many tiles are of size BLOCK: the last too, masked, where its tail tile is as large."""
    return tl.cdiv(T, BLOCK) if TAIL == BLOCK else T // BLOCK


@triton.jit
def padded(T):
    """The length of a row of lse or delta."""
    return tl.multiple_of(tl.cdiv(T, ROW_PAD) * ROW_PAD, 4)


@triton.jit
def tile_ptrs(rows, start, BLOCK_T: tl.constexpr, FIRST_D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers of a tile: the scalar part in 64 bits, offsets within the tile in 32.

    Offsets of 64 bits for every row would take the registers that accumulators need; the launcher
    bounds stride_t (MAX_TOKEN_STRIDE) and sees to it that it is a multiple of 8.
    """
    first = rows.ptr + tl.multiple_of(tl.cast(start, tl.int64) * rows.stride_t, 8)
    offs_t = tl.multiple_of(tl.arange(0, BLOCK_T)[:, None] * rows.stride_t, (8, 8))
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)
    return first + (offs_t + offs_d[None, :])


@triton.jit
def transposed_tile_ptrs(rows, start, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers (BLOCK_D, BLOCK_T) of a tile. Not by tl.trans: AMD's backend transposes none."""
    first = rows.ptr + tl.multiple_of(tl.cast(start, tl.int64) * rows.stride_t, 8)
    offs_t = tl.multiple_of(tl.arange(0, BLOCK_T)[None, :] * rows.stride_t, (8, 8))
    return first + (offs_t + tl.arange(0, BLOCK_D)[:, None])


@triton.jit
def load_part(
    rows,
    start,
    T,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FIRST_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK_T: tl.constexpr,
):
    """(BLOCK_T, BLOCK_D) at token `start`, column FIRST_D; zeros past T and D."""
    offs_t = start + tl.arange(0, BLOCK_T)
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)
    ptrs = tile_ptrs(rows, start, BLOCK_T, FIRST_D, BLOCK_D)
    if CHECK_T and FIRST_D + BLOCK_D > D:
        return tl.load(ptrs, mask=(offs_t[:, None] < T) & (offs_d[None, :] < D), other=0.0)
    elif CHECK_T:
        return tl.load(ptrs, mask=offs_t[:, None] < T, other=0.0)
    elif FIRST_D + BLOCK_D > D:
        return tl.load(ptrs, mask=offs_d[None, :] < D, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def load_head(rows, start, T, FORM: tl.constexpr, BLOCK_T: tl.constexpr, CHECK_T: tl.constexpr):
    """A tile of one head as its column parts."""
    x0 = load_part(rows, start, T, FORM.D, BLOCK_T, 0, FORM.BLOCK_D0, CHECK_T)
    if FORM.BLOCK_D1 > 0:
        x1 = load_part(rows, start, T, FORM.D, BLOCK_T, FORM.BLOCK_D0, FORM.BLOCK_D1, CHECK_T)
        return x0, x1
    else:
        return (x0,)


@triton.jit
def store_part(
    rows,
    x,
    start,
    T,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FIRST_D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The rows before T, columns before D.

    Rows are counted from `start`: with `load_part`'s own comparison the predicates of tiles that
    were loaded before a loop would live until here, and ptxas spills what its seven cannot hold.
    """
    is_row = tl.arange(0, BLOCK_T) < T - start
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)
    ptrs = tile_ptrs(rows, start, BLOCK_T, FIRST_D, BLOCK_D)
    mask = is_row[:, None] & (offs_d[None, :] < D)
    tl.store(ptrs, x.to(rows.ptr.dtype.element_ty), mask=mask)


# Gradients of the projection's bias. Without dropout a query's probabilities add up to 1, so
# sum_s dv[s] = sum_t do[t]; and its ds to 0, so that k's bias, which adds the same to all scores of
# a query, has none. A tile of queries leaves its sums in a row of (rows, 3, H, D) fp32, from ptr on
# those of its head.


@triton.jit
def store_dq_sum(ptr, dq, scale, H, D: tl.constexpr, FIRST_D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The parts of q and k; k's is 0, or NaN where dq is not finite."""
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)
    ptrs, mask = ptr + offs_d, offs_d < D
    x = tl.sum(dq, axis=0) * scale
    tl.store(ptrs, x, mask=mask)
    tl.store(ptrs + H * D, x * 0.0, mask=mask)


@triton.jit
def store_do_sum(
    ptr, do, lse, num_queries, H, D: tl.constexpr, FIRST_D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """The part of v; NaN where a query's lse is not finite, whose probabilities have no sum."""
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)
    ptrs = ptr + 2 * H * D + offs_d
    is_query = tl.arange(0, lse.shape[0]) < num_queries
    zero = tl.sum(tl.where(is_query, lse * 0.0, 0.0), axis=0)
    tl.store(ptrs, tl.sum(do.to(tl.float32), axis=0) + zero, mask=offs_d < D)


@triton.jit
def store_head(rows, x, start, T, FORM: tl.constexpr, BLOCK_T: tl.constexpr):
    store_part(rows, x[0], start, T, FORM.D, BLOCK_T, 0, FORM.BLOCK_D0)
    if FORM.BLOCK_D1 > 0:
        store_part(rows, x[1], start, T, FORM.D, BLOCK_T, FORM.BLOCK_D0, FORM.BLOCK_D1)


@triton.jit
def zeros_head(FORM: tl.constexpr, BLOCK_T: tl.constexpr):
    """Accumulator of a head's tile."""
    D0: tl.constexpr = FORM.BLOCK_D0
    D1: tl.constexpr = FORM.BLOCK_D1
    x0 = tl.zeros((BLOCK_T, D0), dtype=tl.float32)
    if D1 > 0:
        return x0, tl.zeros((BLOCK_T, D1), dtype=tl.float32)
    else:
        return (x0,)


@triton.jit
def scaled_head(x, factor, FORM: tl.constexpr):
    if FORM.BLOCK_D1 > 0:
        return x[0] * factor, x[1] * factor
    else:
        return (x[0] * factor,)


@triton.jit
def fence_async(scores, FORM: tl.constexpr):
    """Lets wgmma that follows read what cp.async wrote before.

    wgmma reads shared memory through the async proxy, cp.async writes it through the generic one,
    and before 3.7.1 Triton puts no fence between (triton #9610, #10537). Elementwise assembly needs
    an operand: any scalar, but not one that the loop changes, on which the pipeliner fails.
    """
    if FORM.FENCE:
        fence: tl.constexpr = "fence.proxy.async.shared::cta; mov.b32 $0, $1;"
        tl.inline_asm_elementwise(fence, "=r,r", [scores.scale], tl.float32, is_pure=False, pack=1)


@triton.jit
def product_over_d(a, b, FORM: tl.constexpr):
    """a b^T (rows of a, rows of b), both tiles loaded."""
    x = tl.dot(a[0], tl.trans(b[0]), input_precision=FORM.PRECISION)
    if FORM.BLOCK_D1 > 0:
        x = tl.dot(a[1], tl.trans(b[1]), x, input_precision=FORM.PRECISION)
    return x


@triton.jit
def accumulate(acc, p, x, FORM: tl.constexpr):
    """acc + p x over the rows of x."""
    acc0 = tl.dot(p, x[0], acc[0], input_precision=FORM.PRECISION)
    if FORM.BLOCK_D1 > 0:
        return acc0, tl.dot(p, x[1], acc[1], input_precision=FORM.PRECISION)
    else:
        return (acc0,)


@triton.jit
def mask_scores(s, q_index, kv_index, scores, FORM: tl.constexpr, CHECK_KV: tl.constexpr):
    """Unscaled scores with -inf where a key may not be seen. Beside an additive mask they are in
    log2 units (`log2_scale`): product and mask are rounded once, as their sum.

    q_index and kv_index are shaped to broadcast over s in either orientation.
    """
    mask = scores.mask
    if FORM.MASK == "keys":
        if CHECK_KV:
            ptrs = mask.ptr + kv_index.to(tl.int64) * mask.strides.kv
            shown = tl.load(ptrs, mask=kv_index < scores.T_kv, other=0) != 0
            s = tl.where(shown, s, float("-inf"))
    elif FORM.MASK != "none":
        offs_kv = kv_index.to(tl.int64) * mask.strides.kv
        ptrs = mask.ptr + (q_index.to(tl.int64) * mask.strides.q + offs_kv)
        seen = (q_index < scores.T_q) & (kv_index < scores.T_kv)
        if FORM.MASK == "bool":
            s = tl.where(tl.load(ptrs, mask=seen, other=0) != 0, s, float("-inf"))
        else:
            bias = tl.load(ptrs, mask=seen, other=0.0).to(tl.float32)
            s = s * (scores.scale * LOG2_E) + mask_in_log2(bias)
    if CHECK_KV and FORM.MASK != "keys":
        s = tl.where(kv_index < scores.T_kv, s, float("-inf"))
    if FORM.IS_CAUSAL:
        s = tl.where(kv_index <= q_index, s, float("-inf"))
    return s


@triton.jit
def mask_in_log2(bias):
    """An additive mask in log2 units. What is finite stays so, and swallows the score."""
    finite = tl.minimum(tl.maximum(bias, -FARTHEST), FARTHEST)
    return tl.where(bias == float("-inf"), bias, finite * LOG2_E)


@triton.jit
def log2_scale(scores, FORM: tl.constexpr):
    """What makes log2 units of masked scores, which an additive mask has done before it was added:
    product and maximum of far scores would be rounded apart, where one is fused and one is not."""
    if FORM.MASK == "add":
        return 1.0
    else:
        return scores.scale * LOG2_E


@triton.jit
def store_lse(lse_ptr, row_max, row_sum, start_q, T_q, FORM: tl.constexpr, BLOCK_Q: tl.constexpr):
    """lse = log2 sum exp of each row, as backward takes it (`probabilities`).

    A row that sees no key gets +inf, which makes its p 0. Beside an additive mask a large row_max
    would swallow log2(row_sum): each has a row of its own.
    """
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    is_row = offs_q < padded(T_q)
    lse = tl.log2(row_sum)
    if FORM.MASK == "add":
        row_max = tl.where((row_sum == 0.0) | (offs_q >= T_q), 0.0, row_max)
        tl.store(lse_ptr + padded(T_q) + offs_q, row_max, mask=is_row)
    else:
        lse += row_max
    if FORM.MASK != "none":
        lse = tl.where(row_sum == 0.0, float("inf"), lse)
    tl.store(lse_ptr + offs_q, tl.where(offs_q < T_q, lse, float("inf")), mask=is_row)


@triton.jit
def load_lse(lse_ptr, start_q, T_q, FORM: tl.constexpr, BLOCK_Q: tl.constexpr, CHECK: tl.constexpr):
    """What `store_lse` wrote: lse, or beside an additive mask (log2 of the sum, maximum).

    +inf makes p of a query that is not there exactly 0.
    """
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    if CHECK:
        lse = tl.load(lse_ptr + offs_q, mask=offs_q < padded(T_q), other=float("inf"))
    else:
        lse = tl.load(lse_ptr + offs_q)
    if FORM.MASK == "add":
        lse_ptr += padded(T_q)
        if CHECK:
            return lse, tl.load(lse_ptr + offs_q, mask=offs_q < padded(T_q), other=0.0)
        else:
            return lse, tl.load(lse_ptr + offs_q)
    else:
        return lse


@triton.jit
def probabilities(s, lse, scores, FORM: tl.constexpr, Q_FIRST: tl.constexpr):
    """p = exp2(s - lse) of masked scores, queries by rows where Q_FIRST, else by columns."""
    if FORM.MASK == "add":
        return tl.exp2(s - _of_queries(lse[1], Q_FIRST) - _of_queries(lse[0], Q_FIRST))
    else:
        return tl.exp2(s * log2_scale(scores, FORM) - _of_queries(lse, Q_FIRST))


@triton.jit
def _of_queries(x, Q_FIRST: tl.constexpr):
    if Q_FIRST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def _halved(start, BLOCK: tl.constexpr):
    """The indices of a tile whose bit 3 is 0; start is a multiple of 16."""
    i = tl.arange(0, BLOCK // 2)
    return start + i // 8 * 16 + i % 8


@triton.jit
def dropout_keep(
    scores,
    start_row,
    start_column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    Q_FIRST: tl.constexpr,
):
    """Which probabilities of a tile are kept: Philox bits of (head, query, key), drawn again in the
    backward.

    A call of Philox gives four words, for the queries and keys that differ in bit 3: in the layouts
    of tensor cores one thread has all four, whichever of queries and keys are the rows.
    """
    seed = tl.load(scores.dropout.seed_ptr)
    rows, columns = _halved(start_row, ROWS)[:, None], _halved(start_column, COLUMNS)[None, :]
    zero = rows * 0 + columns * 0
    q, kv = rows, columns
    if not Q_FIRST:
        q, kv = columns, rows
    c0, c1, c2 = kv + zero, q + zero, scores.head.to(tl.int32) + zero
    c0, c1, c2, c3 = c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), zero.to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3, PHILOX_ROUNDS)
    if not Q_FIRST:
        w1, w2 = w2, w1
    top, low = _joined_columns(w0, w1, ROWS, COLUMNS), _joined_columns(w2, w3, ROWS, COLUMNS)
    bits = tl.reshape(tl.join(top, low), (ROWS // 16, 8, COLUMNS, 2))
    bits = tl.reshape(tl.permute(bits, (0, 3, 1, 2)), (ROWS, COLUMNS))
    return (bits >> 1).to(tl.int32) >= scores.dropout.keep.threshold


@triton.jit
def _joined_columns(x0, x1, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS / 2, COLUMNS) of the columns whose bit 3 is 0 and of those where it is 1."""
    x = tl.reshape(tl.join(x0, x1), (ROWS // 2, COLUMNS // 16, 8, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 2)), (ROWS // 2, COLUMNS))


@triton.jit
def softmax_grad(
    s,
    dp,
    lse,
    delta,
    start_q,
    start_kv,
    scores,
    FORM: tl.constexpr,
    CHECK_KV: tl.constexpr,
    Q_FIRST: tl.constexpr,
):
    """p (as it met v, so after dropout) and ds = p (dp - delta), in the orientation of s. lse as by
    `load_lse`, delta a number a query."""
    ROWS: tl.constexpr = s.shape[0]
    COLUMNS: tl.constexpr = s.shape[1]
    if Q_FIRST:
        start_row, start_column = start_q, start_kv
    else:
        start_row, start_column = start_kv, start_q
    rows = (start_row + tl.arange(0, ROWS))[:, None]
    columns = (start_column + tl.arange(0, COLUMNS))[None, :]
    if Q_FIRST:
        q_index, kv_index = rows, columns
    else:
        q_index, kv_index = columns, rows
    s = mask_scores(s, q_index, kv_index, scores, FORM, CHECK_KV)
    p = probabilities(s, lse, scores, FORM, Q_FIRST)
    delta = _of_queries(delta, Q_FIRST)
    if FORM.HAS_DROPOUT:
        keep = dropout_keep(scores, start_row, start_column, ROWS, COLUMNS, Q_FIRST)
        keep_scale = scores.dropout.keep.scale
        dp = tl.where(keep, dp * keep_scale, 0.0)
        return tl.where(keep, p * keep_scale, 0.0), p * (dp - delta)
    else:
        return p, p * (dp - delta)
