"""What is measured of each op: shapes, providers, FLOP and bytes. The rest is in its entry of
fastvit_kernels/accuracy: the function, its specification, its tensors.

A provider is a function of an op's inputs by keyword, with the context that forces its route; or
the reason why it is not here. FLOP and bytes are those of the mathematics: what any implementation
must do and move at least, every operand read once and every result written once. Each count is of
(forward, backward).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fastvit_kernels as fk
from fastvit_kernels.accuracy import cases, op
from fastvit_kernels.ops.attention.configs import (
    BWD_TABLE,
    FUSED_DQ,
    FWD_TABLE,
    BwdForm,
    forced_route as attention_route,
)
from fastvit_kernels.ops.attention.functions import attention_ref
from fastvit_kernels.ops.attention.launch import Problem, bwd_launch
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.runtime.backend import gpu
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.runtime.dtypes import DTYPES

Function = Callable[..., Any]  # a Tensor, or several
Inputs = dict[str, Tensor]
Pair = tuple[float, float]  # of the forward, of the backward
MODES = ("fwd", "bwd", "both")
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
BASELINE, SEARCH = "eager", "compile-max-autotune"
EPS = 1e-6

# width C, heads H, MLP width F. arXiv:2010.11929, arXiv:2012.12877; g: arXiv:2106.04560
VITS = {
    "Ti": (192, 3, 768),
    "S": (384, 6, 1536),
    "B": (768, 12, 3072),
    "L": (1024, 16, 4096),
    "H": (1280, 16, 5120),
    "g": (1408, 16, 6144),
}
# Tower -> T, C, H, F, how the weights of its gated_mlp lie. timm 1.0.31, transformers 5.23.
TOWERS = {
    "EVA02-L": (257, 1024, 16, 2730, "norm"),
    "EVA02-B": (257, 768, 12, 2048, "norm"),
    "DINOv2-g": (257, 1536, 24, 4096, "packed"),
    "DINOv3-H+": (201, 1280, 20, 5120, "separate"),
    "AIMv2-L": (256, 1024, 8, 2816, "separate"),
    "DINOv3-7B": (201, 4096, 32, 8192, "separate"),
}
TOKENS = 128 * 197  # B T of every shape: ViT-B at 224 with 128 images
T_SWEEP = (50, 197, 257, 577, 785, 1025, 1370, 2305, 4097, 16385)
D_SWEEP = ((32, 24), (80, 16), (96, 8), (128, 6))  # head dim, heads: C = 768, and ViT-H's 1280
LONG_T = 1024  # above it the float64 oracle of attention goes head by head
# Tokens -> of them prefix: DINOv3 at 224 and 256, Perception Encoder and EVA02 at 448.
PREFIX = {201: 5, 261: 5, 1025: 1}

# Variants of a shape.
HEADS = "heads"  # a norm of each head's queries: rows of D
ADDED = "added"  # a norm behind a branch: it adds the residual
INTERLEAVED = "interleaved"  # RoPE of Perception Encoder, EVA02, V-JEPA 2
NORMED = "layer_norm"  # RoPE with qk-norm
LEARNT = "learnt"  # RoPE tables of each head, with gradients: RoPE-ViT "mixed"
EQUAL, SPREAD = "equal", "spread"  # lengths: all of T tokens; from T / 8 to T, in no order


# --- shapes


@dataclass(frozen=True)
class Shape:
    """What an op is measured at; the more telling come first."""

    model: str
    B: int
    T: int
    C: int
    H: int
    F: int
    size: int = 0  # image side and patch, 0 in the sweeps
    patch: int = 0
    variant: str = ""  # an op's own cases: linear's proj and fc1

    @property
    def D(self) -> int:
        return self.C // self.H

    @property
    def id(self) -> str:
        variant = f"-{self.variant}" if self.variant else ""
        return f"{self.model}-B{self.B}-T{self.T}-C{self.C}-H{self.H}{variant}"


def batch(T: int) -> int:
    """Images of T tokens that make about TOKENS."""
    return max(1, round(TOKENS / T))


def vit(model: str, size: int = 224) -> Shape:
    """The shape inside a ViT on size x size images, with a class token. Patches are 16 x 16, but
    14 x 14 for H and g and at 518 (DINOv2)."""
    C, H, F = VITS[model]
    patch = 14 if model in ("H", "g") or size == 518 else 16
    side = size // patch
    T = side * side + 1
    return Shape(f"ViT-{model}", batch(T), T, C, H, F, side * patch, patch)


def vits() -> Iterator[Shape]:
    """All at 224, B at 384 and 518 too."""
    yield from (vit(model) for model in "B L S H Ti g".split())
    yield from (vit("B", 384), vit("B", 518))


def token_sweep() -> Iterator[Shape]:
    C, H, F = VITS["B"]
    return (Shape("sweep-T", batch(T), T, C, H, F) for T in T_SWEEP)


def head_sweep(*tokens: int) -> Iterator[Shape]:
    """D in 32, 80, 96, 128 at each T; 64 is ViT-B's own."""
    for D, H in D_SWEEP:
        for T in tokens:
            yield Shape(f"sweep-D{D}", batch(T), T, D * H, H, 4 * D * H)


