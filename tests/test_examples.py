"""docs/examples: each framework's script prints that the swapped run's losses are the host's."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = {  # script -> what it needs, processes
    "accelerate_loop": (("timm", "accelerate"), 1),
    "ddp": (("timm",), 2),
    "fsdp2": (("timm",), 2),
    "hf_trainer": (("transformers", "accelerate"), 1),
    "lightning_fit": (("timm", "lightning"), 1),
    "peft_quantised": (("transformers", "peft", "torchao"), 1),
    "timm_train": (("timm",), 1),
}
BACKEND = "fastvit_kernels"
# A torchvision without its compiled part imports once its operators are defined.
SITE = """
import torch
if not hasattr(torch.ops.torchvision, "nms"):
    from fastvit_kernels.runtime.compat import define_torchvision_operators
    define_torchvision_operators()
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_every_example_is_here():
    assert {p.stem for p in (ROOT / "docs" / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.minutes
@pytest.mark.parametrize("name", EXAMPLES)
def test_losses_are_the_hosts(name, tmp_path):
    packages, processes = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package)
    if name == "timm_train" and not entry_points(group="torch_dynamo_backends", name=BACKEND):
        pytest.skip("torch.compile knows our backend by name once the package is installed")
    script = ROOT / "docs" / "examples" / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 60
    runner = tmp_path / "run.py"
    runner.write_text(SITE)
    words = [sys.executable, str(runner), str(script)]
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        words = [sys.executable, *torchrun, *words[1:]]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "losses equal over " in done.stdout, done.stdout
