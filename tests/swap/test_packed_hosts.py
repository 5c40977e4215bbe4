"""Qwen-VL's vision towers: blocks attend within packed sequences by cu_seqlens, windows and images.

The sequences here are 24, 8 and 8 tokens; Qwen2.5-VL's windows 16, 8 and 8 tokens.
"""

from __future__ import annotations

import copy

import pytest
import torch
from packed_towers import TOWERS, inputs, tower

from fastvit_kernels import backend, swap_in
from fastvit_kernels.swap.compare import model_errors
from fastvit_kernels.swap.hosts import attend
from fastvit_kernels.swap.hosts.special import packed
from tests.model_coverage.compare import difference, randomize

transformers = pytest.importorskip("transformers")
STARTS = [0, 24, 32, 40]


@pytest.mark.parametrize("name", TOWERS)
def test_a_block_leaves_nothing_to_pytorch(name):
    model = tower(name)
    with backend("torch"):
        report = swap_in(copy.deepcopy(model))
        assert report.level == "block" and report.fused_flops == report.flops, str(report)
        assert not report.pytorch and not report.uncounted, str(report)
        assert {row.host for row in report.left} <= {"Embedding"}, report.left
        assert difference(model, inputs()) == ""


@pytest.mark.parametrize("name", TOWERS)
def test_a_step_through_the_kernels(name):
    failed = [str(e) for e in model_errors(tower(name), inputs()) if not e.passed]
    assert not failed, "\n".join(failed)


@pytest.fixture
def calls(monkeypatch):
    """The cu_seqlens and max_seqlen of each fused attention; `block` stands before it."""
    taken = []
    original = attend.rope_attention

    def counted(*args, **kwargs):
        taken.append((kwargs["cu_seqlens"].tolist(), kwargs["max_seqlen"]))
        return original(*args, **kwargs)

    monkeypatch.setattr(attend, "rope_attention", counted)
    return taken


def test_windows_where_the_host_has_windows(calls):
    """Block 0 attends within windows of 4 x 4 patches, block 1 within images."""
    model = tower("qwen2_5_vl")
    with backend("torch"):
        swap_in(model)
        calls.clear()  # those of proofs
        model(**inputs())
    windows, images = calls
    assert images == (STARTS, 24)
    assert windows == ([0, 16, 24, 32, 40], 16)


@pytest.fixture
def block():
    """A block as it was and swapped, x and the other arguments of its call."""
    host = tower("qwen3_vl").blocks[0].double()
    module = copy.deepcopy(host)
    with backend("torch"):
        assert swap_in(module).level == "block"
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 64, generator=generator).double()
    angles = torch.randn(40, 32, generator=generator)
    given = {"position_embeddings": (angles.cos(), angles.sin())}
    return host, module, x, given | {"cu_seqlens": torch.tensor(STARTS, dtype=torch.int32)}


def test_lengths_are_read_once_and_anew_when_they_change(block, calls, monkeypatch):
    host, module, x, given = block
    starts, read = given["cu_seqlens"], []
    original = packed._lengths
    monkeypatch.setattr(packed, "_lengths", lambda t: read.append(1) or original(t))
    with backend("torch"):
        for _ in range(3):
            module(x, **given)
        assert [most for _, most in calls] == [24, 24, 24] and len(read) == 1
        starts.copy_(torch.tensor([0, 2, 4, 40]))
        torch.testing.assert_close(module(x, **given), host(x, **given), rtol=1e-5, atol=1e-5)
        assert calls[-1][1] == 36
        with torch.inference_mode():  # where tensors have no version
            inside = given | {"cu_seqlens": starts.clone()}
            module(x, **inside)
            inside["cu_seqlens"].copy_(torch.tensor([0, 30, 32, 40]))
            module(x, **inside)
        assert [most for _, most in calls[-2:]] == [36, 30]
        module(x, **given, max_seqlen=38)  # the caller knows it
        assert calls[-1][1] == 38


def test_what_the_kernels_do_not_take_is_the_hosts(block, calls):
    host, module, x, given = block
    starts = given["cu_seqlens"]
    with backend("torch"):
        for wrong in (starts[:-1], torch.tensor([0, 30, 20, 40], dtype=torch.int32)):
            with pytest.raises(RuntimeError, match="split"):
                module(x, **given | {"cu_seqlens": wrong})
        cos, sin = given["position_embeddings"]
        learnt = cos.clone().requires_grad_()
        for other in (starts + 1, starts.long(), (learnt, sin)):
            name = "cu_seqlens" if isinstance(other, torch.Tensor) else "position_embeddings"
            called = given | {name: other}
            torch.testing.assert_close(module(x, **called), host(x, **called))
    assert calls == []


def test_a_projection_that_is_called(block):
    host, module, x, given = block
    x = x.requires_grad_()
    called = []
    module.attn.qkv.register_forward_hook(lambda *args: called.append(1))
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(4)).to(x)
    with backend("torch"):
        ours, theirs = (torch.autograd.grad(m(x, **given), x, dy) for m in (module, host))
    assert called == [1]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_where_nobody_may_read_the_longest_may_be_all(block, calls, monkeypatch):
    """A compiler traces, or a graph records that is to run on other lengths."""
    host, module, x, given = block
    monkeypatch.setattr(packed, "is_readable", lambda starts: False)
    with backend("torch"):
        torch.testing.assert_close(module(x, **given), host(x, **given), rtol=1e-5, atol=1e-5)
    assert [most for _, most in calls] == [40]


def test_low_memory_and_autocast():
    model = randomize(tower("qwen2_5_vl"))

    def low(model):
        report = swap_in(model, memory="low")
        assert report.rebuilt_rms == 4

    failed = [str(e) for e in model_errors(model, inputs(), low) if not e.passed]
    with backend("torch"):
        errors = model_errors(model, inputs(), autocast=torch.bfloat16)
    failed += [str(e) for e in errors if not e.passed]
    assert not failed, "\n".join(failed)
