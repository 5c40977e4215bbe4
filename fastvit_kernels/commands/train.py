"""Train a ViT on real images with our kernels, after a check that they agree with PyTorch.

Without options: a small ViT on scikit-learn's handwritten digits, saved in runs/digits. Ctrl-C
stops; --resume --out FOLDER continues bit for bit. docs/train.md lists the files it writes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from ..accuracy.runner import quiet_interpreter
from ..fuse.swap import swap_in
from ..measure.compare import machine_on
from ..measure.model_errors import model_errors
from ..models.vit import VisionTransformer
from ..runtime.backend import backend, get_backend
from ..runtime.files import write_atomically, write_text
from ..weights.files import read_pickle
from . import figures, options
from .console import CommandError, errors_told, refusing, require
from .models import build_model, input_shape, logits_of, open_image

DIGITS_VIT = dict(img_size=8, patch_size=2, embed_dim=64, depth=4, num_heads=4, mlp_ratio=2.0)
DIGITS = dict(model="digits", in_chans=1, epochs=40, batch=64, lr=2e-3)
FOLDER = dict(model="vit_tiny_patch16_224", in_chans=3, epochs=100, batch=256, lr=1e-3)
HELD_OUT, WEIGHT_DECAY, SMOOTHING, MAX_NORM = 0.2, 0.05, 0.1, 1.0
SAY_S = 10.0  # seconds between lines within an epoch
CHECKPOINT, WEIGHTS, METRICS = "checkpoint.pt", "weights.safetensors", "metrics.csv"
OPTIONS = "data model img_size epochs batch lr dtype seed compile workers".split()
Batch = tuple[Tensor, Tensor]  # images as the model takes them, labels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--data", metavar="FOLDER", help="images, one folder per class (default: the digits)")
    options.add(parser, "--model", help=f"{options.NAMES} (default depends on the data)")
    options.add(parser, "--img-size", "--device", "--batch")
    add("--epochs", type=options.positive(int), metavar="N", help="default 40, or 100 for a folder")
    add("--lr", type=options.positive(float, 1e3), help="peak, AdamW (default 2e-3; folder 1e-3)")
    options.add(parser, "--dtype", choices=("bf16", "fp32"), help="default bf16 on CUDA, else fp32")
    options.add(parser, "--seed", help="for weights, split, order, augmentation (default 0)")
    add("--compile", action="store_const", const=True, help="torch.compile the model")
    add("--no-check", dest="check", action="store_false", help="skip the check before training")
    readers = options.within(int, 0, options.MOST_PROCESSES)
    add("--workers", type=readers, metavar="N", help="data loader processes (default 4)")
    options.add(parser, "--out", help="run folder (default: first unused runs/NAME-N)")
    add("--resume", action="store_true", help="continue the run in --out")


def new_run(arguments: argparse.Namespace, device: torch.device) -> argparse.Namespace:
    """The options given, completed by defaults."""
    defaults = dict(DIGITS if arguments.data is None else FOLDER, seed=0, compile=False, workers=4)
    defaults["dtype"] = "bf16" if device.type == "cuda" else "fp32"
    given = {name: value for name in OPTIONS if (value := getattr(arguments, name)) is not None}
    config = argparse.Namespace(**{"data": "digits", "img_size": None, **defaults, **given})
    if arguments.data is not None:
        if not Path(arguments.data).is_dir():
            raise CommandError(f"--data {arguments.data} is not a folder")
        config.data = str(Path(arguments.data).resolve())
    with torch.device("meta"):  # says at once that a model is unknown, or not a ViT
        model = build_vit(config, num_classes=2)
    config.img_size = input_shape(model, config.img_size)[1]
    first = Path("runs", Path(config.data).name)
    numbered = (first.with_name(f"{first.name}-{n}") if n > 1 else first for n in count(1))
    config.out = arguments.out or next(path for path in numbered if not path.exists())
    if (config.out / CHECKPOINT).exists():
        raise CommandError(f"{config.out} holds a run: add --resume, or name another folder")
    return config


def old_run(arguments: argparse.Namespace) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options of the run in --out, and its checkpoint; nothing in the file is executed."""
    if arguments.out is None:
        raise CommandError("--resume needs --out, the folder of the run")
    path = arguments.out / CHECKPOINT
    if not path.is_file():
        raise CommandError(f"there is no checkpoint {path}")
    with refusing(f"{path} cannot be read as a checkpoint", Exception):
        content = read_pickle(path)
        config = argparse.Namespace(**content["config"], out=arguments.out)
        wanted = {name: getattr(config, name) for name in OPTIONS}
    for name, held in wanted.items():
        given = getattr(arguments, name)
        given = str(Path(given).resolve()) if name == "data" and given else given
        if given is not None and given != held:
            flag = name.replace("_", "-")
            raise CommandError(f"--{flag} {given} differs from the {held} of {arguments.out}")
    return config, content


