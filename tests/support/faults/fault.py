"""What a planted fault is, and the tests of each file of the package."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION = ("ops/test_attention.py", "ops/test_sdpa.py")
SAMPLES_TESTS = ("ops/test_samples.py",)
ROPE_HOSTS = ("swap/test_rope_hosts.py",)
LEARNT = (
    "ops/test_rope.py::test_rope_of_tables_that_learn",
    "ops/test_rope.py::test_rope_of_tables_that_learn_in_ranges",
)
TESTS = {  # by file of the package
    "ops/common/activation.py": ("ops/test_activation.py", "ops/test_linear.py"),
    "ops/attention/forward.py": ATTENTION,
    "ops/attention/backward_one_pass.py": ATTENTION,
    "ops/attention/backward_split.py": ATTENTION,
    "ops/attention/samples.py": (*ATTENTION, "ops/test_varlen.py"),
    "ops/attention/backward_bias.py": ("ops/test_bias_gradient.py",),
    "ops/attention/tiles.py": ATTENTION,
    "ops/attention/varlen.py": ("ops/test_varlen.py",),
    "ops/attention/functions.py": ATTENTION,
    "ops/attention/launch.py": ATTENTION,
    "ops/attention/by_library.py": ("ops/test_attention_library.py",),
    "ops/attention/rotary.py": ("ops/test_rope_attention.py",),
    "ops/common/grad_epilogue.py": ("ops/test_grad_epilogue.py",),
    "ops/common/epilogue.py": ("ops/test_linear.py", "ops/test_mlp.py"),
    "ops/common/samples.py": SAMPLES_TESTS,
    "ops/common/gemm.py": ("ops/test_gemm.py", "ops/test_linear.py", "ops/test_mlp.py"),
    "swap/facts.py": ("swap/test_prove.py", "swap/test_swap_changes.py"),
    "swap/hosts/branch.py": (
        "swap/test_swap.py",
        "swap/test_swap_respects.py",
        "swap/test_prove.py",
    ),
    "swap/hosts/fused.py": (
        "swap/test_swap.py",
        "swap/test_swap_respects.py",
        "swap/test_prove.py",
    ),
    "swap/hosts/attend.py": ROPE_HOSTS,
    "swap/hosts/attention.py": ROPE_HOSTS,
    "swap/hosts/mlp.py": ROPE_HOSTS,
    "swap/hosts/timm.py": ROPE_HOSTS,
    "swap/hosts/special/models.py": ("swap/test_timm_models.py",),
    "models/patch_dropout.py": ("swap/test_timm_models.py",),
    "swap/hosts/special/towers.py": ROPE_HOSTS,
    "swap/prove.py": ("swap/test_prove.py",),
    "ops/common/gemm_in_roles.py": ("machine/device/test_gemm_in_roles.py",),
    "ops/attention/forward_pingpong.py": ("machine/device/test_attention_in_turns.py",),
    "ops/attention/backward_pingpong.py": ("machine/device/test_attention_in_turns.py",),
    "ops/linear/functions.py": ("ops/test_linear.py",),
    "ops/linear/kernels.py": ("ops/test_linear.py", "ops/test_mlp.py"),
    "ops/linear/launch.py": ("ops/test_linear.py",),
    "ops/gated_mlp/functions.py": ("ops/test_gated_mlp.py",),
    "ops/gated_mlp/kernels.py": ("ops/test_gated_mlp.py",),
    "ops/gated_mlp/launch.py": ("ops/test_gated_mlp.py",),
    "ops/mlp/kernels.py": ("ops/test_mlp.py",),
    "ops/mlp/narrow.py": ("ops/test_narrow_mlp.py",),
    "ops/patch_embed/arguments.py": ("ops/test_patch_embed_inputs.py",),
    "ops/patch_embed/configs.py": ("ops/test_patch_embed.py",),
    "ops/patch_embed/kernels.py": ("ops/test_patch_embed.py", "ops/test_patch_embed_inputs.py"),
    "ops/patch_embed/launch.py": ("ops/test_patch_embed.py", "ops/test_patch_embed_inputs.py"),
    "ops/patch_embed/pixels.py": ("ops/test_patch_embed.py", "ops/test_patch_embed_inputs.py"),
    "ops/recomputed_norm.py": ("ops/test_recomputed_norm.py",),
    "ops/recomputed_sum.py": ("ops/test_recomputed_sum.py",),
    "ops/norm/functions.py": ("ops/test_norm.py",),
    "ops/norm/kernels.py": ("ops/test_norm.py",),
    "ops/common/reduction.py": ("ops/test_reduction.py",),
    "ops/common/rotation.py": ("ops/test_rope.py",),
    "ops/common/rotation_tables.py": LEARNT,
    "ops/rope.py": LEARNT,
    "runtime/backend.py": ("runtime/test_backend.py", "runtime/test_transforms.py"),
    "runtime/triton.py": ("ops/test_norm.py",),
}

# What only development runs, and faults are planted in too: folders of tests/.
TOOLS = ("check", "hub", "machine", "model_coverage", "traffic")


def path_of(file: str) -> str:
    """A fault's file, from the root of the repository."""
    return file if file.startswith(("bench/", "tests/")) else f"fastvit_kernels/{file}"


@dataclass(frozen=True)
class Fault:
    id: str
    file: str  # in fastvit_kernels/, where it does not begin with bench/ or tests/
    within: str
    what: str
    old: str
    new: str
    only: tuple[str, ...] = ()  # tests other than those of the file

    @property
    def tests(self) -> tuple[str, ...]:
        return self.only or TESTS[self.file]
