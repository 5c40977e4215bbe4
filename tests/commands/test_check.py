import functools
import json
import os
import re
from dataclasses import replace

import pytest
import torch
from numerics import DEVICE

from fastvit_kernels.accuracy.accuracy import Error
from fastvit_kernels.accuracy.cases import OPS, check_cases
from fastvit_kernels.accuracy.op import SMALL
from fastvit_kernels.accuracy.runner import Result, run_case
from fastvit_kernels.commands import check, cli
from fastvit_kernels.runtime.backend import get_backend

CASES = {case.name: case for case in check_cases(SMALL, DEVICE, torch.float32)}


def test_every_op_has_a_case():
    assert {name.split(",")[0] for name in CASES} == {*OPS, "VisionTransformer"}
    assert len(CASES) >= 22


@pytest.mark.parametrize("name", CASES)
def test_case_passes_and_has_gradients(name):
    result = run_case(CASES[name], "fp32")
    assert result.passed, [str(e) for e in result.errors] + [result.failure]
    names = [e.name for e in result.errors]
    assert any(n.startswith("d") for n in names) and any(not n.startswith("d") for n in names)
    assert get_backend() == "auto"


def _wrong_value(op):
    return lambda *args, **kwargs: op(*args, **kwargs) * 1.001


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * 1.01


def _wrong_gradient(op):
    return lambda *args, **kwargs: _WrongGradient.apply(op(*args, **kwargs))


def _raises(op):
    def broken(*args, **kwargs):
        raise RuntimeError("out of shared memory")

    return broken


@pytest.mark.parametrize("breakage", [_wrong_value, _wrong_gradient, _raises])
def test_check_notices_a_broken_kernel(monkeypatch, capsys, breakage):
    words = ["check", "--only", "patch_embed", "--dtype", "fp32"]
    op = OPS["patch_embed"]
    monkeypatch.setitem(
        OPS,
        "patch_embed",
        replace(op, function=functools.wraps(op.function)(breakage(op.function))),
    )
    assert cli.main(words) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and re.search(r"\b0 of \d+ cases passed", out)
    assert cli.main([*words, "--json"]) == 1
    *cases, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert not summary["passed"] and not any(case["passed"] for case in cases)
    assert summary["failed"][0] == "patch_embed, fp32" and len(summary["failed"]) == len(cases)


def test_check_prints_a_table_and_json(capsys):
    words = ["check", "--only", "layer_norm_and"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "layer_norm_and_input" in out and "PyTorch's" in out and "fp16" in out
    assert ("bf16" in out.split("bf16 needs")[0]) == torch.cuda.is_available()

    assert cli.main([*words, "--json"]) == 0
    first, *_, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert summary["passed"] is True and summary["versions"]["torch"] == torch.__version__
    tensors = first["tensors"]
    assert [t["name"] for t in tensors] == ["out0", "out1", "dx", "dweight", "dbias"]
    assert all(t["max"] <= t["limit_max"] for t in tensors)
    check.print_json({"max": [float("nan"), 1.0, {"rms": float("inf")}]})
    assert capsys.readouterr().out == '{"max": [null, 1.0, {"rms": null}]}\n'


def _error(name, share):
    return Error(name, share, share, 0.5, 0.5, 1.0, 1.0)


def test_the_row_of_a_case_is_the_one_nearest_its_limit(monkeypatch, capsys):
    errors = [_error(*e) for e in (("out0", 0.2), ("out1", 0.4), ("dx", 0.9), ("dweight", 0.3))]
    results = [Result("a", "fp32", errors, None, 1.0), Result("b", "fp16", [], "no", 1.0)]
    monkeypatch.setattr(check, "run_cases", lambda *_: iter(results))
    words = ["check", "--device", "cpu"]
    assert cli.main(words) == 1
    out = capsys.readouterr().out
    assert [n for n in ("out0", "out1", "dx", "dweight") if f" {n} " in out] == ["out1", "dx"]
    assert "1 of 2 cases passed (4 outputs and gradients" in out and "b, fp16: no" in out
    assert cli.main([*words, "--all"]) == 1
    assert " dweight " in capsys.readouterr().out


def _dies(device, dtype, name):
    os._exit(1)


@pytest.mark.parametrize(("given", "jobs"), [([], 8), (["--jobs", "0"], 0), (["--jobs", "3"], 3)])
def test_how_many_processes_on_a_gpu(given, jobs, monkeypatch):
    monkeypatch.setattr(check.options, "chosen_device", lambda arguments: torch.device("cuda"))
    monkeypatch.setattr(check.options, "require_kernels", lambda *given: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    arguments = cli.build_parser(["check"]).parse_args(["check", "--device", "cuda", *given])
    assert check.selected(arguments)[2] == jobs


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has processes by default")
def test_check_in_processes_gives_what_this_process_gives(monkeypatch, capsys):
    words = ["check", "--only", "layer_norm_and", "--dtype", "fp32", "--json"]
    printed = []
    for jobs in ("0", "2"):
        assert cli.main([*words, "--jobs", jobs]) == 0
        *cases, _ = map(json.loads, capsys.readouterr().out.splitlines())
        printed.append(sorted((c["name"], [t["max"] for t in c["tensors"]]) for c in cases))
    assert [name for name, _ in printed[0]] == [name for name, _ in printed[1]]
    for (_, here), (_, there) in zip(*printed, strict=True):
        assert here == pytest.approx(there, rel=1e-3)
    monkeypatch.setattr(check, "_run_named", _dies)
    assert cli.main([*words, "--jobs", "1"]) == 1
    *cases, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert summary["failed"] == [f"{c['name']}, fp32" for c in cases]
    assert all("BrokenProcessPool" in c["failure"] for c in cases)
