"""Flash attention for Hopper, forward, in Gluon: one tile's softmax runs under another's products.

In plain Triton the softmax of a tile waits for its scores, the next products for it. Here a program
has three groups of warps. One warp, `_load`, fetches tiles of 64 queries, keys and values by TMA
into rings. Two groups of four, `_attend`, own a tile of queries each and take turns: while one
multiplies for scores, the other makes probabilities of its own.

    full[slot]      a chunk of keys, of values, or a tile of queries has landed
    empty[slot]     its products are done            both groups arrive at a chunk's
    turns[group]    the tensor cores are free        the other group arrives

Where one chunk has all keys of a head, it stays for all queries and nothing is rescaled. Else
(STREAMED) chunks go by for each pair of
query tiles, with the online softmax of forward.py.

The kernel computes what forward.py does without mask and dropout, of packed (B, T, 3, H, D). Tiles
pass through a map of four axes: tokens past T are zeros when read and are not written.

Gluon has no interpreter: tests/machine/device runs the PTX.
"""

from __future__ import annotations

from collections.abc import Callable
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
from ...runtime.triton import ANY_BATCH, VERSION, bind_launch, constant, triton
from ..common.barriers import make_barriers, parity
from .tiles import LOG2_E, padded

REGISTERS = constant((240, 24))  # of the second group of multipliers, of the loader
TILE = constant(64)  # queries of a group at once, keys of a product
QUERIES = constant(4)  # tiles of queries in shared memory
RESIDENT = 4  # tiles of keys whose scores fit in registers; beyond, 16 keys


class Form(NamedTuple):
    """Constants of a launch. A chunk is the tiles of keys whose scores are alive at once."""

    CHUNK: Any
    LAST: Any  # tiles of a head's last chunk
    TAIL: Any  # rows of its last tile
    CHECK: Any  # keys of which may not be there
    STAGES: Any
    STREAMED: Any


class Step(NamedTuple):
    """Constants of a chunk: its first TILES tiles, the last of TAIL rows."""

    TILES: Any
    TAIL: Any
    CHECK: Any
    ALONE: Any  # there is no step before this one


class Tiles(NamedTuple):
    """Shared memory, in tiles of 64 rows."""

    q: Any
    k: Any
    v: Any
    out: Any  # one a group


class Barriers(NamedTuple):
    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any
    empty: Any
    turns: Any


@gluon.jit
def _matrix(tile):
    """(TILE, D) of a tile as TMA has it, (1, TILE, 1, D)."""
    return tile.reshape((tile.shape[1], tile.shape[3]))


@gluon.jit
def _pass_out(x, out, at, buffer):
    """A tile to global memory, through the buffer."""
    store_wait(0)  # its last tile has been read
    _matrix(buffer).store(x.to(out.dtype))
    fence()
    put(out, at, buffer)


