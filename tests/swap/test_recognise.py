"""Hosts that no table knows are found by structure, and look-alikes are not."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from numerics import DEVICE
from outside import by_hand, dino, dinov3, look_alikes, others
from torch import nn

from fastvit_kernels import backend, swap_in, swap_out, watch
from fastvit_kernels.swap import facts, hosts, observe, plans, prove, recognise
from fastvit_kernels.swap.hosts import attention, block, mlp, timm as table
from fastvit_kernels.swap.hosts.fused import Fused, RmsNorm
from tests.model_coverage.compare import randomize


@pytest.fixture(autouse=True)
def _torch_backend():
    with backend("torch"):
        yield


HOSTS = {
    "dinov2": dino.Block,
    "dinov2_mem_eff": partial(dino.Block, attention=dino.MemEffAttention),
    "dinov2_swiglu": partial(dino.Block, ffn=dino.SwiGLU),
    "eva_swiglu": partial(dino.Block, ffn=dino.NormedSwiGLU),
    "dinov2_drop_path": partial(dino.Block, drop_path=0.05, drop=0.2),
    "dinov3": dinov3.Block,
    "dinov3_plain": partial(dinov3.Block, linear=nn.Linear),
    "dino": partial(dino.WeightsBlock, init_values=None),
    "ibot": partial(dino.WeightsBlock, drop=0.1),
    "unscaled": lambda: with_unscaled_paths(dino.WeightsBlock()),
    "vit_pytorch": partial(others.Stack, dropout=0.1),
    "open_clip": partial(others.ClipBlock, batch_first=True),
    "clip": others.ClipBlock,
    "packed_weight": others.PackedWeightBlock,
    "packed_weight, norms": partial(others.PackedWeightBlock, qk_norm=True, bias=False),
    "packed_weight, softmax": partial(others.PackedWeightBlock, sdpa=False),
    "inline": by_hand.Inline,
    "rms_norm": lambda: with_rms_norms("plain"),
    "rms_norm of torch": lambda: with_rms_norms("torch"),
    "inline_dropout": partial(by_hand.Inline, order="HD3", dropout=0.1),
    "post_norm": partial(by_hand.Inline, post_norm=True),
    "wrapped": by_hand.wrapped,
    "sandwich": by_hand.Sandwich,
    "parallel": by_hand.Parallel,
    "in_place": by_hand.InPlace,
    "gate_last": by_hand.ValueFirst,
    "causal": partial(look_alikes.Block, by_hand.Causal),
    "masked_by_itself": partial(look_alikes.Block, partial(by_hand.Causal, True)),
    "wide_norms": partial(look_alikes.Block, by_hand.WideNorms),
    "table_attention": lambda: pytest.importorskip("timm").models.eva.EvaBlockPostNorm(32, 2),
}


def with_unscaled_paths(block):
    block.drop_path = dino.UnscaledDropPath(0.3)
    return block


def made(name):
    torch.manual_seed(0)
    return randomize(HOSTS[name]())


def test_a_second_call_swaps_nothing_that_a_wider_part_reads():
    model = by_hand.Apart()
    assert [s.level for s in swap_in(model).swapped] == ["attention"]
    first = [type(m) for m in model.modules()]
    assert type(model.inner) is by_hand.Apart.Heads
    swap_in(model)
    assert [type(m) for m in model.modules()] == first


def step(module, training, seed=0):
    """Outputs and gradients of a step with this seed, by name."""
    module.zero_grad()
    module.train(training)
    torch.manual_seed(seed)
    p = next(module.parameters())
    x = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(1)).to(p).requires_grad_()
    y = module(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    return {"y": y.detach(), "x": x.grad} | {n: p.grad for n, p in module.named_parameters()}


def assert_same(actual, wanted, tolerance):
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        if value is None:
            assert actual[name] is None, name
            continue
        torch.testing.assert_close(
            actual[name],
            value,
            rtol=tolerance,
            atol=tolerance * max(1, value.abs().max()),
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.fixture
def ran(monkeypatch):
    """Names of the classes whose fused forward ran as a block."""
    names, own = [], block.Block.fused_forward
    monkeypatch.setattr(
        block.Block,
        "fused_forward",
        lambda self, x, **k: names.append(type(self).__name__) or own(self, x, **k),
    )
    found = plans.plan_of

    def plan_of(module):
        known = found(module)
        if known is None or not isinstance(module, block.Block):
            return known

        def run(modules, x, extras):
            before, y = len(names), known[0].run(modules, x, extras)
            names[before:] = [type(module).__name__]
            return y

        return known[0]._replace(run=run), known[1]

    monkeypatch.setattr(plans, "plan_of", plan_of)
    return names


def assert_block_level(report):
    assert report.level == "block", str(report)
    assert report.fused_flops >= 0.9 * report.flops > 0, str(report)


@pytest.mark.parametrize("name", HOSTS)
def test_a_block_of_another_repository_runs_fused(name, ran):
    module = made(name).double()
    host = copy.deepcopy(module)
    assert_block_level(swap_in(module))
    ran.clear()
    for training in (True, False):
        quiet(host)
        quiet(module)
        assert_same(step(module, training), step(host, training), 1e-9)
    assert len(ran) >= 2


@pytest.mark.parametrize("name", ["dinov2", "dinov3", "eva_swiglu", "packed_weight"])
def test_one_op_projects_and_attends(name):
    module = made(name)
    swap_in(module)
    with watch(module) as status:
        module(torch.randn(2, 6, 32))
    mlp = "gated_mlp" if name in ("dinov3", "eva_swiglu") else "mlp"
    ops = [op.name for op in status.modules[0].ops]
    assert ops == ["layer_norm", "qkv_attention", "linear", "layer_norm", mlp]


def quiet(module):
    """Dropout of attention off: it draws numbers of its own."""
    for m in module.modules():
        if isinstance(m, dino.Attention):
            m.attn_drop = 0.0
        for name in ("attn_drop", "dropout"):
            if isinstance(getattr(m, name, None), nn.Dropout) and hasattr(m, "heads"):
                getattr(m, name).p = 0.0
        if isinstance(m, dino.WeightsAttention):
            m.attn_drop.p = 0.0


@pytest.mark.parametrize("name", ["inline", "open_clip", "dinov2", "packed_weight"])
def test_the_report_counts_the_flops_of_a_block(name):
    """With the weights that it holds itself, and the attention that is no module of its own."""
    report = swap_in(nn.ModuleList([made(name)]))
    weights = sum(p.numel() for p in made(name).parameters() if p.ndim == 2)
    T, C = 197, 32
    assert report.flops == report.fused_flops == 2 * T * weights + 4 * T * T * C
    assert not report.depending_flops


@pytest.mark.parametrize("called", [False, True])
def test_a_packed_weight_with_rules_of_its_own_is_the_hosts(called):
    """Given before the first call, or between two: no kernel may read its memory."""
    module = made("packed_weight")
    host = copy.deepcopy(module)
    assert_block_level(swap_in(module))
    with backend("auto"):
        if called:
            step(module, True)
        for m in (module, host):
            m.attn.in_proj_weight = nn.Parameter(
                m.attn.in_proj_weight.detach().as_subclass(look_alikes.Twice)
            )
        with watch(module) as status:
            assert_same(step(module, True), step(host, True), 1e-5)
    assert "it reads the weights of Linears that are no plain ones" in str(status)


class Conditioned(nn.Module):
    """As in DiT: a block that wants a condition besides its tokens."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.ada = (
            nn.LayerNorm(32),
            by_hand.FeedForward(32, 64),
            nn.Linear(8, 32),
        )

    def forward(self, x, c):
        return x + self.mlp(self.norm(x) * self.ada(c)[:, None])


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Conditioned()])

    def forward(self, x, c):
        return self.blocks[0](x, c)


