"""The networks that hpcdl train can train."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hpcdl.data import CLASSES


def mlp(rows: int, columns: int, hidden: int = 256) -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(rows * columns, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


def cnn(rows: int, columns: int) -> nn.Module:
    """Two convolutions of 3 x 3, each followed by a pooling, and one linear layer."""
    if min(rows, columns) < 4:
        raise ValueError(f"two poolings by 2 need images of at least 4 x 4, these are {rows} x {columns}")
    return nn.Sequential(
        nn.Unflatten(1, (1, rows)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (rows // 4) * (columns // 4), CLASSES),
    )


def transformer(vocabulary: int, block_size: int, width: int = 64, heads: int = 4, layers: int = 2) -> nn.Module:
    """A decoder-only transformer over characters: what comes after each of up to `block_size` of them.

    It takes numbers of characters, (batch, length), and gives scores, (batch, length, vocabulary). For 63 characters
    and blocks of 64 it has 112,319 parameters.
    """
    if width % heads:
        raise ValueError(f"heads share the width evenly: {width} is no multiple of {heads}")
    return Transformer(vocabulary, block_size, width, heads, layers)


class Transformer(nn.Module):
    """Characters and their places in, blocks of attention and thought, scores out."""

    def __init__(self, vocabulary: int, block_size: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.block_size = block_size
        self.characters = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(block_size, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, characters: Tensor) -> Tensor:
        length = characters.shape[1]
        if length > self.block_size:
            raise ValueError(f"{length} characters are longer than the block of {self.block_size} this model is for")
        places = torch.arange(length, device=characters.device)
        scores: Tensor = self.scores(self.blocks(self.characters(characters) + self.places(places)))
        return scores


class Block(nn.Module):
    """What each place learns from those before it, and then by itself; each is added to what was there."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.thought = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        both: Tensor = x + self.thought(x)
        return both


class Attention(nn.Module):
    """Each place asks those before it and itself, with several heads at once."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ask, self.answer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (batch, length, 3 * width) to three of (batch, heads, length, width of a head)
        queries, keys, values = (
            self.ask(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        )
        heard = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        answer: Tensor = self.answer(heard.transpose(1, 2).reshape(batch, length, width))
        return answer


# Each takes the two numbers of a task's shape.
MODELS: dict[str, Callable[[int, int], nn.Module]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer}
