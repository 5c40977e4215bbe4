"""Faults in what a model tells of itself, in the one decision of a forward and its recomputation,
and in what the commands other than `train` say."""

from .fault import Fault

TESTS = "swap/test_status.py::"
RECOMPUTE = "runtime/recompute.py"
DISPATCH = "runtime/dispatch.py"
STATUS = "swap/status.py"
REPORT = "swap/report.py"
CHECK, COMPILE = "commands/check.py", "commands/compile.py"
DEV_CHECK = "tests/check/__main__.py"
BESIDE = "swap/errors.py"
TUNE, MODELS = "commands/tune.py", "commands/models.py"
SWEPT, MACHINE = "tests/model_coverage/", "tests/machine/"
COMPARE, COVERAGE, CUT = f"{SWEPT}compare.py", f"{SWEPT}sweep.py", f"{SWEPT}shrink.py"
GATE, RESOURCES, RANK = f"{MACHINE}gate.py", f"{MACHINE}table.py", f"{MACHINE}rank.py"
STEPS, ATTENTION_STEPS = f"{MACHINE}steps.py", f"{MACHINE}attention_steps.py"
OPTIONS, CLI = "commands/options.py", "commands/cli.py"
ATTENTION_MAPS = "commands/attention_maps.py"
_CHECK, _BESIDE = "commands/test_check.py::", "model_coverage/test_compare.py::"
_DEV_CHECK = "check/test_command.py::"
_COVERAGE, _GATE = "model_coverage/test_sweep.py::", "machine/test_gate.py::"
_CLI, _OPTIONS = "commands/test_cli.py::", "commands/test_options.py::"
_STEPS = "machine/test_steps.py::"


def _way(watcher: str, reentrant: bool) -> tuple[str]:
    return (f"{TESTS}test_a_recomputation_goes_its_forwards_way[{watcher}-{reentrant}]",)


def _our_own(watcher: str) -> tuple[str]:
    name = "test_a_recomputation_of_our_own_model_goes_its_forwards_way"
    return (f"{TESTS}{name}[False-{watcher}]",)


def _test(name: str) -> tuple[str]:
    return (TESTS + name,)