class Merging(nn.Module):
    """As between the stages of a Swin: one product on a grid."""

    def __init__(self):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(128), nn.Linear(128, 64)

    def forward(self, x):
        B, H, W, C = x.shape
        x = x.reshape(B, H // 2, 2, W // 2, 2, C).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(x))


def test_a_layer_that_does_not_run_alone_says_so():
    """Not the modules around it, nor what has no product of a transformer."""
    report = swap_in(nn.ModuleDict({"stages": nn.ModuleList([Stage(), Merging()])}))
    rows = [(row.name, row.reason) for row in report.left if "did not run" in row.reason]
    assert [name for name, _ in rows] == ["stages.0.blocks.0"], str(report)
    assert rows[0][1].startswith("its forward did not run on tokens alone: "), rows


class OutWeight(others.PackedWeight):
    """Whose last product is no Linear's, either."""

    def __init__(self):
        super().__init__()
        del self.out_proj
        self.out_weight = nn.Parameter(torch.randn(32, 32))

    def out_proj(self, y):
        return nn.functional.linear(y, self.out_weight)


def test_an_output_weight_without_a_linear_says_so():
    (row,) = (r for r in swap_in(OutWeight()).left if r.host == "OutWeight")
    assert row.reason == "it multiplies by a weight of its own behind its softmax"


def test_the_report_counts_a_packed_projection_whole():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, norm_first=True)
    weights = sum(p.numel() for p in layer.parameters() if p.ndim == 2)
    assert swap_in(nn.ModuleList([layer])).flops == 2 * 197 * weights + 4 * 197 * 197 * 32


