"""The reported miscompiles that the kernels must not meet, each with a test of its name.

Where the code avoids one by construction, the source or the compiled IR is tested; where it cannot,
every shipped config is run for gradients and equal bits. The IR is that of sm_90, compiled in one
subprocess, because the interpreter takes the place of the compiler here: every op at its default
config, then each shipped config that fits, forced.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from numerics import DEVICE, assert_accurate, rand

import fastvit_kernels as fk
from fastvit_kernels.runtime.configs import TABLES
from fastvit_kernels.runtime.dtypes import DTYPES
from tests.check import all_configs
from tests.check.config_cases import config_cases
from tests.machine.aot import TARGETS
from tests.machine.ptx import Ptx

PACKAGE = Path(fk.__file__).parent


Steps = tuple[int | str, ...]  # elements of nested tuples, by position or name


class Kernels:
    """The @triton.jit functions of some sources, and what kind of value their expressions are."""

    def __init__(self, sources: list[str]):
        self.functions: dict[str, list[ast.FunctionDef]] = {}
        self.tuples: dict[str, list[str]] = {}  # fields of the named tuples that kernels make
        for node in (node for source in sources for node in ast.walk(ast.parse(source))):
            if isinstance(node, ast.FunctionDef) and any(
                ast.unparse(d).startswith("triton.jit") for d in node.decorator_list
            ):
                self.functions.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases):
                self.tuples[node.name] = [
                    ast.unparse(n.target) for n in node.body if isinstance(n, ast.AnnAssign)
                ]

    def transposes(self) -> Iterator[tuple[str, str, set[str]]]:
        """(function, expression, kinds) of each operand of a transposition."""
        for name, definitions in self.functions.items():
            for function in definitions:
                for node in ast.walk(function):
                    operand = _transposed(node)
                    if operand is not None:
                        kinds = self.kinds(operand, function, (), set())
                        yield name, ast.unparse(node), kinds

    def kinds(self, node: ast.expr, function, path: Steps, seen: set) -> set[str]:
        """What an expression, or its element at `path`, may be.

        "loaded", "pointer", "constant" or "computed".
        """
        step = (function.name, ast.dump(node), path)
        if step in seen:
            return set()
        seen.add(step)  # what it may be is in the answer already
        if _is_pointer(node):
            return {"pointer"}
        if isinstance(node, ast.IfExp):
            return self._all([node.body, node.orelse], function, path, seen)
        if isinstance(node, ast.Name):
            return self._of_name(node.id, function, path, seen)
        if (operand := _transposed(node)) is not None:
            return self.kinds(operand, function, path, seen)
        if isinstance(node, ast.Subscript):
            index = node.slice.value if isinstance(node.slice, ast.Constant) else 0
            # what is taken by a variable stands in a tuple of equals: the first is as good as any
            return self.kinds(node.value, function, (index, *path), seen)
        if isinstance(node, ast.Attribute):
            return self.kinds(node.value, function, (node.attr, *path), seen)
        if isinstance(node, ast.Tuple):
            if path and isinstance(path[0], int):
                one = node.elts[path[0] : path[0] + 1]  # none, where another return has more
                return self._all(one, function, path[1:], seen)
            return self._all(node.elts, function, path, seen)
        if isinstance(node, ast.Call):
            return self._of_call(node, function, path, seen)
        return {"computed"}

    def _all(self, nodes, function, path: Steps, seen: set) -> set[str]:
        return {kind for node in nodes for kind in self.kinds(node, function, path, seen)}

    def _of_call(self, node: ast.Call, function, path: Steps, seen: set) -> set[str]:
        called = ast.unparse(node.func)
        if called == "tl.load" or called.endswith(".load"):
            return {"loaded"}
        if called in ("tl.zeros", "tl.full"):
            return {"constant"}
        if called in self.tuples and path and path[0] in self.tuples[called]:
            position = self.tuples[called].index(str(path[0]))
            return self.kinds(node.args[position], function, path[1:], seen)
        if called in self.functions:
            returned = (
                (n.value, definition)
                for definition in self.functions[called]
                for n in ast.walk(definition)
                if isinstance(n, ast.Return) and n.value is not None
            )
            return {kind for v, d in returned for kind in self.kinds(v, d, path, seen)}
        return {"computed"}

    def _of_name(self, name: str, function, path: Steps, seen: set) -> set[str]:
        values = []  # (expression, the function it stands in, path)
        kinds: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.AugAssign | ast.For):
                if any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node.target)):
                    kinds.add("computed")
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name) and target.id == name:
                        values.append((node.value, function, path))
                    elif isinstance(target, ast.Tuple):
                        for i, element in enumerate(target.elts):
                            if isinstance(element, ast.Name) and element.id == name:
                                values.append((node.value, function, (i, *path)))
        parameters = [a.arg for a in function.args.args]
        if name in parameters:
            passed = self._passed(function.name, parameters.index(name), name)
            values += [(value, caller, path) for value, caller in passed]
        if not values:
            kinds.add("computed")
        return kinds.union(*(self.kinds(v, f, p, seen) for v, f, p in values))

    def _passed(self, name: str, position: int, keyword: str) -> Iterator[tuple[ast.expr, Any]]:
        """What calls of a function pass as one parameter, and the function each call stands in."""
        for caller in (d for definitions in self.functions.values() for d in definitions):
            for node in ast.walk(caller):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                    by_name = [k.value for k in node.keywords if k.arg == keyword]
                    for value in by_name or node.args[position : position + 1]:
                        yield value, caller


def _transposed(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.Attribute) and node.attr == "T":
        return node.value
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr not in ("trans", "permute"):
        return None
    is_function = ast.unparse(node.func.value) == "tl"
    return node.args[0] if is_function else node.func.value


def _is_pointer(node: ast.expr) -> bool:
    """By the house's names: x_ptr, x_ptrs, or a call of such a name; sums with one are pointers."""
    if isinstance(node, ast.BinOp):
        return _is_pointer(node.left) or _is_pointer(node.right)
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ast.unparse(node)
    return re.fullmatch(r"\w*ptrs?", name) is not None


