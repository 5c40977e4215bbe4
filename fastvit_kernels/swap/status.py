"""What runs fused: as things are now (`status`), and in the last call (`watch`).

The report of swap_in says what was swapped. A hook, LoRA, a mask or a mode that comes later sends
single modules back to their host's forward, rightly and in silence; these two say so. Nothing is
recorded outside `watch`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ..runtime import dispatch
from ..runtime.backend import get_backend, reason_for_torch
from ..runtime.compat import foreign_modes, in_backward, is_compiled_in_place
from ..runtime.plain import is_hooked, is_watched_everywhere
from . import hosts
from .facts import level_of
from .hosts.fused import Fused, is_dense, is_traced, part
from .plans import refusal
from .report import IN_GLUON, Why, ancestors, is_ours, lost_in_graphs, make_report, verdict_of

Way = Literal["fused", "inside", "host", "compiled", "not called"]
NOT_CALLED: Way = "not called"
NOT_SWAPPED = "not swapped"


class OpRun(NamedTuple):
    """An op that a module's last call ran."""

    name: str
    pytorch: str  # why PyTorch computed it; "" where a kernel did


@dataclass(frozen=True)
class ModuleStatus:
    """What the last call of one module did; without a watch, what the next call would do.

    Attributes:
        name, host: of the module, and of its class.
        level: of a module that swap_in swapped: block, parts, attention, mlp, ...; "ours" is a
            module of this package; "" any other.
        way: "fused"; "inside": a fused module further up computes it; "host": its own forward;
            in a watch also "compiled", whose calls are not seen, and "not called".
        reason: of "host" why, also in a graph; of "inside" the name of that module; of a fused
            block in a compiled graph what it loses there; else "".
        ops: of "fused" in a watch, what the last call ran, in order.
        calls: how many the watch saw.
    """

    name: str
    host: str
    level: str
    way: Way
    reason: str = ""
    ops: tuple[OpRun, ...] = ()
    calls: int = 0


