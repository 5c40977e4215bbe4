"""What a run measures and in which order: the most telling rows first, as far as the time goes.
Also the goals of this project, once: which rows decide each, and whether it is met.

A task is one case with some of its providers. Its seconds are a guess that serves the order alone:
a task that would not end in time is left out, and a cheaper one may still come.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench import models
from bench.measure import COPY, SETTLED, Bench, measure_op
from bench.models import EAGER_GRAPH, VIT, WAYS, Case
from bench.ops import BASELINE, MODES, OPS, SEARCH, Op, Provider, Shape, has_part, shape_of
from bench.rows import FAILED, OK, ROOF, Key, Row, least
from fastvit_kernels.commands.console import aligned, refusing

WHOLE = ("vit",)
CUT_SHORT = 3  # exit status of a command that its time has cut short


@dataclass(frozen=True)
class Task:
    """Some providers of one case. `run` gets their names and yields their rows.

    renews: all its providers run again, and their rows give way to the new ones: a ratio is of the
        same turns.
    """

    tier: int
    seconds: float
    title: str
    keys: tuple[Key, ...]
    run: Callable[[Sequence[str], Bench], Iterable[Row]]
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
            if not wanted.case(shape.id, dtype):
                continue
            asked = [p for p in op.providers(shape, dtype) if wanted.provider(p.name)]
            for p in (p for p in asked if not p.installed):
                wanted.say(f"{p.name} is not measured: {p.package} is not installed")
            for name, later, seconds in _OP_GROUPS:
                group = [p for p in asked if p.installed and name == p.name * p.compiled]
                run = functools.partial(measure_op, op, shape, dtype, modes)
                keys, tier = _keys(op, shape, dtype, modes, group), later + 3 * late
                yield Task(tier, seconds, f"{op.name} {shape.id} {dtype}", keys, run)


# --- whole models


def vit_cases(wanted: Wanted) -> Iterator[tuple[int, float, Case]]:
    """(tier, factor of the guessed seconds, case): the plan's, or those of the model that was asked
    for by name, which by default trains under autocast.

    Raises: CommandError for a name or a size that cannot be had.
    """
    if wanted.model:
        for dtype, mode in itertools.product(wanted.dtypes or ("amp",), wanted.modes or ("train",)):
            case = Case(wanted.model, wanted.img_size, wanted.batch, dtype, mode)
            with refusing(f"--model {wanted.model}", RuntimeError):
                _ = case.flops  # a forward without weights
            yield 0, 1.0, case
        return
    base = Case("B", 224, 128)
    for tier, factor, changes in (
        (0, 1.0, {}),
        (1, 0.6, dict(mode="infer")),
        (1, 0.8, dict(model="S", batch=256)),
        (1, 1.6, dict(model="L", batch=64)),
        (2, 1.0, dict(dtype="bf16")),
        (2, 1.2, dict(size=384, batch=64)),
        (3, 0.8, dict(model="Ti", batch=512)),
        (3, 2.0, dict(model="H", batch=32)),
        *((3, 1.0, dict(batch=n)) for n in (32, 64, 256, 512)),
    ):
        yield tier, factor, replace(base, **changes)


# (later by so many tiers, guessed seconds for ViT-B, ways)
_VIT_GROUPS = (
    (0, 30.0, (BASELINE, "swapped", EAGER_GRAPH, "swapped+graph")),
    (2, 120.0, ("compile", "backend", "backend+graphs")),
    (5, 240.0, (SEARCH,)),
)


def _has_timm(wanted: Wanted) -> bool:
    here = importlib.util.find_spec("timm") is not None
    if not here:
        wanted.say("whole models are not measured: timm is not installed")
    return here


def _vit_keys(case: Case, names: Iterable[str]) -> tuple[Key, ...]:
    return tuple((VIT, name, case.id, case.dtype, case.mode) for name in names)


def _vit_tasks(wanted: Wanted) -> Iterator[Task]:
    if not wanted.model and not _has_timm(wanted):
        return
    for tier, factor, case in vit_cases(wanted):
        asked, title = wanted.case(case.id, case.dtype, case.mode), f"{case.dtype} {case.mode}"
        for later, seconds, names in _VIT_GROUPS:
            keys = _vit_keys(case, (n for n in names if asked and wanted.provider(n)))
            run = functools.partial(models.measure_vit, case)
            yield Task(tier + later, factor * seconds, f"{case.id} {title}", keys, run)


def tasks(wanted: Wanted) -> list[Task]:
    """The tasks in the order in which they are measured; `wanted.said` gets what cannot be had."""
    found: list[Task] = []
    known: set[str] = set()
    for name in wanted.ops:
        if name in OPS:
            op = OPS[name]
            found += _op_tasks(op, wanted)
            known |= {p.name for s in op.shapes() for p in op.providers(s, op.dtypes[0])}
            continue
        found += _vit_tasks(wanted)
        known |= {*WAYS}
    for name in wanted.providers:
        if name not in known:
            wanted.say(f"unknown provider {name!r}; there are {', '.join(sorted(known))}")
    for part in wanted.shapes:
        if not any(part in key[2] for task in found for key in task.keys):
            wanted.say(f"no shape {part!r} here; an id such as ViT-B-B128-T197, or a part of one")
    return sorted((t for t in found if t.keys), key=lambda t: t.tier)


# --- the goals: for an H100 or H200, in bf16; of another GPU a table has the ratios alone

GPUS = ("H100", "H200")  # that the goals are for
SDPA = (
    "sdpa-flash",
    "sdpa-cudnn",
    "sdpa-flash-unpacked",
    "sdpa-cudnn-unpacked",
    "sdpa-efficient",
    "flash_attn",
    "flash_attn_3",
    "flash_attn_4",
    "flex-flash",
)
VIT_B = "timm-ViT-B-224-B256"
VIT_L = "timm-ViT-L-224-B64-drop0.4"
GRAPHED = ("swapped+graph", "backend+graphs")
UNSKIPPED = ("swapped", "swapped+")
OF_VIT_B = "ViT-B-B128-T197-C768-H12"
CONVOLUTIONS = (BASELINE, "eager, cudnn.benchmark")  # each with cat and add
PACKED, NORMED = "C768-H12-packed", "C768-H12-layer_norm"  # variants of gated_mlp and rope
SHORT_T, LONG_T = (197, 257), (577, 785, 1025, 1370, 2305, 4097)


@dataclass(frozen=True)
class Claim:
    """One line of the table: in each of the rows' cases, ours against the best of its peers.

    kind: "time"; "memory", the peak of both; "copy" or "matmul", ours as a share of that roof.
    shapes: endings of a shape's id, or parts of it, one of which a case must have.
    ours, peers: providers; one that ends in "-" or "+" stands for all that begin so.
    """

    name: str
    op: str
    mode: str
    shapes: tuple[str, ...]
    least: float
    peers: tuple[str, ...] = ()
    kind: str = "time"
    ours: tuple[str, ...] = ("ours", "ours-")
    dtype: str = "bf16"

    def has(self, row: Row) -> bool:
        return (row.op, row.dtype, row.mode) == (self.op, self.dtype, self.mode) and any(
            has_part(row.shape, part) and has_part(row.shape, "uniform") == ("uniform" in part)
            for part in self.shapes
        )


def of_tokens(tokens: Iterable[int]) -> tuple[str, ...]:
    """Parts of the ids of a sweep over T."""
    return tuple(f"T{T}-C768-H12" for T in tokens)


def _attention(name: str, mode: str, tokens: Sequence[int], least: float) -> Claim:
    return Claim(f"attention {mode}, T = {name}", "attention", mode, of_tokens(tokens), least, SDPA)


def _step(
    name: str,
    shape: str,
    least: float,
    *peers: str,
    kind: str = "time",
    ours: tuple[str, ...] = ("swapped", "swapped+", "backend", "backend+"),
) -> Claim:
    return Claim(name, "vit", "train", (shape,), least, peers, kind, ours, "amp")


CLAIMS = (
    *(_attention("197, 257", mode, SHORT_T, 1.3) for mode in ("fwd", "bwd")),
    _attention("577..4097", "fwd", LONG_T, 1.0),
    _attention("577..2305", "bwd", LONG_T[:-1], 1.1),
    _attention("4097", "bwd", LONG_T[-1:], 1.0),
    *(
        Claim(f"{op} {mode}", op, mode, (OF_VIT_B,), least, kind="copy")
        for op in ("layer_norm", "rms_norm")
        for mode, least in (("fwd", 0.85), ("bwd", 0.75))
    ),
    Claim("mlp", "mlp", "both", (OF_VIT_B,), 1.15, (SEARCH,)),
    Claim("gated_mlp", "gated_mlp", "both", (PACKED,), 1.15, (SEARCH,)),
    Claim("rope + qk-norm", "rope", "both", (NORMED,), 1.3, ("compile", SEARCH)),
    Claim("patch_embed fwd", "patch_embed", "fwd", (OF_VIT_B,), 2.0, CONVOLUTIONS),
    _step("ViT-B step, eager", VIT_B, 1.7, BASELINE, ours=("swapped", "backend")),
    _step("ViT-B step, graphs", VIT_B, 1.7, EAGER_GRAPH, ours=GRAPHED),
    _step("ViT-B step, max-autotune", VIT_B, 1.2, SEARCH),
    _step("ViT-B step, matmul roof", VIT_B, 0.65, kind="matmul"),
    _step("ViT-Ti step", "timm-ViT-Ti-224-B512", 1.5, SEARCH),
    _step("ViT-S step", "timm-ViT-S-224-B256", 1.5, SEARCH),
    _step("DINOv3 ViT-B step", "timm:vit_base_patch16_dinov3-224-B128", 1.3, SEARCH),
    _step("peak memory", VIT_B, 0.8, BASELINE, kind="memory", ours=("swapped",)),
    _step("peak memory, low", VIT_B, 0.6, BASELINE, kind="memory", ours=("swapped-low",)),
    *(
        _step(name, shape, least, *UNSKIPPED, ours=("swapped-skip", "swapped-skip+"))
        for name, shape, least in (
            ("ViT-L drop_path 0.4", VIT_L, 1.15),
            ("ViT-L drop_path 0.4, uniform", f"{VIT_L}-uniform", 1.5),
        )
    ),
)


def has_goals(row: Row) -> bool:
    return not row.gpu or any(name in row.gpu for name in GPUS)


def _is(provider: str, names: Iterable[str]) -> bool:
    return any(provider == n or (n[-1] in "-+" and provider.startswith(n)) for n in names)


@dataclass(frozen=True)
class Verdict:
    """What the rows say of one claim in its worst case. `ratio` is what `least` is held against."""

    claim: Claim
    shape: str = ""
    ours: Row | None = None
    peer: Row | None = None
    ratio: float | None = None
    open: str = ""  # why there is no ratio

    @property
    def met(self) -> bool:
        over = math.nan if self.ratio is None else self.ratio - self.claim.least
        return over <= 0 if self.claim.kind == "memory" else over >= 0

    @property
    def word(self) -> str:
        if self.ratio is None or self.ours is None:
            return self.open
        return "no goal" if not has_goals(self.ours) else "met" if self.met else "MISSED"


def _roof(rows: Sequence[Row], kind: str) -> float | None:
    """GB/s of the copy, TFLOP/s of the matmul that runs for long."""
    mode, dtype = (COPY, "uint8") if kind == "copy" else (SETTLED, "bf16")
    found = (r for r in rows if (r.op, r.mode, r.dtype, r.status) == (ROOF, mode, dtype, OK))
    return next((r.gbps if kind == "copy" else r.tflops for r in found), None)


def _of_case(claim: Claim, shape: str, own: Sequence[Row], roof: float | None) -> Verdict:
    mine, kind = [r for r in own if _is(r.provider, claim.ours)], claim.kind
    # A peer that breaks the 2x rule is still what ours is measured against.
    peers = (r for r in own if _is(r.provider, claim.peers) and r.status in (OK, FAILED))
    field = "peak_mib" if kind == "memory" else "device_ms"
    ours, peer = least((r for r in mine if r.status == OK), field), least(peers, field)
    if ours is None:
        why = next((f"{r.status}: {r.note}" for r in mine if r.status != OK), "not measured")
        return Verdict(claim, shape, peer=peer, open=why)
    if kind in ("copy", "matmul"):
        rate = ours.gbps if kind == "copy" else ours.tflops
        ratio = None if roof is None or rate is None else rate / roof
        return Verdict(claim, shape, ours, None, ratio, "no roof measured")
    if peer is None:
        return Verdict(claim, shape, ours, open="no peer measured")
    if kind == "memory":
        return Verdict(claim, shape, ours, peer, (ours.peak_mib or 0) / (peer.peak_mib or 1))
    times = ours.like_times(peer)
    return Verdict(claim, shape, ours, peer, times[1] / times[0] if times else None, "no time")


def verdict(claim: Claim, rows: Sequence[Row]) -> Verdict:
    """Of the case in which a claim is furthest from what it wants; of an open one, if there is."""
    own = [r for r in rows if claim.has(r)]
    if not own:
        return Verdict(claim, open="not measured")
    roof = _roof(rows, claim.kind)
    cases = list(dict.fromkeys(r.shape for r in own))
    found = [_of_case(claim, c, [r for r in own if r.shape == c], roof) for c in cases]
    known = [v for v in found if v.ratio is not None]
    wrong = [v for v in found if v.ratio is None and v.ours is None and v.open != "not measured"]
    if wrong or not known:
        return (wrong or found)[0]
    worst = max if claim.kind == "memory" else min
    return worst(known, key=lambda v: v.ratio or 0.0)


CLAIM_HEADER = ("target", "wanted", "ours", "best peer", "ratio", "of roof", "verdict")


def _measured(row: Row | None, kind: str) -> str:
    """Time or memory, and whose; `*`: it breaks the 2x rule."""
    if row is None:
        return "-"
    value = f"{row.peak_mib:,.0f} MiB" if kind == "memory" else f"{row.device_ms:.4g} ms"
    return f"{value} {row.provider}{'*' * (row.status == FAILED)}"


def claim_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table that ends a run and is on the page, below CLAIM_HEADER: a line for each claim."""
    found, sustained = [], _roof(rows, "matmul")
    for claim in CLAIMS:
        v = verdict(claim, rows)
        share, roof = (v.ours.roof_share, v.ours.roof) if v.ours else (None, "")
        if v.ours and claim.op == "vit":  # a step is held against what the GPU sustains
            share, roof = (v.ours.tflops or 0.0) / (sustained or math.inf), "matmul"
        where = re.search(r"(?<=-)T\d+", v.shape) if len(claim.shapes) > 1 else None
        of_roof = claim.kind in ("copy", "matmul")
        found.append(
            (
                claim.name + (f" ({where[0]})" if where else ""),
                f"{100 * claim.least:.0f} % {claim.kind}" if of_roof else f"{claim.least:g}x",
                _measured(v.ours, claim.kind),
                _measured(v.peer, claim.kind) if claim.peers else "roof",
                "" if v.ratio is None else f"{v.ratio:.2f}",
                f"{100 * share:.0f} % {roof}" if share else "",
                v.word,
            )
        )
    return found


