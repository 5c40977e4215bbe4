"""The benchmarks without a GPU: stand-in timers, tiny shapes, Triton's interpreter."""

# ruff: noqa: E402
from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # bench is no part of the package

from bench import bench_profile, bench_vit, compare, harness, host, plot, report, roofs, shapes
from bench import rows as bench_rows
from bench.__main__ import Machine, main
from bench.first_step import measure_first_step
from bench.harness import Bench, measure_op
from bench.models import WAYS, Case, build
from bench.plan import OPS, Task, Wanted, op_of, tasks
from bench.providers import Provider, compiled, plain
from bench.rows import (
    ERROR,
    FAILED,
    FIELDS,
    OK,
    RESULTS,
    TIMEOUT,
    Results,
    Row,
    as_line,
    read_rows,
)
from bench.session import CHECK, Clock, TimeOver, bad_rows, run_tasks
from bench.timer import DeviceLost, Roofs, Step, WallTimer, median_p20_p80

CPU = torch.device("cpu")
TINY = shapes.Shape("tiny", B=1, T=5, C=16, H=2, F=32, size=8, patch=4)
ROOFS = Roofs(10.0, {"fp32": 0.1, "bf16": 0.1})


class FakeTimer(WallTimer):
    """Runs everything once and says what time it took by a table, so that ratios are known."""

    def __init__(self, ms: float = 1.0):
        self.ms, self.captures = ms, 0

    def sample(self, run, count, flush):
        run()
        return [self.ms] * count

    def capture(self, step: Step):
        self.captures += 1
        state = step.prepare()
        step.run(state)
        return lambda: step.run(state)

    def peak_mib(self, run):
        run()
        return 3.0

    def kept_mib(self, forward):
        forward()
        return 2.0


def bench(timer=None):
    return Bench(CPU, timer or FakeTimer(), ROOFS, lambda text: None)


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch):
    monkeypatch.setattr(harness, "WARM_UP", 1)
    monkeypatch.setattr(bench_vit, "WARM_UP", 1)
    monkeypatch.setattr("bench.harness.ROUND_MS", 2.0)
    monkeypatch.setattr("bench.bench_vit.TURN_MS", 2.0)
    monkeypatch.setitem(shapes.VITS, "tiny", (16, 1, 2, 32))


@pytest.mark.parametrize("name", OPS)
def test_every_provider_of_an_op_runs_and_is_right(name):
    op = op_of(name)
    shape = replace(TINY, variant="proj" if name == "linear" else "")
    absent = {"flash_attn", "xformers", "liger_kernel", "quack", "compile"}
    names = {p.name for p in op.providers(shape, "fp32")} - absent
    rows = list(measure_op(op, shape, "fp32", ("both",), tuple(names), bench()))
    by_name = {r.provider: r for r in rows}
    assert set(by_name) == names
    no_backend = ("sdpa-cudnn", "sdpa-efficient")  # which a CPU does not have
    for row in rows:
        if row.provider in no_backend:
            assert row.status == ERROR
            continue
        assert (row.status, row.note) == (OK, "")
        assert row.ms == 1.0 and row.graph_ms == 1.0 and row.speedup == 1.0
        assert row.peak_mib == 3.0
        assert row.tflops == pytest.approx(op.flops(shape, "both") / 1e9)
        assert row.gbps == pytest.approx(op.bytes(shape, "fp32", "both") / 1e6)
        assert row.roof_share > 0
    assert any(r.provider.startswith("ours") for r in rows)


@pytest.mark.parametrize("dtype", ["amp", "bf16"])
def test_layer_norm_in_low_precision(dtype):
    rows = list(measure_op(op_of("layer_norm"), TINY, dtype, ("fwd",), ("ours",), bench()))
    assert [(r.provider, r.status, r.note) for r in rows] == [("eager", OK, ""), ("ours", OK, "")]


def test_flops_and_bytes_by_hand():
    attention, mlp = op_of("attention"), op_of("mlp")
    # B H = 2 matrices of T x T = 25 with D = 8: q k^T and p v, 2 FLOP a product
    assert attention.flops(TINY, "fwd") == 2 * (2 * 2 * 25 * 8)
    # qkv 3 and out 1 of 5 x 16 in bf16, lse of 2 x 5 in fp32
    assert attention.bytes(TINY, "bf16", "fwd") == 4 * 80 * 2 + 10 * 4
    assert mlp.flops(TINY, "both") == 3 * (2 * 5 * 16 * 32 * 2)
    # timm's ViT-B at 224: 17.6 GMAC an image
    forward = Case("timm", "B", 224, 1, mode="infer").flops
    assert forward == pytest.approx(35.1e9, rel=0.01)


def broken(right: bool = False) -> Provider:
    def wrong(x, weight, bias):
        y = torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)
        return y * 1.01

    return plain("broken", wrong)


