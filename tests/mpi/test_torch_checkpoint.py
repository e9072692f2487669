"""A checkpoint is loaded whole or not at all, by all ranks alike, and the training goes on as if nothing had been."""

import errno
import os
import pickle
import random
import resource
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import hpcdl

torch = pytest.importorskip("torch", reason="torch is not installed")

from hpcdl.torch import checkpoint  # noqa: E402
from hpcdl.torch.checkpoint import Checkpoint, CheckpointError, load_checkpoint, save_checkpoint  # noqa: E402

pytestmark = pytest.mark.ranks(1, 3)
nn = torch.nn


@pytest.fixture
def folder(comm: MPI.Intracomm, tmp_path: Path) -> Path:
    """A folder that all ranks see, not made yet."""
    return Path(comm.bcast(str(tmp_path / "deep" / "checkpoints")))


def states() -> list[Any]:
    """Where the three random streams stand."""
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


# A training with all that can go wrong in a resume


class Training:
    """Dropout, momentum, a schedule, a shuffle, a residual, and each rank's own random streams."""

    def __init__(self, comm: MPI.Intracomm, seed: int) -> None:
        self.comm = comm
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.4), nn.Linear(9, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for stream in (torch.manual_seed, random.seed, np.random.seed):
            stream(seed + 10 * comm.rank)
        self.samples = torch.rand(16, 6)
        self.step, self.order = 0, [] if seed else [3]
        self.residual = torch.zeros(sum(parameter.numel() for parameter in self.model.parameters()))

    def go(self, steps: int) -> "Training":
        for _ in range(steps):
            if len(self.order) < 5:
                self.order += random.sample(range(16), 16)
            mine, self.order = self.order[:5], self.order[5:]
            self.optimizer.zero_grad()
            noise = torch.from_numpy(np.random.rand(5, 1).astype(np.float32))
            self.scaler.scale((self.model(self.samples[mine]) - noise).square().mean()).backward()
            gradient = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()]) + self.residual
            sent = gradient.bfloat16().float()
            self.residual = gradient - sent
            hpcdl.allreduce(sent, self.comm, op="mean")
            for parameter, part in zip(
                self.model.parameters(), sent.split([p.numel() for p in self.model.parameters()]), strict=True
            ):
                parameter.grad.copy_(part.view_as(parameter))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.step += 1
        return self

    @property
    def parts(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler")
        return {name: getattr(self, name) for name in names}

    def save(self, folder: Path) -> None:
        extra = {"residual": self.residual, "samples": self.samples}
        sampler = {"order": self.order}
        save_checkpoint(folder, **self.parts, step=self.step, sampler=sampler, extra=extra, comm=self.comm)

    def load(self, folder: Path) -> "Training":
        loaded = load_checkpoint(folder, **self.parts, comm=self.comm)
        assert loaded is not None
        self.step, self.order = loaded.step, loaded.sampler["order"]
        self.residual, self.samples = loaded.extra["residual"], loaded.extra["samples"]
        return self

    def bits(self) -> list[Any]:
        momentum = [state["momentum_buffer"] for state in self.optimizer.state_dict()["state"].values()]
        tensors = [*self.model.parameters(), *momentum, self.residual]
        rest = [self.step, self.order, self.scheduler.get_last_lr(), self.scaler.get_scale()]
        return [*(tensor.detach().numpy().tobytes() for tensor in tensors), *rest, *states()]


def test_a_resumed_training_has_the_bits_of_one_that_was_not_interrupted(comm: MPI.Intracomm, folder: Path) -> None:
    whole = Training(comm, seed=0).go(6)
    interrupted = Training(comm, seed=0).go(3)
    interrupted.save(folder)
    resumed = Training(comm, seed=77).go(1).load(folder)
    assert resumed.bits() == interrupted.bits()
    assert resumed.go(3).bits() == whole.bits()
    assert whole.bits() != Training(comm, seed=0).go(5).bits()


def test_saving_changes_nothing(comm: MPI.Intracomm, folder: Path) -> None:
    training = Training(comm, seed=0).go(3)
    before = training.bits()
    training.save(folder)
    assert training.bits() == before


# Small checkpoints in which every part tells which one it is of


def tiny(value: float = 0.0, shape: tuple[int, int] = (2, 3)) -> Any:
    model = nn.utils.skip_init(nn.Linear, shape[1], shape[0])  # which draws no random number
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def save(folder: Path, comm: MPI.Intracomm, step: int, **other: Any) -> Path:
    """Save, each part being of this step and, if it is the rank's own, of this rank."""
    extra = {"residual": torch.full((5,), 100.0 * step + comm.rank)}
    content: dict[str, Any] = {"model": tiny(step), "sampler": [step, comm.rank], "extra": extra}
    torch.manual_seed(1000 * step + comm.rank)
    return save_checkpoint(folder, step=step, comm=comm, **{**content, **other})


def load(folder: Path, comm: MPI.Intracomm) -> int | None:
    """Load, and see that every part is of one step, which is given."""
    model = tiny(-1.0)
    loaded = load_checkpoint(folder, model=model, comm=comm)
    if loaded is None:
        assert {parameter.unique().item() for parameter in model.parameters()} == {-1.0}
        return None
    step = loaded.step
    assert {parameter.unique().item() for parameter in model.parameters()} == {float(step)}
    assert loaded.sampler == [step, comm.rank]
    assert loaded.extra["residual"].tolist() == [100.0 * step + comm.rank] * 5
    state = torch.get_rng_state()
    torch.manual_seed(1000 * step + comm.rank)
    assert torch.equal(state, torch.get_rng_state())
    assert comm.allgather(step) == [step] * comm.size
    return step


def refusal(comm: MPI.Intracomm, act: Callable[[], object]) -> str:
    """What all ranks are told alike, in one line."""
    with pytest.raises(CheckpointError) as raised:
        act()
    said: list[str] = comm.allgather(str(raised.value))
    assert set(said) == {said[0]}
    assert "\n" not in said[0]
    return said[0]


def checkpoints(folder: Path, comm: MPI.Intracomm) -> list[str]:
    comm.Barrier()
    found = sorted(path.name for path in folder.iterdir())
    comm.Barrier()
    return found


def test_where_there_is_no_checkpoint_none_is_loaded(comm: MPI.Intracomm, folder: Path) -> None:
    assert load(folder, comm) is None
    folder.mkdir(parents=True, exist_ok=True)
    comm.Barrier()
    assert load(folder, comm) is None


def test_the_newest_is_loaded_and_only_the_newest_are_kept(comm: MPI.Intracomm, folder: Path) -> None:
    for step in (5, 6, 7, 3):  # 3: somebody has gone back, and that is what is newest now
        save(folder, comm, step)
        assert load(folder, comm) == step
    assert checkpoints(folder, comm) == ["checkpoint-000003", "checkpoint-000004"]
    save(folder, comm, 4, keep=1)
    assert checkpoints(folder, comm) == ["checkpoint-000005"]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "cut to nothing": lambda content: b"",
    "cut after a byte": lambda content: content[:1],
    "cut in the middle": lambda content: content[: len(content) // 2],
    "cut before the last byte": lambda content: content[:-1],
    "grown": lambda content: content + b"\0",
    "garbage": lambda content: b"\xff{}" * 100,
    "zeros": lambda content: bytes(len(content)),
    "JSON of another kind": lambda content: b"[]",
    "missing": lambda content: None,
    **{
        f"a bit flipped at {place}/9": lambda content, place=place: flipped(content, (len(content) - 1) * place // 9)  # type: ignore[misc]
        for place in (0, 2, 5, 7, 9)
    },
}


def flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def damaged(comm: MPI.Intracomm, path: Path) -> Iterator[str]:
    """Each file of a checkpoint damaged in each way in turn; rank 0 does it."""
    names = comm.bcast(sorted(os.listdir(path)))
    assert names == ["manifest.json", "model.pt", *(f"rank-{rank}.pt" for rank in range(comm.size))]
    for name in names:
        content = comm.bcast((path / name).read_bytes() if comm.rank == 0 else None)
        for damage, act in DAMAGES.items():
            if comm.rank == 0:
                worse = act(content)
                (path / name).unlink()
                if worse is not None:
                    assert worse != content, f"{damage} changes nothing"
                    (path / name).write_bytes(worse)
            comm.Barrier()
            yield name
            comm.Barrier()
            if comm.rank == 0:
                (path / name).write_bytes(content)
            comm.Barrier()


def test_instead_of_a_damaged_checkpoint_the_one_before_it_is_loaded(comm: MPI.Intracomm, folder: Path) -> None:
    save(folder, comm, 1)
    path = save(folder, comm, 2)
    for name in damaged(comm, path):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert load(folder, comm) == 1
        if comm.rank == 0:
            assert len(caught) == 1
            assert str(path) in str(caught[0].message) and name in str(caught[0].message)
            assert "checkpoint-000001 is loaded instead" in str(caught[0].message)
        else:
            assert not caught
    assert load(folder, comm) == 2


@pytest.mark.filterwarnings("ignore:.*never completed")
def test_where_no_checkpoint_is_whole_all_ranks_are_told_which_file_is_damaged(
    comm: MPI.Intracomm, folder: Path
) -> None:
    path = save(folder, comm, 1)
    for name in damaged(comm, path):
        if comm.bcast((path / "manifest.json").exists()):
            before = states()
            assert str(path / name) in refusal(comm, lambda: load(folder, comm))
            assert states() == before
        else:
            assert load(folder, comm) is None  # as after a crash in the very first save


def test_files_of_two_checkpoints_are_never_mixed(comm: MPI.Intracomm, folder: Path) -> None:
    first, second = save(folder, comm, 1), save(folder, comm, 2)
    names = comm.bcast(sorted(os.listdir(second)))
    for name in names:
        kept = (second / name).read_bytes()
        comm.Barrier()
        if comm.rank == 0:
            shutil.copy(first / name, second / name)
        comm.Barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert load(folder, comm) == 1
        comm.Barrier()
        if comm.rank == 0:
            (second / name).write_bytes(kept)
        comm.Barrier()
    assert load(folder, comm) == 2


def test_ranks_that_come_and_write_at_different_times_find_one_whole_checkpoint(
    comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    replace = os.replace

    def write_slowly(source: str, target: str) -> None:
        time.sleep(0.02 * ((comm.rank + turn) % comm.size))
        replace(source, target)
        written.append(Path(target).name)

    monkeypatch.setattr(os, "replace", write_slowly)
    everything = ["manifest.json", "model.pt", *(f"rank-{rank}.pt" for rank in range(comm.size))]
    mine = ["model.pt", "rank-0.pt", "manifest.json"] if comm.rank == 0 else [f"rank-{comm.rank}.pt"]
    for turn in range(comm.size):
        written.clear()
        time.sleep(0.02 * ((comm.rank + turn) % comm.size))  # they come one by one, each turn in another order
        path = save(folder, comm, turn)
        assert sorted(os.listdir(path)) == everything  # at once, on each rank
        assert written == mine
        assert load(folder, comm) == turn
    assert len(set(comm.allgather(str(path)))) == 1


# Failures while it is written


class Failing:
    """A function of the system that works a few times, and then raises."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, works: int, error: BaseException) -> None:
        self.calls, self.works, self.error, self.act = 0, works, error, getattr(os, name)
        patch.setattr(os, name, self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls > self.works:
            raise self.error
        return self.act(*arguments, **named)


@pytest.mark.parametrize("call", ["replace", "fsync", "listdir"])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_one_before(
    comm: MPI.Intracomm, folder: Path, call: str
) -> None:
    save(folder, comm, 1)
    failures = 0
    for culprit in range(comm.size):
        for works in range(20):
            with pytest.MonkeyPatch.context() as patch:
                if comm.rank == culprit:
                    Failing(patch, call, works, OSError(errno.ENOSPC, "No space left on device"))
                try:
                    save(folder, comm, 2)
                    said = None
                except CheckpointError as error:
                    said = str(error)
            everybody = comm.allgather(said)
            assert set(everybody) == {said}
            if said is None:
                assert load(folder, comm) == 2
                break
            failures += 1
            assert "No space left on device" in said
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                step = load(folder, comm)
            # What comes after the manifest, the removal of old ones, may fail too.
            assert step == 1 or call == "listdir"
        else:
            pytest.fail("it fails for ever")
        if comm.rank == 0:
            shutil.rmtree(folder)
        comm.Barrier()
        save(folder, comm, 1)
    assert failures >= comm.size


class Crash(BaseException):
    """The end of the process, as far as a test can have it."""


@pytest.mark.ranks(1)  # a crash of one rank is not agreed on, so each would be by itself
@pytest.mark.parametrize("call", ["replace", "fsync", "mkdir", "unlink", "rmdir"])
def test_a_crash_at_any_point_leaves_the_one_before_or_the_new_one(
    comm: MPI.Intracomm, folder: Path, call: str
) -> None:
    seen = set()
    for works in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, comm, 1, keep=1)
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, call, works, Crash())
            try:
                save(folder, comm, 2, keep=1)
                crashed = False
            except Crash:
                crashed = True
        assert crashed == (failing.calls > works)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen.add(load(folder, comm))
        assert seen <= {1, 2}
        save(folder, comm, 3, keep=1)
        assert load(folder, comm) == 3
        assert len(list(folder.iterdir())) == 1, "what the crash has left is removed"
        if not crashed:
            break
    else:
        pytest.fail("it crashes for ever")
    assert 2 in seen and (1 in seen or call in ("unlink", "rmdir"))


def test_a_full_disk_is_told_to_all_ranks_and_what_was_half_written_is_removed(
    comm: MPI.Intracomm, folder: Path
) -> None:
    save(folder, comm, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == comm.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        big = torch.zeros(100_000)
        with pytest.raises(CheckpointError) as raised:
            save(folder, comm, 2, extra=big)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"rank-{comm.size - 1}.pt: File too large" in str(raised.value)
    assert len(set(comm.allgather(str(raised.value)))) == 1
    assert checkpoints(folder, comm) == ["checkpoint-000001"]
    assert load(folder, comm) == 1


def test_a_folder_that_cannot_be_made_is_told_to_all_ranks(comm: MPI.Intracomm, folder: Path) -> None:
    if comm.rank == 0:
        folder.parent.mkdir(parents=True)
        folder.write_text("a file")
    comm.Barrier()
    assert str(folder) in refusal(comm, lambda: save(folder, comm, 1))


@pytest.mark.parametrize("value", [np.ones(2), np.float64(1), object(), save, {"deep": [Path("x")]}])
def test_what_could_not_be_loaded_is_not_saved(comm: MPI.Intracomm, folder: Path, value: Any) -> None:
    save(folder, comm, 1)
    last = comm.rank == comm.size - 1
    said = refusal(comm, lambda: save(folder, comm, 2, extra=value if last else 0))
    assert f"rank-{comm.size - 1}.pt" in said and "tensors, numbers, strings" in said
    assert load(folder, comm) == 1


def test_ranks_that_disagree_are_told_so(comm: MPI.Intracomm, folder: Path) -> None:
    if comm.size == 1:
        assert "step is a whole number from 0, not -1" in refusal(comm, lambda: save(folder, comm, -1))
        assert "keep is a whole number from 1, not 0" in refusal(comm, lambda: save(folder, comm, 1, keep=0))
    else:
        assert "rank 1 has (1, 2), rank 0 has (0, 2)" in refusal(comm, lambda: save(folder, comm, comm.rank))
        assert "not 0 (on rank 1 of" in refusal(comm, lambda: save(folder, comm, 1, keep=int(comm.rank != 1)))
    assert not folder.exists()


# Loading into something else


def test_another_number_of_ranks_loads_the_shared_part_alone_and_only_if_asked_to(
    comm: MPI.Intracomm, folder: Path
) -> None:
    if comm.rank == 0:
        several = comm.size
        save(folder, MPI.COMM_SELF, 1)
        if several == 1:  # then it is the manifest that says 2
            path = folder / "checkpoint-000001"
            checkpoint._write_manifest(path, {**checkpoint._read_manifest(path), "ranks": 2})
    comm.Barrier()
    said = refusal(comm, lambda: load(folder, comm))
    saved = 2 if comm.size == 1 else 1
    assert f"saved by {saved} ranks, these are {comm.size}" in said and "per_rank=False" in said

    model, before = tiny(), states()
    loaded = load_checkpoint(folder, model=model, per_rank=False, comm=comm)
    assert loaded == Checkpoint(1, None, None, folder / "checkpoint-000001")
    assert {parameter.unique().item() for parameter in model.parameters()} == {1.0}
    assert states() == before


MISFITS: list[tuple[Callable[[], Any], str]] = [
    (lambda: tiny(shape=(2, 4)), "weight is float32 (2, 3), in the model it is float32 (2, 4)"),
    (lambda: tiny().double(), "weight is float32 (2, 3), in the model it is float64 (2, 3)"),
    (lambda: nn.Linear(3, 2, bias=False), "has bias, which the model has not"),
    (lambda: nn.Sequential(tiny()), "has no 0.weight, which the model has"),
]


@pytest.mark.parametrize(("build", "words"), MISFITS, ids=[words for _, words in MISFITS])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_model_that_does_not_fit_is_refused_by_all_ranks_and_nothing_changes(
    comm: MPI.Intracomm, folder: Path, build: Callable[[], Any], words: str, everywhere: bool
) -> None:
    save(folder, comm, 1)
    model = build() if everywhere or comm.rank == comm.size - 1 else tiny()
    before = [parameter.detach().clone() for parameter in model.parameters()], states()
    assert words in refusal(comm, lambda: load_checkpoint(folder, model=model, comm=comm))
    after = list(model.parameters()), states()
    assert all(map(torch.equal, before[0], after[0])) and before[1] == after[1]


def test_an_optimizer_that_does_not_fit_is_refused(comm: MPI.Intracomm, folder: Path) -> None:
    model = tiny()
    save(folder, comm, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "has no optimizer: it was saved without one" in refusal(
        comm, lambda: load_checkpoint(folder, model=model, optimizer=sgd, comm=comm)
    )
    save(folder, comm, 2, optimizer=sgd)
    fewer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.2)
    assert "its optimizer is of 2 parameters, this one of 1 + 1 parameters" in refusal(
        comm, lambda: load_checkpoint(folder, model=model, optimizer=fewer, comm=comm)
    )
    assert load(folder, comm) == 2  # what was saved with an optimizer is loaded without one


def test_each_node_may_have_a_disk_of_its_own(comm: MPI.Intracomm, tmp_path: Path) -> None:
    # pytest gives each rank a folder of its own
    save(tmp_path / "own", comm, 1)
    path = save(tmp_path / "own", comm, 2, keep=1)
    mine = [f"rank-{comm.rank}.pt"]
    assert sorted(os.listdir(path)) == (["manifest.json", "model.pt", *mine] if comm.rank == 0 else mine)
    assert os.listdir(tmp_path / "own") == ["checkpoint-000002"]
    assert load(tmp_path / "own", comm) == 2
    if comm.size > 1:
        elsewhere = tmp_path / ("other" if comm.rank == 0 else "own")
        said = refusal(comm, lambda: load(elsewhere, comm))
        assert "rank 1 finds checkpoints, rank 0 finds none in" in said


class Attack:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def test_no_file_can_run_code(comm: MPI.Intracomm, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(folder, comm, 1)
    if comm.rank == 0:
        manifest = checkpoint._read_manifest(path)
        manifest["files"]["model.pt"] = checkpoint._write(
            path / "model.pt", lambda file: file.write(pickle.dumps({"model": Attack()}))
        )
        checkpoint._write_manifest(path, manifest)
    comm.Barrier()
    ran: list[str] = []
    monkeypatch.setattr(os, "system", ran.append)
    assert str(path / "model.pt") in refusal(comm, lambda: load(folder, comm))
    assert not ran
