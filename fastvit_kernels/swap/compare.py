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
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..measure.gate import OK, Outcome, failure, judging, verdict
from ..measure.timer import Timer, spread, timer_of
from ..measure.turns import Contender, time_together
from ..runtime.backend import backend, reason_for_torch
from ..runtime.files import write_atomically, write_text
from ..verify.accuracy import Error
from .apply import swap_in, swap_out
from .choices import Measure, called, machine_on
from .errors import errors_beside, run_step
from .facts import leaves
from .report import is_ours

EAGER, SWAPPED = "eager", "swapped"
WAYS = {  # torch.compile's mode of each; None: not compiled
    EAGER: None,
    "compile": "default",
    "max-autotune": "max-autotune",
    SWAPPED: None,
    "swapped+compile": "default",
    "swapped+max-autotune": "max-autotune",
}


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
    rows: list[Any] = field(default_factory=list)  # of Row

    base, file = EAGER, "compare"
    columns: ClassVar = {  # by title what is shown of a row, and how
        "ms": ("ms", ".4g"),
        "images/s": ("images_per_s", ",.0f"),
        "peak MiB": ("peak_mib", ",.0f"),
        "speed-up": ("speedup", ".2f"),
        "loss": ("loss_gap", ".1e"),
    }

    def __str__(self) -> str:
        lines = [" " * 22 + "".join(f" {title:>9}" for title in self.columns)]
        for row in self.rows:
            found = ((getattr(row, name), form) for name, form in self.columns.values())
            cells = ("-" if value is None else format(value, form) for value, form in found)
            said = [row.status] * (row.status != OK) + [row.note] * bool(row.note)
            lines.append(f"{row.way:22}" + "".join(f" {c:>9}" for c in cells))
            lines[-1] += f"  {': '.join(said)}" if said else ""
        return "\n".join([*lines, "", self.line])

    @property
    def line(self) -> str:
        """One line that says what was measured, where."""
        best = max((r for r in self.rows if r.speedup), key=lambda r: r.speedup, default=None)
        told = "no speed-up" if best is None else f"{best.way} {best.speedup:.2f}x of {self.base}"
        where = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        return f"{self.model}, {self.mode}: {told} ({where})"

    def save(self, folder: str | Path) -> list[Path]:
        """Write a CSV and, where matplotlib is installed, a PNG into a folder: compare.csv."""
        about = {"model": self.model, "mode": self.mode, **self.machine}
        rows = [{**about, **asdict(row)} for row in self.rows]
        path, text = Path(folder) / f"{self.file}.csv", io.StringIO()
        path.parent.mkdir(parents=True, exist_ok=True)
        table = csv.DictWriter(text, [*rows[0]], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        write_text(path, text.getvalue())
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            return [path]
        figure, picture = Figure((7, 4), layout="constrained"), path.with_suffix(".png")
        self.draw(figure.subplots())
        write_atomically(picture, lambda file: figure.savefig(file, format="png", dpi=150))
        return [path, picture]

    def draw(self, axes: Any) -> None:
        rows = [row for row in self.rows if row.ms is not None]
        bars = axes.barh([row.way for row in rows], [row.ms for row in rows])
        axes.bar_label(bars, fmt="{:.4g}", padding=3)
        axes.invert_yaxis()
        axes.set(xlabel="ms a step", title=f"{self.model}\n{self.mode}, {self.machine['device']}")


def by_pytorch(device: torch.device) -> str:
    """What to note beside ours where no kernel runs."""
    reason = reason_for_torch(torch.empty(1, device=device))
    return f"PyTorch runs it: {reason}" if reason else ""


@dataclass
class _Way(Contender):
    """A way that has run its first steps."""

    losses: Any = None
    peak_mib: float | None = None


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
        self.forward: Any = self.model
        if (mode := WAYS[way]) is not None:
            self.forward = torch.compile(self.model, mode=mode, dynamic=False)
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
        with torch.set_grad_enabled(self.trains):
            loss = self.loss()
        if self.trains:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _prepared(
    model: nn.Module,
    way: str,
    batch: Measure,
    autocast: torch.dtype | None,
    steps: int,
    timer: Timer,
) -> _Way:
    """A way whose first steps, by one seed, have warmed it up. Raises: what eager raises."""
    made = _Way(way, lambda: None)
    try:
        made.run = _Runner(model, way, batch, autocast).step
        torch.manual_seed(0)
        made.losses = torch.stack([made.run() for _ in range(steps)]).double().cpu()
        made.peak_mib, _ = timer.memory_mib(made.run)
    except Exception as error:
        if way == EAGER:
            raise
        made.run = lambda: None  # what it held is freed
        made.outcome = failure(error, timer)
    return made


def model_errors(
    model: nn.Module,
    inputs: Any,
    swap: Callable[[nn.Module], Any] = swap_in,
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> list[Error]:
    """Outputs and all gradients of the swapped model beside the host's, by the 2x rule.

    The oracle is the host in float64, the yardstick the host in the model's own dtype.

    Args:
        model: a host's model, not swapped; it is copied.
        inputs: a tensor of images, a tuple of arguments, or keyword arguments.
        swap: what makes the copy ours.
        autocast: run host and copy under it; its dtype then sets the floor.
    Raises: AssertionError where one of them has a gradient that the other has not.
    """
    dtype = autocast or next(p.dtype for p in model.parameters() if p.is_floating_point())
    oracle = run_step(copy.deepcopy(model).double(), inputs, seed)
    swapped = copy.deepcopy(model)
    swap(swapped)
    actual = run_step(swapped, inputs, seed, autocast)

    def specification() -> dict[str, Tensor]:
        return run_step(copy.deepcopy(model), inputs, seed, autocast)

    return errors_beside(actual, specification, oracle, dtype)


def _judged(model: nn.Module, batch: Any, autocast: torch.dtype | None, timer: Timer) -> Outcome:
    """Whether the swapped model keeps the 2x rule on this batch; in evaluation, where nothing is
    drawn."""
    if any(map(is_ours, model.modules())):
        return Outcome(OK, "numbers not compared: our own modules, see fastvit-kernels check")
    if not isinstance(batch, (Tensor, tuple, Mapping)):
        return Outcome(OK, "numbers not compared: the batch is a callable")
    plain = copy.deepcopy(model).eval()
    swap_out(plain)
    return judging(lambda: verdict(model_errors(plain, batch, autocast=autocast)), timer)


def compare(
    model: nn.Module,
    batch: Measure,
    *,
    ways: Sequence[str] = (EAGER, SWAPPED),
    autocast: torch.dtype | None = None,
    steps: int = 20,
    seconds: float = 10.0,
    name: str = "",
) -> Comparison:
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
    if unknown := [way for way in ways if way not in WAYS]:
        raise ValueError(f"compare: ways are of {', '.join(WAYS)}; got {', '.join(unknown)}")
    if steps < 1 or not seconds > 0:
        raise ValueError(f"compare: steps and seconds must be above 0, got {steps} and {seconds}")
    tensor = next(leaves(batch, Tensor), None)
    device, mode = next(model.parameters()).device, "training step" if model.training else "forward"
    mode += f", {str(autocast or next(model.parameters()).dtype).removeprefix('torch.')}"
    mode += "" if tensor is None else f", {list(tensor.shape)}"
    timer = timer_of(device)
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        swaps = any(way.startswith(SWAPPED) for way in ways)
        judged = _judged(model, batch, autocast, timer) if swaps else Outcome()
        every = [
            _prepared(model, way, batch, autocast, steps, timer)
            for way in WAYS
            if way == EAGER or way in ways
        ]
        time_together(every, timer, 1e3 * seconds, flush=False, most=50)
    images = tensor.shape[0] if tensor is not None and tensor.ndim else None
    eager = every[0]
    rows: list[Row] = []
    for c in every:
        ran = c.outcome.status == OK
        ours = ran and c.name.startswith(SWAPPED)
        status, note = judged if ours else c.outcome
        note = "; ".join(filter(None, (note, by_pytorch(device) if ours else "")))
        row = Row(c.name, peak_mib=c.peak_mib, status=status, note=note)
        if ran:
            ms, p20, p80 = spread(c.times)
            rate = None if images is None else 1e3 * images / ms
            row = replace(row, ms=ms, ms_p20=p20, ms_p80=p80, images_per_s=rate)
        if ran and c is not eager:
            row = replace(row, loss_gap=(c.losses - eager.losses).abs().max().item())
            if status == eager.outcome.status == OK:
                row = replace(row, speedup=spread(eager.times).median / ms)
        rows.append(row)
    return Comparison(name or type(model).__name__, machine_on(device), mode, rows)
