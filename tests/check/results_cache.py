"""Results on disk, a JSON line each, written as they come; a later run skips what is there.

Lines of other sources stay in the file and count for nothing: what was mended runs again.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastvit_kernels.commands.console import finite

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("fastvit_kernels", "bench", "tests/check")


@functools.lru_cache(maxsize=1)
def sources_hash() -> str:
    """Of the package and of what checks and measures it: equal where the same code runs."""
    found = hashlib.sha256()
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        content = path.read_bytes()
        name = path.relative_to(ROOT).as_posix()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:12]


class ResultsCache:
    """The lines of one file; without a path, of this process alone."""

    def __init__(self, path: Path | None, sources: Callable[[], str] = sources_hash):
        self.path, self._sources = path, "" if path is None else sources()
        self.lines: list[dict[str, Any]] = []  # of these sources
        if path is None or not path.exists():
            return
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):  # a kill tore the last line
            text = text[: text.rfind("\n") + 1]
            path.write_text(text, encoding="utf-8")
        for line in text.splitlines():
            content = json.loads(line)
            if content.get("sources") == self._sources:
                self.lines.append(content)

    def add(self, **content: Any) -> None:
        """Write a line; it is on disk before this returns."""
        self.lines.append(content)
        if self.path is not None:
            line = json.dumps(finite({**content, "sources": self._sources}))
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
