"""Fine-tune a timm checkpoint: python finetune.py. Stopped at any moment, it goes on where it was.

Nothing is downloaded, so the checkpoint is this script's: a ViT that has learned the digits 0 to 6.
It is then loaded as any file of timm's, with a new head, and fine-tuned on 20 pictures of each of
the ten, with a learning rate for each layer. The last line compares it with the same from scratch.
"""

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

import fastvit_kernels as fk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FOLDER = Path("runs/finetune")
NAME = "vit_tiny_patch16_224"
SIZES = dict(
    img_size=8, patch_size=2, in_chans=1, embed_dim=64, depth=3, num_heads=2, global_pool="avg"
)


def pictures():
    """1,797 digits of 8 x 8 pixels: 20 of each to train on, the last 500 to test, and the rest."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(found.target)
    train, test = labels[:-500], slice(-500, None)
    few = torch.cat([(train == digit).nonzero()[:20, 0] for digit in range(10)])
    rest = torch.ones(len(train), dtype=torch.bool)
    rest[few] = False
    return (images, labels), few, rest.nonzero()[:, 0], test


def batches(index, epoch, size=50):
    """In an order that follows from the epoch, so that a resumed run sees the same."""
    torch.manual_seed(epoch)
    return index[torch.randperm(len(index))].split(size)


def save(path, content):
    torch.save(content, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def train(name, model, data, index, epochs, **options):
    """Train the model, or go on with it, and give it back."""
    model = model.to(DEVICE)
    fk.swap_in(model)  # <- ours: fused forward and backward, same parameters and names
    optimizer = create_optimizer_v2(model, "adamw", lr=4e-3, weight_decay=0.05, **options)
    schedule = CosineLRScheduler(optimizer, epochs, warmup_t=3, warmup_lr_init=1e-4)
    path, first = FOLDER / f"{name}.pt", 0
    if path.exists():
        state = torch.load(path, map_location=DEVICE, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    images, labels = data
    for epoch in range(first, epochs):
        model.train()
        schedule.step(epoch)
        for part in batches(index, epoch):
            x, y = images[part].to(DEVICE), labels[part].to(DEVICE)
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                loss = F.cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(path, {**state, "epoch": epoch + 1})
        if epoch % 5 == 4:
            print(f"{name}: epoch {epoch + 1} of {epochs}, loss {loss.item():.3f}", flush=True)
    return model.eval()


@torch.no_grad()
def accuracy(model, data, index):
    images, labels = (x[index].to(DEVICE) for x in data)
    return (model(images).argmax(1) == labels).float().mean().item()


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    data, few, rest, test = pictures()
    torch.manual_seed(0)
    known = rest[data[1][rest] < 7]
    model = timm.create_model(NAME, **SIZES, num_classes=7)
    model = train("pretrain", model, data, known, epochs=12)
    save(FOLDER / "pretrained.pth", model.state_dict())  # timm's own names and shapes

    results = {}
    for kind, options in (("scratch", {}), ("finetuned", {"layer_decay": 0.75})):
        torch.manual_seed(1)
        file = {"file": str(FOLDER / "pretrained.pth"), "num_classes": 7}
        loads = {"pretrained": True, "pretrained_cfg_overlay": file} if options else {}
        model = timm.create_model(NAME, **SIZES, num_classes=10, **loads)
        model = train(kind, model, data, few, epochs=20, **options)
        results[kind] = accuracy(model, data, test)
    found = ", ".join(f"{kind} {share:.1%}" for kind, share in results.items())
    print(f"accuracy on 500 other pictures, 20 of each digit seen: {found}")


if __name__ == "__main__":
    main()
