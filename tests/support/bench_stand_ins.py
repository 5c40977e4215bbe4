"""The benchmarks without a GPU: stand-in timers, tiny shapes, tasks that measure nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import measure, models, ops
from bench.measure import Bench
from bench.plan import Task
from bench.rows import Row
from fastvit_kernels.measure.timer import Step, Timer

CPU = torch.device("cpu")
TINY = ops.Shape("tiny", B=1, T=5, C=16, H=2, F=32, size=8, patch=4)
ROOFS = {"copy": 10.0, "fp32": 0.1, "bf16": 0.1}


class FakeTimer(Timer):
    """Runs everything once and says what time it took by a table, so that ratios are known."""

    def __init__(self, ms: float = 1.0):
        self.ms = ms

    def sample(self, run, count, flush):
        run()
        return [self.ms] * count

    def capture(self, step: Step):
        state = step.prepare()
        step.run(state)
        return lambda: step.run(state)

    def peak_mib(self, run):
        run()
        return 3.0

    def clear(self):
        pass


def tiny_vit(img_size, **options):
    from timm.models.vision_transformer import VisionTransformer

    sizes = dict(patch_size=16, embed_dim=16, depth=1, num_heads=2, mlp_ratio=2)
    return VisionTransformer(img_size, **sizes, **options)


def with_providers(op, make):
    """The op with what `make(shape, dtype)` gives for providers."""
    found = replace(op)
    object.__setattr__(found, "providers", make)
    return found


def bench(timer=None):
    return Bench(CPU, timer or FakeTimer(), ROOFS, lambda text: None)


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(measure, "WARM_UP", 1)
    monkeypatch.setattr(measure, "COPY_BYTES", 2**12)
    monkeypatch.setattr(measure, "MATMUL_SIDE", {"bf16": 8})
    for module in (measure, models):
        monkeypatch.setattr(module, "TURN_MS", 2.0)
    monkeypatch.setitem(models.PLAIN, "tiny", "bench_stand_ins:tiny_vit")


def stub_task(name, providers=("eager", "ours"), calls=None, run=None):
    def default(names, bench):
        if calls is not None:
            calls.append((name, tuple(names)))
        for provider in dict.fromkeys(("eager", *names)):
            yield Row("mlp", provider, name, "bf16", "bwd", ms=1.0)

    keys = tuple(("mlp", p, name, "bf16", "bwd") for p in providers)
    return Task((0, 0), name, keys, run or default)
