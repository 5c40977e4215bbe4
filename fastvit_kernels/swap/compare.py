"""fk.compare: a model as its library has it, compiled, and swapped, side by side in one run.

errors  of the swapped model's outputs and gradients, by the 2x rule: else no speed-up is shown
losses  the first steps of each, from the same weights and the same random numbers
time    steps in turns, so that a clock that drifts drifts for all
"""

from __future__ import annotations

import copy
import csv
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..measure.gate import OK, Outcome, failure, verdict
from ..measure.timer import Timer, spread
from ..measure.turns import Contender, time_together
from ..runtime.backend import backend, reason_for_torch
from ..runtime.files import write_atomically, write_text
from . import choices
from .apply import swap_in, swap_out
from .choices import Measure, called, machine_on
from .errors import model_errors
from .facts import leaves
from .report import is_ours

EAGER, SWAPPED = "eager", "swapped"
WAYS = {  # torch.compile's mode of each; None: not compiled
    EAGER: None, "compile": "default", "max-autotune": "max-autotune",
    SWAPPED: None, "swapped+compile": "default", "swapped+max-autotune": "max-autotune",
}  # fmt: skip
MAX_SAMPLES = 50


@dataclass(frozen=True)
class Row:
    """What one way of running the model gave. Times are medians of a step, in ms.

    Attributes:
        images_per_s: of the first tensor's first axis.
        peak_mib: memory at the peak of a step above what stays; None on a CPU.
        speedup: eager's time over this one's; None beside wrong numbers, or where one has no time.
        loss_gap: the largest difference from eager's loss over the first steps.
        status, note: "ok", or what went wrong.
    """

    way: str
    ms: float | None = None
    ms_p20: float | None = None
    ms_p80: float | None = None
    images_per_s: float | None = None
    peak_mib: float | None = None
    speedup: float | None = None
    loss_gap: float | None = None
    status: str = OK
    note: str = ""


@dataclass(frozen=True)
class Comparison:
    """What `compare` measured. Prints as a table, then a line to quote."""

    model: str
    machine: Mapping[str, str]
    mode: str
    rows: list[Row] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{'':22} {'ms':>9} {'images/s':>9} {'peak MiB':>9} {'speed-up':>9} {'loss':>9}"]
        for r in self.rows:
            cells = (
                _cell(r.ms, ".4g"), _cell(r.images_per_s, ",.0f"), _cell(r.peak_mib, ",.0f"),
                _cell(r.speedup, ".2f"), _cell(r.loss_gap, ".1e"),
            )  # fmt: skip
            said = f"  {r.status}: {r.note}" if r.status != OK else f"  {r.note}" * bool(r.note)
            lines.append(f"{r.way:22} " + " ".join(f"{c:>9}" for c in cells) + said)
        return "\n".join([*lines, "", self.line])

    @property
    def line(self) -> str:
        """One line that says what was measured, where."""
        best = max((r for r in self.rows if r.speedup), key=lambda r: r.speedup or 0, default=None)
        told = "no speed-up" if best is None else f"{best.way} {best.speedup:.2f}x of eager"
        where = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        return f"{self.model}, {self.mode}: {told} ({where})"

    def save(self, folder: str | Path) -> list[Path]:
        """Write compare.csv and, where matplotlib is installed, compare.png into a folder."""
        about = {"model": self.model, "mode": self.mode, **self.machine}
        rows = [{**about, **asdict(row)} for row in self.rows]
        return save_rows(Path(folder), "compare", rows, 1.2 + 0.45 * len(rows), self._draw)

    def _draw(self, axes: Any) -> None:
        rows = [row for row in self.rows if row.ms is not None]
        bars = axes.barh([row.way for row in rows], [row.ms or 0.0 for row in rows])
        axes.bar_label(bars, [_cell(row.ms, ".4g") for row in rows], padding=3)
        axes.invert_yaxis()
        axes.set(xlabel="ms a step", title=f"{self.model}\n{self.mode}, {self.machine['device']}")


def save_rows(
    folder: Path, name: str, rows: Sequence[Mapping[str, Any]], height: float,
    draw: Callable[[Any], object],
) -> list[Path]:  # fmt: skip
    """Write name.csv and, where matplotlib is installed, name.png, which draw(axes) fills.

    Args:
        height: of the picture, in inches.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    table = csv.DictWriter(text, [*rows[0]], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    written = [folder / f"{name}.csv"]
    write_text(written[0], text.getvalue())
    with suppress(ModuleNotFoundError):
        from matplotlib.figure import Figure

        figure = Figure((7, height), layout="constrained")
        draw(figure.subplots())
        written.append(folder / f"{name}.png")
        write_atomically(written[1], lambda file: figure.savefig(file, format="png", dpi=150))
    return written


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


class _Runner:
    """A copy of the model, run in one way, with an optimizer if it trains."""

    def __init__(self, model: nn.Module, way: str, batch: Measure, autocast: torch.dtype | None):
        self.model, self.batch, self.autocast = copy.deepcopy(model), batch, autocast
        self.device = next(self.model.parameters()).device
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.trains = self.model.training and bool(parameters)
        # Our own modules have no other class: PyTorch runs them as it runs a host's.
        self.plain = not way.startswith(SWAPPED) and any(map(is_ours, self.model.modules()))
        (swap_in if way.startswith(SWAPPED) else swap_out)(self.model)
        mode, self.forward = WAYS[way], self.model
        if mode is not None:
            self.forward: Any = torch.compile(self.model, mode=mode, dynamic=False)
        if self.trains:
            fused = self.device.type == "cuda"
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=fused)

    def loss(self) -> Tensor:
        """The callable's; else the mean square of the outputs."""
        with (
            torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None),
            backend("torch") if self.plain else nullcontext(),
        ):
            found = called(self.forward, self.batch)
        if isinstance(found, Tensor) and found.ndim == 0:
            return found
        outputs = [x for x in leaves(found, Tensor) if x.is_floating_point()]
        return torch.stack([x.float().square().mean() for x in outputs]).sum()

    def step(self) -> Tensor:
        if not self.trains:
            with torch.no_grad():
                return self.loss()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def losses(self, steps: int) -> Tensor:
        """Of the first steps, which warm up too."""
        torch.manual_seed(0)
        return torch.stack([self.step() for _ in range(steps)]).double().cpu()