# A permutation for tl.split: the halves of an accumulator are stored, no dot takes them.
SPLIT_FOR_AN_EPILOGUE = {"column_halves"}
# Integers that no dot takes: the words of a random number, put in their places.
RANDOM_BITS = {"dropout_keep", "_joined_columns"}

PLANTED = """
class Pair(NamedTuple):
    loaded: Any
    sum: Any

@triton.jit
def _load(x_ptr, FLAG):
    x = tl.load(x_ptr)
    return x, x

@triton.jit
def _pair(x_ptr):
    x = tl.load(x_ptr)
    return Pair(x, tl.sum(x, axis=1))

@triton.jit
def _use(x, y):
    return tl.dot(tl.trans(x), y)

@triton.jit
def _kernel(x_ptr, y_ptrs):
    x, x2 = _load(x_ptr, True)
    both, pair, pairs = _load(x_ptr, True), _pair(x_ptr), (_pair(x_ptr),)
    y = tl.load(y_ptrs)
    p = _use(x2, y)
    {statement}
"""


@pytest.mark.parametrize(
    ("statement", "wrong"),
    [
        ("_use(y, x)", False),
        ("z = tl.dot(tl.trans(x2), y)", False),
        ("tl.store(tl.trans(y_ptrs + 1), p)", False),
        ("_use(both[1], y)", False),
        ("_use(pair.loaded, y)", False),
        ("_use(pairs[0].loaded, y)", False),
        ("_use(pairs[i].loaded, y)", False),
        ("_use((p, x)[1], y)", False),
        ("_use((p, x)[0], y)", True),
        ("_use(pair.sum, y)", True),
        ("_use(pairs[i].sum, y)", True),
        ("_use(p, y)", True),
        ("_use(y=y, x=p.to(y.dtype))", True),
        ("z = tl.dot(tl.trans(p.to(y.dtype)), y)", True),
        ("z = tl.dot(p.T, y)", True),
        ("z = tl.dot(tl.permute(p, (1, 0)), y)", True),
        ("x2 = p\n    z = tl.dot(x2.trans(), y)", True),
        ("x *= 2\n    z = tl.dot(tl.trans(x), y)", True),
    ],
)
def test_planted_transposes_are_judged(statement, wrong):
    kernels = Kernels([PLANTED.format(statement=statement)])
    found = [e for _, e, kinds in kernels.transposes() if "computed" in kinds]
    assert bool(found) == wrong, found