@gluon.jit
def _load(qkv, tiles, barriers, sizes, FORM: gl.constexpr):
    """Fetch what each item of work reads, as slots of the rings are free."""
    CHUNK: gl.constexpr = FORM.CHUNK
    STAGES: gl.constexpr = FORM.STAGES
    OWN: gl.constexpr = 2 if FORM.STREAMED else CHUNK
    num_heads, H, T = sizes
    parts = gl.cdiv(gl.cdiv(T, TILE), OWN)
    step = 0
    count = 0
    for item in range(gl.program_id(0), num_heads * parts, gl.num_programs(0)):
        head, first = item // parts, item % parts * OWN
        b, h = head // H, head % H
        for start in range(0, T, CHUNK * TILE):
            slot = step % STAGES
            mbarrier.wait(barriers.empty.index(slot), parity(step // STAGES + 1))
            ready = barriers.k_full.index(slot)
            mbarrier.expect(ready, CHUNK * qkv.block_type.nbytes)
            for i in gl.static_range(CHUNK):
                fetch(qkv, [b, start + i * TILE, H + h, 0], ready, tiles.k.index(slot * CHUNK + i))
            ready = barriers.v_full.index(slot)
            mbarrier.expect(ready, CHUNK * qkv.block_type.nbytes)
            for i in gl.static_range(CHUNK):
                at = [b, start + i * TILE, 2 * H + h, 0]
                fetch(qkv, at, ready, tiles.v.index(slot * CHUNK + i))
            step += 1
            if start == 0:
                for tile in range(first, first + OWN):
                    q_slot = count % QUERIES
                    mbarrier.wait(barriers.q_empty.index(q_slot), parity(count // QUERIES + 1))
                    ready = barriers.q_full.index(q_slot)
                    mbarrier.expect(ready, qkv.block_type.nbytes)
                    fetch(qkv, [b, tile * TILE, h, 0], ready, tiles.q.index(q_slot))
                    count += 1


@gluon.jit
def _by_lane(x):
    """The columns as (a thread's, lanes, 2): a reduction of the first of these is each thread's."""
    return gl.reshape(x, (TILE, x.shape[1] // 8, 4, 2))


@gluon.jit
def _laid_as(x, other):
    return gl.convert_layout(x, other.type.layout, assert_trivial=True)


@gluon.jit
def _probabilities(s, row_max, scale_log2):
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    row_max = gl.convert_layout(row_max, rows, assert_trivial=True)
    return gl.exp2(s * scale_log2 - row_max[:, None])


@gluon.jit
def _chunk(
    state,
    q,
    tiles,
    barriers,
    step,
    turn,
    left,
    scale_log2,
    FORM: gl.constexpr,
    STEP: gl.constexpr,
    GROUP_OF: gl.constexpr,
):
    """A step of the softmax. left: keys of the chunk's last tile."""
    acc, row_max, row_sum = state
    CHUNK: gl.constexpr = FORM.CHUNK
    TILES: gl.constexpr = STEP.TILES
    TAIL: gl.constexpr = STEP.TAIL
    ALONE: gl.constexpr = STEP.ALONE
    D: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])  # of acc
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    slot, phase = step % FORM.STAGES, parity(step // FORM.STAGES)
    layout_wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    layout_tail: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])

    # the phase turn - 1 of the first group's barrier, turn of the second's
    mbarrier.wait(barriers.turns.index(GROUP_OF), parity(turn) ^ 1 ^ GROUP_OF)
    mbarrier.wait(barriers.k_full.index(slot), phase)
    pending = ()
    for i in gl.static_range(TILES):
        k = _matrix(tiles.k.index(slot * CHUNK + i))
        if i < TILES - 1:
            zeros = gl.zeros((TILE, TILE), gl.float32, layout_wide)
        else:
            zeros = gl.zeros((TILE, TAIL), gl.float32, layout_tail)
            k = k.slice(0, TAIL, 0)
        pending += (multiply(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True),)
    scores = ()
    top, total, former = None, None, None
    for i in gl.static_range(TILES):
        s = multiply_wait(TILES - 1 - i, deps=[pending[i]])
        if i == TILES - 1:
            mbarrier.arrive(barriers.turns.index(1 - GROUP_OF), count=1)
            if STEP.CHECK:
                seen = gl.arange(0, TAIL, gl.SliceLayout(0, layout_tail)) < left
                s = gl.where(seen[None, :], s, float("-inf"))
        scores += (s,)
        each = gl.max(_by_lane(s), axis=1)
        top = each if i == 0 else gl.maximum(top, _laid_as(each, top))
    new_max = _laid_as(gl.max(gl.reshape(top, (TILE, 8)), axis=1), row_max)
    new_max *= scale_log2
    if not ALONE:
        new_max = gl.maximum(row_max, new_max)
        rescale = gl.exp2(row_max - new_max)
        row_sum *= rescale
        acc *= rescale[:, None]
    mbarrier.wait(barriers.v_full.index(slot), phase)
    for i in gl.static_range(TILES):
        v = _matrix(tiles.v.index(slot * CHUNK + i))
        if i == TILES - 1:
            v = v.slice(0, TAIL, 0)
        p = _probabilities(scores[i], new_max, scale_log2)
        each = gl.sum(_by_lane(p), axis=1)
        total = each if i == 0 else total + _laid_as(each, total)
        p = gl.convert_layout(p.to(v.dtype), operand, assert_trivial=True)
        acc = multiply(p, v, acc, use_acc=not (ALONE and i == 0), is_async=True)
        if i > 0:
            acc, _ = multiply_wait(1, deps=[acc, former])
        former = p
    # The sums run beside the products.
    new_sum = _laid_as(gl.sum(gl.reshape(total, (TILE, 8)), axis=1), row_sum)
    if not ALONE:
        new_sum += row_sum
    acc, _ = multiply_wait(0, deps=[acc, former])
    return acc, new_max, new_sum


@gluon.jit
def _attend(
    out, lse_ptr, tiles, barriers, sizes, scale_log2, FORM: gl.constexpr, GROUP_OF: gl.constexpr
):
    """Every other tile of queries of the program."""
    num_heads, H, T = sizes
    CHUNK: gl.constexpr = FORM.CHUNK
    STREAMED: gl.constexpr = FORM.STREAMED
    WHOLE: gl.constexpr = Step(CHUNK, TILE, False, False)
    LAST: gl.constexpr = Step(FORM.LAST, FORM.TAIL, FORM.CHECK, not STREAMED)
    D: gl.constexpr = out.block_type.shape[3]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    OWN: gl.constexpr = 2 if STREAMED else CHUNK  # tiles of queries of an item
    parts = gl.cdiv(gl.cdiv(T, TILE), OWN)  # items of a head
    programs = gl.num_programs(0)
    items = gl.cdiv(num_heads * parts - gl.program_id(0), programs)  # of this program
    turn = 0
    step = 0
    for tile in range(GROUP_OF, items * OWN, 2):
        item = gl.program_id(0) + tile // OWN * programs
        head, start_q = item // parts, (item % parts * OWN + tile % OWN) * TILE
        slot = tile % QUERIES
        mbarrier.wait(barriers.q_full.index(slot), parity(tile // QUERIES))
        q = _matrix(tiles.q.index(slot)).load(operand)
        mbarrier.arrive(barriers.q_empty.index(slot), count=1)
        acc = gl.zeros((TILE, D), gl.float32, layout)
        row_max = gl.full((TILE,), float("-inf"), gl.float32, rows)
        row_sum = gl.zeros((TILE,), gl.float32, rows)
        state = acc, row_max, row_sum
        if STREAMED:
            for _ in range(0, T - CHUNK * TILE, CHUNK * TILE):
                state = _chunk(
                    state, q, tiles, barriers, step, turn, 0, scale_log2, FORM, WHOLE, GROUP_OF
                )
                mbarrier.arrive(barriers.empty.index(step % FORM.STAGES), count=1)
                step += 1
                turn += 1
        else:
            step = tile // OWN
        left = (T - 1) % TILE + 1
        acc, row_max, row_sum = _chunk(
            state, q, tiles, barriers, step, turn, left, scale_log2, FORM, LAST, GROUP_OF
        )
        done = STREAMED or tile % OWN + 2 >= OWN  # the group's last tile of the item
        mbarrier.arrive(barriers.empty.index(step % FORM.STAGES), count=1, pred=done)
        step += 1
        turn += 1
        offs_q = start_q + gl.arange(0, TILE, rows)
        lse = gl.where(offs_q < T, row_max + gl.log2(row_sum), float("inf"))
        lse_row = lse_ptr + head.to(gl.int64) * padded(T)
        gl.store(lse_row + offs_q, lse, mask=offs_q < padded(T))
        acc *= (1.0 / row_sum)[:, None]
        _pass_out(acc, out, [head // H, start_q, head % H, 0], tiles.out.index(GROUP_OF))
    store_wait(0)


@gluon.jit
def _tiles(tensor_map, COUNT: gl.constexpr):
    """Shared memory for so many tiles."""
    D: gl.constexpr = tensor_map.block_type.shape[3]
    return gl.allocate_shared_memory(tensor_map.dtype, [COUNT, 1, TILE, 1, D], tensor_map.layout)


@gluon.jit(**ANY_BATCH)
def _attention_fwd_pingpong_kernel(out, lse_ptr, qkv, num_heads, H, T, scale, FORM: gl.constexpr):
    sizes = num_heads, H, T
    STAGES: gl.constexpr = FORM.STAGES
    KEYS: gl.constexpr = STAGES * FORM.CHUNK
    READERS: gl.constexpr = 2 if FORM.STREAMED or FORM.CHUNK > 1 else 1
    tiles = Tiles(_tiles(qkv, QUERIES), _tiles(qkv, KEYS), _tiles(qkv, KEYS), _tiles(out, 2))
    barriers = Barriers(
        make_barriers(QUERIES, 1),
        make_barriers(QUERIES, 1),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, 1),
        make_barriers(STAGES, READERS),
        make_barriers(2, 1),
    )
    fence()  # TMA counts bytes at them
    scale_log2 = scale * LOG2_E
    gl.warp_specialize(
        [
            (_attend, (out, lse_ptr, tiles, barriers, sizes, scale_log2, FORM, 0)),
            (_attend, (out, lse_ptr, tiles, barriers, sizes, scale_log2, FORM, 1)),
            (_load, (qkv, tiles, barriers, sizes, FORM)),
        ],
        [4, 1],
        REGISTERS,
    )


def heads_map(x: Tensor, B: int, T: int, H: int, D: int) -> Any:
    """Of contiguous (B, T, H, D): tiles of one head, as wide as a power of two."""
    block = (1, TILE.value, 1, triton.next_power_of_2(D))
    return tensor_map(x, (B, T, H, D), (T * H * D, H * D, D, 1), block)


def fwd_pingpong(
    shape: tuple[int, ...], scale: float, num_sms: int
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """The launch of the forward, called with out, lse in padded rows, and packed qkv.

    Args:
        shape: of out, (B, T, H, D); both are contiguous.
    """
    B, T, H, D = shape
    tiles, rest = -(-T // TILE.value), (T - 1) % TILE.value + 1
    tail = 16 if rest <= 16 else 32 if rest <= 32 else TILE.value
    most = RESIDENT if D <= 64 else 2  # the rest of the registers and shared memory have D columns
    # By triton 3.9 products of the fifth tile at D = 64 wait, and two streamed at D = 128 spill.
    crowded = VERSION >= (3, 9)
    resident = tiles <= most or (tiles == RESIDENT + 1 and tail == 16 and D << crowded <= 64)
    chunk = tiles if resident else 1 if crowded and D > 64 else 2
    items = B * H * (1 if resident else -(-tiles // 2))
    launch = bind_launch(
        _attention_fwd_pingpong_kernel,
        (min(items, num_sms),),
        B * H,
        H,
        T,
        scale,
        FORM=Form(
            CHUNK=chunk,
            LAST=(tiles - 1) % chunk + 1,
            TAIL=tail,
            CHECK=rest < tail,
            STAGES=2,
            STREAMED=not resident,
        ),
        num_warps=4,
    )

    def run(out: Tensor, lse: Tensor, qkv: Tensor) -> None:
        launch(heads_map(out, B, T, H, D), lse, heads_map(qkv, B, T, 3 * H, D))

    return run
