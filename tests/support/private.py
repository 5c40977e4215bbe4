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
    # compat's two, where compat is told that there are none
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    # whether a mode of any thread is at work, as torch.compile asks
    "is_in_torch_dispatch_mode": "torch.utils._python_dispatch:is_in_torch_dispatch_mode",
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
    # inside, no mode and no subclass sees an operator; no subclass sees a function
    "NoDispatch": "torch:_C._DisableTorchDispatch",
    "NoFunction": "torch:_C.DisableTorchFunctionSubclass",
    # the __torch_function__ of a class that has none
    "no_torch_function": "torch:_C._disabled_torch_function_impl",
    # the operator of a cast, below autograd
    "cast_operator": "torch:ops.aten._to_copy.default",
    # keeps the GPU's stream busy for so many cycles
    "gpu_sleeps": "torch:cuda._sleep",
    # what dynamo has counted: its graphs, among others
    "compiler_counts": "torch._dynamo.utils:counters",
    # of dynamo: whether a graph may have sizes that only a run tells
    "dynamo_config": "torch._dynamo.config",
    # the graphs that dynamo has for a function, each with its guards
    "compiled_entries": "torch._dynamo.eval_frame:_debug_get_cache_entry_list",
    # what AOTAutograd imports, for 2 s, where it first parts a graph
    "pattern_matcher": "torch._inductor.pattern_matcher",
    # of AOTAutograd: whether a compiled backward may write to what its forward saved
    "autograd_config": "torch._functorch.config",
    # what torch.onnx.export sets while it runs
    "onnx_state": "torch.onnx._internal.torchscript_exporter._globals:GLOBALS",
    # puts blocks into torch.distributed's wrapper, which runs their forward again
    "checkpoint_blocks": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:"
    "apply_activation_checkpointing",
    "checkpoint_wrapper": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:"
    "checkpoint_wrapper",
    # the context variable of what gives a kernel of Triton its scratch memory
    "kernels_allocator": "triton.runtime._allocation:_allocator",
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(name)
    return pkgutil.resolve_name(NAMES[name])


# Attributes of hosts' modules, for getattr and setattr.

SELF_ATTENTION = "_sa_block"  # of nn.TransformerEncoderLayer: a method that a user may replace
PADDING_OF_MODE = "_reversed_padding_repeated_twice"  # of nn.Conv2d, where it pads with no zeros
CHECKPOINT = "_gradient_checkpointing_func"  # of transformers' layers: what runs them again
COLLECTOR = "_collector"  # of coverage.Coverage: what its tracers write to
REPLICATE = "_replicate_for_data_parallel"  # of nn.Module: what nn.DataParallel copies it by
IN_ONNX_EXPORT = "_in_onnx_export"  # of `onnx_state`


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
