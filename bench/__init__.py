"""Benchmarks of every op and of whole models, side by side: `python -m bench --help`."""

import time

STARTED = time.monotonic()  # torch's import is part of a time budget
