"""Each instruction that a thread runs by itself, in each form that the machine knows.

The oracles are Python's whole numbers and fractions, written from the text of the PTX ISA; each
runs on edges and on random bits. Values that are no numbers stand in a table below.
"""

import random
from fractions import Fraction

import numpy as np
import pytest

from tests.machine.device.arithmetic import ERRORS
from tests.machine.device.registry import INSTRUCTIONS
from tests.machine.device.snippets import run

THREADS = 128
BITS = {"pred": 1, "bf16": 16, "bf16x2": 32, "f16x2": 32, "tf32": 32}
FORMS = {  # bits of the mantissa with the hidden one, exponent of the least number
    "f32": (24, -149),
    "bf16": (8, -133),
    "f16": (11, -24),
    "tf32": (11, -136),
    "f64": (53, -1074),
}


def bits_of(type):
    return BITS.get(type) or int(type[1:])


def values(type, seed, small=False):
    """Edges and random bits of a type, as whole numbers; floats are finite and not all wild."""
    draw, n = random.Random(f"{type}{seed}"), bits_of(type)
    if type == "pred":
        return [draw.randrange(2) for _ in range(THREADS)]
    if type in ("f32", "f16", "bf16", "f64", "bf16x2", "f16x2", "tf32"):
        return [_float_bits(type, draw) for _ in range(THREADS)]
    edges = [0, 1, 2, 3, 31, 32, 33, 63, 64, 2**n - 1, 2**n - 2, 2 ** (n - 1), 2 ** (n - 1) - 1]
    drawn = [draw.getrandbits(draw.randint(1, n)) for _ in range(THREADS)]
    if small:
        return [x % 40 for x in drawn]
    picked = [draw.choice(edges) if draw.random() < 0.4 else x for x in drawn]
    return [x % 2**n for x in picked]


def _float_bits(type, draw):
    if type.endswith("x2"):
        return _float_bits(type[:-2], draw) | _float_bits(type[:-2], draw) << 16
    x = draw.choice([0.0, 1.0, -1.0, 0.5, 2.0**-10, draw.gauss(0, 1), draw.gauss(0, 100)])
    if type == "f64":
        return int(np.float64(x).view(np.uint64))
    if type == "f16":
        return int(np.float16(x).view(np.uint16))
    bits = int(np.float32(x).view(np.uint32))
    return bits >> 16 if type == "bf16" else bits


def number(type, bits):
    """The value of some bits: a whole number, a fraction, or a boolean."""
    n = bits_of(type)
    if type == "pred":
        return bool(bits)
    if type[0] in "bu" and type not in FORMS:
        return bits % 2**n
    if type[0] == "s":
        return (bits % 2**n ^ 2 ** (n - 1)) - 2 ** (n - 1)
    precision = FORMS[type][0]
    if type in ("bf16", "tf32"):
        bits, type = bits << (16 if type == "bf16" else 0), "f32"
    kind = {
        "f32": (np.uint32, np.float32),
        "f16": (np.uint16, np.float16),
        "f64": (np.uint64, np.float64),
    }[type]
    assert precision
    return Fraction(float(kind[0](bits).view(kind[1])))


def rounded(x, type, away=False):
    """A fraction to the nearest number of a float type, ties to even, or away from zero."""
    precision, least = FORMS[type]
    if x == 0:
        return Fraction(0)
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    step = Fraction(2) ** max(exponent - precision + 1, least)
    whole, rest = divmod(size, step)
    up = rest * 2 > step or (rest * 2 == step and (away or whole % 2))
    return (whole + up) * step * (1 if x > 0 else -1)


REGISTER = {1: "%p", 16: "%rs", 32: "%r", 64: "%rd", 8: "%rs"}


