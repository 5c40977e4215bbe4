"""Small faults anywhere in the package and bench, drawn by seed, for `mutate.py --random`.

A comparison, an operator or a truth value turned, a number one larger, a condition fixed, a
keyword, a `not` or a call left out, a bound of a slice moved. What no test could notice is left
alone: docstrings, annotations, messages, what a command prints in help, assertions, and which of
the launch configs that ship a shape takes, which changes its speed alone.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import reduce
from itertools import accumulate, zip_longest
from operator import or_
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent.parent
# What only development runs, and faults are planted in too: folders of tests/.
TOOLS = ("check", "machine", "model_coverage", "traffic")
T = TypeVar("T")
OPPOSITES = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.And, ast.Or),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.FloorDiv),
    (ast.BitAnd, ast.BitOr),
    (ast.LShift, ast.RShift),
]
TURNED = dict(OPPOSITES) | {b: a for a, b in OPPOSITES}
TURNED |= {ast.Div: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
UNTOUCHED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
TEXTS = ("help", "metavar", "description", "num_warps", "num_stages", "maxsize", "stacklevel")
TEXTS += ("strict",)  # of zip: an assertion
LAUNCH_CHOICES = ("ops/attention/configs.py", "ops/common/gemm_configs.py")
ROOM_TESTS = {  # by the beginning of the file's name: where nothing else is found
    "bench/": ("test_bench_counts.py", "test_bench.py", "test_bench_model.py"),
    "tests/machine/": ("machine/test_gate.py", "machine/test_loop_model.py"),
    "tests/model_coverage/": ("model_coverage/test_sweep.py", "model_coverage/test_compare.py"),
    "measure/": ("test_measure.py", "test_bench.py"),
    "weights/": ("models/test_weights.py", "models/test_hostile_weights.py"),
    "fuse/": ("fuse/test_lookalikes.py", "fuse/test_spellings.py", "fuse/test_swap_in.py"),
    "ops/": ("ops/test_linear.py", "ops/test_mlp.py"),
    "accuracy/": ("commands/test_check.py", "ops/test_bad_calls.py", "ops/test_fuzz.py"),
    "": ("models/test_vit.py",),
}
NOT_RUN = ("__repr__", "__str__")
# Kernels in Gluon run as PTX alone, in processes that no tracer sees.
GLUON = "machine/device/test_kernels.py::test_gluon_kernels"
IN_GLUON = {  # the kinds of that test
    "ops/attention/forward_pingpong.py": ("forward",),
    "ops/attention/backward_pingpong.py": ("backward",),
    "ops/attention/backward_fused_dq.py": ("five products",),
    "ops/common/gemm_warp_specialized.py": ("GEMM",),
    "ops/gated_mlp/warp_specialized.py": ("gated MLP",),
    "ops/common/barriers.py": ("forward", "backward", "GEMM"),
    "runtime/gluon.py": ("forward", "GEMM"),
}
MOST = 4  # files of tests for a file
MOST_RAN = 150  # tests of a line
SLOW, LONGEST = 1.5, 40.0  # seconds of one test that is tried late, and of all
LEFT_AS_THEY_ARE = ("cast", "TypeVar", "print", "warn", "field", "dataclass", "constexpr")


def path_of(file: str) -> str:
    """A fault's file, from the root of the repository."""
    return file if file.startswith(("bench/", "tests/")) else f"fastvit_kernels/{file}"


@dataclass(frozen=True)
class Fault:
    """The bytes begin ... end of the file become `new`."""

    id: str
    file: str  # in fastvit_kernels/, where it does not begin with bench/ or tests/
    new: str
    begin: int
    end: int
    lines: tuple[int, int]
    ran: tuple[str, ...] = ()

    @property
    def tests(self) -> tuple[str, ...]:
        return self.ran or tests_of(self.file)


def _called(node: ast.AST) -> str:
    """The last name of what a call calls."""
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _with(node: T, **changed: Any) -> T:
    node = copy.copy(node)
    for name, value in changed.items():
        setattr(node, name, value)
    return node