@dataclass
class ModelStatus:
    """What a model's modules did, or would do. Prints as a table.

    Attributes:
        modules: a row for each module that was swapped or has weights of its own.
        watched: whether this is of calls that were seen; else of the next one.
        backend: "auto", "triton" or "torch".
        pytorch: without a watch, why PyTorch computes the ops on the model's weights; "" where
            kernels do.
        tokens, flops, fused_flops: as in SwapReport, with what ran fused as told here; ops that
            PyTorch computes inside a fused forward count as fused.
        gluon: as in SwapReport.
    """

    modules: list[ModuleStatus] = field(default_factory=list)
    watched: bool = False
    backend: str = "auto"
    pytorch: str = ""
    tokens: int = 0
    flops: int = 0
    fused_flops: int = 0
    gluon: bool = False

    @property
    def share(self) -> float:
        """The share of the matmul FLOPs that runs fused."""
        return self.fused_flops / self.flops if self.flops else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers, for JSON."""
        rows = [asdict(row) | {"ops": [op._asdict() for op in row.ops]} for row in self.modules]
        return asdict(self) | {"modules": rows, "share": self.share}

    def __str__(self) -> str:
        counts: Counter[Any] = Counter()
        unseen = {row.name for row in self.modules if row.way in ("compiled", NOT_CALLED)}
        for row in self.modules:
            above = ancestors(row.name.rpartition(".")[0]) if row.name in unseen else ()
            if row.way == "inside" or not unseen.isdisjoint(above):
                continue
            ran = "; ".join(
                ", ".join(f"{n} {op}" if n > 1 else op for op, n in ops.items()) + by
                for by in ("", " by PyTorch")
                if (ops := Counter(op.name for op in row.ops if bool(op.pytorch) == bool(by)))
            )
            counts[row.way, row.level or "-", row.host, ran or row.reason] += 1
        title = "what ran, or why" if self.watched else "why"
        lines = [f"{'way':<11} {'level':<11} {'class':<24} count  {title}"]
        lines += [
            f"{way:<11} {level:<11} {host:<24} {n:>5}  {what}".rstrip()
            for (way, level, host, what), n in counts.items()
        ]
        if inside := sum(row.way == "inside" for row in self.modules):
            lines.append(f"{'inside':<48} {inside:>5}  of the fused ones above")
        if self.flops:
            seen = self.watched and all(row.way != "compiled" for row in self.modules)
            verb = "ran" if seen else "would run"
            share = f"{self.share:.1%} of the matmul FLOPs {verb} fused"
            lines += ["", f"{share} ({self.tokens} tokens)"]
        ops = [op for row in self.modules for op in row.ops]
        slow = Counter(op.pytorch for op in ops if op.pytorch)
        if ops:
            lines.append(f"{len(ops) - slow.total()} ops by kernels, {slow.total()} by PyTorch")
        lines += [f"  {n} by PyTorch: {why}" for why, n in slow.items()]
        if self.gluon:
            lines.append(IN_GLUON)
        if self.pytorch:
            lines.append(f"PyTorch computes the ops: {self.pytorch}")
        return "\n".join(lines)


def status(model: nn.Module) -> ModelStatus:
    """What the next call of a swapped model would do, as things are now. Nothing runs.

    Looks at hooks, LoRA and other modules put in since swap_in, replaced methods, dispatch modes,
    tracers and the backend. What only a call shows (a mask, the ops that run) tells `watch`.

    Args:
        model: any nn.Module, swapped or not; a wrapper such as DDP or a compiled module too.
    Returns: a ModelStatus: text by print, rows in `.modules`, plain data by `.to_dict()`.
    Raises: TypeError for another model.
    """
    found = _made(_modules_of("status", model), why_now)
    parameter = next((p for p in model.parameters() if is_dense(p)), None)
    reason = None if parameter is None else reason_for_torch(parameter)
    found.pytorch = reason or ""
    return found


@contextmanager
def watch(model: nn.Module) -> Iterator[ModelStatus]:
    """Records what calls of a swapped model do inside the `with`.

        with fk.watch(model) as status:
            model(x)
        print(status)

    The status is filled at the end of the `with`: the last call of each module, in any thread. A
    recomputation of a checkpoint is no call. Inside a graph of torch.compile nothing is seen: such
    modules say so where `model` is what was compiled. Results are the same bits.

    Args:
        model: any nn.Module, swapped or not; a wrapper such as DDP or a compiled module too.
    Yields: a ModelStatus, empty until the end.
    Raises: TypeError for another model.
    """
    modules = _modules_of("watch", model)
    found = ModelStatus(watched=True)
    listener = _Listener(modules)
    with _changing:
        dispatch.listeners = (*dispatch.listeners, listener)
    try:
        yield found
    finally:
        with _changing:
            dispatch.listeners = tuple(x for x in dispatch.listeners if x is not listener)
        vars(found).update(vars(_made(modules, listener.why, listener.calls)))


_changing = threading.Lock()


def _modules_of(what: str, model: Any) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what}: model must be an nn.Module, got {type(model).__name__}")
    return dict(model.named_modules())


def why_now(module: Any) -> str | None:
    """Why the next call of a swapped module or one of ours runs its host's forward; None: it runs
    fused, if its arguments are those that were proven."""
    if not isinstance(module, Fused):
        return None
    if others := foreign_modes():
        return f"a dispatch mode looks on: {type(others[0]).__name__}"
    if is_traced():
        return "torch.fx, torch.jit or an exporter looks on"
    if is_watched_everywhere():
        return "a global hook of all modules"
    return verdict_of(module) or module.fused_blocked() or _why_hooked(module)


def _why_hooked(module: Any) -> str | None:
    """Why a block calls its attention by its host's own forward."""
    steps: Any = getattr(module.fused_roles, "steps", ())
    child = part(module, steps[0].body) if steps and not module.fused_searched else None
    if child is None or not is_hooked(child):
        return None
    hooks = {getattr(h, "__name__", "") for h in child._forward_hooks.values()}
    told = "transformers collects from {}" if hooks == {"output_capturing_hook"} else "{} is hooked"
    return told.format(steps[0].body)


