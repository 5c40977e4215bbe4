"""A block of every host, called as its model calls it: it runs fused, also where its dropouts draw;
a hook on any part of it is called; parts may be in other modes than the block."""

from __future__ import annotations

import copy
from functools import cache, partial

import pytest
import torch
from outside import by_hand, dino, dinov3, others, positions
from packed_towers import inputs as packed_inputs, tower
from swapped_models import HandWritten, images
from test_bias_hosts import MODELS as BIASED, _built
from test_rope_hosts import small as rope_small
from torch import nn

import fastvit_kernels as fk
from fastvit_kernels.swap.hosts.fused import Fused
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import hf_small, timm_small, torchvision_small

PATHS = dict(drop_path_rate=0.3)
OWN = {
    "dinov2": partial(dino.Block, drop_path=0.05, drop=0.2),
    "dinov2_samples": partial(dino.Block, drop_path=0.4),
    "dinov3": dinov3.Block,
    "dino": partial(dino.WeightsBlock, drop=0.1, drop_path=0.2),
    "vit_pytorch": partial(others.Stack, depth=1, dropout=0.1),
    "clip": others.ClipBlock,
    "inline": partial(by_hand.Inline, dropout=0.1),
    "parallel": by_hand.Parallel,
    "beit": positions.BeitBlock,
    "eva": partial(positions.BeitBlock, positions.EvaAttention),
}


def _own(make):
    return lambda: (make(), torch.randn(5, 6, 32, generator=torch.Generator().manual_seed(1)))


HOSTS = {
    **{f"own {name}": _own(make) for name, make in OWN.items()},
    "own grid": lambda: (positions.GridBlock(3, (3, 3)), torch.randn(2, 4, 5, 32)),
    "timm": lambda: timm_small("vit_base_patch14_dinov2", **PATHS),
    "timm gated": lambda: timm_small("vit_giant_patch14_reg4_dinov2", **PATHS),
    "timm res-post": lambda: timm_small("vit_base_patch16_rpn_224", **PATHS),
    "timm scaling": lambda: timm_small("vit_pwee_patch16_reg1_gap_256", **PATHS),
    "timm things": lambda: timm_small("vit_base_patch16_18x2_224", **PATHS),
    "timm relpos": lambda: timm_small("vit_relpos_small_patch16_224", **PATHS),
    "torchvision": torchvision_small,
    "torch": lambda: (HandWritten(dropout=0.1), images()),
    **{f"biased {name}": partial(_built, name) for name in BIASED},
    **{
        f"rope {name}": partial(rope_small, name)
        for name in (
            "eva02_norms",
            "dinov3_gated",
            "rope",
            "aimv2_timm",
            "internvl_6b",
            "pixtral",
            "vjepa2",
            "gemma4",
        )
    },
    **{f"hf {name}": partial(hf_small, name) for name in ("vit", "dinov2", "clip", "siglip2")},
    **{
        f"packed {name}": lambda n=name: (tower(n), packed_inputs())
        for name in ("qwen2_5_vl", "qwen3_vl")
    },
}


class Case:
    """A block of a host, and the call that its model makes."""

    def __init__(self, name: str):
        torch.manual_seed(0)
        model, inputs = HOSTS[name]()
        model = randomize(model).double().eval()
        swapped = copy.deepcopy(model)
        report = fk.swap_in(swapped)
        assert report.level == "block", str(report)
        paths = [s.name for s in report.swapped if s.level == "block"]
        path = paths[0 if name.startswith("biased") else -1]  # the last has a DropPath
        inputs = typed(inputs, torch.float64)
        self.host, calls = model.get_submodule(path), []
        hook = self.host.register_forward_pre_hook(
            lambda m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
        model(**inputs) if isinstance(inputs, dict) else model(inputs)
        hook.remove()
        self.args, self.kwargs = calls[0]
        block = swapped.get_submodule(path)
        self.drawing = {  # attention's own dropouts
            f"{p}.{n}".lstrip(".")
            for p, m in block.named_modules()
            if isinstance(m, Fused)
            for n in m.fused_attention_dropout
        }
        self.tolerance = max(m.fused_tolerance for m in block.modules() if isinstance(m, Fused))

    def two(self):
        """The block as it is and swapped, without a dropout of attention: its numbers are ours."""
        host = copy.deepcopy(self.host)
        for name in self.drawing:
            set_rate(host, name, 0.0)
        block, state = copy.deepcopy(host), torch.get_rng_state()
        fk.swap_in(block)
        assert torch.equal(torch.get_rng_state(), state)
        return host, block

    def step(self, block, dtype=torch.float64):
        """Outputs and gradients of a step with arguments of this dtype."""
        torch.manual_seed(3)
        x, *rest = typed(self.args, dtype)
        x = x.detach().clone().requires_grad_()
        y = block(x, *rest, **typed(self.kwargs, dtype))
        y = y[0] if isinstance(y, tuple) else y
        generator = torch.Generator().manual_seed(4)
        y.backward(torch.randn(y.shape, generator=generator, dtype=y.dtype))
        found = {"y": y.detach(), "x": x.grad, "drawn": torch.rand(1)}
        found |= {n: p.grad for n, p in block.named_parameters()}
        block.zero_grad()
        return found

    def assert_same(self, block, host, what=""):
        actual, wanted = self.step(block), self.step(host)
        for name, value in wanted.items():
            if value is None:
                assert actual[name] is None, (what, name)
            else:
                limit = self.tolerance * max(1, value.abs().max())
                torch.testing.assert_close(
                    actual[name],
                    value,
                    rtol=self.tolerance,
                    atol=limit,
                    msg=lambda text, name=name: f"{what} {name}: {text}",
                )


def typed(value, dtype):
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: typed(v, dtype) for k, v in value.items()}
    return (
        type(value)(typed(v, dtype) for v in value) if isinstance(value, (tuple, list)) else value
    )


