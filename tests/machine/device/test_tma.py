"""mbarriers, TMA, tensor maps, and warps with roles of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.machine.device.faults import Deadlock, Misaligned, OutOfBounds, Race, Unfenced
from tests.machine.device.mbarriers import Miscounted
from tests.machine.device.snippets import run
from tests.machine.device.tensor_copies import F32, WrongMap, host_map

THREADS = np.arange(64)
BAR = 4096 + 1024  # address of an mbarrier behind 4 KB of boxes
INIT = f"""
    setp.eq.u32 %p1, %tid.x, 0; mov.b32 %r90, {BAR}; mov.b32 %r91, 1024;
    @%p1 mbarrier.init.shared::cta.b64 [%r90], 1;
    bar.sync 0;
"""
WAIT = """
    {{ .reg .pred complete;
    waitLoop: mbarrier.try_wait.parity.shared.b64 complete, [{bar}], {parity};
    @!complete bra.uni waitLoop; }}
"""
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%r91], [%rd1, {%r1, %r2}], [%r90];"
)
READ = "mad.lo.s32 %r3, %tid.x, 4, 1024; ld.shared.b32 %r4, [%r3];"


def wait(parity=0, bar="%r90"):
    return WAIT.format(bar=bar, parity=parity)


def copies(body, x, box, at=(0, 0), swizzle=0, **options):
    """Run lines with %rd1 the address of a map of x and %r1, %r2 the box's place."""
    mapped = torch.from_numpy(host_map(x, box, swizzle, F32))
    given = {"%rd1": np.uint64(mapped.data_ptr()), "%r1": np.int32(at[1]), "%r2": np.int32(at[0])}
    options = {"threads": 64, "shared": 8192, "tensors": [x, mapped], **options}
    given = {name: value for name, value in given.items() if name in body}
    return run(body, given | options.pop("registers", {}), **options)


def expecting(bytes, load=LOAD):
    return f"{INIT} @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r90], {bytes}; @%p1 {load}"


# Loads


@pytest.mark.parametrize("swizzle", [0, 1, 2, 3])
@pytest.mark.parametrize("at", [(-3, -5), (17, 60), (100, 100)])
def test_tma_load_swizzle_and_bounds(swizzle, at):
    x = torch.randn(20, 64)
    columns = 32 if swizzle == 0 else 4 << swizzle
    body = expecting(64 * columns) + wait()
    found = copies(body, x, (16, columns), at, swizzle)
    wanted = torch.zeros(16, columns)
    for i in range(16):
        for j in range(columns):
            row, column = at[0] + i, at[1] + j
            if 0 <= row < 20 and 0 <= column < 64:
                wanted[i, j] = x[row, column]
    raw = wanted.view(torch.uint8).numpy().reshape(-1)
    address = 1024 + np.arange(len(raw))
    place = (address ^ (((address >> 7) & (1 << swizzle) - 1) << 4)) - 1024
    assert np.array_equal(found["shared"][0, place], raw)


def test_tma_load_poison_until_mbarrier_test():
    x = torch.ones(16, 32)
    found = copies(expecting(2048) + wait() + READ, x, (16, 32))
    assert (found["%r4"].view(np.float32) == 1).all()
    untested = expecting(2048).replace("bar.sync 0;", "bar.sync 0; mov.b32 %r99, 0;")
    with pytest.raises(Race, match="in flight"):
        copies(untested + READ, x, (16, 32))
    with pytest.raises(Race, match="ends with this copy in flight"):
        copies(untested, x, (16, 32))
    late = wait() + "setp.lt.u32 %p2, %tid.x, 32;"  # only the first warp tests
    body = expecting(2048) + "setp.ge.u32 %p2, %tid.x, 32; @%p2 bra SKIP;" + late + "SKIP: " + READ
    with pytest.raises(Race, match="no barrier between"):
        copies(body, x, (16, 32))


