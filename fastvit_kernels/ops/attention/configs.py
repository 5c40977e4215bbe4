"""Launch configs of the attention kernels, and everything about a launch but the pointers.

A key of the tables is (dtype, padded D, tokens, mask, heads): tokens is the bucket of the longer
of queries and keys, by its upper end; mask one of "none", "causal", "keys" (boolean, by key),
"bool", "add", "varlen" (packed sequences), or with dropout "none+dropout" and so on; heads "many"
where there are at least MANY_HEADS a SM, "scarce" where there is less than one, else "few". An H100
has measured D = 64 without mask, the compile command chose the rest: no default spills on sm_80 and
sm_90, and wgmma on sm_90 stays in flight and is at least 16 columns wide.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from ...runtime.backend import Gpu
from ...runtime.configs import ConfigTable, forced
from ...runtime.dtypes import DTYPES
from ...runtime.triton import VERSION, has_gluon
from ..common.gemm import UNFENCED
from .tiling import query_parts

MAX_D = 256
MAX_TOKEN_STRIDE = 2**31 // 256  # so that offsets within a tile of 256 tokens fit in 32 bits
ITEMSIZE = {name: dtype.itemsize for name, dtype in DTYPES.items()}
# Upper ends; the last holds all that is longer. 197 and 257 stand one above 196 and 256 patches.
TOKEN_BUCKETS = (64, 128, 192, 256, 272, 320, 384, 640, 1024, 2047, 4096, 8192)
MAX_ONE_PASS_D = 64
MANY_HEADS = 16


class FwdConfig(NamedTuple):
    """The forward kernel: a program owns block_q queries and walks block_kv keys at a time. With
    another route the rest says nothing: the library's, or Hopper's own, of packed qkv
    (forward_pingpong.py).

    `tail` is the smallest tile for the keys that full tiles leave over. Where it is as large as the
    tile there is no second copy of the code: all tiles check their keys.
    """

    block_q: int
    block_kv: int
    tail: int
    heads: int  # a program, one after the other
    num_warps: int
    num_stages: int
    route: str = "triton"  # or "library", "gluon"


class SplitConfig(NamedTuple):
    """A kernel of the split backward: rows the program owns, rows it loops over; tail as above.

    `apart`: dk and dv by a launch each, which computes the scores again but has one accumulator.
    """

    own: int
    loop: int
    tail: int
    num_warps: int
    num_stages: int
    apart: bool = False


class OnePassConfig(NamedTuple):
    """The one-pass backward: a program owns all queries of a head, in parts (`query_parts`).

    `tail` is the smallest tile for the keys that full tiles leave over, as above.
    """

    block_kv: int
    tail: int
    close: bool  # parts that fit T closely
    heads: int  # a program, one after the other
    num_warps: int
    num_stages: int


class BwdForm(NamedTuple):
    """Which of the two forms of the backward runs, or the library's, or one in Gluon:
    backward_pingpong.py in one pass, else backward_fused_dq.py."""

    one_pass: bool
    route: str = "triton"  # or "library", "gluon"


# Architecture -> the T from which 16-bit attention without mask and dropout is the library's; but
# the forward at D = 64 on sm_90 is ours. On an H100 at D = 64 and T = 2305 and 4097 ours takes 0.9
# to 0.97 of the library's time, our backward 1.01 and 1.11. On sm_80: modelled, beside published
# times. Family 10, where ours is plain Triton and does not copy ahead (`is_unpipelined`): on B200
# FA4 is published at 2.1 to 2.7 times a plain Triton kernel's speed, and cuDNN above it (sglang
# #33655); not measured.
LIBRARY_FROM = {"sm_80": 2048, "sm_90": 2048}
LIBRARY_FROM_BLACKWELL = 257
LIBRARY_FWD = FwdConfig(0, 0, 0, 1, 4, 1, "library")
LIBRARY_BWD = BwdForm(one_pass=False, route="library")
LIBRARY_MAX_D = 128
# Two groups of warps in turns, and the T by D for which they are the default on sm_90: where by the
# model of docs/compile.md they take at least 10 % less (docs/attention.md has the table, and what
# an H100 measured at D = 64). Elsewhere they do not run.
PINGPONG_FWD = FwdConfig(64, 64, 16, 1, 4, 2, "gluon")
PINGPONG_BWD = BwdForm(one_pass=True, route="gluon")
PINGPONG_FWD_TOKENS = {32: range(65, 273), 64: range(65, 8193), 128: range(65, 8193)}
PINGPONG_BWD_TOKENS = {64: range(129, 257)}
# Five products instead of the split form's seven, by the widest D: where by the same model, with an
# H100's constants, they take less time than the others do, and at D = 64 than cuDNN took on that
# H100 (docs/attention.md). Not yet run on a GPU, so FASTVIT_KERNELS_FUSED_DQ=1 asks for it.
FUSED_DQ = BwdForm(one_pass=False, route="gluon")
FUSED_DQ_TOKENS = {32: range(257, 4097), 64: range(273, 4097), 128: range(257, 4097)}
# There the split form pads D less, and the model's 3 to 15 % are no more than the groups' waits for
# each other, which it does not see: for tune alone.
FUSED_DQ_TUNED_D = range(65, 81)

# By (bytes an element, largest padded D), first row that fits.
FWD = {
    (2, 80): FwdConfig(64, 64, 16, 1, 4, 2),
    (2, 128): FwdConfig(64, 64, 64, 1, 4, 2),
    (2, 256): FwdConfig(64, 32, 64, 1, 4, 2),
    (4, 128): FwdConfig(32, 16, 32, 1, 8, 1),
    (4, 256): FwdConfig(16, 16, 16, 1, 4, 1),
}
# T above 1024, 16 bits, D <= 64: twice the queries and the warps, half the reads of keys. By
# mma.sync above T = 64 beside dropout too, and at D = 64 beside a mask. Not on sm_90 at D = 64
# without a mask: there 64 rows by 4 warps take 4 to 12 % less time, measured on an H100.
FWD_LONG = FwdConfig(128, 64, 16, 1, 8, 2)
LONG_ON_HOPPER = (256, 384, 640, 1024)  # buckets in which 128 rows pad T no more than 64 do
# There on sm_90 at D = 64 beside a mask of keys and for packed sequences, where all tiles check
# their keys: half the warps for the same rows, three quarters of the instructions.
FWD_HOPPER_KEYS = FwdConfig(128, 32, 32, 1, 4, 3)
# Where tensor cores are those of sm_80 (mma.sync), T above 64: reads of shared memory bound every
# kernel by the model of docs/compile.md, and 32 rows a warp instead of 16 halve those of k and v.
# Not fewer rows than D: Triton would lay the warps along the columns.
FWD_MMA = {
    (2, 64): FwdConfig(128, 64, 16, 1, 4, 2),
    (2, 80): FwdConfig(128, 32, 32, 1, 4, 2),
    (2, 128): FwdConfig(128, 32, 32, 1, 8, 2),
}
FWD_MMA_MASKED_WIDE = FwdConfig(128, 16, 16, 1, 8, 2)  # D above 96
FWD_MMA_MASKED_SHORT = FwdConfig(64, 64, 64, 1, 8, 2)  # the same up to T = 64
# T <= 64: the tile is the whole head, and the next head's loads run beside its products. At D = 64
# that takes twice the registers (157 to 78), so that half the warps fit; at D = 32 it pays.
FWD_HEADS = FwdConfig(64, 64, 16, 4, 4, 3)
# Pointers into a mask take registers.
FWD_MASKED = FwdConfig(64, 32, 32, 1, 4, 2)
FWD_MASKED_WIDE = FwdConfig(64, 16, 16, 1, 4, 2)  # D above 96
FWD_FP32 = FwdConfig(32, 16, 32, 1, 8, 2)
FWD_CONFIGS = [
    *FWD.values(),
    FWD_MASKED,
    FWD_FP32,
    FWD_MASKED_WIDE,
    FWD_LONG,
    *FWD_MMA.values(),
    FWD_MMA_MASKED_WIDE,
    FWD_MMA_MASKED_SHORT,
    FWD_HEADS,
    FwdConfig(64, 64, 16, 1, 4, 3),
    FwdConfig(128, 64, 16, 1, 8, 3),
    FwdConfig(64, 64, 16, 2, 4, 2),
]
# Rows that a program owns: 16 a warp, so that no warp repeats another's product.
DQ = {
    (2, 64): SplitConfig(128, 64, 16, 8, 2),
    (2, 128): SplitConfig(128, 32, 32, 8, 2),
    (2, 256): SplitConfig(128, 32, 32, 8, 1),
    (4, 32): SplitConfig(32, 32, 32, 4, 1),
    (4, 64): SplitConfig(32, 32, 32, 4, 2),
    (4, 128): SplitConfig(32, 16, 16, 4, 2),
    (4, 256): SplitConfig(16, 16, 16, 8, 1),
}
DQ_HOPPER = SplitConfig(128, 64, 16, 8, 3)  # D = 64 beside a mask of pairs, or packed
DQ_HOPPER_DROPOUT = SplitConfig(128, 32, 16, 8, 3)  # twice the warps an SM
DQ_SHORT_TAIL = SplitConfig(128, 32, 16, 8, 2)
DQ_MMA = SplitConfig(128, 32, 16, 4, 2)  # D <= 64: 32 rows a warp, as FWD_MMA
DQ_MMA_CROWDED = SplitConfig(128, 16, 16, 4, 2)  # D = 64 beside keys or dropout, where that spills
DQ_MMA_MASKED = DQ_MMA_CROWDED._replace(num_stages=3)  # D = 64 beside a mask of pairs
DQ_MASKED = SplitConfig(128, 32, 32, 8, 1)
DQ_MASKED_WIDE = SplitConfig(128, 16, 16, 8, 1)  # D above 96, by mma.sync above 64
# By mma.sync at D above 96, where the others spill: an additive mask, or a mask beside dropout.
MMA_MASKED_WIDE = SplitConfig(32, 32, 32, 4, 1)
DQ_MMA_WIDEST = SplitConfig(64, 16, 16, 4, 1)  # D above 128, up to 192
DQ_FP32 = SplitConfig(32, 16, 16, 4, 1)
DQ_CONFIGS = [
    *dict.fromkeys([*DQ.values(), MMA_MASKED_WIDE]),
    DQ_FP32,
    DQ_MMA,
    DQ_MMA_CROWDED,
    DQ_MMA_WIDEST,
    DQ_MASKED,
    DQ_MASKED_WIDE,
    DQ_SHORT_TAIL,
]
DKDV = {
    (2, 64): SplitConfig(128, 32, 16, 8, 2),
    (2, 96): SplitConfig(128, 32, 32, 8, 2),
    (2, 128): SplitConfig(128, 16, 16, 8, 2),
    (2, 192): SplitConfig(128, 16, 16, 8, 1),
    (2, 256): SplitConfig(128, 16, 16, 8, 1, apart=True),
    (4, 64): SplitConfig(32, 32, 32, 4, 1),
    (4, 96): SplitConfig(32, 16, 16, 4, 1),
    (4, 128): SplitConfig(32, 16, 16, 4, 2),
    (4, 256): SplitConfig(16, 16, 16, 4, 1),
}
DKDV_MMA = {  # without a mask of pairs and dropout; the row of D = 64 beside most of them too
    (2, 32): SplitConfig(128, 32, 32, 4, 2),
    (2, 64): SplitConfig(128, 16, 16, 4, 2),
    (2, 80): SplitConfig(128, 32, 32, 8, 2),
    (2, 128): SplitConfig(128, 16, 16, 8, 2),
    (2, 192): SplitConfig(64, 16, 16, 4, 1, apart=True),
    (2, 256): MMA_MASKED_WIDE,
}
DKDV_HOPPER = SplitConfig(128, 64, 16, 8, 2)  # D = 64 without a mask of pairs; D = 32 with none
DKDV_MASKED = SplitConfig(128, 16, 16, 8, 1)
DKDV_MMA_KEYS = SplitConfig(32, 64, 64, 4, 1)  # beside dropout, D above 96: the other spills
DKDV_CROWDED_FP32 = SplitConfig(32, 16, 16, 8, 1)  # a mask or dropout, D above 96, not by mma.sync
DKDV_CONFIGS = [
    *dict.fromkeys([*DKDV.values(), *DKDV_MMA.values(), MMA_MASKED_WIDE]),
    DKDV_HOPPER,
    DKDV_MASKED,
    DKDV_MMA_KEYS,
    DQ[4, 64],
    DKDV_CROWDED_FP32,
]
ONE_PASS = OnePassConfig(32, 32, False, 1, 8, 2)
ONE_PASS_FP32 = OnePassConfig(16, 16, False, 1, 4, 1)
ONE_PASS_HOPPER = OnePassConfig(64, 64, False, 1, 8, 2)  # spills above T = 256, beside dropout
# T <= 64: one part of 64 rows has work for four warps, and one tile of keys needs no loop.
ONE_PASS_SHORT = OnePassConfig(64, 64, False, 1, 4, 2)
ONE_PASS_NARROW = OnePassConfig(64, 64, False, 1, 2, 2)  # mma.sync, D <= 32: dk and dv have D rows
ONE_PASS_CONFIGS = [
    ONE_PASS,
    ONE_PASS_FP32,
    ONE_PASS_HOPPER,
    ONE_PASS_SHORT,
    ONE_PASS_NARROW,
    OnePassConfig(32, 32, False, 1, 8, 3),
    OnePassConfig(32, 32, True, 1, 8, 2),
    OnePassConfig(32, 32, False, 1, 4, 2),
    OnePassConfig(64, 64, False, 2, 4, 2),
]
UNCROWDED = ("none", "causal", "bool")  # of forward and dq: beside others fewer warps would fit


def _prefetching(
    sm_90: tuple[str, ...], sm_80: tuple[str, ...] = (), but: tuple[int, ...] = (96,)
) -> Callable[..., Any]:
    """Beside these masks ("all": any) a third stage for 16 bits: two wait for each tile's loads
    before its products, three have the next tile's in flight. On sm_80 at D = 64, on sm_90 beside
    "all" or at any D but these."""

    def decorate(default: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(default)
        def choose(gpu: Gpu, dtype: str, D: int, tokens: int, mask: str, heads: str) -> Any:
            config = default(gpu, dtype, D, tokens, mask, heads)
            masks = sm_90 if gpu.family == 9 else sm_80 if (gpu.arch, D) == ("sm_80", 64) else ()
            fits = "all" in masks or (D not in but and mask in masks)
            wants = (ITEMSIZE[dtype], config.num_stages) == (2, 2)
            return config._replace(num_stages=3) if wants and fits else config

        return choose

    return decorate


def _with_prefetching(*configs: Any) -> list[Any]:
    """The configs, and those of two stages with three."""
    more = [c._replace(num_stages=3) for c in configs if c.num_stages == 2]
    return list(dict.fromkeys([*configs, *more]))


def row_for(table: dict[tuple[int, int], Any], itemsize: int, size: int) -> Any:
    """The first row for elements of this size that is large enough, else the largest."""
    rows = [(largest, config) for (bytes_, largest), config in table.items() if bytes_ == itemsize]
    return next((config for largest, config in rows if size <= largest), rows[-1][1])


class Rule(NamedTuple):
    """Where a 16-bit kernel takes a config, and why; the first that holds decides."""

    give: Any
    why: str = ""
    family: tuple[int, ...] = ()  # any: ()
    arch: str = ""  # of the family; "but sm_80": the others
    D: tuple[int, int] = (0, 256)  # above the first, up to the second
    masks: str = ""  # any: ""
    tokens: tuple[int, int] = (0, 8192)  # as D
    buckets: tuple[int, ...] = ()  # any: ()
    heads: str = ""  # any: ""
    before: tuple[int, ...] = ()  # Triton's release
    since: tuple[int, ...] = ()

    def holds(self, gpu: Gpu, D: int, tokens: int, mask: str, heads: str) -> bool:
        _, but, arch = self.arch.rpartition("but ")
        return (
            (not self.family or gpu.family in self.family)
            and (not arch or (gpu.arch == arch) != bool(but))
            and self.D[0] < D <= self.D[1]
            and self.tokens[0] < tokens <= self.tokens[1]
            and (not self.masks or mask in self.masks.split())
            and (not self.buckets or tokens in self.buckets)
            and (not self.heads or heads in self.heads.split())
            and (not self.before or self.before > VERSION)
            and self.since <= VERSION
        )


def _first(rules: list[Rule], gpu: Gpu, *key: Any) -> Any:
    return next((rule.give for rule in rules if rule.holds(gpu, *key)), None)


MMA, HOPPER, OTHERS = (8, 12), (9,), (0, 9, 10)  # families: OTHERS are those without mma.sync
DROPPED = "none+dropout causal+dropout"  # dropout where no mask is loaded
TENSOR = "bool bool+dropout add add+dropout"  # a mask is loaded, which takes registers
DROPOUT = f"{DROPPED} keys+dropout varlen+dropout"
SHORT, LONGER = (0, 64), (64, 8192)
FWD_RULES = [
    Rule(FWD_MASKED_WIDE, masks=TENSOR, D=(128, 256)),
    Rule(FWD_LONG, family=MMA, masks="bool add", D=(63, 64), tokens=LONGER),
    Rule(FWD_MMA_MASKED_WIDE, family=MMA, masks=TENSOR, D=(96, 128), tokens=LONGER),
    Rule(FWD_MMA_MASKED_SHORT, family=MMA, masks=TENSOR, D=(96, 128)),
    Rule(FWD_MASKED_WIDE, "16 bytes", family=MMA, masks="bool+dropout", D=(64, 80)),
    Rule(FWD_MASKED_WIDE, masks=TENSOR, D=(96, 128)),
    Rule(FWD[2, 80], family=HOPPER, masks=TENSOR, D=(32, 64)),  # at D = 32 a boolean one spills
    Rule(FWD_MASKED, masks=TENSOR),
    Rule(FWD_LONG, "registers for dropout", MMA, masks=DROPOUT, D=(0, 64), tokens=LONGER),
    Rule(FWD_MMA[2, 128], family=MMA, masks=DROPOUT, D=(64, 128), tokens=LONGER),
    Rule(
        FWD_MMA[2, 80],
        "all tiles masked: the larger tile spills at D = 64",
        family=MMA,
        masks="varlen keys",
        D=(0, 80),
        tokens=LONGER,
    ),
    *(
        Rule(config, family=MMA, D=(0, most), tokens=LONGER)
        for (_, most), config in FWD_MMA.items()
    ),
    Rule(FWD[2, 80], family=HOPPER, masks="none causal", D=(32, 64)),
    Rule(FWD_LONG, D=(0, 64), tokens=(1024, 8192)),
    Rule(
        FWD_HOPPER_KEYS,
        family=HOPPER,
        masks="keys varlen",
        D=(63, 64),
        buckets=LONG_ON_HOPPER,
        heads="few many",
    ),
    Rule(FWD_HEADS, masks="none", D=(0, 32), tokens=SHORT, heads="many"),
]


@_prefetching(UNCROWDED)
def own_fwd(gpu: Gpu, dtype: str, D: int, tokens: int, mask: str, heads: str) -> FwdConfig:
    if ITEMSIZE[dtype] == 4:
        return _fwd_fp32(D, mask)
    return _first(FWD_RULES, gpu, D, tokens, mask, heads) or row_for(FWD, 2, D)


def _fwd_fp32(D: int, mask: str) -> FwdConfig:
    """The row of the table but where that spills: 8 bytes each."""
    two_stages = _has_tensor(mask) and D <= 64
    if VERSION >= (3, 9):
        wide = 64 < D <= 96 and mask != "keys+dropout"
        two_stages = two_stages or wide or (mask == "none" and D <= 32)
    return FWD_FP32 if two_stages else row_for(FWD, 4, D)


DQ_RULES = [
    Rule(DQ_MASKED, "twice the warps an SM: a quarter less time", HOPPER, D=(63, 64), masks="keys"),
    Rule(DQ_HOPPER, "a sixth to a quarter less", HOPPER, D=(63, 64), masks="varlen"),
    Rule(DQ_HOPPER, "the same", HOPPER, D=(63, 64), masks=TENSOR, tokens=LONGER),
    Rule(DQ_HOPPER_DROPOUT, "a tenth less", HOPPER, D=(63, 64), masks=DROPPED),
    Rule(DQ_SHORT_TAIL, "7 % less", HOPPER, D=(79, 80), masks="none", since=(3, 9)),
    Rule(MMA_MASKED_WIDE, family=MMA, D=(96, 128), masks="add+dropout"),
    Rule(DQ_MMA_MASKED, "a tenth to a sixth less", MMA, "sm_80", D=(63, 64), masks=TENSOR),
    Rule(DQ_MASKED, family=MMA, D=(0, 64), masks=TENSOR),
    Rule(DQ_MASKED, family=OTHERS, D=(0, 96), masks=TENSOR),
    Rule(DQ_MASKED_WIDE, D=(0, 128), masks=TENSOR),
    Rule(DQ_MMA_CROWDED, "16 to 40 bytes", MMA, "but sm_80", D=(32, 64), masks="keys"),
    Rule(
        DQ_MMA_CROWDED,
        "the same",
        family=(12,),
        D=(32, 64),
        masks="none causal varlen",
        since=(3, 9),
    ),
    Rule(DQ_MMA, family=MMA, D=(0, 64), masks="none causal keys varlen"),
    Rule(DQ_MMA_CROWDED, family=MMA, D=(63, 64), masks=DROPPED),
    Rule(DQ[2, 128], "8 bytes with triton 3.9", MMA, D=(0, 32), masks="causal+dropout"),
    Rule(DQ_MMA_WIDEST, family=MMA, D=(128, 192)),
    Rule(MMA_MASKED_WIDE, family=MMA, D=(192, 256)),
]


# By triton 3.9 a third stage at D = 80 makes wgmma wait.
@_prefetching(UNCROWDED, ("none", "keys", "varlen"), (96,) if VERSION < (3, 9) else (80, 96))
def _default_dq(gpu: Gpu, dtype: str, D: int, tokens: int, mask: str, heads: str) -> SplitConfig:
    if ITEMSIZE[dtype] == 4:
        return _dq_fp32(gpu, D, mask)
    return _first(DQ_RULES, gpu, D, tokens, mask, heads) or row_for(DQ, 2, D)


def _dq_fp32(gpu: Gpu, D: int, mask: str) -> SplitConfig:
    """The row of the table but where that spills: the bytes are in comments."""
    if D <= 32 and (mask == "causal+dropout" or (VERSION >= (3, 9) and mask.startswith("add"))):
        return DQ[4, 64 if mask == "add" else 128]  # 16, 8
    if (mask == "add" and 32 < D <= 64) or (mask == "none" and 64 < D <= 96):
        return DQ_FP32  # 8
    widest = {"bool+dropout": 64, "add+dropout": 128}.get(mask, 96)
    crowded = widest < D and (mask.endswith("dropout") or VERSION >= (3, 9))
    if crowded and not _is_ampere(gpu):
        return DQ[4, 256]  # 216 to 264; with triton 3.9 24 without dropout
    return row_for(DQ, 4, D)


DKDV_RULES = [
    Rule(DKDV_HOPPER, family=HOPPER, D=(63, 64), masks=f"keys varlen causal {DROPPED}"),
    Rule(
        DKDV_HOPPER,
        "an eighth to a sixth less time, by the model",
        family=HOPPER,
        D=(63, 64),
        masks="bool bool+dropout",
        tokens=LONGER,
        before=(3, 9),
    ),
    Rule(DKDV[2, 64], "16 bytes; 8 to 48 by 3.9 or T <= 64", HOPPER, D=(63, 64), masks="bool add"),
    Rule(DKDV_MMA[2, 64], family=MMA, D=(63, 64), masks=f"bool {DROPPED}"),
    Rule(MMA_MASKED_WIDE, family=MMA, D=(96, 128), masks="add add+dropout bool+dropout"),
    Rule(DKDV_MMA_KEYS, family=MMA, D=(96, 128), masks="keys+dropout"),
    Rule(DKDV_MASKED, D=(0, 128), masks=TENSOR),
    Rule(DKDV_HOPPER, family=HOPPER, D=(0, 64), masks="none"),
    Rule(
        DKDV[2, 256],
        "together they spill 16 bytes at D = 192",
        family=OTHERS,
        D=(128, 256),
        masks=f"keys varlen {TENSOR} {DROPOUT}",
    ),
    Rule(DKDV[2, 128], "by one stage 8", HOPPER, D=(191, 192), masks="none", since=(3, 9)),
    Rule(DKDV[2, 128], D=(0, 128), masks=DROPOUT),
    Rule(DKDV[2, 128], "wgmma would be serialised", HOPPER, D=(64, 128), masks="keys"),
    *(Rule(config, family=MMA, D=(0, most)) for (_, most), config in DKDV_MMA.items()),
]


@_prefetching(("all",), sm_80=("none", "causal", "keys", "varlen", "bool", *DROPPED.split()))
def _default_dkdv(gpu: Gpu, dtype: str, D: int, tokens: int, mask: str, heads: str) -> SplitConfig:
    if ITEMSIZE[dtype] == 4:
        return _dkdv_fp32(gpu, D, mask)
    if (found := _first(DKDV_RULES, gpu, D, tokens, mask, heads)) is not None:
        return found
    if gpu.is_amd and 64 < D <= 128:
        return DKDV[2, 128]  # the larger tile spills 96 bytes
    return row_for(DKDV, 2, D)


def _dkdv_fp32(gpu: Gpu, D: int, mask: str) -> SplitConfig:
    """The row of the table but where that spills: the bytes are in comments."""
    crowded = _has_tensor(mask) or mask.endswith("dropout") or VERSION >= (3, 9)
    if crowded and 96 < D <= 128 and not _is_ampere(gpu):
        return DKDV_CROWDED_FP32  # 328 to 456; with triton 3.9 48 to 144 without mask
    if _has_tensor(mask) and D <= 32 and (VERSION < (3, 9) or mask.startswith("bool")):
        return DQ[4, 64]  # by one stage 8; with triton 3.9 by two
    if mask == "keys+dropout" and (D <= 32 or 64 < D <= 96):
        return DKDV[4, 128]  # 8 to 16
    return row_for(DKDV, 4, D)


def _has_tensor(mask: str, *others: str) -> bool:
    """Whether a mask is loaded, which takes registers."""
    return mask.startswith(("bool", "add", *others))


@_prefetching(("all",))
def _default_one_pass(
    gpu: Gpu, dtype: str, D: int, tokens: int, mask: str, heads: str
) -> OnePassConfig:
    if ITEMSIZE[dtype] == 4:
        return ONE_PASS_FP32
    if tokens <= 64:
        return ONE_PASS_NARROW if D <= 32 and _is_ampere(gpu) else ONE_PASS_SHORT
    spills = mask.endswith("dropout") or tokens > 256
    return ONE_PASS_HOPPER if (gpu.family, D) == (9, 64) and not spills else ONE_PASS


def own_bwd(gpu: Gpu, dtype: str, D: int, tokens: int, mask: str, heads: str) -> BwdForm:
    # On sm_90 it spills above 256 with dropout.
    packed = (gpu.family, mask) == (9, "varlen")
    longest = 320 if packed or (_has_wgmma(gpu) and mask == "none") else 256
    if _is_ampere(gpu) or (gpu.family == 9 and D <= 32):
        longest = 64  # dk and dv have D rows, too few for eight warps, which would repeat them
    if (_is_ampere(gpu) or ITEMSIZE[dtype] == 4) and D <= 32 and mask.endswith("dropout"):
        longest = 0  # two warps lack the registers, and four in fp32
    if heads == "scarce" and tokens > 64:
        longest = 0  # a program a head would leave SMs idle
    form = BwdForm(tokens <= longest)
    return form if _bwd_fits(gpu, form, dtype, D, tokens, mask, heads) else BwdForm(False)


def _library_fits(gpu: Gpu, dtype: str, D: int, tokens: int, mask: str, heads: str) -> bool:
    on_cuda = gpu.family > 0 and ITEMSIZE[dtype] == 2 and D <= LIBRARY_MAX_D
    return mask in ("none", "causal") and (on_cuda or gpu.arch == "cpu")


def library_from(gpu: Gpu) -> float:
    """The T from which the library's kernels are the default."""
    if gpu.family == 10:
        return 0 if UNFENCED else LIBRARY_FROM_BLACKWELL  # triton #10537
    return LIBRARY_FROM.get(gpu.arch, math.inf)


