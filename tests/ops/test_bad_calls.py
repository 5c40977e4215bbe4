"""Bad calls of the ops: each gets one error that names the op, the argument, what came and what is
wanted, before any operator of torch or of the package runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numerics import DEVICE, rand
from op_facts import FACTS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastvit_kernels as fk
from fastvit_kernels.accuracy.cases import OPS
from fastvit_kernels.accuracy.op import Op
from fastvit_kernels.runtime.compat import TorchDispatchMode

nan, inf = float("nan"), float("inf")


@dataclass(frozen=True)
class Good:
    """A good call of an op, the smallest with every tensor."""

    op: Op

    def __call__(self) -> dict[str, Any]:
        shapes = self.op.shapes_of(FACTS[self.op.name].tiny).items()
        tensors = {n: rand(*s, seed=i, grad=False) for i, (n, s) in enumerate(shapes)}
        return {**tensors, **self.op.settings_of(FACTS[self.op.name].tiny, DEVICE)}

    def call(self, **arguments: Any) -> Tensor:
        """The first output."""
        outputs = self.op.function(**arguments)
        return outputs[0] if self.op.outputs > 1 else outputs


GOOD = {name: Good(op) for name, op in OPS.items()}

_PARTS = [torch.ones(2, 8), torch.ones(3, 8)]
NESTED = torch.nested.nested_tensor(_PARTS)
JAGGED = torch.nested.nested_tensor(_PARTS, layout=torch.jagged)

_FLOAT = "must be floating point.* got torch."
# What is wrong with a tensor, whichever it is -> how it is made, the error, what it says.
KINDS: dict[str, tuple[Callable[[Tensor], Any], type[Exception], str]] = {
    "ndarray": (lambda x: x.cpu().numpy(), TypeError, "must be a Tensor, got ndarray"),
    "list": (lambda x: x.tolist(), TypeError, "must be a Tensor, got list"),
    "str": (lambda x: "x", TypeError, "must be a Tensor, got str"),
    "number": (lambda x: 1.0, TypeError, "must be a Tensor, got float"),
    "int64": (lambda x: x.long(), TypeError, _FLOAT + "int64"),
    "uint8": (lambda x: x.abs().byte(), TypeError, _FLOAT + "uint8"),
    "bool": (lambda x: x > 0, TypeError, _FLOAT + "bool"),
    "complex": (lambda x: x.to(torch.complex64), TypeError, _FLOAT + "complex64"),
    "float8_e4m3": (lambda x: x.to(torch.float8_e4m3fn), TypeError, _FLOAT + "float8_e4m3fn"),
    "float8_e5m2": (lambda x: x.to(torch.float8_e5m2), TypeError, _FLOAT + "float8_e5m2"),
    "quantised": (
        lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8),
        TypeError,
        _FLOAT + "qint8",
    ),
    "sparse": (lambda x: x.to_sparse(), TypeError, "must be .*dense.* got layout torch.sparse_coo"),
    "mkldnn": (lambda x: x.cpu().to_mkldnn(), TypeError, "must be .*dense.* got layout torch._mkl"),
    "nested": (
        lambda x: NESTED,
        TypeError,
        "must be a dense strided tensor, got a nested tensor",
    ),
    "jagged": (
        lambda x: JAGGED,
        TypeError,
        "must be a dense strided tensor, got a nested tensor",
    ),
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


_NUMBER = "must be a number, got {type}"
_CHOICE = r"must be None or one of \['gelu', .* got"
_ACTIVATIONS = [
    (("relu", "GELU", "", "gelu "), ValueError, _CHOICE),
    ((3, True, ["gelu"], torch.relu, torch.nn.GELU()), TypeError, _CHOICE),
]
_PROBABILITY = [
    (("0.1", None, True, [0.1], torch.tensor(0.1)), TypeError, "must be a number, got"),
]
# What an argument that is no tensor refuses, by its kind in the registry.
OPTIONS: dict[str, list[tuple[tuple[Any, ...], type[Exception], str]]] = {
    "eps": [
        ((nan, inf, -inf, -1e-6), ValueError, "must be finite and at least 0, got {value}"),
        (
            ("1e-6", None, True, [1e-6], torch.tensor(1e-6), 1j, np.float32(1e-6)),
            TypeError,
            _NUMBER,
        ),
    ],
    "dtype": [
        (
            (
                "float32",
                float,
                torch.int32,
                torch.bool,
                torch.complex64,
                torch.float8_e4m3fn,
                np.float32,
            ),
            TypeError,
            r"must be None or one of \[torch.float32, .* got",
        ),
    ],
    "activation or None": _ACTIVATIONS,
    "activation": [*_ACTIVATIONS, ((None,), ValueError, "must not be None")],
    "flag": [((1, 0, "no", None, torch.tensor(True)), TypeError, "must be True or False, got")],
    "count": [
        ((0, -1, -2), ValueError, "must be at least 1, got {value}"),
        (
            (2.0, "2", None, True, [2], torch.tensor(2), np.int64(2)),
            TypeError,
            "must be an int, got",
        ),
    ],
    "count or 0": [
        ((-1, -2), ValueError, "must be at least 0, got {value}"),
        ((6,), ValueError, "must be at most T = 5, got 6"),
        (
            (2.0, "2", None, True, [2], torch.tensor(2), np.int64(2)),
            TypeError,
            "must be an int, got",
        ),
    ],
    "norm": [
        (("batch_norm", "", "LayerNorm"), ValueError, "must be None or one of .'layer_norm', 'rms"),
        ((1, True, ["rms_norm"], torch.nn.LayerNorm), TypeError, "must be None or one of .* got"),
    ],
    "probability": [
        ((-0.1, 1.5, 2, nan, inf, -inf), ValueError, r"must be in \[0, 1\], got {value}"),
        *_PROBABILITY,
    ],
    "probability below 1": [
        ((-0.1, 1.5, 2, nan, inf, -inf, 1.0), ValueError, r"must be in \[0, 1\), got {value}"),
        *_PROBABILITY,
    ],
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


def _rows() -> list[Bad]:
    """What only one op refuses: shapes that do not go together."""
    cases = []

    def add(op, argument, value, error, message, names="", **others):
        """`value` is the argument, or the shape of the tensor."""
        shown = f"tensor{value}" if isinstance(value, tuple) else f"{value!r:.24}"
        if isinstance(value, Tensor) and value.is_nested:
            shown = f"nested-{value.layout}"

        def changes(good):
            tensor = rand(*value, grad=False) if isinstance(value, tuple) else value
            return {argument: tensor, **others}

        cases.append(Bad(op, argument, shown, error, message, changes, names))

    for op in ("layer_norm", "layer_norm_and_input"):
        add(op, "weight", (4,), ValueError, r"must have shape \(8,\), got \(4,\)")
        add(op, "weight", (1, 8), ValueError, r"must have shape \(8,\), got \(1, 8\)")
        add(op, "bias", (2, 3, 8), ValueError, r"must have shape \(8,\), got \(2, 3, 8\)")
        add(op, "x", (2, 3, 0), ValueError, r"must have shape \(0,\), got \(8,\)", "weight")

    for op in ("rms_norm", "rms_norm_and_input"):
        add(op, "weight", (1, 8), ValueError, r"must have shape \(8,\), got \(1, 8\)")
        add(op, "x", (2, 3, 0), ValueError, r"must have shape \(0,\), got \(8,\)", "weight")

    add(
        "rope_attention",
        "weight",
        (50, 16),
        ValueError,
        "must have 3 . H . D rows with H = 2, got 50",
    )
    add("rope_attention", "cos", (4, 10), ValueError, "must have shape .* even, at most 8, got")
    add("rope_attention", "norm", None, ValueError, "must be None with norm=None", "q_norm_weight")
    add("rope", "q", (5, 2, 8), ValueError, "must have 4 axes, got shape")
    add(
        "rope", "k", (1, 5, 1, 8), ValueError, r"must have shape \(1, 5, 2, 8\), got \(1, 5, 1, 8\)"
    )
    for shape in ((5, 6), (4, 5), (4, 10), (4, 0), (2, 4, 6), (1, 3, 4, 6), (2, 1, 4, 6), (6,)):
        wanted = (
            r"must have shape \(T', R\), .* T' = 4 tokens past the prefix and R even, at most 8"
        )
        add("rope", "cos", shape, ValueError, wanted)
    add(
        "rope",
        "sin",
        (1, 4, 6),
        ValueError,
        r"must have the shape of cos, \(4, 6\), got \(1, 4, 6\)",
    )
    add(
        "rope",
        "norm",
        None,
        ValueError,
        "must be None with norm=None, got a Tensor",
        "q_norm_weight",
    )
    add(
        "rope",
        "norm",
        "rms_norm",
        ValueError,
        "must be None with norm='rms_norm', got a Tensor",
        "q_norm_bias",
    )

    for op in ("linear", "mlp"):
        add(op, "residual", (2, 3, 1), ValueError, r"must have shape \(2, 3, 4\), got \(2, 3, 1\)")
        add(op, "residual", (3, 4), ValueError, r"must have shape \(2, 3, 4\), got \(3, 4\)")
        add(op, "layer_scale", (1,), ValueError, r"must have shape \(4,\), got \(1,\)")
        add(op, "row_scale", (3,), ValueError, r"must have shape \(2,\), got \(3,\)")
        add(op, "row_scale", (2, 1, 1), ValueError, r"must have shape \(2,\), got \(2, 1, 1\)")
        add(
            op,
            "row_scale",
            (8,),
            ValueError,
            r"needs x of shape \(B, ..., K\), got \(8,\)",
            x=rand(8, grad=False),
            residual=None,
        )
    add("linear", "x", (2, 3, 7), ValueError, r"must have shape \(4, 7\), got \(4, 8\)", "weight")
    add("linear", "weight", (4,), ValueError, r"must have 2 axes, got shape \(4,\)")
    add("linear", "weight", (1, 4, 8), ValueError, r"must have 2 axes, got shape \(1, 4, 8\)")
    add("linear", "weight", (8, 4), ValueError, r"must have shape \(8, 8\), got \(8, 4\)")
    add("linear", "bias", (1, 4), ValueError, r"must have shape \(4,\), got \(1, 4\)")
    add("mlp", "x", (2, 3, 7), ValueError, r"must have shape \(6, 7\), got", "fc1_weight")
    add("mlp", "fc2_weight", (6, 4), ValueError, r"must have shape \(6, 6\), got \(6, 4\)")
    add("mlp", "fc1_weight", (6, 8, 1), ValueError, "must have 2 axes, got shape")

    for shape in ((5, 3, 2, 8), (1, 5, 48), (1, 1, 5, 3, 2, 8)):
        add("attention", "qkv", shape, ValueError, "must have 5 axes, got shape")
    for shape in ((1, 5, 2, 2, 8), (1, 3, 5, 2, 8)):
        add("attention", "qkv", shape, ValueError, r"must be \(B, T, 3, H, D\), got")
    for D in (4, 12, 20, 7, 1, 252):
        add(
            "attention",
            "qkv",
            (1, 5, 3, 2, D),
            ValueError,
            f"must be a multiple of 8, got {D}",
            "D",
        )
    for D in (264, 320):
        add("attention", "qkv", (1, 1, 3, 1, D), ValueError, f"must be at most 256, got {D}", "D")
    add("attention", "qkv", (1, 5, 3, 2, 0), ValueError, "must be a multiple of 8, got 0", "D")
    add("qkv_attention", "x", (5, 16), ValueError, r"must have 3 axes, got shape \(5, 16\)")
    add("qkv_attention", "x", (1, 5, 8), ValueError, r"must have shape \(48, 8\), got", "weight")
    add("qkv_attention", "weight", (48,), ValueError, "must have 2 axes, got shape")
    add(
        "qkv_attention",
        "weight",
        (50, 16),
        ValueError,
        "must have 3 . H . D rows with H = 2, got 50",
    )
    add(
        "qkv_attention",
        "weight",
        (0, 16),
        ValueError,
        "must be a multiple of 8, got 0",
        "D",
        bias=None,
    )
    add(
        "qkv_attention",
        "weight",
        (60, 16),
        ValueError,
        "must be a multiple of 8, got 10",
        "D",
        bias=None,
    )
    add(
        "qkv_attention",
        "num_heads",
        5,
        ValueError,
        "must have 3 . H . D rows with H = 5, got 48",
        "weight",
    )
    for op in ("attention", "qkv_attention"):
        add(op, "scale", torch.tensor(1.0), TypeError, "must be a number, got Tensor")
    for shape in ((4, 5), (3, 5, 5), (2, 2, 5, 5), (1, 1, 1, 5, 5)):
        add(
            "attention",
            "attn_mask",
            shape,
            ValueError,
            r"must broadcast to \(1, 2, 5, 5\), or its first axis must divide 1, got",
        )
    sdpa = "scaled_dot_product_attention"
    for argument in ("query", "key", "value"):
        add(sdpa, argument, (8,), ValueError, r"must have axes \(..., T, D\), got \(8,\)")
    add(sdpa, "key", (1, 2, 6, 16), ValueError, "must have the D of query, 8, got 16")
    add(sdpa, "query", (1, 2, 5, 16), ValueError, "must have the D of query, 16, got 8", "key")
    add(sdpa, "value", (1, 2, 7, 8), ValueError, "must have the T of key, 6, got 7")
    add(
        sdpa,
        "key",
        (1, 3, 6, 8),
        ValueError,
        r"must have the batch and heads of query, \(1, 2\), g",
    )
    add(
        sdpa, "value", (3, 3, 6, 8), ValueError, r"must have the batch and heads of query, \(1, 2\)"
    )
    for shape in ((5, 5), (6, 5), (2, 5, 5), (3, 2, 5, 6), (1, 1, 1, 5, 6)):
        add(sdpa, "attn_mask", shape, ValueError, r"must broadcast to \(1, 2, 5, 6\), got shape")

    for nested in (NESTED, JAGGED):
        add(sdpa, "query", nested, TypeError, "must be a nested tensor, as query is, got", "key")
        add(sdpa, "key", nested, TypeError, "must be dense, got layout torch.")
        add(sdpa, "value", nested, TypeError, "must be dense, got layout torch.")
        add(sdpa, "attn_mask", nested, TypeError, "must be dense, got layout torch.")

    embed = "patch_embed"
    add(embed, "images", (3, 8, 4), ValueError, "must have 4 axes, got shape")
    add(embed, "images", (1, 2, 3, 8, 4), ValueError, "must have 4 axes, got shape")
    add(embed, "images", (2, 4, 8, 4), ValueError, "must have the 3 channels of weight, got 4")
    for height, width in ((9, 4), (8, 5), (8, 2), (0, 4), (8, 0)):
        add(
            embed,
            "images",
            (2, 3, height, width),
            ValueError,
            rf"must be positive multiples of the patch \(4, 4\), got \({height}, {width}\)",
            "height and width of images",
        )
    add(
        embed,
        "weight",
        (8, 3, 4, 5),
        ValueError,
        r"must be positive multiples of the patch \(4, 5\), got \(8, 4\)",
        "height and width of images",
    )
    add(embed, "weight", (8, 48), ValueError, "must have 4 axes, got shape")
    add(embed, "weight", (0, 3, 4, 4), ValueError, "must not be empty, got shape")
    add(embed, "weight", (8, 3, 0, 4), ValueError, "must not be empty, got shape")
    add(embed, "bias", (9,), ValueError, r"must have shape \(8,\), got \(9,\)")
    add(embed, "prefix_tokens", (2, 1, 8), ValueError, r"must have shape \(1, rows, 8\) or")
    add(embed, "prefix_tokens", (8,), ValueError, r"must have shape \(1, rows, 8\) or \(rows, 8\)")
    add(embed, "pos_embed", (1, 4, 8), ValueError, r"must have 2 rows \(patches\) or 3 .*got shape")
    add(embed, "pos_embed", (1, 3, 7), ValueError, r"must have shape \(1, rows, 8\) or")
    add(embed, "weight", (8, 3, 2, 4, 4), ValueError, "must have 5 axes, got shape", "images")
    add(
        embed,
        "weight",
        (8, 3, 2, 4, 4),
        ValueError,
        r"must be positive multiples of the patch \(2, 4, 4\), got \(3, 8, 4\)",
        "frames, height and width of images",
        images=rand(2, 3, 3, 8, 4, grad=False),
    )
    for keep, wanted in (
        ([[0], [1]], "must be a Tensor, got list"),
        (torch.zeros(2, 1, device=DEVICE), "must be int32 or int64, got torch.float32"),
        (
            torch.zeros(2, 1, dtype=torch.uint8, device=DEVICE),
            "must be int32 or int64, got torch.u",
        ),
        (torch.zeros(2, 1, dtype=torch.bool, device=DEVICE), "must be int32 or int64, got torch.b"),
    ):
        add(embed, "keep", keep, TypeError, wanted)
    for shape in ((2,), (3, 1), (1, 1), (2, 0), (2, 3), (2, 1, 1)):
        keep = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
        add(embed, "keep", keep, ValueError, r"must have shape \(2, K\), 1 <= K <= 2 patches, got")
    keep = torch.zeros(2, 1, dtype=torch.int64, device="meta")
    add(embed, "keep", keep, ValueError, "must be on .*, got meta")
    return cases


CASES = [*_generic(), *_options(), *_rows()]
BAD_CALLS = len(CASES)  # docs/numerics.md counts them, on each backend


class _Operators(TorchDispatchMode):
    """Notes every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "prim" and "sym_" not in str(func):  # what a nested tensor asks itself
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def _expect(case: Bad, arguments: dict[str, Any]) -> None:
    pattern = rf"{case.op}: {case.names or case.argument} (?:{case.message})"
    with pytest.raises(case.error) as caught:
        GOOD[case.op].call(**arguments)
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
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bad_call(case, name):
    arguments = GOOD[case.op]()
    arguments.update(case.changes(arguments))
    before = _bits(arguments)
    state = torch.get_rng_state()
    with fk.backend(name), _Operators() as operators:
        _expect(case, arguments)
    assert operators.seen == []
    assert torch.equal(state, torch.get_rng_state())
    for argument, x in before.items():
        assert torch.equal(
            arguments[argument].view(-1).view(torch.uint8), x.view(-1).view(torch.uint8)
        )


