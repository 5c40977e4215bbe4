"""Kernels are launched on the tensor's device, and never wait for it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tiny_calls import every_launch, op_and_inputs, step
from torch import Tensor

import fastvit_kernels as fk
from fastvit_kernels.runtime.backend import INTERPRETED
from fastvit_kernels.runtime.triton import bind_launch

PACKAGE = Path(fk.__file__).parent
interpreted = pytest.mark.skipif(not INTERPRETED, reason="stands in for Triton's interpreter")


def package_trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def test_every_launch_in_the_source_is_bound():
    """By `bind_launch`, which minds the device: no `kernel[grid](...)`, no `kernel.run(...)`."""
    bound = 0
    for path, tree in package_trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            bound += name == "bind_launch"
            inside = path.name == "triton.py" and path.parent.name == "runtime"
            launches = "kernel[" in name or name.endswith("kernel.run")
            assert inside or not launches, f"{path.name}:{node.lineno} launches on any device"
    assert bound >= 12, "the test no longer recognises launches"


@pytest.fixture
def launches(monkeypatch):
    """Kernels are recorded instead of run: (kernel, its first argument)."""
    from triton.runtime.interpreter import InterpretedFunction

    calls = []

    def record(self, *arguments, **_):
        calls.append((self.fn.__name__, arguments[0]))

    monkeypatch.setattr(InterpretedFunction, "run", record)
    return calls


@interpreted
@every_launch
def test_the_first_argument_of_a_kernel_says_on_which_device(op, launches):
    step(*op_and_inputs(op))
    assert len(launches) >= 2
    assert all(isinstance(first, Tensor) for _, first in launches), launches


@pytest.mark.parametrize("device", [0, 1])
def test_a_kernel_is_launched_on_the_device_of_its_tensors(device, monkeypatch):
    current, seen = [0], []

    class Output:
        is_cuda = True

        def get_device(self):
            return device

    class Kernel:
        arg_names: ClassVar = ["y_ptr", "BLOCK_M"]

        def run(self, *_, **__):
            seen.append(current[-1])

    class Guard:
        def __init__(self, x):
            self.device = x.get_device()

        def __enter__(self):
            current.append(self.device)

        def __exit__(self, *_):
            current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    bind_launch(Kernel(), (1,), BLOCK_M=16)(Output())
    assert seen == [device] and current == [0]


def test_bind_launch_binds_the_last_arguments():
    """Constexprs by position, in the kernel's order whatever the keywords' is; options by name."""
    seen = []

    class Kernel:
        arg_names: ClassVar = ["y_ptr", "x_ptr", "M", "eps", "HAS_BIAS", "BLOCK_M"]

        def run(self, *args, **options):
            seen.append((args, options))

    y, z = torch.zeros(1), torch.zeros(1)
    launch = bind_launch(Kernel(), (3,), 5, 1e-6, BLOCK_M=16, num_warps=4, HAS_BIAS=True)
    launch(y, "x")
    launch(z, "x")
    options = dict(grid=(3,), warmup=False, num_warps=4, enable_fp_fusion=True)
    assert seen == [((t, "x", 5, 1e-6, True, 16), options) for t in (y, z)]
    with pytest.raises(AssertionError):
        bind_launch(Kernel(), (3,), HAS_BIAS=True)  # BLOCK_M would get its value


HOST_READS = ["item", "tolist", "cpu", "numpy", "nonzero", "is_nonzero", "__array__"]
HOST_READS += ["__bool__", "__int__", "__float__", "__index__"]


@interpreted
@every_launch
def test_no_launcher_reads_a_value_on_the_host(op, launches, monkeypatch):
    """A read waits for the device, and breaks the capture of a CUDA graph."""
    function, inputs = op_and_inputs(op)
    upstream = torch.ones_like(function(*inputs))

    def forbidden(self, *_, **__):
        raise AssertionError("a launcher reads the values of a tensor")

    with monkeypatch.context() as patch:
        for name in HOST_READS:
            patch.setattr(Tensor, name, forbidden)
        torch.autograd.grad(function(*inputs), inputs, upstream)


def test_no_host_read_in_the_source_of_ops():
    forbidden = {"item", "tolist", "cpu", "numpy", "synchronize", "nonzero", "unique"}
    for path, tree in package_trees():
        if "triton.jit" not in path.read_text():
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                assert name not in forbidden, f"{path.name}:{node.lineno} calls .{name}()"
