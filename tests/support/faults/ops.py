"""Faults in ops that only an unusual call shows: another order, stride, seed, or address."""

from .fault import Fault

FAULTS: list[Fault] = []
