"""Each instruction that a thread runs by itself, in each form that the machine knows.

The oracles are Python's whole numbers, written from the text of the PTX ISA, and f64, where sums
and products of shorter floats are exact. Values that are no numbers stand in a table below.
"""

import random

import numpy as np
import pytest

from tests.machine.device.arithmetic import ERRORS
from tests.machine.device.registry import INSTRUCTIONS
from tests.machine.device.snippets import run

THREADS = 128
BITS = {"pred": 1, "bf16": 16, "bf16x2": 32, "f16x2": 32}
REGISTER = {1: "%p", 8: "%rs", 16: "%rs", 32: "%r", 64: "%rd"}
UNSIGNED = {1: bool, 8: np.uint16, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def bits_of(type):
    return BITS.get(type) or int(type[1:])


def is_float(type):
    return "f" in type


def values(type, seed, small=False):
    """Edges and random bits of an integer type; floats that are finite, of a pair both."""
    draw, n = random.Random(f"{type}{seed}"), bits_of(type)
    if type.endswith("x2"):
        low, high = (values(type[:-2], (seed, i)) for i in range(2))
        return [a | b << 16 for a, b in zip(low, high, strict=True)]
    if is_float(type):
        scale = np.array([draw.choice([0, 1, 1, 100, 2.0**-10]) for _ in range(THREADS)])
        x = scale * [draw.choice([draw.gauss(0, 1), 1.0, -0.5]) for _ in range(THREADS)]
        if type == "f16":
            return [int(bits) for bits in x.astype(np.float16).view(np.uint16)]
        return [int(bits) >> 32 - n for bits in x.astype(np.float32).view(np.uint32)]
    edges = [0, 1, 2, 3, 31, 32, 63, 64, 2**n - 1, 2**n - 2, 2 ** (n - 1), 2 ** (n - 1) - 1]
    drawn = [(draw.getrandbits(draw.randint(1, n)), draw.choice(edges)) for _ in range(THREADS)]
    return [draw.choice(pair) % (40 if small else 2**n) for pair in drawn]


def number(type, bits):
    """What some bits are: a whole number, a boolean, or a float."""
    n = bits_of(type)
    if type == "pred":
        return bool(bits)
    if type == "f16":
        return float(np.uint16(bits).view(np.float16))
    if is_float(type):
        return float(np.uint32(bits << 32 - n).view(np.float32))
    return (bits % 2**n ^ 2 ** (n - 1)) - 2 ** (n - 1) if type[0] == "s" else bits % 2**n


def rounded(x, type):
    """A number of f64 to the nearest of a shorter type, ties to even; of bf16 by hand."""
    if type == "f16":
        return float(np.float16(x))
    if type == "f32":
        return float(np.float32(x))
    step = 2.0 ** (np.floor(np.log2(abs(x))) - 7) if x else 1.0
    return float(np.rint(x / step) * step)


def outcome(name, sources, target, given, immediates=""):
    """What the instruction gives for these bits, as whole numbers."""
    names = [f"{REGISTER[bits_of(type)]}{i + 1}" for i, type in enumerate(sources)]
    result = f"{REGISTER[bits_of(target)]}9"
    registers = {
        register: np.array(bits, dtype=UNSIGNED[bits_of(type)])
        for register, type, bits in zip(names, sources, given, strict=True)
    }
    body = f"{name} {', '.join([result, *names])}{immediates};"
    found = run(body, registers, threads=THREADS)[result][0]
    return [int(x) % 2 ** bits_of(target) for x in found]


def check(name, sources, target, oracle, small=(), immediates="", given=None):
    """Compare with an oracle of numbers; where it returns None anything is right."""
    given = given or [values(type, i, i in small) for i, type in enumerate(sources)]
    found = outcome(name, sources, target, given, immediates)
    for lane, bits in enumerate(zip(*given, strict=True)):
        arguments = [number(type, x) for type, x in zip(sources, bits, strict=True)]
        wanted = oracle(*arguments)
        if wanted is not None and is_float(target):
            assert number(target, found[lane]) == rounded(wanted, target), (name, arguments)
        elif wanted is not None:
            assert found[lane] == wanted % 2 ** bits_of(target), (name, arguments)


def of_pairs(name, sources, target, oracle):
    """Each half for itself; of a comparison the lower half has the first predicate."""
    given = [values(type, i) for i, type in enumerate(sources)]
    registers = {f"%r{i + 1}": np.array(bits, np.uint32) for i, bits in enumerate(given)}
    operands = ", ".join(registers)
    to = "%p1|%p2" if target == "pred" else "%r9"
    found = run(f"{name} {to}, {operands};", registers, threads=THREADS)
    for half in range(2):
        halves = [
            [number(type[:-2], x >> 16 * half & 0xFFFF) for x in bits]
            for type, bits in zip(sources, given, strict=True)
        ]
        wanted = [oracle(*each) for each in zip(*halves, strict=True)]
        if target == "pred":
            assert found[f"%p{half + 1}"][0].tolist() == wanted, name
        else:
            type = target[:-2]
            held = [number(type, int(x) >> 16 * half & 0xFFFF) for x in found["%r9"][0]]
            assert held == [rounded(x, type) for x in wanted], name


def truncated(a, b):
    q = abs(a) // abs(b) if b else 0
    return q if (a < 0) == (b < 0) else -q


TWO = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: truncated(a, b) if b else None,
    "rem": lambda a, b: a - truncated(a, b) * b if b else None,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
COMPARE = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "num": lambda a, b: True,
    "nan": lambda a, b: False,
}


