"""A case of the fuzz test: what it is made of, and how it is checked.

A `Case` is plain values, so that its repr, which a failing test prints, can be kept as it is in
fuzz_cases.KEPT. Numbers follow from the seed; strides from the name of a layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from guard import GuardPages, unwatched
from numerics import DEVICE
from torch import Tensor

from fastvit_kernels.accuracy.accuracy import Error, Function, Reference
from fastvit_kernels.accuracy.cases import OPS
from fastvit_kernels.accuracy.op import SampleShape, Whole
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.runtime.backend import backend
from fastvit_kernels.runtime.dtypes import DTYPES as FLOATS

DTYPES = {**FLOATS, "bool": torch.bool}


def in_precision(function: Function, autocast: torch.dtype | None) -> Function:
    """function under torch.autocast; on float64 tensors, which are the oracle's, as it is."""

    def run(**inputs: Tensor | None) -> Any:
        given = [x for x in inputs.values() if isinstance(x, Tensor)]
        if autocast is None or any(x.dtype is torch.float64 for x in given):
            context = nullcontext()
        else:
            context = torch.autocast(given[0].device.type, autocast)
        with context:
            return function(**inputs)

    return run


class Layout(NamedTuple):
    """Strides of a shape, and where in its storage the tensor starts."""

    strides: Callable[[tuple[int, ...]], list[int]]
    offset: int = 0
    min_ndim: int = 1


def _dense(shape: tuple[int, ...], order: list[int] | None = None, pad: int = 0) -> list[int]:
    """Strides of axes that lie in memory in this order, the last of them with a gap of `pad`."""
    strides, stride = [0] * len(shape), 1
    for i, axis in enumerate(reversed(order or list(range(len(shape))))):
        strides[axis] = stride
        stride *= max(1, shape[axis]) + (pad if i == 0 else 0)
    return strides


def _swapped(shape: tuple[int, ...], i: int, j: int) -> list[int]:
    order = list(range(len(shape)))
    order[i], order[j] = order[j], order[i]
    return _dense(shape, order)


def _replaced(shape: tuple[int, ...], axis: int, stride: int) -> list[int]:
    strides = _dense(shape)
    strides[axis] = stride
    return strides


LAYOUTS = {
    "dense": Layout(_dense),
    "offset": Layout(_dense, offset=3),  # the first element is not aligned
    "transposed": Layout(lambda s: _swapped(s, -1, -2), min_ndim=2),
    "outer": Layout(lambda s: _swapped(s, 0, 1), min_ndim=3),
    "ends": Layout(lambda s: _swapped(s, 0, -1), min_ndim=3),
    "padded": Layout(lambda s: _dense(s, pad=5), offset=2),  # x[..., 2:-3]
    "padded8": Layout(lambda s: _dense(s, pad=8), offset=8),
    "stepped": Layout(lambda s: [2 * x for x in _dense(s)], offset=1),
    "rows": Layout(lambda s: [*[3 * x for x in _dense(s)[:-1]], 1], min_ndim=2),  # every third
    "expanded": Layout(lambda s: _replaced(s, 0, 0), min_ndim=2),
    "expanded_rows": Layout(lambda s: _replaced(s, -2, 0), min_ndim=2),
    "broadcast": Layout(lambda s: _replaced(s, -1, 0)),
    "scalar": Layout(lambda s: [0] * len(s)),
    "windows": Layout(lambda s: _replaced(s, -2, 3), min_ndim=2),  # overlapping rows
    "windows8": Layout(lambda s: _replaced(s, -2, 8), min_ndim=2),
}


def _extent(shape: tuple[int, ...], layout: Layout) -> int:
    """Elements of the storage."""
    spans = zip(shape, layout.strides(shape), strict=True)
    return layout.offset + 1 + sum(max(0, n - 1) * s for n, s in spans)


@dataclass(frozen=True)
class Spec:
    """One tensor: its layout is a key of LAYOUTS, its numbers are normal times scale. Of dtype
    "samples", what keep_samples gives; its shape has how many it keeps, and of how many."""

    shape: tuple[int, ...]
    dtype: str = "fp32"
    layout: str = "dense"
    grad: bool = True
    scale: float = 1.0

    def make(self, seed: int, keep: bool = False) -> Tensor:
        """Normal numbers times scale; 0 or 1 / 0.7 where `keep`; for a bool mostly True."""
        if self.dtype == "samples":
            drawn = SampleShape(*self.shape).draw(torch.Generator().manual_seed(seed))
            return drawn.to(DEVICE)
        layout = LAYOUTS[self.layout]
        strides = layout.strides(self.shape)
        generator = torch.Generator().manual_seed(seed)
        flat = torch.randn(_extent(self.shape, layout), generator=generator)
        if self.dtype == "bool":
            flat = flat > -0.7
        else:
            flat = (flat > -0.5) / 0.7 if keep else flat * self.scale
        flat = flat.to(DEVICE, DTYPES[self.dtype])
        x = flat.as_strided(self.shape, strides, layout.offset)
        return x.requires_grad_(self.grad and x.is_floating_point())


