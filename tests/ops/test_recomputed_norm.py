"""recomputed_norm: readers of a LayerNorm keep its input, and every gradient its bits."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from model_parity import Launches
from numerics import DEVICE, rand

from fastvit_kernels.models.vit import Block, VisionTransformer
from fastvit_kernels.ops.attention.projected import qkv_attention
from fastvit_kernels.ops.linear import linear
from fastvit_kernels.ops.mlp import mlp
from fastvit_kernels.ops.norm.functions import layer_norm_and_input, rms_norm_and_input
from fastvit_kernels.ops.recomputed_norm import recomputed_norm
from fastvit_kernels.ops.recomputed_sum import recomputed_sum
from fastvit_kernels.runtime.backend import backend

B, T, C = 2, 5, 32
EPS = 0.1  # no default, and large beside the numbers
SHAPES = {
    "x": (B, T, C),
    "norm_weight": (C,),
    "norm_bias": (C,),
    "qkv_weight": (3 * C, C),
    "fc1_weight": (48, C),
    "fc2_weight": (C, 48),
}


def _inputs():
    return {
        name: rand(*shape, seed=i, scale=1.0 if name == "x" else C**-0.5)
        for i, (name, shape) in enumerate(SHAPES.items())
    }


def _gradients(name, inputs, low, norm="layer_norm", samples=None):
    """The branch's output and the gradient of all that it reads."""
    weight, bias = inputs["norm_weight"], inputs["norm_bias"] if norm == "layer_norm" else None
    x = inputs["x"]
    options: dict[str, Any] = dict(out_dtype=torch.float16, samples=samples)
    with backend("triton"), torch.autocast(DEVICE.type, torch.float16):
        if norm == "layer_norm":
            y, residual = layer_norm_and_input(x, weight, bias, EPS, **options)
        else:
            y, residual = rms_norm_and_input(x, weight, EPS, **options)
        rebuilt = recomputed_norm(y, x, weight, bias, EPS, norm=norm, samples=samples)
        with rebuilt if low else nullcontext():
            if name == "mlp":
                weights = inputs["fc1_weight"], None, inputs["fc2_weight"], None
                out = mlp(y, *weights, residual=residual, row_scale=samples)
            else:
                out = qkv_attention(y, inputs["qkv_weight"], num_heads=2)
    upstream = rand(*out.shape, dtype=out.dtype, seed=9, grad=False)
    return out, *torch.autograd.grad(out, list(inputs.values()), upstream, allow_unused=True)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("name", ["mlp", "attention"])
@pytest.mark.parametrize("some", [False, True], ids=["all", "kept samples"])
def test_recomputed_norm_bits(name, norm, some):
    inputs = _inputs()
    options: dict[str, Any] = dict(norm=norm)
    if some:  # the second of two
        options["samples"] = torch.tensor([1, 1, 0], device=DEVICE)
    kept, rebuilt = (_gradients(name, inputs, low, **options) for low in (False, True))
    for a, b in zip(kept, rebuilt, strict=True):
        assert (a is b is None) or torch.equal(a, b)


def _model_gradients(memory):
    """The gradients, and how often the forward of the norm and of linear ran."""
    torch.manual_seed(0)
    sizes = dict(img_size=8, patch_size=4, num_classes=5, embed_dim=32, depth=2, num_heads=2)
    model = VisionTransformer(**sizes, init_values=0.5, memory=memory).to(DEVICE)
    images = rand(2, 3, 8, 8, seed=1, grad=False)
    with backend("triton"), Launches() as launches:
        with torch.autocast(DEVICE.type, torch.float16):
            logits = model(images)
        logits.backward(rand(2, 5, seed=2, grad=False).to(logits.dtype))
    counts = launches.count["layer_norm_fwd"], launches.count["linear_fwd"]
    return [p.grad for p in model.parameters()], counts


def test_vit_low_memory_bits():
    (default, kept), (low, rebuilt) = (_model_gradients(m) for m in ("default", "low"))
    assert all(torch.equal(a, b) for a, b in zip(default, low, strict=True))
    assert (kept[0], rebuilt[0]) == (5, 9)  # two norms a block, and the last; a block's once more
    assert rebuilt[1] == kept[1] + 2  # and the sum after attention


