"""That types and operations of the tests' interpreter are those of triton, bit for bit."""

import functools
import itertools
import math

import fast_interpreter
import fast_operations
import numpy as np
import pytest
import triton
from interpreted import SEMANTIC, SHAPES, as_triton_does, operand, outcome
from triton import language as tl
from triton.language import core
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(
    core.tensor.__init__ is not fast_interpreter.tensor_init,
    reason=f"triton {triton.__version__} runs as it is, or on a GPU",
)
DTYPES = [tl.int1, tl.int8, tl.uint16, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32]
POINTERS = [tl.pointer_type(tl.float32), tl.pointer_type(tl.float32, 3), tl.pointer_type(tl.int1)]


@pytest.mark.parametrize("element", DTYPES + POINTERS, ids=str)
@pytest.mark.parametrize("shape", [(1,), (16,), (16, 1), (2, 4, 8)], ids=str)
def test_a_block_type_holds_what_triton_computes(element, shape):
    theirs = object.__new__(core.block_type)
    fast_interpreter._block_init(theirs, element, list(shape))
    for sizes in (list(shape), [tl.constexpr(n) for n in shape], theirs.shape):
        ours = tl.block_type(element, sizes)
        assert ours == theirs
        assert (ours.name, ours.numel, ours.scalar) == (theirs.name, theirs.numel, element)
        assert ours.scalar == element and list(ours.shape) == list(shape)
        assert fast_interpreter._get_np_dtype(theirs) == interpreter._get_np_dtype(ours)
    zeros = np.zeros(shape, interpreter._get_np_dtype(element))
    x = tl.tensor(interpreter.TensorHandle(zeros, element), ours)
    assert [n.value for n in x.shape] == list(shape) and x.numel.value == zeros.size


def test_address_spaces_and_shapes_are_told_apart():
    types = [tl.block_type(p, [n]) for p in POINTERS for n in (8, 16)]
    assert all((a == b) == (a is b) for a in types for b in types)


@pytest.mark.parametrize("shape", [(3,), (), (2**20, 2**10), (2.0,)], ids=str)
def test_a_shape_that_triton_refuses_is_refused(shape):
    with pytest.raises((TypeError, ValueError)):
        tl.block_type(tl.float32, list(shape))


def test_a_tuple_has_the_type_that_triton_gives_it():
    x = tl.tensor(interpreter.TensorHandle(np.zeros(4, np.float32), tl.float32), tl.float32)
    values = [tl.constexpr(3), x]
    assert core.tuple(values).type == core._type_for_tuple_values(values)
    named = core.tuple_type([tl.int32, tl.float32], ["rows", "scale"])
    assert core.tuple(values, named).type is named
    assert bool(core.tuple([1, 2]) == [1, 2]) and not bool(core.tuple([1, 2]) == (1, 3))


NUMBERS = [0, 3, -2, 2**31, -(2**31), 2**40, True, 0.5, -0.0, 3.0, 1e-40, 1e300, math.inf, math.nan]
TYPES = [tl.float32, tl.int32, tl.int64, tl.int1, tl.float16, tl.uint32, POINTERS[0]]


@pytest.mark.parametrize("name", fast_operations.slow_operators)
def test_operators_give_what_triton_computes(name):
    slow = functools.partial(fast_operations.slow_operators[name], _semantic=SEMANTIC)
    for dtype, shape in itertools.product(TYPES, SHAPES):
        x = operand(dtype, shape)
        tensors = [operand(*kind) for kind in itertools.product((dtype, tl.int64), SHAPES)]
        for other in (*NUMBERS, None, tl.constexpr(3), *(() if "__r" in name else tensors)):
            ours = outcome(getattr(core.tensor, name), x, other)
            assert ours == as_triton_does(slow, x, other), (
                name,
                x.type,
                getattr(other, "type", other),
            )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_casts_broadcasts_and_new_axes_are_those_of_triton(dtype):
    for shape, other in itertools.product(SHAPES, SHAPES):
        x, y = operand(dtype, shape), operand(tl.int1, other)
        for pair in ((x, y), (y, x)):
            ours = outcome(SEMANTIC.broadcast_impl_value, *pair)
            assert ours == as_triton_does(SEMANTIC.broadcast_impl_value, *pair), (shape, other)
    for shape, target in itertools.product(SHAPES, TYPES):
        x = operand(dtype, shape)
        assert outcome(SEMANTIC.cast, x, target) == as_triton_does(SEMANTIC.cast, x, target), target
    whole, getitem = slice(None), functools.partial(fast_operations._getitem, _semantic=SEMANTIC)
    for shape, index in itertools.product(
        SHAPES, [None, whole, (whole, None), (None, whole), (whole, None, whole), (0, None)]
    ):
        x = operand(dtype, shape)
        assert outcome(x.__getitem__, index) == as_triton_does(getitem, x, index), (shape, index)
