"""Benchmarks of every op and of whole models, side by side: `python -m bench --help`."""
