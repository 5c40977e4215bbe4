"""Norms that hand their input on, and norms under autocast."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from rewritten import fired
from torch import nn

from fastvit_kernels.runtime.backend import backend

C, T, BATCH = 16, 5, 3
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
        self.double()

    def forward(self, x):
        return self.spell(self, x)


def tokens():
    return torch.randn(BATCH, T, C, dtype=torch.double)


def rms(C):
    return nn.RMSNorm(C, eps=1e-6)


def twice(m, x):
    x = x + m.fc(m.norm(x))
    return x + m.fc2(m.norm2(x))


def parallel(m, x):
    return x + m.fc(m.norm(x)) + m.fc2(m.norm2(x))


HANDED_ON = [
    (lambda m, x: x + m.fc(m.norm(x)), 1),
    (lambda m, x: m.fc(m.norm(x)) + x, 1),
    (twice, 2),
    (parallel, 1),
    (lambda m, x: x + m.drop(m.fc(m.norm(x))), 1),  # a plain sum
    (lambda m, x: x + F.relu(m.norm(x)), 1),
    (lambda m, x: (x + m.fc(m.norm(x)), x, x.mean()), 1),
    (lambda m, x: x + x + m.fc(m.norm(x)), 0),  # the residual is a sum of its own
]


@pytest.mark.parametrize("norm", [nn.LayerNorm, rms])
@pytest.mark.parametrize(("spell", "times"), HANDED_ON)
def test_a_residual_comes_from_the_norm_that_reads_it(spell, times, norm):
    assert fired(Block(spell, norm), tokens())["norm_and_input"] == times


def elsewhere(m, x):
    y = m.fc(m.norm(x))
    return x * 2 + y


def post_norm(m, x):
    return m.norm(x + m.fc(x))


def views(m, x):
    return (x.view(-1, C) + m.fc(m.norm(x)).view(-1, C)).view(BATCH, T, C)


def broadcast(m, x):
    return x + m.fc(m.norm(x))[:, None]


@pytest.mark.parametrize("spell", [elsewhere, post_norm, views, broadcast])
def test_what_is_no_residual_of_the_norm_stays(spell):
    assert fired(Block(spell), tokens())["norm_and_input"] == 0


def written_between(m, x):
    x = x * 1
    y = m.norm(x)
    x.add_(1)
    return x + m.fc(y)


def written_behind(m, x):
    x = x * 1
    z = x + m.fc(m.norm(x))
    x.mul_(2)
    return z, x


def written_view(m, x):
    x = x * 1
    y = m.norm(x)
    x[:, 0].zero_()
    return x + m.fc(y)


def written_before(m, x):
    x = x * 1
    x.mul_(2)
    return x + m.fc(m.norm(x))


def test_what_is_written_to_is_not_handed_on():
    assert fired(Block(written_view), tokens(), grad=False)["norm_and_input"] == 0


@pytest.mark.parametrize("spell", [written_between, written_behind, written_before])
def test_a_write_that_nobody_else_sees_is_no_write(spell):
    rules = fired(Block(spell), tokens(), grad=False)
    assert (rules["in place"], rules["norm_and_input"]) == (1, 1)


def detached(m, x):
    with torch.no_grad():
        y = m.norm(x)
    return x + m.fc(y)


def residual_detached(m, x):
    return x.detach() + m.fc(m.norm(x))


@pytest.mark.parametrize("spell", [detached, residual_detached])
def test_gradients_that_a_model_stops_stay_stopped(spell):
    assert fired(Block(spell), tokens())["norm_and_input"] == 0


def branch_detached(m, x):
    return x.detach() + m.fc(m.norm(x.detach())).detach()


def test_a_result_without_a_gradient_stays_one():
    with_kernels(branch_detached)


def test_frozen_inputs_are_handed_on():
    assert with_kernels(lambda m, x: twice(m, x.detach()))["norm_and_input"] == 2


def with_kernels(spell):
    with backend("triton"):  # theirs need a gradient wherever one of their inputs does
        return fired(Block(spell).float(), tokens().float(), rtol=1e-3, atol=1e-3)


def test_frozen_norms():
    block = Block(twice)
    block.norm.requires_grad_(False)
    assert fired(block, tokens())["norm_and_input"] == 2


# ------------------------------------------------------------------------------- under autocast


def narrow(spell, norm=nn.LayerNorm, **more):
    rules = fired(
        Block(spell, norm).float(), tokens().float(), rtol=5e-2, atol=1e-1, autocast=True, **more
    )
    return rules[NARROW]


def both_read(m, x):
    y = m.norm(x)
    return m.fc(y) + m.fc2(y)


@pytest.mark.parametrize("norm", [nn.LayerNorm, rms])
@pytest.mark.parametrize(("spell", "times"), [(twice, 2), (both_read, 1)])
def test_a_norm_that_products_read_writes_their_dtype(spell, times, norm):
    assert narrow(spell, norm) == times


def read_by_others(m, x):
    y = m.norm(x)
    return m.fc(y), y.exp()


def returned(m, x):
    y = m.norm(x)
    return m.fc(y), y


def sum_reads(m, x):
    y = m.norm(x)
    return y + m.fc(y)


def product_in_fp32(m, x):
    y = m.norm(x)
    with torch.autocast("cpu", enabled=False):
        return m.fc(y)


def as_weight(m, x):
    y = m.norm(x)[0]
    return F.linear(x, y)


@pytest.mark.parametrize(
    "spell", [read_by_others, returned, sum_reads, product_in_fp32, as_weight, post_norm]
)
def test_a_norm_that_others_read_keeps_fp32(spell):
    assert narrow(spell) == 0  # `fired` compares dtypes of results, too


def test_no_autocast_no_narrow_norm():
    assert fired(Block(twice).float(), tokens().float(), rtol=1e-4, atol=1e-4)[NARROW] == 0
