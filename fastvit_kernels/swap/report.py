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
from ..ops.common.samples import DropPathMode
from ..runtime.plain import is_hooked, is_plain
from . import hosts
from .hosts.fused import Fused, Norm, can_inline, is_noop, part, why_not_plain, width_of

POSITIONS = ("pos_embed", "pos_embedding", "position_embeddings", "position_embedding.weight")
MASKED = "fused where it is called without a mask"
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
            rms_norm, patch_embed; "ours" is a module of this package, fused as it is; "parts" is a
            block of which a branch keeps its own forward, "model" one that hands its parts
            something else: what it covers has rows of its own.
        left: modules that keep their own forward, and why. They stay as they were.
        tokens: the sequence length at which FLOPs and bytes are counted.
        flops, fused_flops: matmul FLOPs of a forward for one image (projections, MLPs, patch
            embedding, attention), and those that run in a fused op; from the weights' shapes, a
            layer outside the stack of blocks counted for one row.
        depending_flops: those of them that run fused only where the caller asks for nothing else.
        pytorch: what PyTorch computes inside modules that count as fused, such as RoPE, with its
            share of the elements that the layers read and write: a model, not a measurement.
        uncounted: modules whose FLOPs or bytes could not be counted.
        explanation: with explain=True, for each kind of module the candidates that were tried and
            how each fared.
        rebuilt: names of the norms whose output the backward rebuilds, by memory="low".
        rebuilt_rms: how many of these are RMSNorms.
        skipping: names of the norms of branches that compute nothing for the samples that they
            drop, by drop_path="skip" or because the host does not either (DINOv2). With "skip" a
            DropPath of no such branch is among `left`.
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

    @property
    def level(self) -> str:
        """ "block": every layer of the stack runs as a fused block; "parts"; or "none"."""
        if not self.swapped:
            return "none"
        blocks = any(s.level in ("block", "ours") for s in self.swapped)
        # An MLP that is an element of a list stands alone, as Qwen3-VL's mergers do.
        loose = any(
            s.level == "parts"
            or (s.level == "attention" and _in_stack(s.name))
            or (s.level == "mlp" and _in_stack(s.name.rpartition(".")[0]))
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
        layer_norms = len(self.rebuilt) - self.rebuilt_rms
        for kind, count in ("LayerNorm", layer_norms), ("RMSNorm", self.rebuilt_rms):
            if count:
                lines.append(f"{count} {kind} outputs are rebuilt in the backward")
        if self.skipping:
            lines.append(f"{len(self.skipping)} branches compute no sample that they drop")
        if self.uncounted:
            more = " ..." * (len(self.uncounted) > 3)
            lines.append(f"not counted: {', '.join(self.uncounted[:3])}{more}")
        if self.explanation:
            lines += ["", *self.explanation]
        return "\n".join(lines)


def ancestors(name: str) -> Iterator[str]:
    """The name itself, then its parents up to the model, ""."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _in_stack(name: str) -> bool:
    """Whether a name has a place number in it: blocks.3.mlp, encoder_layer_3."""
    return any(part.isdigit() for part in name.replace("_", ".").split("."))


def is_ours(module: object) -> bool:
    """Whether this is a part of our own models, with its own forward: fused without a swap."""
    own = isinstance(module, OURS) and type(module).forward in _OUR_FORWARDS
    return own and "forward" not in vars(module)


def verdict_of(module: Any) -> str | None:
    return module.fused_verdict() if isinstance(module, Fused) else None


def _called_pieces(block: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """The children of a block that it must call, with the reason."""
    for name in block.fused_pieces:
        child = part(block, name)
        if isinstance(child, nn.Module) and not (is_noop(child) or can_inline(child)):
            if is_hooked(child):
                reason = "it is hooked"
            else:
                reason = child.fused_verdict() if isinstance(child, Fused) else None
            yield name, child, reason or "no fused class for it: the block calls it"


def make_report(
    modules: dict[str, nn.Module], refused: dict[str, str], guesses: dict[str, str],
    drop_path: DropPathMode = "mask", why: Why = verdict_of,
) -> SwapReport:  # fmt: skip
    """The report on a model whose modules are these. It never raises.

    Args:
        refused: why a module of a known class was not swapped, by name; "" goes unsaid.
        guesses: the same of modules of unknown classes; a module around may know better.
        drop_path: what was asked for.
        why: of a swapped module or one of ours; a verdict holds for any call.
    """
    report = SwapReport()
    left: dict[str, Left] = {}

    def leave(name: str, module: nn.Module, reason: str) -> None:
        if reason:
            left.setdefault(name, Left(name, type(module).__name__, reason))

    for name, reason in refused.items():
        leave(name, modules[name], reason)
    reached = _note_skipping(report, modules, why)
    if drop_path == "skip":
        _leave_masks(modules, reached, leave)
    covered: set[str] = set()  # names whose module a wider one bypasses
    moved: Counter[str] = Counter()
    for name, module in modules.items():
        if is_ours(module):
            _count_ours(report, name, module, modules, why, leave)
        if not isinstance(module, Fused):
            continue
        try:
            _count_swapped(report, name, module, modules, covered, moved, leave, why)
        except Exception:  # a host's module in a state that nobody foresaw
            report.uncounted.append(name)
    for name in sorted(guesses.keys() - covered, key=[*modules].index):
        leave(name, modules[name], guesses[name])
    for name, module in modules.items():
        around = [modules[a] for a in ancestors(name) if a in modules]
        inside = any(is_ours(m) or _computes_all(m) for m in around)
        if not inside and module._parameters and not module._modules:
            plain = isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d))
            leave(name, module, "a plain product" if plain else "no fused class for it")
    report.left = list(left.values())
    report.tokens = _tokens(modules)
    total = _count_flops(report, modules, why)
    report.pytorch = {what: n / (total + sum(moved.values())) for what, n in moved.items()}
    return report


def _note_skipping(report: SwapReport, modules: dict[str, nn.Module], why: Why) -> set[int]:
    """The branches that skip what they drop; the ids of their DropPaths."""
    reached: set[int] = set()
    for name, module in modules.items():
        if hasattr(module, "fused_skips") and _runs_fused(module, why):
            for norm, path in module.fused_skips():  # pyright: ignore[reportCallIssue]
                report.skipping.append(f"{name}.{norm}" if name else norm)
                reached.add(id(path))
    return reached


def _leave_masks(modules: dict[str, nn.Module], reached: set[int], leave: Any) -> None:
    """Each DropPath whose branch computes what it drops."""
    for name, module in modules.items():
        rate = getattr(module, "drop_prob", getattr(module, "p", 0.0))
        if id(module) not in reached and rate and "Path" in type(module).__name__:
            leave(name, module, 'drop_path="skip" does not reach it: its branch computes all')


def _count_swapped(
    report: SwapReport, name: str, module: Any, modules: dict[str, nn.Module],
    covered: set[str], moved: Counter[str], leave: Any, why: Why,
) -> None:  # fmt: skip
    prefix = f"{name}." if name else ""
    if module.fused_level == "epilogue":
        return
    reason = why(module)
    if reason is not None:
        leave(name, module, reason)
        return
    for child, m, because in module.fused_unfused_children():
        leave(prefix + child, m, because)
    for what, elements in module.fused_pytorch():
        moved[what] += round(elements)
    if module.fused_level == "block":
        called = {prefix + child: (m, because) for child, m, because in _called_pieces(module)}
        for child, (m, because) in called.items():
            leave(child, m, because)
            if not isinstance(m, Fused) and "norm" in child.rpartition(".")[2]:
                widths = [p.shape[-1] for p in m.parameters() if p.ndim]
                moved[type(m).__name__] += 2 * widths[0] if widths else 0
        rebuilt = list(module.fused_rebuilt()) if hasattr(module, "fused_rebuilt") else []
        report.rebuilt += [prefix + norm for norm in rebuilt]
        levels = [module.get_submodule(norm).fused_level for norm in rebuilt]
        report.rebuilt_rms += levels.count("rms_norm")
        whole = not any(prefix + body in called for body in module.fused_bodies)
        report.swapped.append(Swapped(name, type(module).__name__, "block" if whole else "parts"))
        if name and _gets_masks(name, module, modules):
            leave(name, module, MASKED)
        covered |= {
            n for n in modules
            if n.startswith(prefix) and not any(a in called for a in ancestors(n))
        }  # fmt: skip
    elif name not in covered:
        report.swapped.append(Swapped(name, type(module).__name__, module.fused_level))
        leave(name, module, module.fused_caveat)


def _count_ours(
    report: SwapReport, name: str, module: nn.Module, modules: dict[str, nn.Module], why: Why,
    leave: Any,
) -> None:  # fmt: skip
    """A part of our own models; the widest has the row."""
    for child, m in module._modules.items():
        if m is not None and hasattr(m, "in_features") and not is_plain(m):
            leave(f"{name}.{child}" if name else child, m, why_not_plain(m))
    if any(is_ours(modules[a]) for a in ancestors(name) if a != name):
        return
    reason = why(module)
    if reason is None:
        report.swapped.append(Swapped(name, type(module).__name__, "ours"))
    else:
        leave(name, module, reason)


def _gets_masks(name: str, block: Any, modules: dict[str, nn.Module]) -> bool:
    """Whether what calls a fused block holds a mask for it, as open_clip's text tower does, and the
    host's forward runs with one."""
    names = block.fused_arguments.names[1:]
    if not any("mask" in n and n not in block.fused_extra_kwargs for n in names):
        return False
    for above in ancestors(name.rpartition(".")[0]):
        own = modules[above]
        if any("mask" in n and b is not None and b.ndim > 1 for n, b in own._buffers.items()):
            return True
        if any("pos" in n for n in own._parameters):
            return False  # a tower of its own
    return False


def _tokens(modules: dict[str, nn.Module]) -> int:
    for name, p in modules[""].named_parameters():
        if name.endswith(POSITIONS) and p.ndim >= 2:
            grid = p.ndim == 4 and p.shape[1] == p.shape[2]  # segment-anything: (1, h, w, C)
            return p.shape[1] * p.shape[2] if grid else p.shape[-2]
    return DEFAULT_TOKENS


def _computes_all(module: Any) -> bool:
    """Whether a swapped module has a row for all that is inside it: a model has not."""
    return isinstance(module, Fused) and module.fused_level != "model"


def _runs_fused(module: Any, why: Why) -> bool:
    return (isinstance(module, Fused) or is_ours(module)) and why(module) is None


def _attention_width(module: Any) -> int:
    """H D of an attention module, from its heads or from its projections."""
    if hasattr(module, "fused_width"):
        return module.fused_width()
    for name in ("num_heads", "num_attention_heads"):
        heads, size = getattr(module, name, None), getattr(module, "head_dim", None)
        if heads and size:
            return heads * size
    for name, third in (("qkv", 3), ("q_proj", 1), ("query", 1)):
        projection: Any = getattr(module, name, None)
        if isinstance(getattr(projection, "out_features", None), int):
            return projection.out_features // third
    raise ValueError("neither heads nor projections are known")


def _count_flops(report: SwapReport, modules: dict[str, nn.Module], why: Why) -> int:
    """Fills in the FLOPs; returns the elements that the layers read and write for each token."""
    moved = 0
    fused: list[Any] = [m for m in modules.values() if isinstance(m, Fused) and why(m) is None]
    inside = {id(m) for f in fused for m in f.fused_products()}
    windows = {id(m): size for f in fused for m, size in f.fused_windows()}
    masked = {row.name for row in report.left if row.reason == MASKED}
    inlined = 4 * report.tokens**2 * sum(width for m in fused for width in m.fused_widths())
    report.flops += inlined
    report.fused_flops += inlined
    for name, module in modules.items():
        parent = modules.get(name.rpartition(".")[0]) if name else None
        try:
            flops, is_fused, elements = _flops(
                name, module, parent, id(module) in inside, report.tokens,
                windows.get(id(module), report.tokens), why,
            )  # fmt: skip
        except Exception:
            report.uncounted.append(name)
            continue
        report.flops += flops
        moved += elements
        depends = not masked.isdisjoint(ancestors(name)) or any(
            isinstance(m, Fused) and m.fused_caveat and not _is_covered(n, modules, why)
            for n, m in ((name, module), (name.rpartition(".")[0], parent))
        )
        if is_fused and depends:
            report.depending_flops += flops
        elif is_fused:
            report.fused_flops += flops
    return moved


def _is_covered(name: str, modules: dict[str, nn.Module], why: Why) -> bool:
    """Whether a fused block calls this module, and never with a mask."""
    above: list[Any] = [modules.get(a) for a in ancestors(name) if a != name]
    return any(isinstance(m, Fused) and m.fused_level == "block" and why(m) is None for m in above)


def _flops(
    name: str, module: Any, parent: nn.Module | None, inside: bool, tokens: int, keys: int,
    why: Why,
) -> tuple[int, bool, int]:  # fmt: skip
    """(FLOPs, whether they run fused, elements that are read and written for each token)

    Args:
        inside: a module further up computes this one, where it is plain.
        keys: how many tokens a token attends to.
    """
    rows = tokens if _in_stack(name) else 1
    mixin: Any = type(module) if isinstance(module, Fused) else hosts.swapped_class(type(module))
    if isinstance(module, nn.Linear):
        whole = is_ours(parent) or _computes_all(parent)
        covered = inside or (whole and _runs_fused(parent, why))
        fused = _runs_fused(module, why) or (covered and is_plain(module))
        if type(module) is not nn.Linear and isinstance(parent, nn.MultiheadAttention):
            fused = _runs_fused(parent, why)  # its weight is read without a call
        elements = module.in_features + module.out_features
        return 2 * module.in_features * module.out_features * rows, fused, elements * (rows > 1)
    if isinstance(module, (nn.Conv2d, nn.Conv3d)):
        fused = _runs_fused(module, why)
        if isinstance(parent, PatchEmbed) and not is_hooked(module):
            fused = fused or (is_ours(parent) and why(parent) is None)
        return 2 * module.weight.numel() * tokens, fused, 0
    if isinstance(module, nn.LayerNorm) or (mixin is not None and issubclass(mixin, Norm)):
        known = hasattr(module, "normalized_shape") or hasattr(module, "weight")
        return 0, _runs_fused(module, why), 2 * width_of(module) * (rows > 1) if known else 0
    if isinstance(module, Attention):
        width = module.num_heads * module.head_dim
        return 4 * tokens * keys * width, _runs_fused(module, why), 4 * width
    if mixin is None or mixin.fused_level != "attention":
        return 0, False, 0
    width = _attention_width(module)
    flops = 4 * tokens * keys * width
    if isinstance(module, nn.MultiheadAttention):
        flops += 2 * 3 * module.embed_dim**2 * rows
    return flops, _runs_fused(module, why), 4 * width
