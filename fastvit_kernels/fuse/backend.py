"""torch.compile(model, backend="fastvit_kernels"): Dynamo captures and guards, rules put ops in.

Dynamo's graph -> normalise -> rules -> options -> AOTAutograd and Inductor, or eager
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, noop_context_fn

from .dynamo import guard_hooks
from .graph import Decline, Graph, is_foreign_linear, path_of, writes
from .normalise import bodies, forget_fakes, forget_nodes, is_checkpoint, keep_sources, normalised
from .once import decided_once, mark
from .options import PAIRS, drop_path_skip, drop_path_skip_of_any_batch, memory_low
from .report import GraphReport, Left, record
from .rules import RULES
from .rules.epilogue import BRANCHES
from .settings import Options
from .views import hint, is_tensor, op, shape, storage_of, val

PRODUCTS = set(
    "linear matmul mm bmm addmm baddbmm einsum conv1d conv2d conv3d convolution "
    "scaled_dot_product_attention".split()
)


def fastvit_kernels(
    gm: GraphModule,
    example_inputs: list[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The entry point of torch.compile's `backend="fastvit_kernels"`.

    Args:
        mode: torch.compile's own, such as "reduce-overhead".
        options: {"compiler": "inductor" or "eager", "memory": "default" or "low",
            "drop_path": "mask" or "skip"}; all others are Inductor's.
    """
    ours = Options.read(options, mode)
    made = rewrite(gm, example_inputs, ours)
    if ours.compiler == "eager":
        run_checkpoints(made)
        run = decided_once(made) if made is not gm else made.forward
    else:
        if made is not gm:
            keep_sources(gm, made)
        run = by_inductor(made, example_inputs, mode, ours.rest)
    if made is gm:
        return run
    if ours.compiler == "eager":
        forget_nodes(made)
    if written := made.meta["written"]:
        run = where_apart(run, gm.forward, written)
        forget_nodes(gm)
    return run


def rewrite(gm: GraphModule, inputs: list[Any], options: Options) -> GraphModule:
    """The graph with our ops in it; the graph as Dynamo gave it where that cannot be."""
    report = GraphReport()
    try:
        # Fake values have gradients, too. The caller's hooks must not see what they save, and no
        # backward runs: a kept output would hold its own graph, and that the output, for good.
        with torch.autograd.graph.saved_tensors_hooks(keep_nothing, keep_nothing):
            made, mode = normalised(gm, inputs)
            for body in bodies(made):
                rewrite_body(body, mode, options, report, is_whole=body is made)
            made.meta["written"] = written_inputs(made) if report.rules else []
            mark(made)
        forget_fakes(made)
    except Decline as reason:
        made, report = gm, GraphReport(declined=str(reason))
    except Exception as error:
        why = f"rewriting failed: {one_line(error)}"
        made, report = gm, GraphReport(declined=why, failed=[why])
    if report.declined is not None:
        count_declined(gm, report)
    record(report, [x for x in inputs if isinstance(x, nn.Parameter)], gm)
    guard_hooks()
    return made


def written_inputs(made: GraphModule) -> list[int]:
    """Which inputs' memory the graph writes to."""
    written = {storage for n in made.graph.nodes for storage in writes(n)}
    inputs = enumerate(made.graph.find_nodes(op="placeholder"))
    return [i for i, n in inputs if is_tensor(n) and storage_of(val(n)) in written]


