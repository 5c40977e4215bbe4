"""timm's whole models: NaFlexVit gives its blocks a mask of keys, PatchDropout embeds what is kept.

Numbers, gradients and draws are the host's in float64, and by the 2x rule through the kernels.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastvit_kernels.swap.hosts.masks as masks
import fastvit_kernels.swap.hosts.special.models as models
from fastvit_kernels import backend, swap_in
from fastvit_kernels.swap.compare import model_errors
from fastvit_kernels.swap.hosts.fused import Fused
from tests.model_coverage.compare import difference, randomize

timm = pytest.importorskip("timm")

NARROW: dict[str, Any] = dict(embed_dim=16, depth=2, num_heads=2, num_classes=3)
NAFLEX = {
    "gap": ("gap", dict(init_values=0.5)),
    "map": ("siglip", {}),  # pools by attention, and has no token before the patches
    "max": ("gap", dict(global_pool="avgmax")),
    "rope": ("gap", dict(rope_type="axial", qk_norm=True)),
    "dropped": ("gap", dict(patch_drop_rate=0.4)),
    "of_keys": ("gap", dict(use_key_only_attn_mask=True)),
}
pytestmark = pytest.mark.skipif(
    not hasattr(timm.models, "naflexvit"), reason="this version of timm has no NaFlexVit"
)


def _naflex(name: str, **more: Any) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model, and patches of a whole image, of half a one and of a single row."""
    kind, settings = NAFLEX[name]
    model = timm.create_model(
        f"naflexvit_base_patch16_{kind}",
        patch_size=4,
        **{**NARROW, "drop_path_rate": 0.2, **settings, **more},
    )
    torch.manual_seed(0)
    coord = torch.cartesian_prod(torch.arange(4), torch.arange(3)).repeat(3, 1, 1)
    valid = torch.arange(12) < torch.tensor([[12], [6], [3]])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 12, 48, generator=generator)
    return randomize(model), dict(x=x, patch_coord=coord, patch_valid=valid)


def _noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Shape and dtype of each mask that a fused block takes."""
    found: list[tuple[Any, ...]] = []

    def noted(roles: Any, mask: Any, x: torch.Tensor) -> bool:
        if mask is not None:
            found.append((tuple(mask.shape), mask.dtype))
        return masks.fits(roles, mask, x)

    monkeypatch.setattr("fastvit_kernels.swap.hosts.attention.fits", noted)
    return found


@pytest.mark.parametrize("name", NAFLEX)
def test_naflex_masks_its_keys(name, monkeypatch):
    model, inputs = _naflex(name)
    with backend("torch"):
        report = swap_in(copy.deepcopy(model))
        assert report.level == "block" and report.swapped[0].level == "model", str(report)
        found = _noted(monkeypatch)
        assert difference(model, inputs) == ""
        T = (12 if name != "dropped" else int(12 * 0.6)) + model.num_prefix_tokens
        assert found == [((3, 1, 1, T), torch.bool)] * 2
        as_dict = {n: v.double() if n == "x" else v for n, v in inputs.items()}
        as_dict["patches"] = as_dict.pop("x")
        swap_in(model.double())
        model(as_dict)
        assert found[2:] == found[:2]


@pytest.mark.parametrize("name", ["gap", "rope"])
def test_naflex_through_the_kernels(name):
    model, inputs = _naflex(name, depth=1)
    failed = [str(e) for e in model_errors(model.eval(), inputs) if not e.passed]
    assert not failed, "\n".join(failed)


class _Rows(nn.Module):
    """All rows of a NaFlexVit, those of padding too."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Any, **given: Any) -> Any:
        return self.model.forward_features(x, **given)["patches"]


def test_rows_of_padding_are_the_hosts_where_they_are_given(monkeypatch):
    model, inputs = _naflex("gap", depth=1)
    with backend("torch"):
        swap_in(_Rows(copy.deepcopy(model).eval()))  # what is proven here is not noted below
    found = _noted(monkeypatch)
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused CPU backward errs where all is masked
        failed = [str(e) for e in model_errors(_Rows(model.eval()), inputs) if not e.passed]
    assert not failed, "\n".join(failed)
    assert {shape for shape, _ in found} == {(3, 1, 16, 16)}
    unpooled, inputs = _naflex("gap", global_pool="")
    with backend("torch"):
        report = swap_in(copy.deepcopy(unpooled))
        assert "its result has the rows of padding" in str(report)
        assert difference(unpooled, inputs) == ""


def _mask_to(model: nn.Module, inputs: dict[str, Any]) -> list[Any]:
    """The masks that its first block is called with."""
    found: list[Any] = []
    forward = type(model.blocks[0]).forward  # pyright: ignore[reportIndexIssue]

    def noted(block: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(kwargs.get("attn_mask"))
        return forward(block, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.blocks[0]), "forward", noted)  # pyright: ignore[reportIndexIssue]
        model(**inputs)
    return found


