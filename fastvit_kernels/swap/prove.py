"""Proof that a fused forward computes what its host computes, before it is used.

A small copy of the module, with random weights in float64 on the CPU, runs its own forward and the
fused specification on the same inputs: several lengths, train and eval, children bypassed and
called, with the same seed. Outputs, all gradients and the numbers drawn must be equal to rounding.
A proof takes milliseconds and is kept for the configuration. It runs in a thread of its own, where
no autocast, no mode, no transform and no tracer of the caller is at work, and gives the random
generator its state back.

The copy is narrower than the module wherever that runs: sizes that are widths shrink by a common
factor. So a module may be on any device or on none, in any dtype, sharded, or of any size.
"""

from __future__ import annotations

import math
import random
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.modules.module as _torch_module
from torch import Tensor, nn

from ..runtime.backend import backend, get_backend
from ..runtime.plain import is_plain
from .facts import PRIVATE, ClassOf, Facts, host_of, is_rate, is_recognised, keeps_rates

TOLERANCE = 1e-9  # of the largest value; float64 rounding is below 1e-12
TOLERANCE_FP32 = 2e-5  # where the host takes no float64
LARGEST = 2**24  # parameters of a copy at full size
LARGEST_RECOGNISED = 2**25  # the same, for one run without gradients of weights
REPEATED = 99_991  # values of a large weight before they repeat; a prime, so that rows differ
MOST = 512  # proofs of one class in a process; a class with more changes its settings all the time
RATE = 0.4  # every probability between 0 and 1 in a copy

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a forward

TRUSTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # copies, whose fused forwards just run
ROOTS: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those of them that a proof is about

_proofs: dict[Any, str | None] = {}
_count: dict[type, int] = {}
_lock = threading.RLock()


def prove(module: nn.Module, facts: Facts, class_of: ClassOf = type) -> str | None:
    """Why the fused forward of `class_of(module)` must not stand for the host's; None: it may.

    Args:
        facts: Facts(module, class_of).
        class_of: the class that a module is to have; by default the one that it has.
    """
    cls: Any = class_of(module)
    key = (facts.key, cls.__mro__[1], getattr(cls, "fused_roles", None))
    with _lock:
        if key not in _proofs:
            host = host_of(cls)
            _count[host] = _count.get(host, 0) + 1
            if _count[host] > MOST:
                return f"more than {MOST} configurations of {host.__name__} were met"
            _proofs[key] = _in_a_thread(lambda: _prove(module, facts, class_of))
        return _proofs[key]


def _in_a_thread(run: Callable[[], str | None]) -> str | None:
    try:
        return aside(run)
    except Exception as error:  # a proof never fails its caller
        return f"it could not be tried: {_first_line(error)}"


