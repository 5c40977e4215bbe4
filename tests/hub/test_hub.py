"""What layout.py writes, loaded by the Hub's own library from the disk."""

from __future__ import annotations

import ast
import base64
import copy
import hashlib
import json
import sys

import pytest
import torch
from torch import nn

from fastvit_kernels import layer_norm
from tests.hub import layout
from tests.hub.layout import BACKENDS, layer_names, main, sources

kernels = pytest.importorskip("kernels")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "fastvit-kernels"
    assert main([str(folder), "--version", "3"]) == 0
    return folder


@pytest.fixture(scope="module")
def loaded(repository):
    return kernels.get_local_kernel(repository, backend="cpu")


def test_imports_are_relative_and_few():
    """What the Hub allows: the standard library, torch, the kernel itself; triton compiles it. A
    host library is imported inside a function, once a model of it is met."""
    allowed = {*sys.stdlib_module_names, "torch", "triton"}
    for path, content in sources().items():
        if not path.endswith(".py"):
            continue
        tree = ast.parse(content)
        assert b"import fastvit_kernels" not in content, path
        for node in tree.body:
            if isinstance(node, ast.Import):
                assert {name.name.split(".")[0] for name in node.names} <= allowed, path
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.split(".")[0] in allowed | {"__future__"}, path


def test_metadata_is_what_the_library_reads(repository):
    from kernels._rust import Metadata

    identities = set()
    for backend in BACKENDS:
        variant = repository / "build" / f"torch-{backend}"
        metadata = Metadata.read_from_file(variant / "metadata.json")
        assert (metadata.version, metadata.name.python_name) == (3, "fastvit_kernels")
        assert metadata.id.isidentifier()
        identities.add(metadata.id)
        held = json.loads((variant / "metadata.json").read_text())["digest"]["files"]
        there = {p.relative_to(variant).as_posix() for p in variant.rglob("*") if p.is_file()}
        there = {p for p in there if "__pycache__" not in p}
        assert set(held) == there - {"metadata.json"}
        for path, digest in held.items():
            content = (variant / path).read_bytes()
            assert base64.b64decode(digest) == hashlib.sha256(content).digest()
    assert len(identities) == len(BACKENDS) == 3
    assert repository.stat().st_mode & 0o777 == 0o755  # not the temporary folder's 0o700
    card = (repository / "README.md").read_text()
    assert "version=3" in card and ", ".join(layer_names()) in card


def test_another_content_is_another_build(tmp_path, monkeypatch):
    """Two builds in one process must not share module and operators."""
    found = []
    for i, content in enumerate((b"x = 1\n", b"x = 2\n", b"x = 2\n")):
        monkeypatch.setattr(layout, "sources", lambda content=content: {"one.py": content})
        variant, *_ = layout.write_layout(tmp_path / str(i), 3)
        found.append(json.loads((variant / "metadata.json").read_text())["id"])
    assert found[0] != found[1] == found[2]


def test_a_layout_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(layout.os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        layout.write_layout(tmp_path / "out", 3)
    assert [*tmp_path.iterdir()] == []


def test_what_is_imported_is_there():
    """Each relative import of a variant's files; those inside functions too."""
    files = sources()
    modules = {path.removesuffix(".py").removesuffix("/__init__") for path in files}
    for path, content in files.items():
        if not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.ImportFrom) and node.level:
                home = ["", *path.split("/")[:-1]][: len(path.split("/")) - node.level + 1]
                base = "/".join([*home[1:], *(node.module or "").split(".")]).strip("/")
                names = [f"{base}/{name.name}".strip("/") for name in node.names]
                assert base in modules or modules.issuperset(names), (path, base, names)


def test_two_builds_live_beside_each_other(loaded):
    """Functions, operators and swap_in of the loaded copy; the installed one keeps its own."""
    assert loaded.__name__ != "fastvit_kernels" and "layers" in loaded.__all__
    x, weight = torch.randn(3, 16), torch.randn(16)
    with loaded.backend("torch"):
        torch.testing.assert_close(loaded.layer_norm(x, weight), layer_norm(x, weight))
    assert hasattr(getattr(torch.ops, loaded.__name__), "layer_norm_fwd")
    assert hasattr(torch.ops.fastvit_kernels, "layer_norm_fwd")
    assert loaded.layer_norm.__module__.startswith(loaded.__name__)
    compiled = torch.compile(lambda x: loaded.layer_norm(x, weight), backend="eager")
    torch.testing.assert_close(compiled(x), layer_norm(x, weight), rtol=1e-5, atol=1e-5)


@kernels.use_kernel_forward_from_hub("FastvitLayerNorm")
class Norm(nn.LayerNorm):
    pass


@kernels.use_kernel_forward_from_hub("FastvitRMSNorm")
class RMS(nn.Module):
    """The forward of transformers' LlamaRMSNorm."""

    def __init__(self):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.randn(16)), 0.1

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


@pytest.mark.parametrize(
    ("kind", "name"), [(lambda: Norm(16, eps=0.1), "LayerNorm"), (RMS, "RMSNorm")]
)
def test_kernelize(repository, kind, name):
    host = kind()
    model = copy.deepcopy(host)
    repo = kernels.LocalLayerRepository(repository, layer_name=name)
    with kernels.use_kernel_mapping({f"Fastvit{name}": {"cpu": repo}}):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)
    forward = model.forward.__func__
    home = sys.modules[forward.__module__.partition(".")[0]]  # the build for this torch
    assert home.__name__ != "fastvit_kernels" and forward is getattr(home.layers, name).forward
    x = torch.randn(3, 16)
    with home.backend("torch"):
        a, b = model(x), host(x)
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        upstream = torch.randn(3, 16)
        a.backward(upstream)
        b.backward(upstream)
    torch.testing.assert_close(model.weight.grad, host.weight.grad, rtol=1e-4, atol=1e-5)


def test_layers_are_as_the_library_wants_them():
    from kernels.layer.layer import _validate_layer

    from fastvit_kernels import layers

    assert set(layer_names()) == {"LayerNorm", "RMSNorm", "ViTMLP"}
    _validate_layer(check_cls=nn.LayerNorm, cls=layers.LayerNorm, repo=None)
    _validate_layer(check_cls=RMS, cls=layers.RMSNorm, repo=None)


@pytest.mark.parametrize("name", layer_names())
def test_layers_are_taken_for_training_and_for_the_compiler(name):
    """The library looks at these, and falls back in silence where one is False."""
    from fastvit_kernels import layers

    layer = getattr(layers, name)
    assert layer.has_backward is layer.can_torch_compile is True


def test_a_folder_that_holds_something_stays_as_it_is(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path)])
    assert stop.value.code == 2
    assert "must be an empty folder" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_the_command_says_what_it_wrote(monkeypatch, capsys):
    monkeypatch.setattr(layout, "write_layout", lambda *words: ["a", "b"])
    assert main(["folder"]) == 0
    *paths, how = capsys.readouterr().out.splitlines()
    assert paths == ["a", "b"] and "get_local_kernel(Path('folder'))" in how
