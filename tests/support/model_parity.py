"""A model beside the host whose weights it has: outputs and every gradient, by the 2x rule."""

from __future__ import annotations

import copy
from typing import Any

import torch
from calls import Calls
from numerics import DEVICE, rand
from torch import nn

from fastvit_kernels import backend
from fastvit_kernels.accuracy.accuracy import measure_all
from fastvit_kernels.weights.names import to_timm

bf16, fp32 = torch.bfloat16, torch.float32
FAR = 8.0  # times its limit: an error that no luck explains

# What a whole model must launch, a backward of each at least.
KERNELS = ("patch_embed", "norm", "attention", "linear", "mlp")


def randomise(model: nn.Module) -> Any:
    """No parameter at a value that a constant could hide, activations of order 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if p.ndim == 1:
                p.add_(0.2 * noise)
            elif "token" in name or "pos" in name or "cls" in name:
                p.copy_(noise)
            else:
                p.copy_(noise * p[0].numel() ** -0.5)
    return model.to(DEVICE).eval()


def random_images(batch=2, channels=3, height=32, width=None):
    return rand(batch, channels, height, width or height, grad=False)


def _logits(output) -> torch.Tensor:
    return getattr(output, "logits", output)  # transformers wraps them


def _run(model, images, upstream, stages, names) -> dict[str, Any]:
    """Outputs of the stages, their gradients, and those of the images and every parameter."""
    tensors, hooks = {}, []
    for stage, path in stages.items():

        def keep(_module, _inputs, y, stage=stage):
            y.retain_grad()
            tensors[stage] = y

        hooks.append(model.get_submodule(path).register_forward_hook(keep))
    model.zero_grad()
    images = images.detach().clone().requires_grad_()
    logits = _logits(model(images))
    logits.backward(upstream.to(logits.dtype))
    for hook in hooks:
        hook.remove()
    result = {stage: y.detach() for stage, y in tensors.items()}
    result |= {f"d{stage}": y.grad for stage, y in tensors.items()}
    grads = names({name: p.grad for name, p in model.named_parameters()})
    result |= {f"d{name}": grad for name, grad in grads.items()}
    return {"logits": logits.detach(), "dimages": images.grad, **result}


def assert_parity(
    model, host, images, *, stages, host_stages, names=lambda grads: grads, autocast=None
):
    """The 2x rule for logits, stages, and all gradients; the host in float64 is the oracle.

    An excess below FAR counts if three sets of images reproduce it: in a whole model a small bias
    collects the rounding of every layer above, and PyTorch's own error there may be small by luck.
    """
    oracle_host = copy.deepcopy(host).double()

    def errors_of(images):
        upstream = torch.randn(_logits(host(images)).shape).to(DEVICE)
        oracle = _run(oracle_host, images.double(), upstream, host_stages, names)

        def yardstick():
            return _run(host, images, upstream, host_stages, names)

        with torch.autocast(DEVICE.type, dtype=autocast or bf16, enabled=autocast is not None):
            with backend("triton"), Calls() as calls:
                actual = _run(model, images, upstream, stages, lambda grads: grads)
            errors = measure_all(actual, yardstick, oracle, autocast or fp32)
        backwards = [name for call in calls.ours if "_bwd" in (name := call[0].name())]
        assert all(any(of in name for name in backwards) for of in KERNELS), backwards
        assert actual.keys() == oracle.keys()
        assert len(errors) > 2 * len(stages) + 2
        return {e.name: e for e in errors if not e.passed}

    wrong = errors_of(images)
    for axes in (-1,), (-2, -1):
        if wrong and all(e.share < FAR for e in wrong.values()):
            again = errors_of(images.flip(axes))
            wrong = {name: e for name, e in wrong.items() if name in again}
    assert not wrong, "the 2x rule is broken:\n  " + "\n  ".join(map(str, wrong.values()))


def stages_of(depth=2):
    blocks = {f"block{i}": f"blocks.{i}" for i in range(depth)}
    return {"tokens": "pos_drop", **blocks, "norm": "norm"}


def timm_names(grads):
    return to_timm(grads)[1]