def aside(run: Callable[[], Any]) -> Any:
    """What `run` gives in a thread of its own, undisturbed; its exception is raised here."""
    found: list[Any] = []
    raised: list[Exception] = []

    def work() -> None:
        try:
            with _undisturbed():
                found.append(run())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work, name="fastvit_kernels proof")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No global hook sees the copies, the CPU's generator gets its state back, and ops compute
    their specification: float64 has no kernels, so that only backend "triton" has to change."""
    hooks = [
        _torch_module._global_forward_hooks, _torch_module._global_forward_pre_hooks,
        _torch_module._global_backward_hooks, _torch_module._global_backward_pre_hooks,
    ]  # fmt: skip
    former = [dict(h) for h in hooks]
    for h in hooks:
        h.clear()
    state = torch.default_generator.get_state()
    try:
        if get_backend() == "triton":
            with backend("torch"):
                yield
        else:
            yield
    finally:
        torch.default_generator.set_state(state)
        for h, kept in zip(hooks, former, strict=True):
            h.update(kept)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]


# Copies.


class CalledLinear(nn.Linear):
    """A Linear that is no plain one: it must be called."""


@dataclass
class Copier:
    """Copies modules to the CPU in float64, with new weights and narrower."""

    sizes: dict[int, int]
    planned: ClassOf = type  # the class that a module is to have, in whichever copy
    whole: bool = False  # the root was recognised by structure, or is to be
    dtype: torch.dtype = torch.float64
    quick: bool = False  # large weights repeat their values
    tensors: dict[int, Tensor] = field(default_factory=dict)  # id of the original -> the copy's
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def tensor(self, original: Tensor, of_parameters: bool) -> Tensor:
        if id(original) not in self.tensors:
            shape = [self.sizes.get(n, n) for n in original.shape]
            if original.is_floating_point() or of_parameters:
                made = self.random(shape)
                fan_in = shape[-1] if len(shape) > 1 else 4
                made = made / math.sqrt(max(fan_in, 1)) + (len(shape) == 1) * 0.5
            elif original.is_meta or tuple(original.shape) != tuple(shape):
                made = torch.zeros(shape, dtype=original.dtype, device="cpu")
            else:
                made = original.detach().to("cpu", copy=True)
            self.tensors[id(original)] = nn.Parameter(made) if of_parameters else made
        return self.tensors[id(original)]

    def random(self, shape: list[int]) -> Tensor:
        n = math.prod(shape)
        drawn = min(n, REPEATED) if self.quick else n
        values = torch.randn(drawn, generator=self.generator, dtype=self.dtype, device="cpu")
        return (values if drawn == n else values.repeat(n // drawn + 1)[:n]).view(shape)

    def setting(self, name: str, value: Any, off: frozenset[str], exact: bool = False) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value, isinstance(value, nn.Parameter))
        if name == "gradient_checkpointing":  # transformers: the caller's function would be called
            return False
        if isinstance(value, bool) or re.match("num|n_|.*heads$", name):
            return value
        if isinstance(value, int):
            return self.sizes.get(value, value)
        if is_rate(name, value):
            return 0.0 if name in off else value if exact else RATE
        if type(value) in (tuple, list, torch.Size):
            return type(value)(self.setting(name, v, off) for v in value)
        return dict(value) if type(value) is dict else value

    def module(
        self, original: nn.Module, class_of: ClassOf, called: bool,
        seen: dict[int, nn.Module], off: frozenset[str] = frozenset(),
    ) -> nn.Module:  # fmt: skip
        """A copy of class `class_of(original)`, without the original's hooks.

        Args:
            called: nothing below it may be bypassed.
            seen: the copies of this tree, by the original's id; empty for a root.
            off: probabilities that are 0 in the copy: settings or children, by dotted names.
        """
        if id(original) in seen:
            return seen[id(original)]
        cls: Any = class_of(original)
        is_root = not seen
        if called and not is_root:
            cls = host_of(cls)
        if cls is nn.Linear and (called or not is_plain(original)):
            cls = CalledLinear
        whole = self.whole or is_recognised(class_of(original))
        made = seen[id(original)] = cls.__new__(cls)
        nn.Module.__init__(made)
        exact = whole and keeps_rates(original)
        # Dropout of attention draws numbers of its own, by its layout.
        quiet = getattr(self.planned(original), "fused_attention_dropout", frozenset[str]())
        for name, value in vars(original).items():
            if name not in PRIVATE and name != "forward":
                made.__dict__[name] = self.setting(name, value, off | quiet, exact)
        for name, p in original._parameters.items():
            made._parameters[name] = None if p is None else self.tensor(p, True)  # type: ignore[assignment]
        for name, b in original._buffers.items():
            made._buffers[name] = None if b is None else self.tensor(b, False)
        for name, child in original._modules.items():
            if child is not None:
                inner = {n[len(name) + 1 :] for n in off | quiet if n.startswith(f"{name}.")}
                inner |= {"p"} if name in off | quiet else set()
                child = self.module(child, class_of, called, seen, frozenset(inner))
            made._modules[name] = child
        if called and not is_root and not made._modules:
            made.register_forward_hook(lambda module, args, output: None)
        return made


def _widths(modules: list[nn.Module]) -> tuple[set[int], set[int]]:
    """(sizes that are widths, sizes of a head)"""
    widths: set[int] = set()
    heads: set[int] = set()
    for module in modules:
        for name, value in vars(module).items():
            values = value if isinstance(value, (tuple, list)) else (value,)
            values = [v for v in values if type(v) is int]
            if name in ("head_dim", "attention_head_size", "dim_head", "head_size", "d_head"):
                heads.update(values)
            elif name in ("in_features", "out_features", "normalized_shape", "embed_dim", "d_model",
                          "out_channels", "in_split", "attn_dim", "kv_dim", "all_head_size",
                          "hidden_size", "dim", "inner_dim", "embedding_dim"):  # fmt: skip
                widths.update(values)
    numbers = [getattr(m, "num_heads", None) for m in modules]
    wide = [m.embed_dim for m in modules if isinstance(m, nn.MultiheadAttention)]
    heads.update(w // n for w, n in zip(wide, filter(None, numbers), strict=False))
    if not heads:  # by the number of heads, under whatever name
        parts = [w // n for n in {n for m in modules for n in numbers_of_heads(m)} for w in widths
                 if w % n == 0]  # fmt: skip
        heads.update([min(parts)] if parts else [])
    return widths, heads


def numbers_of_heads(module: nn.Module) -> list[int]:
    """What a module's settings say about its number of heads."""
    return [
        v for n, v in vars(module).items()
        if type(v) is int and v > 0 and "head" in n and not re.search("dim|size|width", n)
    ]  # fmt: skip


