"""30 training steps of each host on handwritten digits: swapped, as it is, and in float64.

python tests/support/hosts_training.py OUT.png prints a table and draws the curves. The
differences are what fp32 explains when the swapped run stays within twice the distance that the
host's own fp32 run keeps from the float64 run, the largest over the run, plus 1e-6 (about 4 eps
of a loss near 2).
"""

from __future__ import annotations

import copy
import os
import sys

import torch
from torch import nn

STEPS, BATCH = 30, 8
HOSTS = ("timm", "torchvision", "transformers", "torch.nn")


class Classifier(nn.Module):
    """Stands for transformers' ViTForImageClassification in the call of the others."""

    def __init__(self):
        super().__init__()
        from transformers import ViTConfig, ViTForImageClassification

        self.vit = ViTForImageClassification(
            ViTConfig(
                hidden_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=64,
                image_size=8,
                patch_size=4,
                num_channels=3,
                num_labels=10,
                layer_norm_eps=1e-6,
            )
        )

    def forward(self, images):
        return self.vit(pixel_values=images).logits


class Plain(nn.Module):
    """A ViT of torch.nn, as people write it by hand."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.pos = nn.Parameter(0.02 * torch.randn(1, 4, 32))
        layer = nn.TransformerEncoderLayer(
            32, 2, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(32), False)
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2) + self.pos
        return self.head(self.encoder(x).mean(1))


def build(host: str) -> nn.Module:
    torch.manual_seed(0)
    if host == "timm":
        import timm

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
    if host == "torchvision":
        from torchvision.models import VisionTransformer

        return VisionTransformer(8, 4, 2, 2, 32, 64, num_classes=10)
    return Classifier() if host == "transformers" else Plain()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None].expand(-1, 3, -1, -1)
    labels = torch.tensor(digits.target)[order]
    few = 3 * BATCH  # seen ten times each
    pairs = zip((images[:few] / 8 - 1).split(BATCH), labels[:few].split(BATCH), strict=True)
    return list(pairs) * (STEPS // 3)


def train(model: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for images, labels in batches():
        loss = nn.functional.cross_entropy(model(images.to(dtype)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def curves(host: str) -> dict[str, torch.Tensor]:
    """Losses of the three runs from one set of weights: "float64", "host", "swapped"."""
    from fastvit_kernels import swap_in

    model = build(host)
    swapped = copy.deepcopy(model)
    assert swap_in(swapped).level == "block"
    return {
        "float64": train(copy.deepcopy(model), torch.float64),
        "host": train(copy.deepcopy(model)),
        "swapped": train(swapped),
    }


def distances(found: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Largest distance from float64 over the run: the swapped model's, and its limit."""
    swapped = (found["swapped"] - found["float64"]).abs().max().item()
    host = (found["host"] - found["float64"]).abs().max().item()
    return swapped, 2 * host + 1e-6


def main() -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(HOSTS), figsize=(14, 3.2), sharey=True)
    print("| host | first loss | last loss | swapped to float64 | limit |\n|---|---|---|---|---|")
    for axis, host in zip(axes, HOSTS, strict=True):
        found = curves(host)
        distance, limit = distances(found)
        first, last = found["swapped"][0].item(), found["swapped"][-1].item()
        print(f"| {host} | {first:.4f} | {last:.4f} | {distance:.1e} | {limit:.1e} |", flush=True)
        axis.plot(found["host"], label="as it is", linewidth=3, color="0.75")
        axis.plot(found["swapped"], label="swapped", linewidth=1, color="C0")
        axis.set(title=host, xlabel="step")
    axes[0].set_ylabel("loss")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from fastvit_kernels.runtime.compat import define_torchvision_operators

    define_torchvision_operators()
    torch.set_num_threads(1)
    main()
