"""The model of a run: as its settings build it, and the host's own code beside it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models.vit import VisionTransformer
from ...swap.apply import swap_out
from ...verify.plain_vit import plain_vit
from ..console import CommandError
from ..models import fused_model, logits_of
from .finetune import add_lora, freeze, load_into
from .settings import DIGITS_VIT, Settings

NARROW = 192  # embed_dim below this takes _init_narrow


def model_of(
    settings: Settings, num_classes: int, say: Callable[[str], None] | None = None
) -> nn.Module:
    """The model of a run with random weights, drawn from torch's global generator.

    Args:
        say: load --weights too, and give it the line that says what was loaded.
    """
    options: dict[str, Any] = dict(
        img_size=settings.img_size, in_chans=settings.in_chans, num_classes=num_classes
    )
    if settings.drop_path:  # some hosts have none
        options["drop_path_rate"] = settings.drop_path
    if settings.model is not None:
        model = fused_model(settings.model, **options)
    else:
        try:
            model = VisionTransformer(**{**DIGITS_VIT, **options})
        except ValueError as error:
            raise CommandError(str(error)) from error
    if isinstance(model, VisionTransformer) and model.embed_dim < NARROW:
        _init_narrow(model)
    if settings.weights is not None and say is not None:
        say(load_into(model, settings.weights))
    if settings.lora:
        add_lora(model, settings.lora)
    freeze(model, settings.freeze)
    return model


def _init_narrow(model: VisionTransformer) -> None:
    """Larger random weights than timm's 0.02, which suits C = 768: at C = 64 it starves the
    branches and the positions for many epochs."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    if model.pos_embed is not None:
        nn.init.trunc_normal_(model.pos_embed, std=0.3)


def host_of(model: nn.Module) -> nn.Module:
    """A copy of a swapped model that runs its host's own code."""
    host = copy.deepcopy(model)
    swap_out(host)
    return host


def plain_forward(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """Logits of plain PyTorch, from weights and images: `plain_vit`, or the host's own code."""
    if isinstance(model, VisionTransformer):
        return partial(plain_vit, model)
    host = host_of(model)

    def forward(weights: dict[str, Tensor], images: Tensor) -> Tensor:
        host.train(model.training)
        return logits_of(torch.func.functional_call(host, weights, (images,)))

    return forward
