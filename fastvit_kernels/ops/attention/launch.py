"""From tensors to launches of the attention kernels: grids, tiles, flags, strides, copies.

What follows from sizes, dtypes and the GPU is planned once (`fwd_launch`, `bwd_launch`), by the
tables of configs.py; `launch_fwd` and `launch_bwd` add pointers and strides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.arguments import Layout, aligned, empty_strided, is_aligned, layout
from ...runtime.backend import INTERPRETED, Gpu, gpu
from ...runtime.compat import matmul_precision
from ...runtime.configs import Key, launch_plan
from ...runtime.dtypes import DTYPE_NAMES
from ...runtime.triton import VERSION, bind_launch, triton
from ..common.gemm import is_unpipelined, needs_fence
from . import backward_one_pass, configs, forward
from .backward_one_pass import _attention_bwd_one_pass_kernel
from .backward_split import (
    KeyTiles,
    QueryTiles,
    _attention_bwd_dkdv_kernel,
    _attention_bwd_dq_kernel,
)
from .configs import BwdForm, FwdConfig, OnePassConfig, SplitConfig, own_bwd, own_fwd
from .cudnn import sdpa_backward, sdpa_forward
from .forward import _attention_fwd_kernel
from .tiles import HeadStrides, Keep, KernelConstants, MaskStrides
from .tiling import MIN_TILE, ROW_PAD, query_parts, split_head_dim, tail_tile


class Packing(NamedTuple):
    """Sequences one after the other in (1, total, H, D): where each begins, and how long one is."""

    cu_seqlens: Tensor  # (B + 1,) int32, on the device
    max_seqlen: int  # at least the longest; the grid is made for it


class Softmax(NamedTuple):
    """What makes probabilities of the products of queries and keys."""

    scale: float
    dropout_p: float
    seed: Tensor | None  # with dropout
    mask: Tensor | None = None  # (batch, H, T_q, T_kv), or 1 of any; sample b has mask b % batch
    is_causal: bool = False
    packing: Packing | None = None  # with it B is 1, and there is no mask


class Problem(NamedTuple):
    """What a launch depends on besides strides: q's shape (B, T_q, H, D), T_kv keys, flags.

    Of sequences of their own lengths (mask "varlen") B is their number, T_q and T_kv the longest.
    """

    gpu: Gpu
    dtype: torch.dtype
    shape: tuple[int, ...]
    T_kv: int
    mask: str
    dropout: bool
    precision: str
    dbias: bool = False  # the one-pass backward sums columns too

    def key(self) -> Key:
        B, T_q, H, D = self.shape
        buckets, heads_per_sm = configs.TOKEN_BUCKETS, B * H // self.gpu.num_sms
        tokens = next((t for t in buckets if max(T_q, self.T_kv) <= t), buckets[-1])
        many = heads_per_sm >= configs.MANY_HEADS
        heads = "many" if many else "few" if heads_per_sm else "scarce"
        mask = f"{self.mask}+dropout" if self.dropout else self.mask
        return DTYPE_NAMES[self.dtype], sum(split_head_dim(D)), tokens, mask, heads

    def is_sdpa(self, config: FwdConfig | BwdForm) -> bool:
        """Of as many queries as keys: of others flash aligns causal scores by the last."""
        return config.route == "library" and self.shape[1] == self.T_kv

    def tail(self, T: int, block: int, smallest: int, axis: str) -> int:
        """`tail_tile`; all tiles are masked where the kernel alone knows which keys there are."""
        if self.mask == "varlen" or (self.mask == "keys" and axis == "KV"):
            return block
        return tail_tile(T, block, smallest)

    def is_ragged(self, T: int, block: int) -> bool:
        """Whether the last tile of rows that programs own may not be full."""
        return self.mask == "varlen" or T % block != 0

    def stages(self, num_stages: int) -> int:
        """Those of a config, but one where a loop may not copy ahead."""
        return 1 if is_unpipelined(self.gpu, self.dtype, self.precision) else num_stages

    def form(self, block_d0: int, block_d1: int) -> KernelConstants:
        return KernelConstants(
            D=self.shape[3],
            BLOCK_D0=block_d0,
            BLOCK_D1=block_d1,
            PRECISION=self.precision,
            MASK="none" if self.mask in ("causal", "varlen") else self.mask,
            IS_CAUSAL=self.mask == "causal",
            HAS_DROPOUT=self.dropout,
            FENCE=self.gpu.family == 9 and needs_fence(self.gpu, self.dtype, self.precision),
            VARLEN=self.mask == "varlen",
        )


class Launch(NamedTuple):
    """A kernel, its programs, the sizes that go before the strides, constexprs and options."""

    kernel: Any
    programs: int
    sizes: tuple[int, ...]
    options: dict[str, Any]

    def bind(self, layouts: Layouts, *strides: int, has_mask: bool = True) -> Callable[..., None]:
        """The launch, called with pointers; of packed sequences with `sizes`, their tokens and the
        stride between heads of lse too. strides: of outputs, before those of `layouts`."""
        last: Any = *strides, *layouts.last_arguments(has_mask)
        if not layouts.is_packed:  # None is compiled away
            last = *self.sizes, None, None, *last
        return bind_launch(self.kernel, (self.programs,), *last, **self.options)


def _launch(kernel: Any, programs: int, *sizes: int, **options: Any) -> Launch:
    return Launch(kernel, programs, sizes, options)


def fitting_block(T: int, block: int) -> int:
    """No larger a tile than T tokens need."""
    return min(block, max(MIN_TILE, triton.next_power_of_2(T)))


@launch_plan
def fwd_launch(gpu: Gpu, *fields: Any) -> Launch:
    """The launch of the plain forward kernel, whatever the route; arguments: those of `Problem`."""
    problem = Problem(gpu, *fields)
    config: FwdConfig = configs.FWD_TABLE.choose(problem.gpu, *problem.key())
    if config.route != "triton":
        config = own_fwd(problem.gpu, *problem.key())
    (B, T_q, H, D), T_kv = problem.shape, problem.T_kv
    block_q, block_kv = fitting_block(T_q, config.block_q), fitting_block(T_kv, config.block_kv)
    if T_q < T_kv and problem.gpu.family == 9:  # wgmma has 64 rows, and reads keys from memory
        block_q = min(config.block_q, max(block_q, 64))
    # a smaller tile has rows for fewer warps
    num_warps = max(min(4, config.num_warps), config.num_warps * block_q // config.block_q)
    programs = triton.cdiv(T_q, block_q) * triton.cdiv(B * H, config.heads)
    return _launch(
        _attention_fwd_kernel,
        programs,
        B * H,
        H,
        T_q,
        T_kv,
        FORM=problem.form(*split_head_dim(D)),
        TILES=forward.Tiles(
            BLOCK_Q=block_q,
            RAGGED_Q=problem.is_ragged(T_q, block_q),
            BLOCK_KV=block_kv,
            TAIL_KV=problem.tail(T_kv, block_kv, config.tail, "KV"),
            ONE_KV=T_kv <= block_kv,
        ),
        HEADS=config.heads,
        num_warps=num_warps,
        num_stages=problem.stages(config.num_stages),
    )


def _split_launch(
    kernel: Any,
    problem: Problem,
    config: SplitConfig,
    own: str,
    T_own: int,
    T_loop: int,
    **grads: str,
) -> Launch:
    """The launch of dq, which owns queries ("Q") and loops over keys, or of dk and dv ("KV")."""
    (B, T_q, H, D), loop = problem.shape, "KV" if own == "Q" else "Q"
    block = fitting_block(T_loop, config.loop)  # at least one full tile: the kernels rely on it
    ragged = problem.is_ragged(T_own, config.own)
    tail = problem.tail(T_loop, block, config.tail, loop)
    return _launch(
        kernel,
        triton.cdiv(T_own, config.own) * B * H,
        H,
        T_q,
        problem.T_kv,
        FORM=problem.form(*split_head_dim(D)),
        TILES=(QueryTiles if own == "Q" else KeyTiles)(config.own, ragged, block, tail),
        num_warps=config.num_warps,
        num_stages=problem.stages(config.num_stages),
        **grads,
    )


class BwdLaunch(NamedTuple):
    """Either the one-pass kernel, or dq and then dk and dv, together or one after the other.

    Neither where the library computes them.
    """

    one_pass: Launch | None = None
    split: tuple[Launch, ...] = ()


@launch_plan
def bwd_launch(gpu: Gpu, *fields: Any, own: bool = False) -> BwdLaunch:
    """The plain launches of the backward; arguments: those of `Problem`, whether ours must run."""
    problem = Problem(gpu, *fields)
    key: Any = problem.key()
    (B, T_q, H, D), T_kv = problem.shape, problem.T_kv
    form = BwdForm(one_pass=False)
    if not T_q <= 64 < T_kv:  # in one pass eight warps would repeat the scores of few queries
        form = configs.BWD_TABLE.choose(problem.gpu, *key)
        if problem.is_sdpa(form) and not own:
            return BwdLaunch()
        form = own_bwd(problem.gpu, *key) if form.route != "triton" else form
    if not form.one_pass:
        dq, dkdv = (t.choose(problem.gpu, *key) for t in (configs.DQ_TABLE, configs.DKDV_TABLE))
        split = [_split_launch(_attention_bwd_dq_kernel, problem, dq, "Q", T_q, T_kv)]
        kernel = _attention_bwd_dkdv_kernel
        for grads in ("dk", "dv") if dkdv.apart else ("dk+dv",):
            split.append(_split_launch(kernel, problem, dkdv, "KV", T_kv, T_q, GRADS=grads))
        return BwdLaunch(split=tuple(split))
    config: OnePassConfig = configs.ONE_PASS_TABLE.choose(problem.gpu, *key)
    parts = query_parts(T_q, config.close)
    if VERSION >= (3, 9) and problem.dbias and config.block_kv > 32 and T_q > 192 and T_q % 16 == 0:
        config = config._replace(block_kv=32, tail=32)  # the larger tile spills 40 bytes
    assert parts is not None
    one_pass = _launch(
        _attention_bwd_one_pass_kernel,
        triton.cdiv(B * H, config.heads),
        B * H,
        H,
        T_q,
        T_kv,
        FORM=problem.form(sum(split_head_dim(D)), 0),
        TILES=backward_one_pass.Tiles(
            config.block_kv,
            problem.tail(T_kv, config.block_kv, config.tail, "KV"),
            T_kv <= config.block_kv,
            *parts,
            RAGGED_Q=problem.is_ragged(T_q, sum(parts)),
            HEADS=config.heads,
            HAS_DBIAS=problem.dbias,
        ),
        num_warps=config.num_warps,
        num_stages=problem.stages(config.num_stages),
    )
    return BwdLaunch(one_pass)


def kept_by(dropout_p: float) -> Keep:
    return Keep(int(dropout_p * 2**31), 1.0 / (1.0 - dropout_p))


MaskLayout = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]  # dtype, shape, strides


def mask_strides(mask: MaskLayout | None) -> MaskStrides:
    """Of (batch, H, T_q, T_kv) in any strides, or 1 of any."""
    if mask is None:
        return MaskStrides(1, 0, 0, 0, 0)
    _, shape, strides = mask
    each = (0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True))
    return MaskStrides(shape[0], *each)


def mask_kind(mask: MaskLayout | None, is_causal: bool, is_packed: bool) -> str:
    """The `mask` of `Problem`."""
    if mask is None:
        return "varlen" if is_packed else "causal" if is_causal else "none"
    assert not is_packed and not is_causal
    dtype, shape, strides = mask
    if dtype is not torch.bool:
        return "add"
    axes = zip(shape[1:3], strides[1:3], strict=True)  # of heads and queries
    return "keys" if all(n == 1 or stride == 0 for n, stride in axes) else "bool"


class Layouts(NamedTuple):
    """All that a launch depends on but pointers. Of packed sequences neither the stride between
    samples nor the number of tokens, so that a batch of other lengths is no other launch."""

    gpu: Gpu
    dtype: torch.dtype
    shape: tuple[int, ...]  # as `Problem` has it, or (B, H, T_q, D)
    T_kv: int
    strides: tuple[tuple[int, ...], ...]  # of q, k and v, in a backward before them of dout
    mask: MaskLayout | None
    is_causal: bool
    is_packed: bool
    scale: float
    dropout_p: float
    precision: str  # of fp32 products, "ieee" or "tf32"
    heads_first: bool = False  # shape and strides have the heads before the tokens

    def tokens_first(self) -> Layouts:
        """The same launch, of the views (B, T, H, D)."""
        if not self.heads_first:
            return self
        shape, *strides = ((b, t, h, d) for b, h, t, d in (self.shape, *self.strides))
        return self._replace(shape=shape, strides=tuple(strides), heads_first=False)

    def problem(self) -> tuple[Any, ...]:
        """The fields of `Problem`."""
        kind = mask_kind(self.mask, self.is_causal, self.is_packed)
        has_dropout = self.dropout_p > 0
        return self.gpu, self.dtype, self.shape, self.T_kv, kind, has_dropout, self.precision

    def last_arguments(self, has_mask: bool) -> tuple[Any, ...]:
        """A kernel's last: strides by sample, token and head, of the mask, scale, dropout. The
        first stride of packed sequences is what their first tokens, which cu_seqlens gives, are
        multiplied by."""
        each = [(s[0], *s[:2]) if self.is_packed else s[:3] for s in self.strides]
        strides = tuple(HeadStrides(*three) for three in each)
        of_mask = (mask_strides(self.mask),) if has_mask else ()
        return strides, *of_mask, self.scale, kept_by(self.dropout_p)


class FwdCall(NamedTuple):
    """The forward of tensors in some layouts."""

    launch: Callable[..., None] | None = None  # None: the library's
    sizes: tuple[int, ...] = ()  # before those of packed sequences
    of_qkv: bool = False  # called with out, lse and packed qkv alone


@launch_plan
def fwd_call(gpu: Gpu, *fields: Any, own: bool = False, of_qkv: bool = False) -> FwdCall:
    """Arguments: the fields of `Layouts`, whether ours must run, whether q, k and v are packed."""
    layouts = Layouts(gpu, *fields).tokens_first()
    problem = Problem(*layouts.problem())
    config = configs.FWD_TABLE.choose(gpu, *problem.key())
    if not own and problem.is_sdpa(config):
        return FwdCall()
    if config.route == "gluon" and of_qkv and not INTERPRETED:
        from .forward_pingpong import fwd_pingpong

        launch = fwd_pingpong(layouts.shape, layouts.scale, gpu.num_sms)
        return FwdCall(launch, of_qkv=True)
    launch = fwd_launch(*problem)
    return FwdCall(launch.bind(layouts), launch.sizes)


class BwdCall(NamedTuple):
    """The backward of tensors in some layouts: one pass, or dq and then dk and dv, or all of them
    by backward_fused_dq.py; else by the library."""

    one_pass: Callable[..., None] | None = None
    dq: Callable[..., None] | None = None
    dkdv: tuple[Callable[..., None], ...] = ()
    sizes: tuple[int, ...] = ()
    of_qkv: bool = False  # one_pass is called with dqkv, dbias, dout, packed qkv, out and lse
    fused_dq: Callable[..., None] | None = None
    copies: bool = False  # TMA reads no expanded tensor: contiguous ones must come
    partials: Layout | None = None  # of the bias gradient, fp32; None: the sums are dqkv's own


@launch_plan
def bwd_call(
    gpu: Gpu,
    dbias: bool,
    dq_stride: int,
    dk_stride: int,
    *fields: Any,
    own: bool = False,
    of_qkv: bool = False,
) -> BwdCall:
    """Arguments: whether there is a bias, strides by token, the fields of `Layouts`, whether
    ours must run, whether q, k and v are packed, and contiguous, as is dout.

    The sums of the bias gradient come in rows of partials: one for each part of a sample's queries
    in one pass, in the Gluon kernels for each warp. In the split form's dq kernel they would halve
    the warps, in five products at D > 64 there is no memory.
    """
    layouts = Layouts(gpu, *fields).tokens_first()
    (B, _, H, D), dbias = layouts.shape, dbias and layouts.dropout_p == 0
    of_warps = layout((8 * B, 3 * H * D)) if dbias else None
    problem = Problem(*layouts.problem())
    form = None
    if problem.shape[1] == problem.T_kv and not INTERPRETED:
        form = configs.BWD_TABLE.choose(gpu, *problem.key())
    if of_qkv and form == configs.PINGPONG_BWD and D == 64:
        from .backward_pingpong import bwd_pingpong

        launch = bwd_pingpong(layouts.shape, layouts.scale, gpu.num_sms)
        return BwdCall(launch, of_qkv=True, partials=of_warps)
    if form == configs.FUSED_DQ:
        from .backward_fused_dq import bwd_fused_dq

        if min(map(min, layouts.strides)) == 0:
            return BwdCall(copies=True)
        grads = dq_stride, dk_stride
        launch = bwd_fused_dq(layouts.shape, layouts.strides, *grads, layouts.scale, gpu.num_sms)
        return BwdCall(fused_dq=launch, partials=of_warps if D <= 64 else None)
    one_pass, split = bwd_launch(*layouts.problem(), dbias, own=own)
    if one_pass is not None:
        assert layouts.mask is None
        launch = one_pass.bind(layouts, dq_stride, dk_stride, has_mask=False)
        tiles: backward_one_pass.Tiles = one_pass.options["TILES"]
        parts = sum(part > 0 for part in (tiles.PART0, tiles.PART1, tiles.PART2))
        partials = layout((B * parts, 3 * H * D)) if dbias else None
        return BwdCall(launch, sizes=one_pass.sizes, partials=partials)
    if not split:
        return BwdCall()
    dq, *others = split
    dkdv = tuple(launch.bind(layouts, dk_stride) for launch in others)
    return BwdCall(dq=dq.bind(layouts, dq_stride), dkdv=dkdv, sizes=dq.sizes)


def _layouts(
    tensors: Sequence[Tensor],
    q: Tensor,
    T_kv: int,
    softmax: Softmax,
    precision: str,
    heads_first: bool,
) -> Any:
    """The fields of `Layouts`. tensors: those whose strides it has."""
    shape, mask, packing = q.shape, softmax.mask, softmax.packing
    strides = tuple(map(Tensor.stride, tensors))
    if packing is not None:
        if len(shape) == 4:
            strides = tuple(each[1:] for each in strides)
        cu_seqlens, T_kv = packing
        shape = (cu_seqlens.shape[0] - 1, T_kv, *shape[-2:])
    return (
        gpu(q.device),
        q.dtype,
        shape,
        T_kv,
        strides,
        None if mask is None else (mask.dtype, mask.shape, mask.stride()),
        softmax.is_causal,
        packing is not None,
        softmax.scale,
        softmax.dropout_p,
        precision,
        heads_first,
    )


def _as_bytes(mask: Tensor | None) -> Tensor | None:
    """A boolean mask as the kernels read it."""
    return mask.view(torch.uint8) if mask is not None and mask.dtype is torch.bool else mask


def empty_lse(q: Tensor, mask: Tensor | None) -> Tensor:
    """As `empty_rows`; beside an additive mask (B, 2 H, T), log2 of a head's sums before its
    maxima: lse, their sum, would lose the one where a mask makes the other large."""
    is_added = mask is not None and mask.dtype is not torch.bool
    return empty_rows(q, rows_per_head=2 if is_added else 1)


def empty_rows(q: Tensor, packing: Packing | None = None, rows_per_head: int = 1) -> Tensor:
    """One fp32 number a query of q (B, T, H, D): (B, H, T), each row padded to 16 bytes.

    Of packed sequences (H, length): that of b begins at 4 (cu_seqlens[b] // 4 + b), so that each
    is padded too and none needs to know another's length.
    """
    T, H, _ = q.shape[-3:]
    if packing is None:
        return _rows((q.shape[0], H * rows_per_head, T), q.device)
    length = (T // ROW_PAD + packing.cu_seqlens.shape[0] - 1) * ROW_PAD
    return torch.empty((H, length), dtype=torch.float32, device=q.device)


def _rows(shape: tuple[int, int, int], device: torch.device) -> Tensor:
    """(B, H, T) fp32, each row padded to 16 bytes."""
    B, H, T = shape
    length = -(-T // ROW_PAD) * ROW_PAD
    strides = (H * length, length, 1)
    rows = empty_strided((B, H, length), strides, dtype=torch.float32, device=device)
    return rows if length == T else rows.narrow(2, 0, T)


@functools.lru_cache(maxsize=1024)
def tokens_first(shape: tuple[int, ...]) -> Layout:
    """(B, H, T, D) that lies as (B, T, H, D), contiguous: shape and strides for `empty_strided`."""
    _, H, T, D = shape
    return tuple(shape), (T * H * D, D, H * D, 1)


def fwd_flops(qkv: Any) -> int:
    """Of a forward of packed (B, T, 3, H, D), by its shape."""
    B, T, _, H, D = qkv
    return 4 * B * H * T * T * D


def empty_dqkv(qkv: Tensor) -> Tensor:
    """Contiguous, whatever the strides of packed qkv are."""
    return torch.empty_like(qkv, memory_format=torch.contiguous_format)


def bwd_flops(dout: Any) -> int:
    """Of a backward, by the shape of its upstream gradient (B, T, H, D)."""
    B, T, H, D = dout
    return 10 * B * H * T * T * D  # as torch counts it, with the scores computed anew


def padded_rows(lse: Tensor) -> Tensor:
    """lse as the forward laid it out; hooks on saved tensors may have unpacked another layout."""
    known = lse.__class__ is Tensor and lse.data_ptr() % 16 == 0
    if lse.ndim == 2:  # of packed sequences
        return lse if known and lse.is_contiguous() else aligned(lse)
    B, H, T = lse.shape
    length = -(-T // ROW_PAD) * ROW_PAD
    is_padded = lse.stride() == (H * length, length, 1)
    if is_padded and length != T:
        end = 4 * (lse.storage_offset() + B * H * length)
        is_padded = lse.untyped_storage().nbytes() >= end
    if is_padded and (known or is_aligned(lse)):
        return lse
    return F.pad(lse.contiguous(), (0, length - T), value=float("inf"))


def launch_fwd(
    qkv: Sequence[Tensor],
    softmax: Softmax,
    packed: Tensor | None = None,
    heads_first: bool = False,
) -> tuple[Tensor, Tensor]:
    """out, (B, T, H, D) contiguous, and lse (`empty_lse`), by our kernel or by the library's.

    qkv: q, k and v, (B, T, H, D) views, of packed sequences (total, H, D) too; packed:
    (B, T, 3, H, D), whose views they are. heads_first: they are (B, H, T, D), and so is out then.
    """
    q, k, v = qkv
    seed, mask, packing = softmax.seed, softmax.mask, softmax.packing
    size, strides = tokens_first(q.shape) if heads_first else layout(q.shape)
    if not q.numel() or (packing is not None and packing.cu_seqlens.shape[0] < 2):
        out = empty_strided(size, strides, dtype=q.dtype, device=q.device)
        seen = out.transpose(1, 2) if heads_first else out
        return out, empty_lse(seen, mask) if packing is None else empty_rows(out, packing)
    T_kv = k.shape[2] if heads_first else k.shape[-3]
    layouts = _layouts(qkv, q, T_kv, softmax, matmul_precision(), heads_first)
    of_qkv = packed is not None and packed.is_contiguous()
    call = fwd_call(*layouts, own=packing is not None, of_qkv=of_qkv)
    if call.launch is None:
        if (found := _by_library(qkv, softmax, heads_first)) is not None:
            return found
        call = fwd_call(*layouts, own=True)
    assert call.launch is not None
    out = empty_strided(size, strides, dtype=q.dtype, device=q.device)
    if packing is not None:
        lse = empty_rows(out, packing)
        sizes = *call.sizes, q.shape[-3], lse.stride(0)
        call.launch(out, lse, q, k, v, None, seed, packing.cu_seqlens, *sizes)
        return out, lse
    B, T, H, _ = size
    if heads_first:
        T, H = H, T
    lse = _rows((B, H if mask is None or mask.dtype is torch.bool else 2 * H, T), q.device)
    if call.of_qkv:
        call.launch(out, lse, packed)
    else:
        call.launch(out, lse, q, k, v, _as_bytes(mask), seed, None)
    return out, lse


def _by_library(
    qkv: Sequence[Tensor], softmax: Softmax, heads_first: bool
) -> tuple[Tensor, Tensor] | None:
    """The library's part of `launch_fwd`."""
    if heads_first:
        qkv = [x.transpose(1, 2) for x in qkv]
    found = sdpa_forward(qkv, softmax.scale, softmax.is_causal)
    if found is None:
        return None
    out, lse = found
    lse = padded_rows(lse).narrow(2, 0, out.shape[1])
    return out.transpose(1, 2) if heads_first else out, lse


def _empty_gradients(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv (B, H, T, D) that lie as (B, T, H, D)."""
    of_q, of_k, dtype, device = tokens_first(q.shape), tokens_first(k.shape), q.dtype, q.device
    return (
        empty_strided(*of_q, dtype=dtype, device=device),
        empty_strided(*of_k, dtype=dtype, device=device),
        empty_strided(*of_k, dtype=dtype, device=device),
    )


def _delta(q: Tensor, packing: Packing | None, heads_first: bool) -> Tensor:
    if packing is not None:
        return empty_rows(q, packing)
    B, T, H, _ = q.shape
    return _rows((B, T, H) if heads_first else (B, H, T), q.device)


def _by_library_bwd(
    grads: Sequence[Tensor] | None,
    dout: Tensor,
    qkv: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    softmax: Softmax,
    heads_first: bool,
) -> Sequence[Tensor] | None:
    """The library's gradients, in the memory that the caller wants them in; None: not by it."""
    if heads_first:
        dout, out, *qkv = (x.transpose(1, 2) for x in (dout, out, *qkv))
    found = sdpa_backward(dout, qkv, out, lse, softmax.scale, softmax.is_causal)
    if found is None:
        return None
    if grads is None:
        found = [x.contiguous() for x in found]
        return [x.transpose(1, 2) for x in found] if heads_first else found
    for grad, x in zip(grads, found, strict=True):
        grad.copy_(x)
    return grads


def launch_bwd(
    grads: Sequence[Tensor] | None,
    dout: Tensor,
    qkv: Sequence[Tensor],
    out: Tensor,
    lse: Tensor,
    softmax: Softmax,
    packed: tuple[Tensor, Tensor] | None = None,
    has_bias: bool = False,
    heads_first: bool = False,
) -> tuple[Sequence[Tensor], Tensor | None, Tensor | None]:
    """Fill dq, dk, dv: (B, T, H, D) views whose heads are D apart; dk and dv of equal strides.

    Returns them; delta (B, H, T_q) fp32 in padded rows, None in one pass and by the library; and
    where has_bias (R, 3 H D) fp32 of the same column sums, None where no kernel made them.
    grads: None, where heads_first alone: allocated, as (B, T, H, D) contiguous.
    qkv, softmax, heads_first: as for `launch_fwd`; out, lse: its own, in a layout of any hook's.
    packed: dqkv and qkv, whose views they are. has_bias: without a mask.
    """
    (q, k, v), seed, packing = qkv, softmax.seed, softmax.packing
    T_axis, of_q = (2, tokens_first(q.shape)) if heads_first else (-3, layout(q.shape))
    if out.stride() != of_q[1] or not is_aligned(out):
        out = aligned(out.transpose(1, 2)).transpose(1, 2) if heads_first else aligned(out)
    given = (dout, q, k, v), q, k.shape[T_axis], softmax, matmul_precision(), heads_first
    device, *fields = _layouts(*given)
    dq_step = of_q[1][2] if grads is None else grads[0].stride(T_axis)
    dk_step = dq_step if grads is None else grads[1].stride(T_axis)
    layouts = device, has_bias, dq_step, dk_step, *fields
    of_qkv = packed is not None and packed[1].is_contiguous() and dout.is_contiguous()
    call = bwd_call(*layouts, of_qkv=of_qkv)
    if call.copies:
        # .contiguous() gives back a tensor whose axis of stride 0 has one element
        dout, *qkv = (x.clone(memory_format=torch.contiguous_format) for x in (dout, *qkv))
        return launch_bwd(grads, dout, qkv, out, lse, softmax, None, has_bias, heads_first)
    if call.one_pass is None and call.dq is None and call.fused_dq is None:
        given = grads, dout, qkv, out, lse, softmax, heads_first
        if (found := _by_library_bwd(*given)) is not None:
            return found, None, None
        call = bwd_call(*layouts, own=True)
    grads = _empty_gradients(q, k) if grads is None else grads
    of_sums = call.partials
    partial = of_sums and empty_strided(*of_sums, dtype=torch.float32, device=q.device)
    (dq, dk, dv), lse, of_packing = grads, padded_rows(lse), (None,)
    if packing is not None:
        of_packing = packing.cu_seqlens, *call.sizes, q.shape[-3], lse.stride(0)
    if call.one_pass is not None:
        if packed is not None and call.of_qkv:
            call.one_pass(packed[0], partial, dout, packed[1], out, lse)
        else:
            call.one_pass(dq, dk, dv, partial, dout, q, k, v, out, lse, seed, *of_packing)
        return grads, None, partial
    delta = _delta(q, packing, heads_first)
    if call.fused_dq is not None:
        call.fused_dq(dq, dk, dv, partial, dout, *qkv, out, lse, delta)
        return grads, delta, partial
    assert call.dq is not None
    mask = _as_bytes(softmax.mask)
    call.dq(dq, delta, dout, q, k, v, out, lse, mask, seed, *of_packing)
    for launch in call.dkdv:
        launch(dk, dv, dout, q, k, v, lse, delta, mask, seed, *of_packing)
    return grads, delta, None


@functools.lru_cache(maxsize=1024)
def _is_readable(strides: tuple[int, ...], token_axis: int) -> bool:
    fits = strides[-1] == 1 and strides[token_axis] <= configs.MAX_TOKEN_STRIDE
    return fits and all(stride % 8 == 0 for stride in strides[:-1])


def readable(x: Tensor, token_axis: int = 1) -> Tensor:
    """x itself where the kernels can address it, else a contiguous copy.

    They need a contiguous last axis (an expanded gradient has none), the other strides multiples of
    8 and an address of 16 bytes, so that rows load in vectors, and a token stride that keeps
    offsets within a tile in 32 bits.
    """
    fits = _is_readable(x.stride(), token_axis)
    if fits and ((x.__class__ is Tensor and x.data_ptr() % 16 == 0) or is_aligned(x)):
        return x
    return x.clone(memory_format=torch.contiguous_format)
