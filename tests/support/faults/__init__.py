"""The small faults that mutate.py plants, one at a time, and the tests that must notice each.

A fault replaces `old`, which occurs once in the function `within` (in the whole file where that is
empty), by `new`. Keep `old` short: it must survive changes around it.
"""

from . import judges, kernels, models, ops, reports, runtime, swap, training
from .fault import Fault as Fault

ROOMS = (kernels, ops, runtime, swap, models, training, judges, reports)
FAULTS: list[Fault] = [fault for room in ROOMS for fault in room.FAULTS]
