"""Faults in the choice of backend, dispatch, private names and what a model reports."""

from .fault import Fault

FAULTS: list[Fault] = []
