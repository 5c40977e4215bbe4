"""The ops that rules put into a graph."""

from ..ops.attention.functions import attention as attention
from ..ops.attention.projected import qkv_attention as qkv_attention
from ..ops.attention.rotary import rope_attention as rope_attention
from ..ops.attention.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
from ..ops.common.samples import keep_samples as keep_samples
from ..ops.gated_mlp.functions import gated_mlp as gated_mlp
from ..ops.linear import linear as linear
from ..ops.mlp import mlp as mlp
from ..ops.norm.functions import (
    layer_norm as layer_norm,
    layer_norm_and_input as layer_norm_and_input,
    rms_norm as rms_norm,
    rms_norm_and_input as rms_norm_and_input,
)
from ..ops.patch_embed.functions import patch_embed as patch_embed
from ..ops.rope import rope as rope
