"""Which models of the installed host libraries swap_in understands, and how: coverage.csv.

Each model is built at its own size without memory, swapped, and given a row: its level and, where
that is not the block level, why. `--verify` also makes each small and compares the swapped model
with the host's in a training step in float64; plain ViTs are compared by the 2x rule too, through
the kernels and through PyTorch. `--forms` takes one model of those that differ in sizes alone.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib.metadata
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastvit_kernels.runtime.backend import Backend, backend
from fastvit_kernels.runtime.compat import define_torchvision_operators
from fastvit_kernels.swap.apply import swap_in
from fastvit_kernels.swap.compare import model_errors
from fastvit_kernels.swap.facts import CONTAINERS, host_of, is_rate
from fastvit_kernels.swap.hosts import host_path
from fastvit_kernels.swap.hosts.fused import Fused
from fastvit_kernels.swap.report import SwapReport, ancestors

from . import model_zoo, shrink
from .compare import difference, fingerprint, randomize
from .model_zoo import HOSTS

TABLE = Path(__file__).with_name("coverage.csv")
TRIED = 5  # cut models of a name of which the host refuses a training step


@dataclasses.dataclass
class Row:
    host: str
    model: str
    level: str
    reason: str
    verified: str = ""


def swapped_parts(model: nn.Module) -> frozenset[Any]:
    """The swapped modules of a model but for their sizes: class, place in which parent, settings
    that are no numbers."""
    modules, found = dict(model.named_modules()), set()
    for name, module in modules.items():
        if isinstance(module, Fused):
            above = [modules[a] for a in ancestors(name.rpartition(".")[0]) if a in modules]
            parent = next((m for m in above if type(m) not in CONTAINERS), module)
            flags = {k: v for k, v in vars(module).items() if isinstance(v, (bool, str))}
            flags.pop("training")
            place = re.sub(r"\d+", "i", name.rpartition(".")[2])
            host = host_path(type(module).fused_host)
            parts = host_path(host_of(type(parent))), place, host, tuple(sorted(flags.items()))
            found.add((*parts, tuple(n for n, p in module._parameters.items() if p is None)))
    return frozenset(found)


def form_of(model: nn.Module) -> frozenset[Any]:
    """The modules of a model but for their sizes and number: class, place, settings, the ranks of
    their tensors. Of a module's numbers above 1 it has which are equal."""
    found = set()
    for name, module in model.named_modules():
        order: dict[int, int] = {}

        def form(key: str, value: Any, order: dict[int, int] = order) -> Any:
            if isinstance(value, (tuple, list)):
                return tuple(form(key, v) for v in value)
            if type(value) is int and value > 1:
                return "size", order.setdefault(value, len(order))
            simple = value is None or isinstance(value, (bool, str, int))
            return value if simple else "a rate" if is_rate(key, value) else type(value)

        own = [(k, form(k, v)) for k, v in vars(module).items() if not k.startswith("_")]
        tensors = (*module._parameters.items(), *module._buffers.items())
        ranks = tuple((k, None if t is None else t.ndim) for k, t in tensors)
        found.add((re.sub(r"\d+", "i", name), type(module), tuple(own), ranks))
    return frozenset(found)


class Verifier:
    """Models small enough to run, by host and name: a training step in float64; for names that can
    be made narrow, the 2x rule through each of the backends.

    Equal narrow models are run once; a cut model is run where it has swapped parts, or places for
    them, that no model before it had.
    """

    def __init__(self, backends: Sequence[Backend]):
        self.backends = backends
        self.known: dict[str, str] = {}
        self.parts: set[Any] = set()  # of the models that passed
        self.not_run: dict[str, str] = {}  # name -> why
        self.parts_of: dict[str, frozenset[Any]] = {}  # of those names

    def __call__(self, host: str, name: str, swapped: nn.Module | None) -> str:
        """ "yes", "float64", "same parts", what is wrong, or "" for a name that was not run.

        Args:
            swapped: the model at its own size, swapped; None where that does not build.
        """
        parts = frozenset() if swapped is None else swapped_parts(swapped)
        torch.manual_seed(0)
        found = self._narrow(host, name)
        if found is None:
            if swapped is not None and not parts - self.parts:
                return "same parts" if parts else "nothing swapped"
            found = self._cut(host, name)
        if found in ("yes", "float64"):
            self.parts |= parts
        elif not found:
            self.parts_of[name] = parts
        return found

    def again(self, name: str) -> str:
        """For a name that was not run, once all others were: the same word as for the others."""
        parts = self.parts_of.get(name)
        return "same parts" if parts and not parts - self.parts else ""

    def _narrow(self, host: str, name: str) -> str | None:
        try:
            found = model_zoo.small(host, name)
        except Exception:  # a host's name that does not get narrow
            return None
        if found is None:
            return None
        model, inputs = found
        key = fingerprint(randomize(model).eval(), inputs)
        if key not in self.known:
            self.known[key] = self._run(model, inputs)
        return self.known[key]

    def _cut(self, host: str, name: str) -> str:
        candidates, reason = shrink.candidates(host, name), ""
        for _ in range(TRIED):
            try:
                model, inputs = next(candidates)
            except shrink.NotShrunk as error:
                reason = reason or str(error)
                break
            try:
                found = difference(randomize(model), inputs)
            except shrink.NotShrunk as error:
                reason = str(error)
                continue
            return f"WRONG: {found}" if found else "float64"
        self.not_run[name] = reason
        return ""

    def _run(self, model: nn.Module, inputs: Any) -> str:
        found = difference(model, inputs)
        if found:
            return f"WRONG: {found}"
        model.eval()
        for chosen in self.backends:
            with backend(chosen):
                failed = [e for e in model_errors(model, inputs) if not e.passed]
            if failed:
                return f"WRONG ({chosen}): {failed[0]}"
        return "yes"


