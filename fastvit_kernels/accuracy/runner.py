"""Runs a case by the 2x rule, outputs poisoned."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..runtime import values
from ..runtime.backend import backend
from .accuracy import Error
from .op import Case


@contextmanager
def quiet_interpreter() -> Iterator[None]:
    """Without numpy's warnings from Triton's interpreter, which computes masked-out lanes too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"triton\.")
        yield


@contextmanager
def poisoned() -> Iterator[None]:
    """Inside, torch.empty gives NaN: what no kernel wrote cannot be a former right result."""
    former = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # pyright: ignore
    )
    outer, values.poisoned = values.poisoned, values.poisoned or not former[0]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore
    try:
        yield
    finally:
        values.poisoned = outer
        torch.use_deterministic_algorithms(former[0], warn_only=former[1])
        torch.utils.deterministic.fill_uninitialized_memory = former[2]  # pyright: ignore


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]


@dataclass(frozen=True)
class Result:
    """One case in one dtype: its errors, or why there are none."""

    name: str
    dtype: str
    errors: list[Error]
    failure: str | None
    seconds: float

    @property
    def label(self) -> str:
        return f"{self.name}, {self.dtype}"

    @property
    def passed(self) -> bool:
        return self.failure is None and all(e.passed for e in self.errors)

    @property
    def why(self) -> str:
        """What is wrong with it, in a line."""
        return self.failure or "; ".join(str(e) for e in self.errors if not e.passed)

    def as_dict(self) -> dict[str, Any]:
        """What JSON can hold."""
        tensors = [{**asdict(e), "passed": e.passed} for e in self.errors]
        return {
            "name": self.name,
            "dtype": self.dtype,
            "passed": self.passed,
            "failure": self.failure,
            "seconds": round(self.seconds, 3),
            "tensors": tensors,
        }


def run_case(case: Case, dtype: str) -> Result:
    """Run a case with the kernels; one that raises is a result too."""
    started = time.perf_counter()
    errors, failure = [], None
    try:
        with backend("triton"), quiet_interpreter(), poisoned():
            errors = case.reference.errors(case.function)
    except Exception as error:  # a kernel may raise anything; the others are still checked
        failure = first_line(error)
    return Result(case.name, dtype, errors, failure, time.perf_counter() - started)
