"""Ops that choose once miss nothing that changes between two calls: a model that has run before
gives what a copy gives that has not, bit for bit, and by the same operators."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from timm.models.vision_transformer import Block
from torch.profiler import profile

import fastvit_kernels as fk
from fastvit_kernels.ops.common.gemm_configs import FWD_TABLE, LIBRARY, SMALL_FP32
from fastvit_kernels.runtime import dispatch
from fastvit_kernels.runtime.configs import forced

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
T, C = 5, 16


def tokens(batch=2):
    return torch.randn(batch, T, C, generator=torch.Generator().manual_seed(batch))


def swapped():
    torch.manual_seed(0)
    model = Block(C, 2, mlp_ratio=1, qkv_bias=True)
    fk.swap_in(model)
    return model


def result(model, x=None):
    """The output and all gradients, if there are any."""
    model.zero_grad()
    y = model(tokens() if x is None else x)
    if y.requires_grad:
        y.float().square().sum().backward()
    return y.detach(), y.requires_grad, {n: p.grad for n, p in model.named_parameters()}


def freeze(model):
    model.attn.qkv.weight.requires_grad_(False)
    model.norm2.weight.requires_grad_(False)


# name -> what is done to the model before, in which context it runs, its input
CHANGES = {
    "PyTorch": (None, lambda: fk.backend("torch"), tokens()),
    "no gradients": (None, torch.no_grad, tokens()),
    "bf16": (None, lambda: torch.autocast("cpu", torch.bfloat16), tokens()),
    "fp16": (None, lambda: torch.autocast("cpu", torch.float16), tokens()),
    "another batch": (None, nullcontext, tokens(3)),
    "gradient of x": (None, nullcontext, tokens().requires_grad_()),
    "frozen": (freeze, nullcontext, tokens()),
    "in bf16": (torch.nn.Module.bfloat16, nullcontext, tokens().bfloat16()),
}


@pytest.fixture
def ran():
    """A model that has run with several batches and under bf16's autocast."""
    with fk.backend("triton"):
        model = swapped()
        for batch in (2, 4, 2):
            result(model, tokens(batch))
        with torch.autocast("cpu", torch.bfloat16):
            result(model)
        yield model


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_seen(ran, change):
    before, context, x = CHANGES[change]
    fresh = swapped()
    for model in (ran, fresh):
        if before is not None:
            before(model)
    with context():
        torch.testing.assert_close(result(ran, x), result(fresh, x), rtol=0, atol=0)


def test_another_thread_has_a_backend_of_its_own(ran):
    def run(model):
        with fk.backend("torch"):
            return result(model)

    with ThreadPoolExecutor(1) as pool:
        found = pool.map(run, (ran, swapped()))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("config", [LIBRARY, SMALL_FP32])
def test_launch_configs_are_chosen_anew(ran, config):
    with forced(FWD_TABLE.name, config):
        torch.testing.assert_close(result(ran), result(swapped()), rtol=0, atol=0)


def test_a_profiler_sees_the_operators(ran):
    seen = []
    for model in (ran, swapped()):
        result(model)
        with profile() as found:
            result(model)
        ours = (e.key for e in found.key_averages() if e.key.startswith("fastvit_kernels::"))
        seen.append(set(ours))
    assert seen[0] == seen[1] and "fastvit_kernels::linear_fwd" in seen[0]


def test_a_kind_that_is_known_is_not_looked_at(ran, monkeypatch):
    looked = []
    monkeypatch.setattr(dispatch, "grad_enabled", lambda: looked.append(1) or True)
    result(ran)
    assert not looked
    result(ran, tokens(5))
    assert looked
