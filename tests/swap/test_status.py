"""`status` and `watch` say what runs fused, and why not; a checkpoint's recomputation goes the way
of its forward, whoever watched that."""

from __future__ import annotations

import copy
import json
import threading
from contextlib import contextmanager, nullcontext

import pytest
import torch
from swapped_models import TimmLike, assert_same_step, images, timm_model, train_step
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

import fastvit_kernels as fk
from fastvit_kernels.runtime import dispatch, recompute
from fastvit_kernels.runtime.backend import Gpu, on_absent_gpu
from fastvit_kernels.runtime.compat import TorchDispatchMode, collector_of
from fastvit_kernels.runtime.plain import is_hooked
from fastvit_kernels.runtime.triton import has_gluon
from fastvit_kernels.swap.report import IN_GRAPHS
from tests.model_coverage.compare import randomize


class Counter(TorchDispatchMode):
    """A mode of another package."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def hook(register):
    handle = register(lambda *_: None)
    try:
        yield
    finally:
        handle.remove()


WATCHERS = {
    "nobody": lambda model: nullcontext(),
    "a global hook": lambda model: hook(torch.nn.modules.module.register_module_forward_hook),
    "a hook on a child": lambda model: hook(model.blocks[1].attn.proj.register_forward_hook),
    "ModuleTracker": lambda model: ModuleTracker(),
    "FlopCounterMode": lambda model: FlopCounterMode(display=False),
    "another package's mode": lambda model: Counter(),
    "the torch backend": lambda model: fk.backend("torch"),
    "a profiler": lambda model: profile(activities=[ProfilerActivity.CPU]),
    "watch": fk.watch,
}


OF_A_BLOCK = ["layer_norm", "qkv_attention", "linear", "layer_norm", "mlp"]


def our_own():
    return randomize(
        fk.create_vit(
            "vit_base_patch16_224", img_size=48, embed_dim=64, depth=2, num_heads=2, num_classes=7
        )
    )


def in_checkpoints(model, **how):
    """The model, with a checkpoint around each block."""

    def run(x):
        for block in model.blocks:
            x = checkpoint(block, x, **how)
        return x

    model.blocks.forward = run
    return model


def watched_step(model, forward, backward):
    """A training step with these contexts around its two halves."""
    model.zero_grad()
    torch.manual_seed(3)
    with forward:
        y = model(images())
    with backward:
        upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        (y * upstream).sum().backward()
    return y.detach(), {n: p.grad for n, p in model.named_parameters()}


# One decision a forward.


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("watcher", WATCHERS)
def test_a_recomputation_goes_its_forwards_way(watcher, use_reentrant):
    model = in_checkpoints(
        timm_model(drop_path_rate=0.3, proj_drop_rate=0.2), use_reentrant=use_reentrant
    )
    watch = WATCHERS[watcher]
    wanted = watched_step(model, nullcontext(), nullcontext())
    fk.swap_in(model)
    assert_same_step(watched_step(model, watch(model), nullcontext()), wanted)
    assert_same_step(watched_step(model, nullcontext(), watch(model)), wanted)
    assert not recompute._notes


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_knows_its_call_by_the_values_of_numbers(use_reentrant):
    """Those that a forward makes lie elsewhere in memory when it runs again."""
    made = []

    def norm(x):
        made.append(float("1e-5"))
        return fk.layer_norm(x, None, None, made[-1])

    found = []
    for around in (nullcontext, lambda: fk.backend("torch")):
        x = torch.linspace(-1, 2, 32).reshape(2, 16).requires_grad_()
        with around():
            y = checkpoint(norm, x, use_reentrant=use_reentrant)
        (y * torch.linspace(1, 2, 16)).sum().backward()
        found.append(x.grad)
    assert len({id(n) for n in made}) == 4
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_draws_its_forwards_dropout(use_reentrant):
    model = in_checkpoints(timm_model(attn_drop_rate=0.4), use_reentrant=use_reentrant)
    wanted = watched_step(model, nullcontext(), nullcontext())
    fk.swap_in(model)  # whose attention draws masks of its own, where nobody watches
    assert_same_step(watched_step(model, Counter(), nullcontext()), wanted)
    own = watched_step(model, nullcontext(), nullcontext())
    assert_same_step(watched_step(model, nullcontext(), Counter()), own)


@pytest.mark.parametrize("watcher", ["FlopCounterMode", "the torch backend", "a profiler"])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_of_our_own_model_goes_its_forwards_way(watcher, use_reentrant):
    model = our_own()
    in_checkpoints(model, use_reentrant=use_reentrant)
    watch = WATCHERS[watcher]
    wanted = watched_step(model, nullcontext(), nullcontext())
    assert_same_step(watched_step(model, watch(model), nullcontext()), wanted)
    assert_same_step(watched_step(model, nullcontext(), watch(model)), wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_in_a_checkpoint_go_their_forwards_way(use_reentrant):
    model = timm_model(attn_drop_rate=0.4)
    wanted = watched_step(model, nullcontext(), nullcontext())
    fk.swap_in(model)
    inner = in_checkpoints(model, use_reentrant=False).blocks.forward
    model.blocks.forward = lambda x: checkpoint(inner, x, use_reentrant=use_reentrant)
    assert_same_step(watched_step(model, Counter(), nullcontext()), wanted)


def test_a_backend_chosen_inside_a_checkpoint_holds_there():
    weight = torch.randn(64, 64, requires_grad=True)

    def both(x):
        with fk.backend("torch"):
            x = fk.linear(x, weight)
        return fk.linear(x, weight)

    def run(call, forward, backward):
        weight.grad = None
        with forward:
            y = call(x)
        with backward:
            y.square().sum().backward()
        return weight.grad

    x = torch.randn(3, 5, 64, requires_grad=True)
    wanted = run(both, nullcontext(), nullcontext())
    for contexts in (
        (nullcontext(), nullcontext()),
        (fk.backend("torch"), nullcontext()),
        (nullcontext(), fk.backend("torch")),
    ):
        got = run(lambda x: checkpoint(both, x, use_reentrant=False), *contexts)
        torch.testing.assert_close(got, wanted)


def test_selective_checkpointing_under_a_counter():
    save = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    model = timm_model()
    wanted = watched_step(model, nullcontext(), nullcontext())
    fk.swap_in(model)
    in_checkpoints(
        model, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save)
    )
    assert_same_step(watched_step(model, nullcontext(), nullcontext()), wanted)
    assert_same_step(watched_step(model, FlopCounterMode(display=False), nullcontext()), wanted)


@pytest.mark.parametrize("settings", [dict(memory="low"), dict(drop_path="skip")])
def test_low_memory_and_skipped_samples_under_a_counter(settings):
    def fresh():
        torch.manual_seed(0)
        model = timm_model(drop_path_rate=0.5)
        fk.swap_in(model, **settings)
        return model

    host = settings == dict(memory="low")  # a host drops others
    plain, watched = fresh(), in_checkpoints(fresh(), use_reentrant=False)
    wanted = watched_step(plain, nullcontext() if host else Counter(), nullcontext())
    assert_same_step(watched_step(watched, Counter(), nullcontext()), wanted)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("asked", ["output_hidden_states", "output_attentions"])
def test_a_collector_around_the_forward_only(asked, use_reentrant):
    model = randomize(TimmLike("dinov2"))
    if asked == "output_attentions":
        model.model.set_attn_implementation("eager")
    host = copy.deepcopy(model)
    fk.swap_in(model)
    steps = []
    for m in (host, model):
        m.model.gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
        m.train()
        setattr(m.model.config, asked, True)
        train_step(m)  # leaves hooks on the layers
        steps.append(train_step(m))
    assert_same_step(steps[1], steps[0])


def test_a_collector_counts_while_it_collects():
    model = randomize(TimmLike("dinov2")).eval()
    fk.swap_in(model)
    for asked in ("output_hidden_states", "output_attentions"):
        model.model(pixel_values=images(), **{asked: True})
        with fk.watch(model) as status:
            model(images())
        blocks = [row for row in status.modules if row.level == "block"]
        assert [row.way for row in blocks] == ["fused"] * 2, asked
    with fk.watch(model) as status:
        hidden = model.model(pixel_values=images(), output_hidden_states=True).hidden_states
    assert len(hidden) == 3
    with fk.backend("torch"):  # all layers by the host's own forward
        fk.swap_out(model)
        wanted = model.model(pixel_values=images(), output_hidden_states=True).hidden_states
    torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-4)


def test_a_collector_of_the_hooks_own_key_counts():
    capturing = pytest.importorskip("transformers.utils.output_capturing")
    collector, module = collector_of(capturing), nn.Linear(2, 2)
    capturing.install_output_capuring_hook(module, "attentions", 0)
    for collected, counts in (
        (None, False),
        ({}, False),
        ({"hidden_states": []}, False),
        ({"attentions": []}, True),
    ):
        token = collector.set(collected)
        assert is_hooked(module) is counts, collected
        collector.reset(token)


# What is told.


def rows(status, *ways):
    return {row.name: row for row in status.modules if row.way in ways}


def test_status_tells_the_next_call(monkeypatch):
    model = timm_model()
    reasons = {row.reason for row in rows(fk.status(model), "host").values()}
    assert reasons == {"not swapped", "a plain product"}
    report = fk.swap_in(model)
    status = fk.status(model)
    assert [row.name for row in rows(status, "fused").values()] == [
        row.name for row in report.swapped
    ]
    assert (status.flops, status.fused_flops) == (report.flops, report.fused_flops)
    assert rows(status, "inside")["blocks.0.attn.qkv"].reason == "blocks.0"
    with hook(model.blocks[0].attn.register_forward_hook):
        status = fk.status(model)
        assert rows(status, "host")["blocks.0"].reason == "attn is hooked"
        assert rows(status, "fused")["blocks.0.attn"].level == "attention"
    with hook(torch.nn.modules.module.register_module_forward_hook):
        status = fk.status(model)
        assert not rows(status, "fused") and status.fused_flops == 0
        assert rows(status, "host")["blocks.0"].reason == "a global hook of all modules"
    with Counter():
        reason = rows(fk.status(model), "host")["blocks.0"].reason
        assert reason == "a dispatch mode looks on: Counter"
    traced = []
    torch.fx.symbolic_trace(lambda x: traced.append(fk.status(model)) or x)
    reason = "torch.fx, torch.jit or an exporter looks on"
    assert rows(traced[0], "host")["blocks.0"].reason == reason
    with fk.backend("torch"):
        status = fk.status(model)
        assert status.backend == "torch" and status.pytorch == "the backend is 'torch'"
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "gelu", lambda x, **_: x)
        reason = rows(fk.status(model), "host")["blocks.0"].reason
        assert reason == "a function of torch was replaced"
    model.blocks[1].norm1.eps = 1e-3  # an edit that is proven again
    assert "blocks.1" in rows(fk.status(model), "fused")
    model.blocks[1].attn.forward = model.blocks[1].attn.forward
    assert "blocks.1" in rows(fk.status(model), "host")


def test_status_tells_of_lora():
    class LoRA(nn.Linear):
        pass

    model = timm_model()
    before = fk.swap_in(model)
    for block in model.blocks:
        block.attn.qkv.__class__ = LoRA
    status = fk.status(model)
    assert status.fused_flops < before.fused_flops
    left = rows(status, "host")
    assert left["blocks.1.attn.qkv"].reason == "it is a LoRA, not an nn.Linear"
    with fk.watch(model) as seen:
        model(images())
    assert (seen.flops, seen.fused_flops) == (status.flops, status.fused_flops)
    assert [op.name for op in rows(seen, "fused")["blocks.0"].ops] == [
        "layer_norm",
        "attention",
        "linear",
        "layer_norm",
        "mlp",
    ]


def test_watch_tells_the_last_call():
    model = timm_model()
    fk.swap_in(model)
    with fk.watch(model) as status:
        assert not status.modules  # until the end
        model(images())
    block = rows(status, "fused")["blocks.0"]
    assert block.level == "block" and block.calls == 1
    assert [op.name for op in block.ops] == OF_A_BLOCK
    assert not any(op.pytorch for op in block.ops)
    x = torch.randn(2, 10, 64).to(images().device)
    mask = torch.ones(10, 10, dtype=torch.bool, device=x.device)
    with fk.watch(model) as status:
        model.blocks[0](x)
        model.blocks[0](x, attn_mask=mask)
        with fk.backend("torch"):
            model.blocks[1](x)
    host = rows(status, "host")["blocks.0"]
    assert (host.reason, host.calls, host.ops) == ("its arguments: attn_mask", 2, ())
    assert rows(status, "fused")["blocks.0.mlp"].ops == (("mlp", ""),)
    assert {op.pytorch for op in rows(status, "fused")["blocks.1"].ops} == {
        "the backend is 'torch'"
    }
    assert rows(status, "not called")["patch_embed.proj"].calls == 0
    with fk.watch(model) as status, hook(model.blocks[1].attn.register_forward_hook):
        model(images())
    assert rows(status, "host")["blocks.1"].reason == "attn is hooked"
    assert 0 < status.share < 1
    with hook(model.blocks[1].norm2.register_forward_hook), fk.watch(model) as status:
        model(images())
    ops = {n: [op.name for op in row.ops] for n, row in rows(status, "fused").items()}
    assert ops["blocks.1"] == ["layer_norm", "qkv_attention", "linear", "mlp"]
    assert ops["blocks.1.norm2"] == ["layer_norm"]
    with fk.watch(model) as status:
        model.patch_embed.proj(images()[0])
    assert rows(status, "host")["patch_embed.proj"].reason == "its input has the shape (3, 48, 48)"


def test_watch_tells_of_a_block_that_calls_fused_parts():
    """timm's res-post-norm block: what its parts run is the block's."""
    model = timm_model("vit_base_patch16_rpn_224").eval().to(images().device)
    fk.swap_in(model)
    with fk.watch(model) as status:
        model(images())
    block = rows(status, "fused")["blocks.0"]
    assert (block.level, block.calls) == ("block", 1)
    ran = [op.name for op in block.ops]
    assert ran == ["qkv_attention", "linear", "layer_norm", "mlp", "layer_norm"]
    assert not rows(status, "not called") and status.share == fk.status(model).share
    total = sum(len(row.ops) for row in status.modules)
    with hook(model.blocks[0].mlp.register_forward_hook), fk.watch(model) as status:
        model(images())
    ops = {n: [op.name for op in row.ops] for n, row in rows(status, "fused").items()}
    assert ops["blocks.0"] == ["qkv_attention", "linear", "layer_norm", "layer_norm"]
    assert ops["blocks.0.mlp"] == ["mlp"] and sum(map(len, ops.values())) == total
    with Counter(), fk.watch(model) as status:
        model(images())
    assert rows(status, "host")["blocks.0"].reason == "a dispatch mode looks on: Counter"


def test_watch_changes_nothing_and_ends():
    model = timm_model(attn_drop_rate=0.3)
    fk.swap_in(model)
    wanted = train_step(model)
    with fk.watch(model):
        got = train_step(model)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    model.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), fk.watch(model) as status:
        model(images())
    assert dispatch.listeners == () and rows(status, "fused")
    model.head._forward_hooks.clear()
    assert all("forward" not in vars(m) and not m._forward_hooks for m in model.modules())


def test_watch_takes_no_op_of_another_thread_for_a_modules():
    model, weight = timm_model(), torch.randn(8, 8, device=images().device)
    fk.swap_in(model)

    def beside(*_):
        thread = threading.Thread(target=lambda: fk.linear(weight, weight))
        thread.start()
        thread.join()

    model.blocks[0].norm2.register_forward_hook(beside)
    with fk.watch(model) as status:
        model(images())
    ops = [op.name for op in rows(status, "fused")["blocks.0"].ops]
    assert ops == ["layer_norm", "qkv_attention", "linear", "mlp"]


def test_watch_sees_the_model_that_it_was_given_and_all_threads():
    model, other = timm_model(), timm_model()
    for each in (model, other):
        fk.swap_in(each)
    with fk.watch(model) as status:
        with fk.watch(other) as empty:
            thread = threading.Thread(target=lambda: model(images()))
            thread.start()
            thread.join()
        model(images())
    assert rows(status, "fused")["blocks.0"].calls == 2
    assert not rows(empty, "fused", "host").keys() & {
        row.name for row in status.modules if row.level
    }


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_is_no_call(use_reentrant):
    model = in_checkpoints(timm_model(), use_reentrant=use_reentrant)
    fk.swap_in(model)
    with fk.watch(model) as status:
        with Counter():
            loss = model(images()).sum()
        loss.backward()
    block = rows(status, "host")["blocks.0"]
    assert (block.reason, block.calls) == ("a dispatch mode looks on: Counter", 1)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_of_our_own_block_is_no_call(use_reentrant):
    model = in_checkpoints(our_own(), use_reentrant=use_reentrant)
    with fk.watch(model) as status:
        model(images()).sum().backward()
    for name in ("blocks.0", "blocks.1"):
        block = rows(status, "fused")[name]
        assert block.calls == 1
        assert [op.name for op in block.ops] == OF_A_BLOCK


def test_watch_of_wrapped_and_of_compiled_models():
    model = timm_model()
    fk.swap_in(model)
    wrapped = nn.Sequential()
    wrapped.module = model
    with fk.watch(wrapped) as status:
        model(images())
    assert rows(status, "fused")["module.blocks.0"].calls == 1
    block, x, graphs = model.blocks[0], torch.randn(1, 5, 64, device=images().device), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(block, backend=backend, fullgraph=True)
    with torch.no_grad():
        compiled(x)
        with fk.watch(compiled) as status, fk.watch(model) as inside:
            compiled(x)
            model.blocks[1](x)
    assert len(graphs) == 1  # nothing is compiled anew
    assert rows(status, "compiled").keys() == {"_orig_mod"}
    assert status.share == fk.status(block).share > 0
    assert "blocks.0" in rows(inside, "not called") and "blocks.1" in rows(inside, "fused")
    block.compile(backend=backend)
    with fk.watch(model) as inside:
        pass
    assert "blocks.0" in rows(inside, "compiled") and "blocks.1" in rows(inside, "not called")


@pytest.mark.parametrize("build", [timm_model, our_own])
def test_what_a_graph_loses_is_told(build):
    model = build()
    fk.swap_in(model)
    for status in (fk.status(model), fk.status(nn.Sequential(model))):
        assert not any(row.reason for row in rows(status, "fused").values())
    model.compile(backend="eager")
    with fk.watch(model) as seen:
        pass
    with fk.watch(model) as called:
        model.forward(images())
    assert not any(row.reason for row in rows(called, "fused").values())
    for status, way in ((fk.status(model), "fused"), (seen, "compiled")):
        told = {name: row.reason for name, row in rows(status, way).items()}
        assert {name for name in told if told[name]} == {"blocks.0", "blocks.1"}
        assert {*told.values()} == {"", IN_GRAPHS} and IN_GRAPHS in str(status)
    block = model.blocks[0]
    setattr(block, "fused_memory" if hasattr(block, "fused_memory") else "memory", "low")
    told = rows(fk.status(model), "fused")
    assert told["blocks.0"].reason == f'{IN_GRAPHS}, and memory="low" rebuilds nothing'
    assert told["blocks.1"].reason == IN_GRAPHS
    if build is timm_model:
        with hook(model.blocks[1].attn.register_forward_hook), fk.watch(model) as seen:
            pass
        assert rows(seen, "compiled")["blocks.1"].reason == "attn is hooked"


def test_our_own_modules_are_fused():
    model = our_own()
    classes = [type(m) for m in model.modules()]
    report = fk.swap_in(model)
    assert [type(m) for m in model.modules()] == classes
    assert [(row.name, row.level) for row in report.swapped] == [
        (name, "ours") for name in ("patch_embed", "blocks.0", "blocks.1", "norm")
    ]
    assert [row.name for row in report.left] == ["head"]
    assert report.level == "block"
    assert report.flops - report.fused_flops == 2 * 64 * 7
    host = timm_model()
    assert report.flops == fk.swap_in(host).flops
    with fk.watch(model) as status:
        model(images())
    block = rows(status, "fused")["blocks.1"]
    assert [op.name for op in block.ops] == OF_A_BLOCK and block.calls == 1
    assert status.fused_flops == report.fused_flops
    model.blocks[0].mlp.fc1.register_forward_hook(lambda *_: None)
    assert rows(fk.status(model), "host")["blocks.0.mlp.fc1"].reason == "it is hooked"


def test_a_status_prints_and_is_plain_data():
    model = timm_model()
    fk.swap_in(model)
    with fk.watch(model) as status, fk.backend("torch"):
        model(images())
    text = str(status)
    ran = "2 layer_norm, qkv_attention, linear, mlp by PyTorch"
    assert f"fused       block       Block                        2  {ran}" in text
    assert "of the matmul FLOPs ran fused (10 tokens)" in text
    assert "0 ops by kernels, 12 by PyTorch" in text
    data = json.loads(json.dumps(status.to_dict()))
    assert data["share"] == status.share and data["watched"] is True
    block = next(row for row in data["modules"] if row["name"] == "blocks.0")
    assert block["ops"][0] == {"name": "layer_norm", "pytorch": "the backend is 'torch'"}
    assert "would run fused" in str(fk.status(model))


@pytest.mark.parametrize("call", [fk.status, lambda model: fk.watch(model).__enter__()])
def test_status_and_watch_reject(call):
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got list"):
        call([])


@pytest.mark.skipif(not has_gluon(), reason="triton is not installed, or has another Gluon")
def test_attention_in_gluon_is_named_on_the_gpu_that_has_it():
    """By the report and the status, and not where nothing attends."""
    with on_absent_gpu(Gpu("sm_90", 132, 227 * 1024)):
        model, norm = timm_model(), nn.Sequential(nn.LayerNorm(64))
        for told in (fk.swap_in(model), fk.status(model)):
            assert told.gluon and "FASTVIT_KERNELS_GLUON" in str(told)
        assert not fk.swap_in(norm).gluon
    assert not fk.status(model).gluon
