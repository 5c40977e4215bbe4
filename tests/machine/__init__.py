"""What kernels take from GPUs that are not here: `python -m tests.machine gate`; README.md."""
