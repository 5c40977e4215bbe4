"""Bad calls of modules, models, swaps and switches: an error that says what came and what is
wanted, and everything as it was."""

from __future__ import annotations

import inspect
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
SMALL: dict[str, Any] = dict(
    img_size=16, patch_size=8, num_classes=3, embed_dim=16, depth=1, num_heads=2
)

Row = tuple[str, Callable[[], Any], type[Exception], str]


def _arguments(
    make: Callable[..., Any], good: dict[str, Any], table: dict[str, list[tuple[Any, str]]]
) -> list[Row]:
    """Rows of a constructor: each argument with values that it must not have."""
    rows: list[Row] = []
    for name, values in table.items():
        for value, message in values:
            error = TypeError if message.startswith("T:") else ValueError

            def call(name=name, value=value):
                return make(**{**good, name: value})

            label = f"{make.__name__}-{name}={value!r:.30}"
            rows.append((label, call, error, message.removeprefix("T:")))
    return rows


def _count(name: str, least: int = 1) -> list[tuple[Any, str]]:
    low = (least - 1, f"{name} must be at least {least}, got {least - 1}")
    return [low, (-8, f"{name} must be at least {least}, got -8")] + [
        (x, f"T:{name} must be an int, got {type(x).__name__}")
        for x in ("8", 8.0, True, [8], 1j, np.float32(8))
    ]


def _rate(name: str, wanted: str = "[0, 1]") -> list[tuple[Any, str]]:
    return [(x, f"{name} must be in {re.escape(wanted[:-1])}") for x in (-0.1, 1.5, nan, inf)] + [
        (x, f"T:{name} must be a number, got {type(x).__name__}") for x in ("0", None, True, [0.1])
    ]


def _flag(name: str) -> list[tuple[Any, str]]:
    return [(x, f"T:{name} must be True or False, got") for x in (0, 1, "no", [])]


def _eps(name: str) -> list[tuple[Any, str]]:
    return [(x, f"{name} must be finite and at least 0, got {x}") for x in (nan, inf, -1e-6)] + [
        (x, f"T:{name} must be a number, got {type(x).__name__}") for x in ("1", None, True)
    ]


def _sizes(name: str) -> list[tuple[Any, str]]:
    pair = rf"T:{name} must be an int or \(height, width\), got "
    return [(x, pair) for x in ("16", 16.0, None, (16,), (16, 16, 16), {16: 16}, b"16\0")] + [
        (0, f"{name} must be at least 1, got 0"),
        ((16, -16), f"{name} must be at least 1, got -16"),
        ((16.0, 16), f"T:{name} must be an int, got float 16.0"),
        (True, f"T:{name} must be an int, got bool True"),
    ]


_ACTIVATION = [
    ("relu", r"act_layer must be one of \['gelu', .* got 'relu'"),
    (nn.GELU, "T:act_layer must be one of .* got <class"),
    (None, "T:act_layer must be one of .* got None"),
]
_RATIO = [
    *((x, f"mlp_ratio must be finite and above 0, got {x}") for x in (0, -1.0, nan, inf)),
    *((x, "T:mlp_ratio must be a number, got") for x in ("4", None, True)),
]
_SCALE = [
    *((x, f"init_values must be finite, got {x}") for x in (nan, inf)),
    *((x, "T:init_values must be a number, got") for x in ("1e-5", True, [1e-5])),
]

_FLAGS = "no_embed_class pre_norm fc_norm pool_include_prefix qkv_bias qk_norm dynamic_img_size"
_FLAGS += " fix_init"
_RATES = "drop_rate pos_drop_rate proj_drop_rate attn_drop_rate drop_path_rate"

