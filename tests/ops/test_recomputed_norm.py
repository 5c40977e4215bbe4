"""recomputed_norm: readers of a LayerNorm keep its input, and every gradient its bits."""

from contextlib import nullcontext

import pytest
import torch
from calls import Calls
from model_parity import randomise
from numerics import DEVICE, rand

from fastvit_kernels.models.norms import LayerNorm, RmsNorm
from fastvit_kernels.models.vit import Block, VisionTransformer
from fastvit_kernels.ops.linear import linear
from fastvit_kernels.ops.norm.functions import layer_norm_and_input
from fastvit_kernels.ops.recomputed_norm import recomputed_norm
from fastvit_kernels.ops.recomputed_sum import recomputed_sum
from fastvit_kernels.runtime.backend import backend

B, T, C = 2, 5, 32
EPS = 0.1  # no default, and large beside the numbers


def _model_gradients(memory):
    """The gradients, and how often the forward of the norm and of linear ran."""
    torch.manual_seed(0)
    sizes = dict(img_size=8, patch_size=4, num_classes=5, embed_dim=32, depth=2, num_heads=2)
    model = VisionTransformer(**sizes, init_values=0.5, memory=memory).to(DEVICE)
    images = rand(2, 3, 8, 8, seed=1, grad=False)
    with backend("triton"), Calls() as calls:
        with torch.autocast(DEVICE.type, torch.float16):
            logits = model(images)
        logits.backward(rand(2, 5, seed=2, grad=False).to(logits.dtype))
    names = [operator.overloadpacket.__name__ for operator, _, _ in calls.ours]
    counts = names.count("layer_norm_fwd"), names.count("linear_fwd")
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
@pytest.mark.parametrize(("mlp_layer", "norm"), [("Mlp", LayerNorm), ("SwiGLU", RmsNorm)])
def test_low_memory_block_gradient_layouts(mlp_layer, norm, layout):
    """Equal numbers in other memory, the input's and the gradient's: equal bits."""
    torch.manual_seed(0)
    block = Block(C, 2, init_values=0.5, mlp_layer=mlp_layer)
    block.norm1, block.norm2 = norm(C, eps=EPS), norm(C, eps=EPS)
    block = randomise(block)
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


CHANGED = ["x", "norm1.weight", "norm2.bias", "ls1.gamma"]
CHANGED += ["attn.qkv.weight", "attn.proj.weight", "attn.proj.bias"]
CHANGED += ["mlp.fc1.weight", "mlp.fc2.weight", "mlp.fc2.bias"]


@pytest.mark.parametrize("name", CHANGED)
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
    inputs = rand(B, T, C), rand(C, seed=1), rand(C, seed=2)

    def gradients(low):
        with backend("triton"):
            y, _ = layer_norm_and_input(*inputs)
            with recomputed_norm(y, *inputs) if low else nullcontext():
                out = VIEWS[view](y).square()
        upstream = rand(*out.shape, seed=9, grad=False)
        return torch.autograd.grad(out, inputs, upstream)

    for a, b in zip(gradients(low=False), gradients(low=True), strict=True):
        assert torch.equal(a, b)
