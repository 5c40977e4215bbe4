"""What a launch is for: the multiply-adds of its mathematics, and how long it walks its tokens.

Each rule reads a launch's own arguments, by the names that the kernels give them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Arguments = dict[str, Any]  # by name; tensors as (shape, dtype)


def _attention(products: int) -> Callable[[Arguments], float | None]:
    """`products` of queries and keys for each head: (T_q, T_kv, D)."""

    def rule(a: Arguments) -> float | None:
        if a.get("VARLEN") or a.get("MASK") == "keys":
            return None  # memory says which keys are there
        lse = math.prod(a["lse_ptr"][0])  # B H T_q
        share = 0.5 * (1 + 1 / a["T_kv"]) if a.get("IS_CAUSAL") else 1.0
        return products * lse * a["T_kv"] * a["D"] * share

    return rule


def _fused_dq(a: Arguments) -> float:
    """Of a map of q, (B, T, H, D)."""
    return 5 * math.prod(a["q"].shape) * a["q"].shape[1]


def _in_turns(products: int) -> Callable[[Arguments], float | None]:
    """The same of the Gluon kernels, whose tensor maps (B, T, H, D) have D."""

    def rule(a: Arguments) -> float | None:
        return products * math.prod(a["lse_ptr"][0]) * a["T"] * a["out"].shape[3]

    return rule


USEFUL: dict[str, Callable[[Arguments], float | None]] = {
    "attention_fwd": _attention(2),
    "attention_bwd_one_pass": _attention(5),
    "attention_bwd_dq": _attention(3),
    "attention_bwd_dkdv": _attention(4),
    "attention_bwd_bias": _attention(2),
    "attention_fwd_pingpong": _in_turns(2),
    "attention_bwd_pingpong": _in_turns(5),
    "attention_bwd_fused_dq": _fused_dq,
    "linear_fwd": lambda a: a["M"] * a["N"] * a["K"],
    "mlp_bwd_hidden": lambda a: a["M"] * a["F"] * a["N"],
}


def longest_walk(kernel: str, a: Arguments) -> int | None:
    """Steps of a loop whose end a launch of attention reads from memory; None where it reads none.

    As if every sequence were as long as the longest and a mask of keys showed them all.
    """
    if not a.get("VARLEN") and a.get("MASK") != "keys":
        return None
    axis = "Q" if kernel == "attention_bwd_dkdv" else "KV"
    T, block, tail = a[f"T_{axis.lower()}"], a[f"BLOCK_{axis}"], a[f"TAIL_{axis}"]
    return math.ceil(T / block) if tail == block else T // block


def useful_products(kernel: str, arguments: Arguments) -> float | None:
    """Multiply-adds that a launch of this kernel is for; None where no rule says how many."""
    rule = USEFUL.get(kernel)
    return None if rule is None else rule(arguments)
