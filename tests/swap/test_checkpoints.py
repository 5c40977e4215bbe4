"""Swapped models under the checkpoints that hosts have, in both modes, with what is asked for
beside them: hooks, hidden states, autocast, samples that DropPath skips."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import timm.layers
import torch
from swapped_models import TimmLike, assert_same_step, images, timm_model
from timm.layers.config import use_reentrant_ckpt
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastvit_kernels import swap_in
from tests.model_coverage.compare import randomize

BESIDE = ("hook", "hidden states", "autocast", "skip")


class Hidden(nn.Module):
    """Gives what each block gives, beside the output, added up."""

    def __init__(self, model, host):
        super().__init__()
        self.model, self.host = model, host

    def forward(self, images):
        if self.host == "transformers":
            found = self.model.model(pixel_values=images, output_hidden_states=True)
            return torch.stack(found.hidden_states).sum(0) + found.last_hidden_state
        x, middle = self.model.forward_intermediates(images)
        return x.mean(1)[..., None, None] + torch.stack(middle).sum(0)


def built(host, beside):
    rate = dict(drop_path_rate=0.5)
    model = TimmLike("dinov2", **rate) if host == "transformers" else timm_model(**rate)
    randomize(model)
    return Hidden(model, host) if "hidden states" in beside else model


def with_checkpoints(model, host, use_reentrant):
    inner = model.model if isinstance(model, Hidden) else model
    if host == "transformers":
        inner.model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
    elif host == "timm":
        inner.set_grad_checkpointing()
    else:
        for block in inner.blocks:
            block.forward = lambda *given, run=block.forward: checkpoint(
                run, *given, use_reentrant=use_reentrant
            )
    return model


def step(model, beside):
    """A step on a batch of which some samples are dropped, and what a hook has seen."""
    model.train().zero_grad()
    seen, handles = [], []
    if "hook" in beside:
        for name, module in model.named_modules():
            if name.endswith(("attn.proj", "attention.output.dense", "norm2")):
                handles.append(module.register_forward_hook(lambda m, x, y: seen.append(y.shape)))
    torch.manual_seed(5)
    with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in beside):
        y = model(images(4))
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    (y * upstream).sum().backward()
    for handle in handles:
        handle.remove()
    assert bool(seen) == ("hook" in beside)
    return y.detach(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("beside", [*((b,) for b in BESIDE), BESIDE])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("host", ["timm", "torch", "transformers"])
def test_a_step_is_that_without_checkpoints(host, use_reentrant, beside, request):
    request.addfinalizer(partial(timm.layers.set_reentrant_ckpt, use_reentrant_ckpt()))
    timm.layers.set_reentrant_ckpt(use_reentrant)
    model = built(host, beside)
    plain = copy.deepcopy(model)
    skips = {"drop_path": "skip"} if "skip" in beside else {}
    swap_in(model, **skips)
    swapped = step(model, beside)
    got = step(with_checkpoints(model, host, use_reentrant), beside)
    # a reentrant one runs its first forward without gradients: in 16 bits by another kernel
    other = use_reentrant and "autocast" in beside
    assert_same_step(got, swapped, 3e-2 if other else 1e-6)
    assert other or torch.equal(got[0], swapped[0])
    if not skips and "autocast" not in beside:  # by the host's own numbers
        assert_same_step(got, step(with_checkpoints(plain, host, use_reentrant), beside))
