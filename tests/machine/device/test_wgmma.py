"""wgmma in flight: poison, and what must be noticed. What products give, runs of kernels hold."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.machine.device.faults import Diverged, InFlight, OutOfBounds, Race, Unfenced
from tests.machine.device.snippets import run

THREADS = np.arange(128)
N = 16  # columns of each product here


def laid_out(bits, start):
    """A matrix (rows, 16) of 16 bits, K-major, as the bytes of shared memory that a descriptor with
    a swizzle of 128 bytes names, and that descriptor."""
    r, k = np.meshgrid(np.arange(len(bits)), np.arange(16), indexing="ij")
    address = start + 128 * r + 2 * k
    address ^= ((address >> 7) & 7) << 4
    raw = np.zeros(65536, np.uint8)
    for i in range(2):
        raw[address + i] = bits >> 8 * i & 0xFF
    return raw, (1024 + start) >> 4 | 1024 >> 4 << 32 | 1 << 62


def fragments(bits):
    """A (64, 16) as the registers of 128 threads."""
    warp, lane = THREADS // 32, THREADS % 32
    found = []
    for i in range(4):
        row, column = 16 * warp + lane // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2)
        found.append(bits[row, column] | bits[row, column + 1] << 16)
    return found


def result_of(found, start=100):
    """The registers of D as a matrix (64, N)."""
    warp, lane = THREADS // 32, THREADS % 32
    matrix = np.empty((64, N), np.float32)
    for j, h, i in itertools.product(range(N // 8), range(2), range(2)):
        held = found[f"%r{start + 4 * j + 2 * h + i}"][0].view(np.float32)
        matrix[16 * warp + lane // 4 + 8 * h, 8 * j + 2 * (lane % 4) + i] = held
    return matrix


def listed(start, count):
    return "{" + ", ".join(f"%r{start + i}" for i in range(count)) + "}"


def operands(in_registers=False):
    """What a product of small whole numbers needs: its line, registers, shared memory; and A B."""
    draw = np.random.default_rng(0)
    a, b = (draw.integers(-8, 9, (rows, 16)).astype(np.float32) for rows in (64, N))
    a_bits, b_bits = (x.view(np.uint32) >> 16 for x in (a, b))
    raw, b_name = laid_out(b_bits, 0)
    registers = {"%rd2": np.uint64(b_name)}
    if in_registers:
        registers |= {f"%r{10 + i}": x for i, x in enumerate(fragments(a_bits))}
    else:
        raw_a, a_name = laid_out(a_bits, 32768)
        registers["%rd1"], raw = np.uint64(a_name), raw | raw_a
    first, flags = (listed(10, 4), "0") if in_registers else ("%rd1", "0, 0")
    line = f"wgmma.mma_async.sync.aligned.m64n{N}k16.f32.bf16.bf16 {listed(100, N // 2)}, {first},"
    return f"{line} %rd2, KEEPS, 1, 1, {flags};", registers, raw, a @ b.T


def product(line, keeps="0"):
    return (
        f"wgmma.fence.sync.aligned; {line.replace('KEEPS', keeps)}"
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    )


def test_products_add_up():
    line, registers, raw, wanted = operands()
    added = line.replace("KEEPS", "%p1")
    start = {f"%r{100 + i}": np.float32(3) for i in range(8)}
    both = f"wgmma.fence.sync.aligned; {added} {added}"
    ends = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    for keeps, early in itertools.product((True, False), repeat=2):
        given = {**registers, **start, "%p1": np.array(keeps)}
        found = run(both + ends, given, threads=128, shared=65536, begins=raw, early=early)
        assert np.array_equal(result_of(found), 2 * wanted + 3 if keeps else wanted)


def test_wgmma_result_poison_until_wait():
    line, registers, raw, _ = operands()
    second = line.replace("%r10", "%r20")
    commit = "wgmma.commit_group.sync.aligned;"
    line, second = (x.replace("KEEPS", "0") for x in (line, second))
    body = f"wgmma.fence.sync.aligned; {line} {commit} {second}"
    body += commit + "wgmma.wait_group.sync.aligned MOST; add.f32 %r1, %r100, 0f00000000;"
    body += "add.f32 %r2, %r200, 0f00000000;"
    for most, first_is_there, second_is_there in ((2, 0, 0), (1, 1, 0), (0, 1, 1)):
        found = run(
            body.replace("MOST", str(most)), registers, threads=128, shared=65536, begins=raw
        )
        assert np.isnan(found["%r1"].view(np.float32)).all() != first_is_there
        assert np.isnan(found["%r2"].view(np.float32)).all() != second_is_there
    uncommitted = body.replace(commit, "")
    found = run(uncommitted.replace("MOST", "0"), registers, threads=128, shared=65536, begins=raw)
    assert np.isnan(found["%r1"].view(np.float32)).all()


def test_mov_of_wgmma_result_in_flight():
    line, registers, raw, wanted = operands()
    moves = "".join(f"mov.b32 %r{200 + i}, %r{100 + i};" for i in range(8))
    body = product(line).replace("wgmma.wait", moves + "wgmma.wait")
    found = run(body, registers, threads=128, shared=65536, begins=raw)
    assert np.array_equal(result_of(found, 200), wanted)
    moved = line.replace("%r10", "%r20").replace("KEEPS", "1")  # adds to the copies in flight
    body = product(line).replace(
        "wgmma.wait", f"{moves} {moved} wgmma.commit_group.sync.aligned;wgmma.wait"
    )
    found = run(body, registers, threads=128, shared=65536, begins=raw)
    assert np.array_equal(result_of(found, 200), 2 * wanted)
    assert np.array_equal(result_of(found), wanted)


def test_registers_written_in_flight():
    line, registers, raw, _ = operands(in_registers=True)
    for register in ("%r103", "%r11"):
        body = product(line).replace("wgmma.wait", f"mov.b32 {register}, 0; wgmma.wait")
        with pytest.raises(InFlight, match="written"):
            run(body, registers, threads=128, shared=65536, begins=raw)


def test_wgmma_without_fence_noted():
    line, registers, raw, wanted = operands(in_registers=True)
    start = {f"%r{100 + i}": np.float32(0) for i in range(8)}
    whole = product(line, "1")
    for body in (
        whole.replace("wgmma.fence.sync.aligned;", ""),
        whole.replace("aligned; wgmma.mma", "aligned; mov.b32 %r100, 0; wgmma.mma", 1),
        whole.replace("aligned; wgmma.mma", "aligned; or.b32 %r10, %r10, 0; wgmma.mma", 1),
    ):
        found = run(body, registers | start, threads=128, shared=65536, begins=raw)
        assert np.array_equal(result_of(found), wanted)  # ptxas mends it
        assert any("no wgmma.fence" in text for text in found["counts"]), body
    found = run(whole, registers | start, threads=128, shared=65536, begins=raw)
    assert not found["counts"]


STORED = "mad.lo.s32 %r1, %tid.x, 4, 1024; st.shared.b32 [%r1], %r2;"


@pytest.mark.parametrize(
    "order",
    ["fence.proxy.async.shared::cta; bar.sync 0;", "bar.sync 0; fence.proxy.async.shared::cta;"],
)
def test_wgmma_operands_need_fence_and_barrier(order):
    line, registers, raw, _ = operands()
    given = {"threads": 128, "shared": 65536, "begins": raw}
    run(STORED + order + product(line), registers, **given)
    with pytest.raises(Unfenced, match=r"no fence\.proxy\.async between"):
        run(STORED + "bar.sync 0;" + product(line), registers, **given)
    with pytest.raises(Race, match="a warp wrote"):
        run(STORED + "fence.proxy.async.shared::cta;" + product(line), registers, **given)
    with pytest.raises(Unfenced):  # the fence comes before the store
        run(
            "fence.proxy.async.shared::cta;" + STORED + "bar.sync 0;" + product(line),
            registers,
            **given,
        )


def test_operands_written_in_flight():
    line, registers, raw, _ = operands()
    given = {"threads": 128, "shared": 65536, "begins": raw}
    whole = product(line)
    with pytest.raises(Race, match="in flight"):
        run(whole.replace("wgmma.wait", STORED + "wgmma.wait"), registers, **given)
    with pytest.raises(Race, match=r"which warp . read"):  # another warp may still wait
        run(whole + STORED, registers, **given)
    run(whole + "bar.sync 0;" + STORED, registers, **given)


def test_wgmma_rejects_bounds_and_partial_group():
    line, registers, raw, _ = operands()
    with pytest.raises(OutOfBounds):
        run(product(line), registers, threads=128, shared=32768, begins=raw[:32768])
    with pytest.raises(Diverged):
        run(product(line), registers, threads=64, shared=65536, begins=raw)
