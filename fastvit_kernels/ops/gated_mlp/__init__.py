"""MLPs with a gate: functions.py has the operators, kernels.py what they launch."""
