"""Where the time of a training step goes: its kernels, summed by stage of the flow picture.

torch.profiler names for every kernel the operator that launched it, with its shapes, and the
operators around that one; from these follows the stage. Eager PyTorch runs a block as GEMMs that
differ in shape alone, so the shapes decide: (C, 3C) is qkv, (C, C) proj, (C, F) mlp. A swapped
model runs our operators, whose names decide. What nothing claims is "other": residual adds, head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bench.bench_vit import provider_of, row_of
from bench.harness import Bench, failure
from bench.models import NUM_CLASSES, WAYS, Case, Runner
from bench.rows import Row
from bench.shapes import VITS

OP = "profile"
STAGES = ("patch embed", "norm", "qkv", "attention", "proj", "mlp", "optimizer", "other")
STEPS = 3

# Part of an operator's name -> stage; the first that occurs in the name decides.
_NAMES = (
    ("fastvit_kernels::patch_embed", "patch embed"),
    ("fastvit_kernels::layer_norm", "norm"),
    ("fastvit_kernels::rms_norm", "norm"),
    ("fastvit_kernels::qkv_projection", "qkv"),
    ("fastvit_kernels::attention", "attention"),
    ("fastvit_kernels::rope_fwd", "attention"),
    ("fastvit_kernels::rope_bwd", "attention"),
    ("fastvit_kernels::sdpa", "attention"),
    ("fastvit_kernels::mlp", "mlp"),
    ("fastvit_kernels::narrow_mlp", "mlp"),
    ("fastvit_kernels::gated", "mlp"),
    ("convolution", "patch embed"),
    ("layer_norm", "norm"),
    ("rms_norm", "norm"),
    ("scaled_dot_product", "attention"),
    ("_attention", "attention"),
    ("gelu", "mlp"),
)
# Also inside our operators that begin with the QKV projection.
_ATTENTION_KERNELS = (
    "_attention_fwd",
    "_attention_bwd",
    "_rope_fwd",
    "_rope_norm_bwd",
    "_rope_tables_bwd",
)
_PRODUCTS = (
    "aten::mm", "aten::addmm", "aten::linear", "aten::matmul", "aten::_addmm_activation",
    "fastvit_kernels::linear", "fastvit_kernels::qkv_attention",
    "fastvit_kernels::rope_attention_fwd",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One kernel: its name and time, and the operators around it, innermost first."""

    kernel: str
    us: float
    operators: tuple[str, ...]
    shapes: tuple[tuple[tuple[int, ...], ...], ...]  # of each operator's tensors


def _product_stage(shapes: Sequence[Sequence[int]], C: int, F: int) -> str | None:
    """The stage of a GEMM by the sizes of its operands."""
    sizes = {size for shape in shapes for size in shape}
    if NUM_CLASSES in sizes:
        return "other"  # the head
    if F in sizes:
        return "mlp"
    if 3 * C in sizes:
        return "qkv"
    return "proj" if C in sizes else None


def stage_of(launch: Launch, C: int, F: int) -> str:
    """Which stage of the flow picture a kernel belongs to, in a ViT of width C and MLP width F."""
    if any("Optimizer" in name or "_fused_adamw" in name for name in launch.operators):
        return "optimizer"
    if any(part in launch.kernel for part in _ATTENTION_KERNELS):
        return "attention"
    for name, shapes in zip(launch.operators, launch.shapes, strict=True):
        if name.startswith(_PRODUCTS):
            stage = _product_stage(shapes, C, F)
            if stage is not None:
                return stage
        for part, stage in _NAMES:
            if part in name:
                return stage
    return "other"


def launches_of(events: Sequence[Any]) -> list[Launch]:
    """The kernels of torch.profiler's events."""
    found = []
    for event in events:
        for kernel in event.kernels:
            operators, shapes, at = [], [], event
            while at is not None:
                operators.append(at.name)
                sizes = (s for s in at.input_shapes or () if isinstance(s, (list, tuple)))
                shapes.append(tuple(tuple(n for n in s if isinstance(n, int)) for s in sizes))
                at = at.cpu_parent
            found.append(
                Launch(kernel.name, float(kernel.duration), tuple(operators), tuple(shapes))
            )
    return found


def sums(launches: Sequence[Launch], C: int, F: int, steps: int) -> dict[str, float]:
    """Milliseconds a step of each stage."""
    totals: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    for launch in launches:
        totals[stage_of(launch, C, F)] += launch.us
    return {stage: totals[stage] / steps / 1e3 for stage in STAGES}


def record(runner: Runner, device: torch.device) -> list[Launch]:
    """The kernels of STEPS steps after three that warm up."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        runner.step()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(STEPS):
            result: Tensor = runner.step()
        result.sum().item()  # all kernels are done
    return launches_of(profiler.events() or [])


def measure_profile(case: Case, provider: str, bench: Bench) -> Iterator[Row]:
    """A row for each stage: ms of kernel time a step. Stages add up to the GPU's busy time."""
    C, _, _, F = VITS[case.model]
    try:
        with provider_of(provider).context():
            runner = Runner(case, WAYS[provider], bench.device)
            launches = record(runner, bench.device)
        if not launches:
            raise RuntimeError("the profiler has seen no kernel")
    except Exception as error:
        status, note = failure(error, bench.timer)
        for stage in STAGES:
            yield replace(row_of(case, provider, OP, stage), status=status, note=note)
        return
    for stage, ms in sums(launches, C, F, STEPS).items():
        yield replace(row_of(case, provider, OP, stage), ms=ms, samples=STEPS)
