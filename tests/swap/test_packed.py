"""fk.packed: crops of several sizes as one sequence give what each size gives alone."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from outside import dinov3, nested
from torch import nn

import fastvit_kernels as fk
from fastvit_kernels.models import modules, packing
from fastvit_kernels.swap.compare import model_errors
from fastvit_kernels.swap.hosts import branch, fused
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import hf_small

timm = pytest.importorskip("timm")
pytest.importorskip("transformers")

SMALL = dict(img_size=48, embed_dim=32, depth=2, num_heads=2, num_classes=5, dynamic_img_size=True)


def _timm(name, **settings):
    return lambda: timm.create_model(name, **{**SMALL, **settings})


def _ours(**settings):
    return lambda: fk.create_vit("vit_base_patch16_224", **{**SMALL, **settings})


class _Hidden(nn.Module):
    """The last hidden state of a model of transformers."""

    def __init__(self, name, **call):
        super().__init__()
        self.model, self.call = hf_small(name)[0], call
        side = self.model.config.patch_size
        self.sizes = 3 * side, 2 * side

    def forward(self, images):
        return self.model(images, **self.call).last_hidden_state


class _Heads(nn.Module):
    """Attention up to its projection, a module inside of another: transformers' former form."""

    def __init__(self, attn):
        super().__init__()
        C = attn.proj.in_features
        self.heads = attn.num_heads
        self.query, self.key, self.value = (nn.Linear(C, C) for _ in range(3))

    def forward(self, x):
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class _OfHeads(nn.Module):
    def __init__(self, attn):
        super().__init__()
        self.inside, self.proj = _Heads(attn), attn.proj

    def forward(self, x, attn_mask=None, is_causal=False):
        return self.proj(self.inside(x))


def _of_heads():
    model = _timm("vit_base_patch16_224")()
    for block in model.blocks:
        block.attn = _OfHeads(block.attn)
    return model


ANY = dict(interpolate_pos_encoding=True)
MODELS = {
    "timm": _timm("vit_base_patch16_224", init_values=0.5, qk_norm=True),
    "timm dinov2": _timm("vit_base_patch14_reg4_dinov2", patch_size=16),
    "timm dinov3": _timm("vit_base_patch16_dinov3", embed_dim=64),
    "timm eva02": _timm("eva02_base_patch14_224", patch_size=16),
    "timm, attention inside attention": _of_heads,
    "vit": lambda: _Hidden("vit", **ANY),
    "dinov2": lambda: _Hidden("dinov2"),
    "dinov3_vit": lambda: _Hidden("dinov3_vit"),
    "ours": _ours(init_values=0.5),
    "ours, rope": _ours(rope_type="dinov3", reg_tokens=2, qk_norm=True, pos_embed="none"),
}


class Crops(nn.Module):
    """A model on two sizes: each alone or, after `pack`, as one sequence."""

    def __init__(self, model):
        super().__init__()
        self.model = model
        self.packed = None

    def pack(self, memory="default"):
        fk.swap_in(self.model, memory=memory)
        self.packed = fk.packed(self.model)

    def forward(self, large, small):
        crops = [large, small[:2], small[2:]]
        if self.packed is None:
            return [self.model(large), *self.model(small).split([2, 1])]
        results = self.packed(crops)
        assert self.packed.alone is None
        return results


def _crops(model):
    sizes = getattr(model, "sizes", (48, 32))
    generator = torch.Generator().manual_seed(0)
    shapes = {"large": (2, sizes[0]), "small": (3, sizes[1])}
    return {
        name: torch.randn(B, 3, side, side, generator=generator)
        for name, (B, side) in shapes.items()
    }


def _failed(model, swap=Crops.pack, **more):
    errors = model_errors(Crops(randomize(model)).train(), _crops(model), swap, **more)
    return [str(e) for e in errors if not e.passed]


@pytest.mark.parametrize("name", MODELS)
def test_the_sizes_give_what_each_gives_alone(name):
    """In PyTorch's path; under autocast, too."""
    with fk.backend("torch"):
        assert not _failed(MODELS[name]())
        assert not _failed(MODELS[name](), autocast=torch.bfloat16)


