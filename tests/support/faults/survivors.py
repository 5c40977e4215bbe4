"""Drawn faults (`mutate.py --random`) that no test can notice, each with the reason."""

SURVIVORS = {
    "bench/timer.py:CudaTimer.sample: True -> (False)": "a GPU's events: torch raises there",
    "models/positions.py:resize_grid: tuple(new) -> (new)": "torch takes any sequence of ints",
}
