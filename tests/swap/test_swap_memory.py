"""swap_in(model, memory="low") rebuilds norms' outputs, and every gradient keeps its bits."""

import copy
import pickle

import pytest
import torch
from numerics import DEVICE
from outside import dino, positions
from torch.utils.checkpoint import checkpoint

from fastvit_kernels import backend, swap_in, swap_out
from fastvit_kernels.ops import recomputed_norm
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import hf_small, timm_small, torchvision_small

pytest.importorskip("timm")
pytest.importorskip("transformers")
pytest.importorskip("torchvision")


def _blocks(model):
    return [m for m in model.modules() if hasattr(type(m), "fused_memory")]


MODELS = {
    "timm": lambda: timm_small("vit_base_patch16_224"),
    "torchvision": torchvision_small,
    "transformers": lambda: hf_small("dinov2"),
    "recognised": lambda: (dino.Block(), None),
    "recognised, samples": lambda: (dino.Block(drop_path=0.4), None),
    "RMSNorm": lambda: timm_small("aimv2_large_patch14_224"),
    "RMSNorm, transformers": lambda: hf_small("aimv2"),
}


def _swapped_block(host, memory):
    """A fused block of the host's, and a function that calls it."""
    torch.manual_seed(0)
    model = randomize(MODELS[host]()[0]).to(DEVICE)
    report = swap_in(model, memory=memory)
    block = _blocks(model)[0]
    return model, report, block


def _width(block):
    return next(p.shape[0] for n, p in block.named_parameters() if "norm" in n or "ln_" in n)


def _step(block, call=lambda block, x: block(x)):
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(1)
    x = torch.randn(2, 5, _width(block), generator=generator).to(DEVICE).requires_grad_()
    with backend("triton"), torch.autocast(DEVICE.type, torch.float16):
        y = call(block, x)
    y = y[0] if isinstance(y, tuple) else y
    upstream = torch.randn(y.shape, generator=generator).to(y)
    return y, *torch.autograd.grad(y, [x, *block.parameters()], upstream)


@pytest.fixture
def rebuilt(monkeypatch):
    """The shapes of what was rebuilt."""
    shapes = []
    for name in ("layer_norm_fwd", "rms_norm_fwd"):
        launcher = getattr(recomputed_norm, name)

        def counted(*arguments, launcher=launcher):
            shapes.append(arguments[0].shape)
            return launcher(*arguments)

        monkeypatch.setattr(recomputed_norm, name, counted)
    return shapes


@pytest.mark.parametrize("host", MODELS)
def test_low_memory_keeps_every_bit_and_no_norm(host, rebuilt):
    results = []
    for memory, norms in (("default", 0), ("low", 2)):
        model, report, block = _swapped_block(host, memory)
        results.append(_step(block))
        assert len(report.rebuilt) == norms * len(_blocks(model)) and len(rebuilt) == norms
        assert report.rebuilt_rms == (len(report.rebuilt) if "RMS" in host else 0)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_low_memory_is_reported_and_undone():
    model, report, block = _swapped_block("timm", "low")
    assert f"{2 * len(_blocks(model))} LayerNorm outputs are rebuilt" in str(report)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(b.fused_memory == "low" for b in _blocks(twin))
    again = swap_in(model, only="blocks.0")
    assert block.fused_memory == "default" and again.rebuilt
    assert not any(name.startswith("blocks.0.") for name in again.rebuilt)
    swap_in(model, memory="low", skip="blocks.0")
    assert block.fused_memory == "default"
    swap_out(model)
    assert not any("fused_memory" in vars(m) for m in model.modules())


@pytest.mark.parametrize("kind", ["swin", "sam", "recognised"])
def test_norms_of_windows_are_not_rebuilt(kind):
    from timm.models import swin_transformer, vision_transformer_sam

    block = {
        "swin": lambda: swin_transformer.SwinTransformerBlock(16, (4, 4), 2, window_size=2),
        "sam": lambda: vision_transformer_sam.Block(16, 2, window_size=2, input_size=(4, 4)),
        "recognised": lambda: positions.GridBlock(2, (2, 2)),
    }[kind]()
    report = swap_in(block, memory="low")
    assert report.level == "block", str(report)
    assert report.rebuilt == ["norm2"]


def test_low_memory_calls_a_hooked_norm():
    _, _, block = _swapped_block("timm", "low")
    calls = []
    block.norm1.register_forward_hook(lambda *a: calls.append(1))
    _step(block)
    assert calls == [1] and swap_in(block, memory="low").rebuilt == ["norm2"]


def test_low_memory_breaks_no_graph(rebuilt):
    """A compiler keeps what it likes: nothing is rebuilt, and it follows every line."""
    _, _, block = _swapped_block("timm", "low")
    wanted = _step(block)
    rebuilt.clear()
    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = _step(block, lambda _, x: compiled(x))
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
    assert not rebuilt


def test_low_memory_leaves_a_checkpoint_alone(rebuilt):
    """What a checkpoint computes again it need not keep: its own hooks decide."""
    _, _, block = _swapped_block("timm", "default")
    wanted = _step(block)
    block.fused_memory = "low"
    got = _step(block, lambda block, x: checkpoint(block, x, use_reentrant=False))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)) and not rebuilt


@pytest.mark.parametrize(
    ("error", "memory"), [(ValueError, "tiny"), (TypeError, None), (TypeError, True)]
)
def test_low_memory_rejects(error, memory):
    model, _ = timm_small("vit_base_patch16_224")
    with pytest.raises(error, match="swap_in: memory must be"):
        swap_in(model, memory=memory)
    assert not _blocks(model)
