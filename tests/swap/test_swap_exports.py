"""Exporters and counters of other packages over swapped models: the host's results and counts.

Packages that are not installed skip their tests by name; CI installs them for this file.
"""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fastvit_kernels import backend, create_vit, swap_in, swap_out
from fastvit_kernels.runtime.compat import define_torchvision_operators
from tests.model_coverage import model_zoo
from tests.model_coverage.compare import randomize

pytest.importorskip("timm")
pytest.importorskip("torchvision")
pytest.importorskip("transformers")
define_torchvision_operators()


class Logits(torch.nn.Module):
    """A model of transformers as a function of images, without dataclasses."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(pixel_values=x, return_dict=True).last_hidden_state


def _of(host, name=None):
    torch.manual_seed(0)
    if host == "timm":
        model, images = model_zoo.timm_small(name or "vit_tiny_patch16_224")
    elif host == "torchvision":
        model, images = model_zoo.torchvision_small()
    else:
        model, inputs = model_zoo.hf_small(name or "dinov2")
        model, images = Logits(model), inputs["pixel_values"]
    randomize(model).eval()
    swapped = copy.deepcopy(model)
    assert swap_in(swapped).level == "block"
    return model, swapped, images


every_host = pytest.mark.parametrize("host", ["timm", "torchvision", "transformers"])


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _run_onnx(model, images):
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator(model)
    (name,) = evaluator.input_names
    return torch.from_numpy(evaluator.run(None, {name: images.numpy()})[0])


def _close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


@every_host
def test_onnx_by_torch_export(host):
    pytest.importorskip("onnxscript")
    model, swapped, images = _of(host)
    program = torch.onnx.export(swapped, (images,), dynamo=True, verbose=False)
    _close(_run_onnx(program.model_proto, images), model(images))


EXPORTED = [
    ("ours", "vit_tiny_patch16_224"),
    ("ours", "eva02_tiny_patch14_224"),
    ("ours", "vit_small_patch16_dinov3"),
    ("timm", "vit_tiny_patch16_224"),
    ("timm", "eva02_tiny_patch14_224"),
    ("timm", "aimv2_large_patch14_224"),
    ("timm", "vit_relpos_small_patch16_224"),
    ("torchvision", None),
    ("transformers", "aimv2"),
    ("transformers", "dinov2_swiglu"),
    ("transformers", "beit"),
]


@pytest.mark.parametrize("choice", ["auto", "torch"])
@pytest.mark.parametrize(("host", "name"), EXPORTED)
def test_an_exported_batch_is_dynamic(host, name, choice):
    if host == "ours":
        model = create_vit(
            name, img_size=32, patch_size=16, embed_dim=32, depth=1, num_heads=2, num_classes=5
        )
        randomize(model).eval()
        images = torch.randn(2, 3, 32, 32)
    else:
        _, model, images = _of(host, name)
    more = torch.cat((images, images.flip(-1)[:1]))
    with backend(choice), torch.no_grad():
        sizes = ({0: torch.export.Dim("B", min=1)},)
        program = torch.export.export(model, (images,), dynamic_shapes=sizes, strict=False)
        _close(program.module()(more), model(more))


@every_host
def test_onnx_by_tracing(host):
    onnx = pytest.importorskip("onnx")
    model, swapped, images = _of(host)
    file = io.BytesIO()
    torch.onnx.export(swapped, (images,), file, dynamo=False)
    _close(_run_onnx(onnx.load_from_string(file.getvalue()), images), model(images))


@every_host
def test_jit_trace(host):
    model, swapped, images = _of(host)
    traced = torch.jit.trace(swapped, images, check_trace=False)
    assert "fastvit_kernels::" not in str(traced.inlined_graph)
    _close(traced(images), model(images))


@pytest.mark.parametrize("host", ["timm", "torchvision"])  # transformers' own are not traceable
def test_symbolic_trace(host):
    from timm.models import create_feature_extractor as by_timm
    from torchvision.models.feature_extraction import create_feature_extractor as by_torchvision

    model, swapped, images = _of(host)
    extract, node = (by_timm, "head") if host == "timm" else (by_torchvision, "heads.head")
    _close(extract(swapped, [node])(images)[node], model(images))


@every_host
def test_a_vectorized_jacobian(host):
    model, swapped, images = _of(host)
    images = images[:1]

    def first(m):
        return lambda x: m(x).flatten()[:2]

    wanted = torch.autograd.functional.jacobian(first(model), images)
    _close(torch.autograd.functional.jacobian(first(swapped), images, vectorize=True), wanted)


def _by_torch(model, images):
    with FlopCounterMode(display=False) as counter:
        out = model(images)
        out.sum().backward()
    return counter.get_total_flops()


def _by_fvcore(model, images):
    counted = pytest.importorskip("fvcore.nn").FlopCountAnalysis(model, images)
    return counted.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total()


def _by_ptflops(model, images, kind):
    count = pytest.importorskip("ptflops").get_model_complexity_info
    return count(
        model, tuple(images.shape[1:]), print_per_layer_stat=False, as_strings=False, backend=kind
    )


def _by_calflops(model, images):
    count = pytest.importorskip("calflops").calculate_flops
    return count(
        model,
        tuple(images.shape),
        print_results=False,
        print_detailed=False,
        output_as_string=False,
    )


def _by_thop(model, images):
    return pytest.importorskip("thop").profile(copy.deepcopy(model), (images,), verbose=False)


COUNTERS = {
    "torch": _by_torch,
    "fvcore": _by_fvcore,
    "ptflops": lambda model, images: _by_ptflops(model, images, "aten"),
    "calflops": _by_calflops,
}
BY_CLASS = {
    "ptflops": lambda model, images: _by_ptflops(model, images, "pytorch"),
    "thop": _by_thop,
}


@every_host
@pytest.mark.parametrize("counter", COUNTERS)
@pytest.mark.parametrize("kind", ["auto", "torch"])
def test_flops_are_the_hosts(host, counter, kind):
    model, swapped, images = _of(host)
    with backend(kind):
        wanted = COUNTERS[counter](model, images)
        assert COUNTERS[counter](swapped, images) == wanted
        assert wanted and wanted != (0, 0)
        with torch.no_grad():  # counters that patch put everything back
            _close(swapped(images), model(images))


@every_host
@pytest.mark.parametrize("counter", BY_CLASS)
def test_counters_that_go_by_exact_classes_want_swap_out(host, counter):
    model, swapped, images = _of(host)
    swap_out(swapped)
    assert BY_CLASS[counter](swapped, images) == BY_CLASS[counter](model, images)
