"""What the commands share: a user's mistake in one line, packages that are optional."""

from __future__ import annotations

import argparse
import importlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from ..accuracy.accuracy import Error


class CommandError(Exception):
    """A mistake that the user can mend, wherever it is met; its text is all that is shown."""


class Parser(argparse.ArgumentParser):
    """Says a mistake in one line, where argparse puts the whole usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help says what there is)\n")


@contextmanager
def refusing(what: str, *errors: type[BaseException]) -> Iterator[None]:
    """Turn these errors into a CommandError that says what went wrong, then why."""
    try:
        yield
    except CommandError:  # says it already
        raise
    except errors as error:
        told = getattr(error, "strerror", None) or str(error)
        reason = " ".join(told.split())[:400] or type(error).__name__
        lacks = "it lacks " if isinstance(error, KeyError) else ""
        raise CommandError(f"{what}: {lacks}{reason}") from error


def require(module: str, package: str, install: str = '-e ".[train]"') -> ModuleType:
    """Import `module`, or say how to install what it belongs to."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise CommandError(f"this command needs {package}: pip install {install}") from error


def errors_told(logits: Error, gradients: Sequence[Error]) -> str:
    """Errors of a model's step in plain words: those that fail, else the logits' and the worst
    gradient's. Of an error's two norms it is that nearer to its limit."""
    failed = [error for error in (logits, *gradients) if not error.passed]
    which = "" if failed else "worst "
    lines = []
    for error in failed or (logits, max(gradients, key=lambda error: error.share)):
        name = "logits" if error is logits else f"{which}gradient, {error.name.removeprefix('d')}"
        kind, numbers = "largest error", (error.max, error.torch_max, error.limit_max)
        if error.rms * error.limit_max > error.max * error.limit_rms:
            kind, numbers = "rms error", (error.rms, error.torch_rms, error.limit_rms)
        ours, own, limit = (f"{x:.2e}" for x in numbers)
        allowed = f"allowed, twice that and a floor: {limit}"
        lines.append(f"  {name}: {kind} {ours} (PyTorch's own {own}; {allowed})")
    return "\n".join(lines)


def finite(value: Any) -> Any:
    """The value with null for each number that is not finite: JSON has none."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
