"""Faults in kernels, their launchers and Functions."""

from .fault import SAMPLES_TESTS, Fault

SAMPLES = [
    Fault(
        "samples-index-ignored",
        "ops/common/samples.py",
        "stream_rows",
        "kept rows are taken for the first ones of the stream",
        "return index * rows_per_sample",
        "return index * 0 + offs_row // rows_per_sample * rows_per_sample",
    ),
    Fault(
        "samples-row-of-sample",
        "ops/common/samples.py",
        "stream_rows",
        "every row of a kept sample is its first",
        "+ offs_row % rows_per_sample",
        "+ offs_row % 1",
    ),
    Fault(
        "samples-place-ignored",
        "ops/common/samples.py",
        "compact_rows",
        "gradients of kept samples in the order of the stream",
        "rows = place * rows_per_sample",
        "rows = tl.minimum(place, sample) * rows_per_sample",
    ),
    Fault(
        "samples-dropped-read",
        "ops/common/samples.py",
        "compact_rows",
        "a dropped sample has a gradient of the branch",
        "place < num_kept)",
        "place < num_kept + 1)",
    ),
    Fault(
        "samples-dropped-zeroed",
        "ops/common/samples.py",
        "_pass_dropped_kernel",
        "dropped samples leave the stream",
        "residual.to(y_ptr.dtype.element_ty)",
        "(residual * 0).to(y_ptr.dtype.element_ty)",
    ),
    Fault(
        "samples-dropped-last",
        "ops/common/samples.py",
        "_pass_dropped_kernel",
        "the first dropped sample is not copied",
        ">= num_kept:",
        "> num_kept:",
    ),
    Fault(
        "samples-residual-stride",
        "ops/common/samples.py",
        "_pass_dropped_kernel",
        "a residual with gaps is read as if it had none",
        "* stride_residual_m +",
        "* N +",
    ),
    Fault(
        "samples-scale-forward",
        "ops/common/epilogue.py",
        "finish_tile",
        "kept samples are not scaled",
        "y *= keep_scale",
        "y *= 1.0",
        SAMPLES_TESTS,
    ),
    Fault(
        "samples-scale-backward",
        "ops/common/epilogue.py",
        "_epilogue_bwd_kernel",
        "the gradient of kept samples is not scaled",
        "dz *= keep_scale",
        "dz *= 1.0",
        SAMPLES_TESTS,
    ),
    Fault(
        "samples-scale-handed",
        "ops/common/rows.py",
        "rows_to_hand_over",
        "what the norm leaves for kept samples is not scaled",
        "d * keep_scale, 0.0)",
        "d, 0.0)",
        SAMPLES_TESTS,
    ),
    Fault(
        "samples-sum-of-all",
        "ops/common/rows.py",
        "rows_to_hand_over",
        "the bias of the layer before has a gradient from dropped samples",
        "tl.where(mask, d * keep_scale, 0.0)",
        "d * keep_scale",
        SAMPLES_TESTS,
    ),
    Fault(
        "samples-stats-of-all",
        "ops/norm/kernels.py",
        "_norm_bwd_kernel",
        "rstd is looked for behind as many means as x has rows",
        "num_stats = num_kept * rows_per_sample",
        "num_stats = num_rows",
        SAMPLES_TESTS,
    ),
    Fault(
        "samples-rms-order",
        "ops/norm/kernels.py",
        "_norm_bwd_kernel",
        "rstd by the row of the stream",
        "rstd_ptrs = stats_ptr + rows_dy",
        "rstd_ptrs = stats_ptr + offs_row",
        SAMPLES_TESTS,
    ),
    Fault(
        "samples-count",
        "ops/common/samples.py",
        "num_kept",
        "rounds the count of kept samples",
        "int(B * (1 - rate))",
        "round(B * (1 - rate))",
    ),
    Fault(
        "samples-rebuilt-of-all",
        "ops/recomputed_norm.py",
        "unpack",
        "a rebuilt norm is that of the first samples",
        "fwd(source, *params, eps, dtype, False, samples)[0]",
        "fwd(source, *params, eps, dtype, False)[0][: packed[0]]",
        ("models/test_skipped_samples.py",),
    ),
    Fault(
        "samples-of-each",
        "swap/hosts/branch.py",
        "_of_each_sample",
        "a mask of each sample goes with other samples",
        "    return True\n",
        "    return False\n",
        ("swap/test_swap_skip.py",),
    ),
    Fault(
        "samples-in-evaluation",
        "swap/hosts/branch.py",
        "Branch.__init__",
        "evaluation drops samples",
        "skips and paths[0].training",
        "skips",
        ("swap/test_swap_skip.py",),
    ),
]