def test_no_transpose_of_a_computed_value():
    """Wrong gradients from tl.dot(tl.trans(x), y), x from an accumulator: fla #640, #826, #983."""
    kernels = Kernels([path.read_text() for path in sorted(PACKAGE.rglob("*.py"))])
    assert len(kernels.functions) > 20
    transposes = list(kernels.transposes())
    assert transposes, "the attention kernels transpose what they loaded"
    wrong = [
        (name, e, kinds)
        for name, e, kinds in transposes
        if "computed" in kinds and name not in SPLIT_FOR_AN_EPILOGUE | RANDOM_BITS
    ]
    assert not wrong, wrong


COMPILE = """
import sys
from pathlib import Path
import torch
import fastvit_kernels as fk
from tests.machine import aot
from fastvit_kernels.runtime import configs as launch_configs
from fastvit_kernels.runtime.configs import TABLES, forced, recording

out, target = Path(sys.argv[1]), aot.TARGETS["sm_90"]
bf16 = torch.bfloat16

kept, label = {}, aot._label

def keep(compiled):
    '''Each kernel's texts once, beside its label.'''
    config, dtypes = label(compiled)
    if compiled.hash not in kept:
        name = f"{len(kept):03d}-{compiled.metadata.name}"
        for kind in ("ttir", "ttgir", "ptx"):
            (out / f"{name}.{kind}").write_text(compiled.asm.get(kind, ""))  # no ttir of Gluon
        (out / f"{name}.label").write_text(f"{config}; {dtypes}\\n{compiled.metadata.shared}")
        kept[compiled.hash] = name
    return config, dtypes

aot._label = keep
parameter = lambda *shape, dtype=bf16: torch.empty(shape, dtype=dtype, requires_grad=True)

def norm():
    x = parameter(8, 197, 768)
    fk.layer_norm(x, parameter(768), parameter(768)).backward(torch.empty_like(x))
    fk.rms_norm(x, parameter(768)).backward(torch.empty_like(x))
    fk.rms_norm(x, parameter(768), residual=parameter(8, 197, 768)).backward(torch.empty_like(x))

def attend(B, T, H, D, dtype=bf16, dropout_p=0.0):
    def step():
        y = fk.attention(parameter(B, T, 3, H, D, dtype=dtype), dropout_p=dropout_p)
        y.backward(torch.empty_like(y))
    return step

def masked():
    q, k, v = (parameter(8, 12, T, 64) for T in (197, 257, 257))
    for mask in (torch.empty(197, 257, dtype=torch.bool), torch.empty(197, 257, dtype=bf16)):
        fk.scaled_dot_product_attention(q, k, v, mask).backward(torch.empty_like(q))

def learnt_bias():
    y = fk.attention(parameter(8, 197, 3, 12, 64), attn_mask=parameter(1, 12, 197, 197))
    y.backward(torch.empty_like(y))

def packed():
    lengths = torch.empty(9, dtype=torch.int32)
    y = fk.varlen_attention(parameter(8 * 197, 3, 12, 64), lengths, 197)
    y.backward(torch.empty_like(y))

def linear():
    x, residual = parameter(64, 197, 768), parameter(64, 197, 768, dtype=torch.float32)
    fk.linear(x, parameter(768, 768), parameter(768), residual=residual).backward(residual)

def skipped():
    x, samples = parameter(8, 197, 768), fk.keep_samples(8, 0.4)
    y, x = fk.layer_norm_and_input(x, parameter(768), samples=samples)
    x = fk.linear(y, parameter(768, 768), residual=x, row_scale=samples)
    x.backward(torch.empty_like(x))

def mlp(recompute):
    def step():
        x = parameter(64, 197, 768)
        weights = parameter(3072, 768), parameter(3072), parameter(768, 3072), parameter(768)
        fk.mlp(x, *weights, recompute=recompute).backward(torch.empty_like(x))
    return step

def gated(F, norm):
    def step():
        x, fc1 = parameter(64, 257, 768), parameter(F if norm else 2 * F, 768)
        inner = dict(gate_weight=parameter(F, 768), norm_weight=parameter(F)) if norm else {}
        fk.gated_mlp(x, fc1, None, parameter(768, F), None, **inner).backward(torch.empty_like(x))
    return step

def rotary(norm, learns=False):
    def step():
        x, cos = parameter(8, 201, 768), torch.empty(201, 64, requires_grad=learns)
        sin = torch.empty_like(cos)
        weight = {} if norm is None else dict(q_norm_weight=parameter(64))
        y = fk.rope_attention(
            x, parameter(2304, 768), parameter(2304), num_heads=12, cos=cos, sin=sin, norm=norm,
            **weight,
        )
        y.backward(torch.empty_like(y))
    return step

def patches():
    images = parameter(64, 3, 224, 224, dtype=torch.float32)
    with torch.autocast("cpu", bf16):
        weight, pos = parameter(768, 3, 16, 16, dtype=torch.float32), parameter(1, 196, 768)
        y = fk.patch_embed(images, weight, parameter(768), pos_embed=pos)
    y.backward(torch.empty_like(y))

def patches_of_one_dtype():
    images = parameter(64, 3, 224, 224)
    fk.patch_embed(images, parameter(768, 3, 16, 16)).backward(parameter(64, 196, 768))

def kept_patches():
    keep = torch.zeros(64, 49, dtype=torch.int64)
    images, weight = parameter(64, 3, 224, 224), parameter(768, 3, 16, 16)
    y = fk.patch_embed(images, weight, None, pos_embed=parameter(1, 196, 768), keep=keep)
    y.backward(torch.empty_like(y))

steps = [
    norm, attend(8, 197, 12, 64), attend(8, 577, 12, 64), attend(8, 197, 12, 80),
    attend(256, 50, 12, 32), attend(2, 197, 3, 64, torch.float32),
    attend(16, 197, 12, 64), attend(8, 197, 12, 64, bf16, 0.1), masked, linear, mlp(False),
    mlp(True), gated(2048, False), gated(2730, False), gated(384, True), gated(2048, True),
    rotary(None), rotary("layer_norm"), rotary("layer_norm", True), rotary(None, True),
    patches, patches_of_one_dtype, learnt_bias, packed, skipped, kept_patches,
]
asked = []
for step in steps:
    with recording() as choices:
        aot.compile_step(step, target)
    asked.append(list(choices))
for table in TABLES.values():
    for config in table.configs:
        for step, choices in zip(steps, asked):
            mine = [c for c in choices if c.table == table.name]
            if any(table.fits(c.gpu, config, *c.key) for c in mine):
                with forced(table.name, config):
                    aot.compile_step(step, target)
                break
"""