def _first_of(library: Any, pingpong: Any, own: Callable[..., Any], fits: Any) -> Any:
    """The library's config where LIBRARY_FROM says so, Gluon's where it fits, else the plain."""

    def default(gpu: Gpu, dtype: str, D: int, tokens: int, *others: str) -> Any:
        is_ours = (library, gpu.family, D, others[0]) == (LIBRARY_FWD, 9, 64, "none")
        is_long = tokens >= library_from(gpu)
        if is_long and not is_ours and _library_fits(gpu, dtype, D, tokens, *others):
            return library
        in_turns = fits(gpu, pingpong, dtype, D, tokens, *others)
        return pingpong if in_turns else own(gpu, dtype, D, tokens, *others)

    return default


def _tiles_fit(
    gpu: Gpu, dtype: str, D: int, own: int, loop: int, num_warps: int, scores: int
) -> bool:
    """Whether a tile is of the tensor cores' size, and fp32 accumulator and scores fit registers.

    `scores` of a thread: where two tiles of them are alive, of each.
    """
    if ITEMSIZE[dtype] == 4:
        return own * loop <= 1024 and own * D <= 32 * num_warps * 64
    rows = 16 * num_warps  # with fewer the warps repeat one another
    if own < D and loop >= 8 * num_warps and not _has_wgmma(gpu):
        rows = 0  # then each takes columns of its own
    sums = 96 if D <= 128 else 128  # of a thread
    return (
        own >= rows and own * D <= 32 * num_warps * sums and loop * own <= 32 * num_warps * scores
    )


