"""The goals: which rows decide them, what is said of them, and that what they need is measured."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from bench_stand_ins import bench

from bench import plan, report
from bench.models import EAGER_GRAPH
from bench.ops import SEARCH
from bench.plan import CLAIMS, verdict
from bench.rows import ERROR, FAILED, Row

BY_NAME = {claim.name: claim for claim in CLAIMS}
FORWARD = BY_NAME["attention fwd, T = 197, 257"]


def attention(provider, T, ms, **fields):
    shape = f"sweep-T-B1-T{T}-C768-H12"
    return Row("attention", provider, shape, "bf16", "fwd", T=T, ms=ms, **fields)


def test_the_worst_case_decides_against_the_fastest_peer():
    rows = [
        attention("ours", 197, 1.0),
        attention("sdpa-flash", 197, 2.0),
        attention("ours", 257, 1.0),
        attention("sdpa-flash", 257, 1.9),
        attention("sdpa-cudnn-unpacked", 257, 1.2),  # both layouts are peers
        attention("eager", 257, 0.1),
        attention("ours", 577, 9.0),
        attention("sdpa-flash", 577, 1.0),
    ]
    found = verdict(FORWARD, rows)
    assert (found.shape, found.ratio) == ("sweep-T-B1-T257-C768-H12", 1.2)
    assert found.word == "MISSED" and found.peer.provider == "sdpa-cudnn-unpacked"
    assert verdict(FORWARD, [r for r in rows if r.provider != "sdpa-cudnn-unpacked"]).word == "met"


def test_goals_are_for_the_gpus_that_they_name():
    """Elsewhere the ratio stands alone: nothing is met or missed."""
    rows = [attention("ours", 197, 1.0), attention("sdpa-flash", 197, 1.1)]
    for gpu, word in (("NVIDIA H100 80GB HBM3", "MISSED"), ("NVIDIA GeForce RTX 4090", "no goal")):
        here = [replace(r, gpu=gpu) for r in rows]
        found = verdict(FORWARD, here)
        assert (found.word, found.ratio) == (word, pytest.approx(1.1))
        assert word in str(plan.claim_lines(here)) and ("1.10" in str(plan.claim_lines(here)))
        decided = report.docs([("run", here)]).partition("### Targets")[2]
        assert ("1.10" in decided) == (word == "MISSED")


def test_the_fastest_of_ours_counts_and_like_is_held_against_like():
    ours = attention("ours", 197, 3.0, graph_ms=1.0)
    split = attention("ours-split", 197, 2.0, graph_ms=1.5)
    peer = attention("sdpa-flash", 197, 3.0, graph_ms=1.4)
    assert verdict(FORWARD, [ours, split, peer]).ratio == pytest.approx(1.4)
    eager = replace(peer, graph_ms=None)  # that could not be captured: both with the host
    assert verdict(FORWARD, [ours, split, eager]).ratio == pytest.approx(1.0)


def test_a_peer_that_breaks_the_2x_rule_counts_and_ours_does_not():
    ours = attention("ours", 197, 1.0)
    rows = [ours, attention("sdpa-flash", 197, 1.1, status=FAILED)]
    assert verdict(FORWARD, rows).ratio == pytest.approx(1.1)
    lines = {line[0]: line for line in plan.claim_lines(rows)}
    assert lines["attention fwd, T = 197, 257 (T197)"][3] == "1.1 ms sdpa-flash*"
    wrong = [replace(ours, status=FAILED, note="2x rule"), rows[1]]
    found = verdict(FORWARD, wrong)
    assert found.ratio is None and found.word == "FAILED: 2x rule"
    good = [attention("ours", 257, 1.0), attention("sdpa-flash", 257, 5.0)]
    assert verdict(FORWARD, [*wrong, *good]).word == "FAILED: 2x rule"  # the good do not hide it


def test_rows_of_another_dtype_or_mode_decide_nothing():
    rows = [attention("ours", 197, 1.0), attention("sdpa-flash", 197, 2.0)]
    for fields in ({"dtype": "fp16"}, {"mode": "bwd"}, {"op": "rope"}):
        others = [replace(row, **fields) for row in (replace(rows[0], ms=0.1), rows[1])]
        assert not any(FORWARD.has(row) for row in others)
        assert verdict(FORWARD, [*others, *rows]).ratio == 2.0


def test_shares_of_the_roofs():
    def row(op, mode, **fields):
        return Row(op, "ours", "ViT-B-B128-T197-C768-H12", "bf16", mode, ms=1.0, **fields)

    copy = Row("roof", "eager", "", "uint8", "copy", ms=1.0, gbps=4000.0)
    norm = row("layer_norm", "fwd", gbps=3500.0)
    found = verdict(BY_NAME["layer_norm fwd"], [copy, norm])
    assert found.ratio == 0.875 and found.met
    assert verdict(BY_NAME["layer_norm fwd"], [norm]).word == "no roof measured"
    burst = Row("roof", "eager", "", "bf16", "matmul", ms=1.0, tflops=800.0)
    settled = replace(burst, mode="matmul, sustained", tflops=600.0)
    step = Row("vit", "swapped", plan.VIT_B, "amp", "train", ms=1.0, tflops=420.0)
    found = verdict(BY_NAME["ViT-B step, matmul roof"], [burst, settled, step])
    assert found.ratio == pytest.approx(0.7) and found.met


def test_memory_is_met_from_below():
    def row(provider, mib, shape=plan.VIT_B):
        return Row("vit", provider, shape, "amp", "train", ms=1.0, peak_mib=mib)

    claim = BY_NAME["peak memory"]
    assert verdict(claim, [row("eager", 100.0), row("swapped", 79.0)]).word == "met"
    assert verdict(claim, [row("eager", 100.0), row("swapped", 81.0)]).word == "MISSED"
    several = replace(claim, shapes=(plan.VIT_B, "B8"))  # the case furthest from it decides
    rows = [row("eager", 100.0), row("swapped", 79.0)]
    rows += [row("eager", 100.0, "ViT-S-B8"), row("swapped", 95.0, "ViT-S-B8")]
    assert verdict(several, rows).ratio == pytest.approx(0.95)
    # another way of ours does not stand in for it, nor one without a figure
    assert verdict(claim, [row("eager", 100.0), row("swapped+graph", 1.0)]).ratio is None
    assert verdict(claim, [row("eager", None), row("swapped", 79.0)]).word == "no peer measured"


def test_without_rows_each_line_says_why():
    lines = plan.claim_lines([])
    assert len(lines) == len(CLAIMS) <= 24
    assert {line[-1] for line in lines} >= {"not measured"}
    error = Row("vit", "swapped", plan.VIT_B, "amp", "train", status=ERROR, note="no kernel")
    assert verdict(BY_NAME["peak memory"], [error]).word == "error: no kernel"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_what_a_claim_compares_is_measured(claim):
    found: dict[str, set[str]] = {}  # providers of the tasks' keys that belong to it, by shape
    for task in plan.targets():
        for op, provider, shape, dtype, mode in task.keys:
            if claim.has(Row(op, provider, shape, dtype, mode)):
                found.setdefault(shape, set()).add(provider)
    assert len(found) == len(claim.shapes)
    for providers in found.values():
        assert any(plan._is(p, claim.ours) for p in providers)
        assert not claim.peers or any(plan._is(p, claim.peers) for p in providers)


@pytest.fixture
def ran(monkeypatch):
    """What a task measures: (case, names), in the order of the tasks."""
    seen = []
    monkeypatch.setattr(
        plan.models, "measure_vit", lambda case, names, _: seen.append((case, names))
    )
    monkeypatch.setattr(plan, "measure_op", lambda op, *given: seen.append((op, given[3])))
    return seen


def test_what_is_compared_is_in_the_same_task(ran):
    found = plan.targets()
    for task in found:
        assert task.renews
        task.run(list(dict.fromkeys(key[1] for key in task.keys)), bench())
    for task, (_, names) in zip(found, ran, strict=True):
        if "max-autotune" in task.title.split() and "ViT-B-224" not in task.title:
            assert {"eager", "ours", "compile", SEARCH} <= set(names)
            assert {key[1] for key in task.keys} == {SEARCH}
    keys = [key for task in found for key in task.keys]
    assert len(set(keys)) == len(keys)
    (part,) = plan.targets(["patch_embed"])
    assert part.title.startswith("patch_embed")


def test_a_models_ratio_is_of_the_same_turns(ran):
    """A later task that measures ours again must measure what it is held against, too."""
    for task in plan.targets():
        if task.keys[0][0] == "vit":
            task.run([key[1] for key in task.keys], bench())
    for claim in (c for c in CLAIMS if c.op == "vit" and c.kind == "time"):
        turns = [
            ("eager", EAGER_GRAPH, *names)
            for case, names in ran
            if claim.has(Row("vit", "", case.id, case.dtype, case.mode))
        ]
        for name in {name for names in turns for name in names if plan._is(name, claim.ours)}:
            last = [names for names in turns if name in names][-1]
            assert any(plan._is(p, claim.peers) for p in last), (claim.name, name)


def test_a_models_task_measures_what_is_beside_it_again(ran):
    (task,) = (t for t in plan.targets() if t.title.endswith(" swapped-low"))
    task.run(["swapped-low"], bench())
    assert [names for _, names in ran] == [("swapped-low", "swapped")]


def test_what_tells_most_comes_first_and_a_hang_costs_little():
    """A hang in the first task took all the time of a run."""
    found = [task.title for task in plan.targets()]
    assert [re.findall(r"T\d+", title)[0] for title in found[:2]] == ["T577", "T1025"]
    if any("ViT-L" in title for title in found):
        assert any("drop0.4" in title for title in found[:7])
    searches = ["max-autotune" in title for title in found]
    assert searches == sorted(searches)  # the searches last
    assert all(task.seconds <= 60 for task in plan.targets() if "max-autotune" not in task.title)


def test_a_graph_of_ours_is_no_match_for_an_eager_step():
    def step(provider, ms):
        return Row("vit", provider, plan.VIT_B, "amp", "train", ms=ms)

    rows = [step("eager", 4.0), step("swapped", 3.0), step("swapped+graph", 2.0)]
    assert verdict(BY_NAME["ViT-B step, eager"], rows).ratio == pytest.approx(4 / 3)
    assert verdict(BY_NAME["ViT-B step, graphs"], rows).word == "no peer measured"
    assert verdict(BY_NAME["ViT-B step, graphs"], [*rows, step(EAGER_GRAPH, 3.0)]).ratio == 1.5


def test_pages_show_the_goals_once_and_results_if_there_are_some(tmp_path):
    (tmp_path / "a-gpu").mkdir()
    (tmp_path / "a-gpu" / "attention.png").write_bytes(b"")
    about = {"gpu": "NO SUCH H200"}
    rows = [attention("ours", 197, 1.0, **about), attention("sdpa-flash", 197, 2.0, **about)]
    empty = report.docs([], tmp_path)
    assert empty.count("patch_embed fwd | 2x | - |") == 1 and "NO SUCH H200" not in empty
    page = report.docs([("a-gpu", rows)], tmp_path)
    goals, of_gpu = page.index("### Targets"), page.index("### a-gpu")
    beside = "| attention fwd, T = 197 | 1 ms ours | sdpa-flash 2 (2.00x) | sdpa-cudnn, "
    assert beside in page[:goals] and "| 2.00 |  | met |" in page[goals:of_gpu]
    assert "](../bench/results/a-gpu/attention.png)" in page[of_gpu:]
    assert "| 2 sdpa-flash | 1 ours |" in page[of_gpu:]


def test_pages_have_no_figure_of_what_ran_on_no_gpu():
    eager = Row("vit", "eager", plan.VIT_B, "amp", "train", ms=2.0, gpu="H200", peak_mib=2048.0)
    rows = [eager, replace(eager, provider="swapped", ms=1.0)]
    assert "### a-gpu" in report.docs([("a-gpu", rows)]) and report.readme([("a-gpu", rows)])
    rows = [replace(row, gpu="no GPU, x86 CPU") for row in rows]
    assert report.docs([("a-cpu", rows)]) == report.docs([])
    assert report.readme([("a-cpu", rows)]) == report.readme([]) == ""
