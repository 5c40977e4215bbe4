"""What is measured of each op: shapes, providers, FLOP and bytes. The rest is in its entry of
fastvit_kernels/verify: the function, its specification, its tensors.

FLOP and bytes are those of the mathematics: what any implementation must do and move at least,
every operand read once and every result written once. Each count is of (forward, backward).
"""

from __future__ import annotations

import functools
import importlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
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
from fastvit_kernels.ops.attention.configs import BWD_TABLE, FWD_TABLE, BwdForm, forced_route
from fastvit_kernels.ops.attention.functions import attention_ref
from fastvit_kernels.ops.attention.launch import Problem, bwd_launch
from fastvit_kernels.ops.rope import rope_ref
from fastvit_kernels.runtime.backend import gpu
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.runtime.dtypes import DTYPES
from fastvit_kernels.verify import cases, op

MODES = ("fwd", "bwd", "both")
Pair = tuple[float, float]  # of the forward, of the backward
EPS = 1e-6


class Draw(op.Draw):
    """Random tensors, the same at every run; the device draws them itself."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        super().__init__(device, dtype)
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        x = torch.randn(*shape, generator=self.generator, device=self.device) * scale
        return x.to(self.dtype).requires_grad_(grad)


@dataclass(frozen=True)
class Op:
    """One line of the table OPS.

    flops: of (forward, backward).
    moved: by variant ("" for the others) names of the tensors that a forward and a backward move.
    peers: all providers but eager, ours and the compiled one; given the functions of the first two.
    usual: what PyTorch's users call, if not the specification.
    long: the specification in float64 where T is above LONG_T: its scores are (B, H, T, T).
    sizes: those that a ViT's do not give. options: arguments that are no tensors.
    given: tensors, if not those that most models give.
    """

    name: str
    shapes: Callable[[], Iterator[Shape]]
    counted_flops: Callable[[Shape], Pair]
    moved: Mapping[str, tuple[str, str]]
    peers: Callable[[Shape, str, Function, Function], list[Provider]] = lambda *_: []
    usual: Function | None = None
    long: Callable[[Shape], Function] | None = None
    compiled: Callable[[Shape], Function] | None = None
    sizes: Callable[[Shape], dict[str, Any]] = lambda shape: {}
    options: Callable[[Shape], dict[str, Any]] = lambda shape: {}
    given: Callable[[Shape], tuple[str, ...]] = lambda shape: ()
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")

    @property
    def entry(self) -> op.Op:
        return cases.OPS[self.name]

    def example(self, shape: Shape) -> op.Example:
        """Its sizes and which tensors are given."""
        sides, args = (shape.size, shape.size), self.entry.args
        sizes = op.Sizes(shape.B, shape.T, shape.C, shape.H, shape.F, sides, shape.patch or 1)
        given = self.given(shape) or tuple(n for n, arg in args.items() if arg.usual)
        return op.Example({**self.entry.at(sizes), **self.sizes(shape)}, only=given)

    def inputs(self, shape: Shape, dtype: torch.dtype, draw: Draw) -> Inputs:
        """Its tensors by name; those that training updates or passes back are leaves."""
        example, args = self.example(shape), self.entry.args
        found = {n: x for n, x in self.entry.inputs(example, draw).items() if x is not None}
        if "q" in found:  # of a packed qkv
            qkv = draw(shape.B, shape.T, 3, shape.H, shape.D, grad=False)
            found |= {"q": qkv[:, :, 0], "k": qkv[:, :, 1]}
        if "cos" in found:
            angles = 3 * found["cos"].float()
            found |= {"cos": angles.cos(), "sin": angles.sin()}
        leaves: Inputs = {
            n: x.detach().requires_grad_(args[n].trained or shape.variant == LEARNT)
            for n, x in found.items()
        }
        settings = self.entry.settings_of(example.sizes, draw.device)
        return leaves | {n: x for n, x in settings.items() if isinstance(x, Tensor)}

    def _with_options(self, function: Function, shape: Shape) -> Function:
        settings = self.entry.settings_of(self.example(shape).sizes, torch.device("cpu"))
        options = {n: x for n, x in settings.items() if not isinstance(x, Tensor)}
        return functools.partial(function, **options, **self.options(shape))

    def reference(self, shape: Shape, dtype: str) -> Function:
        """The specification; a norm's rounds under amp, but for the oracle."""
        whole = self._with_options(self.entry.specification, shape)
        if dtype == "amp":
            whole = functools.partial(whole, out_dtype=torch.bfloat16)
        if self.long is None:
            return whole
        by_parts = self.long(shape)

        def specification(**inputs: Tensor) -> Any:
            first = next(iter(inputs.values()))
            long = first.dtype is torch.float64 and shape.T > LONG_T
            return (by_parts if long else whole)(**inputs)

        return specification

    def providers(self, shape: Shape, dtype: str) -> list[Provider]:
        torch_ = self.usual or self._with_options(self.entry.specification, shape)
        fused = self._with_options(self.entry.function, shape)
        peers = self.peers(shape, dtype, torch_, fused)
        if dtype == "amp":
            peers, torch_ = [], _rounded(torch_)
            fused = functools.partial(fused, out_dtype=torch.bfloat16)
        make = self.compiled
        last = compiled(torch_) if make is None else Provider(
            "compile", lambda: make(shape), compiled=True
        )  # fmt: skip
        return [eager(torch_), *peers, ours("ours", fused), last]

    def everyone(self, shape: Shape, dtype: str) -> list[Provider]:
        """Its providers, the compiled ones also as max-autotune finds them."""
        return with_autotuned(self.providers(shape, dtype))

    def flops(self, shape: Shape, mode: str) -> float:
        return _of_mode(self.counted_flops(shape), mode)

    def bytes(self, shape: Shape, dtype: str, mode: str) -> float:
        forward, backward = self.moved.get(shape.variant) or self.moved[""]
        size = self._bytes(shape, dtype)
        moved = [sum(size[n] for n in names.split()) for names in (forward, backward)]
        return _of_mode((moved[0], moved[1]), mode)

    def _bytes(self, shape: Shape, dtype: str) -> dict[str, int]:
        """By name: of the arguments, their gradients, and what a forward leaves."""
        x, y = (4, 2) if dtype == "amp" else (itemsize(dtype), itemsize(dtype))
        example = self.example(shape)
        found = {
            n: math.prod(dims) * (4 if n in ("cos", "sin") else x)
            for n, dims in self.entry.shapes_of(example.sizes).items()
            if n in example.only
        }
        tokens = sum(lengths(shape)) if self.name == "varlen_attention" else shape.B * shape.T
        rows = found["x"] // x // example.sizes["C"] if self.name.endswith("norm") else tokens
        found |= {
            "y": tokens * example.sizes.get("N", shape.C) * y, "hidden": tokens * shape.F * y,
            "heads": 3 * tokens * shape.C * y, "lse": 4 * shape.H * tokens,
            "mean": 4 * rows, "rstd": 4 * rows,
        }  # fmt: skip
        found.setdefault("gate_weight", 0)  # packed: fc1_weight has both
        return found | {f"d{n}": size for n, size in found.items()}


