"""In words, what a launch compiles: equal words, equal machine code."""

from __future__ import annotations

import hashlib
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
        return getattr(x, "cache_key", None) or repr(x)  # a function by its source

    words = [word(given[p.name], p.is_constexpr) for p in function.params]
    return "|".join([function.__qualname__, *words])


def digest_of(function: Any, words: str, target: str) -> str:
    """Of all that decides a kernel's machine code: sources, constants, options, target, triton."""
    all_words = "|".join((function.cache_key, words, target, triton.__version__))
    return hashlib.sha256(all_words.encode()).hexdigest()[:16]
