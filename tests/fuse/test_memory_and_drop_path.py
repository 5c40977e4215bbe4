"""memory="low" and drop_path="skip": the same step, and only where it is provably that."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from swapped import images, vit
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fastvit_kernels.fuse.backend import fastvit_kernels
from fastvit_kernels.fuse.report import reports_of
from fastvit_kernels.ops import linear
from fastvit_kernels.runtime.backend import backend
from tests.fuse.hosts import BY_KERNELS, Host, check

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

C, T, BATCH = 16, 5, 8
LOW, SUM, SKIP = "memory low", "memory low, sum", "drop_path skip"


def compiled(module, **options):
    options = {"compiler": "eager", **options}
    return torch.compile(module, backend=fastvit_kernels, options=options, fullgraph=True)


def rules_of(module) -> Counter:
    return sum((r.rules for r in reports_of(module)), Counter())


def tokens():
    return torch.randn(BATCH, T, C)


def rules_beside_the_host(module, options, **how):
    copied = partial(copy.deepcopy, module)
    how |= dict(module=copied, options=options)
    return check(Host("options", None, lambda: (tokens(),), **how)).rules


# ---------------------------------------------------------------------------------- memory="low"


def test_memory_low_gives_the_same_bits():
    """By the kernels: what is made again has the bits of what was kept. Inside a caller's hooks,
    too: an offload sees what the ops save, and gives it back."""
    model, packed = vit(1), []

    def offload(t):
        packed.append(t.shape)
        return t.clone()

    def stepped(memory, hooks=nullcontext):
        torch._dynamo.reset()
        m, x = copy.deepcopy(model), images().requires_grad_()
        with hooks():
            y = compiled(m, memory=memory)(x)
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
        return rules_of(m), [y.detach(), x.grad, *(p.grad for p in m.parameters())]

    with backend("triton"):
        _, wanted = stepped("default")
        for hooks in (nullcontext, partial(saved_tensors_hooks, offload, lambda t: t)):
            rules, found = stepped("low", hooks)
            assert rules[LOW] == 2 and rules[SUM] == 1
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            assert bool(packed) == (hooks is not nullcontext)


class Norms(nn.Module):
    """Blocks of RMSNorm, or LayerNorm, and an MLP."""

    def __init__(self, spell, norm=nn.LayerNorm):
        super().__init__()
        self.norms = nn.ModuleList(norm(C) for _ in range(2))
        self.fc = nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, C), nn.GELU(), nn.Linear(C, C))
        self.spell = spell

    def forward(self, x):
        return self.spell(self, x)


def block(m, x):
    x = x + m.fc(m.norms[0](x))
    return x + m.mlp(m.norms[1](x))


def read_by_others(m, x):
    y = m.norms[0](x)
    return x + m.fc(y), y.abs().mean()


def under_a_checkpoint(m, x):  # which keeps nothing of its body
    return block(m, checkpoint(block, m, x, use_reentrant=False))


@pytest.mark.parametrize(
    ("module", "low", "sums"),
    [
        (Norms(block), 2, 1),
        (Norms(block, lambda C: nn.RMSNorm(C, eps=1e-6)), 2, 1),
        (Norms(read_by_others), 0, 0),
        (Norms(under_a_checkpoint), 2, 1),
    ],
    ids=["LayerNorm", "RMSNorm", "read by others", "under a checkpoint"],
)
def test_memory_low(module, low, sums):
    rules = rules_beside_the_host(module, dict(memory="low"), **BY_KERNELS)
    assert (rules[LOW], rules[SUM]) == (low, sums)


def test_an_error_inside_leaves_no_hooks_behind(monkeypatch):
    def full(*args):
        raise MemoryError

    call = compiled(Norms(block), memory="low")
    with backend("triton"):
        call(tokens())
        monkeypatch.setattr(linear, "_decide", full)
        with pytest.raises(MemoryError):
            call(tokens())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_parameter_changed_before_the_backward_is_said():
    module = Norms(block)
    with backend("triton"):
        y = compiled(module, memory="low")(tokens())
        with torch.no_grad():
            module.norms[0].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"in ?place"):
            y.sum().backward()


# ------------------------------------------------------------------------------ drop_path="skip"


KEEP = 0.5


def drawn(x):
    return x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(KEEP)


def timms(x):
    return x * drawn(x).div_(KEEP)


def out_of_place(x):
    return (drawn(x) / KEEP) * x


def rounded(x, round=torch.floor, shift=KEEP):
    return x.div(KEEP) * round(torch.rand((x.shape[0], 1, 1), dtype=x.dtype) + shift)


DRAWS = pytest.mark.parametrize("draw", [timms, out_of_place, rounded])  # the last: transformers'


class Deep(nn.Module):
    def __init__(self, draw, spell=None):
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(C), nn.Linear(C, C)
        self.scale = nn.Parameter(torch.randn(BATCH, 1, C))
        self.draw, self.spell = draw, spell

    def forward(self, x):
        if self.spell is not None:
            return self.spell(self, x)
        return x + self.draw(self.fc(self.norm(x)))


@DRAWS
def test_skip_keeps_a_fixed_count_and_scales_it(draw):
    module, x = Deep(draw), tokens()
    y = compiled(module, drop_path="skip")(x)
    assert rules_of(module)[SKIP] == 1
    branch = module.fc(module.norm(x))
    kept = [i for i in range(BATCH) if not torch.equal(y[i], x[i])]
    assert len(kept) == int(BATCH * KEEP)
    scale = BATCH / len(kept)
    torch.testing.assert_close(y[kept], x[kept] + scale * branch[kept], rtol=1e-4, atol=1e-4)


def test_skip_of_any_batch():
    module = Deep(timms)
    call = compiled(module, drop_path="skip")
    for batch in (4, 6, 10):  # the second call makes a graph of any batch
        x = torch.randn(batch, T, C)
        assert (call(x) != x).flatten(1).any(1).sum() == int(batch * KEEP)
    assert rules_of(module)[SKIP] == 2


def test_skip_draws_every_sample_as_often():
    module, x = Deep(timms), tokens()
    call, counts = compiled(module, drop_path="skip"), torch.zeros(BATCH)
    for _ in range(200):
        counts += (call(x) != x).flatten(1).any(1)
    assert counts.sum() == 200 * BATCH * KEEP and (counts / 200 - KEEP).abs().max() < 0.2


def test_skip_in_a_model_of_timm():
    model = vit(drop_path_rate=0.5).train()
    with backend("triton"):
        y = compiled(model, drop_path="skip", memory="low")(images(batch=4))
        y.square().mean().backward()
    rules = rules_of(model)
    assert rules[SKIP] == 2 and rules[LOW] == 4  # the first block drops nothing
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@DRAWS
def test_masks_are_the_hosts_own_draws(draw):
    assert rules_beside_the_host(Deep(draw), {})["residual and row_scale"] == 1


def scaled_by(mask):
    return lambda x: x * mask(x).bernoulli_(KEEP).div_(KEEP)


def shared_mask(m, x):
    mask = drawn(x).div_(KEEP)
    return x + m.fc(m.norm(x)) * mask, mask.sum()


def branch_read_twice(m, x):
    y = m.norm(x)
    return x + timms(m.fc(y)) + y


OTHERS = {  # draws that are no stochastic depth, and what stands around one
    "unscaled": Deep(lambda x: x * drawn(x)),
    "another scale": Deep(lambda x: x * drawn(x).div_(KEEP / 2)),
    "rounded otherwise": Deep(lambda x: rounded(x, torch.round)),
    "another rate": Deep(lambda x: rounded(x, lambda drawn: drawn.mul(2).floor(), 0.0)),
    "by token": Deep(scaled_by(lambda x: x.new_empty((*x.shape[:-1], 1)))),
    "once for all": Deep(scaled_by(lambda x: x.new_empty((1, 1, 1)))),
    "of given rates": Deep(lambda x: x * x.new_full((len(x), 1, 1), 0.3).bernoulli().div_(KEEP)),
    "dropout": Deep(lambda x: nn.functional.dropout(x, KEEP, True)),
    "a mask read twice": Deep(None, shared_mask),
    "a branch without a norm": Deep(None, lambda m, x: x + timms(m.fc(x))),
    "another residual": Deep(None, lambda m, x: x * 2 + timms(m.fc(m.norm(x)))),
    "a branch read twice": Deep(None, branch_read_twice),
    "samples mixed": Deep(None, lambda m, x: x + timms(m.fc(m.norm(x).flip(0)))),
    "a table of samples": Deep(None, lambda m, x: x + timms(m.fc(m.norm(x) * m.scale))),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_no_stochastic_depth_stays(case):
    assert rules_beside_the_host(OTHERS[case], dict(drop_path="skip"))[SKIP] == 0
