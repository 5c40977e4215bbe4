"""Small copies of modules for a proof: on the CPU, in float64, with new weights and narrower.

Sizes that are widths shrink by a common factor wherever the host's forward runs on the result. So
a module may be on any device or on none, in any dtype, sharded, or of any size.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.plain import is_plain
from .facts import PRIVATE, ClassOf, host_of, is_rate, is_recognised, keeps_rates
from .rates import Rate

LARGEST = 2**24  # values in a copy
REPEATED = 99_991  # values of a large weight before they repeat; a prime, so that rows differ
# What nn.Module.__call__ runs in place of hooks and forward, where a module has it.
CALL = "_compiled_call_impl"
RATE = 0.4  # every probability between 0 and 1 in a copy


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """A call of the module past all hooks; keeps it from no collector."""
    known = weakref.ref(module)
    return lambda *args, **kwargs: known().forward(*args, **kwargs)  # type: ignore[union-attr]


class CalledLinear(nn.Linear):
    """A Linear that is no plain one: it must be called."""


@dataclass
class Copier:
    """Copies modules to the CPU in float64, with new weights and narrower."""

    sizes: dict[int, int]
    class_of: ClassOf = type  # the class that a module is to have
    whole: bool = False  # the root was recognised by structure, or is to be
    dtype: torch.dtype = torch.float64
    quick: bool = False  # large weights repeat their values
    rates: dict[Any, Rate] = field(default_factory=dict)  # (id of a module, setting) -> the copy's
    tensors: dict[int, Tensor] = field(default_factory=dict)  # id of the original -> the copy's
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def tensor(self, original: Tensor, of_parameters: bool) -> Tensor:
        if id(original) not in self.tensors:
            counts = original.dtype in (torch.int32, torch.int64)  # what it points at has no width
            shape = [n if counts else self.sizes.get(n, n) for n in original.shape]
            if original.is_floating_point() or of_parameters:
                fan_in = shape[-1] if len(shape) > 1 else 4
                made = self.random(shape).div_(math.sqrt(max(fan_in, 1)))
                made = made.add_(0.5) if len(shape) == 1 else made
            elif original.is_meta or list(original.shape) != shape:
                made = torch.zeros(shape, dtype=original.dtype, device="cpu")
            else:
                made = original.detach().to("cpu", copy=True)
            self.tensors[id(original)] = nn.Parameter(made) if of_parameters else made
        return self.tensors[id(original)]

    def random(self, shape: list[int]) -> Tensor:
        n = math.prod(shape)
        few = REPEATED if self.quick and n > REPEATED else n
        made = torch.randn(few, generator=self.generator, dtype=self.dtype, device="cpu")
        return (made.repeat(n // few + 1)[:n] if few < n else made).view(shape)

    def setting(self, name: str, value: Any, off: frozenset[str], rate: float = RATE) -> Any:
        if isinstance(value, Tensor):
            return self.tensor(value, isinstance(value, nn.Parameter))
        if "checkpoint" in name and value is True:  # it sets the state of the process's generator
            return False
        if isinstance(value, bool) or re.match("num|n_|.*heads$|(img|grid)_size$", name):
            return value
        if isinstance(value, int):
            return self.sizes.get(value, value)
        if is_rate(name, value):
            return 0.0 if name in off else rate
        if type(value) in (tuple, list, torch.Size):
            return type(value)(self.setting(name, v, off) for v in value)
        return dict(value) if type(value) is dict else value

    def copy(
        self,
        original: nn.Module,
        host: bool = True,
        called: bool = False,
        seen: dict[int, Any] | None = None,
        off: frozenset[str] = frozenset(),
    ) -> Any:
        """A copy that calls no hook, no global one either.

        Args:
            host: of the hosts' classes; else of those that the modules are to have.
            called: nothing below it may be bypassed.
            seen: the copies of this tree, by the original's id; of a child.
            off: probabilities that are 0 in the copy: settings or children, by dotted names.
        """
        is_root, seen, planned = not seen, seen or {}, self.class_of(original)
        if id(original) in seen:
            return seen[id(original)]
        cls: Any = host_of(planned) if host or (called and not is_root) else planned
        if cls is nn.Linear and (called or not is_plain(original)):
            cls = CalledLinear
        made = seen[id(original)] = cls.__new__(cls)
        nn.Module.__init__(made)
        made.__dict__[CALL] = _forward_of(made)
        exact = (self.whole or is_recognised(planned)) and keeps_rates(original)
        # Dropout of attention draws numbers of its own, by its layout.
        off |= getattr(planned, "fused_attention_dropout", frozenset())
        for name, value in vars(original).items():
            # A proof compares with the host, which masks.
            if name not in PRIVATE and name not in ("forward", "fused_drop_path", CALL):
                rate: Any = self.rates.get((id(original), name), value) if exact else RATE
                made.__dict__[name] = self.setting(name, value, off, rate)
        for name, p in original._parameters.items():
            made._parameters[name] = None if p is None else self.tensor(p, True)  # type: ignore[assignment]
        for name, b in original._buffers.items():
            made._buffers[name] = None if b is None else self.tensor(b, False)
        for name, child in original._modules.items():
            if child is not None:
                inner = {n[len(name) + 1 :] for n in off if n.startswith(f"{name}.")}
                inner |= {"p"} if name in off else set()
                child = self.copy(child, host, called, seen, frozenset(inner))
            made._modules[name] = child
        derived = getattr(planned, "fused_derived", None)
        if derived is not None:
            made.__dict__.update(derived(made))
        if called and not is_root and not made._modules:
            made.register_forward_hook(lambda module, args, output: None)
        return made


def widths_of(modules: list[nn.Module]) -> tuple[set[int], set[int]]:
    """(sizes that are widths, sizes of a head)"""
    widths: set[int] = set()
    heads: set[int] = set()
    for module in modules:
        for name, value in vars(module).items():
            values = value if isinstance(value, (tuple, list)) else (value,)
            values = [v for v in values if type(v) is int]
            if name in ("head_dim", "attention_head_size", "dim_head", "head_size", "d_head"):
                heads.update(values)
            elif name in (
                "in_features",
                "out_features",
                "normalized_shape",
                "embed_dim",
                "d_model",
                "out_channels",
                "in_split",
                "attn_dim",
                "kv_dim",
                "all_head_size",
                "hidden_size",
                "dim",
                "inner_dim",
                "embedding_dim",
            ):
                widths.update(values)
        own = (p for p in module._parameters.values() if p is not None and p.ndim == 2)
        widths.update(len(p) for p in own if len(p) == 3 * p.shape[1])  # packed without a Linear
    counts = {n for m in modules for n in numbers_of_heads(m)}
    widths -= counts  # what a Linear gives for each head
    if not heads:  # by the number of heads, under whatever name
        parts = [w // n for n in counts for w in widths if w % n == 0]
        heads.update([min(parts)] if parts else [])
    return widths, heads


def numbers_of_heads(module: nn.Module) -> list[int]:
    """What a module's settings say about its number of heads."""
    return [
        v
        for n, v in vars(module).items()
        if type(v) is int and v > 0 and "head" in n and not re.search("dim|size|width", n)
    ]


