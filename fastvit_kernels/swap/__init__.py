"""swap_in: fused forwards for the models of other libraries."""

from .apply import swap_in, swap_out
from .report import Left, Swapped, SwapReport

__all__ = ["Left", "SwapReport", "Swapped", "swap_in", "swap_out"]
