"""`check --all-configs`: every launch config that ships, forced, by the 2x rule and bit for bit.

A case is a call of a public function on random inputs: odd sizes, tails, strides. Which tables it
asks is found by running it with the launches left out; a table that only another table's config
leads to (a kernel that the default route does not take) is found by forcing that config.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.attention.functions import attention, attention_ref
from ..ops.attention.sdpa import scaled_dot_product_attention
from ..ops.layer_norm import layer_norm_and_input
from ..ops.linear import linear, linear_ref
from ..ops.mlp import mlp, mlp_ref
from ..ops.patch_embed.functions import patch_embed, patch_embed_ref
from ..runtime.backend import backend
from ..runtime.configs import TABLES, Choice, forced, recording
from ..runtime.triton import triton
from ..runtime.tuned_table import fields
from ..tools.tuning import Fault, check
from ..verify.accuracy import Reference
from .console import quiet_interpreter

Inputs = dict[str, Tensor | None]
Draw = Callable[..., Tensor]  # (*shape, scale=1.0, grad=True) -> random tensor
Forced = tuple[tuple[str, Any], ...]  # (table, config) that are in force together


@dataclass(frozen=True, eq=False)
class Case:
    """One call: `function` and its specification on the same inputs, made when they are needed."""

    name: str
    function: Callable[..., Any]
    specification: Callable[..., Any]
    make: Callable[[], Inputs]

    @cached_property
    def reference(self) -> Reference:
        return Reference(self.specification, self.make())


def _norm_case(draw: Draw, rows: int, C: int, strided: bool) -> Case:
    def specification(x, weight, bias):
        return F.layer_norm(x, (C,), weight.to(x.dtype), bias.to(x.dtype), 1e-6), x

    def make() -> Inputs:
        x = draw(rows, C + 8 * strided)[:, :C].detach().requires_grad_()
        return {"x": x, "weight": draw(C), "bias": draw(C)}

    name = f"layer_norm {rows} x {C}{', strided' if strided else ''}"
    return Case(name, layer_norm_and_input, specification, make)


def _attention_case(draw: Draw, B: int, T: int, H: int, D: int, strided: bool = False) -> Case:
    def make() -> Inputs:
        if strided:  # (B, 3, H, T, D) in memory
            return {"qkv": draw(B, 3, H, T, D).permute(0, 3, 1, 2, 4).detach().requires_grad_()}
        return {"qkv": draw(B, T, 3, H, D)}

    name = f"attention B={B} T={T} H={H} D={D}{', strided' if strided else ''}"
    return Case(name, attention, attention_ref, make)


def _sdpa_case(draw: Draw, T: int, S: int, D: int, mask: str) -> Case:
    def call(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, k, v, attn_mask: function(q, k, v, attn_mask, is_causal=mask == "causal")

    def make() -> Inputs:
        inputs: Inputs = {"q": draw(1, 2, T, D), "k": draw(1, 2, S, D), "v": draw(1, 2, S, D)}
        attn_mask = draw(1, 1, T, S, grad=False) if mask in ("bool", "add") else None
        if attn_mask is not None and mask == "bool":
            attn_mask = attn_mask > 0
            attn_mask[..., 0] = True  # every query sees a key
        return {**inputs, "attn_mask": attn_mask}

    ours, torchs = call(scaled_dot_product_attention), call(F.scaled_dot_product_attention)
    return Case(f"sdpa T={T} S={S} D={D}, mask {mask}", ours, torchs, make)


def _epilogue_inputs(draw: Draw, B: int, T: int, N: int) -> Inputs:
    row_scale = draw(B, grad=False).abs()
    return {"residual": draw(B, T, N), "layer_scale": draw(N), "row_scale": row_scale}


def _linear_case(draw: Draw, B: int, T: int, K: int, N: int, activation: str | None) -> Case:
    def make() -> Inputs:
        inputs: Inputs = {"x": draw(B, T, K), "weight": draw(N, K, scale=K**-0.5), "bias": draw(N)}
        return inputs if activation else {**inputs, **_epilogue_inputs(draw, B, T, N)}

    def call(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda **inputs: function(**inputs, activation=activation)

    name = f"linear B={B} T={T} K={K} N={N}, {activation or 'residual'}"
    return Case(name, call(linear), call(linear_ref), make)


def _mlp_case(draw: Draw, B: int, T: int, C: int, hidden: int, recompute: bool) -> Case:
    def make() -> Inputs:
        return {
            "x": draw(B, T, C),
            "fc1_weight": draw(hidden, C, scale=C**-0.5), "fc1_bias": draw(hidden),
            "fc2_weight": draw(C, hidden, scale=hidden**-0.5), "fc2_bias": draw(C),
            **_epilogue_inputs(draw, B, T, C),
        }  # fmt: skip

    def ours(**inputs: Any) -> Tensor:
        return mlp(**inputs, recompute=recompute)

    name = f"mlp B={B} T={T} C={C} F={hidden}{', recompute' if recompute else ''}"
    return Case(name, ours, mlp_ref, make)


def _mlp_inference_case(draw: Draw, B: int, T: int, C: int, hidden: int) -> Case:
    """Without gradients, where the hidden activations need not be kept."""
    case = _mlp_case(draw, B, T, C, hidden, False)

    def make() -> Inputs:
        return {n: None if x is None else x.detach() for n, x in case.make().items()}

    return Case(f"{case.name}, inference", case.function, case.specification, make)


def _patch_case(draw: Draw, B: int, size: tuple[int, int], patch: int, C: int) -> Case:
    tokens = (size[0] // patch) * (size[1] // patch)

    def make() -> Inputs:
        return {
            "images": draw(B, 3, *size),
            "weight": draw(C, 3, patch, patch, scale=(3 * patch**2) ** -0.5), "bias": draw(C),
            "prefix_tokens": draw(1, 1, C), "pos_embed": draw(1, 1 + tokens, C),
        }  # fmt: skip

    return Case(f"patch_embed {B} x {size}, C={C}", patch_embed, patch_embed_ref, make)


def cases(draw: Draw, *, large: bool) -> list[Case]:
    """Every op at a few shapes; `large` for a GPU, else what the interpreter can do in time."""
    widths = (60, 96, 200, 384, 768, 1280, 3000)
    if large:
        return [
            *(_norm_case(draw, 8 * 197 + 3, C, C % 128 == 0) for C in (*widths, 8192)),
            *(_attention_case(draw, 3, T, 5, 64) for T in (1, 50, 197, 257, 577, 1025)),
            *(_attention_case(draw, 128, T, 17, D) for T, D in ((19, 32), (50, 64))),
            *(_attention_case(draw, 2, 197, 3, D, True) for D in (32, 64, 72, 80, 96, 128, 256)),
            *(_sdpa_case(draw, 197, 261, 64, mask) for mask in ("none", "bool", "add", "causal")),
            _sdpa_case(draw, 130, 197, 128, "bool"),
            *(_linear_case(draw, 8, 197, K, N, "gelu") for K, N in ((768, 3072), (200, 328))),
            *(_linear_case(draw, 8, 197, K, N, None) for K, N in ((768, 768), (328, 200))),
            *(_linear_case(draw, 1, T, 192, 768, "gelu") for T in (1, 50)),
            *(_mlp_case(draw, 8, 197, C, 4 * C, r) for C in (96, 192, 768) for r in (False, True)),
            *(_mlp_inference_case(draw, 3, 197, C, 4 * C) for C in (64, 100, 192, 256)),
            *(_patch_case(draw, 5, (224, 192), 16, C) for C in (192, 768)),
            _patch_case(draw, 3, (56, 42), 14, 200),
        ]
    return [  # the slow ones last: tests take the first that fit a config
        *(_norm_case(draw, 5, C, C % 128 == 0) for C in widths),
        _attention_case(draw, 1, 50, 2, 64),
        _attention_case(draw, 1, 1, 1, 64),
        *(_attention_case(draw, 1, 35, 1, D, True) for D in (32, 72, 128, 256)),
        _attention_case(draw, 8, 19, 4, 16),
        *(_sdpa_case(draw, 37, 42, 32, mask) for mask in ("none", "bool", "add", "causal")),
        _linear_case(draw, 2, 37, 72, 136, "gelu"),
        _linear_case(draw, 2, 37, 136, 72, None),
        _mlp_case(draw, 2, 19, 40, 72, False),
        _mlp_case(draw, 2, 19, 40, 72, True),
        _mlp_inference_case(draw, 2, 19, 40, 72),
        _mlp_inference_case(draw, 1, 50, 192, 80),
        _patch_case(draw, 2, (24, 16), 8, 40),
        _attention_case(draw, 1, 197, 1, 64),
        _attention_case(draw, 1, 300, 1, 16),
    ]


@contextmanager
def launches_left_out() -> Iterator[None]:
    """Inside, kernels are not launched: what a call decides depends on no value."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    kinds: tuple[Any, ...] = (JITFunction, InterpretedFunction)
    former = [(kind, kind.run) for kind in kinds]
    for kind, _ in former:
        kind.run = lambda *_, **__: None
    try:
        yield
    finally:
        for kind, run in former:
            kind.run = run


