"""`compare --sweep-tokens`: our attention over the best of torch's SDPA, at several lengths T.

Both read qkv (B, T, 3, H, D) as a ViT's projection writes it and give (B, T, H, D). Each sample
begins with a cold cache, all take turns. Ours must keep the 2x rule on the first image at each T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..measure.gate import OK, Outcome, judge_op, judged, judging
from ..measure.timer import Timer, spread, timer_of
from ..measure.turns import Contender, attempt, time_together
from ..ops.attention.functions import attention, attention_ref
from ..runtime.dtypes import DTYPES
from ..swap.choices import machine_on
from ..swap.compare import Comparison, by_pytorch
from ..verify.accuracy import Reference
from . import options

H, D = 12, 64  # of ViT-B
OURS, MODES = "ours", ("forward", "backward")
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Row:
    """One length in one mode: medians in ms, the fastest SDPA, its time over ours."""

    T: int
    mode: str
    batch: int
    dtype: str
    ours_ms: float | None
    sdpa: str
    sdpa_ms: float | None
    speedup: float | None
    status: str
    note: str

    @property
    def way(self) -> str:
        return f"T {self.T} {self.mode}"


class Sweep(Comparison):
    """Its rows are of lengths, not of ways."""

    base, file = "the best SDPA", "sweep"
    columns: ClassVar = {
        "ours, ms": ("ours_ms", ".3g"),
        "best SDPA": ("sdpa", ""),
        "ms": ("sdpa_ms", ".3g"),
        "speed-up": ("speedup", ".3g"),
    }

    def draw(self, axes: Any) -> None:
        for mode in MODES:
            drawn = [(r.T, r.speedup) for r in self.rows if r.mode == mode and r.speedup]
            axes.plot(*zip(*drawn, strict=True) if drawn else ((), ()), marker="o", label=mode)
        axes.axhline(1.0, color="0.6", linewidth=1)
        axes.set(xlabel="T", ylabel="time of the best SDPA / ours", ylim=(0, None))
        axes.set_title(f"{self.model}, {self.mode}, {self.machine['device']}")
        axes.legend(frameon=False)


def tokens(text: str) -> list[int]:
    """An argparse type: lengths such as 197,257,577."""
    return [options.positive(int, 2**17)(part) for part in text.split(",")]


def contender(name: str, qkv: Tensor, mode: str, timer: Timer) -> Contender:
    """Ours or a backend of SDPA, ready to be timed, or with what it raised."""
    context: Any = nullcontext if name == OURS else partial(sdpa_kernel, SDPA[name])
    function: Callable[[Tensor], Tensor] = attention if name == OURS else attention_ref
    made = Contender(name, partial(torch.no_grad()(function), qkv.detach()), context)
    if mode == "backward":
        with attempt(made, timer):
            with context():
                out = function(qkv)
            upstream = torch.randn_like(out)
            made.run = partial(torch.autograd.grad, out, qkv, upstream, retain_graph=True)
    return made


def rows_of(T: int, B: int, dtype: str, device: torch.device, seconds: float) -> Iterator[Row]:
    """A row for each mode at one length."""
    timer, kernels = timer_of(device), not by_pytorch(device)
    qkv = torch.randn(B, T, 3, H, D, device=device, dtype=DTYPES[dtype], requires_grad=True)
    first = {"qkv": qkv[:1].detach().requires_grad_()}

    def judge() -> Outcome:
        with judged(nullcontext(), kernels):
            return judge_op(attention, Reference(attention_ref, first))

    outcome = judging(judge, timer)
    for mode in MODES:
        every = [contender(name, qkv, mode, timer) for name in (OURS, *SDPA)]
        time_together(every, timer, 1e3 * seconds / len(MODES), flush=True)
        ms = {c.name: spread(c.times).median for c in every if c.outcome.status == OK}
        ours_ms = ms.pop(OURS, None)
        best = min(ms, key=lambda name: ms[name], default="")
        status, note = outcome if ours_ms else every[0].outcome
        note = "; ".join(filter(None, (note, by_pytorch(device))))
        gain = ms[best] / ours_ms if ours_ms and best and status == OK else None
        yield Row(T, mode, B, dtype, ours_ms, best, ms.get(best), gain, status, note)


def sweep(
    lengths: Sequence[int], B: int, dtype: str, device: torch.device, seconds: float
) -> Sweep:
    """Rows for each length, `seconds` for all."""
    each = seconds / len(lengths)
    rows = [row for T in lengths for row in rows_of(T, B, dtype, device, each)]
    return Sweep("attention", machine_on(device), f"B {B}, H {H}, D {D}, {dtype}", rows)
