"""Ranks the launch configs that ship by the model of loop_model.py, at the shapes of a ViT.

A case is one call of an op, forward and backward. It is traced without compiling, which shows the
decisions that it takes; then once for every config that fits each of them. The figure is the
modelled time of the whole call, library products included, so that a config that changes its
neighbours' work is charged for it. A model, not a measurement. Traces that join one another inside
`tracing` compile and read a kernel once for all shapes that it serves.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from fastvit_kernels.accuracy.op import run_backward
from fastvit_kernels.ops.attention.functions import attention
from fastvit_kernels.ops.attention.sdpa import scaled_dot_product_attention
from fastvit_kernels.ops.attention.varlen import varlen_attention
from fastvit_kernels.ops.common import gemm
from fastvit_kernels.ops.gated_mlp.functions import gated_mlp
from fastvit_kernels.ops.linear import linear
from fastvit_kernels.ops.mlp import mlp
from fastvit_kernels.ops.norm.functions import layer_norm_and_input, rms_norm_and_input
from fastvit_kernels.ops.patch_embed.functions import patch_embed
from fastvit_kernels.ops.rope import Norm, rope
from fastvit_kernels.runtime.configs import TABLES, Choice, ConfigTable, forced, recording
from tests.machine.aot import CompileError, Target

from .examine import Timed, is_modelled, timed
from .launches import Launch, LibraryCall, Trace, trace_step
from .loop_model import LAUNCH, LIBRARY_START, NORM, ROOFS, Roof

Step = Callable[[], Any]
SIZES = {"Ti": (192, 3), "S": (384, 6), "B": (768, 12), "L": (1024, 16)}  # width, heads
# Tables whose kernel has another name.
KERNELS = {
    "layer_norm_fwd": "norm_fwd",
    "layer_norm_bwd": "norm_bwd",
    "rms_norm_fwd": "norm_fwd",
    "rms_norm_bwd": "norm_bwd",
    "rope_bwd": "rope_norm_bwd",
    "gated_norm_fwd": "gate_norm_fwd",
    "gated_norm_bwd": "gate_norm_bwd",
}


def steps(size: str, T: int, batch: int) -> dict[str, Step]:
    """One call of each op of a ViT of this size with T tokens, under bf16 autocast."""
    C, H = SIZES[size]
    half = torch.bfloat16

    def run(function: Callable[..., Any], *inputs: Any, **others: Any) -> None:
        given = [x for x in (*inputs, *others.values()) if isinstance(x, torch.Tensor)]
        for x in given:
            x.requires_grad_()
        with torch.autocast("cpu", half):
            result = function(*inputs, **others)
        run_backward(result, given, torch.empty_like)

    def x() -> torch.Tensor:
        return torch.empty(batch, T, C, dtype=half)

    def parameters(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
        return [torch.empty(shape) for shape in shapes]

    def named(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
        return {name: torch.empty(shape) for name, shape in shapes.items()}

    def turned(norm: Norm | None, **weights: torch.Tensor) -> None:
        q, k, _ = torch.empty(batch, T, 3, H, C // H, dtype=half).unbind(2)
        tables = torch.empty(T - 1, 2 * (C // H)).split(C // H, 1)
        turn = functools.partial(rope, cos=tables[0], sin=tables[1], prefix_tokens=1, norm=norm)
        run(turn, q, k, **weights)

    side, F = math.isqrt(T - 1), 8 * C // 3
    hidden = ((4 * C, C), (4 * C,), (C, 4 * C), (C,))
    cases: dict[str, Step] = {
        **_attention(run, batch, T, H, C // H),
        "mlp": lambda: run(mlp, x(), *parameters(*hidden), residual=x().float()),
        "proj": lambda: run(linear, x(), *parameters((C, C), (C,)), residual=x().float()),
        "layer_norm": lambda: run(
            functools.partial(layer_norm_and_input, out_dtype=half),
            x().float(),
            *parameters((C,), (C,)),
        ),
        "patch_embed": lambda: run(
            patch_embed,
            torch.empty(batch, 3, 16 * side, 16 * side),
            *parameters((C, 3, 16, 16), (C,)),
            prefix_tokens=torch.empty(1, T - side**2, C),
            pos_embed=torch.empty(1, T, C),
        ),
        "rms_norm": lambda: run(
            functools.partial(rms_norm_and_input, out_dtype=half), x().float(), *parameters((C,))
        ),
        "rope": lambda: turned(None),
        "rope, normed heads": lambda: turned(
            "rms_norm", **named(q_norm_weight=(C // H,), k_norm_weight=(C // H,))
        ),
        "gated_mlp, LayerNorm inside": lambda: run(
            gated_mlp,
            x(),
            *parameters((F, C), (F,), (C, F), (C,)),
            **named(gate_weight=(F, C), gate_bias=(F,), norm_weight=(F,), norm_bias=(F,)),
            residual=x().float(),
        ),
    }
    return cases


def _attention(run: Callable[..., None], B: int, T: int, H: int, D: int) -> dict[str, Step]:
    """Attention, with dropout, causal, with each of its masks, and of packed sequences."""
    half = torch.bfloat16

    def attend(**options: Any) -> None:
        run(functools.partial(attention, **options), torch.empty(B, T, 3, H, D, dtype=half))

    def varlen() -> None:
        packed = torch.empty(B * T, 3, H, D, dtype=half)
        ends = torch.empty(B + 1, dtype=torch.int32)
        run(functools.partial(varlen_attention, cu_seqlens=ends, max_seqlen=T), packed)

    def causal() -> None:
        q, k, v = torch.empty(B, T, 3, H, D, dtype=half).transpose(1, 3).unbind(2)
        run(functools.partial(scaled_dot_product_attention, is_causal=True), q, k, v)

    def bias() -> None:
        mask = torch.empty(1, H, T, T, dtype=half)
        run(attention, torch.empty(B, T, 3, H, D, dtype=half), attn_mask=mask)

    return {
        "attention": attend,
        "attention, dropout": lambda: attend(dropout_p=0.1),
        "attention, causal": causal,
        "attention, mask of keys": lambda: attend(
            attn_mask=torch.empty(B, 1, 1, T, dtype=torch.bool)
        ),
        "attention, boolean mask": lambda: attend(attn_mask=torch.empty(T, T, dtype=torch.bool)),
        "attention, additive mask": lambda: attend(attn_mask=torch.empty(T, T, dtype=half)),
        "attention, learnt bias": bias,
        "attention, packed sequences": varlen,
    }


def library_time(call: LibraryCall, roof: Roof) -> float:
    """Microseconds of a library call, modelled: tiles of 128 x 256 at the tensor cores' rate."""
    moved = call.tensor_bytes / roof.hbm * 1e-3
    if not call.K:
        return LAUNCH + moved
    waves = math.ceil(math.ceil(call.M / 128) * math.ceil(call.N / 256) / roof.num_sms)
    cycles = waves * (128 * 256 * call.K / (4 * (roof.hgmma or roof.hmma)) + LIBRARY_START)
    return LAUNCH + (moved**NORM + (cycles * 1e-3 / roof.ghz) ** NORM) ** (1 / NORM)


