"""Compare every kernel, forward and backward, with float64 on this machine.

The table shows the error of each output and gradient beside PyTorch's own in the same dtype, and
the limit of the 2x rule (docs/numerics.md). On a GPU the kernels run there; without one they run in
Triton's interpreter, in fp32 and fp16: the interpreter of triton 3.6 multiplies bf16 wrongly.

With --all-configs every launch config that ships is forced in turn, not the default alone, and run
twice for equal bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import (
    __version__,
    attention,
    layer_norm,
    layer_norm_and_input,
    linear,
    mlp,
    patch_embed,
    qkv_attention,
    scaled_dot_product_attention,
)
from ..models.vit import VisionTransformer
from ..runtime.backend import INTERPRETED, backend, reason_for_torch
from ..runtime.triton import HAS_TRITON, triton
from ..verify.accuracy import Error, compare
from . import all_configs, options
from .console import CommandError, make_console, quiet_interpreter, require
from .reference import agreement, worst_error

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Sizes:
    """What a case is measured at; T and C are odd or no power of two on purpose."""

    B: int
    T: int
    C: int
    H: int
    F: int
    img_size: tuple[int, int]
    patch_size: int
    depth: int


SMALL = Sizes(B=2, T=37, C=96, H=3, F=160, img_size=(24, 16), patch_size=8, depth=2)
LARGE = Sizes(B=8, T=197, C=768, H=12, F=3072, img_size=(224, 192), patch_size=16, depth=4)


class Draw:
    """Random inputs of one case: the same at every run."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
        x = torch.randn(*shape, generator=self.generator) * scale
        return x.to(self.device, self.dtype).requires_grad_(grad)

    def matrix(self, rows: int, columns: int) -> Tensor:
        """A weight that keeps the scale of what it multiplies."""
        return self(rows, columns, scale=columns**-0.5)

    def row_scale(self, B: int) -> Tensor:
        """DropPath's: one sample dropped, the others scaled by 1 / keep."""
        scale = torch.full((B,), 1.25, device=self.device, dtype=self.dtype)
        scale[0] = 0
        return scale


# A case gives its errors; it looks its op up when it runs.
CASES: dict[str, Callable[[Sizes, Draw], list[Error]]] = {}


def case(name: str) -> Callable[[Callable[[Sizes, Draw], list[Error]]], Any]:
    """Add the decorated function to CASES. Add a kernel here, and `check` runs it."""

    def add(function: Callable[[Sizes, Draw], list[Error]]) -> Any:
        CASES[name] = function
        return function

    return add


def _norm_inputs(s: Sizes, draw: Draw) -> dict[str, Tensor | None]:
    return {"x": draw(s.B, s.T, s.C), "weight": draw(s.C), "bias": draw(s.C)}


@case("layer_norm")
def _layer_norm(s: Sizes, draw: Draw) -> list[Error]:
    def reference(x, weight, bias):
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)

    return compare(lambda **kw: layer_norm(**kw), reference, _norm_inputs(s, draw))


@case("layer_norm_and_input")
def _layer_norm_and_input(s: Sizes, draw: Draw) -> list[Error]:
    def reference(x, weight, bias):
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6), x

    return compare(lambda **kw: layer_norm_and_input(**kw), reference, _norm_inputs(s, draw))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "quick_gelu": lambda z: z * torch.sigmoid(1.702 * z),
    "silu": F.silu,
}


@case("linear")
def _linear(s: Sizes, draw: Draw) -> list[Error]:
    inputs = {"x": draw(s.B, s.T, s.C), "weight": draw.matrix(s.F, s.C), "bias": draw(s.F)}
    return compare(
        lambda **kw: linear(**kw), lambda x, weight, bias: F.linear(x, weight, bias), inputs
    )


def _linear_activation(name: str) -> Callable[[Sizes, Draw], list[Error]]:
    def run(s: Sizes, draw: Draw) -> list[Error]:
        inputs = {"x": draw(s.B, s.T, s.C), "weight": draw.matrix(s.F, s.C), "bias": draw(s.F)}
        return compare(
            lambda **kw: linear(**kw, activation=name),
            lambda x, weight, bias: _ACTIVATIONS[name](F.linear(x, weight, bias)),
            inputs,
        )

    return run


