"""A batch that a user gives: how a model is called with it, and what is said where it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .select import kept


def check_batch(call: str, argument: str, batch: Any, also: str = "") -> None:
    """Raises: TypeError, before the model is touched, for what is no batch.

    Args:
        call, argument: whose it is, such as "swap_in" and "example".
        also: what else this call takes.
    """
    kinds = f"a tensor, a tuple of forward's arguments or a dict of keyword arguments{also}"
    wanted = f"{call}: {argument} must be {kinds}, got"
    if isinstance(batch, tuple) and batch and all(isinstance(x, int) for x in batch):
        shape = ", ".join(map(str, batch))
        raise TypeError(f"{wanted} {len(batch)} numbers; of a shape: torch.randn({shape})")
    if isinstance(batch, (Tensor, tuple, Mapping)):
        return
    kind, hint = type(batch), f"; if forward takes one as it is: ({argument},)"
    if kind.__module__ == "numpy":
        hint = f": torch.from_numpy({argument})"
    elif callable(batch):
        hint = ""
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    raise TypeError(f"{wanted} {name}{hint}")


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a batch is given to a model: a tensor, a tuple of arguments, or keyword arguments."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def copied(x: Any, dtype: torch.dtype) -> Any:
    """Arguments whose tensors are of this call alone; floating-point ones in the dtype, with a
    gradient."""
    if isinstance(x, Tensor):
        floats = x.is_floating_point()
        return x.detach().to(dtype if floats else None, copy=True).requires_grad_(floats)
    if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        return type(x)(copied(v, dtype) for v in x)
    return {k: copied(v, dtype) for k, v in x.items()} if isinstance(x, Mapping) else x


@contextmanager
def noting(call: str, argument: str, batch: Any) -> Iterator[None]:
    """Inside runs the model without us: what it raises stays as it is, with a note that says so.

    Python 3.10 knows no notes: there the error comes without.
    """
    try:
        yield
    except Exception as error:
        note = f"{call}: the model itself raised on {argument} {_shown(batch)}"
        if isinstance(batch, tuple):
            note += "; a tuple is forward's arguments: give the images alone, labels are not needed"
        if hasattr(error, "add_note"):
            error.add_note(note)
        raise


def _shown(x: Any) -> str:
    """Types, shapes and devices, as they lie in a batch."""
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {[*x.shape]} on {x.device}"
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{k}: {_shown(v)}" for k, v in x.items()) + "}"
    if isinstance(x, (tuple, list)):
        return "(" + ", ".join(map(_shown, x)) + ")"
    return repr(x) if isinstance(x, (int, float, str, type(None))) else type(x).__name__


def try_example(model: nn.Module, example: Any, undo: Callable[[], None]) -> None:
    """Call the model once, and leave buffers and random numbers as they were.

    Raises: what the host raises on this example, after `undo`.
    """
    args, kwargs = arguments_of(example)
    with kept(model):
        try:
            model(*args, **kwargs)
            return
        except Exception as error:
            failure = error
    undo()
    with kept(model), noting("swap_in", "example", example):
        model(*args, **kwargs)  # the host's own words
    raise failure
