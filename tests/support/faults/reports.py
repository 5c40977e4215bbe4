"""Faults in what a model tells of itself, and in the one decision of a forward and its
recomputation."""

from .fault import Fault

TESTS = "swap/test_status.py::"
RECOMPUTE = "runtime/recompute.py"
DISPATCH = "runtime/dispatch.py"
STATUS = "swap/status.py"
REPORT = "swap/report.py"


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
OURS = _test("test_our_own_modules_are_fused")
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
        "status-global-hook", STATUS, "_why_watched", "a global hook is not told",
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
        "status-lora", "swap/report.py", "_flops", "a Linear that is called counts as fused",
        "(covered and is_plain(module))", "covered", only=_test("test_status_tells_of_lora"),
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
        "status-op-pytorch", DISPATCH, "route", "an op by PyTorch passes for a kernel",
        "reason_for_torch(first, unsupported)))", "None))", only=LAST,
    ),
    Fault(
        "status-never-ends", STATUS, "watch", "a watch goes on behind its with",
        "if x is not listener", "", only=_test("test_watch_changes_nothing_and_ends"),
    ),
    Fault(
        "status-compiles-anew", DISPATCH, "route", "watching a compiled module compiles it anew",
        "not _compiling() and listeners", "listeners and not _compiling()",
        only=_test("test_watch_of_wrapped_and_of_compiled_models"),
    ),
    Fault(
        "status-compiled", STATUS, "_is_compiled", "a compiled module passes for one not called",
        '"_orig_mod" in m._modules', "False",
        only=_test("test_watch_of_wrapped_and_of_compiled_models"),
    ),
    Fault(
        "status-ours-swapped", "swap/apply.py", "swap_in", "swap_in changes our own PatchEmbed",
        "is_ours(module) or (is_ours(above) and not module._modules)", "False", only=OURS,
    ),
    Fault(
        "status-ours-unfused", REPORT, "_runs_fused", "our own modules count as PyTorch's",
        " or is_ours(module)", "", only=OURS,
    ),
    Fault(
        "status-ours-ops", STATUS, "_Listener.op", "ops of our own modules belong to nobody",
        "if owner is not None:", "if False:", only=OURS,
    ),
    Fault(
        "status-rejects", STATUS, "_modules_of", "anything is taken for a model",
        "not isinstance(model, nn.Module)", "False", only=_test("test_status_and_watch_reject"),
    ),
]  # fmt: skip

TUNING, RANK, TOOL_FAULTS = "tools/tuning.py", "tools/rank.py", "tools/faults.py"
LOOPS, USEFUL = "tools/loop_model.py", "tools/useful.py"


def _tuning(name: str) -> tuple[str]:
    return (f"tools/test_tuning.py::test_{name}",)


def _model(name: str) -> tuple[str]:
    return (f"tools/test_loop_model.py::test_{name}",)


FAULTS += [  # what tools say of kernels
    Fault(
        "tune-noise", TUNING, "beats", "a gain as large as the noise wins",
        "gain > max(", "gain >= max(", only=_tuning("the_default_stays_within_the_noise"),
    ),
    Fault(
        "tune-best", TUNING, "decide", "the last config that is faster wins",
        "ratio < best", "ratio > 0", only=_tuning("of_two_that_are_faster_the_faster_wins"),
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
        "tune-table", TUNING, "tune", "the user's table is gone afterwards",
        "install(here, None)", "pass",
        only=_tuning("the_users_own_table_is_in_force_again_afterwards"),
    ),
    Fault(
        "replay-autocast", "tools/replay.py", "Replay._called", "a replay leaves autocast out",
        "self.call.autocast)", "None)", only=_tuning("a_call_is_noted_as_it_was_asked"),
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
        "model-copies", LOOPS, "work", "a warp's copies are a thread's", "32 * run.copied",
        "run.copied", only=_model("the_work_of_a_launch_is_that_of_its_programs"),
    ),
    Fault(
        "model-library", RANK, "trace_time", "the library's products cost nothing",
        "return library + sum(", "return sum(",
        only=_model("the_time_of_a_trace_is_of_kernels_and_library"),
    ),
    Fault(
        "model-useful", USEFUL, "", "the products of dK and dV are fewer",
        '"attention_bwd_dkdv": _attention(4)', '"attention_bwd_dkdv": _attention(3)',
        only=_model("useful_products_are_those_of_the_mathematics"),
    ),
    Fault(
        "gate-all-waited", TOOL_FAULTS, "_reads_before_fence", "wait_group 0 leaves copies",
        '((), ("0",))', "((),)", only=_model("copies_are_fenced_before_a_product_reads_them"),
    ),
    Fault(
        "gate-shared", "tools/resources.py", "", "a block may take 1 KB more than there is",
        'Target("sm_89", 128, 99 * KB', 'Target("sm_89", 128, 100 * KB',
        only=_model("limits_are_the_programming_guides"),
    ),
    Fault(
        "sass-uniform", "tools/sass.py", "_with_target", "a uniform branch always jumps",
        "one.operands.replace(target[0], hex(places[target[1]]))", "hex(places[target[1]])",
        only=("tools/test_machine_code.py::test_a_branch_under_a_predicate_may_fall_through",),
    ),
    Fault(
        "hub-identity", "tools/hub.py", "write_layout", "two builds have one identity",
        "p.encode() + _digest(c)", "p.encode()",
        only=("tools/test_hub.py::test_another_content_is_another_build",),
    ),
]  # fmt: skip
