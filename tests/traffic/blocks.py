"""`python -m tests.traffic`: what a block of a training step launches, moves and keeps.

No GPU needed: a step runs on fake tensors (shapes and dtypes, no memory), and `counting` counts.
A block is the step of a model of two blocks less that of one.

The minimum writes what one product, attention or norm hands to another once, and reads it once
where it is used; elementwise work and bias gradients ride along. See MINIMUM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fastvit_kernels import backend, checkpoint_policy
from fastvit_kernels.fuse.backend import Options, rewrite
from fastvit_kernels.ops.common import grad_handoff
from fastvit_kernels.runtime.compat import define_torchvision_operators
from tests.support.private import compiler_with

from . import graphs
from .counting import Count, Step, as_on_gpu, counting, keep

BATCH, SIZE, TOKENS = 256, 224, 197  # tokens of an image in ViT-B/16

# Bytes a token for each of C channels, F = 4 C, fp32 residual stream, 16-bit products.
MINIMUM = {
    "forward": {
        "norm 1": 4 + 2,
        "qkv": 2 + 6,
        "attention": 6 + 2,
        "proj, residual": 2 + 4 + 4,
        "norm 2": 4 + 2,
        "fc1, gelu": 2 + 8 + 8,
        "fc2, residual": 8 + 4 + 4,
    },
    "backward": {
        "fc2 weight": 2 + 8,
        "hidden, a rebuilt": 2 + 8 + 8 + 8,
        "fc1 weight": 8 + 2,
        "fc1 input": 8 + 2,
        "norm 2, 16-bit copy": 2 + 4 + 4 + 4 + 2,
        "proj weight": 2 + 2,
        "proj input": 2 + 2,
        "attention": 6 + 2 + 2 + 6,
        "qkv weight": 6 + 2,
        "qkv input": 6 + 2,
        "norm 1, 16-bit copy": 2 + 4 + 4 + 4 + 2,
    },
}
# The same of its 12 C^2 weights, an element: cast and read; read, and their fp32 gradient written.
WEIGHTS = {"forward": 4 + 2 + 2, "backward": 2 + 4}
# x, y, qkv, out, x, y, pre-activation
KEPT = 4 + 2 + 6 + 2 + 4 + 2 + 8

Builder = Callable[[int], nn.Module]  # of a model of so many blocks


def tower(depth: int, name: str) -> Any:
    """A model of timm's by its name, on the meta device."""
    define_torchvision_operators()
    from timm import create_model

    with torch.device("meta"):
        return create_model(name, depth=depth, img_size=SIZE)


VIT_B = partial(tower, name="vit_base_patch16_224")


def count_step(model: nn.Module, batch: int = BATCH) -> Step:
    """One training step under bf16 autocast, fp32 parameters."""
    with counting() as count:
        state: dict[str, Tensor] = {
            f"model.{name}": nn.Parameter(torch.empty(p.shape))
            for name, p in model.named_parameters()
        }
        state |= {
            f"model.{name}": torch.empty(b.shape, dtype=b.dtype)
            for name, b in model.named_buffers()
        }
        images = torch.empty(batch, 3, SIZE, SIZE)
        labels = torch.zeros(batch, dtype=torch.long)
        count.calls.clear()
        return torch.func.functional_call(_OneStep(model, count), state, (images, labels))


class _OneStep(nn.Module):
    """Forward and backward in one call: a checkpoint reads its parameters in both."""

    def __init__(self, model: nn.Module, count: Count):
        super().__init__()
        self.model, self.count = model, count

    def forward(self, images: Tensor, labels: Tensor) -> Step:
        count = self.count
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(images)
        forward = len(count.calls), count.bytes
        kept = activation_bytes(count.kept.values(), self.model)
        F.cross_entropy(logits.float(), labels).backward()
        return Step(forward, (len(count.calls) - forward[0], count.bytes - forward[1]), kept)


