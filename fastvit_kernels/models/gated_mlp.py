"""MLPs with a gate, timm's GluMlp and SwiGLU: their arguments, their state_dict keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from ..ops.common.activation import ACTIVATIONS
from ..ops.common.samples import add_branch
from ..ops.gated_mlp.functions import gated_mlp
from ..runtime.plain import is_plain
from .checks import Activation, Count, Flag, Number, Rate, checked
from .modules import Mlp, is_idle


class _GatedMlp(nn.Module):
    """act(gate) * value, fc2, after the layers of a subclass."""

    fc2: nn.Linear

    def __init__(
        self,
        layers: dict[str, int],
        in_features: int,
        width: int,
        act_layer: str,
        bias: bool,
        drop: float,
    ):
        super().__init__()
        self.act_layer = act_layer
        self.recompute = True  # False saves the hidden layer too and rebuilds nothing
        for name, rows in layers.items():
            setattr(self, name, nn.Linear(in_features, rows, bias))
        self.fc2 = nn.Linear(width, in_features, bias)
        self.drop = nn.Dropout(drop)

    def _fused(
        self, first: nn.Linear, gate: nn.Linear | None, x: Tensor, **epilogue: Any
    ) -> Tensor | None:
        """All in one op, or None where a layer has to be called."""
        layers = (first, self.fc2, first if gate is None else gate)
        if not all(map(is_plain, layers)) or not is_idle(self.drop):
            return None
        given: dict[str, Any] = {}
        if gate is not None:
            given = dict(gate_weight=gate.weight, gate_bias=gate.bias)
        return gated_mlp(
            x,
            first.weight,
            first.bias,
            self.fc2.weight,
            self.fc2.bias,
            activation=self.act_layer,
            recompute=self.recompute,
            **given,
            **epilogue,
        )

    def _called(self, gate: Tensor, value: Tensor, **epilogue: Any) -> Tensor:
        """The rest of the MLP, layer by layer."""
        hidden = self.drop(ACTIVATIONS[self.act_layer](gate) * value)
        return add_branch(self.drop(self.fc2(hidden)), **epilogue)


class GluMlp(_GatedMlp):
    """Gated MLP with gate and value packed in fc1, timm's GluMlp: (B, T, C) -> (B, T, C).

    `hidden_features` counts both halves, as in timm. With gate_last=False and "silu" it is timm's
    SwiGLUPacked, DINOv2's SwiGLUFFN.
    """

    fc1: nn.Linear

    @checked
    def __init__(
        self,
        in_features: Count,
        hidden_features: Count,
        act_layer: Activation = "silu",
        bias: Flag = True,
        drop: Rate = 0.0,
        gate_last: Flag = True,
    ):
        width = hidden_features // 2
        if hidden_features != 2 * width:
            raise ValueError(
                f"GluMlp: hidden_features must be even, gate and value, got {hidden_features}"
            )
        layers = {"fc1": hidden_features}
        super().__init__(layers, in_features, width, act_layer, bias, drop)
        self.gate_last = gate_last

    def init_weights(self) -> None:
        """timm's: the second half begins near 0 with a bias of 1."""
        half = self.fc1.out_features // 2
        if self.fc1.bias is not None:
            nn.init.ones_(self.fc1.bias[half:])
        nn.init.normal_(self.fc1.weight[half:], std=1e-6)

    def forward(self, x: Tensor, residual=None, layer_scale=None, row_scale=None) -> Tensor:
        epilogue = dict(residual=residual, layer_scale=layer_scale, row_scale=row_scale)
        y = self._fused(self.fc1, None, x, gate_last=self.gate_last, **epilogue)
        if y is not None:
            return y
        first, second = self.fc1(x).chunk(2, dim=-1)
        gate, value = (second, first) if self.gate_last else (first, second)
        return self._called(gate, value, **epilogue)


class SwiGLU(_GatedMlp):
    """Gated MLP, timm's SwiGLU: (B, T, C) -> (B, T, C), fc2(act(fc1_g(x)) * fc1_x(x))."""

    fc1_g: nn.Linear
    fc1_x: nn.Linear

    @checked
    def __init__(
        self,
        in_features: Count,
        hidden_features: Count,
        act_layer: Activation = "silu",
        bias: Flag = True,
        drop: Rate = 0.0,
        align_to: Number = 0,
    ):
        width = hidden_features + (-hidden_features % align_to if align_to else 0)
        layers = {"fc1_g": width, "fc1_x": width}
        super().__init__(layers, in_features, width, act_layer, bias, drop)

    def init_weights(self) -> None:
        """timm's: the gate begins near 0 with a bias of 1."""
        if self.fc1_g.bias is not None:
            nn.init.ones_(self.fc1_g.bias)
        nn.init.normal_(self.fc1_g.weight, std=1e-6)

    def forward(self, x: Tensor, residual=None, layer_scale=None, row_scale=None) -> Tensor:
        epilogue = dict(residual=residual, layer_scale=layer_scale, row_scale=row_scale)
        y = self._fused(self.fc1_x, self.fc1_g, x, **epilogue)
        return self._called(self.fc1_g(x), self.fc1_x(x), **epilogue) if y is None else y


# By the names of timm's classes, which its VisionTransformer takes as `mlp_layer`.
MLP_LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Mlp": Mlp,
    "GluMlp": GluMlp,
    "SwiGLUPacked": partial(GluMlp, gate_last=False),
    "SwiGLU": SwiGLU,
}