@pytest.mark.parametrize("name", ["timm", "timm dinov3", "ours, rope"])
def test_the_kernels_keep_to_the_2x_rule(name):
    assert not _failed(MODELS[name]())


def test_low_memory():
    assert not _failed(MODELS["timm"](), lambda m: m.pack("low"))


def _dropping(name, drop_path):
    """A model whose second block drops half of the images, and the crops, in float64."""
    made = _ours(drop_path_rate=0.5, drop_path=drop_path, init_values=0.5)
    if name == "timm":
        made = _timm("vit_base_patch16_224", drop_path_rate=0.5, init_values=0.5)
    model = randomize(made()).double()
    if name == "timm":
        fk.swap_in(model, drop_path=drop_path)
    return model, [x.double() for x in _crops(model).values()]


def _step(run, model, crops):
    """Outputs and gradients of a step."""
    model.zero_grad()
    outputs = run(crops)
    sum((y * torch.arange(y.numel()).view(y.shape).cos()).sum() for y in outputs).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return [y.detach() for y in outputs], grads


def _same(model, crops, run=None):
    """Whether a packed step is that of each size alone; the packed model."""
    run = run or fk.packed(model)
    ours, theirs = _step(run, model, crops), _step(lambda c: [*map(model, c)], model, crops)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    return run


@pytest.mark.parametrize("name", ["timm", "ours"])
def test_drop_path_drops_images(name, monkeypatch):
    """With the same draws for each image: all but the first of a size drop."""
    asked = []

    def rows(self, x, dtype=None):
        asked.append(len(x))
        return torch.tensor([2.0, 0.0, 0.0]).to(dtype or x.dtype)[: len(x)]

    with fk.backend("torch"):
        model, crops = _dropping(name, "mask")
        monkeypatch.setattr(fused.DropPath, "fused_row_scale", rows)
        monkeypatch.setattr(modules.DropPath, "row_scale", rows)
        assert _same(model, crops).alone is None and asked[:2] == [2, 3]


@pytest.mark.parametrize("name", ["timm", "ours"])
def test_skipped_images_are_no_part_of_the_sequence(name, monkeypatch):
    """With the same draws: 1 of 2 images and 1 of 3 are computed, with factors 2 and 3."""
    asked = []

    def keep(B, rate, device=None):
        asked.append(B)
        order = torch.arange(B - 1, -1, -1)
        return torch.cat((order[: packing.num_kept(B, rate)], order))

    with fk.backend("torch"):
        model, crops = _dropping(name, "skip")
        for home in (packing, branch, modules):
            monkeypatch.setattr(home, "keep_samples", keep)
        assert _same(model, crops).alone is None and asked[:2] == [2, 3]


def test_attention_over_the_whole_sequence_is_noticed(monkeypatch):
    """The block-diagonal mask dropped: images blend, and nothing else would tell."""
    ends = property(lambda self: torch.tensor([0, self.ends[-1]], dtype=torch.int32))
    with fk.backend("torch"):
        model = randomize(MODELS["timm"]()).double()
        fk.swap_in(model)
        crops = [x.double() for x in _crops(model).values()]
        _same(model, crops)
        monkeypatch.setattr(packing.Crops, "cu_seqlens", ends)
        with pytest.raises((AssertionError, ValueError)):
            _same(model, crops)


