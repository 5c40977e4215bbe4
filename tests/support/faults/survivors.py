"""Drawn faults (`mutate.py --random`) that no test can notice, each with the reason."""

SURVIVORS = {
    "commands/training/figures.py:draw_attention_layer: 2.55 -> (3.55)": "inches of a drawing",
    "commands/console.py:make_table: 0 -> (1) #3": "the padding of a table",
    "commands/options.py:: 1024 -> (1025)": "a bound that has to be large, and is its own test's",
    "bench/report.py:_bars: axes.bar_label(bars, fmt=form, fontsize=8, rotation=90, padding=2) -> (axes.bar_label(bars, fmt=form, fontsize=8, padding=2))": "how labels of a drawing lie",  # noqa: E501
    "measure/timer.py:CudaTimer.sample: True -> (False)": "a GPU's events: torch raises there",
    "bench/ops.py:vits: 384 -> (385) #2": ("whole patches: 385 // 16 is 384 // 16, and of 14 too"),
    "ops/attention/backward_bias.py:: 4 -> (5)": "how many programs share the tiles: GPU timing",
    "ops/common/rows.py:bwd_programs: config.block_rows > 1 -> (config.block_rows >= 1)": (
        "GPU timing"
    ),
    "ops/mlp/launch.py:_empty_bwd: 0 -> (1)": "a width that no wanted gradient has",
    "models/positions.py:resize_grid: tuple(new) -> (new)": "torch takes any sequence of ints",
    "swap/copies.py:Copier.tensor: torch.zeros(shape, dtype=original.dtype, device='cpu') -> (torch.zeros(shape, dtype=original.dtype))": "a proof's thread has no default device",  # noqa: E501
    "runtime/backend.py:_interprets_bf16: 0 -> (1)": "an argument that the interpreter never reads",
    "runtime/compat.py:: True -> (False)": "neither is None, which alone is asked",
    "runtime/recompute.py:enclosing: not has_forward_gradients() or in_backward() -> True": (
        "looks for what is not there: slower"
    ),
    "tools/aot.py:tracing.compile_only: timings.append(0.0 if cache_hit else times.total / 1000000.0) -> (0.0 if cache_hit else times.total / 1000000.0)": "how long a compile took; 0 from the cache, too",  # noqa: E501
    "weights/names.py:to_timm: 1 -> (2) #2": "for sources without patches: nothing reads it",
    "swap/plans.py:_judge: type(module) -> (module)": "a module has what its class has",
    "swap/hosts/special/towers.py:GemmaAttention.fused_examples: torch.zeros(batch, tokens, 2, dtype=torch.long) -> (torch.zeros(batch, tokens, 2))": "an example of a call to try, as good as another: the host reads its shape",  # noqa: E501
    "swap/hosts/special/bias.py:OwnBias.fused_examples: 1 -> (2) #3": "an example of a call to try, as good as another",  # noqa: E501
    "swap/hosts/special/windows.py:HfSwinLayer.fused_examples: 2 -> (3)": "an example of a call to try, as good as another",  # noqa: E501
}
