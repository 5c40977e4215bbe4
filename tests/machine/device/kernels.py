"""The package's ops on the machine, by the 2x rule: what `python -m tests.machine device` runs.
README.md says what each of KINDS is."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastvit_kernels as fk
from fastvit_kernels.accuracy.accuracy import Reference, measure_all
from fastvit_kernels.accuracy.cases import OPS, check_cases, plain_vit
from fastvit_kernels.accuracy.entries.attention import VARLEN_ATTENTION, packed_sizes
from fastvit_kernels.accuracy.op import SMALL, Case, Draw, Example, Inputs
from fastvit_kernels.accuracy.runner import first_line, poisoned
from fastvit_kernels.models.vit import VisionTransformer
from fastvit_kernels.ops.attention import functions
from fastvit_kernels.runtime.compat import TorchDispatchMode
from fastvit_kernels.runtime.dtypes import DTYPES
from tests.check import all_configs
from tests.check.config_cases import config_cases
from tests.support.philox import philox_keep

from .driver import Machine, ptx_machine

CPU = torch.device("cpu")
TOKENS = (1, 17, 50, 197, 257)
KINDS = ("check", "tokens", "training", "configs")
# tf32 is fp32 whose products look at the upper 19 bits of their operands, see CutProducts.
PRECISIONS = DTYPES | {"tf32": torch.float32}


class Job(NamedTuple):
    target: str
    precision: str
    kind: str
    name: str  # of the case
    place: int = 0  # of the config


class Outcome(NamedTuple):
    job: Job
    fault: str | None
    seconds: float  # on the machine alone
    launches: int

    def __str__(self) -> str:
        job = self.job
        where = f"{job.target} {job.precision} {job.kind}: {job.name}"
        where += f" [{job.place}]" if job.kind == "configs" else ""
        if self.fault is not None:
            return f"FAIL {where}  {self.fault}"
        return f"ok   {where}  {self.seconds:.2f} s, {self.launches} launches"


@contextmanager
def precision(name: str) -> Iterator[None]:
    """Inside, fp32 products round to tf32 where `name` says so."""
    former = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(former)


class CutProducts(TorchDispatchMode):
    """Inside, PyTorch's products of fp32 do on the CPU what tensor cores do to tf32: the 13 lowest
    bits of each operand are not looked at."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args = list(args)
        for i in _OPERANDS.get(func.overloadpacket.__name__, ()):
            if args[i].dtype is torch.float32:
                args[i] = (args[i].view(torch.int32) & -0x2000).view(torch.float32)
        return func(*args, **(kwargs or {}))


_SDPA = "_scaled_dot_product_flash_attention_for_cpu"
# Which arguments it multiplies. Attention's backward gets v (3) whole: it subtracts dout . out from
# dout . v, and where a product sees less of one than of the other, a GPU too is left with tf32's
# rounding, even of one key, whose dq and dk are 0.
_OPERANDS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
    _SDPA: (0, 1, 2),
    f"{_SDPA}_backward": (0, 1, 2),
}


def _token_cases(dtype: torch.dtype) -> list[Case]:
    """Each op at each T of a ViT of 32 channels a head, with masks and with dropout; and packed
    sequences of all T."""
    found = [VARLEN_ATTENTION.case(Example(packed_sizes(TOKENS, 2, 32), "all T"), CPU, dtype)]
    for T in TOKENS:
        v = replace(SMALL, T=T, B=1, img_size=(8, 8 * T))
        for op in OPS.values():
            each = dict(op.at(v))
            if "S" in each:  # one key has no gradient but rounding, and no error may be above 0
                each["S"] = T + 5
            masked = [e for e in op.check(v) if e.sizes.get("mask") and T > 1]
            for example in (Example(each), *masked):
                case = op.case(example, CPU, dtype)
                found.append(replace(case, name=f"{case.name}, T={T}"))
        found.append(dropout_case(T, dtype))
    return found


SEED, DROPPED = 0x1234_5678_9ABC, 0.3


