"""What the pages of the repository say is there: links, paths, names, command lines."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path

import pytest

from bench.__main__ import build_parser as bench_parser
from fastvit_kernels.commands.cli import build_parser
from tests.machine.__main__ import build_parser as machine_parser
from tests.model_coverage.sweep import TABLE, build_parser as sweep_parser, read_table

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tests/*/*.md")])
FOLDERS = ("fastvit_kernels", "tests", "bench", "docs", ".ci")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
PARSERS = {  # of a program, for its words
    "fastvit-kernels": build_parser,
    "python -m fastvit_kernels": build_parser,
    "python -m bench": lambda words: bench_parser(),
    "python -m tests.machine": lambda words: machine_parser(),
    "python -m tests.model_coverage": lambda words: sweep_parser(),
}


def _anchors(text: str) -> set[str]:
    """The anchors GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@by_page
def test_relative_links_resolve(page):
    for link in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", link):  # https:, mailto:
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in _anchors(target.read_text()), f"{page.name} links to {link}"


@pytest.fixture(scope="module")
def files():
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.is_file()]
    return [*found, *ROOT.glob("*")]


@pytest.fixture(scope="module")
def words(files):
    """Of all the code."""
    code = "\n".join(p.read_text() for p in files if p.suffix == ".py")
    return set(re.findall(r"\w+", code))


@by_page
def test_files_are_where_the_pages_say(page, files):
    """Of `ops/rope.py` the end must match: pages leave out the folders their reader knows."""
    there = {f"/{p.relative_to(ROOT).as_posix()}" for p in files}
    for path in re.findall(r"(?<![\w./-])[\w.][\w./]*\.py\b", page.read_text()):
        path = path.removeprefix("../")
        assert any(p.endswith(f"/{path}") for p in there), f"{page.name} names {path}"


@by_page
def test_names_are_those_of_the_code(page, words):
    """Functions of autograd, kernels, tests and private names that stand in `code` exist."""
    ours = re.compile(r"[A-Z]\w*Function|\w+_kernel|test_\w+|_[a-z]\w+")
    for span in SPAN.findall(page.read_text()):
        for name in (
            re.findall(r"\w+", span) if re.fullmatch(r"\w[\w.]*(\(.*\))?(?<!\.py)", span) else ()
        ):
            if ours.fullmatch(name) and not (page.name == "CONTRIBUTING.md" and name[0] == "_"):
                assert name in words, f"{page.name} names {span}"


def _command_lines(text: str) -> list[str]:
    """Lines of fences, and spans, that call one of our programs."""
    lines = [line for block in FENCE.findall(text) for line in block.splitlines()]
    lines += SPAN.findall(FENCE.sub("", text))
    return [line for line in lines if line.startswith(tuple(f"{name} " for name in PARSERS))]


@by_page
def test_command_lines_parse(page, capsys):
    for line in _command_lines(page.read_text()):
        program = next(name for name in PARSERS if line.startswith(f"{name} "))
        words = shlex.split(line.removeprefix(program), comments=True)
        if words == ["COMMAND"]:
            continue
        try:
            PARSERS[program](words).parse_args(words)
        except SystemExit:
            pytest.fail(f"{page.name}: {line}\n{capsys.readouterr().err}")


def test_the_page_counts_the_models_of_the_coverage_table():
    left = read_table(TABLE)
    page = (ROOT / "docs" / "coverage.md").read_text()
    for name, *numbers in re.findall(r"^\| (\w[^|]+) " + r"\| (\d+) " * 5, page, re.MULTILINE):
        host, patterns = name.partition(":")[0], SPAN.findall(name) or ["*"]
        mine = [
            row
            for row in left
            if row.host == host and any(fnmatch.fnmatch(row.model, p) for p in patterns)
        ]
        left = [row for row in left if row not in mine]
        shares = [float(row.share) for row in mine if row.share]
        steps = [(99.95, 101.0), (90.0, 99.95), (50.0, 90.0), (-1.0, 50.0)]
        found = [sum(a <= share < b for share in shares) for a, b in steps]
        assert [*found, len(mine) - len(shares)] == list(map(int, numbers)), name
    assert not left
