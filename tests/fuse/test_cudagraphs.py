"""mode="reduce-overhead": a training step has nothing for which Inductor skips a CUDA graph.

There is no GPU: Dynamo and AOTAutograd trace a model on torch's meta device, Inductor lowers its
forward and its backward on fake CUDA tensors, and its own checks are asked why it would not capture
them. What stands on a CPU stays there, and is a reason. test_launches.py holds the launchers, which
Inductor calls as they are: none reads a value on the host.
"""

from __future__ import annotations

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from private import tree_map
from torch import Tensor

from fastvit_kernels import create_vit, status
from fastvit_kernels.fuse.backend import fastvit_kernels
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.compat import FakeTensor, FakeTensorMode
from tests.model_coverage.model_zoo import hf_small

H100 = Gpu("sm_90", num_sms=132, shared_limit=227 * 1024)
CUDA = torch.device("cuda", 0)
# Else Inductor makes no more of a graph on the meta device than its outputs' shapes.
OPTIONS = {"joint_graph_constant_folding": False, "fallback_random": True}


def moved(x):
    """From the meta device to a GPU that is not there."""
    return CUDA if isinstance(x, torch.device) and x.type == "meta" else x


def on_cuda(gm, inputs):
    """The graph on fake CUDA tensors, its inputs, and their mode."""
    from torch._guards import detect_fake_mode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    mode = detect_fake_mode(inputs) or FakeTensorMode()

    def fake(x):
        if not isinstance(x, Tensor):
            return x
        meta = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
        return FakeTensor(mode, meta, moved(x.device))

    fakes = [fake(x) for x in inputs]
    for n in gm.graph.nodes:
        n.args, n.kwargs = tree_map(moved, n.args), tree_map(moved, n.kwargs)
    gm.recompile()
    with mode:
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*fakes)
    return fakes, mode


def why_partitioned(operation):
    """Inductor's word on one operation. Its scheduler itself would ask for a GPU's properties."""
    from torch._inductor.scheduler import Scheduler

    device = operation.get_device()
    node = SimpleNamespace(
        node=operation, is_gpu=lambda: device.type == "cuda", get_device=lambda: device
    )
    scheduler: Any = SimpleNamespace(_uses_cudagraph_unsafe_unbacked_symint=lambda node: None)
    return Scheduler.should_partition(scheduler, node)


def reasons_of(gm, inputs, static):
    """Why Inductor would not capture this graph of AOTAutograd's, or parts of it."""
    from torch._inductor import compile_fx, cudagraph_utils
    from torch._inductor.graph import GraphLowering
    from torch._inductor.utils import get_first_incompatible_cudagraph_node
    from torch._inductor.virtualized import V

    fakes, mode = on_cuda(gm, inputs)
    compile_fx.record_original_output_strides(gm)
    if (node := get_first_incompatible_cudagraph_node(gm)) is not None:
        return [f"incompatible: {node.target}"]
    found = []
    with V.set_fake_mode(mode):
        graph = GraphLowering(gm, example_inputs=fakes)
        with V.set_graph_handler(graph):
            graph.run(*fakes)
            devices = dict(graph.device_node_mapping)
            found.append(cudagraph_utils.check_lowering_disable_cudagraph(devices))
            on_cpu = graph.device_node_mapping.get(torch.device("cpu"))
            found += [f"cpu: {on_cpu.format_node()}"] if on_cpu else []
            found += [f"writes input {i}" for i in graph.mutated_input_idxs if i not in static]
            assert graph.operations
            found += [why_partitioned(operation) for operation in graph.operations]
    return [reason for reason in found if reason]


@pytest.fixture
def captured(monkeypatch):
    """The reasons of each graph that our backend gave Inductor: a forward's, then a backward's."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import compile_fx

    found = []

    def inner_compile(gm, inputs, *, static_input_idxs=(), cudagraphs=None, **_):
        assert cudagraphs, "the mode asks for no graphs"
        found.append(reasons_of(copy.deepcopy(gm), inputs, static_input_idxs))
        return make_boxed_func(gm)

    whole = functools.partial(compile_fx.compile_fx, inner_compile=inner_compile)
    monkeypatch.setattr(compile_fx, "compile_fx", whole)
    # what reductions ask for
    sizes = SimpleNamespace(multi_processor_count=H100.num_sms, major=9, warp_size=32)
    monkeypatch.setattr(CudaInterface, "get_device_properties", lambda device=None: sizes)
    monkeypatch.setattr(CudaInterface, "get_compute_capability", lambda device=None: 90)
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


def step(model, captured, **options):
    """The reasons of a step of a model that trains in bf16."""
    model = model.to("meta", torch.bfloat16).train()
    images = torch.empty(4, 3, 48, 48, device="meta", dtype=torch.bfloat16)
    run = torch.compile(
        model,
        backend=functools.partial(fastvit_kernels, mode="reduce-overhead"),
        options={**OPTIONS, **options},
        dynamic=False,
    )
    with on_absent_gpu(H100):
        out = run(images)
        out = out if isinstance(out, Tensor) else out[0]
        out.float().square().mean().backward()
    return captured


SMALL = dict(img_size=48, depth=2, num_classes=10)
DRAWN = dict(attn_drop_rate=0.1, proj_drop_rate=0.1)
HF_DRAWN = dict(attention_probs_dropout_prob=0.1, hidden_dropout_prob=0.1)


def timm_model(name="vit_tiny_patch16_224", **settings):
    return pytest.importorskip("timm").create_model(name, **SMALL, **settings)


def hf_model(name, **settings):
    pytest.importorskip("transformers")
    return hf_small(name, **settings)[0]


HOSTS = {
    "timm, DropPath, qk-norm, LayerScale": lambda: timm_model(
        drop_path_rate=0.2, qk_norm=True, init_values=0.1
    ),
    "timm, dropout": lambda: timm_model(**DRAWN),
    "timm, RoPE, SwiGLU": lambda: timm_model("eva02_tiny_patch14_224", patch_size=16),
    "transformers, dropout": lambda: hf_model("vit", **HF_DRAWN),
    "transformers, DINOv2": lambda: hf_model("dinov2", drop_path_rate=0.2),
    "transformers, DINOv3": lambda: hf_model("dinov3_vit"),
    "ours, DropPath, dropout": lambda: create_vit(
        "vit_tiny_patch16_224", drop_path_rate=0.2, **DRAWN, **SMALL
    ),
}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("host", HOSTS)
def test_a_training_step_is_captured_forward_and_backward(host, captured):
    model = HOSTS[host]()
    assert step(model, captured) == [[], []]
    if "ours" not in host:
        assert status(model).share > 0.9


def test_skipped_samples_are_captured(captured):
    assert step(timm_model(drop_path_rate=0.2), captured, drop_path="skip") == [[], []]


def test_timms_dinov3_makes_its_grid_on_the_cpu(captured):
    """A reason that is seen: Inductor captures the parts before and after."""
    forward, backward = step(timm_model("vit_small_patch16_dinov3"), captured)
    assert forward and all("cpu" in reason or "DeviceCopy" in reason for reason in forward)
    assert backward == []
