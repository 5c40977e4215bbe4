"""Readers of SASS and PTX, on small recorded pieces."""

import pytest

from tests.machine import ptx, sass, scalar
from tests.machine.flow import natural_loops
from tests.machine.useful import longest_walk

# Two nested loops, a padding loop behind the end, and what a warp does in the inner one.
SASS = """
.text.kernel:
        /*0000*/                   S2R R0, SR_CTAID.X ;
.L_x_1:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_0:
        /*0020*/                   WARPGROUP.ARRIVE ;
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT, gsb0 ;
        /*0040*/                   HGMMA.64x32x16.F32.BF16 R24, R56, gdesc[UR12].tnspB, R24, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   MUFU.EX2 R4, R4 ;
        /*0070*/                   FFMA.FTZ R5, R4, R4, R5 ;
        /*0080*/                   LDSM.16.M88.4 R8, [R3] ;
        /*0090*/                   STS.128 [R3], R8 ;
        /*00a0*/              @!P1 LDGSTS.E.BYPASS.128 [R3], desc[UR24][R6.64] ;
        /*00b0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00c0*/               @P0 BRA `(.L_x_0) ;
        /*00d0*/              @!P2 BRA `(.L_x_1) ;
        /*00e0*/                   EXIT ;
.L_x_7:
        /*00f0*/                   BRA `(.L_x_7);
        /*0100*/                   NOP;
.L_x_8:
"""


def test_sass_loops():
    code = sass.instructions(SASS)
    assert len(code) == 17 and code[10].guard == "@!P1"
    outer, inner = sass.loops(code)
    assert (outer.first, outer.last) == (0x10, 0xD0) and (inner.first, inner.last) == (0x20, 0xC0)
    assert [one.kind for one in outer.own] == ["IADD3", "BRA"]


# A wait stands behind the kernel's end: it jumps back into the loop, and is not another one.
WAIT = """
        /*0000*/                   S2R R0, SR_CTAID.X ;
.L_x_0:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [R2], R3 ;
        /*0020*/              @!P3 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   FADD R4, R4, R4 ;
        /*0040*/               @P0 BRA `(.L_x_0) ;
        /*0050*/                   EXIT ;
.L_x_2:
        /*0060*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P3, [R2], R3 ;
        /*0070*/              @!P3 BRA `(.L_x_2) ;
        /*0080*/                   BRA `(.L_x_1) ;
"""


def test_sass_loops_are_those_of_the_graph():
    outer, spin = sass.loops(sass.instructions(WAIT))
    assert outer.first == 0x10 and len(outer.own) == 5  # with the jump back at 0x80
    assert spin.first == 0x60 and len(spin.own) == 2


@pytest.mark.parametrize(
    ("successors", "loops"),
    [
        ([[1], [2], [1, 3], []], [(1, {1, 2})]),
        ([[1], [1, 2], []], [(1, {1})]),
        ([[1], [2], [2, 3], [1, 4], []], [(1, {1, 2, 3}), (2, {2})]),
        ([[1, 2], [2], [1, 3], []], []),  # entered in two places: neither dominates
    ],
)
def test_natural_loops(successors, loops):
    assert natural_loops(successors) == [(head, frozenset(body)) for head, body in loops]


@pytest.mark.parametrize("branch", ["@!P3 BRA", "@!UP3 BRA", "BRA UP3,"])
def test_a_branch_under_a_predicate_may_fall_through(branch):
    """Whether it stands before the instruction or, a uniform one, among its operands."""
    text = WAIT.replace("@!P3 BRA", branch)
    outer, spin = sass.loops(sass.instructions(text))
    assert (outer.first, spin.first) == (0x10, 0x60)


def test_sass_classes():
    """Of each unit, and what is on none of them."""
    lines = [
        "IMAD R1, R2, R3, R4",
        "FADD R1, R2, R3",
        "I2F R1, R2",
        "MUFU.RCP R1, R2",
        "NOP",
        "IADD3 R1, R2, R3, R4",
        "LOP3.LUT R1, R2, R3, R4",
        "UIADD3 UR4, UR5, UR6, URZ",
        "LDS.U16 R1, [R2]",
        "STS.64 [R1], R2",
        "LDSM.16.M88.2 R1, [R2]",
        "LDG.E R1, R2",
        "HMMA.16816.F32.BF16 R1, R2, R3, R4",
    ]
    text = "\n".join(f"/*{16 * i:04x}*/ {line} ;" for i, line in enumerate(lines))
    counts = sass.count(sass.instructions(text))
    assert (counts.instructions, counts.fp32, counts.special, counts.integer) == (12, 2, 2, 2)
    assert counts.shared_bytes == 64 + 256 + 256 and counts.async_bytes == counts.hgmma == 0
    assert counts.products == (("HMMA", 16, 8, 16, 1),) and counts.operand_bytes == 0