def held_out_part(labels: Tensor, seed: int) -> Tensor:
    """Which images are held out: the same share of each class, by the seed."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero()[:, 0]
        share = min(max(round(HELD_OUT * len(members)), 1), len(members) - 1)
        mask[members[torch.randperm(len(members), generator=generator)[:share]]] = True
    return mask


class Digits:
    """scikit-learn's 1797 scans of handwritten digits, 8 x 8 x 1; they come with the package."""

    def __init__(self, config: argparse.Namespace, device: torch.device):
        digits: Any = require("sklearn.datasets", "scikit-learn").load_digits()
        images = torch.from_numpy(digits.images)[:, None].mul(255 / 16)  # of 17 levels
        images = images.round().float() / 255
        labels, self.classes = torch.from_numpy(digits.target), [str(c) for c in range(10)]
        held_out = held_out_part(labels, config.seed)
        std, mean = torch.std_mean(images[~held_out].double(), correction=0)
        self.mean, self.std = mean.item(), std.item()
        images = (images - self.mean) / self.std
        if config.img_size != 8:
            images = F.interpolate(images, (config.img_size,) * 2, mode="bilinear")
        self.train, self.held_out = (images[part].to(device) for part in (~held_out, held_out))
        self.train_labels, self.labels = (labels[part].to(device) for part in (~held_out, held_out))
        self.digest = hashlib.sha256(digits.images.tobytes()).hexdigest()

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        order = torch.randperm(len(self.train), generator=generator)
        for batch in order.split(size):
            draw = 2 * torch.rand(5, len(batch), generator=generator) - 1
            yield distorted(self.train[batch], draw), self.train_labels[batch]

    def held_out_batches(self) -> Iterator[Batch]:
        yield self.held_out, self.labels


def distorted(images: Tensor, draw: Tensor) -> Tensor:
    """Rotated by up to 5 degrees, zoomed by 10 %, shifted by half of an 8th, as (4, B) numbers
    from -1 to 1 say; the border is repeated outwards."""
    zoom, angle = 1 + 0.1 * draw[1], math.radians(5) * draw[0]
    cos, sin = angle.cos() * zoom, angle.sin() * zoom
    rows = torch.stack([cos, -sin, draw[2] / 8]), torch.stack([sin, cos, draw[3] / 8])
    affine = torch.stack(rows).permute(2, 0, 1).to(images.device)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


