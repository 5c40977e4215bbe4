"""Notes a model's calls of the public functions, and replays them on random inputs.

A noted call keeps shapes, strides, dtypes, which inputs want a gradient, and autocast's dtype; its
replay has the op's specification beside it, so that any launch config can be judged at the very
shapes of a step.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention.functions import (
    attention,
    attention_ref,
    qkv_attention,
    qkv_attention_ref,
)
from ..ops.attention.sdpa import scaled_dot_product_attention
from ..ops.layer_norm import layer_norm, layer_norm_and_input, layer_norm_ref
from ..ops.linear import linear, linear_ref
from ..ops.mlp import mlp, mlp_ref
from ..ops.patch_embed.functions import patch_embed, patch_embed_ref
from ..runtime.arguments import autocast_dtype
from ..verify.accuracy import Reference

_PACKAGE = __name__.rsplit(".", 2)[0]  # fastvit_kernels, or what it is imported as

# What each public function computes, by the arguments that bear on it and autocast's dtype.


def _as(x: Any, dtype: torch.dtype | None) -> Any:
    """Cast as the function does, but never the float64 oracle."""
    return x if x is None or dtype is None or x.dtype is torch.float64 else x.to(dtype)


def _layer_norm(x, weight, bias, eps, out_dtype, autocast, **_):
    out_dtype = out_dtype or (x.dtype if autocast is None else torch.float32)
    return _as(layer_norm_ref(x, weight, bias, eps), out_dtype)


def _layer_norm_and_input(x, **arguments):
    return _layer_norm(x, **arguments), x


def _linear(x, weight, bias, activation, residual, layer_scale, row_scale, autocast, **_):
    x, weight, bias = (_as(t, autocast) for t in (x, weight, bias))
    return linear_ref(x, weight, bias, activation, residual, layer_scale, row_scale)


def _mlp(
    x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation, residual, layer_scale, row_scale,
    autocast, **_,
):  # fmt: skip
    x, fc1_weight, fc1_bias = (_as(t, autocast) for t in (x, fc1_weight, fc1_bias))
    fc2_weight, fc2_bias = (_as(t, autocast) for t in (fc2_weight, fc2_bias))
    return mlp_ref(
        x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, activation, residual, layer_scale, row_scale
    )


def _attention(qkv, scale, autocast, **_):
    return attention_ref(_as(qkv, autocast), scale)


def _qkv_attention(x, weight, bias, num_heads, scale, autocast, **_):
    x, weight, bias = (_as(t, autocast) for t in (x, weight, bias))
    return qkv_attention_ref(x, weight, bias, num_heads, scale)


def _sdpa(query, key, value, attn_mask, is_causal, scale, autocast, **_):
    query, key, value = (_as(t, autocast) for t in (query, key, value))
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale
    )  # fmt: skip


def _patch_embed(images, weight, bias, prefix_tokens, pos_embed, autocast, **_):
    images, weight, bias = (_as(t, autocast) for t in (images, weight, bias))
    return patch_embed_ref(images, weight, bias, prefix_tokens, pos_embed)


SPECIFICATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    layer_norm: _layer_norm,
    layer_norm_and_input: _layer_norm_and_input,
    linear: _linear,
    mlp: _mlp,
    attention: _attention,
    qkv_attention: _qkv_attention,
    scaled_dot_product_attention: _sdpa,
    patch_embed: _patch_embed,
}


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def random(self, name: str, generator: torch.Generator) -> Tensor:
        """Normal numbers; a weight keeps the scale of what it multiplies."""
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        numbers = torch.randn(max(extent, 0), generator=generator, device=generator.device)
        if "weight" in name and len(self.shape) > 1:
            numbers *= (numbers.numel() / self.shape[0]) ** -0.5
        return numbers.to(self.dtype).as_strided(self.shape, self.stride)


class Call(NamedTuple):
    """One call of a public function: its arguments by name, tensors as specs."""

    function: Callable[..., Any]
    arguments: tuple[tuple[str, Any], ...]
    autocast: torch.dtype | None

    def __str__(self) -> str:
        shapes = (a.shape for _, a in self.arguments if isinstance(a, TensorSpec))
        return f"{self.function.__name__} {next(shapes, ())}"


def _noted(function: Callable[..., Any], args: Any, kwargs: Any) -> Call | None:
    """The call; None with dropout, whose bits no specification gives, or a mask of booleans."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments.get("dropout_p"):
        return None
    named: list[tuple[str, Any]] = []
    autocast = None
    for name, value in bound.arguments.items():
        if isinstance(value, Tensor):
            if not value.is_floating_point():
                return None
            autocast = autocast or autocast_dtype(value)
            wants = value.requires_grad and torch.is_grad_enabled()
            value = TensorSpec(tuple(value.shape), value.stride(), value.dtype, wants)
        named.append((name, value))
    return Call(function, tuple(named), autocast)


@contextmanager
def noting() -> Iterator[dict[Call, int]]:
    """Inside, calls of the public functions join the yielded dict, with their count.

    The names are replaced in the package's own modules, whose models call them; a call inside
    another is part of that one.
    """
    calls: dict[Call, int] = {}
    depth = 0

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def note(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            call = _noted(function, args, kwargs) if depth == 0 else None
            if call is not None:
                calls[call] = calls.get(call, 0) + 1
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1

        return note

    modules = [m for n, m in sys.modules.items() if f"{n}.".startswith(f"{_PACKAGE}.") and m]
    replaced = [
        (module, name, value)
        for module in modules
        if module is not sys.modules[__name__]
        for name, value in vars(module).items()
        if callable(value) and any(value is function for function in SPECIFICATIONS)
    ]
    for module, name, function in replaced:
        setattr(module, name, wrapped(function))
    try:
        yield calls
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


class Replay:
    """A noted call on random inputs, with what it should give."""

    def __init__(self, call: Call, device: torch.device):
        generator = torch.Generator(device).manual_seed(0)
        self.call, self.device = call, device
        self.inputs: dict[str, Tensor | None] = {}
        self.constants: dict[str, Any] = {}
        for name, argument in call.arguments:
            if isinstance(argument, TensorSpec):
                x = argument.random(name, generator)
                self.inputs[name] = x.requires_grad_(argument.requires_grad)
            else:
                self.constants[name] = argument

    def function(self, **inputs: Tensor | None) -> Any:
        dtype = self.call.autocast
        with nullcontext() if dtype is None else torch.autocast(self.device.type, dtype):
            return self.call.function(**self.constants, **inputs)

    @cached_property
    def reference(self) -> Reference:
        specification = SPECIFICATIONS[self.call.function]
        constants = {**self.constants, "autocast": self.call.autocast}
        return Reference(functools.partial(specification, **constants), self.inputs)

    def run(self) -> None:
        """Forward, and backward where an input wants a gradient."""
        wanted = [x for x in self.inputs.values() if x is not None and x.requires_grad]
        with torch.set_grad_enabled(bool(wanted)):
            result = self.function(**self.inputs)
        if wanted:
            outputs = result if isinstance(result, tuple) else (result,)
            upstream = [torch.randn_like(y) for y in outputs]
            torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
