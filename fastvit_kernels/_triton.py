"""`triton` and `tl`, or stand-ins that let the package import where Triton has no wheel."""

from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ModuleNotFoundError:

    class _Absent:
        """Takes any attribute and decorates a kernel into itself; backend.py never launches it."""

        def __getattr__(self, name: str) -> Any:
            return self

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if args else self

    triton: Any = _Absent()
    tl: Any = _Absent()
    HAS_TRITON = False

__all__ = ["HAS_TRITON", "tl", "triton"]