def test_a_search_leaves_the_random_state_alone():
    block = randomize(dino.Block(ffn=dino.NormedSwiGLU, drop=0.137)).train()
    state = torch.get_rng_state()
    assert swap_in(nn.ModuleList([block])).level == "block"
    assert torch.equal(torch.get_rng_state(), state)


def test_a_norm_in_fp32_whatever_comes():
    module = randomize(others.ClipBlock(norm=others.Fp32LayerNorm))
    host = copy.deepcopy(module)
    assert swap_in(module).level == "block"
    assert_same(step(module, False), step(host, False), 1e-4)


def test_a_norm_inside_a_gated_mlp_is_in_its_op(monkeypatch):
    module, ops, own = made("eva_swiglu"), [], mlp.gated_mlp
    assert swap_in(module).pytorch == {}
    monkeypatch.setattr(mlp, "gated_mlp", lambda *a, **k: ops.append(k) or own(*a, **k))
    step(module, True)
    assert [k["norm_weight"] for k in ops] == [module.mlp.ffn_ln.weight]
    report = swap_in(randomize(dino.Block(ffn=dino.NormedSwiGLU, drop=0.1)))
    assert "gate of the MLP" in report.pytorch


def with_rms_norms(manner):
    module = by_hand.Inline()
    make = partial(nn.RMSNorm, 32, eps=1e-5)
    make = make if manner == "torch" else partial(by_hand.RmsNorm, 32, manner)
    module.ln1, module.ln2 = make(), make()
    return module


@pytest.mark.parametrize("manner", ["plain", "early", "late"])
def test_an_rms_norm_by_hand(manner):
    module = randomize(with_rms_norms(manner))
    host = copy.deepcopy(module).double()
    report = swap_in(module)
    assert report.level == "block" and not report.left, str(report)
    assert isinstance(module.ln1, RmsNorm) and {"ln1", "ln2"} <= {*module.fused_pieces}
    x = torch.randn(2, 3, 32, dtype=torch.bfloat16)
    theirs = by_hand.RmsNorm(32, manner)
    assert module.ln1(x).dtype == theirs(x).dtype
    tolerance = 1e-9 if manner == "plain" else 1e-5
    assert_same(step(module.double(), True), step(host, True), tolerance)


def test_an_rms_norm_with_another_weight_is_left_alone():
    module = with_rms_norms("shifted")
    assert swap_in(module).level == "block"  # which calls it
    assert not isinstance(module.ln1, Fused)


@pytest.mark.parametrize("name", ["dinov2_swiglu", "eva_swiglu", "clip", "inline", "rms_norm"])
def test_through_the_kernels(name):
    module = made(name).to(DEVICE)
    host = copy.deepcopy(module).double()
    swap_in(module)
    wanted = step(host, False)
    with backend("triton"):
        actual = step(module, False)
    plain = step(copy.deepcopy(host).float(), False)
    for key, exact in wanted.items():
        ours = (actual[key].double() - exact).abs().max()
        theirs = (plain[key].double() - exact).abs().max()
        assert ours <= 2 * theirs + 2e-6 * max(1.0, exact.abs().max()), key


