"""Flash attention in Triton: the kernels, and the tiles they are launched with.

    s = scale * q k^T (+ mask),  p = softmax(s),  out = dropout(p) v,  lse = log2 sum exp(s)

    delta = rowsum(out * dout)                       one number a query
    dp = dout v^T,  ds = p * (dp - delta)            p rebuilt as exp2(s - lse), never stored
    dv = p^T dout,  dk = scale * ds^T q,  dq = scale * ds k

Every kernel takes q, k, v by the strides of (B, T, H, D) views with a contiguous last axis, so that
packed (B, T, 3, H, D) and torch's (B, H, T, D) are read where they lie; a program owns one tile of
one head. No T x T tensor, no atomics: equal inputs give equal bits.

Tiles are not padded where it costs. Tokens: full tiles without masks, then one tail of 16, 32 or
64 (T = 197 is 3 x 64 + 5 -> 208); where a second copy of the code for the tail takes too many
registers (wide heads, fp32), all tiles are masked. Head dim: D is cut into a power of two and a
rest (D = 72 -> 64 + 16), so every product over D is the sum of two.

Backward has two forms. One pass, where the dq of a whole head fits in registers (T <= 256 at
D = 64): one program keeps q, dout and dq, walks the keys once and writes each tile's dk and dv as
it leaves it: five products a tile instead of seven, and everything is read once. Split, for the
rest and for masks: dq by query tiles (which also writes delta), then dk and dv by key tiles.

Miscompiles reported on Hopper (a transposed accumulator as an operand of tl.dot) are avoided by
construction: only loaded tiles are transposed (the split form computes s^T as k q^T, the one-pass
form dv^T as dout^T p). Precision: scores, softmax, statistics and accumulators fp32; p and ds are
cast to the input dtype before their products. Source: arXiv:2205.14135, arXiv:2307.08691.
"""

from __future__ import annotations

from typing import NamedTuple

from fastvit_kernels._triton import tl, triton


class Tiles(NamedTuple):
    """Launch config of one kernel: rows the program owns, rows it loops over.

    `tail` is the smallest tile for the rows that full tiles leave over, in both directions. Where
    it is as large as the tile there is no second copy of the code: all tiles check their rows.
    """

    own: int
    loop: int
    num_warps: int
    num_stages: int
    tail: int


# (bytes an element, largest padded D) -> Tiles, first row that fits. Not yet measured: chosen by
# the compile command, so that nothing spills on sm_80 and sm_90 up to D = 128.
FWD_TILES = {
    (2, 64): Tiles(64, 64, 4, 3, 16),
    (2, 96): Tiles(64, 64, 4, 2, 16),
    (2, 128): Tiles(64, 64, 4, 2, 64),
    (2, 256): Tiles(64, 32, 8, 2, 64),
    (4, 128): Tiles(32, 16, 8, 2, 32),
    (4, 256): Tiles(16, 16, 4, 1, 16),
}
DQ_TILES = {
    (2, 64): Tiles(128, 64, 8, 2, 16),
    (2, 128): Tiles(64, 64, 8, 2, 64),
    (2, 256): Tiles(64, 32, 8, 1, 64),
    (4, 64): Tiles(32, 32, 4, 2, 32),
    (4, 128): Tiles(32, 16, 4, 2, 32),
    (4, 256): Tiles(16, 16, 8, 1, 16),
}
DKDV_TILES = {
    (2, 64): Tiles(128, 32, 8, 2, 16),
    (2, 128): Tiles(64, 32, 8, 2, 64),
    (2, 256): Tiles(64, 16, 8, 1, 64),
    (4, 64): Tiles(32, 32, 4, 2, 32),
    (4, 128): Tiles(32, 16, 4, 2, 32),
    (4, 256): Tiles(16, 16, 4, 1, 16),
}
# One program owns all the queries of a head, in parts of 64 or 128: smaller ones would leave wgmma
# and cost more registers than they save. (bytes an element, rows x padded D up to) -> Tiles, KB of
# shared memory on sm_80, where it is largest. Not yet measured.
ONE_PASS_TILES = {
    (2, 64 * 64): (Tiles(64, 64, 8, 1, 64), 56),
    (2, 128 * 64): (Tiles(128, 32, 8, 1, 32), 84),
    (2, 256 * 64): (Tiles(256, 32, 8, 1, 32), 144),
    (4, 64 * 64): (Tiles(64, 16, 8, 1, 16), 44),
}
LONG_T = 1024  # from here on a forward program owns twice the queries, with twice the warps
MAX_ONE_PASS_D = 64
MIN_TILE = 16  # the smallest operand of tl.dot
MAX_TOKEN_STRIDE = 2**31 // 256  # so that offsets within a tile of 256 tokens fit in 32 bits