class Compiled(NamedTuple):
    name: str  # "attention_fwd"
    label: str  # config; dtypes
    shared: int  # bytes a block
    ttir: str
    ttgir: str
    ptx: str

    def __str__(self) -> str:
        return f"{self.name} [{self.label}]"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[Compiled]:
    out = tmp_path_factory.mktemp("ir")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = []
    for path in sorted(out.glob("*.ptx")):
        name = path.stem.split("-", 1)[1].removeprefix("_").removesuffix("_kernel")
        label, shared = path.with_suffix(".label").read_text().split("\n")
        texts = (path.with_suffix(f".{kind}").read_text() for kind in ("ttir", "ttgir", "ptx"))
        kernels.append(Compiled(name, label, int(shared), *texts))
    unique = {(k.name, k.label, k.ptx): k for k in kernels}
    return list(unique.values())


def test_the_kernels_of_every_op_are_looked_at(compiled):
    names = {kernel.name for kernel in compiled}
    kernels = Kernels([path.read_text() for path in PACKAGE.rglob("*.py")])
    launched = {n[1:].removesuffix("_kernel") for n in kernels.functions if n.endswith("_kernel")}
    # the first needs a LayerScale without activation, the second an input gradient of images, the
    # third a backward that runs on request alone
    rare = {"weight_bwd", "patch_embed_bwd_images", "attention_bwd_sum_parts"}
    assert launched - names <= rare, launched - names


