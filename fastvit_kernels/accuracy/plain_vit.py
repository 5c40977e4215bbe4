"""Our model against itself on PyTorch's ops: what `check` and `train` compare before a run.

On the "torch" backend each op is its specification; that the model is put together as timm's,
torchvision's and transformers' are, the tests of the models say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..models.vit import VisionTransformer
from ..runtime.backend import backend
from .accuracy import Error
from .op import Case, in_precision


def plain_vit(model: VisionTransformer, p: Mapping[str, Tensor], images: Tensor) -> Tensor:
    """Logits (B, num_classes) of `model` by PyTorch's ops, with the weights `p`.

    Args:
        model: its weights are not read.
        p: parameters by their names in model.state_dict(), any floating dtype.
        images: (B, in_chans, height, width).
    """
    with backend("torch"):
        return torch.func.functional_call(model, dict(p), (images,))


def model_case(
    model: VisionTransformer, images: Tensor, autocast: torch.dtype | None = None
) -> Case:
    """The model's logits as a function of the images and of every parameter.

    The oracle is `plain_vit` in float64, the yardstick `plain_vit` in the precision of training.

    Args:
        model: in eval mode, on the device of images; the backend in force runs it.
        images: (B, in_chans, height, width).
        autocast: the dtype of torch.autocast around both, None for none.
    """

    def ours(images: Tensor, **parameters: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (images,))

    def reference(images: Tensor, **parameters: Tensor) -> Tensor:
        return plain_vit(model, parameters, images)

    def make() -> dict[str, Tensor | None]:
        copies = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        return {"images": images, **copies}

    return Case(
        "VisionTransformer",
        in_precision(ours, autocast),
        in_precision(reference, autocast),
        make,
        dtype=autocast,
    )


def agreement(
    model: VisionTransformer, images: Tensor, autocast: torch.dtype | None = None
) -> list[Error]:
    """Errors of the model's logits and of every parameter's gradient on one batch.

    Args: as `model_case`.
    Returns: "logits", then "d<parameter>" for each parameter that is trained.
    """
    case = model_case(model, images, autocast)
    errors = case.reference.errors(case.function)
    return [e if e.name != "out" else replace(e, name="logits") for e in errors]


def worst_error(errors: Sequence[Error]) -> Error:
    """The one nearest its limit, or furthest past it."""
    return max(errors, key=lambda e: e.share)
