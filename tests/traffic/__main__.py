"""python -m tests.traffic: the tables of README.md; no GPU needed, triton and timm are."""

from .blocks import table

if __name__ == "__main__":
    print(table())