def dropout_case(T: int, dtype: torch.dtype) -> Case:
    """attention with dropout, against the formula with the mask that Philox gives."""
    keep = torch.from_numpy(philox_keep(SEED, 1, 2, T, T, DROPPED))

    def reference(qkv: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        probabilities = ((q @ k.mT) * 32**-0.5).softmax(-1) * keep / (1 - DROPPED)
        return (probabilities @ v).transpose(1, 2)

    def ours(qkv: Tensor) -> Tensor:
        with patch.object(functions, "draw_seed", lambda device: torch.tensor([SEED])):
            return fk.attention(qkv, dropout_p=DROPPED)

    def make() -> Inputs:
        return {"qkv": Draw(CPU, dtype)(1, T, 3, 2, 32)}

    return Case(f"attention with dropout, T={T}", ours, reference, make)


def cases(kind: str, name: str) -> list[Case]:
    """By kind and precision; the same list in each process."""
    dtype = PRECISIONS[name]
    if kind == "check":
        return check_cases(SMALL, CPU, dtype)
    return _token_cases(dtype) if kind == "tokens" else config_cases(False, CPU, dtype)


def jobs(target: str, name: str, kind: str) -> list[Job]:
    if kind == "training":
        return [Job(target, name, kind, "VisionTransformer, 3 steps")]
    if kind == "configs":
        return _config_jobs(target, name)
    return [Job(target, name, kind, case.name) for case in cases(kind, name)]


def _config_jobs(target: str, name: str) -> list[Job]:
    """Each config once, by the first case that reaches it."""
    with precision(name), ptx_machine(target):
        reached = _reached(target, name)
    found, done = [], set()
    for place, r in enumerate(reached):
        for config in r.configs():
            if (r.table, config) in done:
                continue
            done.add((r.table, config))
            found.append(Job(target, name, "configs", f"{r.case.name}|{r.table}|{config}", place))
    return found


def run_job(job: Job) -> Outcome:
    fault = None
    machine = Machine()
    try:
        with precision(job.precision), ptx_machine(job.target) as machine:
            fault = _fault_of(job)
    except Exception as error:  # whatever it is, the others still run
        fault = first_line(error)
    return Outcome(job, fault, machine.seconds, machine.launches.total())


def _fault_of(job: Job) -> str | None:
    yardstick = CutProducts if job.precision == "tf32" else nullcontext
    if job.kind == "training":
        return training_fault(PRECISIONS[job.precision], yardstick)
    if job.kind == "configs":
        return _config_fault(job, yardstick)
    (case,) = (c for c in cases(job.kind, job.precision) if c.name == job.name)
    with yardstick():
        case.reference  # noqa: B018, computed here, and kept
    with poisoned():
        actual = case.reference.run(case.function)
    errors = case.reference.judge(*actual)
    if job.precision == "tf32" and not all(e.passed for e in errors):
        # as products of their own PyTorch rounds P and dS too
        given = case.reference
        with yardstick(), sdpa_kernel(SDPBackend.MATH):
            other = Reference(
                given.reference, given.inputs, upstream=given.upstream, dtype=given.dtype
            )
        errors = [
            e.beside(o.torch_max, o.torch_rms)
            for e, o in zip(errors, other.judge(*actual), strict=True)
        ]
    return "; ".join(str(e) for e in errors if not e.passed) or None


@cache
def _reached(target: str, name: str) -> list[all_configs.Reached]:
    """By the cases of a precision, on a machine of the target, which runs here."""
    reached, faults = all_configs.reach(cases("configs", name))
    assert not faults, faults
    return reached


def _config_fault(job: Job, yardstick: Any) -> str | None:
    reached = _reached(job.target, job.precision)[job.place]
    _, table, text = job.name.split("|", 2)
    (config,) = (c for c in reached.configs() if str(c) == text)
    assert reached.table == table
    with yardstick():
        reached.case.reference  # noqa: B018, computed here, and kept
    return all_configs.run_config(reached, config).fault


# Training


def training_fault(
    dtype: torch.dtype,
    yardstick: Any,
    steps: int = 3,
    img_size: tuple[int, int] = (24, 16),
    embed_dim: int = 64,
) -> str | None:
    """Steps of SGD of a small ViT: losses and what they change of the weights, by the 2x rule
    against PyTorch's own training in the context `yardstick`."""
    torch.manual_seed(0)
    sizes: Any = dict(img_size=img_size, patch_size=8, num_classes=10, embed_dim=embed_dim)
    model = VisionTransformer(**sizes, depth=2, num_heads=2, init_values=0.5).eval()
    start = {name: p.detach().to(dtype) for name, p in model.named_parameters()}
    images, labels = Draw(CPU, dtype)(4, 3, *img_size, grad=False), torch.tensor([1, 7, 0, 3])

    def train(forward: Callable[..., Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        weights = {name: p.to(dtype, copy=True).requires_grad_() for name, p in start.items()}
        found = {}
        for step in range(steps):
            logits = forward(weights, images.to(dtype))
            wide = logits if dtype is torch.float64 else logits.float()
            found[f"loss {step}"] = loss = nn.functional.cross_entropy(wide, labels)
            grads = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                for p, grad in zip(weights.values(), grads, strict=True):
                    p -= 0.1 * grad
        changes = [(p - start[name].to(dtype)).flatten() for name, p in weights.items()]
        return {**found, "change of the weights": torch.cat(changes)}

    plain = partial(plain_vit, model)
    with poisoned():
        actual = train(partial(torch.func.functional_call, model), dtype)
    oracle = train(plain, torch.float64)

    def specification() -> dict[str, Tensor]:
        with yardstick():
            return train(plain, dtype)

    errors = measure_all(actual, specification, oracle, dtype)
    return "; ".join(str(e) for e in errors if not e.passed) or None


# Many of them


def _one_thread() -> None:
    torch.set_num_threads(1)


def run_device(
    targets: Sequence[str],
    precisions: Sequence[str],
    kinds: Sequence[str],
    count: int,
    only: Sequence[str] = (),  # of these, jobs have one in their names
    share: tuple[int, int] = (0, 1),  # (number, of): each `of`-th job, from this number on
) -> int:
    """Run them in so many processes, print each outcome as it is there; the exit status."""
    began, total = time.perf_counter(), Counter[str]()
    asked = itertools.product(targets, precisions, kinds)
    found = [job for each in asked for job in jobs(*each)]
    found = [job for job in found if not only or any(part in job.name for part in only)]
    found = found[share[0] :: share[1]]
    # spawned: a fork would carry the state of torch's and LLVM's threads
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _one_thread) as pool:
        submitted = [pool.submit(run_job, job) for job in found] if count > 1 else []
        done = (future.result() for future in as_completed(submitted))
        for outcome in done if count > 1 else map(run_job, found):
            print(outcome, flush=True)
            failed = int(outcome.fault is not None)
            total.update(passed=1 - failed, failed=failed, launches=outcome.launches)
    print(
        f"{total['passed']} passed, {total['failed']} failed, {total['launches']} launches, "
        f"{time.perf_counter() - began:.0f} s"
    )
    return 1 if total["failed"] or not total["passed"] else 0
