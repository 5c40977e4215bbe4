"""swap_in(measure=): each kind of module runs as its host's and fused, in turns; the faster stays.

A kind is what one time stands for: a class, the shapes of its parameters and of what a call of the
model gave it, its mode. One module of each is run on replicas that share its parameters and nothing
else. The widest come first: what a fused block reads is not measured by itself.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..measure.gate import OK
from ..measure.timer import CpuTimer, Timer, cuda_timer, samples_in, spread
from ..measure.turns import ROUNDS, Contender, beats, take_turns
from ..runtime.files import write_text
from ..runtime.triton import triton
from ..runtime.version import __version__
from . import hosts
from .copies import CALL
from .facts import host_of, leaves, level_of

FUSED, HOST = "fused", "host"
KIND_SECONDS = 1.0  # for one kind, both contenders together
MEASURED = ("block", "attention", "mlp", "layer_norm", "rms_norm", "patch_embed")
HOOKS = [k for k, v in vars(nn.Module()).items() if isinstance(v, dict) and k.endswith("hooks")]
HOOKS += [k for k in vars(nn.Module()) if "_hooks_" in k]
NO_SETTINGS: Mapping[str, Any] = {}
Measure = Tensor | tuple | Mapping[str, Any] | Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Choice:
    """What one kind of module runs as, and why.

    Attributes:
        host: the class of the host, by its path.
        level: of the fused forward, as in SwapReport.swapped.
        weights, inputs: dtypes and shapes; inputs begin with the mode of the call.
        keeps: "fused" or "host".
        host_ms, fused_ms: medians of a forward, with its backward where there is one; None where
            one was not timed: `note` says why.
    """

    host: str
    level: str
    weights: str
    inputs: str
    keeps: str
    host_ms: float | None = None
    fused_ms: float | None = None
    note: str = ""

    @property
    def times(self) -> str:
        if self.host_ms is None or self.fused_ms is None:
            return self.note
        return f"host {self.host_ms:.3g} ms, fused {self.fused_ms:.3g}"

    def __str__(self) -> str:
        return f"{self.level} {self.host.rpartition('.')[2]}: {self.times}; kept {self.keeps}"


@dataclass
class Choices:
    """What was measured, on which machine. `save` writes it, `swap_in(choices=path)` reads it."""

    machine: dict[str, str] = field(default_factory=dict)
    rows: list[Choice] = field(default_factory=list)

    def save(self, path: str | Path) -> None:
        """Write JSON. Raises: OSError, in one line that names the file."""
        rows = [asdict(row) for row in self.rows]
        write_text(Path(path), json.dumps({"machine": self.machine, "rows": rows}, indent=1) + "\n")

    @classmethod
    def read(cls, path: str | Path) -> Choices:
        """Raises: ValueError where the file is no such JSON; OSError where it cannot be read."""
        try:
            found = json.loads(Path(path).read_text())
            known = {str(k): str(v) for k, v in found["machine"].items()}
            rows = [Choice(**row) for row in found["rows"]]
            if not all(row.keeps in (FUSED, HOST) for row in rows):
                raise ValueError("keeps is neither fused nor host")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"swap_in: {path} holds no choices that were saved: {error}") from None
        return cls(known, rows)

    def of(self, kind: tuple[str, str, str], inputs: str) -> Choice | None:
        """The choice for a kind; inputs "" where they are not known: of all that it was called
        with, the host's if one is."""
        found = [row for row in self.rows if (row.host, row.level, row.weights) == kind]
        found = [row for row in found if inputs in ("", row.inputs)]
        return next((row for row in found if row.keeps == HOST), found[0] if found else None)


