"""Recognised blocks that know of positions, see windows, or leave samples out."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from numerics import DEVICE
from outside import dino, positions
from test_recognise import assert_block_level, assert_same, ran  # noqa: F401
from torch import nn

from fastvit_kernels import backend, status, swap_in
from fastvit_kernels.swap import plans
from fastvit_kernels.swap.hosts.block import Block
from fastvit_kernels.swap.hosts.fused import Fused
from tests.model_coverage.compare import randomize


@pytest.fixture(autouse=True)
def _torch_backend():
    with backend("torch"):
        yield


BEIT = positions.BeitBlock
TOKENS, GRID, CHANNELS = (3, 6, 32), (2, 4, 5, 32), (2, 32, 4, 5)
HOSTS = {
    "beit": (BEIT, TOKENS),
    "eva": (partial(BEIT, positions.EvaAttention), TOKENS),
    "sam_windows": (partial(positions.GridBlock, 3, (3, 3)), GRID),
    "sam_global": (partial(positions.GridBlock, 0, (4, 5)), GRID),
    "vitdet": (partial(positions.GridBlock, 3, channels=True), CHANNELS),
    "dinov2_samples": (partial(dino.Block, drop_path=0.4), (5, 6, 32)),
}


def made(make):
    torch.manual_seed(0)
    return randomize(make())


def step(module, shape, training, *others):
    """Outputs and gradients of a step, by name."""
    module.zero_grad()
    module.train(training)
    torch.manual_seed(0)
    p = next(module.parameters())
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(p).requires_grad_()
    others = [o.detach().clone().to(p).requires_grad_() for o in others]
    y = module(x, *others)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    found = {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in module.named_parameters()}
    return found | {f"argument {i}": o.grad for i, o in enumerate(others)}


@pytest.mark.parametrize("name", HOSTS)
def test_a_block_with_positions_runs_fused(name, ran):  # noqa: F811
    make, shape = HOSTS[name]
    module = made(make).double()
    host = copy.deepcopy(module)
    assert_block_level(swap_in(module))
    ran.clear()
    for training in (True, False):
        assert_same(step(module, shape, training), step(host, shape, training), 1e-9)
    assert len(ran) >= 2


@pytest.mark.parametrize("name", ["beit", "eva", "sam_windows"])
def test_positions_through_the_kernels(name):
    make, shape = HOSTS[name]
    module = made(make).to(DEVICE)
    host = copy.deepcopy(module).double()
    assert swap_in(module).level == "block"
    wanted = step(host, shape, False)
    with backend("triton"):
        actual = step(module, shape, False)
    plain = step(copy.deepcopy(host).float(), shape, False)
    for key, exact in wanted.items():
        ours = (actual[key].double() - exact).abs().max()
        theirs = (plain[key].double() - exact).abs().max()
        assert ours <= 2 * theirs + 2e-6 * max(1.0, exact.abs().max()), key


def test_a_bias_that_the_layers_share(ran):  # noqa: F811
    module = made(BEIT).double()
    host = copy.deepcopy(module)
    swap_in(module)
    for bias in (torch.randn(2, 6, 6), torch.randn(1, 2, 6, 6)):
        ran.clear()
        actual = step(module, TOKENS, True, bias)
        assert ran == ["BeitBlock"]
        assert_same(actual, step(host, TOKENS, True, bias), 1e-9)


def test_an_argument_that_nothing_reads(ran):  # noqa: F811
    for make, fused in ((BEIT, 1), (positions.Reading, 0)):
        module, x = made(make), torch.randn(2, 6, 32)
        host = copy.deepcopy(module)
        assert swap_in(module).level == "block"
        ran.clear()
        torch.testing.assert_close(
            module(x, None, (4, 4)), host(x, resolution=(4, 4)), rtol=1e-4, atol=1e-4
        )
        assert len(ran) == fused


def test_a_grid_of_another_size_is_the_hosts(ran):  # noqa: F811
    make, _ = HOSTS["sam_global"]
    module = made(make)
    host = copy.deepcopy(module)
    swap_in(module)
    for shape, fused in (((2, 4, 5, 32), 1), ((2, 3, 4, 32), 0)):
        ran.clear()
        assert_same(step(module, shape, True), step(host, shape, True), 1e-4)
        assert len(ran) == fused


def test_the_report_counts_the_tokens_of_a_grid_and_of_its_windows():
    blocks = [positions.GridBlock(3, (3, 3)), positions.GridBlock(0, (9, 9))]
    model = nn.Module()
    model.pos_embed = nn.Parameter(torch.zeros(1, 9, 9, 32))
    model.blocks = nn.ModuleList(blocks)
    report = swap_in(model)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    products = sum(2 * 81 * m.in_features * m.out_features for m in linears)
    attention = 4 * 81 * 9 * 32 + 4 * 81 * 81 * 32
    assert report.tokens == 81 and report.level == "block", str(report)
    assert report.flops == report.fused_flops == products + attention


def test_a_large_grid_is_proven_on_a_small_one():
    module = made(partial(positions.GridBlock, 0, (64, 64)))
    assert swap_in(module).level == "block"


class Added(nn.Linear):
    """As an adapter: the host that reads its weight never calls it."""

    def forward(self, x):
        return super().forward(x) + 1


def test_a_weight_that_is_read_of_a_linear_that_was_replaced():
    module = made(BEIT)
    host = copy.deepcopy(module)
    swap_in(module)
    for m in (module, host):
        torch.manual_seed(3)
        m.attn.qkv = Added(32, 96, bias=False)
    assert_same(step(module, TOKENS, False), step(host, TOKENS, False), 1e-4)


LOOK_ALIKES = {
    "index": partial(BEIT, positions.OtherIndex),
    "late bias": partial(BEIT, positions.LateBias),
    "one turned": partial(BEIT, positions.OneTurned),
    "exchanged": lambda: _with(positions.GridBlock(3, (3, 3)), positions.Exchanged(size=(3, 3))),
    "shifted windows": partial(positions.Shifted, 3),
}


def _with(block, attention):
    block.attn = attention
    return block


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_with_positions_is_left_alone(name):
    module = made(LOOK_ALIKES[name])
    report = swap_in(module)
    assert not isinstance(module, Fused), str(report)
    assert {row.name for row in report.left} & {"", "attn"}


def test_another_share_of_samples_runs_fused_in_evaluation_only(ran):  # noqa: F811
    """Where the numbers that are drawn would be others. A call in training decides nothing for
    those in evaluation."""
    module = made(partial(dino.RoundedBlock, drop_path=0.3)).double()
    host = copy.deepcopy(module)
    swap_in(module)
    assert isinstance(module, Block) and module.fused_roles.evaluation
    shape = (5, 6, 32)
    for training in (True, False, True, False):
        plans.known.clear()
        for mode in (training, not training):
            ran.clear()
            assert_same(step(module, shape, mode), step(host, shape, mode), 1e-9)
            assert len(ran) == (not mode)
            (row,) = (row for row in status(module).modules if row.name == "")
            reason = "in training its forward does something else"
            assert (row.way, row.reason) == (("host", reason) if mode else ("fused", ""))


def test_evaluation_is_proven_where_training_is_something_else():
    module = made(partial(positions.ScaledSum, drop_path=0.3))
    report = swap_in(module)
    assert not isinstance(module, Fused), str(report)
