"""Pictures, comparison and pages from rows that mean nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import bench_stand_ins  # noqa: F401, finds bench
import pytest

from bench import bench_profile, bench_vit, compare, harness, plot, report, roofs
from bench.__main__ import main
from bench.models import WAYS, Case
from bench.plan import op_of
from bench.rows import (
    ERROR,
    FAILED,
    Results,
    Row,
    as_line,
)
from bench.timer import Roofs


def synthetic(factor: float = 1.0) -> list[Row]:
    """Rows of every kind, with times that mean nothing."""
    about = dict(gpu="NO SUCH GPU", driver="0", torch="0", triton="0", commit="none")
    rows = [
        Row("roof", "eager", "1024 MiB", "uint8", "copy", ms=1, gbps=1000.0, **about),
        Row("roof", "eager", "8192", "bf16", "matmul", ms=1, tflops=100.0, **about),
    ]
    for name in ("layer_norm", "linear", "attention", "mlp", "patch_embed"):
        op = op_of(name)
        for shape in op.shapes():
            if shape.C != 768:
                continue
            for i, provider in enumerate(op.providers(shape, "bf16")):
                for mode in ("fwd", "bwd", "both"):
                    ms = factor * (1 + 0.1 * i) * (1 + shape.T / 4000)
                    row = harness.row_of(name, provider.name, shape, "bf16", mode)
                    row = replace(
                        row, ms=ms, ms_p20=0.98 * ms, ms_p80=1.02 * ms, speedup=1 / (1 + 0.1 * i),
                        **about,
                    )  # fmt: skip
                    rows.append(harness._rates(row, op, shape, roofs.roofs_of(rows[:2])))
    for j, model in enumerate("SBL"):
        case = Case("timm", model, 224, 128)
        for i, provider in enumerate(WAYS):
            row = bench_vit.row_of(case, provider)
            rows.append(
                replace(row, ms=100.0, images_per_s=1e3 / (1 + i + j), peak_mib=9e3 + i, **about)
            )
    case = Case("timm", "B", 224, 128)
    for i, provider in enumerate(("eager", "swapped", "compile", "swapped+compile")):
        for mode in ("cold", "warm"):
            row = bench_vit.row_of(case, provider, "first_step", mode)
            rows.append(replace(row, ms=1e3 * (i + 2), **about))
    for provider in ("eager", "swapped"):
        rows.append(replace(bench_vit.row_of(case, provider, "max_batch"), batch=512, **about))
        for i, stage in enumerate(bench_profile.STAGES):
            row = bench_vit.row_of(case, provider, "profile", stage)
            rows.append(replace(row, ms=float(i + 1), **about))
    return rows


def test_plots_are_drawn_from_the_csv(tmp_path, capsys):
    results = Results(tmp_path, False)
    for row in synthetic():
        results.rows[row.key] = row
        results._write(as_line(row))
    results.close()
    assert main(["plot", str(tmp_path)]) == 0
    names = {"targets.png", "ops.png", "vit.png", "roofline.png", "profile.png"}
    assert {p.name for p in tmp_path.glob("*.png")} == names
    assert all((tmp_path / name).stat().st_size > 20_000 for name in names)
    assert len(list(tmp_path.iterdir())) == 7
    summary = (tmp_path / "summary.md").read_text()
    assert "NO SUCH GPU" in summary and "not yet measured" in summary  # host cost has no row
    assert "drawn" in capsys.readouterr().out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", ["ops.png", "page.md", "README.md"])
def test_a_full_disk_leaves_what_was_there(name, tmp_path):
    figure, old = pytest.importorskip("matplotlib.figure").Figure(), report.README.read_text()
    path = tmp_path / name
    path.write_text(old)
    path.with_name(f".{name}.tmp").symlink_to("/dev/full")
    (tmp_path / "README.md").write_text(old)

    def write():
        plot._save(figure, tmp_path / "ops.png")
        report.write_docs(tmp_path / "page.md", front=tmp_path / "README.md")

    with pytest.raises(OSError, match=f"{name} cannot be written: No space left"):
        write()
    assert path.read_text() == old


def test_failed_competitors_are_drawn_hollow(tmp_path):
    """A picture without them would say that nobody else had tried."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ops, bars = figure.subplots(1, 2)
    row = Row("mlp", "liger_kernel", "a", "bf16", "both", T=50, ms=1.0, tflops=3.0)
    plot._curve(ops, [row, replace(row, T=197, status=FAILED)], lambda r: r.tflops)
    hollow, whole = ops.get_lines()
    assert hollow.get_markerfacecolor() == "none" and list(hollow.get_xdata()) == [197]
    assert hollow.get_label() == "liger_kernel, FAILED" and list(whole.get_xdata()) == [50]
    plot._bars(bars, {"ViT": {"eager": 1.0, "compile": 2.0}}, "", "", "%f", {("ViT", "compile")})
    assert [bar.get_facecolor()[3] for bar in bars.patches] == [1.0, 0.0]
    assert not plot._measured([replace(row, status=ERROR)])


