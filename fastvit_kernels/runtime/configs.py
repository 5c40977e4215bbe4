"""Which launch config a kernel takes for a shape on a GPU: shipped, tuned by the user, or forced.

A `ConfigTable` belongs to one decision ("layer_norm_fwd") and stands next to its kernel. Its key is
what the decision may depend on, sizes already put into buckets, so that few keys cover all shapes.
`default` is what ships; a table that `fastvit-kernels tune` measured on this GPU goes before it,
and is read from the user's cache folder (tuned_table.py) at the first choice on that GPU.
Nothing is measured at a user's first step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from .backend import Gpu

Key = tuple[int | str, ...]
Tuned = Mapping[tuple[str, Key], Any]  # (table, key) -> config
Config = TypeVar("Config", bound=tuple)  # a NamedTuple of ints, strings and booleans
Plan = TypeVar("Plan")


class Choice(NamedTuple):
    """One decision that was taken: `table` chose for `key` on `gpu`."""

    table: str
    gpu: Gpu
    key: Key


TABLES: dict[str, Any] = {}  # name -> ConfigTable
_tuned: dict[str, Tuned] = {}  # name of a GPU -> what the user measured there
_forced: dict[str, Any] = {}  # table -> config, or a rule that gives one
_recorders: list[dict[Choice, None]] = []
_on_change: list[Callable[[], object]] = []  # empty caches that hold a former choice
_loading = threading.Lock()


class ConfigTable(Generic[Config]):
    """The launch configs of one decision.

    Args:
        name: unique, that of the kernel where there is one decision for it.
        configs: all that ship: each that `default` may return, and what `tune` tries.
        default: (gpu, *key) -> config.
        fits: (gpu, config, *key) -> whether the config can run there; by default always.
    """

    def __init__(
        self,
        name: str,
        configs: Sequence[Config],
        default: Callable[..., Config],
        fits: Callable[..., bool] = lambda *_: True,
    ):
        assert name not in TABLES
        self.name, self.configs, self.default, self.fits = name, tuple(configs), default, fits
        self._chosen: dict[tuple[Gpu, Key], Config] = {}
        TABLES[name] = self
        _on_change.append(self._chosen.clear)

    def choose(self, gpu: Gpu, *key: int | str) -> Config:
        """The config for this key on this GPU: forced, else tuned, else the default."""
        for recorder in _recorders:
            recorder[Choice(self.name, gpu, key)] = None
        config: Any = self._chosen.get((gpu, key))
        if config is None:
            config = _forced.get(self.name)
            config = config(gpu, *key) if callable(config) else config
            if config is None:
                config = tuned_on(gpu).get((self.name, key))
            if config is None or not self.fits(gpu, config, *key):
                config = self.default(gpu, *key)
            self._chosen[gpu, key] = config
        return config

    def candidates(self, gpu: Gpu, *key: int | str) -> list[Config]:
        """The configs that can run for this key on this GPU, the default first."""
        default = self.default(gpu, *key)
        others = [c for c in self.configs if c != default and self.fits(gpu, c, *key)]
        return [default, *others]


def tuned_on(gpu: Gpu) -> Tuned:
    """What the user's table says for this GPU: read once; nothing for one that is not there."""
    if not gpu.name:
        return {}
    with _loading:
        if gpu.name not in _tuned:
            from . import tuned_table  # at the first choice on a GPU: importing reads no file

            _tuned[gpu.name] = {}  # a warning may be made an exception: it comes once all the same
            _tuned[gpu.name] = tuned_table.load(gpu)
        return _tuned[gpu.name]


def launch_plan(plan: Callable[..., Plan]) -> Callable[..., Plan]:
    """Remember what a launch derives from its sizes: `plan` is called once for each arguments.

    It is forgotten when a choice changes. The first argument must be the GPU.
    """
    cached = functools.lru_cache(maxsize=1024)(plan)
    _on_change.append(cached.cache_clear)
    return cached


def on_change(forget: Callable[[], object]) -> None:
    """Call `forget` whenever a choice may change: for caches that hold one."""
    _on_change.append(forget)


def _forget() -> None:
    for forget in _on_change:
        forget()


def install(gpu: Gpu, tuned: Tuned | None) -> None:
    """Set the tuned configs of the GPU of this name; None reads the user's table anew."""
    if tuned is None:
        _tuned.pop(gpu.name, None)
    else:
        _tuned[gpu.name] = dict(tuned)
    _forget()


@contextmanager
def forced(table: str, config: Any) -> Iterator[None]:
    """Inside, `table` chooses `config`, or config(gpu, *key), for each key that it fits."""
    former = {name: outer for name, outer in _forced.items() if name == table}
    _forced[table] = config
    _forget()
    try:
        yield
    finally:
        del _forced[table]
        _forced.update(former)
        _forget()


@contextmanager
def recording() -> Iterator[dict[Choice, None]]:
    """Inside, every choice joins the yielded dict, in the order of first use."""
    choices: dict[Choice, None] = {}
    _recorders.append(choices)
    _forget()  # caches above the tables would hide choices
    try:
        yield choices
    finally:
        # by identity: two recorders that saw the same are equal
        _recorders[:] = [r for r in _recorders if r is not choices]
