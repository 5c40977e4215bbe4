"""Hosts whose scores have a learnt bias of positions, some in windows: BEiT, Swin, SAM, Data2Vec.

Every table has its gradient, in a training step in float64 and through the kernels by the 2x rule.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch

from fastvit_kernels import backend, swap_in, watch
from fastvit_kernels.swap.compare import model_errors
from fastvit_kernels.swap.hosts.grids import Windows, with_decomposed
from tests.model_coverage.compare import difference, randomize

timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")
transformers = pytest.importorskip("transformers")
swin_unetr = pytest.importorskip("monai.networks.nets.swin_unetr")

NARROW: dict[str, Any] = dict(embed_dim=16, depth=1, num_heads=2, num_classes=3, img_size=32)
TOWER: dict[str, Any] = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    image_size=32,
    patch_size=8,
    drop_path_rate=0.2,
)


def _timm_swin(version: str = ""):  # grids of 6 and 3: padded, and one as large as its window
    home = importlib.import_module(f"timm.models.swin_transformer{version.lower()}")
    return getattr(home, "SwinTransformer" + version.removeprefix("_"))(
        img_size=24,
        patch_size=4,
        embed_dim=16,
        depths=(2, 1),
        num_heads=(2, 2),
        window_size=4,
        num_classes=3,
        drop_path_rate=0.3,
    )


def _torchvision_swin(version: str = ""):
    from torchvision.models import swin_transformer as home

    parts = {}
    if version:
        parts = dict(block=home.SwinTransformerBlockV2, downsample_layer=home.PatchMergingV2)
    return home.SwinTransformer(
        patch_size=[4, 4],
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=[4, 4],
        stochastic_depth_prob=0.3,
        num_classes=3,
        **parts,
    )


def _hf_swin(version: str = ""):
    config, model = (getattr(transformers, f"Swin{version}{end}") for end in ("Config", "Model"))
    return model(
        config(
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[2, 1],
            num_heads=[2, 2],
            window_size=4,
            drop_path_rate=0.3,
        )
    )


class _Monai(torch.nn.Module):
    """SwinUNETR's encoder, without its decoder of convolutions."""

    def __init__(self):
        super().__init__()
        self.encoder = swin_unetr.SwinTransformer(
            1,
            8,
            (2, 3, 2),
            (2, 2, 2),
            depths=(2, 1, 1, 1),
            num_heads=(2, 2, 2, 2),
            drop_path_rate=0.3,
            spatial_dims=3,
        )

    def forward(self, images):
        return self.encoder(images)[-1]


def _beit(name: str, **settings: Any):
    return lambda: timm.create_model(name, **NARROW, **settings)


def _sam():  # windows of a grid of 3 that is padded, then all of it
    settings = NARROW | dict(depth=2, img_size=24, patch_size=8, window_size=2)
    return timm.create_model("samvit_base_patch16", global_attn_indexes=(1,), **settings)


def _tower(family: str, **settings: Any):
    config, model = (getattr(transformers, family + end) for end in ("Config", "Model"))
    return lambda: model(config(**TOWER, **settings))


MODELS: dict[str, tuple[Any, Any]] = {
    "swin_monai": (_Monai, (1, 16, 20, 8)),
    "swin_timm": (_timm_swin, 24),
    "swin_torchvision": (_torchvision_swin, 24),
    "swin_transformers": (_hf_swin, 32),
    "swinv2_timm": (lambda: _timm_swin("_V2"), 24),
    "swinv2_torchvision": (lambda: _torchvision_swin("V2"), 24),
    "swinv2_transformers": (lambda: _hf_swin("v2"), 32),
    "beit_timm": (_beit("beit_base_patch16_224"), 32),
    "sam_timm": (_sam, 24),
    "relpos_timm": (_beit("vit_relpos_small_patch16_224"), 32),
    "data2vec": (_tower("Data2VecVision", use_relative_position_bias=True), 32),
    "beit_transformers": (_tower("Beit", use_relative_position_bias=True), 32),
}


TOWERS = [build for build, _ in (MODELS[n] for n in MODELS if "transformers" in n or "data" in n)]


