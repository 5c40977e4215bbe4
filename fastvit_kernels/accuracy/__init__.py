"""How a number is known to be right: the 2x rule and the cases it is asked of."""
