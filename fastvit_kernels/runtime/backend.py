"""Which implementation runs: the Triton kernels or the PyTorch specification, and why.

auto    Triton on CUDA and ROCm tensors (on CPU tensors too under TRITON_INTERPRET=1), else PyTorch
triton  Triton, or a RuntimeError that says why not
torch   the `<op>_ref` specification of each op, through PyTorch's own autograd

The environment variable FASTVIT_KERNELS_BACKEND sets the start value, by default "auto".
`set_backend` chooses for the process, `with backend(...)` for the thread and asyncio task that it
stands in. Every call reads it, and torch.compile guards on it.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .arguments import autocast_dtype
from .compat import constant_when_traced, in_forward_mode, in_transform
from .dtypes import DTYPE_NAMES
from .triton import HAS_TRITON, VERSION, tl, triton

Backend = Literal["auto", "triton", "torch"]

# Read when triton decorates the kernels, hence at import: setting the variable later has no effect.
INTERPRETED = HAS_TRITON and bool(triton.knobs.runtime.interpret)


def _checked(name: str) -> Backend:
    if not isinstance(name, str) or name not in get_args(Backend):
        raise ValueError(f"backend must be one of {get_args(Backend)}, got {name!r}")
    return name  # type: ignore[return-value]


process: Backend = _checked(os.environ.get("FASTVIT_KERNELS_BACKEND", "auto"))
_own: ContextVar[Backend | None] = ContextVar("fastvit_kernels.backend", default=None)
own_backend = _own.get  # what this thread and task chose, or None


class _Here(ModuleType):
    """A module, since torch.compile guards on what a module's attribute is in the calling thread;
    before torch 2.15 it cannot read a context variable."""

    @property
    def own(self) -> Backend | None:
        return _own.get()

    @own.setter
    def own(self, name: Backend | None) -> None:
        _own.set(name)


_here = _Here("fastvit_kernels.backend")


def get_backend() -> Backend:
    """The current backend: "auto", "triton" or "torch"."""
    return _here.own or process


def set_backend(name: Backend) -> None:
    """Choose the implementation of every op for the whole process, except inside `backend` blocks.

    Args:
        name: "auto": Triton on CUDA and ROCm tensors (on CPU tensors too under
            TRITON_INTERPRET=1), else PyTorch; "triton": Triton, or a RuntimeError that says why
            not; "torch": PyTorch.
    Raises: ValueError for any other name.
    """
    global process
    process = _checked(name)


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Context manager: choose the implementation of every op in this thread and asyncio task.

    A backward called inside runs in this thread, not in autograd's own, so that a checkpoint's
    recomputation on a GPU has the same choice.

    Args, raises: as `set_backend`.
    """
    former, _here.own = _here.own, _checked(name)
    try:
        with nullcontext() if torch.compiler.is_compiling() else _backward_in_place():
            yield
    finally:
        _here.own = former


class _Open(threading.local):
    """The blocks that tasks of this thread are in: they may end in any order."""

    blocks: int = 0
    setting: Any = None  # torch's, from the first to the last


_open = _Open()


@contextmanager
def _backward_in_place() -> Iterator[None]:
    if _open.blocks == 0:
        _open.setting = torch.autograd.set_multithreading_enabled(False)
    _open.blocks += 1
    try:
        yield
    finally:
        _open.blocks -= 1
        if _open.blocks == 0:
            _open.setting.__exit__(None, None, None)


@functools.cache
def family(arch: str) -> int:
    """The generation whose rules an architecture follows: 8, 9, 10 or 12, else 0.

    It tells which tensor cores Triton compiles for: mma.sync with operands in registers (8, 12),
    wgmma (9), tcgen05 (10, and sm_110).
    """
    if not arch.startswith("sm_"):
        return 0
    major = int(arch.removeprefix("sm_")) // 10
    return {11: 10}.get(major, min(major, 12))


class Gpu(NamedTuple):
    """What a launcher may ask of a GPU. `arch` is "sm_90", "gfx942", ..., "cpu"."""

    arch: str
    num_sms: int
    shared_limit: int  # bytes of shared memory a block may ask for
    name: str = ""  # as its driver says it; "" for the interpreter and for absent GPUs

    @property
    def family(self) -> int:
        return family(self.arch)

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")


class _Gpus(dict[torch.device, Gpu]):
    """The GPU of each device met so far, or the absent GPU being compiled for."""

    absent: Gpu | None = None

    def __missing__(self, device: torch.device) -> Gpu:
        found = self[device] = self.absent or _gpu(device)
        return found


GPUS = _Gpus()
gpu = GPUS.__getitem__  # device -> Gpu, without a call of Python once it is known


