"""Images of several sizes as one sequence of tokens, (total, C): nothing is padded.

The sizes stand one after the other, (B, T) each, in the order of their batches. All that follows
from them is arithmetic on the device: the host reads nothing and copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.common.samples import keep_samples, num_kept

Size = tuple[int, int]  # (B, T): images, and the tokens of each


class Crops:
    """Where the sequences of these sizes lie in (total, C)."""

    def __init__(self, sizes: Sequence[Size], device: torch.device | str):
        self.sizes, self.device = tuple(sizes), device
        self.longest = max(T for _, T in self.sizes)
        self.ends = [0, *accumulate(B * T for B, T in self.sizes)]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """(sum of B + 1,) int32"""
        starts = [
            torch.arange(start, end, T, dtype=torch.int32, device=self.device)
            for (start, end), (_, T) in zip(pairwise(self.ends), self.sizes, strict=True)
        ]
        return F.pad(torch.cat(starts), (0, 1), value=self.ends[-1])

    @cached_property
    def image(self) -> Tensor:
        """(total,) int64: to which image of the sum of B each token belongs."""
        tokens = torch.arange(self.ends[-1], dtype=torch.int32, device=self.device)
        return torch.bucketize(tokens, self.cu_seqlens[1:], right=True)

    @staticmethod
    def join(images: Sequence[Tensor]) -> Tensor:
        """(B, T, C) of each size -> (total, C)"""
        return torch.cat([x.flatten(0, 1) for x in images])

    def split(self, x: Tensor) -> list[Tensor]:
        """(total, ...) -> views (B, T, ...)"""
        parts = x.split([B * T for B, T in self.sizes])
        return [part.unflatten(0, size) for part, size in zip(parts, self.sizes, strict=True)]

    def factors(self, draw: Callable[[Tensor], Tensor | None], x: Tensor) -> Tensor | None:
        """What `draw` gives the images of each size, (B,), as a factor a token, (total,); or None,
        where it gives none. x says dtype and device."""
        drawn = [draw(x[:B]) for B, _ in self.sizes]
        rows = [each for each in drawn if each is not None]
        return torch.cat(rows)[self.image] if rows else None

    def drawn(self, rate: float, like: Tensor) -> tuple[Tensor, Tensor, Crops]:
        """The tokens of the images that a branch keeps, drawn for each size as `keep_samples`
        draws; B / S, the factor of each in the dtype of `like`; and where they lie now."""
        index, factors = [torch.arange(0, device=self.device)], [like.new_empty(0)]
        sizes = []
        for (B, T), start in zip(self.sizes, self.ends, strict=False):
            if B == 0:
                sizes.append((0, T))
                continue
            kept = num_kept(B, rate)
            images = keep_samples(B, rate, self.device)[:kept]
            tokens = torch.arange(start, start + T, device=self.device)
            index.append((images.unsqueeze(1) * T + tokens).flatten())
            factors.append(like.new_full((kept * T,), B / kept))
            sizes.append((kept, T))
        return torch.cat(index), torch.cat(factors), Crops(sizes, self.device)
