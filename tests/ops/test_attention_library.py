"""Attention by the library's kernels: on a CPU torch's flash kernel stands for those of a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand
from private import FakeTensorMode, set_deterministic
from test_attention import qkv_layouts
from test_sdpa import heads
from torch import library as torch_library
from torch.nn.attention import SDPBackend

from fastvit_kernels.ops.attention import configs, cudnn, launch
from fastvit_kernels.ops.attention.configs import LIBRARY_BWD, LIBRARY_FWD
from fastvit_kernels.ops.attention.functions import attention, attention_ref
from fastvit_kernels.ops.attention.projected import qkv_attention, qkv_attention_ref
from fastvit_kernels.ops.attention.rotary import rope_attention, rope_attention_ref
from fastvit_kernels.ops.attention.sdpa import scaled_dot_product_attention as sdpa
from fastvit_kernels.ops.attention.varlen import varlen_attention
from fastvit_kernels.ops.common import gemm
from fastvit_kernels.runtime.backend import Gpu
from fastvit_kernels.runtime.compat import CUDNN, FLASH, torch_sdpa
from fastvit_kernels.runtime.configs import forced

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
TAKEN = [d for d in DTYPES if DEVICE.type == "cpu" or d.itemsize == 2]
H, D = 2, 16


@pytest.fixture
def took(monkeypatch):
    """Which of "fwd" and "bwd" the library computed, in order, where it does whatever it can."""
    found = []
    for name, whole in (("fwd", "sdpa_forward"), ("bwd", "sdpa_backward")):
        function = getattr(cudnn, whole)

        def called(*arguments, function=function, name=name):
            result = function(*arguments)
            found.extend([name] if result is not None else [])
            return result

        monkeypatch.setattr(launch, whole, called)
    set_deterministic(False)
    with configs.forced_route("library"):
        yield found


def _packed(T=37, dtype=TAKEN[0]):
    return {"qkv": rand(2, T, 3, H, D, dtype=dtype)}


def _projected(T=37, dtype=TAKEN[0]):
    shapes = {"x": (2, T, 24), "weight": (3 * H * D, 24), "bias": (3 * H * D,)}
    return {n: rand(*s, dtype=dtype, seed=i, scale=0.5) for i, (n, s) in enumerate(shapes.items())}


def _separate(T=37, dtype=TAKEN[0]):
    return heads(2, H, T, T, D, dtype)


def _turned(T=37, dtype=TAKEN[0]):
    return _projected(T, dtype) | {n: rand(T, D, seed=7, grad=False) for n in ("cos", "sin")}


OPS = {
    "attention": (attention, attention_ref, _packed),
    "qkv_attention": (
        partial(qkv_attention, num_heads=H),
        partial(qkv_attention_ref, num_heads=H),
        _projected,
    ),
    "rope_attention": (
        partial(rope_attention, num_heads=H),
        partial(rope_attention_ref, num_heads=H),
        _turned,
    ),
    "sdpa": (sdpa, torch_sdpa, _separate),
    "causal": (partial(sdpa, is_causal=True), partial(torch_sdpa, is_causal=True), _separate),
}
every_op = pytest.mark.parametrize("op", OPS)


@pytest.mark.parametrize("dtype", TAKEN, ids=dtype_id)
@pytest.mark.parametrize("T", [1, 37, 64])
@every_op
def test_library_attention(op, T, dtype, took):
    function, reference, inputs = OPS[op]
    assert_accurate(function, reference, inputs(T=T, dtype=dtype))
    assert set(took) == {"fwd", "bwd"}


@pytest.mark.parametrize(
    ("table", "config"),
    [(configs.FWD_TABLE, LIBRARY_FWD), (configs.BWD_TABLE, LIBRARY_BWD)],
    ids=["fwd", "bwd"],
)
@every_op
def test_library_forward_triton_backward(op, table, config, took):
    """One lse serves both: base 2, rows padded with what makes p 0 in our backward."""
    function, reference, inputs = OPS[op]
    with configs.forced_route("triton"), forced(table.name, config):
        assert_accurate(function, reference, inputs())
    assert set(took) == {table.name[-3:]}


def test_library_qkv_layouts(took):
    layouts = qkv_layouts(D, fp16)
    for qkv in layouts:
        assert_accurate(attention, attention_ref, {"qkv": qkv})
    assert took.count("fwd") == took.count("bwd") >= len(layouts)


def test_library_upstream_layouts(took):
    for upstream in (torch.randn(D, device=DEVICE), torch.randn(1, device=DEVICE)):
        expanded = upstream.to(TAKEN[0]).expand(2, 37, H, D)
        assert_accurate(attention, attention_ref, _packed(), upstream=[expanded])
    apart = rand(2, D, H, 37, dtype=TAKEN[0], grad=False).permute(0, 3, 2, 1)
    assert_accurate(attention, attention_ref, _packed(), upstream=[apart])
    assert took.count("bwd") >= 3


@pytest.mark.skipif(DEVICE.type != "cpu", reason="stands in for cuDNN on a CPU")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)], ids=str)
def test_library_out_strides_match_torch(order, monkeypatch, took):
    """Of torch's cuDNN backward a graph is kept by q, k and v: what lay otherwise, in our call or
    in torch's own, would be read in the strides of the first call."""
    make = torch.empty(tuple((2, H, 37, D)[i] for i in order), dtype=bf16).permute
    q, k, v = (make(*map(order.index, range(4))).normal_().requires_grad_() for _ in range(3))
    seen, kernels = [], cudnn._kernels

    def noting(*arguments):
        forward, backward = kernels(*arguments)

        def called(*tensors, **options):
            seen[:] = tensors[0].stride(), tensors[4].stride()
            return backward(*tensors, **options)

        monkeypatch.setattr(cudnn, "FLASH_CPU", (forward, called))
        return forward, called

    monkeypatch.setattr(cudnn, "_kernels", noting)
    sdpa(q, k, v).backward(torch.randn(2, H, 37, D, dtype=bf16))
    assert seen == [torch.empty_like(q).stride()] * 2


