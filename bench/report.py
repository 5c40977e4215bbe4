"""Words, tables and pictures from rows: what ends a run, summary.md, the pages, two runs compared.

Pictures are drawn from the CSV alone, none without rows: targets.png what was wanted and reached,
attention.png ours over the best SDPA, ops.png and vit.png speed over eager, roofline.png,
profile.png.
"""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import targets
from bench.measure import ROOF, roofs_of
from bench.models import STAGES
from bench.ops import OPS
from bench.providers import BASELINE, SEARCH
from bench.rows import FAILED, OK, RESULTS, Results, Row, conditions, describe, is_ours, read_rows
from fastvit_kernels.commands.console import CommandError, aligned, require
from fastvit_kernels.measure.gate import like_times
from fastvit_kernels.measure.roofs import Roofs
from fastvit_kernels.runtime.files import write_atomically, write_text

SUMMARY = "summary.md"
START, END = "<!-- results -->", "<!-- /results -->"  # generated between these
README = Path(__file__).parent.parent / "README.md"
DOCS = Path(__file__).parent.parent / "docs" / "benchmarks.md"
COMMITTED = Path(__file__).parent / "results"
GIB = 1024.0  # MiB
MOST_CASES = 8  # of a panel of bars, so that their names have room
BASE_C = 768  # pictures of ops are of this width
THRESHOLD = 0.05


# --- tables


def number(value: float | None, form: str = ".4g") -> str:
    return "" if value is None else format(value, form)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    rows = [header, ["---"] * len(header), *lines]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows] + [""]


def _line(row: Row, cells: Sequence[str]) -> list[str]:
    """Case and provider; then spread, the cells and the speed-up, or why there are none."""
    name = f"**{row.provider}**" if is_ours(row) else row.provider
    start = [row.shape, row.dtype, row.mode, name]
    if row.ms is None:
        why = row.status + (f": {row.note}" if row.note else "")
        return [*start, why, *[""] * (len(cells) + 1)]
    speedup = "FAILED" if row.status == FAILED else number(row.speedup, ".2f")
    return [*start, f"{row.ms:.4g} ({number(row.ms_p20)} to {number(row.ms_p80)})", *cells, speedup]


_OP_HEADER = (
    "shape", "dtype", "mode", "provider", "ms (p20 to p80)", "graph ms", "TFLOP/s", "GB/s",
    "of roof", "peak MiB", "speed-up",
)  # fmt: skip
_VIT_HEADER = (
    "model", "dtype", "mode", "provider", "ms a step (p20 to p80)", "images/s", "MFU", "peak MiB",
    "speed-up",
)  # fmt: skip


def op_line(row: Row) -> list[str]:
    share = "" if row.roof_share is None else f"{100 * row.roof_share:.0f}% {row.roof}"
    rates = (number(x) for x in (row.graph_ms, row.tflops, row.gbps))
    return _line(row, [*rates, share, number(row.peak_mib, ".0f")])


def vit_line(row: Row) -> list[str]:
    share = "" if row.roof_share is None else f"{100 * row.roof_share:.0f}%"
    return _line(row, [number(row.images_per_s, ",.0f"), share, number(row.peak_mib, ",.0f")])


