"""What the fuzz test draws, from the registry of ops, and the cases that once failed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fuzz import LAYOUTS, Case, Integers, Spec
from hypothesis import strategies as st
from numerics import DEVICE
from op_facts import FACTS

from fastvit_kernels.accuracy.cases import OPS
from fastvit_kernels.accuracy.op import Arg, Op, SampleShape, Shape, fan_in
from fastvit_kernels.runtime.dtypes import DTYPES

Draw = Callable[[st.SearchStrategy[Any]], Any]

FLOATS = list(DTYPES)
NEXT_TO = {n + by for n in (16, 32, 64, 128, 256) for by in (-1, 0, 1)}
EDGES = sorted(NEXT_TO | {50, 96, 191, 193, 196, 197})
LONG = [300, 511, 512, 513, 576, 577, 600]
BATCH = (1, 2, 0, 1, 2, 3, 5)


class Pick:
    """Choices by hypothesis, which can shrink them."""

    def __init__(self, draw: Draw, low: bool):
        self.draw, self.low = draw, low  # low: products are of 16 bits

    def __call__(self, *options: Any) -> Any:
        return self.draw(st.sampled_from(options))

    def integer(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def up_to(self, most: int) -> int:
        """1 ... most, small ones and those next to a tile's edge more often."""
        parts = [st.integers(1, min(most, 24)), st.integers(1, most)]
        parts += [
            st.sampled_from(edges) for e in (EDGES, LONG) if (edges := [n for n in e if n <= most])
        ]
        return self.draw(st.one_of(parts))

    def rows(self, most: int, *, none: bool = False) -> Shape:
        """Leading axes of at most `most` rows: mostly (B, T), seldom empty, () where `none`."""
        if none and self.integer(0, 15) == 15:
            return ()
        batch = self(*BATCH)
        if batch == 0:
            return (0, self.integer(1, 9))
        rest = self.up_to(max(1, most // batch))
        return self((batch, rest), (rest,), (1, batch, rest), (batch, 1, rest))


def _layout(ndim: int) -> st.SearchStrategy[str]:
    """A layout for this rank: half of them dense."""
    fitting = [name for name, layout in LAYOUTS.items() if ndim >= layout.min_ndim]
    return st.one_of(st.just("dense"), st.sampled_from(fitting))


def _spec(draw: Draw, arg: Arg, shape: Shape, operand: Callable[[], str]) -> Spec:
    """A tensor; of any floating dtype where it is no operand of a product."""
    if isinstance(shape, SampleShape):
        return Spec((shape.kept, shape[0] - shape.kept), "samples", grad=False)
    dtype = operand() if arg.operand else draw(st.sampled_from(FLOATS))
    grad = arg.grad
    if arg.kind == "mask":
        dtype = draw(st.sampled_from(["bool", operand()]))
        grad = grad and dtype != "bool" and shape[-1] != 1  # alike for all keys: PyTorch's path
    scale = fan_in(shape) ** -0.5 if arg.kind == "matrix" else 1.0
    grad = grad and draw(st.booleans())
    return Spec(shape, dtype, draw(_layout(len(shape))), grad, scale)


@st.composite
def _case(draw: Draw, op: Op) -> Case:
    autocast = draw(st.sampled_from(FACTS[op.name].autocast))
    shared = draw(st.sampled_from(FLOATS))

    def operand() -> str:
        """One dtype for all without autocast."""
        return shared if autocast is None else draw(st.sampled_from(FLOATS))

    pick = Pick(draw, low=(autocast or shared) != "fp32")
    sizes = FACTS[op.name].fuzz(pick)
    inputs: dict[str, Spec | Integers | None] = {}
    integers = op.integers_of(sizes)
    for name, shape in op.shapes_of(sizes).items():
        arg = op.args[name]
        if name in integers:
            inputs[name] = Integers(shape, integers[name])
            continue
        given = arg.required or name in sizes.get("given", ()) or pick(False, True)
        inputs[name] = _spec(draw, arg, shape, operand) if given else None
    options = {
        n: pick(*option.draws) for n, option in FACTS[op.name].options.items() if option.draws
    }
    first = next(iter(inputs.values()))
    route = pick(None, "triton") if "residual" in op.args else None
    return Case(
        op.name,
        inputs,
        {**options, **op.settings_of(sizes, DEVICE)},
        upstream=draw(_layout(3)),
        autocast=autocast,
        route=route,
        seed=draw(st.integers(0, 2**20)),
        direct=pick(False, True),
        # an input without a gradient is handed on without one
        first_output=op.outputs > 1
        and not FACTS[op.name].alike
        and not (isinstance(first, Spec) and first.grad and pick(False, True)),
    )


STRATEGIES: dict[str, Callable[[], st.SearchStrategy[Case]]] = {
    name: partial(_case, op) for name, op in OPS.items()
}

KEPT = [
    # A weight or bias that is not contiguous was read as if it were.
    Case(
        "layer_norm_and_input",
        {
            "x": Spec((5, 96)),
            "weight": Spec((96,), layout="broadcast"),
            "bias": Spec((96,), layout="stepped"),
        },
        {"eps": 1e-6, "out_dtype": torch.float32},
    ),
    # One key: its gradient is 0, which leaves no scale for the errors.
    Case(
        "scaled_dot_product_attention",
        {
            "query": Spec((1, 1, 1, 8), grad=False),
            "key": Spec((1, 1, 1, 8)),
            "value": Spec((1, 1, 1, 8), grad=False),
        },
        {"scale": None, "is_causal": False},
    ),
    # An empty batch saved no pre-activation, from which the backward takes the width of fc1.
    Case(
        "mlp",
        {
            "x": Spec((0, 6, 24)),
            "fc1_weight": Spec((24, 24)),
            "fc1_bias": Spec((24,)),
            "fc2_weight": Spec((47, 24), grad=False),
            "fc2_bias": None,
        },
        {"activation": "gelu", "recompute": True},
    ),
]
