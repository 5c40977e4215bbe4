"""Branches, loops of different lengths, barriers; shuffles and mma of a warp."""

import itertools

import numpy as np
import pytest

from tests.machine.device.faults import Deadlock, Diverged
from tests.machine.device.registry import INSTRUCTIONS
from tests.machine.device.snippets import run

LANES = np.arange(32)


def test_divergent_threads_reconverge():
    found = run("""
        setp.lt.s32 %p1, %tid.x, 10;
        mov.b32 %r1, 0;
        @%p1 bra SMALL;
        add.s32 %r1, %r1, 100;
        bra.uni JOIN;
        SMALL: add.s32 %r1, %r1, 1;
        JOIN: add.s32 %r1, %r1, 1000;
    """)["%r1"][0]
    assert found.tolist() == [1001] * 10 + [1100] * 22


def test_loops_of_different_lengths():
    """Thread l of block b goes round l + 10 b + 1 times; nested in it, a loop of 3."""
    found = run(
        """
        mad.lo.s32 %r1, %ctaid.x, 10, %tid.x;
        mov.b32 %r2, 0; mov.b32 %r4, 0;
        AGAIN: add.s32 %r2, %r2, 1;
        mov.b32 %r3, 0;
        INNER: add.s32 %r3, %r3, 1; add.s32 %r4, %r4, 1;
        setp.lt.s32 %p2, %r3, 3;
        @%p2 bra INNER;
        setp.le.s32 %p1, %r2, %r1;
        @%p1 bra AGAIN;
    """,
        blocks=2,
    )
    wanted = LANES + 10 * np.arange(2)[:, None] + 1
    assert np.array_equal(found["%r2"], wanted) and np.array_equal(found["%r4"], 3 * wanted)


def test_scoped_labels_and_registers():
    found = run("""
        mov.b32 %r1, 0;
        { .reg .pred P; setp.eq.s32 P, %tid.x, 0; @P bra DONE; add.s32 %r1, %r1, 1; DONE: }
        { .reg .pred P; setp.eq.s32 P, %tid.x, 1; @P bra DONE; add.s32 %r1, %r1, 1; DONE: }
    """)["%r1"][0]
    assert found.tolist() == [1, 1] + [2] * 30


@pytest.mark.parametrize("end", ["ret", "exit"])
def test_early_exit(end):
    found = run(f"""
        setp.lt.s32 %p1, %tid.x, 10; mov.b32 %r1, 1;
        @!%p1 bra ON;
        {end};
        ON: mov.b32 %r1, 2;
    """)["%r1"][0]
    assert found.tolist() == [1] * 10 + [2] * 22


def test_divergent_barrier_rejected():
    body = "setp.lt.s32 %p1, %tid.x, 32; @%p1 bra SKIP; bar.sync 0; SKIP:"
    with pytest.raises(Diverged, match=r"threads of a block have parted"):
        run(body + "mov.b32 %r1, 0;", threads=64)
    run(body.replace("%tid.x, 32", "%ctaid.x, 1"), threads=64, blocks=2)  # whole blocks may


def test_divergent_shuffle_rejected():
    body = "setp.lt.s32 %p1, %tid.x, 16; @%p1 shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;"
    with pytest.raises(Diverged, match="lanes of a warp"):
        run(body)


ROLES = """
    mov.b32 %r9, global_smem;
    setp.lt.u32 %p1, %tid.x, 32;
    @%p1 bra FIRST;
    {second}
    bra.uni STOP;
    FIRST: {first}
    STOP: mov.b32 %r8, 0;
"""


@pytest.mark.parametrize("order", [0, 1])
def test_named_barriers_between_groups(order):
    first = "st.shared.b32 [%r9], 5; barrier.sync 1, 64;"
    second = "barrier.sync 1, 64; ld.shared.b32 %r1, [%r9]; st.shared.b32 [%r9+4], %r1;"
    found = run(ROLES.format(first=first, second=second), threads=64, shared=16, order=order)
    assert found["shared"][0].view(np.uint32)[1] == 5


def test_deadlock_names_barriers():
    first, second = "barrier.sync 1, 64;", "barrier.sync 2, 64;"
    with pytest.raises(Deadlock, match=r"barrier.sync 2, 64.*barrier.sync 1, 64|1, 64.*2, 64"):
        run(ROLES.format(first=first, second=second), threads=64, shared=16)


# Warps


