"""Attention under each launch config that ships: the 2x rule, equal bits twice, no wasted tiles."""

from __future__ import annotations

import sys
from contextlib import ExitStack
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
    TOKEN_BUCKETS,
    BwdForm,
    FwdConfig,
    forced_route,
    has_turns,
    own_fwd,
)
from fastvit_kernels.ops.attention.functions import attention, attention_ref
from fastvit_kernels.ops.attention.launch import (
    Layouts,
    Problem,
    bwd_call,
    bwd_launch,
    fwd_call,
    fwd_launch,
)
from fastvit_kernels.ops.attention.tiling import query_parts
from fastvit_kernels.runtime.backend import INTERPRETED, Gpu, gpu
from fastvit_kernels.runtime.configs import ConfigTable, forced
from fastvit_kernels.runtime.triton import VERSION, has_gluon
from tests.machine.aot import by_field
from tests.machine.gate import TABLE
from tests.machine.table import read_table

bf16, fp16, fp32 = TYPES = torch.bfloat16, torch.float16, torch.float32
TABLES = (FWD_TABLE, ONE_PASS_TABLE, DQ_TABLE, DKDV_TABLE)
H100 = Gpu("sm_90", 132, 227 * 1024)
A100 = Gpu("sm_80", 108, 163 * 1024)


def _problem(B: int, T: int, H: int, D: int, dtype: torch.dtype, on: Gpu | None = None) -> Problem:
    return Problem(on or gpu(DEVICE), dtype, (B, T, H, D), T, "none", False, "ieee")


def _forced(stack: ExitStack, table: ConfigTable[Any], config: Any) -> None:
    stack.enter_context(forced(table.name, config))
    if table in (ONE_PASS_TABLE, DQ_TABLE, DKDV_TABLE):
        stack.enter_context(forced(BWD_TABLE.name, BwdForm(one_pass=table is ONE_PASS_TABLE)))


def _example(table: ConfigTable[Any], config: Any) -> tuple[int, int, int, int, torch.dtype]:
    """The smallest problem for which the config fits; the last group of heads is not full."""
    T, H = 83, 2
    few_warps = table is ONE_PASS_TABLE and config.num_warps < 8
    if getattr(config, "heads", 1) > 1 or config[0] < 64 or few_warps:
        T, H = 37, 3
    if table is ONE_PASS_TABLE and config.close:
        T = 197  # parts of 128, 64 and 16
    for D in (32, 72, 128, 256):
        for dtype in (bf16, fp32):
            problem = _problem(1, T, H, D, dtype)
            if table.fits(problem.gpu, config, *problem.key()):
                return 1, T, H, D, dtype
    raise AssertionError(f"{table.name}: {config} fits nowhere")


CONFIGS = [
    pytest.param(table, config, id=f"{table.name}-{'-'.join(map(str, config))}")
    for table in TABLES
    for config in table.configs
    if getattr(config, "route", "") != "gluon"  # it has no interpreter: machine/device
]


@pytest.mark.parametrize(("table", "config"), CONFIGS)
def test_attention_under_every_config(table, config):
    B, T, H, D, dtype = _example(table, config)
    inputs = {"qkv": rand(B, T, H, 3, D, dtype=dtype, grad=False).transpose(2, 3).requires_grad_()}
    with ExitStack() as stack:
        _forced(stack, table, config)
        assert table.choose(gpu(DEVICE), *_problem(B, T, H, D, dtype).key()) == config
        assert_accurate(attention, attention_ref, inputs)

        def bits() -> tuple[torch.Tensor, ...]:
            qkv = inputs["qkv"]
            out = attention(qkv)
            return out, torch.autograd.grad(out.float().square().sum(), qkv)[0]

        assert all(torch.equal(a, b) for a, b in zip(bits(), bits(), strict=True))


