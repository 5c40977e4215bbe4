"""Which accesses to shared memory nothing orders.

Each warp counts its epochs; a barrier ends one. `clock[w, v]` is the latest epoch of warp v of
which warp w knows: it learns at barriers. An access to bytes that another warp wrote in an epoch
that this one does not know is a race; so is a write to bytes that another warp read in one. Warps
that only read never race, nor do lanes of one warp, which shuffles and ldmatrix order.

What runs on its own next to the warps (wgmma, TMA: proxies.py) has columns of its own in `clock`.

Bytes are watched in cells of the narrowest access of the program, in the first and the last block
of a chunk: all its blocks run the same instructions.
"""

from __future__ import annotations

import numpy as np

from .faults import Race
from .values import Array


class Races:
    """Of a chunk's blocks with `size` bytes each; `grain` has the narrowest access."""

    def __init__(self, blocks: int, size: int, warps: int, grain: int):
        self.rows = np.array(sorted({0, blocks - 1}))  # the blocks that are watched
        self.grain = grain
        rows, cells = len(self.rows), size // grain
        self.warps = warps
        self.clock = np.zeros((rows, warps, 2 * warps + 2), np.int32)  # columns: proxies.py
        self.clock[..., -1] = np.iinfo(np.int32).max
        self.clock[:, range(warps), range(warps)] = 1
        self.writer = np.zeros((rows, cells), np.int16)
        self.written = np.zeros((rows, cells), np.int32)  # epoch; 0: never
        self.line = np.zeros((rows, cells), np.int32)  # of the instruction that wrote
        self.read = np.zeros((rows, cells, warps), np.int32)  # epoch, by warp
        self.read_line = np.zeros((rows, cells), np.int32)
        self.busy = np.zeros((rows, cells), np.int16)  # reads in flight, of wgmma and TMA
        self.flying = np.zeros((rows, cells), bool)  # bytes that TMA has yet to write
        self._row = np.arange(rows)[:, None]

    def _cells(self, offset: Array, width: int, mask: Array | None, warp: Array):
        """Rows, cells and warps of an access, one entry for each cell that it touches."""
        rows = self.rows if offset.shape[0] > 1 else np.zeros(len(self.rows), int)
        offset = np.broadcast_to(offset[rows], (len(self.rows), len(warp)))
        cell, row = offset // self.grain, np.broadcast_to(self._row, offset.shape)
        warp = np.broadcast_to(warp, offset.shape)
        if mask is not None:
            rows = self.rows if mask.shape[0] > 1 else np.zeros(len(self.rows), int)
            active = np.broadcast_to(mask[rows], offset.shape)
            cell, row, warp = cell[active], row[active], warp[active]
        if width > self.grain:
            more = np.arange(width // self.grain)
            cell, row, warp = (cell[..., None] + more, row[..., None], warp[..., None])
        return row, cell, warp

    def loaded(self, offset: Array, width: int, mask: Array | None, warp: Array, op) -> None:
        row, cell, warp = self._cells(offset, width, mask, warp)
        self._behind_writes("reads", row, cell, warp, op)
        self.read[row, cell, warp] = self.clock[row, warp, warp]
        self.read_line[row, cell] = op.line

    def stored(self, offset: Array, width: int, mask: Array | None, warp: Array, op) -> None:
        row, cell, warp = self._cells(offset, width, mask, warp)
        self._behind_writes("writes", row, cell, warp, op)
        self._look_at("writes", self.busy[row, cell] > 0, row, cell, warp, op)
        late = self.read[row, cell] > self.clock[row, warp][..., : self.warps]
        if late.any():
            reader = late.argmax(-1)
            late = late.any(-1)
            self._report("writes", "read", late, cell, self.read_line[row, cell], warp, reader, op)
        self.writer[row, cell], self.line[row, cell] = warp, op.line
        self.written[row, cell] = self.clock[row, warp, warp]

    def _behind_writes(self, does: str, row, cell, warp, op) -> None:
        """Each byte's last write is ordered before this, and no copy is on its way there."""
        writer, written = self.writer[row, cell], self.written[row, cell]
        late = written > self.clock[row, warp, writer]
        if late.any():
            self._report(does, "wrote", late, cell, self.line[row, cell], warp, writer, op)
        self._look_at(does, self.flying[row, cell], row, cell, warp, op)

    def _look_at(self, does: str, in_flight: Array, row, cell, warp, op) -> None:
        """What no warp may touch before its wait."""
        if in_flight.any():
            row, cell, warp = np.broadcast_arrays(row, cell, warp)
            row, cell, warp = row[in_flight][0], cell[in_flight][0], warp[in_flight][0]
            line = self.line[row, cell] if self.flying[row, cell] else self.read_line[row, cell]
            raise Race(
                f"warp {warp} {does} byte {cell * self.grain} of shared memory while wgmma or TMA "
                f"of PTX line {line} is in flight",
                op,
            )

    def _report(self, does, did, late, cell, line, warp, other, op) -> None:
        cell, line, warp, other = np.broadcast_arrays(cell, line, warp, other)
        raise Race(
            f"warp {warp[late][0]} {does} byte {cell[late][0] * self.grain} of shared memory, "
            f"which warp {other[late][0]} {did} at PTX line {line[late][0]}; no barrier between",
            op,
        )

    def meet(self, warps: Array, blocks: Array) -> None:
        """A barrier of these warps in these blocks (of the chunk, booleans)."""
        for i in np.flatnonzero(blocks[self.rows]):
            clock = self.clock[i]
            clock[warps] = clock[warps].max(0)
            clock[warps, warps] += 1