def tiles_for(table: dict[tuple[int, int], Tiles], itemsize: int, padded_dim: int) -> Tiles:
    """The first row of a table for elements of this size whose D is large enough."""
    return next(t for (size, dim), t in table.items() if size == itemsize and padded_dim <= dim)


def split_head_dim(D: int) -> tuple[int, int]:
    """D as a power of two and a rest, 0 where padding to the next power of two costs no more."""
    padded = max(MIN_TILE, triton.next_power_of_2(D))
    half = padded // 2
    if half < MIN_TILE:
        return padded, 0
    rest = max(MIN_TILE, triton.next_power_of_2(D - half))
    return (half, rest) if half + rest < padded else (padded, 0)


def tail_tile(T: int, block: int, smallest: int = MIN_TILE) -> int:
    """Size of the tile for the T % block tokens that full tiles leave over; 0 for none."""
    left = T % block
    return min(block, max(smallest, triton.next_power_of_2(left))) if left else 0


class OnePass(NamedTuple):
    """How one program covers a head: its queries as two parts (the second may be 0)."""

    part0: int
    part1: int
    tiles: Tiles


def one_pass(T: int, padded_dim: int, itemsize: int, shared_limit: int) -> OnePass | None:
    """The one-pass backward for T queries (197 -> parts of 128 and 128), None where it cannot be.

    dq of the head stays in registers, q and dout in shared memory, which bounds T x D.
    """
    part0 = min(128, max(64, triton.next_power_of_2(T)))
    part1 = 0 if T <= 128 else 64 if T <= 192 else 128
    if part0 + part1 < T or padded_dim > MAX_ONE_PASS_D:
        return None
    for (size, elements), (tiles, shared_kb) in ONE_PASS_TILES.items():
        if size == itemsize and (part0 + part1) * padded_dim <= elements:
            return OnePass(part0, part1, tiles) if shared_kb * 1024 <= shared_limit else None
    return None


@triton.jit
def _full_tiles(T, BLOCK: tl.constexpr, TAIL: tl.constexpr):
    """How many tiles are of size BLOCK: the last too, masked, where its tail tile is as large."""
    return tl.cdiv(T, BLOCK) if TAIL == BLOCK else T // BLOCK


@triton.jit
def _tile_ptrs(ptr, stride_t, start, BLOCK_T: tl.constexpr, FIRST_D: tl.constexpr, BLOCK_D):
    """Pointers of a tile: the scalar part in 64 bits, offsets within the tile in 32.

    Offsets of 64 bits for every row would take the registers that accumulators need; the launcher
    bounds stride_t (MAX_TOKEN_STRIDE) and sees to it that it is a multiple of 8.
    """
    first = ptr + tl.multiple_of(tl.cast(start, tl.int64) * stride_t, 8)
    rows = tl.multiple_of(tl.arange(0, BLOCK_T)[:, None] * stride_t, (8, 8))
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)
    return first + (rows + offs_d[None, :])


