"""Every config of the Triton GEMMs through linear and mlp; how one is chosen and launched."""

import contextvars
import itertools

import pytest
import torch
from numerics import DEVICE, assert_accurate, dtype_id, rand

from fastvit_kernels.ops import linear as linear_launch
from fastvit_kernels.ops.common import gemm
from fastvit_kernels.ops.common.gemm_configs import (
    FLAT,
    FWD_TABLE,
    HIDDEN_TABLE,
    LIBRARY,
    PERSISTENT,
    SMALL,
    SPECIALIZED,
    TMA_FAMILIES,
    TMA_PAIR,
    TMA_SMALL,
    TMA_TILE,
    WIDE_TMA,
    forced_route,
    gemm_key,
)
from fastvit_kernels.ops.linear import linear, linear_ref
from fastvit_kernels.ops.mlp import mlp, mlp_ref
from fastvit_kernels.runtime import configs
from fastvit_kernels.runtime.backend import Gpu, gpu as gpu_of
from fastvit_kernels.runtime.configs import forced
from fastvit_kernels.runtime.triton import has_gluon, triton
from tests.machine.aot import TARGETS

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
TABLES = (FWD_TABLE, HIDDEN_TABLE)
TRITON = {table.name: [c for c in table.configs if c.route == "triton"] for table in TABLES}
GPUS = [Gpu(t.name, t.num_sms, t.shared_limit) for t in TARGETS.values()]


def _id(config):
    marks = zip(("tma", "flat", "ws"), config[8:11], strict=True)
    words = [f"{config.block_m}x{config.block_n}x{config.block_k}-w{config.num_warps}"]
    words += [f"s{config.num_stages}", f"p{config.programs_per_sm}", f"t{config.subtiles}"]
    return "-".join(words + [mark for mark, on in marks if on])


def _skip_what_does_not_fit(table, config, M, N, K, dtype):
    if not table.fits(gpu_of(DEVICE), config, *gemm_key(M, N, K, dtype)):
        pytest.skip("does not run on this GPU")


def _check_twice(function, reference, inputs):
    """The 2x rule, and the same bits from a second run."""
    assert_accurate(function, reference, inputs)
    leaves = [x for x in inputs.values() if x is not None and x.requires_grad]
    runs = []
    for _ in range(2):
        y = function(**inputs)
        upstream = rand(*y.shape, dtype=y.dtype, seed=9, grad=False)
        runs.append([y, *torch.autograd.grad(y, leaves, upstream)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def _linear_inputs(M, K, N, dtype, aligned):
    """Where not aligned: rows that TMA cannot read, and a transposed weight."""
    columns = K if aligned else 2 * K + 1
    weight = rand(N, K, dtype=dtype, seed=1, scale=K**-0.5, grad=False)
    return {
        "x": rand(M, columns, dtype=dtype, grad=False)[:, :K].requires_grad_(),
        "weight": (weight if aligned else weight.t().contiguous().t()).requires_grad_(),
        "bias": rand(N, dtype=dtype, seed=2),
        "residual": rand(M, N, seed=3),
        "layer_scale": rand(N, seed=4),
    }


@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "strided"])
@pytest.mark.parametrize("config", TRITON["linear_fwd"], ids=_id)
def test_gemm_configs_of_linear(config, aligned):
    dtype = fp32 if config.block_k == 32 else bf16
    M, K, N = config.block_m + 3, config.block_k + 8, config.block_n + 24
    _skip_what_does_not_fit(FWD_TABLE, config, M, N, K, dtype)
    inputs = _linear_inputs(M, K, N, dtype, aligned)
    with forced("linear_fwd", config):
        _check_twice(
            lambda **kw: linear(**kw, activation="gelu"),
            lambda **kw: linear_ref(**kw, activation="gelu"),
            inputs,
        )


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("config", TRITON["mlp_bwd_hidden"], ids=_id)
def test_gemm_configs_of_mlp(config, recompute):
    dtype = fp32 if config.block_k == 32 else fp16
    M, C, F, N = config.block_m + 3, 24, config.block_n + 24, config.block_k + 8
    _skip_what_does_not_fit(HIDDEN_TABLE, config, M, F, N, dtype)
    inputs = {
        "x": rand(M, C, dtype=dtype),
        "fc1_weight": rand(F, C, dtype=dtype, seed=1, scale=C**-0.5),
        "fc1_bias": rand(F, dtype=dtype, seed=2),
        "fc2_weight": rand(N, F, dtype=dtype, seed=3, scale=F**-0.5),
        "fc2_bias": rand(N, dtype=dtype, seed=4),
        "layer_scale": rand(N, dtype=dtype, seed=5),
    }
    if recompute:  # an fc2 weight whose columns are contiguous
        weight = inputs["fc2_weight"].detach()
        inputs["fc2_weight"] = weight.t().contiguous().t().requires_grad_()
    with forced("mlp_bwd_hidden", config):
        _check_twice(lambda **kw: mlp(**kw, recompute=recompute), mlp_ref, inputs)


