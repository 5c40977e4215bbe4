"""Words, tables and pictures from rows: what ends a run, summary.md, the pages.

Pictures are drawn from the CSV alone, none without rows: attention.png ours over the best SDPA,
vit.png speed over eager.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import plan
from bench.ops import BASELINE, OPS, SEARCH
from bench.rows import (
    FAILED,
    OK,
    RESULTS,
    ROOF,
    Results,
    Row,
    by_case,
    conditions,
    least,
    read_rows,
)
from fastvit_kernels.commands.console import CommandError, aligned, require
from fastvit_kernels.runtime.files import write_atomically, write_text

SUMMARY = "summary.md"
START, END = "<!-- results -->", "<!-- /results -->"  # generated between these
ROOT = Path(__file__).parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
COMMITTED = ROOT / "bench" / "results"
GIB = 1024.0  # MiB
MOST_LINES = 30  # of the table that ends a run
MOST_CASES = 8  # of a panel of bars, so that their names have room

# --- tables


def number(value: float | None, form: str = ".4g") -> str:
    return "" if value is None else format(value, form)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    rows = [header, ["---"] * len(header), *lines]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows] + [""]


HEADER = (
    "case",
    "eager, ms",
    "best peer, ms",
    "best of ours, ms",
    "of roof",
    "peak MiB",
    "speed-up",
    "",
)


def case_lines(rows: Iterable[Row]) -> list[list[str]]:
    """Of each case: eager, the best other provider, the best of ours with its share of the roof,
    memory and speed-up, and who FAILED. All else is in the CSV."""

    def ms(row: Row | None) -> str:
        return "" if row is None else f"{number(row.device_ms)} {row.provider}"

    lines = []
    measured = (r for r in rows if r.op in (*OPS, "vit") and (r.ms or r.status == FAILED))
    for key, found in by_case(measured).items():
        eager = next((r for r in found if r.provider == BASELINE), None)
        peer = least(r for r in found if not r.is_ours and r.provider != BASELINE)
        best = least(r for r in found if r.is_ours and r.status == OK)
        failed = ", ".join(r.provider for r in found if r.status == FAILED)
        line = [" ".join(key), ms(eager).partition(" ")[0], ms(peer), ms(best), "", "", ""]
        if best is not None:
            share = "" if best.roof_share is None else f"{100 * best.roof_share:.0f}% {best.roof}"
            line[4:] = [share, number(best.peak_mib, ",.0f"), number(best.speedup, ".2f")]
        lines.append([*line, failed and f"FAILED: {failed}"])
    return lines


def _other_lines(rows: Iterable[Row]) -> Iterator[list[str]]:
    """Roofs and stages of a step."""
    for r in (r for r in rows if r.op == ROOF):
        rates = ((r.ms, "ms"), (r.tflops, "TFLOP/s"), (r.gbps, "GB/s"))
        said = ", ".join(f"{number(x)} {unit}" for x, unit in rates if x is not None)
        yield [r.op, r.shape, r.dtype, r.mode, r.provider, said or f"{r.status}: {r.note}"]


def tables(rows: Sequence[Row], level: str = "##") -> list[str]:
    other = ("what", "shape", "dtype", "mode", "provider", "")
    found = [
        ("Cases", HEADER, case_lines(rows)),
        ("Also", other, [*_other_lines(rows)]),
    ]
    parts = ([f"{level} {t}", "", *markdown(head, lines)] for t, head, lines in found if lines)
    return [line for part in parts for line in part]


def summary(rows: Sequence[Row], said: Sequence[str] = ()) -> str:
    head = ["# Benchmark", "", conditions(rows) + ".", "", *(f"- {x}" for x in said), ""]
    return "\n".join([*head, *tables(rows)])


def finish(results: Results, said: Sequence[str], command: str) -> None:
    rows, folder = list(results.rows.values()), results.folder
    if command == "targets":  # no pictures: `plot` draws them when time is not short
        write_text(folder / SUMMARY, summary(rows, said))
        print(plan.claim_table(rows))
        return
    run_plot(rows, folder, said)
    if lines := case_lines(rows)[:MOST_LINES]:
        print(aligned([HEADER, *lines]))
    print(f"{conditions(rows)}\n{folder}: {len(rows)} rows")


# --- pages: docs/benchmarks.md and README.md by hand, but for what stands between START and END

Result = tuple[str, Sequence[Row]]  # name of a folder, its rows


def _on_gpu(rows: Iterable[Row]) -> bool:
    return any(not r.gpu.startswith("no GPU") for r in rows)


def _pictures(folder: Path, name: str, up: str) -> list[str]:
    """The pictures next to a CSV, as a page links them; `up` leads from the page to the root."""
    found = [p for p in PICTURES if (folder / name / f"{p}.png").exists()]
    links = (f"![{p} of {name}]({up}bench/results/{name}/{p}.png)" for p in found)
    return [line for link in links for line in (link, "")]


TARGETS = (
    "For an H100 or H200, bf16, measured in turns; of several cases the worst. Attention is held "
    "against\nthe best forced SDPA backend, qkv packed or not, and FA3, FA4 and flex FLASH if "
    "installed; MLPs, Ti, S\nand DINOv3 against max-autotune; skipped samples against the same "
    "without skipping. ViT-B trains by 256\nimages, fp32 parameters under bf16 autocast; its roof "
    "is the sustained matmul's."
)
PEER_HEADER = ("work", "ours", "each peer", "not yet measured")


def peer_lines(rows: Sequence[Row]) -> list[list[str]]:
    """Of each claim's cases ours next to every peer, and which peers have no row yet."""
    found, above = [], None
    for claim in (c for c in plan.CLAIMS if c.kind == "time"):
        for part in claim.shapes:
            own = [r for r in rows if replace(claim, shapes=(part,)).has(r)]
            good = [r for r in own if r.status in (OK, FAILED) and r.ms]
            ours = least(r for r in good if plan._is(r.provider, claim.ours) and r.status == OK)
            peers = [r for r in good if plan._is(r.provider, claim.peers)]
            names = {r.provider for r in peers}
            missing = [p for p in claim.peers if p[-1] not in "-+" and p not in names]
            told = [_against(r, ours) for r in sorted(peers, key=lambda r: r.device_ms or 0.0)]
            T = re.search(r"T\d+", part) if len(claim.shapes) > 1 else None
            work = claim.name.partition(", T = ")[0] + f", T = {T[0][1:]}" if T else claim.name
            mine = f"{number(ours.device_ms)} ms {ours.provider}" if ours else "not yet measured"
            same = missing == above and len(missing) > 1
            found.append([work, mine, "; ".join(told), "the same" if same else ", ".join(missing)])
            above = missing
    return found