for _name in _ACTIVATIONS:
    case(f"linear, {_name}")(_linear_activation(_name))


def _branch_inputs(s: Sizes, draw: Draw) -> dict[str, Tensor | None]:
    """What follows the last matmul of a branch."""
    return {
        "residual": draw(s.B, s.T, s.C),
        "layer_scale": draw(s.C),
        "row_scale": draw.row_scale(s.B),
    }


@case("linear, LayerScale, DropPath, residual")
def _linear_branch(s: Sizes, draw: Draw) -> list[Error]:
    def reference(x, weight, bias, residual, layer_scale, row_scale):
        return residual + F.linear(x, weight, bias) * layer_scale * row_scale[:, None, None]

    inputs = {"x": draw(s.B, s.T, s.F), "weight": draw.matrix(s.C, s.F), "bias": draw(s.C)}
    return compare(lambda **kw: linear(**kw), reference, {**inputs, **_branch_inputs(s, draw)})


def _attention_reference(qkv: Tensor) -> Tensor:
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def _attention(D: int, T: int | None = None) -> Callable[[Sizes, Draw], list[Error]]:
    def run(s: Sizes, draw: Draw) -> list[Error]:
        qkv = draw(s.B, s.T, 3, s.H, D) if T is None else draw(1, T, 3, 2, D)
        return compare(lambda **kw: attention(**kw), _attention_reference, {"qkv": qkv})

    return run


for _dim in (32, 64, 72, 128):
    case(f"attention, D={_dim}")(_attention(_dim))
case("attention, T=1")(_attention(64, 1))
case("attention, T=260")(_attention(64, 260))  # past the one-pass backward


@case("qkv_attention")
def _qkv_attention(s: Sizes, draw: Draw) -> list[Error]:
    def reference(x, weight, bias):
        return _attention_reference(F.linear(x, weight, bias).unflatten(-1, (3, s.H, -1)))

    inputs = {"x": draw(s.B, s.T, s.C), "weight": draw.matrix(3 * s.C, s.C), "bias": draw(3 * s.C)}
    return compare(lambda **kw: qkv_attention(**kw, num_heads=s.H), reference, inputs)


def _sdpa(s: Sizes, draw: Draw, keys: int, attn_mask: Tensor | None) -> list[Error]:
    D = s.C // s.H
    inputs = {
        "q": draw(s.B, s.H, s.T, D),
        "k": draw(s.B, s.H, keys, D),
        "v": draw(s.B, s.H, keys, D),
    }
    return compare(
        lambda q, k, v, attn_mask: scaled_dot_product_attention(q, k, v, attn_mask),
        lambda q, k, v, attn_mask: F.scaled_dot_product_attention(q, k, v, attn_mask),
        {**inputs, "attn_mask": attn_mask},
    )


@case("scaled_dot_product_attention, S=T+5")
def _sdpa_lengths(s: Sizes, draw: Draw) -> list[Error]:
    return _sdpa(s, draw, s.T + 5, None)


@case("scaled_dot_product_attention, boolean mask")
def _sdpa_boolean(s: Sizes, draw: Draw) -> list[Error]:
    mask = draw(s.B, 1, s.T, s.T, grad=False) > 0
    mask[..., 0] = True  # every query sees a key
    return _sdpa(s, draw, s.T, mask)


@case("scaled_dot_product_attention, additive mask")
def _sdpa_additive(s: Sizes, draw: Draw) -> list[Error]:
    return _sdpa(s, draw, s.T, draw(s.H, s.T, s.T, grad=False))


