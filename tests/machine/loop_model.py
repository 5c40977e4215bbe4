"""A model of a kernel's time from its machine code. No figure of it is a measurement.

README.md says what it counts, how it puts that together, and what it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .groups import Role, has_roles, roles
from .ptx import Ptx
from .sass import Counts, Instruction, Loop, count, loops

WAIT = 20  # cycles: a wgmma's latency beyond its throughput, and its ARRIVE
BARRIER = 30
LATENCY = 500  # of a load that comes from L2 or HBM
START = 1500  # a program's first loads and last stores
LAUNCH = 2.0  # microseconds
NORM = 3.0
PROGRAMS = 24  # of a launch, whose branches are followed


class Roof(NamedTuple):
    """Rates of one GPU: of a sub-core in a cycle where nothing else is said."""

    gpu: str
    num_sms: int
    ghz: float  # that a long product holds
    hgmma: int  # multiply-adds of 16 bits
    hmma: int
    fp32: int  # cycles an instruction: 32 lanes a sub-core, or 16
    hbm: float  # GB/s that a copy reaches
    l2: int  # bytes a cycle, the whole GPU


# A100: 312 TFLOP/s, 19.5 of fp32, 5,120 bytes a cycle of L2 (NVIDIA's A100 whitepaper); of 2,039
# GB/s as much as on the H200. Nothing published of products corrects it.
# H200: 512 multiply-adds are 989 TFLOP/s at 1.83 GHz (NVIDIA's data sheet). At 1.52 GHz, and with
# twice the A100's L2, products take what is published of cuBLAS and Triton; a copy reaches 4,300 of
# 4,800 GB/s. mma.sync has 63 % of wgmma's rate (arXiv:2402.13499, table 8).
# Tests say how far the model is from each published figure.
ROOFS = {
    "sm_80": Roof("A100 80 GB", 108, 1.41, 0, 256, 2, 1830.0, 5120),
    "sm_90": Roof("H200", 132, 1.52, 512, 320, 1, 4300.0, 10240),
}
# By what one measured (docs/benchmarks.md): its copies, and the clock of sustained products.
H100 = Roof("H100 80 GB", 132, 1.40, 512, 320, 1, 3008.0, 10240)
UNITS = ("tensor", "issue", "MUFU", "fp32", "ALU", "shared")


def product_cycles(products: Sequence[tuple[str, int, int, int, int]], roof: Roof) -> float:
    """Cycles on a sub-core's tensor core for one warp; tf32 takes half of K at the same cost."""
    cycles = 0.0
    for kind, M, N, _, n in products:
        share = M * N * 16 / (4 if kind == "HGMMA" else 1)
        cycles += n * share / ((roof.hgmma if kind == "HGMMA" else roof.hmma) or math.inf)
    return cycles


def unit_cycles(counts: Counts, roof: Roof) -> dict[str, float]:
    """Cycles that a sub-core needs on each unit for what one warp does."""
    return {
        "tensor": product_cycles(counts.products, roof),
        "issue": float(counts.instructions),
        "MUFU": 8.0 * counts.special,
        "fp32": float(roof.fp32 * counts.fp32),
        "ALU": 2.0 * counts.integer,
        "shared": (counts.shared_bytes + counts.operand_bytes + counts.async_bytes) / 32,
    }


def bound(cycles: dict[str, float]) -> str:
    return max(cycles, key=lambda unit: cycles[unit])


def hot_loop(found: Sequence[Loop]) -> Loop | None:
    """The loop that a kernel is about: most products, else most instructions."""

    def weight(loop: Loop) -> tuple[float, int]:
        counts = count(loop.own)
        return sum(M * N * K * n for _, M, N, K, n in counts.products), counts.instructions

    return max(found, key=weight, default=None)


class Region(NamedTuple):
    """A loop without its inner loops, or what is in no loop: its SASS and its blocks of PTX."""

    counts: Counts
    blocks: tuple[int, ...]
    is_loop: bool


class Group(NamedTuple):
    """A group of warps with a role of its own (groups.py), and its regions."""

    role: Role
    regions: list[Region]


def regions(code: Sequence[Instruction], ptx: Ptx) -> list[Region] | list[Group]:
    """Loops of SASS and PTX paired in order; one region where their numbers differ. Of a kernel
    with roles those of each group of warps."""
    if has_roles(ptx):
        found = roles(code, ptx)
        return [Group(role, _regions(role.code, role.ptx, role.blocks)) for role in found]
    return _regions(code, ptx, frozenset(range(len(ptx.blocks))))


