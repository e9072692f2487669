"""What hpcdl train learns: images or text, handed out by numbers, and the networks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hpcdl.data import ImageSet
from hpcdl.text import Text, batch, windows
from hpcdl.torch.models import MODELS

Numbers: TypeAlias = NDArray[np.int64]
Samples: TypeAlias = Callable[[Numbers], tuple[Tensor, Tensor]]


class Task(NamedTuple):
    """What there is to learn: so many samples, handed out by their numbers as inputs and labels."""

    name: str
    counts: str
    unit: str  # what is labelled: images, characters
    shape: tuple[int, int]  # what a network is made for: rows and columns, or vocabulary and block size
    train_count: int
    test_count: int
    labels: int  # of each sample
    train: Samples
    test: Samples


def image_task(images: ImageSet, dtype: torch.dtype = torch.float32) -> Task:
    """Name what is on an image; its bytes become numbers of mean 0 and deviation 1 over all that are trained on."""
    rows, columns = images.train.images.shape[1:]
    mean, deviation = float(images.train.images.mean()), float(images.train.images.std()) or 1.0

    def samples(pixels: NDArray[np.uint8], labels: Numbers) -> Samples:
        return lambda chosen: (
            torch.from_numpy(pixels[chosen]).to(dtype).sub_(mean).div_(deviation),
            torch.from_numpy(labels[chosen]),
        )

    counts = len(images.train.labels), len(images.test.labels)
    both = samples(*images.train), samples(*images.test)
    return Task(images.name, images.counts, "images", (rows, columns), *counts, 1, *both)


def text_task(text: Text, block_size: int) -> Task:
    """Name the character that follows, at every place of a window."""

    def samples(numbers: NDArray[Any]) -> Samples:
        def take(chosen: Numbers) -> tuple[Tensor, Tensor]:
            inputs, labels = batch(numbers, chosen, block_size)
            return torch.from_numpy(inputs), torch.from_numpy(labels)

        return take

    counts = windows(text.train, block_size), windows(text.test, block_size)
    both = samples(text.train), samples(text.test)
    shape = len(text.vocabulary), block_size
    return Task(text.name, text.counts, "characters", shape, *counts, block_size, *both)


def build(name: str, task: Task, *, seed: int) -> nn.Module:
    """The named network for this task, its parameters drawn from the seed."""
    torch.manual_seed(seed)
    return MODELS[name](*task.shape)
