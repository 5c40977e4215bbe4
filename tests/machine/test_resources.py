"""What a block may take of each target, and what is read of a compiled kernel."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fastvit_kernels.runtime.backend import HAS_TRITON
from tests.machine import aot, resources
from tests.machine.aot import TARGETS
from tests.machine.loop_model import ROOFS
from tests.machine.resources import REGISTERS_PER_SM, SMS, Kernel, _warps_per_sm

KERNEL = Kernel(
    kernel="linear_fwd",
    config="BLOCK_M=128 w8 s3",
    dtypes="bf16",
    arch="sm_90",
    registers=128,
    spills=0,
    shared=98304,
    shared_limit=TARGETS["sm_90"].shared_limit,
    warps_per_sm=16,
    tensor_cores="wgmma",
    needs_tensor_cores=True,
    copies="cp.async",
    seconds=0.5,
    key="k",
)


def test_limits_are_the_programming_guides():
    """Shared memory of an SM in KB, warps, blocks; a block has all of it but 1 KB."""
    guide = {
        "sm_80": (164, 64, 32),
        "sm_86": (100, 48, 16),
        "sm_89": (100, 48, 24),
        "sm_90": (228, 64, 32),
        "sm_100": (228, 64, 32),
        "sm_103": (228, 64, 32),
        "sm_110": (228, 48, 24),
        "sm_120": (100, 48, 24),
        "sm_121": (100, 48, 24),
    }
    nvidia = {name: t for name, t in TARGETS.items() if not t.is_amd}
    assert guide == {n: (sm.shared // 1024, sm.warps, sm.blocks) for n, sm in SMS.items()}
    assert all(t.shared_limit == SMS[name].shared - 1024 for name, t in nvidia.items())
    assert TARGETS["gfx942"].is_amd and TARGETS["gfx942"].shared_limit == 64 * 1024
    assert REGISTERS_PER_SM == 64 * 1024
    assert [TARGETS[r].num_sms for r in ROOFS] == [roof.num_sms for roof in ROOFS.values()]


@pytest.mark.skipif(not HAS_TRITON, reason="triton names the targets")
def test_targets_are_named_as_triton_does():
    nvidia, amd = (TARGETS[name].triton_target() for name in ("sm_90", "gfx942"))
    assert (nvidia.backend, nvidia.arch, nvidia.warp_size) == ("cuda", 90, 32)
    assert (amd.backend, amd.arch, amd.warp_size) == ("hip", "gfx942", 64)


def test_what_a_kernel_takes_is_read(monkeypatch):
    printed = " Function k:\n  REG:96 STACK:16 SHARED:0 LOCAL:8 CONSTANT[0]:920\n"
    monkeypatch.setattr(resources, "printed_by", lambda *_: printed)
    assert resources._nvidia_usage(b"") == (96, 24)
    amd = "    .vgpr_count:     52\n    .vgpr_spill_count: 3\n"
    assert resources._amd_usage(amd) == (52, 12)  # bytes of a thread
    assert _warps_per_sm(TARGETS["gfx942"], 52, 0, 4) is None
    compiled = SimpleNamespace(
        asm={"ttgir": 'module {"ttg.total-num-warps" = 12 : i32}'},
        metadata=SimpleNamespace(num_warps=8),
    )
    assert resources.num_warps(compiled) == 12
    compiled.asm["ttgir"] = "module {}"
    assert resources.num_warps(compiled) == 8


def test_a_kernel_is_told_of_its_code(monkeypatch):
    parameters = [
        SimpleNamespace(num=i, name=name, is_constexpr=name.isupper())
        for i, name in enumerate(["out_ptr", "x_ptr", "n", "BLOCK", "HAS_BIAS", "STAGES", "MASK"])
    ]
    constants = {(3,): 64, (4,): True, (5,): False, (6,): ""}
    signature = {"out_ptr": "*bf16", "x_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    metadata = dict(num_warps=8, num_stages=3)
    source = SimpleNamespace(
        fn=SimpleNamespace(params=parameters), constants=constants, signature=signature
    )
    asm = {
        "ttgir": "",
        "ttir": "%3 = tt.dot %1, %2 : tensor<64x32xf16>",
        "cubin": b"",
        "ptx": "wgmma.mma_async.sync; mma.sync.aligned; cp.async.cg.shared;",
        "amdgcn": ".vgpr_count: 40\n.vgpr_spill_count: 2\nv_mfma_f32 global_load_lds_dword",
    }
    compiled = SimpleNamespace(asm=asm, metadata=SimpleNamespace(**metadata), src=source)
    monkeypatch.setattr(resources, "_nvidia_usage", lambda cubin: (96, 8))
    label = aot._label(compiled)
    assert label == ("BLOCK=64 HAS_BIAS w8 s3", "bf16,fp32")
    one = aot.Kernel("norm_fwd", *label, "sm_90", 2048, 227 * 1024, 1.5, "its key")
    kernel = resources.inspect(compiled, TARGETS["sm_90"], one)
    assert kernel == Kernel(
        **vars(one),
        registers=96,
        spills=8,
        warps_per_sm=16,
        tensor_cores="wgmma+mma",
        needs_tensor_cores=True,
        copies="cp.async",
    )
    kernel = resources.inspect(compiled, TARGETS["gfx942"], one)
    assert (kernel.registers, kernel.spills, kernel.tensor_cores) == (40, 8, "mfma")
    assert kernel.copies == "direct to LDS" and kernel.warps_per_sm is None


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        ("%3 = tt.dot %1, %2 : tensor<64x32xf16> * tensor<32x64xf16> -> tensor<64x64xf32>", True),
        ("%3 = tt.dot %1, %2 : tensor<64x32xbf16, #a> * tensor<32x64xbf16, #b>", True),
        ("%3 = tt.dot %1, %2 : tensor<64x32xf32> * tensor<32x64xf32> -> tensor<64x64xf32>", False),
        ("%3 = arith.addf %1, %2 : tensor<64x32xf16>", False),
    ],
)
def test_products_of_16_bits_need_tensor_cores(line, needs):
    assert resources._multiplies_16_bit(f"module {{\n{line}\n}}") == needs


def test_tools_read_the_kernel_that_they_are_given(monkeypatch):
    knobs = SimpleNamespace(nvidia=SimpleNamespace(nvdisasm=SimpleNamespace(path="cat")))
    monkeypatch.setattr(resources, "triton", SimpleNamespace(knobs=knobs))
    assert resources.printed_by("nvdisasm", b"a kernel", "-u") == "a kernel"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(shared=232449), "232449 bytes of shared memory, a block has 232448"),
        (dict(spills=8), "spills 8 bytes"),
        (dict(tensor_cores="mma"), "multiplies 16-bit tiles without wgmma"),
        (dict(arch="sm_80", tensor_cores="mma"), None),
        (dict(arch="sm_120", spills=8), None),  # in the table, not refused
        (dict(tensor_cores="", needs_tensor_cores=False), None),
        ({}, None),
    ],
    ids=str,
)
def test_what_no_kernel_may_do(change, message):
    problems = list(replace(KERNEL, **change).problems())
    assert len(problems) == (message is not None)
    name = "sm_90 linear_fwd [BLOCK_M=128 w8 s3; bf16]"
    assert message is None or problems[0].startswith(f"{name}: {message}")


@pytest.mark.parametrize(
    ("registers", "shared", "num_warps", "warps"),
    [
        (255, 0, 8, 8),  # 255 registers are allocated as 256: 65536 / 256 threads
        (128, 0, 4, 16),
        (32, 0, 4, 64),
        (32, 0, 1, 32),  # by blocks
        (32, 113 * 1024, 4, 8),  # two blocks of 113 + 1 KB in 228
        (32, 114 * 1024, 4, 4),
    ],
)
def test_warps_per_sm(registers, shared, num_warps, warps):
    assert _warps_per_sm(TARGETS["sm_90"], registers, shared, num_warps) == warps
