"""The launch config tables by name: configs.py chooses from them, tuned_table.py checks a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Key = tuple[int | str, ...]
Tuned = Mapping[tuple[str, Key], Any]  # (table, key) -> config

TABLES: dict[str, Any] = {}  # name -> ConfigTable
