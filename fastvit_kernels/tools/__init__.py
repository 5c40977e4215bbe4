"""For people who tune and cross-compile."""