def _results(function, inputs):
    out = function(**inputs)
    needed = [x for x in inputs.values() if x.requires_grad]
    return out, *torch.autograd.grad(out.float().square().sum(), needed)


@every_op
def test_deterministic_uses_triton(op, took):
    function, _, make = OPS[op]
    with configs.forced_route("triton"):
        ours = _results(function, make())
    _results(function, make())
    assert took == ["fwd", "bwd"]
    set_deterministic(True)
    again = _results(function, make())
    assert took == ["fwd", "bwd"]
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))


def test_deterministic_set_between_fwd_and_bwd(took):
    qkv = _packed()["qkv"]
    (wanted,) = torch.autograd.grad(attention(qkv).square().sum(), qkv)
    out = attention(qkv)
    set_deterministic(True)
    (grad,) = torch.autograd.grad(out.square().sum(), qkv)
    assert took == ["fwd", "bwd", "fwd"]
    torch.testing.assert_close(grad, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "call",
    [
        lambda qkv: attention(qkv, dropout_p=0.2),
        lambda qkv: attention(qkv, attn_mask=torch.ones(37, dtype=torch.bool, device=DEVICE)),
        lambda qkv: attention(qkv, attn_mask=rand(37, 37, grad=False)),
        lambda qkv: varlen_attention(
            qkv.flatten(0, 1), torch.tensor([0, 37, 74], device=DEVICE, dtype=torch.int32), 37
        ),
        lambda qkv: sdpa(*(x.transpose(1, 2) for x in (qkv[:, :5, 0], *qkv[:, :, 1:].unbind(2)))),
        lambda qkv: sdpa(
            *(x.transpose(1, 2) for x in (qkv[:, :5, 0], *qkv[:, :, 1:].unbind(2))), is_causal=True
        ),
    ],
    ids=["dropout", "keys", "bias", "varlen", "cross", "cross, causal"],
)
def test_library_not_used(call, took):
    call(_packed()["qkv"]).sum().backward()
    assert not took


# CUDA's kernels, on tensors without values: their signatures, and the layouts that they promise