def _regions(code: Sequence[Instruction], ptx: Ptx, whole: frozenset[int]) -> list[Region]:
    found, ranges = loops(list(code)), [loop for loop in ptx.loops if loop.head in whole]
    if len(found) != len(ranges):
        return [Region(count(code), tuple(sorted(whole)), bool(ranges))]
    inner: list[Region] = []
    taken: set[int] = set()
    addresses: set[int] = set()
    pairs = zip(found, ranges, strict=True)
    for loop, natural in sorted(pairs, key=lambda pair: len(pair[1].blocks)):
        blocks = tuple(sorted(natural.blocks - taken))
        taken |= set(blocks)
        addresses |= {one.address for one in loop.own}
        inner.append(Region(count(loop.own), blocks, True))
    rest = [one for one in code if one.address not in addresses]
    outside = tuple(b for b in sorted(whole) if b not in taken)
    return [Region(count(rest), outside, False), *inner]


@dataclass(frozen=True)
class Work:
    """What an average warp of a launch does, in cycles of a sub-core and in bytes."""

    cycles: dict[str, float]  # by unit
    chain: float  # cycles
    multiply_adds: float  # of a program
    bytes_moved: float  # of a program, through L2


class _Launch(NamedTuple):
    """What decides how often a launch's programs run each block, and what hides their waits."""

    arguments: Sequence[int | None]
    grid: tuple[int, ...]  # three numbers
    roof: Roof
    num_stages: int
    resident: int
    trips: int | None


def work(
    parts: Sequence[Region] | Sequence[Group],
    ptx: Ptx,
    arguments: Sequence[int | None],
    grid: Sequence[int],
    roof: Roof,
    num_stages: int,
    resident: int,
    trips: int | None = None,
) -> Work:
    """The work of a launch, averaged over PROGRAMS of its programs.

    SASS has the instructions and PTX the branches: each class of SASS instructions in one of the
    kernel's regions is taken as often as PTX runs that class there. `trips` as for `executions`.
    """
    launch = _Launch(arguments, (*grid, 1, 1)[:3], roof, num_stages, resident, trips)
    found = [part for part in parts if isinstance(part, Group)]
    if found:
        return _side_by_side(found, ptx.num_warps, launch)
    own = [part for part in parts if isinstance(part, Region)]
    return _of_warps(own, ptx, launch, 0, ptx.num_warps)


def _side_by_side(found: Sequence[Group], num_warps: int, launch: _Launch) -> Work:
    """The work of a launch whose groups of warps run side by side, as of an average warp.

    Units have the work of all groups. The chain is that of the longest that multiplies: the others
    hide it as resident programs do, and what the loader waits for was asked for a ring earlier.
    """
    each = [_of_warps(own, role.ptx, launch, role.thread, role.warps) for role, own in found]
    share = [role.warps / num_warps for role, _ in found]
    return Work(
        {unit: sum(n * w.cycles[unit] for n, w in zip(share, each, strict=True)) for unit in UNITS},
        max(w.chain for w, (role, _) in zip(each, found, strict=True) if role.computes),
        sum(w.multiply_adds for w in each),
        sum(w.bytes_moved for w in each),
    )


def _of_warps(
    parts: Sequence[Region], ptx: Ptx, launch: _Launch, thread: int, num_warps: int
) -> Work:
    """Of `num_warps` warps, whose branches are this thread's."""
    runs, copied = _average_runs(ptx, launch, thread)
    chain, cycles = float(START), dict.fromkeys(UNITS, 0.0)
    multiply_adds, bytes_moved = 0.0, num_warps * copied
    for region in parts:
        own, spent = _of_region(region, ptx, runs, launch)
        chain += spent
        cycles = {unit: cycles[unit] + own[unit] for unit in UNITS}
        for b in region.blocks:
            counts, moved = ptx.work[b]
            each = sum(
                M * N * K * n / (4 if kind == "HGMMA" else 1)
                for kind, M, N, K, n in counts.products
            )
            multiply_adds += runs[b] * num_warps * each
            bytes_moved += runs[b] * (num_warps * (moved.loaded + moved.stored) + moved.bulk)
    return Work(cycles, chain, multiply_adds, bytes_moved)


