"""Proof that a fused forward computes what its host computes, before it is used.

A small copy of the module (copies.py), with random weights in float64 on the CPU, runs its own
forward and the fused specification on the same inputs: several lengths, train and eval, children
bypassed and called, with the same seed. Outputs, all gradients and the numbers drawn must be equal
to rounding. A proof is kept for the configuration. It runs in a thread of its own, away from
autocast, modes, transforms and tracers of the caller, and changes nothing that another thread can
see: it draws from a generator of its own (draws.py), its copies call no global hook.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..runtime.backend import backend
from ..runtime.plain import UNSEEN
from .copies import Copier, halved, shorter_tables, sizes_of
from .draws import own_draws
from .facts import ClassOf, Facts, host_of, is_recognised, leaves, level_of
from .rates import TRIED, Asked, Rate, answers_hold

TOLERANCE = 1e-9  # of the largest value; float64 rounding is below 1e-12
TOLERANCE_FP32 = 2e-5  # where the host takes no float64
LONG = 2**16  # values of an input of which one call at full size is enough
LARGEST_RECOGNISED = 2**25  # values in a copy for one run without gradients of weights
DTYPES = (torch.float64, torch.float32)  # a host may ask for a type of its own
MOST = 512  # proofs of one class in a process; a class with more changes its settings all the time

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments of a forward
Results = dict[str, Tensor | None]  # what a forward and its backward gave, by what it is

TRUSTED: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # copies, whose fused forwards just run
ROOTS: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # those of them that a proof is about

_proofs: dict[Any, str | None] = {}
_at_sizes: dict[Any, str | None] = {}  # the last proof of each, for all rates
_answers: dict[Any, list[tuple[Asked, str | None]]] = {}  # of proofs that differ by rates alone
_count: dict[type, int] = {}
_lock = threading.RLock()


def prove(
    module: nn.Module, facts: Facts, class_of: ClassOf = type, at_size: bool = True
) -> str | None:
    """Why the fused forward of `class_of(module)` must not stand for the host's; None: it may.

    Args:
        facts: Facts(module, class_of).
        class_of: the class that a module is to have; by default the one that it has.
        at_size: at full size, too, where the module is recognised.
    """
    cls: Any = class_of(module)
    key = (facts.key, cls.__mro__[1])  # the mixin, with its roles
    exact = (*key, *facts.rates.values())
    with _lock:
        if exact in _proofs:
            return _proofs[exact]
        alike = [a for a in _answers.get(key, ()) if answers_hold(a[0], facts.rates)]
        if len(alike) >= TRIED and len({why is None for _, why in alike}) == 1:
            facts.asked, why = alike[0]
            return why
        host = host_of(cls)
        _count[host] = _count.get(host, 0) + 1
        if _count[host] > MOST:
            reason = f"more than {MOST} configurations of {host.__name__} were met"
            if _count[host] == MOST + 1:
                warnings.warn(f"swap_in: {reason}; in new ones its own forward runs", stacklevel=2)
            return reason
        asked: Asked = {}
        ids = [*map(id, facts.modules(module))]
        rates = {(ids[at], n): Rate.of(v, (at, n), asked) for (at, n), v in facts.rates.items()}
        try:
            run = partial(_prove, module, facts, class_of, at_size, rates)
            _proofs[exact] = in_clean_thread(run)
        except Exception as error:  # a proof never fails its caller
            _proofs[exact] = f"it could not be tried: {first_line(error)}"
        if rates:
            _answers.setdefault(key, []).append((asked, _proofs[exact]))
        return _proofs[exact]


def in_clean_thread(run: Callable[[], Any]) -> Any:
    """What `run` gives in a thread of its own; its exception is raised here. No module is watched
    there by a global hook, and ops compute their specification."""

    def run_alone() -> Any:
        UNSEEN.set(True)
        with backend("torch"):
            return run()

    with ThreadPoolExecutor(1, "fastvit_kernels proof") as thread:
        return thread.submit(run_alone).result()


def first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]


# The two forwards side by side.


def _form(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(map(_form, value))})"
    return type(value).__name__


def _run(module: nn.Module, compute: Callable[[], Any], call: Call, briefly: bool) -> Results:
    """Outputs, gradients (briefly: of no parameters) and the generator's state after a forward and
    backward."""
    with own_draws() as generator:
        result = compute()
        drawn = generator.get_state()
    outputs = list(leaves(result, Tensor))
    found: Results = {f"output {i}": t for i, t in enumerate(outputs)}
    found[f"a result of the form {_form(result)}"] = None
    found["the state of the random generator"] = drawn
    inputs = {n: p for n, p in module.named_parameters() if p.requires_grad and not briefly}
    given = enumerate(leaves(call, Tensor))
    inputs |= {f"argument {i}": t for i, t in given if t.requires_grad}
    with_gradient = [t for t in outputs if t.requires_grad]
    generator = torch.Generator().manual_seed(8)
    upstream = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in with_gradient]
    with own_draws():
        gradients = torch.autograd.grad(
            with_gradient, [*inputs.values()], upstream, allow_unused=True
        )
    found |= {f"the gradient of {n}": g for n, g in zip(inputs, gradients, strict=True)}
    return found


def _difference(wanted: Results, got: Results, tolerance: float) -> str | None:
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


class Unread:
    """Stands for an argument that nothing may read, in an example of a call."""

    def __bool__(self, *_: Any) -> bool:
        raise TypeError("it reads this argument")

    __eq__ = __bool__
    __hash__ = None  # type: ignore[assignment]


class _NotTried(Exception):
    """The host's own forward does not run on a copy of this size."""


