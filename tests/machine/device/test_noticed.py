"""README.md's table of what the machine notices, row by row: a few lines of PTX that are right, and
what each mistake in them raises. What instructions compute, runs of kernels hold."""

import re
from functools import partial

import numpy as np
import pytest
import torch

from tests.machine.device.faults import (
    Deadlock,
    Diverged,
    InFlight,
    MachineError,
    Misaligned,
    OutOfBounds,
    Race,
    Unfenced,
)
from tests.machine.device.mbarriers import Miscounted
from tests.machine.device.snippets import run
from tests.machine.device.tensor_copies import F32, WrongMap, host_map

FENCE = "fence.proxy.async.shared::cta;"
NOTHING = "mov.b32 %r99, 0;"


def noticed(body, *mistakes, go=run):
    """Each of these (old, new, fault, message)."""
    go(body)
    for old, new, fault, message in mistakes:
        assert old in body, old
        with pytest.raises(fault, match=message):
            go(body.replace(old, new))


# Memory


def test_global_memory_bounds_and_alignment():
    """A padded row's end is not the tensor's."""
    x, rows = torch.zeros(64), torch.zeros(4, 10)[:, :8]
    body = """
        ld.param.b64 %rd1, [snippet_param_0]; ld.param.b64 %rd2, [snippet_param_1];
        mad.wide.s32 %rd1, %tid.x, 16, %rd1; setp.lt.s32 %p1, %tid.x, 16;
        @%p1 ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+0]; ld.global.b32 %r5, [%rd2+28];
    """
    arguments = [("u64", x.data_ptr()), ("u64", rows.data_ptr())]
    noticed(
        body,
        ("@%p1 ld", "ld", OutOfBounds, r"PTX line \d+ .*ld.global.v4.b32"),
        ("@%p1", "@!%p1", OutOfBounds, "in no tensor"),
        ("%rd1+0", "%rd1+8", Misaligned, "no multiple of 16"),
        ("%rd2+28", "%rd2+32", OutOfBounds, "padded"),
        go=partial(run, tensors=[x, rows], arguments=arguments),
    )


def test_shared_memory_bounds_alignment_and_poison():
    body = "mov.b32 %r9, global_smem; ld.shared.v2.b32 {%r1, %r2}, [%r9+0]; add.f32 %r3, %r4, %r4;"
    found = run(body, shared=16)
    for unwritten in ("%r1", "%r3"):
        assert np.isnan(found[unwritten].view(np.float32)).all()
    noticed(
        body,
        ("+0", "+-8", OutOfBounds, "of 16 of shared memory"),
        ("+0", "+16", OutOfBounds, "of 16 of shared memory"),
        ("+0", "+4", Misaligned, "no multiple of 8"),
        go=partial(run, shared=16),
    )


PLACES = """
    mov.b32 %r9, global_smem; mad.lo.s32 %r1, %tid.x, 16, %r9;
    xor.b32 %r2, %tid.x, 32; mad.lo.s32 %r2, %r2, 16, %r9;
    ld.param.b64 %rd2, [snippet_param_0]; mad.wide.s32 %rd1, %tid.x, 16, %rd2;
"""
COPY = "cp.async.cg.shared.global [%r1+{0}], [%rd1+{0}], 16; cp.async.commit_group;"


def _copies(body):
    x = torch.arange(512, dtype=torch.int32)
    given = dict(shared=2048, tensors=[x], arguments=[("u64", x.data_ptr())])
    return run(PLACES + body, threads=64, blocks=2, **given)


def test_copies_are_poison_until_their_wait():
    body = COPY.format(0) + COPY.format(1024) + "cp.async.wait_group 1;"
    body += "ld.shared.b32 %r3, [%r1]; ld.shared.b32 %r4, [%r1+1024];"
    arrived, on_its_way = 4 * np.arange(64), 0x7FFF7FFF
    for change, first, second in (
        (("group 1", "group 2"), on_its_way, on_its_way),
        (("group 1", "group 1"), arrived, on_its_way),
        (("group 1", "group 0"), arrived, arrived + 256),
        (("cp.async.commit_group;", ""), on_its_way, on_its_way),
    ):
        found = _copies(body.replace(*change))
        assert (found["%r3"][0] == first).all() and (found["%r4"][0] == second).all(), change


