"""Rounding, NaN and documented errors, which no kernel's run shows. Plain numbers are theirs."""

import numpy as np
import pytest

from tests.machine.device.arithmetic import ERRORS
from tests.machine.device.snippets import run

THREADS = 128


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
