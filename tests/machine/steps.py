"""The steps that the gate compiles; README.md says what for which target."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastvit_kernels.models.gated_mlp import GluMlp, SwiGLU
from fastvit_kernels.models.modules import Mlp
from fastvit_kernels.models.presets import create_vit
from fastvit_kernels.ops.attention.rotary import rope_attention
from fastvit_kernels.ops.common.gemm_configs import (
    FWD_TABLE,
    GATED_TABLE,
    HIDDEN_TABLE,
    LIBRARY,
    gemm_key,
)
from fastvit_kernels.ops.common.samples import keep_samples
from fastvit_kernels.ops.gated_mlp.functions import gated_mlp
from fastvit_kernels.ops.gated_mlp.kernels import (
    BWD_TABLE as GATED_NORM_BWD,
    FWD_TABLE as GATED_NORM_FWD,
)
from fastvit_kernels.ops.linear import linear
from fastvit_kernels.ops.mlp import mlp
from fastvit_kernels.ops.norm.functions import layer_norm_and_input, rms_norm, rms_norm_and_input
from fastvit_kernels.ops.patch_embed.functions import patch_embed
from fastvit_kernels.ops.rope import rope
from fastvit_kernels.runtime.backend import gpu
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.runtime.triton import triton
from tests.machine.compile import model_step

from . import attention_steps
from .attention_steps import backward
from .resources import GATED


def _blocks(
    model: str,
    dtype: str = "bf16",
    batch: int = 64,
    depth: int = 2,
    train: bool = True,
    recompute: bool = True,
    **arguments: Any,
) -> Callable[[], None]:
    """A step of the model cut to two blocks, the second with drop path if any."""

    def step() -> None:
        with torch.device("meta"):  # where torch's initialisers do nothing
            vit = create_vit(model, depth=depth, **arguments)
        for module in vit.modules():
            if isinstance(module, (Mlp, GluMlp, SwiGLU)):
                module.recompute = recompute
        model_step(vit, batch, dtype, train=train)()

    return step


def _rms_norm() -> None:
    """RMSNorm of the residual stream, fp32 to bf16 and bf16 alone, and of each head's queries;
    where a linear layer gave its input, with DropPath and without; and behind a branch."""
    for C, dtype in ((768, torch.float32), (3200, torch.bfloat16)):
        x = torch.empty(64, 257, C, dtype=dtype, requires_grad=True)
        weight = torch.empty(C, requires_grad=True)
        backward(*rms_norm_and_input(x, weight, out_dtype=torch.bfloat16))
    for row_scale in (None, torch.empty(64)):
        x = torch.empty(64, 257, 768, dtype=torch.bfloat16, requires_grad=True)
        fc_weight, fc_bias = (x.new_empty(s).requires_grad_() for s in ((768, 768), (768,)))
        x = linear(x, fc_weight, fc_bias, residual=torch.empty(64, 257, 768), row_scale=row_scale)
        weight = torch.empty(768, requires_grad=True)
        backward(*rms_norm_and_input(x, weight, out_dtype=torch.bfloat16))
    q = torch.empty(64, 257, 16, 64, dtype=torch.bfloat16, requires_grad=True)
    backward(rms_norm(q, torch.empty(64, requires_grad=True)))
    x, residual = torch.empty(64, 257, 1152, dtype=torch.bfloat16), torch.empty(64, 257, 1152)
    params = x.requires_grad_(), torch.empty(1152, requires_grad=True)
    backward(rms_norm(*params, residual=residual.requires_grad_()))


def _skipped_samples() -> None:
    """Both norms on kept samples, behind nothing and behind a linear layer that kept others."""
    C = 768
    weight = torch.empty(C, C, dtype=torch.bfloat16, requires_grad=True)
    for norm in (layer_norm_and_input, rms_norm_and_input):
        scale = torch.empty(C, requires_grad=True)
        x = torch.empty(64, 197, C, requires_grad=True)
        for _ in range(2):
            samples = keep_samples(64, 0.4)
            y, x = norm(x, scale, out_dtype=torch.bfloat16, samples=samples)
            x = linear(y, weight, residual=x, row_scale=samples)
        backward(x)


def _head_norms(norm: str | None, D: int) -> dict[str, Any]:
    """The arguments of a norm of each head's queries and keys."""
    weights = ("q_norm_weight", "k_norm_weight")
    return {"norm": norm, **{n: norm and torch.empty(D, requires_grad=True) for n in weights}}


def _turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, prefix: int, norm: str | None) -> None:
    """Both pairings of one rotation."""
    norms = _head_norms(norm, q.shape[-1])
    for interleaved in (False, True):
        backward(*rope(q, k, cos, sin, interleaved=interleaved, prefix_tokens=prefix, **norms))


