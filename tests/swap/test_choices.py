"""swap_in(measure=): what is faster here stays, by the times of a clock that the tests hold."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from stand_in_gpu import Gpu as StandIn
from torch import nn

from fastvit_kernels import backend, swap_in, swap_out
from fastvit_kernels.measure import turns
from fastvit_kernels.measure.timer import DeviceLost
from fastvit_kernels.ops.attention import configs as of_attention
from fastvit_kernels.ops.common.gemm_configs import FWD_TABLE
from fastvit_kernels.runtime import configs
from fastvit_kernels.runtime.backend import GPUS, Gpu
from fastvit_kernels.swap import choices, copies
from fastvit_kernels.swap.hosts.fused import Fused
from tests.model_coverage.model_zoo import timm_small

HERE = Gpu("cpu", 2, 2**20, "Stand-in GPU 1")
PRODUCT = 64, 48, 48, "fp32"  # a key of a table of products; the library makes it by default
HEADS = "bf16", 64, 256, "none", "many"  # a key of attention, which a kernel of ours computes
LEVELS = ("patch_embed", "block", "attention", "mlp", "layer_norm")


class Clock:
    """Runs what is timed once, and says what a table says: ms of a host's, ms of a level fused; of
    memory="low" and of the products' route where it has a time for them."""

    def __init__(self, **fused):
        self.fused, self.seen, self.raises = fused, [], {}

    def sample(self, run, count, flush):
        module = run.args[0]
        level = module.fused_level if isinstance(module, Fused) else "host"
        if level == "block":
            route = FWD_TABLE.choose(HERE, *PRODUCT).route
            ways = f"{module.fused_memory} {route}", module.fused_memory, route
            level = next((n for n in ways if n in self.fused), level)
        self.seen.append(module)
        if level in self.raises:
            raise self.raises[level]
        run()
        return [self.fused.get(level, 1.0)] * count

    def clear(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(choices, "timer_of", lambda device: made)
    monkeypatch.setattr(choices, "time", SimpleNamespace(monotonic=lambda: 0.0))
    with backend("torch"):
        yield made


def vit(**settings):
    torch.manual_seed(0)
    return timm_small("vit_base_patch16_224", drop_path_rate=0.2, **settings)


def kept(report):
    return {row.level: row.keeps for row in report.choices.rows}


def test_what_is_faster_stays_and_a_tie_is_the_hosts(clock):
    for ms, stays in ((0.5, "fused"), (1.0, "host"), (0.99, "host"), (2.0, "host")):
        clock.fused = {"block": ms, "patch_embed": 0.1}
        model, images = vit()
        report = swap_in(model, measure=images)
        assert kept(report)["block"] == stays and kept(report)["patch_embed"] == "fused"
        assert isinstance(model.blocks[0], Fused) == (stays == "fused")
        assert isinstance(model.patch_embed.proj, Fused)
        assert f"block Block: host 1 ms, fused {ms:g}; kept {stays}" in str(report)


def test_a_part_of_a_slow_block_may_be_fused(clock):
    clock.fused = {"block": 2.0, "attention": 0.5, "mlp": 3.0}
    model, images = vit()
    report = swap_in(model, measure=images)
    assert kept(report) == dict.fromkeys(LEVELS, "host") | {"attention": "fused"}
    block = model.blocks[0]
    assert [isinstance(m, Fused) for m in (block, block.attn, block.mlp)] == [False, True, False]
    reasons = {row.name: row.reason for row in report.left}
    assert reasons["blocks.1"] == "kept as it is: host 1 ms, fused 2"
    assert model(images).isfinite().all()


def test_a_kind_is_measured_once_and_its_parts_not_at_all(clock):
    clock.fused = {"block": 0.5}
    model, images = vit(depth=4)
    report = swap_in(model, measure=images)
    assert {row.level for row in report.choices.rows} == {"patch_embed", "block", "layer_norm"}
    assert len([m for m in set(clock.seen) if hasattr(m, "norm1")]) == 2  # of four blocks


def test_nothing_of_the_model_is_changed_by_measuring(clock):
    model, images = vit()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(lambda m, args, out: m.calls.add_(1) and None)
    called = []
    model.blocks[0].mlp.register_forward_hook(lambda *_: called.append(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    swap_in(model, measure=images)
    assert torch.equal(torch.rand(3), wanted) and len(called) == 1
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_call_is_kept_as_it_was_given():
    class Shifted(nn.LayerNorm):
        def forward(self, x):
            return super().forward(x.add_(1))

    model = nn.Sequential(Shifted(48))
    calls = choices.calls_of(model, {model[0]: "norm"}, torch.zeros(2, 5, 48))
    assert not calls[model[0]].args[0].any()


def test_the_mode_of_the_call_is_that_of_the_times(clock):
    model, images = vit()
    for said, prepare in (
        ("training, float32", model.train),
        ("eval, float32", model.eval),
    ):
        prepare()
        assert swap_in(model, measure=images).choices.rows[0].inputs.startswith(said)
    with torch.no_grad():
        rows = swap_in(model, measure=(images,)).choices.rows
    assert rows[0].inputs.startswith("eval without grad, ")
    with torch.autocast("cpu", torch.bfloat16):
        rows = swap_in(model, measure={"x": images}).choices.rows
    assert rows[0].inputs.startswith("eval, autocast bfloat16, float32 [")


def test_a_callable_computes_the_loss(clock):
    model, images = vit()

    def loss(given):
        assert given is model
        return given(images).square().mean()

    assert set(kept(swap_in(model, measure=loss))) == set(LEVELS)


def test_the_backward_is_timed_too(clock):
    model, images = vit()
    counted = []
    model.blocks[0].mlp.fc1.weight.register_hook(lambda grad: counted.append(grad))
    backwards = []
    clock.sample = lambda run, count, flush: backwards.append(_saw_backward(run)) or [1.0] * count
    swap_in(model, measure=images)
    assert backwards and all(backwards) and not counted  # a hook of the user's is no part of it


def _saw_backward(run):
    found = []
    grad = torch.autograd.grad
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", lambda *a, **k: found.append(1) or grad(*a, **k))
        run()
    return bool(found)


@pytest.mark.parametrize("error", [RuntimeError("no such batch"), KeyboardInterrupt()])
def test_what_raises_leaves_the_model_as_it_was(clock, error):
    model, images = vit()
    classes = [type(m) for m in model.modules()]

    def loss(given):
        given(images)
        raise error

    with pytest.raises(type(error)):
        swap_in(model, measure=loss)
    clock.raises["block"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        swap_in(model, measure=images)
    assert [type(m) for m in model.modules()] == classes
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_out_of_memory_is_a_line(clock):
    for level, stays in (("block", "host"), ("host", "fused")):
        clock.raises = {level: torch.OutOfMemoryError("too large")}
        model, images = vit()
        report = swap_in(model, measure=images)
        assert kept(report)["block"] == stays
        assert "OutOfMemoryError: too large; kept" in str(report)


def test_no_time_means_no_change(clock):
    model, images = vit()
    report = swap_in(model, measure=images, budget=1e-9)
    assert set(kept(report).values()) == {"host"} and report.level == "none"
    assert "no time was left for a turn" in str(report)


def test_choices_are_kept(clock, tmp_path):
    clock.fused = {"block": 2.0, "mlp": 0.5}
    model, images = vit()
    first = swap_in(model, measure=images)
    first.choices.save(tmp_path / "choices.json")
    clock.seen.clear()
    for options in ({}, {"measure": images}):
        again = vit()[0]
        report = swap_in(again, choices=tmp_path / "choices.json", **options)
        assert kept(report) == kept(first) and not clock.seen
        assert [isinstance(m, Fused) for m in again.modules()] == [
            isinstance(m, Fused) for m in model.modules()
        ]


@pytest.mark.parametrize("what", ["device", "torch", "triton", "fastvit_kernels"])
def test_choices_of_another_machine_do_not_count(clock, what):
    clock.fused = {"block": 2.0}
    model, images = vit()
    found = swap_in(model, measure=images).choices
    found.machine[what] = f"not {found.machine[what]}"
    again = vit()[0]
    report = swap_in(again, choices=found)
    assert kept(report)["block"] == "fused" and "not among the choices" in str(report)
    clock.seen.clear()
    assert kept(swap_in(vit()[0], choices=found, measure=images))["block"] == "host" and clock.seen


def test_another_size_is_another_kind(clock):
    clock.fused = {"block": 2.0}
    model, images = vit()
    found = swap_in(model, measure=images).choices
    clock.fused = {"block": 0.5}
    report = swap_in(vit()[0], measure=images[:1], choices=found)
    assert kept(report)["block"] == "fused"
    rows = found.rows + report.choices.rows  # of two sizes one is slower: without a batch, host
    for found.rows in (rows, rows[::-1]):
        assert kept(swap_in(vit()[0], choices=found))["block"] == "host"


def test_a_swapped_model_is_measured_too(clock):
    model, images = vit()
    swap_in(model, memory="low", drop_path="skip")
    clock.fused = {"block": 2.0, "attention": 0.5}
    assert kept(swap_in(model, measure=images))["block"] == "host"
    block = model.blocks[0]
    assert not isinstance(block, Fused) and isinstance(block.attn, Fused)
    assert "fused_memory" not in vars(block) and "fused_drop_path" not in vars(block)
    swap_out(model)
    assert not any(isinstance(m, Fused) for m in model.modules())


def test_what_is_left_out_keeps_what_an_earlier_call_made_of_it(clock):
    model, images = vit()
    swap_in(model, memory="low", drop_path="skip")
    clock.fused = {"block": 2.0}
    for options in ({"skip": "blocks.0"}, {"skip": "blocks.0", "measure": images}):
        swap_in(model, **options)
        first = model.blocks[0]
        assert isinstance(first, Fused)
        assert (first.fused_memory, first.fused_drop_path) == ("low", "skip")
    assert not isinstance(model.blocks[1], Fused)


def test_blocks_run_with_the_settings_that_they_will_have(clock):
    model, images = vit()
    swap_in(model, measure=images, memory="low", drop_path="skip")
    seen = [m for m in clock.seen if isinstance(m, Fused) and m.fused_level == "block"]
    assert seen and all((m.fused_memory, m.fused_drop_path) == ("low", "skip") for m in seen)


def test_what_the_batch_does_not_call_stays(clock):
    clock.fused = dict.fromkeys(LEVELS, 0.5)
    model, images = vit()
    model.aside = nn.LayerNorm(48)
    report = swap_in(model, measure=images)
    assert not isinstance(model.aside, Fused) and "it was not called; kept host" in str(report)


def test_all_processes_take_what_the_first_found(clock, monkeypatch):
    model, images = vit()
    other = choices.Choice("a", "block", "", "", "host", note="of rank 0")
    monkeypatch.setattr(choices.dist, "is_initialized", lambda: True)

    def broadcast(found):
        found[0] = choices.Choices({}, [other]), {"blocks.0": other}

    monkeypatch.setattr(choices.dist, "broadcast_object_list", broadcast)
    clock.fused = {"block": 0.5}
    assert "of rank 0" in str(swap_in(model, measure=images))
    assert [isinstance(block, Fused) for block in model.blocks] == [False, True]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"measure": [1]}, TypeError, "measure must be a tensor, a tuple, a dict, or a callable"),
        ({"budget": 0}, ValueError, "budget must be a number of seconds above 0, got 0"),
        ({"budget": "20"}, ValueError, "got '20'"),
        ({"choices": 3}, TypeError, "choices must be a path or Choices, got int"),
    ],
)
def test_bad_calls(options, error, message):
    model, _ = vit()
    with pytest.raises(error, match=message):
        swap_in(model, **options)
    assert not any(isinstance(m, Fused) for m in model.modules())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"machine": 3, "rows": []}',
        '{"machine": {}, "rows": [{"host": 1}]}',
        json.dumps(
            {
                "machine": {},
                "rows": [dict.fromkeys(("host", "level", "weights", "inputs", "keeps"), "x")],
            }
        ),
    ],
)
def test_a_file_that_holds_no_choices(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json holds no choices that were saved"):
        swap_in(nn.LayerNorm(8), choices=tmp_path / "x.json")


def test_a_cpu_is_timed_by_the_clock_of_the_system(monkeypatch):
    """Through the whole way, with all the time it takes; what wins here is not said."""
    monkeypatch.setattr(choices, "KIND_SECONDS", 1e6)
    monkeypatch.setattr(turns, "samples_in", lambda *_: 1)
    model, images = vit()
    with backend("torch"):
        report = swap_in(model, measure=images, budget=1e6)
    assert set(kept(report).values()) <= {"fused", "host"}
    assert all(row.ms.keys() == {"host", "fused"} for row in report.choices.rows)


def _never(graph, inputs):
    raise AssertionError("something was compiled")


def test_a_compiled_model_is_timed_as_what_it_compiles(clock):
    """Nothing is compiled meanwhile, and no replica runs what was compiled for another."""
    clock.fused = {"block": 0.5}
    model, images = vit()
    model.blocks[0].compile(backend=_never)
    compiled = torch.compile(model, backend=_never)
    report = swap_in(compiled, measure=images)
    assert kept(report)["block"] == "fused" and isinstance(model.blocks[0], Fused)
    seen = [m for m in clock.seen if hasattr(m, "norm1")]
    assert len(seen) >= 2 and all(getattr(m, copies.CALL, None) is None for m in seen)


def test_memory_is_chosen_too(clock, tmp_path):
    model, images = vit()
    with pytest.raises(ValueError, match="'auto' takes the faster: give measure= or choices="):
        swap_in(model, memory="auto")
    for low, stays in ((0.4, "fused low"), (0.495, "fused"), (0.7, "fused")):
        clock.fused = {"block": 0.5, "low": low}
        model = vit()[0]
        report = swap_in(model, measure=images, memory="auto")
        assert kept(report)["block"] == stays
        assert model.blocks[0].fused_memory == ("low" if "low" in stays else "default")
        assert f"host 1 ms, fused 0.5, fused low {low:g}; kept {stays}" in str(report)
        report.choices.save(tmp_path / "choices.json")
        again = vit()[0]
        swap_in(again, choices=tmp_path / "choices.json", memory="auto")
        assert again.blocks[1].fused_memory == model.blocks[1].fused_memory
    assert "fused low" not in str(swap_in(vit()[0], measure=images))
    with torch.no_grad():  # nothing is kept for a backward
        assert "fused low" not in str(swap_in(vit()[0], measure=images, memory="auto"))


@pytest.mark.parametrize("outputs", ["all", "gradient"])
def test_what_is_wrong_here_never_stays(clock, monkeypatch, outputs):
    """However fast: on this very batch, by the 2x rule."""
    made = choices.replica

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1.01 if outputs == "all" else x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy * 1.01

    def planted(module, classes, settings):
        found = made(module, classes, settings)
        if settings and hasattr(found, "norm1"):
            found.__dict__["forward"] = lambda x: Wrong.apply(type(found).forward(found, x))
        return found

    monkeypatch.setattr(choices, "replica", planted)
    clock.fused = {"block": 0.1}
    model, images = vit()
    report = swap_in(model, measure=images)
    assert kept(report)["block"] == "host" and not isinstance(model.blocks[0], Fused)
    assert "fused: 2x rule: " + ("out0" if outputs == "all" else "d") in str(report)
    row = next(row for row in report.choices.rows if row.level == "block")
    assert row.ms.keys() == {"host"}  # no time beside wrong numbers


@pytest.fixture
def named(clock, monkeypatch):
    """A GPU with a name, whose fused blocks make a product by a table."""
    step = choices.step

    def asking(module, *call, **options):
        if isinstance(module, Fused) and module.fused_level == "block":
            FWD_TABLE.choose(HERE, *PRODUCT)
        return step(module, *call, **options)

    monkeypatch.setattr(choices, "step", asking)
    monkeypatch.setattr(
        importlib.import_module("fastvit_kernels.runtime.backend"), "_gpu", lambda device: HERE
    )
    monkeypatch.setattr(configs, "_tuned", {HERE.name: {}})
    GPUS.clear()
    configs._forget()
    yield clock
    GPUS.clear()
    configs._forget()


def route():
    return FWD_TABLE.choose(HERE, *PRODUCT).route


def test_the_route_of_products_is_chosen_too(named, tmp_path):
    images = vit()[1]
    for ms, stays in ((0.4, "fused triton"), (0.495, "fused"), (0.7, "fused")):
        named.fused = {"block": 0.5, "triton": ms}
        configs.install(HERE, {})
        report = swap_in(vit()[0], measure=images)
        assert kept(report)["block"] == stays
        assert f"host 1 ms, fused 0.5, fused triton {ms:g}; kept {stays}" in str(report)
        assert route() == ("triton" if ms == 0.4 else "library")  # in the process, from now on
        report.choices.save(tmp_path / f"{ms}.json")
    swap_in(vit()[0], choices=tmp_path / "0.4.json")
    assert route() == "triton"
    named.fused = {"block": 0.5, "library": 0.4}  # the other way around
    report = swap_in(vit()[0], measure=images)
    assert kept(report)["block"] == "fused library" and route() == "library"


@pytest.fixture
def attending(named, monkeypatch):
    """The same, whose fused blocks attend too; with the routes of forward and backward."""
    step, sample = choices.step, named.sample

    def routes(mask="none"):
        key = *HEADS[:3], mask, HEADS[4]
        tables = of_attention.FWD_TABLE, of_attention.BWD_TABLE
        return {table.choose(HERE, *key).route for table in tables}

    def asking(module, *call, **options):
        if isinstance(module, Fused) and module.fused_level == "block":
            routes(named.mask)
        return step(module, *call, **options)

    def timed(run, count, flush):
        level = getattr(run.args[0], "fused_level", "")
        by = "library attention" if level == "block" and routes() == {"library"} else ""
        return [named.fused[by]] * count if by in named.fused else sample(run, count, flush)

    monkeypatch.setattr(choices, "step", asking)
    named.sample, named.mask = timed, "none"
    return routes


def test_the_route_of_attention_is_chosen_too(named, attending, tmp_path):
    """For itself: products keep theirs."""
    for ms, stays in ((0.4, "fused library attention"), (0.495, "fused")):
        named.fused = {"block": 0.5, "library attention": ms}
        configs.install(HERE, {})
        report = swap_in(vit()[0], measure=vit()[1])
        assert kept(report)["block"] == stays
        times = f"fused 0.5, fused triton 0.5, fused library attention {ms:g}"
        assert f"host 1 ms, {times}; kept {stays}" in str(report)
        assert attending() == {"library" if ms == 0.4 else "triton"} and route() == "library"
        report.choices.save(tmp_path / f"{ms}.json")
    swap_in(vit()[0], choices=tmp_path / "0.4.json")
    assert attending() == {"library"}
    named.fused = {"block": 0.5, "library attention": 0.7, "triton": 0.6}
    report = swap_in(vit()[0], measure=vit()[1])  # the other way around
    assert kept(report)["block"] == "fused triton attention" and attending() == {"triton"}


def test_attention_that_the_library_cannot_compute_is_tried_by_ours_alone(named, attending):
    named.fused, named.mask = {"block": 0.5, "library attention": 0.1}, "add"
    report = swap_in(vit()[0], measure=vit()[1])
    assert kept(report)["block"] == "fused"
    assert not any("attention" in way for row in report.choices.rows for way in row.ms)


def test_a_route_and_a_memory_are_tried_together(named):
    named.fused = {"block": 0.5, "low": 0.45, "triton": 0.45, "low triton": 0.3}
    model, images = vit()
    report = swap_in(model, measure=images, memory="auto")
    times = "fused 0.5, fused low 0.45, fused triton 0.45, fused low triton 0.3"
    assert f"host 1 ms, {times}; kept fused low triton" in str(report)
    assert model.blocks[0].fused_memory == "low" and route() == "triton"


def test_where_the_time_is_short_the_last_ways_have_none(named, monkeypatch):
    monkeypatch.setattr(choices, "KIND_SECONDS", 10e-3)  # five rounds of 1 + 0.5, not of 0.7 more
    named.fused = {"block": 0.5, "triton": 0.7}
    report = swap_in(vit()[0], measure=vit()[1])
    said = "host 1 ms, fused 0.5; fused triton: no time was left for a turn; kept fused"
    assert said in str(report)


def test_a_route_of_another_kind_stays(named):
    named.fused = {"block": 0.5, "triton": 0.4}
    model, images = vit()
    first = swap_in(model, measure=images).choices
    named.fused = {"block": 0.5, "library": 0.1}
    report = swap_in(vit()[0], measure=images[:1], choices=first)
    assert kept(report)["block"] == "fused" and route() == "triton"
    assert report.choices.configs == first.configs


def test_configs_that_cannot_be_used_and_what_ends_early_change_nothing(named):
    named.fused = {"block": 0.5, "triton": 0.4}
    model, images = vit()
    found = swap_in(vit()[0], measure=images).choices
    configs.install(HERE, {})
    named.raises["mlp"] = named.raises["layer_norm"] = KeyboardInterrupt()  # after the blocks
    with pytest.raises(KeyboardInterrupt):
        swap_in(model, measure=images)
    assert route() == "library"
    found.configs[0]["config"]["block_m"] = 7
    with pytest.raises(ValueError, match="choices have a config that cannot be used: linear_fwd"):
        swap_in(model, choices=found)
    assert route() == "library" and not any(isinstance(m, Fused) for m in model.modules())


def test_all_processes_take_the_configs_of_the_first(named, monkeypatch):
    named.fused = {"block": 0.5, "triton": 0.4}
    images = vit()[1]
    first = swap_in(vit()[0], measure=images).choices
    configs.install(HERE, {})
    monkeypatch.setattr(choices.dist, "is_initialized", lambda: True)
    for entries, taken in (([], "library"), (first.configs, "triton")):

        def broadcast(found, entries=entries):
            found[0] = choices.Choices({}, [], entries), {}

        monkeypatch.setattr(choices.dist, "broadcast_object_list", broadcast)
        swap_in(vit()[0], measure=images)  # where the other route would win
        assert route() == taken
        configs.install(HERE, {})


def test_after_the_time_nothing_runs(clock, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(choices, "time", SimpleNamespace(monotonic=lambda: now[0]))
    sample = clock.sample
    clock.sample = lambda run, count, flush: (
        now.__setitem__(0, now[0] + 3.0) or sample(run, count, flush)
    )
    model, images = vit()
    report = swap_in(model, measure=images, budget=5.0)
    assert len(clock.seen) == 4 and report.level == "none"  # one kind, twice each
    assert {row.note for row in report.choices.rows} == {
        "host: no time was left for a turn; fused: no time was left for a turn"
    }


def test_a_batch_that_the_host_cannot_run(clock):
    model, images = vit()
    with pytest.raises(AssertionError, match="Input height"):
        swap_in(model, measure=images[:, :, :-1])
    assert not any(isinstance(m, Fused) for m in model.modules()) and not clock.seen


def test_rehearsed_on_a_stand_in_device(monkeypatch):
    """The timer of a GPU, memory that does not suffice, a device that is lost."""
    device = StandIn(monkeypatch)
    monkeypatch.setattr(choices, "timer_of", lambda _: device.timer)
    monkeypatch.setattr(choices, "time", SimpleNamespace(monotonic=lambda: 0.0))
    step = choices.step

    def slow(module, *call, **options):
        device.calls += ["kernel"] * (1 if isinstance(module, Fused) else 9)
        if out_of_memory and isinstance(module, Fused) and module.fused_level == "block":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(module, *call, **options)

    monkeypatch.setattr(choices, "step", slow)
    with backend("torch"):
        out_of_memory = False
        model, images = vit()
        report = swap_in(model, measure=images)
        assert "block Block: host 10 ms, fused 2; kept fused" in str(report)
        assert set(kept(report).values()) == {"fused"} and report.level == "block"
        out_of_memory = True
        model = vit()[0]
        report = swap_in(model, measure=images)
        assert kept(report)["block"] == "host" and kept(report)["attention"] == "fused"
        assert "fused: OutOfMemoryError: CUDA out of memory" in str(report)
        model, device.errors = vit()[0], 99
        with pytest.raises(DeviceLost, match="illegal memory access"):
            swap_in(model, measure=images)
        assert not any(isinstance(m, Fused) for m in model.modules())
