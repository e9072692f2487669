"""The operations of a process group of the backend hpcdl: each gives what all ranks' numbers make, worked out anew."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from torch import Tensor  # noqa: E402

import hpcdl  # noqa: E402
import hpcdl.torch  # noqa: E402

# torch 2.13 renames functions, and warns of the old names, which older ones have alone.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:Sparse invariant checks:UserWarning")

REAL = ["float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bfloat16", "float16"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
COMPLEX = ["complex64", "complex128"]
OTHERS = ["bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "complex32", "uint16", "uint32", "uint64"]
LENGTHS = (0, 1, 3, 17, 1000)


@pytest.fixture
def world(comm: MPI.Intracomm, tmp_path: Path) -> Iterator[Any]:
    """The default group."""
    path = comm.bcast(str(tmp_path / "store"))
    dist.init_process_group(
        "hpcdl",
        store=dist.FileStore(path, comm.size),
        rank=comm.rank,
        world_size=comm.size,
        timeout=timedelta(seconds=30),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def values(rank: int, n: int, dtype: str = "float32") -> Tensor:
    """A rank's numbers: few and small, so that all sums are exact."""
    numbers = (torch.arange(n) * 3 + rank * 5) % 7
    if dtype == "bool":
        return numbers > 3
    if dtype.startswith("complex"):
        return torch.complex(numbers.float(), 1.0 + numbers.float()).to(getattr(torch, dtype))
    return numbers.to(getattr(torch, dtype))


def same(one: Tensor, other: Tensor) -> bool:
    """Equal to the last bit, also in types that torch does not compare."""
    one, other = one.contiguous(), other.contiguous()
    return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def folded(op: Any, parts: list[Tensor]) -> Tensor:
    """The reduction of the ranks' numbers, one after the other."""
    total = parts[0].to(torch.complex128 if parts[0].is_complex() else torch.int64)
    for part in parts[1:]:
        part = part.to(total.dtype)
        if op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG:
            total = total + part
        elif op == dist.ReduceOp.PRODUCT:
            total = total * part
        elif op == dist.ReduceOp.MIN:
            total = torch.minimum(total, part)
        elif op == dist.ReduceOp.MAX:
            total = torch.maximum(total, part)
        elif op == dist.ReduceOp.BAND:
            total = total & part
        elif op == dist.ReduceOp.BOR:
            total = total | part
        else:
            total = total ^ part
    if op == dist.ReduceOp.AVG:
        total = (total if total.is_complex() else total.double()) / len(parts)
    return total.to(parts[0].dtype)


def reductions() -> Iterator[tuple[str, Any]]:
    """Every type with every op that it has."""
    for dtype in (*REAL, *COMPLEX):
        yield dtype, dist.ReduceOp.SUM
        yield dtype, dist.ReduceOp.PRODUCT
    for dtype in REAL:
        yield dtype, dist.ReduceOp.MIN
        yield dtype, dist.ReduceOp.MAX
    for dtype in ("float32", "float64", *COMPLEX):
        yield dtype, dist.ReduceOp.AVG
    for dtype in INTEGERS:
        yield dtype, dist.ReduceOp.BAND
        yield dtype, dist.ReduceOp.BOR
        yield dtype, dist.ReduceOp.BXOR


def numbers_for(op: Any, rank: int, n: int, dtype: str) -> Tensor:
    """A rank's numbers: so small in a product that it is exact in all types."""
    numbers = values(rank, n, dtype)
    if op == dist.ReduceOp.PRODUCT:
        return torch.where(numbers.abs() > 3, 2, 1).to(numbers.dtype) if rank < 5 else torch.ones_like(numbers)
    return numbers


# ---- all_reduce and its kin ----------------------------------------------------------------------------------------


def test_all_reduce_gives_the_reduction_of_all_ranks(world: Any, comm: MPI.Intracomm) -> None:
    for dtype, op in reductions():
        for n in (0, 3, 1000):
            mine = numbers_for(op, comm.rank, n, dtype)
            dist.all_reduce(mine, op=op) if not mine.is_complex() else world.allreduce([mine], op).wait()
            expected = folded(op, [numbers_for(op, rank, n, dtype) for rank in range(comm.size)])
            if op == dist.ReduceOp.AVG and mine.is_complex():
                assert torch.allclose(mine, expected), (dtype, op, n)  # complex division rounds twice
            else:
                assert same(mine, expected), (dtype, op, n)


