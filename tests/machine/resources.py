"""What a compiled kernel takes of a GPU, and what it may take."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastvit_kernels.runtime.triton import triton
from tests.machine import aot
from tests.machine.aot import Target


class Sm(NamedTuple):
    """What one SM has: CUDA C++ programming guide, "Technical specifications"."""

    shared: int  # bytes
    warps: int
    blocks: int


KB = 1024
SMS = {
    "sm_80": Sm(164 * KB, 64, 32),
    "sm_86": Sm(100 * KB, 48, 16),
    "sm_89": Sm(100 * KB, 48, 24),
    "sm_90": Sm(228 * KB, 64, 32),
    "sm_100": Sm(228 * KB, 64, 32),
    "sm_103": Sm(228 * KB, 64, 32),
    "sm_110": Sm(228 * KB, 48, 24),
    "sm_120": Sm(100 * KB, 48, 24),
    "sm_121": Sm(100 * KB, 48, 24),
}
GATED = ("sm_80", "sm_90")  # where no kernel may spill
REGISTERS_PER_SM = 65536
SHARED_RESERVED = 1 * KB  # a block, by the CUDA runtime


@dataclass(frozen=True)
class Kernel(aot.Kernel):
    """One compiled specialisation and what it takes from the chip."""

    registers: int  # a thread
    spills: int  # bytes of stack a thread (bytes of VGPR spills on AMD)
    warps_per_sm: int | None
    tensor_cores: str  # "wgmma", "mma", "tcgen05", "mfma", joined by "+"; "" where there are none
    needs_tensor_cores: bool  # it multiplies 16-bit tiles
    copies: str  # "cp.async", "TMA", joined by "+"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.arch in GATED and self.spills:
            yield f"{self}: spills {self.spills} bytes a thread"
        if self.arch == "sm_90" and self.needs_tensor_cores and "wgmma" not in self.tensor_cores:
            yield f"{self}: multiplies 16-bit tiles without wgmma"


def inspect(compiled: Any, target: Target, kernel: aot.Kernel) -> Kernel:
    """What a kernel that Triton compiled for this target takes."""
    warps = num_warps(compiled)
    if target.is_amd:
        registers, spills = _amd_usage(compiled.asm["amdgcn"])
        kinds = {"mfma": "v_mfma"}
        text, copy_kinds = compiled.asm["amdgcn"], {"direct to LDS": "global_load_lds"}
    else:
        registers, spills = _nvidia_usage(compiled.asm["cubin"])
        # In SASS: HGMMA, HMMA, UTCMMA; UTMALDG and LDGSTS.
        kinds = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
        text = compiled.asm["ptx"]
        copy_kinds = {"TMA": "cp.async.bulk.tensor", "cp.async": "cp.async.c"}
    return Kernel(
        **vars(kernel),
        registers=registers,
        spills=spills,
        warps_per_sm=_warps_per_sm(target, registers, kernel.shared, warps),
        tensor_cores="+".join(kind for kind, sign in kinds.items() if sign in text),
        needs_tensor_cores=_multiplies_16_bit(compiled.asm.get("ttir", "")),  # Gluon has none
        copies="+".join(kind for kind, sign in copy_kinds.items() if sign in text),
    )


def num_warps(compiled: Any) -> int:
    """Warps of a block, those that warp specialisation adds included."""
    match = re.search(r'"ttg.total-num-warps" = (\d+)', compiled.asm["ttgir"])
    return int(match[1]) if match else compiled.metadata.num_warps


def _multiplies_16_bit(ttir: str) -> bool:
    return any(re.search(r"x(b?f16)[,>]", line) for line in ttir.splitlines() if "tt.dot" in line)


def printed_by(tool: str, cubin: bytes, *options: str) -> str:
    """What nvdisasm or cuobjdump, as Triton brings them, print of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(triton.knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    text = printed_by("cuobjdump", cubin, "--dump-resource-usage")
    usage = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _amd_usage(assembly: str) -> tuple[int, int]:
    usage = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", assembly))
    return int(usage["vgpr_count"]), 4 * int(usage["vgpr_spill_count"])


def _warps_per_sm(target: Target, registers: int, shared: int, num_warps: int) -> int | None:
    """Warps that one SM holds at once; None where what it has is not listed."""
    if (sm := SMS.get(target.name)) is None:
        return None
    registers_per_warp = -(-registers * 32 // 256) * 256  # allocated in units of 256
    by_registers = REGISTERS_PER_SM // max(registers_per_warp, 1) // num_warps
    by_shared = sm.shared // (shared + SHARED_RESERVED)
    by_warps = sm.warps // num_warps
    return num_warps * min(by_registers, by_shared, by_warps, sm.blocks)
