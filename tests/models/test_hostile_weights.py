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


def _vit(**overrides: Any) -> VisionTransformer:
    arguments = dict(img_size=16, patch_size=8, num_classes=3, embed_dim=C, depth=1, num_heads=2)
    return VisionTransformer(**{**arguments, **overrides})


def _good(**changes: Any) -> dict[str, Any]:
    torch.manual_seed(5)
    return {**_vit().state_dict(), **changes}


class _Runs:
    """A pickle of it makes a file when it is read by a trusting unpickler."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


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


def _pickle_changed(old: bytes, new: bytes, **changes: Any) -> bytes:
    """A .pth whose pickle says `new` where torch.save wrote `old`."""

    def change(name: str, content: bytes) -> bytes:
        if not name.endswith("data.pkl"):
            return content
        assert old in content
        return content.replace(old, new, 1)

    return _rezipped(_saved(_good(**changes)), change)


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


def _npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _npz_header(shape: Any, held: int, descr: str = "<f4") -> bytes:
    """An .npz of one array whose header says `shape` and which holds `held` numbers."""
    header = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
    array = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(4 * held)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(f"{NAME}.npy", array)
    return buffer.getvalue()


def _npz_bomb() -> bytes:
    """Zeros, a thousandth of their size, larger than what is unpacked freely in this test."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{NAME: np.zeros(2**20, np.float32)})
    return buffer.getvalue()


def _npz_directory_lies() -> bytes:
    """Many members of the directory lead to the same bytes."""
    content = bytearray(_npz(**{NAME: np.ones(C, np.float32)}))
    start = content.index(b"PK\x01\x02")
    end = content.index(b"PK\x05\x06")
    entry = bytes(content[start:end])
    tail = bytearray(content[end:])
    struct.pack_into("<HHI", tail, 8, 50, 50, 50 * len(entry))
    return bytes(content[:start]) + 50 * entry + bytes(tail)


def _half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _random() -> bytes:
    return np.random.default_rng(1).bytes(4096)


def _legacy(contents: Any) -> bytes:
    return _saved(contents, _use_new_zipfile_serialization=False)


_GOOD_NPZ = _npz(**{NAME: np.ones(C, np.float32)})
_READ = "cannot read"

# name of the file -> (its content, what the error says of it)
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty.pth": (lambda: b"", "it is empty"),
    "random.pth": (lambda: _random(), "it is not a checkpoint of torch.save"),
    "truncated.pth": (lambda: _half(_saved(_good())), _READ),
    "truncated-legacy.pth": (lambda: _half(_legacy(_good())), _READ),
    "truncated.safetensors": (lambda: _half(safetensors.save(_good())), _READ),
    "truncated.npz": (lambda: _half(_GOOD_NPZ), _READ),
    "flipped-bytes.npz": (
        lambda: _GOOD_NPZ.replace(np.ones(1, np.float32).tobytes(), b"\x01\x02\x03\x04"),
        _READ,
    ),
    "runs-code.pth": (lambda: _saved(_good(extra=_Runs(TOKENS))), r"more than tensors \(getattr\)"),
    "runs-code-plain-pickle.bin": (
        lambda: pickle.dumps(_Runs(TOKENS)),
        "it is not a checkpoint",
    ),
    "objects.npz": (lambda: _npz(x=np.array([_Runs(TOKENS)], object)), "x.npy holds Python obj"),
    "storage-too-short.pth": (
        lambda: _rezipped(_saved(_good()), lambda n, c: c[:4] if "/data/" in n else c),
        _READ,
    ),
    "size-past-the-storage.pth": (
        lambda: _pickle_changed(b"K\x10\x85", b"K\x63\x85"),
        _READ,
    ),
    "expanded.pth": (
        lambda: _saved({"state_dict": {"model": _good(**{NAME: torch.ones(1).expand(2**40)})}}),
        rf"'{NAME}' claims \(1099511627776,\) and holds 1 numbers",
    ),
    "itself.pth": (lambda: _saved(_itself()), "source must hold tensors, got itself as 'model'"),
    "laughs.pth": (lambda: _saved(_laughs()), "'a' must be a tensor or an array, got dict"),
    "bomb.pth": (
        lambda: _rezipped(_saved({NAME: torch.zeros(2**20)}), lambda n, c: c, zipfile.ZIP_DEFLATED),
        "claim to unpack to",
    ),
    "a-list.pth": (lambda: _saved([torch.ones(1)]), "source must be a path or hold a mapping"),
    "number-keys.pth": (lambda: _saved({0: torch.ones(1)}), "keys of the source must be str"),
    "bomb.npz": (_npz_bomb, "claim to unpack to"),
    "directory-lies.npz": (_npz_directory_lies, _READ),
    "header-claims-4-TiB.npz": (lambda: _npz_header((2**40,), C), "must hold 64 bytes"),
    "header-not-numbers.npz": (lambda: _npz_header(("a",), C), _READ),
    "header-code.npz": (lambda: _npz_header("__import__('os')", C), _READ),
    "layers-without-end.npz": (
        lambda: _npz(**{"Transformer/encoderblock/LayerNorm_0/scale": np.ones((2**40, 0))}),
        "must hold 1 to 1000 layers",
    ),
    "text.npz": (lambda: _npz(**{NAME: np.array(["a"])}), "must hold numbers"),
}