class Folder:
    """Images in one folder a class, read by torchvision in processes of their own: random crops,
    mirrored, to train on; the centre of those held out."""

    mean, std = 0.5, 0.5

    def __init__(self, config: argparse.Namespace):
        tv: Any = require("torchvision.transforms.v2", "torchvision", "torchvision")
        datasets: Any = require("torchvision.datasets", "torchvision", "torchvision")
        last = [tv.ToImage(), tv.ToDtype(torch.float32, scale=True), tv.Normalize([0.5], [0.5])]
        size, folder = config.img_size, config.data
        crop = [tv.RandomResizedCrop(size), tv.RandomHorizontalFlip(), *last]
        centre = [tv.Resize(size), tv.CenterCrop(size), *last]
        with refusing(f"--data {folder} must hold a folder of images for each class", OSError):
            crops, centres = (
                datasets.ImageFolder(folder, tv.Compose(t), loader=open_image)
                for t in (crop, centre)
            )
        self.classes, labels = crops.classes, torch.tensor(crops.targets)
        self.workers = dict(num_workers=config.workers)
        if len(self.classes) < 2 or min(labels.bincount()) < 2:
            raise CommandError(f"--data {folder} needs two classes or more, of two images each")
        held_out = held_out_part(labels, config.seed)
        self.train = Subset(crops, (~held_out).nonzero()[:, 0].tolist())
        self.held_out = Subset(centres, held_out.nonzero()[:, 0].tolist())
        self.labels = labels[held_out]
        self.digest = hashlib.sha256(repr(crops.samples).encode()).hexdigest()

    def batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        return iter(DataLoader(self.train, size, True, generator=generator, **self.workers))

    def held_out_batches(self) -> Iterator[Batch]:
        return iter(DataLoader(self.held_out, 256, **self.workers))


def build_vit(config: argparse.Namespace, num_classes: int) -> nn.Module:
    """The model of --model, as its library builds it."""
    shape = dict(in_chans=config.in_chans, num_classes=num_classes)
    if config.img_size is not None:  # else the model's own
        shape["img_size"] = config.img_size
    if config.model == "digits":
        with refusing("the small ViT for digits", ValueError):
            return VisionTransformer(**{**DIGITS_VIT, **shape})
    model = build_model(config.model, **shape)
    if not any("attention" in type(module).__name__.lower() for module in model.modules()):
        raise CommandError(f"--model {config.model} is no ViT: no module in it is an attention")
    return model


def make_model(config: argparse.Namespace, num_classes: int) -> nn.Module:
    """With random weights, by the seed, on our kernels."""
    torch.manual_seed(config.seed)
    model = build_vit(config, num_classes)
    if config.model == "digits":
        # timm's 0.02, which suits C = 768, starves the branches and positions of a narrow model
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
        nn.init.trunc_normal_(model.get_parameter("pos_embed"), std=0.3)
    elif not isinstance(model, VisionTransformer):
        image = torch.zeros(1, config.in_chans, config.img_size, config.img_size)
        said = f"--model {config.model}, images {[*image.shape]}"
        with refusing(said, Exception), torch.no_grad():
            found = logits_of(model.eval()(image))
            if found.shape != (1, num_classes):
                raise ValueError(f"gives {[*found.shape]}, wanted logits [1, {num_classes}]")
        swap_in(model)
    return model


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.AdamW:
    """AdamW; weight decay on matrices alone, and on none of model.no_weight_decay()."""
    named = getattr(model, "no_weight_decay", set)()
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and n not in named]
    others = [p for n, p in model.named_parameters() if p.ndim <= 1 or n in named]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others}]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.0, fused=True)


def learning_rate(step: int, total: int) -> float:
    """The share of lr at a step: linear over the first tenth, then a cosine down to 0."""
    warmup = total // 10
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


