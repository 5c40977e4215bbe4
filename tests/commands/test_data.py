import gzip
import struct

import pytest
import torch

from fastvit_kernels.commands.console import CommandError
from fastvit_kernels.commands.training import data, records
from fastvit_kernels.commands.training.settings import make_settings

Image = pytest.importorskip("PIL.Image")


def write_idx(path, tensor):
    header = struct.pack(f">BBBB{tensor.ndim}I", 0, 0, 8, tensor.ndim, *tensor.shape)
    content = header + tensor.to(torch.uint8).numpy().tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder, suffix="", count=20):
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    for prefix in ("train", "t10k"):
        images = torch.randint(0, 256, (count, 28, 28), generator=generator)
        write_idx(folder / f"{prefix}-images-idx3-ubyte{suffix}", images)
        write_idx(folder / f"{prefix}-labels-idx1-ubyte{suffix}", torch.arange(count) % 10)


def write_images(folder, classes=("cat", "dog"), count=4, size=(20, 12)):
    """Each class has its own grey level, so that a crop or a mix-up of labels shows."""
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            Image.new("RGB", size, (100 * label + index,) * 3).save(folder / name / f"{index}.png")


def in_memory(folder=None, kind="folder", size=8, **given):
    """What `--in-memory` holds."""
    given = {"data": kind, "data_dir": folder and str(folder), "img_size": size, **given}
    settings = make_settings(given, torch.device("cpu"))
    return data.InMemory(records.find(settings), settings, torch.device("cpu"))


def test_digits_split_is_stratified_fixed_by_seed_and_disjoint():
    first, again, other = (in_memory(kind="digits", seed=seed) for seed in (0, 0, 1))
    assert first.train_count + first.held_out_count == 1797
    share = torch.bincount(first.held_out.labels) / torch.bincount(
        torch.cat([first.train.labels, first.held_out.labels])
    )
    assert share.sub(0.2).abs().max() < 0.01
    assert torch.equal(first.held_out.images, again.held_out.images)
    assert not torch.equal(first.held_out.labels, other.held_out.labels)
    assert first.train.images.max() == 255  # 16 of the scans


def test_split_keeps_one_image_of_each_class_for_training():
    train, held_out = records.stratified_split(torch.tensor([0, 1, 1]), 0.9, seed=0)
    assert 0 in train.tolist() and len(held_out) == 1
    assert sorted(train.tolist() + held_out.tolist()) == [0, 1, 2]


def test_split_rounds_and_holds_one_of_two_images_out():
    labels = torch.tensor([0] * 8 + [1] * 7 + [2] * 2 + [3])
    train, held_out = records.stratified_split(labels, 0.2, seed=0)
    assert labels[held_out].bincount(minlength=4).tolist() == [2, 1, 1, 0]
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(len(labels)))


def test_images_are_resized_bicubically():
    images = torch.randint(0, 256, (3, 12, 12), generator=torch.Generator().manual_seed(0))
    arrays = records._arrays(images.to(torch.uint8), torch.zeros(3))
    for number, image in enumerate(images):
        pixels = data.read_image(arrays, number, 5, 1)
        assert pixels.dtype is torch.uint8 and pixels.shape == (1, 5, 5)
        bicubic = Image.fromarray(image.to(torch.uint8).numpy()).resize(
            (5, 5), Image.Resampling.BICUBIC
        )
        wanted = [[bicubic.getpixel((x, y)) for x in range(5)] for y in range(5)]
        assert pixels[0].tolist() == wanted
        assert torch.equal(data.read_image(arrays, number, 12, 1)[0], image), "as it is"


