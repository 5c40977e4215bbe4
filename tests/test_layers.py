"""What the import contract of pyproject.toml cannot express: how rooms import, and their names."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fastvit_kernels

PACKAGE = Path(fastvit_kernels.__file__).parent
OPTIONAL = {
    "PIL",
    "kernels",
    "matplotlib",
    "numpy",
    "safetensors",
    "sklearn",
    "timm",
    "torchvision",
    "transformers",
}
EAGER = {"timm_layers.py"}  # classes of timm's, for those who have it


def _imported(node):
    """The top-level packages that an import statement names; none for a relative one."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return {(node.module or "").partition(".")[0]}
    return set()


def _at_import(statements):
    """Statements that run when their module is imported: no function bodies, no type checking."""
    for node in statements:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for field in ("body", "orelse", "finalbody"):
                yield from _at_import(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from _at_import(handler.body)


def test_optional_packages_are_imported_when_they_are_needed():
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in _at_import(ast.parse(file.read_text()).body):
            if str(file.relative_to(PACKAGE)) not in EAGER:
                assert not _imported(node) & OPTIONAL, f"{file}:{node.lineno}"


def test_importing_the_package_loads_no_kernel():
    """Triton reads the source of each kernel when that is decorated: a fifth of a second in all."""
    program = "import sys, torch; before = set(sys.modules); import fastvit_kernels\n"
    program += "print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ours = [name for name in done.stdout.split() if name.startswith("fastvit_kernels.")]
    assert ours == [f"fastvit_kernels.runtime{end}" for end in ("", ".compat", ".version")]
    tops = {name.partition(".")[0] for name in done.stdout.split()} - set(sys.stdlib_module_names)
    assert tops <= {"fastvit_kernels", "torch"}, tops


def test_type_checkers_see_the_names_that_there_are():
    tree = ast.parse(Path(fastvit_kernels.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and not node.orelse
        if ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {alias.asname: node.module for node in block.body for alias in node.names}
    assert seen == fastvit_kernels._HOME_OF
    assert dir(fastvit_kernels) == sorted(seen) == sorted(fastvit_kernels.__all__)
    for name, home in seen.items():
        module = importlib.import_module(f"fastvit_kernels.{home}")
        assert getattr(fastvit_kernels, name) is getattr(module, name)
        assert not (PACKAGE / f"{name}.py").exists() and not (PACKAGE / name).exists(), name
    with pytest.raises(AttributeError, match="'fastvit_kernels' has no attribute 'mpl'"):
        fastvit_kernels.mpl  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'swapin'; did you mean 'swap_in'"):
        fastvit_kernels.swapin  # noqa: B018


@pytest.mark.parametrize("place", ["torch.device('meta')", "torch.inference_mode()", "FakeMode()"])
def test_a_name_may_be_asked_for_first_anywhere(place):
    """Inside of a mode, or while a compiler traces: nothing that is made then is of that mode."""
    program = f"""
import torch, fastvit_kernels as fk
from torch._subclasses import FakeTensorMode as FakeMode
@torch.compile(fullgraph=True, backend="eager")
def compiled(x):
    return fk.layer_norm(x)
with {place}:
    fk.create_vit
x = torch.randn(2, 8, requires_grad=True)
compiled(x).sum().backward()
fk.linear(x, x).sum().backward()
assert x.grad.isfinite().all() and x.grad.device.type == "cpu"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
