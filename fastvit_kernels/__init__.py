"""Fused Triton kernels, forward and backward, for training Vision Transformers in PyTorch.

The ops are functions of tensors, the modules make up a ViT with timm's names, and the backend
switch says which implementation runs. Importing the package touches no device.
"""

from fastvit_kernels.attention import attention, qkv_attention
from fastvit_kernels.attention_maps import attention_maps
from fastvit_kernels.backend import backend, get_backend, set_backend
from fastvit_kernels.hosts.transformers import register_attention
from fastvit_kernels.layer_norm import layer_norm, layer_norm_and_input
from fastvit_kernels.linear import linear
from fastvit_kernels.mlp import mlp
from fastvit_kernels.modules import Attention, LayerNorm, Mlp, PatchEmbed
from fastvit_kernels.patch_embed import patch_embed
from fastvit_kernels.presets import create_vit
from fastvit_kernels.sdpa import scaled_dot_product_attention
from fastvit_kernels.swap import SwapReport, swap_in, swap_out
from fastvit_kernels.vit import Block, VisionTransformer
from fastvit_kernels.weights import WeightsReport, load_weights

__version__ = "0.1.0"

__all__ = [
    "Attention",
    "Block",
    "LayerNorm",
    "Mlp",
    "PatchEmbed",
    "SwapReport",
    "VisionTransformer",
    "WeightsReport",
    "attention",
    "attention_maps",
    "backend",
    "create_vit",
    "get_backend",
    "layer_norm",
    "layer_norm_and_input",
    "linear",
    "load_weights",
    "mlp",
    "patch_embed",
    "qkv_attention",
    "register_attention",
    "scaled_dot_product_attention",
    "set_backend",
    "swap_in",
    "swap_out",
]
