"""That loads, products and other functions of the tests' interpreter give triton's bits."""

import functools
import itertools
import math

import fast_interpreter
import fast_language
import fast_operations
import numpy as np
import pytest
import torch
import triton
from interpreted import SEMANTIC, SHAPES, as_triton_does, operand, outcome, tensor
from triton import language as tl
from triton.language import core
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(
    not fast_operations.BUILTINS, reason=f"triton {triton.__version__} runs as it is, or on a GPU"
)
ELEMENTS = [tl.float32, tl.float16, tl.bfloat16, tl.int32, tl.int64, tl.uint8, tl.int1, tl.uint32]
NUMBERS = [None, 0, 3, -2, 2**40, True, 0.5, -0.0, -math.inf, math.nan, 1e300]
NUMBERS += [1.0, tl.constexpr(1)]
TO = core.tensor.__dict__["to"]  # triton leaves core as it patched it for a kernel
generator = np.random.default_rng(0)


def _agree(function, *arguments, zeros_have_signs=True, **options):
    ours = outcome(fast_operations.BUILTINS[function], *arguments, _semantic=SEMANTIC, **options)
    theirs = as_triton_does(function.__wrapped__, *arguments, _semantic=SEMANTIC, **options)
    if not zeros_have_signs and isinstance(ours, list):
        ours, theirs = (
            [(*facts, (np.frombuffer(bits, facts[2]) + 0).tobytes()) for *facts, bits in every]
            for every in (ours, theirs)
        )
    assert ours == theirs, ([getattr(x, "type", x) for x in arguments], options)


def _numbers(shape, element):
    """What rounding, signs and extremes tell apart, in an element type's array."""
    values = generator.normal(size=shape)
    flat = values.reshape(-1)
    flat[: min(6, flat.size)] = [-0.0, 3.0, math.inf, -math.inf, math.nan, 5e4][: flat.size]
    source = tensor(values.astype(np.float32), tl.float32)
    with np.errstate(all="ignore"):
        return SEMANTIC.cast(source, element).handle.data


@pytest.mark.parametrize("ends", [(0, 16), (3, 19), (0, 3), (5, 5), (0.0, 16), (0, 2**32)], ids=str)
def test_ranges(ends):
    for _ in range(2):  # made, then known
        _agree(tl.arange, *ends)
        _agree(tl.arange, *map(tl.constexpr, ends))


def _pointers(memory, element, shape, offset=0):
    """Every other element of an array from its end on."""
    places = 2 * np.arange(math.prod(shape), dtype=np.uint64)[::-1].reshape(shape)
    addresses = memory.ctypes.data + offset + memory.itemsize * places
    return tensor(np.asarray(addresses, np.uint64), tl.pointer_type(element))


def _masks(shape):
    full = np.ones(shape, bool)
    some = full.copy()
    some.reshape(-1)[::3] = False
    masks = [full, some, ~full]
    if len(shape) == 2:
        masks += [some[:, :1], some[:1]]
    return [None, *(tensor(m, tl.int1) for m in masks), operand(tl.int1, ()), operand(tl.int32, ())]


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(), (16,), (16, 8)], ids=str)
def test_loads(element, shape):
    memory = _numbers(512, element)
    for offset in (0, 1):  # the second is not aligned
        pointer = _pointers(memory, element, shape, offset)
        others = [operand(tl.float32, ()), operand(element, shape), operand(tl.float32, (8, 16, 2))]
        for mask, other in itertools.product(_masks(shape), [*NUMBERS, *others]):
            _agree(tl.load, pointer, mask=mask, other=other)
        _agree(tl.load, pointer, cache_modifier=".cg")
        _agree(tl.load, pointer, None, None, (0,))
    _agree(tl.load, operand(element, shape))


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("shape", [(), (16,), (16, 8)], ids=str)
def test_stores(element, shape):
    kind = interpreter._get_np_dtype(element)
    memory = np.zeros(300, kind)
    sources = [tensor(_numbers(shape, tl.float32), tl.float32), operand(element, shape)]
    sources += [operand(tl.int32, ()), operand(tl.float32, (32, 8)), 3, 0.5]
    for offset, value, mask in itertools.product((0, 1), sources, _masks(shape)):
        pointer = _pointers(memory, element, shape, offset)
        memory[:] = 7
        ours = outcome(fast_operations.BUILTINS[tl.store], pointer, value, mask, _semantic=SEMANTIC)
        written = memory.tobytes()
        memory[:] = 7
        theirs = as_triton_does(tl.store.__wrapped__, pointer, value, mask, _semantic=SEMANTIC)
        assert (ours, written) == (theirs, memory.tobytes()), (offset, value, mask)


def test_of_equal_addresses_the_last_is_stored():
    memory = np.zeros(4, np.float32)
    for transposed in (False, True):
        places = np.repeat(np.arange(4, dtype=np.uint64), 4).reshape(4, 4)
        places = places.T if transposed else places
        pointer = tensor(memory.ctypes.data + 4 * places, tl.pointer_type(tl.float32))
        value = operand(tl.float32, (4, 4))
        fast_operations.BUILTINS[tl.store](pointer, value)
        expected = value.handle.data[-1] if transposed else value.handle.data[:, -1]
        assert (memory == expected).all()


