"""What a block of a training step launches, moves and keeps, counted on fake tensors."""