def with_provider(op, provider):
    return replace(op, providers=lambda shape, dtype: [*op.providers(shape, dtype), provider])


def test_the_gate_closes_on_a_broken_provider():
    op = with_provider(op_of("layer_norm"), broken())
    rows = {r.provider: r for r in measure_op(op, TINY, "fp32", ("fwd",), ("broken",), bench())}
    row = rows["broken"]
    assert row.status == FAILED and row.note.startswith("2x rule: out")
    assert row.speedup is None and row.ms == 1.0
    assert rows["eager"].status == OK
    assert bad_rows([row]) == [row] and not bad_rows([rows["eager"]])
    assert "FAILED" in report.op_line(row)


@pytest.mark.parametrize("error", [RuntimeError("no kernel"), torch.OutOfMemoryError("full")])
def test_a_provider_that_raises_leaves_the_others(error):
    def raises(**inputs):
        raise error

    op = with_provider(op_of("layer_norm"), plain("raises", raises))
    rows = {r.provider: r for r in measure_op(op, TINY, "fp32", ("fwd",), ("raises",), bench())}
    assert rows["eager"].status == OK
    wanted = ERROR if isinstance(error, RuntimeError) and "full" not in str(error) else None
    assert rows["raises"].status == (wanted or "out of memory")
    assert str(error) in rows["raises"].note and rows["raises"].ms is None
    assert not bad_rows([rows["raises"]])  # a peer's; one of ours would count
    assert bad_rows([Row("mlp", "ours", "", "", "", status=ERROR)])


def test_a_shape_too_large_for_the_oracle_is_measured_without_a_speedup(monkeypatch):
    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("float64")

    monkeypatch.setattr(harness, "Reference", no_memory)
    rows = list(measure_op(op_of("layer_norm"), TINY, "fp32", ("both",), ("eager",), bench()))
    assert rows[0].ms == 1.0 and rows[0].speedup is None and "not compared" in rows[0].note


def test_median_and_percentiles():
    assert median_p20_p80([5.0, 1.0, 3.0, 2.0, 4.0, 6.0]) == (3.0, 2.0, 5.0)
    assert median_p20_p80([7.0]) == (7.0, 7.0, 7.0)


def test_roofs_by_stand_in(monkeypatch):
    monkeypatch.setattr(roofs, "COPY_BYTES", 2**12)
    monkeypatch.setattr(roofs, "MATMUL_SIDE", {"bf16": 8})
    found = roofs.roofs_of(list(roofs.measure_roofs(CPU, FakeTimer(2.0))))
    assert found.copy_gbps == pytest.approx(2 * 2**12 / 2e-3 / 1e9)
    assert found.matmul_tflops == {"bf16": pytest.approx(2 * 8**3 / 2e-3 / 1e12)}


