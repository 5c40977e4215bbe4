"""Checkpoints of every family: names, file formats, loading."""
