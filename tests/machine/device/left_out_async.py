"""What left_out.py changes of wgmma, TMA and their kin, and why some of it is not noticed."""

from __future__ import annotations

from collections.abc import Iterator

from .faults import InFlight, Unfenced
from .mbarriers import Miscounted
from .program import Op
from .tensor_copies import WrongMap

NAMES = ((Unfenced, "fence"), (InFlight, "in flight"), (Miscounted, "count"), (WrongMap, "bounds"))

_LEFT_OUT = (
    "wgmma.fence", "wgmma.commit", "wgmma.wait", "fence.proxy", "mbarrier.", "cp.async.bulk",
    "tensormap.cp_fenceproxy",
)  # fmt: skip


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


def why_not(op: Op) -> str | None:
    """Why nothing noticed; None: not one of these."""
    name = op.name
    if name.startswith("wgmma.fence"):
        return "needless: no register of a product was written since the fence before it"
    if name.startswith("wgmma.commit"):
        return "needless: the next commit takes its products, and the waits still cover them"
    if name.startswith("wgmma.wait"):
        return "needless: another wait covers its products before anyone reads D or writes A, B"
    if name.startswith("fence.proxy.async"):
        return "needless: another fence lies between the stores and wgmma or TMA"
    if name.startswith("mbarrier.inval"):
        return "needless: nobody uses its bytes again"
    if name.startswith("mbarrier.init"):
        return "needless: nobody uses this mbarrier"
    if name.startswith("mbarrier.try_wait"):
        return "needless: another wait covers its bytes"
    if name.startswith("cp.async.bulk.") and "tensor" not in name:
        return "needless: the thread has no store of TMA in flight"
    if name.startswith("cp.async.bulk.tensor"):
        return "beyond the machine"
    return None
