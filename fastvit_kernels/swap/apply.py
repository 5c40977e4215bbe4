"""swap_in: an existing model of timm, torchvision, transformers or torch.nn runs on the kernels.

A module's `__class__` becomes a subclass of its own class with a fused forward; its parameters,
buffers, hooks, names and settings are not touched. The hosts/ files say which class becomes what,
and prove.py whether it computes the same. Nothing is changed before everything is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor, nn

from ..ops.common.samples import DropPathMode, check_drop_path
from . import hosts
from .choices import HOST, LOW, Choices, Measure, choose
from .facts import held_weights, host_of, leaves, level_of, patched
from .hosts.fused import Fused, Unfused
from .observe import NOT_RUN
from .plans import refusal, unproven
from .recognise import PROVEN, Trial, recognise, unused
from .report import SwapReport, ancestors, in_stack, is_ours, make_report

Memory = Literal["default", "low", "auto"]


def _matches(selector: Any, name: str, module: nn.Module) -> bool:
    if isinstance(selector, str):
        return fnmatchcase(name, selector)
    if isinstance(selector, nn.Module):
        return module is selector
    if isinstance(selector, type):
        return isinstance(module, selector)
    if callable(selector):
        return bool(selector(name, module))
    raise TypeError(
        "swap_in: only and skip take modules, names, classes, a predicate (name, module) -> bool, "
        f"or an iterable of these; got {type(selector).__name__}"
    )


def _selected(argument: str, selectors: Any, modules: dict[str, nn.Module]) -> set[str]:
    """Names of the modules that a selector matches, and of all that is inside them."""
    single = isinstance(selectors, (str, type, nn.Module)) or not isinstance(selectors, Iterable)
    roots: set[str] = set()
    for selector in [selectors] if single else list(selectors):  # type: ignore[arg-type]
        found = {n for n, m in modules.items() if _matches(selector, n, m)}
        if not found and isinstance(selector, (str, nn.Module)):
            what = repr(selector) if isinstance(selector, str) else type(selector).__name__
            raise ValueError(f"swap_in: {argument}={what} is no module of this model")
        roots |= found
    return {n for n in modules if any(a in roots for a in ancestors(n))}


def swap_in(
    model: nn.Module,
    *,
    only: Any = None,
    skip: Any = None,
    explain: bool = False,
    memory: Memory = "default",
    drop_path: DropPathMode = "mask",
    measure: Measure | None = None,
    budget: float = 20.0,
    choices: Choices | str | Path | None = None,
) -> SwapReport:
    """Make a model run on the fused kernels, in place.

    Parameters, buffers, state_dict, hooks and modes stay what they are; optimizers made before
    stay valid. Call it before or after `.to()`, and before DDP, FSDP or torch.compile. A second
    call finds nothing more to do. Each kind of module is tried first, on a small copy beside the
    host's own forward, and left alone where it computes something else.

    Args:
        model: any nn.Module. Parts of timm, torchvision, transformers and torch.nn are known;
            attentions, MLPs and residual blocks of others are found by structure.
        only: swap nothing but these: a module name or shell pattern ("blocks.0", "blocks.*.attn"),
            a module, a class, a predicate (name, module) -> bool, or an iterable of these. A module
            stands for all that is inside it.
        skip: leave these alone; the same kinds.
        explain: the report says, too, which candidates were tried for each module, and how each
            fared.
        memory: "low": the backward of each pre-norm block rebuilds the LayerNorm outputs that its
            branches read, with the same bits, instead of keeping them. Under bf16 autocast 24 C
            bytes a token and block instead of 28 C, for one more LayerNorm forward each. "auto",
            with measure or choices: low for each kind of block that is faster so. A later call sets
            it anew for the blocks that it selects.
        drop_path: "skip": in training the branches of pre-norm blocks compute nothing for the
            samples that DropPath drops, of which there are as many at every step, drawn as DINOv2
            draws them: max(int(B (1 - rate)), 1) are kept. Where a branch cannot, it masks as its
            host does, and the report says so. "mask", the host's own, drops each by chance. A
            later call sets it anew, as memory.
        measure: keep only what is faster here. A batch of the model, a tensor, a tuple of
            arguments or a dict of keyword arguments, in the mode and under the autocast that it is
            trained in; or a callable that takes the model and computes a loss. Each kind of module
            that would be swapped runs its host's forward and the fused one, with their backward,
            in turns; a kind whose fused time is not lower by more than the noise, or whose numbers
            break the 2x rule on that batch, stays its host's, and the report says the times. A
            narrower part of it may still be fused. On a GPU, products and attention that a kernel
            of ours computes are tried by the vendor's library, and the other way around: the faster
            holds for that shape in this process, as what `fastvit-kernels tune` chose.
        budget: seconds for these times; the check of what wins is on top. What had none left is
            not swapped.
        choices: what an earlier call chose, `report.choices` or a path that its `save` or
            `fastvit-kernels tune --out` wrote: kinds that are known, by the same GPU and versions,
            are not measured again. Without measure, kinds that are not known are swapped.
    Returns: a SwapReport: what was swapped at which level, what was left and why.
    Raises: TypeError for another model, selector or type of memory; ValueError for a name or module
        that the model does not have, for another memory or drop_path, for memory="auto" alone, and
        for a file that holds no choices; with measure, what the model raises on that batch. Nothing
        is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap_in: model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(memory, str):
        raise TypeError(f"swap_in: memory must be a str, got {type(memory).__name__}")
    if memory not in get_args(Memory):
        raise ValueError(f"swap_in: memory must be one of {get_args(Memory)}, got {memory!r}")
    check_drop_path("swap_in", "drop_path", drop_path)
    if not (measure is None or isinstance(measure, (Tensor, tuple, Mapping)) or callable(measure)):
        raise TypeError(
            "swap_in: measure must be a tensor, a tuple, a dict, or a callable that takes the "
            f"model, got {type(measure).__name__}"
        )
    if not (isinstance(budget, (int, float)) and budget > 0):
        raise ValueError(f"swap_in: budget must be a number of seconds above 0, got {budget!r}")
    known = Choices.read(choices) if isinstance(choices, (str, Path)) else choices
    if not isinstance(known, Choices | None):
        raise TypeError(f"swap_in: choices must be a path or Choices, got {type(choices).__name__}")
    if memory == "auto" and measure is None and known is None:
        raise ValueError("swap_in: memory='auto' takes the faster: give measure= or choices= too")
    modules = dict(model.named_modules())
    left_out = {} if skip is None else dict.fromkeys(_selected("skip", skip, modules), "in skip=")
    if only is not None:
        unwanted = modules.keys() - _selected("only", only, modules)
        left_out |= dict.fromkeys(unwanted, "not in only=")
    swap = _Swap(modules)
    for name, module in reversed(modules.items()):  # children first: a parent's proof uses theirs
        swap.decide(name, module, left_out.get(name, ""))
    for module in unused(swap.planned):
        del swap.planned[module]
        name = next(n for n, m in modules.items() if m is module)
        swap.guesses[name] = "its caller gets the probabilities"
    settings = {"fused_memory": "default" if memory == "auto" else memory}
    settings["fused_drop_path"] = drop_path
    chosen, rebuilt = None, set()
    if measure is not None or known is not None:
        fused = {
            m: type(m) for n, m in modules.items() if isinstance(m, Fused) and n not in left_out
        }
        fused |= swap.planned
        chosen, kept = choose(model, fused, measure, budget, known, settings, memory == "auto")
        for name, choice in kept.items():
            if choice.keeps == HOST:
                swap.planned[modules[name]] = host_of(type(modules[name]))
                swap.refused[name] = f"kept as it is: {choice.times}"
        rebuilt = {name for name, choice in kept.items() if choice.keeps.startswith(LOW)}
    for module, cls in swap.planned.items():
        module.__class__ = cls  # type: ignore[assignment]
    for name, module in modules.items():
        own = settings | ({"fused_memory": "low"} if name in rebuilt else {})
        for setting, value in own.items() if name not in left_out else ():
            vars(module).pop(setting, None)  # the default is an attribute of the class
            if value != getattr(type(module), setting, value):
                setattr(module, setting, value)
    refused = {n: swap.refused[n] for n in modules if n in swap.refused}
    report = make_report(modules, refused, swap.guesses, drop_path)
    report.choices = chosen
    if explain:
        report.explanation = explanation(modules, swap.tried)
    return report