LAYER_NORM = [
    Fault(
        "norm-mean-mask", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "the mask of columns past C dropped from the mean",
        "tl.sum(tl.where(mask, x - mean[:, None], 0.0), axis=1)",
        "tl.sum(x - mean[:, None], axis=1)",
    ),
    Fault(
        "norm-variance-mask", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "the mask of columns past C dropped from the variance",
        "centered = tl.where(mask, x - mean[:, None], 0.0)",
        "centered = x - mean[:, None]",
    ),
    Fault(
        "norm-variance-of-squares", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "variance as E[x^2] - mean^2",
        "tl.sum(centered * centered, axis=1) / C",
        "tl.maximum(tl.sum(x * x, axis=1) / C - (mean * mean if CENTER else 0.0), 0.0)",
    ),
    Fault(
        "norm-eps-outside", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "eps added outside the root",
        "tl.rsqrt(tl.sum(centered * centered, axis=1) / C + eps)",
        "1.0 / (tl.sqrt(tl.sum(centered * centered, axis=1) / C) + eps)",
    ),
    Fault(
        "norm-variance-unbiased", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "variance divided by C - 1",
        "axis=1) / C + eps)", "axis=1) / (C - 1) + eps)",
    ),
    Fault(
        "norm-rstd-bf16", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "the saved rstd rounded to bf16",
        "stats_ptr + offs_row, rstd,", "stats_ptr + offs_row, rstd.to(tl.bfloat16),",
    ),
    Fault(
        "norm-dx-sign", "ops/norm/kernels.py", "_norm_bwd_kernel",
        "sign of the xhat term of dx",
        "- xhat * mean_g_xhat", "+ xhat * mean_g_xhat",
    ),
    Fault(
        "norm-stale-mean", "ops/norm/kernels.py", "_norm_bwd_kernel",
        "backward reads the mean of the block's first row for all its rows",
        "mean = tl.load(stats_ptr + rows_dy,", "mean = tl.load(stats_ptr + row + offs_row * 0,",
    ),
    Fault(
        "norm-rebuilt-eps", "ops/recomputed_norm.py", "make",
        "the rebuilt norm takes another eps",
        "*params, eps, dtype,", "*params, 2 * eps + 1e-3, dtype,",
    ),
    Fault(
        "second-derivative-pruned", "runtime/dispatch.py", "_refusing",
        "no node refuses a second derivative for inputs that are named",
        "*made, *read)", "*made)", only=("ops/test_bad_calls.py",),
    ),
    Fault(
        "second-derivative-leaves", "runtime/dispatch.py", "first_order",
        "nor one for a leaf that is not saved",
        "read += _leaves(", "_leaves(", only=("ops/test_bad_calls.py",),
    ),
    Fault(
        "result-is-a-view", "ops/common/gemm.py", "product_with_bias",
        "what follows may not change a result in place", "z.contiguous().data", "z.contiguous()",
        only=("ops/test_bad_calls.py",),
    ),
    Fault(
        "result-is-a-view-by-library", "ops/linear/functions.py", "by_library",
        "what follows may not change a result in place",
        "F.linear(x, weight, bias).data", "F.linear(x, weight, bias)",
        only=("ops/test_bad_calls.py",),
    ),
    Fault(
        "late-at-once", "ops/common/late.py", "made",
        "what a backward reads late takes memory when it is unpacked",
        "if self.makers is None:", "if True:", only=("ops/test_recomputed_norm.py",),
    ),
    Fault(
        "late-beside-hidden", "ops/gated_mlp/launch.py", "gated_mlp_bwd",
        "the activation lives on beside what is read late",
        "hidden_rows = rebuilt = None  # before", "pass  # before",
        only=("ops/test_recomputed_norm.py",),
    ),
    Fault(
        "late-beside-act", "ops/mlp/launch.py", "mlp_bwd",
        "the activation lives on beside what is read late",
        "act_rows = rebuilt = None  # before", "pass  # before",
        only=("ops/test_recomputed_norm.py",),
    ),
    Fault(
        "late-for-ever", "ops/common/late.py", "__exit__",
        "later backwards get what stands in for a tensor",
        "self.makers = None", "pass", only=("ops/test_recomputed_norm.py",),
    ),
    Fault(
        "sum-rebuilt-rows", "ops/recomputed_sum.py", "_make",
        "the sum made again without its row_scale",
        "layer_scale, row_scale, \"\"", "layer_scale, None, \"\"",
    ),
    Fault(
        "sum-rebuilt-chain", "ops/recomputed_sum.py", "_norm_before",
        "a sum made again from one that is made again",
        "None if getattr", "norm if getattr",
    ),
    Fault(
        "norm-dresidual-stride", "ops/norm/kernels.py", "_norm_bwd_kernel",
        "the residual's gradient read by the row stride of dy",
        "offs_row, stride_dresidual_row, offs_c", "offs_row, stride_dy_row, offs_c",
    ),
    Fault(
        "norm-dweight-overwritten", "ops/norm/kernels.py", "_norm_bwd_kernel",
        "dweight of a program's last row block alone",
        "dweight += dy * xhat", "dweight = dy * xhat",
    ),
    Fault(
        "norm-row-tail", "ops/norm/kernels.py", "_norm_bwd_kernel",
        "off by one: the row past the last is read and written",
        "mask_row = offs_row < num_rows", "mask_row = offs_row <= num_rows",
        only=("ops/test_fuzz.py::test_fuzz",),
    ),
    Fault(
        "norm-d-row-scale", "ops/common/rows.py", "rows_to_hand_over",
        "d scaled by the row scale of the batch's first sample",
        "row_scale_ptr + offs_row // rows_per_sample", "row_scale_ptr + offs_row * 0",
        only=("ops/test_grad_epilogue.py",),
    ),
    Fault(
        "norm-sum-of-dx", "ops/norm/kernels.py", "_norm_bwd_kernel",
        "g summed from dx, without the row scale",
        "sum_d += d", "sum_d += dx.to(tl.float32)",
        only=("ops/test_grad_epilogue.py",),
    ),
    Fault(
        "norm-d-before-residual", "ops/norm/kernels.py", "_norm_bwd_kernel",
        "d of the norm alone, the residual's gradient left out",
        "d_ptr, dx, offs,", "d_ptr, dx - (dresidual if HAS_DRESIDUAL else 0.0), offs,",
        only=("ops/test_grad_epilogue.py",),
    ),
    Fault(
        "handover-version", "ops/common/grad_epilogue.py", "pop",
        "a gradient that a hook changed in place taken for the one that was left",
        " or stashed.version != version(dy)", "",
    ),
    Fault(
        "handover-identity", "ops/common/grad_epilogue.py", "pop",
        "what was left beside another gradient taken",
        " or stashed.gradient is not dy", "",
    ),
    Fault(
        "handover-bias", "ops/common/grad_epilogue.py", "pop",
        "the gradient of the bias without its layer scale",
        "if layer_scale is None:", "if True:",
    ),
    Fault(
        "norm-residual-row", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "the residual read by the rows of x",
        "offs_row, stride_residual_row, offs_c", "offs_row, stride_x_row, offs_c",
        only=("ops/test_norm.py::test_norm_adds_a_residual",),
    ),
    Fault(
        "norm-residual-before", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "the residual added to what is normed",
        "centered = x\n", "centered = x + residual if HAS_RESIDUAL else x\n",
        only=("ops/test_norm.py::test_norm_adds_a_residual",),
    ),
    Fault(
        "norm-residual-gradient", "ops/norm/functions.py", "NormFunction.backward",
        "the residual gets the gradient of the norm's input",
        "as_dtype(dy, ctx.spec", "as_dtype(dx, ctx.spec",
        only=("ops/test_norm.py::test_norm_adds_a_residual",),
    ),
    Fault(
        "norm-residual-dtype", "ops/norm/functions.py", "_decide",
        "a wide residual rounded to the dtype of x",
        "torch.promote_types(out_dtype, residual.dtype)", "out_dtype",
        only=("ops/test_norm.py::test_norm_adds_a_residual",),
    ),
    Fault(
        "norm-residual-host", "swap/hosts/branch.py", "Branch.called",
        "a norm behind a branch takes the branch alone",
        "items[:-1] if adds else items", "items",
        only=("swap/test_rope_hosts.py::test_a_block_leaves_nothing_to_pytorch",),
    ),
    Fault(
        "norm-int32-offsets", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "offsets of rows in 32 bits",
        "tl.program_id(0).to(tl.int64)", "tl.program_id(0)",
        only=(
            "ops/test_extremes.py::test_layer_norm_addresses_past_2_31",
            "ops/test_extremes.py::test_rms_norm_addresses_past_2_31",
        ),
    ),
]  # fmt: skip

RMS_NORM = [
    Fault(
        "rms-centred", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "variance in place of the mean square",
        "x = load_rows(x_ptr, rows_x, stride_x_row, offs_c, mask)",
        "x = load_rows(x_ptr, rows_x, stride_x_row, offs_c, mask)\n"
        "    if not CENTER:\n        x = tl.where(mask, x - tl.sum(x, axis=1)[:, None] / C, 0.0)",
    ),
    Fault(
        "rms-width", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "mean square over the padded width",
        "axis=1) / C + eps)", "axis=1) / BLOCK_C + eps)",
    ),
    Fault(
        "rms-rounded-early", "ops/norm/kernels.py", "_norm_fwd_kernel",
        "x * rstd rounded to the result's type before the weight",
        "y = centered * rstd[:, None]",
        "y = (centered * rstd[:, None]).to(y_ptr.dtype.element_ty).to(tl.float32)",
    ),
    Fault(
        "rms-dx-weight", "ops/norm/kernels.py", "_norm_bwd_kernel",
        "the weight forgotten in the mean that dx subtracts",
        "tl.sum(g * xhat, axis=1)", "tl.sum(dy * xhat, axis=1)",
    ),
    Fault(
        "rms-dweight-x", "ops/norm/kernels.py", "_norm_bwd_kernel",
        "dweight from x, not from x * rstd",
        "dweight += dy * xhat", "dweight += dy * x",
    ),
    Fault(
        "rms-sum-of-dweight", "ops/norm/kernels.py", "_norm_bwd_kernel",
        "g written where dweight lies",
        "partial_ptrs += C\n            if CENTER:", "if CENTER:",
        only=("ops/test_grad_epilogue.py",),
    ),
    Fault(
        "rms-handover-sum", "ops/norm/functions.py", "_backward",
        "dweight from the row of g",
        "dweight, *others = sums", "*others, dweight = sums",
        only=("ops/test_grad_epilogue.py",),
    ),
]  # fmt: skip

