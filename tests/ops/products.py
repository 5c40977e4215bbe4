"""linear and the MLPs made of it: their random inputs, and what their tests share."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from numerics import DEVICE, Error, assert_accurate, rand
from torch import Tensor

from fastvit_kernels.accuracy.cases import OPS
from fastvit_kernels.accuracy.op import fan_in
from fastvit_kernels.ops.common.gemm_configs import forced_route

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
PLAIN, FULL = (), ("residual", "layer_scale", "row_scale")


@pytest.fixture(params=["library", "triton"])
def route(request):
    with forced_route(request.param):
        yield request.param


class Form(NamedTuple):
    """An op with what says which of its tensors it has."""

    op: str
    options: dict[str, Any]
    separate: bool = False
    norm: bool = False

    def inputs(
        self, rows=(3, 9), K=65, F=41, N=33, dtype=fp32, bias=True, epilogue=FULL, side_dtype=None
    ) -> dict[str, Any]:
        """side_dtype: of what no product takes, if it is another."""
        op, found = OPS[self.op], {}
        sizes = dict(rows=rows, K=K, C=K, F=F, N=N, separate=self.separate, norm=self.norm)
        for i, (name, shape) in enumerate(op.shapes_of(sizes).items()):
            arg = op.args[name]
            own = dtype if arg.operand else side_dtype or dtype
            if name in FULL and name not in epilogue:
                continue
            if name == "row_scale":
                found[name] = ((torch.arange(rows[0], device=DEVICE) % 3 != 1) / 0.7).to(own)
            elif name.endswith("bias") and not bias:
                found[name] = None
            else:
                scale = fan_in(shape) ** -0.5 if arg.kind == "matrix" else 1.0
                found[name] = rand(*shape, dtype=own, seed=i, scale=scale)
        return found

    def call(self, inputs: dict[str, Any], **options: Any) -> Tensor:
        return OPS[self.op].function(**inputs, **self.options | options)

    def check(self, inputs: dict[str, Any], upstream=None, dtype=None, **options) -> list[Error]:
        """By the 2x rule."""
        given = self.options | options
        function, reference = OPS[self.op].function, OPS[self.op].specification
        functions = partial(function, **given), partial(reference, **given)
        return assert_accurate(*functions, inputs, upstream=upstream, dtype=dtype)

    def gradients(self, inputs: dict[str, Any], **options: Any) -> dict[str, Tensor]:
        y, needed = self.call(inputs, **options), leaves(inputs)
        upstream = rand(*y.shape, dtype=y.dtype, seed=19, grad=False)
        found = torch.autograd.grad(y, list(needed.values()), upstream)
        return dict(zip(needed, found, strict=True))


LINEARS = {
    "linear": Form("linear", dict(activation=None)),
    "linear, gelu": Form("linear", dict(activation="gelu")),
}
GATED = {
    "packed": Form("gated_mlp", dict(activation="silu")),
    "packed, gate last": Form("gated_mlp", dict(activation="silu", gate_last=True)),
    "separate": Form("gated_mlp", dict(activation="silu"), separate=True),
    "normed": Form("gated_mlp", dict(activation="silu"), separate=True, norm=True),
}
MLP = Form("mlp", dict(activation="gelu"))
FORMS = {**LINEARS, "mlp": MLP, **GATED}


def leaves(inputs: dict[str, Any]) -> dict[str, Tensor]:
    return {n: x for n, x in inputs.items() if x is not None and x.requires_grad}


def only(inputs: dict[str, Any], *names: str) -> dict[str, Any]:
    """The same, where no others want a gradient."""
    return {n: x if x is None else x.detach().requires_grad_(n in names) for n, x in inputs.items()}


def saved_shapes(function) -> list[tuple[int, ...]]:
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: shapes.append(tuple(x.shape)), lambda x: x
    ):
        function()
    return sorted(shapes)
