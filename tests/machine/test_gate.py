"""The compile gate's record of what passed: what is compiled again, and what is not."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastvit_kernels.runtime.triton import VERSION, triton
from tests.machine import __main__ as command, gate
from tests.machine.aot import TARGETS, specialisation
from tests.machine.examine import Examined

KERNEL = Examined(
    kernel="layer_norm_fwd",
    config="BLOCK_C=1024 w4 s3",
    dtypes="bf16,fp32",
    arch="sm_80",
    registers=64,
    spills=0,
    shared=16,
    shared_limit=1024,
    warps_per_sm=16,
    tensor_cores="",
    needs_tensor_cores=False,
    copies="",
    seconds=0.0,
    key="k",
)
DIGESTS = {"0a", "1a", "2a", "fa"}


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the gate where compiling finds one kernel; returns its status and what it left out."""
    asked = []

    def go(update=False, changed=False, kernel=KERNEL):
        def compile_cases(archs, jobs, known, every):
            asked.append(set(known))
            return gate.Compiled([kernel], [], set(DIGESTS), set(known))

        monkeypatch.setattr(gate, "compile_cases", compile_cases)
        status = gate.run_gate(["sm_80"], tmp_path / "table.csv", update, changed, 1)
        return status, asked[-1]

    return go


def test_what_passed_is_left_out_but_for_one_in_sixteen(run):
    assert run(update=True) == (0, set())
    assert run(changed=True) == (0, DIGESTS - {"0a"})  # of sixteen first digits one
    assert run() == (0, set())


def test_the_record_names_all_that_passed(run, tmp_path):
    run(update=True)
    table, record = tmp_path / "table.csv", tmp_path / "table.sha256"
    head = [triton.__version__, gate.rules_digest()]
    assert record.read_text().split("\n") == [*head, *sorted(DIGESTS), ""]
    assert gate.Record.read(table).passed() == DIGESTS - {"0a"}
    run(update=True, kernel=replace(KERNEL, spills=8))
    assert record.read_text().split() == head
    assert gate.Record.read(tmp_path / "absent.csv").passed() == set()


def test_each_rule_is_said_with_the_kernels_name():
    def told(**changes):
        return gate.broken_rules([replace(KERNEL, **changes)])

    name = "{} layer_norm_fwd [BLOCK_C=1024 w4 s3; bf16,fp32]: {}"
    assert told() == told(shared=1024) == []
    big = "1025 bytes of shared memory, a block has 1024"
    assert told(shared=1025) == [name.format("sm_80", big)]
    assert told(arch="gfx942", shared=1025, spills=8) == [name.format("gfx942", big)]
    assert told(spills=8) == [name.format("sm_80", "spills 8 bytes a thread")]
    assert told(faults=("a", "b")) == [name.format("sm_80", each) for each in "ab"]
    assert told(arch="sm_120", spills=8) == []
    assert told(arch="sm_103", faults=("a",), spills=8) == [name.format("sm_103", "a")]
    slow = name.format("sm_90", "multiplies 16-bit tiles without wgmma")
    sm_90 = dict(arch="sm_90", needs_tensor_cores=True)
    assert told(**sm_90, tensor_cores="mma") == [slow]
    assert told(**sm_90, tensor_cores="wgmma") == told(arch="sm_90", tensor_cores="mma") == []
    assert told(needs_tensor_cores=True, tensor_cores="mma") == []


