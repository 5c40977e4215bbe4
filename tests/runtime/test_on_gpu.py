"""Streams, devices, CUDA graphs; a long run."""

from __future__ import annotations

import pytest
import torch
from numerics import rand
from private import gpu_sleeps
from tiny_calls import assert_same_bits, every_op, op_and_inputs, small_vit, step, train_step


@pytest.mark.gpu
@every_op
def test_op_on_another_stream(op):
    function, inputs = op_and_inputs(op)
    wanted = step(function, inputs)
    late = [torch.full_like(x, float("nan")).requires_grad_() for x in inputs]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        gpu_sleeps(50_000_000)
        with torch.no_grad():
            for x, value in zip(late, inputs, strict=True):
                x.copy_(value)
        got = step(function, late)
    stream.synchronize()
    assert_same_bits(got, wanted)


@pytest.mark.gpu
@every_op
def test_non_current_device(op):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, there is {torch.cuda.device_count()}")
    function, inputs = op_and_inputs(op)
    other = [x.detach().to("cuda:1").requires_grad_() for x in inputs]

    def step_on(current):
        with torch.cuda.device(current):
            out = function(*other)
            grads = torch.autograd.grad(out, other, torch.ones_like(out))
            assert torch.cuda.current_device() == current
        assert {x.device.index for x in (out, *grads)} == {1}
        return [out.detach(), *grads]

    assert_same_bits(step_on(0), step_on(1))


@pytest.mark.gpu
def test_training_step_has_no_sync():
    model = small_vit(img_size=32, attn_drop_rate=0.1, drop_path_rate=0.2, depth=2).train()
    images = rand(4, 1, 32, 32, grad=False)
    train_step(model, images)  # compiles, and asks once for the device's properties
    torch.cuda.set_sync_debug_mode("error")
    try:
        train_step(model, images)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(model, images):
    """A CUDA graph of forward and backward, the output and the gradients that a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train_step(model, images)
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(images)
        out.square().mean().backward()
    return graph, [out, *(p.grad for p in model.parameters())]


def replayed(graph, tensors):
    for x in tensors:
        x.detach().fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return [x.detach().clone() for x in tensors]


@pytest.mark.gpu
def test_cuda_graph_bits():
    model, images = small_vit(img_size=32, embed_dim=64, depth=2), rand(4, 1, 32, 32, grad=False)
    wanted = [x.clone() for x in train_step(model, images)]
    other = rand(*images.shape, seed=1, grad=False)
    wanted_other = [x.clone() for x in train_step(model, other)]
    static = images.clone()
    graph, tensors = captured(model, static)
    assert_same_bits(replayed(graph, tensors), wanted)
    static.copy_(other)
    assert_same_bits(replayed(graph, tensors), wanted_other)
    assert_same_bits(replayed(graph, tensors), wanted_other)


@pytest.mark.gpu
@pytest.mark.parametrize("rates", [dict(attn_drop_rate=0.3), dict(drop_path_rate=0.5)], ids=str)
def test_cuda_graph_dropout(rates):
    model = small_vit(img_size=32, embed_dim=64, depth=2, **rates).train()
    graph, tensors = captured(model, rand(8, 1, 32, 32, grad=False))
    first, second = replayed(graph, tensors), replayed(graph, tensors)
    assert not torch.equal(first[0], second[0])
    assert all(x.isfinite().all() for x in (*first, *second))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_five_hundred_steps(precision):
    """The accuracy of swapped models is the host's; memory stays."""
    long_run = pytest.importorskip("long_run")
    hosts, swaps = [], []
    for seed in range(5):
        host, swapped = long_run.pair(seed, precision, 500)
        hosts.append(host.accuracy)
        swaps.append(swapped.accuracy)
        assert swapped.tensors_grown <= 0 and swapped.bytes_grown <= 2**20
    difference = abs(sum(hosts) - sum(swaps)) / len(hosts)
    assert difference <= max(long_run.spread(hosts), long_run.spread(swaps)), (hosts, swaps)
