"""What options= of torch.compile and the keywords of swap_in choose."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, get_args

Compiler = Literal["inductor", "eager"]
Memory = Literal["default", "low"]
DropPath = Literal["mask", "skip"]


@dataclass(frozen=True)
class Settings:
    """How the graphs of a swapped module are made.

    Attributes:
        partial: whether modules inside were left out by only= or skip=, so that a graph around them
            must stay the host's.
        told: the warnings that were given, as (class, text).
        entries: what torch.compile was given of blocks, by their forms.
    """

    compiler: Compiler = "eager"
    mode: str | None = None
    memory: Memory = "default"
    drop_path: DropPath = "mask"
    partial: bool = False
    told: set[tuple[str, str]] = field(default_factory=set, compare=False, repr=False)
    entries: weakref.WeakValueDictionary[int | None, Any] = field(
        default_factory=weakref.WeakValueDictionary, compare=False, repr=False
    )

    def __getstate__(self) -> dict[str, Any]:
        return {name: x for name, x in vars(self).items() if name != "entries"}

    def __setstate__(self, state: dict[str, Any]) -> None:  # copies make graphs of their own
        vars(self).update(state, entries=weakref.WeakValueDictionary())

    def options(self) -> dict[str, Any]:
        return {"compiler": self.compiler, "memory": self.memory, "drop_path": self.drop_path}


@dataclass
class Options:
    """What `options=` of torch.compile says: ours, and the rest, which is Inductor's."""

    compiler: Compiler = "inductor"
    memory: Memory = "default"
    drop_path: DropPath = "mask"
    rest: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(
        cls, options: dict[str, Any] | None, mode: str | None = None, call: str = ""
    ) -> Options:
        """Raises: ValueError for what is neither ours nor Inductor's; `call` begins its text."""
        rest = dict(options or {})
        known = dict(compiler=Compiler, memory=Memory, drop_path=DropPath)
        ours = {name: rest.pop(name) for name in known if name in rest}
        for name, value in ours.items():
            allowed = get_args(known[name])
            if value not in allowed:
                raise ValueError(f"{call}{name} must be one of {allowed}, got {value!r}")
        read = cls(**ours, rest=rest)
        if read.memory == "low" and read.compiler == "inductor":
            raise ValueError(
                f"{call}memory='low' is for compiler='eager': what Inductor keeps for the backward "
                "is set by torch._functorch.config.activation_memory_budget"
            )
        if mode is not None and read.compiler != "inductor":
            raise ValueError(f"{call}mode={mode!r} is Inductor's: give compiler='inductor' too")
        if mode is not None or rest:
            _check_inductor(mode or "default", rest, [*known], call)
        return read


def _check_inductor(mode: str, rest: dict[str, Any], ours: list[str], call: str) -> None:
    """As Inductor would, but before the first call, and in one line."""
    import torch._inductor as inductor

    modes = tuple(inductor.list_mode_options())
    if mode not in modes:
        raise ValueError(f"{call}mode must be one of {modes}, got {mode!r}")
    theirs = inductor.list_options()
    for name in rest:
        if name not in theirs:
            near = get_close_matches(name, [*ours, *theirs], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"{call}option {name!r} is neither ours ({', '.join(ours)}) nor Inductor's{hint}"
            )
