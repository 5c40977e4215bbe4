"""sm_90's kernels, run: by the 2x rule, and what of their order is noticed when it is left out."""

import pytest

from tests.machine.device.left_out import kind_of, read, table_of

from .test_kernels import device, python


@pytest.mark.parametrize("number", range(2))
def test_every_case_of_check(number):
    """wgmma, TMA, mbarriers as they ship, operands read late."""
    said = device(
        "--arch", "sm_90", "--precision", "bf16", "--kind", "check", "--share", str(number), "2"
    )
    assert f"{23 - number} passed, 0 failed" in said


def test_operands_read_early():
    said = device(
        "--arch", "sm_90", "--precision", "bf16", "--kind", "early", "--only", "attention"
    )
    assert "17 passed, 0 failed" in said


def test_a_convolution_is_compared_in_tf32():
    """Its gradients too: PyTorch's own products see the upper bits alone."""
    said = device(
        "--arch", "sm_90", "--precision", "tf32", "--kind", "check", "--only", "patch_embed, video"
    )
    assert "1 passed, 0 failed" in said


SDPA = """
import sys, torch, fastvit_kernels as fk
from torch.nn.functional import scaled_dot_product_attention
from tests.machine.device import ptx_machine

arch, (D, T_q, T_kv) = sys.argv[1], map(int, sys.argv[2:])
torch.manual_seed(0)
q, k, v, dout = (torch.randn(1, 1, T, D).bfloat16() for T in (T_q, T_kv, T_kv, T_q))

def step(function, dtype):
    given = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = function(*given)
    return out, *torch.autograd.grad(out, given, dout.to(dtype))

wanted = step(scaled_dot_product_attention, torch.float64)
yardstick = step(scaled_dot_product_attention, torch.bfloat16)
with ptx_machine(arch):
    found = step(fk.scaled_dot_product_attention, torch.bfloat16)
for a, b, y in zip(found, wanted, yardstick):
    limit = 2 * (y.double() - b).abs().max() + 2 * torch.finfo(torch.bfloat16).eps * b.abs().max()
    assert (a.double() - b).abs().max() <= limit
print("right")
"""


@pytest.mark.parametrize(
    ("arch", "sizes"),
    [
        ("sm_80", (256, 70, 70)),
        ("sm_90", (136, 70, 70)),
        ("sm_90", (256, 20, 20)),
        ("sm_90", (64, 16, 197)),
    ],
)
def test_attention_of_wide_heads_and_of_few_queries(arch, sizes):
    """`check` has neither: their tiles have other warps."""
    assert "right" in python("-c", SDPA, arch, *map(str, sizes))


HOST_MAPS = """
import torch, triton, triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor
from tests.machine.device import ptx_machine

@triton.jit
def product_kernel(y, x, weight, K, BLOCK: tl.constexpr):
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        total = tl.dot(x.load([row, k]), weight.load([column, k]).T, total)
    y.store([row, column], total.to(tl.bfloat16))

torch.manual_seed(0)
for arch in ("sm_80", "sm_90"):
    x, weight = torch.randn(100, 136).bfloat16(), torch.randn(72, 136).bfloat16()
    y = torch.full((101, 72), 7.0).bfloat16()
    maps = [TensorDescriptor.from_tensor(t, [64, 64]) for t in (y[:100], x, weight)]
    with ptx_machine(arch) as machine:
        product_kernel[2, 2](*maps, 136, BLOCK=64)
    wanted = x.double() @ weight.double().T
    assert ((y[:100] - wanted).abs() <= 2**-8 * wanted.abs() + 1e-4).all() and (y[100] == 7).all()
    assert (machine.notes["boxes of TMA"] > 0) == (arch == "sm_90")
print("right")
"""


def test_tensor_maps_made_by_the_host(tmp_path):
    """Passed by value on sm_90, as the numbers of a tensor on sm_80."""
    (tmp_path / "host_maps.py").write_text(HOST_MAPS)
    assert "right" in python(str(tmp_path / "host_maps.py"))


def test_each_row_of_the_table_is_explained():
    rows = read(table_of("sm_90"))
    assert rows and all(bool(row.noticed) != bool(row.why) for row in rows)
    assert all(row.why.startswith(("needless", "beyond", "not reached")) for row in rows if row.why)


@pytest.mark.parametrize(
    "kind",
    [
        "wgmma.fence, left out",
        "wgmma.wait_group, left out",
        "wgmma.wait_group, another number",
        "wgmma.commit_group, left out",
        "fence.proxy, left out",
        "bar.sync, left out",
        "mbarrier.init, left out",
        "mbarrier.arrive, left out",
        "mbarrier.try_wait, left out",
    ],
)
def test_of_each_kind_some_are_noticed(kind):
    assert any(row.noticed for row in read(table_of("sm_90")) if kind_of(row) == kind)
