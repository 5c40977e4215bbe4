"""transformers' Trainer: python hf_trainer.py. One line of ours, the same losses."""

import tempfile

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, set_seed

import fastvit_kernels as fk

CONFIG = ViTConfig(
    image_size=32,
    patch_size=8,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=3,
    intermediate_size=96,
    num_labels=5,
)


def losses(swapped):
    set_seed(0)
    model = ViTForImageClassification(CONFIG)
    if swapped:
        fk.swap_in(model)  # <- ours
    images, labels = torch.randn(24, 3, 32, 32), torch.randint(5, (24,))
    data = [{"pixel_values": x, "labels": y} for x, y in zip(images, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            num_train_epochs=2,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
    return torch.tensor([float(row["loss"]) for row in trainer.state.log_history if "loss" in row])


if __name__ == "__main__":
    host, ours = losses(False), losses(True)
    torch.testing.assert_close(ours, host, rtol=1e-3, atol=1e-3)
    print(f"losses equal over {len(host)} steps: {host[0]:.4f} to {host[-1]:.4f}")
