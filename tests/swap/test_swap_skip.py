"""swap_in(model, drop_path="skip"): branches of hosts compute nothing for what they drop."""

import copy
import pickle

import pytest
import torch
from numerics import DEVICE, assert_accurate, rand
from outside import dino
from torch import nn

from fastvit_kernels import backend, keep_samples, swap_in, swap_out
from fastvit_kernels.ops.common.gemm_configs import forced_route
from fastvit_kernels.ops.norm.functions import layer_norm_and_input
from fastvit_kernels.swap.hosts import branch, fused
from tests.model_coverage.compare import randomize

pytest.importorskip("timm")
pytest.importorskip("transformers")


def _timm_block(**arguments):
    from timm.models.vision_transformer import Block

    given = dict(init_values=0.5, drop_path=0.5, qkv_bias=True)
    return Block(16, 2, **{**given, **arguments})


def _eva_block():
    from timm.models.eva import EvaBlock

    return EvaBlock(16, 2, init_values=0.5, drop_path=0.5, swiglu_mlp=True, scale_mlp=True)


def _hf_layer():
    from transformers import Dinov2Config
    from transformers.models.dinov2.modeling_dinov2 import Dinov2Layer

    return Dinov2Layer(
        Dinov2Config(
            hidden_size=16,
            num_attention_heads=2,
            drop_path_rate=0.5,
            attn_implementation="sdpa",
        )
    )


HOSTS = {
    "timm": _timm_block,
    "timm, Eva": _eva_block,
    "transformers": _hf_layer,
    "recognised": lambda: dino.Block(16, 2, drop_path=0.1),
}


class _Holder(nn.Module):
    """A stack of one block."""

    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x):
        y = self.blocks[0](x)
        return y[0] if isinstance(y, tuple) else y


def _swapped(host, **options):
    torch.manual_seed(0)
    model = randomize(_Holder(HOSTS[host]())).to(DEVICE).train()
    return model, swap_in(model, drop_path="skip", **options)


def _step(model, x, seed=5):
    torch.manual_seed(seed)
    x = x.detach().clone().requires_grad_()
    y = model(x)
    upstream = rand(*y.shape, seed=3, grad=False)
    return y, *torch.autograd.grad(y, [x, *model.parameters()], upstream)


@pytest.fixture
def counted(monkeypatch):
    """How many samples each norm of a skipping branch read."""
    seen = []

    def norm(*args, samples=None, **options):
        seen.append(None if samples is None else len(samples) - len(args[0]))
        return layer_norm_and_input(*args, samples=samples, **options)

    monkeypatch.setattr(fused, "layer_norm_and_input", norm)
    return seen


@pytest.mark.parametrize("host", HOSTS)
def test_equals_the_mask_of_the_same_samples(host, counted, monkeypatch):
    model, report = _swapped(host)
    twin = copy.deepcopy(model)
    swap_in(twin)  # the default: masks
    x = rand(6, 5, 16)
    rate = 0.1 if host == "recognised" else 0.5
    kept = max(int(6 * (1 - rate)), 1)
    assert len(report.skipping) == 2 and "2 branches compute no sample" in str(report)

    def dense(self, x, dtype):
        if not self.training:
            return None
        samples = keep_samples(len(x), rate, x.device)
        rows = torch.zeros(len(x), device=x.device)
        rows[samples[:kept]] = len(x) / kept
        return rows

    with backend("triton"), forced_route("triton"):
        del counted[:]
        skipped = _step(model, x)
        assert counted == [kept, kept]
        assert model(x[:0]).shape == (0, 5, 16)
        for cls in {type(m) for m in twin.modules() if isinstance(m, fused.DropPath)}:
            monkeypatch.setattr(cls, "fused_row_scale", dense)
        masked = _step(twin, x)
        for a, b in zip(skipped, masked, strict=True):  # no bits: library products of other sizes
            torch.testing.assert_close(a, b, rtol=1e-5, atol=5e-6)
        evaluated = _step(model.eval(), x)
        assert torch.equal(evaluated[0], _step(twin.eval(), x)[0])


def _swin_block():
    from timm.models.swin_transformer import SwinTransformerBlock

    return SwinTransformerBlock(16, (4, 4), 2, window_size=2, shift_size=1, drop_path=0.5)


