"""`train` in several processes: DDP and FSDP2 give the losses of one, and survive a kill."""

from __future__ import annotations

import ast
import csv
import os
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch import nn

from fastvit_kernels import create_vit
from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.training import checkpoint, processes

pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
PROGRAM = Path(__file__).parent.parent / "support" / "distributed_training.py"
SCENARIOS = (
    "one",
    "ddp",
    "fsdp",
    "average",
    "averages",
    "step",
    "half",
    "term",
    "grown",
    "bf16",
    "rows",
    "few",
    "beside",
)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of all scenarios, and each one's exit statuses."""
    folder = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *SCENARIOS],
        capture_output=True,
        text=True,
        timeout=3600,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = (line.partition(" ") for line in done.stdout.splitlines())
    return folder, {name: ast.literal_eval(rest) for name, _, rest in lines}


def losses(folder, name):
    with (folder / name / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    columns = ("train_loss", "train_accuracy", "held_out_loss", "held_out_accuracy")
    return [float(row[column]) for row in rows for column in columns]


def log(folder, name):
    return " ".join((folder / f"{name}.log").read_text().split())


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_processes_give_the_losses_of_one(runs, name):
    folder, statuses = runs
    assert statuses["one"] == [[0]] and statuses[name] == [[0, 0]], log(folder, name)
    assert losses(folder, name) == pytest.approx(losses(folder, "one"), rel=1e-4)
    whole = [path.name for path in (folder / name).glob("*checkpoint*")]
    assert whole == ["checkpoint.pt"], "one file, and nothing half"


def test_the_average_is_sharded_with_the_model(runs):
    folder, statuses = runs
    assert (statuses["average"], statuses["averages"]) == ([[0]], [[0, 0], [0]])
    assert losses(folder, "averages") == pytest.approx(losses(folder, "average"), rel=1e-4)
    held = [losses(folder, name)[2::4] for name in ("average", "one")]
    assert held[0] != pytest.approx(held[1], rel=1e-2), "the average's own"


@pytest.mark.parametrize(
    ("name", "statuses", "message"),
    [
        ("step", [[1, -9], [0]], "checkpoint.pt holds the run after epoch 1 of 2"),
        ("half", [[1, -9], [0]], "checkpoint.pt holds the run after epoch 1 of 2"),
        ("grown", [[-9], [0, 0]], ""),
    ],
)
def test_a_killed_run_goes_on_with_another_number_of_processes(runs, name, statuses, message):
    """From two to one under torchrun, to one without it, and from one to two."""
    folder, found = runs
    text = log(folder, name)
    assert found[name] == statuses, text
    assert losses(folder, name) == pytest.approx(losses(folder, "one"), rel=1e-4)
    if message:
        assert "The run stops: another process of the run has ended" in text and message in text
        assert f"--resume --out {folder / name}" in text
        assert text.count("The run stops") == 1


def test_sigterm_says_how_far_the_run_has_come(runs):
    """torchrun sends it to the others, which may be inside a collective."""
    folder, statuses = runs
    text = log(folder, "term")
    assert statuses["term"] == [[143, 1]], text
    assert "SIGTERM" in text and "checkpoint.pt holds the run after epoch 1 of 2" in text


def test_a_last_batch_smaller_than_the_number_of_processes(runs):
    folder, statuses = runs
    assert statuses["rows"] == [[0, 0, 0]], log(folder, "rows")


def test_fsdp_in_bf16_stays_near_fp32(runs):
    folder, statuses = runs
    assert statuses["bf16"] == [[0, 0]], log(folder, "bf16")
    low, full = losses(folder, "bf16"), losses(folder, "one")
    assert low[0] == pytest.approx(full[0], rel=0.02) and low[0] != pytest.approx(full[0], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("few", "--batch 1 is shared among the processes: 2 of them need as many images or more"),
        ("beside", "--compare trains beside plain PyTorch in one process"),
    ],
)
def test_what_several_processes_refuse(runs, name, message):
    folder, statuses = runs
    assert statuses[name] == [[2, 2]]
    text = log(folder, name)
    assert text.count(message) == 1, text
    assert not (folder / name).exists()


def test_fsdp_needs_torchrun(capsys):
    from fastvit_kernels.commands import cli

    assert cli.main(["train", "--fsdp"]) == 2
    assert "torchrun --nproc-per-node N -m fastvit_kernels train --fsdp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "message"),
    [
        (None, "3 processes on this machine, and torch sees 2 GPUs; --nproc-per-node 2 or fewer"),
        ("mps", "--device mps: torchrun gives each process a GPU; say cpu or cuda"),
    ],
)
def test_more_processes_than_gpus(monkeypatch, device, message):
    for name, value in dict(RANK=2, LOCAL_RANK=2, WORLD_SIZE=3, LOCAL_WORLD_SIZE=3).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(CommandError, match=message):
        processes.join(Namespace(device=device, fsdp=False))


