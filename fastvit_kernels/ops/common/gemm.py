"""Matrix products that ops share: the vendor's library, and the main loop of the Triton GEMMs.

    out = a b [+ bias]        a (M, K), b (K, N), any strides; out (M, N) contiguous

A product with nothing around it is cuBLAS's (on CPU, BLAS's): `matmul`. A Triton GEMM is there for
its epilogue. Its kernel takes `tile_operands` once, then for each of its tiles `grouped_tile`,
`tile_product` and the epilogue, which may halve the tile with `column_halves`; `tile_plan` and
`tile_launch` start it. Which config a product takes is decided in gemm_configs.py.
Precision: fp32 accumulators. Each element is summed over K by one program, in order: no atomics.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...runtime.arguments import is_aligned
from ...runtime.backend import INTERPRETED, Gpu, gpu
from ...runtime.compat import is_autocast_on, matmul_precision
from ...runtime.configs import launch_plan
from ...runtime.triton import HAS_TRITON, VERSION, bind_launch, tl, triton
from .gemm_configs import TMA_FAMILIES, GemmConfig, gemm_key, triton_tile

# row blocks that are walked together, so that L2 keeps their columns of b
GROUP_M = 8


UNFENCED = HAS_TRITON and not INTERPRETED and VERSION < (3, 7, 1)


def needs_fence(gpu: Gpu, dtype: torch.dtype, precision: str) -> bool:
    """Whether a kernel has to fence what tensor cores read after cp.async wrote it.

    From Hopper on they read shared memory through the async proxy, cp.async writes it through the
    generic one, and before 3.7.1 Triton puts no fence between (triton #9610, #10537). Exact fp32
    products take no tensor cores.
    """
    return UNFENCED and gpu.family in TMA_FAMILIES and _is_on_tensor_cores(dtype, precision)


def _is_on_tensor_cores(dtype: torch.dtype, precision: str) -> bool:
    return dtype.itemsize == 2 or precision != "ieee"


def is_unpipelined(gpu: Gpu, dtype: torch.dtype, precision: str) -> bool:
    """Whether a loop may not copy ahead: that of tcgen05, whose pipeliner takes no fence of ours.

    By one stage no cp.async writes what tensor cores read. Triton 3.8 puts a fence before the first
    product alone: later iterations wait for a copy and multiply (read in PTX by the gate's rule).
    """
    return not INTERPRETED and gpu.family == 10 and _is_on_tensor_cores(dtype, precision)


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
) -> Tensor:
    """The plain product a b + bias.

    Under torch.autocast the `out=` forms run, which it leaves alone: the fp32 product of a backward
    inside such a region stays one. Elsewhere the plain forms do, which take the host less time.

    Args:
        a, b: (M, K) and (K, N) of one dtype, any strides.
        out_dtype: dtype of the result; a.dtype by default, fp32 also where a and b have 16 bits.
        bias: (N,), dtype of a, or None.
    Returns: (M, N).
    Precision: fp32 accumulators. With a 16-bit a and an fp32 result nothing is rounded between.
    """
    plain = out_dtype is None or out_dtype == a.dtype
    if plain and a.is_cuda | (a.dtype.itemsize > 2) and not is_autocast_on():
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)
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


def product_with_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias, contiguous: x (..., K), weight (N, K), one dtype; bias (N,) or None."""
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)  # the library's products have one dtype
    if x.is_contiguous() and x.is_cuda | (x.dtype == torch.float32) and not is_autocast_on():
        z = F.linear(x, weight, bias)  # one call, where `out=` forms take four
    else:
        (N, K), shape = weight.shape, x.shape[:-1]
        z = matmul(x.reshape(shape.numel(), K), weight.t(), bias=bias).view(*shape, N)
    return z.contiguous().data  # no view of the library's matrix: a Function's result may change


@functools.lru_cache(maxsize=1024)
def _readable_by_tma(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, contiguous: int
) -> bool:
    """Whether a matrix has rows along axis `contiguous` that lie 16-byte multiples apart."""
    step = strides[1 - contiguous]
    return strides[contiguous] == 1 and step >= shape[contiguous] and step * itemsize % 16 == 0


class GemmTile(NamedTuple):
    """Constants of a Triton GEMM."""

    PERSISTENT: Any
    DESCRIPTORS: Any  # operands come by TMA
    B_K_LAST: Any  # then: b is (N, K)
    FLATTEN: Any
    SUBTILES: Any
    EVEN_N: Any
    EVEN_K: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any
    GROUP_M: Any
    INPUT_PRECISION: Any


class TilePlan(NamedTuple):
    config: GemmConfig
    programs: int
    tile: GemmTile
    options: dict[str, int]  # of the launch
    launches: dict[Any, Any]  # by kernel and its flags


@launch_plan
def _tile_plan(
    gpu: Gpu, config: GemmConfig, M: int, N: int, K: int, b_k_last: bool, precision: str
) -> TilePlan:
    programs = triton.cdiv(M, config.block_m) * triton.cdiv(N, config.block_n)
    persistent = config.programs_per_sm > 0
    if persistent:
        programs = min(programs, config.programs_per_sm * gpu.num_sms)
    tma = config.descriptors
    limit = {"maxnreg": config.max_registers} if config.max_registers else {}
    tile = GemmTile(
        PERSISTENT=persistent,
        DESCRIPTORS=tma,
        B_K_LAST=tma and b_k_last,
        FLATTEN=config.flatten,
        SUBTILES=config.subtiles,
        EVEN_N=N % config.block_n == 0,
        EVEN_K=tma or K % config.block_k == 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=GROUP_M,
        INPUT_PRECISION=precision,
    )
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages, **limit)
    return TilePlan(config, programs, tile, options, {})