@triton.jit
def _load_part(
    ptr, stride_t, start, T,
    BLOCK_T: tl.constexpr, FIRST_D: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr,
    CHECK_T: tl.constexpr,
):  # fmt: skip
    """(BLOCK_T, BLOCK_D) at token `start`, column FIRST_D; zeros past T and D."""
    offs_t = start + tl.arange(0, BLOCK_T)
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)
    ptrs = _tile_ptrs(ptr, stride_t, start, BLOCK_T, FIRST_D, BLOCK_D)
    if CHECK_T and FIRST_D + BLOCK_D > D:
        return tl.load(ptrs, mask=(offs_t[:, None] < T) & (offs_d[None, :] < D), other=0.0)
    elif CHECK_T:
        return tl.load(ptrs, mask=offs_t[:, None] < T, other=0.0)
    elif FIRST_D + BLOCK_D > D:
        return tl.load(ptrs, mask=offs_d[None, :] < D, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def _load_head(
    ptr, stride_t, start, T,
    BLOCK_T: tl.constexpr, D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr,
    CHECK_T: tl.constexpr,
):  # fmt: skip
    """A tile of one head as its two column parts; the second repeats the first where unused."""
    x0 = _load_part(ptr, stride_t, start, T, BLOCK_T, 0, BLOCK_D0, D, CHECK_T)
    x1 = x0
    if BLOCK_D1 > 0:
        x1 = _load_part(ptr, stride_t, start, T, BLOCK_T, BLOCK_D0, BLOCK_D1, D, CHECK_T)
    return x0, x1


@triton.jit
def _store_part(
    ptr, x, stride_t, start, T,
    BLOCK_T: tl.constexpr, FIRST_D: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    offs_t = start + tl.arange(0, BLOCK_T)
    offs_d = FIRST_D + tl.arange(0, BLOCK_D)
    ptrs = _tile_ptrs(ptr, stride_t, start, BLOCK_T, FIRST_D, BLOCK_D)
    mask = (offs_t[:, None] < T) & (offs_d[None, :] < D)
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_head(
    ptr, x0, x1, stride_t, start, T,
    BLOCK_T: tl.constexpr, D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr,
):  # fmt: skip
    _store_part(ptr, x0, stride_t, start, T, BLOCK_T, 0, BLOCK_D0, D)
    if BLOCK_D1 > 0:
        _store_part(ptr, x1, stride_t, start, T, BLOCK_T, BLOCK_D0, BLOCK_D1, D)


@triton.jit
def _zeros_head(BLOCK_T: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr):
    """Accumulator of a head's tile; an unused second part is one element, to cost no registers."""
    x0 = tl.zeros((BLOCK_T, BLOCK_D0), dtype=tl.float32)
    if BLOCK_D1 > 0:
        return x0, tl.zeros((BLOCK_T, BLOCK_D1), dtype=tl.float32)
    else:
        return x0, tl.zeros((1, 1), dtype=tl.float32)


@triton.jit
def _product_over_d(a0, a1, b0, b1, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T (rows of a, rows of b), both tiles loaded."""
    x = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    if BLOCK_D1 > 0:
        x = tl.dot(a1, tl.trans(b1), x, input_precision=PRECISION)
    return x


@triton.jit
def _accumulate(acc0, acc1, p, x0, x1, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr):
    """acc + p x over the rows of x."""
    acc0 = tl.dot(p, x0, acc0, input_precision=PRECISION)
    if BLOCK_D1 > 0:
        acc1 = tl.dot(p, x1, acc1, input_precision=PRECISION)
    return acc0, acc1


@triton.jit
def _mask_scores(
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
def _dropout_keep(seed_ptr, head, q_index, kv_index, threshold):
    """Which probabilities are kept: Philox bits of (head, query, key), redrawn in backward."""
    seed = tl.load(seed_ptr)
    zero = q_index * 0 + kv_index * 0
    c0, c1, c2 = kv_index + zero, q_index + zero, head.to(tl.int32) + zero
    bits, _, _, _ = tl.philox(
        seed, c0.to(tl.uint32), c1.to(tl.uint32), c2.to(tl.uint32), zero.to(tl.uint32)
    )
    return (bits >> 1).to(tl.int32) >= threshold


@triton.jit
def _head_ptr(ptr, b, h, stride_b, stride_h):
    """The head's first element. The launcher sees to strides that are multiples of 8."""
    return ptr + tl.multiple_of(b * stride_b + h * stride_h, 8)


@triton.jit
def _attend(
    acc0, acc1, row_max, row_sum, q0, q1, k_ptr, v_ptr, stride_k_t, stride_v_t, start_kv, q_index,
    T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head, scale, threshold,
    BLOCK_KV: tl.constexpr, CHECK_KV: tl.constexpr,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the tile of keys and values at start_kv."""
    k0, k1 = _load_head(
        k_ptr, stride_k_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV
    )
    s = _product_over_d(q0, q1, k0, k1, BLOCK_D1, PRECISION)
    kv_index = (start_kv + tl.arange(0, BLOCK_KV))[None, :]
    s = _mask_scores(
        s, q_index, kv_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, scale,
        CHECK_KV, MASK, IS_CAUSAL,
    )  # fmt: skip
    scale_log2 = scale * 1.4426950408889634
    new_max = tl.maximum(row_max, tl.max(s, axis=1) * scale_log2)
    shift = new_max
    if MASK != "none":  # a row may have seen no key yet, and -inf - -inf is NaN
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(s * scale_log2 - shift[:, None])
    rescale = tl.exp2(row_max - shift)
    row_sum = row_sum * rescale + tl.sum(p, axis=1)
    if HAS_DROPOUT:
        p = tl.where(_dropout_keep(seed_ptr, head, q_index, kv_index, threshold), p, 0.0)
    acc0 *= rescale[:, None]
    if BLOCK_D1 > 0:
        acc1 *= rescale[:, None]
    v0, v1 = _load_head(
        v_ptr, stride_v_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV
    )
    acc0, acc1 = _accumulate(acc0, acc1, p.to(v0.dtype), v0, v1, BLOCK_D1, PRECISION)
    return acc0, acc1, new_max, row_sum


@triton.jit
def _fwd_query_tile(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, start_q, head, H, T_q, T_kv,
    stride_q_t, stride_k_t, stride_v_t, stride_mask_q, stride_mask_kv,
    scale, threshold, keep_scale,
    BLOCK_Q: tl.constexpr, CHECK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL_KV: tl.constexpr,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr, PRECISION: tl.constexpr,
    MASK: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    q_index = offs_q[:, None]
    q0, q1 = _load_head(q_ptr, stride_q_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q)
    acc0, acc1 = _zeros_head(BLOCK_Q, BLOCK_D0, BLOCK_D1)
    row_max = tl.full((BLOCK_Q,), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((BLOCK_Q,), dtype=tl.float32)

    CHECK_KV: tl.constexpr = TAIL_KV == BLOCK_KV
    full_kv = _full_tiles(T_kv, BLOCK_KV, TAIL_KV) * BLOCK_KV
    end_kv = full_kv
    if IS_CAUSAL:
        end_kv = tl.minimum(full_kv, tl.cdiv(start_q + BLOCK_Q, BLOCK_KV) * BLOCK_KV)
    # disable_licm, here and below: hoisted out, the descriptors of tiles in shared memory spill.
    for start_kv in tl.range(0, end_kv, BLOCK_KV, disable_licm=True):
        acc0, acc1, row_max, row_sum = _attend(
            acc0, acc1, row_max, row_sum, q0, q1, k_ptr, v_ptr, stride_k_t, stride_v_t, start_kv,
            q_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head,
            scale, threshold, BLOCK_KV, CHECK_KV, D, BLOCK_D0, BLOCK_D1, PRECISION,
            MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    if TAIL_KV > 0 and TAIL_KV < BLOCK_KV:
        acc0, acc1, row_max, row_sum = _attend(
            acc0, acc1, row_max, row_sum, q0, q1, k_ptr, v_ptr, stride_k_t, stride_v_t, full_kv,
            q_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head,
            scale, threshold, TAIL_KV, True, D, BLOCK_D0, BLOCK_D1, PRECISION,
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
    _store_head(out_ptr, acc0, acc1, H * D, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1)
    tl.store(lse_ptr + offs_q, lse, mask=offs_q < T_q)


@triton.jit
def _attention_fwd_kernel(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, H, T_q, T_kv,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    stride_mask_b, stride_mask_h, stride_mask_q, stride_mask_kv,
    scale, threshold, keep_scale,
    D: tl.constexpr, BLOCK_D0: tl.constexpr, BLOCK_D1: tl.constexpr,
    BLOCK_Q: tl.constexpr, TAIL_Q: tl.constexpr, BLOCK_KV: tl.constexpr, TAIL_KV: tl.constexpr,
    PRECISION: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    # Query tiles of a head are neighbours: its keys and values stay in L2.
    tiles = tl.cdiv(T_q, BLOCK_Q)
    pid_q = tl.program_id(0) % tiles
    head = (tl.program_id(0) // tiles).to(tl.int64)  # b * H + h
    b, h = head // H, head % H
    out_ptr += (b * T_q * H + h) * D
    lse_ptr += head * T_q
    q_ptr = _head_ptr(q_ptr, b, h, stride_q_b, stride_q_h)
    k_ptr = _head_ptr(k_ptr, b, h, stride_k_b, stride_k_h)
    v_ptr = _head_ptr(v_ptr, b, h, stride_v_b, stride_v_h)
    if MASK != "none":
        mask_ptr += b * stride_mask_b + h * stride_mask_h
    start_q = pid_q * BLOCK_Q
    if pid_q < _full_tiles(T_q, BLOCK_Q, TAIL_Q):
        _fwd_query_tile(
            out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, start_q, head, H, T_q, T_kv,
            stride_q_t, stride_k_t, stride_v_t, stride_mask_q, stride_mask_kv,
            scale, threshold, keep_scale, BLOCK_Q, TAIL_Q == BLOCK_Q, BLOCK_KV, TAIL_KV,
            D, BLOCK_D0, BLOCK_D1, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    else:
        if TAIL_Q > 0 and TAIL_Q < BLOCK_Q:
            _fwd_query_tile(
                out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, mask_ptr, seed_ptr, start_q, head, H,
                T_q, T_kv, stride_q_t, stride_k_t, stride_v_t, stride_mask_q, stride_mask_kv,
                scale, threshold, keep_scale, TAIL_Q, True, BLOCK_KV, TAIL_KV,
                D, BLOCK_D0, BLOCK_D1, PRECISION, MASK, IS_CAUSAL, HAS_DROPOUT,
            )  # fmt: skip


@triton.jit
def _softmax_grad(
    s, dp, lse, delta, q_index, kv_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv,
    seed_ptr, head, scale, threshold, keep_scale,
    CHECK_KV: tl.constexpr, MASK: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """p (as it met v, so after dropout) and ds = p (dp - delta), in the orientation of s."""
    s = _mask_scores(
        s, q_index, kv_index, T_q, T_kv, mask_ptr, stride_mask_q, stride_mask_kv, scale,
        CHECK_KV, MASK, IS_CAUSAL,
    )  # fmt: skip
    p = tl.exp2(s * (scale * 1.4426950408889634) - lse)
    if HAS_DROPOUT:
        keep = _dropout_keep(seed_ptr, head, q_index, kv_index, threshold)
        dp = tl.where(keep, dp * keep_scale, 0.0)
        return tl.where(keep, p * keep_scale, 0.0), p * (dp - delta)
    else:
        return p, p * (dp - delta)


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
    k0, k1 = _load_head(
        k_ptr, stride_k_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV
    )
    v0, v1 = _load_head(
        v_ptr, stride_v_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV
    )
    s = _product_over_d(q0, q1, k0, k1, BLOCK_D1, PRECISION)
    dp = _product_over_d(do0, do1, v0, v1, BLOCK_D1, PRECISION)
    kv_index = (start_kv + tl.arange(0, BLOCK_KV))[None, :]
    _, ds = _softmax_grad(
        s, dp, lse[:, None], delta[:, None], q_index, kv_index, T_q, T_kv,
        mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head, scale, threshold, keep_scale,
        CHECK_KV, MASK, IS_CAUSAL, HAS_DROPOUT,
    )  # fmt: skip
    return _accumulate(dq0, dq1, ds.to(k0.dtype), k0, k1, BLOCK_D1, PRECISION)


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
    q0, q1 = _load_head(q_ptr, stride_q_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q)
    do0, do1 = _load_head(
        do_ptr, stride_do_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q
    )
    out0, out1 = _load_head(out_ptr, H * D, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q)
    delta = _row_dot(out0, out1, do0, do1, BLOCK_D1)
    tl.store(delta_ptr + offs_q, delta, mask=offs_q < T_q)
    lse = tl.load(lse_ptr + offs_q, mask=offs_q < T_q, other=float("inf"))
    dq0, dq1 = _zeros_head(BLOCK_Q, BLOCK_D0, BLOCK_D1)

    CHECK_KV: tl.constexpr = TAIL_KV == BLOCK_KV
    full_kv = _full_tiles(T_kv, BLOCK_KV, TAIL_KV) * BLOCK_KV
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
    _store_head(dq_ptr, dq0, dq1, stride_dq_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1)


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
    do_ptr = _head_ptr(do_ptr, b, h, stride_do_b, stride_do_h)
    q_ptr = _head_ptr(q_ptr, b, h, stride_q_b, stride_q_h)
    k_ptr = _head_ptr(k_ptr, b, h, stride_k_b, stride_k_h)
    v_ptr = _head_ptr(v_ptr, b, h, stride_v_b, stride_v_h)
    if MASK != "none":
        mask_ptr += b * stride_mask_b + h * stride_mask_h
    start_q = pid_q * BLOCK_Q
    if pid_q < _full_tiles(T_q, BLOCK_Q, TAIL_Q):
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
    q0, q1 = _load_head(q_ptr, stride_q_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q)
    do0, do1 = _load_head(
        do_ptr, stride_do_t, start_q, T_q, BLOCK_Q, D, BLOCK_D0, BLOCK_D1, CHECK_Q
    )
    if CHECK_Q:  # lse +inf makes p of a query that is not there exactly 0
        lse = tl.load(lse_ptr + offs_q, mask=offs_q < T_q, other=float("inf"))
        delta = tl.load(delta_ptr + offs_q, mask=offs_q < T_q, other=0.0)
    else:
        lse = tl.load(lse_ptr + offs_q)
        delta = tl.load(delta_ptr + offs_q)
    s_t = _product_over_d(k0, k1, q0, q1, BLOCK_D1, PRECISION)
    dp_t = _product_over_d(v0, v1, do0, do1, BLOCK_D1, PRECISION)
    # Keys that are not there fill rows of s_t that nobody stores: no check of kv_index is needed.
    p_t, ds_t = _softmax_grad(
        s_t, dp_t, lse[None, :], delta[None, :], offs_q[None, :], kv_index, T_q, T_kv,
        mask_ptr, stride_mask_q, stride_mask_kv, seed_ptr, head, scale, threshold, keep_scale,
        False, MASK, IS_CAUSAL, HAS_DROPOUT,
    )  # fmt: skip
    dv0, dv1 = _accumulate(dv0, dv1, p_t.to(do0.dtype), do0, do1, BLOCK_D1, PRECISION)
    dk0, dk1 = _accumulate(dk0, dk1, ds_t.to(q0.dtype), q0, q1, BLOCK_D1, PRECISION)
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
    k0, k1 = _load_head(
        k_ptr, stride_k_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV
    )
    v0, v1 = _load_head(
        v_ptr, stride_v_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1, CHECK_KV
    )
    dk0, dk1 = _zeros_head(BLOCK_KV, BLOCK_D0, BLOCK_D1)
    dv0, dv1 = _zeros_head(BLOCK_KV, BLOCK_D0, BLOCK_D1)

    CHECK_Q: tl.constexpr = TAIL_Q == BLOCK_Q
    full_q = _full_tiles(T_q, BLOCK_Q, TAIL_Q) * BLOCK_Q
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
    _store_head(dk_ptr, dk0, dk1, stride_dk_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1)
    _store_head(dv_ptr, dv0, dv1, stride_dk_t, start_kv, T_kv, BLOCK_KV, D, BLOCK_D0, BLOCK_D1)


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
    do_ptr = _head_ptr(do_ptr, b, h, stride_do_b, stride_do_h)
    q_ptr = _head_ptr(q_ptr, b, h, stride_q_b, stride_q_h)
    k_ptr = _head_ptr(k_ptr, b, h, stride_k_b, stride_k_h)
    v_ptr = _head_ptr(v_ptr, b, h, stride_v_b, stride_v_h)
    if MASK != "none":
        mask_ptr += b * stride_mask_b + h * stride_mask_h
    start_kv = pid_kv * BLOCK_KV
    if pid_kv < _full_tiles(T_kv, BLOCK_KV, TAIL_KV):
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
    p, ds = _softmax_grad(
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
    dq0, dq1, q0, q1, do0, do1, lse0, lse1, delta0, delta1,
    dk_ptr, dv_ptr, k_ptr, v_ptr, seed_ptr, start_kv, head, T_q, T_kv,
    stride_dk_t, stride_k_t, stride_v_t,
    scale, threshold, keep_scale,
    BLOCK_KV: tl.constexpr, CHECK_KV: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PART0: tl.constexpr, PART1: tl.constexpr, PRECISION: tl.constexpr,
    IS_CAUSAL: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    k = _load_part(k_ptr, stride_k_t, start_kv, T_kv, BLOCK_KV, 0, BLOCK_D, D, CHECK_KV)
    v = _load_part(v_ptr, stride_v_t, start_kv, T_kv, BLOCK_KV, 0, BLOCK_D, D, CHECK_KV)
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
    mask = (tl.arange(0, BLOCK_D)[:, None] < D) & (kv_index < T_kv)
    dk_t_ptrs = tl.trans(_tile_ptrs(dk_ptr, stride_dk_t, start_kv, BLOCK_KV, 0, BLOCK_D))
    dv_t_ptrs = tl.trans(_tile_ptrs(dv_ptr, stride_dk_t, start_kv, BLOCK_KV, 0, BLOCK_D))
    tl.store(dk_t_ptrs, (dk_t * scale).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_t_ptrs, dv_t.to(dv_ptr.dtype.element_ty), mask=mask)
    return dq0, dq1


@triton.jit
def _load_query_part(
    q_ptr, do_ptr, out_ptr, lse_ptr, stride_q_t, stride_do_t, stride_out_t, start_q, T_q,
    PART: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_Q: tl.constexpr,
):  # fmt: skip
    """q, dout, lse, delta and a zero dq of one part of the queries; one element each for none."""
    if PART > 0:
        q = _load_part(q_ptr, stride_q_t, start_q, T_q, PART, 0, BLOCK_D, D, CHECK_Q)
        do = _load_part(do_ptr, stride_do_t, start_q, T_q, PART, 0, BLOCK_D, D, CHECK_Q)
        out = _load_part(out_ptr, stride_out_t, start_q, T_q, PART, 0, BLOCK_D, D, CHECK_Q)
        delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), axis=1)
        offs_q = start_q + tl.arange(0, PART)
        # lse +inf makes p of a query that is not there exactly 0
        lse = tl.load(lse_ptr + offs_q, mask=offs_q < T_q, other=float("inf"))
        return q, do, lse, delta, tl.zeros((PART, BLOCK_D), dtype=tl.float32)
    else:
        none = tl.zeros((1,), dtype=tl.float32)
        return none, none, none, none, none


@triton.jit
def _attention_bwd_one_pass_kernel(
    dq_ptr, dk_ptr, dv_ptr, do_ptr, q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, seed_ptr,
    H, T_q, T_kv, stride_dq_t, stride_dk_t, stride_do_b, stride_do_t, stride_do_h,
    stride_q_b, stride_q_t, stride_q_h, stride_k_b, stride_k_t, stride_k_h,
    stride_v_b, stride_v_t, stride_v_h,
    scale, threshold, keep_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KV: tl.constexpr, RAGGED_KV: tl.constexpr,
    PART0: tl.constexpr, PART1: tl.constexpr, RAGGED_Q: tl.constexpr,
    PRECISION: tl.constexpr, IS_CAUSAL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # b * H + h
    b, h = head // H, head % H
    dq_ptr += b * T_q * stride_dq_t + h * D
    dk_ptr += b * T_kv * stride_dk_t + h * D
    dv_ptr += b * T_kv * stride_dk_t + h * D
    lse_ptr += head * T_q
    out_ptr += (b * T_q * H + h) * D
    do_ptr = _head_ptr(do_ptr, b, h, stride_do_b, stride_do_h)
    q_ptr = _head_ptr(q_ptr, b, h, stride_q_b, stride_q_h)
    k_ptr = _head_ptr(k_ptr, b, h, stride_k_b, stride_k_h)
    v_ptr = _head_ptr(v_ptr, b, h, stride_v_b, stride_v_h)

    q0, do0, lse0, delta0, dq0 = _load_query_part(
        q_ptr, do_ptr, out_ptr, lse_ptr, stride_q_t, stride_do_t, H * D, 0, T_q,
        PART0, D, BLOCK_D, RAGGED_Q and PART1 == 0,
    )  # fmt: skip
    q1, do1, lse1, delta1, dq1 = _load_query_part(
        q_ptr, do_ptr, out_ptr, lse_ptr, stride_q_t, stride_do_t, H * D, PART0, T_q,
        PART1, D, BLOCK_D, RAGGED_Q,
    )  # fmt: skip
    # One loop, masked: a second copy of its body for a smaller tail would spill.
    for start_kv in tl.range(0, T_kv, BLOCK_KV, disable_licm=True):
        dq0, dq1 = _one_pass_key_tile(
            dq0, dq1, q0, q1, do0, do1, lse0, lse1, delta0, delta1,
            dk_ptr, dv_ptr, k_ptr, v_ptr, seed_ptr, start_kv, head, T_q, T_kv,
            stride_dk_t, stride_k_t, stride_v_t,
            scale, threshold, keep_scale, BLOCK_KV, RAGGED_KV, D, BLOCK_D, PART0, PART1,
            PRECISION, IS_CAUSAL, HAS_DROPOUT,
        )  # fmt: skip
    _store_part(dq_ptr, dq0 * scale, stride_dq_t, 0, T_q, PART0, 0, BLOCK_D, D)
    if PART1 > 0:
        _store_part(dq_ptr, dq1 * scale, stride_dq_t, PART0, T_q, PART1, 0, BLOCK_D, D)