def _is_ampere(gpu: Gpu) -> bool:
    """Whether its tensor cores are those of sm_80: mma, operands in registers."""
    return gpu.family in (8, 12)


def _has_wgmma(gpu: Gpu) -> bool:
    return gpu.family in (9, 10)


def _buffers(gpu: Gpu, num_stages: int) -> int:
    """Tiles of a pipelined load that are in shared memory at once."""
    return max(1, num_stages - 1) if _is_ampere(gpu) else num_stages


def has_turns(gpu: Gpu) -> bool:
    """Whether attention in Gluon runs there."""
    return gpu.family == 9 and has_gluon()


def _takes_turns(
    where: Container[int], gpu: Gpu, dtype: str, D: int, tokens: int, mask: str, heads: str
) -> bool:
    takes = (mask, ITEMSIZE[dtype]) == ("none", 2) and heads != "scarce"
    return takes and tokens in where and has_turns(gpu)


def _fwd_fits(
    gpu: Gpu, config: FwdConfig, dtype: str, D: int, tokens: int, mask: str, heads: str
) -> bool:
    if config.route == "library":
        return _library_fits(gpu, dtype, D, tokens, mask, heads)
    if config.route == "gluon":
        where = PINGPONG_FWD_TOKENS.get(D, ())
        return _takes_turns(where, gpu, dtype, D, tokens, mask, heads)
    if gpu.is_amd:  # compiled, not tuned: AMD's shared memory follows other rules
        return config == own_fwd(gpu, dtype, D, tokens, mask, heads)
    if config.num_stages > 2 and config.block_q > 16 * config.num_warps and _is_ampere(gpu):
        return False  # it spills 16 bytes
    buffers = _buffers(gpu, config.num_stages)
    q, kv = config.block_q * D, 2 * buffers * config.block_kv * D
    if config.heads > 1:
        q *= buffers
    shared = (q + kv) * ITEMSIZE[dtype] + 2 * config.block_q * config.block_kv * _has_tensor(mask)
    tile = config.block_q, config.block_kv, config.num_warps
    return (
        shared <= gpu.shared_limit
        and _tiles_fit(gpu, dtype, D, *tile, scores=32 if _has_wgmma(gpu) else 64)
        and (config.heads == 1 or tokens <= 64)
    )