def test_of_bool_the_sum_is_or_and_the_product_is_and(world: Any, comm: MPI.Intracomm) -> None:
    parts = torch.stack([values(rank, 40, "bool") for rank in range(comm.size)])
    expected = {
        dist.ReduceOp.SUM: parts.any(0),
        dist.ReduceOp.MAX: parts.any(0),
        dist.ReduceOp.BOR: parts.any(0),
        dist.ReduceOp.PRODUCT: parts.all(0),
        dist.ReduceOp.MIN: parts.all(0),
        dist.ReduceOp.BAND: parts.all(0),
        dist.ReduceOp.BXOR: parts.sum(0) % 2 == 1,
    }
    for op, result in expected.items():
        mine = values(comm.rank, 40, "bool")
        dist.all_reduce(mine, op=op)
        assert same(mine, result), op


def test_premul_sum_multiplies_by_each_ranks_factor_first(world: Any, comm: MPI.Intracomm) -> None:
    for factor in (0.5 * (comm.rank + 1), torch.tensor([0.5 * (comm.rank + 1)])):
        op = dist._make_nccl_premul_sum(factor)
        mine = torch.arange(10.0)
        dist.all_reduce(mine, op=op)
        assert same(mine, torch.arange(10.0) * sum(0.5 * (rank + 1) for rank in range(comm.size)))
        whole, part = torch.arange(4.0 * comm.size), torch.empty(4)
        dist.reduce_scatter_tensor(part, whole, op=op)
        expected = whole * sum(0.5 * (rank + 1) for rank in range(comm.size))
        assert same(part, expected[4 * comm.rank : 4 * comm.rank + 4])
        assert same(whole, torch.arange(4.0 * comm.size))


def test_every_layout_is_reduced_in_place(world: Any, comm: MPI.Intracomm) -> None:
    for layout in (
        lambda x: x.t(),
        lambda x: x[::2],
        lambda x: x[:, 1:3],
        lambda x: x[0, 0],
        lambda x: x.reshape(2, 2, 2, 3).contiguous(memory_format=torch.channels_last),
    ):
        mine = layout(values(comm.rank, 24).reshape(4, 6))
        expected = sum(layout(values(rank, 24).reshape(4, 6)) for rank in range(comm.size))
        dist.all_reduce(mine)
        assert same(mine, torch.as_tensor(expected))


def test_a_parameter_can_be_reduced_and_autograd_knows_that_it_has_changed(world: Any, comm: MPI.Intracomm) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    before = weight._version
    dist.all_reduce(weight)
    assert same(weight.detach(), torch.full((3,), float(comm.size))) and weight._version > before
    dist.broadcast(weight.data, 0)
    with torch.inference_mode():
        dist.all_reduce(torch.ones(3))


def test_a_tensors_memory_can_be_given_back_afterwards(world: Any, comm: MPI.Intracomm) -> None:
    """Sharded training resizes storages, which a tensor's numpy() would have them refuse."""
    for dtype in ("float32", "bfloat16", "int64"):
        mine = values(comm.rank, 6, dtype)
        parts = [torch.empty_like(mine) for _ in range(comm.size)]
        for _ in range(3):
            dist.all_reduce(mine)
            dist.all_gather(parts, mine)
            dist.broadcast(mine, 0)
            dist.all_to_all(parts, [mine.clone() for _ in range(comm.size)])
        for each in (mine, *parts):
            each.untyped_storage().resize_(0)


def test_several_tensors_are_reduced_together(world: Any, comm: MPI.Intracomm) -> None:
    def parts(rank: int) -> list[Tensor]:
        return [values(rank, 5), values(rank, 6, "int64").reshape(2, 3).t(), values(rank, 7), values(rank, 0)]

    mine = parts(comm.rank)
    with dist.distributed_c10d._coalescing_manager():
        for each in mine:
            dist.all_reduce(each)
    expected = [sum(each) for each in zip(*(parts(rank) for rank in range(comm.size)), strict=True)]
    assert all(same(one, torch.as_tensor(other)) for one, other in zip(mine, expected, strict=True))


