"""Where one head of a sample lies in memory, and which of its keys a mask by key shows.

A sample is one of (B, T, H, D), or a sequence among others that lie one after the other: then the
program reads its first token and its length from cu_seqlens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...runtime.triton import constant, tl, triton
from .tiles import ROW_PAD, Mask, Rows, Scores, padded

KEYS_AT_ONCE = constant(1024)  # of a mask, to find which tiles it shows
BITS = constant(32)  # of a word that has one for each tile, or for several


class Packing(NamedTuple):
    """Sequences one after the other: b is the tokens cu_seqlens[b] ... cu_seqlens[b + 1] - 1."""

    cu_seqlens_ptr: Any
    total: Any  # tokens of all sequences
    stride_rows_h: Any  # between heads of lse and of delta


class Sample(NamedTuple):
    """Where one head of a sample lies."""

    b: Any  # what stride_b multiplies; of a sequence its first token, and stride_b is stride_t
    h: Any
    first_q: Any  # among the queries of all samples
    first_kv: Any
    row: Any  # offset of its row of lse and delta


class Shown(NamedTuple):
    """Tiles of keys that are still to be walked, by groups of `each` tiles."""

    bits: Any  # a group is left, the lowest bit's first
    tile: Any  # the next of the group's
    each: Any


@triton.jit
def packing_of(cu_seqlens_ptr, total, stride_rows_h, FORM: tl.constexpr):
    packing = ()
    if FORM.VARLEN:
        packing = Packing(cu_seqlens_ptr, total, stride_rows_h)
    return packing


@triton.jit
def wide(i):
    """An int32 that is not negative as an int64, by way of uint32: the upper half is a constant 0,
    where that of a signed number would stay in a register through the loop."""
    return i.to(tl.uint32).to(tl.int64)


@triton.jit
def sample_of(packing, scores, head, H, FORM: tl.constexpr):
    """The sample of a head, head = b * H + h, an int32, and the scores of that head.

    Whatever cu_seqlens holds, no token past `total` is touched, nor more than the T of a launch.
    """
    b, h = wide(head // H), wide(head % H)
    T_q, T_kv = scores.T_q, scores.T_kv
    if FORM.VARLEN:
        first = tl.load(packing.cu_seqlens_ptr + b)
        last = tl.load(packing.cu_seqlens_ptr + b + 1)
        first = tl.minimum(tl.maximum(first, 0), packing.total)
        T_q = tl.minimum(tl.maximum(tl.minimum(last, packing.total) - first, 0), T_q)
        T_kv = T_q
        row = h * packing.stride_rows_h + (first // ROW_PAD + b) * ROW_PAD
        first = wide(first)
        sample = Sample(first, h, first, first, row)
    else:
        sample = Sample(b, h, b * T_q, b * T_kv, wide(head) * padded(T_q))
    mask = scores.mask
    if FORM.MASK != "none":
        strides = mask.strides
        mask = Mask(mask.ptr + (b % strides.batch * strides.b + h * strides.h), strides)
    return sample, Scores(T_q, T_kv, scores.scale, mask, scores.dropout, head)


@triton.jit
def head_rows(ptr, strides, sample):
    """The head of a sample."""
    offset = sample.b * strides.b + sample.h * strides.h
    return Rows(ptr + tl.multiple_of(offset, 8), strides.t)


@triton.jit
def packed_rows(ptr, stride_t, first, sample, D: tl.constexpr):
    """As `head_rows`, of a tensor whose heads are D apart and whose samples follow one another."""
    return Rows(ptr + (first * stride_t + sample.h * D), stride_t)


@triton.jit
def row_ptr(ptr, sample):
    """The head's row of delta, or of lse without an additive mask."""
    return ptr + tl.multiple_of(sample.row, 4)


@triton.jit
def lse_ptr_of(ptr, sample, FORM: tl.constexpr):
    """The head's row of lse, the first of two beside an additive mask."""
    if FORM.MASK == "add":
        return ptr + tl.multiple_of(2 * sample.row, 4)
    else:
        return row_ptr(ptr, sample)


@triton.jit
def _mask_ptrs(scores, offs_kv):
    return scores.mask.ptr + offs_kv.to(tl.int64) * scores.mask.strides.kv


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def shown_tiles(scores, T_kv, BLOCK_KV: tl.constexpr):
    """The tiles that hold a key which a "keys" mask shows, and how many steps of `next_tile`.

    Bit i stands for the `each` tiles from i * each on, so that 32 bits are enough. A mask that
    shows no key has the first bit: loops need a step.
    """
    each = tl.cdiv(T_kv, BITS * BLOCK_KV)
    bits = tl.zeros((), dtype=tl.int32)
    TILES: tl.constexpr = KEYS_AT_ONCE // BLOCK_KV
    for start in tl.range(0, T_kv, KEYS_AT_ONCE):
        offs_kv = start + tl.arange(0, KEYS_AT_ONCE)
        keys = tl.load(_mask_ptrs(scores, offs_kv), mask=offs_kv < T_kv, other=0)
        tiles = tl.max(tl.reshape((keys != 0).to(tl.int32), (TILES, BLOCK_KV)), axis=1)
        bit = tl.minimum((start // BLOCK_KV + tl.arange(0, TILES)) // each, BITS - 1)
        bits |= tl.reduce(tiles << bit, 0, _either)
    bits = tl.where(bits == 0, 1, bits)
    steps = tl.sum((bits >> tl.arange(0, BITS)) & 1, axis=0) * each
    return Shown(bits.to(tl.uint32), tl.zeros((), dtype=tl.int32), each), steps


@triton.jit
def next_tile(shown, BLOCK_KV: tl.constexpr):
    """Where the next shown tile begins, and what is left behind it. No branch, so that loads of a
    step run ahead of the products of the one before."""
    others = shown.bits & (shown.bits - 1)
    lowest = (shown.bits ^ others).to(tl.float32)  # a power of two, whose exponent is its number
    bit = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
    start_kv = (bit * shown.each + shown.tile) * BLOCK_KV
    tile = shown.tile + 1
    is_last = tile == shown.each
    bits = tl.where(is_last, others, shown.bits)
    return start_kv, Shown(bits, tl.where(is_last, 0, tile), shown.each)


@triton.jit
def shown_keys(start_kv, scores, BLOCK_KV: tl.constexpr):
    """Which keys of a tile a "keys" mask shows."""
    offs_kv = start_kv + tl.arange(0, BLOCK_KV)
    return tl.load(_mask_ptrs(scores, offs_kv), mask=offs_kv < scores.T_kv, other=0) != 0


@triton.jit
def kept_rows(x, keep, FORM: tl.constexpr):
    """x with zeros in the rows that are not kept, whatever was in them."""
    x0 = tl.where(keep[:, None], x[0], 0.0)
    if FORM.BLOCK_D1 > 0:
        return x0, tl.where(keep[:, None], x[1], 0.0)
    else:
        return (x0,)
