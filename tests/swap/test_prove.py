"""The proof before the swap: what it notices, what it leaves untouched, when it is asked again."""

from __future__ import annotations

import copy
import gc
import math
import random
import threading
import time
import weakref
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.random import uniform
from outside import dino
from private import is_in_torch_dispatch_mode, set_attention
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastvit_kernels import backend, get_backend, set_backend, swap_in, watch
from fastvit_kernels.runtime.compat import has_global_hook
from fastvit_kernels.runtime.plain import is_plain
from fastvit_kernels.swap import apply, copies, facts, plans, prove, rates, recognise
from fastvit_kernels.swap.hosts import attention, fused, mlp, torch_nn
from fastvit_kernels.swap.hosts.fused import Fused
from fastvit_kernels.swap.recognise import Found
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import HF_MODELS, hf_small, timm_small, torchvision_small

timm = pytest.importorskip("timm")
pytest.importorskip("transformers")
pytest.importorskip("torchvision")


@pytest.fixture(autouse=True)
def _torch_backend():
    with backend("torch"):
        yield


@pytest.fixture
def no_proofs(monkeypatch):
    """Every proof of the test is made in it, and forgotten with it. Nothing is found by structure,
    which would take the place of a forward that a table has wrong."""
    monkeypatch.setattr(prove, "_proofs", {})
    monkeypatch.setattr(prove, "_count", {})
    monkeypatch.setattr(apply, "recognise", lambda module, class_of: (None, Found(unlike=True)))


def block(**settings):
    from timm.models.vision_transformer import Block

    return randomize(Block(32, 2, init_values=0.5, drop_path=0.2, qkv_bias=True, **settings))


def reasons(report):
    return {row.name: row.reason for row in report.left}


# An error in a fused forward keeps the module as it was.