case = cache(Case)


@pytest.fixture(autouse=True)
def _torch_backend():
    with fk.backend("torch"):
        yield


def dropouts(case, block):
    return [m for n, m in block.named_modules() if type(m) is nn.Dropout and n not in case.drawing]


def drop_more(case, block):
    for m in dropouts(case, block):
        m.p = 0.25
    for path, m in block.named_modules():  # torchvision's Swin and others have a number
        if getattr(m, "dropout", None) == 0.0 and f"{path}.dropout".lstrip(".") not in case.drawing:
            m.dropout = 0.25


# Blocks that keep their host's forward where a dropout draws by window, or always
UNFUSED = ("biased swin_torchvision", "biased swin_transformers", "biased sam_timm")
UNFUSED += ("biased swinv2_torchvision",)
MODES = {
    "evaluation": lambda drops, m: m.eval(),
    "training": lambda drops, m: m.train(),
    "dropouts at rest": lambda drops, m: [d.eval() for d in drops(m.train())],
    "parts at rest": lambda drops, m: [c.eval() for c in m.train().children()],
    "dropouts alone": lambda drops, m: [d.train() for d in drops(m.eval())],
}


@pytest.mark.parametrize("name", HOSTS)
def test_a_block_runs_fused_in_every_mode(name):
    """Dropouts that draw, and layers in another mode than the block."""
    at = case(name)
    host, block = at.two()
    at.assert_same(block.train(), host.train(), "rates of its own")
    drop_more(at, host), drop_more(at, block)
    for mode, set_mode in MODES.items():
        for module in (host, block):
            set_mode(partial(dropouts, at), module)
        with fk.watch(block) as status:
            at.assert_same(block, host, mode)
        ways = {row.way for row in status.modules if row.level == "block"}
        fused = ways == {"fused"} or (name in UNFUSED and mode != "evaluation")
        assert fused, f"{mode}: {status}"


@pytest.mark.parametrize("name", HOSTS)
def test_attention_drops_in_training_alone(name):
    at = case(name)
    host, block = at.two()
    plain = at.step(block.train())["y"]
    drops = [d for d in at.drawing if set_rate(block, d, 0.9) and set_rate(host, d, 0.9)]
    if not drops or torch.equal(at.step(host.train())["y"], plain):
        return  # it has none
    dropped = at.step(block.train())["y"]
    assert not torch.allclose(dropped, plain)
    at.assert_same(block.eval(), host.eval())


def set_rate(module, name, p):
    """Whether it has this dropout or setting: it gets the rate."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    if isinstance(getattr(owner, last, None), nn.Dropout):
        getattr(owner, last).p = p
    elif hasattr(owner, last):
        setattr(owner, last, p)
    else:
        return False
    return True


@pytest.mark.parametrize("name", ["own dino", "own vit_pytorch", "own inline"])
def test_a_dropout_of_attention_in_another_mode(name):
    """As where somebody puts all dropouts to rest."""
    at = case(name)
    host, block = at.two()
    for module in (host, block):
        for path in at.drawing:
            module.train().get_submodule(path).p = 0.25
            module.get_submodule(path).eval()
    at.assert_same(block, host)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", HOSTS)
def test_a_block_keeps_its_dtypes_under_autocast(name, dtype):
    """Of the output and every gradient, of fp32 parameters and an activation of either."""
    at = case(name)
    host, block = (m.eval().float() for m in at.two())
    with fk.watch(block) as status, torch.autocast("cpu", torch.bfloat16):
        wanted, actual = at.step(host, dtype), at.step(block, dtype)
    assert all(row.way != "host" for row in status.modules if row.level == "block"), str(status)
    for key, value in wanted.items():
        if value is None:
            assert actual[key] is None, key
            continue
        limit = 0.1 * max(1.0, value.abs().max().item())
        torch.testing.assert_close(
            actual[key], value, rtol=0.1, atol=limit, msg=lambda text, key=key: f"{key}: {text}"
        )


def scaled(result):
    """The output of a part, changed."""
    if isinstance(result, torch.Tensor):
        return result * 1.5 if result.is_floating_point() else result
    if isinstance(result, tuple):
        return tuple(map(scaled, result))
    return result


@pytest.mark.parametrize("name", HOSTS)
def test_a_hook_on_any_part_is_called(name):
    at = case(name)
    host, block = at.two()
    for training, path in [(t, p) for t in (False, True) for p, _ in host.named_modules()]:
        host.train(training), block.train(training)
        calls = []
        handles = [
            m.get_submodule(path).register_forward_hook(
                lambda m, args, out, who=who, to=calls: to.append(who) or scaled(out)
            )
            for who, m in enumerate((host, block))
        ]
        at.assert_same(block, host, f"{path} {training}")
        assert calls.count(0) == calls.count(1), path
        for handle in handles:
            handle.remove()
