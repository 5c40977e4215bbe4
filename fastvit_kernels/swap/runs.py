"""Runs of a module's own forward on a small copy, for the search: on which tokens, with which
arguments, and which parts count."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .candidates import Refused, Unlike
from .copies import Copier, numbers_of_heads, shorter_tables, sizes_of
from .draws import Foreign, own_draws
from .facts import ClassOf, level_of
from .hosts import searched
from .hosts.fused import arguments_of, example, width_of
from .observe import Observation, observe
from .prove import DTYPES, first_line

TOKENS = 2400  # of a batch in a search

HEAVY = ("attention", "mlp", "block")  # levels of parts with a matmul


def open_parts(module: nn.Module, class_of: ClassOf) -> Iterator[tuple[str, nn.Module]]:
    """The parts that a run shows as one event each: those that are planned, leaves of torch, and
    what has weights but no matmul, such as a norm. It sees through all others."""
    for name, child in module.named_children():
        inner = list(child.modules())
        library = type(child).__module__.partition(".")[0]
        is_leaf = len(inner) == 1 and library == "torch"
        heavy = any(isinstance(m, nn.Linear) or level_of(class_of(m)) in HEAVY for m in inner)
        called = type(child).forward is not nn.Module.forward
        owned = next(child.parameters(), next(child.buffers(), None))
        small = called and not heavy and owned is not None
        attention = isinstance(child, (nn.MultiheadAttention, nn.Linear))
        if level_of(class_of(child)) or is_leaf or small or attention:
            yield name, child
        else:
            for rest, m in open_parts(child, class_of):
                yield f"{name}.{rest}", m


Extras = Callable[[Any, int], dict[str, Any]]  # (copy, tokens) -> arguments besides the first


def no_more(copy: Any, tokens: int) -> dict[str, Any]:
    return {}


def observed(
    module: nn.Module, class_of: ClassOf, training: bool, more: Extras = no_more
) -> Observation:
    """A run of the module's own forward on a copy: on tokens, else on a grid of tokens.

    Raises: Refused where it takes neither.
    """

    parts = [name for name, _ in open_parts(module, class_of)]
    failure: Exception | None = None
    tokens = [(s, False) for s in (*_lengths(module), (3, 5), (2, 3, 4))]
    every = [(d, s) for d in DTYPES for s in sizes_of(list(module.modules()))]
    copies: list[tuple[Copier, Any]] = []
    for shape, channels in (*tokens, ((2, 3, 4), True)):
        for place, (dtype, sizes) in enumerate(every):
            if place == len(copies):
                copier = Copier(sizes, class_of, whole=True, dtype=dtype, quick=True)
                copies.append((copier, copier.copy(module).train(training)))
            copier, copy = copies[place]
            x = example(copier.generator, *shape, width_of(copy)).detach().to(dtype)
            x = x.movedim(-1, 1).contiguous() if channels else x
            names, defaults, _ = arguments_of(type(copy).forward)
            if not names:
                raise Unlike("its forward names no argument")
            others = {n: None for n in names[1:] if n not in defaults}
            given = others | more(copy, shape[1])
            try:
                with own_draws():
                    return observe(copy, parts, (x,), given)
            except Refused:
                raise
            except Foreign as error:
                raise Refused(str(error)) from error
            except Exception as error:
                failure = failure or error
    raise Unlike(f"it could not be run: {first_line(failure) if failure else ''}")


def _lengths(module: nn.Module) -> list[tuple[int, ...]]:
    """Batch and tokens that a module may be made for, by the sizes of tables that it has."""
    found: list[tuple[int, ...]] = []
    shorter = shorter_tables(list(module.modules()))
    for m in module.modules():
        own = [b.shape for b in m._buffers.values() if b is not None and b.ndim == 2]
        square = [s[0] for s in own if s[0] == s[1]]
        longer = [s[0] + prefix for s in own if s[0] != s[1] for prefix in (1, 0)]
        found += [(2, T) for T in (*square, *longer)]
        tables = [p.shape[0] for p in m._parameters.values() if p is not None and p.ndim == 2]
        if len(tables) == 2 and all(n % 2 for n in tables):
            found.append((2, *((shorter.get(n, n) + 1) // 2 for n in tables)))
    return [*dict.fromkeys(s for s in found if math.prod(s) <= TOKENS)]


def is_mask(name: str) -> bool:
    """Whether an argument may be added to the scores, by its name."""
    return "mask" in name or "bias" in name


def angle_argument(module: Any) -> str | None:
    """The argument with RoPE's angles, by its name: it has no other mark."""
    names = arguments_of(type(module).forward).names[1:]
    return next((n for n in names if re.search("rope|rotary|position_emb", n)), None)


def angles_for(copy: Any, tokens: int, name: str, roles: Any) -> dict[str, Any]:
    """A pair of tables for an attention with these roles, or with heads of which we know less."""
    if roles is None:
        D = width_of(copy) // max(numbers_of_heads(copy), default=1)
    else:
        names = roles.projections
        packed = searched.part(copy, names[0]).out_features // roles.heads
        D, tokens = packed // (3 if len(names) == 1 else 1), tokens - roles.prefix
    generator = torch.Generator().manual_seed(3)
    dtype = next(copy.parameters()).dtype
    return {name: tuple(torch.randn(tokens, D, generator=generator, dtype=dtype) for _ in "sc")}


def extras_of_block(module: Any, class_of: ClassOf) -> list[Extras]:
    """What a block may hand on to its attention: RoPE's tables and a mask, or fewer of them."""
    names = arguments_of(type(module).forward).names[1:]
    masks = [n for n in names if is_mask(n)]
    for part, m in open_parts(module, class_of):
        roles = getattr(class_of(m), "fused_roles", None)
        if not isinstance(roles, searched.AttentionRoles):
            continue

        def more(copy: Any, tokens: int, mask: bool, part: str = part, roles: Any = roles) -> Any:
            angles = angle_argument(module) if roles.rope else None
            inner = copy.get_submodule(part)
            given = angles_for(inner, tokens, angles, roles) if angles else {}
            if mask:
                x = torch.zeros(3, tokens, 1, dtype=next(copy.parameters()).dtype)
                kind, reading = roles.masks[0]
                generator = torch.Generator().manual_seed(3)
                given[masks[0]] = searched.example_of_mask(
                    kind, "keys" in reading, x, generator, roles.heads
                )
            return given

        both = [partial(more, mask=True)] if masks and roles.mask else []
        return [*both, partial(more, mask=False)]
    return [no_more]
