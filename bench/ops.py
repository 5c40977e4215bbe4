"""What is measured of each op: inputs, specification, providers, FLOP and bytes.

FLOP and bytes are those of the mathematics: what any implementation must do and move at least,
every operand read once and every result written once. Each function gives (forward, backward).
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastvit_kernels as fk
from bench.providers import (
    VITS,
    Function,
    Inputs,
    Provider,
    Shape,
    batch,
    compiled,
    eager,
    gemm_routes,
    head_sweep,
    imported,
    ours,
    plain,
    replaced,
    sdpa_backends,
    sdpa_unpacked,
    token_sweep,
    vit,
    vits,
    with_autotuned,
)
from fastvit_kernels.ops.attention.configs import BwdForm
from fastvit_kernels.ops.attention.functions import attention_ref
from fastvit_kernels.ops.attention.launch import bwd_launch
from fastvit_kernels.ops.attention.projected import qkv_attention_ref
from fastvit_kernels.ops.attention.rotary import rope_attention_ref
from fastvit_kernels.ops.attention.varlen import varlen_attention_ref
from fastvit_kernels.ops.gated_mlp.functions import gated_mlp_ref
from fastvit_kernels.ops.linear.functions import linear_ref
from fastvit_kernels.ops.mlp.functions import mlp_ref
from fastvit_kernels.ops.norm.functions import layer_norm_ref, rms_norm_ref
from fastvit_kernels.ops.patch_embed.functions import patch_embed_ref
from fastvit_kernels.ops.rope import rope_ref
from fastvit_kernels.runtime.backend import gpu
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.runtime.dtypes import DTYPES

MODES = ("fwd", "bwd", "both")
Pair = tuple[float, float]  # of the forward, of the backward
EPS = 1e-6


class Draw:
    """Random inputs of a case, the same at every run."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.device) * scale
        return x.to(self.dtype).requires_grad_(grad)


@dataclass(frozen=True)
class Op:
    """One line of the table OPS."""

    name: str
    shapes: Callable[[], Iterator[Shape]]
    inputs: Callable[[Shape, torch.dtype, Draw], Inputs]
    reference: Callable[[Shape, str], Function]  # shape, dtype
    providers: Callable[[Shape, str], list[Provider]]
    counted_flops: Callable[[Shape], Pair]
    counted_bytes: Callable[[Shape, str], Pair]
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")

    def everyone(self, shape: Shape, dtype: str) -> list[Provider]:
        """Its providers, the compiled ones also as max-autotune finds them."""
        return with_autotuned(self.providers(shape, dtype))

    def flops(self, shape: Shape, mode: str) -> float:
        return _of_mode(self.counted_flops(shape), mode)

    def bytes(self, shape: Shape, dtype: str, mode: str) -> float:
        return _of_mode(self.counted_bytes(shape, dtype), mode)


def _of_mode(pair: Pair, mode: str) -> float:
    forward, backward = pair
    return float({"fwd": forward, "bwd": backward, "both": forward + backward}[mode])


def itemsize(dtype: str) -> int:
    return DTYPES[dtype].itemsize


# --- layer_norm, rms_norm. `amp`: fp32 in, bf16 out, as in training


def layer_norm_shapes() -> Iterator[Shape]:
    yield from vits()
    yield from head_sweep()


def layer_norm_inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
    return {"x": draw(shape.B, shape.T, shape.C), "weight": draw(shape.C), "bias": draw(shape.C)}


def _out_dtype(dtype: str, x: Tensor) -> torch.dtype | None:
    """bf16 under amp, but for the oracle."""
    return torch.bfloat16 if dtype == "amp" and x.dtype is not torch.float64 else None


def layer_norm_reference(shape: Shape, dtype: str) -> Function:
    return lambda x, weight, bias: layer_norm_ref(x, weight, bias, EPS, _out_dtype(dtype, x))


def layer_norm_flops(shape: Shape) -> Pair:
    """An element: forward mean 1, centre 1, squares 2, scale 1, affine 2; backward 13 likewise."""
    elements = shape.B * shape.T * shape.C
    return 7.0 * elements, 13.0 * elements


def _in_and_out(dtype: str) -> tuple[int, int]:
    return (4, 2) if dtype == "amp" else (itemsize(dtype), itemsize(dtype))


def layer_norm_bytes(shape: Shape, dtype: str) -> Pair:
    """Forward: x in, y out. Backward: dy, x in, dx out. Each: mean and rstd, fp32."""
    x, y = _in_and_out(dtype)
    rows = shape.B * shape.T
    return rows * (shape.C * (x + y) + 8), rows * (shape.C * (2 * x + y) + 8)


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _torch_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], weight, EPS)
    return y if residual is None else residual + y


