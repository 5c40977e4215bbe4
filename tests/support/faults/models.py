"""Faults in our own models: their layers, initial weights and checkpoints."""

from .fault import Fault

_ROPE_MODELS = "models/test_rope_models.py::"
_MAPS = "models/test_attention_maps.py::"
_INIT = "models/test_vit.py::test_initial_weights_are_timms"
_PRESET = f"{_ROPE_MODELS}test_create_vit_computes_what_timms_does"
_ACCURACY = "support/test_accuracy.py::"
_MASKED = "models/test_masked.py::"
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
        "model-columns-first", "models/rope_tables.py", "RotaryEmbedding._tables",
        "columns and rows exchanged",
        'xy=self.grid_indexing == "xy"', "xy=False",
        only=(f"{_ROPE_MODELS}test_timm[rope_ape]",),
    ),
    Fault(
        "model-reference-grid", "models/rope_tables.py", "RotaryEmbedding._tables",
        "indices not scaled to the grid of pretraining",
        "ref_grid=self.ref_feat_shape", "ref_grid=None",
        only=(f"{_ROPE_MODELS}test_timm[eva02-packed]",),
    ),
    Fault(
        "model-tables-rounded", "models/rope_tables.py", "RotaryEmbedding._apply",
        "tables left in the dtype of the model",
        "if not self.cos.is_meta:", "if False:",
        only=(f"{_ROPE_MODELS}test_tables_are_fp32_and_no_checkpoint_holds_them",),
    ),
    Fault(
        "model-old-grid", "models/rope_tables.py", "RotaryEmbedding.forward",
        "the model's own tables for a grid of as many patches",
        "if tuple(grid) == self.feat_shape:", "if grid[0] * grid[1] == len(self.cos):",
        only=(f"{_ROPE_MODELS}test_images_of_another_size",),
    ),
    Fault(
        "model-rms-rebuilt", "ops/recomputed_norm.py", "recomputed_norm",
        "an RMSNorm's output rebuilt as a LayerNorm's",
        'rms_norm_fwd if norm == "rms_norm" else layer_norm_fwd', "layer_norm_fwd",
    ),
    Fault(
        "model-yardstick-luck", "verify/accuracy.py", "measure_all",
        "the first run of the yardstick decides",
        "for seed in range(ORDERS):", "for seed in range(0):",
        only=(f"{_ACCURACY}test_the_largest_yardstick_counts_and_no_more_run_than_needed",),
    ),
    Fault(
        "model-yardstick-last", "verify/accuracy.py", "_more",
        "the last run of the yardstick counts, not the largest",
        "if former < other <= FAR", "if other <= FAR",
        only=(f"{_ACCURACY}test_the_largest_yardstick_counts_and_no_more_run_than_needed",),
    ),
    Fault(
        "model-yardstick-far", "verify/accuracy.py", "_more",
        "a run of the yardstick that is wrong lets everything pass",
        "former < other <= FAR * limit", "former < other",
        only=(f"{_ACCURACY}test_the_largest_yardstick_counts_and_no_more_run_than_needed",),
    ),
    Fault(
        "model-yardstick-order", "verify/orders.py", "AnotherOrder.__torch_dispatch__",
        "the order of the sums is the usual one",
        "torch.randperm(given[first].shape[axis], generator=self.generator)",
        "torch.arange(given[first].shape[axis])",
        only=(f"{_ACCURACY}test_another_order_rounds_differently_and_is_the_same_function",),
    ),
    Fault(
        "model-yardstick-causal", "verify/orders.py", "_axes",
        "keys of causal attention permuted",
        "any(x is True for x in args)", "False",
        only=(f"{_ACCURACY}test_another_order_rounds_differently_and_is_the_same_function",),
    ),
    Fault(
        "model-yardstick-left", "verify/orders.py", "AnotherOrder.__torch_dispatch__",
        "results left in the other order",
        "order.argsort()", "torch.arange(len(order))",
        only=(f"{_ACCURACY}test_another_order_rounds_differently_and_is_the_same_function",),
    ),
    Fault(
        "init-linear-std", "models/initial.py", "_init_linear",
        "Linear layers begin with twice the deviation",
        "trunc_normal_(linear.weight, std=0.02)", "trunc_normal_(linear.weight, std=0.04)",
        only=(_INIT,),
    ),
    Fault(
        "init-linear-bias", "models/initial.py", "_init_linear",
        "biases of Linear layers left as torch draws them",
        "nn.init.zeros_(linear.bias)", "pass",
        only=(_INIT,),
    ),
    Fault(
        "init-positions-std", "models/vit.py", "VisionTransformer.init_weights",
        "positions begin with twice the deviation",
        "trunc_normal_(self.pos_embed, std=0.02)", "trunc_normal_(self.pos_embed, std=0.04)",
        only=(_INIT,),
    ),
    Fault(
        "init-positions-zero", "models/vit.py", "VisionTransformer.init_weights",
        "positions begin at zero",
        "if self.pos_embed is not None:", "if False:",
        only=(_INIT,),
    ),
    Fault(
        "init-tokens", "models/vit.py", "VisionTransformer.init_weights",
        "class and register tokens begin as positions do",
        "nn.init.normal_(token, std=1e-6)", "nn.init.normal_(token, std=0.02)",
        only=(_INIT,),
    ),
    Fault(
        "init-registers", "models/vit.py", "VisionTransformer.init_weights",
        "register tokens left out",
        "self.reg_token, self.mask_token)", "self.mask_token)",
        only=(_INIT,),
    ),
    Fault(
        "init-gates-first", "models/initial.py", "init_weights",
        "gates of packed MLPs begin as other Linear layers do",
        "(GluMlp, SwiGLU)", "SwiGLU",
        only=(_INIT,),
    ),
    Fault(
        "init-gate-half", "models/gated_mlp.py", "GluMlp.init_weights",
        "the first half of the packed layer begins near 0 instead of the second",
        "self.fc1.weight[half:]", "self.fc1.weight[:half]",
        only=(_INIT,),
    ),
    Fault(
        "init-gate-bias", "models/gated_mlp.py", "GluMlp.init_weights",
        "a bias of 1 for both halves",
        "self.fc1.bias[half:]", "self.fc1.bias",
        only=(_INIT,),
    ),
    Fault(
        "init-swiglu-bias", "models/gated_mlp.py", "SwiGLU.init_weights",
        "the gate's bias left at 0",
        "nn.init.ones_(self.fc1_g.bias)", "pass",
        only=(_INIT,),
    ),
    Fault(
        "init-layer-scale", "models/modules.py", "LayerScale.__init__",
        "LayerScale begins at 1",
        "torch.full((dim,), init_values)", "torch.ones(dim)",
        only=(_INIT,),
    ),
    Fault(
        "init-values-bias-apart", "models/modules.py", "Attention.__init__",
        "the values' own bias begins at 1",
        "self.v_bias = nn.Parameter(torch.zeros(width))",
        "self.v_bias = nn.Parameter(torch.ones(width))",
        only=("models/test_vit.py::test_initial_weights_that_timms_vit_has_not",),
    ),
    Fault(
        "init-preset-scale", "models/presets.py", "_dinov3",
        "DINOv3's LayerScale begins elsewhere",
        "init_values=1e-5", "init_values=1e-4",
        only=(_PRESET,),
    ),
    Fault(
        "model-preset-activation", "models/presets.py", "_eva02",
        "EVA02's gate with another activation",
        'act_layer="silu"', 'act_layer="gelu"',
        only=(_PRESET,),
    ),
    Fault(
        "model-preset-any-size", "models/presets.py", "_dinov3",
        "DINOv3 takes images of its own size only",
        "dynamic_img_size=True", "dynamic_img_size=False",
        only=(_PRESET,),
    ),
    Fault(
        "model-preset-offset", "models/presets.py", "_perception_encoder",
        "positions of Perception Encoder counted from 0",
        "rope_grid_offset=0.0 if large else 1.0", "rope_grid_offset=0.0",
        only=(_PRESET,),
    ),
    Fault(
        "model-preset-width", "models/presets.py", "",
        "one size of AIMv2 with another number of heads",
        '("1b", (2048, 24, 16), 2.75)', '("1b", (2048, 24, 32), 2.75)',
        only=(f"{_ROPE_MODELS}test_every_preset_has_timms_arguments",),
    ),
    Fault(
        "model-preset-registers", "models/presets.py", "_rope_vit",
        "one register in each preset",
        "reg_tokens=registers", "reg_tokens=1",
        only=(f"{_ROPE_MODELS}test_every_preset_has_timms_arguments",),
    ),
    Fault(
        "model-drop-path-rates", "models/config.py", "ViTConfig.block",
        "the last block drops less than the rate",
        "drop_path_rate * i / max(self.depth - 1, 1)", "drop_path_rate * i / self.depth",
        only=("models/test_vit.py::test_drop_path_rates_are_timms",),
    ),
    Fault(
        "model-drop-path-second", "models/vit.py", "Block.__init__",
        "the second branch is never dropped",
        "self.drop_path2 = DropPath(c.drop_path, c.drop_path_mode)", "self.drop_path2 = DropPath()",
        only=("models/test_vit.py::test_drop_path_rates_are_timms",),
    ),
    Fault(
        "model-drop-path-all", "models/modules.py", "DropPath.row_scale",
        "a branch that is always dropped gives NaN",
        "if keep > 0 else scale", "if keep >= 0 else scale",
        only=("models/test_vit.py::test_a_drop_path_that_drops_all_gives_zeros",),
    ),
    Fault(
        "model-pre-logits", "models/vit.py", "VisionTransformer.forward_head",
        "pooled features asked for, logits given",
        "return x if pre_logits else self.head(x)", "return self.head(x)",
        only=("models/test_vit.py::test_features_and_head_are_timms",),
    ),
    Fault(
        "model-features-unnormed", "models/vit.py", "VisionTransformer.forward_features",
        "the last norm left out",
        "return self.norm(x)", "return x",
        only=("models/test_vit.py::test_features_and_head_are_timms",),
    ),
    Fault(
        "model-pool-prefix", "models/vit.py", "VisionTransformer.forward_head",
        "class token and registers in the mean",
        "0 if self.pool_include_prefix else self.num_prefix_tokens", "0",
        only=("models/test_vit.py::test_features_and_head_are_timms",),
    ),
    Fault(
        "model-fc-norm-default", "models/vit.py", "VisionTransformer.__init__",
        "a mean of unnormed patches' norms, as if the norm came before",
        'c.global_pool == "avg" if c.fc_norm is None else c.fc_norm', "bool(c.fc_norm)",
        only=("models/test_vit.py::test_features_and_head_are_timms",),
    ),
    Fault(
        "model-head-dropout", "models/vit.py", "VisionTransformer.forward_head",
        "no dropout before the head",
        "self.head_drop(self.fc_norm(x))", "self.fc_norm(x)",
        only=("models/test_vit.py::test_dropouts_draw_what_timm_draws",),
    ),
    Fault(
        "model-position-dropout", "models/vit.py", "VisionTransformer.forward_features",
        "no dropout of positions",
        "self.norm_pre(self.pos_drop(x))", "self.norm_pre(x)",
        only=("models/test_vit.py::test_dropouts_draw_what_timm_draws",),
    ),
    Fault(
        "model-attention-dropout", "models/modules.py", "Attention._attend",
        "dropout of attention in evaluation too",
        "rate_of(self.attn_drop) if self.training else 0.0", "self.attn_drop.p",
        only=("models/test_vit.py::test_attention_dropout_is_for_training",),
    ),
    Fault(
        "model-projection-dropout", "models/modules.py", "Attention.forward",
        "no dropout after the projection of attention",
        "(not self.training or rate_of(self.proj_drop) == 0)", "True",
        only=("models/test_vit.py::test_dropouts_draw_what_timm_draws",),
    ),
    Fault(
        "model-decay", "models/vit.py", "VisionTransformer.no_weight_decay",
        "register tokens decay",
        '"cls_token", "reg_token"', '"cls_token"',
        only=("models/test_vit.py::test_the_parameters_that_timm_does_not_decay",),
    ),
    Fault(
        "model-resample", "models/positions.py", "resize_grid",
        "positions resampled without antialias",
        "antialias=True", "antialias=False",
        only=("models/test_weights.py::test_positions_are_resized_as_timm_does",),
    ),
    Fault(
        "model-resample-prefix", "models/positions.py", "resize_positions",
        "positions of class and register tokens resampled from the first",
        "(pos_embed[:, :prefix], resize", "(pos_embed[:, :1].expand(-1, prefix, -1), resize",
        only=("models/test_vit.py::test_positions_are_resampled_after_class_token_and_registers",),
    ),
    Fault(
        "model-resample-dtype", "models/positions.py", "resize_grid",
        "resampled positions stay fp32",
        ".to(patches.dtype)", "",
        only=("models/test_patch_models.py::test_positions_resampled_in_16_bits_keep_their_dtype",),
    ),
    Fault(
        "model-resample-own-grid", "models/vit.py", "VisionTransformer._positions",
        "learned positions never resampled for another grid of as many patches",
        "grid == own", "grid[0] * grid[1] == own[0] * own[1]",
        only=(f"{_ROPE_MODELS}test_images_of_another_size",),
    ),
    *(
        Fault(f"model-patch-{id}", "models/modules.py", "_cuts",
              f"an embedding passes over its convolution's {id}", old, new,
              only=(f"models/test_patch_models.py::test_a_convolution_of_other_patches_is_called[{id}]",))
        for id, old, new in (
            ("stride", "proj.kernel_size == proj.stride", "True"),
            ("padding", 'proj.padding in ((0, 0), "valid")', "True"),
            ("groups", "proj.groups == 1", "True"),
            ("dilation", "proj.dilation == (1, 1)", "True"),
        )
    ),
    *(
        Fault(f"model-stand-in-{id}", "models/vit.py", "Block._add", what, old, new,
              only=(f"models/test_vit.py::test_a_usual_module_may_stand_for_a_part[{part}]",))
        for id, what, old, new, part in (
            ("scale", "an nn.Identity in place of LayerScale has no gamma",
             " or type(scale) is nn.Identity", "", "ls2-0.0"),
            ("path", "an nn.Identity in place of DropPath has no rate",
             "DropPath() if type(drop_path) is nn.Identity else drop_path", "drop_path",
             "drop_path1-0.0"),
        )
    ),
    Fault(
        "model-stand-in-norm", "models/norms.py", "norm_and_input",
        "a norm in place of ours sees all samples",
        "x if samples is None else kept_rows(x, samples)", "x",
        only=("models/test_vit.py::test_a_usual_module_may_stand_for_a_part[norm1-0.5]",),
    ),
    Fault(
        "model-stand-in-dropout", "models/modules.py", "rate_of",
        "an nn.Identity in place of a dropout has no rate",
        "0.0 if type(dropout) is nn.Identity else dropout.p", "dropout.p",
        only=("models/test_vit.py::test_a_usual_module_may_stand_for_a_part[mlp.drop-0.0]",),
    ),
    Fault(
        "model-patch-drop-count", "models/patch_dropout.py", "draw_kept",
        "one patch too few",
        "int(num_patches * (1.0 - prob))", "int(num_patches * (1.0 - prob)) - 1",
        only=("models/test_patch_models.py::test_patch_dropout_is_timm_s",),
    ),
    Fault(
        "model-patch-drop-none", "models/patch_dropout.py", "draw_kept",
        "no patch kept at a high rate",
        "max(1, ", "max(0, ",
        only=("models/test_patch_models.py::test_one_patch_is_always_kept",),
    ),
    Fault(
        "model-patch-drop-tables", "models/patch_dropout.py", "kept_tables",
        "sines of the patches that are first, whichever are kept",
        "cos[keep], sin[keep]", "cos[keep], sin[keep.sort(1)[0]]",
        only=("models/test_patch_models.py::test_patch_dropout_turns_the_kept_patches_as_timm_does",),
    ),
    Fault(
        "model-maps-modes", "models/attention_maps.py", "_evaluating",
        "every module left in one mode",
        "module.training = training", "module.training = modes[0][1]",
        only=(f"{_MAPS}test_attention_maps_leave_modes_hooks_gradients_and_random_state",),
    ),
    Fault(
        "model-maps-fast-path", "models/attention_maps.py", "_math_attention",
        "torch.nn's fast path stays off for the whole process",
        "torch.backends.mha.set_fastpath_enabled(fast)", "pass",
        only=(f"{_MAPS}test_attention_maps_of_other_libraries",),
    ),
    Fault(
        "model-preset-depth", "models/presets.py", "_perception_encoder",
        "one size of Perception Encoder with a block less",
        "((1536, 47, 16), 448, 14, scaled)", "((1536, 46, 16), 448, 14, scaled)",
        only=(f"{_ROPE_MODELS}test_every_preset_has_timms_arguments",),
    ),
    Fault(
        "model-preset-near", "models/presets.py", "create_vit",
        "a mistyped name is not answered with names near it",
        "difflib.get_close_matches(name, _PRESETS)", "[]",
        only=("models/test_vit.py::test_create_vit_rejects",),
    ),
    Fault(
        "model-arguments-unchecked", "models/checks.py", "check_arguments",
        "annotations say what nobody looks at",
        "check(op, name, values[name])", "pass",
        only=("models/test_bad_models.py::test_bad_constructor",),
    ),
    Fault(
        "model-arguments-none", "models/checks.py", "check_arguments",
        "None passes where it is no default",
        "not (optional and values[name] is None)", "values[name] is not None",
        only=("models/test_bad_models.py::test_bad_constructor",),
    ),
    Fault(
        "model-norm-default-eps", "models/norms.py", "RmsNorm.__init__",
        "RmsNorm's default eps is torch's LayerNorm's",
        "eps: Eps = 1e-6", "eps: Eps = 1e-5",
        only=("models/test_vit.py::test_norms_have_their_hosts_eps",),
    ),
    Fault(
        "model-norm-autocast", "models/norms.py", "LayerNorm.forward",
        "a branch under autocast begins in fp32, which costs a cast",
        "autocast_dtype(x) if isinstance(x, Tensor) else None", "None",
        only=("models/test_vit.py::test_a_branch_begins_in_autocasts_dtype",),
    ),
    Fault(
        "init-again-scheme", "models/vit.py", "VisionTransformer.init_weights",
        "a scheme that is named later is ignored",
        "mode or self.weight_init_mode", "self.weight_init_mode",
        only=(
            "models/test_vit.py::"
            "test_weights_are_drawn_anew_by_the_scheme_that_is_named_else_the_constructors[]",
        ),
    ),
    Fault(
        "init-again-skipped", "models/vit.py", "VisionTransformer.__init__",
        "a model that skipped its initial weights begins with zeros later",
        '"reset" if c.weight_init == "skip" else c.weight_init', "c.weight_init",
        only=(
            "models/test_vit.py::"
            "test_weights_are_drawn_anew_by_the_scheme_that_is_named_else_the_constructors[skip]",
        ),
    ),
    Fault(
        "model-dtype-alone", "models/vit.py", "VisionTransformer.__init__",
        "a dtype without a device is ignored",
        "if c.device is not None or c.dtype is not None:", "if c.device is not None:",
        only=("models/test_vit.py::test_a_model_is_made_in_a_dtype_on_a_device",),
    ),
    Fault(
        "model-preset-ungated", "models/presets.py", "_dinov3",
        "one size of DINOv3 without a gate",
        '"huge_plus": ((1280, 32, 20), gated)', '"huge_plus": ((1280, 32, 20), {})',
        only=(
            "models/test_rope_models.py::"
            "test_every_preset_is_made_as_timms[vit_huge_plus_patch16_dinov3]",
        ),
    ),
    Fault(
        "model-preset-unnormed", "models/presets.py", "_eva02",
        "one size of EVA02 without the norm of its hidden layer",
        '("large", 448, normed)', '("large", 448, {**normed, "scale_mlp_norm": False})',
        only=(
            "models/test_rope_models.py::"
            "test_every_preset_is_made_as_timms[eva02_large_patch14_224]",
        ),
    ),
    Fault(
        "model-rope-head-dim", "models/vit.py", "VisionTransformer.__init__",
        "angles for heads of another width than attn_head_dim",
        "c.attn_head_dim or c.embed_dim // c.num_heads, self",
        "c.embed_dim // c.num_heads, self",
        only=("models/test_rope_models.py::test_agreement_with_plain_pytorch",),
    ),
    Fault(
        "model-stem-padding", "models/modules.py", "_conv_stem",
        "more padding at even kernels",
        "(kernel - 1) // 2", "kernel // 2",
        only=("models/test_vit.py::test_reference_4_torchvision_conv_stem",),
    ),
    Fault(
        "model-stem-activation", "models/modules.py", "_conv_stem",
        "another activation where a stem names none",
        "(nn.BatchNorm2d, nn.ReLU)", "(nn.BatchNorm2d, nn.GELU)",
        only=("models/test_vit.py::test_reference_4_torchvision_conv_stem",),
    ),
    Fault(
        "model-heads-dtype", "models/modules.py", "Attention.heads",
        "queries and keys in the dtype of their norms",
        "self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)", "self.q_norm(q), self.k_norm(k)",
        only=("models/test_rope_models.py::test_heads_have_the_dtype_of_what_qkv_gives",),
    ),
    Fault(
        "model-bias-dtype", "models/modules.py", "Attention._packed",
        "a bias apart makes what qkv gave fp32",
        "bias.to(projected.dtype)", "bias",
        only=("models/test_rope_models.py::test_heads_have_the_dtype_of_what_qkv_gives",),
    ),
    Fault(
        "model-called-dropout", "models/modules.py", "Attention._attend",
        "no dropout of attention where a layer is called",
        "attention(self._packed(projected), dropout_p=dropout_p)",
        "attention(self._packed(projected))",
        only=("models/test_vit.py::test_attention_dropout_is_for_training[-called]",),
    ),
    Fault(
        "model-called-normed-dropout", "models/modules.py", "Attention._attend",
        "no dropout of attention where a layer is called and heads are normed",
        "scaled_dot_product_attention(q, k, v, dropout_p=dropout_p)",
        "scaled_dot_product_attention(q, k, v)",
        only=("models/test_vit.py::test_attention_dropout_is_for_training[qk_norm-called]",),
    ),
    Fault(
        "model-bytes-axes", "models/modules.py", "PatchEmbed.grid_of",
        "bytes of another number of axes taken",
        " and images.ndim == 4", "",
        only=("models/test_patch_models.py::test_bytes_without_statistics_are_refused",),
    ),
    Fault(
        "model-patch-norm-hook", "models/modules.py", "PatchEmbed.forward",
        "a hook on the norm of patches that has none is not called",
        "type(self.norm) is not nn.Identity or is_hooked(self.norm)",
        "type(self.norm) is not nn.Identity",
        only=("models/test_vit.py::test_a_hook_on_the_patches_is_called_and_obeyed[norm]",),
    ),
    Fault(
        "model-mlp-recompute", "models/modules.py", "Mlp.forward",
        "an MLP that shall save its activation rebuilds it",
        "recompute=self.recompute", "recompute=True",
        only=(
            "models/test_gated_models.py::"
            "test_an_mlp_saves_its_hidden_layer_where_it_shall_not_rebuild_it[Mlp]",
        ),
    ),
    Fault(
        "model-gated-recompute", "models/gated_mlp.py", "_GatedMlp._fused",
        "a gated MLP that shall save its hidden layer rebuilds it",
        "recompute=self.recompute", "recompute=True",
        only=(
            "models/test_gated_models.py::"
            "test_an_mlp_saves_its_hidden_layer_where_it_shall_not_rebuild_it[GluMlp]",
        ),
    ),
    Fault(
        "model-gated-norm-eps", "models/gated_mlp.py", "_GatedMlp._fused",
        "the op's own eps for the norm of the hidden layer",
        "norm_bias=bias, norm_eps=norm.eps", "norm_bias=bias",
        only=(
            "models/test_gated_models.py::"
            "test_timm_on_the_torch_backend_in_float64[GluMlp-norm-False]",
        ),
    ),
    Fault(
        "model-gated-dropout", "models/gated_mlp.py", "_GatedMlp._called",
        "dropout after the norm of the hidden layer",
        "self.norm(self.drop(ACTIVATIONS[self.act_layer](gate) * value))",
        "self.drop(self.norm(ACTIVATIONS[self.act_layer](gate) * value))",
        only=("models/test_gated_models.py::test_dropout_is_timms",),
    ),
    Fault(
        "model-gated-aligned", "models/gated_mlp.py", "SwiGLU.__init__",
        "an aligned width is made wider still",
        "-hidden_features % align_to", "align_to - hidden_features % align_to",
        only=(
            "models/test_gated_models.py::"
            "test_timm_on_the_torch_backend_in_float64[SwiGLU-False]",
        ),
    ),
    Fault(
        "model-maps-host-dtype", "models/attention_maps.py", "_Softmaxes.__torch_dispatch__",
        "maps of hosts in the model's dtype",
        "self.maps.append(out.float())", "self.maps.append(out)",
        only=(
            "models/test_attention_maps.py::"
            "test_attention_maps_of_a_host_are_fp32_and_of_its_layers_alone",
        ),
    ),
    Fault(
        "model-maps-pooling", "models/attention_maps.py", "_Softmaxes.__torch_dispatch__",
        "the pooling's softmax among the maps of layers",
        " and out.shape[-1] == out.shape[-2]", "",
        only=(
            "models/test_attention_maps.py::"
            "test_attention_maps_of_a_host_are_fp32_and_of_its_layers_alone",
        ),
    ),
    Fault(
        "model-refused-usual", "models/checks.py", "",
        "what our models are is refused, what they are not is taken",
        '"strict_img_size": (True,', '"strict_img_size": (False,',
        only=(
            "models/test_vit.py::"
            "test_what_is_timms_alone_is_refused_but_for_what_our_models_are[strict_img_size-True]",
        ),
    ),
    Fault(
        "model-norm-bias", "models/norms.py", "LayerNorm.__init__",
        "bias=False has a bias",
        "elementwise_affine, bias, device, dtype", "elementwise_affine, True, device, dtype",
        only=("models/test_vit.py::test_norms_take_torchs_arguments",),
    ),
    Fault(
        "model-norm-dtype", "models/norms.py", "RmsNorm.__init__",
        "device and dtype ignored",
        "elementwise_affine, device, dtype)", "elementwise_affine)",
        only=("models/test_vit.py::test_norms_take_torchs_arguments",),
    ),
    Fault(
        "model-norm-width", "models/norms.py", "RmsNorm.forward",
        "without a weight any width is taken",
        '_check_last_axis("RmsNorm", x, self.normalized_shape)', "pass",
        only=("models/test_vit.py::test_norms_take_torchs_arguments",),
    ),
    Fault(
        "weights-report-names", "weights/load.py", "WeightsReport.__str__",
        "twelve names end in dots as if there were more",
        "len(names) > 12", "len(names) > 11",
        only=("models/test_weights.py::test_a_report_prints_twelve_names",),
    ),
    Fault(
        "weights-no-class-token", "weights/load.py", "_fit_positions",
        "no error for a class position without a token to add it to",
        '"cls_token" not in tensors or tensors["cls_token"].shape != positions.shape', "False",
        only=(
            "models/test_weights.py::"
            "test_positions_without_and_with_the_class_token_are_one_function",
        ),
    ),
    Fault(
        "weights-grid-turned", "weights/load.py", "_fit_positions",
        "rows and columns of a grid of positions change places",
        "(pos_embed.shape[1], pos_embed.shape[2]), pos_embed.flatten",
        "(pos_embed.shape[2], pos_embed.shape[1]), pos_embed.flatten",
        only=("models/test_weights.py::test_positions_of_a_grid_that_is_not_square",),
    ),
    Fault(
        "weights-no-positions", "weights/load.py", "_fit_positions",
        "positions for a model without break the load",
        "if model.pos_embed is None:", "if False:",
        only=("models/test_weights.py::test_positions_are_unexpected_in_a_model_without",),
    ),
    Fault(
        "weights-backbone", "weights/names.py", "_unwrap",
        "a wrapper's name stays",
        "|model|backbone)", "|model)",
        only=("models/test_weights.py::test_wrappers[module.]",),
    ),
    Fault(
        "weights-byte-order", "weights/names.py", "_as_tensor",
        "arrays of the other byte order read as if they were of this",
        'array.astype(array.dtype.newbyteorder("="), copy=False)',
        'array.view(array.dtype.newbyteorder("="))',
        only=("models/test_weights.py::test_jax_patches_as_a_matrix",),
    ),
    Fault(
        "weights-distilled", "weights/names.py", "",
        "timm's distillation token unknown",
        "storage_tokens|dist_token", "storage_tokens",
        only=("models/test_weights.py::test_names_that_mean_the_same[registers]",),
    ),
    Fault(
        "weights-prefix", "weights/names.py", "",
        "one name of transformers' towers unknown",
        "dinov3_vit|vision_model", "dinov3_vit",
        only=("models/test_weights.py::test_names_that_mean_the_same[transformers]",),
    ),
    Fault(
        "weights-suffix-case", "weights/files.py", "read_file",
        "a suffix in capitals is another",
        "path.suffix.lower()", "path.suffix",
        only=("models/test_weights.py::test_files[.PT]",),
    ),
    Fault(
        "weights-claims-inside", "weights/files.py", "_tensors",
        "tensors inside a wrapper may claim what they do not store",
        "waiting.append(x)", "pass",
        only=("models/test_hostile_weights.py::test_hostile_file[expanded.pth]",),
    ),
    Fault(
        "weights-gpu-file", "weights/files.py", "read_pickle",
        "a file from a GPU wants a GPU",
        'map_location="cpu", ', "",
        only=(
            "models/test_hostile_weights.py::"
            "test_a_file_of_tensors_on_a_gpu_is_read_on_the_cpu",
        ),
    ),
    Fault(
        "layers-eps", "layers.py", "LayerNorm.forward",
        "the eps of the host's LayerNorm ignored",
        "self.bias, self.eps)", "self.bias, 1e-5)",
        only=("hub/test_hub.py::test_kernelize[<lambda>-LayerNorm]",),
    ),
    Fault(
        "layers-rms-eps", "layers.py", "RMSNorm.forward",
        "the eps of the host's RMSNorm ignored",
        "self.variance_epsilon", "1e-6",
        only=("hub/test_hub.py::test_kernelize[RMS-RMSNorm]",),
    ),
    Fault(
        "layers-hooked-fc2", "layers.py", "ViTMLP.forward", "a hook on fc2 is not called",
        "is_plain(self.fc2)", "self.fc2",
        only=("swap/test_swap_ecosystem.py::test_kernels_library_layers",),
    ),
    Fault(
        "weights-nameless-error", "weights/files.py", "read_file",
        "an error without a text gives no reason", " or type(error).__name__", "",
        only=("models/test_weights.py::test_an_error_without_a_text_is_told_by_its_name",),
    ),
    Fault(
        "weights-missing-head", "weights/load.py", "_load",
        "a head that the source lacks is not reported",
        "_natural(targets.keys() - tensors.keys())",
        '_natural(n for n in targets.keys() - tensors.keys() if not n.startswith("head"))',
        only=("models/test_weights.py::test_report_names_what_is_missing_and_unexpected",),
    ),
    Fault(
        "maps-fast-path", "models/attention_maps.py", "_math_attention",
        "torch's fast path is switched on for whom it was off", "set_fastpath_enabled(fast)",
        "set_fastpath_enabled(True)",
        only=("models/test_attention_maps.py::test_attention_maps_of_other_libraries",),
    ),
    Fault(
        "low-memory-hooked", "models/norms.py", "can_rebuild",
        "a backward rebuilds what a hook has changed", " and not is_hooked(norm)", "",
        only=("ops/test_recomputed_norm.py::test_a_block_of_low_memory_keeps_what_a_hook_gave",),
    ),
    Fault(
        "weights-claims-deeper", "weights/files.py", "_tensors",
        "tensors two wrappers deep may claim what they do not store",
        "            else:\n", "            elif mapping is contents:\n",
        only=("models/test_hostile_weights.py::test_hostile_file[expanded.pth]",),
    ),
    Fault(
        "model-gated-dropout-at-rest", "models/gated_mlp.py", "_GatedMlp._fused",
        "a dropout at rest takes an MLP apart", "self.training and rate_of(self.drop) > 0",
        "rate_of(self.drop) > 0",
        only=("models/test_gated_models.py::test_a_dropout_at_rest_leaves_one_op",),
    ),
    Fault(
        "model-image-below-a-patch", "models/modules.py", "PatchEmbed.grid_of",
        "an image that holds no patch is not refused",
        "if self.strict_img_size or not all(grid):", "if self.strict_img_size:",
        only=("models/test_vit.py::test_image_of_another_size_is_rejected",),
    ),
    Fault(
        "model-mask-places", "models/patch_dropout.py", "masked",
        "masked patches stand at no position", "token + F.pad(", "token + 0 * F.pad(",
        only=(f"{_MASKED}test_a_token_stands_in_place_of_masked_patches[False]",),
    ),
    Fault(
        "model-keep-and-mask", "models/patch_dropout.py", "check_patches",
        "a mask beside kept patches is put on others", "keep is not None and mask is not None",
        "False", only=(f"{_MASKED}test_what_does_not_fit_is_refused",),
    ),
    Fault(
        "model-decoder-places", "models/masked.py", "MaskedDecoder.forward",
        "kept patches stand at no position", "kept + positions[keep]", "kept",
        only=(f"{_MASKED}test_the_decoder_is_maes",),
    ),
    Fault(
        "model-decoder-sets", "models/masked.py", "MaskedDecoder.forward",
        "target sets read the contexts of other images", "context.repeat(len(places), 1, 1)",
        "context.repeat_interleave(len(places), 0)",
        only=(f"{_MASKED}test_target_sets_are_those_of_each_alone",),
    ),
    Fault(
        "model-decoder-one-pass", "models/masked.py", "MaskedDecoder._decoded",
        "sets of other lengths are a pass of their own", "if len(batches) == 1 or any(",
        "if len(batches) or any(",
        only=(f"{_MASKED}test_target_sets_are_those_of_each_alone",),
    ),
    Fault(
        "model-decoder-apart", "models/masked.py", "why_apart",
        "several lengths pass a Linear that is another by", "and not is_plain(m)",
        "and not isinstance(m, nn.Linear)",
        only=(f"{_MASKED}test_target_sets_are_those_of_each_alone",),
    ),
    Fault(
        "weights-mask-token", "weights/load.py", "_load",
        "the authors' mask token is left out", 'tensors and "mask_token" in targets',
        'tensors and "mask_token" in tensors',
        only=(f"{_MASKED}test_masks_are_dinov2s",),
    ),
]  # fmt: skip
