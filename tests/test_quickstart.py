"""docs/quickstart.ipynb: its outputs are kept, and its cells run."""

from __future__ import annotations

import json
import re

import pytest
from notebook import PAGE, execute, printed


def test_outputs_are_kept_and_name_no_machine():
    notebook = json.loads(PAGE.read_text())
    text = "\n".join(printed(notebook))
    assert text.count("of the matmul and attention FLOPs") == 2
    assert "images/s" in text and "original N ms, swapped N ms a step" in text
    assert text.count("image") >= 2, "two figures"
    assert "/site-packages/" not in PAGE.read_text()
    counts = [c["execution_count"] for c in notebook["cells"] if c["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_the_cells_run_and_print_what_is_kept():
    for package in ("nbclient", "ipykernel", "timm", "transformers", "sklearn", "matplotlib"):
        pytest.importorskip(package)
    kept = json.loads(PAGE.read_text())
    fresh = execute(PAGE)
    assert printed(fresh) == printed(kept)
    text = "".join(o.get("text", "") for cell in fresh.cells for o in cell.get("outputs", ()))
    (difference,) = re.findall(r"difference of a logit: (\S+)", text)
    assert float(difference) < 1e-5
    ((swapped, host),) = re.findall(r"swapped ([\d.]+), as it is ([\d.]+)", text)
    assert abs(float(swapped) - float(host)) < 1e-3
