"""timm: whole models, for what no block can know.

NaFlexVit pads its images to one number of patches. It masks the scores of both, queries and keys of
padding, by a tensor (B, 1, T, T) that every block reads. Padding as a key is all that anybody sees
of it: pooling leaves its rows out. So the blocks of a forward get a mask of the keys (B, T), one
byte each, whose hidden tiles cost nothing. Rows of padding then hold attention over the patches of
their image, where timm's hold the mean of all values; whoever asks for rows (forward_features,
forward_intermediates, a hook, a model without pooling) gets timm's mask and its numbers.

VisionTransformer with a PatchDropout: what it draws is drawn first, and the patches that it drops
are neither read nor embedded.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ....models.patch_dropout import draw_kept
from ....ops.patch_embed.functions import patch_embed
from ....runtime.plain import is_hooked
from ...facts import is_recognised
from ..fused import Fused, Given, Unfused, bound, can_inline, example, is_dense, is_noop, names, row
from ..torch_nn import PatchConv

BY_KEYS = "by keys"  # in the place of a mask: what asks for ours


def is_watched_inside(*modules: nn.Module) -> bool:
    """Whether somebody sees what goes through one of these modules or a part of it."""
    for module in chain.from_iterable(map(nn.Module.modules, modules)):
        own = vars(module)
        hooks = (*own["_forward_pre_hooks"].values(), *own["_forward_hooks"].values())
        homes = [str(getattr(hook, "__module__", "")) for hook in hooks]
        if not all(home.startswith("torch.distributed.") for home in homes):
            return True  # those gather the shards of a module
        if own["_backward_hooks"] or own["_backward_pre_hooks"] or "forward" in own:
            return True
    return False


class NaFlexVit(Fused):
    fused_level = "model"
    fused_extra_kwargs = ("patch_coord", "patch_valid")

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        takes_patches = module.embeds.is_linear and hasattr(module, "_forward_embeds")
        return None if takes_patches else ""

    def fused_blocked(self: Any) -> str | None:
        if self.attn_pool is None and self.global_pool == "":
            return "its result has the rows of padding"
        for attn in (getattr(block, "attn", None) for block in self.blocks):
            takes = "attn_mask" in getattr(attn, "fused_extra_kwargs", ())
            if not takes or is_recognised(type(attn)) or attn.fused_blocked() is not None:  # type: ignore[union-attr]
                return "a block of it takes no mask of keys"
        readers = [m for m in (self.blocks, self.norm, self.attn_pool) if m is not None]
        return "a hook inside sees the rows of padding" if is_watched_inside(*readers) else None

    def fused_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given | None:
        """Patches with their coordinates and which of them are valid, or a dict of these."""
        names = self.fused_arguments.names
        given = bound(names, args, kwargs)
        if given is None or not given.keys() <= set(names):
            return None
        x = given.pop(names[0], None)
        known = {**given, **(x if isinstance(x, dict) else {"patches": x})}
        tensors = [known.get(n) for n in ("patches", "patch_coord", "patch_valid")]
        if known.get("attn_mask") is not None or not all(map(is_dense, tensors)):
            return None
        given.pop("attn_mask", None)
        return x, given

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        for height, width in ((3, 2), (2, 2)):
            coord = torch.cartesian_prod(torch.arange(height), torch.arange(width))
            valid = torch.arange(height * width) < torch.tensor([[height * width], [width]])
            x = example(generator, 2, height * width, self.embeds.proj.in_features)
            yield (x,), {"patch_coord": coord.repeat(2, 1, 1), "patch_valid": valid}

    def fused_forward(self: Any, x: Any, **given: Any) -> Tensor:
        return super(Fused, self).forward(x, **given, attn_mask=BY_KEYS)  # type: ignore[misc]

    def _forward_embeds(
        self: Any, x: Tensor, patch_coord: Any, patch_valid: Any, attn_mask: Any
    ) -> dict[str, Any]:
        found = super()._forward_embeds(x, patch_coord, patch_valid, attn_mask)  # type: ignore[misc]
        if isinstance(attn_mask, str):
            valid = found["patch_valid"].bool()  # of those that PatchDropout keeps
            prefix = valid.new_ones(len(valid), self.num_prefix_tokens)
            found["attn_mask"] = torch.cat([prefix, valid], dim=1)[:, None, None, :]
        return found


class VisionTransformer(Fused):
    fused_level = "model"

    @classmethod
    def fused_reject(cls, module: Any) -> str | None:
        return None if type(module.patch_drop).__name__ == "PatchDropout" else ""

    def fused_blocked(self: Any) -> str | None:
        if self.dynamic_img_size or self.patch_embed.dynamic_img_pad:
            return "dropped patches are embedded first: its images have no fixed size"
        if self.patch_drop.num_prefix_tokens != self.num_prefix_tokens:
            return "dropped patches are embedded first: some tokens before them may be dropped"
        embed = self.patch_embed
        children = self.patch_drop, embed, embed.proj
        if any(map(is_hooked, children)) or not (is_noop(embed.norm) and can_inline(embed.proj)):
            return "dropped patches are embedded first: a part of the embedding is called"
        if not is_noop(self.pos_drop) or getattr(self.pos_drop, "p", 0) > 0:
            return "dropped patches are embedded first: its dropout draws for them, too"
        return None

    def fused_takes(self: Any, x: Tensor) -> bool:
        active = self.patch_drop.training and self.patch_drop.prob > 0
        return active and x.ndim == 4 and tuple(x.shape[2:]) == tuple(self.patch_embed.img_size)

    def fused_shapes(self: Any) -> list[tuple[int, ...]]:
        return [(2, self.patch_embed.proj.in_channels, *self.patch_embed.img_size)]

    def fused_forward(self: Any, x: Tensor) -> Tensor:
        proj, drop = self.patch_embed.proj, self.patch_drop
        grid = (n // p for n, p in zip(x.shape[2:], proj.kernel_size, strict=True))
        keep = draw_kept(len(x), math.prod(grid), drop.prob, x.device)
        keep = keep.sort(dim=-1)[0] if drop.ordered else keep
        tokens = (self.cls_token, getattr(self, "reg_token", None))
        prefix = [t for t in tokens if t is not None]
        x = patch_embed(
            x,
            proj.weight,
            proj.bias,
            prefix_tokens=torch.cat(prefix, 1) if prefix else None,
            pos_embed=self.pos_embed,
            keep=keep,
        )
        x = self.norm_pre(x)
        if self.grad_checkpointing:
            x = vars(sys.modules[self.fused_host.__module__])["checkpoint_seq"](self.blocks, x)
        else:
            x = self.blocks(x)
        return self.forward_head(self.norm(x))


# The embeddings read its projection.
MAE_PATCHES = row(Unfused, level="epilogue", children=names("projection"))


class MaeEmbeddings(Fused):
    fused_level = "patch_embed"
    fused_children = names("cls_token patch_embeddings position_embeddings")
    fused_extra_kwargs = ("noise", "interpolate_pos_encoding")
    fused_axes = (4,)

    def fused_blocked(self: Any) -> str | None:
        patches = self.patch_embeddings
        projection = patches.projection
        if not (isinstance(patches, MAE_PATCHES) and can_inline(patches)):
            return "its patch embedding must be called"
        if not (isinstance(projection, PatchConv) and can_inline(projection)):
            return "its projection must be called"
        return None

    def fused_examples(self: Any, generator: torch.Generator) -> Iterator[tuple[tuple, dict]]:
        patches = self.patch_embeddings
        x = example(generator, 2, patches.num_channels, *patches.image_size)
        yield (x,), {}
        yield (x,), {"noise": example(generator, 2, patches.num_patches).detach()}

    def fused_checked(self: Any, x: Any, extras: dict[str, Any]) -> Given | None:
        if extras.pop("interpolate_pos_encoding", False):
            return None
        patches = self.patch_embeddings
        noise, wanted = extras.get("noise"), ((x.shape[0], patches.num_patches), x.device)
        known = noise is None or (is_dense(noise) and (noise.shape, noise.device) == wanted)
        fits = tuple(x.shape[1:]) == (patches.num_channels, *patches.image_size)
        keeps = int(patches.num_patches * (1 - self.config.mask_ratio)) > 0
        return (x, extras) if known and fits and keeps and x.is_floating_point() else None

    def fused_forward(self: Any, x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, ...]:
        projection = self.patch_embeddings.projection
        places = torch.arange(self.patch_embeddings.num_patches, device=x.device)
        places = places.expand(x.shape[0], -1).unsqueeze(-1)
        keep, mask, restore = self.random_masking(places, noise)
        tokens = patch_embed(
            x,
            projection.weight,
            projection.bias,
            prefix_tokens=self.cls_token,
            pos_embed=self.position_embeddings,
            keep=keep.squeeze(-1),
        )
        return tokens, mask, restore