def _rounded(function: Function) -> Function:
    return lambda **inputs: function(**inputs).to(torch.bfloat16)


def _norm_providers(dtype: str, torch_: Function, own: Function, peers: list[Provider]) -> Any:
    fused = functools.partial(own, eps=EPS)
    if dtype == "amp":
        torch_, peers = _rounded(torch_), []
        fused = functools.partial(fused, out_dtype=torch.bfloat16)
    return [eager(torch_), *peers, ours("ours", fused), compiled(torch_)]


def _liger_layer_norm(module: Any) -> Function:
    return lambda x, weight, bias: module.LigerLayerNormFunction.apply(x, weight, bias, EPS)


def _quack_layer_norm(module: Any) -> Function:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        return module.layernorm_fwd(rows, weight.float(), bias.float(), eps=EPS).view(x.shape)

    return run


def layer_norm_providers(shape: Shape, dtype: str) -> list[Provider]:
    peers = [
        imported("liger_kernel", "liger_kernel.ops.layer_norm", _liger_layer_norm),
        imported("quack", "quack.rmsnorm", _quack_layer_norm, backward=False),
    ]
    return _norm_providers(dtype, _torch_layer_norm, fk.layer_norm, peers)


HEADS = "heads"  # a norm of each head's queries: rows of D
ADDED = "added"  # behind a branch: it adds the residual


def rms_norm_shapes() -> Iterator[Shape]:
    yield from vits()
    # Queries of DINOv3's and Perception Encoder's sizes; InternViT-6B normalises all heads at once.
    for T, H, D in ((201, 12, 64), (261, 16, 64), (1025, 25, 128)):
        yield Shape(f"D{D}", batch(T), T, H * D, H, 4 * H * D, 2, variant=HEADS)
    yield Shape("InternViT-6B", batch(1025), 1025, 3200, 25, 12800, 2)
    yield Shape("ViT-B", batch(257), 257, 768, 12, 3072, 1, variant=ADDED)


def _norm_width(shape: Shape) -> int:
    return shape.D if shape.variant == HEADS else shape.C


