"""`python -m tests.traffic`: what a block of a training step launches, moves and keeps.

No GPU needed: a step runs on fake tensors (shapes and dtypes, no memory), and `counting` counts.
A block is the step of a model of two blocks less that of one.

The minimum writes what one product, attention or norm hands to another once, and reads it once
where it is used; elementwise work and bias gradients ride along. See MINIMUM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
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

from bench.ops import VITS
from fastvit_kernels import backend, checkpoint_policy
from fastvit_kernels.fuse.backend import Options, rewrite
from fastvit_kernels.ops.common import grad_handoff
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.runtime.compat import define_torchvision_operators
from tests.support.private import compiler_with

from . import graphs
from .counting import Count, Step, as_on_gpu, counting, keep

BATCH, SIZE, PATCH = 256, 224, 16
TOKENS = BATCH * ((SIZE // PATCH) ** 2 + 1)

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


def vit(size: str, depth: int, drop_path: float = 0.0, **more: Any) -> nn.Module:
    """timm's ViT of this width, on the meta device; its last block with this DropPath."""
    define_torchvision_operators()
    from timm.models.vision_transformer import VisionTransformer

    C, heads, hidden = VITS[size]
    with torch.device("meta"):
        return VisionTransformer(
            img_size=SIZE,
            patch_size=PATCH,
            embed_dim=C,
            depth=depth,
            num_heads=heads,
            mlp_ratio=hidden / C,
            drop_path_rate=drop_path,
            **more,
        )


def tower(name: str, depth: int, **more: Any) -> Any:
    """A model of timm's by its name, on the meta device."""
    define_torchvision_operators()
    from timm import create_model

    with torch.device("meta"):
        return create_model(name, depth=depth, img_size=SIZE, **more)


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


def _graphs(model: nn.Module, batch: int, options: Options | None) -> list[Any]:
    """What torch.compile makes of a step: forward, backward, and what forward returns: its one
    output, then what it keeps. With options our rules rewrite it before."""
    found: list[Any] = []

    def partition(default: Any, *graph: Any, num_fwd_outputs: int, **more: Any) -> Any:
        assert num_fwd_outputs == 1
        found.extend(default(*graph, num_fwd_outputs=num_fwd_outputs, **more))
        return found[0], found[1]

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        made = gm if options is None else rewrite(gm, inputs, options)
        return compiler_with(partition)(made, inputs)

    with torch.autocast("cpu", torch.bfloat16):
        graphs.capture(model, (torch.empty(batch, 3, SIZE, SIZE),), {}, compiler)
    (returned,) = (node.args[0] for node in found[0].graph.nodes if node.op == "output")
    return [*found, returned]


def kept_by_partitioner(size: str, depth: int) -> int:
    """Bytes that torch.compile's partitioner keeps for one image."""
    model = vit(size, depth).to_empty(device="cpu")
    saved = [node.meta["val"] for node in _graphs(model, 1, None)[2][1:]]
    return activation_bytes([x for x in saved if isinstance(x, Tensor)], model)


def count_graphs(model: nn.Module, batch: int, **options: Any) -> Step:
    """The graphs that AOTAutograd makes of a rewritten step, each counted as it runs; without the
    loss, which is in none."""
    with as_on_gpu():
        forward, backward, returned = _graphs(model, batch, Options(**options))

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


def swapped(model: nn.Module, regional: bool = False, batch: int = BATCH, **options: Any) -> Any:
    """The model on the graph that our backend makes of it, or of each block."""
    images = torch.empty(batch, 3, SIZE, SIZE)
    make = graphs.by_block if regional else graphs.whole
    with as_on_gpu():
        return make(model, images, Options(compiler="eager", **options))


PROVIDERS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[], Any]]] = {
    "timm": (lambda model: model, nullcontext),
    "swapped": (swapped, lambda: backend("triton")),
    "swapped, by block": (partial(swapped, regional=True), lambda: backend("triton")),
    'swapped, memory="low"': (partial(swapped, memory="low"), lambda: backend("triton")),
    "swapped, Triton GEMMs": (swapped, lambda: _triton_gemms()),
    "swapped, as in a graph": (swapped, lambda: _as_in_a_graph()),
}
CHECKPOINTS = {"no policy": None, '"attention"': "attention", '"matmul"': "matmul"}


