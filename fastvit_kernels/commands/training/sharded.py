"""The checkpoint of a run of several processes, by torch.distributed.checkpoint.

A folder checkpoint-EPOCH: each process writes its shards, the first one run.pt, and the folder gets
its name when all of it is there. Any number of processes can read it.
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
from . import checkpoint
from .processes import Processes

RUN = "run.pt"
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


def latest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run folder."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _remove(path: Path) -> None:
    """Remove a checkpoint so that no half of it keeps the name."""
    gone = path.with_name(f".{path.name.lstrip('.')}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if path.exists():
        os.replace(path, gone)
        shutil.rmtree(gone, ignore_errors=True)


def remove_all(folder: Path, but: Path | None = None) -> None:
    """Remove every sharded checkpoint, whole or not, but one."""
    for path in folder.glob("*checkpoint-*"):
        if path != but and _LEFT.fullmatch(path.name):
            _remove(path)


def save(
    folder: Path, content: dict[str, Any], tensors: dict[str, Tensor], processes: Processes
) -> None:
    """Write the checkpoint of the newest epoch, then remove the older ones.

    Args:
        content: what `checkpoint.load` reads back; its history counts the epochs.
        tensors: by name; DTensors by their shards, others once.
    """
    target = folder / f"checkpoint-{len(content['history']):04d}"
    temporary = folder / f".{target.name}.tmp"
    processes.agree(lambda: shutil.rmtree(temporary, ignore_errors=True))
    try:
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(temporary))
    except (OSError, dcp.CheckpointException) as error:
        raise checkpoint.unwritten(target, _cause(error)) from error

    def name_it() -> None:
        checkpoint.save(temporary / RUN, content)
        os.replace(temporary, target)
        remove_all(folder, target)
        (folder / checkpoint.NAME).unlink(missing_ok=True)

    processes.agree(name_it)


def missing_from(path: Path, tensors: dict[str, Tensor], held: dict[str, Any]) -> set[str]:
    """Names that a checkpoint lacks. `held` maps its own names to shapes.

    Raises: CommandError where the checkpoint is of another model.
    """
    missing = set(tensors) - set(held)
    differences = [
        f"{name} is {tuple(shape)} there and {tuple(tensors[name].shape)} here"
        for name, shape in held.items() if name in tensors and shape != tensors[name].shape
    ]  # fmt: skip
    differences += [f"{name} is only there" for name in sorted(set(held) - set(tensors))]
    differences += [f"{name} is only here" for name in sorted(missing) if name.startswith("model.")]
    if differences:
        raise CommandError(f"{path} is a checkpoint of another model: {'; '.join(differences[:3])}")
    return missing


@torch.no_grad()
def copy(path: Path, tensors: dict[str, Tensor], whole: dict[str, Tensor]) -> set[str]:
    """`load` from the tensors of one process's checkpoint; a DTensor takes its shard."""
    missing = missing_from(path, tensors, {name: value.shape for name, value in whole.items()})
    for name, value in whole.items():
        target = tensors[name]
        if isinstance(target, DTensor):
            value = value.to(target.device)
            value = distribute_tensor(value, target.device_mesh, target.placements)
        target.copy_(value)
    return missing


def load(path: Path, tensors: dict[str, Tensor]) -> set[str]:
    """Read tensors in place from a checkpoint, and give the names that it does not hold.

    Raises: CommandError where it is damaged, holds other names, or other shapes.
    """
    reader, what = _Reader(path), f"{path} cannot be read as a checkpoint"
    with refusing(what, Exception):
        held: dict[str, Any] = reader.read_metadata().state_dict_metadata
        shapes = {name: entry.size for name, entry in held.items()}
    missing = missing_from(path, tensors, shapes)
    wanted = {name: tensor for name, tensor in tensors.items() if name in held}
    with warnings.catch_warnings():
        # of one process that reads alone
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            dcp.load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
        except (OSError, dcp.CheckpointException) as error:
            raise CommandError(f"{what}: {_cause(error)}") from error
    return missing
