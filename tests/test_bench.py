"""Ops measured without a GPU: stand-in timers, tiny shapes, Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from math import isnan, nan

import pytest
import torch
from bench_stand_ins import CPU, ROOFS, TINY, FakeTimer, bench, few_rounds, with_providers

import fastvit_kernels as fk
from bench import measure
from bench.measure import COPY_BYTES, MATMUL_SIDE, measure_op
from bench.ops import OPS, compiled, ours, plain
from bench.rows import ERROR, FAILED, OK, Row, bad_rows
from fastvit_kernels.accuracy.op import Draw

__all__ = ["few_rounds"]  # a fixture


@pytest.mark.parametrize("name", OPS)
def test_every_provider_of_an_op_runs_and_is_right(name):
    op = OPS[name]
    shape = replace(TINY, variant="proj" if name == "linear" else "")
    if name == "varlen_attention":
        shape = replace(TINY, B=3, variant="spread")
    names = {p.name for p in op.providers(shape, "fp32") if p.installed and not p.compiled}
    rows = list(measure_op(op, shape, "fp32", ("bwd",), tuple(names), bench()))
    by_name = {r.provider: r for r in rows}
    assert set(by_name) == names
    on_gpus = ("sdpa-cudnn", "sdpa-cudnn-unpacked", "sdpa-efficient", "torch-varlen")
    for row in rows:
        if row.provider in on_gpus:
            assert row.status == ERROR
            continue
        assert (row.status, row.note) == (OK, "") and 0 <= row.error <= 1
        assert row.ms == 1.0 and row.graph_ms == 1.0 / op.rotated and row.speedup == 1.0
        assert row.peak_mib == 3.0
        assert row.tflops == pytest.approx(op.rotated * op.flops(shape, "bwd") / 1e9)
        assert row.gbps == pytest.approx(op.rotated * op.bytes(shape, "fp32", "bwd") / 1e6)
        assert row.roof_share > 0
    assert any(r.provider.startswith("ours") for r in rows)


def with_provider(op, provider):
    return with_providers(op, lambda shape, dtype: [*op.providers(shape, dtype), provider])


class Scaled(torch.autograd.Function):
    """The identity, with a gradient of 1.01."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return 1.01 * dy


@pytest.mark.parametrize("name", ["layer_norm", "mlp", "patch_embed"])
def test_the_gate_looks_at_every_gradient(name):
    op = OPS[name]
    given = op.inputs(TINY, Draw(CPU, torch.float32))
    learnt = [n for n, x in given.items() if x.requires_grad]

    def spoiled(argument):
        right = op.reference(TINY)
        return lambda **given: right(**{**given, argument: Scaled.apply(given[argument])})

    wrong = {f"wrong d{n}": plain(f"wrong d{n}", spoiled(n)) for n in learnt}
    op = with_providers(op, lambda *_: [*OPS[name].providers(TINY, "fp32"), *wrong.values()])
    for row in measure_op(op, TINY, "fp32", ("fwd",), tuple(wrong), bench()):
        failed = row.provider in wrong
        assert (row.status == FAILED) == failed, row
        assert not failed or row.note.startswith(f"2x rule: {row.provider.split()[1]}:")
        assert isnan(row.ms) == failed and (row.error > 1) == failed


def test_what_is_wrong_has_an_error_and_no_time():
    def wrong(x, weight, bias):
        return 1.01 * torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)

    op = with_provider(OPS["layer_norm"], plain("broken", wrong))
    rows = {r.provider: r for r in measure_op(op, TINY, "fp32", ("fwd",), ("broken",), bench())}
    assert rows["broken"].status == FAILED and rows["eager"].status == OK
    assert isnan(rows["broken"].ms + rows["broken"].speedup) and rows["broken"].error > 1
    assert ": broken: FAILED 2x rule: " in rows["broken"].describe()
    peers_error = replace(rows["eager"], status=ERROR)
    assert bad_rows([*rows.values(), peers_error]) == [rows["broken"]]


def test_a_mode_times_what_it_says(monkeypatch):
    """fwd a forward, bwd a backward over one forward; every gradient is computed."""
    given = {n: torch.ones(2, 3, requires_grad=True) for n in "ab"}
    given["frozen"] = torch.ones(3)
    seen = []

    def function(a, b, frozen):
        seen.append("forward" if torch.is_grad_enabled() else "forward that saves nothing")
        return a * b + frozen

    def grad(outputs, leaves, upstream, retain_graph=False):
        seen.append(("backward", len(leaves), retain_graph))

    monkeypatch.setattr(torch.autograd, "grad", grad)
    for mode, prepared, timed in (
        ("fwd", [], ["forward"]),
        ("bwd", ["forward"], [("backward", 2, True)]),
    ):
        step = measure.step_of(function, given, [torch.ones(2, 3)], mode)
        state = step.prepare()
        assert seen == prepared
        seen.clear()
        step.run(state)
        assert seen == timed
        seen.clear()


