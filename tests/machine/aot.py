"""Compile every kernel of a step for named GPUs, on a machine that need not have one.

A step runs on fake CPU tensors (shapes, strides and dtypes, no memory). A dispatch mode calls each
operator's launcher where a real step would; `JITFunction.run` is replaced inside `tracing` by one
that swaps tensors for bare pointers of the same dtype and alignment and compiles without launching.
So Triton's own binder chooses the specialisations, as in a real step. A small stand-in driver names
the target. What the tensors' device does change, and how the cache keys compare: docs/compile.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor

from fastvit_kernels.runtime.backend import INTERPRETED, Gpu, backend, on_absent_gpu
from fastvit_kernels.runtime.compat import FakeTensorMode, TorchDispatchMode, active_driver
from fastvit_kernels.runtime.operator import LAUNCHERS
from fastvit_kernels.runtime.triton import HAS_TRITON, VERSION, triton


class Target(NamedTuple):
    """A GPU to compile for."""

    name: str
    num_sms: int  # of the GPU named beside it in TARGETS; it sets grids, not code
    shared_limit: int  # bytes a block: CUDA C++ programming guide, "Technical specifications"
    least_triton: tuple[int, ...] = (3, 6)  # whose assembler knows it

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")

    def triton_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if self.is_amd:
            return GPUTarget("hip", self.name, 64)
        return GPUTarget("cuda", int(self.name.removeprefix("sm_")), 32)


KB = 1024
TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", 108, 163 * KB),  # A100
        Target("sm_86", 82, 99 * KB),  # RTX 3090
        Target("sm_89", 128, 99 * KB),  # RTX 4090
        Target("sm_90", 132, 227 * KB),  # H100, H200
        Target("sm_100", 148, 227 * KB),  # B200
        Target("sm_103", 148, 227 * KB),  # B300
        Target("sm_110", 20, 227 * KB, least_triton=(3, 8)),  # Jetson Thor
        Target("sm_120", 170, 99 * KB),  # RTX 5090
        Target("sm_121", 48, 99 * KB),  # GB10
        Target("gfx942", 304, 64 * KB),  # MI300X
    )
}


class CompileError(RuntimeError):
    """A kernel that Triton cannot compile for a target; the message names both."""


@dataclass(frozen=True)
class Kernel:
    """One compiled specialisation."""

    kernel: str  # "layer_norm_fwd"
    config: str  # "BLOCK_ROWS=2 BLOCK_C=1024 HAS_BIAS w4 s3"
    dtypes: str  # of the pointers, "bf16,fp32"
    arch: str
    shared: int  # bytes a block
    shared_limit: int
    seconds: float  # to compile, 0 from the cache
    key: str  # Triton's cache key

    def __str__(self) -> str:
        return f"{self.arch} {self.kernel} [{self.config}; {self.dtypes}]"

    def problems(self) -> Iterator[str]:
        """What no kernel of this package may do, each in one sentence with the kernel's name."""
        if self.shared > self.shared_limit:
            yield f"{self}: {self.shared} bytes of shared memory, a block has {self.shared_limit}"


class Launch(NamedTuple):
    """One launch of a step: the kernel, its grid, and what it was given."""

    kernel: Kernel
    compiled: Any  # Triton's CompiledKernel
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by name, constexprs too; tensors are fake


class Share(NamedTuple):
    """One of several processes' part of a step: each `of`-th of its specialisations."""

    number: int
    of: int


WHOLE = Share(0, 1)


def specialisation(function: Any, given: dict[str, Any], name: Callable[[Any], str] = repr) -> str:
    """What a launch compiles, in words (`name` of a function): equal where Triton compiles once."""

    def word(x: Any, parameter: Any) -> str:
        if hasattr(x, "block_shape"):  # a tensor map
            return f"{x.base.dtype} {x.block_shape} {x.layout}"
        if isinstance(x, Tensor):
            return f"{x.dtype} {int(x.storage_offset()) * x.element_size() % 16 == 0}"
        if isinstance(x, int) and not parameter.is_constexpr:
            free, loose = parameter.do_not_specialize, parameter.do_not_specialize_on_alignment
            return f"{x == 1 and not free} {x % 16 == 0 and not (free or loose)} {x >> 31 != 0}"
        if isinstance(x, tuple) and not parameter.is_constexpr:
            return f"({', '.join(word(each, parameter) for each in x)})"
        if type(x) is float and not parameter.is_constexpr:
            return "float"
        return name(x) if hasattr(x, "src") else repr(x)

    words = [word(given[p.name], p) for p in function.params]
    return "|".join([function.__qualname__, *words])


