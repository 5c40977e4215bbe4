"""The ViTs whose training is measured, built as their users build them, and one step of each."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bench.shapes import VITS
from fastvit_kernels import VisionTransformer, backend, swap_in
from fastvit_kernels.commands.models import build_model, input_shape
from fastvit_kernels.commands.zoo import define_torchvision_operators

NUM_CLASSES = 1000
HOSTS = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}  # name -> package


@dataclass(frozen=True)
class Case:
    """One model, batch and precision. `amp` is fp32 parameters under bf16 autocast."""

    host: str
    model: str
    size: int
    batch: int
    dtype: str = "amp"  # or bf16: parameters, images and optimizer in bf16
    mode: str = "train"  # or infer
    drop_path: float = 0.0  # timm's

    @property
    def patch(self) -> int:
        """16, but ViT-H's own 14 at 224; 14 does not divide 384 or 512."""
        return 14 if self.model == "H" and self.size == 224 else 16

    @property
    def image(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        return 3, self.size, self.size

    @property
    def preset(self) -> str:
        return f"ViT-{self.model}"

    @property
    def tokens(self) -> int:
        return (self.size // self.patch) ** 2 + 1

    @property
    def id(self) -> str:
        drop = f"-drop{self.drop_path:g}" if self.drop_path else ""
        return f"{self.host}-ViT-{self.model}-{self.size}-B{self.batch}{drop}"

    @property
    def flops(self) -> float:
        """Of a step: a block is 2 T C (3C + C + 2F) + 4 T^2 C an image; training is 3 forwards."""
        C, depth, _, mlp = VITS[self.model]
        T = self.tokens
        block = 2 * T * C * (4 * C + 2 * mlp) + 4 * T * T * C
        patches = 2 * (T - 1) * C * 3 * self.patch**2
        forward = self.batch * (depth * block + patches + 2 * C * NUM_CLASSES)
        return float(forward * (3 if self.mode == "train" else 1))


@dataclass(frozen=True)
class NamedCase(Case):
    """A case whose `model` is a name for `build_model`; `size` 0 is the model's own."""

    @property
    def image(self) -> tuple[int, int, int]:
        return input_shape(_on_meta(self.model, self.size))

    @property
    def preset(self) -> str:
        return self.model

    @property
    def tokens(self) -> int:
        """As if a patch had 16 x 16 pixels."""
        return math.prod(max(1, n // 16) for n in self.image[1:])

    @property
    def id(self) -> str:
        _, height, width = self.image
        side = f"{height}" if height == width else f"{height}x{width}"
        return f"{self.model}-{side}-B{self.batch}"

    @property
    def flops(self) -> float:
        """Of a step, the forward's products as torch counts them; training is 3 forwards."""
        image = torch.empty((1, *self.image), device="meta")
        with FlopCounterMode(display=False) as counter, backend("torch"), torch.no_grad():
            _on_meta(self.model, self.size)(image)
        steps = 3 if self.mode == "train" else 1
        return float(self.batch * counter.get_total_flops() * steps)


def _by_name(name: str, size: int) -> nn.Module:
    return build_model(name, num_classes=NUM_CLASSES, img_size=size or None)


@functools.lru_cache(maxsize=4)
def _on_meta(name: str, size: int) -> nn.Module:
    """The model without weights, for what follows from shapes."""
    with torch.device("meta"):
        return _by_name(name, size).eval()


def build(case: Case, device: torch.device) -> nn.Module:
    """The host's model with random weights, the same at every call; a GPU draws them itself."""
    define_torchvision_operators()  # timm and transformers import torchvision too
    torch.manual_seed(0)
    with device:
        return _build(case)


def _build(case: Case) -> nn.Module:
    if isinstance(case, NamedCase):
        return _by_name(case.model, case.size)
    C, depth, H, mlp = VITS[case.model]
    if case.host == "timm":
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(
            img_size=case.size, patch_size=case.patch, embed_dim=C, depth=depth, num_heads=H,
            mlp_ratio=mlp / C, num_classes=NUM_CLASSES, drop_path_rate=case.drop_path,
        )  # fmt: skip
    if case.host == "torchvision":
        from torchvision.models import VisionTransformer

        model = VisionTransformer(case.size, case.patch, depth, H, C, mlp, num_classes=NUM_CLASSES)
        # zeros would hide every gradient
        nn.init.normal_(model.get_parameter("heads.head.weight"), std=0.02)
        return model
    if case.host == "hf":
        from transformers import ViTConfig, ViTForImageClassification

        config: Any = ViTConfig
        settings = config(
            hidden_size=C, num_hidden_layers=depth, num_attention_heads=H, intermediate_size=mlp,
            image_size=case.size, patch_size=case.patch, num_labels=NUM_CLASSES,
        )  # fmt: skip
        return ViTForImageClassification(settings)
    raise ValueError(f"unknown host {case.host!r}; there are {', '.join(HOSTS)}")


@dataclass(frozen=True)
class Way:
    """How a provider runs a model."""

    swapped: bool = False
    compile_mode: str | None = None
    graph: bool = False
    options: tuple[tuple[str, str], ...] = ()  # of swap_in


WAYS = {
    "eager": Way(),
    "swapped": Way(swapped=True),
    "swapped+graph": Way(swapped=True, graph=True),
    "compile": Way(compile_mode="default"),
    "swapped+compile": Way(swapped=True, compile_mode="default"),
    "compile-max-autotune": Way(compile_mode="max-autotune"),
    "swapped-low": Way(swapped=True, options=(("memory", "low"),)),
    "swapped-skip": Way(swapped=True, options=(("drop_path", "skip"),)),
}


def missing_option(name: str) -> str:
    """What swap_in lacks for a way; nothing where the way can be had."""
    known = inspect.signature(swap_in).parameters
    options = WAYS[name].options if name in WAYS else ()
    return next((f"swap_in has no {n}={v!r}" for n, v in options if n not in known), "")


class Runner:
    """A model with its optimizer, a batch, and one step of training or inference."""

    def __init__(self, case: Case, way: Way, device: torch.device):
        self.case, self.way, self.device = case, way, device
        dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
        self.model = build(case, device).to(device, dtype).train(case.mode == "train")
        self.is_own = isinstance(self.model, VisionTransformer)  # needs no swap, nor takes one
        if way.swapped and not self.is_own:
            options: Any = dict(way.options)
            report = swap_in(self.model, **options)
            if report.level == "none":
                raise RuntimeError(f"swap_in found nothing in {case.host}'s model:\n{report}")
        self.forward: Callable[..., Any] = self.model
        if way.compile_mode is not None:
            self.forward = torch.compile(self.model, mode=way.compile_mode, dynamic=False)
        self.parameters = list(self.model.parameters())
        self.images, self.labels = batch(case, device)
        if case.mode == "train":
            self.optimizer = torch.optim.AdamW(
                self.parameters, lr=1e-5, weight_decay=0.05, fused=True,
                capturable=way.graph and device.type == "cuda",
            )  # fmt: skip

    def logits(self) -> Tensor:
        amp = self.case.dtype == "amp"
        plain = self.is_own and not self.way.swapped
        with (
            torch.autocast(self.device.type, torch.bfloat16) if amp else nullcontext(),
            backend("torch") if plain else nullcontext(),
        ):
            out = self.forward(self.images)
        return out if isinstance(out, Tensor) else out.logits

    def loss(self) -> Tensor:
        return F.cross_entropy(self.logits().float(), self.labels)

    def step(self) -> Any:
        """Forward, loss, backward, AdamW; or the forward alone."""
        if self.case.mode == "infer":
            with torch.no_grad():
                return self.logits()
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def resident_mib(self) -> float:
        """Memory of parameters, optimizer state and batch, which stays from step to step."""
        tensors = [*self.parameters, self.images, self.labels]
        if self.case.mode == "train":
            states = self.optimizer.state.values()
            tensors += [t for state in states for t in state.values() if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors) / 2**20

    def results(self, upstream: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Logits, and in training the gradient of every parameter under `upstream`."""
        if self.case.mode == "infer":
            with torch.no_grad():
                return self.logits().clone(), []
        logits = self.logits()
        grads = torch.autograd.grad(
            logits, self.parameters, upstream.to(logits.dtype), allow_unused=True
        )
        return logits.detach(), list(grads)


def batch(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images and labels, the same at every call."""
    generator = torch.Generator(device).manual_seed(1)
    shape = (case.batch, *case.image)
    images = torch.randn(shape, generator=generator, device=device)
    labels = torch.randint(NUM_CLASSES, (case.batch,), generator=generator, device=device)
    return images.to(torch.bfloat16 if case.dtype == "bf16" else torch.float32), labels
