"""Towers of images that are padded to one length, and ViTMAE, which keeps some of the patches.

A padding mask stays in the kernels: one byte a key. A patch that is dropped is not read.
"""

from __future__ import annotations

import copy

import pytest
import torch

from fastvit_kernels import backend, swap_in
from fastvit_kernels.swap.compare import model_errors
from fastvit_kernels.swap.hosts import attend
from fastvit_kernels.swap.hosts.special import models
from tests.model_coverage.compare import difference, randomize
from tests.model_coverage.model_zoo import hf_small

transformers = pytest.importorskip("transformers")


def _padded(name):
    """A small tower and two images, of which the second has six patches of nine."""
    torch.manual_seed(0)
    model, inputs = hf_small(name)
    if name == "siglip2":
        inputs["spatial_shapes"] = torch.tensor([[3, 3], [2, 3]])
        inputs["pixel_attention_mask"] = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    else:
        places = inputs["pixel_position_ids"].clone()
        places[1, 6:] = -1
        inputs["pixel_position_ids"] = places
    return randomize(model).eval(), inputs


@pytest.fixture
def masks(monkeypatch):
    """The shapes of the masks that our attention takes, and what was read of masks."""
    shapes, read = [], []
    functions = {"attention": "attn_mask", "scaled_dot_product_attention": "attn_mask"}
    for name, argument in functions.items():
        original = getattr(attend, name)

        def counted(*args, _original=original, _argument=argument, **kwargs):
            mask = kwargs[_argument]
            shapes.append(None if mask is None else tuple(mask.shape))
            return _original(*args, **kwargs)

        monkeypatch.setattr(attend, name, counted)
    hides = attend._hides_keys
    monkeypatch.setattr(attend, "_hides_keys", lambda mask: read.append(1) or hides(mask))
    return shapes, read


@pytest.mark.parametrize("name", ["siglip2", "gemma4"])
def test_padding_is_a_mask_of_keys(name, masks):
    model, inputs = _padded(name)
    with backend("torch"):
        swapped = copy.deepcopy(model)
        report = swap_in(swapped)
        assert report.level == "block", str(report)
        assert difference(model, inputs) == ""
        for record in masks:
            record.clear()  # of proofs
        swapped(**inputs)
    shapes, read = masks
    assert shapes == [(2, 1, 1, 9)] * 2 and len(read) == 1
    narrow = {n: x.int() if x.dtype is torch.int64 else x for n, x in inputs.items()}
    assert torch.equal(swapped(**narrow)[0], swapped(**inputs)[0])
    failed = [str(e) for e in model_errors(model, inputs) if not e.passed]
    assert not failed, "\n".join(failed)


def test_other_masks_are_taken_as_they_are(masks):
    """Rows that differ; an added mask of which a sample sees no key, where softmax sees all; a mask
    that one layer after another gets, written to in between."""
    host = hf_small("siglip2")[0].encoder.layers[0].double()
    randomize(host)
    module = copy.deepcopy(host)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 5, 64, generator=generator).double()
    shown = (torch.arange(5) < torch.tensor([[5], [3]]))[:, None, None].repeat(1, 1, 5, 1)
    added = torch.zeros(shown.shape).double().masked_fill_(~shown, torch.finfo(torch.float64).min)
    rows, none, some = shown.clone(), added.clone(), added.clone()
    some[..., 1] = -0.5
    rows[0, 0, 2, :2] = False
    none[1] = torch.finfo(torch.float64).min
    with backend("torch"):
        assert swap_in(module).level == "block"
        for mask, keys in ((shown, 1), (rows, 5), (added, 1), (none, 5), (some, 5)):
            masks[0].clear()
            torch.testing.assert_close(module(x, mask), host(x, mask))
            assert masks[0] == [(2, 1, keys, 5)]
        shown[0, 0, :, 4] = False
        torch.testing.assert_close(module(x, shown), host(x, shown))
        shown[0, 0, 1] = True
        torch.testing.assert_close(module(x, shown), host(x, shown))
        learnt = added.clamp(min=-3).requires_grad_()
        masks[0].clear()
        ours, theirs = (torch.autograd.grad(m(x, learnt).sum(), learnt) for m in (module, host))
        torch.testing.assert_close(ours, theirs)
    assert masks[0] == []  # the host's


@pytest.fixture
def kept(monkeypatch):
    """The patches that each fused embedding keeps."""
    lists = []
    original = models.patch_embed

    def counted(*args, **kwargs):
        lists.append(kwargs["keep"])
        return original(*args, **kwargs)

    monkeypatch.setattr(models, "patch_embed", counted)
    return lists


