"""Dynamo's graph as ATen operators above autograd and autocast: one spelling an operation.

    x.mul_(2), x *= 2, torch.mul(x, 2, out=x)     ->  aten.mul_.Tensor, its write in the schema
    F.linear, torch._C._nn.linear, nn.Linear      ->  aten.linear.default(x, weight, bias)
    nn.MultiheadAttention                         ->  linear, views, scaled_dot_product_attention

Then fake values go once more through the new graph, with grad mode and autocast entered for real:
each node's `val` and `region`. What tracing would lose in silence declines the whole graph; a call
that tracing cannot enter (a custom autograd.Function, cond, a tensor subclass) is kept as one
opaque node.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx.traceback as traceback
import torch.nn.attention
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from .graph import Decline, Region, dispatching
from .views import STATE, bound, op, state_of

# Methods without an ATen operator of their name that are made of such.
PYTHON_METHODS = set(
    "float double half bfloat16 int long short bool byte char type cpu cuda size dim ndimension "
    "numel nelement stride split repeat_interleave flip norm new_tensor new "
    "storage_offset is_floating_point is_complex is_contiguous get_device element_size "
    "__getitem__ __setitem__".split()
)
# What ATen has, but tracing does not see or not for good.
UNSEEN = set(
    "requires_grad_ retain_grad _backward backward set_ set_data data resize_ resize_as_ "
    "register_hook register_post_accumulate_grad_hook rename rename_ refine_names "
    "record_stream is_pinned pin_memory item".split()
)
MODULES = ("torch", "torch.nn.functional", "torch.functional", "torch._C", "torch._refs")


def normalised(gm: GraphModule, inputs: list[Any]) -> tuple[GraphModule, Any]:
    """The graph in ATen, with `val` and `region` in each node's meta; and the fake mode of them.

    Raises:
        Decline: where tracing would lose something.
    """
    check_traceable(gm)
    mode, given = fake_inputs(inputs)
    with mode, traceback.preserve_node_meta():
        made = make_fx(lambda *a: Tracing(gm, mode).run(*a), pre_dispatch=True)(*given)
    traced = outputs(made, "val")
    for body in bodies(made):
        without_idle_dropouts(body)
    Propagate(made, mode).run(*given)
    check_outputs(outputs(gm, "example_value"), outputs(made, "val"), traced)
    for body in bodies(made):
        without_borrowed_metadata(body)
    return made, mode


def bodies(gm: GraphModule) -> list[GraphModule]:
    """A graph and those of its checkpoints, whose nodes carry `val` like its own."""
    found = [gm]
    for n in gm.graph.nodes:
        if n.op == "call_function" and is_checkpoint(n.target):
            found += bodies(getattr(gm, n.args[0].target))
    return found


def fake_inputs(inputs: list[Any]) -> tuple[Any, list[Any]]:
    """The inputs in Dynamo's fake mode, with its choice of dynamic sizes."""
    context = torch._guards.TracingContext.get()
    mode = context.fake_mode
    given = []
    for x in inputs:
        if isinstance(x, Tensor) and getattr(x, "fake_mode", None) is not mode:
            how = context.tensor_to_context.get(x)
            tensor_source = None if how is None else how.tensor_source
            x = mode.from_tensor(
                x, static_shapes=how is None, symbolic_context=how, source=tensor_source
            )
        given.append(x)
    return mode, given


def is_checkpoint(target: Any) -> bool:
    return getattr(target, "__name__", "") == "tag_activation_checkpoint"


def is_higher_order(target: Any) -> bool:
    return isinstance(target, torch._ops.HigherOrderOperator)


def check_traceable(gm: GraphModule) -> None:
    """Only what tracing to ATen records may stand in Dynamo's graph."""
    for n in gm.graph.nodes:
        if n.op == "call_method" and not is_known_method(n.target) and not is_setting(n):
            raise Decline(f"Tensor.{n.target} is in the graph")
        if n.op == "call_module":
            raise Decline("a module is called whole in the graph")
        if n.op == "call_function" and not is_known_function(n.target):
            name = getattr(n.target, "__name__", n.target)
            told = (
                "the forward sets a tensor's .data" if name == "set_" else f"{name} is in the graph"
            )
            raise Decline(told)
        x = n.meta.get("example_value")
        if n.op == "placeholder" and isinstance(x, Tensor) and is_functorch(x):
            raise Decline("tensors of a function transform")


def is_setting(n: Node) -> bool:
    """Whether a node reads a float of the model that has changed since an earlier graph: Dynamo
    hands it over as a tensor of no axes."""
    if n.target != "item" or not isinstance(n.meta.get("example_value"), torch.SymFloat):
        return False
    return isinstance(n.args[0], Node) and n.args[0].op == "placeholder"


def is_functorch(x: Tensor) -> bool:
    return torch._is_functional_tensor(x) or torch._C._functorch.is_functorch_wrapped_tensor(x)


