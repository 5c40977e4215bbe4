"""Faults are drawn, planted in a copy, noticed or shown."""

import json
from pathlib import Path

import drawn
import mutate
import pytest
from drawn import plant
from mutate import Result, check, fails_without_a_fault, main, run_tests


def _test_exists(name: str) -> bool:
    file, _, function = name.partition("::")
    path = drawn.ROOT / "tests" / file
    return path.exists() and f"def {function.partition('[')[0]}" in path.read_text()


def _fault(file: str, old: str, new: str, *tests: str) -> drawn.Fault:
    source = (drawn.ROOT / drawn.path_of(file)).read_text()
    begin = len(source.partition(old)[0].encode())
    assert old in source
    return drawn.Fault("name", file, new, begin, begin + len(old.encode()), (0, 0), tests)


def test_planted_fault_is_noticed_and_the_tree_is_left_alone():
    path = drawn.ROOT / "fastvit_kernels/ops/common/reduction.py"
    before, empty = path.read_bytes(), "num_rows == 0 or N == 0"
    tests = "ops/test_reduction.py::test_column_sum_of_no_rows_is_zero"
    wrong = _fault("ops/common/reduction.py", empty, "N == 0", tests)
    assert check(wrong, timeout=3600).outcome == "noticed"
    right = _fault("ops/common/reduction.py", empty, "N == 0 or num_rows == 0", tests)
    assert check(right, timeout=3600).outcome == "not noticed"
    assert path.read_bytes() == before


def _project(root: Path, test: str, package: str = "fastvit_kernels") -> Path:
    for folder in ("tests", package):
        (root / folder).mkdir()
    (root / package / "__init__.py").touch()
    (root / "tests" / "test_it.py").write_text(test)
    return root.resolve()


def test_an_endless_loop_is_ended(tmp_path):
    root = _project(tmp_path, "import time\n\ndef test_loop():\n    time.sleep(1000)\n")
    for seconds in (4, 16, 64, 256):  # for a loaded machine, where pytest itself takes long
        run = run_tests(root, ["test_it.py"], timeout=seconds)
        assert run.status is None
        if run.started:
            break
    assert run.started == ["tests/test_it.py::test_loop"]


def test_an_installed_package_does_not_stand_in(tmp_path):
    root = _project(tmp_path, "def test_nothing():\n    pass\n", package="other")
    run = run_tests(root, ["test_it.py"], timeout=3600)
    assert run.status != 0
    assert not run.started


def test_a_test_that_fails_without_a_fault_is_said():
    assert fails_without_a_fault(["tests/ops/test_reduction.py::test_absent"], timeout=3600)


SOURCE = '''"""Text, 1 and 2."""
def f(a: int = 3, *, b: bool = True) -> "1":
    """Text 4."""
    if not a < 1 and b:
        raise ValueError(f"{a + 1}", 7)
    return g(a[: a + 2], key=é) if a else print("5")
'''


def test_what_is_drawn_in_a_file():
    found = {fault.id: fault for fault in drawn._mutants("x.py", SOURCE)}
    changes = {id.removeprefix("x.py:f: ") for id in found}
    wanted = {
        "3 -> (4)",
        "True -> (False)",
        "not a < 1 -> (a < 1)",
        "a < 1 -> (a <= 1)",
        "1 -> (2)",
        "not a < 1 and b -> (not a < 1 or b)",
        "not a < 1 and b -> True",
        "not a < 1 and b -> False",
        "g(a[:a + 2], key=é) -> (g(a[:a + 2]))",
        "g(a[:a + 2], key=é) -> (a[:a + 2])",
        "2 -> (3)",
        "a + 2 -> (a - 2)",
        ":a + 2 -> :a + 2 + 1",
        "g(a[:a + 2], key=é) if a else print('5') -> (print('5'))",
        "g(a[:a + 2], key=é) if a else print('5') -> (g(a[:a + 2], key=é))",
    }
    assert changes == wanted  # no annotation, text or message is among them
    for fault in found.values():
        planted = plant(fault, SOURCE)
        compile(planted, "x.py", "exec")
        assert planted != SOURCE


def test_a_drawn_fault_keeps_its_name_where_others_lines_change():
    before = [fault.id for fault in drawn._mutants("x.py", SOURCE)]
    after = [
        fault.id for fault in drawn._mutants("x.py", f"{SOURCE}\n\n\ndef g():\n    return 1\n")
    ]
    assert after[: len(before)] == before and len(set(after)) == len(after)
    moved = [fault.id for fault in drawn._mutants("x.py", SOURCE.replace("def", "\n# 1\n\ndef"))]
    assert moved == before


def test_a_seed_draws_the_same_from_every_room():
    first, again, other = drawn.draw(30, 1), drawn.draw(30, 1), drawn.draw(30, 2)
    assert first == again and {f.id for f in first} != {f.id for f in other}
    rooms = [fault.file.split("/")[0] for fault in first if "/" in fault.file]
    assert {"bench", "fuse", "ops", "tests", "accuracy", "weights"} <= set(rooms)
    assert max(map(rooms.count, rooms)) <= 4
    assert all(fault.file.startswith("fuse/") for fault in drawn.draw(9, 1, "fuse/*.py"))
    for fault in first:
        plant(fault, (drawn.ROOT / drawn.path_of(fault.file)).read_text())


def test_every_file_has_tests():
    for file in drawn.files_of():
        tests = drawn.tests_of(file)
        assert tests and all(map(_test_exists, tests)), file


def test_faults_that_no_test_notices_are_shown(monkeypatch, capsys):
    seen, missed = drawn.draw(2, 5, "ops/common/reduction.py")
    monkeypatch.setattr(
        mutate,
        "check",
        lambda fault, timeout: Result(fault, "noticed" if fault == seen else "not noticed", ""),
    )
    words = ["--random", "2", "--seed", "5", "--files", "ops/common/reduction.py"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert f"{missed.id}: not noticed\n-" in out and "\n+" in out
    assert "2 faults planted, 1 noticed" in out


def test_a_drawn_fault_has_the_tests_that_run_its_lines(tmp_path):
    file = "fastvit_kernels/ops/norm/kernels.py"
    tests = ["tests/a.py::wide[1]", "tests/a.py::wide[2]", "tests/b.py::small", "tests/c.py::not"]
    own = {"tests": ["tests/ops/test_norm.py::own"], "lines": {file: {"1": "1", "2": "1"}}}
    more = {"tests": tests, "lines": {file: {"1": "7", "2": "3", "3": "8"}}}
    for worker, found in (("gw0", more), ("gw1", own)):
        (tmp_path / f"ran.{worker}").write_text(json.dumps(found))
    ran = drawn.Ran(tmp_path / "ran")
    wanted = ("ops/test_norm.py::own", "b.py::small", "a.py::wide[1]", "a.py::wide[2]")
    assert ran.tests("ops/norm/kernels.py", 1, 2) == wanted
    assert ran.tests("ops/norm/kernels.py", 3, 3) == ("c.py::not",)
    assert set(ran.tests("ops/norm/kernels.py", 4, 9)) == {*wanted, "c.py::not"}
    with pytest.raises(FileNotFoundError):
        drawn.Ran(tmp_path / "other")
