"""Training on several ranks is training on one with the same global batches."""

import itertools
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from idx import write_images
from mpi4py import MPI

from hpcdl.cli.agreed import Refused
from hpcdl.cli.train import begin_or_resume
from hpcdl.data import DataError, ImageSet, Part, load_together
from hpcdl.environment import cores_per_rank, crowding
from hpcdl.text import Text, cut

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.torch import CheckpointError  # noqa: E402
from hpcdl.torch.recipe import light  # noqa: E402
from hpcdl.torch.tasks import Task, build, image_task, text_task  # noqa: E402
from hpcdl.torch.train import Trainer, cross_entropy, evaluate, spread  # noqa: E402

Sgd = light(torch.optim.SGD)

BLOCK = 6


def images(n: int, tests: int = 30, side: int = 8) -> ImageSet:
    """Noise with labels: nothing to learn, so every gradient is large."""
    random = np.random.RandomState(1)
    parts = [
        Part(random.randint(0, 256, (count, side, side)).astype(np.uint8), random.randint(0, 10, count))
        for count in (n, tests)
    ]
    return ImageSet("noise", *parts)


def noise(n: int) -> Task:
    return image_task(images(n), torch.float64)


def prattle(windows: int) -> Task:
    """Text of so many windows to train on: letters at random."""
    letters = "".join(np.random.RandomState(2).choice(list("abcde"), windows * BLOCK + 1 + 50))
    whole = cut(letters, "prattle")
    numbers = np.concatenate([whole.train, whole.test])
    return text_task(Text("prattle", whole.vocabulary, numbers[:-50], numbers[-50:]), BLOCK)


def trainer(
    task: Task, comm: MPI.Comm, *, batch_size: int, model: str = "mlp", seed: int = 0, **options: Any
) -> Trainer:
    """In float64, not yet trained."""
    network = build(model, task, seed=seed).double()
    sgd = Sgd(network.parameters(), lr=0.05, momentum=0.9)
    return Trainer(task, network, sgd, comm, batch_size=batch_size, **options)


def trained(task: Task, comm: MPI.Comm, *, epochs: int, **options: Any) -> Trainer:
    """After some epochs."""
    ready = trainer(task, comm, **options)
    assert len(list(ready.train(epochs))) == epochs
    return ready


def parameters(of: Trainer) -> Any:
    return torch.nn.utils.parameters_to_vector(of.model.parameters()).detach()


def assert_follows(one: Trainer, several: Trainer) -> None:
    """The same parameters to 10 digits (float64 has 16, and 20 steps lose few), and the same results."""
    assert one.steps == several.steps
    assert all(float(each.norm()) > 0 for each in (state["momentum_buffer"] for state in one.optimizer.state.values()))
    assert float((parameters(several) - parameters(one)).norm() / parameters(one).norm()) < 1e-10
    for name in ("loss", "test_loss"):
        mine, ours = ([getattr(epoch, name) for epoch in each.epochs] for each in (one, several))
        assert ours == pytest.approx(mine, rel=1e-10)
    assert [epoch.accuracy for epoch in several.epochs] == [epoch.accuracy for epoch in one.epochs]
    assert spread(several.model, several.comm) == 0


@pytest.mark.ranks(4)
@pytest.mark.parametrize("algorithm", ["auto", "ring", "native"])
def test_4_ranks_of_32_follow_1_rank_of_128(comm: MPI.Intracomm, algorithm: str) -> None:
    task = noise(500)  # 20 steps: 3 full batches and one of 116, 5 times
    one = trained(task, MPI.COMM_SELF, batch_size=128, epochs=5)
    assert_follows(one, trained(task, comm, batch_size=32, epochs=5, algorithm=algorithm))


@pytest.mark.ranks(3)
def test_a_convolutional_network_follows_too(comm: MPI.Intracomm) -> None:
    task = noise(100)
    one = trained(task, MPI.COMM_SELF, batch_size=48, epochs=2, model="cnn")
    assert_follows(one, trained(task, comm, batch_size=16, epochs=2, model="cnn"))


