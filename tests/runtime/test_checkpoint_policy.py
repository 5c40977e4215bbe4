"""`checkpoint_policy`: attention's forward runs once, the gradients are those without a checkpoint,
and no more is kept than what the page counts."""

from __future__ import annotations

import copy
import gc
import warnings
from collections import Counter

import pytest
import torch
from numerics import DEVICE
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import fastvit_kernels as fk
from fastvit_kernels.runtime.compat import TorchDispatchMode, version_of
from tests.model_coverage.compare import randomize

DEPTH, TOKENS, C, HEADS = 2, 2 * 10, 64, 2  # of the small model and its two images
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


def images():
    return torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def train_step(model):
    """Output and gradients of a training step."""
    model.zero_grad()
    y = model(images())
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)).sum().backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_same_step(actual, wanted):
    torch.testing.assert_close(actual[0], wanted[0], rtol=2e-5, atol=2e-5)
    assert actual[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        scale = max(1.0, grad.abs().max().item())
        torch.testing.assert_close(actual[1][name], grad, rtol=2e-4, atol=2e-5 * scale, msg=name)


def built(kind):
    name = "vit_base_patch16_224"
    sizes = dict(img_size=48, embed_dim=C, depth=DEPTH, num_heads=HEADS, num_classes=7)
    if kind == "ours":
        return randomize(fk.create_vit(name, **sizes)).to(DEVICE)
    return randomize(pytest.importorskip("timm").create_model(name, **sizes)).to(DEVICE)


def checkpointed(model, **options):
    """A copy of it, with a checkpoint around each block."""
    model = copy.deepcopy(model)

    def run(x):
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, **options)
        return x

    model.blocks.forward = run
    return model


def kept(model):
    """Bytes that a forward leaves allocated, in blocks' outputs, (B, T, C) in fp32."""
    model(images())  # what is made once
    gc.collect()  # else what another test has left may be freed meanwhile, and counts
    gc.disable()
    with profile(profile_memory=True) as profiled:
        y = model(images())
    gc.enable()
    del y
    return sum(e.self_cpu_memory_usage for e in profiled.key_averages())


@pytest.mark.parametrize("name", ["attention", "matmul"])
@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_runs_once(kind, name):
    model = built(kind)
    wanted = train_step(model)
    ran = {}
    for policy in (None, fk.checkpoint_policy(name)):
        options = {"context_fn": policy.context_fn} if policy else {}
        with Ran() as ran[policy is not None]:
            got = train_step(checkpointed(model, **options))
        assert_same_step(got, wanted)
        for grad, other in zip(got[1].values(), wanted[1].values(), strict=True):
            assert torch.equal(grad, other) or kind == "host"  # the same kernels, bit for bit
    plain, kept_some = ran[False], ran[True]
    assert plain.of(ATTENTION[kind]) == 2 * DEPTH
    assert kept_some.of(ATTENTION[kind]) == DEPTH
    if kind == "host":
        products = {"attention": 4 * DEPTH - DEPTH, "matmul": 0}[name]  # fc2 is not run again
        assert kept_some.of("addmm") == 4 * DEPTH + 1 + products
    else:
        products = {"attention": 2 * DEPTH, "matmul": DEPTH}[name]  # proj and fc1; fc1
        assert kept_some.of("::linear_fwd") == 3 * DEPTH + products
        projections = {"attention": 2 * DEPTH, "matmul": DEPTH}[name]
        assert kept_some.of("qkv_projection_fwd") == projections


@pytest.mark.interpreter
@pytest.mark.skipif(
    version_of(torch.__version__) >= (2, 14),
    reason="its profiler gives another sum at each call; test_traffic.py counts on fake tensors",
)
@pytest.mark.parametrize("kind", ["ours"])
def test_what_is_kept(kind):
    model = built(kind)
    nothing, attention, matmul = (
        kept(checkpointed(model, **options))
        for options in (
            {},
            *({"context_fn": fk.checkpoint_policy(n).context_fn} for n in ("attention", "matmul")),
        )
    )
    # our rows of lse begin at multiples of four
    out, lse = 4 * TOKENS * C, 4 * HEADS * (TOKENS if kind == "host" else 2 * 12)
    assert attention - nothing == DEPTH * (out + lse)
    # qkv, proj; the host also keeps fc1 before its activation, and fc2's
    assert matmul - attention == DEPTH * out * (3 + 1 + (4 + 1) * (kind == "host"))


@pytest.mark.parametrize("kind", ["ours"])
def test_compiled(kind):
    model = built(kind)
    wanted = train_step(model)
    policy = fk.checkpoint_policy("attention")
    compiled = torch.compile(
        checkpointed(model, context_fn=policy.context_fn),
        fullgraph=True,
        backend="aot_eager_decomp_partition",
    )
    train_step(compiled)
    with profile() as profiled:
        y = compiled(images())
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        compiled.zero_grad()
        (y * upstream).sum().backward()
    got = y.detach(), {n.removeprefix("_orig_mod."): p.grad for n, p in compiled.named_parameters()}
    assert_same_step(got, wanted)
    names = [e.name for e in profiled.events() or () if "backward" not in e.name]
    assert sum(ATTENTION[kind] in name for name in names) == DEPTH


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
