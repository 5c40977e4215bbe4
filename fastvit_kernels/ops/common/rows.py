"""How kernels that normalise rows share the rows among programs: of LayerNorm and RMSNorm.

A program holds whole rows, BLOCK_C = C up to a power of two, in registers: BLOCK_ROWS of them at
once. In the backward, program p takes row blocks p, p + P, p + 2P, ... and keeps its own sums.
"""

from __future__ import annotations

from typing import NamedTuple

from ...runtime.backend import Gpu
from ...runtime.configs import ConfigTable
from ...runtime.triton import VERSION, tl, triton
from .samples import compact_rows

MAX_C = 65536  # one row is held in the registers of one program


class NormConfig(NamedTuple):
    """BLOCK_ROWS rows a program takes at once, and its warps."""

    block_rows: int
    num_warps: int


# Key: BLOCK_C. Forward: small rows share a program, so that every warp has full vector loads.
# Backward: four elements a thread, 48 to 72 registers, loads two steps ahead. Not yet measured.
FWD_ROWS = {64: (16, 4), 128: (8, 4), 256: (8, 4), 512: (4, 4), 1024: (4, 4), 2048: (1, 4)}
BWD_ROWS = {64: (8, 4), 128: (4, 4), 256: (2, 4), 512: (1, 4), 1024: (1, 8), 2048: (1, 16)}
LARGE_CONFIG = NormConfig(1, 16)  # BLOCK_C above 2048
CONFIGS = [NormConfig(rows, warps) for warps in (4, 8) for rows in (1, 2, 4, 8, 16)]
BWD_STAGES = 3
MAX_STAGED = 2048  # elements of a row block: two further ones of x, dy and dresidual take 48 KB


def _fits(gpu: Gpu, config: NormConfig, block_c: int) -> bool:
    """Whether a thread holds at most 64 elements of a row block, and at least one vector."""
    elements = config.block_rows * block_c // (32 * config.num_warps)
    return 4 <= elements <= 64 or (block_c > 2048 and config == LARGE_CONFIG)


def _default_bwd(gpu: Gpu, block_c: int) -> NormConfig:
    spills = gpu.family == 12 or (VERSION >= (3, 9) and gpu.family == 8)
    if spills and block_c == 1024:
        return NormConfig(2, 8)  # by one row 8 bytes where some samples are kept
    return NormConfig(*BWD_ROWS.get(block_c, LARGE_CONFIG))


def norm_tables(op: str) -> tuple[ConfigTable[NormConfig], ConfigTable[NormConfig]]:
    """The launch configs of an op's forward and backward."""
    return (
        ConfigTable(
            f"{op}_fwd",
            [*CONFIGS, NormConfig(1, 2), LARGE_CONFIG],
            lambda gpu, block_c: NormConfig(*FWD_ROWS.get(block_c, LARGE_CONFIG)),
            _fits,
        ),
        ConfigTable(f"{op}_bwd", [*CONFIGS, LARGE_CONFIG], _default_bwd, _fits),
    )


def block_width(C: int) -> int:
    """BLOCK_C of rows of C elements."""
    return max(64, triton.next_power_of_2(C))


def bwd_programs(
    gpu: Gpu, config: NormConfig, num_rows: int, hands_over: bool, has_row_scale: bool
) -> int:
    """As many as the SMs hold at once, by registers: none waits for another to end.

    Args:
        hands_over: the kernel writes or sums d besides, with a row scale or without.
    """
    warps_per_sm = 40 if config.block_rows == 1 and config.num_warps <= 8 else 32
    if hands_over:
        warps_per_sm = 28 if has_row_scale and config.block_rows > 1 else 32
    programs_per_sm = warps_per_sm // config.num_warps
    return min(triton.cdiv(num_rows, config.block_rows), programs_per_sm * gpu.num_sms)


def bwd_stages(config: NormConfig, block_c: int, some: bool) -> int:
    """Of the loads in the backward's loop: small row blocks come two steps ahead. Not where some
    samples are kept: addresses that are loaded themselves take 125 registers then, and spill."""
    staged = config.block_rows * block_c <= MAX_STAGED and not some
    return BWD_STAGES if staged else 1


@triton.jit
def load_rows(ptr, offs_row, stride_row, offs_c, mask):
    """(rows, BLOCK_C) in fp32; 0 outside the mask."""
    ptrs = ptr + offs_row[:, None] * stride_row + offs_c[None, :]
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rows_to_hand_over(
    d_ptr, dx, offs, mask, row_scale_ptr, offs_row, mask_row, C, kept, FORM: tl.constexpr
):
    """d = row_scale * dx in fp32, dx as it was rounded: what autograd carries (grad_handoff.py).

    Where SUBSET_D, row_scale keeps samples: d is 0 in others, and has no rows for them in memory.
    kept: rows of a sample, samples that are kept, what their d is multiplied by.
    """
    rows_per_sample, num_kept, keep_scale = kept
    d = dx.to(tl.float32)
    if FORM.HAS_ROW_SCALE:
        row_scale_ptrs = row_scale_ptr + offs_row // rows_per_sample
        d *= tl.load(row_scale_ptrs, mask=mask_row, other=0.0).to(tl.float32)[:, None]
    if FORM.SUBSET_D:
        rows_d, is_kept = compact_rows(row_scale_ptr, num_kept, offs_row, mask_row, rows_per_sample)
        offs += (rows_d - offs_row)[:, None] * C
        mask = mask & is_kept[:, None]
        d = tl.where(mask, d * keep_scale, 0.0)
    if FORM.WRITE_D:
        tl.store(d_ptr + offs, d.to(d_ptr.dtype.element_ty), mask=mask)
    return d