def outcome(name, sources, target, given, immediates=""):
    """What the instruction gives for these bits, as whole numbers."""
    names = [f"{REGISTER[bits_of(type)]}{i + 1}" for i, type in enumerate(sources)]
    result = f"{REGISTER[bits_of(target)]}9"
    body = f"{name} {', '.join([result, *names])}{immediates};"
    width = {1: bool, 8: np.uint16, 16: np.uint16, 32: np.uint32, 64: np.uint64}
    registers = {
        register: np.array(bits, dtype=width[bits_of(type)])
        for register, type, bits in zip(names, sources, given, strict=True)
    }
    found = run(body, registers, threads=THREADS)[result][0]
    return [int(x) % 2 ** bits_of(target) for x in found]


def check(name, sources, target, oracle, small=(), immediates="", given=None):
    """Compare with an oracle of numbers; it returns a number, or None where anything is right."""
    given = given or [values(type, i, i in small) for i, type in enumerate(sources)]
    found = outcome(name, sources, target, given, immediates)
    for lane, bits in enumerate(zip(*given, strict=True)):
        arguments = [number(type, x) for type, x in zip(sources, bits, strict=True)]
        wanted = oracle(*arguments)
        if wanted is None:
            continue
        if target in FORMS:
            assert number(target, found[lane]) == wanted, (name, arguments)
        else:
            assert found[lane] == wanted % 2 ** bits_of(target), (name, arguments)


def types_of(name):
    return name.split(".")[-1]


def truncated(a, b):
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


INTEGER = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "div": lambda a, b: truncated(a, b) if b else None,
    "rem": lambda a, b: a - truncated(a, b) * b if b else None,
    "min": min,
    "max": max,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}
FLOAT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": lambda a, b: a / b if b else None,
}


def two_operands(name):
    kind, type = name.split(".")[0], types_of(name)
    if type.endswith("x2"):
        return pairs(name)
    if type in FORMS:
        oracle = FLOAT[kind]
        if "full" in name or "approx" in name:
            return approximate(name)
        return check(name, [type, type], type, lambda a, b: none_or_rounded(oracle(a, b), type))
    return check(name, [type, type], type, INTEGER[kind])


def none_or_rounded(x, type):
    return None if x is None else rounded(x, type)


def pairs(name):
    kind, type = name.split(".")[0], types_of(name)
    given = [values(type, i) for i in range(2)]
    found = outcome(name, [type, type], type, given)
    for lane, (a, b) in enumerate(zip(*given, strict=True)):
        for shift in (0, 16):
            x, y = (number(type[:-2], bits >> shift & 0xFFFF) for bits in (a, b))
            wanted = rounded(FLOAT[kind](x, y), type[:-2])
            assert number(type[:-2], found[lane] >> shift & 0xFFFF) == wanted, (name, x, y)


def multiplication(name):
    if types_of(name) in FORMS or types_of(name).endswith("x2"):
        return two_operands(name)
    parts, type = name.split("."), types_of(name)
    n = bits_of(type)
    wide = type[0] + str(2 * n)
    addend = wide if parts[1] == "wide" else type
    target = addend
    shift = n if parts[1] == "hi" else 0
    if parts[0] == "mad":
        return check(name, [type, type, addend], target, lambda a, b, c: (a * b >> shift) + c)
    return check(name, [type, type], target, lambda a, b: a * b >> shift)


def fused_halves(name):
    type = types_of(name).removesuffix("x2")
    whole = types_of(name)
    given = [values(whole, i) for i in range(3)]
    found = outcome(name, [whole] * 3, whole, given)
    for lane, bits in enumerate(zip(*given, strict=True)):
        for shift in range(0, bits_of(whole), 16):
            a, b, c = (number(type, x >> shift & 0xFFFF) for x in bits)
            wanted = rounded(a * b + c, type)
            assert number(type, found[lane] >> shift & 0xFFFF) == wanted, (name, a, b, c)