def transposed_values(ttir: str) -> list[str]:
    """The operations whose results are transposed. Not those of pointers and integers, which no dot
    takes, nor for a tt.split."""
    found = []
    lines = ttir.splitlines()
    for number, line in enumerate(lines):
        match = re.search(r"(%[\w#]+) = tt\.trans (%[\w#]+) .*? : tensor<([^>]*)", line)
        if match is None or "!tt.ptr" in match[3] or match[3].endswith("xi32"):
            continue
        result, value, _ = (re.escape(group) for group in match.groups())
        if any(re.search(rf"tt\.split {result}\b", later) for later in lines[number + 1 :][:3]):
            continue
        # names are those of a region: the nearest definition above is the one meant
        above = (re.match(rf"\s*{value}(?::\d+)? = \"?([\w.]+)", e) for e in lines[:number][::-1])
        defined = next(filter(None, above), None)
        found.append(defined[1] if defined else "an argument")
    return found


def test_no_transpose_of_a_computed_value_in_the_ir(compiled):
    """As above, after inlining: what is transposed comes out of a load."""
    seen = 0
    for kernel in compiled:
        operations = transposed_values(kernel.ttir)
        seen += len(operations)
        assert set(operations) <= {"tt.load", "tt.descriptor_load"}, (str(kernel), operations)
    assert seen > 20


def test_transposed_values_sees_a_computed_one():
    line = "%y = tt.trans %x {order = array<i32: 1, 0>} : tensor<64x64xbf16> -> tensor<64x64xbf16>"
    computed = f"  %x = arith.truncf %s : tensor\n  {line}"
    assert transposed_values(computed) == ["arith.truncf"]
    assert transposed_values(f"  %x = tt.broadcast %s\n  %x = tt.load %s\n  {line}") == ["tt.load"]
    assert transposed_values(f"{computed}\n  %a, %b = tt.split %y : tensor") == []


class Dot(NamedTuple):
    """A wgmma with its left operand in registers: where it is, and its loop's lines."""

    line: int
    operand: str
    loop: tuple[int, int] | None


def register_dots(ttgir: str) -> list[Dot]:
    """The asynchronous dots whose left operand is in registers."""
    dots: list[Dot] = []
    loops: list[tuple[int, int | None]] = []  # (first line, depth), innermost last
    depth, open_dots = 0, []
    for number, line in enumerate(ttgir.splitlines()):
        if " = scf.for " in line or line.strip().startswith("scf.for "):
            loops.append((number, depth))
        match = re.search(r"ttng\.warp_group_dot (%[\w#]+),.*isAsync = true.* : tensor<", line)
        if match:
            open_dots.append((number, match[1], loops[-1][0] if loops else None))
        depth += line.count("{") - line.count("}")
        if loops and depth <= loops[-1][1]:
            first, _ = loops.pop()
            dots += [Dot(n, a, (first, number)) for n, a, loop in open_dots if loop == first]
            open_dots = [d for d in open_dots if d[2] != first]
    return dots + [Dot(n, a, None) for n, a, _ in open_dots]


