"""Registers launchers as torch operators, so that torch.compile, export and FakeTensor see them.

`define` + `impl` + `register_fake` dispatch in 6.3 us where `torch.library.custom_op` takes 10.7
(figures of attention-gym #302, not measured here). Gradients live in the `autograd.Function` around
the operators, which every compiler traces through; dispatch.py says when a call goes past them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("fastvit_kernels", "DEF")

LAUNCHERS: dict[str, Callable[..., Any]] = {}  # operator name -> launcher; aot.py traces them


def operator(schema: str, *, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Any]:
    """Register the decorated launcher as `torch.ops.fastvit_kernels.<name>`.

    Args:
        schema: arguments and returns without the name, "(Tensor x, float eps) -> (Tensor, Tensor)".
        fake: same arguments, returns uninitialised outputs; the launcher calls it to allocate.
    Returns: a decorator whose result is the operator, called like the launcher.
    """

    def register(launcher: Callable[..., Any]) -> Any:
        name = launcher.__name__
        _library.define(name + schema)
        _library.impl(name, launcher, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fastvit_kernels::{name}", fake, lib=_library)
        LAUNCHERS[name] = launcher
        return getattr(torch.ops.fastvit_kernels, name).default

    return register
