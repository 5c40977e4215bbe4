"""The 2x rule: how the project decides that a kernel is right.

oracle     the specification in float64
yardstick  the same specification, run by PyTorch in the input dtypes. While a comparison fails, it
           runs again with its sums in other orders, up to ORDERS times; its largest error counts
rule       error(kernel) <= 2 * error(yardstick) + floor, in max and in RMS, for the output and the
           gradient of every input, with a random upstream gradient
floor      FLOOR_EPS * eps(dtype) * (largest, respectively RMS, magnitude of the oracle)

The floor allows for a yardstick that happens to be exact; it is about the rounding of the result
itself. dtype is the coarser one of the compared tensor and the inputs that led to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..runtime.compat import matmul_precision
from .orders import AnotherOrder

FLOOR_EPS = 2.0
ORDERS = 4
FAR = 8.0
Function = Callable[..., Tensor | tuple[Tensor, ...]]
Inputs = Mapping[str, Tensor | None]
Tensors = Mapping[str, Tensor]
Results = tuple[tuple[Tensor, ...], dict[str, Tensor | None]]  # outputs, gradient of each input


def _more(other: float, former: float, limit: float) -> float:
    """How much larger the error of another run is; what is far off or NaN is no rounding."""
    return other - former if former < other <= FAR * limit else 0.0


@dataclass(frozen=True)
class Error:
    """Errors of one tensor against float64: the kernel's, PyTorch's own, and the limit."""

    name: str
    max: float
    rms: float
    torch_max: float
    torch_rms: float
    limit_max: float
    limit_rms: float

    @property
    def passed(self) -> bool:
        return self.max <= self.limit_max and self.rms <= self.limit_rms

    @property
    def share(self) -> float:
        """The larger error as a share of its limit."""
        pairs = ((self.max, self.limit_max), (self.rms, self.limit_rms))
        return max(x / limit if limit > 0 else math.inf if x > 0 else 0.0 for x, limit in pairs)

    def beside(self, torch_max: float, torch_rms: float) -> Error:
        """The same error, where another run of the yardstick had these: the larger ones count."""
        more_max = _more(torch_max, self.torch_max, self.limit_max)
        more_rms = _more(torch_rms, self.torch_rms, self.limit_rms)
        return replace(
            self,
            torch_max=self.torch_max + more_max,
            torch_rms=self.torch_rms + more_rms,
            limit_max=self.limit_max + 2 * more_max,
            limit_rms=self.limit_rms + 2 * more_rms,
        )

    def within(self, factor: float) -> Error:
        """The same error, held against limits so many times as wide."""
        return replace(self, limit_max=factor * self.limit_max, limit_rms=factor * self.limit_rms)

    def __str__(self) -> str:
        return (
            f"{self.name}: max {self.max:.3e} (torch {self.torch_max:.3e}, "
            f"limit {self.limit_max:.3e}), rms {self.rms:.3e} (torch {self.torch_rms:.3e}, "
            f"limit {self.limit_rms:.3e}){'' if self.passed else '  FAILED'}"
        )


def together(name: str, errors: Sequence[Error], sizes: Sequence[int]) -> Error:
    """Errors of tensors of so many elements as of one vector: maxima, and RMS over all elements."""
    peaks = {f: max(getattr(e, f) for e in errors) for f in ("max", "torch_max", "limit_max")}
    means = {}
    for field in ("rms", "torch_rms", "limit_rms"):
        squares = (getattr(e, field) ** 2 * n for e, n in zip(errors, sizes, strict=True))
        means[field] = math.sqrt(sum(squares) / sum(sizes))
    return Error(name, **peaks, **means)


def _distance(actual: Tensor, oracle: Tensor) -> tuple[float, float]:
    if oracle.numel() == 0:
        return 0.0, 0.0
    oracle = oracle.detach().double()
    actual = actual.detach().to(oracle.device).double()
    difference = actual - oracle
    if not (peak := difference.abs().max()).isfinite():
        # Equal infinities are equal; a NaN only where the oracle has one too.
        difference[actual == oracle] = 0.0
        difference[actual.isnan() & oracle.isnan()] = 0.0
        difference = difference.nan_to_num(nan=float("inf"), posinf=float("inf"))
        peak = difference.abs().max()
    return peak.item(), difference.square().mean().sqrt().item()


def largest(x: Tensor) -> float:
    """The largest of the finite values, 0 where there are none."""
    finite = x[x.isfinite()]
    return finite.double().abs().max().item() if finite.numel() else 0.0


def measure(
    name: str,
    actual: Tensor,
    yardstick: Tensor,
    oracle: Tensor,
    dtype: torch.dtype,
    floor: float = 0.0,
) -> Error:
    """Compare one tensor with its float64 oracle and with PyTorch's own result.

    Args:
        name: for the report.
        actual, yardstick: same shape as oracle, any dtype, any device.
        oracle: float64.
        dtype: whose eps sets the floor.
        floor: added to it.
    Raises: AssertionError where the shapes differ.
    """
    assert actual.shape == oracle.shape, (
        f"{name}: shape {tuple(actual.shape)}, wanted {tuple(oracle.shape)}"
    )
    oracle = oracle.detach().double()
    max_, rms = _distance(actual, oracle)
    torch_max, torch_rms = _distance(yardstick, oracle)
    eps = torch.finfo(dtype).eps
    finite = oracle[oracle.isfinite()]
    scale = finite.square().mean().sqrt().item() if finite.numel() else 0.0
    return Error(
        name,
        max_,
        rms,
        torch_max,
        torch_rms,
        limit_max=2 * torch_max + FLOOR_EPS * eps * largest(oracle) + floor,
        limit_rms=2 * torch_rms + FLOOR_EPS * eps * scale + floor,
    )


def measure_all(
    actual: Tensors,
    specification: Callable[[], Tensors],
    oracle: Tensors,
    dtype: torch.dtype,
    floors: Mapping[str, float] | None = None,
) -> list[Error]:
    """`measure` each tensor of the oracle, by name.

    Args:
        specification: runs the yardstick; called again, with sums in other orders, while a
            comparison fails. One run's error may be small by luck, above all of few numbers.
        floors: added to the limits of these names.
    """
    yardstick, floors = specification(), floors or {}
    errors = [
        measure(name, actual[name], yardstick[name], o, dtype, floors.get(name, 0.0))
        for name, o in oracle.items()
    ]
    for seed in range(ORDERS):
        if all(e.passed for e in errors):
            break
        with AnotherOrder(seed):
            yardstick = specification()
        errors = [e.beside(*_distance(yardstick[e.name], oracle[e.name])) for e in errors]
    return errors


def _run(
    function: Function, inputs: Inputs, upstream: Sequence[Tensor] | None, to: torch.dtype | None
) -> Results:
    """Outputs and input gradients of function(**inputs), the inputs first cast to dtype `to`."""
    leaves: dict[str, Tensor | None] = {}
    for name, x in inputs.items():
        if x is None or not x.is_floating_point():
            leaves[name] = x
        else:
            # `to` None keeps the strides of the caller's tensor: they are part of the test.
            leaf = x.detach() if to is None else x.detach().to(to)
            leaves[name] = leaf.requires_grad_(x.requires_grad)
    result = function(**leaves)
    outputs = result if isinstance(result, tuple) else (result,)
    wanted = {n: x for n, x in leaves.items() if x is not None and x.requires_grad}
    if not wanted or upstream is None:
        return outputs, {}
    reached = [(y, g) for y, g in zip(outputs, upstream, strict=True) if y.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in reached],
        list(wanted.values()),
        [g if to is None else g.to(to) for _, g in reached],
        allow_unused=True,
    )
    return outputs, dict(zip(wanted, grads, strict=True))


@contextmanager
def convolutions_like_matmuls() -> Iterator[None]:
    """Inside, cuDNN takes TF32 only where fp32 products may: its own default would, and the
    yardstick's error, so the limit, would be that of TF32."""
    # its allow_tf32 raises where switches disagree
    convolutions: Any = getattr(torch.backends.cudnn, "conv")  # noqa: B009
    former = convolutions.fp32_precision
    convolutions.fp32_precision = matmul_precision()
    try:
        yield
    finally:
        convolutions.fp32_precision = former


