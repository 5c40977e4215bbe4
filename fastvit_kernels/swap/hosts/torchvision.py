"""torchvision: the encoder block of its Vision Transformer, and its MLP.

The search by structure finds both; by the table, a hook on one layer of the MLP leaves the others
fused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import hosts
from . import windows
from .branch import PreNormBlock
from .fused import Fused
from .parts import SequentialMlp


class EncoderBlock(PreNormBlock):
    """x = x + dropout(self_attention(ln_1(x)));  x = x + mlp(ln_2(x))"""

    fused_names = ("ln_1", "self_attention", ("dropout",), "ln_2", "mlp", ())

    def fused_call_attention(self: Any, y: Tensor, extras: dict[str, Any]) -> Tensor:
        return self.self_attention(y, y, y, need_weights=False)[0]


TABLE: dict[str, type[Fused]] = {
    **windows.TORCHVISION,
    "torchvision.models.vision_transformer.EncoderBlock": EncoderBlock,
    "torchvision.models.vision_transformer.MLPBlock": SequentialMlp,
    "torchvision.ops.misc.MLP": SequentialMlp,
}


def __getattr__(name: str) -> type:
    return hosts.unpickled(__name__, TABLE, name)
