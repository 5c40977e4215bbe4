"""DINO-style self-distillation with multi-crop: python dino_multi_crop.py. Stopped, it goes on.

A student sees 2 large and 4 small crops of scikit-learn's digits in one pass, its teacher the large
ones. The last line says how many digits the neighbours by the teacher's features tell, unlabelled.
"""

import copy
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import fastvit_kernels as fk
from fastvit_kernels.models.packing import Crops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECKPOINT = Path("runs/dino_multi_crop/last.pt")
VIT = dict(img_size=16, patch_size=4, in_chans=1, embed_dim=64, depth=2, num_heads=2)
VIT |= dict(dynamic_img_size=True, global_pool="avg", num_classes=0)
LARGE, SMALL, EPOCHS, BATCH, TEMPERATURE, SHARP, MOMENTUM = 16, 8, 10, 64, 0.1, 0.03, 0.9


class Backbone(fk.VisionTransformer):
    """Crops of several sizes -> features of each, in one pass, nothing padded."""

    def forward(self, views):
        tokens = [self.embed(view) for view in views]
        crops = Crops([x.shape[:2] for x in tokens], DEVICE)
        x = crops.join(tokens)  # (total, C)
        for block in self.blocks:
            x = block(x, packing=crops)  # <- ours: varlen_attention, each image by itself
        return [self.forward_head(self.norm(x)) for x in crops.split(x)]


class Dino(nn.Module):
    """A backbone with DINO's head: crops -> scores of 64 prototypes for each."""

    def __init__(self):
        super().__init__()
        self.backbone = Backbone(**VIT)  # <- ours: our ViT, with timm's names
        hidden = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU()
        self.head = nn.Sequential(*hidden, nn.Linear(128, 64))
        self.prototypes = nn.Parameter(torch.randn(64, 64))

    def forward(self, views):
        features = F.normalize(self.head(torch.cat(self.backbone(views))), dim=1)
        scores = features @ F.normalize(self.prototypes, dim=0)
        return scores.split([len(view) for view in views])


def crops(images, size, low, high):
    """A box of each picture that has this share of its side, anywhere, at another contrast."""
    contrast = 0.6 + 0.8 * torch.rand(len(images), 1, 1, 1, device=DEVICE)
    side = torch.empty(len(images), 1, device=DEVICE).uniform_(low, high)
    middle = (2 * torch.rand(len(images), 2, device=DEVICE) - 1) * (1 - side)
    boxes = torch.cat([torch.diag_embed(side.expand(-1, 2)), middle.unsqueeze(2)], dim=2)
    grid = F.affine_grid(boxes, [len(images), 1, size, size], align_corners=False)
    return contrast * F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def balanced(scores):
    """The teacher's assignments: sharp, and all prototypes in use (Sinkhorn-Knopp)."""
    q = ((scores - scores.max()) / SHARP).exp()
    for _ in range(3):
        q = q / q.sum(0, keepdim=True)
        q = q / q.sum(1, keepdim=True)
    return q


def loss_of(student, teacher, images):
    """Each view of the student predicts what the teacher says of the other large ones."""
    large = [crops(images, LARGE, 0.75, 1.0) for _ in range(2)]
    small = [crops(images, SMALL, 0.5, 0.8) for _ in range(4)]
    with torch.no_grad():
        targets = [balanced(scores) for scores in teacher(large)]
    found = [(scores / TEMPERATURE).log_softmax(-1) for scores in student(large + small)]
    pairs = [(targets[t], found[v]) for t in range(2) for v in range(6) if t != v]
    return -sum((target * view).sum(-1).mean() for target, view in pairs) / len(pairs)


@torch.no_grad()
def neighbours(model, images, labels):
    """The share of the last 500 for whose digit the 10 nearest of the others vote."""
    large = F.interpolate(images, size=LARGE, mode="bilinear", align_corners=False)
    features = F.normalize(model.eval().backbone([large])[0], dim=1)
    near = (features[-500:] @ features[:-500].T).topk(10).indices
    votes = F.one_hot(labels[near], 10).sum(1)
    return (votes.argmax(1) == labels[-500:]).float().mean().item()


def main():
    torch.manual_seed(0)
    digits = load_digits()  # 1,797 pictures of 8 x 8
    images = torch.tensor(digits.images, dtype=torch.float32, device=DEVICE).unsqueeze(1) / 8 - 1
    data, student = (images, torch.tensor(digits.target, device=DEVICE)), Dino().to(DEVICE)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), weight_decay=0.04)
    parts = dict(student=student, teacher=teacher, optimizer=optimizer)
    state = {"epoch": 0, "before": neighbours(teacher, *data)}
    CHECKPOINT.parent.mkdir(parents=True, exist_ok=True)
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location=DEVICE, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for epoch in range(state["epoch"], EPOCHS):
        torch.manual_seed(epoch + 1)  # a resumed run sees the same
        student.train(), teacher.train()
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 + math.cos(math.pi * epoch / EPOCHS))
        for index in torch.randperm(len(images) - 500, device=DEVICE).split(BATCH):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                loss = loss_of(student, teacher, images[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.lerp_(fast.detach(), 1 - MOMENTUM)
        state |= {"epoch": epoch + 1, **{n: part.state_dict() for n, part in parts.items()}}
        torch.save(state, CHECKPOINT.with_suffix(".part"))
        CHECKPOINT.with_suffix(".part").replace(CHECKPOINT)
        print(f"epoch {epoch + 1} of {EPOCHS}: loss {loss.item():.3f}", flush=True)
    after = neighbours(teacher, *data)
    print(f"right by their neighbours: {state['before']:.1%} before, {after:.1%} after")


if __name__ == "__main__":
    main()
