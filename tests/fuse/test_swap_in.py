"""swap_in: the same model, its forward through torch.compile with our rules, and back again."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import warnings
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch._dynamo as dynamo
from kit import Kit, tokens
from looks_effects import EDITS, whole
from swapped import assert_same, assert_same_step, images, no_warning, swapped_and_host, vit
from torch import library, nn
from torch._subclasses import FakeTensor
from torch.fx import GraphModule

from fastvit_kernels import backend, status, swap_in, swap_out, verify
from fastvit_kernels.fuse import dynamo as ours
from fastvit_kernels.fuse.backend import fastvit_kernels
from tests.model_coverage.model_zoo import hf_small, timm_small

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
ways = pytest.mark.parametrize("regional", [False, True], ids=["whole", "blocks"])


def graphs(model):
    return len(status(model).graphs)


def made_graphs():
    return dynamo.utils.counters["stats"]["unique_graphs"]


def swin():
    return timm_small("swin_tiny_patch4_window7_224")[0]


# In place.


@ways
def test_swap_in_changes_nothing_but_the_forward(regional):
    model, host = vit(), vit()
    parameters = {n: id(p) for n, p in model.named_parameters()}
    classes, text = [type(m) for m in model.modules()], repr(model)
    state = torch.get_rng_state()
    swap_in(model, regional=regional)
    assert torch.equal(torch.get_rng_state(), state)
    assert {n: id(p) for n, p in model.named_parameters()} == parameters
    assert [type(m) for m in model.modules()] == classes and repr(model) == text
    assert list(model.state_dict()) == list(host.state_dict())
    host.load_state_dict(model.state_dict())
    assert inspect.signature(model.forward) == inspect.signature(host.forward)
    with no_warning(), backend("triton"):
        assert_same_step(model, host)
    assert graphs(model) == (2 if regional else 1)


@ways
def test_swap_out_undoes_all(regional):
    model = vit()
    before = [set(vars(m)) for m in model.modules()]
    wanted = model(images())
    swap_in(model, regional=regional)
    model(images())
    swap_out(model)
    assert [set(vars(m)) for m in model.modules()] == before
    made = made_graphs()
    assert torch.equal(model(images()), wanted)
    assert made_graphs() == made


def test_swap_out_keeps_a_forward_that_the_instance_had():
    model = vit()
    own = lambda x: model.forward_head(model.forward_features(x) * 2)  # noqa: E731
    model.forward = own
    wanted = model(images())
    swap_in(model)
    assert_same(model(images()), wanted)
    swap_out(model)
    assert model.forward is own


def test_accelerate_wraps_and_unwraps_a_swapped_forward():
    accelerate = pytest.importorskip("accelerate")
    model, host = swapped_and_host()
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    prepared = accelerator.prepare_model(model)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = host(images()).float()
    torch.testing.assert_close(prepared(images()), wanted, rtol=2e-2, atol=2e-2)
    with pytest.raises(ValueError, match="forward was set since swap_in"):
        swap_out(model)
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    assert_same(model(images()), host(images()))
    assert graphs(model) == 2
    swap_out(model)
    assert "forward" not in vars(model)
    assert_same(model(images()), host(images()))


def test_jit_script_says_what_to_call_first():
    model, _ = swapped_and_host(vit().eval())
    with pytest.raises(AttributeError, match=r"torch\.jit\.script does, call swap_out first"):
        torch.jit.script(model)
    swap_out(model)
    torch.jit.script(model)


def test_a_second_call_sets_everything_anew():
    model, host = swapped_and_host()
    model(images())
    swap_in(model, regional=True)
    assert_same_step(model, host)
    assert "forward" not in vars(model) and "forward" in vars(model.blocks[0])


def alive(kind):
    gc.collect()
    return sum(issubclass(type(x), kind) for x in gc.get_objects())


@ways
def test_a_swapped_model_is_freed_with_its_graphs(regional):
    """In a notebook that builds one model after another."""
    gc.collect()
    gc.freeze()  # what other tests have left is looked at no more
    kept = []
    for _ in range(3):
        model = vit(1)
        swap_in(model, regional=regional)
        for batch in (images(), images()[:1]):
            model(batch).sum().backward()
        gone = weakref.ref(model)
        del model
        kept.append(alive(FakeTensor))
        assert gone() is None
    assert alive(GraphModule) == 0
    # torch keeps fakes of each input of a graph; a graph's results would be many more
    inputs = len([*vit(1).parameters(), images()])
    assert kept[2] - kept[1] <= 3 * inputs


def model_and_class_that_knows_it():
    class Scaled(nn.TransformerEncoderLayer):
        def forward(self, x):
            return super().forward(x) * model.scale

    model = nn.Sequential(Scaled(8, 2, 8), Scaled(8, 2, 8))
    model.scale = 2.0
    return model


@ways
def test_a_model_that_its_class_knows_is_freed(regional):
    model = model_and_class_that_knows_it()
    swap_in(model, regional=regional)
    model(torch.randn(2, 8)).sum().backward()
    gone = [weakref.ref(model), weakref.ref(type(model[0]))]
    del model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


class OfParent(nn.TransformerEncoderLayer):
    def forward(self, x):
        return super().forward(x) * self.parent.scale


@ways
def test_a_weak_proxy_as_attribute(regional):
    """Dynamo cannot guard what it stands for; of one that is dead nothing may be asked."""
    model, host = swapped_and_host(
        nn.Sequential(OfParent(8, 2, 8, 0.0), OfParent(8, 2, 8, 0.0)), regional=regional
    )
    for m in (model, host):
        m.scale = 2.0
        for block in m:
            vars(block)["parent"] = weakref.proxy(m)
    assert_same(model(torch.ones(2, 8)), host(torch.ones(2, 8)))
    vars(model[0])["dead"] = weakref.proxy(nn.Module())
    swap_in(model, regional=regional)
    assert_same(model(torch.ones(2, 8)), host(torch.ones(2, 8)))
    assert str(status(model))
    swap_out(model)


# Other entrances (trap 6).


def test_entrances_besides_forward_are_swapped_too():
    model, host = swapped_and_host()
    assert_same(model.forward_features(images()), host.forward_features(images()))
    assert graphs(model) == 1
    found, wanted = (m.get_intermediate_layers(images(), n=2) for m in (model, host))
    assert_same(found, wanted)
    assert graphs(model) == 2
    report = swap_in(model)
    assert {c.name for c in report.calls} >= {"", "forward_features", "get_intermediate_layers"}


def test_a_child_called_alone_runs_as_its_host_and_the_report_says_so():
    model, host = swapped_and_host()
    x = torch.randn(2, 5, 64)
    assert_same(model.blocks[0](x), host.blocks[0](x))
    assert graphs(model) == 0
    assert "a module inside, called by itself, runs the original code" in str(status(model))
    model(images())
    assert "called by itself" not in str(status(model))
    assert "called by itself" not in str(swap_in(model, regional=True))


class Entrances(nn.Linear):
    @staticmethod
    def forward_static(x):
        return x + 1

    @classmethod
    def encode_class(cls, x):
        return x + 2

    def encode_image(self, x):
        return super().forward(x)

    def forward(self, x):
        return self.encode_class(self.forward_static(self.encode_image(x)))


def test_only_methods_of_the_instance_are_entrances():
    model, host = swapped_and_host(Entrances(8, 8))
    x = torch.randn(2, 8)
    assert_same(model(x), host(x))
    assert_same(model.encode_image(x), host.encode_image(x))
    assert graphs(model) == 2
    assert_same(model.forward_static(x), x + 1)
    assert_same(model.encode_class(x), x + 2)


@ways
def test_hidden_states_of_transformers_are_collected(regional):
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    host, inputs = hf_small("vit")
    model, host = swapped_and_host(host.eval(), regional=regional)
    for asked in (True, False, True):
        a, b = (m(**inputs, output_hidden_states=asked) for m in (model, host))
        assert_same(a.last_hidden_state, b.last_hidden_state)
        assert_same(a.hidden_states, b.hidden_states)
        assert len(a.hidden_states or ()) == 3 * asked


# Hooks that come later (trap 1).


@ways
def test_hooks_added_after_the_first_call_are_seen(regional):
    settings = dynamo.config.get_config_copy()
    model, host = swapped_and_host(regional=regional)
    model(images())
    first = graphs(model)
    seen = []
    handles = []
    for m in (model, host):
        hook = lambda module, args, out, m=m: (seen.append(m is model), out * 2)[1]  # noqa: E731
        handles.append(m.blocks[1].attn.register_forward_hook(hook))
    assert_same(model(images()), host(images()))
    assert seen.count(True) == seen.count(False) == 1
    handles[0].remove()
    handles[1].remove()
    # the first graph again; blocks that shared it with the hooked one have made one more
    for added in (int(regional), 0):
        made = graphs(model)
        assert_same(model(images()), host(images()))
        assert graphs(model) == made + added
    for m in (model, host):
        m.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        m.register_forward_hook(lambda module, args, out: out + 1)
        plus = lambda module, args, kwargs, out: out + 1  # noqa: E731
        m.blocks[0].register_forward_hook(plus, with_kwargs=True)
    assert_same(model(images()), host(images()))
    assert first <= graphs(model) <= first + 3 + regional
    assert dynamo.config.get_config_copy() == settings


class BrokenInTheMiddle(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


def test_a_hook_behind_a_graph_break_is_seen():
    model, host = swapped_and_host(BrokenInTheMiddle())
    x = torch.randn(2, 8)
    assert_same(model(x), host(x))
    for layer in ("last", "first"):
        for m in (model, host):
            getattr(m, layer).register_forward_hook(lambda module, args, out: out * 2)
        assert_same(model(x), host(x))


def test_a_hook_beside_another_is_seen_in_a_copy_too():
    model, host = swapped_and_host()
    model(images())
    for block in (0, 1):
        for m in (model, host):
            m.blocks[block].mlp.register_forward_hook(lambda module, args, out: out * 2)
        assert_same(model(images()), host(images()))
        assert_same(copy.deepcopy(model)(images()), host(images()))


def test_a_hook_in_a_new_dict_is_seen():
    """A common way to remove all hooks puts new dicts into modules."""
    model, host = swapped_and_host()
    model(images())
    for m in (model, host):
        m.blocks[0].mlp._forward_hooks = OrderedDict()
        m.blocks[0].mlp.register_forward_hook(lambda module, args, out: out * 2)
    assert_same(model(images()), host(images()))


class Hooked(nn.TransformerEncoderLayer):
    num_hooks, grad_hooks = 3, ()

    def forward(self, x):
        return super().forward(x) * self.num_hooks + len(self.grad_hooks)


@ways
def test_a_setting_may_be_named_like_hooks(regional):
    layers = (Hooked(8, 2, 8, 0.0, batch_first=True) for _ in range(3))
    model, host = swapped_and_host(nn.Sequential(*layers), regional=regional)
    for hooks in (3, 4, {}):
        for m in (model, host):
            m[1].num_hooks, m[2].grad_hooks = hooks or 5, hooks if hooks == {} else [hooks]
        assert_same(model(torch.ones(2, 5, 8)), host(torch.ones(2, 5, 8)))


def test_hooks_elsewhere_cost_no_graph():
    model, host = swapped_and_host()
    assert_same(model(images()), host(images()))
    nn.Linear(2, 2).register_forward_hook(lambda module, args, out: out)
    model.blocks[0].attn.qkv.weight.register_hook(lambda grad: grad)
    assert_same(model(images()), host(images()))
    assert graphs(model) == 1


def test_a_call_checks_no_dict_of_hooks():
    """A ViT of 12 layers has 1,052, which cost as much as all other guards."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    model, _ = swapped_and_host()
    model(images())
    code = vars(model)["forward"].entry.code
    (entry,) = _debug_get_cache_entry_list(code)
    assert "._forward_hooks" not in str(entry.guard_manager)


