"""What measures `targets.GOALS`: every peer in the same turns as ours, most telling first.

Seconds are guesses. What does not fit into the time is left for --resume, but the compiler's search
is begun with little time left too: its own caches keep what it has found.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench import bench_vit
from bench.bench_vit import provider_of
from bench.harness import Draw, measure_op
from bench.models import HOSTS, WAYS, Case, NamedCase, Runner, missing_option
from bench.plan import Task, op_of
from bench.providers import BASELINE, Provider, installed
from bench.shapes import Shape
from bench.targets import LONG_T, NORMED, OF_VIT_B, PACKED, SHORT_T, of_tokens

DTYPE = "bf16"
DINOV3 = "timm:vit_base_patch16_dinov3"
SEARCH = "compile-max-autotune"
SEARCH_S = 60.0  # a guess for it, of an op or a model
PLAIN = ("eager", "swapped", "swapped+graph", "compile")
OURS = ("swapped", "swapped+graph")


@dataclass(frozen=True)
class OpTarget:
    """An op at its first shape whose id has `part`."""

    op: str
    part: str
    modes: tuple[str, ...]
    compiles: bool = False  # whether torch.compile is among the peers

    @property
    def name(self) -> str:
        return f"{self.op} {self.shape.id} {'+'.join(self.modes)}"

    @property
    def shape(self) -> Shape:
        found = op_of(self.op).shapes()
        return next(s for s in found if f"-{self.part}-" in f"-{s.id}-")

    def providers(self) -> list[Provider]:
        every = op_of(self.op).everyone(self.shape, DTYPE)
        return [p for p in every if installed(p) and (self.compiles or not p.compiled)]

    def task(self) -> Task:
        op, shape, providers = op_of(self.op), self.shape, self.providers()
        names = [p.name for p in providers]
        keys = tuple(
            (self.op, p.name, shape.id, DTYPE, mode)
            for mode in self.modes
            for p in providers
            if p.backward or mode == "fwd"
        )
        seconds = SEARCH_S if self.compiles else 12.0
        return Task(
            0, seconds, self.name, keys,
            lambda bench, _: measure_op(op, shape, DTYPE, self.modes, names, bench), renews=True,
        )  # fmt: skip

    def touch(self, device: torch.device) -> None:
        """Each provider once, forward and backward, but for the search."""
        draw = Draw(device, torch.bfloat16)
        inputs = op_of(self.op).inputs(self.shape, draw.dtype, draw)
        leaves = [x for x in inputs.values() if x is not None and x.requires_grad]
        for provider in self.providers():
            if provider.name != SEARCH and (provider.ours or provider.compiled):
                with provider.context():
                    result = provider.make()(**inputs)
                    outputs = result if isinstance(result, tuple) else (result,)
                    if provider.backward:
                        upstream = [torch.randn_like(y) for y in outputs]
                        torch.autograd.grad(outputs, leaves, upstream)


@dataclass(frozen=True)
class VitTarget:
    """A model in some ways; those `beside` are measured again, in the turns of the others."""

    case: Case
    ways: tuple[str, ...]
    beside: tuple[str, ...] = ()
    seconds: float = SEARCH_S

    @property
    def name(self) -> str:
        return f"{self.case.id} {'+'.join(self.ways)}"

    def task(self) -> Task:
        case = self.case
        keys = tuple((bench_vit.OP, w, case.id, case.dtype, case.mode) for w in self.ways)
        return Task(
            0, self.seconds, self.name, keys,
            lambda bench, names: bench_vit.measure_vit(case, (*names, *self.beside), bench),
            renews=True,
        )  # fmt: skip

    def touch(self, device: torch.device) -> None:
        """A step of each way that compiles something, but for the search; those `beside` are other
        targets' own."""
        for way in self.ways:
            if way not in (BASELINE, SEARCH) and not WAYS[way].graph:
                with provider_of(way).context():
                    Runner(self.case, WAYS[way], device).step()


Target = OpTarget | VitTarget


def _has(op: str) -> bool:
    return (Path(__file__).parent / f"bench_{op}.py").exists()


def targets() -> list[Target]:
    """In the order in which they are measured; without what is not there."""
    base = Case("timm", "B", 224, 256)
    both = ("fwd", "bwd")
    plain: list[Target] = [
        *(OpTarget("attention", part, both) for part in of_tokens(SHORT_T)),
        *(OpTarget(op, OF_VIT_B, both) for op in ("layer_norm", "rms_norm")),
        OpTarget("patch_embed", OF_VIT_B, ("fwd",)),
        *(OpTarget("attention", part, both) for part in of_tokens(LONG_T)),
    ]
    searched = (("mlp", OF_VIT_B), ("gated_mlp", PACKED), ("rope", NORMED))
    compiled = [OpTarget(op, part, ("both",), compiles=True) for op, part in searched]
    first = VitTarget(base, PLAIN, seconds=45.0)
    every = (BASELINE, *OURS, SEARCH)
    models = [
        # Before the search, whose turns are then the last of eager and ours: both goals' ratios.
        VitTarget(base, ("swapped-low",), ("swapped",), 25.0),
        VitTarget(base, (SEARCH,), OURS),
        VitTarget(replace(base, model="S"), every),
        VitTarget(replace(base, model="Ti", batch=512), every),
        VitTarget(replace(base, model="L", batch=64, drop_path=0.4), ("swapped", "swapped-skip")),
        VitTarget(NamedCase("timm", DINOV3, 224, 128), every),
    ]
    found = [first, *plain, *compiled, *models]
    return [target for target in found if not _reason(target)]


def _reason(target: Target) -> str:
    """Why it cannot be measured here; nothing where it can."""
    if isinstance(target, OpTarget):
        return "" if _has(target.op) else f"no op {target.op} here"
    package = HOSTS[target.case.host]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return next(filter(None, map(missing_option, target.ways)), "")


def target_tasks(wanted: Iterable[str] = ()) -> Iterator[Task]:
    """The tasks, those alone whose title has one of the wanted parts."""
    parts = list(wanted)
    for task in (target.task() for target in targets()):
        if not parts or any(part in task.title for part in parts):
            yield task