def trace_time(trace: Trace, arch: str) -> tuple[float, list[Timed]]:
    """Modelled microseconds of a whole trace, and its launches."""
    launches = [timed(launch) for launch in trace.launches]
    library = sum(library_time(call, ROOFS[arch]) for call in trace.torch_calls)
    return library + sum(one.modelled.us for one in launches), launches


class Row(NamedTuple):
    """One config of a ranking; `launches` are those of the table's own kernel."""

    config: Any
    us: float  # of the whole call
    launches: list[Timed]
    error: str = ""  # why it does not compile


class Ranking(NamedTuple):
    case: str
    choice: Choice
    default: Any
    rows: list[Row]  # by modelled time


@contextmanager
def chosen(table: ConfigTable[Any], key: tuple[Any, ...], config: Any) -> Iterator[None]:
    """Inside, the table gives this config for this key alone."""
    former = table.default
    table.default = lambda gpu, *k: config if k == key else former(gpu, *k)
    try:
        with forced(table.name, None):  # and forget what was chosen before
            yield
    finally:
        table.default = former


class _Everything:
    """Known digests: those of all kernels, so that a step is traced and nothing is compiled."""

    def __contains__(self, digest: object) -> bool:
        return True


def decisions(step: Step, target: Target, tables: Sequence[str] = ()) -> list[Choice]:
    """What the step asks these config tables, or all, in the order of first use."""
    with recording() as choices:
        trace_step(step, target, skip=_Everything())
    return [choice for choice in choices if choice.table in (tables or TABLES)]


def rank(case: str, step: Step, choice: Choice, trace: Trace) -> Ranking:
    """The configs that fit one decision of the step, inside the `tracing` that gave `trace`."""
    table = TABLES[choice.table]
    configs = table.candidates(choice.gpu, *choice.key)
    rows = [_row(step, table, choice, config, trace) for config in configs]
    return Ranking(case, choice, configs[0], sorted(rows, key=lambda row: row.us))


def as_on_cuda(trace: Trace) -> Any:
    """Inside, a 16-bit product is the one call that it is on CUDA: a CPU makes it in fp32."""

    def product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None):
        moved = sum(x.numel() * x.dtype.itemsize for x in (out, a, b))
        (M, K), N = a.shape, b.shape[1]
        trace.torch_calls.append(LibraryCall("mm", M, N, K, moved))
        return out

    return patch.object(gemm, "_upcast_product", product)


def _row(step: Step, table: ConfigTable[Any], choice: Choice, config: Any, trace: Trace) -> Row:
    trace.launches.clear()
    trace.torch_calls.clear()
    try:
        with chosen(table, choice.key, config), as_on_cuda(trace):
            step()
    except CompileError as error:
        return Row(config, math.inf, [], str(error).splitlines()[0])
    own = [launch for launch in trace.launches if _belongs(launch, choice)]
    if not own and choice.table.startswith("attention"):
        return Row(config, math.inf, [], "not modelled: the library's attention")
    if not all(map(is_modelled, own)):
        return Row(config, math.inf, [], "not modelled: its loops end by values in memory")
    us, _ = trace_time(trace, choice.gpu.arch)
    return Row(config, us, [timed(launch) for launch in own])


def _belongs(launch: Launch, choice: Choice) -> bool:
    """Whether this is the launch that the choice is about."""
    given, (kernel, key) = launch.arguments, (choice.table, choice.key)
    if kernel == "linear_fwd" and launch.kernel.kernel == kernel:
        return (given["N"], given["K"]) == key[1:3]
    return launch.kernel.kernel.startswith(KERNELS.get(kernel, kernel))