def test_a_global_hook_sees_every_module():
    model, host = swapped_and_host()
    model(images())
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, a, y: seen.append(type(m)))
    try:
        model(images())
        ours = list(seen)
        seen.clear()
        host(images())
    finally:
        handle.remove()
    assert ours == seen


def test_a_class_patched_after_the_first_call_is_seen(monkeypatch):
    model, host = swapped_and_host()
    model(images())
    original = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, x: original(self, x) * 2)
    assert_same(model(images()), host(images()))


# Graphs (traps 2, 7, 8, 9).


def test_blocks_of_nine_rates_are_nine_graphs():
    """One more than Dynamo makes of one function."""
    model, host = swapped_and_host(vit(9, drop_path_rate=0.2), regional=True)
    with no_warning():
        assert_same_step(model, host)
    assert graphs(model) == 9 and not status(model).limits


def test_blocks_that_are_alike_share_a_graph_until_they_differ():
    model, host = swapped_and_host(vit(9), regional=True)
    assert_same_step(model, host)
    assert made_graphs() == 1 and graphs(model) == 9 and "(1 graph)" in str(status(model))
    for m in (model, host):
        for i, block in enumerate(m.blocks):
            block.norm1.eps = 0.1 * i
    with no_warning():
        for _ in range(2):
            assert_same_step(model, host)
    # eight of the one function, of which two blocks take leave
    assert made_graphs() == 8 + 2 and not status(model).limits


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("first", [True, False], ids=["before the first call", "after it"])
def test_a_block_like_others_is_edited(edit, first, monkeypatch):
    monkeypatch.setattr(ours, "LIBRARIES", ["torch", "tests", "fastvit_kernels"])
    model, host = swapped_and_host(nn.Sequential(*(Kit(whole) for _ in range(3))), regional=True)
    x = tokens()[0].requires_grad_()
    if not first:
        assert_same_step(model, host, x)
        assert made_graphs() == 1
    for m in (model, host):
        torch.manual_seed(0)
        edit(m[2])
    assert_same_step(model, host, x)