LOOK_ALIKES = {
    "ReAttention": "parameters that we do not know: mix",
    "TalkingHeads": "Linears before its softmax",
    "Cosine": "computes something else",
    "Temperature": "parameters that we do not know: temperature",
    "OtherAxis": "its softmax is over axis -2, not over the keys",
    "OverHeads": "its softmax is over axis 1, not over the keys",
    "Channels": "its softmax is over scores of the shape",
    "Hidden": "its result has a tensor besides",
    "HalvedScores": "computes something else",
    "Shifted": "computes something else",
    "AlwaysDrops": "its attention drops in evaluation, too",
    "DropsInside": "its attention drops in evaluation, too",
    "Remembering": "computes something else",
    "HalvedBranch": "none of ours: mul",
    "SecondResidual": "none of ours: add",
    "WideOnly": "none of ours: mul",
    "Sometimes": "it draws Python's random numbers",
    "Tanh": "no kernel for what stands between its Linears",
}


@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_a_look_alike_is_left_alone(name):
    random.seed(0)
    module = randomize(getattr(look_alikes, name)())
    report = swap_in(module)
    reasons = {row.name: row.reason for row in report.left}
    assert not isinstance(module, Fused)
    assert LOOK_ALIKES[name] in reasons[""], reasons


def test_an_honest_one_is_not():
    for make in (look_alikes.Attention, look_alikes.Block):
        module = make()
        swap_in(module)
        assert isinstance(module, Fused)


DERIVATIVES = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x[:1, :2]),
    "hessian": lambda f, x: torch.func.hessian(f)(x[:1, :2]),
    "grad of grad": lambda f, x: torch.func.grad(
        lambda x: torch.func.grad(lambda x: f(x).sum())(x).square().sum()
    )(x),
    "vmap": lambda f, x: torch.vmap(f)(x[:, None]),
}


@pytest.mark.parametrize("kind", DERIVATIVES)
def test_a_transform_is_the_hosts(kind):
    """One that writes its softmax out has derivatives that torch's attention has not."""
    module, x = made("inline").double(), torch.randn(2, 4, 32).double()
    host = copy.deepcopy(module)
    swap_in(module)
    module(x)  # it has a plan

    def found(model):
        return DERIVATIVES[kind](lambda x: model(x).square().sum((-1, -2)), x)

    torch.testing.assert_close(found(module), found(host), rtol=0, atol=0)


