"""swap_in(measure=): each kind of module runs as its host's and fused, in turns; the faster stays.

A kind is what one time stands for: a class, the shapes of its parameters and of what a call of the
model gave it, its mode. One module of each is run on replicas that share its parameters and nothing
else. The widest come first: what a fused block reads is not measured by itself.

host           the host's own forward
fused          ours, by the launch configs in force, with the memory= that was asked for
fused low      a block with memory="low", under memory="auto"
fused library  every product with an epilogue by the vendor's library and one kernel
fused triton   every product with an epilogue by one kernel

A route is a launch config of a shape: it holds for each product of that shape in the process, and
for kinds that are measured later. What wins must keep the 2x rule on that very call.
"""

from __future__ import annotations

import copy
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..measure.gate import ERROR, MEMORY, OK, Outcome, failure, verdict
from ..measure.timer import CpuTimer, Timer, cuda_timer, spread
from ..measure.turns import ROUNDS, Contender, beats, take_turns, time_together
from ..ops.common.gemm_configs import FWD_TABLE, HIDDEN_TABLE, forced_route
from ..runtime.backend import Gpu, gpu
from ..runtime.configs import Choice as Decision
from ..runtime.configs import install, recording, tuned_on
from ..runtime.files import write_text
from ..runtime.tables import Tuned
from ..runtime.triton import triton
from ..runtime.version import __version__
from ..verify.accuracy import measure_all
from . import hosts
from .copies import CALL
from .facts import host_of, leaves, level_of

FUSED, HOST, LOW = "fused", "host", "fused low"
WAYS = (HOST, FUSED, LOW, "fused library", "fused triton")  # the simpler first
PRODUCTS = {table.name: table for table in (FWD_TABLE, HIDDEN_TABLE)}
KIND_SECONDS = 1.0  # for one kind, all contenders together
MEASURED = ("block", "attention", "mlp", "layer_norm", "rms_norm", "patch_embed")
HOOKS = [k for k, v in vars(nn.Module()).items() if isinstance(v, dict) and k.endswith("hooks")]
HOOKS += [k for k in vars(nn.Module()) if "_hooks_" in k]
NO_SETTINGS: Mapping[str, Any] = {}
NO_CONFIGS: Tuned = {}
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


class Call(NamedTuple):
    """How a model called a module: for one of its kind, what it gave, and the mode."""

    inputs: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    autocast: torch.dtype | None
    grad: bool


def called(model: Any, measure: Measure) -> Any:
    """What the model gives for a batch, or the callable for the model."""
    if isinstance(measure, Tensor):
        return model(measure)
    if isinstance(measure, tuple):
        return model(*measure)
    return model(**measure) if isinstance(measure, Mapping) else measure(model)


def device_of(values: Any) -> torch.device:
    """Of the first tensor."""
    return next((x.device for x in leaves(values, Tensor)), torch.device("cpu"))


def timer_of(device: torch.device) -> Timer:
    return cuda_timer(device.index) if device.type == "cuda" else CpuTimer()


def _shape(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def kind_of(module: nn.Module, cls: type) -> tuple[str, str, str]:
    shapes = ", ".join(f"{name} {_shape(p)}" for name, p in module.named_parameters())
    return hosts.host_path(host_of(type(module))), level_of(cls), shapes


def _copied(x: Any, dtype: torch.dtype | None = None) -> Any:
    """Arguments whose tensors are of the call alone: a host may write into them.

    Args:
        dtype: what floating-point tensors are to have.
    """
    if isinstance(x, Tensor):
        to = dtype if x.is_floating_point() else None
        return x.detach().to(to, copy=True).requires_grad_(x.requires_grad)
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)(_copied(v, dtype) for v in x)
    return {k: _copied(v, dtype) for k, v in x.items()} if type(x) is dict else x


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
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
    kept: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

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
            kept[key] = _copied(args), _copied(kwargs)
        calls[module] = Call(inputs, *kept[key], cast, grad)

    hooks = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in kinds]
    try:
        with _undisturbed(model):
            called(model, measure)
    finally:
        for handle in hooks:
            handle.remove()
    return calls


def replica(
    module: Any, classes: Mapping[nn.Module, type], settings: Mapping[str, Any] = NO_SETTINGS
) -> Any:
    """A module of the same parameters, with these classes and settings of fused blocks, buffers of
    its own and no hooks."""
    made: dict[int, Any] = {}

    def parameter(p: Any) -> Any:
        return made.setdefault(id(p), nn.Parameter(p.detach(), p.requires_grad))

    def copy(m: Any) -> Any:
        if id(m) not in made:
            cls: Any = classes.get(m) or host_of(type(m))
            made[id(m)] = new = cls.__new__(cls)
            hooks = {k: OrderedDict() for k in vars(m) if k in HOOKS}
            vars(new).update(vars(m) | hooks | (settings if hasattr(cls, "fused_memory") else {}))
            vars(new).pop(CALL, None)  # compiled, for another module
            new._parameters = {
                k: p if p is None else parameter(p) for k, p in m._parameters.items()
            }
            new._buffers = {k: b if b is None else b.clone() for k, b in m._buffers.items()}
            new._modules = {k: c if c is None else copy(c) for k, c in m._modules.items()}
        return made[id(m)]

    return copy(module)