@dataclass(frozen=True)
class Integers:
    """One tensor of integers, distinct along the last axis, dense."""

    shape: tuple[int, ...]
    whole: Whole

    def make(self, seed: int, keep: bool = False) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return self.whole.make(self.shape, generator).to(DEVICE)


@dataclass(frozen=True)
class Case:
    op: str
    inputs: Mapping[str, Spec | Integers | None]
    options: Mapping[str, Any] = field(default_factory=dict)
    upstream: str = "dense"  # layout of the gradient that arrives
    autocast: str | None = None
    route: str | None = None  # who multiplies in linear and mlp; None: as it ships
    first_output: bool = False  # of an op with several, the others unused
    direct: bool = True  # past torch's dispatcher, as where nobody watches
    seed: int = 0


def _functions(case: Case) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The op and its specification with the case's options, under its autocast."""
    op = OPS[case.op]

    def called(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(**inputs: Tensor | None) -> Any:
            outputs = function(**inputs, **case.options)
            return outputs[0] if case.first_output else outputs

        return in_precision(run, case.autocast and DTYPES[case.autocast])

    return called(op.function), called(op.specification)


class _Outcome(NamedTuple):
    errors: list[Error]
    broken: list[Error]
    by_far: bool  # and not by the luck of PyTorch's rounding


def _outcome(case: Case, seed: int) -> _Outcome:
    """Errors of the kernels on this case, every byte of memory checked."""
    function, reference = _functions(case)
    guard = GuardPages()
    inputs: dict[str, Tensor | None] = {}
    for i, (name, spec) in enumerate(case.inputs.items()):
        keep = OPS[case.op].args[name].kind == "keep"
        x = None if spec is None else spec.make(16 * seed + i, keep)
        inputs[name] = None if x is None else guard.place(x, name)
    with torch.no_grad():
        outputs = reference(**inputs)
    upstream = []
    for i, y in enumerate(outputs if isinstance(outputs, tuple) else (outputs,)):
        layout = case.upstream if y.ndim >= LAYOUTS[case.upstream].min_ndim else "dense"
        dtype = next(name for name, dtype in DTYPES.items() if dtype == y.dtype)
        gradient = Spec(tuple(y.shape), dtype, layout, grad=False).make(16 * seed + 14 + i)
        upstream.append(guard.place(gradient, f"upstream gradient {i}"))
    dtypes = [x.dtype for x in (*inputs.values(), *upstream) if x is not None]
    dtypes = [dtype for dtype in dtypes if dtype.is_floating_point]
    if case.autocast is not None:
        dtypes.append(DTYPES[case.autocast])
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    expected = Reference(reference, inputs, upstream=upstream, dtype=coarsest)
    route = nullcontext() if case.route is None else forced_route(case.route)
    with route, backend("triton"), guard, guard.watching(), unwatched(case.direct):
        errors = expected.errors(function)
    guard.check()
    zeros = {f"d{name}" for name, x in expected.oracle_grads.items() if _cancels(x, upstream)}
    left = max(CANCELLED, torch.finfo(coarsest).eps)
    broken = [e for e in errors if not (e.passed or (e.name in zeros and e.max <= left))]
    by_far = any(not e.max <= FAR * e.limit_max for e in broken if e.name not in zeros)
    return _Outcome(errors, broken, by_far)


CANCELLED = 1e-4  # what may be left of a gradient that is 0, where tensors are of order 1
FAR = 8.0


def _cancels(gradient: Tensor | None, upstream: list[Tensor]) -> bool:
    """Whether a float64 gradient is 0 but for rounding, as dk of one key: no scale for errors."""
    if gradient is None or not gradient.numel():
        return False
    largest = max((float(g.abs().max()) for g in upstream if g.numel()), default=0.0)
    return bool(gradient.abs().max() <= 1e-9 * largest)


def check(case: Case) -> None:
    """Raise AssertionError unless the case obeys the 2x rule and leaves other memory alone.

    With few elements, or sums that nearly cancel, PyTorch's error is small by luck now and then. So
    a limit that is passed by less than FAR must be passed with three sets of numbers to count.
    """
    for seed in range(case.seed, case.seed + 3):
        outcome = _outcome(case, seed)
        if not outcome.broken:
            return
        if outcome.by_far:
            break
    lines = "\n".join(f"  {e}" for e in outcome.errors)
    raise AssertionError(f"the 2x rule is broken, by {[e.name for e in outcome.broken]}:\n{lines}")