def _against(peer: Row, ours: Row | None) -> str:
    """Like with like: graph with graph, or call with call."""
    times = ours.like_times(peer) if ours else None
    ratio = f" ({times[1] / times[0]:.2f}x)" if times else ""
    broken = "*" * (peer.status == FAILED)
    return f"{peer.provider}{broken} {number(peer.device_ms)}{ratio}"


def docs(results: Sequence[Result], committed: Path = COMMITTED) -> str:
    """Ours next to each peer, the targets, then all cases of each GPU."""
    shown = [(name, rows) for name, rows in results if _on_gpu(rows)]
    measured = [r for _, rows in shown for r in rows if plan.has_goals(r)]
    text = [
        "### Ours next to each peer",
        "",
        "Times in ms on an H100 or H200, bf16; in brackets theirs over ours:",
        "",
    ]
    text += markdown(PEER_HEADER, peer_lines(measured))
    text += ["### Targets", "", TARGETS, ""]
    text += markdown(plan.CLAIM_HEADER, plan.claim_lines(measured))
    for name, rows in shown:
        text += [f"### {name}", "", conditions(rows) + ".", ""]
        text += [*_pictures(committed, name, "../"), *tables(rows, "####")]
    return "\n".join(text).strip()


OURS = {"swapped": "ours, `fk.swap_in`", "backend": 'ours, `backend="fastvit_kernels"`'}


def readme(results: Sequence[Result], committed: Path = COMMITTED) -> str:
    """A training step in three figures, and one picture."""
    shown = []
    for name, rows in results:
        steps = [r for r in rows if r.op == "vit" and r.shape == plan.VIT_B and r.status == OK]
        steps = [r for r in steps if r.mode == "train" and r.dtype == "amp"]
        ours = least(r for r in steps if r.is_ours and r.peak_mib)
        columns = {r.provider: r for r in steps if r.provider in (BASELINE, "compile")}
        if ours is None or BASELINE not in columns or not _on_gpu(rows):
            continue
        kinds = {**columns, OURS.get(ours.provider, "ours"): ours}
        figures = [
            ["images/s", *(number(r.images_per_s, ",.0f") for r in kinds.values())],
            ["peak memory, GiB", *(number((r.peak_mib or 0) / GIB, ".1f") for r in kinds.values())],
        ]
        said = (
            f"ViT-B/16, 224 x 224, batch 256, a training step in bf16 autocast on one {ours.gpu}:"
        )
        shown += [said, "", *markdown(["", *kinds], figures)]
        shown += _pictures(committed, name, "")[:2]
    return "\n".join(shown).strip()