def where_apart(
    run: Callable[..., Any], captured: Callable[..., Any], written: list[int]
) -> Callable[..., Any]:
    """The rules asked which tensors shared memory in the first call, which no guard holds: where
    others share an input's that is written to, the graph runs as it was captured."""

    def call(*inputs: Any) -> Any:
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        users = (x for i in written for x in tensors if share_memory(x, inputs[i]))
        return (run if len(list(users)) == len(written) else captured)(*inputs)

    return call


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Whether storages overlap: of NumPy's or DLPack's memory there may be several."""
    mine, other = a.untyped_storage(), b.untyped_storage()
    if mine._cdata == other._cdata:
        return True
    a_ptr, b_ptr = mine.data_ptr(), other.data_ptr()
    return a.device == b.device and a_ptr < b_ptr + other.nbytes() and b_ptr < a_ptr + mine.nbytes()


def keep_nothing(x: Any) -> None:
    """As a hook on what autograd saves."""


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]


def rewrite_body(
    gm: GraphModule, mode: Any, options: Options, report: GraphReport, is_whole: bool
) -> None:
    """The rules over one graph, in order, then the options."""
    g = Graph(gm.graph, mode)
    report.flops += sum(map(flops_of, gm.graph.nodes))
    for rule in RULES:
        g.apply(rule.apply, rule.roots)
    if options.drop_path == "skip":
        is_run = options.compiler == "eager"
        g.apply(drop_path_skip_of_any_batch if is_run else drop_path_skip, BRANCHES)
    # a checkpoint keeps nothing of its body
    if options.memory == "low" and is_whole:
        g.apply(memory_low, PAIRS)
    for n in gm.graph.nodes:
        if flops := flops_of(n):
            reason = g.reason(n, "no rule for this operation")
            if is_foreign_linear(n):
                reason = "its weight or input is a tensor subclass: it is called as it is"
            report.left.append(Left(path_of(n), product_name(n), flops, reason))
        elif op(n) in ("layer_norm", "rms_norm"):
            report.left.append(Left(path_of(n), op(n), 0, g.reason(n)))
    report.left += [Left(name, kind, 0, why) for name, kind, why in g.apart]
    report.rules += g.fired
    report.failed += g.failed
    report.fused_flops = report.flops - sum(left.flops for left in report.left)
    gm.graph.lint()
    gm.recompile()


def run_checkpoints(gm: GraphModule) -> None:
    """Without a compiler torch.compile's node for a checkpoint neither recomputes nor keeps the
    random state: torch.utils.checkpoint itself does."""
    for body in bodies(gm):
        calls = [n for n in body.graph.nodes if n.op == "call_function" and is_checkpoint(n.target)]
        for n in calls:
            keeps_rng = n.kwargs.get("preserve_rng_state", True)
            n.target, n.kwargs = checkpointed, {"preserve_rng_state": keeps_rng}
        if calls:
            body.recompile()


def checkpointed(body: GraphModule, *args: Any, preserve_rng_state: bool) -> Any:
    options = dict(use_reentrant=False, preserve_rng_state=preserve_rng_state)
    policy = body.meta.get("_checkpoint_context_fn", noop_context_fn)
    return checkpoint(body, *args, **options, context_fn=policy)


def by_inductor(
    gm: GraphModule, inputs: list[Any], mode: str | None, options: dict[str, Any]
) -> Callable[..., Any]:
    """AOTAutograd and Inductor, by torch.compile's own mode and options."""
    import torch._inductor as inductor
    from torch._inductor.compile_fx import compile_fx

    patches = {**inductor.list_mode_options(mode or "default"), **options}
    return compile_fx(gm, inputs, config_patches=patches)


# What a forward multiplies ------------------------------------------------------------------


def product_name(n: Node) -> str:
    return "linear" if is_foreign_linear(n) else op(n)


def flops_of(n: Node) -> int:
    """FLOPs of a product that no op of ours runs, by its sizes' hints."""
    name = product_name(n)
    if name not in PRODUCTS or not isinstance(val(n), Tensor):
        return 0
    if name == "einsum" and len(operands(n)) == 1:  # an order of axes
        return 0
    tensors = [val(a) for a in operands(n) if isinstance(val(a), Tensor)]
    return 2 * math.prod(map(hint, shape(n))) * inner_size(name, tensors, val(n))


def operands(n: Node) -> list[Node]:
    """In order, one that is given twice is there twice."""
    return [a for a in tree_leaves((n.args, n.kwargs)) if isinstance(a, Node)]


def inner_size(name: str, tensors: list[Tensor], out: Tensor) -> int:
    """Multiplications that each element of the result takes."""
    sizes = [list(map(hint, x.shape)) for x in tensors]
    if len(sizes) < 2:
        return 1
    if name == "scaled_dot_product_attention":
        return 2 * sizes[1][-2]
    if name == "linear" or name.startswith("conv"):
        return math.prod(sizes[1][1:])
    if name == "einsum":
        every = math.prod(map(math.prod, sizes))
        return max(1, round(math.sqrt(every / max(1, math.prod(map(hint, out.shape))))))
    return sizes[1 if name in ("addmm", "baddbmm") else 0][-1]


def count_declined(gm: GraphModule, report: GraphReport) -> None:
    """The products of a graph that runs as Dynamo gave it, by their calls' names."""
    for module in gm.modules():
        for n in module.graph.nodes if isinstance(module, GraphModule) else ():
            name = getattr(n.target, "__name__", str(n.target))
            x = n.meta.get("example_value")
            if name in PRODUCTS and isinstance(x, Tensor):
                given = [a.meta.get("example_value") for a in operands(n)]
                tensors = [a for a in given if isinstance(a, Tensor)]
                flops = 2 * math.prod(map(hint, x.shape)) * inner_size(name, tensors, x)
                report.flops += flops
                report.left.append(Left(path_of(n), name, flops, report.declined or ""))
