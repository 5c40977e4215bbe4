"""torch's own sample inputs (its OpInfo tables) through our backend and our public ops.

Through the backend each sample is one call in a model: whether a rule fires or not, the result is
the host's. Through a public op a sample gives torch's numbers by the 2x rule, or a ValueError or
TypeError of one line where torch takes more than the op's contract.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import fastvit_kernels as fk
from fastvit_kernels.runtime.compat import define_torchvision_operators
from tests.fuse.hosts import Host, run

pytest.importorskip("expecttest", reason="torch.testing._internal imports expecttest")

OPS = """
    nn.functional.layer_norm nn.functional.rms_norm nn.functional.linear nn.functional.gelu
    nn.functional.silu nn.functional.scaled_dot_product_attention nn.functional.conv2d
    nn.functional.multi_head_attention_forward nn.functional.dropout softmax matmul baddbmm
""".split()


def by_last_axis(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A norm of ours by the arguments of torch's, which may take several axes."""

    def called(x: Tensor, normalized_shape: Any, weight: Any = None, *rest: Any, **options: Any):
        if len(normalized_shape) != 1:
            raise ValueError(f"one axis, got {tuple(normalized_shape)}")
        return norm(x, weight, *rest, **options)

    return called


PUBLIC: dict[str, Callable[..., Tensor]] = {
    "nn.functional.layer_norm": by_last_axis(fk.layer_norm),
    "nn.functional.rms_norm": by_last_axis(fk.rms_norm),
    "nn.functional.linear": fk.linear,
    "nn.functional.scaled_dot_product_attention": fk.scaled_dot_product_attention,
}
DTYPES = [torch.float64, torch.bfloat16]
tensors = functools.partial(tree_map_only, Tensor)


@functools.cache
def tables() -> dict[str, Any]:
    define_torchvision_operators()
    from torch.testing._internal.common_methods_invocations import op_db

    return {info.name: info for info in op_db if info.name in OPS and not info.variant_test_name}


def calls(name: str, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, dict[str, Any]]]]:
    """Each sample's arguments, positional and by keyword."""
    torch.manual_seed(0)
    samples = tables()[name].sample_inputs("cpu", dtype, requires_grad=True)
    for i, sample in enumerate(samples):
        yield f"{name} {i}", ((sample.input, *sample.args), dict(sample.kwargs))


def as_host(id: str, dtype: torch.dtype, function: Any, given: Any) -> Host:
    """A model whose forward is the one call; its tensors are the model's inputs."""
    found: list[Tensor] = []
    tensors(found.append, given)

    def forward(kit: Any, *inputs: Tensor) -> Any:
        rest = iter(inputs)
        args, kwargs = tensors(lambda _: next(rest), given)
        return function(*args, **kwargs)

    return Host(id, forward, lambda: tuple(found), dtype=dtype)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_backend_gives_the_host(name, dtype):
    op, wrong, count = tables()[name].op, {}, 0
    for id, given in calls(name, dtype):
        count += 1
        if found := run(as_host(id, dtype, op, given)).wrong:
            wrong[id] = found
    assert count
    assert not wrong


def gradients(function: Any, given: Any) -> list[Any]:
    """The result, and the gradients of all inputs under a seeded upstream gradient."""
    inputs: list[Tensor] = []

    def leaf(x: Tensor) -> Tensor:
        inputs.append(x.detach().clone().requires_grad_(x.is_floating_point()))
        return inputs[-1]

    args, kwargs = tensors(leaf, given)
    out = function(*args, **kwargs)
    up = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    leaves = [x for x in inputs if x.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, up.to(out.dtype), allow_unused=True)]


def exactly(given: Any) -> Any:
    return tensors(lambda x: x.double() if x.is_floating_point() else x, given)


def is_accurate(ours: Any, torchs: Any, exact: Any) -> bool:
    """The 2x rule with a floor of four roundings of the largest number."""
    if ours is None or torchs is None:
        return ours is None or not ours.any()
    if (ours.dtype, ours.shape) != (torchs.dtype, torchs.shape):
        return False
    if not ours.numel():
        return True
    floor = 4 * torch.finfo(ours.dtype).eps * max(1.0, float(exact.detach().abs().max()))
    error, yardstick = ((x.double() - exact).abs().max() for x in (ours, torchs))
    return bool(error <= 2 * yardstick + floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PUBLIC)
def test_public_op_gives_torchs_numbers(name, dtype):
    taken, wrong, refusals = 0, [], []
    for id, given in calls(name, dtype):
        if name.endswith("attention") and given[1].get("dropout_p"):
            continue  # our draws are our own
        torchs = gradients(tables()[name].op, given)
        exact = gradients(tables()[name].op, exactly(given))
        try:
            ours = gradients(PUBLIC[name], given)
        except (TypeError, ValueError) as refusal:
            refusals.append(str(refusal))
            continue
        taken += 1
        if not all(map(is_accurate, ours, torchs, exact)):
            wrong.append(id)
    assert taken >= 2
    assert not wrong
    assert not any("\n" in line for line in refusals)


@pytest.mark.parametrize("name", ["nn.functional.rms_norm"])
def test_torchs_bad_calls_are_refused(name):
    for bad in tables()[name].error_inputs("cpu"):
        sample = bad.sample_input
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            PUBLIC[name](sample.input, *sample.args, **sample.kwargs)


def test_a_wrong_op_is_seen():
    (_, given), *_ = calls("nn.functional.linear", torch.float32)
    ours = gradients(lambda *args: F.linear(*args) * 1.001, given)
    torchs = gradients(F.linear, given)
    exact = gradients(F.linear, exactly(given))
    assert not is_accurate(ours[0], torchs[0], exact[0])
    assert len(tree_leaves(given)) >= 2
