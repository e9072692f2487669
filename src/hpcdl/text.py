"""Text to train on, character by character: checked, the same on all ranks, cut into windows."""

from __future__ import annotations

import re
import subprocess
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hpcdl.data import DataError, together

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_CHARACTERS = 65_536  # what 16 bits can number
BIBLE = ("bible", "-f", "Gen1:1-Rev22:21")  # Debian's bible-kjv: all of it, each line a verse after its number


class Text(NamedTuple):
    """A text as numbers of the characters of its vocabulary, the first 90 % to train on, the rest held out."""

    name: str
    vocabulary: str
    train: NDArray[Any]
    test: NDArray[Any]

    @property
    def counts(self) -> str:
        return f"{len(self.train)} training and {len(self.test)} test characters, {len(self.vocabulary)} different ones"


def load(source: str, *, block_size: int) -> Text:
    """Read a file of UTF-8 text, or "bible": King James's, without the verses' numbers. Each part holds a window."""
    text = cut(_bible() if source == "bible" else _file(Path(source)), source)
    for part, numbers in (("to train on", text.train), ("held out", text.test)):
        if len(numbers) <= block_size:
            whole = len(text.train) + len(text.test)
            raise DataError(
                f"{source} is too short: of its {whole} characters {len(numbers)} are {part}, a window and what "
                f"follows it need {block_size + 1}; take a longer text or a smaller block size"
            )
    return text


def load_together(source: str, comm: MPI.Comm, *, block_size: int) -> Text:
    """Read the same text on every rank, each for itself; if one rank cannot, all raise the same DataError."""
    return together(
        lambda: load(source, block_size=block_size), comm, lambda text: f"{text.counts}, checksum {_checksum(text):08x}"
    )


def cut(text: str, name: str) -> Text:
    """Number the characters of a text in their order, and hold out its last tenth."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    # A table over all of Unicode: 4 million characters take 0.1 s, where np.unique sorts them in 1.3 s.
    table = np.zeros(0x110000, np.uint32)
    table[codes] = 1
    vocabulary = np.flatnonzero(table)
    if len(vocabulary) > MOST_CHARACTERS:
        raise DataError(f"{name} has {len(vocabulary)} different characters, more than {MOST_CHARACTERS}")
    table[vocabulary] = np.arange(len(vocabulary))
    numbers = table[codes].astype(np.uint8 if len(vocabulary) <= 256 else np.uint16)
    train = len(numbers) - len(numbers) // 10
    return Text(name, "".join(map(chr, vocabulary)), numbers[:train], numbers[train:])


def windows(numbers: NDArray[Any], block_size: int) -> int:
    """How many windows of block_size characters lie end to end, each with a character after it.

    They are what `hpcdl.data.shares` shares out.
    """
    return (len(numbers) - 1) // block_size


def batch(
    numbers: NDArray[Any], indices: NDArray[np.int64], block_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The characters in some windows, and after each of them the one that follows it; both (windows, block_size)."""
    places = indices[:, None] * block_size + np.arange(block_size)
    return numbers[places].astype(np.int64), numbers[places + 1].astype(np.int64)


def _bible() -> str:
    packages = "apt-get install bible-kjv bible-kjv-text"
    try:
        # Its reader opens a pager where it finds a terminal, so it gets none.
        run = subprocess.run(BIBLE, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    except FileNotFoundError:
        raise DataError(f"the Bible is not installed: {packages}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DataError(f"the Bible cannot be read: {error}") from error
    if run.returncode or not run.stdout:
        said = (run.stderr or run.stdout).decode("utf-8", "replace").strip().partition("\n")[0]
        raise DataError(f"the Bible cannot be read ({said or f'exit status {run.returncode}'}): {packages}")
    return re.sub(r"^\w+:\d+ ", "", _decoded(run.stdout, "bible"), flags=re.MULTILINE)


def _file(path: Path) -> str:
    try:
        return _decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; there are bible, or a file of text") from error


def _decoded(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8-sig")  # the mark that some editors put first is no character of the text
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text: byte {error.start} is {content[error.start]:#04x}") from error
    if "\0" in text:
        raise DataError(f"{name}: not a text: it holds a zero at character {text.index(chr(0))}")
    return text


def _checksum(text: Text) -> int:
    total = zlib.crc32(text.vocabulary.encode())
    for numbers in (text.train, text.test):
        total = zlib.crc32(numbers.data, total)
    return total