def test_only_a_peer_that_is_gone_is_said_to_be_gone():
    assert processes.lost(RuntimeError("[gloo] Connection closed by peer"))
    assert not processes.lost(RuntimeError("a matrix of another shape"))
    assert not processes.lost(ValueError("the socket"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_run_that_ends_leaves_signals_and_files_as_they_were():
    def seen():
        wakeup = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(wakeup)
        return wakeup, signal.getsignal(signal.SIGTERM), len(os.listdir("/proc/self/fd"))

    before = seen()
    with processes.ended_together(processes.Processes(0, 1, True), print):
        assert all(a != b for a, b in zip(seen(), before, strict=True))
    assert seen() == before


def test_the_blocks_of_a_model():
    """The list with most parameters: of modules of one class, what else is between them aside."""
    model = create_vit("vit_mnist")
    assert processes.blocks_of(model) == list(model.blocks)
    linear, norm, small = (lambda: nn.Linear(8, 8)), (lambda: nn.LayerNorm(8)), nn.Linear(2, 2)
    layers = [linear(), norm(), linear(), linear()]
    stem = nn.Sequential(small, small)
    found = processes.blocks_of(nn.ModuleDict({"stem": stem, "layers": nn.ModuleList(layers)}))
    assert found == [layers[0], layers[2], layers[3]]
    assert processes.blocks_of(nn.Sequential(linear(), norm())) == []


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_fsdp_shards_every_block_then_the_model(monkeypatch, dtype):
    """docs/train.md: in bf16 weights and activations are, gradients are reduced in fp32."""
    from torch.distributed import device_mesh, fsdp

    sharded_, model = [], create_vit("vit_mnist")

    def fully_shard(module, mesh, mp_policy):
        sharded_.append((module, mesh, mp_policy))

    monkeypatch.setattr(processes.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(device_mesh, "init_device_mesh", lambda *words: words)
    monkeypatch.setattr(fsdp, "fully_shard", fully_shard)
    assert processes.distribute(model, torch.device("cpu"), True, dtype) is model
    assert [module for module, *_ in sharded_] == [*model.blocks, model]
    for _, mesh, policy in sharded_:
        assert mesh == ("cpu", (3,))
        wanted = torch.float32 if dtype else None
        assert (policy.param_dtype, policy.reduce_dtype) == (dtype, wanted)


def test_ddp_looks_for_unused_parameters_of_hosts_alone(monkeypatch):
    seen = []
    monkeypatch.setattr(
        nn.parallel, "DistributedDataParallel", lambda model, **words: seen.append(words) or model
    )
    for model in (create_vit("vit_mnist"), nn.Linear(2, 2)):
        for device in ("cpu", "cuda:1"):
            processes.distribute(model, torch.device(device), False, None)
    assert [(w["device_ids"], w["find_unused_parameters"]) for w in seen] == [
        (None, False),
        ([1], False),
        (None, True),
        ([1], True),
    ]


@pytest.mark.parametrize(
    ("seen", "given", "device", "backend"),
    [
        (0, None, "cpu", "gloo"),
        (2, None, "cuda:1", "cpu:gloo,cuda:nccl"),
        (2, "cpu", "cpu", "gloo"),
    ],
)
def test_each_process_takes_the_gpu_of_its_rank(monkeypatch, seen, given, device, backend):
    for name, value in dict(RANK=5, LOCAL_RANK=1, WORLD_SIZE=8).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    chosen, started = [], []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        processes.dist, "init_process_group", lambda *words, **_: started.append(words)
    )
    monkeypatch.setattr(processes.dist, "get_rank", lambda: 5)
    monkeypatch.setattr(processes.dist, "get_world_size", lambda: 8)
    found = processes.join(Namespace(device=given, fsdp=False))
    assert found == (processes.Processes(5, 8, True), torch.device(device))
    assert started == [(backend,)] and chosen == [torch.device(device)] * (device != "cpu")


def test_the_line_of_the_manual(tmp_path):
    """torchrun itself: the digits, one epoch, the report of the first process."""
    words = ["--nproc-per-node", "2", "-m", "fastvit_kernels", "train", "--fsdp", "--epochs", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, "--no-check", "--batch", "512"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "Processes: 2, FSDP2" in done.stdout and done.stdout.count("Held-out accuracy") == 1
    names = {path.name for path in (tmp_path / "runs" / "digits").iterdir()}
    assert {"checkpoint.pt", "weights.pth", "summary.json", "attention.png"} <= names
    folder = tmp_path / "runs" / "digits"
    weights = torch.load(folder / "weights.pth", weights_only=True)
    held = checkpoint.load(folder / "checkpoint.pt")["model"]
    assert held.keys() == weights.keys()
    assert all(torch.equal(held[name], value) for name, value in weights.items())