def unsafe_register_dots(ttgir: str) -> list[str]:
    """Those whose registers the next iteration may write while the wgmma still reads them.

    Safe is: in each turn of the loop, a wait for all wgmma (pendings = 0) stands between the dot
    and the instruction that gives its operand the next value.
    """
    lines = ttgir.splitlines()
    unsafe = []
    for dot in register_dots(ttgir):
        if dot.loop is None:
            continue
        first, last = dot.loop
        name = re.escape(dot.operand.split("#")[0])
        written = [
            n for n in range(first + 1, dot.line) if re.match(rf"\s*{name}\b.* = ", lines[n])
        ]
        if not written:  # a value of the loop's own arguments: nothing shows when it is written
            if re.search(rf"{name} = ", lines[first]):
                unsafe.append(lines[dot.line].strip()[:80])
            continue
        indent = len(lines[dot.line]) - len(lines[dot.line].lstrip())
        waits = [
            n
            for n in (*range(dot.line, last), *range(first + 1, written[0]))
            if re.search(r"warp_group_dot_wait .*pendings = 0 ", lines[n])
            and len(lines[n]) - len(lines[n].lstrip()) <= indent
        ]
        if not waits:
            unsafe.append(lines[dot.line].strip()[:80])
    return unsafe


IN_TURNS = {"attention_fwd_pingpong", "attention_bwd_pingpong"}  # written in Gluon
# P V and dP K take P and dS from registers; patch_embed casts fp32 pixels there. A kernel that is
# not in here and has such a dot is a decision to be taken.
REGISTER_OPERANDS = {
    "attention_fwd",
    "attention_bwd_dq",
    "attention_bwd_dkdv",
    "attention_bwd_one_pass",
    "patch_embed_fwd",
    "patch_embed_bwd_weight",
    "patch_embed_bwd_images",
    "attention_fwd_pingpong",
    "attention_bwd_pingpong",
}


def test_wgmma_with_register_operands_is_waited_for(compiled):
    """Triton #9433: with several in flight, a wait for all but one lets the next iteration write
    registers that a wgmma still reads. #9514 adds moves, in the compiler; here no wait leaves one.

    Not seen from the IR is that with 8 warps a wait is each warp group's own (triton #11047). What
    both leave to hope, equal bits of repeated runs on a device must show: test_all_configs.py.
    """
    found = {}
    for kernel in compiled:
        dots = register_dots(kernel.ttgir)
        if dots:
            found[kernel.name] = found.get(kernel.name, 0) + len(dots)
        assert not unsafe_register_dots(kernel.ttgir), str(kernel)
    assert {"attention_fwd", "attention_bwd_dq", "attention_bwd_dkdv"} <= set(found)
    assert set(found) <= REGISTER_OPERANDS, set(found) - REGISTER_OPERANDS


LOOP = """
    %acc = scf.for %i = %c0 to %c8 step %c1 iter_args(%arg = %cst, %old = %p0) {{
      {before}
      %p = ttg.convert_layout %x : tensor<64x64xbf16, #mma> -> tensor<64x64xbf16, #dot>
      %y = ttng.warp_group_dot {operand}, %v, %arg {{isAsync = true}} : tensor<64x64xbf16, #dot>
      {after}
      scf.yield %y, %p : tensor<64x64xf32, #mma>
    }}
    %z = ttng.warp_group_dot_wait %acc {{pendings = 0 : i32}} : tensor<64x64xf32, #mma>
"""
WAIT = "%w:2 = ttng.warp_group_dot_wait %y, %v {{pendings = {n} : i32}} : tensor<64x64xf32, #mma>"


@pytest.mark.parametrize(
    ("before", "operand", "after", "safe"),
    [
        ("", "%p", WAIT.format(n=0), True),
        (WAIT.format(n=0), "%p", "", True),  # the next iteration waits before it writes
        ("", "%p", "", False),
        ("", "%p", WAIT.format(n=1), False),
        (WAIT.format(n=1), "%p", "", False),
        ("", "%old", "", False),  # written wherever the register allocator likes
        ("", "%outside", "", True),  # never written again
    ],
)
def test_unsafe_register_dots_are_seen(before, operand, after, safe):
    ir = LOOP.format(before=before, operand=operand, after=after)
    assert len(register_dots(ir)) == 1
    assert bool(unsafe_register_dots(ir)) != safe


