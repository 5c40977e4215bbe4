"""`checkpoint_policy`: attention's forward runs once, the gradients are those without a checkpoint.
What is kept, tests/traffic counts."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from calls import Calls
from model_parity import random_images, randomise
from tiny_calls import assert_same_bits, train_step
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import fastvit_kernels as fk

DEPTH = 2
ATTENTION = {"host": "_scaled_dot_product", "ours": "attention_fwd"}


def step(model):
    return train_step(model, random_images(height=48))


def count(calls, part):
    """Of forwards; below a checkpoint's own mode, so that what that keeps is not seen."""
    names = [func.name() for func, _, _ in calls.made]
    return sum(part in name and "backward" not in name for name in names)


def built(kind):
    name = "vit_base_patch16_224"
    sizes = dict(img_size=48, embed_dim=64, depth=DEPTH, num_heads=2, num_classes=7)
    if kind == "ours":
        return randomise(fk.create_vit(name, **sizes)).train()
    return randomise(pytest.importorskip("timm").create_model(name, **sizes)).train()


def checkpointed(model, policy=None):
    """A copy of it, with a checkpoint around each block."""
    model = copy.deepcopy(model)
    options = {"context_fn": fk.checkpoint_policy(policy).context_fn} if policy else {}

    def run(x):
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, **options)
        return x

    model.blocks.forward = run
    return model


@pytest.mark.parametrize("policy", ["attention", "matmul"])
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_runs_once(kind, policy):
    model = built(kind)
    wanted = step(model)
    with Calls() as plain:
        step(checkpointed(model))
    with Calls() as kept:
        got = step(checkpointed(model, policy))
    if kind == "ours":  # the same kernels
        assert_same_bits(got, wanted)
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=1e-5)
    assert count(plain, ATTENTION[kind]) == 2 * DEPTH
    assert count(kept, ATTENTION[kind]) == DEPTH
    if kind == "host":
        products = {"attention": 4 * DEPTH - DEPTH, "matmul": 0}[policy]  # fc2 is not run again
        assert count(kept, "addmm") == 4 * DEPTH + 1 + products
    else:
        products = {"attention": 2 * DEPTH, "matmul": DEPTH}[policy]  # proj and fc1; fc1
        assert count(kept, "::linear_fwd") == 3 * DEPTH + products
        assert count(kept, "qkv_projection_fwd") == products


def test_checkpoint_policy_errors():
    with pytest.raises(ValueError, match=r"one of \['attention', 'matmul'\], got 'atention'"):
        fk.checkpoint_policy("atention")
    mlp = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    x = torch.randn(3, 8, requires_grad=True)

    def run(name):
        policy = fk.checkpoint_policy(name)
        for _ in range(3):
            checkpoint(mlp, x, use_reentrant=False, context_fn=policy.context_fn).sum().backward()

    with pytest.warns(UserWarning, match=r"\('attention'\): the first .* no .* attention") as said:
        run("attention")
    assert len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run("matmul")


def test_compiled():
    """Attention's forward runs once in a compiled step, too."""
    model = built("ours")
    wanted = step(model)
    compiled = torch.compile(
        checkpointed(model, "attention"), fullgraph=True, backend="aot_eager_decomp_partition"
    )
    step(compiled)
    with profile() as profiled:
        got = step(compiled)
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=1e-5)
    assert sum(ATTENTION["ours"] in e.name for e in profiled.events() or ()) == DEPTH
