"""What the tests ask of torch, triton, timm and transformers by names that they do not promise.

What fastvit_kernels/runtime/compat.py has is
imported from there. Each is looked up where it is asked for: a release that drops one fails the
tests of that one.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import torch

NAMES = {
    # compat's, where compat is told that there is none
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    # the tensors in what an operator takes or gives
    "tree_leaves": "torch.utils._pytree:tree_leaves",
    "tree_map": "torch.utils._pytree:tree_map",
    "tree_map_only": "torch.utils._pytree:tree_map_only",
    # a tensor made of two, with a dispatch of its own
    "TwoTensor": "torch.testing._internal.two_tensor:TwoTensor",
    # a view whose memory holds the opposite; zeros without memory, and whether a tensor is one
    "negative_view": "torch:_neg_view",
    "zero_without_memory": "torch:_efficientzerotensor",
    "has_no_memory": "torch:Tensor._is_zerotensor",
    # 0 where no two elements of a tensor share memory
    "shares_memory": "torch:_debug_has_internal_overlap",
    # inside, no mode and no subclass sees an operator
    "NoDispatch": "torch:_C._DisableTorchDispatch",
    # keeps the GPU's stream busy for so many cycles
    "gpu_sleeps": "torch:cuda._sleep",
    # of AOTAutograd: whether a compiled backward may write to what its forward saved
    "autograd_config": "torch._functorch.config",
    # the context variable of what gives a kernel of Triton its scratch memory
    "kernels_allocator": "triton.runtime._allocation:_allocator",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(name)
    return pkgutil.resolve_name(NAMES[name])


COLLECTOR = "_collector"  # of coverage.Coverage: what its tracers write to


def set_deterministic(is_on: bool) -> None:
    """torch.use_deterministic_algorithms(is_on), past the import of inductor, 2 s, for its setting.

    That is for GPUs. A process that runs one test, such as those of mutate.py, is mostly imports.
    """
    if torch.cuda.is_available() or "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(is_on, warn_only=True)
    else:
        torch._C._set_deterministic_algorithms(is_on, warn_only=True)


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


def spare_dynamo_its_logs() -> None:
    """pytest hands its handlers to each logger that does not propagate, torch's trace among them,
    which then formats what nobody reads; and Dynamo times each new graph's guards: a sixth."""
    trace: Any = pkgutil.resolve_name("torch._logging._internal:trace_log")
    trace.handlers.clear()
    trace.addHandler = lambda handler: None
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *arguments: 0.0
