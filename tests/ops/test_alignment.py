"""Operands that begin off 16 bytes, in rows of an odd stride: kernels that read each element once
load what they find, narrowly, and never by what an aligned call has compiled."""

import functools

import pytest
import torch
from numerics import assert_accurate, rand

from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.ops.gated_mlp.functions import gated_mlp, gated_mlp_ref
from fastvit_kernels.ops.linear import linear, linear_ref
from fastvit_kernels.ops.norm.functions import (
    layer_norm_and_input,
    layer_norm_ref,
    rms_norm_and_input,
    rms_norm_ref,
)
from fastvit_kernels.ops.rope import rope, rope_ref
from fastvit_kernels.runtime.arguments import is_aligned

B, T, C, F, H = 2, 5, 48, 40, 3
bf16, fp32 = torch.bfloat16, torch.float32


def _off(x):
    """The same numbers one element further in memory, each row followed by a gap of one."""
    shape = x.shape if x.ndim > 1 else (1, *x.shape)
    rows = x.new_empty(x.numel() // shape[-1] * (shape[-1] + 1) + 1)[1:]
    strides = [1, shape[-1] + 1]
    for n in reversed(shape[1:-1]):
        strides.append(strides[-1] * n)
    off = rows.as_strided(x.shape, strides[::-1][-x.ndim :])
    off.copy_(x.detach())
    assert not is_aligned(off)
    return off.requires_grad_(x.requires_grad)


def _inputs(**shapes):
    """bf16 where a name says nothing else; parameters of norms and the residual stream are fp32."""
    wide = {"stream", "weight32", "bias32", "layer_scale", "residual"}
    inputs = {}
    for i, (name, shape) in enumerate(shapes.items()):
        dtype = fp32 if name in wide or "norm" in name else bf16
        grad = name not in ("cos", "sin", "row_scale")
        scale = shape[-1] ** -0.5 if name.endswith("_weight") and "norm" not in name else 1.0
        inputs[name] = rand(*shape, dtype=dtype, seed=i, scale=scale, grad=grad)
    return inputs


def _layer_norm(stream, weight32, bias32):
    return layer_norm_and_input(stream, weight32, bias32, out_dtype=bf16)


def _rms_norm(stream, weight32):
    return rms_norm_and_input(stream, weight32, out_dtype=bf16)


def _ref(function):
    def reference(stream, *parameters, **named):
        out_dtype = bf16 if stream.dtype == fp32 else stream.dtype  # float64 of the oracle
        return function(stream, *parameters, *named.values()).to(out_dtype), stream

    return reference


HEADS = (B, T, H, 16)
CALLS = {
    "layer_norm": (
        _layer_norm,
        _ref(layer_norm_ref),
        _inputs(stream=(B, T, C), weight32=(C,), bias32=(C,)),
    ),
    "rms_norm": (
        _rms_norm,
        _ref(rms_norm_ref),
        _inputs(stream=(B, T, C), weight32=(C,)),
    ),
    "rope": (rope, rope_ref, _inputs(q=HEADS, k=HEADS, cos=(T, 16), sin=(T, 16))),
    "rope, normed": (
        functools.partial(rope, norm="rms_norm"),
        functools.partial(rope_ref, norm="rms_norm"),
        _inputs(
            q=HEADS, k=HEADS, cos=(T, 16), sin=(T, 16), q_norm_weight=(16,), k_norm_weight=(16,)
        ),
    ),
    "linear": (
        linear,
        linear_ref,
        _inputs(
            x=(B, T, C),
            weight=(F, C),
            bias=(F,),
            residual=(B, T, F),
            layer_scale=(F,),
            row_scale=(B,),
        ),
    ),
    "gated_mlp": (
        gated_mlp,
        gated_mlp_ref,
        _inputs(
            x=(B, T, C),
            fc1_weight=(F, C),
            fc1_bias=(F,),
            fc2_weight=(C, F),
            fc2_bias=(C,),
            gate_weight=(F, C),
            gate_bias=(F,),
            norm_weight=(F,),
            norm_bias=(F,),
            residual=(B, T, C),
            layer_scale=(C,),
            row_scale=(B,),
        ),
    ),
}


@pytest.mark.parametrize(
    ("call", "route"), [*((call, "triton") for call in CALLS), ("linear", "library")]
)
def test_operands_off_16_bytes(call, route):
    function, reference, inputs = CALLS[call]
    inputs = {name: _off(x) for name, x in inputs.items()}
    with forced_route(route), torch.no_grad():
        outputs = function(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [_off(torch.randn_like(y)) for y in outputs]
    with forced_route(route):
        assert_accurate(function, reference, inputs, upstream=upstream)