ROPE = [
    Fault(
        "rope-direction", "ops/common/rotation.py", "_rotated",
        "turned the other way",
        "a * cos_a - b * sin_a, b * cos_b + a * sin_b",
        "a * cos_a + b * sin_a, b * cos_b - a * sin_b",
    ),
    Fault(
        "rope-transpose-tables", "ops/common/rotation.py", "_rotated",
        "turned back by the sine of the other column",
        "a * cos_a + b * sin_b", "a * cos_a + b * sin_a",
    ),
    Fault(
        "rope-one-cosine", "ops/common/rotation.py", "_rotated",
        "both columns of a pair take the first one's cosine",
        "cos_a, cos_b = cos", "cos_a, cos_b = cos[0], cos[0]",
    ),
    Fault(
        "rope-pairing", "ops/common/rotation.py", "_pair_columns",
        "pairs of a half head's columns taken as if the whole head turned",
        "tl.where(rotated, pair + R // 2, pair + D // 2)", "pair + D // 2",
    ),
    Fault(
        "rope-prefix-table", "ops/common/rotation.py", "_tables",
        "the tables begin at the first prefix token",
        "(samples, tokens - prefix_tokens, heads)", "(samples, tokens, heads)",
    ),
    Fault(
        "rope-prefix-turns", "ops/common/rotation.py", "_tables",
        "the last prefix token turns",
        "(tokens >= prefix_tokens)", "(tokens >= prefix_tokens - 1)",
    ),
    Fault(
        "rope-rest-turns", "ops/common/rotation.py", "_rotated",
        "what does not turn is multiplied by 1 and 0",
        "return tl.where(mask, turned_a, a), tl.where(mask, turned_b, b)",
        "return turned_a, turned_b",
    ),
    Fault(
        "rope-head-stride", "ops/common/rotation.py", "tables_of",
        "one head's table for all",
        "strides[1] if ndim == 4 and shape[1] > 1 else 0", "0",
    ),
    Fault(
        "rope-table-strides", "ops/common/rotation.py", "tables_of",
        "sin read by the strides of cos",
        "cos.stride() != sin.stride() or", "",
    ),
    Fault(
        "rope-key-strides", "ops/common/rotation.py", "rotate",
        "keys read by the strides of the queries",
        "*k.stride()[:3], *tables.strides", "*q.stride()[:3], *tables.strides",
    ),
    Fault(
        "rope-norm-width", "ops/common/rotation.py", "_normed",
        "variance over the padded width",
        "/ D + eps)", "/ (2 * a.shape[1]) + eps)",
    ),
    Fault(
        "rope-norm-eps", "ops/common/rotation.py", "_normed",
        "eps forgotten",
        "/ D + eps)", "/ D)",
    ),
    Fault(
        "rope-key-weight", "ops/common/rotation.py", "_rope_fwd_kernel",
        "keys scaled by the weight of the queries' norm",
        "k_weight_ptr, k_bias_ptr, mask_row", "q_weight_ptr, k_bias_ptr, mask_row",
    ),
    Fault(
        "rope-norm-turned-on", "ops/common/rotation.py", "_normed_rows_bwd",
        "the backward of a norm turns on, not back",
        "_rotated(da, db, cos, sin, turns, True)", "_rotated(da, db, cos, sin, turns, False)",
    ),
    Fault(
        "rope-dweight-overwritten", "ops/common/rotation.py", "_normed_rows_bwd",
        "dweight of a program's last row block alone",
        "dweight_b += db * xhat_b", "dweight_b = db * xhat_b",
    ),
    Fault(
        "rope-partials-overlap", "ops/common/rotation.py", "_rope_norm_bwd_kernel",
        "the keys' partial sums written over those of the queries",
        "q_partial_ptr + 2 * D", "q_partial_ptr",
    ),
    Fault(
        "rope-mean-g", "ops/common/rotation.py", "_norm_bwd",
        "LayerNorm's mean of g not subtracted",
        "g_a, g_b = g_a - mean_g[:, None], g_b - mean_g[:, None]", "g_a, g_b = g_a, g_b",
    ),
    Fault(
        "rope-int32-offsets", "ops/common/rotation.py", "_places",
        "offsets of samples, tokens and heads in 32 bits",
        "return samples.to(tl.int64), tokens.to(tl.int64), heads.to(tl.int64)",
        "return samples, tokens, heads",
        only=("ops/test_extremes.py::test_rope_addresses_past_2_31",),
    ),
    Fault(
        "rope-learnt-sine", "ops/common/rotation_tables.py", "_shared_rows_bwd",
        "the sign of the first column's sine", "dsin_a -= da * b", "dsin_a += da * b",
    ),
    Fault(
        "rope-learnt-norm", "ops/common/rotation_tables.py", "_shared_rows_bwd",
        "tables' gradients from normed heads without the norm's bias",
        "xhat_a * weight_a + bias_a", "xhat_a * weight_a",
    ),
    Fault(
        "rope-learnt-heads", "ops/common/rotation_tables.py", "_shared_rows_bwd",
        "the first head stands for those that share a table",
        "heads + (shared - sample * heads_shared)", "heads",
    ),
    Fault(
        "rope-learnt-keys", "ops/common/rotation_tables.py", "_rope_tables_bwd_kernel",
        "the part of the queries lost", "tables, sums, first",
        "tables, (zeros, zeros, zeros, zeros), first",
    ),
    Fault(
        "rope-learnt-range", "ops/common/rotation_tables.py", "_rope_tables_bwd_kernel",
        "each range begins at the first sample", "first = split * shared_per_split",
        "first = split * 0",
    ),
    Fault(
        "rope-learnt-transposed", "ops/common/rotation_tables.py", "_rope_tables_bwd_kernel",
        "gradients of tables by head written by token",
        "(samples * table_heads + heads) * turned + tokens - prefix_tokens",
        "(samples * turned + tokens - prefix_tokens) * table_heads + heads",
    ),
    Fault(
        "rope-learnt-partials", "ops/common/rotation_tables.py", "_rope_tables_bwd_kernel",
        "the norms' partial sums of two programs overlap", "program * 4 * D", "program * 2 * D",
    ),
    Fault(
        "rope-learnt-first-range", "ops/common/rotation_tables.py", "_rotate_tables_bwd",
        "the first range alone", "column_sum(sums, dtables)",
        "dtables.copy_(sums[0].view_as(dtables))",
    ),
    Fault(
        "rope-learnt-one-of-two", "ops/rope.py", "RopeFunction.backward",
        "the gradient of cos given to sin",
        "parts(dtables, needs[2:4])", "parts(dtables.flip(0), needs[2:4])",
    ),
]  # fmt: skip

ROPE_ATTENTION = [
    Fault(
        "rope-attention-in-place", "ops/attention/rotary.py", "rope_attention_fwd",
        "q and k turn in their own memory although a norm's backward needs them",
        "turned.unbind(2) if apart else (q, k)", "(q, k)",
    ),
    Fault(
        "rope-attention-unturned", "ops/attention/rotary.py", "rope_attention_bwd",
        "attention's backward reads q and k as they were before norm and rotation",
        "readable(turned).unbind(2) if turned.numel() else (q, k)", "(q, k)",
    ),
    Fault(
        "rope-attention-turned-on", "ops/common/rotation_tables.py", "turn_back",
        "the gradients of q and k turn on, not back",
        "transpose=True", "transpose=False", only=("ops/test_rope_attention.py",),
    ),
    Fault(
        "rope-attention-pairing", "ops/attention/rotary.py", "rope_attention_bwd",
        "the backward pairs the columns the other way",
        "Rotation(interleaved, prefix", "Rotation(not interleaved, prefix",
    ),
    Fault(
        "rope-attention-key-weight", "ops/attention/rotary.py", "rope_attention_bwd",
        "the backward takes the weight of the queries' norm for the keys",
        "q_norm_bias, k_norm_weight, k_norm_bias)\n    dqkv", "q_norm_bias, q_norm_weight, "
        "k_norm_bias)\n    dqkv",
    ),
    Fault(
        "rope-attention-dropout", "ops/attention/rotary.py", "rope_attention_bwd",
        "the backward drops nothing",
        "scale, dropout_p, False", "scale, 0.0, False",
    ),
    Fault(
        "rope-attention-scale", "ops/attention/rotary.py", "rope_attention_bwd",
        "the backward scales by D^-1/2 whatever was asked for",
        "scale, dropout_p, False", "q.shape[-1] ** -0.5, dropout_p, False",
    ),
    Fault(
        "rope-attention-bias", "ops/attention/rotary.py", "RopeAttentionFunction.backward",
        "the projection's bias gradient left out where a norm has one",
        "any(needs[3:5]), needs[2]", "any(needs[3:5]), needs[2] and not any(needs[5:9])",
    ),
    Fault(
        "rope-attention-dparams", "ops/attention/rotary.py", "RopeAttentionFunction.backward",
        "the gradients of the norms' parameters go to their neighbours",
        "parts(dparams, needs[5:9])", "parts(dparams.roll(1, 0), needs[5:9])",
    ),
]  # fmt: skip

REDUCTION = [
    Fault(
        "sum-overwritten", "ops/common/reduction.py", "_column_sum_kernel",
        "the accumulator set instead of added to",
        "acc += tl.load", "acc = tl.load",
    ),
    Fault(
        "sum-bf16", "ops/common/reduction.py", "_column_sum_kernel",
        "the accumulator cast to the result's type before the last sum",
        "tl.sum(acc, axis=0)", "tl.sum(acc.to(out_ptr.dtype.element_ty), axis=0)",
    ),
    Fault(
        "sum-partial-missing", "ops/common/reduction.py", "column_sum",
        "the last partial not summed",
        "launch_second(out, first, splits,", "launch_second(out, first, splits - 1,",
    ),
    Fault(
        "sum-row-stride", "ops/common/reduction.py", "column_sum",
        "rows taken to be contiguous",
        "rows_per_split, x.stride(0))", "rows_per_split, N)",
    ),
    Fault(
        "batch-compiled-again", "runtime/triton.py", "", "another number of rows is another kernel",
        "B M num_rows", "B num_rows", only=("tools/test_aot.py",),
    ),
    Fault(
        "bound-out-of-order", "runtime/triton.py", "_bound",
        "constexprs bound in the order of the alphabet",
        "for name in constexprs)", "for name in sorted(constexprs))",
    ),
    Fault(
        "bound-unaligned", "runtime/triton.py", "_kinds",
        "a kernel of aligned tensors is launched with others",
        "(x.dtype, x.data_ptr() % 16)", "x.dtype",
        only=("runtime/test_launches.py::test_a_launch_takes_the_kernel_that_triton_picks",),
    ),
]  # fmt: skip

