"""hpcdl train in other modes than synchronous SGD, as a person runs it."""

from __future__ import annotations

import json
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness import TESTS
from harness.launch import run_ranks
from idx import write_images

from hpcdl.cli.main import UsageError, parse
from hpcdl.cli.train_options import choose


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_images(tmp_path_factory.mktemp("data")))


def hpcdl_train(n: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_ranks(n, "-m", "hpcdl", "train", *arguments, timeout_s=60)


def logged(folder: Path, kind: str) -> list[dict[str, float]]:
    return [line for line in map(json.loads, (folder / "log.jsonl").read_text().splitlines()) if line["kind"] == kind]


needs_torch = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")


@needs_torch
@pytest.mark.parametrize(
    ("ranks", "arguments", "words", "remark"),
    [
        (3, "--mode local --every 4", "the mean of all every 4 steps by binary_blocks", "differed by up to"),
        (3, "--mode gossip --lr 0.1", "the mean of pairs every step", "differed by up to"),
        (
            2,
            "--mode elastic --every 2 --accumulate 2 --schedule cosine --precision bf16",
            r"a centre, moving rate 0.9 \(alpha 0.45\) every 2 steps by binary_blocks, Nesterov momentum",
            "differed by up to",
        ),
        (
            3,
            "--mode federated --clients 8 --fraction 0.5 --local-epochs 2 --skew labels:0.5 --drop-out 0.2",
            r"8 clients of \d+ to \d+ samples \(skew labels:0.5\), 50% of them a round, 2 local epochs, 20% drop out",
            r"\d+ rounds; \d+ times a client did not report back",
        ),
        (
            4,
            "--mode pipeline --micro-batches 3",
            "2 replicas x 2 stages, 1f1b with 3 micro-batches, binary_blocks",
            "",
        ),
        (
            2,
            "--mode pipeline --model cnn --stages 1 --split 2 --pipeline-schedule gpipe --algorithm ring",
            "1 replica x 1 stages x 2 parts of layers, gpipe with 2 micro-batches, ring",
            "",
        ),
    ],
    ids=["local", "gossip", "elastic", "federated", "pipeline", "split"],
)
def test_each_mode_learns_and_says_what_it_did(
    data: str, tmp_path: Path, ranks: int, arguments: str, words: str, remark: str
) -> None:
    folder = tmp_path / "log"
    options = ["--data", data, "--epochs", "6", "--batch-size", "8", "--log-dir", str(folder)]
    done = hpcdl_train(ranks, *arguments.split(), *options, "--target-accuracy", "0.9")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    mode = arguments.split()[1]
    assert re.search(f", mode {mode}: {words}, model ", lines[0]), lines[0]
    epochs = logged(folder, "epoch")
    assert [line["epoch"] for line in epochs] == [1, 2, 3, 4, 5, 6] or mode == "federated"
    assert epochs[-1]["epoch"] == 6 and epochs[-1]["loss"] < epochs[0]["loss"] / 2
    assert sum(line.startswith("epoch ") for line in lines) == len(epochs)
    last = lines[-2:] if remark else lines[-1:]
    assert re.search(remark, last[0])
    assert re.fullmatch(r"\S+ s, \d+ steps; largest difference of a parameter between ranks: 0", last[-1])
    if mode == "pipeline":
        whole = int(re.search(r"parameters (\d+)", lines[0])[1])  # type: ignore[index]
        assert whole > 3000  # of all stages


@needs_torch
def test_the_example_of_a_pipeline_lowers_the_loss() -> None:
    done = run_ranks(4, "-m", "hpcdl.run", str(TESTS.parent / "examples" / "pipeline.py"), timeout_s=120)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^epoch \d: loss (\S+) over 4 ranks$", done.stdout, re.MULTILINE)]
    assert len(losses) == len(done.stdout.splitlines()) == 5  # from one rank alone
    assert losses[-1] < losses[0] / 2


@needs_torch
def test_a_slow_rank_holds_up_synchronous_training(data: str, tmp_path: Path) -> None:
    paces = (["--step-time", "40ms"], ["--step-time", "40ms", "--slow-rank", "1", "--jitter", "0.2"])
    speeds = []
    for number, words in enumerate(paces):
        folder = tmp_path / str(number)
        done = hpcdl_train(2, "--data", data, "--epochs", "1", "--log-dir", str(folder), *words)
        assert done.returncode == 0, done.stderr
        (epoch,) = logged(folder, "epoch")
        speeds.append(epoch["images_per_s"])
    assert ", steps of 40.0 ms +- 20% or more, of rank 1 5 x, " in done.stdout.splitlines()[0]
    assert speeds[0] <= 64 / 0.04 and speeds[1] <= 64 / 0.16
    assert speeds[0] > 2 * speeds[1]  # of 5, on a machine that is busy


@needs_torch
@pytest.mark.parametrize(
    ("ranks", "arguments", "line"),
    [
        (2, "--mode elastic --moving-rate 1.4", "--mode elastic: moving_rate 1.4 on 2 ranks is alpha = 0.7, and"),
        (3, "--mode pipeline", "--mode pipeline: 3 ranks are no multiple of 2 stages x 1 parts of a layer"),
        (4, "--mode pipeline --stages 4", "--mode pipeline: 2 layers with parameters make 1 to 2 stages, not 4"),
        (2, "--mode pipeline --micro-batches 1", "--mode pipeline: 1f1b on 2 stages needs 2 micro-batches or more"),
        (2, "--mode federated --clients 500", "--clients 500: 400 samples are for 1 to 400 clients, not 500"),
        (2, "--mode local --slow-rank 2 --step-time 1ms", "--slow-rank 2 is none of 2 ranks, which count from 0"),
        (2, "--mode local --algorithm no", "--algorithm no: "),
    ],
)
def test_what_cannot_begin_is_said_once_with_status_2(data: str, ranks: int, arguments: str, line: str) -> None:
    done = hpcdl_train(ranks, "--data", data, *arguments.split())
    assert done.returncode == 2, done.stdout + done.stderr
    (said,) = (each for each in done.stderr.splitlines() if each.startswith("hpcdl: ") and "note" not in each)
    assert said.startswith(f"hpcdl: {line}")
    assert not done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--every 3", "--every is for --mode elastic or gossip or local, this one is sync"),
        ("--mode gossip --moving-rate 0.5", "--moving-rate is for --mode elastic, this one is gossip"),
        ("--mode local --stages 2", "--stages is for --mode pipeline, this one is local"),
        ("--mode pipeline --clients 5", "--clients is for --mode federated, this one is pipeline"),
        ("--mode local --survive exact", "--mode local takes no --survive exact"),
        ("--mode elastic --compress topk", "--mode elastic takes no --compress topk: it sends no gradients"),
        ("--mode gossip --checkpoint x", "--mode gossip takes no --checkpoint x: a checkpoint holds what all"),
        ("--mode gossip --algorithm ring", "--mode gossip takes no --algorithm ring: it has no all-reduce"),
        ("--mode federated --schedule cosine", "--mode federated takes no --schedule cosine"),
        ("--mode federated --warmup-epochs 2", "--mode federated takes no --warmup-epochs 2"),
        ("--mode federated --accumulate 2", "--mode federated takes no --accumulate 2"),
        ("--mode federated --fraction 0", "--fraction 0 asks no client"),
        ("--mode federated --drop-out 1", "--drop-out 1 leaves no client"),
        ("--mode pipeline --clip-norm 1", "--mode pipeline takes no --clip-norm 1"),
        ("--mode pipeline --precision bf16", "--mode pipeline takes no --precision bf16"),
        ("--mode local --precision fp16", "--mode local has no loss scaling"),
        ("--mode parameter-server --algorithm ring", "--mode parameter-server takes no --algorithm ring"),
        ("--mode backup-workers --wire-dtype float16", "--mode backup-workers takes no --wire-dtype float16"),
        ("--slow-rank 1", "--slow-rank is in proportion to the time of a step: give --step-time"),
        ("--jitter 0.5", "--jitter is in proportion to the time of a step"),
        ("--step-time 1ms --slow-factor 3", "--slow-factor 3 is for a rank: say which by --slow-rank"),
        ("--step-time 1ms --slow-rank 0 --slow-factor 0.5", "--slow-factor 0.5 would make the slow rank fast"),
        ("--survive exact --step-time 1ms", "--survive knows no slow ranks"),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: str, line: str) -> None:
    assert (choose(parse(["train", *arguments.split()])) or "").startswith(line)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ("", "mode", "sync"),
        ("", "step_time", 0.0),
        ("--step-time 20ms", "step_time", 0.02),
        ("--step-time 500us", "step_time", 0.0005),
        ("--step-time 1.5s --slow-rank 0", "slow_factor", 5.0),
        ("--step-time 1.5s", "slow_factor", 1.0),
        ("--mode elastic", "every", 10),
        ("--mode elastic", "moving_rate", 0.9),
        ("--mode gossip", "every", 1),
        ("--mode local --every 3", "every", 3),
        ("--mode federated", "clients", 20),
        ("--mode federated --fraction 0.1", "fraction", 0.1),
        ("--mode federated", "skew", "none"),
        ("--mode pipeline --stages 3", "micro_batches", 6),
        ("--mode pipeline", "stages", 2),
        ("--mode pipeline", "split", 1),
        ("--mode local --algorithm ring", "algorithm", "ring"),
        ("--mode local", "momentum", 0.9),
        ("--mode parameter-server", "momentum", 0.0),
        ("--mode parameter-server", "lr", 0.1),
        ("--mode parameter-server --momentum 0.5", "lr", 0.05),
        ("--mode parameter-server --optimizer adam", "momentum", 0.9),
    ],
)
def test_what_is_left_open_is_chosen(arguments: str, name: str, value: object) -> None:
    chosen = parse(["train", *arguments.split()])
    assert choose(chosen) is None
    assert getattr(chosen, name) == value


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--step-time 20", "20 is no time with a unit, such as 20ms"),
        ("--step-time -1ms", "expected one argument"),
        ("--slow-rank x", "x is no rank"),
        ("--skew labels:-1", "labels takes a finite number above 0"),
        ("--mode async", "invalid choice: 'async'"),
    ],
)
def test_a_word_out_of_range_is_refused(arguments: str, why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        parse(["train", *arguments.split()])