def test_mbarrier_counts_bytes():
    x = torch.ones(16, 32)
    for bytes in (2047, 2049):
        with pytest.raises(Deadlock, match="bytes missing"):
            copies(expecting(bytes) + wait(), x, (16, 32))
    outside = copies(expecting(2048) + wait(), x, (16, 32), (16, 0))  # they count as well
    assert (outside["shared"][0, :2048] == 0).all()
    with pytest.raises(Deadlock, match="1 of 1 arrivals"):
        copies(INIT + wait(), x, (16, 32))


def test_phases():
    """Parity 1 of a fresh mbarrier holds at once; each phase is complete once."""
    x = torch.ones(16, 32)
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r90]; bar.sync 0;"
    copies(INIT + wait(1) + arrive + wait(0) + arrive + wait(1), x, (16, 32))
    copies(INIT + wait(-1) + arrive + wait(-2) + arrive + wait(-1), x, (16, 32))
    for parity in (1, -1):
        with pytest.raises(Deadlock, match="phase 1"):
            copies(INIT + arrive + wait(0) + wait(parity), x, (16, 32))
    with pytest.raises(Miscounted, match="more arrive"):
        copies(INIT.replace(", 1;", ", 2;") + arrive.replace("[%r90]", "[%r90], 3"), x, (16, 32))


def test_mbarrier_rejects():
    x = torch.ones(16, 32)
    arrive = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r90];"
    for body in (
        "setp.eq.u32 %p1, %tid.x, 0; mov.b32 %r90, 1024;" + arrive,
        INIT + "@%p1 mbarrier.inval.shared::cta.b64 [%r90];" + arrive,
        INIT + arrive + "@%p1 mbarrier.init.shared::cta.b64 [%r90], 1;",
    ):
        with pytest.raises(Miscounted):
            copies(body, x, (16, 32))
    with pytest.raises(Miscounted, match="in flight"):
        copies(expecting(2048) + "@%p1 mbarrier.inval.shared::cta.b64 [%r90];", x, (16, 32))
    with pytest.raises(Race, match=r"no barrier since warp 0's mbarrier.init"):
        copies(INIT.replace("bar.sync 0;", "") + wait(1), x, (16, 32))


def test_tensor_map_rejects():
    x = torch.ones(16, 64)
    for box, swizzle, kind in (
        ((16, 64), 3, WrongMap),
        ((16, 3), 0, WrongMap),
        ((16, 16), 3, NotImplementedError),
    ):
        with pytest.raises(kind):
            copies(expecting(2048) + wait(), x, box, swizzle=swizzle)
    load = LOAD.replace("2d", "3d").replace("%r2}", "%r2, %r2}")
    with pytest.raises(WrongMap, match="2 axes, 3 coordinates"):
        copies(expecting(2048, load) + wait(), x, (16, 32))
    with pytest.raises(Misaligned):
        copies(expecting(2048, LOAD.replace("[%r91]", "[%r91+16]")) + wait(), x, (16, 32))
    with pytest.raises(Misaligned):
        copies(expecting(2048) + wait(), torch.ones(16, 65)[:, :64], (16, 32))
    with pytest.raises(OutOfBounds):
        copies(expecting(2048, LOAD.replace("[%r91]", "[%r91+7168]")) + wait(), x, (16, 32))


STORED = "mad.lo.s32 %r3, %tid.x, 4, 1024; st.shared.b32 [%r3], %tid.x;"


def test_tma_load_races():
    x = torch.ones(16, 32)
    fence = "fence.proxy.async.shared::cta;"
    rest = expecting(2048).removeprefix(INIT) + wait()
    copies(STORED + fence + INIT + rest, x, (16, 32))
    with pytest.raises(Unfenced):
        copies(STORED + INIT + rest, x, (16, 32))
    with pytest.raises(Race, match="a warp wrote"):
        copies(INIT + STORED + fence + rest, x, (16, 32))
    with pytest.raises(Race, match="a warp read"):
        copies(INIT + READ + rest, x, (16, 32))
    copies(READ + INIT + rest, x, (16, 32))