@pytest.mark.parametrize("config", [PERSISTENT, TMA_PAIR], ids=_id)
@pytest.mark.parametrize("K", [1, 63, 64, 65, 129])
def test_gemm_tails_of_k(config, K):
    with forced("linear_fwd", config):
        assert_accurate(
            lambda **kw: linear(**kw, activation="silu"),
            lambda **kw: linear_ref(**kw, activation="silu"),
            {"x": rand(5, K), "weight": rand(9, K, seed=1)},
        )


def test_gemm_walks_groups_of_row_blocks():
    """More row blocks than GROUP_M, a last group that is not full, several column blocks."""
    M, K, N = SMALL.block_m * (gemm.GROUP_M + 2) + 5, 16, 3 * SMALL.block_n - 7
    for config in (SMALL, SMALL._replace(programs_per_sm=2)):
        with forced("linear_fwd", config):
            x, weight = rand(M, K, grad=False), rand(N, K, seed=1, grad=False)
            y = linear(x, weight, activation="silu")
        torch.testing.assert_close(y, linear_ref(x, weight, activation="silu"))


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=dtype_id)
def test_gemm_descriptors_need_aligned_rows(dtype):
    step = 16 // dtype.itemsize
    a, b = rand(64, 4 * step, dtype=dtype, grad=False), rand(4 * step, 32, dtype=dtype, grad=False)
    weight = b.t().contiguous()
    wide = rand(64, 4 * step + 1, dtype=dtype, grad=False)
    base = rand(64 * 4 * step + 1, dtype=dtype, grad=False)

    def by_tma(a, b, transposed=False):
        plan = gemm.tile_plan(TMA_PAIR, a, b, transposed=transposed)
        return plan and (plan.options["DESCRIPTORS"], plan.options["B_K_LAST"])

    assert by_tma(a, b) == (True, False)
    assert by_tma(a, weight.t()) == by_tma(a, weight, transposed=True) == (True, True)
    assert by_tma(a, b.t(), transposed=True) == (True, False)
    for other in (
        wide[:, :-1],  # rows that are no multiple of 16 bytes apart
        base[1:].view(a.shape),  # an address that is none of 16
        a.t().contiguous().t(),  # columns contiguous
        a[:1].expand(64, -1),  # a row stride of 0
    ):
        assert by_tma(other, b) is None


def test_gemm_of_the_library_where_an_address_is_off_16_bytes():
    """By pointers too: their loads would be of single elements."""
    a, b = rand(64, 32, dtype=bf16, grad=False), rand(32, 16, dtype=bf16, grad=False)
    off_a, off_b = (rand(x.numel() + 1, dtype=bf16, grad=False)[1:].view(x.shape) for x in (a, b))
    config = next(c for c in TRITON["linear_fwd"] if not c.descriptors)
    assert gemm.tile_plan(config, a, b) is not None
    assert gemm.tile_plan(config, off_a, b) is gemm.tile_plan(config, a, off_b) is None