ACTIVATION = [
    Fault(
        "gelu-value-tanh", "ops/common/activation.py", "activate",
        "exact GELU computed as the tanh kind, forward",
        "return z * _normal(z, DTYPE)[0]", "return z * _sigmoid(2.0 * _tanh_argument(z), DTYPE)[0]",
        only=("ops/test_linear.py",),
    ),
    Fault(
        "gelu-slope-tanh", "ops/common/activation.py", "activate_and_derivative",
        "dGELU of the tanh kind under the exact GELU",
        "return z * cdf, cdf + z * 0.3989422804014327 * density",
        "s, slope = _sigmoid_and_slope(2.0 * _tanh_argument(z), DTYPE)\n"
        "        return z * cdf, s + slope * 1.5957691216 * (1.0 + 0.134145 * z * z) * z",
    ),
    Fault(
        "gelu-fp32-fit", "ops/common/activation.py", "_normal", "fp32 takes the fit for 16 bits",
        "DTYPE.primitive_bitwidth == 16", "True",
    ),
    Fault(
        "gelu-fit-far", "ops/common/activation.py", "_normal", "the fit is off in its tail",
        "0.14 * far", "0.13 * far",
    ),
    Fault(
        "gelu-fit-near", "ops/common/activation.py", "_normal", "the fit is off near 0",
        "0.1367399", "0.1367999",
    ),
    Fault(
        "quick-gelu-slope", "ops/common/activation.py", "activate_and_derivative",
        "the factor 1.702 forgotten in the slope of quick GELU",
        "slope * 1.702 * z", "slope * z",
    ),
]  # fmt: skip

EPILOGUE = [
    Fault(
        "epilogue-drop-path-sample", "ops/common/epilogue.py", "finish_tile",
        "every sample takes the DropPath factor of the first",
        "offs_m // rows_per_sample", "offs_m // rows_per_sample * 0",
    ),
    Fault(
        "epilogue-residual-stride", "ops/common/epilogue.py", "finish_tile",
        "rows of the residual taken to be contiguous",
        "offs_m[:, None] * stride_residual_m", "offs_m[:, None] * N",
    ),
    Fault(
        "epilogue-layer-scale", "ops/common/epilogue.py", "_epilogue_bwd_kernel",
        "layer scale forgotten on the way back",
        "dz *= layer_scale[None, :]", "dz *= 1.0",
    ),
    Fault(
        "epilogue-dlayer-scale", "ops/common/epilogue.py", "_epilogue_bwd_kernel",
        "gradient of layer scale from z instead of act(z)",
        "sum_dlayer_scale += dz * act", "sum_dlayer_scale += dz * z",
    ),
    Fault(
        "epilogue-partials-overlap", "ops/common/epilogue.py", "_epilogue_bwd_kernel",
        "partials of layer scale written over those of the bias",
        "partial_ptrs += N", "partial_ptrs += 0",
    ),
    Fault(
        "epilogue-split-tail", "ops/common/epilogue.py", "_epilogue_bwd_kernel",
        "rows past a split's end summed there too",
        "mask_m = offs_m < last", "mask_m = offs_m < M",
    ),
    Fault(
        "epilogue-dweight-scale", "ops/common/epilogue.py", "_weight_bwd_kernel",
        "layer scale forgotten in dweight",
        "dweight = layer_scale[:, None] * gram", "dweight = gram",
    ),
    Fault(
        "epilogue-dlayer-scale-bias", "ops/common/epilogue.py", "_weight_bwd_kernel",
        "the bias forgotten in the gradient of layer scale",
        "dlayer_scale += bias * tl.load", "dlayer_scale += 0.0 * bias * tl.load",
    ),
    Fault(
        "epilogue-fp16-underflow", "ops/common/epilogue.py", "input_gradient_operands",
        "weight times a small layer scale, in fp16",
        "if d.dtype == torch.float16:", "if d.dtype == torch.float64:",
    ),
    Fault(
        "epilogue-gram-rounded", "ops/common/epilogue.py", "weight_gradients",
        "the product for dweight and layer scale rounded to 16 bits on its way",
        "matmul(d.t(), x, out_dtype=torch.float32)", "matmul(d.t(), x).float()",
    ),
]  # fmt: skip

GEMM = [
    Fault(
        "gemm-accumulator", "ops/common/gemm.py", "tile_product",
        "of the steps over K the last alone",
        "acc, input_precision=INPUT_PRECISION)\n            a_ptrs",
        "input_precision=INPUT_PRECISION)\n            a_ptrs",
    ),
    Fault(
        "gemm-k-tail", "ops/common/gemm.py", "tile_product",
        "the last step over K reads the start of the next rows",
        "offs_k < K - k * BLOCK_K", "offs_k < K",
    ),
    Fault(
        "gemm-descriptor-step", "ops/common/gemm.py", "tile_product",
        "with descriptors, the first tile of a at every step over K",
        "a.load([row, k * BLOCK_K])", "a.load([row, 0])",
    ),
    Fault(
        "gemm-group-tail", "ops/common/gemm.py", "grouped_tile",
        "the last group of row blocks taken to be whole",
        "tl.minimum(num_m - first_m, GROUP_M)", "GROUP_M",
    ),
    Fault(
        "library-residual", "ops/linear/functions.py", "by_library",
        "the residual forgotten where the library does all",
        "y if residual is None else y.add_(residual)", "y",
    ),
    Fault(
        "library-dbias", "ops/linear/launch.py", "linear_by_library_bwd",
        "dbias of the first row alone where the library does all",
        "column_sum(rows, ", "column_sum(rows[:1], ",
    ),
    Fault(
        "linear-bias-twice", "ops/linear/kernels.py", "_linear_epilogue",
        "the bias added twice",
        "z += tl.load(bias_ptr", "z += 2.0 * tl.load(bias_ptr",
    ),
    Fault(
        "linear-unrounded-z", "ops/linear/kernels.py", "_linear_epilogue",
        "the activation reads other bits than those that are saved",
        "z = z_low.to(tl.float32)", "z = z.to(tl.float32)",
    ),
    Fault(
        "linear-subtile", "ops/linear/kernels.py", "_linear_epilogue",
        "the right half of a tile stored at the columns of the left",
        " + i * (BLOCK_N // 2)", "",
    ),
    Fault(
        "mlp-hidden-tail", "ops/mlp/kernels.py", "_hidden_epilogue",
        "rows past the last counted in dbias",
        "tl.where(mask, dz, 0.0)", "dz",
    ),
    Fault(
        "mlp-hidden-columns", "ops/mlp/kernels.py", "_hidden_epilogue",
        "columns past the last written into the next row",
        "if not EVEN_F", "if False",
    ),
    Fault(
        "mlp-partial-row", "ops/mlp/kernels.py", "_mlp_bwd_hidden_kernel",
        "all row blocks write their partial sums into one row",
        "partial_ptr + pid_m.to(tl.int64) * F", "partial_ptr",
    ),
    Fault(
        "mlp-slope", "ops/mlp/kernels.py", "_hidden_epilogue",
        "the gradient multiplied by act(z), not its slope",
        "dz = dact * derivative", "dz = dact * act",
    ),
    Fault(
        "narrow-before-first", "ops/mlp/narrow.py", "_narrow_mlp_fwd_kernel",
        "before the first step, weights are read that lie before the tensor",
        "tl.where(first_f > 0, F, -BLOCK_F)", "F",
    ),
    Fault(
        "narrow-padded-act", "ops/mlp/narrow.py", "_narrow_mlp_fwd_kernel",
        "hidden units past F not set to zero, so that infinity becomes NaN",
        "act = tl.where((offs_before < F)[:, None], act, 0.0)", "act = act",
    ),
]  # fmt: skip

