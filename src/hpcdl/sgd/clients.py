"""Who has which samples in federated learning, and who takes part in a round: from seeds alone, on all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hpcdl.data import part

Numbers: TypeAlias = NDArray[np.int64]

SKEWS = {"sizes": 1.0, "labels": 0.3, "sorted": 2.0}
"""With what each is taken if nothing is said."""
DEAL, ASK, DROP = 1, 2, 3
"""What a stream of random numbers is for."""


def parse_skew(text: str) -> tuple[str, float]:
    """A kind of skew and its number, such as labels:0.3; ValueError if it is none."""
    kind, _, number = text.partition(":")
    if kind == "none" and not number:
        return kind, 0.0
    if kind not in SKEWS:
        raise ValueError(f"skew {text!r} is none of none, {', '.join(f'{name}[:NUMBER]' for name in SKEWS)}")
    try:
        value = float(number) if number else SKEWS[kind]
    except ValueError:
        raise ValueError(f"skew {text!r}: {number} is no number") from None
    if not 0 < value < float("inf") or (kind == "sorted" and value != int(value)):
        wanted = "a whole number of pieces from 1" if kind == "sorted" else "a finite number above 0"
        raise ValueError(f"skew {text!r}: {kind} takes {wanted}")
    return kind, value


def deal(labels: Sequence[int] | Numbers, clients: int, *, skew: str = "none", seed: int = 0) -> list[Numbers]:
    """Each client's samples, by number: every sample is one client's.

    - `none`: shuffled, and dealt out evenly.
    - `sizes:A`: shuffled, and unequal: each client has at least one, and of the others shares from a Dirichlet
      distribution; the smaller A, the less equal.
    - `labels:A`: the samples of every label are dealt out by shares of its own from a Dirichlet distribution: clients
      are unequal, and each knows some labels best (Yurochkin et al. 2019, arXiv 1905.12022, section 4). The smaller A,
      the more so; some clients may have none at all.
    - `sorted:N`: sorted by label and cut into equal pieces, N of them to each client, which so sees about N labels
      (McMahan et al., section 3).
    """
    kind, value = parse_skew(skew)
    known = np.asarray(labels, dtype=np.int64)
    n = len(known)
    if not 1 <= clients <= n:
        raise ValueError(f"{n} samples are for 1 to {n} clients, not {clients}")
    random = np.random.default_rng([seed, DEAL])
    order = random.permutation(n)
    if kind == "none":
        return [order[part(n, client, clients)] for client in range(clients)]
    if kind == "sizes":
        shares = random.dirichlet(np.full(clients, value))
        return _cut(order, 1 + _whole(shares, n - clients))
    if kind == "labels":
        dealt: list[list[Numbers]] = [[] for _ in range(clients)]
        for label in np.unique(known):
            alike = order[known[order] == label]
            pieces = _cut(alike, _whole(random.dirichlet(np.full(clients, value)), len(alike)))
            for client, piece in zip(dealt, pieces, strict=True):
                client.append(piece)
        return [np.concatenate(pieces) for pieces in dealt]
    each = int(value)
    if clients * each > n:
        raise ValueError(f"skew {skew}: {n} samples are too few for {clients} clients with {each} pieces each")
    in_order = order[np.argsort(known[order], kind="stable")]
    pieces = [in_order[part(n, piece, clients * each)] for piece in range(clients * each)]
    drawn = random.permutation(clients * each).reshape(clients, each)
    return [np.concatenate([pieces[piece] for piece in mine]) for mine in drawn]


def asked(clients: int, fraction: float, number: int, seed: int = 0) -> list[int]:
    """The clients that are asked in a round: max(1, fraction of all), every set as likely as any other."""
    count = max(1, round(fraction * clients))
    return sorted(np.random.default_rng([seed, ASK, number]).permutation(clients)[:count].tolist())


def dropped(chosen: Sequence[int], drop_out: float, number: int, seed: int = 0) -> list[int]:
    """Those of the asked that do not report back in this round: each with the probability `drop_out`."""
    luck = np.random.default_rng([seed, DROP, number]).random(len(chosen))
    return [client for client, drawn in zip(chosen, luck, strict=True) if drawn < drop_out]


def play(sizes: dict[int, int], ranks: int) -> list[list[int]]:
    """Which rank plays which clients, so that they have about as much to do: the largest first, to whom has least."""
    played: list[list[int]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for client in sorted(sizes, key=lambda client: (-sizes[client], client)):
        rank = load.index(min(load))
        played[rank].append(client)
        load[rank] += sizes[client]
    return played


def _whole(shares: NDArray[np.float64], n: int) -> Numbers:
    """Whole numbers in these proportions, n in all."""
    ends = np.rint(np.cumsum(shares) * n).astype(np.int64)
    ends[-1] = n
    return np.diff(ends, prepend=0)


def _cut(order: Numbers, lengths: Numbers) -> list[Numbers]:
    return np.split(order, np.cumsum(lengths)[:-1])
