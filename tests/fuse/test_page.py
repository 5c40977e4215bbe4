"""docs/swap.md: its rule is the package's, its reasons are said, and a rule is added as it says."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from swapped import images, vit

import fastvit_kernels as fk
from fastvit_kernels.fuse import rules
from fastvit_kernels.fuse.graph import Graph
from fastvit_kernels.fuse.rules import norms

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "swap.md").read_text()


def test_the_rule_on_the_page_is_the_packages():
    (shown,) = re.findall(r"^```python\n(def .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert shown == inspect.getsource(norms.layer_norm)
    for name in re.findall(r"`g\.(\w+)\(", PAGE):
        assert hasattr(Graph, name), name


def test_the_reasons_on_the_page_are_said():
    sources = "\n".join(p.read_text() for p in (ROOT / "fastvit_kernels" / "fuse").rglob("*.py"))
    rows = re.findall(r"^\| `(?:\.\.\. )?([a-z][^`]+)` \| ", PAGE, re.MULTILINE)
    reasons = [row.removesuffix(" ...") for row in rows if " " in row and "(" not in row]
    assert len(reasons) == 6
    for reason in reasons:
        assert reason in sources.replace("{number}", "two"), reason


def test_a_rule_is_added_as_the_page_says(monkeypatch):
    """One that raises leaves the graph as it was."""
    seen = []

    def declines(g, n):
        seen.append(n)
        norms.need(False, "a head of no interest")

    def raises(g, n):
        raise RuntimeError("half way")

    added = tuple(rules.Rule(rule, ("linear",)) for rule in (declines, raises))
    monkeypatch.setattr("fastvit_kernels.fuse.backend.RULES", added)
    model = vit()
    with pytest.warns(RuntimeWarning, match="is fused"):
        report = fk.swap_in(model, example=images())
    reasons = {row.reason for row in report.left}
    assert seen and report.share == 0 and "the rule raises failed: RuntimeError" in reasons, reasons
    torch.testing.assert_close(model(images()), vit()(images()))
