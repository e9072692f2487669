"""The messages between a server and its workers, and how each side waits for them: asleep, and the server for nobody.

A letter is a few numbers and, if need be, a part of the parameters or of a gradient behind them, in one message.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum, IntFlag
from typing import NamedTuple, TypeVar

import torch
from mpi4py import MPI
from torch import Tensor

from hpcdl.errors import RankFailedError

Result = TypeVar("Result")

TAG = 0
SHORTEST_S, LONGEST_S = 5e-5, 1e-3
"""Of the sleeps between two looks at what has arrived: the longer nothing comes, the longer."""


class Kind(IntFlag):
    """What a letter is: a worker's can be several at once."""

    PUSH = 1  # a gradient is in it
    FETCH = 2  # the sender wants parameters
    BYE = 4  # nothing comes after it
    DROP = 8  # from the first server to the others: a worker is given up


class Say(IntFlag):
    """What a server answers."""

    GO = 1  # here are parameters
    STOP = 2  # it is enough
    DROPPED = 4  # you were given up
    FAREWELL = 8  # all is over


class Parting(IntEnum):
    """How the ranks part."""

    WELL = 0  # all are there
    LOST = 1  # all but those that MPI knows to be lost
    ABSENT = 2  # somebody does not answer


class End(NamedTuple):
    """What the first server tells all at the end."""

    status: int = 0
    parting: Parting = Parting.WELL


class Header(NamedTuple):
    """The numbers of a letter. Those of a worker are of the samples since its last gradient; times since it began."""

    kind: int
    version: int = 0  # of the parameters that a gradient was computed from, or that are here; at the end the Parting
    samples: int = 0
    loss: float = 0.0  # the sum over the samples
    seconds: float = 0.0
    waited_s: float = 0.0  # of these, for servers
    lr: float = 0.0  # of the server's next update
    number: int = 0  # of a worker to be dropped, or the status that all end with
    filled: int = 0  # is there anything behind the numbers?


HEADER_BYTES = 8 * len(Header._fields)


class Letter:
    """Room for one, which is sent from here or received here."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        whole = torch.zeros(HEADER_BYTES + length * dtype.itemsize, dtype=torch.uint8)
        self._numbers = whole[:HEADER_BYTES].view(torch.float64)
        self.body = whole[HEADER_BYTES:].view(dtype)
        self._bytes = whole.numpy()

    @property
    def header(self) -> Header:
        kind, version, samples, loss, seconds, waited_s, lr, number, filled = self._numbers.tolist()
        return Header(int(kind), int(version), int(samples), loss, seconds, waited_s, lr, int(number), int(filled))

    def send(self, comm: MPI.Comm, to: int, header: Header) -> MPI.Request:
        """Send the numbers, and the body if it is filled."""
        self._numbers.copy_(torch.tensor(header, dtype=torch.float64))
        return comm.Isend(self._bytes if header.filled else self._bytes[:HEADER_BYTES], to, TAG)

    def receive(self, comm: MPI.Comm, source: int) -> MPI.Prequest:
        """A receive to be started, again and again."""
        return comm.Recv_init(self._bytes, source, TAG)


class Box:
    """A server's letter box for one peer: a receive is posted, and the last answer may be on its way.

    Nothing here waits. A peer that MPI knows to be lost is `lost`, and nothing more comes from it.
    """

    def __init__(self, comm: MPI.Comm, peer: int, length: int, dtype: torch.dtype) -> None:
        self.comm, self.peer = comm, peer
        self.letter, self.reply = Letter(length, dtype), Letter(length, dtype)
        self.lost = False
        self._receive = self.letter.receive(comm, peer)
        self._sent = MPI.REQUEST_NULL
        self._receive.Start()

    def arrived(self) -> bool:
        """Has a letter come? It is to be read until `next` is called."""
        return not self.lost and self._test(self._receive)

    def next(self) -> None:
        """Be ready for another one."""
        if not self.lost:
            try:
                self._receive.Start()
            except MPI.Exception:
                self.lost = True

    def free(self) -> bool:
        """Is the last answer on its way, so that there is room for another one?"""
        return not self.lost and self._test(self._sent)

    def answer(self, header: Header) -> None:
        """Send what stands in the reply; it must be free."""
        try:
            self._sent = self.reply.send(self.comm, self.peer, header)
        except MPI.Exception:
            self.lost = True

    def settle(self) -> None:
        """Wait until the last answer is on its way: at the end, when nobody else has to be served."""
        sleep_until(lambda: self.free() or self.lost)

    def close(self) -> None:
        """Take the receive back. Behind an error a request is dropped and not freed: Open MPI's then aborts."""
        if not self.lost:
            try:
                self._receive.Cancel()
                self._receive.Wait()
                self._receive.Free()
            except MPI.Exception:
                self.lost = True

    def _test(self, request: MPI.Request) -> bool:
        try:
            return bool(request.Test())
        except MPI.Exception:
            self.lost = True
            return False


class Line:
    """A worker's line to one server. It waits for its answers, and sleeps meanwhile."""

    def __init__(self, comm: MPI.Comm, server: int, length: int, dtype: torch.dtype) -> None:
        self.comm, self.server = comm, server
        self.letter, self.reply = Letter(length, dtype), Letter(length, dtype)
        self._receive = self.reply.receive(comm, server)
        self._sent = MPI.REQUEST_NULL
        self._receive.Start()

    def room(self) -> Tensor:
        """Where the next letter's body goes, once the last one is on its way."""
        self._until(self._sent)
        return self.letter.body

    def send(self, header: Header) -> None:
        self._until(self._sent)
        self._sent = self._checked(lambda: self.letter.send(self.comm, self.server, header))

    def answer(self) -> Header:
        """Wait for the next letter of the server; its body is in `reply` until `next` is called."""
        self._until(self._receive)
        return self.reply.header

    def next(self) -> None:
        """Be ready for another one."""
        self._checked(self._receive.Start)

    def close(self) -> None:
        """Wait until all is sent, and free what MPI holds."""
        self._until(self._sent)
        self._receive.Cancel()
        self._receive.Wait()
        self._receive.Free()

    def _until(self, request: MPI.Request) -> None:
        sleep_until(lambda: self._checked(request.Test))

    def _checked(self, call: Callable[[], Result]) -> Result:
        """What the call gives, unless the server is lost."""
        try:
            return call()
        except MPI.Exception as error:
            raise RankFailedError(
                f"rank {self.server}, a server, is lost, and the training with it ({error}): start it again",
                [self.server],
            ) from error


def sleep_until(done: Callable[[], bool], longest_s: float = LONGEST_S) -> None:
    """Look again and again, with longer and longer sleeps."""
    pause_s = SHORTEST_S
    while not done():
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
