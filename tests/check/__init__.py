"""Every case and launch config, each in a process that may hang or crash; not in the wheel."""
