"""Plans: what a state has decided is decided again once anything of the state is another."""

from __future__ import annotations

import contextvars
import copy
import gc
import sys
import weakref
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import pytest
import torch
from outside import look_alikes
from private import REPLICATE
from torch import nn
from torch.utils.checkpoint import checkpoint

import fastvit_kernels
from fastvit_kernels import backend, set_backend, swap_in
from fastvit_kernels.runtime import recompute
from fastvit_kernels.runtime.compat import QuietMode
from fastvit_kernels.swap import plans, prove
from fastvit_kernels.swap.hosts import branch
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import hf_small

timm = pytest.importorskip("timm")
HOME = str(Path(fastvit_kernels.__file__).parent)
# Of Python in this package for a block's forward, and frames until attention is called.
CALLS, FRAMES = {"timm": 63, "found": 73, "transformers": 80}, 6


@pytest.fixture(autouse=True)
def _torch_backend():
    with backend("torch"):
        yield


def timm_block(**settings: Any) -> nn.Module:
    from timm.models.vision_transformer import Block

    return randomize(Block(16, 2, init_values=0.5, qkv_bias=True, **settings))


def vit_layer() -> nn.Module:
    model, _ = hf_small("vit", hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    return randomize(layers[0])


class Found(nn.Module):
    """A block that no table knows."""

    def __init__(self):
        super().__init__()
        self.before, self.behind = nn.LayerNorm(16), nn.LayerNorm(16)
        self.mix = Mix()
        self.grow, self.act, self.shrink = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x):
        x = x + self.mix(self.before(x))
        return x + self.shrink(self.act(self.grow(self.behind(x))))


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(2))


BLOCKS = {
    "timm": timm_block,
    "timm, drop path": lambda: timm_block(drop_path=0.4),
    "timm, dropout": lambda: timm_block(attn_drop=0.3),
    "transformers": vit_layer,
    "found": lambda: randomize(Found()),
}


def swapped(name: str) -> tuple[nn.Module, nn.Module]:
    host = BLOCKS[name]()
    module = copy.deepcopy(host)
    assert swap_in(module).level == "block"
    return host, module


def run(module: nn.Module, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """The output and all gradients."""
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
    torch.manual_seed(1)
    y = module(x, *args, **kwargs)
    wanted = [p for p in (x, *module.parameters()) if p.requires_grad]
    return [y, *torch.autograd.grad(y.square().sum(), wanted, allow_unused=True)]


def same(host: nn.Module, module: nn.Module) -> None:
    for a, b in zip(run(host), run(module), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)


def plan(module: nn.Module) -> plans.Plan | None:
    found = plans.plan_of(module)
    return None if found is None else found[0]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_second_call_runs_the_plan_of_the_first(name):
    host, module = swapped(name)
    assert plan(module) is None
    same(host, module)
    first = plan(module)
    assert first is not None
    same(host, module)
    assert plan(module) is first
    same(host.eval(), module.eval())
    assert plan(module) is not first, "another for each mode"
    same(host.eval(), module.eval())


def scaled(module: Any) -> None:
    module.weight = nn.Parameter(module.weight.detach() * 2)


def first_of(kind: type) -> Any:
    return lambda module: next(m for m in module.modules() if isinstance(m, kind))


def edit_bias(module: Any) -> None:
    first_of(nn.Linear)(module).bias = None


def edit_norm(module: Any) -> None:
    first_of(nn.LayerNorm)(module).weight = None


def edit_eps(module: Any) -> None:
    first_of(nn.LayerNorm)(module).eps = 0.3


def edit_frozen(module: Any) -> None:
    first_of(nn.Linear)(module).weight.requires_grad_(False)


def edit_data(module: Any) -> None:
    with torch.no_grad():
        first_of(nn.Linear)(module).weight.mul_(2)


def edit_hook(module: Any) -> None:
    first_of(nn.LayerNorm)(module).register_forward_hook(lambda m, args, y: y * 3)


def edit_forward(module: Any) -> None:
    linear = first_of(nn.Linear)(module)
    linear.forward = lambda x: nn.functional.linear(x, linear.weight) * 2


def edit_child(module: Any) -> None:
    for name, child in module.named_modules():
        if isinstance(child, nn.GELU):
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, nn.Tanh())


def edit_double(module: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    first_of(nn.Linear)(module).__class__ = Doubled


def edit_rules(module: Any) -> None:
    linear = first_of(nn.Linear)(module)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(look_alikes.Twice))


def edit_sizes(module: Any) -> None:
    """A setting that no Linear reads."""
    for m in module.modules():
        if isinstance(m, nn.Linear):
            m.out_features *= 2
            return


KEPT: list[nn.Module] = []  # what was replaced


def edit_alike(module: Any) -> None:
    """Another Linear of the same kind, while somebody keeps the former."""
    former = first_of(nn.Linear)(module)
    KEPT.append(former)
    other = copy.deepcopy(former)
    scaled(other)
    for m in module.modules():
        m._modules.update({n: other for n, c in m._modules.items() if c is former})


