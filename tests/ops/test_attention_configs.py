"""Attention under each launch config that ships: the 2x rule, equal bits twice, no wasted tiles."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import pytest
import torch
from numerics import DEVICE, assert_accurate, rand

from fastvit_kernels.ops.attention import configs, launch
from fastvit_kernels.ops.attention.configs import (
    BWD_TABLE,
    DKDV_TABLE,
    DQ_TABLE,
    FUSED_DQ,
    FWD_TABLE,
    ONE_PASS_TABLE,
    PINGPONG_BWD,
    PINGPONG_FWD,
    BwdForm,
    has_turns,
)
from fastvit_kernels.ops.attention.functions import attention, attention_ref
from fastvit_kernels.ops.attention.tiling import query_parts
from fastvit_kernels.ops.common.gemm_configs import HIDDEN_TABLE, SPECIALIZED, TMA_TILE
from fastvit_kernels.runtime.backend import Gpu, gpu
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.runtime.triton import has_gluon
from tests.machine.aot import by_field

bf16, fp16, fp32 = TYPES = torch.bfloat16, torch.float16, torch.float32
H100 = Gpu("sm_90", 132, 227 * 1024)
A100 = Gpu("sm_80", 108, 163 * 1024)


def _problem(B, T, H, D, dtype, on=None):
    return launch.Problem(on or gpu(DEVICE), dtype, (B, T, H, D), T, "none", False, "ieee")


@pytest.mark.parametrize("table", [FWD_TABLE, ONE_PASS_TABLE], ids=lambda table: table.name)
def test_attention_several_heads_a_program(table):
    """Each head its own numbers, dropout's too: seven heads by two or four, of two samples."""
    config = next(c for c in table.configs if c.heads > 1)
    assert 7 % config.heads
    qkv = rand(7, 20, 3, 1, 32, dtype=bf16)
    apart = qkv.detach().permute(3, 1, 2, 0, 4).contiguous().requires_grad_()  # (1, T, 3, 7, D)
    upstream = rand(7, 20, 1, 32, dtype=bf16, seed=1, grad=False)

    def run(x, upstream):
        torch.manual_seed(0)
        out = attention(x, dropout_p=0.3)
        return out, torch.autograd.grad(out, x, upstream)[0]

    one_by_one = run(qkv, upstream)
    with forced(table.name, config), forced(BWD_TABLE.name, BwdForm(one_pass=True)):
        together = run(qkv, upstream)
        as_heads = run(apart, upstream.permute(2, 1, 0, 3))
    for a, b, c in zip(one_by_one, together, as_heads, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c.transpose(0, -2))


@pytest.mark.parametrize("T", [257, 280, 321], ids=lambda t: f"T{t}")
def test_attention_one_pass_in_three_parts(T):
    """What sm_90 takes above 256 queries: parts of 128, 128 and 16, 32 or 128."""
    parts = query_parts(T)
    assert parts is not None and parts[2] in (16, 32, 128)
    with forced(BWD_TABLE.name, BwdForm(one_pass=True)):
        assert launch.bwd_launch(*_problem(1, T, 1, 16, bf16)).one_pass is not None
        assert_accurate(attention, attention_ref, {"qkv": rand(1, T, 3, 1, 16, dtype=bf16)})


def test_one_pass_16_keys_fp32_only():
    """By 16 keys of bf16 an H100 read past its memory, T = 50, D = 64."""
    for config, dtype in product(ONE_PASS_TABLE.configs, ("bf16", "fp16", "fp32")):
        fits = ONE_PASS_TABLE.fits(H100, config, dtype, 32, 50, "none", "many")
        assert not fits or (config.block_kv == 16) == (dtype == "fp32")


def test_hopper_backward_has_eight_warps():
    """Several products at 64-wide tiles with four warps are reported wrong: triton #11366.

    Four are left to the one part of T <= 64, where eight would compute everything twice.
    """
    for table in (ONE_PASS_TABLE, DQ_TABLE, DKDV_TABLE):
        for config in table.configs:
            on_tensor_cores = table is ONE_PASS_TABLE or config.own >= 64
            if config.num_warps != 8 and on_tensor_cores:
                for D in (32, 64, 128):
                    key = _problem(64, 65, 12, D, bf16, H100).key()
                    assert not table.fits(H100, config, *key)
                    assert table.default(H100, *key).num_warps == 8


