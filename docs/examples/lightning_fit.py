"""Lightning: python lightning_fit.py. One line of ours, the same losses."""

import lightning
import timm
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

import fastvit_kernels as fk

SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)


class Classifier(lightning.LightningModule):
    def __init__(self, swapped):
        super().__init__()
        self.model = timm.create_model("vit_tiny_patch16_224", **SIZES)
        if swapped:
            fk.swap_in(self.model)  # <- ours
        self.losses = []

    def training_step(self, batch, index):
        images, labels = batch
        loss = F.cross_entropy(self.model(images), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def losses(swapped):
    lightning.seed_everything(0)
    data = TensorDataset(torch.randn(24, 3, 32, 32), torch.randint(5, (24,)))
    module = Classifier(swapped)
    trainer = lightning.Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data, 8))
    return torch.tensor(module.losses)


if __name__ == "__main__":
    host, ours = losses(False), losses(True)
    torch.testing.assert_close(ours, host, rtol=1e-3, atol=1e-4)
    print(f"losses equal over {len(host)} steps: {host[0]:.4f} to {host[-1]:.4f}")
