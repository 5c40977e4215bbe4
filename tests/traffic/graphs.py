"""A model whose forward, or each block's, is the graph that our rules have rewritten.

torch.compile captures it on real tensors without values, our backend rewrites it, and nothing is
run: what is counted later calls the rewritten graph with the module's own parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastvit_kernels.fuse.backend import Options, rewrite
from fastvit_kernels.runtime.compat import FakeTensorMode
from tests.support.private import tree_map_only


class _Captured(Exception):
    """Ends a compile once its graph is there."""


def capture(call: Callable[..., Any], args: Any, kwargs: Any, compiler: Callable[..., Any]) -> Any:
    """What `compiler` makes of the one graph of a call, which is not run."""
    found: list[Any] = []

    def take(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(compiler(gm, inputs))
        raise _Captured

    torch.compiler.reset()
    with suppress(Exception):  # the compile's own wrapper of ours
        torch.compile(call, fullgraph=True, dynamic=False, backend=take)(*args, **kwargs)
    if not found:  # not ours
        torch.compile(call, fullgraph=True, dynamic=False, backend="eager")(*args, **kwargs)
    return found[0]


def rewritten(module: nn.Module, args: Any, kwargs: Any, options: Options) -> Callable[..., Any]:
    """The forward of modules such as this, which comes first, by the rewritten graph; parameters
    are looked up at each call."""

    def compiler(gm: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        sources = [n.meta["grapharg"].source for n in gm.graph.nodes if n.op == "placeholder"]
        names = [s.name if isinstance(s.name, str) else s.name() for s in sources]
        return rewrite(gm, inputs, options), names

    gm, names = capture(module, args, kwargs, compiler)
    places = [compile(name, name, "eval") for name in names]
    signature = inspect.signature(type(module).forward)

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(module, *args, **kwargs).arguments
        known = {"self": module, "args": args, "kwargs": kwargs, **bound}
        out = gm(*(eval(place, {"L": known, "torch": torch}) for place in places))
        return out[0] if isinstance(out, (tuple, list)) and len(out) == 1 else out

    return forward


def whole(model: nn.Module, images: Tensor, options: Options) -> nn.Module:
    """The model, its forward one graph."""
    model.to_empty(device="cpu")
    with torch.autocast("cpu", torch.bfloat16):
        model.forward = partial(rewritten(model, (images,), {}, options), model)
    return model


def by_block(model: Any, images: Tensor, options: Options) -> nn.Module:
    """The model, its blocks, which are alike, by the graph of the first."""
    model.to_empty(device="cpu")
    given: list[Any] = []
    first = model.blocks[0]
    hook = first.register_forward_pre_hook(lambda _, *x: given.append(x), with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16):
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(images)
        hook.remove()
        args, kwargs = tree_map_only(Tensor, _empty, given[0])
        forward = rewritten(first, args, kwargs, options)
    for block in model.blocks:
        block.forward = partial(forward, block)
    return model


def _empty(x: Tensor) -> Tensor:
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    return y.requires_grad_(x.requires_grad)
