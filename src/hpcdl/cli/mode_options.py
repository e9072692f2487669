"""What hpcdl train can be told of its modes: what the ranks do together, and who of them is slow."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from hpcdl.cli import server_options
from hpcdl.cli.agreed import Refused
from hpcdl.cli.arguments import count, number_from_0, rate, share
from hpcdl.sgd.clients import parse_skew
from hpcdl.sgd.pace import Pace
from hpcdl.units import show_seconds

if TYPE_CHECKING:
    from mpi4py import MPI

SERVED = ("parameter-server", "backup-workers")
AVERAGED = ("elastic", "gossip", "local")
MODES = ("sync", *SERVED, *AVERAGED, "federated", "pipeline")

EVERY = {"elastic": 10, "gossip": 1, "local": 8}
MOVING_RATE = 0.9
CLIENTS, FRACTION, LOCAL_EPOCHS = 20, 0.5, 1
STAGES, PIPELINE_SCHEDULES = 2, ("1f1b", "gpipe")
SLOW_FACTOR = 5.0

OF_MODES: dict[str, tuple[str, ...]] = {
    "every": AVERAGED,
    "moving_rate": ("elastic",),
    "clients": ("federated",),
    "fraction": ("federated",),
    "local_epochs": ("federated",),
    "skew": ("federated",),
    "drop_out": ("federated",),
    "stages": ("pipeline",),
    "micro_batches": ("pipeline",),
    "pipeline_schedule": ("pipeline",),
    "split": ("pipeline",),
}

USUAL = {"accumulate": 1, "schedule": "constant", "warmup_epochs": 0.0, "precision": "fp32", "overlap": "auto"}
"""What options are where nothing is said, unless None or False."""
OF_SYNC = ("survive", "compress", "wire_dtype", "bucket_cap_mb", "overlap", "grow_batch", "checkpoint")
NOT_TAKEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(SERVED, (*OF_SYNC, "algorithm")),
    "elastic": OF_SYNC,
    "gossip": (*OF_SYNC, "algorithm"),
    "local": OF_SYNC,
    "federated": (*OF_SYNC, "accumulate", "schedule", "warmup_epochs", "base_batch"),
    "pipeline": (*OF_SYNC, "accumulate", "clip_norm", "precision"),
}
WHY = {
    "survive": "only synchronous SGD goes on without lost ranks so",
    "compress": "it sends no gradients to be compressed",
    "checkpoint": "a checkpoint holds what all ranks have alike, and these have parameters of their own",
    "algorithm": "it has no all-reduce",
    "overlap": "nothing is reduced beside backward",
    "accumulate": "its batches are cut otherwise",
    "clip_norm": "no rank has the whole gradient",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The modes and what belongs to each."""
    group = parser.add_argument_group("what the ranks do together")
    group.add_argument(
        "--mode",
        choices=MODES,
        default="sync",
        help="sync: all sum up every gradient; parameter-server: some keep the parameters, the others fetch them and "
        "push gradients; backup-workers: a step is made of the first gradients; elastic, gossip, local: each trains on "
        "its own, and parameters are averaged, with a common centre, in pairs by chance, or all at once; federated: "
        "some clients train on data of their own, and their parameters are averaged; pipeline: each has some of the "
        "layers (%(default)s)",
    )
    _add_pace(parser.add_argument_group("slow ranks, on purpose: they sleep, and take nobody's core"))
    server_options.add_arguments(parser)
    _add_averaging(parser.add_argument_group("modes elastic, gossip and local"))
    _add_federated(parser.add_argument_group("mode federated: an epoch is over when as many samples were seen"))
    _add_pipeline(parser.add_argument_group("mode pipeline: ranks are replicas x stages x parts of a layer"))


