"""MLPs of two products: functions.py calls, launch.py launches, kernels.py runs. Narrow models run
narrow.py, one kernel."""
