"""docs/recipes: each runs as it stands, learns something, and goes on from its own checkpoint."""

from __future__ import annotations

import re

import pytest
from docs_scripts import ROOT, run_script

for _package in ("timm", "transformers", "sklearn"):
    pytest.importorskip(_package)
pytestmark = pytest.mark.minutes
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.py"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_learns_and_resumes(recipe, tmp_path):
    assert len(recipe.read_text().splitlines()) <= 130
    first = run_script(recipe, tmp_path).splitlines()
    before, after = map(float, re.findall(r"([\d.]+)%", first[-1]))
    assert after > before + 5, first[-1]
    again = run_script(recipe, tmp_path).splitlines()
    assert again == first[-1:]  # nothing was left to train
