"""Random edits of modules after swap_in: whatever is changed, swapped stays equal to host."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from outside import by_hand, dino, others
from torch import nn
from torch.nn.utils import parametrize

from fastvit_kernels import backend, swap_in
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import hf_small

timm = pytest.importorskip("timm")
pytest.importorskip("transformers")

CASES, CHUNK, SEED = 300, 25, 0
KINDS = """setting setting setting child child container hook pre_hook method class mode frozen
parameter bias parametrization attribute"""


@pytest.fixture(autouse=True)
def _torch_backend():
    with backend("torch"):
        yield


def hf_layer(name):
    model, _ = hf_small(name, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]


def sequential():
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Dropout(0.2), nn.Linear(24, 16))


def timm_block():
    from timm.models.vision_transformer import Block

    return Block(16, 2, init_values=0.5, drop_path=0.3, qkv_bias=True, proj_drop=0.2)


def encoder_layer():
    layer = nn.TransformerEncoderLayer(16, 2, 24, 0.2, "gelu", batch_first=True, norm_first=True)
    layer.self_attn.dropout = 0.0
    return layer


class Patches(nn.Module):
    """Gives a convolution the call of the others."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(1, 16, 4, 4)

    def forward(self, x):
        return self.proj(x[:, :4].reshape(len(x), 1, 8, 8))


MODULES = {
    "sequential": sequential,
    "timm": timm_block,
    "encoder_layer": encoder_layer,
    "vit": lambda: hf_layer("vit"),
    "dinov2": lambda: hf_layer("dinov2"),
    "norm": lambda: nn.LayerNorm(16),
    "patches": Patches,
    # found by structure
    "dinov2_repository": lambda: quiet(dino.Block(16, 2, drop=0.2, drop_path=0.05)),
    "open_clip": lambda: others.ClipBlock(16, 2, batch_first=True),
    "by_hand": lambda: by_hand.Inline(16, 2),
}


def quiet(block):
    """Dropout of attention draws numbers of its own."""
    block.attn.attn_drop = 0.0
    return block


class Shift(nn.Module):
    def forward(self, weight):
        return weight + 0.1


def _scaled(module, args, output):
    return output * 1.5 if isinstance(output, torch.Tensor) else output


def _setting(value, draw):
    """Another value of a setting."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice([value * 2, max(value // 2, 1), value + 1])
    if isinstance(value, float):
        return draw.choice([value * 1.5, 0.4, 0.0])
    return tuple(_setting(v, draw) for v in value)


def _edit(root, draw):
    """One change of a module inside `root`, drawn; returns its name and what undoes it."""
    names = [n for n, _ in root.named_modules()]
    name = draw.choice(names)
    module = root.get_submodule(name)
    kind = draw.choice(KINDS.split())
    undo: Callable[[], None] | None = None
    if kind == "setting":
        own = sorted(
            k
            for k, v in vars(module).items()
            if isinstance(v, (bool, int, float, tuple))
            and not k.startswith("_")
            and k not in ("dropout", "attention_dropout", "attn_drop", "training")
            and "attn_drop" not in name
        )
        if own:
            key = draw.choice(own)
            kind = f"setting {key}"
            setattr(module, key, _setting(getattr(module, key), draw))
    elif kind == "child":
        children = [k for k, c in module._modules.items() if c is not None]
        if children and type(module).__name__ != "MultiheadAttention":
            key = draw.choice(children)
            new = draw.choice(
                [
                    nn.Identity,
                    nn.Tanh,
                    nn.ReLU,
                    lambda: nn.Dropout(0.3),
                    lambda: nn.LayerNorm(16),
                    lambda: nn.Linear(16, 16),
                    lambda: nn.RMSNorm(16),
                    nn.GELU,
                ]
            )
            kind = f"child {key}"
            torch.manual_seed(1)
            setattr(module, key, new())
    elif kind == "container" and isinstance(module, nn.Sequential):
        torch.manual_seed(1)
        kind = draw.choice(["append", "insert", "delete"])
        if kind == "append":
            module.append(nn.Linear(16, 16))
        elif kind == "insert":
            module.insert(draw.randrange(len(module)), nn.Tanh())
        else:
            del module[draw.randrange(len(module))]
    elif kind == "hook":
        module.register_forward_hook(_scaled)
    elif kind == "pre_hook":
        module.register_forward_pre_hook(
            lambda m, args: tuple(a * 1.5 if isinstance(a, torch.Tensor) else a for a in args)
        )
    elif kind == "method":
        own = type(module)  # asked at the call, for a class that is patched later
        module.forward = lambda *a, **k: _scaled(None, None, own.forward(module, *a, **k))
    elif kind == "class":
        cls = getattr(type(module), "fused_host", type(module))
        before = cls.forward
        cls.forward = lambda self, *a, **k: _scaled(None, None, before(self, *a, **k))

        def restore():
            cls.forward = before

        undo = restore
    elif kind == "mode":
        module.train(not module.training)
    elif kind == "frozen":
        module.requires_grad_(False)
    elif kind == "parameter":
        with torch.no_grad():
            for p in module.parameters():
                p.mul_(1.5)
    elif kind == "bias" and getattr(module, "bias", None) is not None:
        module.bias = None
    elif kind == "parametrization" and isinstance(module, (nn.Linear, nn.LayerNorm)):
        if "out_proj" not in name:  # torch reads it without a call, parametrized or not
            parametrize.register_parametrization(module, "weight", Shift())
    elif kind == "attribute":
        module.note = draw.choice([1, "a", None])
    return f"{name}: {kind}", undo


def outcome(module, x):
    """Output and gradient of the input, or the error."""
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    try:
        y = module(x)
        y = y if isinstance(y, torch.Tensor) else y[0]
        if not y.requires_grad:
            return y, torch.zeros(()), torch.get_rng_state()
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(4)))
        return y.detach(), x.grad, torch.get_rng_state()
    except Exception as error:
        return error


@pytest.mark.parametrize("first", range(0, CASES, CHUNK))
def test_random_edits(first):
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    for case in range(first, first + CHUNK):
        draw = random.Random(f"{SEED} {case}")
        torch.manual_seed(case)
        host = randomize(MODULES[draw.choice(sorted(MODULES))]()).train()
        other, history = copy.deepcopy(host), []
        if draw.random() < 0.8:
            swap_in(other)
        if case % 2:
            outcome(other, x)  # an edit behind a call
        for _ in range(draw.choice([1, 1, 2, 3])):
            seed = draw.random()
            what, undo = _edit(other, random.Random(seed))
            got = outcome(other, x)
            if undo is not None:
                undo()
            _, undo = _edit(host, random.Random(seed))
            wanted = outcome(host, x)
            if undo is not None:
                undo()
            history.append(what)
            where = f"case {case}, {type(host).__name__}: {history}"
            if isinstance(wanted, Exception):
                assert isinstance(got, Exception), f"{where}: the host raises {wanted}"
                break
            assert not isinstance(got, Exception), f"{where}: {got}"
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda m: f"{where} {m}")  # noqa: B023
        if draw.random() < 0.2:
            swap_in(other)
            got, wanted = outcome(other, x), outcome(host, x)
            assert isinstance(got, Exception) == isinstance(wanted, Exception), where
