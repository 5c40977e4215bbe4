"""Rows on disk, and what a run of tasks survives: hangs, kills, a lost GPU."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest
import torch
from bench_stand_ins import bench, stub_task

from bench import rows as bench_rows, run
from bench.rows import FIELDS, RESULTS, TIMEOUT, Results, Row, read_rows
from bench.run import TimeOver, alarm, run_tasks
from fastvit_kernels.commands.console import CommandError
from tests.check import results_cache


def test_csv_round_trip_and_torn_lines(tmp_path):
    results = Results(tmp_path, resume=False)
    note = 'says "no", twice'
    row = Row("mlp", "ours", "a,b", "bf16", "bwd", note=note, T=3, ms=1.25, samples=7, gbps=0.5)
    results.append(row)
    results.append(replace(row, provider="eager"))
    results.close()
    read = read_rows(tmp_path)
    assert [r.provider for r in read] == ["ours", "eager"]
    about = dict.fromkeys(("gpu", "driver", "torch", "triton", "commit", "sources"), "")
    assert str(replace(read[0], **about)) == str(row)
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


def test_an_older_csv_is_read_with_the_columns_of_today(tmp_path):
    text = "op,provider,shape,dtype,mode,T,samples,ms,flops\nmlp,ours,a,bf16,bwd,3,5,1.5,7\n"
    (tmp_path / RESULTS).write_text(text)
    (old,) = read_rows(tmp_path)
    wanted = Row("mlp", "ours", "a", "bf16", "bwd", T=3, status="", ms=1.5, samples=5)
    assert str(old) == str(wanted)


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
    "text",
    ["", "a,b\n1,2\n", f"{','.join(FIELDS)}\n{'a' * len(FIELDS)}\n1" + ",2" * 99 + "\n"],
    ids=["empty", "other", "long"],
)
def test_another_csv_is_refused(text, tmp_path):
    (tmp_path / RESULTS).write_text(text)
    with pytest.raises(CommandError, match="no result of this benchmark"):
        read_rows(tmp_path)


# --- the session


def test_the_alarm_ends_what_takes_too_long():
    with pytest.raises(TimeOver), alarm(0.05):
        time.sleep(20)


def test_after_the_body_no_alarm_is_left():
    handlers = [signal.getsignal(s) for s in (signal.SIGALRM, signal.SIGTERM)]
    with alarm(3600.0):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 3000
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert [signal.getsignal(s) for s in (signal.SIGALRM, signal.SIGTERM)] == handlers


def test_a_killed_process_does_not_try_the_same_again(tmp_path):
    task = stub_task("a")
    Results(tmp_path, False).trying(task.keys)
    again = Results(tmp_path, True)  # another process, after a SIGKILL
    assert {r.status for r in again.rows.values()} == {TIMEOUT} and len(again.rows) == 2
    assert "ended here" in read_rows(tmp_path)[0].note
    assert not (tmp_path / bench_rows.TRYING).exists()


def test_ours_of_other_sources_is_measured_again_and_peers_are_not(monkeypatch, tmp_path):
    results = Results(tmp_path, False)
    task = stub_task("a")
    run_tasks([task], bench(), results)
    assert results.missing(task.keys) == []
    about = {**bench_rows.environment(), "sources": "mended"}
    monkeypatch.setattr(bench_rows, "environment", lambda: about)
    assert [key[1] for key in results.missing(task.keys)] == ["ours"]
    calls: list = []
    run_tasks([stub_task("a", calls=calls)], bench(), results)
    assert calls == [("a", ("ours",))]
    assert {r.provider: r.sources == "mended" for r in read_rows(tmp_path)} == {
        "eager": False,
        "ours": True,
    }


@pytest.mark.parametrize("field", ["gpu", "driver", "torch", "triton"], ids="its {}".format)
def test_rows_of_another_machine_are_not_added_to(tmp_path, field):
    """A peer or a roof of another GPU decides nothing here."""
    results = Results(tmp_path, False)
    results.append(Row("mlp", "ours", "a", "bf16", "bwd", ms=1.0))
    results.close()
    other = [replace(row, **{field: "another"}) for row in read_rows(tmp_path)]
    (tmp_path / RESULTS).write_text(bench_rows.as_csv(other))
    with pytest.raises(CommandError, match="name another --out"):
        Results(tmp_path, True)


def test_who_ended_a_process_has_no_turns_in_the_next(tmp_path):
    """It would hang or lose the device with every --resume."""
    calls: list = []
    results = Results(tmp_path, False)
    results.append(Row("mlp", "hangs", "a", "bf16", "bwd", status=TIMEOUT))
    run_tasks([stub_task("a", ("eager", "ours", "hangs"), calls)], bench(), results)
    assert calls == [("a", ("eager", "ours"))]


def test_eager_keeps_its_row_of_an_earlier_task(tmp_path):
    results = Results(tmp_path, False)
    results.append(Row("mlp", "eager", "a", "bf16", "bwd", ms=5.0))
    run_tasks([stub_task("a")], bench(), results)
    assert {r.provider: r.ms for r in read_rows(tmp_path)} == {"eager": 5.0, "ours": 1.0}


def test_a_task_in_time_ends_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "HUNG_COMPILING_S", 0.2)
    run_tasks([stub_task("a")], bench(), Results(tmp_path, False))
    time.sleep(0.4)
