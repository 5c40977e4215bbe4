"""What tests of whole models start from."""

from __future__ import annotations

import pytest
import torch._dynamo as dynamo

from fastvit_kernels import backend


@pytest.fixture
def fresh_dynamo():
    """No graph of another test. PyTorch runs our ops: the interpreter takes seconds for a step."""
    dynamo.reset()
    dynamo.utils.counters.clear()
    with backend("torch"):
        yield
    dynamo.reset()
