"""A normalised graph with what rules ask of it: order, writes, regions; and the one way to rewrite.

A rule reads the graph, raises `Decline` with a phrase that a person understands, or calls

    gone = g.absorb(nodes, root)    # may these nodes go, and root be computed anew?
    new = g.emit(root, fk.mlp, x, ..., like=root)    # the new call, with root's metadata
    g.replace(root, new, gone)

`absorb` holds what no rule may forget: everything absorbed is pure, in root's region (grad mode,
autocast), read by nothing else, and neither it nor what it reads is written to before root.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import SymInt, Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from .dynamo import module_path
from .views import (
    SEVERAL_VIEWS,
    VIEWS,
    bound,
    eq,
    hint,
    is_tensor,
    op,
    same_strides,
    shape,
    state_of,
    storage_of,
    val,
)

aten = torch.ops.aten
DEVICES = tuple(kind for kind in ("cpu", "cuda") if torch.amp.is_autocast_available(kind))
TELL_STRIDES = {"as_strided", "set_", "resize", "stride", "is_contiguous", "empty_like"}
LINEARS = (torch.nn.functional.linear, aten.linear.default)
# Their schemas hide that they write to running statistics or to a weight.
HIDDEN_WRITES = {"batch_norm", "instance_norm", "_batch_norm_impl_index", "embedding_renorm"}


def path_of(n: Node) -> str:
    """The path of the innermost module that made a node, as Dynamo recorded it."""
    stack = list((n.meta.get("nn_module_stack") or {}).values())
    return module_path(str(stack[-1][0])) if stack else ""


def called(n: Node) -> str:
    """A node by its module and operation, as "fc1's linear"; alike in all blocks that repeat."""
    module = path_of(n).rpartition(".")[2]
    name = op(n).removeprefix("fk.") or n.name
    return f"{module}'s {name}" if module and not module.isdigit() else name


class Decline(Exception):
    """Why a rule, or the whole rewriting, leaves things as they are."""


def need(condition: Any, why: str) -> None:
    if not condition:
        raise Decline(why)


class Region(NamedTuple):
    """The state in which a node runs."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]

    @staticmethod
    def here() -> Region:
        on = [k for k in DEVICES if torch.is_autocast_enabled(k)]
        autocast = tuple((k, torch.get_autocast_dtype(k)) for k in on)
        return Region(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        on = dict(self.autocast)
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind in DEVICES:
                autocast = torch.autocast(kind, dtype=on.get(kind), enabled=kind in on)
                stack.enter_context(autocast)
            yield


def dispatching(*values: Any) -> contextlib.AbstractContextManager[Any]:
    """The context for fake values: some operators take symbolic sizes, or tensors of such, in
    Python alone."""
    symbolic = any(
        isinstance(x, SymInt) or getattr(x, "_has_symbolic_sizes_strides", False)
        for x in tree_leaves(values)
    )
    return enable_python_dispatcher() if symbolic else contextlib.nullcontext()


def storages(values: Any) -> set[int]:
    return {storage_of(x) for x in tree_leaves(values) if isinstance(x, Tensor)}


def is_opaque(n: Node) -> bool:
    """A call of which nothing is known: all but ATen, ours, sizes and the state's nodes."""
    if n.op != "call_function":
        return n.op in ("call_module", "call_method")
    if n.target is operator.getitem or n.meta.get("ours") or state_of(n):
        return False
    if not isinstance(n.target, torch._ops.OpOverload):  # arithmetic of sizes is no tensor's
        return bool(storages(val(n))) or any(storages(val(a)) for a in n.all_input_nodes)
    return n.target.namespace not in ("aten", "prims") or n.target._opname in HIDDEN_WRITES


def is_foreign_linear(n: Node) -> bool:
    """Whether a linear has a tensor subclass as its weight, a quantised one for example: opaque,
    but it only reads."""
    return n.op == "call_function" and n.target in LINEARS and is_opaque(n)


def writes(n: Node) -> set[int]:
    """Storages that a node may write to, by its operator's schema."""
    if is_opaque(n):
        if is_foreign_linear(n):
            return set()
        return storages([val(a) for a in n.all_input_nodes])
    if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
        return set()
    found: set[int] = set()
    for i, argument in enumerate(n.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = n.args[i] if i < len(n.args) else n.kwargs.get(argument.name)
            found |= storages(torch.fx.map_arg(given, val))
    return found


def draws(n: Node) -> bool:
    """Whether a node advances a random generator."""
    if n.meta.get("ours"):
        return n.kwargs.get("dropout_p", 0.0) != 0.0 or n.target.__name__ == "keep_samples"
    if op(n) == "scaled_dot_product_attention":  # tagged at a probability of 0 too
        return bound(n)["dropout_p"] != 0.0
    is_operator = isinstance(n.target, torch._ops.OpOverload)
    return is_operator and torch.Tag.nondeterministic_seeded in n.target.tags


def may_draw(n: Node) -> bool:
    """As `draws`, of what is unknown too."""
    return draws(n) or (is_opaque(n) and not is_foreign_linear(n))


def is_pure(n: Node) -> bool:
    if n.op != "call_function" or is_opaque(n) or state_of(n):
        return False
    return not writes(n) and not draws(n)


class Graph:
    """One graph while rules rewrite it."""

    def __init__(self, graph: torch.fx.Graph, fake_mode: Any):
        self.graph, self.fake_mode = graph, fake_mode
        self.fired: Counter[str] = Counter()
        self.reasons: dict[Node, dict[str, str]] = {}  # why each rule left a node, the last last
        self.apart: list[tuple[str, str, str]] = []  # name, op, reason: ours, but not as one op
        self.failed: list[str] = []  # rules that raised other than Decline
        self.made: list[Node] = []  # emitted by the rule under way
        self.number()

    def number(self) -> None:
        """The order of the nodes, and who writes where."""
        self.order = {n: float(i) for i, n in enumerate(self.graph.nodes)}
        self.written = [(n, w) for n in self.graph.nodes if (w := writes(n))]

    def find(self, *names: str) -> list[Node]:
        return [n for n in self.graph.nodes if op(n) in names]

    def is_untouched(self, n: Node) -> bool:
        """Whether nothing in the graph writes to what n shows: its operation tells its value."""
        own = storages(val(n))
        return not any(own & w for _, w in self.written)

    def writer(self, tensors: Iterable[Node], since: Node, until: Node) -> Node | None:
        """The first node between the two that may write to one of these."""
        own = storages([val(n) for n in tensors])
        start, end = self.order[since], self.order[until]
        found = (n for n, w in self.written if start < self.order[n] < end and own & w)
        return next(found, None)

    def handed_out(self) -> set[int]:
        """Where what the graph gives lies: its caller may write there."""
        return storages(list(map(val, self.graph.output_node().all_input_nodes)))

    def absorb(self, nodes: Iterable[Node], root: Node, *, draw: Node | None = None) -> list[Node]:
        """The nodes that go once root is computed anew from what they read.

        Views that others read too stay. `draw`: the one node among them that may draw random
        numbers, as the replacement will.
        """
        inner = [n for n in dict.fromkeys(nodes) if n is not root]
        for n in (*inner, root):
            known = n.op == "call_function" and not is_opaque(n) and not state_of(n)
            need(known and not writes(n), f"{called(n)} writes or is unknown")
            need(n is draw or not draws(n), f"{called(n)} draws random numbers")
            need(
                n.meta["region"] == root.meta["region"], f"{called(n)}: other grad mode or autocast"
            )
        if draw is not None and draw is not root:
            start, end = self.order[draw], self.order[root]
            between = [n for n in self.graph.nodes if start < self.order[n] < end]
            need(not any(map(may_draw, between)), "other random numbers are drawn in between")
        gone = self.only_for(root, inner)
        for n in inner:
            is_view = op(n) in VIEWS | SEVERAL_VIEWS or n.target is operator.getitem
            need(n in gone or is_view, f"{called(n)} is read elsewhere too")
            need(n in gone or not self.is_shown(n), f"{called(n)} is given to the caller")
        if self.written:
            for n in (*inner, root):
                reads = (*n.all_input_nodes, n)
                need(self.writer(reads, n, root) is None, f"{called(n)} is written to")
        return [n for n in inner if n in gone]

    def is_shown(self, n: Node) -> bool:
        """Whether the caller gets n, with a gradient that would go around it: not where it is, at
        run time, the tensor that it is made of."""
        base = n.all_input_nodes[0]
        is_base = op(n) in ("contiguous", "to") and storage_of(val(n)) == storage_of(val(base))
        given = self.graph.output_node().all_input_nodes
        return is_tensor(n) and val(n).requires_grad and n in given and not is_base

    @staticmethod
    def only_for(root: Node, nodes: list[Node]) -> set[Node]:
        """Those that nothing reads but root and each other."""
        gone = set(nodes)
        changed = True
        while changed:
            kept = {n for n in gone if any(u is not root and u not in gone for u in n.users)}
            changed = bool(kept)
            gone -= kept
        return gone

    def emit(
        self, root: Node, function: Any, *args: Any, like: Node | None = None, **kwargs: Any
    ) -> Node:
        """A call before root. `like`: the node whose dtype, shape, strides and need of a gradient
        it must give, or Decline; strides cost a copy where they differ."""
        args, kwargs = tree_map_only(SymInt, lambda s: self.size(s, root), (args, kwargs))
        given, named = torch.fx.map_arg((args, kwargs), val)
        region = root.meta["region"]
        with self.fake_mode, dispatching(given, named), region.entered():
            out = function(*given, **named)
        with self.graph.inserting_before(root):
            n = self.graph.call_function(function, args, kwargs)
        ours = not isinstance(function, torch._ops.OpOverload) and function is not operator.getitem
        n.meta.update(val=out, region=region, ours=ours)
        for name in ("nn_module_stack", "stack_trace"):
            if name in root.meta:
                n.meta[name] = root.meta[name]
        self.made.append(n)
        self.order[n] = self.order[root] - 0.5
        return n if like is None else self.laid_out(root, n, like)

    def size(self, size: SymInt, root: Node) -> Node:
        """The node before root that gives a dynamic size: a graph has no other word for it."""
        before = takewhile(lambda n: n is not root, self.graph.nodes)
        found = next((n for n in before if isinstance(val(n), SymInt) and eq(val(n), size)), None)
        need(found is not None, "a dynamic size that the graph does not compute")
        return found  # type: ignore[return-value]

    @staticmethod
    def check_alike(n: Node, like: Node) -> None:
        """Decline unless n has the metadata of `like`, strides aside."""
        a, b = val(n), val(like)
        need(a.dtype == b.dtype, f"{op(n)} gives {a.dtype}, the model {b.dtype}")
        need(eq(tuple(a.shape), tuple(b.shape)), f"{op(n)} gives another shape")
        need(a.device == b.device, f"{op(n)} is on {a.device}, the model's on {b.device}")
        need(a.requires_grad == b.requires_grad, f"{op(n)}: another need of a gradient")

    def laid_out(self, root: Node, n: Node, like: Node) -> Node:
        """n, or a copy of it, with the metadata of `like`."""
        self.check_alike(n, like)
        a, b = val(n), val(like)
        if same_strides(a.shape, a.stride(), b.stride()):
            return n
        order = sorted(range(b.ndim), key=lambda i: -hint(b.stride(i)))
        n = self.emit(root, aten.permute.default, n, order)
        n = self.emit(root, aten.contiguous.default, n)
        n = self.emit(root, aten.permute.default, n, [order.index(i) for i in range(b.ndim)])
        need(same_strides(b.shape, val(n).stride(), b.stride()), "strides of the model's result")
        return n

    def restride(self, root: Node, new: Node) -> dict[Node, Any]:
        """Fake values of all that depends on root, were it to have the strides of new.

        Raises Decline where that would be seen: in a result, by a write, an operator that may tell
        strides, or random numbers, which are drawn in the order in which elements lie.
        """
        found: dict[Node, Any] = {root: val(new)}
        shown: set[int] = set()  # where what was a copy becomes a view
        written = {s for _, w in self.written for s in w}
        for n in self.graph.nodes:
            if self.order[n] <= self.order[root] or not found.keys() & set(n.all_input_nodes):
                continue
            if n.op == "output":
                same = all(
                    have_same_strides(val(a), found.get(a, val(a))) for a in n.all_input_nodes
                )
                need(same, "strides of the model's result")
                given = storages([found.get(a, val(a)) for a in n.all_input_nodes])
                need(not given & shown, "a copy in the model's result that becomes a view")
                continue
            old = storages([val(n), *(val(a) for a in n.all_input_nodes)])
            plain = is_pure(n) and op(n) not in TELL_STRIDES and not old & written
            need(plain, f"{n.name} may tell strides")
            given, named = torch.fx.map_arg((n.args, n.kwargs), lambda a: found.get(a, val(a)))
            with self.fake_mode, n.meta["region"].entered():
                out = n.target(*given, **named)  # type: ignore[operator]
            shared = storages(out) & storages((given, named))
            if not storages(val(n)) & storages([val(a) for a in n.all_input_nodes]):
                shown |= shared
            if shared or not have_same_strides(val(n), out):
                found[n] = out
        return found

    def replace(
        self,
        root: Node,
        new: Node,
        gone: Iterable[Node],
        rule: str,
        found: dict[Node, Any] | None = None,
    ) -> None:
        """Root's readers read new; root and what went with it are erased. Where new has other
        strides, `found` is what `restride` gave."""
        for n, out in (found or {}).items():
            n.meta["val"] = out
        shown = self.views_of(root, new)
        root.replace_all_uses_with(new)
        for n, out in shown.items():
            n.meta["val"] = out
        if shown and self.written:
            self.number()
        self.fired[rule] += 1
        self.made.clear()
        self.erase(self.in_order({root, *gone}))

    def views_of(self, root: Node, new: Node) -> dict[Node, Any]:
        """Fake values of what shares root's storage, once it is of new's."""
        old = storages(val(root)) - storages(val(new))
        found: dict[Node, Any] = {}
        todo = self.readers(root) if old else []
        for n in todo:
            if n.op != "call_function" or n in found or not storages(val(n)) & old:
                continue
            seen = {root: val(new), **found}
            given, named = torch.fx.map_arg((n.args, n.kwargs), lambda a: seen.get(a, val(a)))  # noqa: B023
            with self.fake_mode, n.meta["region"].entered():
                found[n] = n.target(*given, **named)  # type: ignore[operator]
            todo += self.readers(n)
        return found

    def erase(self, nodes: list[Node]) -> None:
        """Those that nothing reads, the last first."""
        for n in reversed(nodes):
            if not n._erased and not n.users:
                self.graph.erase_node(n)

    def apply(self, rule: Callable[[Graph, Node], None], names: Iterable[str]) -> None:
        """A rule at each node of these names; what it emitted goes where it declines."""
        self.number()
        for n in self.find(*names):
            if n._erased:
                continue
            try:
                rule(self, n)
            except Decline as reason:
                self.give_reason(n, rule, str(reason))
            except Exception as error:
                why = f"the rule {rule.__name__} failed: {type(error).__name__}"
                self.give_reason(n, rule, why)
                self.failed.append(why)
            self.undo()

    def give_reason(self, n: Node, rule: Callable[[Graph, Node], None], why: str) -> None:
        said = self.reasons.setdefault(n, {})
        said.pop(rule.__name__, None)
        said[rule.__name__] = why

    def reason(self, n: Node, default: str = "") -> str:
        """The last word on why a node was left."""
        return next(reversed(self.reasons.get(n, {}).values()), default)

    def undo(self, since: int = 0) -> None:
        """Erase what a rule emitted, but for its first nodes, and did not use."""
        self.erase(self.made[since:])
        del self.made[since:]

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """A way of a rule that may decline, after which it tries the next."""
        before = len(self.made)
        try:
            yield
        except Exception as error:
            self.undo(before)
            if isinstance(error, Decline):
                raise
            raise Decline(f"an op refused its arguments ({type(error).__name__})") from error

    def in_order(self, nodes: Iterable[Node]) -> list[Node]:
        return sorted(nodes, key=self.order.__getitem__)

    def readers(self, n: Node) -> list[Node]:
        return self.in_order(n.users)

    def only_reader(self, n: Node) -> Node | None:
        return next(iter(n.users)) if len(n.users) == 1 else None


def have_same_strides(a: Any, b: Any) -> bool:
    """Whether two values' tensors, in their order, lie alike."""
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    tensors = [(x, y) for x, y in pairs if isinstance(x, Tensor)]
    return all(same_strides(x.shape, x.stride(), y.stride()) for x, y in tensors)


def is_float(n: Any) -> bool:
    return is_tensor(n) and val(n).is_floating_point()


def same_shape(a: Node, b: Node) -> bool:
    return eq(shape(a), shape(b))