def _rope() -> None:
    """Queries and keys of a packed qkv: both pairings, each norm."""
    heads = (12, 64, None), (12, 64, "layer_norm"), (16, 80, None), (16, 128, "rms_norm")
    for H, D, norm in heads:
        qkv = torch.empty(64, 201, 3, H, D, dtype=torch.bfloat16)
        q, k = (qkv[:, :, i].requires_grad_() for i in (0, 1))
        cos, sin = torch.empty(196, 2 * D).split(D, 1)
        _turn(q, k, cos, sin, 5, norm)


def _learnt_tables() -> None:
    """Rotation by tables of each head that learn, both pairings, each norm."""
    for norm in (None, "layer_norm"):
        q, k = torch.empty(64, 197, 3, 12, 64, dtype=torch.bfloat16).requires_grad_().unbind(2)[:2]
        cos, sin = torch.empty(1, 12, 196, 128, requires_grad=True).split(64, -1)
        _turn(q, k, cos, sin, 1, norm)


def _rope_attention() -> None:
    """The projection, its rotation and attention as one, and with a norm."""
    for T, norm in ((201, None), (201, "layer_norm"), (1025, None)):
        x = torch.empty(64, T, 768, dtype=torch.bfloat16, requires_grad=True)
        params = [x.new_empty(shape).requires_grad_() for shape in ((2304, 768), (2304,))]
        cos, sin = torch.empty(T - 5, 128).split(64, 1)
        given: dict[str, Any] = dict(num_heads=12, prefix_tokens=5, cos=cos, sin=sin)
        backward(rope_attention(x, *params, **given, **_head_norms(norm, 64)))


def _gated_mlp() -> None:
    """Gated MLPs, forward and backward: widths with a divisor of 8, 4 and 2 elements (EVA02-L), and
    the hidden layer and the inner LayerNorm in each config that fits."""
    here = gpu(torch.device("cpu"))  # the target

    def run(C: int, F: int, dtype: torch.dtype, activation: str, norm: bool, packed: bool) -> None:
        fc1 = 2 * F if packed else F
        shapes = dict(
            x=(64, 257, C), fc1_weight=(fc1, C), fc1_bias=(fc1,), fc2_weight=(C, F), fc2_bias=(C,)
        )
        if not packed:
            shapes |= dict(gate_weight=(F, C), gate_bias=(F,))
        given: dict[str, Any] = {
            n: torch.empty(s, dtype=dtype, requires_grad=True) for n, s in shapes.items()
        }
        if norm:
            names = ("norm_weight", "norm_bias")
            given |= {n: torch.empty(F, requires_grad=True) for n in names}
        backward(gated_mlp(**given, activation=activation))

    for activation, dtype in (
        ("silu", torch.bfloat16),
        ("gelu", torch.float32),
        ("gelu_tanh", torch.bfloat16),
    ):
        run(1536, 4096, dtype, activation, norm=False, packed=True)
    for C, F in ((768, 2048), (1024, 2730)):
        run(C, F, torch.bfloat16, "silu", norm=True, packed=False)
    run(1280, 3420, torch.bfloat16, "silu", norm=False, packed=False)
    for config in GATED_TABLE.configs:
        for activation, packed in (("silu", True), ("gelu_tanh", False)):
            with forced(GATED_TABLE.name, config):
                run(768, 2048, torch.bfloat16, activation, norm=False, packed=packed)
    for config in GATED_NORM_BWD.configs:  # at the widest that it fits
        padded = {F: triton.next_power_of_2(F) for F in (4096, 2048, 1024, 384)}
        widths = [F for F, block in padded.items() if GATED_NORM_BWD.fits(here, config, block)]
        if widths:
            with forced(GATED_NORM_FWD.name, config), forced(GATED_NORM_BWD.name, config):
                run(768, widths[0], torch.bfloat16, "gelu", norm=True, packed=False)


