"""Two runs side by side: the ratio of every row that both have, regressions first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.rows import OK, Row

THRESHOLD = 0.05


@dataclass(frozen=True)
class Ratio:
    """B's time over A's: above 1 is slower. low and high come from p20 and p80 of both."""

    a: Row
    b: Row
    ratio: float
    low: float
    high: float

    def is_regression(self, threshold: float) -> bool:
        """Slower by more than the threshold, and not within the spread of the two."""
        return self.ratio > 1 + threshold and self.low > 1


def ratios(a: Sequence[Row], b: Sequence[Row]) -> list[Ratio]:
    """Of the rows measured in both, the slowest first."""
    former = {r.key: r for r in a if r.status == OK and r.ms}
    found = []
    for row in b:
        old = former.get(row.key)
        if old is None or row.status != OK or not row.ms or not old.ms:
            continue
        found.append(
            Ratio(
                old, row, row.ms / old.ms,
                (row.ms_p20 or row.ms) / (old.ms_p80 or old.ms),
                (row.ms_p80 or row.ms) / (old.ms_p20 or old.ms),
            )
        )  # fmt: skip
    return sorted(found, key=lambda r: -r.ratio)


def newly_failed(a: Sequence[Row], b: Sequence[Row]) -> list[Row]:
    """Rows of b that are not ok and were in a."""
    good = {r.key for r in a if r.status == OK}
    return [r for r in b if r.status != OK and r.key in good]


def table(found: Sequence[Ratio], threshold: float) -> list[tuple[str, ...]]:
    """Cells of each line: what, A's ms, B's ms, ratio, its spread, verdict."""
    return [
        (
            " ".join(r.b.key), f"{r.a.ms:.4g}", f"{r.b.ms:.4g}", f"{r.ratio:.3f}",
            f"{r.low:.3f} to {r.high:.3f}",
            "slower" if r.is_regression(threshold) else "",
        )
        for r in found
    ]  # fmt: skip