class Run:
    """A function of its options, its images and its checkpoint: all that is drawn in an epoch
    depends on (seed, epoch) alone, the learning rate on the step alone."""

    def __init__(self, config: argparse.Namespace, images: Digits | Folder, device: torch.device):
        self.config, self.images, self.device = config, images, device
        self.model = make_model(config, len(images.classes)).to(device)
        self.call: Any = torch.compile(self.model) if config.compile else self.model
        self.optimizer = make_optimizer(self.model, config.lr)
        self.history: list[dict[str, float]] = []
        self.steps = math.ceil(len(images.train) / config.batch)  # an epoch

    def logits(self, images: Tensor) -> Tensor:
        bf16 = self.config.dtype == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            return logits_of(self.call(images.to(self.device))).float()

    def epoch(self) -> None:
        """Train for one epoch, evaluate, save, say how it went; a long one says how far it is."""
        epoch, started, seen = len(self.history) + 1, time.perf_counter(), 0
        name, told = f"epoch {epoch:>3}/{self.config.epochs}", started
        loss_sum = torch.zeros((), device=self.device)
        seed = self.config.seed * 1_000_003 + epoch
        torch.manual_seed(seed)  # dropped paths, and crops that no worker draws
        generator = torch.Generator().manual_seed(seed)
        batches = self.images.batches(self.config.batch, generator)
        self.model.train()
        for step, (images, labels) in enumerate(batches, (epoch - 1) * self.steps):
            for group in self.optimizer.param_groups:
                share = learning_rate(step, self.config.epochs * self.steps)
                group["lr"] = self.config.lr * share
            labels = labels.to(self.device)
            loss = F.cross_entropy(self.logits(images), labels, label_smoothing=SMOOTHING)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            self.optimizer.step()
            loss_sum += loss.detach() * len(labels)
            seen += len(labels)
            if (now := time.perf_counter()) - told > SAY_S:
                share, told = seen / len(self.images.train), now
                print(f"{name}: {share:.0%}, {seen / (now - started):,.0f} images/s", flush=True)
        row = {"epoch": epoch, "train_loss": loss_sum.item() / seen}  # waits for the device
        row["images_per_s"] = seen / (time.perf_counter() - started)
        row["held_out_loss"], row["held_out_accuracy"], _ = self.evaluate()
        if not all(map(math.isfinite, row.values())):
            raise CommandError(f"the loss of epoch {epoch} is not finite; try a smaller --lr")
        self.history.append(row)
        self.save()
        print(
            f"{name}: training loss {row['train_loss']:.3f}, held-out {row['held_out_loss']:.3f} "
            f"and {100 * row['held_out_accuracy']:.2f} %, {row['images_per_s']:,.0f} images/s",
            flush=True,
        )

    @torch.no_grad()
    def evaluate(self) -> tuple[float, float, Tensor]:
        """Of the held-out images: mean cross-entropy, accuracy, each one's predicted class."""
        self.model.eval()
        logits = torch.cat([self.logits(images) for images, _ in self.images.held_out_batches()])
        predicted, labels = logits.argmax(1), self.images.labels.to(self.device)
        accuracy = (predicted == labels).double().mean().item()
        return F.cross_entropy(logits, labels).item(), accuracy, predicted.cpu()

    def save(self) -> None:
        """checkpoint.pt and metrics.csv, each replaced as a whole."""
        content = {"config": {k: v for k, v in vars(self.config).items() if k != "out"}}
        content |= dict(model=self.model.state_dict(), optimizer=self.optimizer.state_dict())
        content |= dict(history=self.history, images=self.images.digest)
        write_atomically(self.config.out / CHECKPOINT, lambda file: torch.save(content, file))
        lines = [",".join(f"{v:.8g}" for v in row.values()) for row in self.history]
        write_text(self.config.out / METRICS, "\n".join([*map(",".join, self.history[:1]), *lines]))

    def restore(self, content: dict[str, Any]) -> None:
        if content["images"] != self.images.digest:
            raise CommandError("the images are not those that the run was trained on")
        with refusing(f"{self.config.out / CHECKPOINT} does not fit its model", Exception):
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
            self.history = content["history"]


