"""`compare --sweep-tokens`: our attention over the best of torch's SDPA, at several lengths T.

Both read qkv (B, T, 3, H, D) as a ViT's projection writes it and give (B, T, H, D). Each sample
begins with a cold cache, all take turns. Ours must keep the 2x rule on the first image at each T.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..measure.gate import OK, failure, judge_op
from ..measure.timer import Timer, spread
from ..measure.turns import Contender, take_turns, time_together
from ..ops.attention.functions import attention, attention_ref
from ..runtime.backend import reason_for_torch
from ..runtime.dtypes import DTYPES
from ..swap.choices import machine_on, timer_of
from ..swap.compare import save_rows
from ..verify.accuracy import Reference
from . import options
from .console import aligned, refusing

H, D = 12, 64  # of ViT-B
OURS, MODES = "ours", ("forward", "backward")
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip


def tokens(text: str) -> list[int]:
    """An argparse type: lengths such as 197,257,577."""
    return [options.positive(int, 2**17)(part) for part in text.split(",")]


def sdpa(qkv: Tensor) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def contender(name: str, qkv: Tensor, mode: str, timer: Timer) -> Contender:
    """Ours or a backend of SDPA, ready to be timed, or with what it raised."""
    context: Any = nullcontext if name == OURS else partial(sdpa_kernel, SDPA[name])
    function: Callable[[Tensor], Tensor] = attention if name == OURS else sdpa
    made = Contender(name, partial(torch.no_grad()(function), qkv.detach()), context)
    if mode == "backward":
        try:
            with context():
                out = function(qkv)
            upstream = torch.randn_like(out)
            made.run = partial(torch.autograd.grad, out, qkv, upstream, retain_graph=True)
        except Exception as error:
            made.outcome = failure(error, timer)
    return made


def rows_of(
    T: int, B: int, dtype: torch.dtype, device: torch.device, seconds: float
) -> Iterator[dict[str, Any]]:
    """A row for each mode at one length: medians in ms, the fastest SDPA, its time over ours."""
    timer, reason = timer_of(device), reason_for_torch(torch.empty(1, device=device))
    qkv = torch.randn(B, T, 3, H, D, device=device, dtype=dtype, requires_grad=True)
    try:
        first = {"qkv": qkv[:1].detach().requires_grad_()}
        judged = judge_op(attention, Reference(attention_ref, first), ours=reason is None)
    except Exception as error:
        judged = failure(error, timer)
    for mode in MODES:
        every = [contender(name, qkv, mode, timer) for name in (OURS, *SDPA)]
        take_turns(every, timer, flush=True, rounds=2)
        time_together(every, timer, 1e3 * seconds / len(MODES), flush=True)
        ms = {c.name: spread(c.times).median for c in every if c.outcome.status == OK}
        ours_ms = ms.pop(OURS, None)
        best = min(ms, key=lambda name: ms[name], default="")
        status, note = judged if ours_ms else every[0].outcome
        gain = ms[best] / ours_ms if ours_ms and best and status == OK else None
        yield {
            "T": T, "mode": mode, "ours_ms": ours_ms, "sdpa": best, "sdpa_ms": ms.get(best),
            "speedup": gain, "status": status, "note": note,
        }  # fmt: skip


def draw(rows: list[dict[str, Any]], title: str, axes: Any) -> None:
    for mode in MODES:
        drawn = [(r["T"], r["speedup"]) for r in rows if r["mode"] == mode and r["speedup"]]
        axes.plot(*zip(*drawn, strict=True) if drawn else ((), ()), marker="o", label=mode)
    axes.axhline(1.0, color="0.6", linewidth=1)
    axes.set(xlabel="T", ylabel="time of the best SDPA / ours", ylim=(0, None), title=title)
    axes.legend(frameon=False)


def run(arguments: argparse.Namespace, device: torch.device, dtype: str) -> int:
    """The sweep: 1 where ours breaks the 2x rule or fails."""
    seconds = (arguments.time_budget or 10.0) / len(arguments.sweep_tokens)
    rows: list[dict[str, Any]] = []
    for T in arguments.sweep_tokens:
        rows += rows_of(T, arguments.batch, DTYPES[dtype], device, seconds)
    machine = machine_on(device)
    title = f"attention, B {arguments.batch}, H {H}, D {D}, {dtype}, {machine['device']}"
    cells = [["T", "", "ours, ms", "best SDPA", "", "speed-up", ""]]
    for row in rows:
        T, mode, ours_ms, best, best_ms, gain, status, note = row.values()
        figures = [f"{x:.3g}" if x else "-" for x in (ours_ms, best_ms, gain)]
        said = "" if status == OK else f"{status}: {note}"
        cells.append([str(T), mode, *figures[:2], best, figures[2], said])
    print(title, aligned(cells), sep="\n\n")
    if reason := reason_for_torch(torch.empty(1, device=device)):
        print(f"\nPyTorch runs ours too, so this says nothing of the kernels: {reason}")
    if arguments.out is not None:
        with refusing(f"--out {arguments.out} cannot be written", OSError):
            about = {**machine, "batch": arguments.batch, "dtype": dtype}
            drawn, rows = partial(draw, rows, title), [about | row for row in rows]
            print("written:", *save_rows(arguments.out, "sweep", rows, 4.0, drawn))
    return int(any(row["status"] != OK for row in rows))
