"""Masked pre-training: patches that are kept, a token in place of others, and the decoder."""

from __future__ import annotations

import pytest
import torch
from numerics import DEVICE
from torch import nn

from fastvit_kernels import MaskedDecoder, VisionTransformer, backend, load_weights
from tests.support.model_parity import randomise

SIZES = dict(img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=0)


def encoder(**settings):
    torch.manual_seed(0)
    return randomise(VisionTransformer(**{**SIZES, "mask_token": True, **settings}))


def drawn(keep=5):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, 16, 16, generator=generator).to(DEVICE)
    order = torch.rand(2, 16, generator=generator).argsort(1).to(DEVICE)
    return images, order[:, :keep], order[:, keep:]


@pytest.mark.parametrize("rope_type", ["", "dinov3"])
def test_keep_reads_no_dropped_patch(rope_type):
    rope = dict(rope_type=rope_type)
    model = encoder(reg_tokens=1, **rope)
    images, keep, hidden = drawn()
    pixels = torch.zeros(2, 16, device=DEVICE).scatter(1, hidden, float("nan"))
    pixels = pixels.view(2, 1, 4, 4).repeat_interleave(4, 2).repeat_interleave(4, 3)
    images = (images + pixels).requires_grad_()
    y = model.forward_features(images, keep=keep)
    assert y.shape == (2, 2 + 5, 32) and y.isfinite().all()
    y.square().sum().backward()
    assert (images.grad[pixels.expand(-1, 3, -1, -1).isnan()] == 0).all()
    with backend("torch"):
        wanted = model.forward_features(images.detach().nan_to_num(), keep=keep)
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    # the order of the kept patches is that of the tokens
    turned = model.forward_features(images.detach(), keep=keep.flip(1))
    torch.testing.assert_close(turned[:, 2:], y[:, 2:].flip(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("no_embed_class", [False, True])
def test_mask_token(no_embed_class):
    """As SimMIM and iBOT define it, by torch: the token, then positions."""
    model = encoder(no_embed_class=no_embed_class)
    images, _, hidden = drawn()
    mask = torch.zeros(2, 16, dtype=torch.bool, device=DEVICE).scatter(1, hidden[:, :7], True)
    mask[1, :3] = False  # other counts
    got, seen = [], []
    hook = model.blocks.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    got = model.forward_features(images, mask=mask)
    hook.remove()
    patches = model.patch_embed.proj(images).flatten(2).mT
    patches = torch.where(mask.unsqueeze(-1), model.mask_token, patches)
    if no_embed_class:
        wanted = torch.cat([model.cls_token.expand(2, -1, -1), patches + model.pos_embed], 1)
    else:
        wanted = torch.cat([model.cls_token.expand(2, -1, -1), patches], 1) + model.pos_embed
    torch.testing.assert_close(seen[0], wanted, rtol=1e-4, atol=1e-5)
    params = [model.mask_token, model.pos_embed, model.patch_embed.proj.weight]
    upstream = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad(seen[0], params, upstream),
        torch.autograd.grad(wanted, params, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert got.isfinite().all()
    none = torch.zeros_like(mask)
    assert torch.equal(model.forward_features(images, mask=none), model.forward_features(images))


def test_masks_are_dinov2s():
    """The authors' token, (1, C), is loaded; features of masked images are the host's."""
    transformers = pytest.importorskip("transformers")
    host = randomise(
        transformers.Dinov2Model(
            transformers.Dinov2Config(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=16,
                patch_size=4,
            )
        )
    )
    model = encoder(init_values=1.0)
    report = load_weights(model, host.state_dict())
    assert not (report.missing or report.unexpected)
    images, _, hidden = drawn()
    mask = torch.zeros(2, 16, dtype=torch.bool, device=DEVICE).scatter(1, hidden[:, :7], True)
    wanted = host(images, bool_masked_pos=mask).last_hidden_state
    torch.testing.assert_close(
        model.forward_features(images, mask=mask), wanted, rtol=1e-4, atol=1e-4
    )


def test_the_decoder_is_maes():
    """Against MAE's own order: tokens put back in place, the mask token elsewhere, all decoded."""
    model = encoder()
    images, keep, hidden = drawn()
    decoder = randomise(MaskedDecoder(model, out_dim=48, embed_dim=16, depth=2, num_heads=2))
    assert decoder.no_weight_decay() <= dict(decoder.named_parameters()).keys()
    features = model.forward_features(images, keep=keep).detach()
    got = decoder(features, keep, hidden)
    x = decoder.embed(features)
    whole = decoder.mask_token.expand(2, 16, -1)
    whole = whole.scatter(1, keep.unsqueeze(-1).expand(-1, -1, 16), x[:, 1:])
    y = torch.cat([x[:, :1], whole + decoder.pos_embed], 1)
    y = decoder.head(decoder.norm(decoder.blocks(y)))[:, 1:]
    wanted = y.gather(1, hidden.unsqueeze(-1).expand(-1, -1, 48))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    upstream, params = torch.randn_like(got), list(decoder.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(got, params, upstream),
        torch.autograd.grad(wanted, params, upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_decoder_target_sets():
    """JEPA: several sets, of two lengths, for one context: one pass of the blocks."""
    model = encoder()
    images, keep, hidden = drawn()
    predictor = randomise(MaskedDecoder(model, out_dim=32, embed_dim=16, depth=1, num_heads=2))
    features = model.forward_features(images, keep=keep)
    sets = [hidden[:, :4], hidden[:, 3:6], hidden[:, 5:9]]
    passes = []
    handle = predictor.blocks[0].register_forward_hook(lambda *call: passes.append(call))
    together = predictor(features, keep, sets)
    handle.remove()
    assert len(passes) == 1
    assert [y.shape for y in together] == [(2, 4, 32), (2, 3, 32), (2, 4, 32)]
    for y, each in zip(together, sets, strict=True):
        torch.testing.assert_close(y, predictor(features, keep, each), rtol=1e-5, atol=1e-5)
    params = [*predictor.parameters()]
    every = (
        [y.square().sum() for y in together],
        [predictor(features, keep, each).square().sum() for each in sets],
    )
    ours, theirs = (torch.autograd.grad(sum(x), params, retain_graph=True) for x in every)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_masked_rejects():
    model, (images, keep, hidden) = encoder(), drawn()
    mask = torch.zeros(2, 16, dtype=torch.bool, device=DEVICE)
    decoder = MaskedDecoder(model, out_dim=4, embed_dim=16, depth=1, num_heads=2).to(DEVICE)
    features = model.forward_features(images, keep=keep).detach()
    plain = encoder(mask_token=False)
    for error, message, call in (
        (
            ValueError,
            "keep or mask, got both",
            lambda: model.forward_features(images, keep=keep, mask=mask),
        ),
        (
            ValueError,
            r"torch.int64 \(2, 1 to 16\), got torch.int64 \(2, 0\)",
            lambda: model.forward_features(images, keep=keep[:, :0]),
        ),
        (ValueError, "got torch.int32", lambda: model.forward_features(images, keep=keep.int())),
        (
            ValueError,
            r"torch.bool \(2, 16\), got torch.bool \(2, 15\)",
            lambda: model.forward_features(images, mask=mask[:, 1:]),
        ),
        (TypeError, "mask must be a Tensor", lambda: model.forward_features(images, mask=[True])),
        (
            ValueError,
            "mask_token=True, got one without",
            lambda: plain.forward_features(images, mask=mask),
        ),
        (ValueError, "1 [+] 4 tokens, got 6", lambda: decoder(features, keep[:, 1:], hidden)),
        (ValueError, "at least one set, got none", lambda: decoder(features, keep, [])),
        (
            ValueError,
            r"targets must be torch.int64 \(2, 1 to \d+\), got torch.int64 \(1, 11\)",
            lambda: decoder(features, keep, [hidden[:1]]),
        ),
        (
            TypeError,
            "encoder must be a VisionTransformer, got Linear",
            lambda: MaskedDecoder(nn.Linear(2, 2), out_dim=4),
        ),
    ):
        with pytest.raises(error, match=message):
            call()