def test_no_tma_store(compiled):
    """A store to shared memory, then a TMA store without a fence between: triton #9610. Gluon's
    kernels say their fences themselves."""
    stores = {k.name for k in compiled if re.search(r"cp\.async\.bulk\.\S*global\.shared", k.ptx)}
    assert stores == IN_TURNS
    copies = [k for k in compiled if "cp.async" in k.ptx]
    assert len(copies) > 10  # the pattern's other half is there: this is the IR we think it is


def unfenced_wgmma(ptx: str) -> list[str]:
    """The wgmma that may read what cp.async wrote without a proxy fence between."""
    unfenced, waited = [], False
    for line in ptx.splitlines():
        if "cp.async.wait_" in line:
            waited = True
        elif "fence.proxy.async" in line:
            waited = False
        elif "wgmma.mma_async" in line and waited:
            unfenced.append(line.strip()[:60])
    return unfenced


def test_wgmma_reads_what_cp_async_wrote_behind_a_fence(compiled):
    """cp.async writes through the generic proxy, wgmma reads through the async one: triton #9610,
    #10537. GEMMs take TMA on sm_90; patch_embed has an operand from registers, whose fence
    serves both; attention has a fence of its own."""
    wrong = [k for k in compiled if unfenced_wgmma(k.ptx)]
    assert not wrong, [str(kernel) for kernel in wrong]
    fenced = {k.name for k in compiled if "cp.async.wait_" in k.ptx and "wgmma" in k.ptx}
    assert {"patch_embed_fwd", "patch_embed_bwd_weight"} <= fenced
    assert {"attention_fwd", "attention_bwd_one_pass"} <= fenced
    assert {"attention_bwd_dq", "attention_bwd_dkdv"} <= fenced
    by_tma = {k.name for k in compiled if "cp.async.bulk.tensor" in k.ptx and "wgmma" in k.ptx}
    assert by_tma == {"linear_fwd", "mlp_bwd_hidden", "gemm_warp_specialized", *IN_TURNS}


@pytest.mark.parametrize(
    ("lines", "fenced"),
    [
        (("cp.async.wait_group 0x1;", "wgmma.mma_async.sync"), False),
        (("cp.async.wait_group 0x1;", "fence.proxy.async.shared::cta;", "wgmma.mma_async"), True),
        (("fence.proxy.async.shared::cta;", "cp.async.wait_group 0x1;", "wgmma.mma_async"), False),
        (("fence.proxy.tensormap::generic.acquire.gpu", "wgmma.mma_async"), True),
        (("wgmma.mma_async.sync", "cp.async.wait_group 0x1;"), True),
    ],
)
def test_unfenced_wgmma_are_seen(lines, fenced):
    assert bool(unfenced_wgmma("\n".join(lines))) != fenced


def test_reductions_are_fp32(compiled):
    """tl.sum of a bf16 tensor adds in bf16: Liger #950."""
    for kernel in compiled:
        kinds = re.findall(r"\"tt\.reduce\".*\n\s*\^bb0\(%\S+: (\w+)", kernel.ttir)
        assert set(kinds) <= {"f32", "i32"}, (str(kernel), kinds)  # i32 counts
    assert sum("tt.reduce" in k.ttir for k in compiled) > 5


def test_attention_of_three_stages_loads_ahead(compiled):
    """The wait for a tile's copies leaves the next tile's in flight; two stages leave none."""
    ahead = set()
    for kernel in compiled:
        if not kernel.name.startswith("attention_") or "s3;" not in kernel.label:
            continue
        ptx = Ptx(kernel.ptx)
        ops = [op for loop in ptx.loops for at in loop.blocks for op in ptx.blocks[at].ops]
        waits = [int(op.operands[0]) for op in ops if op.name == "cp.async.wait_group"]
        if waits:
            assert min(waits) > 0, str(kernel)
            ahead.add(kernel.name.removeprefix("attention_"))
    assert ahead == {"fwd", "bwd_dq", "bwd_dkdv", "bwd_one_pass"}


