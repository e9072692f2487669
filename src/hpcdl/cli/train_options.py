"""What hpcdl train can be told, and what is chosen where nothing is said."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NamedTuple

from hpcdl.cli import mode_options
from hpcdl.cli.arguments import count, epochs, factor, momentum, number, number_from_0, rate, seed, share
from hpcdl.survive.faults import Fault


class Kind(NamedTuple):
    """What a network is for and how it is trained if nothing else is said."""

    of: str
    lrs: dict[str, float]
    """By optimiser; the first is the usual one."""
    epochs: int

    @property
    def optimizer(self) -> str:
        return next(iter(self.lrs))


# Steady from 1 to 8 ranks of 32 samples; with 0.05 the cnn loses 4 points on one rank.
MODELS = {
    "mlp": Kind("images", {"sgd": 0.05, "adam": 0.001, "rmsprop": 0.001, "adagrad": 0.01, "lars": 4.0}, 20),
    "cnn": Kind("images", {"sgd": 0.02, "adam": 0.001, "rmsprop": 0.001, "adagrad": 0.01, "lars": 4.0}, 20),
    "transformer": Kind("text", {"adam": 0.003, "sgd": 0.3, "rmsprop": 0.003, "adagrad": 0.03, "lars": 8.0}, 1),
}
MOMENTA = {"sgd": 0.9, "adam": 0.9, "rmsprop": 0.0, "adagrad": 0.0, "lars": 0.9}
ALGORITHM, BLOCK_SIZE = "binary_blocks", 64
BUCKET_CAP_MB = 25.0
LOG_STEPS = 20
"""How many steps come between two lines of the log: each is an all-reduce of six numbers."""

SCHEDULES = ("constant", "step", "cosine", "polynomial", "cyclic", "onecycle")
CYCLES = ("cyclic", "onecycle")
"""The rate goes up and down, and the momentum the other way."""
GAMMA, CYCLE_EPOCHS, LOWEST, LOW_MOMENTUM = 0.1, 4.0, 0.1, 0.85

WIRE = {"fp32": None, "bf16": "bfloat16", "fp16": "float16"}
"""What gradients travel as between nodes, by what is computed in."""

SPARSE = {"density": "density"}
COMPRESSION: dict[str, dict[str, str]] = {
    "dgc": SPARSE | {"compress_warmup": "warmup_epochs", "momentum": "momentum", "clip_norm": "clip_norm"},
    "topk": SPARSE,
    "randomk": SPARSE | {"seed": "seed"},
    "onebit": {},
    "qsgd": {"seed": "seed"},
    "terngrad": {"seed": "seed"},
    "signsgd": {},
    "powersgd": {"compress_rank": "rank", "seed": "seed"},
    "fp16": {},
    "bf16": {},
}
"""By method: which of our arguments it takes, and what it calls them. hpcdl.compress, which has the methods, is about
torch, and there may be none."""
OF_SOME = ("density", "compress_rank", "compress_warmup")
EXCHANGES = ("flat", "by_node")
DENSITIES, SPARSITY_WARMUP = {"dgc": 0.001, "topk": 0.01, "randomk": 0.01}, 4
"""Of dgc: Lin et al. 2017, arXiv 1712.01887."""
SIGN_RATE = 0.001
"""Of the usual rate, as the gradient is 1 or -1 everywhere. In 5 epochs of MNIST-5k it came to 88 %, 0.006 to 75 %."""
RANK = 4
"""Vogels et al. 2019, arXiv 1905.13727, have 1 to 4."""

EPILOG = """\
Exit status: 0 if all is well; 1 if the training failed: it diverged, missed --target-accuracy, a checkpoint could not
be written, or the ranks' parameters differ, or with --survive too few are left; 2 if it could not begin: a wrong
argument, no data, no torch; with --checkpoint, and without --survive, also 75: it was asked to stop by SIGTERM or
SIGUSR1, has written a checkpoint and can go on with --resume.
"""
SURVIVE = (
    "Needs Open MPI 5, started as mpiexec --with-ft ulfm. Each rank keeps its --batch-size: where ranks are lost the "
    "global batch becomes smaller, and the rate with it, in proportion (Goyal et al. 2017), counted from the ranks of "
    "the beginning. An epoch stays an epoch: what a lost rank had not brought in the others take over, and a schedule "
    "counts samples. Where fewer than a quorum are left it ends with status 1. A signal ends the rank that it reaches"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What hpcdl train can be told."""
    parser.description = (
        "Train a network by synchronous data-parallel SGD: all ranks start from the same parameters, each "
        "works on its share of every global batch, and the gradient is averaged over the ranks by an "
        "all-reduce; or in another --mode. Run it as: mpiexec -n 4 hpcdl train"
    )
    parser.epilog = EPILOG
    _add_task(parser.add_argument_group("what is learnt"))
    _add_batch(parser.add_argument_group("the batch"))
    _add_optimizer(parser.add_argument_group("the optimiser"))
    _add_schedule(parser.add_argument_group("the learning rate over time; epochs may be parts, such as 2.5"))
    _add_wire(parser.add_argument_group("numbers and messages"))
    _add_compression(parser.add_argument_group("compressed gradients"))
    _add_survival(parser.add_argument_group("lost ranks", SURVIVE))
    mode_options.add_arguments(parser)
    _add_output(parser.add_argument_group("what is written"))


