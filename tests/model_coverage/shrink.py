"""Any model of timm or transformers, made small enough for a training step in float64.

Nothing is known of the model but its constructor: repeated blocks are cut to two, images are small,
widths stay unless the model is large. Whether a cut model runs is tried on the meta device.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .model_zoo import on_meta

LARGEST = 40e6  # parameters of a cut model
LARGE = 65_536  # numbers of a tensor that gets no initial values
LARGEST_IMAGE = 384  # of a cut model: attention in float64 over all its patches
DROP_PATH = 0.3
Built = tuple[nn.Module, dict[str, Tensor]]  # a model and its keyword arguments


class NotShrunk(Exception):
    """No small version of a model runs; says why."""


class TooLarge(NotShrunk):
    """A cut model has more than LARGEST parameters."""


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:100]


def set_drop_path(model: nn.Module, rate: float = DROP_PATH) -> None:
    """Every DropPath drops: the first block of a host's has a rate of 0."""
    for module in model.modules():
        if isinstance(getattr(module, "drop_prob", None), float):
            module.drop_prob = rate  # type: ignore[assignment]


def _form(module: nn.Module) -> str:
    return re.sub(r"drop_(prob|path)=[\d.]+", "", repr(module))


def _kind(module: nn.Module) -> tuple[type, ...]:
    return tuple(type(m) for m in module.modules())


def shrink_repeats(model: nn.Module, kinds_once: bool = True) -> None:
    """Of blocks in a row that are the same, keep two; with `kinds_once` also where others are
    between them, and of a row whose kinds an earlier row had at another width the first alone."""
    had: set[tuple[type, ...]] = set()
    for parent in list(model.modules()):
        if not isinstance(parent, (nn.Sequential, nn.ModuleList)):
            continue
        kept: list[nn.Module] = []
        forms: list[str] = []  # of those kept
        for child in parent:
            form = _form(child)
            again = (forms if kinds_once else forms[-2:]).count(form) == 2
            if kinds_once and kept and _kind(child) in had:
                again = True
            if not again or not list(child.children()):  # a layer by itself is no block
                kept.append(child)
                forms.append(form)
        had |= {_kind(child) for child in kept}
        if len(kept) < len(parent):
            del parent[len(kept) :]
            for place, child in enumerate(kept):
                parent[place] = child


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _small(model: nn.Module) -> nn.Module:
    if _parameters(model) > LARGEST:
        raise TooLarge(f"{_parameters(model) / 1e6:.0f} M parameters when it is cut")
    return model


FILLS = {getattr(Tensor, n) for n in "add_ clamp_ div_ erfinv_ fill_ mul_ zero_".split()}
DRAWS = {Tensor.normal_, Tensor.uniform_}


def _filled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that a call gives initial values; None of another call."""
    if getattr(func, "__module__", None) == nn.init.__name__:
        return kwargs["tensor"]  # as its functions hand themselves to a mode
    return args[0] if func in FILLS | DRAWS else None


class _QuickFills(TorchFunctionMode):
    """Initial values cost little, since models are built whole and most of one is cut away: none on
    meta, where an operation in place is slow; a large parameter stays zero until `randomize`, in
    memory that nothing touches; another large tensor is zero for random values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.empty and "memory_format" not in kwargs:
            func = torch.zeros
        filled = _filled(func, args, kwargs)
        if filled is not None and filled.is_meta:
            return filled
        if filled is not None and filled.numel() > LARGE:
            if isinstance(filled, nn.Parameter):
                return filled
            if func in DRAWS:
                return filled.zero_()
        return func(*args, **kwargs)


@contextmanager
def _but_for_values() -> Iterator[None]:
    """Stops without an error where `meta` is asked for values: that is for the CPU to try."""
    try:
        yield
    except RuntimeError as error:
        if "meta" not in str(error).lower():
            raise


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module | None:
    """The model without memory; None where its constructor asks for values."""
    model = None
    with _but_for_values(), on_meta(), _QuickFills():
        model = build().train()
    return model


