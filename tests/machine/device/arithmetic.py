"""Numbers: integers, floats, comparisons, choices. Each thread for itself.

PTX ISA, sections "Integer Arithmetic", "Floating-Point", "Comparison and Selection", "Logic and
Shift". Exact where PTX says so; what it calls approximate has an error up to the
documented one, by a hash of the argument's bits, so that a kernel that needs better is found out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .program import Op
from .registry import Run, instruction
from .values import (
    F16,
    F32,
    S32,
    S64,
    TYPES,
    U32,
    U64,
    Array,
    bf16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    halves,
    joined,
)

_INTEGERS = "{u16,s16,u32,s32,u64,s64}"
_WIDE = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}

# Integers

_BINARY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


@instruction(
    f"{{add,sub,min,max}}.{_INTEGERS}", f"mul.lo.{_INTEGERS}", "{and,or,xor}.{b16,b32,b64,pred}"
)
def on_integers(op: Op) -> Run:
    """The lower half of a product."""
    a, b, compute = op.read(1), op.read(2), _BINARY[op.parts[0]]
    return op.pure(lambda r: compute(a(r), b(r)))


@instruction(f"mad.lo.{_INTEGERS}")
def multiply_add_low(op: Op) -> Run:
    a, b, c = op.read(1), op.read(2), op.read(3)
    return op.pure(lambda r: a(r) * b(r) + c(r))


@instruction("{mul,mad}.wide.{u16,s16,u32,s32}")
def multiply_wide(op: Op) -> Run:
    a, b, wide = op.read(1), op.read(2), TYPES[_WIDE[op.type]]
    if op.parts[0] == "mul":
        return op.pure(lambda r: a(r).astype(wide) * b(r).astype(wide))
    c = op.read(3, _WIDE[op.type])
    return op.pure(lambda r: a(r).astype(wide) * b(r).astype(wide) + c(r))


@instruction("mul.hi.{u32,s32}")
def multiply_high(op: Op) -> Run:
    a, b, wide = op.read(1), op.read(2), TYPES[_WIDE[op.type]]
    return op.pure(lambda r: ((a(r).astype(wide) * b(r).astype(wide)) >> 32).astype(TYPES[op.type]))


@instruction("mul.hi.u64")
def multiply_high_64(op: Op) -> Run:
    a, b = op.read(1), op.read(2)

    def high(r):
        x, y = a(r), b(r)
        x0, x1, y0, y1 = x & 0xFFFFFFFF, x >> 32, y & 0xFFFFFFFF, y >> 32
        middle = x1 * y0 + (x0 * y0 >> 32)
        return x1 * y1 + (middle >> 32) + ((x0 * y1 + (middle & 0xFFFFFFFF)) >> 32)

    return op.pure(high)


def _quotient(a: Array, b: Array) -> Array:
    """Towards zero. By zero PTX leaves it open; here it is all ones."""
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    floor = a // safe
    up = (floor * safe != a) & ((a < 0) != (b < 0))
    return np.where(b == 0, ~np.zeros((), a.dtype), floor + up).astype(a.dtype)


@instruction(f"div.{_INTEGERS}")
def divide_integers(op: Op) -> Run:
    a, b = op.read(1), op.read(2)
    return op.pure(lambda r: _quotient(a(r), b(r)))


@instruction(f"rem.{_INTEGERS}")
def remainder(op: Op) -> Run:
    a, b = op.read(1), op.read(2)

    def rest(r):
        x, y = a(r), b(r)
        return x - _quotient(x, y) * y

    return op.pure(rest)


@instruction("neg.{s16,s32,s64}")
def negate_integer(op: Op) -> Run:
    a = op.read(1)
    return op.pure(lambda r: -a(r))


@instruction("bfe.{u32,s32,u64,s64}")
def extract_bits(op: Op) -> Run:
    """bfe d, a, b, c: c bits of a from bit b on; of s types the last one repeats above."""
    a, b, c = op.read(1), op.read(2, "u32"), op.read(3, "u32")
    width = 8 * TYPES[op.type].itemsize

    def extract(r):
        x, start, count = a(r), (b(r) & 0xFF).astype(int), (c(r) & 0xFF).astype(int)
        top = np.minimum(start + count - 1, width - 1)
        left = np.where(count == 0, width, width - 1 - top)  # shift out what is above
        unsigned = x.view(f"u{x.dtype.itemsize}")
        up = _shift_left(unsigned, left.astype(U32))
        down = (left + start).astype(U32)
        if x.dtype.kind == "u":
            return _shift_right(up, down)
        return np.where(count == 0, 0, _shift_right(up.view(x.dtype), down)).astype(x.dtype)

    return op.pure(extract)


# Bits


def _shift_left(x: Array, by: Array) -> Array:
    """By the width or more: 0."""
    width = 8 * x.dtype.itemsize
    by = by.astype(U32)
    return np.where(by < width, x << (by % width).astype(x.dtype), 0).astype(x.dtype)


def _shift_right(x: Array, by: Array) -> Array:
    """By the width or more: 0, of a signed number its sign in each bit."""
    width = 8 * x.dtype.itemsize
    by = by.astype(U32)
    if x.dtype.kind == "i":
        return x >> np.minimum(by, width - 1).astype(x.dtype)
    return np.where(by < width, x >> (by % width).astype(x.dtype), 0).astype(x.dtype)


@instruction("shl.{b16,b32,b64}", "shr.{b16,b32,b64,u16,u32,u64,s16,s32,s64}")
def shift(op: Op) -> Run:
    a, b = op.read(1), op.read(2, "u32")
    left, text = op.parts[0] == "shl", op.operands[2]
    if text.isdigit() and int(text) < 8 * TYPES[op.type].itemsize:
        by = np.array(int(text), TYPES[op.type])
        plain = np.left_shift if left else np.right_shift
        return op.pure(lambda r: plain(a(r), by))
    way = _shift_left if left else _shift_right
    return op.pure(lambda r: way(a(r), b(r)))


@instruction("not.{b16,b32,b64,pred}")
def invert(op: Op) -> Run:
    a = op.read(1)
    return op.pure(lambda r: ~a(r))


@instruction("prmt.b32")
def permute_bytes(op: Op) -> Run:
    """Byte i of the result is byte c[4i : 4i + 3] of (a, b); bit 4i + 3 repeats its sign."""
    a, b, c = op.read(1), op.read(2), op.read(3)

    def permute(r):
        both = a(r).astype(U64) | (b(r).astype(U64) << 32)
        selector, found = c(r), np.zeros((1, 1), U32)
        for i in range(4):
            nibble = selector >> (4 * i)
            byte = (both >> (8 * (nibble & 7)).astype(U64)).astype(U32) & 0xFF
            sign = np.where(byte >> 7, 0xFF, 0).astype(U32)
            found = found | (np.where(nibble & 8, sign, byte).astype(U32) << (8 * i))
        return found

    return op.pure(permute)


# Comparisons and choices

_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def _comparison(name: str, is_float: bool) -> Callable[[Array, Array], Array]:
    """Of floats `ltu` and the like hold too where one is NaN; `ne` alone does not, unlike IEEE."""
    compare = _COMPARE.get(name.removesuffix("u"))
    if compare is not None and (not is_float or name in ("eq", "lt", "le", "gt", "ge")):
        return compare

    def with_nan(x, y):
        is_nan = np.isnan(x) | np.isnan(y)
        if compare is None:
            return is_nan == (name == "nan")
        return compare(x, y) | is_nan if name.endswith("u") else compare(x, y) & ~is_nan

    return with_nan


_ORDER = "{eq,ne,lt,le,gt,ge}"
_OF_FLOATS = "{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}"


@instruction(
    "setp.{eq,ne}.{b16,b32,b64}",
    f"setp.{_ORDER}.{_INTEGERS}",
    f"setp.{_OF_FLOATS}[.ftz].f32",
    f"setp.{_OF_FLOATS}.{{f16,bf16}}",
)
def compare(op: Op) -> Run:
    a, b, compare = op.read(1), op.read(2), _comparison(op.parts[1], "f" in op.type)
    if op.type == "bf16" or op.has("ftz"):
        prepared = bf16_to_f32 if op.type == "bf16" else flush
        return op.pure(lambda r: compare(prepared(a(r)), prepared(b(r))))
    return op.pure(lambda r: compare(a(r), b(r)))


@instruction("selp.{b16,b32,b64,u16,u32,u64,s16,s32,s64,f32}")
def select(op: Op) -> Run:
    a, b, which = op.read(1), op.read(2), op.read(3, "pred")
    return op.pure(lambda r: np.where(which(r), a(r), b(r)))


# Floats


def flush(x: Array) -> Array:
    """.ftz: a subnormal becomes a zero of its sign."""
    return np.where(np.abs(x) < np.float32(2**-126), np.copysign(np.float32(0), x), x)


def _flushed(op: Op, compute: Callable[..., Array], *reads) -> Run:
    if not op.has("ftz"):
        return op.pure(lambda r: compute(*(read(r) for read in reads)))
    return op.pure(lambda r: flush(compute(*(flush(read(r)) for read in reads))))


@instruction("{add,sub,mul}[.rn][.ftz].f32")
def add_subtract_multiply(op: Op) -> Run:
    """Without .rn ptxas may fuse a product with a sum, and round once less: not here."""
    return _flushed(op, _BINARY[op.parts[0]], op.read(1), op.read(2))


def fused(a: Array, b: Array, c: Array) -> Array:
    """a b + c, rounded once. The product is exact in f64; its sum with c is rounded there, which
    matters for the rounding to f32 only where it then lies halfway between two of them."""
    product = a.astype(np.float64) * b.astype(np.float64)
    total = product + c
    bits = total.view(U64)
    halfway = (bits & 0x1FFFFFFF) == 0x10000000
    if halfway.any():
        part = total - product
        error = (product - (total - part)) + (c - part)  # of `total`, exactly
        away = np.where((error > 0) == (total > 0), 1, -1)
        total = np.where(
            halfway & (error != 0) & np.isfinite(total), bits.view(S64) + away, bits.view(S64)
        ).view(np.float64)
    return total.astype(F32)


@instruction("fma.rn[.ftz].f32")
def fused_multiply_add(op: Op) -> Run:
    return _flushed(op, fused, op.read(1), op.read(2), op.read(3))


@instruction("{neg,abs}[.ftz].f32")
def change_sign(op: Op) -> Run:
    return _flushed(op, np.negative if op.parts[0] == "neg" else np.abs, op.read(1))


def _smaller(x: Array, y: Array) -> Array:
    """Of -0 and +0 the former; NaN only where both are."""
    found = np.fmin(x, y)
    return np.where((x == 0) & (y == 0) & np.signbit(y), y, found)


def _larger(x: Array, y: Array) -> Array:
    found = np.fmax(x, y)
    return np.where((x == 0) & (y == 0) & np.signbit(x), y, found)


@instruction("{min,max}[.ftz].f32", "{min,max}[.ftz].NaN.f32")
def smaller_or_larger(op: Op) -> Run:
    """NaN is left out where the other is a number; with .NaN it wins."""
    is_min = op.parts[0] == "min"
    if op.has("NaN"):
        return _flushed(op, np.minimum if is_min else np.maximum, op.read(1), op.read(2))
    return _flushed(op, _smaller if is_min else _larger, op.read(1), op.read(2))


# What PTX calls approximate: errors that it documents


class Error(NamedTuple):
    size: float
    of: str  # "ulp" of the result, "relative"


ERRORS = {"ex2": Error(2, "ulp"), "div": Error(2, "ulp"), "rsqrt": Error(2**-22.9, "relative")}


def off_by(exact: Array, error: Error, bits: Array) -> Array:
    """`exact` (f64) in f32, wrong by a part of the error that may be, from -1 to 1: a hash of the
    argument's bits. Zeros, infinities and NaN stay: PTX lists them."""
    part = (bits * np.uint32(0x9E3779B1)).view(S32) * 2.0**-31
    if error.of == "ulp":
        size = np.ldexp(float(error.size), np.frexp(exact)[1] - 24)
    else:
        size = error.size * np.abs(exact)
    return np.where(np.isfinite(exact) & (exact != 0), exact + part * size, exact).astype(F32)