# Stores

STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r91];"
READY = (
    "setp.eq.u32 %p1, %tid.x, 0; mov.b32 %r91, 1024; setp.lt.u32 %p2, %tid.x, 32;"
    + STORED
    + "fence.proxy.async.shared::cta; bar.sync 0;"
)
COMMIT = "cp.async.bulk.commit_group;"


def test_tma_store_needs_fence_and_wait():
    x = torch.zeros(4, 16)
    body = f"{READY} @%p1 {STORE} @%p2 {COMMIT} @%p2 cp.async.bulk.wait_group.read 0;"
    copies(body.replace("fence.proxy.async.shared::cta;", "fence.proxy.async;"), x, (4, 16))
    with pytest.raises(Unfenced):
        copies(body.replace("fence.proxy.async.shared::cta;", ""), x, (4, 16))
    with pytest.raises(Race, match="a warp wrote"):
        copies(body.replace("bar.sync 0;", ""), x, (4, 16))
    with pytest.raises(Race, match="stores of TMA in flight"):
        copies(body.replace("read 0", "read 1"), x, (4, 16))
    with pytest.raises(Race, match="stores of TMA in flight"):
        copies(body.replace(COMMIT, "mov.b32 %r99, 0;"), x, (4, 16))
    with pytest.raises(Race, match="is in flight"):
        copies(body.replace(COMMIT, COMMIT + STORED), x, (4, 16))
    with pytest.raises(Race, match="which warp 0 read"):  # the second warp does not wait
        copies(body + STORED, x, (4, 16))
    copies(body + "bar.sync 0;" + STORED, x, (4, 16))


SUM = STORE.replace("cp.async", "cp.reduce.async").replace("cta.bulk", "cta.add.bulk")
WRITTEN = f"@%p2 {COMMIT} @%p2 cp.async.bulk.wait_group 0;"


@pytest.mark.parametrize("early", [False, True])
def test_tma_reduce_bounds(early):
    x = torch.full((6, 16), 2.0)
    ones = "mad.lo.s32 %r3, %tid.x, 4, 1024; mov.b32 %r4, 0f3F800000; st.shared.b32 [%r3], %r4;"
    ready = READY.replace(STORED, ones)
    copies(f"{ready} @%p1 {SUM} {WRITTEN} @%p1 {SUM} {WRITTEN}", x, (4, 16), (4, 0), early=early)
    assert (x[4:] == 4).all() and (x[:4] == 2).all()


@pytest.mark.parametrize(("first", "second"), [(SUM, SUM), (STORE, SUM), (SUM, STORE)])
def test_tma_reduce_order(first, second):
    """`.read` says only that shared memory may change."""
    x = torch.zeros(8, 16)
    body = f"{READY} @%p1 {first} {WRITTEN} @%p1 {second} {WRITTEN}"
    copies(body, x, (4, 16))
    with pytest.raises(Race, match="in any order"):
        copies(
            body.replace(WRITTEN, WRITTEN.replace("wait_group", "wait_group.read"), 1), x, (4, 16)
        )
    other = second.replace("%r2", "%r5")  # four rows further down
    copies(f"{READY} mov.b32 %r5, 4; @%p1 {first} @%p1 {other} {WRITTEN}", x, (4, 16))


# Tensor maps that the kernel makes

