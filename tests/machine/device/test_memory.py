"""Asynchronous copies; poison, bounds, alignment, races. What loads and stores move, runs hold."""

import numpy as np
import pytest
import torch

from tests.machine.device.faults import MachineError, Misaligned, OutOfBounds, Race
from tests.machine.device.registry import INSTRUCTIONS
from tests.machine.device.snippets import run

LANES = np.arange(32)
BASE = "mov.b32 %r100, global_smem;"


def pointer(x):
    return {"tensors": [x], "arguments": [("u64", x.data_ptr())]}


def at(register, width):
    """Lines that put the address of each thread's own element into %rd1."""
    return f"ld.param.b64 %rd2, [snippet_param_0]; mad.wide.s32 %rd1, {register}, {width}, %rd2;"


@pytest.mark.parametrize("name", sorted(n for n in INSTRUCTIONS if n.startswith("ld.param")))
def test_parameters_of_each_type(name):
    """As wide as it is, or extended by the sign of s types."""
    type = name.split(".")[-1]
    number = np.array([-3], np.int64).view("u1")[: int(type[1:]) // 8].tobytes()
    wanted = int.from_bytes(number.ljust(8, b"\xff" if type[0] == "s" else b"\0"), "little")
    given = [("u64", 0), ("u64", int.from_bytes(number, "little"))]
    assert run(f"{name} %rd1, [snippet_param_1];", arguments=given)["%rd1"][0, 0] == wanted


def test_parameter_named_by_register():
    """Triton 3.9 chooses between two floats so."""
    body = """
        mov.b32 %r1, snippet_param_1; mov.b32 %r2, snippet_param_2;
        setp.lt.s32 %p1, %tid.x, 5; selp.b32 %r3, %r1, %r2, %p1; ld.param.b32 %r4, [%r3{}];
    """
    given = [("u8", 1), ("f32", 1.5), ("f32", -2.0)]
    found = run(body.format(""), arguments=given)["%r4"].view(np.float32)[0]
    assert found.tolist() == [1.5] * 5 + [-2.0] * 27
    with pytest.raises(OutOfBounds, match="of parameters"):
        run(body.format("+4"), arguments=given)


def test_access_outside_tensors():
    x = torch.zeros(31)
    body = at("%tid.x", 4) + "ld.global.b32 %r1, [%rd1];"
    with pytest.raises(OutOfBounds, match=r"PTX line \d+ .*ld.global.b32"):
        run(body, **pointer(x))
    guarded = at("%tid.x", 4) + "setp.lt.s32 %p1, %tid.x, 31; @%p1 ld.global.b32 %r1, [%rd1];"
    run(guarded, **pointer(x))
    with pytest.raises(OutOfBounds):
        run(guarded.replace("@%p1", "@!%p1"), **pointer(x))


def test_access_between_padded_rows():
    rows = torch.zeros(4, 10)[:, :8]
    body = "ld.param.b64 %rd1, [snippet_param_0]; ld.global.b32 %r1, [%rd1+{}];"
    run(body.format(7 * 4), **pointer(rows))
    with pytest.raises(OutOfBounds, match="padded"):
        run(body.format(8 * 4), **pointer(rows))


def test_a_vector_must_be_aligned():
    x = torch.zeros(64)
    body = "ld.param.b64 %rd1, [snippet_param_0]; ld.global.v4.b32 {{%r1,%r2,%r3,%r4}}, [%rd1+{}];"
    run(body.format(16), **pointer(x))
    with pytest.raises(Misaligned):
        run(body.format(8), **pointer(x))
    with pytest.raises(Misaligned):
        run(f"{BASE} st.shared.v2.b32 [%r100+4], {{%r1, %r2}};", shared=64)


def test_shared_memory_bounds_and_poison():
    found = run(f"{BASE} ld.shared.b32 %r1, [%r100]; ld.shared.b16 %rs1, [%r100+8];", shared=16)
    assert np.isnan(found["%r1"].view(np.float32)).all()
    assert (found["%rs1"] == 0x7FFF).all()  # NaN as bf16 and as f16
    for offset in (-4, 16):
        with pytest.raises(OutOfBounds, match="of 16 of shared memory"):
            run(f"{BASE} ld.shared.b32 %r1, [%r100+{offset}];", shared=16)


# cp.async

COPY = at("%tid.x", 16) + BASE + "mad.lo.s32 %r1, %tid.x, 16, %r100;"
READ = "ld.shared.b32 %r{}, [%r1{}];"


def copies(lines, blocks=1, **registers):
    x = torch.arange(4 * 32 * 4, dtype=torch.int32)
    found = run(COPY + lines, registers, shared=4 * 512, blocks=blocks, **pointer(x))
    return [found[f"%r{i}"][0] if f"%r{i}" in found else None for i in (10, 11, 12, 13)]


ISSUE = "cp.async.cg.shared.global [%r1+{0}], [%rd1+{0}], 16;"
COMMIT = "cp.async.commit_group;"
ARRIVED, ON_ITS_WAY = 4 * LANES, 0x7FFF7FFF


def test_cp_async_lands_at_wait():
    for waits, arrived in (
        ("", 0),
        ("cp.async.wait_group 2;", 0),
        ("cp.async.wait_group 1;", 1),
        ("cp.async.wait_group 0;", 2),
    ):
        first, second, *_ = copies(
            ISSUE.format(0)
            + COMMIT
            + ISSUE.format(512)
            + COMMIT
            + waits
            + READ.format(10, "")
            + READ.format(11, "+512")
        )
        assert (first == (ARRIVED if arrived >= 1 else ON_ITS_WAY)).all(), waits
        assert (second == (ARRIVED + 128 if arrived >= 2 else ON_ITS_WAY)).all(), waits


def test_uncommitted_cp_async_never_lands():
    first, *_ = copies(ISSUE.format(0) + "cp.async.wait_group 0;" + READ.format(10, ""))
    assert (first == ON_ITS_WAY).all()


def test_cp_async_of_no_bytes_gives_zeros():
    body = "setp.lt.s32 %p1, %tid.x, 8; selp.b32 %r2, 16, 0, %p1;"
    first, *_ = copies(
        body
        + "cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;"
        + COMMIT
        + "cp.async.wait_group 0;"
        + READ.format(10, "")
    )
    assert first.tolist() == [*range(0, 32, 4)] + [0] * 24


# Races

WRITE = (
    BASE
    + "mad.lo.s32 %r1, %tid.x, 4, %r100; xor.b32 %r2, %tid.x, 32;"
    + ("mad.lo.s32 %r2, %r2, 4, %r100; st.shared.b32 [%r1], %tid.x;")
)


def test_read_after_write_race():
    with pytest.raises(Race, match=r"warp 0 reads byte 0 .* which warp 1 wrote|warp \d reads byte"):
        run(WRITE + "ld.shared.b32 %r3, [%r2];", threads=64, shared=256)
    found = run(WRITE + "bar.sync 0; ld.shared.b32 %r3, [%r2];", threads=64, shared=256)
    assert (found["%r3"][0] == np.arange(64) ^ 32).all()


def test_warp_reads_own_write():
    run(WRITE + "ld.shared.b32 %r3, [%r1];", threads=64, shared=256)


def test_write_after_read_race():
    read = WRITE + "bar.sync 0; ld.shared.b32 %r3, [%r2];"
    with pytest.raises(Race, match=r"warp \d writes byte .* which warp \d read"):
        run(read + "st.shared.b32 [%r1], %r3;", threads=64, shared=256)
    run(read + "bar.sync 0; st.shared.b32 [%r1], %r3;", threads=64, shared=256)


def test_write_after_write_race():
    with pytest.raises(Race, match=r"warp \d writes byte .* which warp \d wrote"):
        run(WRITE + "st.shared.b32 [%r2], %tid.x;", threads=64, shared=256)


def test_cp_async_race_after_wait():
    x = torch.zeros(1024)
    body = (
        at("%tid.x", 16)
        + BASE
        + "mad.lo.s32 %r1, %tid.x, 16, %r100; xor.b32 %r2, %tid.x, 32;"
        + (
            "mad.lo.s32 %r2, %r2, 16, %r100; cp.async.cg.shared.global [%r1], [%rd1], 16;"
            "cp.async.commit_group; cp.async.wait_group 0;"
        )
    )
    with pytest.raises(Race):
        run(body + "ld.shared.b32 %r3, [%r2];", threads=64, shared=1024, **pointer(x))
    run(body + "bar.sync 0; ld.shared.b32 %r3, [%r2];", threads=64, shared=1024, **pointer(x))


def test_unknown_instruction_rejected():
    for line in ("frobnicate.b32 %r1, %r2;", "add.sat.s32 %r1, %r2, %r3;"):
        with pytest.raises(MachineError, match=rf"PTX line \d+ .*unknown instruction {line[:5]}"):
            run(line)