def _split_fits(
    gpu: Gpu, config: SplitConfig, dtype: str, D: int, tokens: int, mask: str, heads: str
) -> bool:
    if gpu.is_amd:
        defaults = (_default_dq, _default_dkdv)
        return config in [f(gpu, dtype, D, tokens, mask, heads) for f in defaults]
    if config.num_warps == 4 and config.own >= 64 and _has_wgmma(gpu):
        return False  # triton #11366
    loop = _buffers(gpu, config.num_stages) * config.loop
    shared = 2 * (config.own + loop) * D * ITEMSIZE[dtype]
    return shared <= gpu.shared_limit and _tiles_fit(
        gpu, dtype, D, config.own, config.loop, config.num_warps, scores=32
    )


def _dkdv_fits(gpu: Gpu, config: SplitConfig, dtype: str, D: int, *others: Any) -> bool:
    crowded = D > 32 and config.own * config.loop > 32 * config.num_warps * 16
    if crowded and _is_ampere(gpu) and ITEMSIZE[dtype] == 2:
        return False  # it spills beside two accumulators
    return _split_fits(gpu, config, dtype, D, *others)


def _one_pass_fits(
    gpu: Gpu, config: OnePassConfig, dtype: str, D: int, tokens: int, mask: str, heads: str
) -> bool:
    parts = query_parts(tokens)
    if parts is None or D > MAX_ONE_PASS_D or D & (D - 1) or _has_tensor(mask, "keys"):
        return False
    if (ITEMSIZE[dtype] == 4) != (config == ONE_PASS_FP32):
        return False  # an H100 left its memory by 16 bf16 keys at once, and not always alike
    if ITEMSIZE[dtype] == 4 and (tokens > 64 or D > 32):
        return False  # at D = 64 it spills by four warps, and by eight TF32 products are 8 wide
    if config.num_warps < 8 and tokens > 64:
        return False  # triton #11366
    if config.num_warps == 2 and (_has_wgmma(gpu) or D > 32):
        return False
    repeats = ITEMSIZE[dtype] == 2 and 16 * config.num_warps > D  # the D rows of dk and dv
    if _is_ampere(gpu) and (repeats or config.heads > 1):  # two heads spill
        return False
    if config.close and gpu.family == 9:
        return False  # eight warps repeat the products of 64 rows
    if config.tail < config.block_kv and _is_ampere(gpu):
        return False  # a second copy of the body spills 672 bytes a thread on sm_80
    # That of sm_80, the largest: q and dout twice, k and v of each stage, p and ds.
    in_flight = 4 * sum(parts) * D * (config.num_stages if config.heads > 1 else 1)
    shared = in_flight + 2 * config.block_kv * (config.num_stages * D + parts[0])
    return shared * ITEMSIZE[dtype] <= gpu.shared_limit and (config.heads == 1 or tokens <= 64)


