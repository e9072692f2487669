"""Checkpoints: what a training is resumed from, whole or not at all.

A folder holds numbered checkpoints, the newest with the highest number:

    checkpoint-000007/model.pt       the model, the optimizer, the scheduler, the scaler: written by rank 0
    checkpoint-000007/rank-0.pt      what is rank 0's own: random states, the sampler's position, extra
    checkpoint-000007/rank-1.pt      ...
    checkpoint-000007/manifest.json  the step, the number of ranks, each file's length and sha256

The manifest comes last, so a checkpoint without one was never completed, and one with a manifest is whole or can be
seen not to be. Nothing in a folder is ever changed: a new checkpoint gets a number of its own.

The folder may lie on a file system that all ranks see, or on a disk of each node's own. Rank 0 reads the manifest and
the model and broadcasts them, since that asks little of either: one rank reads the large file, and only its node needs
to have it. Each rank reads its own file; on nodes' own disks the ranks must come back to where they were.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, NoReturn, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import hpcdl
from hpcdl import verdict
from hpcdl.errors import HpcdlError

if TYPE_CHECKING:
    from mpi4py import MPI

FORMAT, VERSION = "hpcdl checkpoint", 1
MANIFEST, SHARED = "manifest.json", "model.pt"
NAME = re.compile(r"checkpoint-(\d{6,})")

Result = TypeVar("Result")


class CheckpointError(HpcdlError):
    """A checkpoint that could not be written, is damaged, or does not fit; raised by all ranks alike."""


class Checkpoint(NamedTuple):
    """What was loaded: the step, and what this rank gave `save_checkpoint` as `sampler` and `extra`."""

    step: int
    sampler: Any
    extra: Any
    path: Path


class _Damaged(CheckpointError):
    """This checkpoint is not whole; an older one may be."""


class _Content(NamedTuple):
    """What lies in a checkpoint: what all ranks share, and what is this rank's own."""

    path: Path
    step: int
    shared: dict[str, Any]
    mine: dict[str, Any]