def test_a_block_that_becomes_like_another_runs_its_graph():
    model, host = swapped_and_host(vit(3), regional=True)
    assert_same(model(images()), host(images()))
    for i in (1, 2):
        for m in (model, host):
            m.blocks[i].norm1 = nn.Identity()
        assert_same(model(images()), host(images()))
    assert made_graphs() == 2
    norms = [graph.rules["layer_norm"] for graph in status(model).graphs]
    assert sorted(norms) == [1, 1, 2, 2, 2]


class Asking(nn.TransformerEncoderLayer):
    """Which block it is, nothing in its graph guards."""

    chosen = ()

    def forward(self, x):
        return super().forward(x) * (2 if self in self.chosen else 3)


@pytest.mark.parametrize("block", [Asking, nn.TransformerEncoderLayer])
@pytest.mark.parametrize("later", [True, False])
def test_a_strangers_code_may_ask_which_block_it_is_in(block, later, monkeypatch):
    """Its forward, and a hook of a graph that was shared."""
    model, host = swapped_and_host(
        nn.Sequential(*(block(8, 2, 8, 0.0, batch_first=True) for _ in range(3))), regional=True
    )
    monkeypatch.setattr(Asking, "chosen", [model[0], host[0]])
    seen = [m[1].linear2 for m in (model, host)]
    for _ in range(2):
        assert_same_step(model, host, torch.randn(2, 5, 8, requires_grad=True))
        if later:
            for m in (model, host):
                for layer in m:
                    layer.linear2.register_forward_hook(lambda m, args, y: y * (1 + (m in seen)))
    assert made_graphs() == (3 if block is Asking else 1) + (3 if later else 0)


