"""The pictures of a run, drawn from its CSV alone; none has a panel without rows.

targets.png what was wanted and reached, ops.png, vit.png, roofline.png, profile.png.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import targets
from bench.bench_profile import STAGES
from bench.plan import OPS
from bench.providers import BASELINE
from bench.rows import FAILED, OK, Row, conditions
from bench.timer import Roofs
from fastvit_kernels.commands.console import require
from fastvit_kernels.commands.training.checkpoint import write_atomically

COLORS = {
    "eager": "#555555", "compile": "#e08214", "compile-max-autotune": "#b35806",
    "sdpa-flash": "#66a61e", "sdpa-cudnn": "#1b7837", "sdpa-efficient": "#a6d96a",
    "sdpa-math": "#bdbdbd", "flash_attn": "#7b3294", "xformers": "#c2a5cf",
    "flash_attn_3": "#9970ab", "flash_attn_4": "#762a83", "eager, cudnn.benchmark": "#969696",
    "liger_kernel": "#d6604d", "quack": "#f4a582", "ours": "#08519c", "ours-split": "#4292c6",
    "ours-library": "#6baed6", "ours-triton": "#2171b5", "ours-stored": "#9ecae1",
    "ours-parts": "#4292c6",
    "swapped": "#08519c", "swapped+graph": "#4292c6", "swapped+compile": "#9ecae1",
    "swapped-low": "#3690c0", "swapped-skip": "#67a9cf",
}  # fmt: skip
MARKERS: dict[str, str] = dict(zip(OPS, itertools.cycle("osD^vPX*<>")))
GIB = 1024.0  # MiB
BASE_C = 768  # curves over T are of this width
MOST_CASES = 8  # of a panel of bars, so that their names have room


def color(provider: str) -> str:
    return COLORS.get(provider, "#000000")


def _figure(width: float, height: float, title: str, rows: Sequence[Row]) -> Any:
    figure = require("matplotlib.figure", "matplotlib").Figure(
        (width, height), layout="constrained"
    )
    lines = textwrap.wrap(conditions(rows), int(width * 13))
    figure.suptitle(title + "\n" + "\n".join(lines), fontsize=10)
    return figure


def _save(figure: Any, path: Path) -> Path:
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))
    return path


def _good(rows: Iterable[Row]) -> list[Row]:
    return [r for r in rows if r.status == OK and r.ms]


def _measured(rows: Iterable[Row]) -> list[Row]:
    """Those that broke the 2x rule too: drawn hollow, so that no competitor vanishes."""
    return [r for r in rows if r.status in (OK, FAILED) and r.ms]


def _by_provider(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Providers in the order of COLORS, each with its rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.provider, []).append(row)
    order = list(COLORS)
    return dict(
        sorted(found.items(), key=lambda p: order.index(p[0]) if p[0] in order else len(order))
    )


def _legend(axes: Any, handles: Sequence[Any] = ()) -> None:
    """Above what is drawn."""
    found = handles or axes.get_legend_handles_labels()[0]
    if found:
        axes.legend(handles=found, fontsize=7, loc="upper center", ncols=4)


def _main_dtype(rows: Sequence[Row], op: str) -> str:
    found = [r.dtype for r in rows if r.op == op]
    return next((d for d in ("bf16", "amp", "fp16") if d in found), found[0])


def _curve(axes: Any, rows: list[Row], value: Callable[[Row], float | None]) -> None:
    for provider, own in _by_provider(rows).items():
        mine = provider.startswith("ours")
        found = {r.T: value(r) for r in own if r.status == FAILED and value(r) is not None}
        if found:
            axes.plot(
                *zip(*sorted(found.items()), strict=True), marker="o", ms=6, ls="", mfc="none",
                color=color(provider), label=f"{provider}, FAILED",
            )  # fmt: skip
        found = {r.T: value(r) for r in own if r.status == OK and value(r) is not None}
        points = sorted(found.items())
        if points:
            axes.plot(
                *zip(*points, strict=True), marker="o", ms=4, lw=2.2 if mine else 1.2,
                color=color(provider), label=provider, zorder=3 if mine else 2,
            )  # fmt: skip
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])  # a legend has its place above
    ticks = sorted({r.T for r in rows})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [str(t) for t in ticks], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("tokens T (B T constant, or as in the model)")
    axes.grid(alpha=0.3)


def _variant(row: Row) -> str:
    """What follows the heads in a shape's id: proj, layer_norm."""
    return re.sub(r".*-H\d+-?", "", row.shape)


