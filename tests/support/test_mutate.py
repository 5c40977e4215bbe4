"""The faults of faults.py still fit the package; some are planted and noticed."""

import re
from pathlib import Path

import pytest
from faults import FAULTS, Fault
from mutate import (
    ROOT,
    CannotPlant,
    Result,
    check,
    fails_without_a_fault,
    main,
    package_file,
    plant,
    rows,
    run_tests,
    table,
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


def test_table_keeps_the_rows_of_faults_that_did_not_run():
    first, second = FAULTS[:2]
    text = "# Page\n\n"
    text = table(text, [Result(first, "noticed", "tests/test_a.py::test_b[x]", "")])
    text = table(text, [Result(second, "timeout", "tests/test_c.py::test_d", "")])
    text = table(text, [])
    assert list(rows(text)) == [first.id, second.id]
    assert "2 faults planted, 2 noticed." in text
    assert rows(text)[first.id].endswith("| test_a.py: `test_b[x]` |")
    assert rows(text)[second.id].endswith("| test_c.py: `test_d` (timeout) |")
    assert "1 noticed" in table(text, [Result(first, "not noticed", "", "")])


def test_page_says_who_noticed_each_fault():
    """docs/reliability.md: python tests/support/mutate.py --markdown docs/reliability.md"""
    page = rows((ROOT / "docs" / "reliability.md").read_text())
    assert list(page) == [fault.id for fault in FAULTS]
    for fault in FAULTS:
        row = page[fault.id]
        assert row.startswith(f"| {fault.id} | {fault.file} | {fault.what} |")
        named = re.search(r"\| ([\w/]+\.py): `(test_\w+)", row)
        assert named is not None, row
        assert _test_exists("::".join(named.groups())), row
