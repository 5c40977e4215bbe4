"""`python -m tests.traffic`: what it counts, and that our blocks keep to what is promised."""

import inspect
import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import SelectiveCheckpointContext

from fastvit_kernels.runtime.triton import has_gluon

pytest.importorskip("timm")
traffic = pytest.importorskip("tests.traffic.blocks")

TOKENS, C = traffic.BATCH * 197, 384
LAUNCHES = 28  # of a block, forward and backward


def _units(n: int) -> float:
    return n / (TOKENS * C)


class _TwoLinear(nn.Module):
    """Costs that can be told by hand."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4, bias=False)

    def forward(self, images):
        return self.fc(images[:, 0, :1, :8].flatten(1)).relu()


def test_traffic_counts_operators_and_bytes():
    with torch.device("meta"):
        model = _TwoLinear()
    step = traffic.count_step(model, batch=16)
    # forward: x and weight to bf16, product, relu
    elements = 16 * 8, 4 * 8, 16 * 4
    casts = 6 * elements[0] + 6 * elements[1]
    product, relu = 2 * sum(elements), 2 * 2 * elements[2]
    assert step.forward == (4, casts + product + relu)
    assert step.kept == 2 * (elements[0] + elements[2])  # x and relu's result in bf16; no weight


# Kernels in Gluon take maps of tensors; the interpreter has no Gluon.
MAPS = """
import json
import torch
from fastvit_kernels.ops.attention.configs import BWD_TABLE, FWD_TABLE, PINGPONG_BWD, PINGPONG_FWD
from fastvit_kernels.ops.attention.functions import attention
from fastvit_kernels.runtime.backend import backend
from fastvit_kernels.runtime.configs import forced
from tests.traffic.counting import counting

with (
    backend("triton"), forced(FWD_TABLE.name, PINGPONG_FWD), forced(BWD_TABLE.name, PINGPONG_BWD),
    counting() as count,
):
    qkv = torch.empty(256, 197, 3, 12, 64, dtype=torch.bfloat16, requires_grad=True)
    y = attention(qkv)
    y.backward(torch.empty_like(y))
