"""MLPs of two products: functions.py calls; narrow.py has narrow models in one kernel."""
