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
DECIDES = ("swap/test_recognise.py::test_a_rate_that_decides_is_proven_for_each_decision",)
EDITED = ("swap/test_swap_changes.py::test_an_edit_of_an_attention_raises_where_its_hosts_does",)
ORDER_FILE = "swap/test_swap_order.py::"
ORDER = ORDER_FILE + "test_the_first_call_decides_nothing_for_later_ones"
GLOBAL = ORDER_FILE + "test_a_global_hook_sees_each_call_as_in_the_host"
BACKEND = ("runtime/test_backend.py",)
PACKED = "swap/test_packed_hosts.py::"
PADDED = "swap/test_padded_hosts.py::"
PACKED_BLOCK = (PACKED + "test_a_block_leaves_nothing_to_pytorch[qwen3_vl]",)
OTHER_MASKS = (PADDED + "test_other_masks_are_taken_as_they_are",)
TOLD = (PADDED + "test_mae_keeps_what_it_is_told",)
PACKED_FILE = "swap/hosts/transformers_packed.py"
FAULTS = [
    Fault(
        "packed-one-sequence", PACKED_FILE, "PackedAttention.fused_heads",
        "windows and images are one sequence",
        "cu_seqlens=cu_seqlens,\n                max_seqlen=max_seqlen,",
        "cu_seqlens=cu_seqlens[:: len(cu_seqlens) - 1],\n                max_seqlen=len(x),",
        only=PACKED_BLOCK,
    ),
    Fault(
        "packed-shifted", PACKED_FILE, "PackedAttention.fused_heads",
        "all sequences but the first begin a token late",
        "cu_seqlens=cu_seqlens,\n                max_seqlen=max_seqlen,",
        "cu_seqlens=(cu_seqlens + (cu_seqlens > 0)).clamp(max=len(x)),\n"
        "                max_seqlen=len(x),",
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
        "packed-merger-norm", PACKED_FILE, "Qwen3Merger.fused_forward", "the norm left out",
        "y.view", "x.view", only=PACKED_BLOCK,
    ),
    Fault(
        "packed-stale", "swap/hosts/read_once.py", "read_once",
        "lengths that were overwritten count", " or known[0] != version(tensor)", "",
        only=(PACKED + "test_lengths_are_read_once_and_anew_when_they_change",),
    ),
    Fault(
        "padded-mask-dropped", "swap/hosts/transformers_padded.py", "ClipAttention.fused_heads",
        "the mask is dropped", "by_keys(attention_mask)", "None", only=OTHER_MASKS,
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
        "mae-order", "swap/hosts/transformers_mae.py", "MaeEmbeddings.fused_forward",
        "kept patches in the order of the image",
        "keep=keep.squeeze(-1)", "keep=keep.squeeze(-1).sort(1).values", only=TOLD,
    ),
    Fault(
        "mae-noise", "swap/hosts/transformers_mae.py", "MaeEmbeddings.fused_forward",
        "the given noise is not used", "(places, noise)", "(places, None)", only=TOLD,
    ),
    Fault(
        "mae-none-kept", "swap/hosts/transformers_mae.py", "MaeEmbeddings.fused_checked",
        "a list of no patches is taken", "self.config.mask_ratio)) > 0",
        "self.config.mask_ratio)) >= 0",
        only=(PADDED + "test_mae_otherwise_is_the_hosts",),
    ),
    Fault(
        "rope-host-prefix", "swap/hosts/rotary.py", "_arguments", "no token is prefix",
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
        "rope-host-eps", "swap/hosts/rotary.py", "head_norms", "eps of the host's qk-norm ignored",
        "k_weight, k_bias, eps)", "k_weight, k_bias)",
    ),
    Fault(
        "rope-host-learnt", "swap/hosts/rotary.py", "turn_of",
        "frequencies that learn get no gradient",
        "Turn(cos, sin, interleaved)", "Turn(cos.detach(), sin.detach(), interleaved)",
    ),
    Fault(
        "rope-host-by-head", "swap/hosts/timm.py", "fused_turn", "tables by head taken by sample",
        "rope = rope[None]", "pass",
    ),
    Fault(
        "rope-host-transposed", "swap/hosts/rotary.py", "_arguments",
        "tables of a grid read from its other end",
        "cos=turn.cos, sin=turn.sin", "cos=turn.cos.flip(-2), sin=turn.sin.flip(-2)",
    ),
    Fault(
        "rope-host-norm-last", "swap/hosts/rotary.py", "turned", "heads normed after they turn",
        "q, k = rope(q, k, **_arguments(turn, norms, q, q.shape[1]))",
        "q, k = rope(q, k, **_arguments(turn, HeadNorms(), q, q.shape[1]))\n"
        "    q, k = rope(q, k, **_arguments(None, norms, q, q.shape[1]))",
    ),
    Fault(
        "rope-structure-sines", "swap/hosts/structure/attention.py", "turn_by",
        "sines taken for cosines", "(two, one) if", "(one, two) if",
        only=("swap/test_rope_hosts.py::test_dinov3s_own_block_leaves_nothing_to_pytorch",),
    ),
    Fault(
        "naflex-mask", "swap/hosts/timm_models.py", "_forward_embeds",
        "the mask of keys shows padding", '.bool()', '.bool() | True',
    ),
    Fault(
        "naflex-hooks", "swap/hosts/timm_models.py", "NaFlexVit.fused_blocked",
        "a hook sees other rows of padding than the host's", "if is_watched_inside(*readers)",
        "if False",
    ),
    Fault(
        "patch-drop-kept", "swap/hosts/timm_models.py", "fused_tokens",
        "each image keeps the patches of another", "keep=keep", "keep=keep.roll(1, 0)",
    ),
    Fault(
        "patch-drop-draw", "models/patch_dropout.py", "draw_kept",
        "the patches to keep drawn as no host draws them", "torch.randn(", "torch.rand(",
    ),
    Fault(
        "swin-skip-windows", "swap/hosts/windows.py", "",
        "the attention of a shifted window computes what DropPath drops",
        "fused_alike = False, True", "fused_alike = False, False",
        only=("swap/test_swap_skip.py::test_windows_of_dropped_samples_are_not_computed",),
    ),
    Fault(
        "sam-windows", "swap/hosts/timm_sam.py", "SamBlock.fused_takes",
        "a grid that the tables are not for is taken",
        "return self.attn.fused_grid() in (None, windows_of(x, self.window_size).size)",
        "return True",
        only=("swap/test_bias_hosts.py::test_another_grid_is_the_hosts_to_interpolate",),
    ),
    Fault(
        "rope-structure-axes", "swap/hosts/structure/attention.py", "turn_by",
        "tables by head taken by sample", "one.ndim != 2", "one.ndim < 2",
        only=("swap/test_rope_hosts.py::test_other_tables_are_the_hosts_to_read",),
    ),
    Fault(
        "bias-of-k", "swap/hosts/attend.py", "as_one", "the bias of v stands for that of k",
        "zeros if b is None", "biases[-1] if b is None",
    ),
    Fault(
        "gated-host-order", "swap/hosts/parts.py", "Gated.fused_parts", "gate and value swapped",
        "gated=True, gate=gate,", "gated=True, gate=self.fused_get(self.fused_fc1), fc1=gate,",
    ),
    Fault(
        "gated-host-norm", "swap/hosts/parts.py", "norm_inside", "the LayerNorm inside left out",
        "return None if parameters[0] is None else parameters", "return None, None, 1e-6",
    ),
    Fault(
        "rms-host-eps", "swap/hosts/fused.py", "Norm.fused_and_input",
        "eps of the host's RMSNorm ignored",
        "x, weight, eps, out_dtype=dtype", "x, weight, out_dtype=dtype", only=ROPE_HOSTS,
    ),
    Fault(
        "gemma-quarters", "swap/hosts/transformers_towers.py", "_by_pairs",
        "the quarters of a head stay where they are", ".movedim(axis + 1, axis + 2)", "",
    ),
    Fault(
        "v-jepa-places", "swap/hosts/transformers_towers.py", "VJepaAttention.fused_heads",
        "rows taken for columns",
        "(frame, place // self.grid_size, place % self.grid_size)",
        "(frame, place % self.grid_size, place // self.grid_size)",
    ),
    Fault(
        "swap-drop-path-keep", "swap/hosts/fused.py", "fused_row_scale",
        "DropPath without the factor 1 / keep",
        "return scale.div_(keep) if", "return scale if", only=PROOF,
    ),
    Fault(
        "swap-layer-scale", "swap/hosts/branch.py", "add_body",
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
        "facts-settings", "swap/facts.py", "Facts.hold", "settings are not looked at again",
        "(values == self.values", "(bool(values) == bool(self.values)", only=HOLD,
    ),
    Fault(
        "facts-classes", "swap/facts.py", "Facts.hold",
        "classes of children are not looked at again",
        "if list(map(type, modules)) != self.types:", "if not modules:", only=HOLD,
    ),
    Fault(
        "facts-functions", "swap/facts.py", "Facts.hold",
        "functions of classes are not looked at again",
        "and [get(cls) for cls, get in self.classes] == self.functions", "",
        only=("swap/test_swap_changes.py::test_a_forward_of_torch_that_is_replaced",),
    ),
    Fault(
        "facts-attention", "swap/facts.py", "Facts.hold",
        "registered functions are not looked at again",
        "and [modules[p].fused_facts() for p in self.asking] == self.answers", "",
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
        "proof-calls-hooks", "swap/copies.py", "Copier.module", "copies call global hooks",
        "made.__dict__[CALL] = _forward_of(made)", "", only=HOOKS,
    ),
    Fault(
        "proof-sees-hooks", "swap/prove.py", "aside", "a global hook changes what is tried",
        "UNSEEN.set(True)", "",
        only=("swap/test_prove.py::test_a_proof_under_a_global_hook_tries_what_runs_without_it",),
    ),
    Fault(
        "proof-backend", "swap/prove.py", "aside", "a proof sets the backend for everybody",
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
        "if rope.shape[-1] != 2 * shape[-1]:", "if False:", only=EDITED,
    ),
    Fault(
        "proof-first-no-grad", "runtime/dispatch.py", "decide_once",
        "the first call under no_grad decides for later ones", "_grad_enabled(), is_auto",
        "True, is_auto", only=(ORDER,),
    ),
    Fault(
        "proof-first-dtype", "runtime/dispatch.py", "decide_once",
        "the first call's dtype decides for later ones", "x.dtype, x.get_device()",
        "x.get_device()", only=(ORDER,),
    ),
    Fault(
        "proof-facts-once", "swap/verdicts.py", "verdict", "facts are read once and kept",
        "if known is not None and known[0].hold(module):", "if known is not None:", only=DECIDES,
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
        "proof-backend-thread", "runtime/backend.py", "state",
        "a block has no say in calls of a known kind", "_own.get() or _process, _absent",
        "_process, _absent", only=BACKEND,
    ),
    Fault(
        "proof-backend-process", "runtime/backend.py", "",
        "a block chooses for all threads", "        _own.set(name)",
        "        global _process\n        _process = name or \"auto\"",
        only=BACKEND,
    ),
    Fault(
        "proof-backend-guard", "runtime/backend.py", "get_backend",
        "torch.compile guards on no block", "return _here.own or _process",
        "return (_process if torch.compiler.is_compiling() else _here.own) or _process",
        only=BACKEND,
    ),
]  # fmt: skip
