"""Scripts in processes of their own, as a reader of docs/ runs them: without the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
# A torchvision without its compiled part imports once its operators are defined.
RUNNER = """
import runpy, sys
from fastvit_kernels.runtime.compat import define_torchvision_operators
define_torchvision_operators()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run_script(script: Path, folder: Path, *launcher: str, **variables: str) -> str:
    """What it prints in this folder; `launcher` comes between Python and its file."""
    runner = folder / "run.py"
    runner.write_text(RUNNER)
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *launcher, str(runner), str(script)],
        cwd=folder,
        env={**env, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
