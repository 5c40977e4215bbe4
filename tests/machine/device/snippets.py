"""Runs a few lines of PTX, for tests: registers in, registers out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from . import driver  # noqa: F401  registers the instructions
from .execution import Chunk, Launch, argument
from .memory import GlobalMemory
from .program import Program
from .values import Array

_KINDS = {"%p": "pred", "%rs": "b16", "%r": "b32", "%rd": "b64"}


def text_of(body: str, threads: int = 32, parameters: Sequence[str] = ()) -> str:
    """A kernel with these lines; registers are declared by their names."""
    names = sorted(set(re.findall(r"%(?:rs|rd|r|p)\d+", body)))
    declared = "\n".join(f".reg .{_KINDS[name.rstrip('0123456789')]} {name};" for name in names)
    given = ",\n".join(f".param .{type} snippet_param_{i}" for i, type in enumerate(parameters))
    return (
        ".extern .shared .align 16 .b8 global_smem[];\n"
        f".visible .entry snippet(\n{given}\n)\n.reqntid {threads}\n"
        f"{{\n{declared}\n{body}\nret;\n}}\n"
    )


def run(
    body: str,
    registers: Mapping[str, Any] | None = None,  # their first bits: one number, or by thread
    *,
    threads: int = 32,
    blocks: int = 1,
    shared: int = 0,  # bytes
    tensors: Sequence[Tensor] = (),  # the memory that may be touched
    arguments: Sequence[tuple[str, Any]] = (),  # types and values of `snippet_param_0` and so on
    order: int = 0,
    begins: Array | None = None,  # the bytes of shared memory at first
) -> dict[str, Any]:
    """Run these lines by all threads of some blocks.

    Returns: the registers of the first group at the end, by name, shape (blocks, threads); and
        "shared", the bytes of shared memory, (blocks, bytes).
    """
    program = Program(text_of(body, threads, [type for type, _ in arguments]))
    values = [argument(type, value) for type, value in arguments]
    memory = GlobalMemory(tensors)
    launch = Launch(program, (blocks, 1, 1), values, memory, shared, order)
    chunk = Chunk(launch, np.arange(blocks, dtype=np.uint32))
    group = chunk.groups[0]
    for name, value in (registers or {}).items():
        kind = program.kinds[program.slots[name]]
        array = np.asarray(value)
        if array.dtype != kind:
            array = array.view(kind) if array.dtype.kind == "f" else array.astype(kind)
        group.registers[program.slots[name]] = array.reshape(1, -1)
    if begins is not None:
        chunk.shared.units[1][:, : len(begins)] = begins
    with np.errstate(all="ignore"):
        chunk.run()
    found = {name: group.full(group.registers[slot]) for name, slot in program.slots.items()}
    return {**found, "shared": chunk.shared.units[1][:, :shared]}
