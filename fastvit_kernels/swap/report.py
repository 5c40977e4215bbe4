"""What swap_in did to a model, and what that is worth: the report and how it is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..models.gated_mlp import GluMlp, SwiGLU
from ..models.modules import Attention, Mlp, PatchEmbed
from ..models.norms import LayerNorm, RmsNorm
from ..models.vit import Block
from ..ops.attention.configs import has_turns
from ..ops.common.samples import DropPathMode
from ..runtime.backend import gpu
from ..runtime.plain import is_hooked, is_plain
from . import hosts
from .activations import activation_name
from .choices import Choices
from .facts import held_weights, leaves, level_of
from .hosts import block as blocks
from .hosts.fused import Fused, Norm, Unfused, can_inline, is_noop, listed, part, width_of
from .hosts.roles import weight_and_bias

POSITIONS = ("pos_embed", "pos_embedding", "position_embeddings", "position_embedding.weight")
MASKED = "fused where it is called without a mask"
IN_GRAPHS = "in a graph: no handover from norm to linear, under autocast 8 C bytes a token more"
IN_GLUON = (
    "Gluon kernels where docs/attention.md and linear.md say so (FASTVIT_KERNELS_GLUON=0: none)"
)
OURS = (Block, PatchEmbed, Attention, Mlp, GluMlp, SwiGLU, LayerNorm, RmsNorm)
_OUR_FORWARDS = frozenset(cls.forward for cls in OURS)
Why = Callable[[Any], str | None]  # why a swapped module runs its host's forward, None: it doesn't
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
            rms_norm, patch_embed; "ours" is a module of this package; "parts" is a block of which
            a branch keeps its own forward, "model" one that hands its parts something else.
        left: modules that keep their own forward, and why.
        tokens: the sequence length at which FLOPs and bytes are counted.
        flops, fused_flops: matmul FLOPs of a forward for one image, and those that run in a fused
            op; from the weights' shapes, a layer outside the stack counted for one row.
        depending_flops: those of them that run fused only where the caller asks for nothing else.
        pytorch: what PyTorch computes inside modules that count as fused, such as RoPE, with its
            share of the elements that the layers read and write: a model, not a measurement.
        uncounted: modules whose FLOPs or bytes could not be counted.
        explanation: with explain=True, the candidates that were tried and how each fared.
        rebuilt: names of the norms whose output the backward rebuilds, by memory="low".
        rebuilt_rms: how many of these are RMSNorms.
        skipping: names of the norms of branches that compute nothing for the samples that they
            drop. With drop_path="skip" a DropPath of no such branch is among `left`.
        choices: with measure= or choices=, what each kind of module runs as, and its times.
        gluon: whether packed attention may run in Gluon on the GPU where the model is now.
    """

    swapped: list[Swapped] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    tokens: int = DEFAULT_TOKENS
    flops: int = 0
    fused_flops: int = 0
    depending_flops: int = 0
    pytorch: dict[str, float] = field(default_factory=dict)
    uncounted: list[str] = field(default_factory=list)
    explanation: list[str] = field(default_factory=list)
    rebuilt: list[str] = field(default_factory=list)
    rebuilt_rms: int = 0
    skipping: list[str] = field(default_factory=list)
    choices: Choices | None = None
    gluon: bool = False

    @property
    def level(self) -> str:
        """ "block": every layer of the stack runs as a fused block; "parts"; or "none"."""
        if not self.swapped:
            return "none"
        blocks = any(s.level in ("block", "ours") for s in self.swapped)
        # An MLP that is an element of a list stands alone, as Qwen3-VL's mergers do.
        loose = any(
            s.level == "parts"
            or (s.level == "attention" and in_stack(s.name))
            or (s.level == "mlp" and in_stack(s.name.rpartition(".")[0]))
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
            share = self.fused_flops / self.flops
            lines += ["", f"{share:.1%} of the matmul FLOPs run fused ({self.tokens} tokens)"]
        if self.depending_flops:
            share = self.depending_flops / self.flops
            lines.append(f"{share:.1%} more where attention is called without a mask or weights")
        for what, share in self.pytorch.items():
            lines.append(f"{share:.1%} of the elements moved: {what}, by PyTorch")
        rms = self.rebuilt_rms
        kinds = (len(self.rebuilt) - rms, "LayerNorm"), (rms, "RMSNorm")
        lines += [f"{n} {kind} outputs are rebuilt in the backward" for n, kind in kinds if n]
        if self.gluon:
            lines.append(IN_GLUON)
        if self.skipping:
            lines.append(f"{len(self.skipping)} branches compute no sample that they drop")
        if self.uncounted:
            more = " ..." * (len(self.uncounted) > 3)
            lines.append(f"not counted: {', '.join(self.uncounted[:3])}{more}")
        if self.choices is not None:
            lines += ["", *map(str, self.choices.rows)]
        if self.explanation:
            lines += ["", *self.explanation]
        return "\n".join(lines)


def ancestors(name: str) -> Iterator[str]:
    """The name itself, then its parents up to the model, ""."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def in_stack(name: str) -> bool:
    """Whether a name has a place number in it: blocks.3.mlp, encoder_layer_3."""
    return any(part.isdigit() for part in name.replace("_", ".").split("."))


def is_ours(module: object) -> bool:
    """Whether this is a part of our own models, with its own forward: fused without a swap."""
    own = isinstance(module, OURS) and type(module).forward in _OUR_FORWARDS
    return own and "forward" not in vars(module)


def verdict_of(module: Any) -> str | None:
    return module.fused_verdict() if isinstance(module, Fused) else None


def lost_in_graphs(module: Any) -> str:
    """What a compiled graph does not do of what a module does without one."""
    memory = getattr(module, "fused_memory", getattr(module, "memory", ""))
    lost = IN_GRAPHS + ', and memory="low" rebuilds nothing' * (memory == "low")
    return lost if isinstance(module, (Block, blocks.Block)) else ""


def make_report(
    modules: dict[str, nn.Module],
    refused: dict[str, str],
    guesses: dict[str, str],
    drop_path: DropPathMode = "mask",
    why: Why = verdict_of,
) -> SwapReport:
    """The report on a model whose modules are these. It never raises.

    Args:
        refused: why a module of a known class was not swapped, by name; "" goes unsaid.
        guesses: the same of modules of unknown classes; a module around may know better.
    """
    maker = _Maker(modules, why)
    for name, reason in refused.items():
        maker.leave(name, modules[name], reason)
    maker.note_skipping(drop_path)
    for name, module in modules.items():
        if is_ours(module):
            maker.note_ours(name, module)
        elif isinstance(module, Fused):
            try:
                maker.note_swapped(name, module)
            except Exception:  # a host's module in a state that nobody foresaw
                maker.report.uncounted.append(name)
    for name in modules:
        if name in guesses and name not in maker.covered:
            maker.leave(name, modules[name], guesses[name])
    maker.note_leaves()
    maker.count()
    x = next((p for m in modules.values() for p in m.parameters()), None)
    attends = any(row.level in ("block", "attention", "ours") for row in maker.report.swapped)
    maker.report.gluon = attends and x is not None and has_turns(gpu(x.device))
    return maker.report


class _Maker:
    """A report in the making."""

    def __init__(self, modules: dict[str, nn.Module], why: Why):
        self.report, self.modules = SwapReport(tokens=_tokens(modules)), modules
        fusing = [m for m in modules.values() if isinstance(m, Fused) or is_ours(m)]
        # why each runs its host's forward; None: fused
        self.reasons = {id(m): why(m) for m in fusing}
        self.left: set[str] = set()
        self.covered: set[str] = set()  # names whose module a wider one bypasses
        self.moved: Counter[str] = Counter()  # elements that PyTorch reads and writes inside
        self.called_norms: set[str] = set()  # those of these are among them

    def leave(self, name: str, module: Any, reason: str) -> None:
        if reason and name not in self.left:
            self.left.add(name)
            self.report.left.append(Left(name, type(module).__name__, reason))

    def runs_fused(self, module: Any) -> bool:
        return self.reasons.get(id(module), "not swapped") is None

    def above(self, name: str) -> list[Any]:
        """The modules around this one, the next first."""
        return [self.modules[a] for a in ancestors(name) if a != name and a in self.modules]

    def note_skipping(self, drop_path: DropPathMode) -> None:
        reached: set[int] = set()
        for name, module in self.modules.items():
            for step, branch, modules in _branches(module) if self.runs_fused(module) else ():
                if branch.path or (branch.samples_alone and modules[0].fused_roles.sampled):
                    self.report.skipping.append(f"{name}.{step.norm}" if name else step.norm)
                    reached.add(id(modules[branch.path]))
        for name, module in self.modules.items() if drop_path == "skip" else ():
            rate = getattr(module, "drop_prob", getattr(module, "p", 0.0))
            if id(module) not in reached and rate and "Path" in type(module).__name__:
                reason = 'drop_path="skip" does not reach it: its branch computes all'
                self.leave(name, module, reason)

    def note_ours(self, name: str, module: nn.Module) -> None:
        """The widest has the row."""
        for child, m in module._modules.items():
            if m is not None and hasattr(m, "in_features") and not is_plain(m):
                self.leave(f"{name}.{child}" if name else child, m, why_not_plain(m))
        if any(map(is_ours, self.above(name))):
            return
        reason = self.reasons[id(module)]
        if reason is None:
            self.report.swapped.append(Swapped(name, type(module).__name__, "ours"))
        else:
            self.leave(name, module, reason)

    def note_swapped(self, name: str, module: Any) -> None:
        prefix, report = f"{name}." if name else "", self.report
        level, reason = module.fused_level, self.reasons[id(module)]
        if level == "epilogue":
            return
        if reason is not None:
            self.leave(name, module, reason)
            return
        for child, m, because in _left_inside(module):
            self.leave(prefix + child, m, because)
        for what, elements in module.fused_pytorch():
            self.moved[what] += round(elements)
        if level != "block":
            if name not in self.covered:
                report.swapped.append(Swapped(name, type(module).__name__, level))
                self.leave(name, module, module.fused_caveat)
            return
        called = {prefix + child: because for child, because in _called_pieces(module)}
        for child, because in called.items():
            m = self.modules[child]
            self.leave(child, m, because)
            if not isinstance(m, Fused) and "norm" in child.rpartition(".")[2]:
                widths = [p.shape[-1] for p in m.parameters() if p.ndim]
                self.moved[type(m).__name__] += 2 * widths[0] if widths else 0
                self.called_norms.add(child)
        rebuilt = [step.norm for step, branch, _ in _branches(module) if branch.rebuild]
        report.rebuilt += [prefix + norm for norm in rebuilt]
        levels = [module.get_submodule(norm).fused_level for norm in rebuilt]
        report.rebuilt_rms += levels.count("rms_norm")
        steps = getattr(module.fused_roles, "steps", ())
        whole = not any(s.residual >= 0 and prefix + s.body in called for s in steps)
        report.swapped.append(Swapped(name, type(module).__name__, "block" if whole else "parts"))
        if name and self.gets_masks(name, module):
            self.leave(name, module, MASKED)
        inside = (n for n in self.modules if n.startswith(prefix))
        self.covered |= {n for n in inside if called.keys().isdisjoint(ancestors(n))}

    def gets_masks(self, name: str, block: Any) -> bool:
        """Whether what calls a fused block holds a mask for it, as open_clip's text tower does."""
        names = block.fused_arguments.names[1:]
        if not any("mask" in n and n not in block.fused_extra_kwargs for n in names):
            return False
        for above in self.above(name):
            buffers = above._buffers.items()
            if any("mask" in n and b is not None and b.ndim > 1 for n, b in buffers):
                return True
            if any("pos" in n for n in above._parameters):
                return False  # a tower of its own
        return False

    def note_leaves(self) -> None:
        """What has weights and is inside of nothing that has a row."""
        for name, module in self.modules.items():
            if not module._parameters or module._modules:
                continue
            if not any(is_ours(m) or _computes_all(m) for m in (module, *self.above(name))):
                plain = isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d))
                self.leave(name, module, "a plain product" if plain else "no fused class for it")

    def count(self) -> None:
        report = self.report
        fused: list[Any] = [m for m in self.modules.values() if isinstance(m, Fused)]
        fused = [m for m in fused if self.runs_fused(m)]
        inside = {id(m) for f in fused for _, m in _products(f)}
        windows = {id(m): size for f in fused for m, size in f.fused_windows()}
        masked = {row.name for row in report.left if row.reason == MASKED}
        inner = [blocks.inline(m, roles) for m in fused for roles in _roles_of(m)[1:]]
        widths = [a.fused_width() for a in inner if a.fused_level == "attention"]
        report.flops = report.fused_flops = 4 * report.tokens**2 * sum(widths)
        moved = sum(self.moved.values())
        for name, module in self.modules.items():
            parent = self.modules.get(name.rpartition(".")[0]) if name else None
            keys = windows.get(id(module), report.tokens)
            try:
                flops, is_fused, elements = self.flops(name, module, parent, keys, inside)
            except Exception:
                report.uncounted.append(name)
                continue
            report.flops += flops
            moved += elements
            if not is_fused:
                continue
            depends = self.depends(name, module) or self.depends(name.rpartition(".")[0], parent)
            if depends or not masked.isdisjoint(ancestors(name)):
                report.depending_flops += flops
            else:
                report.fused_flops += flops
        report.pytorch = {what: n / moved for what, n in self.moved.items()}

    def depends(self, name: str, module: Any) -> bool:
        """Whether it runs fused only where its caller asks for nothing else, as a block does."""
        if not (isinstance(module, Fused) and module.fused_caveat):
            return False
        blocks = (m for m in self.above(name) if isinstance(m, Fused) and m.fused_level == "block")
        return not any(map(self.runs_fused, blocks))

    def flops(
        self, name: str, module: Any, parent: Any, keys: int, inside: set[int]
    ) -> tuple[int, bool, int]:
        """(FLOPs, whether they run fused, elements for each token); a token attends to `keys`, and
        a module further up computes what is `inside`, where that is plain."""
        tokens = self.report.tokens
        rows = tokens if in_stack(name) else 1
        fused = self.runs_fused(module)
        if isinstance(module, nn.Linear):
            covered = (is_ours(parent) or _computes_all(parent)) and self.runs_fused(parent)
            fused = fused or ((covered or id(module) in inside) and is_plain(module))
            if type(module) is not nn.Linear and isinstance(parent, nn.MultiheadAttention):
                fused = self.runs_fused(parent)  # its weight is read without a call
            elements = module.in_features + module.out_features
            return 2 * module.in_features * module.out_features * rows, fused, elements * (rows > 1)
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            by_ours = isinstance(parent, PatchEmbed) and is_ours(parent) and not is_hooked(module)
            fused = fused or (by_ours and self.runs_fused(parent))
            return 2 * module.weight.numel() * tokens, fused, 0
        mixin: Any = type(module)
        mixin = mixin if isinstance(module, Fused) else hosts.swapped_class(mixin) or Unfused
        if isinstance(module, nn.LayerNorm) or issubclass(mixin, Norm):
            known = hasattr(module, "normalized_shape") or hasattr(module, "weight")
            counts = rows > 1 and known and name not in self.called_norms
            return 0, fused, 2 * width_of(module) * counts
        width = _attention_width(module, mixin)
        flops = 4 * tokens * keys * width
        flops += sum(2 * p.numel() * rows for p in held_weights(module))
        return flops, fused, 4 * width