def _runs(found: Sequence[Row]) -> str:
    """How the rows were verified, in a word or two each, and how many of each."""
    words = [row.verified.partition(":")[0].partition(" (")[0] or "not run" for row in found]
    counted = Counter("as another" if word.startswith("as ") else word for word in words)
    return ", ".join(f"{n} {word}" for word, n in counted.items())


def _reason(report: SwapReport) -> str:
    """Why a model is not at the block level, in a few words."""
    if report.level == "block":
        return ""
    found = Counter(
        f"{row.host}: {row.reason}" for row in report.left if row.reason != "a plain product"
    )
    parts = Counter(s.level for s in report.swapped)
    swapped = ", ".join(f"{n} {level}" for level, n in parts.items())
    why = (
        "; ".join(reason for reason, _ in found.most_common(2)) or "its blocks have no fused class"
    )
    return f"{swapped or 'nothing'}; {why}"


def _row(host: str, name: str, verify: Verifier | None, forms: dict[Any, Row] | None) -> Row:
    _, build = model_zoo.FULL[host]
    try:
        with model_zoo.on_meta():
            model = build(name)
    except Exception as error:  # a host's model that does not build is the host's business
        model, first = None, (str(error) or type(error).__name__).splitlines()[0]
        row = Row(host, name, "not built", first[:80])
    else:
        form = None if forms is None else form_of(model)
        other = (forms or {}).get(form)
        if other is not None and (verify is None or other.verified):
            return Row(host, name, other.level, other.reason, f"as {other.model}")
        try:
            report = swap_in(model)
        except Exception as error:
            wrong = f"WRONG: swap_in raises {type(error).__name__}: {error}"
            return Row(host, name, "none", "", wrong)
        row = Row(host, name, report.level, _reason(report))
        if forms is not None:
            forms[form] = row
    if verify is not None:
        row.verified = verify(host, name, model)
    return row


def rows(
    prefixes: tuple[str, ...],
    verify: Verifier | None,
    hosts: Sequence[str] = HOSTS,
    one_of_each: bool = False,
) -> Iterator[Row]:
    """A row for each model of these hosts whose name begins with one of the prefixes.

    Args:
        one_of_each: swap and run one of the models that differ in sizes alone.
    """
    forms: dict[Any, Row] | None = {} if one_of_each else None
    for host in hosts:
        names, _ = model_zoo.FULL[host]
        for name in names():
            if name.startswith(prefixes):
                yield _row(host, name, verify, forms)


COLUMNS = ("host", "version", "model", "level", "run", "why not block")


def write_table(found: Sequence[Row], out: Path) -> None:
    versions = {host: importlib.metadata.version(host) for host in {row.host for row in found}}
    with out.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(COLUMNS)
        rows.writerows(
            (r.host, versions[r.host], r.model, r.level, r.verified, r.reason) for r in found
        )


def counts(found: Sequence[Row]) -> Iterator[str]:
    """How many models are at each level, by host."""
    for host in dict.fromkeys(row.host for row in found):
        levels = Counter(row.level for row in found if row.host == host)
        yield f"{host}: " + ", ".join(f"{n} {level}" for level, n in levels.items())


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.model_coverage",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=TABLE, metavar="FILE", help="file to write")
    parser.add_argument(
        "--verify", action="store_true", help="run small models beside the host's (slow)"
    )
    parser.add_argument(
        "--models", nargs="*", default=[""], metavar="PREFIX", help="only names that begin so"
    )
    parser.add_argument(
        "--hosts", nargs="*", choices=HOSTS, default=HOSTS, help="only models of these"
    )
    parser.add_argument(
        "--forms", action="store_true", help="run one of the models that differ in sizes alone"
    )
    parser.add_argument(
        "--backends",
        nargs="*",
        choices=("auto", "torch"),
        default=["auto", "torch"],
        help="what --verify runs the 2x rule through; none: float64 alone",
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(words)
    os.environ["HF_HUB_OFFLINE"] = "1"  # a model that wants weights of another one is not built
    define_torchvision_operators()
    warnings.filterwarnings("ignore")
    verify = Verifier(arguments.backends) if arguments.verify else None
    found, start = [], time.monotonic()
    for row in rows(tuple(arguments.models), verify, arguments.hosts, arguments.forms):
        found.append(row)
        seconds = time.monotonic() - start
        why = row.verified or (verify.not_run.get(row.model, "") if verify else "")
        print(f"{seconds:7.1f} s  {row.host} {row.model}: {row.level} {why}", flush=True)
    if verify is not None:
        for row in found:
            row.verified = row.verified or verify.again(row.model)
    if not found:
        parser.error(f"no model's name begins with {' or '.join(arguments.models)}")
    if verify is not None and not any(row.verified for row in found):
        parser.error("no model of these could be verified")
    write_table(found, arguments.out)
    wrong = [r for r in found if r.verified.startswith("WRONG")]
    for row in wrong:
        print(f"{row.model}: {row.verified}", file=sys.stderr)
    print(*counts(found), sep="\n")
    runs = f"; {_runs(found)}" if verify else ""
    print(f"wrote {arguments.out}: {len(found)} models, {len(wrong)} wrong{runs}")
    return 1 if wrong else 0
