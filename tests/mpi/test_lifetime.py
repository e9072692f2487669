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
def test_3000_communicators_leave_nothing_behind(comm: MPI.Intracomm) -> None:
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
    for _ in range(2500):
        use_once()
    gc.collect()
    assert resident_kib() - before < 8 * 1024
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
def test_more_operations_than_there_are_tags(comm: MPI.Intracomm) -> None:
    from hpcdl.channel import TAGS

    plan = hpcdl.plan_allreduce(np.full(3, 0.5), comm, algorithm="ring")  # its tag comes round again
    for _ in range(TAGS - 20):
        hpcdl.barrier(comm)
    for step in range(10):
        works = [hpcdl.iallreduce(np.full(50 + k, comm.rank + k), comm, algorithm="ring") for k in range(4)]
        assert hpcdl.allreduce(np.full(3, step), comm, algorithm="doubling")[0] == 2 * step
        assert plan()[0] == 2**step
        for k, work in enumerate(works):
            assert (work.result() == 1 + 2 * k).all()


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
    x.__setstate__(np.full(6, 2.0).__reduce__()[2])  # other memory
    assert (hpcdl.allreduce(x, comm) == 2 * comm.size).all()
    assert x.size == 6
    x.shape = (2, 3)
    assert (hpcdl.allreduce(x, comm) == 2 * comm.size**2).all()
    x.dtype = np.int64
    x[...] = 3
    assert (hpcdl.allreduce(x, comm) == 3 * comm.size).all()
    x.flags.writeable = False
    with pytest.raises(TypeError, match="read-only"):
        hpcdl.allreduce(x, comm)
    t = torch.ones(3)
    hpcdl.allreduce(t, comm)
    for other in (torch.full((3,), 5.0), torch.full((6,), 5.0)[::2], torch.full((4,), 5, dtype=torch.int64)):
        t.data = other
        assert (hpcdl.allreduce(t, comm) == 5 * comm.size).all()
        assert (other == 5 * comm.size).all()


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

    from hpcdl.call import KEPT_BYTES, KEPT_PLANS
    from hpcdl.channel import channel

    kept = channel(comm).kept
    large, out = np.ones((1000, 1000)), np.empty((1000, 1000))
    watches = [weakref.ref(large), weakref.ref(out)]
    hpcdl.allreduce(large, comm)
    hpcdl.allreduce(large, comm, out=out)
    hpcdl.allreduce(large[0, :5], comm)  # the view dies at once
    assert len(kept) == 2
    del large
    assert not kept  # also that of the pair
    del out
    assert [watch() for watch in watches] == [None, None]

    living = [np.ones(3) for _ in range(2 * KEPT_PLANS)]
    for x in living:
        hpcdl.allreduce(x, comm)
    assert len(kept) == KEPT_PLANS
    living.clear()
    del x
    assert not kept

    long = np.ones(KEPT_BYTES // 8 + 1)
    hpcdl.allreduce(long, comm, algorithm="doubling")  # with scratch as long as the array
    assert len(kept) == (comm.size == 1)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    weights = torch.ones(3, requires_grad=True)
    product = weights * 2
    watch = weakref.ref(product)
    hpcdl.allreduce(product, comm)
    del product
    assert watch() is None


@pytest.mark.ranks(2, 3, 4)
def test_scratch_does_not_grow_with_the_array(comm: MPI.Intracomm) -> None:
    from hpcdl.execute import SEGMENT_BYTES, WINDOW

    for n in (1000, 3 << 20):
        x, y = np.empty(n, np.float32), hpcdl.empty(n, "float32", comm)
        for name in ("ring", "halving", "folded", "binary_blocks", "tree", "direct", "shared", "by_node"):
            if name != "halving" or comm.size in (2, 4):
                with hpcdl.plan_allreduce(x, comm, algorithm=name) as plan:
                    senders = {"shared": 0, "by_node": 0, "direct": comm.size - 1}.get(name, 1)
                    assert plan.scratch_bytes <= senders * WINDOW * SEGMENT_BYTES, name
        with hpcdl.plan_allreduce(y, comm, algorithm="shared") as plan:
            assert plan.scratch_bytes == 0


@pytest.mark.ranks(2)
def test_a_communicator_interrupted_half_way_says_so(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    duplicate = comm.Dup()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hpcdl.execute.Plan.run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hpcdl.allreduce(np.ones(3), duplicate)
    with pytest.raises(hpcdl.HpcdlError, match="interrupted half-way"):
        hpcdl.allreduce(np.ones(3), duplicate)
    assert hpcdl.allreduce(np.ones(3), comm)[0] == 2
    duplicate.Free()