def test_sass_counts():
    _, inner = sass.loops(sass.instructions(SASS))
    counts = sass.count(inner.own)
    assert counts.products == (("HGMMA", 64, 32, 16, 1), ("HGMMA", 64, 64, 16, 1))
    assert (counts.instructions, counts.hgmma, counts.waits, counts.barriers) == (11, 2, 1, 1)
    assert (counts.special, counts.fp32, counts.integer) == (1, 1, 0)
    assert counts.shared_bytes == 512 + 512 and counts.async_bytes == 512
    # A quarter of the rows of 32 bytes: 64 + 64 with both operands in shared memory, 32 with one.
    assert counts.operand_bytes == (64 + 64 + 32) * 32 // 4


# for (k = 0; k < cdiv(n, 64); k++) where program 3 of 4 leaves at once.
PTX = """
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1
)
.reqntid 128
{
	.reg .pred 	%p<5>;
	.loc	1 3 0
	ld.param.b32 	%r1, [kernel_param_1];
	mov.u32 	%r2, %ctaid.x;
	setp.eq.s32 	%p1, %r2, 3;
	@%p1 bra 	$L__BB0_3;
// %bb.1:
	add.s32 	%r3, %r1, 63;
	shr.s32 	%r4, %r3, 6;
	mov.b32 	%r5, 0;
$L__BB0_2:                              // =>This Inner Loop Header: Depth=1
$L__tmp7:
	setp.lt.s32 	%p3, %r5, 2;
	selp.b32 	%r7, 16, 0, %p3;
	cp.async.cg.shared.global [ %r9 + 0 ], [ %rd1 + 0 ], 0x10, %r7;
	ld.shared.v4.b32 	{%r20, %r21, %r22, %r23}, [%r9];
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r30,%r31}, %rd8, %rd9, 1, 1, 1, 0, 0;
	ex2.approx.ftz.f32 	%r40, %r41;
	add.s32 	%r5, %r5, 1;
	setp.lt.s32 	%p2, %r5, %r4;
	@%p2 bra 	$L__BB0_2;
	st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
$L__BB0_3:
	ret;
}
"""


@pytest.mark.parametrize(("n", "trips"), [(1, 1), (64, 1), (65, 2), (577, 10)])
def test_ptx_trip_counts(n, trips):
    kernel = ptx.Ptx(PTX)
    assert kernel.num_warps == 4 and len(kernel.loops) == 1
    ((first, blocks),) = kernel.loops
    run = kernel.executions([None, n], (0,), (4,))
    assert blocks == {first} and run.blocks[first] == trips and not run.guessed
    assert run.copied == 16 * min(trips, 2)  # masked copies move nothing
    assert kernel.executions([None, n], (3,), (4,)).blocks[first] == 0
    assert kernel.executions([None, None], (0,), (4,)).guessed


def test_ptx_ends_what_never_ends():
    """A loop that counts nothing is guessed, not run for ever."""
    text = PTX.replace("add.s32 \t%r5, %r5, 1;", "mov.b32 %r5, 0;")
    assert text != PTX and ptx.Ptx(text).executions([None, 577], (0,), (4,)).guessed


def test_ptx_forgets_what_may_have_been_written():
    """Under a predicate that memory holds."""
    count = "shr.s32 \t%r4, %r3, 6;"
    loaded = f"{count} ld.global.b32 %r8, [%rd1]; setp.eq.s32 %p9, %r8, 0; "
    known, unknown = (
        PTX.replace(count, f"{loaded}@%p9 mov.b32 {name}, 5;") for name in ("%r6", "%r4")
    )
    kernel = ptx.Ptx(known)
    assert kernel.executions([None, 577], (0,), (4,)).blocks[kernel.loops[0].head] == 10
    assert not kernel.executions([None, 577], (0,), (4,)).guessed
    assert ptx.Ptx(unknown).executions([None, 577], (0,), (4,)).guessed


def test_ptx_predicates_may_be_negated():
    text = PTX.replace("setp.lt.s32 \t%p2", "setp.ge.s32 \t%p2").replace("@%p2 bra", "@!%p2 bra")
    kernel = ptx.Ptx(text)
    ((first, _),) = kernel.loops
    assert kernel.executions([None, 577], (0,), (4,)).blocks[first] == 10


def test_ptx_waits_are_no_loops_of_unknown_length():
    compare, loaded = "setp.lt.s32 \t%p2, %r5, %r4;", "ld.shared.b32 %r4, [%r9]; "
    assert compare in PTX
    unknown = ptx.Ptx(PTX.replace(compare, loaded + compare))
    assert unknown.executions([None, 577], (0,), (4,)).guessed
    wait = "mbarrier.try_wait.parity.shared.b64 %p2, [%r5], %r4;"
    assert not ptx.Ptx(PTX.replace(compare, wait)).executions([None, 577], (0,), (4,)).guessed


