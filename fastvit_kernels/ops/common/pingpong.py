"""A GEMM with an epilogue for Hopper, in Gluon: one tile's epilogue runs under another's products.

In plain Triton the products of a tile wait for the epilogue of the one before. Here a program has
three groups of warps. One warp, `_load`, fetches tiles of both operands by TMA into a ring. Two
groups of four, `_multiply`, take turns at the tensor cores: while one multiplies its tile, the
other ends its own.

    full[slot]      the ring's slot has landed       the loader expects its bytes
    empty[slot]     its products are done            whoever multiplied it arrives
    turns[group]    the tensor cores are free        the other group arrives
    landed[group]   the tile of `more` has landed

The kernel is that of `linear` where `more` is the residual and `other` saves z, and that of `mlp`'s
hidden gradient where HIDDEN: then `more` is z, `other` takes act(z), and partial the column sums of
dz. Tiles pass in and out through one buffer a group, by TMA: rows and columns past the ends are
zeros when read and are not written. fp32 accumulators; each element is summed over K in order.

Gluon has no interpreter: tests/machine/device runs the PTX.
"""

from __future__ import annotations

from typing import Any

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
from .gemm import GROUP_M, TilePlan, column_halves, grouped_tile

GROUP = constant(GROUP_M)
REGISTERS = constant((240, 24))  # of the second group of multipliers, of the loader


@gluon.jit
def _load(x, weight, tiles, barriers, sizes, B_K_LAST: gl.constexpr, STAGES: gl.constexpr):
    """Fetch the operands of each tile in turn, as slots of the ring are free."""
    x_tiles, weight_tiles, _ = tiles
    full, empty, _, _ = barriers
    M, N, K = sizes
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    BLOCK_N: gl.constexpr = weight.block_type.shape[0 if B_K_LAST else 1]
    step = 0
    num_tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        for k in range(gl.cdiv(K, BLOCK_K)):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), step // STAGES + 1 & 1)
            ready = full.index(slot)
            mbarrier.expect(ready, x.block_type.nbytes + weight.block_type.nbytes)
            fetch(x, [pid_m * BLOCK_M, k * BLOCK_K], ready, x_tiles.index(slot))
            row, column = pid_n * BLOCK_N, k * BLOCK_K
            at = [row, column] if B_K_LAST else [column, row]
            fetch(weight, at, ready, weight_tiles.index(slot))
            step += 1


@gluon.jit
def _pass_out(x, out, at, buffer):
    """A part of a tile to global memory, through the buffer."""
    buffer.store(x.to(out.dtype))
    fence()
    put(out, at, buffer)


