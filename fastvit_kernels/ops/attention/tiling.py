"""How tokens and head dims are cut into tiles.

Tiles are not padded where it costs. Tokens that a program walks: full tiles without masks, then one
tail of 16, 32 or 64 (T = 197 is 3 x 64 + 5 -> 208); where a second copy of the code for the tail
takes too many registers (wide heads, fp32), all tiles are masked. Tokens that it owns: full tiles,
for a tile with less than 16 rows a warp is computed by several warps alike. Head dim: D is cut into
a power of two and a rest (D = 72 -> 64 + 16).
"""

from __future__ import annotations

from ...runtime.triton import triton

MIN_TILE = 16  # the smallest operand of tl.dot
MAX_ONE_PASS_T = 384
ROW_PAD = 4  # rows of lse and delta are padded to 16 bytes
PART = 128  # queries of a one-pass program whose scores are alive together


def split_head_dim(D: int) -> tuple[int, int]:
    """D as a power of two and a rest, 0 where padding to the next power of two costs no more."""
    padded = max(MIN_TILE, triton.next_power_of_2(D))
    half = padded // 2
    if half < MIN_TILE:
        return padded, 0
    rest = max(MIN_TILE, triton.next_power_of_2(D - half))
    return (half, rest) if half + rest < padded else (padded, 0)


def tail_tile(T: int, block: int, smallest: int) -> int:
    """Size of the tile for the T % block tokens that full tiles leave over; 0 for none."""
    left = T % block
    return min(block, max(smallest, triton.next_power_of_2(left))) if left else 0


def query_parts(T: int, close: bool = False) -> tuple[int, int, int] | None:
    """The parts in which a one-pass program holds T queries; None where it cannot.

    50 -> 64; 197 -> 128 and 128, or closely 128, 64 and 16; 257 -> 128, 128 and 16. Not all parts
    may have fewer than 64 rows, which would leave wgmma and cost more registers than they save.
    """
    if T <= PART:
        return max(64, triton.next_power_of_2(T)), 0, 0
    left = T - PART
    if left <= 64:
        return PART, 64, 0
    if close and left <= 96:
        return PART, 64, max(MIN_TILE, triton.next_power_of_2(left - 64))
    if left <= PART:
        return PART, PART, 0
    if T <= MAX_ONE_PASS_T:
        return PART, PART, max(MIN_TILE, triton.next_power_of_2(left - PART))
    return None
