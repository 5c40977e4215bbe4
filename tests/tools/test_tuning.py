"""`fastvit-kernels tune` with a stand-in timer: what may win, what is written, what is read."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import stat
import warnings
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from op_facts import FACTS
from private import set_deterministic

import fastvit_kernels as fk
from fastvit_kernels.commands import cli, tune as tune_command
from fastvit_kernels.commands.models import build_model
from fastvit_kernels.models import modules
from fastvit_kernels.ops.attention import launch as attention_launch
from fastvit_kernels.ops.common.gemm_configs import GemmConfig
from fastvit_kernels.runtime import configs as launch_configs, tuned_table
from fastvit_kernels.runtime.backend import Gpu, gpu
from fastvit_kernels.runtime.configs import TABLES, ConfigTable
from fastvit_kernels.runtime.operator import LAUNCHERS, operator
from fastvit_kernels.swap import choices
from fastvit_kernels.swap.hosts.fused import Fused
from fastvit_kernels.tools import replay, tuning
from fastvit_kernels.verify import runner
from fastvit_kernels.verify.cases import OPS

backend_module = importlib.import_module("fastvit_kernels.runtime.backend")
CPU = torch.device("cpu")
HERE = Gpu("cpu", 2, 2**20, "Stand-in GPU 1")


class Config(NamedTuple):
    kind: str
    num_warps: int = 4


DEFAULT, RIGHT, EVEN = Config("default"), Config("right"), Config("even")
FASTER = Config("faster")
WRONG, WRONG_VALUE, UNSTABLE = Config("wrong"), Config("wrong value"), Config("unstable")
UNWRITTEN, RAISES = Config("unwritten"), Config("raises")
MICROSECONDS = {
    DEFAULT: 10.0,
    RIGHT: 8.0,
    EVEN: 9.9,
    FASTER: 6.0,
}  # the others 1.0: fast, and wrong


def _planted(x, backward):
    """2 x, by the config in force; wrong in the way that its name says."""
    config = TABLES["planted"].choose(gpu(x.device), x.shape[-1])
    if config is RAISES:
        raise RuntimeError("out of resource: shared memory")
    y = torch.empty_like(x)
    rows = len(x) - 1 if config is UNWRITTEN else len(x)
    torch.mul(x[:rows], 2.0, out=y[:rows])
    if config is (WRONG if backward else WRONG_VALUE):
        y[0] *= 1.01
    if config is UNSTABLE:
        y += torch.rand(()) * 1e-7
    return y


@operator(fake=lambda x: torch.empty_like(x))
def planted_fwd(x: torch.Tensor) -> torch.Tensor:
    return _planted(x, backward=False)


@operator(fake=lambda dy: torch.empty_like(dy))
def planted_bwd(dy: torch.Tensor) -> torch.Tensor:
    return _planted(dy, backward=True)


OPERATORS = {name: LAUNCHERS.pop(name) for name in ("planted_fwd", "planted_bwd")}


class PlantedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return planted_fwd(x)

    @staticmethod
    def backward(ctx, dy):
        return planted_bwd(dy)


def double(x):
    """The planted public function."""
    return PlantedFunction.apply(x)


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    """A named GPU on the CPU, an empty cache folder, nothing tuned."""
    monkeypatch.setattr(backend_module, "_gpu", lambda device: HERE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(launch_configs, "_tuned", {})
    monkeypatch.setattr(launch_configs, "_on_change", list(launch_configs._on_change))
    backend_module.GPUS.clear()
    launch_configs._forget()
    yield
    launch_configs._forget()
    backend_module.GPUS.clear()


@contextmanager
def planted(monkeypatch, *configs, default=DEFAULT):
    """The operator above with a table of these configs."""
    for name, launcher in OPERATORS.items():
        monkeypatch.setitem(LAUNCHERS, name, launcher)
    monkeypatch.setitem(replay.SPECIFICATIONS, double, lambda x: 2.0 * x)
    monkeypatch.setattr(tune_command, "double", double, raising=False)  # a module that is watched
    table = ConfigTable("planted", [default, *configs], lambda gpu, size: default)
    try:
        yield table
    finally:
        del TABLES["planted"]


def _step():
    tune_command.double(torch.randn(4, 6, requires_grad=True)).sum().backward()


def _timer(call):
    """Of the config that is forced; the default's where none is."""
    call()
    return MICROSECONDS.get(launch_configs._forced.get("planted", DEFAULT), 1.0)


def _tuned(monkeypatch, *configs, default=DEFAULT):
    with planted(monkeypatch, *configs, default=default):
        (decision,) = tuning.tune(_step, CPU, timer=_timer)
    return decision


