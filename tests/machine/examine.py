"""What the code of a launch says: its modelled time, its hot loop, its faults."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from . import sass
from .faults import faults, unfenced_copies
from .launches import Launch
from .loop_model import (
    ROOFS,
    Modelled,
    Region,
    bound,
    hot_loop,
    launch_time,
    regions,
    unit_cycles,
    work,
)
from .machine_code import Code
from .resources import Kernel
from .useful import longest_walk, useful_products


class Timed(NamedTuple):
    """A launch and what the model says of it."""

    launch: Launch
    modelled: Modelled
    useful: float | None  # useful multiply-adds over those done


@functools.cache
def _regions(code: Code) -> list[Region]:
    return regions(code.instructions, code.blocks)


@functools.lru_cache(maxsize=4096)
def _modelled(
    kernel: Kernel, code: Code, grid: tuple[int, ...], integers: Any, moved: int, trips: int | None
) -> Modelled:
    roof = ROOFS[kernel.arch]
    resident = (kernel.warps_per_sm or 0) // code.num_warps
    done = work(_regions(code), code.blocks, integers, grid, roof, code.num_stages, resident, trips)
    return launch_time(
        done,
        roof,
        programs=math.prod(grid),
        num_warps=code.num_warps,
        resident=resident,
        tensor_bytes=moved,
    )


def timed(launch: Launch) -> Timed:
    """The modelled time of a launch on a GPU that ROOFS lists."""
    kernel, code = launch.kernel, launch.code
    assert code is not None
    trips = longest_walk(kernel.kernel, launch.arguments)
    modelled = _modelled(kernel, code, launch.grid, launch.integers, launch.tensor_bytes, trips)
    useful = useful_products(kernel.kernel, launch.arguments)
    done = modelled.multiply_adds
    return Timed(launch, modelled, useful / done if useful and done else None)


@dataclass(frozen=True)
class Examined(Kernel):
    """A kernel with what its code says: a fault is one, the rest is a model of one launch."""

    hot_loop: str = ""  # the unit that bounds it, and its cycles for one warp's iteration
    products: str = ""  # waits and HGMMA of the hot loop, "2/8"
    useful: float | None = None  # multiply-adds that the shape asks for over those done
    faults: tuple[str, ...] = ()  # faults.py
    digest: str = ""


def examine(launch: Launch) -> Examined:
    """The launch's kernel with what its code says: a missing fence alone where ROOFS has no such
    GPU."""
    kernel, code, roof = launch.kernel, launch.code, ROOFS.get(launch.kernel.arch)
    if code is None or roof is None:
        found = () if code is None else tuple(unfenced_copies(code))
        return Examined(**vars(kernel), faults=found, digest=launch.digest)
    hot = products = ""
    if (loop := hot_loop(code.loops)) is not None:
        own = sass.count(loop.own)
        cycles = unit_cycles(own, roof)
        unit = bound(cycles)
        hot = f"{unit} {cycles[unit]:.0f}"
        products = f"{own.waits}/{own.hgmma}" if own.hgmma else ""
    return Examined(
        **vars(kernel),
        hot_loop=hot,
        products=products,
        useful=timed(launch).useful,
        faults=faults(code),
        digest=launch.digest,
    )
