"""How far swap_in reaches: every model of the host libraries, swapped and compared. README.md."""
