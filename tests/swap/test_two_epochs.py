"""Two epochs by the trainers people use, with one line added: the losses of the unswapped run.

Small models, handwritten digits. timm's train.py is a script outside its wheel: what it does with a
model, in its order, is done here with timm's own parts.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fastvit_kernels import backend, swap_in
from fastvit_kernels.runtime.compat import define_torchvision_operators

define_torchvision_operators()
timm = pytest.importorskip("timm")
pytest.importorskip("sklearn")
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
    assert swap_in(swapped).level == "block"
    return host, swapped


def timm_vit():
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
    )


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

    host, swapped = (train_and_validate(model) for model in pair(timm_vit))
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