def _compiled(table: ConfigTable[Any]) -> dict[tuple[Gpu, str, int, str], set[tuple[int, ...]]]:
    """The configs in the gate's table by GPU, dtype, head dim and mask: the rows that a program
    owns, those that it loops over, warps, stages."""
    found: dict[tuple[Gpu, str, int, str], set[tuple[int, ...]]] = {}
    gpus = {g.arch: g for g in (A100, H100)}
    for arch, kernel, config, pointers in read_table(TABLE):
        if arch not in gpus or kernel != table.name or " VARLEN " in config:
            continue
        *words, warps, stages = config.split()
        sizes = dict(word.split("=") for word in words if "=" in word)
        mask = "causal" if "IS_CAUSAL" in words else sizes["MASK"]
        mask += "+dropout" * ("HAS_DROPOUT" in words)
        tile = (int(sizes["BLOCK_Q"]), int(sizes["BLOCK_KV"]))[:: -1 if table is DKDV_TABLE else 1]
        dtype = "bf16" if {"bf16", "fp16"} & {*pointers.split(",")} else "fp32"
        known = found.setdefault((gpus[arch], dtype, int(sizes["D"]), mask), set())
        known.add((*tile, int(warps[1:]), int(stages[1:])))
    return found


@pytest.mark.skipif(VERSION >= (3, 9), reason="the page is of an older compiler")
@pytest.mark.parametrize("table", [FWD_TABLE, DQ_TABLE, DKDV_TABLE], ids=lambda table: table.name)
def test_attention_defaults_are_what_the_gate_compiled(table):
    """Without a spill, on both GPUs: other configs nearby spill."""
    known = _compiled(table)
    assert len(known) > 100
    for (on, dtype, D, mask), compiled in known.items():
        for tokens, heads in product((256, 640), ("many", "few")):
            with forced_route("triton"):
                config = table.choose(on, dtype, D, tokens, mask, heads)
            chosen = (*config[:2], config.num_warps, config.num_stages)
            assert chosen in compiled, (on.arch, dtype, D, tokens, mask, heads, chosen)


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
    with ExitStack() as stack:
        _forced(stack, table, config)
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
        assert bwd_launch(*_problem(1, T, 1, 16, bf16)).one_pass is not None
        assert_accurate(attention, attention_ref, {"qkv": rand(1, T, 3, 1, 16, dtype=bf16)})


def test_query_parts_hold_all_queries():
    for T in range(1, 385):
        for close in (False, True):
            parts = query_parts(T, close)
            assert parts is not None and sum(parts) >= T and parts[0] >= 64
            assert all(p == 0 or (p >= 16 and p & (p - 1) == 0) for p in parts)
    assert [query_parts(T) for T in (50, 197, 257, 385)] == [
        (64, 0, 0),
        (128, 128, 0),
        (128, 128, 16),
        None,
    ]
    assert query_parts(197, close=True) == (128, 64, 16)


@pytest.mark.parametrize("version", [(3, 6), (3, 9)], ids=["3.6", "3.9"])
def test_defaults_fit_by_every_triton(monkeypatch, version):
    """By 3.9 fp32 at D = 192 took the 16-bit tile, too large for shared memory."""
    monkeypatch.setattr(configs, "VERSION", version)
    masks = ("none", "causal", "keys", "bool", "add", "varlen")
    for on, dtype, D, mask in product((H100, A100), ("bf16", "fp32"), (32, 64, 80, 192), masks):
        key = (dtype, D, 640, mask, "many")
        for table in (FWD_TABLE, DQ_TABLE, DKDV_TABLE):
            assert table.fits(on, table.default(on, *key), *key), (table.name, on.arch, key)


def test_attention_forward_owns_128_queries_beside_keys_where_they_pad_no_further():
    for mask, wanted in (("none", []), ("keys", [256, 384, 640, 1024])):
        key = ("bf16", 64)
        found = [T for T in TOKEN_BUCKETS if own_fwd(H100, *key, T, mask, "many").block_q == 128]
        assert [T for T in found if T <= 1024] == wanted
    launched = {}
    for B, T in ((1, 197), (256, 129), (256, 197), (256, 257), (256, 577), (256, 1025)):
        problem = _problem(B, T, 12, 64, bf16, H100)._replace(mask="keys")
        launched[B, T] = fwd_launch(*problem)
    taken = [(B, T) for (B, T), of in launched.items() if by_field(of.options)["BLOCK_Q"] == 128]
    assert taken == [(256, 197), (256, 577), (256, 1025)]
    assert launched[256, 577].programs == 5 * 256 * 12
    assert own_fwd(H100, "bf16", 64, 2047, "none", "many") == FwdConfig(64, 64, 16, 1, 4, 3)


