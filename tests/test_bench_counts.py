"""What bench says that an op computes and moves, beside torch's own count and real tensors."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from bench_stand_ins import CPU
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bench.models import Case
from bench.ops import OPS, VITS, Shape, batch, vits
from fastvit_kernels.accuracy.op import Draw
from fastvit_kernels.runtime.dtypes import DTYPES

# sizes of which none stands for another; a patch of 4 x 4 in 8 x 8 pixels, 4 of them and a token
SHAPE = Shape("odd", B=3, T=5, C=24, H=2, F=56, size=8, patch=4)
VARIANTS = {
    "linear": ("proj", "fc1"),
    "gated_mlp": ("packed", "separate"),
    "varlen_attention": ("spread",),
    "rope": ("", "interleaved", "layer_norm"),
}
CASES = [(name, variant) for name in OPS for variant in VARIANTS.get(name, ("",))]
PRODUCTS = [(name, variant) for name, variant in CASES if name not in ("layer_norm", "rms_norm")]


def shape_of(name, variant):
    longer = {"varlen_attention": 16, "rope": 9}
    return replace(SHAPE, T=longer.get(name, SHAPE.T), variant=variant)


def given(op, shape, dtype=torch.float32):
    return op.inputs(shape, Draw(CPU, dtype))


def counted(op, shape):
    """FLOPs of forward and backward, by torch's counter over the specification's products."""
    inputs = given(op, shape)
    leaves = [x for x in inputs.values() if x is not None and x.requires_grad]
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            y = op.reference(shape)(**inputs)
        y = y if isinstance(y, tuple) else (y,)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.grad(y, leaves, [torch.randn_like(x) for x in y])
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_inputs_are_drawn_so_that_no_error_hides(name, variant):
    """None is constant; what comes out is neither so large nor so small that others drown in it."""
    op, shape = OPS[name], shape_of(name, variant)
    inputs = given(op, shape)
    y = op.reference(shape)(**inputs)
    for x in inputs.values():
        assert x is None or x.numel() == 1 or x.unique().numel() > 1
    for x in y if isinstance(y, tuple) else (y,):
        assert 0.3 < x.std() < 2.5
    norms = {"layer_norm": 4}  # weight and bias, of q and of k
    assert sum("norm_" in n for n in inputs) == norms.get(variant, 0)
    assert (inputs.get("layer_scale") is not None) == (variant == "proj")


@pytest.mark.parametrize(("name", "variant"), [c for c in PRODUCTS if c[0] != "rope"])
def test_flops_are_those_of_the_products(name, variant):
    """FlashAttention's backward computes the scores again, torch's keeps them: one product more."""
    op, shape = OPS[name], shape_of(name, variant)
    forward, backward = counted(op, shape)
    lengths = [shape.T] * shape.B
    if name == "varlen_attention":
        lengths = given(op, shape)["cu_seqlens"].diff().tolist()
    again = 2 * shape.C * sum(n * n for n in lengths) if "attention" in name else 0
    assert op.flops(shape, "fwd") == forward
    assert op.flops(shape, "bwd") == backward + again


def sizes(op, shape, dtype):
    """Bytes by name, of the tensors themselves."""
    inputs = given(op, shape, DTYPES[dtype])
    y = op.reference(shape)(**inputs)
    y = y[0] if isinstance(y, tuple) else y
    found = {n: x.numel() * x.element_size() for n, x in (*inputs.items(), ("y", y))}
    rows = given(op, shape)["qkv"].shape[0] if op.name == "varlen_attention" else shape.B * shape.T
    norms = math.prod(inputs["x"].shape[:-1]) if op.name.endswith("norm") else rows
    size = y.element_size()
    found |= {"mean": 4 * norms, "rstd": 4 * norms, "lse": 4 * rows * shape.H}
    found |= {"hidden": rows * shape.F * size}
    return {"gate_weight": 0, **found}  # packed: fc1_weight has both


@pytest.mark.parametrize(("name", "variant"), CASES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bytes_are_those_of_the_tensors(name, variant, dtype):
    op, shape = OPS[name], shape_of(name, variant)
    size, moved = sizes(op, shape, dtype), op.moved.get(variant) or op.moved[""]
    fwd, bwd = (
        sum(size.get(n) or size[n.removeprefix("d")] for n in names.split()) for names in moved
    )
    assert [op.bytes(shape, dtype, mode) for mode in ("fwd", "bwd")] == [fwd, bwd]
    assert min(op.flops(shape, "fwd"), op.flops(shape, "bwd")) > 0


def test_shapes_of_vits():
    assert VITS["L"] == (1024, 16, 4096)  # arXiv:2010.11929, table 1
    assert {s.model: (s.T, s.patch) for s in vits()}["ViT-H"] == (257, 14)
    assert batch(577) == 44  # 43.7: as near to 128 x 197 tokens as can be


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_flops_of_a_whole_model_by_hand(mode):
    """A block: 2 T C (3 C + C + 2 F) and two products of T T C; patches; the head. Training is
    three forwards."""
    pytest.importorskip("timm")
    C, T, depth, F = 192, 5, 12, 768
    block = 2 * T * C * (4 * C + 2 * F) + 2 * 2 * T * T * C
    forward = 7 * (depth * block + 2 * (T - 1) * C * 3 * 16**2 + 2 * C * 1000)
    assert Case("Ti", 32, 7, mode=mode).flops == forward * (3 if mode == "train" else 1)