def tile_plan(
    config: GemmConfig, a: Tensor, b: Tensor, *, transposed: bool = False, plain: bool = False
) -> TilePlan | None:
    """How a kernel multiplies a (M, K) by b, which is (N, K) where transposed and (K, N) where not.

    None where the library has to: by its config, as TMA cannot read an operand, or as its address
    is off 16 bytes, so that the kernel would load element by element.

    Args:
        plain: no Gluon, whose kernel lacks the epilogue. It has no interpreter either.
    """
    if config.route == "library":
        return None
    for x in (a, b):
        known = x.__class__ is Tensor and x.data_ptr() % 16 == 0
        if not (known or is_aligned(x)):
            return None
    k_axis = 1 if transposed else 0
    b_k_last = b.stride(k_axis) == 1
    if config.descriptors:
        contiguous = k_axis if b_k_last else 1 - k_axis
        size = a.dtype.itemsize
        if not _readable_by_tma(a.shape, a.stride(), size, 1):
            return None
        if not _readable_by_tma(b.shape, b.stride(), size, contiguous):
            return None
    (M, K), N = a.shape, b.shape[1 - k_axis]
    if config.route == "gluon" and (plain or INTERPRETED):
        config = triton_tile(gpu(a.device), *gemm_key(M, N, K, a.dtype))
    return _tile_plan(gpu(a.device), config, M, N, K, b_k_last, matmul_precision())


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")  # torch aligns to 512 bytes


def tile_launch(plan: TilePlan, kernel: Any, **flags: Any) -> Callable[..., None]:
    """The launch of a kernel as planned, to be called at once, with tensors and sizes.

    A kernel that builds descriptors writes them into memory that Triton asks of the allocator of
    the current context. Ours is set in a copy of that context: the user's own stays what it was,
    and a thread that has none, such as autograd's, is served.
    """
    key = id(kernel), *flags.values()
    launch = plan.launches.get(key)
    if launch is None:
        launch = bind_launch(kernel, (plan.programs,), **flags, TILE=plan.tile, **plan.options)
        plan.launches[key] = launch
    if not plan.tile.DESCRIPTORS or INTERPRETED:
        return launch
    context = contextvars.copy_context()
    context.run(triton.set_allocator, _scratch)
    return functools.partial(context.run, launch)