def test_blocks_of_several_sizes_stay_static():
    """By a shared code object Dynamo would take the sizes that differ for dynamic ones."""
    model, host = swapped_and_host(swin().eval(), regional=True)
    assert_same(model(images()), host(images()))
    assert graphs(model) == 4 and status(model).recompiles == 0


class ScaledBySetting(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.settings = {"scale": 0.5}

    def forward(self, x):
        return super().forward(x) * self.settings["scale"]


def test_a_setting_that_changes_is_one_more_graph_and_stays_fused():
    model, host = swapped_and_host(ScaledBySetting())
    x = torch.randn(2, 8)
    for scale in (0.5, 0.7, 0.9):
        model.settings["scale"] = host.settings["scale"] = scale
        assert_same(model(x), host(x))
    made = status(model).graphs
    assert len(made) == 2 and all(g.share == 1.0 and g.declined is None for g in made)


class Scaled(nn.Module):
    """Each value of `scale` is a graph of its own."""

    def __init__(self):
        super().__init__()
        self.scale = 0
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x) * len("x" * self.scale)


class Broken(Scaled):
    """The rest of a forward with a graph break is a function with a limit of its own."""

    def forward(self, x):
        x = self.linear(x)
        dynamo.graph_break()
        return super().forward(x)


@pytest.mark.skipif(not ours.isolated(), reason="torch's blocks share a limit past a graph break")
def test_more_blocks_with_a_graph_break_than_a_limit_are_all_fused():
    model, host = swapped_and_host(nn.Sequential(*[Broken() for _ in range(4)]), only="[0-3]")
    x = torch.randn(2, 8)
    with dynamo.config.patch(recompile_limit=3), no_warning():
        assert_same(model(x), host(x))
    found = status(model)
    assert sum(g.rules["linear"] for g in found.graphs) == 8  # two a block
    assert len(found.graph_breaks) == 4 and not found.limits and found.recompiles == 0


@pytest.mark.parametrize("make", [Scaled, Broken])
def test_a_limit_of_recompiles_is_one_warning_and_a_row(make):
    model, host = swapped_and_host(make())
    x = torch.randn(2, 8)
    with dynamo.config.patch(recompile_limit=3), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        for model.scale in range(6):
            host.scale = model.scale
            assert_same(model(x), host(x))
    assert sum("as many graphs of it as it may" in str(w.message) for w in warned) == 1
    assert status(model).limits == ["the model: recompile_limit = 3"]
    assert "recompile_limit = 3" in str(status(model))


class Doubled:
    def __call__(self, x):
        return 2 * x


@pytest.mark.parametrize(
    "forward", [staticmethod(torch.sin), classmethod(lambda cls, x: torch.sin(x)), Doubled()]
)
def test_a_forward_without_self(forward):
    model, host = swapped_and_host(type("Model", (nn.Linear,), {"forward": forward})(8, 8))
    assert_same(model(torch.ones(2, 8)), host(torch.ones(2, 8)))


def test_a_list_may_hold_none():
    model = nn.Module()
    model.blocks = nn.ModuleList([*vit().blocks, None])
    model.heads = nn.ModuleList([None])
    assert swap_in(model, regional=True).modules == ["blocks.0", "blocks.1"]


def test_samples_of_several_lengths_run_as_they_are():
    model, host = swapped_and_host(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4)))
    samples = [torch.randn(n, 8) for n in (5, 3)]
    x = torch.nested.nested_tensor(samples, layout=torch.jagged)
    assert_same(model(x).values(), host(x).values())


