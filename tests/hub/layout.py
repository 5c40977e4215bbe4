"""Writes the repository that the Hub's `kernels` library loads: build/torch-BACKEND, metadata.json.

python -m tests.hub.layout DIR [--version N]

https://huggingface.co/docs/kernels/kernel-requirements, read in kernels 0.17: one variant a
backend without compiled code ("noarch"), imports inside relative, an id that names module and
operators and differs from every other build's.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import fastvit_kernels
from fastvit_kernels.commands.options import positive
from fastvit_kernels.runtime.version import __version__

NAME = "fastvit-kernels"
MODULE = "fastvit_kernels"
BACKENDS = ("cuda", "rocm", "cpu")
ROOMS = ("measure", "models", "ops", "runtime", "swap", "verify", "weights")
PACKAGE = Path(fastvit_kernels.__file__).parent
_SUFFIXES = {".py", ".json"}

_CARD = """---
library_name: kernels
license: apache-2.0
tags: [kernels, vision-transformer, triton]
---

Fused Triton kernels for Vision Transformers, forward and backward, fastvit_kernels {version}.

```python
from kernels import get_kernel

fastvit = get_kernel("OWNER/{name}", version={number}, trust_remote_code=True)
fastvit.swap_in(model)     # or its functions: fastvit.attention, fastvit.layer_norm, ...
```

Layers, for `kernelize`: {layers}. Each has the forward of what it stands for, with backward, and
under torch.compile.
"""
# Older versions of the library look for a folder of the repository's name in each variant.
_COMPATIBLE = '''"""For versions of `kernels` that look for the module here."""

import importlib.util
import sys
from pathlib import Path

_path = Path(__file__).parent.parent / "__init__.py"
_name = "{id}"
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, _path)
    _module = importlib.util.module_from_spec(_spec)
    sys.modules[_name] = _module
    _spec.loader.exec_module(_module)
globals().update(vars(sys.modules[_name]))
'''


def _entrance() -> str:
    """The package's own __init__.py with `layers`."""
    text = (PACKAGE / "__init__.py").read_text()
    first, public = "\nif TYPE_CHECKING:\n", "__all__ = sorted(_HOME_OF)"
    assert first in text and public in text, "fastvit_kernels/__init__.py has another form"
    text = text.replace(first, f"from . import layers as layers\n{first}")
    return text.replace(public, '__all__ = sorted([*_HOME_OF, "layers"])')


def sources() -> dict[str, bytes]:
    """What a variant is made of, by its path there."""
    files = {"__init__.py": _entrance().encode()}
    paths = [PACKAGE / "layers.py"]
    for room in ROOMS:
        paths += [p for p in sorted((PACKAGE / room).rglob("*")) if p.suffix in _SUFFIXES]
    for path in paths:
        files[path.relative_to(PACKAGE).as_posix()] = path.read_bytes()
    return files


def layer_names() -> list[str]:
    tree = ast.parse((PACKAGE / "layers.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def write_layout(out: Path, version: int) -> list[Path]:
    """Write the repository into `out`, whole or not at all.

    Args:
        out: a folder that is not there, or empty.
        version: of the interface; the branch on the Hub is v<version>.
    Returns: the variants.
    Raises: ValueError where `out` holds something, OSError where it cannot be written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} must be an empty folder, or not there; nothing was written")
    files = sources()
    unique = hashlib.sha256(b"".join(p.encode() + _digest(c) for p, c in sorted(files.items())))
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        for backend in BACKENDS:
            identity = f"_{MODULE}_{backend}_{unique.hexdigest()[:8]}"
            variant = temporary / "build" / f"torch-{backend}"
            held = {**files, f"{MODULE}/__init__.py": _COMPATIBLE.format(id=identity).encode()}
            for path, content in held.items():
                (variant / path).parent.mkdir(parents=True, exist_ok=True)
                (variant / path).write_bytes(content)
            metadata = {
                "id": identity,
                "name": NAME,
                "version": version,
                "license": "Apache-2.0",
                "python-depends": [],
                "backend": {"type": backend},
                "digest": {
                    "algorithm": "sha256",
                    "files": {
                        path: base64.b64encode(_digest(content)).decode()
                        for path, content in sorted(held.items())
                    },
                },
            }
            (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        card = _CARD.format(
            version=__version__, name=NAME, number=version, layers=", ".join(layer_names())
        )
        (temporary / "README.md").write_text(card)
        temporary.chmod(0o755)
        os.replace(temporary, out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [out / "build" / f"torch-{backend}" for backend in BACKENDS]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.hub.layout")
    parser.add_argument("dir", type=Path, metavar="DIR", help="an empty folder, or a new one")
    parser.add_argument(
        "--version",
        type=positive(int),
        default=1,
        metavar="N",
        help="of the interface: the Hub's branch is vN (default 1)",
    )
    return parser


def main(words: Sequence[str] | None = None) -> int:
    parser = build_parser()
    arguments = parser.parse_args(words)
    try:
        variants = write_layout(arguments.dir, arguments.version)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(*variants, sep="\n")
    print(f"Load it with kernels.get_local_kernel(Path({str(arguments.dir)!r}))")
    return 0


if __name__ == "__main__":
    sys.exit(main())
