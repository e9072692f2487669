"""A signal to any rank stops all ranks at the same step, and nothing of it is left behind."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcdl
from hpcdl.errors import MismatchError
from hpcdl.logs import host
from hpcdl.preemption import Preemption, preemption

pytestmark = pytest.mark.ranks(1, 2, 3, 5)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Each test leaves the signals as it found them."""
    before = [signal.getsignal(each) for each in SIGNALS], caught()
    yield
    assert ([signal.getsignal(each) for each in SIGNALS], caught()) == before


def caught() -> list[str]:
    """The signals that this process catches, also by handlers of which Python does not know: MPICH has one."""
    status = Path("/proc/self/status")
    return [line for line in status.read_text().splitlines() if "SigCgt" in line] if status.exists() else []


def ask(number: int = signal.SIGUSR1) -> None:
    os.kill(os.getpid(), number)


def steps(comm: MPI.Intracomm, stop: Preemption, most: int, at_step: Callable[[int], object]) -> int:
    """How many steps were made, each with a collective of the user's."""
    for step in range(most):
        at_step(step)
        assert comm.allreduce(step) == step * comm.size
        assert hpcdl.allreduce(np.full(5, float(step)), comm)[0] == step * comm.size
        if stop():
            return step + 1
    return most


def test_without_a_signal_nobody_stops(comm: MPI.Intracomm) -> None:
    with preemption(comm) as stop:
        assert steps(comm, stop, 5, lambda step: None) == 5
        assert stop.reason is None
    assert stop.reason is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_any_one_rank_stops_all_at_the_same_step(comm: MPI.Intracomm, number: signal.Signals) -> None:
    for rank in range(comm.size):
        with preemption(comm) as stop:
            made = steps(comm, stop, 50, lambda step, rank=rank: step == 3 and comm.rank == rank and ask(number))  # type: ignore[misc]
            assert made == 5  # what is known at one call is answered at the next
            assert stop() and stop()  # and remains so
        assert comm.allgather(stop.reason) == [f"{number.name} at rank {rank} ({host()})"] * comm.size


def test_signals_to_several_ranks_at_several_steps_are_one_stop(comm: MPI.Intracomm) -> None:
    with preemption(comm) as stop:
        made = steps(
            comm, stop, 50, lambda step: step == comm.size - comm.rank and ask(signal.SIGTERM) is None and ask()
        )
        ask(signal.SIGTERM)  # somebody insists, while the ranks stop
    assert comm.allgather(made) == [3] * comm.size
    assert comm.allgather(stop.reason) == [f"SIGTERM at rank {comm.size - 1} ({host()})"] * comm.size


