"""Arguments that several ops take."""

from __future__ import annotations

from ..op import Arg, Option, Shape

FIRST = Arg(required=True, operand=True)
MATRIX = Arg("matrix", required=True, operand=True)
OPERAND = Arg(operand=True)
EPILOGUE = {
    "residual": Arg(), "layer_scale": Arg(usual=False),
    "row_scale": Arg("keep", grad=False, usual=False),
}  # fmt: skip
SCALE = Option("scale", (None, 0.3, 1.0))


def with_epilogue(shapes: dict[str, Shape], rows: Shape, N: int) -> dict[str, Shape]:
    row_scale = {"row_scale": rows[:1]} if rows else {}
    return {**shapes, "residual": (*rows, N), "layer_scale": (N,), **row_scale}
