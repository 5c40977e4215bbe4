"""Arguments that several ops take."""

from __future__ import annotations

from typing import Any

from ..op import Arg, SampleShape, Shape

FIRST = Arg(required=True, operand=True)
MATRIX = Arg("matrix", required=True, operand=True)
OPERAND = Arg(operand=True)
EPILOGUE = {
    "residual": Arg(),
    "layer_scale": Arg(usual=False),
    "row_scale": Arg("keep", grad=False, usual=False),
}


def ignoring(option: str, function: Any) -> Any:
    """A specification with one option more, which it leaves out: `recompute`, which changes no
    number, or `dropout_p`, as none says which bits it draws."""

    def specification(*args: Any, **options: Any) -> Any:
        options.pop(option, None)
        return function(*args, **options)

    return specification


def with_epilogue(shapes: dict[str, Shape], s: Any) -> dict[str, Shape]:
    """With the epilogue's tensors, of sizes with `rows` and N. Where they say how many samples are
    `kept`, row_scale is what `keep_samples` gives, and x has those alone."""
    rows, kept = s.rows, getattr(s, "kept", 0)
    row_scale: dict[str, Shape] = {"row_scale": rows[:1]} if rows else {}
    if kept:
        row_scale = {"row_scale": SampleShape(kept, rows[0])}
        shapes = {**shapes, "x": (kept, *shapes["x"][1:])}
    return {**shapes, "residual": (*rows, s.N), "layer_scale": (s.N,), **row_scale}
