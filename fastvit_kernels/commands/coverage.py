"""The coverage command: which models of the installed host libraries swap_in understands, and how.

Each model is built at its own size without memory, swapped, and given a row: its level and, where
that is not the block level, why. `--verify` also builds each name small and compares the swapped
model with the host's, forward and all gradients, by the 2x rule, through the kernels and through
PyTorch.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.metadata
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.backend import Backend, backend
from ..swap.apply import swap_in
from ..swap.hosts import host_path
from ..swap.report import SwapReport
from ..verify.accuracy import Error, measure
from . import options, zoo
from .console import CommandError, require

VERIFIED = ("vit_", "deit", "beit", "eva", "swin", "dinov")  # timm's names that --verify runs


@dataclasses.dataclass
class Row:
    host: str
    model: str
    level: str
    reason: str
    verified: str = ""


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Move every parameter off its initial value, so that no gradient is zero for want of one.

    Fresh models have zero biases, LayerScale of 1e-5 and zero-initialised heads, which would hide
    an error in what they multiply.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            p.add_(noise, alpha=0.2 if p.ndim < 2 else 0.05)
    return model


def _outputs(result: Any) -> list[Tensor]:
    """The tensors of a model's output with a gradient, in order."""
    if isinstance(result, Tensor):
        return [result]
    values = result.values() if isinstance(result, Mapping) else result
    return [v for v in values if isinstance(v, Tensor) and v.grad_fn is not None]


