"""What a call's decision may look at: it is remembered by shapes, dtypes, devices and scalars."""

from __future__ import annotations

import functools
import sys

from numerics import rand
from tiny_calls import every_launch, op_and_inputs
from torch import Tensor

import fastvit_kernels as fk
from fastvit_kernels.runtime.operator import DIRECT

LAYOUT = ("stride", "is_contiguous", "storage_offset", "data_ptr", "untyped_storage")


@every_launch
def test_no_decision_looks_at_the_layout_of_a_tensor(op, monkeypatch):
    decided = []

    def forbidden(self, *_, **__):
        raise AssertionError("a decision looks at a tensor's layout")

    def watched(decide):
        @functools.wraps(decide)
        def call(*arguments):
            with monkeypatch.context() as patch:
                for name in LAYOUT:
                    patch.setattr(Tensor, name, forbidden)
                decided.append(decide.__wrapped__(*arguments, DIRECT))
            return decide(*arguments)

        return call

    ops = {id(m): m for name, m in sys.modules.items() if name.startswith("fastvit_kernels.ops")}
    for module in ops.values():  # once each: former names are names of the same modules
        for key, value in list(vars(module).items()):
            if key.startswith("_decide") and hasattr(value, "__wrapped__"):
                monkeypatch.setattr(module, key, watched(value))
    function, inputs = op_and_inputs(op)
    function(*inputs)
    fk.linear(rand(3, 16), rand(8, 16))  # of one product alone, it asks the library's route too
    assert len(decided) >= 2
