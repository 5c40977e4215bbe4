"""The kernels of attention.py and sdpa.py, what they share, and what they are launched with."""