class Throttling(FakeTimer):
    """1 ms a call while the chip is cool, 2 ms after 1,200 calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def sample(self, run, count, flush):
        self.calls += count
        return [1.0 if self.calls <= 1200 else 2.0] * count


def test_roofs_are_measured_warm_and_where_they_settle(monkeypatch):
    monkeypatch.setattr(roofs, "COPY_BYTES", 2**12)
    monkeypatch.setattr(roofs, "MATMUL_SIDE", {"bf16": 8})
    timer = Throttling()
    rows = {r.mode: r for r in roofs.measure_roofs(CPU, timer)}
    # 500 ms warm-up and 30 samples each, then 2 s: half of them after the chip has slowed down
    assert rows["copy"].ms == rows["matmul"].ms == 1.0
    assert rows["matmul, sustained"].ms == 2.0 and rows["matmul, sustained"].samples > 500
    assert roofs.roofs_of(list(rows.values())).matmul_tflops["bf16"] == rows["matmul"].tflops


def test_shares_of_the_nearer_roof():
    assert ROOFS.share(1.0, 1e3, 1e7, "fp32") == ("copy", pytest.approx(1.0))
    assert ROOFS.share(2.0, 1e8, 1e2, "fp32") == ("matmul", pytest.approx(0.5))
    assert ROOFS.share(1.0, 1.0, 1.0, "fp8") == ("", None)


# --- rows on disk


def test_csv_round_trip_and_torn_lines(tmp_path):
    results = Results(tmp_path, resume=False)
    row = Row(
        "mlp", "ours", "a,b", "bf16", "both", note='says "no", twice', B=3, ms=1.25, speedup=None,
        batch=None, samples=7,
    )  # fmt: skip
    results.append(row)
    results.append(replace(row, provider="eager"))
    results.close()
    read = read_rows(tmp_path)
    assert [r.provider for r in read] == ["ours", "eager"]
    about = dict.fromkeys(("gpu", "driver", "torch", "triton", "commit", "sources"), "")
    assert replace(read[0], **about) == row
    assert read[0].torch == torch.__version__

    path = tmp_path / RESULTS
    path.write_text(path.read_text()[:-9])  # a crash tears the last line
    again = Results(tmp_path, resume=True)
    assert [r.provider for r in again.rows.values()] == ["ours"]
    again.append(replace(row, provider="eager"))
    again.close()
    assert [r.provider for r in read_rows(tmp_path)] == ["ours", "eager"]


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
    for folder in ("fastvit_kernels", "bench"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(bench_rows, "__file__", str(tmp_path / "bench" / "rows.py"))
    before = bench_rows.sources_hash()
    assert before == bench_rows.sources_hash()
    (tmp_path / "fastvit_kernels" / "a.py").write_text("x = 2\n")
    assert bench_rows.sources_hash() != before


def test_another_csv_is_refused(tmp_path):
    (tmp_path / RESULTS).write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no result of this benchmark"):
        read_rows(tmp_path)


# --- the session


def stub_task(name, seconds=1.0, providers=("eager", "ours"), calls=None, run=None):
    def default(bench, names):
        if calls is not None:
            calls.append((name, tuple(names)))
        for provider in dict.fromkeys(("eager", *names)):
            yield Row("mlp", provider, name, "bf16", "both", ms=1.0)

    keys = tuple(("mlp", p, name, "bf16", "both") for p in providers)
    return Task(0, seconds, name, keys, run or default)


def test_the_budget_leaves_out_what_would_not_end(tmp_path):
    calls: list = []
    clock = Clock(10.0, now=lambda: 3.0 * len(calls))  # each takes three seconds
    work = [stub_task("a", 2.0, calls=calls), stub_task("b", 100.0, calls=calls)]
    work += [stub_task("c", 1.0, calls=calls)]
    assert run_tasks(work, bench(), Results(tmp_path, False), clock) == 1
    assert [name for name, _ in calls] == ["a", "c"]


def test_the_alarm_ends_what_takes_too_long():
    clock = Clock(0.05)
    with pytest.raises(TimeOver), clock.alarm():
        time.sleep(20)


def test_resume_measures_only_what_is_missing(tmp_path):
    calls: list = []
    results = Results(tmp_path, False)
    results.append(Row("mlp", "eager", "a", "bf16", "both", ms=5.0))
    run_tasks([stub_task("a", calls=calls)], bench(), results, Clock(None))
    run_tasks([stub_task("a", calls=calls)], bench(), results, Clock(None))
    assert calls == [("a", ("ours",))]
    assert {r.provider: r.ms for r in read_rows(tmp_path)} == {"eager": 5.0, "ours": 1.0}


def test_an_interrupt_loses_no_row(tmp_path):
    def interrupted(bench, names):
        yield Row("mlp", "eager", "a", "bf16", "both", ms=1.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks([stub_task("a", run=interrupted)], bench(), Results(tmp_path, False), Clock(None))
    assert [r.provider for r in read_rows(tmp_path)] == ["eager"]


def test_a_lost_gpu_is_the_culprits_row_and_the_next_process_goes_on(tmp_path):
    def lost(bench, names):
        bench.current = "ours"
        raise DeviceLost("an illegal memory access")
        yield

    task = stub_task("a", providers=("eager", "ours", "ours-split"), run=lost)
    results = Results(tmp_path, False)
    with pytest.raises(DeviceLost):
        run_tasks([task], bench(), results, Clock(None))
    assert [(r.provider, r.status) for r in read_rows(tmp_path)] == [("ours", ERROR)]
    with pytest.raises(
        DeviceLost
    ):  # again, and the culprit has its row: the whole case is given up
        run_tasks([task], bench(), results, Clock(None))
    assert len(read_rows(tmp_path)) == 3


def test_a_hang_is_the_culprits_row_and_the_next_process_goes_on(monkeypatch, tmp_path):
    """The body sits in C code where no signal reaches it; here it waits for the stub's restart."""
    monkeypatch.setattr("bench.session.HUNG_S", 0.05)
    restarted = threading.Event()

    def hangs(bench, names):
        yield Row("mlp", "eager", "a", "bf16", "both", ms=1.0)
        bench.current = "ours"
        assert restarted.wait(60)

    task = stub_task("a", 0.01, providers=("eager", "ours", "ours-split"), run=hangs)
    results = Results(tmp_path, False)
    run_tasks([task], bench(), results, Clock(None), restart=restarted.set)
    found = {r.provider: r for r in read_rows(tmp_path)}
    assert set(found) == {"eager", "ours"} and found["eager"].status == OK
    assert found["ours"].status == TIMEOUT and found["ours"].note.startswith("hung")
    calls: list = []
    again = stub_task("a", providers=("eager", "ours", "ours-split"), calls=calls)
    run_tasks([again], bench(), Results(tmp_path, True), Clock(None))
    assert calls == [("a", ("ours-split",))]


