"""What several ops share on the GPU."""
