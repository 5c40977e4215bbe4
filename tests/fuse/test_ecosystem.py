"""Other people's trainers and libraries with one line added: the losses of the unswapped run.

Small models, handwritten digits. timm's train.py is a script outside its wheel: what it does with a
model, in its order, is done here with timm's own parts.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastvit_kernels import backend, checkpoint_policy, status, swap_in
from fastvit_kernels.runtime.compat import define_torchvision_operators

define_torchvision_operators()
timm = pytest.importorskip("timm")
pytest.importorskip("sklearn")
from timm.layers.config import use_reentrant_ckpt  # noqa: E402

EPOCHS, BATCH = 2, 16


@pytest.fixture(autouse=True)
def _torch_backend():
    with backend("torch"):
        yield


class Digits(torch.utils.data.Dataset):
    def __init__(self, count=48, start=0):
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images[start : start + count], dtype=torch.float32)
        self.images = images[:, None].expand(-1, 3, -1, -1) / 8 - 1
        self.labels = torch.tensor(digits.target[start : start + count])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])


def pair(build):
    """A model and its swapped copy."""
    torch.manual_seed(0)
    host = build()
    swapped = copy.deepcopy(host)
    swap_in(swapped)
    return host, swapped


def timm_vit(**settings):
    return timm.create_model(
        "vit_base_patch14_dinov2",
        img_size=8,
        patch_size=4,
        embed_dim=32,
        depth=2,
        num_heads=2,
        mlp_ratio=2,
        num_classes=10,
        init_values=0.1,
        **settings,
    )


def assert_fused(model):
    """Whole, in few graphs, none past a limit."""
    found = status(model)
    assert found.share > 0.99 and not found.limits and not found.graph_breaks, found


def assert_same_losses(host, swapped):
    assert len(host) == EPOCHS * 3 and min(host[-3:]) < host[0], "it trains"
    torch.testing.assert_close(torch.tensor(swapped), torch.tensor(host), rtol=1e-5, atol=1e-5)


def test_timm_train_and_validate():
    from timm.data import FastCollateMixup, create_loader
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.utils import AverageMeter, ModelEmaV3, NativeScaler, accuracy, random_seed

    from sklearn.datasets import load_digits  # isort: skip
    from PIL import Image  # isort: skip

    digits = load_digits()

    class Pictures(torch.utils.data.Dataset):
        """What create_loader wants: PIL images, and a place for its transforms."""

        transform = None

        def __len__(self):
            return 3 * BATCH

        def __getitem__(self, index):
            image = Image.fromarray((digits.images[index] * 15).astype("uint8")).convert("RGB")
            return self.transform(image) if self.transform else image, int(digits.target[index])

    def loader(training):
        mixup = FastCollateMixup(mixup_alpha=0.2, num_classes=10) if training else None
        return create_loader(
            Pictures(),
            (3, 8, 8),
            BATCH,
            is_training=training,
            use_prefetcher=True,
            auto_augment="rand-m5" if training else None,
            num_workers=0,
            collate_fn=mixup,
            device=torch.device("cpu"),
            pin_memory=False,
            persistent_workers=False,
        )

    def train_and_validate(model):
        random_seed(3)
        optimizer = create_optimizer_v2(model, opt="adamw", lr=2e-3, weight_decay=0.05)
        train, validate = loader(True), loader(False)
        scheduler, _ = create_scheduler_v2(
            optimizer,
            sched="cosine",
            num_epochs=EPOCHS,
            warmup_epochs=0,
            updates_per_epoch=len(train),
        )
        ema, scaler = ModelEmaV3(model, decay=0.9), NativeScaler(device="cpu")
        loss_fn, losses, updates = SoftTargetCrossEntropy(), [], 0
        for epoch in range(EPOCHS):
            model.train()
            for images, targets in train:
                loss = loss_fn(model(images), targets)
                scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
                optimizer.zero_grad()
                updates += 1
                ema.update(model, step=updates)
                losses.append(loss.item())
                scheduler.step_update(num_updates=updates, metric=losses[-1])
            scheduler.step(epoch + 1)
        top1 = AverageMeter()
        model.eval()
        with torch.inference_mode():
            for images, targets in validate:
                top1.update(accuracy(model(images), targets)[0].item(), len(images))
        return losses, top1.avg

    models = pair(timm_vit)
    host, swapped = map(train_and_validate, models)
    assert_fused(models[1])
    assert_same_losses(host[0], swapped[0])
    assert host[1] == pytest.approx(swapped[1], abs=100 / 48), "one image of 48"


def test_transformers_trainer(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    def build():
        return transformers.ViTForImageClassification(
            transformers.ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                image_size=8,
                patch_size=4,
                num_labels=10,
                hidden_dropout_prob=0.0,
            )
        )

    def collate(rows):
        images, labels = zip(*rows, strict=True)
        return {"pixel_values": torch.stack(images), "labels": torch.tensor(labels)}

    def run(model, out):
        arguments = transformers.TrainingArguments(
            output_dir=str(out),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH,
            learning_rate=2e-3,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
            seed=3,
            save_strategy="epoch",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=Digits(), data_collator=collate
        )
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    host, swapped = pair(build)
    assert_same_losses(run(host, tmp_path / "host"), run(swapped, tmp_path / "swapped"))
    assert_fused(swapped)
    swapped.save_pretrained(tmp_path / "saved")
    loaded = type(host).from_pretrained(tmp_path / "saved").eval()
    x = Digits().images[:4]
    torch.testing.assert_close(loaded(x).logits, swapped.eval()(x).logits, rtol=1e-4, atol=1e-5)


def test_lightning(tmp_path):
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=2e-3)

    def run(model, out):
        task = Task(model)
        trainer = lightning.Trainer(
            max_epochs=EPOCHS,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=out,
        )
        trainer.fit(task, torch.utils.data.DataLoader(Digits(), BATCH))
        return task.losses

    host, swapped = pair(timm_vit)
    assert_same_losses(run(host, tmp_path / "host"), run(swapped, tmp_path / "swapped"))
    assert_fused(swapped)


def test_accelerate():
    accelerate = pytest.importorskip("accelerate")

    def run(model):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1)
        torch.manual_seed(3)
        loader = torch.utils.data.DataLoader(Digits(), BATCH, shuffle=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses = []
        for _ in range(EPOCHS):
            for images, labels in loader:
                with accelerator.accumulate(model):
                    loss = nn.functional.cross_entropy(model(images), labels)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    host, swapped = pair(timm_vit)
    assert_same_losses(run(host), run(swapped))
    assert_fused(swapped)


@pytest.mark.parametrize("order", ["lora first", "swap first"])
def test_peft_lora(order):
    """Adapters run fused around, trained and merged as without a swap."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["qkv", "fc1"], r=4, init_lora_weights=False)
    x, y = Digits().images[:16], Digits().labels[:16]

    def run(model, swap):
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
        share = status(adapted).share
        return losses, share, adapted.merge_and_unload()(x)

    torch.manual_seed(0)
    model = timm_vit()
    losses, _, merged = run(copy.deepcopy(model), False)
    found, share, ours = run(copy.deepcopy(model), True)
    assert share > 0.9
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours, merged, rtol=1e-2, atol=1e-3)


