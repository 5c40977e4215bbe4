"""LayerNorm and RMSNorm: functions.py calls, launch.py launches, one set of kernels runs both."""
