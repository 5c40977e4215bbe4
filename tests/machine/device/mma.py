"""mma.sync: a warp's product of two small matrices, D = A B + C.

Which thread holds what (PTX ISA, "Matrix fragments"), with g = lane // 4 and t = lane % 4, for
16-bit numbers (m16n8k16):

    A  register 2j + h   row g + 8h,         columns 2t + 8j and the next one
    B  register j        rows 2t + 8j and the next one,  column g
    C  register 2h + i   row g + 8h,         column 2t + i

tf32 (m16n8k8) has one number in a register: column t + 4j of A, row t + 4j of B.
Products are exact in f32; the hardware does not say in which order it sums them, nor does PTX.
"""

from __future__ import annotations

import numpy as np

from .program import Op
from .registry import Run, instruction
from .values import F16, F32, U16, U32, Array, bf16_to_f32


def unpacked(registers: Array, type: str) -> Array:
    """Registers of b32 as their numbers in f32, in a last axis of 2 or 1."""
    if type == "tf32":
        # The 13 lowest bits are not looked at.
        return (registers & np.uint32(0xFFFFE000)).view(F32)[..., None]
    pairs = np.ascontiguousarray(registers)[..., None].view(U16)
    return bf16_to_f32(pairs) if type == "bf16" else pairs.view(F16).astype(F32)


def _stack(group, r, reads) -> Array:
    """(blocks or 1, warps, registers, 8, 4)."""
    parts = np.broadcast_arrays(*(group.by_warp(read(r)) for read in reads))
    return np.stack(parts, 2).reshape(*parts[0].shape[:2], len(parts), 8, 4)


@instruction(
    "mma.sync.aligned.m16n8k16.row.col.f32.{f16.f16,bf16.bf16}.f32",
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32",
)
def multiply_matrices(op: Op) -> Run:
    d, type = op.destinations(), op.parts[7]
    a, b = ([op.reader(text, "b32") for text in op.items(place)] for place in (1, 2))
    c = [op.reader(text, "f32") for text in op.items(3)]

    def run(group):
        r, mask = group.registers, group.whole_warps(op)
        left = unpacked(_stack(group, r, a), type)  # (.., 2j + h, g, t, i)
        right = unpacked(_stack(group, r, b), type)  # (.., j, g, t, i)
        blocks, warps, width = left.shape[0], left.shape[1], left.shape[-1]
        left = left.reshape(blocks, warps, len(b), 2, 8, 4 * width)
        left = left.transpose(0, 1, 3, 4, 2, 5).reshape(blocks, warps, 16, -1)  # row (h, g)
        right = right.reshape(right.shape[0], warps, len(b), 8, 4 * width)
        right = right.transpose(0, 1, 2, 4, 3).reshape(right.shape[0], warps, -1, 8)  # column g
        product = (left @ right).reshape(-1, warps, 2, 8, 4, 2)  # h, g, t, i
        for i, (slot, read) in enumerate(zip(d, c, strict=True)):
            part = product[:, :, i // 2, :, :, i % 2].reshape(product.shape[0], -1)
            total = part + read(r)
            group.write(slot, np.ascontiguousarray(total).view(U32), mask)

    return run
