"""Launch configs of patch_embed."""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.backend import Gpu
from ...runtime.configs import ConfigTable


# Tiles: M rows (tokens or patches), N of C, K pixels of a patch. The operand that is cast stands
# right in every product: on Hopper the left one would then reach the tensor cores from registers,
# where pipelining it is a race (triton #9433), the right one always from shared memory.
class PatchConfig(NamedTuple):
    """Largest tile, warps and pipeline stages; small problems shrink the tile."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Of the launch."""
        return dict(num_warps=self.num_warps, num_stages=self.num_stages)


def _table(name: str, half: list[PatchConfig], fp32: list[PatchConfig]) -> ConfigTable[PatchConfig]:
    """Key: the compute dtype. The default: the first config."""
    by_dtype = {"fp16": half, "bf16": half, "fp32": fp32}
    return ConfigTable(
        name,
        [*half, *fp32],
        lambda gpu, dtype: by_dtype[dtype][0],
        lambda gpu, config, dtype: config in by_dtype[dtype],
    )


# 128 rows by 8 warps: with 64 rows all of them cast the same pixels. 256 columns read each pixel
# half as often: a sixth less time for ViT-B on sm_90 by the model of docs/compile.md, not measured.
FWD = [
    PatchConfig(128, 128, 64, 8, 3),
    PatchConfig(64, 128, 64, 8, 3),
    PatchConfig(64, 128, 64, 4, 3),
]
FWD_WIDE = PatchConfig(128, 256, 32, 8, 3)
FWD_FP32 = PatchConfig(64, 64, 32, 4, 3)


def _fwd_fits(gpu: Gpu, config: PatchConfig, M: int, N: int, K: int, dtype: str) -> bool:
    has_room = config != FWD_WIDE or gpu.shared_limit > 3 * STAGE_BYTES + 4096
    return has_room and (config == FWD_FP32) == (dtype == "fp32")


def _default_fwd(gpu: Gpu, M: int, N: int, K: int, dtype: str) -> PatchConfig:
    if dtype == "fp32":
        return FWD_FP32
    tiles = -(-M // 128) * (N // 256)
    wide = N % 256 == 0 and tiles >= gpu.num_sms and _fwd_fits(gpu, FWD_WIDE, M, N, K, dtype)
    return FWD_WIDE if wide else FWD[0]


STAGE_BYTES = 32 * 1024  # three stages fit in the 99 KB of shared memory of sm_86, 89, 120
FWD_TABLE = ConfigTable("patch_embed_fwd", [*FWD, FWD_WIDE, FWD_FP32], _default_fwd, _fwd_fits)
BWD_WEIGHT_TABLE = _table(
    "patch_embed_bwd_weight",
    [PatchConfig(64, 128, 128, 8, 3), PatchConfig(64, 64, 128, 4, 3)],
    [PatchConfig(32, 64, 64, 4, 3)],
)
BWD_IMAGES_TABLE = _table(
    "patch_embed_bwd_images",
    [PatchConfig(128, 64, 128, 8, 3), PatchConfig(64, 64, 128, 4, 3)],
    [PatchConfig(64, 32, 64, 4, 3)],
)
BWD_WEIGHT_PROGRAMS_PER_SM = 2
MIN_ROWS_PER_SPLIT = 512
ADDED_TILE = dict(BLOCK_C=512, num_warps=4)
# Of the gradient of positions under a list of kept patches. Not yet measured.
SLOTS_TILE = dict(BLOCK_P=64, BLOCK_J=64, num_warps=4)
KEPT_TILE = dict(BLOCK_B=32, BLOCK_C=128, num_warps=4)
