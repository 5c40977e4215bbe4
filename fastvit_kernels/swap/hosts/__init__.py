"""The host libraries: for each class that is understood, the mixin that gives it a fused forward.

A host file has a table, host class path -> mixin. The swapped class is `(mixin, host class)`, built
when the first module of that class is met and kept as an attribute of the host file, where pickle
finds it; it keeps the host class's `__name__`, because wrap policies go by that name.
A host library is imported by its own models, never by us.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

from .fused import Fused

# top-level package of a module's class -> the file that knows it
HOST_FILES = {
    "timm": f"{__name__}.timm",
    "torch": f"{__name__}.torch_nn",
    "torchvision": f"{__name__}.torchvision",
    "transformers": f"{__name__}.transformers",
}

_swapped: dict[type, type] = {}  # host class -> swapped class
_making = threading.RLock()  # two classes of one name could not be pickled


def host_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def mixin_of(cls: type) -> type[Fused] | None:
    """The mixin for exactly this class, None where no table has it."""
    file = HOST_FILES.get(cls.__module__.partition(".")[0])
    return None if file is None else importlib.import_module(file).TABLE.get(host_path(cls))


def swapped_class(cls: type) -> type | None:
    """The swapped subclass of a host class, made at the first call; None for an unknown class."""
    with _making:
        if cls not in _swapped:
            mixin = mixin_of(cls)
            if mixin is None:
                return None
            file = sys.modules[HOST_FILES[cls.__module__.partition(".")[0]]]
            _swapped[cls] = _make(file, mixin, cls)
        return _swapped[cls]


def host_class(cls: type) -> type | None:
    """The host class under a swapped one; None for a class that was made from a swapped one."""
    return cls.__dict__.get("host")


def _qualname(mixin: type, host_name: str) -> str:
    return f"{mixin.__name__}_{host_name}"


def _make(file: ModuleType, mixin: type, host: type) -> type:
    namespace: dict[str, Any] = {
        "__module__": file.__name__,
        "__qualname__": _qualname(mixin, host.__name__),
        "host": host,
        "__doc__": f"{host_path(host)} with the forward of {mixin.__name__}.",
    }
    cls = type(host.__name__, (mixin, host), namespace)
    setattr(file, cls.__qualname__, cls)
    return cls


def unpickled(file: str, table: dict[str, type[Fused]], name: str) -> type:
    """The swapped class called `name`, for a pickle that is read before any swap.

    Raises: AttributeError where the table has no such class.
    """
    for path, mixin in table.items():
        module, _, host_name = path.rpartition(".")
        if name == _qualname(mixin, host_name):
            cls = swapped_class(getattr(importlib.import_module(module), host_name))
            assert cls is not None
            return cls
    raise AttributeError(f"module {file!r} has no attribute {name!r}")
