"""FSDP2: torchrun --nproc-per-node 2 fsdp2.py. One line of ours, before fully_shard."""

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import fastvit_kernels as fk

SIZES = dict(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5)


def losses(swapped, device):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **SIZES).to(device)
    if swapped:
        fk.swap_in(model, regional=True)  # <- ours: a graph a block, as FSDP2 gathers each block
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())  # each process has images of its own
    images, labels = torch.randn(8, 3, 32, 32, device=device), torch.randint(5, (8,), device=device)
    found = []
    for _ in range(5):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


if __name__ == "__main__":
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    host, ours = losses(False, device), losses(True, device)
    torch.testing.assert_close(ours, host, rtol=1e-3, atol=1e-4)
    if dist.get_rank() == 0:
        print(f"losses equal over {len(host)} steps: {host[0]:.4f} to {host[-1]:.4f}")
    dist.destroy_process_group()