def _host_table(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the host cost: a line per op and mode, a column per provider."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for r in _sorted(r for r in rows if r.op == "host"):
        us, low, high = (1e3 * (x or 0.0) for x in (r.ms, r.ms_p20, r.ms_p80))
        cells.setdefault((r.shape, r.mode), {})[r.provider] = f"{us:.1f} ({low:.1f} to {high:.1f})"
    providers = list(dict.fromkeys(name for line in cells.values() for name in line))
    header = ["op", "mode", *(f"{name}, us" for name in providers)]
    return header, [[*key, *(c.get(name, "") for name in providers)] for key, c in cells.items()]


def _sorted(rows: Iterable[Row]) -> list[Row]:
    """Cases in the order of measurement, each with its providers together."""
    rows = list(rows)
    order: dict[tuple[str, ...], int] = {}
    for row in rows:
        order.setdefault((row.op, row.shape, row.dtype, row.mode), len(order))
    return sorted(rows, key=lambda r: order[(r.op, r.shape, r.dtype, r.mode)])


def tables(rows: Sequence[Row], level: str = "##") -> list[str]:
    """All rows as sections of Markdown."""

    def of(op: str) -> list[Row]:
        return [r for r in rows if r.op == op]

    first = [
        [r.shape, r.provider, f"{r.mode} caches", number(None if r.ms is None else r.ms / 1e3)]
        for r in of("first_step")
    ]
    batches = [
        [r.shape, r.provider, r.status if r.batch is None else str(r.batch)]
        for r in of("max_batch")
    ]
    sections: list[tuple[str, Sequence[str], list[list[str]]]] = [
        ("Roofs", ("roof", "dtype", "size", "ms", "TFLOP/s", "GB/s"), [
            [r.mode, r.dtype, r.shape, number(r.ms), number(r.tflops), number(r.gbps)]
            for r in of(ROOF)
        ]),
        ("Whole models", _VIT_HEADER, [vit_line(r) for r in _sorted(of("vit"))]),
        ("Time to the first step", ("model", "provider", "caches", "s"), first),
        ("Largest batch that fits", ("model", "provider", "images"), batches),
        ("Kernel time of a step by stage", ("model", "provider", "stage", "ms"), [
            [r.shape, r.provider, r.mode, number(r.ms)] for r in of("profile") if r.ms
        ]),
        *((op, _OP_HEADER, [op_line(r) for r in _sorted(of(op))]) for op in OPS),
        ("Host cost", *_host_table(rows)),
    ]  # fmt: skip
    return [
        line
        for title, header, lines in sections
        if lines
        for line in (f"{level} {title}", "", *markdown(header, lines))
    ]


def summary(rows: Sequence[Row], said: Sequence[str] = ()) -> str:
    """summary.md of one run."""
    checks = [f"`fastvit-kernels check`: {r.status}, {r.note}." for r in rows if r.op == "check"]
    head = ["# Benchmark", "", conditions(rows) + ".", "", *checks, *(f"- {x}" for x in said), ""]
    return "\n".join([*head, *tables(rows)])


SHORT_HEADER = ("case", "eager, ms", "best peer, ms", "best of ours, ms", "speed-up", "")


def short_lines(rows: Sequence[Row], limit: int = 30) -> list[list[str]]:
    """Of each case: eager, the best other provider, ours, and the speed-ups of ours."""
    cases: dict[tuple[str, ...], list[Row]] = {}
    for r in rows:
        if r.op in (*OPS, "vit") and (r.ms or r.status == FAILED):
            cases.setdefault((r.op, r.shape, r.dtype, r.mode), []).append(r)
    lines = []
    for key, found in cases.items():
        eager = next((r for r in found if r.provider == BASELINE), None)
        peer = _fastest(r for r in found if not is_ours(r) and r.provider != BASELINE)
        best = _fastest(r for r in found if is_ours(r) and r.status == OK)
        failed = ", ".join(r.provider for r in found if r.status == FAILED)
        lines.append(
            [
                " ".join(key),
                "" if eager is None else number(eager.device_ms),
                "" if peer is None else f"{number(peer.device_ms)} {peer.provider}",
                "" if best is None else f"{number(best.device_ms)} {best.provider}",
                "" if best is None else number(best.speedup, ".2f"),
                f"FAILED: {failed}" if failed else "",
            ]
        )
    return lines[:limit]


def _fastest(rows: Iterable[Row]) -> Row | None:
    timed = [r for r in rows if r.device_ms]
    return min(timed, key=lambda r: r.device_ms or 0.0, default=None)


def _table(header: Sequence[str], lines: Iterable[Sequence[str]], left: Sequence[int]) -> Any:
    shown = require("rich.table", "rich").Table(box=None, padding=(0, 1, 0, 0))
    for i, title in enumerate(header):
        shown.add_column(title, justify="left" if i in left else "right", overflow="fold")
    for line in lines:
        shown.add_row(*line)
    return shown


def finish(results: Results, said: Sequence[str], console: Any, command: str) -> None:
    """summary.md, the pictures, and the short table, or the goals'."""
    rows = list(results.rows.values())
    write_text(results.folder / SUMMARY, summary(rows, said))
    if command == "targets":  # no pictures: `plot` draws them when time is not short
        print(aligned([targets.HEADER, *targets.lines(rows)]))
        return
    _draw(rows, results.folder, console)
    if lines := short_lines(rows):
        console.print(_table(SHORT_HEADER, lines, left=(0, 5)))
    console.print(f"{conditions(rows)}\n{results.folder}: {len(rows)} rows", soft_wrap=True)


# --- two runs


@dataclass(frozen=True)
class Ratio:
    """B's time over A's, like with like: above 1 is slower. low and high: from p20 and p80."""

    a: Row
    b: Row
    times: tuple[float, float]
    ratio: float
    low: float
    high: float

    def is_regression(self, threshold: float) -> bool:
        """Slower by more than the threshold, and not within the spread of the two."""
        return self.ratio > 1 + threshold and self.low > 1


def ratios(a: Sequence[Row], b: Sequence[Row]) -> list[Ratio]:
    """Of the rows measured in both, the slowest first."""
    former = {r.key: r for r in a if r.status == OK}
    found = []
    for new in b:
        old = former.get(new.key)
        times = None if old is None or new.status != OK else like_times(old, new)
        if old is None or times is None:
            continue
        graphs = old.graph_ms is not None and new.graph_ms is not None
        (a20, a80), (b20, b80) = (
            (r.graph_ms_p20, r.graph_ms_p80) if graphs else (r.ms_p20, r.ms_p80) for r in (old, new)
        )
        low = (b20 or times[1]) / (a80 or times[0])
        high = (b80 or times[1]) / (a20 or times[0])
        found.append(Ratio(old, new, times, times[1] / times[0], low, high))
    return sorted(found, key=lambda r: -r.ratio)


def run_compare(a: Sequence[Row], b: Sequence[Row], threshold: float, console: Any) -> int:
    """The ratio of every row that both have, regressions first; 1 if something is slower."""
    found = ratios(a, b)
    lines = [
        (
            " ".join(r.b.key), *(f"{ms:.4g}" for ms in r.times), f"{r.ratio:.3f}",
            f"{r.low:.3f} to {r.high:.3f}", "slower" if r.is_regression(threshold) else "",
        )
        for r in found
    ]  # fmt: skip
    console.print(f"A: {conditions(a)}\nB: {conditions(b)}", soft_wrap=True)
    header = ("row", "A, ms", "B, ms", "B / A", "spread", "")
    console.print(_table(header, lines, left=range(6)))
    good = {r.key for r in a if r.status == OK}
    lost = [r for r in b if r.status != OK and r.key in good]
    for row in lost:
        console.print(describe(row), markup=False, soft_wrap=True)
    slower = sum(r.is_regression(threshold) for r in found)
    console.print(
        f"{len(found)} rows in both; {slower} slower by more than {100 * threshold:.0f}%; "
        f"{len(lost)} that were measured in A and failed in B"
    )
    return 1 if slower or lost else 0


# --- pages: docs/benchmarks.md and README.md by hand, but for what stands between START and END

Result = tuple[str, Sequence[Row]]  # name of a folder, its rows
PICTURES = ("targets", "attention", "vit", "ops", "roofline", "profile")
NOTHING = (
    "**Nothing has run on a GPU yet, so this page claims no speed.** The tests run every kernel "
    "in Triton's\ninterpreter and, compiled for sm_80 and sm_90, as PTX on a CPU; the compile gate "
    "builds each for seven GPU targets."
)
HOST_NOTE = (
    "One thread, tiny tensors (`bench/host.py`). `no launch` does everything in a call but the "
    "launch; `eager` is\nPyTorch's own functions on the same tensors. Median (p20 to p80)."
)


def _on_gpu(rows: Iterable[Row]) -> bool:
    return any(not r.gpu.startswith("no GPU") for r in rows)


def _pictures(folder: Path, name: str, up: str) -> list[str]:
    """The pictures next to a CSV, as a page links them; `up` leads from the page to the root."""
    found = [p for p in PICTURES if (folder / name / f"{p}.png").exists()]
    return [
        line
        for p in found
        for line in (f"![{p} of {name}]({up}bench/results/{name}/{p}.png)", "")
    ]  # fmt: skip


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """The targets that rows decide, as a table."""
    lines = [line for line in targets.lines(rows) if line[4]]
    return markdown(targets.HEADER, lines) if lines else []


def docs(results: Sequence[Result], committed: Path = COMMITTED) -> str:
    """The generated part of docs/benchmarks.md."""
    text: list[str] = []
    for name, rows in results:
        text += [f"### {name}", "", conditions(rows) + ".", ""]
        if _on_gpu(rows):
            text += [*_verdicts(rows), *_pictures(committed, name, "../"), *tables(rows, "####")]
        else:  # all that is measured without a GPU
            text += ["Host time per call. " + HOST_NOTE, "", *markdown(*_host_table(rows))]
    measured = [r for _, rows in results if _on_gpu(rows) for r in rows if targets.has_goals(r)]
    goals = targets.goal_lines(measured)
    text += ["### Targets", "", "For an H100 or H200, bf16, measured in one run, in turns:", ""]
    text += markdown(("work", "against", "at least", "measured"), goals)
    return "\n".join(text).strip()


def readme(results: Sequence[Result], committed: Path = COMMITTED) -> str:
    """The generated part of README.md: what was measured on a GPU, or that nothing was."""
    shown = []
    for name, rows in results:
        if _on_gpu(rows) and (table := _verdicts(rows)):
            pictures = _pictures(committed, name, "")[:2]
            shown += [f"On {name}, in turns, in one run:", "", *table, *pictures]
    return "\n".join(shown).strip() or NOTHING


def _filled(page: str, text: str) -> str:
    start, rest = page.split(START, 1)
    return f"{start}{START}\n{text}\n{END}{rest.split(END, 1)[1]}"


def write_docs(path: Path = DOCS, committed: Path = COMMITTED, front: Path = README) -> None:
    """Fill docs/benchmarks.md and README.md anew from the committed results."""
    found = [(p.parent.name, read_rows(p)) for p in sorted(committed.glob(f"*/{RESULTS}"))]
    write_text(path, _filled(path.read_text(encoding="utf-8"), docs(found, committed)))
    write_text(front, _filled(front.read_text(encoding="utf-8"), readme(found, committed)))


# --- pictures

# Okabe and Ito's colours, which a colour-blind reader tells apart.
COLORS = {
    BASELINE: "#666666", "compile": "#E69F00", SEARCH: "#D55E00", "best peer": "#009E73",
    "ours": "#0072B2", "swapped": "#0072B2", "swapped+graph": "#56B4E9",
    "swapped+compile": "#CC79A7",
}  # fmt: skip
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
MARKERS = dict(zip(OPS, itertools.cycle("osD^vPX*<>")))


def color(provider: str) -> str:
    return COLORS.get(provider, "#AAAAAA")


def _figure(height: float, title: str, rows: Sequence[Row], width: float = 9.0) -> Any:
    figure = require("matplotlib.figure", "matplotlib").Figure(
        (width, height), layout="constrained"
    )
    lines = textwrap.wrap(conditions(rows), int(width * 13))
    figure.suptitle(title + "\n" + "\n".join(lines), fontsize=10)
    return figure


def _save(figure: Any, path: Path) -> Path:
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=110))
    return path