def test_races_between_warps():
    write, read, back = "st.shared.b32 [%r1], 5;", "ld.shared.b32 %r3, [%r2];", "bar.sync 1;"
    noticed(
        f"{write} bar.sync 0; {read} {back} {write}",
        ("bar.sync 0;", "", Race, r"warp \d reads byte .* which warp \d wrote"),
        (back, "", Race, r"warp \d writes byte .* which warp \d read"),
        (f"bar.sync 0; {read}", "st.shared.b32 [%r2], 6;", Race, r"writes byte .* \d wrote"),
        go=_copies,
    )
    copied = COPY.format(0) + "cp.async.wait_group 0; bar.sync 0;" + read
    noticed(copied, ("bar.sync 0;", "", Race, "reads byte"), go=_copies)
    run(PLACES.partition("ld.param")[0] + write + "ld.shared.b32 %r3, [%r1];", shared=512)


# Threads that part, and roles


def test_parted_threads():
    body = "setp.lt.s32 %p1, %ctaid.x, 1; @%p1 bra SKIP; bar.sync 0; SKIP: mov.b32 %r1, 0;"
    by_thread = ("%ctaid.x, 1", "%tid.x, 32", Diverged, "threads of a block have parted")
    noticed(body, by_thread, go=partial(run, threads=64, blocks=2))
    body = "setp.lt.s32 %p1, %tid.x, 32; @%p1 shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;"
    noticed(body, ("%tid.x, 32", "%tid.x, 16", Diverged, "lanes of a warp"))


def test_loops_and_ends_of_threads():
    """Thread l of block b goes round l + 10 b + 1 times, with a loop of 3 inside; ten end early."""
    body = """
        mad.lo.s32 %r1, %ctaid.x, 10, %tid.x; mov.b32 %r2, 0; mov.b32 %r4, 0;
        AGAIN: add.s32 %r2, %r2, 1; mov.b32 %r3, 0;
        INNER: add.s32 %r3, %r3, 1; add.s32 %r4, %r4, 1; setp.lt.s32 %p2, %r3, 3; @%p2 bra INNER;
        setp.le.s32 %p1, %r2, %r1; @%p1 bra AGAIN;
        setp.lt.s32 %p1, %tid.x, 10; mov.b32 %r5, 1; @!%p1 bra ON; END; ON: mov.b32 %r5, 2;
    """
    for end in ("ret", "exit"):
        found = run(body.replace("END", end), blocks=2)
        wanted = np.arange(32) + 10 * np.arange(2)[:, None] + 1
        assert np.array_equal(found["%r2"], wanted) and np.array_equal(found["%r4"], 3 * wanted)
        assert (found["%r5"] == [1] * 10 + [2] * 22).all()


@pytest.mark.parametrize("line", ["frobnicate.b32 %r1, %r2;", "add.sat.s32 %r1, %r2, %r3;"])
def test_unknown_instruction_or_modifier(line):
    with pytest.raises(MachineError, match=rf"PTX line \d+ .*unknown instruction {line[:5]}"):
        run(line)


@pytest.mark.parametrize("order", [0, 1])
def test_named_barriers(order):
    body = """
        mov.b32 %r9, global_smem; setp.lt.u32 %p1, %tid.x, 32; @%p1 bra FIRST;
        barrier.sync 1, 64; ld.shared.b32 %r1, [%r9]; st.shared.b32 [%r9+4], %r1; bra.uni STOP;
        FIRST: st.shared.b32 [%r9], 5; bar.sync 1, 64; STOP: mov.b32 %r8, 0;
    """
    go = partial(run, threads=64, shared=16, order=order)
    noticed(body, ("bar.sync 1", "bar.sync 2", Deadlock, "every group.*(1, 64.*2|2, 64.*1)"), go=go)
    assert go(body)["shared"][0].view(np.uint32)[1] == 5


