"""The package's ops on the machine, by the 2x rule: what `python -m tests.machine device` runs.

check     every case of `fastvit-kernels check`
tokens    attention, rope and their kin at T = 1, 17, 50, 197, 257, plain and with dropout
training  three steps of a small ViT, its loss and weights
configs   every launch config that ships, twice, for equal bits
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fastvit_kernels as fk
from fastvit_kernels.models.vit import VisionTransformer
from fastvit_kernels.runtime.backend import backend
from fastvit_kernels.verify import all_configs
from fastvit_kernels.verify.accuracy import Reference, measure_all
from fastvit_kernels.verify.cases import OPS, check_cases, config_cases
from fastvit_kernels.verify.op import SMALL, Case, Draw, Example
from fastvit_kernels.verify.runner import check, first_line, poisoned

from .driver import Machine, ptx_machine

CPU = torch.device("cpu")
TOKENS = (1, 17, 50, 197, 257)
KINDS = ("check", "tokens", "training", "configs")
# tf32 is fp32 whose products may round their operands to tf32.
PRECISIONS = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32,
}  # fmt: skip


class Job(NamedTuple):
    target: str
    precision: str
    kind: str
    name: str  # of the case
    place: int = 0  # of the config


class Outcome(NamedTuple):
    job: Job
    fault: str | None
    seconds: float  # with compiling and the reference
    machine: float  # on the machine alone
    launches: int
    accesses: int

    def __str__(self) -> str:
        job = self.job
        where = f"{job.target} {job.precision} {job.kind}: {job.name}"
        place = f" [{job.place}]" if job.kind == "configs" else ""
        return f"{'ok  ' if self.fault is None else 'FAIL'} {where}{place}" + (
            f"  {self.machine:.2f} s, {self.launches} launches"
            if self.fault is None
            else f"  {self.fault}"
        )


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Inside, fp32 products round to tf32 where `name` says so."""
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(former)


def _token_cases(dtype: torch.dtype) -> list[Case]:
    """Attention's relatives at each T, what a ViT of one head size has."""
    found = []
    for T in TOKENS:
        sizes = SMALL._replace(T=T) if hasattr(SMALL, "_replace") else _with_tokens(T)
        for name in (
            "attention",
            "qkv_attention",
            "rope_attention",
            "scaled_dot_product_attention",
        ):
            op = OPS[name]
            case = op.case(Example(op.at(sizes), f"T={T}"), CPU, dtype)
            found.append(case)
    return found


def _with_tokens(T: int) -> Any:
    from dataclasses import replace

    return replace(SMALL, T=T, B=1)


def cases(kind: str, name: str) -> list[Case]:
    """By kind and precision; the same list in each process."""
    dtype = PRECISIONS[name]
    if kind == "check":
        return check_cases(SMALL, CPU, dtype)
    if kind == "tokens":
        return _token_cases(dtype)
    return config_cases(False, CPU, dtype)


def jobs(target: str, name: str, kind: str) -> list[Job]:
    if kind == "training":
        return [Job(target, name, kind, "VisionTransformer, 3 steps")]
    if kind == "configs":
        return _config_jobs(target, name)
    return [Job(target, name, kind, case.name) for case in cases(kind, name)]


def _config_jobs(target: str, name: str) -> list[Job]:
    """Each config once, by the first case that reaches it."""
    with precision(name), ptx_machine(target):
        reached, faults = all_configs.reach(cases("configs", name))
    assert not faults, faults
    found, done = [], set()
    for place, r in enumerate(reached):
        for config in r.configs(done):
            done.add((r.table, config))
            found.append(Job(target, name, "configs", f"{r.case.name}|{r.table}|{config}", place))
    return found


def run_job(job: Job) -> Outcome:
    began = time.perf_counter()
    fault = None
    machine = Machine(job.target)
    try:
        with precision(job.precision), ptx_machine(job.target) as machine:
            fault = _fault_of(job)
    except Exception as error:  # whatever it is, the others still run
        fault = first_line(error)
    seconds = time.perf_counter() - began
    return Outcome(
        job, fault, seconds, sum(machine.seconds.values()), machine.launches.total(),
        machine.accesses,
    )  # fmt: skip


def _fault_of(job: Job) -> str | None:
    if job.kind == "training":
        return training_fault(PRECISIONS[job.precision])
    if job.kind == "configs":
        return _config_fault(job)
    (case,) = (c for c in cases(job.kind, job.precision) if c.name == job.name)
    return _judge(case)


def _judge(case: Case) -> str | None:
    with poisoned():
        errors = case.reference.errors(case.function)
    return "; ".join(str(e) for e in errors if not e.passed) or None


_REACHED: dict[tuple[str, str], list[all_configs.Reached]] = {}


def _config_fault(job: Job) -> str | None:
    key = job.target, job.precision
    if key not in _REACHED:
        _REACHED[key] = all_configs.reach(cases("configs", job.precision))[0]
    reached = _REACHED[key][job.place]
    _, table, text = job.name.split("|", 2)
    (config,) = (c for c in reached.configs() if str(c) == text)
    assert reached.table == table
    return all_configs.run_config(reached, config).fault
