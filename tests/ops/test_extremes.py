"""Numbers and addresses at the edge, beyond the `_extremes` of each op's own tests.

What is not finite must come out where the specification has it. That is the specification in
float64 with torch's MATH attention: torch's fp32 gelu on a CPU gives NaN at +inf, where its own
float64 and CUDA give +inf, and its flash attention on a CPU loses NaN, differently in each dtype.
"""

import mmap
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import DEVICE, DTYPES, assert_accurate, dtype_id, rand
from op_facts import single
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastvit_kernels as fk
from fastvit_kernels.accuracy.cases import OPS as REGISTRY
from fastvit_kernels.accuracy.op import Op, Sizes
from fastvit_kernels.ops.attention.functions import attention_ref
from fastvit_kernels.ops.attention.projected import qkv_attention_ref
from fastvit_kernels.ops.common.activation import ACTIVATIONS
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.ops.linear import linear_ref
from fastvit_kernels.ops.mlp import mlp_ref
from fastvit_kernels.ops.norm.functions import layer_norm_ref, rms_norm_ref
from fastvit_kernels.ops.patch_embed.functions import patch_embed_ref
from fastvit_kernels.ops.rope import rope_ref

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
inf, nan = float("inf"), float("nan")


def _leaf(x: Tensor, dtype: torch.dtype = fp32) -> Tensor:
    return x.detach().to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("C", [97, 768], ids=lambda c: f"C{c}")
