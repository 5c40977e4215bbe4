"""What one job of `check` runs: cases in one dtype each, a JSON line for each result.

python -m tests.check.worker '{"name": ..., "dtype": ..., "device": ..., "forced": ...}' ...

A process costs seconds before its first kernel, so several cases share one.

`forced` is None for the case as it ships; else the settings behind which its tables are reached,
each of whose configs runs, by their places in the tables. Before a config a line says that it is
tried, so that the one that ends the process can be named. A process whose device is lost ends, and
what it has left goes to another.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fastvit_kernels.accuracy.accuracy import Error
from fastvit_kernels.accuracy.cases import cases_on
from fastvit_kernels.accuracy.op import Case
from fastvit_kernels.accuracy.runner import Result, quiet_interpreter, run_case
from fastvit_kernels.runtime.configs import TABLES
from fastvit_kernels.runtime.dtypes import DTYPES

from . import all_configs
from .all_configs import Reached, Run
from .config_cases import config_cases
from .isolated import Job, Outcome, device_lost, python

LOST = 4  # exit status of a process whose device is lost


def cases_of(device: torch.device, dtype: str, all_configs: bool) -> list[Case]:
    """What is checked on this device, large on a GPU."""
    if all_configs:
        return config_cases(device.type == "cuda", device, DTYPES[dtype])
    return cases_on(device, dtype)


def check_job(
    name: str, dtype: str, device: torch.device, forced: list[dict[str, Any]] | None = None
) -> Job:
    """A case as it ships, or each of its configs that are `forced`."""
    what = {"name": name, "dtype": dtype, "device": str(device), "forced": forced}
    return Job(name, python(__name__, json.dumps(what)))


def config_job(
    reached: Sequence[Reached],
    dtype: str,
    device: torch.device,
    done: Sequence[tuple[str, Any]] = (),
) -> Job | None:
    """Every config that one case reaches but those `done`, by table; None where none is left."""
    forced = []
    for r in reached:
        if left := [_place(r.table, config) for config in r.configs(done)]:
            settings = [(table, _place(table, config)) for table, config in r.settings]
            forced.append({"table": r.table, "settings": settings, "configs": left})
    return check_job(reached[0].case.name, dtype, device, forced) if forced else None


def _place(table: str, config: Any) -> int:
    return TABLES[table].configs.index(config)


def asked(job: Job) -> dict[str, Any]:
    """What the job is told."""
    return json.loads(job.command[-1])


def grouped(jobs: Sequence[Job], count: int) -> list[Job]:
    """`check_job`s in so many processes, each case in one of them."""
    groups = [jobs[i::count] for i in range(min(count, len(jobs)))]
    return [replace(g[0], command=(*g[0].command, *(j.command[-1] for j in g[1:]))) for g in groups]


def _told(job: Job) -> list[str]:
    return [word for word in job.command if word.startswith("{")]


def rest_of(outcome: Outcome) -> list[Job]:
    """A job for the cases or configs that a dead process has not tried."""
    if asked(outcome.job)["forced"] is None:
        told = _told(outcome.job)
        rest = told[max(1, sum("tried" in line for line in outcome.lines)) :]
        if outcome.failure is None or not rest:
            return []
        command = (*outcome.job.command[: -len(told)], *rest)
        return [replace(outcome.job, name=json.loads(rest[0])["name"], command=command)]
    tried = {(line["table"], line["config"]) for line in outcome.lines if "tried" in line}
    if outcome.failure is None or not tried:  # one that dies before the first would die again
        return []
    what = asked(outcome.job)
    for entry in what["forced"]:
        entry["configs"] = [i for i in entry["configs"] if (entry["table"], i) not in tried]
    what["forced"] = [entry for entry in what["forced"] if entry["configs"]]
    command = (*outcome.job.command[:-1], json.dumps(what))
    return [replace(outcome.job, command=command)] if what["forced"] else []


def result_of(line: Mapping[str, Any]) -> Result:
    """Of what `Result.as_dict` gave, read from JSON."""
    tensors: list[dict[str, Any]] = [
        {n: math.inf if v is None else v for n, v in tensor.items() if n != "passed"}
        for tensor in line["tensors"]
    ]
    rest = {name: line[name] for name in ("name", "dtype", "failure", "seconds")}
    return Result(errors=[Error(**tensor) for tensor in tensors], **rest)


def results_of(outcome: Outcome) -> list[Result]:
    """Of a `check_job`; the case that ended the process has a failure."""
    results = [result_of(line) for line in outcome.lines if "tensors" in line]
    told = [json.loads(word) for word in _told(outcome.job)]
    begun = max(1, sum("tried" in line for line in outcome.lines))
    if len(results) < begun and not outcome.is_cut:
        failure, of = outcome.failure or "the process said nothing", told[len(results)]
        results.append(Result(of["name"], of["dtype"], [], failure, 0.0))
    elif outcome.failure is not None and results[-1].passed:  # it died of what it had run
        results[-1] = replace(results[-1], failure=outcome.failure)
    return results


def runs_of(outcome: Outcome) -> list[Run]:
    """Of a `config_job`; where it was cut short, the fault of the config that it last tried."""
    runs: list[Run] = []
    case = outcome.job.name
    tried: tuple[str, Any] = ("", None)
    for line in outcome.lines:
        at = line["table"], TABLES[line["table"]].configs[line["config"]]
        if line["tried"]:
            tried = at
        else:
            runs.append(Run(*at, case, line["share"], line["fault"]))
    if outcome.failure is None:
        return runs
    if runs and (runs[-1].table, runs[-1].config) == tried:  # it had ended: its fault says more
        fault = f"{runs[-1].fault or 'passed'}; then {outcome.failure}"
        return [*runs[:-1], replace(runs[-1], fault=fault)]
    return [*runs, Run(*tried, case, 0.0, outcome.failure)]


def lines_of(job: Job, case: Case) -> Iterator[dict[str, Any]]:
    """What the job says, as it goes."""
    what = asked(job)
    if what["forced"] is None:
        yield run_case(case, what["dtype"]).as_dict()
        return
    for entry in what["forced"]:
        settings = tuple((table, TABLES[table].configs[i]) for table, i in entry["settings"])
        (reached,) = (
            r for r in all_configs.reached_by(case, settings) if r.table == entry["table"]
        )
        for i in entry["configs"]:
            line = {"table": reached.table, "config": i}
            yield {**line, "tried": True}
            run = all_configs.run_config(reached, TABLES[reached.table].configs[i])
            yield {**line, "tried": False, "share": run.share, "fault": run.fault}


def main(words: Sequence[str]) -> int:
    """Run what each JSON says, until the device is lost."""
    cases: dict[tuple[str, bool], dict[str, Case]] = {}
    for word in words:
        job = Job("", (word,))
        what = asked(job)
        device, kind = torch.device(what["device"]), (what["dtype"], what["forced"] is not None)
        if kind not in cases:
            cases[kind] = {case.name: case for case in cases_of(device, *kind)}
        case = cases[kind].pop(what["name"])  # its tensors go with it
        with quiet_interpreter():
            if what["forced"] is None:
                print(json.dumps({"tried": what["name"]}), flush=True)
            for line in lines_of(job, case):
                print(json.dumps(line), flush=True)
                fault = line.get("fault") or line.get("failure")
                if fault is not None and (lost := device_lost(device)) is not None:
                    print(f"the device is lost: {lost}", file=sys.stderr)
                    return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
