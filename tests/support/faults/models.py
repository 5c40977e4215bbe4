"""Faults in our own models: their layers, initial weights and checkpoints."""

from .fault import Fault

_ROPE_MODELS = "models/test_rope_models.py::"
FAULTS = [
    Fault(
        "model-pairing", "models/modules.py", "Attention._attend",
        "half pairing where interleaved is wanted, and the other way round",
        "interleaved=not self.rotate_half", "interleaved=self.rotate_half",
        only=(f"{_ROPE_MODELS}test_timm[dinov3]",),
    ),
    Fault(
        "model-prefix-turns", "models/modules.py", "Attention._attend",
        "rotary positions given as if there were no class and register tokens",
        "(cos, sin), prefix_tokens = rope, self.num_prefix_tokens",
        "(cos, sin), prefix_tokens = rope, x.shape[1]",
        only=(f"{_ROPE_MODELS}test_timm[rope_ape]",),
    ),
    Fault(
        "model-pairing-when-called", "models/modules.py", "Attention.heads",
        "the other pairing where a hook has qkv called",
        "interleaved=not self.rotate_half", "interleaved=self.rotate_half",
        only=(f"{_ROPE_MODELS}test_a_hook_on_qkv_with_biases_apart",),
    ),
    Fault(
        "model-key-bias", "models/modules.py", "Attention._bias_apart",
        "the bias of the queries given to the keys too",
        "torch.zeros_like(self.q_bias)", "self.q_bias",
        only=(f"{_ROPE_MODELS}test_timm[dinov3]",),
    ),
    Fault(
        "model-key-norm", "models/modules.py", "_head_norms",
        "keys normed by the queries' weights",
        '(("q", q_norm), ("k", k_norm))', '(("q", q_norm), ("k", q_norm))',
        only=(f"{_ROPE_MODELS}test_timm[qk_norm]",),
    ),
    Fault(
        "model-norm-eps", "models/modules.py", "_head_norms",
        "one eps for norms whose eps differ",
        "or q_norm.eps != k_norm.eps", "",
        only=(f"{_ROPE_MODELS}test_a_norm_pairs_with_one_of_its_own_eps",),
    ),
    Fault(
        "model-columns-first", "models/rotary.py", "RotaryEmbedding._tables",
        "columns and rows exchanged",
        'xy=self.grid_indexing == "xy"', "xy=False",
        only=(f"{_ROPE_MODELS}test_timm[rope_ape]",),
    ),
    Fault(
        "model-reference-grid", "models/rotary.py", "RotaryEmbedding._tables",
        "indices not scaled to the grid of pretraining",
        "ref_grid=self.ref_feat_shape", "ref_grid=None",
        only=(f"{_ROPE_MODELS}test_timm[eva02-packed]",),
    ),
    Fault(
        "model-tables-rounded", "models/rotary.py", "RotaryEmbedding._apply",
        "tables left in the dtype of the model",
        "if not self.cos.is_meta:", "if False:",
        only=(f"{_ROPE_MODELS}test_tables_are_fp32_and_no_checkpoint_holds_them",),
    ),
    Fault(
        "model-old-grid", "models/rotary.py", "RotaryEmbedding.forward",
        "the model's own tables for a grid of as many patches",
        "if tuple(grid) == self.feat_shape:", "if grid[0] * grid[1] == len(self.cos):",
        only=(f"{_ROPE_MODELS}test_images_of_another_size",),
    ),
    Fault(
        "model-rms-rebuilt", "ops/rebuilt_norm.py", "rebuilt_norm",
        "an RMSNorm's output rebuilt as a LayerNorm's",
        'if norm == "rms_norm":', "if False:",
    ),
]  # fmt: skip