def test_gates_of_any_width_are_read_in_words(compiled):
    """F = 2730: rows of bf16 begin at multiples of 4 bytes, which Triton by itself does not see."""
    kernels = [k for k in compiled if k.name in ("gate_fwd", "gate_bwd")]
    vectors = {re.findall(r"VECTOR=\d+", k.label)[0] for k in kernels}
    assert len(kernels) == 4 and vectors == {"VECTOR=2", "VECTOR=8"}
    for kernel in kernels:
        assert "ld.global" in kernel.ptx and "ld.global.b16" not in kernel.ptx, str(kernel)


def test_shared_memory_fits_every_config(compiled):
    """More than a block may have compiles in silence."""
    for kernel in compiled:
        assert 0 <= kernel.shared <= TARGETS["sm_90"].shared_limit, (str(kernel), kernel.shared)
    assert max(kernel.shared for kernel in compiled) > 2**16


FOUR_WARPS = [
    (table.name, config)
    for table in TABLES.values()
    if "bwd" in table.name and table.name.startswith(("attention", "mlp", "patch", "linear"))
    for config in table.configs
    if getattr(config, "num_warps", 0) == 4 and getattr(config, "route", "triton") == "triton"
]


@functools.cache
def _reached(names, dtype, large):
    every = config_cases(large, DEVICE, DTYPES[dtype])
    return all_configs.reach([case for case in every if case.name.startswith(names)])[0]


def _four_warp_runs(table, config, dtype, large):
    names = ("attention", "scaled_dot") if table.startswith("attention") else table.split("_")[0]
    return [r for r in _reached(names, dtype, large) if r.table == table and r.fits(config)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("table", "config"), FOUR_WARPS, ids=str)
def test_gradients_with_four_warps_on_the_gpu(table, config, dtype):
    """Several dots in a backward at 64-wide tiles with 4 warps: fla #984, #988, triton #11366. The
    PTX machine runs each of them on a CPU."""
    for reached in _four_warp_runs(table, config, dtype, True):
        run = all_configs.run_config(reached, config, repeats=10)
        assert run.fault is None, run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_fp32_parameters_with_low_precision_activations(dtype):
    """They break a tl.dot that does not cast at the load (fla #1264), as after an fp32 norm."""

    def autocast(function):
        def call(**inputs):
            with torch.autocast(DEVICE.type, dtype):
                return function(**inputs)

        return call

    def mlp_reference(x, **parameters):
        if x.dtype != torch.float64:
            parameters = {name: p.to(x.dtype) for name, p in parameters.items()}
        return torch.nn.functional.linear(
            torch.nn.functional.gelu(
                torch.nn.functional.linear(x, parameters["fc1_weight"], parameters["fc1_bias"])
            ),
            parameters["fc2_weight"],
            parameters["fc2_bias"],
        )

    inputs = {
        "x": rand(2, 19, 40, dtype=dtype),
        "fc1_weight": rand(72, 40, seed=1, scale=40**-0.5),
        "fc1_bias": rand(72, seed=2),
        "fc2_weight": rand(40, 72, seed=3, scale=72**-0.5),
        "fc2_bias": rand(40, seed=4),
    }
    with fk.backend("triton"):
        assert_accurate(autocast(fk.mlp), mlp_reference, inputs)
        assert_accurate(
            lambda x, weight, bias: fk.layer_norm(x, weight, bias),
            lambda x, weight, bias: torch.nn.functional.layer_norm(
                x, (40,), weight.to(x.dtype), bias.to(x.dtype), 1e-6
            ),
            {
                "x": rand(3, 7, 40, dtype=dtype),
                "weight": rand(40, seed=1),
                "bias": rand(40, seed=2),
            },
        )