def _branches(module: Any) -> Iterator[tuple[Any, Any, list[Any]]]:
    """A block's steps and their branches as things are, and the modules that these run on."""
    if isinstance(module, blocks.Block):
        modules, place = listed(module)
        for step, branch in module.fused_branches(place):
            if branch is not None:
                yield step, branch, modules


def _roles_of(module: Any) -> list[Any]:
    """Of a fused module, and of branches inside that are no modules of their own."""
    steps = getattr(module.fused_roles, "steps", ())
    return [module.fused_roles, *(step.inline for step in steps if step.inline is not None)]


def _products(module: Any) -> Iterator[tuple[str, Any]]:
    """The Linears that a fused forward computes, by name."""
    for roles in _roles_of(module):
        every = (getattr(roles, n, "") for n in ("projections", "gate", "out", "fc1", "fc2"))
        for name in leaves(tuple(every), str):
            child = module.fused_child(name)
            if isinstance(child, nn.Module):
                yield name, child


def why_not_plain(child: nn.Module) -> str:
    """The reason that the report gives for a Linear that is not plain."""
    if is_hooked(child):
        return "it is hooked"
    if hasattr(child, "use_clipped_linears"):  # Gemma 4's
        return "its Linear cannot be read past it"
    if type(child) is nn.Linear:
        return f"its weight is a {type(child.weight).__name__}"
    name, home = type(child).__name__, type(child).__module__.partition(".")[0]
    return f"it is a {name}{f' of {home}' * (name == 'Linear')}, not an nn.Linear"


