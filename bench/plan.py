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
from bench.providers import BASELINE, SEARCH, Provider, Shape
from bench.rows import Row
from bench.targets import LONG_T, NORMED, OF_VIT_B, PACKED, SHORT_T, has_part, of_tokens
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.verify.cases import OPS as REGISTRY
from fastvit_kernels.verify.op import run_backward

WHOLE = ("vit", "profile", "host")
Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Task:
    """Some providers of one case. `run` gets their names and yields their rows.

    renews: all its providers run again, and their rows give way to the new ones: a ratio is of the
        same turns.
    touch: launches once, on this device, what it compiles.
    """

    tier: int
    seconds: float
    title: str
    keys: tuple[Key, ...]
    run: Callable[[Sequence[str], Bench], Iterable[Row]]
    renews: bool = False
    touch: Callable[[torch.device], None] = lambda device: None


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
        return name in (*(self.providers or (name,)), BASELINE)

    def case(self, shape: str, dtype: str | None = None, mode: str | None = None) -> bool:
        """Whether it is asked for; None: whatever it is."""
        return (
            (not self.shapes or any(part in shape for part in self.shapes))
            and dtype in (*(self.dtypes or (dtype,)), None)
            and mode in (*(self.modes or (mode,)), None)
        )


# --- ops

# (providers, later by so many tiers, guessed seconds); "": those that nobody compiles
_OP_GROUPS = (("", 0, 8.0), ("compile", 2, 20.0), (SEARCH, 5, 60.0))


def _keys(
    op: Op, shape: Shape, dtype: str, modes: Sequence[str], providers: Iterable[Provider]
) -> tuple[Key, ...]:
    return tuple(
        (op.name, p.name, shape.id, dtype, mode)
        for mode in modes
        for p in providers
        if p.backward or mode == "fwd"
    )


def _op_tasks(op: Op, wanted: Wanted) -> Iterator[Task]:
    modes = [m for m in MODES if m in (wanted.modes or MODES)]
    seen: set[tuple[Any, ...]] = set()
    for shape in op.shapes():
        sizes = (shape.B, shape.T, shape.C, shape.H, shape.F, shape.variant)
        if not wanted.case(shape.id) or sizes in seen:  # a sweep passes through the models' own
            continue
        seen.add(sizes)
        for dtype in op.dtypes:
            late = dtype in ("fp16", "fp32")
            if (late and shape.tier > 2) or not wanted.case(shape.id, dtype):
                continue
            asked = [p for p in op.everyone(shape, dtype) if wanted.provider(p.name)]
            for p in (p for p in asked if not p.installed):
                wanted.say(f"{p.name} is not measured: {p.package} is not installed")
            for name, later, seconds in _OP_GROUPS:
                group = [p for p in asked if p.installed and name == p.name * p.compiled]
                run = functools.partial(measure_op, op, shape, dtype, modes)
                yield Task(
                    shape.tier + (3 if late else 0) + later, seconds,
                    f"{op.name} {shape.id} {dtype}", _keys(op, shape, dtype, modes, group), run,
                )  # fmt: skip


# --- whole models


def vit_cases() -> Iterator[tuple[int, float, Case]]:
    """(tier, factor of the guessed seconds, case)."""
    base = Case("timm", "B", 224, 128)
    for tier, factor, changes in (
        (0, 1.0, {}), (1, 0.6, dict(mode="infer")), (1, 0.8, dict(model="S", batch=256)),
        (1, 1.6, dict(model="L", batch=64)), (2, 1.0, dict(dtype="bf16")),
        (2, 1.0, dict(host="torchvision")), (2, 1.0, dict(host="hf")),
        (2, 1.2, dict(size=384, batch=64)), (3, 0.8, dict(model="Ti", batch=512)),
        (3, 2.0, dict(model="H", batch=32)), *((3, 1.0, dict(batch=n)) for n in (32, 64, 256, 512)),
    ):  # fmt: skip
        yield tier, factor, replace(base, **changes)
    for model in ("Ti", "S", "B", "L", "H"):
        for size, images in ((384, 32), (512, 16)):
            yield 4, 1.5, replace(base, model=model, size=size, batch=images)
        for mode in ("train", "infer"):
            for host_, dtype in (("timm", "bf16"), ("torchvision", "amp"), ("hf", "amp")):
                yield 4, 1.0, Case(host_, model, 224, 64, dtype, mode)


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
    (5, 240.0, (SEARCH,)),
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
        asked = wanted.case(case.id, case.dtype, case.mode)
        for later, seconds, names in _VIT_GROUPS:
            names = [n for n in names if asked and wanted.provider(n)]
            keys = tuple((VIT, n, case.id, case.dtype, case.mode) for n in names)
            title = f"{case.id} {case.dtype} {case.mode}"
            run = functools.partial(models.measure_vit, case)
            yield Task(tier + later, factor * seconds, title, keys, run)


