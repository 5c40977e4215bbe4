"""Loops of different lengths, scopes, early ends, barriers.

How threads that part meet again, varlen_attention's run holds.
"""

import numpy as np
import pytest

from tests.machine.device.faults import Deadlock, Diverged
from tests.machine.device.snippets import run

LANES = np.arange(32)


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
