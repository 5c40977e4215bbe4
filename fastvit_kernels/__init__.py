"""Fused Triton kernels, forward and backward, for training Vision Transformers in PyTorch.

The ops are functions of tensors, the modules make up a ViT with timm's names, and the backend
switch says which implementation runs. Importing the package touches no device, and loads a part of
it, kernels and operators of torch, when a name of that is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .runtime import compat as compat  # before all others: it refuses a torch that is too old
from .runtime.version import __version__ as __version__

if TYPE_CHECKING:
    from .fuse.attention_interface import register_attention as register_attention
    from .fuse.report import ModelStatus as ModelStatus, SwapReport as SwapReport
    from .fuse.status import status as status
    from .fuse.swap import swap_in as swap_in, swap_out as swap_out
    from .fuse.verify import verify as verify
    from .measure.compare import compare as compare
    from .models.attention_maps import attention_maps as attention_maps
    from .models.gated_mlp import GluMlp as GluMlp, SwiGLU as SwiGLU
    from .models.masked import MaskedDecoder as MaskedDecoder
    from .models.modules import Attention as Attention, Mlp as Mlp, PatchEmbed as PatchEmbed
    from .models.norms import LayerNorm as LayerNorm, RmsNorm as RmsNorm
    from .models.presets import create_vit as create_vit
    from .models.vit import Block as Block, VisionTransformer as VisionTransformer
    from .ops.attention.functions import attention as attention
    from .ops.attention.projected import qkv_attention as qkv_attention
    from .ops.attention.rotary import rope_attention as rope_attention
    from .ops.attention.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from .ops.attention.varlen import varlen_attention as varlen_attention
    from .ops.common.samples import keep_samples as keep_samples
    from .ops.gated_mlp.functions import gated_mlp as gated_mlp
    from .ops.linear import linear as linear
    from .ops.mlp import mlp as mlp
    from .ops.norm.functions import (
        layer_norm as layer_norm,
        layer_norm_and_input as layer_norm_and_input,
        rms_norm as rms_norm,
        rms_norm_and_input as rms_norm_and_input,
    )
    from .ops.patch_embed.functions import patch_embed as patch_embed
    from .ops.rope import rope as rope
    from .runtime.backend import (
        backend as backend,
        get_backend as get_backend,
        set_backend as set_backend,
    )
    from .runtime.checkpoint_policy import checkpoint_policy as checkpoint_policy
    from .weights.load import WeightsReport as WeightsReport, load_weights as load_weights

_HOMES = {
    "fuse.attention_interface": "register_attention",
    "fuse.report": "ModelStatus SwapReport",
    "fuse.status": "status",
    "fuse.swap": "swap_in swap_out",
    "fuse.verify": "verify",
    "measure.compare": "compare",
    "models.attention_maps": "attention_maps",
    "models.gated_mlp": "GluMlp SwiGLU",
    "models.masked": "MaskedDecoder",
    "models.modules": "Attention Mlp PatchEmbed",
    "models.norms": "LayerNorm RmsNorm",
    "models.presets": "create_vit",
    "models.vit": "Block VisionTransformer",
    "ops.attention.functions": "attention",
    "ops.attention.projected": "qkv_attention",
    "ops.attention.rotary": "rope_attention",
    "ops.attention.sdpa": "scaled_dot_product_attention",
    "ops.attention.varlen": "varlen_attention",
    "ops.common.samples": "keep_samples",
    "ops.gated_mlp.functions": "gated_mlp",
    "ops.linear": "linear",
    "ops.mlp": "mlp",
    "ops.norm.functions": "layer_norm layer_norm_and_input rms_norm rms_norm_and_input",
    "ops.patch_embed.functions": "patch_embed",
    "ops.rope": "rope",
    "runtime.backend": "backend get_backend set_backend",
    "runtime.checkpoint_policy": "checkpoint_policy",
    "weights.load": "WeightsReport load_weights",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}
if not TYPE_CHECKING:
    __all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        import difflib

        near = difflib.get_close_matches(name, _HOME_OF, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    found = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    return globals().setdefault(name, found)


def __dir__() -> list[str]:
    return sorted(_HOME_OF)