def test_what_is_compiled_of_which_case(monkeypatch):
    """Kernels of all processes, each once; what a process found wrong; what it left out."""
    other = replace(KERNEL, key="other")
    answers = {
        "one": gate.Compiled([KERNEL], ["one: no"], {"a"}, {"k"}),
        "two": gate.Compiled([KERNEL, other], [], {"b"}, set()),
    }
    seen = []

    class Pool:
        def __init__(self, jobs, context):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def map(self, function, tasks):
            seen.extend(tasks)
            return [answers[case] for _, case, _ in tasks]

    monkeypatch.setattr(gate, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(gate, "CASES", dict.fromkeys(answers))
    monkeypatch.setattr(gate, "is_compiled", lambda case, arch: (case, arch) != ("two", "gfx942"))
    found = gate.compile_cases(["sm_80", "gfx942"], 1, ["k"])
    assert [task[:2] for task in seen] == [("sm_80", "one"), ("sm_80", "two"), ("gfx942", "one")]
    assert {known for *_, known in seen} == {frozenset({"k"})}
    assert sorted(k.key for k in found.kernels) == ["k", "other"]
    assert found[1:] == (["one: no"] * 2, {"a", "b"}, {"k"})


def test_what_is_left_of_a_launch_when_it_is_named():
    """Equal names, equal machine code: what is not named would hide a change."""
    function = SimpleNamespace(
        __qualname__="store",
        params=[
            SimpleNamespace(
                name=n,
                is_constexpr=n == "B",
                do_not_specialize=n == "T",
                do_not_specialize_on_alignment=n == "M",
            )
            for n in ("x", "M", "T", "n", "B")
        ],
    )

    def named(n=3, B=16, x=None, M=3, T=3):
        given = {"x": torch.empty(4) if x is None else x, "M": M, "T": T, "n": n, "B": B}
        return specialisation(function, given)

    assert named().startswith("store|") and named().count("|") == 5
    assert named(M=16) == named() == named(T=16) == named(T=1) != named(M=1)
    assert len({named(), named(M=2**31), named(T=2**31)}) == 3
    assert named() == named(5) and named(16) == named(32) and named(1.5) == named(2.5)
    values = (3, 16, 1, 2**31 + 3, 2**31, (3, 16), (16, 3), 2.5, None)
    assert len({named(n) for n in values}) == len(values)
    assert named(B=16) != named(B=32)
    assert named(x=torch.empty(9)) == named() != named(x=torch.empty(5)[1:])
    assert named(x=torch.empty(4).half()) != named() == named(x=torch.empty(8)[4:])


def test_what_broke_a_rule_is_compiled_again(run):
    assert run(update=True, kernel=replace(KERNEL, spills=8)) == (1, set())
    assert run(changed=True) == (0, set())


def test_other_rules_are_asked_of_every_kernel(run, monkeypatch):
    run(update=True)
    monkeypatch.setattr(gate, "rules_digest", lambda: "other")
    assert run(changed=True) == (0, set())


def test_what_does_not_compile_is_a_problem(monkeypatch, tmp_path, capsys):
    answer = gate.Compiled([KERNEL], ["a case: it does not compile"], set(DIGESTS), set())
    monkeypatch.setattr(gate, "compile_cases", lambda *_: answer)
    table = tmp_path / "table.csv"
    assert gate.run_gate(["sm_80"], table, False, False, 1) == 1, "there is no table"
    assert f"there is no table {table}" in capsys.readouterr().out
    assert gate.run_gate(["sm_80"], table, True, False, 1) == 1
    assert gate.Record.read(table).passed() == set()
    assert gate.run_gate(["sm_80"], table, False, False, 1) == 1
    out = capsys.readouterr().out
    assert "a case: it does not compile\n" in out and "compile gate: 1 problems" in out
    assert "sm_80: 1 specialisations" in out


def test_a_change_still_has_to_keep_to_the_table(run, capsys):
    run(update=True)
    assert run(changed=True, kernel=replace(KERNEL, registers=65))[0] == 1
    assert "registers 64 -> 65" in capsys.readouterr().out


def test_rows_that_were_left_out_are_not_gone(run, capsys):
    run(update=True)
    other = replace(KERNEL, config="BLOCK_C=512 w4 s3")
    run(changed=True, kernel=other)
    assert "no longer compiled" not in capsys.readouterr().out
    run(kernel=other)
    assert "no longer compiled" in capsys.readouterr().out


def test_a_table_of_another_triton_is_not_compared(run, tmp_path, capsys):
    run(update=True)
    record = tmp_path / "table.sha256"
    record.write_text(record.read_text().replace(triton.__version__, "3.0.0", 1))
    assert run(kernel=replace(KERNEL, registers=65))[0] == 0
    assert "is of triton 3.0.0" in capsys.readouterr().out
    (tmp_path / "table.csv").write_text("arch,kernel\n")
    record.write_text(record.read_text().replace("3.0.0", triton.__version__, 1))
    assert run()[0] == 1
    assert "cannot be read: it has the columns arch, kernel" in capsys.readouterr().out


def test_what_the_command_is_told_reaches_the_gate(monkeypatch, tmp_path, capsys):
    asked = []
    here = [name for name, t in TARGETS.items() if t.least_triton <= VERSION]
    monkeypatch.setattr(command, "run_gate", lambda *words: asked.append(words) or 1)
    assert command.main(["gate", "--arch", "sm_80", "--changed", "--jobs", "3"]) == 1
    assert command.main(["gate", "--update", "--table", "t.csv"]) == 1
    assert command.main(["gate", "--every", "23"]) == 1
    assert asked == [
        (["sm_80"], gate.TABLE, False, True, 3, 1),
        (here, Path("t.csv"), True, False, None, 1),
        (here, gate.TABLE, False, False, None, 23),
    ]
    for words in (["--arch", "sm_80"], ["--changed"], ["--every", "2"]):
        with pytest.raises(SystemExit):
            command.main(["gate", "--update", *words])
        assert "--update writes every row" in capsys.readouterr().err
    assert len(asked) == 3


DIGEST_OF = """
import triton, triton.language as tl
from torch import empty, float16
from tests.machine.aot import specialisation
from tests.machine.launches import digest_of, sources

TWO: tl.constexpr = 2

@triton.jit
def add(x):
    return x * TWO

@triton.jit
def double(x):
    return add(x)

@triton.jit
def triple(x):
    return x + x + x

@triton.jit
def store(x, n, f: tl.constexpr, B: tl.constexpr):
    tl.store(x + tl.arange(0, B), f(n))

def digest(x, n, f, B, target="sm_90"):
    return digest_of(store, specialisation(store, dict(x=x, n=n, f=f, B=B), sources), target)

x = empty(64)
same = [digest(x, 3, double, 16), digest(empty(9), 5, double, 16)]
others = [digest(x.to(float16), 3, double, 16), digest(x[1:], 3, double, 16),
          digest(x, 16, double, 16), digest(x, 1, double, 16),
          digest(x, 3, triple, 16), digest(x, 3, double, 32),
          digest(x, 3, double, 16, "sm_80")]
assert len(set(same)) == 1, same
assert len({*same, *others}) == 8, others
print(same[0])
"""


def test_a_digest_names_everything_that_changes_the_code(tmp_path):
    script = tmp_path / "digest.py"  # Triton reads a kernel's source from its file
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}

    def digest(source):
        script.write_text(source)
        done = subprocess.run(
            [sys.executable, script], check=True, env=env, capture_output=True, text=True
        )
        return done.stdout

    same = digest(DIGEST_OF)
    assert digest(f"# a line above\n\n{DIGEST_OF}") == same
    laid_out = '    """Twice x."""\n    return add(\n        x\n    )  # a comment'
    assert digest(DIGEST_OF.replace("    return add(x)", laid_out)) == same
    edits = (
        (": tl.constexpr = 2", " = tl.constexpr(3)"),
        ("x * TWO", "TWO * x"),
        ("return add(x)", "return x"),
    )
    changed = [DIGEST_OF.replace(*edit) for edit in edits]
    assert len({same, *map(digest, changed)}) == 4  # what a function calls, and reads