def _measured(rows: Iterable[Row]) -> list[Row]:
    """Those that broke the 2x rule too: drawn hollow, so that no competitor vanishes."""
    return [r for r in rows if r.status in (OK, FAILED) and r.ms]


def draw_targets(rows: Sequence[Row], path: Path) -> Path | None:
    """For each claim that rows decide, how much of what was wanted was reached; 1 is met."""
    found = [targets.verdict(claim, rows) for goal in targets.GOALS for claim in goal.claims]
    found = [v for v in found if v.ratio and v.ours and targets.has_goals(v.ours)]
    if not found:
        return None
    shown = [r for v in found for r in (v.ours, v.peer) if r is not None]
    figure = _figure(2 + 0.36 * len(found), "Goals: reached over wanted", shown)
    axes = figure.subplots()
    reached = []
    for v in found:
        ratio, least = v.ratio or 1.0, v.claim.least
        reached.append(least / ratio if v.claim.kind == "memory" else ratio / least)
    names = [v.claim.name for v in found]
    colors = [CYCLE[0] if v.met else CYCLE[1] for v in found]
    bars = axes.barh(names, reached, color=colors)
    texts = [
        f"{v.ratio:.2f} of {v.claim.least:g}"
        + (f", {v.peer.provider}" if v.peer else f", {v.claim.kind} roof")
        for v in found
    ]
    axes.axvline(1, color="black", lw=0.8)
    axes.bar_label(bars, texts, fontsize=8, padding=3)
    axes.invert_yaxis()
    axes.set(xlabel="reached / wanted", xlim=(0, 1.5 * max(1.0, *reached)))
    return _save(figure, path)