def fused(name):
    if types_of(name) != "f32":
        return fused_halves(name)
    check(name, ["f32"] * 3, "f32", lambda a, b, c: rounded(a * b + c, "f32"))
    # (1 + e)(1 + e) = 1 + 2e + e^2 and a number that puts the sum within a hair of halfway.
    e = 2.0**-12
    one = [int(np.float32(1 + e).view(np.uint32))] * THREADS
    small = [int(np.float32(s * 2.0**-i).view(np.uint32)) for s in (1, -1) for i in range(64)]
    given = [one, one, small]
    check(name, ["f32"] * 3, "f32", lambda a, b, c: rounded(a * b + c, "f32"), given=given)


def shift(name):
    type = types_of(name)
    n = bits_of(type)
    way = (lambda a, b: a << b) if name.startswith("shl") else (lambda a, b: a >> b)
    check(name, [type, "u32"], type, lambda a, b: way(a, min(b, n)), small=(1,))
    for by in (0, 1, n - 1, n, n + 3):
        check(name, [type], type, lambda a, by=by: way(a, by), immediates=f", {by}")


def one_operand(name):
    kind, type = name.split(".")[0], types_of(name)
    oracle = {"neg": lambda a: -a, "abs": abs, "not": lambda a: not a if type == "pred" else ~a}
    check(name, [type], type, oracle[kind])


def bit_field(name):
    type = types_of(name)
    n = bits_of(type)
    if name.startswith("bfi"):

        def insert(a, b, c, d):
            ones = (2**d - 1) << c
            return (b & ~ones) | (a << c & ones)

        return check(name, [type, type, "u32", "u32"], type, insert, small=(2, 3))

    def extract(a, b, c):
        """The pseudo-code of the ISA, bit by bit."""
        a %= 2**n
        sign = 0
        if type[0] == "s" and c:
            sign = a >> min(b + c - 1, n - 1) & 1
        inside = [a >> (b + i) & 1 if i < c and b + i < n else sign for i in range(n)]
        return sum(bit << i for i, bit in enumerate(inside))

    return check(name, [type, "u32", "u32"], type, extract, small=(1, 2))


