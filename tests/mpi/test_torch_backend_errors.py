"""What goes wrong in a process group reaches whoever asks for the result, and says what it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hpcdl import HpcdlError, MismatchError, UnsupportedArrayError  # noqa: E402
from hpcdl.torch import backend, monitored_barrier  # noqa: E402

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.filterwarnings("ignore::FutureWarning")]

Start = Callable[..., None]


@pytest.fixture
def start(comm: MPI.Intracomm, tmp_path: Path) -> Iterator[Start]:
    """Makes the default group."""
    folder, numbers = comm.bcast(str(tmp_path)), count()

    def start(name: str = "hpcdl", *, rank: int = comm.rank, size: int = comm.size, **more: Any) -> None:
        more = {"timeout": timedelta(seconds=20), **more}
        # Each with a file of its own, which is removed when the last rank has done with it.
        store = dist.FileStore(f"{folder}/store-{next(numbers)}", size)
        dist.init_process_group(name, store=store, rank=rank, world_size=size, **more)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def together(comm: MPI.Intracomm) -> None:
    """Behind this all ranks have seen what went wrong; not through the group."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(0.001)


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "call": lambda x: dist.all_reduce(x),
    "wait": lambda x: dist.all_reduce(x, async_op=True).wait(),
    "result": lambda x: dist.all_reduce(x, async_op=True).result(),
    "future": lambda x: dist.all_reduce(x, async_op=True).get_future().wait(),
    "callback": lambda x: dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] + 1).wait(),
    "functional": lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD)),
    "coalesced": lambda x: dist.all_reduce_coalesced([x], async_op=True).wait(),
}


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_disagree_all_get_the_error_by_whatever_way_they_ask(
    start: Start, comm: MPI.Intracomm, way: str
) -> None:
    start()
    with pytest.raises((MismatchError, RuntimeError), match="the ranks do not call the same collective") as error:
        WAYS[way](torch.ones(3 + comm.rank))
    assert "float32 3" in str(error.value) and "float32 4" in str(error.value)
    mine = torch.ones(3)  # nothing has moved, and the group is as good as before
    dist.all_reduce(mine)
    assert mine.tolist() == [comm.size] * 3


def test_an_error_is_kept_by_the_work(start: Start, comm: MPI.Intracomm) -> None:
    start()
    work = dist.all_reduce(torch.ones(1 + comm.rank), async_op=True)
    for _ in range(2):
        with pytest.raises(MismatchError):
            work.wait()
    assert work.is_completed() and not work.is_success() and isinstance(work.exception(), MismatchError)


def test_an_error_in_the_reduction_of_gradients_comes_out_of_backward(start: Start, comm: MPI.Intracomm) -> None:
    start()
    model = DistributedDataParallel(nn.Linear(3, 2))
    if comm.rank == 0:  # the others do something else
        with pytest.raises(RuntimeError, match="the ranks do not call the same collective"):
            model(torch.ones(1, 3)).sum().backward()
    else:
        model(torch.ones(1, 3))
        with pytest.raises(MismatchError):
            dist.all_reduce(torch.ones(1))


