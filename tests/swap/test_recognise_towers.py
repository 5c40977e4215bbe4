"""Vision towers of transformers that no table has, and models that are no vision transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from outside import others

from fastvit_kernels import backend, swap_in
from tests.model_coverage.compare import randomize

transformers = pytest.importorskip("transformers")

SMALL = dict(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    image_size=32,
    patch_size=8,
)
PAIRS = dict(image_size=(32, 32), patch_size=(8, 8))
GRID = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=32,
    patch_size=8,
    window_size=3,
    use_relative_position_embeddings=True,
)
SOUND = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)

# name -> (model, config, settings)
TOWERS = {
    "blip": ("BlipVisionModel", "BlipVisionConfig", SMALL),
    "blip_2": ("Blip2VisionModel", "Blip2VisionConfig", SMALL),
    "git": ("GitVisionModel", "GitVisionConfig", SMALL),
    "internvl": ("InternVLVisionModel", "InternVLVisionConfig", SMALL | PAIRS),
    "internvl_qk_norm": (
        "InternVLVisionModel",
        "InternVLVisionConfig",
        SMALL | PAIRS | dict(use_qk_norm=True),
    ),
    "aimv2": ("Aimv2VisionModel", "Aimv2VisionConfig", SMALL),
    "owlvit": ("OwlViTVisionModel", "OwlViTVisionConfig", SMALL),
    "altclip": ("AltCLIPVisionModel", "AltCLIPVisionConfig", SMALL),
    "chinese_clip": ("ChineseCLIPVisionModel", "ChineseCLIPVisionConfig", SMALL),
    "dpt": ("DPTModel", "DPTConfig", SMALL),
    "yolos": ("YolosModel", "YolosConfig", SMALL | dict(image_size=[32, 32])),
    "data2vec": ("Data2VecVisionModel", "Data2VecVisionConfig", SMALL),
    "data2vec_shared": (
        "Data2VecVisionModel",
        "Data2VecVisionConfig",
        SMALL | dict(use_shared_relative_position_bias=True),
    ),
    "pixtral": ("PixtralVisionModel", "PixtralVisionConfig", SMALL),
    "vitdet": ("VitDetModel", "VitDetConfig", GRID | dict(window_block_indices=[0])),
    "ast": ("ASTModel", "ASTConfig", SOUND | dict(max_length=64, num_mel_bins=32)),
}
# the softmax of one and the norms of the others are in fp32, whatever the dtype
ROUNDED = ("git", "aimv2", "internvl_qk_norm", "pixtral", "llama")


@pytest.fixture(autouse=True)
def _torch_backend():
    with backend("torch"):
        yield


def built(model, config, settings):
    torch.manual_seed(0)
    module = getattr(transformers, model)(getattr(transformers, config)(**settings))
    return randomize(module).double().eval()


def step(model, inputs):
    model.zero_grad()
    y = model(**inputs).last_hidden_state
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    return {"y": y.detach()} | {n: p.grad for n, p in model.named_parameters()}


def assert_same(actual, wanted, tolerance):
    largest = max(g.abs().max() for g in wanted.values() if g is not None and g.numel())
    for name, value in wanted.items():
        if value is None:
            assert actual[name] is None, name
        elif value.numel():
            assert (actual[name] - value).abs().max() <= tolerance * largest, name


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_runs_in_fused_blocks(name):
    model = built(*TOWERS[name])
    generator = torch.Generator().manual_seed(1)
    if name == "ast":
        inputs = {"input_values": torch.randn(2, 64, 32, generator=generator).double()}
    else:
        inputs = {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator).double()}
    host = copy.deepcopy(model)
    report = swap_in(model)
    assert report.level == "block", str(report)
    if name == "ast":  # its patches overlap
        assert [row.host for row in report.left] == ["Conv2d"]
    else:
        assert report.fused_flops >= 0.9 * report.flops, str(report)
    assert_same(step(model, inputs), step(host, inputs), 1e-5 if name in ROUNDED else 1e-9)


TEXT = {
    "bert": ("BertModel", "BertConfig", SOUND),
    "gpt2": ("GPT2Model", "GPT2Config", dict(n_embd=32, n_layer=1, n_head=2)),
    "llama": ("LlamaModel", "LlamaConfig", SOUND),
    "clip_text": ("CLIPTextModel", "CLIPTextConfig", SOUND),
}


@pytest.mark.parametrize("name", TEXT)
def test_a_text_model_keeps_its_numbers(name):
    model = built(*TEXT[name])
    host = copy.deepcopy(model)
    swap_in(model)
    tokens = torch.arange(10).view(2, 5)
    padded = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    for inputs in (
        {"input_ids": tokens},
        {"input_ids": tokens, "attention_mask": padded},
        {"input_ids": tokens, "output_hidden_states": True},
    ):
        assert_same(step(model, inputs), step(host, inputs), 1e-5 if name in ROUNDED else 1e-9)


class Text(torch.nn.Module):
    """As open_clip's text tower calls its blocks, which do not hand its mask on as it is."""

    def __init__(self):
        super().__init__()
        self.positional_embedding = torch.nn.Parameter(torch.zeros(6, 32))
        self.resblocks = torch.nn.ModuleList([others.AnotherMaskBlock()])
        mask = torch.full((6, 6), float("-inf")).triu(1)
        self.register_buffer("attn_mask", mask, persistent=False)

    def forward(self, x):
        return self.resblocks[0](x + self.positional_embedding, attn_mask=self.attn_mask)


