"""docs/resources.md: what each kernel takes from the chip, written and read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..runtime.triton import triton
from ..tools.loop_model import ROOFS
from ..tools.resources import TARGETS, Kernel
from .steps import LISTED


def worst(kernels: Iterable[Kernel]) -> dict[tuple[str, str, str, str], Kernel]:
    """By row of the table: specialisations that differ in an argument's value alone are one row.

    The hot loop of a row is the longest, in whatever order they were compiled.
    """
    rows: dict[tuple[str, str, str, str], Kernel] = {}
    for kernel in sorted(kernels, key=_by_loop, reverse=True):
        row = rows.get(kernel.row_key(), kernel)
        warps = [w for w in (row.warps_per_sm, kernel.warps_per_sm) if w is not None]
        rows[kernel.row_key()] = replace(
            row,
            registers=max(row.registers, kernel.registers),
            spills=max(row.spills, kernel.spills),
            shared=max(row.shared, kernel.shared),
            warps_per_sm=min(warps) if warps else None,
            seconds=max(row.seconds, kernel.seconds),
            useful=min((u for u in (row.useful, kernel.useful) if u is not None), default=None),
        )
    return dict(sorted(rows.items()))


def _by_loop(kernel: Kernel) -> tuple[float, str, str, str, str]:
    cycles = float(kernel.hot_loop.rpartition(" ")[2] or 0)
    return cycles, kernel.hot_loop, kernel.products, kernel.tensor_cores, kernel.copies


HEADER = (
    "kernel", "config", "pointers", "registers", "spills", "shared", "warps/SM", "tensor cores",
    "async copies",
)  # fmt: skip
MODEL_HEADER = ("hot loop", "waits/HGMMA", "useful")


def cells(kernel: Kernel) -> tuple[str, ...]:
    warps = "-" if kernel.warps_per_sm is None else str(kernel.warps_per_sm)
    return (
        kernel.kernel, kernel.config, kernel.dtypes, str(kernel.registers), str(kernel.spills),
        str(kernel.shared), warps, kernel.tensor_cores or "-", kernel.copies or "-",
    )  # fmt: skip


def _model_cells(kernel: Kernel) -> tuple[str, ...]:
    useful = "-" if kernel.useful is None else f"{kernel.useful:.0%}"
    return kernel.hot_loop or "-", kernel.products or "-", useful


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def _folded(summary: str, table: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{table}\n\n</details>\n"


def resources_page(kernels: list[Kernel]) -> str:
    """docs/resources.md: what the gate compiled, row by row on LISTED, by kernel elsewhere."""
    parts = [
        "# What each kernel takes from the chip\n",
        "Written by `fastvit-kernels compile --gate --update`; the gate compares with it.",
        f"Compiled with triton {triton.__version__}, not run. The worst of each kernel, and every",
        "specialisation in a fold; the columns are those of [compile.md](compile.md). Hot loop and",
        "useful share are a model's, from machine code and shapes, not measured.\n",
    ]
    rows = worst(kernels)
    for arch in LISTED:
        mine = [kernel for key, kernel in rows.items() if key[0] == arch]
        limit = TARGETS[arch].shared_limit
        gpu = ROOFS[arch].gpu
        parts += [f"## {arch} ({gpu}), at most {limit} bytes of shared memory\n"]
        parts += [_markdown([SUMMARY_HEADER, *_summary(mine)]), ""]
        listed = [(*cells(kernel), *_model_cells(kernel)) for kernel in mine]
        table = _markdown([(*HEADER, *MODEL_HEADER), *listed])
        parts += [_folded(f"all {len(listed)} rows", table)]
    parts += ["## Other targets, the worst config of each kernel\n"]
    head = ("target", "limit", "kernel", "registers", "spills", "shared", "tensor cores")
    others: list[tuple[str, ...]] = [head]
    for arch, target in TARGETS.items():
        for name in sorted({k.kernel for k in kernels}):
            same = [k for k in kernels if (k.arch, k.kernel) == (arch, name)]
            if arch in LISTED or not same:
                continue
            kinds = sorted({k.tensor_cores for k in same} - {""})
            peaks = (max(getattr(k, a) for k in same) for a in ("registers", "spills", "shared"))
            row = (arch, str(target.shared_limit), name, *map(str, peaks), ", ".join(kinds) or "-")
            others.append(row)
    parts += [_folded(f"{len(others) - 1} rows", _markdown(others))]
    return "\n".join([*parts, ""])


SUMMARY_HEADER = ("kernel", "rows", "registers", "spills", "shared", "warps/SM", "useful")


def _summary(kernels: Sequence[Kernel]) -> list[tuple[str, ...]]:
    """A line for each kernel: the largest registers, spills and shared, the fewest warps."""
    lines = []
    for name in sorted({k.kernel for k in kernels}):
        same = [k for k in kernels if k.kernel == name]
        warps = [k.warps_per_sm for k in same if k.warps_per_sm is not None]
        shares = [k.useful for k in same if k.useful is not None]
        peaks = [max(getattr(k, a) for k in same) for a in ("registers", "spills", "shared")]
        peaks[2] = f"{-(-peaks[2] // 1024)} KB"
        useful = f"{min(shares):.0%} to {max(shares):.0%}" if shares else "-"
        lines.append((name, str(len(same)), *map(str, peaks), str(min(warps, default=0)), useful))
    return lines


def read_page(text: str) -> tuple[str, dict[tuple[str, str, str, str], tuple[int, int, int]]]:
    """The triton version of a resources page, and (registers, spills, shared) by row."""
    version = re.search(r"Compiled with triton (\S+),", text)
    if version is None:
        raise ValueError("it does not say which triton compiled it")
    rows = {}
    arch, listed = "", False
    for line in text.splitlines():
        if heading := re.match(r"## (sm_\d+)[ ,]", line):
            arch, listed = heading[1], False
        elif line.startswith("## "):
            break
        elif line.startswith("| kernel |"):
            listed = "| config |" in line
        elif listed and line.startswith("| ") and not line.startswith("| ---"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            rows[arch, cells[0], cells[1], cells[2]] = tuple(int(c) for c in cells[3:6])
    return version[1], rows


def compare(
    kernels: Iterable[Kernel], page: str, whole: bool = True
) -> tuple[list[str], list[str]]:
    """(regressions, remarks) of what was compiled against a resources page.

    Args:
        whole: rows of the page that were not compiled are gone.
    """
    version, recorded = read_page(page)
    if version != triton.__version__:
        return [], [f"the table is of triton {version}, this is {triton.__version__}: not compared"]
    regressions, remarks = [], []
    rows = {key: k for key, k in worst(kernels).items() if key[0] in LISTED}
    for key, kernel in rows.items():
        name = f"{key[0]} {key[1]} [{key[2]}; {key[3]}]"
        if key not in recorded:
            remarks.append(f"not in the table: {name}")
            continue
        now = (kernel.registers, kernel.spills, kernel.shared)
        pairs = zip(("registers", "spills", "shared"), recorded[key], now, strict=True)
        changes = [(what, old, new) for what, old, new in pairs if old != new]
        text = ", ".join(f"{what} {old} -> {new}" for what, old, new in changes)
        if any(new > old for _, old, new in changes):
            regressions.append(f"{name}: {text}")
        elif changes:
            remarks.append(f"better than the table: {name}: {text}")
    compiled = {key[0] for key in rows}
    gone = (key for key in recorded if whole and key[0] in compiled and key not in rows)
    remarks += [f"no longer compiled: {' '.join(key)}" for key in gone]
    return regressions, remarks
