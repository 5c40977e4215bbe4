"""What a node's tensor is, and which elements of which storage it shows.

Fake tensors share storages as real ones do, so (storage, offset, shape, strides) of a view is its
element map, whatever chain of reshape, permute, unbind or chunk a model wrote. Rules compare maps.
A map is only followed back through a whitelist of operations, inside one region (grad mode,
autocast), at one dtype: `detach`, `.data` or a bit-cast is no transparent view.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

STATE = {"_enter_autocast", "_exit_autocast", "_set_grad_enabled"}
# One result, a view of the first argument (or a copy of it: then the storages differ).
VIEWS = set(
    "view reshape permute transpose unflatten flatten select slice squeeze unsqueeze expand t "
    "movedim narrow swapaxes swapdims moveaxis view_as expand_as reshape_as numpy_T mT alias "
    "contiguous to".split()
)
SEVERAL_VIEWS = {"unbind", "chunk", "split", "split_with_sizes", "tensor_split"}
# Those that keep the order in which a row-major walk meets the elements, copied or not.
ORDER_KEEPING = set(
    "view reshape unflatten flatten squeeze unsqueeze view_as reshape_as contiguous clone "
    "alias".split()
)
# Whose elements are whatever memory held.
UNSET = set("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())
CASTS = {"to", "_to_copy", "type_as"}


def op(n: Any) -> str:
    """ATen's name of a call without its overload; ours as "fk.<name>"; "" for anything else, and
    for a view of the bits as another dtype, which ends a gradient."""
    if not isinstance(n, Node) or n.op != "call_function":
        return ""
    if n.meta.get("ours"):
        return "fk." + n.target.__name__
    if isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "aten":
        return "" if n.target is torch.ops.aten.view.dtype else n.target._opname
    return ""


def state_of(n: Node) -> str:
    """The name of a node that only changes grad mode or autocast, else ""."""
    name = getattr(n.target, "__name__", "") if n.op == "call_function" else ""
    return name if name in STATE else ""


def val(n: Any) -> Any:
    """The fake value of a node; anything else stands for itself."""
    return n.meta.get("val") if isinstance(n, Node) else n


def is_tensor(n: Any) -> bool:
    return isinstance(n, Node) and isinstance(n.meta.get("val"), Tensor)


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def shape(n: Node) -> tuple[Any, ...]:
    return tuple(val(n).shape)


def hint(size: Any) -> int:
    """A size as a number, for counting alone: it makes no guard."""
    if isinstance(size, int):
        return size
    found = size.node.hint
    return found if isinstance(found, int) else 1  # a length that differs by sample has none


def eq(a: Any, b: Any) -> bool:
    """Equal whatever the dynamic sizes are: asking makes no guard."""
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(eq, a, b))
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(statically_known_true(a == b))


def filled(n: Node) -> bool:
    """Whether a tensor has elements; a dynamic size counts as at least one (Dynamo guards 0)."""
    return all(not isinstance(s, int) or s > 0 for s in shape(n))


def bound(n: Node) -> dict[str, Any]:
    """All arguments of an ATen call by their names in the schema, defaults included."""
    found = {}
    for i, argument in enumerate(n.target._schema.arguments):  # type: ignore[union-attr]
        given = (
            n.args[i] if i < len(n.args) else n.kwargs.get(argument.name, argument.default_value)
        )
        found[argument.name] = given
    return found


def input_of(n: Node) -> Any:
    """The first argument, by position or by name: what a view is of."""
    return n.args[0] if n.args else next(iter(n.kwargs.values()), None)


class View(NamedTuple):
    """An element map."""

    storage: int
    offset: Any
    shape: tuple[Any, ...]
    stride: tuple[Any, ...]

    def turned(self, *order: int) -> View:
        """Its axes in another order."""
        shape = tuple(self.shape[i] for i in order)
        return self._replace(shape=shape, stride=tuple(self.stride[i] for i in order))


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def view(n: Node) -> View:
    x = val(n)
    return View(storage_of(x), x.storage_offset(), tuple(x.shape), tuple(x.stride()))


def same_strides(shape: Any, a: Any, b: Any) -> bool:
    """Strides of axes of size 1 do not matter."""
    return all(eq(s, 1) or eq(p, q) for s, p, q in zip(shape, a, b, strict=True))


def same_map(a: View, b: View) -> bool:
    return (
        a.storage == b.storage
        and eq(a.shape, b.shape)
        and eq(a.offset, b.offset)
        and same_strides(a.shape, a.stride, b.stride)
    )


def same_kind(n: Node, base: Node) -> bool:
    """One dtype, device, region and need of a gradient, no lazy conjugate or negative."""
    a, b = val(n), val(base)
    return (
        in_one_region(n, base)
        and (a.dtype, a.device, a.requires_grad) == (b.dtype, b.device, b.requires_grad)
        and (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
    )


def in_one_region(n: Node, base: Node) -> bool:
    """One grad mode and autocast; an input knows no autocast, but a view of it under no_grad is
    cut from its gradient, whatever a fake value says of it."""
    here, there = n.meta["region"], base.meta["region"]
    if base.op == "call_function":
        return here == there
    return (here.grad, here.inference) == (there.grad, there.inference)


def view_base(n: Node) -> Node | None:
    """What a node is a plain view of, one step back."""
    base = None
    if op(n) in VIEWS:
        base = input_of(n)
    elif (
        n.op == "call_function" and n.target is operator.getitem and op(n.args[0]) in SEVERAL_VIEWS
    ):
        base = input_of(n.args[0])  # type: ignore[arg-type]
    if not is_tensor(n) or not is_tensor(base) or not same_kind(n, base):
        return None
    return base if storage_of(val(n)) == storage_of(val(base)) else None


def step_back(n: Node, base: Node, path: list[Node]) -> Node:
    """Adds the nodes between n and its base to the path."""
    path.append(n)
    if n.target is operator.getitem:
        path.append(n.args[0])  # type: ignore[arg-type]
    return base


def source(n: Node, path: list[Node]) -> Node:
    """Back through plain views to the node that made the storage; the path collects them."""
    while (base := view_base(n)) is not None:
        n = step_back(n, base, path)
    return n


def origin(n: Node, path: list[Node]) -> tuple[Node, View]:
    """What n shows elements of, back through plain views and dense copies, and n's map in it.

    A copy may be left out since `Graph.absorb` sees that nothing writes to it.
    """
    base, where = source(n, path), view(n)
    while (copied_from := dense_copy_of(base)) is not None:
        through = composed(where, copied_from)
        if through is None:
            break
        path.append(base)
        base, where = source(copied_from, path), through
    return base, where


def dense_copy_of(n: Node) -> Node | None:
    """What a row-major copy has the elements of, in the same order."""
    if op(n) not in ("contiguous", "clone", "reshape", "flatten"):
        return None
    base = input_of(n)
    if not is_tensor(base) or not same_kind(n, base):
        return None
    return base if val(n).is_contiguous() and storage_of(val(n)) != storage_of(val(base)) else None


def composed(where: View, base: Node) -> View | None:
    """A map into a dense copy of base, as a map into base's storage."""
    inner = view(base)
    steps, step = [], 1
    for size in reversed(inner.shape):
        steps.insert(0, step)
        step = step * size
    start = unravelled(where.offset, steps)
    if start is None:
        return None
    used = list(start)
    strides = []
    for size, stride in zip(where.shape, where.stride, strict=True):
        if eq(size, 1):
            strides.append(0)
            continue
        for axis, unit in enumerate(steps):
            times = 1 if eq(stride, unit) else multiple(stride, unit)
            if times and statically_known_true(used[axis] + (size - 1) * times < inner.shape[axis]):
                used[axis] = used[axis] + (size - 1) * times
                strides.append(inner.stride[axis] * times)
                break
        else:
            return None
    offset = inner.offset + sum(a * b for a, b in zip(start, inner.stride, strict=True))
    return View(inner.storage, offset, where.shape, tuple(strides))