def test_the_fastest_right_config_wins(monkeypatch):
    found = _tuned(monkeypatch, EVEN, RIGHT)
    assert found.winner is RIGHT and not found.refused and found.complete
    # forward and backward both ask the table: two operators a step
    assert (found.default_us, found.winner_us, found.tried) == (20.0, 16.0, 2)
    assert found.choice.key == (6,) and found.choice.gpu == HERE


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (WRONG, "dx: max"),
        (WRONG_VALUE, "out: max"),
        (UNSTABLE, "two runs give different bits in output 0"),
        (UNWRITTEN, "out: max inf"),
        (RAISES, "RuntimeError: out of resource: shared memory"),
    ],
    ids=lambda value: value.kind if isinstance(value, Config) else "",
)
def test_a_wrong_config_never_wins_however_fast(monkeypatch, config, reason):
    found = _tuned(monkeypatch, config)
    assert found.winner is DEFAULT
    ((refused, why),) = found.refused
    assert refused is config and reason in why and "double (4, 6)" in why
    assert _tuned(monkeypatch, config, RIGHT).winner is RIGHT


def test_checks_poison_and_leave_the_switches_as_they_were():
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with runner.poisoned():
        assert torch.empty(1000).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory


def test_a_wrong_default_loses_to_the_fastest_right_config(monkeypatch, capsys):
    """Which is slower here."""
    with planted(monkeypatch, RIGHT, DEFAULT, default=WRONG):
        assert tune_command.run_tuning(_step, CPU, timer=_timer) == 1
    out = capsys.readouterr().out
    assert "1 shipped defaults are wrong on this GPU" in out and "kind=right" in out


def test_a_wrong_config_is_no_wrong_default(monkeypatch, capsys):
    with planted(monkeypatch, WRONG, RIGHT):
        assert tune_command.run_tuning(_step, CPU, timer=_timer) == 0
    out = capsys.readouterr().out
    assert "20.0 -> 16.0 us a step (20.0 % less)" in out and "2 others tried, 1 refused" in out
    assert "shipped defaults" not in out and "1 decisions, 1 in " in out


def test_what_was_not_tried_is_not_written(monkeypatch, capsys):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(tuning.time, "monotonic", lambda: clock.now)

    def slow(call):
        clock.now += 1.0
        return _timer(call)

    with planted(monkeypatch, RIGHT):
        assert tune_command.run_tuning(_step, CPU, timer=slow, seconds=1.0) == 0
    out = capsys.readouterr().out
    assert "the default stays" in out and "there was nothing to choose; nothing was written" in out
    assert not tuned_table.table_path(HERE).exists()


def test_the_default_stays_within_the_noise(monkeypatch):
    assert _tuned(monkeypatch, EVEN).winner is DEFAULT  # 1 % is below MIN_GAIN
    noisy = [10.0, 14.0, 10.0, 7.0, 9.0, 13.0, 8.0]
    steady = [9.0] * 7
    assert not tuning.beats(steady, noisy) and not tuning.beats(noisy, [11.0] * 7)
    assert tuning.beats(steady, [10.0, 10.1, 9.9, 10.0, 10.0, 10.1, 9.9])
    # The gain is a quarter, and so is the default's spread from the 20th to the 80th percentile.
    spread = [7.0, 7.0, 8.0, 8.0, 8.0, 9.0, 9.0]
    assert not tuning.beats([6.0] * 7, spread) and tuning.beats([5.9] * 7, spread)


@pytest.mark.parametrize("order", [(RIGHT, FASTER), (FASTER, RIGHT)])
def test_of_two_that_are_faster_the_faster_wins(monkeypatch, order):
    found = _tuned(monkeypatch, *order)
    assert found.winner is FASTER and (found.default_us, found.winner_us) == (20.0, 12.0)


def test_times_are_of_all_calls_of_a_step(monkeypatch):
    def step():
        for _ in range(3):
            _step()

    with planted(monkeypatch, RIGHT):
        (found,) = tuning.tune(step, CPU, timer=_timer)
    assert (found.default_us, found.winner_us) == (60.0, 48.0)


@pytest.mark.parametrize("slow", ["layer_norm_bwd", "layer_norm_fwd"])
def test_what_takes_most_of_a_step_is_tuned_first(slow):
    """Over all its calls."""

    def step():
        for rows in (2, 3, 4):
            _layer_norm_step(rows)

    def timer(call):
        call()
        name = call.launcher.func.__name__
        return 10.0 if slow in name else 9.0

    first, second = tuning.tune(step, CPU, timer=timer, seconds=-1.0)
    assert first.choice.table == slow != second.choice.table
    assert not first.complete and first.default_us == 30.0 and second.default_us == 27.0


