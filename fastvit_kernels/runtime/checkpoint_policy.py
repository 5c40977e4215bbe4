"""What a selective checkpoint keeps of its forward, by what running it again would cost.

A policy sees operators, torch's and ours, by their names: so it knows other releases' and other
packages too. Counts: docs/swap.md.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any, Literal, Protocol

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Kind = Literal["attention", "product", "sum"]

KEPT: dict[str, frozenset[Kind]] = {
    "attention": frozenset({"attention"}),
    "matmul": frozenset({"attention", "product"}),
}
_BACKWARD = re.compile("backward|bwd")
_ATTENTION = re.compile("attention|attn|sdpa")
_PRODUCT = re.compile("::(mm|addmm|_scaled_mm|linear|linear_fwd|qkv_projection_fwd)(\\.|$)")


def kind_of(name: str, args: tuple[Any, ...] = ()) -> Kind | None:
    """Why the outputs of an operator, such as "aten::mm", may be worth their memory, or None.

    "attention": (T, C) for T^2 products. "product": of matrices; batched ones are scores, (T, T).
    "sum": of the residual and the hidden layer's product, which the next block keeps as its input.
    Not worth it: a product that comes with its activation. The operator gives both, (T, F) each,
    more than an MLP keeps without a checkpoint.
    """
    if _BACKWARD.search(name):
        return None
    if _ATTENTION.search(name):
        return "attention"
    if not _PRODUCT.search(name):
        return None
    if "linear_fwd" in name:
        _, weight, _, residual, _, _, activation, *_ = args
        if residual is not None and weight.shape[0] < weight.shape[1]:
            return "sum"
        return None if activation else "product"
    return "product"


class Policy(Protocol):
    """What `checkpoint_policy` gives."""

    context_fn: Callable[[], Any]

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy: ...


def checkpoint_policy(name: Literal["attention", "matmul"]) -> Policy:
    """Selective activation checkpointing: what `torch.utils.checkpoint` saves.

        policy = fk.checkpoint_policy("attention")
        x = checkpoint(block, x, use_reentrant=False, context_fn=policy.context_fn)

    Args:
        name: "attention" saves attention's output and lse, so that its forward runs once.
            "matmul" also saves the outputs of matmuls. The rest is recomputed, and so is our fc1,
            whose operator returns both the activation and its input.
    Returns: a policy for `create_selective_checkpoint_contexts`, for eager and compiled models,
        swapped or not. Pass its `.context_fn` to `checkpoint`, to transformers'
        `gradient_checkpointing_enable` or to torch.distributed's checkpoint_wrapper.
    Raises: ValueError for another name. Warns once, at the second checkpoint, if the first ran no
        operator that is saved.
    """
    if name not in KEPT:
        raise ValueError(f"checkpoint_policy: name must be one of {sorted(KEPT)}, got {name!r}")
    kinds = KEPT[name]
    ran: list[bool] = []  # of each checkpoint until one keeps something: whether it does

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kind = kind_of(op.name(), args)
        if ran and kind in kinds:
            ran[0] = True
        keep = kind in kinds or kind == "sum"
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def context_fn() -> Any:
        if ran == [False]:
            warnings.warn(
                f"checkpoint_policy({name!r}): the first checkpoint ran no operator of "
                f"{' or '.join(sorted(kinds))}, so all of it is computed again",
                stacklevel=2,
            )
            ran[0] = True
        ran[:] = ran or [False]
        return create_selective_checkpoint_contexts(policy)

    policy.context_fn = context_fn  # type: ignore[attr-defined]
    return policy  # type: ignore[return-value]