def step(module: nn.Module, call: Call, noise: bool = False) -> dict[str, Tensor]:
    """A call as the model makes it, with its backward where there is one: outputs and gradients.

    Args:
        noise: the upstream gradient is random, the same at each call; else it is the outputs.
    """
    device = device_of((call.args, call.kwargs))
    cast = torch.autocast(device.type, call.autocast, enabled=call.autocast is not None)
    with torch.set_grad_enabled(call.grad), cast:
        found = list(leaves(module(*call.args, **call.kwargs), Tensor))
    results = {f"out{i}": x.detach() for i, x in enumerate(found)}
    outputs = [x for x in found if x.requires_grad]
    inputs = enumerate(leaves((call.args, call.kwargs), Tensor))
    given = {f"d{n}": p for n, p in module.named_parameters() if p.requires_grad}
    given |= {f"dinput{i}": x for i, x in inputs if x.requires_grad}
    if outputs and given:
        upstream = [x.detach() for x in outputs]
        if noise:
            seeded = torch.Generator(device).manual_seed(0)
            upstream = [
                torch.randn(x.shape, generator=seeded, device=device).to(x) for x in upstream
            ]
        grads = torch.autograd.grad(outputs, [*given.values()], upstream, allow_unused=True)
        results |= {n: g for n, g in zip(given, grads, strict=True) if g is not None}
    return results


class Way(NamedTuple):
    """How a kind may run: a replica, and the launch configs of another route, which `context`
    forces."""

    name: str
    module: nn.Module
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    configs: Tuned = NO_CONFIGS

    def entries(self, ms: Mapping[str, float]) -> list[dict[str, Any]]:
        """Its launch configs for Choices; beside them the times of the module."""
        from ..runtime.tuned_table import Entry, fields, now  # importing swap reads no file

        us = 1e3 * ms.get(self.name, 0.0)
        former = 1e3 * ms[FUSED] if FUSED in ms else us
        return [
            asdict(Entry(table, key, fields(config), former, us, now())) | {"key": [*key]}
            for (table, key), config in self.configs.items()
        ]


@contextmanager
def preferring(here: Gpu, more: Tuned) -> Iterator[None]:
    """Inside, these launch configs go before those in force."""
    former = tuned_on(here)
    install(here, {**former, **more})
    try:
        yield
    finally:
        install(here, former)


def routes_of(way: Way, call: Call, here: Gpu, settled: Tuned) -> Iterator[Way]:
    """The same by another route, where a product of the call would take it and none of them is
    settled by another kind."""
    taken: dict[Decision, None] = {}
    if here.name:
        with suppress(Exception), recording() as taken:  # its turns say what is wrong
            step(way.module, call)
    products = [(PRODUCTS[name], key) for name, _, key in taken if name in PRODUCTS]
    if any((table.name, key) in settled for table, key in products):
        return
    routes = [table.choose(here, *key).route for table, key in products]
    for route in ("library", "triton"):
        if any(r != route for r in routes):
            with forced_route(route):
                found = {(table.name, key): table.default(here, *key) for table, key in products}
            yield Way(f"fused {route}", way.module, partial(preferring, here, found), found)


def in_turns(ways: Sequence[Way], call: Call, end: float) -> list[Contender]:
    """The times of each way; one that has none has an outcome that says why.

    Args:
        end: no turn begins that would end after this time (time.monotonic).
    """
    timer = timer_of(device_of((call.args, call.kwargs)))
    every = [Contender(w.name, partial(step, w.module, call), w.context) for w in ways]
    if time.monotonic() < end:
        take_turns(every, timer, flush=False, rounds=2)  # the first may compile
    right = [c for c in every if c.outcome.status == OK]
    left = 1e3 * min(KIND_SECONDS, end - time.monotonic())
    if not all(c.times for c in right) or ROUNDS * sum(c.times[-1] for c in right) > left:
        for c in right:
            c.outcome = Outcome(ERROR, "no time was left for a turn")
        return every
    time_together(right, timer, left, flush=False)
    return every


