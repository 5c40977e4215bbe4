"""No call of the package needs a private name of another library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastvit_kernels.runtime import compat

ROOT = Path(__file__).parents[2]


def test_compat_names_exist():
    """A newer torch that lacks one: give compat.py its successor."""
    beside = {"torch.fx._symbolic_trace:_get_is_fx_tracing"}  # older ones have the second of two
    beside |= set() if torch.version.cuda else {"torch:_C._cuda_getCurrentRawStream"}
    assert set(compat.MISSING) <= beside
    assert not compat.FUSED_IS_OFF


def test_old_torch_rejected():
    with pytest.raises(ImportError) as refused:
        compat.check_version("torch", "2.4.1+cu121", compat.TORCH)
    wanted = f"fastvit_kernels needs torch {'.'.join(map(str, compat.TORCH))} or newer, got torch "
    assert str(refused.value) == f"{wanted}2.4.1+cu121"
    for name, floor in (("torch", compat.TORCH), ("triton", compat.TRITON)):
        compat.check_version(name, ".".join(map(str, floor)), floor)
        script = f"import {name}; {name}.__version__ = '1.13.1'\nfrom fastvit_kernels import linear"
        words, environment = [sys.executable, "-c", script], os.environ | {"PYTHONPATH": str(ROOT)}
        ran = subprocess.run(words, env=environment, capture_output=True, text=True)
        assert ran.stderr.splitlines()[-1].startswith(f"ImportError: fastvit_kernels needs {name} ")
