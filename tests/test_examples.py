"""docs/examples: each framework's script prints that the swapped run's losses are the host's."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
from docs_scripts import ROOT, run_script

EXAMPLES = {  # script -> what it needs, processes
    "accelerate_loop": (("timm", "accelerate"), 1),
    "ddp": (("timm",), 2),
    "fsdp2": (("timm",), 2),
    "hf_trainer": (("transformers", "accelerate"), 1),
    "lightning_fit": (("timm", "lightning"), 1),
    "peft_quantised": (("transformers", "peft", "torchao"), 1),
    "timm_train": (("timm",), 1),
}
BACKEND = "fastvit_kernels"


def test_every_example_is_here():
    assert {p.stem for p in (ROOT / "docs" / "examples").glob("*.py")} == set(EXAMPLES)


@pytest.mark.minutes
@pytest.mark.parametrize("name", EXAMPLES)
def test_losses_are_the_hosts(name, tmp_path):
    packages, processes = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package)
    if name == "timm_train" and not entry_points(group="torch_dynamo_backends", name=BACKEND):
        pytest.skip("torch.compile knows our backend by name once the package is installed")
    script = ROOT / "docs" / "examples" / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 60
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    launcher = torchrun if processes > 1 else ()
    said = run_script(script, tmp_path, *launcher, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    assert "losses equal over " in said, said