def _head_dim(row: Row) -> int:
    C, H = (int(n) for n in re.findall(r"-C(\d+)-H(\d+)", row.shape)[0])
    return C // H


def over_best_sdpa(rows: Sequence[Row], mode: str) -> dict[int, dict[int, float]]:
    """The best SDPA's time over ours, by head dim and T, in bf16."""
    cases: dict[str, list[Row]] = {}
    for r in _measured(rows):
        if (r.op, r.dtype, r.mode) == ("attention", "bf16", mode):
            cases.setdefault(r.shape, []).append(r)
    found: dict[int, dict[int, float]] = {}
    for own in cases.values():
        ours = _fastest(r for r in own if is_ours(r) and r.status == OK)
        peer = _fastest(r for r in own if r.provider in targets.SDPA)
        times = None if ours is None or peer is None else like_times(peer, ours)
        if ours is not None and times is not None:
            found.setdefault(_head_dim(ours), {})[ours.T] = times[0] / times[1]
    return found


def draw_attention(rows: Sequence[Row], path: Path) -> Path | None:
    """Speed over the best SDPA backend over T, a line a head dim, forward and backward."""
    panels = {mode: over_best_sdpa(rows, mode) for mode in ("fwd", "bwd")}
    if not any(panels.values()):
        return None
    shown = [r for r in _measured(rows) if r.op == "attention"]
    figure = _figure(4.2, "Attention, bf16: speed over the best SDPA backend", shown)
    for axes, (mode, lines) in zip(figure.subplots(1, 2), panels.items(), strict=True):
        for tint, (D, points) in zip(itertools.cycle(CYCLE), sorted(lines.items())):
            T, ratio = zip(*sorted(points.items()), strict=True)
            axes.plot(T, ratio, marker="o", ms=4, color=tint, label=f"D = {D}")
        axes.axhline(1, color="black", lw=0.8)
        axes.set(title=mode, xscale="log", xlabel="tokens T", ylabel="times")
        axes.set_ylim(0)
        axes.grid(alpha=0.3)
        if lines:
            axes.legend(fontsize=8)
    return _save(figure, path)


