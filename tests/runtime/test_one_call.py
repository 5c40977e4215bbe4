"""The way of a call, from a public op to the launch of its first kernel: CONTRIBUTING.md."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from numerics import DEVICE, rand

import fastvit_kernels as fk
from fastvit_kernels.runtime.backend import INTERPRETED
from fastvit_kernels.verify.cases import OPS
from fastvit_kernels.verify.op import Draw, Example, Sizes

HOME = Path(fk.__file__).parent
CONTRIBUTING = HOME.parent / "CONTRIBUTING.md"
SIZES = Sizes(B=1, T=4, C=64, H=2, F=128, img_size=(16, 16), patch_size=8)
MOST_FRAMES, MOST_FUNCTIONS = 5, 8
pytestmark = pytest.mark.skipif(not INTERPRETED, reason="stands in for Triton's interpreter")


class Way(NamedTuple):
    """Up to the first launch."""

    frames: list[str]  # of this package's Python on the stack, `file: function`
    functions: set[str]  # that were called


def way_of(call: Any, monkeypatch: pytest.MonkeyPatch) -> Way:
    """How `call`, whose kind is known by then, reaches its first kernel."""
    from triton.runtime.interpreter import InterpretedFunction

    found: list[Way] = []
    called: list[str] = []

    def name(frame: FrameType) -> str | None:
        path = Path(frame.f_code.co_filename)
        if HOME not in path.parents:
            return None
        function = frame.f_code.co_qualname.replace("<locals>.", "")
        return f"{path.relative_to(HOME)}: {function}"

    def launched(self: Any, *_: Any, **__: Any) -> None:
        frames: list[str] = []
        above: FrameType | None = inspect.currentframe()
        while above is not None:
            own = name(above)
            frames += [own] if own else []
            above = above.f_back
        found.append(Way(frames[::-1], set(called)))

    def profile(frame: FrameType, event: str, _: Any) -> None:
        own = name(frame) if event == "call" else None
        called.extend([own] if own else [])

    monkeypatch.setattr(InterpretedFunction, "run", launched)
    for _ in range(2):
        call()
    found.clear()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found[0]


def call_of(name: str) -> Any:
    """The tensors that most models give, some of which train."""
    op = OPS[name]
    sizes = op.at(SIZES)
    unusual = tuple(n for n, arg in op.args.items() if not arg.usual)
    given = op.inputs(Example(sizes, without=unusual), Draw(DEVICE, torch.float32))
    inputs = {
        n: x.detach().requires_grad_(op.args[n].trained) for n, x in given.items() if x is not None
    }
    options = op.settings_of(sizes, DEVICE)
    if name == "linear":  # alone it is the library's product
        options = {**options, "activation": "gelu"}
        inputs["residual"] = rand(*inputs["x"].shape[:-1], len(inputs["weight"]))
        inputs["layer_scale"] = rand(len(inputs["weight"]))
    return lambda: op.function(**inputs, **options)


@pytest.mark.parametrize("mode", ["train", "no_grad"])
@pytest.mark.parametrize("op", OPS)
def test_an_op_reaches_its_kernel_in_few_frames(op, mode, monkeypatch):
    call = call_of(op)
    with torch.set_grad_enabled(mode == "train"):
        way = way_of(call, monkeypatch)
    assert len(way.frames) <= MOST_FRAMES, way.frames
    assert len(way.functions) <= MOST_FUNCTIONS, sorted(way.functions)


@pytest.mark.parametrize("op", ["linear", "attention"])
def test_contributing_shows_the_frames_of_a_call(op, monkeypatch):
    """The list under "One call, from forward to kernel" is what is on the stack."""
    text = CONTRIBUTING.read_text().partition("## One call, from forward to kernel")[2]
    text = text.partition("\n## ")[0]
    block = next(b for b in re.findall(r"```\n(.*?)```", text, re.S) if b.startswith(f"fk.{op}("))
    shown = re.findall(r"^ *([\w/]+\.py: [\w.]+)", block, re.M)
    assert shown == way_of(call_of(op), monkeypatch).frames
