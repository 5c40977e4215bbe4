"""Faults in what judges others: bench, verify, check, the gates."""

from .fault import Fault

BENCH = "test_bench.py::test_"
MODEL = "test_bench_model.py::test_"
COUNTS = ("test_bench_counts.py",)
ACCURACY = ("support/test_accuracy.py",)
RUNNER = ("verify/test_runner.py",)
BESIDE = ("commands/test_beside.py",)
BY_LAYER = (
    "commands/test_coverage.py::test_a_gradient_of_rounding_alone_is_measured_by_its_layer",
)
GATE = ("commands/test_gate.py",)
SEARCH = ("swap/test_search_arguments.py",)
CHECK = ("commands/test_check.py",)

FAULTS = [
    # bench: the gate
    Fault(
        "judge-gate-outputs", "bench/harness.py", "_gate",
        "the bench's gate looks at outputs only",
        "errors = reference.errors(entry.function)",
        "errors = reference.errors(entry.function)[:1]",
        (f"{BENCH}the_gate_looks_at_every_gradient",),
    ),
    Fault(
        "judge-gate-first-gradient", "bench/harness.py", "_gate",
        "the bench's gate looks at the first gradient only",
        "errors = reference.errors(entry.function)",
        "errors = reference.errors(entry.function)[:2]",
        (f"{BENCH}the_gate_looks_at_every_gradient",),
    ),
    Fault(
        "judge-gate-forward", "bench/harness.py", "_gate",
        "a provider without a backward is not held against float64",
        'measure("out", out, yardstick, oracle, out.dtype)',
        'measure("out", yardstick, yardstick, oracle, out.dtype)',
        (f"{BENCH}a_forward_alone_is_held_against_float64",),
    ),
    Fault(
        "judge-gate-verdict", "bench/harness.py", "verdict",
        "a provider that breaks the 2x rule is ok", "return FAILED,", "return OK,",
        (f"{BENCH}the_gate_closes_on_a_broken_provider",),
    ),
    Fault(
        "judge-gate-speedup", "bench/harness.py", "with_speedup",
        "a speed-up of what is wrong", "row.status != OK or not compared", "not compared",
        (f"{BENCH}the_gate_closes_on_a_broken_provider",),
    ),
    Fault(
        "judge-gate-fallback", "bench/harness.py", "judged",
        "a provider of ours that fell back is compared with itself",
        "choices or not provider.ours", "choices is not None",
        (f"{BENCH}what_took_pytorchs_path_is_not_ours",),
    ),
    Fault(
        "judge-gate-ours", "bench/providers.py", "ours",
        "ours by the backend that falls back", 'backend("triton")', 'backend("torch")',
        (f"{BENCH}what_took_pytorchs_path_is_not_ours",),
    ),
    Fault(
        "judge-speedup-inverted", "bench/harness.py", "with_speedup",
        "the speed-up's inverse", "baseline.ms / row.ms", "row.ms / baseline.ms",
        (f"{BENCH}a_speedup_is_the_baselines_time_over_the_providers",),
    ),
    Fault(
        "judge-step-detached", "bench/harness.py", "_step",
        "mode both times the forward alone",
        "lambda _: torch.autograd.grad(forward(), leaves, upstream)", "lambda _: forward()",
        (f"{BENCH}a_mode_times_what_it_says",),
    ),
    Fault(
        "judge-step-leaves", "bench/harness.py", "_step",
        "a backward is timed without the gradient of the last argument",
        "grad(outputs, leaves,", "grad(outputs, leaves[:-1],",
        (f"{BENCH}a_mode_times_what_it_says",),
    ),
    # bench: whole models
    Fault(
        "judge-vit-outputs", "bench/bench_vit.py", "Oracle.errors",
        "the gate of whole models looks at logits only",
        "return errors + [", "return errors[:1] and errors[:1] or [",
        (f"{MODEL}the_gate_of_whole_models_looks_at_every_gradient",),
    ),
    Fault(
        "judge-vit-vector", "bench/bench_vit.py", "Oracle.errors",
        "a small gradient is lost in the vector of all", "for e in each\n", "for e in each[:0]\n",

        (f"{MODEL}the_gate_of_whole_models_looks_at_every_gradient",),
    ),
    Fault(
        "judge-vit-limit", "bench/bench_vit.py", "",
        "a gradient may be wrong by a hundred limits", "EACH = 4.0", "EACH = 400.0",
        (f"{MODEL}the_gate_of_whole_models_looks_at_every_gradient",),
    ),
    Fault(
        "judge-vit-fallback", "bench/bench_vit.py", "_ready",
        "a swapped model that runs its host is compared with itself",
        "with judged(entry.provider):", "with entry.provider.context():",
        (f"{MODEL}a_swapped_model_that_runs_its_host_is_refused",),
    ),
    Fault(
        "judge-vit-optimizer", "bench/models.py", "Runner.step",
        "ours skips the optimizer", "self.optimizer.step()",
        "self.way.swapped or self.optimizer.step()",
        (f"{MODEL}a_step_of_training_trains",),
    ),
    Fault(
        "judge-vit-no-optimizer", "bench/models.py", "Runner.step",
        "nobody's step trains", "        self.optimizer.step()\n", "",
        (f"{MODEL}a_step_of_training_trains",),
    ),
    Fault(
        "judge-vit-backward", "bench/models.py", "Runner.step",
        "ours skips the backward", "        loss.backward()\n",
        "        if not self.way.swapped:\n            loss.backward()\n",
        (f"{MODEL}a_step_of_training_trains",),
    ),
    Fault(
        "judge-vit-accumulates", "bench/models.py", "Runner.step",
        "gradients of former steps stay", "self.optimizer.zero_grad(set_to_none=True)", "pass",

        (f"{MODEL}a_step_of_training_trains",),
    ),
    Fault(
        "judge-vit-evaluation", "bench/models.py", "Runner.__init__",
        "training is measured in evaluation mode", '.train(case.mode == "train")', ".eval()",
        (f"{MODEL}a_step_of_training_trains",),
    ),
    Fault(
        "judge-vit-flops", "bench/models.py", "Case.flops",
        "attention's products once", "4 * T * T * C", "2 * T * T * C", COUNTS,
    ),
    Fault(
        "judge-vit-training-flops", "bench/models.py", "Case.flops",
        "training is two forwards", "(3 if", "(2 if", COUNTS,
    ),
    # bench: counts
    *(
        Fault(f"judge-{id}", f"bench/bench_{file}.py", function, what, old, new, COUNTS)
        for id, file, function, what, old, new in (
            ("norm-both", "layer_norm", "bytes_", "bytes of both as a difference",
             "forward + backward", "forward - backward"),
            ("norm-flops", "layer_norm", "flops", "FLOPs of both without the affine",
             '"both": 20.0', '"both": 18.0'),
            ("norm-amp", "layer_norm", "bytes_", "amp counts as fp32", "(4, 2)", "(4, 4)"),
            ("norm-stats", "layer_norm", "bytes_", "the mean or rstd is left out of a backward",
             "(2 * x + y) + 8", "(2 * x + y) + 4"),
            ("rms-residual", "rms_norm", "bytes_", "the residual is read for nothing",
             "(x if shape", "(0 if shape"),
            ("rms-heads", "rms_norm", "bytes_", "a head's rstd counts as a row's",
             "// _width(shape)", "// shape.C"),
            ("patch-flops", "patch_embed", "flops", "the prefix counts as a patch",
             "(shape.T - 1)", "shape.T"),
            ("patch-both", "patch_embed", "flops", "the backward has dimages too",
             '2 if mode == "both"', '3 if mode == "both"'),
            ("patch-fwd", "patch_embed", "flops", "a multiply-add is one", "2.0 *", "1.0 *"),
            ("patch-bytes", "patch_embed", "bytes_", "both once", "2 if mode", "1 if mode"),
            ("varlen-flops", "varlen_attention", "flops", "pairs of the longest alone",
             "sum(n * n for n in lengths(shape))", "shape.B * shape.T ** 2"),
            ("varlen-products", "varlen_attention", "flops", "the backward has four products",
             '"bwd": 5', '"bwd": 4'),
            ("varlen-bytes", "varlen_attention", "bytes_", "padded tokens move",
             "sum(lengths(shape))", "shape.B * shape.T"),
            ("varlen-lse", "varlen_attention", "bytes_", "lse of both once",
             '(2 if mode == "both" else 1)', "1"),
            ("attention-flops", "attention", "flops", "a product less in both",
             '"both": 7', '"both": 6'),
            ("attention-bytes", "attention", "bytes_", "qkv is not read again",
             '"bwd": 8', '"bwd": 5'),
            ("qkv-flops", "qkv_attention", "flops", "the projection by a factor of two",
             "6.0 *", "3.0 *"),
            ("qkv-bytes", "qkv_attention", "bytes_", "dweight is not written", "6 * C", "3 * C"),
            ("linear-flops", "linear", "flops", "one product backward", '"bwd": 2', '"bwd": 1'),
            ("linear-bytes", "linear", "bytes_", "the pre-activation is free",
             "(1 + saved)", "1"),
            ("mlp-flops", "mlp", "flops", "one product", "4.0 *", "2.0 *"),
            ("mlp-bytes", "mlp", "bytes_", "the residual is free",
             "forward = 3 * M * C", "forward = 2 * M * C"),
            ("gated-flops", "gated_mlp", "flops", "two products", "6.0 *", "4.0 *"),
            ("gated-bytes", "gated_mlp", "bytes_", "the gate is not kept",
             "forward = 3 * M * C + 2 * M", "forward = 3 * M * C + 1 * M"),
            ("gated-norm", "gated_mlp", "bytes_", "the statistics of a forward alone",
             '(mode == "both")', '(mode == "all")'),
            ("rope-flops", "rope", "flops", "queries alone", "elements = 2 *", "elements = 1 *"),
            ("rope-tables", "rope", "table_bytes", "cos alone", "2 * 4 *", "1 * 4 *"),
            ("rope-backward", "rope", "bytes_", "the gradients of tables are not written",
             "table_bytes(shape) if", "0 if"),
            ("rope-attention-flops", "rope_attention", "flops", "the rotation is free",
             " + bench_rope.flops(shape, mode)", ""),
            ("rope-attention-bytes", "rope_attention", "bytes_", "tables are read once",
             '(2 if mode == "both" else 1)', "1"),
        )
    ),
    # verify
    Fault(
        "judge-floor", "verify/accuracy.py", "", "a floor ten times as wide",
        "FLOOR_EPS = 2.0", "FLOOR_EPS = 20.0", ACCURACY,
    ),
    Fault(
        "judge-limit-max", "verify/accuracy.py", "measure", "the maximum may be twenty times off",
        "limit_max=2 *", "limit_max=20 *", ACCURACY,
    ),
    Fault(
        "judge-limit-rms", "verify/accuracy.py", "measure", "the RMS may be twenty times off",
        "limit_rms=2 *", "limit_rms=20 *", ACCURACY,
    ),
    Fault(
        "judge-rms-unseen", "verify/accuracy.py", "Error.passed", "the RMS is not looked at",
        " and self.rms <= self.limit_rms", "", ACCURACY,
    ),
    Fault(
        "judge-max-unseen", "verify/accuracy.py", "Error.passed", "the maximum is not looked at",
        "self.max <= self.limit_max and ", "", ACCURACY,
    ),
    Fault(
        "judge-nan", "verify/accuracy.py", "_distance", "a NaN is no error",
        'nan=float("inf")', "nan=0.0", ACCURACY,
    ),
    Fault(
        "judge-gradients", "verify/accuracy.py", "Reference.judge", "gradients are not judged",
        "in self.oracle_grads.items()", "in {}.items()", ACCURACY,
    ),
    Fault(
        "judge-finest", "verify/accuracy.py", "Reference.judge",
        "the floor is the finest dtype's", "or max(", "or min(", ACCURACY,
    ),
    Fault(
        "judge-poison", "verify/runner.py", "poisoned", "the checker's poison does nothing",
        "torch.use_deterministic_algorithms(True, warn_only=True)", "pass", RUNNER,
    ),
    Fault(
        "judge-poison-fill", "verify/runner.py", "poisoned", "outputs are not filled",
        "fill_uninitialized_memory = True", "fill_uninitialized_memory = former[2]", RUNNER,
    ),
    Fault(
        "judge-poison-stays", "verify/runner.py", "poisoned", "the poison outlives the checker",
        "fill_uninitialized_memory = former[2]", "fill_uninitialized_memory = True", RUNNER,
    ),
    Fault(
        "judge-case-unpoisoned", "verify/runner.py", "run_case", "a case runs without poison",
        ", poisoned():", ":", RUNNER,
    ),
    Fault(
        "judge-check-unpoisoned", "verify/runner.py", "check", "configs run without poison",
        "with poisoned():", "with quiet_interpreter():", RUNNER,
    ),
    Fault(
        "judge-bits-gradient", "verify/runner.py", "check", "bits of gradients are not compared",
        "if _bits_differ(a, grads2[name])", "if _bits_differ(a, grads[name])", RUNNER,
    ),
    Fault(
        "judge-bits-output", "verify/runner.py", "check", "bits of outputs are not compared",
        "if _bits_differ(a, b)", "if _bits_differ(a, a)", RUNNER,
    ),
    Fault(
        "judge-failed-unsaid", "verify/runner.py", "check", "an error past its limit is no fault",
        "if not error.passed", "if error.max != error.max", RUNNER,
    ),
    Fault(
        "judge-raises", "verify/runner.py", "run_case", "a case that raises passes",
        "failure = first_line(error)", "failure = None", RUNNER,
    ),
    Fault(
        "judge-check-backend", "verify/runner.py", "run_case", "the check falls back",
        'backend("triton")', 'backend("torch")', RUNNER,
    ),
    Fault(
        "judge-check-passed", "verify/runner.py", "Result.passed", "one right tensor is enough",
        "all(e.passed", "any(e.passed", CHECK,
    ),
    Fault(
        "judge-check-status", "commands/check.py", "_check_cases", "the check never fails",
        "wrongly.\")\n    return 1 if failed else 0", "wrongly.\")\n    return 0", CHECK,
    ),
    # swapped models beside their hosts
    Fault(
        "judge-both-raise", "commands/beside.py", "difference",
        "what passes because both sides raise",
        'raise cut.NotCut(f"the host raises {type(wanted).__name__}: {wanted}"[:100])',
        'return ""', BESIDE,
    ),
    Fault(
        "judge-beside-gradients", "commands/beside.py", "_run", "gradients of images alone",
        "for n, p in model.named_parameters()", "for n, p in ()", BESIDE,
    ),
    Fault(
        "judge-beside-missing", "commands/beside.py", "difference",
        "a missing gradient is passed over", "actual.keys() != wanted.keys()",
        "actual.keys() > wanted.keys()", BESIDE,
    ),
    Fault(
        "judge-beside-exact", "commands/beside.py", "", "a thousandth is rounding",
        "ROUNDING = 1e-13", "ROUNDING = 1e-3", BESIDE,
    ),
    Fault(
        "judge-beside-rounding", "commands/beside.py", "", "every host may round to fp32",
        "EXACT = 1e-9", "EXACT = 1e-10", BY_LAYER,
    ),
    Fault(
        "judge-beside-fp32", "commands/beside.py", "", "no host may round to fp32",
        "EXACT = 1e-9", "EXACT = 1e-3", BY_LAYER,
    ),
    Fault(
        "judge-beside-random", "commands/beside.py", "_training_step",
        "other random numbers are the same", "torch.get_rng_state().double()", "torch.zeros(1)",
        BESIDE,
    ),
    # the compile gate
    Fault(
        "judge-record-names", "commands/gate.py", "run_gate", "names left out of the gate's record",
        "sorted(compiled.digests)", "sorted(compiled.digests)[1:]", GATE,
    ),
    Fault(
        "judge-record-broken", "commands/gate.py", "run_gate", "what broke a rule is recorded",
        "[] if problems else sorted", "[] if not problems else sorted", GATE,
    ),
    Fault(
        "judge-record-trusted", "commands/gate.py", "passed_before", "the record is never tried",
        'if d[0] not in "01"', "", GATE,
    ),
    Fault(
        "judge-gate-digests", "commands/gate.py", "compile_cases",
        "digests of one process alone", "*(found.digests for found in results)",
        "results[0].digests", GATE,
    ),
    Fault(
        "judge-gate-spills", "commands/gate.py", "_problems", "spills on sm_90 alone",
        "if k.spills:", 'if k.spills and k.arch == "sm_90":', GATE,
    ),
    Fault(
        "judge-gate-faults", "commands/gate.py", "_problems", "known miscompiles pass",
        "    yield from k.faults\n", "", GATE,
    ),
    Fault(
        "judge-name-constants", "tools/specialisation.py", "specialisation",
        "a kernel's name leaves out its constants", "word(given[p.name], p.is_constexpr)",
        "word(given[p.name], False)", GATE,
    ),
    Fault(
        "judge-name-kernel", "tools/specialisation.py", "specialisation",
        "a launch's name leaves out its kernel", "[function.__qualname__, *words]", "words", GATE,
    ),
    # the search for unknown hosts
    Fault(
        "judge-head-width", "swap/runs.py", "angles_for", "packed heads are three times as wide",
        "3 if len(names) == 1 else 1", "1", SEARCH,
    ),
    Fault(
        "judge-head-width-unknown", "swap/runs.py", "angles_for",
        "a head as wide as the module", "default=1)", "default=1) ** 0", SEARCH,
    ),
    Fault(
        "judge-rope-prefix", "swap/runs.py", "angles_for", "tables for the prefix too",
        "tokens - roles.prefix", "tokens", SEARCH,
    ),
    Fault(
        "judge-rope-row", "swap/hosts/structure/attention.py", "ways_of_rope",
        "tables are never sine first", '("cos before sin", "sin before cos")',
        '("cos before sin", "cos before sin")', SEARCH,
    ),
    Fault(
        "judge-rope-name", "swap/runs.py", "angle_argument",
        "an argument named position_embeddings is no angles", "|position_emb", "", SEARCH,
    ),
]  # fmt: skip