def _prove(
    module: nn.Module, facts: Facts, class_of: ClassOf, at_size: bool, rates: dict[Any, Rate]
) -> str | None:
    modules = facts.modules(module)
    recognised = is_recognised(class_of(module))
    reason: Exception | None = None
    every = sizes_of(modules)
    if not recognised and any(map(_has_number, map(class_of, modules))):
        every = every[-1:]  # no narrow copy has the scale of its heads
    for dtype in DTYPES:
        for sizes in every:
            try:
                found = _compare(module, class_of, sizes, dtype, rates=rates)
            except _NotTried as error:
                reason = reason or error
                continue
            if found is None and level_of(class_of(module)) in ("layer_norm", "rms_norm"):
                return _other_dtype(module, class_of, sizes)
            if found is None and recognised and sizes and at_size:
                return _at_size(module, facts, class_of, dtype)
            return found
        if not recognised:
            break
    return f"it could not be tried: {first_line(reason) if reason else 'it is too large'}"


def _other_dtype(module: nn.Module, class_of: ClassOf, sizes: dict[int, int]) -> str | None:
    """What differs of a norm's result where x has another dtype than the weights."""
    for x_dtype, dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        copier = Copier(sizes, class_of, is_recognised(class_of(module)), dtype)
        host, ours = (copier.copy(module, of_host) for of_host in (True, False))
        TRUSTED.update(ours.modules())
        x = torch.ones(ours.fused_shapes()[0], dtype=x_dtype)
        try:
            wanted = host.forward(x).dtype
        except Exception:  # the host does not take the two
            continue
        if (got := ours.fused_forward(x).dtype) != wanted:
            return f"gives {got}, not {wanted}, of {x_dtype} with weights in {dtype}"
    return None


def _at_size(module: nn.Module, facts: Facts, class_of: ClassOf, dtype: torch.dtype) -> str | None:
    """What differs at full size, of the outputs and the gradients of arguments. A host that nobody
    read may count its heads by its width; one that is too large is tried at a fraction. Once for
    all rates of DropPath and dropout: those do not depend on it."""
    cls: Any = class_of(module)
    key = facts.key_without_rates(), cls.__mro__[1]
    if key not in _at_sizes:
        modules = facts.modules(module)
        sizes = halved(modules, LARGEST_RECOGNISED) | shorter_tables(modules)
        try:
            _at_sizes[key] = _compare(module, class_of, sizes, dtype, briefly=True)
        except _NotTried as error:
            return f"it could not be tried at its size: {first_line(error)}"
    return _at_sizes[key]


