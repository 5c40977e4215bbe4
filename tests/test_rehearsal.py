"""First contact from end to end, in real processes, on a device that stands in."""

from __future__ import annotations

import sys
from pathlib import Path

import bench_stand_ins  # noqa: F401, finds bench

from bench import session
from bench.__main__ import build_parser
from bench.rows import ERROR, LOST, OK, TIMEOUT, read_rows
from bench.session import Stage
from tests.check.isolated import python

DRIVER = Path(__file__).parent / "support" / "rehearsed.py"
STAGES = (
    Stage(
        "smoke",
        1,
        python("tests.check", "--only", "layer_norm_and", "--dtype", "fp32"),
        "",
        needed=True,
    ),
    Stage(
        "targets",
        1,
        (
            sys.executable,
            str(DRIVER),
            "targets",
            "--out",
            "{out}",
            "--resume",
            "--time-budget",
            "{seconds}",
        ),
        "",
    ),
    Stage("tune", 1e-6, ("none",), "", least=1e5),
)


def test_a_first_contact_survives_what_goes_wrong(monkeypatch, tmp_path, capsys):
    """An exception, a hang, a lost device, no time; then a resume does what is left alone."""
    root = Path(__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{root}:{DRIVER.parent}")
    monkeypatch.setenv("REHEARSAL", str(tmp_path))
    monkeypatch.setattr(session, "caches_id", lambda: "")
    out = tmp_path / "out"
    words = ["contact", "--out", str(out), "--seconds", "1500"]

    assert session.run(build_parser().parse_args(words), True, STAGES) == 1
    said = capsys.readouterr().out
    assert (tmp_path / "tried").read_text().split() == ["raises", "hangs", "loses"]  # once each
    rows = {(r.shape[0], r.provider): r for r in read_rows(out) if r.op == "layer_norm"}
    assert {key: row.status for key, row in rows.items()} == {
        ("a", "eager"): OK,
        ("a", "ours-raises"): ERROR,
        ("b", "eager"): OK,
        ("b", "hangs"): TIMEOUT,
        ("c", "eager"): OK,
        ("c", "loses"): ERROR,
    }
    assert rows["a", "ours-raises"].note == "RuntimeError: no kernel image"
    assert rows["b", "hangs"].note.startswith("hung")
    assert rows["c", "loses"].note.startswith(LOST)
    # ours alone is wrong; what had no time is another word
    assert "WRONG: 1\n" in said and "ours-raises: RuntimeError: no kernel image" in said
    assert "NO TIME: 2\n" in said and "stage targets: unfinished" in said
    assert "1 cases were left out" in said and "\ntarget " in said
    assert "not done: targets, tune; --resume goes on" in said

    (tmp_path / "time").touch()
    assert session.run(build_parser().parse_args([*words, "--resume"]), True, STAGES) == 1
    said = capsys.readouterr().out
    assert "== smoke" not in said and "== targets: done" in said
    assert (tmp_path / "tried").read_text().split() == ["raises", "hangs", "loses"]
    again = {(r.shape[0], r.provider): r for r in read_rows(out) if r.op == "layer_norm"}
    assert again.items() >= rows.items()  # what was measured is not measured again
    assert again["d", "ours"].status == OK and again["d", "ours"].speedup == 1.0
