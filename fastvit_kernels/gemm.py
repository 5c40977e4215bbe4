"""Plain matrix products: the vendor's library, fp32 accumulators, outputs allocated here.

    out = a b [+ bias]        a (M, K), b (K, N), any strides; out (M, N) contiguous

A product with nothing around it is cuBLAS's (on CPU, BLAS's). The `out=` forms are used because
torch.autocast leaves them alone: the fp32 product of a backward that runs inside an autocast region
stays an fp32 product.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _upcast_product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    a, b = a.float(), b.float()
    product = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    if bias is None:
        torch.mm(a, b, out=product)
    else:
        torch.addmm(bias.float(), a, b, out=product)
    return out.copy_(product)


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The plain product a b + bias, whatever autocast says.

    Args:
        a, b: (M, K) and (K, N) of one dtype, any strides.
        out_dtype: dtype of the result; a.dtype by default, fp32 also where a and b have 16 bits.
        bias: (N,), dtype of a, or None.
        out: (M, N), written whole; allocated where None. Its dtype is then the result's.
    Returns: (M, N).
    Precision: fp32 accumulators. With a 16-bit a and an fp32 result nothing is rounded between.
    """
    if out is None:
        shape = (a.shape[0], b.shape[1])
        out = torch.empty(shape, dtype=out_dtype or a.dtype, device=a.device)
    if out.dtype != a.dtype and a.is_cuda and torch.version.hip is None:
        torch.mm(a, b, out_dtype=out.dtype, out=out)  # cuBLAS: 16-bit operands, fp32 result
        return out if bias is None else out.add_(bias)
    if out.dtype != a.dtype or (a.dtype.itemsize == 2 and not a.is_cuda):
        return _upcast_product(out, a, b, bias)  # some CPUs' 16-bit BLAS accumulates in 16 bits
    if bias is None:
        return torch.mm(a, b, out=out)
    return torch.addmm(bias, a, b, out=out)
