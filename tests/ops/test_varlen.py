"""varlen_attention: sequences of their own lengths, packed."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from numerics import DEVICE, assert_accurate, rand

import fastvit_kernels as fk
from fastvit_kernels.ops.attention.configs import BwdForm
from fastvit_kernels.ops.attention.functions import attention
from fastvit_kernels.ops.attention.rotary import rope_attention_ref
from fastvit_kernels.ops.attention.varlen import varlen_attention, varlen_attention_ref
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.runtime.values import checked_values, values_are_checked

bf16, fp16 = torch.bfloat16, torch.float16


def _starts(*lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def _check(lengths, D, dtype=bf16, max_seqlen=None, H=2):
    packing = dict(cu_seqlens=_starts(*lengths), max_seqlen=max_seqlen or max(1, *lengths))
    function, reference = (partial(f, **packing) for f in (varlen_attention, varlen_attention_ref))
    assert_accurate(function, reference, {"qkv": rand(sum(lengths), 3, H, D, dtype=dtype)})


LENGTHS = [(1,), (0,), (0, 0, 3), (9, 0), (70, 3, 100)]
HEAD_DIMS = [32, 64, 72, 80, 96, 128]


@pytest.mark.parametrize(
    ("lengths", "D"), [*((n, 32) for n in LENGTHS), *(((5, 0, 1, 37), D) for D in HEAD_DIMS)]
)
def test_varlen_lengths_and_head_dims(lengths, D):
    _check(lengths, D, fp16 if lengths in LENGTHS else bf16)


@pytest.mark.parametrize("one_pass", [True, False], ids=["one_pass", "split"])
@pytest.mark.parametrize("max_seqlen", [130, 256], ids=["longest", "more"])
def test_varlen_backward(max_seqlen, one_pass):
    """A max_seqlen beyond the longest leaves tiles and whole parts of the queries empty."""
    with forced("attention_bwd", BwdForm(one_pass)):
        _check((130, 0, 1, 37), 16, bf16, max_seqlen, H=1)


def test_varlen_layouts():
    """Heads before tokens in memory, an expanded gradient, cu_seqlens with a stride."""
    packing = dict(cu_seqlens=_starts(5, 0, 12).repeat_interleave(2)[::2], max_seqlen=12)
    function, reference = (partial(f, **packing) for f in (varlen_attention, varlen_attention_ref))
    qkv = rand(2, 3, 17, 16, grad=False).transpose(0, 2).requires_grad_()
    upstream = rand(1, 1, 16, seed=3, grad=False).expand(17, 2, 16)
    assert_accurate(function, reference, {"qkv": qkv}, upstream=[upstream])


@pytest.mark.parametrize("D", [32, 72], ids=lambda d: f"D{d}")
def test_varlen_bits_equal_single_sequences(D):
    """Where both take the same tiles; without gradients of one sequence in another's memory."""
    qkv = rand(2, 40, 3, 2, D, dtype=bf16, grad=False)
    upstream = rand(2, 40, 2, D, dtype=bf16, seed=9, grad=False)

    def run(function, qkv, upstream, *args):
        qkv = qkv.clone().requires_grad_()
        out = function(qkv, *args)
        return out.detach(), *torch.autograd.grad(out, qkv, upstream)

    alone = run(attention, qkv, upstream)
    rows = qkv.flatten(0, 1), upstream.flatten(0, 1)
    packed = [run(varlen_attention, *rows, _starts(40, 0, 40), 40) for _ in range(2)]
    for a, b, again in zip(alone, *packed, strict=True):
        assert torch.equal(a.flatten(0, 1), b)
        assert torch.equal(b, again)


def test_varlen_dropout():
    """Values that are unit vectors give the probabilities; the same draw meets other values, in the
    forward and in all gradients."""
    lengths, p = (7, 0, 9), 0.4
    qkv = rand(16, 3, 1, 16)

    def run(qkv):
        torch.manual_seed(1)
        return varlen_attention(qkv, _starts(*lengths), 9, dropout_p=p)

    unit = qkv.detach().clone()
    for part in unit.split(lengths):
        part[:, 2, 0] = torch.eye(16, device=DEVICE)[: len(part)]
    kept = [part[:, 0, : len(part)] != 0 for part in run(unit).split(lengths)]
    assert 0.3 < torch.cat([k.flatten() for k in kept]).float().mean() < 0.9

    def reference(qkv):
        outs = []
        for part, keep in zip(qkv.split(lengths), kept, strict=True):
            q, k, v = part[:, :, 0].unbind(1)
            outs.append((q @ k.T / 4).softmax(-1) * keep / (1 - p) @ v)
        return torch.cat(outs).unsqueeze(1)

    assert_accurate(run, reference, {"qkv": qkv})


