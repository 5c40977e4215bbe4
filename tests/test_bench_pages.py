"""Pictures, comparison and pages from rows that mean nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench import report
from bench.__main__ import main
from bench.rows import ERROR, FAILED, Row, as_csv, read_rows


def test_plots_are_drawn_from_the_csv(tmp_path, capsys):
    found = read_rows(report.COMMITTED / "h100-80gb-hbm3")
    (tmp_path / "results.csv").write_text(as_csv(found))
    assert main(["plot", str(tmp_path)]) == 0
    names = {"attention.png", "vit.png"}
    assert {p.name for p in tmp_path.glob("*.png")} == names
    assert all((tmp_path / name).stat().st_size > 20_000 for name in names)
    assert len(list(tmp_path.iterdir())) == 4
    summary = (tmp_path / "summary.md").read_text()
    assert "NVIDIA H100" in summary
    assert "drawn" in capsys.readouterr().out


def test_failed_competitors_are_drawn_hollow(tmp_path):
    """A picture without them would say that nobody else had tried."""
    axes = pytest.importorskip("matplotlib.figure").Figure().subplots()
    eager = Row("vit", "eager", "ViT", "amp", "train", ms=1.0)
    steps = report._steps([eager, replace(eager, provider="compile", status=FAILED)])
    report._bars(axes, steps, *report.PANELS[0])
    assert [bar.get_facecolor()[3] for bar in axes.patches] == [1.0, 0.0]


def test_bars_are_of_the_models_that_most_have_measured():
    step = Row("vit", "eager", "", "amp", "train", ms=1.0)
    rows = [replace(step, shape=f"{i}") for i in range(report.MOST_CASES + 2)]
    rows += [replace(rows[-1], provider="compile-max-autotune")]
    kept = report._most_compared(rows)
    assert kept == [*rows[: report.MOST_CASES - 1], *rows[-2:]]


# --- words


def test_what_is_wrong_or_was_not_measured_is_said():
    row = Row("mlp", "ours", "a", "bf16", "both", ms=4.0, graph_ms=3.0)
    wrong = replace(row, provider="ours-wrong", graph_ms=0.1, status=FAILED, speedup=9.0)
    case, told = "mlp a bf16 both", "FAILED: ours-wrong"
    assert report.case_lines([row, wrong]) == [[case, "", "", "3 ours", "", "", "", told]]
    assert report.case_lines([wrong]) == [[case, *[""] * 6, told]]  # no speed-up of what is wrong
    assert not report.case_lines([replace(row, ms=None, graph_ms=None, status=ERROR)])
    roof = Row("roof", "eager", "1 element", "fp32", "graph replay", status=ERROR, note="no graph")
    line = "| roof | 1 element | fp32 | graph replay | eager | error: no graph |"
    assert line in report.tables([roof])


# --- pictures


@pytest.fixture
def drawn(monkeypatch):
    """The figures instead of files."""
    pytest.importorskip("matplotlib")
    found = []
    monkeypatch.setattr(report, "_save", lambda figure, path: found.append(figure) or path)
    return found


def heights(axes):
    return sorted(round(bar.get_height(), 6) for bar in axes.patches)


def test_the_picture_of_models_is_in_its_units(drawn, tmp_path):
    row = Row("vit", "eager", "a", "amp", "train", ms=2.0, peak_mib=2048.0, kept_mib=1024.0)
    rows = [row, replace(row, mode="infer", peak_mib=9.0)]
    report.draw_vit(rows, tmp_path)
    labels = [(axes.get_ylabel(), heights(axes)) for axes in drawn[0].axes]
    assert all(line.get_visible() for axes in drawn[0].axes for line in axes.get_ygridlines())
    assert labels == [("eager's time / this one's", [1.0, 1.0]), ("GiB", [2.0]), ("GiB", [1.0])]


def test_what_was_not_measured_has_no_figure(drawn, tmp_path):
    row = Row("vit", "eager", "a", "amp", "train", ms=2.0)
    rows = [row, replace(row, provider="compile", ms=1.0), replace(row, shape="b")]
    report.draw_vit(rows, tmp_path)
    (axes,) = drawn[0].axes
    assert sorted(text.get_text() for text in axes.texts) == ["", "1.00", "1.00", "2.00"]


def test_attention_is_drawn_over_the_best_sdpa(drawn, tmp_path):
    """One line a head dim; like with like; what broke the 2x rule is a peer, and is not ours."""

    def row(provider, T, ms, C=768, **fields):
        shape = f"sweep-B1-T{T}-C{C}-H12"
        return Row("attention", provider, shape, "bf16", "fwd", T=T, ms=ms, **fields)

    rows = [
        row("ours", 197, 2.0, graph_ms=1.0),
        row("ours-split", 197, 1.0, status=FAILED),
        row("sdpa-flash", 197, 9.0, graph_ms=1.5, status=FAILED),
        row("sdpa-math", 197, 0.1),
        row("sdpa-cudnn-unpacked", 197, 3.0, graph_ms=2.0),
        row("eager", 197, 0.1),
        row("ours", 577, 1.0),
        row("sdpa-flash", 577, 0.6),
        row("sdpa-cudnn-unpacked", 577, 0.5),
        row("ours", 197, 1.0, C=384),
        row("sdpa-flash", 197, 3.0, C=384),
        row("ours", 50, 1.0),
    ]
    assert report.over_best_sdpa(rows, "fwd") == {64: {197: 1.5, 577: 0.5}, 32: {197: 3.0}}
    report.draw_attention(rows, tmp_path)
    forward, backward = drawn[0].axes
    ours = ["ours, head dim 32", "ours, head dim 64"]
    assert [line.get_label() for line in forward.get_lines()[:2]] == ours
    assert list(forward.get_lines()[1].get_ydata()) == [1.5, 0.5]
    assert len(backward.get_lines()) == 1 and forward.get_ylim()[1] > 3.0  # all is inside
    (legend,) = drawn[0].legends  # one for both
    assert [text.get_text() for text in legend.get_texts()] == [*ours, "best SDPA backend"]
    assert drawn[0].get_figwidth() * report.DPI <= 1000


def test_the_committed_page_is_the_generated_one(tmp_path):
    """Of a real run: the fastest of each side, graph against graph, memory, roofs."""
    for page in (report.DOCS, report.README):
        before, rest = page.read_text(encoding="utf-8").split(report.START)
        after = rest.partition(report.END)[2]
        outdated = f"{before}{report.START}\nOUTDATED\n{report.END}{after}"
        (tmp_path / page.name).write_text(outdated, encoding="utf-8")
    report.write_docs(tmp_path / report.DOCS.name, front=tmp_path / report.README.name)
    for page in (report.DOCS, report.README):
        assert (tmp_path / page.name).read_text() == page.read_text(encoding="utf-8")
