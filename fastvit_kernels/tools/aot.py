"""Compile every kernel of a step for named GPUs, on a machine that need not have one.

A step runs on fake CPU tensors (shapes, strides and dtypes, no memory). A dispatch mode calls each
operator's launcher where a real step would; `JITFunction.run` is replaced inside `tracing` by one
that swaps tensors for bare pointers of the same dtype and alignment and compiles without launching.
So Triton's own binder chooses the specialisations, as in a real step. A small stand-in driver names
the target. What the tensors' device does change, and how the cache keys compare: docs/compile.md.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from ..runtime.backend import INTERPRETED, Gpu, backend, on_absent_gpu
from ..runtime.compat import FakeTensorMode, TorchDispatchMode, active_driver
from ..runtime.operator import LAUNCHERS
from ..runtime.triton import HAS_TRITON, triton
from .machine_code import Code
from .resources import TARGETS, Kernel, Target, inspect
from .specialisation import digest_of, specialisation


class CompileError(RuntimeError):
    """A kernel that Triton cannot compile for a target; the message names both."""


class Launch(NamedTuple):
    """One launch of a step: the kernel, its grid, and what it was given."""

    kernel: Kernel
    code: Code | None  # None on AMD
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by name, constexprs too; tensors as (shape, dtype)
    integers: tuple[int | None, ...]  # the compiled kernel's arguments in order
    tensor_bytes: int  # of its tensors, each element once


class LibraryCall(NamedTuple):
    """One call of PyTorch's own operators in a step: what it multiplies, reads and writes."""

    name: str
    M: int
    N: int
    K: int  # 0 where it is no product
    tensor_bytes: int


@dataclass
class Trace:
    """What a step would launch, in order."""

    launches: list[Launch] = field(default_factory=list)
    torch_calls: list[LibraryCall] = field(default_factory=list)
    digests: set[str] = field(default_factory=set)  # of what was compiled: `digest_of`
    known: set[str] = field(default_factory=set)  # of what was not, since `tracing` was told so

    @property
    def kernels(self) -> list[Kernel]:
        """Each specialisation once."""
        return list({launch.kernel.key: launch.kernel for launch in self.launches}.values())


