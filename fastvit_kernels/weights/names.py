"""The key names of every ViT family, and how each becomes timm's names and layouts.

timm                          blocks.0.attn.qkv.weight
torchvision                   encoder.layers.encoder_layer_0.self_attention.in_proj_weight
transformers, since 5.9       vit.layers.0.attention.q_proj.weight, and k_proj, v_proj
transformers, before          vit.encoder.layer.0.attention.attention.query.weight, and key, value
JAX .npz (ViT paper)          Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel
JAX .npz (big_vision)         the same with other numbers; or all layers stacked in encoderblock/

A checkpoint's family is the one that recognises most of its keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MAX_LAYERS = 1000

# A converted name that matches counts as recognised; q, k, v are packed later.
_TARGET = re.compile(
    r"cls_token|reg_token|pos_embed|blocks\.\d+\.ls[12]\.gamma"
    r"|(?:patch_embed\.proj|norm_pre|norm|fc_norm|pre_logits\.fc|head)\.(?:weight|bias)"
    r"|blocks\.\d+\.(?:norm[12]|attn\.(?:qkv|[qkv]|[qk]_norm|proj)|mlp\.(?:fc[12]|fc1_[gx]))"
    r"\.(?:weight|bias)"
    r"|blocks\.\d+\.attn\.[qv]_bias"
)

_TIMM = {
    r"blocks\.(\d+)\.gamma_([12])": r"blocks.\1.ls\2.gamma",
    r"register_tokens|storage_tokens|dist_token": "reg_token",
    r"blocks\.(\d+)\.mlp\.w12\.(\w+)": r"blocks.\1.mlp.fc1.\2",  # DINOv2's own SwiGLU
    r"blocks\.(\d+)\.mlp\.w1\.(\w+)": r"blocks.\1.mlp.fc1_g.\2",  # DINOv3's
    r"blocks\.(\d+)\.mlp\.w2\.(\w+)": r"blocks.\1.mlp.fc1_x.\2",
    r"blocks\.(\d+)\.mlp\.w3\.(\w+)": r"blocks.\1.mlp.fc2.\2",
}

_TV_LAYER = r"encoder\.layers\.encoder_layer_(\d+)\."
_TORCHVISION = {
    r"class_token": "cls_token",
    r"encoder\.pos_embedding": "pos_embed",
    r"conv_proj\.(\w+)": r"patch_embed.proj.\1",
    _TV_LAYER + r"ln_([12])\.(\w+)": r"blocks.\1.norm\2.\3",
    _TV_LAYER + r"self_attention\.in_proj_(\w+)": r"blocks.\1.attn.qkv.\2",
    _TV_LAYER + r"self_attention\.out_proj\.(\w+)": r"blocks.\1.attn.proj.\2",
    _TV_LAYER + r"mlp\.(?:0|linear_1)\.(\w+)": r"blocks.\1.mlp.fc1.\2",
    _TV_LAYER + r"mlp\.(?:3|linear_2)\.(\w+)": r"blocks.\1.mlp.fc2.\2",
    r"encoder\.ln\.(\w+)": r"norm.\1",
    r"heads\.pre_logits\.(\w+)": r"pre_logits.fc.\1",
    r"heads\.head\.(\w+)": r"head.\1",
}

_HF = r"(?:(?:vit|deit|dinov2|dinov2_with_registers|dinov3_vit|vision_model)\.)?"
_HF_LAYER = _HF + r"(?:model\.)?(?:encoder\.)?layers?\.(\d+)\."
_TRANSFORMERS = {
    _HF + r"embeddings\.cls_token": "cls_token",
    _HF + r"embeddings\.mask_token": "mask_token",
    # DeiT's distillation token takes the place of our first register; it has a position.
    _HF + r"embeddings\.(?:register_tokens|distillation_token)": "reg_token",
    _HF + r"embeddings\.(?:position_embeddings|position_embedding\.weight)": "pos_embed",
    _HF + r"embeddings\.patch_embed(?:dings(?:\.projection)?)?\.(\w+)": r"patch_embed.proj.\1",
    _HF_LAYER + r"(?:layernorm_before|norm1)\.(\w+)": r"blocks.\1.norm1.\2",
    _HF_LAYER + r"attention\.(?:attention\.query|q_proj)\.(\w+)": r"blocks.\1.attn.q.\2",
    _HF_LAYER + r"attention\.(?:attention\.key|k_proj)\.(\w+)": r"blocks.\1.attn.k.\2",
    _HF_LAYER + r"attention\.(?:attention\.value|v_proj)\.(\w+)": r"blocks.\1.attn.v.\2",
    _HF_LAYER + r"attention\.(?:output\.dense|o_proj|out_proj)\.(\w+)": r"blocks.\1.attn.proj.\2",
    _HF_LAYER + r"layer_scale([12])\.lambda1": r"blocks.\1.ls\2.gamma",
    _HF_LAYER + r"(?:layernorm_after|norm2)\.(\w+)": r"blocks.\1.norm2.\2",
    _HF_LAYER + r"(?:intermediate\.dense|mlp\.(?:fc1|weights_in))\.(\w+)": r"blocks.\1.mlp.fc1.\2",
    _HF_LAYER + r"mlp\.gate_proj\.(\w+)": r"blocks.\1.mlp.fc1_g.\2",
    _HF_LAYER + r"mlp\.up_proj\.(\w+)": r"blocks.\1.mlp.fc1_x.\2",
    _HF_LAYER + r"(?:output\.dense|mlp\.(?:fc2|weights_out))\.(\w+)": r"blocks.\1.mlp.fc2.\2",
    _HF_LAYER + r"mlp\.down_proj\.(\w+)": r"blocks.\1.mlp.fc2.\2",
    _HF + r"layernorm\.(\w+)": r"norm.\1",
    _HF + r"pooler\.dense\.(\w+)": r"pre_logits.fc.\1",
    r"classifier\.(\w+)": r"head.\1",
}

# big_vision numbers its modules 0, 1, 0 where the paper's code has 1, 2, 3.
_JAX_LAYER = r"Transformer\.encoderblock_(\d+)\."
_JAX_ATTENTION = _JAX_LAYER + r"MultiHeadDotProductAttention_[01]\."
_JAX = {
    r"cls": "cls_token",
    r"(?:Transformer\.posembed_input\.)?pos_embedding": "pos_embed",
    r"embedding\.(\w+)": r"patch_embed.proj.\1",
    _JAX_LAYER + r"LayerNorm_0\.(\w+)": r"blocks.\1.norm1.\2",
    _JAX_ATTENTION + r"query\.(\w+)": r"blocks.\1.attn.q.\2",
    _JAX_ATTENTION + r"key\.(\w+)": r"blocks.\1.attn.k.\2",
    _JAX_ATTENTION + r"value\.(\w+)": r"blocks.\1.attn.v.\2",
    _JAX_ATTENTION + r"out\.(\w+)": r"blocks.\1.attn.proj.\2",
    _JAX_LAYER + r"LayerNorm_[12]\.(\w+)": r"blocks.\1.norm2.\2",
    _JAX_LAYER + r"MlpBlock_[03]\.Dense_0\.(\w+)": r"blocks.\1.mlp.fc1.\2",
    _JAX_LAYER + r"MlpBlock_[03]\.Dense_1\.(\w+)": r"blocks.\1.mlp.fc2.\2",
    r"Transformer\.encoder_norm\.(\w+)": r"norm.\1",
    r"pre_logits\.(\w+)": r"pre_logits.fc.\1",
    r"head\.(\w+)": r"head.\1",
}

_FAMILIES = {
    family: [(re.compile(pattern), target) for pattern, target in names.items()]
    for family, names in dict(
        timm=_TIMM, torchvision=_TORCHVISION, transformers=_TRANSFORMERS, jax=_JAX
    ).items()
}


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        kinds = {"nested": value.is_nested, "meta": value.is_meta, "quantised": value.is_quantized}
        kinds[str(value.layout)] = value.layout is not torch.strided
        for kind in (kind for kind, found in kinds.items() if found):
            raise TypeError(f"load_weights: {name!r} must be a dense tensor, got a {kind} one")
        return value.detach()
    if not hasattr(value, "__array__"):
        raise TypeError(
            f"load_weights: {name!r} must be a tensor or an array, got {type(value).__name__}"
        )
    import numpy as np

    array = np.array(value)
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # bfloat16, which numpy cannot name
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise TypeError(f"load_weights: {name!r} must hold numbers, got {array.dtype}")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))


def add(tensors: dict[str, Tensor], name: str, x: Tensor) -> None:
    if name in tensors:
        raise ValueError(f"load_weights: two keys of the source mean {name!r}")
    tensors[name] = x


def _unwrap(source: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors by name, without the dicts and name prefixes that trainers wrap around them."""
    seen = [source]
    while nested := [w for w in ("state_dict", "model") if isinstance(source.get(w), Mapping)]:
        source = source[nested[0]]
        if any(source is outer for outer in seen):
            raise ValueError(f"load_weights: source must hold tensors, got itself as {nested[0]!r}")
        seen.append(source)
    tensors: dict[str, Tensor] = {}
    for name, value in source.items():
        if not isinstance(name, str):
            raise TypeError(f"load_weights: keys of the source must be str, got {name!r}")
        stripped = re.sub(r"^(?:(?:module|_orig_mod|model|backbone)\.)+", "", name)
        add(tensors, stripped, _as_tensor(name, value))
    return tensors