def test_layer_norm_large_mean(C, dtype):
    """Mean 1e4, variance 1e-4: fewer than ten fp32 numbers hold such a row, in 16 bits one."""
    x = rand(5, C, grad=False) * 1e-2 + 1e4
    inputs = {"x": _leaf(x, dtype), "weight": rand(C, dtype=dtype, seed=1)}
    assert_accurate(fk.layer_norm, layer_norm_ref, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_layer_norm_constant_rows_give_the_bias(dtype):
    """Exactly: the rounding of a mean must not pass for a variance. So dx is rstd (g - mean g)."""
    x = torch.full((4, 768), 1e4 + 0.3, device=DEVICE)
    inputs = {name: rand(768, dtype=dtype) for name in ("weight", "bias")}
    inputs["x"] = _leaf(x, dtype)
    assert fk.layer_norm(**inputs).equal(inputs["bias"].expand(4, 768))
    assert_accurate(fk.layer_norm, layer_norm_ref, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("T", [20, 140], ids=lambda t: f"T{t}")
def test_attention_scores_of_1e4(T, dtype):
    qkv = rand(1, T, 3, 1, 32, grad=False)
    qkv[:, :, :2] *= (1e4 * 32**0.5 / (qkv[0, :, 0, 0] @ qkv[0, :, 1, 0].mT).abs().max()) ** 0.5
    scores = qkv[0, :, 0, 0] @ qkv[0, :, 1, 0].mT * 32**-0.5
    assert scores.max() > 9e3 or scores.min() < -9e3
    assert_accurate(fk.attention, attention_ref, {"qkv": _leaf(qkv, dtype)})


# Each op at these, or at sizes of its own: an activation that is 0 here and not there, before an
# infinite scale, is no fault, and is the likelier the longer the sums are.
SIZES = Sizes(B=2, T=6, C=32, H=2, F=28, img_size=(8, 12), patch_size=4)
OWN_SIZES: dict[str, dict[str, Any]] = {
    "layer_norm": dict(rows=(5,), C=64),
    "linear": dict(rows=(4, 3), K=24, N=20),
    "mlp": dict(rows=(4, 3), C=24, F=28, N=20),
    "scaled_dot_product_attention": dict(B=1, H=2, T=20, S=20, D=32, mask=None),
    "patch_embed": dict(B=2, channels=3, grid=(2, 3), patch=(4, 4), C=20, prefix=2),
    "rope": dict(B=2, T=5, H=2, D=16, R=12, prefix=0, lead=(), norm="layer_norm"),
    # Many keys: of few, all scores of an infinite query may be -inf, for which torch gives 0.
    "rope_attention": dict(B=1, T=20, H=2, D=16, C=32, R=16, prefix=1, lead=(), norm=None),
}


def _op(
    op: Op, sizes: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> tuple[Any, Any, Any]:
    """(one output of the op, the specification's, inputs without scales that get no gradient)"""
    sizes = {**OWN_SIZES.get(op.name, op.at(SIZES)), **sizes}
    shapes = op.shapes_of(sizes)
    fixed = {
        n: rand(*shapes[n], grad=False)
        for n, arg in op.args.items()
        if arg.required and not arg.grad
    }
    options = {**op.settings_of(sizes, DEVICE), **options, **fixed}
    shapes = {n: s for n, s in shapes.items() if op.args[n].grad}

    def first(function: Any) -> Any:
        return lambda **inputs: single(op, function(**inputs, **options))

    def inputs() -> dict[str, Tensor]:
        return {name: rand(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}

    return first(op.function), first(op.specification), inputs


def _heads(T: int) -> dict[str, Tensor]:
    return {name: rand(1, 2, T, 32, seed=i) for i, name in enumerate(("query", "key", "value"))}


OPS: dict[str, tuple[Any, Any, Any]] = {name: _op(op) for name, op in REGISTRY.items()}
OPS |= {f"linear_{name}": _op(REGISTRY["linear"], activation=name) for name in ACTIVATIONS}
SDPA = "scaled_dot_product_attention"
OPS["rope_interleaved"] = _op(REGISTRY["rope"], dict(norm=None, R=16), interleaved=True)
OPS[f"{SDPA}_causal"] = _op(REGISTRY[SDPA], dict(is_causal=True))
OPS[f"{SDPA}_split"] = _op(REGISTRY[SDPA], dict(T=70, S=70, D=16))  # past the one-pass backward
CASES = [(op, name) for op, (_, _, inputs) in OPS.items() for name in (*inputs(), "upstream")]
CASES.remove((f"{SDPA}_causal", "key"))  # a test of its own


def _results(function, inputs: dict[str, Tensor], upstream: Tensor, dtype) -> dict[str, Tensor]:
    leaves = {name: _leaf(x, dtype) for name, x in inputs.items()}
    out = function(**leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype))
    return {"out": out, **{f"d{name}": g for name, g in zip(leaves, grads, strict=True)}}


def _reached(actual: Tensor, expected: Tensor) -> Tensor:
    """Where one is finite and the other is not."""
    return actual.isfinite() != expected.isfinite()


def _same(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x.isnan() & y.isnan())


@pytest.mark.parametrize(("op", "name"), CASES, ids=str)
def test_non_finite_propagation(op, name):
    """Positions in the output and all gradients; in the output NaN and the sign of inf too.

    Gradients are sums, which the kernels take in another order: where inf meets -inf on the way of
    one and not of the other, the one has NaN and the other inf. In the output that holds for an
    activation that is 0 in the input dtype and not in float64, before an infinite weight.
    """
    function, reference, make = OPS[op]
    for value in (nan, inf, -inf):
        inputs = {n: x.detach().to(bf16) for n, x in make().items()}
        with torch.no_grad(), fk.backend("torch"):
            upstream = torch.randn_like(function(**inputs))
        changed = {**inputs, "upstream": upstream}[name].view(-1)
        changed[(3 * 32 + 5 if "attention" in op else 7) % len(changed)] = value
        with fk.backend("triton"):
            actual = _results(function, inputs, upstream, bf16)
        with sdpa_kernel(SDPBackend.MATH):
            expected = _results(reference, inputs, upstream, torch.float64)
            low = reference(**inputs).double()
        assert any(not x.isfinite().all() for x in expected.values())
        if (op, name) == ("patch_embed", "weight"):  # docs/numerics.md: the one exception
            wrong = _reached(actual["out"], expected["out"]).nonzero()
            assert set(map(tuple, wrong.tolist())) == {(b, t, 0) for b in (0, 1) for t in (0, 1)}
            actual["out"] = torch.cat([low[:, :2], actual["out"][:, 2:].double()], 1)
        for tensor, x in actual.items():
            assert not _reached(x, expected[tensor]).any(), (value, tensor)
        out, wanted = actual["out"].double(), expected["out"]
        assert (_same(out, wanted) | _same(out, low) | wanted.isfinite()).all(), value


@pytest.mark.parametrize("value", [nan, inf], ids=str)
def test_causal_nan_in_later_key(value):
    """torch's MATH adds -inf to its NaN score, and so gives NaN to the queries before it too."""
    heads = {name: x.detach().abs() for name, x in _heads(20).items()}
    heads["key"][0, 1, 6, 3] = value
    with fk.backend("triton"):
        out = fk.scaled_dot_product_attention(**heads, is_causal=True)
    assert out[0, 0].isfinite().all() and out[0, 1, :6].isfinite().all()
    assert out[0, 1, 6:].isnan().all()


def test_all_minus_inf_scores_give_nan():
    """The kernels look for rows without a key only under a mask; torch gives 0. docs/numerics.md"""
    heads = {name: x.detach().abs() for name, x in _heads(1).items()}
    heads["key"][0, 1, 0, 3] = -inf
    out = fk.scaled_dot_product_attention(**heads)
    assert out[0, 1].isnan().all() and out[0, 0].isfinite().all()
    mask = torch.ones(1, 1, dtype=torch.bool, device=DEVICE)
    assert fk.scaled_dot_product_attention(**heads, attn_mask=mask)[0, 1].eq(0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("T", [20, 70], ids=lambda t: f"T{t}")
def test_fully_masked_rows_are_zero(T, kind, dtype):
    seen = rand(T, T + 3, grad=False, seed=8) > 0
    seen[3] = seen[T - 1] = False
    mask: Tensor = seen
    if kind == "additive":
        mask = torch.zeros(seen.shape, device=DEVICE).masked_fill(~seen, -inf)
    lengths = dict(query=T, key=T + 3, value=T + 3)
    inputs = {name: rand(1, 2, n, 32, dtype=dtype) for name, n in lengths.items()}

    def reference(query, key, value):
        cast = mask if kind == "bool" else mask.to(query.dtype)
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, cast)

    with fk.backend("triton"):
        assert_accurate(partial(fk.scaled_dot_product_attention, attn_mask=mask), reference, inputs)
        out = fk.scaled_dot_product_attention(**inputs, attn_mask=mask)
        (dquery,) = torch.autograd.grad(out, inputs["query"], torch.ones_like(out))
    for x in (out, dquery):
        assert x[:, :, [3, T - 1]].eq(0).all() and x.isfinite().all()


CLOSE = {fp32: 2e-3, fp16: 4e-3, bf16: 3e-2}  # scores beside -1e4 keep three digits in fp32


@pytest.mark.parametrize("route", ["triton", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("value", [-1e4, torch.finfo(fp32).min], ids=str)
@pytest.mark.parametrize("op", ["attention", SDPA])
def test_finite_mask_hidden_rows_gradients(op, value, dtype, route):
    """Of softmax(q k^T + mask) v, written out in fp32: torch's fused kernels lose the sum of such a
    row, and the gradients were 5 to 13 times too large."""
    T, H, D = 33, 2, 32
    mask = rand(H, T, T, grad=False, seed=5)
    mask[:, [3, 4, 10, 31, 32]] = value
    mask = mask.clamp(min=torch.finfo(dtype).min).to(dtype)
    qkv = rand(1, T, 3, H, D, grad=False)
    upstream = rand(1, T, H, D, seed=7, grad=False).to(dtype)

    def written(qkv: Tensor, mask: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return ((q @ k.mT * D**-0.5 + mask).softmax(-1) @ v).transpose(1, 2)

    def by_heads(qkv: Tensor, mask: Tensor) -> Tensor:
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return fk.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)

    def packed(qkv: Tensor, mask: Tensor) -> Tensor:
        return fk.attention(qkv, attn_mask=mask)

    inputs = _leaf(qkv, dtype), _leaf(mask, dtype)
    with fk.backend(route):
        out = (packed if op == "attention" else by_heads)(*inputs)
        found = out, *torch.autograd.grad(out, inputs, upstream)
    wide = [_leaf(x) for x in inputs]
    formula = written(*wide)
    expected = formula, *torch.autograd.grad(formula, wide, upstream.float())
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.float(), y, rtol=CLOSE[dtype], atol=CLOSE[dtype])


SUBNORMAL = {fp32: 1e-40, fp16: 1e-6, bf16: 1e-39}  # times normal numbers


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("op", ["layer_norm", "linear_gelu", "patch_embed", SDPA])
def test_subnormal_inputs_are_not_flushed(op, dtype):
    function, reference, make = OPS[op]
    first = "value" if op == SDPA else "images" if op == "patch_embed" else "x"
    wanted = {first, "weight", "query", "key"}
    inputs = {name: _leaf(x, dtype) for name, x in make().items() if name in wanted}
    inputs[first] = _leaf(inputs[first] * SUBNORMAL[dtype], dtype)
    if op == "layer_norm":  # eps keeps a subnormal row subnormal
        function, reference = partial(fk.layer_norm, eps=1.0), partial(layer_norm_ref, eps=1.0)
    assert 0 < inputs[first].abs().max() < torch.finfo(dtype).tiny * (20 if dtype == fp16 else 1)
    with fk.backend("triton"):
        out = function(**inputs)
        assert out.ne(0).float().mean() > 0.5
        assert_accurate(function, reference, inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_subnormal_gradients_are_not_flushed(dtype):
    inputs = {"x": rand(5, 64, dtype=dtype), "weight": rand(48, 64, dtype=dtype, scale=0.125)}
    upstream = (rand(5, 48, grad=False, seed=3) * SUBNORMAL[dtype]).to(dtype)
    for activation in (None, "gelu"):
        call, reference = (partial(f, activation=activation) for f in (fk.linear, linear_ref))
        assert_accurate(call, reference, inputs, upstream=[upstream])
        (dx,) = torch.autograd.grad(call(**inputs), [inputs["x"]], [upstream])
        assert dx.ne(0).float().mean() > 0.5


FAR = 2**30 + 8  # elements between three neighbours: the stride fits in 32 bits, the offset not


def _far(x: Tensor, axis: int = 0) -> Tensor:
    """x with a stride of FAR along an axis of three: memory that nobody touches costs nothing."""
    assert x.shape[axis] == 3
    strides = list(x.detach().contiguous().stride())
    strides[axis] = FAR
    size = 2 * FAR + x.numel()
    try:
        if x.is_cuda:
            flat = torch.empty(size, dtype=x.dtype, device=x.device)
        else:
            flat = torch.frombuffer(mmap.mmap(-1, size * x.itemsize), dtype=x.dtype)
    except (OSError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        pytest.skip(f"no {size * x.itemsize / 1e9:.1f} GB of address space: {error}")
    flat = flat.as_strided(x.shape, strides)
    with torch.no_grad():
        flat.copy_(x)
    return flat.requires_grad_(x.requires_grad)


def _drawn(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, grad: bool = True):
    """Of these shapes; the axis of a negative length is that of the stride FAR."""
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        x = rand(*map(abs, shape), dtype=dtype, seed=i, scale=0.2 if "weight" in str(name) else 1.0)
        far = [axis for axis, n in enumerate(shape) if n < 0]
        found[name] = (_far(x, *far) if far else x).detach().requires_grad_(grad)
    return found


def _far_apart(axis: int, *shape: int) -> tuple[int, ...]:
    """The shape with three far apart along an axis."""
    return (*shape[:axis], -3, *shape[axis + 1 :])


def _far_linear(activation: str | None) -> tuple[Any, ...]:
    """Outputs, the residual and rows of x far apart."""
    shapes = dict(x=(-3, 24), weight=(40, 24), residual=(-3, 40), layer_scale=(40,))
    return *(partial(f, activation=activation) for f in (fk.linear, linear_ref)), shapes, [(-3, 40)]


def _far_attention(B: int, T: int) -> tuple[Any, ...]:
    """qkv and the output's gradient, whose samples or tokens lie far apart."""
    return fk.attention, attention_ref, dict(qkv=(B, T, 3, 1, 16)), [(B, T, 1, 16)]


def _far_rope(axis: int, norm: str | None) -> tuple[Any, ...]:
    """Queries, keys and both gradients whose samples, tokens or heads lie far apart."""
    shape = _far_apart(axis, 1, 1, 1, 16)
    tables = {"cos": (abs(shape[1]), 16), "sin": (abs(shape[1]), 16)}
    pair = (partial(f, norm=norm) for f in (fk.rope, rope_ref))
    return *pair, dict(q=shape, k=shape), [shape, shape], tables


def _far_sdpa(axis: int) -> tuple[Any, ...]:
    """Queries, keys, values and the mask, whose samples, heads or tokens lie far apart."""
    shape, mask = (_far_apart(axis, 1, 1, 20, n) for n in (16, 20))
    heads = dict.fromkeys(("query", "key", "value"), shape)
    pair = fk.scaled_dot_product_attention, F.scaled_dot_product_attention
    return *pair, heads, [], {"attn_mask": (*mask[:3], abs(shape[2]))}


# function, specification, its tensors, its gradients, what gets none
FAR_CALLS: dict[str, tuple[Any, ...]] = {
    "layer_norm": (
        fk.layer_norm_and_input,
        lambda x: (layer_norm_ref(x), x.view_as(x)),
        dict(x=(-3, 64)),
        [(-3, 64)] * 2,
    ),
    "rms_norm": (
        fk.rms_norm_and_input,
        lambda x, weight: (rms_norm_ref(x, weight), x.view_as(x)),
        dict(x=(-3, 64), weight=(64,)),
        [(-3, 64)] * 2,
    ),
    **{f"rope-{axis}-{n}": _far_rope(axis, n) for axis in range(3) for n in (None, "layer_norm")},
    "linear": _far_linear(None),
    "linear_gelu": _far_linear("gelu"),
    # dlayer_scale reads the weight once more, by its strides
    "linear_weight": (fk.linear, linear_ref, dict(x=(5, 8), weight=(-3, 8), layer_scale=(3,)), []),
    "mlp": (
        *(partial(f, fc1_bias=None, fc2_bias=None) for f in (fk.mlp, mlp_ref)),
        dict(x=(-3, 3, 24), fc1_weight=(48, 24), fc2_weight=(24, 48), residual=(-3, 3, 24)),
        [(-3, 3, 24)],
    ),
    "attention": _far_attention(-3, 20),
    "attention_split": _far_attention(-3, 70),
    # beyond the kernels' offsets within a tile: the launcher copies
    "attention_tokens": _far_attention(1, -3),
    "qkv_attention": (
        *(partial(f, num_heads=1) for f in (fk.qkv_attention, qkv_attention_ref)),
        dict(x=(-3, 3, 24), weight=(48, 24)),
        [(-3, 3, 1, 16)],
    ),
    # channels, rows of a patch, patches above one another
    **{
        f"patches-{i}": (fk.patch_embed, patch_embed_ref, dict(images=images, weight=weight), [])
        for i, (images, weight) in enumerate(
            (
                ((1, -3, 4, 8), (16, 3, 4, 8)),
                ((1, 2, -3, 8), (16, 2, 3, 8)),
                ((1, 2, -3, 8), (16, 2, 1, 8)),
            )
        )
    },
    **{f"sdpa-{axis}": _far_sdpa(axis) for axis in range(3)},
}


@pytest.mark.parametrize("call", FAR_CALLS)
def test_addresses_past_2_31(call):
    function, reference, shapes, upstream, *fixed = FAR_CALLS[call]
    dtype = fp32 if call == "attention_split" else fp16
    inputs = _drawn(shapes, dtype)
    for more in fixed:
        inputs |= _drawn(more, dtype if "attn_mask" in more else fp32, grad=False)
    gradients = list(_drawn(dict(enumerate(upstream)), dtype, grad=False).values())
    for route in ("library", "triton") if "linear" in call else ("triton",):
        with fk.backend("triton"), forced_route(route):
            assert_accurate(function, reference, inputs, upstream=gradients or None)