EDITS = {
    "another Linear": edit_alike,
    "a size that nobody reads": edit_sizes,
    "a weight with rules of its own": edit_rules,
    "a new weight": lambda m: scaled(first_of(nn.Linear)(m)),
    "a new weight of a norm": lambda m: scaled(first_of(nn.LayerNorm)(m)),
    "a weight written to": edit_data,
    "a bias less": edit_bias,
    "a norm without weight": edit_norm,
    "another eps": edit_eps,
    "a frozen weight": edit_frozen,
    "a hook": edit_hook,
    "a forward": edit_forward,
    "an activation": edit_child,
    "a class": edit_double,
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", BLOCKS)
def test_an_edit_behind_a_plan_is_seen(name, edit):
    host, module = swapped(name)
    same(host, module)
    for m in (host, module):
        EDITS[edit](m)
    same(host, module)
    same(host, module)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_part_that_torch_jit_made_is_called():
    host, module = swapped("timm")
    same(host, module)
    for m in (host, module):
        traced: Any = torch.jit.trace(m.get_submodule("attn.proj"), torch.randn(3, 5, 16))
        m.get_submodule("attn").proj = traced
        assert plans.state_of([m, traced]) is None
    same(host, module)
    same(host, module)


def test_a_plan_scales_the_scores_as_its_host():
    host, module = swapped("transformers")
    for m in (host, module):
        m.get_submodule("attention").scaling = 1.3  # type: ignore
    same(host, module)
    assert plan(module) is not None
    same(host, module)


@pytest.mark.parametrize(
    "kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_a_hook_that_goes_gives_the_plan_back(kind):
    host, module = swapped("timm")
    same(host, module)
    first, seen = plan(module), []
    register = getattr(module.get_submodule("attn.proj"), f"register_{kind}")
    handle = register(lambda *_: seen.append(1))
    assert plan(module) is None
    same(host, module)
    assert seen == [1]
    handle.remove()
    assert plan(module) is first
    same(host, module)
    assert seen == [1]


def test_a_rate_that_changes_keeps_the_plan_and_counts():
    host, module = swapped("timm, drop path")
    same(host, module)
    first = plan(module)
    for rate in (0.1, 0.6):
        for m in (host, module):
            m.get_submodule("drop_path1").drop_prob = rate
        assert plan(module) is first
        same(host, module)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("gamma", [torch.float32, torch.bfloat16])
def test_layer_scale_of_another_dtype_is_promoted_as_by_the_host(gamma, autocast):
    host, module = swapped("timm, drop path")
    for m in (host, module):
        m.get_submodule("ls1").to(gamma)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            a, b = run(host), run(module)
        assert [t.dtype for t in a] == [t.dtype for t in b]
        for wanted, got in zip(a, b, strict=True):
            limit = (
                0.05 * wanted.abs().max().item() if autocast or gamma is torch.bfloat16 else 1e-4
            )
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=limit)


def test_drop_path_behind_an_fp32_scale_keeps_its_factor_under_autocast():
    _, module = swapped("timm, drop path")
    path = module.get_submodule("drop_path1")
    path.drop_prob = 0.3
    with torch.autocast("cpu", torch.bfloat16):
        _, factors = branch.fold([module.get_submodule("ls1"), path], torch.randn(64, 5, 16))
    assert factors is not None
    kept = factors[factors != 0].float()  # in bf16: 1.4297
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / 0.7), rtol=1e-6, atol=0)


@pytest.mark.parametrize("chosen", [{"memory": "low"}, {"drop_path": "skip"}], ids=str)
def test_what_swap_in_was_asked_for_has_a_plan(chosen):
    module = timm_block(drop_path=0.4)
    assert swap_in(module, **chosen).swapped
    first = run(module)
    known = plan(module)
    assert known is not None
    for a, b in zip(first, run(module), strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)
    assert plan(module) is known


def test_other_arguments_and_inputs_take_their_own_way():
    host, module = swapped("timm")
    same(host, module)
    mask = torch.zeros(1, 1, 5, 5).masked_fill(torch.eye(5) > 0, -1e4)
    for a, b in zip(run(host, attn_mask=mask), run(module, attn_mask=mask), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    with fastvit_kernels.watch(module) as status:
        module(torch.randn(1, 5, 16), attn_mask=mask)
    assert status.modules[0].way == "fused"
    first = plan(module)
    assert first is not None and len(first.takes) == 1
    module(torch.randn(1, 7, 16))
    assert len(first.takes) == 2 and plan(module) is first
    with pytest.raises(ValueError):  # the host's own
        module(torch.randn(16))
    assert len(first.takes) == 2


def test_who_looks_on_sees_no_plan(monkeypatch):
    _, module = swapped("timm")
    run(module)
    assert plan(module) is not None
    with QuietMode():
        assert plan(module) is None
    with fastvit_kernels.watch(module):
        assert plan(module) is None
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert plan(module) is None
    handle.remove()
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "gelu", lambda x, approximate="none": x)
        assert plan(module) is None
    with monkeypatch.context() as patch:
        patch.setattr(recompute, "noted", True)
        assert plan(module) is None
    assert plan(module) is not None


