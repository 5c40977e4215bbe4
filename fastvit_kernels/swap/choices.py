"""swap_in(measure=): each kind of module runs as its host's and fused, in turns; the faster stays.

A kind is what one time stands for: a class, the shapes of its parameters and of what a call of the
model gave it, its mode. One module of each is run on replicas that share its parameters and nothing
else. The widest come first: what a fused block reads is not measured by itself.

host       the host's own forward
fused      ours, by the launch configs in force, with the memory= that was asked for
fused low  a block with memory="low", under memory="auto"
... library, ... triton  either, every product with an epilogue by the vendor's library and one
           kernel, or by one kernel
... library attention, ... triton attention  either, attention by cuDNN or flash, or by our kernels

A route is a launch config of a shape: it holds for each product of that shape in the process, and
for kinds that are measured later. What wins must keep the 2x rule on that very call.
"""

from __future__ import annotations

import copy
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..measure.gate import ERROR, OK, Outcome, judging, verdict
from ..measure.timer import spread, timer_of
from ..measure.turns import ROUNDS, Contender, beats, take_turns, time_together
from ..ops.attention import configs as of_attention
from ..ops.common import gemm_configs as of_products
from ..runtime.backend import Gpu, gpu
from ..runtime.configs import Choice as Decision, install, recording, tuned_on
from ..runtime.files import write_text
from ..runtime.tables import Tuned
from ..runtime.triton import triton
from ..runtime.version import __version__
from . import hosts
from .copies import CALL
from .errors import Call, copied, device_of, errors_beside, step
from .facts import host_of, leaves, level_of

FUSED, HOST, LOW = "fused", "host", "fused low"
# What is said of a way, the route, what forces it, and the tables that have it.
ROUTES = [
    (f"{route}{of}", route, partial(module.forced_route, route), {t.name: t for t in tables})
    for of, module, tables in (
        ("", of_products, (of_products.FWD_TABLE, of_products.HIDDEN_TABLE)),
        (" attention", of_attention, (of_attention.FWD_TABLE, of_attention.BWD_TABLE)),
    )
    for route in ("library", "triton")
]
WAYS = (HOST, FUSED, LOW, *(f"{way} {route}" for way in (FUSED, LOW) for route, *_ in ROUTES))
KIND_SECONDS = 1.0  # for one kind, all contenders together
MEASURED = ("block", "attention", "mlp", "layer_norm", "rms_norm", "patch_embed")
HOOKS = [name for name in vars(nn.Module()) if "_hooks" in name]
Measure = Tensor | tuple | Mapping[str, Any] | Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Choice:
    """What one kind of module runs as, and why.

    Attributes:
        host: the class of the host, by its path.
        level: of the fused forward, as in SwapReport.swapped.
        weights, inputs: dtypes and shapes; inputs begin with the mode of the call.
        keeps: of WAYS.
        ms: medians of a forward, with its backward where there is one, of the ways that were timed.
        note: why a way was not timed, or what is wrong with its numbers.
    """

    host: str
    level: str
    weights: str
    inputs: str
    keeps: str
    ms: Mapping[str, float] = field(default_factory=dict)
    note: str = ""

    @classmethod
    def of(cls, kind: tuple[str, str, str], inputs: str, keeps: str, ways: Sequence[Way]) -> Choice:
        ms = {way.name: spread(way.times).median for way in ways if way.outcome.status == OK}
        wrong = [f"{way.name}: {way.outcome.note}" for way in ways if way.outcome.status != OK]
        return cls(*kind, inputs, keeps, ms, "; ".join(wrong))

    @property
    def times(self) -> str:
        each = [
            f"{way} {ms:.3g}{'' if i else ' ms'}" for i, (way, ms) in enumerate(self.ms.items())
        ]
        return "; ".join(filter(None, (", ".join(each), self.note)))

    def __str__(self) -> str:
        return f"{self.level} {self.host.rpartition('.')[2]}: {self.times}; kept {self.keeps}"


