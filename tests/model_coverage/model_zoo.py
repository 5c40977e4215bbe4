"""Models of the host libraries by name: as they are on the meta device, and cut down to be run.

A small model keeps the structure of its name: two blocks, two heads, a narrow width, few tokens.
Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# Files of timm with transformers for images, hybrids among them: attention, or blocks of its form
TIMM_FILES = """
beit cait coat convit crossvit davit deepseek_vit deit edgenext efficientformer
efficientformer_v2 efficientvit_mit efficientvit_msra eva fastvit focalnet gcvit gemma4_vit
hiera hieradet_sam2 iformer levit lowformer maxxvit metaformer mlp_mixer mobilevit mvitv2
naflexvit nest nextvit pit pvt_v2 qwen3_vit sequencer shvit swiftformer swin_transformer
swin_transformer_v2 swin_transformer_v2_cr tiny_vit tnt twins visformer vision_transformer
vision_transformer_hybrid vision_transformer_relpos vision_transformer_sam vitamin volo xcit
""".split()
OF_TRANSFORMERS = r"LayerNorm|RMSNorm|(?<!No)Attention\b"  # in a file of transformers


class _RatesOnCpu(TorchFunctionMode):
    """Constructors of older versions ask torch.linspace for the values of their rates."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.linspace:
            kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Modules that are made inside have no memory."""
    with torch.device("meta"), _RatesOnCpu():
        yield


def timm_names() -> list[str]:
    """The names of timm's transformers, in timm's order."""
    import timm

    files = set(timm.list_modules())
    names = [n for file in TIMM_FILES if file in files for n in timm.list_models(module=file)]
    return sorted(set(names), key=timm.list_models().index)


def _patch(name: str) -> int:
    found = re.search(r"patch(\d+)|_p(\d+)_", name)
    other = 14 if name.startswith("deepseek") else 16
    return int(found.group(1) or found.group(2)) if found else other


def _swin_overrides(name: str) -> dict[str, Any]:
    small = dict(embed_dim=32, depths=(2, 2), num_heads=(2, 2), img_size=32, window_size=4)
    return small | (dict(patch_size=4) if "_cr_" in name or "s3" in name else {})


def _timm_overrides(name: str) -> dict[str, Any]:
    if name.startswith("swin"):
        return _swin_overrides(name)
    size = 3 * _patch(name)
    if re.search(r"_r\d+|_r_|resnet", name):
        size = 64  # a ResNet stem
    small: dict[str, Any] = dict(embed_dim=64, depth=2, num_heads=2, img_size=size)
    if "mci" in name:
        small |= dict(embed_dim=768, num_heads=12)  # the stem's own width
    if "sapiens2" in name:
        small["num_kv_heads"] = (2, 1)  # a block with all heads, a block with grouped ones
    if "giant" in name and name.startswith("vit"):
        small["mlp_ratio"] = 4.0  # a gated MLP needs an even width
    if name.startswith("vit_little") or "wee" in name:
        small["mlp_ratio"] = 4.0
    return small


def _images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def timm_small(name: str, **settings: Any) -> tuple[nn.Module, Tensor]:
    """A small model of this timm name, with a batch of two images."""
    import timm

    overrides = _timm_overrides(name) | settings
    model = timm.create_model(name, pretrained=False, num_classes=7, **overrides)
    return model, _images(overrides["img_size"])


def torchvision_names() -> list[str]:
    from torchvision import models

    return [n for n in models.list_models() if n.startswith(("vit_", "swin_", "maxvit"))]


def torchvision_small(name: str) -> tuple[nn.Module, Tensor]:
    """A small model of this torchvision name, with a batch of two images."""
    from torchvision import models

    if name.startswith("vit_"):
        return models.VisionTransformer(48, 16, 2, 2, 64, 128, num_classes=7), _images(48)
    if name.startswith("swin"):
        second = "_v2_" in name
        parts = models.swin_transformer
        block = parts.SwinTransformerBlockV2 if second else parts.SwinTransformerBlock
        merging = parts.PatchMergingV2 if second else parts.PatchMerging
        model = models.SwinTransformer(
            [4, 4], 32, [2, 2], [2, 2], [4, 4], block=block, downsample_layer=merging, num_classes=7
        )
        return model, _images(64)
    model = models.MaxVit((64, 64), 16, 4, [32, 64], [1, 1], 16, 0.2, num_classes=7)
    return model, _images(64)


_HF_NARROW = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
_HF_SMALL = dict(image_size=48, patch_size=16, **_HF_NARROW)
_HF_WIDE = dict(intermediate_size=128, **_HF_SMALL)
_HF_PATCHES = dict(intermediate_size=128, patch_size=16, **_HF_NARROW)

# name -> (model class, config class, settings of the small model)
HF_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTModel", "ViTConfig", _HF_WIDE),
    "deit": ("DeiTModel", "DeiTConfig", _HF_WIDE),
    "vit_mae": ("ViTMAEModel", "ViTMAEConfig", dict(mask_ratio=0.0, **_HF_WIDE)),
    "vit_msn": ("ViTMSNModel", "ViTMSNConfig", _HF_WIDE),
    "ijepa": ("IJepaModel", "IJepaConfig", _HF_WIDE),
    "dinov2": ("Dinov2Model", "Dinov2Config", _HF_SMALL),
    "dinov2_with_registers": (
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        dict(num_register_tokens=4, **_HF_SMALL),
    ),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", _HF_WIDE),
    "siglip2": ("Siglip2VisionModel", "Siglip2VisionConfig", dict(num_patches=9, **_HF_WIDE)),
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", _HF_WIDE),
    "dinov3_vit": ("DINOv3ViTModel", "DINOv3ViTConfig", _HF_WIDE),
    "beit": ("BeitModel", "BeitConfig", dict(use_relative_position_bias=True, **_HF_WIDE)),
    "aimv2": ("Aimv2VisionModel", "Aimv2VisionConfig", _HF_WIDE),
    "internvl": (
        "InternVLVisionModel",
        "InternVLVisionConfig",
        _HF_WIDE | dict(image_size=(48, 48), patch_size=(16, 16)),
    ),
    "mlcd": ("MLCDVisionModel", "MLCDVisionConfig", _HF_WIDE),
    "pixtral": ("PixtralVisionModel", "PixtralVisionConfig", dict(head_dim=32, **_HF_WIDE)),
    "gemma4": (
        "Gemma4VisionModel",
        "Gemma4VisionConfig",
        dict(num_key_value_heads=2, head_dim=32, position_embedding_size=8, **_HF_PATCHES),
    ),
    "vjepa2": (
        "VJEPA2Model",
        "VJEPA2Config",
        dict(crop_size=48, patch_size=16, frames_per_clip=4, mlp_ratio=2.0, **_HF_NARROW)
        | dict(pred_hidden_size=64, pred_num_hidden_layers=1, pred_num_attention_heads=2),
    ),
}


def hf_small(name: str, **settings: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model of transformers, with its inputs."""
    import transformers

    model_class, config_class, small = HF_MODELS[name]
    config = getattr(transformers, config_class)(**{**small, **settings})
    model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(0)
    if name == "siglip2":  # patches, with a mask that hides none
        return model, {
            "pixel_values": torch.randn(2, 9, 16 * 16 * 3, generator=generator),
            "pixel_attention_mask": torch.ones(2, 9, dtype=torch.long),
            "spatial_shapes": torch.tensor([[3, 3], [3, 3]]),
        }
    if name == "gemma4":
        grid = torch.cartesian_prod(torch.arange(3), torch.arange(3))
        return model, {
            "pixel_values": torch.rand(2, 9, 16 * 16 * 3, generator=generator),
            "pixel_position_ids": grid.expand(2, -1, -1),
        }
    if name == "vjepa2":
        return model, {"pixel_values_videos": torch.randn(2, 4, 3, 48, 48, generator=generator)}
    return model, {"pixel_values": _images(48)}


