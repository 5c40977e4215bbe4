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
        "not is_dynamo_compiling() and listeners",
        "listeners and not is_dynamo_compiling()",
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
