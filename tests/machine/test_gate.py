"""The compile gate: what breaks a rule, what the table says, and what is compiled again."""

from dataclasses import replace
from typing import Any

import pytest

from fastvit_kernels.runtime.triton import VERSION, triton
from tests.machine import __main__ as command, gate, resources
from tests.machine.aot import TARGETS
from tests.machine.examine import Examined
from tests.machine.processes import python
from tests.machine.table import COLUMNS, compare, read_table, row_of

LIMIT = TARGETS["sm_90"].shared_limit
NAMES: Any = dict(kernel="linear_fwd", config="BLOCK_M=128 w8 s3", dtypes="bf16", arch="sm_90")
TAKES: Any = dict(registers=128, spills=0, shared=98304, shared_limit=LIMIT, warps_per_sm=16)
DOES: Any = dict(tensor_cores="wgmma", needs_tensor_cores=True, copies="cp.async")
KERNEL = Examined(**NAMES, **TAKES, **DOES, seconds=0.5, key="k", digest="f0")
OTHER = replace(KERNEL, config="BLOCK_M=64 w4 s3", registers=64, digest="0a")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the gate where the cases ask for these kernels; its status, and what it compiled."""

    def go(*kernels, update=False, changed=False, errors=()):
        compiled = []

        def compile_cases(archs, jobs, known, every):
            compiled.extend(k for k in kernels or (KERNEL, OTHER) if k.digest not in known)
            met = {k.digest for k in kernels or (KERNEL, OTHER)}
            return gate.Compiled(list(compiled), list(errors), met)

        monkeypatch.setattr(gate, "compile_cases", compile_cases)
        status = gate.run_gate(["sm_90"], tmp_path / "table.csv", update, changed, 1)
        return status, [k.digest for k in compiled]

    return go


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(shared=232449), "232449 bytes of shared memory, a block has 232448"),
        (dict(arch="gfx942", shared=232449, spills=8), "232449 bytes of shared memory"),
        (dict(spills=8), "spills 8 bytes"),
        (dict(arch="sm_120", spills=8), None),  # in the table, not refused
        (dict(tensor_cores="mma"), "multiplies 16-bit tiles without wgmma"),
        (dict(arch="sm_80", tensor_cores="mma"), None),
        (dict(tensor_cores="", needs_tensor_cores=False), None),
        (dict(arch="sm_103", faults=("no fence",), spills=8), "no fence"),
        ({}, None),
    ],
    ids=str,
)
def test_gate_rules(change, message):
    found = gate.broken_rules([replace(KERNEL, **change)])
    assert len(found) == (message is not None)
    name = f"{change.get('arch', 'sm_90')} linear_fwd [BLOCK_M=128 w8 s3; bf16]"
    assert message is None or found[0].startswith(f"{name}: {message}")


def test_gate_skips_recorded_but_one_in_64(run, tmp_path):
    assert run(update=True) == (0, ["f0", "0a"])
    assert run(changed=True) == (0, [])
    first = replace(KERNEL, digest="03")
    assert run(first, OTHER, update=True)[0] == 0
    assert run(first, OTHER, changed=True) == (0, ["03"])
    assert run() == (0, ["f0", "0a"])
    assert run(first, OTHER, update=True, changed=True) == (0, [])
    assert {*read_table(tmp_path / "table.csv")} == {"03", "0a"}


def test_gate_update_changed_keeps_rows(run, tmp_path):
    run(update=True)
    new = replace(KERNEL, registers=160, digest="f1")
    assert run(new, OTHER, update=True, changed=True) == (0, ["f1"])
    rows = read_table(tmp_path / "table.csv")
    assert {digest: row["registers"] for digest, row in rows.items()} == {"f1": "160", "0a": "64"}


def test_gate_records_no_broken_rule(run, capsys):
    spilling = replace(KERNEL, spills=8)
    assert run(spilling, OTHER, update=True)[0] == 1
    assert run(spilling, OTHER, changed=True) == (1, ["f0"])
    assert run(OTHER, changed=True, errors=["a case: it does not compile"])[0] == 1
    out = capsys.readouterr().out
    assert "a case: it does not compile\n" in out and "compile gate: 1 problems" in out


def test_gate_other_rules_or_triton_recompile_all(run, monkeypatch, tmp_path, capsys):
    assert run()[0] == 1 and "there is no table" in capsys.readouterr().out
    run(update=True)
    with monkeypatch.context() as context:
        context.setattr(gate, "rules_digest", lambda: "other")
        assert run(changed=True) == (0, ["f0", "0a"])
    record = tmp_path / "table.sha256"
    record.write_text(record.read_text().replace(triton.__version__, "3.0.0", 1))
    assert run(replace(KERNEL, registers=129), changed=True) == (0, ["f0"])
    assert "is of triton 3.0.0" in capsys.readouterr().out
    (tmp_path / "table.csv").write_text(",".join(COLUMNS[:-1]))
    assert run()[0] == 1
    assert "cannot be read: it has the columns arch, kernel, " in capsys.readouterr().out


def test_gate_compares_with_table(run, capsys):
    """Of a config the worst of its specialisations; one more is a remark, and one less."""
    name = "sm_90 linear_fwd [BLOCK_M=128 w8 s3; bf16]"
    recorded = [row_of(k) for k in (KERNEL, OTHER, replace(KERNEL, arch="sm_100"))]
    assert compare([KERNEL, OTHER], recorded) == ([], [])
    mixed = replace(KERNEL, registers=96, shared=98305)
    assert compare([mixed, OTHER], recorded)[0] == [
        f"{name}: registers 128 -> 96, shared 98304 -> 98305"
    ]
    assert compare([mixed, replace(mixed, shared=1, registers=129)], recorded)[0] == [
        f"{name}: registers 128 -> 129, shared 98304 -> 98305"
    ]
    regressions, (better, gone) = compare([replace(KERNEL, registers=96)], recorded)
    assert regressions == [] and better == f"better than the table: {name}: registers 128 -> 96"
    assert gone == "no longer compiled: sm_90 linear_fwd BLOCK_M=64 w4 s3 bf16"
    new = replace(KERNEL, config="BLOCK_M=32 w4 s3")
    told = "not in the table: sm_90 linear_fwd [BLOCK_M=32 w4 s3; bf16]"
    assert compare([new], recorded, whole=False) == ([], [told])
    run(update=True)
    assert run(replace(KERNEL, registers=129, digest="f1"), changed=True)[0] == 1
    assert "registers 128 -> 129" in capsys.readouterr().out


def test_gate_command_arguments(monkeypatch, capsys):
    asked = []
    here = [name for name, t in TARGETS.items() if t.least_triton <= VERSION]
    monkeypatch.setattr(command, "run_gate", lambda *words: asked.append(words) or 1)
    assert command.main(["gate", "--arch", "sm_80", "--changed", "--jobs", "3"]) == 1
    assert command.main(["gate", "--update", "--changed"]) == 1
    assert asked == [(["sm_80"], gate.TABLE, False, True, 3), (here, gate.TABLE, True, True, None)]
    with pytest.raises(SystemExit):
        command.main(["gate", "--update", "--arch", "sm_80"])
    assert "--update writes every row" in capsys.readouterr().err


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


def test_digest_covers_code(tmp_path):
    laid_out = '    """Twice x."""\n    return add(\n        x\n    )  # a comment'
    alike = [
        DIGEST_OF,
        f"# a line above\n\n{DIGEST_OF}",
        DIGEST_OF.replace("    return add(x)", laid_out),
    ]
    edits = (
        (": tl.constexpr = 2", " = tl.constexpr(3)"),
        ("x * TWO", "TWO * x"),
        ("return add(x)", "return x"),
    )
    changed = [DIGEST_OF.replace(*edit) for edit in edits]
    scripts = []
    for i, source in enumerate([*alike, *changed]):  # Triton reads a kernel's source from its file
        scripts.append(tmp_path / f"digest{i}.py")
        scripts[-1].write_text(source)
    run_each = "import runpy, sys\nfor path in sys.argv[1:]: runpy.run_path(path)"
    digests = python("-c", run_each, *scripts).split()
    assert len(digests) == 6 and len({*digests[:3]}) == 1
    assert len({*digests[2:]}) == 4  # what a function calls, and reads


def test_record_has_current_rules():
    """Of others it says nothing, and CI compiles every kernel again: run gate --update."""
    assert gate.Record.read(gate.TABLE).rules == gate.rules_digest()
    assert all(
        float(row["spills"]) == 0
        for row in read_table(gate.TABLE).values()
        if row["arch"] in resources.GATED
    )
