"""A family that is added by rows, as docs/swap.md shows it."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from fastvit_kernels import backend, swap_in, watch
from fastvit_kernels.swap import hosts, prove
from fastvit_kernels.swap.hosts import fused, transformers as table
from fastvit_kernels.swap.hosts.attention import Attention, AttentionRoles
from fastvit_kernels.swap.hosts.mlp import Mlp, MlpRoles
from tests.model_coverage.compare import randomize

PAGE = Path(__file__).parents[2] / "docs" / "swap.md"
SIZES = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=32,
    patch_size=16,
)


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


@pytest.fixture
def give(monkeypatch):
    """What adds a row of the table for a class of this file."""

    def added(cls, row):
        path = hosts.host_path(cls)
        monkeypatch.setitem(hosts.HOST_FILES, path.partition(".")[0], table.__name__)
        monkeypatch.setitem(table.TABLE, path, row)

    return added


class Tempered(nn.Module):
    """An MLP that reads a keyword that its signature does not name."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x, **options):
        return self.fc2(nn.functional.gelu(self.fc1(x))) * options.get("temperature", 1.0)


@pytest.mark.parametrize("name", ["temperature", "use_cache"])
def test_what_a_row_says_that_nothing_reads_is_proven(name, give):
    model, x = randomize(nn.Sequential(Tempered())), torch.randn(2, 5, 32)
    roles = MlpRoles("fc1", "fc2", "gelu")
    give(Tempered, fused.row(Mlp, roles=roles, unread=frozenset([name])))
    wanted = copy.deepcopy(model)[0](x, temperature=2.0)
    text = str(swap_in(model, explain=True))
    refused = "by the table of its library: it could not be tried: unsupported operand" in text
    assert refused == (name == "temperature"), text
    with backend("torch"):
        torch.testing.assert_close(model[0](x, temperature=2.0), wanted)


class Turned(nn.Module):
    """An attention that turns queries and keys by a function beside it."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(32, 96), nn.Linear(32, 32), 2

    def forward(self, x, rope=None):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, 2, -1).permute(2, 0, 3, 1, 4)
        q, k = (q, k) if rope is None else turn_pairs(q, k, *rope)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


def turn_pairs(q, k, cos, sin):
    half = [torch.cat((-b, a), -1) for a, b in (t.chunk(2, -1) for t in (q, k))]
    return tuple(t * cos + h * sin for t, h in zip((q, k), half, strict=True))


@pytest.mark.parametrize("rotate", ["turn_pairs", "turn_pear"])
def test_a_rotation_that_is_not_there_is_no_row(rotate, give):
    model = randomize(nn.Sequential(Turned()))
    roles = AttentionRoles(
        ("qkv",),
        "heads",
        "out",
        rope="rope",
        rotate=rotate,
        spread="*",
        kernel="half, cos before sin, this prefix",
    )
    give(Turned, fused.row(Attention, roles=roles))
    proven = "by the table of its library: proven" in str(swap_in(model, explain=True))
    assert proven == (rotate == "turn_pairs")
    angles = torch.randn(5, 16)  # as the host takes them, by sample and head
    rope = tuple(f(angles)[None, None] for f in (torch.cos, torch.sin))
    with backend("torch"):
        model[0](torch.randn(2, 5, 32), rope)


@pytest.mark.parametrize(("scale", "right"), [(8**-0.5, False), (16**-0.5, True)])
def test_a_scale_that_is_a_number_is_proven_for_heads_of_its_size(scale, right, give):
    """The host leaves it to torch: heads of 8, in a narrower copy, have another."""
    model = randomize(nn.Sequential(Turned()))
    roles = AttentionRoles(("qkv",), "heads", "out", scale=scale)
    give(Turned, fused.row(Attention, roles=roles))
    proven = "by the table of its library: proven" in str(swap_in(model, explain=True))
    assert proven == right


class Scaled(nn.Module):
    """LLaMA's RMSNorm: its result has the wider dtype of its input and its weight."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


@pytest.mark.parametrize("dtype", ["widest", "input", ""])
def test_the_dtype_of_a_norm_is_proven(dtype, give):
    model = nn.Sequential(Scaled())
    row = fused.row(fused.RmsNorm, roles=fused.NormRoles(bias="", dtype=dtype, rounded=True))
    give(Scaled, row)
    proven = "by the table of its library: proven" in str(swap_in(model, explain=True))
    assert proven == (dtype == "widest")
    with backend("torch"):
        assert model(torch.ones(2, 32, dtype=torch.bfloat16)).dtype is torch.float32


def test_searched_layers_take_what_their_models_hand_down(tower):
    """By no name of their signature: keywords that nothing inside reads."""
    explained(tower)
    with backend("torch"), watch(tower) as status:
        tower(torch.randn(1, 3, 32, 32), output_hidden_states=True)
    blocks = [row.way for row in status.modules if row.level == "block"]
    assert set(blocks) == {"fused"}, str(status)