def _left_inside(module: Any) -> Iterator[tuple[str, Any, str]]:
    """The children that keep their own forward inside a fused one, and why."""
    for name, m in _products(module):
        if weight_and_bias(m) is None:
            yield name, m, why_not_plain(m)
    dropouts = []
    for roles in () if module.fused_searched else _roles_of(module):
        dropouts += [getattr(roles, "drop", ""), getattr(roles, "after", "")]
        act = module.fused_child(getattr(roles, "act", ""))
        if act is not None and not roles.gate and activation_name(act) is None:
            hooked = isinstance(act, nn.Module) and is_hooked(act)
            yield roles.act, act, "it is hooked" if hooked else "no kernel for this activation"
    for step in getattr(module.fused_roles, "steps", ()):
        dropouts += [name for name in step.tail if "." not in name]
    for name in dropouts:
        child = module.fused_child(name)
        if type(child) is nn.Dropout and child.p > 0:
            yield name, child, f"dropout p={child.p} is a kernel of its own in training"


def _called_pieces(block: Any) -> Iterator[tuple[str, str]]:
    """The children of a block that it must call, with the reason."""
    for name in block.fused_pieces:
        child = part(block, name)
        if isinstance(child, nn.Module) and not (is_noop(child) or can_inline(child)):
            reason = "it is hooked" if is_hooked(child) else verdict_of(child)
            yield name, reason or "no fused class for it: the block calls it"


def _tokens(modules: dict[str, nn.Module]) -> int:
    for name, p in modules[""].named_parameters():
        if name.endswith(POSITIONS) and p.ndim >= 2:
            grid = p.ndim == 4 and p.shape[1] == p.shape[2]  # segment-anything: (1, h, w, C)
            return p.shape[1] * p.shape[2] if grid else p.shape[-2]
    return DEFAULT_TOKENS


def _computes_all(module: Any) -> bool:
    """Whether a swapped module has a row for all that is inside it: a model has not."""
    return isinstance(module, Fused) and module.fused_level != "model"


def _attention_width(module: Any, mixin: Any) -> int:
    """H D of an attention module, swapped or not; 0 of another."""
    if isinstance(module, Attention):
        return module.num_heads * module.head_dim
    if level_of(mixin) != "attention":
        return 0
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim
    known: Any = module if isinstance(module, Fused) else blocks.inline(module, mixin.fused_roles)
    return known.fused_width()
