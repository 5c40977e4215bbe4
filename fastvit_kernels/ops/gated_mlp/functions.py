"""Gated MLP of a ViT block: SwiGLU, GeGLU, with an optional LayerNorm inside.

    gate = x Wg^T + bg,   value = x W1^T + b1,   h = act(gate) * value   [n = LayerNorm(h), else h]
    y = residual + row_scale[sample] * layer_scale * (n W2^T + b2)

With d = row_scale * dy and sums over the M rows of x:

    dn = d (layer_scale * W2)   [dh of the LayerNorm, else dn]
    dgate = dh * value * act'(gate),   dvalue = dh * act(gate)
    dWg = dgate^T x,  dbg = sum dgate,   dW1 = dvalue^T x,  db1 = sum dvalue
    dx = dgate Wg + dvalue W1
    G = d^T n,  g = sum d:   dW2, db2, dlayer_scale from them, as in mlp;   dresidual = dy

The weights are packed, Wg and W1 the halves of one (2F, C), or separate; neither is ever copied.
Saved: x, gate, value, the weights, with a LayerNorm its mean and rstd. h (or n) is not: the pass
that reads gate and value for their gradients writes it again. With recompute=False it is saved too.
Precision: fp32 accumulators, gate, product and LayerNorm; gate, value and h (or n) are rounded to
the compute dtype. No atomics.
Products are the library's, but fc2 takes linear's routes, and without a LayerNorm one kernel
may make gate, value and h (warp_specialized.py).
Source: arXiv:2002.05202; the LayerNorm: arXiv:2303.11331. Derivation: docs/gated_mlp.md.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import (
    check_epilogue,
    check_eps,
    check_flags,
    check_input,
    check_shape,
    check_weight,
    compute_dtype,
    contiguous,
    empty,
    empty_gradients,
    needs_gradient,
)
from ...runtime.backend import gpu
from ...runtime.dispatch import cached_dispatch, choose_route
from ...runtime.operator import Route, differentiable, operator
from ..common import epilogue, gemm, grad_handoff
from ..common.activation import ACTIVATIONS, check_activation
from ..common.deferred import deferred
from ..common.epilogue import ScaledLinear
from ..common.gemm_configs import GATED_TABLE, gemm_config
from ..common.grad_handoff import layer_backward
from ..common.reduction import column_sum, zeroed
from ..common.samples import check_drawn
from ..linear import Output, decide_output, linear_ref, linear_to_output
from .kernels import MAX_NORM_F, Columns, gate_bwd, gate_fwd

# Names that `mlp` has for an MLP with packed weights -> the activation of its gate.
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


def gated_mlp_ref(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    activation: str = "silu",
    gate_last: bool = False,
    norm_eps: float = 1e-6,
    residual: Tensor | None = None,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Tensor:
    """The specification of `gated_mlp`: torch's own operations, one after the other."""
    value = linear_ref(x, fc1_weight, fc1_bias)
    if gate_weight is not None:
        gate = linear_ref(x, gate_weight, gate_bias)
    elif gate_last:
        value, gate = value.chunk(2, dim=-1)
    else:
        gate, value = value.chunk(2, dim=-1)
    hidden = ACTIVATIONS[activation](gate) * value
    if norm_weight is not None:
        dtype = torch.promote_types(hidden.dtype, norm_weight.dtype)
        weight, bias = (None if t is None else t.to(dtype) for t in (norm_weight, norm_bias))
        normed = torch.layer_norm(hidden.to(dtype), hidden.shape[-1:], weight, bias, norm_eps)
        hidden = normed.to(hidden.dtype)
    return linear_ref(hidden, fc2_weight, fc2_bias, None, residual, layer_scale, row_scale)