def _from_flax(arrays: Mapping[str, Tensor], patch_shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Flax names with dots and torch's layouts: (in, out) -> (out, in), HWIO -> OIHW. A name
    without a slash stays."""
    for prefix in ("opt/target/", "params/img/", "params/"):
        if any(name.startswith(prefix) for name in arrays):
            arrays = {name.removeprefix(prefix): x for name, x in arrays.items()}
            break
    layers: dict[str, Tensor] = {}
    for name, x in arrays.items():
        if "/encoderblock/" in name:  # all layers stacked on axis 0
            if x.ndim == 0 or not 0 < len(x) <= MAX_LAYERS:
                raise ValueError(
                    f"load_weights: {name!r} must hold 1 to {MAX_LAYERS} layers, "
                    f"got shape {tuple(x.shape)}"
                )
            for i, layer in enumerate(x):
                add(layers, name.replace("/encoderblock/", f"/encoderblock_{i}/"), layer)
        else:
            add(layers, name, x)

    tensors: dict[str, Tensor] = {}
    for name, x in layers.items():
        module, _, leaf = name.rpartition("/")
        if leaf == "kernel" and module == "embedding":
            _, in_chans, height, width = patch_shape
            if x.ndim == 2 and x.shape[0] == height * width * in_chans:
                x = x.unflatten(0, (height, width, in_chans))
            x = x.permute(3, 2, 0, 1) if x.ndim == 4 else x
        elif leaf == "kernel" and module.endswith(("/query", "/key", "/value")):
            x = x.flatten(1).t() if x.ndim > 1 else x  # (C, H, D) -> (H*D, C)
        elif leaf == "kernel":
            x = x.flatten(0, -2).t() if x.ndim > 1 else x  # (in, C) or (H, D, C) -> (C, in)
        elif leaf == "bias":
            x = x.flatten()
        leaf = "weight" if leaf in ("kernel", "scale") else leaf
        add(tensors, f"{module}/{leaf}".lstrip("/").replace("/", "."), x)
    return tensors


def _renamed(name: str, family: str) -> str:
    for pattern, target in _FAMILIES[family]:
        match = pattern.fullmatch(name)
        if match:
            return match.expand(target)
    return name


def _pack_qkv(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """blocks.i.attn.{q,k,v}.* -> blocks.i.attn.qkv.*, by rows, or biases of queries and values
    alone -> q_bias, v_bias; another incomplete set stays as it is."""
    packed = dict(tensors)
    for name in tensors:
        match = re.fullmatch(r"(blocks\.\d+\.attn)\.q\.(weight|bias)", name)
        if match is None:
            continue
        names = [match.expand(rf"\1.{part}.\2") for part in "qkv"]
        if [n in tensors for n in names] == [True, False, True] and match[2] == "bias":
            for part, n in (("q", names[0]), ("v", names[2])):
                add(packed, f"{match[1]}.{part}_bias", packed.pop(n))
        if not all(n in tensors for n in names):
            continue
        parts = [packed.pop(n) for n in names]
        for n, part in zip(names, parts, strict=True):
            if part.shape[1:] != parts[0].shape[1:] or part.ndim != parts[0].ndim or part.ndim == 0:
                raise ValueError(
                    f"load_weights: {n} must have the columns of {names[0]}, "
                    f"{tuple(parts[0].shape)}, got {tuple(part.shape)}"
                )
        packed[match.expand(r"\1.qkv.\2")] = torch.cat(parts)
    return packed


def _name_ungated(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' up_proj is fc1 in an MLP without a gate (DINOv3)."""

    renamed: dict[str, Tensor] = {}
    for name, x in tensors.items():
        layer, part, leaf = name.rpartition("mlp.fc1_x.")
        gated = not part or f"{layer}mlp.fc1_g.{leaf}" in tensors
        add(renamed, name if gated else f"{layer}mlp.fc1.{leaf}", x)
    return renamed


def to_timm(
    source: Mapping[str, Any], patch_shape: tuple[int, ...] = (1, 1, 1, 1)
) -> tuple[str, dict[str, Tensor]]:
    """Give the tensors of any family timm's names and layouts.

    Args:
        source: name -> tensor or array, with or without a trainer's wrapping.
        patch_shape: (C, in_chans, patch height, patch width) of the model, needed for a JAX patch
            embedding saved as a matrix.
    Returns: the family, and the tensors; unknown keys keep their names.
    Raises: ValueError if no key is known or two mean the same; TypeError for other values.
    """
    tensors = _from_flax(_unwrap(source), patch_shape)
    names = {family: {n: _renamed(n, family) for n in tensors} for family in _FAMILIES}
    scores = {
        family: sum(_TARGET.fullmatch(n) is not None for n in renamed.values())
        for family, renamed in names.items()
    }
    family = max(scores, key=lambda f: scores[f])
    if scores[family] == 0:
        known = ", ".join(_FAMILIES)
        raise ValueError(
            f"load_weights: no key of the source is a ViT's in the names of {known}; "
            f"its first keys are {list(tensors)[:4]}"
        )
    converted: dict[str, Tensor] = {}
    for name, target in names[family].items():
        table = name.endswith("position_embedding.weight")  # of an nn.Embedding: (T, C)
        add(converted, target, tensors[name][None] if table else tensors[name])
    return family, _pack_qkv(_name_ungated(converted))