def _why_not_taken(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call's arguments are not what the fused forward takes."""
    names, defaults, _ = module.fused_arguments
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x = given.pop(names[0], None)
    if module.fused_idle(args):
        return f"no kernel can run: {reason_for_torch(args[0])}"
    if not is_dense(x):
        return f"its input is a {type(x).__name__}" + ", not dense" * isinstance(x, Tensor)
    others = [n for n, v in given.items() if v is not defaults.get(n) and v is not None]
    if not module.fused_takes(x):
        return f"its input has the shape {tuple(x.shape)}"
    return f"its arguments: {', '.join(others)}" if others else "its arguments"


class _Call(NamedTuple):
    reason: str | None  # why the host's forward ran
    ops: list[OpRun]
    calls: int


class _Listener:
    """Records calls of these modules, and which ops each runs."""

    def __init__(self, modules: dict[str, nn.Module]):
        self.modules = modules
        self.names = {id(m): name for name, m in modules.items()}
        self.calls: dict[str, _Call] = {}
        self.running = threading.local()
        # Our own modules say nothing themselves: an op is the widest one's whose parameter it gets.
        self.owners: dict[int, str] = {}
        for name, module in modules.items():
            if is_ours(module):
                for p in module.parameters():
                    self.owners.setdefault(id(p), name)

    @contextmanager
    def call(
        self, module: Any, host: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[None]:
        name = self.names.get(id(module))
        if name is None or in_backward():
            yield
            return
        reason = (why_now(module) or _why_not_taken(module, args, kwargs)) if host else None
        ops: list[OpRun] = []
        stack = vars(self.running).setdefault("stack", [])
        stack.append(ops)
        try:
            yield
        finally:
            stack.pop()
            self._count(name, reason, ops)

    def _count(self, name: str, reason: str | None, ops: list[OpRun]) -> None:
        former = self.calls.get(name)
        self.calls[name] = _Call(reason, ops, 1 + (former.calls if former else 0))

    def op(self, told: tuple[tuple[str, str | None], ...], args: tuple[Any, ...]) -> None:
        if in_backward():
            return
        runs = [OpRun(name, why or "") for name, why in told]
        own = vars(self.running)
        if own.get("stack"):
            own["stack"][-1].extend(runs)
            return
        owner = next((self.owners[id(x)] for x in args if id(x) in self.owners), None)
        if owner is None:  # attention after a qkv that was called
            owner = own.get("owner")
        elif owner != own.get("owner"):
            own["owner"] = owner
            self._count(owner, None, [])
        if owner is not None:
            self.calls[owner].ops.extend(runs)

    def why(self, module: Any) -> str | None:
        """Why the last call of a swapped module or one of ours did not run fused."""
        name = self.names[id(module)]
        if (call := self.calls.get(name)) is not None:
            return call.reason
        for above in ancestors(name):
            covers = getattr(self.modules.get(above), "fused_level", "") != "model"
            if covers and above in self.calls and self.calls[above].reason is None:
                return verdict_of(module)  # that one computes it
        return why_now(module) if _is_compiled(self.modules, name) else NOT_CALLED


def _is_compiled(modules: dict[str, nn.Module], name: str) -> bool:
    """Whether torch.compile was given the module, or one around it."""
    around = [modules[a] for a in ancestors(name) if a in modules]
    return any(is_compiled_in_place(m) or "_orig_mod" in m._modules for m in around)


def _made(
    modules: dict[str, nn.Module], why: Why, calls: dict[str, _Call] | None = None
) -> ModelStatus:
    """The status of these modules, from the rows of a report; `calls` are what a watch saw."""
    report = make_report(modules, _not_swapped(modules), {}, why=why)
    levels = {n: level_of(type(m)) or "ours" * is_ours(m) for n, m in modules.items()}
    levels |= {row.name: row.level for row in report.swapped}
    ways: dict[str, tuple[Way, str]] = {row.name: ("fused", "") for row in report.swapped}
    for left in report.left:  # of what is swapped it is a caveat: what the call did is known
        not_called = left.reason == NOT_CALLED
        ways.setdefault(left.name, (NOT_CALLED, "") if not_called else ("host", left.reason))
    seen = modules.keys() if calls is None else calls.keys()
    in_graphs = {n for n in ways if levels.get(n) and _is_compiled(modules, n)}
    ways |= {n: ("compiled", ways[n][1]) for n in in_graphs - seen}
    for name, module in modules.items():
        if name not in ways and (levels[name] or module._parameters):
            above = next((a for a in ancestors(name) if ways.get(a) == ("fused", "")), None)
            if above is not None:
                ways[name] = "inside", above
    found = ModelStatus([], calls is not None, get_backend(), tokens=report.tokens)
    found.flops, found.fused_flops, found.gluon = report.flops, report.fused_flops, report.gluon
    for name in filter(ways.__contains__, modules):
        (way, reason), call = ways[name], (calls or {}).get(name, _Call(None, [], 0))
        if name in in_graphs and not (reason or call.calls):
            reason = lost_in_graphs(modules[name])
        ops, host = tuple(call.ops) if way == "fused" else (), type(modules[name]).__name__
        row = ModuleStatus(name, host, levels[name], way, reason, ops, call.calls)
        found.modules.append(row)
    return found


def _not_swapped(modules: dict[str, nn.Module]) -> dict[str, str]:
    """Modules that swap_in would try, by name."""
    found = {}
    for name, module in modules.items():
        above = modules[name.rpartition(".")[0]] if name else None
        of_tokens = hosts.takes_tokens(type(above))
        mixin: Any = None if is_ours(above) else hosts.swapped_class(type(module), of_tokens)
        if mixin is None or mixin.fused_level in ("epilogue", "model"):
            continue
        if (reason := refusal(module, mixin)) != "":
            found[name] = reason or NOT_SWAPPED
    return found
