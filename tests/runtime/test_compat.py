"""Private names of other libraries stand in one file each of the package, bench and tests.

No call of the package needs one of them.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from fastvit_kernels.runtime import compat

LIBRARIES = ("torch", "triton", "timm", "transformers", "torchvision")
PACKAGE = Path(compat.__file__).parents[1]
COMPAT = Path(compat.__file__)
BENCH = PACKAGE.parent / "bench"
TESTS = Path(__file__).parents[1]
SUPPORT = TESTS / "support"
# Triton's interpreter itself, whose functions these replace or call by their names.
INTERPRETER = {
    "interpreter.py",
    "interpreted.py",
    "fast_interpreter.py",
    "fast_language.py",
    "fast_memory.py",
    "fast_operations.py",
    "test_fast_interpreter.py",
}
NAMES = sorted(set(re.findall(r'"((?:torch|triton)[\w.]*:[\w.]+)"', COMPAT.read_text())))
# Of objects, with what each has in its place.
OF_OBJECTS = {
    "_dynamo_marked_constant",
    "_active_collector",
    "_attn_implementation",
    "_fast_norm",
    "_active",
    "_get_rel_pos_bias",
    "_schema",
    "_compiled_call_impl",
}
ANYWHERE = set(vars(nn.Module())) | {"_replace", "_asdict", "_fields", "_exit"}
ANYWHERE.add("_fingerprint")  # of a data set, by another library


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@cache
def trees(folder):
    return [(file, ast.parse(file.read_text())) for file in sorted(folder.rglob("*.py"))]


@cache
def own_names(folder):
    """What the package defines itself: functions, classes, variables, attributes of self."""
    return set(_own_names(folder))


def _own_names(folder):
    for _, tree in trees(folder):
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield from [node.attr] * (getattr(node.value, "id", "") in ("self", "cls"))


def private_names(tree):
    """(line, name) of each private name that may be another library's: on the way of an import or
    an attribute, or in the text that getattr and its like are given."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.Import):
            found = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found = found if found[0] in LIBRARIES else []
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in (
                "getattr",
                "hasattr",
                "setattr",
                "delattr",
                "attrgetter",
                "resolve_name",
                "import_module",
                "importorskip",
                "methodcaller",
                "patch",
            ):
                texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
                found = [p for t in texts if isinstance(t, str) for p in re.split("[.:]", t)]
        for name in filter(is_private, found):
            yield node.lineno, name


@pytest.mark.parametrize(
    ("folder", "home", "reads"),
    [
        (PACKAGE, COMPAT, []),
        (BENCH, BENCH / "ops.py", [PACKAGE]),
        (TESTS, SUPPORT / "private.py", [PACKAGE, BENCH]),
    ],
    ids=["package", "bench", "tests"],
)
def test_private_names_stand_in_one_file(folder, home, reads):
    known = {name for each in (folder, *reads) for name in own_names(each)} | ANYWHERE
    found = [
        f"{file.relative_to(folder)}:{line} {name}"
        for file, tree in trees(folder)
        if file != home and not (file.parent == SUPPORT and file.name in INTERPRETER)
        for line, name in private_names(tree)
        if name not in known
    ]
    assert not found


def test_private_names_are_looked_up_with_something_in_their_place():
    looked_up = {part for name in NAMES for part in re.split("[.:]", name)}
    known = looked_up | OF_OBJECTS | own_names(COMPAT.parent)
    assert {name for _, name in private_names(ast.parse(COMPAT.read_text()))} <= known


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch import _C",
        "from torch._subclasses import FakeTensor",
        "x = torch._C._is_tracing()",
        "x = getattr(module, '_attn_implementation', None)",
        "x = tensor._version",
        "x = importlib.import_module('torch._dynamo')",
        "x = pytest.importorskip('torch._dynamo')",
        "x = mock.patch('torch._C._is_tracing')",
    ],
)
def test_the_walk_sees(line):
    assert {n for _, n in private_names(ast.parse(line))}


def test_this_release_has_every_name():
    """A newer torch that lacks one: give compat.py its successor."""
    beside = {"torch.fx._symbolic_trace:_get_is_fx_tracing"}  # older ones have the second of two
    beside |= set() if torch.version.cuda else {"torch:_C._cuda_getCurrentRawStream"}
    assert set(compat.MISSING) <= beside
    assert not compat.FUSED_IS_OFF


def test_what_marks_a_constant_is_what_torch_reads():
    def function():
        pass

    torch.compiler.assume_constant_result(function)
    assert vars(function) == vars(compat.constant_when_traced(lambda: None))


def test_objects_of_hosts_without_their_names():
    nothing = object()
    assert compat.collector_of(nothing) is None
    assert compat.attention_of(nothing) is None
    assert not compat.is_fast_norm(nothing)
    assert compat.active_driver(nothing) is None


# What only tools ask for, a GPU, or releases older than this one.
UNTRIED = re.compile("Mode$|softmax|RawStream")
ALONE = [n for n in NAMES if "_global_" not in n and not UNTRIED.search(n)]
HOOKS = [n for n in NAMES if "_global_" in n]


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    """The exit status and the messages of without_names.py for a list of names."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    messages = tmp_path_factory.mktemp("without") / "messages"
    with (
        messages.open("w") as file,
        subprocess.Popen(
            [sys.executable, str(SUPPORT / "without_names.py")],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
        ) as server,
    ):

        def answer(names):
            before = len(messages.read_text())
            print(",".join(names), file=server.stdin, flush=True)
            return server.stdout.readline().strip(), messages.read_text()[before:]

        yield answer
        server.stdin.close()


@pytest.mark.parametrize(
    "names", [*([n] for n in ALONE), HOOKS, NAMES], ids=[*ALONE, "hooks", "every"]
)
def test_a_swapped_model_without(names, ask):
    status, messages = ask(names)
    assert status == "0", messages[-3000:]


def test_an_older_release_is_refused_in_a_line():
    with pytest.raises(ImportError) as refused:
        compat.check_version("torch", "2.4.1+cu121", compat.TORCH)
    wanted = f"fastvit_kernels needs torch {'.'.join(map(str, compat.TORCH))} or newer, got torch "
    assert str(refused.value) == f"{wanted}2.4.1+cu121"
    for name, floor in (("torch", compat.TORCH), ("triton", compat.TRITON)):
        compat.check_version(name, ".".join(map(str, floor)), floor)
        script = f"import {name}; {name}.__version__ = '1.13.1'\nfrom fastvit_kernels import linear"
        ran = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        )
        assert ran.stderr.splitlines()[-1].startswith(f"ImportError: fastvit_kernels needs {name} ")
