"""What left_out.py changes of wgmma, TMA and their kin, and why some of it is not noticed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

import fastvit_kernels as fk
from fastvit_kernels.ops.attention.backward_fused_dq import bwd_fused_dq
from fastvit_kernels.ops.common.gemm_configs import SPECIALIZED, TMA_TILE
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.configs import forced
from tests.machine.aot import TARGETS

from .driver import Recorded, ptx_machine
from .faults import InFlight, Unfenced
from .mbarriers import Miscounted
from .program import Op, Program
from .tensor_copies import WrongMap

NAMES = ((Unfenced, "fence"), (InFlight, "in flight"), (Miscounted, "count"), (WrongMap, "bounds"))

_LEFT_OUT = (
    "wgmma.fence",
    "wgmma.commit",
    "wgmma.wait",
    "fence.proxy",
    "mbarrier.",
    "cp.async.bulk",
    "cp.reduce",
    "tensormap.cp_fenceproxy",
)


def ordering(program: Program) -> list[Op]:
    """What orders anything, in a kernel that has wgmma or TMA: all that sm_90's table tries."""
    names = ("bar.sync", "barrier.sync", "cp.async.wait", "cp.async.commit", *_LEFT_OUT)
    if not any(op.name.startswith(("wgmma", "mbarrier")) for op in program.ops):
        return []
    return [op for op in program.ops if op.name.startswith(names)]


def longer() -> list[tuple[str, Recorded]]:
    """A linear layer whose pipeline is full, and kernels whose groups of warps have roles."""
    torch.manual_seed(0)
    x, weight = torch.randn(100, 320).bfloat16(), torch.randn(128, 320).bfloat16()
    found = [(f"attention in turns, D={D}", one) for D in (64, 128) for one in _attention(D)]
    found += [("attention, dq in memory", one) for one in _fused_dq()]
    found += zip(
        ("linear warp-specialised, K=320", "hidden gradient warp-specialised"),
        _warp_specialized(),
        strict=True,
    )
    with ptx_machine("sm_90", recorded=[]) as machine, forced("linear_fwd", TMA_TILE):
        fk.linear(x, weight, activation="gelu")
    return found + [("linear, K=320", one) for one in machine.recorded or []]


def _warp_specialized() -> list[Recorded]:
    """Of either use, two tiles of one program."""
    x, weight = torch.randn(200, 320).bfloat16(), torch.randn(136, 320).bfloat16()
    fc2, one_sm = torch.randn(320, 136).bfloat16(), Gpu("sm_90", 1, TARGETS["sm_90"].shared_limit)
    bias = torch.randn(136).bfloat16().requires_grad_()
    with (
        ptx_machine("sm_90", recorded=[]) as machine,
        on_absent_gpu(one_sm),
        forced("linear_fwd", SPECIALIZED),
    ):
        fk.linear(x, weight.requires_grad_(), activation="gelu")
        with forced("linear_fwd", TMA_TILE), forced("mlp_bwd_hidden", SPECIALIZED):
            fk.mlp(x, weight, bias, fc2.requires_grad_(), None).sum().backward()
    return [one for one in machine.recorded or [] if "warp_specialized" in one.program.name]


def _attention(D: int) -> list[Recorded]:
    """Three heads of one image: all keys at once, forward and backward, or chunk by chunk."""
    x, weight, bias = torch.randn(1, 150, 32), torch.randn(9 * D, 32) * 0.2, torch.randn(9 * D)
    given = [y.bfloat16().requires_grad_(D == 64) for y in (x, weight, bias)]
    one_sm = Gpu("sm_90", num_sms=1, shared_limit=TARGETS["sm_90"].shared_limit)
    with ptx_machine("sm_90", recorded=[]) as machine, on_absent_gpu(one_sm):
        out = fk.qkv_attention(*given, num_heads=3)
        if D == 64:
            out.backward(torch.randn_like(out))
    return [one for one in machine.recorded or [] if "pingpong" in one.program.name]


def _fused_dq() -> list[Recorded]:
    """A head of three key blocks, in one program: dq is stored, added, fetched and written."""
    T, H, D, row = 258, 1, 32, 260
    qkv, dout = torch.randn(1, T, 3, H, D).bfloat16(), torch.randn(1, T, H, D).bfloat16()
    q, k, v = (x.float().transpose(1, 2) for x in qkv.unbind(2))
    scores = q @ k.mT * 0.125
    out = (scores.softmax(-1) @ v).transpose(1, 2).bfloat16().contiguous()
    lse = torch.full((1, H, row), torch.inf)
    lse[..., :T] = scores.logsumexp(-1) / math.log(2)
    delta, dqkv = torch.full_like(lse, torch.nan), torch.full_like(qkv, torch.nan)
    strides = tuple(x.stride() for x in (dout, *qkv.unbind(2)))
    with ptx_machine("sm_90", recorded=[]) as machine:
        launch = bwd_fused_dq((1, T, H, D), strides, 3 * H * D, 3 * H * D, 0.125, num_sms=1)
        launch(*dqkv.unbind(2), None, dout, *qkv.unbind(2), out, lse, delta)
    return [one for one in machine.recorded or [] if "fused_dq" in one.program.name]


def changes(op: Op) -> Iterator[tuple[str, list[str]]]:
    """In words, and the operands instead; [] leaves it out."""
    if op.name.startswith(_LEFT_OUT):
        yield "left out", []
    if op.name.startswith(("wgmma.wait", "cp.async.bulk.wait")):
        more = str(int(op.operands[0], 0) + 1)
        yield f"waits for all but {more}", [more]
    if ".expect_tx" in op.name and op.operands[-1].isdigit():
        fewer = str(int(op.operands[-1]) // 2)
        yield f"expects {fewer} bytes", [*op.operands[:-1], fewer]


# By the beginning of its name: why nothing noticed that an instruction was left out.
REASONS = {
    "barrier.sync": "needless: no byte passes from one warp to another over it alone",
    "wgmma.fence": "needless: no register of a product was written since the fence before it",
    "wgmma.commit": "needless: the next commit takes its products, and the waits still cover them",
    "wgmma.wait": "needless: another wait covers its products before anyone reads D or writes A, B",
    "fence.proxy.async": "needless: another fence lies between the stores and wgmma or TMA",
    "mbarrier.inval": "needless: nobody uses its bytes again",
    "mbarrier.init": "needless: nobody uses this mbarrier",
    "mbarrier.try_wait": "needless: another wait covers its bytes",
    "cp.async.bulk.tensor": "beyond the machine",
    "cp.async.bulk.": "needless: the thread has no store of TMA in flight",
}


def why_not(op: Op) -> str | None:
    """Why nothing noticed; None: not one of these."""
    if op.program.parts_for_good and op.name.startswith(("mbarrier.arrive", "mbarrier.try_wait")):
        return "beyond the machine: in the orders that it tries, others come in time anyway"
    if op.program.parts_for_good and op.name == "fence.proxy.async":
        return "beyond the machine: it orders the proxies of global memory"
    return next((why for begin, why in REASONS.items() if op.name.startswith(begin)), None)