def _bwd_fits(gpu: Gpu, form: BwdForm, *key: Any) -> bool:
    D = key[1]
    if form.route == "library":
        return _library_fits(gpu, *key)
    if form == FUSED_DQ:
        where = next((tokens for most, tokens in FUSED_DQ_TOKENS.items() if most >= D), ())
        return _takes_turns(where, gpu, *key)
    if form == PINGPONG_BWD:
        return _takes_turns(PINGPONG_BWD_TOKENS.get(D, ()), gpu, *key)
    return not form.one_pass or _one_pass_fits(gpu, _default_one_pass(gpu, *key), *key)


def _default_bwd(gpu: Gpu, *key: Any) -> BwdForm:
    """The five products wherever they fit, if asked for, from T = 2048 on before the library."""
    others = _first_of(LIBRARY_BWD, PINGPONG_BWD, own_bwd, _bwd_fits)
    asked = os.environ.get("FASTVIT_KERNELS_FUSED_DQ") == "1" and key[1] not in FUSED_DQ_TUNED_D
    return FUSED_DQ if asked and _bwd_fits(gpu, FUSED_DQ, *key) else others(gpu, *key)


FWD_TABLE = ConfigTable(
    "attention_fwd",
    [*_with_prefetching(*FWD_CONFIGS), LIBRARY_FWD, PINGPONG_FWD],
    _first_of(LIBRARY_FWD, PINGPONG_FWD, own_fwd, _fwd_fits),
    _fwd_fits,
)
BWD_TABLE = ConfigTable(
    "attention_bwd",
    [BwdForm(True), BwdForm(False), LIBRARY_BWD, PINGPONG_BWD, FUSED_DQ],
    _default_bwd,
    _bwd_fits,
)
ONE_PASS_TABLE = ConfigTable(
    "attention_bwd_one_pass",
    _with_prefetching(*ONE_PASS_CONFIGS),
    _default_one_pass,
    _one_pass_fits,
)
DQ_TABLE = ConfigTable("attention_bwd_dq", _with_prefetching(*DQ_CONFIGS), _default_dq, _split_fits)
DKDV_TABLE = ConfigTable(
    "attention_bwd_dkdv", _with_prefetching(*DKDV_CONFIGS), _default_dkdv, _dkdv_fits
)


@contextmanager
def forced_route(route: str) -> Iterator[None]:
    """Inside, attention takes this route wherever it can, whatever is tuned."""
    by_library = route == "library"
    with (
        forced(FWD_TABLE.name, LIBRARY_FWD if by_library else own_fwd),
        forced(BWD_TABLE.name, LIBRARY_BWD if by_library else own_bwd),
    ):
        yield