def _of_mode(pair: Pair, mode: str) -> float:
    forward, backward = pair
    return float({"fwd": forward, "bwd": backward, "both": forward + backward}[mode])


def itemsize(dtype: str) -> int:
    return DTYPES[dtype].itemsize


def _elements(shape: Shape, forward: float, backward: float) -> Pair:
    """So many FLOP an element of (B, T, C)."""
    elements = shape.B * shape.T * shape.C
    return forward * elements, backward * elements


def _products(shape: Shape, K: int, N: int) -> Pair:
    """Of (B T, K) and (K, N): 2 M N K forward; backward as much for dx and for dweight."""
    forward = 2.0 * shape.B * shape.T * N * K
    return forward, 2 * forward


# --- layer_norm, rms_norm. `amp`: fp32 in, bf16 out, as in training

HEADS = "heads"  # a norm of each head's queries: rows of D
ADDED = "added"  # behind a branch: it adds the residual
NORM_DTYPES = ("bf16", "amp", "fp16", "fp32")


def layer_norm_shapes() -> Iterator[Shape]:
    yield from vits()
    yield from head_sweep(197)


def rms_norm_shapes() -> Iterator[Shape]:
    yield from vits()
    # Queries of DINOv3's and Perception Encoder's sizes; InternViT-6B normalises all heads at once.
    for T, H, D in ((201, 12, 64), (261, 16, 64), (1025, 25, 128)):
        yield Shape(f"D{D}", batch(T), T, H * D, H, 4 * H * D, 2, variant=HEADS)
    yield Shape("InternViT-6B", batch(1025), 1025, 3200, 25, 12800, 2)
    yield Shape("ViT-B", batch(257), 257, 768, 12, 3072, 1, variant=ADDED)


