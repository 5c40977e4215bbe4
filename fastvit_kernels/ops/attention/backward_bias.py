"""The gradient of an additive mask, such as a table of relative positions that is learnt.

    dbias[q, kv] = sum of ds = p * (dp - delta)  over all samples and heads that share the bias

A program owns one tile of (queries, keys) of one bias and walks the heads that share it: q, k, v
and dout come by, p is rebuilt from lse, and the bias itself is read once. It sums in fp32 in a
fixed order and nothing is atomic. Where there are fewer tiles than the GPU has room for, the heads
are dealt to several programs, whose partials `column_sum` adds in order. Runs after the dq kernel,
which makes delta. What it moves, beside the way through a ds in memory: docs/attention.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.backend import Gpu, gpu
from ...runtime.compat import matmul_precision
from ...runtime.configs import ConfigTable, launch_plan
from ...runtime.triton import ANY_BATCH, bind_launch, tl, triton
from ..common.gemm import TMA_FAMILIES
from ..common.reduction import column_sum
from .configs import ITEMSIZE, row_for
from .launch import Problem, Softmax, fitting_block, kept_by, mask_kind, mask_strides, padded_rows
from .samples import Sample, head_rows, lse_ptr_of, row_ptr
from .tiles import (
    LOG2_E,
    HeadStrides,
    Scores,
    dropout_keep,
    fence_async,
    keeps_invariants,
    load_head,
    load_lse,
    mask_in_log2,
    padded,
    probabilities,
    product_over_d,
    scores_of,
)
from .tiling import split_head_dim

PROGRAMS_PER_SM = 4  # tiles are dealt until there are as many
MIN_SHARED = 4  # heads of a program, whose reads outweigh the partials that it leaves


class Tiles(NamedTuple):
    BLOCK_Q: Any
    RAGGED_Q: Any  # the last tile of queries is not full
    BLOCK_KV: Any
    RAGGED_KV: Any


class BiasConfig(NamedTuple):
    """Rows and columns of the bias that a program owns."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


@triton.jit
def _added_tile(ptr, start_q, start_kv, strides, scores, shape: tl.constexpr):
    """The bias in log2 units, as `mask_scores` adds it; -inf where there is no key."""
    q_index = (start_q + tl.arange(0, shape[0]))[:, None]
    kv_index = (start_kv + tl.arange(0, shape[1]))[None, :]
    ptrs = ptr + (q_index.to(tl.int64) * strides.q + kv_index.to(tl.int64) * strides.kv)
    seen = (q_index < scores.T_q) & (kv_index < scores.T_kv)
    bias = tl.load(ptrs, mask=seen, other=0.0).to(tl.float32)
    return tl.where(kv_index < scores.T_kv, mask_in_log2(bias), float("-inf"))