def test_a_task_in_time_is_not_restarted(tmp_path):
    restarts: list = []
    work = [stub_task("a"), stub_task("b")]
    run_tasks(work, bench(), Results(tmp_path, False), Clock(None), restart=restarts.append)
    assert not restarts and len(read_rows(tmp_path)) == 4
    assert not (tmp_path / bench_rows.TRYING).exists()


def test_a_killed_process_does_not_try_the_same_again(tmp_path):
    task = stub_task("a")
    with Results(tmp_path, False).trying(task.keys):
        again = Results(tmp_path, True)  # another process, after a SIGKILL
    assert {r.status for r in again.rows.values()} == {TIMEOUT} and len(again.rows) == 2
    assert "ended here" in read_rows(tmp_path)[0].note
    assert not (tmp_path / bench_rows.TRYING).exists()


def test_of_a_killed_process_the_provider_at_work_is_given_up(tmp_path):
    task = stub_task("a", providers=("eager", "ours", "ours-split"))
    results, work = Results(tmp_path, False), bench()
    work.note = results.note
    with results.trying(task.keys):
        work.current = "eager"
        work.current = "ours"
        again = Results(tmp_path, True)  # another process, after a SIGKILL
        assert [(r.provider, r.status) for r in again.rows.values()] == [("ours", TIMEOUT)]
    work.current = "ours-split"  # no case is at work
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
        "eager": False, "ours": True
    }  # fmt: skip


def test_a_task_that_renews_replaces_rows_of_former_turns(tmp_path):
    results = Results(tmp_path, False)
    results.append(Row("mlp", "eager", "a", "bf16", "both", ms=5.0))
    run_tasks([replace(stub_task("a"), renews=True)], bench(), results, Clock(None))
    assert {r.provider: r.ms for r in read_rows(tmp_path)} == {"eager": 1.0, "ours": 1.0}


def test_rows_name_the_tuned_table_in_use(monkeypatch, tmp_path):
    entry = type("Entry", (), dict(table="linear_fwd", key=(1,), config={"num_warps": 4}))()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(bench_rows, "gpu", lambda device: None)
    for entries, text in (([], ""), ([entry], "1 decisions, ")):
        monkeypatch.setattr(bench_rows.tuned_table, "read", lambda here, e=entries: (e, {}))
        assert bench_rows.tuned_table_in_use().startswith(text)
        assert bool(bench_rows.tuned_table_in_use()) == bool(entries)
    row = Row("mlp", "ours", "a", "bf16", "both", tuned="1 decisions, abc")
    assert "tuned: 1 decisions, abc" in bench_rows.conditions([row])


def test_a_group_of_models_resets_the_compiler_once(monkeypatch):
    resets: list = []
    monkeypatch.setattr("torch._dynamo.reset", lambda: resets.append(1))
    monkeypatch.setattr(bench_vit, "_ready", lambda entry, *_: None)
    entries = [harness.Entry(bench_vit.provider_of(name), torch.empty) for name in WAYS]
    bench_vit._measure_group(Case("timm", "tiny", 16, 2), entries, None, bench())
    bench_vit._measure_group(Case("timm", "tiny", 16, 2), entries[:1], None, bench())
    assert len(resets) == 1


def test_an_op_resets_the_compiler_once_and_meets_the_search(monkeypatch):
    resets, modes = [], []
    monkeypatch.setattr("torch._dynamo.reset", lambda: resets.append(1))

    def compiles(function, dynamic, mode):
        modes.append(mode)
        return function

    monkeypatch.setattr("torch.compile", compiles)
    names = ("compile", "compile-max-autotune")
    rows = list(measure_op(op_of("layer_norm"), TINY, "fp32", ("fwd",), names, bench()))
    assert [r.provider for r in rows] == ["eager", *names] and {r.status for r in rows} == {OK}
    assert modes == [None, "max-autotune-no-cudagraphs"] and len(resets) == 1
    list(measure_op(op_of("layer_norm"), TINY, "fp32", ("fwd",), (), bench()))
    assert len(resets) == 1


def test_every_provider_has_the_precision_of_the_yardstick(monkeypatch):
    """cuDNN's own default is TF32: eager patch_embed in fp32 would break the 2x rule."""
    seen = set()

    def noted(x, weight, bias):
        seen.add(torch.backends.cudnn.allow_tf32)
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    op = with_provider(op_of("layer_norm"), plain("noted", noted))
    list(measure_op(op, TINY, "fp32", ("fwd",), ("noted",), bench()))
    assert seen == {False} and torch.backends.cudnn.allow_tf32


def test_donated_buffers_are_off_for_timed_backwards_alone():
    from torch._functorch import config

    before = config.donated_buffer
    with compiled(torch.relu).context():
        assert config.donated_buffer is False
    assert config.donated_buffer == before


