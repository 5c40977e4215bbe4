"""The fast interpreter gives the bits of Triton's own, as mended."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tiny_calls import OPS, assert_same_bits, op_and_inputs, step

PROGRAM = """
import sys
import torch
from interpreter import mend_interpreter

torch.set_num_threads(1)
mend_interpreter()
from test_fast_interpreter import steps

torch.save(steps(), sys.argv[1])
"""


def steps():
    """Each op's smallest step, in fp32 and under bf16 autocast."""
    found = {}
    for op in OPS:
        for context in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
            with context:
                found[op, context.__class__] = step(*op_and_inputs(op))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on a GPU here")
def test_fast_interpreter_bits(tmp_path):
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (here, here.parents[1])))
    words = [sys.executable, "-c", PROGRAM, str(tmp_path / "steps.pt")]
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    slow = torch.load(tmp_path / "steps.pt", weights_only=False)
    for name, wanted in steps().items():
        assert_same_bits(slow[name], wanted)