def checkpointed(model: Any, name: Any, swaps: bool) -> nn.Module:
    """A checkpoint around each block; what a policy keeps of it counts as kept."""
    options: dict[str, Any] = {}
    if name is not None:
        policy = checkpoint_policy(name)

        def and_count(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            chosen = policy(ctx, op, *args, **kwargs)
            if chosen is CheckpointPolicy.MUST_SAVE:
                keep(ctx.op_output)
            return chosen

        options["context_fn"] = partial(create_selective_checkpoint_contexts, and_count)

    def run(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, **options)
        return x

    if swaps:
        swapped(model, regional=True)
    model.blocks.forward = run
    return model


DROPPED = (0.3, 0.4)  # rates at which a block masks, and skips
SKIPPING = {"swapped, masks": "swapped", 'swapped, drop_path="skip"': "skip"}
PROVIDERS_OF_DROPPED = {
    "skip": (partial(swapped, drop_path="skip"), lambda: backend("triton")),
    **PROVIDERS,
    **{
        f"{kind}, checkpoint, {given}": (
            partial(checkpointed, name=name, swaps=kind == "swapped"),
            lambda: backend("triton"),
        )
        for kind in ("timm", "swapped")
        for given, name in CHECKPOINTS.items()
    },
}


@contextmanager
def _as_in_a_graph() -> Iterator[None]:
    """Without the one thing that a graph of torch.compile does not do: it has no nodes on which a
    norm's backward could leave something (grad_handoff.py)."""
    with backend("triton"), patch.object(grad_handoff, "_compiling", lambda: True):
        yield


@contextmanager
def _triton_gemms() -> Iterator[None]:
    with backend("triton"), forced_route("triton"):
        yield


# Of blocks with other parts than ViT's; all are of 224 pixels.
TOWERS = {
    "DINOv3 ViT-B (rope)": "vit_base_patch16_dinov3",
    "RoPE-ViT-B (learnt frequencies)": "vit_base_patch16_rope_mixed_224",
    "EVA02-B (rope, gated MLP)": "eva02_base_patch14_224",
    "AIMv2-L (RMSNorm, gated MLP)": "aimv2_large_patch14_224",
}


class _Logits(nn.Module):
    """transformers' ViT, by the class token's values."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    @property
    def blocks(self) -> Any:
        found = getattr(self.model, "layers", None)
        return self.model.encoder.layer if found is None else found

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[0][:, 0]


def hf_vit(size: str, depth: int) -> nn.Module:
    """transformers' ViT of this width, on the meta device."""
    define_torchvision_operators()
    from transformers import ViTConfig, ViTModel

    C, heads, hidden = VITS[size]
    config: Any = ViTConfig
    settings = config(
        hidden_size=C,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=hidden,
        image_size=SIZE,
        patch_size=PATCH,
    )
    with torch.device("meta"):
        return _Logits(ViTModel(settings, add_pooling_layer=False))


def _named(name: str) -> tuple[Callable[..., nn.Module], Callable[[], int]]:
    def unit() -> int:
        here = tower(name, 1)
        return BATCH * (here.patch_embed.num_patches + here.num_prefix_tokens) * here.embed_dim

    return lambda size, depth: tower(name, depth), unit


# name -> what builds a model of so many blocks, and C bytes a token of its whole batch
MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[], int]]] = {
    "ViT-B/16": (vit, lambda: TOKENS * VITS["B"][0]),
    "DINOv2 ViT-B (LayerScale)": _named("vit_base_patch14_dinov2"),
    **{name: _named(model) for name, model in TOWERS.items()},
    "transformers ViT-B": (hf_vit, lambda: TOKENS * VITS["B"][0]),
}


def block(
    size: str, provider: str, build: Callable[[str, int], nn.Module] = vit, batch: int = BATCH
) -> Step:
    """What one block adds to a step."""
    prepare, context = PROVIDERS_OF_DROPPED[provider]
    given = {} if provider.startswith("timm") or "checkpoint" in provider else {"batch": batch}
    with context():
        steps = [count_step(prepare(build(size, depth), **given), batch) for depth in (1, 2)]
    return steps[1].less(steps[0])


def _least(side: str, C: int) -> float:
    """C bytes a token of one direction's minimum."""
    return sum(MINIMUM[side].values()) + 12 * C * WEIGHTS[side] / TOKENS


def minimum(C: int) -> float:
    """C bytes a token that a block of this width moves at least, forward and backward."""
    return sum(_least(side, C) for side in MINIMUM)


HEADER = (
    "model",
    "provider",
    "launches forward",
    "backward",
    "C bytes forward",
    "backward",
    "of minimum",
    "C bytes kept",
)


def _row(name: str, provider: str, step: Step, unit: int, least: float | None) -> tuple[str, ...]:
    """The line of a block; `unit` is C bytes a token of the whole batch."""
    moved = [side[1] / unit for side in (step.forward, step.backward)]
    share = "-" if least is None else f"{sum(moved) / least:.2f}"
    return (
        name,
        provider,
        str(step.forward[0]),
        str(step.backward[0]),
        *(f"{n:.1f}" for n in moved),
        share,
        f"{step.kept / unit:.1f}",
    )


def rows() -> Iterator[tuple[str, ...]]:
    """A line for each model and provider: launches, and bytes a token in units of C."""
    for size in ("S", "B", "L"):
        C, name = VITS[size][0], f"ViT-{size}/{PATCH}"
        least = [_least(side, C) for side in MINIMUM]
        yield name, "minimum", "7", "11", *(f"{n:.1f}" for n in least), "1.00", f"{KEPT:.1f}"
        for provider in PROVIDERS:
            yield _row(name, provider, block(size, provider), TOKENS * C, sum(least))
        kept = kept_by_partitioner(size, 2) - kept_by_partitioner(size, 1)
        yield name, "torch.compile's partition", *5 * "-", f"{kept * BATCH / (TOKENS * C):.1f}"
    for rate in DROPPED:
        for name, provider in (("timm", "timm"), *SKIPPING.items()):
            step = block("L", provider, partial(vit, drop_path=rate))
            yield _row(f"ViT-L/{PATCH}, drop_path {rate}", name, step, TOKENS * VITS["L"][0], None)
    for provider in PROVIDERS_OF_DROPPED:
        if "checkpoint" in provider:
            yield _row(
                f"ViT-B/{PATCH}", provider, block("B", provider), TOKENS * VITS["B"][0], None
            )
    for name, (build, unit) in list(MODELS.items())[1:]:
        host = "transformers" if build is hf_vit else "timm"
        for provider in ("timm", "swapped", 'swapped, memory="low"'):
            step = block("B", provider, build)
            yield _row(name, host if provider == "timm" else provider, step, unit(), None)


def table() -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (HEADER, *rows())]
    return "\n".join([lines[0], "|" + " --- |" * len(HEADER), *lines[1:]])
