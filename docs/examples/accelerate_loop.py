"""accelerate: accelerate launch accelerate_loop.py. One line of ours, before prepare."""

import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

import fastvit_kernels as fk

SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)


def losses(swapped):
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = timm.create_model("vit_tiny_patch16_224", **SIZES)
    if swapped:
        fk.swap_in(model)  # <- ours
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(24, 3, 32, 32), torch.randint(5, (24,)))
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(data, 8))
    found = []
    for _ in range(2):
        for images, labels in batches:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            found.append(loss.item())
    return torch.tensor(found)


if __name__ == "__main__":
    host, ours = losses(False), losses(True)
    torch.testing.assert_close(ours, host, rtol=1e-3, atol=1e-4)
    print(f"losses equal over {len(host)} steps: {host[0]:.4f} to {host[-1]:.4f}")
