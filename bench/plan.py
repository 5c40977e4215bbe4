"""What a run measures and in which order: the most telling rows first, as far as the time goes.

A task is one case with some of its providers, in turns with eager: what is quick first, then what
torch.compile makes, then its search.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bench.measure import Bench, measure_op
from bench.models import EAGER_GRAPH, VIT, Case, measure_vit
from bench.ops import BASELINE, MODES, OPS, SEARCH, Op
from bench.rows import Key, Row
from fastvit_kernels.commands.console import refusing

DTYPES = ("bf16", "fp16", "fp32")  # of ops
STEPS = ("train", "infer")  # of whole models
VIT_B = Case("B", 224, 256)
_SKIPPED = replace(VIT_B, model="L", batch=64, drop_path=0.4)
CASES = (  # of whole models
    VIT_B,
    _SKIPPED,
    replace(_SKIPPED, uniform=True),
    Case("timm:vit_base_patch16_dinov3", 224, 128),
    replace(VIT_B, model="S"),
    replace(VIT_B, model="L", batch=64),
    replace(VIT_B, model="Ti", batch=512),
    replace(VIT_B, model="H", batch=32),
    replace(VIT_B, size=384, batch=64),
    replace(VIT_B, size=512, batch=32),
    replace(VIT_B, batch=128, mode="infer"),
    replace(VIT_B, batch=128, dtype="bf16"),
)
_OF_VIT_B = "ViT-B-B128-T197-C768-H12"
# What ten minutes of a GPU are best spent on: op and part of a case's id, in bf16 or amp.
FIRST = (
    *(("attention", f"T{T}-C768-H12") for T in (577, 1025, 2305, 4097)),
    (VIT, "timm-ViT-B-224-B256"),
    (VIT, "timm-ViT-L-224-B64-drop0.4"),
    *(("attention", f"T{T}-C768-H12") for T in (197, 257, 785, 1370)),
    *((name, _OF_VIT_B) for name in ("layer_norm", "rms_norm", "mlp")),
    ("gated_mlp", "C768-H12-packed"),
    ("rope", "C768-H12-layer_norm"),
    ("patch_embed", _OF_VIT_B),
    (VIT, "timm:vit_base_patch16_dinov3-224-B128"),
    (VIT, "timm-ViT-S-224-B256"),
)
LATER = {"compile": 1, SEARCH: 3}  # tiers


@dataclass(frozen=True)
class Task:
    """Some providers of one case. `run` gets their names and yields their rows."""

    rank: tuple[int, int]  # tier, and the place in FIRST
    title: str
    keys: tuple[Key, ...]
    run: Callable[[Sequence[str], Bench], Iterable[Row]]


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

    def case(self, shape: str, dtype: str) -> bool:
        parts = self.shapes or ("",)
        return any(part in shape for part in parts) and dtype in (self.dtypes or (dtype,))


def rank(op: str, case: str, dtype: str, later: int) -> tuple[int, int]:
    """FIRST's cases before the others, fp16 and fp32 at the end."""
    named = (i for i, (name, part) in enumerate(FIRST) if name == op and f"-{part}-" in f"-{case}-")
    place = next(named, None)
    tier = later + 2 * (place is None) + 3 * (dtype in ("fp16", "fp32"))
    return tier, len(FIRST) if place is None else place


def _op_tasks(op: Op, wanted: Wanted) -> Iterator[Task]:
    modes = [m for m in MODES if m in (wanted.modes or MODES)]
    seen = set()
    for shape in op.shapes():
        sizes = (shape.B, shape.T, shape.C, shape.H, shape.F, shape.variant)
        if sizes in seen:  # a sweep passes through the models' own
            continue
        seen.add(sizes)
        for dtype in (d for d in DTYPES if wanted.case(shape.id, d)):
            asked = [p for p in op.providers(shape, dtype) if wanted.provider(p.name)]
            for p in (p for p in asked if not p.installed):
                wanted.say(f"{p.name} is not measured: {p.package} is not installed")
            groups: dict[int, list[str]] = {}
            for p in (p for p in asked if p.installed):
                later = LATER.get(p.name, LATER["compile"] * p.compiled)
                groups.setdefault(later, []).append(p.name)
            for later, names in groups.items():
                keys = ((op.name, n, shape.id, dtype, mode) for mode in modes for n in names)
                run = functools.partial(measure_op, op, shape, dtype, modes)
                title = f"{op.name} {shape.id} {dtype}"
                yield Task(rank(op.name, shape.id, dtype, later), title, tuple(keys), run)


GROUPS = (  # (tiers later, ways of whole models)
    (0, (BASELINE, EAGER_GRAPH, "swapped", "swapped+graph", "swapped-low")),
    (0, ("compile", "backend", "backend+graphs")),
    (LATER[SEARCH], (SEARCH,)),
)
SKIPPING = ((0, (*GROUPS[0][1][:-1], "swapped-skip", "swapped-skip+graph")),)


def _vit_tasks(wanted: Wanted) -> Iterator[Task]:
    """Of the plan's models, or of the one that was asked for by name, which by default trains under
    autocast.

    Raises: CommandError for a name or a size that cannot be had.
    """
    cases: Iterable[Case] = CASES
    if wanted.model:
        steps = itertools.product(wanted.dtypes or ("amp",), wanted.modes or ("train",))
        cases = [Case(wanted.model, wanted.img_size, wanted.batch, *step) for step in steps]
        with refusing(f"--model {wanted.model}", RuntimeError):
            _ = cases[0].flops  # a forward without weights
    elif importlib.util.find_spec("timm") is None:
        wanted.say("whole models are not measured: timm is not installed")
        return
    for case in cases:
        if not wanted.case(case.id, case.dtype) or case.mode not in (wanted.modes or STEPS):
            continue
        for later, ways in SKIPPING if case.drop_path else GROUPS:
            keys = ((VIT, n, case.id, case.dtype, case.mode) for n in ways if wanted.provider(n))
            run = functools.partial(measure_vit, case)
            title = f"{case.id} {case.dtype} {case.mode}"
            yield Task(rank(VIT, case.id, case.dtype, later), title, tuple(keys), run)


def tasks(wanted: Wanted) -> list[Task]:
    """The tasks in the order in which they are measured; `wanted.said` gets what cannot be had."""
    found: list[Task] = []
    for name in wanted.ops:
        found += _vit_tasks(wanted) if name == VIT else _op_tasks(OPS[name], wanted)
    keys = [key for task in found for key in task.keys]
    for name in set(wanted.providers) - {key[1] for key in keys}:
        wanted.say(f"no provider {name!r} here")
    for part in wanted.shapes:
        if not any(part in key[2] for key in keys):
            wanted.say(f"no shape {part!r} here; an id such as ViT-B-B128-T197, or a part of one")
    return sorted((task for task in found if task.keys), key=lambda task: task.rank)
