"""fk.compare: a step of a model in several ways, in turns, in one run on this machine.

errors  of our ways against the host in float64, by the 2x rule: else no ratio is shown
losses  the first steps of each way, from the same weights and the same random numbers
time    steps in turns, so that a clock that drifts drifts for all; medians with p20 and p80
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..fuse.batch import arguments_of, check_batch, noting
from ..fuse.measure import ADVICE, HOST_BOUND
from ..fuse.report import reason_for_pytorch
from ..fuse.select import check_model, tensors
from ..fuse.swap import swap_in, swap_out
from ..runtime.backend import backend
from ..runtime.configs import recording
from ..runtime.triton import triton
from ..runtime.version import __version__
from .comparison import Comparison, Row
from .gate import OK, Outcome, failure, judging, verdict
from .model_errors import is_ours, model_errors
from .timer import Timer, spread, timer_of
from .turns import ROUNDS, Contender, time_together

Batch = Tensor | tuple | Mapping[str, Any] | Callable[[Any], Any]


@dataclass(frozen=True)
class Way:
    """How a model is run.

    Attributes:
        swapped: after swap_in, with `options`.
        compiler: of torch.compile, "inductor" or "fastvit_kernels"; None: not compiled.
        mode: of torch.compile.
        graph: the step as a CUDA graph; of bench alone.
    """

    swapped: bool = False
    compiler: str | None = None
    mode: str | None = None
    graph: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        return self.swapped or self.compiler == "fastvit_kernels"

    def apply(self, model: nn.Module) -> Callable[..., Any]:
        """Make a model run so, in place. Returns: what to call. In ways that are not ours PyTorch
        runs our modules, as it runs a host's."""
        own, forward = is_ours(model), model
        swap_out(model)
        if self.swapped and not own:
            swap_in(model, **self.options)
        if self.compiler is not None:
            from ..fuse.backend import fastvit_kernels

            compiler: Any = "inductor" if own or not self.ours else fastvit_kernels
            forward = torch.compile(model, backend=compiler, mode=self.mode, dynamic=False)
        if self.ours or not own:
            return forward

        def by_torch(*args: Any, **kwargs: Any) -> Any:
            with backend("torch"):
                return forward(*args, **kwargs)

        return by_torch


EAGER = "eager"
WAYS = {
    EAGER: Way(),
    "compile": Way(compiler="inductor"),
    "swapped": Way(swapped=True),
    "backend": Way(compiler="fastvit_kernels"),
    "backend+graphs": Way(compiler="fastvit_kernels", mode="reduce-overhead"),
    "max-autotune": Way(compiler="inductor", mode="max-autotune"),
    "backend+max-autotune": Way(compiler="fastvit_kernels", mode="max-autotune"),
}
ON_GPU = (EAGER, "compile", "swapped", "backend", "backend+graphs")
ON_CPU = (EAGER, "swapped")
SEARCHES = ("max-autotune", "backend+max-autotune")


def machine_on(device: torch.device) -> dict[str, str]:
    """What a result depends on besides model and batch: the device's name, versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "triton": getattr(triton, "__version__", "none")}
    return {"device": name, **versions, "fastvit_kernels": __version__}


class Runner:
    """A copy of the model, run in one way, with an optimizer if it trains."""

    def __init__(self, model: nn.Module, way: Way, batch: Batch, autocast: torch.dtype | None):
        self.model, self.batch, self.autocast = copy.deepcopy(model), batch, autocast
        self.device = next(self.model.parameters()).device
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.trains = self.model.training and bool(parameters)
        self.forward = way.apply(self.model)
        if self.trains:
            fused = self.device.type == "cuda"
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=fused)

    def loss(self) -> Tensor:
        """The callable's; else the mean square of the outputs."""
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            if is_callable(self.batch):
                found = self.batch(self.forward)
            else:
                args, kwargs = arguments_of(self.batch)
                found = self.forward(*args, **kwargs)
        if isinstance(found, Tensor) and found.ndim == 0:
            return found
        outputs = [y for _, y in tensors(found, "out") if y.is_floating_point()]
        return torch.stack([y.float().square().mean() for y in outputs]).sum()

    def gradients(self) -> Tensor:
        """Forward, loss and, if it trains, backward."""
        with torch.set_grad_enabled(self.trains):
            loss = self.loss()
        if self.trains:
            loss.backward()
        return loss

    def step(self) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        loss = self.gradients()
        if self.trains:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss.detach().clone()  # a graph writes the next step's into the same memory


@dataclass
class Ready(Contender):
    """A way that has run its first steps."""

    losses: Any = None
    peak_mib: float | None = None
    host_ms: float | None = None  # until a step is queued
    kernels: bool = False  # whether any of ours ran


