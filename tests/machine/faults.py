"""What is wrong in the code of a compiled kernel, whatever its source says.

Each rule reads the code that will run (ptxas's remarks, SASS, PTX, TTGIR) and says in one sentence
what it found. docs/compile.md has the reason for each.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from .machine_code import Code
from .ptx import Ptx
from .sass import count


def faults(code: Code) -> tuple[str, ...]:
    """Every fault of a kernel, one sentence each."""
    rules = (serialised, narrow_products, unfenced_copies, duplicated_products)
    return tuple(fault for rule in rules for fault in rule(code))


def serialised(code: Code) -> Iterator[str]:
    """wgmma products that wait for one another."""
    if remark := re.search(
        r"\((C75\d\d)\)[^\n]*serialized due to ([^\n]*?) in (?:the )?function", code.remarks
    ):
        yield f"ptxas serialises wgmma ({remark[1]}): {remark[2]}"
    for loop in code.loops:
        own = count(loop.own)
        if own.hgmma > 1 and own.waits >= own.hgmma:
            yield f"a loop waits {own.waits} times for {own.hgmma} HGMMA"


def narrow_products(code: Code) -> Iterator[str]:
    """wgmma of fewer than 16 columns: triton #7981 and #10629."""
    narrow = [one.name for one in code.instructions if re.match(r"HGMMA\.64x8x", one.name)]
    if narrow:
        yield f"{len(narrow)} products of 8 columns an instruction ({narrow[0]})"


def unfenced_copies(code: Code) -> Iterator[str]:
    """wgmma or tcgen05 reads through the async proxy what cp.async wrote through the generic one.

    Triton adds the fence from 3.7.1 (triton #9610, #10537).
    """
    buffers = _copied_operands(code.ttgir)
    if buffers and _reads_before_fence(code.blocks):
        yield f"tensor cores read {len(buffers)} buffers of cp.async without fence.proxy.async"


_RESULT = re.compile(r"^\s*(?:(%[\w$]+)(?::\d+)? = )?([a-z_]+\.[\w.]+)")
_NAMES = re.compile(r"%[\w$]+")
_PRODUCTS = ("ttng.warp_group_dot", "ttng.tc_gen5_mma")


def _copied_operands(ttgir: str) -> set[str]:
    """Shared buffers that an asynchronous copy writes and a warp-group product reads."""
    parent: dict[str, str] = {}
    written: set[str] = set()
    read: set[str] = set()

    def root(name: str) -> str:
        while name in parent:
            name = parent[name]
        return name

    for line in ttgir.splitlines():
        match = _RESULT.match(line)
        if match is None:
            continue
        names = _NAMES.findall(line)
        if match[2].startswith("ttg.memdesc_"):
            parent[match[1]] = names[1]
        elif match[2] == "ttg.async_copy_global_to_local":
            written.add(root(names[2]))
        elif match[2] in _PRODUCTS:
            first = 0 if match[1] is None else 1  # after the result
            read |= {root(name) for name in names[first : first + 2]}
    return written & read


ISSUED, LANDED = 1, 2  # copies under way; copies that have arrived and that no fence followed


def _reads_before_fence(ptx: Ptx) -> bool:
    """Whether a path leads from cp.async over its wait to a product without a fence of proxies."""
    states = [0] * len(ptx.blocks)
    open_ = list(range(len(ptx.blocks)))
    while open_:
        at = open_.pop(0)
        state = states[at]
        for op in ptx.blocks[at].ops:
            if op.is_copy:
                state |= ISSUED
            elif op.name.startswith("cp.async.wait"):
                state |= LANDED if state & ISSUED else 0
                if op.operands in ((), ("0",)):  # wait_all, wait_group 0
                    state &= ~ISSUED
            elif op.name.startswith("fence.proxy.async"):
                state &= ~LANDED
            elif op.name.startswith(("wgmma.mma_async", "tcgen05.mma")) and state & LANDED:
                return True
        for following in ptx.successors[at]:
            if states[following] | state != states[following]:
                states[following] |= state
                open_.append(following)
    return False


_MMA = re.compile(
    r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = (\d), versionMinor = \d, "
    r"warpsPerCTA = \[(\d+), (\d+)\].*?instrShape = \[(\d+), (\d+)",
    re.M,
)
_DOT = re.compile(r"= (?:tt\.dot|ttng\.warp_group_dot) .*-> tensor<(\d+)x(\d+)xf32, (#\w+)>")


def duplicated_products(code: Code) -> Iterator[str]:
    """Products whose layout has more warps than tiles: several warps compute the same numbers.

    A tail too small to give each warp a tile of its own is left out: the useful share counts it.
    """
    layouts = {name: [int(n) for n in sizes] for name, *sizes in _MMA.findall(code.ttgir)}
    times: Counter[str] = Counter()
    for rows, columns, name in _DOT.findall(code.ttgir):
        if name not in layouts:
            continue
        version, down, across, M, N = layouts[name]
        if int(rows) * int(columns) < down * across * 16 * (16 if version == 3 else 8):
            continue
        copies = max(down * M // int(rows), 1) * max(across * N // int(columns), 1)
        if copies > 1:
            times[f"{rows}x{columns} on {down}x{across} warps, {copies} times"] += 1
    for text, n in times.items():
        yield f"{n} products computed more than once: {text}"
