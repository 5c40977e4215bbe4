"""MLPs whose hidden layer has a gate: functions.py calls, kernels.py runs."""
