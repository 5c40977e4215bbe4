"""What one job of `check` runs: a case in one dtype, a JSON line for each result.

python -m tests.check.worker '{"name": ..., "dtype": ..., "device": ..., "forced": ...}'

`forced` is None for the case as it ships; else the settings behind which its tables are reached,
each of whose configs runs, by their places in the tables. Before a config a line says that it is
tried, so that the one that ends the process can be named. A process whose device is lost ends, and
what it has left goes to another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from fastvit_kernels.runtime.configs import TABLES
from fastvit_kernels.runtime.dtypes import DTYPES
from fastvit_kernels.verify.cases import cases_on
from fastvit_kernels.verify.op import Case
from fastvit_kernels.verify.runner import Result, device_lost, quiet_interpreter, run_case

from . import all_configs
from .all_configs import Reached, Run
from .config_cases import config_cases
from .isolated import Job, Outcome, python

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
    reached: Sequence[Reached], dtype: str, device: torch.device,
    done: Sequence[tuple[str, Any]] = (),
) -> Job | None:  # fmt: skip
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


def rest_of(outcome: Outcome) -> list[Job]:
    """A job for the configs that a dead process of a `config_job` has not tried."""
    tried = {(line["table"], line["config"]) for line in outcome.lines if "tried" in line}
    if outcome.failure is None or not tried:  # one that dies before the first would die again
        return []
    what = asked(outcome.job)
    for entry in what["forced"]:
        entry["configs"] = [i for i in entry["configs"] if (entry["table"], i) not in tried]
    what["forced"] = [entry for entry in what["forced"] if entry["configs"]]
    command = (*outcome.job.command[:-1], json.dumps(what))
    return [replace(outcome.job, command=command)] if what["forced"] else []


def result_of(outcome: Outcome, dtype: str) -> Result:
    """Of a `check_job`."""
    if outcome.lines and outcome.failure is None:
        return Result.from_dict(outcome.lines[-1])
    failure = outcome.failure or "the process said nothing"
    return Result(outcome.job.name, dtype, [], failure, 0.0)


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


def main(argument: str) -> int:
    """Run what the JSON says, until the device is lost."""
    job = Job("", (argument,))
    what = asked(job)
    device = torch.device(what["device"])
    cases = cases_of(device, what["dtype"], what["forced"] is not None)
    (case,) = (case for case in cases if case.name == what["name"])
    with quiet_interpreter():
        for line in lines_of(job, case):
            print(json.dumps(line), flush=True)
            if line.get("fault") is not None and (lost := device_lost(device)) is not None:
                print(f"the device is lost: {lost}", file=sys.stderr)
                return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
