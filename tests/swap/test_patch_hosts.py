"""A host's Conv3d over videos becomes patch_embed, or a Linear where its samples are patches."""

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from numerics import DEVICE
from torch import nn

from fastvit_kernels import backend, swap_in
from fastvit_kernels.swap.hosts import torch_nn


@pytest.fixture(autouse=True)
def _kernels():
    with backend("triton"):
        yield


class Tubelets(nn.Module):
    """As in VideoMAE: the tokens of a video."""

    def __init__(self, bias: bool = True, **options: Any):
        super().__init__()
        self.projection = nn.Conv3d(3, 24, (2, 4, 4), (2, 4, 4), bias=bias, **options)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.projection(pixel_values).flatten(2).transpose(1, 2)


class Flattened(nn.Module):
    """As in Qwen2-VL: rows of pixels, each a patch."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Conv3d(3, 24, (2, 4, 4), (2, 4, 4), bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.view(-1, 3, 2, 4, 4).to(self.proj.weight.dtype)
        return self.proj(x).view(-1, 24)


def _compared(host: nn.Module, shape: tuple[int, ...], name: str) -> None:
    """The swapped module beside its host, the function of this name called once a forward."""
    torch.manual_seed(0)
    host = host.to(DEVICE)
    swapped = copy.deepcopy(host)
    report = swap_in(swapped)
    assert [(row.level, row.host) for row in report.swapped] == [("patch_embed", "Conv3d")]
    assert 0 < report.flops == report.fused_flops
    x = torch.randn(shape, device=DEVICE, requires_grad=True)
    results = []
    for module in (swapped, host):
        with patch.object(torch_nn, name, wraps=getattr(torch_nn, name)) as function:
            out = module(x)
        assert function.call_count == (module is swapped)
        wanted = [x, *module.parameters()]
        upstream = torch.linspace(-1, 1, out.numel(), device=DEVICE).view_as(out)
        results.append((out, *torch.autograd.grad(out, wanted, upstream)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
def test_tubelets_of_a_video(bias):
    _compared(Tubelets(bias), (2, 3, 4, 8, 12), "patch_embed")


def test_flattened_patches_are_a_linear():
    _compared(Flattened(), (5, 96), "linear")


def test_another_size_is_asked_anew():
    """What does not fit is cropped as the host does, after a size that fits, too."""
    host = Tubelets().to(DEVICE)
    swapped = copy.deepcopy(host)
    swap_in(swapped)
    for shape in ((2, 3, 4, 8, 12), (2, 3, 5, 11, 14)):
        x = torch.randn(shape, device=DEVICE)
        torch.testing.assert_close(swapped(x), host(x), rtol=1e-4, atol=1e-5)


def test_a_hook_gets_the_grid_as_the_host_lays_it_out():
    layers = pytest.importorskip("timm").layers
    swapped, seen = layers.PatchEmbed(8, 4, 3, 24).to(DEVICE), []
    swap_in(swapped)
    swapped.proj.register_forward_hook(lambda m, args, y: seen.append(y.view(2, -1)))
    swapped(torch.randn(2, 3, 8, 8, device=DEVICE))
    assert [y.shape for y in seen] == [(2, 24 * 2 * 2)]


def test_padded_and_dilated_ones_stay():
    for options, reason in ((dict(padding=1), "padding"), (dict(dilation=2), "dilated")):
        report = swap_in(Tubelets(**options).to(DEVICE))
        assert not report.swapped and any(reason in row.reason for row in report.left), report
