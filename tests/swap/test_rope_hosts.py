"""Hosts with RoPE, RMSNorm, qk-norm and gated MLPs: their blocks leave nothing to PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from outside import dinov3
from torch import nn

from fastvit_kernels import backend, swap_in, watch
from fastvit_kernels.runtime.compat import TorchDispatchMode, place_of_storage
from fastvit_kernels.swap.compare import model_errors
from fastvit_kernels.swap.hosts import attend, fused
from tests.model_coverage.compare import difference, randomize
from tests.model_coverage.model_zoo import HF_MODELS, hf_small, timm_small

timm = pytest.importorskip("timm")
pytest.importorskip("transformers")

PATHS = {"drop_path_rate": 0.3}
GATED_EVA = dict(swiglu_mlp=True, scale_mlp=True, scale_attn_inner=True, mlp_ratio=2.0)

# name -> (name in the zoo, settings), one for each structure
FAMILIES = {
    "eva": ("eva_giant_patch14_224", PATHS),
    "eva02": ("eva02_tiny_patch14_224", PATHS),
    "eva02_norms": ("eva02_tiny_patch14_224", PATHS | GATED_EVA),
    "dinov3": ("vit_small_patch16_dinov3", PATHS),
    "dinov3_gated": ("vit_7b_patch16_dinov3", PATHS),
    "pe": ("vit_pe_spatial_tiny_patch16_512", PATHS),
    "rope": ("vit_base_patch16_rope_224", PATHS),
    "rope_learnt": ("vit_base_patch16_rope_mixed_224", PATHS),
    "aimv2_timm": ("aimv2_large_patch14_224", PATHS),
    "qk_norm": ("vit_tiny_patch16_224", PATHS | dict(qk_norm=True)),
    "rope_qk_norm": ("vit_base_patch16_rope_224", PATHS | dict(qk_norm=True)),
    "dinov3_vit_gated": ("dinov3_vit_gated", PATHS),
    "aimv2": ("aimv2", {}),
    "internvl": ("internvl", {}),
    "internvl_6b": ("internvl_6b", {}),
    "mlcd": ("mlcd", {}),
    "pixtral": ("pixtral", {}),
    "vjepa2": ("vjepa2", PATHS),
    "gemma4": ("gemma4", {}),
}


def small(family):
    torch.manual_seed(0)
    name, settings = FAMILIES[family]
    model, inputs = (hf_small if name in HF_MODELS else timm_small)(name, **settings)
    return randomize(model).eval(), inputs


def outside(row):
    """Whether a row of the report's `left` is no part of a block."""
    return not any(part.isdigit() for part in row.name.split("."))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_leaves_nothing_to_pytorch(family):
    model, inputs = small(family)
    with backend("torch"):
        report = swap_in(copy.deepcopy(model))
        assert report.level == "block", str(report)
        assert report.pytorch == {} and report.uncounted == [], str(report)
        assert all(map(outside, report.left)), report.left
        assert difference(model, inputs) == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_through_the_kernels(family):
    model, inputs = small(family)
    failed = [str(e) for e in model_errors(model, inputs) if not e.passed]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("family", ["eva02_norms", "dinov3_gated", "internvl_6b", "pixtral"])
def test_a_step_under_autocast(family):
    model, inputs = small(family)
    with backend("torch"):
        errors = model_errors(model, inputs, autocast=torch.bfloat16)
    failed = [str(e) for e in errors if not e.passed]
    assert not failed, "\n".join(failed)


def rotations(monkeypatch):
    """The tables that our rotation takes from now on."""
    taken = []
    original = attend.rope_attention

    def counted(*args, **kwargs):
        taken.append(kwargs["cos"])
        return original(*args, **kwargs)

    monkeypatch.setattr(attend, "rope_attention", counted)
    return taken


@pytest.mark.parametrize("learns", [True, False])
def test_frequencies_learn_through_the_kernels(learns, monkeypatch):
    model, inputs = small("rope_learnt")
    model.rope.requires_grad_(learns)
    swapped = copy.deepcopy(model)
    with backend("torch"):
        assert swap_in(swapped).pytorch == {}
    taken = rotations(monkeypatch)
    host, ours = model(inputs), swapped(inputs)
    assert [(tuple(t.shape), t.requires_grad) for t in taken] == [((1, 2, 9, 32), learns)] * 2
    torch.testing.assert_close(ours, host, rtol=1e-4, atol=1e-5)
    if learns:
        dy = torch.randn_like(host)
        wanted, found = (
            torch.autograd.grad(y, m.rope.freqs, dy)[0] for y, m in ((host, model), (ours, swapped))
        )
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


def test_norms_of_heads_keep_their_eps():
    model, inputs = small("qk_norm")
    for block in model.blocks:
        block.attn.q_norm.eps = block.attn.k_norm.eps = 0.1
    with backend("torch"):
        report = swap_in(copy.deepcopy(model))
        assert report.level == "block" and report.pytorch == {}, str(report)
        assert difference(model, inputs) == ""


def _another_eps(block):
    block.attn.q_norm.eps = 0.1


