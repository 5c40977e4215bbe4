"""Hosts that attend within windows without a bias of positions: Hiera's mask units, SAM 2 and 3."""

from __future__ import annotations

import copy

import pytest
import torch
from outside import positions

from fastvit_kernels import backend, swap_in, watch
from fastvit_kernels.swap.compare import model_errors
from fastvit_kernels.swap.hosts import attention
from tests.model_coverage.compare import difference, randomize

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")


def hiera_timm():
    return timm.create_model(
        "hiera_tiny_224",
        img_size=32,
        stages=(2, 2, 1),
        embed_dim=16,
        mask_unit_size=(4, 4),
        q_pool=2,
        mask_unit_attn=(True, True, False),
        num_classes=3,
        drop_path_rate=0.3,
    )


def hiera():
    config = transformers.HieraConfig(
        embed_dim=16,
        image_size=[32, 32],
        patch_stride=[4, 4],
        patch_kernel=[7, 7],
        patch_padding=[3, 3],
        depths=[2, 2, 1],
        num_heads=[1, 2, 4],
        embed_dim_multiplier=2.0,
        num_query_pool=2,
        query_stride=[2, 2],
        masked_unit_size=[4, 4],
        mlp_ratio=2.0,
        masked_unit_attention=[True, True, False],
        drop_path_rate=0.3,
    )
    return transformers.HieraModel(config)


def sam2():
    """Windows of 4 and 3, of which the grid of 4 has no whole number, and all of that grid."""
    config = transformers.Sam2HieraDetConfig(
        hidden_size=16,
        num_attention_heads=1,
        image_size=[32, 32],
        patch_kernel_size=[7, 7],
        patch_stride=[4, 4],
        patch_padding=[3, 3],
        query_stride=[2, 2],
        num_query_pool_stages=1,
        window_positional_embedding_background_size=[4, 4],
        blocks_per_stage=[2, 3],
        embed_dim_per_stage=[16, 32],
        num_attention_heads_per_stage=[1, 2],
        window_size_per_stage=[4, 3],
        global_attention_blocks=[4],
        mlp_ratio=2.0,
    )
    return transformers.Sam2HieraDetModel(config)


def sam2_timm():
    """Windows of 4 and 3 of grids of 8 and 4, and the whole grid, in a block that adds LayerScale's
    and DropPath's results."""
    return timm.models.hieradet_sam2.HieraDet(
        embed_dim=16,
        num_heads=1,
        stages=(2, 3),
        q_pool=1,
        q_stride=(2, 2),
        num_classes=3,
        window_spec=(4, 3),
        global_att_blocks=(3,),
        global_pos_size=(4, 4),
        init_values=0.5,
        drop_path_rate=0.3,
    )


def sam3():
    config = transformers.Sam3ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        pretrain_image_size=24,
        window_size=3,
        global_attn_indexes=[1],
    )
    return transformers.Sam3ViTModel(config)


# name -> (model, how many blocks pool their queries and stay the host's)
HOSTS = {
    "hiera_timm": (hiera_timm, 2),
    "hiera": (hiera, 2),
    "sam2": (sam2, 1),
    "sam2_timm": (sam2_timm, 1),
    "sam3": (sam3, 0),
}


def built(name):
    torch.manual_seed(0)
    model = randomize(HOSTS[name][0]())
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return model, {"x" if "timm" in name else "pixel_values": images}


@pytest.mark.parametrize("name", HOSTS)
def test_all_blocks_but_those_that_pool_are_fused(name):
    """With DropPath in training: the host's draws, to rounding."""
    model, inputs = built(name)
    pooling = HOSTS[name][1]
    with backend("torch"):
        assert difference(model, inputs) == ""
        report = swap_in(model)
        with watch(model) as status:
            model(**inputs)
    levels = [row.level for row in report.swapped]
    assert levels.count("block") == (2 if name == "sam3" else 5) - pooling, str(report)
    assert report.level == ("parts" if pooling else "block"), str(report)
    why = [r.reason for r in report.left]  # of the block, and of its attention
    assert why.count("it pools its queries") == 2 * pooling, str(report)
    assert not any(r.way == "host" for r in status.modules if r.level == "block"), str(status)


@pytest.mark.parametrize("name", HOSTS)
def test_windows_through_the_kernels(name):
    model, inputs = built(name)
    failed = [str(e) for e in model_errors(model.eval(), inputs) if not e.passed]
    assert not failed, "\n".join(failed)


def test_the_report_counts_what_a_window_sees():
    model, _ = built("sam3")
    report, weights = (
        swap_in(model.layers),
        sum(p.numel() for p in model.layers.parameters() if p.ndim == 2),
    )
    T, C = 197, 32
    assert report.flops == report.fused_flops == 2 * T * weights + 4 * T * C * (3**2 + T)


@pytest.mark.parametrize("name", ["hiera", "sam3"])
def test_one_graph_with_windows(name):
    model, inputs = built(name)
    swap_in(model.eval())
    torch.compiler.reset()
    with backend("torch"):
        wanted = model(**inputs)[0]
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)[0]
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


def test_who_watches_the_tables_gets_what_the_norm_gave():
    model, inputs = built("sam3")
    host, seen = copy.deepcopy(model), {}
    with backend("torch"):
        swap_in(model)
        for name, m in (("host", host), ("ours", model)):
            m.layers[0].rotary_emb.register_forward_pre_hook(
                lambda _, args, name=name: seen.__setitem__(name, args[0].detach())
            )
            m(**inputs)
    torch.testing.assert_close(seen["ours"], seen["host"], rtol=1e-5, atol=1e-5)


def test_shifted_windows_are_found_with_few_proofs(monkeypatch):
    """A mask by window is tried before any other: at MONAI's 343 tokens a window each costs a
    second."""
    block = randomize(positions.WindowAttention()).double()
    host = copy.deepcopy(block)
    report = swap_in(block, explain=True)
    assert str(report).count("attention projections") == 2, str(report)
    x = torch.randn(6, 8, 32, dtype=torch.float64)
    mask = -100.0 * (torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(2)) < 0.3).double()
    heads, taken = attention.Attention.fused_heads, []
    counted = lambda self, x, **more: taken.append(1) or heads(self, x, **more)  # noqa: E731
    monkeypatch.setattr(attention.Attention, "fused_heads", counted)
    for given in (mask, None):
        torch.testing.assert_close(block(x, given), host(x, given), rtol=1e-9, atol=1e-9)
    assert len(taken) == 2
