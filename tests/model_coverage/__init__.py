"""How far our backend reaches: every model of the host libraries, fused and compared. README.md."""
