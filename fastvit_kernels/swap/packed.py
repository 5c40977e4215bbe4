"""Crops of several sizes through a model at once: DINO's, iBOT's and DINOv2's multi-crop.

The model's own forward runs for each size: its embedding, positions, tables, final norm and head
need no twin here. The first block to be called waits: from within that call the forward of the next
size begins, and so on. When the last one reaches the block, all tokens are there and become one
sequence, (total, C). Each block then runs once, attention within each image, and gives every size
its own part: now to the last, later to those that wait.

What stands between two blocks may only hand on what the first gave. So each call of a block is
compared with that: the very tensors, unchanged, the same other arguments. Where they differ, and
where a block is none that reads tokens apart from each other, each size runs alone, from its images
on, and a warning says why.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..models import vit
from ..models.masked import why_apart
from ..models.packing import Crops
from ..runtime import dispatch
from ..runtime.compat import KNOWS_VERSIONS, is_compiled_in_place, saves_are_hooked, version
from ..runtime.plain import is_hooked, is_watched_everywhere
from . import plans
from .hosts import fused
from .hosts.block import Block, packing_of, unlike
from .hosts.roles import as_result

_CHECKPOINTS = "grad_checkpointing", "gradient_checkpointing"  # timm's flag, transformers'


class _Apart(Exception):
    """Why each size runs alone."""


class _Told(_Apart):
    """Of what the blocks' calls alone could tell."""


class Packed(nn.Module):
    """What `packed` gives: a module with the model as its child `model`, whose parameters, modes
    and device are its own.

    Attributes:
        alone: why each size ran alone in the last call, or None: it ran as one sequence.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self.alone: str | None = None
        self._known: dict[Any, str] = {}  # reasons that only a call could tell, by its kind
        self._told: set[str] = set()

    def extra_repr(self) -> str:
        return "" if self.alone is None else f"each size alone: {self.alone}"

    def forward(self, crops: Sequence[Tensor], **kwargs: Any) -> list[Any]:
        """A result for each entry of crops; see `packed`."""
        compiling = torch.compiler.is_compiling()  # what disables the compiler imports it
        run = torch.compiler.disable(self._run) if compiling else self._run
        return run(crops, kwargs)  # pyright: ignore[reportCallIssue]

    def _run(self, crops: Sequence[Tensor], kwargs: dict[str, Any]) -> list[Any]:
        _check(crops, kwargs)
        places: dict[tuple[int, ...], list[int]] = {}
        for place, images in enumerate(crops):
            places.setdefault(tuple(images.shape[2:]), []).append(place)
        entries = [[crops[p] for p in some] for some in places.values()]
        batches = [each[0] if len(each) == 1 else torch.cat(each) for each in entries]
        results: list[Any] = [None] * len(crops)
        for some, result in zip(places.values(), self._results(batches, kwargs), strict=True):
            counts = [len(crops[p]) for p in some]
            for place, part in zip(some, _parts(result, counts), strict=True):
                results[place] = part
        return results

    def _results(self, batches: list[Tensor], kwargs: dict[str, Any]) -> list[Any]:
        """The model's result for each size."""
        kind = (self.model.training, torch.is_grad_enabled(), *sorted(kwargs))
        self.alone = self._known.get(kind) if len(batches) > 1 else None
        if len(batches) > 1 and self.alone is None:
            try:
                return _Pass(self.model, _ways_of(self.model), batches, kwargs).run()
            except _Apart as reason:
                self.alone = str(reason)
                if isinstance(reason, _Told):
                    self._known[kind] = self.alone
        if self.alone not in (None, *self._told):
            self._told.add(self.alone)
            warnings.warn(f"packed: each size runs alone: {self.alone}", stacklevel=6)
        return _Pass(self.model, {}, batches, kwargs).run()