def test_a_speedup_is_the_baselines_time_over_the_providers():
    """By a graph's replay where both have one; none where either was not compared, or is wrong."""
    base = Row("mlp", "eager", "", "", "", ms=3.0, error=0.5)
    fast = replace(base, provider="ours", ms=2.0)
    assert fast.with_speedup(base).speedup == 1.5
    replayed = replace(base, graph_ms=1.0), replace(fast, graph_ms=0.25)
    assert replayed[1].with_speedup(replayed[0]).speedup == 4.0
    assert replayed[1].with_speedup(base).speedup == 1.5
    assert fast.with_speedup(replayed[0]).speedup == 1.5
    for row, baseline in (
        (replace(fast, error=nan), base),
        (fast, replace(base, error=nan)),
        (fast, None),
        (replace(fast, ms=nan), base),
        (fast, replace(base, ms=nan)),
    ):
        assert isnan(row.with_speedup(baseline).speedup)


def test_what_took_pytorchs_path_is_not_ours():
    def falls_back(**inputs):
        with fk.backend("torch"):
            return fk.layer_norm(**inputs)

    op = with_provider(OPS["layer_norm"], ours("ours-fallen", falls_back))
    names = ("ours", "ours-fallen")
    rows = {r.provider: r for r in measure_op(op, TINY, "fp32", ("bwd",), names, bench())}
    assert rows["ours-fallen"].status == FAILED and isnan(rows["ours-fallen"].speedup)
    assert "none of our kernels ran" in rows["ours-fallen"].note
    assert rows["ours"].status == rows["eager"].status == OK


def test_a_shape_too_large_for_the_oracle_is_measured_without_a_speedup(monkeypatch):
    def no_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("float64")

    monkeypatch.setattr(measure, "Reference", no_memory)
    rows = list(measure_op(OPS["layer_norm"], TINY, "fp32", ("bwd",), ("eager",), bench()))
    assert rows[0].ms == 1.0 and isnan(rows[0].speedup) and "not compared" in rows[0].note


def measured_roofs(timer):
    return [measure.measure_roof(roof, CPU, timer) for roof in measure.planned_roofs()]


class Warming(FakeTimer):
    """2 ms a call while the chip is idle, 1 ms after 250 calls."""

    calls = 0

    def sample(self, run, count, flush):
        self.calls += count
        return [2.0 if self.calls <= 250 else 1.0] * count


def test_roofs_are_measured_warm():
    assert COPY_BYTES == 2**30  # as docs/benchmarks.md says
    assert all(side % 256 == 0 for side in MATMUL_SIDE.values())  # whole tiles
    rows = {r.mode: r for r in measured_roofs(Warming())}
    assert rows["copy"].ms == rows["matmul"].ms == 1.0
    assert measure.roofs_of(rows.values()) == {
        "copy": pytest.approx(2 * 2**12 / 1e-3 / 1e9),
        "bf16": pytest.approx(2 * 8**3 / 1e-3 / 1e12),
    }


def test_a_roof_that_cannot_be_had_has_a_row_that_says_why(monkeypatch):
    def fails(self, *arguments, **options):
        raise RuntimeError("no copy")

    monkeypatch.setattr(FakeTimer, "sample", fails)
    rows = measured_roofs(FakeTimer())
    assert {(r.status, r.note) for r in rows} == {(ERROR, "RuntimeError: no copy")}
    assert measure.roofs_of(rows) == {}


def test_shares_of_the_nearer_roof():
    assert measure.nearer_roof(ROOFS, 1.0, 1e3, 1e7, "fp32") == ("copy", pytest.approx(1.0))
    assert measure.nearer_roof(ROOFS, 2.0, 1e8, 1e2, "fp32") == ("matmul", pytest.approx(0.5))
    assert measure.nearer_roof(ROOFS, 1.0, 1.0, 1.0, "fp8")[0] == ""


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.compiles])
def test_what_a_compiler_is_given_is_one_graph(name, monkeypatch):
    """With a break it would not be what its users compile."""
    op, shape = OPS[name], replace(TINY, variant="proj" if name == "linear" else "")
    with monkeypatch.context() as patch:
        patch.setattr("torch.compile", lambda function, **options: function)
        made = [p.make() for p in op.providers(shape, "fp32") if "compile" in p.name]
    reference, searched = made
    assert reference is searched
    given = op.inputs(shape, Draw(CPU, torch.float32))
    whole = torch.compile(reference, backend="eager", fullgraph=True, dynamic=False)
    torch.testing.assert_close(whole(**given), reference(**given))


def test_every_provider_has_the_precision_of_the_yardstick():
    """cuDNN's own default is TF32: eager patch_embed in fp32 would break the 2x rule."""
    seen = set()

    def noted(x, weight, bias):
        seen.add(torch.backends.cudnn.conv.fp32_precision)
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)

    convolutions = torch.backends.cudnn.conv
    assert convolutions.fp32_precision == "tf32"
    op = with_provider(OPS["layer_norm"], plain("noted", noted))
    list(measure_op(op, TINY, "fp32", ("fwd",), ("noted",), bench()))
    assert seen == {"ieee"} and convolutions.fp32_precision == "tf32"


def test_donated_buffers_are_off_for_timed_backwards_alone():
    from private import autograd_config

    before = autograd_config.donated_buffer
    with compiled("compile", lambda: torch.relu).context():
        assert autograd_config.donated_buffer is False
    assert autograd_config.donated_buffer == before