def test_windows_of_dropped_samples_are_not_computed(counted, monkeypatch):
    """timm's Swin: a shift's mask is by window, for whichever samples are left."""
    monkeypatch.setitem(HOSTS, "swin", _swin_block)
    model, report = _swapped("swin")
    twin = copy.deepcopy(model)
    swap_in(twin)
    assert report.skipping == ["blocks.0.norm1", "blocks.0.norm2"]

    def dense(self, x, dtype):
        samples = keep_samples(len(x), 0.5, x.device)
        return torch.zeros(len(x), device=x.device).index_fill_(0, samples[:2], len(x) / 2)

    x = rand(4, 4, 4, 16)
    with backend("triton"), forced_route("triton"):
        del counted[:]
        skipped = _step(model, x)
        assert counted == [2, 2]
        path = type(twin.blocks[0].drop_path1)
        monkeypatch.setattr(path, "fused_row_scale", dense)
        for a, b in zip(skipped, _step(twin, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_transformers_swin_keeps_its_masks_and_is_reported(monkeypatch):
    from transformers import SwinConfig
    from transformers.models.swin import modeling_swin

    layer = modeling_swin.SwinLayer(
        SwinConfig(window_size=2, attn_implementation="sdpa"), 16, (4, 4), 2, drop_path_rate=0.5
    )
    model = _Holder(layer)
    report = swap_in(model, drop_path="skip")
    assert report.skipping == [] and report.level == "block"
    assert "does not reach it" in str(report)


def test_dinos_own_nested_drop_path_runs_without_copies(counted, monkeypatch):
    """The host's own samples, above a ratio of 0.1, by default."""
    torch.manual_seed(0)
    host = randomize(dino.Block(32, 2, drop_path=0.4)).to(DEVICE).train()
    ours = copy.deepcopy(host)
    report = swap_in(ours)
    assert report.level == "block" and report.skipping == ["norm1", "norm2"]
    monkeypatch.delattr(torch, "index_add")
    del counted[:]
    with backend("triton"):
        ours(rand(5, 6, 32))
    assert counted == [3, 3]
    monkeypatch.undo()
    assert ours(rand(0, 6, 32)).shape == (0, 6, 32)
    inputs = {"x": rand(5, 6, 32), **{n.replace(".", "_"): p for n, p in ours.named_parameters()}}

    def run(model):
        def call(x, **parameters):
            torch.manual_seed(7)
            given = {n: parameters[n.replace(".", "_")] for n, _ in model.named_parameters()}
            if x.dtype is torch.float64:
                model.double()
            return torch.func.functional_call(model, given, (x,))

        return call

    with backend("triton"):
        assert_accurate(run(ours), run(host), inputs)


def test_branches_that_cannot_skip_mask_and_are_reported():
    torch.manual_seed(0)
    model = _Holder(_timm_block())
    model.blocks[0].norm1 = nn.GroupNorm(1, 5)  # no norm of ours
    report = swap_in(model, drop_path="skip")
    assert report.skipping == ["blocks.0.norm2"]
    rows = [row for row in report.left if row.name == "blocks.0.drop_path1"]
    assert [row.reason for row in rows] == [
        'drop_path="skip" does not reach it: its branch computes all'
    ]
    assert "does not reach it" in str(report)
    model.blocks[0].drop_path1.drop_prob = 0.0  # which drops nothing
    assert "does not reach it" not in str(swap_in(model, drop_path="skip"))


def test_unscaled_drop_path_keeps_its_masks():
    model = _Holder(_timm_block())
    for path in (model.blocks[0].drop_path1, model.blocks[0].drop_path2):
        path.scale_by_keep = False
    assert swap_in(model, drop_path="skip").skipping == []


def test_a_drop_path_in_eval_skips_nothing(counted):
    """Of a block in training, as where the first blocks are frozen."""
    model, _ = _swapped("timm")
    for path in (model.blocks[0].drop_path1, model.blocks[0].drop_path2):
        path.eval()
    with backend("torch"):
        ours = _step(model, rand(4, 5, 16))
        swap_out(model)
        for a, b in zip(ours, _step(model, rand(4, 5, 16)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_arguments_of_each_sample_keep_the_masks(counted):
    """A mask (B, 1, 1, T) goes with samples that the branch would not have."""
    x = rand(3, 4, 8)
    each = branch._of_each_sample
    assert each(torch.zeros(3, 1, 1, 4), x) and each([None, torch.zeros(3, 4)], x)
    assert each(torch.zeros(3, 8), rand(3, 2, 4, 8)) and each(torch.zeros(3), x)
    assert not each(torch.zeros(1, 2, 4, 4), x) and not each(torch.zeros(6, 8), x)
    assert not each(torch.zeros(3, 8), x)  # angles, with as many places as there are samples
    assert not each(None, x)


def test_is_kept_undone_and_set_anew():
    model, _ = _swapped("timm")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.blocks[0].fused_drop_path == "skip"
    assert swap_in(model).skipping == [] and model.blocks[0].fused_drop_path == "mask"
    swap_in(model, drop_path="skip")
    swap_out(model)
    assert "fused_drop_path" not in vars(model.blocks[0])


def test_low_memory_keeps_every_bit():
    x, results = rand(6, 5, 16), []
    for memory in ("default", "low"):
        model, _ = _swapped("timm", memory=memory)
        with backend("triton"), torch.autocast(DEVICE.type, torch.bfloat16):
            results.append(_step(model, x))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_compiles():
    model, _ = _swapped("timm")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = rand(6, 5, 16)
    with backend("triton"):
        wanted = _step(model, x)
        torch.manual_seed(5)
        torch.testing.assert_close(compiled(x), wanted[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("word", ["drop", None, True])
def test_rejects(word):
    with pytest.raises(
        ValueError if word == "drop" else TypeError, match="swap_in: drop_path must"
    ):
        swap_in(_Holder(_timm_block()), drop_path=word)
