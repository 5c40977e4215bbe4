"""Attention: three entry points in functions.py and sdpa.py, one set of kernels."""