@pytest.mark.parametrize("reads", [False, True])
def test_arguments_that_nothing_reads(reads, ran):
    """V-JEPA's blocks are given masks, CroCo's positions, whether they read them or not."""
    module, x = randomize(look_alikes.Given()).double(), torch.randn(2, 5, 32).double()
    module.reads = reads
    host, kept = copy.deepcopy(module), torch.randn(2, 5).double() > 0
    swap_in(module)
    ran.clear()
    torch.testing.assert_close(
        module(x, kept, mask=kept), host(x, kept, mask=kept), rtol=1e-9, atol=1e-9
    )
    assert bool(ran) is not reads


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_the_class_overrides_and_calls(when, monkeypatch):
    module, x = randomize(look_alikes.Derived()).double(), torch.randn(2, 5, 32).double()
    host = copy.deepcopy(module)
    swap_in(module)
    assert isinstance(module, Fused)
    if when == "after":
        torch.testing.assert_close(module(x), host(x), rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(look_alikes.Block, "forward", lambda self, x: x + self.mlp(x))
    torch.testing.assert_close(module(x), host(x), rtol=0, atol=0)
    monkeypatch.undo()
    torch.testing.assert_close(module(x), host(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["inline", "vit_pytorch", "wrapped"])
def test_a_hook_on_a_part_is_called(name):
    module = made(name)
    host = copy.deepcopy(module)
    swap_in(module)
    for part, _ in [*host.named_modules()][1:]:
        calls = {id(module): 0, id(host): 0}
        handles = [
            m.get_submodule(part).register_forward_hook(partial(_count, calls, id(m)))
            for m in (module, host)
        ]
        assert_same(step(module, True), step(host, True), 2e-4)
        assert len({*calls.values()}) == 1, part
        for handle in handles:
            handle.remove()


def _count(calls, key, *_):
    calls[key] += 1


def test_a_change_after_the_swap_is_seen():
    module = made("inline")
    host = copy.deepcopy(module)
    swap_in(module)
    for change in (
        lambda m: setattr(m, "heads", 4),
        lambda m: setattr(m, "post_norm", True),
        lambda m: setattr(m, "order", "D"),
        lambda m: setattr(m, "feed", lambda x: x),
        lambda m: setattr(m, "up", nn.Sequential(m.up, nn.Tanh())),
    ):
        change(module)
        change(host)
        assert_same(step(module, False), step(host, False), 2e-4)


CONFIGURED = {
    "an object's setting": lambda m: setattr(m.config, "slope", 0.5),
    "another object": lambda m: setattr(m, "config", SimpleNamespace(slope=2.0)),
    "an object of another class": lambda m: setattr(m, "config", by_hand.Halved(slope=1.0)),
    "a list's value": lambda m: m.factors.__setitem__(0, 0.5),
    "a dict's value": lambda m: m.named.update(slope=0.5),
    "another dict": lambda m: setattr(m, "named", {"slope": 0.5}),
    "other bound values": lambda m: setattr(m, "activation", partial(F.gelu, approximate="none")),
    "a closure": lambda m: setattr(m, "activation", by_hand.sloped(1.0)),
    "another closure": lambda m: setattr(m, "activation", by_hand.sloped(0.5)),
    "a method": lambda m: setattr(m, "activation", nn.GELU().forward),
    "another method": lambda m: setattr(m, "activation", nn.Tanh().forward),
}


def test_a_change_of_what_configures_it_is_seen():
    """Nor is it proven by another that is configured otherwise."""
    module = randomize(by_hand.Configured())
    host = copy.deepcopy(module)
    swap_in(module)
    assert isinstance(module, Fused)
    for change in CONFIGURED.values():
        change(module)
        change(host)
        assert_same(step(module, False), step(host, False), 2e-4)
        late = copy.deepcopy(host)
        swap_in(late)
        assert_same(step(late, False), step(host, False), 2e-4)
        host, module = by_hand.Configured(), by_hand.Configured()
        module.load_state_dict(host.state_dict())
        swap_in(module)


def test_a_layer_scale_of_one_value_is_not_proven_by_one_of_many():
    swap_in(dino.Block())
    module = dino.Block().double()
    module.ls1.gamma = nn.Parameter(torch.tensor([0.5], dtype=torch.float64))
    host = copy.deepcopy(module)
    swap_in(module)
    assert_same(step(module, True), step(host, True), 1e-9)


def test_a_hook_inside_a_part_leaves_the_block_fused():
    module = made("dinov2")
    module.mlp.act.register_forward_hook(lambda *_: None)
    swap_in(module)
    assert module.mlp.fused_blocked() == "act is hooked"
    assert module.fused_verdict() is None


def test_a_function_of_its_module_that_is_replaced_is_seen(monkeypatch):
    module, x = made("dinov3").double(), torch.randn(2, 6, 32).double()
    host = copy.deepcopy(module)
    swap_in(module)
    rope = tuple(torch.randn(5, 16).double() for _ in "sc")
    before = module(x, rope)
    monkeypatch.setattr(by_hand, "SLOPE", 0.5)
    monkeypatch.setattr(dinov3, "rotate", lambda x, sin, cos: x * cos)
    torch.testing.assert_close(module(x, rope), host(x, rope), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(module(x, rope), before)
    sloped = by_hand.Sloped()
    monkeypatch.undo()
    swap_in(sloped)
    assert isinstance(sloped, Fused)
    other = copy.deepcopy(sloped)
    swap_out(other)
    monkeypatch.setattr(by_hand, "SLOPE", 0.5)
    torch.testing.assert_close(sloped(x.float()), other(x.float()))


def test_swap_out_and_pickle():
    module = made("inline")
    swap_in(module)
    again = pickle.loads(pickle.dumps(module))
    assert type(again) is type(module)
    assert_same(step(again, False), step(module, False), 0.0)
    swap_out(module)
    assert type(module) is by_hand.Inline


def test_a_pickle_is_read_by_another_process(tmp_path):
    module = made("dinov2_swiglu")
    swap_in(module)
    path = tmp_path / "block.pt"
    torch.save(module, path)
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import torch; "
        f"m = torch.load({str(path)!r}, weights_only=False); "
        "print(repr(m).splitlines()[0], m(torch.zeros(1, 4, 32)).shape); "
        "print(*(type(part).__qualname__ for part in m.modules()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "FusedBlock(" in run.stdout and "[1, 4, 32]" in run.stdout, run.stderr
    names = [type(part).__qualname__ for part in module.modules()]
    assert run.stdout.splitlines()[-1].split() == names


def test_equal_layers_share_a_search(monkeypatch):
    from fastvit_kernels.swap import recognise

    monkeypatch.setattr(recognise, "_found", {})
    swap_in(nn.Sequential(*(dino.Block(drop_path=0.05) for _ in range(4))))
    assert len(recognise._found) == 5  # DropPath, LayerScale, Attention, Mlp, Block


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_mask_that_the_block_holds(batch_first, ran):
    """A causal tower's: openai CLIP's text. Of another length than the mask's the host's error."""
    mask = torch.full((6, 6), float("-inf")).triu(1)
    module = randomize(others.ClipBlock(mask=mask, batch_first=batch_first)).double()
    host = copy.deepcopy(module)
    assert swap_in(module).level == "block"
    x = torch.randn((2, 6, 32) if batch_first else (6, 2, 32)).double().requires_grad_()
    for _ in range(2):
        ran.clear()
        torch.testing.assert_close(module(x), host(x), rtol=1e-9, atol=1e-9)
        assert ran == ["ClipBlock"]
    for m in (module, host):
        m.attn_mask = torch.zeros(6, 6)
    torch.testing.assert_close(module(x), host(x), rtol=1e-9, atol=1e-9)
    for m in (module, host):
        m.attn_mask = None
    torch.testing.assert_close(module(x), host(x), rtol=1e-9, atol=1e-9)
    for m in (module, host):
        m.attn_mask = mask
        with pytest.raises(RuntimeError):
            m(torch.randn((2, 5, 32) if batch_first else (5, 2, 32)).double())


def test_rope_and_lists_of_inputs(ran):
    module = randomize(dinov3.Block()).double()
    host = copy.deepcopy(module)
    assert swap_in(module).level == "block"
    ran.clear()
    generator = torch.Generator().manual_seed(5)
    xs = [torch.randn(2, n, 32, generator=generator).double() for n in (6, 9)]
    ropes = [
        tuple(torch.randn(n - 1, 16, generator=generator).double() for _ in "sc") for n in (6, 9)
    ]
    calls = [(xs[0], ropes[0]), (xs[0],), (xs,), (xs, ropes), ([xs[1]], [ropes[1]])]
    for call in calls:
        torch.testing.assert_close(module(*call), host(*call), rtol=1e-9, atol=1e-9)
    assert len(ran) >= len(calls)
    with pytest.raises((ValueError, RuntimeError)):
        module(xs, ropes[:1])


MASKS = {
    "boolean": lambda B, T: torch.rand(B, 1, T, T) > 0.3,
    "added": lambda B, T: torch.randn(1, 1, T, T).double(),
    "square": lambda B, T: torch.randn(T, T).double(),
    "each head": lambda B, T: torch.randn(B, 2, T, T).double(),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_go_to_the_fused_attention(kind, ran):
    module = randomize(by_hand.MaskedBlock()).double()
    host = copy.deepcopy(module)
    assert swap_in(module).level == "block"
    x, mask = torch.randn(3, 6, 32).double(), MASKS[kind](3, 6)
    ran.clear()
    torch.testing.assert_close(module(x, mask), host(x, mask), rtol=1e-9, atol=1e-9)
    assert ran == ["MaskedBlock"]
    learnt = mask.double().requires_grad_()
    torch.testing.assert_close(module(x, learnt), host(x, learnt), rtol=1e-9, atol=1e-9)
    assert ran == ["MaskedBlock"]  # a mask with a gradient is the host's


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.float32])
def test_a_mask_of_another_dtype_is_the_hosts(dtype, ran):
    """Which adds what torch lets it add, and raises torch's error otherwise."""
    module = randomize(by_hand.MaskedBlock()).double()
    host = copy.deepcopy(module)
    assert swap_in(module).level == "block"
    x, mask = torch.randn(3, 6, 32).double(), 4 * torch.rand(3, 1, 6, 6)
    ran.clear()
    for ours, theirs in ((module, host), (module.attention, host.attention)):
        try:
            wanted = theirs(x, mask.to(dtype))
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                ours(x, mask.to(dtype))
        else:
            torch.testing.assert_close(ours(x, mask.to(dtype)), wanted, rtol=1e-9, atol=1e-9)
        with watch(ours) as status, contextlib.suppress(RuntimeError):
            ours(x, mask.to(dtype))
        assert status.modules[0].way == "host"
    assert ran == []


def test_a_mask_of_the_keys_that_drops(ran):
    module = randomize(by_hand.MaskedBlock(reading="drop keys")).double()
    host = copy.deepcopy(module)
    assert swap_in(module).level == "block"
    x = torch.randn(3, 6, 32).double()
    ran.clear()
    for mask in (torch.rand(3, 6) > 0.6, None, torch.zeros(3, 6, dtype=torch.bool)):
        torch.testing.assert_close(module(x, mask), host(x, mask), rtol=1e-9, atol=1e-9)
    assert len(ran) == 3


def test_explain_says_what_was_tried():
    model = nn.Sequential(dino.Block(), dino.Block(), look_alikes.Cosine())
    report = swap_in(model, explain=True)
    text = str(report)
    assert "0 and 1 more: Block\n  block of attn, mlp: proven" in text
    assert "2: Cosine\n  attention projections=('qkv',) heads=2 out=proj" in text
    assert "layout=HD3 scale=1.0: computes something else" in text
    assert "by the table of its library: proven" in text
    assert not swap_in(nn.Linear(2, 2)).explanation
    assert "proven" not in str(swap_in(dino.Block()))


def test_a_pair_of_names_is_no_proof():
    """What a module is called decides nothing: only what it computes does."""

    class Attention(nn.Linear):
        pass

    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return self.fc2(self.fc1(x)).relu()

    for make in (lambda: Attention(32, 32), Mlp):
        module = make()
        swap_in(module)
        assert not isinstance(module, Fused)


@pytest.mark.parametrize("name", ["clip", "inline_dropout"])
def test_a_version_that_a_table_does_not_describe_is_found_by_structure(name, monkeypatch):
    """A class of a known name, with other parts: as transformers' ViTLayer was in 4.57."""
    host = made(name)
    monkeypatch.setitem(hosts.HOST_FILES, "outside", table.__name__)
    row = table.TABLE["timm.models.vision_transformer.Block"]
    monkeypatch.setitem(table.TABLE, hosts.host_path(type(host)), row)
    swapped = copy.deepcopy(host)
    assert swap_in(swapped).level == "block"
    assert_same(step(swapped, True), step(host, True), 1e-4)
    patched = copy.deepcopy(host)
    patched.forward = host.forward  # somebody's own
    assert swap_in(patched).level != "block"


@pytest.fixture
def searches(monkeypatch):
    """Names of the classes that were observed, and that were compared at full size."""
    observed, at_size = [], []
    for known in (recognise._found, recognise._last, prove._proofs, prove._at_sizes):
        known.clear()
    own_observed, own_compare = observe.observed, prove._compare
    monkeypatch.setattr(
        observe,
        "observed",
        lambda m, *a, **k: observed.append(type(m).__name__) or own_observed(m, *a, **k),
    )

    def compare(module, *args, briefly=False, **more):
        at_size.extend([type(module).__name__] * briefly)
        return own_compare(module, *args, briefly=briefly, **more)

    monkeypatch.setattr(prove, "_compare", compare)
    return observed, at_size


def test_layers_with_rates_of_their_own_share_what_does_not_depend_on_them(searches):
    observed, at_size = searches
    rates = (0.02, 0.04, 0.06, 0.3)  # DINOv2 leaves samples out above 0.1
    stack = nn.Sequential(*(dino.Block(drop_path=rate) for rate in rates)).double()
    host = copy.deepcopy(stack)
    assert_block_level(swap_in(stack))
    # in training, then in evaluation for the rate that leaves samples out
    assert observed.count("Block") == 3, observed
    assert at_size.count("Block") == 2 and len(at_size) == 4, at_size
    assert_same(step(stack, True), step(host, True), 1e-9)


@pytest.fixture
def proofs(monkeypatch):
    """What is proven in the test."""
    for where, name in (
        (recognise, "_found"),
        (recognise, "_last"),
        (prove, "_at_sizes"),
        (prove, "_answers"),
        (prove, "_count"),
    ):
        monkeypatch.setattr(where, name, {})
    found = {}
    monkeypatch.setattr(prove, "_proofs", found)
    return found


def test_a_rate_that_changes_at_each_step_needs_no_proof_each(proofs, ran):
    """DINOv2's block decides by it, at 0.1 and by how many samples it keeps."""
    module = randomize(dino.Block(drop_path=0.05)).double()
    host = copy.deepcopy(module)
    assert_block_level(swap_in(module))
    at_first = len(proofs)
    ran.clear()
    for index in range(600):
        for m in (host, module):
            m.sample_drop_ratio = m.drop_path1.drop_prob = (index + 1) / 3001
        if index % 50 == 0:
            assert_same(step(module, True), step(host, True), 1e-9)
        else:
            module.train().fused_verdict()
    assert len(proofs) - at_first < 12 and len(ran) >= 12, len(proofs)
    for rate in (0.12, 0.3, 0.6, 0.9, 0.95):
        for m in (host, module):
            m.sample_drop_ratio = rate
        assert_same(step(module, True), step(host, True), 1e-9)
    assert len(proofs) - at_first < 24


def test_the_dropout_of_an_attention_that_changes_at_each_step_needs_no_proof_each(proofs):
    module = dino.Attention(32, 2, 0.1)
    swap_in(module)
    assert isinstance(module, attention.Attention)
    for index in range(600):
        module.attn_drop = (index + 1) / 700
        assert module.fused_verdict() is None
    assert len(proofs) < 12
    for kind in (0.0, 1.0):
        count, module.attn_drop = len(proofs), kind
        module.fused_verdict()
        assert len(proofs) > count, kind


class Threshold(dino.Block):
    """Leaves its second branch out above a rate, which it asks for in a roundabout way."""

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        if 3 - 2 * (1 - self.sample_drop_ratio) > 1.5:
            return x
        return x + self.mlp(self.norm2(x))


def test_a_rate_that_decides_is_proven_for_each_decision(proofs):
    module = Threshold(drop_path=0.1).double()
    host = copy.deepcopy(module)
    assert swap_in(module).level == "block"
    for rate in (0.1, 0.11, 0.2, 0.21, 0.24, 0.26, 0.3, 0.4, 0.5, 0.05):
        host.sample_drop_ratio = module.sample_drop_ratio = rate
        assert (module.fused_verdict() is None) == (rate < 0.25), rate
        assert_same(step(module, True), step(host, True), 1e-9)


def test_layers_that_differ_by_more_than_rates_share_nothing():
    def known(change):
        module = dino.Block(drop_path=0.05)
        change(module)
        return facts.Facts(module, whole=True).key_without_rates()

    usual = known(lambda m: None)
    assert known(lambda m: setattr(m.drop_path1, "drop_prob", 0.07)) == usual
    assert known(lambda m: setattr(m, "sample_drop_ratio", 0.07)) == usual
    assert known(lambda m: setattr(m, "drop_path1", nn.Identity())) == usual  # as at a rate of 0
    for name, value in (
        ("norm1.eps", 1e-3),
        ("attn.num_heads", 4),
        ("sample_drop_ratio", 0.0),
        ("mlp.drop", nn.Tanh()),
        ("mlp.fc1", nn.Linear(32, 8)),
        ("ls1.gamma", None),
    ):
        owner, _, attribute = name.rpartition(".")
        changed = known(lambda m, o=owner, a=attribute, v=value: setattr(m.get_submodule(o), a, v))
        assert changed != usual, name
