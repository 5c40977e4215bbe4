"""`compile --rank` reads a kernel once for all shapes, and only those that a table is about."""

import json
import os
import subprocess
import sys

import pytest

from fastvit_kernels.runtime.backend import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs triton to compile")

PROGRAM = """
import json
from fastvit_kernels.commands.rank import Job, _rank
from fastvit_kernels.runtime.configs import TABLES
from fastvit_kernels.tools import resources

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
