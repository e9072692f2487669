"""hpcdl train in other modes than synchronous SGD: averaging, federated averaging, pipelines."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from hpcdl.cli.agreed import Refused
from hpcdl.cli.mode_options import paced
from hpcdl.cli.train import learnt, open_log, plan, stepper, train, try_algorithm
from hpcdl.cli.train_log import Log

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch import nn

    from hpcdl.sgd.averaging import Averaging
    from hpcdl.sgd.training import Training
    from hpcdl.torch.tasks import Numbers, Task

LABELS_AT_ONCE = 1000


def run(comm: MPI.Intracomm, arguments: argparse.Namespace) -> int:
    """Train in the mode that was asked for; the exit status, the same on all ranks."""
    status = train(comm, arguments, prepare=prepare)
    if arguments.mode == "pipeline":
        import torch.distributed as dist

        if dist.is_initialized():  # also where the training was refused behind that
            dist.destroy_process_group()
    return status


def prepare(comm: MPI.Intracomm, arguments: argparse.Namespace) -> tuple[Training, Log | None, str]:
    """The training, rank 0's log, and in words what the ranks do together; what is wrong is refused by all alike."""
    try_algorithm(comm, arguments.algorithm)
    task, model = learnt(comm, arguments)
    makers: dict[str, Callable[..., tuple[Training, str]]] = {"federated": federated, "pipeline": pipelined}
    training, how = makers.get(arguments.mode, averaged)(comm, arguments, task, model)
    return training, open_log(comm, arguments, 0), how


def averaged(comm: MPI.Intracomm, arguments: argparse.Namespace, task: Task, model: nn.Module) -> tuple[Training, str]:
    """Ranks that train each on its own, and average."""
    from hpcdl.sgd import ElasticAveraging, Gossip, LocalSGD
    from hpcdl.sgd.training import Averaged
    from hpcdl.torch.recipe import scheduler

    mode, every, algorithm = arguments.mode, arguments.every, arguments.algorithm
    averaging: Averaging
    try:
        if mode == "elastic":
            rate = arguments.moving_rate
            averaging = ElasticAveraging(model, comm, every=every, moving_rate=rate, algorithm=algorithm)
            how = f"a centre, moving rate {rate:g} (alpha {averaging.alpha:.4g}) every {every} steps by {algorithm}"
        elif mode == "gossip":
            averaging = Gossip(model, comm, every=every, seed=arguments.seed)
            how = f"the mean of pairs every {'step' if every == 1 else f'{every} steps'}"
        else:
            averaging = LocalSGD(model, comm, every=every, algorithm=algorithm)
            how = f"the mean of all every {'step' if every == 1 else f'{every} steps'} by {algorithm}"
    except ValueError as error:
        raise Refused(f"--mode {mode}: {error}") from error
    lr, schedule, _ = plan(arguments, arguments.batch_size * arguments.accumulate * comm.size)
    optimizer = stepper(arguments, lr)(model)
    if mode == "elastic" and arguments.optimizer == "sgd" and arguments.momentum:
        for group in optimizer.param_groups:
            group["nesterov"] = True  # which makes it EAMSGD
        how += ", Nesterov momentum"
    training = Averaged(
        task,
        model,
        optimizer,
        averaging,
        comm,
        batch_size=arguments.batch_size,
        accumulate=arguments.accumulate,
        seed=arguments.seed,
        precision=arguments.precision,
        clip_norm=arguments.clip_norm,
        pace=paced(comm, arguments),
    )
    training.scheduler = scheduler(
        schedule, optimizer, epochs=arguments.epochs, updates=training.updates, growth=training.growth
    )
    return training, how


def federated(comm: MPI.Intracomm, arguments: argparse.Namespace, task: Task, model: nn.Module) -> tuple[Training, str]:
    """Clients with data of their own."""
    from hpcdl.sgd import deal
    from hpcdl.sgd.training import Federated

    skew = arguments.skew
    if task.labels > 1 and skew.startswith(("labels", "sorted")):
        raise Refused(f"--skew {skew} deals samples out by their label, and a text has one at every place: take sizes")
    try:
        clients = deal(labels_of(task), arguments.clients, skew=skew, seed=arguments.seed)
    except ValueError as error:
        raise Refused(f"--clients {arguments.clients}: {error}") from error
    training = Federated(
        task,
        model,
        stepper(arguments, arguments.lr),
        comm,
        clients=clients,
        batch_size=arguments.batch_size,
        precision=arguments.precision,
        fraction=arguments.fraction,
        local_epochs=arguments.local_epochs,
        drop_out=arguments.drop_out,
        seed=arguments.seed,
        clip_norm=arguments.clip_norm,
        pace=paced(comm, arguments),
        algorithm=arguments.algorithm,
    )
    sizes = sorted(map(len, clients))
    passes = f"{arguments.local_epochs} local epoch{'s' if arguments.local_epochs > 1 else ''}"
    dropping = f", {arguments.drop_out:.0%} drop out" if arguments.drop_out else ""
    how = (
        f"{len(clients)} clients of {sizes[0]} to {sizes[-1]} samples (skew {skew}), {arguments.fraction:.0%} of them "
        f"a round, {passes}{dropping}"
    )
    return training, how


def labels_of(task: Task) -> Numbers:
    """Each sample's label; zeros where samples have several."""
    count = task.train_count
    if task.labels > 1:
        return np.zeros(count, np.int64)
    starts = range(0, count, LABELS_AT_ONCE)
    numbers = (np.arange(start, min(count, start + LABELS_AT_ONCE)) for start in starts)
    return np.concatenate([task.train(some)[1].numpy() for some in numbers])


def pipelined(comm: MPI.Intracomm, arguments: argparse.Namespace, task: Task, model: nn.Module) -> tuple[Training, str]:
    """Stages on several ranks."""
    import torch.distributed as dist

    import hpcdl.torch
    from hpcdl.run import master
    from hpcdl.sgd import mesh_of
    from hpcdl.sgd.pipelined import Pipelined
    from hpcdl.torch.recipe import scheduler

    address, port = master(comm)
    dist.init_process_group(
        "hpcdl",
        init_method=f"tcp://{address}:{port}",
        rank=comm.rank,
        world_size=comm.size,
        pg_options=hpcdl.torch.backend.options(algorithm=arguments.algorithm),
    )
    pace = paced(comm, arguments)
    lr, schedule, _ = plan(arguments, arguments.batch_size * comm.size)
    try:
        mesh = mesh_of(arguments.stages, arguments.split)
        training = Pipelined(
            task,
            model,
            stepper(arguments, lr),
            comm,
            mesh=mesh,
            batch_size=arguments.batch_size,
            micro_batches=arguments.micro_batches,
            schedule=arguments.pipeline_schedule,
            seed=arguments.seed,
            pace=pace,
        )
    except ValueError as error:
        raise Refused(f"--mode pipeline: {error}") from error
    training.scheduler = scheduler(
        schedule, training.optimizer, epochs=arguments.epochs, updates=training.updates, growth=training.growth
    )
    replicas, stages, parts = mesh.shape
    divided = f" x {parts} parts of layers" if parts > 1 else ""
    how = (
        f"{replicas} replica{'s' if replicas > 1 else ''} x {stages} stages{divided}, {arguments.pipeline_schedule} "
        f"with {arguments.micro_batches} micro-batches, {arguments.algorithm}"
    )
    return training, how
