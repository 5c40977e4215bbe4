"""The doors of other libraries: one line of ours, and the user's code stays as it is."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import nn

import fastvit_kernels
from fastvit_kernels import backend, swap_in, swap_out
from fastvit_kernels.runtime.compat import attention_of
from fastvit_kernels.swap.hosts.fused import Fused
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import hf_small

timm = pytest.importorskip("timm")
pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def _torch_backend():
    with backend("torch"):
        yield


def timm_model(**settings):
    torch.manual_seed(0)
    return timm.create_model(
        "vit_base_patch14_dinov2",
        img_size=28,
        embed_dim=64,
        depth=2,
        num_heads=2,
        num_classes=5,
        **settings,
    )


def data(batches=4):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(4, 3, 28, 28, generator=generator), torch.arange(4)) for _ in range(batches)
    ]


def losses(model, optimizer):
    found = []
    for x, y in data():
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found)


@pytest.mark.parametrize("name", ["vit", "dinov2", "clip", "dinov3_vit", "beit"])
def test_attention_interface(name):
    fastvit_kernels.register_attention()
    fastvit_kernels.register_attention()
    torch.manual_seed(0)
    model, inputs = hf_small(name, attn_implementation="fastvit")
    randomize(model).eval()
    wanted = copy.deepcopy(model)
    wanted.set_attn_implementation("sdpa")
    calls = []
    for layer in model.modules():
        if type(layer).__name__.endswith("Attention") and hasattr(layer, "config"):
            calls.append(attention_of(layer.config))
    assert calls == ["fastvit"] * 2
    a, b = model(**inputs).last_hidden_state, wanted(**inputs).last_hidden_state
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert swap_in(wanted).level == "block"


def test_attention_interface_runs_our_attention(monkeypatch):
    import fastvit_kernels.swap.hosts.transformers as door

    fastvit_kernels.register_attention()
    calls, original = [], door.scaled_dot_product_attention
    monkeypatch.setattr(
        door, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    model, inputs = hf_small("vit", attn_implementation="fastvit")
    model(**inputs)
    assert len(calls) == 2


def test_attention_interface_with_masks_groups_and_causality():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from fastvit_kernels.swap.hosts.transformers import fastvit_attention

    class Module(nn.Module):
        num_key_value_groups, is_causal = 1, False

    module, grouped, causal = Module(), Module(), Module()
    grouped.num_key_value_groups, causal.is_causal = 2, True
    q, k, v = torch.randn(3, 2, 4, 6, 16).unbind(0)
    mask = torch.rand(2, 1, 6, 6) > 0.3
    for args, kwargs in (
        ((nn.Module(), q, k, v, None), {}),  # which says nothing: causal
        ((module, q, k, v, None), {"scaling": 0.3}),
        ((module, q, k, v, mask), {}),
        ((module, q, k, v, None), {"is_causal": True}),
        ((causal, q, k, v, None), {}),
        ((grouped, q, k[:, :2], v[:, :2], mask), {}),
        ((module, q[:, :, :2], k, v, None), {}),
        ((module, q, k, v, None), {"position_bias": torch.randn(1, 4, 6, 6)}),
    ):
        torch.testing.assert_close(
            fastvit_attention(*args, **kwargs)[0],
            sdpa_attention_forward(*args, **kwargs)[0],
            rtol=1e-4,
            atol=1e-5,
        )


@pytest.mark.parametrize("asked", ["cache", "position_bias", "softcap", "groups"])
def test_attention_interface_hands_on_all_that_it_is_given(asked, monkeypatch):
    from transformers.integrations import sdpa_attention

    from fastvit_kernels.swap.hosts.transformers import fastvit_attention

    calls = []
    monkeypatch.setattr(
        sdpa_attention, "sdpa_attention_forward", lambda *a, **k: calls.append((a, k)) or (0, None)
    )
    module = nn.Module()
    module.num_key_value_groups = 2 if asked == "groups" else 1
    args = module, *torch.randn(3, 2, 4, 6, 16).unbind(0), None
    kwargs = dict(dropout=0.3, scaling=0.5, is_causal=True, **{asked: 1.0})
    assert fastvit_attention(*args, **kwargs) == (0, None)
    assert calls == [(args, kwargs)]


def test_timm_layer_arguments():
    from functools import partial

    from fastvit_kernels import timm_layers

    model = timm_model(
        norm_layer=partial(timm_layers.LayerNorm, eps=1e-6),
        attn_layer=timm_layers.Attention,
        mlp_layer=timm_layers.Mlp,
        embed_layer=timm_layers.PatchEmbed,
    )
    host = timm_model()
    assert list(model.state_dict()) == list(host.state_dict())
    host.load_state_dict(model.state_dict())
    for name in ("norm", "blocks.0.norm1", "blocks.0.attn", "blocks.0.mlp", "patch_embed.proj"):
        assert isinstance(model.get_submodule(name), Fused), name
    x, _ = data()[0]
    torch.testing.assert_close(model(x), host(x), rtol=1e-4, atol=1e-5)
    assert swap_in(model).level == "block"
    torch.testing.assert_close(model(x), host(x), rtol=1e-4, atol=1e-5)


def test_timm_training_tools():
    """What timm's train script does with a model: EMA, layer decay, schedule, scaler."""
    tools: Any = timm
    for name in ("optim", "scheduler", "utils"):
        importlib.import_module(f"timm.{name}")
    found = []
    for swap in (False, True):
        model = timm_model(drop_path_rate=0.1)
        if swap:
            swap_in(model)
        optimizer = tools.optim.create_optimizer_v2(model, opt="adamw", lr=1e-3, layer_decay=0.75)
        schedule = tools.scheduler.CosineLRScheduler(optimizer, t_initial=4, warmup_t=1)
        ema = tools.utils.ModelEmaV3(model, decay=0.9)
        scaler = tools.utils.NativeScaler(device="cpu")
        torch.manual_seed(1)
        for step, (x, y) in enumerate(data()):
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
            ema.update(model)
            schedule.step(step)
        found.append(ema.module(data()[0][0]))
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=2e-2)


