"""swap_in: an existing model of timm, torchvision, transformers or torch.nn runs on the kernels.

A module's `__class__` becomes a subclass of its own class with a fused forward; its parameters,
buffers, hooks, names and settings are not touched. The hosts/ files say which class becomes what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..runtime.plain import is_hooked, is_plain
from . import hosts
from .hosts.fused import Fused, inert, jumpable

POSITIONS = ("pos_embed", "pos_embedding", "position_embeddings", "position_embedding.weight")
DEFAULT_TOKENS = 197  # where the model has no position embedding to count them by


@dataclass(frozen=True)
class Swapped:
    """A module that runs fused, at the widest level: what it covers has no row of its own."""

    name: str
    host: str
    level: str


@dataclass(frozen=True)
class Left:
    """A module that keeps its own forward."""

    name: str
    host: str
    reason: str


@dataclass
class SwapReport:
    """What swap_in did. Prints as a table.

    Attributes:
        swapped: modules that run fused, with their level: block, attention, mlp, layer_norm,
            patch_embed; "parts" is a block of which a branch keeps its own forward.
        left: modules that keep their own forward, and why. They stay as they were.
        tokens: the sequence length at which FLOPs are counted.
        flops, fused_flops: matmul FLOPs of a forward for one image (projections, MLPs, patch
            embedding, attention), and those that run in a fused op; from the weights' shapes, a
            layer outside the stack of blocks counted for one row.
    """

    swapped: list[Swapped] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    tokens: int = DEFAULT_TOKENS
    flops: int = 0
    fused_flops: int = 0

    @property
    def level(self) -> str:
        """ "block": every layer of the stack runs as a fused block; "parts"; or "none"."""
        if not self.swapped:
            return "none"
        blocks = any(s.level == "block" for s in self.swapped)
        loose = any(
            s.level == "parts" or (s.level in ("attention", "mlp") and _in_stack(s.name))
            for s in self.swapped
        )
        return "block" if blocks and not loose else "parts"

    def __str__(self) -> str:
        counts = Counter((s.level, s.host) for s in self.swapped)
        lines = [f"{'swapped':<12} {'class':<28} count"]
        lines += [f"{level:<12} {host:<28} {n:>5}" for (level, host), n in counts.items()]
        if not counts:
            lines.append("nothing")
        groups = Counter((row.host, row.reason) for row in self.left)
        if groups:
            lines += ["", f"{'left alone':<41} count  why"]
            lines += [f"{host:<41} {n:>5}  {reason}" for (host, reason), n in groups.items()]
        if self.flops:
            share = 100 * self.fused_flops / self.flops
            lines += ["", f"{share:.1f}% of the matmul FLOPs run fused ({self.tokens} tokens)"]
        return "\n".join(lines)


def _matches(selector: Any, name: str, module: nn.Module) -> bool:
    if isinstance(selector, str):
        return fnmatchcase(name, selector)
    if isinstance(selector, type):
        return isinstance(module, selector)
    if callable(selector):
        return bool(selector(name, module))
    raise TypeError(
        "swap_in: only and skip take names, classes, a predicate (name, module) -> bool, or an "
        f"iterable of these; got {type(selector).__name__}"
    )


def _selected(selectors: Any, modules: dict[str, nn.Module]) -> set[str]:
    """Names of the modules that a selector matches, and of all that is inside them."""
    single = isinstance(selectors, (str, type)) or not isinstance(selectors, Iterable)
    selectors = [selectors] if single else list(selectors)  # type: ignore[arg-type]
    roots = {n for n, m in modules.items() if any(_matches(s, n, m) for s in selectors)}
    return {n for n in modules if any(a in roots for a in _ancestors(n))}


def _ancestors(name: str) -> Iterator[str]:
    """The name itself, then its parents up to the model, ""."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _refusal(module: nn.Module, mixin: type[Fused]) -> str | None:
    """Why a module of a known class is not swapped; "" is a silent no: not of our kind."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if mixin.children_known:
        present = {n for n, m in module._modules.items() if m is not None}
        present |= {n for n, p in module._parameters.items() if p is not None}
        unknown = sorted(present - mixin.children_known)
        if unknown:
            return f"it has a part that we do not know: {', '.join(unknown)}"
    return mixin.reject(module)


def swap_in(model: nn.Module, *, only: Any = None, skip: Any = None) -> SwapReport:
    """Make a model run on the fused kernels, in place.

    Parameters, buffers, state_dict, hooks and modes stay what they are; optimizers made before
    stay valid. Call it before or after `.to()`, and before DDP, FSDP or torch.compile. A second
    call finds nothing more to do.

    Args:
        model: any nn.Module; parts of timm, torchvision, transformers and torch.nn are known.
        only: swap nothing but these: a module name or shell pattern ("blocks.0", "blocks.*.attn"),
            a class, a predicate (name, module) -> bool, or an iterable of these. A module stands
            for all that is inside it.
        skip: leave these alone; the same kinds.
    Returns: a SwapReport: what was swapped at which level, what was left and why.
    Raises: TypeError for another model or selector.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap_in: model must be an nn.Module, got {type(model).__name__}")
    modules = dict(model.named_modules())
    wanted = set(modules) if only is None else _selected(only, modules)
    unwanted = set() if skip is None else _selected(skip, modules)
    refused: dict[str, str] = {}
    for name, module in modules.items():
        mixin = hosts.mixin_of(type(module))
        if mixin is None:
            continue
        reason = _refusal(module, mixin)
        if reason is None and name not in wanted:
            reason = "not in only="
        if reason is None and name in unwanted:
            reason = "in skip="
        if reason is None:
            module.__class__ = hosts.swapped_class(type(module))  # type: ignore[assignment]
        elif mixin.level != "epilogue":
            refused[name] = reason
    return _report(modules, refused)