@pytest.mark.parametrize("leaves", [False, True], ids=["jumps-back", "jumps-out"])
def test_ptx_loops_whose_end_memory_holds_run_as_often_as_they_are_told(leaves):
    text = PTX.replace(
        "setp.lt.s32 \t%p2, %r5, %r4;", "ld.shared.b32 %r4, [%r9]; setp.lt.s32 %p2, %r5, %r4;"
    )
    if leaves:
        text = text.replace("@%p2 bra \t$L__BB0_2;", "@!%p2 bra $L__BB0_3; bra.uni $L__BB0_2;")
    kernel = ptx.Ptx(text)
    ((first, _),) = kernel.loops
    for trips in (1, 4):
        run = kernel.executions([None, 577], (0,), (4,), trips=trips)
        assert run.blocks[first] == trips and not run.guessed


def test_walks_of_packed_sequences_and_of_masked_keys():
    """As if each were the longest, and all keys shown; a loop over queries knows its tail."""
    sizes = {"T_q": 197, "T_kv": 257, "BLOCK_Q": 32, "TAIL_Q": 16, "BLOCK_KV": 64, "TAIL_KV": 64}
    packed, masked = sizes | {"VARLEN": True, "MASK": "none"}, sizes | {"MASK": "keys"}
    assert [longest_walk("attention_fwd", a) for a in (packed, masked)] == [5, 5]
    assert longest_walk("attention_bwd_dkdv", masked) == 6
    assert longest_walk("attention_fwd", {**sizes, "MASK": "bool"}) is None
    assert longest_walk("norm_fwd", {}) is None


def test_ptx_counts():
    kernel = ptx.Ptx(PTX)
    (loop,) = [natural.head for natural in kernel.loops]
    counts = ptx.count(kernel.blocks[loop].ops)
    assert counts.products == (("HGMMA", 64, 64, 16, 1),)
    assert counts.operand_bytes == (64 + 64) * 32 // 4
    assert (counts.special, counts.shared_bytes, counts.async_bytes) == (1, 512, 512)
    moved = ptx.traffic([op for block in kernel.blocks for op in block.ops])
    assert (moved.loaded, moved.copied, moved.stored) == (0, 512, 512)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("add.s32 %r9, %r1, -3", 4),
        ("sub.s32 %r9, %r2, %r1", -9),
        ("mul.lo.s32 %r9, %r1, %r1", 49),
        ("mul.wide.s32 %rd9, %r2, %r1", -14),
        ("mad.lo.s32 %r9, %r1, %r1, 1", 50),
        ("div.s32 %r9, -7, %r2", 3),
        ("rem.s32 %r9, -7, 4", -3),
        ("div.u32 %r9, %r1, 0", None),
        ("shr.s32 %r9, %r2, 1", -1),
        ("shr.u32 %r9, %r2, 31", 1),
        ("and.b32 %r9, %r1, 3", 3),
        ("max.s32 %r9, %r2, %r1", 7),
        ("bfe.u32 %r9, %r1, 1, 2", 3),
        ("bfe.u32 %r9, %r1, 0, 2", 3),
        ("bfe.u32 %r9, %r1, 2, 4", 1),
        ("rem.s32 %r9, 7, -4", 3),
        ("cvt.u64.u16 %rd9, %r2", 65534),
        ("neg.s32 %r9, %r1", -7),
        ("abs.s32 %r9, %r2", 2),
        ("min.s32 %r9, %r2, %r1", -2),
        ("xor.b32 %r9, %r1, 2", 5),
        ("or.b32 %r9, %r1, 8", 15),
        ("shl.b32 %r9, %r1, 2", 28),
        ("mul.hi.u32 %r9, %r1, %r1", None),
        ("setp.ge.s32 %p9, %r1, 7", 1),
        ("setp.ne.s32 %p9, %r1, 7", 0),
        ("setp.hi.u32 %p9, %r2, %r1", 1),
        *((f"setp.{kind}.u32 %p9, %r1, 7", 0) for kind in ("ne", "lt", "gt", "lo", "hi")),
        *((f"setp.{kind}.u32 %p9, %r1, 7", 1) for kind in ("eq", "le", "ge", "ls", "hs")),
        ("selp.b32 %r9, 5, 6, %p7", None),
        ("ld.param.b32 %r9, [%r1]", 7),
        ("cvt.s64.s32 %rd9, %r2", -2),
        ("not.b32 %r9, %r2", 1),
        ("selp.b32 %r9, 5, 6, %p1", 5),
        ("setp.lt.u32 %p9, %r1, %r2", 1),  # -2 is large without its sign
        ("setp.lt.s32 %p9, %r1, %r2", 0),
        ("and.pred %p9, %p1, %p1", 1),
        ("add.f32 %r9, %r1, %r1", None),
        ("ld.global.b32 %r9, [%rd1]", None),
    ],
    ids=str,
)
def test_ptx_arithmetic(line, value):
    name, _, operands = line.partition(" ")
    op = ptx.Op("", name, tuple(part.strip() for part in operands.split(",")))
    registers = {"%r1": 7, "%r2": -2, "%p1": 1, "%rd1": 64}
    assert scalar.evaluator(op)(registers) == value