def claim_table(rows: Sequence[Row]) -> str:
    return aligned([CLAIM_HEADER, *claim_lines(rows)])


# --- what the goals need: every peer in the same turns as ours, most telling first. Seconds are
# guesses for 16 cores; the compiler's search is for about 18 products of 20 configs a model.

DINOV3 = "timm:vit_base_patch16_dinov3"
GRAPHS = ("swapped", "swapped+graph")
SKIPS = (*GRAPHS, "swapped-skip", "swapped-skip+graph")
PLAIN = (BASELINE, EAGER_GRAPH, *GRAPHS, "compile", "backend", "backend+graphs")


def op_target(
    op: Op, shape: Shape, modes: tuple[str, ...], compiles: bool = False, searches: bool = False
) -> Task:
    """An op in bf16.

    compiles: whether torch.compile is among the peers. searches: max-autotune, whose row is the
    only new one: the others are measured again in its turns.
    """

    providers = [
        p
        for p in op.providers(shape, "bf16")
        if p.installed and (searches if p.name == SEARCH else compiles or not p.compiled)
    ]
    new = [p for p in providers if not searches or p.name == SEARCH]
    beside = [p.name for p in providers if p not in new]

    return Task(
        0,
        90.0 if searches else 25.0 if compiles else 12.0,
        f"{op.name} {shape.id} {'+'.join(modes)}{' max-autotune' if searches else ''}",
        _keys(op, shape, "bf16", modes, new),
        lambda names, bench: measure_op(op, shape, "bf16", modes, (*names, *beside), bench),
        True,
    )


