"""One training run: model, batches, schedule, epochs, and what its checkpoint holds.

A run is a function of its settings, its data and its checkpoint: the batches of an epoch depend on
(seed, epoch) alone, the learning rate on the step alone, and the random states are saved.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.vit import VisionTransformer
from ...swap.apply import swap_out
from ...verify.plain_vit import plain_vit
from ..console import CommandError
from ..models import fused_model, logits_of
from . import checkpoint
from .data import Augmentation, Dataset, Normalization
from .folder import CHECKPOINT, METRICS
from .settings import DIGITS_VIT, Settings

AUGMENTATIONS = {
    "digits": Augmentation(degrees=5, zoom=0.1, shift=0.5),
    "mnist": Augmentation(degrees=10, zoom=0.1, shift=2),
    "folder": Augmentation(degrees=5, zoom=0.2, shift=16, mirror=True),
}
GRADIENT_NORM = 1.0  # clipped to this
NARROW = 192  # embed_dim below this takes _init_narrow


def model_of(settings: Settings, num_classes: int) -> nn.Module:
    """The model of a run with random weights, drawn from torch's global generator."""
    options: dict[str, Any] = dict(
        img_size=settings.img_size, in_chans=settings.in_chans, num_classes=num_classes
    )
    if settings.drop_path:  # some hosts have none
        options["drop_path_rate"] = settings.drop_path
    if settings.model is not None:
        model = fused_model(settings.model, **options)
    else:
        try:
            model = VisionTransformer(**{**DIGITS_VIT, **options})
        except ValueError as error:
            raise CommandError(str(error)) from error
    if isinstance(model, VisionTransformer) and model.embed_dim < NARROW:
        _init_narrow(model)
    return model


def _init_narrow(model: VisionTransformer) -> None:
    """Larger random weights than timm's 0.02, which suits C = 768: at C = 64 it starves the
    branches and the positions for many epochs."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    nn.init.trunc_normal_(model.pos_embed, std=0.3)


def make_optimizer(
    model: nn.Module, parameters: dict[str, Tensor], settings: Settings
) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone: no biases, norms, LayerScale, and none of what the
    model names in no_weight_decay (tokens, positions)."""
    named = getattr(model, "no_weight_decay", set)()
    decayed = [p for n, p in parameters.items() if p.ndim > 1 and n not in named]
    others = [p for n, p in parameters.items() if p.ndim <= 1 or n in named]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, fused=True)


def learning_rate(step: int, steps_per_epoch: int, settings: Settings) -> float:
    """lr(step): linear up to lr over the warm-up, then a cosine down to 0. A function of the step
    alone, so that nothing about it needs to be saved."""
    warmup = min(settings.warmup_epochs, settings.epochs) * steps_per_epoch
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    total = max(settings.epochs * steps_per_epoch - warmup, 1)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / total))


@dataclass
class Learner:
    """Weights under training: ours, or the same ones in plain PyTorch."""

    name: str
    forward: Callable[[Tensor], Tensor]
    parameters: dict[str, Tensor]
    optimizer: torch.optim.AdamW


def host_of(model: nn.Module) -> nn.Module:
    """A copy of a swapped model that runs its host's own code."""
    host = copy.deepcopy(model)
    swap_out(host)
    return host


