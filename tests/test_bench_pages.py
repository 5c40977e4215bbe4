"""The picture, tables and pages from rows that mean nothing."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd
import pytest

from bench import report
from bench.__main__ import main
from bench.rows import ERROR, FAILED, NAN, Row, as_csv, read_rows


def frame(*rows):
    return pd.DataFrame(list(rows))


def test_the_picture_is_drawn_from_the_csv(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    found = read_rows(report.COMMITTED / "h100-80gb-hbm3")
    (tmp_path / "results.csv").write_text(as_csv(found))
    assert main(["plot", str(tmp_path)]) == 0
    assert (tmp_path / "attention.png").stat().st_size > 20_000
    assert len(list(tmp_path.iterdir())) == 3
    assert "NVIDIA H100" in (tmp_path / "summary.md").read_text()
    assert "drawn" in capsys.readouterr().out


def test_what_is_wrong_or_was_not_measured_is_said():
    row = Row("mlp", "ours", "a", "bf16", "bwd", ms=4.0, graph_ms=3.0)
    wrong = replace(row, provider="ours-wrong", ms=NAN, status=FAILED)
    error = replace(row, provider="sdpa", ms=NAN, status=ERROR, note="no kernel")
    case = "mlp a bf16 bwd"
    for rows, ours in ((frame(row, wrong, error), "ours 3"), (frame(wrong), "")):
        assert [[case, "", ours, "", "", "", "ours-wrong"]] == report.op_table(rows).values.tolist()


def test_peers_stand_next_to_ours_with_their_speed_over_eager():
    eager = Row("rope", "eager", "a", "bf16", "fwd", ms=4.0, speedup=1.0)
    ours = replace(eager, provider="ours", ms=1.0, speedup=4.0, roof="copy", roof_share=0.5)
    peer = replace(eager, provider="compile", ms=2.0, speedup=2.0)
    found = report.op_table(frame(eager, replace(ours, provider="ours-b", ms=9.0), peer, ours))
    (line,) = found.values.tolist()
    assert line[1:4] == ["4", "ours 1 (4.00x)", "50% copy"] and line[5] == "compile 2 (2.00x)"


def test_every_way_of_a_model_has_a_line():
    step = Row("vit", "eager", "ViT", "amp", "train", ms=2.0, speedup=1.0, peak_mib=2048.0)
    wrong = replace(step, provider="compile", ms=NAN, status=FAILED, note="2x rule")
    table = report.model_table(frame(step, replace(step, provider="swapped", ms=1.0), wrong))
    assert table.way.tolist() == ["eager", "swapped", "compile"]
    assert table.ms.tolist() == ["2", "1", ""] and table["peak MiB"].tolist()[0] == "2,048"
    assert table.FAILED.tolist() == ["", "", "2x rule"]


def test_attention_is_drawn_over_the_best_peer():
    """One line a head dim; what is wrong is nobody's best."""

    def row(provider, T, speedup, C=768, **fields):
        shape = f"sweep-B1-T{T}-C{C}-H12"
        fields = {"ms": 1.0, **fields}
        return Row("attention", provider, shape, "bf16", "fwd", T=T, speedup=speedup, **fields)

    found = report.over_best_peer(
        frame(
            row("ours", 197, 3.0),
            row("ours-split", 197, 9.0, status=FAILED),
            row("sdpa-flash", 197, 1.0),
            row("flex", 197, 2.0),
            row("eager", 197, 9.0),
            row("ours", 577, 0.5),
            row("sdpa-cudnn-unpacked", 577, 1.0),
            row("ours", 197, 3.0, C=384),
            row("sdpa-flash", 197, 1.0, C=384),
            row("ours", 50, 1.0),
        )
    )
    points = {(line["D"], line["T"]): line["ratio"] for _, line in found.iterrows()}
    assert points == {(64, 197): 1.5, (64, 577): 0.5, (32, 197): 3.0}


def test_pages_have_no_figure_of_what_ran_on_no_gpu(tmp_path):
    step = Row("vit", "eager", "timm-ViT-B-224-B256", "amp", "train", ms=2.0, peak_mib=2048.0)
    rows = [step, replace(step, provider="swapped", images_per_s=2500.0)]
    (tmp_path / "a").mkdir()
    docs, front = tmp_path / "docs.md", tmp_path / "front.md"
    for gpu, shown in (("H200", True), ("no GPU, x86 CPU", False)):
        (tmp_path / "a" / "results.csv").write_text(as_csv(replace(r, gpu=gpu) for r in rows))
        for page in (docs, front):
            page.write_text(f"{report.START}{report.END}")
        report.write_docs(docs, tmp_path, front)
        assert ("### a" in docs.read_text()) == ("| 2,500 | 2.0 |" in front.read_text()) == shown


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