def swap_out(model: nn.Module) -> None:
    """Undo swap_in: every module has its host's class again. Parameters stay untouched.

    Raises: TypeError for another model; ValueError, with nothing undone, where a swapped module
    was given yet another class since (fully_shard, a parametrization): undo that first.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap_out: model must be an nn.Module, got {type(model).__name__}")
    classes = {}
    for name, module in model.named_modules():
        if isinstance(module, Fused):
            host = hosts.host_class(type(module))
            if host is None:
                raise ValueError(f"swap_out: {name} has become a {hosts.host_path(type(module))}")
            classes[module] = host
    for module, host in classes.items():
        module.__class__ = host


def _in_stack(name: str) -> bool:
    """Whether a name has a place number in it: blocks.3.mlp, encoder_layer_3."""
    return any(part.isdigit() for part in name.replace("_", ".").split("."))


def _host_name(module: nn.Module) -> str:
    return type(module).__name__


def _blocked_pieces(block: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """The children of a block that it must call, with the reason."""
    for name in block.pieces:
        child = getattr(block, name)
        if isinstance(child, nn.Module) and not (inert(child) or jumpable(child)):
            if is_hooked(child):
                reason = "it is hooked"
            else:
                reason = child.blocked() if isinstance(child, Fused) else None
            yield name, child, reason or "no fused class for it: the block calls it"


def _report(modules: dict[str, nn.Module], refused: dict[str, str]) -> SwapReport:
    report = SwapReport(tokens=_tokens(modules))
    left: dict[str, Left] = {}

    def leave(name: str, module: nn.Module, reason: str) -> None:
        if reason:
            left.setdefault(name, Left(name, _host_name(module), reason))

    for name, reason in refused.items():
        leave(name, modules[name], reason)
    covered: set[str] = set()  # names whose module a wider one jumps over
    for name, module in modules.items():
        if not isinstance(module, Fused):
            continue
        prefix = f"{name}." if name else ""
        for child, m, reason in module.left():
            leave(prefix + child, m, reason)
        if module.blocked():
            leave(name, module, module.blocked() or "")
            continue
        if module.level == "block":
            called = {prefix + child: (m, why) for child, m, why in _blocked_pieces(module)}
            for child, (m, why) in called.items():
                leave(child, m, why)
            whole = not any(prefix + body in called for body in module.bodies)
            report.swapped.append(Swapped(name, _host_name(module), "block" if whole else "parts"))
            covered |= {
                n for n in modules
                if n.startswith(prefix) and not any(a in called for a in _ancestors(n))
            }  # fmt: skip
        elif module.level != "epilogue" and name not in covered:
            report.swapped.append(Swapped(name, _host_name(module), module.level))
            leave(name, module, module.caveat)
    for name, module in modules.items():
        inside = any(isinstance(modules[a], Fused) for a in _ancestors(name) if a in modules)
        if not inside and module._parameters and not module._modules:
            plain = isinstance(module, (nn.Linear, nn.Conv2d))
            leave(name, module, "a plain product" if plain else "no fused class for it")
    report.left = list(left.values())
    report.flops, report.fused_flops = _flops(modules, report.tokens)
    return report


def _tokens(modules: dict[str, nn.Module]) -> int:
    for name, p in modules[""].named_parameters():
        if name.endswith(POSITIONS) and p.ndim >= 2:
            return p.shape[-2]
    return DEFAULT_TOKENS


def _flops(modules: dict[str, nn.Module], tokens: int) -> tuple[int, int]:
    total = fused = 0
    for name, module in modules.items():
        rows = tokens if _in_stack(name) else 1
        mixin = type(module) if isinstance(module, Fused) else hosts.mixin_of(type(module))
        runs_fused = isinstance(module, Fused) and module.blocked() is None
        if isinstance(module, nn.Linear):
            parent = modules.get(name.rpartition(".")[0])
            flops = 2 * module.in_features * module.out_features * rows
            runs_fused = isinstance(parent, Fused) and parent.blocked() is None and is_plain(module)
            if type(module) is not nn.Linear and isinstance(parent, nn.MultiheadAttention):
                runs_fused = isinstance(parent, Fused)  # out_proj is never called
        elif isinstance(module, nn.Conv2d):
            flops = 2 * module.weight.numel() * tokens
        elif mixin is not None and mixin.level == "attention":
            heads = next(
                h for h in (getattr(module, n, None) for n in ("num_heads", "num_attention_heads"))
                if h
            )  # fmt: skip
            width = heads * getattr(module, "head_dim", 0)
            flops = 4 * tokens * tokens * width
            if isinstance(module, nn.MultiheadAttention):
                flops += 2 * 3 * module.embed_dim**2 * rows
        else:
            continue
        total += flops
        fused += flops if runs_fused else 0
    return total, fused
