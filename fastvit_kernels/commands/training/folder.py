"""The folder of a run: its files, its checkpoints, and which folder is free.

One process writes checkpoint.pt. Several write a folder checkpoint-EPOCH by
torch.distributed.checkpoint: each process its shards, the first one run.pt, and the folder gets its
name when all of it is there. Any number of processes reads either.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor, distribute_tensor

from ..console import CommandError, refusing
from .checkpoint import load, save, unwritten
from .processes import Processes
from .settings import Settings, flag_of, make_settings, read_settings

CHECKPOINT, METRICS = "checkpoint.pt", "metrics.csv"
WEIGHTS, SUMMARY = "weights.pth", "summary.json"
CURVES, CONFUSION, ATTENTION = "curves.png", "confusion.png", "attention.png"
WRITTEN = (CHECKPOINT, METRICS, WEIGHTS, SUMMARY, CURVES, CONFUSION, ATTENTION)
RUN = "run.pt"  # in the folder of several processes: all but the tensors
_NAME = re.compile(r"checkpoint-\d{4,}")
_LEFT = re.compile(r"\.?checkpoint-\d{4,}(\.tmp|\.gone)*")  # by a process that was killed
# All that the .metadata of tensors names, besides dtypes. BytesStorageMetadata, which is not here,
# would let torch read what is no tensor with pickle.
_NAMED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # its name in Python 3.13
}  # fmt: skip

State = dict[str, dict[str, Tensor]]  # "model", "optimizer", ...: tensors by name


class _Unpickler(pickle.Unpickler):
    """Finds the names above and no other, so that nothing a file brings is called."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or name in _NAMED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its .metadata names {module}.{name}")


class _Reader(dcp.FileSystemReader):
    """torch's reader, which would trust the pickle in .metadata."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            return _Unpickler(file).load()


def _cause(error: BaseException) -> BaseException:
    """What went wrong in the first process that failed."""
    failures = getattr(error, "failures", None)
    return next(iter(failures.values()))[0] if failures else error


def latest_shards(folder: Path) -> Path | None:
    """The newest whole checkpoint of several processes in a run folder."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def remove_shards(folder: Path, but: Path | None = None) -> None:
    """Remove every checkpoint of several processes, whole or not, but one; no half of one keeps
    its name."""
    for path in folder.glob("*checkpoint-*"):
        if path != but and _LEFT.fullmatch(path.name):
            gone = path.with_name(f".{path.name.lstrip('.')}.gone")
            shutil.rmtree(gone, ignore_errors=True)
            if path.exists():
                os.replace(path, gone)
                shutil.rmtree(gone, ignore_errors=True)


def save_shards(folder: Path, content: dict[str, Any], state: State, processes: Processes) -> None:
    """Write the checkpoint of the newest epoch, then remove the older ones.

    Args:
        content: what `load` reads back; its history counts the epochs.
        state: DTensors are written by their shards, other tensors once.
    """
    target = folder / f"checkpoint-{len(content['history']):04d}"
    temporary = folder / f".{target.name}.tmp"
    processes.agree(lambda: shutil.rmtree(temporary, ignore_errors=True))
    try:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(temporary))
    except (OSError, dcp.CheckpointException) as error:
        raise unwritten(target, _cause(error)) from error

    def name_it() -> None:
        save(temporary / RUN, content)
        os.replace(temporary, target)
        remove_shards(folder, target)
        (folder / CHECKPOINT).unlink(missing_ok=True)

    processes.agree(name_it)


def by_name(state: State) -> dict[str, Tensor]:
    """Tensors by the names of torch.distributed.checkpoint: model.blocks.0.norm1.weight."""
    return {f"{part}.{name}": t for part, tensors in state.items() for name, t in tensors.items()}


def _missing(path: Path, wanted: dict[str, Tensor], held: dict[str, Any]) -> set[str]:
    """Names that a checkpoint lacks. `held` maps its own names to shapes.

    Raises: CommandError where the checkpoint is of another model.
    """
    missing = set(wanted) - set(held)
    differences = [
        f"{name} is {tuple(shape)} there and {tuple(wanted[name].shape)} here"
        for name, shape in held.items() if name in wanted and shape != wanted[name].shape
    ]  # fmt: skip
    differences += [f"{name} is only there" for name in sorted(set(held) - set(wanted))]
    differences += [f"{name} is only here" for name in sorted(missing) if name.startswith("model.")]
    if differences:
        raise CommandError(f"{path} is a checkpoint of another model: {'; '.join(differences[:3])}")
    return missing


