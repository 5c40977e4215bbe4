"""Drawn faults (`mutate.py --random`) that no test can notice, each with the reason."""

SURVIVORS: dict[str, str] = {}
