"""The model of a run as its settings build it: pretrained weights, frozen parameters, LoRA by peft;
and plain PyTorch beside it."""

from __future__ import annotations

import copy
import fnmatch
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ...models.vit import VisionTransformer
from ...runtime.compat import define_torchvision_operators
from ...swap.apply import swap_out
from ...verify.plain_vit import plain_vit
from ...weights.files import read_file
from ...weights.load import load_weights
from ..console import CommandError, refusing, require
from ..models import fused_model, snapshot, source_folder
from .settings import DIGITS_VIT, Settings

# Below this embed_dim timm's 0.02, which suits C = 768, starves the branches and the positions.
NARROW = 192
# A classifier is trained anew; everything else must fit.
HEAD = re.compile(r"(^|\.)(head|heads|classifier|cls_classifier|distillation_classifier)\.")
# The Linears that make queries, keys and values, by the last part of their names.
QKV = ["qkv", "query", "key", "value", "q_proj", "k_proj", "v_proj", "q", "k", "v"]
UNFIT = (TypeError, ValueError, OSError, RuntimeError)  # where a file does not fit its model
TIMM_FILES = ("model.safetensors", "pytorch_model.bin")  # of a repository; timm knows no shards
_WRAPPERS = ("state_dict", "model", "model_ema", "teacher")


def model_of(
    settings: Settings, num_classes: int, say: Callable[[str], None] | None = None
) -> nn.Module:
    """The model of a run with random weights, drawn from torch's global generator. With `say` it
    loads --weights too, and says what was loaded."""
    options: dict[str, Any] = dict(
        img_size=settings.img_size, in_chans=settings.in_chans, num_classes=num_classes
    )
    if settings.drop_path:  # some hosts have none
        options["drop_path_rate"] = settings.drop_path
    if settings.model is not None:
        model = fused_model(settings.model, **options)
    else:
        with refusing("the small ViT for digits", ValueError):
            model = VisionTransformer(**{**DIGITS_VIT, **options})
    if isinstance(model, VisionTransformer) and model.embed_dim < NARROW:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        if model.pos_embed is not None:
            nn.init.trunc_normal_(model.pos_embed, std=0.3)
    if settings.weights is not None and say is not None:
        say(load_into(model, settings.weights))
    if settings.lora:
        add_lora(model, settings.lora)
    freeze(model, settings.freeze)
    return model


def host_of(model: nn.Module) -> nn.Module:
    """A copy of a swapped model that runs its host's own code."""
    host = copy.deepcopy(model)
    swap_out(host)
    return host


def plain_copy(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Any]]:
    """A copy of the weights, and its output by plain PyTorch: `plain_vit`, or the host's code."""
    if isinstance(model, VisionTransformer):
        ours = copy.deepcopy(model)
        return ours, lambda images: plain_vit(ours, dict(ours.named_parameters()), images)
    host = host_of(model)
    return host, host


def tensors_in(content: Any, source: str) -> dict[str, Tensor]:
    """The state dict in what a file holds, without the prefix of DDP or torch.compile."""
    for wrapper in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not content:
        raise CommandError(f"--weights {source} holds no tensors by name")
    found = {k: v for k, v in content.items() if isinstance(v, Tensor)}
    for prefix in ("module.", "_orig_mod."):
        consume_prefix_in_state_dict_if_present(found, prefix)
    return found


def _pretrained(source: str, model: nn.Module) -> dict[str, Tensor]:
    """What the disk holds of a name of timm or transformers, or of a folder."""
    host, _, name = source.partition(":")
    define_torchvision_operators()
    if host == "timm":
        library: Any = require("timm", "timm", "timm")
        config = library.get_pretrained_cfg(name)
        if config is None or not config.hf_hub_id:
            raise CommandError(f"--weights {source}: timm knows no weights of that name")
        folder = snapshot(config.hf_hub_id)
        file = next((folder / name for name in TIMM_FILES if (folder / name).is_file()), None)
        if file is None:
            raise CommandError(f"{folder} holds none of {', '.join(TIMM_FILES)}")
        return tensors_in(read_file(file), source)
    library = require("transformers", "transformers", "transformers")
    own: Any = model
    with refusing(f"--weights {source} cannot be read", Exception):  # of its readers and checks
        return library.AutoModelForImageClassification.from_pretrained(
            source_folder(source),
            num_labels=own.config.num_labels,
            local_files_only=True,
            ignore_mismatched_sizes=True,
        ).state_dict()


