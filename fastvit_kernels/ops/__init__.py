"""The fused ops: one op, one stem."""
