"""Patch embedding: functions.py has the operators, kernels.py what they launch."""