def _seen(model: nn.Module, part: str, inputs: Any) -> torch.Tensor:
    """What a hook on a part of it sees."""
    found: list[torch.Tensor] = []
    watched = model.get_submodule(part)
    handle = watched.register_forward_hook(lambda module, args, output: found.append(output))
    model(**inputs) if isinstance(inputs, dict) else model(inputs)
    handle.remove()
    return found[0]


def test_who_sees_rows_of_padding_gets_the_hosts_mask():
    model, inputs = _naflex("gap", drop_path_rate=0.0)
    host = copy.deepcopy(model)
    with backend("torch"):
        swap_in(model)
        assert isinstance(model, models.NaFlexVit)
        assert _mask_to(model, inputs)[0].shape == (3, 1, 1, 16)
        for part in ("blocks.1", "blocks.0.attn.proj", "norm"):
            torch.testing.assert_close(*(_seen(m, part, inputs) for m in (model, host)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.norm, "forward", model.norm.forward)
            assert _mask_to(model, inputs)[0].shape == (3, 1, 16, 16)
        own = inputs["patch_valid"].new_ones(3, 1, 16, 16)
        assert _mask_to(model, inputs | {"attn_mask": own})[0] is own
        model.blocks[0].attn.fused_attn = False  # it adds any mask to its scores
        assert _mask_to(model, inputs)[0].shape == (3, 1, 16, 16)
        torch.testing.assert_close(model(**inputs), host(**inputs))


def test_an_image_of_padding_alone_is_finite():
    model, inputs = _naflex("map", depth=1)
    inputs["patch_valid"][2] = False
    swap_in(model)
    result = model(**inputs)
    result.square().sum().backward()
    assert result.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


DROPPED = {
    "class": {},
    "registers": dict(class_token=True, reg_tokens=2, no_embed_class=True),
    "patches": dict(class_token=False, global_pool="avg", pre_norm=True, pos_embed="learn"),
}


def _dropping(**settings: Any) -> nn.Module:
    model = timm.create_model(
        "vit_base_patch16_224",
        img_size=(16, 12),
        patch_size=4,
        **{**NARROW, "drop_path_rate": 0.2, "patch_drop_rate": 0.6, **settings},
    )
    return randomize(model)


def _images(**like: Any) -> torch.Tensor:
    return torch.randn(2, 3, 16, 12, generator=torch.Generator().manual_seed(1), **like)


@pytest.mark.parametrize("name", DROPPED)
def test_dropped_patches_are_not_embedded(name, monkeypatch):
    model = _dropping(**DROPPED[name])
    kept: list[Any] = []

    def noted(*args: Any, keep: Any = None, **kwargs: Any) -> torch.Tensor:
        kept.append(keep)
        return embed(*args, keep=keep, **kwargs)

    embed = models.patch_embed
    with backend("torch"):
        report = swap_in(copy.deepcopy(model))
        assert report.swapped[0].level == "model" and report.level == "block", str(report)
        monkeypatch.setattr(models, "patch_embed", noted)
        assert difference(model, _images()) == ""
        assert [tuple(k.shape) for k in kept] == [(2, 4)]
        swap_in(model.eval())
        model(_images())
        assert len(kept) == 1  # evaluation drops nothing
        model.train().patch_drop.eval()
        model(_images())
        assert len(kept) == 1


def test_dropped_patches_through_the_kernels():
    model = _dropping(depth=1, drop_path_rate=0.0)
    failed = [str(e) for e in model_errors(model.train(), _images()) if not e.passed]
    assert not failed, "\n".join(failed)


def test_what_wants_every_patch_embeds_every_patch():
    for settings, reason in (
        (dict(pos_drop_rate=0.1), "its dropout draws for them, too"),
        (dict(dynamic_img_size=True), "its images have no fixed size"),
        (dict(embed_norm_layer="layernorm"), "a part of the embedding is called"),
    ):
        model = _dropping(**settings)
        with backend("torch"):
            report = swap_in(copy.deepcopy(model))
            assert reason in str(report) and report.level == "block"
            assert difference(model, _images()) == ""
    model = _dropping()
    model.patch_drop.num_prefix_tokens = 0
    with backend("torch"):
        report = swap_in(copy.deepcopy(model))
        assert "some tokens before them may be dropped" in str(report)
        assert difference(model, _images()) == ""
    model = _dropping(drop_path_rate=0.0)
    with backend("torch"):
        swap_in(model)
        assert isinstance(model, Fused)
        assert _seen(model, "patch_embed", _images()).shape == (2, 12, 16)


@pytest.mark.parametrize("kind", ["naflex", "dropped"])
def test_under_autocast_types_are_the_hosts(kind):
    model, inputs = _naflex("gap", depth=1) if kind == "naflex" else (_dropping(depth=1), _images())
    host, found = copy.deepcopy(model), []
    with backend("torch"):
        swap_in(model)
        for m in (host, model):
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16):
                result = m(**inputs) if isinstance(inputs, dict) else m(inputs)
            found.append(result)
    assert found[0].dtype == found[1].dtype
    torch.testing.assert_close(found[1], found[0], rtol=0.1, atol=0.1)
