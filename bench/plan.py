"""What a run measures and in which order: the most telling rows first, as far as the time goes.

A task is one case with some of its providers. Its seconds are a guess that serves the order alone:
a task that would not end in time is left out, and a cheaper one may still come.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench import host, models
from bench.measure import Bench, measure_op
from bench.models import EAGER_GRAPH, HOSTS, VIT, WAYS, Case, NamedCase, missing_option
from bench.ops import BASELINE, MODES, OPS, SEARCH, Draw, Op, Provider, Shape, shape_of
from bench.rows import Key, Row
from bench.targets import LONG_T, NORMED, OF_VIT_B, PACKED, SHORT_T, of_tokens
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.verify.cases import OPS as REGISTRY
from fastvit_kernels.verify.op import run_backward

WHOLE = ("vit", "profile", "host")


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
    pairs = ((p.name, mode) for mode in modes for p in providers if p.backward or mode == "fwd")
    return tuple((op.name, name, shape.id, dtype, mode) for name, mode in pairs)


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
            asked = [p for p in op.providers(shape, dtype) if wanted.provider(p.name)]
            for p in (p for p in asked if not p.installed):
                wanted.say(f"{p.name} is not measured: {p.package} is not installed")
            for name, later, seconds in _OP_GROUPS:
                group = [p for p in asked if p.installed and name == p.name * p.compiled]
                run = functools.partial(measure_op, op, shape, dtype, modes)
                keys, tier = _keys(op, shape, dtype, modes, group), shape.tier + later + 3 * late
                yield Task(tier, seconds, f"{op.name} {shape.id} {dtype}", keys, run)


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


def _vit_keys(case: Case, names: Iterable[str]) -> tuple[Key, ...]:
    return tuple((VIT, name, case.id, case.dtype, case.mode) for name in names)


def _vit_tasks(wanted: Wanted, _: torch.device) -> Iterator[Task]:
    for tier, factor, case in named_cases(wanted) if wanted.model else vit_cases():
        if not wanted.model and not _has_host(wanted, case.host):
            continue
        asked, title = wanted.case(case.id, case.dtype, case.mode), f"{case.dtype} {case.mode}"
        for later, seconds, names in _VIT_GROUPS:
            keys = _vit_keys(case, (n for n in names if asked and wanted.provider(n)))
            run = functools.partial(models.measure_vit, case)
            yield Task(tier + later, factor * seconds, f"{case.id} {title}", keys, run)


def _profile_tasks(wanted: Wanted, _: torch.device) -> Iterator[Task]:
    if not _has_host(wanted, "timm"):
        return
    for tier, case in ((1, Case("timm", "B", 224, 128)), (3, Case("timm", "L", 224, 64))):
        for name in (BASELINE, "swapped"):
            if wanted.provider(name) and wanted.case(case.id):
                keys = tuple((models.PROFILE, name, case.id, case.dtype, s) for s in models.STAGES)
                run = functools.partial(models.measure_profile, case)
                yield Task(tier, 15.0, f"profile of {case.id}, {name}", keys, run)


def _host_tasks(_: Wanted, device: torch.device) -> Iterator[Task]:
    found = itertools.product((*host.models(), *REGISTRY), host.MODES, host.ways(device))
    keys = tuple((host.OP, provider, name, "fp32", mode) for name, mode, provider in found)
    yield Task(1, 10.0, "host cost", keys, lambda _, bench: host.measure_host(bench.device))


def tasks(wanted: Wanted, device: torch.device) -> list[Task]:
    """The tasks in the order in which they are measured; `wanted.said` gets what cannot be had."""
    found: list[Task] = []
    known: set[str] = set()
    for name in wanted.ops:
        if name in OPS:
            op = OPS[name]
            found += _op_tasks(op, wanted)
            known |= {p.name for s in op.shapes() for p in op.providers(s, op.dtypes[0])}
            continue
        make = {"vit": _vit_tasks, "profile": _profile_tasks, "host": _host_tasks}[name]
        found += make(wanted, device)
        known |= {*WAYS}
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


def op_target(
    op: Op, shape: Shape, modes: tuple[str, ...], compiles: bool = False, searches: bool = False
) -> Task:
    """An op in bf16.

    compiles: whether torch.compile is among the peers. searches: max-autotune, whose row is the
    only new one: the others are measured again in its turns.
    """

    def asked(p: Provider) -> bool:
        return p.installed and (searches if p.name == SEARCH else not p.compiled or compiles)

    providers = [p for p in op.providers(shape, "bf16") if asked(p)]
    new = [p for p in providers if not searches or p.name == SEARCH]
    beside = [p.name for p in providers if p not in new]

    def touch(device: torch.device) -> None:
        """Each provider that compiles once, forward and backward, but for the search."""
        inputs = op.inputs(shape, Draw(device, torch.bfloat16))
        for p in providers:
            if p.name != SEARCH and (p.ours or p.compiled):
                with p.context():
                    given = inputs.values() if p.backward else ()
                    run_backward(p.make()(**inputs), given, torch.randn_like)

    return Task(
        0, 90.0 if searches else 25.0 if compiles else 12.0,
        f"{op.name} {shape.id} {'+'.join(modes)}{' max-autotune' if searches else ''}",
        _keys(op, shape, "bf16", modes, new),
        lambda names, bench: measure_op(op, shape, "bf16", modes, (*names, *beside), bench),
        True, touch,
    )  # fmt: skip


def vit_target(
    case: Case, ways: Sequence[str], beside: Sequence[str] = (), seconds: float = 240.0
) -> Task:
    """A model in some ways; those `beside` are measured again, in the turns of the others."""

    def touch(device: torch.device) -> None:
        """A step of each way that compiles something, but for the search; those `beside` are other
        targets' own."""
        for way in ways:
            if way not in (BASELINE, SEARCH) and not WAYS[way].graph:
                with WAYS[way].context():
                    models.Runner(case, WAYS[way], device).step()

    return Task(
        0, seconds, f"{case.id} {'+'.join(ways)}", _vit_keys(case, ways),
        lambda names, bench: models.measure_vit(case, (*names, *beside), bench), True, touch,
    )  # fmt: skip


