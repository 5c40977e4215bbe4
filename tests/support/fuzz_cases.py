"""What the fuzz test draws, op by op, and the cases that once failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz import LAYOUTS, Case, Spec
from hypothesis import strategies as st

from fastvit_kernels.ops.common.activation import ACTIVATIONS

Draw = Callable[[st.SearchStrategy[Any]], Any]

FLOATS = ["fp32", "fp16", "bf16"]
EDGES = [
    15,
    16,
    17,
    31,
    32,
    33,
    50,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    191,
    193,
    196,
    197,
    255,
    256,
    257,
]
LONG = [300, 511, 512, 513, 576, 577, 600]
BATCH = st.sampled_from([1, 2, 0, 1, 2, 3, 5])
HEAD_DIMS = st.one_of(
    st.sampled_from([8, 16, 32, 64, 72, 80, 96, 128]), st.integers(1, 32).map(lambda n: 8 * n)
)


def _up_to(most: int) -> st.SearchStrategy[int]:
    """1 ... most, small ones and those next to a tile's edge more often."""
    parts = [st.integers(1, min(most, 24)), st.integers(1, most)]
    parts += [
        st.sampled_from(edges) for e in (EDGES, LONG) if (edges := [n for n in e if n <= most])
    ]
    return st.one_of(parts)


def _layout(ndim: int) -> st.SearchStrategy[str]:
    """A layout for this rank: half of them dense."""
    fitting = [name for name, layout in LAYOUTS.items() if ndim >= layout.min_ndim]
    return st.one_of(st.just("dense"), st.sampled_from(fitting))


def _spec(
    draw: Draw, shape: tuple[int, ...], dtype: str, *, grad: bool | None = None, scale: float = 1.0
) -> Spec:
    layout = draw(_layout(len(shape)))
    return Spec(shape, dtype, layout, draw(st.booleans()) if grad is None else grad, scale)


def _maybe(draw: Draw, shape: tuple[int, ...], dtype: str | None = None, **options) -> Spec | None:
    """A Spec or None; of any floating dtype where none is named."""
    if not draw(st.booleans()):
        return None
    return _spec(draw, shape, dtype or draw(st.sampled_from(FLOATS)), **options)


def _dtypes(draw: Draw) -> tuple[str | None, Callable[[], str]]:
    """Autocast's dtype or None, and what draws the dtype of an operand: one for all without it."""
    autocast = draw(st.sampled_from([None, None, "bf16", "fp16"]))
    shared = draw(st.sampled_from(FLOATS))
    return autocast, lambda: shared if autocast is None else draw(st.sampled_from(FLOATS))


def _case(draw: Draw, op: str, inputs: dict[str, Spec | None], **rest) -> Case:
    upstream, seed = draw(_layout(3)), draw(st.integers(0, 2**20))
    return Case(op, inputs, upstream=upstream, seed=seed, direct=draw(st.booleans()), **rest)


