"""ConfigTable: what is chosen, when the user's table is read, and that what ships is complete."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import pytest
import torch

from fastvit_kernels.accuracy.cases import OPS
from fastvit_kernels.accuracy.op import SMALL as SMALL_VIT, Sizes
from fastvit_kernels.runtime import configs as launch_configs, tuned_table
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.compat import FakeTensorMode
from fastvit_kernels.runtime.configs import TABLES, ConfigTable, forced, install
from tests.check.all_configs import choices_of
from tests.machine.aot import TARGETS, _RunLaunchers


class Config(NamedTuple):
    block: int
    num_warps: int


SMALL, LARGE, HUGE = Config(16, 4), Config(64, 8), Config(128, 8)
HERE, THERE = Gpu("sm_90", 132, 2**17, "GPU A"), Gpu("sm_90", 132, 2**17, "GPU B")
ABSENT = Gpu("sm_90", 132, 2**17)


@pytest.fixture
def table(monkeypatch):
    """A table that takes LARGE from size 64 on; HUGE needs size 128."""
    monkeypatch.setattr(launch_configs, "_on_change", list(launch_configs._on_change))
    monkeypatch.setattr(launch_configs, "_tuned", {})
    monkeypatch.setattr(tuned_table, "load", lambda gpu: {})
    made = ConfigTable(
        "stand_in",
        [SMALL, LARGE, HUGE],
        lambda gpu, size: LARGE if size >= 64 else SMALL,
        lambda gpu, config, size: config is not HUGE or size >= 128,
    )
    yield made
    del TABLES["stand_in"]


def test_unfit_config_not_chosen(table):
    with forced("stand_in", HUGE):
        assert table.choose(HERE, 32) == SMALL and table.choose(HERE, 128) == HUGE
    install(HERE, {("stand_in", (32,)): HUGE})
    assert table.choose(HERE, 32) == SMALL
    assert table.candidates(HERE, 32) == [SMALL, LARGE]
    assert table.candidates(HERE, 128) == [LARGE, SMALL, HUGE]


def test_tuned_table_lies_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuned_table.table_path(HERE) == tmp_path / "fastvit_kernels/gpu-a-sm_90.json"


def test_tuned_table_read_once(table, monkeypatch):
    read = []

    def load(gpu):
        read.append(gpu.name)
        return {("stand_in", (128,)): HUGE}

    monkeypatch.setattr(tuned_table, "load", load)
    assert table.choose(ABSENT, 128) == LARGE and not read  # compiling for a GPU that is not there
    assert table.choose(HERE, 128) == HUGE and table.choose(HERE, 64) == LARGE
    assert table.choose(THERE, 128) == HUGE
    assert read == ["GPU A", "GPU B"]
    install(HERE, None)
    assert table.choose(HERE, 128) == HUGE and read == ["GPU A", "GPU B", "GPU A"]


# From two tokens to an image of 1,025; heads of the widths that kernels tell apart.
SIZES = [SMALL_VIT] + [
    Sizes(B, T, H * D, H, min(4 * H * D, 4096), (side, side), patch)
    for B, T, H, D, side, patch in (
        (1, 2, 3, 64, 32, 4),
        (256, 257, 16, 80, 224, 14),
        (2, 577, 4, 256, 384, 16),
        (8, 1025, 24, 128, 518, 14),
    )
]


NAMES = ("sm_80", "sm_90", "sm_100", "sm_120")
GPUS = [Gpu(name, TARGETS[name].num_sms, TARGETS[name].shared_limit) for name in NAMES]
GPUS += [Gpu("cpu", 2, 2**20)]


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
def test_every_default_ships_and_fits(gpu):
    """Whatever the op is asked on any target, the default is one of the configs that are tested."""
    wrong, choices = [], set()
    with on_absent_gpu(gpu), FakeTensorMode(), _RunLaunchers():  # of any size: they take no memory
        fp32, bf16 = (torch.float32,), (torch.bfloat16,)
        for sizes, dtype in (*product(SIZES, bf16), *product(SIZES[::2], fp32)):
            for op in OPS.values():
                for example in op.check(sizes)[:2]:
                    choices.update(choices_of(op.case(example, torch.device("cpu"), dtype)))
    for choice in choices:
        table = TABLES[choice.table]
        config = table.default(gpu, *choice.key)
        if config not in table.configs or not table.fits(gpu, config, *choice.key):
            wrong.append((choice.table, choice.key, config))
    assert not wrong, f"{len(wrong)} of {len(choices)}: {wrong[:5]}"
    # "cpu" and targets without a route to a kernel never ask that kernel's table
    assert {choice.table for choice in choices} >= {"layer_norm_fwd", "layer_norm_bwd"}
