"""GluMlp and SwiGLU beside timm's, whose weights they take: output and all gradients."""

import pytest
import timm.layers
import torch
from model_parity import randomise
from numerics import DEVICE, assert_accurate, rand
from torch import nn

from fastvit_kernels import GluMlp, SwiGLU, backend

C, HIDDEN = 48, 42
# what -> timm's class and arguments, ours
TIMM = {
    "GluMlp": (timm.layers.GluMlp, dict(act_layer=nn.GELU), GluMlp, dict(act_layer="gelu")),
    "SwiGLUPacked": (
        timm.layers.SwiGLUPacked,
        dict(bias=False),
        GluMlp,
        dict(gate_last=False, bias=False),
    ),
    "SwiGLU": (timm.layers.SwiGLU, dict(align_to=8), SwiGLU, dict(align_to=8)),  # 42 becomes 48
}


@pytest.mark.parametrize("what", TIMM)
def test_timm_through_the_kernels(what):
    host_class, host_arguments, own_class, own_arguments = TIMM[what]
    host = randomise(host_class(C, HIDDEN, **host_arguments))
    own = own_class(C, HIDDEN, **own_arguments).to(DEVICE)
    own.load_state_dict(host.state_dict())
    names = {name.replace(".", "_"): name for name, _ in host.named_parameters()}
    weights = {n: host.get_parameter(path).detach().clone() for n, path in names.items()}

    def called(module):
        def call(x, **parameters):
            given = {names[name]: p for name, p in parameters.items()}
            return torch.func.functional_call(module, given, (x,))

        return call

    with backend("triton"):
        own(rand(2, 9, C))  # raises where the kernels do not run
        inputs = {"x": rand(2, 9, C), **{n: p.requires_grad_() for n, p in weights.items()}}
        assert_accurate(called(own), called(host), inputs)
