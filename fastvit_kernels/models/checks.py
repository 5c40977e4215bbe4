"""Arguments by name, and those of timm's that our models lack, with what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SWAP = "build the model with timm and call swap_in(model)"
_LOAD = "build the model, then call load_weights(model, path)"

# Name -> the value that asks for nothing, which is taken as None is; what to do instead.
REFUSED: dict[str, tuple[Any, str]] = {
    "pretrained": (
        False,
        "nothing is downloaded: call load_weights(model, source) with a file or with the "
        "state_dict of timm's pretrained model",
    ),
    "pretrained_cfg": (None, _LOAD),
    "pretrained_cfg_overlay": (None, _LOAD),
    "checkpoint_path": ("", _LOAD),
    "cache_dir": (None, _LOAD),
    "features_only": (
        False, f"forward_features(images) gives the last tokens; for those of other blocks {_SWAP}"
    ),
    "out_indices": (None, _SWAP),
    "scriptable": (False, "torch.export and torch.compile take the model as it is"),
    "dynamic_img_pad": (
        False, "pad the images to whole patches; dynamic_img_size=True takes any number of them"
    ),
    "strict_img_size": (True, "dynamic_img_size=True takes images of any size"),
    "scale_attn_norm": (False, _SWAP),
    "embed_layer": (None, f"conv_stem_configs puts convolutions before the patches; else {_SWAP}"),
    "block_fn": (None, _SWAP),
    "attn_layer": (None, f"qk_norm, attn_head_dim and rope_type vary the attention; else {_SWAP}"),
}  # fmt: skip
_HOLDS = ("exportable", "no_jit")  # of every model of ours


def check_choice(op: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless it is one of the choices: TypeError where it is no string."""
    if not isinstance(value, str) or value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{op}: {name} must be one of {choices}, got {value!r}")


def refuse(op: str, arguments: dict[str, Any]) -> None:
    """Raise TypeError for what asks for something that our models do not have."""
    for name, value in arguments.items():
        if name in _HOLDS:
            continue
        if name not in REFUSED:
            raise TypeError(f"{op}.__init__() got an unexpected keyword argument {name!r}")
        usual, instead = REFUSED[name]
        if value not in (None, usual):
            raise TypeError(f"{op}: {name} is timm's alone, got {value!r}; {instead}")