def test_sparse_tensors_are_added_up(world: Any, comm: MPI.Intracomm) -> None:
    def part(rank: int) -> Tensor:
        places = torch.tensor([[0, rank % 4, rank % 4], [1, 2, 2]])[:, : rank + 1]  # one of them twice
        numbers = torch.arange(1.0, 4.0)[: rank + 1].unsqueeze(1).repeat(1, 2)
        return torch.sparse_coo_tensor(places, numbers, (4, 3, 2))

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        mine = part(comm.rank)
        dist.all_reduce(mine, op=op)
        expected = sum(part(rank).to_dense() for rank in range(comm.size))
        assert mine.is_sparse and same(mine.to_dense(), expected / (comm.size if op == dist.ReduceOp.AVG else 1))
    with pytest.raises(TypeError, match="max of a tensor of layout"):
        dist.all_reduce(part(comm.rank), op=dist.ReduceOp.MAX)


def test_reduce_changes_the_root_alone(world: Any, comm: MPI.Intracomm) -> None:
    for root in range(comm.size):
        for dtype in ("float32", "bfloat16", "int64"):
            mine = values(comm.rank, 17, dtype)
            dist.reduce(mine, root)
            at_root = folded(dist.ReduceOp.SUM, [values(rank, 17, dtype) for rank in range(comm.size)])
            assert same(mine, at_root if comm.rank == root else values(comm.rank, 17, dtype))


def test_reduce_scatter_gives_each_its_own_part(world: Any, comm: MPI.Intracomm) -> None:
    size, me = comm.size, comm.rank
    for dtype in ("float32", "bfloat16", "int32"):
        for n in LENGTHS:
            whole = folded(dist.ReduceOp.SUM, [values(rank, n * size, dtype) for rank in range(size)])
            expected = whole[me * n : (me + 1) * n]
            output, given = torch.empty(n, dtype=expected.dtype), values(me, n * size, dtype)
            dist.reduce_scatter_tensor(output, given)
            assert same(output, expected) and same(given, values(me, n * size, dtype))
            output = torch.empty(n, dtype=expected.dtype)
            dist.reduce_scatter(output, list(given.view(size, n).unbind()))
            assert same(output, expected)
            # Into the input itself, as sharded training does.
            output = given[me * n : (me + 1) * n]
            dist.reduce_scatter_tensor(output, given)
            assert same(output, expected)


def test_reduce_scatter_takes_parts_of_different_lengths(world: Any, comm: MPI.Intracomm) -> None:
    def parts(rank: int) -> list[Tensor]:
        return [values(rank, 2 * to) for to in range(comm.size)]

    output = torch.empty(2 * comm.rank)
    dist.reduce_scatter(output, parts(comm.rank))
    assert same(output, torch.as_tensor(sum(parts(rank)[comm.rank] for rank in range(comm.size))))


# ---- what is only moved --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*REAL[:1], *REAL[-2:], *OTHERS])
def test_tensors_of_all_types_are_moved(world: Any, comm: MPI.Intracomm, dtype: str) -> None:
    size, me = comm.size, comm.rank
    for n in (0, 1, 17):
        every = [values(rank, n, dtype) for rank in range(size)]
        mine = values(me, n, dtype)
        for root in {0, size - 1}:
            received = mine.clone()
            world.broadcast([received], root).wait()
            assert same(received, every[root])
            received = torch.zeros_like(mine)
            world.scatter([received], [every] if me == root else [], root).wait()
            assert same(received, every[me])
            gathered = [torch.zeros_like(mine) for _ in range(size)] if me == root else []
            world.gather([gathered], [mine], root).wait()
            assert me != root or all(same(*pair) for pair in zip(gathered, every, strict=True))
        gathered = [torch.zeros_like(mine) for _ in range(size)]
        world.allgather([gathered], [mine]).wait()
        assert all(same(*pair) for pair in zip(gathered, every, strict=True))
        whole = torch.zeros(size * n, dtype=mine.dtype)
        world._allgather_base(whole, mine).wait()
        assert same(whole, torch.cat([each.view(torch.uint8) if n else each for each in every]).view(mine.dtype))
        exchanged = [torch.zeros_like(mine) for _ in range(size)]
        world.alltoall(exchanged, [values(me + to, n, dtype) for to in range(size)]).wait()
        assert all(same(one, values(rank + me, n, dtype)) for rank, one in enumerate(exchanged))
        received = torch.zeros_like(mine)
        works = [world.send([mine], (me + 1) % size, 3), world.recv([received], (me - 1) % size, 3)]
        assert all(work.wait() for work in works) and same(received, every[me - 1])


