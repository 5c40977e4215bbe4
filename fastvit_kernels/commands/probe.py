"""How good are frozen features: k nearest neighbours and a linear probe on a model's output.

The model runs once over every image, through the kernels where they can run; scikit-learn does the
rest on the CPU. Nothing is trained but the probe.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import Tensor, nn

from ..models.vit import VisionTransformer
from ..runtime.backend import backend
from . import options
from .console import CommandError, make_console, require
from .models import fused_model, input_shape, logits_of
from .options import positive
from .training.model import load_into
from .training.processes import Processes
from .training.settings import Settings, add_reading, given_options, make_settings
from .training.streaming import Source, open_images

HEADS = ("head", "heads", "classifier")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_reading(parser)
    parser.add_argument(
        "--neighbours", type=positive(int), default=20, metavar="K", help="of k-NN (default 20)"
    )
    options.add(parser, "--json")


def feature_model(settings: Settings) -> nn.Module:
    """The model without its classifier."""
    name = settings.model
    if name is None:
        raise CommandError("probe needs --model NAME, or --weights timm:NAME or hf:NAME")
    sizes = dict(img_size=settings.img_size, in_chans=settings.in_chans)
    apart = name.startswith(("hf:", "torchvision:"))  # their models always have a classifier
    model = fused_model(name, **sizes, num_classes=2 if apart else 0)
    if apart:
        head = next((n for n in HEADS if isinstance(getattr(model, n, None), nn.Module)), None)
        if head is None:
            raise CommandError(f"--model {name} has no classifier called {', '.join(HEADS)}")
        setattr(model, head, nn.Identity())
    return model.eval().requires_grad_(False)


@torch.no_grad()
def features(
    model: nn.Module, source: Source, settings: Settings, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Features and labels on the CPU: of the training images, then of the held-out ones."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    low, alone = settings.precision == "bf16", Processes()
    held_out = source.held_out_batches(alone)
    for side in (
        ((x, y) for x, y, weight in source.batches(1, alone) if weight),
        ((x, source.held_out_labels[numbers]) for numbers, x in held_out if len(numbers)),
    ):
        parts: list[tuple[Tensor, Tensor]] = []
        for images, labels in side:
            with torch.autocast(device.type, torch.bfloat16, enabled=low):
                y = logits_of(model(images))
            parts.append((y.float().flatten(1).cpu(), labels.cpu()))
        for kind, batches in zip(found, zip(*parts, strict=True), strict=True):
            kind.append(torch.cat(batches))
    return found


def score(x: list[Tensor], y: list[Tensor], neighbours: int, seed: int) -> dict[str, float]:
    """Held-out accuracies of k-NN by cosine and of a logistic regression on scaled features."""
    neighbors, linear, preprocessing, pipeline = (
        require(f"sklearn.{name}", "scikit-learn")
        for name in ("neighbors", "linear_model", "preprocessing", "pipeline")
    )
    if len(y[0].unique()) < 2:
        raise CommandError("probe needs training images of two classes or more")
    knn = neighbors.KNeighborsClassifier(
        min(neighbours, len(y[0])), metric="cosine", weights="distance"
    )
    regression = linear.LogisticRegression(max_iter=1000, random_state=seed)
    probe = pipeline.make_pipeline(preprocessing.StandardScaler(), regression)
    (train, rest), (labels, wanted) = ([part.numpy() for part in of] for of in (x, y))
    return {
        name: float(classifier.fit(train, labels).score(rest, wanted))
        for name, classifier in (("knn", knn), ("linear", probe))
    }


def run(arguments: argparse.Namespace) -> int:
    console = make_console(quiet=arguments.json)
    require("sklearn", "scikit-learn")
    device = options.chosen_device(arguments)
    settings = make_settings({**given_options(arguments), "augment": False}, device)
    torch.manual_seed(settings.seed)
    model = feature_model(settings)
    if settings.weights is not None:
        console.print(load_into(model, settings.weights), markup=False)
    source = open_images(settings, arguments, device, console)
    model.to(device)
    if input_shape(model)[0] != settings.in_chans:
        raise CommandError(
            f"the model takes {input_shape(model)[0]} channels, the images have "
            f"{settings.in_chans}; --in-chans says which"
        )
    started = time.perf_counter()
    with console.status("features"), backend("auto" if device.type == "cuda" else "torch"):
        x, y = features(model, source, settings, device)
    seconds = time.perf_counter() - started
    train, held_out, width = len(y[0]), len(y[1]), x[0].shape[1]
    result = score(x, y, arguments.neighbours, settings.seed)
    ours = "" if isinstance(model, VisionTransformer) else ", swapped"
    console.print(
        f"{settings.model}{ours}: {train} training and {held_out} held-out images, {width} "
        f"features, {seconds:.1f} s\nk-NN ({arguments.neighbours}): {100 * result['knn']:.2f} %. "
        f"Linear probe: {100 * result['linear']:.2f} %."
    )
    if arguments.json:
        sizes = {"train_images": train, "held_out_images": held_out, "width": width}
        print(json.dumps({**result, **sizes, "seconds": seconds}))
    return 0