class _Swap:
    """What each module of a model is to become, or why it stays; no module is changed."""

    def __init__(self, modules: dict[str, nn.Module]):
        self.modules = modules
        self.planned: dict[nn.Module, Any] = {}  # the class that it is to have
        self.refused: dict[str, str] = {}  # why a module of a known class stays
        self.guesses: dict[str, str] = {}  # the same of modules that no table knows
        self.tried: dict[str, tuple[Trial, ...]] = {}

    def class_of(self, module: nn.Module) -> type:
        return self.planned.get(module, type(module))

    def decide(self, name: str, module: nn.Module, left_out: str) -> None:
        """By the table of its library, else by its structure, unless only= or skip= left it out."""
        above = self.modules[name.rpartition(".")[0]] if name else None
        if is_ours(module) or (is_ours(above) and not module._modules):
            return  # it reads the weight of its Conv2d itself
        cls: Any = hosts.swapped_class(type(module), hosts.takes_tokens(type(above)))
        reason = "" if cls is None else refusal(module, cls)
        if left_out:
            if cls is not None and cls.fused_level != "epilogue":
                self.refused[name] = left_out if reason is None else reason
            return
        if cls is not None and reason is None:
            self.planned[module] = cls
            reason = None if issubclass(cls, Unfused) else unproven(module, self.class_of)
            if reason is not None:
                del self.planned[module]
        if cls is not None and reason != "":
            candidate = f"{level_of(cls)}, by the table of its library"
            self.tried[name] = ((candidate, reason or PROVEN),)
        if cls is None and _is_read_through(name, self.modules):
            return  # by an earlier call
        # Unknown to the tables, or of a version that they do not describe.
        if reason == "" or (reason and module._modules and patched(module, cls) is None):
            cls, reason = self.search(name, module, cls, reason)
        if reason and level_of(cls) != "epilogue":
            self.refused[name] = reason

    def search(self, name: str, module: nn.Module, cls: Any, reason: str) -> tuple[Any, str | None]:
        """The class that is found by structure, and why the module does not become one; what the
        table said where none is."""
        found, search = recognise(module, self.class_of)
        nothing = (("no candidate", search.reason),) if search.reason else ()
        self.tried[name] = self.tried.get(name, ()) + (search.trials or nothing)
        if found is None:
            stuck = search.reason.startswith(NOT_RUN) and self.is_layer(name, module)
            if not reason and (stuck or not search.unlike):
                self.guesses[name] = search.reason
            return cls, reason
        refused = refusal(module, found)
        if refused is None:
            self.planned[module] = found
            for part in search.absorbed:
                self.planned.pop(module.get_submodule(part), None)
        return found, refused

    def is_layer(self, name: str, module: nn.Module) -> bool:
        """Of a stack, with products and no block; nothing inside has said what is in its way."""
        inside = any(guess.startswith(f"{name}.") for guess in self.guesses)
        every = list(module.modules())
        products = sum(isinstance(m, nn.Linear) + len(held_weights(m)) for m in every)
        blocks = any(level_of(self.class_of(m)) == "block" for m in every)
        return in_stack(name) and products > 1 and not (inside or blocks)


def _is_read_through(name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module around this one was swapped to read the parts of this one without it."""
    for above in ancestors(name):
        inside = f"{name[len(above) + 1 if above else 0 :]}."
        roles = getattr(type(modules[above]), "fused_roles", None)
        if any(role.startswith(inside) for role in leaves(roles, str)):
            return True
    return False


def explanation(modules: dict[str, nn.Module], tried: dict[str, tuple[Trial, ...]]) -> list[str]:
    """The candidates and how each fared, once for modules of one class that fared alike."""
    alike: dict[Any, list[str]] = {}
    for name in modules:
        if tried.get(name):
            alike.setdefault((type(modules[name]).__name__, tried[name]), []).append(name)
    lines: list[str] = []
    for (cls, trials), names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"{names[0] or 'the model'}{more}: {cls}")
        lines += [f"  {candidate}: {outcome}" for candidate, outcome in trials]
    return lines


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
        for name in ("fused_memory", "fused_drop_path"):
            vars(module).pop(name, None)
        module.__class__ = host
