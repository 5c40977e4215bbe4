"""A compiled kernel's code in the forms that tell something: TTGIR, PTX, SASS, and ptxas's remarks.

SASS and remarks are made once and kept beside the kernel in Triton's cache, under its hash.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from . import sass
from .ptx import Ptx
from .resources import printed_by


@dataclass(eq=False)
class Code:
    """What became of one kernel for an NVIDIA GPU; the tools run when they are first asked."""

    compiled: Any  # Triton's CompiledKernel
    num_warps: int  # of a program, those that warp specialisation adds included

    @property
    def ttgir(self) -> str:
        return self.compiled.asm["ttgir"]

    @property
    def num_stages(self) -> int:
        return self.compiled.metadata.num_stages

    @cached_property
    def disassembly(self) -> str:
        cubin = self.compiled.asm["cubin"]
        return _kept(self.compiled, "sass", lambda: printed_by("nvdisasm", cubin, "-c", "-ndf"))

    @cached_property
    def remarks(self) -> str:
        """What ptxas -v says."""
        return _kept(self.compiled, REMARKS, lambda: _assemble(self.compiled))

    @cached_property
    def instructions(self) -> list[sass.Instruction]:
        return sass.instructions(self.disassembly)

    @cached_property
    def loops(self) -> list[sass.Loop]:
        return sass.loops(self.instructions)

    @cached_property
    def blocks(self) -> Ptx:
        return Ptx(self.compiled.asm["ptx"])


REMARKS = "ptxas"


def keep_remarks(compiled: Any, text: str) -> None:
    """Keep what ptxas said when Triton ran it, so that it need not run again."""
    if "ptxas info" in text:
        _kept(compiled, REMARKS, lambda: text)


def _kept(compiled: Any, kind: str, make: Callable[[], str]) -> str:
    from triton.runtime.cache import get_cache_manager

    cache = get_cache_manager(compiled.hash)
    name = f"{compiled.metadata.name}.{kind}"
    path = cache.get_file(name)
    if path is not None:
        return Path(path).read_text()
    text = make()
    cache.put(text, name, binary=False)
    return text


def _assemble(compiled: Any) -> str:
    """ptxas's remarks, from a second run with the options that Triton gives it."""
    from triton.backends.nvidia.compiler import get_ptxas

    arch = compiled.metadata.target.arch
    options = ["-lineinfo", "-v", f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}"]
    options += [] if compiled.metadata.enable_fp_fusion else ["--fmad=false"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(compiled.asm["ptx"])
        command = [get_ptxas(arch).path, *options, str(source), "-o", str(source.with_suffix(".o"))]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr
