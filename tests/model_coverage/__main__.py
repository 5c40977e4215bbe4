"""python -m tests.model_coverage [--hosts HOST ...] [--models PREFIX ...]: see sweep.py."""

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported
os.environ["OMP_NUM_THREADS"] = "1"  # forks share the cores, and cannot use a pool of threads

from .sweep import main

if __name__ == "__main__":
    sys.exit(main())