@pytest.mark.parametrize("name", ["auto", "torch"])
@pytest.mark.parametrize("op", OPS)
def test_bad_calls_after_good_ones(op, name):
    """A good call is remembered by its kind: none of the bad ones may pass for it."""
    good = GOOD[op]()
    with fk.backend(name):
        expected = GOOD[op].call(**good)
        for case in CASES:
            if case.op == op:
                _expect(case, {**good, **case.changes(good)})
        assert torch.equal(GOOD[op].call(**good), expected)


@pytest.mark.parametrize("op", OPS)
def test_float64_takes_the_torch_path(op):
    """No kernel for it is not an error."""

    def double(x):
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    good = {n: double(x) for n, x in GOOD[op]().items()}
    y = GOOD[op].call(**good)
    with fk.backend("torch"):
        assert y.dtype is torch.float64 and torch.equal(y, GOOD[op].call(**good))


@pytest.mark.parametrize("op", [n for n, op in OPS.items() if "residual" in op.args])
def test_a_float64_residual_takes_the_torch_path(op):
    """The sum has its dtype, and has to have its bits and its range."""
    good = GOOD[op]()
    wide = torch.full(tuple(GOOD[op].call(**good).shape), 1e300, dtype=torch.float64, device=DEVICE)
    y = GOOD[op].call(**{**good, "residual": wide})
    assert y.dtype is torch.float64 and bool(y.isfinite().all())