class Both(torch.nn.Module):
    """As open_clip's CLIP: the mask of its text tower stands above both."""

    def __init__(self):
        super().__init__()
        self.text, self.visual = Text(), Text()
        self.visual.attn_mask = None
        self.register_buffer("attn_mask", self.text.attn_mask)

    def forward(self, x):
        return self.text(x) + self.visual(x)


def test_a_block_whose_caller_has_a_mask_is_counted_apart():
    x = torch.randn(2, 6, 32).double()
    assert_counted(randomize(Text()).double(), x, False)
    model = randomize(Both()).double()
    report = assert_counted(model, x, None)
    assert report.fused_flops == report.depending_flops == report.flops // 2


def assert_counted(model, x, fused):
    host = copy.deepcopy(model)
    report = swap_in(model)
    assert report.level == "block", str(report)
    if fused is not None:
        assert (report.fused_flops == 0) == (not fused) and bool(report.depending_flops) != fused
        named = "fused where it is called without a mask" in {row.reason for row in report.left}
        assert named != fused, str(report)
    torch.testing.assert_close(model(x), host(x), rtol=1e-9, atol=1e-9)
    return report


CONVNETS = {
    "resnet": (
        "ResNetModel",
        "ResNetConfig",
        dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    ),
    "convnext": (
        "ConvNextModel",
        "ConvNextConfig",
        dict(num_stages=2, hidden_sizes=[8, 16], depths=[1, 1]),
    ),
}


@pytest.mark.parametrize("name", CONVNETS)
def test_a_convnet_keeps_its_numbers(name):
    model = built(*CONVNETS[name])
    host = copy.deepcopy(model)
    swap_in(model)
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32).double()}
    assert_same(step(model, inputs), step(host, inputs), 1e-9)


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_an_adapted_text_model_keeps_its_numbers(name):
    peft = pytest.importorskip("peft")
    target = ["query", "value"] if name == "bert" else ["c_attn"]
    config = peft.LoraConfig(
        target_modules=target, r=2, init_lora_weights=False, fan_in_fan_out=name == "gpt2"
    )
    model = peft.get_peft_model(built(*TEXT[name]), config).double().eval()
    host = copy.deepcopy(model)
    swap_in(model)
    inputs = {"input_ids": torch.arange(10).view(2, 5)}
    assert_same(step(model, inputs), step(host, inputs), 1e-9)
