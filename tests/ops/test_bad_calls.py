"""Bad calls of the ops: each gets one error that names the op, the argument, what came and what is
wanted, before any operator of torch or of the package runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from calls import Calls
from guard import unwatched
from numerics import DEVICE, rand
from op_facts import FACTS
from torch import Tensor

import fastvit_kernels as fk
from fastvit_kernels.accuracy.cases import OPS

nan, inf = float("nan"), float("inf")


def _good(name: str) -> dict[str, Any]:
    """The arguments of a good call of an op, the smallest with every tensor."""
    op, tiny = OPS[name], FACTS[name].tiny
    shapes = op.shapes_of(tiny).items()
    tensors = {n: rand(*s, seed=i, grad=False) for i, (n, s) in enumerate(shapes)}
    return {**tensors, **op.settings_of(tiny, DEVICE)}


def _call(name: str, **arguments: Any) -> Tensor:
    """The first output."""
    outputs = OPS[name].function(**arguments)
    return outputs[0] if OPS[name].outputs > 1 else outputs


_PARTS = [torch.ones(2, 8), torch.ones(3, 8)]
NESTED = torch.nested.nested_tensor(_PARTS)
JAGGED = torch.nested.nested_tensor(_PARTS, layout=torch.jagged)

_NESTED = "must be a dense strided tensor, got a nested tensor"
_FLOAT = "must be floating point.* got torch."
# What is wrong with a tensor, whichever it is -> how it is made, the error, what it says.
KINDS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "ndarray": (lambda x: x.cpu().numpy(), TypeError, "must be a Tensor, got ndarray"),
    "list": (lambda x: x.tolist(), TypeError, "must be a Tensor, got list"),
    "number": (lambda x: 1.0, TypeError, "must be a Tensor, got float"),
    "int64": (lambda x: x.long(), TypeError, _FLOAT + "int64"),
    "complex": (lambda x: x.to(torch.complex64), TypeError, _FLOAT + "complex64"),
    "float8_e4m3": (lambda x: x.to(torch.float8_e4m3fn), TypeError, _FLOAT + "float8_e4m3fn"),
    "quantised": (
        lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8),
        TypeError,
        _FLOAT + "qint8",
    ),
    "sparse": (lambda x: x.to_sparse(), TypeError, "must be .*dense.* got layout torch.sparse_coo"),
    "nested": (lambda x: NESTED, TypeError, _NESTED),
    "jagged": (lambda x: JAGGED, TypeError, _NESTED),
}


@dataclass(frozen=True)
class Bad:
    """A good call of an op with some arguments changed."""

    op: str
    argument: str  # the one at fault
    kind: str
    error: type[Exception]
    message: str  # a regular expression, after "op: argument "
    changes: Callable[[dict[str, Any]], dict[str, Any]]
    names: str = ""  # the argument that the message names, if not `argument`

    def __str__(self) -> str:
        return f"{self.op}-{self.argument}-{self.kind}"


def _generic() -> list[Bad]:
    """Each tensor argument of each op, wrong in each of KINDS, in dtype, device, rank, shape."""
    cases = []
    for name, op in OPS.items():
        shapes = op.shapes_of(FACTS[name].tiny)
        first, *_ = shapes
        for argument, shape in shapes.items():
            arg, accepts = op.args[argument], FACTS[name].accepts.get(argument, ())

            def add(kind, error, message, change, name=name, argument=argument):
                def changes(good):
                    return {argument: change(good[argument])}

                cases.append(Bad(name, argument, kind, error, message, changes))

            if arg.required:
                add("None", TypeError, "must be a Tensor, got NoneType", lambda x: None)
            for kind, (make, error, message) in KINDS.items():
                if kind not in accepts:
                    add(kind, error, message, make)
            if arg.operand and argument != first:
                wanted = f"must have the dtype of {first}, torch.float32, got torch.float64"
                add("float64", TypeError, wanted, lambda x: x.double())
            if argument != first:
                wanted = rf"must be on {DEVICE.type}(:\d)?, got meta"
                add("meta", ValueError, wanted, lambda x: x.to("meta"))
                wider = (*shape[:-1], shape[-1] + 1)
                if "wider" not in accepts:
                    add("wider", ValueError, rf".*{re.escape(str(wider))}|.* \d+", _wider)
            if "scalar" not in accepts:
                add("scalar", ValueError, "must|needs", lambda x: x.new_ones(()))
    return cases


_CHOICE = r"must be None or one of \['gelu', .* got"
_ACTIVATIONS = [
    (("relu", "GELU", "", "gelu "), ValueError, _CHOICE),
    ((3, True, ["gelu"], torch.relu, torch.nn.GELU()), TypeError, _CHOICE),
]
_NO_INT = (2.0, "2", None, True, [2], torch.tensor(2), np.int64(2)), TypeError, "must be an int"
_NO_NUMBER = ("0.1", None, True, [0.1], torch.tensor(0.1)), TypeError, "must be a number, got"
_PROBABILITY = [
    ((-0.1, 1.5, 2, nan, inf, -inf), ValueError, r"must be in \[0, 1.*, got {value}"),
    _NO_NUMBER,
]
# What an argument that is no tensor refuses, by its kind in the registry.
OPTIONS: dict[str, list[tuple[tuple[Any, ...], type[Exception], str]]] = {
    "eps": [
        ((nan, inf, -inf, -1e-6), ValueError, "must be finite and at least 0, got {value}"),
        ((1j, np.float32(1e-6)), TypeError, "must be a number, got {type}"),
        _NO_NUMBER,
    ],
    "dtype": [
        (
            ("float32", float, torch.int32, torch.complex64, torch.float8_e4m3fn, np.float32),
            TypeError,
            r"must be None or one of \[torch.float32, .* got",
        )
    ],
    "activation or None": _ACTIVATIONS,
    "activation": [*_ACTIVATIONS, ((None,), ValueError, "must not be None")],
    "flag": [((1, 0, "no", None, torch.tensor(True)), TypeError, "must be True or False, got")],
    "count": [((0, -1, -2), ValueError, "must be at least 1, got {value}"), _NO_INT],
    "count or 0": [
        ((-1, -2), ValueError, "must be at least 0, got {value}"),
        ((6,), ValueError, "must be at most T = 5, got 6"),
        _NO_INT,
    ],
    "norm": [
        (("batch_norm", "", "LayerNorm"), ValueError, "must be None or one of .'layer_norm', 'rms"),
        ((1, True, ["rms_norm"], torch.nn.LayerNorm), TypeError, "must be None or one of .* got"),
    ],
    "probability": _PROBABILITY,
    "probability below 1": [*_PROBABILITY, ((1.0,), ValueError, r"must be in \[0, 1\), got 1.0")],
    "scale": [
        ((nan, inf, -inf), ValueError, "must be finite, got {value}"),
        (("1", True, [1.0], 1j), TypeError, "must be a number, got"),
    ],
}


def _options() -> list[Bad]:
    """Each argument that is no tensor, with every value that its kind refuses."""
    cases = []
    for name, op in OPS.items():
        masks = {argument: None for argument, arg in op.args.items() if arg.kind == "mask"}
        for argument, option in FACTS[name].options.items():
            for values, error, message in OPTIONS[option.kind]:
                for value in values:
                    wanted = message.replace("{value}", str(value))
                    wanted = wanted.replace("{type}", type(value).__name__)

                    def changes(good, argument=argument, value=value, masks=masks):
                        return {**masks, argument: value}

                    shown = f"{value!r:.24}"
                    cases.append(Bad(name, argument, shown, error, wanted, changes))
    return cases


def _wider(x: Tensor) -> Tensor:
    return x.new_ones((*x.shape[:-1], x.shape[-1] + 1))


# What only one op refuses, shapes that do not go together: op, argument, its shape, what the error
# says, the argument that it names where that is another.
ROWS = r"""
layer_norm | weight | (1, 8) | must have shape \(8,\), got \(1, 8\)
layer_norm_and_input | x | (2, 3, 0) | must have shape \(0,\), got \(8,\) | weight
rope_attention | weight | (50, 16) | must have 3 . H . D rows with H = 2, got 50
rope_attention | cos | (4, 10) | must have shape .* even, at most 8, got
rope | q | (5, 2, 8) | must have 4 axes, got shape
rope | k | (1, 5, 1, 8) | must have shape \(1, 5, 2, 8\), got \(1, 5, 1, 8\)
rope | cos | (5, 6) | must have shape \(T', R\), .* T' = 4 tokens past the prefix and R even, at m
rope | cos | (4, 5) | must have shape \(T', R\), .* R even, at most 8
rope | sin | (1, 4, 6) | must have the shape of cos, \(4, 6\), got \(1, 4, 6\)
linear | residual | (3, 4) | must have shape \(2, 3, 4\), got \(3, 4\)
linear | layer_scale | (1,) | must have shape \(4,\), got \(1,\)
linear | row_scale | (3,) | must have shape \(2,\), got \(3,\)
linear | x | (2, 3, 7) | must have shape \(4, 7\), got \(4, 8\) | weight
linear | weight | (4,) | must have 2 axes, got shape \(4,\)
linear | bias | (1, 4) | must have shape \(4,\), got \(1, 4\)
mlp | fc2_weight | (6, 4) | must have shape \(6, 6\), got \(6, 4\)
mlp | fc1_weight | (6, 8, 1) | must have 2 axes, got shape
attention | qkv | (1, 5, 48) | must have 5 axes, got shape
attention | qkv | (1, 3, 5, 2, 8) | must be \(B, T, 3, H, D\), got
attention | qkv | (1, 5, 3, 2, 12) | must be a multiple of 8, got 12 | D
attention | qkv | (1, 1, 3, 1, 264) | must be at most 256, got 264 | D
attention | attn_mask | (4, 5) | must broadcast to \(1, 2, 5, 5\), or its first axis must divide 1
attention | attn_mask | (2, 2, 5, 5) | must broadcast to \(1, 2, 5, 5\), or its first axis must div
qkv_attention | x | (5, 16) | must have 3 axes, got shape \(5, 16\)
qkv_attention | weight | (48,) | must have 2 axes, got shape
qkv_attention | weight | (50, 16) | must have 3 . H . D rows with H = 2, got 50
scaled_dot_product_attention | query | (8,) | must have axes \(..., T, D\), got \(8,\)
scaled_dot_product_attention | key | (1, 2, 6, 16) | must have the D of query, 8, got 16
scaled_dot_product_attention | value | (1, 2, 7, 8) | must have the T of key, 6, got 7
scaled_dot_product_attention | key | (1, 3, 6, 8) | must have the batch and heads of query, \(1, 2\)
scaled_dot_product_attention | attn_mask | (6, 5) | must broadcast to \(1, 2, 5, 6\), got shape
patch_embed | images | (3, 8, 4) | must have 4 axes, got shape
patch_embed | images | (2, 4, 8, 4) | must have the 3 channels of weight, got 4
patch_embed | images | (2, 3, 9, 4) | must be positive .* of the patch \(4, 4\), got \(9, 4\) | height and width of images
patch_embed | weight | (8, 48) | must have 4 axes, got shape
patch_embed | weight | (8, 3, 0, 4) | must not be empty, got shape
patch_embed | weight | (8, 3, 2, 4, 4) | must have 5 axes, got shape | images
patch_embed | bias | (9,) | must have shape \(8,\), got \(9,\)
patch_embed | prefix_tokens | (2, 1, 8) | must have shape \(1, rows, 8\) or
patch_embed | pos_embed | (1, 4, 8) | must have 2 rows \(patches\) or 3 .*got shape
"""  # noqa: E501


def _rows() -> list[Bad]:
    """ROWS, and what needs more than the shape of one argument."""
    cases = []

    def add(op, argument, value, error, message, names="", **others):
        """`value` is the argument, or the shape of the tensor."""
        shown = f"tensor{value}" if isinstance(value, tuple) else f"{value!r:.24}"

        def changes(good):
            tensor = rand(*value, grad=False) if isinstance(value, tuple) else value
            return {argument: tensor, **others}

        cases.append(Bad(op, argument, shown, error, message, changes, names))

    for line in ROWS.strip().splitlines():
        op, argument, shape, message, *names = line.split(" | ")
        add(op, argument, ast.literal_eval(shape), ValueError, message, *names)
    for op in ("rope", "rope_attention"):
        wanted = "must be None with norm=None, got a Tensor"
        add(op, "norm", None, ValueError, wanted, "q_norm_weight")
    wanted = "must be None with norm='rms_norm', got a Tensor"
    add("rope", "norm", "rms_norm", ValueError, wanted, "q_norm_bias")
    wanted, x = r"needs x of shape \(B, ..., K\), got \(8,\)", rand(8, grad=False)
    add("linear", "row_scale", (8,), ValueError, wanted, x=x, residual=None)
    wanted = "must be a multiple of 8, got 10"
    add("qkv_attention", "weight", (60, 16), ValueError, wanted, "D", bias=None)
    wanted = "must have 3 . H . D rows with H = 5, got 48"
    add("qkv_attention", "num_heads", 5, ValueError, wanted, "weight")
    sdpa = "scaled_dot_product_attention"
    add(sdpa, "query", JAGGED, TypeError, "must be a nested tensor, as query is, got", "key")
    wanted = "must have heads that divide those of query"
    add(sdpa, "key", (1, 3, 6, 8), ValueError, wanted, enable_gqa=True)
    for argument in ("key", "value", "attn_mask"):
        add(sdpa, argument, JAGGED, TypeError, "must be dense, got layout torch.")
    keep = torch.zeros(2, 1, device=DEVICE)
    add("patch_embed", "keep", [[0], [1]], TypeError, "must be a Tensor, got list")
    add("patch_embed", "keep", keep, TypeError, "must be int32 or int64, got torch.float32")
    add("patch_embed", "keep", keep.long().to("meta"), ValueError, "must be on .*, got meta")
    for shape in ((2,), (3, 1), (2, 0), (2, 3)):
        keep, wanted = keep.new_zeros(shape, dtype=torch.int64), r"must have shape \(2, K\), 1 <= K"
        add("patch_embed", "keep", keep, ValueError, wanted)
    return cases


CASES = [*_generic(), *_options(), *_rows()]


def _expect(case: Bad, arguments: dict[str, Any]) -> None:
    pattern = rf"{case.op}: {case.names or case.argument} (?:{case.message})"
    with pytest.raises(case.error) as caught:
        _call(case.op, **arguments)
    assert type(caught.value) is case.error, repr(caught.value)
    assert re.match(pattern, str(caught.value)), f"{caught.value}\nwanted: {pattern}"


def _bits(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Copies of the bytes of the dense tensors."""
    return {
        name: x.contiguous().view(-1).view(torch.uint8).clone()
        for name, x in arguments.items()
        if isinstance(x, Tensor) and x.layout is torch.strided
        if not (x.is_nested or x.is_meta or x.is_quantized or x.is_complex())
    }


@pytest.mark.parametrize("name", ["auto", "torch"])
@pytest.mark.parametrize("op", OPS)
def test_bad_calls(op, name):
    """One error each, before any operator runs; also where a good call of the kind is known."""
    good, cases = _good(op), [case for case in CASES if case.op == op]
    with fk.backend(name):
        for is_known in (False, True):
            for case in cases:
                arguments = {**good, **case.changes(good)}
                before, state = _bits(arguments), torch.get_rng_state()
                with Calls() as calls, unwatched(is_known):  # the cache is past torch's dispatcher
                    _expect(case, arguments)
                # but for what a nested tensor asks itself
                ran = [str(f) for f, _, _ in calls.made if f.namespace != "prim"]
                assert [f for f in ran if "sym_" not in f] == [], str(case)
                assert torch.equal(state, torch.get_rng_state())
                assert all(map(torch.equal, before.values(), _bits(arguments).values())), str(case)
            y = _call(op, **good)
            assert torch.equal(y, _call(op, **good)) or not is_known


@pytest.mark.parametrize("op", [n for n, op in OPS.items() if "residual" in op.args])
def test_float64_residual_falls_back(op):
    """The sum has its dtype, and has to have its bits and its range."""
    good = _good(op)
    wide = torch.full(tuple(_call(op, **good).shape), 1e300, dtype=torch.float64, device=DEVICE)
    y = _call(op, **{**good, "residual": wide})
    assert y.dtype is torch.float64 and bool(y.isfinite().all())


@pytest.mark.parametrize("scale", [-0.5, 0.0, -2, 1e-30])
@pytest.mark.parametrize("op", [name for name in OPS if "scale" in FACTS[name].options])
def test_non_positive_scale_falls_back(op, scale):
    good = _good(op)
    y = _call(op, **good, scale=scale)
    with fk.backend("torch"):
        torch.testing.assert_close(y, _call(op, **good, scale=scale))


def _with_gradients(op: str) -> dict[str, Any]:
    """The others take the torch path where they need a gradient."""
    trained = [name for name, arg in OPS[op].args.items() if arg.grad]
    return {n: x.requires_grad_() if n in trained else x for n, x in _good(op).items()}


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_fall_back(layout):
    parts = [torch.randn(2, 4, 8), torch.randn(3, 4, 8)]
    q = torch.nested.nested_tensor(parts, layout=layout).transpose(1, 2)
    q = q.contiguous() if layout is torch.strided else q  # each as torch asks for it
    y = fk.scaled_dot_product_attention(q, q, q).transpose(1, 2)
    for x, out in zip(parts, y.unbind(), strict=True):
        x = x.transpose(0, 1)
        expected = torch.nn.functional.scaled_dot_product_attention(x, x, x).transpose(0, 1)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("op", ["linear", "mlp", "gated_mlp", "qkv_attention", "patch_embed"])
def test_autocast_leaves_float64_alone(op):
    """As torch's own does: the weights must have it too."""
    first, *others = arguments = _good(op)
    arguments[first] = arguments[first].double()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        with pytest.raises(TypeError, match=f"must have the dtype of {first}, torch.float64, got"):
            _call(op, **arguments)
        for name in others:
            if isinstance(arguments[name], Tensor):
                arguments[name] = arguments[name].double()
        assert _call(op, **arguments).dtype is torch.float64


@pytest.mark.parametrize("op", OPS)
def test_double_backward(op):
    """Of a loss whose own gradient is a constant too: there a penalty could be lost in silence; and
    by each input alone, for which the engine runs only what leads to it."""
    arguments = _with_gradients(op)
    given = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
    name = "sdpa" if op == "scaled_dot_product_attention" else op
    wanted = f"^{name}: the kernels have no second derivative.*torch"
    loss = _call(op, **arguments).sum()
    (dx,) = torch.autograd.grad(loss, given[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=wanted) as error:
        (loss + dx.square().sum()).backward()
    # torch's attention has one where it forms the scores
    assert ("SDPBackend.MATH" in str(error.value)) == name.endswith(("attention", "sdpa"))
    grads = torch.autograd.grad(_call(op, **arguments).square().sum(), given, create_graph=True)
    product = sum(g.square().sum() for g in grads)
    for x in given:
        with pytest.raises(NotImplementedError, match=wanted):
            torch.autograd.grad(product, x, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("residual", ["", "residual", "no gradient"])
@pytest.mark.parametrize("op", ["linear", "mlp", "gated_mlp"])
def test_output_modified_in_place(op, residual):
    """As a block's may: what follows it adds to it, or clamps it."""
    unusual = ("residual", "layer_scale", "row_scale")
    results = []
    for change in (lambda y: y * 2, lambda y: y.mul_(2)):
        arguments = {n: x for n, x in _with_gradients(op).items() if n not in unusual}
        x = arguments["x"]
        if residual:
            y = _call(op, **arguments)
            arguments["residual"] = torch.ones_like(y, requires_grad=residual == "residual")
        change(_call(op, **arguments)).square().sum().backward()
        results.append((x.grad, *(x.grad for x in arguments.values() if isinstance(x, Tensor))))
    for wanted, got in zip(*results, strict=True):
        assert wanted is got is None or torch.equal(wanted, got)
