"""Whole ViTs as their users build them: a step of training or inference in several ways.

The gate looks at logits and gradients of the very batch that is timed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bench.measure import MATMUL, Bench, Entry, failed
from bench.ops import BASELINE, SEARCH
from bench.rows import OK, Row
from fastvit_kernels import backend
from fastvit_kernels.accuracy.accuracy import Error, Tensors, measure, together
from fastvit_kernels.commands.models import build_model, input_shape, logits_of
from fastvit_kernels.measure import compare
from fastvit_kernels.measure.compare import Way
from fastvit_kernels.measure.gate import Outcome, judged, verdict
from fastvit_kernels.measure.timer import Step, Timer
from fastvit_kernels.measure.turns import attempt, take_turns

VIT = "vit"
PLAIN = {  # sizes of the plan -> timm's names
    "Ti": "timm:vit_tiny_patch16_224",
    "S": "timm:vit_small_patch16_224",
    "B": "timm:vit_base_patch16_224",
    "L": "timm:vit_large_patch16_224",
    "H": "timm:vit_huge_patch14_224",
}
NUM_CLASSES = 1000
TURN_MS = 300.0
MIN_STEPS, MAX_STEPS = 2, 20
ORACLE_TOKENS = 3200  # a float64 forward and backward holds so many at once
EACH = 4.0  # the limit of a gradient by itself, as a multiple of the 2x rule's
ALONE = 400e6  # parameters from which ways run one after the other: they do not fit side by side


@dataclass(frozen=True)
class Case:
    """One model, batch and precision. `amp` is fp32 parameters under bf16 autocast.

    model: one of PLAIN, or a name for `build_model`. size: of its images; 0 is the model's own.
    """

    model: str
    size: int
    batch: int
    dtype: str = "amp"  # or bf16: parameters, images and optimizer in bf16
    mode: str = "train"  # or infer
    drop_path: float = 0.0  # by rates that rise from 0
    uniform: bool = False  # the same rate in every block

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return input_shape(on_meta(self))

    @property
    def tokens(self) -> int:
        """As if a patch had 16 x 16 pixels."""
        return math.prod(max(1, n // 16) for n in self.image[1:])

    @property
    def id(self) -> str:
        _, height, width = self.image
        side = f"{height}" if height == width else f"{height}x{width}"
        name = f"timm-ViT-{self.model}" if self.model in PLAIN else self.model
        drop = f"-drop{self.drop_path:g}" if self.drop_path else ""
        drop += "-uniform" if self.uniform else ""
        return f"{name}-{side}-B{self.batch}{drop}"

    @property
    def trains(self) -> bool:
        return self.mode == "train"

    @functools.cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in on_meta(self).parameters())

    @functools.cached_property
    def flops(self) -> float:
        """Of a step, the forward's products as torch counts them; training is 3 forwards."""
        image = torch.empty((1, *self.image), device="meta")
        with FlopCounterMode(display=False) as counter, backend("torch"), torch.no_grad():
            on_meta(self)(image)
        return float(self.batch * counter.get_total_flops() * (3 if self.trains else 1))


@functools.cache
def on_meta(case: Case) -> nn.Module:
    return build(case, torch.device("meta")).eval()


def build(case: Case, device: torch.device) -> nn.Module:
    """The host's model with random weights, the same at every call; a GPU draws them itself."""
    drop = {"drop_path_rate": case.drop_path} if case.drop_path else {}
    name, size = PLAIN.get(case.model, case.model), case.size or None
    torch.manual_seed(0)
    with device:
        model: Any = build_model(name, num_classes=NUM_CLASSES, img_size=size, **drop)
    if case.uniform:
        from timm.layers import DropPath

        for block in model.blocks:
            block.drop_path1, block.drop_path2 = (DropPath(case.drop_path) for _ in "12")
    return model


# --- ways to run a model


EAGER_GRAPH = "eager+graph"  # what a graph of ours is held against
WAYS = {
    BASELINE: Way(),
    EAGER_GRAPH: Way(graph=True),
    "swapped": Way(swapped=True),
    "swapped+graph": Way(swapped=True, graph=True),
    "swapped-low": Way(swapped=True, options={"memory": "low"}),
    "compile": Way(compiler="inductor"),
    "backend": Way(compiler="fastvit_kernels"),
    "backend+graphs": Way(compiler="fastvit_kernels", mode="reduce-overhead"),
    SEARCH: Way(compiler="inductor", mode="max-autotune"),
    "swapped-skip": Way(swapped=True, options={"drop_path": "skip"}),
    "swapped-skip+graph": Way(swapped=True, graph=True, options={"drop_path": "skip"}),
}


