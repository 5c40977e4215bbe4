"""The parts that several hosts share: patch embedding and the kinds of MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.linear import linear
from ...ops.mlp import mlp
from ...ops.patch_embed.functions import patch_embed
from ...runtime.plain import is_hooked, is_plain
from .fused import (
    Fused,
    Left,
    inert,
    is_dense,
    left_dropouts,
    left_linears,
    project,
    project_out,
)

# class path of an activation module -> our name for it
_ACTIVATIONS = {
    "torch.nn.modules.activation.SiLU": "silu",
    "timm.layers.activations.GELU": "gelu",
    "timm.layers.activations.GELUTanh": "gelu_tanh",
    "timm.layers.activations.QuickGELU": "quick_gelu",
    "timm.layers.activations.Swish": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.QuickGELUActivation": "quick_gelu",
    "transformers.activations.SiLUActivation": "silu",
}


def activation_name(act: Any) -> str | None:
    """Our name of an activation module or function, None where it is another one."""
    if not isinstance(act, nn.Module):
        return "gelu" if act is F.gelu else None
    if is_hooked(act):
        return None
    if type(act) is nn.GELU:
        return "gelu_tanh" if act.approximate == "tanh" else "gelu"
    cls = type(act)
    return _ACTIVATIONS.get(f"{cls.__module__}.{cls.__qualname__}")


class PatchConv(Fused):
    """A Conv2d whose kernel is its stride, on images: (B, in, height, width) -> (B, C, h, w).

    The op writes (B, h*w, C); what is returned is a view of that, so that the host's
    flatten(2).transpose(1, 2) costs nothing.
    """

    level = "patch_embed"

    @classmethod
    def reject(cls, module: Any) -> str | None:
        if module.kernel_size != module.stride or module.in_channels > 4:
            return ""  # some other convolution
        if module.padding not in ((0, 0), "valid") or module.groups != 1:
            return "a patch embedding with padding or groups"
        return None if module.dilation == (1, 1) else "a dilated patch embedding"

    def forward(self: Any, images: Tensor) -> Tensor:
        (p, q) = self.kernel_size
        if not is_dense(images) or images.ndim != 4 or images.shape[2] % p or images.shape[3] % q:
            return self.host_forward(images)
        tokens = patch_embed(images, self.weight, self.bias)
        grid = (images.shape[2] // p, images.shape[3] // q)
        return tokens.transpose(1, 2).unflatten(2, grid)


class Mlp(Fused):
    """fc1 -> act -> drop1 -> norm -> fc2 -> drop2: timm's Mlp; subclasses have other names."""

    level = "mlp"
    fc1_name, act_name, fc2_name = "fc1", "act", "fc2"
    between = ("drop1", "norm")  # children between the activation and fc2
    after = "drop2"

    def _get(self: Any, name: str) -> Any:
        return getattr(self, name, None)

    @classmethod
    def reject(cls, module: Any) -> str | None:
        is_conv = type(getattr(module, cls.fc1_name)) is nn.Conv2d
        return "its layers are convolutions" if is_conv else None

    def reads_low(self) -> bool:
        return is_plain(self._get(self.fc1_name))

    def draws(self) -> bool:
        return not (inert(self._get("drop1")) and inert(self._get("drop2")))

    def left(self: Any) -> Iterator[Left]:
        yield from left_linears(self, self.fc1_name, self.fc2_name)
        act = self._get(self.act_name)
        if activation_name(act) is None:
            hooked = isinstance(act, nn.Module) and is_hooked(act)
            yield self.act_name, act, "it is hooked" if hooked else "no kernel for this activation"
        yield from left_dropouts(self, "drop1", self.after)

    def branch(
        self: Any, x: Tensor, residual: Tensor | None = None, layer_scale: Tensor | None = None,
        row_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        fc1, act, fc2 = (self._get(n) for n in (self.fc1_name, self.act_name, self.fc2_name))
        between, after = [self._get(n) for n in self.between], self._get(self.after)
        name = activation_name(act)
        if is_plain(fc1) and name is not None:
            if is_plain(fc2) and inert(after) and all(inert(m) for m in between):
                return mlp(
                    x, fc1.weight, fc1.bias, fc2.weight, fc2.bias, activation=name,
                    residual=residual, layer_scale=layer_scale, row_scale=row_scale,
                )  # fmt: skip
            hidden = linear(x, fc1.weight, fc1.bias, activation=name)
        else:
            hidden = act(project(fc1, x))
        for m in between:
            hidden = hidden if m is None else m(hidden)
        return project_out(fc2, after, hidden, residual, layer_scale, row_scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x) if is_dense(x) else self.host_forward(x)


class GluMlp(Mlp):
    """timm GluMlp: x1, x2 = fc1(x) in halves; act(x1) * x2, or x1 * act(x2) where gate_last."""

    def left(self: Any) -> Iterator[Left]:
        yield from left_linears(self, "fc1", "fc2")
        yield from left_dropouts(self, "drop2")

    def branch(
        self: Any, x: Tensor, residual: Tensor | None = None, layer_scale: Tensor | None = None,
        row_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        x1, x2 = project(self.fc1, x).chunk(2, dim=-1)
        hidden = x1 * self.act(x2) if self.gate_last else self.act(x1) * x2
        hidden = self.norm(self.drop1(hidden))
        return project_out(self.fc2, self.drop2, hidden, residual, layer_scale, row_scale)


class SwiGLU(Mlp):
    """act(gate(x)) * up(x) -> drop1 -> norm -> down: timm's SwiGLU; HF's in a subclass."""

    gate_name, up_name, down_name, act_name = "fc1_g", "fc1_x", "fc2", "act"

    @classmethod
    def reject(cls, module: Any) -> str | None:
        return None

    def reads_low(self) -> bool:
        return is_plain(self._get(self.gate_name)) and is_plain(self._get(self.up_name))

    def left(self: Any) -> Iterator[Left]:
        yield from left_linears(self, self.gate_name, self.up_name, self.down_name)
        yield from left_dropouts(self, "drop2")

    def branch(
        self: Any, x: Tensor, residual: Tensor | None = None, layer_scale: Tensor | None = None,
        row_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        gate, up = project(self._get(self.gate_name), x), project(self._get(self.up_name), x)
        hidden = self._get(self.act_name)(gate) * up
        for m in (self._get("drop1"), self._get("norm")):
            hidden = hidden if m is None else m(hidden)
        down, after = self._get(self.down_name), self._get("drop2")
        return project_out(down, after, hidden, residual, layer_scale, row_scale)


class SequentialMlp(Mlp):
    """nn.Sequential(Linear, activation, [Dropout,] Linear[, Dropout]); torchvision's MLPBlock."""

    @classmethod
    def reject(cls, module: Any) -> str | None:
        kinds = [type(m) for m in module]
        linears = [i for i, kind in enumerate(kinds) if kind is nn.Linear]
        rest = [kind for i, kind in enumerate(kinds) if i not in linears and i != 1]
        if linears not in ([0, 2], [0, 3]) or any(kind is not nn.Dropout for kind in rest):
            return ""  # some other Sequential
        if activation_name(module[1]) is None:
            return f"no kernel for {kinds[1].__name__}"
        return None

    def _names(self: Any) -> dict[str, str]:
        """Role -> child name; the children's names are their places."""
        names = list(self._modules)
        second = len(names) - 1 - isinstance(self[-1], nn.Dropout)
        roles = {"fc1": names[0], "act": names[1], "fc2": names[second]}
        if second == 3:
            roles["drop1"] = names[2]
        if second + 1 < len(names):
            roles["drop2"] = names[second + 1]
        return roles

    def _get(self: Any, name: str) -> Any:
        return self._modules.get(self._names().get(name, ""))

    def left(self: Any) -> Iterator[Left]:
        names = self._names()
        yield from left_linears(self, names["fc1"], names["fc2"])
        yield from left_dropouts(self, *(names[n] for n in ("drop1", "drop2") if n in names))
