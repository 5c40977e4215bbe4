"""Gluon, Triton's other language, by the names that its kernels here use: Hopper's part.

Its interface is experimental: names have changed between releases, and this module raises where
they changed again. `triton.has_gluon` says so once, and plain Triton runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .triton import tl as gl

    gluon: Any
    mbarrier: Any
    fence: Any
    fetch: Any
    put: Any
    add: Any
    store_wait: Any
    sync_warps: Any
    multiply: Any
    multiply_wait: Any
    TensorDescriptor: Any
else:
    from triton.experimental import gluon as gluon  # for the kernels
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    fence, mbarrier, store_wait = hopper.fence_async_shared, hopper.mbarrier, hopper.tma.store_wait
    multiply, multiply_wait = hopper.warpgroup_mma, hopper.warpgroup_mma_wait
    sync_warps = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # of a role
    if hasattr(hopper.tma, "async_load"):  # from triton 3.7 on
        fetch, put = hopper.tma.async_load, hopper.tma.async_store
    else:
        fetch = hopper.tma.async_copy_global_to_shared
        put = hopper.tma.async_copy_shared_to_global
    if hasattr(hopper.tma, "async_atomic_add"):  # from triton 3.8 on
        add = hopper.tma.async_atomic_add
    else:
        from triton._C.libtriton import ir

        @gl._core.builtin
        def add(tensor_desc, coord, src, _semantic=None):
            """Add a tile in shared memory to one in global memory, as `put` stores it."""
            coord = _semantic._convert_to_ir_values(coord, require_i64=False)
            kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
            _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, coord, src.handle)


DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


@functools.cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), DTYPES[dtype])


def tensor_map(
    x: Tensor, shape: Sequence[int], strides: Sequence[int], block: tuple[int, ...]
) -> Any:
    """How TMA passes blocks of a tensor that begins where x does, its last axis contiguous."""
    made: Any = object.__new__(TensorDescriptor)  # its own checks ask a fake tensor for an address
    made.base, made.shape, made.strides = x, list(shape), list(strides)
    made.block_shape, made.layout, made.padding = list(block), _layout(block, x.dtype), "zero"
    return made
