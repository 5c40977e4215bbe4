"""What every swapped class shares: which calls run fused, and what stands for a child.

A swapped module runs its fused forward where four things hold, else its host's own: a kernel can
run on the input, or somebody chose the backend; the call gives the arguments that were proven and
no others; the module is as it was proven (plans.py); and nobody traces, counts or watches what runs
inside. A child may be bypassed when it was swapped itself, its settings are what the fused path
computes, and nobody watches it. Any other child is called.

Names that begin with `fused_` are ours: a host's class or child has none of them. On the way of a
call they are asked of the class, `kind.fused_x(self)`: torch.compile guards each look at a module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar, Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from ...ops.linear.functions import linear
from ...ops.norm.functions import layer_norm, layer_norm_and_input, rms_norm, rms_norm_and_input
from ...runtime import backend, compat, dispatch, recompute
from ...runtime.arguments import autocast_dtype
from ...runtime.plain import add_branch, is_hooked, is_plain, is_raw, is_watched_everywhere
from .. import plans
from ..facts import held_weights, leaves, torch_is_patched
from ..plans import verdict
from ..prove import TOLERANCE

_DROPOUT = nn.Dropout.forward

Place = Callable[[Any], int]
Given = tuple[Any, dict[str, Any]]  # the first argument of a call, and the others that count
# What a branch's last matmul ends in: residual + row_scale * layer_scale * y, of what is there.
Epilogue = dict[str, Any]
NOTHING: Epilogue = {}
# (the plan's modules, x, epilogue, the other arguments) -> a branch's sum
Planned = Callable[[list[Any], Tensor, Epilogue, dict[str, Any]], Tensor]


def row(mixin: Any, **attributes: Any) -> Any:
    """A table's mixin for a host class: `mixin` with attributes that go without their prefix, as in
    row(Mlp, roles=MlpRoles(...))."""
    named = {f"fused_{name}": value for name, value in attributes.items()}
    return type(mixin.__name__, (mixin,), named)


class Arguments(NamedTuple):
    """The arguments of a host's forward."""

    names: tuple[str, ...]  # the positional ones, in order
    defaults: dict[str, Any]
    others: bool  # it takes any other keyword


def arguments_of(forward: Any) -> Arguments:
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    others = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Arguments(tuple(p.name for p in positional), defaults, others)


