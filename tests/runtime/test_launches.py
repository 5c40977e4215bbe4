"""Kernels are those that Triton would pick, and their launchers never wait for the device."""

from __future__ import annotations

import pytest
import torch
from docs_scripts import run_script
from tiny_calls import every_launch, op_and_inputs
from torch import Tensor

from fastvit_kernels.runtime import triton as runtime_triton
from fastvit_kernels.runtime.backend import INTERPRETED

# Triton's own choice of a kernel, up to the launch: `bind_launch` must not make another one.
CHOICES = """
import random
from types import SimpleNamespace
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.runtime.driver import driver
from fastvit_kernels.runtime.gluon import gl, tensor_map
from fastvit_kernels.runtime.triton import bind_launch
from tests.machine.aot import TARGETS

@triton.jit(do_not_specialize_on_alignment=["B"])
def plain(y_ptr, x_ptr, B, n, T: tl.constexpr, BLOCK: tl.constexpr):
    pass

@gluon.jit
def mapped(y_ptr, x_ptr, B, n, T: gl.constexpr, BLOCK: gl.constexpr):
    pass

target, device, ran = TARGETS["sm_90"], [0], []
driver.set_active(SimpleNamespace(
    launcher_cls=lambda source, metadata: lambda x, y, z, stream, *rest: ran.append(
        (metadata.hash, (x, y, z), stream, rest[0], rest[5:])
    ),
    utils=SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": target.shared_limit},
        load_binary=lambda *_: (1, f"function of {device[0]}", 0, 0, 1024),
        unload_module=lambda module: None,
    ),
    get_current_device=lambda: device[0],
    get_current_stream=lambda device: f"stream of {device}",
    get_current_target=target.triton_target,
))

half, long = torch.zeros(64, dtype=torch.bfloat16), 2**31
pointers = [half, half.to(torch.float16), half.float(), None]
pointers += [half[i:] for i in (1, 4, 8, 12)] + [half.float()[1:]]
numbers = [1, 2, 8, 16, 17, 32, 33, 0, -1, -16, -17, None, 0.0, 0.5, 1.0, 16.0, True, False]
numbers += [long - 16, long - 1, long, long + 1, -long, -long - 1, -long - 16, 2 * long, 2**63]
maps = [
    tensor_map(x.view(8, 8), (8, 8), (8, 1), block)
    for x in pointers[:2] for block in ((64, 64), (64, 32), (32, 64))
]
calls = [(plain, (half, x, 3, 3)) for x in pointers] + [(plain, (half[1:], half, 3, 3))]
calls += [(plain, (half, half, *pair)) for n in numbers for pair in ((n, 3), (3, n))]
calls += [(mapped, (x, x, 3, 3)) for x in maps] + [(mapped, (half, x, 3, 3)) for x in maps]

last, grid = (7, 16), (5, 2)
options = dict(num_warps=4, enable_fp_fusion=True)
launches = {f: bind_launch(f, grid, 7, BLOCK=16, num_warps=4) for f in (plain, mapped)}
expected = [
    kernel.run(*given, *last, grid=grid, warmup=True, **options).hash for kernel, given in calls
]
assert len({*expected}) > 25, len({*expected})
order = [*range(len(calls))] * 3
random.Random(0).shuffle(order)
for i in order:
    device[0] = random.Random(i + len(ran)).randrange(2)
    kernel, given = calls[i]
    launches[kernel](*given)
    found, sizes, stream, function, passed = ran[-1]
    assert found == expected[i], f"another kernel for {given}"
    assert sizes == (5, 2, 1) and all(a is b for a, b in zip(passed, (*given, *last), strict=True))
    assert (stream, function) == (f"stream of {device[0]}", f"function of {device[0]}")
assert len(ran) == len(order)
"""


# AMD's kernels, and a newer Triton's: read that, then raise `_RUN`'s bound.
@pytest.mark.skipif(runtime_triton._RUN is None, reason="kernels are picked anew at each launch")
def test_bind_launch_picks_tritons_kernel(tmp_path):
    script = tmp_path / "choices.py"  # Triton reads a kernel's source from its file
    script.write_text(CHOICES)
    run_script(script, tmp_path)


HOST_READS = ["item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "__array__"]
HOST_READS += ["__bool__", "__int__", "__float__", "__index__"]


@pytest.mark.skipif(not INTERPRETED, reason="stands in for Triton's interpreter")
@every_launch
def test_no_host_reads(op, monkeypatch):
    """A read waits for the device, and breaks the capture of a CUDA graph."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **__: None)  # which reads them
    function, inputs = op_and_inputs(op)
    upstream = torch.ones_like(function(*inputs))

    def forbidden(self, *_, **__):
        raise AssertionError("a launcher reads the values of a tensor")

    with monkeypatch.context() as patch:
        for name in HOST_READS:
            patch.setattr(Tensor, name, forbidden)
        torch.autograd.grad(function(*inputs), inputs, upstream)
