"""An installed fastvit_kernels at work without a network: any attempt to reach one is an error.

python -I .ci/smoke.py [FOLDER]    FOLDER: where the package must have been installed

Imports the package, then runs models and ops forward and backward, swaps a timm model that has
random weights, and runs `fastvit-kernels check`. With TRITON_INTERPRET=1 the kernels run.
"""

import sys
from importlib.metadata import version
from pathlib import Path

NETWORK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


def refuse_network(event: str, arguments: tuple) -> None:
    if event in NETWORK or event.startswith(("urllib.", "http.client.")):
        raise RuntimeError(f"the network was asked for: {event} {arguments}")


sys.addaudithook(refuse_network)

import fastvit_kernels as fk  # noqa: E402

heavy = {"timm", "transformers", "torchvision", "huggingface_hub", "requests", "matplotlib"}
assert not heavy & set(sys.modules), f"imported too much: {heavy & set(sys.modules)}"

import torch  # noqa: E402

torch.set_num_threads(1)
folder = Path(fk.__file__).resolve().parent
if len(sys.argv) > 1:
    assert Path(sys.argv[1]).resolve() in folder.parents, f"imported from {folder}"
    assert version("fastvit-kernels") == fk.__version__
assert (folder / "py.typed").is_file()

model = fk.create_vit("vit_mnist", img_size=8, depth=1, embed_dim=16, num_heads=2)
model(torch.randn(2, 1, 8, 8)).square().mean().backward()
assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
report = fk.load_weights(model, model.state_dict())
assert report is not None

x = torch.randn(2, 3, 16, requires_grad=True)
weight = torch.randn(48, 16)
fk.layer_norm(x).sum().backward()
fk.qkv_attention(x, weight, num_heads=2).sum().backward()
fk.linear(x, weight, activation="gelu").sum().backward()

try:
    from fastvit_kernels.runtime.compat import define_torchvision_operators

    define_torchvision_operators()
    import timm
except ModuleNotFoundError as error:
    print("no swap:", error)
else:
    host = timm.create_model(
        "vit_tiny_patch16_224",
        pretrained=False,
        img_size=8,
        patch_size=4,
        embed_dim=16,
        num_heads=2,
        depth=1,
        num_classes=3,
    )
    images = torch.randn(2, 3, 8, 8)
    assert fk.swap_in(host, example=images).share == 1.0
    host(images).sum().backward()

from fastvit_kernels.commands import cli  # noqa: E402
from fastvit_kernels.runtime.backend import INTERPRETED  # noqa: E402

if INTERPRETED or torch.cuda.is_available():
    assert cli.main(["check", "--only", "layer_norm_and", "--dtype", "fp32"]) == 0
print("smoke test passed:", folder)
