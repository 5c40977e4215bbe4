"""peft: LoRA on a base of 8 bits by torchao: python peft_quantised.py.

torchao's Linear layers are called as they are; norms, attention and MLPs around them run fused.
"""

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import ViTConfig, ViTForImageClassification

import fastvit_kernels as fk

CONFIG = ViTConfig(
    image_size=32,
    patch_size=8,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    num_labels=5,
)


def losses(swapped):
    torch.manual_seed(0)
    base = ViTForImageClassification(CONFIG).requires_grad_(False)
    quantize_(base.vit, Int8WeightOnlyConfig())
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, lora)
    if swapped:
        fk.swap_in(model)  # <- ours, after peft or before
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(5, (8,))
    found = []
    for _ in range(6):
        loss = F.cross_entropy(model(pixel_values=images).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found), model


if __name__ == "__main__":
    (host, _), (ours, model) = losses(False), losses(True)
    torch.testing.assert_close(ours, host, rtol=1e-3, atol=1e-4)
    print(fk.status(model))
    print(f"losses equal over {len(host)} steps: {host[0]:.4f} to {host[-1]:.4f}")
