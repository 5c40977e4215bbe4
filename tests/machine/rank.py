"""`python -m tests.machine rank`: the shipped configs of each table by modelled time."""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from fastvit_kernels.commands.console import aligned
from fastvit_kernels.runtime.configs import Choice
from tests.machine.aot import TARGETS

from .faults import faults
from .launches import tracing
from .loop_model import ROOFS
from .ranking import Ranking, Row, Step, decisions, rank, steps

TOKENS = (197, 257, 577, 1025)
HEADER = (
    "",
    "call us",
    "kernel us",
    "bound",
    "useful",
    "registers",
    "spills",
    "warps/SM",
    "faults",
    "config",
)


class Job(NamedTuple):
    """A process's part: an op at all shapes, whose kernels mostly differ by arguments alone."""

    arch: str
    case: str
    tokens: tuple[int, ...]
    sizes: tuple[str, ...]
    tables: tuple[str, ...]
    batch: int


def _rank(job: Job) -> list[dict[str, Any]]:
    return [_as_dict(job, size, T, ranking) for size, T, ranking in _rankings(job)]


def _rankings(job: Job) -> Iterator[tuple[str, int, Ranking]]:
    target = TARGETS[job.arch]
    asked: list[tuple[str, int, Choice, Step]] = []
    for T, size in itertools.product(job.tokens, job.sizes):
        if step := steps(size, T, job.batch).get(job.case):
            asked += [(size, T, choice, step) for choice in decisions(step, target, job.tables)]
    with tracing(target) as trace:
        for size, T, choice, step in asked:
            yield size, T, rank(job.case, step, choice, trace)


def _as_dict(job: Job, size: str, T: int, ranking: Ranking) -> dict[str, Any]:
    """Plain values: they come from another process, and are what --json prints."""
    return {
        "arch": job.arch,
        "model": f"ViT-{size}, T = {T}, batch {job.batch}",
        "case": ranking.case,
        "table": ranking.choice.table,
        "key": list(ranking.choice.key),
        "gpu": ROOFS[job.arch].gpu,
        "time": "modelled, not measured",
        "configs": [_row(row, row.config == ranking.default) for row in ranking.rows],
    }


def _row(row: Row, default: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "config": list(row.config),
        "default": default,
        "error": row.error,
        "call_us": None if math.isinf(row.us) else round(row.us, 1),
    }
    if not row.launches:
        return found
    kernels = [one.launch.kernel for one in row.launches]
    longest = max(row.launches, key=lambda one: one.modelled.us)
    codes = {one.launch.code for one in row.launches}
    return found | {
        "kernel_us": round(sum(one.modelled.us for one in row.launches), 1),
        "bound": longest.modelled.bound,
        "parts_us": {unit: round(us, 1) for unit, us in longest.modelled.parts.items()},
        "useful": longest.useful,
        "registers": max(k.registers for k in kernels),
        "spills": max(k.spills for k in kernels),
        "warps_per_sm": min(k.warps_per_sm or 0 for k in kernels),
        "faults": sorted({fault for code in codes if code is not None for fault in _faults(code)}),
    }


_faults = functools.cache(faults)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    mark = "default" if row["default"] else ""
    config = ",".join(map(str, row["config"])) + (f"  {row['error']}" if row["error"] else "")
    call = "-" if row["call_us"] is None else f"{row['call_us']:.0f}"
    if "kernel_us" not in row:
        return (mark, call, *"-------", config)
    useful = "-" if row["useful"] is None else f"{row['useful']:.0%}"
    figures = (row["registers"], row["spills"], row["warps_per_sm"], len(row["faults"]))
    return (mark, call, f"{row['kernel_us']:.0f}", row["bound"], useful, *map(str, figures), config)


def run_rank(args: argparse.Namespace) -> int:
    """Rank and print; 0."""
    archs = args.arch or ["sm_90"]
    jobs = [
        Job(arch, case, tuple(args.tokens), tuple(args.sizes), tuple(args.tables), args.batch)
        for arch in archs
        for case in steps("Ti", 197, 1)
    ]
    with ProcessPoolExecutor(args.jobs or 1, multiprocessing.get_context("spawn")) as pool:
        results = pool.map(_rank, jobs)
        if args.json:
            print(json.dumps([ranking for found in results for ranking in found], indent=1))
            return 0
        print("A model, not measured: what it counts and leaves out is in tests/machine/README.md.")
        for found in results:
            for ranking in found:
                key = " ".join(map(str, ranking["key"]))
                print(f"\n{ranking['arch']} {ranking['table']} [{key}]: {ranking['case']} of")
                print(f"{ranking['model']}; modelled microseconds on {ranking['gpu']}")
                print(aligned([HEADER, *map(_cells, ranking["configs"])]))
                for row in ranking["configs"]:
                    if row["default"] and row.get("faults"):
                        print(*(f"  the default: {fault}" for fault in row["faults"]), sep="\n")
                sys.stdout.flush()
    return 0
