"""Drawn faults (`mutate.py --random`) that no test can notice, each with the reason."""

SURVIVORS = {
    "bench/timer.py:CudaTimer.sample: True -> (False)": "a GPU's events: torch raises there",
    "bench/shapes.py:vits: 384 -> (385) #2": "whole patches: 385 // 16 is 384 // 16, and of 14 too",
}
