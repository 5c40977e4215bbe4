"""30 steps of each host, swapped beside unswapped: within what fp32 explains."""

from __future__ import annotations

import pytest
from hosts_training import HOSTS, STEPS, curves, distances

from fastvit_kernels import backend

pytest.importorskip("timm")
pytest.importorskip("transformers")
pytest.importorskip("torchvision")
pytest.importorskip("sklearn")


@pytest.mark.parametrize("host", HOSTS)
def test_thirty_steps(host):
    with backend("torch"):  # docs/swap.md has the run through the kernels
        found = curves(host)
    assert all(len(losses) == STEPS for losses in found.values())
    assert found["swapped"][-5:].mean() < found["swapped"][:5].mean(), "it trains"
    distance, limit = distances(found)
    assert distance <= limit, f"{distance:.2e} from float64, the limit is {limit:.2e}"
