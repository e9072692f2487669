"""hpcdl train with a server: what it prints, what it refuses, and that it goes on when a worker is killed."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness.launch import run_ranks
from harness.ulfm import IS_OURS, PYTHON, needs_ulfm
from idx import write_images

from hpcdl.cli.main import UsageError, parse
from hpcdl.cli.train_options import choose

needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
has_torch = find_spec("torch") if IS_OURS else [*PYTHON.parents[1].glob("lib/python*/site-packages/torch")]

NUMBER = r"[\d.e-]+"


def loses(test: Any) -> Any:
    """A test that loses ranks: Open MPI starts it."""
    return pytest.mark.usefixtures("open_mpi")(
        needs_ulfm(pytest.mark.skipif(not has_torch, reason="torch is not installed beside Open MPI")(test))
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_images(tmp_path_factory.mktemp("data")))


@needs_torch
def test_a_parameter_server_trains_and_tells_how_stale_gradients_were(data: str, tmp_path: Path) -> None:
    done = run_ranks(
        4,
        *("-m", "hpcdl", "train", "--mode", "parameter-server", "--data", data, "--epochs", "8", "--lr", "0.02"),
        *("--step-time", "2ms", "--log-dir", str(tmp_path), "--target-accuracy", "0.9"),
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    assert "mode parameter-server: 1 server, 3 workers, fetch every 1 and push every 1 steps, model mlp" in lines[0]
    assert ", batch 1 x 32, " in lines[0] and "steps of 2.00 ms or more" in lines[0]
    assert [line.split()[0] for line in lines[10:18]] == [str(epoch) for epoch in range(1, 9)]
    last = re.fullmatch(
        rf"{NUMBER} s, (\d+) updates, (\d+) images/s; the server was busy {NUMBER}% of the time", lines[18]
    )
    assert last and 8 * 400 / 32 <= int(last[1]) <= 8 * 3 * 5
    assert re.fullmatch(rf"staleness {NUMBER} in the mean, \d+ at most; gradients of 0: {NUMBER}%, .*", lines[19])
    assert len(lines) == 20
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in log] == ["start", *["epoch"] * 8, "server"]
    assert sum(value for name, value in log[-1].items() if name.startswith("staleness_")) == int(last[1])


@needs_torch
def test_two_servers_and_every_remedy_go_together(data: str) -> None:
    done = run_ranks(
        4,
        *("-m", "hpcdl", "train", "--mode", "parameter-server", "--data", data, "--epochs", "2", "--servers", "2"),
        *("--fetch-every", "2", "--push-every", "2", "--staleness-bound", "1", "--softsync", "1", "--warm-start", "3"),
        *("--stale-rate", "--compensate", "adaptive", "--schedule", "cosine", "--optimizer", "adam"),
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert (
        "mode parameter-server: 2 servers, 2 workers, fetch every 2 and push every 2 steps, 2 gradients an update, at "
        "most 1 clocks ahead, warm start of 3, rate by staleness, adaptive delay compensation 2, model mlp"
    ) in done.stdout
    assert ", batch 4 x 32, " in done.stdout


@needs_torch
def test_backup_workers_tell_who_was_late(data: str) -> None:
    done = run_ranks(
        4,
        *("-m", "hpcdl", "train", "--mode", "backup-workers", "--data", data, "--epochs", "3", "--target-accuracy"),
        *("0.5", "--step-time", "4ms", "--slow-rank", "2", "--slow-factor", "5"),
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "mode backup-workers: 1 server, 3 workers, 1 of them backups, model mlp" in done.stdout
    assert re.search(r"gradients that came too late: (rank [13]: \d+, )*rank 2: \d+", done.stdout)


@needs_torch
def test_a_training_that_diverges_ends_and_says_so(data: str) -> None:
    done = run_ranks(
        2, "-m", "hpcdl", "train", "--mode", "parameter-server", "--data", data, "--epochs", "9", "--lr", "1e30"
    )
    assert done.returncode == 1
    assert re.search(r"diverged in epoch 1 \(loss (nan|inf), first at update \d+ from rank 1\)", done.stderr), (
        done.stderr
    )


REFUSED = {
    "--mode parameter-server --backups 1": "--backups is for --mode backup-workers, this one is parameter-server",
    "--mode backup-workers --servers 2": "--servers is for --mode parameter-server, this one is backup-workers",
    "--softsync 2": "--softsync is for --mode parameter-server, this one is sync",
    "--mode gossip --worker-timeout 3": "--worker-timeout is for --mode parameter-server or backup-workers",
    "--mode parameter-server --accumulate 2": "take --push-every N for --accumulate 2",
    "--mode parameter-server --optimizer lars": "LARS needs whole ones",
    "--mode parameter-server --compensation 2": "--compensation is for --compensate constant or adaptive",
    "--mode backup-workers --survive exact": "--mode backup-workers takes no --survive exact",
    "--mode parameter-server --algorithm ring": "takes no --algorithm ring",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_does_not_go_together_is_refused(line: str) -> None:
    problem = choose(parse(["train", *line.split()]))
    assert problem is not None and REFUSED[line] in problem


@pytest.mark.parametrize("line", ["--servers 0", "--staleness-bound -1", "--backups x", "--compensate much"])
def test_what_is_no_number_is_refused(line: str) -> None:
    with pytest.raises(UsageError):
        parse(["train", "--mode", "parameter-server", *line.split()])


@needs_torch
@pytest.mark.parametrize(
    ("ranks", "line", "words"),
    [
        (1, "parameter-server", "of 1 rank --servers 1 leaves no rank to work: start at least 2"),
        (2, "parameter-server --servers 2", "of 2 ranks --servers 2 leaves no rank to work: start at least 3"),
        (3, "parameter-server --softsync 3", "--softsync 3: there are 2 workers"),
        (2, "backup-workers", "--backups 1: of 1 workers 0 at most"),
    ],
)
def test_too_few_ranks_are_refused_once(ranks: int, line: str, words: str, data: str) -> None:
    done = run_ranks(ranks, "-m", "hpcdl", "train", "--data", data, "--mode", *line.split())
    assert done.returncode == 2
    assert done.stderr.count(words) == 1, done.stderr


# ---- lost workers ----------------------------------------------------------------------------------------------------

KILLS = """
import os, signal, sys
import hpcdl.torch.train as train
steps, cross_entropy = 0, train.cross_entropy
from mpi4py import MPI
def counting(scores, labels):
    global steps
    steps += 1
    if MPI.COMM_WORLD.rank == WHO and steps == 12:
        os.kill(os.getpid(), signal.SIGNAL)
    return cross_entropy(scores, labels)