@contextmanager
def all_forced(settings: Forced) -> Iterator[None]:
    with ExitStack() as stack:
        for table, config in settings:
            stack.enter_context(forced(table, config))
        yield


def choices_of(case: Case, settings: Forced = ()) -> list[Choice]:
    """The decisions that a case takes, forward and backward, without running its kernels."""
    inputs = case.make()
    with backend("triton"), launches_left_out(), all_forced(settings), recording() as choices:
        result = case.function(**inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        wanted = [x for x in inputs.values() if x is not None and x.requires_grad]
        if wanted:
            upstream = [torch.ones_like(y) for y in outputs]
            torch.autograd.grad(outputs, wanted, upstream, allow_unused=True)
    return list(choices)


@dataclass(frozen=True)
class Reached:
    """A table that a case asks, the keys it asks with, and what must be forced to get there."""

    case: Case
    table: str
    choices: tuple[Choice, ...]
    settings: Forced

    def fits(self, config: Any) -> bool:
        """Whether forcing this config changes what the case runs."""
        fits = TABLES[self.table].fits
        return any(fits(choice.gpu, config, *choice.key) for choice in self.choices)


@dataclass(frozen=True)
class Run:
    """One config forced in one case: the largest error as a share of its limit, or a fault."""

    table: str
    config: Any
    case: str
    share: float
    fault: str | None


def _reached(case: Case, settings: Forced) -> list[Reached]:
    ordered = sorted(choices_of(case, settings), key=lambda choice: choice.table)
    groups = itertools.groupby(ordered, key=lambda choice: choice.table)
    return [Reached(case, table, tuple(group), settings) for table, group in groups]


def reach(every_case: Sequence[Case]) -> tuple[list[Reached], list[Run]]:
    """How each table is reached by each case, and the cases that raise.

    Where tables are left over, configs that may lead to them are followed.
    """
    found: list[Reached] = []
    faults: list[Run] = []

    def follow(case: Case, settings: Forced) -> list[Reached]:
        try:
            return _reached(case, settings)
        except Exception as error:  # whatever an op raises, the others are still checked
            text = str(error).strip().split("\n")[0]
            table, config = settings[-1] if settings else ("", None)
            fault = f"{type(error).__name__}: {text}"
            faults.append(Run(table, config, case.name, 0.0, fault))
            return []

    for case in every_case:
        found += follow(case, ())
    for start in list(found):
        if {r.table for r in found} == set(TABLES):
            break
        for config in TABLES[start.table].configs:
            if start.fits(config):
                known = {r.table for r in found if r.case is start.case}
                further = follow(start.case, ((start.table, config),))
                found += [r for r in further if r.table not in known]
    return found, faults


def run_config(reached: Reached, config: Any, *, repeats: int = 2) -> Run:
    """Force a config in a case and check it."""
    case = reached.case
    share, fault = 0.0, None
    try:
        with backend("triton"), all_forced((*reached.settings, (reached.table, config))):
            share = check(case.reference, case.function, repeats=repeats)
    except Fault as error:
        fault = str(error)
    return Run(reached.table, config, case.name, share, fault)


def config_name(config: Any) -> str:
    return "" if config is None else ",".join(f"{k}={v}" for k, v in fields(config).items())


def run_all(every_case: Sequence[Case]) -> Iterator[Run]:
    """Each config of each table in each case that it fits."""
    found, faults = reach(every_case)
    yield from faults
    for reached in found:
        for config in TABLES[reached.table].configs:
            if reached.fits(config):
                yield run_config(reached, config)


def _rows(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    rows = []
    for name, table in sorted(TABLES.items()):
        mine = [run for run in runs if run.table == name]
        configs = {run.config for run in mine}
        faults = sum(run.fault is not None for run in mine)
        worst = max((run.share for run in mine), default=0.0)
        rows.append(
            (
                name, str(len(table.configs)), str(len(configs)), str(len(mine)), f"{worst:.2f}",
                f"{faults} FAILED" if faults else "ok" if mine else "not reached",
            )
        )  # fmt: skip
    return rows


HEADER = ("table", "shipped", "forced", "runs", "worst error / limit", "")


def print_report(runs: Sequence[Run], started: float, where: str) -> None:
    rows = [HEADER, *_rows(runs)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    for row in rows:
        print("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip())
    for run in runs:
        if run.fault is not None:
            print(f"FAILED {run.table} [{config_name(run.config)}], {run.case}: {run.fault}")
    configs = {(run.table, run.config) for run in runs}
    shipped = sum(len(table.configs) for table in TABLES.values())
    print(
        f"{len(configs)} of {shipped} configs of {len(TABLES)} tables fit here and ran, "
        f"{len(runs)} runs of config and case, each twice for equal bits, "
        f"{time.perf_counter() - started:.0f} s, {where}."
    )


def as_json(runs: Sequence[Run], where: str) -> str:
    content = {
        "passed": passed(runs),
        "device": where,
        "versions": {"torch": torch.__version__, "triton": str(triton.__version__)},
        "runs": [
            {
                "table": run.table, "config": run.config and fields(run.config), "case": run.case,
                "share": run.share, "fault": run.fault,
            }
            for run in runs
        ],
    }  # fmt: skip
    return json.dumps(content, indent=1)


def passed(runs: Sequence[Run]) -> bool:
    """Whether every table was reached and nothing failed."""
    return {run.table for run in runs} >= set(TABLES) and all(run.fault is None for run in runs)


def command(draws: Mapping[str, Draw], *, large: bool, json_wanted: bool, where: str) -> int:
    """Run and print; 0, or 1 where a config fails or a table is not reached.

    Args:
        draws: name of a dtype -> random tensors of it.
    """
    started = time.perf_counter()
    runs = []
    for dtype, draw in draws.items():
        with quiet_interpreter():
            for run in run_all(cases(draw, large=large)):
                runs.append(replace(run, case=f"{run.case}, {dtype}"))
                if run.fault is not None and not json_wanted:
                    print(f"FAILED {run.table} [{config_name(run.config)}]", flush=True)
    if json_wanted:
        print(as_json(runs, where))
    else:
        print_report(runs, started, where)
    return 0 if passed(runs) else 1