def test_normalization_is_mean_and_deviation_of_each_channel():
    images = torch.randint(0, 256, (7, 3, 5, 4), dtype=torch.uint8)
    y = data.Normalization.of(images)(images)
    assert y.mean((0, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(y.std((0, 2, 3), correction=0), torch.ones(3))
    constant = torch.full((2, 1, 3, 3), 9, dtype=torch.uint8)
    found = data.Normalization.of(constant)
    assert found(constant).abs().max() < 1e-5 and found.std == (1.0,)


def test_augmentation_identity_shift_and_mirror():
    images = torch.rand(6, 1, 8, 8)
    generator = torch.Generator().manual_seed(0)
    draw = data.Augmentation.draw(6, generator)
    torch.testing.assert_close(data.Augmentation().apply(images, draw), images)

    draw = data.Augmentation.draw(6, generator)
    mirrored = data.Augmentation(mirror=True).apply(images, draw)
    flips = [
        torch.allclose(m, i.flip(-1), atol=1e-5) for m, i in zip(mirrored, images, strict=True)
    ]
    kept = [torch.allclose(m, i, atol=1e-5) for m, i in zip(mirrored, images, strict=True)]
    assert any(flips) and any(kept) and all(a or b for a, b in zip(flips, kept, strict=True))

    draw = data.Augmentation.draw(400, generator)
    mirrored = data.Augmentation(mirror=True).apply(images[:1].expand(400, -1, -1, -1), draw)
    assert 160 < sum(torch.allclose(m, images[0], atol=1e-5) for m in mirrored) < 240, "one of two"

    spot = torch.zeros(32, 1, 15, 15)
    spot[:, :, 7, 7] = 1
    moved = data.Augmentation(shift=2).apply(spot, data.Augmentation.draw(32, generator))
    axis = torch.arange(15.0)
    for summed in (2, 3):  # over rows: along x; over columns: along y
        place = (moved.sum(summed)[:, 0] * axis).sum(1) / moved.sum((1, 2, 3)) - 7
        assert place.abs().max() <= 2.001 and place.abs().max() > 1


def test_augmentation_repeats_the_border():
    images = torch.full((9, 2, 8, 8), 0.7)
    draw = data.Augmentation.draw(9, torch.Generator().manual_seed(0))
    large = data.Augmentation(degrees=40, zoom=0.9, shift=5, mirror=True)
    torch.testing.assert_close(large.apply(images, draw), images)


def test_augmentation_rotates_without_shearing():
    """A quarter turn keeps the distance of a spot from the centre, in pixels, in a wide image."""
    spot = torch.zeros(1, 1, 16, 32)
    spot[0, 0, 7:9, 19] = 1  # 3.5 right of the centre
    draw = torch.zeros(5, 1)
    draw[0] = 1  # the largest angle
    turned = data.Augmentation(degrees=90).apply(spot, draw)[0, 0]
    rows, columns = (turned > 0.5).nonzero().unbind(1)
    assert columns.tolist() == [15, 16] and set(rows.tolist()) <= {4, 11}


@pytest.mark.parametrize(("drawn", "height"), [(1, 4), (0, 5), (-1, 6)])
def test_augmentation_zooms_by_the_share_that_it_says(drawn, height):
    """At 20 % a square of 5 x 5 pixels becomes one of 5 / 1.2 to 5 / 0.8."""
    square = torch.zeros(1, 1, 25, 25)
    square[0, 0, 10:15, 10:15] = 1
    draw = torch.zeros(5, 1)
    draw[1] = drawn
    zoomed = data.Augmentation(zoom=0.2).apply(square, draw)[0, 0]
    assert zoomed.sum().sqrt().item() == pytest.approx(5 / (1 + 0.2 * drawn), rel=0.02)
    assert round(zoomed[12].sum().item()) == round(zoomed[:, 12].sum().item()) == height


def test_each_image_draws_its_own_map():
    draw = data.Augmentation.draw(500, torch.Generator().manual_seed(0))
    assert draw.shape == (5, 500) and all(len(row.unique()) > 490 for row in draw)
    assert draw.min() > -1.001 and draw.max() < 1.001 and draw.mean(1).abs().max() < 0.1
    assert draw.min(1).values.max() < -0.9 and draw.max(1).values.min() > 0.9


def test_images_are_cropped_about_their_centre_and_turned_upright(tmp_path):
    wide = Image.new("L", (24, 8))
    wide.paste(255, (8, 0, 16, 8))
    assert data.fit(wide, 4).min() > 200, "the middle square is white"
    turned = Image.new("RGB", (4, 8), (0, 0, 0))
    turned.paste((255, 255, 255), (0, 0, 4, 4))  # the upper half
    exif = turned.getexif()
    exif[0x0112] = 3  # it was taken upside down
    turned.save(tmp_path / "turned.png", exif=exif)
    with Image.open(tmp_path / "turned.png") as opened:
        pixels = data.fit(data.upright(opened, 1), None)
    assert pixels.shape == (1, 8, 4) and pixels[0, :4].max() == 0 and pixels[0, 4:].min() == 255
    assert data.fit(data.upright(Image.new("L", (4, 4)), 3), None).shape == (3, 4, 4)
    for mode in ("I;16", "I", "F"):
        with pytest.raises(ValueError, match=f"mode {mode}; 8 bits a channel are wanted"):
            data.upright(Image.new(mode, (4, 4)), 1)


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("place", ["", "MNIST/raw"])
def test_idx_files(tmp_path, suffix, place):
    write_mnist(tmp_path / place, suffix)
    dataset = in_memory(tmp_path, "mnist", 28)
    assert dataset.train.images.shape == (20, 1, 28, 28)
    assert dataset.held_out.labels.tolist() == [*range(10), *range(10)]
    assert len(dataset.classes) == 10


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _lengthen(path):
    path.write_bytes(path.read_bytes() + b"0")


def _wrong_type(path):
    path.write_bytes(b"\0\0\x0d" + path.read_bytes()[3:])


def _wrong_magic(path):
    path.write_bytes(b"PK" + path.read_bytes()[2:])


def _short(path):
    path.write_bytes(path.read_bytes()[:6])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, r"size 15679 into shape \(20,28,28\)"),
        (_lengthen, r"size 15681 into shape \(20,28,28\)"),
        (_wrong_type, "begins with 00 00 0d, wanted 00 00 08"),
        (_wrong_magic, "begins with 50 4b 08, wanted 00 00 08"),
        (_short, "cannot be read as an idx file of bytes: buffer is smaller"),
        (lambda path: path.unlink(), "has no file train-images-idx3-ubyte"),
        (lambda path: write_idx(path, torch.zeros(5, 28, 28)), r"wanted \(5,\) labels"),
        (lambda path: write_idx(path, torch.zeros(5)), "wanted .N, height, width"),
    ],
)
def test_bad_idx_files_are_named(tmp_path, damage, message):
    write_mnist(tmp_path)
    damage(tmp_path / "train-images-idx3-ubyte")
    with pytest.raises(CommandError, match=message) as error:
        records.from_idx(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_held_out_digits_of_a_class_that_training_lacks(tmp_path):
    write_mnist(tmp_path)
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    write_idx(labels, torch.arange(20) % 11)
    with pytest.raises(CommandError, match="class 10 is not among the 10 classes"):
        in_memory(tmp_path, "mnist", 28)


def test_damaged_gzip_is_named(tmp_path):
    write_mnist(tmp_path, ".gz")
    _truncate(tmp_path / "t10k-labels-idx1-ubyte.gz")
    with pytest.raises(CommandError, match=r"t10k-labels-idx1-ubyte\.gz cannot be read"):
        records.from_idx(tmp_path)


@pytest.mark.parametrize("held_out", ["val", "test"])
def test_folder_with_its_own_split(tmp_path, held_out):
    write_images(tmp_path / "train")
    write_images(tmp_path / held_out, count=1)
    dataset = in_memory(tmp_path)
    assert dataset.classes == ["cat", "dog"]
    assert dataset.train.images.shape == (8, 3, 8, 8) and dataset.held_out_count == 2
    assert dataset.train.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 100, 101, 102, 103]