CONSTRUCTORS = [
    *_arguments(
        fk.LayerNorm,
        dict(normalized_shape=16),
        {
            "normalized_shape": [
                (0, "must be at least 1, got 0"),
                (-3, "must be at least 1, got -3"),
                ((4, 8), "T:one axis, must be an int, got tuple"),
                ((), "T:one axis, must be an int"),
                ("16", "T:must be an int, got str"),
                (None, "T:must be an int, got None"),
                (True, "T:must be an int, got bool"),
                ((True,), "T:must be an int, got bool"),
            ],
            "eps": _eps("eps"),
            "elementwise_affine": _flag("elementwise_affine"),
            "bias": _flag("bias"),
        },
    ),
    *_arguments(
        fk.PatchEmbed,
        dict(img_size=16, patch_size=8, embed_dim=16),
        {
            "img_size": [
                *_sizes("img_size"),
                (4, r"img_size \(4, 4\) must be at least patch_size"),
            ],
            "patch_size": [*_sizes("patch_size"), (17, r"at least patch_size \(17, 17\)")],
            "in_chans": _count("in_chans"),
            "embed_dim": _count("embed_dim"),
            "bias": _flag("bias"),
        },
    ),
    *_arguments(
        fk.Attention,
        dict(dim=16, num_heads=2),
        {
            "dim": [
                *_count("dim"),
                (15, "dim 15 must be a multiple of num_heads 2"),
                (24, "D must be a multiple of 8, got 12"),
                (528, "D must be at most 256, got 264"),
            ],
            "num_heads": [
                *_count("num_heads"),
                (3, "dim 16 must be a multiple of num_heads 3"),
                (4, "D must be a multiple of 8, got 4"),
            ],
            "attn_head_dim": [
                *_count("attn_head_dim"),
                (12, "D must be a multiple of 8, got 12"),
                (264, "D must be at most 256, got 264"),
            ],
            "qkv_bias": _flag("qkv_bias"),
            "proj_bias": _flag("proj_bias"),
            "attn_drop": [
                *_rate("attn_drop", "[0, 1)"),
                (1.0, r"attn_drop must be in \[0, 1\), got"),
            ],
            "proj_drop": _rate("proj_drop"),
            "qk_norm": _flag("qk_norm"),
            "norm_layer": [("LayerNorm", "T:norm_layer must be a class, got 'LayerNorm'")],
            "key_bias": _flag("key_bias"),
            "num_prefix_tokens": _count("num_prefix_tokens", 0),
        },
    ),
    *_arguments(
        fk.Mlp,
        dict(in_features=8, hidden_features=16),
        {
            "in_features": _count("in_features"),
            "hidden_features": _count("hidden_features"),
            "act_layer": _ACTIVATION,
            "bias": _flag("bias"),
            "drop": _rate("drop"),
        },
    ),
    *_arguments(
        fk.VisionTransformer,
        SMALL,
        {
            **{n: _flag(n) for n in _FLAGS.split()},
            **{n: _count(n) for n in "in_chans num_heads attn_head_dim".split()},
            **{n: _count(n, 0) for n in "num_classes depth reg_tokens representation_size".split()},
            **{n: _rate(n) for n in _RATES.split()},
            "img_size": _sizes("img_size"),
            "patch_size": _sizes("patch_size"),
            "global_pool": [
                ("map", r"global_pool must be one of \('', 'avg', 'token'\), got 'map'"),
                *((x, "T:global_pool must be one of") for x in (None, 3, ["avg"])),
            ],
            "embed_dim": [*_count("embed_dim"), (20, "D must be a multiple of 8, got 10")],
            "mlp_ratio": _RATIO,
            "init_values": _SCALE,
            "class_token": [*_flag("class_token"), (False, "'token' needs class_token=True")],
            "act_layer": _ACTIVATION,
            "norm_eps": _eps("norm_eps"),
            "pos_embed": [
                ("rope", r"pos_embed must be one of \('learn', 'none'\), got 'rope'"),
                (None, "T:pos_embed must be one of"),
            ],
            "rope_type": [
                ("mixed", r"rope_type must be one of \('', 'dinov3'\), got 'mixed'"),
                (None, "T:rope_type must be one of"),
            ],
            "weight_init": [
                ("xavier", "weight_init must be one of .*, got 'xavier'"),
                (None, "T:weight_init must be one of"),
            ],
        },
    ),
    *_arguments(
        fk.create_vit,
        dict(name="vit_mnist"),
        {
            "name": [
                *(
                    (x, "unknown model .*; wanted 'vit_mnist' or")
                    for x in ("", "vit_base", "VIT_MNIST", "vit_base_patch16_225", "vit_mnist\n")
                ),
                *((x, "T:name must be a str, got") for x in (None, 3, ["vit_mnist"])),
            ],
            "nonsense": [(1, "T:unexpected keyword argument 'nonsense'$")],
            "classes": [(10, "T:unexpected keyword argument 'classes'; near names: num_classes")],
            "embed_dim": [(True, "T:embed_dim must be an int, got bool True")],
        },
    ),
]


@pytest.mark.parametrize("make", sorted({row[0].partition("-")[0] for row in CONSTRUCTORS}))
def test_bad_constructor(make):
    """A class's own error; a part's comes before it draws weights."""
    for label, call, error, message in CONSTRUCTORS:
        if label.partition("-")[0] != make:
            continue
        state = torch.get_rng_state()
        with pytest.raises(error, match=message) as caught:
            call()
        assert type(caught.value) is error, label
        assert re.match(r"\w+(\.__init__\(\))?:? ", str(caught.value)), label
        if make not in ("Block", "VisionTransformer", "create_vit"):
            assert torch.equal(state, torch.get_rng_state()), label


def test_constructor_signatures():
    for kind, names in ((fk.Block, ["dim", "num_heads"]), (fk.VisionTransformer, ["img_size"])):
        parameters = inspect.signature(kind).parameters
        assert list(parameters)[: len(names)] == names and parameters["memory"].default == "default"
        with pytest.raises(TypeError, match=rf"{kind.__name__}.* unexpected .* 'nonsense'"):
            kind(16, 2, nonsense=1)
    block = fk.Block(16, 2, 3.0)
    assert block.mlp.fc1.out_features == 48 and block.attn.qkv.bias is None
    with pytest.raises(TypeError, match=r"missing .* 'num_heads'"):
        fk.Block(16)
    with pytest.raises(TypeError, match=r"Mlp.__init__\(\) missing .* 'hidden_features'"):
        fk.Mlp(16)


