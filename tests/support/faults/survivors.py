"""Drawn faults (`mutate.py --random`) that no test can notice, each with the reason."""

SURVIVORS = {
    "bench/timer.py:CudaTimer.sample: True -> (False)": "a GPU's events: torch raises there",
    "commands/training/figures.py:draw_curves: 5 -> (6)": "where a curve loses its dots is taste",
    "models/vit.py:VisionTransformer.__init__: 0 -> (1) #4": "any count from 0 on passes",
    "weights/files.py:_read_npz: 0 -> (1) #2": "of a scalar: neither is negative",
    "commands/training/streaming.py:Streamed.batches: True -> (False)": "all three have one length",
    "commands/attention_steps.py:learnt_bias: 12 -> (13)": "the compile gate has the shape",
    "verify/entries/varlen.py:_fuzz: pick.integer(1, 32) -> (1)": "other random calls, as right",
    "verify/entries/gated_mlp.py:_gated_configs: 5 -> (6)": "another call that reaches the configs",
}