def _op_panels(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Title and rows of each op, variant and mode in its main dtype, at width 768."""
    good = [r for r in rows if r.op in OPS and f"-C{BASE_C}-" in r.shape + "-"]
    panels = []
    for op in OPS:
        own = [r for r in good if r.op == op]
        if not own:
            continue
        own = [r for r in own if r.dtype == _main_dtype(own, op) and "sweep-D" not in r.shape]
        for variant in dict.fromkeys(_variant(r) for r in own):
            for mode in ("fwd", "bwd", "both"):
                part = [r for r in own if r.mode == mode and _variant(r) == variant]
                if part:
                    panels.append(
                        (" ".join(filter(None, (op, variant, mode, part[0].dtype))), part)
                    )
    return panels


def draw_ops(rows: Sequence[Row], path: Path) -> Path | None:
    """Throughput and share of the nearer roof over T; as bars, ops that have one T."""
    panels = _op_panels(_measured(rows))
    # An op's forward and backward say more than both together.
    split = {title.split()[0] for title, _ in panels if " bwd " in title}
    curves = [
        (title, part)
        for title, part in panels
        if len({r.T for r in part}) > 1 and not (" both " in title and title.split()[0] in split)
    ]
    single = {t: p for t, p in panels if len({r.T for r in p}) == 1}
    if not panels:
        return None
    columns = 4 if len(curves) > 1 else 2  # a curve has two panels
    count = -(-2 * len(curves) // columns) + bool(single)
    shown = [r for _, part in panels for r in part]
    title = "Ops: throughput and share of roof over T, C = 768"
    figure = _figure(6 * columns, 3.8 * count, title, shown)
    grid = figure.subplots(count, columns, squeeze=False)
    places = [tuple(row[i : i + 2]) for row in grid for i in range(0, columns, 2)]
    for (left, right), (title, part) in zip(places, curves, strict=False):
        copies = sum(r.roof == "copy" for r in part) * 2 > len(part)
        _curve(left, part, (lambda r: r.gbps) if copies else (lambda r: r.tflops))
        left.set(ylabel="GB/s" if copies else "TFLOP/s", title=title)
        _curve(right, part, lambda r: r.roof_share)
        right.axhline(1, color="black", lw=0.8)
        right.set(ylabel="share of the nearer roof", title=title)
        _legend(left)
    low = grid[-1][0].get_gridspec()[-1, :]
    for axes in (axes for pair in places[len(curves) :] for axes in pair):
        axes.remove()
    if single:
        speeds, failed = _speeds((r for part in single.values() for r in part), _op_name)
        title = "Speed over eager; hatched: FAILED"
        _bars(figure.add_subplot(low), speeds, "times", title, "%.2f", failed)
    return _save(figure, path)


def _op_name(row: Row) -> str:
    return f"{row.op} {row.mode}\n{row.shape}"


def _speeds(
    rows: Iterable[Row], name: Callable[[Row], str]
) -> tuple[dict[str, dict[str, float]], set[tuple[str, str]]]:
    """Eager's time over each provider's, by name of a case; and which (name, provider) FAILED."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(name(row), []).append(row)
    speeds: dict[str, dict[str, float]] = {}
    failed = set()
    for case, own in cases.items():
        eager = next((r for r in own if r.provider == BASELINE), None)
        for row in own:
            times = None if eager is None else targets.like_times(row, eager)
            if times is None:
                continue
            speeds.setdefault(case, {})[row.provider] = times[1] / times[0]
            if row.status == FAILED:
                failed.add((case, row.provider))
    return speeds, failed


def draw_targets(rows: Sequence[Row], path: Path) -> Path | None:
    """For each claim that rows decide, how much of what was wanted was reached; 1 is met."""
    found = [targets.verdict(claim, rows) for goal in targets.GOALS for claim in goal.claims]
    found = [v for v in found if v.ratio]
    if not found:
        return None
    shown = [r for v in found for r in (v.ours, v.peer) if r is not None]
    figure = _figure(10, 2 + 0.36 * len(found), "Goals: reached over wanted", shown)
    axes = figure.subplots()
    reached = []
    for v in found:
        ratio, least = v.ratio or 1.0, v.claim.least
        reached.append(least / ratio if v.claim.kind == "memory" else ratio / least)
    names = [v.claim.name for v in found]
    colors = ["#08519c" if v.met else "#d6604d" for v in found]
    bars = axes.barh(names, reached, color=colors)
    texts = [
        f"{v.ratio:.2f} of {v.claim.least:g}"
        + (f", {v.peer.provider}" if v.peer else f", {v.claim.kind} roof")
        for v in found
    ]
    axes.axvline(1, color="black", lw=0.8)
    white = dict(facecolor="white", edgecolor="none", pad=0.5)
    axes.bar_label(bars, texts, fontsize=8, padding=3, bbox=white)
    axes.invert_yaxis()
    axes.margins(x=0.45)
    axes.set_xlim(0)
    axes.set_xlabel("reached / wanted")
    return _save(figure, path)


def _bars(
    axes: Any, groups: dict[str, dict[str, float]], label: str, title: str, form: str,
    failed: Collection[tuple[str, str]] = (),
) -> None:  # fmt: skip
    """Grouped bars: group -> provider -> value. Those of `failed` (group, provider) are hollow."""
    names = list(groups)
    providers = list(dict.fromkeys(p for values in groups.values() for p in values))
    providers.sort(key=lambda p: list(COLORS).index(p) if p in COLORS else 99)
    width = min(0.8 / max(1, len(providers)), 0.2)
    for i, provider in enumerate(providers):
        places = [g for g, values in enumerate(groups.values()) if provider in values]
        heights = [values[provider] for values in groups.values() if provider in values]
        offsets = [g + (i - (len(providers) - 1) / 2) * width for g in places]
        bars = axes.bar(offsets, heights, width, color=color(provider))
        for bar, place in zip(bars, places, strict=True):
            if (names[place], provider) in failed:
                bar.set(facecolor="none", edgecolor=color(provider), hatch="//")
        axes.bar_label(bars, fmt=form, fontsize=7, rotation=90, padding=2)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.set(ylabel=label, title=title, xlim=(-0.6, max(len(groups), MOST_CASES // 2) - 0.4))
    axes.margins(y=0.45)
    axes.grid(axis="y", alpha=0.3)
    patch = require("matplotlib.patches", "matplotlib").Patch
    _legend(axes, [patch(color=color(p), label=p) for p in providers])


def _group(
    rows: Iterable[Row], name: Callable[[Row], str], value: str, unit: float = 1.0
) -> dict[str, Any]:
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        number = getattr(row, value)
        if number is not None:
            found.setdefault(name(row), {})[row.provider] = number / unit
    return found


def _most_compared(rows: Iterable[Row], name: Callable[[Row], str]) -> list[Row]:
    """Those of the cases that most providers have measured, in the order of measurement."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(name(row), []).append(row)
    kept = sorted(cases, key=lambda case: -len(cases[case]))[:MOST_CASES]
    return [row for case, own in cases.items() if case in kept for row in own]


def draw_vit(rows: Sequence[Row], path: Path) -> Path | None:
    """Speed over eager, memory, bytes kept, time to the first step, largest batch."""

    def name(row: Row) -> str:
        shape = row.shape.replace(":", ":\n")  # a long name
        return f"{shape}\n{row.dtype} {row.mode}"

    steps = _most_compared((r for r in _measured(rows) if r.op == "vit"), name)
    training = [r for r in steps if r.mode == "train"]
    first = [r for r in _good(rows) if r.op == "first_step"]
    largest = [r for r in rows if r.op == "max_batch" and r.status == OK]
    speeds, failed = _speeds(steps, name)
    seconds: dict[str, dict[str, float]] = {}
    for row in first:
        seconds.setdefault(f"{row.mode} caches", {})[row.provider] = (row.ms or 0.0) / 1e3
    panels = [
        (speeds, "times", "Speed over eager; hatched: FAILED", "%.2f"),
        (_group(training, name, "peak_mib", GIB), "GiB", "Peak memory of a training step", "%.1f"),
        (_group(training, name, "kept_mib", GIB), "GiB", "Kept for the backward", "%.1f"),
        (seconds, "s", "Time to the end of the first step, new process", "%.1f"),
        (_group(largest, name, "batch"), "images", "Largest batch that fits", "%.0f"),
    ]
    panels = [panel for panel in panels if panel[0]]
    if not panels:
        return None
    shown = [*steps, *first, *largest]
    figure = _figure(15, 4.2 * len(panels), "Whole models, one GPU", shown)
    grid = figure.subplots(len(panels), 1, squeeze=False)
    for (axes,), (groups, label, title, form) in zip(grid, panels, strict=True):
        _bars(axes, groups, label, title, form, failed)
    return _save(figure, path)


def _intensity(row: Row) -> float:
    return (row.flops or 0.0) / (row.bytes or 1.0)


def draw_roofline(rows: Sequence[Row], roofs: Roofs, path: Path) -> Path | None:
    """TFLOP/s over FLOP a byte, under the measured copy and matmul roofs."""
    good = [r for r in _measured(rows) if r.op in OPS and r.flops and r.bytes and r.tflops]
    good = [r for r in good if r.dtype == "bf16" and r.provider in ("eager", "ours", "compile")]
    good = [r for r in good if r.mode != "both" and f"-C{BASE_C}-" in r.shape + "-"]
    peak = roofs.matmul_tflops.get("bf16")
    if not good or not peak or not roofs.copy_gbps:
        return None
    figure = _figure(10, 7, "Roofline, bf16, C = 768, forward and backward", good)
    axes = figure.subplots()
    for row in good:
        axes.scatter(
            _intensity(row), row.tflops, edgecolors=color(row.provider), s=28, alpha=0.75,
            marker=MARKERS[row.op],
            facecolors="none" if row.status == FAILED else color(row.provider),
        )  # fmt: skip
    intensity = [_intensity(r) for r in good]
    ridge = 1e3 * peak / roofs.copy_gbps
    low, high = min(*intensity, ridge) / 2, max(*intensity, ridge) * 2
    ends = [low, ridge, high]
    roof = [min(peak, x * roofs.copy_gbps / 1e3) for x in ends]
    axes.plot(ends, roof, color="black", lw=1.2)
    middle = (low * ridge) ** 0.5
    for text, place in (
        (f"matmul {peak:.4g} TFLOP/s", ((ridge * high) ** 0.5, peak)),
        (f"copy {roofs.copy_gbps:.4g} GB/s", (middle, middle * roofs.copy_gbps / 1e3)),
    ):
        axes.annotate(
            text, place, (-6, 5), textcoords="offset points", ha="right", va="bottom", fontsize=8
        )
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOP/s")
    axes.grid(alpha=0.3, which="both")
    lines = require("matplotlib.lines", "matplotlib").Line2D
    handles = [
        lines([], [], ls="", marker=MARKERS[o], color="gray", label=o)
        for o in OPS
        if any(r.op == o for r in good)
    ]
    handles += [
        lines([], [], ls="", marker="s", color=color(p), label=p) for p in _by_provider(good)
    ]
    figure.legend(handles=handles, loc="outside right center", fontsize=8)
    return _save(figure, path)


def draw_profile(rows: Sequence[Row], path: Path) -> Path | None:
    """Kernel time of a training step by stage, a stacked bar for each model and provider."""
    good = [r for r in rows if r.op == "profile" and r.status == OK and r.ms is not None]
    bars: dict[str, dict[str, float]] = {}
    for row in good:
        bars.setdefault(f"{row.shape}\n{row.provider}", {})[row.mode] = row.ms or 0.0
    if not bars:
        return None
    figure = _figure(9, 6.5, "Kernel time of a training step by stage", good)
    axes = figure.subplots()
    palette = require("matplotlib", "matplotlib").colormaps["tab10"]
    bottom = [0.0] * len(bars)
    total = max(sum(v.values()) for v in bars.values())
    for i, stage in enumerate(STAGES):
        heights = [values.get(stage, 0.0) for values in bars.values()]
        drawn = axes.bar(list(bars), heights, 0.6, bottom=bottom, color=palette(i), label=stage)
        texts = [f"{h:.2f}" if h > 0.03 * total else "" for h in heights]
        axes.bar_label(drawn, texts, label_type="center", fontsize=8, color="white")
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for x, height in enumerate(bottom):
        axes.annotate(f"{height:.2f} ms", (x, height), ha="center", va="bottom", fontsize=9)
    axes.set(ylabel="ms a step")
    axes.margins(y=0.1)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=9)
    return _save(figure, path)


def draw_all(rows: Sequence[Row], roofs: Roofs, folder: Path) -> list[Path]:
    """Every picture that these rows allow."""
    drawn = (
        draw_targets(rows, folder / "targets.png"),
        draw_ops(rows, folder / "ops.png"),
        draw_vit(rows, folder / "vit.png"),
        draw_roofline(rows, roofs, folder / "roofline.png"),
        draw_profile(rows, folder / "profile.png"),
    )
    return [path for path in drawn if path is not None]