GATED_MLP = [
    Fault(
        "gated-halves", "ops/gated_mlp/kernels.py", "_z_sizes",
        "gate and value of packed weights confused",
        "(F, 0) if gate_last else (0, F)", "(0, F) if gate_last else (F, 0)",
    ),
    Fault(
        "gated-dz-halves", "ops/gated_mlp/kernels.py", "dz_columns",
        "dgate and dvalue of packed weights confused",
        "(F, 0) if gate_last else (0, F)", "(0, F) if gate_last else (F, 0)",
    ),
    Fault(
        "gated-slope", "ops/gated_mlp/kernels.py", "_gate_bwd_kernel",
        "dgate without the activation's slope",
        "dhidden * value * derivative", "dhidden * value",
    ),
    Fault(
        "gated-dvalue", "ops/gated_mlp/kernels.py", "_gate_bwd_kernel",
        "dvalue multiplied by the gate, not by act(gate)",
        "dhidden * act", "dhidden * gate",
    ),
    Fault(
        "gated-split-end", "ops/gated_mlp/kernels.py", "_gate_bwd_kernel",
        "the first rows of the next split counted in the sums of dz",
        "(offs_m < last)[:, None] & mask_f", "(offs_m < M)[:, None] & mask_f",
    ),
    Fault(
        "gated-vector", "ops/gated_mlp/kernels.py", "_gate_fwd_kernel",
        "rows of z taken to lie closer than they do",
        "stride_z_m = F * VECTOR, stride_z_m * VECTOR", "stride_z_m = F * VECTOR, stride_z_m",
    ),
    Fault(
        "gated-norm-mean-mask", "ops/gated_mlp/kernels.py", "_gate_norm_fwd_kernel",
        "columns past F counted in the mean",
        "tl.where(mask, hidden - mean[:, None], 0.0), axis=1", "hidden - mean[:, None], axis=1",
    ),
    Fault(
        "gated-norm-second-pass", "ops/gated_mlp/kernels.py", "_gate_norm_fwd_kernel",
        "the mean in one pass: a constant row's rounding error passes for variance",
        "mean += tl.sum", "mean += 0.0 * tl.sum",
    ),
    Fault(
        "gated-norm-projection", "ops/gated_mlp/kernels.py", "_gate_norm_bwd_kernel",
        "dh of the LayerNorm without the part along xhat",
        "xhat * mean_g_xhat[:, None]", "0.0 * mean_g_xhat[:, None]",
    ),
    Fault(
        "gated-norm-weight", "ops/gated_mlp/kernels.py", "_gate_norm_bwd_kernel",
        "the LayerNorm's weight left out of a mean in its input gradient",
        "mean_g = tl.sum(g, axis=1)", "mean_g = tl.sum(dnormed, axis=1)",
    ),
    Fault(
        "gated-norm-reread", "ops/gated_mlp/kernels.py", "_gate_norm_bwd_kernel",
        "in rows that are read twice, the LayerNorm's weight left out the second time",
        "rstd[:, None]\n            g = dnormed * weight", "rstd[:, None]\n            g = dnormed",
    ),
    Fault(
        "gated-norm-rebuilt", "ops/gated_mlp/kernels.py", "_gate_norm_bwd_kernel",
        "the rebuilt hidden layer without its bias",
        "normed += bias.to(tl.float32)[None, :]", "normed += 0.0 * bias.to(tl.float32)[None, :]",
    ),
    Fault(
        "gated-dx", "ops/gated_mlp/launch.py", "gated_mlp_bwd",
        "of separate weights, dx of the second alone",
        "_add_product(dx, dhalf, weight)", "gemm.matmul(dhalf, weight, out=dx)",
    ),
    Fault(
        "gated-norm-params", "ops/gated_mlp/launch.py", "gated_mlp_bwd",
        "the gradients of the LayerNorm's weight and bias confused",
        "zip((0, F), dnorm_dtypes", "zip((F, 0), dnorm_dtypes",
    ),
    Fault(
        "gated-columns", "ops/gated_mlp/launch.py", "_columns",
        "of dz the columns before those wanted",
        "x[:, first : first + count]", "x[:, :count]",
    ),
    Fault(
        "gated-library-residual", "ops/gated_mlp/functions.py", "_second",
        "the residual left out where the library multiplies",
        "bias, residual)", "bias, None)",
    ),
    Fault(
        "gated-library-scale", "ops/gated_mlp/functions.py", "_decide",
        "the layer scale left out where the library multiplies",
        "not (casts or scaled)", "not casts",
    ),
    Fault(
        "layer-row-scale-twice", "ops/common/grad_epilogue.py", "layer_gradients",
        "a d that a norm has scaled scaled again",
        "d, saved[row_scale], g, known", "d, _, g, known",
    ),
    Fault(
        "gated-saved-hidden", "ops/gated_mlp/functions.py", "_decide",
        "the hidden layer saved although the backward rebuilds it",
        "needs_hidden and not (recompute and needs_dhidden)", "needs_hidden",
    ),
]  # fmt: skip

FORWARD = [
    Fault(
        "attention-rescale", "ops/attention/forward.py", "_attend",
        "the accumulator not rescaled to the new maximum",
        "acc = scaled_head(acc, rescale[:, None], FORM)", "acc = acc",
    ),
    Fault(
        "attention-scale", "ops/attention/forward.py", "_attend",
        "softmax to the base 2 instead of e",
        "scores.scale * LOG2_E", "scores.scale",
    ),
    Fault(
        "attention-rounded-sum", "ops/attention/forward.py", "_attend",
        "the softmax's sum over bf16 probabilities",
        "new_sum = tl.sum(p, axis=1)", "new_sum = tl.sum(p.to(tl.bfloat16).to(tl.float32), axis=1)",
    ),
    Fault(
        "attention-lse-base", "ops/attention/tiles.py", "save_lse",
        "lse saved with a natural logarithm beside a maximum to the base 2",
        "row_max + tl.log2(row_sum)", "row_max + tl.log(row_sum)",
    ),
    Fault(
        "attention-keep-scale", "ops/attention/forward.py", "_fwd_tile",
        "dropout without the factor 1 / keep",
        "factor *= scores.dropout.keep_scale", "factor *= 1.0",
        only=("ops/test_attention.py::test_attention_dropout",),
    ),
    Fault(
        "attention-no-key-lse", "ops/attention/tiles.py", "save_lse",
        "lse of a query that sees no key left at -inf",
        'lse = tl.where(row_sum == 0.0, float("inf"), lse)', "lse = lse",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "attention-head", "ops/attention/forward.py", "_fwd_tile",
        "every head reads the values of the first",
        "head_rows(v, sample)", "head_rows(v, sample._replace(h=0))",
    ),
    Fault(
        "attention-causal-end", "ops/attention/forward.py", "_fwd_tile",
        "causal: the tile of keys on the diagonal skipped",
        "tl.cdiv(start_q + BLOCK_Q, BLOCK_KV)", "tl.cdiv(start_q, BLOCK_KV)",
        only=("ops/test_sdpa.py",),
    ),
]  # fmt: skip

TILES = [
    Fault(
        "tiles-key-tail", "ops/attention/tiles.py", "mask_scores",
        "off by one: the key past the last is seen",
        's = tl.where(kv_index < scores.T_kv, s, float("-inf"))',
        's = tl.where(kv_index <= scores.T_kv, s, float("-inf"))',
    ),
    Fault(
        "tiles-causal", "ops/attention/tiles.py", "mask_scores",
        "causal: a query does not see its own key",
        "kv_index <= q_index", "kv_index < q_index",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "tiles-additive-mask", "ops/attention/tiles.py", "mask_scores",
        "the additive mask multiplied by scale",
        "bias / scores.scale", "bias",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "tiles-least-mask", "ops/attention/tiles.py", "mask_scores",
        "an additive mask of finfo.min becomes -inf",
        "tl.minimum(tl.maximum(bias / scores.scale, -HIDDEN), HIDDEN)", "bias / scores.scale",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "tiles-hidden-lse", "ops/attention/tiles.py", "save_lse",
        "where finfo.min hides all keys, their number lost beside the maximum",
        "-ALL_HIDDEN * row_sum, lse)", "lse, lse)",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "tiles-column-mask", "ops/attention/tiles.py", "load_part",
        "columns past D loaded from the next head",
        "mask=(offs_t[:, None] < T) & (offs_d[None, :] < D)", "mask=offs_t[:, None] < T",
    ),
    Fault(
        "tiles-stored-rows", "ops/attention/tiles.py", "store_part",
        "rows past the last one stored where a tile is not the first",
        "tl.arange(0, BLOCK_T) < T - start", "tl.arange(0, BLOCK_T) < T",
    ),
    Fault(
        "samples-wide", "ops/attention/samples.py", "wide",
        "the number of a head multiplies strides in 32 bits",
        "i.to(tl.uint32).to(tl.int64)", "i",
        only=("ops/test_extremes.py::test_attention_addresses_past_2_31",),
    ),
    Fault(
        "tiles-second-columns", "ops/attention/tiles.py", "product_over_d",
        "of a head in two column parts the second alone",
        "tl.dot(a[1], tl.trans(b[1]), x,", "tl.dot(a[1], tl.trans(b[1]),",
    ),
    Fault(
        "tiles-delta", "ops/attention/tiles.py", "softmax_grad",
        "delta forgotten in ds",
        "return p, p * (dp - delta)", "return p, p * dp",
    ),
    Fault(
        "tiles-dropout-redrawn", "ops/attention/tiles.py", "softmax_grad",
        "backward redraws the dropout mask transposed",
        "COLUMNS, Q_FIRST)\n", "COLUMNS, not Q_FIRST)\n",
        only=("ops/test_attention.py::test_attention_dropout",),
    ),
    Fault(
        "tiles-dropout-heads", "ops/attention/tiles.py", "dropout_keep",
        "one dropout mask for all heads",
        "scores.head.to(tl.int32) + zero", "zero",
        only=("ops/test_attention.py::test_attention_dropout",),
    ),
]  # fmt: skip

