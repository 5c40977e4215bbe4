"""python -m tests.fuse.lookalikes [--part I/N] [WORD ...]: every look-alike whose id has the words.

The suite runs what `of_the_suite` picks: the tables that are written out, and some of the products
of block, place and change.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterable

import torch

from tests.fuse import changes, looks_attention, looks_effects, looks_layers
from tests.fuse.hosts import Host, Result, run

# A row that a boolean mask hides whole is NaN in the host as here; the host's masked_fill then
# gives scores a gradient of 0, ours NaN.
HIDDEN_ROWS = {"mask - of inputs, row", "mask - of inputs, all", "mask - of a buffer"}
# At these a rule once failed with an error of torch's own.
RAISED = ("scores - fp8 and back", "rms - input - fp8 and back", "mha - output - turned in place")


def written_out() -> list[Host]:
    return [
        *looks_attention.attention_hosts(),
        *looks_layers.layer_hosts(),
        *looks_layers.empty_batches(),
        *looks_effects.effect_hosts(),
    ]


def products() -> list[Host]:
    return [
        *looks_attention.layouts(),
        *looks_effects.state_hosts(),
        *changes.all_changes(),
        *changes.all_writes(),
    ]


def of_the_suite() -> list[Host]:
    """Those without a sibling of other sizes, and a sample of the rest."""
    tables = written_out()
    siblings = [h for h in tables if " of tokens - " in h.id or " of a square - " in h.id]
    first = [h for h in tables if h not in siblings and h.id not in HIDDEN_ROWS]
    made = products()
    raised = [h for h in made if h.id.endswith(RAISED)]
    return first + siblings[::8] + raised + random.Random(0).sample(made, 45)


def wrong_of(host: Host) -> tuple[str, Result | None]:
    """A line that says what is wrong with a host, or nothing."""
    try:
        result = run(host)
    except Exception as error:
        return f"cannot be compared: {type(error).__name__}: {error}"[:300], None
    facts = "; ".join(f"{name}: {why}" for name, why in result.wrong.items())
    return facts and f"{facts[:300]} after {dict(result.rules)}", result


def run_all(hosts: Iterable[Host]) -> int:
    """Print what is wrong; how many are."""
    started, count, bad, fired, own = time.perf_counter(), 0, 0, 0, 0
    for host in hosts:
        count += 1
        line, result = wrong_of(host)
        bad += bool(line)
        fired += bool(result and result.rules)
        own += bool(result and result.dynamo)
        if line:
            print(f"{host.id}: {line}", flush=True)
    seconds = time.perf_counter() - started
    print(f"{count} hosts, {bad} wrong, {fired} with rules that fired, {own} in which plain")
    print(f"torch.compile is not the host itself; {seconds:.0f} s")
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--part", default="0/1", help="I/N: every Nth from the Ith on")
    given = parser.parse_args()
    part, of = map(int, given.part.split("/"))
    torch.set_num_threads(1)
    hosts = [h for h in written_out() + products() if all(w in h.id for w in given.words)]
    return min(1, run_all(hosts[part::of]))


if __name__ == "__main__":
    raise SystemExit(main())
