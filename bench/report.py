"""Words and tables from rows: the table that ends a run, summary.md, docs/benchmarks.md, README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from bench import targets
from bench.plan import OPS
from bench.providers import BASELINE
from bench.roofs import OP as ROOF
from bench.rows import FAILED, OK, RESULTS, Row, conditions, read_rows
from fastvit_kernels.commands.training.checkpoint import write_text

NOT_YET = "not yet measured"
SUMMARY = "summary.md"
LOG_START, LOG_END = "<!-- log: kept by hand -->", "<!-- /log -->"
RESULTS_START, RESULTS_END = "<!-- results -->", "<!-- /results -->"
COMMAND = "python -m bench all --time-budget 540 --out DIR"
TARGETS = "python -m bench targets --out DIR"
PICTURES = ("targets", "vit", "ops", "roofline", "profile")  # beside a committed CSV
README = Path(__file__).parent.parent / "README.md"
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


def _host_table(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the host cost: a line per op and mode, a column per provider."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for r in _sorted(r for r in rows if r.op == "host"):
        us, low, high = (1e3 * (x or 0.0) for x in (r.ms, r.ms_p20, r.ms_p80))
        cells.setdefault((r.shape, r.mode), {})[r.provider] = f"{us:.1f} ({low:.1f} to {high:.1f})"
    providers = list(dict.fromkeys(name for line in cells.values() for name in line))
    header = ["op", "mode", *(f"{name}, us" for name in providers)]
    return header, [[*key, *(c.get(name, "") for name in providers)] for key, c in cells.items()]


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
    """All rows as sections of Markdown; the titles of those without rows in a fold at the end."""
    text: list[str] = []
    empty: list[list[str]] = []

    def section(title: str, header: Sequence[str], lines: list[list[str]]) -> None:
        if lines:
            text.extend([f"{level} {title}", "", *markdown(header, lines)])
        else:
            empty.append([title, NOT_YET])

    roofs = [
        [r.mode, r.dtype, r.shape, number(r.ms), number(r.tflops), number(r.gbps)]
        for r in rows
        if r.op == ROOF
    ]
    section("Roofs", ("roof", "dtype", "size", "ms", "TFLOP/s", "GB/s"), roofs)
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
    section("Host cost", *_host_table(rows))
    if empty:
        fold = ["<details><summary>What a run adds</summary>", ""]
        text += [*fold, *markdown(("section", "state"), empty), "</details>", ""]
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

## Half an hour on a GPU

```
python -m bench contact --seconds 540 --out DIR             # run it two or three times,
python -m bench contact --seconds 540 --out DIR --resume    # each goes on where the last has ended
```

`contact` checks first and times then. It compiles and runs every op, a model and every launch
config on all cores, each case in a process of its own; then, alone on the machine, it times what
the [targets](#targets) ask for beside every peer; what time is left goes to `tune`. `--dry-run`
lists the stages, their seconds and their commands, each of which you can run alone. The run ends
with what is wrong, then a line a target: ours, the best peer, their ratio, the share of the roof,
the verdict.

- Every result is in `DIR` the moment it exists: `log.txt`, `check.jsonl`, `results.csv`. Ctrl-C
  and SIGTERM lose nothing that was measured.
- Nothing outlives `--seconds`. A case that hangs is killed and named. One that loses the device
  (a CUDA error that a second synchronisation reports again) costs itself: its process ends, the
  next case has a fresh one.
- `--resume` skips what is done and what hung. After a mend of the sources it repeats the checks
  and our own timings, and keeps those of the peers.
- If the smoke check fails, the run stops there. Look at that case alone, under
  `compute-sanitizer` if need be.

Then draw and read: `python -m bench plot DIR` makes the pictures, `python -m bench compare A B`
lists the ratios of two runs, regressions first. `{targets}` measures the targets alone, and

```
{command}
```

all ops and models, most telling rows first; `DIR/summary.md` then has every row.

`python -m bench docs` writes this page from `bench/results/` and `bench/targets.py`; predictions
are kept by hand.

"""

_METHOD = """## How it is measured

- Providers run side by side: one process, the same inputs, {rounds} rounds in turn. Figures are
  medians with the 20th and 80th percentile.
- `ms`: between two CUDA events around an eager call, so it includes host time while the GPU waits
  for it. Before each sample of an op, a buffer of twice the L2 cache is written.
- `graph ms`: the replay of a CUDA graph of the same call, for calls below {small:.0f} ms: GPU
  time alone. Rates and shares of roof use it where it exists; speed-ups where both sides have it.
- Forwards save for the backward, as in training. `bwd` is the backward alone.
- `compile-max-autotune` of an op is the compiler's search without its CUDA graphs, for the
  harness replays everyone through its own; of a model it is the mode as users call it. No `graph
  ms` can be below the replay of a graph of one thread's kernel, which stands among the roofs.
- A target's ratio comes from the same turns, as graphs where both sides have one. A peer that
  breaks the 2x rule counts all the same, marked `*`.
- FLOP and bytes are counted from the formulas in `bench/bench_<op>.py`. Roofs come from the same
  run: a copy of 1 GiB and a large matmul. `of roof` is the time at the nearer roof over the
  measured time. MFU is a step's model FLOP over the matmul roof.
- A speed-up is over eager PyTorch, and only for a provider whose output and gradients pass the 2x
  rule ([numerics](numerics.md)) on those very inputs; otherwise the row says FAILED.
- `amp`: fp32 parameters and residual stream under bf16 autocast.
- Whole models train with fused AdamW, cross-entropy and random images already on the GPU; data
  loading is not included.

"""