BACKWARD = [
    Fault(
        "one-pass-dk-scale", "ops/attention/backward_one_pass.py", "_one_pass_key_tile",
        "scale forgotten in dk",
        "(dk_t * scores.scale)", "(dk_t * 1.0)",
    ),
    Fault(
        "one-pass-dq-part", "ops/attention/backward_one_pass.py", "_one_pass_sample",
        "scale forgotten in dq",
        "dq[i] * scores.scale", "dq[i]",
    ),
    Fault(
        "qkv-bias-dq-scale", "ops/attention/tiles.py", "store_dq_sum",
        "scale forgotten in the gradient of q's bias",
        "tl.sum(dq, axis=0) * scale", "tl.sum(dq, axis=0)",
    ),
    Fault(
        "qkv-bias-part", "ops/attention/backward_one_pass.py", "_one_pass_sample",
        "all parts of the queries leave their sum of dq in one row",
        "sum_ptr = dbias_ptr + i * 3 * H * FORM.D", "sum_ptr = dbias_ptr",
    ),
    Fault(
        "qkv-bias-dropout", "ops/attention/launch.py", "bias_partials",
        "dropped probabilities taken to add up to 1",
        "if has_dropout:", "if False:",
    ),
    Fault(
        "one-pass-third-part", "ops/attention/backward_one_pass.py", "_one_pass_sample",
        "the third part of the queries takes the positions of the second",
        "lse_ptr, PART0 + PART1, T_q", "lse_ptr, PART0, T_q",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "one-pass-dq-accumulator", "ops/attention/backward_one_pass.py", "_one_pass_part",
        "dq of the last key tile alone",
        "dq = tl.dot(ds, k, dq,", "dq = tl.dot(ds, k,",
    ),
    Fault(
        "one-pass-parts", "ops/attention/backward_one_pass.py", "_one_pass_key_tile",
        "dv of the last part of the queries alone",
        "tl.fma(dv_t, 1.0, dv_i)", "dv_i",
    ),
    Fault(
        "one-pass-store-mask", "ops/attention/backward_one_pass.py", "_one_pass_key_tile",
        "dk and dv stored past the last key",
        "< FORM.D) & (kv_index < T_kv)", "< FORM.D) & (kv_index >= 0)",
        only=("ops/test_fuzz.py::test_fuzz[attention-0]",),
    ),
    Fault(
        "dq-causal-end", "ops/attention/backward_split.py", "_dq_query_tile",
        "causal: the tile of keys on the diagonal skipped in dq",
        "tl.cdiv(start_q + BLOCK_Q, WALK.BLOCK)", "tl.cdiv(start_q, WALK.BLOCK)",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "dkdv-causal-start", "ops/attention/backward_split.py", "_dkdv_key_tile",
        "causal: the tile of queries on the diagonal skipped in dk and dv",
        "start_kv // BLOCK_Q * BLOCK_Q", "(start_kv // BLOCK_Q + 1) * BLOCK_Q",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "dkdv-delta-head", "ops/attention/backward_split.py", "_attention_bwd_dkdv_kernel",
        "every sample reads delta of the first",
        "row_ptr(delta_ptr, sample)", "delta_ptr + head % H * ((T_q + 3) // 4 * 4)",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "tiles-mask-head", "ops/attention/samples.py", "sample_of",
        "every head reads the mask of the first",
        "h * mask.stride_h", "0 * mask.stride_h",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "dkdv-dk-of-p", "ops/attention/backward_split.py", "_dkdv_step",
        "p instead of ds in the gradient of k",
        "accumulate(dk, ds_t", "accumulate(dk, p_t",
    ),
    Fault(
        "attention-last-axis", "ops/attention/launch.py", "_is_readable",
        "a last axis that is not contiguous taken to be",
        "strides[-1] == 1 and", "",
    ),
    Fault(
        "attention-empty-loop", "ops/attention/launch.py", "_split_launch",
        "a tile larger than the tokens, so that no full one is there",
        "_block(T_loop, config.loop)", "config.loop",
        only=("ops/test_attention_configs.py::test_no_loop_is_empty",),
    ),
    Fault(
        "attention-saved-rows", "ops/attention/launch.py", "padded_rows",
        "rows of lse taken to be padded whatever unpacked them",
        "lse.stride() == (H * length, length, 1) and lse.untyped_storage().nbytes() >= end", "True",
    ),
    Fault(
        "library-lse-out", "ops/attention/by_library.py", "fwd_by_library",
        "the library's lse kept as it is, in natural logs",
        "(lse.reshape(out.shape[:3]) * LOG2E)", "lse.reshape(out.shape[:3])",
    ),
    Fault(
        "library-lse-in", "ops/attention/by_library.py", "bwd_by_library",
        "the library given lse in base 2", "(lse * (1.0 / LOG2E))", "lse",
    ),
    Fault(
        "library-bits", "ops/attention/by_library.py", "_kernels",
        "the library whatever torch is asked for", "values.bits_must_repeat()", "False",
    ),
    Fault(
        "library-poison", "runtime/values.py", "bits_must_repeat",
        "memory that is filled taken for a wish for equal bits", " and not poisoned", "",
        only=("ops/test_attention_library.py", "tools/test_tuning.py"),
    ),
    Fault(
        "library-packed", "ops/attention/launch.py", "launch_bwd",
        "the library's gradients not packed", "grad.copy_(x)", "pass",
        only=("ops/test_attention_library.py",),
    ),
    Fault(
        "one-pass-16-keys", "ops/attention/configs.py", "_one_pass_fits",
        "a config that leaves its memory on an H100, offered to 16 bits",
        "(ITEMSIZE[dtype] == 4) != (config == ONE_PASS_FP32)",
        "ITEMSIZE[dtype] == 4 and config != ONE_PASS_FP32", only=("ops/test_attention_configs.py",),
    ),
    Fault(
        "library-layout", "ops/attention/launch.py", "launch_bwd",
        "gradients of q, k and v in the library's strides", "x.contiguous() for x in found",
        "x for x in found", only=("ops/test_attention_library.py",),
    ),
    Fault(
        "library-cross", "ops/attention/launch.py", "Problem.is_by_library",
        "the library for other keys than queries", " and self.shape[1] == self.T_kv", "",
        only=("ops/test_attention_library.py",),
    ),
    Fault(
        "library-masks", "ops/attention/configs.py", "_library_fits",
        "the library without the mask, or without dropout", 'mask in ("none", "causal") and ', "",
        only=("ops/test_attention_library.py",),
    ),
]  # fmt: skip