def _rows(draw: Draw, most: int) -> tuple[int, ...]:
    """The leading axes of x: B and T, in some cases more or fewer, at most `most` rows."""
    batch = draw(BATCH)
    if batch == 0:
        return (0, draw(st.integers(1, 9)))
    rest = draw(_up_to(max(1, most // batch)))
    return draw(st.sampled_from([(batch, rest), (rest,), (1, batch, rest), (batch, 1, rest)]))


def _layer_norm(draw: Draw, op: str) -> Case:
    C = draw(st.one_of(_up_to(600), st.sampled_from([768, 1000, 1025, 2049])))
    rows = draw(st.just(())) if draw(st.integers(0, 15)) == 15 else _rows(draw, 60_000 // (C + 40))
    x_dtype, out_dtype = draw(st.sampled_from(FLOATS)), draw(st.sampled_from(FLOATS))
    inputs = {
        "x": _spec(draw, (*rows, C), x_dtype),
        "weight": _maybe(draw, (C,)),
        "bias": _maybe(draw, (C,)),
    }
    options = {"eps": draw(st.sampled_from([1e-6, 1e-5, 1e-12])), "out_dtype": out_dtype}
    if op == "layer_norm_and_input":
        options["hand_on"] = inputs["x"].grad and draw(st.booleans())
    return _case(draw, op, inputs, options=options, autocast=draw(st.sampled_from([None, "bf16"])))


@st.composite
def layer_norm(draw: Draw) -> Case:
    return _layer_norm(draw, "layer_norm")


@st.composite
def layer_norm_and_input(draw: Draw) -> Case:
    return _layer_norm(draw, "layer_norm_and_input")


def _epilogue(draw: Draw, rows: tuple[int, ...], N: int) -> dict[str, Spec | None]:
    row_scale = _maybe(draw, rows[:1], grad=False) if rows else None
    return {
        "residual": _maybe(draw, (*rows, N)),
        "layer_scale": _maybe(draw, (N,)),
        "row_scale": row_scale,
    }


@st.composite
def linear(draw: Draw) -> Case:
    autocast, dtype = _dtypes(draw)
    K, N = draw(_up_to(260)), draw(_up_to(260))
    rows = () if draw(st.integers(0, 15)) == 15 else _rows(draw, min(600, 2_000_000 // (K * N)))
    inputs = {
        "x": _spec(draw, (*rows, K), dtype()),
        "weight": _spec(draw, (N, K), dtype(), scale=K**-0.5),
        "bias": _maybe(draw, (N,), dtype()),
        **_epilogue(draw, rows, N),
    }
    options = {"activation": draw(st.sampled_from([None, *ACTIVATIONS]))}
    route = draw(st.sampled_from([None, "triton"]))
    return _case(draw, "linear", inputs, options=options, autocast=autocast, route=route)


@st.composite
def mlp(draw: Draw) -> Case:
    autocast, dtype = _dtypes(draw)
    C, hidden, N = (draw(_up_to(130)) for _ in range(3))
    rows = _rows(draw, max(1, min(600, 1_500_000 // (hidden * (C + N)))))
    inputs = {
        "x": _spec(draw, (*rows, C), dtype()),
        "fc1_weight": _spec(draw, (hidden, C), dtype(), scale=C**-0.5),
        "fc1_bias": _maybe(draw, (hidden,), dtype()),
        "fc2_weight": _spec(draw, (N, hidden), dtype(), scale=hidden**-0.5),
        "fc2_bias": _maybe(draw, (N,), dtype()),
        **_epilogue(draw, rows, N),
    }
    options = {
        "activation": draw(st.sampled_from(list(ACTIVATIONS))),
        "recompute": draw(st.booleans()),
    }
    route = draw(st.sampled_from([None, "triton"]))
    return _case(draw, "mlp", inputs, options=options, autocast=autocast, route=route)


def _heads(draw: Draw, dtype: str) -> tuple[int, int, int, int]:
    """B, H, T, D within the interpreter's patience: a long T has one head, and that is narrow."""
    most = draw(st.sampled_from([24] * 5 + [70] * 6 + [130] * 2 + [257, 600]))
    T = draw(_up_to(min(most, 257) if dtype == "fp32" else most))
    if T > 130:
        return 1, 1, T, draw(st.sampled_from([8, 32, 64] if T > 260 else [8, 32, 64, 72, 128]))
    B, H = draw(BATCH), draw(st.sampled_from([1, 2, 3]))
    if T > 33:
        B, H = min(B, 1), min(H, 2)
    return B, H, T, draw(HEAD_DIMS)


SCALES = st.sampled_from([None, 0.3, 1.0])


@st.composite
def attention(draw: Draw) -> Case:
    autocast = draw(st.sampled_from([None, None, "bf16", "fp16"]))
    dtype = draw(st.sampled_from(FLOATS))
    B, H, T, D = _heads(draw, autocast or dtype)
    inputs: dict[str, Spec | None] = {"qkv": _spec(draw, (B, T, 3, H, D), dtype)}
    return _case(draw, "attention", inputs, options={"scale": draw(SCALES)}, autocast=autocast)


@st.composite
def qkv_attention(draw: Draw) -> Case:
    autocast, dtype = _dtypes(draw)
    x_dtype = dtype()
    B, H, T, D = _heads(draw, autocast or x_dtype)
    C = draw(_up_to(100))
    inputs = {
        "x": _spec(draw, (B, T, C), x_dtype),
        "weight": _spec(draw, (3 * H * D, C), dtype(), scale=C**-0.5),
        "bias": _maybe(draw, (3 * H * D,), dtype()),
    }
    options = {"num_heads": H, "scale": draw(SCALES)}
    return _case(draw, "qkv_attention", inputs, options=options, autocast=autocast)


@st.composite
def scaled_dot_product_attention(draw: Draw) -> Case:
    autocast, dtype = _dtypes(draw)
    q_dtype = dtype()
    B, H, T_q, D = _heads(draw, autocast or q_dtype)
    T_kv = T_q if draw(st.booleans()) else draw(_up_to(24 if T_q > 64 else 70))
    inputs = {
        "query": _spec(draw, (B, H, T_q, D), q_dtype),
        "key": _spec(draw, (B, H, T_kv, D), dtype()),
        "value": _spec(draw, (B, H, T_kv, D), dtype()),
    }
    options = {"scale": draw(SCALES), "is_causal": draw(st.booleans())}
    if not options["is_causal"] and draw(st.booleans()):
        shape = [1 if draw(st.integers(0, 2)) == 2 else n for n in (B, H, T_q, T_kv)]
        shape = tuple(shape[draw(st.sampled_from([0, 2])) :])
        mask_dtype = draw(st.sampled_from(["bool", q_dtype]))
        inputs["attn_mask"] = _spec(draw, shape, mask_dtype, grad=False)
    return _case(draw, "scaled_dot_product_attention", inputs, options=options, autocast=autocast)


@st.composite
def patch_embed(draw: Draw) -> Case:
    autocast, dtype = _dtypes(draw)
    B, C, channels = draw(BATCH), draw(_up_to(130)), draw(st.sampled_from([1, 3, 4]))
    patch_h, patch_w = (draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 14, 16])) for _ in range(2))
    most = max(1, min(600, 20_000 // (patch_h * patch_w * channels)) // max(1, B))
    grid_h = draw(st.integers(1, min(24, most)))
    grid_w = draw(st.integers(1, max(1, min(25, most // grid_h))))
    num_prefix = draw(st.integers(0, 5))
    num_pos = grid_h * grid_w + draw(st.sampled_from([0, num_prefix]))
    lead = draw(st.sampled_from([(), (1,)]))
    images = (B, channels, grid_h * patch_h, grid_w * patch_w)
    K = channels * patch_h * patch_w
    inputs = {
        "images": _spec(draw, images, dtype()),
        "weight": _spec(draw, (C, channels, patch_h, patch_w), dtype(), scale=K**-0.5),
        "bias": _maybe(draw, (C,), dtype()),
        "prefix_tokens": _maybe(draw, (*lead, num_prefix, C)) if num_prefix else None,
    }
    if inputs["prefix_tokens"] is None:
        num_pos = grid_h * grid_w
    inputs["pos_embed"] = _maybe(draw, (*lead, num_pos, C))
    return _case(draw, "patch_embed", inputs, autocast=autocast)


STRATEGIES: dict[str, Callable[[], st.SearchStrategy[Case]]] = {
    f.__name__: f
    for f in (
        layer_norm, layer_norm_and_input, linear, mlp, attention, qkv_attention,
        scaled_dot_product_attention, patch_embed,
    )
}  # fmt: skip

_LAYER_NORM = {"eps": 1e-6, "out_dtype": "fp32"}
KEPT = [
    # A weight or bias that is not contiguous was read as if it were.
    Case(
        "layer_norm",
        {"x": Spec((1, 1, 2)), "weight": Spec((2,), layout="stepped"), "bias": None},
        _LAYER_NORM,
    ),
    Case(
        "layer_norm_and_input",
        {
            "x": Spec((5, 96)),
            "weight": Spec((96,), layout="broadcast"),
            "bias": Spec((96,), layout="stepped"),
        },
        {**_LAYER_NORM, "hand_on": True},
    ),
    # A constant row had a variance, that of its mean's rounding.
    Case(
        "layer_norm",
        {"x": Spec((3, 768), layout="broadcast", scale=1e4), "weight": None, "bias": None},
        _LAYER_NORM,
    ),
    # One key: its gradient is 0, which leaves no scale for the errors.
    Case(
        "scaled_dot_product_attention",
        {
            "query": Spec((1, 1, 1, 8), grad=False),
            "key": Spec((1, 1, 1, 8)),
            "value": Spec((1, 1, 1, 8), grad=False),
        },
        {"scale": None, "is_causal": False},
    ),
    # An empty batch saved no pre-activation, from which the backward takes the width of fc1.
    Case(
        "mlp",
        {
            "x": Spec((0, 6, 24)),
            "fc1_weight": Spec((24, 24)),
            "fc1_bias": Spec((24,)),
            "fc2_weight": Spec((47, 24), grad=False),
            "fc2_bias": None,
        },
        {"activation": "gelu", "recompute": True},
    ),
]