REFUSED: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "mean of integers": (
        lambda size: dist.all_reduce(torch.ones(2, dtype=torch.int64), op=dist.ReduceOp.AVG),
        UnsupportedArrayError,
        "mean of int64",
    ),
    "bits of floats": (lambda size: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BOR), UnsupportedArrayError, "bor"),
    "largest of complex": (
        lambda size: dist.group.WORLD.allreduce([torch.ones(2, dtype=torch.complex64)], dist.ReduceOp.MAX).wait(),
        UnsupportedArrayError,
        "complex numbers have no order",
    ),
    "sum of float8": (
        lambda size: dist.group.WORLD.allreduce([torch.ones(2).to(torch.float8_e5m2)]).wait(),
        UnsupportedArrayError,
        "float8_e5m2",
    ),
    "elements that are one": (
        lambda size: dist.all_reduce(torch.ones(1).expand(4)),
        UnsupportedArrayError,
        "share memory",
    ),
    "output too short": (
        lambda size: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(3 * size)),
        ValueError,
        "of which this one gets",
    ),
    "rows that cannot be shared": (
        lambda size: dist.group.WORLD.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1)).wait(),
        ValueError,
        "rows",
    ),
    "splits that do not add up": (
        lambda size: dist.group.WORLD.all_to_all_single(*[torch.ones(size)] * 2, *[[2] * size] * 2).wait(),
        ValueError,
        "split sizes",
    ),
    "too few to scatter": (
        lambda size: dist.group.WORLD.alltoall([torch.ones(1)], [torch.ones(1)]).wait(),
        ValueError,
        "one for each of the",
    ),
    "no such root": (lambda size: dist.group.WORLD.gather([], [torch.ones(1)], size).wait(), ValueError, "none of"),
    "several tensors": (lambda size: dist.group.WORLD.allreduce([torch.ones(1)] * 2), ValueError, "one tensor"),
    "no such tag": (lambda size: dist.group.WORLD.send([torch.ones(1)], 0, -1), ValueError, "tag is between 0 and"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_served_is_refused(start: Start, comm: MPI.Intracomm, case: str) -> None:
    start()
    call, kind, words = REFUSED[case]
    with pytest.raises(kind, match=words):
        call(comm.size)
    dist.barrier()


def test_what_one_rank_alone_must_refuse_all_refuse(start: Start, comm: MPI.Intracomm) -> None:
    start()
    with pytest.raises(ValueError, match="a rank cannot take part in this collective, so none does"):
        dist.reduce_scatter_tensor(torch.ones(2 + comm.rank // (comm.size - 1)), torch.ones(2 * comm.size))
    with pytest.raises(ValueError, match="a rank cannot take part in this collective, so none does"):
        dist.all_to_all_single(torch.ones(comm.size), torch.ones(comm.size), [1] * comm.size if comm.rank else [0])
    dist.barrier()


# ---- too late ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["call", "work"])
def test_a_timeout_names_the_rank_that_has_not_come(start: Start, comm: MPI.Intracomm, asynchronous: bool) -> None:
    start(timeout=timedelta(seconds=1))
    dist.barrier()
    last = comm.size - 1
    if comm.rank == last:
        together(comm)
        return
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        WAYS["wait" if asynchronous else "call"](torch.ones(3))
    assert 0.9 < time.monotonic() - began < 10
    text = str(error.value)
    assert "timed out after 1 s" in text and "allreduce sum of float32 3" in text
    assert f"rank {last} (" in text and "has not come" in text and "in together at" in text
    assert all(f"rank {rank} (" not in text for rank in range(last))
    with pytest.raises(dist.DistBackendError, match="cannot be used any more"):
        dist.barrier()
    together(comm)


def test_a_calls_own_timeout_counts(start: Start, comm: MPI.Intracomm) -> None:
    start()
    if comm.rank:
        together(comm)
        return
    with pytest.raises(dist.DistBackendError, match=r"timed out after 0\.5 s.* in barrier"):
        dist.group.WORLD.barrier(timeout=timedelta(seconds=0.5)).wait()
    together(comm)


def test_who_waits_for_less_long_gets_an_error_and_the_work_goes_on(start: Start, comm: MPI.Intracomm) -> None:
    start()
    mine = torch.ones(3)
    if comm.rank == 0:
        work = dist.all_reduce(mine, async_op=True)
        with pytest.raises(dist.DistBackendError, match=r"(?s)not there after 0\.3 s, and going on: .*has not come"):
            work.wait(timedelta(seconds=0.3))
        together(comm)
        work.wait()
    else:
        together(comm)
        dist.all_reduce(mine)
    assert mine.tolist() == [comm.size] * 3


def test_a_message_that_does_not_come_says_what_the_others_do(start: Start, comm: MPI.Intracomm) -> None:
    start(timeout=timedelta(seconds=0.5))
    if comm.rank:
        together(comm)
        return
    with pytest.raises(dist.DistBackendError, match=r"(?s)timed out .*recv of float32 2 from rank 1, tag 7.*together"):
        dist.recv(torch.ones(2), 1, tag=7)
    together(comm)


def test_a_timeout_reaches_cpp(start: Start, comm: MPI.Intracomm) -> None:
    start(timeout=timedelta(seconds=1))
    model = DistributedDataParallel(nn.Linear(3, 2))
    loss = model(torch.ones(1, 3)).sum()
    if comm.rank:
        together(comm)
        return
    with pytest.raises(RuntimeError, match="timed out after 1 s"):
        loss.backward()
    together(comm)


def test_a_monitored_barrier_names_who_is_missing(start: Start, comm: MPI.Intracomm) -> None:
    start()
    monitored_barrier()
    last = comm.size - 1
    for everybody in (False, True):
        if comm.rank == last:
            together(comm)
            with pytest.raises(dist.DistBackendError, match=f"rank {last} did not come to monitored_barrier"):
                monitored_barrier(timeout=timedelta(seconds=5))
        else:
            with pytest.raises(
                dist.DistBackendError, match=f"rank {last} did not come to monitored_barrier within 0.3"
            ):
                monitored_barrier(timeout=timedelta(seconds=0.3), wait_all_ranks=everybody)
            together(comm)
        monitored_barrier()
    gloos = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="gloo"):
        monitored_barrier(gloos)
    dist.barrier()  # till then one rank may still be connecting


# ---- groups that are not made --------------------------------------------------------------------------------------


def test_another_backend_beside_it_is_refused(start: Start) -> None:
    for mixed in ("cpu:hpcdl,cuda:gloo", "cpu:gloo,cuda:hpcdl"):
        with pytest.raises(ValueError, match=r"cannot be mixed with another \(.*:gloo\)"):
            start(mixed)
    start("cpu:hpcdl,cuda:hpcdl")


def test_it_may_stand_beside_groups_of_gloo(start: Start, comm: MPI.Intracomm) -> None:
    start("gloo")
    group = dist.new_group(backend="hpcdl")
    mine = torch.ones(2)
    dist.all_reduce(mine, group=group)
    dist.all_reduce(mine)
    assert mine.tolist() == [comm.size**2] * 2


def test_ranks_that_contradict_mpi_are_refused(start: Start, comm: MPI.Intracomm) -> None:
    with pytest.raises(HpcdlError, match=f"MPI knows it as rank {comm.rank} of {comm.size}: give init_process_group"):
        start(rank=comm.size - 1 - comm.rank if comm.rank != comm.size - 1 - comm.rank else 0)


def test_a_member_that_does_not_come_is_named(start: Start, comm: MPI.Intracomm) -> None:
    start()
    if comm.rank == 0:
        with pytest.raises(dist.DistBackendError, match="missing are 1"):
            dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    together(comm)


def test_options_that_do_not_fit_are_refused(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcdl import settings

    start()
    with pytest.raises(TypeError, match=r"hpcdl\.torch\.backend\.options"):
        dist.new_group(pg_options={"algorithm": "ring"})
    with pytest.raises(ValueError, match="rong"):
        dist.new_group(pg_options=backend.options(algorithm="rong"))
    monkeypatch.setattr(settings, "ALGORITHM", "quick")
    with pytest.raises(ValueError, match="quick"):
        dist.new_group()


def test_an_aborted_group_gives_up_what_is_under_way(start: Start, comm: MPI.Intracomm) -> None:
    start()
    group = dist.new_group()
    if comm.rank == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        group.abort()
        with pytest.raises(dist.DistBackendError, match="was aborted"):
            work.wait()
    together(comm)