def test_every_layout_is_moved(world: Any, comm: MPI.Intracomm) -> None:
    size, me = comm.size, comm.rank

    def shaped(rank: int) -> Tensor:
        return values(rank, 12).reshape(3, 4).t()

    def empty() -> Tensor:
        return torch.zeros(3, 8)[:, ::2].t()

    received = shaped(me)
    dist.broadcast(received, size - 1)
    assert same(received, shaped(size - 1))
    gathered = [empty() for _ in range(size)]
    dist.all_gather(gathered, shaped(me))
    assert all(same(one, shaped(rank)) for rank, one in enumerate(gathered))
    gathered = [empty() for _ in range(size)] if me == 0 else None
    dist.gather(shaped(me), gathered)
    assert all(same(one, shaped(rank)) for rank, one in enumerate(gathered or []))
    received = empty()
    dist.scatter(received, [shaped(rank) for rank in range(size)] if me == 0 else None)
    assert same(received, shaped(me))
    received = empty()
    works = [dist.isend(shaped(me), (me + 1) % size), dist.irecv(received, (me - 1) % size)]
    assert all(work.wait() for work in works) and same(received, shaped((me - 1) % size))
    rows, given = torch.zeros(2 * size, 8)[:, ::2], values(me, 8 * size).reshape(4, 2 * size).t()
    dist.all_to_all_single(rows, given)
    expected = [values(rank, 8 * size).reshape(4, 2 * size).t()[2 * me : 2 * me + 2] for rank in range(size)]
    assert same(rows, torch.cat(expected))


def test_all_gather_takes_tensors_of_different_lengths(world: Any, comm: MPI.Intracomm) -> None:
    gathered = [torch.empty(2 * rank) for rank in range(comm.size)]
    dist.all_gather(gathered, values(comm.rank, 2 * comm.rank))
    assert all(same(one, values(rank, 2 * rank)) for rank, one in enumerate(gathered))


def test_all_gather_into_a_tensor_that_the_input_is_a_part_of(world: Any, comm: MPI.Intracomm) -> None:
    whole = torch.zeros(comm.size, 3)
    whole[comm.rank] = values(comm.rank, 3)
    dist.all_gather_into_tensor(whole, whole[comm.rank])
    assert same(whole, torch.stack([values(rank, 3) for rank in range(comm.size)]))


def test_several_tensors_are_gathered_and_scattered_together(world: Any, comm: MPI.Intracomm) -> None:
    size, me = comm.size, comm.rank
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.distributed_c10d.all_gather_coalesced(lists, [values(me, 2), values(me, 3)])
    for rank, (one, other) in enumerate(lists):
        assert same(one, values(rank, 2)) and same(other, values(rank, 3))
    wholes = [torch.zeros(2 * size), torch.zeros(3 * size)]
    world.allgather_into_tensor_coalesced(wholes, [values(me, 2), values(me, 3)]).wait()
    assert same(wholes[1], torch.cat([values(rank, 3) for rank in range(size)]))
    parts = [torch.zeros(2), torch.zeros(3)]
    world.reduce_scatter_tensor_coalesced(parts, [values(me, 2 * size), values(me, 3 * size)]).wait()
    total = torch.as_tensor(sum(values(rank, 3 * size) for rank in range(size)))
    assert same(parts[1], total[3 * me : 3 * me + 3])


def test_all_to_all_takes_uneven_splits(world: Any, comm: MPI.Intracomm) -> None:
    size, me = comm.size, comm.rank
    # Rank r sends r + to rows to each, so 0 sends none to itself.
    given = torch.cat([torch.full((me + to, 2), 10.0 * me + to) for to in range(size)])
    output = torch.empty(sum(rank + me for rank in range(size)), 2)
    dist.all_to_all_single(output, given, [rank + me for rank in range(size)], [me + to for to in range(size)])
    assert same(output, torch.cat([torch.full((rank + me, 2), 10.0 * rank + me) for rank in range(size)]))
    outputs = [torch.empty(rank + 2 * me) for rank in range(size)]
    dist.all_to_all(outputs, [values(me, me + 2 * to) for to in range(size)])
    assert all(same(one, values(rank, rank + 2 * me)) for rank, one in enumerate(outputs))


