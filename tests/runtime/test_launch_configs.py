"""ConfigTable: what is chosen, when the user's table is read, and that what ships is complete."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import fastvit_kernels as fk
from fastvit_kernels.runtime import configs as launch_configs, tuned_table
from fastvit_kernels.runtime.backend import Gpu, backend, on_absent_gpu
from fastvit_kernels.runtime.compat import FakeTensorMode
from fastvit_kernels.runtime.configs import TABLES, ConfigTable, forced, install, recording
from tests.check.all_configs import launches_left_out
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


def test_default_then_tuned_then_forced(table):
    assert table.choose(HERE, 32) == SMALL and table.choose(HERE, 128) == LARGE
    install(HERE, {("stand_in", (128,)): HUGE})
    assert table.choose(HERE, 128) == HUGE and table.choose(HERE, 64) == LARGE
    with forced("stand_in", SMALL):
        assert table.choose(HERE, 128) == SMALL
        with forced("stand_in", LARGE):
            assert table.choose(HERE, 32) == LARGE
        assert table.choose(HERE, 32) == SMALL
    assert table.choose(HERE, 128) == HUGE


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


def test_tuned_table_warning_as_error(table, monkeypatch):
    def load(gpu):
        raise UserWarning("the tuned configs are ignored")

    monkeypatch.setattr(tuned_table, "load", load)
    with pytest.raises(UserWarning, match="ignored"):
        table.choose(HERE, 128)
    assert table.choose(HERE, 128) == LARGE


def _norm(B, T, C, dtype):
    x = torch.empty(B, T, C, dtype=dtype, requires_grad=True)
    weight = torch.empty(C, requires_grad=True)
    fk.layer_norm(x, weight, torch.empty(C)).backward(torch.empty(B, T, C, dtype=dtype))


def _attend(B, T, H, D, dtype):
    qkv = torch.empty(B, T, 3, H, D, dtype=dtype, requires_grad=True)
    fk.attention(qkv).backward(torch.empty(B, T, H, D, dtype=dtype))


def _attend_masked(B, T, H, D, dtype):
    q, k, v = (torch.empty(B, H, T, D, dtype=dtype, requires_grad=True) for _ in range(3))
    mask = torch.empty(T, T, dtype=torch.bool)
    fk.scaled_dot_product_attention(q, k, v, mask).backward(torch.empty_like(q))


def _linear(M, K, N, dtype, activation):
    x = torch.empty(M, K, dtype=dtype, requires_grad=True)
    weight = torch.empty(N, K, dtype=dtype, requires_grad=True)
    residual = None if activation else torch.empty(M, N, dtype=dtype)
    y = fk.linear(x, weight, activation=activation, residual=residual)
    y.backward(torch.empty_like(y))


def _mlp(M, C, hidden, dtype, grad):
    x = torch.empty(M, C, dtype=dtype, requires_grad=grad)
    fc1 = torch.empty(hidden, C, dtype=dtype, requires_grad=grad)
    fc2 = torch.empty(C, hidden, dtype=dtype, requires_grad=grad)
    y = fk.mlp(x, fc1, None, fc2, None)
    if grad:
        y.backward(torch.empty_like(y))


def _patches(B, size, patch, C, dtype):
    images = torch.empty(B, 3, size, size, dtype=dtype, requires_grad=True)
    weight = torch.empty(C, 3, patch, patch, dtype=dtype, requires_grad=True)
    y = fk.patch_embed(images, weight, torch.empty(C, dtype=dtype, requires_grad=True))
    y.backward(torch.empty_like(y))


def _calls():
    """Fake tensors take no memory: any size is free. Small, odd, huge; the widths of ViTs."""
    for dtype in (torch.float32, torch.bfloat16):
        for C in (8, 100, 192, 384, 768, 1280, 3000, 65536):
            yield _norm, (2, 197, C, dtype)
        for T, dims in (
            (1, (64,)),
            (50, (64,)),
            (100, (32, 64)),
            (197, (16, 64, 72, 80, 128)),
            (256, (64,)),
            (257, (64, 96)),
            (577, (32, 64, 104, 256)),
            (1025, (64, 160)),
        ):
            for D in dims:
                yield _attend, ((1, T, 3, D, dtype) if D in (72, 96) else (256, T, 12, D, dtype))
        yield _attend_masked, (2, 50, 3, 64, dtype)
        yield _attend_masked, (2, 257, 3, 256, dtype)
        for M, C in ((1, 192), (50, 64), (1576, 100), (1576, 256), (50432, 768), (10**6, 1280)):
            yield _linear, (M, 4 * C, C, dtype, None)
            yield _mlp, (M, C, 4 * C, dtype, False)
            yield _mlp, (M, C, 4 * C, dtype, True)
        yield _linear, (50432, 192, 768, dtype, "gelu")
        for B, size, patch, C in ((1, 32, 4, 48), (64, 224, 16, 768), (8, 518, 14, 1024)):
            yield _patches, (B, size, patch, C, dtype)


GPUS = [Gpu(t.name, t.num_sms, t.shared_limit) for t in TARGETS.values()][::2]
GPUS += [Gpu("cpu", 2, 2**20)]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
def test_every_default_ships_and_fits(gpu):
    """Whatever the op is asked on any target, the default is one of the configs that are tested."""
    wrong = []
    with (
        on_absent_gpu(gpu),
        launches_left_out(),
        backend("triton"),
        recording() as choices,
        FakeTensorMode(),
        _RunLaunchers(),
    ):
        for call, arguments in _calls():
            call(*arguments)
    for choice in choices:
        table = TABLES[choice.table]
        config = table.default(gpu, *choice.key)
        if config not in table.configs or not table.fits(gpu, config, *choice.key):
            wrong.append((choice.table, choice.key, config))
    assert not wrong, f"{len(wrong)} of {len(choices)}: {wrong[:5]}"
    # "cpu" and targets without a route to a kernel never ask that kernel's table
    assert {choice.table for choice in choices} >= {"layer_norm_fwd", "layer_norm_bwd"}