def test_the_users_own_table_is_in_force_again_afterwards(monkeypatch):
    with planted(monkeypatch, RIGHT) as table:
        entry = tuned_table.Entry("planted", (6,), RIGHT._asdict(), 2.0, 1.0, tuned_table.now())
        tuned_table.save(HERE, [entry])
        assert table.choose(HERE, 6) == RIGHT
        for _ in tuning.tune(_step, CPU, timer=_timer):
            assert table.choose(HERE, 6) == DEFAULT
        assert table.choose(HERE, 6) == RIGHT


def test_configs_are_checked_on_the_kernels_alone(monkeypatch):
    seen = []

    def step():
        seen.append(fk.get_backend())
        _step()

    with planted(monkeypatch, RIGHT):
        list(tuning.tune(step, CPU, timer=lambda call: seen.append(fk.get_backend()) or 1.0))
    assert {*seen} == {"triton"} and fk.get_backend() == "auto"


def test_a_time_budget_stops_between_configs(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(tuning.time, "monotonic", lambda: clock.now)

    def slow(call):
        clock.now += 1.0
        return _timer(call)

    with planted(monkeypatch, EVEN, RIGHT):
        (cut,) = tuning.tune(_step, CPU, timer=slow, seconds=10.0)
        assert cut.tried == 1 and not cut.complete and cut.winner is DEFAULT
        clock.now = 0.0
        (none,) = tuning.tune(_step, CPU, timer=slow, seconds=1.0)
    assert none.tried == 0 and not none.complete
    assert "the time was over" in tune_command.describe(none)


def test_tuning_is_not_swayed_by_a_table_that_is_there(monkeypatch):
    seen = []

    def step():
        seen.append(TABLES["planted"].choose(HERE, 6))
        _step()

    with planted(monkeypatch, RIGHT):
        launch_configs.install(HERE, {("planted", (6,)): RIGHT})
        (found,) = tuning.tune(step, CPU, timer=_timer)
    assert seen == [DEFAULT]
    assert found.default is DEFAULT and found.default_us == 20.0


class _Abort(BaseException):
    """What ends a process, as far as Python can say it."""


def test_a_config_that_ended_the_process_is_left_out_next_time(monkeypatch):
    def timer(call):
        if launch_configs._forced.get("planted") is EVEN:
            raise _Abort
        return _timer(call)

    journal = tuned_table.Journal(HERE)
    with planted(monkeypatch, EVEN, RIGHT):
        with pytest.raises(_Abort):
            list(tuning.tune(_step, CPU, timer=timer))
        assert tuned_table.Journal(HERE).is_fatal("planted", EVEN)
        (found,) = tuning.tune(_step, CPU, timer=timer)
        assert found.winner is RIGHT
        assert found.refused == [(EVEN, "it ended the process of a former run")]
        assert tuned_table.Journal(HERE).is_fatal("planted", EVEN)
        assert not tuned_table.Journal(HERE).is_fatal("planted", RIGHT)
    again = tuned_table.Journal(HERE)  # of the next process, which ends by another config
    again.trying("planted", RIGHT)
    for config in (EVEN, RIGHT):
        assert tuned_table.Journal(HERE).is_fatal("planted", config)
    assert tune_command.clear(HERE) == 0 and not journal.path.exists()


def test_a_config_that_left_the_gpu_unusable_is_left_out_next_time(monkeypatch):
    def checked(reference, function):
        if launch_configs._forced.get("planted") is EVEN:
            raise runner.Fault("an illegal memory access")

    monkeypatch.setattr(tuning, "check", checked)
    monkeypatch.setattr(tuning, "device_lost", lambda device: "the GPU was lost")
    with planted(monkeypatch, EVEN, RIGHT), pytest.raises(tuning.Unusable):
        list(tuning.tune(_step, CPU, timer=_timer))
    assert tuned_table.Journal(HERE).is_fatal("planted", EVEN)
    assert tune_command.clear(HERE) == 0


def test_an_interrupt_blames_no_config(monkeypatch):
    def timer(call):
        if launch_configs._forced.get("planted") is EVEN:
            raise KeyboardInterrupt
        return _timer(call)

    with planted(monkeypatch, EVEN), pytest.raises(KeyboardInterrupt):
        list(tuning.tune(_step, CPU, timer=timer))
    assert not tuned_table.Journal(HERE).path.exists()


def test_a_termination_blames_no_config(monkeypatch, capsys):
    """As when the seconds of `bench contact` end in the middle of a config."""

    def tune(*_, **__):
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr(tune_command, "run_tuning", tune)
    monkeypatch.setattr(tune_command, "model_step", lambda *_, **__: None)
    monkeypatch.setattr(tune_command.options, "kernels_reason", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(tune_command.options, "chosen_device", lambda _: torch.device("cuda:0"))
    former = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert cli.main(["tune"]) == 130
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, former)
    assert "interrupted" in capsys.readouterr().err


def _layer_norm_step(rows=3):
    x = torch.randn(rows, 5, 40, requires_grad=True)
    fk.layer_norm(x, torch.ones(40, requires_grad=True)).sum().backward()


def test_the_whole_flow_on_a_kernel(capsys):
    """Measured, written, read at the first choice of a later run, used."""
    table = TABLES["layer_norm_fwd"]
    (default, other, *_) = table.candidates(HERE, 64)

    def timer(call):
        call()
        return 5.0 if launch_configs._forced.get("layer_norm_fwd") == other else 10.0

    assert tune_command.run_tuning(_layer_norm_step, CPU, timer=timer) == 0
    out = capsys.readouterr().out
    assert "layer_norm_fwd (64,): 10.0 -> 5.0 us a step (50.0 % less)" in out
    assert "layer_norm_bwd (64,): the default stays" in out
    path = tuned_table.table_path(HERE)
    content = json.loads(path.read_text())
    names = {"format", "fastvit_kernels", "triton", "torch", "gpu", "arch", "driver", "entries"}
    assert set(content) == names
    assert {e["table"] for e in content["entries"]} == {"layer_norm_fwd", "layer_norm_bwd"}
    entry = next(e for e in content["entries"] if e["table"] == "layer_norm_fwd")
    assert entry["config"] == other._asdict() and entry["key"] == [64]
    assert (entry["default_us"], entry["config_us"]) == (10.0, 5.0) and "T" in entry["date"]
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no temporary file is left

    launch_configs.install(HERE, None)  # as a process that starts
    assert table.choose(HERE, 64) == other != default
    assert table.choose(Gpu("sm_90", 132, 2**17, "Another"), 64) == default


@pytest.mark.parametrize(("us", "winner"), [(5.0, "library"), (9.9, "triton")])
def test_the_librarys_attention_is_one_of_the_configs(us, winner, capsys, monkeypatch):
    """Right where it is tried, though `check` fills memory by torch's deterministic switch."""
    set_deterministic(False)
    tables = [TABLES[name] for name in ("attention_fwd", "attention_bwd")]
    tried = []
    for table in tables:

        def two(gpu, *key, table=table):
            library = next(c for c in table.configs if c.route == "library")
            return [table.default(gpu, *key), library]

        monkeypatch.setattr(table, "candidates", two)
    for name in ("fwd_by_library", "bwd_by_library"):
        function = getattr(attention_launch, name)

        def called(*arguments, function=function):
            found = function(*arguments)
            tried.append(found is not None)
            return found

        monkeypatch.setattr(attention_launch, name, called)

    def step():
        fk.attention(torch.randn(1, 37, 3, 2, 16, requires_grad=True)).sum().backward()

    def timer(call):
        call()
        forced = [launch_configs._forced.get(table.name) for table in tables]
        return us if any(f is not None and f.route == "library" for f in forced) else 10.0

    assert tune_command.run_tuning(step, CPU, timer=timer) == 0
    assert ("10.0 -> 5.0 us a step" in capsys.readouterr().out) == (winner == "library")
    assert tried and all(tried)
    launch_configs.install(HERE, None)  # as a process that starts
    with launch_configs.recording() as choices, fk.backend("triton"):
        step()
    found = {
        c.table: TABLES[c.table].choose(HERE, *c.key).route
        for c in choices
        if c.table in ("attention_fwd", "attention_bwd")
    }
    assert found == dict.fromkeys(("attention_fwd", "attention_bwd"), winner)


@pytest.fixture
def written():
    """A good table file, its content, and the config that it chooses."""
    table = TABLES["layer_norm_fwd"]
    chosen = table.candidates(HERE, 64)[1]
    fields = tuned_table.fields(chosen)
    entry = tuned_table.Entry(table.name, (64,), fields, 2.0, 1.0, tuned_table.now())
    path = tuned_table.save(HERE, [entry])
    assert table.choose(HERE, 64) == chosen
    return SimpleNamespace(path=path, content=json.loads(path.read_text()), table=table)


def _entry_with(**changes):
    def change(content):
        content["entries"][0].update(changes)

    return change


def _with(**changes):
    return lambda content: content.update(changes)


def _twice(content):
    content["entries"] *= 2


DAMAGES = {
    "empty": "",
    "not JSON": "{'format': 1}",
    "truncated": lambda text: text[: len(text) // 2],
    "binary": b"\x80\x02\xff",
    "NaN": lambda text: text.replace("2.0", "NaN"),
    "deep": "[" * 100_000,
    "a list": "[]",
    "another format": _with(format=1),
    "another GPU": _with(gpu="NVIDIA H100"),
    "another arch": _with(arch="sm_80"),
    "another triton": _with(triton="2.0.0"),
    "another package version": _with(fastvit_kernels="0.0.1"),
    "no entries": _with(entries=None),
    "an entry that is no object": _with(entries=[1]),
    "an entry with more fields": _entry_with(grid=1),
    "unknown table": _entry_with(table="layer_norm_sideways"),
    "a table that is no text": _entry_with(table=["layer_norm_fwd"]),
    "a config that does not ship": _entry_with(config={"block_rows": 3, "num_warps": 4}),
    "true for 1": _entry_with(key=[1024], config={"block_rows": True, "num_warps": 4}),
    "a config with another field": _entry_with(config={"block_rows": 16, "pre_hook": "os"}),
    "a config that is no object": _entry_with(config=[16, 4]),
    "a config that does not fit": _entry_with(config={"block_rows": 1, "num_warps": 8}),
    "a key that is none": _entry_with(key=[64, 64]),
    "a key of another type": _entry_with(key=[["x"]]),
    "a key that is text": _entry_with(key=["wide"]),
    "a dtype of another spelling": _entry_with(
        table="narrow_mlp_fwd",
        key=[64, 64, "bfloat16", 16],
        config={"block_m": 16, "block_f": 64, "num_warps": 8, "num_stages": 2},
    ),
    "a dtype of another spelling in a product": _entry_with(
        table="linear_fwd",
        key=[64, 64, 64, "bfloat16"],
        config={**GemmConfig("library")._asdict()},
    ),
    "negative time": _entry_with(config_us=-1.0),
    "no time": _entry_with(config_us=0.0),
    "absurd time": _entry_with(default_us=1e12),
    "a time that is text": _entry_with(default_us="fast"),
    "a date that is none": _entry_with(date=3),
    "complete that is none": _entry_with(complete=1),
    "two entries for one key": _twice,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_or_foreign_table_is_ignored_with_one_warning(written, name):
    damage = DAMAGES[name]
    if isinstance(damage, bytes):
        written.path.write_bytes(damage)
    elif isinstance(damage, str):
        written.path.write_text(damage)
    elif name in ("truncated", "NaN"):
        written.path.write_text(damage(written.path.read_text()))
    else:
        damage(written.content)
        written.path.write_text(json.dumps(written.content))
    launch_configs.install(HERE, None)
    default = written.table.default(HERE, 64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert written.table.choose(HERE, 64) == default
        launch_configs._forget()
        assert written.table.choose(HERE, 64) == default
        fk.layer_norm(torch.randn(2, 40))
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith(f"the tuned configs in {written.path} are ignored: ")
    assert "`fastvit-kernels tune` measures anew" in text and len(text) < 700
    if name.startswith("another "):
        assert "it is of" in text or "its format is 1, wanted 2" in text


def test_files_that_must_not_be_read(written, monkeypatch):
    def reason():
        with pytest.raises(tuned_table.TableError) as error:
            tuned_table.read(HERE)
        return str(error.value)

    with monkeypatch.context() as patched:
        other = SimpleNamespace(st_mode=stat.S_IFREG, st_uid=os.geteuid() + 999, st_size=10)
        patched.setattr(tuned_table.os, "fstat", lambda handle: other)
        assert f"it belongs to another user (uid {other.st_uid})" == reason()
    monkeypatch.setattr(tuned_table, "MAX_BYTES", 100)
    assert "at most 100 are read" in reason()
    written.path.unlink()
    os.mkfifo(written.path)  # would wait for a writer
    assert reason() == "it is not a regular file"
    written.path.unlink()
    written.path.mkdir()
    assert reason() == "it is not a regular file"


def test_a_new_table_keeps_the_entries_of_another_model(written, monkeypatch, capsys):
    with planted(monkeypatch, RIGHT):
        assert tune_command.run_tuning(_step, CPU, timer=_timer) == 0
        entries, tuned = tuned_table.read(HERE)
        assert [e.table for e in entries] == ["layer_norm_fwd", "planted"]
        assert tuned["planted", (6,)] == RIGHT
    assert "1 decisions, 2 in" in capsys.readouterr().out


def test_it_goes_on_where_a_former_run_ended(monkeypatch, capsys):
    """What is decided stays; what the time cut short is tried again."""
    asked = []

    def timer(call):
        asked.append(launch_configs._forced.get("planted", DEFAULT))
        return _timer(call)

    with planted(monkeypatch, RIGHT, EVEN):
        monkeypatch.setattr(tuning.time, "monotonic", lambda: 7.0 * len(asked))
        assert tune_command.run_tuning(_step, CPU, timer=timer, seconds=100.0) == 0
        (entry,) = tuned_table.read(HERE)[0]
        assert not entry.complete and entry.config == RIGHT._asdict()
        assert tune_command.run_tuning(_step, CPU, timer=timer) == 0
        assert "of a former run" not in capsys.readouterr().out
        assert tuned_table.read(HERE)[0][0].complete and EVEN in asked
        asked.clear()
        assert tune_command.run_tuning(_step, CPU, timer=timer) == 0
        assert not asked and tuned_table.read(HERE)[1]["planted", (6,)] == RIGHT
    said = capsys.readouterr().out
    assert "1 of a former run were left as they are; --clear removes them" in said


def test_it_says_how_far_it_is_and_what_is_left(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(tune_command.time, "monotonic", lambda: now[0])

    def decided(*_, **__):
        for left in (0.75, 0.5, 0.0):
            now[0] += 30.0
            choice = launch_configs.Choice("layer_norm_fwd", HERE, (64,))
            yield tuning.Decision(choice, DEFAULT, DEFAULT, 1.0, 1.0, left=left)

    monkeypatch.setattr(tuning, "tune", decided)
    tune_command.run_tuning(_step, CPU)
    said = capsys.readouterr().out
    for line in ("25 % done, about 90 s left", "50 % done, about 60 s", "100 % done, about 0 s"):
        assert line in said
    now[0] = 0.0
    tune_command.run_tuning(_step, CPU, seconds=70.0)
    assert "about 40 s left" in capsys.readouterr().out  # the budget ends it before


def test_the_work_that_is_left_counts_configs():
    found = list(tuning.tune(_layer_norm_step, CPU, timer=lambda call: call() or 1.0))
    each = [len(TABLES[f.choice.table].candidates(HERE, 64)) for f in found]
    assert [f.left for f in found] == [each[1] / sum(each), 0.0]


def test_modules_are_measured_into_the_same_file(capsys, tmp_path, monkeypatch):
    """Which swap_in reads: what runs fused, and the launch configs; a second run measures none."""
    table = TABLES["layer_norm_fwd"]
    other = table.candidates(HERE, 64)[1]
    entry = tuned_table.Entry(table.name, (64,), tuned_table.fields(other), 2.0, 1.0, "now")
    tuned_table.save(HERE, [entry])
    timed = []

    class Clock:
        def sample(self, run, count, flush):
            timed.append(run)
            assert torch.is_autocast_enabled("cpu")
            run()
            return [0.5 if isinstance(run.args[0], Fused) else 1.0] * count

        def clear(self):
            pass

    monkeypatch.setattr(choices, "timer_of", lambda device: Clock())
    path = tmp_path / "choices.json"
    words = ["tune", "--model", "timm:vit_tiny_patch16_224", "--img-size", "32", "--batch", "2"]
    arguments = cli.build_parser(words).parse_args([*words, "--out", str(path)])
    for first in (True, False):
        with fk.backend("torch"):
            tune_command.write_choices(arguments, CPU)
        said = capsys.readouterr().out
        assert bool(timed) == first and "block Block: host 1 ms, fused 0.5; kept fused" in said
        assert f"3 kinds of modules and 1 launch configs in {path}" in said
        timed.clear()
    stale = json.loads(path.read_text())  # of an earlier day: what was measured since stands
    stale["configs"][0] |= {"date": "2020", "config": tuned_table.fields(table.default(HERE, 64))}
    path.write_text(json.dumps(stale))
    with fk.backend("torch"):
        tune_command.write_choices(arguments, CPU)
    assert tune_command.clear(HERE) == 0
    launch_configs.install(HERE, None)
    assert table.choose(HERE, 64) == table.default(HERE, 64)
    model = build_model("timm:vit_tiny_patch16_224", img_size=32)
    assert "kept fused" in str(fk.swap_in(model, choices=path))
    assert table.choose(HERE, 64) == other


def test_a_damaged_table_is_written_anew(written, monkeypatch, capsys):
    written.path.write_text("{")
    with planted(monkeypatch, RIGHT):
        tune_command.run_tuning(_step, CPU, timer=_timer)
        assert [e.table for e in tuned_table.read(HERE)[0]] == ["planted"]
    assert "is written anew: it is not whole JSON" in capsys.readouterr().out


def test_a_failed_write_leaves_the_former_table(written, monkeypatch):
    before, folder, beside = written.path.read_text(), written.path.parent, []

    def fail(*_, **__):
        beside.extend(folder.iterdir())  # of the same disk: it is renamed in one step
        raise OSError("no space left on device")

    monkeypatch.setattr(tuned_table.os, "fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        tuned_table.save(HERE, [])
    assert written.path.read_text() == before
    assert len(beside) == 2 and [*folder.iterdir()] == [written.path]


@pytest.mark.parametrize(
    ("platform", "variables", "folder"),
    [
        ("linux", {"XDG_CACHE_HOME": "/caches"}, "/caches/fastvit_kernels"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/u/.cache/fastvit_kernels"),
        ("linux", {}, "/home/u/.cache/fastvit_kernels"),
        ("darwin", {}, "/home/u/Library/Caches/fastvit_kernels"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/fastvit_kernels"),
        ("win32", {}, "/home/u/AppData/Local/fastvit_kernels"),
    ],
)
def test_cache_folder_is_the_platforms(monkeypatch, platform, variables, folder):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/u", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    assert tuned_table.cache_folder() == Path(folder)


def test_show_and_clear(written, capsys):
    assert tune_command.show(HERE) == 0
    assert "layer_norm_fwd (64,): block_rows=" in capsys.readouterr().out
    written.path.write_text("{")
    assert tune_command.show(HERE) == 1
    assert "is ignored: it is not whole JSON" in capsys.readouterr().out
    assert tune_command.clear(HERE) == 0 and not written.path.exists()
    assert tune_command.clear(HERE) == 0
    assert "there is no table" in capsys.readouterr().out
    assert tune_command.show(HERE) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", [[], ["--show"], ["--clear"], ["--time-budget", "5"]], ids=str)
def test_without_a_gpu_it_says_so_and_writes_nothing(words, capsys, tmp_path):
    assert cli.main(["tune", *words]) == 2
    err = capsys.readouterr().err
    assert "torch sees no GPU" in err and "nothing was written" in err
    assert not (tmp_path / "cache").exists()


def test_every_op_has_a_specification_with_its_arguments():
    ops = {op for op in (getattr(fk, name) for name in fk.__all__) if hasattr(op, "__code__")}
    ops = {op for op in ops if op.__module__.startswith("fastvit_kernels.ops.")}
    ops -= {fk.keep_samples}  # draws: no specification gives its numbers
    assert set(replay.SPECIFICATIONS) == ops
    fitted = {"cu_seqlens", "max_seqlen", "mean", "std"}  # to the tensors: by Op.settings
    for op in OPS.values():
        taken = {*inspect.signature(op.function).parameters} - fitted
        assert {*op.args, *FACTS[op.name].options} == taken


def test_noted_calls_of_a_model_keep_the_2x_rule():
    """Shapes, strides, casts and residuals as in a step; so the specifications are right."""
    vit = fk.create_vit(
        "vit_mnist",
        img_size=12,
        depth=1,
        embed_dim=32,
        num_heads=2,
        init_values=0.1,
        drop_path_rate=0.5,
    ).train()

    def step():
        with torch.autocast("cpu", torch.bfloat16):
            F.cross_entropy(vit(torch.rand(1, 1, 12, 12)), torch.zeros(1, dtype=int)).backward()

    with replay.noting() as calls, backend_module.backend("triton"):
        step()
    names = {call.function.__name__ for call in calls}
    assert {"layer_norm_and_input", "qkv_attention", "linear", "mlp", "patch_embed"} <= names, names
    for call in calls:
        replayed = replay.Replay(call, CPU)
        assert 0 < tuning.check(replayed.reference, replayed.function, repeats=1) <= 1
        wanted = [spec.requires_grad for _, spec in call.arguments if hasattr(spec, "stride")]
        assert any(wanted) and len(replayed.reference.oracle_grads) == sum(wanted)
    assert modules.mlp is fk.mlp and fk.mlp in replay.SPECIFICATIONS  # as they were


def test_noted_calls_keep_integers():
    """Bytes of images, patches to keep, samples to keep, starts of packed sequences, masks of keys;
    a second step with other numbers is a call of the same kind."""
    vit = fk.create_vit(
        "vit_mnist",
        img_size=12,
        depth=1,
        embed_dim=32,
        num_heads=2,
        mean=[0.4],
        std=[0.3],
        patch_drop_rate=0.5,
        drop_path="skip",
    ).train()
    block = vit.blocks[0]
    block.drop_path1.drop_prob = block.drop_path2.drop_prob = 0.5
    qkv = torch.randn(7, 3, 1, 8, requires_grad=True)
    with replay.noting() as calls, backend_module.backend("triton"):
        for i in range(2):
            images = torch.randint(256, (3, 1, 12, 12), dtype=torch.uint8)
            vit(images).square().sum().backward()
            starts = torch.tensor([0, 3 + i, 7], dtype=torch.int32)
            fk.varlen_attention(qkv, starts, 4)
            fk.attention(qkv[None], attn_mask=torch.rand(1, 1, 1, 7) > 0.2 * i)
    of_integers = {
        call.function.__name__: (call, count)
        for call, count in calls.items()
        if any(getattr(x, "values", None) is not None for _, x in call.arguments)
    }
    assert {*of_integers} >= {
        "patch_embed",
        "layer_norm_and_input",
        "linear",
        "varlen_attention",
        "attention",
    }
    starts = dict(of_integers["varlen_attention"][0].arguments)["cu_seqlens"]
    assert starts.values.tolist() == [0, 3, 7]  # the first one's
    for call, count in of_integers.values():
        replayed = replay.Replay(call, CPU)
        given = {n: x.values for n, x in call.arguments if isinstance(x, replay.TensorSpec)}
        given = {n: x for n, x in given.items() if x is not None}
        assert all(torch.equal(replayed.inputs[name], x) for name, x in given.items())
        assert count in (2, 4)  # of two steps, twice in a block
        assert 0 < tuning.check(replayed.reference, replayed.function, repeats=1) <= 1


def test_a_call_is_noted_as_it_was_asked():
    """Whole, not its parts; what autograd records, and under which autocast."""
    x, qkv = torch.randn(2, 8, requires_grad=True), torch.randn(1, 3, 3, 2, 8, requires_grad=True)
    weights = [torch.randn(8, 8, requires_grad=True), None, torch.randn(8, 8), None]
    with replay.noting() as calls:
        with torch.no_grad():
            fk.layer_norm(x)
        with pytest.raises(ValueError):
            fk.linear(x, weights[0], activation="none of ours")
        with torch.autocast("cpu", torch.bfloat16):
            fk.mlp(x, *weights)
        fk.attention(qkv, dropout_p=0.5)  # no specification draws its bits
        fk.patch_embed(
            torch.zeros(1, 3, 4, 4, dtype=torch.uint8),
            torch.randn(8, 3, 4, 4),
            mean=[0.5, 0.5, 0.5],
            std=[0.2, 0.2, 0.2],
        )
    names = ["layer_norm", "linear", "mlp", "patch_embed"]
    assert [call.function.__name__ for call in calls] == names
    norm, _, mlp, _ = calls
    assert norm.autocast is None and mlp.autocast is torch.bfloat16
    assert [dict(norm.arguments)["x"].requires_grad, dict(mlp.arguments)["x"].requires_grad] == [
        False,
        True,
    ]
    assert not dict(mlp.arguments)["fc2_weight"].requires_grad
    replayed = replay.Replay(mlp, CPU)
    with backend_module.backend("torch"):
        assert replayed.function(**replayed.inputs).dtype is torch.bfloat16
    assert replayed.reference.yardstick[0].dtype is torch.bfloat16


def test_a_weight_is_replayed_at_the_scale_of_a_layer():
    spec = replay.TensorSpec((40, 50), (50, 1), torch.float32, True)
    weight, x = (spec.random(n, torch.Generator().manual_seed(0)) for n in ("weight", "x"))
    torch.testing.assert_close(weight, x * 50**-0.5)
    assert 0.9 < x.std() < 1.1


def test_an_overlapping_view_is_replayed_with_its_strides():
    spec = replay.TensorSpec((2, 3, 4), (0, 8, 1), torch.float32, True)
    x = spec.random("x", torch.Generator().manual_seed(0))
    assert x.stride() == (0, 8, 1) and torch.equal(x[0], x[1]) and x.std() > 0.1


@pytest.mark.gpu
def test_tune_on_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["tune", "--model", "vit_tiny_patch16_224", "--batch", "8", "--time-budget", "60"]
    assert cli.main(words) == 0, capsys.readouterr().out
    here = gpu(torch.device("cuda", torch.cuda.current_device()))
    entries, _ = tuned_table.read(here)
    assert entries and all(e.config_us <= e.default_us for e in entries)
