"""Faults in swapped hosts and in the proofs of their forwards."""

from .fault import ROPE_HOSTS, Fault

PROOF = ("swap/test_prove.py::test_a_proof_copes_with_weights_that_are_not_there_or_not_plain",)
NOTICED = ("swap/test_prove.py::test_an_error_in_a_fused_forward_is_noticed",)
HOLD = ("swap/test_prove.py::test_facts_hold_until_something_changes",)
WATCHED = "swap/test_prove.py::test_proofs_"
NUMBERS = (WATCHED + "draw_no_number_of_another_thread",)
HOOKS = (WATCHED + "take_no_hook_from_another_thread",)
CHOSEN = (WATCHED + "leave_backend_and_modes_to_other_threads",)
FOLLOW = ("swap/test_prove.py::test_what_draws_where_a_proof_cannot_follow_keeps_its_forward",)
PLANS = "swap/test_plans.py::"
DECIDES = ("swap/test_recognise.py::test_a_rate_that_decides_is_proven_for_each_decision",)
EDITED = ("swap/test_swap_changes.py::test_an_edit_of_an_attention_raises_where_its_hosts_does",)
ORDER_FILE = "swap/test_swap_order.py::"
ORDER = ORDER_FILE + "test_the_first_call_decides_nothing_for_later_ones"
GLOBAL = ORDER_FILE + "test_a_global_hook_sees_each_call_as_in_the_host"
BACKEND = ("runtime/test_backend.py",)
PACKED = "swap/test_packed_hosts.py::"
CROPS = "swap/test_packed.py::test_"
SIZES = CROPS + "the_sizes_give_what_each_gives_alone"
APART = CROPS + "what_does_not_run_packed_runs_each_size_alone"
PADDED = "swap/test_padded_hosts.py::"
PACKED_BLOCK = (PACKED + "test_a_block_leaves_nothing_to_pytorch[qwen3_vl]",)
OTHER_MASKS = (PADDED + "test_other_masks_are_taken_as_they_are",)
RESAMPLED = (PADDED + "test_mae_resamples_positions_as_the_host",)
TOLD = (PADDED + "test_mae_keeps_what_it_is_told",)
PACKED_FILE = "swap/hosts/special/packed.py"
BY_STRUCTURE = "swap/test_recognise.py::"
CONFIGURED = (BY_STRUCTURE + "test_a_change_of_what_configures_it_is_seen",)
POSITIONS = "swap/test_recognise_positions.py::"
COMPARES = ("swap/test_prove.py::test_what_a_proof_compares",)
ASKED = ("swap/test_prove.py::test_what_is_asked_of_a_rate_is_asked_of_the_next",)
REPLACED = ("swap/test_swap_changes.py::test_a_function_of_torch_that_is_replaced",)
MODES_FILE = "swap/test_host_modes.py::"
HOLDS = "swap/test_recognise.py::test_a_mask_that_the_block_holds"
TRAINS = "swap/test_bias_hosts.py::test_a_learnt_bias_trains_in_fused_blocks"
IN_MODES = MODES_FILE + "test_a_block_runs_fused_in_every_mode"
ANY_HOOK = MODES_FILE + "test_a_hook_on_any_part_is_called"
BIASED = "swap/test_bias_hosts.py::"
FAULTS = [
    Fault(
        "packed-one-sequence", PACKED_FILE, "PackedAttention.fused_heads",
        "windows and images are one sequence", 'extras["cu_seqlens"], extras["max_seqlen"]',
        'extras["cu_seqlens"][:: len(extras["cu_seqlens"]) - 1], len(x)',
        only=PACKED_BLOCK,
    ),
    Fault(
        "packed-shifted", PACKED_FILE, "PackedAttention.fused_heads",
        "all sequences but the first begin a token late",
        'extras["cu_seqlens"], extras["max_seqlen"]',
        '(extras["cu_seqlens"] + (extras["cu_seqlens"] > 0)).clamp(max=len(x)), len(x)',
        only=PACKED_BLOCK,
    ),
    Fault(
        "packed-shortest", PACKED_FILE, "longest", "the shortest sequence for the longest",
        "max(most, 1)", "max(least, 1)", only=PACKED_BLOCK,
    ),
    Fault(
        "packed-total", PACKED_FILE, "longest", "lengths of other tokens are taken",
        "end == total and", "", only=(PACKED + "test_what_the_kernels_do_not_take_is_the_hosts",),
    ),
    Fault(
        "packed-merger-norm", PACKED_FILE, "Qwen3Merger.fused_resolved", "the norm left out",
        "y.view", "x.view", only=PACKED_BLOCK,
    ),
    Fault(
        "packed-stale", "swap/hosts/read_once.py", "read_once",
        "lengths that were overwritten count", " or known[0] != version(tensor)", "",
        only=(PACKED + "test_lengths_are_read_once_and_anew_when_they_change",),
    ),
    Fault(
        "crops-blend", "swap/hosts/attend.py", "within", "attention over the whole sequence",
        "packing.cu_seqlens, packing.longest", "packing.cu_seqlens[[0, -1]], packing.ends[-1]",
        only=(SIZES + "[timm dinov2]",),
    ),
    Fault(
        "crops-blend-rope", "swap/hosts/attend.py", "attend_weights",
        "attention over the whole sequence, behind RoPE",
        "cu_seqlens=packing.cu_seqlens, max_seqlen=packing.longest",
        "cu_seqlens=packing.cu_seqlens[[0, -1]], max_seqlen=packing.ends[-1]",
        only=(SIZES + "[timm dinov3]",),
    ),
    Fault(
        "crops-blend-ours", "models/modules.py", "Attention._attend_packed",
        "attention over the whole sequence of our own model",
        "cu_seqlens=packing.cu_seqlens,", "cu_seqlens=packing.cu_seqlens[[0, -1]],",
        only=(SIZES + "[ours]",),
    ),
    Fault(
        "crops-prefix-turns", "models/packing.py", "Crops.rows",
        "the tokens before the patches become zeros", "still=1.0", "still=0.0",
        only=(SIZES + "[timm dinov3]",),
    ),
    Fault(
        "crops-dropped-by-size", "models/packing.py", "Crops.image",
        "the first token of an image drops with the image before it", "right=True", "right=False",
        only=(CROPS + "drop_path_drops_images[timm]",),
    ),
    Fault(
        "crops-held-parts", "swap/hosts/block.py", "Block.fused_unpacked_now",
        "what only holds parts of a fused attention keeps a block from running crops packed",
        "bypassed |= {m, *inside}", "bypassed.add(m)",
        only=(CROPS + "the_sizes_give_what_each_gives_alone[timm, attention inside attention]",),
    ),
    Fault(
        "crops-kept-unscaled", "models/packing.py", "Crops.drawn",
        "what a skipping branch keeps is not scaled", "B / kept)", "1.0)",
        only=(CROPS + "skipped_images_are_no_part_of_the_sequence[timm]",),
    ),
    Fault(
        "crops-between", "swap/packed.py", "_Pass.call",
        "what stands between blocks is left out", "x is not size.x or", "",
        only=(APART + "[new]",),
    ),
    Fault(
        "crops-in-place", "swap/packed.py", "_Pass.call",
        "what changes tokens in place is left out", " or _version(x) != size.version", "",
        only=(APART + "[in place]",),
    ),
    Fault(
        "crops-other-arguments", "swap/packed.py", "_alike",
        "each block gets the first one's tables", "return one is two or", "return True or",
        only=(APART + "[depth]",),
    ),
    Fault(
        "crops-left-taken", "swap/packed.py", "_Pass.run",
        "blocks stay taken over", 'del block.__dict__["forward"]', "pass",
        only=(APART + "[new]",),
    ),
    Fault(
        "lists-at-rest", "swap/hosts/block.py", "Block.fused_examples",
        "lists are tried in evaluation alone", "(0, 2, 1)", "(0, 2, len(every))",
        only=(CROPS + "a_block_that_takes_lists[dinov2, two ways]",),
    ),
    Fault(
        "padded-mask-dropped", "swap/hosts/masks.py", "",
        "the mask is dropped", '"padded": by_keys', '"padded": torch.ones_like', only=OTHER_MASKS,
    ),
    Fault(
        "padded-rows-differ", "swap/hosts/attend.py", "_hides_keys",
        "the mask of the first query for all", "(mask == row)", "(row == row)", only=OTHER_MASKS,
    ),
    Fault(
        "padded-none-shown", "swap/hosts/attend.py", "_hides_keys",
        "an added mask that hides all keys gives zeros", "& shown.any(-1).all()", "",
        only=OTHER_MASKS,
    ),
    Fault(
        "padded-some-added", "swap/hosts/attend.py", "_hides_keys",
        "finite values of an added mask are lost", "& (hidden | shown).all()", "",
        only=OTHER_MASKS,
    ),
    Fault(
        "mae-order", "swap/hosts/special/models.py", "MaeEmbeddings.fused_forward",
        "kept patches in the order of the image",
        "keep=keep.squeeze(-1)", "keep=keep.squeeze(-1).sort(1).values", only=TOLD,
    ),
    Fault(
        "mae-noise", "swap/hosts/special/models.py", "MaeEmbeddings.fused_forward",
        "the given noise is not used", "(places, noise)", "(places, None)", only=TOLD,
    ),
    Fault(
        "mae-none-kept", "swap/hosts/special/models.py", "MaeEmbeddings.fused_checked",
        "a list of no patches is taken", "self.config.mask_ratio)) > 0",
        "self.config.mask_ratio)) >= 0",
        only=(PADDED + "test_mae_otherwise_is_the_hosts",),
    ),
    Fault(
        "mae-resampled", "swap/hosts/special/models.py", "MaeEmbeddings.fused_checked",
        "positions that the host resamples are taken as they are",
        'if extras.pop("interpolate_pos_encoding", False):',
        'if extras.pop("interpolate_pos_encoding", False) is None:', only=RESAMPLED,
    ),
    Fault(
        "mae-turned", "swap/hosts/special/models.py", "MaeEmbeddings.fused_checked",
        "an image turned to its side is taken",
        "tuple(x.shape[1:]) == (patches.num_channels, *patches.image_size)",
        "sorted(x.shape[1:]) == sorted((patches.num_channels, *patches.image_size))",
        only=RESAMPLED,
    ),
    Fault(
        "rope-host-prefix", "swap/hosts/attend.py", "_arguments", "no token is prefix",
        "prefix_tokens=tokens - turn.cos.shape[-2]", "prefix_tokens=0",
    ),
    Fault(
        "rope-host-pairing", "swap/hosts/timm.py", "fused_turn", "the pairing of the other hosts",
        'not getattr(self, "rotate_half", False)', 'getattr(self, "rotate_half", False)',
    ),
    Fault(
        "rope-host-sines-first", "swap/hosts/timm.py", "fused_turn", "sines taken for cosines",
        "sin, cos = rope", "cos, sin = rope",
    ),
    Fault(
        "rope-host-eps", "swap/hosts/attend.py", "head_norms", "eps of the host's qk-norm ignored",
        "k_weight, k_bias, eps)", "k_weight, k_bias)",
    ),
    Fault(
        "rope-host-learnt", "swap/hosts/attend.py", "turn_of",
        "frequencies that learn get no gradient",
        "Turn(cos, sin, interleaved)", "Turn(cos.detach(), sin.detach(), interleaved)",
    ),
    Fault(
        "rope-host-by-head", "swap/hosts/timm.py", "fused_turn", "tables by head taken by sample",
        "rope = rope[None]", "pass",
    ),
    Fault(
        "rope-host-transposed", "swap/hosts/attend.py", "_arguments",
        "tables of a grid read from its other end",
        "cos=turn.cos, sin=turn.sin", "cos=turn.cos.flip(-2), sin=turn.sin.flip(-2)",
    ),
    Fault(
        "rope-host-norm-last", "swap/hosts/attend.py", "turned", "heads normed after they turn",
        "q, k = rope(q, k, **_arguments(turn, norms, q, q.shape[1]))",
        "q, k = rope(q, k, **_arguments(turn, HeadNorms(), q, q.shape[1]))\n"
        "    q, k = rope(q, k, **_arguments(None, norms, q, q.shape[1]))",
    ),
    Fault(
        "rope-structure-sines", "swap/hosts/attention.py", "Attention.fused_turn",
        "sines taken for cosines", "Turn(sin, cos, interleaved)", "turn",
        only=("swap/test_rope_hosts.py::test_dinov3s_own_block_leaves_nothing_to_pytorch",),
    ),
    Fault(
        "naflex-mask", "swap/hosts/special/models.py", "_forward_embeds",
        "the mask of keys shows padding", '.bool()', '.bool() | True',
    ),
    Fault(
        "naflex-hooks", "swap/hosts/special/models.py", "NaFlexVit.fused_blocked",
        "a hook sees other rows of padding than the host's", "if is_watched_inside(*readers)",
        "if False",
    ),
    Fault(
        "patch-drop-kept", "swap/hosts/special/models.py", "VisionTransformer.fused_forward",
        "each image keeps the patches of another", "keep=keep", "keep=keep.roll(1, 0)",
    ),
    Fault(
        "patch-drop-draw", "models/patch_dropout.py", "draw_kept",
        "the patches to keep drawn as no host draws them", "torch.randn(", "torch.rand(",
    ),
    Fault(
        "swin-skip-windows", "swap/hosts/special/windows.py", "",
        "the attention of a shifted window computes what DropPath drops",
        "fused_alike = False, True", "fused_alike = False, False",
        only=("swap/test_swap_skip.py::test_windows_of_dropped_samples_are_not_computed",),
    ),
    Fault(
        "sam-windows", "swap/hosts/block.py", "Block.fused_checked",
        "a grid that the tables are not for is taken",
        "if fixed and tokens_of(body) not in ((), *shown):", "if False:",
        only=("swap/test_bias_hosts.py::test_another_grid_is_the_hosts_to_interpolate",),
    ),
    Fault(
        "rope-structure-axes", "swap/hosts/attention.py", "Attention.fused_turn",
        "tables by head taken by sample", "turn.cos.ndim != 2", "turn.cos.ndim < 2",
        only=("swap/test_rope_hosts.py::test_other_tables_are_the_hosts_to_read",),
    ),
    Fault(
        "bias-of-k", "swap/hosts/attend.py", "as_one", "the bias of v stands for that of k",
        "zeros if b is None", "biases[-1] if b is None",
    ),
    Fault(
        "gated-host-order", "swap/hosts/mlp.py", "gate_of", "gate and value swapped",
        'gate == "second"', 'gate != "second"',
    ),
    Fault(
        "gated-host-norm", "swap/hosts/mlp.py", "Mlp.fused_planned",
        "the LayerNorm inside left out", "1e-6) if inner is None else", "1e-6) if True else",
    ),
    Fault(
        "rms-host-eps", "swap/hosts/fused.py", "Norm.fused_and_input",
        "eps of the host's RMSNorm ignored",
        "x, weight, eps, out_dtype=dtype", "x, weight, out_dtype=dtype", only=ROPE_HOSTS,
    ),
    Fault(
        "gemma-quarters", "swap/hosts/special/towers.py", "_by_pairs",
        "the quarters of a head stay where they are", ".movedim(axis + 1, axis + 2)", "",
    ),
    Fault(
        "v-jepa-places", "swap/hosts/special/towers.py", "VJepaAttention.fused_heads",
        "rows taken for columns",
        "(frame, place // self.grid_size, place % self.grid_size)",
        "(frame, place % self.grid_size, place // self.grid_size)",
    ),
    Fault(
        "swap-idle", "swap/hosts/fused.py", "Fused.fused_idle",
        "where no kernel can run, blocks run fused by PyTorch",
        "backend.is_idle(args[0])", "False", only=("swap/test_idle.py",),
    ),
    Fault(
        "swap-idle-bits", "swap/hosts/fused.py", "Fused.forward",
        "where no kernel can run, a module gives something else than its host",
        "if idle and not (dispatch.listeners or compat.may_be_rerun()):\n"
        "                return super().forward(*args, **kwargs)",
        "if idle and not (dispatch.listeners or compat.may_be_rerun()):\n"
        "                return super().forward(args[0].half().float(), *args[1:], **kwargs)",
        only=("swap/test_idle.py::test_a_step_has_the_bits_of_the_host",),
    ),
    Fault(
        "swap-idle-asked", "swap/hosts/block.py", "Block.fused_idle",
        "where no kernel can run, blocks forget what memory= asked for",
        "as_host and", "", only=("swap/test_idle.py",),
    ),
    Fault(
        "swap-idle-rerun", "swap/hosts/fused.py", "Fused.forward",
        "a recomputation on a CPU goes another way than its forward",
        "(dispatch.listeners or compat.may_be_rerun())", "dispatch.listeners",
        only=("swap/test_idle.py::test_a_recomputation_goes_the_way_of_its_forward",),
    ),
    Fault(
        "swap-drop-path-keep", "swap/hosts/fused.py", "fused_row_scale",
        "DropPath without the factor 1 / keep",
        "return scale.div_(keep) if", "return scale if", only=PROOF,
    ),
    Fault(
        "swap-layer-scale", "swap/hosts/branch.py", "Branch.__call__",
        "the branch's layer scale not handed on",
        '"layer_scale": gamma', '"layer_scale": None', only=PROOF,
    ),
    Fault(
        "swap-eps", "swap/hosts/fused.py", "Norm.fused_and_input",
        "eps of the host's norm ignored",
        "bias, eps, out_dtype", "bias, 1e-2, out_dtype", only=PROOF,
    ),
    Fault(
        "prove-distance", "swap/prove.py", "_difference", "outputs are not compared",
        "if not distance <= tolerance * max(scale, 1.0):", "if distance < 0:", only=NOTICED,
    ),
    Fault(
        "prove-gradients", "swap/prove.py", "_run", "gradients are not compared",
        "zip(inputs, gradients, strict=True)}", "zip([], [], strict=True)}", only=NOTICED,
    ),
    Fault(
        "prove-numbers-drawn", "swap/prove.py", "_run", "the numbers drawn are not compared",
        "drawn = generator.get_state()", "drawn = torch.zeros(1)", only=NOTICED,
    ),
    Fault(
        "prove-no-call", "swap/prove.py", "_compare", "a proof that tries no call is one",
        "if not tried:", "if False:",
        only=("swap/test_prove.py::test_a_module_that_cannot_be_tried_is_left_alone",),
    ),
    Fault(
        "facts-settings", "swap/facts.py", "Facts.held", "settings are not looked at again",
        "(values == self.values", "(bool(values) == bool(self.values)", only=HOLD,
    ),
    Fault(
        "facts-classes", "swap/facts.py", "Facts.held",
        "classes of children are not looked at again",
        "if [*map(type, modules)] != self.types:", "if None in modules:",
        only=("swap/test_plans.py::test_an_edit_behind_a_plan_is_seen",),
    ),
    Fault(
        "facts-children", "swap/facts.py", "Facts.held",
        "that a child is another is not looked at again", " or [*there] != modules[1:]", "",
        only=("swap/test_plans.py::test_an_edit_behind_a_plan_is_seen",),
    ),
    Fault(
        "facts-functions", "swap/facts.py", "Facts.held",
        "functions of classes are not looked at again",
        "and [*map(_get_attribute, self.methods, self.classes)] == self.functions", "",
        only=("swap/test_swap_changes.py::test_a_forward_of_torch_that_is_replaced",),
    ),
    Fault(
        "facts-attention", "swap/facts.py", "Facts.held",
        "registered functions are not looked at again",
        "if self.asking and [modules[p].fused_facts() for p in self.asking] != self.answers:",
        "if False:",
        only=("swap/test_prove.py::test_facts_that_are_no_settings",),
    ),
    Fault(
        "swap-arguments", "swap/hosts/fused.py", "fused_given", "arguments are not looked at",
        "if value is not defaults[name]:", "if False:",
        only=("swap/test_swap_respects.py::test_masks_and_causality_are_respected",),
    ),
    Fault(
        "proof-torchs-generator", "swap/draws.py", "__torch_dispatch__",
        "a proof draws from the process's generator",
        '"generator": self.generator}', '"generator": None}', only=NUMBERS,
    ),
    Fault(
        "proof-pythons-generator", "swap/draws.py", "_refuse_foreign",
        "a proof draws from Python's generator", "is _PYTHONS", "is random",
        only=NUMBERS,
    ),
    Fault(
        "proof-numpys-generator", "swap/draws.py", "_refuse_foreign",
        "a proof draws from numpy's generator", "if _named[id(code)][1]:", "if code is None:",
        only=NUMBERS,
    ),
    Fault(
        "proof-numpys-names", "swap/draws.py", "_names_numpys",
        "functions that numpy.random gave away draw from it", "id(x) in _members(numpys)", "False",
        only=FOLLOW,
    ),
    Fault(
        "proof-numpy-refused", "swap/draws.py", "_names_numpys",
        "a host that computes with numpy is refused", "(x is numpy and is_asked)", "x is numpy",
        only=("swap/test_prove.py::test_a_host_that_computes_with_numpy_is_swapped",),
    ),
    Fault(
        "proof-own-generator", "swap/draws.py", "__torch_dispatch__",
        "a generator of the host's counts as torch's",
        "not in (None, torch.default_generator)", "is NotImplemented", only=FOLLOW,
    ),
    Fault(
        "proof-no-generator", "swap/draws.py", "__torch_dispatch__",
        "what takes no generator draws from the process's",
        "raise Foreign(f", "return func(*args, **kwargs) or (f", only=FOLLOW,
    ),
    Fault(
        "proof-calls-hooks", "swap/copies.py", "Copier.copy", "copies call global hooks",
        "made.__dict__[CALL] = _forward_of(made)", "", only=HOOKS,
    ),
    Fault(
        "proof-sees-hooks", "swap/prove.py", "in_clean_thread",
        "a global hook changes what is tried",
        "UNSEEN.set(True)", "",
        only=("swap/test_prove.py::test_a_proof_under_a_global_hook_tries_what_runs_without_it",),
    ),
    Fault(
        "proof-backend", "swap/prove.py", "in_clean_thread",
        "a proof sets the backend for everybody",
        'with backend("torch"):',
        'from .. import set_backend\n\n        set_backend("torch")\n        if True:',
        only=CHOSEN,
    ),
    Fault(
        "proof-mode", "runtime/compat.py", "QuietMode.__enter__",
        "a proof's mode shows in other threads", "if not ENTERS_QUIETLY:", "if True:",
        only=CHOSEN,
    ),
    Fault(
        "proof-tolerance", "swap/prove.py", "", "a tolerance 100 times wider",
        "TOLERANCE = 1e-9", "TOLERANCE = 1e-7", only=NOTICED,
    ),
    Fault(
        "proof-arguments", "swap/prove.py", "_run", "gradients of arguments are not compared",
        "inputs |= {", "_ = {", only=NOTICED,
    ),
    Fault(
        "proof-second-argument", "swap/prove.py", "_run",
        "of the arguments' gradients, only the first is compared",
        "if t.requires_grad}", "if t.requires_grad and not i}",
        only=("swap/test_prove.py::test_a_missing_gradient_of_a_second_argument_is_noticed",),
    ),
    Fault(
        "proof-nan", "swap/prove.py", "_difference", "NaN is no difference",
        "if not distance <= tolerance * max(scale, 1.0):",
        "if distance > tolerance * max(scale, 1.0):", only=COMPARES,
    ),
    Fault(
        "proof-scale", "swap/prove.py", "_difference", "small values may differ by more",
        "max(scale, 1.0)", "max(scale, 100.0)", only=COMPARES,
    ),
    Fault(
        "proof-upstream", "swap/prove.py", "_run", "gradients of a plain sum are compared",
        "torch.randn(t.shape, generator=generator, dtype=t.dtype) for",
        "torch.ones(t.shape, dtype=t.dtype) for", only=NOTICED,
    ),
    Fault(
        "proof-half", "swap/copies.py", "", "what drops and what keeps are alike in a copy",
        "RATE = 0.4", "RATE = 0.5", only=NOTICED,
    ),
    Fault(
        "proof-called", "swap/prove.py", "_compare", "no proof with children that are called",
        "in (False,) if briefly else (False, True):", "in (False,):", only=NOTICED,
    ),
    Fault(
        "proof-tells-mode", "swap/prove.py", "_compare", "the reason tells the wrong mode",
        'mode = "training" if training else', 'mode = "training" if not training else',
        only=NOTICED,
    ),
    Fault(
        "proof-that-fails", "swap/prove.py", "prove", "a proof that raises is one",
        '_proofs[exact] = f"it could not be tried: {first_line(error)}"', "_proofs[exact] = None",
        only=("swap/test_prove.py::test_a_proof_that_fails_proves_nothing",),
    ),
    Fault(
        "proof-of-evaluation", "swap/prove.py", "_compare",
        "what is blocked in training needs no proof", "for mode in (True, False)):",
        "for mode in (True,)):",
        only=(POSITIONS + "test_evaluation_is_proven_where_training_is_something_else",),
    ),
    Fault(
        "proof-any-answer", "swap/rates.py", "answers_hold", "one answer of a rate is enough",
        "return all(", "return any(", only=ASKED,
    ),
    Fault(
        "proof-no-at-most", "swap/rates.py", "", "<= and >= of a rate are not noted",
        '"lt le eq ne gt ge abs', '"lt eq ne gt abs', only=ASKED,
    ),
    Fault(
        "facts-content", "swap/facts.py", "_hashable", "what is bound to a function plays no part",
        "(_inside(value) if whole else None) or {}", "{}", only=CONFIGURED,
    ),
    Fault(
        "facts-objects", "swap/facts.py", "Facts.held", "objects are not looked into again",
        " or (inner is not None and _inside(value) != inner)", "", only=CONFIGURED,
    ),
    Fault(
        "facts-shapes", "swap/facts.py", "_describe", "shapes of weights play no part",
        "None if t is None else tuple(t.shape))", "t is None)",
        only=(BY_STRUCTURE + "test_a_layer_scale_of_one_value_is_not_proven_by_one_of_many",),
    ),
    Fault(
        "facts-inner-functions", "swap/facts.py", "_globals_of",
        "what a function inside a method reads is not looked at", "for c in (code, *inner) if c",
        "for c in (code,) if c",
        only=(BY_STRUCTURE + "test_a_function_of_its_module_that_is_replaced_is_seen",),
    ),
    Fault(
        "verdict-of-a-mode", "swap/plans.py", "verdict",
        "what blocks in training blocks for good", "            return blocked or ANOTHER  #",
        "            known[module] = Known(Facts(module), blocked, {})\n"
        "            return blocked or ANOTHER  #",
        only=(POSITIONS + "test_another_share_of_samples_runs_fused_in_evaluation_only",),
    ),
    Fault(
        "verdict-inner-hook", "swap/plans.py", "_judge",
        "a hook inside a part keeps the block from running fused",
        "                continue  # it is called", "                pass",
        only=(BY_STRUCTURE + "test_a_hook_inside_a_part_leaves_the_block_fused",),
    ),
    Fault(
        "search-second-gate", "swap/candidates.py", "_activations",
        "a gate behind its value is not looked for", "_close(a * function(b), hidden)", "False",
        only=(BY_STRUCTURE + "test_a_block_of_another_repository_runs_fused[gate_last]",),
    ),
    Fault(
        "search-own-weight", "swap/hosts/roles.py", "is_ours",
        "a packed weight with rules of its own is read past them", "return is_raw(module)",
        "return True",
        only=(BY_STRUCTURE + "test_a_packed_weight_with_rules_of_its_own_is_the_hosts",),
    ),
    Fault(
        "search-own-weight-width", "swap/facts.py", "held_weights",
        "a run is as wide as the norm of a head", 'n.endswith("_weight")', "not n",
        only=(BY_STRUCTURE + "test_a_block_of_another_repository_runs_fused",),
    ),
    Fault(
        "search-own-weight-behind", "swap/candidates.py", "attention_roles",
        "an output weight without a Linear is called",
        "if any(isinstance(part(module, e.part), Tensor) for e in behind)", "if False",
        only=(BY_STRUCTURE + "test_an_output_weight_without_a_linear_says_so",),
    ),
    *(
        Fault(f"search-stuck-{id}", "swap/apply.py", "_Swap.is_layer", what, old, new,
              only=(BY_STRUCTURE + "test_a_layer_that_does_not_run_alone_says_so",))
        for id, what, old, new in (
            ("products", "a merging of patches is a layer", "products > 1", "products > 0"),
            ("inside", "all around a layer say so, too", "not (inside or blocks)", "not blocks"),
        )
    ),
    Fault(
        "search-own-mask", "swap/candidates.py", "attention_roles",
        "a causal mask of the host's own is not looked for",
        "masked = any(e.function in MASKS for e in seen.events)", "masked = False",
        only=(BY_STRUCTURE + "test_a_block_of_another_repository_runs_fused[masked_by_itself]",),
    ),
    Fault(
        "search-in-place", "swap/observe.py", "__torch_function__",
        "a sum in place is no new value", "args, kwargs, result, in_place)",
        "args, kwargs, result, False)",
        only=(BY_STRUCTURE + "test_a_block_of_another_repository_runs_fused[in_place]",),
    ),
    Fault(
        "swap-memory-skip", "swap/apply.py", "swap_in", "memory= is set for what is skipped, too",
        "own.items() if name not in left_out else ()", "own.items()",
        only=("swap/test_swap_memory.py::test_low_memory_is_reported_and_undone",),
    ),
    Fault(
        "swap-out-half", "swap/apply.py", "swap_out", "a swap_out that raises undoes a part",
        "classes[module] = host", "module.__class__ = classes[module] = host",
        only=("swap/test_swap.py::test_swap_rejects",),
    ),
    Fault(
        "swap-left-out", "swap/apply.py", "_Swap.decide",
        "only= and skip= name what is none of ours",
        "left_out if reason is None else reason", "left_out",
        only=("swap/test_swap.py::test_only_and_skip",),
    ),
    Fault(
        "swap-patched-silu", "swap/facts.py", "", "a patched silu is not noticed",
        '"gelu", "silu", "conv2d"', '"gelu", "conv2d"', only=REPLACED,
    ),
    Fault(
        "swap-patched-conv", "swap/facts.py", "", "a patched conv2d is not noticed",
        '"silu", "conv2d", "scaled', '"silu", "scaled', only=REPLACED,
    ),
    Fault(
        "proof-each-rate", "swap/prove.py", "prove", "a proof for each rate",
        "if len(alike) >= TRIED", "if len(alike) >= 10**6",
        only=("swap/test_recognise.py::test_a_rate_that_changes_at_each_step_needs_no_proof_each",),
    ),
    Fault(
        "proof-no-rate", "swap/rates.py", "_noting", "what is asked of a rate is not noted",
        "self.asked[term] = found", "pass", only=DECIDES,
    ),
    Fault(
        "proof-derived-rate", "swap/rates.py", "_noting", "what follows from a rate is no rate",
        "return Rate.of(found, term, self.asked)", "return found", only=DECIDES,
    ),
    Fault(
        "proof-kept-rate", "swap/facts.py", "Facts._hold_but_for_rates",
        "a rate that decides is not asked again", "if rates != self.rates:", "if False:",
        only=DECIDES,
    ),
    Fault(
        "proof-other-settings", "swap/facts.py", "Facts._hold_but_for_rates",
        "0 and 1 count as rates", "if now != then and not (is_rate(name, now)",
        'if now != then and "drop" not in name and not (is_rate(name, now)', only=HOLD,
    ),
    Fault(
        "proof-silent-limit", "swap/prove.py", "prove", "the limit is met in silence",
        "if _count[host] == MOST + 1:", "if False:",
        only=("swap/test_prove.py::test_settings_that_change_all_the_time_are_given_up",),
    ),
    Fault(
        "proof-equal-sizes", "swap/copies.py", "sizes_of", "sizes that differ are equal in a copy",
        "if len({*sizes.values()}) == len(sizes)", "", only=EDITED,
    ),
    Fault(
        "proof-narrow-tables", "swap/hosts/timm.py", "RopeAttention.fused_turn",
        "tables of another width turn a part of each head",
        " or rope.shape[-1] != 2 * shape[-1]:", ":", only=EDITED,
    ),
    Fault(
        "proof-first-no-grad", "runtime/dispatch.py", "cached_dispatch",
        "the first call under no_grad decides for later ones", "_grad_enabled(), autocast]",
        "True, autocast]", only=(ORDER,),
    ),
    Fault(
        "proof-first-dtype", "runtime/dispatch.py", "cached_dispatch",
        "the first call's dtype decides for later ones", "x.dtype, x.get_device()",
        "x.get_device()", only=(ORDER,),
    ),
    Fault(
        "proof-facts-once", "swap/plans.py", "verdict", "facts are read once and kept",
        "if found is not None and found.facts.hold(module):", "if found is not None:",
        only=DECIDES,
    ),
    Fault(
        "refusal-renamed", "swap/plans.py", "refusal",
        "swap_in ends where another version of a library names a part otherwise",
        "except Exception as error:", "except KeyError as error:",
        only=("swap/test_swap_changes.py::test_a_part_that_another_version_names_otherwise",),
    ),
    Fault(
        "proof-sharded-class", "swap/facts.py", "swapped_of",
        "a block that fully_shard makes another class runs its host's forward",
        "if not home.startswith(", "if home and (",
        only=("swap/test_prove.py::test_a_block_that_fully_shard_makes_another_class_runs_fused",),
    ),
    Fault(
        "plan-hooks", "swap/plans.py", "state_of", "a plan passes over a hook",
        "if any(chain.from_iterable(map(_hooks, own[1:]))):", "if False:",
        only=(PLANS + "test_a_hook_that_goes_gives_the_plan_back",),
    ),
    Fault(
        "plan-modes", "swap/plans.py", "state_of", "a plan is for any mode",
        "(*modes, ", "(",
        only=(PLANS + "test_the_second_call_runs_the_plan_of_the_first",),
    ),
    Fault(
        "plan-kinds", "swap/plans.py", "state_of", "a plan reads tensors with rules of their own",
        "if not _KINDS.issuperset(map(type, tensors)):", "if False:",
        only=(PLANS + "test_an_edit_behind_a_plan_is_seen",),
    ),
    Fault(
        "plan-inputs", "swap/plans.py", "kind_of", "a plan takes any shape",
        "return x.shape, x.dtype", "return x.dtype",
        only=(PLANS + "test_other_arguments_and_inputs_take_their_own_way",),
    ),
    Fault(
        "plan-observed", "swap/plans.py", "plan_of", "a plan runs under a tracer",
        " or is_observed()", "", only=(PLANS + "test_who_looks_on_sees_no_plan",),
    ),
    Fault(
        "plan-patched", "swap/plans.py", "plan_of", "a plan passes over a patched function",
        " or torch_is_patched()", "", only=(PLANS + "test_who_looks_on_sees_no_plan",),
    ),
    Fault(
        "plan-reruns", "swap/plans.py", "plan_of", "a plan runs where a checkpoint remembers a yes",
        "recompute.noted or ", "", only=(PLANS + "test_who_looks_on_sees_no_plan",),
    ),
    Fault(
        "plan-kept", "swap/facts.py", "Facts.__init__", "facts hold the modules that they describe",
        "self.inner = [ref(m)", "self.kept, self.inner = modules, [ref(m)",
        only=(PLANS + "test_a_plan_holds_no_module",),
    ),
    Fault(
        "plan-replica", "swap/facts.py", "_describe", "a replica of DataParallel has its own proof",
        "if REPLICA in own:", "if False:",
        only=(PLANS + "test_a_replica_of_data_parallel_costs_no_proof",),
    ),
    Fault(
        "plan-path", "swap/hosts/branch.py", "Branch.__call__", "a plan drops no samples",
        '"row_scale": rows', '"row_scale": None',
        only=(PLANS + "test_the_second_call_runs_the_plan_of_the_first",),
    ),
    Fault(
        "plan-dropout", "swap/hosts/attention.py", "Attention.fused_planned_heads",
        "a plan leaves dropout of attention out", "if drops else 0.0", "if False else 0.0",
        only=(PLANS + "test_the_second_call_runs_the_plan_of_the_first",),
    ),
    Fault(
        "windows-two-sides", "swap/hosts/block.py", "Block.fused_side",
        "a block whose window has two sides sees all", "side[0] if", "0 if",
        only=("swap/test_window_hosts.py::test_all_blocks_but_those_that_pool_are_fused[sam2_timm]",),
    ),
    Fault(
        "windows-own-pool", "swap/hosts/special/windows.py", "_pools",
        "a pooling block of timm's SAM 2 says something else", ', "q_pool"', "",
        only=("swap/test_window_hosts.py::test_all_blocks_but_those_that_pool_are_fused[sam2_timm]",),
    ),
    *(
        Fault(f"row-{id}", file, within, what, old, new,
              only=(f"swap/test_family.py::{test}",))
        for id, file, within, what, old, new, test in (
            ("number", "swap/prove.py", "_prove",
             "a number is proven as the scale of a narrow copy's heads",
             "every = every[-1:]", "pass",
             "test_a_scale_that_is_a_number_is_proven_for_heads_of_its_size"),
            ("unread", "swap/prove.py", "_calls",
             "what a row says that nothing reads is not tried", "if others and not", "if False and",
             "test_what_a_row_says_that_nothing_reads_is_proven[temperature]"),
            ("handed-down", "swap/recognise.py", "block",
             "a keyword that a model hands down to a searched layer gives it its host's forward",
             "sorted(UNREAD.difference(names))", "[]",
             "test_searched_layers_take_what_their_models_hand_down"),
            ("norm-dtype", "swap/prove.py", "_prove",
             "the dtype of a norm's result is not tried", "return _other_dtype(",
             "return (lambda *_: None)(",
             "test_the_dtype_of_a_norm_is_proven[input]"),
            ("rotation", "swap/hosts/attention.py", "Attention.fused_others",
             "a rotation that is not there is proven", "if roles.rotate:", "if False:",
             "test_a_rotation_that_is_not_there_is_no_row[turn_pear]"),
        )
    ),
    Fault(
        "compile-symbolic-rate", "swap/hosts/attention.py", "Attention.fused_planned_heads",
        "a dynamic graph breaks at a rate that is a setting",
        "drop.p if isinstance(drop, nn.Module) else drop", 'getattr(drop, "p", drop)',
        only=("swap/test_swap_compile.py::test_a_number_may_be_symbolic",),
    ),
    Fault(
        "plan-own-weight", "swap/hosts/attention.py", "Attention.fused_planned_heads",
        "a plan leaves out the bias of a packed weight", "as_one(found(modules).fused_weights())",
        "(found(modules).fused_weights()[0][0], None)",
        only=(BY_STRUCTURE + "test_a_block_of_another_repository_runs_fused[packed_weight]",),
    ),
    Fault(
        "plan-mask", "swap/hosts/attention.py", "Attention.fused_planned_heads",
        "a plan passes over a mask", "if more:  # a mask or angles", "if False:",
        only=(PLANS + "test_other_arguments_and_inputs_take_their_own_way",),
    ),
    Fault(
        "proof-patched-gelu", "swap/facts.py", "", "a patched gelu is not noticed",
        '"linear", "layer_norm", "gelu",', '"linear", "layer_norm",',
        only=("swap/test_swap_changes.py::test_a_function_of_torch_that_is_replaced",),
    ),
    Fault(
        "proof-global-hook", "runtime/compat.py", "_any_global_hook",
        "global forward hooks are missed", "_nn_module._global_forward_hooks\n        or ", "",
        only=(GLOBAL,),
    ),
    Fault(
        "proof-global-pre-hook", "runtime/compat.py", "_any_global_hook",
        "global pre-hooks are missed", "or _nn_module._global_forward_pre_hooks", "",
        only=(GLOBAL,),
    ),
    Fault(
        "proof-mha-values", "swap/hosts/torch_nn.py", "MultiheadAttention.fused_given",
        "mha(x, x, v) is mha(x, x, x)", 'given.pop("value", None) is x',
        'given.pop("value", None) is not None',
        only=(ORDER_FILE + "test_values_of_another_tensor_than_the_keys",),
    ),
    Fault(
        "proof-backend-thread", "runtime/dispatch.py", "cached_dispatch",
        "a block has no say in calls of a known kind", "own_backend() or backends.process",
        "backends.process", only=BACKEND,
    ),
    Fault(
        "proof-backend-process", "runtime/backend.py", "",
        "a block chooses for all threads", "        _own.set(name)",
        "        global process\n        process = name or \"auto\"",
        only=BACKEND,
    ),
    Fault(
        "proof-backend-guard", "runtime/backend.py", "get_backend",
        "torch.compile guards on no block", "return _here.own or process",
        "return (process if torch.compiler.is_compiling() else _here.own) or process",
        only=BACKEND,
    ),
    Fault(
        "host-recognised-drop-path", "swap/hosts/block.py", "Block.fused_blocked",
        "a hook on a DropPath is called in evaluation, where the host calls none",
        "*roles.through, *paths)", "*roles.through)",
        only=(ANY_HOOK + "[own dinov2]",),
    ),
    Fault(
        "host-parallel-hooks", "swap/hosts/special/parallel.py",
        "_things", "a hook on a branch is missed", ", tuple(branches))", ")",
        only=(ANY_HOOK + "[timm things]",),
    ),
    Fault(
        "host-softmax-hooks", "swap/hosts/attention.py", "Attention.fused_blocked",
        "a hook on Swin's softmax is missed", "fused_roles.through", "fused_roles.through[:1]",
        only=(ANY_HOOK + "[biased swin_timm]",),
    ),
    Fault(
        "host-sam-norm-hooks", "swap/hosts/attention.py", "Attention.fused_blocked",
        "a hook on a norm of queries gets others than the host's", "fused_roles.through",
        "fused_roles.through[::2]", only=(BIASED + "test_sam_that_norms_queries_and_keys",),
    ),
    Fault(
        "host-sam-scores", "swap/hosts/attention.py", "Attention.fused_blocked",
        "a hook on SAM's probabilities is missed", "fused_roles.through",
        "fused_roles.through[1:]", only=(BIASED + "test_sam_that_forms_its_scores",),
    ),
    Fault(
        "held-mask-lost", "swap/hosts/block.py", "Block.fused_held",
        "a mask that the block holds is left out", "return masks", "return {}", only=(HOLDS,),
    ),
    Fault(
        "held-mask-not-read", "swap/hosts/block.py", "Block.fused_branches",
        "a branch is not told of a mask that the block holds", "bool(s.window or s.held)",
        "bool(s.window)", only=(HOLDS,),
    ),
    Fault(
        "swinv2-clamp", "swap/hosts/special/windows.py", "Cosine.fused_normed",
        "Swin V2's scale of a head is not held below 100", ".clamp(max=math.log(100.0))", "",
        only=("swap/test_bias_hosts.py::test_a_scale_of_cosines_stays_below_100",),
    ),
    Fault(
        "swinv2-mask-twice", "swap/hosts/special/windows.py", "HfCosine.fused_mask",
        "transformers' Swin V2 gets the mask of the shift once", "2 * mask", "mask",
        only=(TRAINS + "[swinv2_transformers]",),
    ),
    Fault(
        "swinv2-key-bias", "swap/hosts/special/windows.py", "ShiftedCosine.fused_weights",
        "torchvision's Swin V2 counts a bias of the keys", "torch.zeros_like(k)", "k",
        only=(TRAINS + "[swinv2_torchvision]",),
    ),
    Fault(
        "monai-smaller-window", "swap/hosts/monai.py", "SwinBlock.fused_cut",
        "a grid below a window is padded and shifted", "if n <= size", "if n < size",
        only=(TRAINS + "[swin_monai]",),
    ),
    Fault(
        "monai-first-rows", "swap/hosts/monai.py", "WindowAttention.fused_bias",
        "a window below its table's has the bias of other places",
        "[:tokens, :tokens]", "[-(tokens or 0):, -(tokens or 0):]",
        only=(TRAINS + "[swin_monai]",),
    ),
    Fault(
        "windows-three-axes", "swap/hosts/grids.py", "Windows.joined",
        "what was padded in depth stays", "x[(slice(None), *map(slice, self.grid))]",
        "x[:, :, : self.grid[1], : self.grid[-1]]", only=(TRAINS + "[swin_monai]",),
    ),
    Fault(
        "host-windows-drop", "swap/hosts/special/windows.py",
        "ShiftedWindowAttention.fused_blocked",
        "a dropout by window has fused forwards fail in evaluation, too",
        "if self.training and self.dropout > 0:", "if False:",
        only=(IN_MODES + "[biased swin_torchvision]",),
    ),
    Fault(
        "host-windows-drop-hf", "swap/hosts/special/windows.py", "HfSwinLayer.fused_blocked",
        "a dropout by window has fused forwards fail in evaluation, too",
        'super().fused_blocked() if is_noop(drop) else "its dropout draws by window"',
        "super().fused_blocked()",
        only=(IN_MODES + "[biased swin_transformers]",),
    ),
    Fault(
        "host-relpos-draws", "swap/hosts/timm.py", "RelPosAttention.fused_draws",
        "DropPath draws before a dropout inside the bias", "m.p > 0 and m.training", "m.p > 1",
        only=(IN_MODES + "[timm relpos]",),
    ),
    Fault(
        "host-relpos-examples", "swap/hosts/timm.py", "RelPosAttention.fused_shapes",
        "a proof draws from the process's generator", "self.rel_pos.eval()",
        "pass", only=(IN_MODES + "[biased relpos_timm]",),
    ),
    Fault(
        "host-data2vec-names", "swap/report.py", "_left_inside",
        "the report has no row for a dropout inside a part", 'getattr(roles, "after", "")',
        '"dropout"',
        only=(BIASED + "test_parts_inside_are_reported_by_their_names",),
    ),
    Fault(
        "host-attention-mode", "swap/hosts/attention.py", "Attention.fused_apart",
        "a dropout of attention at rest drops", "drop.training != self.training", "False",
        only=(MODES_FILE + "test_a_dropout_of_attention_in_another_mode",),
    ),
    Fault(
        "host-packed-dropout", "swap/hosts/attend.py", "attend_weights",
        "packed attention drops nothing", "max_seqlen=packing.longest)",
        "max_seqlen=packing.longest, dropout_p=0.0)",
        only=(MODES_FILE + "test_attention_drops_in_training_alone[packed qwen3_vl]",),
    ),
    Fault(
        "row-edited", "swap/hosts/__init__.py", "make",
        "another row of a class is not taken", "key = mixin, host", "key = host",
        only=("swap/test_family.py",),
    ),
    Fault(
        "row-unknown-part", "swap/hosts/fused.py", "Fused.fused_known",
        "a child that no role names is passed over",
        'cls.fused_children | {n.partition(".")[0] for n in named if n}',
        "frozenset()", only=("swap/test_family.py",),
    ),
    Fault(
        "block-mask-unread", "swap/hosts/block.py", "Block.fused_checked",
        "a block hands a mask to an attention that takes none",
        "if not given.keys() <= set(of_body.fused_extra_kwargs):", "if False:",
        only=(PLANS + "test_a_mask_is_not_handed_to_an_attention_that_has_no_proof_for_it",),
    ),
    Fault(
        "block-mask-checked", "swap/hosts/block.py", "Block.fused_checked",
        "a mask is handed on unchecked",
        "checked = of_body.fused_checked(body, seen, given | held)", "checked = (seen, given)",
        only=("swap/test_padded_hosts.py", "swap/test_packed_hosts.py"),
    ),
    Fault(
        "search-drops-in-evaluation", "swap/recognise.py", "observed",
        "an attention that drops in evaluation too drops nothing there",
        "if drops(seen):", "if False:",
        only=("swap/test_recognise.py::test_a_look_alike_is_left_alone",),
    ),
    Fault(
        "facts-overridden", "swap/facts.py", "lineage",
        "a replaced forward that a class overrides and calls is not seen",
        "return cls, *(p for", "return cls, *(() and p for",
        only=("swap/test_recognise.py::test_a_forward_that_the_class_overrides_and_calls",),
    ),
    Fault(
        "attention-wide-packed", "swap/hosts/attention.py", "Attention.fused_attend",
        "norms over all heads of a packed projection are left out",
        "for t in qkv.unbind(-3)] if roles.wide_norms else ()", "for t in ()]",
        only=("swap/test_recognise.py::test_a_block_of_another_repository_runs_fused[wide_norms]",),
    ),
    Fault(
        "compile-along", "swap/hosts/attention.py", "Attention.fused_attend",
        "Dynamo negates no tuple", "len(along) > 0", "along",
        only=("swap/test_swap_compile.py::test_decomposed_relative_positions_in_a_graph",),
    ),
    Fault(
        "compile-unknown-tokens", "ops/common/grad_epilogue.py", "reads_of",
        "a compiler must know the number of tokens", "_compiling() or x.numel() > 0",
        "x.numel() > 0",
        only=("swap/test_swap_compile.py::test_a_number_of_tokens_that_no_compiler_knows",),
    ),
    Fault(
        "report-norm-twice", "swap/report.py", "flops",
        "a norm that a block calls counts twice among what moves",
        "and name not in self.called_norms", "",
        only=("swap/test_swap.py::test_report_counts_what_pytorch_moves_inside_blocks",),
    ),
    Fault(
        "search-mask-unread", "swap/recognise.py", "block",
        "a call with a mask that nothing reads runs on the host",
        "if defaults.get(n) is None and", 'if "mask" not in n and',
        only=("swap/test_recognise.py::test_arguments_that_nothing_reads",),
    ),
    Fault(
        "epilogue-other-backward", "ops/common/grad_epilogue.py", "pop",
        "what one backward left is taken by another",
        "(stashed.stream, stashed.task) != (_stream(dy), graph_task())",
        "stashed.stream != _stream(dy)", only=("ops/test_grad_epilogue.py",),
    ),
    Fault(
        "transform-planned", "runtime/compat.py", "is_observed",
        "a plan runs under a transform", "or in_transform() or forward_level() >= 0", "",
        only=("swap/test_recognise.py::test_a_transform_is_the_hosts",),
    ),
    Fault(
        "transform-fused", "swap/hosts/fused.py", "is_traced",
        "a transform meets torch's attention, which has no second derivative",
        " or compat.in_transform() or compat.in_forward_mode()", "",
        only=("swap/test_recognise.py::test_a_transform_is_the_hosts",),
    ),
    Fault(
        "block-guards", "swap/hosts/fused.py", "weights_of",
        "torch.compile guards the look at each Linear's dict of parameters",
        "{} if compat.is_dynamo_compiling() else linear._parameters", "linear._parameters",
        only=("swap/test_swap_compile.py::test_a_block_has_no_more_guards_than_its_host",),
    ),
    Fault(
        "block-attention-hook", "swap/hosts/block.py", "Block.fused_checked",
        "a hooked attention is called by the fused block",
        "not kind.fused_searched and is_hooked(body)", "False",
        only=("swap/test_host_modes.py", "swap/test_status.py"),
    ),
    Fault(
        "block-tail-one", "swap/hosts/block.py", "Block.fused_tail",
        "a LayerScale of 1.0 is called", "None if type(m) is float and m == 1 else m", "m",
        only=("swap/test_bias_hosts.py",),
    ),
    Fault(
        "attention-groups-norm", "swap/hosts/attention.py", "Attention.fused_attend",
        "keys are not repeated for their groups", "if groups > 1:", "if False:",
        only=("swap/test_swap_models.py",),
    ),
    Fault(
        "attention-gate", "swap/hosts/attention.py", "Attention.fused_planned",
        "the gate of attention is left out", "y if gate is None else y * gate", "y",
        only=("swap/test_swap_models.py",),
    ),
    Fault(
        "attention-wide-norms", "swap/hosts/attention.py", "Attention.fused_attend",
        "norms over all heads are left out", "if roles.wide_norms:", "if False:",
        only=ROPE_HOSTS,
    ),
    Fault(
        "attention-simple", "swap/hosts/attention.py", "Attention.fused_planned_heads",
        "a plan leaves out the bias that an attention has of its own",
        " or own.fused_bias is not usual.fused_bias", "", only=("swap/test_bias_hosts.py",),
    ),
    Fault(
        "mlp-gate-last", "swap/hosts/mlp.py", "Mlp.fused_planned",
        "a setting of the gate's half is not asked", "gate is True",
        'self.fused_roles.gate == "second"',
        only=("swap/test_swap_models.py::test_a_gate_in_either_half_is_fused",),
    ),
    Fault(
        "plan-looked-through", "swap/plans.py", "learn",
        "a plan of parts that nothing describes raises", "except KeyError:",
        "except IndexError:", only=("swap/test_bias_hosts.py",),
    ),
    Fault(
        "host-own-dtype", "swap/hosts/fused.py", "Norm.fused_dtype",
        "a norm that keeps its dtype gives autocast's", "x.dtype if roles.dtype else None",
        "None",
        only=("swap/test_rope_hosts.py::test_a_norm_in_fp32_keeps_its_dtype_under_autocast",),
    ),
    Fault(
        "host-added-dtype", "swap/hosts/fused.py", "Norm.fused_added",
        "a norm behind a branch rounds the residual",
        "torch.promote_types(dtype, residual.dtype)", "dtype",
        only=(MODES_FILE + "test_a_block_keeps_its_dtypes_under_autocast[rope gemma4-fp32]",),
    ),
    Fault(
        "host-sampled-memory", "swap/hosts/branch.py", "Branch.__init__",
        "low memory is ignored where samples are left out",
        "host.fused_rebuilds(block, step)",
        "host.fused_rebuilds(block, step) and not block.fused_roles.sampled",
        only=("swap/test_swap_memory.py::test_low_memory_keeps_every_bit_and_no_norm",),
    ),
    Fault(
        "host-windows-memory", "swap/hosts/block.py", "Block.fused_rebuilds",
        "the report has norms of windows, which are kept", "(step.window or first)",
        "first", only=("swap/test_swap_memory.py::test_norms_of_windows_are_not_rebuilt",),
    ),
    Fault(
        "host-partition", "swap/hosts/special/windows.py", "HfSwinLayer.fused_own",
        "always_partition is ignored", 'adapts and not extras.get("always_partition", False)',
        "adapts",
        only=(BIASED + "test_a_grid_as_large_as_a_window",),
    ),
    Fault(
        "host-dynamic-mask", "swap/hosts/special/windows.py", "SwinBlock.fused_own",
        "a mask of the grid that comes is not made", 'if getattr(self, "dynamic_mask", False):',
        "if False:", only=(BIASED + "test_a_mask_of_the_grid_that_comes",),
    ),
    Fault(
        "host-data2vec-scores", "swap/hosts/special/bias.py", "Data2VecAttention.fused_reject",
        "attention that gives its probabilities is swapped",
        'if "Sdpa" not in type(module.attention).__name__:', "if False:",
        only=(BIASED + "test_data2vec_that_forms_its_scores",),
    ),
    Fault(
        "host-thirds", "swap/hosts/special/towers.py", "VJepaAttention.fused_reject",
        "thirds of a head of other widths are taken", "return None if same else",
        "return None if same or module else",
        only=("swap/test_rope_hosts.py::test_thirds_of_a_head_of_other_widths",),
    ),
    Fault(
        "host-grouped-keys", "swap/hosts/special/towers.py", "GemmaAttention.fused_reject",
        "the report has no reason for fewer heads of keys", "module.num_key_value_groups > 1",
        "False", only=("swap/test_rope_hosts.py::test_fewer_heads_of_keys_are_reported",),
    ),
    Fault(
        "host-norms-eps", "swap/hosts/attend.py", "head_norms", "the eps of queries for keys",
        " or eps != other", "",
        only=("swap/test_rope_hosts.py::test_norms_of_heads_that_differ",),
    ),
    Fault(
        "host-norms-kind", "swap/hosts/attend.py", "head_norms", "the norm of queries for keys",
        "q_norm.fused_level != k_norm.fused_level or ", "",
        only=("swap/test_rope_hosts.py::test_norms_of_heads_that_differ",),
    ),
    Fault(
        "host-unscaled-path", "swap/hosts/fused.py", "DropPath.fused_row_scale",
        "what an unscaled DropPath keeps is scaled", "return scale / keep if scaled else scale",
        "return scale / keep",
        only=("swap/test_recognise.py::test_a_block_of_another_repository_runs_fused[unscaled]",),
    ),
    Fault(
        "host-prefix-dropped", "swap/hosts/special/models.py", "VisionTransformer.fused_blocked",
        "tokens before the patches are dropped with them",
        "if self.patch_drop.num_prefix_tokens != self.num_prefix_tokens:", "if False:",
        only=("swap/test_timm_models.py::test_what_wants_every_patch_embeds_every_patch",),
    ),
    Fault(
        "host-mask-dtype", "swap/hosts/masks.py", "fits",
        "a mask of a dtype that nobody proved is taken",
        "and (mask.dtype in (torch.bool, x.dtype) or autocast_dtype(x) is not None)", "",
        only=(BY_STRUCTURE + "test_a_mask_of_another_dtype_is_the_hosts",),
    ),
    Fault(
        "host-interface-dropout", "swap/hosts/transformers.py", "fastvit_attention",
        "grouped heads lose their dropout", "dropout=dropout, scaling=scaling,\n",
        "scaling=scaling,\n",
        only=("swap/test_swap_ecosystem.py::"
              "test_attention_interface_hands_on_all_that_it_is_given",),
    ),
    Fault(
        "host-interface-softcap", "swap/hosts/transformers.py", "fastvit_attention",
        "a softcap is left out", '("cache", "position_bias", "softcap")',
        '("cache", "position_bias")',
        only=("swap/test_swap_ecosystem.py::"
              "test_attention_interface_hands_on_all_that_it_is_given",),
    ),
    Fault(
        "host-unpickled", "swap/hosts/__init__.py", "_pickled", "a pickle finds no class",
        "return swapped_class, (host", "return type(None), (host",
        only=("swap/test_swap.py::test_swapped_blocks_unpickle_in_a_new_process",),
    ),
    *(
        Fault(f"choices-{id}", f"swap/{'errors' if within == 'step' else 'choices'}.py", within,
              what, old, new, only=(f"swap/test_choices.py::{test}",))
        for id, within, what, old, new, test in (
            ("tie", "fastest", "a tie is the fused one's",
             "beats(way.times, best.times)", "not beats(best.times, way.times)",
             "test_what_is_faster_stays_and_a_tie_is_the_hosts"),
            ("backward", "step", "the forward alone is timed",
             "if outputs and wanted:", "if False:", "test_the_backward_is_timed_too"),
            ("buffers", "isolated_state", "what a timed host counts stays counted",
             "buffer.copy_(value)", "pass", "test_nothing_of_the_model_is_changed_by_measuring"),
            ("generators", "isolated_state", "timing draws the next step's numbers",
             "with torch.random.fork_rng(devices), ", "with ",
             "test_nothing_of_the_model_is_changed_by_measuring"),
            ("hooks", "replica", "the user's hooks run with each sample",
             "if k in HOOKS", "if k in ()", "test_nothing_of_the_model_is_changed_by_measuring"),
            ("handles", "calls_of", "our hooks stay where a batch raises",
             "hooks.enter_context(", "callable(", "test_what_raises_leaves_the_model_as_it_was"),
            ("machine", "choose", "another machine's times count",
             "known.machine != found.machine", "not found.machine",
             "test_choices_of_another_machine_do_not_count"),
            ("sizes", "Choices.of", "another size's time counts",
             'inputs in ("", row.inputs)', "inputs is not None",
             "test_another_size_is_another_kind"),
            ("settings", "replica", "another memory is timed than will run",
             'settings if hasattr(cls, "fused_memory") else {}', "{}",
             "test_blocks_run_with_the_settings_that_they_will_have"),
            ("budget", "in_turns", "the budget does not end it",
             " and ROUNDS * sum(w.times[-1] for w in right) <= left", "",
             "test_after_the_time_nothing_runs"),
            ("ranks", "choose", "each process goes its own way",
             "dist.broadcast_object_list(shared)", "pass",
             "test_all_processes_take_what_the_first_found"),
            ("parts", "choose", "a part of a slow block is not tried",
             "kept.items() if choice.keeps != HOST", "kept.items()",
             "test_a_part_of_a_slow_block_may_be_fused"),
            ("numbers", "fastest", "wrong numbers stay if they are fast",
             "best.outcome = judging(partial(judged, host.module, best, call), timer)",
             "pass",
             "test_what_is_wrong_here_never_stays"),
            ("route", "choose", "a route that won is not in force",
             "won.entries(choice.ms.get(FUSED))", "[]", "test_the_route_of_products_is_chosen_too"),
            ("route-restored", "choose", "a route stays where the call is interrupted",
             "install(here, former)\n        raise", "raise",
             "test_configs_that_cannot_be_used_and_what_ends_early_change_nothing"),
            ("turn", "in_turns", "what is over is tried all the same",
             "if time.monotonic() < end:", "if True:", "test_after_the_time_nothing_runs"),
            ("both", "choose", "a route is tried in one memory mode alone",
             "for way in ways[1:]]", "for way in ways[1:2]]",
             "test_a_route_and_a_memory_are_tried_together"),
            ("short", "in_turns", "where the time is short nothing is timed",
             "w.times[-1] for w in right", "w.times[-1] for w in ways",
             "test_where_the_time_is_short_the_last_ways_have_none"),
        )
    ),
    Fault(
        "branch-empty-skip", "swap/hosts/branch.py", "Branch.kept",
        "samples of an empty batch are drawn", "if len(x) == 0:",
        "if len(x) == 0 and self.sampled:",
        only=("swap/test_swap_skip.py::test_equals_the_mask_of_the_same_samples[timm]",),
    ),
    Fault(
        "branch-empty-sampled", "swap/hosts/branch.py", "Branch.kept",
        "DINOv2's stochastic depth refuses an empty batch", "if len(x) == 0:",
        "if len(x) == 0 and not self.sampled:",
        only=("swap/test_swap_skip.py::"
              "test_dinos_own_nested_drop_path_runs_without_copies",),
    ),
    Fault(
        "mha-strides-without-gradients", "swap/hosts/torch_nn.py", "fused_branch",
        "in training without gradients a dropout draws in another order",
        "(self.training or y.requires_grad)", "y.requires_grad",
        only=("swap/test_swap_changes.py::"
              "test_dropout_after_multihead_attention_is_the_hosts[True]",),
    ),
    Fault(
        "naflex-forward-inside", "swap/hosts/special/models.py", "is_watched_inside",
        "a forward set inside sees rows of padding", ' or "forward" in own', "",
        only=("swap/test_timm_models.py::"
              "test_who_sees_rows_of_padding_gets_the_hosts_mask",),
    ),
    Fault(
        "plan-backward-pre-hooks", "swap/plans.py", "",
        "a backward pre-hook behind a plan is not called",
        '"_backward_hooks", "_backward_pre_hooks"', '"_backward_hooks"',
        only=(PLANS + "test_a_hook_that_goes_gives_the_plan_back[full_backward_pre_hook]",),
    ),
    Fault(
        "proof-checkpoints", "swap/copies.py", "Copier.setting",
        "a proof runs checkpoints, which set the generator of the process",
        'if "checkpoint" in name', 'if name == "checkpoint"',
        only=("swap/test_prove.py::test_a_proof_runs_no_checkpoint",),
    ),
    *(
        Fault(f"compare-{id}", "swap/compare.py", within, what, old, new,
              only=(f"swap/test_compare_models.py::{test}",))
        for id, within, what, old, new, test in (
            ("ratio", "compare", "a speed-up upside down",
             "spread(eager.times).median / ms", "ms / spread(eager.times).median",
             "test_ways_stand_beside_eager"),
            ("wrong", "compare", "a speed-up beside wrong numbers",
             "judged if ours else c.outcome", "c.outcome",
             "test_no_speed_up_beside_wrong_numbers"),
            ("optimizer", "_Runner.step", "a step without its optimizer",
             "self.optimizer.step()", "pass", "test_a_step_trains"),
            ("eager", "_Runner.__init__", "a swapped model stands for its host",
             "else swap_out)(self.model)", "else len)([self.model])",
             "test_the_model_stays_as_it_is"),
            ("seed", "_prepared", "each way drops other paths",
             "torch.manual_seed(0)", "pass", "test_the_losses_of_the_first_steps_are_compared"),
            ("copy", "_Runner.__init__", "the user's model is trained",
             "copy.deepcopy(model)", "model", "test_the_model_stays_as_it_is"),
        )
    ),
]  # fmt: skip
