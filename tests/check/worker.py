"""What `check` runs: cases in a dtype, as they ship or with a launch config forced.

python -m tests.check.worker DEVICE '[{"name": ..., "dtype": ...}, ...]'

An item says a case and a dtype; of a config also its table, its place there, and the settings
(table, place) behind which the case asks that table. A line says what came of it. A process costs
seconds before its first kernel, so several items share one; where the device is lost it ends.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fastvit_kernels.accuracy.cases import cases_on
from fastvit_kernels.accuracy.op import Case
from fastvit_kernels.accuracy.runner import Result, quiet_interpreter, run_case
from fastvit_kernels.commands.console import finite
from fastvit_kernels.runtime.configs import TABLES
from fastvit_kernels.runtime.dtypes import DTYPES

from . import all_configs
from .all_configs import Reached
from .config_cases import config_cases
from .isolated import LOST, Item, device_lost

Line = dict[str, Any]


def cases_of(device: torch.device, dtype: str, every_config: bool) -> list[Case]:
    """What is checked on this device, large on a GPU."""
    if every_config:
        return config_cases(device.type == "cuda", device, DTYPES[dtype])
    return cases_on(device, dtype)


def items_of(
    device: torch.device, dtypes: Sequence[str], only: str, every_config: bool
) -> tuple[list[Item], list[Line]]:
    """The items of the cases whose name contains `only`, and lines of cases that raise before their
    configs are known."""
    items: list[Item] = []
    faults: list[Line] = []
    for dtype in dtypes:
        cases = [c for c in cases_of(device, dtype, every_config) if only in c.name]
        if not every_config:
            items += [{"name": case.name, "dtype": dtype} for case in cases]
            continue
        found, raised = all_configs.reach(cases)
        faults += [_config_line(run, dtype) for run in raised]
        for r in sorted(found, key=lambda r: r.case.name):
            settings = [_place(*setting) for setting in r.settings]
            for config in r.configs():
                table, place = _place(r.table, config)
                where = {"table": table, "config": place, "settings": settings}
                items.append({"name": r.case.name, "dtype": dtype, **where})
    return items, faults


def chunks_of(items: Sequence[Item], jobs: int) -> list[list[Item]]:
    """For so many processes; the configs of a case in one, which computes its reference once."""
    if items and "table" in items[0]:
        by_case = itertools.groupby(items, lambda item: (item["dtype"], item["name"]))
        return [[*group] for _, group in by_case]
    return [[*items[i::jobs]] for i in range(min(jobs, len(items)))]


def run_items(items: Sequence[Item], device: torch.device) -> Iterator[Line]:
    """A line for each, in order."""
    for (name, dtype), group in itertools.groupby(items, lambda i: (i["name"], i["dtype"])):
        every_config = "table" in (same := [*group])[0]
        case = next(c for c in cases_of(device, dtype, every_config) if c.name == name)
        for item in same:
            if not every_config:
                yield _case_line(run_case(case, dtype))
                continue
            settings = tuple((table, TABLES[table].configs[i]) for table, i in item["settings"])
            reached = Reached(case, item["table"], (), settings)
            config = TABLES[item["table"]].configs[item["config"]]
            yield _config_line(all_configs.run_config(reached, config), dtype)


def failed(item: Item, failure: str) -> Line:
    """The line of an item whose process ended before its own line."""
    if "table" not in item:
        return _case_line(Result(item["name"], item["dtype"], [], failure, 0.0))
    config = TABLES[item["table"]].configs[item["config"]]
    run = all_configs.Run(item["table"], config, item["name"], 0.0, failure)
    return _config_line(run, item["dtype"])


def key_of(line: Line) -> tuple[str, ...]:
    """What a line is about."""
    if "table" not in line:
        return line["name"], line["dtype"]
    return line["table"], json.dumps(line["config"]), line["case"]


def _case_line(result: Result) -> Line:
    return {**result.as_dict(), "label": result.label, "why": result.why}


def _config_line(run: all_configs.Run, dtype: str) -> Line:
    config = None if run.config is None else run.config._asdict()
    words = ",".join(f"{name}={value}" for name, value in (config or {}).items())
    case = f"{run.case}, {dtype}"
    about = {"table": run.table, "config": config, "case": case, "share": run.share}
    label = f"{run.table} [{words}], {case}"
    return {**about, "fault": run.fault, "label": label, "why": run.fault or ""}


def _place(table: str, config: Any) -> tuple[str, int]:
    return table, TABLES[table].configs.index(config)


def main(device: torch.device, items: Sequence[Item]) -> int:
    """Run items until the device is lost."""
    with quiet_interpreter():
        for line in run_items(items, device):
            print(json.dumps(finite(line)), flush=True)
            if line["why"] and (lost := device_lost(device)) is not None:
                print(f"the device is lost: {lost}", file=sys.stderr)
                return LOST
    return 0


if __name__ == "__main__":
    sys.exit(main(torch.device(sys.argv[1]), json.loads(sys.argv[2])))