def _mlp(recompute: bool) -> Callable[[Sizes, Draw], list[Error]]:
    def run(s: Sizes, draw: Draw) -> list[Error]:
        def reference(
            x, fc1_weight, fc1_bias, fc2_weight, fc2_bias, residual, layer_scale, row_scale
        ):
            hidden = F.gelu(F.linear(x, fc1_weight, fc1_bias))
            y = F.linear(hidden, fc2_weight, fc2_bias)
            return residual + y * layer_scale * row_scale[:, None, None]

        inputs = {
            "x": draw(s.B, s.T, s.C),
            "fc1_weight": draw.matrix(s.F, s.C), "fc1_bias": draw(s.F),
            "fc2_weight": draw.matrix(s.C, s.F), "fc2_bias": draw(s.C),
            **_branch_inputs(s, draw),
        }  # fmt: skip
        return compare(lambda **kw: mlp(**kw, recompute=recompute), reference, inputs)

    return run


case("mlp")(_mlp(recompute=False))
case("mlp, recompute")(_mlp(recompute=True))


@case("patch_embed")
def _patch_embed(s: Sizes, draw: Draw) -> list[Error]:
    def reference(images, weight, bias, prefix_tokens, pos_embed):
        x = F.conv2d(images, weight, bias, stride=s.patch_size).flatten(2).transpose(1, 2)
        return torch.cat([prefix_tokens.expand(len(x), -1, -1), x], dim=1) + pos_embed

    height, width = s.img_size
    tokens = (height // s.patch_size) * (width // s.patch_size)
    inputs = {
        "images": draw(s.B, 3, height, width),
        "weight": draw(s.C, 3, s.patch_size, s.patch_size, scale=(3 * s.patch_size**2) ** -0.5),
        "bias": draw(s.C),
        "prefix_tokens": draw(1, 2, s.C),
        "pos_embed": draw(1, 2 + tokens, s.C),
    }
    return compare(lambda **kw: patch_embed(**kw), reference, inputs)


@case("VisionTransformer")
def _vision_transformer(s: Sizes, draw: Draw) -> list[Error]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VisionTransformer(
            img_size=s.img_size, patch_size=s.patch_size, num_classes=10, embed_dim=s.C,
            depth=s.depth, num_heads=s.H, mlp_ratio=s.F / s.C, reg_tokens=1, init_values=0.5,
        )  # fmt: skip
    model = model.to(draw.device, draw.dtype).eval()
    return agreement(model, draw(s.B, 3, *s.img_size, grad=False))


@dataclass(frozen=True)
class Result:
    """One case in one dtype: its errors, or why there are none."""

    name: str
    dtype: str
    errors: list[Error]
    failure: str | None
    seconds: float

    @property
    def passed(self) -> bool:
        return self.failure is None and all(e.passed for e in self.errors)


def run_cases(
    device: torch.device, dtypes: Sequence[str], names: Sequence[str]
) -> Iterator[Result]:
    """Run the named cases with the kernels; a case that raises is a result too."""
    sizes = LARGE if device.type == "cuda" else SMALL
    for name in names:
        for dtype in dtypes:
            started = time.perf_counter()
            errors, failure = [], None
            try:
                with backend("triton"), quiet_interpreter():
                    errors = CASES[name](sizes, Draw(device, DTYPES[dtype]))
            except Exception as error:  # whatever a kernel raises, the others are still checked
                failure = f"{type(error).__name__}: {str(error).strip()}".split("\n")[0]
            yield Result(name, dtype, errors, failure, time.perf_counter() - started)


def _rows(result: Result, every: bool) -> list[Error]:
    """The output and the gradient nearest their limits; every tensor where asked or failed."""
    if every or not result.passed:
        return result.errors
    outputs = [e for e in result.errors if not e.name.startswith("d")]
    gradients = [e for e in result.errors if e.name.startswith("d")]
    return [worst_error(part) for part in (outputs, gradients) if part]


def _print_table(results: list[Result], every: bool, console: Any) -> None:
    escape = require("rich.markup", "rich").escape
    box = require("rich.box", "rich").SIMPLE_HEAD
    table = require("rich.table", "rich").Table(box=box, padding=(0, 1, 0, 0))
    table.add_column("kernel and tensor")
    table.add_column("dtype")
    for column in ("max error", "PyTorch's", "limit", "RMS error", "PyTorch's", "limit"):
        table.add_column(column, justify="right")
    table.add_column("")
    for name, group in itertools.groupby(results, key=lambda result: result.name):
        table.add_row(f"[bold]{escape(name)}[/bold]")
        for result in group:
            if result.failure is not None:
                failed = ("  [red]raised[/red]", result.dtype, *[""] * 6, "[red]FAILED[/red]")
                table.add_row(*failed)
            for e in _rows(result, every):
                values = (e.max, e.torch_max, e.limit_max, e.rms, e.torch_rms, e.limit_rms)
                cells = [f"{value:.1e}" for value in values]
                verdict = "ok" if e.passed else "[red]FAILED[/red]"
                table.add_row(f"  {e.name}", result.dtype, *cells, verdict)
    console.print(table)
    for result in results:
        if result.failure is not None:
            console.print(
                f"[red]{escape(f'{result.name}, {result.dtype}: {result.failure}')}[/red]"
            )


def _as_json(results: list[Result], device: torch.device) -> str:
    def finite(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    content = {
        "passed": all(result.passed for result in results),
        "device": _where(device),
        "interpreted": INTERPRETED,
        "versions": {
            "fastvit_kernels": __version__,
            "torch": torch.__version__,
            "triton": triton.__version__ if HAS_TRITON else None,
        },
        "cases": [
            {
                "name": result.name,
                "dtype": result.dtype,
                "passed": result.passed,
                "failure": result.failure,
                "seconds": round(result.seconds, 3),
                "tensors": [
                    {**{k: finite(v) for k, v in asdict(e).items()}, "passed": e.passed}
                    for e in result.errors
                ],
            }
            for result in results
        ],
    }
    return json.dumps(content, indent=1)


def _where(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"Triton's interpreter on a {platform.machine()} CPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `fastvit-kernels check`."""
    parser.add_argument("--only", metavar="TEXT", help="the cases whose name contains TEXT")
    options.add_dtype(parser, tuple(DTYPES), help="one dtype (default: each that runs)")
    options.add_device(parser)
    parser.add_argument("--all", action="store_true", help="a row for every gradient")
    options.add_json(parser)
    parser.add_argument(
        "--all-configs", action="store_true", help="every launch config that ships, each forced"
    )


def run(arguments: argparse.Namespace) -> int:
    """The command: 0, or 1 where a kernel breaks the 2x rule or raises."""
    if INTERPRETED and arguments.device is None:
        arguments.device = "cpu"
    device = options.chosen_device(arguments)
    with backend("auto"):
        reason = reason_for_torch(torch.empty(1, device=device))
    if reason is not None:
        raise CommandError(f"the kernels cannot run here: {reason}")
    dtypes = [arguments.dtype] if arguments.dtype else list(DTYPES)
    if INTERPRETED and arguments.dtype is None:
        dtypes.remove("bf16")
    if arguments.all_configs:
        draws = {name: Draw(device, DTYPES[name]) for name in dtypes}
        return all_configs.command(
            draws, large=device.type == "cuda", json_wanted=arguments.json, where=_where(device)
        )
    names = [name for name in CASES if arguments.only is None or arguments.only in name]
    if not names:
        raise CommandError(f"--only {arguments.only}: no case; there are {', '.join(CASES)}")

    console = make_console()
    results: list[Result] = []
    started = time.perf_counter()
    with console.status("checking") as status:
        for result in run_cases(device, dtypes, names):
            results.append(result)
            status.update(f"checked {result.name}, {result.dtype}")
    failed = [result for result in results if not result.passed]
    if arguments.json:
        print(_as_json(results, device))
        return 1 if failed else 0

    _print_table(results, arguments.all, console)
    tensors = sum(len(result.errors) for result in results)
    console.print(
        f"{len(results) - len(failed)} of {len(results)} cases passed ({tensors} outputs and "
        f"gradients, {time.perf_counter() - started:.0f} s), {_where(device)}. An error may be "
        "twice PyTorch's own in the same dtype plus rounding, both against float64."
    )
    if INTERPRETED and arguments.dtype is None:
        console.print("bf16 needs a GPU: Triton's interpreter multiplies it wrongly.")
    return 1 if failed else 0