def rms_norm_shapes() -> Iterator[Shape]:
    yield from vits()
    yield Shape("ViT-B", batch(257), 257, 768, 12, 3072, variant=ADDED)
    # Queries of DINOv3's and Perception Encoder's sizes; InternViT-6B normalises all heads at once.
    for T, H, D in ((201, 12, 64), (261, 16, 64), (1025, 25, 128)):
        yield Shape(f"D{D}", batch(T), T, H * D, H, 4 * H * D, variant=HEADS)
    yield Shape("InternViT-6B", batch(1025), 1025, 3200, 25, 12800)


def gated_mlp_shapes() -> Iterator[Shape]:
    """Packed weights, separate ones, separate ones with a LayerNorm inside."""
    yield replace(vit("B"), F=2048, variant="packed")
    for model, (T, C, H, width, form) in TOWERS.items():
        yield Shape(model, batch(T), T, C, H, width, variant=form)


def rope_shapes() -> Iterator[Shape]:
    for T in PREFIX:
        for model in "BLS":
            C, H, width = VITS[model]
            for variant in ("", INTERLEAVED, NORMED):
                yield Shape(f"ViT-{model}", batch(T), T, C, H, width, variant=variant)
    yield replace(vit("B"), variant=LEARNT)


def varlen_attention_shapes() -> Iterator[Shape]:
    """T is the longest sequence, B their number."""
    yield replace(vit("B"), variant=SPREAD)
    yield replace(vit("B"), variant=EQUAL)
    yield Shape("NaFlex-B", batch(1024), 1024, 768, 12, 3072, variant=SPREAD)
    yield Shape("SigLIP2-So400m", batch(256), 256, 1152, 16, 4304, variant=SPREAD)
    yield Shape("Qwen2.5-VL", batch(64), 64, 1280, 16, 3420, variant=EQUAL)  # windows
    yield Shape("Qwen2-VL", batch(4096), 4096, 1280, 16, 5120, variant=SPREAD)
    yield Shape("Swin-T", batch(49), 49, 96, 3, 384, variant=EQUAL)


