"""stmatrix: the reverse of ldmatrix, matrices of a warp's registers into shared memory."""

from __future__ import annotations

import numpy as np

from .program import Op
from .registry import Run, instruction
from .values import U16


@instruction("stmatrix.sync.aligned.m8n8.{x1,x2,x4}[.trans].shared.b16")
def store_matrices(op: Op) -> Run:
    """The threads 8i to 8i + 7 name the rows of matrix i; thread l has row l // 4, elements
    2 (l % 4) and the next; with .trans those rows of column l // 4."""
    address, op.width = op.address(0), 16
    reads = [op.reader(text, "b32") for text in op.items(1)]
    lanes, transposed = 8 * len(reads), op.has("trans")

    def run(group):
        r, mask = group.registers, group.whole_warps(op)
        rows = group.by_warp(address(r))[..., :lanes].reshape(address(r).shape[0], -1)
        if mask is not None and mask.shape[1] > 1:
            mask = group.by_warp(mask)[..., :lanes].reshape(mask.shape[0], -1)
        words = np.broadcast_arrays(*(group.by_warp(read(r)) for read in reads))
        matrices = np.ascontiguousarray(np.stack(words, 2)).view(U16)
        matrices = matrices.reshape(*words[0].shape[:2], len(reads), 8, 8)
        if transposed:
            matrices = matrices.swapaxes(-1, -2)
        units = np.ascontiguousarray(matrices).view("c16").reshape(matrices.shape[0], -1)
        group.shared.store(rows, units, mask, op, np.repeat(group.warps, lanes))

    return run
