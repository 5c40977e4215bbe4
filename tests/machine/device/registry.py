"""Which instructions the machine knows: each full name, with its modifiers, and what makes it run.

A name that no file registers is an error when the program is read, so no modifier is ever passed
over. __init__.py says how one is added.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .execution import Group
    from .program import Op

Run = Callable[["Group"], Any]
Make = Callable[["Op"], Run]

INSTRUCTIONS: dict[str, Make] = {}  # by full name
ENDS_BLOCK: set[str] = set()  # those that may branch, stop or wait: the last of their block

_CHOICE = re.compile(r"\{([^{}]*)\}|\[([^\[\]]*)\]")


def expand(pattern: str) -> Iterator[str]:
    """Every name that a pattern stands for."""
    match = _CHOICE.search(pattern)
    if match is None:
        yield pattern
        return
    for choice in match[1].split(",") if match[1] is not None else ("", match[2]):
        yield from expand(pattern[: match.start()] + choice + pattern[match.end() :])


def instruction(*patterns: str, ends_block: bool = False) -> Callable[[Make], Make]:
    """Registers what makes these instructions run. With `ends_block` that returns where its group
    goes on: the number of a block, END, or WAIT (execution.py); None for the next block."""

    def register(make: Make) -> Make:
        for pattern in patterns:
            for name in expand(pattern):
                assert name not in INSTRUCTIONS, f"{name} is registered twice"
                INSTRUCTIONS[name] = make
                if ends_block:
                    ENDS_BLOCK.add(name)
        return make

    return register
