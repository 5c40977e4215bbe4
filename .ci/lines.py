"""Prints each room's lines next to the number that CONTRIBUTING.md allows; fails above it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| (`[^|]*`) \| (\d+) \|", re.M)
OTHERS = re.compile(r"`bench/` to (\d+) lines and `docs/` to (\d+) KB")


def lines(*paths: Path) -> int:
    files = [f for path in paths for f in ([path] if path.is_file() else path.rglob("*.py"))]
    return sum(len(file.read_text().splitlines()) for file in files)


def main() -> int:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    package = ROOT / "fastvit_kernels"
    rooms = [
        (names, lines(*(package / name for name in re.findall("`([^`]+)`", names))), int(most))
        for names, most in ROW.findall(page)
    ]
    counted = {n.strip("/") for names, *_ in rooms for n in re.findall("`([^`]+)`", names)}
    forgotten = {p.name for p in package.iterdir() if p.is_dir() and [*p.glob("*.py")]} - counted
    bench, kilobytes = map(int, OTHERS.findall(page)[0])
    text = sum(f.stat().st_size for f in (ROOT / "docs").glob("*.*")) / 1000
    rooms.append(("bench/, lines", lines(ROOT / "bench"), bench))
    rooms.append(("docs/, KB", round(text), kilobytes))
    for name, size, most in rooms:
        print(f"{name:32}{size:8} of {most:8}{'   too large' * (size > most)}")
    print(f"{'fastvit_kernels/ whole':32}{lines(package):8}")
    if forgotten:
        print(f"no number in CONTRIBUTING.md: {', '.join(sorted(forgotten))}")
    return bool(forgotten) or any(size > most for _, size, most in rooms)


if __name__ == "__main__":
    sys.exit(main())
