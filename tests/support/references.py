"""Reference models that no library holds, written out in plain torch.nn from their descriptions.

ScratchViT    a ViT from scratch: qkv without bias, mean over all tokens, LayerNorm, Linear
NotebookViT   a notebook's ViT on handwritten digits: token 0, Linear + tanh, Linear
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn


class Reference(nn.Module):
    """A model that knows what timm calls each of its parameters."""

    names: ClassVar[dict[str, str]]

    def timm_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights or gradients by this model's names -> the same by timm's, q, k, v packed."""
        renamed = {}
        for name, x in tensors.items():
            (target,) = (
                re.sub(rf"^{own}$", timm, name)
                for own, timm in self.names.items()
                if re.fullmatch(own, name)
            )
            renamed[target] = x
        for name in [n for n in renamed if ".attn.q." in n]:
            parts = [renamed.pop(name.replace(".q.", f".{part}.")) for part in "qkv"]
            renamed[name.replace(".q.", ".qkv.")] = torch.cat(parts)
        return renamed

    def timm_state_dict(self) -> dict[str, Tensor]:
        return self.timm_names(self.state_dict())


class ScratchAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.to_qkv(x).chunk(3, dim=-1)
        )
        attention = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        return self.to_out((attention @ v).transpose(1, 2).flatten(2))


class ScratchBlock(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm_attention = nn.LayerNorm(dim)
        self.attention = ScratchAttention(dim, heads)
        self.norm_mlp = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        return x + self.mlp(self.norm_mlp(x))


class ScratchViT(Reference):
    """Reference 1: LayerNorm eps 1e-5, exact GELU, mean over all tokens -> LayerNorm -> Linear."""

    names: ClassVar[dict[str, str]] = {
        r"cls": "cls_token",
        r"positions": "pos_embed",
        r"patches\.(\w+)": r"patch_embed.proj.\1",
        r"layers\.(\d+)\.norm_attention\.(\w+)": r"blocks.\1.norm1.\2",
        r"layers\.(\d+)\.attention\.to_qkv\.(\w+)": r"blocks.\1.attn.qkv.\2",
        r"layers\.(\d+)\.attention\.to_out\.(\w+)": r"blocks.\1.attn.proj.\2",
        r"layers\.(\d+)\.norm_mlp\.(\w+)": r"blocks.\1.norm2.\2",
        r"layers\.(\d+)\.mlp\.0\.(\w+)": r"blocks.\1.mlp.fc1.\2",
        r"layers\.(\d+)\.mlp\.2\.(\w+)": r"blocks.\1.mlp.fc2.\2",
        r"to_classes\.0\.(\w+)": r"fc_norm.\1",
        r"to_classes\.1\.(\w+)": r"head.\1",
    }

    def __init__(self, image_size: int, classes: int, depth: int):
        super().__init__()
        patch_size, dim, heads = 16, 768, 8
        self.patches = nn.Conv2d(3, dim, patch_size, patch_size)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, (image_size // patch_size) ** 2 + 1, dim))
        self.drop = nn.Identity()  # its output is a stage
        self.layers = nn.ModuleList([ScratchBlock(dim, heads) for _ in range(depth)])
        self.to_classes = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        x = self.drop(x + self.positions)
        for layer in self.layers:
            x = layer(x)
        return self.to_classes(x.mean(dim=1))


class NotebookBlock(nn.Module):
    def __init__(self, dim: int, heads: int, mlp_dim: int):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)
        self.expand, self.shrink = nn.Linear(dim, mlp_dim), nn.Linear(mlp_dim, dim)

    def attention(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, C) -> heads' outputs side by side (B, T, C), and the maps (B, H, T, T)."""
        q, k, v = (
            projection(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        maps = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1)
        return (maps @ v).transpose(1, 2).flatten(2), maps

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attention(self.ln1(x))[0])
        return x + self.shrink(nn.functional.gelu(self.expand(self.ln2(x))))


class NotebookViT(Reference):
    """Reference 5: the digits model."""

    names: ClassVar[dict[str, str]] = {
        r"cls": "cls_token",
        r"positions": "pos_embed",
        r"patches\.(\w+)": r"patch_embed.proj.\1",
        r"blocks\.(\d+)\.ln1\.(\w+)": r"blocks.\1.norm1.\2",
        r"blocks\.(\d+)\.query\.(\w+)": r"blocks.\1.attn.q.\2",
        r"blocks\.(\d+)\.key\.(\w+)": r"blocks.\1.attn.k.\2",
        r"blocks\.(\d+)\.value\.(\w+)": r"blocks.\1.attn.v.\2",
        r"blocks\.(\d+)\.out\.(\w+)": r"blocks.\1.attn.proj.\2",
        r"blocks\.(\d+)\.ln2\.(\w+)": r"blocks.\1.norm2.\2",
        r"blocks\.(\d+)\.expand\.(\w+)": r"blocks.\1.mlp.fc1.\2",
        r"blocks\.(\d+)\.shrink\.(\w+)": r"blocks.\1.mlp.fc2.\2",
        r"ln\.(\w+)": r"norm.\1",
        r"representation\.(\w+)": r"pre_logits.fc.\1",
        r"classes\.(\w+)": r"head.\1",
    }

    def __init__(self, image_size: int = 28, dim: int = 64, mlp_dim: int = 256):
        super().__init__()
        patch_size, depth, heads, representation_size, classes = 2, 2, 2, 32, 10
        self.patches = nn.Conv2d(1, dim, patch_size, patch_size)
        self.cls = nn.Parameter(torch.randn(1, 1, dim))
        self.positions = nn.Parameter(torch.randn(1, (image_size // patch_size) ** 2 + 1, dim))
        self.blocks = nn.ModuleList([NotebookBlock(dim, heads, mlp_dim) for _ in range(depth)])
        self.ln = nn.LayerNorm(dim, eps=1e-6)
        self.representation = nn.Linear(dim, representation_size)
        self.classes = nn.Linear(representation_size, classes)

    def embed(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.classes(torch.tanh(self.representation(self.ln(x)[:, 0])))

    def attention_maps(self, images: Tensor) -> list[Tensor]:
        """Every layer's (B, H, T, T), as the notebook draws them."""
        x, maps = self.embed(images), []
        for block in self.blocks:
            assert isinstance(block, NotebookBlock)
            maps.append(block.attention(block.ln1(x))[1])
            x = block(x)
        return maps
