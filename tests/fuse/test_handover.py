"""Norms that hand their input on, and norms under autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.fuse.hosts import BY_KERNELS, Host, check
from tests.fuse.kit import C
from tests.fuse.looks_effects import AUTOCAST

NARROW = "norm in autocast's dtype"


class Block(nn.Module):
    """Pre-norm parts, and one spelling of how they stand together."""

    def __init__(self, spell, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.norm2 = norm(C), norm(C)
        self.fc, self.fc2 = nn.Linear(C, C), nn.Linear(C, C)
        self.drop = nn.Dropout(0.5)
        self.spell = spell
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x):
        return self.spell(self, x)


def rms(C):
    return nn.RMSNorm(C, eps=1e-6)


def rules(spell, norm=nn.LayerNorm, **how):
    """Those that fired in a block that is seen to be the host."""
    result = check(Host("norms", spell, module=lambda: Block(spell, norm), **how))
    assert len(result.reports) == 1
    return result.rules


NORMS = pytest.mark.parametrize("norm", [nn.LayerNorm, rms])


def twice(m, x):
    x = x + m.fc(m.norm(x))
    return x + m.fc2(m.norm2(x))


HANDED_ON = {
    "x + branch": (lambda m, x: x + m.fc(m.norm(x)), 1),
    "branch + x": (lambda m, x: m.fc(m.norm(x)) + x, 1),
    "twice": (twice, 2),
    "parallel": (lambda m, x: x + m.fc(m.norm(x)) + m.fc2(m.norm2(x)), 1),
    "a plain sum": (lambda m, x: x + m.drop(m.fc(m.norm(x))), 1),
    "no product": (lambda m, x: x + F.relu(m.norm(x)), 1),
    "x read elsewhere": (lambda m, x: (x + m.fc(m.norm(x)), x, x.mean()), 1),
    "a sum of its own": (lambda m, x: x + x + m.fc(m.norm(x)), 0),
}


@NORMS
@pytest.mark.parametrize("case", HANDED_ON)
def test_a_residual_comes_from_the_norm_that_reads_it(case, norm):
    spell, times = HANDED_ON[case]
    assert rules(spell, norm)["norm_and_input"] == times


def detached(m, x):
    with torch.no_grad():
        y = m.norm(x)
    return x + m.fc(y)


LEFT = {
    "x elsewhere": lambda m, x: x * 2 + m.fc(m.norm(x)),
    "post-norm": lambda m, x: m.norm(x + m.fc(x)),
    "views": lambda m, x: (x.view(-1, C) + m.fc(m.norm(x)).view(-1, C)).view(x.shape),
    "broadcast": lambda m, x: x + m.fc(m.norm(x))[:, None],
    "no gradient of the norm": detached,
    "no gradient of the residual": lambda m, x: x.detach() + m.fc(m.norm(x)),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_is_no_residual_of_the_norm_stays(case):
    assert rules(LEFT[case])["norm_and_input"] == 0


def between(write):
    """A residual that is written to between its norm and its sum."""

    def spell(m, x):
        x = x * 1
        y = m.norm(x)
        write(x)
        return x + m.fc(y)

    return spell


def test_what_is_written_to_is_not_handed_on():
    spell = between(lambda x: x[:, 0].zero_())
    assert rules(spell, context=torch.no_grad)["norm_and_input"] == 0
    spell = between(lambda x: x.add_(1))  # nobody else sees it: a new tensor
    found = rules(spell, context=torch.no_grad)
    assert (found["in place"], found["norm_and_input"]) == (1, 1)


def branch_detached(m, x):
    return x.detach() + m.fc(m.norm(x.detach())).detach()


def twice_of_frozen(m, x):
    return twice(m, x.detach())


@pytest.mark.parametrize(("spell", "times"), [(branch_detached, 0), (twice_of_frozen, 2)])
def test_kernels_take_no_gradient_where_the_host_takes_none(spell, times):
    """Theirs need a gradient wherever one of their inputs does."""
    assert rules(spell, **BY_KERNELS)["norm_and_input"] == times


def test_frozen_norms():
    found = rules(twice, prepare=lambda block: block.norm.requires_grad_(False))
    assert found["norm_and_input"] == 2


# ------------------------------------------------------------------------------- under autocast


def read_by(*readers):
    """What reads a norm's output."""

    def spell(m, x):
        y = m.norm(x)
        return [reader(m, x, y) for reader in readers]

    return spell


def fc(m, x, y):
    return m.fc(y)


def in_fp32(m, x, y):
    with torch.autocast("cpu", enabled=False):
        return m.fc(y)


@NORMS
@pytest.mark.parametrize(("spell", "times"), [(twice, 2), (read_by(fc, fc), 1)])
def test_a_norm_that_products_read_writes_their_dtype(spell, times, norm):
    assert rules(spell, norm, **AUTOCAST)[NARROW] == times
    assert rules(spell, norm, dtype=torch.float32)[NARROW] == 0


KEEPS_FP32 = {
    "exp reads it": read_by(fc, lambda m, x, y: y.exp()),
    "returned": read_by(fc, lambda m, x, y: y),
    "a sum reads it": read_by(lambda m, x, y: y + m.fc(y)),
    "a product in fp32": read_by(in_fp32),
    "as a weight": read_by(lambda m, x, y: F.linear(x, y[0])),
    "post-norm": LEFT["post-norm"],
}


@pytest.mark.parametrize("case", KEEPS_FP32)
def test_a_norm_that_others_read_keeps_fp32(case):
    assert rules(KEEPS_FP32[case], **AUTOCAST)[NARROW] == 0  # dtypes of results are compared, too