_EXACT = {"ex2": np.exp2, "rsqrt": lambda x: 1 / np.sqrt(x)}


@instruction("{ex2,rsqrt}.approx[.ftz].f32")
def approximate(op: Op) -> Run:
    exact, error = _EXACT[op.parts[0]], ERRORS[op.parts[0]]
    return _flushed(
        op, lambda x: off_by(exact(x.astype(np.float64)), error, x.view(U32)), op.read(1)
    )


@instruction("div.full[.ftz].f32")
def approximate_quotient(op: Op) -> Run:
    def compute(x, y):
        return off_by(x.astype(np.float64) / y, ERRORS["div"], x.view(U32) ^ y.view(U32))

    return _flushed(op, compute, op.read(1), op.read(2))


# 16 bits, and pairs of them: computed in f32, where a product or sum of two rounds to the same

_WIDEN = {"bf16": bf16_to_f32, "f16": lambda bits: bits.view(F16).astype(F32)}
_PACK = {"bf16": f32_to_bf16, "f16": f32_to_f16}


def _pairs(op: Op, place: int) -> Callable[[list[Array]], list[Array]]:
    """Both numbers of an operand as f32."""
    read, widen = op.read(place, "b32"), _WIDEN[op.type.removesuffix("x2")]
    return lambda r: [widen(half) for half in halves(read(r))]


