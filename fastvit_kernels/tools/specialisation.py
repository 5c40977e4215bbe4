"""In words, what a launch compiles: equal words, equal machine code."""

from __future__ import annotations

import hashlib
from functools import cache
from types import ModuleType
from typing import Any

from torch import Tensor

from ..runtime.triton import triton


def specialisation(function: Any, given: dict[str, Any]) -> str:
    """Equal where Triton compiles once: values of constants, what it asks of the others."""

    def word(x: Any, is_constexpr: bool) -> str:
        if isinstance(x, Tensor):
            return f"{x.dtype} {int(x.storage_offset()) * x.element_size() % 16 == 0}"
        if isinstance(x, int) and not is_constexpr:
            return f"{x == 1} {x % 16 == 0} {x >> 31 != 0}"
        if type(x) is tuple:
            return f"({', '.join(word(each, is_constexpr) for each in x)})"
        return sources(x) if hasattr(x, "src") else repr(x)

    words = [word(given[p.name], p.is_constexpr) for p in function.params]
    return "|".join([function.__qualname__, *words])


@cache
def sources(function: Any) -> str:
    """The texts of a Triton function and of all that it calls, with the values that they read.

    Its `cache_key` has its line in the file besides, which moves with every edit above it.
    """
    constant, found = triton.language.constexpr, {function: function.src}
    for caller in (waiting := [function]):  # grows as we go
        known = caller.fn.__globals__
        for name in filter(known.__contains__, caller.fn.__code__.co_names):
            value = known[name]
            if hasattr(value, "src") and value not in found:
                found[value] = value.src
                waiting.append(value)
            elif isinstance(value, constant) or not (callable(value) or type(value) is ModuleType):
                found[name] = f"{name}={value!r}"
    return "\n".join(map(str, found.values()))


def digest_of(function: Any, words: str, target: str) -> str:
    """Of all that decides a kernel's machine code: sources, constants, options, target, triton."""
    all_words = "|".join((sources(function), words, target, triton.__version__))
    return hashlib.sha256(all_words.encode()).hexdigest()[:16]