train.cross_entropy = counting
from hpcdl.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def strike(who: int, kind: str, *arguments: str, options: tuple[str, ...] = (), ranks: int = 4) -> Any:
    program = KILLS.replace("WHO", str(who)).replace("SIGNAL", kind)
    return run_ranks(ranks, "-c", program, "train", *arguments, options=options, timeout_s=150)


@loses
@pytest.mark.parametrize("mode", ["parameter-server", "backup-workers"])
def test_a_killed_worker_is_named_and_the_others_go_on(mode: str, data: str) -> None:
    done = strike(
        *(2, "SIGKILL", "--mode", mode, "--data", data, "--epochs", "6", "--step-time", "2ms", "--lr", "0.02"),
        *("--target-accuracy", "0.5"),
        options=("--with-ft", "ulfm"),
    )
    assert "rank 2 was lost: the others go on without it" in done.stderr, (done.stdout, done.stderr)
    lines = done.stdout.splitlines()
    assert lines[-1] == "rank 2 was lost"
    assert [line.split()[0] for line in lines if re.match(r" +\d+ +\d", line)] == [str(each) for each in range(1, 7)]
    assert "Traceback" not in done.stderr


@loses
def test_where_no_worker_is_left_the_training_has_failed(data: str) -> None:
    done = strike(
        *(1, "SIGKILL", "--mode", "parameter-server", "--data", data, "--epochs", "400"),
        options=("--with-ft", "ulfm"),
        ranks=2,
    )
    assert "hpcdl: no worker is left: " in done.stderr, (done.stdout, done.stderr)
    assert done.stdout.splitlines()[-1] == "rank 1 was lost"


@loses
def test_a_training_ends_with_its_server_and_each_worker_says_so(data: str) -> None:
    """Rank 0 evaluates once an epoch, and is killed in that."""
    done = strike(
        *(0, "SIGKILL", "--mode", "parameter-server", "--data", data, "--epochs", "400"),
        options=("--with-ft", "ulfm"),
        ranks=3,
    )
    assert done.stderr.count("rank 0, a server, is lost, and the training with it") == 2, (done.stdout, done.stderr)


@needs_torch
def test_a_frozen_worker_is_given_up_and_the_job_ends(data: str) -> None:
    done = strike(
        *(3, "SIGSTOP", "--mode", "parameter-server", "--data", data, "--epochs", "6", "--step-time", "2ms"),
        *("--lr", "0.02", "--worker-timeout", "2"),
    )
    assert "rank 3 was silent for 2 s: the others go on without it" in done.stderr, (done.stdout, done.stderr)
    assert done.stdout.splitlines()[-1] == "rank 3 was silent for 2 s"