@instruction("{add,sub,mul}[.rn].{bf16x2,f16x2}")
def on_pairs(op: Op) -> Run:
    a, b = _pairs(op, 1), _pairs(op, 2)
    compute, pack = _BINARY[op.parts[0]], _PACK[op.type.removesuffix("x2")]
    return op.pure(
        lambda r: joined(*(pack(compute(x, y)) for x, y in zip(a(r), b(r), strict=True)))
    )


@instruction(f"setp.{_OF_FLOATS}.{{bf16x2,f16x2}}")
def compare_pairs(op: Op) -> Run:
    """p|q, a, b: p of the lower halves, q of the upper."""
    a, b, compare = _pairs(op, 1), _pairs(op, 2), _comparison(op.parts[1], True)
    slots = [op.slot(text, "pred") for text in op.operands[0].split("|")]

    def run(group):
        r, mask = group.registers, group.active(op)
        for slot, x, y in zip(slots, a(r), b(r), strict=True):
            group.write(slot, compare(x, y), mask)

    return run


@instruction("{add,sub,mul}[.rn].{bf16,f16}")
def on_halves(op: Op) -> Run:
    a, b, compute = op.read(1, "b16"), op.read(2, "b16"), _BINARY[op.parts[0]]
    widen, pack = _WIDEN[op.type], _PACK[op.type]
    return op.pure(lambda r: pack(compute(widen(a(r)), widen(b(r)))))