LISTS = {
    "dinov3": (lambda: dinov3.Block(), True),
    "dinov2": (lambda: nested.Block(), True),
    "dinov2, samples": (lambda: nested.Block(drop_path=0.4), True),
    # in training its lists leave samples out, where a tensor's branches are masked
    "dinov2, two ways": (lambda: nested.Block(drop_path=0.1), False),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_block_that_takes_lists(name, monkeypatch):
    """Both modes, with the host's draws."""
    made, packs = LISTS[name]
    block = randomize(made()).double()
    host, seen, split = copy.deepcopy(block), [], packing.Crops.split
    with fk.backend("torch"):
        assert fk.swap_in(block).level == "block"
        given = [[torch.randn(4, 9, 32).double(), torch.randn(3, 4, 32).double()]]
        if name == "dinov3":
            given += [[tuple(torch.randn(n, 16).double() for _ in "sc") for n in (8, 3)]]
        monkeypatch.setattr(
            packing.Crops, "split", lambda self, x: seen.append(self.sizes) or split(self, x)
        )
        for training in (True, False):
            results = []
            for module in (block.train(training), host.train(training)):
                torch.manual_seed(1)
                results.append(module(*given))
            torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
    assert seen == [((4, 9), (3, 4))] * 2 * packs


class _Between(nn.Module):
    """Something is done to the tokens between two blocks: `how`."""

    def __init__(self, how):
        super().__init__()
        self.model, self.how = MODELS["timm"](), how

    def forward(self, images):
        x = self.model.patch_embed(images).flatten(1, 2)
        x = self.model.blocks[0](x)
        if self.how == "new" or (self.how == "training" and self.training):
            x = x * 1.5
        elif self.how == "in place":
            x.detach().mul_(1.5)
        return self.model.blocks[1](x, **({"is_causal": True} if self.how == "told" else {})).sum(1)


def _hooked(model):
    model.blocks[1].register_forward_hook(lambda *args: None)


def _patched(model):
    forward = model.blocks[1].attn.forward
    model.blocks[1].attn.forward = lambda *args, **kwargs: forward(*args, **kwargs)


ALONE = {
    "new": (lambda: _Between("new"), None, "between its blocks"),
    "in place": (lambda: _Between("in place"), None, "between its blocks"),
    "hook": (MODELS["timm"], _hooked, "is hooked"),
    "patched": (MODELS["timm"], _patched, "Attention inside must be called"),
    "checkpoint": (MODELS["timm"], lambda m: m.set_grad_checkpointing(), "checkpoint"),
    "depth": (_timm("vit_base_patch16_rope_mixed_224", embed_dim=64), None, "tells them apart"),
    "ours hooked": (
        MODELS["ours"],
        lambda m: m.blocks[1].mlp.fc1.register_forward_hook(lambda *a: None),
        "Linear inside must be called",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_does_not_run_packed_runs_each_size_alone(name):
    made, change, why = ALONE[name]
    with fk.backend("torch"):
        model = randomize(made()).double()
        fk.swap_in(model)
        if change is not None:
            change(model)
        run = fk.packed(model)
        crops = [x.double() for x in _crops(model).values()]
        with pytest.warns(UserWarning, match="packed: each size runs alone: ") as told:
            _same(model, crops, run)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(crops)  # says it once
    assert len(told) == 1 and why in run.alone and why in repr(run), run.alone
    assert not [m for m in model.modules() if type(m.__dict__.get("forward")).__name__ == "_Call"]


def test_the_reason_is_that_of_the_call():
    """A dropout behind the projection draws before DropPath does: in training alone."""
    with fk.backend("torch"):
        made = _timm("vit_base_patch16_224", proj_drop_rate=0.5, drop_path_rate=0.5)
        model = randomize(made()).double().eval()
        crops, run = [x.double() for x in _crops(model).values()], fk.packed(model)
        with pytest.warns(UserWarning, match="swap_in comes first"):
            run(crops)
        fk.swap_in(model)
        assert _same(model, crops, run).alone is None
        model.train()
        with pytest.warns(UserWarning, match="a branch of it must be called"):
            run(crops)
        run.eval()
        assert _same(model, crops, run).alone is None
        model.to("meta")


def test_the_reason_is_that_of_the_mode():
    with fk.backend("torch"):
        model = randomize(_Between("training")).double()
        fk.swap_in(model)
        crops, run = [x.double() for x in _crops(model).values()], fk.packed(model)
        with pytest.warns(UserWarning, match="between its blocks"):
            run(crops)
        run.eval()
        assert _same(model, crops, run).alone is None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_entries_keep_their_order_and_results_their_form(mode):
    """Sizes in turns; what transformers gives, hidden states too; nothing is left in the blocks."""
    with fk.backend("torch"), mode():
        model = randomize(hf_small("vit")[0]).eval()
        fk.swap_in(model)
        side, run = model.config.patch_size, fk.packed(model)
        crops = [torch.randn(B, 3, n * side, n * side) for B, n in ((1, 2), (2, 3), (3, 2), (1, 3))]
        call = dict(interpolate_pos_encoding=True)
        for ours, images in zip(run(crops, **call), crops, strict=True):
            theirs = model(images, **call)
            assert type(ours) is type(theirs) and ours.keys() == theirs.keys()
            torch.testing.assert_close(ours.last_hidden_state, theirs.last_hidden_state)
        assert run.alone is None
        call["output_hidden_states"] = True
        for ours, images in zip(run(crops, **call), crops, strict=True):
            torch.testing.assert_close(ours.hidden_states, model(images, **call).hidden_states)


def test_a_watch_sees_each_block_once_and_one_size_needs_no_sequence():
    with fk.backend("torch"):
        model = randomize(MODELS["timm"]())
        fk.swap_in(model)
        run, crops = fk.packed(model), [*_crops(model).values()]
        with fk.watch(model) as status:
            run(crops)
        blocks = [row for row in status.modules if row.level == "block"]
        assert [row.way for row in blocks] == ["fused", "fused"]
        assert [op.name for op in blocks[0].ops].count("rope_attention") == 1, blocks[0]
        torch.testing.assert_close(run(crops[:1])[0], model(crops[0]))


def test_copies_states_and_compile():
    with fk.backend("torch"):
        model = randomize(MODELS["ours"]())
        run, crops = fk.packed(model), [*_crops(model).values()]
        results = run(crops)
        torch.testing.assert_close(copy.deepcopy(run)(crops), results)
        torch.testing.assert_close(torch.compile(run)(crops), results)
        assert {n.removeprefix("model.") for n in run.state_dict()} == {*model.state_dict()}
        compiled = fk.packed(torch.compile(model, backend="eager"))
        with pytest.warns(UserWarning, match="is compiled"):
            torch.testing.assert_close(compiled(crops), results)


IMAGES = torch.zeros(1, 3, 48, 48)
BAD = {
    "no list": (IMAGES, TypeError, "must be a list of images .* got Tensor"),
    "empty": ([], ValueError, "got an empty one"),
    "no tensor": ([IMAGES, 3], TypeError, r"crops\[1\] must be a tensor, got int"),
    "axes": ([IMAGES, IMAGES[0]], ValueError, r"crops\[1\] must be \(B, C, .* got \(3, 48, 48\)"),
    "no image": ([IMAGES[:0]], ValueError, r"with B > 0, got \(0, 3, 48, 48\)"),
    "channels": ([IMAGES, IMAGES[:, :1]], ValueError, "channels of crops.0., 3, got 1"),
    "dtype": ([IMAGES, IMAGES.half()], ValueError, "dtype of crops.0., torch.float32, got"),
    "device": ([IMAGES, IMAGES.to("meta")], ValueError, "device of crops.0., cpu, got meta"),
    "size": (
        [IMAGES, IMAGES[..., :40]],
        ValueError,
        r"that the model takes, got \(1, 3, 48, 40\): ",
    ),
    "size first": ([IMAGES[..., :40], IMAGES], ValueError, r"takes, got \(1, 3, 48, 40\): "),
    "size alone": ([IMAGES[..., :40]], ValueError, r"takes, got \(1, 3, 48, 40\): "),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_crops(name):
    crops, error, message = BAD[name]
    with fk.backend("torch"):
        model = MODELS["timm"]()
        fk.swap_in(model)
        with pytest.raises(error, match="^packed: .*" + message):
            fk.packed(model)(crops)


def test_bad_models_and_arguments():
    with pytest.raises(TypeError, match=r"packed: model must be an nn.Module, got str"):
        fk.packed("vit")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="packed: mask must be no tensor"):
        fk.packed(nn.Identity())([IMAGES], mask=IMAGES)
    odd = [IMAGES, IMAGES]
    with pytest.raises(
        TypeError, match=r"their part of what the model gives for 2 images, got \(\)"
    ):
        fk.packed(_Sum())(odd)


class _Sum(nn.Module):
    def forward(self, images):
        return images.sum()


def test_sizes_of_one_width_are_several():
    model = _timm("vit_base_patch16_224")().eval()
    crops = [torch.randn(1, 3, 32, 48), torch.randn(1, 3, 48, 48)]
    with fk.backend("torch"):
        fk.swap_in(model)
        wanted = [model(crop) for crop in crops]
        for ours, alone in zip(fk.packed(model)(crops), wanted, strict=True):
            torch.testing.assert_close(ours, alone)
