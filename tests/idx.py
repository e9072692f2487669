"""Small image sets in the files that MNIST comes in."""

import gzip
import struct
from pathlib import Path

import numpy as np


def idx(array: np.ndarray) -> bytes:
    """An array of bytes as an IDX file's content."""
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_images(folder: Path, train: int = 400, test: int = 50, side: int = 8, seed: int = 0) -> Path:
    """Write a set that is easy to learn: each class has its own pattern, under some noise."""
    random = np.random.RandomState(seed)
    patterns = random.randint(0, 200, (10, side, side))
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, n in (("train", train), ("t10k", test)):
        labels = np.arange(n) % 10
        images = patterns[labels] + random.randint(0, 56, (n, side, side))
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images), 1))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels), 1))
    return folder