def lengths(shape: Shape) -> list[int]:
    """Of the sequences of a case, the same at every run."""
    if shape.variant != SPREAD or shape.B == 1:
        return [shape.T] * shape.B
    least = shape.T // 8
    found = [least + (shape.T - least) * i // (shape.B - 1) for i in range(shape.B)]
    random.Random(0).shuffle(found)
    return found


# --- providers


@dataclass(frozen=True)
class Provider:
    """A way to compute an op. `make` builds its function when it is first needed."""

    name: str
    make: Callable[[], Function]
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    backward: bool = True
    compiled: bool = False  # takes seconds to build
    package: str = ""  # or module, that must be installed
    ours: bool = False
    takes: Callable[[Inputs], Inputs] = dict  # what its function takes, made of the op's inputs

    @property
    def installed(self) -> bool:
        try:
            return not self.package or importlib.util.find_spec(self.package) is not None
        except ImportError:  # the package is absent, or cannot be imported itself
            return False


def plain(name: str, function: Function, **options: Any) -> Provider:
    return Provider(name, lambda: function, **options)


def compiled(name: str, make: Callable[[], Function]) -> Provider:
    """For the one shape of its case. Reset the compiler once before making several: it keeps only
    a few of each code object."""

    def keeps_buffers() -> AbstractContextManager[Any]:
        """A compiled backward may run many times over one forward: donated buffers forbid it."""
        import torch._functorch.config

        return torch._functorch.config.patch(donated_buffer=False)

    return Provider(name, make, keeps_buffers, compiled=True)


def ours(
    name: str, function: Function, context: Callable[[], Any] = nullcontext, **options: Any
) -> Provider:
    """One of this package's ops through its kernels, on the CPU through Triton's interpreter."""

    @contextmanager
    def forced() -> Iterator[None]:
        with fk.backend("triton"), context():
            yield

    return plain(name, function, context=forced, ours=True, **options)


def imported(name: str, module: str, call: Function, **options: Any) -> Provider:
    """A peer: `call` takes its module, then the op's inputs."""

    def make() -> Function:
        return functools.partial(call, importlib.import_module(module))

    return Provider(name, make, package=module, **options)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """owner.name is `value` inside: how a route is forced."""
    former = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, former)


def gemm_routes(function: Function) -> list[Provider]:
    return [
        ours(f"ours-{route}", function, functools.partial(forced_route, route))
        for route in ("library", "triton")
    ]


def sdpa_backends(reference: Function, **options: Any) -> list[Provider]:
    """The reference with each backend of torch's SDPA forced: the default order hides cuDNN."""
    return [
        plain(f"sdpa-{name}", reference, context=functools.partial(sdpa_kernel, chosen), **options)
        for name, chosen in SDPA.items()
    ]


def sdpa_unpacked() -> list[Provider]:
    """SDPA on separate q, k, v of (B, H, T, D), as a model without a packed projection has them.

    On packed qkv, timm's way, its backward also stacks dq, dk and dv into dqkv.
    """

    def takes(inputs: Inputs) -> Inputs:
        q, k, v = (x.transpose(1, 2).contiguous() for x in inputs["qkv"].unbind(2))
        return {"q": q, "k": k, "v": v}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    return [
        replace(provider, name=f"{provider.name}-unpacked")
        for provider in sdpa_backends(attend, takes=takes)
        if provider.name in ("sdpa-flash", "sdpa-cudnn")
    ]