# wgmma

PRODUCT = """
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
        {%r100, %r101, %r102, %r103, %r104, %r105, %r106, %r107}, %rd1, %rd2, 1, 1, 1, 0, 0;
    wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
"""
FROM_REGISTERS = PRODUCT.replace("%rd1", "{%r10, %r11, %r12, %r13}").replace("0, 0;", "0;")
STORED = "mad.lo.s32 %r3, %tid.x, 4, 1024; st.shared.b32 [%r3], %tid.x;"


def _multiply(body, threads=128, shared=65536):
    """%rd1 and %rd2 name tiles of zeros, swizzled by 128 bytes."""
    registers = {f"%r{i}": 0 for i in (*range(10, 14), *range(100, 108))}
    for name, start in (("%rd1", 32768), ("%rd2", 0)):
        registers[name] = np.uint64((1024 + start) >> 4 | 1024 >> 4 << 32 | 1 << 62)
    registers = {name: registers[name] for name in registers if re.search(rf"{name}\b", body)}
    given = dict(threads=threads, blocks=2, shared=shared, begins=np.zeros(shared, np.uint8))
    return run(body, registers, **given)


def test_product_in_flight():
    read = "add.f32 %r1, %r100, %r100;"
    for body, lands in (
        (PRODUCT + read, True),
        (PRODUCT.replace("aligned 0", "aligned 1") + read, False),
        (PRODUCT.replace("wgmma.commit_group.sync.aligned;", "") + read, False),
    ):
        assert np.isnan(_multiply(body)["%r1"].view(np.float32)).all() != lands
    for body, register in ((PRODUCT, "%r103"), (FROM_REGISTERS, "%r11")):
        write = f"mov.b32 {register}, 0; wgmma.wait"
        noticed(body, ("wgmma.wait", write, InFlight, "written"), go=_multiply)
    noticed(
        f"{PRODUCT} bar.sync 0; {STORED}",
        ("bar.sync 0;", "", Race, r"which warp . read"),  # another warp may still wait
        ("wgmma.wait", f"{STORED} wgmma.wait", Race, "in flight"),
        go=_multiply,
    )
    for fault, given in ((OutOfBounds, dict(shared=32768)), (Diverged, dict(threads=64))):
        with pytest.raises(fault):
            _multiply(PRODUCT, **given)


def test_product_needs_fences():
    noticed(
        f"{STORED} {FENCE} bar.sync 0; {PRODUCT}",
        (FENCE, "", Unfenced, r"no fence\.proxy\.async between"),
        (f"{STORED} {FENCE}", f"{FENCE} {STORED}", Unfenced, "st wrote"),
        ("bar.sync 0;", "", Race, "a warp wrote"),
        go=_multiply,
    )
    _multiply(f"{STORED} bar.sync 0; {FENCE} {PRODUCT}")


# mbarriers and TMA

INIT = """
    setp.eq.u32 %p1, %tid.x, 0; mov.b32 %r90, 5120; mov.b32 %r91, 1024;
    @%p1 mbarrier.init.shared::cta.b64 [%r90], 1; bar.sync 0;
"""
WAIT = """
    {{ .reg .pred complete;
    waitLoop: mbarrier.try_wait.parity.shared.b64 complete, [{bar}], {parity};
    @!complete bra.uni waitLoop; }}
"""
ARRIVE = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r90];"
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%r91], [%rd1, {%r1, %r2}], [%r90];"
)
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r91];"
SUM = STORE.replace("cp.async", "cp.reduce.async").replace("cta.bulk", "cta.add.bulk")
READ = "mad.lo.s32 %r3, %tid.x, 4, 1024; ld.shared.b32 %r4, [%r3];"


def wait(parity=0, bar="%r90"):
    return WAIT.format(bar=bar, parity=parity)