def test_a_panel_has_rows_of_one_variant():
    """Or their points would lie over each other: all variants have the same T."""
    rows = [
        Row("rope", "ours", f"ViT-B-B1-T{T}-C768-H12{variant}", "bf16", mode, T=T, ms=1.0)
        for mode in ("fwd", "bwd")
        for T in (201, 261)
        for variant in ("", "-interleaved", "-layer_norm")
    ]
    panels = plot._op_panels(rows)
    assert [title for title, _ in panels] == [
        f"rope {variant}{mode} bf16"
        for variant in ("", "interleaved ", "layer_norm ")
        for mode in ("fwd", "bwd")
    ]
    assert all(len({r.T for r in part}) == len(part) == 2 for _, part in panels)


def test_bars_are_of_the_models_that_most_have_measured():
    step = Row("vit", "eager", "", "amp", "train", ms=1.0)
    rows = [replace(step, shape=f"{i}") for i in range(plot.MOST_CASES + 2)]
    rows += [replace(rows[-1], provider="compile-max-autotune")]
    kept = plot._most_compared(rows, lambda r: r.shape)
    assert kept == [*rows[: plot.MOST_CASES - 1], *rows[-2:]]


def test_no_rows_no_pictures(tmp_path):
    assert plot.draw_all([], Roofs(0.0, {}), tmp_path) == []


def test_compare_puts_regressions_first(tmp_path, capsys):
    a = [r for r in synthetic() if r.op == "mlp"][:4]
    b = [replace(r, ms=2 * r.ms, ms_p20=1.9 * r.ms, ms_p80=2.1 * r.ms) for r in a[:1]]
    b += [replace(r, ms=0.9 * r.ms) for r in a[1:]]
    found = compare.ratios(a, list(reversed(b)))
    assert found[0].ratio == 2.0 and found[0].is_regression(0.05)
    assert found[0].low == pytest.approx(1.9 / 1.02)
    noisy = replace(a[0], ms=1.1 * a[0].ms, ms_p20=0.9 * a[0].ms)
    assert not compare.ratios(a[:1], [noisy])[0].is_regression(0.05)
    for name, rows in (("a", a), ("b", b)):
        results = Results(tmp_path / name, False)
        for row in rows:
            results.append(row)
        results.close()
    words = ["compare", str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(words) == 1
    assert main([*words, "--threshold", "1.5"]) == 0
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "none")]) == 2
    assert "slower" in capsys.readouterr().out


def test_the_page_says_what_is_not_measured_and_keeps_the_log():
    page = report.docs([], "")
    assert page.count("not yet measured") > 8 and report.COMMAND in page
    log = "\nby hand\n"
    former = f"x{report.LOG_START}{log}{report.LOG_END}"
    page = report.docs([("a GPU", synthetic())], former)
    assert log in page and "## a GPU" in page and "NO SUCH GPU" in page


def test_the_committed_page_is_the_generated_one(tmp_path):
    for page in (report.DOCS, report.README):
        (tmp_path / page.name).write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    report.write_docs(tmp_path / report.DOCS.name, front=tmp_path / report.README.name)
    for page in (report.DOCS, report.README):
        assert (tmp_path / page.name).read_text() == page.read_text(encoding="utf-8")
