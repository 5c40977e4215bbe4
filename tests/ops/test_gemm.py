"""Every config of the Triton GEMMs through linear and mlp; how one is chosen and launched."""

import contextvars
import itertools

import pytest
import torch
from numerics import dtype_id, rand
from products import LINEARS

from fastvit_kernels.ops import linear as linear_module
from fastvit_kernels.ops.common import gemm
from fastvit_kernels.ops.common.gemm_configs import (
    FWD_TABLE,
    GATED_TABLE,
    HIDDEN_TABLE,
    PERSISTENT,
    SPECIALIZED,
    TMA_PAIR,
    forced_route,
)
from fastvit_kernels.ops.linear import linear
from fastvit_kernels.runtime.backend import Gpu
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.runtime.triton import has_gluon, triton
from tests.machine.aot import TARGETS

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
TABLES = (FWD_TABLE, HIDDEN_TABLE, GATED_TABLE)
GPUS = [Gpu(t.name, t.num_sms, t.shared_limit) for t in TARGETS.values()]


@pytest.mark.parametrize("config", [PERSISTENT, TMA_PAIR], ids=["persistent", "by TMA"])
@pytest.mark.parametrize("K", [1, 63, 64, 65, 129])
def test_gemm_tails_of_k(config, K):
    with forced("linear_fwd", config):
        inputs = {"x": rand(5, K), "weight": rand(9, K, seed=1)}
        LINEARS["linear"].check(inputs, activation="silu")


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=dtype_id)
def test_gemm_descriptors_need_aligned_rows(dtype):
    step = 16 // dtype.itemsize
    a, b = rand(64, 4 * step, dtype=dtype, grad=False), rand(4 * step, 32, dtype=dtype, grad=False)
    weight = b.t().contiguous()
    wide = rand(64, 4 * step + 1, dtype=dtype, grad=False)
    base = rand(64 * 4 * step + 1, dtype=dtype, grad=False)

    def by_tma(a, b, transposed=False):
        plan = gemm.tile_plan(TMA_PAIR, a, b, transposed=transposed)
        return plan and (plan.tile.DESCRIPTORS, plan.tile.B_K_LAST)

    assert by_tma(a, b) == (True, False)
    assert by_tma(a, weight.t()) == by_tma(a, weight, transposed=True) == (True, True)
    assert by_tma(a, b.t(), transposed=True) == (True, False)
    triton_tiles = (c for c in FWD_TABLE.configs if c.route == "triton")
    pointers = next(c for c in triton_tiles if not c.descriptors)
    assert gemm.tile_plan(pointers, a, b) is not None
    assert gemm.tile_plan(pointers, base[1:].view(a.shape), b) is None  # loads of single elements
    for other in (
        wide[:, :-1],  # rows that are no multiple of 16 bytes apart
        base[1:].view(a.shape),  # an address that is none of 16
        a.t().contiguous().t(),  # columns contiguous
        a[:1].expand(64, -1),  # a row stride of 0
    ):
        assert by_tma(other, b) is None


def test_gemm_keeps_user_allocator(monkeypatch):
    """During a launch with descriptors Triton finds our allocator, afterwards the user's again."""
    from private import kernels_allocator

    monkeypatch.setattr(gemm, "INTERPRETED", False)
    seen = []

    class Kernel:
        def __init__(self, plan):
            self.arg_names = ["TILE"]

        def run(self, *_, **__):
            seen.append(kernels_allocator.get())

    def users(size, alignment, stream):
        raise AssertionError

    a, b = rand(64, 64, dtype=bf16, grad=False), rand(64, 64, dtype=bf16, grad=False)

    def in_a_context_of_its_own():
        triton.set_allocator(users)
        for config in (TMA_PAIR, PERSISTENT):
            plan = gemm.tile_plan(config, a, b)
            gemm.tile_launch(plan, Kernel(plan))(a)

    context = contextvars.copy_context()
    context.run(in_a_context_of_its_own)
    assert seen == [gemm._scratch, users]
    assert context[kernels_allocator] is users


@pytest.mark.parametrize("limit", [48, 64, 100, 164, 227], ids=lambda kb: f"{kb} KB")
@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_gemm_candidates_fit_shared_memory(table, limit):
    for arch, dtype in itertools.product(("sm_80", "sm_90", "sm_100"), ("bf16", "fp32")):
        gpu = Gpu(arch, 108, limit * 1024)
        operands = [
            (c.block_m + c.block_n) * c.block_k * c.num_stages * (4 if dtype == "fp32" else 2)
            for c in table.configs
            if table.fits(gpu, c, 16384, 768, 768, dtype)
        ]
        assert operands and max(operands) <= gpu.shared_limit


# The Gluon route; tests/machine/device runs its kernel

HOPPER = Gpu("sm_90", 132, 227 * 1024)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_gluon_is_a_candidate_on_hopper_alone(table):
    if not has_gluon():
        pytest.skip("triton is not installed, or has another Gluon")
    for gpu, dtype in itertools.product(GPUS, ("bf16", "fp16", "fp32")):
        found = {c.route for c in table.candidates(gpu, 16384, 768, 768, dtype)}
        assert ("gluon" in found) == (gpu.arch == "sm_90" and dtype != "fp32")


def test_gluon_has_no_epilogue_but_the_activation(monkeypatch):
    seen, full = [], dict(residual=rand(9, 8), layer_scale=rand(8), row_scale=rand(9).sign())
    with monkeypatch.context() as patch, forced_route("triton"):
        patch.setattr(linear_module, "tile_plan", lambda *_, plain, **__: seen.append(plain))
        for given in ({}, *({name: x.detach()} for name, x in full.items())):
            linear(rand(9, 16), rand(8, 16, seed=1), activation="gelu", **given)
    assert seen == [False, True, True, True]
    monkeypatch.setattr(gemm, "gpu", lambda device: HOPPER)
    monkeypatch.setattr(gemm, "INTERPRETED", False)
    a, b = (rand(256, 64, dtype=bf16, grad=False) for _ in range(2))
    assert gemm.tile_plan(SPECIALIZED, a, b, transposed=True).config == SPECIALIZED
    plain = gemm.tile_plan(SPECIALIZED, a, b, transposed=True, plain=True).config
    assert plain == gemm.triton_tile(HOPPER, 256, 256, 64, "bf16")
