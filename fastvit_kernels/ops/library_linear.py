"""A linear layer with no more around it than a residual, by the library alone.

    y = x W^T + b [+ residual];   dx = dy W,  dW = dy^T x,  db = sum dy,  dresidual = dy

Here no kernel of ours has anything to fuse, and the host's time decides at small batches: few calls
of torch, one Function of its own. linear.py says when a call is of this kind.
Saved: x and W, each where the other needs a gradient. Precision: the library's, fp32 accumulators;
db is summed in fp32 by `column_sum`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..runtime.arguments import as_rows
from ..runtime.dispatch import direct_apply, first_order, stays_direct
from .common.reduction import column_sum


def product(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """y (..., N) from x (..., K) contiguous, weight (N, K), residual (..., N), all of one dtype."""
    y = F.linear(x, weight, bias)
    return y if residual is None else y.add_(residual)


class LinearFunction(torch.autograd.Function):
    """(x, weight, bias, residual) -> y. Nothing is cast: the operands share one dtype."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual):
        needs_dx, needs_dweight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_dweight else None, weight if needs_dx else None)
        return product(x, weight, bias, residual)

    @staticmethod
    @first_order
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias, needs_dresidual = ctx.needs_input_grad
        rows = as_rows(dy)
        dx = dweight = dbias = None
        if needs_dx:  # autocast leaves `out=` forms alone
            dx = rows.new_empty(*dy.shape[:-1], weight.shape[1])
            torch.mm(rows, weight, out=dx.view(-1, weight.shape[1]))
        if needs_dweight:
            x = x.view(-1, x.shape[-1])
            dweight = torch.mm(rows.t(), x, out=rows.new_empty(rows.shape[1], x.shape[1]))
        if needs_dbias:
            N = rows.shape[1]
            dbias = column_sum(rows, rows.new_empty(N)) if stays_direct(dy) else rows.sum(0)
        return dx, dweight, dbias, dy if needs_dresidual else None


apply = direct_apply(LinearFunction)
