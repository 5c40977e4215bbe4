"""A reported miscompile that the kernels must not meet, read from the IR of sm_90.

What else goes wrong in compiled code is the gate's to find (fences, shared memory), or the PTX
machine's, which runs the kernels (registers and memory still in use, sums in 16 bits); what neither
shows is run by `python -m tests.check --all-configs` on a GPU.
"""

from __future__ import annotations

import json
import re

from tests.machine.processes import python

# The kernels with transposed operands: attention's, in each form of its backward.
COMPILE = """
import json, torch
from fastvit_kernels import attention
from tests.machine.aot import TARGETS, Trace, tracing

trace = Trace()
with tracing(TARGETS["sm_90"], trace):
    for T, D in ((50, 64), (197, 64), (577, 64), (197, 128)):
        qkv = torch.empty(8, T, 3, 12, D, dtype=torch.bfloat16, requires_grad=True)
        y = attention(qkv)
        y.backward(torch.empty_like(y))
print(json.dumps({str(each.kernel): each.compiled.asm.get("ttir", "") for each in trace.launches}))
"""


def transposed_values(ttir: str) -> list[str]:
    """The operations whose results are transposed. Not those of pointers and integers, which no dot
    takes, nor for a tt.split."""
    found = []
    lines = ttir.splitlines()
    for number, line in enumerate(lines):
        match = re.search(r"(%[\w#]+) = tt\.trans (%[\w#]+) .*? : tensor<([^>]*)", line)
        if match is None or "!tt.ptr" in match[3] or match[3].endswith("xi32"):
            continue
        result, value, _ = (re.escape(group) for group in match.groups())
        if any(re.search(rf"tt\.split {result}\b", later) for later in lines[number + 1 :][:3]):
            continue
        # names are those of a region: the nearest definition above is the one meant
        above = (re.match(rf"\s*{value}(?::\d+)? = \"?([\w.]+)", e) for e in lines[:number][::-1])
        defined = next(filter(None, above), None)
        found.append(defined[1] if defined else "an argument")
    return found


def test_no_transpose_of_computed_value():
    """Wrong gradients from tl.dot(tl.trans(x), y), x from an accumulator: fla #640, #826, #983.
    After inlining: what is transposed comes out of a load."""
    compiled = json.loads(python("-c", COMPILE))
    found = {name: transposed_values(ttir) for name, ttir in compiled.items()}
    assert sum(map(len, found.values())) > 10
    wrong = {n: v for n, v in found.items() if not {*v} <= {"tt.load", "tt.descriptor_load"}}
    assert not wrong
