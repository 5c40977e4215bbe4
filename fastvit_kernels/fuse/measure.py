"""swap_in(measure=batch): one A/B of the whole step, host and swapped model in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from . import select
from .batch import arguments_of, noting
from .select import tensors
from .swapped import swapped_methods

ROUNDS = 15
SECONDS = 10.0  # of measuring, after both have warmed up
HOST_BOUND = 0.9  # of a step's time, in which the host queues it: the GPU waits for the host
ADVICE = "the GPU waits for the host: use mode='reduce-overhead'"


def measure_step(
    model: nn.Module,
    batch: Any,
    undo: Callable[[], None],
) -> str:
    """Keep the swap only if the step, forward and backward, is faster by more than the noise.

    Gradients, buffers and random numbers are as before at the end. The step is measured in the mode
    and under the autocast that hold now; in eval mode or under no_grad without a backward.

    Returns: the sentence for the report, "original 36.8 ms, swapped 29.1 ms a step: 1.26x", or
        "NOT swapped: ...".
    Raises: what the host raises on this batch, with the model swapped out.
    """
    swapped = [(s.module, s) for s in swapped_methods(model)]
    before = [(p, p.grad) for p in model.parameters()]
    step = _step_of(model, *arguments_of(batch))
    try:
        with select.kept(model):
            undo()
            with noting("swap_in", "measure", batch):
                step()
            times, share = _in_turns(swapped, step, undo)
    except BaseException:
        undo()
        raise
    finally:
        for p, grad in before:
            p.grad = grad
    if share > HOST_BOUND:
        for _, method in swapped:
            method.calls.note(ADVICE)  # for fk.status
    host, fused = (statistics.median(t) for t in times)
    noise = sum(_spread(t) for t in times)
    said = f"original {host:.1f} ms, swapped {fused:.1f} ms a step"
    if fused < host - noise:
        return f"{said}: {host / fused:.2f}x"
    undo()
    what = "within the noise" if fused <= host + noise else "slower here"
    return f"NOT swapped: {said}, {what}"


def _step_of(model: nn.Module, args: Any, kwargs: Any) -> Callable[[], float]:
    """A step that gives the share of its time in which the host queued it; 0 on a CPU."""
    cuda = any(p.is_cuda for p in model.parameters())

    def step() -> float:
        start = time.perf_counter()
        model.zero_grad(set_to_none=True)
        outputs = [y for _, y in tensors(model(*args, **kwargs), "out") if y.requires_grad]
        if model.training and outputs:
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
        queued = time.perf_counter() - start
        if not cuda:
            return 0.0
        torch.cuda.synchronize()
        return queued / (time.perf_counter() - start)

    return step


def _in_turns(
    swapped: list[Any], step: Callable[[], float], undo: Callable[[], None]
) -> tuple[tuple[list[float], list[float]], float]:
    """Milliseconds of the host's steps and of the swapped model's, and the share of the latter in
    which the host queued it."""

    def as_host() -> None:
        undo()

    def as_fused() -> None:
        for module, method in swapped:
            method.put_into(module)

    ways = (as_host, as_fused)
    for way in ways:
        way()
        for _ in range(3):
            step()
    times: tuple[list[float], list[float]] = ([], [])
    shares = []
    end = time.perf_counter() + SECONDS
    while len(times[1]) < ROUNDS and (len(times[1]) < 3 or time.perf_counter() < end):
        for way, found in zip(ways, times, strict=True):
            way()
            start = time.perf_counter()
            shares.append(step())
            found.append(1e3 * (time.perf_counter() - start))
    return times, statistics.median(shares[1::2])


def _spread(times: list[float]) -> float:
    """Half of the distance between the quartiles."""
    low, _, high = statistics.quantiles(times, n=4)
    return (high - low) / 2
