"""The goals of this project, once: which rows decide each, whether it is met, and what to measure.

`python -m bench targets` measures these rows; docs/benchmarks.md, the README and the table that
ends a run are made of `GOALS`. The goals are for an H100 or H200, in bf16; of another GPU a table
has the ratios alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.measure import COPY, SETTLED
from bench.models import EAGER_GRAPH, missing_option
from bench.ops import BASELINE, SEARCH, has_part
from bench.rows import FAILED, OK, ROOF, Row, fastest
from fastvit_kernels.commands.console import aligned

GPUS = ("H100", "H200")  # that the goals are for
SDPA = (
    "sdpa-flash", "sdpa-cudnn", "sdpa-flash-unpacked", "sdpa-cudnn-unpacked", "sdpa-efficient",
    "flash_attn", "flash_attn_3", "flash_attn_4",
)  # fmt: skip
VIT_B = "timm-ViT-B-224-B256"
OF_VIT_B = "ViT-B-B128-T197-C768-H12"
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
        """Whether a row belongs to one of its cases."""
        return (row.op, row.dtype, row.mode) == (self.op, self.dtype, self.mode) and any(
            has_part(row.shape, part) for part in self.shapes
        )


@dataclass(frozen=True)
class Goal:
    """A row of the table of goals; `least` in words, what decides it in `claims`."""

    work: str
    against: str
    least: str
    claims: tuple[Claim, ...]


def of_tokens(tokens: Iterable[int]) -> tuple[str, ...]:
    """Parts of the ids of a sweep over T."""
    return tuple(f"T{T}-C768-H12" for T in tokens)


def _attention(name: str, tokens: Sequence[int], least: float) -> tuple[Claim, ...]:
    shapes = of_tokens(tokens)
    return tuple(
        Claim(f"attention {mode}, T = {name}", "attention", mode, shapes, least, SDPA)
        for mode in ("fwd", "bwd")
    )


def _step(
    name: str, shape: str, least: float, *peers: str, kind: str = "time",
    ours: tuple[str, ...] = ("swapped", "swapped+"),
) -> Claim:  # fmt: skip
    return Claim(name, "vit", "train", (shape,), least, peers, kind, ours, "amp")


GOALS = (
    Goal(
        "attention forward and backward, D = 64, T = 197 and 257",
        "best forced SDPA backend (cuDNN, flash; qkv packed or not), FA3 and FA4 if installed",
        "1.3x", _attention("197, 257", SHORT_T, 1.3),
    ),
    Goal("the same, T = 577 to 4097", "the same", "1.0x", _attention("577..4097", LONG_T, 1.0)),
    Goal(
        "layer_norm and rms_norm, forward / backward", "copy roof", "85 % / 75 %",
        tuple(
            Claim(f"{op} {mode}", op, mode, (OF_VIT_B,), least, kind="copy")
            for op in ("layer_norm", "rms_norm") for mode, least in (("fwd", 0.85), ("bwd", 0.75))
        ),
    ),
    Goal(
        "MLP forward + backward, exact GELU; SwiGLU", "torch.compile max-autotune", "1.15x",
        (Claim("mlp", "mlp", "both", (OF_VIT_B,), 1.15, (SEARCH,)),
         Claim("gated_mlp", "gated_mlp", "both", (PACKED,), 1.15, (SEARCH,))),
    ),
    Goal(
        "rope + qk-norm forward + backward", "torch.compile", "1.3x",
        (Claim("rope + qk-norm", "rope", "both", (NORMED,), 1.3, ("compile", SEARCH)),),
    ),
    Goal(
        "patch_embed forward", "conv2d (cudnn.benchmark) + cat + add", "2x",
        (Claim("patch_embed fwd", "patch_embed", "fwd", (OF_VIT_B,), 2.0,
               (BASELINE, "eager, cudnn.benchmark")),),
    ),
    Goal(
        "ViT-B/16 224 training step, fp32 parameters, bf16 autocast, batch 256",
        "eager, both as they are or both as graphs / max-autotune / sustained matmul roof",
        "1.6x / 1.2x / 60 %",
        (_step("ViT-B step, eager", VIT_B, 1.6, BASELINE, ours=("swapped",)),
         _step("ViT-B step, graphs", VIT_B, 1.6, EAGER_GRAPH, ours=("swapped+graph",)),
         _step("ViT-B step, max-autotune", VIT_B, 1.2, SEARCH),
         _step("ViT-B step, matmul roof", VIT_B, 0.6, kind="matmul")),
    ),
    Goal(
        "ViT-Ti/16, S/16 training step; DINOv3 ViT-B", "max-autotune", "1.5x; 1.3x",
        (_step("ViT-Ti step", "timm-ViT-Ti-224-B512", 1.5, SEARCH),
         _step("ViT-S step", "timm-ViT-S-224-B256", 1.5, SEARCH),
         _step("DINOv3 ViT-B step", "timm:vit_base_patch16_dinov3-224-B128", 1.3, SEARCH)),
    ),
    Goal(
        'peak memory of ViT-B, batch 256: default; memory="low"', "eager", "0.8x; 0.6x",
        (_step("peak memory", VIT_B, 0.8, BASELINE, kind="memory", ours=("swapped",)),
         _step("peak memory, low", VIT_B, 0.6, BASELINE, kind="memory", ours=("swapped-low",))),
    ),
    Goal(
        "ViT-L training step with drop_path 0.4, skipped", "the same without skipping", "1.3x",
        (_step("ViT-L drop_path 0.4", "timm-ViT-L-224-B64-drop0.4", 1.3, "swapped",
               ours=("swapped-skip",)),),
    ),
)  # fmt: skip


def has_goals(row: Row) -> bool:
    """Whether the goals are for the GPU of a row."""
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


def _best(rows: Iterable[Row], kind: str) -> Row | None:
    """The fastest, or of what is measured the smallest."""
    if kind != "memory":
        return fastest(rows)
    return min((r for r in rows if r.peak_mib), key=lambda r: r.peak_mib or 0, default=None)


def _roof(rows: Sequence[Row], kind: str) -> float | None:
    """GB/s of the copy, TFLOP/s of the matmul that runs for long."""
    mode, dtype = (COPY, "uint8") if kind == "copy" else (SETTLED, "bf16")
    found = (r for r in rows if (r.op, r.mode, r.dtype, r.status) == (ROOF, mode, dtype, OK))
    return next((r.gbps if kind == "copy" else r.tflops for r in found), None)


def _of_case(claim: Claim, shape: str, own: Sequence[Row], roof: float | None) -> Verdict:
    mine, kind = [r for r in own if _is(r.provider, claim.ours)], claim.kind
    # A peer that breaks the 2x rule is still what ours is measured against.
    peers = (r for r in own if _is(r.provider, claim.peers) and r.status in (OK, FAILED))
    ours, peer = _best((r for r in mine if r.status == OK), kind), _best(peers, kind)
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
        return Verdict(claim, open=absent(claim) or "not measured")
    roof = _roof(rows, claim.kind)
    cases = list(dict.fromkeys(r.shape for r in own))
    found = [_of_case(claim, c, [r for r in own if r.shape == c], roof) for c in cases]
    known = [v for v in found if v.ratio is not None]
    wrong = [v for v in found if v.ratio is None and v.ours is None and v.open != "not measured"]
    if wrong or not known:
        return (wrong or found)[0]
    worst = max if claim.kind == "memory" else min
    return worst(known, key=lambda v: v.ratio or 0.0)


def absent(claim: Claim) -> str:
    """Why a claim cannot have rows here; nothing if it can."""
    return next(filter(None, map(missing_option, claim.ours)), "")


HEADER = ("target", "wanted", "ours", "best peer", "ratio", "of roof", "verdict")


def _measured(row: Row | None, kind: str) -> str:
    """Time or memory, and whose; `*`: it breaks the 2x rule."""
    if row is None:
        return "-"
    value = f"{row.peak_mib:,.0f} MiB" if kind == "memory" else f"{row.device_ms:.4g} ms"
    return f"{value} {row.provider}{'*' * (row.status == FAILED)}"


def lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The table that ends a run, below HEADER: a line for each claim."""
    found, sustained = [], _roof(rows, "matmul")
    for claim in (claim for goal in GOALS for claim in goal.claims):
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
                f"{100 * share:.0f} % {roof}" if share else "", v.word,
            )
        )  # fmt: skip
    return found


def table(rows: Sequence[Row]) -> str:
    return aligned([HEADER, *lines(rows)])


def goal_lines(rows: Sequence[Row]) -> list[list[str]]:
    """The table of goals for a page: work, against, at least, measured."""
    found = []
    for goal in GOALS:
        verdicts = [verdict(claim, rows) for claim in goal.claims]
        ratios = ("" if v.ratio is None else f"{v.ratio:.2f} " for v in verdicts)
        cells = [f"{v.claim.name}: {r}{v.word}" for v, r in zip(verdicts, ratios, strict=True)]
        measured = "not yet" if all(v.ours is None for v in verdicts) else "; ".join(cells)
        found.append([goal.work, goal.against, goal.least, measured])
    return found
