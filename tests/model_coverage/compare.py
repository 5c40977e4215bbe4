"""A model and its twin under our backend side by side: outputs, gradients, buffers, draws."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastvit_kernels.accuracy.accuracy import Error, Tensors, largest
from fastvit_kernels.fuse.backend import fastvit_kernels
from fastvit_kernels.fuse.report import GraphReport, reports_of
from fastvit_kernels.fuse.swap import swap_in
from fastvit_kernels.measure.model_errors import errors_beside, layer_of, layer_peaks, run_step

from .shrink import NotShrunk

EXACT = 1e-9  # of the largest value, in float64
ROUNDING = 1e-13  # of the largest value of a layer, in float64
SEED = 3
SEEDS = (SEED, SEED + 1, SEED + 2)  # of the 2x rule
BUFFER, GENERATOR = "buffer", "the random generator"  # names of what a step leaves behind
LARGER = " of a larger batch"
DRAWS_AS_EAGER = {"fallback_random": True}  # Inductor's option


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


def fingerprint(model: nn.Module, inputs: Any) -> str:
    """Equal for two small models that are the same: classes, settings, shapes, in order."""
    simple = (bool, int, float, str, tuple, type(None))
    tensors = inputs.values() if isinstance(inputs, Mapping) else [inputs]
    parts = [str([tuple(t.shape) for t in tensors if isinstance(t, Tensor)])]
    for name, module in model.named_modules():
        settings = {k: v for k, v in vars(module).items() if isinstance(v, simple)}
        shapes = [(n, tuple(p.shape)) for n, p in module._parameters.items() if p is not None]
        kind = f"{type(module).__module__}.{type(module).__qualname__}"
        parts.append(f"{name} {kind} {sorted(settings.items())} {shapes}")
    return "\n".join(parts)


def kind_of(model: nn.Module) -> str:
    """Equal for two small models that differ in depth and sizes alone: as `fingerprint` without
    numbers, each kind of layer once."""
    parts = set()
    for name, module in model.named_modules():
        words = {k: v for k, v in vars(module).items() if isinstance(v, (bool, str, type(None)))}
        given = [n for n, p in module._parameters.items() if p is not None]
        path = re.sub(r"\d+", "", name)
        parts.add(f"{path} {type(module)} {sorted(words.items())} {given}")
    return "\n".join(sorted(parts))


class Found(NamedTuple):
    """What a training step of both gave.

    Attributes:
        wrong: what the twin does otherwise; "" where it is the same.
        reports: of the twin's graphs.
        dynamo: what torch.compile(backend="eager") does otherwise, where ours does the same.
        host: outputs and gradients of the model itself in float64.
    """

    wrong: str
    reports: list[GraphReport]
    dynamo: str = ""
    host: Tensors | None = None


def compiled(model: nn.Module, compiler: str = "eager") -> nn.Module:
    """The model in place under torch.compile with our backend."""
    torch.compiler.reset()
    options = DRAWS_AS_EAGER if compiler == "inductor" else {}
    model.compile(backend=fastvit_kernels, options={"compiler": compiler, **options})
    return model


def swapped(model: nn.Module) -> nn.Module:
    """The model swapped in, in place: its graph takes any batch."""
    torch.compiler.reset()
    swap_in(model)
    return model


def by_block(model: nn.Module) -> nn.Module:
    """The model in place with a graph for each block that repeats; with one where none does."""
    torch.compiler.reset()
    try:
        swap_in(model, regional=True)
    except ValueError:
        return compiled(model)
    return model


def traced(model: nn.Module, compiler: str = "eager") -> nn.Module:
    """The model in place under torch.compile without our rules: what torch makes of it."""
    torch.compiler.reset()
    model.compile(backend=compiler, options=DRAWS_AS_EAGER if compiler == "inductor" else None)
    return model


def step(model: nn.Module, inputs: Any) -> dict[str, Tensor] | Exception:
    """`run_step` of a model that may refuse, with its buffers and the state of the generator."""
    try:
        found = run_step(model, inputs, SEED)
    except Exception as error:
        return error
    found |= {f"{BUFFER} {n}": b.detach().clone() for n, b in model.named_buffers()}
    return found | {GENERATOR: torch.get_rng_state()}


def larger(inputs: Any) -> Any:
    """The inputs with one sample more, a copy of the first."""
    if isinstance(inputs, Tensor):
        return torch.cat([inputs, inputs[:1]])
    batch = next(len(x) for x in inputs.values() if isinstance(x, Tensor))
    return {
        n: larger(x) if isinstance(x, Tensor) and len(x) == batch else x for n, x in inputs.items()
    }


def steps(model: nn.Module, batches: Sequence[Any]) -> dict[str, Tensor] | Exception:
    """What `step` gives of a batch, and then of a larger one."""
    found: dict[str, Tensor] = {}
    for batch, name in zip(batches, ("", LARGER), strict=False):
        one = step(model, batch)
        if isinstance(one, Exception):
            return one
        found |= {n + name: x for n, x in one.items()}
    return found


def in_float64(
    model: nn.Module, inputs: Any, compiler: str = "eager", two_batches: bool = False
) -> Found:
    """A training step in float64, with DropPath and dropout as the model has them and one seed, the
    same to 1e-9 of the largest value.

    Args:
        two_batches: of a model that is swapped in: a step of a larger batch, too, where the host
            takes it.

    Raises: NotShrunk where the host refuses this step, or does not repeat it.
    """

    def host() -> nn.Module:
        return copy.deepcopy(model).double().train()

    batches = [inputs, larger(inputs)] if two_batches else [inputs]
    wanted = steps(host(), batches)
    if isinstance(wanted, Exception) and two_batches:
        del batches[1]
        wanted = steps(host(), batches)
    if isinstance(wanted, Exception):
        raise NotShrunk(f"the host raises {type(wanted).__name__}: {wanted}"[:100])
    twin = swapped(host()) if two_batches else compiled(host(), compiler)
    actual = steps(twin, batches)
    if isinstance(actual, Exception):
        return Found(f"raises {type(actual).__name__}: {actual}", reports_of(twin))
    if failed := [why for report in reports_of(twin) for why in report.failed]:
        return Found(failed[0], reports_of(twin))
    wrong = difference(wanted, actual)
    if wrong:
        again = steps(host(), batches)
        if isinstance(again, Exception) or difference(wanted, again):
            raise NotShrunk("the host does not repeat a step with the same seed")
        by_dynamo = steps(traced(host(), compiler), batches)
        if not isinstance(by_dynamo, Exception) and not difference(by_dynamo, actual):
            return Found("", reports_of(twin), dynamo=difference(wanted, by_dynamo))
    left_behind = (GENERATOR, *(n for n in wanted if n.startswith(f"{BUFFER} ")))
    oracle = {n: x for n, x in wanted.items() if n not in left_behind}
    return Found(wrong, reports_of(twin), host=oracle)


def difference(wanted: dict[str, Tensor], actual: dict[str, Tensor]) -> str:
    """The first difference beyond rounding in float64, in words; "" where there is none. A gradient
    that is zero but for rounding is measured by the largest of its layer."""
    if actual.keys() != wanted.keys():
        return f"other tensors: {sorted(actual.keys() ^ wanted.keys())}"
    peaks = layer_peaks({n: x for n, x in wanted.items() if x.is_floating_point()})
    for name, a in wanted.items():
        b = actual[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {b.dtype} {list(b.shape)}, the host's {a.dtype} {list(a.shape)}"
        if not a.is_floating_point():
            if not torch.equal(a, b):
                return f"{name} differs"
            continue
        same = (a == b) | (a.isnan() & b.isnan())  # infinities too
        limit = EXACT * (1 + largest(a)) + ROUNDING * peaks[layer_of(name)]
        error = (a - b).masked_fill(same, 0).abs()
        if not error.le(limit).all():
            return f"{name} differs by {error.max():.1e} in float64"
    return ""


@sdpa_kernel(SDPBackend.MATH)  # on a CPU torch's flash attention rounds more than a host's softmax
def by_2x_rule(
    model: nn.Module,
    inputs: Any,
    regional: bool = False,
    autocast: torch.dtype | None = None,
    training: bool = True,
    oracle: Tensors | None = None,
) -> Found:
    """Outputs and gradients in fp32, or under autocast, by the 2x rule against the host in float64;
    the twin has one graph, or one a block.

    Both errors are one draw, so what is beyond the rule must be so for every seed, the same tensor;
    a maximum that rounding takes elsewhere is so with one set of parameters.

    Args:
        training: of the model; in eval mode there are gradients, too.
        oracle: `host` of what `in_float64` found, for a training step.
    """
    swap = by_block if regional else compiled
    model = copy.deepcopy(model).train(training)
    found, failed = _by_2x_rule(SEED, model, inputs, swap, autocast, oracle)
    for seed in SEEDS[1:]:
        if not failed:
            return found
        found, again = _by_2x_rule(seed, randomize(model, seed), inputs, swap, autocast)
        failed = {name: error for name, error in again.items() if name in failed}
    worst = max(failed.values(), key=lambda e: e.share, default=None)
    return found._replace(wrong=f"2x rule: {worst}" if worst else found.wrong)


def _by_2x_rule(
    seed: int,
    model: nn.Module,
    inputs: Any,
    swap: Callable[[nn.Module], nn.Module],
    autocast: torch.dtype | None,
    given: Tensors | None = None,
) -> tuple[Found, dict[str, Error]]:
    """What one seed gave, and the tensors that are beyond the rule. given: the oracle, if known."""

    def is_shaped_alike(found: dict[str, Tensor]) -> bool:
        return all(x.shape == oracle[n].shape for n, x in found.items())

    def specification() -> dict[str, Tensor]:
        return run_step(copy.deepcopy(model).float(), inputs, seed, autocast)

    def yardstick() -> dict[str, Tensor]:
        if is_shaped_alike(found := specification()):
            return found
        raise NotShrunk("the shapes of the host's outputs depend on rounding")  # keypoints

    oracle = given or run_step(copy.deepcopy(model).double(), inputs, seed)
    twin = swap(copy.deepcopy(model).float())
    try:
        actual = run_step(twin, inputs, seed, autocast)
    except Exception as error:
        try:
            specification()
        except Exception:
            raise NotShrunk(f"the host raises, too: {error}"[:100]) from error
        return Found(f"raises {type(error).__name__}: {error}", reports_of(twin)), {}

    def floats(found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: x for n, x in found.items() if oracle[n].is_floating_point()}

    if missing := actual.keys() ^ oracle.keys():
        return Found(f"other tensors: {sorted(missing)}", reports_of(twin)), {}
    if not is_shaped_alike(actual):
        yardstick()
        return Found("tensors of other shapes", reports_of(twin)), {}
    errors = errors_beside(
        floats(actual), lambda: floats(yardstick()), floats(oracle), autocast or torch.float32
    )
    return Found("", reports_of(twin)), {e.name: e for e in errors if not e.passed}
