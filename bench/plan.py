"""What a run measures and in which order: the most telling rows first, as far as the time goes.

A task is one case with some of its providers. Its seconds are a guess that serves the order alone:
a task that would not end in time is left out, and a cheaper one may still come.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench import bench_profile, bench_vit, first_step, host
from bench.harness import MODES, Bench, Op, measure_op
from bench.models import HOSTS, WAYS, Case, NamedCase
from bench.providers import BASELINE, installed
from bench.rows import Row
from bench.shapes import VITS, Shape
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.verify.cases import OPS as REGISTRY

# Ops of the registry that have a bench_<op>.py.
OPS = tuple(name for name in REGISTRY if (Path(__file__).parent / f"bench_{name}.py").exists())
WHOLE = ("vit", "profile", "host")
Key = tuple[str, str, str, str, str]


@dataclass(frozen=True)
class Task:
    """Some providers of one case. `run` gets their names and yields their rows.

    Where it `renews`, a row that is there already gives way: what is compared, in the same turns.
    """

    tier: int
    seconds: float
    title: str
    keys: tuple[Key, ...]
    run: Callable[[Bench, Sequence[str]], Iterable[Row]]
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


def op_of(name: str) -> Op:
    return importlib.import_module(f"bench.bench_{name}").OP


# (providers, later by so many tiers, guessed seconds); "": those that nobody compiles
_OP_GROUPS = ((("",), 0, 8.0), (("compile",), 2, 20.0), (("compile-max-autotune",), 5, 60.0))


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
                    if installed(p):
                        found.append(p)
                    else:
                        wanted.say(f"{p.name} is not measured: {p.package} is not installed")
                keys = tuple(
                    (op.name, p.name, shape.id, dtype, m)
                    for p in found
                    for m in modes
                    if p.backward or m == "fwd"
                )
                run = _op_runner(op, shape, dtype, modes)
                title = f"{op.name} {shape.id} {dtype}"
                yield Task(tier + later, seconds, title, keys, run)


def _op_runner(op: Op, shape: Shape, dtype: str, modes: Sequence[str]) -> Any:
    return lambda bench, names: measure_op(op, shape, dtype, modes, names, bench)


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
    (0, 25.0, ("eager", "swapped", "swapped+graph")),
    (2, 120.0, ("compile", "swapped+compile")),
    (5, 120.0, ("compile-max-autotune",)),
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
            keys = tuple((bench_vit.OP, n, case.id, case.dtype, case.mode) for n in names)
            title = f"{case.id} {case.dtype} {case.mode}"
            yield Task(tier + later, factor * seconds, title, keys, _vit_runner(case))
    if wanted.model or not _has_host(wanted, "timm"):
        return
    base = Case("timm", "B", 224, 128)
    first = replace(base, batch=32)
    for tier, seconds, name in (
        (2, 80.0, "eager"), (2, 80.0, "swapped"), (4, 200.0, "compile"),
        (4, 200.0, "swapped+compile"),
    ):  # fmt: skip
        if wanted.provider(name) and wanted.shape(first.id) and wanted.mode("train"):
            keys = tuple((first_step.OP, name, first.id, first.dtype, m) for m in first_step.MODES)
            title = f"first step of {first.id}, {name}"
            yield Task(tier, seconds, title, keys, _first_step_runner(first, name, 2 * seconds))
    for name in ("eager", "swapped"):
        if wanted.provider(name) and wanted.shape(base.id) and wanted.mode("train"):
            key = (bench_vit.OP_BATCH, name, base.id, base.dtype, base.mode)
            title = f"largest batch of {base.id}, {name}"
            yield Task(4, 60.0, title, (key,), _largest_runner(base, name))


def _vit_runner(case: Case) -> Any:
    return lambda bench, names: bench_vit.measure_vit(case, names, bench)


def _first_step_runner(case: Case, name: str, timeout: float) -> Any:
    return lambda bench, names: first_step.measure_first_step(case, name, timeout)


def _largest_runner(case: Case, name: str) -> Any:
    return lambda bench, names: [bench_vit.largest_batch(case, name, bench)]


def _profile_tasks(wanted: Wanted) -> Iterator[Task]:
    if not _has_host(wanted, "timm"):
        return
    for tier, case in ((1, Case("timm", "B", 224, 128)), (3, Case("timm", "L", 224, 64))):
        for name in ("eager", "swapped"):
            if wanted.provider(name) and wanted.shape(case.id):
                keys = tuple(
                    (bench_profile.OP, name, case.id, case.dtype, s) for s in bench_profile.STAGES
                )
                title = f"profile of {case.id}, {name}"
                yield Task(tier, 15.0, title, keys, _profile_runner(case, name))


def _profile_runner(case: Case, name: str) -> Any:
    return lambda bench, names: bench_profile.measure_profile(case, name, bench)


def _host_tasks(device: torch.device) -> Iterator[Task]:
    providers, modes = host.ways(device), host.MODES
    ops = (*host.models(), *REGISTRY)
    keys = tuple((host.OP, p, op, "fp32", m) for op in ops for m in modes for p in providers)
    yield Task(1, 10.0, "host cost", keys, lambda bench, names: host.measure_host(bench.device))


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
            found += _op_tasks(op_of(name), wanted)
    _say_unknown(wanted, found)
    return sorted((t for t in found if t.keys), key=lambda t: t.tier)


def _say_unknown(wanted: Wanted, found: list[Task]) -> None:
    known = {name for name in wanted.ops if name in WHOLE for name in WAYS}
    for name in wanted.ops:
        if name in OPS:
            op = op_of(name)
            for shape in op.shapes():
                known |= {p.name for p in op.everyone(shape, op.dtypes[0])}
    for name in wanted.providers:
        if name not in known:
            wanted.say(f"unknown provider {name!r}; there are {', '.join(sorted(known))}")
    for part in wanted.shapes:
        if not any(part in key[2] for task in found for key in task.keys):
            wanted.say(f"no shape {part!r} here; an id such as ViT-B-B128-T197, or a part of one")
