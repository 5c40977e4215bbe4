"""fk.verify: a batch through the model before and after the rewriting, in float64.

There is no kernel for float64: on every device, under every backend, the ops run their
specification in PyTorch. So what is compared is the rewriting of the graph; what the kernels
compute is held by their own tests, and on a GPU by `fk.compare`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..accuracy.accuracy import largest
from ..runtime.backend import backend
from . import select, swap
from .batch import arguments_of, check_batch, copied, noting
from .report import GraphReport
from .select import tensors
from .swapped import swapped_methods


class Difference(NamedTuple):
    """A tensor of the step: "out", "out.logits", "grad of blocks.0.norm1.weight", ...

    `error` is the largest difference as a share of the largest value of that tensor (of a gradient,
    of the largest gradient of its module); inf where only one side has the tensor or shapes differ.
    """

    name: str
    error: float


NO_KERNEL = "the rewrite only: in float64 PyTorch runs our ops, no kernel; fk.compare tries kernels"


@dataclass
class VerifyReport:
    """What `verify` found.

    Attributes:
        differences: every tensor that was compared, the largest error first.
        tolerance: the largest error that counts as rounding.
        graphs: reports of the rewritten graphs.
    """

    differences: list[Difference]
    tolerance: float
    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def different(self) -> list[Difference]:
        """Those beyond the tolerance."""
        return [d for d in self.differences if not d.error <= self.tolerance]

    @property
    def ok(self) -> bool:
        return not self.different

    def __str__(self) -> str:
        total, worst = len(self.differences), self.differences[:1]
        fired = sum(sum(g.rules.values()) for g in self.graphs)
        by = f"{fired} rewritten places in {len(self.graphs)} graph(s)"
        if self.ok:
            largest = f", the largest difference {worst[0].error:.1e} ({worst[0].name})"
            same = f"same: {total} outputs and gradients by {by}{largest if worst else ''}"
            return f"{same}\n{NO_KERNEL}"
        rows = [f"  {d.name}: {d.error:.1e}" for d in self.different[:20]]
        more = len(self.different) - len(rows)
        rows += [f"  and {more} more"] if more > 0 else []
        return "\n".join([f"different: {len(self.different)} of {total} by {by}", *rows])


def verify(model: nn.Module, batch: Any, *, tolerance: float = 1e-6) -> VerifyReport:
    """Run a training step with the original and the rewritten graph in float64, and compare.

    This holds the rewriting of the graph: in float64 PyTorch runs our ops, on a GPU too. `compare`
    holds what the kernels compute there.

    Compares outputs, gradients of all parameters and of floating-point inputs, and buffers. Both
    use the same seed, so that dropout draws the same. The model itself is not changed or called,
    but two copies in the same mode: three times its memory in float64 must fit.

    Args:
        model: any nn.Module, swapped (with its settings) or not.
        batch: a tensor, a tuple of arguments, or a dict of keyword arguments.
        tolerance: the largest error, relative to a tensor's largest value, that counts as rounding.
    Returns: a VerifyReport: .ok, .different, .differences; print it to read it.
    Raises: TypeError if model is not an nn.Module, or batch none of these; what the model raises on
        this batch.
    """
    model = select.unwrapped("verify", model)
    check_batch("verify", "batch", batch)
    args, kwargs = arguments_of(batch)
    fused = copy.deepcopy(model).double()
    host = copy.deepcopy(model).double()
    swap.swap_out(host)
    if not swapped_methods(fused):
        swap.swap_in(fused)
    with backend("torch"):  # "triton" refuses float64
        with noting("verify", "batch", batch):
            wanted = _step(host, args, kwargs)
        actual = _step(fused, args, kwargs)
    found = sorted(_compare(actual, wanted), key=lambda d: -d.error)
    graphs = [g for s in swapped_methods(fused) for g in s.calls.graphs]
    return VerifyReport(found, tolerance, graphs)


def _step(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    args, kwargs = copied((args, kwargs), torch.float64)
    inputs = [*tensors(args, "input"), *tensors(kwargs, "input")]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(0)
        outputs = dict(tensors(model(*args, **kwargs), "out"))
        torch.manual_seed(1)  # the upstream gradients
        losses = [(y * torch.randn_like(y)).sum() for y in outputs.values() if y.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
    found = {name: y.detach() for name, y in outputs.items()}
    given = [*inputs, *model.named_parameters()]
    found |= {f"grad of {n}": x.grad for n, x in given if x.grad is not None}
    return found | {f"buffer {n}": b for n, b in model.named_buffers()}


def _compare(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> Iterator[Difference]:
    peaks: dict[str, float] = {}
    for name, x in wanted.items():
        place = _place(name)
        peaks[place] = max(peaks.get(place, 0.0), largest(x))
    for name in dict.fromkeys([*wanted, *actual]):
        x, y = actual.get(name), wanted.get(name)
        if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
            yield Difference(name, float("inf"))
            continue
        yield Difference(name, _error(x, y, peaks[_place(name)]))


def _place(name: str) -> str:
    """A gradient that is zero but for rounding (the keys' bias) is measured by its module's."""
    return name.rpartition(".")[0] if name.startswith("grad of ") else name


def _error(x: Tensor, y: Tensor, peak: float) -> float:
    """NaN and inf in the same places are no difference."""
    if x.numel() == 0 or torch.equal(x, y):
        return 0.0
    if not x.is_floating_point():
        return float("inf")
    both = x.isfinite() & y.isfinite()
    same = (x == y) | (x.isnan() & y.isnan())
    if not bool((both | same).all()):
        return float("inf")
    difference = float((x - y)[both].abs().max()) if both.any() else 0.0
    return difference / peak if peak > 0 else (0.0 if difference == 0 else float("inf"))