def test_at_once_the_lowest_rank_is_named(comm: MPI.Intracomm) -> None:
    with preemption(comm) as stop:
        steps(comm, stop, 50, lambda step: step == 2 and comm.rank >= comm.size // 2 and ask())
    assert comm.allgather(stop.reason) == [f"SIGUSR1 at rank {comm.size // 2} ({host()})"] * comm.size


def test_rank_0_alone_logs_the_reason_once(comm: MPI.Intracomm, caplog: pytest.LogCaptureFixture) -> None:
    with preemption(comm) as stop:
        while not stop():
            if comm.rank == comm.size - 1:
                ask()
    said = [record.getMessage() for record in caplog.records if record.name == "hpcdl"]
    assert said == ([f"the ranks were asked to stop: {stop.reason}"] if comm.rank == 0 else [])


def test_who_has_fewer_batches_waits_at_the_end_of_the_block(comm: MPI.Intracomm) -> None:
    with preemption(comm) as stop:
        for _ in range(3 + 4 * comm.rank):
            assert not stop()
    assert stop.reason is None
    comm.Barrier()


def test_a_signal_to_who_waits_there_stops_the_others(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    take = Preemption._take

    def ask_at_the_end(stop: Preemption) -> bool:
        if comm.rank == 0 and not asked:
            asked.append(True)
            ask()
        return take(stop)

    with preemption(comm) as stop:
        made = 0
        if comm.rank == 0:
            monkeypatch.setattr(Preemption, "_take", ask_at_the_end)
        else:
            while not stop():
                made += 1
                assert made < 1000
    assert comm.allgather(stop.reason) == [f"SIGUSR1 at rank 0 ({host()})"] * comm.size
    assert len(set(comm.allgather(made)[1:])) <= 1


def test_a_signal_behind_the_last_call_is_known_behind_the_block(comm: MPI.Intracomm) -> None:
    with preemption(comm) as stop:
        assert steps(comm, stop, 3, lambda step: None) == 3
        if comm.rank == comm.size - 1:
            ask()
    assert comm.allgather(stop.reason) == [f"SIGUSR1 at rank {comm.size - 1} ({host()})"] * comm.size


def test_a_signal_that_comes_too_late_means_what_it_meant_before(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Preemption._begin

    def ask_behind_it(stop: Preemption, *, inside: bool) -> None:
        begin(stop, inside=inside)
        if not inside and not rounds:
            ask(signal.SIGUSR2)
        rounds.append(inside)

    rounds, came = list[bool](), list[int]()
    before = signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    try:
        with preemption(comm, signals=[signal.SIGUSR2]) as stop:
            monkeypatch.setattr(Preemption, "_begin", ask_behind_it)
        assert rounds == [False] and stop.reason is None
        assert came == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_in_the_block_an_earlier_handler_is_not_called(comm: MPI.Intracomm) -> None:
    came = list[int]()
    before = signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    try:
        with preemption(comm, signals=[signal.SIGUSR2]) as stop:
            ask(signal.SIGUSR2)
            assert steps(comm, stop, 50, lambda step: None) == 2
        assert came == []
        ask(signal.SIGUSR2)
        assert came == [signal.SIGUSR2]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_other_signals_are_left_alone(comm: MPI.Intracomm) -> None:
    with preemption(comm, signals=[signal.SIGUSR2]) as stop:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(KeyboardInterrupt):
            ask(signal.SIGINT)
        assert steps(comm, stop, 50, lambda step: step == 7 and ask(signal.SIGUSR2)) == 9
    assert stop.reason == f"SIGUSR2 at rank 0 ({host()})"


def test_blocks_may_follow_and_hold_each_other(comm: MPI.Intracomm) -> None:
    with preemption(comm) as outer:
        with preemption(comm) as inner:
            assert steps(comm, inner, 50, lambda step: step == 0 and ask()) == 2
        assert steps(comm, outer, 3, lambda step: None) == 3
    assert inner.reason and not outer.reason
    with outer:  # and be entered again
        assert steps(comm, outer, 50, lambda step: step == 0 and ask()) == 2
        with pytest.raises(RuntimeError, match="make another"), outer:
            pass
    with outer:
        assert outer.reason is None
        assert steps(comm, outer, 3, lambda step: None) == 3


def test_on_half_of_the_ranks_and_beside_works_in_flight(comm: MPI.Intracomm) -> None:
    half = comm.Split(comm.rank % 2)
    with preemption(half) as stop:
        works = [hpcdl.iallreduce(np.ones(1000), comm) for _ in range(3)]
        asks = comm.rank % 2 == 1
        assert steps(half, stop, 6, lambda step: asks and step == 1 and ask()) == (3 if asks else 6)
        assert all((work.result() == comm.size).all() for work in works)
    half.Free()


class Planted(Exception):
    pass


def test_an_error_leaves_at_once_and_puts_the_signals_back(comm: MPI.Intracomm) -> None:
    def raise_at_2(step: int) -> None:
        if step == 2:
            raise Planted

    for _ in range(2):
        with pytest.raises(Planted), preemption(comm) as stop:
            steps(comm, stop, 3, raise_at_2)
    with preemption(comm) as stop:
        assert steps(comm, stop, 50, lambda step: step == 0 and ask()) == 2


@pytest.mark.parametrize(
    ("signals", "words"),
    [
        ([signal.SIGKILL], "SIGKILL cannot be caught"),
        ([signal.SIGUSR1, signal.SIGINT], "SIGINT is Ctrl-C"),
        ([1000], "1000 is not a valid Signals"),
        (signal.SIGUSR1, r"signals is a sequence such as \(signal.SIGTERM"),
    ],
)
def test_what_cannot_be_caught_is_refused_by_all(comm: MPI.Intracomm, signals: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        preemption(comm, signals=signals).__enter__()
    last = comm.rank == comm.size - 1
    with pytest.raises((ValueError, TypeError), match=words):
        preemption(comm, signals=signals if last else [signal.SIGUSR1]).__enter__()


def test_off_the_main_thread_all_ranks_are_refused(comm: MPI.Intracomm) -> None:
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        pytest.skip("only one thread may call MPI")
    said: list[str] = []

    def enter() -> None:
        with pytest.raises(ValueError, match=r"hpcdl\.preemption is for the main thread") as raised:
            preemption(comm).__enter__()
        said.append(str(raised.value))

    if comm.rank == comm.size - 1:
        thread = threading.Thread(target=enter, name="another")
        thread.start()
        thread.join()
    else:
        enter()
    assert "not for another" in said[0]
    assert comm.size < 3 or len(set(comm.allgather(said[0])[:-1])) == 1


@pytest.mark.ranks(2, 3)
def test_ranks_that_do_something_else_are_told(comm: MPI.Intracomm) -> None:
    own = comm.Dup()
    with pytest.raises(MismatchError, match=r"rank 0: barrier\n.*preemption"):
        hpcdl.barrier(own) if comm.rank == 0 else preemption(own).__enter__()
    own.Free()


def test_it_is_asked_in_its_block_only(comm: MPI.Intracomm) -> None:
    stop = preemption(comm)
    with pytest.raises(RuntimeError, match="inside the block only"):
        stop()
    with stop:
        pass
    with pytest.raises(RuntimeError, match="inside the block only"):
        stop()


def test_what_is_no_communicator_is_refused() -> None:
    with pytest.raises(TypeError, match="comm is an mpi4py intracommunicator"):
        preemption(5).__enter__()  # type: ignore[arg-type]


def test_its_communicator_and_its_plan_go_with_the_block(comm: MPI.Intracomm) -> None:
    for at in (0, 100):  # stopped, and by itself
        with preemption(comm) as stop:
            wire, plan = stop._wire, stop._plan
            assert plan is not None
            steps(comm, stop, 3, lambda step, at=at: step == at and ask())  # type: ignore[misc]
        assert bool(stop.reason) == (at == 0)
        assert wire == MPI.COMM_NULL
        assert plan.state == "closed"
