"""Who multiplies where an epilogue follows, and with which tile: the configs of the Triton GEMMs.

The "library" route is the vendor's product and one elementwise kernel, the "triton" route one GEMM
with the epilogue inside, the "gluon" route Hopper's own (gemm_warp_specialized.py). A choice
depends on (M bucket, N, K, dtype): M rounded up to a power of two, the dtype by its short name;
what the epilogue does is not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ...runtime.backend import Gpu
from ...runtime.configs import ConfigTable, forced, launch_plan
from ...runtime.dtypes import DTYPE_NAMES, DTYPES
from ...runtime.triton import has_gluon


class GemmConfig(NamedTuple):
    """How a product with an epilogue is made. With the library's route the rest says nothing."""

    route: str  # "library", "triton" or "gluon"
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    num_warps: int = 4
    num_stages: int = 1
    programs_per_sm: int = 0  # of a persistent kernel; 0: one program a tile
    subtiles: int = 1  # parts in which the epilogue takes the columns of a tile
    descriptors: bool = False  # operands come by TMA
    flatten: bool = False  # one loop over tiles and K: the next tile's loads pass this epilogue
    tma_stores: bool = False  # of the Gluon kernel: results leave by TMA
    max_registers: int = 0  # a thread may take; 0: as many as the compiler likes

    def shared(self, itemsize: int) -> int:
        """An upper bound of the bytes of shared memory; the epilogue's reuse the operands' where
        no load runs ahead of it."""
        operands = (self.block_m + self.block_n) * self.block_k * self.num_stages * itemsize
        staged = self.block_m * self.block_n * 4 // self.subtiles if self.flatten else 0
        if self.route == "gluon":
            staged = (self.block_m * self.block_n + 2 * 64 * 64) * itemsize + 1024  # z too
        return operands + staged + (1024 if self.descriptors else 0)


# On sm_90 measured on an H100 (docs/benchmarks.md), elsewhere not yet. Subtiles: docs/linear.md.
LIBRARY = GemmConfig("library")
TILE = GemmConfig("triton", 128, 128, 64, 8, 3, subtiles=2)
NARROW = GemmConfig("triton", 128, 64, 64, 8, 3)
SMALL = GemmConfig("triton", 64, 64, 64, 4, 3)  # where the others leave SMs idle
PERSISTENT = TILE._replace(programs_per_sm=1)
FLAT = PERSISTENT._replace(flatten=True)
TILE_64K = TILE._replace(num_stages=2)  # gfx942 has 64 KB
TILE_FP32 = GemmConfig("triton", 64, 64, 32, 8, 3)
SMALL_FP32 = GemmConfig("triton", 32, 64, 32, 4, 3)

# Four parts and 128 registers leave room for two blocks on an SM: one's epilogue runs beside the
# other's products. At one block (WIDE_TMA) nothing runs beside it, but less is read from L2.
TMA_TILE = TILE._replace(descriptors=True, subtiles=4)
TMA_PAIR = TMA_TILE._replace(programs_per_sm=2, max_registers=128)
TMA_NARROW = NARROW._replace(descriptors=True, subtiles=2, programs_per_sm=2, max_registers=128)
TMA_SMALL = SMALL._replace(descriptors=True)
WIDE_TMA = GemmConfig("triton", 128, 256, 64, 8, 4, programs_per_sm=1, subtiles=4, descriptors=True)
# Warps with roles: products, and beside them the epilogue of the tile before them.
SPECIALIZED = GemmConfig("gluon", 128, 256, 32, 4, 6, programs_per_sm=1, descriptors=True)
TMA_STORES = SPECIALIZED._replace(tma_stores=True)  # not yet measured
TMA_FP32 = TILE_FP32._replace(descriptors=True)
TMA_SMALL_FP32 = SMALL_FP32._replace(descriptors=True)

SHARED_BY_BOTH = (
    LIBRARY,
    TILE,
    NARROW,
    SMALL,
    PERSISTENT,
    FLAT,
    TILE_64K,
    TILE_FP32,
    SMALL_FP32,
    TMA_TILE,
    TMA_NARROW,
    TMA_SMALL,
    WIDE_TMA,
    SPECIALIZED,
    TMA_STORES,
    TMA_FP32,
    TMA_SMALL_FP32,
)
# Here tiles come by TMA or the product is the library's. Tensor cores read shared memory through
# the async proxy, cp.async writes it through the generic one, and before 3.7.1 triton puts no
# fence between the two (triton #9610, #10537). TMA writes through the async proxy.
TMA_FAMILIES = (9, 10)

# Architecture -> the largest K at which a 16-bit product with an epilogue takes the Triton GEMM: it
# saves one pass over (M, N), which weighs less as K grows. Others: the library. By the model of
# docs/compile.md the two are level at K = 2048 on sm_80. On sm_90 many tiles go to LONG_K: on an
# H100 50432 x 3072 x 768 with a residual takes 408 us for 438.
TRITON_MAX_K = {"sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_90": 2048}
LONG_K, MANY_TILES = 3072, 8  # 128 x 128, an SM


def gemm_key(M: int, N: int, K: int, dtype: torch.dtype) -> tuple[int, int, int, str]:
    """The key of a product in the tables."""
    return 1 << (M - 1).bit_length(), N, K, DTYPE_NAMES[dtype]


