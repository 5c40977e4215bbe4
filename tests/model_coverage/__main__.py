"""python -m tests.model_coverage [--verify] [--forms] [--hosts HOST ...] [--models PREFIX ...]"""

import os
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read when numpy is imported
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when the kernels are decorated

from .sweep import main

if __name__ == "__main__":
    sys.exit(main())
