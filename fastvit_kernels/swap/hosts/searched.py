"""Hosts that no table knows: the fused forwards of attentions, MLPs and residual blocks whose parts
are found by structure.

`fused_roles` says which part of the host is what. The swapped class is made for one host class and
one set of roles, and its name spells both out, so that a pickle is read without a search.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from .. import hosts
from .attention import Attention, AttentionRoles, attention_facts
from .block import Block, BlockRoles
from .branch import Step as Step
from .fused import DropPath, LayerNorm, LayerScale, NormRoles, PathRoles, RmsNorm, ScaleRoles
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
    """The swapped class of a host class whose parts have these roles."""
    mixin = MIXINS[type(roles)]
    spelled = json.dumps([hosts.host_path(host), _spelled(roles)]).encode().hex()
    more: dict[str, Any] = {"fused_searched": True, "fused_roles": roles}
    more["fused_unread"] = frozenset(getattr(roles, "unread", ()))
    if mixin in (Attention, Block):
        more["fused_facts"] = attention_facts
    if mixin is Block:
        more["fused_axes"] = (3, 4)
    return hosts.make(sys.modules[__name__], mixin, host, f"{mixin.__name__}_{spelled}", more)


def _spelled(value: Any) -> Any:
    """Roles as JSON has them: a NamedTuple with its name before its values."""
    if isinstance(value, tuple):
        named = [type(value).__name__] if hasattr(value, "_fields") else [""]
        return named + [_spelled(v) for v in value]
    return value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        values = tuple(map(_read, value[1:]))
        return globals()[value[0]](*values) if value[0] else values
    return value


def __getattr__(name: str) -> type:
    """A class by the name that recognised_class gave it, for a pickle in another process."""
    if name.partition("_")[0] not in {mixin.__name__ for mixin in MIXINS.values()}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, roles = json.loads(bytes.fromhex(name.partition("_")[2]))
    module, _, host = path.rpartition(".")
    return recognised_class(getattr(importlib.import_module(module), host), _read(roles))
