"""What a block may take of each target, and what is read of a compiled kernel."""

from types import SimpleNamespace

import pytest

from fastvit_kernels.runtime.backend import HAS_TRITON
from fastvit_kernels.tools import resources
from fastvit_kernels.tools.resources import REGISTERS_PER_SM, TARGETS
from tests.machine.loop_model import ROOFS


def test_limits_are_the_programming_guides():
    """Shared memory of an SM in KB, warps, blocks; a block has all of it but 1 KB."""
    guide = {
        "sm_80": (164, 64, 32), "sm_86": (100, 48, 16), "sm_89": (100, 48, 24),
        "sm_90": (228, 64, 32), "sm_100": (228, 64, 32), "sm_120": (100, 48, 24),
    }  # fmt: skip
    nvidia = {name: t for name, t in TARGETS.items() if not t.is_amd}
    assert guide == {
        n: (t.shared_per_sm // 1024, t.max_warps, t.max_blocks) for n, t in nvidia.items()
    }
    assert all(t.shared_limit == t.shared_per_sm - 1024 for t in nvidia.values())
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
    assert resources._warps_per_sm(TARGETS["gfx942"], 52, 0, 4) is None
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
    metadata = dict(name="_norm_fwd_kernel", num_warps=8, num_stages=3, shared=2048)
    source = SimpleNamespace(
        fn=SimpleNamespace(params=parameters), constants=constants, signature=signature
    )
    asm = {
        "ttgir": "", "ttir": "%3 = tt.dot %1, %2 : tensor<64x32xf16>", "cubin": b"",
        "ptx": "wgmma.mma_async.sync; mma.sync.aligned; cp.async.cg.shared;",
        "amdgcn": ".vgpr_count: 40\n.vgpr_spill_count: 2\nv_mfma_f32 global_load_lds_dword",
    }  # fmt: skip
    compiled = SimpleNamespace(
        asm=asm, metadata=SimpleNamespace(**metadata), src=source, hash="its key"
    )
    monkeypatch.setattr(resources, "_nvidia_usage", lambda cubin: (96, 8))
    kernel = resources.inspect(compiled, TARGETS["sm_90"], 1.5)
    assert kernel == resources.Kernel(
        kernel="norm_fwd", config="BLOCK=64 HAS_BIAS w8 s3", dtypes="bf16,fp32", arch="sm_90",
        registers=96, spills=8, shared=2048, shared_limit=227 * 1024, warps_per_sm=16,
        tensor_cores="wgmma+mma", needs_tensor_cores=True, copies="cp.async", seconds=1.5,
        key="its key",
    )  # fmt: skip
    kernel = resources.inspect(compiled, TARGETS["gfx942"], 0.0)
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