_HOST_NOTE = (
    "One thread, tiny tensors (`bench/host.py`). Without a GPU, `no launch` does everything "
    "in a call but the launch. `eager` is PyTorch's own functions on the same tensors. Median (p20 "
    "to p80)."
)

NOTHING = (
    "**Nothing has run on a GPU yet, so this page claims no speed.** The tests run every kernel "
    "in Triton's\ninterpreter, and the compile gate builds each for seven GPU targets."
)

_EMPTY_LOG = """
## Predictions and outcomes

A prediction goes in before the run that decides it, the outcome after it. New rows go at the end.

| change | prediction (model) | outcome |
| --- | --- | --- |
"""


Result = tuple[str, Sequence[Row]]  # name of a folder, its rows


def _pictures(folder: Path, name: str, up: str) -> list[str]:
    """The pictures beside a CSV, as a page links them; `up` leads from the page to the root."""
    found = [p for p in PICTURES if (folder / name / f"{p}.png").exists()]
    return [f"![{p} of {name}]({up}bench/results/{name}/{p}.png)" for p in found]


def _verdicts(rows: Sequence[Row]) -> list[str]:
    """The targets that rows decide, as a table."""
    lines = [line for line in targets.lines(rows) if line[4]]
    return markdown(targets.HEADER, lines) if lines else []


def docs(results: Sequence[Result], former: str, committed: Path = COMMITTED) -> str:
    """docs/benchmarks.md: the committed results, the method, and the former page's log."""
    from bench.harness import ROUNDS, SMALL_MS

    text = [_HEAD.format(command=COMMAND, targets=TARGETS).rstrip(), ""]
    for name, rows in results:
        if _on_gpu(rows) and (table := _verdicts(rows)):
            text += [
                f"## Targets on {name}",
                "",
                *table,
                *_spaced(_pictures(committed, name, "../")),
            ]
    if not any(_on_gpu(rows) for _, rows in results):
        text += ["## On a GPU", "", f"No results: {NOT_YET}.", "", *tables((), "###")]
    for name, rows in results:
        if _on_gpu(rows):
            text += [f"## {name}", "", conditions(rows) + ".", "", *tables(rows, "###")]
        else:  # all that is measured without a GPU
            text += [f"## Host time per call: {name}", "", conditions(rows) + ".", ""]
            text += [
                _HOST_NOTE,
                "",
                *markdown(*_host_table(rows)),
            ]
    goals = targets.goal_lines([r for _, rows in results if _on_gpu(rows) for r in rows])
    text += ["## Targets", "", "For an H200, bf16, side by side in one run:", ""]
    text += markdown(("work", "against", "at least", "measured"), goals)
    text += [_METHOD.format(rounds=ROUNDS, small=SMALL_MS).rstrip(), ""]
    log = _EMPTY_LOG
    if LOG_START in former and LOG_END in former:
        log = former.split(LOG_START, 1)[1].split(LOG_END, 1)[0]
    return "\n".join([*text, LOG_START + log + LOG_END, ""])


def _spaced(lines: Sequence[str]) -> list[str]:
    return [part for line in lines for part in (line, "")]


def readme(results: Sequence[Result], former: str, committed: Path = COMMITTED) -> str:
    """The README with what was measured on a GPU, or that nothing was."""
    start, rest = former.split(RESULTS_START, 1)
    _, end = rest.split(RESULTS_END, 1)
    shown = []
    for name, rows in results:
        if _on_gpu(rows) and (table := _verdicts(rows)):
            pictures = _pictures(committed, name, "")[:1]
            shown += [f"On {name}, side by side in one run:", "", *table, *_spaced(pictures)]
    text = "\n".join(shown).strip() or NOTHING
    return f"{start}{RESULTS_START}\n{text}\n{RESULTS_END}{end}"


def write_docs(path: Path = DOCS, committed: Path = COMMITTED, front: Path = README) -> None:
    """Generate docs/benchmarks.md and the README's results anew from the committed ones."""
    found = [(p.parent.name, read_rows(p)) for p in sorted(committed.glob(f"*/{RESULTS}"))]
    former = path.read_text(encoding="utf-8") if path.exists() else ""
    write_text(path, docs(found, former, committed))
    write_text(front, readme(found, front.read_text(encoding="utf-8"), committed))
