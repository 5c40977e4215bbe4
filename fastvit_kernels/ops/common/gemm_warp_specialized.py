"""A GEMM with an epilogue for Hopper, in Gluon: warps with roles, so that products do not wait.

In plain Triton the products of a tile wait for the epilogue of the one before. Here a program has
groups of warps. One warp, `load_operands`, fetches tiles of both operands by TMA into a ring. Two
groups of four, `multiply_operands`, multiply 64 rows each of a tile of 128 x 256 and leave the
sums, in the operands' dtype, in shared memory. A last group of four, `_finish`, makes of them what
is written.

    full[slot]      the ring's slot has landed            the loader expects its bytes
    empty[slot]     its products are done                 both groups arrive
    staged[part]    64 x 64 sums are there
    free[part]      they have been read
    landed[half]    64 x 64 of z are there                `_load_z` expects their bytes
    read[half]      they have been read

The kernel is that of `linear` with an activation, `other` saving z, and that of `mlp`'s hidden
gradient where HIDDEN: then one more warp, `_load_z`, fetches z ahead (those who finish would wait
for it a third of their time), `other` takes act(z), and partial each warp's sums of dz over its
rows of a tile (in one row for a tile, through shared memory, they would take a fifth of the time).
Where BY_TMA what is written leaves by TMA too, `_finish_by_tma`, through the shared memory that it
came from; not yet measured. Scales and residuals are not in it: on an H100 proj and fc2 gain
nothing by it. fp32 accumulators;
each element is summed over K in order. The sum, with the bias, is rounded once to the operands'
dtype, as the library rounds it, before the epilogue.

Gluon has no interpreter: tests/machine/device runs the PTX.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...runtime.gluon import (
    fence,
    fetch,
    gl,
    gluon,
    mbarrier,
    multiply,
    multiply_wait,
    put,
    store_wait,
    tensor_map,
)
from ...runtime.triton import ANY_BATCH, bind_launch, constant
from .activation import activate, activate_and_derivative
from .barriers import make_barriers, parity
from .gemm import GROUP_M, TilePlan, column_halves, grouped_tile

GROUP = constant(GROUP_M)
ROWS = constant(64)  # of a tile that a group multiplies
COLUMNS = constant(64)  # that are finished at once
REGISTERS = constant((160, 160, 24, 24))  # second multipliers, those who finish, both loaders
FINISHERS = constant(4)  # warps that finish: each has a row of a tile's sums


class Tiles(NamedTuple):
    """Shared memory."""

    x: Any  # two a slot of the ring, 64 rows each
    weight: Any
    sums: Any  # 64 x 64
    beside: Any  # of z, the same; by TMA without z what is written


class Barriers(NamedTuple):
    full: Any
    empty: Any
    staged: Any
    free: Any
    landed: Any = None
    read: Any = None


@gluon.jit
def load_operands(x, weights, tiles, barriers, sizes, B_K_LAST: gl.constexpr, STAGES: gl.constexpr):
    """Fetch the operands of each tile in turn, as slots of the ring are free. Of each of the
    weights a box: those of several lie one below the other, and are multiplied as one."""
    M, N, K = sizes
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    BOX: gl.constexpr = weights[0].block_type
    BLOCK_N: gl.constexpr = BOX.shape[0 if B_K_LAST else 1]
    step = 0
    num_tiles = gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, M, N, 2 * ROWS, BLOCK_N, GROUP)
        for k in range(gl.cdiv(K, BLOCK_K)):
            slot = step % STAGES
            mbarrier.wait(barriers.empty.index(slot), parity(step // STAGES + 1))
            ready = barriers.full.index(slot)
            mbarrier.expect(ready, 2 * x.block_type.nbytes + len(weights) * BOX.nbytes)
            for group in gl.static_range(2):
                at = [(2 * pid_m + group) * ROWS, k * BLOCK_K]
                fetch(x, at, ready, tiles.x.index(2 * slot + group))
            row, column = pid_n * BLOCK_N, k * BLOCK_K
            at = [row, column] if B_K_LAST else [column, row]
            for i in gl.static_range(len(weights)):
                box = tiles.weight.index(slot).slice(i * BOX.shape[0], BOX.shape[0])
                fetch(weights[i], at, ready, box)
            step += 1


@gluon.jit
def _stage(
    acc,
    bias_ptr,
    column,
    N,
    sums,
    barriers,
    phase,
    FIRST: gl.constexpr,
    PARTS: gl.constexpr,
    FENCED: gl.constexpr,
):
    """The sums, with the bias, to shared memory: parts of 64 columns, FIRST is the first one's."""
    if PARTS > 1:
        halves = column_halves(acc, acc.shape[0], acc.shape[1])
        HALF: gl.constexpr = PARTS // 2
        for i in gl.static_range(2):
            at, first = column + i * HALF * COLUMNS, FIRST + i * HALF
            _stage(halves[i], bias_ptr, at, N, sums, barriers, phase, first, HALF, FENCED)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
        acc = gl.convert_layout(acc, layout, assert_trivial=True)
        if bias_ptr is not None:
            offs_n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
            bias = gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)
            acc += bias.to(gl.float32)[None, :]
        mbarrier.wait(barriers.free.index(FIRST), phase ^ 1)
        sums.index(FIRST).store(acc.to(sums.dtype))
        if FENCED:
            fence()  # TMA stores them as z
        mbarrier.arrive(barriers.staged.index(FIRST), count=1)


