"""torchvision: the encoder block of its Vision Transformer, and its MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .. import hosts
from .fused import Fused, Left, is_dense, left_dropouts, names, pre_norm_branch
from .parts import SequentialMlp


class EncoderBlock(Fused):
    """x = x + dropout(self_attention(ln_1(x)));  x = x + mlp(ln_2(x))"""

    level = "block"
    children_known = names("ln_1 self_attention dropout ln_2 mlp")
    pieces = ("ln_1", "self_attention", "ln_2", "mlp")
    bodies = ("self_attention", "mlp")

    def left(self: Any) -> Iterator[Left]:
        yield from left_dropouts(self, "dropout")

    def forward(self: Any, input: Tensor) -> Tensor:
        if not is_dense(input) or input.ndim != 3:
            return self.host_forward(input)

        def call(y: Tensor) -> Tensor:
            return self.self_attention(y, y, y, need_weights=False)[0]

        x = pre_norm_branch(input, self.ln_1, self.self_attention, self.dropout, call=call)
        return pre_norm_branch(x, self.ln_2, self.mlp)


TABLE: dict[str, type[Fused]] = {
    "torchvision.models.vision_transformer.EncoderBlock": EncoderBlock,
    "torchvision.models.vision_transformer.MLPBlock": SequentialMlp,
    "torchvision.ops.misc.MLP": SequentialMlp,
}


def __getattr__(name: str) -> type:
    return hosts.unpickled(__name__, TABLE, name)