def _named(outputs: tuple[Tensor, ...], grads: Inputs) -> Tensors:
    """By name: "out" or "out0", "out1", ...; "dx" for each gradient that there is."""
    names = ["out"] if len(outputs) == 1 else [f"out{i}" for i in range(len(outputs))]
    reached = {f"d{name}": grad for name, grad in grads.items() if grad is not None}
    return {**dict(zip(names, outputs, strict=True)), **reached}


class Reference:
    """The specification's results on one set of inputs, with which functions are compared.

    The oracle and the yardstick are computed here, once for however many functions.

    Args:
        reference: the specification, called with `inputs` by keyword, in the input dtypes and in
            float64.
        inputs: by argument name. Gradients are compared for those that require one.
        upstream: one gradient for each output; random normal of the output's dtype by default.
        dtype: whose eps sets the floor; by default the coarsest among inputs and outputs.
        seed: of the random upstream gradients.
    """

    def __init__(
        self,
        reference: Function,
        inputs: Inputs,
        *,
        upstream: Sequence[Tensor] | None = None,
        dtype: torch.dtype | None = None,
        seed: int = 0,
    ):
        with convolutions_like_matmuls():
            if upstream is None:
                outputs, _ = _run(reference, inputs, None, None)
                generator = torch.Generator().manual_seed(seed)
                upstream = [
                    torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in outputs
                ]
            self.reference, self.inputs = reference, inputs
            self.upstream, self.dtype = upstream, dtype
            self.oracle, self.oracle_grads = _run(reference, inputs, upstream, torch.float64)
            self.yardstick, self.yardstick_grads = _run(reference, inputs, upstream, None)

    def run(self, function: Function) -> Results:
        """The outputs of function and the gradient of each input that requires one."""
        return _run(function, self.inputs, self.upstream, None)

    def judge(self, actual: tuple[Tensor, ...], actual_grads: Inputs) -> list[Error]:
        """What `errors` returns, for what `run` returned."""
        floats = [
            x for x in (*self.inputs.values(), *actual) if x is not None and x.is_floating_point()
        ]
        dtype = self.dtype or max((x.dtype for x in floats), key=lambda d: torch.finfo(d).eps)
        first = [(self.yardstick, self.yardstick_grads)]

        def specification() -> Tensors:
            with convolutions_like_matmuls():
                return _named(*(first.pop() if first else self.run(self.reference)))

        for i, (a, y) in enumerate(zip(actual, self.yardstick, strict=True)):
            assert a.dtype == y.dtype, f"output {i}: dtype {a.dtype}, wanted {y.dtype}"
        for name, o in self.oracle_grads.items():
            a = actual_grads[name]
            assert (a is None) == (o is None), f"d{name}: got {a}, the reference {o}"
        oracle = _named(self.oracle, self.oracle_grads)
        return measure_all(_named(actual, actual_grads), specification, oracle, dtype)

    def errors(self, function: Function) -> list[Error]:
        """Of each output of function and each input's gradient, next to PyTorch's own.

        Args:
            function: the kernel; called with the inputs on their own strides and dtypes.
        Returns: one Error for each output ("out", or "out0", "out1", ...) and each gradient ("dx").
        """
        return self.judge(*self.run(function))
