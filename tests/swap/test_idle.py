"""Where no kernel can run, on a CPU without the interpreter, a swapped module is its host: the same
functions, the same bits, in eager, in graphs and in exports, but for what was asked for besides."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from swapped_models import TimmLike, assert_same_step, images, timm_model, train_step

import fastvit_kernels as fk
from fastvit_kernels.runtime import backend
from fastvit_kernels.swap.hosts.fused import Fused
from tests.model_coverage.compare import randomize

AUTO, TORCH = "auto", "torch"


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.setattr(backend, "INTERPRETED", False)


def pair(**settings):
    """A model of timm and its swapped copy."""
    host = randomize(timm_model(drop_path_rate=0.5))
    swapped = copy.deepcopy(host)
    fk.swap_in(swapped, **settings)
    return host, swapped


def ran(swapped):
    """The ways of the modules of a swapped model in a training step."""
    with fk.watch(swapped) as status:
        train_step(swapped)
    return {row.name: (row.way, row.reason) for row in status.modules if row.level}


def chosen(name):
    return nullcontext() if name == AUTO else fk.backend(name)


def test_a_step_has_the_bits_of_the_host():
    host, swapped = pair()
    wanted, got = train_step(host), train_step(swapped)
    assert torch.equal(got[0], wanted[0])
    assert all(torch.equal(got[1][name], grad) for name, grad in wanted[1].items())


def test_watch_says_why():
    _, swapped = pair()
    ways = ran(swapped)
    assert set(ways.values()) == {("host", "no kernel can run: the tensor is on the CPU")}
    assert {"blocks.0", "blocks.1.attn", "norm"} <= ways.keys()


@pytest.mark.parametrize("settings", [{"memory": "low"}, {"drop_path": "skip"}], ids=str)
def test_blocks_still_do_what_was_asked_for(settings):
    _, swapped = pair(**settings)
    ways = ran(swapped)
    assert {ways[f"blocks.{i}"] for i in range(2)} == {("fused", "")}
    assert ways["norm"][0] == "host"


def test_a_chosen_backend_and_an_absent_gpu_are_not_idle():
    _, swapped = pair()
    with fk.backend(TORCH):
        assert {way for way, _ in ran(swapped).values()} == {"fused", "inside"}
    x = images(1)
    assert backend.is_idle(x) and not backend.is_idle(x.to("meta")) and not backend.is_idle([x])
    with backend.on_absent_gpu(backend.Gpu("sm_90", 132, 227 * 1024)):
        assert not backend.is_idle(x)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize(("forward", "backward"), [(AUTO, TORCH), (TORCH, AUTO), (AUTO, AUTO)])
def test_a_recomputation_goes_the_way_of_its_forward(forward, backward, use_reentrant):
    """Its layers, whose q, k and v ours projects at once, keep other tensors than ours."""
    host = TimmLike("dinov2").train()
    host.model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
    swapped = copy.deepcopy(host)
    fk.swap_in(swapped)

    def step(model, *ways):
        torch.manual_seed(0)
        with chosen(ways[0]):
            y = model(images(4).requires_grad_())
        with chosen(ways[1]):
            y.square().sum().backward()
        return y.detach(), {n: p.grad for n, p in model.named_parameters()}

    assert_same_step(step(swapped, forward, backward), step(host, AUTO, AUTO))


def test_compiled_and_exported_it_is_the_hosts_graph():
    host, swapped = pair()
    host, swapped = host.eval(), swapped.eval()
    targets = [
        [str(n.target) for n in torch.export.export(m, (images(2),)).graph.nodes]
        for m in (host, swapped)
    ]
    assert targets[0] == targets[1]
    compiled = torch.compile(swapped, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(images(2)), host(images(2)))


def test_it_is_fused_again_where_kernels_run(monkeypatch):
    """Nothing is remembered of the calls without."""
    _, swapped = pair()
    swapped(images(2))
    monkeypatch.setattr(backend, "INTERPRETED", True)
    ways = ran(swapped)
    assert all(isinstance(swapped.get_submodule(name), Fused) for name in ways)
    assert {way for way, _ in ways.values()} == {"fused", "inside"}