@contextmanager
def on_absent_gpu(gpu: Gpu) -> Iterator[None]:
    """Inside, every tensor counts as on `gpu`: to compile for it without a launch."""
    former, GPUS.absent = GPUS.absent, gpu
    GPUS.clear()
    try:
        yield
    finally:
        GPUS.absent = former
        GPUS.clear()


@functools.lru_cache(maxsize=64)
def _gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu("cpu", num_sms=2, shared_limit=2**20)  # the interpreter's
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch, shared = properties.gcnArchName.split(":")[0], properties.shared_memory_per_block
    else:
        arch = f"sm_{properties.major}{properties.minor}"
        shared = properties.shared_memory_per_block_optin
    return Gpu(arch, properties.multi_processor_count, shared, properties.name)


@functools.lru_cache(maxsize=64)
def _capability_reason(device: torch.device) -> str | None:
    arch = _gpu(device).arch
    if arch.startswith("sm_") and int(arch[3:]) < 80:
        return f"{device} is {arch}, and the kernels need sm_80"
    if arch == "sm_110" and HAS_TRITON and VERSION < (3, 8):
        return f"{device} is {arch}, whose code triton {triton.__version__} cannot assemble"
    return None


def _device_reason(x: Tensor) -> str | None:
    """Why no Triton kernel can run on x's device, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    if GPUS.absent is not None:
        return None
    if x.is_cuda:
        return "TRITON_INTERPRET=1 is set" if INTERPRETED else _capability_reason(x.device)
    if x.device.type == "cpu":
        return None if INTERPRETED else "the tensor is on the CPU"
    return f"the tensor is on device {x.device}"


@functools.cache
@constant_when_traced
def _interprets_bf16() -> bool:
    """Whether Triton's interpreter multiplies bf16 and rounds to it. From 3.5 to 3.9 it does not:
    it multiplies raw bits, and its casts truncate."""
    try:
        import numpy as np
        from triton.runtime.interpreter import TensorHandle, interpreter_builder

        x = TensorHandle(np.array([[0x3FC0]], np.uint16), tl.bfloat16)  # 1.5
        zero = TensorHandle(np.zeros((1, 1), np.float32), tl.float32)
        square = interpreter_builder.create_dot(x, x, zero, None, 0)
        above = TensorHandle(np.array([1 + 2**-8 + 2**-9], np.float32), tl.float32)
        bits = interpreter_builder.cast_impl(above, tl.bfloat16).data
        return float(square.data.item()) == 2.25 and int(bits.item()) == 0x3F81  # 1 + 2**-7
    except (ImportError, AttributeError, TypeError):  # another interpreter, not tried
        return False


def dtype_reason(*dtypes: torch.dtype | None) -> str | None:
    """Why no kernel computes right in one of these dtypes, or None."""
    if torch.float64 in dtypes:
        return "there is no kernel for torch.float64"
    if not INTERPRETED or torch.bfloat16 not in dtypes or _interprets_bf16():
        return None
    return f"the interpreter of triton {triton.__version__} computes bf16 wrongly"


def _transform_reason() -> str | None:
    """The active transform that the kernels have no rules for, or None."""
    if in_transform():
        return "a torch.func transform is active (grad, vmap, jvp, ...)"
    if in_forward_mode():
        return "forward-mode differentiation is active"
    return None


def reason_for_torch(x: Tensor, unsupported: str | None = None) -> str | None:
    """Why a call on x takes the PyTorch path, or None if the Triton kernel runs.

    Args:
        x: the op's first tensor.
        unsupported: what this op cannot do in a kernel, or None.
    """
    if get_backend() == "torch":
        return "the backend is 'torch'"
    if x.dtype not in DTYPE_NAMES:
        unsupported = f"there is no kernel for {x.dtype}"
    unsupported = unsupported or dtype_reason(x.dtype, autocast_dtype(x))
    return _device_reason(x) or unsupported or _transform_reason()


def use_triton(op: str, x: Tensor, unsupported: str | None = None) -> bool:
    """Decide which implementation of `op` runs on x; warn if that may surprise.

    Raises: RuntimeError if the backend is "triton" and the kernel cannot run.
    Warns: once per op and reason, if x is on a GPU but takes the PyTorch path.
    """
    reason = reason_for_torch(x, unsupported)
    if reason is None:
        return True
    chosen = get_backend()
    if chosen == "triton":
        raise RuntimeError(f"{op}: the backend is 'triton', but {reason}")
    if x.is_cuda and chosen == "auto" and not torch.compiler.is_compiling():
        _say_once(op, reason)
    return False


@functools.lru_cache(maxsize=1024)
def _say_once(op: str, reason: str) -> None:
    warnings.warn(f"fastvit_kernels.{op} takes the PyTorch path: {reason}", stacklevel=4)