COLLECTS = _test("test_a_collector_counts_while_it_collects")
NEXT = _test("test_status_tells_the_next_call")
LAST = _test("test_watch_tells_the_last_call")
CALLED = _test("test_watch_tells_of_a_block_that_calls_fused_parts")
OURS = _test("test_our_own_modules_are_fused")
MOVED = ("swap/test_swap.py::test_report_counts_what_pytorch_moves_inside_blocks",)
FLOPS = ("swap/test_recognise.py::test_the_report_counts_the_flops_of_a_block",)
FAULTS: list[Fault] = [
    Fault(
        "status-collector-empty", "runtime/plain.py", "_watches",
        "a collector that collects nothing counts",
        "bool(collected) and", "collected is not None or",
        only=COLLECTS,
    ),
    Fault(
        "status-collector-deaf", "runtime/plain.py", "_watches",
        "a collector that collects does not count", "return bool(collected) and",
        "return False and",
        only=_test("test_a_collector_of_the_hooks_own_key_counts"),
    ),
    Fault(
        "status-module-forgets", "swap/hosts/fused.py", "Fused.fused_watched",
        "a module decides anew in its recomputation", "now or recompute.noted", "False",
        only=_way("another package's mode", False),
    ),
    Fault(
        "status-module-forgets-its-dropout", "swap/hosts/fused.py", "Fused.fused_watched",
        "the same, in a reentrant checkpoint", "now or recompute.noted", "False",
        only=_test("test_a_recomputation_draws_its_forwards_dropout[True]"),
    ),
    Fault(
        "status-child-forgets", "runtime/plain.py", "is_hooked",
        "a hook on a child that was there in the forward only", "now or recompute.noted", "False",
        only=_way("a hook on a child", False),
    ),
    Fault(
        "status-backend-forgets", DISPATCH, "_then", "an op's backend is that of the recomputation",
        "return looked, \"auto\" if is_torch else \"torch\"", "return looked, now",
        only=_our_own("the torch backend"),
    ),
    Fault(
        "status-route-forgets", DISPATCH, "_then", "an op's route is that of the recomputation",
        "looked = recompute.remembered", "_ = recompute.remembered",
        only=_our_own("a profiler"),
    ),
    Fault(
        "status-backend-inside", RECOMPUTE, "chosen_inside",
        "a backend chosen inside a checkpoint passes for one around it",
        "chosen.set((*forwards, *reruns))", "chosen.set(())",
        only=_test("test_a_backend_chosen_inside_a_checkpoint_holds_there"),
    ),
    Fault(
        "status-backward-watched", RECOMPUTE, "remembered",
        "what watches the backward only turns a recomputation",
        "now = False  # its", "now = True  # its",
        only=_way("another package's mode", False),
    ),
    Fault(
        "status-reentrant-unseen", RECOMPUTE, "enclosing", "reentrant ones are not looked for",
        "_add_functions(forwards, reruns)", "pass",
        only=_test("test_a_recomputation_draws_its_forwards_dropout[True]"),
    ),
    Fault(
        "status-reentrant-rerun", RECOMPUTE, "",
        "a reentrant recomputation goes the way of who watches the backward",
        "compat.node_class(checkpoint.CheckpointFunction) or ()", "()",
        only=_test("test_a_recomputation_draws_its_forwards_dropout[True]"),
    ),
    Fault(
        "status-outer-unseen", "runtime/compat.py", "hooks_on_saves",
        "only the innermost hooks are looked at",
        "            found.append(pair)\n", "            found.append(pair)\n            break\n",
        only=_test("test_checkpoints_in_a_checkpoint_go_their_forwards_way[False]"),
    ),
    Fault(
        "status-hooks-turned", "runtime/compat.py", "hooks_on_saves",
        "saving hooks come back in another order",
        "in reversed(found)", "in found",
        only=_test("test_checkpoints_in_a_checkpoint_go_their_forwards_way[False]"),
    ),
    Fault(
        "status-recomputation-counts", STATUS, "_Listener.call",
        "a recomputation counts as a call", " or in_backward()", "",
        only=_test("test_a_recomputation_is_no_call[False]"),
    ),
    Fault(
        "status-global-hook", STATUS, "why_now", "a global hook is not told",
        "if is_watched_everywhere()", "if False", only=NEXT,
    ),
    Fault(
        "status-attention-hook", STATUS, "why_now", "a hook on attention is not told",
        " or _why_hooked(module)", "", only=NEXT,
    ),
    Fault(
        "status-verdict", STATUS, "why_now", "a verdict is not told",
        "verdict_of(module) or ", "", only=NEXT,
    ),
    Fault(
        "status-backend", STATUS, "status", "the backend is not told",
        'found.pytorch = reason or ""', 'found.pytorch = ""', only=NEXT,
    ),
    Fault(
        "status-lora", REPORT, "_Maker.flops", "a Linear that is called counts as fused",
        " and is_plain(module))", ")", only=_test("test_status_tells_of_lora"),
    ),
    Fault(
        "status-argument", STATUS, "_why_not_taken", "the argument that sends a call to its host",
        "v is not defaults.get(n) and", "v is defaults.get(n) and", only=LAST,
    ),
    Fault(
        "status-last-call", STATUS, "_Listener._count", "calls are not counted",
        "former.calls if former", "0 if former", only=LAST,
    ),
    Fault(
        "status-op-pytorch", DISPATCH, "choose_route", "an op by PyTorch passes for a kernel",
        "reason_for_torch(first, unsupported)))", "None))", only=LAST,
    ),
    Fault(
        "status-never-ends", STATUS, "watch", "a watch goes on behind its with",
        "if x is not listener", "", only=_test("test_watch_changes_nothing_and_ends"),
    ),
    Fault(
        "status-compiles-anew", DISPATCH, "choose_route",
        "watching a compiled module compiles it anew",
        "not compat.is_dynamo_compiling() and listeners",
        "listeners and not compat.is_dynamo_compiling()",
        only=_test("test_watch_of_wrapped_and_of_compiled_models"),
    ),
    Fault(
        "status-compiled", STATUS, "_is_compiled", "a compiled module passes for one not called",
        '"_orig_mod" in m._modules', "False",
        only=_test("test_watch_of_wrapped_and_of_compiled_models"),
    ),
    Fault(
        "status-graph", STATUS, "_made", "what a graph loses is not told",
        "name in in_graphs and not (reason or call.calls)", "False",
        only=_test("test_what_a_graph_loses_is_told"),
    ),
    Fault(
        "status-graph-called", STATUS, "_made", "a call outside a graph passes for one inside",
        "(reason or call.calls)", "reason", only=_test("test_what_a_graph_loses_is_told"),
    ),
    Fault(
        "status-graph-host", STATUS, "_made", "why a block in a graph runs its host is not told",
        '("compiled", ways[n][1])', '("compiled", "")',
        only=_test("test_what_a_graph_loses_is_told"),
    ),
    Fault(
        "status-graph-low", REPORT, "lost_in_graphs", "that a graph rebuilds nothing is not told",
        '(memory == "low")', "False", only=_test("test_what_a_graph_loses_is_told"),
    ),
    Fault(
        "status-ours-swapped", "swap/apply.py", "_Swap.decide",
        "swap_in changes our own PatchEmbed",
        "is_ours(module) or (is_ours(above) and not module._modules)", "False", only=OURS,
    ),
    Fault(
        "status-ours-unfused", REPORT, "_Maker.runs_fused", "our own modules count as PyTorch's",
        "is None", "is None and isinstance(module, Fused)", only=OURS,
    ),
    Fault(
        "status-ours-ops", STATUS, "_Listener.op", "ops of our own modules belong to nobody",
        "if owner is not None:", "if False:", only=OURS,
    ),
    Fault(
        "status-traced", STATUS, "why_now", "a tracer is not told", "if is_traced():",
        "if False:", only=NEXT,
    ),
    Fault(
        "status-recomputed-ops", STATUS, "_Listener.op",
        "ops of our own modules count again in a recomputation", "if in_backward():", "if False:",
        only=_test("test_a_recomputation_of_our_own_block_is_no_call[False]"),
    ),
    Fault(
        "status-other-thread", STATUS, "_Listener.__init__",
        "an op of another thread passes for a module's", "self.running = threading.local()",
        "self.running = type('Running', (), {})()",
        only=_test("test_watch_takes_no_op_of_another_thread_for_a_modules"),
    ),
    Fault(
        "status-called-part", STATUS, "_Listener.call",
        "ops behind a part that is called are lost", "            stack.pop()", "            pass",
        only=LAST,
    ),
    Fault(
        "status-called-block", "swap/hosts/branch.py", "Branch.called",
        "the ops of a norm behind a branch are not its block's",
        "fused.normed(item, y, False)[0]", "item(y)", only=CALLED,
    ),
    Fault(
        "report-moved", REPORT, "_Maker.count",
        "the share of what PyTorch moves, of the rest alone",
        "moved = sum(self.moved.values())", "moved = 0", only=MOVED,
    ),
    Fault(
        "report-moved-norms", REPORT, "_Maker.flops", "a norm reads and writes nothing",
        "2 * width_of(module) * counts", "width_of(module) * counts", only=MOVED,
    ),
    Fault(
        "report-inlined", REPORT, "_Maker.count", "half of an inline attention's FLOPs",
        "4 * report.tokens**2", "2 * report.tokens**2", only=FLOPS,
    ),
    Fault(
        "report-packed", REPORT, "_Maker.flops", "half of nn.MultiheadAttention's projection",
        "sum(2 * p.numel() * rows", "sum(p.numel() * rows", only=FLOPS,
    ),
    Fault(
        "report-stack", REPORT, "in_stack", "torchvision's layers are no stack",
        'name.replace("_", ".").split(".")', 'name.split(".")',
        only=("swap/test_swap.py::test_report_counts_the_flops_of_a_vit_b",),
    ),
    Fault(
        "report-depending", REPORT, "SwapReport.__str__", "another share is told",
        "share = self.depending_flops / self.flops", "share = self.fused_flops / self.flops",
        only=(
            "swap/test_swap_changes.py::"
            "test_the_report_does_not_count_what_depends_on_the_caller",
        ),
    ),
    Fault(
        "report-level", REPORT, "SwapReport.level", "a lone attention beside blocks is a block",
        's.level == "attention" and', "False and",
        only=("swap/test_swap.py::test_only_and_skip",),
    ),
    Fault(
        "status-rejects", STATUS, "_modules_of", "anything is taken for a model",
        "not isinstance(model, nn.Module)", "False", only=_test("test_status_and_watch_reject"),
    ),
    # The other commands.
    Fault(
        "report-headless", "commands/console.py", "make_table", "figures without a header",
        'add_column(column, justify="right")', 'add_column(justify="right")',
        only=(_CLI + "test_a_table_has_columns_of_words_then_of_figures",),
    ),
    Fault(
        "report-names", f"{SWEPT}model_zoo.py", "hf_names", "classes without a forward are models",
        'and "pixel_values" in inspect.signature(value.forward).parameters', "",
        only=(_COVERAGE + "test_models_of_images_are_found_in_the_sources",),
    ),
    Fault(
        "report-cut-large", CUT, "_hf_candidates", "cut models see images of any size",
        " and own <= LARGEST_IMAGE", "",
        only=(_COVERAGE + "test_images_of_cut_models_are_small[SamVisionModel]",),
    ),
    Fault(
        "tune-elsewhere", "runtime/files.py", "write_atomically",
        "a table is written on another disk first",
        'path.with_name(f".{path.name}.tmp")', 'Path(f"/tmp/.{path.name}.tmp")',
        only=("tools/test_tuning.py::test_a_failed_write_leaves_the_former_table",),
    ),
    Fault(
        "report-check-gradients", CHECK, "", "no gradient in the table",
        "== d] for d in (False, True)]", "== d] for d in (False,)]",
        only=(_CHECK + "test_the_row_of_a_case_is_the_one_nearest_its_limit",),
    ),
    Fault(
        "report-check-nan", CHECK, "print_json", "NaN in JSON",
        "json.dumps(finite(content))", "json.dumps(content)",
        only=(_CHECK + "test_check_prints_a_table_and_json",),
    ),
    Fault(
        "report-check-share", DEV_CHECK, "", "a table shows its best run",
        "worst = max((run.share", "worst = min((run.share",
        only=(_DEV_CHECK + "test_the_row_of_a_table_has_its_worst_run",),
    ),
    Fault(
        "report-check-cut", DEV_CHECK, "_run", "a failure hides what was left out",
        'CUT_SHORT if wanted.left_out else int(not passed)',
        'int(not passed) or (CUT_SHORT if wanted.left_out else 0)',
        only=(_DEV_CHECK + "test_what_time_left_out_is_neither_right_nor_wrong",),
    ),
    Fault(
        "report-check-timeout", DEV_CHECK, "", "--case-timeout ignored",
        "jobs, arguments.case_timeout, kept",
        "jobs, CASE_TIMEOUT, kept",
        only=(_DEV_CHECK + "test_what_check_is_told_reaches_the_cases",),
    ),
    Fault(
        "report-check-jobs", CHECK, "selected", "--jobs ignored",
        "return device, dtypes, arguments.jobs",
        "return device, dtypes, 0",
        only=(_DEV_CHECK + "test_what_check_is_told_reaches_the_cases",),
    ),
    Fault(
        "report-check-faults", DEV_CHECK, "_run", "a selection of configs always passes",
        '    passed = not failed',
        '    passed = every or not failed',
        only=(_DEV_CHECK + "test_what_time_left_out_is_neither_right_nor_wrong",),
    ),
    Fault(
        "report-beside-oracle", "swap/compare.py", "", "the oracle is in the model's dtype",
        "oracle = run_step(copy.deepcopy(model).double(), inputs, seed)",
        "oracle = run_step(copy.deepcopy(model), inputs, seed)",
        only=(_BESIDE + "test_errors_are_against_float64_and_the_limit_is_near",),
    ),
    Fault(
        "report-beside-floors", BESIDE, "", "the floor is a hundred times wider",
        "2 * torch.finfo(dtype).eps * peaks", "200 * torch.finfo(dtype).eps * peaks",
        only=(_BESIDE + "test_errors_are_against_float64_and_the_limit_is_near",),
    ),
    Fault(
        "report-beside-autocast", BESIDE, "", "autocast ignored",
        "torch.autocast(device, call.autocast, enabled=call.autocast is not None)",
        "torch.autocast(device, call.autocast, enabled=False)",
        only=(_BESIDE + "test_errors_are_against_float64_and_the_limit_is_near",),
    ),
    Fault(
        "report-beside-upstream", BESIDE, "", "upstream gradients are ones",
        "torch.randn(x.shape, generator=numbers).to(x)", "torch.ones_like(x)",
        only=(_BESIDE + "test_a_wrong_gradient_of_the_images_is_told",),
    ),
    Fault(
        "report-beside-train", COMPARE, "", "dropout is off in the comparison",
        "host = copy.deepcopy(model).double().train()",
        "host = copy.deepcopy(model).double().eval()",
        only=(_BESIDE + "test_dropout_is_compared",),
    ),
    Fault(
        "report-beside-images", BESIDE, "", "the images' gradient is not compared",
        'wanted |= {f"dinput{i}": x for i, x in enumerate(given) if x.requires_grad}',
        "pass",
        only=(_BESIDE + "test_a_wrong_gradient_of_the_images_is_told",),
    ),
    Fault(
        "report-beside-randomize", COMPARE, "", "parameters stay at their initial values",
        "0.2 if p.ndim < 2 else 0.05", "0.0",
        only=(_BESIDE + "test_randomize_moves_every_parameter",),
    ),
    Fault(
        "report-beside-layer", BESIDE, "", "one layer is all",
        '".".join(parts[: places[-1] + 1] if places else parts[:-1])', '"all"',
        only=(_BESIDE + "test_a_layer_is_a_block_or_a_module",),
    ),
    Fault(
        "report-cov-status", COVERAGE, "", "a wrong model is no failure",
        "return 1 if wrong else 0", "return 0",
        only=(_COVERAGE + "test_the_command_ends_with_1_where_a_model_is_wrong",),
    ),
    Fault(
        "report-cov-backends", COVERAGE, "", "the kernels are not run",
        "with backend(chosen):", "with backend('torch'):",
        only=(_COVERAGE + "test_narrow_models_run_through_each_backend_off_their_first_weights",),
    ),
    Fault(
        "report-cov-parts", COVERAGE, "", "what failed stands for others",
        'if found in ("yes", "float64"):', "if found:",
        only=(_COVERAGE + "test_parts_that_failed_are_run_again",),
    ),
    Fault(
        "report-cov-blocks", COVERAGE, "", "levels of one host are those of all",
        "for row in found if row.host == host)", "for row in found)",
        only=(_COVERAGE + "test_the_table_has_a_row_for_each_model",),
    ),
    Fault(
        "report-cov-eval", COVERAGE, "", "initial values hide an error",
        "key = fingerprint(randomize(model).eval(), inputs)",
        "key = fingerprint(model.eval(), inputs)",
        only=(_COVERAGE + "test_narrow_models_run_through_each_backend_off_their_first_weights",),
    ),
    Fault(
        "report-cov-runs", COVERAGE, "", "as another is counted by name",
        '"as another" if word.startswith("as ") else word', "word",
        only=(_COVERAGE + "test_the_table_has_a_row_for_each_model",),
    ),
    Fault(
        "report-cut-drop", CUT, "", "cut models drop no path",
        "DROP_PATH = 0.3", "DROP_PATH = 0.0",
        only=(_COVERAGE + "test_cut_models_drop_paths",),
    ),
    Fault(
        "report-gate-errors", GATE, "", "what does not compile passes",
        "problems = compiled.errors + broken_rules(kernels)", "problems = broken_rules(kernels)",
        only=(_GATE + "test_what_does_not_compile_is_a_problem",),
    ),
    Fault(
        "report-res-new", RESOURCES, "", "fewer registers excuse more memory",
        "if any(new > old for _, old, new in changes)",
        "if all(new > old for _, old, new in changes)",
        only=("machine/test_table.py::test_what_is_more_than_the_table_says",),
    ),
    Fault(
        "report-res-worst", RESOURCES, "", "spills of one specialisation alone",
        "spills=max(row.spills, kernel.spills)", "spills=row.spills",
        only=("machine/test_table.py::test_a_row_is_the_worst_of_its_specialisations",),
    ),
    Fault(
        "report-rank-kernel-us", RANK, "", "one kernel of a call is timed",
        "round(sum(one.modelled.us for one in row.launches), 1)",
        "round(max(one.modelled.us for one in row.launches), 1)",
        only=("machine/test_rank.py::test_a_row_of_a_ranking_sums_its_kernels",),
    ),
    Fault(
        "report-rank-regs", RANK, "", "the fewest registers are shown",
        '"registers": max(', '"registers": min(',
        only=("machine/test_rank.py::test_a_row_of_a_ranking_sums_its_kernels",),
    ),
    Fault(
        "report-rank-warps", RANK, "", "the most warps are shown",
        '"warps_per_sm": min(', '"warps_per_sm": max(',
        only=("machine/test_rank.py::test_a_row_of_a_ranking_sums_its_kernels",),
    ),
    Fault(
        "report-compile-problems", COMPILE, "", "broken rules are not printed",
        'print(*problems, sep="\\n", end="\\n" if problems else "")\n    return 0',
        "return 0",
        only=(_CLI + "test_what_compile_is_told_reaches_the_step",),
    ),
    Fault(
        "report-compile-infer", COMPILE, "", "--infer ignored",
        "train=args.train)", "train=True)",
        only=(_CLI + "test_what_compile_is_told_reaches_the_step",),
    ),
    Fault(
        "report-compile-img", COMPILE, "", "--img-size ignored",
        "img_size=args.img_size)", "img_size=None)",
        only=(_CLI + "test_what_compile_is_told_reaches_the_step",),
    ),
    Fault(
        "report-tune-wrong", TUNE, "", "a wrong config is a wrong default",
        "wrong += any(config == found.default for config, _ in found.refused)",
        "wrong += bool(found.refused)",
        only=("tools/test_tuning.py::test_a_wrong_config_is_no_wrong_default",),
    ),
    Fault(
        "report-tune-gain", TUNE, "", "the gain is of the winner's time",
        "100.0 * (1.0 - found.winner_us / found.default_us)",
        "100.0 * (found.default_us / found.winner_us - 1.0)",
        only=("tools/test_tuning.py::test_a_wrong_config_is_no_wrong_default",),
    ),
    Fault(
        "report-one-image", ATTENTION_STEPS, "", "no causal attention of one image",
        "attend(is_causal=True),\n            attend(is_causal=True, dropout_p=0.1),\n "
        "           attend(torch.empty(T, T, dtype=torch.bool), dropout_p",
        "attend(),\n            attend(is_causal=True, dropout_p=0.1),\n           "
        " attend(torch.empty(T, T, dtype=torch.bool), dropout_p",
        only=(_STEPS + "test_attention_of_one_image",),
    ),
    Fault(
        "report-steps-learnt", ATTENTION_STEPS, "", "no dropout beside a learnt bias",
        "for dropout_p in (0.0, 0.1) if D <= 64 else (0.0,):", "for dropout_p in (0.0,):",
        only=(_STEPS + "test_a_learnt_bias",),
    ),
    Fault(
        "report-steps-noargs", STEPS, "", "gated MLPs are not compiled",
        '"gated MLP": _gated_mlp,', '"gated MLP": _rope,',
        only=(_STEPS + "test_each_case_is_there_once",),
    ),
    Fault(
        "report-run-step-loss", MODELS, "", "fp16 is bf16",
        "DTYPES[dtype], enabled", "torch.bfloat16, enabled",
        only=(_OPTIONS + "test_one_step_is_in_its_dtype",),
    ),
    Fault(
        "report-hf-chans", MODELS, "", "--in-chans ignored",
        '"in_chans": "num_channels", ', "",
        only=(_OPTIONS + "test_images_of_one_channel_and_of_no_square",),
    ),
    Fault(
        "report-shape-hw", MODELS, "", "height and width change places",
        "return channels, height, width", "return channels, width, height",
        only=(_OPTIONS + "test_images_of_one_channel_and_of_no_square",),
    ),
    Fault(
        "report-dev-index", OPTIONS, "", "a GPU too many is taken",
        "(device.index or 0) >= seen", "(device.index or 0) > seen",
        only=(_OPTIONS + "test_which_gpu",),
    ),
    Fault(
        "report-cli-blas", CLI, "", "the user's threads of BLAS are overridden",
        '{"OPENBLAS_NUM_THREADS": "1", **os.environ', '{**os.environ, "OPENBLAS_NUM_THREADS": "1"',
        only=(_CLI + "test_one_thread_of_blas_unless_the_user_says_otherwise",),
    ),
    Fault(
        "report-maps-mean", ATTENTION_MAPS, "", "pixels are from 0 to 1 less 1",
        "mean = std = (0.5,) * in_chans", "mean = std = (1.0,) * in_chans",
        only=(_CLI + "test_the_pixels_that_a_named_model_sees",),
    ),
    Fault(
        "report-maps-timm", ATTENTION_MAPS, "", "timm's normalization ignored",
        'mean, std = settings["mean"], settings["std"]', "pass",
        only=(_CLI + "test_the_pixels_that_a_named_model_sees",),
    ),
    Fault(
        "report-maps-loaded", ATTENTION_MAPS, "", "the weights are not read",
        '    load_into(model, str(weights))',
        '    pass',
        only=(_CLI + "test_the_pixels_that_a_named_model_sees",),
    ),
    Fault(
        "report-maps-title", ATTENTION_MAPS, "", "each drawing is of the first layer",
        'figures.draw_attention(image, [layer],',
        'figures.draw_attention(image, layers[:1],',
        only=(_CLI + "test_each_layer_of_an_image_is_drawn",),
    ),
]  # fmt: skip

