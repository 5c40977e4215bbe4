"""What a run measures and in which order: the most telling rows first, as far as the time goes.

A task is one case with some of its providers. Its seconds are a guess that serves the order alone:
a task that would not end in time is left out, and a cheaper one may still come.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench import host, models
from bench.measure import Bench, measure_op
from bench.models import EAGER_GRAPH, HOSTS, VIT, WAYS, Case, NamedCase, missing_option
from bench.ops import MODES, OPS, Draw, Op
from bench.providers import BASELINE, SEARCH, VITS, Provider, Shape
from bench.rows import Row
from bench.targets import LONG_T, NORMED, OF_VIT_B, PACKED, SHORT_T, of_tokens
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.verify.cases import OPS as REGISTRY

WHOLE = ("vit", "profile", "host")
Key = tuple[str, str, str, str, str]
Run = Callable[[Sequence[str], Bench], Iterable[Row]]


@dataclass(frozen=True)
class Task:
    """Some providers of one case. `run` gets their names and yields their rows.

    One that `renews` runs all its providers again, and their rows give way to the new ones: a ratio
    is of the same turns.
    """

    tier: int
    seconds: float
    title: str
    keys: tuple[Key, ...]
    run: Run
    renews: bool = False


@dataclass
class Wanted:
    """What the command line asks for; empty means all."""

    ops: Sequence[str] = ()
    providers: Sequence[str] = ()
    shapes: Sequence[str] = ()  # parts of a shape's id
    dtypes: Sequence[str] = ()
    modes: Sequence[str] = ()
    model: str = ""  # whole models: this one in place of the plan's, by a name of the commands
    batch: int = 128
    img_size: int = 0  # 0: the model's
    said: list[str] = field(default_factory=list)  # what could not be had, and why

    def say(self, text: str) -> None:
        if text not in self.said:
            self.said.append(text)

    def provider(self, name: str) -> bool:
        return not self.providers or name in self.providers or name == BASELINE

    def shape(self, identity: str) -> bool:
        return not self.shapes or any(part in identity for part in self.shapes)

    def dtype(self, name: str) -> bool:
        return not self.dtypes or name in self.dtypes

    def mode(self, name: str) -> bool:
        return not self.modes or name in self.modes


# (providers, later by so many tiers, guessed seconds); "": those that nobody compiles
_OP_GROUPS = ((("",), 0, 8.0), (("compile",), 2, 20.0), ((SEARCH,), 5, 60.0))


def _op_tasks(op: Op, wanted: Wanted) -> Iterator[Task]:
    modes = [m for m in MODES if wanted.mode(m)]
    seen: set[tuple[Any, ...]] = set()
    for shape in op.shapes():
        sizes = (shape.B, shape.T, shape.C, shape.H, shape.F, shape.variant)
        if not wanted.shape(shape.id) or sizes in seen:  # a sweep passes through the models' own
            continue
        seen.add(sizes)
        for dtype in op.dtypes:
            late = dtype in ("fp16", "fp32")
            if (late and shape.tier > 2) or not wanted.dtype(dtype):
                continue
            tier = shape.tier + (3 if late else 0)
            for names, later, seconds in _OP_GROUPS:
                found = []
                for p in op.everyone(shape, dtype):
                    group = p.name if p.compiled else ""
                    if group not in names or not wanted.provider(p.name):
                        continue
                    if p.installed:
                        found.append(p)
                    else:
                        wanted.say(f"{p.name} is not measured: {p.package} is not installed")
                keys = tuple(
                    (op.name, p.name, shape.id, dtype, m)
                    for p in found
                    for m in modes
                    if p.backward or m == "fwd"
                )
                run = functools.partial(measure_op, op, shape, dtype, modes)
                title = f"{op.name} {shape.id} {dtype}"
                yield Task(tier + later, seconds, title, keys, run)


def vit_cases() -> Iterator[tuple[int, float, Case]]:
    """(tier, factor of the guessed seconds, case)."""
    base = Case("timm", "B", 224, 128)
    yield 0, 1.0, base
    yield 1, 0.6, replace(base, mode="infer")
    yield 1, 0.8, replace(base, model="S", batch=256)
    yield 1, 1.6, replace(base, model="L", batch=64)
    yield 2, 1.0, replace(base, dtype="bf16")
    for name in ("torchvision", "hf"):
        yield 2, 1.0, replace(base, host=name)
    yield 2, 1.2, replace(base, size=384, batch=64)
    yield 3, 0.8, replace(base, model="Ti", batch=512)
    yield 3, 2.0, replace(base, model="H", batch=32)
    for size in (32, 64, 256, 512):
        yield 3, 1.0, replace(base, batch=size)
    for model in VITS:
        if model == "g":
            continue
        for size, images in ((384, 32), (512, 16)):
            yield 4, 1.5, replace(base, model=model, size=size, batch=images)
        for mode in ("train", "infer"):
            yield 4, 1.0, Case("timm", model, 224, 64, "bf16", mode)
            for host_ in ("torchvision", "hf"):
                yield 4, 1.0, Case(host_, model, 224, 64, "amp", mode)


def named_cases(wanted: Wanted) -> Iterator[tuple[int, float, Case]]:
    """`vit_cases` of the model that was asked for by name; by default it trains under autocast.

    Raises: CommandError for a name or a size that cannot be had.
    """
    host, colon, _ = wanted.model.partition(":")
    for dtype in wanted.dtypes or ("amp",):
        for mode in wanted.modes or ("train",):
            case = NamedCase(
                host if colon else "", wanted.model, wanted.img_size, wanted.batch, dtype, mode
            )
            try:
                _ = case.flops  # a forward without weights
            except RuntimeError as error:
                raise CommandError(f"--model {wanted.model}: {error}") from error
            yield 0, 1.0, case


# (later by so many tiers, guessed seconds for ViT-B, ways)
_VIT_GROUPS = (
    (0, 30.0, (BASELINE, "swapped", EAGER_GRAPH, "swapped+graph")),
    (2, 120.0, ("compile", "swapped+compile")),
    (5, 180.0, (SEARCH,)),
)


def _has_host(wanted: Wanted, name: str) -> bool:
    here = importlib.util.find_spec(HOSTS[name]) is not None
    if not here:
        wanted.say(f"models of {name} are not measured: {HOSTS[name]} is not installed")
    return here


def _vit_tasks(wanted: Wanted) -> Iterator[Task]:
    for tier, factor, case in named_cases(wanted) if wanted.model else vit_cases():
        if not wanted.model and not _has_host(wanted, case.host):
            continue
        asked = wanted.shape(case.id) and wanted.dtype(case.dtype) and wanted.mode(case.mode)
        for later, seconds, names in _VIT_GROUPS:
            names = [n for n in names if wanted.provider(n)]
            if not asked or not names:
                continue
            keys = tuple((VIT, n, case.id, case.dtype, case.mode) for n in names)
            title = f"{case.id} {case.dtype} {case.mode}"
            yield Task(
                tier + later,
                factor * seconds,
                title,
                keys,
                functools.partial(models.measure_vit, case),
            )


def _profile_tasks(wanted: Wanted) -> Iterator[Task]:
    if not _has_host(wanted, "timm"):
        return
    for tier, case in ((1, Case("timm", "B", 224, 128)), (3, Case("timm", "L", 224, 64))):
        for name in ("eager", "swapped"):
            if wanted.provider(name) and wanted.shape(case.id):
                keys = tuple((models.PROFILE, name, case.id, case.dtype, s) for s in models.STAGES)
                title = f"profile of {case.id}, {name}"
                measure = functools.partial(models.measure_profile, case, name)
                yield Task(tier, 15.0, title, keys, lambda _, bench, run=measure: run(bench))


def _host_tasks(device: torch.device) -> Iterator[Task]:
    providers, modes = host.ways(device), host.MODES
    ops = (*host.models(), *REGISTRY)
    keys = tuple((host.OP, p, op, "fp32", m) for op in ops for m in modes for p in providers)
    yield Task(1, 10.0, "host cost", keys, lambda _, bench: host.measure_host(bench.device))


def tasks(wanted: Wanted, device: torch.device) -> list[Task]:
    """The tasks in the order in which they are measured; `wanted.said` gets what cannot be had."""
    found: list[Task] = []
    for name in wanted.ops:
        if name == "vit":
            found += _vit_tasks(wanted)
        elif name == "profile":
            found += _profile_tasks(wanted)
        elif name == "host":
            found += _host_tasks(device)
        else:
            found += _op_tasks(OPS[name], wanted)
    _say_unknown(wanted, found)
    return sorted((t for t in found if t.keys), key=lambda t: t.tier)


def _say_unknown(wanted: Wanted, found: list[Task]) -> None:
    known = {name for name in wanted.ops if name in WHOLE for name in WAYS}
    for name in wanted.ops:
        if name in OPS:
            op = OPS[name]
            for shape in op.shapes():
                known |= {p.name for p in op.everyone(shape, op.dtypes[0])}
    for name in wanted.providers:
        if name not in known:
            wanted.say(f"unknown provider {name!r}; there are {', '.join(sorted(known))}")
    for part in wanted.shapes:
        if not any(part in key[2] for task in found for key in task.keys):
            wanted.say(f"no shape {part!r} here; an id such as ViT-B-B128-T197, or a part of one")


# --- what the goals need: every peer in the same turns as ours, most telling first. Seconds are
# guesses for 16 cores; the compiler's search is for about 18 products of 20 configs a model.

DINOV3 = "timm:vit_base_patch16_dinov3"
GRAPHS = ("swapped", "swapped+graph")
PLAIN = (BASELINE, EAGER_GRAPH, *GRAPHS, "compile")


@dataclass(frozen=True)
class OpTarget:
    """An op at its first shape whose id has `part`, in bf16.

    compiles: whether torch.compile is among the peers. searches: max-autotune, whose row is the
    only new one: the others are measured again in its turns.
    """

    op: str
    part: str
    modes: tuple[str, ...]
    compiles: bool = False
    searches: bool = False

    @property
    def name(self) -> str:
        search = " max-autotune" if self.searches else ""
        return f"{self.op} {self.shape.id} {'+'.join(self.modes)}{search}"

    @property
    def shape(self) -> Shape:
        found = OPS[self.op].shapes()
        return next(s for s in found if f"-{self.part}-" in f"-{s.id}-")

    def providers(self) -> list[Provider]:
        def asked(p: Provider) -> bool:
            return self.searches if p.name == SEARCH else not p.compiled or self.compiles

        every = OPS[self.op].everyone(self.shape, "bf16")
        return [p for p in every if p.installed and asked(p)]

    def task(self) -> Task:
        shape, providers = self.shape, self.providers()
        beside = [p.name for p in providers if self.searches and p.name != SEARCH]
        keys = tuple(
            (self.op, p.name, shape.id, "bf16", mode)
            for mode in self.modes
            for p in providers
            if p.name not in beside and (p.backward or mode == "fwd")
        )
        run = functools.partial(measure_op, OPS[self.op], shape, "bf16", self.modes)
        seconds = 90.0 if self.searches else 25.0 if self.compiles else 12.0
        return Task(
            0, seconds, self.name, keys, lambda names, bench: run((*names, *beside), bench),
            renews=True,
        )  # fmt: skip

    def touch(self, device: torch.device) -> None:
        """Each provider that compiles once, forward and backward, but for the search."""
        draw = Draw(device, torch.bfloat16)
        inputs = OPS[self.op].inputs(self.shape, draw.dtype, draw)
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
    seconds: float = 180.0

    @property
    def name(self) -> str:
        return f"{self.case.id} {'+'.join(self.ways)}"

    def task(self) -> Task:
        case = self.case
        keys = tuple((VIT, w, case.id, case.dtype, case.mode) for w in self.ways)
        run = functools.partial(models.measure_vit, case)
        return Task(
            0, self.seconds, self.name, keys,
            lambda names, bench: run((*names, *self.beside), bench), renews=True,
        )  # fmt: skip

    def touch(self, device: torch.device) -> None:
        """A step of each way that compiles something, but for the search; those `beside` are other
        targets' own."""
        for way in self.ways:
            if way not in (BASELINE, SEARCH) and not WAYS[way].graph:
                with WAYS[way].context():
                    models.Runner(self.case, WAYS[way], device).step()


