"""Ranks agree: whatever one of them finds wrong, all hear in the same words."""

from typing import Any

import pytest

from hpcdl.verdict import agree, difference


class Ranks:
    """As much of a communicator as is needed: all ranks say what they were told to say."""

    def __init__(self, *said: Any) -> None:
        self.said, self.size = list(said), len(said)

    def allgather(self, mine: Any) -> list[Any]:
        return self.said


@pytest.mark.parametrize(
    ("said", "verdict"),
    [
        ([None, None, None], None),
        (["no disk", "no disk", "no disk"], "no disk"),
        ([None, "no disk", None], "no disk (on rank 1 of 3)"),
        ([None, "no disk", "no disk"], "no disk (on 2 ranks, the first is 1 of 3)"),
        (["no disk", None, "no file"], "no disk (on rank 0 of 3; others report something else)"),
    ],
)
def test_a_problem_of_any_rank_is_everybodys(said: list[str | None], verdict: str | None) -> None:
    ranks: Any = Ranks(*said)
    assert agree(ranks, None) == verdict


def test_a_value_that_differs_is_told_with_its_rank() -> None:
    equal: Any = Ranks(1, 1, 1)
    assert difference(equal, "seed", 1) is None
    unequal: Any = Ranks(1, 1, 2)
    assert difference(unequal, "seed", 1) == "all ranks must have the same seed: rank 2 has 2, rank 0 has 1"