def _mae(height=48, width=48):
    torch.manual_seed(0)
    config = transformers.ViTMAEConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=[height, width],
        patch_size=16,
        mask_ratio=0.6,
        decoder_num_attention_heads=2,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=1,
        decoder_intermediate_size=64,
    )
    images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))
    return randomize(transformers.ViTMAEForPreTraining(config)), {"pixel_values": images}


def test_mae_reads_the_patches_that_it_keeps(kept):
    """The whole model: its loss, mask and gradients, with the host's numbers."""
    model, inputs = _mae()
    with backend("torch"):
        report = swap_in(copy.deepcopy(model))
        assert report.level == "block" and not report.pytorch, str(report)
        assert "ViTMAEEmbeddings" in {row.host for row in report.swapped}, str(report)
        assert difference(model, inputs) == ""
    kept.clear()
    failed = [str(e) for e in model_errors(model, inputs) if not e.passed]
    assert not failed, "\n".join(failed)
    assert [tuple(keep.shape) for keep in kept] == [(2, 3)]


def test_mae_keeps_what_it_is_told(kept):
    host, inputs = _mae()
    model = copy.deepcopy(host)
    noise = torch.randn(2, 9, generator=torch.Generator().manual_seed(2))
    with backend("torch"):
        swap_in(model)
        kept.clear()
        ours, theirs = (m.vit.embeddings(**inputs, noise=noise) for m in (model, host))
        torch.testing.assert_close(ours, theirs)
        model.config.mask_ratio = host.config.mask_ratio = 0.2
        ours, theirs = (m.vit.embeddings(**inputs, noise=noise) for m in (model, host))
        torch.testing.assert_close(ours, theirs)
    assert kept[0].tolist() == noise.argsort(1)[:, :3].tolist()
    assert [tuple(keep.shape) for keep in kept] == [(2, 3), (2, 7)]


def test_mae_resamples_positions_as_the_host(kept):
    """The host resamples them for each image that is not square, one of its own size too."""
    host, inputs = _mae(64, 16)  # four patches in a column
    model, own = copy.deepcopy(host), inputs["pixel_values"]
    noise = torch.randn(2, 4, generator=torch.Generator().manual_seed(2))
    results = []
    with backend("torch"):
        assert "ViTMAEEmbeddings" in {row.host for row in swap_in(model).swapped}
        ours, theirs = model.vit.embeddings, host.vit.embeddings
        kept.clear()
        for images in (own, own.mT, own.reshape(2, 3, 32, 32)):
            for resampled in (True, False):
                given = dict(noise=noise, interpolate_pos_encoding=resampled)
                if resampled or images is own:
                    results.append(theirs(images, **given))
                    torch.testing.assert_close(ours(images, **given), results[-1])
                else:
                    with pytest.raises(ValueError, match="doesn't match"):
                        ours(images, **given)
    assert len(kept) == 1  # not resampled
    assert not torch.allclose(results[0][0], results[1][0])


def test_mae_otherwise_is_the_hosts(kept, monkeypatch):
    host, inputs = _mae()
    model = copy.deepcopy(host)
    noise = torch.randn(2, 9, generator=torch.Generator().manual_seed(2))
    with backend("torch"):
        swap_in(model)
        ours, theirs = model.vit.embeddings, host.vit.embeddings
        kept.clear()
        other = torch.randn(2, 3, 32, 64)
        with pytest.raises(ValueError, match="doesn't match"):
            ours(other)
        wide = dict(interpolate_pos_encoding=True, noise=noise[:, :8])
        torch.testing.assert_close(ours(other, **wide), theirs(other, **wide))
        model.config.mask_ratio = host.config.mask_ratio = 1.0  # none is kept
        torch.testing.assert_close(ours(**inputs, noise=noise), theirs(**inputs, noise=noise))
        model.config.mask_ratio = host.config.mask_ratio = 0.5
        called = []
        hook = ours.patch_embeddings.register_forward_hook(lambda *args: called.append(1))
        torch.testing.assert_close(ours(**inputs, noise=noise), theirs(**inputs, noise=noise))
        hook.remove()
        monkeypatch.setattr(
            type(theirs), "random_masking", lambda self, x, noise=None: (x, None, None)
        )
        torch.testing.assert_close(ours(**inputs)[0], theirs(**inputs)[0])
    assert called == [1] and kept == []