def _full_tiles(options: dict[str, Any], axis: str, T: int) -> int:
    block, tail = options[f"BLOCK_{axis}"], options[f"TAIL_{axis}"]
    return -(-T // block) if tail == block else T // block


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("D", [32, 64, 80, 128, 256], ids=lambda d: f"D{d}")
def test_no_loop_is_empty(D, dtype):
    """The kernels tell the compiler so: it would be undefined behaviour."""
    for T in range(1, 300):
        problem = _problem(64, T, 12, D, dtype, H100)
        options = by_field(launch.fwd_launch(*problem).options)
        assert options["ONE_KV"] or _full_tiles(options, "KV", T) > 0
        for one_pass in (True, False):
            with forced(BWD_TABLE.name, BwdForm(one_pass)):
                launches = launch.bwd_launch(*problem)
            if launches.one_pass is not None:
                options = by_field(launches.one_pass.options)
                assert options["ONE_KV"] or _full_tiles(options, "KV", T) > 0
            else:
                apart = D > 192 and dtype is bf16  # dk and dv
                axes = ("KV", "Q", "Q") if apart else ("KV", "Q")
                for part, axis in zip(launches.split, axes, strict=True):
                    assert _full_tiles(by_field(part.options), axis, T) > 0


@pytest.fixture
def gluon(monkeypatch):
    """Has it asked anew, before and after."""
    monkeypatch.delenv("FASTVIT_KERNELS_GLUON", raising=False)
    has_gluon.cache_clear()
    yield monkeypatch
    has_gluon.cache_clear()


def test_gluon_can_be_turned_off(gluon):
    gluon.setenv("FASTVIT_KERNELS_GLUON", "0")
    key = _problem(256, 197, 12, 64, bf16, H100).key()
    assert not has_turns(H100) and FWD_TABLE.default(H100, *key).route == "triton"
    assert BWD_TABLE.default(H100, *_problem(64, 577, 12, 64, bf16, H100).key()).route == "triton"
    assert not HIDDEN_TABLE.fits(H100, SPECIALIZED, 65536, 3072, 768, "bf16")
    assert HIDDEN_TABLE.default(H100, 65536, 3072, 768, "bf16") == TMA_TILE


def test_gluon_import_error_warns_once(gluon, recwarn):
    gluon.setitem(sys.modules, "fastvit_kernels.runtime.gluon", None)
    assert not has_gluon() and not has_gluon()
    assert [str(w.message).split(" with")[0] for w in recwarn] == ["no Gluon kernels"]


def test_pingpong_takes_packed_tensors_alone(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    strides, shape = ((197 * 2304, 2304, 64, 1),) * 3, (256, 197, 12, 64)
    layouts = launch.Layouts(H100, bf16, shape, 197, strides, None, False, False, 0.1, 0.0, "")
    grads = H100, True, 2304, 2304, bf16, shape, 197, ((0,) * 4, *strides), *layouts[5:]
    with forced(FWD_TABLE.name, PINGPONG_FWD), forced(BWD_TABLE.name, PINGPONG_BWD):
        for call, given in ((launch.fwd_call, layouts), (launch.bwd_call, grads)):
            assert not call(*given).of_qkv
            assert call(*given, of_qkv=True).of_qkv == has_gluon()


@pytest.mark.parametrize("version", [(3, 6), (3, 9)], ids=["3.6", "3.9"])
def test_defaults_fit_by_every_triton(monkeypatch, version):
    """By 3.9 fp32 at D = 192 took the 16-bit tile, too large for shared memory."""
    monkeypatch.setattr(configs, "VERSION", version)
    masks = ("none", "causal", "keys", "bool", "add", "varlen")
    for on, dtype, D, mask in product((H100, A100), ("bf16", "fp32"), (32, 64, 80, 192), masks):
        key = (dtype, D, 640, mask, "many")
        for table in (FWD_TABLE, DQ_TABLE, DKDV_TABLE):
            assert table.fits(on, table.default(on, *key), *key), (table.name, on.arch, key)


@pytest.mark.parametrize(
    ("D", "T", "is_default"),
    [(128, 258, True), (96, 577, True), (80, 577, False), (136, 577, None)],
)
def test_five_products_of_wide_heads(monkeypatch, D, T, is_default):
    """None: nor may it be chosen."""
    key = _problem(64, T, 12, D, bf16, H100).key()
    may_be_chosen = FUSED_DQ in BWD_TABLE.candidates(H100, *key)
    assert may_be_chosen == (has_gluon() and is_default is not None)
    monkeypatch.setenv("FASTVIT_KERNELS_FUSED_DQ", "1")
    assert (BWD_TABLE.default(H100, *key) == FUSED_DQ) == (has_gluon() and bool(is_default))
