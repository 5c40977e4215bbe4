"""`python -m fastvit_kernels`: the same commands as the console script."""

import sys

from fastvit_kernels.cli import main

if __name__ == "__main__":
    sys.exit(main())