def _bent(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 1.0001


def _unlearnt(function):
    """The argument alone loses a gradient: no parameter's depends on it."""

    def norm_and_input(norm, x, *rest):
        y, same = function(norm, x, *rest)
        return y, same.detach() if x.is_leaf else same

    return norm_and_input


def _opposite(function):
    """Drops as many as it is to keep."""

    def row_scale(self, x, dtype):
        other = copy.copy(self)
        other.drop_prob = 1 - self.drop_prob
        return function(other, x, dtype)

    return row_scale


class _Even(torch.autograd.Function):
    """Gives back its input, and a gradient that is right where it is the same everywhere."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        return dy.mean().expand_as(dy)


ERRORS = {
    "a little": (mlp, "mlp", lambda f: lambda *a, **k: f(*a, **k) * (1 + 1e-8), "mlp"),
    "gradient of the argument": (fused.Norm, "fused_and_input", _unlearnt, ""),
    "mlp": (mlp, "mlp", _bent, "mlp"),
    "attention": (attention, "attend_weights", _bent, "attn"),
    "layer_norm": (fused, "layer_norm", _bent, "norm1"),
    "drop_path": (
        fused.DropPath,
        "fused_row_scale",
        lambda f: lambda self, x, dtype: x.new_ones(len(x), dtype=dtype),
        "",
    ),
    "rate": (fused.DropPath, "fused_row_scale", _opposite, ""),
    "gradient": (mlp, "mlp", lambda f: lambda *a, **k: _Even.apply(f(*a, **k)), "mlp"),
    "called": (
        fused,
        "project_out",
        lambda f: lambda m, *rest: f(m, *rest) * (1 if is_plain(m) else 1.0001),
        "attn",
    ),
    "draws": (mlp, "mlp", lambda f: lambda *a, **k: (f(*a, **k), torch.rand(1))[0], "mlp"),
    "residual": (
        fused.Norm,
        "fused_and_input",
        lambda f: lambda *a: (f(*a)[0], f(*a)[0]),
        "",
    ),
    "layer_scale": (
        fused.LayerScale,
        "fused_scale",
        lambda f: lambda self: f(self).detach(),
        "",
    ),
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_a_fused_forward_is_noticed(error, monkeypatch, no_proofs):
    where, name, bend, child = ERRORS[error]
    monkeypatch.setattr(where, name, bend(getattr(where, name)))
    module = block()
    host = copy.deepcopy(module)
    found = reasons(swap_in(module))
    assert "computes something else: " in found[child], found
    assert found[child].endswith("in training")
    assert not isinstance(module.get_submodule(child), Fused)
    x = torch.randn(2, 5, 32)
    for m in (module, host):
        m.eval()
    torch.testing.assert_close(module(x), host(x))


def test_a_missing_gradient_of_a_second_argument_is_noticed(monkeypatch, no_proofs):
    from timm.layers import AttentionRope

    from fastvit_kernels.swap.hosts import timm as table

    def unlearnt(tables, *rest):
        return own(tuple(t.detach() for t in tables), *rest)

    own = table.turn_of
    monkeypatch.setattr(table, "turn_of", unlearnt)
    found = reasons(swap_in(AttentionRope(32, 2)))[""]
    assert "the gradient of argument 1 is there in one of them only" in found


@pytest.mark.parametrize("name", ["LayerNormFp32", "RmsNormFp32"])
def test_an_error_smaller_than_the_rounding_of_its_host_is_noticed(name, monkeypatch, no_proofs):
    op = "layer_norm" if name == "LayerNormFp32" else "rms_norm"
    make = getattr(timm.layers, name)
    assert swap_in(make(16)).level == "parts"
    prove._proofs.clear()
    own = getattr(fused, op)
    monkeypatch.setattr(fused, op, lambda *a, **k: own(*a, **k) * (1 + 1e-7))
    module = make(16)
    assert "computes something else: output 0" in reasons(swap_in(module))[""]


def test_a_fused_forward_that_raises_is_noticed(monkeypatch, no_proofs):
    def broken(*args, **kwargs):
        raise RuntimeError("not this one")

    monkeypatch.setattr(torch_nn, "attend_weights", broken)
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True)
    assert "the fused forward raises: not this one" in reasons(swap_in(layer))["self_attn"]


def test_a_proof_that_fails_proves_nothing(monkeypatch, no_proofs):
    def broken(*args):
        raise RuntimeError("nobody foresaw this")

    monkeypatch.setattr(prove, "_prove", broken)
    module = block()
    assert reasons(swap_in(module))[""] == "it could not be tried: nobody foresaw this"
    assert not any(isinstance(m, Fused) and m.fused_level != "epilogue" for m in module.modules())


ONE = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
DIFFERENCES = {
    "nothing": ({}, None),
    "rounding": ({"y": ONE + 1e-12}, None),
    "the rounding of large values": ({"large": 1e9 * ONE + 0.1}, None),
    "a little": ({"y": ONE + 1e-8}, "y differs by 1.0e-08"),
    "a little of many": ({"y": ONE + torch.tensor([0, 1e-8])}, "y differs by 1.0e-08"),
    "NaN": ({"y": ONE * torch.tensor([1, math.nan])}, "y differs by nan"),
    "infinity": ({"y": ONE * math.inf}, "y differs by inf"),
    "dtype": ({"y": ONE.float()}, "y is (1, 2) torch.float32, not (1, 2) torch.float64"),
    "shape": ({"y": ONE[0]}, "y is (2,) torch.float64, not (1, 2) torch.float64"),
    "numbers": ({"drawn": torch.tensor([3, 5])}, "drawn differs"),
    "no gradient": ({"y": None}, "y is there in one of them only"),
    "a gradient": ({"none": ONE}, "none is there in one of them only"),
    "more": ({"z": ONE}, "there is z, which the host does not have"),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_what_a_proof_compares(case):
    changed, wanted = DIFFERENCES[case]
    host = {"y": ONE, "large": 1e9 * ONE, "drawn": torch.tensor([3, 4]), "none": None}
    assert prove._difference(host, host | changed, prove.TOLERANCE) == wanted


def test_a_result_that_is_not_there_or_is_no_number_is_a_difference():
    assert prove._difference({"y": ONE, "z": ONE}, {"y": ONE}, 1.0)
    nan = {"y": ONE * math.nan}
    assert prove._difference(nan, nan, 1.0) == "y differs by nan"


def test_the_form_of_the_result_is_compared(monkeypatch, no_proofs):
    monkeypatch.setattr(
        torch_nn.MultiheadAttention, "fused_forward", lambda self, x: self.fused_branch(x)
    )
    report = swap_in(nn.MultiheadAttention(16, 2, batch_first=True))
    assert "a result of the form Tensor" in reasons(report)[""]


def test_a_module_that_cannot_be_tried_is_left_alone(no_proofs):
    class Picky(nn.Module):
        def forward(self, x):
            raise RuntimeError("not on a copy")

    module = block()
    module.norm1 = Picky()
    found = reasons(swap_in(module))
    assert found[""] == "it could not be tried: not on a copy"
    assert isinstance(module.mlp, Fused) and not isinstance(module, Fused)


# What a proof leaves alone.


def test_a_proof_draws_nothing_and_calls_no_hook(no_proofs):
    module, calls = block(), []
    for m in module.modules():
        m.register_forward_hook(lambda *a: calls.append("own"))
    handle = nn.modules.module.register_module_forward_hook(lambda *a: calls.append("global"))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    weights = copy.deepcopy(module.state_dict())
    try:
        swap_in(module)
    finally:
        handle.remove()
    assert len(prove._proofs) > 3 and not calls
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, weights[k]) for k, v in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())


class Checkpointed(dino.Block):
    def __init__(self):
        super().__init__(32, 2)
        self.use_checkpoint = True

    def forward(self, x):
        run = super().forward
        return checkpoint(run, x, use_reentrant=False) if self.use_checkpoint else run(x)


def test_a_proof_runs_no_checkpoint(monkeypatch):
    """One sets the generator of the process back."""
    module, calls = Checkpointed(), []
    monkeypatch.setattr(torch, "set_rng_state", calls.append)
    swap_in(module)
    assert isinstance(module, Fused) and not calls


def by_numpy(x):
    return x * np.random.uniform(1, 2)


def by_a_name_of_numpys(x):
    return x * uniform(1, 2)


def by_numpy_imported_here(x):
    from numpy.random import standard_normal

    return x * standard_normal()


NUMPYS = {
    "numpy's": by_numpy,
    "numpy's, by name": by_a_name_of_numpys,
    "numpy's, imported late": by_numpy_imported_here,
}


class Drawing(nn.Module):
    """Its forward draws beside an attention that drops."""

    def __init__(self, way, generator=None):
        super().__init__()
        self.way, self.generator = way, generator
        self.norm, self.attn = nn.LayerNorm(32), dino.Attention(32, 2, 0.1, 0.1)

    def forward(self, x):
        if self.way == "torch":
            x = x * torch.rand(3)[0] + torch.rand_like(x) + torch.randn_like(x) * torch.randn(1)
            x = x + torch.randint(2, (1,)) * torch.bernoulli(x.sigmoid()) + x.clone().normal_()
            x = x[torch.randperm(len(x))] * x.new_empty(len(x), 1, 1).bernoulli_(0.4)
        if self.way == "Python's":
            x = x * random.uniform(1, 2)
        if self.way in NUMPYS:
            x = NUMPYS[self.way](x)
        if self.way == "a generator of its own":
            x = x * torch.rand(1, generator=self.generator)
        if self.way == "native_dropout":
            x = torch.native_dropout(x, 0.5, True)[0]
        return x + self.attn(self.norm(x))


@contextmanager
def proofs_in_a_loop(monkeypatch):
    """Inside, another thread proves; gives a function that says whether to watch on."""
    stop, done, failed = threading.Event(), [], []
    known = (prove._proofs, prove._at_sizes, recognise._found, recognise._last, prove._count)
    models = [block(proj_drop=0.1, attn_drop=0.1), dino.Block(drop_path=0.05, drop=0.2)]
    models += [Drawing("torch"), Drawing("Python's"), Drawing("numpy's")]

    def run():
        try:
            while not stop.is_set():
                for proofs in known:
                    proofs.clear()
                for model in models:
                    swap_in(copy.deepcopy(model))
                done.append(len(prove._proofs))
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield lambda: len(done) < 2 and not failed
    finally:
        stop.set()
        thread.join()
    assert not failed and min(done) > 3, failed


def test_proofs_draw_no_number_of_another_thread(monkeypatch):
    def seed():
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)

    def draw():
        return torch.rand(()).item(), random.random(), np.random.uniform()

    found = []
    with proofs_in_a_loop(monkeypatch) as running:
        seed()
        while running():
            found.append(draw())
            time.sleep(1e-4)
    seed()
    assert found == [draw() for _ in found]


def test_proofs_take_no_hook_from_another_thread(monkeypatch):
    watched, seen, calls = nn.Identity(), [], 0
    module = nn.modules.module
    with proofs_in_a_loop(monkeypatch) as running:
        while running():
            handles = [
                module.register_module_forward_hook(lambda m, *a: seen.append(m)),
                module.register_module_forward_pre_hook(lambda m, *a: seen.append(m)),
            ]
            watched(1)
            calls += 2
            time.sleep(1e-4)
            for handle in handles:
                handle.remove()
            time.sleep(1e-4)
    assert len(seen) == calls and all(m is watched for m in seen)
    assert not has_global_hook()


@pytest.mark.parametrize("chosen", ["triton", "auto"])
def test_proofs_leave_backend_and_modes_to_other_threads(chosen, monkeypatch):
    found = set()

    def watch():  # in no block
        while running():
            found.add((get_backend(), is_in_torch_dispatch_mode()))  # torch.compile asks this
            time.sleep(1e-4)

    set_backend(chosen)
    try:
        with proofs_in_a_loop(monkeypatch) as running:
            thread = threading.Thread(target=watch)
            thread.start()
            thread.join()
    finally:
        set_backend("auto")
    assert found == {(chosen, False)}


@pytest.mark.parametrize("way", ["Python's", *NUMPYS, "a generator of its own", "native_dropout"])
def test_what_draws_where_a_proof_cannot_follow_keeps_its_forward(way):
    """Not even a proof that fails moves a generator."""
    own = torch.Generator().manual_seed(5)
    module = Drawing(way, own)
    states = random.getstate(), own.get_state(), torch.get_rng_state()
    numpys = np.random.get_state()
    told = reasons(swap_in(module))[""]
    assert random.getstate() == states[0]
    assert torch.equal(own.get_state(), states[1]) and torch.equal(torch.get_rng_state(), states[2])
    np.testing.assert_equal(np.random.get_state(), numpys)
    assert way.removesuffix(" of its own").partition(",")[0] in told


class Computing(dino.Block):
    """It asks numpy for no number that is drawn."""

    def forward(self, x):
        import numpy

        assert np.isfinite(1.0) and numpy.isfinite(1.0)
        return super().forward(x)


def test_a_host_that_computes_with_numpy_is_swapped():
    assert swap_in(Computing()).level == "block"


def test_a_proof_under_a_global_hook_tries_what_runs_without_it(monkeypatch, no_proofs):
    """Under the hook the fused forward calls all children; once it is gone, it bypasses them."""
    where, name, bend, _ = ERRORS["residual"]
    monkeypatch.setattr(where, name, bend(getattr(where, name)))
    module = block()
    with nn.modules.module.register_module_forward_hook(lambda *a: None):
        report = swap_in(module)
    assert "computes something else" in reasons(report)[""], str(report)


def test_a_proof_in_the_midst_of_anything(no_proofs):
    """A proof that a call asks for runs as one at the swap: no mode of the caller is at work."""
    x = torch.randn(2, 5, 32)
    host = block().eval()
    wanted = host(x)
    other = copy.deepcopy(host)
    swap_in(other)
    prove._proofs.clear()
    contexts = (
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        torch.autograd.graph.save_on_cpu,
    )
    for context in contexts:
        plans.known.clear()
        prove._proofs.clear()
        with context():
            got = other(x)
        assert set(prove._proofs.values()) == {None}, context
        torch.testing.assert_close(got.float(), wanted, rtol=0.1, atol=0.1)
    plans.known.clear()
    prove._proofs.clear()
    torch.testing.assert_close(torch.func.vmap(other)(x[None])[0], wanted)
    assert not prove._proofs  # the host's forward runs


def test_a_proof_copes_with_weights_that_are_not_there_or_not_plain(no_proofs):
    for change in (
        lambda m: m.to("meta"),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.half(),
        lambda m: m.requires_grad_(False),
        lambda m: m.eval(),
    ):
        prove._proofs.clear()
        report = swap_in(change(block()))
        assert report.level == "block" and not reasons(report), str(report)


@pytest.mark.parametrize("make", [block, dino.Block], ids=["by its table", "by structure"])
def test_a_proof_of_a_sharded_module(make, monkeypatch):
    """As FSDP2 leaves it: weights are DTensors until a forward gathers them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    for known in (prove._proofs, prove._at_sizes, recognise._found, recognise._last):
        known.clear()
    model = nn.Sequential(randomize(make()))
    host, x = copy.deepcopy(model).double(), torch.randn(3, 5, 32)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert isinstance(model[0].mlp.fc1.weight, DTensor)
        assert swap_in(model).level == "block" and len(prove._proofs) >= 4
        ran, own = [], type(model[0]).fused_forward
        monkeypatch.setattr(
            type(model[0]),
            "fused_forward",
            lambda self, x: ran.append(is_plain(self.mlp.fc1)) or own(self, x),
        )
        for m, given in ((model, x), (host, x.double())):
            m.eval()(given).square().sum().backward()
        assert ran == [True]
        for p, q in zip(model.parameters(), host.parameters(), strict=True):
            torch.testing.assert_close(p.grad.full_tensor().double(), q.grad, rtol=1e-3, atol=1e-3)
    finally:
        dist.destroy_process_group()


def test_a_block_that_fully_shard_makes_another_class_runs_fused():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(randomize(block())).eval()
    host, x = copy.deepcopy(model), torch.randn(3, 5, 32)
    assert swap_in(model).level == "block"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        with watch(model) as status:
            y = model(x)
        assert next(row for row in status.modules if row.name == "0").way == "fused"
        torch.testing.assert_close(y, host(x), rtol=1e-4, atol=1e-4)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def copied(monkeypatch):
    """Sizes of the tensors that were copied; a copy of 2^27 values raises."""
    found, original = [], copies.Copier.random

    def watched(self, shape):
        found.append(math.prod(shape))
        assert found[-1] < 2**27
        return original(self, shape)

    monkeypatch.setattr(copies.Copier, "random", watched)
    return found


class ByWidth(nn.Module):
    """An MLP that takes no narrow input."""

    def __init__(self, width, least=64):
        super().__init__()
        self.least = float(least)  # no size
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        if x.shape[-1] < self.least:
            raise ValueError("too narrow")
        return self.second(nn.functional.gelu(self.first(x)))


def test_a_module_that_runs_in_no_small_copy_is_not_copied(copied):
    """A language model beside a vision tower would fill the memory."""
    with torch.device("meta"):
        report = swap_in(ByWidth(2**14, least=2**14))
    assert report.level == "none" and max(copied) <= copies.LARGEST


def test_a_module_too_large_for_a_copy_is_tried_at_a_fraction(copied, monkeypatch):
    monkeypatch.setattr(copies, "LARGEST", 2**17)
    monkeypatch.setattr(prove, "LARGEST_RECOGNISED", 2**17)
    report = swap_in(ByWidth(256))
    assert [s.level for s in report.swapped] == ["mlp"], str(report)
    assert max(copied) == 128 * 256


def test_a_proof_of_a_large_module_is_narrow(no_proofs, copied):
    with torch.device("meta"):
        model = timm.create_model("vit_so400m_patch14_siglip_224", depth=1)
    report = swap_in(model)
    assert report.level == "block" and max(copied) < 2**18


def test_tensors_in_a_dict_are_compared():
    module, x = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), torch.ones(1, 2)
    found = prove._run(module, lambda: {"y": module[0](x), "z": [module[1](x)]}, ((), {}), False)
    assert {"output 0", "output 1"} <= found.keys()
    assert all(found[f"the gradient of {n}"] is not None for n, _ in module.named_parameters())