def targets(parts: Sequence[str] = ()) -> list[Task]:
    """In the order in which they are measured, without what is not there; of `parts`, those whose
    title has one. Each takes little, so that a hang costs little: attention first, then the step
    most likely to win by far."""
    both, tokens = ("fwd", "bwd"), SHORT_T + LONG_T

    def of(op: str, part: str = OF_VIT_B, modes: tuple[str, ...] = both, **options: bool) -> Task:
        return op_target(OPS[op], shape_of(op, part), modes, **options)

    def compiled(**options: bool) -> list[Task]:
        pairs = (("mlp", OF_VIT_B), ("gated_mlp", PACKED), ("rope", NORMED))
        return [of(op, part, ("both",), compiles=True, **options) for op, part in pairs]

    def vit(case: Case, ways: tuple[str, ...], *more: Any) -> list[Task]:
        lacking = not _has_host(Wanted(), case.host) or any(map(missing_option, ways))
        return [] if lacking else [vit_target(case, ways, *more)]

    parts_of = dict(zip(tokens, of_tokens(tokens), strict=True))
    attention = {T: of("attention", part) for T, part in parts_of.items()}
    base = Case("timm", "B", 224, 256)
    skips = replace(base, model="L", batch=64, drop_path=0.4)
    every = (BASELINE, *GRAPHS, SEARCH)
    mlp, gated_mlp, rope = compiled()
    found = [
        attention.pop(197), attention.pop(257), *vit(skips, ("swapped", "swapped-skip"), (), 40.0),
        attention.pop(577), attention.pop(1025), of("layer_norm"), of("rms_norm"), mlp, gated_mlp,
        *vit(base, PLAIN, (), 60.0), rope, of("patch_embed", modes=("fwd",)), *attention.values(),
        *vit(base, ("swapped-low",), ("swapped",), 25.0),
        # These turns are the last of eager and ours: all goals' ratios are of them.
        *vit(base, (SEARCH,), (EAGER_GRAPH, *GRAPHS)), *compiled(searches=True),
        *vit(NamedCase("timm", DINOV3, 224, 128), every), *vit(replace(base, model="S"), every),
        *vit(replace(base, model="Ti", batch=512), every),
    ]  # fmt: skip
    return [task for task in found if not parts or any(part in task.title for part in parts)]