def _built(name: str):
    build, size = MODELS[name]
    torch.manual_seed(0)
    model = randomize(build())
    shape = (3, size, size) if isinstance(size, int) else size
    images = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    return model, {"pixel_values": images} if build in TOWERS else images


@pytest.mark.parametrize("name", MODELS)
def test_a_learnt_bias_trains_in_fused_blocks(name):
    model, inputs = _built(name)
    with backend("torch"):
        report = swap_in(copy.deepcopy(model))
        assert report.level == "block", str(report)
        assert {*report.pytorch} <= {"q and k normalised"} and not report.uncounted, str(report)
        assert difference(model, inputs) == ""


@pytest.mark.parametrize("name", MODELS)
def test_a_bias_is_added_by_a_plan_as_well(name):
    model, inputs = _built(name)
    swap_in(model.eval())
    given = inputs if isinstance(inputs, dict) else {}
    with backend("torch"), torch.no_grad():
        calls = [model(**given) if given else model(inputs) for _ in range(3)]
    first, *others = [getattr(y, "last_hidden_state", y) for y in calls]
    for y in others:
        assert torch.equal(y, first)


def test_a_layer_scale_of_one_keeps_its_block():
    model = _tower("Beit", layer_scale_init_value=0.0)()
    assert model.layers[0].lambda_1 == 1.0
    with backend("torch"):
        assert "BeitLayer\n  block, by the table of its library: proven" in str(
            swap_in(copy.deepcopy(model), explain=True)
        )
        assert difference(model, {"pixel_values": torch.randn(2, 3, 32, 32)}) == ""


@pytest.mark.parametrize(
    "name",
    ["swin_timm", "swin_torchvision", "swinv2_timm", "data2vec", "beit_timm", "sam_timm"],
)
def test_a_learnt_bias_through_the_kernels(name):
    model, inputs = _built(name)
    model.eval()
    failed = [str(e) for e in model_errors(model, inputs) if not e.passed]
    assert not failed, "\n".join(failed)


def test_another_grid_is_the_hosts_to_interpolate():
    block = _built("sam_timm")[0].blocks[1]
    swapped = copy.deepcopy(block)
    assert swap_in(swapped).level == "block"
    for grid in ((3, 3), (4, 3)):
        x = torch.randn(1, *grid, 16)
        torch.testing.assert_close(swapped(x), block(x))


def test_what_drops_by_window_is_left_to_the_host():
    model = _built("sam_timm")[0]
    for block in model.blocks:
        block.drop_path1 = timm.layers.DropPath(0.3)
    report = swap_in(model)
    assert [s.host for s in report.swapped if s.level == "block"] == ["Block"], str(report)
    assert any(row.reason == "it drops by window" for row in report.left), str(report)


@pytest.mark.parametrize("always_partition", [False, True])
def test_a_grid_as_large_as_a_window(always_partition):
    """transformers' Swin does not shift there, but for who asks it to."""
    layer = _hf_swin().encoder.layers[0].blocks[1].eval()
    swapped = copy.deepcopy(layer)
    with backend("torch"):
        assert swap_in(swapped).level == "block"
        for grid in ((8, 8), (4, 4), (5, 7)):
            x = torch.randn(2, grid[0] * grid[1], 16)
            ours, theirs = (m(x, grid, always_partition=always_partition) for m in (swapped, layer))
            torch.testing.assert_close(ours[0], theirs[0])
            for m in (swapped, layer):  # as it was made
                m.window_size, m.shift_size = 4, 2


def test_a_mask_of_the_grid_that_comes():
    from timm.models.swin_transformer import SwinTransformerBlock

    block = SwinTransformerBlock(
        16, (8, 8), 2, window_size=4, shift_size=2, always_partition=True, dynamic_mask=True
    )
    swapped = copy.deepcopy(randomize(block))
    with backend("torch"):
        assert swap_in(swapped).level == "block"
        for grid in ((8, 8), (12, 7), (4, 16)):
            x = torch.randn(2, *grid, 16)
            with watch(swapped) as status:
                torch.testing.assert_close(swapped(x), block(x), rtol=1e-4, atol=1e-5)
            assert status.modules[0].way == "fused"


