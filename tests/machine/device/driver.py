"""A stand-in for Triton's driver: launches run on the machine, on CPU tensors.

Nothing of the package changes. The driver names the target, so Triton compiles for it; "assembling"
is left out (the PTX itself is what it calls a binary); a launch flattens the arguments as Triton's
own launcher does and runs the program.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastvit_kernels.runtime.backend import INTERPRETED, Gpu, backend, on_absent_gpu
from fastvit_kernels.runtime.compat import active_driver
from fastvit_kernels.runtime.triton import triton
from tests.machine.aot import TARGETS

from . import (  # noqa: F401, each registers its instructions
    arithmetic,
    async_copies,
    control,
    global_memory,
    mbarriers,
    mma,
    proxies,
    shared_memory,
    tensor_copies,
    warps,
    wgmma,
)
from .execution import Launch, argument
from .memory import GlobalMemory
from .program import Program
from .tensor_copies import host_map

# Arguments whose rows are longer than their tensors', with padding that the kernels fill in.
PADDED = ("lse_ptr", "delta_ptr")


@dataclass
class Machine:
    """What ran, and how."""

    order: int = 0
    launches: Counter[str] = field(default_factory=Counter)  # of each kernel
    seconds: float = 0.0  # of execution

    def launch(
        self,
        text: str,
        metadata: Any,
        grid: tuple[int, int, int],
        values: list,
        tensors: list[Tensor],
    ) -> None:
        """Run a kernel; `values` of its parameters, `tensors` that it may touch."""
        program = _program(text)
        scratch = _scratch(metadata, grid)
        values = [0 if x is None else x for x in (*values, scratch, None)]
        tensors = [*tensors, *([scratch] if scratch is not None else [])]
        arguments = [
            argument(parameter.type, x.data_ptr() if isinstance(x, Tensor) else x)
            for parameter, x in zip(program.parameters, values, strict=True)
        ]
        memory = GlobalMemory(tensors)
        began = time.perf_counter()
        with np.errstate(all="ignore"):
            Launch(program, grid, arguments, memory, metadata.shared, self.order).run()
        self.seconds += time.perf_counter() - began
        self.launches[metadata.name] += 1


def _scratch(metadata: Any, grid: tuple[int, int, int]) -> Tensor | None:
    """Global memory that the launcher lends a kernel, for tensor maps."""
    size = getattr(metadata, "global_scratch_size", 0) * int(np.prod(grid))
    return torch.zeros(size + 128, dtype=torch.uint8)[:size] if size else None


_program = cache(Program)


def flattened(
    signature: Sequence[Any], values: Sequence[Any], maps: Iterator[Any]
) -> Iterator[Any]:
    """The values that a kernel takes as parameters: tuples unpacked, constexprs left out, a host's
    TensorDescriptor as the map that `maps` says the compiler wants, and its numbers."""
    for kind, value in zip(signature, values, strict=True):
        if isinstance(kind, tuple):
            yield from flattened(kind, value, maps)
        elif str(kind).startswith("tensordesc"):
            made = next(maps)
            if value.padding == "nan" or made["fp4_padded"]:
                raise NotImplementedError(f"a map with NaN outside, or of fp4: {value}")
            form = made["block_size"], made["swizzle"], made["elem_type"]
            yield host_map(value.base, *form, value.shape, value.strides)
            yield from (*value.shape, *value.strides)
        elif kind != "constexpr":
            yield value


class _Launcher:
    """What Triton calls to launch a compiled kernel."""

    def __init__(self, source: Any, metadata: Any):
        self.signature, self.metadata = source.signature, metadata

    def __call__(self, x, y, z, stream, function, packed, launch_metadata, enter, leave, *values):
        maps = iter(getattr(self.metadata, "tensordesc_meta", None) or ())
        flat = list(flattened(list(self.signature.values()), values, maps))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        tensors += [x.base for x in values if hasattr(x, "block_shape")]
        for name, padded in zip(self.signature, values, strict=True):
            if name in PADDED and isinstance(padded, Tensor):
                tensors.append(padded.new_empty(0).set_(padded.untyped_storage()))
        _RUNNING[-1].launch(function, self.metadata, (x, y, z), flat, tensors)


_RUNNING: list[Machine] = []


@cache
def _driver(target: str) -> Any:
    number, gpu_target = 2000 + list(TARGETS).index(target), TARGETS[target].triton_target()
    limit = TARGETS[target].shared_limit
    return SimpleNamespace(
        get_current_device=lambda: number,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: gpu_target,
        launcher_cls=_Launcher,
        utils=SimpleNamespace(
            load_binary=lambda name, binary, *_: (None, binary.decode(), 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": limit},
        ),
    )


@contextmanager
def ptx_machine(target: str, order: int = 0) -> Iterator[Machine]:
    """Inside, the package's kernels are compiled for `target` and run on CPU tensors."""
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set, so there is nothing to compile")
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.driver import driver

    machine, gpu = Machine(order), TARGETS[target]
    former, assemble = active_driver(driver), CUDABackend.make_cubin
    CUDABackend.make_cubin = lambda self, src, *_: src.encode()
    driver.set_active(_driver(target))
    _RUNNING.append(machine)
    try:
        with (
            triton.knobs.cache.scope(),
            on_absent_gpu(Gpu(target, gpu.num_sms, gpu.shared_limit)),
            backend("triton"),
        ):
            triton.knobs.cache.dir = str(Path(triton.knobs.cache.dir) / "ptx_machine")
            yield machine
    finally:
        _RUNNING.pop()
        CUDABackend.make_cubin = assemble
        driver.set_active(former)  # pyright: ignore[reportArgumentType]