class Runner(compare.Runner):
    """A case's model in one way, its optimizer, a batch, and one step of training or inference."""

    def __init__(self, case: Case, way: Way, device: torch.device):
        self.case, self.way = case, way
        model = build(case, device).to(device, case.parameter_dtype).train(case.trains)
        own = torch.Generator(device).manual_seed(1)
        images = torch.randn(case.batch, *case.image, generator=own, device=device)
        self.images = images.to(case.parameter_dtype)
        self.labels = torch.randint(NUM_CLASSES, (case.batch,), generator=own, device=device)
        autocast = torch.bfloat16 if case.dtype == "amp" else None
        super().__init__(model, way, self.cross_entropy, autocast)
        self.parameters = list(self.model.parameters())

    def cross_entropy(self, forward: Callable[..., Any]) -> Tensor:
        return F.cross_entropy(logits_of(forward(self.images)).float(), self.labels)

    def logits(self) -> Tensor:
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            return logits_of(self.forward(self.images))

    def captured(self, timer: Timer) -> Callable[[], Any]:
        """The step with its gradients as one graph. AdamW stays outside, as max-autotune has it:
        the graph writes the same gradients anew at each replay."""

        def run(_: Any) -> Tensor:
            self.model.zero_grad(set_to_none=True)
            return self.gradients().detach()

        replay = timer.capture(Step(lambda: None, run))
        return (lambda: (replay(), self.optimizer.step())) if self.trains else replay

    def resident_mib(self) -> float:
        """Memory of parameters, optimizer state and batch, which stays from step to step."""
        tensors = [*self.parameters, self.images, self.labels]
        if self.trains:
            states = self.optimizer.state.values()
            tensors += [t for state in states for t in state.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors) / 2**20

    def results(self, upstream: Tensor) -> Tensors:
        """Logits, and in training the gradient of every parameter under `upstream`."""
        if not self.case.trains:
            with torch.no_grad():
                return {"logits": self.logits().clone()}
        logits = self.logits()
        grads = torch.autograd.grad(
            logits, self.parameters, upstream.to(logits.dtype), allow_unused=True
        )
        names = [name for name, _ in self.model.named_parameters()]
        return named(logits.detach(), dict(zip(names, grads, strict=True)))

    def replayed(self, upstream: Tensor, timer: Timer) -> Tensors:
        """The same as a replay of its kernels has written it."""
        found: list[Any] = [None]

        def keep(_: Any) -> None:
            found[0] = self.results(upstream)  # at the capture: tensors that a replay writes anew

        replay = timer.capture(Step(lambda: None, keep))
        for tensor in found[0].values():
            tensor.fill_(float("nan"))  # what the replay does not write stays wrong
        replay()
        return found[0]


def named(logits: Tensor, grads: Mapping[str, Tensor | None]) -> Tensors:
    """What is held against the oracle: the logits, and as "dname" the gradients that there are."""
    return {"logits": logits, **{f"d{n}": grad for n, grad in grads.items() if grad is not None}}