@instruction("fma.rn.{bf16,f16}")
def fused_half(op: Op) -> Run:
    """a b + c, rounded once; the product and nearly always the sum are exact in f64."""
    reads, widen, pack = [op.read(i, "b16") for i in (1, 2, 3)], _WIDEN[op.type], _PACK[op.type]

    def compute(r):
        x, y, z = (widen(read(r)).astype(np.float64) for read in reads)
        total = x * y + z
        near = total.astype(F32)
        # To odd: a number between two of f32 becomes the odd one, and then rounds as it is.
        bits = near.view(U32) - (np.abs(near) > np.abs(total)).astype(U32)
        odd = np.where(np.isfinite(total) & (near != total), bits | 1, near.view(U32))
        return pack(odd.view(F32))

    return op.pure(compute)


# Conversions

_INTEGER_TYPES = "{u8,s8,u16,s16,u32,s32,u64,s64}"


@instruction(f"cvt.{_INTEGER_TYPES}.{_INTEGER_TYPES}")
def convert_integer(op: Op) -> Run:
    """Cut, or extended by the source's sign."""
    read, target = op.read(1), TYPES[op.parts[1]]
    kind = op.program.kinds[op.destination()]
    wide = np.dtype(f"{target.kind}{kind.itemsize}")  # a register has 16 bits at least
    return op.pure(lambda r: read(r).astype(target).astype(wide))


