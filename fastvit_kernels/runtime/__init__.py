"""What a call crosses before its kernel."""
