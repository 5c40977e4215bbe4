"""Checkpoints that are corrupt or mean harm: a clear error, and the model keeps every bit."""

from __future__ import annotations

import io
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastvit_kernels import VisionTransformer, backend, load_weights
from fastvit_kernels.weights import files as weight_files

safetensors = pytest.importorskip("safetensors.torch")

C = 16
NAME = "norm.weight"  # (C,) in the model
TOKENS = Path("executed")
T, V = TypeError, ValueError


def _vit() -> VisionTransformer:
    return VisionTransformer(16, 8, num_classes=3, embed_dim=C, depth=1, num_heads=2)


def _good(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    return {**_vit().state_dict(), **changes}


def _named(x: Any) -> dict[str, Any]:
    return _good(**{NAME: x})


class _Runs:
    """A pickle of it makes a file when it is read by a trusting unpickler."""

    def __reduce__(self):
        return (Path.touch, (TOKENS,))


def _saved(contents: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer, **options)
    return buffer.getvalue()


def _rezipped(
    content: bytes, change: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED
) -> bytes:
    """A zip archive with `change` applied to the content of each member."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)), compression)
    return buffer.getvalue()


def _pickle_changed(old: bytes, new: bytes) -> bytes:
    """A .pth whose pickle says `new` where torch.save wrote `old`."""

    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return content
        assert old in content
        return content.replace(old, new, 1)

    return _rezipped(_saved(_good()), change)


def _itself() -> dict[str, Any]:
    """In a circle that does not lead through the first mapping."""
    inner: dict[str, Any] = dict(_good())
    inner["state_dict"] = {"model": inner}
    return {"model": inner}


def _laughs() -> dict[str, Any]:
    """Mappings that share their values: 2**40 ways through, 40 mappings."""
    inner: dict[str, Any] = _good()
    for _ in range(40):
        inner = {"a": inner, "b": inner}
    return inner


def _npz(save: Callable[..., None] = np.savez, **arrays: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **arrays)
    return buffer.getvalue()


def _npz_header(shape: Any) -> bytes:
    """An .npz of one array whose header says `shape` and which holds C numbers."""
    header = repr({"descr": "<f4", "fortran_order": False, "shape": shape}).encode()
    header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(4 * C)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{NAME}.npy", array)
    return buffer.getvalue()


def _npz_directory_lies() -> bytes:
    """Many members of the directory lead to the same bytes."""
    content = bytearray(_GOOD_NPZ)
    start = content.index(b"PK\x01\x02")
    end = content.index(b"PK\x05\x06")
    entry = bytes(content[start:end])
    tail = bytearray(content[end:])
    struct.pack_into("<HHI", tail, 8, 50, 50, 50 * len(entry))
    return bytes(content[:start]) + 50 * entry + bytes(tail)


def _half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _cut_storages() -> bytes:
    return _rezipped(_saved(_good()), lambda n, c: c[:4] if "/data/" in n else c)


def _zeros_zipped() -> bytes:
    """A thousandth of their size, larger than what is unpacked freely in this test."""
    zeros = _saved({NAME: torch.zeros(2**20)})
    return _rezipped(zeros, lambda n, c: c, zipfile.ZIP_DEFLATED)


_GOOD_NPZ = _npz(**{NAME: np.ones(C, np.float32)})
_ONE = np.ones(1, np.float32).tobytes()
_READ = "cannot read"
_LAYERS = "Transformer/encoderblock/LayerNorm_0/scale"

# name of the file -> (its content, the error, what that says of it)
FILES: dict[str, tuple[Callable[[], bytes], type[Exception], str]] = {
    "empty.pth": (bytes, V, "it is empty"),
    "text.pth": (lambda: b"hello", V, "it is not a checkpoint of torch.save"),
    "truncated.pth": (lambda: _half(_saved(_good())), V, _READ),
    "truncated.safetensors": (lambda: _half(safetensors.save(_good())), V, _READ),
    "truncated.npz": (lambda: _half(_GOOD_NPZ), V, _READ),
    "flipped-bytes.npz": (lambda: _GOOD_NPZ.replace(_ONE, b"\x01\x02\x03\x04"), V, _READ),
    "code.pth": (lambda: _saved(_good(x=_Runs())), V, r"more than tensors \(getattr\)"),
    "code-alone.bin": (lambda: pickle.dumps(_Runs()), V, "it is not a checkpoint"),
    "objects.npz": (lambda: _npz(x=np.array([_Runs()], object)), V, "x.npy holds Python obj"),
    "storage-too-short.pth": (_cut_storages, V, _READ),
    "past-the-storage.pth": (lambda: _pickle_changed(b"K\x10\x85", b"K\x63\x85"), V, _READ),
    "expanded.pth": (
        lambda: _saved({"state_dict": {"model": _named(torch.ones(1).expand(2**40))}}),
        V,
        rf"'{NAME}' claims \(1099511627776,\) and holds 1 numbers",
    ),
    "itself.pth": (lambda: _saved(_itself()), V, "must hold tensors, got itself as 'model'"),
    "laughs.pth": (lambda: _saved(_laughs()), T, "'a' must be a tensor or an array, got dict"),
    "bomb.pth": (_zeros_zipped, V, "claim to unpack to"),
    "a-list.pth": (lambda: _saved([torch.ones(1)]), T, "source must be a path or hold a mapping"),
    "number-keys.pth": (lambda: _saved({0: torch.ones(1)}), T, "keys of the source must be str"),
    "bomb.npz": (
        lambda: _npz(np.savez_compressed, x=np.zeros(2**20, np.float32)),
        V,
        "claim to unpack to",
    ),
    "directory-lies.npz": (_npz_directory_lies, V, _READ),
    "header-claims-4-TiB.npz": (lambda: _npz_header((2**40,)), V, "must hold 64 bytes"),
    "header-code.npz": (lambda: _npz_header("__import__('os')"), V, _READ),
    "no-end.npz": (lambda: _npz(**{_LAYERS: np.ones((2**40, 0))}), V, "must hold 1 to 1000 layers"),
    "text.npz": (lambda: _npz(**{NAME: np.array(["a"])}), T, "must hold numbers"),
}

# name -> (state dict, the error, what it says): the same from memory and, where torch.save can
# write it, from a file.
STATE_DICTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "shape": (lambda: _named(torch.ones(C + 1)), V, r"must have shape \(16,\)"),
    "of another model": (lambda: {"conv1.x": torch.ones(1)}, V, "no key of the source is a ViT's"),
    "deeper only": (
        lambda: {"blocks.9.norm1.weight": torch.ones(C)},
        V,
        "source must hold a parameter of the model, got none",
    ),
    "NaN in the last": (
        lambda: _good(**{"head.bias": torch.tensor([1.0, float("nan"), 0.0])}),
        V,
        "head.bias must hold finite numbers, got 1 NaN or infinite",
    ),
    "complex": (lambda: _named(torch.ones(C) + 1j), V, "floating point, got torch.complex64"),
    "meta": (lambda: _named(torch.ones(C, device="meta")), T, "a dense tensor, got a meta one"),
    "sparse": (lambda: _named(torch.ones(C).to_sparse()), T, "got a torch.sparse_coo one"),
    "a list of numbers": (lambda: _named([1.0] * C), T, "must be a tensor or an"),
    "two of one name": (
        lambda: _good(**{f"module.{NAME}": torch.ones(C)}),
        V,
        f"two keys.*mean '{NAME}'",
    ),
    "kernel and weight": (
        lambda: {"encoder/kernel": torch.ones(2, 2), "encoder/weight": torch.ones(2, 2)},
        V,
        "two keys of the source mean 'encoder.weight'",
    ),
    "wide positions": (
        lambda: _good(pos_embed=torch.ones(1, 10, 4 * C)),
        V,
        r"pos_embed must have shape \(1, 5, 16\), got \(1, 10, 64\)",
    ),
}

# a path of its own -> (source, grid_size); the error and what it says
OTHERS: dict[str, tuple[Callable[[Path], tuple[Any, Any]], type[Exception], str]] = {
    "missing": (lambda p: (p, None), FileNotFoundError, "vit.pth: No such file"),
    "directory": (lambda p: (p.mkdir() or p, None), FileNotFoundError, "it is no regular file"),
    "pipe": (lambda p: (os.mkfifo(p) or p, None), FileNotFoundError, "it is no regular file"),
    "loop": (lambda p: (p.symlink_to(p) or p, None), FileNotFoundError, "Too many levels"),
    "NUL": (lambda p: ("a\0b.pth", None), FileNotFoundError, "there is no file"),
    "suffix": (lambda p: (__file__, None), V, "test_hostile_weights.py must end in .pth"),
    "None": (lambda p: (None, None), T, "source must be a path .* got NoneType"),
    "grid of three": (lambda p: (_good(), (2, 2, 2)), T, r"must be \(rows, cols\) or"),
    "grid of zeros": (lambda p: (_good(), (0, 4)), V, "grid_size must be at least 1, got"),
    "grid too large": (lambda p: (_good(), (10**9, 10**9)), V, "the grid given as grid"),
}


@pytest.fixture(autouse=True)
def _torch_backend():
    with backend("torch"):
        yield


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Load, expect an error, and see that the model has kept its bits and no code has run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weight_files, "UNPACKED_FREELY", 2**20)

    def check(error: type[Exception], message: str, source: Any, grid_size: Any = None) -> str:
        model = _vit()
        before = {name: x.clone() for name, x in model.state_dict().items()}
        tracemalloc.start()
        with pytest.raises(error, match=message) as caught:
            load_weights(model, source, grid_size=grid_size)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert "\n" not in str(caught.value) and "add_safe_globals" not in str(caught.value)
        assert type(caught.value) is error and str(caught.value).startswith("load_weights: ")
        assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())
        assert not TOKENS.exists()
        assert peak < 2**24
        return str(caught.value)

    return check


@pytest.mark.parametrize("name", FILES)
def test_hostile_file(name, refused, tmp_path):
    make, error, message = FILES[name]
    (tmp_path / name).write_bytes(make())
    assert name in refused(error, message, tmp_path / name)


@pytest.mark.parametrize("name", STATE_DICTS)
def test_hostile_state_dict(name, refused, tmp_path):
    make, error, message = STATE_DICTS[name]
    refused(error, message, make())
    path = tmp_path / "vit.pth"
    torch.save(make(), path)
    assert str(path) in refused(error, message, path)


@pytest.mark.parametrize("name", OTHERS)
def test_hostile_source(name, refused, tmp_path):
    make, error, message = OTHERS[name]
    refused(error, message, *make(tmp_path / "vit.pth"))


def test_env_cannot_trust_pickles(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    (tmp_path / "vit.pth").write_bytes(FILES["code.pth"][0]())
    refused(V, "weights_only=False", tmp_path / "vit.pth")
    torch.load(tmp_path / "vit.pth", weights_only=False)
    assert TOKENS.exists()  # else all this would prove nothing


def test_load_weights_rejects_overflow():
    model = _vit().half()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"some that torch\.float16 cannot hold"):
        load_weights(model, _named(torch.full((C,), 1e6)))
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


def test_load_weights_rejects_meta_model():
    with torch.device("meta"):
        model = _vit()
    with pytest.raises(ValueError, match=r"model must have memory.*to_empty"):
        load_weights(model, _good())


def test_report_strange_keys():
    """Names that int() or sorted() would stumble over, after the weights were written."""
    strange = ["x.0", "x.a", "x.²", "x." + "9" * 5000, "", "."]
    source = {**_good(), **{name: torch.ones(1) for name in strange}}
    del source[NAME]
    report = load_weights(_vit(), source)
    assert report.missing == (NAME,)
    assert set(report.unexpected) == set(strange)


def test_ordinary_files_still_load(tmp_path, monkeypatch):
    """Compressed, of tensors that share a storage, from a GPU that is not here."""
    monkeypatch.setattr(weight_files, "UNPACKED_FREELY", 0)
    good = _good()
    tied = dict(good, extra=good["head.weight"].view(-1)[:3])
    arrays = {name: x.numpy() for name, x in good.items()}
    contents = {
        "a.npz": _npz(np.savez_compressed, **arrays),
        "a.pth": _saved(tied),
        "legacy.bin": _saved(tied, _use_new_zipfile_serialization=False),
        "gpu.PT": _pickle_changed(b"X\x03\x00\x00\x00cpu", b"X\x07\x00\x00\x00cuda:99"),
        "a.safetensors": safetensors.save(good),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        model = _vit()
        assert not load_weights(model, tmp_path / name).missing
        assert all(torch.equal(good[n], x) for n, x in model.state_dict().items()), name