def has_operator(name: str) -> bool:
    return name not in UNSEEN and hasattr(torch.ops.aten, name)


def is_known_method(name: str) -> bool:
    return name in PYTHON_METHODS or has_operator(name) or has_operator(name.strip("_"))


def is_known_function(target: Any) -> bool:
    name = getattr(target, "__name__", "")
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return name.split(".")[0] not in UNSEEN
    if is_higher_order(target):
        return True
    module = getattr(target, "__module__", None) or ""
    if module in ("_operator", "math") or name in STATE or name.startswith("sym_"):
        return True
    if target is getattr or target in (min, max, abs, int, float, bool):
        return True
    if name in ("_log_api_usage_once", *CHOICES):  # torchvision's, of no effect
        return True
    if type(target).__name__.startswith("numpy_"):  # Dynamo's numpy, made of torch's operators
        return True
    known = module in MODULES or module.startswith("torch._C._") or not module
    return known and (name in FUNCTIONAL or has_operator(name))


# Which of its kernels torch's attention may take, in a `with sdpa_kernel(...)`.
CHOICES = ("_backend_from_string", "_sdpa_kernel")
FUNCTIONAL = {name for name in dir(nn.functional) if not name.startswith("_")}


class Tracing(Interpreter):
    """What make_fx runs. A checkpoint's body is normalised on its own; what tracing cannot enter
    is one node, written by hand."""

    def __init__(self, gm: GraphModule, mode: Any):
        super().__init__(gm)
        self.mode = mode

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if not isinstance(value, Tensor):
            return value
        tracer = proxy_tensor.get_proxy_mode().tracer  # type: ignore[union-attr]
        name = register(tracer, "constant", value)
        with proxy_tensor.disable_proxy_modes_tracing():
            fake = self.mode.from_tensor(value, static_shapes=True)
        made = tracer.create_proxy("get_attr", name, (), {})
        return proxy_tensor.track_tensor_tree(fake, made, constant=None, tracer=tracer)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if is_checkpoint(target):
            return self.checkpoint(target, args, kwargs)
        if getattr(target, "__name__", "") in CHOICES:
            return self.choice(target, args)
        if is_higher_order(target) or any(map(is_subclass, tree_leaves((args, kwargs)))):
            with proxy_tensor.disable_proxy_modes_tracing():
                out = super().call_function(target, args, kwargs)
            return written_by_hand(target, args, kwargs, out)
        return super().call_function(target, args, kwargs)

    def choice(self, target: Any, args: Any) -> Any:
        """Names stay names until the one call that chooses kernels by them."""
        if target.__name__ == "_backend_from_string":
            return args[0]
        return written_by_hand(choose_kernels, args, {}, None)

    def run_node(self, n: Node) -> Any:
        self.node = n
        return super().run_node(n)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        if is_setting(self.node):
            return written_by_hand(target, args, kwargs, self.node.meta["example_value"])
        if any(map(is_subclass, tree_leaves((args, kwargs)))):
            raise Decline("a method of a tensor subclass")
        return super().call_method(target, args, kwargs)

    def checkpoint(self, target: Any, args: Any, kwargs: Any) -> Any:
        body, *given = args
        check_traceable(body)
        with proxy_tensor.disable_proxy_modes_tracing():
            inner = make_fx(lambda *a: Tracing(body, self.mode).run(*a), pre_dispatch=True)(*given)
            out = Interpreter(inner).run(*given)
        inner.meta.update(body.meta)
        return written_by_hand(target, (inner, *given), kwargs, out)


def choose_kernels(names: list[str], *order: bool) -> None:
    """What torch.nn.attention.sdpa_kernel does at the start and at the end of its block."""
    chosen = [nn.attention._backend_from_string(name) for name in names]
    nn.attention._sdpa_kernel(chosen, *order)


def is_subclass(x: Any) -> bool:
    return isinstance(x, Tensor) and type(x) not in (Tensor, nn.Parameter, FakeTensor)


def register(tracer: Any, prefix: str, value: Any) -> str:
    name = tracer.get_fresh_qualname(prefix)
    if isinstance(value, nn.Module):
        tracer.root.register_module(name, value)
    else:
        setattr(tracer.root, name, value)
    return name


