"""Drawn faults (`mutate.py --random`) that no test can notice, each with the reason."""

SURVIVORS = {
    "bench/timer.py:CudaTimer.sample: True -> (False)": "a GPU's events: torch raises there",
    "ops/attention/backward_bias.py:: 4 -> (5)": "how many programs share the tiles: GPU timing",
    "ops/common/rows.py:bwd_programs: config.block_rows > 1 -> (config.block_rows >= 1)": "timing",
    "ops/mlp/launch.py:_empty_bwd: 0 -> (1)": "a width that no wanted gradient has",
    "runtime/backend.py:device_guard: torch.cuda.device_of(x) if x.is_cuda else _NO_GUARD -> "
    "(torch.cuda.device_of(x))": "does nothing for a tensor of no GPU, a microsecond slower",
}