def _turned(node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in the place of a node."""
    match node:
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.Compare(ops=[op]) if type(op) in TURNED:
            yield _with(node, ops=[TURNED[type(op)]()])
        case ast.BoolOp(op=op):
            yield _with(node, op=TURNED[type(op)]())
        case ast.BinOp(op=op, left=left, right=right) if type(op) in TURNED:
            texts = [x for x in (left, right) if isinstance(getattr(x, "value", None), str)]
            if not texts and not isinstance(left, ast.JoinedStr):
                yield _with(node, op=TURNED[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield body
            yield orelse
        case ast.Slice():
            for side in ("lower", "upper"):
                bound = getattr(node, side)
                if bound is not None and not isinstance(bound, ast.Constant):
                    moved = ast.BinOp(bound, ast.Add(), ast.Constant(1))
                    yield _with(node, **{side: moved})
        case ast.Call(args=args, keywords=keywords):
            for keyword in keywords:
                if keyword.arg is not None and keyword.arg not in TEXTS:
                    yield _with(node, keywords=[k for k in keywords if k is not keyword])
            if args and not isinstance(args[0], ast.Starred | ast.GeneratorExp):
                yield args[0]


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Those in which a fault may lie."""
    text_body = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "msg", "type_params"):
            continue
        children = value if isinstance(value, list) else [value]
        if isinstance(node, text_body) and name == "body" and ast.get_docstring(node) is not None:
            children = children[1:]
        for child in children:
            if not isinstance(child, ast.AST) or isinstance(child, UNTOUCHED):
                continue
            if isinstance(child, ast.keyword) and child.arg in TEXTS:
                continue
            if isinstance(child, ast.FunctionDef) and child.name in NOT_RUN:
                continue
            called = _called(child) if isinstance(child, ast.Call) else ""
            if called in LEFT_AS_THEY_ARE or called.endswith("Config"):
                continue
            if isinstance(child, ast.If) and re.search(
                "TYPE_CHECKING|__main__", ast.dump(child.test)
            ):
                continue
            yield child


def _changes(node: ast.AST, within: str) -> Iterator[tuple[str, ast.AST, str, str]]:
    """(function, node, its text, what stands there instead)."""
    for child in _children(node):
        name = getattr(child, "name", "") if hasattr(child, "body") else ""
        inside = f"{within}.{name}".lstrip(".") if name else within
        if isinstance(child, (ast.expr, ast.Slice)):
            slice_ = isinstance(child, ast.Slice)
            for new in _turned(child):
                ast.fix_missing_locations(new)
                text = ast.unparse(new)
                yield inside, child, ast.unparse(child), text if slice_ else f"({text})"
        if isinstance(child, ast.If | ast.While):
            for value in ("True", "False") if isinstance(child, ast.If) else ("False",):
                yield inside, child.test, ast.unparse(child.test), value
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
            yield inside, child, ast.unparse(child), "pass"
        yield from _changes(child, inside)


