"""`python -m tests.traffic`: what it counts, and that our blocks keep to what docs/ promise."""

import inspect
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import SelectiveCheckpointContext

pytest.importorskip("timm")
traffic = pytest.importorskip("tests.traffic.blocks")


class _OneLinear(nn.Module):
    """Costs that can be told by hand."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4, bias=False)

    def forward(self, images):
        return self.fc(images[:, 0, :1, :8].flatten(1)).relu()


def test_operators_and_bytes():
    with torch.device("meta"):
        model = _OneLinear()
    step = traffic.count_step(model, batch=16)
    # forward: x and weight to bf16, product, relu
    elements = 16 * 8, 4 * 8, 16 * 4
    casts = 6 * elements[0] + 6 * elements[1]
    product, relu = 2 * sum(elements), 2 * 2 * elements[2]
    assert step.forward == (4, casts + product + relu)
    assert step.kept == 2 * (elements[0] + elements[2])  # x and relu's result in bf16; no weight


# Launches, C bytes a token moved and kept, at most, of a block of these models.
PROMISED = {
    "ViT-B/16": (27, 205.0, 28.2),
    "DINOv2 ViT-B (LayerScale)": (33, 205.0, 28.2),
    "DINOv3 ViT-B (rope)": (33, 221.0, 28.2),
    "EVA02-B (rope, gated MLP)": (45, 266.0, 30.9),
    "AIMv2-L (RMSNorm, gated MLP)": (32, 255.0, 31.1),
    "transformers ViT-B": (29, 205.0, 28.2),
}


def _units(way, name="ViT-B/16"):
    """Launches, C bytes a token moved, and kept, of a block."""
    build, tokens, C = traffic.MODELS[name]
    step, unit = traffic.block(way, build), traffic.BATCH * tokens * C
    moved = step.forward[1] + step.backward[1]
    return step.forward[0] + step.backward[0], moved / unit, step.kept / unit


@pytest.mark.parametrize("name", list(PROMISED)[1:])
def test_models(name):
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
    found = _units("swapped, by block", name)
    assert all(a <= b for a, b in zip(found, PROMISED[name], strict=True))


def test_vit():
    """As docs/benchmarks.md and docs/swap.md say; near the least that a block could move."""
    launches, moved, kept = _units("swapped")
    assert all(a <= b for a, b in zip((launches, moved, kept), PROMISED["ViT-B/16"], strict=True))
    assert _units("swapped, by block") == (launches, moved, kept)
    assert _units("as it is") == pytest.approx((52, 325.4, 36.1), abs=0.1)
    assert 1 < moved / sum(map(traffic.minimum, traffic.MINIMUM)) < 1.04
    assert 20 <= _units('swapped, memory="low"')[2] < 20.3
    # A pass more over the gradient of each of two linears, and its sum: fp32 read, 16 bits
    # written, both read again.
    graph = _units(traffic.IN_A_GRAPH)
    assert graph == pytest.approx((launches + 4, moved + 8, kept), abs=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its graphs are made on the CPU")
def test_compiled_graphs():
    """By torch.compile's own graphs: each launch, each byte moved and kept."""
    tiny, steps = partial(traffic.tower, name="vit_tiny_patch16_224"), []
    with traffic.backend("triton"):
        for depth in (1, 2):
            model = tiny(depth).to_empty(device="cpu")
            steps.append(traffic.count_graphs(model, batch=2))
    assert steps[1].less(steps[0]) == traffic.block(traffic.IN_A_GRAPH, tiny, batch=2)


@pytest.mark.skipif(
    "op_output" not in inspect.signature(SelectiveCheckpointContext).parameters,
    reason="this torch shows a policy no output of an op: nothing kept can be counted",
)
def test_checkpoints():
    """Beside x: out and lse; then qkv and the sum with the projection."""
    ways = [f"swapped, checkpoint{policy}" for policy in ("", ', "attention"', ', "matmul"')]
    (nothing, _, x), (attention, _, two), (_, _, four) = map(_units, ways)
    lse = 4 * 12 / 768
    assert (x, two, four) == pytest.approx((4, 6 + lse, 16 + lse), abs=0.01)
    assert nothing - attention == 2  # attention, fc2