def test_objects_travel(world: Any, comm: MPI.Intracomm) -> None:
    size, me = comm.size, comm.rank
    mine = {"rank": me, "numbers": list(range(100 * me))}
    every: list[Any] = [None] * size
    dist.all_gather_object(every, mine)
    assert [each["rank"] for each in every] == list(range(size)) and every[me] == mine
    objects = [mine]
    dist.broadcast_object_list(objects, src=size - 1)
    assert objects[0]["rank"] == size - 1
    gathered: list[Any] | None = [None] * size if me == 0 else None
    dist.gather_object(mine, gathered)
    assert me or gathered == every
    mine_of: list[Any] = [None]
    dist.scatter_object_list(mine_of, every if me == 0 else None)
    assert mine_of == [mine]


# ---- messages ------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 4)
def test_messages_are_told_apart_by_tag_and_keep_their_order(world: Any, comm: MPI.Intracomm) -> None:
    if comm.rank == 0:
        works = [dist.isend(torch.tensor([float(n)]), 1, tag=n % 2) for n in range(6)]
    elif comm.rank == 1:
        received = [torch.empty(1) for _ in range(6)]
        works = [dist.irecv(received[n], 0, tag=n % 2) for n in (1, 0, 3, 5, 2, 4)]
    else:
        return
    for work in works:
        work.wait()
    assert comm.rank == 0 or [one.item() for one in received] == [0, 1, 2, 3, 4, 5]


@pytest.mark.ranks(2, 3, 4)
def test_a_message_from_any_rank_says_from_which(world: Any, comm: MPI.Intracomm) -> None:
    if comm.rank:
        dist.send(torch.tensor([float(comm.rank)]), 0, tag=5)
        return
    sources = set()
    for _ in range(comm.size - 1):
        received = torch.empty(1)
        source = dist.recv(received, tag=5)
        assert received.item() == source
        sources.add(source)
    assert sources == set(range(1, comm.size))


def test_a_batch_of_messages_does_not_hang_whatever_its_order(world: Any, comm: MPI.Intracomm) -> None:
    n = 1 << 19  # more than MPI sends ahead of its receive
    sent, received = torch.full((n,), float(comm.rank)), torch.empty(n)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    ops = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, received, left)]
    for work in dist.batch_isend_irecv(ops if comm.rank % 2 else ops[::-1]):
        work.wait()
    assert bool((received == left).all())


@pytest.mark.ranks(2)
def test_a_message_of_another_length_is_an_error(world: Any, comm: MPI.Intracomm) -> None:
    if comm.rank == 0:
        dist.send(torch.ones(3), 1)
        return
    with pytest.raises(RuntimeError, match="rank 0 has sent 12 bytes, and the tensor here has 20"):
        dist.recv(torch.empty(5), 0)


def test_messages_and_collectives_are_coalesced(world: Any, comm: MPI.Intracomm) -> None:
    received = torch.empty(3)
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as together:
        dist.isend(values(comm.rank, 3), (comm.rank + 1) % comm.size)
        dist.irecv(received, (comm.rank - 1) % comm.size)
    together.wait()
    assert same(received, values((comm.rank - 1) % comm.size, 3))


# ---- asynchronous --------------------------------------------------------------------------------------------------


def test_works_in_flight_end_in_any_order_of_waiting(world: Any, comm: MPI.Intracomm) -> None:
    tensors = [values(comm.rank, n) for n in (1, 1000, 100_000, 10)]
    works = [dist.all_reduce(each, async_op=True) for each in tensors]
    for place in (2, 0, 3, 1) if comm.rank % 2 else (3, 2, 1, 0):
        assert works[place].wait()
        assert works[place].is_completed() and works[place].is_success() and works[place].exception() is None
    for each in tensors:
        assert same(each, torch.as_tensor(sum(values(rank, len(each)) for rank in range(comm.size))))
    assert works[0].result()[0] is tensors[0]


def test_a_work_ends_though_nobody_waits_for_it(world: Any, comm: MPI.Intracomm) -> None:
    mine = values(comm.rank, 1000)
    if comm.rank == comm.size - 1:
        time.sleep(0.1)  # longer than the caller drives it himself
    future = dist.all_reduce(mine, async_op=True).get_future()
    until = time.monotonic() + 20
    while not future.done() and time.monotonic() < until:
        time.sleep(0.001)
    assert future.done() and future.value()[0] is mine
    assert same(mine, torch.as_tensor(sum(values(rank, 1000) for rank in range(comm.size))))


