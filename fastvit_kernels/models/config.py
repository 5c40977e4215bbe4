"""The arguments of Block and VisionTransformer: dataclasses, checked by what each field says.

Names and meaning are timm's; the docstring of VisionTransformer explains the others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Concatenate, Literal, TypeVar

import torch

from ..ops.common.samples import DropPathMode
from .checks import (
    Activation,
    Arguments,
    Count,
    Dropout,
    Eps,
    Flag,
    Number,
    Rate,
    Ratio,
    Scale,
    check_arguments,
    one_of,
    refuse,
)
from .gated_mlp import MLP_LAYERS
from .initial import WeightInit
from .modules import Size
from .norms import LayerNorm, NormLayer
from .rope_tables import RopeType

Config = TypeVar("Config")
Memory = Literal["default", "low"]
MlpName = Annotated[str, one_of(sorted(MLP_LAYERS))]


class _Checked:
    """What both dataclasses do: check their fields, choose the norm."""

    owner: ClassVar[str]
    norm_eps: Eps

    def __post_init__(self) -> None:
        check_arguments(self.owner, type(self), vars(self))

    @property
    def norm(self) -> NormLayer:
        """Makes a norm of a width."""
        return functools.partial(LayerNorm, eps=self.norm_eps)


@dataclass(frozen=True)
class BlockConfig(_Checked):
    owner: ClassVar[str] = "Block"

    dim: Count
    num_heads: Count
    mlp_ratio: Ratio = 4.0
    qkv_bias: Flag = False
    proj_drop: Rate = 0.0
    attn_drop: Dropout = 0.0
    init_values: Scale | None = None
    drop_path: Rate = 0.0
    act_layer: Activation = "gelu"
    norm_eps: Eps = 1e-6
    attn_head_dim: Count | None = None
    memory: Memory = "default"
    mlp_layer: MlpName = "Mlp"
    qk_norm: Flag = False
    key_bias: Flag = True
    num_prefix_tokens: Number = 0
    drop_path_mode: DropPathMode = "mask"


@dataclass(frozen=True)
class ViTConfig(_Checked):
    owner: ClassVar[str] = "VisionTransformer"

    img_size: Size = 224
    patch_size: Size = 16
    in_chans: Count = 3
    num_classes: Number = 1000
    global_pool: Literal["", "avg", "token"] = "token"
    embed_dim: Count = 768
    depth: Number = 12
    num_heads: Count = 12
    mlp_ratio: Ratio = 4.0
    qkv_bias: Flag = True
    init_values: Scale | None = None
    class_token: Flag = True
    no_embed_class: Flag = False
    reg_tokens: Number = 0
    pre_norm: Flag = False
    fc_norm: Flag | None = None
    pool_include_prefix: Flag = False
    drop_rate: Rate = 0.0
    pos_drop_rate: Rate = 0.0
    proj_drop_rate: Rate = 0.0
    attn_drop_rate: Rate = 0.0
    drop_path_rate: Rate = 0.0
    act_layer: Activation = "gelu"
    norm_eps: Eps = 1e-6
    attn_head_dim: Count | None = None
    representation_size: Number | None = None
    memory: Memory = "default"
    mlp_layer: MlpName = "Mlp"
    qk_norm: Flag = False
    key_bias: Flag = True
    pos_embed: Literal["learn", "none"] = "learn"
    rope_type: RopeType = ""
    dynamic_img_size: Flag = False
    drop_path: DropPathMode = "mask"
    patch_drop_rate: Dropout = 0.0
    mask_token: Flag = False
    weight_init: WeightInit = ""
    fix_init: Flag = False
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_pool == "token" and not self.class_token:
            raise ValueError(f"{self.owner}: global_pool 'token' needs class_token=True")

    @property
    def num_prefix_tokens(self) -> int:
        return int(self.class_token) + self.reg_tokens

    def block(self, i: int) -> dict[str, Any]:
        """The arguments of block i: what has the same name here, and the rest."""
        names = {f.name for f in fields(BlockConfig)} & {f.name for f in fields(self)}
        return {name: getattr(self, name) for name in names} | dict(
            dim=self.embed_dim,
            proj_drop=self.proj_drop_rate,
            attn_drop=self.attn_drop_rate,
            num_prefix_tokens=self.num_prefix_tokens,
            drop_path=self.drop_path_rate * i / max(self.depth - 1, 1),
            drop_path_mode=self.drop_path,
        )


def configured_by(
    config: Callable[Arguments, Config],
) -> Callable[[Callable[[Any, Config], None]], Callable[Concatenate[Any, Arguments], None]]:
    """For an __init__ that reads a dataclass: callers pass its fields as arguments.

    Raises: TypeError for other arguments; for those that timm alone has, with what to do instead.
    """
    signature = inspect.signature(config)

    def decorate(init: Callable[[Any, Config], None]) -> Any:
        owner = init.__qualname__.partition(".")[0]

        @functools.wraps(init)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            foreign = {name: kwargs.pop(name) for name in kwargs.keys() - signature.parameters}
            refuse(owner, foreign, signature.parameters)
            init(self, config(*args, **kwargs))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        __init__.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [own, *signature.parameters.values()]
        )
        return __init__

    return decorate
