"""The errors that somebody may want to catch. A caller's plain mistake is a ValueError or TypeError."""

from __future__ import annotations

from collections.abc import Sequence


class HpcdlError(Exception):
    """The base of all our own errors."""


class MismatchError(HpcdlError):
    """The ranks called different collectives, or the same one with different arguments; no data has moved.

    `table` tells rank by rank what was called.
    """

    def __init__(self, message: str, table: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.table = list(table)


class RankEndedError(HpcdlError):
    """A rank ended its program while others wait for it in a collective."""


class UnsupportedArrayError(HpcdlError, TypeError):
    """An array of a kind, a type or a layout that the collective cannot serve; no data has moved."""


class RankFailedError(HpcdlError):
    """Ranks were lost in an all-reduce, and what was promised cannot be kept; the arrays are as they were.

    `failed` are their numbers in the communicator that all began with.
    """

    def __init__(self, message: str, failed: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.failed = tuple(failed)
