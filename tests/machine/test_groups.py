"""Kernels whose groups of warps have roles, read from PTX and SASS that say so."""

from __future__ import annotations

from tests.machine import sass
from tests.machine.groups import has_roles, roles
from tests.machine.loop_model import ROOFS, START, WAIT, regions, work
from tests.machine.ptx import Ptx

# The first group multiplies n times round, the second 2 n times; a loader copies n times. n is
# divided by 3 first, as LLVM does by a constant.
PTX = """
.visible .entry k(
.param .u32 k_param_0
)
.reqntid 384
{
ld.param.b32 %r1, [k_param_0];
mul.hi.u32 %r2, %r1, -1431655765;
shr.u32 %r2, %r2, 1;
setp.lt.u32 %p1, %r99, 128;
@%p1 bra $L__BB0_9;
bra.uni $L__BB0_1;
$L__BB0_1:
bar.sync 1;
ld.shared.b8 %r3, [%r98];
$L_brx_0: .branchtargets
$L__BB0_4,
$L__BB0_6;
brx.idx %r3, $L_brx_0;
$L__BB0_4:
add.s32 %r4, %r2, %r2;
mov.b32 %r5, 0;
$L__BB0_5:
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r30}, %rd8, %rd9, 1, 1, 1, 0, 0;
wgmma.wait_group.sync.aligned 0;
add.s32 %r5, %r5, 1;
setp.lt.s32 %p2, %r5, %r4;
@%p2 bra $L__BB0_5;
bra.uni $L__BB0_1;
$L__BB0_6:
mov.b32 %r6, 0;
$L__BB0_7:
waitLoop:
mbarrier.try_wait.parity.shared.b64 complete, [%r10], %r11;
@!complete bra.uni waitLoop;
mbarrier.arrive.expect_tx.shared.b64 _, [%r12], 4096;
cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%r13], [%rd1], [%r14];
add.s32 %r6, %r6, 1;
setp.lt.s32 %p3, %r6, %r2;
@%p3 bra $L__BB0_7;
bra.uni $L__BB0_1;
$L__BB0_9:
mov.b32 %r7, 0;
$L__BB0_10:
wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r30}, %rd8, %rd9, 1, 1, 1, 0, 0;
wgmma.wait_group.sync.aligned 0;
add.s32 %r7, %r7, 1;
setp.lt.s32 %p4, %r7, %r2;
@%p4 bra $L__BB0_10;
ret;
}
"""
LINES = """
S2R R0, SR_TID.X
@!P0 BRA `(.L_x_9)
.L_x_1:
BAR.SYNC.DEFER_BLOCKING 0x1
BRX R2 -0x190
MOV R1, R2
.L_x_5:
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], R24, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x0
@P1 BRA `(.L_x_5)
BRA `(.L_x_1)
MOV R3, R4
.L_x_7:
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9], R5
@!P0 BRA `(.L_x_20)
.L_x_8:
UTMALDG.4D [UR8], [UR4]
@P2 BRA `(.L_x_7)
BRA `(.L_x_1)
.L_x_9:
HGMMA.64x64x16.F32.BF16 R24, gdesc[UR12], R24, gsb0
WARPGROUP.DEPBAR.LE gsb0, 0x0
@P3 BRA `(.L_x_9)
EXIT
.L_x_20:
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9], R5
@!P0 BRA `(.L_x_20)
BRA `(.L_x_8)
"""


def _code() -> list[sass.Instruction]:
    address, lines = 0, []
    for line in LINES.strip().splitlines():
        lines.append(line if line.startswith(".L") else f"        /*{address:04x}*/  {line} ;")
        address += 0 if line.startswith(".L") else 16
    return sass.instructions("\n".join(lines))


def test_each_role_has_its_own_code_and_branches():
    kernel = Ptx(PTX)
    assert has_roles(kernel) and not has_roles(Ptx(PTX.replace("brx.idx", "add.s32")))
    first, second, loader = found = roles(_code(), kernel)
    assert [(r.warps, r.thread, r.computes) for r in found] == [
        (4, 0, True),
        (4, 128, True),
        (1, 128, False),
    ]
    wanted = {"HGMMA": 1, "UTMALDG": 0}, {"HGMMA": 1, "UTMALDG": 0}, {"HGMMA": 0, "UTMALDG": 1}
    for role, kinds in zip(found, wanted, strict=True):
        assert {k: sum(i.kind == k for i in role.code) for k in kinds} == kinds
        assert len(sass.loops(role.code)) == 1  # the second try of a wait is none
    rounds = []
    for role in (first, second, loader):
        run = role.ptx.executions([32], (0, 0, 0), (1,), role.thread)
        assert not run.guessed
        rounds.append(max(run.blocks[b] for b in role.blocks))
    assert rounds == [10, 20, 10]  # of 32 / 3


def test_groups_run_side_by_side():
    """Units have the work of all; the chain is the longer of the groups', not the loader's."""
    kernel = Ptx(PTX)
    done = work(regions(_code(), kernel), kernel, [32], (1,), ROOFS["sm_90"], 3, 1)
    product = 64 * 64 * 16 / 4 / 512
    assert done.cycles["tensor"] == (4 * 10 + 4 * 20) * product / 12  # of an average warp of twelve
    assert done.multiply_adds == 30 * 64 * 64 * 16 and done.bytes_moved == 10 * 4096
    each = 2 * product + WAIT  # operands from shared memory, the product, its wait
    assert 20 * each <= done.chain - START < 30 * each and not done.guessed
