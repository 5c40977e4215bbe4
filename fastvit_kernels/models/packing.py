"""Images of several sizes as one sequence of tokens, (total, C): nothing is padded.

The sizes stand one after the other, (B, T) each, in the order of their batches. All that follows
from them is arithmetic on the device: the host reads nothing and copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, starmap
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention.configs import MAX_D
from ..ops.common.samples import keep_samples, num_kept

Size = tuple[int, int]  # (B, T): images, and the tokens of each


def packable(D: int, dropout_p: float) -> bool:
    """Whether the packed ops take heads of D."""
    return D % 8 == 0 and D <= MAX_D and dropout_p < 1


class Crops:
    """Where the sequences of these sizes lie in (total, C).

    Args:
        given: for each size, what its blocks get besides their input.
        of: the packing whose images these are, and its tokens that are theirs (total,).
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        device: torch.device,
        given: Sequence[Any] = (),
        of: tuple[Crops, Tensor] | None = None,
    ):
        self.sizes, self.device, self.given, self.of = tuple(sizes), device, tuple(given), of
        self.longest = max(T for _, T in self.sizes)
        self.ends = [0, *accumulate(B * T for B, T in self.sizes)]
        self.tables: dict[Any, tuple[Tensor, Tensor]] = {}

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
        """(total,) of what `draw` gives the images of each size, (B,), for rows like those of x; or
        None, where it gives none."""
        drawn = [draw(x[:B]) for B, _ in self.sizes]
        rows = [each for each in drawn if each is not None]
        return torch.cat(rows)[self.image] if rows else None

    def drawn(self, rate: float, like: Tensor) -> tuple[Tensor, Tensor, Crops]:
        """The tokens of the images that a branch keeps, drawn for each size as `keep_samples`
        draws; B / S, the factor of each in the dtype of `like`; and where they lie now."""
        index, factors, sizes = [], [], []
        for (B, T), start in zip(self.sizes, self.ends, strict=False):
            kept = num_kept(B, rate)
            images = keep_samples(B, rate, self.device)[:kept]
            tokens = torch.arange(start, start + T, device=self.device)
            index.append((images.unsqueeze(1) * T + tokens).flatten())
            factors.append(like.new_full((kept * T,), B / kept))
            sizes.append((kept, T))
        kept_tokens = torch.cat(index)
        some = Crops(sizes, self.device, self.given, (self, kept_tokens))
        return kept_tokens, torch.cat(factors), some

    @property
    def whole(self) -> Crops:
        return self if self.of is None else self.of[0]

    def rows(
        self, key: Any, tables: Callable[[int, Size], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """cos and sin with a row for each token, (total, R) or (1, H or 1, total, R), made once for
        a key.

        Args:
            tables: gives those of a size by its place, (T', R), (B or 1, T', R) or (B or 1, H or 1,
                T', R). The tokens before the T' do not turn.
        """
        if key not in self.tables:
            if self.of is not None:
                whole, tokens = self.of
                cos, sin = (t.index_select(-2, tokens) for t in whole.rows(key, tables))
            else:
                coses, sines = zip(*starmap(tables, enumerate(self.sizes)), strict=True)
                cos, sin = self._rows(coses, still=1.0), self._rows(sines, still=0.0)
            self.tables[key] = cos, sin
        return self.tables[key]

    def _rows(self, tables: Sequence[Tensor], still: float) -> Tensor:
        every = []
        for table, (B, T) in zip(tables, self.sizes, strict=True):
            table = F.pad(table, (0, 0, T - table.shape[-2], 0), value=still)
            table = table if table.ndim > 2 else table.unsqueeze(0)
            every.append(table.expand(B, *table.shape[1:]).movedim(0, -3).flatten(-3, -2))
        rows = torch.cat(every, dim=-2)
        return rows if rows.ndim == 2 else rows.unsqueeze(0)
