"""The fast interpreter gives the bits of Triton's own, as mended."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from docs_scripts import ROOT, run_script
from tiny_calls import OPS, assert_same_bits, op_and_inputs, step

PROGRAM = """
import torch
from interpreter import mend_interpreter

torch.set_num_threads(1)
mend_interpreter()
from test_fast_interpreter import steps

torch.save(steps(), 'steps.pt')
"""


def steps():
    """Each op's smallest step, in fp32 and under bf16 autocast."""
    found = {}
    for op in OPS:
        for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
            with context:
                found[op, context.__class__] = step(*op_and_inputs(op))
    return found


@pytest.mark.minutes
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on a GPU here")
def test_fast_interpreter_bits(tmp_path):
    script = tmp_path / "steps.py"
    script.write_text(PROGRAM)
    path = os.pathsep.join(map(str, (Path(__file__).parent, ROOT)))
    run_script(script, tmp_path, PYTHONPATH=path, TRITON_INTERPRET="1")
    slow = torch.load(tmp_path / "steps.pt", weights_only=False)
    for name, wanted in steps().items():
        assert_same_bits(slow[name], wanted)
