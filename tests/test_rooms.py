"""CONTRIBUTING.md, "Where things are": the rooms of the package and which way imports point."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import fastvit_kernels as fk

PACKAGE = Path(fk.__file__).parent
# A room imports only rooms before it.
ROOMS = ("runtime", "ops", "models", "verify", "swap", "weights", "tools", "commands")
# op -> the ops whose parts it uses; a folder is one op
SIDEWAYS = {"mlp": {"linear", "narrow_mlp"}, "linear": {"library_linear"}}


def _imports(path: Path) -> Iterator[tuple[str, ...]]:
    """The module of each relative import, as a path inside the package."""
    folder = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            start = folder[: len(folder) - (node.level - 1)]
            names = node.module.split(".") if node.module else []
            if names:
                yield (*start, *names)
            else:  # from . import a, b
                yield from ((*start, alias.name) for alias in node.names)


def _modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py"))


def test_rooms_import_downwards_only():
    for path in _modules():
        room = path.relative_to(PACKAGE).parts[0]
        if room not in ROOMS[:-1]:  # commands and the package's own modules may import any room
            continue
        for target in _imports(path):
            if target == ("__version__",) or target[0] == room:
                continue
            below = ROOMS[: ROOMS.index(room)]
            assert target[0] in below, f"{path.relative_to(PACKAGE)} imports {'.'.join(target)}"


def test_every_folder_is_a_room():
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert folders == set(ROOMS)


def test_ops_import_each_other_only_where_one_is_made_of_the_other():
    ops = PACKAGE / "ops"
    for path in sorted(ops.rglob("*.py")):
        op = path.relative_to(ops).parts[0].removesuffix(".py")
        for target in _imports(path):
            if target[0] != "ops" or len(target) == 1:
                continue
            other = target[1]
            if op != "common" and other in ("common", op):
                continue
            allowed = {"common"} if op == "common" else SIDEWAYS.get(op, set())
            assert other in allowed, f"ops/{op} imports ops/{other}"


def test_imports_of_the_package_are_relative():
    for path in _modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            )
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top = name.partition(".")[0]
                where = f"{path.relative_to(PACKAGE)} imports {name}"
                assert top not in ("fastvit_kernels", "tests", "bench"), where
