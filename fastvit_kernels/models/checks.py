"""What Block and VisionTransformer check of their arguments; their parts check the rest."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Literal, get_args

from ..runtime.arguments import (
    check_eps,
    check_flags,
    check_int,
    check_number,
    check_probability,
)
from .gated_mlp import MLP_LAYERS
from .norms import NORM_LAYERS

Memory = Literal["default", "low"]
GlobalPool = Literal["", "avg", "token"]
PosEmbed = Literal["learn", "none"]


def check_block(
    op: str, mlp_ratio: Any, init_values: Any, norm_eps: Any, memory: Any, mlp_layer: Any,
    scale_mlp_norm: Any, norm_layer: Any, **counts: Any,
) -> None:  # fmt: skip
    """What both take."""
    if memory not in get_args(Memory):
        raise ValueError(f"{op}: memory must be one of {get_args(Memory)}, got {memory!r}")
    check_choice(op, "mlp_layer", mlp_layer, sorted(MLP_LAYERS))
    check_flags(op, scale_mlp_norm=scale_mlp_norm)
    if scale_mlp_norm and mlp_layer == "Mlp":
        raise ValueError(f"{op}: scale_mlp_norm needs a gated mlp_layer, got 'Mlp'")
    check_choice(op, "norm_layer", norm_layer, sorted(NORM_LAYERS))
    check_counts(op, 1, **counts)
    check_number(op, "mlp_ratio", mlp_ratio, sys.float_info.min, wanted="finite and above 0")
    if init_values is not None:
        check_number(op, "init_values", init_values)
    check_eps(op, norm_eps, "norm_eps")


def check_choice(op: str, name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless it is one of the choices: TypeError where it is no string."""
    if not isinstance(value, str) or value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{op}: {name} must be one of {choices}, got {value!r}")


def check_counts(op: str, least: int, **counts: Any) -> None:
    """Raise unless each is an int from `least`."""
    for name, count in counts.items():
        check_int(op, name, count, least=least)


def check_rates(op: str, **rates: Any) -> None:
    """Raise unless each is a probability."""
    for name, rate in rates.items():
        check_probability(op, name, rate)


def check_pool(op: str, global_pool: Any, class_token: bool) -> None:
    if global_pool not in get_args(GlobalPool):
        raise ValueError(f"{op}: global_pool must be '', 'avg' or 'token', got {global_pool!r}")
    if global_pool == "token" and not class_token:
        raise ValueError(f"{op}: global_pool 'token' needs class_token=True")


def check_pos_embed(op: str, pos_embed: Any) -> None:
    if pos_embed not in get_args(PosEmbed):
        raise ValueError(f"{op}: pos_embed must be 'learn' or 'none', got {pos_embed!r}")
