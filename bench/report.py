"""Words and tables from rows: the table that ends a run, summary.md, docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.plan import OPS
from bench.providers import BASELINE
from bench.roofs import OP as ROOF
from bench.rows import FAILED, OK, RESULTS, Row, conditions, read_rows

NOT_YET = "not yet measured"
LOG_START, LOG_END = "<!-- log: kept by hand -->", "<!-- /log -->"
COMMAND = "python -m bench all --time-budget 540 --out DIR"
DOCS = Path(__file__).parent.parent / "docs" / "benchmarks.md"
COMMITTED = Path(__file__).parent / "results"


def number(value: float | None, form: str = ".4g") -> str:
    return "" if value is None else format(value, form)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    rows = [header, ["---"] * len(header), *lines]
    return ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows] + [""]


_OP_HEADER = (
    "shape", "dtype", "mode", "provider", "ms (p20 to p80)", "graph ms", "TFLOP/s", "GB/s",
    "of roof", "peak MiB", "speed-up",
)  # fmt: skip


def op_line(row: Row) -> list[str]:
    name = f"**{row.provider}**" if row.provider.startswith("ours") else row.provider
    start = [row.shape, row.dtype, row.mode, name]
    if row.ms is None:
        return [*start, row.status + (f": {row.note}" if row.note else ""), *[""] * 6]
    share = "" if row.roof_share is None else f"{100 * row.roof_share:.0f}% {row.roof}"
    speedup = "FAILED" if row.status == FAILED else number(row.speedup, ".2f")
    spread = f"{row.ms:.4g} ({number(row.ms_p20)} to {number(row.ms_p80)})"
    return [
        *start, spread, number(row.graph_ms), number(row.tflops), number(row.gbps), share,
        number(row.peak_mib, ".0f"), speedup,
    ]  # fmt: skip


def vit_line(row: Row) -> list[str]:
    name = f"**{row.provider}**" if row.provider.startswith("swapped") else row.provider
    start = [row.shape, row.dtype, row.mode, name]
    if row.ms is None:
        return [*start, row.status + (f": {row.note}" if row.note else ""), *[""] * 4]
    speedup = "FAILED" if row.status == FAILED else number(row.speedup, ".2f")
    spread = f"{row.ms:.4g} ({number(row.ms_p20)} to {number(row.ms_p80)})"
    share = "" if row.roof_share is None else f"{100 * row.roof_share:.0f}%"
    images = number(row.images_per_s, ",.0f")
    return [*start, spread, images, share, number(row.peak_mib, ",.0f"), speedup]


_VIT_HEADER = (
    "model", "dtype", "mode", "provider", "ms a step (p20 to p80)", "images/s", "MFU", "peak MiB",
    "speed-up",
)  # fmt: skip


_HOST_HEADER = ("op", "mode", "provider", "us a call (p20 to p80)")


def _host_lines(rows: Iterable[Row]) -> list[list[str]]:
    lines = []
    for r in _sorted(r for r in rows if r.op == "host"):
        us, low, high = (1e3 * (x or 0.0) for x in (r.ms, r.ms_p20, r.ms_p80))
        lines.append([r.shape, r.mode, r.provider, f"{us:.1f} ({low:.1f} to {high:.1f})"])
    return lines


def _on_gpu(rows: Iterable[Row]) -> bool:
    return any(not r.gpu.startswith("no GPU") for r in rows)


def _sorted(rows: Iterable[Row]) -> list[Row]:
    """Cases in the order of measurement, each with its providers together."""
    rows = list(rows)
    order: dict[tuple[str, ...], int] = {}
    for row in rows:
        order.setdefault((row.op, row.shape, row.dtype, row.mode), len(order))
    return sorted(rows, key=lambda r: order[(r.op, r.shape, r.dtype, r.mode)])


def tables(rows: Sequence[Row], level: str = "##") -> list[str]:
    """All rows as sections of Markdown; a section without rows says so."""
    text = []

    def section(title: str, header: Sequence[str], lines: list[list[str]]) -> None:
        text.extend([f"{level} {title}", ""])
        text.extend(markdown(header, lines) if lines else [f"{NOT_YET}.", ""])

    roofs = [
        [r.mode, r.dtype, r.shape, number(r.tflops), number(r.gbps)] for r in rows if r.op == ROOF
    ]
    section("Roofs", ("roof", "dtype", "size", "TFLOP/s", "GB/s"), roofs)
    vit = [vit_line(r) for r in _sorted(r for r in rows if r.op == "vit")]
    section("Whole models", _VIT_HEADER, vit)
    first = [
        [r.shape, r.provider, f"{r.mode} caches", number(None if r.ms is None else r.ms / 1e3)]
        for r in rows
        if r.op == "first_step"
    ]
    section("Time to the first step", ("model", "provider", "caches", "s"), first)
    batches = [
        [r.shape, r.provider, r.status if r.batch is None else str(r.batch)]
        for r in rows
        if r.op == "max_batch"
    ]
    section("Largest batch that fits", ("model", "provider", "images"), batches)
    stages = [
        [r.shape, r.provider, r.mode, number(r.ms)] for r in rows if r.op == "profile" and r.ms
    ]
    section("Kernel time of a step by stage", ("model", "provider", "stage", "ms"), stages)
    for op in OPS:
        lines = [op_line(r) for r in _sorted(r for r in rows if r.op == op)]
        section(op, _OP_HEADER, lines)
    section("Host cost", _HOST_HEADER, _host_lines(rows))
    return text


def summary(rows: Sequence[Row], said: Sequence[str] = ()) -> str:
    """summary.md of one run."""
    checks = [f"`fastvit-kernels check`: {r.status}, {r.note}." for r in rows if r.op == "check"]
    return "\n".join(
        ["# Benchmark", "", conditions(rows) + ".", "", *checks, *said, "", *tables(rows)]
    )


def short_lines(rows: Sequence[Row], limit: int = 30) -> list[list[str]]:
    """Of each case: eager, the best other provider, ours, and the speed-ups of ours."""
    cases: dict[tuple[str, ...], dict[str, Row]] = {}
    for r in rows:
        if r.op in (*OPS, "vit") and (r.ms or r.status == FAILED):
            cases.setdefault((r.op, r.shape, r.dtype, r.mode), {})[r.provider] = r
    lines = []
    for key, found in cases.items():
        ours = [r for p, r in found.items() if p.startswith(("ours", "swapped"))]
        good = [r for r in ours if r.status == OK and r.ms]
        best = min(good, key=lambda r: r.device_ms or 0, default=None)
        peers = [r for r in found.values() if r not in ours and r.provider != BASELINE]
        peer = min((r for r in peers if r.device_ms), key=lambda r: r.device_ms or 0, default=None)
        eager = found.get(BASELINE)
        failed = [r.provider for r in found.values() if r.status == FAILED]
        lines.append(
            [
                " ".join(key),
                "" if eager is None else number(eager.device_ms),
                "" if peer is None else f"{number(peer.device_ms)} {peer.provider}",
                "" if best is None else f"{number(best.device_ms)} {best.provider}",
                "" if best is None else number(best.speedup, ".2f"),
                "FAILED: " + ", ".join(failed) if failed else "",
            ]
        )
    return lines[:limit]


SHORT_HEADER = ("case", "eager, ms", "best peer, ms", "best of ours, ms", "speed-up", "")

_HEAD = """# Benchmarks

