"""What the import contract of pyproject.toml cannot express: how rooms import, and their names."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import fastvit_kernels

PACKAGE = Path(fastvit_kernels.__file__).parent
OPTIONAL = {"PIL", "kernels", "matplotlib", "numpy", "safetensors", "sklearn"}
OPTIONAL |= {"timm", "torchvision", "transformers"}
EAGER = {"timm_layers.py"}  # classes of timm's, for those who have it


def _at_import(node):
    """What runs when a module is imported: no function's body, nothing for type checkers alone."""
    for child in ast.iter_child_nodes(node):
        for_checkers = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if not for_checkers and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _at_import(child)


def test_optional_packages_are_imported_when_they_are_needed():
    for file in sorted(PACKAGE.rglob("*.py")):
        if str(file.relative_to(PACKAGE)) in EAGER:
            continue
        for node in _at_import(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            tops = {name.partition(".")[0] for name in names}
            assert not tops & OPTIONAL, f"{file}:{node.lineno}"


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


ASKED_FIRST = """
import os, torch, fastvit_kernels as fk
from torch._subclasses import FakeTensorMode

@torch.compile(fullgraph=True, backend="eager")
def compiled(x):
    return fk.layer_norm(x)

for place in (torch.device("meta"), torch.inference_mode(), FakeTensorMode()):
    if child := os.fork():  # each has a process in which no name was asked for
        assert os.waitpid(child, 0)[1] == 0, place
        continue
    with place:
        fk.create_vit
    x = torch.randn(2, 8, requires_grad=True)
    compiled(x).sum().backward()
    fk.linear(x, x).sum().backward()
    assert x.grad.isfinite().all() and x.grad.device.type == "cpu"
    os._exit(0)
"""


def test_a_name_may_be_asked_for_first_anywhere():
    """Inside of a mode, or while a compiler traces: nothing that is made then is of that mode."""
    done = subprocess.run([sys.executable, "-c", ASKED_FIRST], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