def machine_of(model: nn.Module) -> dict[str, str]:
    """What a time depends on besides the kind."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
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


def _copied(x: Any) -> Any:
    """Arguments whose tensors are of the call alone: a host may write into them."""
    if isinstance(x, Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)(map(_copied, x))
    return {k: _copied(v) for k, v in x.items()} if type(x) is dict else x


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


def step(module: nn.Module, call: Call) -> None:
    """A call as the model makes it, with its backward where there is one."""
    device = device_of((call.args, call.kwargs)).type
    cast = torch.autocast(device, call.autocast, enabled=call.autocast is not None)
    with torch.set_grad_enabled(call.grad), cast:
        found = module(*call.args, **call.kwargs)
    outputs = [x for x in leaves(found, Tensor) if x.requires_grad]
    given = [*module.parameters(), *leaves((call.args, call.kwargs), Tensor)]
    given = [x for x in given if x.requires_grad]
    if outputs and given:
        upstream = [x.detach() for x in outputs]
        torch.autograd.grad(outputs, given, upstream, allow_unused=True)


def in_turns(host: nn.Module, fused: nn.Module, call: Call, end: float) -> Any:
    """The times of both, and what is to be said if one has none.

    Args:
        end: no turn begins that would end after this time (time.monotonic).
    """
    timer = timer_of(device_of((call.args, call.kwargs)))
    both = [Contender(n, partial(step, m, call)) for n, m in ((HOST, host), (FUSED, fused))]
    take_turns(both, timer, flush=False, rounds=2)  # what it takes to compile, then one sample
    wrong = [c for c in both if c.outcome.status != OK]
    if wrong:
        return both, "; ".join(f"{c.name}: {c.outcome.note}" for c in wrong)
    each = [c.times[-1] for c in both]
    left = 1e3 * min(KIND_SECONDS, end - time.monotonic())
    if ROUNDS * sum(each) > left:
        return both, "no time was left for a turn"
    for c, ms in zip(both, each, strict=True):
        c.count, c.times = samples_in(left / (2 * ROUNDS), ms, 1, 100), []
    take_turns(both, timer, flush=False)
    return both, "; ".join(f"{c.name}: {c.outcome.note}" for c in both if c.outcome.status != OK)


def measured(pair: tuple[nn.Module, nn.Module], call: Call, end: float) -> dict[str, Any]:
    """The fields of a choice that times decide."""
    (host, fused), note = in_turns(*pair, call, end)
    if fused.outcome.status != OK:
        return {"keeps": HOST, "note": note}
    if host.outcome.status != OK:
        return {"keeps": FUSED, "note": note}
    if note:
        return {"keeps": HOST, "note": note}
    times = {"host_ms": spread(host.times).median, "fused_ms": spread(fused.times).median}
    return {"keeps": FUSED if beats(fused.times, host.times) else HOST, **times}


def choose(
    model: nn.Module, classes: Mapping[nn.Module, type], measure: Measure | None, budget: float,
    known: Choices | None, settings: Mapping[str, Any],
) -> tuple[Choices, dict[str, Choice]]:  # fmt: skip
    """What each kind runs as, and by name the modules that are to run as their host's; all
    processes of a job take what the first one found.

    Args:
        classes: of the modules that are fused or may become so; nothing of the model is changed.
        known: choices of before, used where they are of this machine.
        settings: of fused blocks, see swap_in.
    """
    end, machine = time.monotonic() + budget, machine_of(model)
    if known is not None and known.machine != machine:
        known = None
    kinds = {m: kind_of(m, cls) for m, cls in classes.items() if level_of(cls) in MEASURED}
    calls = {} if measure is None else calls_of(model, kinds, measure)
    made: dict[Any, Choice] = {}
    losers: dict[str, Choice] = {}
    settled: list[str] = []  # names of modules that run fused, what they read included
    with _undisturbed(model):
        for name, module in model.named_modules():
            if module not in kinds or any(f"{name}.".startswith(f"{n}.") or not n for n in settled):
                continue
            kind, call = kinds[module], calls.get(module)
            key = kind, "" if call is None else call.inputs
            if key not in made:
                found = None if known is None else known.of(*key)
                if found is None and measure is not None:
                    fields: dict[str, Any] = {"keeps": HOST, "note": "it was not called"}
                    if call is not None:
                        pair = replica(module, {}), replica(module, classes, settings)
                        fields = measured(pair, call, end)
                    found = Choice(*kind, key[1], **fields)
                made[key] = found or Choice(*kind, key[1], FUSED, note="not among the choices")
            if made[key].keeps == HOST:
                losers[name] = made[key]
            else:
                settled.append(name)
    found = [(Choices(machine, list(made.values())), losers)]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(found)
    return found[0]