LAYOUTS = {
    "turned": lambda: rand(B, C, T, seed=9, grad=False).mT,
    "one number": lambda: rand(1, 1, 1, seed=9, grad=False).expand(B, T, C),
    "one row": lambda: rand(1, 1, C, seed=9, grad=False).expand(B, T, C),
    "one sample": lambda: rand(1, T, C, seed=9, grad=False).expand(B, T, C),
    "part": lambda: rand(B, T, 2 * C, seed=9, grad=False)[..., C:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mlp_layer", ["Mlp", "SwiGLU"])
def test_low_memory_block_gradient_layouts(mlp_layer, layout):
    """Equal numbers in other memory, the input's and the gradient's: equal bits."""
    torch.manual_seed(0)
    block = Block(C, 2, init_values=0.5, mlp_layer=mlp_layer).to(DEVICE)
    x, upstream = rand(B, T, C, grad=False), LAYOUTS[layout]()

    def gradients(memory, x, upstream):
        block.memory = memory
        x = x.detach().requires_grad_()
        with backend("triton"):
            return torch.autograd.grad(block(x), [x, *block.parameters()], upstream)

    wanted = gradients("default", x, upstream.contiguous())
    for memory in ("default", "low"):
        for same in (x, x.mT.contiguous().mT):
            got = gradients(memory, same, upstream)
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), memory


WEIGHTS = (
    "norm1.weight",
    "norm2.bias",
    "attn.qkv.weight",
    "attn.proj.weight",
    "attn.proj.bias",
    "mlp.fc1.weight",
    "mlp.fc2.weight",
    "mlp.fc2.bias",
    "ls1.gamma",
)


@pytest.mark.parametrize("name", ["x", *WEIGHTS])
def test_block_modified_before_backward(name):
    """As an optimizer's step between the two does: under hooks autograd itself compares nothing."""
    block, x = Block(C, 2, init_values=0.5).to(DEVICE), rand(B, T, C)
    for block.memory in ("low",) if name == "norm2.bias" else ("default", "low"):
        with backend("triton"):
            y = block(x)
        (x if name == "x" else block.get_parameter(name)).detach().mul_(1.5)
        with pytest.raises(RuntimeError, match=r"modified by an inplace|changed in place"):
            y.sum().backward()


def test_recomputed_sum_of_norms_inputs_alone():
    """x = linear(y) + residual, y and residual of one norm: other inputs of a norm are kept, and a
    sum whose residual is itself made again, else each would make all before it."""
    x, norm, proj = rand(B, T, C), rand(C, seed=1), rand(C, C, seed=2)
    with backend("triton"):
        y, residual = layer_norm_and_input(x, norm)
        others = (
            x,
            y,
            linear(y, proj),
            linear(y, proj, residual=x),
            linear(residual, proj, layer_scale=norm, residual=y),
            linear(y, proj, activation="gelu", residual=residual),
            linear(torch.cat((y, y), -1), torch.cat((proj, proj), -1), residual=residual),
        )
        for other in others:
            with recomputed_sum(other) as again:
                assert again is None
        with torch.autocast(DEVICE.type, torch.float16):
            y, x = layer_norm_and_input(x * 1.0, norm, out_dtype=torch.float16)
            found = []
            for _ in range(3):
                x = linear(y, proj, residual=x)
                with recomputed_sum(x) as again:
                    y, x = layer_norm_and_input(x, norm, out_dtype=torch.float16)
                found.append(again is not None)
        assert found == [True, False, True]
        x.sum().backward()


VIEWS = {
    "turned": lambda y: y.mT,
    "sample": lambda y: y[1:],
    "tokens": lambda y: y[:, 1:],
    "expanded": lambda y: y[:1].expand(B, T, C),
    "reshaped": lambda y: y.view(B, C, T),
}


@pytest.mark.parametrize("view", VIEWS)
def test_recomputed_norm_saved_views(view):
    """An op inside may save y turned, in part, or in another shape."""
    inputs = _inputs()
    norm = inputs["norm_weight"], inputs["norm_bias"], 1e-6

    def gradients(low):
        with backend("triton"):
            y, _ = layer_norm_and_input(inputs["x"], *norm)
            with recomputed_norm(y, inputs["x"], *norm) if low else nullcontext():
                out = VIEWS[view](y).square()
        upstream = rand(*out.shape, seed=9, grad=False)
        return torch.autograd.grad(out, [inputs["x"], *norm[:2]], upstream)

    for a, b in zip(gradients(low=False), gradients(low=True), strict=True):
        assert torch.equal(a, b)
