"""hpcdl explain: which algorithm `auto` takes, and why."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

import hpcdl
from hpcdl import tuning
from hpcdl.buffers import TYPES
from hpcdl.choice import KINDS, Explanation, Shape, explained
from hpcdl.cli.agreed import Refused, agree, complain
from hpcdl.cli.arguments import count
from hpcdl.cli.sizes import UNITS, parse_bytes
from hpcdl.collectives import COLLECTIVES

if TYPE_CHECKING:
    from mpi4py import MPI


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What hpcdl explain can be told."""
    parser.description = (
        "Say which algorithm algorithm='auto' takes, and why, with each candidate's predicted and measured time. "
        "The ranks are those it is run on, unless --nodes or --ranks says otherwise."
    )
    option = parser.add_argument
    option("--bytes", type=parse_bytes, required=True, metavar="SIZE", help=f"how long the array is: {UNITS}")
    option("--collective", choices=COLLECTIVES, default="allreduce", help="(%(default)s)")
    option("--dtype", choices=TYPES, default="float32", help="(%(default)s)")
    option("--kind", choices=KINDS, default="private", help="private arrays, of hpcdl.empty, on GPUs (%(default)s)")
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("--nodes", type=sizes_of_nodes, metavar="N+N", help="the ranks of each node, such as 8+8 or 3+1")
    ranks.add_argument("--ranks", type=count, metavar="N", help="the ranks, all on one node")


def sizes_of_nodes(text: str) -> tuple[int, ...]:
    """Numbers of ranks with + between them."""
    if not re.fullmatch(r"[1-9]\d*(\+[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text} are no numbers of ranks such as 8+8 or 3+1")
    return tuple(map(int, text.split("+")))


def run(arguments: argparse.Namespace) -> int:
    """Print it, once for all ranks."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    try:
        agree(comm, None)  # a rank that was given a wrong argument has come to it from hpcdl.cli.main.refuse
    except Refused as refusal:
        complain(comm, str(refusal))
        return 2
    explanation = explain(arguments, comm)
    if comm.rank == 0:
        print(explanation, flush=True)
    return 0


def explain(arguments: argparse.Namespace, comm: MPI.Intracomm) -> Explanation:
    """For the ranks named, else for those of the communicator."""
    nbytes, collective, dtype, kind = arguments.bytes, arguments.collective, arguments.dtype, arguments.kind
    sizes = arguments.nodes or (arguments.ranks and (arguments.ranks,))
    if not sizes:
        return hpcdl.explain(nbytes, comm, collective=collective, dtype=dtype, kind=kind)
    shape = Shape(sizes, memory=True)
    return explained(collective, nbytes, shape, dtype, kind, tuning.load(comm, shape.size))