@pytest.mark.ranks(3)
def test_a_transformer_follows_too(comm: MPI.Intracomm) -> None:
    task = prattle(50)
    one = trained(task, MPI.COMM_SELF, batch_size=12, epochs=2, model="transformer")
    assert one.epochs[0].loss == pytest.approx(np.log(5), abs=0.5)  # a character's, and not a window's
    assert_follows(one, trained(task, comm, batch_size=4, epochs=2, model="transformer"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"overlap": True}, {"overlap": False, "bucket_cap_mb": 0.01}])
def test_buckets_and_overlap_change_nothing(comm: MPI.Intracomm, options: dict[str, Any]) -> None:
    task = noise(70)
    one = trained(task, MPI.COMM_SELF, batch_size=32, epochs=2)
    assert_follows(one, trained(task, comm, batch_size=16, epochs=2, first_bucket_mb=0.001, **options))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_accumulated_passes_follow_one_large_batch(comm: MPI.Intracomm, model: str) -> None:
    task = noise(100) if model == "mlp" else prattle(100)  # the last batch has 4: some passes have no sample
    one = trained(task, MPI.COMM_SELF, batch_size=48, epochs=2, model=model)
    assert_follows(one, trained(task, comm, batch_size=4, accumulate=4, epochs=2, model=model))


@pytest.mark.ranks(2)
def test_accumulated_passes_are_reduced_once(comm: MPI.Intracomm) -> None:
    ready = trainer(noise(64), comm, batch_size=4, accumulate=4)
    reductions, reduce = [], ready.model.reducer.reduce
    ready.model.reducer.reduce = lambda **options: (reductions.append(1), reduce(**options))
    list(ready.train(1))
    assert len(reductions) == ready.steps == 2


@pytest.mark.ranks(2)
def test_a_step_is_that_of_torchs_sgd(comm: MPI.Intracomm) -> None:
    task = noise(24)
    several = trained(task, comm, batch_size=24 // comm.size, epochs=5)
    model = build("mlp", task, seed=0).double()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    inputs, labels = task.train(np.arange(24))
    for _ in range(5):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
    expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert float((parameters(several) - expected).norm() / expected.norm()) < 1e-10


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("last", "model"), [(1, "mlp"), (3, "mlp"), (2, "cnn"), (1, "transformer")])
def test_ranks_with_no_sample_of_the_last_batch_take_part(comm: MPI.Intracomm, last: int, model: str) -> None:
    task = prattle(16 + last) if model == "transformer" else noise(16 + last)
    one = trained(task, MPI.COMM_SELF, batch_size=16, epochs=2, model=model)
    assert_follows(one, trained(task, comm, batch_size=4, epochs=2, model=model))


