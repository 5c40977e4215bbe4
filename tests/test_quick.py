"""`python -m bench quick`: its stages, and a rehearsal in real processes on a stand-in device."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from bench import quick
from bench.__main__ import build_parser, main
from bench.quick import STAGES, Stage
from bench.rows import ERROR, OK, TIMEOUT, read_rows
from bench.run import CUT_SHORT
from fastvit_kernels.commands import cli
from tests.check.__main__ import build_parser as check_parser
from tests.check.results_cache import ResultsCache

DRIVER = Path(__file__).parent / "support" / "rehearsed.py"


def stage(name, program, **options):
    return Stage(name, 1, (sys.executable, "-c", program), "", **options)


def run(tmp_path, stages, *words):
    words = ["quick", "--out", str(tmp_path / "out"), "--seconds", "300", *words]
    return quick.run(build_parser().parse_args(words), True, stages)


def test_stages_run_in_order_and_their_words_are_on_disk(tmp_path, capsys):
    found = [
        stage("a", "print('first')"),
        stage("b", "raise SystemExit(1)"),  # a failure of what it checks, which it has told
        stage("c", f"raise SystemExit({CUT_SHORT})"),
        stage("d", "raise SystemExit(7)"),
    ]
    assert run(tmp_path, found) == 1
    out = capsys.readouterr().out
    assert "WRONG: 1\n  stage d: exit status 7" in out and "== c: not done" in out
    assert (tmp_path / "out" / quick.LOG).read_text() == "first\n"
    again = [stage(s.name, "print('again')") for s in found]
    assert run(tmp_path, again, "--resume") == 0
    assert (tmp_path / "out" / quick.LOG).read_text() == "first\n" + 4 * "again\n"
    assert "nothing wrong in what ran" in capsys.readouterr().out


def test_where_a_needed_stage_fails_nothing_comes_after_it(tmp_path, capsys):
    assert run(tmp_path, [stage("a", "raise SystemExit(1)", needed=True), stage("b", "")]) == 1
    assert "== b" not in capsys.readouterr().out


def test_a_hang_is_killed_with_what_it_started(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quick, "KILL_S", 0.5)
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = 'import time, pathlib; time.sleep(2); pathlib.Path(\"alive\").touch()'\n"
        "subprocess.Popen([sys.executable, '-c', child])\n"
        "time.sleep(1e6)\n"
    )
    monkeypatch.chdir(tmp_path)
    status = quick.run_stage(stage("a", program), 1.5, {"out": str(tmp_path)}, tmp_path / "log")
    assert status is None
    time.sleep(1.5)
    assert not (tmp_path / "alive").exists()


def test_a_dry_run_lists_the_stages(capsys):
    assert main(["quick", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()[::2]
    assert [line.split()[0] for line in lines] == [s.name for s in STAGES]
    seconds = sum(int(line.split()[1]) for line in lines)
    assert abs(seconds - (quick.SECONDS - quick.RESERVE)) < len(lines)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_every_stage_is_a_command(stage, tmp_path):
    words = stage.words({"out": str(tmp_path), "seconds": "100", "jobs": 2})[2:]
    program, *words = words
    parsers = {"tests.check": check_parser, "bench": build_parser}
    make = parsers.get(program, lambda: cli.build_parser(words))
    assert make().parse_args(words)


def test_faults_name_wrong_configs(tmp_path):
    kept = ResultsCache(tmp_path / quick.CHECKED)
    kept.add(table="linear_fwd", config={"num_warps": 4}, case="large", fault="NaN")
    assert quick.faults(tmp_path) == ["config linear_fwd [num_warps=4], large: NaN"]


@pytest.mark.minutes
def test_it_survives_what_goes_wrong(monkeypatch, tmp_path, capsys):
    """An exception, a hang, a lost device, no time; then a resume does what is left alone."""
    root = Path(__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{root}:{DRIVER.parent}")
    monkeypatch.setenv("REHEARSAL", str(tmp_path))
    words = ("all", "--out", "{out}", "--resume", "--time-budget", "{seconds}")
    found = [
        stage("smoke", "", needed=True),
        Stage("bench", 4, (sys.executable, str(DRIVER), *words), ""),
    ]
    assert run(tmp_path, found) == 1
    said = capsys.readouterr().out
    assert (tmp_path / "tried").read_text().split() == ["raises", "hangs", "loses"]  # once each
    rows = {(r.shape[0], r.provider): r for r in read_rows(tmp_path / "out") if r.op != "roof"}
    wrong = {("a", "ours-raises"): ERROR, ("b", "hangs"): TIMEOUT, ("c", "loses"): TIMEOUT}
    right = {(shape, "eager"): OK for shape in "abc"}
    assert {key: row.status for key, row in rows.items()} == right | wrong
    assert rows["a", "ours-raises"].note == "RuntimeError: no kernel image"
    assert "WRONG: 1\n" in said and "ours-raises: error RuntimeError: no kernel image" in said
    assert "== bench: not done: too little time" in said

    (tmp_path / "time").touch()
    assert run(tmp_path, found, "--resume") == 1
    assert (tmp_path / "tried").read_text().split() == ["raises", "hangs", "loses"]
    again = {(r.shape[0], r.provider): r for r in read_rows(tmp_path / "out") if r.op != "roof"}
    assert all(str(again[key]) == str(row) for key, row in rows.items())  # not measured again
    assert again["d", "late"].status == OK and again["d", "late"].speedup == 1.0