def write_docs(path: Path = DOCS, committed: Path = COMMITTED, front: Path = README) -> int:
    """Fill docs/benchmarks.md and README.md anew from the committed results."""
    found = [(p.parent.name, read_rows(p)) for p in sorted(committed.glob(f"*/{RESULTS}"))]
    for page, text in ((path, docs(found, committed)), (front, readme(found, committed))):
        before, rest = page.read_text(encoding="utf-8").split(START, 1)
        write_text(page, f"{before}{START}\n{text}\n{END}{rest.split(END, 1)[1]}")
    return 0


# --- pictures, as wide as a page

# Okabe and Ito's colours, which a colour-blind reader tells apart.
COLORS = {
    BASELINE: "#666666",
    "compile": "#E69F00",
    SEARCH: "#D55E00",
    "best peer": "#009E73",
    "ours": "#0072B2",
    "swapped": "#0072B2",
    "swapped+graph": "#56B4E9",
    "swapped+compile": "#CC79A7",
    "backend": "#8C564B",
    "backend+graphs": "#17BECF",
    "eager+graph": "#AAAAAA",
    "swapped-low": "#009E73",
    "swapped-skip": "#F0E442",
    "swapped-skip+graph": "#000000",
}
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
WIDTH, DPI = 9.0, 110  # inches; 990 pixels

MODES = {"fwd": "forward", "bwd": "backward"}


def _figure(height: float, title: str, rows: Sequence[Row]) -> Any:
    figures = require("matplotlib.figure", "matplotlib")
    figure = figures.Figure((WIDTH, height), layout="constrained")
    figure.suptitle(title, fontsize=12)
    lines = textwrap.wrap(conditions(rows), int(WIDTH * 17))
    figure.supxlabel("\n".join(lines), fontsize=7, color="#666666")
    return figure


def _save(figure: Any, path: Path) -> Path:
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=DPI))
    return path


def _measured(rows: Iterable[Row]) -> list[Row]:
    """Those that broke the 2x rule too: drawn hollow, so that no competitor vanishes."""
    return [r for r in rows if r.status in (OK, FAILED) and r.ms]