def _empty_hidden(
    x: Tensor, fc1_weight: Tensor, gate_weight: Tensor | None, norm_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, C = fc1_weight.shape
    M, F = x.numel() // C, rows if gate_weight is not None else rows // 2
    return (
        x.new_empty((*x.shape[:-1], F)),
        x.new_empty((M, rows)),
        *empty_gradients(
            x.device,
            ((M, F), None if gate_weight is None else x.dtype),
            ((2, M), None if norm_weight is None else torch.float32),
        ),
    )


def _flops_hidden(x, fc1_weight, gate_weight):
    rows = fc1_weight[0] + (gate_weight[0] if gate_weight else 0)
    return 2 * math.prod(x) * rows


def _halves(packed: Any, gate_last: bool, axis: int = 0) -> tuple[Any, Any]:
    """Of the gate, of the value."""
    first, second = (None, None) if packed is None else packed.chunk(2, axis)
    return (second, first) if gate_last else (first, second)


def _hidden_in_one(
    rows: Tensor,
    shape: torch.Size,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    activation: str,
    gate_last: bool,
) -> tuple[Any, ...] | None:
    """What `gated_hidden_fwd` returns without a norm, by one kernel in Gluon; None: not by it."""
    (M, K), packed = rows.shape, gate_weight is None
    F = fc1_weight.shape[0] // 2 if packed else fc1_weight.shape[0]
    config = gemm_config(gpu(rows.device), GATED_TABLE, M, F, K, rows.dtype)
    if config.route == "library" or F % 8:  # rows of hidden, and the halves of z, by TMA
        return None
    weights: Any = gate_weight, fc1_weight
    biases = gate_bias, fc1_bias
    if packed:
        weights, biases = _halves(fc1_weight, gate_last), _halves(fc1_bias, gate_last)
    plans: list[Any] = [gemm.tile_plan(config, rows, weight, transposed=True) for weight in weights]
    if not all(plan and plan.config == config and plan.tile.B_K_LAST for plan in plans):
        return None
    from .warp_specialized import launch_gated

    hidden, z = rows.new_empty((*shape[:-1], F)), rows.new_empty((M, fc1_weight.shape[0]))
    value: Any = None if packed else torch.empty_like(z)
    halves = _halves(z, gate_last, 1) if packed else (z, value)
    launch_gated(plans[0], hidden, *halves, rows, weights, biases, activation)
    return hidden, z, value, None


@operator(fake=_empty_hidden, flops=_flops_hidden)
def gated_hidden_fwd(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    activation: str,
    gate_last: bool,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden (..., F), z, value, stats, in x's dtype but the last, which is fp32.

    Packed weights: z is (M, 2F), as they lie, and value None. Separate: z is the gate's (M, F),
    value (M, F). stats (2, M) of an inner LayerNorm: mean, rstd; else None.
    """
    if x.numel() == 0:
        return _empty_hidden(x, fc1_weight, gate_weight, norm_weight)
    shape = x.shape
    rows = x.reshape(-1, shape[-1])
    value: Any = None
    fc1 = fc1_weight, fc1_bias, gate_weight, gate_bias, activation, gate_last
    made = None if norm_weight is not None else _hidden_in_one(rows, shape, *fc1)
    if made is not None:
        return made
    z = gemm.product_with_bias(rows, fc1_weight, fc1_bias)
    if gate_weight is not None:
        z, value = gemm.product_with_bias(rows, gate_weight, gate_bias), z
    stats: Any
    hidden, stats = gate_fwd(
        z, value, activation, gate_last, norm_weight, norm_bias, norm_eps, shape[:-1]
    )
    return hidden, z, value, stats


def _width(z: Tensor | None, value: Tensor | None, hidden: Tensor | None) -> int:
    """F, of what was saved."""
    if value is not None:
        return value.shape[1]
    return z.shape[1] // 2 if z is not None else 0 if hidden is None else hidden.shape[-1]


def _empty_bwd(
    dy: Tensor,
    x: Tensor | None,
    fc1_weight: Tensor | None,
    row_scale: Tensor | None,
    z: Tensor | None,
    value: Tensor | None,
    hidden: Tensor | None,
    dx_dtype: torch.dtype | None,
    dfc1_weight_dtype: torch.dtype | None,
    dfc1_bias_dtype: torch.dtype | None,
    dfc2_weight_dtype: torch.dtype | None,
    dfc2_bias_dtype: torch.dtype | None,
    dgate_weight_dtype: torch.dtype | None,
    dgate_bias_dtype: torch.dtype | None,
    dnorm_weight_dtype: torch.dtype | None,
    dnorm_bias_dtype: torch.dtype | None,
    dlayer_scale_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    N, F = dy.shape[-1], _width(z, value, hidden)
    C, K = 0 if x is None else x.shape[-1], 0 if fc1_weight is None else fc1_weight.shape[1]
    rows = F if value is not None else 2 * F
    return empty_gradients(
        dy.device,
        ((*epilogue.rows_shape(dy, row_scale), K), dx_dtype),
        ((rows, C), dfc1_weight_dtype),
        ((rows,), dfc1_bias_dtype),
        ((N, F), dfc2_weight_dtype),
        ((N,), dfc2_bias_dtype),
        ((F, C), dgate_weight_dtype),
        ((F,), dgate_bias_dtype),
        ((F,), dnorm_weight_dtype),
        ((F,), dnorm_bias_dtype),
        ((N,), dlayer_scale_dtype),
    )


def _flops_bwd(
    dy,
    x,
    fc1_weight,
    row_scale,
    z,
    value,
    hidden,
    dx_dtype,
    dfc1_weight_dtype,
    dfc2_weight_dtype,
    dgate_weight_dtype,
):
    M, N = epilogue.count_rows(dy, row_scale), dy[-1]
    F = value[1] if value else z[1] // 2 if z else hidden[-1] if hidden else 0
    rows = F if value else 2 * F
    wide = N * F * (bool(z) + bool(dfc2_weight_dtype))
    wide += 2 * F * fc1_weight[1] if dx_dtype else 0
    wide += rows * x[-1] if dfc1_weight_dtype else 0
    wide += F * x[-1] if dgate_weight_dtype else 0
    return 2 * M * wide


def _add_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a b, in the product itself where the dtypes allow."""
    if out.dtype == a.dtype and (out.is_cuda or out.dtype == torch.float32):
        torch.addmm(out, a, b, out=out)
    else:
        out.add_(gemm.matmul(a, b, out_dtype=torch.float32))


def _columns(x: Tensor, first: int, count: int) -> Tensor:
    """`count` columns of x; x itself where it has no others."""
    return x if x.shape[1] == count else x[:, first : first + count]


class Fc1(NamedTuple):
    """fc1, or the gate's layer next to it: what dx reads, and the dtypes of wanted gradients."""

    weight: Tensor | None
    dweight_dtype: torch.dtype | None
    dbias_dtype: torch.dtype | None


def _hidden_bwd(
    d: Tensor,
    fc2: ScaledLinear,
    hidden: Tensor | None,
    shape: tuple[int, int],
    gated: tuple[Any, ...],
    needs_dz: bool,
    sum_dz: bool,
) -> tuple[Any, Tensor | None]:
    """What `gate_bwd` gives of `gated`, where it is needed; and the hidden layer (M, F), saved or
    rebuilt, where fc2's gradients read it."""
    rows, rebuilt = None if hidden is None else hidden.contiguous().view(*shape), None
    if rows is None and fc2.needs_x:
        assert needs_dz  # its pass writes them
        rows = rebuilt = empty(shape, d.dtype, d.device)
    found: Any = None
    if needs_dz:
        assert fc2.weight is not None
        dhidden = gemm.matmul(*epilogue.input_gradient_operands(d, fc2.weight, fc2.layer_scale))
        found = gate_bwd(dhidden, rebuilt, *gated, sum_dz=sum_dz)
    return found, rows


def _fc1_bwd(
    found: tuple[Tensor, Tensor, Columns] | None,
    layers: list[Fc1],
    F: int,
    x: Tensor | None,
    shape: tuple[int, ...],
    dx_dtype: torch.dtype | None,
) -> tuple[Any, ...]:
    """dx (*shape, C), then (dweight, dbias) of fc1 and of the gate, from what `gate_bwd` gave.

    layers: fc1 and the gate, or fc1 alone with both packed.
    """
    dx: Any = None
    grads: list[Any] = [(None, None)] * 2
    if found is None:
        return dx, *grads
    dz, partial, at = found
    halves = [(0, 2 * F)] if len(layers) == 1 else [(at.value, F), (at.gate, F)]
    for i, (layer, half) in enumerate(zip(layers, halves, strict=True)):
        dhalf, dweight, dbias = _columns(dz, *half), None, None
        if layer.dbias_dtype is not None:
            dbias = empty((half[1],), layer.dbias_dtype, partial.device)
            column_sum(_columns(partial, *half), dbias)
        if layer.dweight_dtype is not None and x is not None:
            x = deferred.read(x)
            x_rows = x.reshape(dz.shape[0], -1)
            dweight = gemm.matmul(dhalf.t(), x_rows, out_dtype=layer.dweight_dtype)
        if dx is not None and layer.weight is not None:
            _add_product(dx, dhalf, layer.weight)
        elif dx_dtype is not None and layer.weight is not None:
            dx = gemm.matmul(dhalf, layer.weight, out_dtype=dx_dtype)
        grads[i] = dweight, dbias
    return None if dx is None else dx.view(*shape, dx.shape[1]), *grads


def _norm_bwd(
    found: tuple[Tensor, Tensor, Columns] | None, dtypes: tuple[torch.dtype | None, ...], F: int
) -> list[Any]:
    """dweight and dbias (F,) of the norm, from what `gate_bwd` gave; None where their dtype is."""
    grads: list[Any] = [None, None]
    if found is not None:
        _, partial, at = found
        for i, dtype in enumerate(dtypes):
            if dtype is not None:
                grads[i] = empty((F,), dtype, partial.device)
                column_sum(_columns(partial, at.stride + i * F, F), grads[i])
    return grads


@operator(fake=_empty_bwd, flops=_flops_bwd)
def gated_mlp_bwd(
    dy: Tensor,
    x: Tensor | None,
    fc1_weight: Tensor | None,
    fc2_weight: Tensor | None,
    fc2_bias: Tensor | None,
    gate_weight: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    z: Tensor | None,
    value: Tensor | None,
    hidden: Tensor | None,
    stats: Tensor | None,
    activation: str,
    gate_last: bool,
    dtype: torch.dtype,
    dx_dtype: torch.dtype | None,
    dfc1_weight_dtype: torch.dtype | None,
    dfc1_bias_dtype: torch.dtype | None,
    dfc2_weight_dtype: torch.dtype | None,
    dfc2_bias_dtype: torch.dtype | None,
    dgate_weight_dtype: torch.dtype | None,
    dgate_bias_dtype: torch.dtype | None,
    dnorm_weight_dtype: torch.dtype | None,
    dnorm_bias_dtype: torch.dtype | None,
    dlayer_scale_dtype: torch.dtype | None,
    g: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, gate_weight, gate_bias,
    norm_weight, norm_bias, layer_scale, in this order.

    Each in its dtype, None where that is None. The operands are in `dtype`, the forward's compute
    dtype; each may be None where no wanted gradient reads it, hidden also where z, kept for other
    gradients, can rebuild it. g (N,) fp32 has the column sums of dy, which is then in `dtype`.
    """
    fc1 = Fc1(fc1_weight, dfc1_weight_dtype, dfc1_bias_dtype)
    gate = Fc1(gate_weight, dgate_weight_dtype, dgate_bias_dtype)
    dfc2_dtypes = dfc2_weight_dtype, dfc2_bias_dtype, dlayer_scale_dtype
    fc2 = ScaledLinear(fc2_weight, fc2_bias, layer_scale, *dfc2_dtypes)
    dnorm_dtypes = dnorm_weight_dtype, dnorm_bias_dtype
    if dy.numel() == 0:
        dtypes = dx_dtype, *fc1[1:], *dfc2_dtypes[:2], *gate[1:], *dnorm_dtypes, dlayer_scale_dtype
        return zeroed(*_empty_bwd(dy, x, fc1_weight, row_scale, z, value, hidden, *dtypes))
    d, sums = epilogue.scaled_gradient(dy, row_scale, dtype, fc2, g)
    M, F = d.shape[0], _width(z, value, hidden)
    # A hook on saved tensors may have brought them back in other strides.
    gated = contiguous(z), contiguous(value), activation, gate_last
    gated = *gated, norm_weight, norm_bias, contiguous(stats)
    sum_dz = dfc1_bias_dtype is not None or dgate_bias_dtype is not None
    needs_dz = sum_dz or any((dx_dtype, dfc1_weight_dtype, dgate_weight_dtype, *dnorm_dtypes))
    found, rows = _hidden_bwd(d, fc2, hidden, (M, F), gated, needs_dz, sum_dz)
    dfc2 = epilogue.weight_gradients(d, sums, rows, fc2)
    del rows  # before x and dx take memory
    shape, layers = epilogue.rows_shape(dy, row_scale), [fc1] if value is None else [fc1, gate]
    dx, dfc1, dgate = _fc1_bwd(found, layers, F, x, shape, dx_dtype)
    dnorms = _norm_bwd(found, dnorm_dtypes, F)
    return dx, *dfc1, *dfc2[:2], *dgate, *dnorms, dfc2[2]  # pyright: ignore[reportReturnType]


class GatedMlpSpec(NamedTuple):
    """What `_decide` found for a kind of call."""

    route: Route | None  # None: the specification runs
    needs_gradient: bool
    fwd_options: tuple[Any, ...]  # what `gated_hidden_fwd` takes after its tensors
    bwd_options: tuple[Any, ...]  # the same of `gated_mlp_bwd`, but the gradients' dtypes
    dtype: torch.dtype  # to compute in
    casts: bool  # an operand has another dtype
    output: Output
    input_dtypes: tuple[torch.dtype | None, ...]  # of all inputs but row_scale
    saves_x: bool
    saves_fc1_weight: bool  # and the gate's
    saves_fc2_weight: bool
    saves_fc2_bias: bool
    saves_z: bool  # value, stats and the norm's parameters too
    saves_hidden: bool


@grad_handoff.register
class GatedMlpFunction(torch.autograd.Function):
    """`gated_hidden_fwd` and `linear_fwd` forward, one `gated_mlp_bwd` backward."""

    @staticmethod
    def forward(
        ctx,
        x,
        fc1_weight,
        fc1_bias,
        fc2_weight,
        fc2_bias,
        gate_weight,
        gate_bias,
        norm_weight,
        norm_bias,
        residual,
        layer_scale,
        row_scale,
        spec,
    ):
        if spec.casts:
            x, fc1_weight, fc2_weight, gate_weight = _cast(
                spec.dtype, x, fc1_weight, fc2_weight, gate_weight
            )
        gate, norm = (gate_weight, gate_bias), (norm_weight, norm_bias)
        hidden, z, value, stats = gated_hidden_fwd[spec.route](
            x, fc1_weight, fc1_bias, *gate, *norm, *spec.fwd_options
        )
        end = residual, layer_scale, row_scale
        y = linear_to_output(spec, hidden, fc2_weight, fc2_bias, *end)
        saves_z = spec.saves_z
        ctx.save_for_backward(
            x if spec.saves_x else None,
            fc1_weight if spec.saves_fc1_weight else None,
            fc2_weight if spec.saves_fc2_weight else None,
            fc2_bias if spec.saves_fc2_bias else None,
            gate_weight if spec.saves_fc1_weight else None,
            norm_weight if saves_z else None,
            norm_bias if saves_z else None,
            layer_scale,
            row_scale,
            z if saves_z else None,
            value if saves_z and gate_weight is not None else None,
            hidden if spec.saves_hidden else None,
            stats if saves_z and norm_weight is not None else None,
        )
        ctx.spec, ctx.options = spec, spec.bwd_options
        grad_handoff.publish(ctx, spec.output.reads, row_scale)
        return y

    backward = layer_backward("gated_mlp", gated_mlp_bwd, bias=4, layer_scale=7)


apply_gated_mlp = differentiable(GatedMlpFunction)


def _cast(dtype: torch.dtype, *operands: Tensor | None) -> list[Any]:
    """x and the weights in the compute dtype; the products read biases in any."""
    return [None if t is None else t.to(dtype) for t in operands]


OP = "gated_mlp"


def _check_gate(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    gate_last: bool,
) -> tuple[int, str | None]:
    """Raise on a bad fc1 or gate; F, and what the kernels cannot do."""
    unsupported = check_weight(OP, "fc1_weight", fc1_weight, fc1_bias, x.shape[-1], x)
    rows = fc1_weight.shape[0]
    if gate_weight is None:
        if gate_bias is not None:
            raise ValueError(f"{OP}: gate_bias needs a gate_weight, got None")
        if rows % 2:
            raise ValueError(
                f"{OP}: fc1_weight must have an even number of rows, gate and value, got {rows}; "
                "separate weights come as fc1_weight and gate_weight"
            )
        return rows // 2, unsupported
    check_shape(OP, "gate_weight", gate_weight, tuple(fc1_weight.shape), x)
    check_shape(OP, "gate_bias", gate_bias, (rows,), x)
    if gate_last:
        raise ValueError(
            f"{OP}: gate_last must be False beside a gate_weight, got True; it is for packed ones"
        )
    return rows, unsupported


def _check_norm(x: Tensor, F: int, weight: Tensor | None, bias: Tensor | None) -> str | None:
    """Raise on a bad inner LayerNorm; what the kernels cannot do."""
    check_shape(OP, "norm_weight", weight, (F,), x)
    check_shape(OP, "norm_bias", bias, (F,), x)
    if weight is None and bias is not None:
        raise ValueError(f"{OP}: norm_bias needs a norm_weight, got None")
    if weight is not None and F > MAX_NORM_F:
        return f"a LayerNorm over more than {MAX_NORM_F} hidden features, got {F}"
    return None


_OPERANDS = "x fc1_weight fc1_bias fc2_weight fc2_bias gate_weight gate_bias".split()


@cached_dispatch
def _decide(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    gate_weight: Tensor | None,
    gate_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    residual: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    activation: str,
    gate_last: bool,
    norm_eps: float,
    recompute: bool,
) -> GatedMlpSpec:
    """Check the arguments; what runs, in which dtypes, and what is saved."""
    check_input(OP, x)
    check_activation(OP, activation)
    if activation is None:
        raise ValueError(f"{OP}: activation must not be None; wanted one of {sorted(ACTIVATIONS)}")
    check_flags(OP, gate_last=gate_last, recompute=recompute)
    check_eps(OP, norm_eps, "norm_eps")
    F, unsupported = _check_gate(x, fc1_weight, fc1_bias, gate_weight, gate_bias, gate_last)
    end = residual, layer_scale, row_scale
    reasons = [
        unsupported,
        check_weight(OP, "fc2_weight", fc2_weight, fc2_bias, F, x),
        _check_norm(x, F, norm_weight, norm_bias),
        check_epilogue(OP, x, fc2_weight.shape[0], *end),
    ]
    operands = (x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, gate_weight, gate_bias)
    dtype = compute_dtype(OP, **dict(zip(_OPERANDS, operands, strict=True)))
    inputs = (*operands, norm_weight, norm_bias, residual, layer_scale)
    needs_dlayer_scale = needs_gradient(layer_scale)
    needs_dhidden = needs_gradient(*operands[:3], *operands[5:], norm_weight, norm_bias)
    needs_hidden = needs_gradient(fc2_weight, layer_scale)
    route = choose_route(OP, next(filter(None, reasons), None), *inputs, row_scale)
    casts = any(t is not None and t.dtype != dtype for t in operands)
    needs_d, fuses = needs_gradient(*operands, *inputs[7:9], layer_scale), route is not None
    output = decide_output(x, dtype, fc2_weight, fc2_bias, *end, needs_d, fuses and not casts)
    return GatedMlpSpec(
        route=route,
        needs_gradient=needs_gradient(*inputs),
        fwd_options=(activation, gate_last, norm_eps),
        bwd_options=(activation, gate_last, dtype),
        dtype=dtype,
        casts=casts,
        output=output,
        input_dtypes=tuple(None if t is None else t.dtype for t in inputs),
        saves_x=needs_gradient(fc1_weight, gate_weight),
        saves_fc1_weight=needs_gradient(x),
        saves_fc2_weight=needs_dhidden or needs_dlayer_scale,
        saves_fc2_bias=needs_dlayer_scale,
        saves_z=needs_dhidden,
        saves_hidden=needs_hidden and not (recompute and needs_dhidden),
    )


def gated_mlp(
    x: Tensor,
    fc1_weight: Tensor,
    fc1_bias: Tensor | None,
    fc2_weight: Tensor,
    fc2_bias: Tensor | None,
    *,
    gate_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    activation: str = "silu",
    gate_last: bool = False,
    norm_eps: float = 1e-6,
    residual: Tensor | None = None,
    layer_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    recompute: bool = True,
) -> Tensor:
    """The gated MLP of a ViT block, SwiGLU or GeGLU, with LayerScale, DropPath and residual.

    hidden = act(x Wg^T + bg) * (x W1^T + b1)   [then LayerNorm(hidden)]
    y = residual + row_scale[sample] * layer_scale * (hidden W2^T + b2)

    Args:
        x: (B, ..., C), fp16, bf16 or fp32, any strides.
        fc1_weight: (2F, C), gate and value packed, the gate in the first half (DINOv2's w12, timm's
            SwiGLUPacked); or beside a gate_weight the value's (F, C). fc1_bias: its rows, or None.
        fc2_weight: (N, F), fc2_bias: (N,) or None.
        gate_weight: (F, C), gate_bias: (F,) or None, where gate and value have separate weights
            (timm's SwiGLU: fc1_g; transformers: gate_proj, with up_proj as fc1). All weights and
            biases have any strides, and x.dtype unless under autocast.
        norm_weight, norm_bias: (F,), any floating dtype: a LayerNorm of the hidden layer (EVA02).
        activation: of the gate: "silu" (SwiGLU), "gelu" (GeGLU, exact erf), "gelu_tanh" or
            "quick_gelu".
        gate_last: with packed weights, whether the gate is the second half (timm's GluMlp).
        norm_eps: added to the LayerNorm's variance.
        residual, layer_scale, row_scale: as for `mlp`.
        recompute: save gate and value alone and rebuild the hidden layer in the backward, at the
            cost of one write of (B, ..., F). False saves that too. Without effect on the PyTorch
            path.
    Returns:
        (B, ..., N) in the compute dtype (autocast's, else x.dtype), promoted with residual.dtype.
    Precision: fp32 accumulators, gate, product and LayerNorm; gate, value and what fc2 reads are
        rounded to the compute dtype. Parameter gradients accumulate in fp32, each in its
        parameter's dtype.
    Saved: x and the weights in the compute dtype, gate and value (B, ..., F) each, of a LayerNorm
        mean and rstd, fp32, and without recompute the hidden layer.
    Raises: ValueError, such as "gated_mlp: fc2_weight must have shape (768, 2048), got
        (768, 4096)"; TypeError.
    Specification: gated_mlp_ref. Derivation: docs/gated_mlp.md.
    """
    inputs = (
        x,
        fc1_weight,
        fc1_bias,
        fc2_weight,
        fc2_bias,
        gate_weight,
        gate_bias,
        norm_weight,
        norm_bias,
        residual,
        layer_scale,
        row_scale,
    )
    spec = _decide(*inputs, activation, gate_last, norm_eps, recompute)
    if row_scale is not None:
        check_drawn("gated_mlp", row_scale, residual)
    if spec.route is None:
        return gated_mlp_ref(
            *inputs[:9], activation, gate_last, norm_eps, residual, layer_scale, row_scale
        )
    if spec.needs_gradient:
        return apply_gated_mlp[spec.route](*inputs, spec)
    if spec.casts:
        x, fc1_weight, fc2_weight, gate_weight = _cast(
            spec.dtype, x, fc1_weight, fc2_weight, gate_weight
        )
    hidden, _, _, _ = gated_hidden_fwd[spec.route](
        x, fc1_weight, fc1_bias, gate_weight, gate_bias, norm_weight, norm_bias, *spec.fwd_options
    )
    return linear_to_output(spec, hidden, fc2_weight, fc2_bias, residual, layer_scale, row_scale)