@pytest.mark.parametrize("element", [*ELEMENTS[:3], tl.int8, tl.int32, tl.float64], ids=str)
def test_products(element):
    kind = interpreter._get_np_dtype(element)
    a = tensor(generator.integers(-9, 9, (32, 16)).astype(kind), element)
    if element in ELEMENTS[:3]:
        a = tensor(_numbers((32, 16), element), element)
    b = tensor(np.ascontiguousarray(a.handle.data[::-1].T), element)
    turned = tensor(a.handle.data[::-1].T, element)
    sums = [None, operand(tl.float32, (32, 32)), operand(tl.float16, (32, 32))]
    sums += [operand(tl.float32, (16, 16)), tl.constexpr(None)]
    for other, acc in itertools.product((b, turned, a, operand(tl.float32, (16, 4))), sums):
        for precision in (None, "ieee", tl.constexpr("tf32x3"), "double"):
            _agree(tl.dot, a, other, acc, input_precision=precision)
        _agree(tl.dot, a, other, acc, out_dtype=tl.float16)
        _agree(tl.dot, a, other, acc, allow_tf32=False)


@pytest.mark.filterwarnings("ignore:tl.where with a non-boolean condition")
@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_casts_choices_and_functions_of_one_number(element):
    for shape in SHAPES:
        x = tensor(_numbers(shape, element), element)
        for target in ELEMENTS:
            for cast in (tl.cast, TO):
                for bitcast in (False, True):
                    _agree(cast, x, target, bitcast=bitcast)
                _agree(cast, x, tl.constexpr(target), fp_downcast_rounding="rtz")
        for function in UNARY:
            _agree(function, x)
        same = operand(tl.int1, shape)
        for other in (*NUMBERS, operand(tl.float32, shape)):
            for pair in ((x, other), (other, x)):
                for function in (tl.minimum, tl.maximum):  # NumPy's -0 and 0 go by the machine
                    _agree(function, *pair, zeros_have_signs=False)
                for condition in (same, operand(tl.int1, (4, 2)), x, True):
                    _agree(tl.where, condition, *pair)
        for wide in SHAPES:
            other = operand(element, wide)
            for function in (tl.minimum, tl.maximum):
                _agree(function, x, other, zeros_have_signs=False)
            for condition in SHAPES:
                _agree(tl.where, operand(tl.int1, condition), x, other)


UNARY = [getattr(tl, name) for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt")]


@triton.jit
def _reduce_kernel(out_ptr, x_ptr, OP: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    offsets = tl.arange(0, 16)[:, None] * 8 + tl.arange(0, 8)[None, :]
    x = tl.load(x_ptr + offsets)
    if OP == "sum":
        y = tl.sum(x, axis=AXIS, keep_dims=KEEP)
    elif OP == "max":
        y = tl.max(x, AXIS, keep_dims=KEEP)
    else:
        y = x.min(AXIS, keep_dims=KEEP)
    if AXIS is not None and not KEEP:
        y = y[None, :] if AXIS == 0 else y[:, None]
    zeros = tl.zeros((16, 8), dtype=out_ptr.dtype.element_ty)
    tl.store(out_ptr + offsets, tl.where(offsets >= 0, y.to(zeros.dtype), zeros))


@triton.jit
def _random_kernel(out_ptr, seed, DTYPE: tl.constexpr, ROUNDS: tl.constexpr):
    offsets = tl.arange(0, 64)
    counter = (offsets * 40503).to(DTYPE)
    a, b, c, d = tl.philox(seed, counter, counter * 0, counter + 3, counter * 2, ROUNDS)
    for part in tl.static_range(4):
        x = a if part == 0 else b if part == 1 else c if part == 2 else d
        tl.store(out_ptr + 64 * part + offsets, x.to(tl.int64, bitcast=tl.uint64 == DTYPE))


def _agree_in_a_kernel(monkeypatch, kernel, out, *arguments, **constants):
    """A kernel's bits with and without what is called in place of triton's functions."""
    ours, theirs = torch.zeros_like(out), torch.zeros_like(out)
    kernel[(1,)](ours, *arguments, **constants)
    with monkeypatch.context() as patch:
        patch.setattr(fast_interpreter, "FUNCTIONS", {})
        kernel[(1,)](theirs, *arguments, **constants)
    assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)), constants
    assert ours.any()


@pytest.mark.filterwarnings("ignore:(All-NaN slice|invalid value) encountered")
@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_reductions(name, monkeypatch):
    x = torch.from_numpy(_numbers((16, 8), tl.float32))
    x[3] = -0.0
    x[5] = math.nan
    for dtype, axis, keep in itertools.product(DTYPES, (0, 1, None), (False, True)):
        values = x.nan_to_num(2.0, 9.0, -9.0).to(dtype) if dtype is torch.int32 else x.to(dtype)
        out = torch.empty(16, 8, dtype=dtype)
        _agree_in_a_kernel(monkeypatch, _reduce_kernel, out, values, OP=name, AXIS=axis, KEEP=keep)


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int32]


def test_random_numbers(monkeypatch):
    for dtype, rounds, seed in itertools.product((tl.uint32, tl.uint64), (7, 10), (0, 2**40 + 5)):
        out = torch.empty(256, dtype=torch.int64)
        _agree_in_a_kernel(monkeypatch, _random_kernel, out, seed, DTYPE=dtype, ROUNDS=rounds)


def test_zeros():
    for shape, element in itertools.product([(16,), (16, 8), (tl.constexpr(4), 2)], ELEMENTS):
        ours = fast_language.zeros(shape, element)
        theirs = functools.partial(core.full, shape, 0, element, _semantic=SEMANTIC)
        if not element.is_floating():
            assert ours is NotImplemented
        else:
            assert outcome(lambda x: x, ours) == outcome(theirs)


def test_hints_count_axes():
    x = operand(tl.int32, (4, 2))
    assert fast_language.hint(x, (8, 8)) is x and fast_language.hint(7, 8) == 7
    with pytest.raises(ValueError, match="1 values for 2 axes"):
        fast_language.hint(x, 8)
