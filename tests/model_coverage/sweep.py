"""How much of each model of the installed host libraries our backend fuses: coverage.csv.

Each model is made small and runs in a process of its own, under
torch.compile(backend="fastvit_kernels", options={"compiler": "eager"}) and as it is: a training
step in float64, with outputs, all gradients, buffers and random numbers the same; and, one by its
name, outputs and gradients by the 2x rule in eval mode in fp32, or of a training step swapped in by
block under bf16 autocast. Models that are the same once they are small run once; in float64 alone
run those that differ from an earlier one in depth and sizes alone, those of which our ops have
little, and heads on a base model of transformers. A run that was ended goes on where it was.
--sample N holds the shares of N of the models against the table; with --inductor the training step
in float64 alone, compiled by Inductor, with --batches that step and one of a larger batch by
swap_in, whose graph takes both.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch

from fastvit_kernels.fuse import dynamo
from fastvit_kernels.fuse.report import GraphReport
from fastvit_kernels.runtime.compat import define_torchvision_operators

from . import model_zoo, shrink
from .compare import Found, by_2x_rule, fingerprint, in_float64, kind_of, randomize
from .model_zoo import HOSTS

TABLE = Path(__file__).with_name("coverage.csv")
TRIED = 5  # cut models of a name of which the host refuses a training step
REASONS = 3  # that a row names
Judge = Callable[["Row", Any, Any], "Row"]  # of a row, a small model and its inputs
AS_DYNAMO = "as torch.compile, not as the host"
EVAL, BLOCKS = "in eval mode", "by block in bf16"  # ways by the 2x rule
SHARES = ("share", "share_float64", "share_blocks")
LITTLE = 10.0  # percent in our ops: a convnet, of which other ways tell no more
NEAR = 2.0  # points of a share that a sample may lose


@dataclass
class Row:
    """A line of coverage.csv.

    Attributes:
        share: percent of the products' and attention's FLOPs that run in our ops, in fp32 in eval
            mode, in float64 in training (a host that rounds to fp32 inside is left as it is), and
            of the blocks that repeat under bf16 autocast; "" if not run. Where only float64 ran,
            `share` is its share.
        run: "same", "as torch.compile, not as the host: what", "not run: why", or "WRONG: what".
        left: the reasons for the rest, the most FLOPs first.
    """

    host: str
    version: str
    model: str
    share: str = ""
    share_float64: str = ""
    share_blocks: str = ""
    graphs: str = ""
    run: str = ""
    left: str = ""


def share_of(reports: Sequence[GraphReport]) -> float:
    flops = sum(r.flops for r in reports)
    return 100.0 * sum(r.fused_flops for r in reports) / flops if flops else 0.0


def reasons_of(reports: Sequence[GraphReport]) -> str:
    """Why what is left is left: "softmax of other scores (12.0 %)"."""
    flops, found = sum(r.flops for r in reports), Counter[str]()
    for report in reports:
        for left in report.left:
            found[f"{left.op}: {left.reason}"] += left.flops
    return "; ".join(
        f"{why} ({100 * n / flops:.1f} %)" for why, n in found.most_common(REASONS) if n
    )


def small_models(host: str, name: str) -> Iterator[tuple[Any, Any]]:
    """Small versions of a model, with inputs, the best first. Raises: NotShrunk after the last."""
    try:
        found = model_zoo.small(host, name)
    except Exception:  # a host's name that does not get narrow
        found = None
    if found is not None:
        yield found
    yield from shrink.candidates(host, name)


def judge_step(row: Row, model: Any, inputs: Any, **way: Any) -> Row:
    """The row with what a training step in float64 gave, in a way of `in_float64`.

    Raises: NotShrunk where the host refuses.
    """
    return with_step(row, in_float64(model, inputs, **way))


def with_step(row: Row, found: Found) -> Row:
    row.share = row.share_float64 = f"{share_of(found.reports):.1f}"
    row.left = reasons_of(found.reports)
    row.graphs = str(len(found.reports))
    row.run = f"WRONG: {found.wrong}"[:300] if found.wrong else "same"
    if found.dynamo:
        row.run = f"{AS_DYNAMO}: {found.dynamo}"[:200]
    return row


def judge(row: Row, model: Any, inputs: Any) -> Row:
    """The row with what a small model gave in float64 and, unless our ops have little of it, in the
    way of its name. Raises: as `judge_step`."""
    exact = in_float64(model, inputs)
    with_step(row, exact)
    if row.run.startswith(AS_DYNAMO) or share_of(exact.reports) < LITTLE:
        return row
    way = way_of(row.model)
    try:
        with patch.object(dynamo, "let_batch_vary", lambda *_: None):  # see judge_batches
            if way == EVAL:
                found = by_2x_rule(model, inputs, training=False)
            else:
                found = by_2x_rule(model, inputs, True, torch.bfloat16, oracle=exact.host)
    except shrink.NotShrunk as refused:
        row.left += f"; not run {way}: {refused}"
        return row
    if way == EVAL:
        row.share, row.graphs = f"{share_of(found.reports):.1f}", str(len(found.reports))
        row.left = reasons_of(found.reports)
    else:
        row.share_blocks = f"{share_of(found.reports):.1f}"
    if found.wrong:
        row.run = f"WRONG {way}: {found.wrong}"[:300]
    return row


def way_of(name: str) -> str:
    """One of the two ways by the 2x rule, always the same of a name."""
    return (EVAL, BLOCKS)[crc32(name.encode()) % 2]


judge_inductor = partial(judge_step, compiler="inductor")
judge_batches = partial(judge_step, two_batches=True)


def run_model(
    host: str, name: str, known: Mapping[str, Row], judged: Judge = judge
) -> tuple[Row, list[str]]:
    """The row of one model, and keys of `known` by which it is found again: its fingerprint, whose
    row another model of the same takes, and its kind, which `judge` need not judge again."""
    row = Row(host, model_zoo.version_of(host), name)
    torch.manual_seed(0)
    candidates, refused = small_models(host, name), ""
    for _ in range(TRIED):
        try:
            model, inputs = next(candidates)
            key, kind = keys = [fingerprint(model, inputs), kind_of(model)]
            if key in known:
                return replace(known[key], host=row.host, version=row.version, model=name), keys
            if judged is judge and (kind in known or model_zoo.has_base(host, name)):
                judged = judge_step
            model = randomize(model)
            return judged(row, model, inputs), keys
        except (shrink.NotShrunk, StopIteration) as error:
            refused = refused or str(error) or "it has no small version"
    row.run = f"not run: {refused}"[:200]
    return row, []


def spare_memory_work() -> None:
    """For a model's process: what it has imported is no garbage, what Dynamo makes lives as long as
    the trace, and glibc would hand freed memory back to be cleared page by page."""
    gc.freeze()
    gc.disable()
    torch._dynamo.config.run_gc_after_compile = False
    with suppress(AttributeError, OSError):  # another C library
        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, (1 << 31) - 1)


def _send(pipe: Any, host: str, name: str, known: Mapping[str, Row], judged: Judge) -> None:
    warnings.filterwarnings("ignore")
    spare_memory_work()
    try:
        found = run_model(host, name, known, judged)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        found = Row(host, model_zoo.version_of(host), name, run=f"WRONG: {text}"[:300]), []
    pipe.send(found)
    pipe.close()


class Job:
    """A model in a process of its own: a fork, since importing takes longer than most models."""

    def __init__(
        self,
        host: str,
        name: str,
        known: Mapping[str, Row],
        judged: Judge,
        limit: float,
        end: int,  # of the names that wait: 0 or -1
    ):
        self.host, self.name, self.limit, self.end = host, name, limit, end
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=_send, args=(theirs, host, name, known, judged))
        self.start = time.monotonic()
        self.process.start()
        theirs.close()

    def done(self) -> tuple[Row, list[str]] | None:
        """What `run_model` gave, or None while it runs."""
        keys, row = [], Row(self.host, model_zoo.version_of(self.host), self.name)
        if self.pipe.poll():
            try:
                row, keys = self.pipe.recv()
            except EOFError:
                self.process.join()
                row.run = f"not run: the process ended with {self.process.exitcode}"
        elif time.monotonic() - self.start > self.limit:
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
            row.run = f"not run: more than {self.limit:.0f} s"
        else:
            return None
        self.process.join()
        return row, keys


def run_all(
    names: Sequence[tuple[str, str]], jobs: int, limit: float, judged: Judge = judge
) -> Iterator[Row]:
    """A row for each, in the order in which they end."""
    waiting, running = list(names), []
    known: dict[str, Row] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            # Neighbours are often the same small model, which shall not run twice at once.
            end = -1 if any(job.end == 0 for job in running) else 0
            running.append(Job(*waiting.pop(end), known, judged, limit, end))
        for job in list(running):
            if (ended := job.done()) is not None:
                running.remove(job)
                row, keys = ended
                for key in keys:
                    known.setdefault(key, row)
                yield row
        connection.wait([job.pipe for job in running], timeout=1.0)


def read_table(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [Row(**row) for row in csv.DictReader(file)]


def write_table(found: Sequence[Row], path: Path) -> None:
    places = {host: i for i, host in enumerate(HOSTS)}
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, [f.name for f in fields(Row)], lineterminator="\n")
        table.writeheader()
        table.writerows(map(vars, sorted(found, key=lambda r: (places[r.host], r.model))))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.model_coverage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, default=TABLE, metavar="FILE", help="file to write, and to go on with")
    add("--models", nargs="*", default=[""], metavar="PREFIX", help="only names that begin so")
    add("--hosts", nargs="*", choices=HOSTS, default=HOSTS, help="only models of these")
    add("--jobs", type=int, default=2, help="models at once (default 2)")
    add("--limit", type=float, default=300.0, metavar="SECONDS", help="of a model (default 300)")
    add("--sample", type=int, metavar="N", help="run N of the models, held against the file's rows")
    way = parser.add_mutually_exclusive_group().add_argument
    way("--inductor", action="store_true", help="of a sample the step in float64, by Inductor")
    way("--batches", action="store_true", help="of a sample two batch sizes in float64, swapped in")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(words)
    os.environ["HF_HUB_OFFLINE"] = "1"  # a model that wants weights of another one is not built
    define_torchvision_operators()
    warnings.filterwarnings("ignore")
    prefixes = tuple(arguments.models)
    every = [(h, n) for h in arguments.hosts for n in model_zoo.names(h) if n.startswith(prefixes)]
    for way in ("inductor", "batches"):
        if getattr(arguments, way) and arguments.sample is None:
            parser.error(f"--{way} runs a sample: give --sample N too")
    if not every:
        parser.error(f"no model's name begins with {' or '.join(prefixes)}")
    model_zoo.import_all(arguments.hosts)
    judge(Row("nn", "", ""), *small_models("nn", "TransformerEncoder").__next__())  # imports, too
    gc.freeze()  # what the processes of all models share
    found = {(r.host, r.model): r for r in read_table(arguments.out)}
    if arguments.sample is not None:
        judged = judge_inductor if arguments.inductor else judge
        judged = judge_batches if arguments.batches else judged
        return check_sample(every, arguments.sample, found, arguments.jobs, arguments.limit, judged)
    new = [name for name in every if not _is_done(found.get(name))]
    for row in told(new, arguments.jobs, arguments.limit):
        found[row.host, row.model] = row
        write_table(list(found.values()), arguments.out)
    rows = [found[name] for name in every if name in found]
    wrong = [row for row in rows if row.run.startswith("WRONG")]
    for row in wrong:
        print(f"{row.model}: {row.run}", file=sys.stderr)
    print(f"wrote {arguments.out}: {len(rows)} models, {len(wrong)} wrong")
    return 1 if wrong else 0


def told(
    names: Sequence[tuple[str, str]], jobs: int, limit: float, judged: Judge = judge
) -> Iterator[Row]:
    """The rows of `run_all`, each with a line of what it found."""
    print(f"{len(names)} models, {jobs} at once", flush=True)
    start = time.monotonic()
    for number, row in enumerate(run_all(names, jobs, limit, judged), 1):
        seconds = time.monotonic() - start
        share = f"{row.share or row.share_float64} %" if row.share_float64 else ""
        print(f"{seconds:7.1f} s  {number} {row.host} {row.model}: {share} {row.run}", flush=True)
        yield row


def check_sample(
    every: Sequence[tuple[str, str]],
    count: int,
    table: Mapping[tuple[str, str], Row],
    jobs: int,
    limit: float,
    judged: Judge,
) -> int:
    """Run models evenly from all, and hold them against the table. Returns: 1 where one is wrong,
    is not run and was, or lost more than NEAR points of a share."""
    count = min(count, len(every))
    sample = [every[i * len(every) // count] for i in range(count)]
    failed = []
    for row in told(sample, jobs, limit, judged):
        lost = lost_shares(row, table.get((row.host, row.model), row))
        if row.run.startswith("WRONG") or lost:
            failed.append(f"{row.model}: {row.run} {'; '.join(lost)}")
    print(*failed, sep="\n", file=sys.stderr)
    print(f"{len(sample)} models, {len(failed)} not as the table has them")
    return 1 if failed else 0


def lost_shares(row: Row, before: Row) -> list[str]:
    """What the ways of a row that ran have lost; all ways, where none did."""
    found = []
    for name in [n for n in SHARES if getattr(row, n)] or SHARES:
        share, was = getattr(row, name), getattr(before, name)
        if float(was or 0) - float(share or 0) > NEAR:
            found.append(f"{share or 'no'} {name} for {was}")
    return found


def _is_done(row: Row | None) -> bool:
    return row is not None and row.version == model_zoo.version_of(row.host)
