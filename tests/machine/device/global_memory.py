"""ld and st: parameters and global memory.

PTX ISA, "Data Movement: ld, st". Every address must be in a tensor of the launch and a multiple of
the width, all elements of a vector together; threads under a false predicate touch nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .faults import OutOfBounds
from .program import Op, Read
from .registry import Run, instruction
from .values import TYPES, Array

SCALARS = "{b8,u8,s8,b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}"
FORMS = (SCALARS, "{v2,v4}.{b8,b16,b32,u32,s32,f32}", "v2.{b64,u64,f64}")


@instruction(f"ld.param.{SCALARS}")
def load_parameter(op: Op) -> Run:
    """Of a parameter, or where a register says. Narrower than its register it is extended, by its
    sign for s types."""
    slot, dtype, place = op.destination(), TYPES[op.type], op.address(1)
    dtype = np.dtype(np.uint32) if op.type == "f32" else dtype
    kind = op.program.kinds[slot]

    def run(group):
        bytes, at, mask = group.chunk.launch.parameters, place(group.registers), group.active(op)
        wrong = (at % dtype.itemsize != 0) | (at + dtype.itemsize > len(bytes))
        if (wrong if mask is None else wrong & mask).any():
            raise OutOfBounds(f"bytes {at.min()} to {at.max()} of {len(bytes)} of parameters", op)
        value = bytes.take(at[..., None] + np.arange(dtype.itemsize), mode="clip").view(dtype)
        group.write(slot, extended(value[..., 0], kind), mask)

    return run


@instruction("cvta.param.u64")
def address_of_parameter(op: Op) -> Run:
    """Its generic address: what TMA takes of a tensor map that is passed by value."""
    slot, place = op.destination(), op.read(1)

    def run(group):
        address = place(group.registers) + np.uint64(group.chunk.launch.parameters.ctypes.data)
        group.write(slot, address, group.active(op))

    return run


def elements(units: Array, dtype: np.dtype) -> Array:
    """Units of a vector access as their elements: (..., count)."""
    units = np.ascontiguousarray(units)
    return units[..., None].view(dtype)


def extended(value: Array, kind: np.dtype) -> Array:
    """A loaded number as its register holds it."""
    if value.dtype.itemsize == kind.itemsize:
        return value.view(kind)
    return value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{kind.itemsize}").view(kind)


@instruction(*(f"ld.global.{form}" for form in FORMS))
def load(op: Op) -> Run:
    return loader(op, op.address(1, "b64"), lambda group, *what: group.memory.load(*what, op))


def loader(op: Op, address: Read, fetch: Callable[..., Array | None]) -> Run:
    """Writes units that `fetch(group, addresses, width, mask)` gives to the registers."""
    dtype, slots = TYPES[op.type], op.destinations()
    width, kinds = dtype.itemsize * len(slots), [op.program.kinds[slot] for slot in slots]

    def run(group):
        mask = group.active(op)
        units = fetch(group, address(group.registers), width, mask)
        if units is None:
            return
        parts = elements(units, dtype)
        for i, (slot, kind) in enumerate(zip(slots, kinds, strict=True)):
            group.write(slot, extended(parts[..., i], kind), mask)

    return run


def joined_units(op: Op, place: int):
    """Reads an operand, a register or several in braces, as one unit for each thread."""
    dtype = TYPES[op.type]
    bits = np.dtype(f"u{dtype.itemsize}")
    reads = [op.reader(text, f"b{8 * dtype.itemsize}") for text in op.items(place)]
    if len(reads) == 1:
        return reads[0]
    unit = {2: "u2", 4: "u4", 8: "u8", 16: "c16"}[bits.itemsize * len(reads)]

    def read(r):
        parts = np.broadcast_arrays(*(one(r) for one in reads))
        return np.stack(parts, -1).view(unit)[..., 0]

    return read


@instruction(*(f"st.global.{form}" for form in FORMS))
def store(op: Op) -> Run:
    address, value = op.address(0, "b64"), joined_units(op, 1)

    def run(group):
        r, mask = group.registers, group.active(op)
        addresses, values = np.broadcast_arrays(address(r), value(r))
        group.memory.store(addresses, values, mask, op)

    return run
