"""`python -m bench traffic`: what a block of a training step launches, moves and keeps.

No GPU needed: a step runs on fake tensors (shapes and dtypes, no memory). Each operator of PyTorch
and each launch of a Triton kernel counts once and moves its tensors once: inputs read, outputs
written. A block is the step of a model of two blocks less that of one. Counted, not measured:
caches, tiles read again and operators of several kernels are left out.

The minimum writes what one product, attention or norm hands to another once, and reads it once
where it is used; elementwise work and bias gradients ride along. See MINIMUM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.shapes import VITS
from fastvit_kernels import backend, patch_embed, swap_in
from fastvit_kernels.commands.zoo import define_torchvision_operators
from fastvit_kernels.ops import rebuilt_norm, rebuilt_sum
from fastvit_kernels.ops.common import gemm
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.ops.common.samples import DropPathMode
from fastvit_kernels.ops.patch_embed.functions import patch_embed_ref
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.operator import LAUNCHERS
from fastvit_kernels.swap.apply import Memory
from fastvit_kernels.swap.hosts import fused
from fastvit_kernels.tools.aot import TARGETS, tensor_bytes

BATCH, SIZE, PATCH = 256, 224, 16
TOKENS = BATCH * ((SIZE // PATCH) ** 2 + 1)
GPU = "sm_90"  # its configs and routes

# Bytes a token for each of C channels, F = 4 C, fp32 residual stream, 16-bit products.
MINIMUM = {
    "forward": {
        "norm 1": 4 + 2, "qkv": 2 + 6, "attention": 6 + 2, "proj, residual": 2 + 4 + 4,
        "norm 2": 4 + 2, "fc1, gelu": 2 + 8 + 8, "fc2, residual": 8 + 4 + 4,
    },
    "backward": {
        "fc2 weight": 2 + 8, "hidden, a rebuilt": 2 + 8 + 8 + 8, "fc1 weight": 8 + 2,
        "fc1 input": 8 + 2, "norm 2, 16-bit copy": 2 + 4 + 4 + 4 + 2, "proj weight": 2 + 2,
        "proj input": 2 + 2, "attention": 6 + 2 + 2 + 6, "qkv weight": 6 + 2, "qkv input": 6 + 2,
        "norm 1, 16-bit copy": 2 + 4 + 4 + 4 + 2,
    },
}  # fmt: skip
# The same of its 12 C^2 weights, an element: cast and read; read, and their fp32 gradient written.
WEIGHTS = {"forward": 4 + 2 + 2, "backward": 2 + 4}
# x, y, qkv, out, x, y, pre-activation
KEPT = 4 + 2 + 6 + 2 + 4 + 2 + 8


class Call(NamedTuple):
    name: str
    bytes: int


@dataclass
class Count:
    """What was called, and the storages that backward keeps."""

    calls: list[Call] = field(default_factory=list)
    kept: dict[int, Tensor] = field(
        default_factory=dict
    )  # by storage; alive, so that none is reused

    @property
    def bytes(self) -> int:
        return sum(call.bytes for call in self.calls)


_MOVES_NOTHING = ("empty", "new_empty", "_unsafe_view", "detach", "lift_fresh")


class _Counting(TorchDispatchMode):
    """Counts operators of torch; runs the launchers of this package's."""

    def __init__(self, count: Count):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastvit_kernels":
            with self:
                return LAUNCHERS[func._opname](*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        # `to` and `reshape` are views by their schema, and copy where they must
        moves_nothing = name.startswith(_MOVES_NOTHING) or (
            func.is_view and _is_view_of(result, args)
        )
        if func.namespace == "aten" and not moves_nothing:
            self.add(name, (args, kwargs, result))
        return result

    def add(self, name: str, tree: Any, less: int = 0) -> None:
        moved = sum(tensor_bytes(x) for x in tree_leaves(tree) if isinstance(x, Tensor)) - less
        if moved:
            self.count.calls.append(Call(name, moved))


# Of a launch for some samples: the tensors of all samples of which it moves the kept ones' rows.
ROWS_OF_KEPT = {
    "layer_norm_fwd": ("x_ptr",), "rms_norm_fwd": ("x_ptr",), "layer_norm_bwd": ("x_ptr",),
    "rms_norm_bwd": ("x_ptr",), "epilogue_fwd": ("y_ptr", "residual_ptr"),
    "linear_fwd": ("y_ptr", "residual_ptr"), "epilogue_bwd": ("dy_ptr",),
}  # fmt: skip


def left_out(name: str, given: dict[str, Any]) -> int:
    """Bytes of a launch's tensors that it does not move, for they are of other samples."""
    if name == "pass_dropped":
        B = given["y_ptr"].shape[0]
        names, share = ("y_ptr", "residual_ptr"), given["num_kept"] / B
    elif given.get("SOME"):
        names = ROWS_OF_KEPT[name]
        if name.endswith("norm_fwd"):
            share = 1 - given["y_ptr"].numel() / given["x_ptr"].numel()
        elif name.endswith("norm_bwd"):
            share = 1 - given["dy_ptr"].numel() / given["x_ptr"].numel()
        else:
            share = 1 - 1 / given["keep_scale"]
    else:
        return 0
    return round(sum(tensor_bytes(given[n]) * share for n in names))


def _is_view_of(result: Any, args: tuple[Any, ...]) -> bool:
    places = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
    results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    return all(x.untyped_storage()._cdata in places for x in results)


@contextmanager
def counting() -> Iterator[Count]:
    """Inside, on fake tensors, torch's operators and Triton's launches join the yielded count."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    count = Count()
    mode = _Counting(count)

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        name = self.fn.__name__.removeprefix("_").removesuffix("_kernel")
        named = dict(zip(self.arg_names, args, strict=False)) | kwargs
        mode.add(name, (args, kwargs), left_out(name, named))

    def product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        mode.add("mm", (out, a, b, bias))  # one call of cuBLAS, which a fake CPU tensor is not
        return out

    def keep(x: Any) -> Any:
        if isinstance(x, Tensor):
            count.kept[x.untyped_storage()._cdata] = x
        return x

    class Hooks(saved_tensors_hooks):
        """Those that a model sets inside ours take our place: what they keep counts too."""

        def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]):
            super().__init__(lambda x: keep(pack(x)), unpack)

    target = TARGETS[GPU]
    with (
        patch.object(JITFunction, "run", launch),
        patch.object(InterpretedFunction, "run", launch),
        patch.object(gemm, "_upcast_product", product),
        on_absent_gpu(Gpu(target.name, target.num_sms, target.shared_limit)),
        saved_tensors_hooks(keep, lambda x: x),
        patch.object(torch.autograd.graph, "saved_tensors_hooks", Hooks),
        patch.object(rebuilt_norm, "is_hooked", lambda: False),  # by our own
        patch.object(rebuilt_sum, "is_hooked", lambda: False),
        patch.object(fused, "is_traced", lambda: False),  # our mode knows our operators
        FakeTensorMode(),
        mode,
    ):
        yield count


class Step(NamedTuple):
    """A training step, by launches, bytes moved and bytes kept."""

    forward: tuple[int, int]
    backward: tuple[int, int]
    kept: int

    def less(self, other: Step) -> Step:
        def minus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
            return a[0] - b[0], a[1] - b[1]

        return Step(
            minus(self.forward, other.forward),
            minus(self.backward, other.backward),
            self.kept - other.kept,
        )


def vit(size: str, depth: int, drop_path: float = 0.0) -> nn.Module:
    """timm's ViT of this width, on the meta device; its last block with this DropPath."""
    define_torchvision_operators()
    from timm.models.vision_transformer import VisionTransformer

    C, _, heads, hidden = VITS[size]
    with torch.device("meta"):
        return VisionTransformer(
            img_size=SIZE, patch_size=PATCH, embed_dim=C, depth=depth, num_heads=heads,
            mlp_ratio=hidden / C, drop_path_rate=drop_path,
        )  # fmt: skip


def tower(name: str, depth: int) -> Any:
    """A model of timm's by its name, on the meta device."""
    define_torchvision_operators()
    from timm import create_model

    with torch.device("meta"):
        return create_model(name, depth=depth, img_size=SIZE)


def count_step(model: nn.Module, batch: int = BATCH) -> Step:
    """One training step under bf16 autocast, fp32 parameters."""
    with counting() as count:
        state: dict[str, Tensor] = {
            name: nn.Parameter(torch.empty(p.shape)) for name, p in model.named_parameters()
        }
        state |= {name: torch.empty(b.shape, dtype=b.dtype) for name, b in model.named_buffers()}
        images = torch.empty(batch, 3, SIZE, SIZE)
        labels = torch.zeros(batch, dtype=torch.long)
        count.calls.clear()
        with torch.autocast("cpu", torch.bfloat16):
            logits = torch.func.functional_call(model, state, images)
        forward = len(count.calls), count.bytes
        kept = activation_bytes(count.kept.values(), model)
        F.cross_entropy(logits.float(), labels).backward()
        backward = len(count.calls) - forward[0], count.bytes - forward[1]
    return Step(forward, backward, kept)


def activation_bytes(kept: Iterable[Tensor], model: nn.Module) -> int:
    """Of the storages, those of parameters and of their copies left out."""
    shapes = {tuple(p.shape) for p in model.parameters()}
    shapes |= {shape[::-1] for shape in shapes}
    own = (x for x in kept if tuple(x.shape) not in shapes)
    return sum(x.untyped_storage().nbytes() for x in own)


def kept_by_partitioner(size: str, depth: int) -> int:
    """Bytes that torch.compile's partitioner keeps for one image: real tensors, on the CPU."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    model = vit(size, depth).to_empty(device="cpu")
    kept = 0

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        nonlocal kept
        forward, backward = min_cut_rematerialization_partition(
            joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
        )
        (returned,) = (node.args[0] for node in forward.graph.nodes if node.op == "output")
        saved = [node.meta["val"] for node in returned[num_fwd_outputs:]]
        kept = activation_bytes([x for x in saved if isinstance(x, Tensor)], model)
        return forward, backward

    torch._dynamo.reset()
    compiler = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition)
    with torch.autocast("cpu", torch.bfloat16):
        torch.compile(model, backend=compiler)(torch.zeros(1, 3, SIZE, SIZE))
    return kept


def swapped(
    model: nn.Module, memory: Memory = "default", drop_path: DropPathMode = "mask"
) -> nn.Module:
    swap_in(model, memory=memory, drop_path=drop_path)
    return model


PROVIDERS: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[], Any]]] = {
    "timm": (lambda model: model, nullcontext),
    "swapped": (swapped, lambda: backend("triton")),
    'swapped, memory="low"': (partial(swapped, memory="low"), lambda: backend("triton")),
    "swapped, Triton GEMMs": (swapped, lambda: _triton_gemms()),
}
DROPPED = (0.3, 0.4)  # rates at which a block masks, and skips
SKIPPING = {"swapped, masks": "swapped", 'swapped, drop_path="skip"': "skip"}
PROVIDERS_OF_DROPPED = {
    "skip": (partial(swapped, drop_path="skip"), lambda: backend("triton")), **PROVIDERS
}  # fmt: skip


@contextmanager
def _triton_gemms() -> Iterator[None]:
    with backend("triton"), forced_route("triton"):
        yield


# Of blocks with other parts than ViT's; all are of 224 pixels.
TOWERS = {
    "DINOv3 ViT-B (rope)": "vit_base_patch16_dinov3",
    "EVA02-B (rope, gated MLP)": "eva02_base_patch14_224",
    "AIMv2-L (RMSNorm, gated MLP)": "aimv2_large_patch14_224",
    "BEiT-B (learnt bias)": "beit_base_patch16_224",
}


def block(size: str, provider: str, build: Callable[[str, int], nn.Module] = vit) -> Step:
    """What one block adds to a step."""
    prepare, context = PROVIDERS_OF_DROPPED[provider]
    with context():
        steps = [count_step(prepare(build(size, depth))) for depth in (1, 2)]
    return steps[1].less(steps[0])


def _least(side: str, C: int) -> float:
    """C bytes a token of one direction's minimum."""
    return sum(MINIMUM[side].values()) + 12 * C * WEIGHTS[side] / TOKENS


def minimum(C: int) -> float:
    """C bytes a token that a block of this width moves at least, forward and backward."""
    return sum(_least(side, C) for side in MINIMUM)


# Of patch_embed: what stands in a data loader or after it, counted with it.
NORMALISE = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
PATCHES = (SIZE // PATCH) ** 2
KEPT_PATCHES = PATCHES // 4


def patches(size: str, way: str, ours: bool) -> Step:
    """Patch embedding under bf16 autocast: fp32 images, uint8 ones, or a quarter of the patches.

    A launch counts its tensors whole, but ours reads the pixels of kept patches alone.
    """
    C, tokens = VITS[size][0], TOKENS // BATCH
    function = patch_embed if ours else patch_embed_ref
    shapes = {
        "weight": (C, 3, PATCH, PATCH), "bias": (C,), "prefix_tokens": (1, 1, C),
        "pos_embed": (1, tokens, C),
    }  # fmt: skip
    given: dict[str, Any] = {}
    with backend("triton"), counting() as count:
        parameters = {n: torch.empty(s, requires_grad=True) for n, s in shapes.items()}
        images = torch.empty(BATCH, 3, SIZE, SIZE)
        if "uint8" in way:
            images, given = images.to(torch.uint8), {**NORMALISE}
        if "kept" in way:
            given["keep"] = torch.zeros(BATCH, KEPT_PATCHES, dtype=torch.int64)
        count.calls.clear()
        with torch.autocast("cpu", torch.bfloat16):
            out = function(images, **parameters, **given)
        forward = len(count.calls), count.bytes
        out.backward(torch.empty_like(out))
        backward = len(count.calls) - forward[0], count.bytes - forward[1]
        kept = sum(x.untyped_storage().nbytes() for x in count.kept.values())
    unread = 0
    if ours and "keep" in given:
        unread = tensor_bytes(images) * (PATCHES - KEPT_PATCHES) // PATCHES
    return Step((forward[0], forward[1] - unread), (backward[0], backward[1] - unread), kept)


IMAGES = ("fp32 images", "uint8 images", "fp32, 25 % kept", "uint8, 25 % kept")


def patch_rows() -> Iterator[tuple[str, ...]]:
    """A line for each kind of images: launches and MB of patch_embed, a step of ViT-B/16."""
    for way in IMAGES:
        for provider, ours in (("torch", False), ("ours", True)):
            step = patches("B", way, ours)
            moved = [*(side[1] for side in (step.forward, step.backward)), step.kept]
            yield (
                way, provider, str(step.forward[0]), str(step.backward[0]),
                *(f"{n / 1e6:.0f}" for n in moved),
            )  # fmt: skip


PATCH_HEADER = (
    "images", "patch_embed", "launches forward", "backward", "MB forward", "backward", "MB kept"
)  # fmt: skip
HEADER = (
    "model", "provider", "launches forward", "backward", "C bytes forward", "backward",
    "of minimum", "C bytes kept",
)  # fmt: skip


def _row(name: str, provider: str, step: Step, unit: int, least: float | None) -> tuple[str, ...]:
    """The line of a block; `unit` is C bytes a token of the whole batch."""
    moved = [side[1] / unit for side in (step.forward, step.backward)]
    share = "-" if least is None else f"{sum(moved) / least:.2f}"
    return (
        name, provider, str(step.forward[0]), str(step.backward[0]), *(f"{n:.1f}" for n in moved),
        share, f"{step.kept / unit:.1f}",
    )  # fmt: skip


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
    for name, model in TOWERS.items():
        here = tower(model, 1)
        tokens = BATCH * (here.patch_embed.num_patches + here.num_prefix_tokens)
        for provider in ("timm", "swapped", 'swapped, memory="low"'):
            step = block(model, provider, tower)
            yield _row(name, provider, step, tokens * here.embed_dim, None)


def _marked(header: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    marked = ["| " + " | ".join(line) + " |" for line in (header, *lines)]
    return "\n".join([marked[0], "|" + " --- |" * len(header), *marked[1:]])


def table() -> str:
    return _marked(HEADER, rows()) + "\n\n" + _marked(PATCH_HEADER, patch_rows())
