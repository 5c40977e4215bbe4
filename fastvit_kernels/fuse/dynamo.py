"""What this package asks of torch._dynamo by names that no release promises.

Each function says what stands in where a release has the name no more; none of them raises for
that. Everything is asked while a call is traced or compiled, never at import.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule

from ..runtime.compat import num_function_modes, num_modes
from .hooks import EmptyHooks

# What `called` of entry.py has guarded, as Dynamo's sources spell it.
_FILLED = "L['swapped'].empty_hooks.filled"


def guard_hooks(empty: EmptyHooks | None = None) -> None:
    """Let the graph that is compiled now see hooks that come after it.

    By default Dynamo guards no empty dict of hooks, so that a hook added after the first call never
    runs. Only the guards of the compile under way change, no setting of torch's. A hook that is in
    `_forward_hooks_with_kwargs` is in `_forward_hooks`, too, whose guard is enough. Called by a
    backend, the first time decides. Gone: torch's default.

    Args:
        empty: of a swapped module: what watches the dicts for a graph that is guarded by
            `empty.filled`, as one behind a graph break is not.
    """
    try:
        from torch._dynamo.guards import GuardBuilder

        context = torch._guards.TracingContext.try_get()
        unguarded, length = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT, GuardBuilder.SEQUENCE_LENGTH
        guards = context.guards_context.dynamo_guards if context is not None else ()
    except (ImportError, AttributeError):
        return

    create = length
    if empty is not None and not empty.filled and any(g.name == _FILLED for g in guards):
        create = functools.partial(_watch, empty, empty.paths(), length)
    for guard in guards:
        dict_name = str(getattr(guard.originating_source, "member", ""))
        if guard.create_fn is unguarded and not dict_name.endswith("_with_kwargs"):
            guard.create_fn = create


def _watch(
    empty: EmptyHooks,
    paths: dict[int, str],
    otherwise: Callable[..., None],
    builder: Any,
    guard: Any,
) -> None:
    """Called where Dynamo makes a guard of a dict of hooks: `empty` watches that dict instead."""
    source = guard.originating_source
    try:
        empty.names.add((paths[id(builder.get(source.base))], source.member))
    except (AttributeError, TypeError, KeyError):  # no attribute of a module that is swapped
        otherwise(builder, guard)


class Compile(NamedTuple):
    """Which compile is under way: of which frame, and how often that was compiled before."""

    frame: int
    times: int


def compile_under_way() -> Compile | None:
    """None outside a compile. Gone: None, and no recompile is counted."""
    try:
        found: Any = torch._guards.CompileContext.current_compile_id()
        return None if found is None else Compile(found.frame_id, found.frame_compile_id)
    except AttributeError:
        return None


# Whose code asks for settings and shapes, and never which block it is in.
LIBRARIES = ["torch", "timm", "torchvision", "transformers", __package__.partition(".")[0]]


def traces_libraries_alone() -> bool:
    """Whether all Python in the graph that is made now is of torch or of the libraries of ViTs.

    Another's code, a hook too, may ask `self is last` or `scales[self]`, which Dynamo makes a
    constant without a guard. Gone: False, and each block has a graph of its own.
    """
    try:
        codes = torch._guards.TracingContext.get_traced_code()
    except AttributeError:
        return False
    folders = (
        path for name in LIBRARIES if name in sys.modules for path in sys.modules[name].__path__
    )
    known = ("<frozen ", *(path + os.sep for path in folders))
    return bool(codes) and all(code.co_filename.startswith(known) for code in codes)


def break_reason(gm: GraphModule) -> str:
    """Why and where Dynamo ended this graph before the end of the forward; "" if it did not.

    Gone: "", and no graph break is counted.
    """
    why = getattr(gm, "compile_subgraph_reason", None)
    if not getattr(why, "graph_break", False):
        return ""
    lines = str(getattr(why, "reason", "")).strip().splitlines()
    text = lines[0] if lines else "a graph break"
    if text.startswith("generic_jump"):
        text = "a branch on a tensor's value"
    elif text.startswith("step_unsupported"):
        text = "torch.compile captures no more of this forward, which the share leaves out"
    frames = getattr(why, "user_stack", None)
    return f"{text}, {frames[-1].filename}:{frames[-1].lineno}" if frames else text


# A hop through what swap_in left in a module's __dict__, as Dynamo's sources spell it.
_HOP = re.compile(r"\.(?:forward(?:_\w+)?|encode_\w+|get_\w+)\.module(?![^.])")


def module_path(source: str) -> str:
    """ "blocks.0.attn" of "L['self']._modules['blocks']._modules['0'].attn"."""
    modules = r"(?:\._modules|\.__dict__\['_modules'\])\['([^']*)'\]"
    path = re.sub(rf"{modules}|\[(\d+)\]", r".\1\2", source)
    path = re.sub(r"^L\['swapped'\]\.module(?![^.])|^L\['\w+'\]", "", path)
    return _HOP.sub("", path).strip(".")


def isolated() -> dict[str, bool]:
    """What torch.compile takes for limits of its own, in what follows a graph break too.

    Of a forward with a graph break the parts are functions that blocks of one class share. Gone,
    as before torch 2.13: such blocks share one limit of eight graphs.
    """
    known = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    return {"isolate_recompiles": True} if known else {}


def limit_met(code: CodeType) -> str:
    """The limit by which Dynamo compiles this code object no more; "" where none is met.

    Gone: "", and a call that ran as Python says no reason.
    """
    try:
        from torch._dynamo import config
        from torch._dynamo.eval_frame import _debug_get_cache_entry_list

        graphs, limit = len(_debug_get_cache_entry_list(code)), config.recompile_limit
    except (ImportError, AttributeError):
        return ""
    return f"recompile_limit = {limit}" if graphs >= limit else ""


def forget(code: CodeType) -> None:
    """Free the graphs of a code object: Dynamo keeps each that it has compiled for good.

    Gone: the graphs stay in memory, without their parameters.
    """
    try:
        from torch._dynamo.eval_frame import reset_code
    except ImportError:
        return
    reset_code(code)


def let_batch_vary(code: CodeType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Have the graphs of a code object `called(*args, **kwargs)` take any batch of two or more.

    The batch is the first axis of the first tensor; all arguments with as many there vary with it.
    Where a forward uses the number itself, Dynamo guards it as ever. Gone: torch's own rule, a
    second graph at the second batch size.
    """
    given = [(f"L['args'][{i}]", x) for i, x in enumerate(args)]
    given += [(f"L['kwargs']['{name}']", x) for name, x in kwargs.items()]
    tensors = [(name, x) for name, x in given if type(x) is Tensor and x.ndim and not x.is_nested]
    if not tensors:
        return
    batch = tensors[0][1].shape[0]
    varying = {name: _FIRST_AXIS for name, x in tensors if x.shape[0] == batch}
    try:
        from torch._dynamo.code_context import code_context

        code_context.get_context(code)["dynamism"] = {"args": varying, "kwargs": varying}
    except (ImportError, AttributeError):
        return