This page is generated by `python -m bench docs` from `bench/results/`, all but the log at its end.
To measure on a GPU of your own, in ten minutes:

```
{command}
```

## How it is measured

- Every provider of a case runs in the same process on the same inputs, in {rounds} turns, one after
  the other in each turn. Figures are medians with the 20th and 80th percentile.
- `ms` is the time between two CUDA events around an eager call, with its host time where the GPU
  has to wait for it. Before each sample of an op a buffer of twice the L2 cache is written.
  `graph ms` is the replay of a CUDA graph of the same call, for calls below {small:.0f} ms: the
  GPU's own time. Rates and shares of ops use it where it is there, speed-ups where both sides
  have it.
- Forwards are those of training: they save for the backward. `bwd` is the backward alone.
- FLOP and bytes are those of the mathematics, given beside each op in `bench/bench_<op>.py`. Roofs
  are measured in the same run: a copy of 1 GiB and a large matmul. `of roof` is the time at the
  nearer roof over the time measured. MFU is a step's model FLOP over the matmul roof.
- A speed-up is over eager PyTorch and is given only where output and gradients kept the 2x rule
  (docs/numerics.md) on those very inputs; otherwise the row says FAILED.
- `amp` is fp32 parameters and residual stream under bf16 autocast.
- Whole models are trained as their users do: AdamW (fused), cross-entropy, random images on the
  GPU; data loading is not part of it.

"""

_EMPTY_LOG = """
## Predictions and outcomes

A prediction goes in before the run that decides it, the outcome after it. New rows go at the end.

| change | prediction (model) | outcome |
| --- | --- | --- |
"""


def docs(results: Sequence[tuple[str, Sequence[Row]]], former: str) -> str:
    """docs/benchmarks.md: a part for each committed result, and the former page's log."""
    from bench.harness import ROUNDS, SMALL_MS

    text = [_HEAD.format(command=COMMAND, rounds=ROUNDS, small=SMALL_MS).rstrip(), ""]
    if not any(_on_gpu(rows) for _, rows in results):
        text += ["## Results", "", f"On every GPU: {NOT_YET}.", "", *tables((), "###")]
    for name, rows in results:
        text += [f"## {name}", "", conditions(rows) + ".", ""]
        if _on_gpu(rows):
            text += tables(rows, "###")
        else:  # all that is measured without a GPU
            text += ["Host cost, one thread; what it is and is not: `bench/host.py`.", ""]
            text += markdown(_HOST_HEADER, _host_lines(rows))
    log = _EMPTY_LOG
    if LOG_START in former and LOG_END in former:
        log = former.split(LOG_START, 1)[1].split(LOG_END, 1)[0]
    return "\n".join([*text, LOG_START + log + LOG_END, ""])


def write_docs(path: Path = DOCS, committed: Path = COMMITTED) -> None:
    """Generate docs/benchmarks.md anew from the committed results."""
    found = [(p.parent.name, read_rows(p)) for p in sorted(committed.glob(f"*/{RESULTS}"))]
    former = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(docs(found, former), encoding="utf-8")
