"""`fastvit-kernels compile`: the kernels of a step, compiled for named GPUs, in a table.

Its gate compiles CASES for every target and fails where a kernel spills, asks for more shared
memory than a block may have, misses wgmma on sm_90, or takes more than docs/resources.md says.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..models.modules import Mlp
from ..models.presets import create_vit
from ..ops.attention.configs import BWD_TABLE as ATTENTION_BWD
from ..ops.attention.configs import DKDV_TABLE as DKDV
from ..ops.attention.configs import DQ_TABLE as DQ
from ..ops.attention.configs import FWD_TABLE as ATTENTION_FWD
from ..ops.attention.configs import ONE_PASS_TABLE as ONE_PASS
from ..ops.attention.configs import BwdForm
from ..ops.attention.functions import attention
from ..ops.attention.launch import Problem
from ..ops.attention.sdpa import scaled_dot_product_attention
from ..ops.common.gemm_configs import FWD_CONFIGS, HIDDEN_CONFIGS, LIBRARY, gemm_key
from ..ops.mlp import mlp
from ..ops.narrow_mlp import TILES as NARROW_TILES
from ..runtime.backend import gpu
from ..runtime.configs import forced
from ..runtime.triton import triton
from ..tools.aot import TARGETS, CompileError, Kernel, compile_step
from . import options, rank
from .console import CommandError, aligned
from .models import fused_model, input_shape, logits_of
from .options import DTYPES


def model_step(
    model: str | nn.Module, batch: int, dtype: str, *, train: bool,
    overrides: dict[str, Any] | None = None, recompute: bool = True,
) -> Callable[[], None]:  # fmt: skip
    """A step of a model: forward, and where `train` cross-entropy and backward.

    Args:
        model: a name of create_vit, or a module on the meta device.
    """

    def step() -> None:
        vit = model
        if isinstance(vit, str):
            with torch.device("meta"):  # where torch's initialisers do nothing
                vit = create_vit(vit, **(overrides or {}))
        vit.train(train)
        state = {n: torch.empty(b.shape, dtype=b.dtype) for n, b in vit.named_buffers()}
        for name, p in vit.named_parameters():
            empty = torch.empty(p.shape, dtype=p.dtype)
            state[name] = nn.Parameter(empty, requires_grad=p.requires_grad)
        for module in vit.modules():
            if isinstance(module, Mlp):
                module.recompute = recompute
        images = torch.empty(batch, *input_shape(vit))
        autocast = dtype != "fp32"
        precision = torch.autocast("cpu", DTYPES[dtype]) if autocast else nullcontext()
        with torch.set_grad_enabled(train), precision:
            logits = logits_of(torch.func.functional_call(vit, state, images))
            if train:
                labels = torch.zeros(batch, dtype=torch.long)
                loss = F.cross_entropy(logits, labels)
        if train:
            loss.backward()

    return step


def _blocks(model: str, dtype: str = "bf16", batch: int = 64, **arguments: Any):
    """A training step of the model cut to two blocks, the second with drop path if any."""
    recompute = arguments.pop("recompute", True)
    overrides = {"depth": 2, **arguments}
    return model_step(model, batch, dtype, train=True, overrides=overrides, recompute=recompute)


def _masked_attention() -> None:
    """Queries and keys of different lengths, with a boolean mask, an additive one, and causal."""
    shapes = ((8, 12, 197, 64), (8, 12, 257, 64), (8, 12, 257, 64))
    q, k, v = (torch.empty(s, dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    masks = (torch.empty(197, 257, dtype=torch.bool), torch.empty(8, 1, 1, 257, dtype=q.dtype))
    for mask in masks:
        scaled_dot_product_attention(q, k, v, mask).backward(torch.empty_like(q))
    scaled_dot_product_attention(q, k, v, is_causal=True).backward(torch.empty_like(q))


def _narrow_mlp() -> None:
    """The MLP of narrow models in inference, in each of its configs that fits the target."""
    for C, tiles in itertools.product((192, 256), NARROW_TILES.configs):
        x, residual = torch.empty(50432, C, dtype=torch.bfloat16), torch.empty(50432, C)
        fc1_weight, fc2_weight = x.new_empty(4 * C, C), x.new_empty(C, 4 * C)
        biases = x.new_empty(4 * C), x.new_empty(C)
        with torch.no_grad(), forced(NARROW_TILES.name, tiles):
            mlp(x, fc1_weight, biases[0], fc2_weight, biases[1], residual=residual)


def _gemm_configs() -> None:
    """An MLP, forward and backward, with each GEMM config that ships and fits: few are defaults."""
    here = gpu(torch.device("cpu"))  # the target
    for config in FWD_CONFIGS.configs:
        dtype = torch.float32 if config.block_k == 32 else torch.bfloat16
        B, T, C, width = 64, 197, 768, 3072
        key = gemm_key(B * T, width, C, dtype)
        if config.route == "library" or not FWD_CONFIGS.fits(here, config, *key):
            continue
        shapes = ((B, T, C), (width, C), (width,), (C, width), (C,))
        tensors = [torch.empty(s, dtype=dtype, requires_grad=True) for s in shapes]
        residual = torch.empty(B, T, C)
        hidden = config if config in HIDDEN_CONFIGS.configs else LIBRARY
        with forced(FWD_CONFIGS.name, config), forced(HIDDEN_CONFIGS.name, hidden):
            y = mlp(*tensors, residual=residual)
            y.backward(torch.empty_like(y))


def _attention_configs() -> None:
    """Attention, forward and backward, with each launch config that ships and fits at D = 64."""
    here = gpu(torch.device("cpu"))  # the target
    for T, H, D in ((50, 24, 32), (50, 12, 64), (197, 12, 64), (577, 12, 64)):
        qkv = torch.empty(512, T, 3, H, D, dtype=torch.bfloat16, requires_grad=True)
        attention(qkv).backward(qkv.new_empty(512, T, H, D))
        key = Problem(here, qkv.dtype, (512, T, H, D), T, "none", False, "ieee").key()
        for table in (ATTENTION_FWD, ONE_PASS, DQ, DKDV):
            form = BwdForm(one_pass=table is ONE_PASS)
            if D != 64 or (table is not ATTENTION_FWD and form.one_pass != (T < 256)):
                continue
            for config in table.candidates(here, *key)[1:]:
                if T == 50 and getattr(config, "heads", 1) == 1:
                    continue  # compiled for T = 197
                with forced(table.name, config), forced(ATTENTION_BWD.name, form):
                    out = attention(qkv)
                    if table is not ATTENTION_FWD:
                        out.backward(torch.empty_like(out))


# What the gate compiles: every attention path, epilogue and dtype, widths from 64 to 1280.
CASES: dict[str, Callable[[], None]] = {
    "ViT-Ti/16, T=197": _blocks("vit_tiny_patch16_224"),
    "ViT-Ti/16, one image": _blocks("vit_tiny_patch16_224", batch=1),
    "ViT-Ti/16, inference": model_step(
        "vit_tiny_patch16_224", 256, "bf16", train=False, overrides={"depth": 1}
    ),
    "narrow MLP": _narrow_mlp,
    "ViT-B/16, T=197": _blocks("vit_base_patch16_224"),
    "ViT-B/16, fp16": _blocks("vit_base_patch16_224", "fp16"),
    "ViT-B/16, fp32": _blocks("vit_base_patch16_224", "fp32"),
    "ViT-B/14, T=257": _blocks("vit_base_patch14_224", init_values=1e-5, drop_path_rate=0.2),
    "ViT-B/32, T=50": _blocks("vit_base_patch32_224"),
    "ViT-B/16, T=1025": _blocks("vit_base_patch16_224", img_size=512),
    "ViT-L/16, T=577": _blocks("vit_large_patch16_384"),
    "ViT-H/14, D=80, activations stored": _blocks("vit_huge_patch14_224", recompute=False),
    "SigLIP so400m/14, D=72, dropout": _blocks(
        "vit_large_patch14_224", embed_dim=1152, mlp_ratio=4304 / 1152, act_layer="gelu_tanh",
        class_token=False, global_pool="avg", pre_norm=True, attn_drop_rate=0.1,
    ),
    "vit_mnist, D=32, fp32": _blocks("vit_mnist", "fp32"),
    "masked attention": _masked_attention,
    "GEMM configs": _gemm_configs,
    "attention configs": _attention_configs,
}  # fmt: skip
LISTED = ("sm_80", "sm_90")  # rows for every kernel and config; the others by kernel
# Their shared memory is that of other cases.
LISTED_ONLY = {
    "ViT-Ti/16, one image", "ViT-B/16, fp16", "masked attention", "narrow MLP", "attention configs",
}  # fmt: skip


@dataclass(frozen=True)
class Allowed:
    """An exception from a rule of the gate, with its reason."""

    arch: str
    kernel: str
    config: str  # a regular expression, searched in the config
    spills: int  # bytes a thread
    reason: str
    without_wgmma: bool = False

    def covers(self, kernel: Kernel) -> bool:
        return (
            (self.arch, self.kernel) == (kernel.arch, kernel.kernel)
            and re.search(self.config, kernel.config) is not None
        )  # fmt: skip


ALLOWED: tuple[Allowed, ...] = ()


def _compile_cases(arch: str) -> tuple[list[Kernel], list[str]]:
    """The kernels of CASES for one target, and what does not compile."""
    kernels: dict[str, Kernel] = {}
    errors: list[str] = []
    for case, step in CASES.items():
        if case in LISTED_ONLY and arch not in LISTED:
            continue
        try:
            for kernel in compile_step(step, TARGETS[arch]):
                kernels.setdefault(kernel.key, kernel)
        except CompileError as error:
            errors.append(f"{case}: {error}")
    return list(kernels.values()), errors


def _compile_all(archs: Sequence[str]) -> tuple[list[Kernel], list[str]]:
    workers = min(len(archs), os.cpu_count() or 1)
    # spawned: a fork would carry the state of torch's and LLVM's threads
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(_compile_cases, archs))
    return [k for kernels, _ in results for k in kernels], [
        e for _, errors in results for e in errors
    ]


def worst(kernels: Iterable[Kernel]) -> dict[tuple[str, str, str, str], Kernel]:
    """By row of the table: specialisations that differ in an argument's value alone are one row."""
    rows: dict[tuple[str, str, str, str], Kernel] = {}
    for kernel in kernels:
        row = rows.get(kernel.row_key(), kernel)
        warps = [w for w in (row.warps_per_sm, kernel.warps_per_sm) if w is not None]
        rows[kernel.row_key()] = replace(
            row,
            registers=max(row.registers, kernel.registers),
            spills=max(row.spills, kernel.spills),
            shared=max(row.shared, kernel.shared),
            warps_per_sm=min(warps) if warps else None,
            seconds=max(row.seconds, kernel.seconds),
        )
    return dict(sorted(rows.items()))


