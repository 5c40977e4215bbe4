"""What runs of our kernels do not show of arithmetic: signs, widths, rounding, NaN.

Plain numbers are theirs: an instruction that adds, shifts or converts them wrongly breaks a kernel.
"""

import numpy as np
import pytest

from tests.machine.device.arithmetic import ERRORS
from tests.machine.device.snippets import run

THREADS = 128

WHOLE = [  # instruction, operands, result
    ("div.s32 %r9", "-7, 2", -3),
    ("div.s64 %rd9", "7, -2", -3),
    ("div.u32 %r9", "-2, 3", (2**32 - 2) // 3),
    ("rem.s32 %r9", "-7, 4", -3),
    ("rem.s64 %rd9", "7, -4", 3),
    ("rem.u32 %r9", "-1, 10", 5),
    ("mul.hi.s32 %r9", "-2, 3", -1),
    ("mul.hi.u32 %r9", "-2, 3", 2),
    ("mul.hi.u64 %rd9", "-1, -1", -2),
    ("mul.lo.s32 %r9", "0x10001, 0x10001", 0x20001),
    ("mul.wide.s32 %rd9", "-2, 3", -6),
    ("mul.wide.u32 %rd9", "-2, 3", 3 * 2**32 - 6),
    ("mad.wide.s32 %rd9", "-2, 3, 1", -5),
    ("mad.wide.u32 %rd9", "-1, 2, 1", 2**33 - 1),
    ("min.s32 %r9", "-1, 1", -1),
    ("max.u32 %r9", "-1, 1", -1),
    ("shl.b32 %r9", "1, 31", 2**31),
    ("shl.b32 %r9", "1, 32", 0),
    ("shl.b64 %rd9", "1, 63", 2**63),
    ("shr.s32 %r9", "-8, 1", -4),
    ("shr.s32 %r9", "-8, 35", -1),
    ("shr.s64 %rd9", "-8, 64", -1),
    ("shr.u32 %r9", "-8, 29", 7),
    ("shr.u32 %r9", "-8, 32", 0),
    ("bfe.u32 %r9", "0xABCD, 4, 8", 0xBC),
    ("bfe.u32 %r9", "-1, 30, 8", 3),
    ("bfe.s32 %r9", "0xABCD, 4, 8", 0xBC - 0x100),
    ("bfe.s32 %r9", "-1, 3, 0", 0),
    ("bfe.s64 %rd9", "0x7F0000000000, 40, 7", -1),
    ("prmt.b32 %r9", "0x03020100, 0x87060504, 0x7542", 0x87050402),
    ("prmt.b32 %r9", "0x03020100, 0x87060504, 0xF0F8", 0xFF00FF00),
    ("setp.lt.u32 %p9", "1, -2", 1),
    ("setp.lt.s32 %p9", "1, -2", 0),
    ("setp.gt.u64 %p9", "-2, 1", 1),
    ("setp.gt.s64 %p9", "-2, 1", 0),
    ("cvt.s64.s32 %rd9", "-3", -3),
    ("cvt.u64.u32 %rd9", "-3", 2**32 - 3),
    ("cvt.u32.u64 %r9", "0x500000007", 7),
    ("cvt.rn.f32.s32 %r9", "-16777217", 0xCB800000),  # to even
    ("cvt.rn.f32.s32 %r9", "16777219", 0x4B800002),
    ("cvt.rn.f32.u32 %r9", "-1", 0x4F800000),
]


@pytest.mark.parametrize(("name", "operands", "wanted"), WHOLE)
def test_signs_and_widths(name, operands, wanted):
    register = name.partition(" ")[2]
    bits = {"%p9": 1, "%r9": 32, "%rd9": 64}[register]
    assert int(run(f"{name}, {operands};")[register][0, 0]) == wanted % 2**bits


def test_fused_product_rounded_once():
    """Its sum with c lies just beside the middle of two floats: to round in f64 first is wrong."""
    a, b, hair = 1 + 2.0**-12, 1 + 3 * 2.0**-12, 2.0**-60
    given = np.float32([[a, a, hair], [a, a, -hair], [a, b, hair], [a, b, -hair], [-a, b, hair]]).T
    registers = {f"%r{i + 1}": np.resize(x, THREADS) for i, x in enumerate(given)}
    found = run("fma.rn.f32 %r9, %r1, %r2, %r3;", registers, threads=THREADS)["%r9"][0, :5]
    low, high = 1 + 2.0**-11, 1 + 2.0**-10
    wanted = [low + 2.0**-23, low, high + 2.0**-22, high + 2.0**-23, -high - 2.0**-23]
    assert found.view(np.float32).tolist() == wanted
    half = {"%rs1": 0x3F88, "%rs2": 0x3080}  # bf16: 1 + 2^-4, whose square is a tie, and 2^-30
    assert (run("fma.rn.bf16 %rs9, %rs1, %rs1, %rs2;", half)["%rs9"] == 0x3F91).all()


@pytest.mark.parametrize("kind", ERRORS)
def test_approximations(kind):
    """Wrong by no more than documented and its rounding, up and down by more than half."""
    name = {"ex2": "ex2.approx", "rsqrt": "rsqrt.approx.ftz", "div": "div.full"}[kind] + ".f32"
    exact = {"ex2": np.exp2, "rsqrt": lambda x: 1 / np.sqrt(x), "div": np.divide}[kind]
    many, draw = 2 if kind == "div" else 1, np.random.default_rng(0)
    ends = (-120, 120) if kind == "ex2" else (0.1, 3)
    given = [draw.uniform(*ends, THREADS).astype(np.float32) for _ in range(many)]
    registers = {f"%r{i + 1}": x for i, x in enumerate(given)}
    body = f"{name} %r9, {', '.join(registers)};"
    found = run(body, registers, threads=THREADS)["%r9"][0].view(np.float32).astype(np.float64)
    wanted = exact(*(g.astype(np.float64) for g in given))
    size, of = ERRORS[kind]
    size *= 2.0 ** (np.floor(np.log2(np.abs(wanted))) - 23) if of == "ulp" else np.abs(wanted)
    share = (found - wanted) / size
    assert (np.abs(share) <= 1 + 2.0**-24 * np.abs(wanted) / size).all(), name
    assert (share > 0.5).any() and (share < -0.5).any(), name


NAN, INF, TINY = 0x7FC00000, 0x7F800000, 0x00000001
ONE, MINUS = 0x3F800000, 0x80000000
SPECIAL = [  # instruction, bits of its operands, bits of the result
    ("max.f32", (NAN, ONE), ONE),
    ("max.NaN.f32", (NAN, ONE), NAN),
    ("min.f32", (NAN, ONE), ONE),
    ("min.f32", (0, MINUS), MINUS),
    ("max.f32", (MINUS, 0), 0),
    ("mul.f32", (TINY, ONE), TINY),
    ("mul.ftz.f32", (TINY | MINUS, ONE), MINUS),
    ("fma.rn.ftz.f32", (ONE, ONE, TINY), ONE),
    ("ex2.approx.f32", (INF | MINUS,), 0),
    ("ex2.approx.ftz.f32", (TINY,), ONE),
    ("rsqrt.approx.ftz.f32", (0,), INF),
    ("div.full.f32", (ONE, 0), INF),
    ("cvt.rn.bf16x2.f32", (ONE, NAN), 0x3F807FFF),
    ("cvt.rn.bf16x2.f32", (0x3F808000, 0x3F818000), 0x3F803F82),  # ties, to even
    ("cvt.rn.f16x2.f32", (0x47800000, ONE), 0x7C003C00),  # 65536 is too large
    ("neg.f32", (0,), MINUS),
    ("abs.ftz.f32", (TINY | MINUS,), 0),
]


@pytest.mark.parametrize(("name", "given", "wanted"), SPECIAL)
def test_special_values(name, given, wanted):
    registers = {f"%r{i + 1}": np.uint32(bits) for i, bits in enumerate(given)}
    found = int(run(f"{name} %r9, {', '.join(registers)};", registers)["%r9"][0, 0])
    is_nan = (found & 0x7FFFFFFF) > INF
    assert is_nan if wanted == NAN else found == wanted, hex(found)


def test_comparisons_with_nan():
    registers = {"%r1": np.uint32(NAN), "%r2": np.uint32(ONE)}
    holds = dict(lt=0, ge=0, eq=0, ne=0, ltu=1, geu=1, neu=1, equ=1, num=0, nan=1)
    for comparison, wanted in holds.items():
        assert run(f"setp.{comparison}.f32 %p1, %r1, %r2;", registers)["%p1"][0, 0] == wanted


def test_registers_and_literals():
    """Taken apart and put together; numbers as PTX writes them; an unwritten register is NaN."""
    found = run(
        "mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r2, {%rs2, %rs1}; mov.b64 %rd1, {%r1, %r2};"
        "mov.b64 {_, %r3}, %rd1; mov.b32 %r4, 0f3F800000; add.s32 %r5, %r1, -7;"
        "mov.b64 %rd2, -1; and.b32 %r6, %r1, 0xF0; add.f32 %r7, %r8, %r4;",
        {"%r1": 0x1234ABCD},
    )
    assert found["%r2"][0, 0] == found["%r3"][0, 0] == 0xABCD1234
    assert found["%rd1"][0, 0] == 0xABCD12341234ABCD and found["%rd2"][0, 0] == 2**64 - 1
    assert found["%r4"][0, 0] == ONE and found["%r5"][0, 0] == 0x1234ABC6
    assert found["%r6"][0, 0] == 0xC0 and np.isnan(found["%r7"].view(np.float32)).all()


def test_guarded_write():
    body = "setp.lt.s32 %p1, %tid.x, 5; @%p1 mov.b32 %r2, 9; @!%p1 add.s32 %r2, %r2, 1;"
    assert run(body, {"%r2": 100})["%r2"][0].tolist() == [9] * 5 + [101] * 27