def _box_of(rows=16, columns=32, x=None, swizzle=0):
    """Runs lines with %rd1 the address of a map of x, whose boxes begin at its first element."""
    x = torch.ones(rows, columns) if x is None else x
    mapped = torch.from_numpy(host_map(x, (rows, columns), swizzle, F32))

    def go(body):
        registers = {"%rd1": np.uint64(mapped.data_ptr()), "%r1": 0, "%r2": 0}
        registers = {name: value for name, value in registers.items() if name in body}
        return run(body, registers, threads=64, shared=8192, tensors=[x, mapped])

    return go


def test_mbarriers():
    """Parity 1 of a fresh one holds at once, and each phase is complete once."""
    init = "@%p1 mbarrier.init.shared::cta.b64 [%r90], 1;"
    invalid = "mbarrier.inval.shared::cta.b64"
    noticed(
        f"{INIT} {wait(1)} bar.sync 1; {ARRIVE} {wait(0)} bar.sync 2; {ARRIVE} {wait(-1)}",
        (ARRIVE, "", Deadlock, "1 of 1 arrivals"),
        (wait(-1), f"{wait(-1)} {wait(-2)}", Deadlock, "phase 2"),
        ("bar.sync 2;", wait(1), Deadlock, "phase 1"),
        (ARRIVE, ARRIVE.replace("90];", "90], 3;"), Miscounted, "more arrive"),
        (ARRIVE, f"@%p1 {invalid} [%r90]; {ARRIVE}", Miscounted, "no mbarrier"),
        (wait(-1), init, Miscounted, "already"),
        (init, "", Miscounted, "no mbarrier"),
        (f"{init} bar.sync 0;", init, Race, "no barrier since warp 0's mbarrier.init"),
        go=partial(run, threads=64, blocks=2, shared=8192),
    )


def test_load_of_tma():
    """It lands when its mbarrier is tested, which counts bytes outside of the tensor too."""
    expect = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r90], 2048;"
    body = f"{STORED} {FENCE} {INIT} {expect} @%p1 {LOAD} {wait()} {READ}"
    in_3d = LOAD.replace("2d", "3d").replace("%r2}", "%r2, %r2}")
    first_alone = f"setp.ge.u32 %p2, %tid.x, 32; @%p2 bra SKIP; {wait()} SKIP: {READ}"
    noticed(
        body,
        (FENCE, "", Unfenced, "st wrote"),
        (f"{STORED} {FENCE} {INIT}", f"{INIT} {STORED} {FENCE}", Race, "a warp wrote"),
        (expect, f"{READ} {expect}", Race, "a warp read"),
        (wait(), "", Race, "in flight"),
        (f"{wait()} {READ}", NOTHING, Race, "ends with this copy in flight"),
        (f"{wait()} {READ}", first_alone, Race, "no barrier between"),
        (wait(), "@%p1 mbarrier.inval.shared::cta.b64 [%r90];", Miscounted, "in flight"),
        ("2048", "2047", Deadlock, "bytes missing"),
        ("2048", "2049", Deadlock, "bytes missing"),
        (LOAD, in_3d, WrongMap, "2 axes, 3 coordinates"),
        (LOAD, LOAD.replace("[%r91]", "[%r91+16]"), Misaligned, "box of TMA"),
        (LOAD, LOAD.replace("[%r91]", "[%r91+7168]"), OutOfBounds, "of shared memory"),
        go=_box_of(),
    )
    for wrong, fault in (
        (_box_of(16, 64, swizzle=3), WrongMap),
        (_box_of(16, 3), WrongMap),
        (_box_of(16, 32, torch.ones(16, 33)[:, :32]), Misaligned),
    ):
        with pytest.raises(fault):
            wrong(body)


PUBLISH = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"


def test_map_that_a_kernel_made():
    """In shared memory, by the first warp; the second one loads by it."""
    acquire = "@%p2 fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;"
    body = f"""
        {INIT} setp.lt.u32 %p2, %tid.x, 32; mad.lo.s32 %r5, %tid.x, 4, 6144; mov.b64 %rd2, 6144;
        mad.wide.u32 %rd3, %tid.x, 4, %rd1;
        @%p2 ld.global.b32 %r6, [%rd3]; @%p2 st.shared.b32 [%r5], %r6;
        @%p2 {PUBLISH} [%rd1], [%rd2], 128; {acquire} bar.sync 1; setp.eq.u32 %p1, %tid.x, 32;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r90], 2048; @%p1 {LOAD} {wait()} {READ}
    """
    noticed(
        body,
        (acquire, "", Unfenced, "without fence.proxy.tensormap"),
        ("bar.sync 1;", "", Race, "no barrier since warp 0's fence.proxy.tensormap"),
        go=_box_of(),
    )