def sizes_of(modules: list[nn.Module]) -> Iterator[dict[int, int]]:
    """Maps of sizes to smaller sizes, the smallest first; the last one changes nothing."""
    widths, heads = _widths(modules)
    every = [n for n in widths | heads if n > 8]
    if every:
        target, unit = (8, min(heads)) if heads else (16, min(every))
        common = math.gcd(*every)
        for factor in range(unit // target, 1, -1):
            if common % factor == 0 and (unit % target or unit // factor % target == 0):
                yield {n: n // factor for n in every}
                break
        for factor in range(unit // target, 1, -1):
            if unit % factor == 0:
                yield {n: n // factor if n % factor == 0 else 2 * (n // factor // 2) for n in every}
                break
    yield {}


# The two forwards side by side.


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value
    return [t for v in values for t in _tensors(v)] if isinstance(values, (tuple, list)) else []


def _form(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(_form, value))})"
    return type(value).__name__


def _run(
    module: nn.Module, compute: Callable[[], Any], call: Call, briefly: bool = False
) -> dict[str, Tensor | None]:
    """Outputs, gradients and the generator's state after a forward and backward.

    Args:
        briefly: no gradients of parameters.
    """
    args, kwargs = call
    torch.default_generator.manual_seed(7)
    others = random.getstate()
    try:
        result = compute()
        drawn = random.getstate() != others
    finally:
        random.setstate(others)
    outputs = _tensors(result)
    found: dict[str, Tensor | None] = {f"output {i}": t for i, t in enumerate(outputs)}
    found[f"a result of the form {_form(result)}"] = None
    found["the state of the random generator"] = torch.default_generator.get_state()
    if drawn:
        found["a draw of Python's random numbers"] = None
    leaves = {n: p for n, p in module.named_parameters() if p.requires_grad and not briefly}
    given = _tensors([list(args), list(kwargs.values())])
    leaves |= {f"argument {i}": t for i, t in enumerate(given) if t.requires_grad}
    with_gradient = [t for t in outputs if t.requires_grad]
    generator = torch.Generator().manual_seed(8)
    upstream = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in with_gradient]
    gradients = torch.autograd.grad(with_gradient, [*leaves.values()], upstream, allow_unused=True)
    found |= {f"the gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}
    return found


def _difference(
    wanted: dict[str, Tensor | None], got: dict[str, Tensor | None], tolerance: float
) -> str | None:
    """What differs, and by how much; None where nothing does."""
    for name in got.keys() - wanted.keys():
        return f"there is {name}, which the host does not have"
    for name, a in wanted.items():
        b = got.get(name)
        if a is None or b is None:
            if a is not b:
                return f"{name} is there in one of them only"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {tuple(b.shape)} {b.dtype}, not {tuple(a.shape)} {a.dtype}"
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return f"{name} differs"
            continue
        distance = (a - b).abs().max().item() if a.numel() else 0.0
        scale = a.abs().max().item() if a.numel() else 0.0
        if not distance <= tolerance * max(scale, 1.0):  # NaN differs
            return f"{name} differs by {distance:.1e}"
    return next((f"there is no {n}" for n in wanted if n not in got), None)


class _NotTried(Exception):
    """The host's own forward does not run on a copy of this size."""


def _prove(module: nn.Module, facts: Facts, class_of: ClassOf) -> str | None:
    modules = facts.modules(module)
    recognised = is_recognised(class_of(module))
    parameters = sum(p.numel() for p in module.parameters())
    reason: Exception | None = None
    for dtype in (torch.float64, torch.float32):  # a host may ask for a type of its own
        for sizes in sizes_of(modules):
            if not sizes and parameters > LARGEST:
                break
            try:
                with backend("torch") if dtype == torch.float32 else nullcontext():
                    found = _compare(module, class_of, sizes, dtype)
            except _NotTried as error:
                reason = reason or error
                continue
            if found is None and recognised and sizes:
                with backend("torch") if dtype == torch.float32 else nullcontext():
                    return _at_size(module, class_of, modules, dtype)
            return found
        if not recognised:
            break
    return f"it could not be tried: {_first_line(reason) if reason else 'it is too large'}"


def _at_size(
    module: nn.Module, class_of: ClassOf, modules: list[nn.Module], dtype: torch.dtype
) -> str | None:
    """What differs at full size, of the outputs and the gradients of arguments. A host that nobody
    read may count its heads by its width; one that is too large is tried at a fraction."""
    widths = [n for n in set().union(*_widths(modules)) if n > 8]
    parameters, factor = sum(p.numel() for p in module.parameters()), 1
    while parameters > LARGEST_RECOGNISED and parameters > LARGEST_RECOGNISED // 4 * factor**2:
        factor *= 2
    sizes = {n: n // factor for n in widths} if factor > 1 else {}
    try:
        return _compare(module, class_of, sizes, dtype, briefly=True)
    except _NotTried as error:
        return f"it could not be tried at its size: {_first_line(error)}"


def _calls(ours: Any, generator: torch.Generator) -> Iterator[Call]:
    """The examples of calls, with None for what the host's forward wants and we do not know."""
    names, defaults, _ = ours.fused_arguments
    for args, kwargs in ours.fused_examples(generator):
        wanted = [n for n in names[len(args) :] if n not in defaults and n not in kwargs]
        yield args, {**dict.fromkeys(wanted), **kwargs}


def _modes(calls: list[Call]) -> Iterator[tuple[Call, bool]]:
    """The calls with the mode of each: the first half in training, the other in evaluation."""
    for index, call in enumerate(calls):
        yield call, 2 * index < len(calls)
    if len(calls) == 1:
        yield calls[0], False


def _typed(value: Any, dtype: torch.dtype) -> Any:
    """The arguments of a call, in this dtype."""
    if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != dtype:
        return value.detach().to(dtype).requires_grad_(value.requires_grad)
    if isinstance(value, (tuple, list)):
        return type(value)(_typed(v, dtype) for v in value)
    return {k: _typed(v, dtype) for k, v in value.items()} if isinstance(value, dict) else value


def _wanted(ours: Any, host: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return ours.fused_wanted(host.forward(*args, **kwargs))


def _compare(
    module: nn.Module, class_of: ClassOf, sizes: dict[int, int], dtype: torch.dtype = torch.float64,
    briefly: bool = False,
) -> str | None:  # fmt: skip
    def host_class(m: nn.Module) -> type:
        return host_of(class_of(m))

    calls: list[Call] = []
    least = TOLERANCE if dtype == torch.float64 else TOLERANCE_FP32
    for called in (False,) if briefly else (False, True):
        copier = Copier(sizes, class_of, is_recognised(class_of(module)), dtype, briefly)
        try:
            host = copier.module(module, host_class, called, {})
        except Exception as error:
            raise _NotTried(_first_line(error)) from error
        ours: Any = copier.module(module, class_of, called, {})
        for copied in ours.modules():
            TRUSTED.add(copied)
        ROOTS.add(ours)
        if all(ours.train(mode).fused_blocked() is not None for mode in (True, False)):
            return None  # it runs the host's forward as things are
        try:
            calls = calls or [_typed(c, dtype) for c in _calls(ours, copier.generator)]
        except Exception as error:
            raise _NotTried(_first_line(error)) from error
        tried, failed = 0, None
        for (args, kwargs), training in _modes(calls[:1] if called else calls):
            host.train(training)
            ours.train(training)
            given = ours.fused_given(args, kwargs)
            if given is None or ours.fused_blocked() is not None:
                continue
            x, extras = given
            try:
                compute = partial(_wanted, ours, host, args, kwargs)
                wanted = _run(host, compute, (args, kwargs), briefly)
            except Exception as error:  # a call that the host does not take
                failed = error
                continue
            tried += 1
            try:
                got = _run(ours, partial(ours.fused_forward, x, **extras), (args, kwargs), briefly)
            except Exception as error:
                return f"the fused forward raises: {_first_line(error)}"
            found = _difference(wanted, got, max(type(ours).fused_tolerance, least))
            if found is not None:
                mode = "training" if training else "evaluation"
                return f"computes something else: {found} in {mode}"
        if tried and failed is not None and is_recognised(class_of(module)):
            return f"the host does not take such a call: {_first_line(failed)}"
        if not tried:
            raise _NotTried(_first_line(failed) if failed else "there is no example of a call")
    return None