def test_gemm_of_the_library_where_tma_cannot_read(monkeypatch):
    """No pointers take the place of descriptors: on sm_90 wgmma would race with cp.async."""
    x, weight = rand(9, 33, dtype=bf16, grad=False), rand(40, 33, dtype=bf16, grad=False)
    for config in (LIBRARY, TMA_PAIR, WIDE_TMA):
        assert gemm.tile_plan(config, x, weight, transposed=True) is None
    monkeypatch.setattr(linear_launch, "tile_launch", None)
    with forced("linear_fwd", TMA_PAIR):
        y = linear(x, weight, activation="gelu")
    torch.testing.assert_close(y, linear_ref(x, weight, activation="gelu"))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
def test_gemm_tiles_come_by_tma_or_by_pointers(gpu):
    for table in TABLES:
        for config in table.configs:
            fits = table.fits(
                gpu, config, 16384, 768, 768, "fp32" if config.block_k == 32 else "bf16"
            )
            if fits and config.route == "triton":
                assert config.descriptors == (gpu.family in TMA_FAMILIES), config


def test_gemm_leaves_the_users_allocator_alone(monkeypatch):
    """During a launch with descriptors Triton finds our allocator, afterwards the user's again."""
    from private import kernels_allocator

    monkeypatch.setattr(gemm, "INTERPRETED", False)
    seen = []

    class Kernel:
        def __init__(self, plan):
            self.arg_names = [name for name in plan.options if name.isupper()]

        def run(self, *_, **__):
            seen.append(kernels_allocator.get())

    def users(size, alignment, stream):
        raise AssertionError

    a, b = rand(64, 64, dtype=bf16, grad=False), rand(64, 64, dtype=bf16, grad=False)

    def in_a_context_of_its_own():
        triton.set_allocator(users)
        for config in (TMA_PAIR, PERSISTENT):
            plan = gemm.tile_plan(config, a, b)
            gemm.tile_launch(plan, Kernel(plan), a)

    context = contextvars.copy_context()
    context.run(in_a_context_of_its_own)
    assert seen == [gemm._scratch, users]
    assert context[kernels_allocator] is users


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
def test_gemm_rule_gives_configs_that_ship_and_fit(gpu):
    keys = itertools.product((1, 256, 16384, 131072), (1, 192, 768, 3072), (64, 768))
    for table, key, dtype in itertools.product(TABLES, keys, ("bf16", "fp32")):
        with forced_route("triton"):
            config = table.choose(gpu, *key, dtype)
        assert config.route == "triton" and config in table.configs
        assert table.fits(gpu, config, *key, dtype)


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