@ways
def test_any_batch_of_two_or_more_is_one_graph(regional):
    model, host = swapped_and_host(regional=regional)
    assert_same_step(model, host, images(4))
    for batch in (3, 2, 8):
        assert_same_step(model, host, images(batch))
    assert made_graphs() == 1 and status(model).recompiles == 0
    assert_same_step(model, host, images(1))  # torch makes graphs of one image apart
    assert_same_step(model, host, images(5))
    assert made_graphs() == 2 and status(model).recompiles == 1


class OfAnySize(nn.Linear):
    def forward(self, x):
        return super().forward(nn.functional.interpolate(x, (24, 24), mode="bicubic"))


class EachByItself(nn.Linear):
    def forward(self, x):
        return torch.stack([super(EachByItself, self).forward(row) for row in x])


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).view(len(x), -1, 3, 2, 8).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)


def image_batch(batch):
    return (images(batch),)


def rows(batch):
    return (torch.randn(batch, 4, 16),)


ANY_BATCH = {  # a module, its arguments, batches in order, how many graphs
    "one image first": (vit, image_batch, (1, 2, 5, 1), 2),
    "by name": (vit, lambda batch: dict(x=images(batch)), (3, 2, 4), 1),
    "resized images": (lambda: OfAnySize(24, 8), image_batch, (2, 3, 5), 1),
    # torch before 2.13 makes it a matmul that takes symbolic sizes in Python alone
    "a frozen linear": (lambda: nn.Linear(16, 16, False).requires_grad_(False), rows, (2, 3), 1),
    "rows one by one": (lambda: EachByItself(16, 16), rows, (3, 2, 3, 5), 3),
    "a mask": (Masked, lambda batch: (*rows(batch), torch.ones(4, 4)), (4, 3, 6), 1),
}


@pytest.mark.parametrize("case", ANY_BATCH)
def test_graphs_of_several_batches(case):
    make, inputs, batches, made = ANY_BATCH[case]
    model, host = swapped_and_host(make())
    for batch in batches:
        given = inputs(batch)
        args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
        with no_warning():
            assert_same(model(*args, **kwargs), host(*args, **kwargs))
    assert made_graphs() == graphs(model) == made and status(model).share == 1


