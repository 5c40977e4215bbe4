"""One training run: model, batches, schedule, epochs, and what its checkpoint holds.

A run is a function of its settings, its data and its checkpoint: the batches of an epoch depend on
(seed, epoch) alone, the learning rate on the step alone, and the random states are saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import InitVar, asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ...models.vit import VisionTransformer
from ...runtime import files
from ..console import CommandError, refusing
from ..models import logits_of
from . import checkpoint
from .checkpoint import CHECKPOINT, METRICS
from .model import model_of, plain_copy
from .processes import Processes, distribute
from .settings import Settings
from .streaming import Source, Streamed, transforms

GRADIENT_NORM = 1.0  # clipped to this
State = dict[str, dict[str, Tensor]]  # "model", "optimizer", ...: tensors by name


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone: no biases, norms, LayerScale, and none of what the
    model names in no_weight_decay (tokens, positions)."""
    named = getattr(model, "no_weight_decay", set)()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    decayed = [p for n, p in parameters.items() if p.ndim > 1 and n not in named]
    others = [p for n, p in parameters.items() if p.ndim <= 1 or n in named]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay, "initial_lr": settings.lr},
        {"params": others, "weight_decay": 0.0, "initial_lr": settings.lr},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, fused=True)


def learning_rate(step: int, steps_per_epoch: int, settings: Settings) -> float:
    """The share of lr at a step: linear up to 1 over the warm-up, then a cosine down to 0. A
    function of the step alone, so that nothing about it needs to be saved."""
    warmup = min(settings.warmup_epochs, settings.epochs) * steps_per_epoch
    if step < warmup:
        return (step + 1) / warmup
    total = max(settings.epochs * steps_per_epoch - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / total))


@dataclass
class Learner:
    """Weights under training: ours, or the same ones in plain PyTorch."""

    name: str  # before its figures and its parts of a checkpoint
    model: nn.Module
    call: Callable[[Tensor], Any]  # what gives the model's output: itself, DDP around it, ...
    settings: InitVar[Settings]
    average: AveragedModel | None = None

    def __post_init__(self, settings: Settings) -> None:
        self.optimizer = make_optimizer(self.model, settings)

    def evaluated(self) -> tuple[nn.Module, Callable[[Tensor], Any]]:
        """The model whose figures are reported, and what gives its output: the average, if any."""
        if self.average is None:
            return self.model, self.call
        return self.average.module, self.average.module

    def state(self, keep: bool = True) -> State:
        """All tensors by name: weights, their average, and what AdamW keeps of each; whole, and on
        the CPU where they are shards, unless another process `keep`s them. Every process calls it.
        """
        moments: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, DTensor):
                    value = value.full_tensor()
                    value = value.cpu() if keep else value.new_empty(0)
                moments[f"{name}.{key}"] = value
        state: State = {"model": whole_weights(self.model), "optimizer": moments}
        if self.average is not None:
            state["average"] = whole_weights(self.average.module)
        return {self.name + part: tensors for part, tensors in state.items()}

    def restore(self, path: Path, content: dict[str, Any]) -> None:
        """Undo `state`."""
        models = {"model": self.model}
        if self.average is not None:
            models["average"] = self.average.module
        for part, model in models.items():
            held = content[self.name + part]
            with refusing(f"{path} is a checkpoint of another model", RuntimeError):
                if lacking := sorted(model.state_dict().keys() - held):
                    raise RuntimeError(f"{', '.join(lacking[:3])} is only here")
                set_model_state_dict(model, held, options=StateDictOptions(full_state_dict=True))
        parameters = dict(self.model.named_parameters())
        for name, value in content[f"{self.name}optimizer"].items():
            name, _, key = name.rpartition(".")
            parameter, value = parameters[name], value.to(parameters[name].device)
            if isinstance(parameter, DTensor) and value.shape == parameter.shape:
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
            self.optimizer.state[parameter][key] = value