def any_function(name):
    for table in (0x80, 0x96, 0xE8, 0xCA, 0x3C):

        def look_up(a, b, c, table=table):
            return sum(
                (table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i
                for i in range(32)
            )

        check(name, ["b32"] * 3, "b32", look_up, immediates=f", {table}")


def permutation(name):
    def permute(a, b, c):
        both = [(b << 32 | a) >> 8 * i & 0xFF for i in range(8)]
        found = 0
        for i in range(4):
            selector = c >> 4 * i & 15
            byte = both[selector & 7]
            found |= (byte if selector < 8 else (0xFF if byte >> 7 else 0)) << 8 * i
        return found

    check(name, ["b32"] * 3, "b32", permute)


def funnel(name):
    wraps, left = ".wrap" in name, ".l." in name

    def move(a, b, c):
        by = c % 32 if wraps else min(c, 32)
        both = b << 32 | a
        return (both << by) >> 32 if left else both >> by

    check(name, ["b32"] * 3, "b32", move, small=(2,))


def counting(name):
    oracle = {
        "popc": lambda a: a.bit_count(),
        "clz": lambda a: 32 - a.bit_length(),
        "brev": lambda a: int(f"{a:032b}"[::-1], 2),
    }
    check(name, ["b32"], "b32", oracle[name.split(".")[0]])


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


def comparison(name):
    parts, type = name.split("."), types_of(name)
    floats = type in FORMS or type.endswith("x2")
    compare = COMPARE[parts[1].removesuffix("u") if floats else parts[1]]
    combine = next((p for p in parts[2:] if p in ("and", "or", "xor")), None)
    if type.endswith("x2"):
        return comparison_of_pairs(name, type, compare)
    if combine is None:
        return check(name, [type, type], "pred", compare)
    return check(
        name, [type, type, "pred"], "pred", lambda a, b, c: INTEGER[combine](compare(a, b), c)
    )


def comparison_of_pairs(name, type, compare):
    given = [np.array(values(type, i), np.uint32) for i in range(2)]
    found = run(
        f"{name} %p1|%p2, %r1, %r2;", dict(zip(("%r1", "%r2"), given, strict=True)), threads=THREADS
    )
    for register, shift in (("%p1", 0), ("%p2", 16)):
        halves = [[number(type[:-2], int(x) >> shift & 0xFFFF) for x in each] for each in given]
        wanted = [compare(a, b) for a, b in zip(*halves, strict=True)]
        assert found[register][0].tolist() == wanted, name


def choice(name):
    type = types_of(name)
    check(name, [type, type, "pred"], type, lambda a, b, p: a if p else b)


def copy(name):
    type = types_of(name)
    if name != "cvta.param.u64":  # see test_tma.py
        check(name, [type], type, lambda a: a)


def conversion(name):
    parts = name.split(".")
    source, target = parts[-1], parts[-2]
    given = None
    if target.endswith("x2"):
        drawn = [values("f32", i) for i in range(2)]
        found = outcome(name, ["f32", "f32"], target, drawn)
        for lane, (a, b) in enumerate(zip(*drawn, strict=True)):
            for shift, bits in ((16, a), (0, b)):
                wanted = rounded(number("f32", bits), target[:-2])
                assert number(target[:-2], found[lane] >> shift & 0xFFFF) == wanted, name
        return None
    if source in FORMS and target not in FORMS:
        way = {"rzi": truncate, "rmi": lambda x: x // 1, "rpi": lambda x: -(-x // 1), "rni": round}
        n = bits_of(target)
        least, most = (0, 2**n - 1) if target[0] == "u" else (-(2 ** (n - 1)), 2 ** (n - 1) - 1)
        return check(name, [source], target, lambda a: max(least, min(most, way[parts[1]](a))))
    if source in FORMS and parts[1] in ("rzi", "rmi", "rpi", "rni"):
        way = {"rzi": truncate, "rmi": lambda x: x // 1, "rpi": lambda x: -(-x // 1), "rni": round}
        return check(name, [source], target, lambda a: Fraction(way[parts[1]](a)))
    if target in FORMS:
        return check(
            name,
            [source],
            target,
            lambda a: rounded(Fraction(a), target, parts[1] == "rna"),
            given=given,
        )
    # A result of 8 bits stands in a register of 16, extended by its sign.
    n, width = bits_of(target), max(16, bits_of(target))
    return check(name, [source], f"{target[0]}{width}", lambda a: number(target, a % 2**n))


def truncate(x):
    return int(x)


EXACT = {
    "ex2": np.exp2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "tanh": np.tanh,
    "div": np.divide,
}


def approximate(name):
    """Wrong by no more than documented and its rounding, up and down by more than half."""
    kind = name.split(".")[0]
    many = 2 if kind == "div" else 1
    draw = np.random.default_rng(0)
    ends = (-120, 120) if kind == "ex2" else (0.1, 3)
    given = [draw.uniform(*ends, THREADS).astype(np.float32) for _ in range(many)]
    found = outcome(name, ["f32"] * many, "f32", [g.view(np.uint32).tolist() for g in given])
    found = np.array(found, np.uint32).view(np.float32).astype(np.float64)
    exact = EXACT[kind](*(g.astype(np.float64) for g in given))
    bound, of = ERRORS[kind]
    if kind == "lg2" and not 0.5 < given[0].min() < given[0].max() < 2:
        inside = (given[0] > 0.5) & (given[0] < 2)
        size = np.where(inside, bound, bound * np.abs(exact))
    else:
        one = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 23)
        size = bound * {"ulp": one, "relative": np.abs(exact), "absolute": 1}[of]
    share = (found - exact) / size
    assert (np.abs(share) <= 1 + 2.0**-24 * np.abs(exact) / size).all(), name
    assert (share > 0.5).any() and (share < -0.5).any(), name


def root(name):
    if "approx" in name:
        return approximate(name)
    given = [[int(np.float32(x).view(np.uint32)) for x in np.linspace(0.1, 9, THREADS)]]
    found = outcome(name, ["f32"], "f32", given)
    for bits, result in zip(given[0], found, strict=True):
        x, y = number("f32", bits), number("f32", result)
        below, above = (number("f32", result + i) for i in (-1, 1))
        if name.startswith("rcp"):
            assert y == rounded(1 / x, "f32"), name
        else:  # the root lies between the middles of the neighbours
            assert ((below + y) / 2) ** 2 <= x <= ((above + y) / 2) ** 2, name
    return None


def sign_copied(name):
    check(name, ["f32", "f32"], "f32", lambda a, b: abs(b) if a >= 0 else -abs(b))


ORACLES = {
    **dict.fromkeys(("add", "sub", "div", "rem", "min", "max", "and", "or", "xor"), two_operands),
    **dict.fromkeys(("mul", "mad"), multiplication),
    **dict.fromkeys(("shl", "shr"), shift),
    **dict.fromkeys(("neg", "abs", "not"), one_operand),
    **dict.fromkeys(("bfe", "bfi"), bit_field),
    **dict.fromkeys(("popc", "clz", "brev"), counting),
    **dict.fromkeys(("ex2", "rsqrt", "sin", "cos", "lg2", "tanh"), approximate),
    **dict.fromkeys(("sqrt", "rcp"), root),
    "fma": fused,
    "lop3": any_function,
    "prmt": permutation,
    "shf": funnel,
    "setp": comparison,
    "selp": choice,
    "mov": copy,
    "cvt": conversion,
    "cvta": copy,
    "copysign": sign_copied,
}
BY_OPCODE = {
    opcode: sorted(name for name in INSTRUCTIONS if name.split(".")[0] == opcode)
    for opcode in ORACLES
}


@pytest.mark.parametrize("opcode", ORACLES)
def test_every_form(opcode):
    assert BY_OPCODE[opcode]
    for name in BY_OPCODE[opcode]:
        ORACLES[opcode](name)


NAN, INF, TINY = 0x7FC00000, 0x7F800000, 0x00000001
ONE, MINUS = 0x3F800000, 0x80000000
SPECIAL = [  # instruction, bits of its operands, bits of the result
    ("max.f32", (NAN, ONE), ONE),
    ("max.f32", (ONE, NAN), ONE),
    ("max.NaN.f32", (NAN, ONE), NAN),
    ("min.f32", (NAN, ONE), ONE),
    ("min.f32", (0, MINUS), MINUS),
    ("max.f32", (MINUS, 0), 0),
    ("mul.f32", (TINY, ONE), TINY),
    ("mul.ftz.f32", (TINY, ONE), 0),
    ("mul.ftz.f32", (TINY | MINUS, ONE), MINUS),
    ("fma.rn.ftz.f32", (ONE, ONE, TINY), ONE),
    ("add.ftz.f32", (TINY, TINY), 0),
    ("ex2.approx.f32", (0,), ONE),
    ("ex2.approx.f32", (INF | MINUS,), 0),
    ("ex2.approx.f32", (INF,), INF),
    ("ex2.approx.ftz.f32", (TINY,), ONE),
    ("rsqrt.approx.ftz.f32", (0,), INF),
    ("rsqrt.approx.ftz.f32", (INF,), 0),
    ("rcp.approx.ftz.f32", (MINUS,), INF | MINUS),
    ("lg2.approx.f32", (0,), INF | MINUS),
    ("div.full.f32", (ONE, 0), INF),
    ("div.full.f32", (ONE, INF), 0),
    ("tanh.approx.f32", (0,), 0),
    ("cvt.rna.tf32.f32", (0x3F801000,), 0x3F802000),  # a tie, away from zero
    ("cvt.rna.tf32.f32", (0x3F800FFF,), 0x3F800000),
    ("cvt.rna.tf32.f32", (INF,), INF),
    ("cvt.rn.bf16x2.f32", (ONE, NAN), 0x3F807FFF),
    ("cvt.rn.f16x2.f32", (0x47800000, ONE), 0x7C003C00),  # 65536 is too large
    ("cvt.rzi.s32.f32", (NAN,), 0),
    ("cvt.rzi.s32.f32", (0x4F800000,), 0x7FFFFFFF),
    ("cvt.rzi.u32.f32", (0xBF800000,), 0),
    ("neg.f32", (0,), MINUS),
    ("abs.f32", (MINUS,), 0),
    ("abs.ftz.f32", (TINY | MINUS,), 0),
]


@pytest.mark.parametrize(("name", "given", "wanted"), SPECIAL)
def test_special_values(name, given, wanted):
    registers = {f"%r{i + 1}": np.uint32(bits) for i, bits in enumerate(given)}
    found = int(run(f"{name} %r9, {', '.join(registers)};", registers)["%r9"][0, 0])
    is_nan = (found & 0x7FFFFFFF) > INF
    assert is_nan if wanted == NAN else found == wanted, hex(found)


@pytest.mark.parametrize(
    ("comparison", "holds"),
    [
        ("lt", 0),
        ("ge", 0),
        ("eq", 0),
        ("ne", 0),
        ("ltu", 1),
        ("geu", 1),
        ("neu", 1),
        ("equ", 1),
        ("num", 0),
        ("nan", 1),
    ],
)
def test_comparisons_with_nan(comparison, holds):
    registers = {"%r1": np.uint32(NAN), "%r2": np.uint32(ONE)}
    assert run(f"setp.{comparison}.f32 %p1, %r1, %r2;", registers)["%p1"][0, 0] == holds


@pytest.mark.parametrize(
    ("type", "one", "nan"), [("bf16", 0x3F80, 0x7FC0), ("f16", 0x3C00, 0x7E00)]
)
def test_pairs_are_compared_half_by_half(type, one, nan):
    registers = {"%r1": np.uint32(one << 16 | nan), "%r2": np.uint32(one << 16 | one)}
    for comparison, low, high in (("neu", 1, 0), ("eq", 0, 1), ("ne", 0, 0), ("equ", 1, 1)):
        found = run(f"setp.{comparison}.{type}x2 %p1|%p2, %r1, %r2;", registers)
        assert (found["%p1"][0, 0], found["%p2"][0, 0]) == (low, high)


def test_registers_are_taken_apart_and_put_together():
    found = run(
        "mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r2, {%rs2, %rs1}; mov.b64 %rd1, {%r1, %r2};"
        "mov.b64 {_, %r3}, %rd1;",
        {"%r1": 0x1234ABCD},
    )
    assert found["%rs1"][0, 0] == 0xABCD and found["%rs2"][0, 0] == 0x1234
    assert found["%r2"][0, 0] == found["%r3"][0, 0] == 0xABCD1234
    assert found["%rd1"][0, 0] == 0xABCD12341234ABCD


def test_literals():
    found = run(
        "mov.b32 %r1, 0f3F800000; add.s32 %r2, %r3, -7; mov.b64 %rd1, -1;and.b32 %r4, %r3, 0xF0;",
        {"%r3": 0xFF},
    )
    assert found["%r1"][0, 0] == ONE and found["%r2"][0, 0] == 0xF8
    assert found["%rd1"][0, 0] == 2**64 - 1 and found["%r4"][0, 0] == 0xF0


def test_a_guard_keeps_what_a_register_held():
    lanes = np.arange(32)
    body = "setp.lt.s32 %p1, %r1, 5; @%p1 mov.b32 %r2, 9; @!%p1 add.s32 %r2, %r2, 1;"
    found = run(body, {"%r1": lanes, "%r2": 100})["%r2"][0]
    assert found.tolist() == [9] * 5 + [101] * 27


def test_a_register_that_nobody_wrote_is_nan():
    found = run("add.f32 %r1, %r2, %r3; cvt.f32.bf16 %r4, %rs1;", {"%r3": np.uint32(ONE)})
    assert np.isnan(found["%r1"].view(np.float32)).all()
    assert np.isnan(found["%r4"].view(np.float32)).all()