def rms_norm_inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
    C = _norm_width(shape)
    x = draw(shape.B, shape.T, shape.C // C, C).squeeze(2)
    found: Inputs = {"x": x, "weight": draw(C)}
    return found | {"residual": draw(*x.shape)} if shape.variant == ADDED else found


def rms_norm_reference(shape: Shape, dtype: str) -> Function:
    def specification(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        return rms_norm_ref(x, weight, EPS, _out_dtype(dtype, x), residual)

    return specification


def rms_norm_flops(shape: Shape) -> Pair:
    """An element: forward squares 2, scale 1, weight 1, a residual 1; backward 9 likewise."""
    elements = shape.B * shape.T * shape.C
    return (5.0 if shape.variant == ADDED else 4.0) * elements, 9.0 * elements


def rms_norm_bytes(shape: Shape, dtype: str) -> Pair:
    """Forward: x in, y out, a residual in. Backward: dy, x in, dx out. Each: rstd, fp32, a row."""
    x, y = _in_and_out(dtype)
    elements = shape.B * shape.T * shape.C
    rstd = 4 * elements // _norm_width(shape)
    forward = elements * (x + y + (x if shape.variant == ADDED else 0)) + rstd
    return forward, elements * (2 * x + y) + rstd


def _liger_rms_norm(module: Any) -> Function:
    """Its default rounds as Llama does; "gemma" keeps fp32 until the store, as we do."""
    return lambda x, weight: module.LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "gemma", False)


def _quack_rms_norm(module: Any) -> Function:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return module.rmsnorm(x.view(-1, x.shape[-1]), weight.float(), eps=EPS).view(x.shape)

    return run


def rms_norm_providers(shape: Shape, dtype: str) -> list[Provider]:
    peers = [
        imported("liger_kernel", "liger_kernel.ops.rms_norm", _liger_rms_norm),
        imported("quack", "quack.rmsnorm", _quack_rms_norm),
    ]
    if shape.variant == ADDED:
        peers = []
    return _norm_providers(dtype, _torch_rms_norm, fk.rms_norm, peers)


# --- linear with its two epilogues in a ViT: proj (LayerScale, residual), fc1 (exact GELU)


def linear_shapes() -> Iterator[Shape]:
    for shape in vits():
        for variant in ("proj", "fc1"):
            yield replace(shape, variant=variant)


def _product(shape: Shape) -> tuple[int, int, int]:
    """M, N, K of the product."""
    return shape.B * shape.T, shape.F if shape.variant == "fc1" else shape.C, shape.C


def linear_inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
    _, N, K = _product(shape)
    found: Inputs = {
        "x": draw(shape.B, shape.T, K), "weight": draw(N, K, scale=K**-0.5), "bias": draw(N),
    }  # fmt: skip
    if shape.variant == "proj":
        found |= {"residual": draw(shape.B, shape.T, N), "layer_scale": draw(N)}
    return found


def _activation(shape: Shape) -> str | None:
    return "gelu" if shape.variant == "fc1" else None


def linear_reference(shape: Shape, dtype: str) -> Function:
    return functools.partial(linear_ref, activation=_activation(shape))


def linear_flops(shape: Shape) -> Pair:
    """2 M N K forward; backward as much for dx and for dweight."""
    M, N, K = _product(shape)
    return 2.0 * M * N * K, 2 * 2.0 * M * N * K


def linear_bytes(shape: Shape, dtype: str) -> Pair:
    """Forward: x, W in, y out, and residual in or pre-activation out. Backward: dy, x, W in, dx,
    dW out, and the pre-activation in or the output of the product, for dlayer_scale, rebuilt."""
    M, N, K = _product(shape)
    saved = 1 if shape.variant == "fc1" else 0
    forward = M * K + N * K + 2 * M * N
    backward = 2 * M * K + 2 * N * K + (1 + saved) * M * N
    return forward * itemsize(dtype), backward * itemsize(dtype)


def linear_providers(shape: Shape, dtype: str) -> list[Provider]:
    torch_ = linear_reference(shape, dtype)
    fused = functools.partial(fk.linear, activation=_activation(shape))
    return [eager(torch_), ours("ours", fused), *gemm_routes(fused), compiled(torch_)]


# --- mlp and gated_mlp, with the residual of their block


def _mlp_inputs(shape: Shape, rows: int, draw: Draw) -> Inputs:
    C, width = shape.C, shape.F
    return {
        "x": draw(shape.B, shape.T, C),
        "fc1_weight": draw(rows, C, scale=C**-0.5), "fc1_bias": draw(rows),
        "fc2_weight": draw(C, width, scale=width**-0.5), "fc2_bias": draw(C),
        "residual": draw(shape.B, shape.T, C),
    }  # fmt: skip


def mlp_inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
    return _mlp_inputs(shape, shape.F, draw)


def _mlp_flops(shape: Shape, weights: int) -> Pair:
    """A product of 2 M C F with each of the weights forward, twice that backward."""
    forward = 2.0 * weights * shape.B * shape.T * shape.C * shape.F
    return forward, 2 * forward


def _mlp_bytes(shape: Shape, dtype: str, weights: int, hidden: int) -> Pair:
    """Forward: x, residual, the W in, y and what is kept of (M, F) out. Backward: dy, x, what was
    kept, the W in, dx and the dW out."""
    M, C, width = shape.B * shape.T, shape.C, shape.F
    either = 3 * M * C + hidden * M * width
    forward, backward = either + weights * C * width, either + 2 * weights * C * width
    return forward * itemsize(dtype), backward * itemsize(dtype)


def mlp_flops(shape: Shape) -> Pair:
    return _mlp_flops(shape, weights=2)


def mlp_bytes(shape: Shape, dtype: str) -> Pair:
    """Kept: the pre-activation."""
    return _mlp_bytes(shape, dtype, weights=2, hidden=1)


def _recomputing(own: Function, torch_: Function) -> list[Provider]:
    """Ours, which rebuilds activations in the backward, and the same with all of them stored."""
    stored = functools.partial(own, recompute=False)
    return [eager(torch_), ours("ours", own), ours("ours-stored", stored), compiled(torch_)]


def mlp_providers(shape: Shape, dtype: str) -> list[Provider]:
    return [*_recomputing(fk.mlp, mlp_ref), *gemm_routes(fk.mlp)]


# Tower -> T, C, H, F, how its weights lie. timm 1.0.31, transformers 5.23.
TOWERS = {
    "EVA02-L": (257, 1024, 16, 2730, "norm"),
    "EVA02-B": (257, 768, 12, 2048, "norm"),
    "DINOv2-g": (257, 1536, 24, 4096, "packed"),
    "DINOv3-H+": (201, 1280, 20, 5120, "separate"),
    "AIMv2-L": (256, 1024, 8, 2816, "separate"),
    "DINOv3-7B": (201, 4096, 32, 8192, "separate"),
}


def gated_mlp_shapes() -> Iterator[Shape]:
    """Packed weights, separate ones, separate ones with a LayerNorm inside."""
    yield replace(vit("B", 224, 0), F=2048, variant="packed")
    for tier, (model, (T, C, H, width, form)) in enumerate(TOWERS.items(), 1):
        yield Shape(model, batch(T), T, C, H, width, min(tier, 4), variant=form)


def gated_mlp_inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
    C, width = shape.C, shape.F
    separate = shape.variant in ("separate", "norm")
    given = _mlp_inputs(shape, width if separate else 2 * width, draw)
    if separate:
        given |= {"gate_weight": draw(width, C, scale=C**-0.5), "gate_bias": draw(width)}
    if shape.variant == "norm":
        given |= {"norm_weight": draw(width), "norm_bias": draw(width)}
    return given


def gated_mlp_flops(shape: Shape) -> Pair:
    return _mlp_flops(shape, weights=3)


def gated_mlp_bytes(shape: Shape, dtype: str) -> Pair:
    """Kept: gate and value. A norm's mean and rstd: fp32, once each way."""
    forward, backward = _mlp_bytes(shape, dtype, weights=3, hidden=2)
    stats = 8 * shape.B * shape.T if shape.variant == "norm" else 0
    return forward + stats, backward + stats


def _liger_gated_mlp(module: Any) -> Function:
    def run(
        x: Tensor, fc1_weight: Tensor, fc1_bias: Tensor, fc2_weight: Tensor, fc2_bias: Tensor,
        residual: Tensor, gate_weight: Tensor | None = None, gate_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if gate_weight is None:
            gate, value = F.linear(x, fc1_weight, fc1_bias).chunk(2, dim=-1)
        else:
            gate, value = F.linear(x, gate_weight, gate_bias), F.linear(x, fc1_weight, fc1_bias)
        hidden = module.LigerSiLUMulFunction.apply(gate, value)
        return residual + F.linear(hidden, fc2_weight, fc2_bias)

    return run


def gated_mlp_providers(shape: Shape, dtype: str) -> list[Provider]:
    found = _recomputing(fk.gated_mlp, gated_mlp_ref)
    if shape.variant != "norm":
        found.append(imported("liger_kernel", "liger_kernel.ops.swiglu", _liger_gated_mlp))
    return found


# --- patch_embed with a class token and positions. Images need no gradient, as in training


def patch_embed_inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
    size, patch, C = shape.size, shape.patch, shape.C
    return {
        "images": draw(shape.B, 3, size, size, grad=False),
        "weight": draw(C, 3, patch, patch, scale=(3 * patch * patch) ** -0.5),
        "bias": draw(C),
        "prefix_tokens": draw(1, 1, C),
        "pos_embed": draw(1, shape.T, C),
    }


def patch_embed_flops(shape: Shape) -> Pair:
    """2 C K a patch of K = 3 patch^2 pixels, forward and for dweight."""
    product = 2.0 * shape.B * (shape.T - 1) * shape.C * 3 * shape.patch**2
    return product, product


def patch_embed_bytes(shape: Shape, dtype: str) -> Pair:
    """Either way: images, weight, positions, and the tokens."""
    K = 3 * shape.patch**2
    pixels, tokens = shape.B * (shape.T - 1) * K, shape.B * shape.T * shape.C
    once = (pixels + tokens + shape.C * K + shape.T * shape.C) * itemsize(dtype)
    return once, once


def patch_embed_providers(shape: Shape, dtype: str) -> list[Provider]:
    searched = functools.partial(replaced, torch.backends.cudnn, "benchmark", True)
    return [
        eager(patch_embed_ref),
        plain("eager, cudnn.benchmark", patch_embed_ref, context=searched),
        ours("ours", fk.patch_embed),
        compiled(patch_embed_ref),
    ]


# --- attention on packed qkv

LONG_T = 1024  # above it the float64 oracle goes head by head: its scores are (B, H, T, T)


def attention_shapes() -> Iterator[Shape]:
    yield from vits()
    yield from token_sweep()
    yield from head_sweep()


def attention_inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
    return {"qkv": draw(shape.B, shape.T, 3, shape.H, shape.D)}


def by_head(qkv: Tensor) -> Tensor:
    """attention_ref head by head; the backward computes the scores of each head anew."""
    heads = [checkpoint(attention_ref, h, use_reentrant=False) for h in qkv.split(1, dim=3)]
    return torch.cat(heads, dim=2)


def attention_reference(shape: Shape, dtype: str) -> Function:
    def specification(qkv: Tensor) -> Tensor:
        long = qkv.dtype is torch.float64 and qkv.shape[1] > LONG_T
        return by_head(qkv) if long else attention_ref(qkv)

    return specification


def _attention_flops(H: int, D: int, pairs: int) -> Pair:
    """2 D a product, head and pair of tokens that see each other. Forward q k^T, p v; backward s
    again, dv, dp, dq, dk."""
    product = 2.0 * H * D * pairs
    return 2 * product, 5 * product


def _attention_bytes(tokens: int, C: int, H: int, dtype: str) -> Pair:
    """Forward: qkv in, out and lse out. Backward: qkv, out, dout, lse in, dqkv out."""
    tensor, lse = tokens * C * itemsize(dtype), 4 * H * tokens
    return 4 * tensor + lse, 8 * tensor + lse


def attention_flops(shape: Shape) -> Pair:
    return _attention_flops(shape.H, shape.D, shape.B * shape.T**2)


def attention_bytes(shape: Shape, dtype: str) -> Pair:
    return _attention_bytes(shape.B * shape.T, shape.C, shape.H, dtype)


def _output(result: Any) -> Tensor:
    """FlashAttention 3 and 4 give the output, or it and the lse."""
    return result if isinstance(result, Tensor) else result[0]


def _flash_attn(module: Any) -> Function:
    return lambda qkv: module.flash_attn_qkvpacked_func(qkv)


def _flash_attn_separate(module: Any) -> Function:
    return lambda qkv: _output(module.flash_attn_func(*qkv.unbind(2)))


def _xformers(module: Any) -> Function:
    return lambda qkv: module.memory_efficient_attention(*qkv.unbind(2))


def _split(shape: Shape, dtype: str, function: Function) -> list[Provider]:
    """Ours without the one-pass backward, for shapes that take it by themselves."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    sizes = (shape.B, shape.T, shape.H, shape.D)
    launch = bwd_launch(gpu(device), DTYPES[dtype], sizes, shape.T, "none", False, "ieee")
    if launch.one_pass is None:
        return []
    context = functools.partial(forced, "attention_bwd", BwdForm(one_pass=False))
    return [ours("ours-split", function, context)]


def attention_providers(shape: Shape, dtype: str) -> list[Provider]:
    found = [eager(attention_ref), *sdpa_backends(attention_ref), *sdpa_unpacked()]
    if dtype != "fp32":
        found.append(imported("flash_attn", "flash_attn", _flash_attn))
        found.append(imported("flash_attn_3", "flash_attn_interface", _flash_attn_separate))
        found.append(imported("flash_attn_4", "flash_attn.cute", _flash_attn_separate))
        found.append(imported("xformers", "xformers.ops", _xformers))
    found += [ours("ours", fk.attention), *_split(shape, dtype, fk.attention)]
    return [*found, compiled(attention_ref)]


# --- qkv_attention: the QKV projection and attention as one Function


def qkv_attention_shapes() -> Iterator[Shape]:
    yield from vits()
    yield from token_sweep(most=4097)


def qkv_attention_inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
    C = shape.C
    return {
        "x": draw(shape.B, shape.T, C),
        "weight": draw(3 * C, C, scale=C**-0.5),
        "bias": draw(3 * C),
    }


def qkv_attention_reference(shape: Shape, dtype: str) -> Function:
    attend = attention_reference(shape, dtype)

    def specification(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return attend(F.linear(x, weight, bias).unflatten(-1, (3, shape.H, shape.D)))

    return specification


def qkv_attention_flops(shape: Shape) -> Pair:
    """The projection, 2 B T C 3C forward and twice that backward, and attention's."""
    projection = 6.0 * shape.B * shape.T * shape.C**2
    forward, backward = attention_flops(shape)
    return projection + forward, 2 * projection + backward


def qkv_attention_bytes(shape: Shape, dtype: str) -> Pair:
    """Forward: x, W in; qkv, out, lse out. Backward: x, W, qkv, out, dout, lse in; dx, dW out."""
    rows, C = shape.B * shape.T, shape.C
    lse = 4 * shape.H * rows
    forward, backward = rows * 5 * C + 3 * C * C, rows * 7 * C + 6 * C * C
    return forward * itemsize(dtype) + lse, backward * itemsize(dtype) + lse


def qkv_attention_providers(shape: Shape, dtype: str) -> list[Provider]:
    torch_ = functools.partial(qkv_attention_ref, num_heads=shape.H)
    fused = functools.partial(fk.qkv_attention, num_heads=shape.H)
    found = [eager(torch_), *sdpa_backends(torch_), ours("ours", fused)]
    return [*found, *_split(shape, dtype, fused), compiled(torch_)]


# --- rope: queries and keys of a packed qkv, qk-norm or none

# Tokens -> of them prefix: DINOv3 at 224 and 256, Perception Encoder and EVA02 at 448.
PREFIX = {201: 5, 261: 5, 1025: 1}
INTERLEAVED = "interleaved"  # Perception Encoder, EVA02, V-JEPA 2
NORMED = "layer_norm"
LEARNT = "learnt"  # tables of each head, with gradients: RoPE-ViT "mixed"


def _prefix(shape: Shape) -> int:
    return PREFIX.get(shape.T, 1)  # other lengths: a class token


def rope_shapes() -> Iterator[Shape]:
    for T in PREFIX:
        for model in ("B", "L", "S"):
            C, _, H, width = VITS[model]
            tier = int(T != 201) if model == "B" else 2
            shape = Shape(f"ViT-{model}", batch(T), T, C, H, width, tier)
            yield shape
            yield replace(shape, variant=INTERLEAVED)
            yield replace(shape, variant=NORMED)
    C, _, H, width = VITS["B"]
    yield Shape("ViT-B", batch(197), 197, C, H, width, 1, variant=LEARNT)


def _tables(shape: Shape, draw: Draw) -> Inputs:
    """cos and sin, and the parameters of a norm."""
    learns = shape.variant == LEARNT
    heads = (1, shape.H) if learns else ()
    angles = 3 * draw(*heads, shape.T - _prefix(shape), shape.D, grad=False).float()
    found: Inputs = {
        name: table.requires_grad_(learns)
        for name, table in (("cos", angles.cos()), ("sin", angles.sin()))
    }
    if shape.variant == NORMED:
        found |= {f"{x}_norm_{name}": draw(shape.D) for x in "qk" for name in ("weight", "bias")}
    return found


def rope_inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
    qkv = draw(shape.B, shape.T, 3, shape.H, shape.D, grad=False)
    q, k = (qkv[:, :, i].requires_grad_() for i in (0, 1))
    return {"q": q, "k": k, **_tables(shape, draw)}


def _applied(function: Function, shape: Shape) -> Function:
    """An op that applies RoPE, with the options of this shape."""
    return functools.partial(
        function, interleaved=shape.variant in (INTERLEAVED, LEARNT),
        prefix_tokens=_prefix(shape), norm=NORMED if shape.variant == NORMED else None,
    )  # fmt: skip


def rope_reference(shape: Shape, dtype: str) -> Function:
    return _applied(rope_ref, shape)


def rope_flops(shape: Shape) -> Pair:
    """An element of q and of k: 3 each way; a norm 7 forward, 13 backward; tables that learn 4."""
    forward, backward = (10.0, 16.0) if shape.variant == NORMED else (3.0, 3.0)
    backward += 4.0 if shape.variant == LEARNT else 0.0
    elements = 2 * shape.B * shape.T * shape.C
    return forward * elements, backward * elements


def _table_bytes(shape: Shape) -> int:
    """Of cos and sin, fp32."""
    heads = shape.H if shape.variant == LEARNT else 1
    return 2 * 4 * heads * (shape.T - _prefix(shape)) * shape.D


def rope_bytes(shape: Shape, dtype: str) -> Pair:
    """q and k in and out, the tables in; the backward of a norm reads q and k again, that of tables
    too, and writes their gradients."""
    operand = 2 * shape.B * shape.T * shape.C * itemsize(dtype)
    forward = 2 * operand + _table_bytes(shape)
    backward = forward + (operand if shape.variant in (NORMED, LEARNT) else 0)
    return forward, backward + (_table_bytes(shape) if shape.variant == LEARNT else 0)


def rope_providers(shape: Shape, dtype: str) -> list[Provider]:
    torch_ = _applied(rope_ref, shape)
    return [eager(torch_), ours("ours", _applied(fk.rope, shape)), compiled(torch_)]


# --- rope_attention


def rope_attention_inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
    return {**qkv_attention_inputs(shape, dtype, draw), **_tables(shape, draw)}


def _in_parts(shape: Shape, linear: Function, rope: Function, attend: Function) -> Function:
    """Projection, RoPE and attention as ops of their own."""
    rope = _applied(rope, shape)

    def run(x: Tensor, weight: Tensor, bias: Tensor, **tables: Tensor) -> Tensor:
        q, k, v = linear(x, weight, bias).unflatten(-1, (3, shape.H, shape.D)).unbind(2)
        return attend(*rope(q, k, **tables), v)

    return run


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return fk.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def rope_attention_reference(shape: Shape, dtype: str) -> Function:
    attend = attention_reference(shape, dtype)
    return _in_parts(shape, F.linear, rope_ref, lambda *qkv: attend(torch.stack(qkv, 2)))


def rope_attention_flops(shape: Shape) -> Pair:
    (a, b), (c, d) = qkv_attention_flops(shape), rope_flops(shape)
    return a + c, b + d


def rope_attention_bytes(shape: Shape, dtype: str) -> Pair:
    """Those of qkv_attention, in which q and k could turn where they are loaded; the tables in."""
    forward, backward = qkv_attention_bytes(shape, dtype)
    return forward + _table_bytes(shape), backward + _table_bytes(shape)


def rope_attention_providers(shape: Shape, dtype: str) -> list[Provider]:
    def whole(function: Function) -> Function:
        return functools.partial(_applied(function, shape), num_heads=shape.H)

    torch_ = whole(rope_attention_ref)
    parts = _in_parts(shape, fk.linear, fk.rope, _heads_first)
    return [
        eager(torch_), *sdpa_backends(torch_), ours("ours", whole(fk.rope_attention)),
        ours("ours-parts", parts), compiled(torch_),
    ]  # fmt: skip


# --- varlen_attention. What the host knows of the lengths (indices that pad, block masks) is made
# once a case, as a model makes it once a step. The loop of SDPA waits for the device at each call.

EQUAL, SPREAD = "equal", "spread"  # all of T tokens; from T / 8 to T, in no order


def varlen_attention_shapes() -> Iterator[Shape]:
    """T is the longest sequence, B their number."""
    packed = vit("B", 224)
    yield replace(packed, variant=SPREAD)
    yield replace(packed, variant=EQUAL, tier=1)
    yield Shape("NaFlex-B", batch(1024), 1024, 768, 12, 3072, 1, variant=SPREAD)
    yield Shape("SigLIP2-So400m", batch(256), 256, 1152, 16, 4304, 1, variant=SPREAD)
    yield Shape("Qwen2.5-VL", batch(64), 64, 1280, 16, 3420, 1, variant=EQUAL)  # windows
    yield Shape("Qwen2-VL", batch(4096), 4096, 1280, 16, 5120, 2, variant=SPREAD)
    yield Shape("Swin-T", batch(49), 49, 96, 3, 384, 2, variant=EQUAL)


def lengths(shape: Shape) -> list[int]:
    """Of the sequences of a case, the same at every run."""
    if shape.variant != SPREAD or shape.B == 1:
        return [shape.T] * shape.B
    least = shape.T // 8
    found = [least + (shape.T - least) * i // (shape.B - 1) for i in range(shape.B)]
    random.Random(0).shuffle(found)
    return found


def varlen_attention_inputs(shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
    starts = torch.tensor([0, *lengths(shape)]).cumsum(0, dtype=torch.int32)
    qkv = draw(sum(lengths(shape)), 3, shape.H, shape.D)
    return {"qkv": qkv, "cu_seqlens": starts.to(draw.device)}


def varlen_attention_reference(shape: Shape, dtype: str) -> Function:
    def specification(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        if qkv.dtype is torch.float64 and shape.T > LONG_T:
            parts = qkv.unsqueeze(0).split(lengths(shape), dim=1)
            return torch.cat([by_head(part) for part in parts], dim=1).squeeze(0)
        return varlen_attention_ref(qkv, cu_seqlens, shape.T)

    return specification


def varlen_attention_flops(shape: Shape) -> Pair:
    return _attention_flops(shape.H, shape.D, sum(n * n for n in lengths(shape)))


def varlen_attention_bytes(shape: Shape, dtype: str) -> Pair:
    """Those of attention on as many tokens."""
    return _attention_bytes(sum(lengths(shape)), shape.C, shape.H, dtype)


def on_padded(shape: Shape, attend: Function) -> Function:
    """`attend(qkv, attn_mask)` of padded qkv under a mask of keys, (B, 1, 1, T): tokens go to
    places of (B, T) by indices, and back."""

    @functools.cache
    def indices(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        n = torch.tensor(lengths(shape), device=device)
        offs = torch.arange(shape.T, device=device)
        shown = offs < n[:, None]
        starts = n.cumsum(0) - n
        token = torch.where(shown, starts[:, None] + offs, 0)
        return shown, token, shown.flatten().nonzero().squeeze(1)

    def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        shown, token, place = indices(qkv.device)
        return attend(qkv[token], attn_mask=shown[:, None, None]).flatten(0, 1)[place]

    return run


def on_nested(shape: Shape) -> Function:
    """SDPA of torch's nested tensors, laid out (total, H, D): q, k and v are copies."""

    def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = (
            torch.nested.nested_tensor_from_jagged(
                x.contiguous(), cu_seqlens, min_seqlen=min(lengths(shape)), max_seqlen=shape.T
            ).transpose(1, 2)
            for x in qkv.unbind(1)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()

    return run


def by_flex(shape: Shape) -> Function:
    """flex_attention, compiled, whose block mask keeps documents apart."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    run_flex = torch.compile(flex.flex_attention, dynamic=False)
    total = sum(lengths(shape))

    @functools.cache
    def mask(device: torch.device) -> Any:
        n = torch.tensor(lengths(shape), device=device)
        document = torch.arange(shape.B, device=device).repeat_interleave(n)

        def together(b: Any, h: Any, q: Any, kv: Any) -> Any:
            return document[q] == document[kv]

        return flex.create_block_mask(together, None, None, total, total, device=device)

    def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in qkv.unbind(1))
        return run_flex(q, k, v, block_mask=mask(qkv.device)).squeeze(0).transpose(0, 1)

    return run


def _varlen_peers(shape: Shape) -> list[Provider]:
    T = shape.T

    def torch_varlen(module: Any) -> Function:
        return lambda qkv, cu_seqlens: module.varlen_attn(
            *qkv.unbind(1), cu_seqlens, cu_seqlens, T, T
        )

    def flash_attn(module: Any) -> Function:
        return lambda qkv, cu_seqlens: module.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, T)

    def separate(module: Any) -> Function:
        def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
            given = {f"cu_seqlens_{x}": cu_seqlens for x in "qk"}
            given |= {f"max_seqlen_{x}": T for x in "qk"}
            return _output(module.flash_attn_varlen_func(*qkv.unbind(1), **given))

        return run

    def xformers(module: Any) -> Function:
        mask = module.fmha.attn_bias.BlockDiagonalMask.from_seqlens(lengths(shape))

        def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
            q, k, v = (x.unsqueeze(0) for x in qkv.unbind(1))
            return module.memory_efficient_attention(q, k, v, attn_bias=mask).squeeze(0)

        return run

    return [
        imported("torch-varlen", "torch.nn.attention.varlen", torch_varlen),
        imported("flash_attn", "flash_attn", flash_attn),
        imported("flash_attn_3", "flash_attn_interface", separate),
        imported("flash_attn_4", "flash_attn.cute", separate),
        imported("xformers", "xformers.ops", xformers),
    ]


def varlen_attention_providers(shape: Shape, dtype: str) -> list[Provider]:
    def fused(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        return fk.varlen_attention(qkv, cu_seqlens, shape.T)

    return [
        eager(lambda qkv, cu_seqlens: varlen_attention_ref(qkv, cu_seqlens, shape.T)),
        plain("sdpa-padded", on_padded(shape, attention_ref)), plain("nested", on_nested(shape)),
        *(_varlen_peers(shape) if dtype != "fp32" else ()),
        ours("ours", fused), ours("ours-padded", on_padded(shape, fk.attention)),
        Provider("compile", lambda: by_flex(shape), compiled=True),
    ]  # fmt: skip


# --- the table

NORM_DTYPES = ("bf16", "amp", "fp16", "fp32")


def _reference(function: Function) -> Callable[[Shape, str], Function]:
    return lambda shape, dtype: function


OPS = {
    op.name: op
    for op in (
        Op("layer_norm", layer_norm_shapes, layer_norm_inputs, layer_norm_reference,
           layer_norm_providers, layer_norm_flops, layer_norm_bytes, NORM_DTYPES),
        Op("rms_norm", rms_norm_shapes, rms_norm_inputs, rms_norm_reference,
           rms_norm_providers, rms_norm_flops, rms_norm_bytes, NORM_DTYPES),
        Op("linear", linear_shapes, linear_inputs, linear_reference,
           linear_providers, linear_flops, linear_bytes),
        Op("rope", rope_shapes, rope_inputs, rope_reference,
           rope_providers, rope_flops, rope_bytes),
        Op("attention", attention_shapes, attention_inputs, attention_reference,
           attention_providers, attention_flops, attention_bytes),
        Op("qkv_attention", qkv_attention_shapes, qkv_attention_inputs, qkv_attention_reference,
           qkv_attention_providers, qkv_attention_flops, qkv_attention_bytes),
        Op("rope_attention", rope_shapes, rope_attention_inputs, rope_attention_reference,
           rope_attention_providers, rope_attention_flops, rope_attention_bytes),
        Op("varlen_attention", varlen_attention_shapes, varlen_attention_inputs,
           varlen_attention_reference, varlen_attention_providers, varlen_attention_flops,
           varlen_attention_bytes),
        Op("mlp", vits, mlp_inputs, _reference(mlp_ref),
           mlp_providers, mlp_flops, mlp_bytes),
        Op("gated_mlp", gated_mlp_shapes, gated_mlp_inputs, _reference(gated_mlp_ref),
           gated_mlp_providers, gated_mlp_flops, gated_mlp_bytes),
        Op("patch_embed", vits, patch_embed_inputs, _reference(patch_embed_ref),
           patch_embed_providers, patch_embed_flops, patch_embed_bytes),
    )
}  # fmt: skip