TYPE_ERRORS = {
    "laughs.pth",
    "a-list.pth",
    "number-keys.pth",
    "text.npz",
}


# name -> (state dict, the error, what it says): the same from memory and, where torch.save can
# write it, from a file.
STATE_DICTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "shape": (lambda: _good(**{NAME: torch.ones(C + 1)}), ValueError, r"must have shape \(16,\)"),
    "empty": (dict, ValueError, "no key of the source is a ViT's"),
    "of another model": (
        lambda: {"conv1.weight": torch.ones(1)},
        ValueError,
        "no key of the source is a ViT's",
    ),
    "deeper only": (
        lambda: {"blocks.9.norm1.weight": torch.ones(C)},
        ValueError,
        "source must hold a parameter of the model, got none",
    ),
    "NaN in the last": (
        lambda: _good(**{"head.bias": torch.tensor([1.0, float("nan"), 0.0])}),
        ValueError,
        "head.bias must hold finite numbers, got 1 NaN or infinite",
    ),
    "infinity": (
        lambda: _good(**{NAME: torch.full((C,), -torch.inf)}),
        ValueError,
        "norm.weight must hold finite numbers, got 16 NaN or infinite",
    ),
    "complex": (
        lambda: _good(**{NAME: torch.ones(C, dtype=torch.complex64)}),
        ValueError,
        "floating point, got torch.complex64",
    ),
    "meta": (
        lambda: _good(**{NAME: torch.ones(C, device="meta")}),
        TypeError,
        "'norm.weight' must be a dense tensor, got a meta one",
    ),
    "sparse": (
        lambda: _good(**{NAME: torch.ones(C).to_sparse()}),
        TypeError,
        "'norm.weight' must be a dense tensor, got a torch.sparse_coo one",
    ),
    "a list of numbers": (lambda: _good(**{NAME: [1.0] * C}), TypeError, "must be a tensor or an"),
    "two of one name": (
        lambda: _good(**{f"module.{NAME}": torch.ones(C)}),
        ValueError,
        f"two keys.*mean '{NAME}'",
    ),
    "kernel and weight": (
        lambda: {"encoder/kernel": torch.ones(2, 2), "encoder/weight": torch.ones(2, 2)},
        ValueError,
        "two keys of the source mean 'encoder.weight'",
    ),
    "wide positions": (
        lambda: _good(pos_embed=torch.ones(1, 10, 4 * C)),
        ValueError,
        r"pos_embed must have shape \(1, 5, 16\), got \(1, 10, 64\)",
    ),
}