def plain_forward(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    """Logits of plain PyTorch, from weights and images: `plain_vit`, or the host's own code."""
    if isinstance(model, VisionTransformer):
        return partial(plain_vit, model)
    host = host_of(model)

    def forward(weights: dict[str, Tensor], images: Tensor) -> Tensor:
        host.train(model.training)
        return logits_of(torch.func.functional_call(host, weights, (images,)))

    return forward


class Run:
    """One training run: its settings, data, learners and history, and how they are saved."""

    def __init__(self, settings: Settings, dataset: Dataset, device: torch.device, folder: Path):
        self.settings, self.device, self.folder = settings, device, folder
        self.classes = dataset.classes
        self.normalization = Normalization.of(dataset.train.images)
        self.train_split, self.held_out = dataset.train.to(device), dataset.held_out.to(device)
        self.steps_per_epoch = math.ceil(len(self.train_split) / settings.batch_size)
        self.history: list[dict[str, float]] = []
        torch.manual_seed(settings.seed)
        self.model = model_of(settings, len(self.classes)).to(device)
        own: dict[str, Tensor] = dict(self.model.named_parameters())
        self.learners = [self._learner("", lambda images: logits_of(self.model(images)), own)]
        if settings.compare:
            copies = {n: p.detach().clone().requires_grad_() for n, p in own.items()}
            forward = partial(plain_forward(self.model), copies)
            self.learners.append(self._learner("reference_", forward, copies))

    def _learner(self, name: str, forward: Any, parameters: dict[str, Tensor]) -> Learner:
        optimizer = make_optimizer(self.model, parameters, self.settings)
        return Learner(name, forward, parameters, optimizer)

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.settings.precision == "bf16" else None

    def _precision(self) -> Any:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled, augmented batches: a function of (seed, epoch) alone."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.train_split), generator=generator).to(self.device)
        augmentation = AUGMENTATIONS[self.settings.data]
        for index in order.split(self.settings.batch_size):
            images = self.normalization(self.train_split.images[index])
            if self.settings.augment:
                images = augmentation(images, generator)
            yield images, self.train_split.labels[index]

    def train_epoch(
        self, learner: Learner, epoch: int, advance: Callable[[], None]
    ) -> dict[str, float]:
        """One pass over the training images; mean loss, accuracy and images/s."""
        self.model.train()
        loss_sum = torch.zeros((), device=self.device, dtype=torch.float64)
        correct = torch.zeros((), device=self.device, dtype=torch.int64)
        self._synchronize()
        started = time.perf_counter()
        step = (epoch - 1) * self.steps_per_epoch
        for images, labels in self.batches(epoch):
            for group in learner.optimizer.param_groups:
                group["lr"] = learning_rate(step, self.steps_per_epoch, self.settings)
            with self._precision():
                logits = learner.forward(images)
            smoothing = self.settings.label_smoothing
            loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
            learner.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(learner.parameters.values(), GRADIENT_NORM)
            learner.optimizer.step()
            loss_sum += loss.detach() * len(labels)
            correct += (logits.detach().argmax(1) == labels).sum()
            step += 1
            advance()
        self._synchronize()
        seconds = time.perf_counter() - started
        count = len(self.train_split)
        return {
            "train_loss": loss_sum.item() / count,
            "train_accuracy": correct.item() / count,
            "images_per_s": count / seconds,
        }

    @torch.no_grad()
    def evaluate(self, learner: Learner) -> tuple[float, Tensor]:
        """Mean cross-entropy (no smoothing) and predicted classes of the held-out images."""
        self.model.eval()
        loss, predictions = 0.0, []
        for index in torch.arange(len(self.held_out), device=self.device).split(1024):
            images = self.normalization(self.held_out.images[index])
            with self._precision():
                logits = learner.forward(images)
            labels = self.held_out.labels[index]
            loss += F.cross_entropy(logits.float(), labels, reduction="sum").item()
            predictions.append(logits.argmax(1))
        return loss / len(self.held_out), torch.cat(predictions)

    def epoch(self, epoch: int, advance: Callable[[], None]) -> dict[str, float]:
        """Train and evaluate every learner for one epoch, and append to the history.

        Each learner starts from the same random state: the same batches, the same dropped paths.
        """
        started = time.perf_counter()
        last_step = epoch * self.steps_per_epoch - 1
        row = {"epoch": epoch, "lr": learning_rate(last_step, self.steps_per_epoch, self.settings)}
        before, after = checkpoint.rng_state(), None
        for learner in self.learners:
            checkpoint.set_rng_state(before)
            result = self.train_epoch(learner, epoch, advance)
            after = after or checkpoint.rng_state()
            held_out_loss, predicted = self.evaluate(learner)
            result["held_out_loss"] = held_out_loss
            right = (predicted == self.held_out.labels).float().mean().item()
            result["held_out_accuracy"] = right
            row.update({learner.name + key: value for key, value in result.items()})
        checkpoint.set_rng_state(after or before)
        row["seconds"] = time.perf_counter() - started
        if not all(math.isfinite(value) for value in row.values()):
            raise CommandError(
                f"the loss of epoch {epoch} is not finite; try a smaller --lr. The checkpoint of "
                f"epoch {epoch - 1} is in {self.folder / CHECKPOINT}"
            )
        self.history.append(row)
        return row

    def save(self) -> None:
        """checkpoint.pt and metrics.csv, each replaced as a whole."""
        content = {
            "settings": asdict(self.settings),
            "classes": self.classes,
            "normalization": asdict(self.normalization),
            "data_digest": self._digest(),
            "history": self.history,
            "rng": checkpoint.rng_state(),
            "model": self.model.state_dict(),
            "optimizer": self.learners[0].optimizer.state_dict(),
        }
        for learner in self.learners[1:]:
            content["reference"] = {n: p.detach() for n, p in learner.parameters.items()}
            content["reference_optimizer"] = learner.optimizer.state_dict()
        checkpoint.save(self.folder / CHECKPOINT, content)
        self.write_metrics()

    def write_metrics(self) -> None:
        """metrics.csv from the history; a kill may leave it an epoch behind checkpoint.pt."""
        if self.history:
            lines = [",".join(self.history[0])]
            lines += [",".join(f"{v:.8g}" for v in row.values()) for row in self.history]
            checkpoint.write_text(self.folder / METRICS, "\n".join(lines) + "\n")

    def restore(self, content: dict[str, Any]) -> None:
        """Go on from a checkpoint: weights, optimizer, history and every random generator."""
        if content["data_digest"] != self._digest():
            raise CommandError(
                f"the images or labels differ from those that {self.folder / CHECKPOINT} was "
                "trained on; --resume needs the same data"
            )
        self.model.load_state_dict(content["model"])
        self.learners[0].optimizer.load_state_dict(content["optimizer"])
        for learner in self.learners[1:]:
            with torch.no_grad():
                for name, parameter in learner.parameters.items():
                    parameter.copy_(content["reference"][name])
            learner.optimizer.load_state_dict(content["reference_optimizer"])
        self.history = content["history"]
        checkpoint.set_rng_state(content["rng"])

    def _digest(self) -> str:
        digest = hashlib.sha256(repr(self.classes).encode())
        for split in (self.train_split, self.held_out):
            digest.update(split.images.cpu().contiguous().numpy().tobytes())
            digest.update(split.labels.cpu().numpy().tobytes())
        return digest.hexdigest()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
