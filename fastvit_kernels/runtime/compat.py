"""What the package asks of torch, triton, timm and transformers by names that they do not promise.

Those begin with an underscore. Each entry says what it tells us and what stands in where no release
has it any more: something public, something slower, or the host's own forward. No call raises
because a name is gone; `MISSING` lists those that are, and a test wants it empty, so that we meet a
release that drops one before its users do. What Dynamo alone has is in fuse/dynamo.py, by the same
rule.
"""

from __future__ import annotations

import functools
import pkgutil
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
import torch.nn.modules.module as _nn_module
from torch import Tensor, library
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])

TORCH, TRITON = (2, 10), (3, 6)  # the oldest that CI runs
MISSING: list[str] = []  # those that this release does not have


def version_of(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of "2.13.0+cpu"."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def check_version(name: str, text: str, least: tuple[int, ...]) -> None:
    """Raises ImportError for a release of `name` older than `least`."""
    if version_of(text) < least:
        wanted = ".".join(map(str, least))
        raise ImportError(f"fastvit_kernels needs {name} {wanted} or newer, got {name} {text}")


check_version("torch", torch.__version__, TORCH)


def _find(*names: str, gone: Any, tried: tuple[Any, ...] | None = None) -> Any:
    """The first of "module:name" that there is, else `gone`.

    Args:
        tried: arguments of a call at once: a function that takes others counts as gone.
    """
    for name in names:
        try:
            found = pkgutil.resolve_name(name)
            if tried is not None:
                found(*tried)
            return found
        except Exception:
            continue
    MISSING.append(names[0])
    return gone


def _has(name: str) -> bool:
    return _find(name, gone=None) is not None


# Who looks on. Direct C functions, as every op asks.

# Dispatch modes at work. Gone: as if there were one, so calls go through registered operators, and
# swapped models run their host's forward.
_NUM_MODES = "torch:_C._len_torch_dispatch_stack"
num_modes: Callable[[], int] = _find(_NUM_MODES, tried=(), gone=lambda: 1)
# Function modes at work, that of a default device among them. Gone: none is seen.
num_function_modes: Callable[[], int] = _find(
    "torch:_C._len_torch_function_stack", tried=(), gone=lambda: 0
)
# torch.func transforms at work. Gone: as if there were one, so the specification runs.
in_transform: Callable[[], bool] = _find(
    "torch:_C._are_functorch_transforms_active", tried=(), gone=lambda: True
)
# torch.jit.trace. Gone: its public twin, a function of Python.
is_jit_tracing = _find("torch:_C._is_tracing", gone=torch.jit.is_tracing, tried=())
# A profiler that wants operators' names. Gone: it sees launches without them.
is_profiling = _find("torch:autograd._profiler_enabled", gone=lambda: False, tried=())
# torch.fx at work (make_fx too). Gone: a Proxy is no dense tensor, which sends a module to its
# host's forward; only calls on constants are not seen.
is_fx_tracing: Callable[[], bool] = _find(
    "torch.fx._symbolic_trace:_get_is_fx_tracing",  # from 2.14 on
    "torch.fx._symbolic_trace:is_fx_symbolic_tracing",
    tried=(),
    gone=lambda: False,
)
is_dynamo_compiling = torch.compiler.is_dynamo_compiling  # others come with a mode or subclasses


# The level of forward-mode differentiation, below 0 without. Gone: as if there were one, so the
# specification runs.
_has("torch.autograd.forward_ad:_current_level")
forward_level: Callable[[], int] = partial(getattr, forward_ad, "_current_level", 0)


def in_forward_mode() -> bool:
    return forward_level() >= 0


def needs_dispatcher() -> bool:
    """Whether a compiler, transform, mode, trace or profiler wants to see operators."""
    return (
        is_dynamo_compiling()
        or num_modes() > 0
        or in_transform()
        or forward_level() >= 0
        or is_jit_tracing()
        or is_profiling()
    )


def is_observed() -> bool:
    """Whether anything may watch what modules and operators do: the quick look."""
    # An export to ONNX traces by torch.jit, compiles or has a mode.
    watched = num_modes() > 0 or num_function_modes() > 0 or in_transform()
    return watched or in_forward_mode() or is_jit_tracing() or is_fx_tracing() or has_global_hook()


def _without(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"torch {torch.__version__} has no {name}")

    return type(name, (), {"__init__": refuse})


TorchDispatchMode: Any = _find(
    "torch.utils._python_dispatch:TorchDispatchMode", gone=_without("TorchDispatchMode")
)


def is_compiled_in_place(module: Any) -> bool:
    """Whether `module.compile()` was called. Gone: no."""
    return getattr(module, "_compiled_call_impl", None) is not None


# Autocast for any device. Gone: asked for the two that have kernels or the interpreter.
is_autocast_on: Callable[[], bool] = _find(
    "torch:_C._is_any_autocast_enabled",
    tried=(),
    gone=lambda: torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"),
)


# Global hooks on modules. Gone: as if there were one: swapped models run their host's forward.
_HOOKS = (
    _find("torch.nn.modules.module:_global_forward_hooks", gone=None),
    _find("torch.nn.modules.module:_global_forward_pre_hooks", gone=None),
    _find("torch.nn.modules.module:_global_backward_hooks", gone=None),
    _find("torch.nn.modules.module:_global_backward_pre_hooks", gone=None),
)


def _any_global_hook() -> bool:
    return bool(
        _nn_module._global_forward_hooks
        or _nn_module._global_forward_pre_hooks
        or _nn_module._global_backward_hooks
        or _nn_module._global_backward_pre_hooks
    )


has_global_hook: Callable[[], bool] = _any_global_hook if None not in _HOOKS else lambda: True


# Tensors and their memory.


class _ByName(type):
    """Of a class that is gone: its instances go by its name."""

    def __instancecheck__(cls, x: object) -> bool:
        return type(x).__name__ == cls.__name__


# A compiler's tensors without values. Gone: told by the name of their class.
FakeTensor: Any = _find(
    "torch._subclasses.fake_tensor:FakeTensor", gone=_ByName("FakeTensor", (), {})
)
FunctionalTensor: Any = _find(
    "torch._subclasses.functional_tensor:FunctionalTensor",
    gone=_ByName("FunctionalTensor", (), {}),
)


# A tensor made of others (a DTensor, a quantised weight). Gone: by a method it must have.
is_wrapper: Callable[[Any], bool] = _find(
    "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
    tried=(None,),
    gone=lambda x: hasattr(type(x), "__tensor_unflatten__"),
)

# How often a tensor was written to. Gone: each asking has an answer of its own, so that nothing
# read counts as known, and no memory is saved by making a tensor again.
KNOWS_VERSIONS = _has("torch:Tensor._version")
version: Callable[[Tensor], Any] = attrgetter("_version") if KNOWS_VERSIONS else lambda _: object()

# What tells one storage from another. Gone: its address.
place_of_storage: Callable[[Any], int] = (
    attrgetter("_cdata") if _has("torch:UntypedStorage._cdata") else torch.UntypedStorage.data_ptr
)

# Hooks on what autograd saves. Gone: as if there were some: no memory is saved.
_top_saves_hooks = _find(
    "torch:_C._autograd._top_saved_tensors_default_hooks", gone=lambda _: True, tried=(True,)
)


def saves_are_hooked() -> bool:
    """Whether hooks decide what autograd saves."""
    return _top_saves_hooks(True) is not None


def saves_are_own() -> bool:
    """Whether hooks of this package alone, if any, see what autograd saves."""
    pair = _top_saves_hooks(True)
    if pair is None or pair is True:
        return pair is None
    return str(getattr(pair[0], "__module__", "")).startswith(__name__.partition(".")[0] + ".")


# Whether what was saved for the backward that runs stays for another one. Gone: it does.
_keeps_saves = _find("torch:_C._autograd._get_current_graph_task_keep_graph", gone=lambda: True)


def reads_last(x: Tensor) -> bool:
    """In a backward on x's device: whether what was saved for it is read for the last time. What a
    CUDA graph records is to run again, on other values."""
    return not (_keeps_saves() or (x.is_cuda and torch.cuda.is_current_stream_capturing()))


# The number of the backward under way, -1 outside. Gone: as if there were none.
graph_task: Callable[[], int] = _find("torch:_C._current_graph_task_id", gone=lambda: -1, tried=())
# The class of an autograd.Function's nodes. Gone: None, and no node hands another anything.
node_class: Callable[[Any], Any] = (
    attrgetter("_backward_cls") if _has("torch:autograd.Function._backward_cls") else lambda _: None
)
# The current stream's address, by the device's index. Gone, as from CPU builds: the stream's own.
raw_stream: Callable[[int], int] = _find(
    "torch:_C._cuda_getCurrentRawStream",
    gone=lambda index: torch.cuda.current_stream(index).cuda_stream,
)
# Of the pool of a graph whose capture failed: nothing is allocated there, it is freed. Gone: both.
end_pool: Any = _find("torch:_C._cuda_endAllocateToPool", gone=lambda device, pool: None)
release_pool: Any = _find("torch:_C._cuda_releasePool", gone=lambda device, pool: None)
# torch's own attention: F's attribute of this name may be ours by now, as a drop-in. Gone: F's.
torch_sdpa: Callable[..., Tensor] = _find(
    "torch:_C._nn.scaled_dot_product_attention", gone=F.scaled_dot_product_attention
)

# The same by its formula, whose backward keeps the probabilities. Gone: as F does it.
_formula = _find("torch:ops.aten._scaled_dot_product_attention_math.default", gone=None)


def torch_sdpa_with(
    mask: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's own attention with a mask; by its formula where it has a gradient and the mask is
    added.

    torch's fused backwards rebuild p from lse = m + log l, where a finite mask that hides all keys
    of a row makes m so large that log l is lost: gradients many times too large, without a word.
    """
    tensors = (query, key, value, mask)
    has_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if mask.dtype is torch.bool or query.is_nested or not has_gradient or _formula is None:
        return torch_sdpa(*tensors, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    device = query.device.type
    if device != "meta" and torch.is_autocast_enabled(device):  # which does not know the formula
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(x if x.dtype is torch.float64 else x.to(dtype) for x in tensors)
    with torch.autocast(device, enabled=False) if device != "meta" else nullcontext():
        return _formula(*tensors, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


# torch's precision of a backend's fp32 operations, by whichever switch it was set. Gone: the public
# attribute, which reads the same. torch.get_float32_matmul_precision() and allow_tf32 raise once
# the switches named fp32_precision disagree with the older ones (pytorch #189955).
_fp32_precision: Callable[[str, str], str] = _find(
    "torch:_C._get_fp32_precision_getter",
    gone=lambda backend, operation: torch.backends.cuda.matmul.fp32_precision,
    tried=("cuda", "matmul"),
)


def matmul_precision() -> Literal["ieee", "tf32"]:
    """How torch multiplies fp32 matrices on a GPU now, and how our kernels do. Never raises."""
    return "tf32" if _fp32_precision("cuda", "matmul") == "tf32" else "ieee"


# What it calls, forward and backward, and which of them it would take, a number of SDPBackend.
# Gone: None and -1, and no attention takes the library's route there.
FLASH_CPU: Any = (
    _find("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu.default", gone=None),
    _find("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default", gone=None),
)
FLASH: Any = (
    _find("torch:ops.aten._scaled_dot_product_flash_attention.default", gone=None),
    _find("torch:ops.aten._scaled_dot_product_flash_attention_backward.default", gone=None),
)
CUDNN: Any = (
    _find("torch:ops.aten._scaled_dot_product_cudnn_attention.default", gone=None),
    _find("torch:ops.aten._scaled_dot_product_cudnn_attention_backward.default", gone=None),
)
sdpa_choice: Callable[..., int] = _find("torch:_fused_sdp_choice", gone=lambda *_, **__: -1)


def constant_when_traced(function: Function) -> Function:
    """What `torch.compiler.assume_constant_result` does, without its import of torch._dynamo,
    longer than that of our whole package. Gone: compiled graphs break where it is called."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


# torchvision, and what imports it, with a torch that its binary is not for.


@functools.cache
def define_torchvision_operators() -> None:
    """Let torchvision, and timm through it, be imported with a torch that its binary is not for.

    Its import registers fake versions of two operators of that binary; its models are plain
    PyTorch, for which the operators' names are enough. Nothing happens where the binary loads.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for binary in Path(spec.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(binary))
        except OSError:
            continue
        return
    schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"torchvision::{name}", schema)


# For attention_maps and tests, which swapped models and ops do without.

FakeTensorMode: Any = _find(
    "torch._subclasses.fake_tensor:FakeTensorMode", gone=_without("FakeTensorMode")
)
# The operators of a softmax in torch's attention. Gone: the maps of that path are not found.
SOFTMAXES = (
    _find("torch:ops.aten._softmax", gone=None),
    _find("torch:ops.aten._safe_softmax", gone=None),
)


def active_driver(driver: Any) -> Any:
    """Triton's driver, where one is active; asking in public would look for a GPU. Gone: None,
    and Triton looks for a GPU at its next launch."""
    return getattr(driver, "_active", None)


# Said once: numbers are right, and nothing is fused.
FUSED_IS_OFF = None in _HOOKS or _NUM_MODES in MISSING
if FUSED_IS_OFF:
    warnings.warn(
        f"torch {torch.__version__} has no {', '.join(MISSING)}: swapped models run their host's "
        "forward. A newer fastvit_kernels may know another way",
        stacklevel=2,
    )