class Logged(torch.Tensor):
    """A subclass that wants to see each function of torch."""

    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_tensor_subclass_is_shown_the_hosts_functions():
    _, module = swapped("timm")
    for _ in range(2):
        run(module)
    x = torch.randn(2, 5, 16).as_subclass(Logged)
    module(x)
    assert "linear" in Logged.seen and "layer_norm" in Logged.seen


def test_a_plan_holds_no_module():
    _, module = swapped("timm")
    run(module)
    module.norm1.block = [module]  # a child that knows its parent
    run(module)
    run(module)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


def test_a_copy_makes_its_own_plan_without_a_proof():
    host, module = swapped("timm")
    same(host, module)
    before = len(prove._proofs)
    other = copy.deepcopy(module)
    assert plan(other) is None
    same(host, other)
    assert plan(other) is not None and len(prove._proofs) == before


def replica_of(module: nn.Module) -> nn.Module:
    """As nn.DataParallel makes it: weights are attributes, no parameters."""
    copies = {m: getattr(m, REPLICATE)() for m in module.modules()}
    for old, new in copies.items():
        for name, child in old._modules.items():
            new._modules[name] = None if child is None else copies[child]
        for name, p in old._parameters.items():
            if p is None:
                new._parameters[name] = None
            else:
                setattr(new, name, p.view_as(p))
    return copies[module]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_replica_of_data_parallel_costs_no_proof(name):
    host, module = swapped(name)
    same(host, module)
    before = len(prove._proofs)
    replica = replica_of(module)
    x = torch.randn(2, 5, 16)
    torch.manual_seed(2)
    wanted = host(x)
    with fastvit_kernels.watch(replica) as status:
        torch.manual_seed(2)
        got = replica(x)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    assert len(prove._proofs) == before
    assert status.modules[0].way == "fused"


def test_a_plan_and_what_decides_anew_are_one_to_a_checkpoint():
    """A forward by a plan may be run again part by part: its ops go the same ways."""
    blocks = [swapped("timm")[1] for _ in range(2)]

    def train() -> None:
        set_backend("torch")
        for _ in range(4):
            blocks[0](torch.randn(2, 5, 16))  # no checkpoint is left: plans run again
            x = torch.randn(2, 5, 16, requires_grad=True)
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False)
            x.sum().backward()

    try:
        contextvars.Context().run(train)  # without the fixture's choice
    finally:
        set_backend("auto")


class Doubles(Mix):
    """An attention that reads its mask as nobody would guess."""

    def forward(self, x, attn_mask=None, is_causal=False):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None if attn_mask is None else 2 * attn_mask
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


def test_a_mask_is_not_handed_to_an_attention_that_has_no_proof_for_it():
    host = timm_block()
    host.attn = Doubles()
    module = copy.deepcopy(host)
    assert swap_in(module).level == "block"
    x, mask = torch.randn(2, 5, 16), torch.randn(1, 1, 5, 5)
    for given in ({}, {"attn_mask": mask}):
        torch.testing.assert_close(module(x, **given), host(x, **given), rtol=1e-4, atol=1e-4)


def profiled(module: nn.Module, x: torch.Tensor) -> tuple[int, int]:
    """Calls of this package's Python in a forward, and the frames between it and attention."""
    calls, frames = 0, []

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        if event != "call":
            return
        calls += frame.f_code.co_filename.startswith(HOME)
        if frame.f_code.co_name == "qkv_attention":
            above, depth = frame.f_back, 1
            while above is not None and above.f_locals.get("self") is not module:
                above, depth = above.f_back, depth + 1
            frames.append(depth)

    sys.setprofile(count)
    try:
        module(x)
    finally:
        sys.setprofile(None)
    return calls, frames[0]


@pytest.mark.parametrize("name", CALLS)
def test_a_planned_block_takes_few_calls_of_python(name):
    module = swapped(name)[1]
    x = torch.randn(1, 5, 16, requires_grad=True)
    for _ in range(3):
        module(x)
    calls, frames = profiled(module, x)
    assert calls <= CALLS[name] and frames <= FRAMES


@pytest.mark.parametrize("make", [timm_block, vit_layer])
def test_a_dropout_that_begins_is_seen(make):
    host = make().train()
    block = copy.deepcopy(host)
    swap_in(block)
    x = torch.randn(2, 5, 16)
    for _ in range(2):
        block(x)
    found = []
    for module in (block, host):
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.5
        torch.manual_seed(0)
        found.append(module(x))
    torch.testing.assert_close(*found)
