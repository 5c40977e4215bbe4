"""timm's train.py, in its own parts: python timm_train.py. One line of ours, the same losses.

The script itself takes the line as a flag: python train.py ... --torchcompile fastvit_kernels.
It sets up data, loss, optimizer and schedule as here, and hands the flag to torch.compile.
"""

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, dispatch_clip_grad, random_seed

SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)


def losses(torchcompile):
    random_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SIZES)
    ema = ModelEmaV3(model, decay=0.9)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
    schedule, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=4, warmup_epochs=1)
    task = torch.compile(model, backend=torchcompile) if torchcompile else model  # <- ours
    mixup, loss_fn = Mixup(mixup_alpha=0.2, num_classes=5), SoftTargetCrossEntropy()
    images, labels = torch.randn(24, 3, 32, 32), torch.randint(5, (24,))
    found = []
    for epoch in range(2):
        task.train()
        for batch in torch.arange(24).split(8):
            inputs, targets = mixup(images[batch], labels[batch])
            loss = loss_fn(task(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0, mode="norm")
            optimizer.step()
            ema.update(model)
            found.append(loss.item())
        schedule.step(epoch + 1)
    return torch.tensor(found)


if __name__ == "__main__":
    host, ours = losses(None), losses("fastvit_kernels")
    torch.testing.assert_close(ours, host, rtol=1e-3, atol=1e-4)
    print(f"losses equal over {len(host)} steps: {host[0]:.4f} to {host[-1]:.4f}")
