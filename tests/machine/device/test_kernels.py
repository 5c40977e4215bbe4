"""The compiled kernels, run, by the 2x rule.

Processes of their own, since the tests' own process interprets.
"""

import json
import os
from collections import Counter

import pytest

from tests.machine.device.driver import ptx_machine
from tests.machine.device.gluon import CASES, KINDS
from tests.machine.processes import python


def device(*words):
    return python("-m", "tests.machine", "device", *words)


@pytest.mark.minutes
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_every_case_of_check(arch, number):
    """Forward and backward of each op, and a whole model, as they ship."""
    share = ("--share", str(number), "2")
    said = device("--arch", arch, "--precision", "bf16", "--kind", "check", *share)
    assert f"{23 - number} passed, 0 failed" in said


@pytest.mark.minutes
@pytest.mark.parametrize("precision", ["fp16", "fp32", "tf32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_other_precisions(arch, precision):
    """Three kernels with products; all of them take minutes."""
    cases = "--kind", "check", "--only", "linear, gelu", "attention, D=32"
    assert "3 passed, 0 failed" in device("--arch", arch, "--precision", precision, *cases)


@pytest.mark.minutes
def test_convolution_in_tf32():
    """Its gradients too: PyTorch's own products see the upper bits alone."""
    cases = "--kind", "check", "--only", "patch_embed, video"
    assert "1 passed, 0 failed" in device("--arch", "sm_90", "--precision", "tf32", *cases)


@pytest.mark.minutes
@pytest.mark.parametrize("kind", [*KINDS, "bfloat16"])
def test_gluon_kernels(kind):
    """Of gluon.py, those of a kind in one process; a dtype: a training step on default routes."""
    names = [name for name in CASES if name.startswith(kind)] or [kind]
    said = python("-m", "tests.machine.device.gluon", *names)
    assert said.splitlines() == [f"right: {name}" for name in names]


GATED = """
import json, torch
from contextlib import ExitStack
from fastvit_kernels import gated_mlp
from fastvit_kernels.ops.common.gemm_configs import TMA_STORES, forced_route
from fastvit_kernels.runtime.configs import forced
from tests.machine.aot import TARGETS
from tests.machine.launches import tracing

def launches(F=200, C=104, dtype=torch.bfloat16, change=None, arch="sm_90", outer=()):
    shapes = dict(x=(4, 65, C), fc1_weight=(2 * F, C), fc1_bias=(2 * F,), fc2_weight=(C, F))
    with ExitStack() as stack:
        trace = stack.enter_context(tracing(TARGETS[arch]))
        for context in (forced("gated_mlp_hidden", TMA_STORES), *outer):
            stack.enter_context(context)
        given = {n: torch.empty(s, dtype=dtype) for n, s in shapes.items()} | {"fc2_bias": None}
        gated_mlp(**given | (change(**given) if change else {}))
    return [launch.kernel.kernel for launch in trace.launches]

def separate(fc1_weight, **_):
    gate, value = fc1_weight.clone().chunk(2)
    return dict(fc1_weight=value, gate_weight=gate, fc1_bias=None)

print(json.dumps({
    "packed": launches(),
    "without biases": launches(change=lambda **_: dict(fc1_bias=None)),
    "separate": launches(change=separate),
    "rows of gate and value off 16 bytes": launches(F=204),
    "rows of x off 16 bytes": launches(C=100),
    "a transposed weight": launches(
        change=lambda fc1_weight, **_: dict(fc1_weight=fc1_weight.t().contiguous().t())
    ),
    "normed": launches(change=lambda **_: dict(norm_weight=torch.empty(200))),
    "in fp32": launches(dtype=torch.float32),
    "an A100": launches(arch="sm_80"),
    "the library asked for": launches(outer=[forced_route("library")]),
    "by default": launches(outer=[forced("gated_mlp_hidden", None)]),
}))
"""


def test_gated_mlp_by_roles_where_it_can():
    """A config that `tune` tries; elsewhere the library's product and a pass over it."""
    found = json.loads(python("-c", GATED))
    by_roles = {what for what, kernels in found.items() if "gated_warp_specialized" in kernels}
    assert by_roles == {"packed", "without biases", "separate"}
    a_pass = {what for what, kernels in found.items() if {"gate_fwd", "gate_norm_fwd"} & {*kernels}}
    assert a_pass == found.keys() - by_roles


PROGRAMS = """
import sys, torch, fastvit_kernels as fk
from torch.nn.functional import scaled_dot_product_attention
from fastvit_kernels.ops.patch_embed.functions import patch_embed_ref
from fastvit_kernels.accuracy.accuracy import Reference
from tests.machine.device import ptx_machine

def long_sums(arch):
    torch.manual_seed(0)
    given = dict(
        images=torch.randn(1, 3, 128, 128), weight=torch.randn(64, 3, 16, 16) * 768**-0.5,
        bias=torch.randn(64), pos_embed=torch.randn(64, 64),
    )
    with ptx_machine(arch):
        (error,) = Reference(patch_embed_ref, given).errors(fk.patch_embed)
    assert error.rms <= 7.5e-7, error  # 4.9e-7; PyTorch's own differs by CPU

def sizes(arch, D, T_q, T_kv):
    torch.manual_seed(0)
    lengths = dict(query=T_q, key=T_kv, value=T_kv)
    given = {n: torch.randn(1, 1, T, D).bfloat16().requires_grad_() for n, T in lengths.items()}
    reference = Reference(scaled_dot_product_attention, given)
    with ptx_machine(arch):
        errors = reference.errors(fk.scaled_dot_product_attention)
    assert all(e.passed for e in errors), errors

def hidden_rows(arch, name):
    dtype, T, D = getattr(torch, name), 33, 32
    generator = torch.Generator().manual_seed(0)

    def rand(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    heads, upstream = [rand(1, 2, T, D).requires_grad_() for _ in range(3)], rand(1, 2, T, D)
    for value in (-1e4, -1e9, -1e29, torch.finfo(dtype).min):
        mask = rand(2, T, T)
        mask[:, [3, 4, 10, 31, 32]] = value
        inputs = *heads, mask.requires_grad_()
        with ptx_machine(arch):
            out = fk.scaled_dot_product_attention(*inputs)
            found = out, *torch.autograd.grad(out, inputs, upstream)
        wide = q, k, v, added = [x.detach().float().requires_grad_() for x in inputs]
        formula = (q @ k.mT * D**-0.5 + added).softmax(-1) @ v
        expected = formula, *torch.autograd.grad(formula, wide, upstream.float())
        for x, y in zip(found, expected, strict=True):
            limit = 2e-3 if dtype is torch.float32 else 3e-2
            torch.testing.assert_close(x.float(), y, rtol=limit, atol=limit)

what, arch, *given = sys.argv[1:]
globals()[what](arch, *(int(x) if x.isdigit() else x for x in given))
print("right")
"""


@pytest.mark.minutes
@pytest.mark.parametrize(
    "words",
    [
        "long_sums sm_80",
        "sizes sm_80 256 70 70",
        "sizes sm_90 136 70 70",
        "sizes sm_90 256 20 20",
        "sizes sm_90 64 16 197",
        "hidden_rows sm_80 float32",
        "hidden_rows sm_90 bfloat16",
    ],
)
def test_special_programs(words):
    """A sum of 768 products in fp32 begins at 0, one multiply-add after the other; wide heads and
    few queries have other warps; rows that a finite mask hides, -1e4 to the least number, follow
    softmax(q k^T + mask) v where compiled code fuses products with the sums after them."""
    assert "right" in python("-c", PROGRAMS, *words.split())


REACHED = """
import json
from fastvit_kernels.runtime.configs import TABLES
from tests.machine.device.kernels import jobs

left = {(table.name, str(config)) for table in TABLES.values() for config in table.configs}
for arch in ("sm_80", "sm_90"):
    for precision in ("bf16", "fp32"):
        found = jobs(arch, precision, "configs")
        left -= {tuple(job.name.split("|")[1:]) for job in found}
print(json.dumps(sorted(table for table, _ in left)))
"""


def test_every_config_runs():
    """Of sm_100 alone: close one-pass tiles. Of AMD alone: 128 x 128 in 64 KB. One of attention's,
    four warps with three stages of 128 queries, fits no GPU. Those in Gluon want a head for every
    SM: gluon.py."""
    wanted = {
        "attention_bwd": 2,
        "attention_bwd_one_pass": 2,
        "attention_fwd": 2,
        "linear_fwd": 1,
        "mlp_bwd_hidden": 1,
    }
    assert Counter(json.loads(python("-c", REACHED))) == wanted


def test_machine_rejects_interpreter():
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("nothing interprets here")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), ptx_machine("sm_80"):
        pass