def agrees(run: Run) -> bool:
    """Print the errors of two images' step, by kernels; say whether all keep the 2x rule."""
    images = next(run.images.held_out_batches())[0][:2].to(run.device)
    autocast = torch.bfloat16 if run.config.dtype == "bf16" else None
    run.model.eval()
    with backend("triton"), quiet_interpreter():
        logits, *gradients = model_errors(run.model, images, autocast=autocast)
    failed = [error for error in (logits, *gradients) if not error.passed]
    print(f"Kernels and PyTorch on two images, {run.config.dtype}, errors against float64:")
    print(errors_told(logits, gradients))
    if failed:
        print("That breaks the 2x rule. Nothing was trained; --no-check trains all the same.")
    else:
        print(f"Logits and all {len(gradients)} gradients are within what is allowed.")
    return not failed


def report(run: Run) -> None:
    """Held-out accuracy; weights and pictures into the run's folder."""
    loss, accuracy, predicted = run.evaluate()
    images, folder, truth = run.images, run.config.out, run.images.labels.cpu()
    facts = {**vars(run.config), "classes": images.classes, "mean": images.mean, "std": images.std}
    metadata = {"fastvit_kernels": json.dumps(facts, default=str)}
    weights = {name: x.contiguous().cpu() for name, x in run.model.state_dict().items()}
    saved = require("safetensors.torch", "safetensors").save(weights, metadata)
    write_atomically(folder / WEIGHTS, lambda file: file.write(saved))
    right = f"{100 * accuracy:.2f} % of {len(truth)} held-out images"
    title = f"{run.config.model} on {Path(run.config.data).name}: {right}"
    figures.draw_curves(run.history, folder / "curves.png", title)
    figures.draw_confusion(truth, predicted, images.classes, folder / "confusion.png", title)
    image = next(images.held_out_batches())[0][:1].to(run.device)
    attention = figures.head_attention(run.model, image)
    pixels = image[0].cpu() * images.std + images.mean
    title = f"{title}\nthe first: class {images.classes[truth[0]]}"
    figures.draw_attention(pixels, attention, folder / "attention.png", title)
    print(f"Held-out accuracy: {right}, loss {loss:.3f}. Written to {folder}")


def run(arguments: argparse.Namespace) -> int:
    """The command: 0, 1 where the kernels and PyTorch disagree, 130 when interrupted."""
    device = options.chosen_device(arguments)
    require("matplotlib.figure", "matplotlib")
    config, content = old_run(arguments) if arguments.resume else (new_run(arguments, device), None)
    images = Digits(config, device) if config.data == "digits" else Folder(config)
    training = Run(config, images, device)
    if content is not None:
        training.restore(content)
        print(f"Resumed after epoch {len(training.history)} of {config.epochs}.")
    config.out.mkdir(parents=True, exist_ok=True)
    in_pytorch = device.type == "cpu" and get_backend() == "auto"
    if in_pytorch:
        print("No GPU: the check runs in Triton's interpreter, the training in PyTorch.")
    if config.data == "digits" and device.type == "cpu":
        torch.set_num_threads(1)  # small matrices, whose bits then do not depend on the cores
    reason = options.kernels_reason(device, config.dtype)
    checked = "checked on 2 images" if arguments.check and not reason else "not checked"
    if arguments.check and reason:
        print(f"The kernels are not checked: {reason}.")
    elif arguments.check and not agrees(training):
        return 1
    print(
        f"{config.model}, {sum(p.numel() for p in training.model.parameters()):,} parameters; "
        f"{len(images.train)} training and {len(images.labels)} held-out images, "
        f"{len(images.classes)} classes; {config.dtype} on {machine_on(device)['device']}\n"
        f"Training loss: augmented images, labels smoothed by {SMOOTHING}; held-out loss: neither"
    )
    try:
        training.save()
        with backend("torch" if in_pytorch else get_backend()):
            while len(training.history) < config.epochs:
                training.epoch()
            report(training)
        if in_pytorch:
            print(f"Trained in PyTorch; the kernels were {checked}.")
    except KeyboardInterrupt:
        print(f"Interrupted. Go on with: fastvit-kernels train --resume --out {config.out}")
        return 130
    return 0
