"""swap_in changes the class of modules and nothing else."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from numerics import DEVICE
from private import CHECKPOINT
from swapped_models import (
    HOSTS,
    Shift,
    TimmLike,
    assert_same_step,
    classes,
    images,
    swap_and_return,
    timm_model,
    train_step,
)
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from fastvit_kernels import SwapReport, backend, swap_in, swap_out
from fastvit_kernels.runtime.compat import TorchDispatchMode
from fastvit_kernels.swap import hosts, report
from fastvit_kernels.swap.hosts.fused import Fused
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import hf_small, timm_small

timm = pytest.importorskip("timm")


@pytest.fixture(autouse=True)
def _torch_backend():
    """These tests are about which code runs, not about the kernels: PyTorch is faster here."""
    with backend("torch"):
        yield


@pytest.fixture(params=HOSTS)
def model(request):
    torch.manual_seed(0)
    return HOSTS[request.param]().to(DEVICE)


def test_swap_keeps_parameters_state_and_modes(model):
    model.eval()
    next(model.parameters()).requires_grad_(False)
    parameters = dict(model.named_parameters())
    keys, host_classes = list(model.state_dict()), classes(model)
    attributes = {n: set(vars(m)) for n, m in model.named_modules()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    report = swap_in(model)
    assert report.level == "block"
    assert {n: id(p) for n, p in model.named_parameters()} == {
        n: id(p) for n, p in parameters.items()
    }
    assert list(model.state_dict()) == keys
    assert {n: set(vars(m)) for n, m in model.named_modules()} == attributes
    assert not any(m.training for m in model.modules())
    assert not next(model.parameters()).requires_grad
    assert all(issubclass(a, b) for a, b in zip(classes(model), host_classes, strict=True))
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held <= {id(p) for p in model.parameters()}
    swap_out(model)
    assert classes(model) == host_classes


def test_swap_is_idempotent(model):
    first = swap_in(model)
    swapped = classes(model)
    assert str(swap_in(model)) == str(first)
    assert classes(model) == swapped


def test_swap_draws_no_random_numbers_and_uses_as_many(model):
    state = torch.get_rng_state()
    host = copy.deepcopy(model)
    swap_in(model)
    assert torch.equal(torch.get_rng_state(), state)
    train_step(model)
    after = torch.get_rng_state()
    train_step(host)
    assert torch.equal(torch.get_rng_state(), after)


def test_swap_gives_the_same_step(model):
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    assert_same_step(train_step(model), wanted)


def test_swap_out_gives_the_same_bits_as_before(model):
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    swap_out(model)
    actual = train_step(model)
    assert torch.equal(actual[0], wanted[0])


def test_swap_survives_copies(model):
    swap_in(model)
    wanted = train_step(model)
    ema = AveragedModel(model)
    assert torch.equal(ema(images()), wanted[0])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for copied in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(buffer, weights_only=False),
    ):
        assert classes(copied) == classes(model)
        assert torch.equal(copied(images()), wanted[0])


def test_swapped_blocks_unpickle_in_a_new_process(tmp_path):
    blocks = []
    for make in HOSTS.values():
        modules = swap_and_return(make()).modules()
        blocks.append(next(m for m in modules if getattr(m, "fused_level", "") == "block"))
    torch.save(blocks, tmp_path / "blocks.pt")
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from fastvit_kernels.runtime import compat; compat.define_torchvision_operators()\n"
        "import torch; blocks = torch.load(sys.argv[1], weights_only=False)\n"
        "for m in (m for b in blocks for m in b.modules()): print(type(m).__qualname__)"
    )
    tests = __file__.rpartition("/")[0]
    out = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "blocks.pt"), tests],
        capture_output=True,
        text=True,
        check=False,
    )
    wanted = [type(m).__qualname__ for block in blocks for m in block.modules()]
    assert (
        out.stdout.split() == wanted and "Block_timm_models_vision_transformer_Block" in wanted
    ), out.stderr


def test_swap_loads_state_dicts_both_ways(model):
    host = copy.deepcopy(model)
    swap_in(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    host.load_state_dict(model.state_dict())
    assert_same_step(train_step(model), train_step(host), 1e-4)


def test_swap_follows_dtype_and_device_moves(model):
    swap_in(model)
    dtypes = {p.dtype for p in model.to(torch.bfloat16).parameters()}
    assert dtypes == {torch.bfloat16}
    assert model(images().bfloat16()).dtype == torch.bfloat16
    assert model.double()(images().double()).dtype == torch.float64


def test_swap_before_or_after_the_move():
    model = timm_model()
    before = swap_and_return(copy.deepcopy(model)).to(DEVICE)
    after = swap_and_return(model.to(DEVICE))
    assert torch.equal(before(images()), after(images()))


def test_swap_with_tied_weights():
    model = timm_model()
    model.blocks[1].mlp = model.blocks[0].mlp
    model.blocks[1].attn.qkv.weight = model.blocks[0].attn.qkv.weight
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    assert_same_step(train_step(model), wanted)
    assert model.blocks[1].mlp is model.blocks[0].mlp


def test_frozen_parameters_get_no_gradient(model):
    for p in model.parameters():
        p.requires_grad_(p.ndim == 1)
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    actual = train_step(model)
    assert_same_step(actual, wanted)
    assert any(g is None for g in actual[1].values())


def test_gradient_accumulation(model):
    host = copy.deepcopy(model)
    swap_in(model)
    for m in (model, host):
        for seed in (0, 1):
            torch.manual_seed(seed)
            m(images()).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), host.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_torch(use_reentrant):
    model = timm_model()
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    original = model.blocks.forward
    model.blocks.forward = lambda x: checkpoint(original, x, use_reentrant=use_reentrant)
    assert_same_step(train_step(model), wanted)


def test_gradient_checkpointing_by_the_hosts_own_switch():
    model = timm_model()
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    model.set_grad_checkpointing()
    assert_same_step(train_step(model), wanted)

    model = randomize(TimmLike("vit"))
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    model.model.gradient_checkpointing_enable()
    calls = []
    for layer in model.model.layers:  # type: ignore[union-attr]
        inner = getattr(layer, CHECKPOINT)
        setattr(layer, CHECKPOINT, lambda *a, inner=inner: calls.append(1) or inner(*a))
    assert_same_step(train_step(model), wanted)
    assert len(calls) == 2


# DropPath, dropout and LayerScale as the host has them: with the same seed, the same numbers.


@pytest.mark.parametrize(
    "settings",
    [
        dict(drop_path_rate=0.5),
        dict(drop_path_rate=0.5, init_values=0.3),
        dict(proj_drop_rate=0.3),
        dict(proj_drop_rate=0.3, drop_path_rate=0.5, init_values=0.3),
        dict(pos_drop_rate=0.3, patch_drop_rate=0.4),
    ],
    ids=str,
)
def test_timm_randomness_is_the_hosts(settings):
    model = timm_model(**settings).train()
    wanted = train_step(copy.deepcopy(model))
    swap_in(model)
    assert_same_step(train_step(model), wanted)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_transformers_randomness_is_the_hosts(rate):
    model, inputs = hf_small("dinov2", drop_path_rate=rate)
    randomize(model).train()
    host = copy.deepcopy(model)
    swap_in(model)
    outputs = []
    for m in (model, host):
        torch.manual_seed(5)
        outputs.append(m(**inputs).last_hidden_state)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    model, inputs = hf_small("vit", hidden_dropout_prob=0.3)
    randomize(model).train()
    host = copy.deepcopy(model)
    swap_in(model)
    outputs = []
    for m in (model, host):
        torch.manual_seed(5)
        outputs.append(m(**inputs).last_hidden_state)
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)


def test_torchvision_dropout_stands_where_the_hosts_does(monkeypatch):
    from torchvision.models import VisionTransformer

    # torch's mask follows the strides of what it drops, which differ after nn.MultiheadAttention.
    monkeypatch.setattr(nn.Dropout, "forward", lambda m, x: x.relu() * (1 + m.p))
    torch.manual_seed(0)
    model = randomize(VisionTransformer(48, 16, 2, 2, 64, 128, dropout=0.3)).train()
    wanted = train_step(copy.deepcopy(model))
    report = swap_in(model)
    assert any("dropout p=0.3" in row.reason for row in report.left)
    assert_same_step(train_step(model), wanted)


def test_attention_dropout_drops_in_training_only():
    model = swap_and_return(timm_model(attn_drop_rate=0.5))
    assert not torch.equal(model(images()), model(images()))
    model.eval()
    assert torch.equal(model(images()), model(images()))


# only, skip, the report, bad arguments.


def levels(report):
    return {(s.name, s.level) for s in report.swapped}


def test_only_and_skip():
    report = swap_in(timm_model(), only="blocks.0")
    assert levels(report) == {("blocks.0", "block")}
    assert {r.reason for r in report.left if r.name == "blocks.1"} == {"not in only="}
    assert "blocks" not in {r.name for r in report.left}  # nothing that only= keeps from being ours
    for part in ("attn", "mlp"):
        assert swap_in(timm_model(), only=["blocks.0", f"blocks.1.{part}"]).level == "parts"
    report = swap_in(timm_model(), only="blocks.*.attn")
    assert levels(report) == {("blocks.0.attn", "attention"), ("blocks.1.attn", "attention")}
    report = swap_in(timm_model(), only=[nn.Conv2d, "norm"])
    assert levels(report) == {("patch_embed.proj", "patch_embed"), ("norm", "layer_norm")}
    report = swap_in(timm_model(), skip=timm.layers.Attention)
    assert ("blocks.0", "parts") in levels(report)
    assert {r.reason for r in report.left if r.name == "blocks.0.attn"} == {"in skip="}
    report = swap_in(timm_model(), only="blocks", skip=lambda name, module: "1" in name)
    assert levels(report) == {("blocks.0", "block")}
    with pytest.raises(TypeError, match="names, classes, a predicate"):
        swap_in(timm_model(), only=3)


@pytest.mark.parametrize("skip", [nn.LayerNorm, timm.layers.Attention, timm.layers.Mlp, nn.Conv2d])
def test_skipped_parts_run_the_hosts_forward(skip, monkeypatch):
    model = timm_model()
    wanted = train_step(copy.deepcopy(model))
    swap_in(model, skip=skip)
    calls = []
    for module in model.modules():
        if isinstance(module, skip):
            assert not isinstance(module, Fused)
    original = skip.forward
    monkeypatch.setattr(skip, "forward", lambda *a, **k: calls.append(1) or original(*a, **k))
    if skip is not nn.LayerNorm:  # timm's LayerNorm has a forward of its own
        model(images())
        assert calls
    assert_same_step(train_step(model), wanted)


def test_report_prints_a_table():
    report = swap_in(timm_model())
    assert isinstance(report, SwapReport)
    text = str(report)
    assert "block        Block                            2" in text
    assert "Linear                                        1  a plain product" in text
    assert "% of the matmul FLOPs run fused (10 tokens)" in text
    assert report.fused_flops / report.flops > 0.99
    assert "nothing" in str(swap_in(nn.Linear(3, 3)))
    assert swap_in(nn.Linear(3, 3)).level == "none"


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_report_counts_the_flops_of_a_vit_b(library):
    with torch.device("meta"):
        if library == "timm":
            model = timm.create_model("vit_base_patch16_224")
        else:
            model = pytest.importorskip("torchvision").models.vit_b_16()
    report = swap_in(model)
    # 12 blocks of 24 C^2 + 4 T C a token, and the patches; docs/swap.md
    T, C = 197, 768
    assert report.fused_flops == 12 * T * (24 * C * C + 4 * T * C) + 2 * C * C * T
    assert report.flops == report.fused_flops + 2 * C * 1000


def test_report_counts_what_pytorch_moves_inside_blocks():
    """Elements of a token: what Linears, attention and norms of the stack read and write."""
    model = timm_model()
    model.blocks[0].norm1 = nn.RMSNorm(64)
    C = 64
    linears, attention, norm = (4 + 2 + 5 + 5) * C, 4 * C, 2 * C
    total = 2 * (linears + attention) + 4 * norm
    assert swap_in(model).pytorch == {"RMSNorm": norm / total}


def test_swap_rejects():
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got list"):
        swap_in([])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be an nn\.Module, got list"):
        swap_out([])  # type: ignore[arg-type]
    model = swap_and_return(timm_model())
    parametrize.register_parametrization(model.blocks[0].norm1, "weight", Shift())
    before = classes(model)
    with pytest.raises(ValueError, match=r"blocks\.0\.norm1 has become a"):
        swap_out(model)
    assert classes(model) == before


def test_unknown_part_keeps_a_known_class_alone():
    model = timm_model()
    model.blocks[0].attn.adapter = nn.Linear(64, 64)
    report = swap_in(model)
    reason = "it has a part that we do not know: adapter"
    assert ("blocks.0.attn", reason) in {(r.name, r.reason) for r in report.left}


def test_names_of_classes_stay_for_wrap_policies(model):
    names = [m.__class__.__name__ for m in model.modules()]
    swap_in(model)
    assert [m.__class__.__name__ for m in model.modules()] == names
    assert "Fused" in repr(model)


def test_other_head_dims_take_the_unpacked_path():
    for heads, dim in ((2, 24), (1, 264), (4, 40)):  # D = 12, 264, 10
        model = randomize(
            timm.create_model(
                "vit_base_patch16_224", img_size=48, embed_dim=dim, depth=1, num_heads=heads
            )
        )
        wanted = train_step(copy.deepcopy(model))
        swap_in(model)
        assert_same_step(train_step(model), wanted)


def test_symbolic_tracing_sees_the_hosts_forward():
    from torch.fx import Tracer

    model = swap_and_return(timm_model())
    graph = Tracer().trace(model.blocks[0])
    assert any(node.op == "call_module" and node.target == "attn.qkv" for node in graph.nodes)


def test_timm_small_is_deterministic():
    a, b = (randomize(timm_small("vit_tiny_patch16_224")[0]) for _ in range(2))
    assert list(a.state_dict()) == list(b.state_dict())


def test_a_frozen_projection_among_trained_ones():
    model, inputs = hf_small("vit")
    randomize(model)
    model.layers[0].attention.q_proj.requires_grad_(False)
    model.layers[1].attention.k_proj.bias.requires_grad_(False)
    host = copy.deepcopy(model)
    swap_in(model)
    for m in (model, host):
        m(**inputs).last_hidden_state.square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), host.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q[1].grad, rtol=1e-3, atol=1e-5, msg=name)


def test_gradients_of_frozen_weights_are_not_computed():
    class Matmuls(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names = ("aten::mm", "aten::addmm", "aten::bmm")
            self.count += func.name() in names
            return func(*args, **(kwargs or {}))

    counts = {}
    for kind in ("trained", "frozen"):
        model = timm_model()
        swap_in(model)
        for p in model.blocks.parameters():
            p.requires_grad_(kind == "trained")
        with Matmuls() as matmuls:
            model(images().requires_grad_()).sum().backward()
        counts[kind] = matmuls.count
    assert counts["trained"] - counts["frozen"] == 2 * 4  # qkv, proj, fc1, fc2 of two blocks


def test_the_report_reads_an_attentions_width_from_its_roles():
    """For the FLOPs of one that stayed its host's: heads of 8 in a width of 40."""
    for host in (
        timm.layers.Attention(40, num_heads=3, attn_head_dim=8),
        nn.MultiheadAttention(24, 3),
    ):
        assert report._attention_width(host, hosts.swapped_class(type(host))) == 24