Target = OpTarget | VitTarget


def targets() -> list[Target]:
    """In the order in which they are measured, without what is not there. Each takes little, so
    that a hang costs little: attention first, then the step most likely to win by far."""
    base = Case("timm", "B", 224, 256)
    skips = replace(base, model="L", batch=64, drop_path=0.4)
    both = ("fwd", "bwd")
    every = (BASELINE, *GRAPHS, SEARCH)
    tokens = SHORT_T + LONG_T
    sweep = (OpTarget("attention", part, both) for part in of_tokens(tokens))
    attention = dict(zip(tokens, sweep, strict=True))
    compiled = [
        OpTarget(op, part, ("both",), compiles=True)
        for op, part in (("mlp", OF_VIT_B), ("gated_mlp", PACKED), ("rope", NORMED))
    ]
    early = (197, 257, 577, 1025)
    found = [
        attention[197], attention[257], VitTarget(skips, ("swapped", "swapped-skip"), (), 40.0),
        attention[577], attention[1025],
        *(OpTarget(op, OF_VIT_B, both) for op in ("layer_norm", "rms_norm")),
        *compiled[:2],
        VitTarget(base, PLAIN, seconds=60.0),
        compiled[2], OpTarget("patch_embed", OF_VIT_B, ("fwd",)),
        *(target for T, target in attention.items() if T not in early),
        VitTarget(base, ("swapped-low",), ("swapped",), 25.0),
        # These turns are the last of eager and ours: all goals' ratios are of them.
        VitTarget(base, (SEARCH,), (EAGER_GRAPH, *GRAPHS)),
        *(replace(target, searches=True) for target in compiled),
        VitTarget(NamedCase("timm", DINOV3, 224, 128), every),
        VitTarget(replace(base, model="S"), every),
        VitTarget(replace(base, model="Ti", batch=512), every),
    ]  # fmt: skip
    return [target for target in found if not _reason(target)]


def _reason(target: Target) -> str:
    """Why it cannot be measured here; nothing if it can."""
    if isinstance(target, OpTarget):
        return ""
    package = HOSTS[target.case.host]
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    return next(filter(None, map(missing_option, target.ways)), "")


def target_tasks(wanted: Iterable[str] = ()) -> Iterator[Task]:
    """The tasks, or those whose title has one of the wanted parts."""
    parts = list(wanted)
    for task in (target.task() for target in targets()):
        if not parts or any(part in task.title for part in parts):
            yield task
