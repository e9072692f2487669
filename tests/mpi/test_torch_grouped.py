"""A grouped all-reduce is the all-reduce of each of its tensors."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

import hpcdl
from hpcdl.errors import MismatchError, UnsupportedArrayError

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.torch.grouped import grouped_allreduce, grouped_iallreduce, poll  # noqa: E402


def at_once(tensors: Any, comm: MPI.Intracomm, **options: Any) -> Any:
    return grouped_allreduce(tensors, comm, **options)


def started(tensors: Any, comm: MPI.Intracomm, **options: Any) -> Any:
    work = grouped_iallreduce(tensors, comm, **options)
    while not poll(work):
        pass
    return work.result()


FORMS = [at_once, started]


def mixture(rank: int) -> list[Any]:
    """Small integers, so that sums are exact, in all sorts of types, shapes and layouts."""
    random = torch.Generator().manual_seed(rank)

    def some(*shape: int) -> Any:
        return torch.randint(-9, 9, shape, generator=random).float()

    return [
        some(1),
        some(2),
        some(3).double(),
        some(5),
        some(0),
        some(2, 0, 3).double(),
        some(4, 6).t(),
        some(8, 9)[::2, 1::3],
        some(2, 3, 4, 5).to(memory_format=torch.channels_last),
        some(7).to(torch.bfloat16),
        some(3, 3).long(),
        torch.tensor(float(rank)),
        some(3) + 1j * some(3),
        torch.nn.Parameter(some(4)),
    ]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("algorithm", ["auto", "ring", "native"])
def test_every_tensor_gets_its_own_sum_in_its_own_layout(comm: MPI.Intracomm, form: Any, algorithm: str) -> None:
    halves = [torch.bfloat16] if algorithm == "native" else []  # which MPI cannot add

    def mine(rank: int) -> list[Any]:
        return [each for each in mixture(rank) if each.dtype not in halves]

    tensors = mine(comm.rank)
    looks = [(each.data_ptr(), each.stride(), each.dtype, each.shape) for each in tensors]
    given = form(tensors, comm, algorithm=algorithm)
    assert all(mine is its for mine, its in zip(tensors, given, strict=True))
    assert looks == [(each.data_ptr(), each.stride(), each.dtype, each.shape) for each in tensors]
    for each, *of_ranks in zip(tensors, *map(mine, range(comm.size)), strict=True):
        assert torch.equal(each.detach(), sum(of_ranks[1:], of_ranks[0]).detach())


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [(1, 2, 3, 5, 0), (0, 5, 3, 2, 1), (0,), (0, 0), ()])
def test_short_and_empty_tensors_are_right(comm: MPI.Intracomm, form: Any, lengths: tuple[int, ...]) -> None:
    tensors = [torch.arange(n) + 10.0 * comm.rank for n in lengths]
    given = form(tensors, comm, op="max")
    assert [each.tolist() for each in given] == [[e + 10.0 * (comm.size - 1) for e in range(n)] for n in lengths]


@pytest.mark.ranks(2, 3)
def test_what_is_in_flight_together_does_not_meet(comm: MPI.Intracomm) -> None:
    groups = [[torch.full((n,), comm.rank + n), torch.full((n, 2), comm.rank + 0.5)] for n in range(1, 5)]
    works = [grouped_iallreduce(group, comm) for group in groups]
    single = torch.ones(3)
    one = hpcdl.iallreduce(single, comm)
    assert grouped_allreduce([torch.ones(2)], comm)[0].tolist() == [comm.size] * 2
    total = sum(range(comm.size))
    for n in (4, 2, 1, 3):
        works[n - 1].wait()
        longs, floats = groups[n - 1]
        assert longs.tolist() == [total + n * comm.size] * n
        assert (floats == total + comm.size / 2).all()
        assert poll(works[n - 1])
    assert one.result() is single and single.tolist() == [comm.size] * 3


@pytest.mark.ranks(2)
def test_the_tensors_of_a_type_travel_as_one(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    allreduce = hpcdl.allreduce

    def counted(x: Any, *args: Any, **options: Any) -> Any:
        lengths.append(len(x))
        return allreduce(x, *args, **options)

    monkeypatch.setattr(hpcdl, "allreduce", counted)
    grouped_allreduce([torch.ones(n, dtype=kind) for n in (1, 2, 3) for kind in (torch.float32, torch.int64)], comm)
    assert lengths == [6, 6]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("form", FORMS)
def test_groups_that_differ_are_refused_by_all(comm: MPI.Intracomm, form: Any) -> None:
    odd = comm.rank == comm.size - 1
    tensors = [torch.ones(2, 3), torch.ones(4)]
    for others, options in (
        ([torch.ones(3, 2), torch.ones(4)], {}),  # as many elements of each type
        ([torch.ones(4), torch.ones(2, 3)], {}),
        ([torch.ones(2, 3), torch.ones(4).long()], {}),
        ([], {}),
        (tensors, {"op": "max"}),
    ):
        with pytest.raises(MismatchError, match="together the tensors float32") as raised:
            form(others if odd else tensors, comm, **(options if odd else {}))
        assert len(set(comm.allgather(str(raised.value)))) == 1
    assert all((each == 1).all() for each in tensors)
    assert float(form([torch.ones(1)], comm)[0]) == comm.size


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("wrong", "options", "error", "match"),
    [
        ("text", {}, UnsupportedArrayError, "tensor 1 is of type str"),
        (torch.ones(3).to_sparse(), {}, UnsupportedArrayError, "no dense tensor but one of layout torch.sparse_coo"),
        (torch.ones(1).expand(3), {}, UnsupportedArrayError, "tensor 1 is expanded"),
        (torch.ones(3).long(), {"op": "mean"}, UnsupportedArrayError, "mean"),
        (torch.ones(3), {"algorithm": "quick"}, ValueError, "quick"),
    ],
)
def test_what_one_rank_cannot_serve_is_refused_by_all(
    comm: MPI.Intracomm, form: Any, wrong: Any, options: Any, error: type[Exception], match: str
) -> None:
    other = wrong if options or comm.rank == 1 else torch.ones(3)
    with pytest.raises(error, match=match):
        form([torch.ones(2), other], comm, **options)
    assert float(form([torch.ones(1)], comm)[0]) == comm.size