def _judged(model: nn.Module, batch: Any, autocast: torch.dtype | None) -> Outcome:
    """Whether the swapped model keeps the 2x rule on this batch; in evaluation, where nothing is
    drawn."""
    if any(map(is_ours, model.modules())):
        return Outcome(OK, "numbers not compared: our own modules, see fastvit-kernels check")
    inputs = batch[0] if isinstance(batch, tuple) and len(batch) == 1 else batch
    if not isinstance(inputs, (Tensor, Mapping)):
        return Outcome(OK, "numbers not compared: the batch is no tensor and no dict")
    plain = copy.deepcopy(model).eval()
    swap_out(plain)
    try:
        return verdict(model_errors(plain, inputs, autocast=autocast))
    except torch.OutOfMemoryError:
        return Outcome(OK, "numbers not compared: float64 does not fit")


def compare(
    model: nn.Module, batch: Measure, *, ways: Sequence[str] = (EAGER, SWAPPED),
    autocast: torch.dtype | None = None, steps: int = 20, seconds: float = 10.0, name: str = "",
) -> Comparison:  # fmt: skip
    """Measure a model as it is, compiled, and swapped: time, memory, numbers. The model stays as it
    is: each way runs a copy.

    Args:
        model: any nn.Module, with its device, dtype and mode. In training mode a step is forward,
            loss, backward and AdamW, else the forward alone.
        batch: a tensor, a tuple of arguments, a dict of keyword arguments (the loss is then the
            mean square of the outputs), or a callable that takes the model and gives a loss.
        ways: of "eager", "compile", "max-autotune", "swapped", "swapped+compile" and
            "swapped+max-autotune"; eager runs in any case. The last four need minutes on a GPU.
        autocast: run under it.
        steps: the first steps, whose losses are compared.
        seconds: for the turns of all ways; what is compiled before takes its own time.
        name: what to call the model. Default: its class.
    Returns: a Comparison. A way that fails is a row that says why.
    Raises: ValueError for another way or numbers below 1; what the model raises on the batch.
    """
    unknown = [way for way in ways if way not in WAYS]
    if unknown:
        raise ValueError(f"compare: ways are of {', '.join(WAYS)}; got {', '.join(unknown)}")
    if steps < 1 or not seconds > 0:
        raise ValueError(f"compare: steps and seconds must be above 0, got {steps} and {seconds}")
    ways = [way for way in WAYS if way == EAGER or way in ways]
    tensor = next(leaves(batch, Tensor), None)
    device = next(model.parameters()).device
    timer = choices.timer_of(device)
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        judged = _judged(model, batch, autocast) if len(ways) > 1 else Outcome()
        prepared = [_prepared(model, way, batch, autocast, steps, timer) for way in ways]
        good = [p.contender for p in prepared if p.contender.outcome.status == OK]
        time_together(good, timer, 1e3 * seconds, flush=False, most=MAX_SAMPLES)
    reason = reason_for_torch(torch.empty(1, device=device))
    by_pytorch = f"PyTorch runs it: {reason}" if reason else ""
    rows, eager = [], prepared[0]
    for way, (c, losses, peak_mib) in zip(ways, prepared, strict=True):
        right = c.outcome.status == OK
        ours = right and way.startswith(SWAPPED)
        outcome = judged if ours else c.outcome
        note = "; ".join(filter(None, (outcome.note, by_pytorch if ours else "")))
        row = Row(way, peak_mib=peak_mib, status=outcome.status, note=note)
        if right:
            times = spread(c.times)
            row = replace(row, ms=times.median, ms_p20=times.p20, ms_p80=times.p80)
            if tensor is not None and tensor.ndim:
                row = replace(row, images_per_s=1e3 * len(tensor) / times.median)
            if way != EAGER:
                row = replace(row, loss_gap=(losses - eager.losses).abs().max().item())
                if outcome.status == OK and eager.contender.times:
                    gain = spread(eager.contender.times).median / times.median
                    row = replace(row, speedup=gain)
        rows.append(row)
    mode = f"{'training step' if model.training else 'forward'}"
    mode += f", {str(autocast or next(model.parameters()).dtype).removeprefix('torch.')}"
    if tensor is not None:
        mode += f", {list(tensor.shape)}"
    return Comparison(name or type(model).__name__, machine_on(device), mode, rows)


class _Prepared(NamedTuple):
    contender: Contender
    losses: Any = None
    peak_mib: float | None = None


def _prepared(
    model: nn.Module, way: str, batch: Measure, autocast: torch.dtype | None, steps: int,
    timer: Timer,
) -> _Prepared:  # fmt: skip
    """A way that has run its first steps, and one that was timed. Raises: what eager raises."""
    contender = Contender(way, lambda: None)
    try:
        runner = _Runner(model, way, batch, autocast)
        losses, contender.run = runner.losses(steps), runner.step
        contender.times = timer.sample(runner.step, 1, False)
        return _Prepared(contender, losses, timer.peak_mib(runner.step))
    except Exception as error:
        if way == EAGER:
            raise
        contender.outcome = failure(error, timer)
        return _Prepared(contender)
