"""CLIP-style contrastive learning: python clip.py. Stopped at any moment, it goes on where it was.

Pictures of digits, and captions that name them in words: transformers' CLIPModel, from a config,
learns which belong together. It is never given a label; at the end it classifies pictures that it
has not seen by the nearest of ten captions, "zero-shot". Half of such training is the text tower,
causal and padded; swap_in takes it too.
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from transformers import CLIPConfig, CLIPModel

import fastvit_kernels as fk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILE = Path("runs/clip.pt")
EPOCHS = 10
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEMPLATES = ("a picture of the digit {}", "the number {}", "{}, written by hand")
WORDS = sorted({word for t in TEMPLATES for word in t.replace(",", " ,").split()} - {"{}"})
VOCABULARY = ["<pad>", "<start>", "<end>", *WORDS, *NAMES]
LENGTH = 9


def tokens(captions):
    """(B, LENGTH) ids and mask: start, the words, end, padding."""
    ids = torch.zeros(len(captions), LENGTH, dtype=torch.long)
    for row, caption in zip(ids, captions, strict=True):
        words = ["<start>", *caption.replace(",", " ,").split(), "<end>"]
        row[: len(words)] = torch.tensor([VOCABULARY.index(word) for word in words])
    return ids.to(DEVICE), (ids > 0).long().to(DEVICE)


def build():
    torch.manual_seed(0)
    size = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=3, num_attention_heads=2)
    vision = dict(image_size=8, patch_size=2, num_channels=1, **size)
    text = dict(
        vocab_size=len(VOCABULARY),
        max_position_embeddings=LENGTH,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{**size, "num_hidden_layers": 2},
    )
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    model = CLIPModel(config).to(DEVICE)
    fk.swap_in(model)  # <- ours: both towers
    return model


def pictures():
    """Images (1797, 1, 8, 8) and labels; the last 500 are to test."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images.to(DEVICE), torch.tensor(found.target)


def save(content):
    torch.save(content, FILE.with_suffix(".part"))
    FILE.with_suffix(".part").replace(FILE)


def train(model, images, labels):
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    first = 0
    if FILE.exists():
        state = torch.load(FILE, map_location=DEVICE, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"]
    model.train()
    for epoch in range(first, EPOCHS):
        torch.manual_seed(epoch)  # a resumed run sees the same order and captions
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min((epoch + 1) / 3, 1 - epoch / EPOCHS)
        for part in torch.randperm(len(labels) - 500).split(64):
            drawn = torch.randint(len(TEMPLATES), (len(part),)).tolist()
            names = [NAMES[digit] for digit in labels[part].tolist()]
            ids, mask = tokens([TEMPLATES[t].format(n) for t, n in zip(drawn, names, strict=True)])
            with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
                loss = model(
                    input_ids=ids, attention_mask=mask, pixel_values=images[part], return_loss=True
                ).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save({**state, "epoch": epoch + 1})
        print(f"epoch {epoch + 1} of {EPOCHS}, loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def zero_shot(model, images, labels):
    """Accuracy on the last 500 pictures of the nearest caption."""
    model.eval()
    ids, mask = tokens([TEMPLATES[0].format(name) for name in NAMES])
    logits = model(input_ids=ids, attention_mask=mask, pixel_values=images[-500:]).logits_per_image
    return (logits.argmax(1).cpu() == labels[-500:]).float().mean().item()


def main():
    FILE.parent.mkdir(exist_ok=True)
    images, labels = pictures()
    model = build()
    before = zero_shot(model, images, labels)
    train(model, images, labels)
    after = zero_shot(model, images, labels)
    print(f"accuracy, zero-shot, on 500 other pictures: before {before:.1%}, after {after:.1%}")


if __name__ == "__main__":
    main()
