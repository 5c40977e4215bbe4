"""A linear probe: python linear_probe.py. Stopped at any moment, it goes on where it was.

What have frozen features learned? The backbone is a timm ViT that this script has trained to tell
the digits 0 to 6 apart, as nothing is downloaded. Then it is frozen, and a linear layer learns all
ten digits from its features, of 20 pictures each. The last line sets them beside the features of
the same backbone before it learned anything.
"""

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import fastvit_kernels as fk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILE = Path("runs/linear_probe.pt")
EPOCHS = 12


def backbone():
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=2,
        in_chans=1,
        embed_dim=64,
        depth=3,
        num_heads=2,
        global_pool="avg",
        num_classes=7,
    ).to(DEVICE)
    fk.swap_in(model)  # <- ours
    return model


def pictures():
    """Images (1797, 1, 8, 8) and labels; the last 500 are to test."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images.to(DEVICE), torch.tensor(found.target).to(DEVICE)


def save(content):
    torch.save(content, FILE.with_suffix(".part"))
    FILE.with_suffix(".part").replace(FILE)


def pretrain(model, images, labels):
    """Supervised, on the digits 0 to 6."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    first = 0
    if FILE.exists():
        state = torch.load(FILE, map_location=DEVICE, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    index = (labels[:-500] < 7).nonzero()[:, 0]
    for epoch in range(first, EPOCHS):
        model.train()
        torch.manual_seed(epoch)  # a resumed run sees the same order
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min((epoch + 1) / 3, 1 - epoch / EPOCHS)
        for part in torch.randperm(len(index)).split(50):
            x, y = images[index[part]], labels[index[part]]
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                loss = F.cross_entropy(model(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save({**state, "epoch": epoch + 1})
        print(f"pretraining: epoch {epoch + 1} of {EPOCHS}, loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def features(model, images):
    """(N, C), before the head, once for all epochs of the probe."""
    model.eval()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        found = [model.forward_head(model.forward_features(x), True) for x in images.split(300)]
    return F.layer_norm(torch.cat(found).float(), found[0].shape[1:])


def probe(x, labels):
    """Accuracy on the last 500 of a linear layer that has learned 20 pictures of each digit."""
    known = labels[:-500]
    train = torch.cat([(known == digit).nonzero()[:20, 0] for digit in range(10)])
    torch.manual_seed(0)
    linear = torch.nn.Linear(x.shape[1], 10).to(DEVICE)
    optimizer = torch.optim.LBFGS(linear.parameters(), max_iter=200)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(linear(x[train]), labels[train])
        loss = loss + 1e-3 * linear.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return (linear(x[-500:]).argmax(1) == labels[-500:]).float().mean().item()


def main():
    FILE.parent.mkdir(exist_ok=True)
    images, labels = pictures()
    model = backbone()
    before = probe(features(model, images), labels)
    pretrain(model, images, labels)
    after = probe(features(model, images), labels)
    print(f"accuracy of a probe on 500 other pictures: random {before:.1%}, pretrained {after:.1%}")


if __name__ == "__main__":
    main()
