"""What options= of torch.compile and the keywords of swap_in choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Compiler = Literal["inductor", "eager"]
Memory = Literal["default", "low"]
DropPath = Literal["mask", "skip"]


@dataclass
class Options:
    """What `options=` of torch.compile says: ours, and the rest, which is Inductor's."""

    compiler: Compiler = "inductor"
    memory: Memory = "default"
    drop_path: DropPath = "mask"
    rest: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, options: dict[str, Any] | None) -> Options:
        rest = dict(options or {})
        known = dict(compiler=Compiler, memory=Memory, drop_path=DropPath)
        ours = {name: rest.pop(name) for name in known if name in rest}
        for name, value in ours.items():
            allowed = get_args(known[name])
            if value not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {value!r}")
        read = cls(**ours, rest=rest)
        if read.memory == "low" and read.compiler == "inductor":
            raise ValueError(
                "memory='low' is for compiler='eager': what Inductor keeps for the backward is set "
                "by torch._functorch.config.activation_memory_budget"
            )
        return read