def halved(modules: list[nn.Module], most: int) -> dict[int, int]:
    """Sizes for a copy of modules[0] with at most so many values; none change where it has them."""
    widths = [n for n in set().union(*widths_of(modules)) if n > 8]
    sizes: dict[int, int] = {}
    factor = 1
    while _values(modules[0], sizes) > most and 2 * factor < max(widths, default=0):
        factor *= 2
        sizes = {n: n // factor for n in widths}
    return sizes


def _values(module: nn.Module, sizes: dict[int, int]) -> int:
    tensors = (*module.parameters(), *module.buffers())
    return sum(math.prod(sizes.get(n, n) for n in t.shape) for t in tensors)


def sizes_of(modules: list[nn.Module]) -> list[dict[int, int]]:
    """Maps of sizes to smaller sizes for copies of modules[0], the smallest first; the last one
    changes nothing, or as little as LARGEST asks for. None for what is large however narrow."""
    every = [*_narrower(modules), halved(modules, LARGEST)]
    # sizes that differ, perhaps by a mistake, stay different
    every = [sizes for sizes in every if len({*sizes.values()}) == len(sizes)]
    if tables := shorter_tables(modules):
        every = [*(sizes | tables for sizes in every), *every]
    return [sizes for sizes in every if _values(modules[0], sizes) <= LARGEST]


def tables_of(module: nn.Module) -> list[int]:
    """The lengths of two tables of relative positions, along height and width."""
    lengths = [len(p) for p in module._parameters.values() if p is not None and p.ndim == 2]
    return lengths if len(lengths) == 2 and all(n % 2 for n in lengths) else []


def shorter_tables(modules: list[nn.Module]) -> dict[int, int]:
    """The lengths of such tables to those of a small grid; and the size of a window, which is a
    setting."""
    long = [n for m in modules for n in tables_of(m) if n > 7]
    taken = set().union(*widths_of(modules))
    sides = [(n + 1) // 2 for n in long]
    return dict.fromkeys(long, 7) | {n: 4 for n in sides if n not in taken}


def _narrower(modules: list[nn.Module]) -> Iterator[dict[int, int]]:
    """By one factor that divides all, then by the largest for a head, with widths that it does not
    divide rounded to even numbers."""
    widths, heads = widths_of(modules)
    every = [n for n in widths | heads if n > 8]
    if not every:
        return
    target, unit = (8, min(heads)) if heads else (16, min(every))
    common = math.gcd(*every)
    factors = range(unit // target, 1, -1)
    exact = [f for f in factors if unit % target or unit // f % target == 0 if common % f == 0]
    rounded = [f for f in factors if unit % f == 0]
    for f in dict.fromkeys((*exact[:1], *rounded[:1])):
        yield {n: n // f if n % f == 0 else 2 * (n // f // 2) for n in every}
