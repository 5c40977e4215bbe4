"""Gated MLPs of other libraries, with their weights: outputs and all gradients."""

from functools import partial

import pytest
import timm.layers
import torch
import transformers
from numerics import DEVICE, assert_accurate, rand
from torch import nn
from transformers.models.dinov2.modeling_dinov2 import Dinov2SwiGLUFFN
from transformers.models.dinov3_vit.modeling_dinov3_vit import DINOv3ViTGatedMLP

from fastvit_kernels import backend, gated_mlp
from fastvit_kernels.models.gated_mlp import GluMlp, SwiGLU

C, HIDDEN = 48, 42
# timm's arguments, ours, of a GluMlp or SwiGLU with these hidden features
TIMM = {
    "GluMlp": (timm.layers.GluMlp, GluMlp, dict(act_layer=nn.GELU), dict(act_layer="gelu")),
    "SwiGLUPacked": (timm.layers.SwiGLUPacked, GluMlp, {}, dict(gate_last=False)),
    "SwiGLUPacked-no_bias": (
        timm.layers.SwiGLUPacked,
        GluMlp,
        dict(bias=False),
        dict(gate_last=False, bias=False),
    ),
    "SwiGLU": (timm.layers.SwiGLU, SwiGLU, dict(align_to=6), dict(align_to=6)),  # as it is
    "SwiGLU-align8": (timm.layers.SwiGLU, SwiGLU, dict(align_to=8), dict(align_to=8)),
}


def _randomised(module: nn.Module) -> nn.Module:
    for i, p in enumerate(module.parameters()):
        p.data = rand(*p.shape, seed=i, scale=p.shape[-1] ** -0.5 if p.ndim == 2 else 1.0).data
    return module.to(DEVICE)


def _functional(module: nn.Module):
    """The module as a function of x and its parameters, by keyword, dots as underscores."""
    names = {name.replace(".", "_"): name for name, _ in module.named_parameters()}

    def call(x, **parameters):
        given = {names[name]: p for name, p in parameters.items()}
        return torch.func.functional_call(module, given, (x,))

    return call, {
        name: module.get_parameter(path).detach().clone().requires_grad_()
        for name, path in names.items()
    }


def _pair(what):
    host_class, own_class, host_arguments, own_arguments = TIMM[what]
    host = _randomised(host_class(C, HIDDEN, **host_arguments))
    own = own_class(C, HIDDEN, **own_arguments).to(DEVICE)
    own.load_state_dict(host.state_dict())
    return host, own


@pytest.mark.parametrize("what", TIMM)
def test_timm_through_the_kernels(what):
    host, own = _pair(what)
    (reference, parameters), (function, _) = _functional(host), _functional(own)
    with backend("triton"):
        own(rand(2, 9, C))  # raises where the kernels do not run

    def through_kernels(**inputs):
        with backend("triton"):
            # functional_call sets plain tensors, which is_plain lets pass
            return function(**inputs)

    assert_accurate(through_kernels, reference, {"x": rand(2, 9, C), **parameters})


@pytest.mark.parametrize("what", ["GluMlp", "SwiGLUPacked", "SwiGLU-align8"])
def test_gated_mlp_layer_hooks(what):
    """With a hook on each layer: the same numbers, and every hook runs."""
    _, own = _pair(what)
    x, residual, gamma = rand(2, 9, C), rand(2, 9, C, seed=1), rand(C, seed=2)
    keep = torch.tensor([0.0, 1.25], device=DEVICE)
    wanted = own(x, residual, gamma, keep)
    for name, layer in own.named_children():
        if name == "drop":
            continue
        called = []
        handle = layer.register_forward_hook(lambda *_, called=called: called.append(1))
        torch.testing.assert_close(own(x, residual, gamma, keep), wanted)
        handle.remove()
        assert called, name


_DINOV3 = partial(transformers.DINOv3ViTConfig, hidden_size=C, intermediate_size=HIDDEN)
# -> (its class, its config, its activation)
HF = {
    "Dinov2SwiGLUFFN": (
        Dinov2SwiGLUFFN,
        transformers.Dinov2Config(hidden_size=C, mlp_ratio=2),
        "silu",
    ),
    "DINOv3ViTGatedMLP": (DINOv3ViTGatedMLP, _DINOV3(hidden_act="silu"), "silu"),
    "DINOv3ViTGatedMLP-gelu": (DINOv3ViTGatedMLP, _DINOV3(hidden_act="gelu"), "gelu"),
}
OURS = {"gate": "gate_proj", "fc1": "up_proj", "fc2": "down_proj"}
PACKED = {"fc1": "weights_in", "fc2": "weights_out"}  # former DINOv2: gate first


@pytest.mark.parametrize("what", HF)
def test_transformers(what):
    host_class, config, activation = HF[what]
    host = _randomised(host_class(config))
    reference, parameters = _functional(host)
    names = PACKED if hasattr(host, "weights_in") else OURS

    def function(x, **given):
        ours = {
            f"{name}_{kind}": given.get(f"{key}_{kind}")
            for name, key in names.items()
            for kind in ("weight", "bias")
        }
        return gated_mlp(x, **ours, activation=activation)

    assert_accurate(function, reference, {"x": rand(2, 9, C), **parameters})
