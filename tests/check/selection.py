"""What `check` runs: cases or configs, in processes of their own or here, as far as the time goes.

Results that are kept from a former run come first and are not run again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastvit_kernels.accuracy.op import Case
from fastvit_kernels.accuracy.runner import Result, run_case
from fastvit_kernels.runtime.configs import TABLES
from fastvit_kernels.runtime.tuned_table import fields

from . import all_configs
from .all_configs import Run
from .isolated import Job, Outcome, run_isolated
from .results_cache import ResultsCache
from .worker import (
    asked,
    cases_of,
    check_job,
    config_job,
    grouped,
    lines_of,
    rest_of,
    result_of,
    results_of,
    runs_of,
)


class NoSuchCase(ValueError):
    """No case has the name that was asked for."""


@dataclass
class Selection:
    """What to run, in how many processes, for how long, and what is there already."""

    device: torch.device
    dtypes: Sequence[str]
    only: str
    jobs: int  # 0: all in this process
    timeout: float
    kept: ResultsCache
    budget: float = math.inf
    left_out: int = 0  # cases, or jobs of configs, that the budget did not allow


def run_cases(wanted: Selection) -> Iterator[Result]:
    """Run the cases whose name contains `only`, but for those that are kept."""
    pairs = {
        (case.name, dtype): case
        for dtype in wanted.dtypes
        for case in cases_of(wanted.device, dtype, False)
        if wanted.only in case.name
    }
    if not pairs:
        known = ", ".join(c.name for c in cases_of(wanted.device, wanted.dtypes[0], False))
        raise NoSuchCase(f"no case; there are {known}")
    for result in [result_of(line) for line in wanted.kept.lines if "tensors" in line]:
        if pairs.pop((result.name, result.dtype), None) is not None:
            yield result
    for result in _results(wanted, pairs):
        pairs.pop((result.name, result.dtype), None)
        wanted.kept.add(**result.as_dict())
        yield result
    wanted.left_out = len(pairs)


def _results(wanted: Selection, pairs: Mapping[tuple[str, str], Case]) -> Iterator[Result]:
    if wanted.jobs:
        jobs = grouped([check_job(*pair, wanted.device) for pair in pairs], wanted.jobs)
        for outcome in _outcomes(wanted, jobs):
            yield from results_of(outcome)
        return
    end = time.monotonic() + wanted.budget
    for name, dtype in [*pairs]:
        if time.monotonic() > end:
            return
        yield run_case(pairs[name, dtype], dtype)


def _outcomes(wanted: Selection, jobs: Sequence[Job]) -> Iterator[Outcome]:
    """Of each job in a process of its own."""
    return run_isolated(jobs, wanted.jobs, wanted.timeout, budget=wanted.budget, then=rest_of)


def run_configs(wanted: Selection) -> Iterator[Run]:
    """Run each launch config in each case that it fits, in each dtype, but for those kept."""
    cases = {
        dtype: [c for c in cases_of(wanted.device, dtype, True) if wanted.only in c.name]
        for dtype in wanted.dtypes
    }
    if not all(cases.values()):
        raise NoSuchCase("no case of --all-configs")
    former = [_run_of(line) for line in wanted.kept.lines if "share" in line]
    yield from former
    for run in _runs(cases, {(run.table, run.config, run.case) for run in former}, wanted):
        wanted.kept.add(**as_dict(run))
        yield run


def _runs(
    cases: dict[str, list[Case]], done: set[tuple[str, Any, str]], wanted: Selection
) -> Iterator[Run]:
    jobs: dict[Job, Case] = {}
    for dtype, own in cases.items():
        found, faults = all_configs.reach(own)
        yield from (replace(run, case=f"{run.case}, {dtype}") for run in faults)
        found.sort(key=lambda r: r.case.name)
        for name, group in itertools.groupby(found, lambda r: r.case.name):
            reached = [*group]
            ours = [(table, c) for table, c, case in done if case == f"{name}, {dtype}"]
            job = config_job(reached, dtype, wanted.device, ours)
            if job is not None and ("", None) not in ours:  # died before its first config
                jobs[job] = reached[0].case
    for outcome in _config_outcomes(wanted, jobs):
        dtype = asked(outcome.job)["dtype"]
        yield from (replace(run, case=f"{run.case}, {dtype}") for run in runs_of(outcome))


def _config_outcomes(wanted: Selection, jobs: Mapping[Job, Case]) -> Iterator[Outcome]:
    """Of each job; without processes, of each line of each job."""
    wanted.left_out = len(jobs)
    if wanted.jobs:
        for outcome in _outcomes(wanted, [*jobs]):
            wanted.left_out += len(rest_of(outcome)) - (not outcome.is_cut)
            yield outcome
        return
    end = time.monotonic() + wanted.budget
    for job, case in jobs.items():
        lines = lines_of(job, case)
        while time.monotonic() <= end and (line := next(lines, None)) is not None:
            yield Outcome(job, [line], None)
        if time.monotonic() > end:
            return
        wanted.left_out -= 1


def as_dict(run: Run) -> dict[str, Any]:
    return {**vars(run), "config": run.config and fields(run.config)}


def _run_of(line: dict[str, Any]) -> Run:
    """Of a kept line."""
    configs = TABLES[line["table"]].configs if line["table"] else ()
    config = next((c for c in configs if fields(c) == line["config"]), None)
    return Run(line["table"], config, line["case"], line["share"], line["fault"])
