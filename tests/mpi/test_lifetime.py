"""What is kept for a communicator goes with it; works, plans and the check in odd circumstances."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest
from mpi4py import MPI

import hpcdl


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1])


@pytest.mark.ranks(1, 2)
@pytest.mark.timeout(120)
def test_5000_communicators_leave_nothing_behind(comm: MPI.Intracomm) -> None:
    """MPICH has room for about 2,000 at once: were ours not freed with the user's, this would end early."""
    x = np.ones(10)

    def use_once() -> None:
        duplicate = comm.Dup()
        hpcdl.allreduce(x, duplicate, op="mean")
        with hpcdl.plan_allreduce(x, duplicate, op="mean") as plan:
            plan()
        hpcdl.plan_allreduce(x, duplicate)  # left open
        duplicate.Free()

    for _ in range(500):
        use_once()
    gc.collect()
    before, files = resident_kib(), len(os.listdir("/proc/self/fd"))
    for _ in range(4500):
        use_once()
    gc.collect()
    assert resident_kib() - before < 16 * 1024
    assert len(os.listdir("/proc/self/fd")) <= files
    assert (x == 1).all()


@pytest.mark.ranks(2)
def test_a_freed_communicator_closes_its_plans(comm: MPI.Intracomm) -> None:
    duplicate = comm.Dup()
    plan = hpcdl.plan_allreduce(np.ones(3), duplicate)
    duplicate.Free()
    with pytest.raises(RuntimeError, match="closed"):
        plan()


@pytest.mark.ranks(2, 3)
def test_a_duplicate_has_a_channel_of_its_own(comm: MPI.Intracomm) -> None:
    hpcdl.allreduce(np.ones(3), comm)
    duplicate = comm.Dup()
    assert hpcdl.allreduce(np.ones(3), duplicate)[0] == comm.size
    duplicate.Free()
    assert hpcdl.allreduce(np.ones(3), comm)[0] == comm.size


@pytest.mark.ranks(2, 3)
def test_a_dropped_work_still_ends(comm: MPI.Intracomm) -> None:
    """Nobody waits for it; its array must live for as long as MPI writes to it."""
    for _ in range(20):
        hpcdl.iallreduce(np.ones(10_000), comm, algorithm="ring")
        gc.collect()
    assert hpcdl.allreduce(np.ones(5), comm)[0] == comm.size
    hpcdl.barrier(comm)
    from hpcdl.execute import _in_flight

    for work in list(_in_flight):
        work.wait()
    assert not _in_flight


@pytest.mark.ranks(2, 3, 4)
def test_two_threads_on_communicators_of_their_own(comm: MPI.Intracomm) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI has no THREAD_MULTIPLE")
    comms = [comm.Dup(), comm.Dup()]
    sums: list[list[float]] = [[], []]

    def repeat(me: int) -> None:
        for step in range(30):
            x = np.full(1000 * (me + 1), step + me)
            sums[me].append(float(hpcdl.allreduce(x, comms[me])[-1]))

    threads = [threading.Thread(target=repeat, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for me in (0, 1):
        assert sums[me] == [(step + me) * comm.size for step in range(30)]
        comms[me].Free()


@pytest.mark.ranks(2, 3)
def test_many_works_in_flight_do_not_meet(comm: MPI.Intracomm) -> None:
    arrays = [np.full(50 + k, comm.rank + k) for k in range(60)]
    works = [hpcdl.iallreduce(x, comm, algorithm="ring") for x in arrays]
    while not all(work.is_completed() for work in works):
        pass
    for k, x in enumerate(arrays):
        assert (x == sum(rank + k for rank in range(comm.size))).all()


@pytest.mark.ranks(2)
def test_more_operations_than_there_are_tags(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpcdl.channel import TAGS, channel

    own = channel(comm)
    own._operations = TAGS - 3
    for _ in range(8):
        assert hpcdl.allreduce(np.ones(3), comm)[0] == 2


@pytest.mark.ranks(2)
def test_without_the_check_a_refusal_is_local(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcdl.settings.CHECK", False)
    assert hpcdl.allreduce(np.ones(3), comm)[0] == 2
    if comm.rank == 0:
        with pytest.raises(TypeError, match="a list"):
            hpcdl.allreduce([1], comm)
    # The operation counts on both ranks, or else their tags would differ from here on.
    else:
        with pytest.raises(TypeError, match="a str"):
            hpcdl.allreduce("x", comm)
    assert hpcdl.allreduce(np.ones(3), comm)[0] == 2


# ---- kept plans ----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_a_kept_plan_notices_that_its_array_has_changed(comm: MPI.Intracomm) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    x = np.ones(4)
    for _ in range(3):
        hpcdl.allreduce(x, comm)
    assert (x == comm.size**3).all()
    x.resize(6, refcheck=False)  # other memory
    x[...] = 2
    assert (hpcdl.allreduce(x, comm) == 2 * comm.size).all()
    x.shape = (2, 3)
    assert (hpcdl.allreduce(x, comm) == 2 * comm.size**2).all()
    x.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        hpcdl.allreduce(x, comm)
    t = torch.ones(3)
    hpcdl.allreduce(t, comm)
    t.data = torch.full((3,), 5.0)
    assert (hpcdl.allreduce(t, comm) == 5 * comm.size).all()


@pytest.mark.ranks(2, 3)
def test_ranks_need_not_keep_the_same_plans(comm: MPI.Intracomm) -> None:
    """One rank calls with the same array each time, another with a new one, a third with a view."""
    mine = np.ones(10)
    for step in range(50):
        if comm.rank == 1:
            mine = np.ones(10)
        elif comm.rank == 2:
            mine = np.ones(20)[::2]
        mine[...] = step
        assert (hpcdl.allreduce(mine, comm) == step * comm.size).all()
        assert hpcdl.allreduce(np.full(3 + step, 1), comm)[0] == comm.size


@pytest.mark.ranks(1, 2)
def test_kept_plans_keep_little_alive(comm: MPI.Intracomm) -> None:
    import weakref

    from hpcdl.call import KEPT_PLANS
    from hpcdl.channel import channel

    large = np.ones((1000, 1000))
    watch = weakref.ref(large)
    hpcdl.allreduce(large, comm)
    hpcdl.allreduce(large[0, :5], comm)
    del large
    gc.collect()
    assert watch() is None
    for _ in range(2 * KEPT_PLANS):
        hpcdl.allreduce(np.ones(3), comm)
    assert len(channel(comm).kept) == KEPT_PLANS
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weights = torch.ones(3, requires_grad=True)
    product = weights * 2
    watch = weakref.ref(product)
    hpcdl.allreduce(product, comm)
    del product
    gc.collect()
    assert watch() is None


@pytest.mark.ranks(2)
def test_a_communicator_interrupted_half_way_says_so(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    duplicate = comm.Dup()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hpcdl.execute.Plan.steps", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hpcdl.allreduce(np.ones(3), duplicate)
    with pytest.raises(hpcdl.HpcdlError, match="interrupted half-way"):
        hpcdl.allreduce(np.ones(3), duplicate)
    assert hpcdl.allreduce(np.ones(3), comm)[0] == 2
    duplicate.Free()