def _patches() -> None:
    """Patches, of a list to keep and of videos, under bf16 autocast: positions that learn,
    and an image's gradient where it has one."""

    def run(images: Tensor, patch: tuple[int, ...], kept: int = 0) -> None:
        grid = [n // p for n, p in zip(images.shape[2:], patch, strict=True)]
        num_patches, C = math.prod(grid), 768
        keep = torch.zeros(images.shape[0], kept, dtype=torch.int64) if kept else None
        tensors = [
            torch.empty(shape, requires_grad=True)
            for shape in ((C, 3, *patch), (C,), (1, 1, C), (1, num_patches + 1, C))
        ]
        weight, bias, prefix, pos = tensors
        with torch.autocast("cpu", torch.bfloat16):
            y = patch_embed(images, weight, bias, prefix_tokens=prefix, pos_embed=pos, keep=keep)
        backward(y)

    image, video = (64, 3, 224, 224), (8, 3, 16, 224, 224)
    for patch in (16, 14, 32):
        run(torch.empty(image), (patch, patch))
    run(torch.empty(image, dtype=torch.bfloat16, requires_grad=True), (16, 16), 49)
    run(torch.empty(image), (16, 16), 49)
    run(torch.empty(video), (2, 16, 16), 160)
    run(torch.empty(video, dtype=torch.bfloat16, requires_grad=True), (2, 16, 16))


def _gemm_configs() -> None:
    """An MLP, forward and backward, with each GEMM config that ships and fits: few are defaults."""
    here = gpu(torch.device("cpu"))  # the target
    for config in FWD_TABLE.configs:
        is_fp32 = config.block_k == 32 and config.route == "triton"
        dtype = torch.float32 if is_fp32 else torch.bfloat16
        B, T, C, width = 64, 197, 768, 3072
        key = gemm_key(B * T, width, C, dtype)
        if config.route == "library" or not FWD_TABLE.fits(here, config, *key):
            continue
        shapes = ((B, T, C), (width, C), (width,), (C, width), (C,))
        tensors = [torch.empty(s, dtype=dtype, requires_grad=True) for s in shapes]
        residual = torch.empty(B, T, C)
        hidden = config if config in HIDDEN_TABLE.configs else LIBRARY
        with forced(FWD_TABLE.name, config), forced(HIDDEN_TABLE.name, hidden):
            backward(mlp(*tensors, residual=residual))


SIGLIP: Any = dict(embed_dim=1152, mlp_ratio=4304 / 1152, act_layer="gelu_tanh")
SIGLIP |= dict(class_token=False, global_pool="avg")

# What CASES holds: each kernel with each of its configs, epilogue, and dtype of fp32 and bf16 (fp16
# has the code of bf16 but for conversions), once; widths from 192 to 1280.
CASES: dict[str, Callable[[], None]] = {
    "ViT-Ti/16, one image": _blocks("vit_tiny_patch16_224", batch=1),
    "ViT-S/16, inference": _blocks("vit_small_patch16_224", batch=256, depth=1, train=False),
    "ViT-B/16, T=197": _blocks("vit_base_patch16_224"),
    "ViT-B/16, fp32": _blocks("vit_base_patch16_224", "fp32"),
    "ViT-B/14, T=257": _blocks("vit_base_patch14_224", init_values=1e-5, drop_path_rate=0.2),
    "ViT-B/16, drop_path skipped": _blocks(
        "vit_base_patch16_224", init_values=1e-5, drop_path_rate=0.4, drop_path="skip"
    ),
    "ViT-L/16, T=577": _blocks("vit_large_patch16_384"),
    "ViT-H/14, D=80, activations stored": _blocks("vit_huge_patch14_224", recompute=False),
    "SigLIP so400m/14, D=72, dropout": _blocks(
        "vit_large_patch14_224", **SIGLIP, pre_norm=True, attn_drop_rate=0.1
    ),
    "vit_mnist, D=32, fp32": _blocks("vit_mnist", "fp32"),
    "drop_path skipped": _skipped_samples,
    "RMSNorm": _rms_norm,
    "rotary embedding": _rope,
    "rotary embedding, learnt": _learnt_tables,
    "rotary attention": _rope_attention,
    "gated MLP": _gated_mlp,
    "patches": _patches,
    "GEMM configs": _gemm_configs,
    "attention configs": attention_steps.attention_configs,
    "masked attention": attention_steps.masked_attention,
    "masks in fp32": attention_steps.masks_in_fp32,
    "packed sequences": attention_steps.packed_sequences,
    "learnt bias": attention_steps.learnt_bias,
    "few queries": attention_steps.few_queries,
    "wide heads": attention_steps.wide_heads,
    **{
        f"attention, D={D}": functools.partial(attention_steps.heads, D)
        for D in attention_steps.HEAD_DIMS
    },
}
# Where a kernel may spill, and no row is kept for each config: the same ops at their defaults.
DEFAULTS = {
    "ViT-B/16, T=197",
    "ViT-B/16, fp32",
    "ViT-H/14, D=80, activations stored",
    "RMSNorm",
    "rotary embedding",
    "patches",
    "masked attention",
    "wide heads",
    "attention, D=128",
}
# Code of sm_86 or sm_100 but for the assembler: the rules hold of both or of none.
LIKE_OTHERS = {"sm_89", "sm_103", "sm_110", "sm_120", "sm_121"}
SAMPLE = {"ViT-B/16, T=197", "masked attention"}


def is_compiled(case: str, arch: str) -> bool:
    """Whether the gate compiles this one of CASES for a target."""
    if arch in GATED:
        return True
    return case in (SAMPLE if arch in LIKE_OTHERS else DEFAULTS)
