"""What runs in a process of its own: one case of `check` in one dtype, a JSON line for each result.

python -m fastvit_kernels.verify.worker '{"name": ..., "dtype": ..., "device": ..., "forced": ...}'

`forced` is None for the case as it ships; else the settings behind which its tables are reached,
each of whose configs runs. Before a config a line says that it is tried, so that the one that ends
the process can be named. A process whose device is lost ends, and what it has left goes to another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..runtime.configs import TABLES
from ..runtime.dtypes import DTYPES
from .all_configs import Forced, Reached, Run, reached_by, run_config
from .cases import check_cases, config_cases
from .isolated import Job, Outcome, python
from .op import LARGE, SMALL, Case
from .runner import Result, device_lost, quiet_interpreter, run_case

LOST = 4  # exit status of a process whose device is lost


def cases_of(device: torch.device, dtype: str, all_configs: bool) -> list[Case]:
    """What `check` runs on this device, large on a GPU."""
    large = device.type == "cuda"
    if all_configs:
        return config_cases(large, device, DTYPES[dtype])
    return check_cases(LARGE if large else SMALL, device, DTYPES[dtype])


def _indices(settings: Forced) -> list[tuple[str, int]]:
    return [(table, TABLES[table].configs.index(config)) for table, config in settings]


def _settings(indices: Sequence[Sequence[Any]]) -> Forced:
    return tuple((table, TABLES[table].configs[index]) for table, index in indices)


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
        index = TABLES[r.table].configs.index
        if left := [index(config) for config in r.configs(done)]:
            settings = _indices(r.settings)
            forced.append({"table": r.table, "settings": settings, "configs": left})
    return check_job(reached[0].case.name, dtype, device, forced) if forced else None


def rest_of(outcome: Outcome) -> list[Job]:
    """A job for the configs that a dead process of a `config_job` has not tried."""
    tried = {(line["table"], line["config"]) for line in outcome.lines}
    if outcome.failure is None or not tried:  # one that dies before the first would die again
        return []
    what = json.loads(outcome.job.command[-1])
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


def dtype_of(job: Job) -> str:
    return json.loads(job.command[-1])["dtype"]


def runs_of(outcome: Outcome) -> list[Run]:
    """Of a `config_job`; where it was cut short, the fault of the config that it last tried."""
    runs: list[Run] = []
    tried: tuple[str, Any] = ("", None)
    for line in outcome.lines:
        table, index = line["table"], line["config"]
        config = TABLES[table].configs[index]
        if line["tried"]:
            tried = (table, config)
        else:
            runs.append(Run(table, config, outcome.job.name, line["share"], line["fault"]))
    if outcome.failure is None:
        return runs
    if runs and (runs[-1].table, runs[-1].config) == tried:  # it had ended: its fault says more
        fault = f"{runs[-1].fault or 'passed'}; then {outcome.failure}"
        return [*runs[:-1], replace(runs[-1], fault=fault)]
    return [*runs, Run(*tried, outcome.job.name, 0.0, outcome.failure)]


def _config_lines(
    case: Case, forced: Sequence[dict[str, Any]], device: torch.device
) -> Iterator[dict[str, Any]]:
    """Lines for each config, until the device is lost."""
    for entry in forced:
        settings = _settings(entry["settings"])
        (reached,) = (r for r in reached_by(case, settings) if r.table == entry["table"])
        for index in entry["configs"]:
            line = {"table": reached.table, "config": index}
            yield {**line, "tried": True}
            run = run_config(reached, TABLES[reached.table].configs[index])
            yield {**line, "tried": False, "share": run.share, "fault": run.fault}
            if run.fault is not None and (lost := device_lost(device)) is not None:
                print(f"the device is lost: {lost}", file=sys.stderr)
                raise SystemExit(LOST)


def main(argument: str) -> int:
    """Run what the JSON says."""
    what = json.loads(argument)
    device, forced = torch.device(what["device"]), what["forced"]
    cases = cases_of(device, what["dtype"], forced is not None)
    (case,) = (case for case in cases if case.name == what["name"])
    if forced is None:
        print(json.dumps(run_case(case, what["dtype"]).as_dict()), flush=True)
        return 0
    with quiet_interpreter():
        for line in _config_lines(case, forced, device):
            print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
