"""`fastvit-kernels check`: every op passes, what is wrong is noticed, processes lose no case."""

import functools
import json
import os
import re
from dataclasses import replace

import pytest
import torch

from fastvit_kernels.accuracy.accuracy import Error
from fastvit_kernels.accuracy.cases import OPS
from fastvit_kernels.accuracy.runner import Result, run_case
from fastvit_kernels.commands import check, cli
from fastvit_kernels.runtime.backend import get_backend


def run_json(capsys, *words):
    """Exit status, the line of each case, the summary; JSON has no NaN."""
    status = cli.main(["check", *words, "--dtype", "fp32", "--json"])
    lines = capsys.readouterr().out.splitlines()
    *cases, summary = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    return status, cases, summary


def test_every_case_of_every_op_passes(capsys):
    status, cases, summary = run_json(capsys)
    assert status == 0 and summary["passed"] and summary["versions"]["torch"] == torch.__version__
    assert {case["name"].split(",")[0] for case in cases} == {*OPS, "VisionTransformer"}
    for case in cases:
        tensors = case["tensors"]
        assert case["passed"] and all(t["max"] <= t["limit_max"] for t in tensors), case
        assert {t["name"].startswith("d") for t in tensors} == {True, False}, case
    assert get_backend() == "auto"


BREAKAGES = {
    "value": lambda y: y * 1.001,
    "nan": lambda y: y * float("nan"),
    "gradient": lambda y: y.detach() + 1.01 * (y - y.detach()),
    "raises": lambda y: y.view(-7),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_broken_kernel_is_noticed(monkeypatch, capsys, breakage):
    op = OPS["patch_embed"]

    @functools.wraps(op.function)
    def broken(*args, **kwargs):
        return BREAKAGES[breakage](op.function(*args, **kwargs))

    monkeypatch.setitem(OPS, "patch_embed", replace(op, function=broken))
    status, cases, summary = run_json(capsys, "--only", "patch_embed")
    assert status == 1 and not summary["passed"] and not any(case["passed"] for case in cases)
    assert summary["failed"] == [f"{case['name']}, fp32" for case in cases]


def test_the_table(capsys):
    assert cli.main(["check", "--only", "layer_norm_and"]) == 0
    out = capsys.readouterr().out
    assert "layer_norm_and_input" in out and "PyTorch's" in out and "fp16" in out
    assert ("bf16" in out.split("bf16 needs")[0]) == torch.cuda.is_available()
    assert re.search(r"\b(\d+) of \1 cases passed", out)


def test_the_rows_of_a_case_are_those_nearest_their_limits(monkeypatch, capsys):
    shares = dict(out0=0.2, out1=0.4, dx=0.9, dweight=0.3)
    errors = [Error(name, x, x, 0.5, 0.5, 1.0, 1.0) for name, x in shares.items()]
    results = [Result("a", "fp32", errors, None, 1.0), Result("b", "fp16", [], "no", 1.0)]
    monkeypatch.setattr(check, "run_cases", lambda *_: iter(results))
    words = ["check", "--device", "cpu"]
    assert cli.main(words) == 1
    out = capsys.readouterr().out
    assert [name for name in shares if f" {name} " in out] == ["out1", "dx"]
    assert "1 of 2 cases passed (4 outputs and gradients" in out and "FAILED b, fp16: no" in out
    assert cli.main([*words, "--all"]) == 1
    assert " dweight " in capsys.readouterr().out


@pytest.mark.parametrize(("given", "jobs"), [([], 8), (["--jobs", "0"], 0), (["--jobs", "3"], 3)])
def test_how_many_processes_on_a_gpu(given, jobs, monkeypatch):
    monkeypatch.setattr(check.options, "chosen_device", lambda arguments: torch.device("cuda"))
    monkeypatch.setattr(check.options, "require_kernels", lambda *given: None)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    arguments = cli.build_parser(["check"]).parse_args(["check", *given])
    assert check.selected(arguments)[2] == jobs


def _dies_at_rms_norm(device, dtype, name):
    if name.startswith("rms_norm"):
        os._exit(1)
    (case,) = (case for case in check.cases_on(device, dtype) if case.name == name)
    return run_case(case, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has processes by default")
def test_a_process_that_dies_fails_its_own_case(monkeypatch, capsys):
    monkeypatch.setattr(check, "_run_named", _dies_at_rms_norm)
    status, cases, summary = run_json(capsys, "--only", "norm_and_input", "--jobs", "1")
    by_name = {case["name"]: case for case in cases}
    lost = [name for name in by_name if name.startswith("rms_norm")]
    assert status == 1 and summary["failed"] == [f"{name}, fp32" for name in lost]
    assert all("BrokenProcessPool" in by_name[name]["failure"] for name in lost)
    names = [t["name"] for t in by_name["layer_norm_and_input"]["tensors"]]
    assert len(lost) < len(cases) and names == ["out0", "out1", "dx", "dweight", "dbias"]