@gluon.jit
def _end(
    acc, out, other, more, buffer, pointers, pid_m, row, column, M, N, rows_per_sample,
    ACTIVATION: gl.constexpr, HIDDEN: gl.constexpr,
):  # fmt: skip
    """From the products of a part of a tile to what is written."""
    bias_ptr, layer_scale_ptr, row_scale_ptr, partial_ptr = pointers
    BLOCK_M: gl.constexpr = out.block_type.shape[0]
    BLOCK_N: gl.constexpr = out.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc = gl.convert_layout(acc, layout, assert_trivial=True)
    offs_n = column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
    mask_n = offs_n < N
    if more is not None:
        given = buffer.load(layout)
    if HIDDEN:
        act, derivative = activate_and_derivative(given.to(gl.float32), ACTIVATION, out.dtype)
        if other is not None:
            _pass_out(act, other, [row, column], buffer)
            store_wait(0)
        acc *= derivative
        if partial_ptr is not None:
            partial = gl.sum(acc, axis=0)
            gl.store(partial_ptr + pid_m.to(gl.int64) * N + offs_n, partial, mask=mask_n)
    else:
        if bias_ptr is not None:
            acc += gl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(gl.float32)[None, :]
        if ACTIVATION != "":
            low = acc.to(out.dtype)
            if other is not None:
                _pass_out(low, other, [row, column], buffer)
                store_wait(0)
            acc = activate(low.to(gl.float32), ACTIVATION, out.dtype)  # of the bits that are saved
        if layer_scale_ptr is not None:
            scale = gl.load(layer_scale_ptr + offs_n, mask=mask_n, other=0.0)
            acc *= scale.to(gl.float32)[None, :]
        if row_scale_ptr is not None:
            offs_m = row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
            scale = gl.load(row_scale_ptr + offs_m // rows_per_sample, mask=offs_m < M, other=0.0)
            acc *= scale.to(gl.float32)[:, None]
        if more is not None:
            acc += given.to(gl.float32)
    _pass_out(acc, out, [row, column], buffer)


@gluon.jit
def _end_parts(
    acc, out, other, more, buffers, pointers, pid_m, row, column, M, N, rows_per_sample,
    ACTIVATION: gl.constexpr, HIDDEN: gl.constexpr, BUFFER: gl.constexpr, FIRST: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    """Column parts FIRST to FIRST + PARTS of a tile in turn, so that few registers are held."""
    if PARTS > 1:
        halves = column_halves(acc, acc.shape[0], acc.shape[1])
        for i in gl.static_range(2):
            _end_parts(
                halves[i], out, other, more, buffers, pointers, pid_m, row, column, M, N,
                rows_per_sample, ACTIVATION, HIDDEN, BUFFER, FIRST + i * (PARTS // 2), PARTS // 2,
            )  # fmt: skip
    else:
        _end(
            acc, out, other, more, buffers.index(BUFFER + FIRST), pointers, pid_m, row,
            column + FIRST * out.block_type.shape[1], M, N, rows_per_sample, ACTIVATION, HIDDEN,
        )  # fmt: skip


@gluon.jit
def _multiply(
    out, other, more, tiles, barriers, pointers, sizes, rows_per_sample,
    B_K_LAST: gl.constexpr, ACTIVATION: gl.constexpr, HIDDEN: gl.constexpr,
    STAGES: gl.constexpr, PARTS: gl.constexpr, GROUP_OF: gl.constexpr,
):  # fmt: skip
    """Every other tile of the program: its products when it is this group's turn, and its end."""
    x_tiles, weight_tiles, buffers = tiles
    full, empty, turns, landed = barriers
    M, N, K = sizes
    BLOCK_M: gl.constexpr = x_tiles.shape[1]
    BLOCK_K: gl.constexpr = x_tiles.shape[2]
    PART: gl.constexpr = out.block_type.shape[1]
    BLOCK_N: gl.constexpr = PARTS * PART
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    programs, steps = gl.num_programs(0), gl.cdiv(K, BLOCK_K)
    step = GROUP_OF * steps
    phase = 0
    num_tiles = gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N)
    for tile in range(gl.program_id(0) + GROUP_OF * programs, num_tiles, 2 * programs):
        pid_m, pid_n = grouped_tile(tile, M, N, BLOCK_M, BLOCK_N, GROUP)
        row, column = pid_m * BLOCK_M, pid_n * BLOCK_N
        store_wait(0)  # the buffers' last tile has been read
        if more is not None:
            mbarrier.expect(landed.index(GROUP_OF), PARTS * more.block_type.nbytes)
            for i in gl.static_range(PARTS):
                buffer = buffers.index(GROUP_OF * PARTS + i)
                fetch(more, [row, column + i * PART], landed.index(GROUP_OF), buffer)
        mbarrier.wait(turns.index(GROUP_OF), phase ^ 1 ^ GROUP_OF)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        for k in range(steps):
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            weight_tile = weight_tiles.index(slot)
            if B_K_LAST:
                weight_tile = weight_tile.permute((1, 0))
            acc = multiply(x_tiles.index(slot), weight_tile, acc, is_async=True)
            acc = multiply_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        acc = multiply_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        mbarrier.arrive(turns.index(1 - GROUP_OF), count=1)
        step += steps
        if more is not None:
            mbarrier.wait(landed.index(GROUP_OF), phase)
        _end_parts(
            acc, out, other, more, buffers, pointers, pid_m, row, column, M, N,
            rows_per_sample, ACTIVATION, HIDDEN, GROUP_OF * PARTS, 0, PARTS,
        )  # fmt: skip
        phase ^= 1
    store_wait(0)


@gluon.jit
def _buffers(tensor_map, COUNT: gl.constexpr):
    """Shared memory for so many blocks of what a map passes."""
    block: gl.constexpr = tensor_map.block_type.shape
    shape: gl.constexpr = [COUNT, block[0], block[1]]
    return gl.allocate_shared_memory(tensor_map.dtype, shape, tensor_map.layout)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=1)
    return made


@gluon.jit(**ANY_BATCH)
def _pingpong_kernel(
    out, other, x, weight, more, pointers, M, N, K, rows_per_sample,
    B_K_LAST: gl.constexpr, ACTIVATION: gl.constexpr, HIDDEN: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr,
):  # fmt: skip
    sizes = M, N, K
    tiles = _buffers(x, STAGES), _buffers(weight, STAGES), _buffers(out, 2 * PARTS)
    barriers = _barriers(STAGES), _barriers(STAGES), _barriers(2), _barriers(2)
    fence()  # TMA counts bytes at them
    gl.warp_specialize(
        [
            (_multiply, (
                out, other, more, tiles, barriers, pointers, sizes, rows_per_sample,
                B_K_LAST, ACTIVATION, HIDDEN, STAGES, PARTS, 0,
            )),
            (_multiply, (
                out, other, more, tiles, barriers, pointers, sizes, rows_per_sample,
                B_K_LAST, ACTIVATION, HIDDEN, STAGES, PARTS, 1,
            )),
            (_load, (x, weight, tiles, barriers, sizes, B_K_LAST, STAGES)),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip


def _map(x: Tensor | None, rows: int, columns: int, stride: int, block: tuple[int, ...]) -> Any:
    """Of a matrix whose rows lie `stride` elements apart."""
    return None if x is None else tensor_map(x, (rows, columns), (stride, 1), block)


def pingpong_launch(
    plan: TilePlan, out: Tensor, other: Tensor | None, a: Tensor, b: Tensor, more: Tensor | None,
    stride_more: int, pointers: tuple[Tensor | None, ...], rows_per_sample: int, activation: str,
    *, hidden: bool,
) -> None:  # fmt: skip
    """Launch the kernel as planned, on the current device.

    Args:
        out, other: (..., N) contiguous; more: (..., N), rows `stride_more` apart; M rows. The last
            two may be None.
        a, b: (M, K), and (N, K) or (K, N) as the plan says.
        pointers: bias (N,), layer_scale (N,), row_scale (B,), partials (tiles of rows, N) fp32.
    """
    config, (M, K), N = plan.config, a.shape, out.shape[-1]
    part = config.block_m, config.block_n // config.subtiles
    block_b = config.block_n, config.block_k
    if plan.options["B_K_LAST"]:
        b_map = _map(b, N, K, max(b.stride()), block_b)
    else:
        b_map = _map(b, K, N, max(b.stride()), block_b[::-1])
    launch = plan.launches.get((activation, hidden))
    if launch is None:
        launch = plan.launches[activation, hidden] = bind_launch(
            _pingpong_kernel, (plan.programs,), ACTIVATION=activation, HIDDEN=hidden,
            **plan.options,
        )  # fmt: skip
    launch(
        _map(out, M, N, N, part), _map(other, M, N, N, part),
        _map(a, M, K, a.stride(0), (config.block_m, config.block_k)), b_map,
        _map(more, M, N, stride_more, part), pointers, M, N, K, rows_per_sample,
    )  # fmt: skip
