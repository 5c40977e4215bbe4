"""memory="low" and drop_path="skip": the same step, and only where it is provably that."""

from __future__ import annotations

import copy

import pytest
import torch
from rewritten import compiled, fired, rules_of, step
from swapped import images, vit
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastvit_kernels.fuse.backend import Options
from fastvit_kernels.runtime.backend import backend

C, T, BATCH = 16, 5, 8
LOW, SUM, SKIP = "memory low", "memory low, sum", "drop_path skip"


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_options_that_there_are_not():
    with pytest.raises(ValueError, match="memory must be one of"):
        Options.read({"memory": "lower"})
    with pytest.raises(ValueError, match="drop_path must be one of"):
        Options.read({"drop_path": "maybe"})


# ---------------------------------------------------------------------------------- memory="low"


def test_memory_low_gives_the_same_bits():
    """By the kernels: what is made again has the bits of what was kept."""
    model, x = vit(), images()
    steps = []
    with backend("triton"):
        for memory in ("default", "low"):
            torch._dynamo.reset()
            m = copy.deepcopy(model)
            steps.append(step(compiled(m, memory=memory), m, [x]))
    assert rules_of(m)[LOW] == 4 and rules_of(m)[SUM] == 2
    (results, grads), (wanted, wanted_grads) = steps
    for a, b in zip((*results, *grads), (*wanted, *wanted_grads), strict=True):
        assert torch.equal(a, b)


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


def tokens():
    return torch.randn(BATCH, T, C)


def same_with_kernels(module, x, **options):
    host = copy.deepcopy(module)
    with backend("triton"):
        results, grads = step(compiled(module, **options), module, [x])
    wanted, wanted_grads = step(host, host, [x])
    torch.testing.assert_close(results, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-3, atol=1e-4)
    return rules_of(module)


@pytest.mark.parametrize("norm", [nn.LayerNorm, lambda C: nn.RMSNorm(C, eps=1e-6)])
def test_memory_low_of_both_norms(norm):
    rules = same_with_kernels(Norms(block, norm), tokens(), memory="low")
    assert (rules[LOW], rules[SUM]) == (2, 1)


def norms_read_by_others(m, x):
    y = m.norms[0](x)
    return x + m.fc(y), y.mean()


def test_memory_low_keeps_a_norm_that_others_read():
    rules = same_with_kernels(Norms(norms_read_by_others), tokens(), memory="low")
    assert rules[LOW] == 0


def test_memory_low_inside_a_callers_hooks():
    """A caller's offload sees what the ops save, and gives it back."""
    module, x, packed = Norms(block), tokens(), []

    def pack(t):
        packed.append(t.shape)
        return t.clone()

    host = copy.deepcopy(module)
    call = compiled(module, memory="low")

    def offloaded(x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            return call(x)

    with backend("triton"):
        results, grads = step(offloaded, module, [x])
    wanted, wanted_grads = step(host, host, [x])
    torch.testing.assert_close(results, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads, wanted_grads, rtol=1e-3, atol=1e-4)
    assert packed


def test_memory_low_with_checkpoints():
    def spell(m, x):
        x = checkpoint(block, m, x, use_reentrant=False)
        return block(m, x)

    rules = same_with_kernels(Norms(spell), tokens(), memory="low")
    assert rules[LOW] == 2  # a checkpoint keeps nothing of its body


def test_an_error_inside_leaves_no_hooks_behind(monkeypatch):
    from fastvit_kernels.ops import linear

    module, x = Norms(block), tokens()
    call = compiled(module, memory="low")
    with backend("triton"):
        call(x)

        def full(*args):
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(linear, "_decide", full)
            with pytest.raises(MemoryError):
                call(x)
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_parameter_changed_before_the_backward_is_said():
    module, x = Norms(block), tokens()
    with backend("triton"):
        y = compiled(module, memory="low")(x)
        with torch.no_grad():
            module.norms[0].weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"in ?place"):
            y.sum().backward()


# ------------------------------------------------------------------------------ drop_path="skip"


KEEP = 0.5


def drawn(x):
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(KEEP)
    return mask


def timms(x):
    return x * drawn(x).div_(KEEP)


def scaled_out_of_place(x):
    return (drawn(x) / KEEP) * x


def transformers_(x):
    mask = torch.floor(torch.rand((x.shape[0], 1, 1), dtype=x.dtype, device=x.device) + KEEP)
    return x.div(KEEP) * mask


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


def skips(module, x):
    torch._dynamo.reset()
    y = compiled(module, drop_path="skip")(x)
    return y, rules_of(module)[SKIP]


@pytest.mark.parametrize("draw", [timms, scaled_out_of_place, transformers_])
def test_skip_keeps_a_fixed_count_and_scales_it(draw):
    module, x = Deep(draw), tokens()
    y, times = skips(module, x)
    assert times == 1
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


@pytest.mark.parametrize("draw", [timms, scaled_out_of_place, transformers_])
def test_masks_are_the_hosts_own_draws(draw):
    rules = fired(Deep(draw).double(), tokens().double())
    assert rules["residual and row_scale"] == 1


def test_mask_is_the_default():
    model = vit(drop_path_rate=0.5).train()
    compiled(model)(images())
    assert rules_of(model)[SKIP] == 0


def unscaled(x):
    return x * drawn(x)


def other_scale(x):
    return x * drawn(x).div_(KEEP / 2)


def rounded_otherwise(x):
    mask = torch.rand((x.shape[0], 1, 1), dtype=x.dtype) + KEEP
    return x.div(KEEP) * mask.round()


def half_of_it(x):
    mask = torch.floor(torch.rand((x.shape[0], 1, 1), dtype=x.dtype) * 2)
    return x.div(KEEP) * mask


def by_token(x):
    return x * x.new_empty((*x.shape[:-1], 1)).bernoulli_(KEEP).div_(KEEP)


def once_for_all(x):
    return x * x.new_empty((1, 1, 1)).bernoulli_(KEEP).div_(KEEP)


def of_given(x):
    return x * torch.full((x.shape[0], 1, 1), 0.3).bernoulli().div_(KEEP)


def plain_dropout(x):
    return nn.functional.dropout(x, KEEP, True)


def shared_mask(m, x):
    mask = drawn(x).div_(KEEP)
    return x + m.fc(m.norm(x)) * mask, mask.sum()


def other_branch(m, x):
    return x + timms(m.fc(x))


def other_residual(m, x):
    return x * 2 + timms(m.fc(m.norm(x)))


def branch_read_twice(m, x):
    y = m.norm(x)
    return x + timms(m.fc(y)) + y


def samples_mix(m, x):
    return x + timms(m.fc(m.norm(x).flip(0)))


def of_each_sample(m, x):
    return x + timms(m.fc(m.norm(x) * m.scale))


LOOK_ALIKES = [
    unscaled,
    rounded_otherwise,
    half_of_it,
    other_scale,
    by_token,
    once_for_all,
    of_given,
    plain_dropout,
]
SPELLINGS = [
    shared_mask,
    other_branch,
    other_residual,
    branch_read_twice,
    samples_mix,
    of_each_sample,
]


@pytest.mark.parametrize("draw", LOOK_ALIKES)
def test_other_draws_stay(draw):
    assert fired(Deep(draw).double(), tokens().double(), drop_path="skip")[SKIP] == 0


@pytest.mark.parametrize("spell", SPELLINGS)
def test_other_branches_stay(spell):
    module = Deep(None, spell).double()
    assert fired(module, tokens().double(), drop_path="skip")[SKIP] == 0
