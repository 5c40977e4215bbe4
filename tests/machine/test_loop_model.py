"""The model of a kernel's time, and what ranks by it, in numbers that follow from its words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fastvit_kernels.runtime.backend import Gpu
from fastvit_kernels.runtime.configs import TABLES, Choice, ConfigTable
from tests.machine import faults, loop_model, sass
from tests.machine.aot import TARGETS
from tests.machine.loop_model import (
    BARRIER,
    LATENCY,
    LAUNCH,
    LIBRARY_START,
    ROOFS,
    START,
    WAIT,
    Region,
    Work,
    bound,
    hot_loop,
    launch_time,
    product_cycles,
    regions,
    unit_cycles,
    work,
)
from tests.machine.ptx import Ptx
from tests.machine.test_machine_code import PTX, SASS
from tests.machine.useful import USEFUL, useful_products

A100, H200 = ROOFS["sm_80"], ROOFS["sm_90"]


def test_a_tensor_core_takes_its_rate():
    assert product_cycles([("HMMA", 16, 8, 16, 3)], A100) == 3 * 16 * 8 * 16 / 256
    # 64 rows are four warps': a sub-core has a quarter of them
    assert product_cycles([("HGMMA", 64, 64, 16, 2)], H200) == 2 * 64 * 64 * 16 / 4 / 512
    tf32 = product_cycles([("HGMMA", 64, 64, 8, 2)], H200)  # half of K at the same cost
    assert tf32 == product_cycles([("HGMMA", 64, 64, 16, 2)], H200)
    assert product_cycles([("HGMMA", 64, 64, 16, 2)], A100) == 0  # it has none


COUNTS = sass.Counts(
    instructions=50,
    products=(("HMMA", 16, 8, 16, 2),),
    special=3,
    fp32=10,
    integer=7,
    shared_bytes=512,
    async_bytes=256,
    barriers=1,
    waits=0,
    operand_bytes=128,
)


def test_each_unit_takes_its_rate():
    """Of 32 lanes: 4 special functions, 16 of the ALU, 16 or 32 of fp32 and 32 bytes a cycle."""
    found = unit_cycles(COUNTS, A100)
    assert found == {
        "tensor": 16.0,
        "issue": 50.0,
        "MUFU": 24.0,
        "fp32": 20.0,
        "ALU": 14.0,
        "shared": 28.0,
    }
    assert unit_cycles(COUNTS, H200)["fp32"] == 10.0
    assert bound(found) == "issue"


DONE = Work({"tensor": 1000.0, "issue": 400.0}, 5000.0, 1e6, 6e5, False)


def test_a_launch_takes_its_waves_its_bytes_and_its_longest_part():
    """300 programs of 8 warps on 132 SMs: the busiest has 3, whose warps four sub-cores share."""
    found = launch_time(DONE, H200, programs=300, num_warps=8, resident=1, tensor_bytes=4.3e6)
    cycle = 1e-3 / H200.ghz
    assert found.parts == pytest.approx(
        {
            "tensor": 1000 * 3 * 2 * cycle,
            "issue": 400 * 3 * 2 * cycle,
            "chain": 5000 * 3 * cycle,
            "L2": 300 * 6e5 / 10240 * cycle,
            "HBM": 1.0,
        }
    )
    assert found.bound == "L2" and found.multiply_adds == 300e6 and not found.guessed
    assert found.us == pytest.approx(LAUNCH + sum(x**3 for x in found.parts.values()) ** (1 / 3))
    two = launch_time(DONE, H200, programs=300, num_warps=8, resident=2, tensor_bytes=4.3e6)
    assert two.parts["chain"] == pytest.approx(5000 * 2 * cycle)  # 264 at once


def test_the_work_of_a_launch_is_that_of_its_programs():
    """Program 3 of 4 leaves at once, the others go ten times round: 7.5 rounds on average."""
    kernel = Ptx(PTX)
    ((head, _),) = kernel.loops
    other = [b for b in range(len(kernel.blocks)) if b != head]
    loop = sass.count(sass.loops(sass.instructions(SASS))[1].own)
    parts = [Region(sass.count([]), tuple(other), False), Region(loop, (head,), True)]
    done = work(parts, kernel, [None, 577], (4,), H200, num_stages=3, resident=1)
    warps, rounds = 4, 7.5
    assert done.multiply_adds == rounds * warps * 64 * 64 * 16 / 4
    stored, copied = 0.75 * 512, 0.75 * 2 * 16 * 32  # a warp's; the copies past n are masked
    assert done.bytes_moved == pytest.approx(warps * (stored + copied))
    one = unit_cycles(loop, H200)
    assert done.cycles["MUFU"] == rounds * one["MUFU"] == rounds * 8
    assert done.cycles["issue"] == pytest.approx(rounds * loop.instructions)
    tensor = rounds * 64 * 64 * 16 / 4 / 512  # PTX has one product, of 64 columns
    assert done.cycles["tensor"] == tensor
    in_shared = loop.shared_bytes + (64 + 64) * 32 // 4 + 512
    # PTX reads 512 bytes where SASS has 1,024; the operands and the copies are PTX's
    assert done.cycles["shared"] == pytest.approx(rounds * in_shared / 32)
    waits = loop.waits * rounds / loop.hgmma
    busiest = done.cycles["shared"]
    spent = busiest + tensor + WAIT * waits + BARRIER * rounds
    ahead = 2 * spent / rounds  # no wait_group: of three stages two are on their way
    assert done.chain == pytest.approx(START + spent + rounds * max(0.0, LATENCY - ahead))
    assert not done.guessed
    by_warp = PTX.replace("wgmma.mma_async.sync.aligned.m64n64k16", "mma.sync.aligned.m16n8k16")
    done_by_warp = work(parts, Ptx(by_warp), [None, 577], (4,), H200, 3, 1)
    assert done_by_warp.multiply_adds == rounds * warps * 16 * 8 * 16
    assert work(parts, kernel, [None, None], (4,), H200, 3, 1).guessed
    assert work(parts, kernel, [None, 577], (4,), H200, 3, 1000).chain < done.chain


@pytest.mark.parametrize(
    ("waits", "groups", "lead"), [((0,), 2, 0), ((2,), 2, 1), ((4, 2), 2, 1), ((3,), 2, 1.5)]
)
def test_a_load_leads_by_what_its_wait_leaves_pending(waits, groups, lead):
    ops = [f"cp.async.wait_group {n};" for n in waits] + ["cp.async.commit_group;"] * groups
    loop = "$head:\n" + "\n".join(ops) + "\n@%p1 bra $head;\nret;"
    kernel = Ptx(".visible .entry k(\n.param .u32 k_param_0\n)\n{\n" + loop + "\n}")
    ((head, _),) = kernel.loops
    assert loop_model.lead(kernel, (head,), num_stages=3) == lead
    assert loop_model.lead(kernel, (), num_stages=3) == 2  # TMA


def test_loops_of_sass_and_ptx_are_paired_where_their_numbers_agree():
    code, kernel = sass.instructions(SASS), Ptx(PTX)
    (whole,) = regions(code, kernel)  # two loops in SASS, one in PTX
    assert whole == Region(sass.count(code), tuple(range(len(kernel.blocks))), True)
    start = SASS.index("        /*00d0*/")
    one_loop = sass.instructions(SASS[:start] + SASS[SASS.index("        /*00e0*/") :])
    outside, loop = regions(one_loop, kernel)
    assert loop.is_loop and not outside.is_loop and loop.blocks == (kernel.loops[0].head,)
    both = outside.counts.instructions + loop.counts.instructions
    assert both == sass.count(one_loop).instructions and loop.counts.instructions == 11


def test_the_hot_loop_is_that_of_the_products():
    outer, inner = sass.loops(sass.instructions(SASS))
    assert hot_loop([outer, inner]) is inner and hot_loop([]) is None
    long = sass.Loop(0, 0, outer.own * 20)
    assert hot_loop([inner, long]) is inner and hot_loop([outer, long]) is long


# --- what a launch is for


def test_useful_products_are_those_of_the_mathematics():
    attention = {"lse_ptr": ((2, 3, 5), "fp32"), "T_kv": 7, "D": 4}
    one = 2 * 3 * 5 * 7 * 4
    products = {  # Q K^T and P V; with dP, dV, dK, dQ in the backward; a bias needs P and dP
        "attention_fwd": 2,
        "attention_bwd_one_pass": 5,
        "attention_bwd_dq": 3,
        "attention_bwd_dkdv": 4,
        "attention_bwd_bias": 2,
    }
    assert {k: useful_products(k, attention) for k in products} == {
        kernel: n * one for kernel, n in products.items()
    }
    in_turns = {"lse_ptr": ((2, 3, 5), "fp32"), "T": 5, "out": SimpleNamespace(shape=[2, 5, 3, 4])}
    turns = {"attention_fwd_pingpong": 2, "attention_bwd_pingpong": 5}
    assert {k: useful_products(k, in_turns) for k in turns} == {
        kernel: n * 2 * 3 * 5 * 5 * 4 for kernel, n in turns.items()
    }
    fused = {"q": SimpleNamespace(shape=[2, 5, 3, 4])}
    assert useful_products("attention_bwd_fused_dq", fused) == 5 * 2 * 3 * 5 * 5 * 4
    product = {"M": 3, "N": 5, "K": 7, "F": 11}
    assert useful_products("linear_fwd", product) == 3 * 5 * 7
    assert useful_products("mlp_bwd_hidden", product) == 3 * 11 * 5
    assert {*USEFUL} == {
        *products,
        *turns,
        "attention_bwd_fused_dq",
        "linear_fwd",
        "mlp_bwd_hidden",
    }


# --- faults in code


def _ptx(*lines):
    body = "\n".join(f"\t{line};" if not line.endswith(":") else line for line in lines)
    return Ptx(f".visible .entry k(\n)\n.reqntid 128\n{{\n{body}\n\tret;\n}}\n")


COPY = "cp.async.cg.shared.global [ %r9 + 0 ], [ %rd1 + 0 ], 0x10"
PRODUCT = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r30}, %rd8, %rd9, 1, 1, 1, 0, 0"
FENCE, ALL, SUBSET = "fence.proxy.async", "cp.async.wait_group 0", "cp.async.wait_group 1"
BACK = ["@%p2 bra $L__BB0_1"]


@pytest.mark.parametrize(
    ("lines", "unfenced"),
    [
        ([COPY, ALL, PRODUCT], True),
        ([COPY, ALL, FENCE, PRODUCT], False),
        ([COPY, "cp.async.wait_all", PRODUCT], True),
        ([COPY, SUBSET, FENCE, PRODUCT], False),
        ([COPY, SUBSET, FENCE, SUBSET, PRODUCT], True),  # what was still under way has landed
        ([COPY, ALL, FENCE, ALL, PRODUCT], False),  # nothing was
        ([COPY, "cp.async.wait_all", FENCE, "cp.async.wait_all", PRODUCT], False),
        ([ALL, PRODUCT], False),
        ([COPY, ALL, "bra $L__BB0_1", PRODUCT, "$L__BB0_1:"], False),  # never reached
        ([COPY, ALL, "@%p2 bra $L__BB0_1", PRODUCT, "$L__BB0_1:"], True),
        ([COPY, PRODUCT], False),  # reads another buffer: nothing has landed
        (["$L__BB0_1:", PRODUCT, COPY, ALL, *BACK], True),  # round the loop
        (["$L__BB0_1:", PRODUCT, COPY, ALL, FENCE, *BACK], False),
    ],
)
def test_copies_are_fenced_before_a_product_reads_them(lines, unfenced):
    assert faults._reads_before_fence(_ptx(*lines)) == unfenced


def _code(**parts):
    return SimpleNamespace(**{"remarks": "", "loops": [], "instructions": [], "ttgir": ""} | parts)


def _waits(waits, products):
    lines = ["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT, gsb0"] * products
    lines += ["WARPGROUP.DEPBAR.LE gsb0, 0x0"] * waits
    text = "\n".join(f"        /*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines))
    return _code(loops=[sass.Loop(0, 0, tuple(sass.instructions(text)))])


@pytest.mark.parametrize(
    ("waits", "products", "found"), [(2, 2, 1), (3, 2, 1), (1, 2, 0), (1, 1, 0)]
)
def test_a_loop_that_waits_for_each_product_is_a_fault(waits, products, found):
    assert len(list(faults.serialised(_waits(waits, products)))) == found


def _dot(version, down, across, M, N, rows, columns):
    return _code(
        ttgir=(
            f"#mma = #ttg.nvidia_mma<{{versionMajor = {version}, versionMinor = 0, "
            f"warpsPerCTA = [{down}, {across}], instrShape = [{M}, {N}, 16]}}>\n"
            f"%9 = tt.dot %1, %2, %3 : x -> tensor<{rows}x{columns}xf32, #mma>\n"
        )
    )


@pytest.mark.parametrize(
    ("dot", "times"),
    [
        (_dot(2, 4, 1, 16, 8, 64, 64), 0),
        (_dot(2, 8, 1, 16, 8, 64, 64), 2),
        (_dot(2, 2, 4, 16, 8, 64, 16), 2),
        (_dot(2, 8, 1, 16, 8, 16, 32), 0),  # a tail: fewer tiles than warps
        (_dot(3, 8, 1, 16, 64, 64, 64), 2),
        (_dot(3, 8, 1, 16, 16, 64, 16), 0),  # of wgmma a tile has 16 columns
        (_dot(3, 4, 1, 16, 64, 64, 64), 0),
    ],
)
def test_warps_that_compute_the_same_are_a_fault(dot, times):
    found = list(faults.duplicated_products(dot))
    assert len(found) == (times > 0) and (not found or found[0].endswith(f"{times} times"))


def test_every_rule_is_asked():
    code = _dot(2, 8, 1, 16, 8, 64, 64)
    code.loops = _waits(2, 2).loops
    code.instructions = sass.instructions("/*0000*/ HGMMA.64x8x16.F32.BF16 R24, gdesc[UR12] ;")
    code.ttgir += (
        "%4 = ttg.memdesc_index %3[%c0] : x\n"
        "%5 = ttg.async_copy_global_to_local %1, %4 : x\n"
        "%6 = ttng.warp_group_dot %4, %7, %8 : !ttg.memdesc<64x64> * tensor<64x64> -> y\n"
    )
    code.blocks = _ptx(COPY, ALL, PRODUCT)
    code.remarks = "ptxas info (C7515) Potential: wgmma serialized due to waits in function 'k'"
    found = faults.faults(code)
    assert len(found) == 5 and "C7515" in found[0] and "waits 2 times for 2" in found[1]
    assert "8 columns" in found[2] and "1 buffers" in found[3] and "more than once" in found[4]


def test_useful_products_need_a_launch_that_says_how_many_keys_there_are():
    a = {"lse_ptr": ((2, 3, 5), "fp32"), "T_kv": 7, "D": 4}
    count = 2 * (2 * 3 * 5) * 7 * 4
    assert useful_products("attention_fwd", a) == count
    assert useful_products("attention_fwd", {**a, "IS_CAUSAL": True}) == count * (1 + 1 / 7) / 2
    assert useful_products("attention_fwd", {**a, "VARLEN": True}) is None
    assert useful_products("attention_fwd", {**a, "MASK": "keys"}) is None
    assert useful_products("layer_norm_fwd", a) is None


# --- ranking

rank = pytest.importorskip("tests.machine.ranking")
from tests.machine.ranking import LibraryCall, library_time  # noqa: E402


def test_a_choice_is_made_for_its_key_alone_and_taken_back():
    here = Gpu("sm_90", 132, 2**17)
    table = ConfigTable("ranked", [("a",), ("b",)], lambda gpu, size: ("a",))
    try:
        assert table.choose(here, 8) == ("a",)
        with rank.chosen(table, (8,), ("b",)):
            assert [table.choose(here, size) for size in (8, 16)] == [("b",), ("a",)]
        assert table.choose(here, 8) == ("a",)
    finally:
        del TABLES["ranked"]


def _launch(kernel, **arguments):
    return SimpleNamespace(kernel=SimpleNamespace(kernel=kernel), arguments=arguments)


@pytest.mark.parametrize(
    ("table", "launch", "belongs"),
    [
        ("attention_fwd", _launch("attention_fwd"), True),
        ("attention_fwd", _launch("attention_bwd_dq"), False),
        ("layer_norm_fwd", _launch("norm_fwd"), True),
        ("layer_norm_fwd", _launch("norm_bwd"), False),
        ("rope_bwd", _launch("rope_norm_bwd"), True),
        ("linear_fwd", _launch("linear_fwd", N=3072, K=768), True),
        ("linear_fwd", _launch("linear_fwd", N=768, K=3072), False),
    ],
)
def test_launches_are_their_tables(table, launch, belongs):
    key = (4096, 3072, 768, "bf16") if table == "linear_fwd" else (64,)
    assert rank._belongs(launch, Choice(table, Gpu("sm_90", 132, 2**17), key)) == belongs


def test_a_library_call_takes_its_tiles_and_its_bytes():
    copy = LibraryCall("copy_", 0, 0, 0, 43 * 10**6)
    assert library_time(copy, H200) == pytest.approx(LAUNCH + 10.0)
    product = LibraryCall("mm", 128 * 12, 256 * 12, 1024, 0)  # 144 tiles on 132 SMs
    cycles = 2 * (128 * 256 * 1024 / (4 * 512) + LIBRARY_START)
    assert library_time(product, H200) == pytest.approx(LAUNCH + cycles * 1e-3 / H200.ghz)
    assert library_time(product, A100) == pytest.approx(
        LAUNCH + 2 * (128 * 256 * 1024 / (4 * 256) + LIBRARY_START) * 1e-3 / A100.ghz
    )


def test_the_model_gives_the_published_rates_of_the_library():
    """cuBLAS in TFLOP/s, bf16 on an H200; a copy of 1 GiB. Attention's: test_peers.py."""

    def rate(M, N, K):
        moved = 2 * (M * K + N * K + M * N)
        return 2 * M * N * K / library_time(LibraryCall("mm", M, N, K, moved), H200) * 1e-6

    assert rate(8192, 8192, 8192) == pytest.approx(788, rel=0.03)
    assert rate(50432, 3072, 768) == pytest.approx(640, rel=0.03)  # fc1 of ViT-B, 256 images
    # triton's tutorial gluon/07, fp16, on an H100, whose copies and clocks are slower
    published = {512: 588, 1024: 588, 2048: 616}
    assert all(0.9 < rate(8192, 8192, K) / n < 1.2 for K, n in published.items())
    copied = 2 * 2**30
    us = library_time(LibraryCall("copy_", 0, 0, 0, copied), H200)
    assert copied / us * 1e-3 == pytest.approx(4300, rel=0.01)