def _another_kind(block):
    block.attn.k_norm = timm.layers.RmsNorm(block.attn.head_dim, eps=block.attn.q_norm.eps)


@pytest.mark.parametrize("change", [_another_eps, _another_kind])
def test_norms_of_heads_that_differ(change):
    model, inputs = small("qk_norm")
    for block in model.blocks:
        change(block)
    with backend("torch"):
        report = swap_in(copy.deepcopy(model))
        assert report.level == "block", str(report)
        assert difference(model, inputs) == ""


def test_tables_of_each_sample(monkeypatch):
    """Patch dropout leaves each sample tables of its own."""
    torch.manual_seed(0)
    model, inputs = timm_small("vit_small_patch16_dinov3", patch_drop_rate=0.4)
    randomize(model)
    swapped = copy.deepcopy(model)
    with backend("torch"):
        assert difference(model, inputs) == ""
        swap_in(swapped)
    taken = rotations(monkeypatch)
    torch.manual_seed(1)
    ours = swapped.train()(inputs)
    torch.manual_seed(1)
    host = model.train()(inputs)
    assert [tuple(t.shape) for t in taken] == [(2, 1, 5, 32)] * 2
    torch.testing.assert_close(ours, host, rtol=1e-4, atol=1e-5)


def test_a_mask_of_images_side_by_side():
    """Pixtral: images in one sequence, each apart; rope and attention beside a mask."""
    model, inputs = small("pixtral")
    sizes = [(48, 32), (32, 48)]
    inputs = inputs | {"image_sizes": torch.tensor(sizes)}
    failed = [str(e) for e in model_errors(model, inputs) if not e.passed]
    assert not failed, "\n".join(failed)


def test_tokens_at_places_of_their_own():
    """V-JEPA 2's predictor: `position_mask` says where each token stands."""
    model, _ = small("vjepa2")
    layer = model.predictor.layer[0].double()
    swapped = copy.deepcopy(layer)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 64, generator=generator).double()
    places = torch.stack([torch.randperm(18, generator=generator)[:6] for _ in range(2)])
    with backend("torch"):
        assert swap_in(swapped).level == "block"
        ours, host = swapped(x, places), layer(x, places)
    assert ours[1] is None and host[1] is None
    torch.testing.assert_close(ours[0], host[0])
    assert not torch.allclose(ours[0], swapped(x)[0])


