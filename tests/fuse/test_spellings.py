"""Each family of rules fires on every way to write its operation, and says so in the report.

Rotations are in `test_rotation`, patches with a prefix in `test_patches`.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.fuse.hosts import Host, check, table
from tests.fuse.kit import (
    C,
    D,
    H,
    Kit,
    five,
    images,
    join,
    of_packed,
    packed,
    sdpa,
    seeded,
    separate,
    softmax_attention,
    split,
    tokens,
)
from tests.fuse.looks_layers import branch, flat, four, keep, positions, rms, with_cls

NORM = {
    "module": lambda kit, x: kit.o(kit.n(x)),
    "function": lambda kit, x: kit.o(F.layer_norm(x, (C,), kit.n.weight, kit.n.bias, 1e-5)),
    "without weight": lambda kit, x: kit.o(F.layer_norm(x, [C])),
    "of (B, 1, T, C)": lambda kit, x: kit.o(kit.n(x[:, None])),
}
RMS = {
    "module": lambda kit, x: kit.o(kit.rms(x)),
    "function": lambda kit, x: kit.o(F.rms_norm(x, (C,), kit.rms.weight, 1e-6)),
    "written": lambda kit, x: kit.o(rms(x) * kit.rms.weight),
    "weight first": lambda kit, x: kit.o(kit.rms.weight * rms(x)),
    "without weight": lambda kit, x: kit.o(rms(x)),
    "a tensor after": lambda kit, x: kit.o(rms(x) * x),
    "x x": lambda kit, x: kit.o(
        x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * kit.rms.weight
    ),
    "1 + weight": lambda kit, x: kit.o(rms(x) * (1 + kit.rms.weight)),
    "in float32": lambda kit, x: kit.o(rms(x.to(torch.float64)).to(x.dtype) * kit.rms.weight),
}


def einops_like(kit: Kit, x: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.reshape(2, 9, H, D).permute(0, 2, 1, 3) for t in kit.qkv(x).chunk(3, dim=-1))


def cat_of_biases(kit: Kit, x: Tensor) -> list[Tensor]:
    bias = torch.cat((kit.q.bias, torch.zeros_like(kit.ls), kit.v.bias))
    return list(map(split, F.linear(x, kit.qkv.weight, bias).chunk(3, -1)))


PACKED: dict[str, Any] = {
    "permute, unbind": packed,
    "permute, contiguous, unbind": lambda kit, x: (
        five(kit, x).permute(2, 0, 3, 1, 4).contiguous().unbind()
    ),
    "permute, index": lambda kit, x: (lambda y: (y[0], y[1], y[2]))(
        five(kit, x).permute(2, 0, 3, 1, 4)
    ),
    "unbind, transpose": lambda kit, x: [t.transpose(1, 2) for t in five(kit, x).unbind(2)],
    "chunk": einops_like,
    "split": lambda kit, x: list(map(split, kit.qkv(x).split(C, -1))),
    "slices": lambda kit, x: (lambda y: [split(y[..., i * C : i * C + C]) for i in range(3)])(
        kit.qkv(x)
    ),
    "tensor_split": lambda kit, x: list(map(split, kit.qkv(x).tensor_split(3, -1))),
    "unflatten": lambda kit, x: kit.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).unbind(),
    "movedim": lambda kit, x: five(kit, x).movedim(2, 0).transpose(2, 3).unbind(0),
    "narrow": lambda kit, x: (lambda y: [split(y.narrow(-1, i * C, C)) for i in range(3)])(
        kit.qkv(x)
    ),
    "contiguous": lambda kit, x: [t.contiguous() for t in packed(kit, x)],
    "clones": lambda kit, x: [t.clone() for t in packed(kit, x)],
    "three layers": separate,
    "a bias for two": lambda kit, x: (split(kit.q(x)), split(kit.bare(x)), split(kit.v(x))),
    "k and v together": lambda kit, x: (split(kit.q(x)), *map(split, kit.fc1(x).chunk(2, -1))),
    "a cat of biases": cat_of_biases,
}
ATTEND: dict[str, Any] = {
    "sdpa": sdpa,
    "sdpa with a scale": lambda q, k, v: sdpa(q, k, v, scale=0.3),
    "@": softmax_attention,
    "matmul, scaled queries": lambda q, k, v: torch.matmul(
        torch.matmul(q * D**-0.5, k.transpose(2, 3)).softmax(dim=-1), v
    ),
    "over sqrt": lambda q, k, v: F.softmax(q @ k.mT / math.sqrt(D), -1) @ v,
    "dropout of 0": lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.0) @ v,
    "einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v
    ),
}
EINSUMS = [
    ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd"),
    ("b q h d, b k h d -> b h q k", "b h q k, b k h d -> b q h d"),
    ("...qhd,...khd->...hqk", "...hqk,...khd->...qhd"),
]
JOIN: dict[str, Any] = {
    "reshape": join,
    "flatten": lambda o: o.transpose(1, 2).flatten(2),
    "permute, contiguous, view": lambda o: o.permute(0, 2, 1, 3).contiguous().view(-1, 9, C),
}


def attention(heads: Any, attend: Any, joined: Any) -> Any:
    return lambda kit, x: kit.o(joined(attend(*heads(kit, x))))


def by_einsums(scores: str, joined: str, turned: bool = False) -> Any:
    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = five(kit, x).unbind(2)
        weights = torch.einsum(scores, *((k, q) if turned else (q, k))).softmax(-1)
        o = torch.einsum(joined, *((v, weights) if turned else (weights, v)))
        return kit.o(o.flatten(2))

    return forward


ATTENTION = {
    **{k: attention(v, sdpa, join) for k, v in PACKED.items()},
    **{k: attention(packed, v, join) for k, v in ATTEND.items()},
    **{k: attention(separate, softmax_attention, v) for k, v in JOIN.items()},
    **{f"einsums {i}": by_einsums(*each) for i, each in enumerate(EINSUMS)},
    "einsums of values first": by_einsums("bkhd,bqhd->bhqk", "bkhd,bhqk->bqhd", turned=True),
}
PRODUCT = {
    "@ t()": lambda kit, x: x @ kit.fc1.weight.t() + kit.fc1.bias,
    "matmul, bias first": lambda kit, x: kit.fc1.bias + torch.matmul(x, kit.fc1.weight.T),
    "@ transpose": lambda kit, x: x @ kit.fc1.weight.transpose(0, 1),
    "not turned": lambda kit, x: x @ kit.fc2.weight + kit.fc1.bias,
    "addmm": lambda kit, x: torch.addmm(kit.fc1.bias, x.view(-1, C), kit.fc2.weight),
    "addmm of t()": lambda kit, x: torch.addmm(kit.fc1.bias, x.view(-1, C), kit.fc1.weight.t()),
    "mm": lambda kit, x: x[0].mm(kit.fc2.weight),
    "a square": lambda kit, x: x @ kit.bare.weight,
    "einsum": lambda kit, x: torch.einsum("btk,nk->btn", x, kit.fc1.weight) + kit.fc1.bias,
    "einsum of ...": lambda kit, x: torch.einsum("...k,kn->...n", x, kit.fc2.weight),
    "einsum with spaces": lambda kit, x: torch.einsum("b t k, n k -> b t n", x, kit.fc1.weight),
    "a bias by rows": lambda kit, x: x[0] @ kit.fc2.weight + kit.both.weight.view(64, 64)[:9],
}


def one_for_all_three(kit: Kit, x: Tensor) -> list[Tensor]:
    return [split(kit.q(x))] * 3


def queries_as_keys(kit: Kit, x: Tensor) -> tuple[Tensor, ...]:
    q = split(kit.q(x))
    return q, q, split(kit.v(x))


OTHER_ATTENTION = {
    "one for all three": attention(one_for_all_three, sdpa, join),
    "one for all three, written out": attention(one_for_all_three, softmax_attention, join),
    "queries as keys": attention(queries_as_keys, sdpa, join),
    "cross": lambda kit, x: kit.o(join(sdpa(split(kit.q(x)), *separate(kit, x.flip(1))[1:]))),
    "causal": lambda kit, x: kit.o(join(sdpa(*packed(kit, x), is_causal=True))),
    "a learnt bias": lambda kit, x: kit.o(join(softmax_attention(*packed(kit, x), kit.table))),
    "a learnt mask of sdpa": lambda kit, x: kit.o(join(sdpa(*packed(kit, x), attn_mask=kit.table))),
    "a boolean mask": lambda kit, x: kit.o(
        join(sdpa(*packed(kit, x), attn_mask=torch.ones(9, 9, dtype=torch.bool).tril()))
    ),
    "qk norm": of_packed(lambda kit, q, k, v: kit.o(join(sdpa(kit.qn(q), kit.kn(k), v)))),
    "temperature": of_packed(
        lambda kit, q, k, v: kit.o(join((q @ k.mT * kit.per_head).softmax(-1) @ v))
    ),
    "bmm": lambda kit, x: (
        lambda q, k, v: kit.o(join(torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(-1, H, 9, D)))
    )(*(t.flatten(0, 1) for t in separate(kit, x))),
}


MLP = {
    "gelu": branch,
    "tanh": lambda kit, x: kit.fc2(F.gelu(kit.fc1(x), approximate="tanh")),
    "silu": lambda kit, x: kit.fc2(F.silu(kit.fc1(x))),
    "quick": lambda kit, x: (lambda z: kit.fc2(z * torch.sigmoid(1.702 * z)))(kit.fc1(x)),
    "module": lambda kit, x: kit.fc2(nn.GELU()(kit.fc1(x))),
    "idle dropouts": lambda kit, x: F.dropout(
        kit.fc2(F.dropout(F.gelu(kit.fc1(x)), 0.5, False)), 0.0
    ),
    "rows": lambda kit, x: branch(kit, x.reshape(-1, C)).view_as(x),
    "products": lambda kit, x: F.gelu(x @ kit.fc1.weight.t() + kit.fc1.bias) @ kit.fc2.weight.t(),
}
GATED = {
    "packed": lambda kit, x: (lambda a, b: kit.fc2(F.silu(a) * b))(*kit.both(x).chunk(2, -1)),
    "b first": lambda kit, x: (lambda a, b: kit.fc2(b * F.silu(a)))(*kit.both(x).chunk(2, -1)),
    "split": lambda kit, x: (lambda a, b: kit.fc2(F.silu(a) * b))(*kit.both(x).split(64, -1)),
    "two layers": lambda kit, x: kit.fc2(F.silu(kit.gate(x)) * kit.fc1(x)),
    "gelu": lambda kit, x: kit.fc2(F.gelu(kit.gate(x)) * kit.fc1(x)),
}
EPILOGUE = {
    "residual": lambda kit, x: x + branch(kit, x),
    "turned": lambda kit, x: branch(kit, x) + x,
    "of attention": lambda kit, x: x + attention(packed, sdpa, join)(kit, x),
}
SCALED = {
    "first": lambda kit, x: x + kit.ls * branch(kit, x),
    "last": lambda kit, x: x + branch(kit, x) * kit.ls,
    "of (1, 1, C)": lambda kit, x: x + kit.cls * branch(kit, x),
    "of attention": lambda kit, x: x + kit.ls * attention(packed, sdpa, join)(kit, x),
}
DROPPED = {
    "new_empty": lambda kit, x: x + branch(kit, x) * keep(x).div_(0.7),
    "of attention": lambda kit, x: x + attention(packed, sdpa, join)(kit, x) * keep(x),
    "scaled": lambda kit, x: x + kit.ls * branch(kit, x) * keep(x),
}
PATCH = {
    "flatten, transpose": lambda kit, x: kit.o(flat(kit.conv(x))),
    "positions": lambda kit, x: kit.o(flat(kit.conv(x)) + positions(kit, 6)),
}
FAMILIES: list[tuple[str, dict[str, Any], Any]] = [
    ("layer_norm", NORM, tokens),
    ("rms_norm", RMS, tokens),
    ("qkv_attention", ATTENTION, tokens),
    ("attention", OTHER_ATTENTION, tokens),
    ("product as linear", PRODUCT, tokens),
    ("mlp", MLP, tokens),
    ("gated_mlp", GATED, tokens),
    ("residual", EPILOGUE, tokens),
    ("layer_scale", SCALED, tokens),
    ("row_scale", DROPPED, tokens),
    ("patch_embed", PATCH, images),
]
TRUE = [
    (rule, host)
    for rule, spellings, inputs in FAMILIES
    for host in table(rule, spellings, inputs=inputs)
]


@pytest.mark.parametrize(("rule", "host"), TRUE, ids=lambda x: getattr(x, "id", ""))
def test_a_spelling_is_fused(rule, host):
    result = check(host)
    assert any(rule in name for name in result.rules), (dict(result.rules), result.left)
    assert result.share == 1.0, result.left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", range(len(FAMILIES)), ids=lambda i: FAMILIES[i][0])
def test_a_spelling_is_fused_in_other_dtypes(family, dtype):
    rule, spellings, inputs = FAMILIES[family]
    name, forward = next(iter(spellings.items()))
    result = check(Host(f"{rule} - {name}", forward, inputs, dtype))
    assert any(rule in name for name in result.rules)


def encoder_layer(**how: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(C, H, 64, batch_first=True, **how)


class SelfAttention(nn.Module):
    def __init__(self, **how: Any):
        super().__init__()
        self.attention = nn.MultiheadAttention(C, H, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


TORCH = {
    "MultiheadAttention": lambda: SelfAttention(batch_first=True),
    "MultiheadAttention, sequence first": lambda: SelfAttention(),
    "MultiheadAttention, no bias": lambda: SelfAttention(batch_first=True, bias=False),
    "post-norm": lambda: encoder_layer(dropout=0.0, activation="gelu"),
    "pre-norm": lambda: encoder_layer(dropout=0.0, activation="gelu", norm_first=True),
    "relu": lambda: encoder_layer(dropout=0.0),
    "dropout": lambda: encoder_layer(dropout=0.1, activation="gelu"),
    "encoder": lambda: nn.TransformerEncoder(
        encoder_layer(dropout=0.0, activation="gelu"), 2, enable_nested_tensor=False
    ),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_the_layers_of_torch_are_fused(name, train):
    result = check(Host(name, lambda kit, x: x, module=TORCH[name], train=train))
    assert result.share == 1.0, result.left
    if name in ("post-norm", "pre-norm", "encoder"):  # a residual follows
        assert result.rules["rows in order"]


@pytest.mark.parametrize("name", ["post-norm", "pre-norm"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_layers_of_torch_without_gradients(name, context):
    """Torch's own fast path is the host there."""
    how = dict(train=False, context=context, needs_grad=False, dtype=torch.float32)
    check(Host(name, lambda kit, x: x, module=TORCH[name], **how))


