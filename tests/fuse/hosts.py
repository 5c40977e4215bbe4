"""A host run eagerly and through the backend: every fact that a user could notice, compared.

    check(Host("mlp", lambda kit, x: kit.fc2(F.gelu(kit.fc1(x)))))

Facts are outputs and gradients under random upstream gradients (values, dtype, strides, whether a
leaf, whether a gradient is needed, what they share storage with), buffers, attributes and inputs
after the call, the state of the random generator, and the type of an exception. What plain
torch.compile(backend="eager") gives too is Dynamo's own truth and no fault of a rule.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import fastvit_kernels as fk
from fastvit_kernels.fuse import backend, report
from tests.fuse.kit import Kit, tokens

TOLERANCE = {torch.float64: 1e-10, torch.float32: 3e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}
REFUSED = "autograd refuses"


def nothing(module: nn.Module) -> None:
    """What is done to a module before it is run."""


@dataclass(frozen=True)
class Host:
    """A module's forward and how it is called."""

    id: str
    forward: Callable[..., Any] = field(repr=False)  # (kit, *inputs)
    inputs: Callable[[], tuple[Any, ...]] = tokens
    dtype: torch.dtype = torch.float64
    train: bool = True
    context: Callable[[], AbstractContextManager] = nullcontext  # around each call
    needs_grad: bool = True  # of the inputs
    prepare: Callable[[Any], None] = nothing
    between: Callable[[Any], None] = nothing  # two calls
    calls: int = 1
    precision: torch.dtype | None = None  # the coarsest dtype in it, where that is not `dtype`
    again: Callable[[], tuple[Any, ...]] | None = None  # inputs of later calls
    module: Callable[[], nn.Module] | None = None  # instead of a Kit and `forward`
    options: dict[str, Any] = field(default_factory=dict)  # of our backend
    kernels: bool = False  # run our ops, by the interpreter, instead of PyTorch

    def build(self) -> nn.Module:
        torch.default_generator.manual_seed(0)
        module = Kit(self.forward) if self.module is None else self.module()
        module = module.to(self.dtype).train(self.train)
        self.prepare(module)
        return module


BY_KERNELS: dict[str, Any] = dict(kernels=True, dtype=torch.float32)
Facts = dict[str, Any]


def table(prefix: str, forwards: dict[str, Callable[..., Any]], **how: Any) -> list[Host]:
    """Hosts of one kind."""
    return [Host(f"{prefix} - {name}", forward, **how) for name, forward in forwards.items()]


def observe(host: Host, module: nn.Module, call: Callable[..., Any]) -> Facts:
    """What is to be seen of a host's calls."""
    torch.default_generator.manual_seed(1)
    facts: Facts = {}
    for i in range(host.calls):
        if i:
            host.between(module)
        given = host.again if i and host.again else host.inputs
        inputs = tree_map(functools.partial(fresh, host), given())
        module.zero_grad()
        try:
            one_call(facts, f"call {i}: ", host, module, call, inputs)
        except Exception as error:
            # of a value that the host's autograd kept and the host wrote to; ours may keep others
            refused = "modified by an inplace operation" in str(error)
            facts[f"call {i}: raises"] = REFUSED if refused else type(error).__name__
        add_state(facts, f"call {i}: ", module, inputs)
    facts["random state"] = torch.get_rng_state()
    return facts


def fresh(host: Host, x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.to(host.dtype).detach().clone().requires_grad_(host.needs_grad)


def one_call(
    facts: Facts, at: str, host: Host, module: nn.Module, call: Callable[..., Any], inputs: Any
) -> None:
    with host.context():
        # a leaf may not be written to, so what a host gets is a result
        given = tree_map(
            lambda x: x * 1 if isinstance(x, Tensor) and x.requires_grad else x, inputs
        )
        out = call(*given)
    leaves = tree_leaves(out)
    for i, x in enumerate(leaves):
        facts[f"{at}output {i}"] = x.detach().clone() if isinstance(x, Tensor) else x
        if isinstance(x, Tensor):
            facts[f"{at}output {i}'s strides"] = strides(x)
            facts[f"{at}output {i}'s gradient"] = (x.requires_grad, x.is_leaf)
            facts[f"{at}output {i}'s storage"] = shared(x, i, leaves, module, given)
    if torch.is_grad_enabled():
        roots = [x for x in (*leaves, *noted(module).values()) if is_root(x)]
        generator = torch.Generator().manual_seed(5)
        ups = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in roots]
        if roots:
            torch.autograd.backward(roots, ups)


def is_root(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and x.is_floating_point()


def strides(x: Tensor) -> tuple[int, ...]:
    """Those of axes of size 1 do not matter."""
    if x.numel() == 0 or x.layout != torch.strided:
        return ()
    return tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))


def shared(x: Tensor, i: int, leaves: list[Any], module: nn.Module, given: Any) -> str:
    """The first thing whose storage an output shares."""
    others = {f"input {j}": y for j, y in enumerate(tree_leaves(given))}
    others |= dict(module.named_parameters()) | dict(module.named_buffers())
    others |= {f"output {j}": y for j, y in enumerate(leaves[:i])}
    for name, y in others.items():
        if isinstance(y, Tensor) and x.numel() and storage(x) == storage(y):
            return name
    return ""


def storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