def _has_number(cls: Any) -> bool:
    """Whether a row gives the scores of an attention a number for their scale."""
    roles = getattr(cls, "fused_roles", ())
    every: Any = (roles, *(step.inline for step in getattr(roles, "steps", ())))
    return any(getattr(r, "scale", None) not in (None, 1) and type(r.scale) is float for r in every)


def _calls(ours: Any, generator: torch.Generator) -> Iterator[Call]:
    """The examples of calls, with None for what the host's forward wants and we do not know."""
    names, defaults, others = ours.fused_arguments
    unread = ours.fused_unread.difference(names) if others and not ours.fused_searched else ()
    for args, kwargs in ours.fused_examples(generator):
        wanted = [n for n in names[len(args) :] if n not in defaults and n not in kwargs]
        yield args, {**dict.fromkeys(wanted), **{n: Unread() for n in unread}, **kwargs}


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


def _wanted(ours: Any, host: nn.Module, call: Call) -> Any:
    return ours.fused_wanted(host.forward(*call[0], **call[1]))


class _Unrounded(TorchFunctionMode):
    """Inside, what asks for fp32 gets float64: a host that rounds is compared like any other."""

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        func = Tensor.double if func is Tensor.float else func
        return func(*map(wide, args), **{n: wide(v) for n, v in (kwargs or {}).items()})


def _compare(
    module: nn.Module,
    class_of: ClassOf,
    sizes: dict[int, int],
    dtype: torch.dtype = torch.float64,
    briefly: bool = False,
    rates: dict[Any, Rate] | None = None,
) -> str | None:
    recognised = is_recognised(class_of(module))
    least = TOLERANCE if dtype == torch.float64 else TOLERANCE_FP32
    calls: list[Call] = []
    for called in (False,) if briefly else (False, True):
        copier = Copier(sizes, class_of, recognised, dtype, briefly, rates or {})
        try:
            host, ours = (copier.copy(module, of_host, called) for of_host in (True, False))
            TRUSTED.update(ours.modules())
            ROOTS.add(ours)
            if all(ours.train(mode).fused_blocked() is not None for mode in (True, False)):
                return None  # it runs the host's forward as things are
            calls = calls or [_typed(c, dtype) for c in _calls(ours, copier.generator)]
        except Exception as error:
            raise _NotTried(first_line(error)) from error
        # a part may round to fp32, whatever the dtype
        tolerance = max(least, *(getattr(type(m), "fused_tolerance", 0.0) for m in ours.modules()))
        tried, failed = 0, None
        if briefly:  # the last, perhaps a smaller one, and the first
            calls = calls[:: -max(len(calls) - 1, 1)]
        for call, training in _modes(calls[:1] if called else calls):
            host.train(training)
            ours.train(training)
            given = ours.fused_given(*call)
            if given is None or ours.fused_blocked() is not None:
                continue
            by_host = partial(_run, host, partial(_wanted, ours, host, call), call, briefly)
            fused = partial(ours.fused_forward, given[0], **given[1])
            by_ours = partial(_run, ours, fused, call, briefly)
            try:
                wanted = by_host()
            except Exception as error:  # a call that the host does not take
                failed = error
                continue
            tried += 1
            try:
                found = _difference(wanted, by_ours(), tolerance)
            except Exception as error:
                return f"the fused forward raises: {first_line(error)}"
            if found is None and tolerance > least and not (called or briefly):
                with _Unrounded():
                    try:
                        wanted = by_host()
                    except Exception:  # it wants fp32
                        continue
                    found = _difference(wanted, by_ours(), least)
            if found is not None:
                mode = "training" if training else "evaluation"
                return f"computes something else: {found} in {mode}"
            if briefly and sum(t.numel() for t in leaves(given[0], Tensor)) > LONG:
                break
        if tried and failed is not None and recognised:
            return f"the host does not take such a call: {first_line(failed)}"
        if not tried:
            raise _NotTried(first_line(failed) if failed else "there is no example of a call")
    return None
