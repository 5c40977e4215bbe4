"""A family that is added by rows, as docs/swap.md shows it."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch

from fastvit_kernels import swap_in
from fastvit_kernels.swap import prove
from fastvit_kernels.swap.hosts import transformers as table
from tests.model_coverage.compare import randomize

PAGE = Path(__file__).parents[2] / "docs" / "swap.md"
SIZES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32,
    patch_size=16,
)  # fmt: skip


def rows(page: str) -> str:
    """The block of code under its heading."""
    section = page.partition("## A family by rows")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]


@pytest.fixture
def tower(monkeypatch):
    """OWL-ViT's tower of images, and its host's table as a person would edit it."""
    from transformers import OwlViTVisionConfig
    from transformers.models.owlvit.modeling_owlvit import OwlViTVisionModel

    monkeypatch.setattr(table, "TABLE", dict(table.TABLE))
    monkeypatch.setattr(prove, "_proofs", {})
    return randomize(OwlViTVisionModel(OwlViTVisionConfig(**SIZES)))


def explained(model) -> str:
    report = swap_in(model, explain=True)
    assert report.level == "block", str(report)
    return str(report)


def test_the_page_adds_a_family(tower):
    exec(rows(PAGE.read_text()), {})
    host, x = copy.deepcopy(tower), torch.randn(2, 3, 32, 32)
    text = explained(tower)
    assert "OwlViTEncoderLayer\n  block, by the table of its library: proven" in text
    assert "OwlViTMLP\n  mlp, by the table of its library: proven" in text
    found = []
    for model in (tower, host):
        torch.manual_seed(1)
        y = model.train()(x).last_hidden_state
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters() if p.grad is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("searched", [True, False])
def test_what_a_row_adds_to_the_search(tower, searched):
    """A hook on one part calls that part alone."""
    if not searched:
        exec(rows(PAGE.read_text()), {})
    assert ("by the table" in explained(tower).partition("OwlViTMLP")[2]) is not searched
    tower.vision_model.encoder.layers[0].mlp.fc1.register_forward_hook(lambda *_: None)
    blocked = tower.vision_model.encoder.layers[0].mlp.fused_blocked()
    assert blocked == ("fc1 is hooked" if searched else None)


@pytest.mark.parametrize("wrong", ['scale="dropout"', '"fc2", "activation_fn", "fc1"'])
def test_a_wrong_row_is_refused(tower, wrong):
    right = {'scale="dropout"': 'scale="scale"'}.get(wrong, '"fc1", "activation_fn", "fc2"')
    code = rows(PAGE.read_text())
    assert right in code
    exec(code.replace(right, wrong), {})
    text = explained(tower)  # the search finds it
    kind = "attention" if "scale" in wrong else "mlp"
    assert re.search(rf"  {kind}, by the table of its library: (?!proven)", text), text


def test_a_child_that_no_role_names_is_refused(tower):
    exec(rows(PAGE.read_text()), {})
    mlp = tower.vision_model.encoder.layers[0].mlp
    mlp.another = torch.nn.Linear(2, 2)
    assert "it has a part that we do not know: another" in str(swap_in(tower, explain=True))
