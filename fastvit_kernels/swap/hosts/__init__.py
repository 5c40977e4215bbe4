"""The host libraries: for each class that is understood, what gives it a fused forward.

What a module computes is data: `AttentionRoles`, `MlpRoles` and `BlockRoles` name its parts, and
one class for each runs them (attention.py, mlp.py, block.py with branch.py; norms, LayerScale and
DropPath in fused.py). A host file (monai.py, timm.py, torch_nn.py, torchvision.py, transformers.py)
has a table, host class path -> mixin: such a class, or a `row` of it with the roles, and perhaps
methods that differ. A search finds roles of other hosts (recognise.py). special/ has what is
more than its roles.

The swapped class is `(mixin, host class)`, built when the first module of that class is met and
kept; a pickle has the host class and the roles. It keeps the host class's `__name__`, because wrap
policies go by that name. A host library is imported by its own models, never by us.

What the search would find has a row, too, so that a hook on one part calls that part alone, and
tables of RoPE may learn.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
import threading
from functools import update_wrapper
from types import FunctionType
from typing import Any
from zlib import crc32

from .fused import arguments_of, told_by

# top-level package of a module's class -> the file that knows it
HOST_FILES = {n: f"{__name__}.{n}" for n in ("monai", "timm", "torchvision", "transformers")}
HOST_FILES["torch"] = f"{__name__}.torch_nn"

_swapped: dict[Any, type] = {}  # (mixin, host class) -> swapped class
_making = threading.RLock()


def host_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def takes_tokens(parent: type) -> bool:
    """Whether this class turns the grid of its patch convolution into tokens at once, and does not
    ask for its strides."""
    name = parent.__name__
    return {
        "timm": name.startswith("PatchEmbed"),
        "torchvision": name == "VisionTransformer",
        "transformers": name.endswith("Embeddings"),
        __name__.partition(".")[0]: name == "PatchEmbed",
    }.get(parent.__module__.partition(".")[0], False)


def swapped_class(cls: type, of_tokens: bool = False) -> type | None:
    """The swapped subclass of a host class, made at the first call; None where no table has it. A
    child of a class that `takes_tokens` is `of_tokens`."""
    name = HOST_FILES.get(cls.__module__.partition(".")[0])
    if name is None or hasattr(cls, "fused_host"):
        return None
    mixin: Any = importlib.import_module(name).TABLE.get(host_path(cls))
    mixin = (of_tokens and getattr(mixin, "fused_of_tokens", None)) or mixin
    return None if mixin is None else make(mixin, cls)


def host_class(cls: type) -> type | None:
    """The host class under a swapped one; None for a class that was made from a swapped one."""
    return cls.__dict__.get("fused_host")


class SwappedType(type):
    """Class of the swapped classes. They are attributes of this module; their modules say that they
    are of the host's, because torch.fx takes modules of torch.nn as leaves."""

    __module__ = property(lambda cls: __name__)  # type: ignore[assignment]


def _pickled(cls: Any) -> Any:
    """What pickle makes the class of. What was made of a swapped class goes by its own name."""
    if (host := host_class(cls)) is None:
        return cls.__qualname__
    if cls.fused_searched:
        return cls.fused_remade, (host, cls.fused_roles)
    return swapped_class, (host, cls is not swapped_class(host))


copyreg.pickle(SwappedType, _pickled)


def make(mixin: Any, host: Any) -> type:
    """The class (mixin, host)."""
    key = mixin, host
    with _making:
        if key not in _swapped:
            qualname = f"{mixin.__name__}_{host_path(host)}".replace(".", "_")
            if mixin.fused_searched:  # of several roles; the same name in every process
                qualname += f"_{crc32(repr(mixin.fused_roles).encode()):08x}"
            arguments = arguments_of(host.forward)
            # A copy that says it has the arguments of the host's: tracers ask.
            own: Any = mixin.forward
            forward = FunctionType(
                own.__code__, own.__globals__, "forward", own.__defaults__, own.__closure__
            )
            namespace: dict[str, Any] = {
                "__module__": host.__module__,
                "__qualname__": qualname,
                "__doc__": f"{host_path(host)} with the forward of {mixin.__name__}.",
                "fused_host": host,
                "fused_arguments": arguments,
                "forward": update_wrapper(forward, host.forward),
                **told_by(mixin, arguments),
            }
            meta: Any = SwappedType
            if type(host) is not type:
                meta = type("SwappedType", (SwappedType, type(host)), {})
                copyreg.pickle(meta, _pickled)
            made = _swapped[key] = meta(host.__name__, (mixin, host), namespace)
            setattr(sys.modules[__name__], qualname, made)
        return _swapped[key]