HEADER = (
    "kernel", "config", "pointers", "registers", "spills", "shared", "warps/SM", "tensor cores",
    "async copies",
)  # fmt: skip


def _cells(kernel: Kernel) -> tuple[str, ...]:
    warps = "-" if kernel.warps_per_sm is None else str(kernel.warps_per_sm)
    return (
        kernel.kernel, kernel.config, kernel.dtypes, str(kernel.registers), str(kernel.spills),
        str(kernel.shared), warps, kernel.tensor_cores or "-", kernel.copies or "-",
    )  # fmt: skip


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def resources_page(kernels: list[Kernel]) -> str:
    """docs/resources.md: what the gate compiled, row by row on LISTED, by kernel elsewhere."""
    parts = [
        "# What each kernel takes from the chip\n",
        "Written by `fastvit-kernels compile --gate --update`; the gate compares with it.",
        f"Compiled with triton {triton.__version__}, not run. Registers: a thread; spills: bytes a",
        "thread; shared: bytes a block. Config: constexprs, then w = num_warps and s = num_stages;",
        "a flag that is off is left out. The cases are `CASES` in",
        "fastvit_kernels/commands/compile.py, the columns are explained in compile.md.\n",
    ]
    rows = worst(kernels)
    for arch in LISTED:
        listed = [_cells(kernel) for key, kernel in rows.items() if key[0] == arch]
        limit = TARGETS[arch].shared_limit
        parts += [f"## {arch}, at most {limit} bytes of shared memory\n"]
        parts += [_markdown([HEADER, *listed]), ""]
    parts += ["## Other targets, the worst config of each kernel\n"]
    head = ("target", "limit", "kernel", "registers", "spills", "shared", "tensor cores")
    others: list[tuple[str, ...]] = [head]
    for arch, target in TARGETS.items():
        for name in sorted({k.kernel for k in kernels}):
            same = [k for k in kernels if (k.arch, k.kernel) == (arch, name)]
            if arch in LISTED or not same:
                continue
            kinds = sorted({k.tensor_cores for k in same} - {""})
            peaks = (max(getattr(k, a) for k in same) for a in ("registers", "spills", "shared"))
            row = (arch, str(target.shared_limit), name, *map(str, peaks), ", ".join(kinds) or "-")
            others.append(row)
    parts += [_markdown(others), "", "## Exceptions from the gate's rules\n"]
    parts += [
        f"- {a.arch} {a.kernel}, {a.config}: up to {a.spills} bytes of spills; {a.reason}."
        for a in ALLOWED
    ] or ["None."]
    return "\n".join([*parts, ""])


