"""Faults in what judges others: bench, verify, check, the gates."""

from .fault import Fault

FAULTS: list[Fault] = []
