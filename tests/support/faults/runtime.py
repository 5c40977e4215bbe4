"""Faults in the choice of backend, dispatch, private names and what a model reports."""

from .fault import Fault

COMPAT = "runtime/test_compat.py"
WITHOUT = f"{COMPAT}::test_a_swapped_model_without"
POLICY, OF_POLICY = "runtime/checkpoint_policy.py", "swap/test_checkpoint_policy.py::"

FAULTS: list[Fault] = [
    Fault(
        "compat-name-elsewhere",
        "runtime/values.py",
        "values_are_checked",
        "a private name of torch outside compat.py",
        "torch.compiler.is_compiling()",
        "torch._dynamo.is_compiling()",
        only=(f"{COMPAT}::test_private_names_stand_in_one_file",),
    ),
    Fault(
        "compat-transform-unseen",
        "runtime/compat.py",
        "",
        "without the name for it torch.func counts as absent",
        "_peek_transform() is not None",
        "False",
        only=(f"{WITHOUT}[torch:_C._are_functorch_transforms_active]",),
    ),
    Fault(
        "compat-mode-unseen",
        "runtime/compat.py",
        "foreign_modes",
        "without the stack of modes another package's mode counts as torch's",
        "return [None]",
        "return []",
        only=(f"{WITHOUT}[torch.utils._python_dispatch:_get_current_dispatch_mode_stack]",),
    ),
    Fault(
        "compat-hooks-unseen",
        "runtime/compat.py",
        "",
        "without their dict, global hooks count as absent",
        "None not in _HOOKS else lambda: True",
        "None not in _HOOKS else lambda: False",
        only=(f"{WITHOUT}[hooks]",),
    ),
    Fault(
        "compat-versions-equal",
        "runtime/compat.py",
        "",
        "without versions a tensor counts as never written to",
        "else lambda _: object()",
        "else lambda _: 0",
        only=(f"{WITHOUT}[torch:Tensor._version]",),
    ),
    Fault(
        "compat-old-torch",
        "runtime/compat.py",
        "check_version",
        "a release below the floor is taken",
        "< least",
        "< ()",
        only=(f"{COMPAT}::test_an_older_release_is_refused_in_a_line",),
    ),
    Fault(
        "compat-second-swap",
        "swap/apply.py",
        "_Swap.decide",
        "a second swap_in gives a class to what a wider part reads",
        "cls is None and _is_read_through(name, self.modules)",
        "False",
        only=("swap/test_recognise.py::test_a_second_call_swaps_nothing_that_a_wider_part_reads",),
    ),
    Fault(
        "policy-attention-again",
        POLICY,
        "kind_of",
        "our attention is computed again",
        'return "attention"',
        "return None",
        only=(f"{OF_POLICY}test_attention_runs_once[swapped-attention]",),
    ),
    Fault(
        "policy-keeps-activations",
        POLICY,
        "kind_of",
        "fc1's outputs are kept, 16 C bytes a token",
        'return None if activation else "product"',
        'return "product"',
        only=(f"{OF_POLICY}test_what_is_kept[swapped]",),
    ),
    Fault(
        "policy-silent",
        POLICY,
        "checkpoint_policy",
        "nothing is said of a policy that keeps nothing",
        "if ran == [False]:",
        "if False:",
        only=(f"{OF_POLICY}test_what_is_wrong_is_said",),
    ),
]
