"""What the pages of the repository say is there: links, paths, names, command lines."""

from __future__ import annotations

import fnmatch
import re
import shlex
from pathlib import Path

import pytest

from bench.__main__ import build_parser as bench_parser
from fastvit_kernels.commands.cli import COMMANDS, build_parser

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
WRITTEN = [p for p in PAGES if p.name not in ("resources.md", "coverage.md")]  # by hand
FOLDERS = ("fastvit_kernels", "tests", "bench", "docs", ".ci")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
by_written_page = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)


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


@by_written_page
def test_files_are_where_the_pages_say(page, files):
    """Of `ops/rope.py` the end must match: pages leave out the folders their reader knows."""
    there = {f"/{p.relative_to(ROOT).as_posix()}" for p in files}
    for path in re.findall(r"(?<![\w./-])[\w.][\w./]*\.py\b", page.read_text()):
        path = path.removeprefix("../")
        assert any(p.endswith(f"/{path}") for p in there), f"{page.name} names {path}"


@by_written_page
def test_names_are_those_of_the_code(page, files):
    """Functions of autograd, kernels, tests and private names that stand in `code` exist."""
    code = "\n".join(p.read_text() for p in files if p.suffix == ".py")
    words = set(re.findall(r"\w+", code))
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
    starts = ("fastvit-kernels ", "python -m fastvit_kernels ", "python -m bench ")
    return [line for line in lines if line.startswith(starts)]


@by_page
def test_command_lines_parse(page, capsys):
    for line in _command_lines(page.read_text()):
        words = shlex.split(line, comments=True)
        words = words[1:] if words[0] == "fastvit-kernels" else words[3:]
        if words == ["COMMAND"]:
            continue
        parser = build_parser(words) if words[0] in COMMANDS else bench_parser()
        try:
            parser.parse_args(words)
        except SystemExit:
            pytest.fail(f"{page.name}: {line}\n{capsys.readouterr().err}")


def test_readme_counts_the_models_of_the_coverage_page():
    page = (ROOT / "docs" / "coverage.md").read_text()
    levels = re.findall(r"^\| [^|]+ \| (block|parts|none) \|", page, re.MULTILINE)
    blocks, parts = levels.count("block"), levels.count("parts")
    wanted = (
        f"{blocks} models of timm, torchvision and transformers swap whole blocks, {parts} more"
    )
    assert wanted in (ROOT / "README.md").read_text()


def test_each_promise_has_tests_that_noticed_a_fault():
    """By faults/noticed.csv, which mutate.py --record writes. The last section has none."""
    from faults import FAULTS
    from mutate import recorded

    tests = ROOT / "tests"
    code = "\n".join(path.read_text() for path in tests.rglob("test_*.py"))
    known = recorded()
    firsts = [known[fault.id][1] for fault in FAULTS if fault.id in known]
    noticed = [test.partition("[")[0].partition("::") for test in firsts]
    sections = (ROOT / "docs" / "promises.md").read_text().split("\n## ")[1:]
    rows = [
        (section is not sections[-1], promise, re.findall(r"`([\w/*.]+)`", names))
        for section in sections
        for promise, names in re.findall(r"^\| (?!promise |---)(.*) \| (.*) \|$", section, re.M)
    ]
    assert len(rows) > 100
    for has_fault, promise, names in rows:
        assert names, promise
        for name in names:
            pattern = name.replace("*", r"\w*")
            there = (tests / name).is_file() or re.search(rf"def {pattern}\(", code)
            assert there, f"{promise}: {name} is no test"
        has_noticed = any(
            fnmatch.fnmatch(file if name.endswith(".py") else test, name)
            for name in names
            for file, _, test in noticed
        )
        assert has_noticed or not has_fault, f"{promise}: no fault is recorded for {names}"