# --- an op


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
    long: the specification in float64 where T is above LONG_T, given the shape too: its scores are
        (B, H, T, T).
    sizes: those that a ViT's do not give. options: arguments that are no tensors.
    given: tensors, if not those that most models give.
    rotated: calls in one CUDA graph, each on buffers of its own: an empty replay takes 10 us, a
        norm 30. compiles: not where the specification loops over what a tensor says.
    """

    name: str
    shapes: Callable[[], Iterable[Shape]]
    counted_flops: Callable[[Shape], Pair]
    moved: Mapping[str, tuple[str, str]]
    peers: Callable[[Shape, str, Function, Function], list[Provider]] = lambda *_: []
    usual: Function | None = None
    long: Function | None = None
    sizes: Callable[[Shape], dict[str, Any]] = lambda shape: {}
    options: Callable[[Shape], dict[str, Any]] = lambda shape: {}
    given: Callable[[Shape], tuple[str, ...]] = lambda shape: ()
    dtypes: tuple[str, ...] = ("bf16", "fp16", "fp32")
    compiles: bool = True
    rotated: int = 1

    @property
    def entry(self) -> op.Op:
        return cases.OPS[self.name]

    def example(self, shape: Shape) -> op.Example:
        sides, args = (shape.size, shape.size), self.entry.args
        sizes = op.Sizes(shape.B, shape.T, shape.C, shape.H, shape.F, sides, shape.patch or 1)
        given = self.given(shape) or tuple(n for n, arg in args.items() if arg.usual)
        return op.Example({**self.entry.at(sizes), **self.sizes(shape)}, only=given)

    def inputs(self, shape: Shape, draw: Draw) -> Inputs:
        """Its tensors by name; those that training updates or passes back are leaves."""
        example, args = self.example(shape), self.entry.args
        found = {n: x for n, x in self.entry.inputs(example, draw).items() if x is not None}
        if "q" in found:  # of a packed qkv
            qkv = draw(shape.B, shape.T, 3, shape.H, shape.D, grad=False)
            found |= {"q": qkv[:, :, 0], "k": qkv[:, :, 1]}
        if "cos" in found:
            angles = 3 * found["cos"].float()
            found |= {"cos": angles.cos(), "sin": angles.sin()}
        leaves = {
            n: x.detach().requires_grad_(args[n].trained or shape.variant == LEARNT)
            for n, x in found.items()
        }
        settings = self.entry.settings_of(example.sizes, draw.device)
        return leaves | {n: x for n, x in settings.items() if isinstance(x, Tensor)}

    def with_options(self, function: Function, shape: Shape) -> Function:
        """With the arguments that are no tensors."""
        settings = self.entry.settings_of(self.example(shape).sizes, torch.device("cpu"))
        options = {n: x for n, x in settings.items() if not isinstance(x, Tensor)}
        return functools.partial(function, **options, **self.options(shape))

    def reference(self, shape: Shape, dtype: str) -> Function:
        """The specification; a norm's rounds under amp, but for the oracle."""
        whole = self.with_options(self.entry.specification, shape)
        if dtype == "amp":
            whole = functools.partial(whole, out_dtype=torch.bfloat16)
        if self.long is None or shape.T <= LONG_T:
            return whole
        by_parts = functools.partial(self.long, shape)

        def specification(**inputs: Tensor) -> Any:
            low = next(iter(inputs.values())).dtype is not torch.float64
            return (whole if low else by_parts)(**inputs)

        return specification

    def providers(self, shape: Shape, dtype: str) -> list[Provider]:
        """Eager, peers, ours, and what the compiler makes of eager, also after its search: without
        its CUDA graphs, for `graph_ms` replays every provider through one of ours."""
        torch_ = self.usual or self.with_options(self.entry.specification, shape)
        fused = self.with_options(self.entry.function, shape)
        peers = self.peers(shape, dtype, torch_, fused)
        if dtype == "amp":
            peers, exact = [], torch_
            torch_ = lambda **inputs: exact(**inputs).to(torch.bfloat16)  # noqa: E731
            fused = functools.partial(fused, out_dtype=torch.bfloat16)
        found = [plain(BASELINE, torch_), *peers, ours("ours", fused)]
        if not self.compiles:
            return found
        make = functools.partial(torch.compile, torch_, dynamic=False)
        search = functools.partial(make, mode="max-autotune-no-cudagraphs")
        return [*found, compiled("compile", make), compiled(SEARCH, search)]

    def flops(self, shape: Shape, mode: str) -> float:
        return _of_mode(self.counted_flops(shape), mode)

    def bytes(self, shape: Shape, dtype: str, mode: str) -> float:
        size, moved = self._bytes(shape, dtype), self.moved.get(shape.variant) or self.moved[""]
        forward, backward = (sum(size[n] for n in names.split()) for names in moved)
        return _of_mode((forward, backward), mode)

    def _bytes(self, shape: Shape, dtype: str) -> dict[str, int]:
        """By name: of the arguments, their gradients, and what a forward leaves."""
        x, y = (4, 2) if dtype == "amp" else 2 * (DTYPES[dtype].itemsize,)
        example = self.example(shape)
        found = {
            n: math.prod(dims) * (4 if n in ("cos", "sin") else x)
            for n, dims in self.entry.shapes_of(example.sizes).items()
            if n in example.only
        }
        tokens = sum(lengths(shape)) if self.name == "varlen_attention" else shape.B * shape.T
        rows = found["x"] // x // example.sizes["C"] if self.name.endswith("norm") else tokens
        found |= {
            "y": tokens * example.sizes.get("N", shape.C) * y,
            "hidden": tokens * shape.F * y,
            "lse": 4 * shape.H * tokens,
            "mean": 4 * rows,
            "rstd": 4 * rows,
        }
        found.setdefault("gate_weight", 0)  # packed: fc1_weight has both
        return found | {f"d{n}": size for n, size in found.items()}


