"""Compilers over swapped models: one graph, equal to eager, any batch size; export; operators."""

from __future__ import annotations

import re

import pytest
import torch
from private import compiled_entries, compiler_counts, dynamo_config, tree_map
from torch import library

from fastvit_kernels import (
    attention,
    create_vit,
    gated_mlp,
    keep_samples,
    linear,
    mlp,
    rms_norm,
    rope,
    rope_attention,
    scaled_dot_product_attention,
    swap_in,
    varlen_attention,
)
from fastvit_kernels.runtime.compat import TorchDispatchMode
from fastvit_kernels.runtime.operator import LAUNCHERS
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import HF_MODELS, hf_small, timm_small

timm = pytest.importorskip("timm")
pytest.importorskip("transformers")
VisionTransformer = pytest.importorskip("torchvision").models.VisionTransformer

NAMES = ("vit_base_patch14_dinov2", "torchvision", "dinov2")


def swapped(name):
    """A swapped model of one block: dynamo and the interpreter are slow."""
    torch.manual_seed(0)
    if name == "torchvision":
        model = VisionTransformer(32, 16, 1, 2, 32, 64, num_classes=7)
        inputs = torch.randn(2, 3, 32, 32)
    elif name in HF_MODELS:
        model, inputs = hf_small(name, num_hidden_layers=1)
    else:
        model, inputs = timm_small(name, depth=1)
    randomize(model)
    assert swap_in(model).level == "block"
    return model, inputs


def step(model, call, inputs):
    model.zero_grad()
    y = call(**inputs).last_hidden_state if isinstance(inputs, dict) else call(inputs)
    y.square().mean().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {"out": y.detach(), **grads}


