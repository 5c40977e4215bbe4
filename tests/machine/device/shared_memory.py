"""ld.shared, st.shared, ldmatrix and stmatrix: a block's shared memory.

ldmatrix gives each thread of a warp the part of an 8 x 8 matrix of 16 bits that mma wants of it.
The threads 8i to 8i + 7 name the rows of matrix i, 16 bytes each; thread l gets the elements
2 (l % 4) and the next of row l // 4; with .trans those rows of column l // 4.
"""

from __future__ import annotations

import numpy as np

from .global_memory import FORMS, elements, joined_units, loader
from .program import Op
from .registry import Run, instruction
from .values import TYPES, U16, U32, Array


@instruction(*(f"ld.shared[::cta].{form}" for form in FORMS))
def load_shared(op: Op) -> Run:
    op.width = TYPES[op.type].itemsize * len(op.items(0))

    def fetch(group, *what):
        return group.shared.load(*what, op, group.warp_of_thread)

    return loader(op, op.address(1), fetch)


@instruction(*(f"st.shared[::cta].{form}" for form in FORMS))
def store_shared(op: Op) -> Run:
    address, value = op.address(0), joined_units(op, 1)
    width = op.width = TYPES[op.type].itemsize * len(op.items(1))

    def run(group):
        r = group.registers
        units = value(r)
        if units.dtype.itemsize > width:
            units = units.astype(f"u{width}")
        group.shared.store(address(r), units, group.active(op), op, group.warp_of_thread)

    return run


def _rows(op: Op, group, address: Array, count: int) -> tuple[Array, Array | None, Array]:
    """Addresses of rows, who of the lanes that name them run, and their warps."""
    mask = group.whole_warps(op)
    lanes = 8 * count  # of each warp the first alone name a row
    rows = group.by_warp(address)[..., :lanes].reshape(address.shape[0], -1)
    if mask is not None and mask.shape[1] > 1:
        mask = group.by_warp(mask)[..., :lanes].reshape(mask.shape[0], -1)
    return rows, mask, np.repeat(group.warps, lanes)


@instruction("ldmatrix.sync.aligned.m8n8.{x1,x2,x4}[.trans].shared.b16")
def load_matrices(op: Op) -> Run:
    slots, address, op.width = op.destinations(), op.address(1), 16
    transposed = op.has("trans")

    def run(group):
        rows, mask, warps = _rows(op, group, address(group.registers), len(slots))
        units = group.shared.load(rows, 16, mask, op, warps)
        if units.shape[1] == 1:  # no thread runs
            units = np.broadcast_to(units, rows.shape)
        matrices = elements(units, U16).reshape(len(units), len(group.warps), len(slots), 8, 8)
        if transposed:
            matrices = matrices.swapaxes(-1, -2)
        words = np.ascontiguousarray(matrices).view(U32)  # (.., count, 8, 4)
        blocks = words.shape[0]
        mask = group.active(op)
        for i, slot in enumerate(slots):
            group.write(slot, words[:, :, i].reshape(blocks, -1), mask)

    return run


@instruction("stmatrix.sync.aligned.m8n8.{x1,x2,x4}[.trans].shared.b16")
def store_matrices(op: Op) -> Run:
    """The reverse: of a warp's registers into shared memory."""
    address, op.width = op.address(0), 16
    reads = [op.reader(text, "b32") for text in op.items(1)]
    transposed = op.has("trans")

    def run(group):
        r = group.registers
        rows, mask, warps = _rows(op, group, address(r), len(reads))
        words = np.broadcast_arrays(*(group.by_warp(read(r)) for read in reads))
        matrices = np.ascontiguousarray(np.stack(words, 2)).view(U16)
        matrices = matrices.reshape(*words[0].shape[:2], len(reads), 8, 8)
        if transposed:
            matrices = matrices.swapaxes(-1, -2)
        units = np.ascontiguousarray(matrices).view("c16").reshape(matrices.shape[0], -1)
        group.shared.store(rows, units, mask, op, warps)

    return run
