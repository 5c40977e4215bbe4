"""What tests of whole models start from."""

from __future__ import annotations

import pytest
import torch._dynamo as dynamo
from private import spare_dynamo_its_logs

from fastvit_kernels import backend

spare_dynamo_its_logs()


@pytest.fixture
def fresh_dynamo():
    """No graph of another test. PyTorch runs our ops: the interpreter takes seconds for a step."""
    dynamo.reset()
    dynamo.utils.counters.clear()
    with backend("torch"):
        yield
    dynamo.reset()
