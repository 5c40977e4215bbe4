"""Every launch config that ships, forced, by the 2x rule and bit for bit.

Without a GPU each config runs in one case, twice; which one goes round from config to config. On a
GPU each runs in every case that it fits, at real sizes.
"""

from __future__ import annotations

import functools

import pytest
import torch
from numerics import DEVICE

from fastvit_kernels.runtime.configs import TABLES
from fastvit_kernels.runtime.dtypes import DTYPES
from tests.check import all_configs
from tests.check.config_cases import config_cases

SHIPPED = [
    (table.name, config)
    for table in TABLES.values()
    for config in table.configs
    if getattr(config, "route", "") != "gluon"  # it has no interpreter: machine/device
]


def _id(value):
    if isinstance(value, str):
        return value
    return "-".join(f"{name}={x}" for name, x in value._asdict().items() if x) or "none"


@functools.cache
def _reached(dtype):
    """How the small cases of a dtype reach each table; made once, with their references."""
    return all_configs.reach(config_cases(False, DEVICE, DTYPES[dtype]))[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test below runs it at real sizes")
@pytest.mark.parametrize(("table", "config"), SHIPPED, ids=_id)
def test_config_in_the_interpreter(table, config):
    index = SHIPPED.index((table, config))
    dtypes = ("fp32", "fp16") if index % 2 else ("fp16", "fp32")
    fitting = ([r for r in _reached(d) if r.table == table and r.fits(config)] for d in dtypes)
    runs = next(filter(None, fitting), [])
    assert runs, "no case forces this config: give its op one in tests/check/config_cases.py"
    run = all_configs.run_config(runs[index % min(len(runs), 4)], config)
    assert run.fault is None, run.case
    assert 0 < run.share <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("index", range(len(config_cases(True, DEVICE, torch.float32))))
def test_configs_on_gpu(index, dtype):
    """By case, so that few processes compute its float64 reference."""
    case = config_cases(True, DEVICE, DTYPES[dtype])[index]
    reached, faults = all_configs.reach([case])
    pairs = [(r, c) for r in reached for c in r.configs()]
    runs = [all_configs.run_config(r, c, repeats=3) for r, c in pairs]
    wrong = [f"{run.table} {run.config}: {run.fault}" for run in runs if run.fault is not None]
    assert not faults
    assert not wrong, case.name + "\n" + "\n".join(wrong)