def test_decomposed_positions_are_made_where_the_queries_are():
    q, k, v = torch.empty(3, 1, 2, 12, 8, device="meta").unbind(0)
    along = torch.empty(5, 8, device="meta"), torch.empty(7, 8, device="meta")
    wide = with_decomposed(q, k, v, 1.0, along, (3, 4))
    assert [(tuple(t.shape), t.device.type) for t in wide] == [((1, 2, 12, 16), "meta")] * 3


def test_sam_that_forms_its_scores():
    """What hooks the probabilities gets them."""
    block = _built("sam_timm")[0].blocks[1].eval()
    block.attn.fused_attn = False
    swapped = copy.deepcopy(block)
    x = torch.randn(2, 3, 3, 16)
    with backend("torch"):
        assert swap_in(swapped).level == "block"
        torch.testing.assert_close(swapped(x), block(x), rtol=1e-4, atol=1e-5)
        for m in (block, swapped):
            m.attn.attn_drop.register_forward_hook(lambda m, args, out: out * 1.5)
        torch.testing.assert_close(swapped(x), block(x), rtol=1e-4, atol=1e-5)


def test_sam_that_norms_queries_and_keys():
    """Its positions read the normed queries; a hook on a norm gets the host's."""
    sam = pytest.importorskip("timm.models.vision_transformer_sam")
    block = sam.Block(16, 2, qk_norm=True, use_rel_pos=True, window_size=2, input_size=(3, 3))
    randomize(block)
    swapped, shapes = copy.deepcopy(block.eval()), []
    x = torch.randn(2, 3, 3, 16)
    with backend("torch"):
        assert swap_in(swapped).level == "block"
        torch.testing.assert_close(swapped(x), block(x), rtol=1e-4, atol=1e-5)
        for m in (block, swapped):
            m.attn.q_norm.register_forward_hook(lambda m, args, out: shapes.append(out.shape))
        torch.testing.assert_close(swapped(x), block(x), rtol=1e-4, atol=1e-5)
    assert len(shapes) == 2 and len({*shapes}) == 1


def test_a_scale_of_cosines_stays_below_100():
    model, images = _built("swinv2_timm")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("logit_scale"):
                p.copy_(torch.tensor([[[6.0]], [[2.0]]]))
    with backend("torch"):
        swapped = copy.deepcopy(model.double().eval())
        swap_in(swapped)
        torch.testing.assert_close(swapped(images.double()), model(images.double()))


@pytest.mark.parametrize("family", ["Beit", "Data2VecVision"])
def test_a_bias_of_another_grid(family):
    model = randomize(_tower(family, use_relative_position_bias=True)()).eval()
    swapped, images = copy.deepcopy(model), torch.randn(1, 3, 48, 40)
    with backend("torch"):
        swap_in(swapped)
        found = [m(images, interpolate_pos_encoding=True)[0] for m in (swapped, model)]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_parts_inside_are_reported_by_their_names():
    model = _tower("Data2VecVision", hidden_dropout_prob=0.1)()
    rows = {row.name: row.reason for row in swap_in(model).left}
    for part in ("output.dropout", "attention.output.dropout"):
        assert "a kernel of its own" in rows[f"encoder.layer.0.{part}"], rows


def test_data2vec_that_forms_its_scores():
    torch.manual_seed(0)
    settings = dict(use_relative_position_bias=True, attn_implementation="eager")
    model = randomize(_tower("Data2VecVision", **settings)()).eval()
    swapped = copy.deepcopy(model)
    assert "it forms the scores" in str(swap_in(swapped))
    images = torch.randn(1, 3, 32, 32)
    ours, theirs = (m(images, output_attentions=True).attentions for m in (swapped, model))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pads_first", [False, True])
def test_windows_are_joined_as_they_were_cut(pads_first):
    x = torch.arange(2.0 * 5 * 7).view(2, 5, 7, 1) + 1
    windows = Windows((5, 7), (2, 3), (1, 2), pads_first)
    cut = windows.cut(x)
    assert cut.shape == (18, 6, 1)
    assert cut.eq(0).sum() == 2 * (6 * 9 - 5 * 7)
    torch.testing.assert_close(windows.joined(cut), x)