@triton.jit(**ANY_BATCH)
def _attention_bwd_bias_kernel(
    dbias_ptr,
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    mask_ptr,
    seed_ptr,
    H,
    T_q,
    T_kv,
    bias_heads,
    num_shared,
    shared_heads,
    heads_per_program,
    strides,
    mask_strides,
    scale,
    keep,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = TILES.BLOCK_Q
    BLOCK_KV: tl.constexpr = TILES.BLOCK_KV
    stride_do, stride_q, stride_k, stride_v = strides
    # Tiles of a bias are neighbours: they walk the same heads, which stay in L2.
    tiles_kv = tl.cdiv(T_kv, BLOCK_KV)
    tiles = tl.cdiv(T_q, BLOCK_Q) * tiles_kv
    tile = tl.program_id(0) % tiles
    rest = tl.program_id(0) // tiles
    batch = mask_strides.batch
    bias = (rest % (batch * bias_heads)).to(tl.int64)  # its number, b * bias_heads + h
    part = rest // (batch * bias_heads)
    bias_b, bias_h = bias // bias_heads, bias % bias_heads
    start_q, start_kv = tile // tiles_kv * BLOCK_Q, tile % tiles_kv * BLOCK_KV

    scores = scores_of(mask_ptr, mask_strides, seed_ptr, keep, T_q, T_kv, scale, FORM)
    mask_ptr += bias_b * mask_strides.b + bias_h * mask_strides.h
    added = _added_tile(mask_ptr, start_q, start_kv, mask_strides, scores, (BLOCK_Q, BLOCK_KV))
    offs_q = start_q + tl.arange(0, BLOCK_Q)
    offs_kv = start_kv + tl.arange(0, BLOCK_KV)
    dbias = tl.zeros((BLOCK_Q, BLOCK_KV), dtype=tl.float32)

    first = part * heads_per_program
    last = tl.minimum(first + heads_per_program, num_shared)
    tl.assume(first < last)
    for i in tl.range(first, last, disable_licm=keeps_invariants()):
        n = tl.cast(i, tl.int64)
        b, h = bias_b + n // shared_heads * batch, bias_h + n % shared_heads
        sample = Sample(b, h, 0, 0, (b * H + h) * padded(T_q))
        do_rows, q_rows = head_rows(do_ptr, stride_do, sample), head_rows(q_ptr, stride_q, sample)
        k_rows, v_rows = head_rows(k_ptr, stride_k, sample), head_rows(v_ptr, stride_v, sample)
        q = load_head(q_rows, start_q, T_q, FORM, BLOCK_Q, TILES.RAGGED_Q)
        k = load_head(k_rows, start_kv, T_kv, FORM, BLOCK_KV, TILES.RAGGED_KV)
        do = load_head(do_rows, start_q, T_q, FORM, BLOCK_Q, TILES.RAGGED_Q)
        v = load_head(v_rows, start_kv, T_kv, FORM, BLOCK_KV, TILES.RAGGED_KV)
        lse = load_lse(lse_ptr_of(lse_ptr, sample, FORM), start_q, T_q, FORM, BLOCK_Q, True)
        there = offs_q < padded(T_q)
        delta = tl.load(row_ptr(delta_ptr, sample) + offs_q, mask=there, other=0.0)
        fence_async(scores, FORM)
        s = product_over_d(q, k, FORM) * (scale * LOG2_E) + added
        dp = product_over_d(do, v, FORM)
        p = probabilities(s, lse, scores, FORM, True)
        if FORM.HAS_DROPOUT:
            drawn = Scores(T_q, T_kv, scale, (), scores.dropout, b * H + h)
            is_kept = dropout_keep(drawn, start_q, start_kv, BLOCK_Q, BLOCK_KV, True)
            dp = tl.where(is_kept, dp * keep.scale, 0.0)
        dbias += p * (dp - delta[:, None])

    # (parts, mask_batch, bias_heads, T_q, T_kv), contiguous
    row = (part * (batch * bias_heads) + bias) * T_q + start_q
    offs = tl.arange(0, BLOCK_Q)[:, None] * T_kv + offs_kv[None, :]
    inside = (offs_q[:, None] < T_q) & (offs_kv[None, :] < T_kv)
    tl.store(dbias_ptr + row * T_kv + offs, dbias.to(dbias_ptr.dtype.element_ty), mask=inside)


# By (bytes an element, largest padded D), first row that fits. Four tiles of fp32 are alive, which
# bounds them. Not yet measured: chosen by compiling, so that nothing spills on sm_80 and sm_90, and
# by the model of docs/compile.md: 64 keys at once take half the time of 32, two stages more.
BIAS = {
    (2, 64): BiasConfig(128, 64, 8, 1),
    (2, 128): BiasConfig(128, 32, 8, 1),
    (2, 256): BiasConfig(64, 32, 4, 1),
    (4, 128): BiasConfig(32, 32, 4, 1),
    (4, 256): BiasConfig(16, 16, 4, 1),
}
BIAS_SHORT = BiasConfig(64, 32, 4, 2)  # T <= 64: as many rows as a head has
BIAS_CONFIGS = [*BIAS.values(), BIAS_SHORT, BiasConfig(128, 32, 8, 2)]


def _default(gpu: Gpu, dtype: str, D: int, tokens: int, mask: str, heads: str) -> BiasConfig:
    itemsize = ITEMSIZE[dtype]
    if itemsize == 2 and D <= 128:
        if tokens <= 64:
            return BIAS_SHORT
        return BIAS[2, 128] if _is_crowded(gpu, D, mask) else BIAS[2, 64]
    if (gpu.family, itemsize) == (9, 4) and D > 32:
        return BIAS[4, 256]  # the larger tile spills 4 KB with triton 3.9
    if (gpu.family, itemsize) == (8, 4) and D <= 32 and mask.endswith("dropout"):
        return BIAS[4, 256]  # the larger tile spills 8 bytes
    return row_for(BIAS, itemsize, D)


def _is_crowded(gpu: Gpu, D: int, mask: str) -> bool:
    """Whether 32 scores a thread leave too few registers: for dropout's numbers, or wide heads."""
    widest = 128 if gpu.family in TMA_FAMILIES else 64
    return mask.endswith("dropout") or widest < D


def _fits(
    gpu: Gpu, config: BiasConfig, dtype: str, D: int, tokens: int, mask: str, heads: str
) -> bool:
    default = _default(gpu, dtype, D, tokens, mask, heads)
    if gpu.is_amd:
        return config == default
    if config == BIAS[2, 64] and _is_crowded(gpu, D, mask):
        return False
    rows = config.block_q + config.block_kv
    shared = 2 * config.num_stages * rows * D * ITEMSIZE[dtype]
    narrow = ITEMSIZE[dtype] == 4 or D > 128
    return shared <= gpu.shared_limit and not (narrow and config.block_q > default.block_q)


BIAS_TABLE = ConfigTable("attention_bwd_bias", BIAS_CONFIGS, _default, _fits)


class BiasLaunch(NamedTuple):
    """The grid, over how many programs the heads of a bias are dealt, sizes and constexprs."""

    grid: tuple[int]
    parts: int
    sizes: tuple[int, ...]
    options: dict[str, Any]


@launch_plan
def bias_launch(gpu: Gpu, batch: int, heads: int, *fields: Any) -> BiasLaunch:
    """The launch for a bias (batch, heads, T_q, T_kv); fields: those of `Problem` but the GPU."""
    problem = Problem(gpu, *fields)
    config: BiasConfig = BIAS_TABLE.choose(gpu, *problem.key())
    (B, T_q, H, D), T_kv = problem.shape, problem.T_kv
    block_q, block_kv = fitting_block(T_q, config.block_q), fitting_block(T_kv, config.block_kv)
    tiles = batch * heads * triton.cdiv(T_q, block_q) * triton.cdiv(T_kv, block_kv)
    shared = (B // batch) * (H // heads)
    wanted = min(shared, max(1, PROGRAMS_PER_SM * gpu.num_sms // tiles))
    each = min(shared, max(MIN_SHARED, triton.cdiv(shared, wanted)))
    parts = triton.cdiv(shared, each)
    options = dict(
        FORM=problem.form(*split_head_dim(D)),
        TILES=Tiles(block_q, T_q % block_q != 0, block_kv, T_kv % block_kv != 0),
        num_warps=config.num_warps,
        num_stages=problem.stages(config.num_stages),
    )
    sizes = H, T_q, T_kv, heads, shared, H // heads, each
    return BiasLaunch((tiles * parts,), parts, sizes, options)


def launch_bias_grad(
    dbias: Tensor,
    dout: Tensor,
    qkv: tuple[Tensor, ...],
    lse: Tensor,
    delta: Tensor,
    bias: Tensor,
    softmax: Softmax,
) -> None:
    """Fill dbias, contiguous, of the shape of bias: (batch, H or 1, T_q or 1, T_kv).

    Args:
        qkv, dout: q, k, v and dout, (B, T, H, D) views; sample b has bias b % batch.
        lse, delta: (B, H, T_q) fp32 in padded rows, delta as the dq kernel left it.
    """
    q, k, v = qkv
    whole = (*bias.shape[:2], q.shape[1], k.shape[1])
    if bias.shape != whole:  # shared by all queries
        each = torch.empty(whole, dtype=torch.float32, device=bias.device)
        launch_bias_grad(each, dout, qkv, lse, delta, bias.expand(whole), softmax)
        dbias.copy_(each.sum(2, keepdim=True))
        return
    layout = bias.dtype, bias.shape, bias.stride()
    grid, parts, sizes, options = bias_launch(
        gpu(q.device),
        *bias.shape[:2],
        q.dtype,
        q.shape,
        k.shape[1],
        mask_kind(layout, False, False),
        softmax.seed is not None,
        matmul_precision(),
    )
    partial = dbias
    if parts > 1:
        partial = torch.empty((parts, dbias.numel()), dtype=torch.float32, device=dbias.device)
    strides = tuple(HeadStrides(*x.stride()[:3]) for x in (dout, q, k, v))
    bind_launch(_attention_bwd_bias_kernel, grid, **options)(
        partial,
        dout,
        q,
        k,
        v,
        padded_rows(lse),
        delta,
        bias,
        softmax.seed,
        *sizes,
        strides,
        mask_strides(layout),
        softmax.scale,
        kept_by(softmax.dropout_p),
    )
    if parts > 1:
        column_sum(partial, dbias)