def multiple(stride: Any, unit: Any) -> int:
    both_known = isinstance(stride, int) and isinstance(unit, int) and unit > 0
    return stride // unit if both_known and stride % unit == 0 else 0


def unravelled(offset: Any, steps: list[Any]) -> list[int] | None:
    """The index of a dense tensor's element at an offset, or None where it is not plain."""
    index = [0] * len(steps)
    if isinstance(offset, int) and all(isinstance(step, int) for step in steps):
        for axis, step in enumerate(steps):
            index[axis], offset = divmod(offset, step)
        return index
    for axis, step in enumerate(steps):
        for times in range(4):
            if eq(offset, times * step):
                index[axis] = times
                return index
    return None


def same_place(a: Node, b: Node) -> bool:
    """One tensor; that nobody writes to it between the two reads, `absorb` sees."""
    return a is b or (source(a, []) is source(b, []) and same_map(view(a), view(b)))


def same_tensor(n: Any, path: list[Node]) -> Any:
    """Back through what changes neither a value nor its index: views to the same map, and copies.

    A copy may be left out since `Graph.absorb` sees that nothing writes to it.
    """
    while isinstance(n, Node):
        base = view_base(n)
        if base is None or not same_map(view(n), view(base)):
            base = copied(n)
        if base is None:
            return n
        n = step_back(n, base, path)
    return n


def copied(n: Node) -> Node | None:
    """What a clone or contiguous is a copy of, elementwise."""
    if op(n) not in ("clone", "contiguous") or not is_tensor(n):
        return None
    base = input_of(n)
    return base if is_tensor(base) and same_kind(n, base) and eq(shape(n), shape(base)) else None


WIDE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a cast from the other floating dtype is exact. Not to or from 8 bits."""
    return dtype in WIDE and other in WIDE and torch.promote_types(dtype, other) == dtype


def uncast(n: Any, path: list[Node], rounds: bool = False) -> Any:
    """Back through what `same_tensor` leaves out and casts to a wider floating dtype, which are
    exact; with `rounds` also through those to a narrower one."""
    while isinstance(n, Node):
        n = same_tensor(n, path)
        if op(n) not in CASTS or not is_tensor(base := input_of(n)):
            return n
        a, b = val(n), val(base)
        if not (holds(a.dtype, b.dtype) or (rounds and holds(b.dtype, a.dtype))):
            return n
        if not in_one_region(n, base) or not eq(shape(n), shape(base)):
            return n
        if (a.device, a.requires_grad) != (b.device, b.requires_grad):
            return n
        path.append(n)
        n = base
    return n
