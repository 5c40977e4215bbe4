"""wgmma and stmatrix: operands by PTX's own words, results by numpy, and what must be noticed."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from tests.machine.device.faults import Diverged, InFlight, OutOfBounds, Race, Unfenced
from tests.machine.device.registry import INSTRUCTIONS
from tests.machine.device.snippets import run

THREADS = np.arange(128)
SWIZZLES = {128: 1, 64: 2, 32: 3, 0: 0}  # bytes: bits 62-63 of a descriptor
NAMES = sorted(n for n in INSTRUCTIONS if n.startswith("wgmma.mma"))
BF16_64x16 = "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"


def numbers_of(type, draw, shape):
    """Small numbers that the type holds exactly, and their bits."""
    x = draw.integers(-8, 9, shape).astype(np.float32) / 4
    if type == "f16":
        return x, x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32)
    return x, bits if type == "tf32" else (bits >> 16).astype(np.uint16)


def swizzled(address, bytes):
    """Bits 4 to 6 of an address by the bits 7 to 9, as many as the swizzle has."""
    mask = {128: 7, 64: 3, 32: 1, 0: 0}[bytes]
    return address ^ (((address >> 7) & mask) << 4)


def laid_out(bits, start, swizzle, mn_major):
    """A matrix (rows of M or N, K) as the bytes of shared memory that a descriptor names.

    Returns: {byte: value} as an array of 32 KB, which bytes are used, and the descriptor. Each
    8 rows (K-major) or 8 columns of K (MN-major) lie in an atom, atoms SBO bytes apart; what does
    not fit in a swizzled row is LBO bytes away.
    """
    rows, K = bits.shape
    width = bits.itemsize
    r, k = np.meshgrid(np.arange(rows), np.arange(K), indexing="ij")
    row = swizzle or 16
    if not mn_major:
        inner = k * width
        stride, leading = 8 * row, 0
        if swizzle == 0:  # core matrices of 8 rows and 16 bytes
            leading, stride = 128, 256
            address = r % 8 * 16 + r // 8 * stride + inner % 16 + inner // 16 * leading
        else:
            address = r % 8 * row + r // 8 * stride + inner
    else:
        inner = r * width
        if swizzle == 0:
            stride, leading = 256, 128
            address = k % 8 * 16 + inner % 16 + inner // 16 * stride + k // 8 * leading
        else:
            stride = 8 * row
            leading = stride * (K // 8)
            address = inner % row + inner // row * leading + k % 8 * row + k // 8 * stride
    address = swizzled(1024 + start + address, swizzle) - 1024  # shared memory begins at 1024
    raw, used = np.zeros(65536, np.uint8), np.zeros(65536, bool)
    value = np.ascontiguousarray(bits)[..., None].view(np.uint8)
    for i in range(width):
        raw[address + i], used[address + i] = value[..., i], True
    assert used.sum() == bits.nbytes
    descriptor = (1024 + start) >> 4 | leading >> 4 << 16 | stride >> 4 << 32
    return raw, used, descriptor | SWIZZLES[swizzle] << 62


def fragments(bits):
    """A (64, K) as the registers of 128 threads."""
    warp, lane = THREADS // 32, THREADS % 32
    g, t, each = lane // 4, lane % 4, 4 // bits.itemsize
    found = []
    for i in range(4):
        row, first = 16 * warp + g + 8 * (i % 2), each * t + 4 * each * (i // 2)
        parts = [bits[row, first + e].astype(np.uint32) << (16 * e) for e in range(each)]
        found.append(np.bitwise_or.reduce(parts))
    return found


def result_of(found, n, start=100):
    """The registers of D as a matrix (64, n)."""
    warp, lane = THREADS // 32, THREADS % 32
    matrix = np.empty((64, n), np.float32)
    for j, h, i in itertools.product(range(n // 8), range(2), range(2)):
        held = found[f"%r{start + 4 * j + 2 * h + i}"][0].view(np.float32)
        matrix[16 * warp + lane // 4 + 8 * h, 8 * j + 2 * (lane % 4) + i] = held
    return matrix


def listed(start, count):
    return "{" + ", ".join(f"%r{start + i}" for i in range(count)) + "}"


def operands(name, swizzle, a_major, b_major, in_registers=False):
    """What a product needs: its line, registers, shared memory, and the matrices."""
    draw = np.random.default_rng(0)
    parts = name.split(".")
    n, K = (int(x) for x in re.fullmatch(r"m64n(\d+)k(\d+)", parts[4]).groups())
    type = parts[-1]
    a, a_bits = numbers_of(type, draw, (64, K))
    b, b_bits = numbers_of(type, draw, (n, K))
    raw_b, used_b, b_name = laid_out(b_bits, 0, swizzle, b_major)
    registers = {"%rd2": np.uint64(b_name)}
    if in_registers:
        registers |= {f"%r{10 + i}": x for i, x in enumerate(fragments(a_bits))}
        first, raw = listed(10, 4), raw_b
    else:
        raw_a, used_a, a_name = laid_out(a_bits, 32768, swizzle, a_major)
        assert not (used_a & used_b).any()
        registers["%rd1"], first, raw = np.uint64(a_name), "%rd1", raw_a | raw_b
    majors = [] if type == "tf32" else [b_major] if in_registers else [a_major, b_major]
    flags = "".join(f", {int(x)}" for x in majors)
    line = f"{name} {listed(100, n // 2)}, {first}, %rd2, KEEPS, 1, 1{flags};"
    return line, registers, raw, a @ b.T, n


def product(line, keeps="0"):
    return (
        f"wgmma.fence.sync.aligned; {line.replace('KEEPS', keeps)}"
        "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    )


@pytest.mark.parametrize("name", NAMES)
def test_each_product(name):
    """Every width and type, A in shared memory and in registers."""
    for in_registers, early in ((False, True), (True, False)):
        line, registers, raw, wanted, n = operands(name, 128, False, False, in_registers)
        found = run(product(line), registers, threads=128, shared=65536, begins=raw, early=early)
        assert np.array_equal(result_of(found, n), wanted), (in_registers, early)


MAJORS = [*itertools.product(("f16.f16", "bf16.bf16"), (False, True), (False, True))]


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize(("type", "a_major", "b_major"), [*MAJORS, ("tf32.tf32", False, False)])
def test_each_layout(type, swizzle, a_major, b_major):
    """Of tf32 PTX has no MN-major one."""
    K = 8 if type == "tf32.tf32" else 16
    for n in (64, 128):
        name = f"wgmma.mma_async.sync.aligned.m64n{n}k{K}.f32.{type}"
        line, registers, raw, wanted, n = operands(name, swizzle, a_major, b_major)
        found = run(product(line), registers, threads=128, shared=65536, begins=raw)
        assert np.array_equal(result_of(found, n), wanted), n


def test_products_add_up_and_signs():
    line, registers, raw, wanted, n = operands(BF16_64x16, 128, False, False)
    added = line.replace("KEEPS", "%p1")
    start = {f"%r{100 + i}": np.float32(3) for i in range(8)}
    both = f"wgmma.fence.sync.aligned; {added} {added.replace(', 1, 1,', ', -1, 1,')} {added}"
    ends = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    for keeps, early in itertools.product((True, False), repeat=2):
        given = {**registers, **start, "%p1": np.array(keeps)}
        found = run(both + ends, given, threads=128, shared=65536, begins=raw, early=early)
        assert np.array_equal(result_of(found, n), wanted + 3 if keeps else wanted)


def test_wgmma_result_poison_until_wait():
    line, registers, raw, _, _ = operands(BF16_64x16, 128, False, False)
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
    line, registers, raw, wanted, n = operands(BF16_64x16, 128, False, False)
    moves = "".join(f"mov.b32 %r{200 + i}, %r{100 + i};" for i in range(8))
    body = product(line).replace("wgmma.wait", moves + "wgmma.wait")
    found = run(body, registers, threads=128, shared=65536, begins=raw)
    assert np.array_equal(result_of(found, n, 200), wanted)
    moved = line.replace("%r10", "%r20").replace("KEEPS", "1")  # adds to the copies in flight
    body = product(line).replace(
        "wgmma.wait", f"{moves} {moved} wgmma.commit_group.sync.aligned;wgmma.wait"
    )
    found = run(body, registers, threads=128, shared=65536, begins=raw)
    assert np.array_equal(result_of(found, n, 200), 2 * wanted)
    assert np.array_equal(result_of(found, n), wanted)


def test_registers_written_in_flight():
    line, registers, raw, _, _ = operands(BF16_64x16, 128, False, False, in_registers=True)
    for register in ("%r103", "%r11"):
        body = product(line).replace("wgmma.wait", f"mov.b32 {register}, 0; wgmma.wait")
        with pytest.raises(InFlight, match="written"):
            run(body, registers, threads=128, shared=65536, begins=raw)


def test_wgmma_without_fence_noted():
    line, registers, raw, wanted, n = operands(BF16_64x16, 128, False, False, in_registers=True)
    start = {f"%r{100 + i}": np.float32(0) for i in range(8)}
    whole = product(line, "1")
    for body in (
        whole.replace("wgmma.fence.sync.aligned;", ""),
        whole.replace("aligned; wgmma.mma", "aligned; mov.b32 %r100, 0; wgmma.mma", 1),
        whole.replace("aligned; wgmma.mma", "aligned; or.b32 %r10, %r10, 0; wgmma.mma", 1),
    ):
        found = run(body, registers | start, threads=128, shared=65536, begins=raw)
        assert np.array_equal(result_of(found, n), wanted)  # ptxas mends it
        assert any("no wgmma.fence" in text for text in found["counts"]), body
    found = run(whole, registers | start, threads=128, shared=65536, begins=raw)
    assert not found["counts"]


STORED = "mad.lo.s32 %r1, %tid.x, 4, 1024; st.shared.b32 [%r1], %r2;"


@pytest.mark.parametrize(
    "order",
    ["fence.proxy.async.shared::cta; bar.sync 0;", "bar.sync 0; fence.proxy.async.shared::cta;"],
)
def test_wgmma_operands_need_fence_and_barrier(order):
    line, registers, raw, _, _ = operands(BF16_64x16, 128, False, False)
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
    line, registers, raw, _, _ = operands(BF16_64x16, 128, False, False)
    given = {"threads": 128, "shared": 65536, "begins": raw}
    whole = product(line)
    with pytest.raises(Race, match="in flight"):
        run(whole.replace("wgmma.wait", STORED + "wgmma.wait"), registers, **given)
    with pytest.raises(Race, match=r"which warp . read"):  # another warp may still wait
        run(whole + STORED, registers, **given)
    run(whole + "bar.sync 0;" + STORED, registers, **given)


def test_wgmma_rejects_bounds_and_partial_group():
    line, registers, raw, _, _ = operands(BF16_64x16, 128, False, False)
    with pytest.raises(OutOfBounds):
        run(product(line), registers, threads=128, shared=32768, begins=raw[:32768])
    with pytest.raises(Diverged):
        run(product(line), registers, threads=64, shared=65536, begins=raw)


# stmatrix

STMATRIX = sorted(n for n in INSTRUCTIONS if n.startswith("stmatrix"))


@pytest.mark.parametrize("name", STMATRIX)
def test_stmatrix(name):
    count = int(re.search(r"x(\d)", name)[1])
    lane, row = np.arange(32), np.arange(8)
    draw = np.random.default_rng(0)
    matrices = draw.integers(0, 2**16, (count, 8, 8)).astype(np.uint32)
    source = matrices.swapaxes(1, 2) if ".trans" in name else matrices
    g, t = lane // 4, lane % 4
    registers = {
        f"%r{10 + i}": source[i][g, 2 * t] | source[i][g, 2 * t + 1] << 16 for i in range(count)
    }
    places = draw.permutation(8 * count)  # each row somewhere else
    registers["%r1"] = 1024 + 16 * np.resize(places, 32)
    found = run(f"{name} [%r1], {listed(10, count)};", registers, shared=16 * 8 * count)
    held = np.ascontiguousarray(found["shared"][0]).view(np.uint16).reshape(-1, 8)
    for i in range(count):
        assert np.array_equal(held[places[8 * i + row]], matrices[i])
