"""What a model's graphs became: how much of them runs in our ops, and why the rest does not.

Dynamo captures a graph at a call, so a report fills then. Each graph is recorded under the
parameters that it reads; the model is not held alive by it.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.weak import WeakIdKeyDictionary

from ..runtime.backend import reason_for_torch
from ..runtime.plain import is_raw
from .dynamo import Compile, break_reason, compile_under_way


@dataclass(frozen=True)
class Left:
    """What stays with the host, or is in our ops, but not as the one op that it could be.

    Attributes:
        name: the module that computes it, "blocks.0.attn"; "" the model itself.
        op: "linear", "matmul", ...; "mlp", "gated_mlp" or "residual" of one in several ops; "" of a
            module that only= or skip= left out.
        flops: of its forward that the host computes.
        reason: one phrase.
    """

    name: str
    op: str
    flops: int
    reason: str


@dataclass
class GraphReport:
    """One graph that Dynamo captured.

    Attributes:
        flops: of matmuls, convolutions and attention in its forward.
        fused_flops: the part of them in our ops.
        rules: how often each rule fired.
        left: what stays with the host.
        declined: why the whole graph runs as Dynamo gave it, or None.
        failed: what raised while rewriting; its part of the graph is the host's.
        compiled: frame and number of the compile, as torch's logs print them, but for a swapped
            module the number among its own; None unknown.
        graph_break: why Dynamo ended the graph early; "" where it did not.
    """

    flops: int = 0
    fused_flops: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    left: list[Left] = field(default_factory=list)
    declined: str | None = None
    failed: list[str] = field(default_factory=list)
    compiled: Compile | None = None
    graph_break: str = ""

    @property
    def share(self) -> float:
        """fused_flops of flops; 1.0 where there is nothing to fuse."""
        return self.fused_flops / self.flops if self.flops else 1.0


@dataclass
class Calls:
    """What became of the calls of one module that swap_in swapped.

    Attributes:
        name: the module and the method, "blocks.0" or "forward_features".
        inside: the module's name in the model, "" the model itself.
        graphs: those that its calls made.
        limit: the limit of torch._dynamo past which new kinds of calls run the host's forward; "".
        as_python: how many calls Dynamo ran as Python, without a graph.
        called: whether a call has ended.
        undone: whether swap_out took the module's own method back since.
        notes: what else happened to it, a line each.
    """

    name: str
    inside: str = ""
    graphs: list[GraphReport] = field(default_factory=list)
    limit: str = ""
    as_python: int = 0
    called: bool = False
    undone: bool = False
    notes: list[str] = field(default_factory=list)

    def note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)

    def add(self, report: GraphReport, tensors: Iterable[Tensor]) -> None:
        """A graph that this module runs: Dynamo knows the module alone, not its place in a model,
        and past a graph break it counts a class's recompiles."""
        compiled, frames = report.compiled, [g.compiled.frame for g in self.graphs if g.compiled]
        if compiled is not None:
            compiled = compiled._replace(times=frames.count(compiled.frame))
        names = [".".join(filter(None, (self.inside, row.name))) for row in report.left]
        left = [replace(row, name=n) for row, n in zip(report.left, names, strict=True)]
        report = replace(report, left=left, compiled=compiled)
        self.graphs.append(report)
        _keep(report, tensors, self)


NO_GRAPH = "it was called, but torch.compile captured no graph; the original code runs"
# Rules that only write the graph in another way, for those that put ops in.
REWORDED = {
    "einsum by heads",
    "in place",
    "norm in autocast's dtype",
    "norm_and_input",
    "product as linear",
    "rows in order",
}

_lock = threading.Lock()
NOT_A_MODEL = (
    "swap_in works in place and returns a report: write fk.swap_in(model), "
    "not model = fk.swap_in(model)"
)

# parameter -> the reports of graphs that read it, each with the calls that swap_in made it for
_graphs_of = WeakIdKeyDictionary()
Add = Callable[[GraphReport, list[Tensor]], None]  # the report of a graph, and what it reads
_add: ContextVar[Add | None] = ContextVar("fastvit_kernels.add", default=None)


