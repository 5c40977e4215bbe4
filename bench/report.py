"""Words, tables and pictures from a frame of rows: what ends a run, summary.md, the pages.

The picture, ours over the best other attention, is drawn from the CSV alone, none without rows.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from bench.models import VIT
from bench.ops import BASELINE
from bench.rows import FAILED, OK, OURS, RESULTS, ROOF, Frame, Row, conditions, read_results
from fastvit_kernels.commands.console import CommandError, require
from fastvit_kernels.runtime.files import write_atomically, write_text

SUMMARY, PICTURE = "summary.md", "attention.png"
START, END = "<!-- results -->", "<!-- /results -->"  # generated between these
ROOT = Path(__file__).parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs" / "benchmarks.md"
COMMITTED = ROOT / "bench" / "results"
CASE = ["op", "shape", "dtype", "mode"]
MOST_LINES = 30  # of the table that ends a run

# --- tables


def timed(frame: Frame) -> Frame:
    """What ran and was right, with the time that is compared and whether it is ours."""
    frame = frame[(frame.status == OK) & frame.ms.notna()]
    device_ms = frame.graph_ms.fillna(frame.ms)
    return frame.assign(device_ms=device_ms, ours=frame.provider.str.startswith(OURS))


def text(value: Any, form: str) -> str:
    return "" if pd.isna(value) else form.format(value)


def _time(row: Any) -> str:
    return f"{row.provider} {row.device_ms:.4g}" + text(row.speedup, " ({:.2f}x)")


def op_table(frame: Frame) -> Frame:
    """Of each case: eager, the fastest of ours and every peer, with speed-ups over eager; how near
    ours is to the roof, its memory, and who FAILED. All else is in the CSV."""
    good, lines = timed(frame), []
    for case, rows in frame[~frame.op.isin((ROOF, VIT))].groupby(CASE, sort=False):
        right = good.loc[good.index.intersection(rows.index)].sort_values("device_ms")
        eager = right[right.provider == BASELINE]
        peers = right[~right.ours & (right.provider != BASELINE)]
        ours = next(right[right.ours].itertuples(), None)
        lines.append(
            {
                "op": " ".join(case),
                "eager, ms": "".join(f"{ms:.4g}" for ms in eager.device_ms),
                "ours, ms": _time(ours) if ours else "",
                "of roof": text(ours.roof_share, "{:.0%} ") + ours.roof if ours else "",
                "peak MiB": text(ours.peak_mib, "{:,.0f}") if ours else "",
                "peers, ms": "; ".join(map(_time, peers.itertuples())),
                "FAILED": ", ".join(rows.provider[rows.status == FAILED]),
            }
        )
    return pd.DataFrame(lines)


def model_table(frame: Frame) -> Frame:
    """Every way of every model; a graph's speed-up is over eager's graph."""
    rows = frame[(frame.op == VIT) & frame.status.isin((OK, FAILED))]
    forms = {
        "ms": (rows.ms, "{:.4g}"),
        "speed-up": (rows.speedup, "{:.2f}x"),
        "images/s": (rows.images_per_s, "{:,.0f}"),
        "peak MiB": (rows.peak_mib, "{:,.0f}"),
        "of roof": (rows.roof_share, "{:.0%}"),
    }
    cells = {name: [text(x, form) for x in column] for name, (column, form) in forms.items()}
    case, failed = rows["shape"] + " " + rows.dtype + " " + rows["mode"], rows.status == FAILED
    table = {"model": case, "way": rows.provider, **cells, "FAILED": rows.note.where(failed, "")}
    return pd.DataFrame(table).sort_values("model")


def markdown(table: Frame) -> list[str]:
    rows = [table.columns, ["---"] * table.shape[1], *table.itertuples(index=False)]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows] + [""]


def tables(frame: Frame) -> list[str]:
    found = [t for t in (model_table(frame), op_table(frame)) if not t.empty]
    lines = (line for table in found for line in markdown(table))
    roofs = (f"- {Row(**line).describe()}" for line in frame[frame.op == ROOF].to_dict("records"))
    return [f"{conditions(frame)}.", "", *roofs, "", *lines]


def show(frame: Frame) -> None:
    """What a terminal shows."""
    for table in (model_table(frame), op_table(frame)):
        if not table.empty:
            print(table.head(MOST_LINES).to_string(index=False))
    print(f"{conditions(frame)}: {len(frame)} rows")


# --- pages: docs/benchmarks.md and README.md by hand, but for what stands between START and END

Result = tuple[str, Frame]  # name of a folder, its rows


def _picture(folder: Path, name: str, up: str) -> list[str]:
    """The picture next to a CSV, as a page links it; `up` leads from the page to the root."""
    there = (folder / name / PICTURE).exists()
    return [f"![attention of {name}]({up}bench/results/{name}/{PICTURE})", ""] if there else []


def docs(results: Iterable[Result], committed: Path = COMMITTED) -> str:
    """All cases of each GPU."""
    lines = []
    for name, frame in results:
        lines += [f"### {name}", "", *_picture(committed, name, "../"), *tables(frame)]
    return "\n".join(lines).strip()


FRONT = {
    BASELINE: BASELINE,
    "compile": "torch.compile",
    "swapped": "ours, `fk.swap_in`",
    "backend": 'ours, `backend="fastvit_kernels"`',
}


def readme(results: Iterable[Result], committed: Path = COMMITTED) -> str:
    """A training step of ViT-B in two figures, and one picture."""
    lines = []
    for name, frame in results:
        step = (frame["shape"] == "timm-ViT-B-224-B256") & (frame["mode"] == "train")
        steps = timed(frame[step & frame.provider.isin(FRONT)])
        if not steps.ours.any():
            continue
        columns = {
            "": steps.provider.map(FRONT),
            "images/s": steps.images_per_s.map("{:,.0f}".format),
            "peak memory, GiB": (steps.peak_mib / 1024).map("{:.1f}".format),
        }
        about = "ViT-B/16, 224 x 224, batch 256, a training step in bf16 autocast on one"
        lines += [f"{about} {steps.gpu.iloc[0]}:", "", *markdown(pd.DataFrame(columns))]
        lines += _picture(committed, name, "")
    return "\n".join(lines).strip()


def write_docs(path: Path = DOCS, committed: Path = COMMITTED, front: Path = README) -> int:
    """Fill docs/benchmarks.md and README.md anew from the committed results of GPUs."""
    found = [(p.parent.name, read_results(p)) for p in sorted(committed.glob(f"*/{RESULTS}"))]
    found = [(n, frame) for n, frame in found if not frame.gpu.str.startswith("no GPU").all()]
    for page, generated in ((path, docs(found, committed)), (front, readme(found, committed))):
        before, rest = page.read_text(encoding="utf-8").split(START, 1)
        write_text(page, f"{before}{START}\n{generated}\n{END}{rest.split(END, 1)[1]}")
    return 0


# --- pictures, as wide as a page

# Okabe and Ito's colours, which a colour-blind reader tells apart.
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
WIDTH, DPI = 9.0, 110  # inches; 990 pixels


def over_best_peer(frame: Frame) -> Frame:
    """Speed of the fastest of ours over the fastest other attention's, flex and FlashAttention too:
    a line a case in bf16 that has both."""
    rows = timed(frame[(frame.op == "attention") & (frame.dtype == "bf16")])
    by = ["T", "shape", "mode", "ours"]
    best = rows[rows.provider != BASELINE].groupby(by).speedup.max().unstack("ours")
    best = best.reindex(columns=[True, False]).dropna()
    sizes = best.index.to_frame()["shape"].str.extract(r"-C(\d+)-H(\d+)").astype(int)
    return best.assign(D=sizes[0] // sizes[1], ratio=best[True] / best[False]).reset_index()


def draw_attention(frame: Frame, path: Path) -> bool:
    """Speed over the best other attention over T, a line a head dim, forward and backward: a file
    if there are such rows."""
    found, figures = over_best_peer(frame), require("matplotlib.figure", "matplotlib")
    if found.empty:
        return False
    figure = figures.Figure((WIDTH, 4.2), layout="constrained")
    figure.suptitle("Our attention next to the best other, bf16", fontsize=12)
    lines = textwrap.wrap(conditions(frame[frame.op == "attention"]), int(WIDTH * 17))
    figure.supxlabel("\n".join(lines), fontsize=7, color="#666666")
    tints = dict(zip(sorted(found.D.unique()), itertools.cycle(CYCLE)))
    both = figure.subplots(1, 2, sharey=True)
    for axes, (mode, title) in zip(both, (("fwd", "forward"), ("bwd", "backward")), strict=True):
        for D, line in found[found["mode"] == mode].groupby("D"):
            label = f"ours, head dim {D}"
            axes.plot(line["T"], line.ratio, marker="o", ms=4, color=tints[D], label=label)
        axes.axhline(1, color="black", lw=0.8, label="best other attention")
        axes.set(title=f"{title}: higher is better", xlabel="tokens of an image")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=9)
    both[0].set(ylabel="speed, in multiples of the best other")
    both[0].set_ylim(0)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=DPI))
    return True


def run_plot(frame: Frame, folder: Path, said: Sequence[str] = ()) -> int:
    """Write summary.md and the picture."""
    head = ["# Benchmark", "", *(f"- {x}" for x in said), ""]
    write_text(folder / SUMMARY, "\n".join([*head, *tables(frame)]))
    path = folder / PICTURE
    try:
        print(f"drawn: {path}" if draw_attention(frame, path) else "not drawn: too few rows")
    except CommandError as error:
        print(f"no picture: {error}")
    return 0