def _vit(**overrides: Any) -> fk.VisionTransformer:
    return fk.VisionTransformer(**{**SMALL, **overrides})


# label -> (module, its input, the error, what it says); what an op checks, tests/ops/ has.
_EMBED, _NORM = partial(fk.PatchEmbed, 16, 8, 3, 16), partial(fk.LayerNorm, 8)
_BARE = partial(fk.LayerNorm, 8, elementwise_affine=False)
FORWARDS: dict[str, tuple[Callable[[], nn.Module], Any, type[Exception], str]] = {
    **{
        f"{name}-{kind}": (make, x, error, message.format(argument))
        for name, make, argument, good in (
            ("LayerNorm", _NORM, "x", rand(2, 8, grad=False)),
            ("LayerNorm without weight", _BARE, "x", rand(2, 8, grad=False)),
            ("PatchEmbed", _EMBED, "images", rand(1, 3, 16, 16, grad=False)),
            ("VisionTransformer", _vit, "images", rand(1, 3, 16, 16, grad=False)),
        )
        for kind, x, error, message in (
            ("None", None, TypeError, "{} must be a Tensor, got NoneType"),
            ("int", good.long(), TypeError, "{} must be floating point, got torch.int64"),
            ("scalar", torch.ones(()), ValueError, "must|the last axis of x must be 8, got"),
            ("width", torch.ones(*good.shape[:-1], 7), ValueError, "must"),
        )
    },
    "PatchEmbed-rank": (_EMBED, torch.ones(3, 16, 16), ValueError, "4 axes"),
    "PatchEmbed-channels": (_EMBED, torch.ones(1, 4, 16, 16), ValueError, "3 channels, got 4"),
    "PatchEmbed-size": (_EMBED, torch.ones(1, 3, 16, 24), ValueError, r"be \(16, 16\) .* got"),
    "Attention-rank": (partial(fk.Attention, 16, 2), rand(5, 16), ValueError, "must have 3 axes"),
}


@pytest.mark.parametrize("label", FORWARDS)
def test_bad_forward(label):
    make, x, error, message = FORWARDS[label]
    module = make()
    module.to(rand(1).device)
    before = {n: p.clone() for n, p in module.state_dict().items()}
    for name in ("auto", "torch"):
        with fk.backend(name), pytest.raises(error, match=message) as caught:
            module(x)
    assert re.match(r"\w+: \w+", str(caught.value))
    assert all(torch.equal(before[n], p) for n, p in module.state_dict().items())


def test_meta_device_model():
    with torch.device("meta"):
        model = _vit()
        y = model(torch.ones(2, 3, 16, 16))
    assert y.is_meta and y.shape == (2, 3)


@pytest.mark.parametrize("call", [fk.swap_in, fk.swap_out])
@pytest.mark.parametrize("x", [None, nn.Linear])
def test_bad_swap(call, x):
    message = f"{call.__name__}: model must be an nn.Module, got {type(x).__name__}"
    with pytest.raises(TypeError, match=message):
        call(x)


MAPS: list[tuple[Any, Any, type[Exception], str]] = [
    *(
        (x, torch.ones(1, 3, 16, 16), TypeError, "model must be an nn.Module, got")
        for x in (None, "vit", fk.VisionTransformer, 3)
    ),
    (nn.Linear(2, 2), torch.ones(1, 2), ValueError, "attention_maps: Linear computes no attention"),
    *(
        (_vit(), x, TypeError, "images must be")
        for x in (
            None,
            [1.0],
            np.ones((1, 3, 16, 16)),
            torch.ones(1, 3, 16, 16).long(),
            torch.ones(1, 3, 16, 16).to_sparse(),
        )
    ),
    (_vit(), torch.ones(1, 3, 16, 24), ValueError, r"images must be \(16, 16\)"),
    (_vit(), torch.ones(1, 1, 16, 16), ValueError, "images must have 3 channels, got 1"),
]


@pytest.mark.parametrize(("model", "images", "error", "message"), MAPS)
def test_bad_attention_maps(model, images, error, message):
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    modes = [m.training for m in modules]
    if modules and isinstance(images, torch.Tensor):
        model.to(rand(1).device)
        images = images.to(rand(1).device)
    with pytest.raises(error, match=message):
        fk.attention_maps(model, images)
    assert [m.training for m in modules] == modes
    assert not any(m._forward_hooks for m in modules)


@pytest.mark.parametrize("call", [fk.set_backend, fk.backend])
@pytest.mark.parametrize("name", [None, "cuda", ["torch"], np.ones(2)], ids=lambda x: f"{x!r:.20}")
def test_bad_backend(call, name):
    message = r"backend must be one of \('auto', 'triton', 'torch'\), got "
    with fk.backend("torch"):
        with pytest.raises(ValueError, match=message), call(name):
            pass
        assert fk.get_backend() == "torch"
