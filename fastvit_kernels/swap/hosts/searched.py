"""Hosts that no table knows: the fused forwards of attentions, MLPs and residual blocks whose parts
are found by structure.

`fused_roles` says which part of the host is what. The swapped class is made for one host class and
one set of roles, and its name spells both out, so that a pickle is read without a search.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from .. import hosts
from .attention import Attention, AttentionRoles, attention_facts
from .block import Block, BlockRoles
from .branch import Step as Step
from .fused import DropPath, LayerNorm, LayerScale, NormRoles, PathRoles, RmsNorm, ScaleRoles, row
from .mlp import Mlp, MlpRoles
from .roles import LinearRoles, MaskedLinear


class RmsRoles(NormRoles):
    """The same of an RMSNorm."""


# What computes each kind of roles.
MIXINS: dict[type, Any] = {
    AttentionRoles: Attention, BlockRoles: Block, LinearRoles: MaskedLinear, MlpRoles: Mlp,
    NormRoles: LayerNorm, PathRoles: DropPath, RmsRoles: RmsNorm, ScaleRoles: LayerScale,
}  # fmt: skip


def recognised_class(host: type, roles: Any) -> Any:
    """The swapped class of a host class whose parts have these roles, or roles as JSON has them."""
    roles = _read(roles)
    spelled = json.dumps([hosts.host_path(host), _spelled(roles)]).encode().hex()
    mixin = _mixin_with(roles)
    return hosts.make(mixin, host, f"{mixin.__name__}_{spelled}")


@lru_cache(None, typed=True)  # roles of another kind may be equal
def _mixin_with(roles: Any) -> Any:
    mixin = MIXINS[type(roles)]
    more: dict[str, Any] = {"unread": frozenset(getattr(roles, "unread", ()))}
    if mixin in (Attention, Block):
        more["facts"] = attention_facts
    if mixin is Block:
        more["axes"] = (3, 4)
    return row(mixin, searched=True, roles=roles, **more)


def _spelled(value: Any) -> Any:
    """Roles as JSON has them: a NamedTuple with its name before its values."""
    if isinstance(value, tuple):
        named = [type(value).__name__] if hasattr(value, "_fields") else [""]
        return named + [_spelled(v) for v in value]
    return value


def _read(value: Any) -> Any:
    """The roles again."""
    if isinstance(value, list):
        values = tuple(map(_read, value[1:]))
        return globals()[value[0]](*values) if value[0] else values
    return value