FIELDS = """
    setp.lt.u32 %p2, %tid.x, 32; setp.eq.u32 %p3, %tid.x, 0; cvt.u64.u32 %rd9, 1024;
    mad.lo.s32 %r10, %tid.x, 4, 1024; @%p2 st.shared.b32 [%r10 + 0], 0;
    @%p3 tensormap.replace.tile.global_address.shared::cta.b1024.b64 [ %rd9 + 0 ], %rd3;
    @%p3 tensormap.replace.tile.rank.shared::cta.b1024.b32 [ %rd9 + 0 ], 0x1;
    @%p3 tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [ %rd9 + 0 ], 0x0, 32;
    @%p3 tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [ %rd9 + 0 ], 0x1, 8;
    @%p3 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [ %rd9 + 0 ], 0x0, 40;
    @%p3 tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [ %rd9 + 0 ], 0x1, 12;
    @%p3 tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [ %rd9 + 0 ], 0x0, %rd4;
    @%p3 tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [ %rd9 + 0 ], 0x0, 1;
    @%p3 tensormap.replace.tile.element_stride.shared::cta.b1024.b32 [ %rd9 + 0 ], 0x1, 1;
    @%p3 tensormap.replace.tile.elemtype.shared::cta.b1024.b32 [ %rd9 + 0 ], 0x7;
    @%p3 tensormap.replace.tile.interleave_layout.shared::cta.b1024.b32 [ %rd9 + 0 ], 0x0;
    @%p3 tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [ %rd9 + 0 ], 0x3;
    @%p3 tensormap.replace.tile.fill_mode.shared::cta.b1024.b32 [ %rd9 + 0 ], 0x0;
    @%p2 tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [ %rd1 + 0 ], [ %rd9 + 0 ], 0x80;
    ACQUIRE
    fence.proxy.async.shared::cta;
"""
ACQUIRE = "@%p2 fence.proxy.tensormap::generic.acquire.gpu [ %rd1 + 0 ], 0x80;"
FIELDS = FIELDS.replace("ACQUIRE", ACQUIRE)


def made_here(body):
    x, room = torch.randn(12, 40), torch.zeros(256, dtype=torch.uint8)
    registers = {
        "%rd1": np.uint64(room.data_ptr() + -room.data_ptr() % 64),
        "%r1": 16,
        "%r2": 8,
        "%rd3": np.uint64(x.data_ptr()),
        "%rd4": np.uint64(160),
    }
    return x, run(body, registers, threads=64, shared=8192, tensors=[x, room])


def test_tensor_map_made_by_kernel():
    body = FIELDS + expecting(1024) + wait()
    x, found = made_here(body)
    wanted = torch.zeros(8, 32)
    wanted[:4, :24] = x[8:, 16:]
    place = np.arange(0, 1024, 16)
    place = place ^ ((place >> 7 & 7) << 4)
    held = found["shared"][0, place[:, None] + np.arange(16)].copy().view(np.float32)
    assert np.array_equal(held.reshape(8, 32), wanted.numpy())
    with pytest.raises(Unfenced, match=r"without fence.proxy.tensormap"):
        made_here(body.replace(ACQUIRE, ""))
    other = body.replace("setp.eq.u32 %p1, %tid.x, 0;", "setp.eq.u32 %p1, %tid.x, 32;")
    made_here(other)
    with pytest.raises(Race, match=r"no barrier since warp 0's fence.proxy.tensormap"):
        made_here(
            INIT.replace("%p1, %tid.x, 0", "%p1, %tid.x, 32")
            + FIELDS
            + expecting(1024).replace(INIT, "")
        )


# Roles


ROLES = f"""
    {INIT} add.s32 %r92, %r90, 8; @%p1 mbarrier.init.shared::cta.b64 [%r92], 32;
    bar.sync 0; mov.b32 %r5, 0; mov.b32 %r6, 0;
    setp.lt.u32 %p2, %tid.x, 32;
    @%p2 bra PRODUCER;
    CONSUMER: setmaxnreg.inc.sync.aligned.u32 232;
    {wait("%r5")}
    ld.shared.b32 %r7, [%r91]; add.s32 %r6, %r6, %r7;
    mbarrier.arrive.shared::cta.b64 _, [%r92];
    xor.b32 %r5, %r5, 1; add.s32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, 5; @%p3 bra CONSUMER;
    mad.wide.u32 %rd5, %tid.x, 4, %rd3; st.global.b32 [%rd5], %r6;
    bra END;
    PRODUCER: setmaxnreg.dec.sync.aligned.u32 40; xor.b32 %r9, %r5, 1;
    {wait("%r9", "%r92")}
    @%p1 st.shared.b32 [%r91], %r8;
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r90];
    xor.b32 %r5, %r5, 1; add.s32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, 5; @%p3 bra PRODUCER;
    END: barrier.sync 1; mov.b32 %r99, 0;
"""