print(json.dumps(count.calls))
"""


@pytest.mark.skipif(not has_gluon(), reason="this triton has no kernels that take maps")
def test_traffic_counts_tensor_maps():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    words = [sys.executable, "-c", MAPS]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stderr
    out, lse = 2 * (256 * 197 * 12 * 64), 4 * (256 * 12 * 197)
    assert json.loads(result.stdout)[:2] == [
        ["attention_fwd_pingpong", 3 * out + out + lse],
        ["attention_bwd_pingpong", 2 * (3 * out + out) + lse],
    ]


def test_traffic_of_swapped_block():
    step, eager = traffic.block("S", "swapped"), traffic.block("S", "timm")
    low = traffic.block("S", 'swapped, memory="low"')
    assert 28.0 <= _units(step.kept) < 28.3 and _units(eager.kept) > 36
    assert 20.0 <= _units(low.kept) < 20.3
    assert step.forward[0] + step.backward[0] <= LAUNCHES
    moved = step.forward[1] + step.backward[1]
    assert moved < 0.7 * (eager.forward[1] + eager.backward[1])
    assert 1 < _units(moved) / traffic.minimum(C) < 1.04  # products of the library count, too


def test_traffic_of_a_graph():
    """A pass more over the gradient of each of two linears, and its sum: fp32 read, 16 bits
    written, both read again."""
    eager, graph = (traffic.block("B", way) for way in ("swapped", "swapped, as in a graph"))
    assert graph.forward == eager.forward and graph.kept == eager.kept
    assert graph.backward[0] == eager.backward[0] + 4
    unit = TOKENS * 768
    assert (graph.backward[1] - eager.backward[1]) / unit == pytest.approx(8, abs=0.05)
    moved = (graph.forward[1] + graph.backward[1]) / unit
    assert moved / traffic.minimum(768) == pytest.approx(1.045, abs=0.005)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its graphs are made on the CPU")
@pytest.mark.parametrize("memory", ["default", "low"])
def test_traffic_equals_compiled_graph(memory):
    """By torch.compile's own graphs: each launch, each byte moved and kept; the same for
    memory="low", which rebuilds nothing there."""
    steps = []
    with traffic.backend("triton"):
        for depth in (1, 2):
            model = traffic.vit("Ti", depth).to_empty(device="cpu")
            steps.append(traffic.count_graphs(model, batch=2, memory=memory))
    assert steps[1].less(steps[0]) == traffic.block("Ti", "swapped, as in a graph", batch=2)


def test_traffic_of_skipped_samples():
    """What a block moves but the stream of the residual: 4 + 4 C bytes forward for each sum, and 4
    + 4 backward in each norm, of all samples."""
    kept = int(traffic.BATCH * 0.6) / traffic.BATCH
    masks, skips = (
        traffic.block("S", way, partial(traffic.vit, drop_path=0.4)) for way in ("swapped", "skip")
    )
    sums = {"forward": 2 * 8, "backward": 2 * 8}
    for side, of_all in sums.items():
        whole, some = (_units(getattr(step, side)[1]) for step in (masks, skips))
        weights = 12 * C * traffic.WEIGHTS[side] / traffic.TOKENS
        wanted = kept * (whole - of_all - weights) + of_all + weights
        assert some == pytest.approx(wanted, rel=0.02), side
    assert _units(skips.kept) == pytest.approx(8 + kept * (_units(masks.kept) - 8), rel=0.01)


@pytest.mark.skipif(
    "op_output" not in inspect.signature(SelectiveCheckpointContext).parameters,
    reason="this torch shows a policy no output of an op: nothing kept can be counted",
)
def test_traffic_of_checkpoints():
    """Beside x: out and lse; then qkv and the sum with the projection."""
    nothing, attention, matmul = (
        traffic.block("S", f"swapped, checkpoint, {name}") for name in traffic.CHECKPOINTS
    )
    lse = 4 * 6 / C
    kept = [_units(step.kept) for step in (nothing, attention, matmul)]
    assert kept == pytest.approx([4, 6 + lse, 16 + lse], abs=0.01)
    assert nothing.forward == attention.forward == matmul.forward
    assert nothing.backward[0] - attention.backward[0] == 2  # attention, fc2


def test_traffic_minimum():
    forward, backward = (sum(traffic.MINIMUM[side].values()) for side in ("forward", "backward"))
    assert (forward, backward, traffic.KEPT) == (72, 128, 28)


# Launches, C bytes a token moved at most, kept at most, of a block of these models; each of them is
# what the models' own graphs give by our rules, whole and by block.
PROMISED = {
    "ViT-B/16": (27, 205.0, 28.2),
    "DINOv2 ViT-B (LayerScale)": (33, 205.0, 28.2),
    "DINOv3 ViT-B (rope)": (33, 221.0, 28.2),
    "EVA02-B (rope, gated MLP)": (45, 266.0, 30.9),
    "AIMv2-L (RMSNorm, gated MLP)": (32, 255.0, 31.1),
    "transformers ViT-B": (29, 205.0, 28.2),
}


WAYS = [(name, "swapped") for name in PROMISED]
WAYS += [("ViT-B/16", "swapped, by block"), ("transformers ViT-B", "swapped, by block")]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_traffic_of_models(name, way):
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    build, unit = traffic.MODELS[name]
    step = traffic.block("B", way, build)
    launches, moved, kept = PROMISED[name]
    assert step.forward[0] + step.backward[0] <= launches
    assert (step.forward[1] + step.backward[1]) / unit() < moved
    assert step.kept / unit() < kept


PAGE = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def _cells(header):
    """Lines of the page's table with this header."""
    lines = iter(PAGE.splitlines())
    assert any(line == "| " + " | ".join(header) + " |" for line in lines), header
    next(lines)
    table = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [tuple(line.strip("| ").split(" | ")) for line in table]


def test_traffic_page_rows(monkeypatch):
    """All of them, in order, with what follows from sizes alone; torch's operators, so their
    figures, are those of the version that was counted."""
    unit = traffic.TOKENS * 768
    step = traffic.Step((3, 50 * unit), (4, 23 * unit), 7 * unit)
    built = []
    monkeypatch.setattr(traffic, "block", lambda *given: built.append(given) or step)
    monkeypatch.setattr(traffic, "kept_by_partitioner", lambda size, depth: depth)
    page, found = _cells(traffic.HEADER), list(traffic.rows())
    assert [row[:2] for row in found] == [row[:2] for row in page]
    minima = [[row for row in rows if row[1] == "minimum"] for rows in (found, page)]
    assert minima[0] == minima[1] and len(minima[0]) == 3
    (vit_b,) = (row for row in found if row[:2] == ("ViT-B/16", "swapped"))
    least = f"{73 / traffic.minimum(768):.2f}"
    assert vit_b == ("ViT-B/16", "swapped", "3", "4", "50.0", "23.0", least, "7.0")
    assert [given[:2] for given in built[:3]] == [
        ("S", "timm"),
        ("S", "swapped"),
        ("S", "swapped, by block"),
    ]


def test_traffic_kept_by_partitioner():
    """More than ours, and no weights; its choice is torch's own."""
    kept = traffic.kept_by_partitioner("Ti", 2) - traffic.kept_by_partitioner("Ti", 1)
    assert 28 < kept / (197 * traffic.VITS["Ti"][0]) < 60