def _columns(options: dict[str, Any], axis: str, T: int) -> int:
    """Tokens that the tiles of a loop over `axis` cover."""
    block, tail = options[f"BLOCK_{axis}"], options[f"TAIL_{axis}"]
    return -(-T // block) * block if tail in (0, block) else T // block * block + tail


@pytest.mark.parametrize("T", [197, 257, 577, 785, 1025, 1370], ids=lambda t: f"T{t}")
@pytest.mark.parametrize("on", [A100, H100], ids=lambda on: on.arch)
def test_attention_wastes_no_tail_tile(on, T):
    problem = _problem(64, T, 12, 64, bf16, on)
    one_pass, split = bwd_launch(*problem)
    walked = [_columns(by_field(fwd_launch(*problem).options), "KV", T)]
    if one_pass is None:
        walked += [
            _columns(by_field(x.options), a, T) for x, a in zip(split, ("KV", "Q"), strict=True)
        ]
    else:  # a second copy of the loop's body would spill: docs/attention.md
        assert (
            _columns(by_field(one_pass.options), "KV", T) - T
            < by_field(one_pass.options)["BLOCK_KV"]
        )
    assert all(0 <= columns - T < 16 for columns in walked), walked
    longest = 272 if on is H100 else 64
    assert (one_pass is None) == (longest < T)


def test_attention_launches_are_planned_once():
    fwd_call.cache_clear()
    qkv = rand(1, 9, 3, 1, 16, grad=False)
    for _ in range(3):
        attention(qkv)
    info = fwd_call.cache_info()
    assert (info.misses, info.hits) == (1, 2)
    with forced(FWD_TABLE.name, FWD_TABLE.configs[-1]):
        assert fwd_call.cache_info().currsize == fwd_launch.cache_info().currsize == 0


def test_one_pass_takes_16_keys_in_fp32_alone():
    """By 16 keys of bf16 an H100 read past its memory, T = 50, D = 64."""
    for config, dtype in product(ONE_PASS_TABLE.configs, ("bf16", "fp16", "fp32")):
        fits = ONE_PASS_TABLE.fits(H100, config, dtype, 32, 50, "none", "many")
        assert not fits or (config.block_kv == 16) == (dtype == "fp32")


def test_backward_on_hopper_takes_eight_warps():
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


def _assert_rows_or_columns(on: Gpu, D: int, warps: int, own: int, loop: int) -> None:
    """16 rows a warp; where mma.sync has fewer rows than D the warps take 8 columns each."""
    assert loop >= 8 * warps if on is A100 and own < D else own >= 16 * warps


@pytest.mark.parametrize("D", [16, 32, 64, 72, 80, 96, 128], ids=lambda d: f"D{d}")
@pytest.mark.parametrize("T", [50, 197, 257, 577, 1025], ids=lambda t: f"T{t}")
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "add"])
@pytest.mark.parametrize("on", [A100, H100], ids=lambda on: on.arch)
def test_no_warp_repeats_the_work_of_another(on, mask, T, D):
    """A chained product gives each warp 16 rows: fewer rows are computed several times."""
    problem = _problem(64, T, 12, D, bf16, on)._replace(mask=mask)
    forward, (one_pass, split) = by_field(fwd_launch(*problem).options), bwd_launch(*problem)
    _assert_rows_or_columns(on, D, forward["num_warps"], forward["BLOCK_Q"], forward["BLOCK_KV"])
    if one_pass is not None:
        rows = by_field(one_pass.options)["PART0"]
        if on is A100:  # dk and dv have D rows; wgmma lays its warps along the columns
            rows = min(rows, D)
        assert rows >= 16 * by_field(one_pass.options)["num_warps"]
    else:
        for launch, axes in zip(split, (("Q", "KV"), ("KV", "Q")), strict=True):
            own, loop = (by_field(launch.options)[f"BLOCK_{axis}"] for axis in axes)
            _assert_rows_or_columns(on, D, by_field(launch.options)["num_warps"], own, loop)