@gluon.jit
def multiply_operands(
    biases,
    tiles,
    barriers,
    sizes,
    B_K_LAST: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_OF: gl.constexpr,
    FENCED: gl.constexpr,
    PAIRED: gl.constexpr = False,
):
    """The products of the group's rows of each tile. biases: of the left and the right half of its
    columns, which where PAIRED are the same columns of two weights."""
    sums, empty = tiles.sums, barriers.empty
    M, N, K = sizes
    BLOCK_K: gl.constexpr = tiles.x.shape[2]
    PARTS: gl.constexpr = sums.shape[0] // 2
    HALF: gl.constexpr = PARTS // 2
    BLOCK_N: gl.constexpr = (HALF if PAIRED else PARTS) * COLUMNS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    step = 0
    phase = 0
    num_tiles = gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        pid_n = grouped_tile(tile, M, N, 2 * ROWS, BLOCK_N, GROUP)[1]
        acc = gl.zeros((ROWS, PARTS * COLUMNS), gl.float32, layout)
        for k in range(gl.cdiv(K, BLOCK_K)):
            slot = step % STAGES
            mbarrier.wait(barriers.full.index(slot), parity(step // STAGES))
            weight_tile = tiles.weight.index(slot)
            if B_K_LAST:
                weight_tile = weight_tile.permute((1, 0))
            acc = multiply(tiles.x.index(2 * slot + GROUP_OF), weight_tile, acc, is_async=True)
            acc = multiply_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = multiply_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        halves = column_halves(acc, ROWS, PARTS * COLUMNS)
        for i in gl.static_range(2):
            at = pid_n * BLOCK_N + (0 if PAIRED else i * HALF * COLUMNS)
            first = GROUP_OF * PARTS + i * HALF
            _stage(halves[i], biases[i], at, N, sums, barriers, phase, first, HALF, FENCED)
        phase ^= 1


@gluon.jit
def _load_z(z, tiles, barriers, sizes, HIDDEN: gl.constexpr):
    """Fetch z for each step of `_finish`, two ahead."""
    if HIDDEN:
        M, N, _ = sizes
        PARTS: gl.constexpr = tiles.sums.shape[0] // 2
        phase = 0
        num_tiles = gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, PARTS * COLUMNS)
        for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
            pid_m, pid_n = grouped_tile(tile, M, N, 2 * ROWS, PARTS * COLUMNS, GROUP)
            for part in range(PARTS):
                for half in gl.static_range(2):
                    mbarrier.wait(barriers.read.index(half), phase ^ 1)
                    ready = barriers.landed.index(half)
                    mbarrier.expect(ready, z.block_type.nbytes)
                    at = [(2 * pid_m + half) * ROWS, (pid_n * PARTS + part) * COLUMNS]
                    fetch(z, at, ready, tiles.beside.index(half))
                phase ^= 1


@gluon.jit
def _sum_own(y):
    """Sums over the rows that a thread has, which are 16 apart."""
    return gl.sum(gl.reshape(y, (ROWS // 16, 16, COLUMNS)), axis=0)


@gluon.jit
def _store_sums(dsums, partial_ptr, pid_m, column, N):
    """Each warp's row of the sums of a tile, of its four of the 16 rows that _sum_own leaves."""
    dsums = gl.sum(gl.reshape(dsums, (FINISHERS, 16 // FINISHERS, COLUMNS)), axis=1)
    layout: gl.constexpr = dsums.type.layout
    row = pid_m * FINISHERS + gl.arange(0, FINISHERS, gl.SliceLayout(1, layout))
    offs_n = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    offs = row.to(gl.int64)[:, None] * N + offs_n[None, :]
    gl.store(partial_ptr + offs, dsums, mask=(offs_n < N)[None, :])


@gluon.jit
def _sum_half(dsums, y, half, partial_ptr, pid_m, column, N):
    """The sums of a tile's first half; with the second, stored."""
    own = _sum_own(y)
    if half == 0:
        dsums = own
    else:
        _store_sums(dsums + own, partial_ptr, pid_m, column, N)
    return dsums


@gluon.jit
def _finish_by_pointers(
    written, tiles, barriers, sizes, ACTIVATION: gl.constexpr, HIDDEN: gl.constexpr
):
    """From the sums of each tile to what is written, 64 x 64 of them at once."""
    out_ptr, other_ptr, partial_ptr = written
    sums, landed, read = tiles.sums, barriers.landed, barriers.read
    M, N, _ = sizes
    PARTS: gl.constexpr = sums.shape[0] // 2
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    offs_r = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    offs_c = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    if partial_ptr is not None:
        dsums = _sum_own(gl.zeros((ROWS, COLUMNS), gl.float32, layout))
    phase = 0
    z_phase = 0
    num_tiles = gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, PARTS * COLUMNS)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, M, N, 2 * ROWS, PARTS * COLUMNS, GROUP)
        for step in range(2 * PARTS):
            half = step % 2
            offs_m = (2 * pid_m + half) * ROWS + offs_r
            column = (pid_n * PARTS + step // 2) * COLUMNS
            offs_n = column + offs_c
            mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
            offs = offs_m.to(gl.int64)[:, None] * N + offs_n[None, :]
            if HIDDEN:
                mbarrier.wait(landed.index(half), z_phase)
                z = tiles.beside.index(half).load(layout).to(gl.float32)
                mbarrier.arrive(read.index(half), count=1)
                z_phase ^= half
                act, derivative = activate_and_derivative(z, ACTIVATION, dtype)
                if other_ptr is not None:
                    gl.store(other_ptr + offs, act.to(dtype), mask=mask)
            part = half * PARTS + step // 2
            mbarrier.wait(barriers.staged.index(part), phase)
            low = sums.index(part).load(layout)
            mbarrier.arrive(barriers.free.index(part), count=1)
            y = low.to(gl.float32)
            if HIDDEN:
                y *= derivative
                if partial_ptr is not None:
                    dsums = _sum_half(dsums, y, half, partial_ptr, pid_m, column, N)
            else:
                if other_ptr is not None:
                    gl.store(other_ptr + offs, low, mask=mask)
                y = activate(y, ACTIVATION, dtype)
            gl.store(out_ptr + offs, y.to(dtype), mask=mask)
        phase ^= 1


@gluon.jit
def send(x, out, at, buffer):
    """A part to memory by TMA, through the buffer, which is not free before TMA has read it."""
    buffer.store(x.to(buffer.dtype))
    fence()
    put(out, at, buffer)


@gluon.jit
def _finish_by_tma(written, tiles, barriers, sizes, ACTIVATION: gl.constexpr, HIDDEN: gl.constexpr):
    """As `_finish_by_pointers`. act leaves from where z was, dz from where its sums were, which are
    free once TMA has read them: the sums a step later. z of `linear` leaves as it was staged."""
    out, other, partial_ptr = written
    sums = tiles.sums
    M, N, _ = sizes
    PARTS: gl.constexpr = sums.shape[0] // 2
    dtype: gl.constexpr = sums.dtype
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if partial_ptr is not None:
        dsums = _sum_own(gl.zeros((ROWS, COLUMNS), gl.float32, layout))
    phase = 0
    z_phase = 0
    before = 0  # the part of the last step
    num_tiles = gl.cdiv(M, 2 * ROWS) * gl.cdiv(N, PARTS * COLUMNS)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, M, N, 2 * ROWS, PARTS * COLUMNS, GROUP)
        for step in range(2 * PARTS):
            half = step % 2
            part = half * PARTS + step // 2
            column = (pid_n * PARTS + step // 2) * COLUMNS
            at = [(2 * pid_m + half) * ROWS, column]
            staged, beside = sums.index(part), tiles.beside.index(half)
            if HIDDEN:
                mbarrier.wait(barriers.landed.index(half), z_phase)
                z = beside.load(layout).to(gl.float32)
                z_phase ^= half
                act, derivative = activate_and_derivative(z, ACTIVATION, dtype)
                if other is not None:
                    send(act, other, at, beside)
                mbarrier.wait(barriers.staged.index(part), phase)
                y = staged.load(layout).to(gl.float32) * derivative
                if partial_ptr is not None:
                    dsums = _sum_half(dsums, y, half, partial_ptr, pid_m, column, N)
                send(y, out, at, staged)
                store_wait(1)  # all but this step's dz
                mbarrier.arrive(barriers.read.index(half), count=1)
                begun = (step > 0) | (tile >= gl.num_programs(0))
                mbarrier.arrive(barriers.free.index(before), count=1, pred=begun)
                before = part
            else:
                mbarrier.wait(barriers.staged.index(part), phase)
                if other is not None:
                    put(other, at, staged)
                y = activate(staged.load(layout).to(gl.float32), ACTIVATION, dtype)
                send(y, out, at, beside)
                store_wait(1)  # all but this step's y
                mbarrier.arrive(barriers.free.index(part), count=1)
        phase ^= 1
    store_wait(0)


@gluon.jit
def _finish(
    written,
    tiles,
    barriers,
    sizes,
    ACTIVATION: gl.constexpr,
    HIDDEN: gl.constexpr,
    BY_TMA: gl.constexpr,
):
    if BY_TMA:
        _finish_by_tma(written, tiles, barriers, sizes, ACTIVATION, HIDDEN)
    else:
        _finish_by_pointers(written, tiles, barriers, sizes, ACTIVATION, HIDDEN)


@gluon.jit
def buffers(tensor_map, COUNT: gl.constexpr, BELOW: gl.constexpr = 1):
    """Shared memory for so many blocks of what a map passes, each BELOW of them high."""
    block: gl.constexpr = tensor_map.block_type.shape
    shape: gl.constexpr = [COUNT, BELOW * block[0], block[1]]
    return gl.allocate_shared_memory(tensor_map.dtype, shape, tensor_map.layout)


@gluon.jit(**ANY_BATCH)
def _gemm_warp_specialized_kernel(
    out,
    other,
    partial_ptr,
    x,
    weight,
    z,
    bias_ptr,
    M,
    N,
    K,
    B_K_LAST: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HIDDEN: gl.constexpr,
    STAGES: gl.constexpr,
    BY_TMA: gl.constexpr,
):
    sizes = M, N, K
    BLOCK_N: gl.constexpr = weight.block_type.shape[0 if B_K_LAST else 1]
    bits: gl.constexpr = x.dtype.primitive_bitwidth
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, bits, 2)
    PARTS: gl.constexpr = BLOCK_N // COLUMNS
    sums = gl.allocate_shared_memory(x.dtype, [2 * PARTS, ROWS, COLUMNS], swizzled)
    staged, free = make_barriers(2 * PARTS, 1), make_barriers(2 * PARTS, 1)
    full, empty = make_barriers(STAGES, 1), make_barriers(STAGES, 2)
    beside = sums  # nothing is read there
    if HIDDEN:
        beside = buffers(z, 2)
    elif BY_TMA:
        beside = buffers(out, 2)
    FENCED: gl.constexpr = BY_TMA and not HIDDEN
    written, biases = (out, other, partial_ptr), (bias_ptr, bias_ptr)
    tiles = Tiles(buffers(x, 2 * STAGES), buffers(weight, STAGES), sums, beside)
    barriers = Barriers(full, empty, staged, free, make_barriers(2, 1), make_barriers(2, 1))
    fence()  # TMA counts bytes at them
    gl.warp_specialize(
        [
            (multiply_operands, (biases, tiles, barriers, sizes, B_K_LAST, STAGES, 0, FENCED)),
            (multiply_operands, (biases, tiles, barriers, sizes, B_K_LAST, STAGES, 1, FENCED)),
            (_finish, (written, tiles, barriers, sizes, ACTIVATION, HIDDEN, BY_TMA)),
            (load_operands, (x, (weight,), tiles, barriers, sizes, B_K_LAST, STAGES)),
            (_load_z, (z, tiles, barriers, sizes, HIDDEN)),
        ],
        [4, 4, 1, 1],
        REGISTERS,
    )


def launch_warp_specialized(
    plan: TilePlan,
    out: Tensor,
    other: Tensor | None,
    partial: Tensor | None,
    a: Tensor,
    b: Tensor,
    z: Tensor | None,
    bias: Tensor | None,
    activation: str,
) -> None:
    """Launch the kernel as planned, on the current device.

    Args:
        out: (..., N) contiguous, M rows; so is other, where it is not None.
        partial: (tiles of rows * FINISHERS, N) fp32, or None.
        a, b: (M, K), and (N, K) or (K, N) as the plan says.
        z: (M, N) contiguous, from a multiple of 16 bytes on, for the hidden gradient; or None.
        bias: (N,) or None.
    """
    tile, (M, K), N = plan.tile, a.shape, out.shape[-1]
    k_last, hidden, by_tma = tile.B_K_LAST, z is not None, plan.config.tma_stores
    launch = plan.launches.get((activation, hidden))
    if launch is None:
        launch = plan.launches[activation, hidden] = bind_launch(
            _gemm_warp_specialized_kernel,
            (plan.programs,),
            B_K_LAST=k_last,
            ACTIVATION=activation,
            HIDDEN=hidden,
            STAGES=plan.options["num_stages"],
            BY_TMA=by_tma,
            num_warps=4,
        )
    block_k, block_n = tile.BLOCK_K, tile.BLOCK_N
    rows, block = ((N, K), (block_n, block_k)) if k_last else ((K, N), (block_k, block_n))
    given = out, other
    if by_tma:
        given = (None if x is None else parts(x, M, N, N) for x in given)
    launch(
        *given,
        partial,
        tensor_map(a, (M, K), (a.stride(0), 1), (ROWS.value, block_k)),
        tensor_map(b, rows, (max(b.stride()), 1), block),
        None if z is None else parts(z, M, N, N),
        bias,
        M,
        N,
        K,
    )


def parts(x: Tensor, M: int, N: int, stride: int) -> Any:
    """Of x (M, N), whose rows are so far apart: what is finished at once."""
    return tensor_map(x, (M, N), (stride, 1), (ROWS.value, COLUMNS.value))