def packed(model: nn.Module) -> Packed:
    """Runs a model on crops of several sizes at once, as self-supervised training has them.

    results = fk.packed(model)([two_of_224, eight_of_96])

    Args:
        model: after `swap_in`, or ours: one that takes images of several sizes alone, too (timm:
            dynamic_img_size=True; transformers: interpolate_pos_encoding=True in the call). It is
            not changed; parameters and modes are shared.
    Returns:
        A module. It takes a list of images, each (B, C, height, width) in one dtype on one device,
        and keyword arguments without tensors for the model; it gives a list: for each entry what
        `model` gives for it. Entries of one size go through the model together, in their order. In
        blocks all tokens are one sequence (total, C), attention sees each image alone, and
        DropPath draws for each size and image. Under no_grad what each block gives is kept until
        the call ends, as training does. torch.compile runs it eager.
    Raises: TypeError, ValueError for crops that are no list of such images, or that the model
        refuses: with the entry, what came and what is wanted.

    A model with blocks that cannot run so (relative positions, windows, masks, hooks, checkpoints,
    blocks that FSDP2 has sharded, what is not swapped) runs each size alone: a warning says why,
    and `alone` of the result. Wrap before DDP: DDP(fk.packed(model)). Derivation: docs/varlen.md.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"packed: model must be an nn.Module, got {type(model).__name__}")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise TypeError("packed: model must be what DDP wraps, got DDP: DDP(fk.packed(model))")
    return Packed(model)


def _check(crops: Any, kwargs: dict[str, Any]) -> None:
    wanted = "a list of images (B, C, height, width)"
    if not isinstance(crops, (list, tuple)):
        raise TypeError(f"packed: crops must be {wanted}, got {type(crops).__name__}")
    if not crops:
        raise ValueError(f"packed: crops must be {wanted}, got an empty one")
    for place, x in enumerate(crops):
        if not isinstance(x, Tensor):
            raise TypeError(f"packed: crops[{place}] must be a tensor, got {type(x).__name__}")
        if x.ndim != 4 or not len(x):
            form = "(B, C, height, width) with B > 0"
            raise ValueError(f"packed: crops[{place}] must be {form}, got {tuple(x.shape)}")
        kinds = [(t.shape[1], t.dtype, t.device) for t in (x, crops[0])]
        for what, came, first in zip(("channels", "dtype", "device"), *kinds, strict=True):
            if came != first:
                raise ValueError(
                    f"packed: crops[{place}] must have the {what} of crops[0], {first}, got {came}"
                )
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            raise TypeError(f"packed: {name} must be no tensor: it would be of one size alone")


def _parts(result: Any, counts: list[int]) -> list[Any]:
    """What a model gave for sum(counts) images, for each of the counts."""
    if len(counts) == 1:
        return [result]
    if isinstance(result, Tensor) and result.ndim and len(result) == sum(counts):
        return list(result.split(counts))
    if isinstance(result, dict):
        columns = zip(*(_parts(v, counts) for v in result.values()), strict=True)
        return [type(result)(**dict(zip(result, c, strict=True))) for c in columns]
    if type(result) in (tuple, list):
        parts = [_parts(v, counts) for v in result]
        return [type(result)(part[i] for part in parts) for i in range(len(counts))]
    if result is None:
        return [None] * len(counts)
    found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
    raise TypeError(
        f"packed: entries of one size must each have their part of what the model gives for "
        f"{sum(counts)} images, got {found}"
    )


# Which blocks run packed, and how.

# (tokens (total, C), packing) -> tokens
Way = Callable[[Tensor, Crops], Tensor]


def _ways_of(model: nn.Module) -> dict[Any, Way]:
    """How each block runs, asked before its calls are taken over; _Apart where one cannot."""
    if fused.is_traced() or is_watched_everywhere():
        raise _Apart("somebody traces the model, or watches every module")
    blocks = []
    for m in model.modules():
        if is_compiled_in_place(m) or "_orig_mod" in m._modules:
            raise _Apart(f"{type(m).__name__} is compiled")
        if any(getattr(m, name, False) is True for name in _CHECKPOINTS):
            raise _Apart("its blocks run inside checkpoints")
        hooks = (*m._forward_pre_hooks.values(), *m._forward_hooks.values())
        if any(str(getattr(h, "__module__", "")).startswith("torch.distributed.") for h in hooks):
            raise _Apart(f"{type(m).__name__} is sharded")
        if isinstance(m, (Block, vit.Block)):
            blocks.append(m)
    if not blocks:
        raise _Apart("it has no block that runs fused: swap_in comes first")
    return {block: _way_of(block) for block in blocks}


def _way_of(block: Any) -> Way:
    swapped, reason = isinstance(block, Block), None
    if is_hooked(block):
        reason = f"a {type(block).__name__} is hooked"
    elif swapped and plans.plan_of(block) is None:
        reason = block.fused_verdict() or block.fused_blocked()
        plans.learn(block, None, {"packing": None})
    reason = reason or (block.fused_unpacked() if swapped else why_apart(block))
    if reason is not None:
        raise _Apart(reason)
    if not swapped:
        return lambda x, packing: vit.Block.forward(block, x, packing=packing)
    if (found := plans.plan_of(block)) is None:
        return lambda x, packing: block.fused_forward(x, packing=packing)
    plan, held = found
    return lambda x, packing: plan.run(held, x, {"packing": packing})


def _given_to_ours(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x and {"rope": ...} of a call of a block of ours, or None."""
    given = {"rope": None, **dict(zip(("x", "rope"), args, strict=False)), **kwargs}
    x = given.pop("x", None)
    return (x, given) if isinstance(x, Tensor) and len(given) == 1 else None


def _version(x: Any) -> int:
    """Of what x holds; 0 where nobody counts."""
    known = isinstance(x, Tensor) and KNOWS_VERSIONS and not x.is_inference()
    return version(x) if known else 0


