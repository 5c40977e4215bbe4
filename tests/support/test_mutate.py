"""The faults of faults.py still fit the package; some are planted and noticed."""

import json
from pathlib import Path

import drawn
import mutate
import pytest
from faults import FAULTS, Fault
from mutate import (
    NOTICED,
    ROOT,
    CannotPlant,
    Result,
    check,
    fails_without_a_fault,
    main,
    package_file,
    plant,
    record,
    recorded,
    run_tests,
)

BY_ID = {fault.id: fault for fault in FAULTS}
NO_ROWS = "ops/test_reduction.py::test_column_sum_of_no_rows_is_zero"


def _test_exists(name: str) -> bool:
    file, _, function = name.partition("::")
    path = ROOT / "tests" / file
    function = function.partition("[")[0]
    return path.exists() and f"def {function}" in path.read_text()


def test_every_fault_has_a_name_of_its_own():
    assert len(BY_ID) == len(FAULTS) >= 40


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_fault_fits_the_source(fault):
    plant(fault, package_file(fault).read_text())
    assert all(_test_exists(test) for test in fault.tests)


@pytest.mark.parametrize(
    ("within", "old", "new", "message"),
    [
        ("f", "a", "b", "it occurs 2 times"),
        ("f", "z", "b", "it occurs 0 times"),
        ("g", "x", "y", "there are 0 functions g"),
        ("f", "return a", "return  a", "changes nothing"),
    ],
)
def test_what_cannot_be_planted_is_said(within, old, new, message):
    fault = Fault("name", "file.py", within, "", old, new)
    with pytest.raises(CannotPlant, match=message):
        plant(fault, "def f(a):\n    return a\n\n\ndef h(a):\n    return a\n")


def test_a_fault_is_planted_in_its_function_alone():
    source = "def f(a):\n    return a\n\n\ndef h(a):\n    return a\n"
    planted = plant(Fault("name", "file.py", "h", "", "return a", "return -a"), source)
    assert planted == source[:-9] + "return -a\n"


def test_planted_fault_is_noticed():
    fault = BY_ID["sum-row-stride"]
    path = package_file(fault)
    before = path.read_bytes()
    result = check(fault, timeout=3600)
    assert result.outcome == "noticed", result.output
    assert _test_exists(result.test.removeprefix("tests/"))
    assert path.read_bytes() == before


def test_what_changes_no_result_is_not_noticed():
    old, new = "num_rows, N = x.shape", "num_rows = 1 * x.shape[0]; N = x.shape[1]"
    fault = Fault("name", "ops/common/reduction.py", "column_sum", "", old, new, (NO_ROWS,))
    assert check(fault, timeout=3600).outcome == "not noticed"


def test_a_package_that_cannot_be_imported_is_no_fault_noticed():
    fault = Fault("n", "ops/common/reduction.py", "", "", "import Any, NamedTuple", "import Any")
    assert check(fault, timeout=3600).outcome == "broken"


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


def test_list(capsys):
    assert main(["--list", "--only", "sum-*", "norm-dx-sign"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("norm-dx-sign")
    assert lines[-1] == f"{len(lines) - 1} faults"
    with pytest.raises(SystemExit):
        main(["--only", "no-such-fault"])


def test_the_record_keeps_the_rows_of_faults_that_did_not_run(tmp_path):
    first, second = FAULTS[:2]
    path = tmp_path / "noticed.csv"
    path.write_text("fault,outcome,test\n")
    record([Result(second, "timeout", "tests/test_c.py::test_d", "")], path)
    record([Result(first, "noticed", "tests/test_a.py::test_b[x|y]", "")], path)
    record([], path)
    assert list(recorded(path).items()) == [
        (first.id, ("noticed", "test_a.py::test_b[x|y]")),
        (second.id, ("timeout", "test_c.py::test_d")),
    ]


def test_the_record_says_who_noticed_each_fault():
    """python tests/support/mutate.py --record"""
    found = recorded()
    assert list(found) == [fault.id for fault in FAULTS]
    for id, (outcome, test) in found.items():
        assert outcome in NOTICED, id
        assert _test_exists(test), f"{id}: {test}"


# --- drawn


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
    assert {"bench", "ops", "swap", "tests", "verify", "weights"} <= set(rooms)
    assert max(map(rooms.count, rooms)) <= 4
    assert all(fault.file.startswith("swap/") for fault in drawn.draw(9, 1, "swap/*.py"))
    for fault in first:
        plant(fault, package_file(fault).read_text())


def test_every_file_has_tests():
    for file in drawn.files_of():
        tests = drawn.tests_of(file)
        assert tests and all(map(_test_exists, tests)), file
    assert drawn.tests_of("ops/norm/kernels.py") == ("ops/test_norm.py",)
    assert "runtime/test_route.py" in drawn.tests_of("runtime/route.py")
    assert "test_bench.py" in drawn.tests_of("bench/bench_mlp.py")


def test_drawn_faults_are_planted_shown_and_explained(monkeypatch, capsys):
    seen, spared, tried = drawn.draw(3, 5, "ops/common/reduction.py")
    monkeypatch.setattr(mutate, "SURVIVORS", {spared.id: "for a reason"})
    monkeypatch.setattr(
        mutate,
        "check",
        lambda fault, timeout: Result(fault, "noticed" if fault == seen else "not noticed", "", ""),
    )
    words = ["--random", "3", "--seed", "5", "--files", "ops/common/reduction.py"]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert f"{spared.id}: explained, for a reason" in out
    assert f"{tried.id}: not noticed\n-" in out and "\n+" in out
    assert "2 faults planted, 1 noticed, 1 explained" in out


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