def _try(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raises where a training step's forward does not run on `meta`, but for values it asks for."""
    arguments = {k: v.to("meta") if isinstance(v, Tensor) else v for k, v in inputs.items()}
    with _but_for_values():
        model(**arguments)


def _runs(build: Callable[[], nn.Module], inputs: Mapping[str, Any]) -> bool:
    try:
        if (model := _on_meta(build)) is not None:
            _try(model, inputs)
    except Exception:
        return False
    return True


# A size, equal for builders of models of one size but for the images'; a builder; its inputs
Candidate = tuple[Hashable, Callable[[], nn.Module], dict[str, Any]]


def _built(candidates: Iterator[Candidate]) -> Iterator[Built]:
    """Of candidates, those that are small enough and run on `meta`. Candidates of one builder come
    one after the other.

    Raises: NotShrunk at the end, with the reason against the last.
    """
    reason = "it has no candidate"
    large: set[Hashable] = set()
    last: Any = None
    model: nn.Module | None = None
    refused = False  # the last builder raised
    for of_size, build, inputs in candidates:
        if of_size in large or (build is last and refused):
            continue
        try:
            if build is not last:
                last, refused = build, True
                model = _on_meta(build)
                refused = False
            if model is not None:
                _try(_small(model), inputs)
            with _QuickFills():
                made = _small(build())
        except Exception as error:
            reason = _first_line(error)
            if isinstance(error, TooLarge):
                large.add(of_size)
            continue
        yield made, inputs
    raise NotShrunk(reason)


# timm


def _timm_candidates(name: str) -> Iterator[Candidate]:
    import timm

    full = timm.get_pretrained_cfg(name)
    own = full.input_size[-1] if full is not None else 224
    generator = torch.Generator().manual_seed(0)

    def build(narrow: int, kinds_once: bool | None, **shape: int) -> nn.Module:
        with narrower_timm(narrow):
            try:
                model = create(drop_path_rate=DROP_PATH, **shape)
            except TypeError:  # a family without DropPath, or without such a size
                model = create(**shape)
        if kinds_once is not None:
            shrink_repeats(model, kinds_once)
        set_drop_path(model)
        return model

    create = partial(timm.create_model, name, pretrained=False, num_classes=7)
    images = {n: torch.randn(2, 3, n, n, generator=generator) for n in (64, 96, 128, own)}

    @cache
    def runs(kinds_once: bool) -> bool:
        return _runs(partial(build, 1, kinds_once), {"x": images[own]})

    # Some layers that are the same are no blocks one after the other: such a cut runs at no size
    for narrow, kinds_once in (*itertools.product((1, 2, 4, 8), (True, False)), (1, None)):
        if kinds_once is not None and not runs(kinds_once):
            continue
        for size in images if narrow == 1 else (64, own):
            for shape in ({"img_size": size}, {}):
                builder = partial(build, narrow, kinds_once, **shape)
                yield (kinds_once, narrow), builder, {"x": images[size]}


TIMM_WIDTHS = re.compile(r"(embed_dims?|dims|widths|channels|num_heads|num_groups|stem_width)$")


def _narrow(value: Any, factor: int, key: str = "") -> Any:
    """A setting of timm's with its widths and heads, and those of what it holds, by the factor."""
    if isinstance(value, Mapping):
        return type(value)((k, _narrow(v, factor, k)) for k, v in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value)}
        return replace(value, **{k: _narrow(v, factor, k) for k, v in parts.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(_narrow(v, factor, key) for v in value)
    if type(value) is int and TIMM_WIDTHS.search(key):
        return max(value // factor, 1)
    return value


@contextmanager
def narrower_timm(factor: int) -> Iterator[None]:
    """Models that timm builds inside have their widths and heads divided by the factor."""
    import timm.models

    def build_by(build: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def narrower(cls: type, variant: str, *args: Any, **kwargs: Any) -> nn.Module:
            return build(cls, variant, *args, **_narrow(kwargs, factor))

        return narrower

    rooms = [m for m in vars(timm.models).values() if hasattr(m, "build_model_with_cfg")]
    with ExitStack() as stack:
        for room in rooms if factor > 1 else ():
            build = build_by(room.build_model_with_cfg)
            stack.enter_context(patch.object(room, "build_model_with_cfg", build))
        yield


# transformers

STAGES = ("depths", "layers", "depth", "stage_num_blocks", "stage_numb_of_layers")  # of each stage
DEPTHS = re.compile(r"^(num_(\w+_)?layers|(\w+_)?layers|(\w+_)?depth|num_(\w+_)?blocks)$")
WIDTHS = re.compile(
    r"(hidden_size|hidden_dim|d_model|embed_dim|intermediate_size|ffn_dim|mlp_dim|vocab_size|_dim)$"
)


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _configs(value)


def _shrink(config: Any, narrow: int, shallow: bool) -> None:
    """Cut the widths of a configuration and of those in it by a factor, and its depth."""
    for part in _configs(config):
        for key, value in list(vars(part).items()):
            if not shallow and (DEPTHS.match(key) or key in STAGES):
                continue
            if DEPTHS.match(key) and type(value) is int and value > 2:
                _set(part, key, 2)
            elif key in STAGES and isinstance(value, (list, tuple)):
                _set(part, key, type(value)(min(v, 1 if i else 2) for i, v in enumerate(value)))
            elif narrow > 1 and WIDTHS.search(key) and type(value) is int and value >= 128:
                _set(part, key, value // narrow)
            elif narrow > 1 and "num_attention_heads" in key and type(value) is int:
                _set(part, key, max(value // narrow, 1))
            elif "drop_path_rate" in key and isinstance(value, float):
                _set(part, key, DROP_PATH)


def _set(config: Any, key: str, value: Any) -> None:
    with suppress(Exception):  # a configuration that derives it from others
        setattr(config, key, value)


def _patch(config: Any) -> int:
    for part in _configs(config):
        size = getattr(part, "patch_size", None)
        if isinstance(size, (tuple, list)):
            size = size[-1]
        if isinstance(size, int) and size > 0:
            return size
    return 16


def _resize(config: Any, size: int) -> None:
    for part in _configs(config):
        value = getattr(part, "image_size", None)
        if isinstance(value, int):
            _set(part, "image_size", size)
        elif isinstance(value, (tuple, list)):
            _set(part, "image_size", type(value)([size] * len(value)))
        if isinstance(getattr(part, "image_embedding_size", None), int):
            _set(part, "image_embedding_size", size // _patch(config))


IDS = ("input_ids", "decoder_input_ids")  # optional, and wanted all the same by some


def _hf_inputs(cls: type, config: Any, size: int) -> Iterator[dict[str, Any]]:
    """Inputs that a model may want besides images: ids of text, frames, patches with their grid."""
    generator = torch.Generator().manual_seed(0)
    channels = getattr(config, "num_channels", 3)
    channels = channels if isinstance(channels, int) else 3
    wanted = inspect.signature(cls.forward).parameters
    images = torch.randn(2, channels, size, size, generator=generator)
    needed = [n for n, p in wanted.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    extras: dict[str, Any] = {}
    patch, count, frames = _patch(config), 16, getattr(config, "num_frames", None)
    for given in [n for n in wanted if n in needed[1:] or n in IDS]:
        if given.endswith("_ids"):
            extras[given] = torch.ones(2, 5, dtype=torch.long)
        elif given == "bool_masked_pos":
            tokens = (size // patch) ** 2
            if isinstance(frames, int):
                tokens *= frames // getattr(config, "tubelet_size", 1)
            extras[given] = torch.arange(2 * tokens).view(2, tokens) % 2 == 0
    yield {"pixel_values": images, **extras}
    if extras:
        yield {"pixel_values": images}
    yield {"pixel_values": torch.stack([images, images], dim=1)}  # pairs of images
    if isinstance(frames, int):
        video = torch.randn(2, frames, channels, size, size, generator=generator)
        yield {"pixel_values": video, **extras}
        yield {"pixel_values": video.flatten(0, 1), **extras}
    yield {"pixel_values": torch.randn(2, count, channels * patch**2, generator=generator)}
    for grid in ("grid_thw", "image_grid_thw", "spatial_shapes", "target_sizes", "tgt_sizes"):
        if grid in wanted:
            thw = [[1, 4, 4]] if "thw" in grid else [[4, 4]]
            for depth in (getattr(config, "temporal_patch_size", 1), 1):
                patches = torch.randn(count, depth * channels * patch**2, generator=generator)
                given = {grid: torch.tensor(thw)}
                if "merge_sizes" in wanted:
                    given["merge_sizes"] = torch.tensor([1])
                yield {"pixel_values": patches, **given}
                yield {"pixel_values": patches[None], **given}


def _hf_candidates(cls: Any) -> Iterator[Candidate]:
    def config(narrow: int, size: int, shallow: bool) -> Any:
        made = cls.config_class()
        _shrink(made, narrow, shallow)
        _resize(made, size)
        return made

    def build(narrow: int, size: int, shallow: bool) -> nn.Module:
        model = cls(config(narrow, size, shallow))
        set_drop_path(model)
        return model

    default = cls.config_class()
    own = getattr(default, "image_size", None)
    patch = _patch(default)
    sizes = [3 * patch if patch > 1 else 16, 64, 128, 224]  # of patches of a pixel many are left
    sizes += [own] if isinstance(own, int) and own <= LARGEST_IMAGE else []
    for shallow in (True, False):  # some have settings for each of their stages
        for narrow in (1, 4, 8):
            for size in dict.fromkeys(sizes):
                builder = partial(build, narrow, size, shallow)
                for inputs in _hf_inputs(cls, config(narrow, size, shallow), size):
                    yield (shallow, narrow), builder, inputs


def candidates(host: str, name: str) -> Iterator[Built]:
    """Cut models for a row of the coverage table. Raises: NotShrunk after the last."""
    try:
        if host == "timm":
            yield from _built(_timm_candidates(name))
        elif host == "transformers":
            import transformers

            yield from _built(_hf_candidates(getattr(transformers, name)))
        else:
            raise NotShrunk(f"no cut models of {host}")
    except NotShrunk:
        raise
    except Exception as error:  # a configuration without defaults
        raise NotShrunk(_first_line(error)) from error
