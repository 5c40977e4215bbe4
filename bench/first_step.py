"""Time to the first step in a new process: with empty caches of kernels, then with full ones.

What a user waits for: from the model's construction to the end of one training step, without the
imports. The caches of Triton and torch.compile lie in a folder of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from bench.bench_vit import provider_of, row_of
from bench.models import WAYS, Case, Runner
from bench.rows import ERROR, TIMEOUT, Row

OP = "first_step"
MODES = ("cold", "warm")
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def main(argument: str) -> int:
    """What the new process does: print the seconds as JSON."""
    wanted = json.loads(argument)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)  # the context is not ours to time
    started = time.perf_counter()
    with provider_of(wanted["provider"]).context():
        runner = Runner(Case(**wanted["case"]), WAYS[wanted["provider"]], device)
        runner.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"seconds": time.perf_counter() - started}))
    return 0


def measure_first_step(case: Case, provider: str, timeout: float) -> Iterator[Row]:
    """A row for cold and one for warm caches; its ms is the time to the end of the first step."""
    argument = json.dumps({"case": asdict(case), "provider": provider})
    command = [sys.executable, "-m", "bench.first_step", argument]
    root = Path(__file__).parent.parent
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder) / name) for name in CACHES}
        path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        for mode in MODES:
            row = row_of(case, provider, OP, mode)
            try:
                done = subprocess.run(
                    command, env={**os.environ, **caches, "PYTHONPATH": path}, timeout=timeout,
                    capture_output=True, text=True,
                )  # fmt: skip
                seconds = json.loads(done.stdout.strip().splitlines()[-1])["seconds"]
            except subprocess.TimeoutExpired:
                yield replace(row, status=TIMEOUT, note=f"not finished after {timeout:.0f} s")
                return
            except (ValueError, LookupError):
                lines = done.stderr.strip().splitlines() or ["no output"]
                yield replace(row, status=ERROR, note=lines[-1][:300])
                return
            yield replace(row, ms=1e3 * seconds, ms_p20=None, samples=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
