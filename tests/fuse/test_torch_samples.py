"""torch's own sample inputs (its OpInfo tables) through our backend and our public ops.

Through the backend each sample is one of the calls in a model: whether a rule fires or not, the
result is the host's. Through a public op a sample gives torch's numbers by the 2x rule, or a
ValueError or TypeError of one line where torch takes more than the op's contract.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_accurate
from torch import Tensor
from torch.utils._pytree import tree_map_only

import fastvit_kernels as fk
from fastvit_kernels.runtime.compat import define_torchvision_operators
from tests.fuse.hosts import Host, run

pytest.importorskip("expecttest", reason="torch.testing._internal imports expecttest")

OPS = """
    nn.functional.layer_norm nn.functional.rms_norm nn.functional.linear nn.functional.gelu
    nn.functional.silu nn.functional.scaled_dot_product_attention nn.functional.conv2d
    nn.functional.multi_head_attention_forward nn.functional.dropout softmax matmul baddbmm
""".split()


def layer_norm(
    x: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    """Ours by the arguments of torch's, which may take several axes."""
    if len(normalized_shape) != 1:
        raise ValueError(f"one axis, got {tuple(normalized_shape)}")
    return fk.layer_norm(x, weight, bias, eps)


def rms_norm(
    x: Tensor, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Tensor:
    if len(normalized_shape) != 1:
        raise ValueError(f"one axis, got {tuple(normalized_shape)}")
    return fk.rms_norm(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)


PUBLIC: dict[str, Callable[..., Tensor]] = {
    "nn.functional.layer_norm": layer_norm,
    "nn.functional.rms_norm": rms_norm,
    "nn.functional.linear": fk.linear,
    "nn.functional.scaled_dot_product_attention": fk.scaled_dot_product_attention,
}
DTYPES = [torch.float64, torch.bfloat16]
IN_ONE_MODEL = 8  # samples, for a graph costs more than a call in it
tensors = functools.partial(tree_map_only, Tensor)


@functools.cache
def tables() -> dict[str, Any]:
    define_torchvision_operators()
    with mock.patch.object(torch.backends, "disable_global_flags"):  # for the process, for good
        from torch.testing._internal.common_methods_invocations import op_db

    return {info.name: info for info in op_db if info.name in OPS and not info.variant_test_name}


def calls(name: str, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, dict[str, Any]]]]:
    """Each sample's arguments, positional and by keyword."""
    torch.manual_seed(0)
    samples = tables()[name].sample_inputs("cpu", dtype, requires_grad=True)
    for i, sample in enumerate(samples):
        yield f"{name} {i}", ((sample.input, *sample.args), dict(sample.kwargs))


def as_host(id: str, dtype: torch.dtype, function: Any, samples: Any) -> Host:
    """A model whose forward makes one call after the other; their tensors are its inputs."""
    found: list[Tensor] = []
    tensors(found.append, samples)

    def forward(kit: Any, *inputs: Tensor) -> Any:
        rest = iter(inputs)
        given = tensors(lambda _: next(rest), samples)
        return [function(*args, **kwargs) for args, kwargs in given]

    return Host(id, forward, lambda: tuple(found), dtype=dtype)


@pytest.mark.sampled(every=5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_backend_gives_the_host(name, dtype):
    op, wrong, samples = tables()[name].op, {}, [*calls(name, dtype)]
    assert samples
    for i in range(0, len(samples), IN_ONE_MODEL):
        ids, given = zip(*samples[i : i + IN_ONE_MODEL], strict=True)
        if found := run(as_host(ids[0], dtype, op, given)).wrong:
            wrong[f"{ids[0]} to {ids[-1]}"] = found
    assert not wrong


def by_inputs(function: Any, given: Any) -> tuple[Any, dict[str, Tensor]]:
    """The call as a function of its floating-point tensors by name, and these."""
    floats: dict[str, Tensor] = {}

    def named(x: Tensor) -> Any:
        if not x.is_floating_point():
            return x
        name = f"input_{len(floats)}"
        floats[name] = x.detach().clone().requires_grad_()
        return Name(name)

    args, kwargs = tensors(named, given)

    def called(**inputs: Tensor) -> Tensor:
        fill = functools.partial(tree_map_only, Name, inputs.__getitem__)
        return function(*fill(args), **fill(kwargs))

    return called, floats


class Name(str):
    """Stands for a tensor among a call's arguments."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PUBLIC)
def test_public_op_gives_torchs_numbers(name, dtype):
    taken, wrong, refusals = 0, [], []
    for id, given in calls(name, dtype):
        if name.endswith("attention") and given[1].get("dropout_p"):
            continue  # our draws are our own
        torchs, inputs = by_inputs(tables()[name].op, given)
        try:
            assert_accurate(by_inputs(PUBLIC[name], given)[0], torchs, inputs)
        except (TypeError, ValueError) as refusal:
            refusals.append(str(refusal))
        except AssertionError as error:
            wrong.append(f"{id}: {error}")
        else:
            taken += 1
    assert taken >= 2
    assert not wrong
    assert not any("\n" in line for line in refusals)


def test_a_wrong_op_is_seen():
    (_, given), *_ = calls("nn.functional.linear", torch.float32)
    torchs, inputs = by_inputs(F.linear, given)
    with pytest.raises(AssertionError, match="2x rule"):
        assert_accurate(lambda **xs: torchs(**xs) * 1.001, torchs, inputs)