_VARLEN = ("ops/test_varlen.py",)
VARLEN = [
    Fault(
        "varlen-first-token", "ops/attention/samples.py", "sample_of",
        "every sequence reads the tokens of the first",
        "Sample(first, h, first, first, row)", "Sample(first * 0, h, first, first, row)",
        only=_VARLEN,
    ),
    Fault(
        "varlen-rows", "ops/attention/samples.py", "sample_of",
        "rows of lse begin in the padding of the sequence before",
        "(first // ROW_PAD + b) * ROW_PAD", "first // ROW_PAD * ROW_PAD",
        only=_VARLEN,
    ),
    Fault(
        "varlen-total", "ops/attention/samples.py", "sample_of",
        "a cu_seqlens that ends past the last token is believed",
        "tl.minimum(last, packing.total)", "last",
        only=_VARLEN,
    ),
    Fault(
        "varlen-past-end", "ops/attention/forward.py", "_fwd_head",
        "the last tile of a sequence left out",
        "pid_q * TILES.BLOCK_Q < scores.T_q", "(pid_q + 1) * TILES.BLOCK_Q <= scores.T_q",
        only=_VARLEN,
    ),
    Fault(
        "varlen-key-tail", "ops/attention/launch.py", "Problem.tail",
        "keys past the end of a sequence are seen where the longest fills its tiles",
        'self.mask == "varlen" or', "",
        only=_VARLEN,
    ),
    Fault(
        "varlen-query-tail", "ops/attention/launch.py", "Problem.is_ragged",
        "queries past the end of a sequence are loaded where the longest fills its tiles",
        'self.mask == "varlen" or', "",
        only=_VARLEN,
    ),
    Fault(
        "varlen-part-tail", "ops/attention/backward_one_pass.py", "_one_pass_sample",
        "one pass: all parts but the last taken to be full",
        "ALL: tl.constexpr = FORM.VARLEN", "ALL: tl.constexpr = False",
        only=_VARLEN,
    ),
    Fault(
        "varlen-lengths", "ops/attention/varlen.py", "check_lengths",
        "the debug switch checks nothing",
        "if values.values_are_checked() and", "if False and",
        only=_VARLEN,
    ),
    Fault(
        "skip-place", "ops/common/samples.py", "_place_samples_kernel",
        "places beyond the first tile of samples begin at 0 again",
        "offs.to(tl.int64), mask=mask", "tl.arange(0, BLOCK_B).to(tl.int64), mask=mask",
        only=("ops/test_samples.py",),
    ),
    Fault(
        "keys-mask", "ops/attention/tiles.py", "mask_scores",
        "a mask by key hides nothing within a tile",
        "shown = tl.load(ptrs, mask=kv_index < scores.T_kv, other=0) != 0",
        "shown = kv_index < scores.T_kv",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "keys-last-tile", "ops/attention/samples.py", "shown_tiles",
        "the last tile of keys that a mask shows skipped",
        "& 1, axis=0) * each", "& 1, axis=0) * each - 1",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "keys-shared-bit", "ops/attention/samples.py", "next_tile",
        "of tiles that share a bit, the first alone is walked",
        "tl.where(is_last, others, shown.bits)", "others",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "keys-hidden-tile", "ops/attention/samples.py", "shown_tiles",
        "tiles without a key that a mask shows are walked too",
        "tiles << bit", "(tiles | 1) << bit",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "keys-gradient", "ops/attention/samples.py", "kept_rows",
        "hidden keys get a gradient",
        "x0 = tl.where(keep[:, None], x[0], 0.0)", "x0 = x[0]",
        only=("ops/test_sdpa.py",),
    ),
    Fault(
        "keys-strides", "ops/attention/launch.py", "mask_kind",
        "a mask that differs from query to query taken for one by key",
        "shape[1:3], strides[1:3]", "shape[1:2], strides[1:2]",
        only=("ops/test_sdpa.py",),
    ),
]  # fmt: skip

BIAS_GRADIENT = [
    Fault(
        "bias-delta", "ops/attention/backward_bias.py", "_attention_bwd_bias_kernel",
        "delta forgotten in the gradient of the bias",
        "p * (dp - delta[:, None])", "p * dp",
    ),
    Fault(
        "bias-windows", "ops/attention/backward_bias.py", "_attention_bwd_bias_kernel",
        "the samples of a window taken to be neighbours",
        "n // shared_heads * mask_batch", "n // shared_heads",
    ),
    Fault(
        "bias-shared-heads", "ops/attention/backward_bias.py", "_attention_bwd_bias_kernel",
        "of the heads that share a bias the first alone",
        "bias_h + n % shared_heads", "bias_h",
    ),
    Fault(
        "bias-parts", "ops/attention/backward_bias.py", "_attention_bwd_bias_kernel",
        "every program of a bias walks the first heads",
        "first = part * heads_per_program", "first = part * 0",
    ),
    Fault(
        "bias-scale", "ops/attention/backward_bias.py", "_added_tile",
        "the bias multiplied by scale",
        "bias / scores.scale", "bias",
    ),
    Fault(
        "bias-hidden", "ops/attention/backward_bias.py", "_added_tile",
        "a bias of -inf cut as finite numbers are",
        'hidden = (bias == float("-inf")) | (kv_index', "hidden = (kv_index",
    ),
    Fault(
        "bias-dropout-heads", "ops/attention/backward_bias.py", "_attention_bwd_bias_kernel",
        "one dropout mask for all heads",
        "(), dropout, b * H + h)", "(), dropout, h * 0)",
    ),
    Fault(
        "bias-mask-windows", "ops/attention/samples.py", "sample_of",
        "every window reads the mask of the first",
        "b % mask.batch * mask.stride_b", "0 * mask.stride_b",
        only=("ops/test_bias_gradient.py",),
    ),
]  # fmt: skip

PATCH_EMBED = [
    Fault(
        "patch-bias-on-prefix", "ops/patch_embed/kernels.py", "_patch_embed_added_kernel",
        "the bias added to prefix tokens too",
        "if HAS_BIAS and t >= num_prefix:", "if HAS_BIAS:",
    ),
    Fault(
        "patch-position-start", "ops/patch_embed/kernels.py", "_patch_embed_added_kernel",
        "positions of patches alone read as those of all tokens",
        "pos_ptr + offs - pos_start * C", "pos_ptr + offs",
    ),
    Fault(
        "patch-added-16-bit", "ops/patch_embed/launch.py", "patch_embed_fwd",
        "bias, prefix and position rounded to the result's dtype before the product is added",
        "out.new_empty((tokens, C), dtype=torch.float32)", "out.new_empty((tokens, C))",
    ),
    Fault(
        "patch-wide-limit", "ops/patch_embed/configs.py", "_fwd_fits",
        "the wide tile on GPUs whose blocks have 99 KB",
        "gpu.shared_limit > 3 * STAGE_BYTES + 4096", "True",
    ),
    Fault(
        "patch-wide-few", "ops/patch_embed/configs.py", "_default_fwd",
        "the wide tile where its tiles are fewer than the SMs",
        "tiles >= gpu.num_sms", "tiles >= 0",
    ),
    Fault(
        "patch-pixel-row", "ops/patch_embed/pixels.py", "pixel_offset",
        "patch height and width taken to be equal",
        "offs_k // PATCH_W % PATCH_H", "offs_k // PATCH_W % PATCH_W",
    ),
    Fault(
        "patch-dweight-prefix", "ops/patch_embed/kernels.py", "_patch_embed_bwd_weight_kernel",
        "dweight from gradients that are one sample's prefix too early",
        "(b + 1) * num_prefix", "b * num_prefix",
    ),
    Fault(
        "patch-split", "ops/patch_embed/kernels.py", "_patch_embed_bwd_weight_kernel",
        "all row ranges write one partial",
        "dweight_ptr += split * C * K", "dweight_ptr += 0",
    ),
    Fault(
        "patch-dpos", "ops/patch_embed/launch.py", "patch_embed_bwd_tokens",
        "dpos of patches alone taken from the first tokens",
        "dtoken[len(dtoken) - num_pos :]", "dtoken[:num_pos]",
    ),
    Fault(
        "patch-partials-rounded", "ops/patch_embed/launch.py", "patch_embed_bwd_weight",
        "partials of dweight in the compute dtype",
        "(splits, C * K), dtype=torch.float32", "(splits, C * K), dtype=compute_dtype",
    ),
    Fault(
        "patch-byte-mean", "ops/patch_embed/pixels.py", "normalised",
        "bytes divided by 255 std, no mean subtracted",
        "pixels.to(tl.float32) * scale + offset", "pixels.to(tl.float32) * scale",
    ),
    Fault(
        "patch-byte-channel", "ops/patch_embed/pixels.py", "normalised",
        "every channel past the first shifted as the second",
        "tl.where(channel == c, offsets[c], offset)", "tl.where(channel >= 1, offsets[1], offset)",
    ),
    Fault(
        "patch-byte-prefix", "ops/patch_embed/kernels.py", "_patch_embed_fwd_kernel",
        "prefix tokens multiplied by what a missing pixel normalises to",
        "pixels = tl.where(mask_patch, pixels, 0.0)", "pass",
    ),
    Fault(
        "patch-keep-position", "ops/patch_embed/kernels.py", "_patch_embed_fwd_kernel",
        "positions by the place in the list of kept patches",
        "offs_n[:, None] + place[None, :] * C", "offs_n[:, None] + t[None, :] * C",
    ),
    Fault(
        "patch-keep-weight", "ops/patch_embed/kernels.py", "_patch_embed_bwd_weight_kernel",
        "dweight from the patches that the first image keeps",
        "kept_patches(keep_ptr, offs_m,", "kept_patches(keep_ptr, p,",
    ),
    Fault(
        "patch-keep-images", "ops/patch_embed/launch.py", "patch_embed_bwd_images",
        "the gradient of dropped patches left as it was in memory",
        "dimages.zero_()  # dropped patches", "pass",
    ),
    Fault(
        "patch-keep-prefix", "ops/patch_embed/kernels.py", "_patch_embed_bwd_kept_kernel",
        "dpos of kept patches read from the prefix tokens on",
        "* T + num_prefix + slot", "* T + slot",
    ),
    Fault(
        "patch-keep-slots", "ops/patch_embed/kernels.py", "_patch_embed_slots_kernel",
        "only the last tile of an image's list found",
        "slots = tl.maximum(slots, tl.max(found, axis=1))", "slots = tl.max(found, axis=1)",
    ),
    Fault(
        "patch-keep-range", "ops/patch_embed/pixels.py", "kept_patches",
        "a negative index taken for a patch",
        "(p >= 0) & (p < num_patches)", "p < num_patches",
    ),
    Fault(
        "patch-video-row", "ops/patch_embed/pixels.py", "patch_offset",
        "patch rows of a video counted on through its frames",
        "row = row % images.grid_h", "pass",
    ),
    Fault(
        "patch-video-frame", "ops/patch_embed/pixels.py", "pixel_offset",
        "every channel of a video's patch read from its first frame",
        "(channel % PATCH_T).to(tl.int64)", "(channel // PATCH_T * 0).to(tl.int64)",
    ),
]  # fmt: skip

