"""fp32 products follow torch's switches, by whichever name they were set, and nothing raises.

tests/support/interpreter.py cuts the operands of tf32 products as tensor cores do.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from numerics import DEVICE, rand
from op_facts import single

from fastvit_kernels import backend
from fastvit_kernels.accuracy.accuracy import convolutions_like_matmuls
from fastvit_kernels.accuracy.cases import OPS
from fastvit_kernels.accuracy.op import Example, Sizes
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.runtime.compat import matmul_precision

BACKENDS = torch.backends
SIZES = Sizes(B=1, T=6, C=32, H=2, F=48, img_size=(8, 12), patch_size=4)


def _set(owner: object, value: str) -> Callable[[], None]:
    return partial(setattr, owner, "fp32_precision", value)


SPELLINGS = {
    "default": ("ieee", lambda: None),
    "high": ("tf32", partial(torch.set_float32_matmul_precision, "high")),
    "allow_tf32": ("tf32", partial(setattr, BACKENDS.cuda.matmul, "allow_tf32", True)),
    "backends=tf32": ("tf32", _set(BACKENDS, "tf32")),
    "cuda=ieee": ("ieee", _set(BACKENDS.cuda.matmul, "ieee")),
    "cudnn=tf32": ("tf32", _set(BACKENDS.cudnn, "tf32")),
    "mkldnn=bf16": ("ieee", _set(BACKENDS.mkldnn, "bf16")),
    "backends=tf32, cuda=ieee": (
        "ieee",
        lambda: (_set(BACKENDS, "tf32")(), _set(BACKENDS.cuda.matmul, "ieee")()),
    ),
}


def _reset() -> None:
    torch.set_float32_matmul_precision("highest")
    parts = BACKENDS.mkldnn.matmul, BACKENDS.mkldnn.conv, BACKENDS.mkldnn.rnn
    for owner in (BACKENDS, BACKENDS.cuda.matmul, BACKENDS.cudnn, BACKENDS.mkldnn, *parts):
        _set(owner, "none")()
    for owner in (BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn):
        _set(owner, "tf32")()


@pytest.fixture(autouse=True)
def _switches_of_torch():
    _reset()
    yield
    _reset()


def _results(name: str) -> list[torch.Tensor]:
    """The op's output and gradients in fp32 by the kernels, the same inputs every time."""
    op = OPS[name]
    case = op.case(Example(op.at(SIZES)), DEVICE, torch.float32)
    inputs = case.make()
    wanted = [x for x in inputs.values() if x is not None and x.requires_grad]
    with backend("triton"), forced_route("triton"):
        out = single(op, case.function(**inputs))
        upstream = rand(*out.shape, seed=7, grad=False)
        return [out.detach(), *torch.autograd.grad(out, wanted, upstream, allow_unused=True)]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_each_spelling_is_read(spelling):
    expected, set_switch = SPELLINGS[spelling]
    set_switch()
    assert matmul_precision() == expected
    with convolutions_like_matmuls():
        assert BACKENDS.cudnn.conv.fp32_precision == expected


@pytest.mark.parametrize("name", OPS)
def test_every_op_follows_every_spelling(name):
    """Of products by our own kernels; the library follows the switches by itself."""
    results = {}
    for spelling, (precision, set_switch) in SPELLINGS.items():
        _reset()
        set_switch()
        found = _results(name)
        for x, y in zip(found, results.setdefault(precision, found), strict=True):
            assert torch.equal(x, y), spelling
    same = all(torch.equal(x, y) for x, y in zip(results["ieee"], results["tf32"], strict=True))
    assert same == ("norm" in name or name == "rope")