@pytest.mark.parametrize(
    ("name", "b", "c", "wanted"),
    [
        ("shfl.sync.bfly.b32", 5, 31, LANES ^ 5),
        ("shfl.sync.idx.b32", 7, 31, np.full(32, 7)),
        ("shfl.sync.idx.b32", 3, 0x181F, LANES // 8 * 8 + 3),  # segments of 8
        ("shfl.sync.up.b32", 4, 0, np.where(LANES >= 4, LANES - 4, LANES)),
        ("shfl.sync.up.b32", 1, 0x1800, np.where(LANES % 8 >= 1, LANES - 1, LANES)),
        ("shfl.sync.down.b32", 4, 31, np.where(LANES < 28, LANES + 4, LANES)),
        ("shfl.sync.bfly.b32", 16, 31, LANES ^ 16),
    ],
)
def test_shuffles(name, b, c, wanted):
    body = f"{name} %r1|%p1, %r2, {b}, {c}, -1;"
    found = run(body, {"%r2": np.arange(64) + 100}, threads=64)
    assert np.array_equal(found["%r1"][0], np.concatenate((wanted, wanted + 32)) + 100)
    same = wanted == LANES
    if name in ("shfl.sync.up.b32", "shfl.sync.down.b32"):
        assert np.array_equal(found["%p1"][0, :32], ~same)


@pytest.mark.parametrize("name", sorted(n for n in INSTRUCTIONS if n.startswith("redux")))
def test_reductions(name):
    draw = np.random.default_rng(0)
    numbers = draw.integers(0, 2**32, 64, dtype=np.uint32)
    found = run(f"{name} %r1, %r2, -1;", {"%r2": numbers}, threads=64)["%r1"][0]
    reduce = {
        "add": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[name.split(".")[2]].reduce
    for warp in (slice(0, 32), slice(32, 64)):
        seen = numbers[warp].view(np.int32) if name.endswith("s32") else numbers[warp]
        assert (found[warp] == np.uint32(int(reduce(seen)) % 2**32)).all()


def number_of(type, draw, shape):
    """Numbers that the type holds exactly, and their bits."""
    x = draw.integers(-8, 9, shape).astype(np.float32) / 4
    if type == "f16":
        return x, x.astype(np.float16).view(np.uint16).astype(np.uint32)
    bits = x.view(np.uint32)
    return x, bits if type == "tf32" else bits >> 16


MMA = sorted(n for n in INSTRUCTIONS if n.startswith("mma."))


@pytest.mark.parametrize(("name", "blocks"), [*itertools.product(MMA, (1, 2))])
def test_mma(name, blocks):
    """Each thread's registers by the ISA's tables, the product by numpy; small exact numbers."""
    draw = np.random.default_rng(0)
    parts = name.split(".")
    K, type = int(parts[3].split("k")[1]), parts[7]
    a, a_bits = number_of(type, draw, (blocks, 16, K))
    b, b_bits = number_of(type, draw, (blocks, K, 8))
    c = draw.integers(-9, 9, (blocks, 16, 8)).astype(np.float32)
    each = 1 if type == "tf32" else 2  # numbers in a register
    registers = {}
    g, t = LANES // 4, LANES % 4
    count = 16 * K // 32 // each
    for i in range(count):  # A: registers go down the rows first, then to the right
        row = g + 8 * (i % 2)
        columns = [each * t + 4 * each * (i // 2) + e for e in range(each)]
        bits = sum(a_bits[:, row, column] << 16 * e for e, column in enumerate(columns))
        registers[f"%r{10 + i}"] = bits.astype(np.uint32)
    for i in range(count // 2):
        rows = [each * t + 4 * each * i + e for e in range(each)]
        bits = sum(b_bits[:, row, g] << 16 * e for e, row in enumerate(rows))
        registers[f"%r{20 + i}"] = bits.astype(np.uint32)
    for i in range(4):
        registers[f"%r{30 + i}"] = c[:, g + 8 * (i // 2), 2 * t + i % 2]
    lists = [
        "{" + ", ".join(f"%r{start + i}" for i in range(n)) + "}"
        for start, n in ((40, 4), (10, count), (20, count // 2), (30, 4))
    ]
    found = run(f"{name} {', '.join(lists)};", registers, blocks=blocks)
    wanted = a @ b + c
    for i in range(4):
        part = wanted[:, g + 8 * (i // 2), 2 * t + i % 2]
        assert np.array_equal(found[f"%r{40 + i}"].view(np.float32), part), (name, i)
