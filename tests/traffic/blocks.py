"""`python -m tests.traffic`: what a block of a training step launches, moves and keeps.

No GPU needed: a step runs on fake tensors (shapes and dtypes, no memory), and `counting` counts.
A block is the step of a model of two blocks less that of one.

The minimum writes what one product, attention or norm hands to another once, and reads it once
where it is used; elementwise work and bias gradients ride along. See MINIMUM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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

from bench.ops import SPREAD, VITS, Shape, lengths
from fastvit_kernels import (
    attention,
    backend,
    checkpoint_policy,
    patch_embed,
    varlen_attention,
)
from fastvit_kernels.fuse.backend import Options, rewrite
from fastvit_kernels.ops.common import grad_handoff
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.ops.patch_embed.functions import patch_embed_ref
from fastvit_kernels.runtime.compat import define_torchvision_operators
from tests.machine.launches import tensor_bytes
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

    C, _, heads, hidden = VITS[size]
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
    "BEiT-B (learnt bias)": "beit_base_patch16_224",
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

    C, _, heads, hidden = VITS[size]
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


# --- patch embedding and attention alone, where inputs need not be moved. Attention in bf16, with
# ViT-B's heads: images of 128 to 1024 tokens, padded to the longest or packed; a mask that is
# learnt. SDPA takes masks as torch dispatches them on CUDA.

PATCHES = (SIZE // PATCH) ** 2
KEPT_PATCHES = PATCHES // 4


def _count(count: Count, call: Callable[[], Tensor]) -> Step:
    """Forward and backward of one call."""
    count.calls.clear()
    out = call()
    forward = len(count.calls), count.bytes
    out.backward(torch.empty_like(out))
    backward = len(count.calls) - forward[0], count.bytes - forward[1]
    return Step(forward, backward, sum(x.untyped_storage().nbytes() for x in count.kept.values()))


def _figures(step: Step) -> tuple[str, ...]:
    """Launches, then MB."""
    moved = (step.forward[1], step.backward[1], step.kept)
    return str(step.forward[0]), str(step.backward[0]), *(f"{n / 1e6:.0f}" for n in moved)


def patches(size: str, way: str, ours: bool) -> Step:
    """Patch embedding under bf16 autocast: of whole images, or of a quarter of the patches.

    A launch counts its tensors whole, but ours reads the pixels of kept patches alone.
    """
    C, tokens = VITS[size][0], TOKENS // BATCH
    function = patch_embed if ours else patch_embed_ref
    shapes = {
        "weight": (C, 3, PATCH, PATCH),
        "bias": (C,),
        "prefix_tokens": (1, 1, C),
        "pos_embed": (1, tokens, C),
    }
    given: dict[str, Any] = {}
    with backend("triton"), counting() as count:
        parameters = {n: torch.empty(s, requires_grad=True) for n, s in shapes.items()}
        images = torch.empty(BATCH, 3, SIZE, SIZE)
        if "kept" in way:
            given["keep"] = torch.zeros(BATCH, KEPT_PATCHES, dtype=torch.int64)
        with torch.autocast("cpu", torch.bfloat16):
            step = _count(count, lambda: function(images, **parameters, **given))
    unread = 0
    if ours and "keep" in given:
        unread = tensor_bytes(images) * (PATCHES - KEPT_PATCHES) // PATCHES
    return step.without(unread, unread)


IMAGES = ("whole images", "25 % kept")


def patch_rows() -> Iterator[tuple[str, ...]]:
    """A line for each kind of images: launches and MB of patch_embed, a step of ViT-B/16."""
    for way in IMAGES:
        for provider, ours in (("torch", False), ("ours", True)):
            yield way, provider, *_figures(patches("B", way, ours))


_COUNTED = ("launches forward", "backward", "MB forward", "backward", "MB kept")
PATCH_HEADER = ("images", "patch_embed", *_COUNTED)


@dataclass(frozen=True)
class Way:
    """Attention of images of their own lengths: what is given, and which pairs are multiplied.

    A launch counts its tensors whole, but where keys are passed over, ours reads no k and v of
    them, in the forward and where dq is made.
    """

    name: str
    call: Callable[[Tensor, list[int]], Tensor]
    is_packed: bool
    pairs: Callable[[int, int], int]  # of an image with n tokens, padded to T
    skips_keys: bool = False


def _sdpa(qkv: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)


def _by_image(qkv: Tensor, n: list[int]) -> Tensor:
    return torch.cat([_sdpa(part.unsqueeze(0)) for part in qkv.split(n)], dim=1)


def _mask(qkv: Tensor, queries: int) -> Tensor:
    return torch.empty(len(qkv), 1, queries, qkv.shape[1], dtype=torch.bool)


def _packed(qkv: Tensor, n: list[int]) -> Tensor:
    return varlen_attention(qkv, torch.empty(len(n) + 1, dtype=torch.int32), max(n))


WAYS = (
    Way(
        "SDPA, mask (B, 1, T, T)",
        lambda x, n: _sdpa(x, _mask(x, x.shape[1])),
        False,
        lambda n, T: T * T,
    ),
    Way("SDPA, mask (B, 1, 1, T)", lambda x, n: _sdpa(x, _mask(x, 1)), False, lambda n, T: T * T),
    Way("SDPA image by image", _by_image, True, lambda n, T: n * n),
    Way(
        "attention, mask (B, 1, 1, T)",
        lambda x, n: attention(x, attn_mask=_mask(x, 1)),
        False,
        lambda n, T: n * T,
        skips_keys=True,
    ),
    Way("varlen_attention", _packed, True, lambda n, T: n * n),
)
IMAGES_PACKED = Shape("NaFlex-B", 64, 1024, 768, 12, 3072, variant=SPREAD)


def images_attended(way: Way, shape: Shape = IMAGES_PACKED) -> Step:
    """Attention alone, forward and backward, of images of their own lengths."""
    n = lengths(shape)
    tokens = (sum(n),) if way.is_packed else (shape.B, shape.T)
    with backend("triton"), counting() as count:
        qkv = torch.empty(*tokens, 3, shape.H, shape.D, dtype=torch.bfloat16, requires_grad=True)
        step = _count(count, lambda: way.call(qkv, n))
    hidden = 2 * 2 * shape.C * (shape.B * shape.T - sum(n)) if way.skips_keys else 0
    return step.without(hidden, hidden)


def bias_learnt(ours: bool) -> Step:
    """Attention alone with a learnt bias (1, H, T, T), BEiT-B's, and its gradient."""
    C, _, H, _ = VITS["B"]
    T = TOKENS // BATCH
    with backend("triton"), counting() as count:
        qkv, bias = (
            torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
            for shape in ((BATCH, T, 3, H, C // H), (1, H, T, T))
        )
        return _count(count, lambda: attention(qkv, attn_mask=bias) if ours else _sdpa(qkv, bias))


def attention_rows() -> Iterator[tuple[str, ...]]:
    """Images padded and packed, then a learnt bias: launches, MB, products of the least."""
    n, T = lengths(IMAGES_PACKED), IMAGES_PACKED.T
    least = sum(x * x for x in n)
    for way in WAYS:
        share = sum(way.pairs(x, T) for x in n) / least
        name = f"{len(n)} images of {min(n)} to {T} tokens"
        yield name, way.name, *_figures(images_attended(way)), f"{share:.2f}"
    for provider, ours in (("SDPA", False), ("attention", True)):
        name = f"learnt bias, {BATCH} images of {TOKENS // BATCH}"
        yield name, provider, *_figures(bias_learnt(ours)), "1.00"


ATTENTION_HEADER = ("sequences", "attention", *_COUNTED, "products of least")


def _marked(header: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    marked = ["| " + " | ".join(line) + " |" for line in (header, *lines)]
    return "\n".join([marked[0], "|" + " --- |" * len(header), *marked[1:]])


def table() -> str:
    parts = (HEADER, rows()), (ATTENTION_HEADER, attention_rows()), (PATCH_HEADER, patch_rows())
    return "\n\n".join(_marked(header, lines) for header, lines in parts)
