"""`python -m fastvit_kernels`: the same commands as the console script."""

import sys

from .commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
