"""MLPs of two products: functions.py calls, launch.py launches, kernels.py runs."""
