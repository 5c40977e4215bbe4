"""swap_in at the oldest and other versions of the host libraries that pyproject.toml names.

    python tests/swap/versions.py [--dir DIR] [NAME ...]

For each set of packages: install it without dependencies under DIR, where it is not there yet, and
run `python -m tests.model_coverage --verify` of one model for each structure: a training step in
float64, swapped beside the host's. No model may crash, none may differ. One set runs on each core,
and its lines are printed together when it is done.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

# name -> packages, each with what it imports that the environment may have in another version
HOSTS = {
    "installed": [],
    "timm-0.9.16": ["timm==0.9.16"],
    "timm-1.0.15": ["timm==1.0.15"],
    "transformers-4.57.6": [
        "transformers==4.57.6",
        "huggingface_hub==0.36.0",
        "tokenizers==0.22.1",
        "kernels==0.10.5",
    ],
    "transformers-5.17.0": [
        "transformers==5.17.0",
        "huggingface_hub==1.33.0",
        "httpx==0.28.1",
        "httpcore==1.0.9",
        "h11==0.16.0",
        "anyio==4.16.0",
        "certifi==2026.10.18",
        "idna==3.20",
        "sniffio==1.3.1",
    ],
}
# One name for each structure; a name that a version does not have is not in its list.
TIMM = """
aimv2_large_patch14_224 beit_base_patch16_224 beitv2_base_patch16_224 deit3_base_patch16_224
deit_tiny_distilled_patch16_224 eva02_base_patch16_clip_224 eva02_tiny_patch14_224
eva_giant_patch14_224 swin_tiny_patch4_window7_224 vit_7b_patch16_dinov3 vit_base_patch14_dinov2
vit_base_patch16_18x2_224 vit_base_patch16_clip_quickgelu_224 vit_base_patch16_rope_224
vit_base_patch16_rope_mixed_224 vit_base_patch16_rope_reg1_gap_256
vit_base_patch16_rpn_224 vit_base_patch16_siglip_224 vit_pe_core_tiny_patch16_384
vit_small_patch16_dinov3
vit_base_patch16_xp_224 vit_giant_patch14_reg4_dinov2 vit_pwee_patch16_reg1_gap_256
vit_relpos_base_patch16_224 vit_srelpos_small_patch16_224 vit_tiny_patch16_224
"""
TRANSFORMERS = """
Aimv2VisionModel BeitModel CLIPVisionModel DINOv3ViTModel DeiTModel Dinov2Model
Dinov2WithRegistersModel IJepaModel InternVLVisionModel PixtralVisionModel Siglip2VisionModel
SiglipVisionModel VJEPA2Model ViTMAEModel ViTMSNModel ViTModel
"""
MODELS = {
    "timm": TIMM.split(),
    "transformers": TRANSFORMERS.split(),
    "torchvision": ["vit_b_16"],
}


def installed(name: str, folder: Path) -> Path:
    """The folder of a set of packages, filled where it is not there."""
    home = folder / name
    if not home.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
        # A constraints file of CI names the newest of each; HOSTS pins its own.
        environment = {k: v for k, v in os.environ.items() if k != "PIP_CONSTRAINT"}
        subprocess.run([*command, str(home), *HOSTS[name]], env=environment, check=True)
    return home


def run(name: str, folder: Path) -> bool:
    libraries = list(MODELS) if name == "installed" else [name.rpartition("-")[0]]
    models = [model for library in libraries for model in MODELS[library]]
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    if HOSTS[name]:
        path.insert(0, str(installed(name, folder)))
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "tests.model_coverage", "--verify", "--backends"]
        command += ["--out", f"{out}/coverage.csv", "--hosts", *libraries, "--models", *models]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in path if p)
        ran = subprocess.run(
            command,
            env=environment,
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    print(f"== {name}\n{ran.stdout}", end="", flush=True)
    return ran.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(HOSTS)}")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "hosts")
    arguments = parser.parse_args()
    names = arguments.names or list(HOSTS)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = pool.map(partial(run, folder=arguments.dir), names)
        failed = [name for name, ok in zip(names, passed, strict=True) if not ok]
    print(f"failed: {', '.join(failed)}" if failed else f"{len(names)} sets of versions pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
