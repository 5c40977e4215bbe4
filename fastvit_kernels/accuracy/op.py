"""What an op says of itself in cases.py, and how a case is made of it.

Every list of calls that the project tests, checks, measures or replays is derived from these few
facts: the function, its specification, its tensors with their shapes, its other arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .accuracy import Reference

Shape = tuple[int, ...]


class SampleShape(tuple[int, ...]):
    """(S + B,), of what `keep_samples` gives for B samples of which it keeps S."""

    kept: int

    def __new__(cls, kept: int, batch: int) -> SampleShape:
        shape = super().__new__(cls, (kept + batch,))
        shape.kept = kept
        return shape

    def draw(self, generator: torch.Generator) -> Tensor:
        order = torch.randperm(self[0] - self.kept, generator=generator)
        return torch.cat((order[: self.kept], order.argsort()))


Inputs = dict[str, Tensor | None]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    """Of a ViT: what `Op.at` makes an op's own sizes of."""

    B: int
    T: int
    C: int
    H: int
    F: int
    img_size: tuple[int, int]
    patch_size: int
    depth: int = 1


# T and C are odd or no power of two on purpose.
SMALL = Sizes(B=2, T=37, C=96, H=3, F=160, img_size=(24, 16), patch_size=8, depth=2)
LARGE = Sizes(B=8, T=197, C=768, H=12, F=3072, img_size=(224, 192), patch_size=16, depth=4)


@dataclass(frozen=True)
class Arg:
    """A tensor argument. A kind says which numbers it holds:

    normal   normal numbers
    matrix   normal numbers that keep the scale of what they multiply
    keep     DropPath's factors: 0 for a dropped sample, else 1 / keep; or the kept samples alone
    mask     normal numbers to add to scores, or booleans
    """

    kind: str = "normal"
    required: bool = False
    operand: bool = False  # has the first one's dtype, and takes autocast's
    grad: bool = True  # the kernels have its gradient
    trained: bool = True  # a step of training asks for its gradient
    usual: bool = True  # most models give it


class Whole(NamedTuple):
    """What a tensor of integers holds: numbers from 0, below this one, distinct along an axis."""

    dtype: torch.dtype
    below: int

    def make(self, shape: Shape, generator: torch.Generator) -> Tensor:
        order = torch.rand(*shape[:-1], self.below, generator=generator).argsort(-1)
        return order[..., : shape[-1]].to(self.dtype, memory_format=torch.contiguous_format)


CPU = torch.device("cpu")


class Draw:
    """Random tensors on a device: the same at every run, and on every device unless `source`, which
    draws them, is another than the CPU."""

    def __init__(self, device: torch.device, dtype: torch.dtype, source: torch.device = CPU):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(source).manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        source = self.generator.device
        x = torch.randn(*shape, generator=self.generator, device=source) * scale
        return x.to(self.device, self.dtype).requires_grad_(grad)

    def kind(self, arg: Arg, shape: Shape, boolean: bool = False) -> Tensor:
        """Numbers as the argument holds them."""
        if isinstance(shape, SampleShape):
            return shape.draw(self.generator).to(self.device)
        if arg.kind == "keep":
            x = torch.full(shape, 1.25, device=self.device, dtype=self.dtype)
            x[: len(x) - 1][:1] = 0  # the first of several
            return x
        if arg.kind == "mask" and boolean:
            x = self(*shape, grad=False) > 0
            x[..., 0] = True  # every query sees a key
            return x
        return self(
            *shape, scale=fan_in(shape) ** -0.5 if arg.kind == "matrix" else 1.0, grad=arg.grad
        )


def fan_in(shape: Shape) -> int:
    """How many numbers a row of a weight sums."""
    return max(1, torch.Size(shape[1:]).numel())


@dataclass(frozen=True)
class Example:
    """A call of an op: sizes, which of its tensors are given, and how they lie in memory."""

    sizes: Mapping[str, Any]
    label: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    only: tuple[str, ...] = ()  # the tensors that are given; none named: all
    without: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()  # those that want no gradient, though the kernels have it
    strided: Callable[[Draw, Shape], Tensor] | None = None  # makes the first tensor
    boolean: bool = False  # a mask of booleans
    inference: bool = False  # nothing wants a gradient
    slow: bool = False  # for Triton's interpreter: tests prefer the others


@dataclass(frozen=True, eq=False)
class Case:
    """One call: `function` and its specification on the same inputs, made when they are needed."""

    name: str
    function: Function
    specification: Function
    make: Callable[[], Inputs]

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.specification, self.make())


@dataclass(frozen=True, eq=False)
class Op:
    """A public op: what lists of cases are derived from; for tests, op_facts.py has the rest."""

    function: Function
    specification: Function  # plain PyTorch, called as `function` is
    args: Mapping[str, Arg]
    shapes: Callable[[Any], dict[str, Shape]]  # of the sizes, as attributes
    at: Callable[[Sizes], Mapping[str, Any]]  # sizes in a ViT
    check: Callable[[Sizes], Sequence[Example]]  # what `check` runs
    settings: Callable[[Any], dict[str, Any]] = lambda s: {}  # what follows from sizes
    integers: Callable[[Any], dict[str, Whole]] = lambda s: {}  # tensors that hold no floats
    outputs: int = 1
    eager: Function | None = None  # what models call for the usual tensors; else the specification

    @property
    def name(self) -> str:
        return self.function.__name__

    def shapes_of(self, sizes: Mapping[str, Any]) -> dict[str, Shape]:
        """By argument, in the order of `args`; without those that these sizes do not have."""
        found = self.shapes(SimpleNamespace(**sizes))
        return {name: found[name] for name in self.args if name in found}

    def integers_of(self, sizes: Mapping[str, Any]) -> dict[str, Whole]:
        return self.integers(SimpleNamespace(**sizes))

    def settings_of(self, sizes: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """Options that follow from the sizes; tensors among them on the device."""
        found = self.settings(SimpleNamespace(**sizes))
        return {n: x.to(device) if isinstance(x, Tensor) else x for n, x in found.items()}

    def inputs(self, example: Example, draw: Draw) -> Inputs:
        """Its tensors, the optional ones that it leaves out as None."""
        found: Inputs = {}
        integers = self.integers_of(example.sizes)
        for name, shape in self.shapes_of(example.sizes).items():
            given = name in example.only if example.only else name not in example.without
            if not given:
                found[name] = None
            elif name in integers:
                found[name] = integers[name].make(shape, draw.generator).to(draw.device)
            elif example.strided is not None and not found:
                found[name] = example.strided(draw, shape)
            else:
                found[name] = draw.kind(self.args[name], shape, example.boolean)
        frozen = set(found if example.inference else example.frozen)
        return {n: x.detach() if x is not None and n in frozen else x for n, x in found.items()}

    def case(self, example: Example, device: torch.device, dtype: torch.dtype) -> Case:
        """The example on a device, its numbers in a dtype."""
        options = {**self.settings_of(example.sizes, device), **example.options}
        return Case(
            self.name + (f", {example.label}" if example.label else ""),
            partial(self.function, **options),
            partial(self.specification, **options),
            lambda: self.inputs(example, Draw(device, dtype)),
        )