def transformers_vit():
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )

    class OfImages(transformers.Dinov2Model):
        def forward(self, images):
            return super().forward(pixel_values=images).last_hidden_state

    return OfImages(config)


def torchvision_vit():
    from torchvision.models import VisionTransformer

    model = VisionTransformer(8, 4, 2, 2, 32, 64, num_classes=10)
    nn.init.normal_(model.heads.head.weight, std=0.1)
    return model


def checkpointed(model, use_reentrant, **options):
    """By each library's own switch; torchvision has none."""
    if hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant, **options})
    elif hasattr(model, "set_grad_checkpointing"):
        timm.layers.set_reentrant_ckpt(use_reentrant)
        model.set_grad_checkpointing()
    else:
        for block in model.encoder.layers:
            block.forward = partial(
                checkpoint, block.forward, use_reentrant=use_reentrant, **options
            )
    return model.train()


@pytest.mark.parametrize("regional", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("build", [timm_vit, transformers_vit, torchvision_vit])
def test_gradient_checkpointing(build, use_reentrant, regional, request):
    """The host's outputs and gradients, by each library's own switch."""
    request.addfinalizer(partial(timm.layers.set_reentrant_ckpt, use_reentrant_ckpt()))
    torch.manual_seed(0)
    host = build().train()
    swapped = copy.deepcopy(host)
    swap_in(swapped, regional=regional)
    swapped = checkpointed(swapped, use_reentrant)
    x = Digits().images[:4].clone().requires_grad_()
    found = []
    for model in (host, swapped):
        y = model(x)
        y.square().mean().backward()
        found.append((y.detach(), [p.grad for p in model.parameters()]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_checkpoint_policy_around_fused_blocks():
    torch.manual_seed(0)
    host = transformers_vit().train()
    swapped = copy.deepcopy(host)
    swap_in(swapped, regional=True)
    policy = checkpoint_policy("attention")
    swapped = checkpointed(swapped, False, context_fn=policy.context_fn)
    x = Digits().images[:4]
    for model in (host, swapped):
        model(x).square().mean().backward()
    for (name, p), q in zip(host.named_parameters(), swapped.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_timm_reshapes_a_swapped_model():
    torch.manual_seed(0)
    host, swapped = pair(lambda: timm_vit(dynamic_img_size=True))
    x = torch.randn(2, 3, 12, 16)
    torch.testing.assert_close(swapped(x), host(x), rtol=1e-4, atol=1e-5)
    for model in (host, swapped):
        model.set_input_size(img_size=(12, 12))
        model.reset_classifier(0)
    x = torch.randn(2, 3, 12, 12)
    ours, theirs = (model.forward_intermediates(x)[1] for model in (swapped, host))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_timm_layer_arguments():
    """Modules by timm's own arguments: each fused by itself, checkpoints as ever."""
    from fastvit_kernels import timm_layers

    model = timm_vit(
        norm_layer=partial(timm_layers.LayerNorm, eps=1e-6),
        attn_layer=timm_layers.Attention,
        mlp_layer=timm_layers.Mlp,
        embed_layer=timm_layers.PatchEmbed,
    )
    host = timm_vit()
    assert list(model.state_dict()) == list(host.state_dict())
    host.load_state_dict(model.state_dict())
    x = Digits().images[:4]
    torch.testing.assert_close(model(x), host(x), rtol=1e-4, atol=1e-5)
    for name in ("norm", "blocks.0.norm1", "blocks.0.attn", "blocks.0.mlp", "patch_embed"):
        assert status(model.get_submodule(name)).graphs, name


@pytest.mark.filterwarnings("ignore")
def test_quantised_linears_are_called_and_the_rest_is_fused():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    torch.manual_seed(0)
    host = timm_vit().requires_grad_(False)
    quantization.quantize_(host.blocks, quantization.Int8WeightOnlyConfig())
    host.patch_embed.requires_grad_(True)
    swapped = copy.deepcopy(host)
    swap_in(swapped)
    x = Digits().images[:4]
    for model in (host, swapped):
        model(x).square().mean().backward()
    ours, theirs = (m.patch_embed.proj.weight.grad for m in (swapped, host))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    left = status(swapped).left
    assert {row.op for row in left} == {"linear"} and len(left) == 4 * len(host.blocks)
    assert all("tensor subclass" in row.reason for row in left)
