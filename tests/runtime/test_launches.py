"""Kernels are launched on the tensor's device, and never wait for it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tiny_calls import every_launch, op_and_inputs, step
from torch import Tensor

import fastvit_kernels as fk
from fastvit_kernels.runtime.backend import INTERPRETED
from fastvit_kernels.runtime.triton import on_grid

PACKAGE = Path(fk.__file__).parent
interpreted = pytest.mark.skipif(not INTERPRETED, reason="stands in for Triton's interpreter")
GUARDS = {"device_guard", "device_of"}


def package_trees():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def _name(node):
    node = node.func if isinstance(node, ast.Call) else node
    return getattr(node, "attr", getattr(node, "id", ""))


def _is_guard(node):
    return isinstance(node, ast.With) and any(_name(i.context_expr) in GUARDS for i in node.items)


def _is_launch(node, helpers, functions):
    """`kernel[grid](...)`, `launch(...)` of a plan, or a call of a helper that launches."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Subscript):
        return "kernel" in _name(node.func.value)
    if isinstance(node.func, ast.Call):  # _fwd_launch(M, N)(y, z, ...)
        return _name(node.func).endswith("_launch")
    name = _name(node)
    planned = name == "launch" or name.startswith("launch_")
    return name in helpers or (planned and name not in functions)


def unguarded_and_guarded(trees, helpers=()):
    """(unguarded, guarded) launches, each (file, line, name of the function around it).

    Every guard must hold a launch: one that is not recognised cannot escape the test.
    """
    functions = {
        n.name for t in trees.values() for n in ast.walk(t) if isinstance(n, ast.FunctionDef)
    }
    found, guards = {False: [], True: []}, []

    def walk(node, path, function, guarded):
        if isinstance(node, ast.FunctionDef):
            function, guarded = node.name, False
        if _is_guard(node):
            guarded = True
            guards.append((path.name, node.lineno, node.end_lineno))
        if _is_launch(node, helpers, functions):
            found[guarded].append((path.name, node.lineno, function))
        for child in ast.iter_child_nodes(node):
            walk(child, path, function, guarded)

    for path, tree in trees.items():
        walk(tree, path, "", False)
    launches = found[False] + found[True]
    for file, first, last in guards if helpers else ():
        held = any(name == file and first <= line <= last for name, line, _ in launches)
        assert held, f"{file}:{first} guards nothing that this test takes for a launch"
    return found[False], found[True]


def test_every_launch_in_the_source_stands_in_a_device_guard():
    """At once, or in a helper called *_launch, whose every call stands in one."""
    trees = dict(package_trees())
    unguarded, _ = unguarded_and_guarded(trees)
    helpers = {function for *_, function in unguarded if function.endswith("_launch")}
    unguarded, guarded = unguarded_and_guarded(trees, helpers)
    astray = [launch for launch in unguarded if launch[2] not in helpers]
    assert not astray, f"launched on whatever device is current: {astray}"
    assert len(guarded) >= 12, "the test no longer recognises launches"


class _Guard:
    """Stands in for a device guard and counts how deep we are."""

    depth = 0

    def __init__(self, x):
        assert isinstance(x, Tensor)

    def __enter__(self):
        _Guard.depth += 1

    def __exit__(self, *_):
        _Guard.depth -= 1


@pytest.fixture
def launches(monkeypatch):
    """Kernels are recorded instead of run: (kernel, whether inside a device guard)."""
    from triton.runtime.interpreter import InterpretedFunction

    calls = []

    def record(self, *_, **__):
        calls.append((self.fn.__name__, _Guard.depth > 0))

    monkeypatch.setattr(InterpretedFunction, "run", record)
    for name, module in list(sys.modules.items()):
        if name.startswith("fastvit_kernels") and hasattr(module, "device_guard"):
            monkeypatch.setattr(module, "device_guard", _Guard)
    monkeypatch.setattr(torch.cuda, "device_of", _Guard)
    return calls


@interpreted
@every_launch
def test_kernels_are_launched_inside_a_device_guard(op, launches):
    step(*op_and_inputs(op))
    assert len(launches) >= 2
    assert all(inside for _, inside in launches), launches


def test_on_grid_binds_the_last_arguments():
    """Constexprs by position, in the kernel's order whatever the keywords' is; options by name."""
    seen = []

    class Kernel:
        arg_names: ClassVar = ["y_ptr", "x_ptr", "M", "eps", "HAS_BIAS", "BLOCK_M"]

        def run(self, *args, **options):
            seen.append((args, options))

    launch = on_grid(Kernel(), (3,), 5, 1e-6, BLOCK_M=16, num_warps=4, HAS_BIAS=True)
    launch("y", "x")
    launch("z", "x")
    options = dict(grid=(3,), warmup=False, num_warps=4)
    assert seen == [((t, "x", 5, 1e-6, True, 16), options) for t in "yz"]
    with pytest.raises(AssertionError):
        on_grid(Kernel(), (3,), HAS_BIAS=True)  # BLOCK_M would get its value


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