@dataclass
class Choices:
    """What was measured, on which machine. `save` writes it, `swap_in(choices=path)` reads it.

    Attributes:
        configs: launch configs, as the entries of tuned_table.py: those of the routes that won, and
            in a file of `fastvit-kernels tune --out` all that were tuned. They hold for the process
            that loads them.
    """

    machine: dict[str, str] = field(default_factory=dict)
    rows: list[Choice] = field(default_factory=list)
    configs: list[dict[str, Any]] = field(default_factory=list)

    def save(self, path: str | Path) -> None:
        """Write JSON. Raises: OSError, in one line that names the file."""
        write_text(Path(path), json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Choices:
        """Raises: ValueError where the file is no such JSON; OSError where it cannot be read."""
        try:
            found = json.loads(Path(path).read_text())
            known = {str(k): str(v) for k, v in found["machine"].items()}
            rows = [Choice(**row) for row in found["rows"]]
            if not all(row.keeps in WAYS for row in rows):
                raise ValueError(f"keeps is none of {', '.join(WAYS)}")
            entries = list(found["configs"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"swap_in: {path} holds no choices that were saved: {error}") from None
        return cls(known, rows, entries)

    def of(self, kind: tuple[str, str, str], inputs: str) -> Choice | None:
        """The choice for a kind; inputs "" where they are not known: of all that it was called
        with, the host's if one is."""
        found = [row for row in self.rows if (row.host, row.level, row.weights) == kind]
        found = [row for row in found if inputs in ("", row.inputs)]
        return next((row for row in found if row.keeps == HOST), found[0] if found else None)


def machine_on(device: torch.device) -> dict[str, str]:
    """What a time depends on besides the kind."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = {"torch": torch.__version__, "triton": getattr(triton, "__version__", "none")}
    return {"device": name, **versions, "fastvit_kernels": __version__}


def called(model: Any, measure: Measure) -> Any:
    """What the model gives for a batch, or the callable for the model."""
    if isinstance(measure, Tensor):
        return model(measure)
    if isinstance(measure, tuple):
        return model(*measure)
    return model(**measure) if isinstance(measure, Mapping) else measure(model)


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def kind_of(module: nn.Module, cls: type) -> tuple[str, str, str]:
    shapes = ", ".join(f"{name} {_shape(p)}" for name, p in module.named_parameters())
    return hosts.host_path(host_of(type(module))), level_of(cls), shapes


@contextmanager
def isolated_state(model: nn.Module) -> Iterator[None]:
    """Inside, buffers and generators may change: they are put back."""
    before = [(b, b.clone()) for b in model.buffers()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)


def calls_of(model: nn.Module, kinds: dict[nn.Module, Any], measure: Measure) -> dict[Any, Call]:
    """The first call of each module of a kind, as the model runs now. What one kind is called with
    is kept once. Raises: what the model or the callable does."""
    calls: dict[Any, Call] = {}
    kept: dict[Any, Call] = {}

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module in calls:
            return
        tensors = list(leaves((args, kwargs), Tensor))
        device = device_of(tensors).type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        grad = torch.is_grad_enabled()
        mode = f"{'training' if module.training else 'eval'}{' without grad' * (not grad)}, "
        mode += f"autocast {str(cast).removeprefix('torch.')}, " if cast else ""
        inputs = mode + ", ".join(map(_shape, tensors))
        key = kinds[module], inputs
        if key not in kept:
            kept[key] = Call(copied(args), copied(kwargs), cast, grad, inputs)
        calls[module] = kept[key]

    with ExitStack() as hooks:
        for module in kinds:
            hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        called(model, measure)
    return calls


def replica(
    module: nn.Module, classes: Mapping[nn.Module, type], settings: Mapping[str, Any]
) -> Any:
    """A module of the same parameters, with these classes and settings of fused blocks, buffers of
    its own and no hooks."""
    made: dict[Any, Any] = {}

    def parameter(p: Tensor) -> Tensor:
        return made.setdefault(p, nn.Parameter(p.detach(), p.requires_grad))

    def copy(m: nn.Module) -> Any:
        if m not in made:
            cls: Any = classes.get(m) or host_of(type(m))
            made[m] = new = cls.__new__(cls)
            own = vars(new)
            own.update((k, OrderedDict() if k in HOOKS else v) for k, v in vars(m).items())
            own.update(settings if hasattr(cls, "fused_memory") else {})
            own.pop(CALL, None)  # compiled, for another module
            parts = ("_parameters", parameter), ("_buffers", torch.clone), ("_modules", copy)
            for kind, copied in parts:
                own[kind] = {k: x if x is None else copied(x) for k, x in own[kind].items()}
        return made[m]

    return copy(module)


@dataclass
class Way(Contender):
    """One way of a kind: a replica, called as the model calls it, and what `context` forces."""

    module: Any = None
    configs: Tuned = field(default_factory=dict)  # of another route

    @classmethod
    def of(cls, name: str, module: nn.Module, call: Call) -> Way:
        return cls(name, partial(step, module, call), module=module)

    def entries(self, former_ms: float | None) -> list[dict[str, Any]]:
        """Its launch configs for Choices; beside them the times of the module, in us."""
        from ..runtime.tuned_table import Entry, fields, now  # importing swap reads no file

        if not self.configs:
            return []
        ms = spread(self.times).median
        us = 1e3 * (former_ms or ms), 1e3 * ms
        return [asdict(Entry(*key, fields(c), *us, now())) for key, c in self.configs.items()]


def routes_of(way: Way, call: Call, here: Gpu, settled: Tuned) -> Iterator[Way]:
    """The same by another route, where a product or an attention of the call would take it and none
    of them is settled by another kind."""
    taken: dict[Decision, None] = {}
    if here.name:
        with suppress(Exception), recording() as taken:  # its turns say what is wrong
            step(way.module, call)
    for name, route, context, tables in ROUTES:
        asked = [(tables[table], key) for table, _, key in taken if table in tables]
        if any((table.name, key) in settled for table, key in asked):
            continue
        former = [table.choose(here, *key).route for table, key in asked]
        other = Way.of(f"{way.name} {name}", way.module, call)
        other.context = context
        with context():
            other.configs = {(t.name, key): t.choose(here, *key) for t, key in asked}
        if any(x != c.route == route for x, c in zip(former, other.configs.values(), strict=True)):
            yield other


def in_turns(ways: Sequence[Way], call: Call, end: float) -> None:
    """Time each way; one that has no times has an outcome that says why. No turn begins that would
    end after `end`, by time.monotonic: where that does not suffice for all, the last have none."""
    timer = timer_of(device_of(call[:2]))
    if time.monotonic() < end:
        take_turns(ways, timer, flush=False, rounds=2)  # the first may compile
    right = [way for way in ways if way.outcome.status == OK]
    left = 1e3 * min(KIND_SECONDS, end - time.monotonic())
    while right and not (right[0].times and ROUNDS * sum(w.times[-1] for w in right) <= left):
        right.pop().outcome = Outcome(ERROR, "no time was left for a turn")
    time_together(right, timer, left, flush=False)


def judged(host: nn.Module, way: Way, call: Call) -> Outcome:
    """Whether all that a way gives on this call keeps the 2x rule beside the host in float64; in
    evaluation, where nothing is drawn."""
    args, kwargs = copied(call[:2], torch.float64)
    exact = Call(args, kwargs, None, call.grad)
    oracle = step(copy.deepcopy(host.eval()).double(), exact, 0)
    with way.context():
        actual = step(way.module.eval(), call, 0)
    dtype = call.autocast or actual["out0"].dtype
    return verdict(errors_beside(actual, partial(step, host, call, 0), oracle, dtype))


def fastest(ways: Sequence[Way], call: Call) -> Way:
    """Of those that are right, the earlier unless a later beats it by more than the noise; the
    first, the host's, where none is."""
    best = host = ways[0]
    for way in ways[1:]:
        if way.outcome.status == OK and (best.outcome.status != OK or beats(way.times, best.times)):
            best = way
    if best is not host:
        timer = timer_of(device_of(call[:2]))
        best.outcome = judging(partial(judged, host.module, best, call), timer)
    return best if best is host or best.outcome.status == OK else fastest(ways, call)


def prefer(here: Gpu, former: Tuned, entries: Sequence[dict[str, Any]]) -> Tuned:
    """Put the launch configs of Choices before those that were in force; what they are.

    Raises: ValueError for one that does not ship or does not fit its key.
    """
    from ..runtime import tuned_table

    try:
        found = {(e.table, e.key): c for e, c in (tuned_table.entry(here, raw) for raw in entries)}
    except tuned_table.TableError as error:
        raise ValueError(
            f"swap_in: the choices have a config that cannot be used: {error}"
        ) from None
    if tuned_on(here) != (wanted := {**former, **found}):
        install(here, wanted)
    return found


def choose(
    model: nn.Module,
    classes: Mapping[nn.Module, type],
    measure: Measure | None,
    budget: float,
    known: Choices | None,
    settings: Mapping[str, Any],
    low: bool = False,
) -> tuple[Choices, dict[str, Choice]]:
    """What each kind runs as, and by name the choice of each module that stays its host's or is the
    widest that runs fused; all processes of a job take what the first one found. Nothing of the
    model is changed; the launch configs of the routes that won are in force afterwards.

    Args:
        classes: of the modules that are fused or may become so.
        known: choices of before, used where they are of this machine.
        settings: of fused blocks, see swap_in.
        low: try blocks with memory="low" too.
    Raises: ValueError where `known` has a launch config that does not ship or fit.
    """
    end = time.monotonic() + budget
    device = device_of(list(model.parameters()))
    here = gpu(device)
    former, found = tuned_on(here), Choices(machine_on(device))
    if known is None or known.machine != found.machine:
        known = Choices()
    found.configs = known.configs
    kinds = {m: kind_of(m, cls) for m, cls in classes.items() if level_of(cls) in MEASURED}
    made: dict[Any, Choice] = {}
    kept: dict[str, Choice] = {}
    try:
        routes = prefer(here, former, found.configs)
        with isolated_state(model):
            calls = {} if measure is None else calls_of(model, kinds, measure)
            for name, module in model.named_modules():
                fused = (n for n, choice in kept.items() if choice.keeps != HOST)
                if module not in kinds or any(not n or name.startswith(f"{n}.") for n in fused):
                    continue
                kind, call = kinds[module], calls.get(module)
                key = kind, "" if call is None else call.inputs
                choice = made.get(key) or known.of(*key)
                if choice is None and call is not None:
                    each: dict[str, Any] = {HOST: ({}, {}), FUSED: (classes, settings)}
                    if low and call.grad and hasattr(classes[module], "fused_memory"):
                        each[LOW] = classes, {**settings, "fused_memory": "low"}
                    ways = [Way.of(way, replica(module, *how), call) for way, how in each.items()]
                    if time.monotonic() < end:
                        routed = [routes_of(way, call, here, routes) for way in ways[1:]]
                        ways += [way for others in routed for way in others]
                    in_turns(ways, call, end)
                    won = fastest(ways, call)
                    choice = Choice.of(kind, call.inputs, won.name, ways)
                    found.configs = found.configs + won.entries(choice.ms.get(FUSED))
                    routes = prefer(here, former, found.configs)
                elif choice is None and measure is not None:
                    choice = Choice(*kind, "", HOST, note="it was not called")
                elif choice is None:
                    choice = Choice(*kind, "", FUSED, note="not among the choices")
                kept[name] = made[key] = choice
        found.rows = list(made.values())
        shared = [(found, kept)]
        if dist.is_available() and dist.is_initialized():
            dist.broadcast_object_list(shared)
            prefer(here, former, shared[0][0].configs)
    except BaseException:
        install(here, former)
        raise
    return shared[0]
