"""Drawn faults (`mutate.py --random`) that no test can notice, each with the reason."""

SURVIVORS = {
    "bench/timer.py:CudaTimer.sample: True -> (False)": "a GPU's events: torch raises there",
    "swap/verdicts.py:_judge: type(module) -> (module)": "a module has what its class has",
}