def roles(body, order):
    x = torch.zeros(64, dtype=torch.int32)
    registers = {"%rd3": np.uint64(x.data_ptr()), "%r8": 0}
    run(body, registers, threads=64, shared=8192, tensors=[x], order=order)
    return x


@pytest.mark.parametrize("order", [0, 1])
def test_a_producer_and_a_consumer(order):
    assert (roles(ROLES, order)[32:] == 0 + 1 + 2 + 3 + 4).all()


def test_what_roles_do_wrong_is_noticed():
    """In one order of the groups at least."""
    full, empty = wait("%r5"), wait("%r9", "%r92")
    free = "    mbarrier.arrive.shared::cta.b64 _, [%r92];"
    for change, kinds in (
        ((full, ""), (Race, Miscounted, Deadlock)),
        ((empty, ""), (Race, Miscounted, Deadlock)),
        ((free, ""), (Deadlock,)),
        (("@%p1 mbarrier.arrive.shared::cta.b64 _, [%r90];", ""), (Deadlock,)),
        (("xor.b32 %r9, %r5, 1", "mov.b32 %r9, %r5"), (Deadlock,)),
    ):
        body = ROLES.replace(*change)
        assert body != ROLES, change
        noticed = []
        for order in (0, 1):
            try:
                roles(body, order)
            except (Deadlock, Race, Miscounted) as fault:
                noticed.append(fault)
        assert noticed and isinstance(noticed[0], kinds), change
        if kinds == (Deadlock,):
            assert "every group of warps waits" in str(noticed[0])
            assert "mbarrier at byte 410" in str(noticed[0])


def test_named_barriers_and_brx():
    """Three roles of one warp each; two of them meet at barrier 2."""
    body = """
        shr.u32 %r1, %tid.x, 5; mov.b32 %r2, 0; setmaxnreg.dec.sync.aligned.u32 40;
        LIST: .branchtargets FIRST, SECOND, THIRD;
        brx.idx %r1, LIST;
        FIRST: mov.b32 %r9, 1024; st.shared.b32 [%r9], 7; bar.sync 2, 64; bra END;
        SECOND: bar.sync 2, 64; mov.b32 %r9, 1024; ld.shared.b32 %r2, [%r9]; bra END;
        THIRD: mov.b32 %r2, 3;
        END: mad.wide.u32 %rd5, %tid.x, 4, %rd3; st.global.b32 [%rd5], %r2;
    """
    for order in (0, 1):
        x = torch.zeros(96, dtype=torch.int32)
        given = {"threads": 96, "shared": 64, "tensors": [x], "order": order}
        start = {"%rd3": np.uint64(x.data_ptr())}
        run(body, start, **given)
        assert x[::32].tolist() == [0, 7, 3]
        with pytest.raises(Deadlock, match=r"bar.sync 2, 64"):
            run(body.replace("FIRST: mov", "FIRST: bar.sync 3, 64; mov"), start, **given)
        with pytest.raises(Deadlock, match=r"bar.sync 2, 64"):
            run(body.replace("bar.sync 2, 64; mov", "bar.sync 2, 96; mov"), start, **given)
        x.zero_()
        spelt = body.replace("brx.idx", "brx.idx.uni").replace("bar.sync", "barrier.sync.aligned")
        run(spelt, start, **given)
        assert x[::32].tolist() == [0, 7, 3]