def test_collectives_called_when_another_has_ended_come_right_behind_it(world: Any, comm: MPI.Intracomm) -> None:
    """As in torch's PowerSGD: what a callback calls, and blocks on, must not meet what was called since."""
    for turn in range(5):
        first, second, third = values(comm.rank, 4), values(comm.rank, 4), values(comm.rank, 9)
        if comm.rank == turn % comm.size:
            time.sleep(0.01)
        one = dist.all_reduce(first, async_op=True).get_future()

        def then(_: Any, second: Tensor = second) -> Tensor:
            result: Tensor = dist.all_reduce(second, async_op=True).get_future().wait()[0]
            dist.all_reduce(second)
            return result

        chained = one.then(then)
        other = dist.all_reduce(third, async_op=True)
        assert chained.wait() is second
        other.wait()
        assert same(second, comm.size * torch.as_tensor(sum(values(rank, 4) for rank in range(comm.size))))
        assert same(third, torch.as_tensor(sum(values(rank, 9) for rank in range(comm.size))))


def test_functional_collectives(world: Any, comm: MPI.Intracomm) -> None:
    size, me = comm.size, comm.rank
    mine = values(me, 4 * size)
    total = torch.as_tensor(sum(values(rank, 4 * size) for rank in range(size)))
    assert same(functional.wait_tensor(functional.all_reduce(mine, "sum", world)), total)
    gathered = functional.all_gather_tensor(mine, 0, world)
    assert same(functional.wait_tensor(gathered), torch.cat([values(rank, 4 * size) for rank in range(size)]))
    part = functional.reduce_scatter_tensor(mine, "sum", 0, world)
    assert same(functional.wait_tensor(part), total[4 * me : 4 * me + 4])
    exchanged = functional.all_to_all_single(mine, None, None, world)
    expected = [values(rank, 4 * size)[4 * me : 4 * me + 4] for rank in range(size)]
    assert same(functional.wait_tensor(exchanged), torch.cat(expected))
    assert same(functional.wait_tensor(functional.broadcast(mine, size - 1, world)), values(size - 1, 4 * size))
    several = functional.all_reduce_coalesced([mine, mine[:3]], "sum", world)
    assert same(functional.wait_tensor(several[1]), total[:3])


@pytest.mark.ranks(2, 3)
def test_what_a_functional_collective_gives_is_waited_for_ahead_of_a_message(world: Any, comm: MPI.Intracomm) -> None:
    x, received = torch.full((1000,), float(comm.rank)), torch.empty(1000)
    later = functional.all_reduce(x, "sum", dist.group.WORLD)
    assert hasattr(later, "trigger_wait")
    works = [dist.isend(later, (comm.rank + 1) % comm.size), dist.irecv(received, (comm.rank - 1) % comm.size)]
    for work in works:
        work.wait()
    assert (received == sum(range(comm.size))).all()
    again = functional.all_reduce(x, "sum", dist.group.WORLD)
    dist.broadcast(again, 0)
    dist.all_gather([torch.empty(1000) for _ in range(comm.size)], functional.all_reduce(x, "sum", dist.group.WORLD))


@pytest.mark.ranks(2, 3, 4)
def test_a_barrier_waits_for_the_last(world: Any, comm: MPI.Intracomm) -> None:
    if comm.rank == 0:
        time.sleep(0.3)
    began = time.monotonic()
    dist.barrier()
    assert comm.rank == 0 or time.monotonic() - began > 0.1


# ---- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 4, 5)
def test_groups_of_some_ranks(world: Any, comm: MPI.Intracomm) -> None:
    size, me = comm.size, comm.rank
    even, odd = dist.new_group(range(0, size, 2)), dist.new_group(range(1, size, 2), group_desc="odd")
    group, members = (odd, range(1, size, 2)) if me % 2 else (even, range(0, size, 2))
    mine = values(me, 10)
    dist.all_reduce(mine, group=group)
    assert same(mine, torch.as_tensor(sum(values(rank, 10) for rank in members)))
    mine = values(me, 10) if me < size - 1 else values(1, 10)
    assert dist.get_rank(group) == members.index(me) and dist.get_world_size(group) == len(members)
    assert dist.get_backend(group) == "hpcdl" and (me % 2 == 0 or group.group_desc == "odd")
    last = dist.new_group([size - 1, 0])
    if me in (0, size - 1):
        dist.broadcast(mine, size - 1, group=last)
        assert same(mine, values(1, 10))