@pytest.mark.parametrize(
    ("starts", "max_seqlen"),
    [((0, 5, 40), 40), ((0, 9, 4, 12), 9), ((-3, 5, 12), 12), ((0, 12), 4)],
    ids=["past the end", "descending", "before the first", "longer than max_seqlen"],
)
def test_varlen_bad_cu_seqlens_stays_in_bounds(starts, max_seqlen):
    """What comes out is not said; the tests' guard sees each address."""
    starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    qkv = rand(12, 3, 2, 16)
    with fk.backend("triton"):
        varlen_attention(qkv, starts, max_seqlen).backward(rand(12, 2, 16, grad=False))


@pytest.mark.parametrize(
    ("starts", "max_seqlen", "message"),
    [
        ((0, 5, 11), 6, "cu_seqlens must go from 0 to 12, the number of tokens, got .0, 5, 11"),
        ((1, 5, 12), 7, "cu_seqlens must go from 0 to 12"),
        ((0, 9, 4, 12), 9, "cu_seqlens must ascend, got .0, 9, 4, 12"),
        ((0, 3, 12), 8, "max_seqlen must be at least the longest sequence, 9, got 8"),
    ],
    ids=["sum", "first", "descending", "longest"],
)
def test_varlen_debug_checks(starts, max_seqlen, message):
    starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    qkv = rand(12, 3, 2, 16)
    with fk.backend("torch"), pytest.raises(ValueError, match=f"varlen_attention: {message}"):
        varlen_attention(qkv, starts, max_seqlen)
    packed: dict[str, Any] = dict(cu_seqlens=starts, max_seqlen=max_seqlen)
    tables = torch.ones(12, 16, device=DEVICE)
    with fk.backend("triton"), checked_values():
        with checked_values():
            pass  # the outer one stays in force
        with pytest.raises(ValueError, match=f"varlen_attention: {message}"):
            varlen_attention(qkv, **packed)
        with pytest.raises(ValueError, match=f"rope_attention: {message}"):
            fk.rope_attention(
                rand(1, 12, 8), rand(96, 8), num_heads=2, cos=tables, sin=tables, **packed
            )
    assert not values_are_checked()


def test_varlen_compiles():
    """One graph for lengths that differ; their longest is the host's to know."""
    compiled = torch.compile(varlen_attention, backend="aot_eager", fullgraph=True)
    for lengths in ((5, 7), (3, 0, 9)):
        qkv, starts = rand(12, 3, 2, 16), _starts(*lengths)
        outs = [f(qkv, starts, max(lengths)) for f in (varlen_attention, compiled)]
        upstream = torch.randn_like(outs[0])
        grads = [torch.autograd.grad(out, qkv, upstream)[0] for out in outs]
        assert torch.equal(*outs) and torch.equal(*grads)


@pytest.mark.parametrize("norm", [None, "rms_norm"])
def test_rope_attention_within_packed_sequences(norm):
    """A row of the tables for each token; all gradients, the projection's too."""
    C, D, lengths = 32, 16, (5, 0, 12)
    total = sum(lengths)
    tables = {n: rand(total, D, seed=i, grad=False) for i, n in enumerate(("cos", "sin"))}
    options = dict(num_heads=C // D, norm=norm, **tables)
    packing = dict(cu_seqlens=_starts(*lengths), max_seqlen=12)
    function, reference = (
        partial(f, **options, **packing) for f in (fk.rope_attention, rope_attention_ref)
    )
    inputs = {
        "x": rand(1, total, C),
        "weight": rand(3 * C, C, scale=C**-0.5),
        "bias": rand(3 * C, seed=4),
    }
    if norm:
        inputs |= {f"{n}_norm_weight": rand(D, seed=i) for i, n in enumerate("qk", 5)}
    assert_accurate(function, reference, inputs)
    with pytest.raises(ValueError, match=r"^rope_attention: x must have B = 1 beside cu_seqlens"):
        fk.rope_attention(rand(2, 3, C), inputs["weight"], **options, **packing)
    with pytest.raises(ValueError, match=r"^rope_attention: cu_seqlens must come with max_seqlen"):
        fk.rope_attention(inputs["x"], inputs["weight"], **options, max_seqlen=3)
