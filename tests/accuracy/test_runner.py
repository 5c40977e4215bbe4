"""The shipped checker, without the help of conftest.py."""

from __future__ import annotations

import pytest
import torch
from numerics import DEVICE, rand

import fastvit_kernels as fk
from fastvit_kernels.accuracy.accuracy import Reference
from fastvit_kernels.accuracy.op import Case
from fastvit_kernels.accuracy.runner import poisoned, run_case
from fastvit_kernels.ops.norm.functions import layer_norm_ref
from tests.check.all_configs import Fault, check


@pytest.fixture(autouse=True)
def _own_poison(_poisoned_memory):
    """Tests fill `torch.empty` with NaN: here the checker has to."""
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False


def case_of(function, specification=layer_norm_ref):
    inputs = {"x": rand(6, 32), "weight": rand(32, seed=1), "bias": rand(32, seed=2)}
    return Case("a case", function, specification, lambda: dict(inputs))


def fill_of():
    return torch.empty(1000, device=DEVICE).isnan().all().item()


def settings():
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    return torch.are_deterministic_algorithms_enabled(), warns, filled


def test_poisoned_context():
    for is_on, warns in ((False, False), (True, True), (True, False)):
        torch.use_deterministic_algorithms(is_on, warn_only=warns)
        former = settings()
        with poisoned(), poisoned():
            assert fill_of() and torch.is_deterministic_algorithms_warn_only_enabled()
        assert settings() == former


@pytest.mark.parametrize("way", ["run_case", "check"])
def test_poisoned_outputs(way):
    seen = []

    def unwritten(x, weight, bias):
        seen.append(fill_of())
        fk.layer_norm(x, weight, bias)  # leaves the right numbers where the next one may lie
        y = torch.empty_like(x)
        return y + 0 * (x + weight + bias)

    case = case_of(unwritten)
    if way == "run_case":
        assert not run_case(case, "fp32").passed
    else:
        with pytest.raises(Fault, match="out: max inf"):
            check(case.reference, unwritten)
    assert seen and all(seen)


def test_run_case_requires_kernels():
    """Under "auto" a call that no kernel takes would compare PyTorch with itself."""
    seen = []

    def noted(**inputs):
        seen.append(fk.get_backend())
        return fk.layer_norm(**inputs)

    assert run_case(case_of(noted), "fp32").passed
    assert seen == ["triton"] and fk.get_backend() == "auto"
    double = Case("float64", noted, layer_norm_ref, lambda: {"x": torch.ones(2, 8).double()})
    assert "the backend is 'triton', but there is no kernel" in run_case(double, "fp32").why


class Restless(torch.autograd.Function):
    """Other last bits at each call, of the output or of the gradient."""

    calls = 0

    @staticmethod
    def forward(ctx, x, of_output):
        ctx.of_output, Restless.calls = of_output, Restless.calls + 1
        return x * (1 + 2**-23 * (Restless.calls % 2)) if of_output else x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy if ctx.of_output else dy * (1 + 2**-23 * (Restless.calls % 2)), None


@pytest.mark.parametrize(
    ("of_output", "argument", "name"),
    [(True, "x", "output 0"), (False, "x", "dx"), (False, "bias", "dbias")],
)
def test_check_equal_bits(of_output, argument, name):
    def restless(**inputs):
        changed = {argument: Restless.apply(inputs[argument], of_output)}
        return fk.layer_norm(**(inputs | changed))

    def settled(x, **rest):
        return fk.layer_norm(x.clone(), **rest)

    case = case_of(restless)
    with pytest.raises(Fault, match=f"two runs give different bits in {name}"):
        check(case.reference, restless)
    share = check(case.reference, settled)
    assert 0 < share < 1 and share == max(e.share for e in case.reference.errors(settled))
    assert check(case.reference, restless, repeats=1) < 1


def test_check_finds_wrong_gradient():
    def wrong(x, weight, bias):
        return fk.layer_norm(x, weight, 0.99 * bias + 0.01 * bias.detach())

    reference = Reference(layer_norm_ref, case_of(wrong).make())
    with pytest.raises(Fault, match=r"^dbias: "):
        check(reference, wrong)
