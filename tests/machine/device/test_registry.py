"""Each instruction that the machine knows has a unit test; each name stands for what PTX has."""

import re
from pathlib import Path

import pytest

from tests.machine.device.registry import INSTRUCTIONS, expand

from . import test_arithmetic, test_control, test_memory, test_tma, test_wgmma

MODULES = (test_arithmetic, test_control, test_memory, test_tma, test_wgmma)


def names_in_tests():
    """The names that unit tests are given or write; of test_every_form, all of an opcode."""
    for module in MODULES:
        yield from re.findall(r"[a-z][\w.:]*\w", Path(module.__file__).read_text())
        for function in vars(module).values():
            for mark in getattr(function, "pytestmark", ()):
                values = mark.args[1] if mark.name == "parametrize" else ()
                for value in values:
                    given = value if isinstance(value, tuple) else (value,)
                    yield from (x for x in given if isinstance(x, str))
    for names in test_arithmetic.BY_OPCODE.values():
        yield from names


def test_each_instruction_has_a_unit_test():
    assert " ".join(sorted(set(INSTRUCTIONS) - set(names_in_tests()))) == ""


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("ret", ["ret"]),
        ("mul.{lo,hi}.s32", ["mul.lo.s32", "mul.hi.s32"]),
        ("fence.proxy.async[.shared::cta]", ["fence.proxy.async", "fence.proxy.async.shared::cta"]),
        ("ld{,.nc}.{b8,b16}", ["ld.b8", "ld.b16", "ld.nc.b8", "ld.nc.b16"]),
    ],
)
def test_what_a_pattern_stands_for(pattern, names):
    assert list(expand(pattern)) == names
