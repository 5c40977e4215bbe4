"""The launches of a step with all that the gate and the model ask of them.

`tracing` is that of aot.py, which compiles without launching; here a trace has besides the code of
each kernel, and the digests of what was compiled, so that the gate can leave out what passed.
"""

from __future__ import annotations

import ast
import hashlib
import io
import math
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from fastvit_kernels.runtime.triton import triton
from tests.machine import aot
from tests.machine.aot import Target, specialisation

from .machine_code import Code, keep_remarks
from .resources import Kernel, inspect, num_warps


def tensor_bytes(x: Tensor) -> int:
    """Bytes of a tensor, elements that an expansion repeats once."""
    sizes = (n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return x.element_size() * math.prod(sizes)


class Launch(NamedTuple):
    """One launch of a step: the kernel, its grid, and what it was given."""

    digest: str  # of all that decides its machine code
    kernel: Kernel
    code: Code | None  # None on AMD
    grid: tuple[int, ...]
    arguments: dict[str, Any]  # by name, constexprs too; tensors as (shape, dtype)
    integers: tuple[int | None, ...]  # the compiled kernel's arguments in order
    tensor_bytes: int  # of its tensors, each element once


class Trace(aot.Trace):
    """What a step would launch on a target, in order; digests in `skip` are left out."""

    def __init__(self, target: Target, skip: Container[str] = ()):
        super().__init__()
        self.target, self.skip = target, skip
        self.met: set[str] = set()  # digests of all, left out or not
        self._digest = ""  # of what is being compiled
        self._read: dict[str, tuple[Kernel, Code | None]] = {}  # by key

    def wants(self, function: Any, given: dict[str, Any], options: dict[str, Any]) -> bool:
        words = f"{specialisation(function, given, sources)}|{options}"
        self._digest = digest_of(function, words, self.target.name)
        self.met.add(self._digest)
        return self._digest not in self.skip

    def compile(self, run: Callable[[], Any]) -> Any:
        with redirect_stdout(io.StringIO()) as remarks:  # where Triton prints them
            compiled = run()
        keep_remarks(compiled, remarks.getvalue())
        return compiled

    def launched(self, launch: aot.Launch) -> None:
        compiled, kernel = launch.compiled, launch.kernel
        if kernel.key not in self._read:
            code = None if self.target.is_amd else Code(compiled, num_warps(compiled))
            self._read[kernel.key] = inspect(compiled, self.target, kernel), code
        self.launches.append(_launch(self._digest, launch, *self._read[kernel.key]))


@contextmanager
def tracing(target: Target, skip: Container[str] = ()) -> Iterator[Trace]:
    """Inside, tensors are fake, and what would be launched on `target` joins the yielded trace."""
    trace = Trace(target, skip)
    with triton.knobs.nvidia.scope(), aot.tracing(target, trace):
        triton.knobs.nvidia.dump_ptxas_log = True
        yield trace


def trace_step(step: Callable[[], Any], target: Target, skip: Container[str] = ()) -> Trace:
    """The trace of `step()`, which makes its own tensors. Raises: CompileError."""
    with tracing(target, skip) as trace:
        step()
    return trace


def _launch(digest: str, launch: aot.Launch, kernel: Kernel, code: Code | None) -> Launch:
    given = launch.arguments
    integers: list[int | None] = []
    tensors: list[Tensor] = []

    def add(kind: Any, value: Any) -> None:
        if isinstance(kind, tuple):
            for inner, each in zip(kind, value, strict=True):
                add(inner, each)
        elif str(kind).startswith("tensordesc"):
            integers.extend([None, *value.shape, *value.strides])
            tensors.append(value.base)
        elif kind != "constexpr":
            integers.append(value if isinstance(value, int) else None)
        if isinstance(value, Tensor):
            tensors.append(value)

    for name, kind in launch.compiled.src.signature.items():
        add(kind, given[name])
    arguments = {
        name: (tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x
        for name, x in aot.by_field(given).items()
    }
    moved = sum(map(tensor_bytes, tensors))
    return Launch(digest, kernel, code, launch.grid, arguments, tuple(integers), moved)


@cache
def code_of(text: str) -> str:
    """What Python makes of it: equal however it is laid out and commented."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        has_body = isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
        if has_body and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)


@cache
def sources(function: Any) -> str:
    """The code of a Triton function and of all that it calls, with the values that they read.

    Its `cache_key` has its line in the file besides, which moves with every edit above it.
    """
    constant, found = triton.language.constexpr, {function: code_of(function.src)}
    for caller in (waiting := [function]):  # grows as we go
        known = caller.fn.__globals__
        for name in filter(known.__contains__, caller.fn.__code__.co_names):
            value = known[name]
            if hasattr(value, "src") and value not in found:
                found[value] = code_of(value.src)
                waiting.append(value)
            elif isinstance(value, constant) or not (callable(value) or type(value) is ModuleType):
                found[name] = f"{name}={value!r}"
    return "\n".join(map(str, found.values()))


def digest_of(function: Any, words: str, target: str) -> str:
    """Of all that decides a kernel's machine code: sources, constants, options, target, triton."""
    all_words = "|".join((sources(function), words, target, triton.__version__))
    return hashlib.sha256(all_words.encode()).hexdigest()[:16]
