"""The run of a borrowed GPU with stub commands: shares, hangs, interrupts, what is done already."""

# ruff: noqa: E402
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # bench is no part of the package

from bench import session
from bench.__main__ import build_parser, main
from bench.rows import FAILED, Results, Row
from bench.run import CUT_SHORT
from bench.session import ABSENT, DONE, EVENTS, KILLED, LOG, UNFINISHED, Ending, Stage, Stages
from fastvit_kernels.commands import cli
from fastvit_kernels.commands.console import CommandError
from tests.check.__main__ import build_parser as checks
from tests.check.isolated import Job
from tests.check.results_cache import ResultsCache

SECONDS = 1e6  # of the stub clock


def stage(name, code, share=1.0, **options):
    return Stage(name, share, (sys.executable, "-c", code), "", **options)


def run_of(tmp_path, *found, **options):
    settings = {"say": lambda text: None, **options}
    return Stages(found, tmp_path / "out", settings.pop("seconds", SECONDS), **settings)


def events(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out" / EVENTS).read_text().splitlines()]


def runs(pid):
    """Whether it is there and no zombie that nobody has reaped."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + 3600
    while time.monotonic() < deadline and not condition():
        time.sleep(0.02)
    assert condition()


def clock_of(path):
    """A clock that stands still but while the process runs that wrote its id to `path`."""
    seconds = [0.0]

    def now():
        text = path.read_text() if path.exists() else ""
        if text and runs(int(text)):
            seconds[0] += 1e5
        return seconds[0]

    return now


# --- shares


def test_what_a_stage_leaves_goes_to_those_after_it(monkeypatch, tmp_path):
    clock, given = [0.0], {}

    def run(self, stage, limit):
        given[stage.name] = limit
        clock[0] += 10.0
        return self._ended(Ending(stage.name, DONE, 10.0, 0))

    monkeypatch.setattr(Stages, "_run", run)
    found = [stage("a", "", 1), stage("b", "", 2), stage("c", "", 1), stage("d", "", 4, least=1e3)]
    work = run_of(tmp_path, *found, seconds=800.0, now=lambda: clock[0])
    assert work.run()
    assert session.limits(found, 800.0) == [100.0, 200.0, 100.0, 400.0]
    with_least = [stage("a", "", 1, least=300.0), stage("b", "", 7)]
    assert session.limits(with_least, 800.0) == [300.0, 500.0]  # the others give
    # a has left 90 s, b more; d would not be worth its start
    assert given == pytest.approx({"a": 100.0, "b": 790 * 2 / 7, "c": 780 / 5})
    assert [e.state for e in work.endings] == [DONE, DONE, DONE, ABSENT]


def test_a_stage_is_told_less_than_it_has(tmp_path):
    code = "import os, sys; print('told', sys.argv[1], os.environ['PLACE'])"
    words, variables = ("{python}", "-c", code, "{seconds}"), (("PLACE", "{out}/here"),)
    places, clock = {"python": sys.executable}, lambda: 0.0
    told = Stage("a", 1, words, "", environment=variables)
    work = run_of(tmp_path, told, places=places, seconds=60, now=clock)
    assert work.run()
    log = (tmp_path / "out" / LOG).read_text()
    # 60 s but the seconds in which it should end
    assert f"told 48 {tmp_path}/out/here\n" in log


# --- what goes wrong


def test_what_a_stage_prints_and_how_it_ends_is_on_disk(tmp_path):
    said = []
    found = [
        stage("good", "print('one')"),
        stage("wrong", "import sys; sys.exit(1)"),
        stage("cut", "import sys; sys.exit(3)"),
        stage("dies", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        stage("last", "print('two')"),
    ]
    work = run_of(tmp_path, *found, say=said.append)
    assert work.run()
    states = {e["stage"]: (e["state"], e["status"]) for e in events(tmp_path)}
    assert states == {
        "good": (DONE, 0),
        "wrong": (DONE, 1),
        "cut": (UNFINISHED, 3),
        "last": (DONE, 0),
        "dies": (UNFINISHED, -signal.SIGSEGV),
    }
    assert [e.stage for e in work.endings if e.failed] == ["wrong", "dies"]
    log = (tmp_path / "out" / LOG).read_text()
    assert log.index("== good") < log.index("one") < log.index("two")
    assert "".join(said) == log


STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                         start_new_session=True)
folder = pathlib.Path({folder!r})
(folder / "child").write_text(str(child.pid))
print("hangs", flush=True)
(folder / "draft").write_text(str(os.getpid()))
os.replace(folder / "draft", folder / "pid")
time.sleep(600)
"""


def test_a_hang_is_killed_with_what_it_started(monkeypatch, tmp_path):
    monkeypatch.setattr(session, "KILL_S", 0.1)  # it ignores SIGTERM
    found = [stage("hangs", STUBBORN.format(folder=str(tmp_path))), stage("next", "print('next')")]
    work = run_of(tmp_path, *found, now=clock_of(tmp_path / "pid"))
    assert work.run()
    assert [e.state for e in work.endings] == [KILLED, DONE]
    assert "hangs\n" in (tmp_path / "out" / LOG).read_text()
    for name in ("pid", "child"):
        wait_until(lambda name=name: not runs(int((tmp_path / name).read_text())))


POLITE = """
import os, pathlib, signal, sys, time
folder = pathlib.Path({folder!r})
def over(*_):
    (folder / "saved").write_text("all")
    sys.exit(0)
signal.signal(signal.SIGTERM, over)
(folder / "draft").write_text(str(os.getpid()))
os.replace(folder / "draft", folder / "pid")
time.sleep(600)
"""


def test_a_stage_past_its_time_may_write_what_it_has(monkeypatch, tmp_path):
    monkeypatch.setattr(session, "KILL_S", 600.0)
    work = run_of(
        tmp_path, stage("slow", POLITE.format(folder=str(tmp_path))), now=clock_of(tmp_path / "pid")
    )
    assert work.run()
    assert [e.state for e in work.endings] == [KILLED]
    assert (tmp_path / "saved").read_text() == "all"


PROGRAM = """
import signal, sys
from pathlib import Path
from bench.session import Stage, Stages
from fastvit_kernels.commands.console import term_interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
found = [Stage("slow", 1, (sys.executable, "-c", {code!r}), "")]
try:
    with term_interrupts():
        Stages(found, Path({out!r}), 1e6).run()
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupt_ends_the_stage_and_leaves_a_line(tmp_path, number):
    program = PROGRAM.format(code=POLITE.format(folder=str(tmp_path)), out=str(tmp_path / "out"))
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    wait_until((tmp_path / "pid").exists)
    process.send_signal(number)
    assert process.wait(600) == 130
    assert not runs(int((tmp_path / "pid").read_text()))
    assert (tmp_path / "saved").read_text() == "all"
    assert [(e["stage"], e["state"]) for e in events(tmp_path)] == [("slow", UNFINISHED)]


def test_where_a_needed_stage_fails_nothing_comes_after_it(tmp_path):
    found = [stage("smoke", "import sys; sys.exit(1)", needed=True), stage("next", "")]
    work = run_of(tmp_path, *found)
    assert not work.run()
    assert [e.stage for e in work.endings] == ["smoke"]


def test_resume_leaves_out_what_is_done_by_the_same_sources(tmp_path):
    count = tmp_path / "count"
    count.write_text("")
    head = f"import sys; open({str(count)!r}, 'a').write('{{}} '); sys.exit({{}})"
    found = [
        stage("done", head.format("done", 0)),
        stage("wrong", head.format("wrong", 1)),
        stage("cut", head.format("cut", 3)),
        stage("smoke", head.format("smoke", 1)),
        stage("again", head.format("again", 0), again=True),
    ]
    run_of(tmp_path, *found, sources="a").run()
    with (tmp_path / "out" / EVENTS).open("a") as file:
        file.write('{"stage": "torn')
    assert count.read_text() == "done wrong cut smoke again "
    count.write_text("")
    needed = [Stage(**{**vars(s), "needed": s.name == "smoke"}) for s in found]
    needed[-1], needed[3] = needed[3], needed[-1]
    run_of(tmp_path, *needed, sources="a", resume=True).run()
    assert count.read_text() == "cut again smoke "
    count.write_text("")
    run_of(tmp_path, *found[:2], sources="b", resume=True).run()  # it was mended
    assert count.read_text() == "done wrong "


# --- the command


def test_without_a_gpu_nothing_is_run_and_nothing_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for words in (["contact", "--out", str(tmp_path / "out")], ["targets"], ["warm"]):
        assert main(words) == 2
        assert "torch sees no GPU, so nothing was run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_lists_the_stages(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("bench.__main__.this_machine", lambda _: None)
    words = ["--dry-run", "--seconds", "540", "--out", str(tmp_path / "out")]
    assert main(["session", *words]) == 0
    shown = capsys.readouterr().out
    assert main(["contact", *words]) == 0
    assert capsys.readouterr().out == shown
    header, *lines = shown.splitlines()
    assert header.split()[:3] == ["stage", "share", "s"]
    assert [line.split()[0] for line in lines] == [s.name for s in session.STAGES]
    seconds = [int(line.split("%")[1].split()[0]) for line in lines]
    assert abs(sum(seconds) - (540 - session.RESERVE)) < len(lines)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stage", session.STAGES, ids=lambda stage: stage.name)
def test_every_stage_is_a_command_that_can_be_run_alone(stage, tmp_path):
    places = {"out": str(tmp_path), "seconds": "60", "jobs": "4"}
    _, dash, module, *words = stage.words(places)
    assert dash == "-m"
    if module == "tests.check":
        checks().parse_args(words)
        return
    parser = build_parser() if module == "bench" else cli.build_parser(words)
    assert parser.parse_args(words).command == words[0]


def test_the_report_names_what_is_wrong_first_and_fits_a_screen(tmp_path):
    kept = ResultsCache(tmp_path / session.CHECKED)
    kept.add(name="mlp", dtype="bf16", failure="killed", seconds=1.0, tensors=[], passed=False)
    kept.add(name="linear", dtype="bf16", failure=None, seconds=1.0, tensors=[], passed=True)
    kept.add(table="linear_fwd", config={"w": 4}, case="linear, fp16", share=0.0, fault="differs")
    results = Results(tmp_path, resume=False)
    results.append(Row("mlp", "ours", "a", "bf16", "fwd", status=FAILED, note="2x rule", ms=1.0))
    results.append(Row("mlp", "quack", "a", "bf16", "fwd", status="error", note="no such thing"))
    results.close()
    found, unfinished, table = session.report(tmp_path)
    assert found[:2] == [
        "check mlp, bf16: killed",
        "config linear_fwd [w=4], linear, fp16: differs",
    ]
    assert found[2:] == ["mlp a bf16 fwd: ours: 2x rule"] and not unfinished
    lines = table.strip().splitlines()
    assert lines[0].startswith("target") and len(lines) <= 28 and max(map(len, lines[:-1])) <= 160
    (tmp_path / session.CHECKED).unlink()
    (tmp_path / "results.csv").unlink()
    assert not session.report(tmp_path)[0]


def test_equal_faults_share_a_line(tmp_path):
    kept = ResultsCache(tmp_path / session.CHECKED)
    for name in ("mlp", "linear", "rope"):
        why = "no such instruction" if name != "rope" else "other"
        kept.add(name=name, dtype="bf16", failure=why, seconds=1.0, tensors=[], passed=False)
    found, _, _ = session.report(tmp_path)
    assert found == [
        "2 times: no such instruction: check mlp, bf16; check linear, bf16",
        "check rope, bf16: other",
    ]


def test_what_had_no_time_is_not_wrong(tmp_path):
    """A first run that finds nothing wrong must not end in red, nor hide a crash in yellow."""
    run = run_of(tmp_path)
    run.endings = [
        Ending("facts", DONE, 1.0, 0),
        Ending("check", DONE, 1.0, 1),
        Ending("warm", UNFINISHED, 1.0, CUT_SHORT),
        Ending("targets", KILLED, 1.0, -9),
        Ending("dies", UNFINISHED, 1.0, -11),
        Ending("tune", ABSENT, 0.0, None),
    ]
    found, unfinished, _ = session.report(tmp_path, run)
    assert found == ["stage check: exit status 1", "stage dies: exit status -11"]
    assert [line.split(" after")[0] for line in unfinished] == [
        "stage warm: unfinished",
        "stage targets: killed",
        "stage tune: no time",
    ]


def test_a_first_run_without_faults_ends_well(tmp_path, capsys):
    cut = stage("check", f"raise SystemExit({CUT_SHORT})")
    words = ["contact", "--out", str(tmp_path / "out"), "--seconds", "3600"]
    assert session.run(build_parser().parse_args(words), True, [cut]) == 0
    out = capsys.readouterr().out
    assert "nothing wrong in what ran" in out and "NO TIME: 1" in out and "WRONG" not in out
    assert out.startswith(f"gpu: {session.environment()['gpu']}\n")  # what it is about, first
    assert f"\ntorch: {torch.__version__}\n" in out and "\npython: " in out


def test_what_another_machine_has_done_is_done_again(tmp_path):
    """Its results say nothing of this GPU; the caches of a fresh machine are empty."""
    found = [stage("check", "print('checked')"), stage("warm", "print('warmed')", fills=True)]

    def done_here(**key):
        said = []
        run_of(tmp_path, *found, say=said.append, resume=True, sources="a", **key).run()
        return [name for name in ("checked", "warmed") if f"{name}\n" in said]

    first = dict(machine="H100, torch 2.11", caches="1")
    assert done_here(**first) == ["checked", "warmed"]
    assert done_here(**first) == []
    assert done_here(**{**first, "caches": "2"}) == ["warmed"]
    (tmp_path / "out" / session.CHECKED).write_text("")
    assert done_here(**{**first, "machine": "H200, torch 2.11"}) == ["checked", "warmed"]
    assert not (tmp_path / "out" / session.CHECKED).exists()


def test_a_cache_of_kernels_has_a_name_of_its_own(monkeypatch, tmp_path):
    names = []
    for folder in ("a", "b", "a"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / folder))
        names.append(session.caches_id())
    assert names[0] == names[2] != names[1] and all(names)


def test_a_hang_is_named_before_its_stage_ends():
    """Else it comes back with every --resume: others than it must have their turn."""
    for seconds in (20.0, 60.0, 200.0):
        for stage in session.STAGES:
            words = stage.words({"out": "", "jobs": 1, "seconds": f"{seconds:.0f}"})
            if "--case-timeout" in words:
                timeout = float(words[words.index("--case-timeout") + 1])
                assert timeout <= max(10.0, seconds / 3 + 1)


def test_warm_goes_on_with_what_has_not_run(monkeypatch, tmp_path):
    """What ran is not run again, but on a machine whose cache is empty."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    good = Job("good", (sys.executable, "-c", "print('{\"seconds\": 2.0}')"))
    hangs = Job("hangs", (sys.executable, "-c", "import time; time.sleep(600)"))
    said = []
    assert session.run_warm([good], 1, float("inf"), tmp_path, said.append) == 0
    assert session.run_warm([good, hangs], 2, 0.05, tmp_path, said.append) == CUT_SHORT
    assert said[-1].startswith("0 of 1 cases")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    assert session.run_warm([good], 1, float("inf"), tmp_path, said.append) == 0
    assert said[-1].startswith("1 of 1 cases")


def test_an_interrupt_has_a_report_and_a_status_of_its_own(monkeypatch, tmp_path, capsys):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Stages, "run", interrupted)
    words = ["contact", "--out", str(tmp_path / "out"), "--seconds", "3600"]
    found = [stage("facts", ""), stage("check", "")]
    assert session.run(build_parser().parse_args(words), True, found) == 130
    out = capsys.readouterr().out
    assert "nothing wrong in what ran" in out and "not done: facts, check; --resume" in out
    (tmp_path / "out" / EVENTS).unlink(missing_ok=True)
    (tmp_path / "out" / "results.csv").write_text("")
    with pytest.raises(CommandError, match=r"results\.csv exists"):  # also without stages
        session.run(build_parser().parse_args(words), True, found)


