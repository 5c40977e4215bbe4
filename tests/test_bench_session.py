"""Rows on disk, and what a run of tasks survives: hangs, kills, a lost GPU."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest
import torch
from bench_stand_ins import bench, stub_task

from bench import rows as bench_rows
from bench.rows import (
    ERROR,
    FIELDS,
    OK,
    RESULTS,
    TIMEOUT,
    Results,
    Row,
    as_line,
    read_rows,
)
from bench.run import Clock, TimeOver, run_tasks, watched
from fastvit_kernels.commands.console import CommandError
from tests.check import results_cache


def test_csv_round_trip_and_torn_lines(tmp_path):
    results = Results(tmp_path, resume=False)
    row = Row(
        "mlp",
        "ours",
        "a,b",
        "bf16",
        "both",
        note='says "no", twice',
        T=3,
        ms=1.25,
        speedup=None,
        samples=7,
        bytes=123456.0,
    )
    results.append(row)
    results.append(replace(row, provider="eager"))
    results.close()
    read = read_rows(tmp_path)
    assert [r.provider for r in read] == ["ours", "eager"]
    about = dict.fromkeys(("gpu", "driver", "torch", "triton", "commit", "sources"), "")
    assert replace(read[0], **about) == row
    assert read[0].torch == torch.__version__

    path = tmp_path / RESULTS
    for torn in (1, 9):  # a crash tears the last line
        path.write_text(path.read_text()[:-torn])
        assert [r.provider for r in read_rows(tmp_path)] == ["ours"]
    again = Results(tmp_path, resume=True)
    assert [r.provider for r in again.rows.values()] == ["ours"]
    for ms in (3.0, 2.0):
        again.append(replace(row, provider="eager", ms=ms))
    again.close()
    found = [(r.provider, r.ms) for r in read_rows(tmp_path)]
    assert found == [("ours", 1.25), ("eager", 2.0)], "of equal keys the last counts"


def test_an_older_csv_is_resumed_with_the_columns_of_today(tmp_path):
    row = Row("mlp", "ours", "a", "bf16", "both", ms=1.0)
    former = as_line(row).strip().rsplit(",", 1)[0]
    (tmp_path / RESULTS).write_text(f"{','.join(FIELDS[:-1])}\n{former}\n")
    results = Results(tmp_path, resume=True)
    results.append(replace(row, provider="eager"))
    results.close()
    old, new = read_rows(tmp_path)
    assert (old.provider, old.ms, old.sources) == ("ours", 1.0, "")
    assert new.provider == "eager" and len(new.sources) == 12


def test_rows_say_which_code_has_run(monkeypatch, tmp_path):
    monkeypatch.setenv(bench_rows.COMMIT, "1234567890")
    bench_rows.environment.cache_clear()
    assert bench_rows.environment()["commit"] == "1234567890"
    bench_rows.environment.cache_clear()
    for folder in results_cache.FOLDERS:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(results_cache, "ROOT", tmp_path)
    sources_hash = results_cache.sources_hash.__wrapped__
    before = sources_hash()
    assert before == sources_hash()
    for folder in ("fastvit_kernels", "bench"):
        (tmp_path / folder / "a.py").write_text("x = 2\n")
        assert sources_hash() != before
        before = sources_hash()


@pytest.mark.parametrize(
    ("commit", "changes", "said"),
    [
        ("1234567890", "unknown", "1234567890"),  # no line: nothing has changed
        ("1234567890", "M fastvit_kernels/a.py", "1234567890+changes"),
        ("unknown", "M fastvit_kernels/a.py", "unknown"),
    ],
)
def test_rows_name_the_commit_and_whether_it_was_changed(monkeypatch, commit, changes, said):
    monkeypatch.delenv(bench_rows.COMMIT, raising=False)
    monkeypatch.setattr(
        bench_rows, "_first_line", lambda *words, cwd: commit if "HEAD" in words else changes
    )
    assert bench_rows._commit() == said


@pytest.mark.parametrize(
    "text",
    ["", "a,b\n1,2\n", f"{','.join(FIELDS)}\n{'a' * 2**18},b\n"],
    ids=["empty", "other", "long"],
)
def test_another_csv_is_refused(text, tmp_path):
    (tmp_path / RESULTS).write_text(text)
    with pytest.raises(CommandError, match="no result of this benchmark"):
        read_rows(tmp_path)


# --- the session


def test_the_alarm_ends_what_takes_too_long():
    clock = Clock(0.05)
    with pytest.raises(TimeOver), clock.alarm():
        time.sleep(20)


def test_after_the_body_no_alarm_is_left():
    handlers = [signal.getsignal(s) for s in (signal.SIGALRM, signal.SIGTERM)]
    clock = Clock(3600.0)
    with clock.alarm():
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 3000
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert [signal.getsignal(s) for s in (signal.SIGALRM, signal.SIGTERM)] == handlers


def test_a_killed_process_does_not_try_the_same_again(tmp_path):
    task = stub_task("a")
    with Results(tmp_path, False).trying(task.keys):
        again = Results(tmp_path, True)  # another process, after a SIGKILL
    assert {r.status for r in again.rows.values()} == {TIMEOUT} and len(again.rows) == 2
    assert "ended here" in read_rows(tmp_path)[0].note
    assert not (tmp_path / bench_rows.TRYING).exists()


def test_ours_of_other_sources_is_measured_again_and_peers_are_not(monkeypatch, tmp_path):
    results = Results(tmp_path, False)
    task = stub_task("a")
    run_tasks([task], bench(), results, Clock(None))
    assert results.missing(task.keys) == []
    about = {**bench_rows.environment(), "sources": "mended"}
    monkeypatch.setattr(bench_rows, "environment", lambda: about)
    assert [key[1] for key in results.missing(task.keys)] == ["ours"]
    calls: list = []
    run_tasks([stub_task("a", calls=calls)], bench(), results, Clock(None))
    assert calls == [("a", ("ours",))]
    assert {r.provider: r.sources == "mended" for r in read_rows(tmp_path)} == {
        "eager": False,
        "ours": True,
    }


@pytest.mark.parametrize("field", ["gpu", "driver", "torch", "triton"], ids="its {}".format)
def test_rows_of_another_machine_are_set_aside(tmp_path, field):
    """A peer or a roof of another GPU decides nothing here."""
    results = Results(tmp_path, False)
    for provider in ("eager", "ours"):
        results.append(Row("mlp", provider, "a", "bf16", "both", ms=1.0))
    results.close()
    rows = read_rows(tmp_path)
    other = replace(rows[0], **{field: "another"})
    (tmp_path / RESULTS).write_text(bench_rows.as_csv([other, rows[1]]))
    results = Results(tmp_path, True)
    assert [r.provider for r in results.rows.values()] == ["ours"]
    assert read_rows(tmp_path / bench_rows.ELSEWHERE) == [other]  # and nothing is lost


def test_who_ended_a_process_has_no_turns_when_a_task_renews(tmp_path):
    """It would hang or lose the device with every --resume."""
    calls: list = []
    names = ("eager", "ours", "hangs")
    results = Results(tmp_path, False)
    row = Row("mlp", "hangs", "a", "bf16", "both", status=TIMEOUT)
    results.append(row)
    results.append(replace(row, provider="ours", status=OK, ms=5.0))
    task = replace(stub_task("a", providers=names, calls=calls), renews=True)
    run_tasks([task], bench(), results, Clock(None))
    assert calls == [("a", ("eager", "ours"))]


def test_a_task_that_renews_replaces_rows_of_former_turns(tmp_path):
    results = Results(tmp_path, False)
    results.append(Row("mlp", "eager", "a", "bf16", "both", ms=5.0))
    run_tasks([replace(stub_task("a"), renews=True)], bench(), results, Clock(None))
    assert {r.provider: r.ms for r in read_rows(tmp_path)} == {"eager": 1.0, "ours": 1.0}

    def fails(names, bench):
        yield Row("mlp", "eager", "a", "bf16", "both", status=ERROR)
        yield Row("mlp", "ours-split", "a", "bf16", "both", status=ERROR)

    task = stub_task("a", providers=("eager", "ours-split"), run=fails)
    run_tasks([replace(task, renews=True)], bench(), results, Clock(None))
    found = {r.provider: r.status for r in read_rows(tmp_path)}
    assert found == {"eager": OK, "ours": OK, "ours-split": ERROR}  # what was measured stays


def test_a_task_in_time_ends_nothing():
    with watched(0.2):
        pass
    time.sleep(0.4)