def _alike(one: Any, two: Any) -> bool:
    """Whether two calls have the same arguments: the very tensors, equal settings."""
    if isinstance(one, (tuple, list)) and type(one) is type(two):
        return len(one) == len(two) and all(map(_alike, one, two))
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_alike(v, two[n]) for n, v in one.items())
    plain = (bool, int, float, str)
    return one is two or (type(one) is type(two) and isinstance(one, plain) and one == two)


class _Size:
    """The forward of one size, as far as it has come."""

    def __init__(self) -> None:
        self.steps = 0  # calls of blocks
        self.x: Any = None  # what the next block must get, and its version
        self.version = 0
        self.rest: Any = None  # the other arguments of every call

    def expects(self, x: Any) -> None:
        self.x, self.version = x, _version(x)


class _Pass:
    """One packed call of a model."""

    def __init__(
        self, model: nn.Module, ways: dict[Any, Way], batches: list[Tensor], kwargs: dict[str, Any]
    ):
        self.model, self.ways, self.batches, self.kwargs = model, ways, batches, kwargs
        self.sizes = [_Size() for _ in batches]
        self.results: list[Any] = [None] * len(batches)
        self.now = -1  # the size whose forward runs
        self.done: list[tuple[Any, list[Tensor]]] = []  # each block, and what it gave the sizes
        self.packing: Crops | None = None
        self.tokens: Any = None  # (total, C), after the last block that is done
        self.modes = torch.is_grad_enabled(), saves_are_hooked()

    def run(self) -> list[Any]:
        """The model's result for each size."""
        self.taken = {block: self._taking(block, threading.get_ident()) for block in self.ways}
        try:
            for block, call in self.taken.items():
                block.__dict__["forward"] = call
            for place, size in enumerate(self.sizes):
                if not size.steps:  # else it began inside another
                    self._begin(place)
        finally:
            for block, call in self.taken.items():
                if block.__dict__.get("forward") is call:
                    del block.__dict__["forward"]
        return self.results

    def _taking(self, block: Any, thread: int) -> Callable[..., Any]:
        """What stands for a block's forward meanwhile, for the thread that runs it."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return type(block).forward(block, *args, **kwargs)
            return self.call(block, args, kwargs)

        return forward

    def _begin(self, place: int) -> None:
        before, self.now, images = self.now, place, self.batches[place]
        try:
            self.results[place] = self.model(images, **self.kwargs)
        except (AssertionError, ValueError) as error:
            if self.sizes[place].steps:
                raise
            wanted = f"must have sizes that the model takes, got {tuple(images.shape)}: {error}"
            raise ValueError(f"packed: crops {wanted}") from error
        finally:
            self.now = before

    def call(self, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a block gives the size whose forward calls it."""
        place, last = self.now, len(self.sizes) - 1
        size = self.sizes[place]
        if not args or block.__dict__["forward"] is not self.taken[block]:
            raise _Told("somebody else calls its blocks")
        x, rest = args[0], (args[1:], kwargs)
        if size.steps == 0:
            if (torch.is_grad_enabled(), saves_are_hooked()) != self.modes:
                raise _Told("its blocks run inside checkpoints, or in another mode")
            size.expects(x)
            size.rest = rest
        if x is not size.x or _version(x) != size.version or not _alike(rest, size.rest):
            raise _Told("something stands between its blocks, or tells them apart")
        size.steps += 1
        if place < last and size.steps == 1:
            self._begin(place + 1)
        if place == last:
            self._compute(block)
        if len(self.done) < size.steps or self.done[size.steps - 1][0] is not block:
            raise _Told("the sizes do not pass the same blocks")
        y = self.done[size.steps - 1][1][place]
        size.expects(y)
        return as_result(y, block.fused_roles.result) if isinstance(block, Block) else y

    def _compute(self, block: Any) -> None:
        """Runs a block on the tokens of all sizes."""
        now = self.done[-1][1] if self.done else [size.x for size in self.sizes]
        swapped, calls = isinstance(block, Block), []
        for size, x in zip(self.sizes, now, strict=True):
            args, kwargs = (x, *size.rest[0]), size.rest[1]
            take = block.fused_given if swapped else _given_to_ours
            if (given := take(args, kwargs)) is None:
                raise _Told(f"a {type(block).__name__} is called with what it does not run fused")
            calls.append(given)
        reason = unlike(calls) or (block.fused_unlike(calls) if swapped else None)
        if reason is not None:
            raise _Told(reason)
        if self.packing is None:
            self.packing = packing_of(calls)
            self.tokens = Crops.join(now)
        elif not _alike([extras for _, extras in calls], [*self.packing.given]):
            raise _Told("its blocks read other arguments")
        with ExitStack() as stack:
            for listener in dispatch.listeners:
                stack.enter_context(listener.call(block, False, (now[-1],), {}))
            y = self.ways[block](self.tokens, self.packing)
        self.tokens = y if isinstance(y, Tensor) else y[block.fused_roles.result[1]]
        self.done.append((block, self.packing.split(self.tokens)))