class Stateful(Protocol):
    """An optimizer, a scheduler, a scaler: whatever gives its state and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    step: int = 0,
    sampler: Any = None,
    extra: Any = None,
    comm: MPI.Comm | None = None,
    keep: int = 2,
) -> Path:
    """Write a new checkpoint of all ranks, and remove all but the newest `keep`; a collective call.

    The model, the optimizer, the scheduler and the scaler are rank 0's, as all ranks have the same. The random states
    of torch (of the current GPU too, if there is one), NumPy and `random` are each rank's own, and so are `sampler`
    and `extra`: tensors, numbers, strings, and lists, tuples and dicts of them. If a rank fails, all raise the same
    `CheckpointError`, and the earlier checkpoints are as they were.
    """
    from hpcdl.call import channel  # starts MPI

    wire, folder = channel(comm).wire, Path(folder)
    first = wire.rank == 0
    _agreed(wire, lambda: _check_numbers(step, keep))
    differs = verdict.difference(wire, "step and keep", (step, keep))
    if differs:
        raise CheckpointError(differs)

    number = 1 + max(wire.allgather(_rank_0_first(wire, lambda: _make(folder))))
    path = folder / f"checkpoint-{number:06}"

    def write() -> dict[str, dict[str, Any]]:
        files = {}
        if first:
            parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
            states = {name: part.state_dict() for name, part in parts.items() if part is not None}
            files[SHARED] = _write_tensors(path / SHARED, states)
        mine = {"random": _random_states(), "sampler": sampler, "extra": extra}
        files[_own(wire.rank)] = _write_tensors(path / _own(wire.rank), mine)
        return files

    try:
        _rank_0_first(wire, lambda: _make(path))
        files = {name: file for written in wire.allgather(_agreed(wire, write)) for name, file in written.items()}
        manifest = {"format": FORMAT, "version": VERSION, "step": step, "ranks": wire.size, "files": files}
        _agreed(wire, lambda: _write_manifest(path, manifest) if first else None)
    except CheckpointError:
        shutil.rmtree(path, ignore_errors=True)
        raise
    # Only now, when the new one stands.
    for old in wire.bcast(_agreed(wire, lambda: _forget(folder, keep) if first else None)):
        shutil.rmtree(folder / old, ignore_errors=True)  # by all ranks: each node may have a disk of its own
    return path


def load_checkpoint(
    folder: str | Path,
    *,
    model: nn.Module,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    per_rank: bool = True,
    comm: MPI.Comm | None = None,
) -> Checkpoint | None:
    """Go on where the newest checkpoint was saved; None where there is none yet. A collective call.

    With the same number of ranks the training gives the same bits as if it had not been interrupted. With another
    number only the model, the optimizer, the scheduler and the scaler can be loaded, and only if asked to, by
    `per_rank=False`: random states stay as they are, `sampler` and `extra` are None.

    A checkpoint with a damaged or missing file is passed over, with a warning on rank 0 that names the file, and the
    one before it is loaded. Where none is whole, or it does not fit the model, all ranks raise the same
    `CheckpointError`, and nothing has changed.
    """
    from hpcdl.call import channel  # starts MPI

    wire, folder = channel(comm).wire, Path(folder)
    differs = verdict.difference(wire, "per_rank", per_rank)
    if differs:
        raise CheckpointError(differs)
    parts = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    wanted = {name: part for name, part in parts.items() if part is not None}

    content, refused = _newest(wire, comm, folder, per_rank)
    if refused and wire.rank == 0:
        instead = f"{content.path} is loaded instead" if content else "there is none to load"
        warnings.warn(f"{'; '.join(refused)}; {instead}", RuntimeWarning, stacklevel=2)
    if content is None:
        return None
    _agreed(wire, lambda: _check_fit(content, model, wanted))
    _agreed(wire, lambda: _restore(content, {"model": model, **wanted}))
    return Checkpoint(content.step, content.mine.get("sampler"), content.mine.get("extra"), content.path)


def _newest(
    wire: MPI.Intracomm, comm: MPI.Comm | None, folder: Path, per_rank: bool
) -> tuple[_Content | None, list[str]]:
    """The newest checkpoint that is whole, and a line on each newer one that is not."""
    found = wire.allgather(_agreed(wire, lambda: _numbers(folder)))
    witness = next((rank for rank, numbers in enumerate(found) if numbers), None)
    if witness and not found[0]:
        # Else a training whose rank 0 has come to another node would begin anew, and nobody would know.
        _refuse(
            wire, f"rank {witness} finds checkpoints, rank 0 finds none in {folder}: start it where it can see them"
        )
    complete = wire.bcast(_agreed(wire, lambda: _complete(folder)))
    refused, damaged = [], False
    for number in sorted(found[0], reverse=True):
        path = folder / f"checkpoint-{number:06}"
        if number not in complete:
            refused.append(f"{path} was never completed: it has no {MANIFEST}")
            continue
        try:
            return _read(wire, comm, path, per_rank), refused
        except _Damaged as error:
            refused.append(str(error))
            damaged = True
    if damaged:
        _refuse(wire, f"no checkpoint in {folder} is whole: {'; '.join(refused)}")
    return None, refused


def _read(wire: MPI.Intracomm, comm: MPI.Comm | None, path: Path, per_rank: bool) -> _Content:
    """One checkpoint, every file of it checked before anything is used."""
    first = wire.rank == 0
    manifest = wire.bcast(_agreed(wire, lambda: _read_manifest(path) if first else None, _Damaged))
    files, ranks = manifest["files"], manifest["ranks"]
    if per_rank and ranks != wire.size:
        _refuse(
            wire,
            f"{path} was saved by {ranks} ranks, these are {wire.size}: start as many, or load the model, the "
            f"optimizer, the scheduler and the scaler alone with per_rank=False",
        )
    nothing = np.empty(0, np.uint8)
    shared = _agreed(wire, lambda: _read_file(path, SHARED, files) if first else nothing, _Damaged)
    mine = _agreed(wire, lambda: _read_file(path, _own(wire.rank), files) if per_rank else nothing, _Damaged)
    if not first:
        shared = np.empty(files[SHARED]["bytes"], np.uint8)
    hpcdl.broadcast(shared, comm)

    def parse() -> _Content:
        own = _load_tensors(path / _own(wire.rank), mine) if per_rank else {}
        return _Content(path, manifest["step"], _load_tensors(path / SHARED, shared), own)

    return _agreed(wire, parse, _Damaged)


def _refuse(wire: MPI.Intracomm, reason: str) -> NoReturn:
    """Raise on all ranks what rank 0 says: the folder may have another name on theirs."""
    raise CheckpointError(wire.bcast(reason))


def _agreed(wire: MPI.Intracomm, act: Callable[[], Result], kind: type[CheckpointError] = CheckpointError) -> Result:
    """What the act gives this rank; where it fails on one rank, all raise the same error."""
    result = problem = None
    cause: Exception | None = None
    try:
        result = act()
    except CheckpointError as error:
        cause, problem = error, str(error)
    except OSError as error:
        cause, problem = error, f"{error.filename or 'checkpoint'}: {error.strerror}"
    except Exception as error:  # whatever it is: on one rank alone it would be a hang on all others
        cause, problem = error, f"{type(error).__name__}: {error}"
    problem = verdict.agree(wire, problem)
    if problem:
        raise kind(problem) from cause
    return result  # type: ignore[return-value]


def _rank_0_first(wire: MPI.Intracomm, act: Callable[[], Result]) -> Result:
    """The act on rank 0, and then on the others: what it makes, they find, or make on their node's own disk."""
    result = _agreed(wire, lambda: act() if wire.rank == 0 else None)
    result = _agreed(wire, lambda: act() if wire.rank else result)
    return result  # type: ignore[return-value]


