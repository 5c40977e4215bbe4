"""ld.shared, st.shared, ldmatrix and stmatrix: a block's shared memory.

ldmatrix gives each thread of a warp the part of an 8 x 8 matrix of 16 bits that mma wants of it.
The threads 8i to 8i + 7 name the rows of matrix i, 16 bytes each; thread l gets the elements
2 (l % 4) and the next of row l // 4; with .trans those rows of column l // 4.
"""

from __future__ import annotations

import numpy as np

from .global_memory import elements, extended, joined_units
from .program import Op
from .registry import Run, instruction
from .values import TYPES, U16, U32, Array

_SCALARS = "{b8,u8,s8,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}"
_VECTORS = ("v2.{b8,b16,b32,u32,s32,f32,b64,u64,f64}", "v4.{b8,b16,b32,u32,s32,f32}")


@instruction(f"ld.shared[::cta].{_SCALARS}", *(f"ld.shared[::cta].{x}" for x in _VECTORS))
def load_shared(op: Op) -> Run:
    dtype, slots, address = TYPES[op.type], op.destinations(), op.address(1)
    width, kinds = dtype.itemsize * len(slots), [op.program.kinds[slot] for slot in slots]
    op.width = width

    def run(group):
        mask = group.active(op)
        units = group.shared.load(address(group.registers), width, mask, op, group.warp_of_thread)
        parts = elements(units, dtype)
        for i, (slot, kind) in enumerate(zip(slots, kinds, strict=True)):
            group.write(slot, extended(parts[..., i], kind), mask)

    return run


@instruction(f"st.shared[::cta].{_SCALARS}", *(f"st.shared[::cta].{x}" for x in _VECTORS))
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


def _rows(op: Op, group, address: Array, count: int) -> Array:
    """(blocks or 1, warps, count, 8 rows, 8 elements) of 16 bits."""
    mask = group.whole_warps(op)
    lanes = 8 * count
    # Only the first 8 `count` lanes of each warp name a row.
    rows = group.by_warp(address)[..., :lanes].reshape(address.shape[0], -1)
    if mask is not None and mask.shape[1] > 1:
        mask = group.by_warp(mask)[..., :lanes].reshape(mask.shape[0], -1)
    warps = np.repeat(group.warps, lanes)
    units = group.shared.load(rows, 16, mask, op, warps)
    if units.shape[1] == 1:  # no thread runs
        units = np.broadcast_to(units, rows.shape)
    return elements(units, U16).reshape(units.shape[0], len(group.warps), count, 8, 8)


@instruction("ldmatrix.sync.aligned.m8n8.{x1,x2,x4}[.trans].shared.b16")
def load_matrices(op: Op) -> Run:
    slots, address, op.width = op.destinations(), op.address(1), 16
    transposed = op.has("trans")

    def run(group):
        matrices = _rows(op, group, address(group.registers), len(slots))
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