def _of_heads(shape: Shape) -> dict[str, Any]:
    return dict(rows=(shape.B, shape.T, shape.H), C=shape.D) if shape.variant == HEADS else {}


def layer_norm_flops(shape: Shape) -> Pair:
    """Forward mean 1, centre 1, squares 2, scale 1, affine 2; backward 13 likewise."""
    return _elements(shape, 7, 13)


def rms_norm_flops(shape: Shape) -> Pair:
    """Forward squares 2, scale 1, weight 1, a residual 1; backward 9 likewise."""
    return _elements(shape, 5 if shape.variant == ADDED else 4, 9)


def _torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def _torch_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], weight, EPS)
    return y if residual is None else residual + y


def _rounded(function: Function) -> Function:
    return lambda **inputs: function(**inputs).to(torch.bfloat16)


def _quack_layer_norm(module: Any) -> Function:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        return module.layernorm_fwd(rows, weight.float(), bias.float(), eps=EPS).view(x.shape)

    return run


def _layer_norm_peers(shape: Shape, dtype: str, *_: Function) -> list[Provider]:
    def liger(module: Any) -> Function:
        return lambda x, weight, bias: module.LigerLayerNormFunction.apply(x, weight, bias, EPS)

    return [
        imported("liger_kernel", "liger_kernel.ops.layer_norm", liger),
        imported("quack", "quack.rmsnorm", _quack_layer_norm, backward=False),
    ]


def _rms_norm_peers(shape: Shape, dtype: str, *_: Function) -> list[Provider]:
    """Liger's default rounds as Llama does; "gemma" keeps fp32 until the store, as we do."""

    def liger(module: Any) -> Function:
        settings = (EPS, 0.0, "gemma", False)
        return lambda x, weight: module.LigerRMSNormFunction.apply(x, weight, *settings)

    def quack(module: Any) -> Function:
        return lambda x, weight: module.rmsnorm(
            x.view(-1, x.shape[-1]), weight.float(), eps=EPS
        ).view(x.shape)

    if shape.variant == ADDED:
        return []
    return [
        imported("liger_kernel", "liger_kernel.ops.rms_norm", liger),
        imported("quack", "quack.rmsnorm", quack),
    ]


# --- linear with its two epilogues in a ViT: proj (LayerScale, residual), fc1 (exact GELU)


def linear_shapes() -> Iterator[Shape]:
    for shape in vits():
        for variant in ("proj", "fc1"):
            yield replace(shape, variant=variant)


def _is_fc1(shape: Shape) -> bool:
    return shape.variant == "fc1"


def linear_flops(shape: Shape) -> Pair:
    return _products(shape, shape.C, shape.F if _is_fc1(shape) else shape.C)


# --- mlp and gated_mlp, with the residual of their block

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


def _weights_lie(shape: Shape) -> dict[str, bool]:
    return dict(separate=shape.variant in ("separate", "norm"), norm=shape.variant == "norm")


def _stored(fused: Function) -> Provider:
    """Ours rebuilds activations in the backward; the same with all of them stored."""
    return ours("ours-stored", functools.partial(fused, recompute=False))