class Trace:
    """What a step would launch, in order. A subclass may leave out some of it, or see more."""

    def __init__(self, share: Share = WHOLE):
        self.share = share
        self.launches: list[Any] = []  # Launch, or what a subclass makes of it
        self._order: dict[str, int] = {}

    @property
    def kernels(self) -> list[Kernel]:
        """Each specialisation once."""
        return list({launch.kernel.key: launch.kernel for launch in self.launches}.values())

    def wants(self, function: Any, given: dict[str, Any], options: dict[str, Any]) -> bool:
        """Whether this launch is compiled and listed."""
        words = f"{specialisation(function, given)}|{options}"
        return self._order.setdefault(words, len(self._order)) % self.share.of == self.share.number

    def compile(self, run: Callable[[], Any]) -> Any:
        """Triton's compiled kernel of a launch."""
        return run()

    def launched(self, launch: Launch) -> None:
        self.launches.append(launch)


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

    knows_our_operators = True  # else swapped modules leave them to their hosts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "fastvit_kernels":
            return func(*args, **(kwargs or {}))
        with self:  # launchers may call operators
            return LAUNCHERS[func.overloadpacket.__name__](*args, **(kwargs or {}))


def by_field(constants: dict[str, Any]) -> dict[str, Any]:
    """Constexprs by name, those that are tuples by the names of their fields."""
    found: dict[str, Any] = {}
    for name, value in constants.items():
        found |= value._asdict() if hasattr(value, "_asdict") else {name: value}
    return found


def _label(compiled: Any) -> tuple[str, str]:
    """Constexprs and options in one line, and the dtypes of the pointers in argument order."""
    source = compiled.src
    given = {p.name: source.constants.get((p.num,)) for p in source.fn.params if p.is_constexpr}
    words = [
        name if value is True else f"{name}={value}"
        for name, value in by_field(given).items()
        if value is not None and value is not False and value != ""
    ]
    words += [f"w{compiled.metadata.num_warps}", f"s{compiled.metadata.num_stages}"]
    pointers = [k for k in source.signature.values() if isinstance(k, str) and k.startswith("*")]
    return " ".join(words), ",".join(dict.fromkeys(kind[1:] for kind in pointers))


@contextmanager
def tracing(target: Target, trace: Trace) -> Iterator[None]:
    """Inside, tensors are fake, and what would be launched on `target` joins the trace.

    Raises: CompileError; RuntimeError where there is no triton or it interprets.
    """
    if not HAS_TRITON:
        raise RuntimeError("triton is not installed")
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set, so there is nothing to compile")
    if target.least_triton > VERSION:
        least = ".".join(map(str, target.least_triton))
        raise CompileError(f"{target.name} needs triton {least}, this is {triton.__version__}")
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    seen: dict[str, Kernel] = {}
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        names = self.signature.parameters
        given = self.signature.bind(*args, **{k: x for k, x in kwargs.items() if k in names})
        given.apply_defaults()
        options = {k: x for k, x in kwargs.items() if k not in names}
        if not trace.wants(self, given.arguments, options):
            return
        pointers = tuple(map(_pointers, args)), {k: _pointers(x) for k, x in kwargs.items()}
        timings: list[float] = []
        triton.knobs.compilation.listener = lambda *, times, cache_hit, **_: timings.append(
            0.0 if cache_hit else times.total / 1e6
        )
        try:
            compiled: Any = trace.compile(
                lambda: run(self, *pointers[0], grid=grid, warmup=True, **pointers[1])
            )
        except Exception as error:
            name = self.fn.__name__
            raise CompileError(f"{name} does not compile for {target.name}: {error}") from error
        if compiled.hash not in seen:
            name = compiled.metadata.name.removeprefix("_").removesuffix("_kernel")
            facts = target.name, compiled.metadata.shared, target.shared_limit, sum(timings)
            seen[compiled.hash] = Kernel(name, *_label(compiled), *facts, compiled.hash)
        sizes: Any = grid(given.arguments) if callable(grid) else grid
        trace.launched(Launch(seen[compiled.hash], compiled, tuple(sizes), dict(given.arguments)))

    former_driver = active_driver(driver)
    driver.set_active(_absent_driver(target))
    JITFunction.run = compile_only
    try:
        with (
            triton.knobs.compilation.scope(),
            on_absent_gpu(Gpu(target.name, target.num_sms, target.shared_limit)),
            FakeTensorMode(),
            _RunLaunchers(),
            backend("triton"),
        ):
            yield
    finally:
        JITFunction.run = run
        driver.set_active(former_driver)  # pyright: ignore[reportArgumentType]


def compile_step(step: Callable[[], Any], target: Target, share: Share = WHOLE) -> list[Kernel]:
    """The kernels that `step()` would launch on `target`, each specialisation once, in order.

    It makes its own tensors, on the CPU; they are fake, so any size is free. Raises: as `tracing`.
    """
    trace = Trace(share)
    with tracing(target, trace):
        step()
    return trace.kernels


def _pointers(x: Any) -> Any:
    """Tensors as bare pointers, those in tuples and under tensor maps too."""
    if isinstance(x, Tensor):
        return _Pointer(x)
    if hasattr(x, "block_shape"):
        x = copy.copy(x)
        x.base = _Pointer(x.base)
        return x
    return tuple(map(_pointers, x)) if type(x) is tuple else x