class Oracle:
    """The host's model in float64 and in the precision that is measured, on the whole batch."""

    def __init__(self, case: Case, device: torch.device):
        eager = Runner(case, Way(), device)
        generator = torch.Generator(device).manual_seed(2)
        upstream = torch.randn((case.batch, NUM_CLASSES), generator=generator, device=device)
        # The oracle differentiates what the others do: an upstream gradient in their own dtype.
        self.upstream = upstream.to(torch.bfloat16)
        model = build(case, device).to(device, case.parameter_dtype).double().train(case.trains)
        logits, rows = [], max(1, ORACLE_TOKENS // case.tokens)
        pairs = zip(eager.images.split(rows), self.upstream.split(rows), strict=True)
        with torch.set_grad_enabled(case.trains):
            for images, upstream in pairs:
                out = logits_of(model(images.double()))
                if case.trains:
                    out.backward(upstream.double())
                logits.append(out.detach())
        grads = {n: p.grad for n, p in model.named_parameters()} if case.trains else {}
        self.results = named(torch.cat(logits), grads)
        del model, out
        self.yardstick = eager.results(self.upstream)

    def errors(self, runner: Runner, timer: Timer) -> list[Error]:
        """Of the logits, of the gradients as one vector, and of each with wider limits, so that a
        small one is not lost: one step is one draw of the rounding. Of a graph, of its replay."""
        if runner.way.graph:
            actual = runner.replayed(self.upstream, timer)
        else:
            actual = runner.results(self.upstream)
        logits, *each = [
            measure(name, actual[name], self.yardstick[name], oracle, torch.bfloat16)
            for name, oracle in self.results.items()
        ]
        sizes = [self.results[e.name].numel() for e in each]
        whole = [together("gradients", each, sizes)] if each else []
        return [logits, *whole, *(e.within(EACH) for e in each)]


# --- measuring


def row_of(case: Case, provider: str) -> Row:
    return Row(VIT, provider, case.id, case.dtype, case.mode, case.tokens)


def _warm_up(entry: Entry, case: Case, oracle: Oracle | None, bench: Bench) -> None:
    """Build, hold against the oracle, warm up; an outcome on the entry if it fails."""
    way, timer = WAYS[entry.name], bench.timer
    bench.at_work(entry.name, way.compiler is not None)
    with attempt(entry, timer), judged(entry.context(), way.ours):
        runner = Runner(case, way, bench.device)
        if oracle is None:
            why = "its dropped samples are random" if case.drop_path else "float64 does not fit"
            entry.outcome = Outcome(OK, f"not compared: {why}")
        else:
            entry.outcome = verdict(oracle.errors(runner, timer))
            if not entry.is_right:
                return
        entry.run = runner.captured(timer) if way.graph else runner.step
        entry.warm_up(timer, TURN_MS, MIN_STEPS, MAX_STEPS, flush=False)
        # A graph's memory is taken when it is captured, once for all replays; those of Inductor's
        # modes keep theirs in a pool of its own.
        if way.graph or way.mode in ("max-autotune", "reduce-overhead"):
            entry.peak_mib = None
        elif entry.peak_mib is not None:
            entry.peak_mib += runner.resident_mib()


def measure_vit(case: Case, names: Sequence[str], bench: Bench) -> Iterator[Row]:
    """Rows of the named ways, the baseline's first; it is measured whether it is named or not, and
    as a graph if another is one."""
    names = [BASELINE, *names, *(EAGER_GRAPH for n in names if WAYS[n].graph)]
    triton = functools.partial(backend, "triton")
    entries = [
        Entry(name, lambda: None, triton if way.ours else nullcontext)
        for name, way in WAYS.items()
        if name in names
    ]
    oracle: Oracle | None = None
    try:
        oracle = None if case.drop_path else Oracle(case, bench.device)
    except torch.OutOfMemoryError as error:
        error.__traceback__ = None
    except Exception as error:
        for entry in entries:
            yield failed(row_of(case, entry.name), error, bench.timer)
        return
    bench.timer.clear()
    baselines: dict[bool, Row] = {}  # by whether it is a graph
    for group in [[e] for e in entries] if case.parameters > ALONE else [entries]:
        for row in _measure_group(case, group, oracle, bench):
            graph = WAYS[row.provider].graph
            if row.provider in (BASELINE, EAGER_GRAPH):
                baselines[graph] = row
            yield row.with_speedup(baselines.get(graph))
        for entry in group:
            entry.release()
        bench.timer.clear()


def _measure_group(
    case: Case, group: list[Entry], oracle: Oracle | None, bench: Bench
) -> Iterator[Row]:
    if any(WAYS[entry.name].compiler is not None for entry in group):
        torch.compiler.reset()  # once: a second would throw away what the group has compiled
    for entry in group:
        _warm_up(entry, case, oracle, bench)
        bench.timer.clear()
    take_turns(group, bench.timer, flush=False, at_work=bench.at_work)
    roof = bench.roofs.get("bf16", math.nan)
    for entry in group:
        row = entry.finish(row_of(case, entry.name)).rated(case.flops, math.nan)
        yield replace(
            row, images_per_s=1e3 * case.batch / row.ms, roof=MATMUL, roof_share=row.tflops / roof
        )