def two_operands(name):
    kind, type = name.split(".")[0], name.split(".")[-1]
    if kind == "div" and is_float(type):
        return approximate(name)
    compare = of_pairs if type.endswith("x2") else check
    return compare(name, [type, type], type, TWO[kind])


def multiplication(name):
    parts = name.split(".")
    type, kind = parts[-1], parts[1]
    if is_float(type):
        return two_operands(name)
    n = bits_of(type)
    wide = f"{type[0]}{2 * n}" if kind == "wide" else type
    shift = n if kind == "hi" else 0
    if parts[0] == "mad":
        return check(name, [type, type, wide], wide, lambda a, b, c: (a * b >> shift) + c)
    return check(name, [type, type], wide, lambda a, b: a * b >> shift)


def fused(name):
    """The product is exact in f64. (1 + e)(1 + e) = 1 + 2e + e^2, and a number that puts the sum
    within a hair of halfway: rounded twice it is wrong."""
    type = name.split(".")[-1]
    if type != "f32":
        return check(name, [type] * 3, type, lambda a, b, c: a * b + c)
    one = [int(np.float32(1 + 2.0**-12).view(np.uint32))] * THREADS
    small = [int(np.float32(s * 2.0**-i).view(np.uint32)) for s in (1, -1) for i in range(64)]
    for given in (None, [one, one, small]):
        check(name, [type] * 3, type, exact_sum, given=given)
    return None


def exact_sum(a, b, c):
    """a b + c in f64, to odd: then rounding to f32 is right."""
    product = np.float64(a) * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    if error == 0 or int(total.view(np.uint64)) & 1:
        return total
    return np.nextafter(total, np.inf if error > 0 else -np.inf)


def shift(name):
    type = name.split(".")[-1]
    n = bits_of(type)
    way = (lambda a, b: a << min(b, n)) if name.startswith("shl") else lambda a, b: a >> min(b, n)
    check(name, [type, "u32"], type, way, small=(1,))
    for by in (0, 1, n - 1, n, n + 3):
        check(name, [type], type, lambda a, by=by: way(a, by), immediates=f", {by}")


def one_operand(name):
    kind, type = name.split(".")[0], name.split(".")[-1]
    inverse = {"neg": lambda a: -a, "abs": abs, "not": lambda a: not a if type == "pred" else ~a}
    check(name, [type], type, inverse[kind])


def bit_field(name):
    type = name.split(".")[-1]
    n = bits_of(type)

    def extract(a, b, c):
        """The pseudo-code of the ISA, bit by bit."""
        a %= 2**n
        sign = a >> min(b + c - 1, n - 1) & 1 if type[0] == "s" and c else 0
        inside = [a >> (b + i) & 1 if i < c and b + i < n else sign for i in range(n)]
        return sum(bit << i for i, bit in enumerate(inside))

    check(name, [type, "u32", "u32"], type, extract, small=(1, 2))


