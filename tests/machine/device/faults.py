"""What the machine finds wrong: each names the instruction by its line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .program import Op


class MachineError(RuntimeError):
    """A program that the machine cannot run: an unknown instruction, or a limit of its own."""

    def __init__(self, what: str, op: Op | None = None):
        super().__init__(f"{op.where}: {what}" if op is not None else what)


class Fault(MachineError):
    """What the program does wrong."""


class OutOfBounds(Fault):
    """An access outside every tensor of the launch, or of the block's shared memory."""


class Misaligned(Fault):
    """An address that is no multiple of the access's width."""


class Race(Fault):
    """Two warps at the same bytes of shared memory, one writes, nothing orders them."""


class Unfenced(Fault):
    """wgmma or TMA at bytes that ordinary instructions wrote, no fence.proxy.async between."""


class InFlight(Fault):
    """Registers or bytes that wgmma or TMA still work on, touched before the wait."""


class Diverged(Fault):
    """An instruction that all threads must run together, where some have left."""


class Deadlock(Fault):
    """Every group of warps waits."""