def _of_mode(pair: Pair, mode: str) -> float:
    forward, backward = pair
    return float({"fwd": forward, "bwd": backward, "both": forward + backward}[mode])


def shape_of(name: str, part: str) -> Shape:
    """The op's first shape whose id has these parts, whole."""
    return next(s for s in OPS[name].shapes() if has_part(s.id, part))


def has_part(shape: str, part: str) -> bool:
    return f"-{part}-" in f"-{shape}-"


# --- FLOP


def _elements(shape: Shape, forward: float, backward: float) -> Pair:
    """So many FLOP an element of (B, T, C)."""
    elements = shape.B * shape.T * shape.C
    return forward * elements, backward * elements


def _products(shape: Shape, K: int, N: int) -> Pair:
    """Of (B T, K) and (K, N): 2 M N K forward; backward as much for dx and for dweight."""
    forward = 2.0 * shape.B * shape.T * N * K
    return forward, 2 * forward


def _patches(shape: Shape) -> Pair:
    """2 C K a patch of K = 3 patch^2 pixels, forward and for dweight."""
    product = 2.0 * shape.B * (shape.T - 1) * shape.C * 3 * shape.patch**2
    return product, product


def _attention(shape: Shape) -> Pair:
    """2 D a product, head and pair of tokens that see each other. Forward q k^T, p v; backward s
    again, dv, dp, dq, dk."""
    product = 2.0 * shape.C * sum(n * n for n in lengths(shape))
    return 2 * product, 5 * product


def _rope(shape: Shape) -> Pair:
    """An element of q and of k: 3 each way; a norm 7 forward, 13 backward; tables that learn 4."""
    forward, backward = (10, 16) if shape.variant == NORMED else (3, 3)
    backward += 4 if shape.variant == LEARNT else 0
    return _elements(shape, 2 * forward, 2 * backward)


# --- specifications and peers


def by_head(qkv: Tensor) -> Tensor:
    """attention_ref head by head; the backward computes the scores of each head anew."""
    heads = [checkpoint(attention_ref, h, use_reentrant=False) for h in qkv.split(1, dim=3)]
    return torch.cat(heads, dim=2)