class Resized(nn.Module):
    """An MLP behind positions of another grid, as a ViT for images of any size has them."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.pos = nn.Parameter(torch.randn(1, 8, 4, 4))
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x):
        pos = nn.functional.interpolate(self.pos, size=x.shape[-2:], mode=self.mode)
        return self.mlp((x + pos).flatten(2).transpose(1, 2))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_images_of_several_sizes(mode):
    model, host = swapped_and_host(Resized(mode))
    for side in (6, 8, 11):
        x = torch.randn(2, 8, side, side + 3)
        assert_same(model(x), host(x))
    found = status(model)
    assert len(found.graphs) > 1 and all(report.rules["mlp"] for report in found.graphs)
    assert found.share == 1.0 and not any(report.failed for report in found.graphs)


# Autocast.


def test_autocast_is_the_hosts():
    model, host = swapped_and_host(regional=True)
    for enabled in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y, wanted = model(images()), host(images())
        assert y.dtype == wanted.dtype
        torch.testing.assert_close(y, wanted, rtol=2e-2, atol=2e-2)


# Copies (trap 4).


@ways
def test_copies_keep_their_own_weights_and_stay_swapped(regional):
    model, host = swapped_and_host(regional=regional)
    model(images())
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
        torch.optim.swa_utils.AveragedModel(model).module,
    ]
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for copied in copies:
        assert_same(copied(images()), host(images()))
        assert graphs(copied) == (2 if regional else 1)
        swap_out(copied)
        assert "forward" not in vars(copied) and "forward" not in vars(copied.blocks[0])
    assert "forward" in vars(model.blocks[0] if regional else model)


class Pooled(nn.Sequential):
    pooled = False

    def forward(self, x):
        x = super().forward(x)
        return x.mean(1) if self.pooled else x


def test_a_shallow_copy_may_be_swapped_anew():
    model, x = Pooled(nn.Linear(8, 8)), torch.randn(2, 5, 8)
    swap_in(model)
    copied = copy.copy(model)
    copied.pooled = True
    swap_in(copied)
    assert copied(x).shape == (2, 8) and model(x).shape == x.shape
    assert "forward" in vars(model)


@ways
def test_a_replica_of_data_parallel_runs_its_host_with_its_own_weights(regional):
    model, host = swapped_and_host(regional=regional)
    model(images())
    module, other = (model.blocks[0], host.blocks[0]) if regional else (model, host)
    x = torch.randn(2, 5, 64) if regional else images()
    replica, wanted = (m._replicate_for_data_parallel() for m in (module, other))
    for m in (replica, wanted):  # as nn.DataParallel does
        for name, p in module._parameters.items():
            setattr(m, name, p)
        norm = m._modules["norm1" if regional else "norm"] = nn.LayerNorm(64)
        nn.init.constant_(norm.weight, 3.0)
    assert not torch.allclose(replica(x), module(x))
    made = graphs(model)
    assert_same(replica(x), wanted(x))
    assert graphs(model) == made and "forward" not in vars(replica)
    swap_out(model)


# Whoever looks on sees the host's operators (trap 11).


def test_exports_are_the_hosts():
    model, host = swapped_and_host(vit().eval())
    x = images()
    model(x)
    exported, wanted = (torch.export.export(m, (x,)) for m in (model, host))
    assert [n.target for n in exported.graph.nodes] == [n.target for n in wanted.graph.nodes]
    assert_same(exported.module()(x), host(x))
    assert_same(torch.jit.trace(model, (x,))(x), host(x))
    targets = [
        [n.target for n in torch.fx.symbolic_trace(m.blocks[0]).graph.nodes] for m in (model, host)
    ]
    assert targets[0] == targets[1]


def test_onnx_is_the_hosts():
    pytest.importorskip("onnxscript")
    model, host = swapped_and_host(vit().eval())
    made = [torch.onnx.export(m, (images(),), dynamo=True, verbose=False) for m in (model, host)]
    ops = [[node.op_type for node in program.model.graph] for program in made]
    assert ops[0] == ops[1]


class DoubledLinears(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        y = function(*args, **(kwargs or {}))
        return y * 2 if function is nn.functional.linear else y


def test_counters_and_modes_see_the_host():
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    model, host = swapped_and_host(regional=True)
    model(images())
    counts = []
    for m in (model, host):
        with FlopCounterMode(display=False) as counter:
            m(images())
        counts.append(counter.get_flop_counts())
    assert counts[0] == counts[1]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    with DoubledLinears():
        assert_same(model(images()), host(images()))
    made = made_graphs()
    with torch.device("cpu"):  # sees nothing
        model(images(3))
    assert made_graphs() == made + 1


def test_torch_func_is_the_hosts():
    from torch.func import functional_call, grad, vmap

    model, host = swapped_and_host()
    model(images())
    weights = {n: p.detach() * 2 for n, p in model.named_parameters()}
    found, wanted = (functional_call(m, weights, (images(),)) for m in (model, host))
    assert_same(found, wanted)

    def loss(m):
        return lambda p, x: functional_call(m, p, (x[None],))[0].sum()

    found, wanted = (vmap(grad(loss(m)), (None, 0))(weights, images(3)) for m in (model, host))
    assert_same(found, wanted)


WRONG = {
    "size": images(size=40),
    "channels": torch.randn(2, 4, 32, 32),
    "dtype": images().half(),
    "rank": torch.randn(3),
}


@pytest.mark.parametrize(("wrong", "regional"), [*((w, False) for w in WRONG), ("size", True)])
def test_wrong_inputs_give_the_hosts_own_message(wrong, regional):
    model, host = swapped_and_host(regional=regional)
    for _ in range(2):  # at the first call, and behind a good one
        with pytest.raises(Exception) as wanted:
            host(WRONG[wrong])
        with pytest.raises(type(wanted.value)) as caught:
            model(WRONG[wrong])
        assert str(caught.value) == str(wanted.value)
        assert caught.value.__cause__ is None and caught.value.__context__ is None
        with no_warning():
            assert_same(model(images()), host(images()))
    assert graphs(model) > 0


# Somebody's own torch.compile around it (trap 5).


@ways
def test_torch_compile_of_a_swapped_model_is_fused(regional):
    from timm.layers import Mlp
    from torch._inductor import config

    blocks = nn.Sequential(*(Mlp(16, 32, norm_layer=nn.LayerNorm) for _ in range(2)))
    x = torch.randn(2, 5, 16)
    model, host = swapped_and_host(blocks, regional=regional, memory="low")
    before, passes = config.get_config_copy(), config.pre_grad_custom_pass
    compiled = torch.compile(model, fullgraph=True)
    assert_same(compiled(x), host(x))
    assert graphs(model) == 1 and status(model).share == 1
    assert "memory='low' is not used" in str(status(model))
    assert config.get_config_copy() == before and config.pre_grad_custom_pass is passes
    other = nn.Linear(8, 8)
    torch.compile(other)(torch.randn(2, 8))
    assert graphs(other) == 0


def test_inductor_compiles_the_rest():
    mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    model, host = swapped_and_host(mlp, compiler="inductor", mode="default")
    assert_same_step(model, host, torch.randn(2, 5, 16))
    assert status(model).share == 1.0
    assert dynamo.utils.counters["aot_autograd"]["ok"] == 1


def test_another_outer_compiler_gets_the_hosts_graph():
    model, host = swapped_and_host()
    got = []

    def backend(gm, inputs):
        got.append([n.target for n in gm.graph.nodes])
        return gm.forward

    for m in (model, host):
        assert_same(torch.compile(m, backend=backend, fullgraph=True)(images()), host(images()))
    assert len(got) == 2 and len(got[0]) == len(got[1])
    assert graphs(model) == 0


# only=, skip=, regional=, example=.


def test_only_and_skip_take_names_and_patterns():
    model, host = vit(), vit()
    assert swap_in(model, only="blocks.0").modules == ["blocks.0"]
    chosen = swap_in(model, only=["blocks.*.attn", "head"]).modules
    assert chosen == ["blocks.0.attn", "blocks.1.attn", "head"]
    assert_same_step(model, host)
    report = swap_in(model, regional=True, skip="blocks.0.mlp")
    parts = [f"blocks.0.{part}" for part in ("norm1", "attn", "ls1", "norm2", "ls2")]
    assert report.modules == [*parts, "blocks.1"]
    assert_same_step(model, host)
    assert ("blocks.0.mlp", "in skip=") in {(r.name, r.reason) for r in report.left}
    report = swap_in(model, only="blocks.*", skip="blocks.1")
    assert report.modules == ["blocks.0"]
    assert ("head", "not in only=") in {(r.name, r.reason) for r in report.left}


def test_regional_takes_the_blocks_of_each_library():
    pytest.importorskip("transformers")
    assert len(swap_in(hf_small("vit")[0], regional=True).modules) == 2
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert len(swap_in(nn.TransformerEncoder(layer, 2), regional=True).modules) == 2
    blocks = [f"layers.{stage}.blocks.{i}" for stage in range(2) for i in range(2)]
    assert swap_in(swin(), regional=True).modules == blocks


def test_an_example_fills_the_report_and_leaves_no_trace():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(512, 4), nn.Dropout()
    )
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    report = swap_in(model, example=images())
    assert len(report.graphs) == 1
    assert torch.equal(torch.get_rng_state(), state)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("wrap", [lambda x: (x,), lambda x: {"x": x}])
def test_an_example_is_given_as_the_model_takes_it(wrap):
    assert swap_in(vit(), example=wrap(images())).graphs


# Bad arguments.

MODES = tuple(torch._inductor.list_mode_options())
OF_INDUCTOR = dict(compiler="inductor")


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (dict(only="blok.*"), "only='blok.*' is no module of this model; near: 'blocks.*'"),
        (dict(skip="block.0"), "near: 'blocks.0'"),
        (dict(compiler="jit"), "compiler must be one of ('inductor', 'eager'), got 'jit'"),
        (dict(memory="auto"), "memory must be one of"),
        (dict(drop_path="keep"), "drop_path must be one of"),
        (dict(mode="reduce-overhead"), "give compiler='inductor' too"),
        (OF_INDUCTOR | dict(memory="low"), "memory='low' is for"),
        (OF_INDUCTOR | dict(mode="quick"), f"mode must be one of {MODES}, got 'quick'"),
    ],
    ids=str,
)
def test_swap_in_rejects(wrong, text):
    model = vit()
    with pytest.raises(ValueError, match=r"^swap_in: ") as found:
        swap_in(model, **wrong)
    assert text in str(found.value)
    assert "forward" not in vars(model)


def test_what_is_no_model_no_name_and_no_block():
    for function in (swap_in, swap_out, status, partial(verify, batch=images())):
        with pytest.raises(TypeError, match=r"must be an nn\.Module, got list"):
            function([])
    for wrong in (3, [nn.Linear]):
        with pytest.raises(
            TypeError, match="takes names of modules or shell patterns of them, got"
        ):
            swap_in(vit(), only=wrong)
    mlps = nn.Sequential(*(nn.ModuleDict(dict(a=nn.Linear(4, 4), b=nn.Linear(4, 4))) for _ in "12"))
    for model in (nn.Linear(4, 4), mlps):
        with pytest.raises(ValueError, match="no block repeats"):
            swap_in(model, regional=True)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (dict(options={"drop_pth": True}), "; did you mean drop_path?"),
        (dict(options={"max_autotun": True, "compiler": "eager"}), "; did you mean max_autotune?"),
        (dict(options={"zzzz": True}), "neither ours (compiler, memory, drop_path) nor Inductor's"),
        (dict(mode="quick"), f"mode must be one of {MODES}, got 'quick'"),
    ],
    ids=str,
)
def test_torch_compile_says_what_is_misspelled(given, text):
    model = torch.compile(vit(), backend=fastvit_kernels, **given)
    with pytest.raises(dynamo.exc.BackendCompilerFailed) as found:
        model(images())
    assert type(found.value.inner_exception) is ValueError
    assert str(found.value.inner_exception).endswith(text)


@pytest.mark.parametrize(
    ("use", "error", "start"),
    [
        (lambda report: report(images()), TypeError, "a SwapReport is not callable"),
        (lambda report: report.parameters(), AttributeError, "has no attribute 'parameters'"),
        (status, TypeError, "status: model must be an nn.Module, got SwapReport"),
        (swap_out, TypeError, "swap_out: model must be an nn.Module, got SwapReport"),
    ],
)
def test_a_report_that_is_used_as_the_model_says_so(use, error, start):
    report = swap_in(nn.Linear(8, 8))
    wanted = "in place and returns a report: write fk.swap_in.model., not model = fk.swap_in.model"
    with pytest.raises(error, match=f"{start}: swap_in works {wanted}"):
        use(report)


def test_inductor_gets_the_mode(monkeypatch):
    modes = []

    def by_inductor(gm, inputs, mode, options):
        modes.append(mode)
        return gm.forward

    monkeypatch.setattr("fastvit_kernels.fuse.backend.by_inductor", by_inductor)
    model = vit()
    swap_in(model, compiler="inductor", mode="reduce-overhead")
    model(images())
    assert modes == ["reduce-overhead"]


def test_a_model_that_is_changed_already_says_what_to_call_first():
    with pytest.raises(ValueError, match=r"already compiled: call swap_in before torch\.compile"):
        swap_in(torch.compile(vit()))
    model = vit()
    model.blocks[1].compile()
    with pytest.raises(ValueError, match=r"already compiled \(blocks.1\)"):
        swap_in(model)
    with pytest.raises(ValueError, match=r"already scripted: call swap_in before torch\.jit"):
        swap_in(torch.jit.script(nn.Linear(4, 4)))
    quantised = torch.ao.quantization.quantize_dynamic(vit(), {nn.Linear}, torch.qint8)
    with pytest.raises(ValueError, match=r"already quantised \(blocks.0.attn.qkv\)"):
        swap_in(quantised)


def test_a_model_with_nothing_to_fuse_gets_one_warning():
    with pytest.warns(UserWarning, match="nothing to fuse") as warned:
        swap_in(nn.GELU())
    assert len(warned) == 1


def test_a_first_call_in_many_threads():
    model, host = swapped_and_host()
    batches = [images(seed=i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for found, batch in zip(pool.map(model, batches), batches, strict=True):
            assert_same(found, host(batch))
    assert graphs(model) == 1


# What Dynamo cannot do.


def test_without_dynamo_the_host_runs_and_says_so(monkeypatch):
    model, host = swapped_and_host()
    monkeypatch.delattr("torch._dynamo.exc.TorchRuntimeError")
    with pytest.warns(RuntimeWarning, match="runs its host's forward: torch .* lacks an interface"):
        assert_same(model(images()), host(images()))
    with no_warning():
        assert_same(model(images()), host(images()))
    assert "runs its host's forward" in str(status(model)) and graphs(model) == 0


CODE = vit.__code__  # Dynamo has compiled none of it
INTERFACES = {  # of torch, by names that no release promises, and who asks
    "torch._dynamo.guards.GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT": ours.guard_hooks,
    "torch._guards.CompileContext.current_compile_id": ours.compile_under_way,
    "torch._dynamo.eval_frame._debug_get_cache_entry_list": partial(ours.limit_met, CODE),
    "torch._dynamo.config.recompile_limit": partial(ours.limit_met, CODE),
    "torch._dynamo.eval_frame.reset_code": partial(ours.forget, CODE),
    "torch._dynamo.code_context.code_context": partial(ours.let_batch_vary, CODE, (images(),), {}),
    "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx": ours.outer_compile,
    "torch.utils._python_dispatch.is_in_any_mode_without_ignore_compile_internals": (
        ours.in_foreign_mode
    ),
}


@pytest.mark.parametrize("name", INTERFACES)
def test_without_an_interface_nothing_raises(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(name, raising=False)
        assert not INTERFACES[name]()


class Untraceable(nn.Linear):
    """Runs, and Dynamo's fake tensors say that it cannot."""

    def forward(self, x):
        return super().forward(no_fake(x))


@library.custom_op("fastvit_tests::no_fake", mutates_args=())
def no_fake(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@no_fake.register_fake
def _(x):
    raise RuntimeError("wrong here")


class UntraceableEnd(Untraceable):
    """Counts its calls before a graph break; what comes behind that cannot be traced."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        torch._dynamo.graph_break()
        return super().forward(x)


def test_what_ran_twice_before_an_untraceable_part_is_said():
    model, host = swapped_and_host(UntraceableEnd(8, 8))
    x = torch.randn(2, 8)
    with pytest.warns(RuntimeWarning, match="what comes before that ran twice"):
        assert_same(model(x), host(x))
    assert model.calls == 2
    model(x)
    assert model.calls == 3


def test_what_dynamo_cannot_trace_runs_its_host_and_says_so_once():
    model, host = swapped_and_host(Untraceable(8, 8))
    x = torch.randn(2, 8)
    with pytest.warns(RuntimeWarning, match=r"torch\._dynamo cannot trace it") as found:
        assert_same(model(x), host(x))
    assert "TorchRuntimeError" in str(found[0].message)
    assert "ran twice" not in str(found[0].message)
    with no_warning():
        assert_same(model(x), host(x))
