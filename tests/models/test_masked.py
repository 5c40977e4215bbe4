"""Patches that are kept or drawn, a token in place of others, the decoder of masked pre-training;
patch embeddings that are called."""

from __future__ import annotations

import pytest
import torch
from numerics import DEVICE, rand
from torch import nn

import fastvit_kernels as fk
from fastvit_kernels.models.packing import Crops
from tests.support.model_parity import randomise

SIZES = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=0)


def encoder(**settings):
    torch.manual_seed(0)
    return randomise(fk.VisionTransformer(**{**SIZES, "mask_token": True, **settings}))


def drawn():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, 16, 16, generator=generator).to(DEVICE)
    order = torch.rand(2, 16, generator=generator).argsort(1).to(DEVICE)
    return images, order[:, :5], order[:, 5:]


def assert_close_gradients(got, wanted, params):
    upstream = torch.randn_like(wanted)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(y, params, upstream) for y in (got, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rope_type", ["", "dinov3"])
def test_keep_reads_no_dropped_patch(rope_type):
    model = encoder(reg_tokens=1, rope_type=rope_type)
    images, keep, hidden = drawn()
    pixels = torch.zeros(2, 16, device=DEVICE).scatter(1, hidden, float("nan"))
    pixels = pixels.view(2, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    images = (images + pixels).requires_grad_()
    y = model.forward_features(images, keep=keep)
    assert y.shape == (2, 2 + 5, 32) and y.isfinite().all()
    y.square().sum().backward()
    assert (images.grad[pixels.expand(-1, 3, -1, -1).isnan()] == 0).all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    with fk.backend("torch"):
        wanted = model.forward_features(images.detach().nan_to_num(), keep=keep)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    # all patches in another order: the same tokens, each with its own position
    images, order = images.detach().nan_to_num(), torch.cat([keep, hidden], 1)
    whole, turned = model.forward_features(images), model.forward_features(images, keep=order)
    wanted = whole[:, 2:].gather(1, order.unsqueeze(-1).expand(-1, -1, 32))
    torch.testing.assert_close(turned[:, 2:], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("no_embed_class", [False, True])
def test_mask_token(no_embed_class):
    """As SimMIM and iBOT define it, by torch: the token, then positions."""
    model = encoder(no_embed_class=no_embed_class)
    images, _, hidden = drawn()
    mask = torch.zeros(2, 16, dtype=torch.bool, device=DEVICE).scatter(1, hidden[:, :7], True)
    mask[1, :3] = False  # other counts
    patches = model.patch_embed.proj(images).flatten(2).mT
    patches = torch.where(mask.unsqueeze(-1), model.mask_token, patches)
    prefix = model.cls_token.expand(2, -1, -1)
    if no_embed_class:
        tokens = torch.cat([prefix, patches + model.pos_embed], 1)
    else:
        tokens = torch.cat([prefix, patches], 1) + model.pos_embed
    params = [model.mask_token, model.pos_embed, model.patch_embed.proj.weight]
    got = model.forward_features(images, mask=mask)
    assert_close_gradients(got, model.norm(model.blocks(tokens)), params)


def test_the_decoder_is_maes():
    """Against MAE's own order: tokens put back in place, the mask token elsewhere, all decoded."""
    model = encoder()
    images, keep, hidden = drawn()
    decoder = randomise(fk.MaskedDecoder(model, out_dim=48, embed_dim=16, depth=2, num_heads=2))
    assert decoder.no_weight_decay() <= dict(decoder.named_parameters()).keys()
    features = model.forward_features(images, keep=keep).detach()
    x = decoder.embed(features)
    whole = decoder.mask_token.expand(2, 16, -1)
    whole = whole.scatter(1, keep.unsqueeze(-1).expand(-1, -1, 16), x[:, 1:])
    y = torch.cat([x[:, :1], whole + decoder.pos_embed], 1)
    y = decoder.head(decoder.norm(decoder.blocks(y)))[:, 1:]
    wanted = y.gather(1, hidden.unsqueeze(-1).expand(-1, -1, 48))
    got = decoder(features, keep, hidden)
    assert_close_gradients(got, wanted, list(decoder.parameters()))


def test_decoder_target_sets():
    """JEPA: several sets, of two lengths, for one context: one pass of the blocks."""
    model = encoder()
    images, keep, hidden = drawn()
    options = dict(qk_norm=True, init_values=0.5)
    predictor = fk.MaskedDecoder(model, out_dim=32, embed_dim=16, depth=1, num_heads=2, **options)
    predictor = randomise(predictor)
    features = model.forward_features(images, keep=keep).detach()
    sets = [hidden[:, :4], hidden[:, 3:6], hidden[:, 5:9]]
    passes = []
    handle = predictor.blocks[0].register_forward_hook(lambda *call: passes.append(call))
    together = predictor(features, keep, sets)
    handle.remove()
    assert len(passes) == 1
    assert [y.shape for y in together] == [(2, 4, 32), (2, 3, 32), (2, 4, 32)]
    alone = [predictor(features, keep, each) for each in sets]
    params = list(predictor.parameters())
    assert_close_gradients(torch.cat(together, 1), torch.cat(alone, 1), params)


@pytest.mark.parametrize("mode", ["mask", "skip"])
def test_drop_path_of_packed_sets(mode):
    """As of a batch: the same draws from the same seed, output and gradients."""
    block = fk.Block(32, 2, drop_path=0.5, drop_path_mode=mode, init_values=0.5)
    block, x, crops = randomise(block).train(), rand(5, 7, 32), Crops([(5, 7)], DEVICE)
    results = []
    for call in (block, lambda x: crops.split(block(crops.join([x]), packing=crops))[0]):
        torch.manual_seed(3)
        results.append(call(x))
    assert_close_gradients(results[1], results[0], [x, *block.parameters()])


def test_packed_sets_of_other_tokens_are_refused():
    block, crops = fk.Block(32, 2).to(DEVICE), Crops([(2, 3)], DEVICE)
    for tokens in (5, 7):
        with pytest.raises(ValueError, match=rf"the 6 tokens of packing, got \({tokens}, 32\)"):
            block(rand(tokens, 32), packing=crops)


def test_skipped_packed_sets_may_be_empty():
    block = fk.Block(32, 2, drop_path=0.5, drop_path_mode="skip").to(DEVICE).train()
    for sizes in ([(0, 3), (4, 5)], [(0, 3)]):
        crops = Crops(sizes, DEVICE)
        assert block(rand(crops.ends[-1], 32), packing=crops).shape == (crops.ends[-1], 32)


def test_skipped_samples_turn_by_their_own_patches():
    """Positions of patches that each image keeps, for the samples that a branch keeps."""
    model = encoder(rope_type="dinov3", drop_path="skip", drop_path_rate=0.5).train()
    images, keep = drawn()[0].repeat(2, 1, 1, 1), drawn()[1].repeat(2, 1)
    results = []
    for way in ("triton", "torch"):
        torch.manual_seed(3)
        with fk.backend(way):
            results.append(model.forward_features(images, keep=keep))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    # with half of the samples dropped, a kept one's branch counts twice
    block, x, rope = model.blocks[-1], rand(4, 6, 32), rand(2, 4, 5, 16).unbind(0)
    for p in block.mlp.fc2.parameters():
        nn.init.zeros_(p)
    got, branch = block(x, rope) - x, block.eval()(x, rope) - x
    kept = got.abs().amax((1, 2)) > 0
    assert kept.sum() == 2
    torch.testing.assert_close(got[kept], 2 * branch[kept], rtol=1e-4, atol=1e-4)


def test_masked_rejects():
    model, plain, (images, keep, hidden) = encoder(), encoder(mask_token=False), drawn()
    mask = torch.zeros(2, 16, dtype=torch.bool, device=DEVICE)
    decoder = fk.MaskedDecoder(model, out_dim=4, embed_dim=16, depth=1, num_heads=2).to(DEVICE)
    features = model.forward_features(images, keep=keep).detach()
    of_int64, of_bool = r"torch.int64 \(2, 1 to 16\), got ", r"torch.bool \(2, 16\), got torch.bool"
    for message, given in {
        "keep or mask, got both": dict(keep=keep, mask=mask),
        rf"{of_int64}torch.int64 \(2, 0\)": dict(keep=keep[:, :0]),
        f"{of_int64}torch.int32": dict(keep=keep.int()),
        rf"{of_bool} \(2, 15\)": dict(mask=mask[:, 1:]),
        "mask must be a Tensor": dict(mask=[True]),
    }.items():
        with pytest.raises((TypeError, ValueError), match=message):
            model.forward_features(images, **given)
    with pytest.raises(ValueError, match="mask_token=True, got one without"):
        plain.forward_features(images, mask=mask)
    for message, given in {
        "1 [+] 4 tokens, got 6": (keep[:, 1:], hidden),
        "at least one set, got none": (keep, []),
        r"targets must be torch.int64 \(2, 1 to \d+\), got torch.int64 \(1, 11\)": (
            keep,
            [hidden[:1]],
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            decoder(features, *given)
    with pytest.raises(TypeError, match="encoder must be a VisionTransformer, got Linear"):
        fk.MaskedDecoder(nn.Linear(2, 2), out_dim=4)


@pytest.mark.parametrize("rate", [0.6, 0.99])  # one patch is kept at any rate
def test_patch_dropout_matches_timm(rate):
    """The same draws from the same seed, hence the same training step."""
    timm = pytest.importorskip("timm")
    theirs = randomise(timm.models.VisionTransformer(**SIZES, patch_drop_rate=rate))
    ours = fk.VisionTransformer(**SIZES, patch_drop_rate=rate).to(DEVICE)
    fk.load_weights(ours, theirs.state_dict())
    images = torch.randn(3, 3, 16, 16, device=DEVICE)
    results = []
    for model in (ours.train(), theirs.train()):
        torch.manual_seed(7)
        out, weights = model(images), dict(model.named_parameters())
        some = [weights[f"{n}.weight"] for n in ("patch_embed.proj", "blocks.0.attn.proj")]
        results.append((out, *torch.autograd.grad(out.square().mean(), some)))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)
    ours.eval()
    assert torch.equal(ours(images), ours(images))


OTHER = {
    "stride": dict(kernel_size=4, stride=2),
    "padding": dict(kernel_size=4, stride=4, padding=1),
    "dilation": dict(kernel_size=4, stride=4, dilation=3),
    "groups": dict(kernel_size=4, stride=4, groups=3),
}


@pytest.mark.parametrize("how", OTHER)
def test_replaced_patch_conv(how):
    """Its stride set for dense features, or another one in its place."""
    module, images = fk.PatchEmbed(16, 4, embed_dim=33).to(DEVICE), torch.randn(2, 3, 16, 16)
    module.proj = torch.nn.Conv2d(3, 33, **OTHER[how]).to(DEVICE)
    images = images.to(DEVICE)
    assert torch.equal(module(images), module.proj(images).flatten(2).mT)


def test_keep_with_hooked_proj():
    """The path that calls the projection gathers afterwards."""
    model, (images, keep, _) = encoder(reg_tokens=1), drawn()
    wanted = model.forward_features(images, keep=keep)
    model.patch_embed.proj.register_forward_hook(lambda *_: None)
    got = model.forward_features(images, keep=keep)
    assert_close_gradients(got, wanted, [model.pos_embed, model.patch_embed.proj.weight])