def _packed_by_head(shape: Shape, qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
    parts = qkv.unsqueeze(0).split(lengths(shape), dim=1)
    return torch.cat([by_head(part) for part in parts], dim=1).squeeze(0)


def _rope_sizes(shape: Shape) -> dict[str, Any]:
    """Lengths that are not in PREFIX have a class token."""
    return dict(
        prefix=PREFIX.get(shape.T, 1),
        lead=(1, shape.H) if shape.variant == LEARNT else (),
        norm=NORMED if shape.variant == NORMED else None,
    )


def _rope_options(shape: Shape) -> dict[str, Any]:
    return dict(interleaved=shape.variant in (INTERLEAVED, LEARNT))


def _torch_rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    y = F.rms_norm(x, x.shape[-1:], weight, EPS)
    return y if residual is None else residual + y


def _stored(fused: Function) -> Provider:
    """Ours rebuilds activations in the backward; the same with all of them stored."""
    return ours("ours-stored", functools.partial(fused, recompute=False))


def _other_ways(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
    """Each backend of SDPA; ours by each route that the tables do not take, plain Triton beside
    Gluon, and without the one-pass backward where that runs by itself."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    sizes = (shape.B, shape.T, shape.H, shape.D)
    problem = Problem(gpu(device), DTYPES[dtype], sizes, shape.T, "none", False, "ieee")
    taken = {t.choose(problem.gpu, *problem.key()).route for t in (FWD_TABLE, BWD_TABLE)}
    others = [route for route in ("library", "triton") if taken != {route} and dtype != "fp32"]
    ways = {f"ours-{route}": functools.partial(attention_route, route) for route in others}
    if bwd_launch(*problem).one_pass is not None:
        ways["ours-split"] = functools.partial(forced, "attention_bwd", BwdForm(one_pass=False))
    if FUSED_DQ in BWD_TABLE.candidates(problem.gpu, *problem.key()):
        ways["ours-five-products"] = functools.partial(forced, "attention_bwd", FUSED_DQ)
    return [*sdpa_backends(torch_), *(ours(name, fused, way) for name, way in ways.items())]


def _output(result: Any) -> Tensor:
    """FlashAttention 3 and 4 give the output, or it and the lse."""
    return result if isinstance(result, Tensor) else result[0]


def flex_flash(module: Any, qkv: Tensor) -> Tensor:
    """flex_attention by FlashAttention 4, its module's kernels, on a (B, T, 3, H, D)."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    run = torch.compile(flex.flex_attention, dynamic=False)
    return run(q, k, v, kernel_options={"BACKEND": "FLASH"}).transpose(1, 2)


def _attention_peers(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
    def flash_attn(module: Any, qkv: Tensor) -> Tensor:
        return module.flash_attn_qkvpacked_func(qkv)

    def separate(module: Any, qkv: Tensor) -> Tensor:
        return _output(module.flash_attn_func(*qkv.unbind(2)))

    own = [*_other_ways(shape, dtype, torch_, fused), *sdpa_unpacked()]
    return (
        own
        if dtype == "fp32"
        else [
            *own,
            imported("flash_attn", "flash_attn", flash_attn),
            imported("flash_attn_3", "flash_attn_interface", separate),
            imported("flash_attn_4", "flash_attn.cute", separate),
            imported("flex-flash", "flash_attn.cute", flex_flash),
        ]
    )


def on_padded(shape: Shape, attend: Function) -> Function:
    """`attend(qkv, attn_mask)` of padded qkv under a mask of keys, (B, 1, 1, T): tokens go to
    places of (B, T) by indices, made once a case, and back."""

    @functools.cache
    def indices(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        n = torch.tensor(lengths(shape), device=device)
        offs = torch.arange(shape.T, device=device)
        shown, starts = offs < n[:, None], n.cumsum(0) - n
        token = torch.where(shown, starts[:, None] + offs, 0)
        return shown, token, shown.flatten().nonzero().squeeze(1)

    def run(qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        shown, token, place = indices(qkv.device)
        return attend(qkv[token], attn_mask=shown[:, None, None]).flatten(0, 1)[place]

    return run


def _varlen_peers(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
    def torch_varlen(module: Any, qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        return module.varlen_attn(*qkv.unbind(1), cu_seqlens, cu_seqlens, shape.T, shape.T)

    def flash_attn(module: Any, qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        return module.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, shape.T)

    own = [
        plain("sdpa-padded", on_padded(shape, attention_ref)),
        ours("ours-padded", on_padded(shape, fk.attention)),
    ]
    others = [
        imported("torch-varlen", "torch.nn.attention.varlen", torch_varlen),
        imported("flash_attn", "flash_attn", flash_attn),
    ]
    return own if dtype == "fp32" else [*own, *others]


# --- the table

_FC1 = ("x", "weight", "bias")
_QKV = ("qkv y lse", "dy qkv y lse dqkv")
_HIDDEN = "fc1_weight fc2_weight"
_GATED = f"gate_weight {_HIDDEN}"
_GATED_FORWARD = f"x residual {_GATED} y hidden hidden"
_GATED_BACKWARD = f"dy x hidden hidden {_GATED} dx dgate_weight dfc1_weight dfc2_weight"
_NORM_DTYPES = ("bf16", "amp", "fp16", "fp32")  # amp: fp32 in, bf16 out, as in training

OPS = {
    op.name: op
    for op in (
        Op(
            # forward mean 1, centre 1, squares 2, scale 1, affine 2; backward likewise
            "layer_norm",
            lambda: (*vits(), *head_sweep(197)),
            lambda s: _elements(s, 7, 13),
            {"": ("x y mean rstd", "dy x dx mean rstd")},
            usual=lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
            dtypes=_NORM_DTYPES,
            rotated=10,
        ),
        Op(
            # forward squares 2, scale 1, weight 1, a residual 1; backward likewise
            "rms_norm",
            rms_norm_shapes,
            lambda s: _elements(s, 5 if s.variant == ADDED else 4, 9),
            {"": ("x y rstd", "dy x dx rstd"), ADDED: ("x residual y rstd", "dy x dx rstd")},
            usual=_torch_rms_norm,
            sizes=lambda s: dict(rows=(s.B, s.T, s.H), C=s.D) if s.variant == HEADS else {},
            given=lambda s: ("x", "weight", "residual") if s.variant == ADDED else (),
            dtypes=_NORM_DTYPES,
            rotated=10,
        ),
        Op(
            # its two epilogues in a ViT: proj (LayerScale, residual), fc1 (exact GELU)
            "linear",
            lambda: (replace(s, variant=v) for s in vits() for v in ("proj", "fc1")),
            lambda s: _products(s, s.C, s.F if s.variant == "fc1" else s.C),
            # dresidual is dy; what the GELU took is kept
            {
                "": ("x weight residual y", "dy x weight dx dweight"),
                "fc1": ("x weight y y", "dy x weight y dx dweight"),
            },
            lambda shape, dtype, torch_, fused: gemm_routes(fused),
            sizes=lambda s: dict(N=s.F) if s.variant == "fc1" else {},
            options=lambda s: dict(activation="gelu" if s.variant == "fc1" else None),
            given=lambda s: _FC1 if s.variant == "fc1" else (*_FC1, "residual", "layer_scale"),
        ),
        Op(
            # queries and keys of a packed qkv, qk-norm or none
            "rope",
            rope_shapes,
            _rope,
            {
                "": ("q k cos sin q k", "dq dk cos sin dq dk"),
                NORMED: ("q k cos sin q k", "dq dk q k cos sin dq dk"),
                LEARNT: ("q k cos sin q k", "dq dk q k cos sin dq dk dcos dsin"),
            },
            sizes=_rope_sizes,
            options=_rope_options,
        ),
        Op(
            "attention",
            lambda: (*vits(), *token_sweep(), *head_sweep(197, 577, 1025)),
            _attention,
            {"": _QKV},
            _attention_peers,
            long=lambda shape, qkv: by_head(qkv),
        ),
        Op(
            "varlen_attention",
            varlen_attention_shapes,
            _attention,
            {"": _QKV},
            _varlen_peers,
            long=_packed_by_head,
            sizes=lambda s: dict(lengths=tuple(lengths(s))),
            compiles=False,
        ),
        Op(
            "mlp",
            vits,
            lambda s: _products(s, s.C, 2 * s.F),  # with the residual of its block
            {
                "": (
                    f"x residual {_HIDDEN} y hidden",
                    f"dy x hidden {_HIDDEN} dx dfc1_weight dfc2_weight",
                )
            },
            lambda shape, dtype, torch_, fused: [_stored(fused), *gemm_routes(fused)],
        ),
        Op(
            "gated_mlp",
            gated_mlp_shapes,
            lambda s: _products(s, s.C, 3 * s.F),
            {
                "": (_GATED_FORWARD, _GATED_BACKWARD),
                "norm": (f"{_GATED_FORWARD} mean rstd", f"{_GATED_BACKWARD} mean rstd"),
            },
            lambda shape, dtype, torch_, fused: [_stored(fused)],
            sizes=lambda s: dict(
                separate=s.variant in ("separate", "norm"), norm=s.variant == "norm"
            ),
        ),
        Op(
            # with a class token and positions; images need no gradient, as in training
            "patch_embed",
            vits,
            _patches,
            {"": ("images weight pos_embed y", "images dweight dpos_embed dy")},
            lambda shape, dtype, torch_, fused: [
                plain(
                    "eager, cudnn.benchmark",
                    torch_,
                    context=lambda: replaced(torch.backends.cudnn, "benchmark", True),
                )
            ],
        ),
    )
}
