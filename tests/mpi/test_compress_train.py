"""Training with compressed gradients: what is told of it, and that a checkpoint loses none of what was not sent."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcdl
from hpcdl import settings
from hpcdl.cli.agreed import Refused
from hpcdl.cli.train import compress, compressor
from hpcdl.cli.train_options import COMPRESSION, EXCHANGES
from hpcdl.data import ImageSet, Part

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.compress import Compression, Method, hook, make  # noqa: E402
from hpcdl.compress.catalogue import METHODS  # noqa: E402
from hpcdl.torch import CheckpointError  # noqa: E402
from hpcdl.torch.recipe import light  # noqa: E402
from hpcdl.torch.tasks import Task, build, image_task  # noqa: E402
from hpcdl.torch.train import Trainer, spread  # noqa: E402

Sgd = light(torch.optim.SGD)

RATES = {"signsgd": 0.001}


def noise(n: int) -> Task:
    """Images with labels at random: nothing to learn, so every gradient is large."""
    random = np.random.RandomState(1)
    parts = [
        Part(random.randint(0, 256, (count, 8, 8)).astype(np.uint8), random.randint(0, 10, count)) for count in (n, 30)
    ]
    return image_task(ImageSet("noise", *parts))


def trainer(
    comm: MPI.Intracomm, method: Method | None, *, n: int = 96, lr: float = 0.05, exchange: str = "flat", **options: Any
) -> Trainer:
    """6 steps an epoch of 16 images, not yet trained."""
    task = noise(n)
    network = build("mlp", task, seed=0)
    wanted: Callable[[Any], Compression] | None = None
    if method is not None:
        wanted = lambda ddp: Compression(ddp, method, exchange=exchange)  # noqa: E731
    sgd = Sgd(network.parameters(), lr=lr)
    return Trainer(task, network, sgd, comm, batch_size=16 // comm.size, compression=wanted, **options)


def parameters(of: Trainer) -> Any:
    return torch.nn.utils.parameters_to_vector(of.model.parameters()).detach()


def some(name: str) -> Method:
    """The method as the tests have it: with some warm-up behind it and some ahead."""
    options = {"dgc": {"density": 0.01, "warmup_epochs": 2}, "topk": {"density": 0.01}, "randomk": {"density": 0.05}}
    return make(name, **options.get(name, {}))


@pytest.mark.ranks(1)
def test_the_command_knows_the_methods_and_their_options(comm: MPI.Intracomm) -> None:
    assert COMPRESSION.keys() == METHODS.keys() and hook.EXCHANGES == EXCHANGES
    values = {"density": 0.5, "compress_rank": 2, "compress_warmup": 3, "momentum": 0.5, "clip_norm": 1.0, "seed": 7}
    for name in COMPRESSION:
        method = compressor(Namespace(compress=name, **values))
        assert method is not None and method.name == name
    assert compressor(Namespace(compress=None)) is None
    dgc = compressor(Namespace(compress="dgc", **values))
    assert [getattr(dgc, each) for each in ("momentum", "clip_norm", "warmup_epochs")] == [0.5, 1.0, 3]
    with pytest.raises(ValueError, match="'zip' is no method of compression: there are dgc, topk, "):
        make("zip")
    with pytest.raises(ValueError, match="topk has no option rank: its options are density, "):
        make("topk", rank=3)
    with pytest.raises(ValueError, match="fp16 has no option density: it has none"):
        make("fp16", density=0.1)
    with pytest.raises(Refused, match="--compress topk: density is "):
        compressor(Namespace(compress="topk", density=0.0))


class Killed(Exception):
    """In place of the signal that ends a process."""


@pytest.mark.ranks(4)
def test_shares_of_parameters_resume_to_the_bit(
    comm: MPI.Intracomm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "NODES", "2+2")
    comm = comm.Dup()
    resumes_to_the_bit(comm, tmp_path, "dgc", [(7, 6)], exchange="by_node")
    comm.Free()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_training_goes_on_to_the_bit(comm: MPI.Intracomm, tmp_path: Path, name: str) -> None:
    # Within the warm-up of dgc, at its end, and behind it.
    resumes_to_the_bit(comm, tmp_path, name, [(7, 6), (8, 8), (13, 12)] if name == "dgc" else [(7, 6)])


def resumes_to_the_bit(
    comm: MPI.Intracomm, tmp_path: Path, name: str, kills: list[tuple[int, int]], exchange: str = "flat"
) -> None:
    """Killed behind one step, and gone on with from another."""
    folder, epochs = comm.bcast(tmp_path), 4
    options: dict[str, Any] = {"lr": RATES.get(name, 0.05), "n": 60, "exchange": exchange}  # 4 steps an epoch
    whole = trainer(comm, some(name), **options)
    list(whole.train(epochs))
    for killed_behind, resumed_at in kills:
        killed = trainer(comm, some(name), **options)

        def after_step(_: int, killed: Trainer = killed, last: int = killed_behind) -> None:
            if killed.steps % 2 == 0:
                killed.save(folder)
            if killed.steps == last:
                raise Killed

        with pytest.raises(Killed):
            list(killed.train(epochs, after_step))

        resumed = trainer(comm, some(name), **options)
        checkpoint = resumed.resume(folder)
        assert checkpoint is not None and checkpoint.step == resumed.steps == resumed_at
        list(resumed.train(epochs))
        assert torch.equal(parameters(resumed), parameters(whole))
        assert spread(resumed.model, comm) == 0
        for mine, theirs in zip(resumed.epochs, whole.epochs, strict=True):
            assert mine[:4] == theirs[:4]
            assert mine.compressed is not None and theirs.compressed is not None
            assert mine.compressed.residual == theirs.compressed.residual
            assert mine.compressed.ratio == pytest.approx(theirs.compressed.ratio, rel=0.02, nan_ok=True)


@pytest.mark.ranks(1)
def test_the_density_is_the_epochs_also_behind_a_resumption(comm: MPI.Intracomm, tmp_path: Path) -> None:
    def densities(resume: bool) -> list[float]:
        method, seen = make("dgc", density=0.01, warmup_epochs=2), []
        ready = trainer(comm, method, n=60)  # 4 steps an epoch

        def after_step(_: int) -> None:
            seen.append(method.density)  # type: ignore[attr-defined]
            if ready.steps == 6:
                ready.save(tmp_path)

        if resume:
            ready.resume(tmp_path)
        list(ready.train(4, after_step))
        return seen

    whole = densities(resume=False)
    assert whole == pytest.approx([0.01 ** (1 / 3)] * 4 + [0.01 ** (2 / 3)] * 4 + [0.01] * 8)
    assert densities(resume=True) == whole[6:]


@pytest.mark.ranks(2)
def test_a_checkpoint_of_another_compression_is_refused_by_all(comm: MPI.Intracomm, tmp_path: Path) -> None:
    folder = comm.bcast(tmp_path)
    trainer(comm, some("topk")).save(folder)
    assert trainer(comm, some("topk")).resume(folder) is not None
    for other, words in [(None, "compression topk, this one has None"), (some("dgc"), "topk, this one has dgc")]:
        with pytest.raises(CheckpointError, match=words):
            trainer(comm, other).resume(folder)
    trainer(comm, None).save(folder)
    assert trainer(comm, None).resume(folder) is not None
    with pytest.raises(CheckpointError, match="compression None, this one has topk"):
        trainer(comm, some("topk")).resume(folder)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["topk", "powersgd", "fp16"])
def test_what_is_told_is_what_happened(comm: MPI.Intracomm, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "NODES", "+".join("1" * comm.size))
    comm = comm.Dup()
    method = some(name)
    ready, plain = trainer(comm, method), trainer(comm, None)
    sent, bytes_before = [], hpcdl.sent_bytes()
    assert ready.compression is not None
    reduce = ready.compression.method.reduce

    def counted(pieces: Any, wire: Any) -> None:
        before = hpcdl.sent_bytes()
        reduce(pieces, wire)
        sent.append(hpcdl.sent_bytes() - before)

    monkeypatch.setattr(method, "reduce", counted)
    news: list[Any] = []
    epochs = list(ready.train(2, lambda _: news.append(ready.measure())))
    assert len(sent) == 12 and hpcdl.sent_bytes() - bytes_before > sum(sent)
    size = sum(each.numel() for each in ready.model.parameters())
    for epoch, mine in zip(epochs, (sent[:6], sent[6:]), strict=True):
        told = epoch.compressed
        assert told is not None
        dense = 6 * 2 * (comm.size - 1) * size * 4
        # Padding between parameters, and whether anything is inf or nan, which all ranks ask one another each step.
        assert told.ratio == pytest.approx(dense / comm.allreduce(sum(mine)), rel=0.05)
        assert {"topk": 10, "powersgd": 1.5, "fp16": 1.8}[name] < told.ratio
        assert 0 < told.compressing < 1 - epoch.communication / 2
        assert (told.residual == 0) == (name == "fp16")
    first = epochs[0].compressed
    assert first is not None and {"topk": 0.5, "powersgd": 0.1, "fp16": 1e-5}[name] < first.error
    assert first.error < {"topk": 1.0, "powersgd": 1.0, "fp16": 1e-3}[name]
    for each in news:
        assert each.compressed.ratio == pytest.approx(epochs[0].compressed.ratio, rel=0.1)
        assert math.isnan(each.compressed.error) and math.isnan(each.compressed.residual)
    assert [epoch.compressed for epoch in plain.train(1)] == [None]
    comm.Free()


@pytest.mark.ranks(2)
def test_with_one_node_there_is_no_ratio_where_nothing_is_sent(comm: MPI.Intracomm) -> None:
    (epoch,) = trainer(comm, some("powersgd")).train(1)
    assert epoch.compressed is not None
    assert math.isnan(epoch.compressed.ratio) and epoch.compressed.error < 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["dgc", "powersgd", "onebit"])
def test_what_is_kept_is_in_true_size_under_a_scaler(comm: MPI.Intracomm, name: str) -> None:
    ready = trainer(comm, some(name), precision="fp16", n=64)
    assert ready.scaler is not None and ready.compression is not None
    list(ready.train(2))
    norm = ready.compression.residual_norm()
    bare = trainer(comm, some(name), n=64)
    list(bare.train(2))
    assert bare.compression is not None
    assert norm == pytest.approx(bare.compression.residual_norm(), rel=0.1)
    assert ready.scaler.get_scale() == 65536
    assert spread(ready.model, comm) == 0


@pytest.mark.ranks(4)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_accumulation_buckets_and_nodes_go_along_with_it(
    comm: MPI.Intracomm, exchange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "NODES", "2+2")
    comm = comm.Dup()
    ready = trainer(
        comm, some("topk"), exchange=exchange, accumulate=2, bucket_cap_mb=0.01, first_bucket_mb=0.001, lr=0.02
    )
    epochs = list(ready.train(20))
    assert len(ready.model.reducer.buckets) > 2
    assert epochs[-1].loss < 0.9 * epochs[0].loss  # by heart
    # Inside a node all of it travels, which is not counted: there need be no wire.
    assert all(epoch.compressed and epoch.compressed.ratio > 15 for epoch in epochs)
    assert spread(ready.model, comm) == 0
    comm.Free()


@pytest.mark.ranks(3)
def test_nodes_of_unequal_size_are_refused_for_shares(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "NODES", "2+1")
    comm = comm.Dup()
    ready = trainer(comm, None)
    with pytest.raises(Refused, match=r"--exchange by_node: by_node needs equally many ranks on all nodes, not \[2, 1"):
        compress(some("topk"), "by_node", ready.model)
    comm.Free()