@pytest.mark.parametrize(("cores", "jobs"), [(1, 1), (3, 1), (16, 14)])
def test_two_cores_stay_free_for_compilers(monkeypatch, cores, jobs):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert session.jobs() == jobs


def test_contact_goes_through_its_stages_and_ends_with_the_table(tmp_path, capsys):
    found = [stage("facts", "print('a GPU')", needed=True), stage("check", "raise SystemExit(1)")]
    words = ["contact", "--out", str(tmp_path / "out"), "--seconds", "3600"]
    arguments = build_parser().parse_args(words)
    assert session.run(arguments, True, found) == 1
    out = capsys.readouterr().out
    assert out.index("a GPU") < out.index("WRONG: 1") < out.index("\ntarget ")
    with pytest.raises(Exception, match="exists: --resume goes on"):
        session.run(arguments, True, found)
    arguments = build_parser().parse_args([*words, "--resume"])
    assert session.run(arguments, True, found) == 0
    assert "a GPU" not in capsys.readouterr().out


def test_first_launches_are_made_side_by_side(tmp_path):
    both = f"import pathlib, time; p = pathlib.Path({str(tmp_path)!r}); "
    meets = both + (
        "(p / {own!r}).touch()\n"
        "while not (p / {other!r}).exists(): time.sleep(0.01)\n"
        "print('{{\"seconds\": 2.0}}')"
    )
    jobs = [
        Job("a", (sys.executable, "-c", meets.format(own="a", other="b"))),
        Job("b", (sys.executable, "-c", meets.format(own="b", other="a"))),
        Job("dies", (sys.executable, "-c", "raise SystemExit('no kernel')")),
    ]
    said = []
    assert session.run_warm(jobs, 2, float("inf"), say=said.append) == 1
    assert "a: 2 s" in said and "b: 2 s" in said
    assert any(line.startswith("FAILED dies") and "no kernel" in line for line in said)
    assert said[-1].startswith("3 of 3 cases ran once, 1 failed")
    assert (
        session.run_warm(jobs[2:] * 2, 2, float("inf"), say=said.append) == 1
        and "2 failed" in said[-1]
    )
    good = Job("good", (sys.executable, "-c", "print('{\"seconds\": 2.0}')"))
    assert session.run_warm([good], 1, float("inf"), say=said.append) == 0
    hangs = Job("hangs", (sys.executable, "-c", "import time; time.sleep(600)"))
    assert session.run_warm([hangs], 1, 0.05, say=said.append) == CUT_SHORT
    assert said[-1].startswith("0 of 1 cases")
    # what is left is said before what failed
    assert session.run_warm([jobs[2], hangs], 2, 5.0, say=said.append) == CUT_SHORT


# --- the suite on a GPU

SUITE = """
import importlib.util, os, sys
import pytest, torch
spec = importlib.util.spec_from_file_location("suite", {conftest!r})
suite = importlib.util.module_from_spec(spec)
spec.loader.exec_module(suite)
torch.cuda.is_available = lambda: True
torch.cuda.current_device = lambda: 0
lost = []
def synchronize(device=None):
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
torch.cuda.synchronize = synchronize
_device_still_works = suite._device_still_works

def test_right(): pass
def test_leaves_the_context_lost(): lost.append(1)
def test_next(): assert not lost
"""


def test_a_worker_ends_where_the_device_is_lost_and_another_goes_on(tmp_path):
    pytest.importorskip("xdist")
    path = tmp_path / "test_suite.py"
    path.write_text(SUITE.format(conftest=str(ROOT / "tests" / "conftest.py")))
    words = ["-q", "-p", "no:cacheprovider", "-n", "1", "--rootdir", str(tmp_path), str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "crashed while running 'test_suite.py::test_leaves_the_context_lost'" in done.stdout


def test_what_runs_on_the_cpu_is_marked(request):
    assert request.node.get_closest_marker("interpreter")