def record(report: GraphReport, tensors: list[Tensor], gm: GraphModule | None = None) -> None:
    """Keep the report of a graph that is compiled now.

    Args:
        tensors: the parameters that the graph reads.
        gm: the graph as Dynamo gave it, which knows why it ended.
    """
    report.compiled = compile_under_way()
    report.graph_break = "" if gm is None else break_reason(gm)
    if (add := _add.get()) is not None:
        add(report, tensors)
    else:
        _keep(report, tensors, None)


def _keep(report: GraphReport, tensors: Iterable[Tensor], calls: Calls | None) -> None:
    with _lock:
        for tensor in tensors:
            _graphs_of.setdefault(tensor, []).append((report, calls))


@contextmanager
def adding(add: Add) -> Iterator[None]:
    """Inside, graphs that are recorded are a swapped module's."""
    before = _add.set(add)
    try:
        yield
    finally:
        _add.reset(before)


def reports_of(model: nn.Module) -> list[GraphReport]:
    """The reports of graphs that read a parameter of the model, in the order of their compiles;
    not of those that swap_out has put aside."""
    with _lock:
        found = [x for p in model.parameters() for x in _graphs_of.get(p, ())]
    return unique(graph for graph, calls in found if calls is None or not calls.undone)


def unique(reports: Iterable[GraphReport]) -> list[GraphReport]:
    return list({id(r): r for r in reports}.values())


class _Summary:
    """What a list of graphs says together, and how a person reads it."""

    graphs: list[GraphReport]
    calls: list[Calls]
    pytorch: str

    @property
    def flops(self) -> int:
        return sum(g.flops for g in self.graphs)

    @property
    def fused_flops(self) -> int:
        return sum(g.fused_flops for g in self.graphs)

    @property
    def share(self) -> float:
        """The share of the FLOPs of matmuls, convolutions and attention in our ops, 0 to 1; 0
        before the first call."""
        return self.fused_flops / self.flops if self.flops else float(bool(self.graphs))

    @property
    def left(self) -> list[Left]:
        """What is not fused, the most FLOPs first: once, however many graphs it is in."""
        found: dict[tuple[str, str, str], Left] = {}
        for row in (row for g in self.graphs for row in g.left):
            known = found.setdefault((row.name, row.op, row.reason), row)
            if row.flops > known.flops:
                found[row.name, row.op, row.reason] = row
        return sorted(found.values(), key=lambda row: -row.flops)

    @property
    def graph_breaks(self) -> list[str]:
        """Why Dynamo split forwards, one reason a break."""
        return [g.graph_break for g in self.graphs if g.graph_break]

    @property
    def recompiles(self) -> int:
        """How many graphs were made since another kind of call came: sizes, modes, hooks, ..."""
        return sum(made.times > 0 for g in self.graphs_made if (made := g.compiled) is not None)

    @property
    def graphs_made(self) -> list[GraphReport]:
        """Of a graph that modules share one report."""
        return list({g.compiled or id(g): g for g in self.graphs}.values())

    @property
    def limits(self) -> list[str]:
        """Each module whose new kinds of calls run the host's forward, and by which limit."""
        return [f"{c.name or 'the model'}: {c.limit}" for c in self.calls if c.limit]

    def __str__(self) -> str:
        if not self.graphs:
            lines = [self._without_graphs()]
        else:
            lines = [self._headline(), *self._fused_line(), *_left_lines(self.left)]
        if self.calls and all(c.undone for c in self.calls):
            lines = ["undone; it was:", *lines]
        lines += [
            f"declined: {why}" for why in dict.fromkeys(g.declined for g in self.graphs) if why
        ]
        breaks = Counter(self.graph_breaks).items()
        lines += [f"{n} graph break{'s' * (n > 1)}: {why}" for why, n in breaks]
        lines += [f"limit met, new kinds of calls run the host's forward: {x}" for x in self.limits]
        lines += [f"{c.name or 'the model'}: {note}" for c in self.calls for note in c.notes]
        return "\n".join(lines)

    def _without_graphs(self) -> str:
        if not self.calls:
            return (
                "nothing is fused: the model is not swapped (fk.swap_in(model)), and "
                'torch.compile(model, backend="fastvit_kernels") has made no graph of it'
            )
        if any(c.called or c.notes for c in self.calls):
            return f"nothing is fused: {NO_GRAPH}"
        inside = "a module inside, called by itself, runs the original code"
        whole = any(not c.name for c in self.calls)
        hint = f"; {inside}" if whole else ""
        return f"no graph yet: the first call makes one, or give example={hint}"

    def _fused_line(self) -> list[str]:
        """What rules put in, of each kind of call once: a recompile has the same once more."""
        first = [g for g in self.graphs if g.compiled is None or g.compiled.times == 0]
        counts = sum((g.rules for g in first or self.graphs), Counter[str]())
        shown = [f"{n} {rule}" for rule, n in counts.most_common() if rule not in REWORDED]
        return [f"fused: {', '.join(shown)}"] if shown else []

    def _headline(self) -> str:
        percent = f"{100 * self.share:.1f} % of the matmul and attention FLOPs"
        if not self.flops:
            percent = "no matmul, no attention: what there is"
        if self.pytorch:
            how = f"would be fused by kernels on a GPU; here PyTorch runs them: {self.pytorch}"
        else:
            how = "are fused by kernels"
        made = len(self.graphs_made)
        graphs = f"{made} graph{'s' * (made != 1)}"
        again = f", {self.recompiles} of them recompiles" if self.recompiles else ""
        return f"{percent} {how} ({graphs}{again})"