TUNING = "tools/tuning.py"
RANKING, CODE_FAULTS = f"{MACHINE}ranking.py", f"{MACHINE}faults.py"
LOOPS, USEFUL = f"{MACHINE}loop_model.py", f"{MACHINE}useful.py"


def _tuning(name: str) -> tuple[str]:
    return (f"tools/test_tuning.py::test_{name}",)


def _model(name: str) -> tuple[str]:
    return (f"machine/test_loop_model.py::test_{name}",)


FAULTS += [  # what tools say of kernels
    Fault(
        "tune-noise", "measure/turns.py", "beats", "a gain as large as the noise wins",
        "gain > max(", "gain >= max(", only=_tuning("the_default_stays_within_the_noise"),
    ),
    Fault(
        "tune-best", TUNING, "decide", "the last config that is faster wins",
        "ratio < best", "ratio > 0", only=_tuning("of_two_that_are_faster_the_faster_wins"),
    ),
    Fault(
        "tune-wrong-default", TUNING, "decide", "where the default is wrong, the last config wins",
        "(default_is_wrong or beats(ours, defaults)) and (best is None or ratio < best)",
        "default_is_wrong or (beats(ours, defaults) and (best is None or ratio < best))",
        only=_tuning("a_wrong_default_loses_to_the_fastest_right_config"),
    ),
    Fault(
        "tune-counts", TUNING, "_step_us", "a call counts once",
        "count * timer(call)", "timer(call)", only=_tuning("times_are_of_all_calls_of_a_step"),
    ),
    Fault(
        "tune-order", TUNING, "tune", "what takes least is tuned first",
        "-share[c]", "share[c]", only=_tuning("what_takes_most_of_a_step_is_tuned_first"),
    ),
    Fault(
        "tune-resume", "commands/tune.py", "run_tuning", "what a former run decided is tuned again",
        "done=done", "done=()", only=_tuning("it_goes_on_where_a_former_run_ended"),
    ),
    Fault(
        "tune-resume-cut", "commands/tune.py", "run_tuning",
        "what the time cut short counts as decided", "if entry.complete", "if entry",
        only=_tuning("it_goes_on_where_a_former_run_ended"),
    ),
    Fault(
        "sweep-gate", "commands/sweep.py", "rows_of", "a speed-up stands beside wrong numbers",
        "outcome if ours_ms else every[0].outcome", "every[0].outcome",
        only=("swap/test_compare_models.py::test_the_sweep_draws_ours_over_the_best_sdpa",),
    ),
    Fault(
        "sweep-best", "commands/sweep.py", "rows_of", "ours stands over the slowest SDPA",
        "best = min(ms", "best = max(ms",
        only=("swap/test_compare_models.py::test_the_sweep_draws_ours_over_the_best_sdpa",),
    ),
    Fault(
        "tune-table", TUNING, "tune", "the user's table is gone afterwards",
        "install(here, None)", "pass",
        only=_tuning("the_users_own_table_is_in_force_again_afterwards"),
    ),
    Fault(
        "replay-autocast", "tools/replay.py", "Replay._called", "a replay leaves autocast out",
        "self.call.autocast)", "None)", only=_tuning("a_call_is_noted_as_it_was_asked"),
    ),
    Fault(
        "aot-driver-stays", "tools/aot.py", "tracing", "after a compilation nothing launches",
        "driver.set_active(former_driver)", "driver",
        only=("tools/test_aot.py::test_aot_compiles_what_a_step_launches",),
    ),
    Fault(
        "replay-raised", "tools/replay.py", "noting", "after a call that raised none is noted",
        "            try:\n                return function(*args, **kwargs)\n"
        "            finally:\n                depth -= 1",
        "            result = function(*args, **kwargs)\n            depth -= 1\n"
        "            return result",
        only=_tuning("a_call_is_noted_as_it_was_asked"),
    ),
    Fault(
        "replay-grad", "tools/replay.py", "_noted", "no_grad is not noted",
        "value.requires_grad and torch.is_grad_enabled()", "value.requires_grad",
        only=_tuning("a_call_is_noted_as_it_was_asked"),
    ),
    Fault(
        "model-special", LOOPS, "unit_cycles", "special functions at twice their rate",
        "8.0 * counts.special", "4.0 * counts.special", only=_model("each_unit_takes_its_rate"),
    ),
    Fault(
        "model-hbm", LOOPS, "launch_time", "memory at half its rate", "roof.hbm * 1e-3",
        "roof.hbm * 2e-3", only=_model("a_launch_takes_its_waves_its_bytes_and_its_longest_part"),
    ),
    Fault(
        "model-copies", LOOPS, "_work", "a warp's copies are a thread's", "32 * run.copied",
        "run.copied", only=_model("the_work_of_a_launch_is_that_of_its_programs"),
    ),
    Fault(
        "model-library", RANKING, "trace_time", "the library's products cost nothing",
        "return library + sum(", "return sum(",
        only=_model("the_time_of_a_trace_is_of_kernels_and_library"),
    ),
    Fault(
        "model-useful", USEFUL, "", "the products of dK and dV are fewer",
        '"attention_bwd_dkdv": _attention(4)', '"attention_bwd_dkdv": _attention(3)',
        only=_model("useful_products_are_those_of_the_mathematics"),
    ),
    Fault(
        "gate-all-waited", CODE_FAULTS, "_reads_before_fence", "wait_group 0 leaves copies",
        '((), ("0",))', "((),)", only=_model("copies_are_fenced_before_a_product_reads_them"),
    ),
    Fault(
        "gate-shared", "tools/aot.py", "", "a block may take 1 KB more than there is",
        'Target("sm_89", 128, 99 * KB', 'Target("sm_89", 128, 100 * KB',
        only=("machine/test_resources.py::test_limits_are_the_programming_guides",),
    ),
    Fault(
        "sass-uniform", f"{MACHINE}sass.py", "_with_target", "a uniform branch always jumps",
        "one.operands.replace(target[0], hex(places[target[1]]))", "hex(places[target[1]])",
        only=("machine/test_machine_code.py::test_a_branch_under_a_predicate_may_fall_through",),
    ),
    Fault(
        "hub-identity", "tests/hub/layout.py", "write_layout", "two builds have one identity",
        "p.encode() + _digest(c)", "p.encode()",
        only=("hub/test_hub.py::test_another_content_is_another_build",),
    ),
    Fault(
        "watch-ends-all", "swap/status.py", "watch", "the end of a watch ends those around it",
        "tuple(x for x in dispatch.listeners if x is not listener)", "()",
        only=("swap/test_status.py::"
              "test_watch_sees_the_model_that_it_was_given_and_all_threads",),
    ),
]  # fmt: skip