@dataclass
class Race:
    """One comparison under way: what is told of it, and what is there when it is interrupted."""

    name: str
    batch: Batch
    autocast: torch.dtype | None
    steps: int
    seconds: float
    timer: Timer
    say: Callable[[str], Any]
    found: list[Ready] = field(default_factory=list)
    judged: Outcome = field(default_factory=Outcome)
    interrupted: bool = False

    def run(self, model: nn.Module, ways: Sequence[str]) -> None:
        """All ways, or those before Ctrl-C. Raises: what eager raises."""
        ours = any(WAYS[name].ours for name in ways)
        if ours and (why := reason_for_pytorch(model)):
            self.say(f"PyTorch runs every way here ({why}): this shows that it works, no more")
        self.say(
            f"{self.name}: {', '.join(ways)}; {self.steps} first steps of each, then "
            f"{self.seconds:.0f} s in turns"
        )
        try:
            for name in ways:
                self.prepare(model, name)
                if name == EAGER:
                    self.say_how_long(ways)
            if ours:
                self.say("numbers against float64")
                self.judged = judge(model, self.batch, self.autocast, self.timer)
            self.take_turns()
        except KeyboardInterrupt:
            self.interrupted = True
            self.say("interrupted: what is there is kept")

    def take_turns(self) -> None:
        """Time all that run, and tell of each turn."""
        turns = itertools.count(1)
        first = next(c.name for c in self.found if c.outcome.status == OK)

        def at_work(name: str) -> None:
            if name == first:
                self.say(f"turn {next(turns)} of {ROUNDS}")

        ms = 1e3 * self.seconds
        time_together(self.found, self.timer, ms, flush=False, most=50, at_work=at_work)

    def prepare(self, model: nn.Module, name: str) -> None:
        """First steps by one seed, which also warm up. Raises: what eager raises."""
        way, made = WAYS[name], Ready(name, lambda: None)
        self.say(f"{name}: first steps" + (", compiling before" if way.compiler else ""))
        try:
            made.run = Runner(model, way, self.batch, self.autocast).step
            torch.manual_seed(0)
            with recording() as choices:
                losses = [self.first_step(made.run)]
                losses += [made.run().double().cpu() for _ in range(1, self.steps)]
                made.losses = torch.stack(losses)
            made.kernels = bool(choices)
            made.peak_mib = self.timer.peak_mib(made.run)
            made.times = self.timer.sample(made.run, 2, False)
            made.host_ms = host_ms(made.run, next(model.parameters()).device)
        except Exception as error:
            if name == EAGER:
                with noting("compare", "batch", self.batch):
                    raise
            made.run = lambda: None  # what it held is freed
            made.outcome = failure(error, self.timer)
        self.found.append(made)

    def first_step(self, run: Callable[[], Any]) -> Any:
        """Say how long it took: it may compile."""
        start = time.monotonic()
        loss = run().double().cpu()
        self.say(f"  the first of {self.steps} steps took {time.monotonic() - start:.1f} s")
        return loss

    def say_how_long(self, ways: Sequence[str]) -> None:
        ms = self.found[0].times[-1]
        each = 1e-3 * ms * (self.steps + 10)
        least = each * (len(ways) - 1) + max(self.seconds, 1e-3 * ms * ROUNDS * len(ways))
        more = "graphs, compiling and steps in float64 come on top"
        self.say(f"a step takes {ms:.4g} ms in eager: at least {least:.0f} s more; {more}")


def host_ms(run: Callable[[], Any], device: torch.device) -> float | None:
    """Median time in which the host queues a step; None on a CPU."""
    if device.type != "cuda":
        return None
    found = []
    for _ in range(5):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        run()
        found.append(1e3 * (time.perf_counter() - start))
    torch.cuda.synchronize(device)
    return statistics.median(found)


def judge(model: nn.Module, batch: Any, autocast: torch.dtype | None, timer: Timer) -> Outcome:
    """Whether the model keeps the 2x rule through our ops on this batch; in evaluation, where
    nothing is drawn."""
    if is_callable(batch):
        return Outcome(OK, "numbers not compared: the batch is a callable")
    model = copy.deepcopy(model).eval()
    return judging(lambda: verdict(model_errors(model, batch, autocast=autocast)), timer)


def row_of(c: Ready, eager: Ready, judged: Outcome, images: int | None, why: str) -> Row:
    """A line of the table.

    Args:
        why: why no kernel runs on this device; "" where they can.
    """
    ours = WAYS[c.name].ours
    outcome = judged if ours and c.outcome.status == OK else c.outcome
    notes = [outcome.note]
    if ours and c.outcome.status == OK and not c.kernels:
        notes.append(f"PyTorch runs it: {why}" if why else "none of our kernels ran")
    row: dict[str, Any] = dict(
        way=c.name, status=outcome.status, peak_mib=c.peak_mib, kernels=c.kernels
    )
    if c.times:
        ms, p20, p80 = spread(c.times)
        rate = None if images is None else 1e3 * images / ms
        row |= dict(ms=ms, ms_p20=p20, ms_p80=p80, images_per_s=rate, host_ms=c.host_ms)
    if c is not eager and c.losses is not None:
        row["loss_gap"] = (c.losses - eager.losses).abs().max().item()
    fair = outcome.status == OK and (c.kernels or not ours)
    if c is not eager and c.times and eager.times and fair:
        base = spread(eager.times)
        ratios = base.median / ms, base.p20 / p80, base.p80 / p20
        row |= dict(zip(("speedup", "speedup_p20", "speedup_p80"), ratios, strict=True))
    if c.host_ms is not None and c.kernels and c.times and c.host_ms > HOST_BOUND * ms:
        notes.append(ADVICE)
    return Row(**row, note="; ".join(filter(None, notes)))


