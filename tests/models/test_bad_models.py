"""Bad calls of modules, models, swaps and switches: an error that says what came and what is
wanted, and everything as it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numerics import rand
from torch import nn

import fastvit_kernels as fk

nan, inf = float("nan"), float("inf")
T, V = TypeError, ValueError
SMALL: dict[str, Any] = dict(
    img_size=16, patch_size=8, num_classes=3, embed_dim=16, depth=1, num_heads=2
)

# kind of argument -> what it must not be, the error, what that says after the argument's name; more
# values of each kind are refused by the same checks in tests/ops/test_bad_calls.py
BAD: dict[str, list[tuple[Any, type[Exception], str]]] = {
    "count": [(0, V, "must be at least 1, got 0"), (True, T, "must be an int, got bool True")],
    "number": [(-1, V, "must be at least 0, got -1"), ("8", T, "must be an int, got str '8'")],
    "rate": [(1.5, V, r"must be in \[0, 1"), (nan, V, r"must be in \[0, 1"), (None, T, "a number")],
    "flag": [(0, T, "must be True or False, got int 0")],
    "eps": [(nan, V, "must be finite and at least 0, got nan"), (None, T, "must be a number")],
    "size": [
        ("16", T, r"must be an int or \(height, width\), got '16'"),
        ((16, 16, 16), T, r"must be an int or \(height, width\), got \(16, 16, 16\)"),
        ((16, -16), V, "must be at least 1, got -16"),
        (True, T, "must be an int, got bool True"),
    ],
    "ratio": [(0, V, "must be finite and above 0, got 0"), ("4", T, "must be a number, got str")],
    "scale": [(inf, V, "must be finite, got inf"), ([1.0], T, "must be a number, got list")],
    "choice": [
        ("xavier", V, "must be one of .*, got 'xavier'"),
        (3, T, "must be one of .*, got 3"),
    ],
}

# constructor, a good call of it, its arguments by kind
CONSTRUCTORS: list[tuple[Callable[..., Any], dict[str, Any], dict[str, str]]] = [
    (
        fk.LayerNorm,
        dict(normalized_shape=16),
        dict(count="normalized_shape", eps="eps", flag="elementwise_affine bias"),
    ),
    (
        fk.PatchEmbed,
        dict(img_size=16, patch_size=8, embed_dim=16),
        dict(size="img_size patch_size", count="in_chans embed_dim", flag="bias"),
    ),
    (
        fk.Attention,
        dict(dim=16, num_heads=2),
        dict(
            count="dim num_heads attn_head_dim",
            number="num_prefix_tokens",
            flag="qkv_bias proj_bias qk_norm key_bias",
            rate="attn_drop proj_drop",
        ),
    ),
    (
        fk.Mlp,
        dict(in_features=8, hidden_features=16),
        dict(count="in_features hidden_features", choice="act_layer", flag="bias", rate="drop"),
    ),
    (
        fk.VisionTransformer,
        SMALL,
        dict(
            size="img_size patch_size",
            count="in_chans embed_dim num_heads attn_head_dim",
            number="num_classes depth reg_tokens representation_size",
            flag="class_token no_embed_class pre_norm fc_norm pool_include_prefix qkv_bias qk_norm "
            "key_bias dynamic_img_size mask_token fix_init",
            rate="drop_rate pos_drop_rate proj_drop_rate attn_drop_rate drop_path_rate "
            "patch_drop_rate",
            eps="norm_eps",
            ratio="mlp_ratio",
            scale="init_values",
            choice="global_pool act_layer mlp_layer pos_embed rope_type drop_path memory "
            "weight_init",
        ),
    ),
    (fk.create_vit, dict(name="vit_mnist"), dict(count="embed_dim")),
]


def assert_refused(call, error, message, label):
    with pytest.raises(error, match=message) as caught:
        call()
    assert type(caught.value) is error, label
    assert re.match(r"\w+(\.__init__\(\))?:? ", str(caught.value)), label


@pytest.mark.parametrize(
    ("make", "good", "kinds"), CONSTRUCTORS, ids=lambda x: getattr(x, "__name__", "")
)
def test_bad_constructor(make, good, kinds):
    """A class's own error; a part's comes before it draws weights."""
    for kind, names in kinds.items():
        for name in names.split():
            for value, error, message in BAD[kind]:
                state, label = torch.get_rng_state(), f"{name}={value!r}"
                call = partial(make, **{**good, name: value})
                assert_refused(call, error, f"{name}.* {message}", label)
                if make not in (fk.VisionTransformer, fk.create_vit):
                    assert torch.equal(state, torch.get_rng_state()), label


def _vit(**overrides: Any) -> fk.VisionTransformer:
    return fk.VisionTransformer(**{**SMALL, **overrides})


MNIST = partial(fk.create_vit, "vit_mnist")
# What one argument says of another, names, other arguments.
TOGETHER: list[tuple[Any, type[Exception], str]] = [
    (partial(fk.LayerNorm, (4, 8)), T, "one axis, must be an int, got tuple"),
    (partial(fk.PatchEmbed, 4, 8), V, r"img_size \(4, 4\) must be at least patch_size \(8, 8\)"),
    (partial(fk.Attention, 15, 2), V, "dim 15 must be a multiple of num_heads 2"),
    (partial(fk.Attention, 24, 2), V, "D must be a multiple of 8, got 12"),
    (partial(fk.Attention, 528, 2), V, "D must be at most 256, got 264"),
    (partial(fk.Attention, 16, 2, attn_head_dim=12), V, "D must be a multiple of 8, got 12"),
    (partial(fk.Attention, 16, 2, attn_drop=1.0), V, r"attn_drop must be in \[0, 1\), got"),
    (partial(fk.Attention, 16, 2, norm_layer="LayerNorm"), T, "must be a class, got 'LayerNorm'"),
    (partial(fk.Mlp, 16), T, r"Mlp.__init__\(\) missing .* 'hidden_features'"),
    (partial(fk.Block, 16), T, "missing .* 'num_heads'"),
    (partial(fk.Block, 16, 2, nonsense=1), T, "Block.* unexpected .* 'nonsense'"),
    (partial(_vit, embed_dim=20), V, "D must be a multiple of 8, got 10"),
    (partial(_vit, class_token=False), V, "'token' needs class_token=True"),
    (partial(fk.create_vit, "vit_base"), V, "unknown model .*; wanted 'vit_mnist' or"),
    (partial(fk.create_vit, "vit_mnist\n"), V, "unknown model .*; wanted 'vit_mnist' or"),
    (partial(fk.create_vit, ["vit_mnist"]), T, "name must be a str, got"),
    (partial(MNIST, nonsense=1), T, "unexpected keyword argument 'nonsense'$"),
    (partial(MNIST, classes=10), T, "'classes'; near names: num_classes"),
]


@pytest.mark.parametrize(
    ("call", "error", "message"), TOGETHER, ids=[message for _, _, message in TOGETHER]
)
def test_bad_arguments_together(call, error, message):
    assert_refused(call, error, message, message)


# label -> (module, its input, the error, what it says); what an op checks, tests/ops/ has.
_EMBED = partial(fk.PatchEmbed, 16, 8, 3, 16)
FORWARDS: dict[str, tuple[Callable[[], nn.Module], Any, type[Exception], str]] = {
    **{
        f"{name}-{kind}": (make, x, error, message.format(argument))
        for name, make, argument, good in (
            ("LayerNorm", partial(fk.LayerNorm, 8), "x", torch.ones(2, 8)),
            ("PatchEmbed", _EMBED, "images", torch.ones(1, 3, 16, 16)),
            ("VisionTransformer", _vit, "images", torch.ones(1, 3, 16, 16)),
        )
        for kind, x, error, message in (
            ("None", None, T, "{} must be a Tensor, got NoneType"),
            ("int", good.long(), T, "{} must be floating point, got torch.int64"),
            ("width", torch.ones(*good.shape[:-1], 7), V, "must"),
        )
    },
    "PatchEmbed-rank": (_EMBED, torch.ones(3, 16, 16), V, "4 axes"),
    "PatchEmbed-channels": (_EMBED, torch.ones(1, 4, 16, 16), V, "3 channels, got 4"),
    "PatchEmbed-size": (_EMBED, torch.ones(1, 3, 16, 24), V, r"be \(16, 16\) .* got"),
    "size-dynamic": (
        partial(_vit, dynamic_img_size=True),
        torch.ones(1, 3, 7, 40),
        V,
        r"images must be at least \(8, 8\) .*, got \(7, 40\)",
    ),
    "Attention-rank": (partial(fk.Attention, 16, 2), rand(5, 16), V, "must have 3 axes"),
}


@pytest.mark.parametrize("label", FORWARDS)
def test_bad_forward(label):
    make, x, error, message = FORWARDS[label]
    module = make().to(rand(1).device)
    for name in ("auto", "torch"):
        with fk.backend(name):
            assert_refused(partial(module, x), error, message, label)


IMAGES = torch.ones(1, 3, 16, 16)


@pytest.mark.parametrize(
    ("model", "images", "error", "message"),
    [
        (fk.VisionTransformer, IMAGES, T, "model must be an nn.Module, got type"),
        (nn.Linear(2, 2), torch.ones(1, 2), V, "attention_maps: Linear computes no attention"),
        (_vit(), None, T, "images must be"),
        (_vit(), IMAGES.to_sparse(), T, "images must be"),
        (_vit(), torch.ones(1, 3, 16, 24), V, r"images must be \(16, 16\)"),
    ],
)
def test_bad_attention_maps(model, images, error, message):
    with pytest.raises(error, match=message):
        fk.attention_maps(model, images)
    if isinstance(model, nn.Module):
        assert all(m.training and not m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("call", [fk.set_backend, fk.backend])
@pytest.mark.parametrize("name", [None, "cuda", ["torch"], np.ones(2)], ids=lambda x: f"{x!r:.20}")
def test_bad_backend(call, name):
    message = r"backend must be one of \('auto', 'triton', 'torch'\), got "
    with fk.backend("torch"):
        with pytest.raises(V, match=message), call(name):
            pass
        assert fk.get_backend() == "torch"