def _add_pace(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--step-time", type=duration, metavar="TIME", help="each rank's steps last at least so long, such as 20ms")
    option("--slow-rank", type=_rank, metavar="RANK", help="steps of this rank last longer")
    option("--slow-factor", type=rate, metavar="F", help=f"and so many times as long ({SLOW_FACTOR:g})")
    option("--jitter", type=share, metavar="SHARE", help="each step lasts longer or less long by up to this share")


def _add_averaging(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    usual = ", ".join(f"{name} {value}" for name, value in EVERY.items())
    option("--every", type=count, metavar="STEPS", help=f"average every so many steps ({usual})")
    option(
        "--moving-rate",
        type=number_from_0,
        metavar="RATE",
        help="of elastic: how far the centre moves towards the mean; over the number of ranks, how far a rank moves "
        f"towards the centre ({MOVING_RATE:g})",
    )


def _add_federated(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--clients", type=count, metavar="K", help=f"clients in all; a rank plays several ({CLIENTS})")
    option("--fraction", type=share, metavar="C", help=f"the share of them that is asked in a round ({FRACTION:g})")
    option("--local-epochs", type=count, metavar="E", help=f"a client's passes over its samples ({LOCAL_EPOCHS})")
    option(
        "--skew",
        type=_skew,
        metavar="SKEW",
        help="who has what. none: even shares of a shuffle; sizes[:A]: uneven ones; labels[:A]: shares of each label "
        "by chance, the more uneven the smaller A; sorted[:N]: N pieces of what is sorted by label (none)",
    )
    option("--drop-out", type=share, metavar="P", help="with this probability a client that was asked does not report")


def _add_pipeline(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--stages", type=count, metavar="S", help=f"in which the layers lie on S ranks ({STAGES})")
    option("--split", type=count, metavar="T", help="split linear layers among T ranks each (1)")
    option("--micro-batches", type=count, metavar="M", help="that a replica's batch is cut into (2 a stage)")
    option("--pipeline-schedule", choices=PIPELINE_SCHEDULES, help=f"({PIPELINE_SCHEDULES[0]})")


def choose(arguments: argparse.Namespace) -> str | None:
    """Fill in what was left open; what contradicts itself, in one line. Called before the other options are filled."""
    mode = arguments.mode
    for name, modes in OF_MODES.items():
        if getattr(arguments, name) is not None and mode not in modes:
            return f"{_option(name)} is for --mode {' or '.join(modes)}, this one is {mode}"
    for name in NOT_TAKEN.get(mode, ()):
        value = getattr(arguments, name)
        if value not in (USUAL.get(name), None, False):
            why = f": {WHY[name]}" if name in WHY else ""
            return f"--mode {mode} takes no {_option(name)} {value}{why}"
    if mode != "sync" and arguments.precision == "fp16":
        return f"--mode {mode} has no loss scaling, which fp16 needs: take --precision bf16 or fp32"
    if problem := server_options.choose(arguments):
        return problem
    _fill(arguments)
    if mode == "federated" and not arguments.fraction:
        return "--fraction 0 asks no client: take a share above 0"
    if mode == "federated" and arguments.drop_out == 1:
        return "--drop-out 1 leaves no client that reports back: take a probability below 1"
    return _choose_pace(arguments)


def _fill(arguments: argparse.Namespace) -> None:
    stages = arguments.stages or STAGES
    usual: dict[str, dict[str, Any]] = {
        **{mode: {"every": every} for mode, every in EVERY.items()},
        "federated": {
            "clients": CLIENTS,
            "fraction": FRACTION,
            "local_epochs": LOCAL_EPOCHS,
            "skew": "none",
            "drop_out": 0.0,
        },
        "pipeline": {
            "stages": stages,
            "split": 1,
            "micro_batches": 2 * stages,
            "pipeline_schedule": PIPELINE_SCHEDULES[0],
        },
    }
    usual["elastic"]["moving_rate"] = MOVING_RATE
    for name, value in usual.get(arguments.mode, {}).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def _choose_pace(arguments: argparse.Namespace) -> str | None:
    for name in ("slow_rank", "jitter"):
        if getattr(arguments, name) is not None and not arguments.step_time:
            return f"{_option(name)} is in proportion to the time of a step: give --step-time, such as 20ms"
    if arguments.slow_factor is not None and arguments.slow_rank is None:
        return f"--slow-factor {arguments.slow_factor:g} is for a rank: say which by --slow-rank"
    if arguments.survive and arguments.step_time:
        return "--survive knows no slow ranks: leave out --step-time"
    if arguments.slow_factor is not None and arguments.slow_factor < 1:
        return f"--slow-factor {arguments.slow_factor:g} would make the slow rank fast: take 1 or more"
    arguments.step_time, arguments.jitter = arguments.step_time or 0.0, arguments.jitter or 0.0
    if arguments.slow_factor is None:
        arguments.slow_factor = 1.0 if arguments.slow_rank is None else SLOW_FACTOR
    return None


def paced(comm: MPI.Comm, arguments: argparse.Namespace) -> Pace:
    """How long the ranks' steps last; refused where the slow rank is none."""
    slow = arguments.slow_rank
    if slow is not None and slow >= comm.size:
        raise Refused(f"--slow-rank {slow} is none of {comm.size} ranks, which count from 0")
    return Pace(arguments.step_time, slow, arguments.slow_factor, arguments.jitter, arguments.seed)


def pacing(arguments: argparse.Namespace) -> str:
    """The same in words, empty if nobody is held up."""
    if not arguments.step_time:
        return ""
    varying = f" +- {arguments.jitter:.0%}" if arguments.jitter else ""
    slow = f", of rank {arguments.slow_rank} {arguments.slow_factor:g} x" if arguments.slow_rank is not None else ""
    return f", steps of {show_seconds(arguments.step_time)}{varying} or more{slow}"


def duration(text: str) -> float:
    """A time with its unit, in seconds."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(us|ms|s)", text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text} is no time with a unit, such as 20ms, 1.5s or 500us")
    return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]]


def _rank(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no rank: they count from 0")
    return int(text)


def _skew(text: str) -> str:
    try:
        parse_skew(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