def vit_target(
    case: Case, ways: Sequence[str], beside: Sequence[str] = (), seconds: float = 240.0
) -> Task:
    """A model in some ways; those `beside` are measured again, in the turns of the others."""
    return Task(
        0,
        seconds,
        f"{case.id} {'+'.join(ways)}",
        _vit_keys(case, ways),
        lambda names, bench: models.measure_vit(case, (*names, *beside), bench),
        True,
    )


def targets(parts: Sequence[str] = ()) -> list[Task]:
    """In the order in which they are measured, without what is not there; of `parts`, those whose
    title has one. Each takes little, so that a hang costs little."""
    both, tokens = ("fwd", "bwd"), SHORT_T + LONG_T

    def of(op: str, part: str = OF_VIT_B, modes: tuple[str, ...] = both, **options: bool) -> Task:
        return op_target(OPS[op], shape_of(op, part), modes, **options)

    def compiled(**options: bool) -> list[Task]:
        pairs = (("mlp", OF_VIT_B), ("gated_mlp", PACKED), ("rope", NORMED))
        return [of(op, part, ("both",), compiles=True, **options) for op, part in pairs]

    def vit(case: Case, ways: tuple[str, ...], *more: Any) -> list[Task]:
        return [vit_target(case, ways, *more)] if _has_timm(Wanted()) else []

    parts_of = dict(zip(tokens, of_tokens(tokens), strict=True))
    attention = {T: of("attention", part) for T, part in parts_of.items()}
    base = Case("B", 224, 256)
    skips = replace(base, model="L", batch=64, drop_path=0.4)
    every = (BASELINE, *GRAPHS, SEARCH)
    uniform, norms = replace(skips, uniform=True), [of("layer_norm"), of("rms_norm")]
    found = [
        # as a lent GPU's minutes are best spent: the new backward, whole models, the rest
        *(attention.pop(T) for T in (577, 1025, 2305, 4097)),
        *vit(base, PLAIN, (), 60.0),
        *vit(skips, SKIPS, (), 60.0),
        *vit(uniform, SKIPS, (), 60.0),
        *attention.values(),
        *norms,
        *vit(base, ("swapped-low",), ("swapped",), 25.0),
        *compiled(),
        of("patch_embed", modes=("fwd",)),
        # These turns are the last of eager and ours: all goals' ratios are of them.
        *vit(base, (SEARCH,), (*PLAIN[1:4], "backend", "backend+graphs")),
        *compiled(searches=True),
        *vit(Case(DINOV3, 224, 128), every),
        *vit(replace(base, model="S"), every),
        *vit(replace(base, model="Ti", batch=512), every),
    ]
    return [task for task in found if not parts or any(part in task.title for part in parts)]
