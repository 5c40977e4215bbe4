"""swap_in: fused forwards for the models of other libraries."""

from .apply import Left, Swapped, SwapReport, swap_in, swap_out

__all__ = ["Left", "SwapReport", "Swapped", "swap_in", "swap_out"]