def activation_bytes(kept: Iterable[Tensor], model: nn.Module) -> int:
    """Of the storages, those of parameters and of their copies left out."""
    shapes = {tuple(p.shape) for p in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    own = (x for x in kept if tuple(x.shape) not in shapes)
    return sum(x.untyped_storage().nbytes() for x in own)


def _graphs(model: nn.Module, batch: int) -> list[Any]:
    """What torch.compile makes of a rewritten step: forward, backward, and what forward returns:
    its one output, then what it keeps."""
    found: list[Any] = []

    def partition(default: Any, *graph: Any, num_fwd_outputs: int, **more: Any) -> Any:
        assert num_fwd_outputs == 1
        found.extend(default(*graph, num_fwd_outputs=num_fwd_outputs, **more))
        return found[0], found[1]

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return compiler_with(partition)(rewrite(gm, inputs, Options()), inputs)

    with torch.autocast("cpu", torch.bfloat16):
        graphs.capture(model, (torch.empty(batch, 3, SIZE, SIZE),), {}, compiler)
    (returned,) = (node.args[0] for node in found[0].graph.nodes if node.op == "output")
    return [*found, returned]


def count_graphs(model: nn.Module, batch: int) -> Step:
    """The graphs that AOTAutograd makes of a rewritten step, each counted as it runs; without the
    loss, which is in none."""
    with as_on_gpu():
        forward, backward, returned = _graphs(model, batch)

    def run(graph: Any, known: dict[str, Any]) -> Any:
        inputs = {
            node.name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
            for node in graph.graph.nodes
            if node.op == "placeholder"
            for x in [node.meta["val"]]
        }
        return graph(*(known.get(name, x) for name, x in inputs.items()))

    with counting() as count:
        results = run(forward, {})
        there = len(count.calls), count.bytes
        kept = activation_bytes([x for x in results[1:] if isinstance(x, Tensor)], model)
        run(backward, {node.name: x for node, x in zip(returned, results, strict=True)})
        back = len(count.calls) - there[0], count.bytes - there[1]
    return Step(there, back, kept)


@cache
def swapped(
    build: Builder, depth: int, batch: int, regional: bool = False, **options: Any
) -> nn.Module:
    """The model on the graph that our backend makes of it, or of its blocks."""
    images = torch.empty(batch, 3, SIZE, SIZE)
    make = graphs.by_block if regional else graphs.whole
    with as_on_gpu():
        return make(build(depth), images, Options(compiler="eager", **options))


class Checkpointed(nn.Module):
    """The model swapped by block, a checkpoint around each; what a policy keeps counts as kept."""

    def __init__(self, build: Builder, depth: int, batch: int, name: Any = None):
        super().__init__()
        self.model: Any = swapped(build, depth, batch, regional=True)
        self.options: dict[str, Any] = {}
        if name is not None:
            policy = checkpoint_policy(name)

            def and_count(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
                chosen = policy(ctx, op, *args, **kwargs)
                if chosen is CheckpointPolicy.MUST_SAVE:
                    keep(ctx.op_output)
                return chosen

            self.options["context_fn"] = partial(create_selective_checkpoint_contexts, and_count)

    def forward(self, images: Tensor) -> Tensor:
        blocks = self.model.blocks

        def run(x: Tensor) -> Tensor:
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False, **self.options)
            return x

        with patch.object(blocks, "forward", run):
            return self.model(images)


class _Logits(nn.Module):
    """transformers' ViT, by the class token's values."""

    def __init__(self, model: Any):
        super().__init__()
        self.model: Any = model

    @property
    def blocks(self) -> Any:
        return self.model.layers

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[0][:, 0]


def hf_vit(depth: int) -> nn.Module:
    """transformers' ViT-B, on the meta device."""
    define_torchvision_operators()
    from transformers import ViTConfig, ViTModel

    config: Any = ViTConfig
    with torch.device("meta"):
        return _Logits(ViTModel(config(num_hidden_layers=depth), add_pooling_layer=False))


IN_A_GRAPH = "swapped, as in a graph"
WAYS: dict[str, Callable[..., nn.Module]] = {  # (build, depth, batch) -> what is counted
    "as it is": lambda build, depth, batch: build(depth),
    "swapped": swapped,
    "swapped, by block": partial(swapped, regional=True),
    'swapped, memory="low"': partial(swapped, memory="low"),
    IN_A_GRAPH: swapped,
    "swapped, checkpoint": Checkpointed,
    'swapped, checkpoint, "attention"': partial(Checkpointed, name="attention"),
    'swapped, checkpoint, "matmul"': partial(Checkpointed, name="matmul"),
}
# name -> what builds a model of so many blocks, tokens of an image, width
MODELS: dict[str, tuple[Builder, int, int]] = {
    "ViT-B/16": (VIT_B, 197, 768),
    "DINOv2 ViT-B (LayerScale)": (partial(tower, name="vit_base_patch14_dinov2"), 257, 768),
    "DINOv3 ViT-B (rope)": (partial(tower, name="vit_base_patch16_dinov3"), 201, 768),
    "EVA02-B (rope, gated MLP)": (partial(tower, name="eva02_base_patch14_224"), 257, 768),
    "AIMv2-L (RMSNorm, gated MLP)": (partial(tower, name="aimv2_large_patch14_224"), 256, 1024),
    "transformers ViT-B": (hf_vit, 197, 768),
}


@cache
def block(way: str, build: Builder = VIT_B, batch: int = BATCH) -> Step:
    """What one block adds to a step.

    "As in a graph" leaves out the one thing that a graph of torch.compile does not do: it has no
    nodes on which a norm's backward could leave something (grad_handoff.py).
    """
    compiles = patch.object(grad_handoff, "_compiling", lambda: True)
    with backend("triton"), compiles if way == IN_A_GRAPH else nullcontext():
        one, two = (count_step(WAYS[way](build, depth, batch), batch) for depth in (1, 2))
    return two.less(one)


def minimum(side: str) -> float:
    """C bytes a token that a block of ViT-B moves at least, "forward" or "backward"."""
    return sum(MINIMUM[side].values()) + 12 * 768 * WEIGHTS[side] / (BATCH * TOKENS)


HEADER = ("model", "way", "launches forward", "backward", "C bytes forward", "backward", "C kept")


def rows() -> Iterator[tuple[str, ...]]:
    """A line for each model and way: launches, and bytes a token in units of C."""
    yield "ViT-B/16", "minimum", "7", "11", *(f"{minimum(side):.1f}" for side in MINIMUM), str(KEPT)
    for name, (build, tokens, C) in MODELS.items():
        for way in WAYS if build is VIT_B else ("as it is", "swapped", 'swapped, memory="low"'):
            step, unit = block(way, build), BATCH * tokens * C
            moved = (f"{side[1] / unit:.1f}" for side in (step.forward, step.backward))
            launches = str(step.forward[0]), str(step.backward[0])
            yield name, way, *launches, *moved, f"{step.kept / unit:.1f}"


def table() -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (HEADER, *rows())]
    return "\n".join([lines[0], "|" + " --- |" * len(HEADER), *lines[1:]])