def test_gemm_defaults():
    on = {gpu.arch: gpu for gpu in GPUS}
    choose = FWD_TABLE.choose
    warp_specialized, pair = (SPECIALIZED, SPECIALIZED) if has_gluon() else (TMA_TILE, TMA_PAIR)
    assert choose(on["sm_90"], 65536, 3072, 768, "bf16") == pair
    assert choose(on["sm_90"], 65536, 768, 768, "bf16") == TMA_PAIR
    assert choose(on["sm_90"], 65536, 2000, 768, "bf16") == TMA_PAIR  # part of a tile
    assert choose(on["sm_90"], 65536, 768, 3072, "bf16") == WIDE_TMA
    assert choose(on["sm_90"], 16384, 768, 3072, "bf16") == LIBRARY  # too few for wide tiles
    assert choose(on["sm_90"], 65536, 768, 4096, "bf16") == LIBRARY
    assert choose(on["sm_90"], 65536, 384, 3072, "bf16") == LIBRARY  # half a tile
    assert choose(on["sm_90"], 256, 768, 192, "bf16") == TMA_SMALL
    assert choose(on["sm_80"], 65536, 3072, 768, "bf16") == FLAT
    assert choose(on["sm_80"], 65536, 768, 3072, "bf16") == LIBRARY
    assert choose(on["sm_80"], 65536, 768, 1000, "bf16") == LIBRARY  # no multiple of BLOCK_K
    assert choose(on["sm_90"], 65536, 768, 1000, "bf16") == TMA_PAIR
    for N, K in ((768, 192), (3072, 768), (4096, 1024)):
        assert HIDDEN_TABLE.choose(on["sm_90"], 65536, N, K, "bf16") == warp_specialized
    assert HIDDEN_TABLE.choose(on["sm_90"], 4096, 768, 192, "bf16") == TMA_TILE  # few tiles
    assert HIDDEN_TABLE.choose(on["sm_90"], 65536, 1920, 480, "bf16") == TMA_TILE
    assert HIDDEN_TABLE.choose(on["sm_80"], 65536, 3072, 768, "bf16") == FLAT
    with forced_route("triton"):
        assert HIDDEN_TABLE.choose(on["sm_90"], 65536, 3072, 768, "bf16") == TMA_TILE
    for arch in ("sm_100", "sm_120", "gfx942"):
        assert choose(on[arch], 65536, 3072, 768, "bf16") == LIBRARY
    assert choose(gpu_of(torch.device("cpu")), 65536, 3072, 768, "bf16") == LIBRARY


def test_a_forced_route_goes_before_what_is_tuned(monkeypatch):
    here, key = Gpu("sm_90", 132, 227 * 1024, "a GPU"), (16384, 768, 768, "bf16")
    for tuned, wanted in ((LIBRARY, "triton"), (TMA_PAIR, "library")):
        monkeypatch.setattr(configs, "_tuned", {here.name: {(FWD_TABLE.name, key): tuned}})
        with forced_route(wanted):
            assert FWD_TABLE.choose(here, *key).route == wanted
        assert FWD_TABLE.choose(here, *key) == tuned


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.arch)
def test_gemm_defaults_fit(gpu):
    widths = (192, 384, 768, 1024, 1280)
    for C, M, dtype in itertools.product(widths, (256, 16384, 65536), ("bf16", "fp32")):
        for N, K, table in itertools.product((C, 4 * C), (C, 4 * C), TABLES):
            config = table.default(gpu, M, N, K, dtype)
            assert config in table.configs and table.fits(gpu, config, M, N, K, dtype)


# The Gluon route; tests/machine/device runs its kernel

HOPPER = Gpu("sm_90", 132, 227 * 1024)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_gluon_is_a_candidate_on_hopper_alone(table):
    if not has_gluon():
        pytest.skip("triton is not installed, or has another Gluon")
    for gpu, dtype in itertools.product(GPUS, ("bf16", "fp16", "fp32")):
        found = {c.route for c in table.candidates(gpu, 16384, 768, 768, dtype)}
        assert ("gluon" in found) == (gpu.arch == "sm_90" and dtype != "fp32")


def test_gluon_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("FASTVIT_KERNELS_GLUON", "0")
    has_gluon.cache_clear()
    try:
        assert not FWD_TABLE.fits(HOPPER, SPECIALIZED, 16384, 768, 768, "bf16")
        assert HIDDEN_TABLE.default(HOPPER, 65536, 3072, 768, "bf16") == TMA_TILE
    finally:
        has_gluon.cache_clear()


def test_what_gluon_cannot_end_takes_the_plain_tile(monkeypatch):
    monkeypatch.setattr(gemm, "gpu", lambda device: HOPPER)
    monkeypatch.setattr(gemm, "INTERPRETED", False)
    a, b = (rand(256, 64, dtype=bf16, grad=False) for _ in range(2))
    assert gemm.tile_plan(SPECIALIZED, a, b, transposed=True).config == SPECIALIZED
    plain = gemm.tile_plan(SPECIALIZED, a, b, transposed=True, plain=True).config
    assert plain == gemm.triton_tile(HOPPER, 256, 256, 64, "bf16")
