"""Which launch config a kernel takes for a shape on a GPU: shipped, tuned by the user, or forced.

A `ConfigTable` belongs to one decision ("layer_norm_fwd") and stands beside its kernel. Its key is
what the decision may depend on, sizes already put into buckets, so that few keys cover all shapes.
`default` is what ships; a table that `fastvit-kernels tune` measured on this GPU goes before it.
Nothing is measured at a user's first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from fastvit_kernels.backend import Gpu

Config = TypeVar("Config", bound=tuple)  # a NamedTuple of ints, strings and booleans
Key = tuple[int | str, ...]


class Choice(NamedTuple):
    """One decision that was taken: `table` chose for `key` on `gpu`."""

    table: str
    gpu: Gpu
    key: Key


TABLES: dict[str, ConfigTable[Any]] = {}
_tuned: dict[tuple[str, str, Key], Any] = {}  # (table, arch, key) -> config
_forced: dict[str, Any] = {}  # table -> config
_recorders: list[dict[Choice, None]] = []
_on_change: list[Callable[[], object]] = []  # empty caches that hold a former choice


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
        config = self._chosen.get((gpu, key))
        if config is None:
            config = _forced.get(self.name) or _tuned.get((self.name, gpu.arch, key))
            if config is None or not self.fits(gpu, config, *key):
                config = self.default(gpu, *key)
            self._chosen[gpu, key] = config
        return config

    def candidates(self, gpu: Gpu, *key: int | str) -> list[Config]:
        """The configs that can run for this key on this GPU, the default first."""
        default = self.default(gpu, *key)
        others = [c for c in self.configs if c != default and self.fits(gpu, c, *key)]
        return [default, *others]


def on_change(forget: Callable[[], object]) -> None:
    """Call `forget` whenever a choice may change: for caches that hold one."""
    _on_change.append(forget)


def _forget() -> None:
    for forget in _on_change:
        forget()


def install(tuned: dict[tuple[str, str, Key], Any]) -> None:
    """Replace the tuned configs, (table, arch, key) -> config; an empty dict removes them."""
    _tuned.clear()
    _tuned.update(tuned)
    _forget()


@contextmanager
def forced(table: str, config: Any) -> Iterator[None]:
    """Inside, `table` chooses `config` for each key that it fits: for tests and `tune`."""
    former = _forced.get(table)
    _forced[table] = config
    _forget()
    try:
        yield
    finally:
        if former is None:
            del _forced[table]
        else:
            _forced[table] = former
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
        _recorders.remove(choices)