def tensor_bytes(x: Tensor) -> int:
    """Bytes of a tensor, elements that an expansion repeats once."""
    sizes = (n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return x.element_size() * math.prod(sizes)


class _Pointer:
    """What Triton's binder reads of a tensor: dtype, alignment, and on AMD the extent."""

    def __init__(self, x: Tensor):
        self.dtype = x.dtype
        self.address = int(x.storage_offset()) * x.element_size()  # of a 512-byte aligned block
        self.extent = x.untyped_storage().nbytes()

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return self.extent


def _absent_driver(target: Target) -> Any:
    """The part of a Triton driver that compiling asks for."""
    # Triton caches binders by device number: one for each target, none that a real GPU has.
    number, gpu_target = 1000 + list(TARGETS).index(target.name), target.triton_target()
    return SimpleNamespace(
        get_current_device=lambda: number,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: gpu_target,
    )


class _RunLaunchers(TorchDispatchMode):
    """Calls the launcher of each of the package's operators instead of its fake implementation."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "fastvit_kernels":
            result = func(*args, **(kwargs or {}))
            if (call := _library_call(func, args, result)) is not None:
                self.trace.torch_calls.append(call)
            return result
        with self:  # launchers may call operators
            return LAUNCHERS[func.overloadpacket.__name__](*args, **(kwargs or {}))


_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # -> place of the left operand


def _library_call(func: Any, args: Sequence[Any], result: Any) -> LibraryCall | None:
    """What a call of torch's operators costs; None for one that moves nothing: views, empty."""
    name = func.overloadpacket.__name__
    if (
        func.namespace != "aten"
        or func.is_view
        or name.startswith(("empty", "new_empty", "_unsafe_view", "detach"))
    ):
        return None
    tensors = [x for x in (*args, result) if isinstance(x, Tensor)]
    moved = sum(tensor_bytes(x) for x in tensors)
    if not moved:
        return None
    M = N = K = 0
    if (place := _PRODUCTS.get(name)) is not None:
        *batch, M, K = args[place].shape
        M, N = M * math.prod(batch), args[place + 1].shape[-1]
    return LibraryCall(name, M, N, K, moved)


class Share(NamedTuple):
    """One of several processes' part of a step: each `of`-th of its specialisations."""

    number: int
    of: int


WHOLE = Share(0, 1)


@contextmanager
def tracing(target: Target, share: Share = WHOLE, known: Container[str] = ()) -> Iterator[Trace]:
    """Inside, tensors are fake, and what would be launched on `target` joins the yielded trace.

    Args:
        share: compile and list this part alone.
        known: digests of specialisations to leave out; the trace names those it met.
    """
    if not HAS_TRITON:
        raise RuntimeError("triton is not installed")
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set, so there is nothing to compile")
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    trace = Trace()
    seen: dict[str, tuple[Kernel, Code | None]] = {}
    order: dict[str, int] = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        names = self.signature.parameters
        given = self.signature.bind(*args, **{k: x for k, x in kwargs.items() if k in names})
        given.apply_defaults()
        options = {k: x for k, x in kwargs.items() if k not in names}
        same = f"{specialisation(self, given.arguments)}|{options}"
        if order.setdefault(same, len(order)) % share.of != share.number:
            return
        digest = digest_of(self, same, target.name)
        if digest in known:
            trace.known.add(digest)
            return
        kwargs = {k: _pointers(x) for k, x in kwargs.items()}
        timings: list[float] = []
        triton.knobs.compilation.listener = lambda *, times, cache_hit, **_: timings.append(
            0.0 if cache_hit else times.total / 1e6
        )
        try:
            with redirect_stdout(io.StringIO()) as remarks:  # where Triton prints them
                compiled: Any = run(self, *map(_pointers, args), grid=grid, warmup=True, **kwargs)
        except Exception as error:
            name = self.fn.__name__
            raise CompileError(f"{name} does not compile for {target.name}: {error}") from error
        if compiled.hash not in seen:
            seen[compiled.hash] = inspect(compiled, target, sum(timings), remarks.getvalue())
        trace.digests.add(digest)
        grid = grid(given.arguments) if callable(grid) else grid
        trace.launches.append(_launch(*seen[compiled.hash], compiled, grid, given.arguments))

    former_driver = active_driver(driver)
    driver.set_active(_absent_driver(target))
    JITFunction.run = compile_only
    try:
        with (
            triton.knobs.compilation.scope(),
            triton.knobs.nvidia.scope(),
            on_absent_gpu(Gpu(target.name, target.num_sms, target.shared_limit)),
            FakeTensorMode(),
            _RunLaunchers(trace),
            backend("triton"),
        ):
            triton.knobs.nvidia.dump_ptxas_log = True
            yield trace
    finally:
        JITFunction.run = run
        driver.set_active(former_driver)  # pyright: ignore[reportArgumentType]


def trace_step(
    step: Callable[[], Any], target: Target, share: Share = WHOLE, known: Container[str] = ()
) -> Trace:
    """Compile the kernels that `step()` would launch on `target`.

    Args:
        step: makes its own tensors, on the CPU; they are fake, so any size is free.
        target: one of TARGETS.
        share: this part of the kernels alone.
        known: digests of specialisations to leave out.
    Raises: CompileError; RuntimeError under TRITON_INTERPRET=1.
    """
    with tracing(target, share, known) as trace:
        step()
    return trace


def compile_step(step: Callable[[], Any], target: Target) -> list[Kernel]:
    """The kernels of `trace_step`: each specialisation once, in launch order."""
    return trace_step(step, target).kernels


def _pointers(x: Any) -> Any:
    """Tensors as bare pointers, those in tuples too."""
    if isinstance(x, Tensor):
        return _Pointer(x)
    return tuple(map(_pointers, x)) if type(x) is tuple else x


def _launch(
    kernel: Kernel, code: Code | None, compiled: Any, grid: Sequence[int], given: dict[str, Any]
) -> Launch:
    integers: list[int | None] = []
    tensors: list[Tensor] = []

    def add(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for inner, each in zip(kind, value, strict=True):
                add(inner, each)
        elif kind != "constexpr":
            integers.append(value if isinstance(value, int) else None)
        if isinstance(value, Tensor):
            tensors.append(value)

    for name, kind in compiled.src.signature.items():
        add(kind, given[name])
    arguments = {
        name: (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for name, x in given.items()
    }
    moved = sum(map(tensor_bytes, tensors))
    return Launch(kernel, code, tuple(grid), arguments, tuple(integers), moved)
