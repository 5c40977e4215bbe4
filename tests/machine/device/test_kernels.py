"""The compiled kernels, run: by the 2x rule, and what is noticed when instructions are left out.

Processes of their own, since the tests' own process interprets. `--ptx sm_80` runs everything.
"""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import triton

from tests.machine import gate
from tests.machine.device import ran
from tests.machine.device.driver import PADDED, flattened, ptx_machine
from tests.machine.device.left_out import TABLE, kind_of, read, summary

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}


def python(*words):
    done = subprocess.run([sys.executable, *words], env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def device(*words):
    return python("-m", "tests.machine", "device", *words)


@pytest.mark.parametrize("number", range(2))
def test_every_case_of_check(number):
    """Forward and backward of each op, and a whole model, as they ship for sm_80."""
    said = device("--precision", "bf16", "--kind", "check", "--share", str(number), "2")
    assert f"{23 - number} passed, 0 failed" in said


@pytest.mark.parametrize("precision", ["fp16", "fp32", "tf32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_other_precisions(arch, precision):
    """The whole suite takes minutes: `--ptx sm_80`. Here are three kernels with products."""
    cases = "--kind", "check", "--only", "linear, gelu", "attention, D=32"
    assert "3 passed, 0 failed" in device("--arch", arch, "--precision", precision, *cases)


@pytest.mark.parametrize("where", ["sm_80", "sm_90", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_whole_numbers_give_the_bits_of_float64(where):
    """On a GPU too: where nothing is rounded, the machine and it give the same bits."""
    assert "the bits of float64" in python("-m", "tests.machine.device.exact", where)


LONG_SUMS = """
import torch, fastvit_kernels as fk
from fastvit_kernels.ops.patch_embed.functions import patch_embed_ref
from fastvit_kernels.accuracy.accuracy import Reference
from tests.machine.device import ptx_machine

torch.manual_seed(0)
weight, bias, pos = torch.randn(64, 3, 16, 16) * 768**-0.5, torch.randn(64), torch.randn(64, 64)
given = dict(images=torch.randn(1, 3, 128, 128), weight=weight, bias=bias, pos_embed=pos)
with ptx_machine("sm_80"):
    (error,) = Reference(patch_embed_ref, given).errors(fk.patch_embed)
print(error)
assert error.rms <= 7.5e-7  # 4.9e-7; PyTorch's own differs by CPU
"""


def test_long_sums_in_fp32():
    """A multiply-add after the other, 768 of them, as a GPU does: the sum of a patch begins at 0.
    With what is added, as at 16 bits, its error would be 1.16e-6."""
    python("-c", LONG_SUMS)


def test_everything(request):
    """What `--ptx ARCH` asks for: every case, T, precision and config, and training."""
    targets = request.config.getoption("--ptx")
    if not targets:
        pytest.skip("--ptx sm_80 runs every case, precision and config")
    print(device("--arch", *targets, "--jobs", str(os.cpu_count() or 1)))


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


def test_every_config_runs_but_for_those_of_other_gpus():
    """Of sm_100 alone: close one-pass tiles. Of AMD alone: 128 x 128 in 64 KB. One of
    attention's, four warps with three stages of 128 queries, fits no GPU. Those in Gluon want a
    head for every SM: test_attention_in_turns.py, test_attention_fused_dq.py."""
    wanted = {
        "attention_bwd": 2,
        "attention_bwd_one_pass": 2,
        "attention_fwd": 2,
        "linear_fwd": 1,
        "mlp_bwd_hidden": 1,
    }
    assert Counter(json.loads(python("-c", REACHED))) == wanted


# The record and the table of what is left out


def test_the_record_has_no_failure():
    rows = ran.read()
    assert {row.target for row in rows} == {"sm_80", "sm_90"}
    assert all(row.passed and not row.failed for row in rows)
    assert len({row.place for row in rows}) == len(rows)


def test_a_row_of_the_record_replaces_the_former_one(tmp_path):
    path = tmp_path / "ran.csv"
    former = ran.Ran("sm_80", "bf16", "check", 45, 1, 200, 5000, *ran.versions())
    other, now = former._replace(kind="tokens"), former._replace(passed=46, failed=0)
    ran.write([former, other], path)
    ran.write([now], path)
    assert ran.read(path) == [now, other]


SAMPLE = """
import json, sys
from tests.machine.device import left_out
for case, kernel, every in json.loads(sys.argv[1]):
    for name, one in left_out.record("sm_80", case):
        if one.program.name == kernel:
            print(json.dumps(left_out.rows_of("sm_80", name, one, every)))
"""
SAMPLED = {"_norm_fwd_kernel": 1, "_weight_bwd_kernel": 2}


OTHER = triton.__version__ != gate.Record.read(gate.TABLE).triton


@pytest.mark.skipif(OTHER, reason="the table is of another triton")
def test_the_table_says_what_a_sample_of_it_gives():
    table = [row for row in read() if row.target == "sm_80"]
    asked = [
        ({row.kernel: row.case for row in table}[kernel], kernel, every)
        for kernel, every in SAMPLED.items()
    ]
    lines = python("-c", SAMPLE, json.dumps(asked)).splitlines()
    assert len(lines) == len(asked)
    for line, (_, kernel, every) in zip(lines, asked, strict=True):
        wanted = sorted(row for row in table if row.kernel == kernel)
        found = [tuple(row) for row in json.loads(line)]
        assert found and set(found) <= {tuple(row) for row in wanted}, kernel
        assert len(found) == -(-len(wanted) // every)


def test_no_row_is_without_an_explanation():
    rows = read()
    assert rows and all(bool(row.noticed) != bool(row.why) for row in rows)
    assert all(row.why.startswith(("needless", "beyond", "not reached")) for row in rows if row.why)


def test_what_must_be_noticed_is():
    """Of barriers and waits between warps the most; of each kind some."""
    rows = [row for row in read() if row.target == "sm_80"]
    for kind in sorted({kind_of(row) for row in rows}):
        if kind.startswith("bar.warp"):
            continue
        assert any(row.noticed for row in rows if kind_of(row) == kind), kind
    assert any(line.startswith("sm_80 bar.sync") for line in summary(rows))
    assert TABLE.exists()


def test_arguments_are_flattened_as_triton_does():
    given = flattened(
        ["*fp32", ("i32", "constexpr", ("*bf16",)), "constexpr"], [1, (2, 3, (4,)), 5], iter(())
    )
    assert list(given) == [1, 2, 4]
    assert "lse_ptr" in PADDED


def test_the_machine_does_not_run_beside_the_interpreter():
    if "TRITON_INTERPRET" not in os.environ:
        pytest.skip("nothing interprets here")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), ptx_machine("sm_80"):
        pass
