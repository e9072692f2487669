"""Each character of a text is predicted once an epoch, and what is no text is named in one line."""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcdl import text
from hpcdl.data import DataError, shares


def written(folder: Path, content: str | bytes) -> str:
    path = folder / "a.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def spelled(read: text.Text, numbers: Any) -> str:
    return "".join(read.vocabulary[number] for number in np.ravel(numbers))


def test_a_text_can_be_read_back_from_its_numbers(tmp_path: Path) -> None:
    content = "Zwölf Boxkämpfer\r\n\tjagen Viktor 😀 — 12 mal.\n" * 3
    read = text.load(written(tmp_path, content), block_size=8)
    assert spelled(read, read.train) + spelled(read, read.test) == content
    assert list(read.vocabulary) == sorted(set(content))
    assert read.train.dtype == read.test.dtype == np.uint8


@pytest.mark.parametrize("n", [100, 101, 109, 110])
def test_the_last_tenth_is_held_out(n: int) -> None:
    read = text.cut("".join(map(chr, range(33, 33 + n))), "it")
    assert len(read.test) == n // 10
    assert [*read.train, *read.test] == list(range(n))
    assert read.counts == f"{n - n // 10} training and {n // 10} test characters, {n} different ones"


@pytest.mark.parametrize("n", [7, 8, 9, 12, 13, 14, 100])
def test_each_character_but_the_first_is_predicted_once_up_to_the_last_window(n: int) -> None:
    numbers, size = np.arange(n, dtype=np.uint8), 6
    count = text.windows(numbers, size)
    inputs, targets = text.batch(numbers, np.arange(count), size)
    assert inputs.shape == targets.shape == (count, size)
    assert inputs.dtype == targets.dtype == np.int64
    assert inputs.ravel().tolist() == list(range(count * size))
    assert (targets == inputs + 1).all()
    assert n - 1 - size < count * size <= n - 1


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ranks_together_see_the_batches_of_one(size: int) -> None:
    numbers = text.cut("to be or not to be, that is the question " * 20, "it").train
    count = text.windows(numbers, 8)

    def batches(rank: int, size: int) -> list[Any]:
        every = shares(count, 1, seed=3, batch=12, rank=rank, size=size)
        return [text.batch(numbers, share.indices, 8) for share in every]

    ranks = [batches(rank, size) for rank in range(size)]
    for step, (inputs, targets) in enumerate(batches(0, 1)):
        assert (np.concatenate([batch[step][0] for batch in ranks]) == inputs).all()
        assert (np.concatenate([batch[step][1] for batch in ranks]) == targets).all()


def test_many_characters_take_two_bytes_each() -> None:
    read = text.cut("".join(map(chr, range(300))), "it")
    assert read.train.dtype == np.uint16
    assert [*read.train, *read.test] == list(range(300))
    every = [chr(code) for code in range(0x11000) if not 0xD800 <= code < 0xE000]
    most = text.cut("".join(every[: text.MOST_CHARACTERS]), "it")
    assert most.test[-1] == text.MOST_CHARACTERS - 1
    with pytest.raises(DataError, match="it has 65537 different characters, more than 65536"):
        text.cut("".join(every[: text.MOST_CHARACTERS + 1]), "it")


def test_the_mark_that_some_editors_put_first_is_no_character(tmp_path: Path) -> None:
    read = text.load(written(tmp_path, b"\xef\xbb\xbf" + b"ab" * 50), block_size=4)
    assert read.vocabulary == "ab"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "too short: of its 0 characters 0 are to train on, a window and what follows it need 5"),
        (b"x" * 49, "too short: of its 49 characters 4 are held out, a window and what follows it need 5"),
        (b"ab\xff" + b"c" * 100, "not UTF-8 text: byte 2 is 0xff"),
        ("naïve ".encode("latin-1") * 20, "not UTF-8 text: byte 2 is 0xef"),
        ("Text".encode("utf-16-be") * 20, "not a text: it holds a zero at character 0"),
        (b"\x1f\x8b\x08\0", "not UTF-8 text: byte 1 is 0x8b"),
    ],
)
def test_what_is_no_text_gets_one_line(content: bytes, words: str, tmp_path: Path) -> None:
    path = written(tmp_path, content)
    with pytest.raises(DataError) as raised:
        text.load(path, block_size=4)
    assert words in str(raised.value) and path in str(raised.value)
    assert "\n" not in str(raised.value)
    assert len(text.load(written(tmp_path, "x" * 50), block_size=4).test) == 5


def test_a_file_that_cannot_be_read_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file or directory; there are bible, or a file of text"):
        text.load(str(tmp_path / "absent.txt"), block_size=4)
    with pytest.raises(DataError, match="Is a directory"):
        text.load(str(tmp_path), block_size=4)


class Ranks:
    """As much of a communicator as is needed: all other ranks say what they were told to say."""

    def __init__(self, *others: Any) -> None:
        self.others, self.size = list(others), 2

    def allgather(self, mine: Any) -> list[Any]:
        return [mine, self.others.pop(0)]


def test_a_text_that_differs_between_ranks_or_that_one_cannot_read_is_refused_by_all(tmp_path: Path) -> None:
    path = written(tmp_path, "ab" * 50)
    unreadable: Any = Ranks("no such text")
    with pytest.raises(DataError, match=r"no such text \(on rank 1 of 2\)"):
        text.load_together(path, unreadable, block_size=4)

    told: list[Any] = []
    for content in ("ab" * 50, "ba" * 50, "ac" * 50):  # alike in their numbers, or in their characters
        every: Any = Ranks(None, "another")
        with pytest.raises(DataError) as raised:
            text.load_together(written(tmp_path, content), every, block_size=4)
        told.append(str(raised.value))
        assert "all ranks must have the same data: rank 1 has another" in told[-1]
    assert len(set(told)) == 3


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "the Bible is not installed: apt-get install bible-kjv bible-kjv-text"),
        ("echo no data >&2; exit 1", "cannot be read (no data): apt-get install bible-kjv bible-kjv-text"),
        ("exit 0", "cannot be read (exit status 0)"),
    ],
)
def test_where_the_bible_cannot_be_read_the_packages_are_named(
    script: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bible"
    if script:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setattr(text, "BIBLE", (str(program), *text.BIBLE[1:]))
    with pytest.raises(DataError) as raised:
        text.load("bible", block_size=4)
    assert words in str(raised.value)


def test_the_bible_is_read_whole_and_without_numbers() -> None:
    try:
        read = text.load("bible", block_size=64)
    except DataError as error:
        if "not installed" in str(error):
            pytest.skip("bible-kjv is not installed")
        raise
    assert len(read.vocabulary) == 63 and not any(map(str.isdigit, read.vocabulary))
    assert len(read.train) + len(read.test) == 4_137_850
    assert spelled(read, read.train[:56]) == "In the beginning God created the heaven and the earth.\nA"
    assert subprocess.run([*text.BIBLE[:2], "Gen1:1"], capture_output=True, stdin=subprocess.DEVNULL).returncode == 0