Groups = dict[str, dict[str, float]]  # group -> provider -> value


def _speeds(rows: Iterable[Row], name: Callable[[Row], str]) -> tuple[Groups, set[tuple[str, str]]]:
    """Eager's time over each provider's, by name of a case; and which (name, provider) FAILED."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(name(row), []).append(row)
    speeds: Groups = {}
    failed = set()
    for case, own in cases.items():
        eager = next((r for r in own if r.provider == BASELINE), None)
        for row in own:
            times = None if eager is None else like_times(row, eager)
            if times is None:
                continue
            speeds.setdefault(case, {})[row.provider] = times[1] / times[0]
            if row.status == FAILED:
                failed.add((case, row.provider))
    return speeds, failed


def _bars(
    axes: Any, groups: Groups, label: str, title: str, form: str,
    failed: Iterable[tuple[str, str]] = (),
) -> None:  # fmt: skip
    """Grouped bars. Those of `failed` (group, provider) are hollow."""
    failed = set(failed)
    providers = sorted(
        {p for values in groups.values() for p in values},
        key=lambda p: list(COLORS).index(p) if p in COLORS else len(COLORS),
    )
    width = min(0.8 / len(providers), 0.2)
    for i, provider in enumerate(providers):
        own = [(g, n) for g, n in enumerate(groups) if provider in groups[n]]
        offsets = [g + (i - (len(providers) - 1) / 2) * width for g, _ in own]
        heights = [groups[n][provider] for _, n in own]
        bars = axes.bar(offsets, heights, width, color=color(provider), label=provider)
        for bar, (_, name) in zip(bars, own, strict=True):
            if (name, provider) in failed:
                bar.set(facecolor="none", edgecolor=color(provider), hatch="//")
        axes.bar_label(bars, fmt=form, fontsize=8, rotation=90, padding=2)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.set(ylabel=label, title=title, xlim=(-0.6, max(len(groups), MOST_CASES // 2) - 0.4))
    axes.margins(y=0.45)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", ncols=5)


def _op_cases(rows: Sequence[Row]) -> list[Row]:
    """Of each op its first case of width 768: eager, compiled, the best peer and the best of
    ours."""
    found = []
    for op in OPS:
        own = [r for r in _measured(rows) if r.op == op and f"-C{BASE_C}-" in r.shape + "-"]
        case = next(((r.shape, r.dtype) for r in own if r.dtype in ("bf16", "amp")), None)
        for mode in ("fwd", "bwd", "both"):
            part = [r for r in own if (r.shape, r.dtype) == case and r.mode == mode]
            if mode == "both" and any(r.op == op for r in found):
                continue  # forward and backward say more than both together
            named = (BASELINE, "compile", SEARCH)
            found += [r for r in part if r.provider in named]
            for name, side in (
                ("best peer", [r for r in part if not is_ours(r) and r.provider not in named]),
                ("ours", [r for r in part if is_ours(r)]),
            ):
                best = _fastest(r for r in side if r.status == OK) or _fastest(side)
                found += [] if best is None else [_renamed(best, name)]
    return found


def _renamed(row: Row, provider: str) -> Row:
    return Row(**{**vars(row), "provider": provider})


def draw_ops(rows: Sequence[Row], path: Path) -> Path | None:
    """Speed over eager of each op, at its first case of width 768."""
    shown = _op_cases(rows)
    speeds, failed = _speeds(shown, lambda r: f"{r.op}\n{r.mode}")
    if not speeds:
        return None
    names = list(speeds)
    parts = [names[i : i + MOST_CASES] for i in range(0, len(names), MOST_CASES)]
    figure = _figure(3.4 * len(parts) + 0.6, "Ops, C = 768: speed over eager", shown)
    for axes, part in zip(figure.subplots(len(parts), 1, squeeze=False)[:, 0], parts, strict=True):
        title = "hatched: FAILED" if failed else ""
        _bars(axes, {name: speeds[name] for name in part}, "times", title, "%.2f", failed)
    return _save(figure, path)


def _group(
    rows: Iterable[Row], name: Callable[[Row], str], value: str, unit: float = 1.0
) -> Groups:
    found: Groups = {}
    for row in rows:
        figure = getattr(row, value)
        if figure is not None:
            found.setdefault(name(row), {})[row.provider] = figure / unit
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
        shape = row.shape.replace(":", ":\n").replace("-ViT", "\nViT")
        return f"{shape}\n{row.dtype} {row.mode}"

    steps = _most_compared((r for r in _measured(rows) if r.op == "vit"), name)
    training = [r for r in steps if r.mode == "train"]
    first = [r for r in rows if r.op == "first_step" and r.status == OK]
    largest = [r for r in rows if r.op == "max_batch" and r.status == OK]
    speeds, failed = _speeds(steps, name)
    seconds = _group(first, lambda r: f"{r.mode} caches", "ms", 1e3)
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
    figure = _figure(3.8 * len(panels), "Whole models, one GPU", [*steps, *first, *largest])
    grid = figure.subplots(len(panels), 1, squeeze=False)
    for (axes,), (groups, label, title, form) in zip(grid, panels, strict=True):
        _bars(axes, groups, label, title, form, failed)
    return _save(figure, path)


def draw_roofline(rows: Sequence[Row], roofs: Roofs, path: Path) -> Path | None:
    """TFLOP/s over FLOP a byte, under the measured copy and matmul roofs."""
    peak = roofs.matmul_tflops.get("bf16")
    good = [
        r for r in _measured(rows)
        if r.op in OPS and r.flops and r.bytes and r.tflops and r.dtype == "bf16"
        and r.provider in (BASELINE, "ours", "compile") and r.mode != "both"
        and f"-C{BASE_C}-" in r.shape + "-"
    ]  # fmt: skip
    if not good or not peak or not roofs.copy_gbps:
        return None
    figure = _figure(6, "Roofline, bf16, C = 768, forward and backward", good)
    axes = figure.subplots()
    intensity = [(r.flops or 0.0) / (r.bytes or 1.0) for r in good]
    for x, row in zip(intensity, good, strict=True):
        tint = color(row.provider)
        axes.scatter(
            x, row.tflops, edgecolors=tint, s=28, alpha=0.75, marker=MARKERS[row.op],
            facecolors="none" if row.status == FAILED else tint,
            label=f"{row.op}, {row.provider}",
        )  # fmt: skip
    ridge = 1e3 * peak / roofs.copy_gbps
    ends = [min(*intensity, ridge) / 2, ridge, max(*intensity, ridge) * 2]
    roof = [min(peak, x * roofs.copy_gbps / 1e3) for x in ends]
    axes.plot(ends, roof, color="black", lw=1.2)
    title = f"roofs: {peak:.4g} TFLOP/s, {roofs.copy_gbps:.4g} GB/s"
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOP/s", title=title)
    axes.grid(alpha=0.3, which="both")
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique, loc="outside right center", fontsize=8)
    return _save(figure, path)


def draw_profile(rows: Sequence[Row], path: Path) -> Path | None:
    """Kernel time of a training step by stage, a stacked bar for each model and provider."""
    good = [r for r in rows if r.op == "profile" and r.status == OK and r.ms is not None]
    bars: Groups = {}
    for row in good:
        bars.setdefault(f"{row.shape}\n{row.provider}", {})[row.mode] = row.ms or 0.0
    if not bars:
        return None
    figure = _figure(5.5, "Kernel time of a training step by stage", good)
    axes = figure.subplots()
    bottom = [0.0] * len(bars)
    for stage, tint in zip(STAGES, CYCLE, strict=True):
        heights = [values.get(stage, 0.0) for values in bars.values()]
        axes.bar(list(bars), heights, 0.6, bottom=bottom, color=tint, label=stage)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for x, height in enumerate(bottom):
        axes.annotate(f"{height:.2f} ms", (x, height), ha="center", va="bottom", fontsize=9)
    axes.set(ylabel="ms a step")
    axes.margins(y=0.1)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", fontsize=9)
    return _save(figure, path)


def draw_all(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Every picture that these rows allow."""
    drawn = (
        draw_targets(rows, folder / "targets.png"),
        draw_attention(rows, folder / "attention.png"),
        draw_ops(rows, folder / "ops.png"),
        draw_vit(rows, folder / "vit.png"),
        draw_roofline(rows, roofs_of(rows), folder / "roofline.png"),
        draw_profile(rows, folder / "profile.png"),
    )
    return [path for path in drawn if path is not None]


def _draw(rows: Sequence[Row], folder: Path, console: Any) -> None:
    """Every picture that the rows allow, and their names."""
    try:
        drawn = draw_all(rows, folder)
    except CommandError as error:
        console.print(f"no pictures: {error}")
        return
    console.print("drawn: " + (", ".join(str(p) for p in drawn) or "nothing: too few rows"))


def run_plot(rows: Sequence[Row], folder: Path, console: Any) -> int:
    folder = folder if folder.is_dir() else folder.parent
    write_text(folder / SUMMARY, summary(rows))
    _draw(rows, folder, console)
    return 0