COMMIT = "@%p2 cp.async.bulk.commit_group;"
READY = f"""
    setp.eq.u32 %p1, %tid.x, 0; mov.b32 %r91, 1024; setp.lt.u32 %p2, %tid.x, 32;
    {STORED} {FENCE} bar.sync 0;
"""


def test_store_of_tma():
    body = f"{READY} @%p1 {STORE} {COMMIT} @%p2 cp.async.bulk.wait_group.read 0;"
    ends = "ends with stores of TMA in flight"
    noticed(
        body,
        (FENCE, "", Unfenced, "st wrote"),
        ("bar.sync 0;", "", Race, "a warp wrote"),
        (COMMIT, f"{COMMIT} {STORED}", Race, "is in flight"),
        (COMMIT, NOTHING, Race, ends),
        ("read 0", "read 1", Race, ends),
        go=_box_of(4, 16),
    )
    barrier = ("bar.sync 1;", "", Race, "which warp 0 read")  # the second warp does not wait
    noticed(f"{body} bar.sync 1; {STORED}", barrier, go=_box_of(4, 16))


@pytest.mark.parametrize(("first", "second"), [(SUM, SUM), (STORE, SUM), (SUM, STORE)])
def test_sums_of_tma_are_ordered(first, second):
    """By a wait that is no `.read`, which says only that shared memory may change."""
    written = f"{COMMIT} @%p2 cp.async.bulk.wait_group 0;"
    body = f"{READY} @%p1 {first} {written} @%p1 {second} {written}"
    read = f"{written} @%p1 {second}"
    mistake = (read, read.replace("group 0", "group.read 0"), Race, "in any order")
    noticed(body, mistake, go=_box_of(4, 16))
    elsewhere = f"{NOTHING} mov.b32 %r5, 4; @%p1 " + second.replace("%r2", "%r5")
    _box_of(4, 16, torch.zeros(8, 16))(f"{READY} @%p1 {first} {elsewhere} {written}")


RING = f"""
    {INIT} add.s32 %r92, %r90, 8; @%p1 mbarrier.init.shared::cta.b64 [%r92], 32;
    bar.sync 0; mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r8, 0; setp.lt.u32 %p2, %tid.x, 32;
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
    {ARRIVE}
    xor.b32 %r5, %r5, 1; add.s32 %r8, %r8, 1; setp.lt.u32 %p3, %r8, 5; @%p3 bra PRODUCER;
    END: barrier.sync 1; {NOTHING}
"""


def _in_both_orders(body):
    faults = []
    for order in (0, 1):
        x = torch.zeros(64, dtype=torch.int32)
        registers = {"%rd3": np.uint64(x.data_ptr())}
        try:
            run(body, registers, threads=64, shared=8192, tensors=[x], order=order)
            assert faults or (x[32:] == 0 + 1 + 2 + 3 + 4).all()
        except MachineError as fault:
            faults.append(fault)
    if faults:
        raise faults[0]


def test_a_producer_and_a_consumer():
    """In one order of the two at least."""
    waits_for = "every group of warps waits: .*mbarrier at byte 410"
    noticed(
        RING,
        (wait("%r5"), "", (Race, Miscounted, Deadlock), "."),
        (wait("%r9", "%r92"), "", (Race, Miscounted, Deadlock), "."),
        ("mbarrier.arrive.shared::cta.b64 _, [%r92];", "", Deadlock, waits_for),
        (ARRIVE, "", Deadlock, waits_for),
        ("xor.b32 %r9, %r5, 1", "mov.b32 %r9, %r5", Deadlock, waits_for),
        go=_in_both_orders,
    )