def permutation(name):
    def permute(a, b, c):
        both = [(b << 32 | a) >> 8 * i & 0xFF for i in range(8)]
        picked = [(both[c >> 4 * i & 7], c >> 4 * i & 8) for i in range(4)]
        return sum((0xFF * (x >> 7) if sign else x) << 8 * i for i, (x, sign) in enumerate(picked))

    check(name, ["b32"] * 3, "b32", permute)


def comparison(name):
    parts = name.split(".")
    type = parts[-1]
    kind = parts[1].removesuffix("u") if is_float(type) else parts[1]
    compare = of_pairs if type.endswith("x2") else check
    compare(name, [type, type], "pred", COMPARE[kind])


def choice(name):
    type = name.split(".")[-1]
    check(name, [type, type, "pred"], type, lambda a, b, p: a if p else b)


def copy(name):
    type = name.split(".")[-1]
    if name != "cvta.param.u64":  # see test_tma.py
        check(name, [type], type, lambda a: a)


def conversion(name):
    target, source = name.split(".")[-2:]
    if target.endswith("x2"):
        given = [values("f32", i) for i in range(2)]
        found = outcome(name, ["f32", "f32"], target, given)
        for lane, pair in enumerate(zip(*given, strict=True)):
            for place, bits in zip((16, 0), pair, strict=True):
                wanted = rounded(number("f32", bits), target[:-2])
                assert number(target[:-2], found[lane] >> place & 0xFFFF) == wanted, name
    elif is_float(target):
        check(name, [source], target, float if is_float(source) else round_whole)
    else:  # a result of 8 bits stands in a register of 16, extended by its sign
        n = bits_of(target)
        check(name, [source], f"{target[0]}{max(16, n)}", lambda a: number(target, a % 2**n))


def round_whole(a):
    """A whole number to f64 that is odd where it was cut, so that f32 rounds it right."""
    cut = max(abs(a).bit_length() - 40, 0)
    return (a >> cut | bool(a % 2**cut)) * 2.0**cut


def approximate(name):
    """Wrong by no more than documented and its rounding, up and down by more than half."""
    kind = name.split(".")[0]
    exact = {"ex2": np.exp2, "rsqrt": lambda x: 1 / np.sqrt(x), "div": np.divide}[kind]
    many, draw = 2 if kind == "div" else 1, np.random.default_rng(0)
    ends = (-120, 120) if kind == "ex2" else (0.1, 3)
    given = [draw.uniform(*ends, THREADS).astype(np.float32) for _ in range(many)]
    found = outcome(name, ["f32"] * many, "f32", [g.view(np.uint32).tolist() for g in given])
    found = np.array(found, np.uint32).view(np.float32).astype(np.float64)
    wanted = exact(*(g.astype(np.float64) for g in given))
    size, of = ERRORS[kind]
    size *= 2.0 ** (np.floor(np.log2(np.abs(wanted))) - 23) if of == "ulp" else np.abs(wanted)
    share = (found - wanted) / size
    assert (np.abs(share) <= 1 + 2.0**-24 * np.abs(wanted) / size).all(), name
    assert (share > 0.5).any() and (share < -0.5).any(), name


ORACLES = {
    **dict.fromkeys(("add", "sub", "div", "rem", "min", "max", "and", "or", "xor"), two_operands),
    **dict.fromkeys(("mul", "mad"), multiplication),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("neg", "abs", "not"), one_operand),
    **dict.fromkeys(("ex2", "rsqrt"), approximate),
    **dict.fromkeys(("mov", "cvta"), copy),
    "bfe": bit_field,
    "fma": fused,
    "prmt": permutation,
    "setp": comparison,
    "selp": choice,
    "cvt": conversion,
}


@pytest.mark.parametrize("opcode", ORACLES)
def test_every_form(opcode):
    names = [name for name in INSTRUCTIONS if name.split(".")[0] == opcode]
    assert names
    for name in names:
        ORACLES[opcode](name)


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