@pytest.mark.parametrize(
    ("choice", "kernels"), [("FLASH_ATTENTION", FLASH), ("CUDNN_ATTENTION", CUDNN)]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_cuda_sdpa_signatures(choice, kernels, is_causal, monkeypatch):
    set_deterministic(False)
    monkeypatch.setattr(cudnn, "sdpa_choice", lambda *_, **__: getattr(SDPBackend, choice).value)
    assert None not in kernels
    with FakeTensorMode():
        qkv = torch.empty(2, 70, 3, 4, 64, dtype=bf16, device="cuda")
        q, k, v = qkv.unbind(2)
        found = cudnn.sdpa_forward((q, k, v), 0.125, is_causal)
        assert found is not None
        out, lse = found
        assert out.shape == q.shape and out.is_contiguous() and out.dtype is bf16
        assert lse.shape == (2, 4, 70) and lse.is_contiguous() and lse.dtype is fp32
        rows = launch.empty_rows(out)
        grads = cudnn.sdpa_backward(out, (q, k, v), out, rows, 0.125, is_causal)
        assert grads is not None and {x.shape for x in grads} == {q.shape}


# The table


def _routes(on, T, dtype=bf16, mask="none"):
    key = launch.Problem(on, dtype, (8, T, 12, 64), T, mask, False, "ieee").key()
    return [table.choose(on, *key).route for table in (configs.FWD_TABLE, configs.BWD_TABLE)]


@pytest.mark.parametrize("arch", ["sm_100", "sm_103", "sm_110"])
@pytest.mark.parametrize("has_fence", [True, False])
def test_blackwell_takes_the_library(arch, has_fence, monkeypatch):
    """From T = 257, and everywhere where Triton leaves out a fence; masks are ours, unpipelined."""
    monkeypatch.setattr(configs, "UNFENCED", not has_fence)
    on = Gpu(arch, 148, 227 * 1024, f"fence {has_fence}")  # its own entries in the cache of plans
    for T in (50, 197, 257, 577, 4097):
        wanted = "library" if T > 256 or not has_fence else "triton"
        assert _routes(on, T) == _routes(on, T, mask="causal") == [wanted] * 2
    assert _routes(on, 577, mask="add") == _routes(on, 577, fp32) == ["triton"] * 2
    assert _routes(Gpu("sm_121", 48, 99 * 1024), 4097) == ["triton"] * 2


@pytest.mark.parametrize("op", ["attention", "sdpa"])
def test_compiled_whole(op, took):
    function, _, make = OPS[op]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_results(function, make()), _results(compiled, make()))
    assert took == ["fwd", "bwd"] * 2


def test_library_gradient_strides(took, monkeypatch):
    """Tokens first, whatever strides the library gives them."""
    backward = launch.sdpa_backward

    def heads_first(*arguments):
        found = backward(*arguments)
        assert found is not None
        return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in found]

    monkeypatch.setattr(launch, "sdpa_backward", heads_first)
    inputs = {n: x.detach() for n, x in _separate().items()}
    ops = torch.ops.fastvit_kernels
    out, lse = ops.sdpa_fwd(*inputs.values(), None, None, 0.25, 0.0, False)
    arguments = (out, *inputs.values(), out, lse, None, None, 0.25, 0.0, False)
    torch_library.opcheck(ops.sdpa_bwd, arguments, test_utils=("test_faketensor",))
    assert_accurate(sdpa, torch_sdpa, _separate())
    assert took


@pytest.mark.parametrize("arch", ["sm_100", "sm_103", "sm_110"])
def test_blackwell_num_stages(arch, monkeypatch):
    """cp.async without a fence before tcgen05: pytorch #181248, triton #10537."""
    monkeypatch.setattr(gemm, "INTERPRETED", False)
    fields = (197, "add", False, "ieee")
    for dtype, stages in ((torch.bfloat16, {1}), (torch.float32, {1, 2})):
        problem = Gpu(arch, 148, 227 * 1024), dtype, (2, 197, 12, 64), *fields
        split = launch.bwd_launch.__wrapped__(*problem).split
        every = [launch.fwd_launch.__wrapped__(*problem), *split]
        assert {each.options["num_stages"] for each in every} <= stages


@pytest.mark.parametrize(
    "choice", [-1, SDPBackend.MATH.value, SDPBackend.EFFICIENT_ATTENTION.value]
)
def test_library_only_flash_or_cudnn(choice, monkeypatch):
    set_deterministic(False)
    monkeypatch.setattr(cudnn, "sdpa_choice", lambda *_, **__: choice)
    with FakeTensorMode():
        heads = torch.empty(2, 70, 3, 4, 64, dtype=bf16, device="cuda").unbind(2)
        out, lse = heads[0], torch.empty(2, 4, 70, device="cuda")
        assert cudnn.sdpa_forward(heads, 0.125, False) is None
        assert cudnn.sdpa_backward(out, heads, out, lse, 0.125, False) is None