def compare(
    model: nn.Module,
    batch: Batch,
    *,
    ways: Sequence[str] | None = None,
    max_autotune: bool = False,
    autocast: torch.dtype | None = None,
    steps: int | None = None,
    seconds: float = 10.0,
    name: str = "",
    say: Callable[[str], Any] = lambda text: None,
) -> Comparison:
    """Measure a model eager, compiled and on our kernels: time, memory, accuracy, losses.

    Each way runs a copy; the model is unchanged. Ctrl-C ends it early, with the results so far.

    Args:
        model: any nn.Module, with its device, dtype and mode. In training mode a step is forward,
            loss, backward and AdamW, else only the forward.
        batch: a tensor, a tuple of arguments, a dict of keyword arguments (the loss is then the
            mean square of the outputs), or a callable that takes the model and gives a loss.
        ways: of "eager", "compile", "swapped" (swap_in), "backend" (torch.compile with ours),
            "backend+graphs" (mode="reduce-overhead"), "max-autotune" and "backend+max-autotune".
            Default: the first five, on a CPU eager and swapped. Eager runs in any case.
        max_autotune: add the last two, which take minutes.
        autocast: its dtype. Default: of the autocast that the call is under, else none.
        steps: how many first steps to compare losses over. Default 20, on a CPU 3.
        seconds: for timing all ways together, compilation not included.
        name: what to call the model. Default: its class.
        say: called with progress lines: say=print shows them. Silent by default.
    Returns: a Comparison; print it to read it. A way that fails has a row that says why.
    Raises: TypeError if model is not an nn.Module, batch none of these or autocast no dtype;
        ValueError for a model without parameters, another way or numbers below 1; what the model
        raises on the batch.
    """
    check_model("compare", model)
    if not is_callable(batch):
        check_batch("compare", "batch", batch, also=", or a callable that takes the model")
    if not isinstance(autocast, (torch.dtype, type(None))):
        wanted = "a dtype such as torch.bfloat16, or None"
        raise TypeError(f"compare: autocast must be {wanted}, got {autocast!r}")
    if not any(p.is_floating_point() for p in model.parameters()):
        raise ValueError(f"compare: {type(model).__name__} has no parameter to train or to time")
    device = next(model.parameters()).device
    if autocast is None and torch.is_autocast_enabled(device.type):
        autocast = torch.get_autocast_dtype(device.type)
    on_gpu = device.type == "cuda"
    ways = [ways] if isinstance(ways, str) else ways
    asked = list((ON_GPU if on_gpu else ON_CPU) if ways is None else ways)
    asked += SEARCHES if max_autotune else ()
    if unknown := [way for way in asked if way not in WAYS]:
        raise ValueError(f"compare: ways are of {', '.join(WAYS)}; got {', '.join(unknown)}")
    steps = (20 if on_gpu else 3) if steps is None else steps
    if steps < 1 or not seconds > 0:
        raise ValueError(f"compare: steps and seconds must be above 0, got {steps} and {seconds}")
    race = Race(
        name or type(model).__name__, batch, autocast, steps, seconds, timer_of(device), say
    )
    with torch.random.fork_rng([device.index] if on_gpu else []):
        race.run(model, [way for way in WAYS if way == EAGER or way in asked])
    if not race.found:
        raise KeyboardInterrupt  # nothing is there
    tensor = first_tensor(batch)
    mode = "training step" if model.training else "forward"
    mode += f", {str(autocast or next(model.parameters()).dtype).removeprefix('torch.')}"
    mode += "" if tensor is None else f", {list(tensor.shape)}"
    images = tensor.shape[0] if tensor is not None and tensor.ndim else None
    why = reason_for_pytorch(model)
    rows = [row_of(c, race.found[0], race.judged, images, why) for c in race.found]
    return Comparison(race.name, machine_on(device), mode, rows, race.interrupted)


def first_tensor(batch: Batch) -> Tensor | None:
    given = None if is_callable(batch) else batch
    return next((x for _, x in tensors(given, "input")), None)


def is_callable(batch: Any) -> TypeGuard[Callable[[Any], Any]]:
    """Whether it takes the model and gives a loss. Some tensors and arrays have a __call__."""
    return callable(batch) and not isinstance(batch, (Tensor, tuple, Mapping))
