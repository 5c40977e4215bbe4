"""The attention that the gate compiles: each form that a case's docstring names, called for."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from tests.machine import attention_steps, steps

TOKENS, HEAD_DIMS = (50, 197, 257, 577, 1025), (32, 64, 72, 80, 96, 128)
HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.fixture
def called(monkeypatch):
    """(batch, queries, keys, head dim, dtype, mask, causal, dropout) of each call, by its form and
    how often a backward followed."""
    found = Counter()

    def note(q, k, mask, causal, dropout_p, out):
        kind = mask if mask is None or isinstance(mask, str) else (mask.dtype, *mask.shape)
        form = (q.shape[0], q.shape[-2], k.shape[-2], q.shape[-1], q.dtype, kind, causal, dropout_p)
        out.register_hook(lambda d: found.update([form]))
        return out

    def sdpa(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
        bias = attn_mask if attn_mask is None or attn_mask.dtype is torch.bool else attn_mask.to(q)
        out = F.scaled_dot_product_attention(q, k, v, bias, is_causal=is_causal)
        return note(q, k, attn_mask, is_causal, dropout_p, out)

    def attention(qkv, attn_mask=None, dropout_p=0.0):
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        if attn_mask is not None:
            windows, heads, *_ = attn_mask.shape
            assert q.shape[0] % windows == 0 and heads == q.shape[1] and attn_mask.requires_grad
        out = F.scaled_dot_product_attention(q, k, v)
        return note(q, k, attn_mask, False, dropout_p, out)

    def varlen(qkv, cu_seqlens, longest, dropout_p=0.0):
        q, k, _ = qkv.permute(1, 2, 0, 3)
        kind = f"{len(cu_seqlens) - 1} of {longest}"
        return note(q, k, kind, False, dropout_p, qkv * 1)

    monkeypatch.setattr(attention_steps, "scaled_dot_product_attention", sdpa)
    monkeypatch.setattr(attention_steps, "attention", attention)
    monkeypatch.setattr(attention_steps, "varlen_attention", varlen)

    def run(case):
        found.clear()
        with torch.device("meta"):
            steps.CASES[case]()
        return set(found)

    return run


def masks(B, T, *kinds):
    of = {
        "keys": (torch.bool, B, 1, 1, T),
        "pairs": (torch.bool, T, T),
        "add": (HALF, B, 1, 1, T),
        "add pairs": (HALF, T, T),
    }
    return [(of.get(kind), kind == "causal") for kind in kinds]


def forms(B, T, D, kinds, dropout_p=0.0, dtype=HALF):
    return {(B, T, T, D, dtype, *m, dropout_p) for m in masks(B, T, *kinds)}


def test_attention_of_one_image(called):
    wanted = set()
    for T in (197, 257, 577):
        wanted |= forms(1, T, 64, ["none", "causal"])
        wanted |= forms(1, T, 64, ["causal", "pairs", "add pairs"], 0.1)
    assert called("attention, one image") == wanted


@pytest.mark.parametrize("D", HEAD_DIMS)
def test_attention_of_each_head_dim(called, D):
    plain, dropped = set(), set()
    for T in TOKENS:
        plain |= forms(64, T, D, ["none", "pairs", "keys", "add", "causal"])
        plain |= forms(64, T, D, ["none"], 0.1)
        dropped |= forms(64, T, D, ["causal", "keys", "pairs", "add"], 0.1)
    assert called(f"attention, D={D}") == plain
    assert called(f"attention, D={D}, masks and dropout") == dropped


def test_wide_heads_and_few_queries(called):
    for D in (136, 160, 192, 256):
        assert called(f"attention, D={D}") == forms(64, 197, D, ["none", "causal"])
    assert called("attention, few queries") == {
        (64, T_q, T_kv, D, HALF, None, False, 0.0)
        for D in (32, 64, 128)
        for T_q in (1, 16, 64)
        for T_kv in (197, 1025)
    }


def test_masks_of_other_lengths(called):
    found = called("masked attention")
    assert {form[:5] for form in found} == {(8, 197, 257, 64, HALF)}
    assert {form[5:] for form in found} == {
        ((torch.bool, 197, 257), False, 0.0),
        ((HALF, 8, 1, 1, 257), False, 0.0),
        (None, True, 0.0),
    }


def test_masks_in_fp32(called):
    wanted = set()
    for D, T in ((32, 256), (64, 197), (72, 256), (80, 197), (128, 197)):
        wanted |= forms(64, T, D, ["keys", "pairs", "causal"], dtype=SINGLE)
        wanted |= {(64, T, T, D, SINGLE, (SINGLE, 64, 1, 1, T), False, 0.0)}
    for D in (64, 72, 128):
        wanted |= forms(64, 197, D, ["none", "causal", "keys"], 0.1, SINGLE)
    assert called("masks in fp32") == wanted


def test_packed_sequences(called):
    wanted = set()
    for D in HEAD_DIMS:
        kinds = [(HALF, 0.0)] + [(HALF, 0.1), (SINGLE, 0.0)] * (D in (32, 64, 80))
        for size in ("256 of 64", "64 of 256", "60 of 272", "16 of 1024"):
            wanted |= {(16, 16384, 16384, D, t, size, False, p) for t, p in kinds}
    assert called("packed sequences") == wanted


def test_a_learnt_bias(called):
    """BEiT's in both dtypes, Swin's with windows and without, SAM's; each head dim; with dropout
    where it fits."""
    found = called("learnt bias")
    assert {(form[3], form[4]) for form in found} == {
        *((D, HALF) for D in (32, 64, 80, 96, 128)),
        (64, SINGLE),
        (32, SINGLE),
    }
    assert {(form[4], form[5][0]) for form in found} == {
        (HALF, SINGLE),
        (HALF, HALF),
        (SINGLE, SINGLE),
    }
    assert {form[5][1] for form in found} == {1, 25, 64}
    by_dropout = Counter((form[:6], form[7] > 0) for form in found)
    for form in {form[:6] for form in found}:
        assert by_dropout[form, False] == 1 and by_dropout[form, True] == (form[3] <= 64)
    assert len({form[:6] for form in found}) == 11


def test_patches(monkeypatch):
    """Two patch sizes, lists to keep, videos, and images that need a gradient."""
    found = set()

    def patch_embed(images, weight, bias, prefix_tokens, pos_embed, keep=None):
        tokens = 1
        for n, p in zip(images.shape[2:], weight.shape[2:], strict=True):
            assert n % p == 0
            tokens *= n // p
        assert pos_embed.shape == (1, tokens + 1, 768) and prefix_tokens.shape == (1, 1, 768)
        assert all(t.requires_grad for t in (weight, bias, prefix_tokens, pos_embed))
        kept = 0 if keep is None else keep.shape[1]
        assert keep is None or len(keep) == len(images)
        form = (tuple(images.shape), images.dtype, tuple(weight.shape[2:]), kept)
        found.add((*form, images.requires_grad))
        return weight.sum()

    monkeypatch.setattr(steps, "patch_embed", patch_embed)
    with torch.device("meta"):
        steps.CASES["patches"]()
    image, video = (64, 3, 224, 224), (8, 3, 16, 224, 224)
    assert found == {
        (image, SINGLE, (16, 16), 0, False),
        (image, SINGLE, (14, 14), 0, False),
        (image, HALF, (16, 16), 49, True),
        (image, SINGLE, (16, 16), 49, False),
        (video, SINGLE, (2, 16, 16), 160, False),
        (video, HALF, (2, 16, 16), 0, True),
    }


def test_each_case_is_there_once():
    functions = [getattr(case, "func", case) for case in steps.CASES.values()]
    by_dim = {
        attention_steps.heads: HEAD_DIMS,
        attention_steps.dropped: HEAD_DIMS,
        attention_steps.wide_heads: (136, 160, 192, 256),
    }
    plain = [f for f in functions if f not in by_dim and f.__name__ != "step"]
    assert len(plain) == len(set(plain)) == 15
    for make, wanted in by_dim.items():
        dims = [
            c.args[0]
            for c in steps.CASES.values()
            if isinstance(c, functools.partial) and c.func is make
        ]
        assert tuple(dims) == wanted
    assert steps.CASES.keys() >= steps.LISTED_ONLY