def noted(module: nn.Module) -> dict[str, Any]:
    """Plain attributes that a forward may set, by their paths."""
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if not name.startswith("_") and isinstance(value, (Tensor, int, float, str, list)):
                found[f"{path}.{name}"] = value
    return found


def add_state(facts: Facts, at: str, module: nn.Module, inputs: Any) -> None:
    for name, p in module.named_parameters():
        facts[f"{at}gradient of {name}"] = None if p.grad is None else p.grad.clone()
        facts[f"{at}{name}"] = p.detach().clone()
    for name, b in module.named_buffers():
        facts[f"{at}buffer {name}"] = b.detach().clone()
    for name, value in noted(module).items():
        for i, x in enumerate(tree_leaves(value)):
            facts[f"{at}attribute {name} {i}"] = x.detach().clone() if isinstance(x, Tensor) else x
    for i, x in enumerate(tree_leaves(inputs)):
        if isinstance(x, Tensor):
            facts[f"{at}input {i}"] = x.detach().clone()
            facts[f"{at}gradient of input {i}"] = x.grad


def differences(host: Facts, other: Facts, precision: torch.dtype) -> dict[str, str]:
    """What is wrong with each fact that is not the host's."""
    names = dict.fromkeys((*host, *other))
    largest = max((size(v) for k, v in host.items() if "gradient of" in k), default=0.0)
    found = {}
    for name in names:
        call = name.split(": ")[0]
        refused = host.get(f"{call}: raises") == REFUSED and f"{call}: raises" not in other
        if refused and ("gradient of" in name or name.endswith(": raises")):
            continue
        if name not in host or name not in other:
            found[name] = "missing" if name in host else "new"
            continue
        floor = 0.05 * largest if "gradient of" in name else 0.0
        if why := difference(host[name], other[name], floor, precision):
            found[name] = why
    return found


def size(x: Any) -> float:
    if not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
        return 0.0
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).abs().max())


def difference(a: Any, b: Any, floor: float, precision: torch.dtype) -> str:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return "" if type(a) is type(b) and (a == b or a != a) else f"{a} became {b}"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {tuple(a.shape)} became {b.dtype} {tuple(b.shape)}"
    if not a.is_floating_point():
        return "" if torch.equal(a, b) else "other values"
    tolerance = max(TOLERANCE[a.dtype], TOLERANCE[precision])
    a, b = a.double(), b.double()
    finite = a.isfinite()
    if not torch.equal(a.nan_to_num(7.0)[~finite], b.nan_to_num(7.0)[~finite]):
        return "NaN or infinity elsewhere"
    if not b[finite].isfinite().all():
        return "NaN or infinity where the host has numbers"
    off = size(torch.where(finite, a - b, 0.0))
    if off <= tolerance * max(size(a), floor) + 1e-13:
        return ""
    return f"off by {off:.1e} of {size(a):.1e}"


@dataclass
class Result:
    """What a host's run through the backend gave."""

    wrong: dict[str, str]  # facts not as in the host, or as Dynamo has them; a rule that raised
    dynamo: dict[str, str]  # facts in which plain Dynamo differs from the host
    reports: list[report.GraphReport]

    @property
    def rules(self) -> Counter[str]:
        return sum((r.rules for r in self.reports), Counter())

    @property
    def share(self) -> float:
        flops = sum(r.flops for r in self.reports)
        return sum(r.fused_flops for r in self.reports) / flops if flops else 1.0

    @property
    def left(self) -> list[str]:
        reasons = [f"{x.name} {x.op}: {x.reason}" for r in self.reports for x in r.left]
        return reasons + [r.declined for r in self.reports if r.declined]


def compiled(host: Host, by: Any) -> tuple[Facts, list[report.GraphReport]]:
    torch._dynamo.reset()
    module, reports = host.build(), []

    def record(made: report.GraphReport, *context: Any) -> None:
        reports.append(made)

    former, backend.record = backend.record, record
    try:
        return observe(host, module, torch.compile(module, backend=by)), reports
    finally:
        backend.record = former


def run(host: Host) -> Result:
    with fk.backend("triton" if host.kernels else "torch"):
        module = host.build()
        truth = observe(host, module, module)
        options = {"compiler": "eager", **host.options}
        fused = functools.partial(backend.fastvit_kernels, options=options)
        ours, reports = compiled(host, fused)
        precision = host.precision or host.dtype
        off = differences(truth, ours, precision)
        failed = {} if any("raises" in name for name in truth) else raised(reports)
        if not off:
            return Result(failed, {}, reports)
        plain, _ = compiled(host, "eager")
    dynamo = differences(truth, plain, precision)
    # where Dynamo is not the host, Dynamo's is what a rule must keep
    wrong = {k: why for k, why in off.items() if k not in dynamo}
    wrong |= {k: why for k, why in differences(plain, ours, precision).items() if k in dynamo}
    return Result(wrong | failed, dynamo, reports)


def raised(reports: list[report.GraphReport]) -> dict[str, str]:
    """Of rules that raised: what they were to rewrite is left to the host."""
    failed = [why for r in reports for why in r.failed]
    return {"a rule": failed[0]} if failed else {}


def check(host: Host) -> Result:
    """Run a host both ways; an AssertionError says what differs."""
    result = run(host)
    lines = [f"{name}: {why}" for name, why in result.wrong.items()]
    assert not lines, "; ".join(lines) + f" after {dict(result.rules)}"
    return result
