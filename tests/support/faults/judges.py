"""Faults in what judges others: bench, verify, check, the gates."""

from .fault import Fault

BENCH = "test_bench.py::test_"
MODEL = "test_bench_model.py::test_"
COUNTS = ("test_bench_counts.py",)
ACCURACY = ("support/test_accuracy.py",)
RUNNER = ("verify/test_runner.py",)
BESIDE = ("model_coverage/test_compare.py",)
BY_LAYER = (
    "model_coverage/test_sweep.py::test_a_gradient_of_rounding_alone_is_measured_by_its_layer",
)
GATE = ("machine/test_gate.py",)
COMPARE, GATE_FILE = "tests/model_coverage/compare.py", "tests/machine/gate.py"
SEARCH = ("swap/test_search_arguments.py",)
CHECK = ("commands/test_check.py",)

FAULTS = [
    Fault(
        "judge-rows-equal", "bench/rows.py", "read_rows", "of equal keys the first counts",
        "found[row.key] = row", "found.setdefault(row.key, row)",
        ("test_bench_session.py::test_csv_round_trip_and_torn_lines",),
    ),
    # bench: the gate
    Fault(
        "judge-gate-outputs", "measure/gate.py", "judge_op",
        "the bench's gate looks at outputs only",
        "verdict(reference.errors(function))",
        "verdict(reference.errors(function)[:1])",
        (f"{BENCH}the_gate_looks_at_every_gradient",),
    ),
    Fault(
        "judge-gate-first-gradient", "measure/gate.py", "judge_op",
        "the bench's gate looks at the first gradient only",
        "verdict(reference.errors(function))",
        "verdict(reference.errors(function)[:2])",
        (f"{BENCH}the_gate_looks_at_every_gradient",),
    ),
    Fault(
        "judge-gate-forward", "measure/gate.py", "judge_op",
        "a provider without a backward is not held against float64",
        'measure("out", out, yardstick, oracle, out.dtype)',
        'measure("out", yardstick, yardstick, oracle, out.dtype)',
        (f"{BENCH}a_forward_alone_is_held_against_float64",),
    ),
    Fault(
        "judge-gate-verdict", "measure/gate.py", "verdict",
        "a provider that breaks the 2x rule is ok", "Outcome(FAILED,", "Outcome(OK,",
        (f"{BENCH}the_gate_closes_on_a_broken_provider",),
    ),
    Fault(
        "judge-gate-speedup", "bench/rows.py", "with_speedup",
        "a speed-up of what is wrong",
        "(self.status, baseline.status) != (OK, OK)", "baseline.status != OK",
        (f"{BENCH}the_gate_closes_on_a_broken_provider",),
    ),
    Fault(
        "judge-gate-fallback", "measure/gate.py", "judged",
        "a provider of ours that fell back is compared with itself",
        "choices or not ours", "choices is not None",
        (f"{BENCH}what_took_pytorchs_path_is_not_ours",),
    ),
    Fault(
        "judge-gate-ours", "bench/ops.py", "ours",
        "ours by the backend that falls back", 'backend("triton")', 'backend("torch")',
        (f"{BENCH}what_took_pytorchs_path_is_not_ours",),
    ),
    Fault(
        "judge-speedup-inverted", "bench/rows.py", "with_speedup",
        "the speed-up's inverse", "times[1] / times[0]", "times[0] / times[1]",
        (f"{BENCH}a_speedup_is_the_baselines_time_over_the_providers",),
    ),
    Fault(
        "judge-step-detached", "bench/measure.py", "step_of",
        "mode both times the forward alone",
        "lambda _: torch.autograd.grad(forward(), leaves, upstream)", "lambda _: forward()",
        (f"{BENCH}a_mode_times_what_it_says",),
    ),
    Fault(
        "judge-step-leaves", "bench/measure.py", "step_of",
        "a backward is timed without the gradient of the last argument",
        "grad(outputs, leaves,", "grad(outputs, leaves[:-1],",
        (f"{BENCH}a_mode_times_what_it_says",),
    ),
    # bench: whole models
    Fault(
        "judge-vit-outputs", "bench/measure.py", "model_errors",
        "the gate of whole models looks at logits only",
        "return [logits, overall", "return [logits] or [logits, overall",
        (f"{MODEL}the_gate_of_whole_models_looks_at_every_gradient",),
    ),
    Fault(
        "judge-vit-vector", "bench/measure.py", "model_errors",
        "a small gradient is lost in the vector of all",
        "e.limit_rms) for e in each]", "e.limit_rms) for e in each[:0]]",
        (f"{MODEL}the_gate_of_whole_models_looks_at_every_gradient",),
    ),
    Fault(
        "judge-vit-limit", "bench/measure.py", "",
        "a gradient may be wrong by a hundred limits", "EACH = 4.0", "EACH = 400.0",
        (f"{MODEL}the_gate_of_whole_models_looks_at_every_gradient",),
    ),
    Fault(
        "judge-vit-fallback", "bench/models.py", "_warm_up",
        "a swapped model that runs its host is compared with itself",
        "judged(entry.context(), way.swapped):", "entry.context():",
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
        "judge-vit-backward", "bench/models.py", "Runner.gradients",
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
        "training is measured in evaluation mode", ".train(case.trains)", ".eval()",
        (f"{MODEL}a_step_of_training_trains",),
    ),
    Fault(
        "judge-vit-flops", "bench/models.py", "Case.flops",
        "those of one image", "float(self.batch * counter", "float(counter", COUNTS,
    ),
    Fault(
        "judge-vit-training-flops", "bench/models.py", "Case.flops",
        "training is two forwards", "(3 if", "(2 if", COUNTS,
    ),
    # bench: times, names, peers, pages
    *(
        Fault(
            f"bench-{id}", f"{file}.py" if "/" in file else f"bench/{file}.py", within, what, old,
            new, (f"test_{test}",),
        )
        for id, file, within, what, old, new, test in (
            ("cold-warm", "measure/timer", "cold_bytes", "a cold cache of half the L2",
             "2 * cache", "cache // 2",
             "measure.py::test_a_sample_is_between_two_events_and_begins_with_a_cold_cache"),
            ("flush-timed", "measure/timer", "CudaTimer.sample", "the flush is timed",
             "if flush:\n                self._cold.zero_()\n            start.record()\n",
             "start.record()\n            if flush:\n                self._cold.zero_()\n",
             "measure.py::test_a_sample_is_between_two_events_and_begins_with_a_cold_cache"),
            ("peak-stale", "measure/timer", "CudaTimer.memory_mib", "the peak of all calls before",
             "        torch.cuda.reset_peak_memory_stats()\n", "",
             "measure.py::test_memory_is_that_above_what_is_there"),
            ("lost-at-once", "measure/timer", "CudaTimer.clear", "an old error loses the device",
             "if attempt:", "if not attempt:",
             "measure.py::test_a_device_is_lost_where_it_says_so_twice"),
            ("context-left", "measure/turns", "take_turns", "turns run outside of the forced route",
             "with c.context():", "if True:",
             "bench_harness.py::test_a_provider_runs_in_its_context_whenever_it_is_timed"),
            ("culprit", "measure/turns", "take_turns", "a turn does not name its provider",
             "        at_work(c.name)\n", "",
             "bench_harness.py::test_the_provider_at_work_is_named_at_every_turn"),
            ("lost-unseen", "measure/gate", "failure", "a lost device is a provider's failure",
             "    timer.clear()\n", "",
             "bench_harness.py::test_a_device_that_is_lost_ends_the_process"),
            ("percentiles", "rows", "timed", "p20 and p80 turned",
             "ms_p20=p20, ms_p80=p80", "ms_p20=p80, ms_p80=p20",
             "bench_harness.py::test_a_row_has_median_and_spread_of_its_samples"),
            ("p90", "measure/timer", "spread", "p90 for p80", "(0.5, 0.2, 0.8)", "(0.5, 0.2, 0.9)",
             "bench_harness.py::test_a_row_has_median_and_spread_of_its_samples"),
            ("rates-host", "rows", "rated", "rates with the host's share",
             "ms = self.device_ms", "ms = self.ms",
             "bench_harness.py::test_rates_are_of_the_devices_time_under_the_roof_of_the_products_dtype"),
            ("no-graph", "measure", "step_of", "a timed forward saves nothing",
             "        return function(**inputs)",
             "        with torch.set_grad_enabled(mode != 'fwd'):\n"
             "            return function(**inputs)",
             "bench.py::test_a_mode_times_what_it_says"),
            ("route", "ops", "gemm_routes", "the library's route is ours",
             "forced_route, route", 'forced_route, "triton"',
             "bench_harness.py::test_a_forced_route_is_taken"),
            ("peer-eps", "ops", "_layer_norm_peers", "a peer with another eps",
             "eps=EPS", "eps=1e-5",
             "bench_harness.py::test_peers_are_asked_for_what_ours_computes"),
            ("peer-residual", "ops", "_gated_mlp_peers", "a peer that adds no residual",
             "return residual + F.linear", "return F.linear",
             "bench_harness.py::test_peers_are_asked_for_what_ours_computes"),
            ("peer-mask", "ops", "_varlen_peers", "a peer of one long sequence",
             "k, v, attn_bias=mask()", "k, v",
             "bench_harness.py::test_peers_are_asked_for_what_ours_computes"),
            ("stored", "ops", "_stored", "what stores recomputes",
             "recompute=False", "recompute=True",
             "bench_harness.py::test_what_stores_keeps_more_than_what_recomputes"),
            ("by-head", "ops", "by_head", "the long oracle has no gradient",
             "use_reentrant=False", "use_reentrant=True",
             "bench_harness.py::test_long_sequences_go_head_by_head_in_float64"),
            ("no-turn", "ops", "Op.inputs", "a rotation by nothing", "3 * found", "0 * found",
             "bench_counts.py::test_inputs_are_drawn_so_that_no_error_hides"),
            ("patch-of-h", "models", "Case.patch", "ViT-H has patches of 16",
             'self.model == "H" and', 'self.model == "g" and',
             "bench_counts.py::test_tokens_of_whole_models"),
            ("resident", "models", "Runner.resident_mib", "memory without the optimizer's",
             "states = self.optimizer.state.values()", "states = []",
             "bench_model.py::test_whole_models_run_and_pass_the_gate[timm]"),
            ("amp", "models", "Runner.logits", "autocast in bf16 alone",
             "if amp else", "if not amp else",
             "bench_model.py::test_the_oracle_is_the_host_in_float64_with_the_weights_that_are_measured[amp-low0]"),
            ("oracle-weights", "models", "Oracle.__init__", "the oracle has other weights",
             ".to(device, case.parameter_dtype).double()", ".to(device).double()",
             "bench_model.py::test_the_oracle_is_the_host_in_float64_with_the_weights_that_are_measured[bf16-low1]"),
            ("overall-sizes", "measure", "overall", "a bias weighs as much as a matrix",
             "v * v * n", "v * v",
             "bench_model.py::test_the_vector_of_all_gradients_is_judged_as_one_tensor"),
            ("profile-parents", "models", "operators_of", "a launch without its operators",
             "event = event.cpu_parent", "event = None",
             "bench_model.py::test_a_kernel_has_the_operators_around_its_launch"),
            ("host-warm-up", "host", "measure_host", "the turn that warms up counts",
             "us[1:]", "us[0:]",
             "bench_host.py::test_rows_are_of_the_turns_after_the_first"),
            ("host-itself", "host", "call_of", "ours beside ours",
             "case.torch if provider == BASELINE else case.ours", "case.ours",
             "bench_host.py::test_a_side_calls_its_own_function"),
            ("renews-bad", "run", "_run_task", "a failure replaces what was measured",
             "(task.renews and row.status == OK)", "task.renews",
             "bench_session.py::test_a_task_that_renews_replaces_rows_of_former_turns"),
            ("alarm", "run", "Clock.alarm", "the alarm outlives the run",
             "            signal.setitimer(signal.ITIMER_REAL, 0)\n", "",
             "bench_session.py::test_after_the_body_no_alarm_is_left"),
            ("claim-dtype", "plan", "Claim.has", "a row in fp16 decides",
             "(row.op, row.dtype, row.mode) == (self.op, self.dtype, self.mode)",
             "(row.op, row.mode) == (self.op, self.mode)",
             "targets.py::test_rows_of_another_dtype_or_mode_decide_nothing"),
            ("claim-least", "plan", "", "a goal of less than the page says",
             "1.2, SEARCH)", "1.02, SEARCH)",
             "targets.py::test_what_is_wanted_is_what_the_page_says"),
            ("beside", "plan", "vit_target", "a ratio of two turns", "(*names, *beside)", "names",
             "targets.py::test_a_models_task_measures_what_is_beside_it_again"),
            ("no-time", "session", "Ending.failed", "what had no time is wrong",
             "not in (None, CUT_SHORT)", "is not None",
             "contact.py::test_what_had_no_time_is_not_wrong"),
            ("crash", "session", "Ending.failed", "a stage that crashes had no time",
             "self.state == UNFINISHED and", "self.state == DONE and",
             "contact.py::test_what_had_no_time_is_not_wrong"),
            ("elsewhere", "rows", "is_elsewhere", "a peer of another GPU is a peer",
             "bool(row.gpu) and", "not row.gpu and",
             "bench_session.py::test_rows_of_another_machine_are_set_aside"),
            ("given-up", "rows", "Results.has_given_up", "what hung has its turns again",
             "return row.status == TIMEOUT or row.note.startswith(LOST)", "return False",
             "bench_session.py::test_who_ended_a_process_has_no_turns_when_a_task_renews"),
            ("graph-eager", "models", "measure_vit", "a graph is held against eager calls",
             "baselines.get(graph)", "baselines.get(False)",
             "bench_model.py::test_a_graph_is_held_against_a_graph"),
            ("alone", "models", "", "what is compared runs one after the other",
             "ALONE = 400e6", "ALONE = 40e6",
             "bench_model.py::test_what_is_compared_takes_turns"),
            ("roof-again", "run", "_roofs", "a roof that lost the device is tried again",
             'results.append(replace(row, status=ERROR, note=f"{LOST}: {error}"))', "pass",
             "bench_command.py::test_a_gpu_lost_at_its_roofs_ends_in_rows"),
            ("packed-leaves", "measure", "_warm_up", "dq, dk and dv are those of a packed qkv",
             "x.detach().requires_grad_(x.requires_grad)", "x",
             "bench_harness.py::test_sdpa_has_q_k_and_v_of_their_own"),
            ("compare-host", "report", "ratios", "runs are compared with the host's share",
             "old.like_times(new)", "((old.ms or 0), (new.ms or 0))",
             "bench_pages.py::test_compare_is_of_graphs_if_both_have_them"),
            ("newly-failed", "report", "run_compare", "what now fails is no regression",
             "return 1 if slower or lost else 0", "return 1 if slower else 0",
             "bench_pages.py::test_compare_names_what_was_measured_and_now_fails"),
            ("best", "rows", "least", "the slowest of ours is the best",
             "return min(found", "return max(found",
             "bench_pages.py::test_a_case_has_the_best_of_each_side"),
            ("failed-speed", "report", "case_lines", "the page has a speed-up of what is wrong",
             "if r.is_ours and r.status == OK", "if r.is_ours",
             "bench_pages.py::test_a_case_has_the_best_of_each_side"),
            ("memory-met", "plan", "Verdict.met", "more memory is more reached",
             'over <= 0 if self.claim.kind == "memory" else over >= 0', "over >= 0",
             "targets.py::test_memory_is_met_from_below"),
            ("gib", "report", "draw_vit", "MiB as GiB", "mib / GIB", "mib",
             "bench_pages.py::test_the_picture_of_models_is_in_its_units"),
            ("profile-sides", "report", "draw_profile", "a profile of one side alone",
             "(r.mode, r.provider,", '(r.mode, "eager",',
             "bench_pages.py::test_a_profile_has_the_stages_of_each_provider"),
            ("images", "models", "_measure_group", "steps a second as images",
             "1e3 * case.batch / row.ms", "1e3 / row.ms",
             "bench_model.py::test_whole_models_run_and_pass_the_gate[timm]"),
            ("mfu", "models", "_measure_group", "a step's share of the roof upside down",
             "tflops / roof if", "roof / tflops if",
             "bench_model.py::test_whole_models_run_and_pass_the_gate[timm]"),
            ("graph-dropped", "models", "Oracle.errors", "a graph is judged by eager calls",
             "if runner.way.graph:", "if not runner:",
             "bench_model.py::test_a_graph_is_judged_by_what_its_replay_writes"),
            ("nearer-roof", "measure", "Roofs.share", "the share of the roof further away",
             "copy_ms >= matmul_ms", "copy_ms < matmul_ms",
             "bench.py::test_shares_of_the_nearer_roof"),
        )
    ),
    Fault(
        "bench-weights", "tests/traffic/blocks.py", "", "a minimum that nobody needs",
        '"forward": 4 + 2 + 2,', '"forward": 4 + 3 + 2,',
        ("traffic/test_traffic.py::test_the_page_has_the_lines_that_are_counted",),
    ),
    # bench: counts
    *(
        Fault(f"judge-{id}", "bench/ops.py", function, what, old, new, COUNTS)
        for id, function, what, old, new in (
            ("counts-both", "_of_mode", "both as a difference",
             "forward + backward", "forward - backward"),
            ("counts-modes", "_of_mode", "the backward is a forward",
             '"bwd": backward', '"bwd": forward'),
            ("norm-flops", "", "a backward without the affine", "s, 7, 13", "s, 7, 11"),
            ("norm-amp", "Op._bytes", "amp counts as fp32", "(4, 2)", "(4, 4)"),
            ("norm-stats", "", "the mean is left out of a backward",
             "dy x dx mean rstd", "dy x dx rstd"),
            ("rms-residual", "", "the residual is read for nothing",
             'ADDED: ("x residual y rstd"', 'ADDED: ("x y rstd"'),
            ("rms-heads", "Op._bytes", "a head's rstd counts as a row's",
             '// example.sizes["C"]', "// shape.C"),
            ("patch-flops", "_patches", "the prefix counts as a patch",
             "(shape.T - 1)", "shape.T"),
            ("patch-both", "_patches", "the backward has dimages too",
             "return product, product", "return product, 2 * product"),
            ("patch-fwd", "_patches", "a multiply-add is one", "2.0 *", "1.0 *"),
            ("patch-bytes", "", "the backward is free", '"images dweight dpos_embed dy"', '""'),
            ("varlen-flops", "_attention", "pairs of the longest alone",
             "sum(n * n for n in lengths(shape))", "shape.B * shape.T ** 2"),
            ("varlen-bytes", "Op._bytes", "padded tokens move",
             "sum(lengths(shape)) if", "shape.B * shape.T if"),
            ("attention-products", "_attention", "the backward has four products",
             "5 * product", "4 * product"),
            ("attention-lse", "", "a backward reads no lse", "dy qkv y lse dqkv", "dy qkv y dqkv"),
            ("attention-bytes", "", "qkv is not read again", "dy qkv y lse dqkv", "dy y lse dqkv"),
            ("qkv-flops", "", "values are not projected",
             "3 * s.C), _attention(s))", "2 * s.C), _attention(s))"),
            ("qkv-bytes", "", "dweight is not written", "y lse dx dweight", "y lse dx"),
            ("linear-flops", "_products", "one product backward", "2 * forward", "forward"),
            ("linear-bytes", "", "the pre-activation is free", "x weight y dx", "x weight dx"),
            ("mlp-flops", "", "one product", "s.C, 2 * s.F", "s.C, s.F"),
            ("mlp-bytes", "", "the residual is free", "x residual {_HIDDEN}", "x {_HIDDEN}"),
            ("gated-flops", "", "two products", "s.C, 3 * s.F", "s.C, 2 * s.F"),
            ("gated-bytes", "", "the gate is not kept", "y hidden hidden", "y hidden"),
            ("gated-norm", "", "the statistics of a forward alone",
             "{_GATED_BACKWARD} mean rstd", "{_GATED_BACKWARD}"),
            ("rope-flops", "_rope", "queries alone", "2 * forward, 2 *", "forward, 1 *"),
            ("rope-tables", "", "cos alone", '"dq dk cos sin dq dk"', '"dq dk cos dq dk"'),
            ("rope-backward", "", "the gradients of tables are not written", " dcos dsin", ""),
            ("rope-attention-flops", "", "the rotation is free",
             "_attention(s), _rope(s)", "_attention(s)"),
            ("rope-attention-bytes", "", "tables are read once",
             'f"cos sin {_PROJECTED[1]}"', "_PROJECTED[1]"),
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
        "judge-bits-unrepeatable", "verify/runner.py", "check",
        "equal bits asked where none are promised",
        "repeats - 1 if all(map(_repeats, choices)) else 0", "repeats - 1",
        only=("ops/test_attention_library.py",),
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
        "judge-check-status", "commands/check.py", "run", "the check never fails",
        "failed = [result.label for result in results if not result.passed]", "failed = []", CHECK,
    ),
    # swapped models beside their hosts
    Fault(
        "judge-both-raise", COMPARE, "difference",
        "what passes because both sides raise",
        'raise NotShrunk(f"the host raises {type(wanted).__name__}: {wanted}"[:100])',
        'return ""', BESIDE,
    ),
    Fault(
        "judge-beside-gradients", "swap/errors.py", "step", "gradients of images alone",
        "for n, p in module.named_parameters()", "for n, p in ()", BESIDE,
    ),
    Fault(
        "judge-beside-missing", COMPARE, "difference",
        "a missing gradient is passed over", "actual.keys() != wanted.keys()",
        "actual.keys() > wanted.keys()", BESIDE,
    ),
    Fault(
        "judge-beside-exact", COMPARE, "", "a thousandth is rounding",
        "ROUNDING = 1e-13", "ROUNDING = 1e-3", BESIDE,
    ),
    Fault(
        "judge-beside-rounding", COMPARE, "", "every host may round to fp32",
        "EXACT = 1e-9", "EXACT = 1e-10", BY_LAYER,
    ),
    Fault(
        "judge-stage-variables", "bench/session.py", "Stages._run",
        "a stage is not told where to write",
        '"PYTHONUNBUFFERED": "1", **variables}', '"PYTHONUNBUFFERED": "1"}',
        ("test_contact.py::test_a_stage_is_told_less_than_it_has",),
    ),
    Fault(
        "judge-beside-layer", "swap/errors.py", "errors_beside",
        "a limit is of the largest gradient of all",
        "peaks[layer_of(name)] for", "max(peaks.values()) for",
        ("model_coverage/test_compare.py::test_the_limit_of_a_gradient_is_of_its_own_layer",),
    ),
    Fault(
        "judge-beside-fp32", COMPARE, "", "no host may round to fp32",
        "EXACT = 1e-9", "EXACT = 1e-3", BY_LAYER,
    ),
    Fault(
        "judge-beside-random", COMPARE, "_training_step",
        "other random numbers are the same", "torch.get_rng_state().double()", "torch.zeros(1)",
        BESIDE,
    ),
    # the compile gate
    Fault(
        "judge-record-names", GATE_FILE, "run_gate", "names left out of the gate's record",
        "sorted(compiled.digests)", "sorted(compiled.digests)[1:]", GATE,
    ),
    Fault(
        "judge-record-broken", GATE_FILE, "run_gate", "what broke a rule is recorded",
        "[] if problems else sorted", "[] if not problems else sorted", GATE,
    ),
    Fault(
        "judge-record-trusted", GATE_FILE, "Record.passed", "the record is never tried",
        'if d[0] != "0"', "", GATE,
    ),
    Fault(
        "judge-record-triton", GATE_FILE, "run_gate", "the same triton is not compared",
        "elif record.triton != triton.__version__:", "elif record.triton == triton.__version__:",
        GATE,
    ),
    Fault(
        "judge-trace-code", "tests/machine/launches.py", "Trace.launched",
        "a kernel's code is read at each launch",
        "if kernel.key not in self._read:", "if True:",
        only=("machine/test_loop_model.py::test_a_trace_has_the_code_of_each_kernel_once",),
    ),
    Fault(
        "judge-gate-digests", GATE_FILE, "compile_cases",
        "digests of one process alone", "*(found.digests for found in results)",
        "results[0].digests", GATE,
    ),
    Fault(
        "judge-gate-spills", "tests/machine/resources.py", "Kernel.problems",
        "spills on sm_90 alone",
        "self.arch in GATED and", 'self.arch == "sm_90" and', GATE,
    ),
    Fault(
        "judge-gate-faults", GATE_FILE, "broken_rules", "known miscompiles pass",
        "for fault in k.faults if", "for fault in () if", GATE,
    ),
    Fault(
        "judge-name-constants", "tools/aot.py", "specialisation",
        "a kernel's name leaves out its constants",
        "if isinstance(x, int) and not parameter.is_constexpr", "if isinstance(x, int)", GATE,
    ),
    Fault(
        "judge-name-kernel", "tools/aot.py", "specialisation",
        "a launch's name leaves out its kernel", "[function.__qualname__, *words]", "words", GATE,
    ),
    # the search for unknown hosts
    Fault(
        "judge-head-width", "swap/observe.py", "angles_for", "packed heads are three times as wide",
        "3 if len(names) == 1 else 1", "1", SEARCH,
    ),
    Fault(
        "judge-head-width-unknown", "swap/observe.py", "angles_for",
        "a head as wide as the module", "default=1)", "default=1) ** 0", SEARCH,
    ),
    Fault(
        "judge-rope-prefix", "swap/observe.py", "angles_for", "tables for the prefix too",
        "tokens - roles.prefix", "tokens", SEARCH,
    ),
    Fault(
        "judge-rope-row", "swap/hosts/attention.py", "ways_of_rope",
        "tables are never sine first", '("cos before sin", "sin before cos")',
        '("cos before sin", "cos before sin")', SEARCH,
    ),
    Fault(
        "judge-rope-name", "swap/observe.py", "angle_argument",
        "an argument named position_embeddings is no angles", "|position_emb", "", SEARCH,
    ),
]  # fmt: skip

ENTRIES, CHECKED = "verify/entries/", "verify/test_entries.py::test_"
ASKED = (f"{CHECKED}every_call_is_asked",)
CONFIGS = "ops/test_all_configs.py::test_"
LATE = "verify/test_isolated.py::test_"
RULE = "support/test_accuracy.py::test_"
FAULTS += [  # what the judges are asked, and with which numbers
    Fault(
        "judge-uncompiled-default", "ops/attention/configs.py", "_dq_fp32",
        "a default is a config that spills", "crowded and not _is_ampere", "crowded and _is_ampere",
        only=(
            "ops/test_attention_configs.py::"
            "test_attention_defaults_are_what_the_gate_compiled[attention_bwd_dq]",
        ),
    ),
    Fault(
        "judge-unreached", "tests/machine/ptx.py", "Ptx.successors",
        "code behind a jump is reached", "following if last.guard else []", "[*following]",
        only=("machine/test_loop_model.py::test_copies_are_fenced_before_a_product_reads_them",),
    ),
    Fault(
        "judge-roof-tiles", "bench/measure.py", "", "a roof of tiles that are not full",
        '"bf16": 8192', '"bf16": 8193', only=("test_bench.py::test_roofs_by_stand_in",),
    ),
    Fault(
        "judge-tower-heads", "bench/ops.py", "", "heads of another tower",
        "1536, 24, 4096", "1536, 25, 4096",
        only=("test_bench_counts.py::test_towers_of_gated_mlps_are_those_of_their_names",),
    ),
    Fault(
        "entry-uint8", f"{ENTRIES}patch_embed.py", "_patch_check", "check sees no bytes",
        "dict(uint8=True)", "dict(uint8=False)", ASKED,
    ),
    Fault(
        "entry-frozen", "tests/check/config_cases.py", "_rope", "each has the tables' gradient",
        "case(*head, frozen=TABLES) for", "case(*head) for", ASKED,
    ),
    Fault(
        "entry-layer-scale", f"{ENTRIES}arguments.py", "", "LayerScale's gradient is not looked at",
        '"layer_scale": Arg(usual=False)', '"layer_scale": Arg(usual=False, grad=False)', ASKED,
    ),
    Fault(
        "entry-activation", f"{ENTRIES}linear.py", "_linear_check", "check sees one activation",
        "dict(activation=name)", 'dict(activation="gelu")', ASKED,
    ),
    Fault(
        "entry-stored", f"{ENTRIES}linear.py", "", "check sees no stored activations",
        'Example(_mlp_at(v), "stored", dict(recompute=False))', 'Example(_mlp_at(v), "stored")',
        ASKED,
    ),
    Fault(
        "entry-mask", f"{ENTRIES}attention.py", "_sdpa_check", "check sees no boolean mask",
        '"boolean mask", boolean=True', '"boolean mask"', ASKED,
    ),
    Fault(
        "entry-split", f"{ENTRIES}attention.py", "_attention_check",
        "check sees no tokens past the one-pass backward", '{**one, "T": 260}', '{**one, "T": 26}',
        ASKED,
    ),
    Fault(
        "entry-gradients", "verify/op.py", "Op.inputs", "no gradient is looked at",
        "set(found if example.inference else example.frozen)", "set(found)", ASKED,
    ),
    Fault(
        "entry-heads", "verify/cases.py", "_vision_transformer", "check's model has other heads",
        "num_heads=v.H, ", "", (f"{CHECKED}the_model_of_check_is_as_its_sizes_say",),
    ),
    Fault(
        "entry-dropped", "verify/op.py", "Draw.kind", "no sample is dropped",
        "x[: len(x) - 1][:1] = 0", "pass",
        (f"{CHECKED}factors_of_drop_path_drop_a_sample_and_scale_the_others",),
    ),
    Fault(
        "entry-scale", "verify/op.py", "Draw.kind", "weights vanish", "fan_in(shape) ** -0.5",
        "fan_in(shape) ** -1.5", (f"{CHECKED}numbers_are_normal_and_products_keep_their_scale",),
    ),
    Fault(
        "entry-samples", "verify/op.py", "SampleShape.draw", "the first samples are kept",
        "torch.randperm(self[0] - self.kept, generator=generator)",
        "torch.arange(self[0] - self.kept)",
        (f"{CHECKED}samples_are_as_keep_samples_gives_them",),
    ),
    Fault(
        "entry-autocast", "verify/op.py", "in_precision", "nothing runs under autocast",
        "if autocast is None or any(", "if True or any(",
        (f"{CHECKED}in_precision_runs_under_autocast_but_for_the_oracle",),
    ),
    Fault(
        "entry-sizes", "verify/cases.py", "cases_on", "a GPU is checked at small sizes",
        'LARGE if device.type == "cuda" else SMALL', "SMALL", (f"{CHECKED}a_gpu_gets_real_sizes",),
    ),
    Fault(
        "judge-rms-floor", "verify/accuracy.py", "measure", "the RMS has the maximum's floor",
        "FLOOR_EPS * eps * scale", "FLOOR_EPS * eps * peak",
        (f"{RULE}the_floor_of_the_rms_is_of_the_rms",),
    ),
    Fault(
        "judge-upstream", "verify/accuracy.py", "Reference.__init__", "upstream gradients are ones",
        "torch.randn(o.shape, generator=generator)", "torch.ones(o.shape)",
        (f"{RULE}upstream_gradients_are_random",),
    ),
    Fault(
        "judge-zeros", "verify/accuracy.py", "Error.passed", "exact zeros fail",
        "self.max <= self.limit_max", "self.max < self.limit_max",
        (f"{RULE}zeros_that_are_exact_pass_a_limit_of_0",),
    ),
    Fault(
        "judge-orders", "verify/orders.py", "AnotherOrder.__init__", "each order is the first",
        "manual_seed(seed)", "manual_seed(0)",
        (f"{RULE}another_order_rounds_differently_and_is_the_same_function",),
    ),
    Fault(
        "judge-config-bits", "tests/check/all_configs.py", "run_config", "configs run once",
        "repeats=repeats", "repeats=1", (f"{CONFIGS}a_config_with_other_bits_at_each_run_fails",),
    ),
    Fault(
        "judge-config-keys", "tests/check/all_configs.py", "Reached.fits",
        "a config must fit every key",
        "return any(", "return all(",
        (f"{CONFIGS}a_config_fits_a_case_where_one_of_its_keys_does",),
    ),
    Fault(
        "judge-kept-dtype", "tests/check/selection.py", "_runs", "a dtype's pass for another's",
        'if case == f"{name}, {dtype}"', 'if case.startswith(f"{name}, ")',
        (f"{CONFIGS}kept_configs_of_one_dtype_are_not_another_dtypes",),
    ),
    Fault(
        "judge-kept-folders", "tests/check/results_cache.py", "sources_hash",
        "kept results outlive the kernels",
        '(ROOT / folder).rglob("*.py")', '(ROOT / folder).glob("*.py")',
        (f"{LATE}kept_lines_are_of_the_same_sources",),
    ),
    Fault(
        "bench-sources", "tests/check/results_cache.py", "", "a change of bench is none",
        '"bench", "tests/check")', '"tests/check")',
        ("test_bench_session.py::test_rows_say_which_code_has_run",),
    ),
    Fault(
        "judge-dead-process", "tests/check/worker.py", "results_of",
        "a process that died has passed",
        "outcome.failure is not None and results[-1].passed", "False",
        (f"{LATE}what_a_process_said_before_it_died_is_no_result",),
    ),
    Fault(
        "judge-lost-device", "tests/check/worker.py", "main", "a lost device goes on",
        "return LOST", "pass", (f"{LATE}a_process_ends_with_its_device",),
    ),
    Fault(
        "judge-rest", "tests/check/worker.py", "rest_of", "what another table tried is left out",
        '(entry["table"], i) not in tried', "i not in {index for _, index in tried}",
        (f"{LATE}what_is_left_of_one_table_is_not_what_another_has_tried",),
    ),
    Fault(
        "judge-noise-default", "measure/turns.py", "beats",
        "a gain within the noise of the default's times counts",
        "for s in (new, old)", "for s in (new,)",
        ("test_measure.py::test_a_gain_must_be_larger_than_the_noise_of_both",),
    ),
    Fault(
        "judge-vit-lacks", "bench/measure.py", "model_errors",
        "a gradient that a model lacks is right",
        "torch.zeros_like(wanted)", "wanted",
        ("test_bench_model.py::test_a_gradient_that_a_model_lacks_counts_as_zeros",),
    ),
    Fault(
        "judge-cudnn-left", "verify/accuracy.py", "convolutions_like_matmuls",
        "a comparison leaves cuDNN's TF32 on", "allow_tf32 = former", "allow_tf32 = True",
        ("support/test_accuracy.py::test_the_yardstick_convolves_as_fp32_products_do",),
    ),
    Fault(
        "judge-strides", "verify/accuracy.py", "_run",
        "a function is judged on contiguous inputs alone",
        "x.detach() if to is None", "x.detach().contiguous() if to is None",
        ("support/test_accuracy.py::test_a_function_gets_the_strides_of_the_inputs",),
    ),
    Fault(
        "judge-causal", "verify/entries/attention.py", "", "no causal attention is asked for",
        'is_causal=getattr(s, "is_causal", False)', "is_causal=False",
        ("verify/test_entries.py::test_what_sizes_decide_reaches_the_call",),
    ),
]  # fmt: skip