def _check_numbers(step: int, keep: int) -> None:
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if not isinstance(value, int) or value < least:
            raise CheckpointError(f"{name} is a whole number from {least}, not {value!r}")


def _own(rank: int) -> str:
    return f"rank-{rank}.pt"


def _numbers(folder: Path) -> list[int]:
    """The numbers of the checkpoints in a folder, those that were never completed too."""
    names = os.listdir(folder) if folder.exists() else []
    return [int(match[1]) for match in map(NAME.fullmatch, names) if match]


def _complete(folder: Path) -> list[int]:
    return [number for number in _numbers(folder) if (folder / f"checkpoint-{number:06}" / MANIFEST).is_file()]


def _make(folder: Path) -> int:
    """Make the folder unless it is there; the highest number in it."""
    folder.mkdir(parents=True, exist_ok=True)
    _sync(folder.parent)
    return max(_numbers(folder), default=0)


def _forget(folder: Path, keep: int) -> list[str]:
    """What is older than the newest `keep` complete checkpoints; from here on no manifest speaks for it."""
    oldest = sorted(_complete(folder))[-keep:][0]
    old = [f"checkpoint-{number:06}" for number in _numbers(folder) if number < oldest]
    for name in old:
        # Before its files: else one that is half removed would look damaged.
        (folder / name / MANIFEST).unlink(missing_ok=True)
    return old