def small(host: str, name: str) -> tuple[nn.Module, Any] | None:
    """A small model with DropPath for a row of the coverage table, None where there is none."""
    if host == "timm":
        rates = {} if name.startswith("swin") else {"drop_path_rate": 0.3}
        try:
            return timm_small(name, **rates)
        except TypeError:  # a family without DropPath
            return timm_small(name)
    if host == "nn":
        return NN[name](), torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    if host == "torchvision":
        return torchvision_small(name)
    for key, (model_class, _, _) in HF_MODELS.items():
        if model_class == name:
            rates = {"drop_path_rate": 0.3} if key.startswith(("dinov", "beit", "vjepa2")) else {}
            return hf_small(key, **rates)
    return None


@cache
def hf_names() -> list[str]:
    """Classes of transformers whose main input is images, base models first; but for convnets, and
    for linear heads on base models."""
    import transformers

    found = set()
    for file in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if file.name.startswith(("modeling_tf_", "modeling_flax_")):
            continue
        text = file.read_text()
        is_convnet = "WithNoAttention" in text and not re.search(OF_TRANSFORMERS, text)
        if is_convnet or "pixel_values" not in text:
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        found |= {
            name
            for name, value in vars(module).items()
            if isinstance(value, type)
            and issubclass(value, transformers.PreTrainedModel)
            and value.__module__ == module.__name__
            and hasattr(transformers, name)
            and value.main_input_name == "pixel_values"
            and "pixel_values" in inspect.signature(value.forward).parameters
        }
    found -= {name for name in found if "ForImageClassification" in name and _base(name) in found}
    return sorted(found, key=lambda name: ("For" in name, name))


def has_base(host: str, name: str) -> bool:
    """Whether a model is a head of transformers on a base model that has a row of its own."""
    return host == "transformers" and "For" in name and _base(name) in hf_names()


def _base(name: str) -> str:
    return name.rpartition("For")[0] + "Model"


class _Tower(nn.Module):
    """A model of one's own around torch's encoder."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


def _encoder(**more: Any) -> nn.Module:
    settings: dict[str, Any] = dict(activation="gelu", batch_first=True, norm_first=True)
    layer = nn.TransformerEncoderLayer(64, 2, 128, **(settings | more))
    return _Tower(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


NN: dict[str, Callable[[], nn.Module]] = {
    "TransformerEncoder": lambda: _encoder(dropout=0.0),
    "TransformerEncoder, dropout": lambda: _encoder(dropout=0.1),
    "TransformerEncoder, ReLU": lambda: _encoder(dropout=0.0, activation="relu"),
    "TransformerEncoder, post-norm": lambda: _encoder(dropout=0.0, norm_first=False),
    "TransformerEncoder, without bias": lambda: _encoder(dropout=0.0, bias=False),
}


# host -> its package, and the names that get a row
FULL: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "timm": ("timm", timm_names),
    "torchvision": ("torchvision", torchvision_names),
    "transformers": ("transformers", hf_names),
    "nn": ("torch", lambda: list(NN)),
}
HOSTS = tuple(FULL)


def names(host: str) -> list[str]:
    return FULL[host][1]()


def version_of(host: str) -> str:
    return importlib.metadata.version(FULL[host][0]).partition("+")[0]


def import_all(hosts: Sequence[str]) -> None:
    """What a process of its own would import for a second, in the one that it is forked from."""
    for host in hosts:
        importlib.import_module(FULL[host][0])
    importlib.import_module("torch._dynamo")