@instruction("cvt.f32.{bf16,f16}")
def to_f32(op: Op) -> Run:
    read, widen = op.read(1, "b16"), _WIDEN[op.type]
    return op.pure(lambda r: widen(read(r)))


@instruction("cvt.rn.{bf16,f16}.f32")
def narrow(op: Op) -> Run:
    read, pack = op.read(1), _PACK[op.parts[2]]
    return op.pure(lambda r: pack(read(r)))


@instruction("cvt.rn.{bf16x2,f16x2}.f32")
def narrow_pair(op: Op) -> Run:
    """cvt d, a, b: a becomes the upper half."""
    a, b, pack = op.read(1), op.read(2), _PACK[op.parts[2].removesuffix("x2")]
    return op.pure(lambda r: joined(pack(b(r)), pack(a(r))))


@instruction("cvt.rn.f32.{s32,u32,s64,u64}")
def integer_to_float(op: Op) -> Run:
    read, target = op.read(1), TYPES[op.parts[2]]
    return op.pure(lambda r: read(r).astype(target))


# Copies


@instruction("mov.{b16,b32,b64,u16,u32,u64,s16,s32,s64,f16,f32,pred}")
def move(op: Op) -> Run:
    """Also takes a register apart, or puts one together: `mov.b32 {%rs1, %rs2}, %r1`."""
    if op.operands[0].startswith("{"):
        return _take_apart(op)
    if op.operands[1].startswith("{"):
        return _put_together(op)
    slot, source, kinds = op.destination(), op.slot(op.operands[1]), op.program.kinds
    if op.guard is not None or kinds[slot] != kinds[source]:
        return op.pure(op.read(1))

    def copy(group):
        r, mask = group.registers, group.mask
        r[slot] = r[source] if mask is None else np.where(mask, r[source], r[slot])
        if "wgmma" in group.extra:  # a register in flight gets a second name
            group.extra["wgmma"].copied(slot, source)

    return copy


def _take_apart(op: Op) -> Run:
    read = op.read(1)
    parts = [(op.slot(text), i) for i, text in enumerate(op.items(0)) if text != "_"]
    part = np.dtype(f"u{TYPES[op.type].itemsize // len(op.items(0))}")

    def run(group):
        mask, value = group.active(op), read(group.registers)
        for slot, i in parts:
            group.write(slot, (value >> value.dtype.type(8 * part.itemsize * i)).astype(part), mask)

    return run


def _put_together(op: Op) -> Run:
    texts, target = op.items(1), TYPES[op.type]
    width = target.itemsize // len(texts)
    reads = [op.reader(text, f"b{8 * width}") for text in texts]

    def join(r):
        parts = [read(r).astype(target) << (8 * width * i) for i, read in enumerate(reads)]
        return np.bitwise_or.reduce(np.broadcast_arrays(*parts))

    return op.pure(join)


@instruction("cvta[.to].{global,shared}.{u64,u32}")
def convert_address(op: Op) -> Run:
    """Global addresses are generic ones. Those of shared memory are not: nothing reads them so."""
    return op.pure(op.read(1))
