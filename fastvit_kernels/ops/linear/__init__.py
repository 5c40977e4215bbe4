"""Linear layers with an epilogue in one kernel."""