def _short(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    if len(text) <= 80:
        return text
    return f"{text[:60]}... {hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _mutants(file: str) -> Iterator[Fault]:
    """Every fault that could be drawn in a file. An id is of texts: it outlives changes around."""
    source = (ROOT / path_of(file)).read_text()
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree, seen = ast.parse(source), Counter()
    for within, node, old, new in _changes(tree, ""):
        at: Any = node
        begin = starts[at.lineno - 1] + at.col_offset
        end = starts[at.end_lineno - 1] + at.end_col_offset
        id = f"{file}:{within}: {_short(old)} -> {_short(new)}"
        seen[id] += 1
        id += f" #{seen[id]}" if seen[id] > 1 else ""
        lines = (at.lineno, at.end_lineno)
        yield Fault(id, file, new, begin, end, lines)


def plant(fault: Fault, source: str) -> str:
    text = source.encode()
    return (text[: fault.begin] + fault.new.encode() + text[fault.end :]).decode()


def files() -> list[str]:
    """As faults name them: in fastvit_kernels/, or bench/..., tests/machine/..."""
    outside = [ROOT / "bench", *(ROOT / "tests" / name for name in TOOLS)]
    found = [p for folder in outside for p in folder.glob("*.py") if p.name[:5] != "test_"]
    names = [str(p.relative_to(ROOT)) for p in found]
    package = ROOT / "fastvit_kernels"
    names += [str(p.relative_to(package)) for p in package.rglob("*.py")]
    return sorted(name for name in names if name not in LAUNCH_CHOICES)


def _in_turn(groups: Sequence[Sequence[T]]) -> list[T]:
    return [x for turn in zip_longest(*groups) for x in turn if x is not None]


def draw(count: int, seed: int, patterns: Sequence[str], ran: Ran | None) -> list[Fault]:
    """Faults by turns of rooms, and of the files in each: what is large does not swallow all."""

    def order(fault: Fault) -> str:
        return hashlib.sha256(f"{seed}:{fault.id}".encode()).hexdigest()

    rooms: dict[str, list[list[Fault]]] = {}
    for file in files():
        if any(fnmatch(file, pattern) for pattern in patterns):
            found = sorted(_mutants(file), key=order)
            if found:
                rooms.setdefault(file.rpartition("/")[0].split("/")[0], []).append(found)
    drawn = _in_turn(
        [_in_turn(sorted(files, key=lambda found: order(found[0]))) for files in rooms.values()]
    )[:count]
    return [replace(f, ran=ran.tests(f.file, *f.lines)) for f in drawn] if ran else drawn


# --- which tests


def in_gluon(file: str) -> tuple[str, ...]:
    return tuple(f"{GLUON}[{kind}]" for kind in IN_GLUON.get(file, ()))


def tests_of(file: str) -> tuple[str, ...]:
    """Those of the file's name and its folder's, and some that name it."""
    *folders, name = file.removesuffix(".py").split("/")
    paths = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if p.name != "test_docs.py"]
    paths = [p for p in paths if p.parent.name != "device"]  # minutes long
    paths.sort(key=lambda p: p.parent.name not in folders[:1])  # those of its room
    named = [p for n in (name, *folders[1:][-1:]) for p in paths if p.name == f"test_{n}.py"]
    named += [p for p in paths if re.search(rf"\b{name}\b", p.read_text())][:MOST]
    found = [str(p.relative_to(ROOT / "tests")) for p in named]
    found = [*in_gluon(file), *found]
    room = next(tests for start, tests in ROOM_TESTS.items() if file.startswith(start))
    few = len(found) < 2 or folders[:1] == ["fuse"]  # whose tests name no rule
    return tuple(dict.fromkeys([*found, *(room if few else ())]))


class Ran:
    """Which tests ran a line, as the plugin ran.py wrote it, of all workers."""

    def __init__(self, path: Path):
        self.workers = [json.loads(p.read_text()) for p in path.parent.glob(f"{path.name}.gw*")]
        if not self.workers:
            raise FileNotFoundError(f"there is no {path}.gw*: see tests/support/ran.py")

    def tests(self, file: str, first: int, last: int) -> tuple[str, ...]:
        """Those of the lines, MOST_RAN and LONGEST seconds at most: by turns of test functions,
        first the file's own, then those that run least of it; slow ones come last."""
        path = path_of(file)
        own, functions, seconds = tests_of(file), dict[str, list[str]](), dict[str, float]()
        nearness: dict[str, tuple[bool, int]] = {}
        ran = [
            (w, {int(n): int(b, 16) for n, b in w["lines"].get(path, {}).items()})
            for w in self.workers
        ]
        if not any(first <= n <= last for _, lines in ran for n in lines):
            if file in IN_GLUON:
                return in_gluon(file)
            first, last = 0, sys.maxsize  # what runs at import: all of the file
        for worker, lines in ran:
            there = reduce(or_, (b for n, b in lines.items() if first <= n <= last), 0)
            for i, name in enumerate(worker["tests"]):
                if there >> i & 1:
                    name = name.removeprefix("tests/")
                    seconds[name] = worker["seconds"][i]
                    function = name.partition("[")[0]
                    near = (not name.startswith(own), sum(b >> i & 1 for b in lines.values()))
                    nearness[function] = min(near, nearness.get(function, near))
                    functions.setdefault(function, []).append(name)
        ordered = sorted(functions, key=lambda function: nearness[function])
        turns = _in_turn([functions[function] for function in ordered])
        turns.sort(key=lambda name: seconds[name] > SLOW)
        spent = accumulate(seconds[name] for name in turns)
        return tuple(n for n, sum_ in zip(turns[:MOST_RAN], spent, strict=False) if sum_ <= LONGEST)