def test_frequencies_of_places_are_in_the_dtype_of_q(monkeypatch):
    """V-JEPA 2 under autocast, as its host has them: at a place far off bf16 is another angle."""
    model, _ = small("vjepa2")
    layer, taken = model.predictor.layer[0], rotations(monkeypatch)
    layer.attention.grid_size = 64
    places = torch.tensor([[64 * 63 + 61] * 6] * 2)
    with backend("torch"), torch.autocast("cpu", torch.bfloat16):
        swap_in(layer)
        layer.attention(torch.randn(2, 6, 64), places)
    width = layer.attention.d_dim
    omega = 1.0 / 10000 ** (torch.arange(width // 2, dtype=torch.bfloat16) / (width / 2.0))
    columns = taken[-1][0, 0, width : 2 * width]
    torch.testing.assert_close(columns.sort()[0], (63 * omega.repeat(2)).cos().sort()[0])


def test_thirds_of_a_head_of_other_widths():
    """V-JEPA 2: they follow from the width of a head, in narrow copies too."""
    model, _ = small("vjepa2")
    layer = model.encoder.layer[0].double()
    layer.attention.d_dim = layer.attention.h_dim = layer.attention.w_dim = 8
    swapped, x = copy.deepcopy(layer), torch.randn(2, 6, 64).double()
    with backend("torch"):
        assert "its thirds of a head have other widths" in str(swap_in(swapped))
        torch.testing.assert_close(swapped(x)[0], layer(x)[0])


def test_a_gate_that_is_called_gets_what_the_norm_gives():
    """fp32 under autocast, as in the host, though the Linear beside it has no hook."""
    model, inputs = small("dinov3_gated")
    swapped, seen = copy.deepcopy(model), []
    with backend("torch"), torch.autocast("cpu", torch.bfloat16):
        swap_in(swapped)
        for m in (swapped, model):
            m.blocks[0].mlp.fc1_g.register_forward_pre_hook(
                lambda m, args: seen.append(args[0].dtype)
            )
            m(inputs)
    assert seen == [torch.float32] * 2


@pytest.mark.parametrize("name", ["LayerNormFp32", "RmsNormFp32"])
def test_a_norm_in_fp32_keeps_its_dtype_under_autocast(name):
    host = getattr(timm.layers, name)(64)
    norm, x = copy.deepcopy(host), torch.randn(2, 5, 64).bfloat16()
    with backend("torch"), torch.autocast("cpu", torch.bfloat16):
        assert len(swap_in(norm).swapped) == 1
        assert norm.fused_added(x, x.float()).dtype is torch.float32  # of timm's ResPostBlock
        assert norm(x).dtype is host(x).dtype is torch.bfloat16
        assert norm.fused_dtype(x) is x.dtype  # a GPU's autocast widens what has none


def test_fewer_heads_of_keys_are_reported():
    model, inputs = hf_small("gemma4", num_key_value_heads=1)
    swapped = copy.deepcopy(randomize(model).eval())
    with backend("torch"):
        assert "k and v have fewer heads" in str(swap_in(swapped))
        torch.testing.assert_close(swapped(**inputs)[0], model(**inputs)[0], rtol=1e-4, atol=1e-5)


class Tower(nn.Module):
    """A block in the manner of DINOv3's repository, with tables behind two prefix tokens."""

    def __init__(self):
        super().__init__()
        self.block = dinov3.Block(64, 2)
        angles = torch.randn(7, 32, generator=torch.Generator().manual_seed(3))
        self.register_buffer("sin", angles.sin())
        self.register_buffer("cos", angles.cos())

    def forward(self, x):
        return self.block(x, (self.sin, self.cos))


def test_dinov3s_own_block_leaves_nothing_to_pytorch(monkeypatch):
    torch.manual_seed(0)
    model, x = randomize(Tower()), torch.randn(2, 9, 64)
    with backend("torch"):
        report = swap_in(copy.deepcopy(model))
        assert report.level == "block" and report.pytorch == {} and not report.left, str(report)
        assert difference(model, x) == ""
    taken = rotations(monkeypatch)
    failed = [str(e) for e in model_errors(model, x) if not e.passed]
    assert not failed, "\n".join(failed)
    assert [tuple(t.shape) for t in taken] == [(7, 32)]


def test_other_tables_are_the_hosts_to_read():
    """A rotation by our kernel has a proof for tables of all heads; the host takes others, too."""
    torch.manual_seed(0)
    host = randomize(dinov3.Block()).double()
    module = copy.deepcopy(host)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, 6, 32, generator=generator).double()
    with backend("torch"):
        swap_in(module)
        for leading in ((2,), (2, 1), (2, 2)):
            angles = torch.randn(*leading, 4, 16, generator=generator).double()
            rope = angles.sin(), angles.cos()
            torch.testing.assert_close(module(x, rope), host(x, rope), rtol=1e-9, atol=1e-9)


def test_a_compiled_block_is_one_graph():
    model, _ = small("dinov3")
    block = model.blocks[0]
    with backend("torch"):
        swap_in(block)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        for tokens in 9, 11, 13:  # from the second on their number is a symbol
            x, rope = torch.randn(2, tokens + 5, 64), torch.randn(tokens, 64)
            torch.testing.assert_close(compiled(x, rope=rope), block(x, rope=rope))


class Passes(TorchDispatchMode):
    """Operators of torch that read an activation, (B, T, ...), and write memory of their own."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        large = [a for a in args if isinstance(a, torch.Tensor) and a.ndim > 2]
        if func.namespace == "aten" and large and isinstance(result, torch.Tensor):
            own, *theirs = (place_of_storage(x.untyped_storage()) for x in (result, *large))
            if own not in theirs and "empty" not in str(func):
                self.seen.append(f"{func} {tuple(large[0].shape)}")
        return result


@pytest.mark.parametrize("family", ["eva02_norms", "dinov3", "rope_learnt", "aimv2", "internvl_6b"])
def test_a_block_passes_over_no_activation_in_pytorch(family, monkeypatch):
    """Forward and backward under autocast: no cast, no copy, no sum outside the kernels."""
    model, inputs = small(family)
    swap_in(model)
    block = next(m for m in model.modules() if getattr(m, "fused_level", "") == "block")
    calls = []
    block.register_forward_pre_hook(lambda m, a, k: calls.append((a, k)), with_kwargs=True)
    with torch.no_grad(), backend("torch"):
        model(**inputs) if isinstance(inputs, dict) else model(inputs)
    (x, *rest), given = calls[0]
    x = x.detach().clone().requires_grad_()
    if family == "rope_learnt":
        given = {**given, "rope": given["rope"].requires_grad_()}
    monkeypatch.setattr(fused, "is_traced", lambda: False)  # our mode knows our operators
    dy = torch.randn_like(x)
    with Passes() as passes, torch.autocast("cpu", torch.bfloat16):
        block.forward(x, *rest, **given).backward(dy)
    assert passes.seen == []
    assert family != "rope_learnt" or given["rope"].grad is not None


def test_mlcds_own_rotation_reads_tokens_before_heads():
    """Tables of one row are for all tokens: the kernel's have one for each."""
    host = small("mlcd")[0].double().encoder.layers[0].self_attn
    ours = copy.deepcopy(host)
    generator = torch.Generator().manual_seed(0)
    x, *tables = (
        torch.randn(*s, generator=generator).double() for s in ((2, 3, 64), *2 * [(1, 32)])
    )
    with backend("torch"):
        swap_in(ours)
        with watch(ours) as status:
            y = ours(x, tables)[0]
    assert [r.way for r in status.modules if r.level == "attention"] == ["fused"], str(status)
    torch.testing.assert_close(y, host(x, tables)[0], rtol=1e-6, atol=1e-6)