def test_folder_takes_val_and_leaves_hidden_files(tmp_path):
    for name, count in (("train", 4), ("test", 2), ("val", 1)):
        write_images(tmp_path / name, count=count)
    for name in ("._0.png", "notes.txt"):  # the first by macOS, on disks of others
        (tmp_path / "train" / "cat" / name).write_bytes(b"no image")
    (tmp_path / "train" / "cat" / "0.png").rename(tmp_path / "train" / "cat" / "0.PNG")
    dataset = in_memory(tmp_path)
    assert (dataset.train_count, dataset.held_out_count) == (8, 2)


def test_folder_without_a_split(tmp_path):
    write_images(tmp_path)
    dataset = in_memory(tmp_path, in_chans=1, held_out=0.25)
    assert dataset.train_count == 6 and dataset.held_out.labels.tolist() == [0, 1]


def test_folder_names_the_unreadable_image(tmp_path):
    write_images(tmp_path)
    image = tmp_path / "dog" / "2.png"
    image.write_bytes(image.read_bytes()[:40])
    with pytest.raises(CommandError, match=r"dog/2\.png cannot be read as an image"):
        in_memory(tmp_path)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda f: write_images(f, ("cat",)), "two class folders or more, got 1"),
        (lambda f: write_images(f / "train"), "needs train/ beside val/ or test/"),
        (lambda f: (write_images(f), (f / "emu").mkdir()), "emu holds no image"),
        (
            lambda f: (write_images(f / "train"), write_images(f / "val", ("cat", "emu"))),
            "emu has no counterpart",
        ),
        (lambda f: write_images(f, count=1), "none can be held out"),
    ],
)
def test_folder_mistakes(tmp_path, prepare, message):
    prepare(tmp_path)
    with pytest.raises(CommandError, match=message):
        in_memory(tmp_path)


def test_images_are_twice_in_memory_while_they_are_read(monkeypatch):
    monkeypatch.setattr(data.os, "sysconf", lambda name: 10 if "PAGES" in name else 100)
    data._check_memory(5, 100)
    with pytest.raises(CommandError, match="6 images of 100 bytes are held in memory"):
        data._check_memory(6, 100)


def test_more_images_than_memory_is_said_before_they_are_read(tmp_path):
    write_images(tmp_path)
    with pytest.raises(CommandError, match="use a smaller --img-size"):
        in_memory(tmp_path, size=10_000_000)
    with pytest.raises(CommandError, match="use a smaller --img-size"):
        in_memory(kind="digits", size=100_000)
