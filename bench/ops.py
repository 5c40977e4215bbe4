"""What is measured of each op: shapes, providers, FLOP and bytes. The rest is in its entry of
fastvit_kernels/accuracy: the function, its specification, its tensors.

A provider is a function of an op's inputs by keyword, with the context that forces its route. FLOP
and bytes are those of the mathematics: what any implementation must do and move at least, every
operand read once and every result written once. Each count is of (forward, backward).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config as autograd_config
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fastvit_kernels as fk
from fastvit_kernels.accuracy import cases, op
from fastvit_kernels.accuracy.op import Draw
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
MODES = ("fwd", "bwd")
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
BASELINE, SEARCH = "eager", "compile-max-autotune"
EPS = 1e-6

# width C, heads H, MLP width F. arXiv:2010.11929, arXiv:2012.12877
VITS = {
    "Ti": (192, 3, 768),
    "S": (384, 6, 1536),
    "B": (768, 12, 3072),
    "L": (1024, 16, 4096),
    "H": (1280, 16, 5120),
}
TOKENS = 128 * 197  # B T of every shape: ViT-B at 224 with 128 images
T_SWEEP = (50, 197, 257, 577, 785, 1025, 1370, 2305, 4097)
D_SWEEP = ((32, 24), (80, 16), (96, 8), (128, 6))  # head dim, heads: C = 768, and ViT-H's 1280

# Variants of a shape.
INTERLEAVED = "interleaved"  # RoPE of Perception Encoder, EVA02, V-JEPA 2
NORMED = "layer_norm"  # RoPE with qk-norm
SPREAD = "spread"  # sequences of T / 8 to T tokens, in no order


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


def vit(model: str) -> Shape:
    """The shape inside a ViT on 224 x 224 images, with a class token; H has patches of 14 x 14."""
    C, H, F = VITS[model]
    patch = 14 if model == "H" else 16
    T = (224 // patch) ** 2 + 1
    return Shape(f"ViT-{model}", batch(T), T, C, H, F, 224, patch)


def vits() -> Iterator[Shape]:
    return map(vit, ("B", "L", "S", "H", "Ti"))


def token_sweep() -> Iterator[Shape]:
    C, H, F = VITS["B"]
    return (Shape("sweep-T", batch(T), T, C, H, F) for T in T_SWEEP)


def head_sweep() -> Iterator[Shape]:
    """D in 32, 80, 96, 128; 64 is ViT-B's own."""
    for (D, H), T in itertools.product(D_SWEEP, (197, 577, 1025)):
        yield Shape(f"sweep-D{D}", batch(T), T, D * H, H, 4 * D * H)


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


def compiled(name: str, make: Callable[[], Function], **options: Any) -> Provider:
    """For the one shape of its case. Reset the compiler once before making several: it keeps only
    a few of each code object. Donated buffers would forbid many backwards over one forward."""
    keep_buffers = functools.partial(autograd_config.patch, donated_buffer=False)
    return Provider(name, make, keep_buffers, compiled=True, **options)


def ours(name: str, function: Function, context: Callable[[], Any] = nullcontext) -> Provider:
    """One of this package's ops through its kernels, on the CPU through Triton's interpreter."""

    @contextmanager
    def forced() -> Iterator[None]:
        with fk.backend("triton"), context():
            yield

    return plain(name, function, context=forced, ours=True)


def imported(name: str, module: str, call: Function) -> Provider:
    """A peer: `call` takes its module, then the op's inputs."""
    make = lambda: functools.partial(call, importlib.import_module(module))  # noqa: E731
    return Provider(name, make, package=module)


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

    found = sdpa_backends(attend, takes=takes)[:2]  # flash and cuDNN
    return [replace(provider, name=f"{provider.name}-unpacked") for provider in found]


# --- an op


