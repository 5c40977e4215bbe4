"""What a block may take of each GPU that we compile for, and what a compiled kernel takes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..runtime.triton import triton


@dataclass(frozen=True)
class Target:
    """A GPU to compile for. Limits: CUDA C++ programming guide, "Technical specifications"."""

    name: str
    num_sms: int  # of the GPU named beside it in TARGETS; it sets grids, not code
    shared_limit: int  # bytes a block
    shared_per_sm: int = 0  # bytes, 0 where occupancy is not computed
    max_warps: int = 0  # a SM
    max_blocks: int = 0  # a SM

    @property
    def is_amd(self) -> bool:
        return self.name.startswith("gfx")

    def triton_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if self.is_amd:
            return GPUTarget("hip", self.name, 64)
        return GPUTarget("cuda", int(self.name.removeprefix("sm_")), 32)


KB = 1024
TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", 108, 163 * KB, 164 * KB, 64, 32),  # A100
        Target("sm_86", 82, 99 * KB, 100 * KB, 48, 16),  # RTX 3090
        Target("sm_89", 128, 99 * KB, 100 * KB, 48, 24),  # RTX 4090
        Target("sm_90", 132, 227 * KB, 228 * KB, 64, 32),  # H100, H200
        Target("sm_100", 148, 227 * KB, 228 * KB, 64, 32),  # B200
        Target("sm_120", 170, 99 * KB, 100 * KB, 48, 24),  # RTX 5090
        Target("gfx942", 304, 64 * KB),  # MI300X
    )
}
GATED = ("sm_80", "sm_90")  # where no kernel may spill
REGISTERS_PER_SM = 65536
SHARED_RESERVED = 1 * KB  # a block, by the CUDA runtime


@dataclass(frozen=True)
class Kernel:
    """One compiled specialisation and what it takes from the chip."""

    kernel: str  # "layer_norm_fwd"
    config: str  # "BLOCK_ROWS=2 BLOCK_C=1024 HAS_BIAS w4 s3"
    dtypes: str  # of the pointers, "bf16,fp32"
    arch: str
    registers: int  # a thread
    spills: int  # bytes of stack a thread (bytes of VGPR spills on AMD)
    shared: int  # bytes a block
    shared_limit: int
    warps_per_sm: int | None
    tensor_cores: str  # "wgmma", "mma", "tcgen05", "mfma", joined by "+"; "" where there are none
    needs_tensor_cores: bool  # it multiplies 16-bit tiles
    copies: str  # "cp.async", "TMA", joined by "+"
    seconds: float  # to compile, 0 from the cache
    key: str  # Triton's cache key

    def problems(self) -> Iterator[str]:
        """What no kernel of this package may do, each in one sentence with the kernel's name."""
        name = f"{self.arch} {self.kernel} [{self.config}; {self.dtypes}]"
        if self.shared > self.shared_limit:
            yield f"{name}: {self.shared} bytes of shared memory, a block has {self.shared_limit}"
        if self.arch in GATED and self.spills:
            yield f"{name}: spills {self.spills} bytes a thread"
        if self.arch == "sm_90" and self.needs_tensor_cores and "wgmma" not in self.tensor_cores:
            yield f"{name}: multiplies 16-bit tiles without wgmma"


def inspect(compiled: Any, target: Target, seconds: float) -> Kernel:
    """What a kernel that Triton compiled for this target takes."""
    metadata, warps = compiled.metadata, num_warps(compiled)
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
    config, dtypes = _label(compiled)
    return Kernel(
        kernel=metadata.name.removeprefix("_").removesuffix("_kernel"),
        config=config,
        dtypes=dtypes,
        arch=target.name,
        registers=registers,
        spills=spills,
        shared=metadata.shared,
        shared_limit=target.shared_limit,
        warps_per_sm=_warps_per_sm(target, registers, metadata.shared, warps),
        tensor_cores="+".join(kind for kind, sign in kinds.items() if sign in text),
        needs_tensor_cores=_multiplies_16_bit(compiled.asm.get("ttir", "")),  # Gluon has none
        copies="+".join(kind for kind, sign in copy_kinds.items() if sign in text),
        seconds=seconds,
        key=compiled.hash,
    )


def num_warps(compiled: Any) -> int:
    """Warps of a block, those that warp specialisation adds included."""
    match = re.search(r'"ttg.total-num-warps" = (\d+)', compiled.asm["ttgir"])
    return int(match[1]) if match else compiled.metadata.num_warps


def _label(compiled: Any) -> tuple[str, str]:
    """Constexprs and options in one line, and the dtypes of the pointers in argument order."""
    source = compiled.src
    words = []
    for parameter in source.fn.params:
        value = source.constants.get((parameter.num,))
        if not parameter.is_constexpr or value is None or value is False or value == "":
            continue
        words.append(parameter.name if value is True else f"{parameter.name}={value}")
    words += [f"w{compiled.metadata.num_warps}", f"s{compiled.metadata.num_stages}"]
    pointers = [k for k in source.signature.values() if isinstance(k, str) and k.startswith("*")]
    return " ".join(words), ",".join(dict.fromkeys(kind[1:] for kind in pointers))


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
    """Warps that one SM holds at once; None where the target's limits are not listed."""
    if not target.max_warps:
        return None
    registers_per_warp = -(-registers * 32 // 256) * 256  # allocated in units of 256
    by_registers = REGISTERS_PER_SM // max(registers_per_warp, 1) // num_warps
    by_shared = target.shared_per_sm // (shared + SHARED_RESERVED)
    by_warps = target.max_warps // num_warps
    return num_warps * min(by_registers, by_shared, by_warps, target.max_blocks)
