"""Faults in `train`: every flag, resume, data, schedules, checkpoints; and in `load_weights`."""

from .fault import Fault

FAULTS: list[Fault] = []
