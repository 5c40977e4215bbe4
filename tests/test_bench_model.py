"""Whole models on the CPU: the plan's, and `python -m bench vit --model NAME`."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isnan

import pytest
import torch
from bench_stand_ins import (
    CPU,
    FakeTimer,
    bench,
    few_rounds,  # noqa: F401, a fixture by its name
)

from bench import models as bench_models
from bench.models import WAYS, Case, Runner, Way, build
from bench.plan import Wanted, tasks
from bench.rows import FAILED, OK
from fastvit_kernels import get_backend, swap_out
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.measure import compare
from fastvit_kernels.measure.turns import ROUNDS


def planned(**wanted):
    return tasks(Wanted(ops=("vit",), **wanted))


def test_one_model_takes_the_place_of_the_plans():
    found = planned(model="vit_mnist", batch=4, providers=("swapped", "compile"))
    assert [[key[1:] for key in task.keys] for task in found] == [
        [(name, "vit_mnist-28-B4", "amp", "train") for name in names]
        for names in (("eager", "swapped"), ("compile",))
    ]
    modes = planned(model="vit_mnist", dtypes=("bf16",), modes=("train", "infer"))
    assert {key[3:] for task in modes for key in task.keys} == {
        ("bf16", "train"),
        ("bf16", "infer"),
    }


def test_names_of_timm_take_an_image_size():
    pytest.importorskip("timm")
    name = "timm:vit_tiny_patch16_224"
    case = Case(name, 32, 2)
    assert (case.id, case.image, case.tokens) == (f"{name}-32-B2", (3, 32, 32), 4)
    with pytest.raises(CommandError, match=r"model timm:vit_tiny_patch16_224: .*size"):
        planned(model=name, img_size=5)


def test_a_model_of_transformers_is_measured_and_compared(tmp_path):
    pytest.importorskip("transformers")
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    config = dict(model_type="vit", image_size=8, patch_size=4, num_channels=3, **sizes)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    case = Case(f"hf:{path}", 0, 2, "bf16")
    rows = list(bench_models.measure_vit(case, ("swapped",), bench()))
    assert [(r.provider, r.status, r.note) for r in rows] == [
        ("eager", OK, ""),
        ("swapped", OK, ""),
    ]
    assert all(r.images_per_s == 2000.0 for r in rows)


@pytest.mark.parametrize("swapped", [False, True])
def test_our_own_model_is_held_against_its_pytorch_path(monkeypatch, swapped):
    runner = Runner(Case("vit_mnist", 8, 1, "bf16", "infer"), Way(swapped=swapped), CPU)
    seen, logits = [], torch.ones(1, 1000)
    monkeypatch.setattr(runner.model, "forward", lambda x: seen.append(get_backend()) or logits)
    runner.step()
    assert seen == ["auto" if swapped else "torch"] and get_backend() == "auto"


# --- the plan's models


@pytest.fixture
def tiny():
    pytest.importorskip("timm")
    return Case("tiny", 16, 2, "bf16")


@pytest.fixture
def infer(tiny):
    return replace(tiny, mode="infer")


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_whole_models_run_and_pass_the_gate(tiny, mode):
    case = replace(tiny, mode=mode)
    names = ("swapped", "swapped+graph") if mode == "train" else ("swapped",)
    rows = list(bench_models.measure_vit(case, names, bench()))
    graphs = ("eager+graph",) if mode == "train" else ()  # what a graph is held against
    assert [(r.provider, r.status, r.note) for r in rows] == [
        (name, OK, "") for name in ("eager", *graphs, *names)
    ]
    assert all(r.images_per_s == 2000.0 for r in rows)  # two in 1 ms
    tflops = case.flops / 1e-3 / 1e12
    assert {(r.tflops, r.roof, r.roof_share) for r in rows} == {(tflops, "matmul", tflops / 0.1)}
    runner = Runner(case, WAYS["eager"], CPU)
    count, images = sum(p.numel() for p in runner.parameters), 2 * 3 * 16 * 16
    held = 2 * (count + images) + 8 * 2  # bf16, and the labels
    if mode == "train":  # AdamW's two moments, and a step of each
        held += 2 * 2 * count + 4 * len(runner.parameters)
    assert {r.peak_mib for r in rows if "graph" not in r.provider} == {3.0 + held / 2**20}
    assert all(isnan(r.peak_mib) for r in rows if "graph" in r.provider)


class ByWay(FakeTimer):
    """Each provider's turn takes its own time."""

    def __init__(self, **ms):
        super().__init__()
        self.by_name, self.turns, self.work = ms, [], None

    def sample(self, run, count, flush):
        self.turns.append(self.work.current)
        self.ms = self.by_name.get(self.work.current.replace("+", "_"), 1.0)
        return super().sample(run, count, flush)


def test_a_graph_is_held_against_a_graph(infer):
    """Beside eager calls, a graph's speed-up would be the launches that it saves anybody."""
    timer = ByWay(eager=8.0, eager_graph=4.0, swapped=4.0, swapped_graph=2.0)
    timer.work = work = bench(timer)
    rows = bench_models.measure_vit(infer, ("swapped", "swapped+graph"), work)
    assert {r.provider: r.speedup for r in rows} == {
        "eager": 1.0,
        "eager+graph": 1.0,
        "swapped": 2.0,
        "swapped+graph": 2.0,
    }


def test_what_is_compared_takes_turns_where_both_fit(infer, monkeypatch):
    """The clock of one that ran minutes later may be another; but several H do not fit."""
    assert Case("L", 224, 1).parameters < bench_models.ALONE < Case("H", 224, 1).parameters
    monkeypatch.setattr(bench_models, "_warm_up", lambda entry, *_: None)
    in_turns, alone = ["eager", "swapped"] * ROUNDS, ["eager"] * ROUNDS + ["swapped"] * ROUNDS
    for most, turns in ((bench_models.ALONE, in_turns), (0, alone)):
        monkeypatch.setattr(bench_models, "ALONE", most)
        timer = ByWay()
        timer.work = work = bench(timer)
        list(bench_models.measure_vit(infer, ("swapped",), work))
        assert timer.turns == turns