def test_threads_prove_once_each(no_proofs):
    made, original = [], prove._prove
    prove._prove = lambda *a: (made.append(1), original(*a))[1]
    try:
        workers = [threading.Thread(target=lambda: swap_in(block())) for _ in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        prove._prove = original
    assert len(made) == len(prove._proofs)


def test_equal_layers_share_a_proof(no_proofs):
    model = nn.Sequential(*(block() for _ in range(3)))
    for index, part in enumerate(model):
        part.drop_path1.drop_prob = 0.1 * (index + 1)
    swap_in(model)
    count = len(prove._proofs)
    assert count == 4  # LayerNorm, Attention, Mlp, Block
    swap_in(block())
    model(torch.randn(2, 5, 32))
    assert len(prove._proofs) == count


def test_settings_that_change_all_the_time_are_given_up(no_proofs, monkeypatch):
    """A warning says so, once, and the reason stays to be seen."""
    monkeypatch.setattr(prove, "MOST", 5)
    norm = nn.LayerNorm(16)
    host = copy.deepcopy(norm)
    swap_in(norm)
    x = torch.randn(3, 16)
    reason = "more than 5 configurations of LayerNorm were met"
    with pytest.warns(UserWarning, match=reason) as warned:  # noqa: PT031
        for step in range(10):
            norm.eps = host.eps = 10.0 ** (-step)
            torch.testing.assert_close(norm(x), host(x))
    assert len(warned) == 1 and norm.fused_verdict() == reason
    assert reason in str(swap_in(norm))


def test_verdicts_keep_no_module_alive():
    module = block()
    swap_in(module)
    module(torch.randn(2, 5, 32))
    watch, weight = weakref.ref(module), weakref.ref(module.attn.qkv)
    module.attn.qkv = nn.Linear(32, 96)
    gc.collect()
    assert weight() is None
    del module
    gc.collect()
    assert watch() is None


# What is asked of a rate.

QUESTIONS = {
    "less": lambda r: r < 0.25,
    "at most": lambda r: r <= 0.25,
    "two questions": lambda r: (r < 0.25, r > 0.15),
    "more": lambda r: r > 0.25,
    "the other share": lambda r: int(8 * (1 - r)),
    "at least": lambda r: 2 * r >= 0.5,
    "equal": lambda r: r == 0.1,
    "not equal": lambda r: r != 0.1,
    "none": lambda r: bool(r - 0.1),
    "whole": lambda r: int(10 * r),
    "rounded": lambda r: round(r, 1),
    "floor": lambda r: math.floor(-8 * r),
    "ceil": lambda r: math.ceil(8 * r),
    "cut": lambda r: math.trunc(8 / r),
    "parts": lambda r: divmod(r, 0.25),
    "rest": lambda r: (r % 0.25) > 0.07,
    "quotient": lambda r: r // 0.25,
    "square": lambda r: r**2 > 0.06,
    "power": lambda r: 2**r > 1.2,
    "distance": lambda r: abs(r - 0.3) > 0.1,
    "a number": lambda r: float(r),
    "is whole": lambda r: (10 * r).is_integer(),
    "fraction": lambda r: r.as_integer_ratio(),
    "text": lambda r: str(r),
    "digits": lambda r: f"{r:.1f}",
    "hex": lambda r: r.hex(),
    "hash": lambda r: hash(r),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_asked_of_a_rate_is_asked_of_the_next(question):
    """A proof at one rate holds for others with the same answer, and for no others."""
    ask, found, place = QUESTIONS[question], set(), (0, "p")
    for rate in (0.1, 0.12, 0.2, 0.3, 0.6):
        asked = {}
        assert ask(rates.Rate.of(rate, place, asked)) == ask(rate)
        for other in (0.1, 0.12, 0.2, 0.3, 0.6):
            same = ask(other) == ask(rate)
            assert rates.answers_hold(asked, {place: other}) == same, (rate, other)
            found.add(same)
    assert found == {True, False}


def test_a_rate_of_which_a_question_has_no_answer_is_another():
    asked = {}
    assert 1 / (rates.Rate.of(0.1, (0, "p"), asked) - 0.2) < 0
    assert rates.answers_hold(asked, {(0, "p"): 0.15})
    assert not rates.answers_hold(asked, {(0, "p"): 0.2})


# The facts.


def test_facts_hold_until_something_changes():
    module = block()
    swap_in(module)
    known = facts.Facts(module)
    assert known.hold(module)
    for change in (
        lambda m: m.train(not m.training),
        lambda m: m.to(torch.float64).to(torch.float32),
        lambda m: m.requires_grad_(False),
        lambda m: setattr(m.drop_path1, "drop_prob", 0.5),
    ):
        change(module)
        assert known.hold(module)
    for name, value in (
        ("norm1.eps", 1e-3),
        ("attn.num_heads", 4),
        ("attn.fused_attn", False),
        ("attn.proj", nn.Identity()),
        ("attn.norm", nn.Tanh()),
        ("mlp.act", nn.Tanh()),
        ("ls1", None),
        ("note", 1),
        ("attn.qkv.in_features", 5),
        ("drop_path1.drop_prob", 0.0),
        ("drop_path1.drop_prob", 1.0),
        ("norm2.normalized_shape", (3,)),
    ):
        other = copy.deepcopy(module)
        known = facts.Facts(other)
        owner, _, attribute = name.rpartition(".")
        setattr(other.get_submodule(owner), attribute, value)
        assert not known.hold(other), name


def test_facts_that_are_no_settings():
    layer = next(m for m in hf_small("vit")[0].modules() if type(m).__name__ == "ViTLayer")
    swap_in(layer)
    known = facts.Facts(layer)
    assert known.hold(layer)
    set_attention(layer.attention.config, "eager")
    assert not known.hold(layer)


def test_facts_are_asked_at_every_call(monkeypatch):
    module, asked = block(), []
    swap_in(module)
    x = torch.randn(2, 5, 32)
    module(x)
    own = facts.Facts.held
    monkeypatch.setattr(facts.Facts, "held", lambda *a: asked.append(1) or own(*a))
    for _ in range(3):
        module(x)
    assert len(asked) == 3
    module.eval()(x)  # a new state: once for the plans of others, once for the verdict
    assert len(asked) == 5


@pytest.mark.parametrize(
    "name",
    [
        *HF_MODELS,
        "vit_tiny_patch16_224",
        "eva02_tiny_patch14_224",
        "beit_base_patch16_224",
        "torchvision",
    ],
)
def test_every_proof_tries_the_fused_forward(name, no_proofs, monkeypatch):
    """A proof that compares nothing would prove anything."""
    tried, original = [], prove._difference
    monkeypatch.setattr(prove, "_difference", lambda *a: tried.append(len(a[0])) or original(*a))
    if name == "torchvision":
        model = torchvision_small()[0]
    else:
        model = (hf_small if name in HF_MODELS else timm_small)(name)[0]
    swap_in(model)
    assert len(tried) >= 3 * len(prove._proofs) and min(tried) >= 4


@pytest.mark.parametrize(
    ("calls", "training"),
    [
        (1, [True, False]),
        (2, [True, False]),
        (3, [True, True, False]),
        (4, [True] * 2 + [False] * 2),
    ],
)
def test_examples_run_in_training_and_in_evaluation(calls, training):
    assert [mode for _, mode in prove._modes([((), {})] * calls)] == training