def load_into(model: nn.Module, source: str) -> str:
    """Copy pretrained weights into a model, all that fit but another classifier, or none; a line
    that says what was loaded.

    source: a file of any family that `load_weights` reads, for our models; a state dict of the
    model's own names, for a host's; timm:NAME or hf:NAME, from the cache of huggingface_hub; after
    hf: also a folder.
    """
    with refusing(f"--weights {source} does not fit the model", *UNFIT):
        named = source.startswith(("timm:", "hf:"))
        found = _pretrained(source, model) if named else tensors_in(read_file(Path(source)), source)
        if isinstance(model, VisionTransformer):
            # Without a classifier of another number of classes, whatever its family calls it.
            count: Any = getattr(model.head, "out_features", 0)
            found = {n: v for n, v in found.items() if not HEAD.search(n) or len(v) == count}
            report = load_weights(model, found)
            loaded, missing = report.loaded, report.missing
        else:
            loaded, missing = _load_host(model, found)
    if absent := [n for n in missing if not HEAD.search(n)]:
        more = ", ..." if len(absent) > 3 else ""
        raise CommandError(
            f"--weights {source} does not fit the model: it lacks {', '.join(absent[:3])}{more}"
        )
    new = sorted({n.rpartition(".")[0] for n in missing})
    return f"Weights: {len(loaded)} tensors of {source}" + (f"; new: {', '.join(new)}" * bool(new))


def _load_host(model: nn.Module, found: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Names that were loaded, and names that are missing; nothing is loaded if that is more than a
    classifier. timm's own renaming and resizing of positions, where its file of this model has one.

    Raises: ValueError for another shape of anything but the classifier.
    """
    modules = (c.__module__ for c in type(model).__mro__ if c.__module__.startswith("timm."))
    change = getattr(sys.modules.get(next(modules, "")), "checkpoint_filter_fn", None)
    found = change(found, model) if change else found
    own = model.state_dict()
    other = [n for n in found if n in own and found[n].shape != own[n].shape]
    for n in other:
        if not HEAD.search(n):
            there, here = tuple(found[n].shape), tuple(own[n].shape)
            raise ValueError(f"{n} is {there} there and {here} here")
    fitting = {n: v for n, v in found.items() if n in own and n not in other}
    missing = [n for n in own if n not in fitting]
    if all(HEAD.search(n) for n in missing):
        model.load_state_dict(fitting, strict=False)
    return list(fitting), missing


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take gradients from the parameters that a pattern names; "backbone" is all but the head."""
    named = dict(model.named_parameters())
    for pattern in patterns:
        backbone = [name for name in named if not HEAD.search(name)]
        chosen = backbone if pattern == "backbone" else fnmatch.filter(named, pattern)
        if not chosen:
            some = ", ".join(list(named)[:4])
            raise CommandError(f"--freeze {pattern} names no parameter; there are {some}, ...")
        for name in chosen:
            named[name].requires_grad_(False)
    if patterns and not any(p.requires_grad for p in named.values()):
        raise CommandError(f"--freeze {' '.join(patterns)} leaves no parameter to train")


def add_lora(model: nn.Module, rank: int) -> None:
    """peft's LoRA on the Linears of queries, keys and values; what else is trained is the head."""
    if isinstance(model, VisionTransformer):
        raise CommandError("--lora is for models of other libraries: --model timm:NAME or hf:TYPE")
    peft: Any = require("peft", "peft", "peft")
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=QKV)
    with refusing("--lora", ValueError):
        peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if HEAD.search(name):
            parameter.requires_grad_(True)


def merged(model: nn.Module, settings: Settings) -> nn.Module:
    """The model with LoRA added to its weights, under the names it had: what weights.pth holds."""
    if not settings.lora:
        return model
    layers: Any = require("peft.tuners.tuners_utils", "peft", "peft")
    model = copy.deepcopy(model)
    adapted: list[tuple[str, Any]] = list(model.named_modules())
    for name, module in adapted:
        if isinstance(module, layers.BaseTunerLayer):
            with torch.no_grad():
                module.merge()
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.get_base_layer())
    return model