def test_two_groups_in_flight_never_mix_nor_wait_for_each_other(world: Any, comm: MPI.Intracomm) -> None:
    other = dist.new_group(range(comm.size))
    for turn in range(3):
        one, two = values(comm.rank, 2000), values(comm.rank + 1, 2000)
        pairs = [(one, world), (two, other)]
        # Half of the ranks start them, and half of them wait for them, the other way round.
        works = {}
        for x, group in pairs[::-1] if comm.rank % 2 else pairs:
            works[id(x)] = dist.all_reduce(x, group=group, async_op=True)
        for x in (one, two) if (comm.rank + turn) // 2 % 2 else (two, one):
            works[id(x)].wait()
        assert same(one, torch.as_tensor(sum(values(rank, 2000) for rank in range(comm.size))))
        assert same(two, torch.as_tensor(sum(values(rank + 1, 2000) for rank in range(comm.size))))


@pytest.mark.ranks(2, 3)
def test_a_destroyed_group_frees_its_communicator(world: Any, comm: MPI.Intracomm) -> None:
    for _ in range(5):
        group = dist.new_group(range(comm.size))
        dist.all_reduce(torch.ones(1), group=group)
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        dist.destroy_process_group(group)
        assert work.is_completed() and group.comm == MPI.COMM_NULL and group.channel.wire == MPI.COMM_NULL
        with pytest.raises(RuntimeError, match="destroyed"):
            group.allreduce([torch.ones(1)])


def test_a_mesh_of_devices(world: Any, comm: MPI.Intracomm) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    shape = (2, comm.size // 2) if comm.size % 2 == 0 else (1, comm.size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
    mine = torch.ones(1)
    dist.all_reduce(mine, group=mesh.get_group("inner"))
    dist.all_reduce(mine, group=mesh.get_group("outer"))
    assert mine.item() == comm.size


@pytest.mark.parametrize("algorithm", ["ring", "folded", "doubling", "binary_blocks", "native", "shared", "auto"])
@pytest.mark.ranks(2, 3, 4)
def test_a_group_runs_by_its_own_algorithm(
    world: Any, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, algorithm: str
) -> None:
    from hpcdl import record, settings

    monkeypatch.setattr(settings, "ALGORITHM", algorithm)
    told = dist.new_group(pg_options=hpcdl.torch.backend.options(algorithm=algorithm))
    for group in (told, dist.new_group()):
        mine = values(comm.rank, 100)
        dist.all_reduce(mine, group=group)
        assert same(mine, torch.as_tensor(sum(values(rank, 100) for rank in range(comm.size))))
        last = record.snapshot()[-1][record.ABOUT]
        assert algorithm == "auto" or last.algorithm == algorithm
        whole, part = torch.zeros(2 * comm.size), torch.zeros(2)
        dist.all_gather_into_tensor(whole, values(comm.rank, 2), group=group)
        dist.reduce_scatter_tensor(part, whole, group=group)
        dist.broadcast(part, 0, group=group)
        dist.reduce(part, 0, group=group)


def test_the_short_forms_of_the_groups_own_methods(world: Any, comm: MPI.Intracomm) -> None:
    mine = values(comm.rank, 5)
    world.allreduce(mine).wait()
    world.allreduce([mine], dist.ReduceOp.MAX).wait()
    world.allreduce(mine, op=dist.ReduceOp.MIN, timeout=timedelta(seconds=20)).wait()
    assert same(mine, torch.as_tensor(sum(values(rank, 5) for rank in range(comm.size))))
    world.broadcast(mine, comm.size - 1).wait()
    world.broadcast(mine, root=0).wait()
    world.reduce(mine, 0, dist.ReduceOp.MAX).wait()
    world.barrier().wait()
    world.barrier(timeout=timedelta(seconds=20)).wait()
    assert world.rank() == comm.rank and world.size() == comm.size and world.name() == "hpcdl"


def test_operations_are_the_same_without_the_agreement_and_without_shared_memory(
    world: Any, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpcdl import settings

    for name in ("CHECK", "SHARED"):
        monkeypatch.setattr(settings, name, False)
        group = dist.new_group()
        for n in (1, 100, 100_000):
            mine = values(comm.rank, n)
            dist.all_reduce(mine, group=group)
            assert same(mine, torch.as_tensor(sum(values(rank, n) for rank in range(comm.size))))
        dist.barrier(group)
