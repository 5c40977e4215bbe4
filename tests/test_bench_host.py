"""What a call costs the host, by a stand-in clock."""

from __future__ import annotations

from contextlib import nullcontext

import bench_stand_ins  # noqa: F401, finds bench
import pytest
import torch
from bench_stand_ins import CPU

import fastvit_kernels as fk
from bench import host
from bench.ops import BASELINE
from fastvit_kernels.verify.cases import OPS


def test_microseconds_are_of_a_call(monkeypatch):
    now, calls = [0], []
    monkeypatch.setattr(host.time, "process_time_ns", lambda: now[0])

    def call():
        calls.append(1)
        now[0] += 5000

    assert host.microseconds(call, CPU, 4) == 5.0 and len(calls) == 4


def test_rows_are_of_the_turns_after_the_first(monkeypatch):
    """In ms, beside eager; every provider has its own call in its own context."""
    us = {BASELINE: [900.0, 6.0, 4.0, 5.0], "ours": [900.0, 2.0, 3.0, 2.5]}
    at_work = []

    def microseconds(call, device, calls):
        provider, mode = call
        assert (provider, calls) == (at_work[0], host.CALLS)
        taken[provider, mode] = taken.get((provider, mode), -1) + 1
        return us[provider][taken[provider, mode]]

    class Context(nullcontext):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def __enter__(self):
            at_work[:] = [self.name]

    taken = {}
    monkeypatch.setattr(host, "ROUNDS", 3)
    monkeypatch.setattr(host, "models", lambda: ())
    monkeypatch.setattr(host, "cases", lambda device: {"mlp": host.Case({}, print, print)})
    monkeypatch.setattr(host, "call_of", lambda case, provider, mode: (provider, mode))
    monkeypatch.setattr(host, "microseconds", microseconds)
    monkeypatch.setattr(
        host, "ways", lambda device: {n: lambda n=n: Context(n) for n in (BASELINE, "ours")}
    )
    rows = list(host.measure_host(CPU))
    assert [(r.provider, r.mode) for r in rows] == [
        (p, m) for m in host.MODES for p in (BASELINE, "ours")
    ]
    for row, ms, speedup in zip(rows, 2 * [5e-3, 2.5e-3], 2 * [1.0, 2.0], strict=True):
        assert (row.ms, row.speedup) == (pytest.approx(ms), pytest.approx(speedup))
        assert row.ms_p20 <= row.ms <= row.ms_p80
        assert row.samples == 3 * host.CALLS and row.op == "host" and row.shape == "mlp"


def test_a_swapped_model_is_beside_its_host(monkeypatch):
    """The same weights; all that can run fused does, on one side alone."""
    pytest.importorskip("timm")
    reports, own = [], fk.swap_in
    monkeypatch.setattr(fk, "swap_in", lambda model: reports.append(own(model)))
    cases = {name: host.swapped_case(name, CPU) for name in host.models()}
    for name, case in cases.items():
        with fk.backend("torch"):
            ours, torch_ = case.ours(**case.inputs), case.torch(**case.inputs)
        torch.testing.assert_close(ours, torch_, rtol=1e-4, atol=1e-4)
        assert case.calls == (host.CALLS if "block" in name else host.CALLS // 5)
    assert [r.share for r in reports] == 3 * [1.0]


@pytest.mark.parametrize("name", list(OPS))
def test_both_sides_compute_the_same_of_the_same_tensors(name):
    """One tensor each, and in mode "both" the gradients of what is trained."""
    case, op = host.cases(CPU)[name], OPS[name]
    with fk.backend("torch"):
        whole = op.function(**case.inputs, **op.settings_of(op.at(host.SIZES), CPU))
        ours, torch_ = case.ours(**case.inputs), case.torch(**case.inputs)
    torch.testing.assert_close(ours, torch_)
    assert ours.shape == (whole[0] if isinstance(whole, tuple) else whole).shape
    assert any(x.requires_grad for x in case.inputs.values())
    for mode in host.MODES:
        for provider in (BASELINE, host.OURS):
            for x in case.inputs.values():
                x.grad = None
            with fk.backend("torch"):
                host.call_of(case, provider, mode)()
            trained = [x for x in case.inputs.values() if x.requires_grad]
            assert any(x.grad is not None for x in trained) == (mode == "both")


def test_a_side_calls_its_own_function():
    called = []
    case = host.Case(
        {"x": torch.ones(2)}, lambda x: called.append("ours"), lambda x: called.append("torch")
    )
    for provider in (BASELINE, host.OURS, host.NO_LAUNCH, host.ON_CPU):
        host.call_of(case, provider, "fwd")()
    assert called == ["torch", "ours", "ours", "ours"]


def test_without_launches_everything_is_put_back():
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    run, tiny = JITFunction.run, torch.full((1,), 1e-40)
    with host.without_launches():
        assert fk.get_backend() == "triton" and JITFunction.run is not run
        assert (tiny * 1.0).item() == 0.0 or not torch.set_flush_denormal(True)
    assert fk.get_backend() == "auto" and JITFunction.run is run
    assert (tiny * 1.0).item() > 0.0
