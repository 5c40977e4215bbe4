"""Patch embedding as an implicit matrix product: functions.py calls, kernels.py runs."""
