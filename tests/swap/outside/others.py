"""Blocks in the manner of vit-pytorch, CLIP and open_clip, written from their descriptions."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class PreNormAttention(nn.Module):
    """vit-pytorch's: LayerNorm inside, nn.Softmax, heads of a width of their own."""

    def __init__(self, dim, heads=2, dim_head=16, dropout=0.0, project=True):
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.scale = dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout(dropout))
        self.to_out = self.to_out if project else nn.Identity()

    def forward(self, x):
        B, T, _ = x.shape
        qkv = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in qkv)
        attn = self.dropout(self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale))
        return self.to_out(torch.matmul(attn, v).transpose(1, 2).reshape(B, T, -1))


class PreNormFeedForward(nn.Module):
    def __init__(self, dim, hidden, dropout=0.0):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, hidden),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(hidden, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        return self.net(x)


class Stack(nn.Module):
    """vit-pytorch's Transformer: layers without a class of their own."""

    def __init__(self, dim=32, depth=2, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [PreNormAttention(dim, dropout=dropout), PreNormFeedForward(dim, 64, dropout)]
            )
            for _ in range(depth)
        )

    def forward(self, x):
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return self.norm(x)


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Fp32LayerNorm(nn.LayerNorm):
    """openai CLIP's: fp32 whatever comes."""

    def forward(self, x):
        return super().forward(x.type(torch.float32)).type(x.dtype)


class ClipBlock(nn.Module):
    """openai CLIP's and open_clip's: nn.MultiheadAttention inside, a mask in the text tower."""

    def __init__(self, dim=32, heads=2, batch_first=False, norm=nn.LayerNorm, mask=None):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=batch_first)
        self.ln_1 = norm(dim)
        self.mlp = nn.Sequential(
            OrderedDict(
                c_fc=nn.Linear(dim, 4 * dim), gelu=QuickGELU(), c_proj=nn.Linear(4 * dim, dim)
            )
        )
        self.ln_2 = norm(dim)
        self.attn_mask = mask

    def attention(self, x):
        mask = None if self.attn_mask is None else self.attn_mask.to(x)
        return self.attn(x, x, x, need_weights=False, attn_mask=mask)[0]

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class CallersMaskBlock(ClipBlock):
    """open_clip's: the caller has the mask, of which numbers are made; cross-attention may come."""

    def __init__(self, dim=32, heads=2):
        super().__init__(dim, heads, batch_first=True)

    def attention(self, q_x, k_x=None, v_x=None, attn_mask=None):
        k_x = q_x if k_x is None else k_x
        v_x = q_x if v_x is None else v_x
        mask = None if attn_mask is None else attn_mask.to(q_x.dtype)
        return self.attn(q_x, k_x, v_x, need_weights=False, attn_mask=mask)[0]

    def forward(self, q_x, k_x=None, v_x=None, attn_mask=None):
        k_x = self.ln_1_kv(k_x) if hasattr(self, "ln_1_kv") and k_x is not None else None
        v_x = self.ln_1_kv(v_x) if hasattr(self, "ln_1_kv") and v_x is not None else None
        x = q_x + self.attention(self.ln_1(q_x), k_x, v_x, attn_mask)
        return x + self.mlp(self.ln_2(x))


class HandedBlock(CallersMaskBlock):
    """The same where the mask is handed on as it is."""

    def forward(self, x, attn_mask=None):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=attn_mask)[0]
        return x + self.mlp(self.ln_2(x))


class AnotherMaskBlock(CallersMaskBlock):
    """The same where the mask that its attention gets is another."""

    def attention(self, q_x, k_x=None, v_x=None, attn_mask=None):
        return super().attention(q_x, k_x, v_x, None if attn_mask is None else attn_mask * 0.5)


class PackedWeight(nn.Module):
    """open_clip's own attention, which multiplies by what nn.MultiheadAttention names its weights;
    each third of them alone where keys and values are given."""

    def __init__(self, dim=32, heads=2, qk_norm=False, sdpa=True, bias=True):
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.scale, self.use_sdpa = self.head_dim**-0.5, sdpa
        self.in_proj_weight = nn.Parameter(torch.randn(3 * dim, dim) * dim**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim)) if bias else None
        self.ln_q, self.ln_k = (
            nn.LayerNorm(dim // heads) if qk_norm else nn.Identity() for _ in "qk"
        )
        self.attn_drop, self.out_drop = nn.Dropout(0.0), nn.Dropout(0.0)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x, k_x=None, v_x=None, attn_mask=None):
        N, L, C = x.shape
        if k_x is None and v_x is None:
            qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            qkv = map(F.linear, (x, k_x, v_x), self.in_proj_weight.chunk(3), biases)
        q, k, v = (t.reshape(N, -1, self.num_heads, self.head_dim).transpose(1, 2) for t in qkv)
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask.reshape(N, self.num_heads, L, L)
        q, k = self.ln_q(q), self.ln_k(k)
        if self.use_sdpa:
            p = self.attn_drop.p if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask, p, scale=self.scale)
        else:
            scores = q * self.scale @ k.mT
            scores = scores if attn_mask is None else scores + attn_mask
            y = self.attn_drop(scores.softmax(dim=-1)) @ v
        return self.out_drop(self.out_proj(y.transpose(1, 2).reshape(N, -1, C)))


class PackedWeightBlock(CallersMaskBlock):
    """The same block around that: it always gives keys and values."""

    def __init__(self, dim=32, heads=2, **options):
        super().__init__(dim, heads)
        self.attn = PackedWeight(dim, heads, **options)

    def attention(self, q_x, k_x=None, v_x=None, attn_mask=None):
        k_x = q_x if k_x is None else k_x
        v_x = q_x if v_x is None else v_x
        mask = None if attn_mask is None else attn_mask.to(q_x.dtype)
        return self.attn(q_x, k_x=k_x, v_x=v_x, attn_mask=mask)


class Tower(nn.Module):
    """open_clip's text tower, or with images its other tower; recomputed where it `checkpoints`."""

    def __init__(self, block, depth=2, dim=32, length=6, words=20, causal=True):
        super().__init__()
        self.embedding = nn.Embedding(words, dim) if causal else nn.Conv2d(3, dim, 8, 8, bias=False)
        self.positional_embedding = nn.Parameter(torch.randn(length, dim))
        self.resblocks = nn.ModuleList(block(dim) for _ in range(depth))
        self.ln_final = nn.LayerNorm(dim)
        mask = torch.full((length, length), float("-inf")).triu(1) if causal else None
        self.register_buffer("attn_mask", mask, persistent=False)
        self.checkpoints = False

    def forward(self, x):
        x = self.embedding(x)
        x = x.flatten(2).mT if x.ndim == 4 else x
        x = x + self.positional_embedding
        for block in self.resblocks:
            if self.checkpoints:
                x = checkpoint(block, x, None, None, self.attn_mask, use_reentrant=False)
            else:
                x = block(x, attn_mask=self.attn_mask)
        return self.ln_final(x).mean(1)


class Clip(nn.Module):
    """Both towers, for pairs of images (B, 3, 16, 16) and texts (B, 6)."""

    def __init__(self, block=CallersMaskBlock):
        super().__init__()
        self.visual, self.text = Tower(block, length=4, causal=False), Tower(block)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        both = self.visual(image), self.text(text)
        image, text = (nn.functional.normalize(x, dim=-1) for x in both)
        return self.logit_scale.exp() * image @ text.mT