def _profile_tasks(wanted: Wanted) -> Iterator[Task]:
    if not _has_host(wanted, "timm"):
        return
    for tier, case in ((1, Case("timm", "B", 224, 128)), (3, Case("timm", "L", 224, 64))):
        for name in ("eager", "swapped"):
            if wanted.provider(name) and wanted.case(case.id):
                keys = tuple((models.PROFILE, name, case.id, case.dtype, s) for s in models.STAGES)
                title = f"profile of {case.id}, {name}"
                measure = functools.partial(models.measure_profile, case, name)
                yield Task(tier, 15.0, title, keys, lambda _, bench, run=measure: run(bench))


def _host_tasks(device: torch.device) -> Iterator[Task]:
    ops = (*host.models(), *REGISTRY)
    keys = tuple(
        (host.OP, p, op, "fp32", m) for op in ops for m in host.MODES for p in host.ways(device)
    )
    yield Task(1, 10.0, "host cost", keys, lambda _, bench: host.measure_host(bench.device))


def tasks(wanted: Wanted, device: torch.device) -> list[Task]:
    """The tasks in the order in which they are measured; `wanted.said` gets what cannot be had."""
    whole = {
        "vit": lambda: _vit_tasks(wanted), "profile": lambda: _profile_tasks(wanted),
        "host": lambda: _host_tasks(device),
    }  # fmt: skip
    found: list[Task] = []
    known: set[str] = set()
    for name in wanted.ops:
        if name in whole:
            found += whole[name]()
            known |= {*WAYS}
        else:
            op = OPS[name]
            found += _op_tasks(op, wanted)
            known |= {p.name for s in op.shapes() for p in op.everyone(s, op.dtypes[0])}
    for name in wanted.providers:
        if name not in known:
            wanted.say(f"unknown provider {name!r}; there are {', '.join(sorted(known))}")
    for part in wanted.shapes:
        if not any(part in key[2] for task in found for key in task.keys):
            wanted.say(f"no shape {part!r} here; an id such as ViT-B-B128-T197, or a part of one")
    return sorted((t for t in found if t.keys), key=lambda t: t.tier)


# --- what the goals need: every peer in the same turns as ours, most telling first. Seconds are
# guesses for 16 cores; the compiler's search is for about 18 products of 20 configs a model.

DINOV3 = "timm:vit_base_patch16_dinov3"
GRAPHS = ("swapped", "swapped+graph")
PLAIN = (BASELINE, EAGER_GRAPH, *GRAPHS, "compile")


def shape_of(op: str, part: str) -> Shape:
    """The op's first shape whose id has this part."""
    return next(s for s in OPS[op].shapes() if has_part(s.id, part))


