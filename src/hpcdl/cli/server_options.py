"""What hpcdl train can be told of parameter servers and backup workers."""

from __future__ import annotations

import argparse

from hpcdl.cli.arguments import count, number_from_0, rate

SERVED = ("parameter-server", "backup-workers")
"""The modes in which rank 0 is a server."""
WORKER_TIMEOUT_S, BACKUPS = 60.0, 1
STRENGTHS = {"constant": 0.04, "adaptive": 2.0}
"""Of Zheng et al. 2016, arXiv 1609.08326, section 6."""
DECAY = 0.95
OF_MODES = {
    "servers": ("parameter-server",),
    "fetch_every": ("parameter-server",),
    "push_every": ("parameter-server",),
    "staleness_bound": ("parameter-server",),
    "softsync": ("parameter-server",),
    "warm_start": ("parameter-server",),
    "stale_rate": ("parameter-server",),
    "compensate": ("parameter-server",),
    "compensation": ("parameter-server",),
    "backups": ("backup-workers",),
    "worker_timeout": SERVED,
}
"""By option: the modes that take it."""
ABOUT = (
    "The first ranks are servers, which keep the parameters; the others compute gradients. A worker that is silent is "
    "left out; one that is lost is where Open MPI was started as mpiexec --with-ft ulfm, and elsewhere it ends the job"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of --mode parameter-server and --mode backup-workers."""
    option = parser.add_argument_group("parameter servers and backup workers", ABOUT).add_argument
    option("--servers", type=count, metavar="S", help="the first S ranks keep a part of the parameters each (1)")
    option("--fetch-every", type=count, metavar="N", help="a worker fetches parameters every N steps (1)")
    option("--push-every", type=count, metavar="N", help="and pushes the sum of its gradients every N steps (1)")
    option(
        "--staleness-bound",
        type=whole,
        metavar="S",
        help="who is more than S fetches ahead of the slowest waits (nobody waits)",
    )
    option(
        "--softsync",
        type=count,
        metavar="N",
        help="an update takes the mean of floor(workers / N) gradients (N = workers: each gradient is an update)",
    )
    option("--warm-start", type=whole, metavar="N", help="the first N gradients are those of one worker (0)")
    option("--stale-rate", action="store_true", help="divide the rate by the staleness of the gradient")
    option(
        "--compensate",
        choices=tuple(STRENGTHS),
        help="add to a stale gradient what the change of the parameters makes of it, to first order (DC-ASGD)",
    )
    option(
        "--compensation",
        type=rate,
        metavar="L",
        help=f"its strength ({', '.join(f'{name} {value:g}' for name, value in STRENGTHS.items())})",
    )
    option(
        "--backups",
        type=whole,
        metavar="B",
        help=f"a step does not wait for the last B workers, whose gradients are dropped ({BACKUPS})",
    )
    option(
        "--worker-timeout",
        type=number_from_0,
        metavar="SECONDS",
        help=f"go on without a worker of whom nothing was heard for so long, 0: never ({WORKER_TIMEOUT_S:g})",
    )


def choose(arguments: argparse.Namespace) -> str | None:
    """Fill in what was left open; what contradicts itself, in one line."""
    mode = arguments.mode
    for name, modes in OF_MODES.items():
        if getattr(arguments, name) not in (None, False) and mode not in modes:
            return f"{_option(name)} is for --mode {' or '.join(modes)}, this one is {mode}"
    if mode not in SERVED:
        return None
    if arguments.accumulate > 1:
        instead = "--push-every N" if mode == "parameter-server" else "a larger --batch-size"
        return f"--mode {mode} has one backward pass in a step: take {instead} for --accumulate {arguments.accumulate}"
    if arguments.optimizer == "lars":
        return f"--mode {mode}: a server has parts of the layers, and LARS needs whole ones: take another --optimizer"
    if arguments.compensation and not arguments.compensate:
        return f"--compensation is for --compensate {' or '.join(STRENGTHS)}"
    if arguments.compensate:
        arguments.compensation = arguments.compensation or STRENGTHS[arguments.compensate]
    for name in ("servers", "fetch_every", "push_every"):
        setattr(arguments, name, getattr(arguments, name) or 1)
    arguments.warm_start = arguments.warm_start or 0
    if arguments.backups is None:
        arguments.backups = BACKUPS
    if arguments.worker_timeout is None:
        arguments.worker_timeout = WORKER_TIMEOUT_S
    return None


def whole(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 0 upwards")
    return int(text)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
