"""`probe`: what its two figures are of."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from fastvit_kernels.commands import cli, probe
from fastvit_kernels.commands.training.settings import make_settings
from fastvit_kernels.runtime.backend import backend

pytest.importorskip("rich")
pytest.importorskip("sklearn")


def score(train, held_out, neighbours=20):
    """Of (x, y, class) points."""
    sides = [torch.tensor(side) for side in (train, held_out)]
    x, y = [s[:, :-1] for s in sides], [s[:, -1].long() for s in sides]
    return probe.score(x, y, neighbours, 0)


def test_neighbours_are_near_by_angle():
    train = [(10.0, 0.0, 0.0), (10.0, 0.1, 0.0), (0.1, 1.0, 1.0), (0.0, 1.0, 1.0)]
    for k in (1, 2):
        assert score(train, [(1.0, 0.3, 0.0)], k)["knn"] == 1, "its nearest point is of class 1"


def test_neighbours_weigh_by_their_nearness_and_are_as_many_as_asked():
    train = [(1.0, 0.001, 0.0), *[(1.0, 0.5 + i / 100, 1.0) for i in range(6)]]
    assert score(train, [(1.0, 0.0, 0.0)], 7)["knn"] == 1, "one that is near against six"
    train = [(1.0, 0.2, 0.0), *[(1.0, 0.25 + i / 1000, 1.0) for i in range(6)]]
    assert [score(train, [(1.0, 0.0, 0.0)], k)["knn"] for k in (1, 7)] == [1, 0]


def test_features_are_scaled_for_the_linear_probe():
    """One of them, a thousand times smaller than the others, tells the classes apart."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(40, 3, generator=generator)
    sides = torch.tensor([1.0, -1.0]).repeat(20)
    points = torch.stack([*noise.T, 1e-3 * sides, (sides > 0).float()], dim=1)
    held_out = points.clone()
    held_out[:, :3] = torch.randn(40, 3, generator=generator)
    assert score(points.tolist(), held_out.tolist())["linear"] == 1


def test_both_figures_are_of_the_held_out_images():
    train = [(1.0, 0.1 * i, 0.0) for i in range(5)] + [(-1.0, 0.1 * i, 1.0) for i in range(5)]
    held_out = [(1.0, 0.0, 0.0), (1.0, 0.1, 0.0), (-1.0, 0.1, 1.0), (1.0, 0.2, 1.0)]
    assert score(train, held_out, 3) == {"knn": 0.75, "linear": 0.75}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_features_are_those_of_the_frozen_model(precision):
    """In the order of the labels, without dropped paths, in the precision that is asked for."""
    cpu = torch.device("cpu")
    settings = make_settings({"model": "vit_mnist", "img_size": 8, "precision": precision}, cpu)
    model = probe.feature_model(settings)
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    seen = set()
    model.get_submodule("blocks.0").register_forward_hook(
        lambda m, x, y: seen.add(torch.is_autocast_enabled("cpu"))
    )
    x = torch.randn(5, 1, 8, 8)
    none = torch.tensor([])
    source = SimpleNamespace(  # each with a batch of which it has no row
        batches=lambda *_: iter([(x[:2], torch.tensor([4, 5]), 1.0), (x[4:], none, 0.0)]),
        held_out_batches=lambda _: iter([(torch.tensor([1, 0]), x[2:4]), (none, x[4:])]),
        held_out_labels=torch.tensor([6, 7]),
    )
    with backend("torch"):
        found, labels = probe.features(model, source, settings, cpu)
        assert seen == {precision == "bf16"}
        whole = model(x)
    assert [y.tolist() for y in labels] == [[4, 5], [7, 6]]
    assert [f.dtype for f in found] == [torch.float32] * 2
    torch.testing.assert_close(found[0], whole[:2], rtol=0.03, atol=0.03)
    torch.testing.assert_close(found[1], whole[2:4], rtol=0.03, atol=0.03)


def test_the_command_reads_images_as_they_are_and_says_both_figures(monkeypatch, capsys):
    seen = []

    def features(model, source, settings, device):
        weight = next(p for p in model.parameters() if p.ndim > 1)
        seen.append((settings.augment, weight.sum().item()))
        return [torch.eye(3), torch.eye(3)], [torch.arange(3), torch.arange(3)]

    def score(x, y, neighbours, seed):
        seen.append((neighbours, seed))
        return {"knn": 0.25, "linear": 0.5}

    monkeypatch.setattr(probe, "features", features)
    monkeypatch.setattr(probe, "score", score)
    words = ["probe", "--model", "vit_mnist", "--img-size", "8", "--neighbours", "7"]
    for seed in ("3", "3", "4"):
        assert cli.main([*words, "--seed", seed]) == 0
    assert "k-NN (7): 25.00 %. Linear probe: 50.00 %." in capsys.readouterr().out
    (first, asked), (again, _), (other, last) = zip(seen[::2], seen[1::2], strict=True)
    assert first == again != other and first[0] is False and (asked, last) == ((7, 3), (7, 4))
    assert cli.main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    result.pop("seconds")
    assert result == dict(knn=0.25, linear=0.5, train_images=3, held_out_images=3, width=3)