@pytest.mark.ranks(3)
def test_each_held_out_sample_is_counted_once(comm: MPI.Intracomm) -> None:
    n, wrong = 10, 3
    seen: list[int] = []

    class Reader(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Is sure of the number that it is shown, but for the first few."""

        def forward(self, numbers: Any) -> Any:
            seen.extend(numbers.tolist())
            return 100.0 * torch.nn.functional.one_hot(torch.where(numbers < wrong, 9 - numbers, numbers), 10)

    def both(chosen: Any) -> Any:
        return torch.from_numpy(chosen), torch.from_numpy(chosen)

    task = Task("numbers", "", "numbers", (0, 0), 0, n, 1, both, both)
    loss, accuracy = evaluate(Reader(), task, comm, batch_size=2)
    assert (loss, accuracy) == (pytest.approx(100 * wrong / n), (n - wrong) / n)
    assert sorted(comm.allreduce(seen)) == list(range(n))


@pytest.mark.ranks(2)
def test_each_character_that_follows_is_counted_once(comm: MPI.Intracomm) -> None:
    task = text_task(cut("abcabcaabc" * 30, "letters"), 4)  # held out: 30 characters, 7 windows of 4

    class Alphabet(torch.nn.Module):  # type: ignore[misc, name-defined]
        """Says that b follows a, c follows b and a follows c."""

        def forward(self, characters: Any) -> Any:
            return torch.nn.functional.one_hot((characters + 1) % 3, 3).double()

    model = Alphabet()
    inputs, labels = task.test(np.arange(7))
    loss, accuracy = evaluate(model, task, comm, batch_size=2)
    assert inputs.shape == labels.shape == (7, 4)
    assert accuracy == 1 - 3 / 28  # of its 28 characters three follow an a that is followed by another
    assert loss == pytest.approx(cross_entropy(model(inputs), labels).item() / 28)


@pytest.mark.ranks(1, 3)
def test_all_ranks_start_from_the_parameters_of_rank_0(comm: MPI.Intracomm) -> None:
    task = noise(10)
    first = torch.nn.utils.parameters_to_vector(build("mlp", task, seed=0).double().parameters()).detach()
    network = build("mlp", task, seed=comm.rank).double()
    assert torch.equal(parameters(Trainer(task, network, Sgd(network.parameters(), lr=0.1), comm, batch_size=1)), first)
    assert torch.equal(torch.nn.utils.parameters_to_vector(network.parameters()).detach(), first)


@pytest.mark.ranks(3)
def test_a_parameter_that_drifts_on_one_rank_is_seen_by_all(comm: MPI.Intracomm) -> None:
    model = build("mlp", noise(10), seed=0)
    assert spread(model, comm) == 0
    drifting = next(model.parameters()).data.view(-1)
    drifting[7] = 0.5 if comm.rank == 1 else 0.25
    assert spread(model, comm) == 0.25
    for lost in [{0}, {1}, {2}, {0, 1, 2}]:  # each, since MPI's max may keep the first or the last it is given
        drifting[7] = np.nan if comm.rank in lost else 0.25
        assert not np.isfinite(spread(model, comm))


class Killed(Exception):
    """In place of the signal that ends a process."""


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("model", "killed_behind", "resumed_at"), [("mlp", 3, 2), ("mlp", 6, 6), ("mlp", 9, 8), ("transformer", 3, 2)]
)
def test_a_resumed_training_goes_on_to_the_bit(
    comm: MPI.Intracomm, tmp_path: Path, model: str, killed_behind: int, resumed_at: int
) -> None:
    task = noise(70) if model == "mlp" else prattle(70)
    folder = comm.bcast(tmp_path)
    options: dict[str, Any] = {"batch_size": 12 // comm.size, "model": model}  # 6 steps an epoch
    whole = trained(task, comm, epochs=2, **options)

    killed = trainer(task, comm, **options)

    def after_step(_: int) -> None:
        if killed.steps % 2 == 0:
            killed.save(folder)
        if killed.steps == killed_behind:
            raise Killed

    with pytest.raises(Killed):
        list(killed.train(2, after_step))

    resumed = trainer(task, comm, **options)
    with torch.no_grad():
        next(resumed.model.parameters()).zero_()  # what it had is of no account
    checkpoint = resumed.resume(folder)
    assert checkpoint is not None and checkpoint.step == resumed.steps == resumed_at
    list(resumed.train(2))
    assert list(resumed.train(2)) == []  # nothing is left to do
    assert torch.equal(parameters(resumed), parameters(whole))
    assert [epoch[:4] for epoch in resumed.epochs] == [epoch[:4] for epoch in whole.epochs]  # what clocks tell, differs


@pytest.mark.ranks(2)
def test_a_checkpoint_of_another_training_is_refused_by_all(comm: MPI.Intracomm, tmp_path: Path) -> None:
    folder = comm.bcast(tmp_path)
    assert trainer(noise(20), comm, batch_size=2).resume(folder) is None
    trainer(noise(20), comm, batch_size=2).save(folder)
    assert trainer(noise(20), comm, batch_size=2).resume(folder) is not None
    for other, words in [
        (trainer(noise(20), comm, batch_size=3), "batch size 2, this one has 3"),
        (trainer(noise(20), comm, batch_size=2, accumulate=2), "accumulation 1, this one has 2"),
        (Trainer(noise(20), *other_seed(), comm, batch_size=2, seed=1), "seed 0, this one has 1"),
        (trainer(noise(21), comm, batch_size=2), "this one has 21 training"),
        (trainer(noise(20), comm, batch_size=2, model="cnn"), "in the model it is"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            other.resume(folder)


@pytest.mark.ranks(2)
def test_an_earlier_trainings_checkpoints_are_not_written_over(comm: MPI.Intracomm, tmp_path: Path) -> None:
    ready, options = trainer(noise(20), comm, batch_size=2), Namespace(checkpoint=comm.bcast(tmp_path), resume=False)
    begin_or_resume(ready, options)
    ready.save(options.checkpoint)
    with pytest.raises(Refused, match="holds checkpoints: go on from them by --resume, or name another folder"):
        begin_or_resume(ready, options)


def other_seed() -> tuple[Any, Sgd]:
    network = build("mlp", noise(20), seed=1).double()
    return network, Sgd(network.parameters(), lr=0.05)


@pytest.mark.ranks(2)
def test_communication_is_what_backward_waits_for_behind_its_own_work(comm: MPI.Intracomm) -> None:
    import time

    class Late(torch.nn.Module):  # type: ignore[misc, name-defined]
        """One rank thinks for long."""

        def __init__(self) -> None:
            super().__init__()
            self.network = build("mlp", noise(20), seed=0).double()

        def forward(self, pixels: Any) -> Any:
            time.sleep(0.1 * comm.rank)
            return self.network(pixels)

    network = Late()
    ready = Trainer(noise(20), network, Sgd(network.parameters(), lr=0.05), comm, batch_size=2, overlap=False)
    (epoch,) = ready.train(1)
    # Rank 0 waits for all of the time that rank 1 sleeps, and rank 1 for nobody: half of it, and a bit less.
    assert 0.25 < epoch.communication < 0.6


@pytest.mark.ranks(1, 3)
def test_the_rate_is_of_all_ranks_together(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr("hpcdl.torch.train.perf_counter", lambda: float(next(seconds)))
    ready = trainer(noise(60), comm, batch_size=12 // comm.size)
    (epoch,) = ready.train(1)
    # Between the beginning of a step and its end the clock is read twice: 3 s for each of 5 steps.
    assert epoch.per_s == 4


@pytest.mark.ranks(3)
def test_data_that_one_rank_cannot_read_is_refused_by_all(comm: MPI.Intracomm, tmp_path: Path) -> None:
    write_images(tmp_path)  # each rank has a folder of its own
    assert len(load_together(str(tmp_path), comm).train.labels) == 400

    if comm.rank == 1:
        (tmp_path / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError) as raised:
        load_together(str(tmp_path), comm)
    assert "holds neither train-labels-idx1-ubyte.gz nor" in str(raised.value)
    assert "(on rank 1 of 3)" in str(raised.value)
    assert len(set(comm.allgather(str(raised.value)))) == 1


@pytest.mark.ranks(3)
def test_data_that_differs_between_ranks_is_refused_by_all(comm: MPI.Intracomm, tmp_path: Path) -> None:
    write_images(tmp_path, seed=int(comm.rank == 2))
    with pytest.raises(DataError, match="all ranks must have the same data: rank 2 has"):
        load_together(str(tmp_path), comm)


@pytest.mark.ranks(1, 2)
def test_the_ranks_of_a_node_share_its_cores(comm: MPI.Intracomm) -> None:
    import os

    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system binds no process to cores")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cores_per_rank(comm) == 1
        hint = crowding(comm)
        assert hint is None if comm.size == 1 else hint and "note: 2 ranks share 1 core of a node" in hint
        os.sched_setaffinity(0, before)
        assert cores_per_rank(comm) == max(1, len(before) // comm.size)
        mine = sorted(before)[comm.rank :: comm.size]
        os.sched_setaffinity(0, mine)
        assert cores_per_rank(comm) in {len(mine), len(before) // comm.size}
    finally:
        os.sched_setaffinity(0, before)
