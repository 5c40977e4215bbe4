"""Calls in another order: what the first call of a swapped module is decides nothing for later
ones."""

from __future__ import annotations

import copy

import pytest
import torch
from outside import dino
from torch import nn

from fastvit_kernels import swap_in
from fastvit_kernels.swap import plans, prove, recognise
from tests.model_coverage.compare import randomize

timm = pytest.importorskip("timm")


def timm_block():
    from timm.models.vision_transformer import Block

    return Block(32, 2, init_values=0.5, qkv_bias=True)


def step(module, x):
    """Output and gradients."""
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in module.named_parameters()}


def assert_same(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        assert actual[name] is not None, name
        torch.testing.assert_close(
            actual[name],
            value,
            rtol=1e-3,
            atol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def x_of(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def under(context):
    def first(module):
        with context:
            module(x_of(2, 5, 32))

    return first


def in_dtype(dtype):
    def first(module):
        module.to(dtype)(x_of(2, 5, 32).to(dtype)).sum().backward()
        module.float()

    return first


def on_meta(module):
    state = copy.deepcopy(module.state_dict())
    module.to("meta")(x_of(2, 5, 32).to("meta"))
    module.to_empty(device="cpu").load_state_dict(state)


def frozen(module):
    module.requires_grad_(False)
    module(x_of(2, 5, 32))
    module.requires_grad_(True)


FIRST = {
    "no_grad": under(torch.no_grad()),
    "inference_mode": under(torch.inference_mode()),
    "autocast": under(torch.autocast("cpu", torch.bfloat16)),
    "evaluation": lambda m: (m.eval()(x_of(2, 5, 32)), m.train()),
    "other strides": lambda m: m(x_of(5, 2, 32).transpose(0, 1)).sum().backward(),
    "expanded": lambda m: m(x_of(1, 5, 32).expand(2, -1, -1)).sum().backward(),
    "every second": lambda m: m(x_of(2, 10, 64)[:, ::2, ::2]).sum().backward(),
    "another length": lambda m: m(x_of(2, 9, 32)).sum().backward(),
    "float64": in_dtype(torch.float64),
    "another device": on_meta,
    "frozen": frozen,
}


@pytest.mark.parametrize("make", [timm_block, dino.Block], ids=["table", "structure"])
@pytest.mark.parametrize("first", FIRST)
def test_the_first_call_decides_nothing_for_later_ones(first, make):
    """Nor does a verdict that is asked for there: all is forgotten before."""
    module = randomize(make())
    with torch.no_grad():
        weights = copy.deepcopy(module.state_dict())
    host = copy.deepcopy(module)
    assert swap_in(module).level == "block"
    for known in (plans.known, prove._proofs, prove._at_sizes, recognise._found):
        known.clear()
    FIRST[first](module)
    assert all(torch.equal(v, weights[n]) for n, v in module.state_dict().items())
    for x in (x_of(2, 5, 32), x_of(5, 2, 32).transpose(0, 1)):
        assert_same(step(module, x), step(host, x))
    assert module.fused_verdict() is None


def test_values_of_another_tensor_than_the_keys():
    """mha(x, x, v), mha(x, k, k), mha(x, k, v), after and before mha(x, x, x)."""
    host = nn.MultiheadAttention(16, 2, batch_first=True)
    module = copy.deepcopy(host)
    swap_in(module)
    x, k, v = (x_of(2, 5, 16) * n for n in (1, 2, 3))
    for call in ((x, x, v), (x, x, x), (x, x, v), (x, k, k), (x, k, x), (x, k, v), (x, x, x)):
        got, wanted = (m(*call, need_weights=False)[0] for m in (module, host))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_settings_are_read_at_each_call():
    host = randomize(timm_block())
    module = copy.deepcopy(host)
    swap_in(module)
    x = x_of(2, 5, 32)
    for eps in (1e-6, 0.5, 1e-6, 0.1):
        host.norm1.eps = module.norm1.eps = eps
        assert_same(step(module, x), step(host, x))


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_a_global_hook_sees_each_call_as_in_the_host(kind):
    """And none once it is gone."""
    host = randomize(timm_block())
    module, seen = copy.deepcopy(host), []
    swap_in(module)
    x = x_of(2, 5, 32)
    module(x)
    register = getattr(nn.modules.module, f"register_module_{kind}")
    with register(lambda m, *a: seen.append(getattr(m, "fused_host", type(m)).__name__)):
        module(x)
        ours = seen[:]
        seen.clear()
        host(x)
    assert ours == seen and len(seen) > 10
    seen.clear()
    module(x)
    assert not seen
