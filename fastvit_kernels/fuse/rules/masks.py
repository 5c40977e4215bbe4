"""Masks that say nothing, and what softmax gives where a row is hidden whole."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..graph import is_pure
from ..views import val

MOST_ELEMENTS = 1 << 22


def shows_all(mask: Node) -> bool:
    """Whether a boolean mask that no input makes is True everywhere: transformers' arange(T) >= 0.

    It is evaluated once, here.
    """
    if val(mask).dtype != torch.bool:
        return False
    todo, made = [mask], {}
    for n in todo:
        if len(todo) > 60 or not is_pure(n) or not is_small(n):
            return False
        todo += n.all_input_nodes
    order = {n: i for i, n in enumerate(mask.graph.nodes)}
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        for n in sorted(set(todo), key=order.__getitem__):
            args, kwargs = torch.fx.map_arg((n.args, n.kwargs), made.__getitem__)
            kwargs = {**kwargs, "device": "cpu"} if "device" in kwargs else kwargs
            made[n] = n.target(*args, **kwargs)  # type: ignore[operator]
    return bool(made[mask].all())


def is_small(n: Node) -> bool:
    x = val(n)
    if not isinstance(x, torch.Tensor):
        return isinstance(x, (int, float, bool))
    return all(isinstance(s, int) for s in x.shape) and x.numel() <= MOST_ELEMENTS