def written_by_hand(target: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """A node for a call that make_fx did not trace, its fake results tracked as its outputs."""
    tracer = proxy_tensor.get_proxy_mode().tracer  # type: ignore[union-attr]

    def proxied(x: Any) -> Any:
        if isinstance(x, GraphModule):
            return tracer.create_proxy("get_attr", register(tracer, "body", x), (), {})
        return tracer.unwrap_proxy(x)

    arguments, named = tree_map(proxied, (args, kwargs))
    kind = "call_method" if isinstance(target, str) else "call_function"
    made = tracer.create_proxy(kind, target, tuple(arguments), dict(named))
    return proxy_tensor.track_tensor_tree(out, made, constant=None, tracer=tracer)


def without_idle_dropouts(gm: GraphModule) -> None:
    """Eager's dropout of 0, or in evaluation, is its input; what fakes see would be a clone."""
    for n in gm.graph.nodes:
        if op(n) == "dropout":
            b = bound(n)
            if b["train"] is False or b["p"] == 0.0:
                n.replace_all_uses_with(b["input"])
                gm.graph.erase_node(n)
    gm.recompile()


def without_borrowed_metadata(gm: GraphModule) -> None:
    """x.new_empty(...) reads dtype and device alone: it is to keep no x alive."""
    for n in gm.graph.nodes:
        if op(n) == "new_empty" and n.meta["val"].layout == torch.strided:
            x = n.meta["val"]
            n.target, n.args = torch.ops.aten.empty.memory_format, (n.args[1],)
            n.kwargs = dict(dtype=x.dtype, device=x.device, pin_memory=False)
    gm.recompile()


class Propagate(Interpreter):
    """Fake values with modes entered for real: dtype, strides, requires_grad, region of a node."""

    def __init__(self, gm: GraphModule, mode: Any):
        super().__init__(gm, garbage_collect_values=False)
        self.mode = mode
        self.autocasts: list[Any] = []

    def run(self, *args: Any) -> Any:  # type: ignore[override]
        with self.mode, Region.here().entered():
            try:
                return super().run(*args)
            finally:  # of a graph that did not run to its end
                for autocast in reversed(self.autocasts):
                    autocast.__exit__(None, None, None)

    def run_node(self, n: Node) -> Any:
        n.meta["region"] = Region.here()
        is_run = n.target != "item" and n.target is not choose_kernels
        out = super().run_node(n) if is_run else n.meta.get("val")
        if state_of(n) == "_enter_autocast":
            self.autocasts.append(out)
        elif state_of(n) == "_exit_autocast":
            self.autocasts.remove(self.env[n.args[0]])
        else:
            n.meta["val"] = out
        return out

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        if isinstance(value, Tensor):
            return self.mode.from_tensor(value, static_shapes=True)
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if is_checkpoint(target):
            return Propagate(args[0], self.mode).run(*args[1:])
        with dispatching(args, kwargs):
            return super().call_function(target, args, kwargs)


def outputs(gm: GraphModule, key: str) -> list[Any]:
    leaves = tree_leaves(gm.graph.output_node().args[0])
    return [n.meta.get(key) if isinstance(n, Node) else n for n in leaves]


def check_outputs(dynamo: list[Any], made: list[Any], traced: list[Any]) -> None:
    """What the new graph returns is what Dynamo saw: dtype, sizes, need of a gradient, strides.

    Strides are compared before an idle dropout, a copy to fake values alone, was taken out.
    """
    for old, new, before in zip(dynamo, made, traced, strict=True):
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            same = isinstance(old, Tensor) == isinstance(new, Tensor)
        else:
            same = _facts(old) == _facts(new) and _strides(old) in (_strides(new), _strides(before))
        if not same:
            raise Decline("the normalised graph gives other outputs")


def _facts(x: Tensor) -> Any:
    return x.dtype, x.device, tuple(map(str, x.shape)), x.requires_grad


def _strides(x: Tensor) -> Any:
    return tuple(map(str, x.stride()))


def keep_sources(gm: GraphModule, made: GraphModule) -> None:
    """What AOTAutograd reads of a graph by Dynamo: where each input comes from."""
    made.meta.update(gm.meta)
    for name in ("_param_name_to_source", "compile_subgraph_reason"):
        if hasattr(gm, name):
            setattr(made, name, getattr(gm, name))
    pairs = zip(
        gm.graph.find_nodes(op="placeholder"), made.graph.find_nodes(op="placeholder"), strict=True
    )
    for old, new in pairs:
        for key, value in old.meta.items():
            new.meta.setdefault(key, value)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    known = {*dict(gm.named_parameters()), *dict(gm.named_buffers())}
    for name, constant in [*made.named_buffers(recurse=False)]:
        if name not in known:  # of torch.tensor(...): AOTAutograd would ask whose buffer it is
            delattr(made, name)
            made.__dict__[name] = constant


def forget_nodes(gm: GraphModule) -> None:
    """Leaves the code of a graph that is done. Erased nodes, too, name classes of the host, which
    may close over the model itself: it would live as long as Dynamo's reference to the graph."""
    for body in bodies(gm):
        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(body.graph, {}))
        for n in graph.nodes:
            n.meta.clear()
        body.graph = graph


def forget_fakes(gm: GraphModule) -> None:
    """Drops the fake values of a graph that is done: they must not live as long as it does."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            for n in module.graph.nodes:
                n.meta.pop("val", None)
