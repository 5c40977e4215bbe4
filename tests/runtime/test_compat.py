"""No call of the package needs a private name of another library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastvit_kernels.runtime import compat

COMPAT = Path(compat.__file__)
ROOT = Path(__file__).parents[2]
NAMES = sorted(set(re.findall(r'"((?:torch|triton)[\w.]*:[\w.]+)"', COMPAT.read_text())))


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
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    messages = tmp_path_factory.mktemp("without") / "messages"
    with (
        messages.open("w") as file,
        subprocess.Popen(
            [sys.executable, str(ROOT / "tests/support/without_names.py")],
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
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert ran.stderr.splitlines()[-1].startswith(f"ImportError: fastvit_kernels needs {name} ")
