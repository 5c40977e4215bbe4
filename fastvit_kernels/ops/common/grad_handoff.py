"""Hands the norm's cast gradient and bias sum to the preceding linear's backward.

    x = linear(...)       its backward reads d = row_scale * dx in its dtype, and g = sum_rows d
    y = norm(x)           its backward writes dx, and has d and g in registers

Autograd carries dx alone, so the norm's node leaves d and g with the linear's, beside dx. The
linear takes them where the gradient that autograd brings is that very tensor, in the version that
was left: a sum with another gradient, what a hook or the engine gives instead, is another tensor,
and a change in place is another version. In every other case it reads the gradient that it gets.

The norm's backward finds the linear's node as the grad_fn of its saved input, so nothing computes
between the two. torch.compile sees neither: its graphs have no nodes to look at.

A row_scale may be what `keep_samples` gave (samples.py): d then has the rows of kept samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...runtime.arguments import as_dtype, needs_gradient
from ...runtime.compat import FakeTensor, graph_task, node_class, raw_stream, version
from ...runtime.dispatch import backward_route, first_order, grad_enabled
from ...runtime.operator import EAGER, Operator
from .deferred import deferred

_compiling = torch.compiler.is_compiling
_KNOWN = frozenset({Tensor, FakeTensor})
_CONSUMERS: set[type] = set()  # of nodes


class Reads(NamedTuple):
    """What a linear's backward makes of its upstream gradient before anything else."""

    d_dtype: torch.dtype | None  # None: d is the gradient itself
    g_dtype: torch.dtype | None  # None: no g


def offer(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    bias: Tensor | None,
    layer_scale: Tensor | None,
    row_scale: Tensor | None,
    *,
    x: Tensor,
    needs_d: bool,
) -> Reads | None:
    """What the backward of a layer of x, that computes in dtype and writes out_dtype, can take."""
    needs_g = bias is not None and needs_gradient(bias, layer_scale)
    d_dtype = dtype if dtype != out_dtype or row_scale is not None else None
    if not needs_d or not (needs_g or d_dtype) or not (_compiling() or x.numel() > 0):
        return None  # a compiler may know no number of elements
    if not needs_g or bias is None:
        return Reads(d_dtype, None)
    return Reads(d_dtype, bias.dtype if layer_scale is None else torch.float32)


class Handed(NamedTuple):
    """The gradient that d and g belong to, its version, the stream and backward that wrote them."""

    gradient: Tensor
    version: int
    stream: int
    task: int
    d: Tensor
    g: Tensor | None


def register(function: Any) -> Any:
    """Marks an autograd.Function of one output that calls `publish` in its forward."""
    node = node_class(function)
    if node is not None:
        node.row_scale = node.handed = None  # until one has them
        _CONSUMERS.add(node)
    return function


def publish(ctx: Any, reads: Reads | None, row_scale: Tensor | None) -> None:
    """In the forward: a norm that reads the output may leave what `reads` says."""
    ctx.reads = reads
    if row_scale is not None:
        ctx.row_scale = row_scale
        ctx.written = 0 if _compiling() else version(row_scale)


def consumer_of(x: Tensor) -> Any:
    """In the backward: the node that made x, where it offered to take d and g; else None."""
    # a tensor's hook may write to the gradient's `.data`, which counts no version
    if _compiling() or x.__class__ not in _KNOWN or x._backward_hooks:
        return None
    node: Any = x.grad_fn
    if node.__class__ not in _CONSUMERS or node.reads is None:
        return None
    # A hook on saved tensors gives the layer its row_scale as it was.
    is_old = node.row_scale is not None and version(node.row_scale) != node.written
    return None if is_old else node


def _stream(x: Tensor) -> int:
    """The current stream of x's device: memory that another one reads must not be freed here."""
    return raw_stream(x.device.index) if x.is_cuda else 0


def dtype_of_sums(reader: Any, param_dtype: torch.dtype) -> torch.dtype:
    """Of the sums of a norm's backward, the gradients of its parameters and g: one launch."""
    return param_dtype if reader.reads.g_dtype in (None, param_dtype) else torch.float32


def put(reader: Any, gradient: Tensor, d: Tensor, sums: Sequence[Tensor]) -> None:
    """Leave what the node that made the norm's input reads: d, and g, the last of the sums."""
    d_dtype, g_dtype = reader.reads
    reader.handed = Handed(
        gradient,
        version(gradient),
        _stream(gradient),
        graph_task(),
        gradient if d_dtype is None else d,
        None if g_dtype is None else as_dtype(sums[-1], g_dtype),
    )


def take(
    ctx: Any, dy: Tensor, layer_scale: Tensor | None, row_scale: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """In the backward: d and its row_scale, which is None where d has it already; g for a layer
    with a layer_scale, and for one without it the gradient of its bias, which is g. Both None, and
    d dy itself, where nothing was left or dy is another gradient by now."""
    handed = None
    if _CONSUMERS and not _compiling():
        handed, ctx.handed = ctx.handed, None
    if handed is None or handed.gradient is not dy or handed.version != version(dy):
        return dy, row_scale, None, None
    if (handed.stream, handed.task) != (_stream(dy), graph_task()):
        return dy, row_scale, None, None
    if layer_scale is None:
        return handed.d, None, None, handed.g
    return handed.d, None, handed.g, None


def layer_backward(op: str, operator: Operator, *, bias: int, layer_scale: int) -> Any:
    """The backward of a Function of `op`, a layer that ends in residual + row_scale * layer_scale *
    (... + bias).

    Its inputs are those of its products, then residual, layer_scale, row_scale and the spec,
    which has the dtypes of all but row_scale. Its forward sets ctx.spec and ctx.options.

    Args:
        operator: (d, *saved, *options, a dtype for each gradient but the residual's, g) -> these
            gradients, without a dtype empty or None. It takes its first saved by `deferred.read`.
        bias: its place among the inputs. layer_scale: its place in what is saved, before row_scale.
    """
    row_scale = layer_scale + 1

    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if grad_enabled():
            return first_order(op, backward, ctx, dy)
        spec = ctx.spec
        dtypes = spec.input_dtypes
        *wanted, dresidual_dtype, dlayer_scale_dtype = [
            dtype if needed else None
            for dtype, needed in zip(dtypes, ctx.needs_input_grad[: len(dtypes)], strict=True)
        ]
        wanted = (*wanted, dlayer_scale_dtype)  # Dynamo of torch 2.11 has a tuple here, not a list
        dresidual = None if dresidual_dtype is None else as_dtype(dy, dresidual_dtype)
        if not any(wanted):
            return (*[None] * (len(wanted) - 1), dresidual, None, None, None)
        route = backward_route(spec.route, dy)
        with deferred if route == EAGER else nullcontext():  # the launcher reads it once
            saved = list(ctx.saved_tensors)
            d, saved[row_scale], g, known = take(ctx, dy, saved[layer_scale], saved[row_scale])
            asked = wanted if known is None else (*wanted[:bias], None, *wanted[bias + 1 :])
            grads = operator[route](d, *saved, *ctx.options, *asked, g)
        *grads, dlayer_scale = [
            grad if dtype else None for grad, dtype in zip(grads, asked, strict=True)
        ]
        if known is not None:
            grads[bias] = known
        return (*grads, dresidual, dlayer_scale, None, None)

    return staticmethod(backward)