# What compiled code alone can show: the machine of tests/machine/device notices.
COMPILED = [
    Fault(
        "roles-slot-early", "ops/common/gemm_in_roles.py", "_multiply",
        "a slot given back while its product may still read it",
        "multiply_wait(1, deps=[acc])", "multiply_wait(2, deps=[acc])",
    ),
    Fault(
        "roles-landed", "ops/common/gemm_in_roles.py", "_load",
        "one half of the rows of x waited for",
        "2 * x.block_type.nbytes", "x.block_type.nbytes",
    ),
    Fault(
        "roles-other-rows", "ops/common/gemm_in_roles.py", "_load",
        "both groups multiply the same rows",
        "(2 * pid_m + group) * ROWS", "2 * pid_m * ROWS",
    ),
    Fault(
        "roles-bias-column", "ops/common/gemm_in_roles.py", "_stage",
        "the bias of the first part for all",
        "column + i * (PARTS // 2) * COLUMNS", "column",
    ),
    Fault(
        "roles-staged", "ops/common/gemm_in_roles.py", "_finish",
        "sums of the tile before finished",
        "mbarrier.wait(staged.index(part), phase)", "pass",
    ),
    Fault(
        "roles-free", "ops/common/gemm_in_roles.py", "_stage",
        "sums written while the last tile's are read",
        "mbarrier.wait(free.index(FIRST), phase ^ 1)", "pass",
    ),
    Fault(
        "roles-partial-row", "ops/common/gemm_in_roles.py", "_finish",
        "the column sums of the first 64 rows lost",
        "dsums + _sum_own(y)", "_sum_own(y)",
    ),
    Fault(
        "roles-partial-warp", "ops/common/gemm_in_roles.py", "_store_sums",
        "four tiles' column sums in rows of one",
        "pid_m * FINISHERS", "pid_m",
    ),
    Fault(
        "roles-residual-stride", "ops/common/gemm_in_roles.py", "_finish",
        "rows of a residual as far apart as those of y",
        "stride_residual + offs_n", "N + offs_n",
    ),
    Fault(
        "roles-z-early", "ops/common/gemm_in_roles.py", "_finish",
        "z read before it has landed",
        "mbarrier.wait(landed.index(half), z_phase)", "pass",
    ),
    Fault(
        "roles-z-late", "ops/common/gemm_in_roles.py", "_load_z",
        "z overwritten before it is read",
        "mbarrier.wait(read.index(half), phase ^ 1)", "pass",
    ),
    Fault(
        "roles-z-rows", "ops/common/gemm_in_roles.py", "_load_z",
        "both halves of a tile get the z of the first",
        "(2 * pid_m + half) * ROWS", "2 * pid_m * ROWS",
    ),
    Fault(
        "roles-z-unaligned", "ops/mlp/launch.py", "_hidden_gradient",
        "z at an address that TMA cannot read",
        "z if is_aligned(z) else z.clone()", "z",
        only=("machine/device/test_gemm_in_roles.py",),
    ),
    Fault(
        "library-order", "ops/attention/by_library.py", "bwd_by_library",
        "out and dout of cuDNN's backward in another layout than torch's own",
        "x if x.stride() == strides else", "x if True else",
        only=("ops/test_attention_library.py",),
    ),
    Fault(
        "mlp-z-twice", "ops/mlp/functions.py", "MlpFunction.backward",
        "dz written over z that a second backward reads",
        "ctx.owns_z and reads_last(dy)", "ctx.owns_z", only=("ops/test_mlp.py",),
    ),
    Fault(
        "mlp-z-hooked", "ops/mlp/functions.py", "MlpFunction.forward",
        "dz written over z that a hook has seen",
        "spec.route == EAGER and saves_are_own()", "spec.route == EAGER",
        only=("ops/test_mlp.py",),
    ),
    Fault(
        "mlp-z-recorded", "runtime/compat.py", "reads_last",
        "dz written over z that a replay of a CUDA graph reads",
        "_keeps_saves() or is_recorded(x)", "_keeps_saves()", only=("ops/test_mlp.py",),
    ),
    Fault(
        "roles-widening", "ops/common/gemm_configs.py", "_default",
        "proj takes the tile of fc1",
        "N > K and _takes_roles", "_takes_roles", only=("ops/test_gemm.py",),
    ),
    Fault(
        "patch-sum-begins", "ops/patch_embed/kernels.py", "_patch_embed_fwd_kernel",
        "sums in fp32 begin with what is added",
        "HAS_ADDED and weight_ptr.dtype.element_ty == tl.float32", "False",
        only=("machine/device/test_kernels.py::test_long_sums_in_fp32",),
    ),
    Fault(
        "turns-passed-on", "ops/attention/forward_pingpong.py", "_chunk",
        "the tensor cores never passed on to the other group",
        "mbarrier.arrive(turns.index(1 - GROUP_OF), count=1)", "pass",
    ),
    Fault(
        "turns-landed", "ops/attention/forward_pingpong.py", "_chunk",
        "values multiplied before they have landed",
        "mbarrier.wait(v_full.index(slot), phase)", "pass",
    ),
    Fault(
        "turns-slot-early", "ops/attention/forward_pingpong.py", "_attend",
        "keys given back while the group has tiles left",
        "count=1, pred=done", "count=1",
    ),
    Fault(
        "turns-past-end", "ops/attention/forward_pingpong.py", "_chunk",
        "keys past T seen",
        's = gl.where(seen[None, :], s, float("-inf"))', "pass",
    ),
    Fault(
        "turns-buffer-read", "ops/attention/forward_pingpong.py", "_pass_out",
        "the buffer written while TMA may still read it",
        "store_wait(0)", "pass",
    ),
    Fault(
        "turns-fence", "ops/attention/forward_pingpong.py", "_pass_out",
        "no fence between a tile's stores and TMA",
        "fence()", "pass",
    ),
    Fault(
        "turns-used", "ops/attention/backward_pingpong.py", "_key_tile",
        "p and ds written while products still read them",
        "mbarrier.wait(used.index(0), turn & 1 ^ 1)", "pass",
    ),
    Fault(
        "turns-made", "ops/attention/backward_pingpong.py", "_key_tile",
        "dv and dk of the other group's former p and ds",
        "mbarrier.wait(made.index(0), turn & 1 ^ 1)", "pass",
    ),
    Fault(
        "turns-delta", "ops/attention/backward_pingpong.py", "_weights",
        "ds without delta",
        "(dp - delta[:, None])", "dp",
    ),
    Fault(
        "turns-dk-scale", "ops/attention/backward_pingpong.py", "_store_grad",
        "dk without the scale",
        "if GROUP_OF == 1:", "if GROUP_OF == 2:",
    ),
    Fault(
        "turns-column-sums", "ops/attention/backward_pingpong.py", "_grads",
        "the bias gradient of q without the scale",
        "_column_sums(dq0 + dq1) * scale", "_column_sums(dq0 + dq1)",
    ),
    Fault(
        "attention-fence", "ops/attention/tiles.py", "fence_async",
        "no fence between cp.async and wgmma",
        "fence.proxy.async.shared::cta; mov", "mov",
        ("machine/device/test_kernels_async.py::test_attention_of_wide_heads_and_of_few_queries",),
    ),
]  # fmt: skip

FAULTS = [
    *SAMPLES, *LAYER_NORM, *RMS_NORM, *ROPE, *ROPE_ATTENTION, *REDUCTION, *ACTIVATION, *EPILOGUE,
    *GEMM, *GATED_MLP, *FORWARD, *TILES, *BACKWARD, *VARLEN, *BIAS_GRADIENT, *PATCH_EMBED,
    *COMPILED,
]  # fmt: skip
