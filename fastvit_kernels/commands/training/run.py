"""One training run: model, batches, schedule, epochs, and what its checkpoint holds.

A run is a function of its settings, its data and its checkpoint: the batches of an epoch depend on
(seed, epoch) alone, the learning rate on the step alone, and the random states are saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from ...models.vit import VisionTransformer
from ..console import CommandError, refusing, require
from ..models import logits_of
from ..zoo import define_torchvision_operators
from . import checkpoint, sharded
from .data import Dataset
from .folder import CHECKPOINT, METRICS, read_run
from .model import model_of, plain_forward
from .processes import Processes, distribute
from .settings import Settings
from .source import InMemory
from .streaming import Streamed

GRADIENT_NORM = 1.0  # clipped to this


def make_optimizer(
    model: nn.Module, parameters: dict[str, Tensor], settings: Settings
) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone: no biases, norms, LayerScale, and none of what the
    model names in no_weight_decay (tokens, positions)."""
    named = getattr(model, "no_weight_decay", set)()
    parameters = {n: p for n, p in parameters.items() if p.requires_grad}
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


class Run:
    """One training run: its settings, data, learners and history, and how they are saved."""

    def __init__(
        self, settings: Settings, images: Dataset | Streamed, device: torch.device, folder: Path,
        processes: Processes | None = None, say: Callable[[str], None] | None = None,
    ):  # fmt: skip
        """say: where a new run tells what it loads of --weights; None for one that is resumed."""
        self.settings, self.device, self.folder = settings, device, folder
        self.processes = processes or Processes()
        self.sharded = False
        self.source = InMemory(images, settings) if isinstance(images, Dataset) else images
        self.source.to(device)
        self.classes, self.normalization = self.source.classes, self.source.normalization
        self.steps_per_epoch = math.ceil(self.source.train_count / settings.batch_size)
        self.history: list[dict[str, float]] = []
        torch.manual_seed(settings.seed)
        self.model = model_of(settings, len(self.classes), say).to(device)
        self._leave_bytes()
        own = self._learn(self.model)
        self.pace = (0.0, 0.0)  # images/s and share of time waiting for images, of this epoch
        if settings.compare:
            copies = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in own.items()}
            forward = partial(plain_forward(self.model), copies)
            self.learners.append(self._learner("reference_", forward, copies))

    def _leave_bytes(self) -> None:
        """Have a model of ours normalize streamed images in its patch embedding. MixUp mixes
        numbers, and the plain PyTorch model beside ours reads them."""
        plain = self.settings.mixup or self.settings.compare
        if isinstance(self.source, Streamed) and isinstance(self.model, VisionTransformer):
            embed, found = self.model.patch_embed, self.normalization
            embed.mean, embed.std = found.mean, found.std
            self.source.as_bytes = not plain

    def _learn(self, wrapped: nn.Module) -> dict[str, Tensor]:
        """Make the model's parameters, which it gives, the first learner's.

        Args:
            wrapped: what is called for the model's output.
        """
        own: dict[str, Tensor] = dict(self.model.named_parameters())
        self.learners = [self._learner("", lambda images: logits_of(wrapped(images)), own)]
        trained = {n: p for n, p in own.items() if p.requires_grad and self.settings.ema}
        self.average = {n: p.detach().clone() for n, p in trained.items()}
        return own

    def distribute(self, fsdp: bool) -> None:
        """Put the model under DDP or FSDP2, whose parameters are others; before `restore`."""
        wrapped = distribute(self.model, self.device, fsdp, self.autocast)
        self.sharded = fsdp
        self._learn(wrapped)

    def _learner(self, name: str, forward: Any, parameters: dict[str, Tensor]) -> Learner:
        optimizer = make_optimizer(self.model, parameters, self.settings)
        return Learner(name, forward, parameters, optimizer)

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.settings.precision == "bf16" else None

    def _precision(self) -> Any:
        if self.autocast is None or self.sharded:  # FSDP2 casts by its own policy
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast)

    def train_epoch(
        self, learner: Learner, epoch: int, advance: Callable[[], None]
    ) -> dict[str, float]:
        """One pass over the training images; mean loss, accuracy and images/s."""
        self.model.train()
        mix = self._mixup()
        loss_sum = torch.zeros((), device=self.device, dtype=torch.float64)
        correct = torch.zeros((), device=self.device, dtype=torch.int64)
        self._synchronize()
        started = time.perf_counter()
        step = (epoch - 1) * self.steps_per_epoch
        seen, waited = torch.zeros((), dtype=torch.int64), 0.0
        batches = self.source.batches(epoch, self.processes)
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            waited += time.perf_counter() - asked
            if batch is None:
                break
            images, labels, weight = batch
            targets = labels
            if mix is not None and weight:
                images, targets = mix(images, labels)
            for group in learner.optimizer.param_groups:
                group["lr"] = learning_rate(step, self.steps_per_epoch, self.settings)
            with self._precision():
                logits = learner.forward(images)
            smoothing = self.settings.label_smoothing
            loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
            learner.optimizer.zero_grad()
            (loss * weight).backward()
            nn.utils.clip_grad_norm_(learner.parameters.values(), GRADIENT_NORM)
            learner.optimizer.step()
            if not learner.name:
                self._follow()
            if weight:
                loss_sum += loss.detach() * len(labels)
                correct += (logits.detach().argmax(1) == labels).sum()
                seen += len(labels)
            step += 1
            seconds = time.perf_counter() - started
            self.pace = (int(seen) * self.processes.world / seconds, waited / seconds)
            advance()
        for total in (loss_sum, correct, seen):
            self.processes.sum(total)
        self._synchronize()
        seconds = time.perf_counter() - started
        count = max(int(seen), 1)
        result = {
            "train_loss": loss_sum.item() / count,
            "train_accuracy": correct.item() / count,
            "images_per_s": count / seconds,
        }
        if isinstance(self.source, Streamed):
            result["data_wait"] = waited / seconds
        return result

    def _mixup(self) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
        """torchvision's MixUp of this process's rows, drawn from torch's global generator."""
        if not self.settings.mixup:
            return None
        define_torchvision_operators()
        v2: Any = require("torchvision.transforms.v2", "torchvision", "torchvision")
        return v2.MixUp(alpha=self.settings.mixup, num_classes=len(self.classes))

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the averaged weights towards those of this step."""
        if self.average:
            weights = [self.learners[0].parameters[name] for name in self.average]
            get_ema_multi_avg_fn(self.settings.ema)(list(self.average.values()), weights, None)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the averaged weights, where --ema keeps them."""
        own = self.learners[0].parameters
        with torch.no_grad():
            kept = {name: own[name].detach().clone() for name in self.average}
            for name, value in self.average.items():
                own[name].copy_(value)
            try:
                yield
            finally:
                for name, value in kept.items():
                    own[name].copy_(value)

    @torch.no_grad()
    def evaluate(self, learner: Learner) -> tuple[float, Tensor]:
        """Mean cross-entropy (no smoothing) of the held-out images that can be read, and each one's
        predicted class, -1 for the others."""
        self.model.eval()
        loss = torch.zeros((), dtype=torch.float64)
        # Of one process that has read an image, and 0 of the others: their sum.
        predicted = torch.zeros(self.source.held_out_count, dtype=torch.int64, device=self.device)
        for index, images in self.source.held_out_batches(self.processes):
            with self._precision():
                logits = learner.forward(images)
            if len(index):
                labels = self.source.held_out_labels[index]
                loss += F.cross_entropy(logits.float(), labels, reduction="sum").item()
                predicted[index] = logits.argmax(1) + 1
        total = self.processes.sum(loss).item()
        predicted = self.processes.sum(predicted) - 1
        return total / max(int((predicted >= 0).sum()), 1), predicted

    def epoch(self, epoch: int, advance: Callable[[], None]) -> dict[str, float]:
        """Train and evaluate every learner for one epoch, and append to the history.

        Each learner starts from the same random state: the same batches, the same dropped paths.
        Of several processes each drops paths of its own, by (seed, epoch, rank).
        """
        started = time.perf_counter()
        if self.processes.launched:
            place = epoch * self.processes.world + self.processes.rank
            torch.manual_seed(self.settings.seed * 1_000_003 + place)
        last_step = epoch * self.steps_per_epoch - 1
        row = {"epoch": epoch, "lr": learning_rate(last_step, self.steps_per_epoch, self.settings)}
        before, after = checkpoint.rng_state(), None
        for learner in self.learners:
            checkpoint.set_rng_state(before)
            result = self.train_epoch(learner, epoch, advance)
            after = after or checkpoint.rng_state()
            with nullcontext() if learner.name else self.averaged():
                held_out_loss, predicted = self.evaluate(learner)
            result["held_out_loss"] = held_out_loss
            right = (predicted == self.source.held_out_labels)[predicted >= 0]
            result["held_out_accuracy"] = right.float().mean().item()
            row.update({learner.name + key: value for key, value in result.items()})
        checkpoint.set_rng_state(after or before)
        row["seconds"] = time.perf_counter() - started
        self.processes.agree(lambda: self._refuse_infinite(row))
        self.history.append(row)
        return row

    def _refuse_infinite(self, row: dict[str, float]) -> None:
        if not all(math.isfinite(value) for value in row.values()):
            raise CommandError(
                f"the loss of epoch {row['epoch']} is not finite; try a smaller --lr. The "
                f"checkpoint of epoch {row['epoch'] - 1} is in {read_run(self.folder)[1]}"
            )

    def save(self) -> None:
        """The checkpoint and metrics.csv, each replaced as a whole."""
        content = {
            "settings": asdict(self.settings),
            "classes": self.classes,
            "normalization": asdict(self.normalization),
            "data_digest": self.source.digest() if self.processes.first else "",
            "history": self.history,
        }
        if self.processes.launched:
            sharded.save(self.folder, content, self._tensors(), self.processes)
        else:
            content |= {
                "rng": checkpoint.rng_state(),
                "model": self.model.state_dict(),
                "optimizer": self.learners[0].optimizer.state_dict(),
            }
            if self.average:
                content["average"] = self.average
            for learner in self.learners[1:]:
                content["reference"] = {n: p.detach() for n, p in learner.parameters.items()}
                content["reference_optimizer"] = learner.optimizer.state_dict()
            checkpoint.save(self.folder / CHECKPOINT, content)
            sharded.remove_all(self.folder)
        if self.processes.first:
            self.write_metrics()

    def _tensors(self) -> dict[str, Tensor]:
        """Weights, and what AdamW keeps of each, by name: the tensors of a sharded checkpoint."""
        found = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        found |= {f"average.{name}": t for name, t in self.average.items()}
        learner = self.learners[0]
        for name, parameter in learner.parameters.items():
            for key, value in learner.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{name}.{key}"] = value
        return found

    def _make_optimizer_state(self) -> None:
        """The tensors that a first step would make, by one of zero gradients and rate zero."""
        optimizer = self.learners[0].optimizer
        for group in optimizer.param_groups:
            group["lr"] = 0.0
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()

    def write_metrics(self) -> None:
        """metrics.csv from the history; a kill may leave it an epoch behind checkpoint.pt."""
        if self.history:
            lines = [",".join(self.history[0])]
            lines += [",".join(f"{v:.8g}" for v in row.values()) for row in self.history]
            checkpoint.write_text(self.folder / METRICS, "\n".join(lines) + "\n")

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint: weights, optimizer, history, and where one process goes on
        alone, every random generator.

        Raises: CommandError where data or model differ from those of the checkpoint.
        """
        alone = path.is_file()
        content = checkpoint.load(path if alone else path / sharded.RUN)

        def same_data() -> None:
            if content["data_digest"] != self.source.digest():
                raise CommandError(
                    f"the images or labels differ from those that {path} was trained on; "
                    "--resume needs the same data"
                )

        self.processes.agree(same_data)
        self.history = content["history"]
        damaged = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)
        with refusing(f"{path} cannot be read as a checkpoint", *damaged):
            if not alone or self.processes.launched:
                self._restore_tensors(path, content if alone else None)
            else:
                self._restore_whole(path, content)

    def _restore_whole(self, path: Path, content: dict[str, Any]) -> None:
        sharded.missing_from(
            path,
            {f"model.{name}": t for name, t in self.model.state_dict().items()},
            {f"model.{name}": t.shape for name, t in content["model"].items()},
        )
        self.model.load_state_dict(content["model"])
        self.learners[0].optimizer.load_state_dict(content["optimizer"])
        for name, value in self.average.items():
            value.copy_(content["average"][name])
        for learner in self.learners[1:]:
            with torch.no_grad():
                for name, parameter in learner.parameters.items():
                    parameter.copy_(content["reference"][name])
            learner.optimizer.load_state_dict(content["reference_optimizer"])
        checkpoint.set_rng_state(content["rng"])

    def _restore_tensors(self, path: Path, content: dict[str, Any] | None) -> None:
        """From shards, or from the content of one process's checkpoint."""
        if self.history:
            self._make_optimizer_state()
        tensors = self._tensors()
        if content is None:
            missing = sharded.load(path, tensors)
        else:
            optimizer = self.learners[0].optimizer
            names = {p: n for n, p in self.learners[0].parameters.items()}
            order = [names[p] for group in optimizer.param_groups for p in group["params"]]
            whole = {f"model.{name}": t for name, t in content["model"].items()}
            whole |= {f"average.{name}": t for name, t in content.get("average", {}).items()}
            for index, state in content["optimizer"]["state"].items():
                whole |= {f"optimizer.{order[index]}.{key}": t for key, t in state.items()}
            missing = sharded.copy(path, tensors, whole)
        for name, parameter in self.learners[0].parameters.items():
            if f"optimizer.{name}.step" in missing:  # no gradient has reached it yet
                self.learners[0].optimizer.state.pop(parameter, None)

    def whole_model(self) -> nn.Module | None:
        """The model with all its weights, in the first process; None in the others. Every process
        must call it."""
        if not self.sharded:
            return self.model if self.processes.first else None
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if not self.processes.first:
            return None
        model = model_of(self.settings, len(self.classes)).to(self.device)
        model.load_state_dict(state)
        return model

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
