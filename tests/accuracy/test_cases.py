"""The registry of ops: what `check` and bench derive from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastvit_kernels.accuracy.cases import OPS, check_cases
from fastvit_kernels.accuracy.entries import norms
from fastvit_kernels.accuracy.op import SMALL, Draw, Example
from fastvit_kernels.runtime.backend import INTERPRETED
from fastvit_kernels.runtime.configs import TABLES
from tests.check.all_configs import choices_of

CPU = torch.device("cpu")


@pytest.mark.skipif(not INTERPRETED, reason="a GPU's defaults take other routes")
def test_check_reaches_every_table():
    found = {c.table for case in check_cases(SMALL, CPU, torch.float16) for c in choices_of(case)}
    assert found == set(TABLES)


def test_eager_equals_specification():
    """What models call instead: `bench` compares with it."""
    for op in OPS.values():
        if op.eager is None:
            continue
        sizes = op.at(replace(SMALL, T=5))
        drawn = op.inputs(Example(sizes), Draw(CPU, torch.float64))
        inputs = {n: x for n, x in drawn.items() if op.args[n].usual}
        options = op.settings_of(sizes, CPU)
        wanted = op.specification(**inputs, **options)
        torch.testing.assert_close(op.eager(**inputs, **options), wanted, msg=op.name)


def test_norm_oracle_is_float64():
    x, weight = torch.randn(2, 3, 8, dtype=torch.float64).unbind()
    for norm in (norms._layer_norm, norms._rms_norm):
        y = norm(x, weight[0], out_dtype=torch.bfloat16)
        assert y.dtype is torch.float64 and not torch.equal(y, y.bfloat16().double())