def test_the_plan_puts_the_telling_first_and_says_what_it_does_not_know():
    wanted = Wanted(ops=("vit", *OPS), providers=("nobody",), shapes=("T12345",))
    assert not any("eager" not in {k[1] for k in t.keys} for t in tasks(wanted, CPU))
    assert any("unknown provider 'nobody'" in text for text in wanted.said)
    assert any("no shape 'T12345'" in text for text in wanted.said)

    everything = Wanted(ops=("vit", "profile", "host", *OPS))
    found = tasks(everything, CPU)
    assert found[0].title == "timm-ViT-B-224-B128 amp train"
    assert {t.title.split()[0] for t in found if t.tier == 0} >= set(OPS)
    assert [t.tier for t in found] == sorted(t.tier for t in found)
    keys = [key for task in found for key in task.keys]
    assert len(keys) == len(set(keys))
    assert any("xformers is not measured" in text for text in everything.said)


def test_no_case_is_measured_twice():
    found = tasks(Wanted(ops=("attention",), dtypes=("bf16",)), CPU)
    shapes_ = [
        key[2] for task in found for key in task.keys if key[1] == "ours" and key[4] == "fwd"
    ]
    sizes = [shape.rsplit("-B", 1)[1] for shape in shapes_]
    assert len(sizes) == len(set(sizes)) and "128-T197-C768-H12" in sizes
    swept = tasks(Wanted(ops=("attention",), shapes=("sweep-T",), dtypes=("bf16",)), CPU)
    assert any("T197" in key[2] for task in swept for key in task.keys)


def test_sweeps_are_whole():
    found = list(op_of("attention").shapes())
    sweep = {s.T: s for s in found if s.model == "sweep-T"}
    assert tuple(sweep) == shapes.T_SWEEP
    assert {s.D for s in found} >= {32, 64, 80, 88, 96, 128}
    assert {s.T for s in found} >= {197, 577, 1370, 257, 730}
    assert all(0.6 < s.B * s.T / shapes.TOKENS < 1.4 for s in found)


# --- the command


def stand_in(monkeypatch, tmp_path, check_status=OK, work=None):
    monkeypatch.setattr(roofs, "COPY_BYTES", 2**12)
    monkeypatch.setattr(roofs, "MATMUL_SIDE", {"bf16": 8})
    work = work or [stub_task("a")]
    monkeypatch.setattr("bench.__main__.tasks", lambda wanted, device: work)
    restarts: list = []
    check = Row(CHECK, "ours", "all", "all", CHECK, status=check_status, note="44 of 44")
    machine = Machine(CPU, FakeTimer, restarts.append, lambda folder, timeout: check)
    return machine, restarts, ["all", "--out", str(tmp_path / "out"), "--time-budget", "500"]


def test_all_writes_at_most_six_files_and_resumes(monkeypatch, tmp_path, capsys):
    machine, _, words = stand_in(monkeypatch, tmp_path, work=[stub_task("a"), stub_task("b")])
    assert main(words, machine) == 0
    out = tmp_path / "out"
    assert len(list(out.iterdir())) <= 6
    assert "44 of 44" in (out / "summary.md").read_text()
    assert "speed-up" in capsys.readouterr().out
    assert main(words, machine) == 2  # results are never overwritten
    assert main([*words, "--resume"], machine) == 0
    assert (
        len(read_rows(out)) == 1 + 2 + 1 + 1 + 4
    )  # copy, matmul burst and sustained, a graph's replay, check, two cases


def test_targets_end_with_their_table_and_say_what_is_left(monkeypatch, tmp_path, capsys):
    machine, _, words = stand_in(monkeypatch, tmp_path)
    work = [stub_task("a"), stub_task("b", seconds=1e6)]
    monkeypatch.setattr("bench.__main__.target_tasks", lambda shapes: work)
    words = ["targets", *words[1:]]
    assert main(words, machine) == 3
    out = capsys.readouterr().out
    assert "1 cases were left out" in out and "\ntarget " in out and "mlp" in out
    assert not list((tmp_path / "out").glob("*.png"))
    work.pop()
    assert main([*words, "--resume"], machine) == 0


def test_all_fails_where_a_row_does(monkeypatch, tmp_path):
    machine, _, words = stand_in(monkeypatch, tmp_path, check_status=FAILED)
    assert main(words, machine) == 1


def test_a_lost_gpu_starts_the_command_again(monkeypatch, tmp_path):
    def lost(bench, names):
        raise DeviceLost("gone")
        yield

    machine, restarts, words = stand_in(monkeypatch, tmp_path, work=[stub_task("a", run=lost)])
    assert main(words, machine) == 1
    (again,) = restarts
    assert again[: len(words)] == words and "--resume" in again
    assert 0 < float(again[-1]) <= 500