def over_best_sdpa(rows: Sequence[Row], mode: str) -> dict[int, dict[int, float]]:
    """The best SDPA's time over ours, by head dim and T, in bf16."""
    cases = by_case(r for r in _measured(rows) if r.op == "attention" and r.dtype == "bf16")
    found: dict[int, dict[int, float]] = {}
    for (_, shape, _, of_mode), own in cases.items():
        ours = least(r for r in own if r.is_ours and r.status == OK)
        peer = least(r for r in own if r.provider in plan.SDPA)
        if of_mode == mode and ours and peer and (times := peer.like_times(ours)):
            C, H = map(int, re.findall(r"-C(\d+)-H(\d+)", shape)[0])
            found.setdefault(C // H, {})[ours.T] = times[0] / times[1]
    return found


def draw_attention(rows: Sequence[Row], path: Path) -> Path | None:
    """Speed over the best SDPA backend over T, a line a head dim, forward and backward."""
    panels = {mode: over_best_sdpa(rows, mode) for mode in ("fwd", "bwd")}
    if not any(panels.values()):
        return None
    shown = [r for r in _measured(rows) if r.op == "attention"]
    figure = _figure(4.2, "Our attention beside the best SDPA backend, bf16", shown)
    dims = sorted({D for lines in panels.values() for D in lines})
    tints, drawn = dict(zip(dims, itertools.cycle(CYCLE))), {}
    both = figure.subplots(1, 2, sharey=True)
    for axes, (mode, lines) in zip(both, panels.items(), strict=True):
        for D, points in sorted(lines.items()):
            T, ratio = zip(*sorted(points.items()), strict=True)
            name = f"ours, head dim {D}"
            (drawn[D],) = axes.plot(T, ratio, marker="o", ms=4, color=tints[D], label=name)
        peer = axes.axhline(1, color="black", lw=0.8, label="best SDPA backend")
        axes.set(title=f"{MODES[mode]}: higher is better", xlabel="tokens of an image")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.grid(alpha=0.3)
    both[0].set(ylabel="speed, in multiples of the best SDPA's")
    both[0].set_ylim(0)
    figure.legend(handles=[*(drawn[D] for D in dims), peer], loc="outside right center", fontsize=9)
    return _save(figure, path)


def _most_compared(rows: Iterable[Row]) -> list[Row]:
    """Those of the cases that most providers have measured, in the order of measurement."""
    cases = by_case(rows)
    kept = sorted(cases, key=lambda case: -len(cases[case]))[:MOST_CASES]
    return [row for case, own in cases.items() if case in kept for row in own]


# What is drawn of whole models: a field of `_steps`, its unit, a title, the form of a figure.
PANELS = (
    ("speed", "eager's time / this one's", "Speed over eager: more is better", "%.2f"),
    ("peak", "GiB", "Peak memory of a training step: less is better", "%.1f"),
    ("kept", "GiB", "Kept for the backward: less is better", "%.1f"),
)


def _steps(rows: Sequence[Row]) -> Any:
    """A frame of whole models: case, provider, PANELS' fields, whether it FAILED."""
    pandas, found = require("pandas", "pandas"), []
    for own in by_case(rows).values():
        eager = next((r for r in own if r.provider == BASELINE), None)
        for r in own:
            case = r.shape.replace(":", ":\n").replace("-ViT", "\nViT") + f"\n{r.dtype} {r.mode}"
            times = r.like_times(eager) if eager else None
            speed = times[1] / times[0] if times else None
            mib = (r.peak_mib, r.kept_mib) if r.mode == "train" else (None, None)
            gib = (None if x is None else x / GIB for x in mib)
            found.append((case, r.provider, speed, *gib, r.status == FAILED))
    return pandas.DataFrame(found, columns=["case", "provider", "speed", "peak", "kept", "failed"])


def _bars(axes: Any, steps: Any, field: str, unit: str, title: str, form: str) -> None:
    """Grouped by case; of who FAILED hollow."""
    steps = steps.dropna(subset=field)
    own = [p for p in COLORS if p in set(steps.provider)]
    own += [p for p in steps.provider.unique() if p not in COLORS]
    wide, failed = (
        steps.pivot(index="case", columns="provider", values=name).loc[steps.case.unique(), own]
        for name in (field, "failed")
    )
    tints = [COLORS.get(p, "#AAAAAA") for p in own]
    width = min(0.2 * len(own), 0.8)
    wide.plot.bar(ax=axes, rot=0, fontsize=8, width=width, color=tints, title=title)
    for bars, provider, tint in zip(axes.containers, own, tints, strict=True):
        for bar, hollow in zip(bars, failed[provider], strict=True):
            if hollow is True:
                bar.set(facecolor="none", edgecolor=tint, hatch="//")
        # pandas draws what was not measured as a bar of 0
        labels = ["" if value != value else form % value for value in wide[provider]]
        axes.bar_label(bars, labels, fontsize=8, rotation=90, padding=2)
    axes.set(xlabel="", ylabel=unit, xlim=(-0.6, max(len(wide), MOST_CASES // 2) - 0.4))
    axes.margins(y=0.45)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", ncols=5)


def draw_vit(rows: Sequence[Row], path: Path) -> Path | None:
    """Panels of bars below each other, of those fields that any row has."""
    kept = _most_compared(r for r in _measured(rows) if r.op == "vit")
    if not kept:
        return None
    steps = _steps(kept)
    shown = [panel for panel in PANELS if steps[panel[0]].notna().any()]
    figure = _figure(3.6 * len(shown) + 0.4, "Whole models, one GPU", kept)
    for (axes,), panel in zip(figure.subplots(len(shown), 1, squeeze=False), shown, strict=True):
        _bars(axes, steps, *panel)
    return _save(figure, path)


PICTURES = {
    "attention": draw_attention,
    "vit": draw_vit,
}


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    drawn = (draw(rows, folder / f"{name}.png") for name, draw in PICTURES.items())
    return [path for path in drawn if path is not None]


def run_plot(rows: Sequence[Row], folder: Path, said: Sequence[str] = ()) -> int:
    folder = folder if folder.is_dir() else folder.parent
    write_text(folder / SUMMARY, summary(rows, said))
    try:
        drawn = draw_all(rows, folder)
    except CommandError as error:
        print(f"no pictures: {error}")
    else:
        print("drawn: " + (", ".join(map(str, drawn)) or "nothing: too few rows"))
    return 0