_FIRST_AXIS = (True, *[False] * 63)  # of as many axes as a tensor may have


def watch_limits(tell: Callable[[str, FrameType], None]) -> None:
    """Have `tell` called where Dynamo logs that a function inside of a forward met a limit.

    Of a forward with a graph break the rest is a function of its own, with limits of its own. Gone
    or worded otherwise: torch's log line alone.
    """
    logger, _tell[:] = logging.getLogger("torch._dynamo.convert_frame"), [tell]
    logger.addFilter(_read_limit)  # one and the same is added once


_tell: list[Callable[[str, FrameType], None]] = []


def _read_limit(line: logging.LogRecord) -> bool:
    if str(line.msg).startswith("torch._dynamo hit config.") and isinstance(line.args, tuple):
        _tell[0](f"{line.args[0]} = {line.args[1]}", sys._getframe())
    return True


def in_foreign_mode() -> bool:
    """Whether a mode looks on, other than those of selective checkpoints, which want a compiled
    forward as it is, and that of a default device. Gone: every mode is foreign."""
    try:
        from torch.overrides import _get_current_function_mode_stack
        from torch.utils._device import DeviceContext
        from torch.utils._python_dispatch import is_in_any_mode_without_ignore_compile_internals
    except ImportError:
        return num_modes() > 0 or num_function_modes() > 0
    # Dynamo traces F.linear through a function mode twice
    functions = any(not isinstance(m, DeviceContext) for m in _get_current_function_mode_stack())
    return functions or is_in_any_mode_without_ignore_compile_internals()


class Outer(NamedTuple):
    """The compiler that somebody's own torch.compile hands its graph to."""

    output: Any
    inductor: Any  # torch's wrapper with the options of torch.compile; None for another backend


def outer_compile() -> Outer | None:
    """Called while Dynamo traces: whose compile it is. Gone: None, and it gets the host's graph."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        output: Any = InstructionTranslator.current_tx().output
        inner = output.compiler_fn
        while hasattr(inner, "_torchdynamo_orig_backend"):
            inner = inner._torchdynamo_orig_backend
        inductor = getattr(torch, "_TorchCompileInductorWrapper", ())
        return Outer(output, inner if isinstance(inner, inductor) else None)
    except (ImportError, AttributeError):
        return None