def judged(host: nn.Module, way: Way, call: Call) -> Outcome:
    """Whether a way keeps the 2x rule beside the host in float64, for all that it gives on this
    call; in evaluation, where nothing is drawn."""
    timer = timer_of(device_of((call.args, call.kwargs)))
    was = [(m, m.training) for module in (host, way.module) for m in module.modules()]
    exact = call._replace(
        args=_copied(call.args, torch.float64), kwargs=_copied(call.kwargs, torch.float64),
        autocast=None,
    )  # fmt: skip
    try:
        for module in (host, way.module):
            module.eval()
        oracle = step(copy.deepcopy(host).double(), exact, noise=True)
        with way.context():
            actual = step(way.module, call, noise=True)
        assert set(actual) == set(oracle), f"other gradients: {set(actual) ^ set(oracle)}"
        dtype = call.autocast or actual["out0"].dtype
        peaks: dict[str, float] = {}  # of each module's: a gradient may be zero but for rounding
        for name, x in oracle.items():
            owner = name.rpartition(".")[0]
            peaks[owner] = max(peaks.get(owner, 0.0), x.abs().amax().item() if x.numel() else 0.0)
        floors = {n: 2 * torch.finfo(dtype).eps * peaks[n.rpartition(".")[0]] for n in oracle}
        return verdict(measure_all(actual, partial(step, host, call, True), oracle, dtype, floors))
    except Exception as error:
        found = failure(error, timer)
        return Outcome() if found.status == MEMORY else found  # float64 does not fit
    finally:
        for module, training in was:
            module.training = training


def fastest(contenders: Iterable[Contender]) -> Contender | None:
    """Of those that are right; the earlier one unless a later beats it by more than the noise."""
    best = None
    for c in contenders:
        if c.outcome.status == OK and (best is None or beats(c.times, best.times)):
            best = c
    return best


def measured(ways: Sequence[Way], call: Call, end: float) -> dict[str, Any]:
    """The fields of a choice that times and numbers decide.

    Args:
        ways: the host first.
    """
    every = in_turns(ways, call, end)
    kept = fastest(every)
    while kept is not None and kept.name != HOST:
        way = next(w for w in ways if w.name == kept.name)
        kept.outcome = judged(ways[0].module, way, call)
        if kept.outcome.status == OK:
            break
        kept = fastest(every)
    ms = {c.name: spread(c.times).median for c in every if c.outcome.status == OK}
    said = {c.name: c.outcome.note for c in every if c.outcome.status != OK}
    note = "; ".join(f"{name}: {why}" for name, why in said.items())
    return {"keeps": HOST if kept is None else kept.name, "ms": ms, "note": note}


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
    model: nn.Module, classes: Mapping[nn.Module, type], measure: Measure | None, budget: float,
    known: Choices | None, settings: Mapping[str, Any], low: bool = False,
) -> tuple[Choices, dict[str, Choice]]:  # fmt: skip
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
    here, machine = gpu(device), machine_on(device)
    if known is not None and known.machine != machine:
        known = None
    kinds = {m: kind_of(m, cls) for m, cls in classes.items() if level_of(cls) in MEASURED}
    made: dict[Any, Choice] = {}
    kept: dict[str, Choice] = {}
    settled: list[str] = []  # names of modules that run fused, what they read included
    entries = [] if known is None else known.configs
    former = tuned_on(here)
    try:
        routes = prefer(here, former, entries)
        calls = {} if measure is None else calls_of(model, kinds, measure)
        with _undisturbed(model):
            for name, module in model.named_modules():
                inside = any(f"{name}.".startswith(f"{n}.") or not n for n in settled)
                if module not in kinds or inside:
                    continue
                kind, call = kinds[module], calls.get(module)
                key = kind, "" if call is None else call.inputs
                if key not in made:
                    found = None if known is None else known.of(*key)
                    if found is None and call is not None:
                        fused = partial(replica, module, classes)
                        host, ours = replica(module, {}), fused(settings)
                        ways = [Way(HOST, host), Way(FUSED, ours)]
                        if low and call.grad and hasattr(classes[module], "fused_memory"):
                            ways.append(Way(LOW, fused({**settings, "fused_memory": "low"})))
                        if time.monotonic() < end:
                            ways += routes_of(ways[1], call, here, routes)
                        found = Choice(*kind, key[1], **measured(ways, call, end))
                        won = next(way for way in ways if way.name == found.keeps)
                        entries = entries + won.entries(found.ms)
                        routes = prefer(here, former, entries)
                    elif found is None and measure is not None:
                        found = Choice(*kind, key[1], HOST, note="it was not called")
                    made[key] = found or Choice(*kind, key[1], FUSED, note="not among the choices")
                kept[name] = made[key]
                if made[key].keeps != HOST:
                    settled.append(name)
        found = [(Choices(machine, list(made.values()), entries), kept)]
        if dist.is_available() and dist.is_initialized():
            dist.broadcast_object_list(found)
            prefer(here, former, found[0][0].configs)
    except BaseException:
        install(here, former)
        raise
    return found[0]