def test_a_whole_vit():
    """Patches, four blocks with layer scale, a norm, a head: one graph, all of it fused."""

    def vit(kit: Kit, image: Tensor) -> Tensor:
        x = with_cls(kit, flat(kit.conv(image))) + positions(kit, 7)
        return kit.q(kit.n(four(kit, four(kit, x)))[:, 0])

    result = check(Host("vit", vit, images, calls=2, again=lambda: (seeded(3, 3, 8, 12),)))
    assert result.share == 1.0, result.left
    assert result.rules["qkv_attention"] >= 4 and len(result.reports) <= 2


def test_a_mask_of_windows_in_any_batch():
    """Queries and keys are scaled to length 1, so that attention alone is one op."""

    def cosine(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = packed(kit, x.reshape(-1, 4, C))
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        by_image = scores.view(-1, 2, H, 4, 4) + kit.table[None, :2, None, :4, :4]
        return kit.o(join(by_image.view(scores.shape).softmax(-1) @ v))

    def images_of(batch: int) -> Any:
        return lambda: (seeded(batch, 8, C),)

    result = check(Host("windows", cosine, images_of(2), calls=2, again=images_of(3)))
    assert result.share == 1.0 and len(result.reports) == 2, result.left


def chosen_kernels(attend: Any) -> Any:
    def forward(kit: Kit, x: Tensor) -> Tensor:
        q, k, v = separate(kit, x)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
            o = attend(q, k, v)
        return kit.o(join(o))

    return forward


def test_a_choice_among_torchs_kernels_is_kept_where_torch_attends():
    fused = check(Host("kernels", chosen_kernels(sdpa), calls=2))
    assert fused.share == 1.0, fused.left
    left = check(Host("kernels", chosen_kernels(lambda q, k, v: sdpa(q, k, v, scale=-1.0))))
    assert "a scale of -1.0" in left.left[0] and not left.reports[0].declined
    enabled = torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.mem_efficient_sdp_enabled
    assert all(each() for each in enabled)