@triton.jit
def grouped_tile(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """(pid_m, pid_n) of a tile; GROUP_M row blocks are walked column by column."""
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first_m = tile // (GROUP_M * num_n) * GROUP_M
    group_m = tl.minimum(num_m - first_m, GROUP_M)
    rest = tile % (GROUP_M * num_n)
    return first_m + rest % group_m, rest // group_m


@triton.jit
def tiles_of_program(M, N, TILE: tl.constexpr):
    """first, last, step of the tiles that a program makes."""
    first, last, step = tl.program_id(0), tl.program_id(0) + 1, 1
    if TILE.PERSISTENT:
        last = tl.cdiv(M, TILE.BLOCK_M) * tl.cdiv(N, TILE.BLOCK_N)
        step = tl.num_programs(0)
    return first, last, step


@triton.jit
def tile_operands(a_ptr, b_ptr, sizes, strides, TILE: tl.constexpr):
    """a and b as tile_product reads them: TMA descriptors, or the pointers as they are.

    sizes: M, N, K. strides: those of a by m and k, of b by k and n.
    """
    M, N, K = sizes
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    if TILE.DESCRIPTORS:
        stride_a_m, _, stride_b_k, stride_b_n = strides
        a = tl.make_tensor_descriptor(a_ptr, [M, K], [stride_a_m, 1], [BLOCK_M, BLOCK_K])
        if TILE.B_K_LAST:
            b = tl.make_tensor_descriptor(b_ptr, [N, K], [stride_b_n, 1], [BLOCK_N, BLOCK_K])
        else:
            b = tl.make_tensor_descriptor(b_ptr, [K, N], [stride_b_k, 1], [BLOCK_K, BLOCK_N])
        return a, b
    else:
        return a_ptr, b_ptr


@triton.jit
def tile_product(a, b, pid_m, pid_n, sizes, strides, TILE: tl.constexpr):
    """(BLOCK_M, BLOCK_N) fp32 tile (pid_m, pid_n) of a b, from tile_operands.

    Rows past M repeat the last one, or are 0: the caller masks them where it stores or sums.
    """
    M, N, K = sizes
    stride_a_m, stride_a_k, stride_b_k, stride_b_n = strides
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    EVEN_N: tl.constexpr = TILE.EVEN_N
    EVEN_K: tl.constexpr = TILE.EVEN_K
    B_K_LAST: tl.constexpr = TILE.B_K_LAST
    PRECISION: tl.constexpr = TILE.INPUT_PRECISION
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if TILE.DESCRIPTORS:
        row, column = pid_m * BLOCK_M, pid_n * BLOCK_N
        for k in range(tl.cdiv(K, BLOCK_K)):
            a_tile = a.load([row, k * BLOCK_K])
            b_tile = b.load([column, k * BLOCK_K]).T if B_K_LAST else b.load([k * BLOCK_K, column])
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
    else:
        offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
        mask_n = offs_n < N
        a_ptrs = a + tl.minimum(offs_m, M - 1)[:, None] * stride_a_m + offs_k[None, :] * stride_a_k
        b_ptrs = b + offs_k[:, None] * stride_b_k + offs_n[None, :] * stride_b_n
        step = tl.full((), BLOCK_K, tl.int64)
        for k in range(tl.cdiv(K, BLOCK_K)):
            mask_k = offs_k < K - k * BLOCK_K
            a_tile = tl.load(a_ptrs) if EVEN_K else tl.load(a_ptrs, mask=mask_k[None, :], other=0.0)
            if EVEN_K and EVEN_N:
                b_tile = tl.load(b_ptrs)
            elif EVEN_K:
                b_tile = tl.load(b_ptrs, mask=mask_n[None, :], other=0.0)
            else:
                b_tile = tl.load(b_ptrs, mask=mask_k[:, None] & mask_n[None, :], other=0.0)
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
            a_ptrs += step * stride_a_k
            b_ptrs += step * stride_b_k
    return acc


@triton.jit
def column_halves(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The left and the right half of a tile's columns; each thread keeps its elements."""
    halves = tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
    return tl.split(halves)