def bound(names: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by their names; None where the host raises an error."""
    # Without strict=, here and elsewhere: Dynamo of torch 2.9 takes strict=False for True.
    given = {**dict(zip(names, args)), **kwargs}  # noqa: B905
    return given if len(given) == len(args) + len(kwargs) else None


ROUNDED = 1e-5  # of a proof beside a host that rounds to fp32


def told_by(mixin: Any, arguments: Arguments) -> dict[str, Any]:
    """Attributes of a swapped class that follow from its roles, where its mixin has none."""
    roles = mixin.fused_roles
    steps = getattr(roles, "steps", ())
    extras = [getattr(roles, name, "") for name in ("rope", "mask", "causal")]
    extras = [n for n in extras if n and isinstance(n, str)]
    extras += [given for s in steps for _, given in s.context]
    takes = [n for n in dict.fromkeys(extras) if n in arguments.names or arguments.others]
    dropouts = [getattr(r, "dropout", "") for r in (roles, *(s.inline for s in steps))]
    found = {
        "fused_extra_kwargs": tuple(takes),
        "fused_attention_dropout": frozenset(filter(None, dropouts)),
        "fused_tolerance": ROUNDED if getattr(roles, "rounded", False) else TOLERANCE,
    }
    return {n: v for n, v in found.items() if getattr(mixin, n) == getattr(Fused, n)}


def is_traced() -> bool:
    """Whether somebody at work wants torch's own operators: torch.fx, torch.jit, ONNX export, a
    transform, forward mode, a dispatch mode of another package (a counter): it knows no others."""
    if torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        return True
    if torch.compiler.is_compiling():
        return False
    watched = compat.is_fx_tracing() or bool(compat.foreign_modes())
    return watched or compat.in_transform() or compat.in_forward_mode()


HEAVY = ("attention", "mlp", "block")  # levels with a matmul


class Fused:
    """Mixin of every swapped class; stands before the host's class, so super() is the host.

    One that was found by structure runs its host's forward while anybody watches what is inside:
    nobody has read how that calls its parts.
    """

    fused_level: ClassVar[str]
    fused_roles: ClassVar[Any] = ()  # which part of the host is what
    fused_searched: ClassVar[bool] = False  # found by structure: nobody has read its host
    fused_remade: ClassVar[Any]  # then what makes the class again, of the host's and the roles
    fused_host: ClassVar[type]  # the host's class
    fused_arguments: ClassVar[Arguments]  # of the host's forward
    fused_children: ClassVar[frozenset[str]] = frozenset()  # and parameters, besides the roles'
    fused_extra_kwargs: ClassVar[tuple[str, ...]] = ()  # arguments besides the first that count
    # Arguments that nothing reads: of a host that a table knows, further keywords.
    fused_unread: ClassVar[frozenset[str]] = frozenset()
    fused_axes: ClassVar[tuple[int, ...]] = (3,)  # of the first argument
    fused_pieces: Any = ()  # of a block: the children that it bypasses
    fused_caveat: ClassVar[str] = ""  # when the forward is fused, where that depends on the caller
    fused_attention_dropout: ClassVar[frozenset[str]] = frozenset()  # settings or children
    fused_tolerance: ClassVar[float] = TOLERANCE  # of a proof
    fused_derived: Any = None  # settings of a narrow copy that follow from its others
    fused_of_tokens: ClassVar[Any] = None  # the mixin in a class that `takes_tokens`
    fused_facts: Any = None  # (module) -> facts that are no settings of it; asked at every call

    def _get_name(self) -> str:
        return f"Fused{type(self).__name__}"  # for repr

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        """Why a module of the host's class is not of our kind; "" where nobody expects it."""
        return None

    @classmethod
    def fused_known(cls) -> frozenset[str]:
        """The children and parameters that a module may have; empty: any. A host that a table's
        row describes has no others."""
        if cls.fused_searched:
            return frozenset()
        named = leaves(cls.fused_roles, str) if cls.fused_level in HEAVY else ()
        return cls.fused_children | {n.partition(".")[0] for n in named if n}

    def fused_child(self, name: str) -> Any:
        """What a role names; None for no name."""
        return part(self, name, None)

    def fused_blocked(self: Any) -> str | None:
        """Why the fused forward must not run as things are now."""
        modules = self.named_modules() if type(self).fused_searched else ()
        return next((f"{name} is hooked" for name, m in modules if name and is_hooked(m)), None)

    # For the report.
    # What PyTorch computes inside: a name, and the elements that it reads and writes for each token
    fused_pytorch: Callable[[Any], Iterator[tuple[str, float]]] = lambda self: iter(())
    # The attentions inside that see windows, and how many tokens each has.
    fused_windows: Callable[[Any], Iterator[tuple[nn.Module, int]]] = lambda self: iter(())

    def fused_draws(self) -> bool:
        """Whether a dropout inside draws numbers: the host draws those before DropPath's."""
        return False

    def fused_shapes(self: Any) -> list[tuple[int, ...]]:
        """Of the inputs that a proof tries."""
        return [(3, 5, width_of(self)), (2, 4, width_of(self))] if 3 in self.fused_axes else []

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        """Arguments of calls that a proof tries."""
        for shape in self.fused_shapes():
            yield (example(generator, *shape),), {}

    def fused_wanted(self, result: Any) -> Any:
        """Of the host's result, what the fused forward gives. For a proof."""
        return result

    @compat.constant_when_traced  # looked at while tracing; guards follow what is read
    def fused_verdict(self) -> str | None:
        """Why the host's own forward runs, None where the fused one may."""
        return "a function of torch was replaced" if torch_is_patched() else verdict(self)

    def fused_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        """The arguments of a call that the fused forward takes; None for any other call."""
        names, defaults, others = (kind := type(self)).fused_arguments
        if (given := bound(names, args, kwargs)) is None:
            return None
        x = given.pop(names[0], None)
        extras = {}
        for name, value in given.items():
            if name in kind.fused_extra_kwargs:
                extras[name] = value
            elif kind.fused_searched and name in kind.fused_unread:
                continue
            elif name in defaults:
                if value is not defaults[name]:
                    return None
            elif name in names:
                if value is not None:
                    return None
            elif not others or not (value is None or value is False or name in self.fused_unread):
                return None
        takes = is_dense(x) and kind.fused_takes(self, x)
        return kind.fused_checked(self, x, extras) if takes else None

    def fused_checked(self, x: Any, extras: dict[str, Any]) -> Given | None:
        """The call as the fused forward, or that of a block, gets it; None for one that it does
        not take."""
        return x, extras

    def fused_takes(self, x: Tensor) -> bool:
        """Whether the fused forward takes a tensor of this shape."""
        return x.ndim in type(self).fused_axes

    def fused_forward(self: Any, x: Any, **extras: Any) -> Any:
        modules, place = listed(self)
        return type(self).fused_resolved(self, place)(modules, x, extras)

    def fused_resolved(self: Any, place: Place) -> plans.Run | None:
        """The fused forward as things are now, with all that it decides decided; None where it
        decides at each call.

        Args:
            place: of one of this module's parts, in what a plan runs on.
        """
        return None

    def fused_idle(self, args: tuple[Any, ...]) -> bool:
        """Whether there is nothing to gain here, as no kernel can run."""
        return len(args) > 0 and backend.is_idle(args[0])

    def fused_watched(self, args: tuple[Any, ...]) -> bool:
        """Whether the host's calls are wanted, or were in the forward that is run again."""
        now = type(self).fused_idle(self, args) or is_traced() or is_watched_everywhere()
        return recompute.remembered((self, "forward"), now) if now or recompute.noted else now

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not compat.is_dynamo_compiling():
            idle = not backend.INTERPRETED and self.fused_idle(args)
            if idle and not (dispatch.listeners or compat.may_be_rerun()):
                return super().forward(*args, **kwargs)  # type: ignore[misc]
            if not idle and (found := plans.plan_of(self)) is not None:
                plan, modules = found
                if len(args) == 1 and not kwargs and plans.kind_of(args[0]) in plan.takes:
                    return plan.run(modules, args[0], {})
                if (given := self.fused_given(args, kwargs)) is not None:
                    plan.note(*given)
                    return plan.run(modules, *given)
        kind = type(self)
        given = kind.fused_given(self, args, kwargs)
        host = given is None or kind.fused_watched(self, args) or self.fused_verdict() is not None
        host = host or kind.fused_blocked(self) is not None
        if torch.compiler.is_compiling():
            if host or given is None:
                return super().forward(*args, **kwargs)  # type: ignore[misc]
            return kind.fused_forward(self, given[0], **given[1])
        with ExitStack() as stack:
            for listener in dispatch.listeners:
                stack.enter_context(listener.call(self, host, args, kwargs))
            if host or given is None:
                return super().forward(*args, **kwargs)  # type: ignore[misc]
            plans.learn(self, *given)
            return self.fused_forward(given[0], **given[1])


class Unfused(Fused):
    """Mixin of a class whose forward stays the host's, so a row needs no proof: it lends parts."""

    def fused_verdict(self) -> str | None:
        return super().fused_verdict() if self.fused_searched else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super(Fused, self).forward(*args, **kwargs)  # type: ignore[misc]


def listed(module: Any) -> tuple[list[Any], Place]:
    """For a plan that is run at once: its modules, and what puts one there."""
    modules = [module]

    def place(part: Any) -> int:
        modules.append(part)
        return len(modules) - 1

    return modules, place


def example(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def width_of(module: Any) -> int:
    """The width of a module's input: what its first weight or norm reads."""
    for m in module.modules():
        width = getattr(m, "in_features", None) or getattr(m, "normalized_shape", None)
        width = width or [p.shape[1] for p in held_weights(m)][:1]
        if width:
            return width if isinstance(width, int) else width[-1]
    return next((p.shape[-1] for p in module.parameters()), 8)  # without parameters: any


def part(module: Any, name: str, *default: Any) -> Any:
    """The child, parameter or setting of this dotted name; None for no name."""
    if not name:
        return None
    *path, last = name.split(".")
    for step in path:
        module = module._modules[step]
    own = {} if compat.is_dynamo_compiling() else module._modules  # in a graph a look is a guard
    return own[last] if last in own else getattr(module, last, *default)


def in_role(module: Any, role: str) -> Any:
    """What a swapped module has in this role; None for nothing."""
    return type(module).fused_child(module, getattr(module.fused_roles, role))


def is_dense(x: object) -> bool:
    """Whether our ops take x: a dense Tensor; not a NestedTensor, a DTensor, a tracer's Proxy."""
    return isinstance(x, Tensor) and is_raw(x)


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


class Inline:
    """A branch that is no module of its own: its roles, in the block that has its parts."""

    def __init__(self, owner: nn.Module, roles: Any):
        self.owner, self.fused_roles = owner, roles

    def __getattr__(self, name: str) -> Any:
        return getattr(self.owner, name)

    def fused_found(self, place: Place) -> Any:
        cls, roles = type(self), self.fused_roles
        return lambda modules: cls(modules[0], roles)


def can_inline(child: Any) -> bool:
    """Whether a block may use the child's fused parts without calling it."""
    if isinstance(child, Inline):
        return True  # what it bypasses is the block's concern
    ours = isinstance(child, Fused) and not is_hooked(child)  # type: ignore[arg-type]
    return ours and type(child).fused_blocked(child) is None


def is_noop(child: object) -> bool:
    """Whether calling the child would give back its input: None, Identity, a dropout at rest."""
    if child is None:
        return True
    if type(child) is nn.Identity:
        return not is_hooked(child)
    if type(child) is nn.Dropout and nn.Dropout.forward is _DROPOUT:
        return (child.p == 0 or not child.training) and not is_hooked(child)
    return False


def hooked(module: nn.Module, *parts: str) -> str | None:
    """Why a module must not bypass these parts of it, where somebody watches one."""
    return next((f"{n} is hooked" for n in parts if is_hooked(part(module, n))), None)


def norm_in_pytorch(what: str, norm: Any, width: int | None = None) -> Iterator[tuple[str, float]]:
    """The row of `fused_pytorch` for a norm that no kernel of ours computes."""
    if not (is_noop(norm) or is_fused_norm(norm)):
        yield f"{what} ({type(norm).__name__})", 2 * (width or width_of(norm))


def project(module: nn.Module, x: Tensor) -> Tensor:
    """module(x) for a Linear, by our op where the module is plain."""
    return linear(x, module.weight, module.bias) if is_plain(module) else module(x)


def project_out(module: Any, drop: nn.Module | None, x: Tensor, epilogue: Epilogue) -> Tensor:
    """residual + row_scale * layer_scale * drop(module(x)), in one epilogue where that is right;
    no module: x."""
    if module is None:
        return add_branch(x, **epilogue)
    if is_plain(module) and is_noop(drop):
        return linear(x, module.weight, module.bias, **epilogue)
    y = project(module, x)
    return add_branch(y if drop is None else drop(y), **epilogue)


def weights_of(linear: Any) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, without a look-up in Python; a replica of DataParallel has attributes."""
    own = {} if compat.is_dynamo_compiling() else linear._parameters  # as in `part`
    if "weight" in own and "bias" in own:
        return own["weight"], own["bias"]
    return linear.weight, linear.bias


class NormRoles(NamedTuple):
    """A norm over the last axis: its parts and settings by name, and the dtype of its result."""

    weight: str = "weight"
    bias: str = "bias"
    eps: str = "eps"
    # torch's own rule; or that of the "input"; or the "widest", weight's or input's
    dtype: str = ""
    rounded: bool = False  # it computes in fp32, whatever the dtype


KEEPS = NormRoles(dtype="input", rounded=True)  # it writes x.dtype, autocast or not


class Norm(Fused):
    """A norm over the last axis; a pre-norm branch has it hand its input on."""

    fused_roles = NormRoles()
    fused_axes = (1, 2, 3, 4, 5)
    fused_level: ClassVar[Literal["layer_norm", "rms_norm"]]

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        axes = len(getattr(module, "normalized_shape", (0,)))
        if axes != 1:
            return f"it normalizes {axes} axes"
        eps = getattr(module, cls.fused_roles.eps)
        return "its eps depends on the dtype" if eps is None else None

    def fused_parameters(self: Any) -> tuple[Tensor | None, Tensor | None, float]:
        """weight, bias, eps"""
        (weight, bias, eps, *_), own = type(self).fused_roles, self._parameters
        if weight in own and bias in own:
            return own[weight], own[bias], getattr(self, eps)
        return getattr(self, weight, None), getattr(self, bias, None), getattr(self, eps)

    def fused_blocked(self) -> str | None:
        # timm.layers.set_fast_norm: the norm then stays in autocast's dtype
        fast = not type(self).fused_searched and compat.is_fast_norm(self)
        return "timm's fast_norm is on" if fast else None

    def fused_takes(self: Any, x: Tensor) -> bool:
        weight, _, _ = self.fused_parameters()
        shape = tuple(getattr(self, "normalized_shape", () if weight is None else weight.shape))
        return x.ndim in self.fused_axes and shape in ((), tuple(x.shape[-1:]))

    def fused_dtype(self: Any, x: Tensor) -> torch.dtype | None:
        """The dtype of the host's result; None: torch's own rule."""
        roles = type(self).fused_roles
        if roles.dtype == "widest":
            return torch.promote_types(x.dtype, getattr(self, roles.weight).dtype)
        return x.dtype if roles.dtype else None

    def fused_norm(
        self: Any, x: Tensor, out_dtype: torch.dtype | None, residual: Tensor | None = None
    ) -> Tensor:
        """[residual +] norm(x) in `out_dtype`"""
        weight, bias, eps = type(self).fused_parameters(self)
        if isinstance(self, LayerNorm):
            return layer_norm(x, weight, bias, eps, out_dtype=out_dtype, residual=residual)
        return rms_norm(x, weight, eps, out_dtype=out_dtype, residual=residual)

    def fused_and_input(
        self: Any, x: Tensor, out_dtype: torch.dtype | None, samples: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The norm in `out_dtype`, by default in the host's own, and x for the residual. The norm
        of the samples that `samples` keeps, where it is given."""
        weight, bias, eps = type(self).fused_parameters(self)
        dtype = out_dtype or type(self).fused_dtype(self, x)
        if isinstance(self, LayerNorm):
            return layer_norm_and_input(x, weight, bias, eps, out_dtype=dtype, samples=samples)
        return rms_norm_and_input(x, weight, eps, out_dtype=dtype, samples=samples)

    def fused_added(self: Any, x: Tensor, residual: Tensor) -> Tensor:
        """residual + norm(x), of a norm behind a branch."""
        dtype = self.fused_dtype(x)
        dtype = None if dtype is None else torch.promote_types(dtype, residual.dtype)
        return self.fused_norm(x, dtype, residual)

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        return self.fused_norm(x, self.fused_dtype(x))


class LayerNorm(Norm):
    fused_level = "layer_norm"


class RmsNorm(Norm):
    """nn.RMSNorm, and classes that compute the same under other names."""

    fused_level = "rms_norm"


def is_fused_norm(norm: object) -> TypeGuard[Norm]:
    """Whether a block may use the norm's fused parts without calling it."""
    return isinstance(norm, Norm) and can_inline(norm)


def normed(norm: Any, x: Tensor, low: bool, samples: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """norm(x), in the dtype that autocast asks for where `low`: an op of ours reads it; and x for
    the residual. A fused norm takes the `samples` that are kept alone."""
    if norm is None:
        return x, x
    if not is_fused_norm(norm):
        return norm(x), x
    return type(norm).fused_and_input(norm, x, autocast_dtype(x) if low else None, samples)


class ScaleRoles(NamedTuple):
    """x * gamma"""

    gamma: str = "gamma"


class LayerScale(Unfused):
    """Its forward stays the host's; a branch's epilogue takes gamma instead."""

    fused_level = "epilogue"
    fused_roles = ScaleRoles()
    fused_axes = (2, 3, 4)

    def fused_scale(self) -> Tensor:
        return getattr(self, type(self).fused_roles.gamma)

    def fused_forward(self, x: Tensor) -> Tensor:
        return x * self.fused_scale()


class PathRoles(NamedTuple):
    """Stochastic depth: the setting with its probability, how its numbers are drawn ("bernoulli",
    or "rand" for floor(keep + uniform)), and whether what is kept is scaled, or what says so."""

    rate: str = "drop_prob"
    drawn: str = "bernoulli"
    scaled: bool | str = "scale_by_keep"


class DropPath(Unfused):
    """Stochastic depth. Its forward stays the host's; an epilogue takes the row factors instead."""

    fused_level = "epilogue"
    fused_roles = PathRoles()
    fused_axes = (2, 3, 4)

    def fused_rate(self: Any) -> float | None:
        """The share that is dropped in training; None where what is kept is not scaled."""
        rate, _, scaled = self.fused_roles
        scaled = getattr(self, scaled, True) if isinstance(scaled, str) else scaled
        return getattr(self, rate) if scaled else None

    def fused_drops(self: Any) -> bool:
        return self.training and bool(getattr(self, self.fused_roles.rate))

    def fused_row_scale(self: Any, x: Tensor, dtype: torch.dtype) -> Tensor | None:
        """(B,) of 0 or 1 / keep, drawn as the host draws it, None where nothing is dropped."""
        rate = getattr(self, self.fused_roles.rate)
        if not rate or not self.training:
            return None
        keep, scaled = 1 - rate, self.fused_rate() is not None
        if self.fused_roles.drawn == "rand":
            scale = torch.rand(x.shape[0], *[1] * (x.ndim - 1), dtype=dtype, device=x.device)
            scale = torch.floor(scale + keep).flatten()
            return scale / keep if scaled else scale
        scale = x.new_empty(x.shape[0], dtype=dtype).bernoulli_(keep)
        return scale.div_(keep) if keep > 0 and scaled else scale

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        rows = self.fused_row_scale(x, x.dtype)
        return x if rows is None else x * rows.view(-1, *[1] * (x.ndim - 1))

    def fused_shapes(self: Any) -> list[tuple[int, ...]]:
        return [(7, 3, 2), (5, 2, 2), (3, 2, 4), (2, 2, 2)]