@torch.no_grad()
def restore(path: Path, state: State, content: dict[str, Any]) -> set[str]:
    """Read tensors in place, and give the names that the checkpoint does not hold.

    Args:
        path: checkpoint.pt, of which `content` is what `load` has read, or the folder of shards.
    Raises: CommandError where it is of another model; KeyError where it lacks a part of the state.
    """
    wanted = by_name(state)
    if not path.is_file():
        return _restore_shards(path, wanted)
    held = by_name({part: content[part] for part in state})
    missing = _missing(path, wanted, {name: value.shape for name, value in held.items()})
    for name, value in held.items():
        target = wanted[name]
        if isinstance(target, DTensor):
            value = value.to(target.device)
            value = distribute_tensor(value, target.device_mesh, target.placements)
        target.copy_(value)
    return missing


def _restore_shards(path: Path, wanted: dict[str, Tensor]) -> set[str]:
    reader, what = _Reader(path), f"{path} cannot be read as a checkpoint"
    with refusing(what, Exception):
        held: dict[str, Any] = reader.read_metadata().state_dict_metadata
        shapes = {name: entry.size for name, entry in held.items()}
    missing = _missing(path, wanted, shapes)
    found = {name: tensor for name, tensor in wanted.items() if name in held}
    with warnings.catch_warnings():
        # of one process that reads alone
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(found, storage_reader=reader, no_dist=not dist.is_initialized())
        except (OSError, dcp.CheckpointException) as error:
            raise CommandError(f"{what}: {_cause(error)}") from error
    return missing


def read_run(folder: Path) -> tuple[dict[str, Any], Path]:
    """The newer checkpoint of a run folder without its shards, and its path."""
    shards, alone = latest_shards(folder), folder / CHECKPOINT
    if shards is None:
        return load(alone), alone
    content = load(shards / RUN)
    if alone.is_file() and len((newer := load(alone))["history"]) > len(content["history"]):
        return newer, alone
    return content, shards


def _latest_folder(name: str) -> Path:
    def number(folder: Path) -> int:
        return int(folder.name.removeprefix(name).lstrip("-") or 1)

    pattern = re.compile(rf"{name}(-\d+)?")
    found = [
        path for path in Path("runs").glob("*")
        if pattern.fullmatch(path.name) and ((path / CHECKPOINT).exists() or latest_shards(path))
    ]  # fmt: skip
    if not found:
        raise CommandError(f"there is no run of --data {name} in runs/; name its folder with --out")
    return max(found, key=number)


def _resumed_settings(path: Path, content: dict[str, Any], given: dict[str, Any]) -> Settings:
    settings = read_settings(content, path)
    if "data_dir" in given:
        given = {**given, "data_dir": str(Path(given["data_dir"]).resolve())}
    for name, value in given.items():
        if value != getattr(settings, name):
            raise CommandError(
                f"{flag_of(name)} {value} differs from the {getattr(settings, name)} of the run "
                f"in {path.parent}; --resume keeps a run's settings, --out starts another run"
            )
    return settings


def open_run(
    given: dict[str, Any], out: Path | None, resume: bool, device: torch.device
) -> tuple[Path, Settings, Path | None]:
    """The run folder, its settings, and the path of the checkpoint where the run goes on.

    Args:
        given: the settings that the command line gives.
        out: the folder that it names, if any; else the first of runs/NAME, runs/NAME-2, ... that is
            free, or the last that holds a run where one goes on.
    """
    name = given.get("data", "digits")
    if resume:
        folder = out or _latest_folder(name)
        content, path = read_run(folder)
        return folder, _resumed_settings(path, content, given), path
    settings = make_settings(given, device)
    folder, number = out or Path("runs") / name, 1
    while out is None and folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    taken = [n for n in WRITTEN if (folder / n).exists()]
    if (shards := latest_shards(folder)) is not None:
        taken.append(shards.name)
    if taken:
        raise CommandError(
            f"{folder} holds a run already ({taken[0]}); go on with it with --resume --out "
            f"{folder}, or name another folder"
        )
    if folder.exists() and not folder.is_dir():
        raise CommandError(f"--out {folder} is not a folder")
    return folder, settings, None
