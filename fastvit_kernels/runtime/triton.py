"""`triton` and `tl`, or stand-ins that let the package import where Triton has no wheel.

For a type checker their attributes are Any: a kernel is Python syntax for another compiler, and
`kernel[grid](...)` is no call that its signature describes.
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

if TYPE_CHECKING:

    class _AnyAttribute(type):
        def __getattr__(cls, name: str) -> Any: ...

    class tl(metaclass=_AnyAttribute):
        constexpr: TypeAlias = Any  # a class, so that `BLOCK_C: tl.constexpr` is an annotation

    triton: Any
    HAS_TRITON: bool
    VERSION: tuple[int, ...]  # (3, 6, 0); () where there is none
    driver: Any
    _RUN: Any
else:
    from .compat import TRITON, check_version, version_of

    try:
        import triton
        import triton.language as tl
        from triton.runtime import JITFunction, driver

        HAS_TRITON = True
        VERSION = version_of(triton.__version__)
        check_version("triton", triton.__version__, TRITON)
        is_read = VERSION < (3, 10) and not torch.version.hip  # AMD's kernels ask for sizes, too
        _RUN = (
            JITFunction.run if is_read else None
        )  # where `launch`'s kinds are known to be fine enough
    except ModuleNotFoundError:

        class _Absent:
            """Takes any attribute and decorates a kernel into itself; backend.py never launches."""

            def __getattr__(self, name: str) -> Any:
                return self

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return args[0] if args else self

        triton = tl = driver = _Absent()
        HAS_TRITON, VERSION, _RUN = False, (), None


# For triton.jit: nothing is aligned by what a batch decides, and no other one compiles anew.
_COUNTS = "B M num_rows rows_per_split num_heads total num_kept num_kept_of_d num_shared num_whole"
_COUNTS += " shared_per_split blocks_in_parts"
ANY_BATCH: Any = {"do_not_specialize_on_alignment": _COUNTS.split()}


def constant(value: object) -> Any:
    """A constant that kernels may read as a global."""
    return tl.constexpr(value)  # pyright: ignore[reportCallIssue]


@functools.cache
def has_gluon() -> bool:
    """Whether this Triton has what gluon.py asks for, and FASTVIT_KERNELS_GLUON is not 0."""
    if not HAS_TRITON or os.environ.get("FASTVIT_KERNELS_GLUON") == "0":
        return False
    try:
        importlib.import_module(".gluon", __package__)  # at the first choice on a Hopper GPU
    except (ImportError, AttributeError) as error:
        warnings.warn(f"no Gluon kernels with triton {triton.__version__}: {error}", stacklevel=2)
        return False
    return True


_kernels: dict[int, Any] = {}  # all that were bound: Triton hashes a kernel by its source


def bind_launch(
    kernel: Any, grid: tuple[int, ...], *sizes: Any, **options: Any
) -> Callable[..., None]:
    """`kernel[grid]` with its last arguments bound, to be called with those before them; the same
    one for the same arguments.

    Triton launches on the current device: another one's tensors are launched under a guard. The
    first of the arguments, a kernel's first output or the map of it, says which.
    The constexprs, a kernel's last parameters, go by position, and a kernel that Triton has picked
    for arguments of the same kinds is launched as it is.

    Args:
        sizes: the arguments just before the constexprs.
        options: all constexprs by name, num_warps and the like.
    """
    _kernels[id(kernel)] = kernel
    return _bound(id(kernel), grid, *sizes, **options)


@functools.lru_cache(maxsize=4096, typed=True)
def _bound(number: int, grid: tuple[int, ...], *sizes: Any, **options: Any) -> Callable[..., None]:
    kernel = _kernels[number]
    constexprs = [name for name in kernel.arg_names if name in options]
    assert constexprs == kernel.arg_names[-len(constexprs) :]
    last = (*sizes, *(options.pop(name) for name in constexprs))
    options["enable_fp_fusion"] = True  # Triton 3.10 has another default
    compiled: dict[Any, Any] = {}

    def launch(*arguments: Any) -> None:
        output = getattr(arguments[0], "base", arguments[0])
        if output.is_cuda and output.get_device() != torch.cuda.current_device():
            with torch.cuda.device_of(output):
                return launch(*arguments)
        if kernel.__class__.run is not _RUN or kernel.pre_run_hooks:  # watched, or interpreted
            kernel.run(*arguments, *last, grid=grid, warmup=False, **options)
            return
        # What Triton looks at, or more, when it picks a compiled kernel here and now. The arguments
        # are tensors, maps of them (`gluon.tensor_map`), numbers and None.
        knobs = triton.knobs
        kinds: list[Any] = [driver.active.get_current_device()]
        kinds += knobs.runtime.debug, knobs.compilation.instrumentation_mode
        for x in arguments:  # the quickest way to go about it, as every launch comes here
            if x is None:
                kinds.append(None)
            elif x.__class__ is int:
                kinds.append(x % 16 if 1 < x < 2**31 else (x,))
            elif isinstance(x, Tensor):
                kinds.append(x.dtype)
                kinds.append(x.data_ptr() & 15)
            elif hasattr(x, "block_shape"):
                kinds += x.base.dtype, tuple(x.block_shape)
            else:
                kinds.append(x.__class__)
        if (known := compiled.get(key := tuple(kinds))) is not None:
            return known(*arguments, *last)
        found = kernel.run(*arguments, *last, grid=grid, warmup=False, **options)
        if hasattr(found.__class__, "__getitem__"):  # else refused, or to come
            compiled[key] = found[(*grid, 1, 1)[:3]]

    return launch
