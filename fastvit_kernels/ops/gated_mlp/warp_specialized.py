"""fc1 of a gated MLP with its gate inside, for Hopper, in Gluon: gate and value share a tile.

    gate = x Wg^T + bg,   value = x W1^T + b1,   hidden = act(gate) * value

The roles, the ring and the barriers are those of common/gemm_warp_specialized.py. Of a tile's 256
columns the first 128 are of the gate's weight and the others the same 128 of the value's, so that
what `_finish` pairs is in shared memory at once. All that is written leaves by TMA: gate and value
as they were staged, rounded to the operands' dtype, hidden through a buffer of its own. It is made
of the rounded gate and value, in fp32, as the pass of kernels.py makes it.

Gluon has no interpreter: tests/machine/device runs the PTX.
"""

from __future__ import annotations

from torch import Tensor

from ...runtime.arguments import contiguous
from ...runtime.backend import gpu
from ...runtime.gluon import fence, gl, gluon, mbarrier, put, store_wait, tensor_map
from ...runtime.triton import ANY_BATCH, bind_launch, constant, triton
from ..common.activation import activate
from ..common.barriers import make_barriers
from ..common.gemm import TilePlan, grouped_tile
from ..common.gemm_warp_specialized import (
    COLUMNS,
    GROUP,
    ROWS,
    Barriers,
    Tiles,
    buffers,
    load_operands,
    multiply_operands,
    parts,
    send,
)

REGISTERS = constant((160, 160, 24))  # second multipliers, those who finish, the loader


@gluon.jit
def _finish(written, tiles, barriers, sizes, ACTIVATION: gl.constexpr):
    """From the sums of each tile to what is written, 64 x 64 of gate and of value at once."""
    hidden_out, gate_out, value_out = written
    sums, staged, free = tiles.sums, barriers.staged, barriers.free
    M, F, _ = sizes
    PARTS: gl.constexpr = sums.shape[0] // 4  # of the gate, in the rows of a group
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    phase = 0
    num_tiles = gl.cdiv(M, 2 * ROWS) * gl.cdiv(F, PARTS * COLUMNS)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        pid_m, pid_n = grouped_tile(tile, M, F, 2 * ROWS, PARTS * COLUMNS, GROUP)
        for step in range(2 * PARTS):
            half = step % 2
            of_gate = 2 * PARTS * half + step // 2
            of_value = of_gate + PARTS
            at = [(2 * pid_m + half) * ROWS, (pid_n * PARTS + step // 2) * COLUMNS]
            mbarrier.wait(staged.index(of_gate), phase)
            put(gate_out, at, sums.index(of_gate))
            gate = sums.index(of_gate).load(layout).to(gl.float32)
            hidden = activate(gate, ACTIVATION, sums.dtype)
            mbarrier.wait(staged.index(of_value), phase)
            put(value_out, at, sums.index(of_value))
            hidden *= sums.index(of_value).load(layout).to(gl.float32)
            send(hidden, hidden_out, at, tiles.beside.index(half))
            store_wait(1)  # all but this step's hidden
            mbarrier.arrive(free.index(of_gate), count=1)
            mbarrier.arrive(free.index(of_value), count=1)
        phase ^= 1
    store_wait(0)


@gluon.jit(**ANY_BATCH)
def _gated_warp_specialized_kernel(
    hidden,
    gate,
    value,
    x,
    gate_weight,
    value_weight,
    gate_bias_ptr,
    value_bias_ptr,
    M,
    F,
    K,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
):
    sizes = M, F, K
    written, weights = (hidden, gate, value), (gate_weight, value_weight)
    biases = gate_bias_ptr, value_bias_ptr
    PARTS: gl.constexpr = 2 * gate_weight.block_type.shape[0] // COLUMNS
    tiles = Tiles(
        buffers(x, 2 * STAGES),
        buffers(gate_weight, STAGES, 2),
        buffers(hidden, 2 * PARTS),
        buffers(hidden, 2),
    )
    staged, free = make_barriers(2 * PARTS, 1), make_barriers(2 * PARTS, 1)
    barriers = Barriers(make_barriers(STAGES, 1), make_barriers(STAGES, 2), staged, free)
    fence()  # TMA counts bytes at them
    gl.warp_specialize(
        [
            (multiply_operands, (biases, tiles, barriers, sizes, True, STAGES, 0, True, True)),
            (multiply_operands, (biases, tiles, barriers, sizes, True, STAGES, 1, True, True)),
            (_finish, (written, tiles, barriers, sizes, ACTIVATION)),
            (load_operands, (x, weights, tiles, barriers, sizes, True, STAGES)),
        ],
        [4, 4, 1],
        REGISTERS,
    )


def launch_gated(
    plan: TilePlan,
    hidden: Tensor,
    gate: Tensor,
    value: Tensor,
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    activation: str,
) -> None:
    """Launch the kernel, with the tile of the plan, on the current device.

    Args:
        hidden: (..., F) contiguous, M rows. gate, value: (M, F), their rows as far apart.
        x: (M, K). weights: the gate's and the value's (F, K). biases: theirs (F,), of any
            strides and dtype, or None.
        All but biases begin at multiples of 16 bytes and have rows that do, contiguous.
    """
    (M, K), F, config = x.shape, gate.shape[1], plan.config
    block_f = config.block_n // 2
    launch = plan.launches.get(activation)
    if launch is None:
        tiles = triton.cdiv(M, config.block_m) * triton.cdiv(F, block_f)
        launch = plan.launches[activation] = bind_launch(
            _gated_warp_specialized_kernel,
            (min(tiles, config.programs_per_sm * gpu(x.device).num_sms),),
            ACTIVATION=activation,
            STAGES=config.num_stages,
            num_warps=4,
        )
    launch(
        parts(hidden, M, F, F),
        *(parts(half, M, F, half.stride(0)) for half in (gate, value)),
        tensor_map(x, (M, K), (x.stride(0), 1), (ROWS.value, config.block_k)),
        *(tensor_map(w, (F, K), (w.stride(0), 1), (block_f, config.block_k)) for w in weights),
        *map(contiguous, biases),
        M,
        F,
        K,
    )
