"""`rank` reads a kernel once for all shapes, and only those that a table is about."""

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fastvit_kernels.ops.common import gemm
from fastvit_kernels.runtime.backend import HAS_TRITON
from tests.machine import rank, ranking
from tests.machine.launches import LibraryCall

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton to compile")

PROGRAM = """
import json
from tests.machine.rank import Job, _rank
from fastvit_kernels.runtime.configs import TABLES
from tests.machine import resources

read, usage = [], resources._nvidia_usage
resources._nvidia_usage = lambda cubin: read.append(cubin) or usage(cubin)
table = TABLES["layer_norm_fwd"]
table.configs = table.configs[:2]
job = Job("sm_90", "attention", (197, 577), ("Ti",), (table.name,), 256)
other = _rank(job), len(read)
found = _rank(job._replace(case="layer_norm"))
print(json.dumps([other, found, len(read), len(set(read))]))
"""


@pytest.fixture(scope="module")
def ranked():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3600)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_case_that_asks_no_such_table_compiles_nothing(ranked):
    assert ranked[0] == [[], 0]


def test_kernels_are_read_once_for_all_lengths(ranked):
    _, found, read, distinct = ranked
    assert [r["model"] for r in found] == [f"ViT-Ti, T = {T}, batch 256" for T in (197, 577)]
    assert read == distinct == 2 + len(found[0]["configs"])  # the backward's two, each config's


def test_rows_are_in_the_order_of_time_and_longer_where_there_is_more_to_do(ranked):
    short, long = ({tuple(c["config"]): c["call_us"] for c in r["configs"]} for r in ranked[1])
    assert list(short.values()) == sorted(short.values())
    assert all(2.5 * us < long[config] < 3.5 * us for config, us in short.items())
    assert [c["default"] for r in ranked[1] for c in r["configs"]].count(True) == 2


def test_a_product_of_16_bits_is_one_call_as_on_cuda():
    """A CPU makes it in fp32 and copies it, which would be charged to the library's route."""
    trace = SimpleNamespace(torch_calls=[])
    a, b = torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(8, 2, dtype=torch.bfloat16)
    with ranking.as_on_cuda(trace):
        product = gemm.matmul(a, b, out_dtype=torch.float32)
    moved = 2 * (a.numel() + b.numel()) + 4 * product.numel()
    assert trace.torch_calls == [LibraryCall("mm", 4, 2, 8, moved)]


def test_a_row_of_a_ranking_sums_its_kernels():
    """Registers, spills and warps are the worst of them; the bound is the longest one's."""

    def launch(us, registers, spills, warps, bound, useful):
        kernel = SimpleNamespace(registers=registers, spills=spills, warps_per_sm=warps)
        modelled = SimpleNamespace(us=us, bound=bound, parts={"ALU": us})
        found = SimpleNamespace(kernel=kernel, code=None)
        return SimpleNamespace(launch=found, modelled=modelled, useful=useful)

    launches = [launch(3.0, 64, 8, 16, "ALU", 0.5), launch(4.5, 128, 0, 32, "HBM", 0.25)]
    found = rank._row(ranking.Row((1, 2), 9.0, launches), True)
    assert found == {
        "config": [1, 2],
        "default": True,
        "error": "",
        "call_us": 9.0,
        "kernel_us": 7.5,
        "bound": "HBM",
        "parts_us": {"ALU": 4.5},
        "useful": 0.25,
        "registers": 128,
        "spills": 8,
        "warps_per_sm": 16,
        "faults": [],
    }
    cells = ("default", "9", "8", "HBM", "25%", "128", "8", "16", "0", "1,2")
    assert rank._cells(found) == cells and len(cells) == len(rank.HEADER)
    failed = rank._row(ranking.Row((3,), math.inf, [], "no"), False)
    assert rank._cells(failed) == ("", "-", *"-------", "3  no")


def test_the_default_of_a_ranking_is_told():
    rows = [ranking.Row(config, 1.0, [], "no") for config in ((1,), (2,))]
    choice = SimpleNamespace(table="linear_fwd", key=("fp32",))
    ranked = SimpleNamespace(case="linear", choice=choice, rows=rows, default=(2,))
    found = rank._as_dict(rank.Job("sm_90", "linear", (197,), ("B",), (), 8), "B", 197, ranked)
    assert [row["default"] for row in found["configs"]] == [False, True]