def test_without_a_gpu_one_line_host_cost_and_check(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(host, "ROUNDS", 1)
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr("bench.__main__.run_check", lambda *a: Row(CHECK, "ours", "", "", ""))
    assert main(["all"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("torch sees no GPU") and "layer_norm" in out and "check: ok" in out


def test_all_is_what_runs_where_no_command_is_named(monkeypatch):
    seen = []
    monkeypatch.setattr("bench.__main__.this_machine", lambda _: None)
    monkeypatch.setattr(
        "bench.__main__.run_without_gpu", lambda arguments, *_: seen.append(arguments.command) or 0
    )
    assert main([]) == main(["--mode", "fwd"]) == 0
    assert seen == ["all", "all"]


# --- whole models, profile


@pytest.mark.parametrize("host_name", ["timm", "hf"])
def test_whole_models_run_and_pass_the_gate(host_name):
    pytest.importorskip("timm" if host_name == "timm" else "transformers")
    mode = "train" if host_name == "timm" else "infer"
    case = Case(host_name, "tiny", 16, 2, "bf16", mode)
    names = ("swapped", "swapped+graph") if host_name == "timm" else ("swapped",)
    rows = list(bench_vit.measure_vit(case, names, bench()))
    assert [(r.provider, r.status, r.note) for r in rows] == [
        (name, OK, "") for name in ("eager", *names)
    ]
    assert all(r.images_per_s == 2000.0 and r.roof_share for r in rows)
    assert rows[0].peak_mib > 3.0  # parameters and optimizer state are counted


def test_the_gate_of_whole_models_closes(monkeypatch):
    pytest.importorskip("timm")

    def spoiled(model):
        with torch.no_grad():
            model.blocks[0].mlp.fc1.weight.mul_(1.5)
        return type("Report", (), {"level": "block"})()

    monkeypatch.setattr("bench.models.swap_in", spoiled)
    case = Case("timm", "tiny", 16, 2, "bf16", "infer")
    rows = list(bench_vit.measure_vit(case, ("swapped",), bench()))
    assert rows[1].status == FAILED and rows[1].speedup is None


def test_a_graph_is_judged_by_what_its_replay_writes():
    """Eager results would vouch for it: a capture that leaves kernels out stays hidden."""
    pytest.importorskip("timm")

    class Empty(FakeTimer):
        def capture(self, step):
            super().capture(step)
            return lambda: None

    case = Case("timm", "tiny", 16, 2, "bf16", "infer")
    rows = {r.provider: r for r in bench_vit.measure_vit(case, ("swapped+graph",), bench(Empty()))}
    row = rows["swapped+graph"]
    assert row.status == FAILED and "logits" in row.note and row.speedup is None
    rows = {r.provider: r for r in bench_vit.measure_vit(case, ("swapped+graph",), bench())}
    assert rows["swapped+graph"].status == OK


def test_dropped_samples_are_measured_without_the_gate():
    pytest.importorskip("timm")
    case = Case("timm", "tiny", 16, 2, "bf16", drop_path=0.4)
    rows = list(bench_vit.measure_vit(case, ("swapped",), bench()))
    assert [r.shape for r in rows] == ["timm-ViT-tiny-16-B2-drop0.4"] * 2
    assert all(r.ms == 1.0 and r.speedup is None for r in rows)
    assert all("dropped samples are random" in r.note for r in rows)


def test_models_are_drawn_on_their_device():
    pytest.importorskip("timm")
    model = build(Case("timm", "tiny", 16, 2), torch.device("meta"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    first, second = (build(Case("timm", "tiny", 16, 2), CPU).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_bytes_kept_are_those_of_a_forward():
    rows = list(measure_op(op_of("layer_norm"), TINY, "fp32", ("fwd", "both"), ("ours",), bench()))
    assert {(r.mode, r.kept_mib) for r in rows} == {("fwd", 2.0), ("both", None)}


def test_largest_batch(monkeypatch):
    def fits(case, way, bench):
        return case.batch <= 77

    monkeypatch.setattr(bench_vit, "fits", fits)
    row = bench_vit.largest_batch(Case("timm", "tiny", 32, 8), "eager", bench())
    assert 64 <= row.batch <= 77 and row.op == "max_batch"


def test_first_step_in_processes_of_its_own():
    pytest.importorskip("transformers")
    rows = list(measure_first_step(Case("hf", "Ti", 32, 1, "bf16"), "eager", timeout=3600.0))
    assert [(r.mode, r.status, r.note) for r in rows] == [("cold", OK, ""), ("warm", OK, "")]
    assert all(r.ms > 0 for r in rows)


def launch(kernel, *operators):
    names = tuple(name for name, _ in operators)
    return bench_profile.Launch(kernel, 1000.0, names, tuple(shape for _, shape in operators))


def test_profile_stages():
    C, F, M = 768, 3072, 25216
    product = ((M, C), (C, 3 * C))
    for stage, found in {
        "qkv": launch("gemm", ("aten::addmm", product), ("aten::linear", ())),
        "proj": launch("gemm", ("aten::mm", ((M, C), (C, C))), ("AddmmBackward0", ())),
        "mlp": launch("gemm", ("aten::mm", ((F, M), (M, C)))),
        "attention": launch(
            "_attention_fwd_kernel", ("fastvit_kernels::qkv_attention_fwd", product)
        ),
        "norm": launch("k", ("fastvit_kernels::layer_norm_bwd", ((M, C),))),
        "patch embed": launch("k", ("aten::cudnn_convolution", ((128, 3, 224, 224),))),
        "optimizer": launch("k", ("aten::_fused_adamw_", ()), ("Optimizer.step#AdamW.step", ())),
        "other": launch("k", ("aten::add", ((M, C), (M, C)))),
    }.items():
        assert bench_profile.stage_of(found, C, F) == stage
    both = [launch("gemm", ("aten::addmm", product))] * 3
    assert bench_profile.sums(both, C, F, steps=3)["qkv"] == 1.0
    ours_qkv = launch("gemm", ("fastvit_kernels::qkv_attention_fwd", (*product, (3 * C,))))
    assert bench_profile.stage_of(ours_qkv, C, F) == "qkv"
    for kernel, stage in (("gemm", "qkv"), ("_rope_fwd_kernel", "attention")):
        turning = launch(kernel, ("fastvit_kernels::rope_attention_fwd", (*product, (3 * C,))))
        assert bench_profile.stage_of(turning, C, F) == stage
    gate = launch("_gate_fwd_kernel", ("fastvit_kernels::gated_hidden_fwd", ((M, 2 * C),)))
    assert bench_profile.stage_of(gate, C, F) == "mlp"


def test_profile_reads_the_profilers_events():
    pytest.importorskip("timm")
    case = Case("timm", "tiny", 16, 2, "bf16")
    rows = list(bench_profile.measure_profile(case, "eager", bench()))
    assert {r.mode for r in rows} == set(bench_profile.STAGES)
    assert all("no kernel" in r.note for r in rows)  # as it is without a GPU


# --- pictures, comparison, the page


def synthetic(factor: float = 1.0) -> list[Row]:
    """Rows of every kind, with times that mean nothing."""
    about = dict(gpu="NO SUCH GPU", driver="0", torch="0", triton="0", commit="none")
    rows = [
        Row("roof", "eager", "1024 MiB", "uint8", "copy", ms=1, gbps=1000.0, **about),
        Row("roof", "eager", "8192", "bf16", "matmul", ms=1, tflops=100.0, **about),
    ]
    for name in OPS:
        op = op_of(name)
        for shape in op.shapes():
            if shape.C != 768:
                continue
            for i, provider in enumerate(op.providers(shape, "bf16")):
                for mode in ("fwd", "bwd", "both"):
                    ms = factor * (1 + 0.1 * i) * (1 + shape.T / 4000)
                    row = harness.row_of(name, provider.name, shape, "bf16", mode)
                    row = replace(
                        row, ms=ms, ms_p20=0.98 * ms, ms_p80=1.02 * ms, speedup=1 / (1 + 0.1 * i),
                        **about,
                    )  # fmt: skip
                    rows.append(harness._rates(row, op, shape, roofs.roofs_of(rows[:2])))
    for j, model in enumerate("SBL"):
        case = Case("timm", model, 224, 128)
        for i, provider in enumerate(WAYS):
            row = bench_vit.row_of(case, provider)
            rows.append(
                replace(row, ms=100.0, images_per_s=1e3 / (1 + i + j), peak_mib=9e3 + i, **about)
            )
    case = Case("timm", "B", 224, 128)
    for i, provider in enumerate(("eager", "swapped", "compile", "swapped+compile")):
        for mode in ("cold", "warm"):
            row = bench_vit.row_of(case, provider, "first_step", mode)
            rows.append(replace(row, ms=1e3 * (i + 2), **about))
    for provider in ("eager", "swapped"):
        rows.append(replace(bench_vit.row_of(case, provider, "max_batch"), batch=512, **about))
        for i, stage in enumerate(bench_profile.STAGES):
            row = bench_vit.row_of(case, provider, "profile", stage)
            rows.append(replace(row, ms=float(i + 1), **about))
    return rows


def test_plots_are_drawn_from_the_csv(tmp_path, capsys):
    results = Results(tmp_path, False)
    for row in synthetic():
        results.rows[row.key] = row
        results._write(as_line(row))
    results.close()
    assert main(["plot", str(tmp_path)]) == 0
    names = {"targets.png", "ops.png", "vit.png", "roofline.png", "profile.png"}
    assert {p.name for p in tmp_path.glob("*.png")} == names
    assert all((tmp_path / name).stat().st_size > 20_000 for name in names)
    assert len(list(tmp_path.iterdir())) == 7
    summary = (tmp_path / "summary.md").read_text()
    assert "NO SUCH GPU" in summary and "not yet measured" in summary  # host cost has no row
    assert "drawn" in capsys.readouterr().out


def test_failed_competitors_are_drawn_hollow(tmp_path):
    """A picture without them would say that nobody else had tried."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ops, bars = figure.subplots(1, 2)
    row = Row("mlp", "liger_kernel", "a", "bf16", "both", T=50, ms=1.0, tflops=3.0)
    plot._curve(ops, [row, replace(row, T=197, status=FAILED)], lambda r: r.tflops)
    hollow, whole = ops.get_lines()
    assert hollow.get_markerfacecolor() == "none" and list(hollow.get_xdata()) == [197]
    assert hollow.get_label() == "liger_kernel, FAILED" and list(whole.get_xdata()) == [50]
    plot._bars(bars, {"ViT": {"eager": 1.0, "compile": 2.0}}, "", "", "%f", {("ViT", "compile")})
    assert [bar.get_facecolor()[3] for bar in bars.patches] == [1.0, 0.0]
    assert not plot._measured([replace(row, status=ERROR)])


def test_no_rows_no_pictures(tmp_path):
    assert plot.draw_all([], Roofs(0.0, {}), tmp_path) == []


def test_compare_puts_regressions_first(tmp_path, capsys):
    a = [r for r in synthetic() if r.op == "mlp"][:4]
    b = [replace(r, ms=2 * r.ms, ms_p20=1.9 * r.ms, ms_p80=2.1 * r.ms) for r in a[:1]]
    b += [replace(r, ms=0.9 * r.ms) for r in a[1:]]
    found = compare.ratios(a, list(reversed(b)))
    assert found[0].ratio == 2.0 and found[0].is_regression(0.05)
    assert found[0].low == pytest.approx(1.9 / 1.02)
    noisy = replace(a[0], ms=1.1 * a[0].ms, ms_p20=0.9 * a[0].ms)
    assert not compare.ratios(a[:1], [noisy])[0].is_regression(0.05)
    for name, rows in (("a", a), ("b", b)):
        results = Results(tmp_path / name, False)
        for row in rows:
            results.append(row)
        results.close()
    words = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(words) == 1
    assert main([*words, "--threshold", "1.5"]) == 0
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "none")]) == 2
    assert "slower" in capsys.readouterr().out


def test_the_page_says_what_is_not_measured_and_keeps_the_log():
    page = report.docs([], "")
    assert page.count("not yet measured") > 8 and report.COMMAND in page
    log = "\nby hand\n"
    former = f"x{report.LOG_START}{log}{report.LOG_END}"
    page = report.docs([("a GPU", synthetic())], former)
    assert log in page and "## a GPU" in page and "NO SUCH GPU" in page


def test_the_committed_page_is_the_generated_one(tmp_path):
    for page in (report.DOCS, report.README):
        (tmp_path / page.name).write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    report.write_docs(tmp_path / report.DOCS.name, front=tmp_path / report.README.name)
    for page in (report.DOCS, report.README):
        assert (tmp_path / page.name).read_text() == page.read_text(encoding="utf-8")


def test_the_check_is_read_from_its_json(monkeypatch, tmp_path):
    from bench import session

    def done(code, stdout, stderr=""):
        result = type("Done", (), dict(returncode=code, stdout=stdout, stderr=stderr))()
        monkeypatch.setattr(session.subprocess, "run", lambda *a, **k: result)
        return session.run_check(tmp_path, 5.0)

    cases = [
        dict(name="mlp", dtype="bf16", passed=False, failure="not finished after 5 s, killed"),
        dict(name="x", dtype="bf16", passed=True, failure=None),
    ]

    def lines(*cases):
        summary = dict(passed=True, device="a GPU", versions={})
        return "\n".join(map(json.dumps, (*cases, summary)))

    row = done(1, lines(*cases))
    assert row.status == FAILED and "1 of 2" in row.note and "mlp bf16 (not fin" in row.note
    assert done(0, lines(cases[1])).status == OK
    row = done(1, json.dumps(cases[1]), "Killed")  # no last line
    assert row.status == FAILED and "Killed" in row.note
    row = done(1, "", "Segmentation fault")
    assert row.status == FAILED and "Segmentation fault" in row.note

    def cut(*arguments, **options):
        output = (json.dumps(cases[1]) + "\n" + json.dumps(cases[0]) + '\n{"na').encode()
        raise session.subprocess.TimeoutExpired("check", 5.0, output=output)

    monkeypatch.setattr(session.subprocess, "run", cut)
    row = session.run_check(tmp_path, 5.0)
    assert row.status == FAILED and "2 cases done; failed: mlp bf16" in row.note
