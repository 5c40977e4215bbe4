"""A plugin of pytest that notes which tests run which lines, for `mutate.py --random --ran FILE`.

PYTHONPATH=tests/support python -m pytest -n 2 -p ran --ran=FILE    # workers write FILE.gw0, ...
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest
from drawn import ROOT, TOOLS
from private import COLLECTOR

SOURCES = [str(ROOT / name) for name in ("fastvit_kernels", "bench")]
SOURCES += [str(ROOT / "tests" / name) for name in TOOLS]


class Ran:
    """Lines as sets of tests: bit n of a number is test n. Subprocesses of tests are not seen."""

    def __init__(self, path: Path):
        self.path = path
        self.tests: list[str] = []
        self.seconds: list[float] = []
        self.lines: dict[str, dict[int, int]] = {}
        self.measured = coverage.Coverage(data_file=None, source=SOURCES, config_file=False)
        self.measured.start()

    def _taken(self) -> Iterator[tuple[str, list[int]]]:
        """What ran since the last time, from where the tracers write: a thread more, a fork, and
        coverage's own database is lost."""
        for file, lines in list(getattr(self.measured, COLLECTOR).data.items()):
            yield file, list(lines)
            lines.clear()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        list(self._taken())
        begun = time.process_time()
        result = yield
        bit = 1 << len(self.tests)
        self.tests.append(item.nodeid)
        self.seconds.append(round(time.process_time() - begun, 2))
        for file, lines in self._taken():
            known = self.lines.setdefault(str(Path(file).relative_to(ROOT)), {})
            for line in lines:
                known[line] = known.get(line, 0) | bit
        return result

    def pytest_sessionfinish(self) -> None:
        self.measured.stop()
        lines = {f: {n: f"{b:x}" for n, b in found.items()} for f, found in self.lines.items()}
        found = {"tests": self.tests, "seconds": self.seconds, "lines": lines}
        self.path.write_text(json.dumps(found))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ran", metavar="FILE", help="write which tests ran which lines")


def pytest_configure(config: pytest.Config) -> None:
    worker = getattr(config, "workerinput", {}).get("workerid", "gw")
    if config.getoption("--ran") and (worker != "gw" or not config.getoption("numprocesses", 0)):
        config.pluginmanager.register(Ran(Path(f"{config.getoption('--ran')}.{worker}")))