@launch_plan
def gemm_config(
    gpu: Gpu, table: ConfigTable[GemmConfig], M: int, N: int, K: int, dtype: torch.dtype
) -> GemmConfig:
    """What one of the tables chooses for (M, K) times (K, N)."""
    return table.choose(gpu, *gemm_key(M, N, K, dtype))


def triton_tile(gpu: Gpu, M: int, N: int, K: int, dtype: str) -> GemmConfig:
    """The tile of a product that takes the Triton GEMM."""
    by_tma = gpu.family in TMA_FAMILIES
    tile = TILE_FP32 if dtype == "fp32" else TILE
    tiles = -(-M // tile.block_m) * -(-N // tile.block_n)
    few = tiles < gpu.num_sms
    if dtype == "fp32":
        if few:
            return TMA_SMALL_FP32 if by_tma else SMALL_FP32
        return TMA_FP32 if by_tma else TILE_FP32
    if few:
        return TMA_SMALL if by_tma else SMALL
    if gpu.is_amd:
        return TILE_64K
    if 0 < N % 128 <= 64:  # a last column of 128 would be half empty
        return TMA_NARROW if by_tma else NARROW
    many = gpu.family == 9 and tiles >= MANY_TILES * gpu.num_sms
    if many and N % 256 == 0 and TRITON_MAX_K["sm_90"] < K <= LONG_K:
        return WIDE_TMA
    if gpu.arch == "sm_80":
        return FLAT  # by the model 5 % quicker
    return TMA_PAIR if by_tma else PERSISTENT


def _default(gpu: Gpu, M: int, N: int, K: int, dtype: str) -> GemmConfig:
    tile = triton_tile(gpu, M, N, K, dtype)
    if dtype == "fp32" or (TRITON_MAX_K.get(gpu.arch, 0) < K and tile != WIDE_TMA):
        return LIBRARY
    if K % TILE.block_k and gpu.family not in TMA_FAMILIES:
        return LIBRARY  # the masks of K spill in the persistent tiles
    return SPECIALIZED if N > K and _is_specialized(gpu, M, N, K, dtype) else tile


def _is_specialized(gpu: Gpu, M: int, N: int, K: int, dtype: str) -> bool:
    """Whether whole tiles of SPECIALIZED reach every SM. On an H100 that takes a fifth to a third
    off what widens (fc1, the hidden gradient), and nothing off proj and fc2."""
    tiles = -(-M // SPECIALIZED.block_m) * (N // SPECIALIZED.block_n)
    whole = N % SPECIALIZED.block_n == 0 and tiles >= gpu.num_sms
    return whole and _fits(gpu, SPECIALIZED, M, N, K, dtype)


def hidden_tile(gpu: Gpu, M: int, N: int, K: int, dtype: str) -> GemmConfig:
    """The same for `_mlp_bwd_hidden_kernel`, whose sums over rows spill in TMA_PAIR."""
    tile = triton_tile(gpu, M, N, K, dtype)
    return TMA_TILE if tile == TMA_PAIR else tile


def _hidden_default(gpu: Gpu, M: int, N: int, K: int, dtype: str) -> GemmConfig:
    if _default(gpu, M, N, K, dtype) == LIBRARY:
        return LIBRARY
    return SPECIALIZED if _is_specialized(gpu, M, N, K, dtype) else hidden_tile(gpu, M, N, K, dtype)


def _library(*_: Any) -> GemmConfig:
    return LIBRARY


def _fits(gpu: Gpu, config: GemmConfig, M: int, N: int, K: int, dtype: str) -> bool:
    itemsize = DTYPES[dtype].itemsize  # KeyError: a name that no key has
    warp_specialized = config.route == "gluon"
    if warp_specialized and (dtype == "fp32" or gpu.family != 9 or not has_gluon()):
        return False
    if config.route == "library" or gpu.arch == "cpu":
        return True
    if not warp_specialized and (dtype == "fp32") != (config.block_k == 32):
        return False
    if config.descriptors != (gpu.family in TMA_FAMILIES):
        return False
    if config == TILE_64K and not gpu.is_amd:
        return False
    return config.shared(itemsize) <= gpu.shared_limit


FWD_TABLE = ConfigTable("linear_fwd", (*SHARED_BY_BOTH, TMA_PAIR), _default, _fits)
HIDDEN_TABLE = ConfigTable("mlp_bwd_hidden", SHARED_BY_BOTH, _hidden_default, _fits)
# Of gate and value each. Not yet measured: by default the library multiplies, and a pass follows.
GATED_TABLE = ConfigTable("gated_mlp_hidden", (LIBRARY, TMA_STORES), _library, _fits)


@contextmanager
def forced_route(route: str) -> Iterator[None]:
    """Inside, every product with an epilogue takes this route, whatever is tuned."""
    tile, hidden = (triton_tile, hidden_tile) if route == "triton" else (_library, _library)
    gated = forced(GATED_TABLE.name, _library)  # which has no plain Triton
    with forced(FWD_TABLE.name, tile), forced(HIDDEN_TABLE.name, hidden), gated:
        yield