def _add_task(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option(
        "--data",
        metavar="DATA",
        help="images: mnist5k, fashion (the first that is installed), or a folder of IDX files; text: bible, or a file "
        "of UTF-8 text",
    )
    option("--model", choices=tuple(MODELS), help="the network (mlp for images, transformer for text)")
    option("--epochs", type=count, metavar="N", help="how often each sample is seen (images 20, text 1)")
    option("--block-size", type=count, metavar="N", help=f"characters of a sample of text ({BLOCK_SIZE})")
    option("--seed", type=seed, default=0, metavar="N", help="of parameters and shuffles (%(default)s)")


def _add_batch(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option(
        "--batch-size",
        type=count,
        default=32,
        metavar="N",
        help="samples of each rank in one backward pass (%(default)s): the global batch grows with the ranks",
    )
    option(
        "--accumulate",
        type=count,
        default=1,
        metavar="N",
        help="backward passes before one reduction and step (%(default)s): the global batch grows with them",
    )
    option(
        "--grow-batch",
        type=count,
        metavar="LIMIT",
        help="with --schedule step: where the rate would be multiplied by --gamma, divide the global batch by it, as "
        "long as it stays within LIMIT samples; only then let the rate fall",
    )
    option(
        "--max-batch-size",
        type=count,
        metavar="N",
        help="with --grow-batch: give a backward pass of a rank no more samples than this, and make more passes",
    )


def _add_optimizer(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--optimizer", choices=tuple(MOMENTA), help="what steps are taken (images sgd, text adam)")
    option(
        "--lr",
        type=rate,
        metavar="RATE",
        help=f"learning rate ({', '.join(f'{name} {kind.lrs[kind.optimizer]:g}' for name, kind in MODELS.items())}), "
        "taken as it is for any number of ranks, unless --base-batch is given",
    )
    option(
        "--base-batch",
        type=count,
        metavar="N",
        help="the rate is for a global batch of N: scale it in proportion to that which is used (Goyal et al.: 256)",
    )
    momenta = ", ".join(f"{name} {value:g}" for name, value in MOMENTA.items())
    option("--momentum", type=momentum, metavar="M", help=f"Adam's is its first beta ({momenta})")
    option(
        "--weight-decay",
        type=number_from_0,
        default=0.0,
        metavar="W",
        help="of all parameters but biases and batch norms (%(default)g); Adam's is AdamW's",
    )
    option("--exclude-lr", type=rate, metavar="RATE", help="LARS: the rate of biases and batch norms (RATE/100)")
    option("--clip-norm", type=rate, metavar="NORM", help="shorten the averaged gradient to at most this length")


def _add_schedule(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option(
        "--schedule",
        choices=SCHEDULES,
        default="constant",
        help="constant; step: times --gamma at --milestones; cosine or polynomial (power 2): down to 0 at the end; "
        "cyclic: up and down between --min-lr and --lr; onecycle: once so, and at last far below (%(default)s)",
    )
    option(
        "--warmup-epochs",
        type=number_from_0,
        default=0.0,
        metavar="E",
        help="raise the rate in a straight line before, with --base-batch from the unscaled rate",
    )
    option("--milestones", type=epochs, metavar="E,E,...", help="of step (a third, two thirds and 8/9 of the epochs)")
    option("--gamma", type=factor, metavar="G", help=f"of step ({GAMMA:g})")
    option("--min-lr", type=rate, metavar="RATE", help=f"of cyclic and onecycle ({LOWEST:g} of --lr)")
    option("--cycle-epochs", type=rate, metavar="E", help=f"of cyclic: up and down again ({CYCLE_EPOCHS:g})")
    option(
        "--low-momentum",
        type=momentum,
        metavar="M",
        help=f"of cyclic and onecycle: the momentum where the rate is highest ({LOW_MOMENTUM:g})",
    )


def _add_wire(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option(
        "--precision",
        choices=tuple(WIRE),
        default="fp32",
        help="what forward and backward compute in; parameters and their changes stay in float32. fp16 scales the loss "
        "and takes 40 times as long as fp32 on a CPU (%(default)s)",
    )
    option("--algorithm", metavar="NAME", help=f"the all-reduce ({ALGORITHM})")
    option(
        "--wire-dtype",
        choices=("bfloat16", "float16"),
        help="what gradients travel as between nodes, to be added in float32, by an all-reduce of its own instead of "
        "--algorithm (with --precision bf16 or fp16 that type)",
    )
    option(
        "--bucket-cap-mb",
        type=rate,
        metavar="MIB",
        help=f"gradients are reduced in buckets of up to so many MiB ({BUCKET_CAP_MB:g})",
    )
    option(
        "--overlap",
        choices=("auto", "on", "off"),
        default="auto",
        help="reduce beside backward, on a thread (auto: where a rank has a core to spare)",
    )
    option(
        "--threads",
        type=count,
        metavar="N",
        help="torch's threads in each rank (OMP_NUM_THREADS if set, else its share of the node's cores)",
    )


def _add_compression(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    densities = ", ".join(f"{name} {value:g}" for name, value in DENSITIES.items())
    option(
        "--compress",
        choices=tuple(COMPRESSION),
        help="send less than the gradient: its largest numbers (dgc, which keeps the momentum too and steps by plain "
        "SGD, topk), some (randomk), few bits of each (onebit, qsgd, terngrad, signsgd, fp16, bf16), or products of "
        "thin matrices (powersgd)",
    )
    option(
        "--density",
        type=share,
        metavar="SHARE",
        help=f"how many of the numbers are sent ({densities})",
    )
    option(
        "--compress-warmup",
        type=_whole,
        metavar="N",
        help=f"of dgc: lower the density over N epochs ({SPARSITY_WARMUP}, or a fifth of the epochs if that is less)",
    )
    option(
        "--compress-rank",
        type=count,
        metavar="R",
        help=f"of powersgd: how many columns the thin matrices have ({RANK})",
    )
    option(
        "--exchange",
        choices=EXCHANGES,
        help="flat: among all ranks; by_node: add up densely inside each node, and compress between nodes (flat)",
    )


def _add_survival(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option(
        "--survive",
        choices=("exact", "survivors"),
        help="go on when ranks are lost. exact: others hold a copy of what each puts into a step, which is finished as "
        "if all were there; survivors: it is finished without the lost, whose samples are dealt again",
    )
    option(
        "--replace",
        action="store_true",
        help="start as many new ranks as were lost, by this command line; they get all they need from the others. "
        "mpiexec needs --prtemca state_base_recoverable 1 for it, else it ends all of them with the first that is lost",
    )
    option(
        "--fault",
        type=fault,
        action="append",
        metavar="RANK:MESSAGE[:WHEN[:KIND[:SECONDS]]]",
        help="to try it: at that message, counted from 0 over all steps, before or after it is posted or at its "
        "completion, have the rank killed (kill), frozen (stop) or delayed (delay); again for more",
    )
    option(
        "--status",
        metavar="FILE",
        help="write the exit status into FILE at the very end: mpiexec gives 0 also where all ranks were killed",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--checkpoint", metavar="DIR", help="write a checkpoint into DIR at the end of every epoch")
    option("--checkpoint-every", type=count, metavar="STEPS", help="and behind every so many steps")
    option("--resume", action="store_true", help="go on from the newest whole checkpoint in DIR, if there is one")
    option(
        "--log-dir",
        metavar="DIR",
        help=f"append to DIR/log.jsonl, every {LOG_STEPS} steps and every epoch, and write TensorBoard's scalars there",
    )
    option(
        "--target-accuracy",
        type=share,
        metavar="SHARE",
        help="fail unless the last epoch's accuracy on what was held out is at least this, such as 0.93",
    )


def choose(arguments: argparse.Namespace) -> str | None:
    """Fill in what was left open; what contradicts itself, in one line."""
    return (
        mode_options.choose(arguments)
        or _choose_survival(arguments)
        or _choose_task(arguments)
        or _choose_compression(arguments)
        or _choose_wire(arguments)
        or _choose_schedule(arguments)
    )


def fault(text: str) -> Fault:
    """A failure on purpose."""
    words = text.split(":")
    if not 2 <= len(words) <= 5:
        raise argparse.ArgumentTypeError(f"{text} is not RANK:MESSAGE[:WHEN[:KIND[:SECONDS]]], as is 3:120:before:kill")
    rank, message, *rest = words
    if not (rank.isdecimal() and message.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text}: {rank} and {message} are no whole numbers from 0 upwards")
    seconds = [number(each) for each in rest[2:]]
    if any(map(math.isnan, seconds)):
        raise argparse.ArgumentTypeError(f"{text}: {rest[2]} is no number of seconds")
    try:
        return Fault(int(rank), int(message), *rest[:2], *seconds)  # type: ignore[arg-type]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def _choose_survival(arguments: argparse.Namespace) -> str | None:
    if not arguments.survive:
        for name in ("replace", "fault", "status"):
            if getattr(arguments, name):
                return f"{_option(name)} is for --survive POLICY"
        return None
    for name in ("compress", "wire_dtype", "bucket_cap_mb"):
        if value := getattr(arguments, name):
            return f"--survive adds up whole gradients in float32, in one go: leave out {_option(name)} {value}"
    if arguments.grow_batch:
        return f"--survive has batches that follow the ranks: leave out --grow-batch {arguments.grow_batch}"
    if arguments.overlap == "on":
        return "--survive adds up gradients behind backward: leave out --overlap on"
    if arguments.precision == "fp16":
        return "--survive has no loss scaling, which fp16 needs: take --precision bf16 or fp32"
    arguments.algorithm = arguments.algorithm or ALGORITHM
    return None


def _choose_task(arguments: argparse.Namespace) -> str | None:
    source = arguments.data
    is_text = source is not None and (source == "bible" or source.endswith(".txt") or Path(source).is_file())
    if arguments.model is None:
        arguments.model = "transformer" if is_text else "mlp"
    model, kind = arguments.model, MODELS[arguments.model]
    if source is not None and is_text != (kind.of == "text"):
        others = " or ".join(name for name, other in MODELS.items() if other.of != kind.of)
        what = "a text" if is_text else "of images"
        return f"--model {model} is for {kind.of}, --data {source} is {what}: take --model {others}, or other data"
    if arguments.block_size and kind.of != "text":
        return f"--block-size is for text, --model {model} is for images"
    for name in ("checkpoint_every", "resume"):
        if getattr(arguments, name) and not arguments.checkpoint:
            return f"{_option(name)} needs --checkpoint DIR"
    arguments.block_size = arguments.block_size or BLOCK_SIZE
    usual = "sgd" if arguments.compress == "dgc" else kind.optimizer
    optimizer = arguments.optimizer = arguments.optimizer or usual
    usual_lr = kind.lrs[optimizer] * (SIGN_RATE if arguments.compress == "signsgd" and optimizer == "sgd" else 1)
    # Asynchrony acts like momentum: on MNIST-5k 3 workers came to 67 to 80 % in 10 epochs with 0.9, to 94.6 % in 8 so.
    asynchronous = arguments.mode == "parameter-server" and optimizer == "sgd" and arguments.momentum is None
    usual_lr *= 2 if asynchronous else 1
    arguments.lr, arguments.epochs = arguments.lr or usual_lr, arguments.epochs or kind.epochs
    if arguments.momentum and optimizer == "adagrad":
        return f"--momentum {arguments.momentum:g} is for other optimisers: adagrad has none"
    if arguments.momentum is None:
        arguments.momentum = 0.0 if asynchronous else MOMENTA[optimizer]
    if arguments.exclude_lr and optimizer != "lars":
        return f"--exclude-lr is for --optimizer lars, this one is {optimizer}"
    return None


def _choose_compression(arguments: argparse.Namespace) -> str | None:
    method = arguments.compress
    for name in OF_SOME:
        if getattr(arguments, name) is not None and name not in COMPRESSION.get(method, {}):
            takers = " or ".join(_takers(name))
            return f"{_option(name)} is for --compress {takers}{f', this one is {method}' if method else ''}"
    if not method:
        return "--exchange is for --compress METHOD" if arguments.exchange else None
    for name, value in (("wire_dtype", arguments.wire_dtype), ("algorithm", arguments.algorithm)):
        if value:
            return f"--compress {method} brings an exchange of its own: leave out {_option(name)} {value}"
    if arguments.overlap == "on":
        return f"--compress {method} reduces gradients behind backward: leave out --overlap on"
    arguments.overlap, arguments.exchange = "off", arguments.exchange or "flat"
    if method == "powersgd" and arguments.exchange == "by_node":
        return "--compress powersgd needs whole matrices, --exchange by_node leaves each rank a share: take flat"
    if method == "signsgd" and arguments.clip_norm:
        return "--compress signsgd gives gradients of one length: leave out --clip-norm"
    if arguments.density is None:
        arguments.density = DENSITIES.get(method)
    if "compress_rank" in COMPRESSION[method]:
        arguments.compress_rank = arguments.compress_rank or RANK
    return _choose_dgc(arguments) if method == "dgc" else None


def _choose_dgc(arguments: argparse.Namespace) -> str | None:
    """It has the momentum in itself, ahead of the exchange."""
    if arguments.optimizer != "sgd":
        return f"--compress dgc steps by SGD and keeps its momentum itself: leave out --optimizer {arguments.optimizer}"
    if arguments.low_momentum is not None:
        return "--compress dgc has one momentum all the time: leave out --low-momentum"
    last = arguments.epochs
    if arguments.compress_warmup is None:
        arguments.compress_warmup = min(SPARSITY_WARMUP, last // 5)
    if arguments.compress_warmup >= last:
        return f"--compress-warmup {arguments.compress_warmup} leaves none of {last} epochs at --density"
    return None


def _whole(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 0 upwards")
    return int(text)


def _takers(name: str) -> list[str]:
    return [method for method, taken in COMPRESSION.items() if name in taken]


def _choose_wire(arguments: argparse.Namespace) -> str | None:
    if arguments.wire_dtype and arguments.algorithm:
        return f"--wire-dtype brings an all-reduce of its own: leave out --algorithm {arguments.algorithm}"
    if not arguments.algorithm and not arguments.compress:
        arguments.wire_dtype = arguments.wire_dtype or WIRE[arguments.precision]
    arguments.algorithm = arguments.algorithm or ALGORITHM
    arguments.bucket_cap_mb = arguments.bucket_cap_mb or BUCKET_CAP_MB
    return None


def _choose_schedule(arguments: argparse.Namespace) -> str | None:
    schedule, last = arguments.schedule, arguments.epochs
    needed = {
        "milestones": ("step",),
        "gamma": ("step",),
        "grow_batch": ("step",),
        "cycle_epochs": ("cyclic",),
        "min_lr": CYCLES,
        "low_momentum": CYCLES,
    }
    for name, those in needed.items():
        if getattr(arguments, name) is not None and schedule not in those:
            return f"{_option(name)} is for --schedule {' or '.join(those)}, this one is {schedule}"
    if arguments.max_batch_size and not arguments.grow_batch:
        return "--max-batch-size is for --grow-batch LIMIT"
    if arguments.warmup_epochs and schedule in CYCLES:
        return f"--schedule {schedule} begins with its lowest rate: leave out --warmup-epochs"
    if arguments.warmup_epochs > last:
        return f"--warmup-epochs {arguments.warmup_epochs:g} are more than all --epochs, {last}"
    arguments.gamma = arguments.gamma or GAMMA
    arguments.cycle_epochs = arguments.cycle_epochs or CYCLE_EPOCHS
    arguments.min_lr = arguments.min_lr or LOWEST * arguments.lr
    if arguments.min_lr > arguments.lr:
        return f"--min-lr {arguments.min_lr:g} lies above --lr {arguments.lr:g}"
    if arguments.low_momentum is None:
        arguments.low_momentum = min(LOW_MOMENTUM, arguments.momentum)
    if arguments.low_momentum > arguments.momentum:
        return f"--low-momentum {arguments.low_momentum:g} lies above --momentum {arguments.momentum:g}"
    if schedule == "step":
        if arguments.milestones is None:
            # As Goyal et al. have it: 30, 60 and 80 of 90.
            arguments.milestones = tuple(sorted({last // 3, 2 * last // 3, 8 * last // 9} - {0}))
        if not arguments.milestones or arguments.milestones[-1] >= last:
            return f"--milestones lie between the first and the last of {last} epochs: give some, or more --epochs"
    arguments.milestones = arguments.milestones or ()
    return None


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
