"""What a type checker says of calls to the public functions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CALLS = {  # what follows `fk.` -> whether it is right
    'create_vit("vit_mnist", num_classes=3)': True,
    'create_vit("vit_mnist", num_clases=3)': False,
    'create_vit("vit_mnist", global_pool="mean")': False,
    'swap_in(model, only="blocks.*", memory="low")': True,
    "swap_in(model, only=3)": False,
    'swap_in(model, compiler="inductr")': False,
    'swap_in(model, memory="lo")': False,
}


def test_pyright_catches_misspelt_arguments(tmp_path):
    pyright = shutil.which("pyright") or shutil.which("pyright", path=Path(sys.executable).parent)
    if pyright is None:
        pytest.skip("pyright is not installed")
    lines = ["import torch", "import fastvit_kernels as fk", "model = torch.nn.Linear(2, 2)"]
    (tmp_path / "calls.py").write_text("\n".join([*lines, *(f"fk.{call}" for call in CALLS)]))
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)]}))
    words = [pyright, "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    found = json.loads(done.stdout)["generalDiagnostics"]
    wrong = {d["range"]["start"]["line"] - len(lines) for d in found if d["severity"] == "error"}
    assert wrong == {i for i, right in enumerate(CALLS.values()) if not right}, found
