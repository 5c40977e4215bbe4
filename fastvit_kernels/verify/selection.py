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

from ..runtime.configs import TABLES
from ..runtime.tuned_table import fields
from . import all_configs
from .all_configs import Run
from .isolated import Job, run_isolated
from .kept import Kept
from .op import Case
from .runner import Result, run_case
from .worker import cases_of, check_job, config_job, dtype_of, rest_of, result_of, runs_of


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
    kept: Kept
    budget: float = math.inf
    left_out: int = 0  # that the budget did not allow


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
    for result in [Result.from_dict(line) for line in wanted.kept.lines if "tensors" in line]:
        if pairs.pop((result.name, result.dtype), None) is not None:
            yield result
    for result in _results(pairs, wanted):
        wanted.kept.add(**result.as_dict())
        yield result


def _results(pairs: Mapping[tuple[str, str], Case], wanted: Selection) -> Iterator[Result]:
    wanted.left_out = len(pairs)
    if not wanted.jobs:
        end = time.monotonic() + wanted.budget
        for (_, dtype), case in pairs.items():
            if time.monotonic() > end:
                return
            wanted.left_out -= 1
            yield run_case(case, dtype)
        return
    jobs = {check_job(name, dtype, wanted.device): dtype for name, dtype in pairs}
    for outcome in run_isolated([*jobs], wanted.jobs, wanted.timeout, budget=wanted.budget):
        if not outcome.is_cut:
            wanted.left_out -= 1
            yield result_of(outcome, jobs[outcome.job])


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
    done = {(run.table, run.config, run.case) for run in former}
    for run in _runs(cases, done, wanted):
        wanted.kept.add(**as_dict(run))
        yield run


def as_dict(run: Run) -> dict[str, Any]:
    return {**vars(run), "config": run.config and fields(run.config)}


def _run_of(line: dict[str, Any]) -> Run:
    """Of a kept line."""
    configs = TABLES[line["table"]].configs if line["table"] else ()
    config = next((c for c in configs if fields(c) == line["config"]), None)
    return Run(line["table"], config, line["case"], line["share"], line["fault"])


def _runs(
    cases: dict[str, list[Case]], done: set[tuple[str, Any, str]], wanted: Selection
) -> Iterator[Run]:
    def named(run: Run, dtype: str) -> Run:
        return replace(run, case=f"{run.case}, {dtype}")

    jobs: list[Job] = []
    end = time.monotonic() + wanted.budget
    for dtype, own in cases.items():
        found, faults = all_configs.reach(own)
        yield from (named(run, dtype) for run in faults)
        groups = itertools.groupby(sorted(found, key=lambda r: r.case.name), lambda r: r.case.name)
        for name, group in groups:
            ours = [(table, c) for table, c, case in done if case == f"{name}, {dtype}"]
            if ("", None) in ours:  # its process died before the first config
                continue
            if wanted.jobs:
                job = config_job(list(group), dtype, wanted.device, ours)
                jobs += [] if job is None else [job]
                continue
            for reached in group:
                for config in reached.configs(ours):
                    if time.monotonic() > end:
                        wanted.left_out += 1
                    else:
                        yield named(all_configs.run_config(reached, config), dtype)
    wanted.left_out += len(jobs)
    budget = end - time.monotonic()
    for outcome in run_isolated(
        jobs, wanted.jobs or 1, wanted.timeout, budget=budget, then=rest_of
    ):
        wanted.left_out += len(rest_of(outcome)) - (not outcome.is_cut)
        for run in runs_of(outcome):
            yield named(run, dtype_of(outcome.job))