def whole_weights(model: nn.Module) -> dict[str, Any]:
    """The state dict, of shards in the first process alone. Every process must call it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


class Run:
    """One training run: its settings, data, learners and history, and how they are saved."""

    def __init__(
        self,
        source: Source,
        folder: Path,
        processes: Processes | None = None,
        say: Callable[[str], None] | None = None,
    ):
        """say: where a new run tells what it loads of --weights; None for one that is resumed."""
        self.source, self.folder, self.processes = source, folder, processes or Processes()
        self.settings, self.device, self.classes = source.settings, source.device, source.classes
        settings, self.sharded = source.settings, False
        self.steps_per_epoch = math.ceil(source.train_count / settings.batch_size)
        self.history: list[dict[str, float]] = []
        self.pace = (0.0, 0.0)  # images/s and share of time waiting for images, of this epoch
        torch.manual_seed(settings.seed)
        self.model = model_of(settings, len(self.classes), say).to(self.device)
        self._leave_bytes()
        average = None
        if settings.ema:
            average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema))
            average.n_averaged += 1  # begins with these weights, not with the first step's
        self.learners = [Learner("", self.model, self.model, settings, average)]
        if settings.compare:
            self.learners.append(Learner("reference_", *plain_copy(self.model), settings))

    def _leave_bytes(self) -> None:
        """Have a model of ours normalize streamed images in its patch embedding. MixUp mixes
        numbers, and the plain PyTorch model beside ours reads them."""
        plain = self.settings.mixup or self.settings.compare
        if isinstance(self.source, Streamed) and isinstance(self.model, VisionTransformer):
            embed, found = self.model.patch_embed, self.source.normalization
            embed.mean, embed.std = found.mean, found.std
            self.source.as_bytes = not plain

    def distribute(self, fsdp: bool) -> None:
        """Put the model under DDP or FSDP2, whose parameters are others; before `restore`."""
        average = self.learners[0].average
        wrapped = distribute(self.model, self.device, fsdp, self.autocast)
        if fsdp and average is not None:
            distribute(average.module, self.device, fsdp, self.autocast)
        self.sharded = fsdp
        self.learners = [Learner("", self.model, wrapped, self.settings, average)]

    @property
    def autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.settings.precision == "bf16" else None

    def _precision(self) -> Any:
        casts = self.autocast is not None and not self.sharded  # FSDP2 casts by its own policy
        return torch.autocast(self.device.type, self.autocast, enabled=casts)

    def train_epoch(
        self, learner: Learner, epoch: int, advance: Callable[[], None]
    ) -> dict[str, float]:
        """One pass over the training images; mean loss, accuracy and images/s."""
        learner.model.train()
        mix = self._mixup()
        schedule = LambdaLR(
            learner.optimizer,
            lambda step: learning_rate(step, self.steps_per_epoch, self.settings),
            last_epoch=(epoch - 1) * self.steps_per_epoch - 1,
        )
        loss_sum = torch.zeros((), device=self.device, dtype=torch.float64)
        correct = torch.zeros((), device=self.device, dtype=torch.int64)
        self._synchronize()
        started = time.perf_counter()
        seen, waited = torch.zeros((), dtype=torch.int64), 0.0
        asked = started
        for images, labels, weight in self.source.batches(epoch, self.processes):
            waited += time.perf_counter() - asked
            targets = labels
            if mix is not None and weight:
                images, targets = mix(images, labels)
            with self._precision():
                logits = logits_of(learner.call(images))
            smoothing = self.settings.label_smoothing
            loss = F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)
            learner.optimizer.zero_grad()
            (loss * weight).backward()
            nn.utils.clip_grad_norm_(learner.model.parameters(), GRADIENT_NORM)
            learner.optimizer.step()
            schedule.step()
            if learner.average is not None:
                learner.average.update_parameters(learner.model)
            if weight:
                loss_sum += loss.detach() * len(labels)
                correct += (logits.detach().argmax(1) == labels).sum()
                seen += len(labels)
            asked = time.perf_counter()
            seconds = asked - started
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
        return transforms().MixUp(alpha=self.settings.mixup, num_classes=len(self.classes))

    @torch.no_grad()
    def evaluate(self, learner: Learner) -> tuple[float, Tensor]:
        """Mean cross-entropy (no smoothing) of the held-out images that can be read, and each one's
        predicted class, -1 for the others."""
        model, call = learner.evaluated()
        model.eval()
        loss = torch.zeros((), dtype=torch.float64)
        # Of one process that has read an image, and 0 of the others: their sum.
        predicted = torch.zeros(self.source.held_out_count, dtype=torch.int64, device=self.device)
        for index, images in self.source.held_out_batches(self.processes):
            with self._precision():
                logits = logits_of(call(images))
            if len(index):
                labels = self.source.held_out_labels[index]
                loss += F.cross_entropy(logits.float(), labels, reduction="sum").item()
                predicted[index] = logits.argmax(1) + 1
        if self.sharded:  # a forward alone leaves FSDP2's outermost parameters whole
            model.reshard()  # pyright: ignore[reportCallIssue]
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
        share = learning_rate(last_step, self.steps_per_epoch, self.settings)
        row = {"epoch": epoch, "lr": self.settings.lr * share}
        before, after = checkpoint.rng_state(), None
        for learner in self.learners:
            checkpoint.set_rng_state(before)
            result = self.train_epoch(learner, epoch, advance)
            after = after or checkpoint.rng_state()
            result["held_out_loss"], predicted = self.evaluate(learner)
            right = (predicted == self.source.held_out_labels)[predicted >= 0]
            result["held_out_accuracy"] = right.float().mean().item()
            row.update({learner.name + key: value for key, value in result.items()})
        checkpoint.set_rng_state(after or before)
        row["seconds"] = time.perf_counter() - started
        self.processes.agree(lambda: self._refuse_infinite(row))
        self.history.append(row)
        return row

    def how_far(self) -> str:
        """What the checkpoint holds, and the command that goes on with it."""
        path, launch = self.folder / CHECKPOINT, "fastvit-kernels train"
        if self.processes.launched:
            launch = f"torchrun --nproc-per-node {self.processes.world} -m fastvit_kernels train"
        return (
            f"{path} holds the run after epoch {len(checkpoint.load(path)['history'])} of "
            f"{self.settings.epochs}; go on with: {launch} --resume --out {self.folder}"
        )

    def _refuse_infinite(self, row: dict[str, float]) -> None:
        if not all(math.isfinite(value) for value in row.values()):
            raise CommandError(
                f"the loss of epoch {row['epoch']} is not finite; try a smaller --lr. The "
                f"checkpoint of epoch {row['epoch'] - 1} is in {self.folder / CHECKPOINT}"
            )

    def save(self) -> None:
        """The checkpoint and metrics.csv, each replaced as a whole, by the first process."""
        content: dict[str, Any] = {"settings": asdict(self.settings), "classes": self.classes}
        content["normalization"] = asdict(self.source.normalization)
        content |= {"history": self.history, "rng": checkpoint.rng_state()}
        for learner in self.learners:
            content |= learner.state(self.processes.first)

        def write() -> None:
            content["data_digest"] = self.source.digest()
            checkpoint.save(self.folder / CHECKPOINT, content)
            self.write_metrics()

        self.processes.agree(write)

    def write_metrics(self) -> None:
        """metrics.csv from the history; a kill may have left it an epoch behind checkpoint.pt."""
        if self.history:
            lines = [",".join(self.history[0])]
            lines += [",".join(f"{v:.8g}" for v in row.values()) for row in self.history]
            files.write_text(self.folder / METRICS, "\n".join(lines) + "\n")

    def restore(self) -> None:
        """Go on from the checkpoint: weights, optimizer, history, and where one process goes on
        alone, every random generator."""
        path = self.folder / CHECKPOINT
        content = checkpoint.load(path)

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
            for learner in self.learners:
                learner.restore(path, content)
            if not self.processes.launched:
                checkpoint.set_rng_state(content["rng"])
        if self.processes.first:
            self.write_metrics()

    def whole_model(self) -> nn.Module | None:
        """The model that is reported with all its weights, in the first process; None in the
        others. Every process must call it."""
        model, _ = self.learners[0].evaluated()
        if not self.sharded:
            return model if self.processes.first else None
        state = whole_weights(model)
        if not self.processes.first:
            return None
        model = model_of(self.settings, len(self.classes)).to(self.device)
        model.load_state_dict(state)
        return model

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
