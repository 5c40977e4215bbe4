"""docs/recipes: each runs as it stands, learns something, and goes on from its own checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for _package in ("timm", "transformers", "sklearn"):
    pytest.importorskip(_package)
pytestmark = pytest.mark.minutes
ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.py"))
# A torchvision without its compiled part imports once its operators are defined.
RUN = """
import runpy, sys
from fastvit_kernels.runtime.compat import define_torchvision_operators
define_torchvision_operators()
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def _lines(recipe, folder):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(recipe)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        env={**env, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_learns_and_resumes(recipe, tmp_path):
    assert len(recipe.read_text().splitlines()) <= 130
    first = _lines(recipe, tmp_path)
    before, after = map(float, re.findall(r"([\d.]+)%", first[-1]))
    assert after > before + 5, first[-1]
    again = _lines(recipe, tmp_path)
    assert again == first[-1:]  # nothing was left to train
