"""Patch embedding as an implicit matrix product: functions.py calls, launch.py launches, kernels.py
runs."""
