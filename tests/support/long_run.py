"""Long training of a timm ViT on handwritten digits, swapped next to unswapped from one seed.

python tests/support/long_run.py [--steps 2000] [--seeds 2]

With what people train with: dropout, DropPath, clipping, an EMA, a last batch of each epoch that is
smaller, and in the middle a checkpoint from which a new model goes on. It prints what each
run gave and, for each precision, whether the mean held-out accuracies differ by more than the
run-to-run spread (largest less smallest over the seeds): then, and where graphs were made after the
first epoch of a model, the exit status is 1.

The swapped run takes the path that the machine has: kernels on a GPU, PyTorch on a CPU.
"""

from __future__ import annotations

import argparse
import functools
import gc
import io
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HELD_OUT = 360  # of 1797 images
BATCH, LR = 64, 2e-3
WARM = 0.1  # of the steps: the learning rate rises
PRECISIONS = ("fp32", "bf16")


@dataclass
class Outcome:
    losses: list[float]
    accuracy: float  # of the EMA
    graphs_grown: int  # made after an epoch, by the model that began and by the one that went on
    tensors_grown: int  # live tensors at the end less those after an epoch of the new model
    bytes_grown: int  # allocated on the GPU; 0 without one


def build(seed: int) -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(seed)
    images: Any = dict(img_size=8, patch_size=2, in_chans=1, num_classes=10)
    sizes: Any = dict(embed_dim=64, depth=4, num_heads=4, mlp_ratio=2)
    rates: Any = dict(proj_drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.1)
    model = VisionTransformer(**images, **sizes, **rates)
    for module in model.modules():  # timm's 0.02 starves so narrow a model
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    nn.init.trunc_normal_(model.pos_embed, std=0.3)
    return model.to(DEVICE)


@functools.cache
def images_and_labels() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 8 - 1
    return images.to(DEVICE), torch.tensor(digits.target)[order].to(DEVICE)


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Shuffled batches without end: a function of the seed alone."""
    images, labels = images_and_labels()
    images, labels = images[HELD_OUT:], labels[HELD_OUT:]
    for epoch in itertools.count():
        generator = torch.Generator().manual_seed(1000 * seed + epoch)
        order = torch.randperm(len(labels), generator=generator).to(DEVICE)
        for index in order.split(BATCH):
            yield images[index], labels[index]


def precision_context(precision: str) -> Any:
    return torch.autocast(DEVICE.type, torch.bfloat16) if precision == "bf16" else nullcontext()


def live_tensors() -> int:
    gc.collect()
    gc.collect()  # what a model's end lets go
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


def used_bytes() -> int:
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


@torch.no_grad()
def held_out_accuracy(model: nn.Module, precision: str) -> float:
    images, labels = images_and_labels()
    with precision_context(precision):
        logits = model.eval()(images[:HELD_OUT])
    return (logits.argmax(1) == labels[:HELD_OUT]).float().mean().item()


class Run:
    """A model, its optimizer and its EMA, as a checkpoint holds them."""

    def __init__(self, model: nn.Module):
        from timm.utils import ModelEmaV3

        self.model = model.train()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
        self.ema = ModelEmaV3(model, decay=0.98)
        self.first_graphs: int | None = None

    def checkpoint(self) -> io.BytesIO:
        file = io.BytesIO()
        parts = (self.model, self.optimizer, self.ema)
        torch.save([part.state_dict() for part in parts] + [torch.get_rng_state()], file)
        file.seek(0)
        return file

    def load(self, file: io.BytesIO) -> None:
        *states, random = torch.load(file)
        for part, state in zip((self.model, self.optimizer, self.ema), states, strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(random)

    def step(self, images: Tensor, labels: Tensor, lr: float, precision: str) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with precision_context(precision):
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.ema.update(self.model)
        return loss.detach()

    def graphs(self) -> int:
        import fastvit_kernels as fk

        return len(fk.status(self.model).graphs)

    def graphs_grown(self) -> int:
        """How many were made since `first_graphs` was set; 0 before that."""
        return 0 if self.first_graphs is None else self.graphs() - self.first_graphs


def train(make: Callable[[], nn.Module], seed: int, precision: str, steps: int) -> Outcome:
    """AdamW with a linear warm-up and decay; the same arithmetic whatever the model is.

    Args:
        make: builds the model: at the start, and in the middle to go on from a checkpoint.
    """
    torch.manual_seed(seed)
    run = Run(make())
    epoch, warm = len(images_and_labels()[1]) // BATCH + 1, max(1, int(WARM * steps))
    settled = steps // 2 + min(epoch + 1, steps // 4)
    losses: list[Tensor] = []
    memory: list[tuple[int, int]] = []
    graphs = 0
    for step, (images, labels) in enumerate(itertools.islice(batches(seed), steps)):
        if step == steps // 2:
            graphs += run.graphs_grown()
            file, run = run.checkpoint(), Run(make())
            run.load(file)
        lr = LR * min((step + 1) / warm, (steps - step) / (steps - warm))
        losses.append(run.step(images, labels, lr, precision))
        if step % (steps // 2) == epoch:
            run.first_graphs = run.graphs()
        if step in (settled, steps - 1):
            memory.append((live_tensors() - len(losses), used_bytes()))
    graphs += run.graphs_grown()
    (tensors, used), (last_tensors, last_used) = memory[0], memory[-1]
    accuracy = held_out_accuracy(run.ema.module, precision)
    values = [loss.item() for loss in losses]
    return Outcome(values, accuracy, graphs, last_tensors - tensors, last_used - used)


def pair(seed: int, precision: str, steps: int) -> tuple[Outcome, ...]:
    """The host's model as it is, and swapped, from the same weights and batches."""
    import fastvit_kernels as fk

    def swapped() -> nn.Module:
        model = build(seed)
        fk.swap_in(model)
        return model

    host = train(functools.partial(build, seed), seed, precision, steps)
    return host, train(swapped, seed, precision, steps)


def spread(values: list[float]) -> float:
    return max(values) - min(values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2)
    words = parser.parse_args()
    failed = False
    print(
        f"{words.steps} steps of {BATCH} images on {DEVICE}, torch {torch.__version__}", flush=True
    )
    for precision in PRECISIONS:
        hosts, swaps = [], []
        for seed in range(words.seeds):
            host, swapped = pair(seed, precision, words.steps)
            hosts.append(host.accuracy)
            swaps.append(swapped.accuracy)
            failed |= swapped.graphs_grown > 0
            for name, run in (("host", host), ("swapped", swapped)):
                last = sum(run.losses[-20:]) / len(run.losses[-20:])
                print(
                    f"{precision}, seed {seed}, {name}: {100 * run.accuracy:.2f} %, last losses "
                    f"{last:.4f}; grown: {run.tensors_grown} tensors, "
                    f"{run.bytes_grown / 2**20:.1f} MiB, {run.graphs_grown} graphs",
                    flush=True,
                )
        difference = sum(swaps) / len(swaps) - sum(hosts) / len(hosts)
        limit = max(spread(hosts), spread(swaps))
        print(f"{precision}: {100 * difference:+.2f} points, the spread is {100 * limit:.2f}")
        failed |= words.seeds > 1 and abs(difference) > limit
    return int(failed)


if __name__ == "__main__":
    from fastvit_kernels.runtime.compat import define_torchvision_operators

    define_torchvision_operators()
    torch.set_num_threads(1)
    sys.exit(main())
