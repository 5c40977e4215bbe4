"""What stands behind the command line: one module a command, and what the commands share."""
