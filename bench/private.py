"""What bench asks of torch by names that torch does not promise; nothing that ships needs them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves as tree_leaves

# The kernel that attention with an added mask takes on a GPU, which a fake CPU tensor would not.
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention


def keeps_buffers() -> AbstractContextManager[Any]:
    """A compiled backward may run many times over one forward: donated buffers forbid it."""
    import torch._functorch.config

    return torch._functorch.config.patch(donated_buffer=False)


def compiler_with(partition: Callable[..., Any]) -> Any:
    """A backend of torch.compile that runs its graphs as they are.

    Args:
        partition: (default partitioner, joint graph, its inputs, **options) -> (forward, backward).
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition_fn(joint: Any, inputs: Any, **options: Any) -> Any:
        return partition(min_cut_rematerialization_partition, joint, inputs, **options)

    return aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=partition_fn)