def read_page(text: str) -> tuple[str, dict[tuple[str, str, str, str], tuple[int, int, int]]]:
    """The triton version of a resources page, and (registers, spills, shared) by row."""
    version = re.search(r"Compiled with triton (\S+),", text)
    if version is None:
        raise ValueError("it does not say which triton compiled it")
    rows = {}
    arch = ""
    for line in text.splitlines():
        if heading := re.match(r"## (sm_\d+),", line):
            arch = heading[1]
        elif line.startswith("## "):
            break
        elif line.startswith("| ") and not line.startswith(("| kernel |", "| ---")):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[arch, cells[0], cells[1], cells[2]] = tuple(int(c) for c in cells[3:6])
    return version[1], rows


def broken_rules(kernels: Iterable[Kernel]) -> list[str]:
    """What the gate forbids whatever the table says: one sentence for each kernel and rule."""
    problems = []
    for k in kernels:
        name = f"{k.arch} {k.kernel} [{k.config}; {k.dtypes}]"
        allowed = [a for a in ALLOWED if a.covers(k)]
        if k.shared > k.shared_limit:
            problems.append(
                f"{name}: {k.shared} bytes of shared memory, a block has {k.shared_limit}"
            )
        if k.arch in LISTED and k.spills > max((a.spills for a in allowed), default=0):
            problems.append(f"{name}: spills {k.spills} bytes a thread")
        if (
            k.arch == "sm_90" and k.needs_tensor_cores and "wgmma" not in k.tensor_cores
            and not any(a.without_wgmma for a in allowed)
        ):  # fmt: skip
            problems.append(f"{name}: multiplies 16-bit tiles without wgmma")
    return problems


