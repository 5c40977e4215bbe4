"""Attention over the grids of flash-attention's and xformers' own tests, thinned to pairs.

Each head dim of theirs meets lengths, causality, masks and head counts in turn instead of in a full
product; a GPU takes the long lengths, too. Ours refuses nothing of them: what no kernel can do runs
in PyTorch.
"""

import itertools

import pytest
import torch
from numerics import DEVICE, rand
from test_sdpa import check, heads

HEAD_DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
LENGTHS = [(113, 203), (128, 217), (113, 211), (108, 256), (1, 239), (3, 97), (64, 128)]
LONG = [(256, 512), (512, 256), (1023, 1024), (1024, 1023), (2048, 2048)]
KV_HEADS = [2, 1]  # of two: alike, one for all
XFORMERS_DIMS = [8, 16, 24, 72, 88, 104, 120, 248]
XFORMERS_LENGTHS = [(31, 33), (2, 64), (160, 160), (62, 4), (5, 512)]
ON_GPU = DEVICE.type == "cuda"
if ON_GPU:
    LENGTHS = LENGTHS + LONG


def pairs(dims, lengths):
    """Each of the dims with the next lengths, again and again."""
    return list(zip(dims * (len(LONG) if ON_GPU else 1), itertools.cycle(lengths), strict=False))


@pytest.mark.parametrize(("D", "lengths"), pairs(HEAD_DIMS, LENGTHS), ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_flash_attention_grid(D, lengths, causal):
    kv_heads = KV_HEADS[HEAD_DIMS.index(D) % 2]
    dtype = torch.float16 if D % 3 else torch.bfloat16
    inputs = heads(1, 2, *lengths, D, dtype, kv_heads)
    check(inputs, "auto", is_causal=causal, enable_gqa=kv_heads == 1)


@pytest.mark.parametrize(("D", "lengths"), pairs(XFORMERS_DIMS, XFORMERS_LENGTHS), ids=str)
@pytest.mark.parametrize("shape", ["full", "heads", "one", "keys"])
def test_xformers_bias_grid(D, lengths, shape):
    """Biases and masks of each shape that broadcasts."""
    T_q, T_kv = lengths
    sizes = {"full": (1, 2, T_q, T_kv), "heads": (1, 1, T_q, T_kv), "one": (T_q, T_kv)}
    mask = rand(*sizes.get(shape, (1, 1, 1, T_kv)), seed=7, grad=False)
    mask = mask > -1 if XFORMERS_DIMS.index(D) % 2 else mask
    check(heads(1, 2, *lengths, D, torch.bfloat16), "auto", attn_mask=mask)
