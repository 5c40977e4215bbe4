"""Linear layers with an epilogue: functions.py calls, launch.py launches, kernels.py runs."""
