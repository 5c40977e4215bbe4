"""How far swap_in reaches: every model of the host libraries, swapped and compared.

model_zoo   their models by name: at their own size without memory, and narrow
shrink      any of them, cut to what runs a training step in float64
compare     a host's model and its swapped copy side by side: outputs, gradients, numbers drawn
sweep       all of it, into coverage.csv: `python -m tests.model_coverage --verify --forms`
"""
