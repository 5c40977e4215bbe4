"""What is shipped and how: no network, pinned CI, licence, types, few requirements."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fastvit_kernels as fk

ROOT, PACKAGE = Path(__file__).parent.parent, Path(fk.__file__).parent
CI = ROOT / ".ci"
in_repository = pytest.mark.skipif(not CI.is_dir(), reason="no .ci folder: not the repository")

NETWORK_MODULES = {"socket", "ssl", "urllib", "http", "ftplib", "smtplib", "xmlrpc", "requests"}
NETWORK_MODULES |= {"httpx", "aiohttp", "urllib3", "huggingface_hub", "asyncio", "socketserver"}
DOWNLOADS = {"load_state_dict_from_url", "from_pretrained", "hf_hub_download", "urlopen"}
DOWNLOADS |= {"download_url_to_file", "snapshot_download", "urlretrieve"}


def _reads_the_disk_alone(node):
    """x.from_pretrained(..., local_files_only=True), with that very constant."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    given = {k.arg: k.value for k in node.keywords}
    value = given.get("local_files_only")
    constant = isinstance(value, ast.Constant) and value.value is True
    return node.func.attr == "from_pretrained" and constant


def test_nothing_in_the_package_can_reach_a_network():
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        local = {id(n.func) for n in ast.walk(tree) if _reads_the_disk_alone(n)}
        for node in ast.walk(tree):
            modules = []
            if id(node) in local:
                continue
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Attribute | ast.Name):
                name = node.attr if isinstance(node, ast.Attribute) else node.id
                assert name not in DOWNLOADS, f"{path.name}:{node.lineno} has {name}"
            elif isinstance(node, ast.keyword) and node.arg == "pretrained":
                assert isinstance(node.value, ast.Constant) and not node.value.value, path.name
            for module in modules:
                assert module.partition(".")[0] not in NETWORK_MODULES, f"{path.name}: {module}"


def _pins():
    lines = (CI / "constraints.txt").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    for line in lines:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line
    return {_normal(line.partition("==")[0]): line.partition("==")[2] for line in lines}


def _normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def _toml():
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _requirement_name(requirement):
    return _normal(re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0])


@in_repository
def test_every_package_that_ci_installs_is_pinned():
    pins, project = _pins(), _toml()["project"]
    wanted = [*project["dependencies"], *_toml()["build-system"]["requires"]]
    for group in project["optional-dependencies"].values():
        wanted += group
    for requirement in wanted:
        name = _requirement_name(requirement)
        assert name == "fastvit-kernels" or name in pins, f"{requirement} is not pinned"
        exact = re.search(r"==([0-9.]+)", requirement)
        assert exact is None or exact[1] == pins[name], requirement


@in_repository
def test_the_pins_are_complete():
    """Whatever a pinned package needs in this environment is pinned too."""
    from importlib import metadata

    from packaging.requirements import Requirement

    pins = _pins()
    for name, version in pins.items():
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of an isolated build
        if installed.version.partition("+")[0] != version:
            pytest.skip(f"{name} {installed.version} is installed, CI has {version}")
        for text in installed.requires or []:
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            missing = _normal(needed.name)
            if missing.startswith(("nvidia-", "cuda-")) or missing == "setuptools":
                continue  # torch pins those itself, where its index has them
            assert missing in pins, f"{name} needs {missing}"


def test_types_and_licence_are_shipped():
    project = _toml()
    assert (PACKAGE / "py.typed").is_file()
    assert project["project"]["license"] == "Apache-2.0"
    assert project["project"]["license-files"] == ["LICENSE"]
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence and "Version 2.0, January 2004" in licence
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["fastvit_kernels"]


def test_run_time_needs_torch_and_triton_alone():
    names = [_requirement_name(r) for r in _toml()["project"]["dependencies"]]
    assert names == ["torch", "triton"]