def test_the_time_of_a_trace_is_of_kernels_and_library(monkeypatch):
    modelled = SimpleNamespace(us=5.0)
    monkeypatch.setattr(rank, "timed", lambda launch: SimpleNamespace(modelled=modelled))
    copy = LibraryCall("copy_", 0, 0, 0, 43 * 10**6)
    us, launches = rank.trace_time(SimpleNamespace(launches=[1, 2], torch_calls=[copy]), "sm_90")
    assert us == pytest.approx(2 * 5.0 + LAUNCH + 10.0) and len(launches) == 2


# --- what a step calls


def test_bytes_and_sizes_of_a_step():
    from tests.machine import aot, launches

    x = torch.empty(6, 1, 5, dtype=torch.bfloat16)
    assert launches.tensor_bytes(x) == 60 == launches.tensor_bytes(x.expand(6, 7, 5))
    mm, bmm, view = torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.view
    a, b = torch.empty(3, 5), torch.empty(5, 7)
    found = launches._library_call(mm, (a, b), torch.mm(a, b))
    assert found == ("mm", 3, 7, 5, 4 * (15 + 35 + 21))
    a, b = torch.empty(2, 3, 5), torch.empty(2, 5, 7)
    assert launches._library_call(bmm, (a, b), torch.bmm(a, b))[:4] == ("bmm", 6, 7, 5)
    assert launches._library_call(view.default, (a, [30]), a.view(30)) is None
    assert (
        launches._library_call(torch.ops.aten.empty_like.default, (a,), torch.empty_like(a)) is None
    )
    c = torch.empty(3)
    add = torch.ops.aten.addmm.default
    a, b = torch.empty(2, 5), torch.empty(5, 3)
    assert launches._library_call(add, (c, a, b), torch.addmm(c, a, b))[:4] == ("addmm", 2, 3, 5)
    pointer, (inner, number) = aot._pointers(a[:, 1:]), aot._pointers((a, 3))
    assert pointer.data_ptr() == 4 and pointer.dtype is torch.float32 and number == 3
    assert inner.data_ptr() == 0 and inner.ptr_range() == 40


