"""Tracers, exporters and counters over swapped modules: they get what the host gives them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fastvit_kernels import backend, swap_in
from fastvit_kernels.runtime.compat import TorchDispatchMode
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import timm_small, torchvision_small

pytest.importorskip("timm")
pytest.importorskip("torchvision")


@pytest.fixture(autouse=True)
def _torch_backend():
    with backend("torch"):
        yield


def layers():
    return nn.Sequential(
        nn.LayerNorm(16),
        nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True),
        nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
    )


def both(model):
    other = copy.deepcopy(randomize(model).eval())
    swap_in(other)
    return model, other


def targets(graph):
    return [(node.op, str(node.target)) for node in graph.nodes]


@pytest.mark.parametrize("kind", ["auto", "torch"])
def test_symbolic_trace_gives_the_hosts_graph(kind):
    model = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), nn.LayerNorm(4), nn.Linear(4, 4))
    host, other = both(model)
    assert targets(torch.fx.symbolic_trace(other).graph) == targets(
        torch.fx.symbolic_trace(host).graph
    )
    x = torch.randn(1, 3, 8, 8)
    with backend(kind):
        torch.testing.assert_close(torch.fx.symbolic_trace(other)(x), host(x), rtol=1e-3, atol=1e-4)


def test_feature_extraction():
    from torchvision.models.feature_extraction import create_feature_extractor

    model, images = torchvision_small()
    host, other = both(model)
    node = "encoder.layers.encoder_layer_0.ln_1"
    wanted = create_feature_extractor(host, [node])(images)[node]
    torch.testing.assert_close(
        create_feature_extractor(other, [node])(images)[node], wanted, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("name", ["vit_relpos_base_patch16_224", "vit_tiny_patch16_224"])
def test_features_of_timm_by_fx(name):
    from timm.models import create_feature_extractor

    torch.manual_seed(0)
    model, images = timm_small(name)
    host, other = both(model)
    wanted = create_feature_extractor(host, ["blocks.1"])(images)
    got = create_feature_extractor(other, ["blocks.1"])(images)
    for a, b in zip(got.values(), wanted.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_jit_trace_has_the_hosts_operators_and_gradients():
    host, other = both(layers())
    x = torch.randn(2, 5, 16)
    with backend("auto"):  # through the kernels where nobody traces
        traced = torch.jit.trace(other.train(), x)  # eval has a fast path without gradients
    assert "fastvit_kernels::" not in str(traced.inlined_graph)
    for module in (host, traced):
        module.zero_grad()
        module(x).square().sum().backward()
    for (name, p), q in zip(host.named_parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_an_export_to_onnx_sees_the_hosts_operators(monkeypatch):
    from private import IN_ONNX_EXPORT, onnx_state

    _, other = both(layers())
    with backend("auto"), torch.no_grad():
        exported = torch.export.export(other, (torch.randn(2, 5, 16),))
        assert "fastvit_kernels" in str(exported.graph)
        monkeypatch.setattr(onnx_state, IN_ONNX_EXPORT, True)
        exported = torch.export.export(other, (torch.randn(2, 5, 16),))
    assert "fastvit_kernels" not in str(exported.graph)


def test_an_export_for_quantisation_is_plain_under_the_torch_backend():
    _, other = both(layers())
    exported = torch.export.export(other, (torch.randn(2, 5, 16),))
    found = targets(exported.graph)
    assert "fastvit_kernels" not in str(found)
    assert sum("aten.linear" in target for _, target in found) == 6


def test_a_vectorized_jacobian():
    host, other = both(layers())
    x = torch.randn(1, 2, 16)
    wanted = torch.autograd.functional.jacobian(host, x, vectorize=True)
    got = torch.autograd.functional.jacobian(other, x, vectorize=True)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_flops_are_counted_as_the_hosts():
    from torch.utils.flop_counter import FlopCounterMode

    host, other = both(layers())
    counts = []
    for module in (host, other):
        with backend("auto"), FlopCounterMode(display=False) as counter:
            module(torch.randn(2, 5, 16)).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_dispatch_mode_of_another_package_sees_the_hosts_operators():
    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    found = []
    for module in both(layers()):
        names: list[str] = []
        with backend("auto"), Names():
            module(torch.randn(2, 5, 16)).sum().backward()
        found.append(names)
    assert found[0] == found[1]


def test_a_sharded_input_takes_the_hosts_path():
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

    host, other = both(nn.LayerNorm(16))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        x = distribute_tensor(torch.randn(3, 16), mesh, [Replicate()])
        for module in (host, other):
            for name, p in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(distribute_tensor(p.data, mesh, [Replicate()])))
        with backend("auto"):
            assert torch.equal(other(x).to_local(), host(x).to_local())
    finally:
        dist.destroy_process_group()


def test_signatures_are_the_hosts():
    import inspect

    for host, other in zip(*(m.modules() for m in both(layers())), strict=True):
        assert inspect.signature(other.forward) == inspect.signature(host.forward)


@pytest.mark.parametrize("change", ["stride", "eps"])
def test_a_compiled_module_follows_a_change(change):
    torch.compiler.reset()
    model = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.Flatten(2), nn.LayerNorm(4))
    host, other = both(model)
    compiled = torch.compile(other, backend="eager")
    x = torch.randn(1, 3, 8, 8)
    torch.testing.assert_close(compiled(x), host(x), rtol=1e-4, atol=1e-5)
    for module in (host, other):
        if change == "stride":
            module[0].stride, module[0].padding = (3, 3), (1, 1)
            module[2] = nn.LayerNorm(9)
        else:
            module[2].eps = 0.5
    torch.testing.assert_close(compiled(x), host(x), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()