def _run(
    model: nn.Module, inputs: Any, upstream_seed: int, autocast: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Outputs and gradients by name: of the images and of every parameter."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    inputs = inputs if isinstance(inputs, Mapping) else {"": inputs}
    leaves = {
        k: v.detach().clone().to(dtype).requires_grad_() if v.is_floating_point() else v
        for k, v in inputs.items()
    }
    torch.manual_seed(upstream_seed)
    device = next(iter(leaves.values())).device.type
    with torch.autocast(device, autocast, enabled=autocast is not None):
        outputs = _outputs(model(leaves[""]) if "" in leaves else model(**leaves))
    generator = torch.Generator().manual_seed(upstream_seed)
    upstream = [torch.randn(o.shape, generator=generator).to(o) for o in outputs]
    torch.autograd.backward(outputs, upstream)
    found = {f"out{i}": o.detach() for i, o in enumerate(outputs)}
    found |= {f"d{k or 'images'}": v.grad for k, v in leaves.items() if v.grad is not None}
    found |= {f"d{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    return found


def _layer(name: str) -> str:
    """The block that a parameter belongs to, or its module outside the stack of blocks."""
    parts = name.split(".")
    # The last place number, but for that of a parameter's own module in a Sequential.
    places = [i for i, part in enumerate(parts[:-2]) if part.isdigit()]
    return ".".join(parts[: places[-1] + 1] if places else parts[:-1])


def model_errors(
    model: nn.Module,
    inputs: Any,
    swap: Callable[[nn.Module], Any] = swap_in,
    autocast: torch.dtype | None = None,
    seed: int = 0,
) -> list[Error]:
    """Outputs and all gradients of the swapped model beside the host's, by the 2x rule.

    The oracle is the host in float64, the yardstick the host in the model's own dtype. A gradient
    that is zero but for rounding (the bias of the keys) is measured by the largest gradient of its
    layer: the floor, 2 eps of that.

    Args:
        model: a host's model, not swapped; it is copied.
        inputs: a tensor of images, or keyword arguments.
        swap: what makes the copy ours.
        autocast: run host and copy under it; its dtype then sets the floor.
    Raises: AssertionError where one of them has a gradient that the other has not.
    """
    dtype = autocast or next(p.dtype for p in model.parameters() if p.is_floating_point())
    oracle = _run(copy.deepcopy(model).double(), inputs, seed)
    yardstick = _run(copy.deepcopy(model), inputs, seed, autocast)
    swapped = copy.deepcopy(model)
    swap(swapped)
    actual = _run(swapped, inputs, seed, autocast)
    assert set(actual) == set(oracle), f"other gradients: {sorted(set(actual) ^ set(oracle))}"
    peaks: defaultdict[str, float] = defaultdict(float)
    for name, o in oracle.items():
        if not o.numel():
            continue
        peaks[_layer(name)] = max(peaks[_layer(name)], o.abs().max().item())
    errors = []
    for name, o in oracle.items():
        error = measure(name, actual[name], yardstick[name], o, dtype)
        floor = torch.finfo(dtype).eps * peaks[_layer(name)]
        errors.append(
            dataclasses.replace(
                error,
                limit_max=error.limit_max + 2 * floor,
                limit_rms=error.limit_rms + 2 * floor,
            )
        )
    return errors


def _fingerprint(model: nn.Module, inputs: Any) -> str:
    """Equal for two small models that are the same: classes, settings, shapes, in order."""
    simple = (bool, int, float, str, tuple, type(None))
    tensors = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    parts = [str([tuple(t.shape) for t in tensors])]
    for name, module in model.named_modules():
        settings = {k: v for k, v in vars(module).items() if isinstance(v, simple)}
        shapes = [(n, tuple(p.shape)) for n, p in module._parameters.items() if p is not None]
        parts.append(f"{name} {host_path(type(module))} {sorted(settings.items())} {shapes}")
    return "\n".join(parts)


def _training_step(model: nn.Module, inputs: Any) -> dict[str, Tensor] | Exception:
    """`_run` of a model that may refuse: the numbers drawn are in it."""
    try:
        found = _run(model, inputs, 3)
    except Exception as error:
        return error
    return found | {"the random generator": torch.get_rng_state().double()}


def difference(model: nn.Module, inputs: Any) -> str:
    """What the swapped model does otherwise than its host in a training step in float64, with
    DropPath and dropout as the model has them and the same seed; "" where it is the same."""
    host = copy.deepcopy(model).double().train()
    swapped = copy.deepcopy(host)
    try:
        swap_in(swapped)
    except Exception as error:
        return f"swap_in raises {type(error).__name__}: {error}"
    wanted, actual = _training_step(host, inputs), _training_step(swapped, inputs)
    if isinstance(wanted, Exception):
        return "" if isinstance(actual, Exception) else f"the host raises {wanted}"
    if isinstance(actual, Exception):
        return f"raises {type(actual).__name__}: {actual}"
    if actual.keys() != wanted.keys():
        return f"other gradients: {sorted(actual.keys() ^ wanted.keys())}"
    for name, a in wanted.items():
        if a.numel() and not (a - actual[name]).abs().max() <= 1e-9 * (1 + a.abs().max()):
            return f"{name} differs by {(a - actual[name]).abs().max():.1e} in float64"
    return ""


class Verifier:
    """Small models by host and name: a training step in float64, then the 2x rule through each of
    the backends. Equal small models are run once."""

    def __init__(self, backends: Sequence[Backend]):
        self.backends = backends
        self.known: dict[str, str] = {}

    def __call__(self, host: str, name: str) -> str:
        """ "yes", what is wrong, or "" for a name of which there is no small model."""
        torch.manual_seed(0)
        try:
            found = zoo.small(host, name)
        except Exception:  # a host's model that does not build is the host's business
            return ""
        if found is None:
            return ""
        model, inputs = found
        key = _fingerprint(randomize(model).eval(), inputs)
        if key not in self.known:
            self.known[key] = self._run(model, inputs)
        return self.known[key]

    def _run(self, model: nn.Module, inputs: Any) -> str:
        found = difference(model, inputs)
        if found:
            return f"WRONG: {found}"
        model.eval()
        for chosen in self.backends:
            with backend(chosen):
                failed = [e for e in model_errors(model, inputs) if not e.passed]
            if failed:
                return f"WRONG ({chosen}): {failed[0]}"
        return "yes"


def _reason(report: SwapReport) -> str:
    """Why a model is not at the block level, in a few words."""
    if report.level == "block":
        return ""
    found = Counter(
        f"{row.host}: {row.reason}" for row in report.left if row.reason != "a plain product"
    )
    parts = Counter(s.level for s in report.swapped)
    swapped = ", ".join(f"{n} {level}" for level, n in parts.items())
    why = (
        "; ".join(reason for reason, _ in found.most_common(2)) or "its blocks have no fused class"
    )
    return f"{swapped or 'nothing'}; {why}"


def _models() -> Iterator[tuple[str, str, Callable[[], nn.Module]]]:
    """(host, name, builder on the meta device) for every model that gets a row."""
    for name in zoo.timm_names(*zoo.TIMM_FAMILIES):
        yield "timm", name, lambda name=name: zoo.timm_meta(name)
    for name in zoo.torchvision_names():
        yield "torchvision", name, lambda name=name: zoo.torchvision_meta(name)
    for name, build in zoo.hf_meta():
        yield "transformers", name, build


def rows(prefixes: tuple[str, ...], verify: Verifier | None) -> Iterator[Row]:
    """A row for each model whose name begins with one of the prefixes."""
    for host, name, build in _models():
        if not name.startswith(prefixes):
            continue
        try:
            model = build()
        except Exception as error:  # a host's model that does not build is the host's business
            first = (str(error) or type(error).__name__).splitlines()[0]
            row = Row(host, name, "not built", first[:80])
        else:
            report = swap_in(model)
            row = Row(host, name, report.level, _reason(report))
        if verify is not None and (host != "timm" or name.startswith(VERIFIED)):
            row.verified = verify(host, name)
        yield row


def write_table(found: Sequence[Row], out: Path) -> None:
    hosts = list(dict.fromkeys(r.host for r in found))
    versions = ", ".join(f"{host} {importlib.metadata.version(host)}" for host in hosts)
    vits = [r for r in found if r.host == "timm" and r.model.startswith("vit_")]
    blocks = sum(r.level == "block" for r in vits)
    verified = [r for r in found if r.verified]
    right = sum(r.verified == "yes" for r in verified)
    lines = [
        "# Coverage",
        "",
        f"Which models `swap_in` understands: {versions}. Written by `fastvit-kernels coverage`.",
        "",
        "Level `block`: whole blocks run fused, with residual, LayerScale, DropPath and LayerNorm.",
        "`parts`: attention, MLPs, LayerNorms, patch embedding, as the row says. `none`: nothing.",
        "",
        f"timm's `vit_*`: {len(vits)} names, {blocks} at block level.",
    ]
    if verified:
        lines += [
            "",
            "Column 2x (`coverage --verify`): the model cut to depth 2 and a narrow width,",
            "swapped beside the host's: output, all gradients and the numbers drawn in a training",
            "step in float64, with DropPath; output and gradients in fp32 by the 2x rule, through",
            "Triton kernels and through PyTorch. Names whose cut models are the same are run once.",
            f"{right} of {len(verified)} names pass.",
        ]
    for host in hosts:
        mine = [r for r in found if r.host == host]
        levels = ", ".join(f"{n} {level}" for level, n in Counter(r.level for r in mine).items())
        lines += ["", f"## {host} ({levels})", "", "| model | level | 2x | why not block |"]
        lines += ["|---|---|---|---|"]
        lines += [f"| {r.model} | {r.level} | {r.verified} | {r.reason} |" for r in mine]
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_out(parser, "file to write", Path("docs/coverage.md"), "FILE")
    parser.add_argument(
        "--verify", action="store_true", help="run small models by the 2x rule too (slow)"
    )
    parser.add_argument(
        "--models", nargs="*", default=[""], metavar="PREFIX", help="only names that begin so"
    )
    parser.add_argument(
        "--backends", nargs="*", choices=("auto", "torch"), default=["auto", "torch"],
        help="what --verify runs the 2x rule through; none: float64 alone",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    zoo.define_torchvision_operators()
    for package in ("timm", "torchvision", "transformers"):
        require(package, package)
    warnings.filterwarnings("ignore")
    verify = Verifier(arguments.backends) if arguments.verify else None
    found, start = [], time.monotonic()
    for row in rows(tuple(arguments.models), verify):
        found.append(row)
        seconds = time.monotonic() - start
        print(f"{seconds:7.1f} s  {row.host} {row.model}: {row.level} {row.verified}", flush=True)
    if not found:
        raise CommandError(f"no model's name begins with {' or '.join(arguments.models)}")
    if verify is not None and not any(row.verified for row in found):
        raise CommandError("no model of these could be verified")
    write_table(found, arguments.out)
    wrong = [r for r in found if r.verified.startswith("WRONG")]
    for row in wrong:
        print(f"{row.model}: {row.verified}", file=sys.stderr)
    print(f"wrote {arguments.out}: {len(found)} models, {len(wrong)} wrong")
    return 1 if wrong else 0
