"""One verdict for all ranks: an error that only one rank knows of is a hang on all the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI


def agree(comm: MPI.Comm, problem: str | None) -> str | None:
    """What is wrong on any rank, as one line that all ranks get alike; None if nothing is."""
    problems: list[str | None] = comm.allgather(problem)
    first = next((found for found in problems if found), None)
    if first is None or all(found == first for found in problems):
        return first
    ranks = [rank for rank, found in enumerate(problems) if found == first]
    others = any(found and found != first for found in problems)
    where = f"on rank {ranks[0]}" if len(ranks) == 1 else f"on {len(ranks)} ranks, the first is {ranks[0]}"
    more = "; others report something else" if others else ""
    return f"{first} ({where} of {comm.size}{more})"


def difference(comm: MPI.Comm, what: str, value: object) -> str | None:
    """Which rank holds another value than rank 0, as one line that all ranks get alike; None if none does."""
    values = comm.allgather(value)
    for rank, theirs in enumerate(values):
        if theirs != values[0]:
            return f"all ranks must have the same {what}: rank {rank} has {theirs}, rank 0 has {values[0]}"
    return None