def test_library_calls_of_a_step_are_listed():
    from tests.machine import aot
    from tests.machine.launches import Trace

    trace = Trace(TARGETS["sm_90"])
    a, b = torch.ones(3, 5), torch.ones(5, 7)
    with aot._RunLaunchers(trace):
        torch.mm(a, b).t().relu()
    assert [call.name for call in trace.torch_calls] == ["mm", "relu"]
    assert trace.torch_calls[0] == ("mm", 3, 7, 5, 4 * (15 + 35 + 21))


def test_a_trace_has_the_code_of_each_kernel_once(monkeypatch):
    from tests.machine import aot, launches

    kept = []
    monkeypatch.setattr(launches, "keep_remarks", lambda *what: kept.append(what))
    monkeypatch.setattr(launches, "inspect", lambda compiled, target, kernel: kernel)
    compiled = SimpleNamespace(
        asm={"ttgir": ""},
        metadata=SimpleNamespace(num_warps=8),
        src=SimpleNamespace(signature={"x": "*fp32", "sizes": ("i32", "*fp32"), "B": "constexpr"}),
    )
    x = torch.empty(3, 5)
    given = {"x": x, "sizes": (7, x[:1]), "B": 16}
    launch = aot.Launch(SimpleNamespace(key="k"), compiled, (3,), given)
    trace = launches.Trace(TARGETS["sm_90"])
    assert trace.compile(lambda: print("remarks") or compiled) is compiled
    assert kept == [(compiled, "remarks\n")]
    for _ in range(2):
        trace.launched(launch)
    first, second = trace.launches
    assert first.code is second.code and first.code.num_warps == 8
    assert (first.grid, first.integers, first.tensor_bytes) == ((3,), (None, 7, None), 4 * (15 + 5))
    assert first.arguments["x"] == ((3, 5), torch.float32) and first.arguments["B"] == 16
    amd = launches.Trace(TARGETS["gfx942"])
    amd.launched(launch)
    assert amd.launches[0].code is None


def test_instructions_of_a_kernel_are_those_of_its_disassembly(monkeypatch):
    from tests.machine import machine_code

    monkeypatch.setattr(machine_code, "printed_by", lambda tool, cubin, *_: cubin)
    monkeypatch.setattr(machine_code, "_kept", lambda compiled, kind, make: make())
    compiled = SimpleNamespace(asm={"cubin": SASS})
    code = machine_code.Code(compiled, 4)
    assert code.instructions == sass.instructions(SASS)
    assert len(code.loops) == 2
