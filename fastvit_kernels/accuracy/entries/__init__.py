"""The entries of the registry in cases.py, a file for the ops of one kind."""
