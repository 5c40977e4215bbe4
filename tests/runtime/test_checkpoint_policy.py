"""`checkpoint_policy`: attention's forward runs once, the gradients are those without a checkpoint.
What is kept, tests/traffic counts."""

from __future__ import annotations

import copy
import warnings
from collections import Counter

import pytest
import torch
from model_parity import randomise
from numerics import rand
from tiny_calls import assert_same_bits
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import fastvit_kernels as fk
from fastvit_kernels.runtime.compat import TorchDispatchMode

DEPTH = 2
ATTENTION = {"host": "_scaled_dot_product", "ours": "attention_fwd"}


class Ran(TorchDispatchMode):
    """Counts operators; below a checkpoint's own mode, so that what that keeps is not seen."""

    def __init__(self):
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))

    def of(self, part: str) -> int:
        return sum(n for name, n in self.names.items() if part in name and "backward" not in name)


def train_step(model):
    """Output and gradients of a training step."""
    model.zero_grad()
    y = model(rand(2, 3, 48, 48, grad=False))
    (y * rand(*y.shape, seed=1, grad=False)).sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


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
    wanted = train_step(model)
    with Ran() as plain:
        train_step(checkpointed(model))
    with Ran() as kept:
        got = train_step(checkpointed(model, policy))
    if kind == "ours":  # the same kernels
        assert_same_bits(got, wanted)
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=1e-3)
    assert plain.of(ATTENTION[kind]) == 2 * DEPTH
    assert kept.of(ATTENTION[kind]) == DEPTH
    if kind == "host":
        products = {"attention": 4 * DEPTH - DEPTH, "matmul": 0}[policy]  # fc2 is not run again
        assert kept.of("addmm") == 4 * DEPTH + 1 + products
    else:
        products = {"attention": 2 * DEPTH, "matmul": DEPTH}[policy]  # proj and fc1; fc1
        assert kept.of("::linear_fwd") == 3 * DEPTH + products
        assert kept.of("qkv_projection_fwd") == products


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
    wanted = train_step(model)
    compiled = torch.compile(
        checkpointed(model, "attention"), fullgraph=True, backend="aot_eager_decomp_partition"
    )
    train_step(compiled)
    with profile() as profiled:
        got = train_step(compiled)
    torch.testing.assert_close(got, wanted, rtol=2e-4, atol=1e-3)
    assert sum(ATTENTION["ours"] in e.name for e in profiled.events() or ()) == DEPTH
