"""Fused Triton kernels, forward and backward, for training Vision Transformers in PyTorch.

The ops are functions of tensors, the modules make up a ViT with timm's names, and the backend
switch says which implementation runs. Importing the package touches no device.
"""

from .runtime import compat as compat  # before all others: it refuses a torch that is too old

# isort: split
from .models.attention_maps import attention_maps
from .models.gated_mlp import GluMlp, SwiGLU
from .models.masked import MaskedDecoder
from .models.modules import Attention, Mlp, PatchEmbed
from .models.norms import LayerNorm, RmsNorm
from .models.presets import create_vit
from .models.vit import Block, VisionTransformer
from .ops.attention.functions import attention
from .ops.attention.projected import qkv_attention
from .ops.attention.rotary import rope_attention
from .ops.attention.sdpa import scaled_dot_product_attention
from .ops.attention.varlen import varlen_attention
from .ops.common.samples import keep_samples
from .ops.gated_mlp.functions import gated_mlp
from .ops.linear.functions import linear
from .ops.mlp.functions import mlp
from .ops.norm.functions import layer_norm, layer_norm_and_input, rms_norm, rms_norm_and_input
from .ops.patch_embed.functions import patch_embed
from .ops.rope import rope
from .runtime.backend import backend, get_backend, set_backend
from .runtime.checkpoint_policy import checkpoint_policy
from .runtime.version import __version__ as __version__
from .swap.apply import SwapReport, swap_in, swap_out
from .swap.compare import compare
from .swap.hosts.transformers import register_attention
from .swap.packed import packed
from .swap.status import ModelStatus, status, watch
from .weights.load import WeightsReport, load_weights

__all__ = [
    "Attention",
    "Block",
    "GluMlp",
    "LayerNorm",
    "MaskedDecoder",
    "Mlp",
    "ModelStatus",
    "PatchEmbed",
    "RmsNorm",
    "SwapReport",
    "SwiGLU",
    "VisionTransformer",
    "WeightsReport",
    "attention",
    "attention_maps",
    "backend",
    "checkpoint_policy",
    "compare",
    "create_vit",
    "gated_mlp",
    "get_backend",
    "keep_samples",
    "layer_norm",
    "layer_norm_and_input",
    "linear",
    "load_weights",
    "mlp",
    "packed",
    "patch_embed",
    "qkv_attention",
    "register_attention",
    "rms_norm",
    "rms_norm_and_input",
    "rope",
    "rope_attention",
    "scaled_dot_product_attention",
    "set_backend",
    "status",
    "swap_in",
    "swap_out",
    "varlen_attention",
    "watch",
]
