"""Checkpoints and layers of other libraries around a swapped model: the unswapped step.

Their trainers are in docs/examples, run by tests/test_examples.py.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from swapped import assert_same, assert_same_step, images, swapped_and_host, vit
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastvit_kernels import checkpoint_policy, status, swap_in, timm_layers
from tests.model_coverage.model_zoo import hf_small

timm = pytest.importorskip("timm")
from timm.layers.config import use_reentrant_ckpt  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("order", ["lora first", "swap first"])
def test_peft_lora(order):
    """Adapters run fused around, trained and merged as without a swap."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["qkv", "fc1"], r=4, init_lora_weights=False)
    x, y = images(4), torch.arange(4)

    def run(swap):
        model = vit()
        if swap and order == "swap first":
            swap_in(model)
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, config)
        if swap and order == "lora first":
            swap_in(adapted)
        trained = [p for p in adapted.parameters() if p.requires_grad]
        optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
        for _ in range(4):
            loss = nn.functional.cross_entropy(adapted(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert all(p.grad is None for n, p in adapted.named_parameters() if "lora" not in n)
        assert not swap or status(adapted).share > 0.9
        return torch.tensor(losses), adapted.merge_and_unload()(x)

    (losses, merged), (wanted, wanted_merged) = run(True), run(False)
    torch.testing.assert_close(losses, wanted, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(merged, wanted_merged, rtol=1e-2, atol=1e-3)


def timms():
    return vit(drop_path_rate=0.3), dict(x=images())


def transformers_():
    pytest.importorskip("transformers")
    return hf_small("dinov2", drop_path_rate=0.3)


def torchvisions():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(32, 16, 2, 2, 32, 64, dropout=0.1, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model, dict(x=images())


def checkpointed(model, use_reentrant, **options):
    """By each library's own switch; torchvision has none."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant, **options})
    elif hasattr(model, "set_grad_checkpointing"):
        timm.layers.set_reentrant_ckpt(use_reentrant)
        model.set_grad_checkpointing()
    else:
        for block in model.encoder.layers:
            block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("regional", [False, True], ids=["whole", "blocks"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("build", [timms, transformers_, torchvisions])
def test_gradient_checkpointing(build, use_reentrant, regional, request):
    request.addfinalizer(partial(timm.layers.set_reentrant_ckpt, use_reentrant_ckpt()))
    torch.manual_seed(0)
    model, inputs = build()
    model, host = swapped_and_host(model.train(), regional=regional)
    checkpointed(model, use_reentrant)
    assert_same_step(model, host, **inputs)
    assert status(model).share > 0.5


def test_save_pretrained_and_from_pretrained(tmp_path):
    model, inputs = transformers_()
    model, host = swapped_and_host(model.eval())
    assert_same(model(**inputs)[0], host(**inputs)[0])
    model.save_pretrained(tmp_path)
    assert_same(type(host).from_pretrained(tmp_path).eval()(**inputs)[0], host(**inputs)[0])


def test_a_checkpoint_policy_around_fused_blocks():
    model, inputs = transformers_()
    model, host = swapped_and_host(model.train(), regional=True)
    checkpointed(model, False, context_fn=checkpoint_policy("attention").context_fn)
    assert_same_step(model, host, **inputs)
    assert status(model).share > 0.5


def test_timm_layer_arguments():
    """Modules by timm's own arguments: each fused by itself, checkpoints as ever."""
    host = vit()
    model = vit(
        norm_layer=partial(timm_layers.LayerNorm, eps=1e-6),
        attn_layer=timm_layers.Attention,
        mlp_layer=timm_layers.Mlp,
        embed_layer=timm_layers.PatchEmbed,
    )
    assert list(model.state_dict()) == list(host.state_dict())
    host.load_state_dict(model.state_dict())
    assert_same(model(images()), host(images()))
    for name in ("norm", "blocks.0.norm1", "blocks.0.attn", "blocks.0.mlp", "patch_embed"):
        assert status(model.get_submodule(name)).graphs, name


@pytest.mark.filterwarnings("ignore")
def test_quantised_linears_are_called_and_the_rest_is_fused():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    host = vit().requires_grad_(False)
    quantization.quantize_(host.blocks, quantization.Int8WeightOnlyConfig())
    host.patch_embed.requires_grad_(True)
    model, host = swapped_and_host(host)
    assert_same_step(model, host)
    left = status(model).left
    assert {row.op for row in left} == {"linear"} and len(left) == 4 * len(host.blocks)
    assert all("tensor subclass" in row.reason for row in left)