def compare(kernels: Iterable[Kernel], page: str) -> tuple[list[str], list[str]]:
    """(regressions, remarks) of what was compiled against a resources page."""
    version, recorded = read_page(page)
    if version != triton.__version__:
        return [], [f"the table is of triton {version}, this is {triton.__version__}: not compared"]
    regressions, remarks = [], []
    rows = {key: k for key, k in worst(kernels).items() if key[0] in LISTED}
    for key, kernel in rows.items():
        name = f"{key[0]} {key[1]} [{key[2]}; {key[3]}]"
        if key not in recorded:
            remarks.append(f"not in the table: {name}")
            continue
        now = (kernel.registers, kernel.spills, kernel.shared)
        pairs = zip(("registers", "spills", "shared"), recorded[key], now, strict=True)
        changes = [(what, old, new) for what, old, new in pairs if old != new]
        text = ", ".join(f"{what} {old} -> {new}" for what, old, new in changes)
        if any(new > old for _, old, new in changes):
            regressions.append(f"{name}: {text}")
        elif changes:
            remarks.append(f"better than the table: {name}: {text}")
    remarks += [f"no longer compiled: {' '.join(key)}" for key in recorded if key not in rows]
    return regressions, remarks


def run_gate(table: Path, update: bool) -> int:
    """Compile CASES for every target, apply the rules, compare with the table. 0 where all hold."""
    started = time.perf_counter()
    archs = [*LISTED, *(arch for arch in TARGETS if arch not in LISTED)]
    kernels, problems = _compile_all(archs)
    problems += broken_rules(kernels)
    if update:
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text(resources_page(kernels))
        print(f"wrote {table}")
    elif not table.is_file():
        problems.append(f"there is no table {table}; write it with --gate --update")
    else:
        try:
            regressions, remarks = compare(kernels, table.read_text())
        except ValueError as error:
            regressions, remarks = [f"{table} cannot be read: {error}"], []
        print(*remarks, sep="\n", end="\n" if remarks else "")
        problems += [f"more than {table} says: {line}" for line in regressions]
    print(*problems, sep="\n", end="\n" if problems else "")
    for arch in archs:
        count = sum(k.arch == arch for k in kernels)
        print(f"{arch}: {count} specialisations", end="; ")
    print(f"{time.perf_counter() - started:.0f} s")
    print("compile gate: " + (f"{len(problems)} problems" if problems else "every rule holds"))
    return 1 if problems else 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `fastvit-kernels compile`."""
    parser.add_argument(
        "--arch", nargs="+", default=["sm_90"], choices=list(TARGETS), metavar="ARCH",
        help=f"targets, of {', '.join(TARGETS)} (default sm_90)",
    )  # fmt: skip
    options.add_model(parser)
    options.add_img_size(parser)
    options.add_batch(parser, 256)
    options.add_step(parser)
    options.add_dtype(parser, default="bf16")
    options.add_json(parser)
    # For CI and for those who change a kernel: docs/compile.md explains them.
    parser.add_argument("--gate", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--table", type=Path, default=Path("docs/resources.md"), help=argparse.SUPPRESS
    )
    parser.add_argument("--update", action="store_true", help=argparse.SUPPRESS)
    rank.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Compile and print; the exit status."""
    try:
        if args.rank is not None:
            return rank.run_rank(args)
        if args.gate:
            return run_gate(args.table, args.update)
        size = {} if args.img_size is None else {"img_size": args.img_size}
        with torch.device("meta"):
            model = fused_model(args.model, **size)
        step = model_step(model, args.batch, args.dtype, train=args.train)
        compiled = {arch: compile_step(step, TARGETS[arch]) for arch in args.arch}
    except CompileError as error:
        print(f"fastvit-kernels compile: {error}", file=sys.stderr)
        return 1
    except (RuntimeError, ValueError) as error:  # no triton, the interpreter, an unknown model
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps([k.as_dict() for kernels in compiled.values() for k in kernels], indent=1))
        return 0
    for arch, kernels in compiled.items():
        rows = [(*_cells(k), f"{k.seconds:.2f}") for k in kernels]
        what = "training" if args.train else "inference"
        print(f"{arch}: {args.model}, batch {args.batch}, {args.dtype}, {what}; a block may have")
        print(f"{TARGETS[arch].shared_limit} bytes of shared memory\n")
        print(aligned([(*HEADER, "compile s"), *rows]), end="\n\n")
    problems = broken_rules(k for kernels in compiled.values() for k in kernels)
    print(*problems, sep="\n", end="\n" if problems else "")
    return 0