def assert_same(actual, wanted, rtol=1e-5, atol=1e-6):
    for name, value in wanted.items():
        torch.testing.assert_close(actual[name], value, rtol=rtol, atol=atol, msg=name)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    torch.use_deterministic_algorithms(False)  # inductor asserts on poisoned memory
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", NAMES)
def test_fullgraph_is_equal_to_eager(name):
    model, inputs = swapped(name)
    wanted = step(model, model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(step(model, compiled, inputs), wanted)


def test_fullgraph_with_inductor():
    model, inputs = swapped("vit_base_patch14_dinov2")
    wanted = step(model, model, inputs)
    compiled = torch.compile(model, fullgraph=True, backend="inductor")
    assert_same(step(model, compiled, inputs), wanted, rtol=1e-4, atol=1e-5)


def test_decomposed_relative_positions_in_a_graph():
    model = timm.create_model(
        "samvit_base_patch16",
        depth=1,
        img_size=32,
        embed_dim=32,
        num_heads=2,
        neck_chans=None,
        global_attn_indexes=(0,),
        num_classes=3,
    )
    assert swap_in(randomize(model)).level == "block"
    images = torch.randn(2, 3, 32, 32)
    wanted = step(model, model, images)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same(step(model, compiled, images), wanted)


@pytest.mark.parametrize("op", ["linear", "mlp", "gated_mlp"])
def test_a_number_of_tokens_that_no_compiler_knows(op):
    """Of images that are masked: what is kept is counted on the device."""
    weight, second, bias = torch.randn(32, 32), torch.randn(32, 64), torch.randn(32)
    first, gate = torch.randn(2, 64, 32).unbind()
    inputs = [t.requires_grad_() for t in (weight, first, second, bias)]
    call = {
        "linear": lambda x: linear(x, weight, bias),
        "mlp": lambda x: mlp(x, first, None, second, bias),
        "gated_mlp": lambda x: gated_mlp(
            x, first, None, second, bias, gate_weight=gate, activation="silu"
        ),
    }[op]

    def loss(x, kept):
        return call(x[kept].view(len(x), -1, 32)).square().mean()

    x, kept = torch.randn(2, 8, 32), torch.arange(8).remainder(2).bool().expand(2, -1)
    with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        found = torch.compile(loss, fullgraph=True, backend="eager")(x, kept)
    assert_same({"loss": found}, {"loss": loss(x, kept)})
    assert torch.autograd.grad(found, inputs[0 if op == "linear" else 1])[0].isfinite().all()


def test_batch_sizes_share_a_graph():
    model, images = swapped("vit_base_patch14_dinov2")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiler_counts.clear()
    for batch in (2, 3, 5):
        step(model, compiled, torch.randn(batch, *images.shape[1:]))
    graphs = compiler_counts["stats"]["unique_graphs"]
    assert graphs == 2, "the first size, and one graph for all others"


def test_a_number_may_be_symbolic():
    """As Dynamo makes the rate of a host's dropout that is a setting, where all is dynamic."""
    model, inputs = swapped("vit")
    model.eval()
    with torch.no_grad():
        wanted = model(**inputs).last_hidden_state
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
        assert_same({"y": compiled(**inputs).last_hidden_state}, {"y": wanted})


def _guards(depth, scale, swaps):
    """How many guards the compiled forward of a ViT of this depth has."""
    options = dict(img_size=32, patch_size=16, embed_dim=32, num_heads=2, init_values=scale)
    model = timm.models.VisionTransformer(depth=depth, **options)
    if swaps:
        swap_in(model)
    torch.compiler.reset()
    torch.compile(model, fullgraph=True, backend="eager")(torch.randn(2, 3, 32, 32))
    (entry,) = compiled_entries(type(model).forward.__code__)
    return len(re.findall(r"\+- [A-Z_]+:", str(entry.guard_manager)))


@pytest.mark.skipif(
    not "2.13" <= torch.__version__ < "2.14",
    reason="dynamo 2.12 guards a class's function for each module, 2.14 each dict of hooks",
)
@pytest.mark.parametrize("scale", [None, 1e-5])
def test_a_block_has_no_more_guards_than_its_host(scale):
    host, ours = (_guards(3, scale, swaps) - _guards(2, scale, swaps) for swaps in (False, True))
    assert 0 < ours <= host


@pytest.mark.parametrize("name", ["vit_base_patch14_dinov2", "torchvision", "vit"])
def test_export_of_the_forward(name):
    model, inputs = swapped(name)
    model.eval()
    kwargs = inputs if isinstance(inputs, dict) else {}
    args = () if kwargs else (inputs,)
    with torch.no_grad():
        wanted = model(*args, **kwargs)
        exported = torch.export.export(model, args, kwargs)
        got = exported.module()(*args, **kwargs)
    if kwargs:
        wanted, got = wanted.last_hidden_state, got.last_hidden_state
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    targets = {str(node.target) for node in exported.graph.nodes}
    assert any(target.startswith("fastvit_kernels.") for target in targets), targets


def _detached(x):
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


class Recorder(TorchDispatchMode):
    """Keeps the arguments of the first call of each of our operators."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastvit_kernels":
            self.calls.setdefault(func, tree_map(_detached, (args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def _recorded_calls():
    x = torch.randn(2, 5, 32, requires_grad=True)
    by_library = linear(x, torch.nn.Linear(32, 32).weight)  # a route that no mode sees
    with Recorder() as recorder:
        by_library.sum().backward()
        for name in ("vit_base_patch14_dinov2", "vit_base_patch16_rope_224"):
            model, images = swapped(name)
            model(images.requires_grad_()).square().mean().backward()
        model = create_vit("vit_mnist", img_size=6, depth=1)
        model(torch.randn(2, 1, 6, 6, requires_grad=True)).square().mean().backward()
        model = torch.nn.Linear(32, 32)
        x = torch.randn(2, 5, 32, requires_grad=True)
        linear(x, model.weight, model.bias, activation="gelu", residual=x).sum().backward()
        fc1, fc2 = (torch.randn(32, 32, dtype=torch.float16) for _ in range(2))
        mlp(x.detach().half(), fc1, None, fc2, None)
        qkv = torch.randn(2, 5, 3, 2, 16, requires_grad=True)
        scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0)).sum().backward()
        attention(qkv, dropout_p=0.1).sum().backward()
        attention(torch.randn(1, 300, 3, 1, 16, requires_grad=True)).sum().backward()
        bias = torch.randn(1, 2, 5, 5, requires_grad=True)
        attention(qkv, attn_mask=bias).sum().backward()
        heads = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scaled_dot_product_attention(*heads, bias).sum().backward()
        lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
        varlen_attention(qkv[0], lengths, 3).sum().backward()
        keep_samples(5, 0.4)
        weight = torch.randn(32, requires_grad=True)
        rms_norm(x, weight).sum().backward()
        rms_norm(linear(x, model.weight, model.bias), weight).sum().backward()
        packed, down = (torch.randn(n, 32, requires_grad=True) for n in (64, 32))
        gated_mlp(x, packed, None, down, None).sum().backward()
        q, k, _ = qkv.unbind(2)
        cos, sin = torch.randn(2, 5, 16).unbind(0)
        norm = torch.randn(16, requires_grad=True)
        rotated = rope(q, k, cos, sin, norm="rms_norm", q_norm_weight=norm, k_norm_weight=norm)
        torch.autograd.backward(rotated, [torch.randn_like(x) for x in rotated])
        projection = torch.randn(96, 32, requires_grad=True), torch.randn(96, requires_grad=True)
        rope_attention(x, *projection, num_heads=2, cos=cos, sin=sin).sum().backward()
    return recorder.calls


@pytest.fixture(scope="module")
def calls():
    return _recorded_calls()


@pytest.mark.parametrize("name", sorted(LAUNCHERS))
def test_opcheck(name, calls):
    op = getattr(torch.ops.fastvit_kernels, name).default
    assert op in calls, f"no call of {name} was recorded"
    args, kwargs = calls[op]
    if name.startswith("varlen"):  # nobody writes what lies between the rows of lse
        checks = ("test_schema", "test_faketensor")
        library.opcheck(op, args, kwargs, test_utils=checks)
    else:
        library.opcheck(op, args, kwargs)
