"""A reference model that no library holds, written out in plain torch.nn from its description."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NotebookBlock(nn.Module):
    def __init__(self, dim: int, heads: int, mlp_dim: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = nn.ModuleDict({name: nn.Linear(dim, dim) for name in ("q", "k", "v", "proj")})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(dim, mlp_dim), "fc2": nn.Linear(mlp_dim, dim)})

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, C) -> heads' outputs side by side (B, T, C), and the maps (B, H, T, T)."""
        q, k, v = (
            self.attn[name](x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for name in "qkv"
        )
        maps = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1)
        return (maps @ v).transpose(1, 2).flatten(2), maps

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn["proj"](self.attention(self.norm1(x))[0])
        return x + self.mlp["fc2"](nn.functional.gelu(self.mlp["fc1"](self.norm2(x))))


class NotebookViT(nn.Module):
    """A notebook's ViT on handwritten digits: token 0, Linear + tanh, Linear. Its parts have timm's
    names, but for q, k and v, which are three."""

    def __init__(self, image_size: int = 28, dim: int = 64, mlp_dim: int = 256):
        super().__init__()
        patch_size, depth, heads, representation_size, classes = 2, 2, 2, 32, 10
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(1, dim, patch_size, patch_size)})
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, (image_size // patch_size) ** 2 + 1, dim))
        self.blocks = nn.ModuleList([NotebookBlock(dim, heads, mlp_dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pre_logits = nn.ModuleDict({"fc": nn.Linear(dim, representation_size)})
        self.head = nn.Linear(representation_size, classes)

    def embed(self, images: Tensor) -> Tensor:
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        return torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.tanh(self.pre_logits["fc"](self.norm(x)[:, 0])))

    def attention_maps(self, images: Tensor) -> list[Tensor]:
        """Every layer's (B, H, T, T), as the notebook draws them."""
        x, maps = self.embed(images), []
        for block in self.blocks:
            assert isinstance(block, NotebookBlock)
            maps.append(block.attention(block.norm1(x))[1])
            x = block(x)
        return maps
