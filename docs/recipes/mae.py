"""MAE, then fine-tuning: python mae.py. Stopped at any moment, it goes on where it was.

A ViT learns, without labels, to draw most of a picture from the patches that it sees; it computes
these alone. Its weights have timm's names, so timm's own model takes them, and is fine-tuned on 20
pictures of each digit. The last line compares it with the same model from scratch.
"""

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from torch import nn

import fastvit_kernels as fk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FOLDER = Path("runs/mae")
NAME = "vit_tiny_patch16_224"
SIZES = dict(
    img_size=8,
    patch_size=2,
    in_chans=1,
    embed_dim=64,
    depth=3,
    num_heads=2,
    global_pool="avg",
    fc_norm=False,
)
PATCHES, SEEN = 16, 6


class Mae(nn.Module):
    """Images (B, 1, 8, 8) -> mean squared error of the pixels that the encoder did not see."""

    def __init__(self):
        super().__init__()
        self.encoder = fk.create_vit(NAME, **SIZES, num_classes=0)  # <- ours
        self.decoder = fk.MaskedDecoder(  # <- ours
            self.encoder, out_dim=4, embed_dim=64, depth=1, num_heads=2
        )

    def forward(self, images):
        order = torch.rand(len(images), PATCHES, device=images.device).argsort(1)
        seen, hidden = order[:, :SEEN], order[:, SEEN:]
        features = self.encoder.forward_features(images, keep=seen)  # <- ours: reads no others
        drawn = self.decoder(features, seen, hidden)
        pixels = F.unfold(images, 2, stride=2).mT  # (B, 16, 4)
        return F.mse_loss(drawn.float(), pixels.gather(1, hidden.unsqueeze(-1).expand(-1, -1, 4)))


def pictures():
    """Images (1797, 1, 8, 8), labels, and 20 pictures of each digit; the last 500 are to test."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(found.target)
    few = torch.cat([(labels[:-500] == digit).nonzero()[:20, 0] for digit in range(10)])
    return images.to(DEVICE), labels.to(DEVICE), few


def save(path, content):
    torch.save(content, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def train(name, model, index, loss_of, epochs, lr, size):
    """Train the model, or go on with it, and give it back."""
    model = model.to(DEVICE).train()
    optimizer = create_optimizer_v2(model, "adamw", lr=lr, weight_decay=0.05)
    path, first = FOLDER / f"{name}.pt", 0
    if path.exists():
        state = torch.load(path, map_location=DEVICE, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    for epoch in range(first, epochs):
        torch.manual_seed(epoch)  # a resumed run sees the same order and the same masks
        for group in optimizer.param_groups:
            group["lr"] = lr * min((epoch + 1) / 3, 1 - epoch / epochs)
        for part in index[torch.randperm(len(index))].split(size):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                loss = loss_of(model, part)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save(path, {**state, "epoch": epoch + 1})
        if epoch % 5 == 4:
            print(f"{name}: epoch {epoch + 1} of {epochs}, loss {loss.item():.3f}", flush=True)
    return model.eval()


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    images, labels, few = pictures()
    every = torch.arange(len(images) - 500)
    torch.manual_seed(0)
    mae = train("mae", Mae(), every, lambda model, part: model(images[part]), 28, 4e-3, 100)

    results = {}
    for kind in ("scratch", "pretrained"):
        torch.manual_seed(1)
        model = timm.create_model(NAME, **SIZES, num_classes=10)
        if kind == "pretrained":
            model.load_state_dict(mae.encoder.state_dict(), strict=False)  # all but the head
        fk.swap_in(model)  # <- ours
        model = train(
            kind,
            model,
            few,
            lambda model, part: F.cross_entropy(model(images[part]).float(), labels[part]),
            25,
            3e-3,
            50,
        )
        with torch.no_grad():
            right = model(images[-500:]).argmax(1) == labels[-500:]
        results[kind] = right.float().mean().item()
    found = ", ".join(f"{kind} {share:.1%}" for kind, share in results.items())
    print(f"accuracy on 500 other pictures, 20 of each digit seen: {found}")


if __name__ == "__main__":
    main()