@dataclass(frozen=True)
class Op:
    """One line of the table OPS.

    flops: of (forward, backward).
    moved: names of the tensors that a forward and a backward move, of variants by name.
    peers: all providers but eager, ours and the compiled ones; given the functions of eager, ours.
    usual: what PyTorch's users call, if not the specification.
    oracle: the specification, where its own takes too much memory in float64.
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
    oracle: Function | None = None
    sizes: Callable[[Shape], dict[str, Any]] = lambda shape: {}
    options: Callable[[Shape], dict[str, Any]] = lambda shape: {}
    given: Callable[[Shape], tuple[str, ...]] = lambda shape: ()
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
        found |= {n: found[n].float() for n in ("cos", "sin") if n in found}
        leaves = {n: x.detach().requires_grad_(args[n].trained) for n, x in found.items()}
        settings = self.entry.settings_of(example.sizes, draw.device)
        return leaves | {n: x for n, x in settings.items() if isinstance(x, Tensor)}

    def with_options(self, function: Function, shape: Shape) -> Function:
        """With the arguments that are no tensors."""
        settings = self.entry.settings_of(self.example(shape).sizes, torch.device("cpu"))
        options = {n: x for n, x in settings.items() if not isinstance(x, Tensor)}
        return functools.partial(function, **options, **self.options(shape))

    def reference(self, shape: Shape) -> Function:
        return self.oracle or self.with_options(self.entry.specification, shape)

    def providers(self, shape: Shape, dtype: str) -> list[Provider]:
        """Eager, peers, ours, and what the compiler makes of eager, also after its search: without
        its CUDA graphs, for `graph_ms` replays every provider through one of ours."""
        torch_ = self.usual or self.with_options(self.entry.specification, shape)
        fused = self.with_options(self.entry.function, shape)
        found = [plain(BASELINE, torch_), ours("ours", fused)]
        found += self.peers(shape, dtype, torch_, fused)
        if not self.compiles:
            return found
        make = functools.partial(torch.compile, torch_, dynamic=False)
        search = functools.partial(make, mode="max-autotune-no-cudagraphs")
        return [*found, compiled("compile", make), compiled(SEARCH, search)]

    def flops(self, shape: Shape, mode: str) -> float:
        return float(self.counted_flops(shape)[MODES.index(mode)])

    def bytes(self, shape: Shape, dtype: str, mode: str) -> float:
        size, moved = self._bytes(shape, dtype), self.moved.get(shape.variant) or self.moved[""]
        return float(sum(size[name] for name in moved[MODES.index(mode)].split()))

    def _bytes(self, shape: Shape, dtype: str) -> dict[str, int]:
        """By name: of the arguments, their gradients, and what a forward leaves."""
        each = DTYPES[dtype].itemsize
        example = self.example(shape)
        found = {
            n: math.prod(dims) * (4 if n in ("cos", "sin") else each)
            for n, dims in self.entry.shapes_of(example.sizes).items()
            if n in example.only
        }
        tokens = sum(lengths(shape)) if self.name == "varlen_attention" else shape.B * shape.T
        found |= {
            "y": tokens * example.sizes.get("N", shape.C) * each,
            "hidden": tokens * shape.F * each,
            "lse": 4 * shape.H * tokens,
            "mean": 4 * tokens,
            "rstd": 4 * tokens,
        }
        found.setdefault("gate_weight", 0)  # packed: fc1_weight has both
        return found | {f"d{n}": size for n, size in found.items()}


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
    """An element of q and of k: 3 each way; a norm 7 forward, 13 backward."""
    forward, backward = (10, 16) if shape.variant == NORMED else (3, 3)
    return _elements(shape, 2 * forward, 2 * backward)


# --- specifications and peers


def by_image(qkv: Tensor) -> Tensor:
    """attention_ref, in float64 an image after the other: the scores of all do not fit, and the
    backward computes those of each anew."""
    if qkv.dtype is not torch.float64:
        return attention_ref(qkv)
    return torch.cat([checkpoint(attention_ref, x, use_reentrant=False) for x in qkv.split(1)])


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


def _flex(name: str, package: str, **options: Any) -> Provider:
    """flex_attention, compiled, on a (B, T, 3, H, D)."""

    def make() -> Function:
        flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
        run = torch.compile(flex.flex_attention, dynamic=False)

        def attend(qkv: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
            return run(q, k, v, kernel_options=options).transpose(1, 2)

        return attend

    return compiled(name, make, package=package)


def _attention_peers(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
    def flash_attn_4(module: Any, qkv: Tensor) -> Tensor:
        found = module.flash_attn_func(*qkv.unbind(2))
        return found if isinstance(found, Tensor) else found[0]  # or it and the lse

    return [
        *_other_ways(shape, dtype, torch_, fused),
        *sdpa_unpacked(),
        imported("flash_attn_4", "flash_attn.cute", flash_attn_4),
        _flex("flex", ""),
        _flex("flex-flash", "flash_attn.cute", BACKEND="FLASH"),
    ]


def _varlen_peers(shape: Shape, dtype: str, torch_: Function, fused: Function) -> list[Provider]:
    def torch_varlen(module: Any, qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        return module.varlen_attn(*qkv.unbind(1), cu_seqlens, cu_seqlens, shape.T, shape.T)

    return [imported("torch-varlen", "torch.nn.attention.varlen", torch_varlen)]


# --- the table

_FC1 = ("x", "weight", "bias")
_QKV = ("qkv y lse", "dy qkv y lse dqkv")
_HIDDEN = "fc1_weight fc2_weight"
_GATED = f"gate_weight {_HIDDEN}"
_GATED_FORWARD = f"x residual {_GATED} y hidden hidden"
_GATED_BACKWARD = f"dy x hidden hidden {_GATED} dx dgate_weight dfc1_weight dfc2_weight"
OPS = {
    op.name: op
    for op in (
        Op(
            # forward mean 1, centre 1, squares 2, scale 1, affine 2; backward likewise
            "layer_norm",
            vits,
            lambda s: _elements(s, 7, 13),
            {"": ("x y mean rstd", "dy x dx mean rstd")},
            usual=lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
            rotated=10,
        ),
        Op(
            # forward squares 2, scale 1, weight 1; backward likewise
            "rms_norm",
            vits,
            lambda s: _elements(s, 4, 9),
            {"": ("x y rstd", "dy x dx rstd")},
            usual=lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, EPS),
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
            # queries and keys of a packed qkv, as DINOv3's: a class token, four registers
            "rope",
            lambda: (
                Shape("ViT-B", batch(201), 201, 768, 12, 3072, variant=variant)
                for variant in (NORMED, "", INTERLEAVED)
            ),
            _rope,
            {
                "": ("q k cos sin q k", "dq dk cos sin dq dk"),
                NORMED: ("q k cos sin q k", "dq dk q k cos sin dq dk"),
            },
            sizes=lambda s: dict(prefix=5, norm=NORMED if s.variant == NORMED else None),
            options=lambda s: dict(interleaved=s.variant == INTERLEAVED),
        ),
        Op(
            "attention",
            lambda: (*vits(), *token_sweep(), *head_sweep()),
            _attention,
            {"": _QKV},
            _attention_peers,
            oracle=by_image,
        ),
        Op(
            "varlen_attention",
            # T is the longest sequence, B their number: ViT-B's, NaFlex's
            lambda: (
                replace(vit("B"), variant=SPREAD),
                Shape("NaFlex-B", batch(1024), 1024, 768, 12, 3072, variant=SPREAD),
            ),
            _attention,
            {"": _QKV},
            _varlen_peers,
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
            lambda: (
                replace(vit("B"), F=2048, variant="packed"),
                Shape("DINOv3-H+", batch(201), 201, 1280, 20, 5120, variant="separate"),
            ),
            lambda s: _products(s, s.C, 3 * s.F),
            {"": (_GATED_FORWARD, _GATED_BACKWARD)},
            lambda shape, dtype, torch_, fused: [_stored(fused)],
            sizes=lambda s: dict(separate=s.variant == "separate"),
        ),
        Op(
            # with a class token and positions; images need no gradient, as in training
            "patch_embed",
            vits,
            _patches,
            {"": ("images weight pos_embed y", "images dweight dpos_embed dy")},
        ),
    )
}