def _left_lines(left: list[Left]) -> list[str]:
    """Rows that differ only by the number of a block are one line."""
    alike: dict[tuple[str, str, str], list[Left]] = {}
    for row in left:
        alike.setdefault((re.sub(r"\d+", "*", row.name), row.op, row.reason), []).append(row)
    return [
        f"  {f'{len(rows)} x {name}' if len(rows) > 1 else rows[0].name or 'the model'}"
        f"{f' {op}' if op else ''}: {reason}"
        for (name, op, reason), rows in alike.items()
    ]


@dataclass
class SwapReport(_Summary):
    """What swap_in did. Filled by the first forward of the model, or right away with example=.

    Attributes:
        modules: names of the swapped modules, "" for the model itself.
        calls: what happened to the calls of each.
        left_out: modules that only= or skip= leave to PyTorch.
        measured: the times that measure= found, else "".
    """

    modules: list[str]
    calls: list[Calls]
    left_out: list[Left] = field(default_factory=list)
    measured: str = ""
    model: Any = field(default=None, repr=False)  # a weak reference

    @property
    def graphs(self) -> list[GraphReport]:  # type: ignore[override]
        return unique(g for calls in self.calls for g in calls.graphs)

    @property
    def left(self) -> list[Left]:
        return super().left + self.left_out

    @property
    def pytorch(self) -> str:  # type: ignore[override]
        """Why PyTorch runs the ops here; "" where kernels do."""
        model = self.model() if self.model is not None else None
        return "" if model is None else reason_for_pytorch(model)

    def __str__(self) -> str:
        return "\n".join([*filter(None, [self.measured]), super().__str__()])

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"model": None}

    if not TYPE_CHECKING:  # a type checker sees by itself that it is no model

        def __call__(self, *args: Any, **kwargs: Any) -> None:
            raise TypeError(f"a SwapReport is not callable: {NOT_A_MODEL}")

        def __getattr__(self, name: str) -> None:
            hint = "" if name.startswith("_") else f": {NOT_A_MODEL}"
            raise AttributeError(f"a SwapReport has no attribute {name!r}{hint}")


@dataclass
class ModelStatus(_Summary):
    """What is fused in a model now, by swap_in or torch.compile.

    Attributes:
        graphs: one report per graph.
        calls: what happened to the calls of each swapped module.
        pytorch: why PyTorch runs the ops here; "" where kernels do.
    """

    graphs: list[GraphReport]
    calls: list[Calls]
    pytorch: str


def reason_for_pytorch(model: nn.Module) -> str:
    """Why PyTorch runs ops on the model's parameters, on a shard's own part of one; "" where
    kernels do."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in model.parameters())
    found = next((p for p in parts if p.is_floating_point() and is_raw(p)), None)
    return (reason_for_torch(found) or "") if found is not None else ""
