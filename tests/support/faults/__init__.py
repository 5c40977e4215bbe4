"""The small faults that mutate.py plants, one at a time, and the tests that must notice each.

A fault replaces `old`, which occurs once in the function `within` (in the whole file where that is
empty), by `new`. Keep `old` short: it must survive changes around it. strangers.json has those that
people planted who had seen no test, and that nothing noticed then.
"""

import json
from pathlib import Path

from . import judges, kernels, models, ops, reports, runtime, swap, training
from .fault import Fault as Fault

ROOMS = (kernels, ops, runtime, swap, models, training, judges, reports)
FAULTS: list[Fault] = [fault for room in ROOMS for fault in room.FAULTS]
for _row in json.loads(Path(__file__).with_name("strangers.json").read_text(encoding="utf-8")):
    FAULTS.append(Fault(**{**_row, "only": tuple(_row["only"])}))