@pytest.mark.parametrize("scale", [-0.5, 0.0, -2, 1e-30])
@pytest.mark.parametrize("op", [name for name in OPS if "scale" in FACTS[name].options])
def test_scale_not_positive_takes_the_torch_path(op, scale):
    good = GOOD[op]()
    y = GOOD[op].call(**good, scale=scale)
    with fk.backend("torch"):
        torch.testing.assert_close(y, GOOD[op].call(**good, scale=scale))


def _with_gradients(op: str) -> dict[str, Any]:
    """The others take the torch path where they need a gradient."""
    trained = [name for name, arg in OPS[op].args.items() if arg.grad]
    return {n: x.requires_grad_() if n in trained else x for n, x in GOOD[op]().items()}


def test_a_mask_beside_a_tiny_scale_counts():
    q, k, v = (rand(1, 1, 6, 8, seed=i, grad=False) for i in range(3))
    mask = rand(6, 6, seed=3, grad=False)
    y, wanted = (
        f(q, k, v, attn_mask=mask, scale=1e-30)
        for f in (fk.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
    )
    torch.testing.assert_close(y, wanted)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_take_the_path_of_torch(layout):
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
    first, *others = arguments = GOOD[op]()
    arguments[first] = arguments[first].double()
    with torch.autocast(DEVICE.type, torch.bfloat16):
        with pytest.raises(TypeError, match=f"must have the dtype of {first}, torch.float64, got"):
            GOOD[op].call(**arguments)
        for name in others:
            if isinstance(arguments[name], Tensor):
                arguments[name] = arguments[name].double()
        assert GOOD[op].call(**arguments).dtype is torch.float64


@pytest.mark.parametrize("op", OPS)
def test_dead_graph(op):
    y = GOOD[op].call(**_with_gradients(op)).square().sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


@pytest.mark.parametrize("op", OPS)
def test_double_backward(op):
    """Of a loss whose own gradient is a constant too: there a penalty could be lost in silence."""
    arguments = _with_gradients(op)
    x = next(iter(arguments.values()))
    name = "sdpa" if op == "scaled_dot_product_attention" else op
    loss = GOOD[op].call(**arguments).sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(
        NotImplementedError, match=f"^{name}: the kernels have no second deriv.*torch"
    ) as error:
        (loss + dx.square().sum()).backward()
    # torch's attention has one where it forms the scores, as in the test below
    assert ("SDPBackend.MATH" in str(error.value)) == name.endswith(("attention", "sdpa"))


@pytest.mark.parametrize("residual", ["", "residual", "no gradient"])
@pytest.mark.parametrize("op", ["linear", "mlp", "gated_mlp"])
def test_a_result_may_change_in_place(op, residual):
    """As a block's may: what follows it adds to it, or clamps it."""
    unusual = ("residual", "layer_scale", "row_scale")
    results = []
    for change in (lambda y: y * 2, lambda y: y.mul_(2)):
        arguments = {n: x for n, x in _with_gradients(op).items() if n not in unusual}
        x = arguments["x"]
        if residual:
            y = GOOD[op].call(**arguments)
            arguments["residual"] = torch.ones_like(y, requires_grad=residual == "residual")
        change(GOOD[op].call(**arguments)).square().sum().backward()
        results.append((x.grad, *(x.grad for x in arguments.values() if isinstance(x, Tensor))))
    for wanted, got in zip(*results, strict=True):
        assert wanted is got is None or torch.equal(wanted, got)


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "made"])
@pytest.mark.parametrize("op", OPS)
def test_double_backward_for_named_inputs(op, leaves):
    """The engine then runs what leads to these inputs alone: products of a Hessian."""
    arguments = _with_gradients(op)
    given = {n: x for n, x in arguments.items() if isinstance(x, Tensor) and x.requires_grad}
    made = given if leaves else {n: x * 1.0 for n, x in given.items()}
    loss = GOOD[op].call(**arguments | made).square().sum()
    grads = torch.autograd.grad(loss, [*given.values()], create_graph=True)
    product = sum(g.square().sum() for g in grads)
    for x in given.values():
        with pytest.raises(NotImplementedError, match="the kernels have no second derivative"):
            torch.autograd.grad(product, x, retain_graph=True, allow_unused=True)


def test_double_backward_for_an_input_that_is_not_saved():
    arguments = _with_gradients("mlp")
    loss = GOOD["mlp"].call(**arguments).sum()  # its own gradient leads nowhere
    (dx,) = torch.autograd.grad(loss, arguments["x"], create_graph=True)
    with pytest.raises(NotImplementedError, match="mlp: the kernels have no second derivative"):
        torch.autograd.grad(dx.square().sum(), arguments["fc1_bias"], allow_unused=True)


@pytest.mark.parametrize("op", OPS)
def test_double_backward_on_the_torch_backend(op):
    arguments = _with_gradients(op)
    x = next(iter(arguments.values()))
    with fk.backend("torch"), sdpa_kernel(SDPBackend.MATH):
        loss = GOOD[op].call(**arguments).square().sum()
    (dx,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + dx.square().sum()).backward()
    assert x.grad is not None and x.grad.isfinite().all()
