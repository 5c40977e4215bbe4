"""Text towers and the CLIP models that have them: a mask that the caller gives to every block."""

from __future__ import annotations

import copy

import pytest
import torch
from outside import others
from torch import nn

from fastvit_kernels import backend, swap_in, watch
from fastvit_kernels.swap.compare import model_errors
from fastvit_kernels.swap.facts import is_recognised, level_of
from tests.model_coverage.compare import difference, randomize

GENERATOR = torch.Generator().manual_seed(0)
IMAGES, TEXTS = torch.randn(2, 3, 16, 16, generator=GENERATOR), torch.arange(12).view(2, 6)
TRIANGLE = torch.full((6, 6), float("-inf")).triu(1)


def stand_in():
    return others.Clip(), (IMAGES, TEXTS)


def open_clip():
    """Its own, which CI does not install."""
    model = pytest.importorskip("open_clip.model")
    sizes = dict(layers=2, width=32)
    images = model.CLIPVisionCfg(head_width=16, patch_size=8, image_size=16, **sizes)
    texts = model.CLIPTextCfg(context_length=6, vocab_size=20, heads=2, **sizes)
    return model.CLIP(16, images, texts), (IMAGES, TEXTS)


def coca():
    """Its text tower has a mask for each head; a class token that texts see is its last."""
    model = pytest.importorskip("open_clip.transformer")
    sizes = dict(width=32, layers=2, heads=2, output_dim=16)
    tower = model.TextTransformer(6, 20, embed_cls=True, **sizes)
    return tower, (torch.tensor([[3, 4, 5, 6, 7], [8, 9, 1, 0, 0]]),)


def hf(name):
    """Of transformers, texts of two lengths."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    config = getattr(transformers, name.replace("Model", "Config"))(
        text_config=dict(sizes, vocab_size=20, max_position_embeddings=6, eos_token_id=19),
        vision_config=dict(sizes, image_size=16, patch_size=8),
        projection_dim=32,
    )
    texts = TEXTS.clone()
    texts[:, 4] = 19
    return getattr(transformers, name)(config), dict(input_ids=texts, pixel_values=IMAGES)


TRANSFORMERS = ("CLIPModel", "MetaClip2Model", "Aimv2Model")
HOSTS = {
    "stand_in": stand_in,
    "packed_weight": lambda: (others.Clip(others.PackedWeightBlock), (IMAGES, TEXTS)),
    "open_clip": open_clip,
    "coca": coca,
    **{name: lambda n=name: hf(n) for name in TRANSFORMERS},
}


def built(name):
    torch.manual_seed(0)
    model, inputs = HOSTS[name]()
    return randomize(model), inputs


def called(model, inputs):
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def assert_all_fused(model, inputs):
    with watch(model) as status:
        called(model, inputs)
    assert {r.way for r in status.modules if r.level == "block"} == {"fused"}, str(status)
    return status


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_both_towers_run_in_fused_blocks(name, training):
    model, inputs = built(name)
    model.train(training)
    failed = [str(e) for e in model_errors(model, inputs) if not e.passed]
    assert not failed, "\n".join(failed)
    swapped = copy.deepcopy(model)
    report = swap_in(swapped)
    assert report.level == "block" and not report.depending_flops, str(report)
    assert report.fused_flops >= 0.97 * report.flops, str(report)
    if isinstance(inputs, dict):  # the search would find them, too
        kinds = [m for m in swapped.modules() if level_of(type(m)) in ("attention", "block", "mlp")]
        assert len(kinds) >= 12 and not any(is_recognised(type(m)) for m in kinds)
    assert_all_fused(swapped, inputs)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_text_may_be_padded(name):
    model, inputs = built(name)
    inputs["attention_mask"] = (torch.arange(6) < torch.tensor([[6], [5]])).long()
    with backend("torch"):
        assert difference(model, inputs) == ""
        swap_in(model)
        assert_all_fused(model, inputs)


@pytest.mark.parametrize("name", ["stand_in", "packed_weight", "CLIPModel"])
def test_one_graph_with_its_mask(name):
    model, inputs = built(name)
    swap_in(model)
    torch.compiler.reset()

    def step(call):
        model.zero_grad()
        found = called(call, inputs)
        y = found if isinstance(found, torch.Tensor) else found.logits_per_image
        y.square().sum().backward()
        return [y, *(p.grad.clone() for p in model.parameters())]

    wanted = step(model)
    got = step(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


def test_a_checkpoint_gives_the_mask_by_its_place():
    model, inputs = built("stand_in")
    host = copy.deepcopy(model).double()
    swapped = copy.deepcopy(host)
    swapped.text.checkpoints = host.text.checkpoints = True
    swap_in(swapped)
    inputs = (IMAGES.double(), TEXTS)
    for m in (host, swapped):
        m(*inputs).square().sum().backward()
    for (n, p), q in zip(swapped.named_parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9, msg=n)
    assert_all_fused(swapped, inputs)


MASKS = {
    "added": TRIANGLE,
    "of_numbers": torch.randn(6, 6, generator=GENERATOR),
    "boolean": TRIANGLE < 0,
    "of_each_head": torch.randn(4, 6, 6, generator=GENERATOR),
    "boolean_of_each_head": torch.rand(4, 6, 6, generator=GENERATOR) < 0.3,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch_first", [True, False])
def test_torchs_attention_takes_a_mask(name, batch_first):
    """By the 2x rule, and beside a host in autocast, which rounds the mask."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(32, 2, batch_first=batch_first)
            self.register_buffer("mask", MASKS[name])

        def forward(self, x):
            return self.attn(x, x, x, need_weights=False, attn_mask=self.mask)[0]

    torch.manual_seed(0)
    model = randomize(Masked())
    x = torch.randn(*((2, 6) if batch_first else (6, 2)), 32)
    for dtype in (None, torch.bfloat16):
        failed = [str(e) for e in model_errors(model, x, autocast=dtype) if not e.passed]
        assert not failed, "\n".join(failed)
    swap_in(model)
    with watch(model) as status:
        model(x)
    assert [r.way for r in status.modules if r.level == "attention"] == ["fused"], str(status)


def test_other_masks_are_the_hosts():
    """One that learns, of another dtype or shape; and a boolean one of which numbers are made."""
    torch.manual_seed(0)
    hosts = others.CallersMaskBlock().double(), others.HandedBlock().double()
    x, mask = torch.randn(2, 6, 32).double(), TRIANGLE.double()
    for host in map(randomize, hosts):
        block = copy.deepcopy(host)
        swap_in(block)
        makes_numbers = type(host) is others.CallersMaskBlock
        for given, fused in (
            (mask, True),
            (MASKS["boolean"], not makes_numbers),
            (mask.expand(4, 6, 6), True),
            (MASKS["of_numbers"].double().requires_grad_(), False),
            (TRIANGLE, False),
        ):
            with watch(block) as status:
                y = block(x, attn_mask=given)
            torch.testing.assert_close(y, host(x, attn_mask=given), rtol=1e-9, atol=1e-9)
            way = next(r.way for r in status.modules if r.level == "block")
            assert way == ("fused" if fused else "host"), (type(host), given)
        for wrong in (mask[:5], mask.expand(3, 6, 6), mask[:2], mask[None, None]):
            with pytest.raises((RuntimeError, AssertionError)):
                host(x, attn_mask=wrong)
            with pytest.raises((RuntimeError, AssertionError)):
                block(x, attn_mask=wrong)
