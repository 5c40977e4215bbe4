"""The host libraries: for each class that is understood, what gives it a fused forward.

What a module computes is data: `AttentionRoles`, `MlpRoles` and `BlockRoles` name its parts, and
one class for each runs them (attention.py, mlp.py, block.py with branch.py; norms, LayerScale and
DropPath in fused.py). A host file (timm.py, torch_nn.py, torchvision.py, transformers.py) has a
table, host class path -> such a class, or a row: the class with the roles, and perhaps methods that
differ. A search finds roles of other hosts (searched.py). special/ has what is more than its roles.

The swapped class is `(mixin, host class)`, built when the first module of that class is met and
kept as an attribute of the host file, where pickle finds it; it keeps the host class's `__name__`,
because wrap policies go by that name. A host library is imported by its own models, never by us.

What the search would find has a row, too, so that a hook on one part calls that part alone, and
tables of RoPE may learn.
"""

from __future__ import annotations

import importlib
import sys
import threading
from functools import update_wrapper
from types import FunctionType, ModuleType
from typing import Any

from .fused import Entry, Row, arguments_of, told_by

# top-level package of a module's class -> the file that knows it
HOST_FILES = {
    "timm": f"{__name__}.timm",
    "torch": f"{__name__}.torch_nn",
    "torchvision": f"{__name__}.torchvision",
    "transformers": f"{__name__}.transformers",
}

_swapped: dict[Any, type] = {}  # (mixin, host class, attributes) -> swapped class
_making = threading.RLock()  # two classes of one name could not be pickled


def host_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _as_row(known: Entry) -> Row:
    return known if isinstance(known, Row) else Row(known, {})


def _row_of(cls: type, parent: type | None) -> Row | None:
    """The row for exactly this class, None where no table has it.

    Args:
        parent: the class of the module that it is a child of; a few mixins depend on it.
    """
    name = HOST_FILES.get(cls.__module__.partition(".")[0])
    if name is None or hasattr(cls, "fused_host"):
        return None
    file = importlib.import_module(name)
    path = host_path(cls)
    known = file.TABLE.get(path)
    if parent is not None and takes_tokens(parent):
        known = vars(file).get("OF_TOKENS", {}).get(path, known)
    return None if known is None else _as_row(known)


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


def swapped_class(cls: type, parent: type | None = None) -> type | None:
    """The swapped subclass of a host class, made at the first call; None for an unknown class."""
    found = _row_of(cls, parent)
    return None if found is None else _made(cls, found)


def _made(host: type, row: Row) -> type:
    file = sys.modules[HOST_FILES[host.__module__.partition(".")[0]]]
    return make(file, row.mixin, host, _qualname(row.mixin, host_path(host)), row.attributes)


def host_class(cls: type) -> type | None:
    """The host class under a swapped one; None for a class that was made from a swapped one."""
    return cls.__dict__.get("fused_host")


def _qualname(mixin: type, path: str) -> str:
    return f"{mixin.__name__}_{path.replace('.', '_')}"


class SwappedType(type):
    """Class of the swapped classes. The class itself is where pickle finds it; its modules say that
    they are of the host's, because torch.fx takes modules of torch.nn as leaves."""

    __module__ = property(lambda cls: cls.fused_home)  # type: ignore[assignment]


def make(file: ModuleType, mixin: type, host: type, qualname: str, more: dict[str, Any]) -> type:
    """The class (mixin, host), kept in `file` under `qualname`, with `more` attributes."""
    key = mixin, host, tuple(more.items())
    with _making:
        if key not in _swapped:
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
                "fused_home": file.__name__,
                "fused_host": host,
                "fused_arguments": arguments,
                "forward": update_wrapper(forward, host.forward),
                **told_by(more.get("fused_roles", mixin.fused_roles), mixin, arguments),
                **more,
            }
            meta: Any = SwappedType
            if type(host) is not type:
                meta = type("SwappedType", (SwappedType, type(host)), {})
            _swapped[key] = meta(host.__name__, (mixin, host), namespace)
            setattr(file, qualname, _swapped[key])
        return _swapped[key]


def unpickled(file: str, table: dict[str, Entry], name: str) -> type:
    """The swapped class called `name`, for a pickle that is read before any swap.

    Raises: AttributeError where the table has no such class.
    """
    others = vars(sys.modules[file]).get("OF_TOKENS", {})
    for path, known in (*table.items(), *others.items()):
        row = _as_row(known)
        if name == _qualname(row.mixin, path):
            module, _, host_name = path.rpartition(".")
            return _made(getattr(importlib.import_module(module), host_name), row)
    raise AttributeError(f"module {file!r} has no attribute {name!r}")
