"""`python -m bench`: the plan and the command, with a stand-in machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_stand_ins import CPU, FakeTimer, few_rounds, stub_task

import fastvit_kernels as fk
from bench import host, plan, run
from bench.__main__ import main
from bench.ops import OPS
from bench.plan import Wanted, tasks
from bench.rows import FAILED, Results, Row, read_rows
from bench.run import Machine
from fastvit_kernels.runtime.backend import INTERPRETED
from fastvit_kernels.runtime.triton import HAS_TRITON

__all__ = ["few_rounds"]  # a fixture


def test_the_plan_has_each_case_once_and_the_telling_first():
    wanted = Wanted(ops=tuple(OPS), providers=("nobody",), shapes=("T12345",))
    assert tasks(wanted) == []
    assert any("no provider 'nobody'" in text for text in wanted.said)
    assert any("no shape 'T12345'" in text for text in wanted.said)

    everything = Wanted(ops=("vit", *OPS))
    found = tasks(everything)
    assert [t.title.split("-")[2:4] for t in found[:2]] == [["B44", "T577"], ["B25", "T1025"]]
    assert {t.rank[1] for t in found if t.rank[0] == 0} == set(range(len(plan.FIRST)))
    assert [t.rank for t in found] == sorted(t.rank for t in found)
    keys = [key for task in found for key in task.keys]
    assert len(keys) == len(set(keys))
    ours = [key for key in keys if key[:2] == ("attention", "ours") and key[3:] == ("bf16", "fwd")]
    sizes = [shape.rpartition("-B")[2] for _, _, shape, *_ in ours]
    assert len(sizes) == len(set(sizes)) and "128-T197-C768-H12" in sizes, "by another name"
    assert any("flash_attn_4 is not measured" in text for text in everything.said)
    ranks = {k[1]: t.rank for t in found for k in t.keys if k[0] == "linear" and k[3] == "bf16"}
    assert ranks["ours"] < ranks["compile"] < ranks["compile-max-autotune"]
    variants = {(key[0], key[2].rpartition("-")[2]) for key in keys}
    assert {("linear", "proj"), ("linear", "fc1"), ("gated_mlp", "separate")} <= variants
    assert {shape.D for shape in OPS["attention"].shapes()} >= {32, 64, 80, 96, 128}


def test_the_plan_of_whole_models():
    keys = {key for task in tasks(Wanted(ops=("vit",))) for key in task.keys}
    names = {"eager", "swapped", "swapped+graph", "backend", "compile", "compile-max-autotune"}
    assert {key[1] for key in keys} >= names and {key[4] for key in keys} == {"train", "infer"}
    cases = ("S-224-B256", "L-224-B64", "Ti-224-B512", "H-224-B32", "B-384-B64", "B-224-B256")
    assert {key[2] for key in keys} >= {f"timm-ViT-{case}" for case in cases}
    few = tasks(Wanted(ops=("vit",), modes=("infer",), shapes=("ViT-B-224-B128",)))
    assert {key[2:] for t in few for key in t.keys} == {("timm-ViT-B-224-B128", "amp", "infer")}


# --- the command


MACHINE = Machine(CPU, FakeTimer)


@pytest.fixture
def work(monkeypatch):
    """The tasks of every run; a test may change them."""
    work = [stub_task("a")]
    monkeypatch.setattr("bench.run.tasks", lambda wanted: work)
    return work


@pytest.fixture
def words(work, tmp_path):
    return ["all", "--out", str(tmp_path / "out"), "--time-budget", "500"]


def test_all_writes_at_most_six_files_and_resumes(work, words, tmp_path, capsys):
    work.append(stub_task("b"))
    assert main(words, MACHINE) == 0
    out = tmp_path / "out"
    assert len(list(out.iterdir())) <= 6
    assert "| mlp a bf16 bwd |" in (out / "summary.md").read_text()
    said = capsys.readouterr().out
    assert "ours, ms" in said and "matmul: eager: 1 ms" in said
    assert main(words, MACHINE) == 2  # results are never overwritten
    assert main([*words, "--resume"], MACHINE) == 0
    assert len(read_rows(out)) == 2 + 4  # copy and matmul, two cases


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["results.csv", "trying.json", "summary.md"])
def test_a_disk_that_is_full_is_one_line(name, words, tmp_path, capsys):
    path = tmp_path / "out" / name
    path.parent.mkdir()
    path.with_name(f".{name}.tmp").symlink_to(FULL)
    assert main(words, MACHINE) == 2
    said = f"bench all: {path} cannot be written: No space left on device\n"
    assert capsys.readouterr().err == said
    assert not path.exists()
    assert main([*words, "--resume"], MACHINE) == 0


def test_a_disk_that_fills_in_a_row_loses_that_row_alone(
    work, words, monkeypatch, tmp_path, capsys
):
    resource = pytest.importorskip("resource")
    former, path = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "out" / "results.csv"

    def fill(names, bench):
        most = path.stat().st_size + 10
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, former[1]))
        yield Row("mlp", "eager", "b", "bf16", "bwd", ms=1.0)

    work.append(stub_task("b", run=fill))
    opened: list[Results] = []
    monkeypatch.setattr(
        "bench.run.Results", lambda *given: opened.append(Results(*given)) or opened[0]
    )
    try:
        assert main(words, MACHINE) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    said = f"bench all: {path} cannot be written: File too large\n"
    assert capsys.readouterr().err == said
    assert opened[0]._file.closed  # or Python says in more lines that it cannot be, at its end
    monkeypatch.setattr("bench.run.Results", Results)
    kept = len(read_rows(path))
    work[1] = stub_task("b")
    assert main([*words, "--resume"], MACHINE) == 0
    assert len(read_rows(path)) == kept + 2


def test_where_the_time_is_over_a_resumed_run_goes_on(work, words, tmp_path, capsys):
    def over(names, bench):
        yield Row("mlp", "eager", "b", "bf16", "bwd", ms=1.0)
        raise run.TimeOver

    work.append(stub_task("b", run=over))
    assert main(words, MACHINE) == run.CUT_SHORT
    assert "the time is over; --resume continues" in capsys.readouterr().out
    kept = len(read_rows(tmp_path / "out"))
    work[1] = stub_task("b")
    assert main([*words, "--resume"], MACHINE) == 0
    assert len(read_rows(tmp_path / "out")) == kept + 1


def test_imports_are_part_of_a_budget(work, words):
    """They take ten seconds there, in each of the processes."""
    left = []

    def measured(names, bench):
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        yield from ()

    work[0] = stub_task("a", run=measured)
    main(words, MACHINE, started=time.monotonic() - 100.0)
    assert 0 < left[0] <= 400 - run.RESERVE


def test_roofs_are_measured_once(words, tmp_path):
    """What a resumed run is held against is what the first one reached."""
    main(words, MACHINE)
    first = [r for r in read_rows(tmp_path / "out") if r.op == "roof"]
    main([*words, "--resume"], Machine(CPU, lambda: FakeTimer(7.0)))
    again = [r for r in read_rows(tmp_path / "out") if r.op == "roof"]
    assert str(again) == str(first)


def test_the_summary_says_what_could_not_be_had(work, words, monkeypatch, tmp_path):
    monkeypatch.setattr("bench.run.tasks", lambda wanted: wanted.say("flash is absent") or work)
    assert main(words, MACHINE) == 0
    assert "- flash is absent" in (tmp_path / "out" / "summary.md").read_text().splitlines()


def test_an_old_failure_ends_a_resumed_run_badly(work, words, capsys):
    def fails(names, bench):
        yield Row("mlp", "ours", "a", "bf16", "bwd", status=FAILED, note="2x rule")

    work[0] = stub_task("a", providers=("ours",), run=fails)
    assert main(words, MACHINE) == 1 and "ours: FAILED 2x rule" in capsys.readouterr().out
    assert main([*words, "--resume"], MACHINE) == 1  # the row is there still


def test_an_interrupt_ends_with_130_and_with_the_rows(work, words, monkeypatch, tmp_path, capsys):
    def interrupted(names, bench):
        yield Row("mlp", "ours", "a", "bf16", "bwd", ms=1.0)
        raise KeyboardInterrupt

    def interrupt(*_):
        raise KeyboardInterrupt

    work[0] = stub_task("a", run=interrupted)
    assert main(words, MACHINE) == 130
    assert "interrupted" in capsys.readouterr().out
    assert "mlp" in {r.op for r in read_rows(tmp_path / "out")}
    monkeypatch.setattr("bench.__main__.run", interrupt)
    assert main(["mlp", "--out", str(tmp_path / "other")], MACHINE) == 130


def test_host_counts_the_frames_of_ours_that_stand_above_each_other():
    with fk.backend("torch"):
        case = host.case_of(host.OPS["layer_norm"], CPU)
        assert host.frames(lambda: case.forward(case.ours)) >= 2
    assert host.frames(lambda: sum(range(3))) == 0


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_host_measures_every_op_without_a_gpu():
    """In a process without the interpreter, by short rounds."""
    short = "import sys; from bench import host; from bench.__main__ import main\n"
    short += "host.ROUNDS = host.CALLS = 1\nsys.exit(main(['host', '--device', 'cpu']))"
    variables = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", short], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    _, *rows = done.stdout.splitlines()
    models = [f"ViT, 12 layers of {width}" for width in host.WIDTHS if find_spec("timm")]
    named = [row.split("  ")[0] for row in rows]
    assert named == [*models, *host.OPS]


@pytest.mark.skipif(not INTERPRETED, reason="there is no interpreter in place of the launches")
def test_host_says_why_it_cannot_run(capsys):
    assert main(["host", "--device", "cpu"]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err
