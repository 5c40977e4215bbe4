import functools
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from numerics import DEVICE

from fastvit_kernels.commands import check, cli
from fastvit_kernels.runtime.backend import get_backend
from fastvit_kernels.verify.accuracy import Error
from fastvit_kernels.verify.all_configs import Run
from fastvit_kernels.verify.cases import OPS, check_cases
from fastvit_kernels.verify.op import SMALL
from fastvit_kernels.verify.runner import Result, run_case

pytest.importorskip("rich")

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


def _error(name, share):
    return Error(name, share, share, 0.5, 0.5, 1.0, 1.0)


@pytest.fixture
def answers(monkeypatch):
    """What the cases and configs of `check` give, and what was asked."""
    given = SimpleNamespace(results=[], runs=[], left_out=0, asked=None)

    def some(found):
        def run(wanted):
            given.asked, wanted.left_out = wanted, given.left_out
            yield from getattr(given, found)

        return run

    monkeypatch.setattr(check, "run_cases", some("results"))
    monkeypatch.setattr(check, "run_configs", some("runs"))
    return given


def test_what_check_is_told_reaches_the_cases(answers, tmp_path, capsys):
    words = ["check", "--device", "cpu", "--only", "norm", "--jobs", "3", "--case-timeout", "7"]
    words += ["--keep", str(tmp_path / "kept"), "--time-budget", "5"]
    assert cli.main(words) == 0
    asked = answers.asked
    assert (asked.only, asked.jobs, asked.timeout, asked.budget) == ("norm", 3, 7, 5)
    assert asked.dtypes == ["fp32", "fp16"] and asked.device == torch.device("cpu")
    asked.kept.add(name="x")
    assert "x" in (tmp_path / "kept").read_text()
    assert cli.main(["check", "--device", "cpu"]) == 0
    asked = answers.asked
    assert (asked.jobs, asked.timeout, asked.budget) == (0, 300, float("inf"))


def test_the_row_of_a_case_is_the_one_nearest_its_limit(answers, capsys):
    errors = [_error(*e) for e in (("out0", 0.2), ("out1", 0.4), ("dx", 0.9), ("dweight", 0.3))]
    answers.results = [Result("a", "fp32", errors, None, 1.0), Result("b", "fp16", [], "no", 1.0)]
    words = ["check", "--device", "cpu"]
    assert cli.main(words) == 1
    out = capsys.readouterr().out
    assert [n for n in ("out0", "out1", "dx", "dweight") if f" {n} " in out] == ["out1", "dx"]
    assert "1 of 2 cases passed (4 outputs and gradients" in out and "b, fp16: no" in out
    assert cli.main([*words, "--all"]) == 1
    assert " dweight " in capsys.readouterr().out


@pytest.mark.parametrize("all_configs", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_what_time_left_out_is_neither_right_nor_wrong(answers, capsys, all_configs, wrong):
    words = ["check", "--device", "cpu", *["--all-configs"] * all_configs]
    share, fault = (2.0, "twice too much") if wrong else (0.5, None)
    answers.results = [Result("a", "fp32", [_error("out0", share)], None, 1.0)]
    answers.runs = [Run("layer_norm_fwd", None, "a", share, fault)]
    answers.left_out = 4
    assert cli.main(words) == 3
    assert "the time is over: 4 did not run" in capsys.readouterr().out
    answers.left_out = 0
    assert cli.main([*words, "--only", "a"]) == wrong
    assert cli.main(words) == (wrong or all_configs), "no other table was reached"


def test_the_row_of_a_table_has_its_worst_run(monkeypatch):
    table = SimpleNamespace(configs=(1, 2, 3))
    monkeypatch.setattr(check, "TABLES", {"a": table, "b": table, "c": table})
    runs = [Run("a", 1, "x", 0.25, None), Run("a", 2, "x", 0.5, None), Run("a", 2, "y", 0.1, None)]
    runs += [Run("b", 1, "x", 3.0, "wrong"), Run("b", 1, "y", 0.0, None)]
    assert check.config_rows(runs) == [
        ("a", "3", "2", "3", "0.50", "ok"), ("b", "3", "1", "2", "3.00", "1 FAILED"),
        ("c", "3", "0", "0", "0.00", "not reached"),
    ]  # fmt: skip


def test_check_rejects_an_unknown_case(capsys):
    assert cli.main(["check", "--only", "convolution"]) == 2
    assert "convolution: no case" in capsys.readouterr().err