# arguments after the model -> the error and what it says
OTHERS: dict[str, tuple[Callable[[Path], tuple[Any, Any]], type[Exception], str]] = {
    "missing": (lambda d: (d / "no.pth", None), FileNotFoundError, "no.pth: No such file"),
    "directory": (lambda d: (_directory(d), None), FileNotFoundError, "vit.pth: it is no regular"),
    "loop": (lambda d: (_loop(d), None), FileNotFoundError, "vit.pth: Too many levels"),
    "pipe": (lambda d: (_pipe(d), None), FileNotFoundError, "vit.pth: it is no regular file"),
    "NUL": (lambda d: ("a\0b.pth", None), FileNotFoundError, "there is no file"),
    "suffix": (lambda d: (_file(d / "vit.onnx"), None), ValueError, "vit.onnx must end in .pth"),
    "None": (lambda d: (None, None), TypeError, "source must be a path .* got NoneType"),
    "a tensor": (lambda d: (torch.ones(1), None), TypeError, "source must be a path .* got Tensor"),
    "grid of three": (lambda d: (_good(), (2, 2, 2)), TypeError, r"must be \(rows, cols\) or"),
    "grid of floats": (lambda d: (_good(), (2.0, 2)), TypeError, "grid_size must be an int, got"),
    "grid of zeros": (lambda d: (_good(), (0, 4)), ValueError, "grid_size must be at least 1, got"),
    "grid too large": (lambda d: (_good(), (10**9, 10**9)), ValueError, "the grid given as grid"),
}


def _file(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def _directory(where: Path) -> Path:
    path = where / "vit.pth"
    path.mkdir()
    return path


def _loop(where: Path) -> Path:
    path = where / "vit.pth"
    path.symlink_to(where / "other.pth")
    (where / "other.pth").symlink_to(path)
    return path


def _pipe(where: Path) -> Path:
    path = where / "vit.pth"
    os.mkfifo(path)
    return path


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
    make, message = FILES[name]
    (tmp_path / name).write_bytes(make())
    error = TypeError if name in TYPE_ERRORS else ValueError
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
    source, grid_size = make(tmp_path)
    refused(error, message, source, grid_size)


def test_malicious_pickle_is_real(tmp_path, monkeypatch):
    """Else the tests above would prove nothing."""
    monkeypatch.chdir(tmp_path)
    torch.load(io.BytesIO(FILES["runs-code.pth"][0]()), weights_only=False)
    assert TOKENS.exists()


def test_env_cannot_trust_pickles(refused, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    (tmp_path / "vit.pth").write_bytes(FILES["runs-code.pth"][0]())
    refused(ValueError, "weights_only=False", tmp_path / "vit.pth")


def test_load_weights_rejects_overflow():
    model = _vit().half()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"some that torch\.float16 cannot hold"):
        load_weights(model, _good(**{NAME: torch.full((C,), 1e6)}))
    assert all(torch.equal(before[name], x) for name, x in model.state_dict().items())


def test_gpu_checkpoint_on_cpu(tmp_path):
    content = _pickle_changed(b"X\x03\x00\x00\x00cpu", b"X\x07\x00\x00\x00cuda:99")
    (tmp_path / "vit.pth").write_bytes(content)
    model = _vit()
    assert not load_weights(model, tmp_path / "vit.pth").missing
    assert all(torch.equal(_good()[name], x) for name, x in model.state_dict().items())


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
    """Among them a compressed archive, and one with tensors that share a storage."""
    monkeypatch.setattr(weight_files, "UNPACKED_FREELY", 0)
    good = _good()
    tied = dict(good, extra=good["head.weight"].view(-1)[:3])
    np.savez_compressed(tmp_path / "a.npz", **{n: x.numpy() for n, x in good.items()})
    (tmp_path / "a.pth").write_bytes(_saved(tied))
    (tmp_path / "b.pth").write_bytes(_legacy(tied))
    (tmp_path / "a.safetensors").write_bytes(safetensors.save(good))
    for path in sorted(tmp_path.iterdir()):
        model = _vit()
        assert not load_weights(model, path).missing
        assert all(torch.equal(good[name], x) for name, x in model.state_dict().items())
