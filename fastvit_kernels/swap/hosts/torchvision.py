"""torchvision: the encoder block of its Vision Transformer, and its MLP.

The search by structure finds both; by the table, a hook on one layer of the MLP leaves the others
fused.
"""

from __future__ import annotations

from typing import Any

from .block import pre_norm
from .mlp import SequentialMlp
from .special import windows
from .torch_nn import SELF

TABLE: dict[str, Any] = {
    **windows.TORCHVISION,
    "torchvision.models.vision_transformer.EncoderBlock": pre_norm(
        "ln_1", "self_attention", "dropout", "ln_2", "mlp", "", **SELF
    ),
    "torchvision.models.vision_transformer.MLPBlock": SequentialMlp,
    "torchvision.ops.misc.MLP": SequentialMlp,
}
