"""What a caller sees of a forward besides its result: tensors that it kept or gave twice, order of
draws, rows of a mask, state after an error."""

from __future__ import annotations

import copy
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastvit_kernels import status, swap_in
from tests.fuse.kit import C, D, H, Kit, join, packed, sdpa, softmax_attention

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
T = 9


def tokens(seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, T, C, generator=generator, dtype=torch.float64)


def both(forward, run, dtype=torch.float64, is_fused=True):
    """What `run` gives of a host and of its swapped copy, after one seed."""
    torch.manual_seed(0)
    host = Kit(forward).to(dtype)
    model, found = copy.deepcopy(host), []
    swap_in(model)
    for m in (host, model):
        torch.manual_seed(1)
        found.append(run(m))
    assert not is_fused or status(model).share > 0
    return found


def assert_same(forward, run, **how):
    wanted, actual = both(forward, run, **how)
    torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12, equal_nan=True)


def shifted(kit, x, y):
    h = kit.q(y)
    x.add_(1.0)
    return kit.o(F.gelu(h))


def counted(kit, x, y):
    h = kit.q(y)
    kit.peak.add_(1.0)
    return kit.o(F.gelu(h)) + x + kit.peak


@torch.no_grad()
@pytest.mark.parametrize("part", [torch.detach, lambda x: x[:], lambda x: torch.from_dlpack(x)])
def test_inputs_that_share_memory_after_the_first_call(part):
    def run(m):
        m(tokens(), tokens(4))
        x = tokens()
        return [m(x, part(x)), m(tokens(), tokens(4)), x]

    assert_same(shifted, run)


@torch.no_grad()
def test_a_buffer_that_comes_as_an_input_after_the_first_call():
    def run(m):
        m(tokens(), tokens(4))
        m.peak = torch.zeros(2, T, C, dtype=torch.float64)
        m(tokens(), tokens(4))
        return [m(tokens(), m.peak[:]), m.peak]

    assert_same(counted, run)


def of_tokens(kit, image):
    h = image.flatten(2).mT.contiguous()
    normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * kit.ls
    return h + kit.q(normed), h


def of_queries(kit, x):
    q, k, v = (z.contiguous() for z in packed(kit, x))
    kit.seen = q

    def turned(z):
        return z * kit.cos[:T] + torch.cat((-z[..., D // 2 :], z[..., : D // 2]), -1) * kit.sin[:T]

    return kit.o(join(sdpa(turned(q), turned(k), v)))


def of_classes(kit, x):
    many = kit.cls.expand(len(x), -1, -1)
    return torch.cat((many, kit.conv(x).flatten(2).mT), 1), many


IMAGE = torch.randn(2, C, 3, 3, dtype=torch.float64)
SHOWN = {
    "tokens": (of_tokens, IMAGE),
    "queries that a module notes": (of_queries, tokens()),
    "class tokens": (of_classes, torch.randn(2, 3, 12, 12, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", SHOWN)
def test_a_gradient_of_what_the_caller_got_and_a_hook_on_it(name):
    """As Grad-CAM asks for it."""
    forward, given = SHOWN[name]

    def run(m):
        found = []
        for hook in (None, lambda g: g * 0):
            x = given.clone().requires_grad_()
            out = m(x)
            y, h = out if isinstance(out, tuple) else (out, m.seen)
            if hook is not None:
                h.register_hook(hook)
            found += torch.autograd.grad(y.square().sum(), [h, m.q.weight, x], allow_unused=True)
        return found

    assert_same(forward, run, is_fused=False)


class Drop(torch.autograd.Function):
    """Draws, and no compiler knows that it does."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = torch.rand_like(x) > 0.4
        return x * ctx.kept

    @staticmethod
    def backward(ctx, g):
        return g * ctx.kept


def test_draws_of_what_is_unknown_keep_their_place():
    def forward(kit, x):
        out = sdpa(*packed(kit, x), dropout_p=0.3)
        gate = Drop.apply(kit.q(x)).sigmoid()
        return kit.o(join(out) * gate)

    assert_same(forward, lambda m: m(tokens()).square().sum())


def biased(kit, x, bias):
    q, k, v = packed(kit, x)
    return kit.o(join(softmax_attention(q, k, v, bias)))


def padded(fill, dtype=torch.float64):
    bias = torch.zeros(2, 1, T, T, dtype=dtype)
    bias[1, :, 4:] = fill
    return bias


def test_a_row_that_the_callers_bias_hides_is_nan():
    def run(m):
        table = torch.randn(1, H, T, T, dtype=torch.float64).requires_grad_()
        return m(tokens(), table + padded(-math.inf))

    assert_same(biased, run)


WIDE = [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)]


@pytest.mark.parametrize(("dtype", "wide"), WIDE, ids=str)
def test_a_mask_of_a_wider_dtype_than_the_heads_is_added_as_it_is(dtype, wide):
    """A row of the least finite number is the mean of the values; of -inf it would be 0."""
    mask = padded(torch.finfo(wide).min, wide)

    def written(kit, x):
        q, k, v = packed(kit, x)
        return kit.o(join((q @ k.mT * D**-0.5 + mask).softmax(-1).to(v.dtype) @ v))

    def given(kit, x):
        return kit.o(join(sdpa(*packed(kit, x), attn_mask=mask)))

    for forward in (written, given)[: 2 if wide == torch.float32 else 1]:
        wanted, actual = both(forward, lambda m: m(tokens().to(dtype)), dtype, is_fused=False)
        torch.testing.assert_close(actual, wanted, rtol=0.05, atol=0.01)


def test_what_ran_twice_before_an_error_is_said():
    def forward(kit, x):
        kit.peak.add_(1.0)
        torch._dynamo.graph_break()
        return kit.fc2(x)

    model = Kit(forward)
    swap_in(model)
    with (
        pytest.warns(RuntimeWarning, match="what comes before that ran twice"),
        pytest.raises(RuntimeError, match="cannot be multiplied"),
    ):
        model(torch.randn(2, T, C))


class Streams(nn.Linear):
    def forward_features(self, x):
        yield super().forward(x)

    async def forward_later(self, x):
        return super().forward(x)


def test_generators_and_coroutines_stay_the_hosts():
    model = Streams(8, 8)
    swap_in(model)
    assert inspect.isgenerator(model.forward_features(torch.randn(2, 8)))
    assert inspect.iscoroutinefunction(model.forward_later)


def test_an_example_leaves_a_buffer_that_the_forward_assigns():
    def forward(kit, x):
        kit.peak = kit.peak + 1
        return kit.o(x)

    model = Kit(forward)
    swap_in(model, example=torch.randn(2, T, C))
    assert model.peak == 0
