"""What the harness does around a measurement: contexts, names, failures in the turns, rates."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import replace
from math import isnan
from types import SimpleNamespace

import pytest
import torch
from bench_stand_ins import (
    CPU,
    TINY,
    FakeTimer,
    bench,
    few_rounds,  # noqa: F401, a fixture by its name
    with_providers,
)
from torch.autograd.graph import saved_tensors_hooks

from bench import measure, ops
from bench.measure import Entry, measure_op, row_of
from bench.ops import OPS, Provider, plain
from bench.rows import ERROR, OK
from fastvit_kernels.accuracy.op import Draw
from fastvit_kernels.measure.gate import MEMORY
from fastvit_kernels.measure.timer import spread
from fastvit_kernels.measure.turns import ROUNDS
from fastvit_kernels.ops.attention.configs import (
    BWD_TABLE as ATTENTION_BWD,
    FWD_TABLE as ATTENTION_FWD,
)
from fastvit_kernels.ops.attention.functions import attention_ref
from fastvit_kernels.ops.attention.varlen import varlen_attention_ref
from fastvit_kernels.ops.common.gemm_configs import FWD_TABLE
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.configs import recording
from fastvit_kernels.runtime.triton import has_gluon

OP = OPS["layer_norm"]


class Eager(FakeTimer):
    """Without graphs, which replay outside of a context."""

    def capture(self, step):
        raise RuntimeError("not captured")


def with_provider(provider: Provider):
    return with_providers(OP, lambda *_: [*OP.providers(TINY, "fp32")[:1], provider])


def measured(provider, timer=None, modes=("fwd",), work=None):
    rows = measure_op(
        with_provider(provider), TINY, "fp32", modes, (provider.name,), work or bench(timer)
    )
    return {(r.provider, r.mode): r for r in rows}


def norm(x, weight, bias):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)


def test_a_provider_runs_in_its_context_whenever_it_is_timed():
    """Outside of it a forced route is not forced, and the row is of another one."""
    inside, seen = [], []

    @contextmanager
    def context():
        inside.append(1)
        yield
        inside.pop()

    def function(**inputs):
        seen.append(bool(inside))
        return norm(**inputs)

    rows = measured(plain("forced", function, context=context), Eager(), ("fwd", "bwd"))
    assert rows["forced", "bwd"].status == OK and isnan(rows["forced", "bwd"].graph_ms)
    assert len(seen) > ROUNDS and all(seen)


@pytest.mark.parametrize("turns", [0, 2])
@pytest.mark.parametrize(
    ("error", "status"), [(torch.OutOfMemoryError("full"), MEMORY), (ValueError("bad"), ERROR)]
)
def test_what_fails_while_it_is_timed_leaves_the_others(turns, error, status):
    """In the warm-up, and in the turns; what it held is given back."""
    work = bench()

    class Fails(FakeTimer):
        left, cleared = turns, 0

        def sample(self, run, count, flush):
            if work.current == "fails":
                self.left -= 1
                if self.left < 0:
                    raise error
            return super().sample(run, count, flush)

        def clear(self):
            self.cleared += work.current == "fails"

    work.timer = timer = Fails()
    rows = measured(plain("fails", norm), work=work)
    row = rows["fails", "fwd"]
    assert row.status == status and isnan(row.ms) and str(error) in row.note
    assert rows["eager", "fwd"].status == OK and rows["eager", "fwd"].samples == 2 * ROUNDS
    assert timer.cleared


def test_sdpa_has_q_k_and_v_of_their_own():
    """Its backward is timed to dq, dk and dv; the gate sees the gradient of the packed qkv."""
    op, timed = OPS["attention"], []
    (provider,) = (p for p in ops.sdpa_unpacked() if p.name == "sdpa-flash-unpacked")
    qkv = op.inputs(TINY, Draw(CPU, torch.float32))["qkv"]
    taken = provider.takes({"qkv": qkv})
    assert list(taken) == ["q", "k", "v"]
    for x, packed_x in zip(taken.values(), qkv.unbind(2), strict=True):
        assert torch.equal(x, packed_x.transpose(1, 2)) and x.is_contiguous()

    def noting(q, k, v):
        timed.append([x.is_leaf and x.requires_grad for x in (q, k, v)])
        return provider.make()(q, k, v)

    def wrong(q, k, v):
        return provider.make()(q, v, k)

    noted = replace(provider, name="noted", make=lambda: noting)
    swapped = replace(provider, name="wrong", make=lambda: wrong)
    first = op.providers(TINY, "fp32")[0]
    op = with_providers(op, lambda *_: [first, noted, swapped])
    rows = {
        r.provider: r for r in measure_op(op, TINY, "fp32", ("bwd",), ("noted", "wrong"), bench())
    }
    assert rows["noted"].status == OK and rows["wrong"].status != OK
    assert timed[0] == [False] * 3 and timed[-1] == [True] * 3  # the gate, then the turns


def test_rates_are_of_the_devices_time_under_the_roof_of_the_products_dtype():
    roofs = {"copy": 1e9, "bf16": 2.0, "fp32": 1.0}
    row = replace(row_of("layer_norm", "ours", TINY, "bf16", "fwd"), ms=8.0, graph_ms=2.0)
    found = measure.with_rates(row, OP, TINY, roofs)
    flops, moved = OP.flops(TINY, "fwd"), OP.bytes(TINY, "bf16", "fwd")
    assert found.tflops == pytest.approx(flops / 2e-3 / 1e12)
    assert found.gbps == pytest.approx(moved / 2e-3 / 1e9)
    assert found.roof == "matmul" and found.roof_share == pytest.approx(found.tflops / 2.0)


def test_a_row_has_median_and_spread_of_its_samples():
    times = [float(i) for i in range(11)]
    assert spread(times[::-1]) == (5.0, 2.0, 8.0)
    entry = Entry("ours", norm, times=times, graph_times=[3.0, 1.0, 2.0])
    row = entry.finish(row_of("mlp", "ours", TINY, "bf16", "fwd"))
    assert (row.ms, row.ms_p20, row.ms_p80, row.graph_ms, row.samples) == (5.0, 2.0, 8.0, 2.0, 11)


def test_inputs_are_the_same_at_every_run():
    first, second = (Draw(CPU, torch.float32, CPU)(64, 64, scale=0.25) for _ in range(2))
    assert torch.equal(first, second) and first.requires_grad
    assert first.std().item() == pytest.approx(0.25, rel=0.05)
    assert not Draw(CPU, torch.float32)(2, grad=False).requires_grad


def test_attention_goes_image_by_image_in_float64(monkeypatch):
    """The scores of all images do not fit; the numbers are the same, and so are the gradients."""
    op, shape, seen = OPS["attention"], replace(TINY, B=2), []
    qkv = op.inputs(shape, Draw(CPU, torch.float64))["qkv"]
    monkeypatch.setattr(ops, "attention_ref", lambda x: seen.append(len(x)) or attention_ref(x))
    results = []
    for reference in (attention_ref, op.reference(shape)):
        y = reference(qkv)
        results.append((y, *torch.autograd.grad(y.square().sum(), qkv)))
    assert seen == [1] * 4  # each again in the backward
    torch.testing.assert_close(*results)


# --- providers


@pytest.mark.parametrize("name", ["linear", "mlp"])
def test_a_forced_route_is_taken(name):
    ways = {p.name: p for p in OPS[name].providers(replace(TINY, variant="proj"), "fp32")}
    here, key = Gpu("sm_90", 132, 227 * 1024), (16384, 768, 768, "bf16")
    for route in ("library", "triton"):
        with ways[f"ours-{route}"].context():
            assert FWD_TABLE.choose(here, *key).route == route
    with ways["ours"].context():
        assert FWD_TABLE.choose(here, *key) == FWD_TABLE.default(here, *key)


@pytest.mark.parametrize(
    ("B", "T", "others"),
    [
        (1, 197, ["library"]),
        (1, 2305, ["library", "triton"]),
        (66, 197, ["library", "triton"]),
    ],
)
def test_attention_is_timed_by_the_other_routes_too(B, T, others):
    """Where Gluon is the default, by plain Triton too."""
    if B > 1 and not has_gluon():
        pytest.skip("triton is not installed, or has another Gluon")
    with on_absent_gpu(Gpu("sm_90", 132, 227 * 1024)):
        ways = {
            p.name: p
            for p in OPS["attention"].providers(replace(TINY, B=B, T=T, C=128, H=2), "bf16")
        }
    assert {"ours-library", "ours-triton"} & set(ways) == {f"ours-{other}" for other in others}
    here, key = Gpu("sm_80", 108, 163 * 1024), ("bf16", 64, 4096, "none", "many")
    for other in others:
        with ways[f"ours-{other}"].context():
            assert {t.choose(here, *key).route for t in (ATTENTION_FWD, ATTENTION_BWD)} == {other}
    assert not {"ours-library", "ours-triton"} & {
        p.name for p in OPS["attention"].providers(replace(TINY, T=T), "fp32")
    }


def test_the_split_backward_is_split():
    inputs = OPS["attention"].inputs(TINY, Draw(CPU, torch.float32))
    ways = {p.name: p for p in OPS["attention"].providers(TINY, "fp32")}
    tables = {}
    for name in ("ours", "ours-split"):
        with ways[name].context(), recording() as choices:
            ways[name].make()(**inputs).sum().backward()
        tables[name] = {choice.table for choice in choices}
    assert "attention_bwd_one_pass" in tables["ours"] - tables["ours-split"]
    assert "attention_bwd_dq" in tables["ours-split"] - tables["ours"]


@pytest.mark.parametrize("name", ["mlp", "gated_mlp"])
def test_what_stores_keeps_more_than_what_recomputes(name):
    op, kept = OPS[name], {}
    shape = replace(TINY, variant="packed" if name == "gated_mlp" else "")
    inputs = op.inputs(shape, Draw(CPU, torch.bfloat16))
    for provider in op.providers(shape, "bf16"):
        if provider.name in ("ours", "ours-stored"):
            saved = {}

            def pack(x, saved=saved):
                saved[x.data_ptr()] = x
                return x

            with provider.context(), saved_tensors_hooks(pack, lambda x: x):
                provider.make()(**inputs)
            kept[provider.name] = sum(x.numel() for x in saved.values())
    assert kept["ours-stored"] > kept["ours"]


def reference(q, k, v):
    return attention_ref(torch.stack((q, k, v), 2))


def peers(longest):
    """By module, what bench calls of each, as PyTorch computes it."""

    def run(q, k, v, starts, starts_k, most, most_k):
        assert starts is starts_k and most == most_k == longest
        return varlen_attention_ref(torch.stack((q, k, v), 1), starts, most)

    return {
        "flash_attn.cute": dict(flash_attn_func=lambda *qkv: (reference(*qkv), None)),  # the lse
        "torch.nn.attention.varlen": dict(varlen_attn=run),
    }


@pytest.mark.parametrize(("name", "variant"), [("attention", ""), ("varlen_attention", "spread")])
def test_peers_are_asked_for_what_ours_computes(monkeypatch, name, variant):
    """On modules that stand in for theirs: arguments, layouts and eps are those of the op."""
    op, shape = OPS[name], replace(TINY, B=3, variant=variant)
    found = peers(shape.T)
    for module, functions in found.items():
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**functions))
    given = [p.name for p in op.providers(shape, "bf16") if p.package in found]
    names = [name for name in given if name != "flex-flash"]  # torch's own, of a GPU
    rows = list(measure_op(op, shape, "bf16", ("fwd",), names, bench()))
    assert [(r.provider, r.status, r.note) for r in rows[1:]] == [(n, OK, "") for n in names]
    assert names