def test_timm_reshapes_a_swapped_model():
    model, host = timm_model(dynamic_img_size=True), timm_model(dynamic_img_size=True)
    host.load_state_dict(model.state_dict())
    swap_in(model)
    x = torch.randn(2, 3, 42, 56)
    torch.testing.assert_close(model(x), host(x), rtol=1e-4, atol=1e-5)
    for m in (model, host):
        m.set_input_size(img_size=(42, 42))
        m.reset_classifier(0)
    x = torch.randn(2, 3, 42, 42)
    for a, b in zip(
        model.forward_intermediates(x)[1], host.forward_intermediates(x)[1], strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("order", ["lora_first", "swap_first"])
def test_peft_lora(order):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["qkv", "fc1"], r=4, init_lora_weights=False)
    found = []
    for swap in (False, True):
        model = timm_model()
        if swap and order == "swap_first":
            swap_in(model)
        torch.manual_seed(1)
        adapted = peft.get_peft_model(model, config)
        if swap and order == "lora_first":
            report = swap_in(adapted)
            reason = "it is a Linear of peft, not an nn.Linear"
            assert any(row.reason == reason for row in report.left)
        optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
        found.append(losses(adapted, optimizer))
        assert all(p.grad is None for n, p in adapted.named_parameters() if "lora" not in n)
        merged = adapted.merge_and_unload()
        found.append(merged(data()[0][0]))
    torch.testing.assert_close(found[2], found[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[3], found[1], rtol=1e-2, atol=1e-3)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")
    found = []
    for swap in (False, True):
        model = timm_model()
        if swap:
            swap_in(model)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        rows = []
        for x, y in data():
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            rows.append(loss.item())
        found.append(torch.tensor(rows))
        accelerator.unwrap_model(model)
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=2e-2)


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):
        def __init__(self, swap):
            super().__init__()
            self.model, self.rows = timm_model(), []
            if swap:
                swap_in(self.model)

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.rows.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    found = []
    for swap in (False, True):
        task = Task(swap)
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(task, torch.utils.data.DataLoader(data(), batch_size=None))
        found.append(torch.tensor(task.rows))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)


def test_transformers_trainer_save_and_load(tmp_path):
    model, inputs = hf_small("dinov2")
    swap_in(model)
    wanted = model(**inputs).last_hidden_state
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(loaded(**inputs).last_hidden_state, wanted, rtol=1e-4, atol=1e-5)
    swap_out(model)
    assert not any(isinstance(m, Fused) for m in model.modules())
