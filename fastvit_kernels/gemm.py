"""Matrix products that ops share: the vendor's library, and the main loop of the Triton GEMMs.

    out = a b [+ bias]        a (M, K), b (K, N), any strides; out (M, N) contiguous

A product with nothing around it is cuBLAS's (on CPU, BLAS's): `matmul`. A Triton GEMM is there for
its epilogue: it takes its tile from `grouped_tile` and its accumulator from `tile_product`.
Precision: fp32 accumulators.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fastvit_kernels._triton import tl, triton
from fastvit_kernels.backend import gpu

GROUP_M = 8  # row blocks that are walked together, so that L2 keeps their columns of b

# itemsize -> (BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages). None spills on sm_80 or sm_90 with
# the epilogues that use it; 128 x 256 with the exact erf would. Not yet measured.
LARGE_TILE = {2: (128, 128, 64, 8, 3), 4: (64, 64, 32, 8, 3)}
NARROW_TILE = {2: (128, 64, 64, 8, 3), 4: (64, 64, 32, 8, 3)}  # for epilogues with many live values
SMALL_TILE = {2: (64, 64, 64, 4, 3), 4: (32, 64, 32, 4, 3)}  # where these leave SMs idle


# Architecture -> the largest K at which a 16-bit product with an epilogue takes the Triton GEMM: it
# saves one pass over (M, N), which weighs less as K grows. Others: the library. Not yet measured.
TRITON_MAX_K = {"sm_80": 1024, "sm_86": 1024, "sm_89": 1024, "sm_90": 1024}


def choose_route(M: int, N: int, K: int, a: Tensor) -> Literal["library", "triton"]:
    """Who multiplies (M, K) a by (K, N) where an epilogue follows."""
    max_k = TRITON_MAX_K.get(gpu(a.device).arch, 0)
    return "triton" if a.dtype.itemsize == 2 and max_k >= K else "library"


def input_precision() -> Literal["ieee", "tf32"]:
    """How tl.dot multiplies fp32 tiles: by torch's own switch. 16-bit tiles do not look at it."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


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
    """The plain product a b + bias.

    The `out=` forms are used because torch.autocast leaves them alone: the fp32 product of a
    backward that runs inside an autocast region stays an fp32 product.

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
    if out.dtype != a.dtype:
        if a.is_cuda and out.dtype == torch.float32:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
            return out if bias is None else out.add_(bias)
        return _upcast_product(out, a, b, bias)
    if a.dtype.itemsize == 2 and not a.is_cuda:
        return _upcast_product(out, a, b, bias)  # some CPUs' 16-bit BLAS accumulates in 16 bits
    if bias is None:
        return torch.mm(a, b, out=out)
    return torch.addmm(bias, a, b, out=out)


def tile_options(
    M: int, N: int, K: int, a: Tensor, *, narrow: bool = False
) -> dict[str, int | bool | str]:
    """Constexprs and launch options of a Triton GEMM of this size with the operand a."""
    device = gpu(a.device)
    config = (NARROW_TILE if narrow else LARGE_TILE)[a.dtype.itemsize]
    if triton.cdiv(M, config[0]) * triton.cdiv(N, config[1]) < device.num_sms:
        config = SMALL_TILE[a.dtype.itemsize]
    block_m, block_n, block_k, num_warps, num_stages = config
    if device.arch.startswith("gfx"):
        num_stages = 2  # 64 KB of LDS
    return dict(
        EVEN_N=N % block_n == 0, EVEN_K=K % block_k == 0,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, GROUP_M=GROUP_M,
        INPUT_PRECISION=input_precision(), num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


@triton.jit
def grouped_tile(
    M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr
):  # fmt: skip
    """This program's (pid_m, pid_n), int64; GROUP_M row blocks are walked column by column."""
    pid = tl.program_id(0)
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = pid // (GROUP_M * num_n) * GROUP_M
    group_m = tl.minimum(num_m - first_m, GROUP_M)
    rest = pid % (GROUP_M * num_n)
    return (first_m + rest % group_m).to(tl.int64), (rest // group_m).to(tl.int64)


@triton.jit
def tile_product(
    a_ptr, b_ptr, offs_m, offs_n, M, N, K,
    stride_a_m, stride_a_k, stride_b_k, stride_b_n,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """(BLOCK_M, BLOCK_N) fp32 tile of a b at rows offs_m and columns offs_n, both int64.

    Rows past M repeat the last one: the caller masks them where it stores or sums.
    """
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    mask_n = offs_n < N
    a_ptrs = a_ptr + tl.minimum(offs_m, M - 1)[:, None] * stride_a_m + offs_k[None, :] * stride_a_k
    b_ptrs = b_ptr + offs_k[:, None] * stride_b_k + offs_n[None, :] * stride_b_n
    step = tl.full((), BLOCK_K, tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(tl.cdiv(K, BLOCK_K)):
        mask_k = offs_k < K - k * BLOCK_K
        a = tl.load(a_ptrs) if EVEN_K else tl.load(a_ptrs, mask=mask_k[None, :], other=0.0)
        if EVEN_K and EVEN_N:
            b = tl.load(b_ptrs)
        elif EVEN_K:
            b = tl.load(b_ptrs, mask=mask_n[None, :], other=0.0)
        else:
            b = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
        a_ptrs += step * stride_a_k
        b_ptrs += step * stride_b_k
    return acc