def op_target(
    op: Op, shape: Shape, modes: tuple[str, ...], compiles: bool = False, searches: bool = False
) -> Task:
    """An op in bf16.

    compiles: whether torch.compile is among the peers. searches: max-autotune, whose row is the
    only new one: the others are measured again in its turns.
    """

    def asked(p: Provider) -> bool:
        return searches if p.name == SEARCH else not p.compiled or compiles

    providers = [p for p in op.everyone(shape, "bf16") if p.installed and asked(p)]
    new = [p for p in providers if not searches or p.name == SEARCH]
    beside = [p.name for p in providers if p not in new]

    def run(names: Sequence[str], bench: Bench) -> Iterable[Row]:
        return measure_op(op, shape, "bf16", modes, (*names, *beside), bench)

    def touch(device: torch.device) -> None:
        """Each provider that compiles once, forward and backward, but for the search."""
        inputs = op.inputs(shape, torch.bfloat16, Draw(device, torch.bfloat16))
        for p in providers:
            if p.name != SEARCH and (p.ours or p.compiled):
                with p.context():
                    given = inputs.values() if p.backward else ()
                    run_backward(p.make()(**inputs), given, torch.randn_like)

    name = f"{op.name} {shape.id} {'+'.join(modes)}{' max-autotune' if searches else ''}"
    seconds = 90.0 if searches else 25.0 if compiles else 12.0
    return Task(0, seconds, name, _keys(op, shape, "bf16", modes, new), run, True, touch)


def vit_target(
    case: Case, ways: Sequence[str], beside: Sequence[str] = (), seconds: float = 240.0
) -> Task:
    """A model in some ways; those `beside` are measured again, in the turns of the others."""

    def run(names: Sequence[str], bench: Bench) -> Iterable[Row]:
        return models.measure_vit(case, (*names, *beside), bench)

    def touch(device: torch.device) -> None:
        """A step of each way that compiles something, but for the search; those `beside` are other
        targets' own."""
        for way in ways:
            if way not in (BASELINE, SEARCH) and not WAYS[way].graph:
                with WAYS[way].context():
                    models.Runner(case, WAYS[way], device).step()

    keys = tuple((VIT, w, case.id, case.dtype, case.mode) for w in ways)
    return Task(0, seconds, f"{case.id} {'+'.join(ways)}", keys, run, True, touch)


def targets() -> list[Task]:
    """In the order in which they are measured, without what is not there. Each takes little, so
    that a hang costs little: attention first, then the step most likely to win by far."""
    both, tokens, early = ("fwd", "bwd"), SHORT_T + LONG_T, (197, 257, 577, 1025)
    attention = {
        T: op_target(OPS["attention"], shape_of("attention", part), both)
        for T, part in zip(tokens, of_tokens(tokens), strict=True)
    }

    def of(op: str, part: str = OF_VIT_B, modes: tuple[str, ...] = both, **options: bool) -> Task:
        return op_target(OPS[op], shape_of(op, part), modes, **options)

    def compiled(**options: bool) -> list[Task]:
        parts = {"mlp": OF_VIT_B, "gated_mlp": PACKED, "rope": NORMED}
        return [of(op, part, ("both",), compiles=True, **options) for op, part in parts.items()]

    def vit(case: Case, ways: tuple[str, ...], *more: Any) -> list[Task]:
        here = importlib.util.find_spec(HOSTS[case.host]) is not None
        return (
            [vit_target(case, ways, *more)] if here and not any(map(missing_option, ways)) else []
        )

    base = Case("timm", "B", 224, 256)
    skips = replace(base, model="L", batch=64, drop_path=0.4)
    every = (BASELINE, *GRAPHS, SEARCH)
    mlp, gated_mlp, rope = compiled()
    return [
        attention[197], attention[257], *vit(skips, ("swapped", "swapped-skip"), (), 40.0),
        attention[577], attention[1025], of("layer_norm"), of("rms_norm"), mlp, gated_mlp,
        *vit(base, PLAIN, (), 60.0), rope, of("patch_embed", modes=("fwd",)),
        *(target for T, target in attention.items() if T not in early),
        *vit(base, ("swapped-low",), ("swapped",), 25.0),
        # These turns are the last of eager and ours: all goals' ratios are of them.
        *vit(base, (SEARCH,), (EAGER_GRAPH, *GRAPHS)), *compiled(searches=True),
        *vit(NamedCase("timm", DINOV3, 224, 128), every), *vit(replace(base, model="S"), every),
        *vit(replace(base, model="Ti", batch=512), every),
    ]  # fmt: skip


def target_tasks(wanted: Iterable[str] = ()) -> list[Task]:
    """The tasks, or those whose title has one of the wanted parts."""
    parts = list(wanted)
    return [t for t in targets() if not parts or any(part in t.title for part in parts)]
