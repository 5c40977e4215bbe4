"""Drawn faults (`mutate.py --random`) that no test can notice, each with the reason."""

SURVIVORS = {
    "bench/timer.py:CudaTimer.sample: True -> (False)": "a GPU's events: torch raises there",
    "verify/entries/attention.py:_heads: T > 33 -> (T >= 33)": "patience of the fuzz test",
    "verify/entries/linear.py:_linear_fuzz: 2000000 -> (2000001)": "patience of the fuzz test",
}