def _mlp_peers(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
    return [_stored(fused), *gemm_routes(fused)]


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


def _gated_mlp_peers(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
    liger = imported("liger_kernel", "liger_kernel.ops.swiglu", _liger_gated_mlp)
    return [_stored(fused)] if shape.variant == "norm" else [_stored(fused), liger]


# --- patch_embed with a class token and positions. Images need no gradient, as in training


def patch_embed_flops(shape: Shape) -> Pair:
    """2 C K a patch of K = 3 patch^2 pixels, forward and for dweight."""
    product = 2.0 * shape.B * (shape.T - 1) * shape.C * 3 * shape.patch**2
    return product, product


def _searched(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
    searched = functools.partial(replaced, torch.backends.cudnn, "benchmark", True)
    return [plain("eager, cudnn.benchmark", torch_, context=searched)]


# --- attention on packed qkv

LONG_T = 1024  # above it the float64 oracle goes head by head


def attention_shapes() -> Iterator[Shape]:
    yield from vits()
    yield from token_sweep()
    yield from head_sweep(197, 577, 1025)


def by_head(qkv: Tensor) -> Tensor:
    """attention_ref head by head; the backward computes the scores of each head anew."""
    heads = [checkpoint(attention_ref, h, use_reentrant=False) for h in qkv.split(1, dim=3)]
    return torch.cat(heads, dim=2)


def _attention_flops(H: int, D: int, pairs: int) -> Pair:
    """2 D a product, head and pair of tokens that see each other. Forward q k^T, p v; backward s
    again, dv, dp, dq, dk."""
    product = 2.0 * H * D * pairs
    return 2 * product, 5 * product


def attention_flops(shape: Shape) -> Pair:
    return _attention_flops(shape.H, shape.D, shape.B * shape.T**2)


def _output(result: Any) -> Tensor:
    """FlashAttention 3 and 4 give the output, or it and the lse."""
    return result if isinstance(result, Tensor) else result[0]


def _other_ways(shape: Shape, dtype: str, function: Function) -> list[Provider]:
    """Ours by each route that the tables do not take, plain Triton beside Gluon, and without the
    one-pass backward where that runs by itself."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    sizes = (shape.B, shape.T, shape.H, shape.D)
    problem = Problem(gpu(device), DTYPES[dtype], sizes, shape.T, "none", False, "ieee")
    taken = {t.choose(problem.gpu, *problem.key()).route for t in (FWD_TABLE, BWD_TABLE)}
    others = [route for route in ("library", "triton") if taken != {route} and dtype != "fp32"]
    ways = {f"ours-{route}": functools.partial(forced_route, route) for route in others}
    if bwd_launch(*problem).one_pass is not None:
        ways["ours-split"] = functools.partial(forced, "attention_bwd", BwdForm(one_pass=False))
    return [ours(name, function, context) for name, context in ways.items()]


def _attention_peers(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
    def packed(module: Any) -> Function:
        return lambda qkv: module.flash_attn_qkvpacked_func(qkv)

    def separate(module: Any) -> Function:
        return lambda qkv: _output(module.flash_attn_func(*qkv.unbind(2)))

    def xformers(module: Any) -> Function:
        return lambda qkv: module.memory_efficient_attention(*qkv.unbind(2))

    low = [
        imported("flash_attn", "flash_attn", packed),
        imported("flash_attn_3", "flash_attn_interface", separate),
        imported("flash_attn_4", "flash_attn.cute", separate),
        imported("xformers", "xformers.ops", xformers),
    ]
    return [
        *sdpa_backends(torch_), *sdpa_unpacked(), *(low if dtype != "fp32" else ()),
        *_other_ways(shape, dtype, fused),
    ]  # fmt: skip


# --- qkv_attention: the QKV projection and attention as one Function


def qkv_attention_shapes() -> Iterator[Shape]:
    yield from vits()
    yield from token_sweep(most=4097)


def _projected_by_head(shape: Shape) -> Function:
    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return by_head(F.linear(x, weight, bias).unflatten(-1, (3, shape.H, shape.D)))

    return run


def qkv_attention_flops(shape: Shape) -> Pair:
    """The projection's and attention's."""
    (a, b), (c, d) = _products(shape, shape.C, 3 * shape.C), attention_flops(shape)
    return a + c, b + d


def _projected_peers(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
    return [*sdpa_backends(torch_), *_other_ways(shape, dtype, fused)]


# --- rope: queries and keys of a packed qkv, qk-norm or none; rope_attention

# Tokens -> of them prefix: DINOv3 at 224 and 256, Perception Encoder and EVA02 at 448.
PREFIX = {201: 5, 261: 5, 1025: 1}
INTERLEAVED = "interleaved"  # Perception Encoder, EVA02, V-JEPA 2
NORMED = "layer_norm"
LEARNT = "learnt"  # tables of each head, with gradients: RoPE-ViT "mixed"


def rope_shapes() -> Iterator[Shape]:
    for T in PREFIX:
        for model in ("B", "L", "S"):
            C, _, H, width = VITS[model]
            tier = int(T != 201) if model == "B" else 2
            for variant in ("", INTERLEAVED, NORMED):
                yield Shape(f"ViT-{model}", batch(T), T, C, H, width, tier, variant=variant)
    yield replace(vit("B", 224, 1), variant=LEARNT)


def _rope_sizes(shape: Shape) -> dict[str, Any]:
    """Lengths that are not in PREFIX have a class token."""
    learnt, normed = shape.variant == LEARNT, shape.variant == NORMED
    return dict(
        prefix=PREFIX.get(shape.T, 1), lead=(1, shape.H) if learnt else (),
        norm=NORMED if normed else None,
    )  # fmt: skip


def _rope_options(shape: Shape) -> dict[str, Any]:
    return dict(interleaved=shape.variant in (INTERLEAVED, LEARNT))


def rope_flops(shape: Shape) -> Pair:
    """An element of q and of k: 3 each way; a norm 7 forward, 13 backward; tables that learn 4."""
    forward, backward = (10, 16) if shape.variant == NORMED else (3, 3)
    backward += 4 if shape.variant == LEARNT else 0
    return _elements(shape, 2 * forward, 2 * backward)


def _in_parts(shape: Shape, linear: Function, rope: Function, attend: Function) -> Function:
    """Projection, RoPE and attention as ops of their own."""
    sizes = _rope_sizes(shape)
    rope = functools.partial(
        rope, prefix_tokens=sizes["prefix"], norm=sizes["norm"], **_rope_options(shape)
    )

    def run(x: Tensor, weight: Tensor, bias: Tensor, **tables: Tensor) -> Tensor:
        q, k, v = linear(x, weight, bias).unflatten(-1, (3, shape.H, shape.D)).unbind(2)
        return attend(*rope(q, k, **tables), v)

    return run


def _turned_by_head(shape: Shape) -> Function:
    return _in_parts(shape, F.linear, rope_ref, lambda *qkv: by_head(torch.stack(qkv, 2)))


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return fk.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def rope_attention_flops(shape: Shape) -> Pair:
    (a, b), (c, d) = qkv_attention_flops(shape), rope_flops(shape)
    return a + c, b + d


def _turned_peers(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
    parts = _in_parts(shape, fk.linear, fk.rope, _heads_first)
    return [*sdpa_backends(torch_), ours("ours-parts", parts)]


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


def varlen_attention_flops(shape: Shape) -> Pair:
    return _attention_flops(shape.H, shape.D, sum(n * n for n in lengths(shape)))


def _packed_by_head(shape: Shape) -> Function:
    def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        parts = qkv.unsqueeze(0).split(lengths(shape), dim=1)
        return torch.cat([by_head(part) for part in parts], dim=1).squeeze(0)

    return run


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


def _varlen_peers(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
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

    own = [
        plain("sdpa-padded", on_padded(shape, attention_ref)), plain("nested", on_nested(shape)),
        ours("ours-padded", on_padded(shape, fk.attention)),
    ]  # fmt: skip
    return own if dtype == "fp32" else [
        *own, imported("torch-varlen", "torch.nn.attention.varlen", torch_varlen),
        imported("flash_attn", "flash_attn", flash_attn),
        imported("flash_attn_3", "flash_attn_interface", separate),
        imported("flash_attn_4", "flash_attn.cute", separate),
        imported("xformers", "xformers.ops", xformers),
    ]  # fmt: skip


# --- the table

_FC1 = ("x", "weight", "bias")
_ATTENTION = ("qkv y lse", "dy qkv y lse dqkv")
_PROJECTED = ("x weight heads y lse", "dy x weight heads y lse dx dweight")
_HIDDEN = "fc1_weight fc2_weight"
_GATED = f"gate_weight {_HIDDEN}"
_GATED_FORWARD = f"x residual {_GATED} y hidden hidden"
_GATED_BACKWARD = f"dy x hidden hidden {_GATED} dx dgate_weight dfc1_weight dfc2_weight"

OPS = {
    op.name: op
    for op in (
        Op(
            "layer_norm", layer_norm_shapes, layer_norm_flops,
            {"": ("x y mean rstd", "dy x dx mean rstd")},
            _layer_norm_peers, _torch_layer_norm, dtypes=NORM_DTYPES,
        ),
        Op(
            "rms_norm", rms_norm_shapes, rms_norm_flops,
            {"": ("x y rstd", "dy x dx rstd"), ADDED: ("x residual y rstd", "dy x dx rstd")},
            _rms_norm_peers, _torch_rms_norm, sizes=_of_heads,
            given=lambda s: ("x", "weight", "residual") if s.variant == ADDED else (),
            dtypes=NORM_DTYPES,
        ),
        Op(
            "linear", linear_shapes, linear_flops,
            # dresidual is dy; what the GELU took is kept
            {"": ("x weight residual y", "dy x weight dx dweight"),
             "fc1": ("x weight y y", "dy x weight y dx dweight")},
            lambda shape, dtype, torch_, fused: gemm_routes(fused),
            sizes=lambda s: dict(N=s.F) if _is_fc1(s) else {},
            options=lambda s: dict(activation="gelu" if _is_fc1(s) else None),
            given=lambda s: _FC1 if _is_fc1(s) else (*_FC1, "residual", "layer_scale"),
        ),
        Op(
            "rope", rope_shapes, rope_flops,
            {"": ("q k cos sin q k", "dq dk cos sin dq dk"),
             NORMED: ("q k cos sin q k", "dq dk q k cos sin dq dk"),
             LEARNT: ("q k cos sin q k", "dq dk q k cos sin dq dk dcos dsin")},
            sizes=_rope_sizes, options=_rope_options,
        ),
        Op(
            "attention", attention_shapes, attention_flops, {"": _ATTENTION}, _attention_peers,
            long=lambda shape: by_head,
        ),
        Op(
            "qkv_attention", qkv_attention_shapes, qkv_attention_flops,
            {"": _PROJECTED}, _projected_peers, long=_projected_by_head,
        ),
        Op(
            "rope_attention", rope_shapes, rope_attention_flops,
            # q and k could turn where they are loaded
            {"": (f"cos sin {_PROJECTED[0]}", f"cos sin {_PROJECTED[1]}")},
            _turned_peers, long=_turned_by_head, sizes=_rope_sizes, options=_rope_options,
        ),
        Op(
            "varlen_attention", varlen_attention_shapes, varlen_attention_flops,
            {"": _ATTENTION}, _varlen_peers, long=_packed_by_head, compiled=by_flex,
            sizes=lambda s: dict(lengths=tuple(lengths(s))),
        ),
        Op(
            "mlp", vits, lambda s: _products(s, s.C, 2 * s.F),
            {"": (f"x residual {_HIDDEN} y hidden",
                  f"dy x hidden {_HIDDEN} dx dfc1_weight dfc2_weight")},
            _mlp_peers,
        ),
        Op(
            "gated_mlp", gated_mlp_shapes, lambda s: _products(s, s.C, 3 * s.F),
            {"": (_GATED_FORWARD, _GATED_BACKWARD),
             "norm": (f"{_GATED_FORWARD} mean rstd", f"{_GATED_BACKWARD} mean rstd")},
            _gated_mlp_peers, sizes=_weights_lie,
        ),
        Op(
            "patch_embed", vits, patch_embed_flops,
            {"": ("images weight pos_embed y", "images dweight dpos_embed dy")}, _searched,
        ),
    )
}  # fmt: skip
