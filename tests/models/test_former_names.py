"""Pickles that 0.1.0 wrote, from before the package had rooms, still load."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fastvit_kernels as fk
from fastvit_kernels.commands.zoo import HF_MODELS, hf_small, timm_small, torchvision_small

FORMER = {
    b"fastvit_kernels.models.norms": b"fastvit_kernels.modules",
    b"fastvit_kernels.models.": b"fastvit_kernels.",
    b"fastvit_kernels.swap.apply": b"fastvit_kernels.swap",
    b"fastvit_kernels.swap.hosts.": b"fastvit_kernels.hosts.",
}


def as_before(content):
    """The bytes that 0.1.0 would have written; protocol 2 has no lengths before names."""
    written = pickle.dumps(content, protocol=2)
    for now, then in FORMER.items():
        written = written.replace(b"c" + now, b"c" + then)
    return written


LATER = {  # attributes that 0.1.0 had not
    fk.PatchEmbed: ("norm", "strict_img_size", "mean", "std"),
    fk.Attention: (
        "q_norm", "k_norm", "q_bias", "v_bias", "rotate_half", "num_prefix_tokens",
    ),
    fk.VisionTransformer: ("rope", "patch_drop"),
}  # fmt: skip


def as_saved_then(model):
    """A copy that has what a model of 0.1.0 had."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name in LATER.get(type(module), ()):
            for held in (module.__dict__, module._modules, module._parameters):
                held.pop(name, None)
    return model


def classes(model):
    return {name: type(m) for name, m in model.named_modules()}


def own():
    return fk.create_vit("vit_mnist", depth=1)


def encoder_layer():
    return nn.TransformerEncoderLayer(64, 2, 128, 0.0, "gelu", batch_first=True, norm_first=True)


@pytest.mark.parametrize(
    "make",
    [
        own,
        encoder_layer,
        lambda: timm_small("vit_tiny_patch16_224")[0],
        lambda: torchvision_small()[0],
        lambda: hf_small(next(iter(HF_MODELS)))[0],
    ],
    ids=["own", "torch.nn", "timm", "torchvision", "transformers"],
)
def test_a_pickle_of_0_1_0_loads(make):
    try:
        model = make()
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    report = fk.swap_in(model)
    written = as_before((as_saved_then(model), report))
    assert b"cfastvit_kernels.models" not in written and b"swap.hosts" not in written
    loaded, loaded_report = pickle.loads(written)
    assert classes(loaded) == classes(model)
    assert str(loaded_report) == str(report)
    for (name, p), (_, q) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_report_of_0_1_0_prints():
    report = fk.swap_in(own())
    expected = str(report)
    for name in ("depending_flops", "pytorch", "uncounted", "explanation", "rebuilt",
                 "rebuilt_rms", "skipping"):  # fmt: skip
        del vars(report)[name]
    assert str(pickle.loads(pickle.dumps(report))) == expected


def test_a_model_of_0_1_0_runs():
    model, images = own().eval(), torch.randn(1, 1, 28, 28)
    expected = model(images)
    model = as_saved_then(model)
    model.blocks.__class__ = nn.Sequential
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(images), expected)