def _average_runs(ptx: Ptx, launch: _Launch, thread: int) -> tuple[list[float], float]:
    """How often a program runs each block, and the bytes that a warp copies."""
    x, y, z = launch.grid
    sampled = sorted({int(i * 0.6180339887 % 1.0 * x * y * z) for i in range(PROGRAMS)} | {0})
    runs, copied = [0.0] * len(ptx.blocks), 0.0
    for i in sampled:
        program = i % x, i // x % y, i // (x * y)
        run = ptx.executions(launch.arguments, program, launch.grid, thread, launch.trips)
        runs = [a + b / len(sampled) for a, b in zip(runs, run.blocks, strict=True)]
        copied += 32 * run.copied / len(sampled)
    return runs, copied


def _of_region(
    region: Region, ptx: Ptx, runs: Sequence[float], launch: _Launch
) -> tuple[dict[str, float], float]:
    """Cycles of a region on each unit, and of the chain of one warp in it."""
    counts, blocks, roof = region.counts, region.blocks, launch.roof
    usual = _times("instructions", blocks, ptx, runs, 0.0)
    own = unit_cycles(counts, roof)
    for unit, field in CLASSES.items():
        own[unit] *= _times(field, blocks, ptx, runs, usual)
    own["shared"] = counts.shared_bytes / 32 * _times("shared_bytes", blocks, ptx, runs, usual)
    own["tensor"] = waited = hgmma = loads = 0.0
    for b in blocks:
        here, moved = ptx.work[b]
        own["tensor"] += runs[b] * product_cycles(here.products, roof)
        own["shared"] += runs[b] * (here.operand_bytes + here.async_bytes) / 32
        waited += runs[b] * product_cycles([p for p in here.products if p[0] == "HGMMA"], roof)
        hgmma += runs[b] * here.hgmma
        loads += runs[b] * bool(moved.loaded and region.is_loop)
    spent = max(n if unit != "tensor" else n - waited for unit, n in own.items()) + waited
    spent += WAIT * counts.waits * hgmma / counts.hgmma if counts.hgmma else 0.0
    spent += BARRIER * counts.barriers * _times("barriers", blocks, ptx, runs, usual)
    copies = any(ptx.work[b][1].copied or ptx.work[b][1].bulk for b in blocks)
    if region.is_loop and copies:
        rounds = max((runs[b] for b in blocks), default=0.0)
        ahead = lead(ptx, blocks, launch.num_stages) * spent / max(rounds, 1.0)
        spent += rounds * max(0.0, LATENCY - ahead * max(launch.resident, 1))
    return own, spent + LATENCY * loads


CLASSES = {"issue": "instructions", "MUFU": "special", "fp32": "fp32", "ALU": "integer"}


def _times(
    field: str, blocks: Sequence[int], ptx: Ptx, runs: Sequence[float], otherwise: float
) -> float:
    """How often PTX runs a class of instructions that these blocks have; else `otherwise`."""
    static = sum(getattr(ptx.work[b][0], field) for b in blocks)
    dynamic = sum(runs[b] * getattr(ptx.work[b][0], field) for b in blocks)
    return dynamic / static if static else otherwise


def lead(ptx: Ptx, blocks: Sequence[int], num_stages: int) -> float:
    """Iterations of the loop of these blocks between a load and the wait for it."""
    ops = [op for b in blocks for op in ptx.blocks[b].ops]
    pending = [int(op.operands[0]) for op in ops if op.name == "cp.async.wait_group"]
    if not pending:
        return max(num_stages - 1, 0)
    groups = sum(op.name == "cp.async.commit_group" for op in ops)
    return min(pending) / max(groups, 1)


class Modelled(NamedTuple):
    """A launch's modelled time. Not a measurement."""

    us: float
    bound: str
    parts: dict[str, float]  # microseconds of each unit, of the chain, L2 and HBM
    multiply_adds: float  # of the whole launch, padding included


def launch_time(
    done: Work, roof: Roof, *, programs: int, num_warps: int, resident: int, tensor_bytes: float
) -> Modelled:
    """The modelled time of a launch whose grid has `programs`, `resident` on an SM at once."""
    us = 1e-3 / roof.ghz  # of a cycle
    warps = math.ceil(programs / roof.num_sms) * num_warps / 4  # of the busiest SM's sub-cores
    parts = {unit: us * n * warps for unit, n in done.cycles.items()}
    parts["chain"] = us * done.chain * math.ceil(programs / (roof.num_sms * max(resident, 1)))
    parts["L2"] = us * programs * done.bytes_moved / roof.l2
    parts["HBM"] = tensor_bytes / roof.hbm * 1e-3
    total = sum(part**NORM for part in parts.values()) ** (1 / NORM)
    return Modelled(LAUNCH + total, bound(parts), parts, programs * done.multiply_adds)