class _Hashing:
    """A file to write to, which counts and hashes what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.bytes, self.sha256 = file, 0, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.bytes += len(data)
        self.sha256.update(data)
        return len(data)

    def flush(self) -> None:
        self.file.flush()


def _write(path: Path, fill: Callable[[Any], object]) -> dict[str, Any]:
    """Write a file beside its place, and put it there when it is safely on the disk; its length and checksum."""
    partial = path.with_name(f"{path.name}.partial")
    with open(partial, "wb") as file:
        hashing = _Hashing(file)
        try:
            fill(hashing)
            file.flush()
            os.fsync(file.fileno())
        except Exception as error:
            # torch.save has words of its own for a full disk.
            reason = hashing.error or error
            raise CheckpointError(f"{path}: {getattr(reason, 'strerror', None) or reason}") from error
    os.replace(partial, path)
    _sync(path.parent)
    return {"bytes": hashing.bytes, "sha256": hashing.sha256.hexdigest()}


def _write_tensors(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    file = _write(path, lambda file: torch.save(content, file))
    try:
        # What cannot be loaded is no checkpoint. Mapped, no tensor is read: this costs next to nothing.
        torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        found = re.search(r"(?:GLOBAL|global) (\S+)", str(error))
        raise CheckpointError(
            f"{path}: it holds {found[1] if found else 'something'}, which is not loaded from a file, for safety: "
            f"states, sampler and extra are tensors, numbers, strings, and lists, tuples and dicts of them"
        ) from error
    return file


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    _write(path / MANIFEST, lambda file: file.write(_manifest_text(manifest).encode()))
    _sync(path.parent)


def _manifest_text(manifest: dict[str, Any]) -> str:
    """A manifest as text, with a checksum of its own."""
    checksum = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": checksum}, indent=1) + "\n"


def _read_manifest(path: Path) -> dict[str, Any]:
    path /= MANIFEST
    try:
        text = path.read_text("utf-8")
        manifest: dict[str, Any] = json.loads(text)
        del manifest["sha256"]
        same = _manifest_text(manifest) == text
    except (ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise CheckpointError(f"{path} is damaged: it is not the text that was written")
    if (manifest["format"], manifest["version"]) != (FORMAT, VERSION):
        raise CheckpointError(
            f"{path} is {manifest['format']} of version {manifest['version']}, this program reads {FORMAT} of {VERSION}"
        )
    return manifest


def _read_file(path: Path, name: str, files: dict[str, dict[str, Any]]) -> NDArray[np.uint8]:
    path, promised = path / name, files[name]
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if len(content) != promised["bytes"]:
        raise CheckpointError(f"{path} is damaged: it has {len(content)} bytes, {promised['bytes']} were written")
    if hashlib.sha256(content.data).hexdigest() != promised["sha256"]:
        raise CheckpointError(f"{path} is damaged: its sha256 is not the one that the manifest tells")
    return content


def _load_tensors(path: Path, content: NDArray[np.uint8]) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = torch.load(io.BytesIO(content.tobytes()), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{path} is whole, but this torch {torch.__version__} cannot load it: {reason}"
        ) from error
    return loaded


def _sync(folder: Path) -> None:
    """Have the names in a folder safely on the disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # one may make a folder in a place that one may not read
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_fit(content: _Content, model: nn.Module, wanted: dict[str, Stateful]) -> None:
    """Refuse what would not go into the model, the optimizer, the scheduler or the scaler, before they change."""
    saved, own = content.shared["model"], model.state_dict()
    for name in [*own, *(name for name in saved if name not in own)]:
        if name not in saved:
            raise CheckpointError(f"{content.path} has no {name}, which the model has: it is of another model")
        if name not in own:
            raise CheckpointError(f"{content.path} has {name}, which the model has not: it is of another model")
        if (theirs := _describe(saved[name])) != (ours := _describe(own[name])):
            raise CheckpointError(f"{content.path}: {name} is {theirs}, in the model it is {ours}")
    for name, part in wanted.items():
        if name not in content.shared:
            raise CheckpointError(f"{content.path} has no {name}: it was saved without one")
        theirs, ours = _describe_groups(content.shared[name]), _describe_groups(part.state_dict())
        if theirs != ours:
            raise CheckpointError(f"{content.path}: its {name} is of {theirs}, this one of {ours}")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__


def _describe_groups(state: dict[str, Any]) -> str:
    """How many parameters an optimizer has, group by group."""
    return " + ".join(str(len(group["params"])) for group in state.get("param_groups", [])) + " parameters"


def _restore(content: _Content, parts: dict[str, Any]) -> None:
    for name, part in parts.items():
        part.load_state_dict(content.shared[name])
    if content.mine:
        _restore_random(content.mine["random"])


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": _plain(np.random.get_state(legacy=False)),
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore_random(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    np.random.set_state(states["numpy"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _plain(value: Any) -> Any:
    """NumPy's arrays as lists: torch loads no arrays from a file."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