def test_a_graph_has_the_gradients_and_adamw_comes_after_it(tiny):
    """As max-autotune has it: or one side's optimizer would have no launches."""
    calls = []

    class Noting(FakeTimer):
        def capture(self, step):
            calls.append("capture")
            replay = super().capture(step)
            return lambda: (calls.append("replay"), replay())

    runner = Runner(tiny, WAYS["swapped+graph"], CPU)
    adamw = runner.optimizer.step
    runner.optimizer.step = lambda: (calls.append("AdamW"), adamw())
    step = runner.captured(Noting())
    before = [p.detach().clone() for p in runner.parameters]
    runner.optimizer.param_groups[0]["lr"] = 1e-2
    step()
    assert calls == ["capture", "replay", "AdamW"]
    assert not any(map(torch.equal, runner.parameters, before))


@pytest.mark.parametrize(("dtype", "low"), [("amp", torch.float32), ("bf16", torch.bfloat16)])
def test_the_oracle_is_the_host_in_float64_with_the_weights_that_are_measured(tiny, dtype, low):
    case = replace(tiny, dtype=dtype)
    runner, oracle = Runner(case, Way(), CPU), bench_models.Oracle(case, CPU)
    assert {x.dtype for x in (*runner.parameters, runner.images)} == {low}
    assert runner.logits().dtype == torch.bfloat16
    model = build(case, CPU).to(low).double()
    logits = model(runner.images.double())
    assert oracle.upstream.dtype == torch.bfloat16
    logits.backward(oracle.upstream.double())
    found, *grads = oracle.results.values()
    torch.testing.assert_close(found, logits.detach())
    for grad, p in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad)


def test_no_gradient_of_a_host_is_nothing(tiny):
    """Of a head of zeros every other gradient would be right."""
    runner = Runner(tiny, Way(), CPU)
    logits, *grads = runner.results(torch.randn(2, 1000)).values()
    assert logits.shape == (2, 1000)
    assert len(grads) == len(runner.parameters) and all(g.abs().max() > 0 for g in grads)


def _spoiled(case, monkeypatch, spoil):
    """The status and note of "swapped" where `spoil` has had the swapped model."""
    swap_in = compare.swap_in

    def swapped(model, **options):
        report = swap_in(model, **options)
        spoil(model)
        return report

    monkeypatch.setattr(compare, "swap_in", swapped)
    row = list(bench_models.measure_vit(case, ("swapped",), bench()))[1]
    return row.status, row.note, row.speedup


def test_the_gate_of_whole_models_looks_at_every_gradient(tiny, monkeypatch):
    """The norm's bias is a small part of all gradients as one vector."""

    def spoil(model):
        model.blocks[0].norm2.bias.register_hook(lambda d: 1.5 * d)

    status, note, speedup = _spoiled(tiny, monkeypatch, spoil)
    assert status == FAILED and "dblocks.0.norm2.bias" in note and isnan(speedup)


def test_a_swapped_model_that_runs_its_host_is_refused(tiny, monkeypatch):
    status, note, speedup = _spoiled(tiny, monkeypatch, swap_out)
    assert status == FAILED and "none of our kernels ran" in note and isnan(speedup)


@pytest.mark.parametrize("name", ["eager", "swapped", "swapped-low"])
def test_a_step_of_training_trains(tiny, name):
    """Every way: forward, loss, backward, and the optimizer."""
    runner = Runner(tiny, WAYS[name], CPU)
    runner.optimizer.param_groups[0]["lr"] = 1e-2  # for bf16 to show
    before = [p.detach().clone() for p in runner.parameters]
    loss = runner.step()
    assert not loss.requires_grad and len(runner.optimizer.state) == len(before)
    assert all(p.grad is None for p in runner.parameters)
    changed = [not torch.equal(p, old) for p, old in zip(runner.parameters, before, strict=True)]
    assert all(changed)
    assert runner.step() < loss and runner.model.training
    assert all(float(s["step"]) == 2 for s in runner.optimizer.state.values())


def test_a_step_of_inference_trains_nothing(infer):
    runner = Runner(infer, WAYS["swapped"], CPU)
    before = [p.detach().clone() for p in runner.parameters]
    assert not runner.step().requires_grad and not runner.model.training
    assert all(map(torch.equal, runner.parameters, before))


def test_a_graph_is_judged_by_what_its_replay_writes(infer):
    """Eager results would vouch for it: a capture that leaves kernels out stays hidden."""

    class Empty(FakeTimer):
        def capture(self, step):
            super().capture(step)
            return lambda: None

    *_, row = bench_models.measure_vit(infer, ("swapped+graph",), bench(Empty()))
    assert row.provider == "swapped+graph" and row.status == FAILED
    assert "logits" in row.note and isnan(row.speedup)


def test_dropped_samples_are_measured_without_the_gate(tiny):
    case = replace(tiny, drop_path=0.4)
    rows = list(bench_models.measure_vit(case, ("swapped", "swapped-skip"), bench()))
    assert [r.shape for r in rows] == ["timm-ViT-tiny-16-B2-drop0.4"] * 3
    assert all(r.ms == 1.0 and isnan(r.speedup) for r in rows)
    assert all("dropped samples are random" in r.note for r in rows)
    model = build(replace(case, model="Ti"), torch.device("meta"))
    assert max(getattr(m, "drop_prob", None) or 0.0 for m in model.modules()) > 0.39