def _full_tiles(options: dict[str, Any], axis: str, T: int) -> int:
    block, tail = options[f"BLOCK_{axis}"], options[f"TAIL_{axis}"]
    return -(-T // block) if tail == block else T // block


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("D", [32, 64, 80, 128, 256], ids=lambda d: f"D{d}")
def test_no_loop_is_empty(D, dtype):
    """The kernels tell the compiler so: it would be undefined behaviour."""
    for T in range(1, 300):
        problem = _problem(64, T, 12, D, dtype, H100)
        options = by_field(fwd_launch(*problem).options)
        assert options["ONE_KV"] or _full_tiles(options, "KV", T) > 0
        for one_pass in (True, False):
            with forced(BWD_TABLE.name, BwdForm(one_pass)):
                launches = bwd_launch(*problem)
            if launches.one_pass is not None:
                options = by_field(launches.one_pass.options)
                assert options["ONE_KV"] or _full_tiles(options, "KV", T) > 0
            else:
                apart = D > 192 and dtype is bf16  # dk and dv
                axes = ("KV", "Q", "Q") if apart else ("KV", "Q")
                for launch, axis in zip(launches.split, axes, strict=True):
                    assert _full_tiles(by_field(launch.options), axis, T) > 0


def test_few_heads_take_the_split_backward():
    """A program a head leaves SMs idle where there are fewer heads than SMs."""
    for heads, one_pass in ((1, False), (10, False), (12, True)):
        problem = _problem(11, 197, heads, 64, bf16, H100)
        assert (bwd_launch(*problem).one_pass is not None) == one_pass
    assert bwd_launch(*_problem(1, 50, 12, 64, bf16, H100)).one_pass is not None


@pytest.fixture
def gluon(monkeypatch):
    """Has it asked anew, before and after."""
    monkeypatch.delenv("FASTVIT_KERNELS_GLUON", raising=False)
    has_gluon.cache_clear()
    yield monkeypatch
    has_gluon.cache_clear()


def test_attention_in_turns_is_the_default_where_the_model_says_a_tenth(gluon):
    if not has_gluon():
        pytest.skip("triton is not installed, or has another Gluon")
    shapes = product((H100, A100), (50, 150, 197, 257, 577, 1025), (32, 64, 80, 128), TYPES)
    for on, T, D, dtype in shapes:
        key = _problem(256, T, 12, D, dtype, on).key()
        here = on is H100 and dtype is not fp32 and T > 64
        fwd = here and {32: 257, 64: 577, 80: 0, 128: 1025}[D] >= T
        bwd = here and D == 64 and T in (150, 197)
        for table, config, takes in (
            (FWD_TABLE, PINGPONG_FWD, fwd),
            (BWD_TABLE, PINGPONG_BWD, bwd),
        ):
            assert table.fits(on, config, *key) == takes, (T, D, dtype)
            assert (table.default(on, *key) == config) == takes
    for other in (
        _problem(256, 197, 12, 64, bf16, H100)._replace(mask="causal"),
        _problem(256, 197, 12, 64, bf16, H100)._replace(dropout=True),
        _problem(10, 197, 12, 64, bf16, H100),  # a program a head leaves SMs idle
    ):
        for table, config in ((FWD_TABLE, PINGPONG_FWD), (BWD_TABLE, PINGPONG_BWD)):
            assert not table.fits(H100, config, *other.key())


def test_five_products_run_where_the_model_says_so_if_asked_for(gluon):
    if not has_gluon():
        pytest.skip("triton is not installed, or has another Gluon")
    key = _problem(64, 577, 12, 64, bf16, H100).key()
    assert BWD_TABLE.default(H100, *key) != FUSED_DQ  # until it has run on a GPU
    gluon.setenv("FASTVIT_KERNELS_FUSED_DQ", "1")
    shapes = product((H100, A100), (150, 257, 300, 577, 2305, 4096, 4097), (24, 32, 64, 72), TYPES)
    for on, T, D, dtype in shapes:
        key = _problem(64, T, 12, D, dtype, on).key()
        longest = 4096 if on is H100 and dtype is not fp32 else 0
        takes = {24: 257, 32: 257, 64: 300, 72: 10**9}[D] <= T <= longest
        assert (BWD_TABLE.default(on, *key) == FUSED_DQ) == takes, (T, D, dtype)
        assert BWD_TABLE.fits(on, FUSED_DQ, *key) == takes
    for other in (
        _problem(64, 577, 12, 64, bf16, H100)._replace(mask="causal"),
        _problem(64, 577, 12, 64, bf16, H100)._replace(dropout=True),
        _problem(10, 577, 12, 64, bf16, H100),  # fewer heads than SMs
    ):
        assert not BWD_TABLE.fits(H100, FUSED_DQ, *other.key())


@pytest.mark.parametrize(
    ("num_heads", "T", "dealt"),
    [
        (528, 577, (132, 528, 132)),
        (300, 1025, (132, 264, 168)),  # 36 left over, by key blocks
        (72, 4096, (132, 0, 204)),
        (130, 577, (130, 130, 130)),  # two idle SMs are less than a twentieth
        (2, 300, (6, 0, 8)),
    ],
)
def test_how_heads_are_dealt(num_heads, T, dealt):
    if not has_gluon():
        pytest.skip("triton is not installed, or has another Gluon")
    from fastvit_kernels.ops.attention.backward_fused_dq import plan

    assert plan(num_heads, T, H100.num_sms) == dealt


def test_gluon_can_be_turned_off(gluon):
    gluon.setenv("FASTVIT_KERNELS_GLUON", "0")
    key = _problem(256, 197, 12, 64, bf16, H100).key()
    assert not has_turns(H100) and FWD_TABLE.default(H100, *key).route == "triton"
    assert BWD_TABLE.default(H100, *_problem(64, 577, 12, 64, bf16, H100).key()).route == "triton"


def test_an_interface_that_has_changed_is_told_once(gluon, recwarn):
    gluon.setitem(sys.modules, "fastvit_kernels.runtime.gluon", None)
    assert not has_gluon() and not has_gluon()
    assert [str(w.message).split(" with")[0] for w in recwarn] == ["no Gluon kernels"]


def test_what_attention_in_turns_cannot_take_runs_plain(monkeypatch):
    """Launches of tensors that are not packed; all in the interpreter, which has no Gluon."""
    with forced(FWD_TABLE.name, PINGPONG_FWD), forced(BWD_TABLE.name, PINGPONG_BWD):
        problem = _problem(256, 197, 12, 64, bf16, H100)
        assert by_field(fwd_launch(*problem).options)["num_warps"] == 4
        one_pass, split = bwd_launch(*problem)
        assert one_pass is not None and not split
        strides = ((197 * 2304, 2304, 64, 1),) * 3
        layouts = Layouts(H100, bf16, problem.shape, 197, strides, None, False, False, 0.1, 0.0, "")
        grads = H100, True, 2304, 2304, bf16, problem.shape, 197, ((0,) * 4, *strides), *layouts[5:]
        if INTERPRETED:
            assert not fwd_call(*layouts, of_qkv=True).of_qkv
            assert not bwd_call(*grads, of_qkv=True).of_qkv
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with forced(FWD_TABLE.name, PINGPONG_FWD), forced(BWD_TABLE.name, PINGPONG_BWD):
        assert not fwd_call(*layouts).of_qkv
        assert fwd_call(*layouts, of_qkv=True).of_qkv == has_gluon()
        assert not bwd_call(*grads).of_qkv
        assert bwd_call(*grads, of_qkv=True).of_qkv == has_gluon()
    monkeypatch.setenv("FASTVIT_KERNELS_FUSED_DQ", "1")
    strides = ((577 * 2304, 2304, 64, 1),) * 4
    for T_kv in (577, 576):
        fields = bf16, (64, 577, 12, 64), T_kv, strides, *layouts[5:]
        call = bwd_call(H100, False, 2304, 2304, *fields)
        assert (call.fused_dq is not None) == (has_gluon() and T_kv == 577)
